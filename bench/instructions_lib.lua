-- SPDX-License-Identifier: BSD-3-Clause
-- Counts the instructions of each line of C, with valgrind's callgrind. The program must be built with -g. If a
-- function is inlined, its instructions count for its own lines.
local paths = require "ps.paths"

local lib = {}

---@class bench.Instructions
---@field total integer number of all counted instructions
---@field by table<string, table<integer, integer>> file -> line -> instructions of the line, without its calls

--- Reads a file that callgrind wrote with --dump-line=yes --compress-strings=no --compress-pos=no.
---@param name string
---@return bench.Instructions
function lib.read(name)
  local counts, file, of_call = { total = 0, by = {} }, nil, false
  for text in io.lines(name) do
    local key, value = text:match "^(%a+)=(.*)$"
    local line, n = text:match "^(%d+) (%d+)$"
    if key == "fl" or key == "fi" or key == "fe" then
      file = value
    elseif key == "calls" then
      of_call = true                         -- the next line has the instructions of the called function
    elseif line and of_call then
      of_call = false
    elseif line then
      local lines = counts.by[file] or {}
      counts.by[file] = lines
      line, n = tonumber(line), tonumber(n)
      lines[line], counts.total = (lines[line] or 0) + n, counts.total + n
    end
  end
  return counts
end

-- `name` is the name of a source file that the compiler recorded. Returns the lines of the file and its name relative
-- to src/. Returns nil if the file is not in src/.
local function source(name)
  local below = ("/" .. name):match "^.*/src/(.*)$"
  local f = below and io.open(paths.root .. "/src/" .. below)
  if not f then return nil end
  local lines = {}
  for line in f:lines() do lines[#lines + 1] = line end
  f:close()
  return lines, below
end

--- Returns the sum of the instructions of all lines of src/ for which takes(file, text) returns true.
---@param counts bench.Instructions
---@param takes fun(file: string, text: string): boolean called with the file's name relative to src/ and a line's text
---@return integer taken
---@return integer all number of instructions in src/, or 0 if the program was not built with -g
function lib.of(counts, takes)
  local taken, all = 0, 0
  for name, by_line in pairs(counts.by) do
    local lines, below = source(name)
    for line, n in pairs(lines and by_line or {}) do
      all = all + n
      if takes(below, lines[line] or "") then taken = taken + n end
    end
  end
  return taken, all
end

--- Runs a command under callgrind. Counts the instructions from the first call of the C function `from` to the next
--- call of `to`. The command runs on one thread, on an emulated processor with AVX2.
---@param command string a command that is quoted for a shell
---@param from string the name of a C function
---@param to string
---@return bench.Instructions? counts nil if the command did not run
---@return string? why
function lib.count(command, from, to)
  if os.execute "command -v valgrind > /dev/null" ~= 0 then return nil, "valgrind is not installed" end
  local name, said = os.tmpname(), os.tmpname()
  -- These settings prevent psluajit from restarting itself. valgrind would not follow the restart.
  local code = os.execute(("OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=100 "
    .. "GLIBC_TUNABLES=glibc.malloc.tcache_count=0 valgrind --tool=callgrind "
    .. "--dump-line=yes --compress-strings=no --compress-pos=no --zero-before=%s --dump-before=%s "
    .. "--callgrind-out-file='%s' %s > '%s' 2>&1"):format(from, to, name, command, said))
  local f = assert(io.open(said))
  local text = f:read "*a"
  f:close()
  local part = io.open(name .. ".1")
  local counts = code == 0 and part and lib.read(name .. ".1") or nil
  if part then part:close() end
  for _, path in ipairs { name, name .. ".1", said } do os.remove(path) end
  if not counts then return nil, "callgrind counted nothing: " .. text end
  return counts
end

return lib
