-- SPDX-License-Identifier: BSD-3-Clause
-- A small GPT-2 with functions and hooks of the script's own, for own_gradients_spec.lua: trained on a layout, and held
-- to the same model whose functions are ops, without an engine.
local ps = require "ps"
local gpt2 = require "models.gpt2"

local lib = {}

local OPTIONS = { n_layer = 4, n_embd = 16, n_head = 2, vocab_size = 32, n_positions = 8, embd_pdrop = 0,
  attn_pdrop = 0, resid_pdrop = 0 }
local RATE, STEPS, MICROS = 0.5, 3, 2

-- x * sigmoid(x) * c + y, as a function
local Gate = ps.autograd.Function "Gate"
function Gate.forward(ctx, x, c, y)
  local s = x:sigmoid()
  ctx:save_for_backward(x, s)
  ctx.c = c
  return x * s * c + y
end
function Gate.backward(ctx, dy)
  local x, s = ctx:saved_tensors()
  return dy * ctx.c * (s + x * s * (1 - s)), nil, dy
end

-- A straight-through estimator for a parameter: the same value, with twice the gradient.
local Double = ps.autograd.Function { name = "Double", forward = function(_, w) return w * 1 end,
  backward = function(_, dw) return dw * 2 end }

--- Returns the gate as ops, for the reference.
local function gate_ops(x, c, y) return x * x:sigmoid() * c + y end

--- Returns a model. how.gate is applied within each block, where it can be recomputed, and to the block's output.
--- how.double is applied to a parameter.
---@param how table gate, double (functions), seen (a list for gradients), recompute, dtype
local function model_func(how)
  ps.manual_seed(1)
  local model = gpt2.new(OPTIONS)
  local body = model.transformer
  for i = 0, 3 do
    body.h[i].ln_2:register_forward_hook(function(_, _, x) return how.gate(x, 0.5, x) end)
    body.h[i]:register_forward_hook(function(_, _, x) return how.gate(x, 0.25, x) end)
  end
  if how.recompute then model:recompute_blocks() end
  if how.seen then
    body.h[0]:register_forward_hook(function(_, _, x)
      if ps.grad_enabled() then
        x:register_hook(function(g) how.seen[#how.seen + 1] = g:clone():keep() end)
      end
    end)
    body.h[1].ln_1.weight:register_hook(function(g) how.parameter[#how.parameter + 1] = g:clone():keep() end)
  end
  local norm = body.h[0].ln_1
  norm:register_forward_pre_hook(function() how.calls = (how.calls or 0) + 1 end)
  if how.double then
    norm:register_forward_hook(function(module, _, x) return x + how.double(module.bias) end)
  end
  if how.hook then body.h[1].mlp.c_fc.weight:register_hook(function(g) return g * 3 end) end
  return model
end

-- Returns the rows of all ranks, [8, 8], and labels, of which each row has a different number that count.
local function batch()
  ps.manual_seed(2)
  local ids = ps.randint(0, 32, { 8, 9 }, { dtype = "int64" })
  local x, y = ids:narrow(1, 0, 8):contiguous(), ids:narrow(1, 1, 8):contiguous()
  for row = 0, 7 do
    if row % 3 > 0 then y:narrow(0, row, 1):narrow(1, 0, row % 3 + 2):fill_(-100) end
  end
  return x, y
end

-- Returns a sum of magnitudes, or of signed values if ranks have addends.
local function sum_of(t, signed)
  t = t:double()
  return (signed and t or t:abs()):sum():item()
end

--- Returns the losses of SGD's steps without an engine, and the gradients that hooks would see in the first step: by
--- rows, the gradient of each micro-batch's own loss.
local function reference(rows)
  local how = { gate = gate_ops, seen = {}, parameter = {} }
  if lib.double then
    how.double = function(w) return w + (w - w:detach()) end        -- the value of w with twice its gradient
  end
  local model = model_func(how)
  if lib.hook then model.transformer.h[1].mlp.c_fc.weight:register_hook(function(g) return g * 3 end) end
  local x, y = batch()
  local n = rows.count / MICROS
  for micro = 0, MICROS - 1 do
    local first = rows.first + micro * n
    model(x:narrow(0, first, n):contiguous(), y:narrow(0, first, n):contiguous()):backward()
  end
  model:zero_grad()
  local optimizer, losses = ps.optim.SGD(model, { lr = RATE, per_rank = ps.world_size() > 1 or nil }), {}
  local seen, parameter = how.seen, how.parameter
  how.seen, how.parameter = {}, {}
  for step = 1, STEPS do
    local loss = model(x, y)
    losses[step] = loss:item()
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses, seen, parameter
end

local function near(got, want, bound, what)
  if math.abs(got - want) <= bound * math.max(math.abs(want), 1e-6) then return end
  error(("%s is %.9g, not %.9g"):format(what, got, want), 0)
end

-- Returns sums of the gradients that have values, which those of a dry run do not. `group` is the group of ranks that
-- have shards or addends.
local function known(list, signed, group)
  local out = {}
  for _, g in ipairs(list) do
    local ok, value = pcall(sum_of, g, signed)
    if ok then
      out[#out + 1] = group and group:all_reduce(ps.tensor({ value }, { dtype = "fp64" })):item() or value
    end
  end
  return out
end

--- Trains and compares. Options: config (of ps.initialize), data (number of ranks that have different rows), bound,
--- recompute, reads (a hook reads a value), double, hook, stages (a rank has some of the layers), shares (ranks have
--- shards of gradients, or addends).
---@param config table
---@param options? table
---@return string losses the training losses, with all bits
---@return integer ran the number of times that hooks ran in the first step
function lib.run(config, options)
  options = options or {}
  lib.double, lib.hook, lib.ran = options.double, options.hook, 0
  local bound, ranks = options.bound or 1e-5, options.data and ps.world_size() or 1
  local rows = { count = 8 / ranks, first = options.data and 8 / ranks * ps.rank() or 0 }
  local losses, seen, parameter = reference(rows)
  local all = { plan_print = false, optimizer = { type = "SGD", params = { lr = RATE } },
    gradient_accumulation_steps = MICROS }
  for key, value in pairs(config) do all[key] = value end
  local how = { gate = Gate, seen = {}, parameter = {}, double = options.double and Double, hook = options.hook,
    recompute = options.recompute }
  if options.reads then
    local gate = Gate
    how.gate = function(...)
      local y = gate(...)
      if ps.grad_enabled() and y:needs_grad() then y:register_hook(function(g) assert(g:sum():item() < 1e9) end) end
      return y
    end
  end
  local model, optimizer = ps.initialize { quiet = true, config = all, model_func = function()
    return model_func(how)
  end }
  local x, y = batch()
  x, y = x:narrow(0, rows.first, rows.count):contiguous(), y:narrow(0, rows.first, rows.count):contiguous()
  local trained = {}
  for step = 1, STEPS do
    local sum, weights = 0, 0
    local n, at = rows.count / MICROS, 0
    for out in model:micro_batches(x, y) do
      local weight = y:narrow(0, at, n):ne(-100):sum():item()
      at = at + n
      sum, weights = sum + out.loss:item() * weight, weights + weight
      model:backward(out.loss)
    end
    optimizer:step()
    if options.data then
      local both = ps.tensor({ sum, weights }, { dtype = "fp64" })
      both = ps.mesh.group("world"):all_reduce(both):tolist()
      sum, weights = both[1], both[2]
    end
    near(sum / weights, losses[step], bound, ("the loss of step %d"):format(step))
    trained[step] = ("%.17g"):format(sum)
    if step == 1 then
      local function compare(what, got_list, want_list, signed)
        local got, want = known(got_list, signed, options.shares and ps.mesh.group "tp"), known(want_list, signed)
        local here = #got > 0 or not options.stages
        if here and #got ~= MICROS then error(("%s: it ran %d times, not %d"):format(what, #got, MICROS), 0) end
        for k, value in ipairs(got) do near(value, want[k], bound * 10, what) end
        lib.ran = lib.ran + #got
      end
      compare("the gradient that a hook saw", how.seen, seen, false)
      compare("the gradient that a parameter's hook saw", how.parameter, parameter, options.shares)
    end
    how.seen, how.parameter = {}, {}
  end
  model:close()
  return table.concat(trained, " "), lib.ran
end

return lib
