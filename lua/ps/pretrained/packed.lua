-- SPDX-License-Identifier: BSD-3-Clause
-- Models whose weights stay packed as in their files (keep_quantized of ps.from_pretrained): GGUF files, and folders
-- with weights in NF4 of bitsandbytes.
local create = require "ps.tensor.create"
local packed = require "ps.nn.packed"
local weights = require "ps.pretrained.weights"

local of_files = {}

--- Replaces the weights of a new model's layers with packed weights without data, for every weight that the file stores
--- in blocks. The file then provides bytes for these weights instead of numbers.
---@param model ps.pretrained.Model
---@param files ps.pretrained.Files the open files
---@param device? string
---@return integer count number of layers with packed weights
function of_files.prepare(model, files, device)
  local state, count = files:state(weights.namer(model)), 0
  for name, module in model:named_modules() do
    local own = (name == "" and "" or name .. ".") .. "weight"
    local kind = packed.can(module) and state:has(own) and packed.type(state:type(own))
    local shape = kind and packed.shape(module, kind)
    if shape then
      packed.set(model, module, kind, create.empty(shape, { dtype = "uint8", device = device }))
      files:keep_packed(own, state)
      count = count + 1
    end
  end
  return count
end

return of_files
