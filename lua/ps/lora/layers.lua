-- SPDX-License-Identifier: BSD-3-Clause
-- Adds adapters to single layers: LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"), rsLoRA
-- (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA") and DoRA (Liu et al. 2024,
-- "DoRA: Weight-Decomposed Low-Rank Adaptation"). An adapted layer keeps its class, its weight and its name. The
-- layer's forward is replaced. The layer gets child modules that contain the adapter's tensors and have PEFT's names:
--
--   c_attn.weight                      the frozen weight
--   c_attn.lora_A.default.weight       [r, in]; for an embedding: c_attn.lora_embedding_A.default [r, rows]
--   c_attn.lora_B.default.weight       [out, r]
--   c_attn.lora_magnitude_vector.default.weight   [out], only with DoRA
--
-- Sizes: I inputs (for an embedding, its rows), O outputs, r rank.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local activation = require "ps.nn.activation"
local nn_module = require "ps.nn.module"
local packed = require "ps.nn.packed"
local registry = require "ps.nn.registry"
local init = require "ps.nn.weights"
local functional = require "ps.tensor.functional"
local parallel = require "ps.lora.parallel"
local ops = native.ops

local layers = {}

-- A module that contains tensors or other LoraTensors modules, indexed by adapter names.
local Holder = nn_module.class("LoraTensors")

---@class ps.lora.Adapter one adapter of one layer
---@field r integer
---@field alpha number
---@field scale number alpha / r, or alpha / sqrt(r)
---@field dropout? ps.nn.Dropout
---@field dora boolean

---@class ps.lora.Layer state of a layer that has adapters
---@field kind table the entry of targets.KINDS for the layer's class
---@field base fun(layer: ps.nn.Module, ...): ps.Tensor the forward without adapters
---@field adapters table<string, ps.lora.Adapter>
---@field active? string name of the active adapter
---@field merged? string name of the adapter that is merged into the weight
---@field entry table the layer's entry in ps.lora.Adapters.layers
---@field had table<string, function> the layer's own functions that the adapter replaces, such as the functions for a
--- packed weight

-- -- tensors ----------------------------------------------------------------------------------------------------------
local function holder(layer, key)
  if not registry.kind(layer, key) then nn_module.register(layer, key, "module", Holder()) end
  return layer[key]
end

local function put(layer, key, name, tensor)
  local inner = holder(layer, key)
  if not registry.kind(inner, name) then nn_module.register(inner, name, "module", Holder()) end
  inner[name]:param("weight", tensor)
end

-- Returns the adapter's tensors: A [r, I], B [O, r], and either DoRA's magnitudes [O] or nil.
local function tensors_of(layer, name)
  local state = layer.lora_
  local magnitude = state.adapters[name].dora and layer.lora_magnitude_vector[name].weight or nil
  if state.kind.table then return layer.lora_embedding_A[name], layer.lora_embedding_B[name], magnitude end
  return layer.lora_A[name].weight, layer.lora_B[name].weight, magnitude
end
layers.tensors = tensors_of

-- Returns a layer's input width I and output width O.
function layers.sizes(layer, kind)
  if kind.table then return layer.rows, layer.width end
  return layer.inputs, layer.outputs
end

local function as(t, dtype) return t:dtype() == dtype and t or t:to(dtype) end

-- -- the norm of DoRA -------------------------------------------------------------------------------------------------
local BLOCK = 2 ^ 21  -- number of the weight's elements that are squared at a time

-- Returns the sum of squares of the weight's row for each output, as fp32 [O]. The sums are computed in every forward,
-- because an engine must use the same chunks at the same moments in all steps.
local function squares_of(layer)
  local weight = layer.weight
  local rows, width = weight:size(0), weight:size(1)
  local by_row = layer.lora_.kind.out_in == 1
  local sum = create.zeros({ by_row and rows or width }, { device = weight:device() })
  local step = math.max(1, math.floor(BLOCK / width))
  for first = 0, rows - 1, step do
    scope.scope(function()
      local n = math.min(step, rows - first)
      local block = as(weight:detach():narrow(0, first, n), "fp32")
      block = block * block
      if by_row then sum:narrow(0, first, n):copy_(block:sum(1)) else sum:copy_(sum + block:sum(0)) end
    end)
  end
  return sum
end

-- Returns W A^T as fp32 [O, r], where W is the weight as [O, I].
local function weight_times(layer, A)
  local weight = layer.weight:detach()
  local a = as(A, weight:dtype())
  if layer.lora_.kind.out_in == 1 then return as(ops.linear(weight, a, nil, nil, 1), "fp32") end
  return as(ops.linear(a, weight, nil, nil, 0):transpose(0, 1), "fp32")
end

-- Returns the norm of each row of W + scale B A, as fp32 [O], without computing this matrix. If w and b are row i of W
-- and of B, the square of norm i is |w|^2 + 2 * scale * (w A^T) . b + scale^2 * b (A A^T) b^T.
local function norm_of(layer, name, A, B)
  return scope.no_grad(scope.scope, function()
    if A == nil then A, B = tensors_of(layer, name) end
    A, B = as(A:detach(), "fp32"), as(B:detach(), "fp32")
    local scale, sum = layer.lora_.adapters[name].scale, layer.lora_.kind.sum
    local squares, product, own = squares_of(layer), weight_times(layer, A), ops.linear(A, A, nil, nil, 1)
    if sum then squares, product, own = sum(squares), sum(product), sum(own) end  -- ranks have shards of the inputs
    local cross = product * 2 + ops.linear(B, own, nil, nil, 1) * scale
    return (squares + (cross * B):sum(1) * scale):sqrt()
  end)
end

-- Returns the factor by which DoRA multiplies each output, [O] in the given dtype. Backward treats the norm as a
-- constant (section 4.3 of the paper).
local function factor_of(layer, name, magnitude, dtype)
  return as(as(magnitude, "fp32") / norm_of(layer, name), dtype)
end

-- -- forwards ---------------------------------------------------------------------------------------------------------
local function dropped(adapter, x)
  if adapter.dropout and adapter.dropout:active() then return adapter.dropout(x), true end
  return x, false
end

-- Returns y + scale B A x.
local function low_rank(adapter, A, B, x, y)
  local dtype = x:dtype()
  local u = ops.linear(x, as(A, dtype), nil, nil, 1)
  if adapter.scale ~= 1 then u = u * adapter.scale end
  return ops.linear(u, as(B, dtype), nil, y, 1)
end

-- Returns a layer's active adapter and its name, or nil if no adapter is active.
local function acting(layer)
  local state = layer.lora_
  local name = state.active
  if not name or state.merged then return nil end
  return state.adapters[name], name
end

local function linear_forward(self, x, residual)
  local state = self.lora_
  local adapter, name = acting(self)
  if not adapter then return state.base(self, x, residual) end
  local A, B, magnitude = tensors_of(self, name)
  local given, drops = dropped(adapter, x)
  if not magnitude then return low_rank(adapter, A, B, given, state.base(self, x, residual)) end
  local out_in, bias = state.kind.out_in, self.bias
  local factor = factor_of(self, name, magnitude, x:dtype())
  if drops then                                            -- W x + (factor - 1) W drop(x) + factor scale B A drop(x)
    local base = ops.linear(given, self.weight, nil, nil, out_in)
    return state.base(self, x, residual) - base + low_rank(adapter, A, B, given, base) * factor
  end
  local y = low_rank(adapter, A, B, x, ops.linear(x, self.weight, nil, nil, out_in)) * factor
  if bias ~= nil then y = y + bias end
  return residual ~= nil and y + residual or y
end

local function table_forward(self, index)
  local state = self.lora_
  local adapter, name = acting(self)
  local y = state.base(self, index)
  if not adapter then return y end
  local A, B, magnitude = tensors_of(self, name)
  local dtype, at = y:dtype(), index
  if index.device_ ~= A.device_ and not native.recorder then at = index:to(A:device()) end
  local u = ops.embedding(A:transpose(0, 1):contiguous(), at, self.padding_idx):to(y:device())
  u = as(u, dtype)
  if adapter.scale ~= 1 then u = u * adapter.scale end
  y = ops.linear(u, as(B, dtype), nil, y, 1)
  return magnitude and y * factor_of(self, name, magnitude, dtype) or y
end

--- Returns a layer's weight including its active adapter, for code that reads the weight instead of calling the layer.
--- Backward through the result computes the gradients of the adapter.
---@param layer ps.nn.Module
---@return ps.Tensor
function layers.weight(layer)
  local adapter, name = acting(layer)
  local base = layer.lora_.had.weight_now
  local weight = base and base(layer) or layer.weight
  if not adapter then return weight end
  local A, B, magnitude = tensors_of(layer, name)
  local dtype = weight:dtype()
  local by_row = layer.lora_.kind.out_in == 1
  if by_row then weight = ops.linear(as(B * adapter.scale, dtype), as(A, dtype), nil, weight, 0)
  else weight = ops.linear(as(A, dtype):transpose(0, 1), as(B * adapter.scale, dtype), nil, weight, 1) end
  if not magnitude then return weight end
  local factor = factor_of(layer, name, magnitude, dtype)
  return weight * (by_row and factor:reshape(-1, 1) or factor)
end

local function head_loss(self, x, targets, options)
  return functional.lm_loss(x, layers.weight(self), targets, options)
end

-- -- tensor parallelism ----------------------------------------------------------------------------------------------
local tools = { acting = acting, tensors = tensors_of, dropped = dropped, factor = factor_of, as = as }

local function cut_into(...) parallel.cut_into(tools, ...) end

-- -- attaching --------------------------------------------------------------------------------------------------------
local OWN = { "forward", "loss", "weight_now", "cut_into" }

local function attach(found)
  local layer, kind = found.module, found.kind
  local state = { kind = kind, base = layer.forward, adapters = {}, entry = found, had = {} }
  for _, key in ipairs(OWN) do state.had[key] = rawget(layer, key) end
  rawset(layer, "lora_", state)
  rawset(layer, "forward", kind.table and table_forward or linear_forward)
  if kind.head then rawset(layer, "loss", head_loss) end
  rawset(layer, "weight_now", layers.weight)
  rawset(layer, "cut_into", cut_into)
end

local function new_tensors(layer, kind, name, r, how)
  local inputs, outputs = layers.sizes(layer, kind)
  local weight = layer.weight
  local dtype = weight:dtype() == "fp64" and "fp64" or "fp32"
  local where = { dtype = dtype, device = weight:device() }
  local function filled(shape, fill)
    local t = create.empty(shape, where)
    if how.init == false then return init.normal_(t, 0, 1 / r) end
    return fill(t)
  end
  if kind.table then                                       -- as in PEFT, A is zero and B is normally distributed
    holder(layer, "lora_embedding_A"):param(name, filled({ r, inputs }, init.zeros_))
    holder(layer, "lora_embedding_B"):param(name, filled({ outputs, r }, function(t) return init.normal_(t, 0, 1) end))
    return
  end
  put(layer, "lora_A", name, filled({ r, inputs }, function(t)
    if how.init == "gaussian" then return init.normal_(t, 0, 1 / r) end
    return init.kaiming_uniform_(t, math.sqrt(5))
  end))
  put(layer, "lora_B", name, filled({ outputs, r }, init.zeros_))
end

--- Adds an adapter to a layer without activating it.
---@param found {name: string, module: ps.nn.Module, kind: table}
---@param name string the adapter's name
---@param how {r: integer, alpha: number, dropout: number, use_rslora: boolean, use_dora: boolean, init: any}
function layers.add(found, name, how)
  local layer, kind = found.module, found.kind
  if how.use_dora then packed.refuse(layer, "lora: use_dora", "use LoRA, or a model whose weights are not packed") end
  if not rawget(layer, "lora_") then attach(found) end
  local adapter = { r = how.r, alpha = how.alpha, dora = how.use_dora,
    scale = how.alpha / (how.use_rslora and math.sqrt(how.r) or how.r) }
  new_tensors(layer, kind, name, how.r, how)
  if how.dropout > 0 and not kind.table then  -- an embedding's input is indices; PEFT applies no dropout
    adapter.dropout = activation.Dropout(how.dropout)
    rawset(adapter.dropout, "training", layer.training)
    local inner = holder(layer, "lora_dropout")
    nn_module.register(inner, name, "module", adapter.dropout)
  end
  layer.lora_.adapters[name] = adapter
  if how.use_dora then
    put(layer, "lora_magnitude_vector", name, create.zeros({ select(2, layers.sizes(layer, kind)) },
      { dtype = "fp32", device = layer.weight:device() }))
    layers.reset_magnitude(layer, name)
  end
end

--- Sets DoRA's magnitudes to the norms of the rows of the weight, including the adapter.
---@param layer ps.nn.Module
---@param name string
function layers.reset_magnitude(layer, name)
  local deferred = native.recorder ~= nil                  -- inside ps.deferred, values are computed later
  if not layer.lora_.adapters[name].dora or layer.weight:device() == "meta" and not deferred then return end
  local magnitude = layer.lora_magnitude_vector[name].weight
  scope.no_grad(function() magnitude:copy_(norm_of(layer, name)) end)
end

-- -- merging ----------------------------------------------------------------------------------------------------------
local REMEDY = "save the adapter, then run tools/gguf.lua convert BASE --adapter ADAPTER --out FILE"

--- Raises an error if the layer's weight is packed.
---@param layer ps.nn.Module
---@param call string
function layers.check_mergeable(layer, call) packed.refuse(layer, call, REMEDY) end

--- Adds an adapter to a weight, one block of rows at a time, and calls fn(first, block) for each block. `first` is the
--- index of the block's first row. A block is computed in fp32 and then converted to the weight's dtype. `sign` is 1 to
--- add the adapter, or -1 to subtract the adapter. `factor` is DoRA's factor, fp32 [O].
---@param weight ps.Tensor
---@param by_row boolean true if the weight is [O, I], false if it is [I, O]
---@param parts {A: ps.Tensor, B: ps.Tensor, scale: number, factor?: ps.Tensor}
---@param sign integer
---@param fn fun(first: integer, block: ps.Tensor)
function layers.blocks(weight, by_row, parts, sign, fn)
  local rows, width = weight:size(0), weight:size(1)
  local A, B = as(parts.A:detach(), "fp32"), as(parts.B:detach(), "fp32") * parts.scale
  local step = math.max(1, math.floor(BLOCK / 2 / width))
  for first = 0, rows - 1, step do
    scope.scope(function()
      local n = math.min(step, rows - first)
      local block = as(weight:detach():narrow(0, first, n), "fp32")
      local delta
      if by_row then delta = ops.linear(B:narrow(0, first, n), A, nil, nil, 0)
      else delta = ops.linear(A:narrow(1, first, n):transpose(0, 1):contiguous(), B, nil, nil, 1) end
      local factor = parts.factor
      if factor ~= nil and by_row then factor = factor:narrow(0, first, n):reshape(-1, 1) end
      if sign > 0 then
        block = block + delta
        if factor ~= nil then block = block * factor end
      else
        if factor ~= nil then block = block / factor end
        block = block - delta
      end
      fn(first, as(block, weight:dtype()))
    end)
  end
end

-- Returns the adapter's tensors in the form that layers.blocks expects. `values` maps a tensor to its fp32 values.
local function parts_of(layer, name, values)
  local A, B, magnitude = tensors_of(layer, name)
  if values then A, B, magnitude = values(A), values(B), magnitude and values(magnitude) end
  local factor = magnitude and scope.no_grad(function() return as(magnitude, "fp32") / norm_of(layer, name, A, B) end)
  return { A = A, B = B, scale = layer.lora_.adapters[name].scale, factor = factor or nil }
end

--- Returns a new tensor that contains a layer's weight with an adapter. Does not change the layer.
---@param layer ps.nn.Module
---@param name string
---@param values? fun(tensor: ps.Tensor): ps.Tensor returns the fp32 values of an adapter's tensor
---@return ps.Tensor
function layers.merged_weight(layer, name, values)
  layers.check_mergeable(layer, "merged = true")
  return scope.no_grad(function()
    local weight = layer.weight
    local made = create.empty(weight:shape(), { dtype = weight:dtype(), device = weight:device() })
    layers.blocks(weight, layer.lora_.kind.out_in == 1, parts_of(layer, name, values), 1, function(first, block)
      made:narrow(0, first, block:size(0)):copy_(block)
    end)
    return made
  end)
end

--- Adds the active adapter to the weight.
---@param layer ps.nn.Module
function layers.merge(layer)
  local state = layer.lora_
  local name = state.active
  if not name or state.merged then return end
  layers.check_mergeable(layer, "merge_adapter")
  scope.no_grad(function()
    local parts, weight = parts_of(layer, name), layer.weight
    layers.blocks(weight, state.kind.out_in == 1, parts, 1, function(first, block)
      weight:detach():narrow(0, first, block:size(0)):copy_(block)
    end)
    state.merged, state.factor = name, parts.factor and parts.factor:keep()
  end)
end

--- Subtracts the merged adapter from the weight.
---@param layer ps.nn.Module
function layers.unmerge(layer)
  local state = layer.lora_
  local name = state.merged
  if not name then return end
  scope.no_grad(function()
    local A, B = tensors_of(layer, name)
    local weight = layer.weight
    layers.blocks(weight, state.kind.out_in == 1,
      { A = A, B = B, scale = state.adapters[name].scale, factor = state.factor }, -1, function(first, block)
        weight:detach():narrow(0, first, block:size(0)):copy_(block)
      end)
  end)
  state.merged, state.factor = nil, nil
end

local HOLDERS = { "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_dropout" }

--- Removes an adapter from a layer, even if `add` failed before it was complete. If no adapter remains, restores the
--- layer's original state.
---@param layer ps.nn.Module
---@param name string
---@return boolean bare whether the layer has no adapter left
function layers.discard(layer, name)
  local state = rawget(layer, "lora_")
  if not state then return true end
  state.adapters[name] = nil
  if state.active == name then state.active = nil end
  if next(state.adapters) == nil then
    layers.remove(layer)
    return true
  end
  for _, key in ipairs(HOLDERS) do
    if registry.kind(layer, key) then
      if registry.kind(layer[key], name) then layer[key][name] = nil end
      if registry.members(layer[key])() == nil then layer[key] = nil end
    end
  end
  return false
end

--- Removes all adapters from a layer, and restores the layer's original state.
---@param layer ps.nn.Module
function layers.remove(layer)
  for _, key in ipairs(HOLDERS) do
    if registry.kind(layer, key) then layer[key] = nil end
  end
  local had = layer.lora_.had
  for _, key in ipairs(OWN) do rawset(layer, key, had[key]) end
  rawset(layer, "lora_", nil)
end

return layers
