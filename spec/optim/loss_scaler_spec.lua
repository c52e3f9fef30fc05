-- SPDX-License-Identifier: BSD-3-Clause
-- The loss scaler compared with sequences computed by hand from DeepSpeed's rules, its state, invalid settings, and
-- its use in an optimizer's step.
local ps = require "ps"
local loss_scaler = require "ps.optim.loss_scaler"

--- Returns the scales after each step of `steps`: "." is a good step, and "x" is an overflow.
local function go(scaler, steps)
  local out = {}
  for step in steps:gmatch(".") do
    scaler:update(step == "x")
    out[#out + 1] = scaler.scale
  end
  return out
end
local function run(options, steps) return go(loss_scaler.new(options), steps) end

local function fails(fn, ...)
  local ok, err = pcall(fn)
  assert.falsy(ok)
  for _, text in ipairs { ... } do assert.truthy(tostring(err):find(text, 1, true), tostring(err)) end
end

describe("a dynamic loss scale", function()
  it("has DeepSpeed's defaults", function()
    local s = loss_scaler.new()
    assert.equal(65536, s.scale)
    assert.same({ 1000, 2, false, 1, true }, { s.loss_scale_window, s.hysteresis, s.consecutive_hysteresis,
      s.min_loss_scale, s.raise_error_at_min_scale })
    assert.equal(8, loss_scaler.new({ initial_scale_power = 3 }).scale)
    assert.equal(1000, loss_scaler.new({ initial_scale = 1000 }).scale)
  end)

  it("halves at each overflow without hysteresis", function()
    assert.same({ 8, 4, 4, 2 }, run({ initial_scale_power = 4, hysteresis = 1 }, "xx.x"))
  end)

  it("uses up the hysteresis at the first overflows; good steps alone do not restore it", function()
    assert.same({ 16, 16, 8, 8, 4 }, run({ initial_scale_power = 4, hysteresis = 3 }, "xxx.x"))
    assert.same({ 8, 8, 4, 4, 2, 1 }, run({ initial_scale_power = 3 }, "x.x.xx"))
  end)

  it("restores the hysteresis at a good step if consecutive", function()
    assert.same({ 8, 8, 8, 8, 8, 4 }, run({ initial_scale_power = 3, consecutive_hysteresis = true }, "x.x.xx"))
  end)

  it("doubles at the step after each whole window of good ones", function()
    assert.same({ 2, 2, 2, 4, 4, 4, 8 }, run({ initial_scale_power = 1, loss_scale_window = 3 }, "......."))
    assert.same({ 1, 1, 2, 4 }, run({ initial_scale_power = 1, loss_scale_window = 1, hysteresis = 1 }, "x..."))
    local s = loss_scaler.new()
    for _ = 1, 1000 do s:update(false) end
    assert.equal(65536, s.scale)
    s:update(false)
    assert.equal(131072, s.scale)
  end)

  it("counts a window from the last overflow, and then restores the hysteresis", function()
    assert.same({ 8, 8, 4, 4, 4, 8, 8, 4 }, run({ initial_scale_power = 3, loss_scale_window = 2 }, "x.x...xx"))
    assert.same({ 4, 4, 4, 8, 8, 8, 4 }, run({ initial_scale_power = 2, loss_scale_window = 1, hysteresis = 3 },
      "xx..xxx"))
  end)

  it("does not fall below its minimum, and raises an error if it would", function()
    local s = loss_scaler.new { initial_scale_power = 2, hysteresis = 1, min_loss_scale = 3 }
    assert.same({ 3 }, go(s, "x"))
    fails(function() s:update(true) end, "step 1 overflowed", "smallest loss scale, 3", "min_loss_scale")
    assert.equal(3, s.scale)
    assert.equal(1, s.steps)
    assert.same({ 3, 3, 3 }, run({ initial_scale_power = 2, hysteresis = 1, min_loss_scale = 3,
      raise_error_at_min_scale = false }, "xxx"))
    s = loss_scaler.new { initial_scale_power = 0 }
    assert.same({ 1 }, go(s, "x"))                                  -- hysteresis is checked before the error
    fails(function() s:update(true) end, "at the smallest loss scale, 1")
  end)
end)

describe("a fixed loss scale", function()
  it("stays", function()
    local s = loss_scaler.new { loss_scale = 128 }
    assert.falsy(s.dynamic)
    assert.same({ 128, 128, 128, 128 }, go(s, "xxx."))
    s:load_state_dict(loss_scaler.new():state_dict())
    assert.equal(128, s.scale)
  end)
end)

describe("a loss scaler", function()
  it("continues from its state as if never stopped", function()
    local options = { initial_scale = 12345.678901234567, loss_scale_window = 3, hysteresis = 2 }
    local first, second = "x..x.", "....xx.x....."
    local whole, half, resumed = loss_scaler.new(options), loss_scaler.new(options), loss_scaler.new(options)
    go(whole, first)
    go(half, first)
    local state = half:state_dict()
    for _, value in pairs(state) do assert.equal("string", type(value)) end
    resumed:load_state_dict(state)
    assert.equal(half.scale, resumed.scale)
    assert.same(go(whole, second), go(resumed, second))
    fails(function() resumed:load_state_dict { scale = "2" } end, "the saved loss scaler has", "nil")
    fails(function() resumed:load_state_dict { scale = "two", steps = 1, last_overflow = 0, hysteresis_left = 1 } end,
      "scale = two")
  end)

  it("refuses invalid settings", function()
    for text, options in pairs {
      ["no option 'window'"] = { window = 3 },
      ["loss_scale = -1; it must be 0 (dynamic)"] = { loss_scale = -1 },
      ["loss_scale_window = 0; it must be a whole number"] = { loss_scale_window = 0 },
      ["hysteresis = 1.5; it must be a whole number"] = { hysteresis = 1.5 },
      ["min_loss_scale = 0; it must be a number above 0"] = { min_loss_scale = 0 },
      ["initial_scale = inf"] = { initial_scale = math.huge },
      ["initial_scale_power = nan"] = { initial_scale_power = 0 / 0 },
      ["consecutive_hysteresis is a number, not a boolean"] = { consecutive_hysteresis = 1 },
    } do
      fails(function() loss_scaler.new(options) end, (text:gsub("nan$", "")))
    end
  end)

  it("skips an optimizer's step that overflows and scales the others back", function()
    local w = ps.tensor({ 1, 2 }, { requires_grad = true })
    local optimizer = ps.optim.SGD({ w }, { lr = 0.5 })
    local s = loss_scaler.new { initial_scale_power = 4, hysteresis = 1 }
    local function step(factor)
      optimizer:zero_grad()
      s:scale_loss((w * factor):sum()):backward()
      return optimizer:step { scaler = s }
    end
    assert.is_true(step(math.huge).skipped)
    assert.equal(8, s.scale)
    assert.same({ 1, 2 }, w:tolist())
    local info = step(1)
    assert.is_false(info.skipped)
    assert.truthy(math.abs(info.grad_norm - math.sqrt(2)) < 1e-12)
    assert.same({ 0.5, 1.5 }, w:tolist())
    assert.equal(1, optimizer.steps)
  end)
end)

describe("optim.GradScaler", function()
  local scaler = ps.optim.GradScaler

  it("rises at the last step of a window, and begins the next one there or after an overflow", function()
    assert.same({ 8, 8, 16, 16, 16, 32 }, go(scaler { scale = 8, interval = 3 }, "......"))
    assert.same({ 8, 8, 4, 4, 4, 8, 4 }, go(scaler { scale = 8, interval = 3 }, "..x...x"))
    assert.same({ 24, 6, 1.5, 4.5 }, go(scaler { scale = 8, interval = 1, growth = 3, backoff = 0.25 }, ".xx."))
  end)

  it("falls to at least 2^-24, without an error", function()
    assert.same({ 2 ^ -24, 2 ^ -24 }, go(scaler { scale = 2 ^ -23, backoff = 0.25 }, "xx"))
  end)

  it("continues inside a window, also from states of earlier versions", function()
    local first = scaler { scale = 8, interval = 3 }
    go(first, "x..")
    local second = scaler { scale = 1, interval = 3 }
    second:load_state_dict(first:state_dict())
    assert.same({ 8, 8 }, go(second, ".."))
    local old = scaler { interval = 3 }
    old:load_state_dict { scale = "4", good = 2 }
    assert.same({ 8, 8, 8, 16 }, go(old, "...."))
  end)
end)
