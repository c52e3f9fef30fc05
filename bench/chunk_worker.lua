-- SPDX-License-Identifier: BSD-3-Clause
-- One training run in a process of its own. bench/chunk_lib.lua controls it line by line. The first line of its input
-- is the setting (JSON: model, options, config, batch, seq). Each later line is a command. An answer is a line that
-- begins with "@". Settings that differ only in memory have the same batches and the same initial parameters.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local bound = require "bench.bound_lib"
local cjson = require "cjson"
local gpt2 = require "models.gpt2"
local ffi, C = ps.ffi, ps.C

local function answer(value)
  io.stdout:write("@", cjson.encode(value), "\n")
  io.stdout:flush()
end

local setting = cjson.decode(io.read("*l"))
local model, optimizer, micro
local taken = 0                             -- number of steps that were run

local function begin()
  local config = setting.config
  config.plan_print = config.plan_print or false
  micro = config.gradient_accumulation_steps or 1
  ps.manual_seed(7)
  model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
    return gpt2.new(setting.model, setting.options)
  end }
end

local function batch(number)
  ps.manual_seed(1000 + number)
  return ps.randint(0, model.config.vocab_size, { setting.batch, setting.seq }, { dtype = "int32" })
end

local stats, tier = ffi.new("ps_engine_stats"), ffi.new("ps_tier_info")

--- Returns the engine's counters since the engine was opened. Bytes are counted separately for each level. Level i is
--- the pair of tier i and the next lower tier, with i from 1.
local function counters()
  local all = { up = {}, down = {}, wait_s = 0, waits = 0, unplanned = 0 }
  if C.ps_engine_is_open(ps.ctx) == 0 then return all end
  ps.check(C.ps_engine_stats_get(ps.ctx, stats))
  for _, key in ipairs { "wait_s", "waits", "unplanned" } do all[key] = tonumber(stats[key]) end
  for t = 1, C.ps_engine_tier_count(ps.ctx) - 1 do
    ps.check(C.ps_engine_tier_get(ps.ctx, t, tier))
    all.up[t], all.down[t] = tonumber(tier.bytes_up), tonumber(tier.bytes_down)
  end
  return all
end

local commands = {}

--- Runs one step. Returns the time in seconds, the losses as text with all digits, and the increase of the counters.
--- Inputs are copied to the device before the step, and losses are copied back after the step, because a script's
--- copies wait for copies of chunks.
function commands.step()
  local inputs, losses = {}, {}
  taken = taken + 1
  for i = 1, micro do inputs[i] = batch(taken * micro + i):to(setting.config.device or "cpu"):keep() end
  local before, t = counters(), ps.now()
  optimizer:zero_grad()
  local t_forward, t_backward, w_forward, w_backward = 0, 0, 0, 0
  for i = 1, micro do
    local at, waited = ps.now(), counters().wait_s
    local loss = model(inputs[i], inputs[i])
    local middle, waited_then = ps.now(), counters().wait_s
    model:backward(loss)
    t_forward, t_backward = t_forward + middle - at, t_backward + ps.now() - middle
    w_forward, w_backward = w_forward + waited_then - waited, w_backward + counters().wait_s - waited_then
    losses[i] = loss:keep()
    optimizer:step()
  end
  local seconds, after = ps.now() - t, counters()
  for i, x in ipairs(inputs) do
    x:release()
    local value = losses[i]:item()
    losses[i]:release()
    losses[i] = ("%.17g"):format(value)
  end
  local out = { seconds = seconds, forward_s = t_forward, backward_s = t_backward, losses = losses,
    forward_wait_s = w_forward, backward_wait_s = w_backward, up = {}, down = {} }
  for _, key in ipairs { "wait_s", "waits", "unplanned" } do out[key] = after[key] - before[key] end
  for i in ipairs(after.up) do out.up[i], out.down[i] = after.up[i] - before.up[i], after.down[i] - before.down[i] end
  return out
end

--- Returns a hash over the bits of all parameters. If a parameter has an fp32 master, the master is hashed instead.
function commands.hash()
  local state, names = model:state_dict(), {}
  for name in pairs(state) do names[#names + 1] = name end
  table.sort(names)
  local h, buffer, room = 0xcbf29ce484222325ULL, nil, 0
  for _, name in ipairs(names) do
    local t = state[name]:to("cpu"):contiguous()
    local n = tonumber(C.ps_tensor_nbytes(t))
    if n > room then
      buffer, room = ffi.new("uint32_t[?]", n / 4 + 1), n
    end
    ps.check(C.ps_tensor_read(t, buffer, n))
    for i = 0, n / 4 - 1 do h = bit.bxor(h, buffer[i]) * 0x100000001b3ULL end
  end
  return { hash = tostring(h) }
end

--- Returns how Adam's updates are divided between host and device, and their predicted time.
function commands.split()
  local split = inner(model).plan.adam_split
  return { count = split.count, units = inner(model).built.units, seconds = split.seconds, link = split.link,
    host = split.host, device = split.device }
end

--- Returns the number of bytes in chunks, and the number of parameters.
function commands.chunks()
  local info, nbytes, used = ffi.new("ps_chunk_info"), 0, 0
  for id = 0, C.ps_engine_chunk_count(ps.ctx) - 1 do
    ps.check(C.ps_engine_chunk_get(ps.ctx, id, info))
    nbytes, used = nbytes + tonumber(info.nbytes), used + tonumber(info.used_nbytes)
  end
  return { count = C.ps_engine_chunk_count(ps.ctx), nbytes = nbytes, used = used, numel = model:num_parameters() }
end

--- Returns the trace of the last step for bench/bound_lib.lua, the number of bytes that chunks can use on the first
--- tier, and the number of bytes that other tensors use on the first tier.
function commands.trace()
  local trace, capacity, other = bound.trace_of(inner(model))
  return { trace = trace, capacity = capacity, other = other }
end

local ok, problem = pcall(begin)
answer(ok and { ready = true, threads = ps.threads() } or { error = tostring(problem) })
for line in io.lines() do
  if line == "quit" then break end
  local done, result = pcall(commands[line])
  answer(done and result or { error = tostring(result) })
end
if ok then model:close() end
