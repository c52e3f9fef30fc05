-- SPDX-License-Identifier: BSD-3-Clause
-- Double quantization of the scales of NF4 (Dettmers et al. 2023), in the format of bitsandbytes.
-- A scale is map[code] * absmax + offset. The offset is the mean of all scales of a weight. Each group of 256 scales
-- has its own absmax: the largest magnitude of (scale - offset) in the group. The map is from Dettmers et al. 2022,
-- "8-bit Optimizers via Block-wise Quantization".
local array = require "ps.core.array"
local packed = require "ps.nn.packed"

local double_quant = {}

local HEAD, GROUP = packed.SCALES_HEAD, packed.SCALES_GROUP
local floats, bytes = array "float", array "uint8_t"

local function rounded(x) return floats(1, { x })[0] end

--- Returns the 256 values of the codes in ascending order. They are 0, 1 and the values of seven decades, i = 0 .. 6.
--- Decade i has 2^i positive and 2^i negative values. To get them, the interval 0.1 .. 1 is divided into 2^i equal
--- parts, and the centers of the parts are multiplied by 10^(i - 6).
--- The values equal the values of bitsandbytes' map bit for bit. bitsandbytes computes the bounds of the parts with
--- PyTorch's linspace in fp32. linspace computes the lower half of the bounds upwards from 0.1, and the upper half
--- downwards from 1.
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
  local low, high = 1, #map                                -- map[low] <= x < map[high], unless x is outside of the map
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
---@return ffi.cdata* scales float [packed.scales_numel]: the offset, the map, and the absolute maxima (base/blocks.h)
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
