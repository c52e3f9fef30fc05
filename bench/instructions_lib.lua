-- SPDX-License-Identifier: BSD-3-Clause
-- Counts instructions by line of C with valgrind's callgrind. The program must be built with -g; lines of inlined
-- functions are counted, too.
local paths = require "ps.paths"

local lib = {}

---@class bench.Instructions
---@field total integer instructions of the whole part
---@field by table<string, table<integer, integer>> file -> line -> the line's own instructions, without those of calls

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

-- Returns the lines of a source file and its name below src/, or nil if it is not in src/. The argument is the name
-- that the compiler recorded.
local function source(name)
  local below = ("/" .. name):match "^.*/src/(.*)$"
  local f = below and io.open(paths.root .. "/src/" .. below)
  if not f then return nil end
  local lines = {}
  for line in f:lines() do lines[#lines + 1] = line end
  f:close()
  return lines, below
end

--- Sums the instructions of the lines of src/ that a function accepts.
---@param counts bench.Instructions
---@param takes fun(file: string, text: string): boolean receives the file's name below src/ and the line
---@return integer taken
---@return integer all instructions of src/, or 0 if the program was not built with -g
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

--- Runs a command under callgrind and counts instructions from its first call of one C function to the next call of
--- another. They are the instructions of one thread on a processor with AVX2, which valgrind emulates.
---@param command string quoted for a shell
---@param from string the name of a C function
---@param to string
---@return bench.Instructions? counts nil if the command did not run
---@return string? why
function lib.count(command, from, to)
  if os.execute "command -v valgrind > /dev/null" ~= 0 then return nil, "valgrind is not installed" end
  local name, said = os.tmpname(), os.tmpname()
  -- With these settings psluajit does not restart itself, which valgrind would not follow.
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
