-- SPDX-License-Identifier: BSD-3-Clause
-- Plots curves as text for a terminal, and as PNG files if gnuplot is installed.
local caller = require "ps.core.caller"

local plot = {}

---@class ps.Curve
---@field label string
---@field points number[][] pairs {x, y} in ascending order of x

local MARKS = { "*", "o", "+", "x" }

local function bounds(curves)
  local x0, x1, y0, y1 = math.huge, -math.huge, math.huge, -math.huge
  for _, curve in ipairs(caller.typed(curves, "table", "plot: the list of curves")) do
    for _, p in ipairs(curve.points) do
      x0, x1 = math.min(x0, p[1]), math.max(x1, p[1])
      y0, y1 = math.min(y0, p[2]), math.max(y1, p[2])
    end
  end
  return x0, x1, y0, y1
end

local TEXT = { width = "whole", height = "whole" }
local PNG = { title = "string", x = "string", y = "string" }

--- Draws curves as text. Each column of characters stands for a range of x, and shows the mean y of the points in this
--- range.
---@param curves ps.Curve[]
---@param options? {width?: integer, height?: integer}
---@return string
function plot.text(curves, options)
  options = caller.options(options, "plot.text", TEXT)
  local width, height = options.width or 64, options.height or 14
  local x0, x1, y0, y1 = bounds(curves)
  if x1 < x0 then return "(no points)\n" end
  local rows = {}
  for r = 1, height do rows[r] = {} end
  for number, curve in ipairs(curves) do
    local sum, count = {}, {}
    for _, p in ipairs(curve.points) do
      local c = 1 + math.floor((p[1] - x0) / math.max(x1 - x0, 1e-9) * (width - 1) + 0.5)
      sum[c], count[c] = (sum[c] or 0) + p[2], (count[c] or 0) + 1
    end
    for c = 1, width do
      if sum[c] then
        local share = (sum[c] / count[c] - y0) / math.max(y1 - y0, 1e-9)
        rows[height - math.floor(share * (height - 1) + 0.5)][c] = MARKS[(number - 1) % #MARKS + 1]
      end
    end
  end
  local lines = {}
  for r = 1, height do
    local cells = {}
    for c = 1, width do cells[c] = rows[r][c] or " " end
    local axis = (r == 1 and ("%8.4g"):format(y1)) or (r == height and ("%8.4g"):format(y0)) or (" "):rep(8)
    lines[r] = (axis .. " |" .. table.concat(cells)):gsub("%s+$", "")
  end
  lines[#lines + 1] = (" "):rep(9) .. "+" .. ("-"):rep(width)
  local left, right = ("%g"):format(x0), ("%g"):format(x1)
  lines[#lines + 1] = (" "):rep(10) .. left .. (" "):rep(math.max(1, width - #left - #right)) .. right
  local labels = {}
  for number, curve in ipairs(curves) do labels[number] = MARKS[(number - 1) % #MARKS + 1] .. " " .. curve.label end
  lines[#lines + 1] = (" "):rep(10) .. table.concat(labels, "   ")
  return table.concat(lines, "\n") .. "\n"
end

local function succeeded(status) return status == 0 or status == true end
local function quote(text) return "'" .. text:gsub("'", "''") .. "'" end

--- Draws curves to a PNG file. Returns nil and the reason if gnuplot is not installed or fails.
---@param path string
---@param curves ps.Curve[]
---@param options? {title?: string, x?: string, y?: string}
---@return boolean? ok
---@return string? why
function plot.png(path, curves, options)
  options = caller.options(options, "plot.png", PNG)
  caller.typed(path, "string", "plot.png: the path")
  caller.typed(curves, "table", "plot.png: the list of curves")
  if not succeeded(os.execute("command -v gnuplot >/dev/null 2>&1")) then return nil, "gnuplot is not installed" end
  os.remove(path)
  local pipe, why = io.popen("gnuplot >/dev/null 2>&1", "w")
  if not pipe then return nil, why end
  local drawn, blocks = {}, {}
  for number, curve in ipairs(curves) do
    if #curve.points > 0 then
      local block = { ("$d%d << EOD"):format(number) }
      for _, p in ipairs(curve.points) do block[#block + 1] = ("%.9g %.9g"):format(p[1], p[2]) end
      block[#block + 1] = "EOD"
      blocks[#blocks + 1] = table.concat(block, "\n")
      drawn[#drawn + 1] = ("$d%d using 1:2 with %s title %s"):format(number,
        #curve.points > 60 and "lines" or "linespoints", quote(curve.label))
    end
  end
  pipe:write(table.concat(blocks, "\n"), "\nset terminal png size 900,560\nset output ", quote(path),
    "\nset title ", quote(options.title or ""), " noenhanced\nset xlabel ", quote(options.x or "step"),
    "\nset ylabel ", quote(options.y or "loss"), "\nset grid\nset key noenhanced\nplot ",
    table.concat(drawn, ", "), "\n")
  pipe:close()
  local file = io.open(path, "rb")
  local size = file and file:seek("end") or 0
  if file then file:close() end
  if size == 0 then return nil, "gnuplot failed" end
  return true
end

return plot
