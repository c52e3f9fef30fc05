-- SPDX-License-Identifier: BSD-3-Clause
-- ps.quantize: packs the weights of a model's layers (ps/nn/packed.lua).
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local collector = require "ps.core.collector"
local create = require "ps.tensor.create"
local double_quant = require "ps.nn.double_quant"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local native = require "ps.core.ffi"
local nn_module = require "ps.nn.module"
local packed = require "ps.nn.packed"
local scope = require "ps.core.scope"
local C, check = native.C, native.check
local error = caller.error

local TYPES = { nf4 = "NF4", q8_0 = "Q8_0", q4_0 = "Q4_0", q4_1 = "Q4_1", q5_0 = "Q5_0", q5_1 = "Q5_1", q4_k = "Q4_K",
  q6_k = "Q6_K" }
local VALUES = 2 ^ 20                                      -- number of values that are packed at a time
local LARGE = 2 ^ 22                                       -- size in bytes of a large weight; see free()

local floats, bytes = array "float", array "uint8_t"

-- Converts n blocks of NF4 to blocks of NF4_DOUBLE. Copies the blocks' scales to `scales`. The codes of the scales are
-- not written yet.
local function split(from, to, scales, n)
  local one, other = packed.type "NF4", packed.type "NF4_DOUBLE"
  for i = 0, n - 1 do
    local block = from + i * one.nbytes
    scales[i] = native.ffi.cast("const float *", block)[0]
    native.ffi.copy(to + i * other.nbytes + 1, block + 4, one.block / 2)
  end
end

-- Quantizes the scales of a weight's blocks and writes their codes into the blocks. Returns the data that maps codes to
-- scales: offset, map and absolute maxima.
local function quantize_scales(made, values, n)
  local codes, scales = double_quant.quantize(values, n)
  local of_blocks = create.empty({ n, 1 }, { dtype = "uint8", device = "cpu" })
  check(C.ps_tensor_write(of_blocks, codes, n))
  made:reshape(n, -1):narrow(1, 0, 1):copy_(of_blocks)
  local numel = packed.scales_numel(n * packed.type("NF4").block)
  local kept = create.empty({ numel }, { dtype = "fp32", device = made:device() })
  check(C.ps_tensor_write(kept, scales, 4 * numel))
  return kept
end

-- Packs the rows of a layer's weight. Returns a new tensor with the packed rows, and the weight's scales if the type
-- has scales.
local function pack(name, layer, kind, shape)
  local weight = layer.weight:detach()
  if layer.class_name == "Conv1D" then weight = weight:transpose(0, 1) end
  local rows, width = weight:size(0), weight:size(1)
  local made = create.empty(shape, { dtype = "uint8", device = layer.weight:device() })
  local step = math.max(1, math.floor(VALUES / width))
  local per_row, plain = width / kind.block, kind.scales and packed.type "NF4" or kind
  local values, blocks = floats(step * width), bytes(step * per_row * plain.nbytes)
  local of_blocks, joined = kind.scales and floats(rows * per_row), kind.scales and bytes(step * shape[2])
  for first = 0, rows - 1, step do
    scope.scope(function()
      local n = math.min(step, rows - first)
      local part = weight:narrow(0, first, n):to("fp32"):contiguous()
      check(C.ps_tensor_read(part, values, part:nbytes()))
      local ok, why = pcall(check, C.ps_pack(plain.number, values, n * width, blocks))
      if not ok then error(("quantize: %s.weight: %s"):format(name, tostring(why)), 0) end
      if of_blocks then split(blocks, joined, of_blocks + first * per_row, n * per_row) end
      check(C.ps_tensor_write(made:narrow(0, first, n), joined or blocks, n * shape[2]))
    end)
  end
  return made, of_blocks and quantize_scales(made, of_blocks, rows * per_row)
end

-- Frees a large weight after it has been packed. Without a collection, the unpacked weights of all layers would stay in
-- memory, and mapped files would stay mapped.
local function free(nbytes)
  if nbytes >= LARGE then collector.after_making() end
end

local function ends_with(name, list)
  for _, one in ipairs(list) do if name == one or name:sub(-#one - 1) == "." .. one then return true end end
  return false
end

-- Raises an error for a model whose layers can no longer be replaced.
local function check_bare(model)
  for name, module in model:named_modules() do
    if rawget(module, "lora_") then
      error(("quantize: %s has an adapter, and its weight would not be packed; call ps.quantize before ps.lora.wrap")
        :format(name))
    end
  end
  for name, p in model:named_parameters() do
    if nn_module.updated_by(p) then
      error(("quantize: an engine trains this model (%s); pack it before ps.initialize, in model_func"):format(name))
    end
  end
end

local OPTIONS = { type = "string", skip = "table", int8_activations = "boolean", double_quant = "boolean" }

-- Returns the name of the packed type that the options type and double_quant select.
local function type_of(asked, double)
  local wanted = caller.one_of(asked or "nf4", TYPES, "quantize: type")
  if not double then return wanted end
  if wanted ~= "NF4" then
    error(("quantize: double_quant is only for the type nf4, not %s; remove the option"):format(asked))
  end
  return "NF4_DOUBLE"
end

--- Packs the weights of a model's linear layers into blocks of 4 to 8 bits per weight, and freezes the weights. The
--- head and the embeddings keep their type. Adapters (ps.lora.wrap) can be trained on top of packed weights.
---@param model ps.nn.Module the model, which must have no adapters and no engine yet
---@param options? {type?: string, skip?: string[], int8_activations?: boolean, double_quant?: boolean} type: "nf4"
--- (default), "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k" or "q6_k"; skip: names of layers that are not packed, or
--- last components of such names; int8_activations: round activations to 8 bits in generation, which is faster (not
--- for "nf4"); double_quant: store the scales in 8 bits (only for "nf4"; bnb_4bit_use_double_quant)
---@return ps.nn.Module model
---@return {name: string, type: string}[] layers the packed layers
return function(model, options)
  if handle.of(model) then error "quantize: ps.initialize made this model; pack the module before, in model_func" end
  if not nn_module.is_module(model) then error(("quantize takes a module, not a %s"):format(type(model))) end
  options = caller.options(options, "quantize", OPTIONS)
  check_bare(model)
  local wanted, list = type_of(options.type, options.double_quant), {}
  scope.no_grad(function()
    for name, module in model:named_modules() do
      if module.class_name ~= "Embedding" and module.class_name ~= "LMHead" and packed.can(module)
        and not ends_with(name, options.skip or {}) then
        local kind = packed.type(wanted)
        local shape = packed.shape(module, kind)
        if not shape and packed.SMALLER[wanted] then
          kind = packed.type(packed.SMALLER[wanted])
          shape = packed.shape(module, kind)
        end
        if shape then
          local nbytes = module.weight:nbytes()
          packed.set(model, module, kind, pack(name, module, kind, shape))
          hooks.tell("packed", module.weight, (name == "" and "" or name .. ".") .. "weight")
          free(nbytes)
          list[#list + 1] = { name = name, type = kind.name }
        end
      end
    end
  end)
  if #list == 0 then
    error(("quantize: the model has no linear layer whose rows are whole blocks of %s"):format(wanted))
  end
  if options.int8_activations and packed.int8(model) == 0 then
    error(("quantize: int8_activations has no effect on the type %s; remove the option"):format(wanted))
  end
  return model, list
end
