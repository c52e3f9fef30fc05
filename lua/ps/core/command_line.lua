-- SPDX-License-Identifier: BSD-3-Clause
-- Checks the command lines of programs that use argparse.
--   whole(parser:option("--steps", "Steps."), 1) makes an option accept only whole numbers. Any other value ends the
--   program, and the message names the option and the accepted range.
--   file() and folder() make an option accept only names that can be written to.
--   dtype() makes an option accept only types that a model's weights may have.
--   parse(parser) reads the command line.
--   try("train.lua", fn) runs fn. An error of fn is printed as one line, and the program exits.
local caller = require "ps.core.caller"
local dtypes = require "ps.core.dtype"
local environment = require "ps.core.environment"
local option_names = require "ps.core.option_names"
local writable = require "ps.core.writable"

local command_line = {}

local MOST = 2 ^ 53                -- a double represents every whole number up to this number

-- Parses decimal numbers such as 480, 2.5, 5e3 and -1. Returns nil for any other text.
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

--- Makes an option accept only whole numbers from `least` to `most`.
---@param option table an option of argparse
---@param least integer
---@param most? integer largest accepted number (default 2^53)
---@return table option
function command_line.whole(option, least, most)
  most = most or MOST
  return convert(option, ("a whole number from %.14g to %s"):format(least, most == MOST and "2^53"
    or ("%.14g"):format(most)), function(n) return n % 1 == 0 and n >= least and n <= most end)
end

--- Makes an option accept only numbers from `least` to `most`.
---@param option table an option of argparse
---@param least number
---@param most? number largest accepted number (default: any finite number)
---@return table option
function command_line.number(option, least, most)
  return convert(option, ("a number from %.14g %s"):format(least, most and ("to %.14g"):format(most) or "on"),
    function(n) return n >= least and n <= (most or math.huge) and n < math.huge end)
end

--- Makes an option accept only the name of a file that can be written. Otherwise the program could compute for an
--- hour before it fails.
---@param option table an option of argparse
---@param ... string accepted endings of the name (default: any name)
---@return table option
function command_line.file(option, ...)
  local name, endings = option._name, { ... }
  return option:convert(function(path)
    local fits = #endings == 0
    for _, ending in ipairs(endings) do fits = fits or path:sub(-#ending) == ending end
    if not fits then
      return nil, ("%s %s: its name must end in %s"):format(name, path, table.concat(endings, " or "))
    end
    local problem = writable.file(path)
    if problem then return nil, ("%s: %s"):format(name, problem) end
    return path
  end)
end

--- Makes an option accept only a folder into which files can be written. The folder need not exist yet.
---@param option table an option of argparse
---@return table option
function command_line.folder(option)
  return option:convert(function(path)
    local problem = writable.folder(path)
    if problem then return nil, ("%s: %s"):format(option._name, problem) end
    return path
  end)
end

--- Makes an option accept only types that a model's weights may have, and "auto".
---@param option table an option of argparse
---@return table option
function command_line.dtype(option)
  return option:convert(function(name)
    if name == "auto" or dtypes.of_weights[name] then return name end
    return nil, ("%s %s: weights are %s, or auto for the type of the files"):format(option._name, name, dtypes.weights)
  end)
end

-- Collects the long names of the options that take one value. Includes the options of the parser's commands.
local function add_names(parser, names)
  for _, option in ipairs(parser._options) do
    for _, alias in ipairs(option._aliases) do
      if option._maxargs == 1 and alias:find "^%-%-" then names[alias] = true end
    end
  end
  for _, command in ipairs(parser._commands) do add_names(command, names) end
  return names
end

local flags = {}                   -- option of a Lua function (other_base) -> flag of the program ("--other-base")

-- Stores the flags of a parser and of its commands in `flags`.
local function add_flags(parser)
  for _, option in ipairs(parser._options) do
    for _, alias in ipairs(option._aliases) do
      local name = option._maxargs == 0 and alias:match "^%-%-(.+)$"
      if name then flags[(name:gsub("-", "_"))] = alias end
    end
  end
  for _, command in ipairs(parser._commands) do add_flags(command) end
end

-- Makes the error for an unknown option suggest the option that was probably meant. argparse itself suggests only names
-- that differ in one letter.
local function suggest(root)
  local print_error = root.error
  function root.error(parser, message)
    local name, known = message:match "^unknown option '(.-)'", {}
    for _, one in ipairs(parser == root and { root } or { parser, root }) do
      for _, option in ipairs(one._options) do
        for _, alias in ipairs(option._aliases) do known[#known + 1] = alias end
      end
    end
    local meant = name and option_names.meant(name, known)
    return print_error(parser, meant and ("unknown option '%s'\nDid you mean '%s'?"):format(name, meant) or message)
  end
end

--- Parses a command line like the parser's own method, but accepts a negative number as an option's value (`--lr -1`).
--- argparse would read the number as another option. The error for an unknown option names the option that the user
--- probably meant. Neither `words` nor the global `arg` is changed.
---@param parser table a parser of argparse
---@param words? string[] (default: the program's command line)
---@return table options
function command_line.parse(parser, words)
  words = words or arg or {}
  local names, joined, i = add_names(parser, {}), {}, 1
  while i <= #words do
    local word, value = words[i], words[i + 1]
    if word == "--" then
      for k = i, #words do joined[#joined + 1] = words[k] end
      break
    end
    local negative = names[word] and value and value:find "^%-%.?%d"
    joined[#joined + 1] = negative and word .. "=" .. value or word
    i = i + (negative and 2 or 1)
  end
  suggest(parser)
  add_flags(parser)
  return parser:parse(joined)
end

--- Calls fn(...) and returns its results. An error of fn counts as a mistake of the program's user: the program prints
--- only the message, sends it to the other ranks, and exits with code 1. If the message names an option of a Lua
--- function that is a flag of the program, the flag is printed: `--other-base` instead of `other_base = true`. Ctrl-C
--- exits with code 130. With PS_TRACEBACK=all, errors are not caught.
---@param program string name at the beginning of the printed line, such as "train.lua"
---@param fn function
---@param ... any arguments of fn
---@return any ...
function command_line.try(program, fn, ...)
  if environment.get "PS_TRACEBACK" == "all" then return fn(...) end
  local function finish(ok, ...)
    if ok then return ... end
    local text = tostring((...))
    local script, rest = text:match("^(%S-):%d+: (.*)$")   -- the position that caller.error added
    local tail = script and script:match "^%.%.%.(.+)$"    -- Lua shortens long names
    if script and arg and (script == arg[0] or tail and arg[0]:sub(-#tail) == tail) then text = rest end
    if text:sub(1, #program + 2) == program .. ": " then text = text:sub(#program + 3) end
    text = text:gsub("%f[%w_]([%w_]+) = true%f[^%w_]", flags)
    local interrupted = caller.is_interrupt(text)
    if interrupted then text = text:match "interrupted!.*" end   -- without the line at which Ctrl-C came
    io.stderr:write(program, ": ", text, "\n")
    require("ps.core.ffi").C.ps_groups_end(text)
    os.exit(interrupted and 130 or 1, true)
  end
  return finish(pcall(fn, ...))
end

--- Ends the process with an exit code that all ranks use, for example after Ctrl-C. The other ranks treat this exit as
--- a normal end, even if this rank leaves a collective call unfinished. By contrast, os.exit counts as a failure of
--- this rank.
---@param code integer
function command_line.leave(code)
  require("ps.core.ffi").C.ps_groups_end(nil)
  os.exit(code, true)
end

return command_line
