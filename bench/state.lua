-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/state.lua [--params 20e6] [--rounds 5] [--no-muon]
-- Measures the state and the time of optimizers. The last line is one JSON object:
--   bytes_per_parameter  size of all chunks in bytes per parameter, in bf16. The keys are "<optimizer> <master> <how>".
--                        <how> is inside (updates inside backward), clip (one micro-batch, clipping) or accumulate (two
--                        micro-batches).
--   update_over_probe    bytes per second of the update divided by bytes per second of the engine's probe. The keys are
--                        "<optimizer> <master>". The probe reads four fp32 streams and writes three of them in place.
--                        Update and probe alternate, and the figures are medians.
--   same_bits            true if three steps yield the same bits in plain memory, in chunks, under two budgets and with
--                        a disk. The keys are optimizers.
--   muon_over_products   seconds of the update of GPT-2 124M's matrices divided by the seconds of its products alone.
--                        The keys are types. The seconds of the products are computed from the rate of one whole
--                        product of the same shapes. Symmetric products count as half.
local ps = require "ps"
local ffi = require "ffi"
local argparse = require "argparse"
local cjson = require "cjson"
local optimizers = require "ps.optimizers"
local updates = require "ps.optimizers.update"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local nn = ps.nn

local parser = argparse("bench/state.lua", "Measures the state and the time of optimizers.")
whole(parser:option("--params", "number of parameters of the timed update", "20e6"), 4096)
whole(parser:option("--rounds", "rounds in which update and probe alternate", "5"), 1)
parser:option("--disk", "a folder for the disk tier", "/tmp")
parser:flag("--no-muon", "do not time Muon")
local args = command_line.parse(parser)

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

-- -- bytes ----------------------------------------------------------------------------------------------------------
local HOW = { inside = { 1, 0 }, clip = { 1, 1 }, accumulate = { 2, 1 } }

local function bytes_of(kind, master, how)
  local micros, clipping = HOW[how][1], HOW[how][2]
  local model = ps.initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
    optimizer = { type = kind }, memory = { master = master }, gradient_accumulation_steps = micros,
    gradient_clipping = clipping }, model_func = function()
      return nn.Sequential(nn.Linear(1024, 4096, { bias = false }), nn.Linear(4096, 1024, { bias = false }))
    end }
  local built = require("ps.nn.handle").of(model).built
  local bytes = tonumber(built.state_bytes) / built.numel
  model:close()
  return bytes
end

-- -- time -----------------------------------------------------------------------------------------------------------
-- Creates the tensors of an update. Returns the tensors, and the number of bytes that the update reads and writes.
local function operands(made, remainder, shape)
  local numel = 1
  for _, size in ipairs(shape) do numel = numel * size end
  local param = ps.randn(shape, { dtype = "bf16" }):keep()
  local master = remainder and ps.zeros({ 2 * numel }, { dtype = "uint8" }):keep() or param:to "fp32":keep()
  local list = { param, master, ps.randn(shape, { dtype = "bf16" }):keep() }
  local bytes = numel * (remainder and 2 * 2 + 2 * 2 + 2 or 2 + 2 * 4 + 2)
  for _, state in ipairs(optimizers.states_for(made.states, shape)) do
    local t = ps.zeros(state.shape and state.shape(shape) or shape, { dtype = state.dtype }):keep()
    list[#list + 1] = t
    bytes = bytes + 2 * tonumber(ps.C.ps_tensor_nbytes(t))
  end
  for k = #list + 1, 3 + optimizers.takes(made) do list[k] = master end
  return list, bytes
end

local function group_of(kind)
  local made, group = optimizers.of(kind), { kind = kind }
  for key, value in pairs(made.defaults) do group[key] = value end
  for key, value in pairs(made.fixed or {}) do group[key] = value end
  for key, value in pairs(made.counters or {}) do group[key] = value end
  return group
end

local function probe(nbytes)
  local out = ffi.new("double[1]")
  ps.check(ps.C.ps_probe_bandwidth(nbytes, 4, 3, 1, 3, out))
  return out[0]
end

local function over_probe(kind, remainder)
  local made, group, ratios = optimizers.of(kind), group_of(kind), {}
  local list, bytes = operands(made, remainder, { args.params })
  for round = 0, args.rounds do
    local times = {}
    for i = 1, 3 do
      local began = ps.now()
      updates.run(list, group, round * 3 + i, 1)
      times[i] = ps.now() - began
    end
    if round > 0 then ratios[round] = bytes / median(times) / probe(args.params * 16) end
  end
  for _, t in ipairs { list[1], list[2], list[3] } do t:release() end
  return median(ratios)
end

-- -- bits -----------------------------------------------------------------------------------------------------------
local function hash(t)
  local out = ffi.new("uint64_t[2]")
  ps.check(ps.C.ps_tensor_hash(t, out))
  return tostring(out[0]) .. tostring(out[1])
end

local function trained(kind, memory)
  ps.manual_seed(5)
  local model, opt = ps.initialize { quiet = true, model_func = function()
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 33))
  end, config = { optimizer = { type = kind, params = { lr = 1e-2 } }, memory = memory, plan_print = false,
    bf16 = { enabled = true }, chunk_size = 2048 } }
  for _ = 1, 3 do
    model:backward((model(ps.randn({ 6, 48 }):to "bf16"):to "fp32"):pow(2):mean())
    opt:step()
  end
  local list = {}
  for name, t in pairs(model:state_dict()) do list[#list + 1] = name .. hash(t) end
  table.sort(list)
  model:close()
  collectgarbage()
  return table.concat(list)
end

local function same_bits(kind)
  local disk, first = { path = args.disk, limit = 2 ^ 25 }, trained(kind, "plain")
  for _, memory in ipairs { { kind = "chunk" }, { host = 500000, disk = disk }, { host = 400000, disk = disk } } do
    if trained(kind, memory) ~= first then return false end
  end
  return true
end

-- -- Muon -----------------------------------------------------------------------------------------------------------
local SHAPES = { { 2304, 768 }, { 768, 768 }, { 3072, 768 }, { 768, 3072 } }      -- the shapes in each of 12 blocks

local function best(n, fn)
  local least = math.huge
  for _ = 1, n do
    local began = ps.now()
    fn()
    least = math.min(least, ps.now() - began)
  end
  return least
end

local function muon_over_products(dtype)
  local made, group, update, products = optimizers.of "Muon", group_of "Muon", 0, 0
  for _, shape in ipairs(SHAPES) do
    local rows, cols = math.min(shape[1], shape[2]), math.max(shape[1], shape[2])
    local param = ps.randn(shape, { dtype = dtype })
    local master = dtype == "fp32" and param or param:to "fp32"
    local list = { param, master, ps.randn(shape, { dtype = dtype }), ps.zeros(shape) }
    assert(optimizers.takes(made) == 1)
    update = update + best(args.rounds, function() updates.run(list, group, 1, 1) end)
    local x, gram = ps.randn({ rows, cols }, { dtype = dtype }), ps.randn({ rows, rows }, { dtype = dtype })
    local t = x:t():contiguous()
    products = products + group.ns_steps * (best(args.rounds, function() return x:matmul(t) end) / 2
      + best(args.rounds, function() return gram:matmul(gram) end) / 2
      + best(args.rounds, function() return gram:matmul(x) end))
  end
  return update / products
end

print(ps.device("cpu").description)
ps.manual_seed(0)
local result = { params = args.params, threads = ps.threads(), bytes_per_parameter = {}, update_over_probe = {},
  same_bits = {}, muon_over_products = {} }
for _, kind in ipairs(optimizers.names) do
  for _, master in ipairs { "full", "remainder" } do
    for how in pairs(HOW) do
      local key = ("%s %s %s"):format(kind, master, how)
      result.bytes_per_parameter[key] = bytes_of(kind, master, how)
    end
  end
  result.same_bits[kind] = same_bits(kind)
end
ps.no_grad(function()
  for _, kind in ipairs(optimizers.names) do
    if not optimizers.of(kind).whole then
      for _, remainder in ipairs { false, true } do
        result.update_over_probe[kind .. (remainder and " remainder" or " full")] = over_probe(kind, remainder)
      end
    end
  end
  if not args.no_muon then
    for _, dtype in ipairs { "fp32", "bf16" } do result.muon_over_products[dtype] = muon_over_products(dtype) end
  end
end)
print(cjson.encode(result))
