-- SPDX-License-Identifier: BSD-3-Clause
-- Formats tables as text, and byte counts with units. The columns of a table are as wide as their cells.
local readable = {}

local UNITS = { "KiB", "MiB", "GiB", "TiB" }

-- Converts a number of bytes of at least 1024 to a larger unit. Returns the converted number, the unit, and the number
-- of digits to print after the point.
local function in_unit(n)
  local i = 1
  n = n / 1024
  while math.abs(n) >= 1023.95 and i < #UNITS do n, i = n / 1024, i + 1 end
  return n, UNITS[i], i < 3 and 1 or 2
end

--- Returns a byte count with a unit, such as "24.0 MiB" or "1.05 GiB".
---@param n number
---@return string
function readable.bytes(n)
  if math.abs(n) < 1024 then return ("%d B"):format(n) end
  local count, unit, digits = in_unit(n)
  return ("%." .. digits .. "f %s"):format(count, unit)
end

--- Returns a byte count like readable.bytes, but rounded up. Use it for a budget that a run needs.
---@param n number
---@return string
function readable.at_least(n)
  if n < 1024 then return ("%d B"):format(math.ceil(n)) end
  local count, unit, digits = in_unit(n)
  return ("%." .. digits .. "f %s"):format(math.ceil(count * 10 ^ digits - 1e-9) / 10 ^ digits, unit)
end

--- Returns the lines of a table with a row of headings. Two blanks separate columns.
---@param columns {title: string, left?: boolean}[]
---@param rows string[][] rows of texts; a row that is a string is printed unchanged
---@return string[]
function readable.lines(columns, rows)
  local widths, lines = {}, {}
  for c, column in ipairs(columns) do
    widths[c] = #column.title
    for _, row in ipairs(rows) do
      if type(row) == "table" then widths[c] = math.max(widths[c], #row[c]) end
    end
  end
  local function line(cell)
    local parts = {}
    for c, column in ipairs(columns) do
      local text = cell(c, column)
      local pad = (" "):rep(widths[c] - #text)
      parts[c] = column.left and text .. pad or pad .. text
    end
    return (table.concat(parts, "  "):gsub(" +$", ""))
  end
  lines[1] = line(function(_, column) return column.title end)
  for _, row in ipairs(rows) do
    lines[#lines + 1] = type(row) == "table" and line(function(c) return row[c] end) or row
  end
  return lines
end

return readable
