-- SPDX-License-Identifier: BSD-3-Clause
-- Checks for many specs: whether a call fails with the right words, whether tensors have the same bytes or given
-- values, and the output of a program.
local ps = require "ps"
local ffi = require "ffi"
local paths = require "ps.paths"

local lib = {}

--- Whether this is one of `make test`'s runs on an instruction set below the machine's (spec/computing.txt). Cases that
--- do not depend on the instruction set are skipped in these runs. `make test-isa` runs all of them.
lib.lower_set = os.getenv "PS_CPU_ISA" ~= nil and os.getenv "PS_TEST_ISA" ~= "all"

--- Calls fn, which must fail with an error that contains all of these texts. Returns the error.
---@param fn function
---@param ... string
---@return any err
function lib.fails(fn, ...)
  local ok, err = pcall(fn)
  assert(not ok, "no error was raised")
  for i = 1, select("#", ...) do
    local part = select(i, ...)
    assert(tostring(err):find(part, 1, true), ("the message lacks '%s': %s"):format(part, tostring(err)))
  end
  return err
end

--- Calls fn, which must fail with a message that contains all of these words. Returns the error.
---@param words string[]
---@param fn function
---@return any err
function lib.fails_saying(words, fn)
  local ok, problem = pcall(fn)
  if ok then error("no error", 2) end
  for _, word in ipairs(words) do
    if not tostring(problem):find(word, 1, true) then
      error(("'%s' is missing in: %s"):format(word, tostring(problem)), 2)
    end
  end
  return problem
end

--- Calls fn like fails_saying. The error must also be the engine's error with this code.
---@param code string the code, such as "EINVAL"
---@param words string[]
---@param fn function
function lib.fails_as(code, words, fn)
  local problem = lib.fails_saying(words, fn)
  if getmetatable(problem) ~= ps.Error then error("not an engine error: " .. tostring(problem), 2) end
  if problem.name ~= code then error(("%s, not %s: %s"):format(problem.name, code, tostring(problem)), 2) end
end

--- Calls fn and catches what Lua writes to stderr.
---@param fn function
---@param ... any arguments of fn
---@return string text
---@return any ... the results of pcall
function lib.told(fn, ...)
  local out, text = io.stderr, {}
  rawset(io, "stderr", { write = function(_, ...) text[#text + 1] = table.concat { ... } end })
  local function ended(...)
    rawset(io, "stderr", out)
    return table.concat(text), ...
  end
  return ended(pcall(fn, ...))
end

--- Calls fn, which must not fail, and returns what Lua writes to stderr.
---@param fn function
---@param ... any arguments of fn
---@return string
function lib.printed(fn, ...)
  local text, ok, why = lib.told(fn, ...)
  assert(ok, why)
  return text
end

--- Returns the larger of two numbers, or NaN if one of them is NaN. LuaJIT's math.max ignores a NaN in its first
--- argument, so running maxima of differences would lose it.
---@param a number
---@param b number
---@return number
function lib.larger(a, b)
  if a ~= a or b ~= b then return 0 / 0 end
  return a > b and a or b
end

--- Returns whether a tensor has these values, in the form of tolist(), and this dtype.
---@param expected any
---@param t ps.Tensor
---@param dtype? string the dtype (default: any)
function lib.is(expected, t, dtype)
  local expects = require "luassert"                          -- programs without busted use this file, too
  expects.same(expected, t:tolist())
  if dtype then expects.equal(dtype, t:dtype()) end
end

--- Returns a tensor with a shape and the values 0, 1, 2, ...
---@param ... integer
---@return ps.Tensor fp32
function lib.count(...)
  local n = 1
  for _, size in ipairs { ... } do n = n * size end
  return ps.arange(n, { dtype = "fp32" }):reshape(...)
end

--- Returns a tensor's bytes.
---@param t ps.Tensor
---@return string
function lib.bytes(t)
  t = t:detach():to("cpu"):contiguous()
  local n = t:nbytes()
  local buffer = ffi.new("uint8_t[?]", n + 1)
  ps.check(ps.C.ps_tensor_read(t, buffer, n))
  return ffi.string(buffer, n)
end

--- Writes a file with these bytes.
---@param path string
---@param text string
function lib.write(path, text)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
end

--- Returns a file's bytes, or nil if it cannot be read.
---@param path string
---@return string?
function lib.read(path)
  local f = io.open(path, "rb")
  local text = f and f:read("*a")
  if f then f:close() end
  return text
end

--- Writes a .pt file with one tensor, 'w', which has these sizes and strides and a storage with the bytes of `values`.
---@param path string
---@param values ps.Tensor
---@param shape integer[]
---@param stride integer[]
function lib.write_strided(path, values, shape, stride)
  local C, writer, data = ps.C, ffi.new("ps_ptw *[1]"), lib.bytes(values)
  ps.check(C.ps_ptw_new(path, writer))
  local w = writer[0]
  ps.check(C.ps_ptw_storage(w, values.dtype_, values:numel()))
  ps.check(C.ps_ptw_put(w, ffi.new("ps_pt_value", { kind = C.PS_PT_DICT, count = 2 })))
  ps.check(C.ps_ptw_put(w, ffi.new("ps_pt_value", { kind = C.PS_PT_STRING, integer = 1, text = "w" })))
  ps.check(C.ps_ptw_tensor(w, ffi.new("ps_pt_tensor", { ndim = #shape, shape = shape, stride = stride })))
  ps.check(C.ps_ptw_begin(w))
  ps.check(C.ps_ptw_write(w, 0, data, #data))
  ps.check(C.ps_ptw_commit(w))
  C.ps_ptw_free(w)
end

--- Returns the reason why memory, page faults and time cannot be checked, or nil if they can. A build with a sanitizer
--- needs a multiple of the program's memory and time.
---@return string?
function lib.sanitized()
  local maps = io.open "/proc/self/maps"
  if not maps then return nil end
  local name = maps:read("*a"):match "lib([at])san%.so"
  maps:close()
  if not name then return nil end
  return ("this build has %s, which takes memory of its own: not measured"):format(
    name == "a" and "AddressSanitizer" or "ThreadSanitizer")
end

--- PROMPT_S is a limit in seconds for calls that take milliseconds on an idle machine. If a spec expects a call to end
--- before its time-out, the time-out is FAR_S, so that the two cannot be confused on a busy machine.
lib.PROMPT_S, lib.FAR_S = 100, 1000

--- Runs a program with psluajit, with variables in its environment. Returns the output of both streams.
---@param settings string the variables, as NAME=value
---@param code string
---@return string
function lib.run(settings, code)
  local name = os.tmpname()
  lib.write(name, code)
  local p = assert(io.popen(("%s timeout 300 '%s' '%s' 2>&1"):format(settings, paths.exe, name)))
  local text = p:read("*a")
  p:close()
  os.remove(name)
  return text
end

--- Runs a shell command.
---@param command string
---@return string text The output of both streams.
---@return integer code
function lib.shell(command)
  local p = assert(io.popen(command .. " 2>&1; echo \"|$?\""))
  local text, code = p:read("*a"):match "^(.*)|(%d+)\n$"
  p:close()
  return text, tonumber(code)
end

--- Runs tools/merge.lua.
---@param ... string the arguments
---@return integer code
---@return string text The output of both streams.
function lib.merge(...)
  local words = {}
  for i = 1, select("#", ...) do words[i] = ("'%s'"):format((select(i, ...))) end
  local text, code = lib.shell(("'%s' '%s/tools/merge.lua' %s"):format(paths.exe, paths.root, table.concat(words, " ")))
  return code, text
end

return lib
