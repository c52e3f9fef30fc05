-- SPDX-License-Identifier: BSD-3-Clause
-- Layers with packed weights, such as Q4_K of GGUF files. A packed weight is a buffer of type uint8 and shape [out,
-- bytes]. Each row is a sequence of blocks. The weight has no gradient. Products of few rows read the blocks directly.
-- Other products unpack tiles of the weight one by one, so the whole weight is never unpacked at once. Token embeddings
-- unpack only the rows that are looked up.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local registry = require "ps.nn.registry"
local functional = require "ps.tensor.functional"
local scope = require "ps.core.scope"
local error = caller.error

local packed = {}

---@class ps.nn.PackedType
---@field name string
---@field number integer value of the ops' attribute `type`: ggml's type number, 256 for NF4, or 257 for NF4_DOUBLE
---@field block integer number of values in a block
---@field nbytes integer size of a block in bytes
---@field scales? boolean whether the scales of a weight are in a separate buffer (NF4_DOUBLE)

local BY_NAME, BY_NUMBER = {}, {}
for _, row in ipairs { { "Q4_0", 2, 32, 18 }, { "Q4_1", 3, 32, 20 }, { "Q5_0", 6, 32, 22 }, { "Q5_1", 7, 32, 24 },
  { "Q8_0", 8, 32, 34 }, { "Q2_K", 10, 256, 84 }, { "Q3_K", 11, 256, 110 }, { "Q4_K", 12, 256, 144 },
  { "Q5_K", 13, 256, 176 }, { "Q6_K", 14, 256, 210 }, { "IQ4_NL", 20, 32, 18 }, { "IQ4_XS", 23, 256, 136 },
  { "MXFP4", 39, 32, 17 }, { "NF4", 256, 64, 36 }, { "NF4_DOUBLE", 257, 64, 33, true } } do
  local one = { name = row[1], number = row[2], block = row[3], nbytes = row[4], scales = row[5] }
  BY_NAME[one.name], BY_NUMBER[one.number] = one, one
end

-- The replacement types for rows whose length is not a multiple of 256, as in llama-quantize.
packed.SMALLER = { Q4_K = "Q5_0", Q6_K = "Q8_0" }

--- Returns the packed type that has this name or number, or nil if no type has it.
---@param which string|integer
---@return ps.nn.PackedType?
function packed.type(which) return BY_NAME[which] or BY_NUMBER[which] end

--- Returns the packed type of a layer, or nil if its weight is not packed.
---@param layer ps.nn.Module
---@return ps.nn.PackedType?
function packed.of(layer)
  local state = rawget(layer, "packed_")
  return state and state.type
end

--- Raises an error if a layer's weight is packed. Functions that need an unpacked weight call this function.
---@param layer ps.nn.Module
---@param call string
---@param remedy string
function packed.refuse(layer, call, remedy)
  local kind = packed.of(layer)
  if kind then
    error(("%s: a weight of the model is packed (%s), and cannot be changed or written; %s"):format(call, kind.name,
      remedy))
  end
end

-- Multiplies by the packed weight. Rounds activations to 8 bits only if the layer is set to do so and no gradients are
-- recorded.
local function linear_forward(self, x, residual)
  local state = rawget(self, "packed_")
  local int8 = state.int8 and not scope.grad_enabled()
  local owner = state.owner
  return native.ops.linear_packed(x, owner.weight, self.bias, residual, owner.weight_scales, state.type.number, 0,
    int8 and 1 or 0)
end

local function table_forward(self, index)
  local state, weight = rawget(self, "packed_"), self.weight
  local rows = native.ops.embedding(weight, index, -1)
  return native.ops.unpack(rows, nil, state.type.number, native.dtype_code(state.dtype))
end

local function head_loss(self, x, targets, options)
  local width = x:size(-1)
  return functional.cross_entropy(self(x:reshape(-1, width)), targets:reshape(-1), options)
end

-- Returns the unpacked weight, in the layout of the layer's class.
local function weight_now(self)
  local state = rawget(self, "packed_")
  local owner = state.owner
  local weight = native.ops.unpack(owner.weight, owner.weight_scales, state.type.number, native.dtype_code(state.dtype))
  return self.class_name == "Conv1D" and weight:transpose(0, 1) or weight
end

--- Calls fn(weight, name, of_file) for each packed weight of a model, in the order of the model's layers.
---@param model ps.nn.Module
---@param fn fun(weight: ps.Tensor, name: string, of_file: boolean?) weight: uint8, of the shape that packed.shape
--- returns. of_file: whether the blocks of the weight, and its scales if its type has scales, are equal to the data in
--- the model's file
function packed.each(model, fn)
  for name, layer in model:named_modules() do
    local state = rawget(layer, "packed_")
    if state and rawequal(state.owner, layer) then
      fn(layer.weight, (name == "" and "" or name .. ".") .. "weight", state.of_file)
    end
  end
end

local function attach(layer, owner, kind, dtype)
  rawset(layer, "packed_", { type = kind, dtype = dtype, owner = owner })
  rawset(layer, "forward", layer.class_name == "Embedding" and table_forward or linear_forward)
  rawset(layer, "weight_now", weight_now)
  if layer.class_name == "LMHead" then rawset(layer, "loss", head_loss) end
end

--- The names of the classes whose weights can be packed: linear layers, heads and embeddings.
packed.CLASSES = { Linear = true, Conv1D = true, LMHead = true, Embedding = true }

--- Returns whether a module's weight can be packed. This is the case if the module's class is in CLASSES and the module
--- has no adapters.
---@param module ps.nn.Module
---@return boolean
function packed.can(module)
  return packed.CLASSES[module.class_name] and registry.kind(module, "weight") == "param"
    and not rawget(module, "lora_") or false
end

--- Returns the shape of the packed weight of a layer.
---@param layer ps.nn.Module
---@param kind ps.nn.PackedType
---@return integer[]? shape nil if the rows cannot be divided into whole blocks
function packed.shape(layer, kind)
  local rows, width = layer.outputs or layer.rows, layer.inputs or layer.width
  if width % kind.block ~= 0 then return nil end
  return { rows, width / kind.block * kind.nbytes }
end

-- HEAD is the number of values before the absolute maxima in the scales of a weight. GROUP is the number of blocks for
-- each absolute maximum (base/blocks.h).
local HEAD, GROUP = 257, 256
packed.SCALES_HEAD, packed.SCALES_GROUP = HEAD, GROUP

--- Returns the number of elements in the scales of a weight of type NF4_DOUBLE.
---@param numel integer number of values of the weight
---@return integer
function packed.scales_numel(numel) return HEAD + math.ceil(numel / BY_NAME.NF4_DOUBLE.block / GROUP) end

--- Replaces a layer's weight by a packed weight.
---@param model ps.nn.Module the model, in which a head may be tied to the layer
---@param layer ps.nn.Module
---@param kind ps.nn.PackedType
---@param weight ps.Tensor uint8, of the shape that packed.shape returns
---@param scales? ps.Tensor fp32 [packed.scales_numel], if the type has scales
---@param of_file? boolean whether the blocks are equal to the blocks in the model's file
function packed.set(model, layer, kind, weight, scales, of_file)
  local dtype = layer.weight:dtype()
  layer.weight = nil
  layer:buffer("weight", weight)
  if scales then layer:buffer("weight_scales", scales, { keep_dtype = true }) end
  attach(layer, layer, kind, dtype)
  rawget(layer, "packed_").of_file = of_file
  local head = rawget(model, "tied_head")
  if head and rawget(head, "tied") == layer then attach(head, layer, kind, dtype) end
end

-- The types whose products can use activations of 8 bits (ps_blocks_int8 of base/blocks.h).
local INT8 = { Q4_0 = true, Q4_1 = true, Q5_0 = true, Q5_1 = true, Q8_0 = true, Q4_K = true, Q5_K = true, Q6_K = true }

--- Makes a model's packed layers round activations to 8 bits in products of up to 4 rows, if no gradients are recorded.
---@param model ps.nn.Module
---@return integer count number of layers for which this setting has an effect
function packed.int8(model)
  local count = 0
  local function set(layer)
    local state = layer and rawget(layer, "packed_")
    if state and INT8[state.type.name] and layer.class_name ~= "Embedding" and not state.int8 then
      state.int8, count = true, count + 1
    end
  end
  for _, module in model:named_modules() do set(module) end
  set(rawget(model, "tied_head"))
  return count
end

return packed
