-- SPDX-License-Identifier: BSD-3-Clause
-- Optimizer states with 8 bits per element. Each element has a code, and each block of elements has a scale (Dettmers
-- et al. 2022). bitsandbytes and torchao map codes to the same values.
local rectangles = require "ps.core.rectangles"

local BLOCK = 256                                  -- equal to PS_STATE_BLOCK in src/base/update.h

local function blocks(shape) return { math.ceil(rectangles.numel(shape) / BLOCK) } end

--- Returns the states that store the averages with these names. Each average has a state for its codes and a state for
--- its scales.
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
