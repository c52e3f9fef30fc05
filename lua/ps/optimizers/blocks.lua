-- SPDX-License-Identifier: BSD-3-Clause
-- States in 8 bits: codes, by the maps of bitsandbytes and torchao, and a scale for each block of elements (Dettmers et
-- al. 2022).
local rectangles = require "ps.core.rectangles"

local BLOCK = 256                                  -- value of PS_STATE_BLOCK in src/base/update.h

local function blocks(shape) return { math.ceil(rectangles.numel(shape) / BLOCK) } end

--- Returns the states of averages with these names: codes and scales for each.
---@param ... string
---@return ps.optimizers.State[]
return function(...)
  local states = {}
  for _, name in ipairs { ... } do
    states[#states + 1] = { name = name .. "_codes", dtype = "uint8" }
    states[#states + 1] = { name = name .. "_scale", dtype = "fp32", shape = blocks, most = 4 }
  end
  return states
end
