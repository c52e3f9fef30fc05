-- SPDX-License-Identifier: BSD-3-Clause
-- Writes models whose layers are packed as NF4 in the layout of bitsandbytes (ps/pretrained/bitsandbytes.lua), without
-- double quantization. The layers that are not packed are listed in llm_int8_skip_modules: transformers expects every
-- other linear layer in NF4.
local bitsandbytes = require "ps.pretrained.bitsandbytes"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local create = require "ps.tensor.create"
local encode = require "ps.core.encode"
local packed = require "ps.nn.packed"
local rectangles = require "ps.core.rectangles"
local save = require "ps.pretrained.save"
local error = caller.error

local saving = {}

local NF4 = packed.type "NF4"
local SCALE = 4                                            -- bytes of a block's scale, which precedes its codes

---@class ps.pretrained.Nf4Layer
---@field shape integer[] shape of the unpacked weight
---@field rows integer
---@field columns integer
---@field dtype string dtype of the unpacked weight

---@class ps.pretrained.Nf4Saving
---@field layers table<string, ps.pretrained.Nf4Layer> by the name of the weight
---@field skipped string[] names of layers whose weights are not packed
local Saving = {}
Saving.__index = Saving

--- Returns whether a layer's weight is packed as NF4, in a layer that bitsandbytes supports.
---@param layer ps.nn.Module
---@return boolean
function saving.can(layer) return packed.of(layer) == NF4 and layer.class_name ~= "Embedding" end

--- Returns the layers of a model that are packed as NF4, or nil if there are none.
---@param model ps.pretrained.Model
---@return ps.pretrained.Nf4Saving?
function saving.of(model)
  local self = setmetatable({ layers = {} }, Saving)
  local skipped = {}
  for name, module in model:named_modules() do
    if saving.can(module) then
      local rows, columns = module.outputs, module.inputs
      self.layers[(name == "" and "" or name .. ".") .. "weight"] = { rows = rows, columns = columns,
        shape = module.class_name == "Conv1D" and { columns, rows } or { rows, columns },
        dtype = rawget(module, "packed_").dtype }
    elseif packed.CLASSES[module.class_name] then
      skipped[name] = true
    end
  end
  if not next(self.layers) then return nil end
  for name in pairs(model.config.tie_word_embeddings and model.ties or {}) do
    skipped[name:gsub("%.[^.]*$", "")] = true
  end
  self.skipped = caller.sorted_names(skipped)
  return self
end

--- Returns a model's settings with the quantization_config for transformers.
---@param config table
---@param dtype string Hugging Face's name of the dtype in which the model computes
---@return table
function Saving:config(config, dtype)
  local fields = copied(config)
  fields.quantization_config = { quant_method = "bitsandbytes", load_in_4bit = true, load_in_8bit = false,
    bnb_4bit_quant_type = "nf4", bnb_4bit_use_double_quant = false, bnb_4bit_quant_storage = "uint8",
    bnb_4bit_compute_dtype = dtype, llm_int8_skip_modules = self.skipped }
  return fields
end

-- Returns the tensors of a packed weight, each as {end of its name, dtype, shape, function that makes its bytes}.
local function tensors_of(layer, weight)
  local numel = layer.rows * layer.columns
  local function bytes_of_blocks(first, n)
    return function()
      return weight:detach():reshape(-1, NF4.nbytes):narrow(1, first, n):contiguous():to("cpu")
    end
  end
  local text = encode { quant_type = "nf4", blocksize = NF4.block, shape = { layer.rows, layer.columns },
    dtype = save.dtype_of { layer } }
  return {
    { "", "uint8", { numel / 2, 1 }, bytes_of_blocks(SCALE, NF4.nbytes - SCALE) },
    { ".absmax", "fp32", { numel / NF4.block }, bytes_of_blocks(0, SCALE) },
    { ".quant_map", "fp32", { bitsandbytes.CODES }, bitsandbytes.map },
    { bitsandbytes.STATE .. "nf4", "uint8", { #text }, function()
      return create.tensor({ text:byte(1, -1) }, { dtype = "uint8", device = "cpu" })
    end } }
end

--- Replaces the entries of packed weights by those of bitsandbytes' tensors (see save.run).
---@param entries table[]
---@return table[]
function Saving:entries(entries)
  local list = {}
  for _, entry in ipairs(entries) do
    local layer = self.layers[entry.name]
    if not layer then
      list[#list + 1] = entry
    elseif entry.parts or entry.owner > 0 then
      error(("save_pretrained: %s is packed (NF4) on another rank; packed weights can be written only if rank 0 has "
        .. "all of them, without pipelines and tensor parallelism"):format(entry.name))
    else
      for _, one in ipairs(tensors_of(layer, entry.tensor)) do
        list[#list + 1] = { name = entry.name .. one[1], dtype = one[2], shape = one[3], tensor = one[4], owner = 0,
          numel = rectangles.numel(one[3]), side = true }
      end
    end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

return saving
