-- SPDX-License-Identifier: BSD-3-Clause
-- Numbers of a command line, for argparse: whole(parser:option("--steps", "Optimizer steps."), 1). One that is no
-- number, no whole one or out of range ends the program with the option's name and what it takes.
local command_line = {}

local MOST = 2 ^ 53                -- whole numbers up to here are exact

-- Numbers in decimal: 480, 2.5, 5e3, -1.
local function decimal(text)
  return (text:match "^%-?%d+%.?%d*$" or text:match "^%-?%d+%.?%d*[eE][+-]?%d+$") and tonumber(text) or nil
end

local function convert(option, what, fits)
  local name = option._name
  return option:convert(function(text)
    local n = decimal(text)
    if n and fits(n) then return n end
    return nil, ("%s %s: it takes %s"):format(name, text, what)
  end)
end

--- The option takes whole numbers.
---@param option table argparse's
---@param least integer
---@param most? integer 2^53 when absent
---@return table option
function command_line.whole(option, least, most)
  most = most or MOST
  return convert(option, ("a whole number from %.14g to %s"):format(least, most == MOST and "2^53"
    or ("%.14g"):format(most)), function(n) return n % 1 == 0 and n >= least and n <= most end)
end

--- The option takes numbers.
---@param option table argparse's
---@param least number
---@param most? number any finite one when absent
---@return table option
function command_line.number(option, least, most)
  return convert(option, ("a number from %.14g %s"):format(least, most and ("to %.14g"):format(most) or "on"),
    function(n) return n >= least and n <= (most or math.huge) and n < math.huge end)
end

return command_line
