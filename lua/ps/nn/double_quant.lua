-- SPDX-License-Identifier: BSD-3-Clause
-- Double quantization of the scales of NF4 (Dettmers et al. 2023), in the format of bitsandbytes: a scale is
-- map[code] * absmax + offset. absmax is the largest magnitude of 256 scales minus the offset, and the offset is the
-- mean of a weight's scales. The map is that of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
local array = require "ps.core.array"
local packed = require "ps.nn.packed"

local double_quant = {}

local HEAD, GROUP = packed.SCALES_HEAD, packed.SCALES_GROUP
local floats, bytes = array "float", array "uint8_t"

local function rounded(x) return floats(1, { x })[0] end

--- Returns the 256 values of the codes, ascending: 7 decades, of which decade i has 2^i values of either sign, the
--- centers of equal parts of 0.1 .. 1; and 0 and 1. They have the bits of bitsandbytes' map, which PyTorch's linspace
--- computes in fp32, the upper half of the bounds from 1 downwards.
---@return number[] fp32 values
function double_quant.map()
  local list, first = { 0, 1 }, rounded(0.1)
  for i = 0, 6 do
    local parts = 2 ^ i
    local step = rounded(rounded(1 - first) / parts)
    local function bound(k)
      return rounded(k < math.floor((parts + 1) / 2) and first + step * k or 1 - step * (parts - k))
    end
    local scale = rounded(10 ^ (i - 6))
    for k = 0, parts - 1 do
      local value = rounded(scale * rounded((bound(k) + bound(k + 1)) / 2))
      list[#list + 1], list[#list + 2] = value, -value
    end
  end
  table.sort(list)
  return list
end

local function nearest(map, x)
  local low, high = 1, #map                                -- map[low] <= x < map[high], or an end
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if map[middle] <= x then low = middle else high = middle end
  end
  return x - map[low] <= map[high] - x and low or high
end

--- Quantizes the scales of a weight's blocks.
---@param values ffi.cdata* float [n]
---@param n integer
---@return ffi.cdata* codes uint8_t [n]
---@return ffi.cdata* scales float [packed.scales_numel]: offset, map, absolute maxima (base/blocks.h)
function double_quant.quantize(values, n)
  local map, sum = double_quant.map(), 0
  local groups = math.ceil(n / GROUP)
  local codes, scales = bytes(n), floats(HEAD + groups)
  for i = 0, n - 1 do sum = sum + values[i] end
  scales[0] = sum / n
  for i, value in ipairs(map) do scales[i] = value end
  local offset = scales[0]
  for g = 0, groups - 1 do
    local last, most = math.min(n, (g + 1) * GROUP) - 1, 0
    for i = g * GROUP, last do most = math.max(most, math.abs(rounded(values[i] - offset))) end
    scales[HEAD + g] = most
    for i = g * GROUP, last do
      codes[i] = nearest(map, most > 0 and rounded(values[i] - offset) / most or 0) - 1
    end
  end
  return codes, scales
end

return double_quant
