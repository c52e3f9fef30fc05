-- SPDX-License-Identifier: BSD-3-Clause
-- Loads the functions of ops from a file that src/gen.lua writes. The file has one function per op. A program uses only
-- a few ops, and compiling all functions takes longer than the rest of `require "ps"`. This file therefore reads the
-- generated file as text, and compiles an op's lines when the op is first used. Tracebacks still show the name and the
-- line numbers of the generated file.
local path = require "ps.ops_generated"

-- Declares the names that the generated lines use. The declarations are one line, which is compiled before an op's
-- lines.
local NAMES = "local ops, ffi, C, apply, error, tensor, number, more, ins = ... local type_of = type "
local BEGIN, END = "\ndo -- op ", "\nend end\n"

--- Reads the generated file of ops.
---@param ffi table
---@param C ffi.namespace*
---@param apply function calls an op
---@param caller ps.caller
---@return table<string, function> ops by name
---@return fun(): table<integer, table> info creates the descriptions of ops, by op code
return function(ffi, C, apply, caller)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()

  local starts, at = {}, text:find(BEGIN, 1, true)         -- position of each op's lines in the file, by the op's name
  while at do
    starts[text:match("^[%w_]+", at + #BEGIN)] = at + 1
    at = text:find(BEGIN, at + #BEGIN, true)
  end

  local ops, meta = {}, {}
  local ins = ffi.new "ps_tensor *[64]"
  function meta.__index(_, name)
    local start = starts[name]
    if not start and type(name) ~= "string" then return nil end
    if not start then caller.error(("ps.ops.%s does not exist; help \"ops\" lists the ops"):format(name)) end
    local line = tonumber(text:match("^[%w_]+ of line (%d+)", start + #BEGIN - 1))
    local code = text:sub(start, text:find(END, start, true) + #END - 1)
    assert(loadstring(NAMES .. ("\n"):rep(line - 1) .. code, "@" .. path))(ops, ffi, C, apply, caller.error,
      caller.tensor, caller.number, caller.more, ins)
    return rawget(ops, name)
  end
  function meta.__pairs()
    for name in pairs(starts) do local _ = ops[name] end
    return next, ops, nil
  end

  return setmetatable(ops, meta), function()
    local lines = {}
    for line in text:gmatch "\n(info%[[^\n]*)" do lines[#lines + 1] = line end
    return assert(loadstring("local C, info = ... " .. table.concat(lines, "\n") .. " return info", "@" .. path))(C, {})
  end
end
