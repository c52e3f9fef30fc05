-- SPDX-License-Identifier: BSD-3-Clause
-- Backward and step of an engine: valid calls, and calls that it refuses with an error that says what to write instead.
local ps = require "ps"
local nn = ps.nn
local fails = require("spec.check_lib").fails

local N = 4
local model

local function open(class, config)
  local wanted = { plan_print = false, overlap_optimizer = false,
    optimizer = { type = "AdamW", params = { lr = 1e-3 } } }
  for key, value in pairs(config) do wanted[key] = value end
  local optimizer
  model, optimizer = ps.initialize { quiet = true, model_func = function() return class() end, config = wanted }
  return model, optimizer
end

after_each(function()
  if model then model:close() end
  model = nil
end)

-- Returns w [N, N] with the values 0, 0.125, 0.25, ..., so that sums of its products are exact in fp32.
local function values() return ps.arange(0, N * N, 1, { dtype = "fp32" }):reshape(N, N):contiguous() * 0.125 end

local M = nn.class "M"
function M:init() self:param("w", values()) end
function M:forward(x) return x:matmul(self.w) end

-- The sums of w's rows.
local rows = {}
for i = 1, N do
  rows[i] = 0
  for j = 1, N do rows[i] = rows[i] + ((i - 1) * N + j - 1) * 0.125 end
end

describe("backward and step of an engine", function()
  for _, memory in ipairs { "chunk", "plain" } do
    it("are named in the error if the script forgot one: memory " .. memory, function()
      local _, optimizer = open(M, { memory = memory })
      local before = model:state_dict().w:clone()
      fails(function() optimizer:step() end, "engine_backward_spec.lua", "no backward since the last step",
        "model:backward(loss)")
      local loss = model(ps.ones { 1, N }):sum()
      if memory == "chunk" then
        fails(function() loss:backward() end, "model:backward(loss)")
        assert.is_nil(model.module.w:grad())
      end
      model:backward(loss)
      optimizer:step()
      assert.equal(1, optimizer.steps)
      assert((model:state_dict().w - before):abs():max():item() > 0)
      fails(function() optimizer:step() end, "no backward since the last step")
    end)
  end

  it("of two micro-batches: step between them does nothing, and may be called more than once", function()
    local _, optimizer = open(M, { gradient_accumulation_steps = 2 })
    for step = 1, 2 do
      model:backward(model(ps.ones { 1, N }):sum())
      for _ = 1, 2 do assert.same({ accumulating = true, skipped = false }, optimizer:step()) end
      model:backward(model(ps.ones { 1, N }):sum())
      assert.is_false(optimizer:step().accumulating)
      assert.equal(step, optimizer.steps)
    end
  end)

  it("do not affect a loss that reaches no parameter of the engine", function()
    local other = ps.ones({ 3 }):requires_grad(true)
    open(M, {})
    other:square():sum():backward()
    assert.same({ 2, 2, 2 }, other:grad():tolist())
    other:square():sum():backward()
    assert.same({ 4, 4, 4 }, other:grad():tolist())
  end)

  it("give a script's own leaf its gradient, without that of a preceding dry run", function()
    local x = ps.ones({ 1, N }):requires_grad(true)
    open(M, {})
    model:backward(model(x):sum())
    assert.same({ rows }, x:grad():tolist())
  end)

  it("are also refused inside recompute", function()
    local Again = nn.class "Again"
    function Again:init() self:param("w", values()) end
    function Again:forward(x) return ps.recompute(function(t) return t:matmul(self.w) end, x) end
    local _, optimizer = open(Again, {})
    local loss = model(ps.ones({ 1, N }):requires_grad(true)):sum()
    fails(function() loss:backward() end, "model:backward(loss)")
    model:backward(loss)
    optimizer:step()
  end)
end)

describe("overlap_optimizer = true", function()
  -- Returns the notes of an engine with additional settings.
  local function notes(config)
    local made = require("ps.nn.handle").of(open(M, config))
    local list = {}
    for text in pairs(made.said) do if text:find "^overlap_optimizer" then list[#list + 1] = text end end
    model:close()
    model = nil
    return table.concat(list, "\n")
  end

  it("gives the reason why backward updates nothing", function()
    for words, config in pairs {
      ["gradient_clipping needs the norm of all gradients first"] = { gradient_clipping = 1 },
      ["all gradients are first checked for overflow"] = { fp16 = { enabled = true } },
      ["gradients of several micro-batches are added up"] = { gradient_accumulation_steps = 2 },
    } do
      config.overlap_optimizer = true
      assert.equal(("overlap_optimizer: %s, so updates run in optimizer:step()"):format(words), notes(config))
      config.overlap_optimizer = "auto"
      assert.equal("", notes(config))
    end
    assert.equal("", notes { overlap_optimizer = true })
  end)
end)
