-- SPDX-License-Identifier: BSD-3-Clause
-- Runs a benchmark and writes its result to a file in docs/benchmarks. The record contains the machine, the day, the
-- commit, the command, and the JSON object that the command prints last.
--   psluajit bench/record.lua docs/benchmarks/golden.json "build/psluajit bench/golden.lua spec/golden/gpt2_tiny.json"
local cjson = require "cjson"
local lib = require "bench.process_lib"

local path, command = arg[1], arg[2]
if not command or arg[3] then error("usage: psluajit bench/record.lua FILE.json COMMAND", 0) end

local function first_line(of)
  local p = assert(io.popen(of .. " 2>/dev/null"))
  local line = p:read "*l" or ""
  p:close()
  return line
end

local result = lib.last_json(command)
if not result then error(("'%s' ended without a line of JSON; nothing was recorded"):format(command), 0) end

-- Encodes a record. Numbers keep their significant digits, and keys have a fixed order. Hence two records differ only
-- if their figures differ.
local function encode(value, indent)
  if type(value) == "table" then
    local lines, keys = {}, {}
    local list = #value > 0
    for key in pairs(value) do keys[#keys + 1] = key end
    table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
    if list then
      for i = 1, #value do lines[i] = indent .. "  " .. encode(value[i], indent .. "  ") end
      return "[\n" .. table.concat(lines, ",\n") .. "\n" .. indent .. "]"
    end
    for i, key in ipairs(keys) do
      lines[i] = ("%s  %s: %s"):format(indent, cjson.encode(tostring(key)), encode(value[key], indent .. "  "))
    end
    return "{\n" .. table.concat(lines, ",\n") .. "\n" .. indent .. "}"
  end
  if type(value) == "number" then return ("%.9g"):format(value) end
  return (cjson.encode(value):gsub("\\/", "/"))
end

local file, why = io.open(path, "wb")
if not file then error("cannot write " .. why, 0) end
file:write(encode({
  command = command, result = result, date = os.date "!%Y-%m-%d",
  machine = first_line "sed -n 's/^model name[^:]*: //p' /proc/cpuinfo" .. ", " .. first_line "nproc --all" .. " cores",
  commit = first_line "git rev-parse --short=12 HEAD",
}, ""), "\n")
assert(file:close())
print("wrote " .. path)
