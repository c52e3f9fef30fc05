-- SPDX-License-Identifier: BSD-3-Clause
-- The placement of Adam if the optimizer's state does not fit the device: the split follows the given rates, respects
-- the settings that limit it and the budgets, and changes no bit.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local ffi = require "ffi"
local nn = require "ps.nn"
local ranks_lib = require "spec.ranks_lib"
local F, C = ps.F, ps.C

local check = require "spec.check_lib"
local fails, bytes, run = check.fails, check.bytes, check.run

local function with(...)
  local all = {}
  for i = 1, select("#", ...) do for key, value in pairs((select(i, ...))) do all[key] = value end end
  return all
end

local Net = nn.class("HybridNet")
function Net:init(options)
  local width = options and options.width or 64
  self.tokens = nn.Embedding(options and options.rows or 256, width, { std = 0.3 })
  self.h = nn.ModuleList()
  for _ = 1, 6 do self.h:append(nn.Linear(width, width)) end
  self.out = nn.Linear(width, 256)
end
function Net:forward(x)
  local h = self.tokens(x)
  for _, layer in self.h:each() do h = F.gelu(layer(h)) end
  return F.cross_entropy(self.out(h):reshape(-1, 256), x:reshape(-1))
end

--- Trains a model. Returns the losses and the final values as bytes, and the result of `look`, which is called before
--- the engine closes.
local function train(config, look, make, batch)
  ps.manual_seed(7)
  local cfg = with({ optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0.1 } }, plan_print = false,
    chunk_size = 4096 }, config)
  if cfg.memory == "plain" then cfg.chunk_size = nil end
  local model, optimizer = ps.initialize { model_func = make or function() return Net() end, config = cfg,
    quiet = true }
  local result, seen = {}, nil
  local ok, err = pcall(function()
    for step = 1, 4 do
      ps.manual_seed(100 + step)
      for _ = 1, cfg.gradient_accumulation_steps or 1 do
        local x = ps.randint(0, 256, batch or { 2, 8 }, { dtype = "int32" })
        local loss = model(x)
        result[#result + 1] = bytes(loss)
        model:backward(loss)
        optimizer:step()
      end
    end
    for name, t in pairs(model:state_dict()) do result[name] = bytes(t) end
    seen = look and look(model)
  end)
  model:close()
  if not ok then error(err, 0) end
  return result, seen
end

local tier = ffi.new("ps_tier_info")

--- Returns the split, and the largest fraction of its budget that each tier held.
local function split(model)
  local engine = inner(model)
  local placed = engine.plan.adam_split
  local seen = { count = placed.count, resident = placed.resident, units = engine.built.units,
    within = true, on = 0, numel = 0 }
  for unit, numel in ipairs(engine.built.unit_numel) do
    seen.numel, seen.on = seen.numel + numel, seen.on + (placed.on[unit] and numel or 0)
  end
  for t = 0, C.ps_engine_tier_count(ps.ctx) - 1 do
    ps.check(C.ps_engine_tier_get(ps.ctx, t, tier))
    if tier.budget > 0 and tier.peak > tier.budget then seen.within = false end
  end
  return seen
end

-- a link that is fast enough
local FAST = { up = 1e15, down = 1e15, host_adam = 1e6, device_adam = 1e12, at_once = 1 }
                                                                                                -- using
local SLOW = { up = 1e6, down = 1e6, host_adam = 1e12, device_adam = 1e12, at_once = 1 }  -- a link that is too slow
local EVEN = { up = 12e9, down = 12e9, host_adam = 1e9, device_adam = 1e12, at_once = 1 }
local TIGHT = { device = "sim", memory = { device = 400 * 1024 }, use_cpu_embedding = false,
  client = { mem_tracer = { margin_use_ratio = 0.3 } } }
local BF16 = { bf16 = { enabled = true } }

before_each(function() ps.manual_seed(1) end)

describe("the split of updates", function()
  it("follows the rates: state moves to the device if the link is fast, and stays if it is slow", function()
    local _, fast = train(with(TIGHT, BF16, { rates = FAST }), split)
    local _, slow = train(with(TIGHT, BF16, { rates = SLOW }), split)
    local _, even = train(with(TIGHT, BF16, { rates = EVEN }), split)
    assert(slow.resident > 0 and slow.resident < slow.units / 2, slow.resident .. " of " .. slow.units)
    assert.equal(slow.resident, slow.count)
    assert(fast.count > fast.units - 2, fast.count .. " of " .. fast.units)
    assert(even.count > slow.count and even.count < fast.count, ("%d, %d, %d"):format(slow.count, even.count,
      fast.count))
    assert(fast.within and slow.within and even.within)
  end)

  it("is printed with its reasons", function()
    local forecasts = require "ps.engine.plan.forecast"
    local function text(model) return table.concat(forecasts.lines(inner(model), inner(model).plan.forecast), "\n") end
    local _, said = train(with(TIGHT, BF16, { rates = EVEN }), text)
    assert.matches("Adam    on the device for %d+ of %d+ chunks, on the host for the others\n"
      .. " +copies take [%d%.]+ ms per step, updates take [%d%.]+ ms of the host "
      .. "%(all on the host: [%d%.]+ ms, [%d%.]+ ms%): "
      .. "[%a ]+ the pace\n +at 1 G parameters/s on the host, 1e%+03 on the device, 12 GB/s up, 12 down, 100 %% at "
      .. "once %(from the configuration%)", said)
  end)

  it("respects the settings that limit it", function()
    local function count(more)
      local _, seen = train(with(TIGHT, BF16, { rates = FAST }, more), split)
      assert(seen.within)
      return seen.count, seen.on / seen.numel
    end
    local none = { lr = 1e-2, weight_decay = 0.1, use_hybrid_adam = false }
    assert.equal(0, (count { optimizer = { type = "AdamW", params = none } }))
    assert.equal(0, (count { client = { mem_tracer = { margin_use_ratio = 0 } } }))
    assert.equal(0, (count { zero_optimization = { offload_optimizer = { device = "cpu" } } }))
    local _, share = count { zero_optimization = { offload_optimizer = { device = "cpu", ratio = 0.7 } } }
    assert(share > 0.2 and share < 0.37, share)
    local _, all = train(with(BF16, { device = "sim", rates = SLOW, memory = { device = "64MiB" },
      use_cpu_embedding = false }), split)
    assert.equal(all.units, all.count)                   -- they fit
  end)

  it("has plain memory's bits, within the budgets", function()
    local disk = { path = os.getenv("TMPDIR") or "/tmp", limit = "16MiB" }
    local variants = {
      { { device = 600 * 1024 }, {} },
      { { device = 400 * 1024 }, BF16 },
      { { device = 400 * 1024 }, with(BF16, { gradient_clipping = 0.5 }) },
      { { device = 600 * 1024 }, with(BF16, { gradient_accumulation_steps = 2 }) },
      { { device = 400 * 1024 }, { fp16 = { enabled = true } } },
      { { device = 400 * 1024 }, with(BF16, { overlap_optimizer = true }) },
      { { device = 400 * 1024, host = 500 * 1024, disk = disk }, BF16 },
    }
    for i, variant in ipairs(variants) do
      local want = train(with(variant[2], { memory = "plain" }))
      for name, rates in pairs { fast = FAST, slow = SLOW, even = EVEN } do
        local got, seen = train(with(TIGHT, variant[2], { memory = variant[1], rates = rates }), split)
        assert(seen.within, ("variant %d, %s: over the budget"):format(i, name))
        if name == "fast" then assert(seen.count > seen.resident, ("variant %d: %d"):format(i, seen.count)) end
        assert.same(want, got)
      end
    end
  end)
end)

local SCRIPT = [[
local ps = require "ps"
local nn, F = require "ps.nn", ps.F
ps.init_distributed { seed = 0 }
local stage, fast, mine = tonumber(os.getenv "STAGE"), os.getenv "FAST" == "1", ps.rank() == 0
local Net = nn.class("Net")
function Net:init()
  self.table = nn.Embedding(1024, 64)
  self.h = nn.ModuleList()
  for _ = 1, 6 do self.h:append(nn.Linear(64, 64)) end
  self.out = nn.Linear(64, 256)
end
function Net:forward(x, y)
  local h = self.table(x)
  for _, layer in self.h:each() do h = F.gelu(layer(h)) end
  return F.cross_entropy(self.out(h):reshape(-1, 256), y:reshape(-1))
end
local model, optimizer = ps.initialize { model_func = function() return Net() end, quiet = true, config = {
  device = "sim", chunk_size = 4096, bf16 = { enabled = true }, plan_print = false,
  zero_optimization = { stage = stage }, memory = { device = (mine and 600 or 800) * (stage == 0 and 2 or 1) * 1024 },
  rates = { up = fast and 1e15 or 1e6, down = fast and 1e15 or 1e6, host_adam = fast and 1e6 or (mine and 1e9 or 1e10),
    device_adam = 1e12, at_once = mine and 1 or 0.5 } } }
for step = 1, 3 do
  ps.manual_seed(10 * step + ps.rank())
  local x = ps.randint(0, 256, { 2, 8 }, { dtype = "int32" })
  local loss = model(x, x)
  model:backward(loss)
  optimizer:step()
end
local state, names, sum = model:state_dict(), {}, 0
for name in pairs(state) do names[#names + 1] = name end
table.sort(names)
for _, name in ipairs(names) do sum = sum + state[name]:to("fp64"):abs():sum():item() end
local engine = require("ps.nn.handle").of(model)
print(("%.17g %d %d %s %g %g"):format(sum, engine.plan.adam_split.count, engine.plan.adam_split.resident,
  model.module.table.weight:device(), engine.adam_rates.host_adam, engine.adam_rates.at_once))
model:close()
]]

describe("ranks", function()
  it("split their own units, by equal rates, and keep their numbers", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local folder = ranks_lib.folder()
    local ok, err = pcall(function()
      for _, stage in ipairs { 0, 2 } do
        local sums, counts = {}, {}
        for _, fast in ipairs { 1, 0 } do
          local out = ranks_lib.run(folder, 2, SCRIPT, ("STAGE=%d FAST=%d"):format(stage, fast))
          local where = {}
          for rank = 0, 1 do
            local text = out[rank].text
            assert(out[rank].code == 0, text)
            local sum, count, resident, device, host_adam, at_once =
              text:match("(%S+) (%d+) (%d+) (%S+) (%S+) (%S+)\n$")
            assert.equal(sums[rank] or sum, sum)
            sums[rank], where[rank] = sum, device
            counts[fast] = (counts[fast] or 0) + tonumber(count)
            if fast == 0 then assert.equal(resident, count) end
            assert.equal(fast == 1 and "1e+06" or "1e+09", host_adam)
            assert.equal("0.5", at_once)
          end
          assert.equal(where[0], where[1])
        end
        if stage == 0 then assert.equal(sums[0], sums[1]) end
        assert(counts[1] > counts[0], ("stage %d: %d, %d"):format(stage, counts[1], counts[0]))
      end
    end)
    ranks_lib.remove(folder)
    if not ok then error(err, 0) end
  end)
end)

describe("rates", function()
  it("are measured once per process and device", function()
    local r = ps.device_rates "sim"
    for _, key in ipairs { "host_adam", "device_adam", "up", "down" } do
      assert(r[key] > 1e3 and r[key] < 1e15, key .. " " .. r[key])
    end
    assert(r.at_once >= 0 and r.at_once <= 1)
    assert(r.seconds > 0)
    assert(rawequal(r, ps.device_rates "sim"))
    assert.matches("G parameters/s on the host, .* GB/s up, .* down, .* at once %(measured in %d+ ms%)", tostring(r))
    fails(function() ps.device_rates "cpu" end, "the first must be an accelerator")
  end)

  it("complete the configuration, and leave the memory unchanged", function()
    local measured, before = ps.device_rates "sim", ps.memory_available "sim"
    local out = ffi.new("ps_rates")
    ps.check(C.ps_rates_measure(ps.ctx, ps.device_index "sim", ps.device_index "cpu", 2 ^ 20, out))
    assert.equal(before, ps.memory_available "sim")
    assert(tonumber(out.numel) * 14 < 2 ^ 20)
    local _, seen = train(with(TIGHT, BF16, { rates = { up = "3GB" } }), function(model)
      local found = inner(model).adam_rates
      return { found.up, found.down, found.host_adam, tostring(found) }
    end)
    assert.same({ 3e9, measured.down, measured.host_adam }, { unpack(seen, 1, 3) })
    assert.matches("partly from the configuration", seen[4])
  end)

  it("are refused if they are invalid", function()
    fails(function() train(with(TIGHT, { rates = { up = 0 } })) end, "rates.up")
    fails(function() train(with(TIGHT, { rates = { host_adam = -1 } })) end, "rates.host_adam")
    fails(function() train(with(TIGHT, { rates = { at_once = 2 } })) end, "rates.at_once")
    fails(function() train(with(TIGHT, { rates = { link = 2 } })) end, "rates.link")
  end)
end)

describe("a table of embeddings", function()
  local function big() return Net { rows = 4096 } end      -- 1 MiB in fp32; lookups copy 4 KiB
  local function where(model) return model.module.tokens.weight:device() end
  local AUTO = { device = "sim", use_cpu_embedding = "auto", rates = SLOW }

  it("stays on the device if all of it fits, and is placed on the host if it would move", function()
    local want = train({ memory = "plain" }, nil, big)
    local got, at = train(with(AUTO, { memory = { device = "64MiB" } }), where, big)
    assert.equal("sim", at)
    assert.same(want, got)
    got, at = train(with(AUTO, { memory = { device = 2500 * 1024 } }), where, big)
    assert.equal("cpu", at)
    assert.same(want, got)
  end)

  it("stays if lookups would copy as many bytes as the table has", function()
    local function small() return Net { rows = 256 } end   -- 64 KiB in fp32; lookups copy 128 KiB
    local _, at = train(with(AUTO, { memory = { device = 3000 * 1024 } }), where, small, { 16, 32 })
    assert.equal("sim", at)
  end)
end)

describe("budgets that come from ratios", function()
  it("are shares of the device's free memory, and the rest of it stays free", function()
    local text = run("OMP_NUM_THREADS=1 PS_SIM_MEMORY=6MiB", [[
local ps = require "ps"
local nn, F, C = require "ps.nn", ps.F, ps.C
local mine = ps.zeros({ 256, 1024 }, { device = "sim" }):keep()       -- 1 MiB, held before
local others = ps.ffi.new "ps_tier_info"
local free = ps.memory_available "sim"
local Net = nn.class("Net")
function Net:init()
  self.h = nn.ModuleList()
  for _ = 1, 8 do self.h:append(nn.Linear(256, 256)) end
end
function Net:forward(x)
  for _, layer in self.h:each() do x = F.gelu(layer(x)) end
  return x:square():mean()
end
local model, optimizer = ps.initialize { model_func = function() return Net() end, quiet = true, config = {
  device = "sim", chunk_size = 65536, plan_print = false, overlap_optimizer = true,
  client = { mem_tracer = { overall_gpu_mem_ratio = 0.75 } } } }
local least = free
for _ = 1, 4 do
  local loss = model(ps.randn({ 16, 256 }))
  least = math.min(least, ps.memory_available "sim")
  model:backward(loss)
  least = math.min(least, ps.memory_available "sim")
  optimizer:step()
  least = math.min(least, ps.memory_available "sim")
end
ps.check(C.ps_engine_tier_get(ps.ctx, 0, others))
print(free, tonumber(others.budget), tonumber(others.peak), least,
  require("ps.nn.handle").of(model).built.state_bytes, mine:size(0))
model:close()
]])
    local free, budget, peak, least, state = text:match("^(%d+)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t256\n$")
    assert(free, text)
    free, budget, peak = tonumber(free), tonumber(budget), tonumber(peak)
    least, state = tonumber(least), tonumber(state)
    local held = 6 * 2 ^ 20 - free
    assert(held >= 2 ^ 20, held)
    assert.equal(math.floor(0.75 * (free + held)), budget)
    assert(state > budget, state .. " of " .. budget)             -- chunks move
    assert(peak <= budget, peak .. " of " .. budget)
    assert(peak > 0.8 * budget, peak .. " of " .. budget)
    assert(least >= 0.25 * (free + held), least .. " of " .. free + held)
  end)
end)
