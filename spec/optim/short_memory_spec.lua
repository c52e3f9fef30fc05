-- SPDX-License-Identifier: BSD-3-Clause
-- A step whose allocation fails, for each allocation of the step in turn. Each optimizer then has the bits of a step
-- without a failure: because the library repeats the op, or because nothing changed and the script repeats the step.
local ps = require "ps"
local ffi = require "ffi"
local optimizers = require "ps.optimizers"
local C, nn = ps.C, ps.nn

local hash_out = ffi.new("uint64_t[2]")
local function hash(t)
  ps.check(C.ps_tensor_hash(t:contiguous():to("cpu"), hash_out))
  return ("%s %s"):format(tostring(hash_out[0]), tostring(hash_out[1]))
end

-- Returns the hashes of the tensors in a table and in the tables inside it, sorted by their keys.
local function hashes(of, prefix, list)
  list = list or {}
  for key, value in pairs(of) do
    local name = prefix .. "." .. tostring(key)
    if ps.is_tensor(value) then list[#list + 1] = name .. " " .. hash(value)
    elseif type(value) == "table" then hashes(value, name, list) end
  end
  table.sort(list)
  return list
end

-- make() returns a function that makes a step, a function that returns the state's hashes, and a function that frees
-- everything. Compares the state after a step in which allocation 1, 2, ... fails with the state after a step without a
-- failure. Returns the number of failures and the number of those after which the script repeated the step.
local function compare(make, what)
  local function run(nth)
    ps.manual_seed(3)
    local step, state, close = make()
    ps.collect()
    if nth then C.ps_test_fail_alloc(nth, 1) end
    local ok = pcall(step)
    local hit = nth and C.ps_test_fail_alloc_left() < 0
    C.ps_test_fail_alloc(-1, 0)
    if not ok then step() end
    local found = state()
    close()
    return found, hit, ok
  end
  local want, nth, again = run(), 0, 0
  while true do
    local got, hit, ok = run(nth)
    if not hit then return nth, again end
    assert.same(want, got, ("%s, allocation %d, %s"):format(what, nth, ok and "repeated op" or "repeated step"))
    nth, again = nth + 1, again + (ok and 0 or 1)
  end
end

local SHAPES = { { 24, 33 }, { 7, 5 }, { 40, 40 }, { 3, 64 } }

-- Returns the functions for `compare` of an optimizer of ps.optim with several parameters.
local function of_script(kind, dtype, device)
  return function()
    local params = {}
    for i, shape in ipairs(SHAPES) do
      params[i] = ps.randn(shape):to(dtype):to(device):requires_grad_(true)
    end
    local optimizer = ps.optim[kind](params, { lr = 0.05, weight_decay = 0.1,
      momentum = (kind == "SGD" or kind == "RMSprop") and 0.9 or nil })
    local function backward()
      local loss = 0
      for _, p in ipairs(params) do loss = loss + (p * p):sum():float() end
      loss:backward()
    end
    backward()
    optimizer:step()
    optimizer:zero_grad()
    backward()
    return function() optimizer:step() end, function()
      return hashes({ params = params, state = optimizer:state_dict() }, kind)
    end, function() end
  end
end

-- Returns the functions for `compare` of an engine.
local function of_engine(kind, memory)
  return function()
    local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, memory = memory,
      chunk_size = 2048, gradient_clipping = 1,
      optimizer = { type = kind, params = { lr = 1e-2, weight_decay = 0.1 } } },
      model_func = function()
        return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 17))
      end }
    local function backward() model:backward(model(ps.randn { 6, 24 }):pow(2):mean()) end
    for _ = 1, 2 do
      backward()
      optimizer:step()
    end
    backward()
    return function() optimizer:step() end, function()
      return hashes({ params = model:state_dict(), state = optimizer:state_dict() }, kind)
    end, function() model:close() end
  end
end

describe("a step whose allocation fails has the bits of one without a failure", function()
  after_each(function()
    C.ps_test_fail_alloc(-1, 0)
    local state = ps.engine()
    if state then state.model:close() end
  end)

  for _, kind in ipairs(optimizers.names) do
    it("with " .. kind, function()
      local failures = 0
      for _, dtype in ipairs { "fp32", "bf16" } do
        failures = failures + compare(of_script(kind, dtype, "cpu"), kind .. " " .. dtype)
      end
      if optimizers.of(kind).whole then
        failures = failures + compare(of_script(kind, "fp32", "ref"), kind .. " on ref")
        assert(failures >= 4, failures)
      end
    end)
  end

  for _, kind in ipairs { "AdamW", "Muon", "Adafactor", "LAMB" } do
    for _, memory in ipairs { "plain", "chunk" } do
      it(("in an engine: %s, memory %s"):format(kind, memory), function()
        compare(of_engine(kind, memory), kind .. " " .. memory)
      end)
    end
  end
end)

describe("the workspace of an update", function()
  -- Returns the bytes that a step needs in addition to those in use.
  local function workspace(kind, count)
    local params = {}
    for i = 1, count do params[i] = ps.randn { 256, 256 }:requires_grad_(true) end
    local optimizer = ps.optim[kind](params, { lr = 0.1 })
    for i = 1, count do (params[i] * params[i]):sum():backward() end
    optimizer:step()
    ps.collect()
    local before = ps.memory("cpu").used
    ps.reset_peak_memory "cpu"
    optimizer:step()
    return ps.memory("cpu").peak - before
  end

  it("does not grow with the number of parameters", function()
    for _, kind in ipairs { "Muon", "Adafactor", "LAMB" } do
      local one, many = workspace(kind, 1), workspace(kind, 12)
      assert(many <= 1.5 * one + 4096, ("%s: %d and %d bytes"):format(kind, one, many))
    end
  end)
end)
