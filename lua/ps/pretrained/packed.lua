-- SPDX-License-Identifier: BSD-3-Clause
-- Models whose weights keep the packed form that they have in their files (option keep_quantized of
-- ps.from_pretrained). The files are GGUF files, or folders whose weights bitsandbytes quantized to NF4.
local create = require "ps.tensor.create"
local packed = require "ps.nn.packed"
local weights = require "ps.pretrained.weights"

local of_files = {}

-- Returns the packed type for a layer whose weight has the type `name` in the files. For an embedding with
-- double-quantized scales, returns NF4, whose scales are fp32, because the rows of an embedding are looked up
-- one by one.
local function kind_of(module, name)
  local kind = packed.type(name)
  return kind and kind.scales and module.class_name == "Embedding" and packed.type "NF4" or kind
end

--- Replaces the weights of a new model's layers with packed weights without data. Only weights that the files store in
--- blocks are replaced. Later reads of these weights from the files return blocks instead of numbers.
---@param model ps.pretrained.Model
---@param files ps.pretrained.Files the open files
---@param device? string
---@return integer count number of layers with packed weights
function of_files.prepare(model, files, device)
  local state, count = files:state(weights.namer(model)), 0
  for name, module in model:named_modules() do
    local own = (name == "" and "" or name .. ".") .. "weight"
    local kind = packed.can(module) and state:has(own) and kind_of(module, state:type(own))
    local shape = kind and packed.shape(module, kind)
    if shape then
      local scales = kind.scales and create.empty({ packed.scales_numel(shape[1] * shape[2] / kind.nbytes
        * kind.block) }, { dtype = "fp32", device = device }) or nil
      packed.set(model, module, kind, create.empty(shape, { dtype = "uint8", device = device }), scales, true)
      files:keep_packed(own, state, kind)
      count = count + 1
    end
  end
  return count
end

return of_files
