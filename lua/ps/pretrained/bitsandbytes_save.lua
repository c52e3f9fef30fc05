-- SPDX-License-Identifier: BSD-3-Clause
-- Writes models whose layers are packed as NF4 in the layout of bitsandbytes (ps/pretrained/bitsandbytes.lua). Layers
-- that are packed as NF4_DOUBLE are written with double quantization. Layers that are not packed are listed in
-- llm_int8_skip_modules, because transformers expects NF4 in every linear layer that this list does not contain.
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

local NF4, NF4_DOUBLE = packed.type "NF4", packed.type "NF4_DOUBLE"
local CODES = NF4.block / 2                                -- size in bytes of a block's codes, which follow its scale
local HEAD = packed.SCALES_HEAD

---@class ps.pretrained.Nf4Layer
---@field shape integer[] shape of the unpacked weight
---@field rows integer
---@field columns integer
---@field dtype string dtype of the unpacked weight
---@field kind ps.nn.PackedType

---@class ps.pretrained.Nf4Saving
---@field layers table<string, ps.pretrained.Nf4Layer> the packed layers, by the name of the weight
---@field scales table<string, string> maps the name of an NF4_DOUBLE weight's scales to the weight's name
---@field skipped string[] names of layers whose weights are not packed
local Saving = {}
Saving.__index = Saving

--- Returns whether a layer's weight is packed as NF4 and bitsandbytes supports NF4 in this kind of layer.
---@param layer ps.nn.Module
---@return boolean
function saving.can(layer)
  local kind = packed.of(layer)
  return (kind == NF4 or kind == NF4_DOUBLE) and layer.class_name ~= "Embedding"
end

--- Returns the layers of a model that are packed as NF4, or nil if there are none.
---@param model ps.pretrained.Model
---@return ps.pretrained.Nf4Saving?
function saving.of(model)
  local self = setmetatable({ layers = {}, scales = {} }, Saving)
  local skipped = {}
  for name, module in model:named_modules() do
    if saving.can(module) then
      local rows, columns, kind = module.outputs, module.inputs, packed.of(module)
      local own = (name == "" and "" or name .. ".") .. "weight"
      if kind.scales then self.scales[own .. "_scales"] = own end
      self.layers[own] = { rows = rows, columns = columns, kind = kind,
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

--- Returns a model's settings with a quantization_config that transformers reads.
---@param config table
---@param dtype string Hugging Face's name of the dtype in which the model computes
---@return table
function Saving:config(config, dtype)
  local fields = copied(config)
  fields.quantization_config = { quant_method = "bitsandbytes", load_in_4bit = true, load_in_8bit = false,
    bnb_4bit_quant_type = "nf4", bnb_4bit_use_double_quant = next(self.scales) ~= nil, bnb_4bit_quant_storage = "uint8",
    bnb_4bit_compute_dtype = dtype, llm_int8_skip_modules = self.skipped }
  return fields
end

-- Returns the tensors that store a packed weight. Each is {suffix of its name, dtype, shape, function that returns its
-- bytes}. `scales` has the scales of a weight in NF4_DOUBLE, and is nil for other weights.
local function tensors_of(layer, weight, scales)
  local numel, nbytes = layer.rows * layer.columns, layer.kind.nbytes
  local before = nbytes - CODES
  local function bytes_of_blocks(first, n)
    return function()
      return weight:detach():reshape(-1, nbytes):narrow(1, first, n):contiguous():to("cpu")
    end
  end
  local function part_of_scales(first, n)
    return function() return scales:detach():narrow(0, first, n):contiguous():to("cpu") end
  end
  local state = { quant_type = "nf4", blocksize = NF4.block, shape = { layer.rows, layer.columns },
    dtype = save.dtype_of { layer } }
  if scales then
    state.nested_blocksize, state.nested_dtype = packed.SCALES_GROUP, "float32"
    state.nested_offset = scales:detach():narrow(0, 0, 1):item()
  end
  local text = encode(state)
  local list = {
    { "", "uint8", { numel / 2, 1 }, bytes_of_blocks(before, CODES) },
    { ".absmax", scales and "uint8" or "fp32", { numel / NF4.block }, bytes_of_blocks(0, before) },
    { ".quant_map", "fp32", { bitsandbytes.CODES }, bitsandbytes.map },
    { bitsandbytes.STATE .. "nf4", "uint8", { #text }, function()
      return create.tensor({ text:byte(1, -1) }, { dtype = "uint8", device = "cpu" })
    end } }
  if scales then
    local groups = scales:numel() - HEAD
    list[#list + 1] = { ".nested_absmax", "fp32", { groups }, part_of_scales(HEAD, groups) }
    list[#list + 1] = { ".nested_quant_map", "fp32", { HEAD - 1 }, part_of_scales(1, HEAD - 1) }
  end
  return list
end

--- Replaces the entries of packed weights with entries for bitsandbytes' tensors (see save.run).
---@param entries table[]
---@return table[]
function Saving:entries(entries)
  local list, scales = {}, {}
  for _, entry in ipairs(entries) do
    local weight = self.scales[entry.name]
    if weight then scales[weight] = entry.tensor end
  end
  for _, entry in ipairs(entries) do
    local layer = self.layers[entry.name]
    if not layer then
      if not self.scales[entry.name] then list[#list + 1] = entry end    -- scales are written with their weight
    elseif entry.parts or entry.owner > 0 then
      error(("save_pretrained: %s is packed (NF4) on another rank; packed weights can be written only if rank 0 has "
        .. "all of them, without pipelines and tensor parallelism"):format(entry.name))
    else
      for _, one in ipairs(tensors_of(layer, entry.tensor, scales[entry.name])) do
        list[#list + 1] = { name = entry.name .. one[1], dtype = one[2], shape = one[3], tensor = one[4], owner = 0,
          numel = rectangles.numel(one[3]), side = true }
      end
    end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

return saving
