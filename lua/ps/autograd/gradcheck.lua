-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autograd.gradcheck: compares gradients with finite differences.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local random = require "ps.core.random"
local native = require "ps.core.ffi"
local grads = require "ps.autograd.grad"
local is_tensor, error = scope.is_tensor, caller.error

local checks = {}

local KINDS = { eps = "number", atol = "number", rtol = "number", raise_exception = "boolean" }

local function pack(...) return { n = select("#", ...), ... } end

-- Calls fn, and returns a list of its float outputs.
local function outputs_of(fn, inputs)
  local list = {}
  local results = pack(fn(unpack(inputs, 1, #inputs)))
  for i = 1, results.n do
    local t = results[i]
    if is_tensor(t) and t:is_float() then list[#list + 1] = t end
  end
  if #list == 0 then error("ps.autograd.gradcheck: the function returned no float tensor") end
  return list
end

-- Multiplies each output by its weights, and returns the sum of all products.
local function weighed(outputs, weights)
  local sum = 0
  for i, out in ipairs(outputs) do sum = sum + (out:detach() * weights[i]):sum():item() end
  return sum
end

-- Returns (f(x + eps * e) - f(x - eps * e)) / (2 * eps) for each element of an input. f is the weighted sum of fn's
-- outputs. e is 1 for this element and 0 for the other elements.
local function differences(fn, inputs, which, weights, eps)
  local x, list = inputs[which], {}
  local flat = x:detach():clone():reshape(-1)
  local moved = { unpack(inputs, 1, #inputs) }
  local function at(i, value)
    local copy = flat:clone()
    copy:narrow(0, i, 1):fill_(value)
    moved[which] = copy:reshape(x:shape())
    return weighed(outputs_of(fn, moved), weights)
  end
  for i = 0, tonumber(x.numel_) - 1 do
    local value = flat:narrow(0, i, 1):item()
    list[i + 1] = (at(i, value + eps) - at(i, value - eps)) / (2 * eps)
  end
  return list
end

--- Returns whether the gradients of fn agree with finite differences. Checks each input that requires a gradient. The
--- checked function is the sum of all outputs times random weights. fn is called twice for each element of an input, so
--- use small tensors, in fp64.
---@param fn fun(...): ps.Tensor ...
---@param inputs ps.Tensor|ps.Tensor[] arguments of fn
---@param options? {eps?: number, atol?: number, rtol?: number, raise_exception?: boolean} eps: half of the distance
--- between the two points (default 1e-6). An element agrees if its difference is at most atol (default 1e-5) + rtol
--- (default 1e-3) times the difference quotient. raise_exception: whether a disagreement raises an error (default true)
---@return boolean
function checks.gradcheck(fn, inputs, options)
  local call = "ps.autograd.gradcheck"
  caller.callable(fn, call)
  options = caller.options(options, call, KINDS)
  if is_tensor(inputs) then inputs = { inputs } end
  caller.typed(inputs, "table", call .. ": the inputs")
  local eps, atol, rtol = options.eps or 1e-6, options.atol or 1e-5, options.rtol or 1e-3
  local wanted, numbers = {}, {}
  for i = 1, #inputs do
    if is_tensor(inputs[i]) and inputs[i]:needs_grad() then
      if inputs[i]:dtype() ~= "fp64" then
        error(("%s: input %d is of %s, which rounds differences of %g away; use fp64"):format(call, i,
          inputs[i]:dtype(), eps))
      end
      wanted[#wanted + 1], numbers[#numbers + 1] = inputs[i], i
    end
  end
  if #wanted == 0 then error(call .. ": no input requires a gradient") end
  local outputs, weights, kept = outputs_of(fn, inputs), {}, {}
  local rng = random.state()
  for _, key in ipairs { "seed", "op", "sample", "step", "offset" } do kept[key] = rng[key] end
  for i, out in ipairs(outputs) do
    weights[i] = create.rand(out:shape(), { dtype = out:dtype(), device = out:device() }) + 0.5
  end
  for key, value in pairs(kept) do rng[key] = value end
  local roots, seeds = {}, {}
  for i, out in ipairs(outputs) do
    if out:needs_grad() then roots[#roots + 1], seeds[#seeds + 1] = out, weights[i] end
  end
  if #roots == 0 then error(call .. ": no output depends on an input that requires a gradient") end
  local found = pack(grads.grad(roots, wanted, { grad_outputs = seeds, allow_unused = true }))
  for k, i in ipairs(numbers) do
    local want = scope.no_grad(differences, fn, inputs, i, weights, eps)
    local got = found[k] ~= nil and found[k]:reshape(-1):tolist() or nil
    for e = 1, #want do
      local value = got and got[e] or 0
      -- False for NaN. NaN never agrees.
      local agrees = math.abs(value - want[e]) <= atol + rtol * math.abs(want[e])
      if not agrees then
        if options.raise_exception == false then return false end
        error(("%s: element %d of the gradient of input %d is %.9g; finite differences give %.9g"):format(call, e, i,
          value, want[e]))
      end
    end
  end
  native.collect_if_due()
  return true
end

return checks
