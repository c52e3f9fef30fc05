-- SPDX-License-Identifier: BSD-3-Clause
-- The functions of autograd_oracle.py, with a forward and a backward in Lua, and the hooks.
local ps = require "ps"
local Function = ps.autograd.Function

local A = {}

A.Gate = Function "Gate"
function A.Gate.forward(ctx, x, c, y)
  local s = x:sigmoid()
  ctx:save_for_backward(x, s)
  ctx.c = c
  return x * s * c + y
end
function A.Gate.backward(ctx, dy)
  local x, s = ctx:saved_tensors()
  return dy * ctx.c * (s + x * s * (1 - s)), nil, dy
end

-- A function with two outputs, only one of which can get a gradient.
A.Two = Function "Two"
function A.Two.forward(ctx, x, y)
  ctx:save_for_backward(x, y)
  return x * y, x + y
end
function A.Two.backward(ctx, da, db)
  local x, y = ctx:saved_tensors()
  return da * y + db, da * x + db
end

-- A function whose saved tensor is its output.
A.Norm = Function "Norm"
function A.Norm.forward(ctx, x)
  local r = ((x * x):mean(-1, true) + 1):rsqrt()
  local y = x * r
  ctx:save_for_backward(y, r)
  return y
end
function A.Norm.backward(ctx, dy)
  local y, r = ctx:saved_tensors()
  return r * (dy - y * (dy * y):mean(-1, true))
end

-- Straight-through: clipped elements also get the gradient.
A.Straight = Function { name = "Straight", forward = function(_, x) return x:clamp(-1, 1) end,
  backward = function(_, dy) return dy end }

-- Returns nil for an input that needs no gradient.
A.Half = Function { name = "Half", forward = function(ctx, x, y)
  ctx.need = ctx.needs_input_grad
  return x * 0.5 + y
end, backward = function(ctx, dy)
  return ctx.need[1] and dy * 0.5 or nil, ctx.need[2] and dy * 0.25 or nil
end }

-- An output without a gradient next to an output that has one.
A.Marked = Function "Marked"
function A.Marked.forward(ctx, x)
  local plain = x * 3
  ctx:mark_non_differentiable(plain)
  return x * 2, plain
end
function A.Marked.backward(_, dy, zero) return dy * 2 + zero end

local HOOKS = {
  scale = function(g) return g * 1.5 end,
  shift = function(g) return g + 0.25 end,
  cut = function(g) return g:clamp(-0.5, 0.5) end,
  look = function(g) assert(g:numel() > 0) end,
}

--- Returns a tensor with a hook.
function A.hook(x, name)
  if x:needs_grad() then x:register_hook(HOOKS[name]) end
  return x
end

return A
