-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autocast: runs ops with mixed precision. Products run in a half type. Ops that need the range or precision of fp32
-- run in fp32. The lists of ops are the lists of PyTorch's autocast for CUDA. Parameters keep their type. core/ffi.lua
-- calls `cast` with the inputs of each op. The inputs of ops in backward are not cast, because a gradient has the type
-- of its tensor.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local hooks = require "ps.core.hooks"
local ffi, C, ctx, caller = native.ffi, native.C, native.ctx, native.caller
local error = caller.error

local autocast = {}

-- The ops that run in the half type (HALF) and the ops that run in fp32 (FULL). Any other op runs in the type of its
-- inputs. If its inputs have several types, the op runs in the widest of these types.
local HALF = { "matmul", "linear", "mlp", "lm_loss", "parallel_lm_loss", "column_linear", "row_linear", "attention",
  "attention_packed", "conv", "conv_transpose" }
local FULL = { "pow", "pow_scalar", "exp", "log", "log1p", "expm1", "rsqrt", "reciprocal", "sum", "cumsum", "softmax",
  "log_softmax", "cross_entropy", "layer_norm", "rms_norm", "channel_norm", "softplus" }
local runs_in_half = {}  -- table from op code to true (the op runs in the half type) or false (it runs in fp32)
for _, name in ipairs(HALF) do runs_in_half[C["PS_OP_" .. name]] = true end
for _, name in ipairs(FULL) do runs_in_half[C["PS_OP_" .. name]] = false end

---@class ps.Autocast a region
---@field dtype integer|false dtype of products, or false if nothing is cast
---@field casts table<boolean, table<integer, {version: integer, dtype: integer, tensor: ffi.cdata*, of: ffi.cdata*}>>
---  copies of parameters in the half type, by the parameter's address. casts[true] contains the copies that were made
---  while gradients were enabled. casts[false] contains the copies that were made while gradients were disabled.
---@field closed? boolean whether the region has ended and released its copies
---@field again? boolean whether the region belongs to the second run of a recomputed function

---@type ps.Autocast?
local region

local function new_region(dtype) return { dtype = dtype, casts = { [true] = {}, [false] = {} } } end

-- Releases the region's references to its copies of parameters. The tape keeps the copies that it still needs.
local function forget(self, with_gradient)
  for _, copy in pairs(self.casts[with_gradient]) do
    C.ps_tensor_release(copy.tensor)
    C.ps_tensor_release(copy.of)
  end
  self.casts[with_gradient] = {}
end

local function close(self)
  if self.closed then return end
  self.closed = true
  forget(self, true)
  forget(self, false)
end

-- A backward walk frees the nodes that it passes, including the nodes of the copies. The next forward in the region
-- therefore needs new copies.
hooks.on("walked", function() if region and region.dtype then forget(region, true) end end)

local attrs = ffi.new "ps_attrs_cast"
local ATTRS_NBYTES = ffi.sizeof(attrs)
local from, to = ffi.new "ps_tensor *[1]", ffi.new "ps_tensor *[PS_MAX_OUT]"
local TO_NBYTES = ffi.sizeof(to)
local CAST = C.PS_OP_cast

-- Converts a tensor. Returns a pointer to a tensor that the caller owns. Collects garbage only if memory is short,
-- because the inputs of the current op may have no other reference.
local function converted(t, dtype)
  from[0], attrs.dtype = t, dtype
  ffi.fill(to, TO_NBYTES)
  local rc = C.ps_apply(ctx, CAST, 1, from, attrs, ATTRS_NBYTES, to)
  if rc == C.PS_ENOMEM then
    native.collect()
    native.collect()
    rc = C.ps_apply(ctx, CAST, 1, from, attrs, ATTRS_NBYTES, to)
  end
  return rc, to[0]
end

-- Returns whether a region keeps its copy of a tensor and reuses it. A region keeps the copy of a trained parameter,
-- unless an engine moves the parameter's memory.
local function is_kept(t)
  return t.node == nil and t.managed == nil and t.flags % 2 == C.PS_T_REQUIRES_GRAD
end

-- Returns a copy of a parameter in the given type. The region owns the copy.
local function copy_of(t, dtype)
  local casts = region.casts[C.ps_grad_enabled(ctx) ~= 0]
  local at = tonumber(ffi.cast("uintptr_t", t))
  local copy, version = casts[at], C.ps_tensor_version(t)
  if copy and copy.version == version and copy.dtype == dtype then return 0, copy.tensor end
  local rc, made = converted(t, dtype)
  if rc < 0 then return rc end
  C.ps_tensor_keep(made)
  C.ps_tensor_retain(t)
  if copy then
    C.ps_tensor_release(copy.tensor)
    C.ps_tensor_release(copy.of)
  end
  casts[at] = { version = version, dtype = dtype, tensor = made, of = t }
  return 0, made
end

-- Returns the type to which an input must be converted, or nil if it needs no conversion.
local function wanted(t, half)
  local dtype = t.dtype_
  if half then
    if (dtype == C.PS_F32 or dtype == C.PS_BF16 or dtype == C.PS_F16) and dtype ~= region.dtype then
      return region.dtype
    end
  elseif dtype == C.PS_BF16 or dtype == C.PS_F16 then
    return C.PS_F32
  end
end

-- Converts the inputs of an op in place. Returns the tensors that the caller must release after the op, or nil.
local function cast(op, n, ins)
  local half = runs_in_half[op]
  if half == nil then return nil end
  local list
  for i = 0, n - 1 do
    local t = ins[i]
    local dtype = t ~= nil and wanted(t, half)
    if dtype then
      if not list then
        list = {}
        for k = 0, n - 1 do
          if ins[k] ~= nil then
            C.ps_tensor_retain(ins[k])
            list[#list + 1] = ins[k]
          end
        end
      end
      local kept = is_kept(t)
      local rc, made
      if kept then rc, made = copy_of(t, dtype) else rc, made = converted(t, dtype) end
      if rc < 0 then
        for _, other in ipairs(list) do C.ps_tensor_release(other) end
        native.raise(rc)
      end
      if kept then C.ps_tensor_retain(made) end
      list[#list + 1] = made
      ins[i] = made
    end
  end
  return list
end

-- These functions replace ops.linear and ops.mlp within a region. They add the residual to the product in a separate
-- op, so that the residual keeps its type.
local ops = native.ops
local fused  -- ops.linear and ops.mlp as they are outside of regions; nil before the first region
local apart = {}
function apart.linear(x, w, b, residual, out_in)
  local y = fused.linear(x, w, b, nil, out_in)
  return residual ~= nil and ops.add(residual, y) or y
end
function apart.mlp(x, w1, b1, w2, b2, residual, out_in)
  local y = fused.mlp(x, w1, b1, w2, b2, nil, out_in)
  return residual ~= nil and ops.add(residual, y) or y
end

local function enter(to_region)
  local was = region
  region = to_region
  local on = region and region.dtype
  native.cast = on and cast or nil
  if on and not fused then fused = { linear = ops.linear, mlp = ops.mlp } end
  if fused then
    local chosen = on and apart or fused
    ops.linear, ops.mlp = chosen.linear, chosen.mlp
  end
  return was
end

local function restored(own, was, ok, ...)
  close(own)
  enter(was)
  if not ok then error((...), 0) end
  return ...
end

local TYPES = { bf16 = true, fp16 = true, fp32 = true }

--- Runs fn(...) with mixed precision, like PyTorch's autocast on CUDA, but on every device. Products (F.linear, matmul,
--- convolutions, attention) convert their inputs to `dtype`. Softmax, norms, losses, sums, exp, log and pow convert
--- fp16 and bf16 inputs to fp32. Other ops run in the type of their inputs. Parameters keep their type. Each parameter
--- is converted once per region. Gradients have the type of their parameter. Call backward after the region.
---@param dtype "bf16"|"fp16"|"fp32" dtype of products; "fp32" turns conversions off, also within an outer region
---@param fn function
---@param ... any arguments of fn
---@return any ... the results of fn
function autocast.run(dtype, fn, ...)
  local name = type(dtype) == "string" and native.dtype_name[(select(2, pcall(native.dtype_code, dtype)))]
  if not TYPES[name] then
    error(("ps.autocast: the type is %s; write ps.autocast(\"bf16\", function() ... end) with \"bf16\", \"fp16\" or "
      .. "\"fp32\" (for every step of ps.initialize's model: bf16 = { enabled = true } in its configuration)"):format(
      type(dtype) == "string" and ("%q"):format(dtype) or "a " .. type(dtype)))
  end
  caller.callable(fn, "ps.autocast")
  local own = new_region(name ~= "fp32" and native.dtype_code(name) or false)
  return restored(own, enter(own), xpcall(fn, scope.trace, ...))
end

--- Returns the dtype of products in the current region of ps.autocast, or nil if there is none.
---@return "bf16"|"fp16"|nil
function autocast.dtype() return region and region.dtype and native.dtype_name[region.dtype] or nil end

--- Returns its arguments. If a region is active, arguments that are fp16 or bf16 tensors are converted to fp32. A
--- function that consists of several ops calls `full` if PyTorch runs the function in fp32.
---@param ... ps.Tensor|any
---@return any ...
function autocast.full(...)
  if not native.cast then return ... end
  local list, n = { ... }, select("#", ...)
  for i = 1, n do
    local t = list[i]
    if scope.is_tensor(t) and (t.dtype_ == C.PS_BF16 or t.dtype_ == C.PS_F16) then
      list[i] = native.ops.cast(t, C.PS_F32)
    end
  end
  return unpack(list, 1, n)
end

-- Runs a recomputed function in a region with the settings of its first run. The second run makes new copies, because
-- the walk may have passed the nodes of the first run's copies. `last` is the state that state() returned last.
-- scope.lua calls state() just before it restores the state of the first run. At that time, `last` is the state of the
-- second run's caller.
local segments, last = {}, nil
autocast.segments = segments  -- kept alive here, because scope.carry_state refers to it weakly
function segments:state()
  last = { region = region, returns = false }
  return last
end
function segments:restore(state)
  if state.returns then
    if region and region.again then close(region) end
    enter(state.region)
    return
  end
  last.returns = true
  local of = state.region
  if of and of.dtype then
    of = new_region(of.dtype)
    of.again = true
  end
  enter(of)
end
scope.carry_state(segments)

return autocast
