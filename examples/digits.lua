-- SPDX-License-Identifier: BSD-3-Clause
-- Functions that draw digits for the examples, and that write images to files.
local ps = require "ps"
local F = ps.F

local digits = {}

-- The 3 x 5 pixels of each digit, row by row.
local DOTS = { "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
  "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111" }
local dots = {}
for i, digit in ipairs(DOTS) do
  dots[i] = {}
  for dot in digit:gmatch "." do table.insert(dots[i], tonumber(dot)) end
end
local glyphs = F.interpolate(ps.tensor(dots):reshape(10, 1, 5, 3), { scale_factor = 2 })         -- shape [10, 1, 10, 6]

--- Draws images of digits, all at the same position.
---@param of ps.Tensor int64 [n]
---@param left? integer column, 0 to 10 (default: random)
---@param top? integer row, 0 to 6 (default: random)
---@return ps.Tensor [n, 1, 16, 16] of 0 and 1
function digits.drawn(of, left, top)
  left, top = left or ps.randint(0, 11, { 1 }):item(), top or ps.randint(0, 7, { 1 }):item()
  return F.pad(glyphs:index_select(0, of), { left, 10 - left, top, 6 - top }):contiguous()
end

--- Writes an image in PGM format, and prints the file's name.
---@param path string
---@param image ps.Tensor [height, width], values from 0 (black) to 1
function digits.picture(path, image)
  local lines = { ("P2 %d %d 255"):format(image:size(1), image:size(0)) }
  for i, line in ipairs((image:clamp(0, 1) * 255):to("uint8"):tolist()) do lines[i + 1] = table.concat(line, " ") end
  local file = assert(io.open(path, "w"))
  file:write(table.concat(lines, "\n"), "\n")
  assert(file:close())
  print("wrote " .. path)
end

return digits
