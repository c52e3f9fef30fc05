-- SPDX-License-Identifier: BSD-3-Clause
-- Runs of bench/chunk_worker.lua, each in a process of its own, so that several live side by side (their steps can be
-- taken in turn), pretend devices differ from one to the next, and all memory is back when one ends.
local cjson = require "cjson"
local paths = require "ps.paths"

local lib = {}

---@class bench.Worker
---@field input file*
---@field output file*
local Worker = {}
Worker.__index = Worker

local function quote(text) return "'" .. tostring(text):gsub("'", "'\\''") .. "'" end

--- Starts a run.
---@param setting {model: any, options?: table, config: table, batch: integer, seq: integer}
---@param environment? table<string, any> variables for its process
---@return bench.Worker
function lib.start(setting, environment)
  local pipe = os.tmpname()
  os.remove(pipe)
  if os.execute("mkfifo -m 600 " .. quote(pipe)) ~= 0 then error("cannot make a pipe at " .. pipe, 0) end
  local words = { "env" }
  for name, value in pairs(environment or {}) do words[#words + 1] = name .. "=" .. quote(value) end
  for _, word in ipairs { paths.exe, paths.root .. "/bench/chunk_worker.lua" } do words[#words + 1] = quote(word) end
  local self = setmetatable({}, Worker)
  self.output = assert(io.popen(table.concat(words, " ") .. " <" .. quote(pipe), "r"))
  self.input = assert(io.open(pipe, "w"))
  os.remove(pipe)
  self.input:write(cjson.encode(setting), "\n")
  self.input:flush()
  self:answer()
  return self
end

function Worker:answer()
  while true do
    local line = self.output:read("*l")
    if not line then error("a run ended before it answered", 0) end
    if line:sub(1, 1) == "@" then
      local value = cjson.decode(line:sub(2))
      if value.error then error(value.error, 0) end
      return value
    end
    print("  " .. line)
  end
end

--- Runs a command there and gives its answer.
---@param command string
---@return table
function Worker:ask(command)
  self.input:write(command, "\n")
  self.input:flush()
  return self:answer()
end

--- Takes steps: a list of what each gave.
---@param n integer
---@return table[]
function Worker:steps(n)
  local list = {}
  for i = 1, n do list[i] = self:ask("step") end
  return list
end

--- Ends it. By a word, since processes started later hold its input open.
function Worker:close()
  self.input:write("quit\n")
  self.input:close()
  self.output:close()
end

---@param list number[]
---@return number
function lib.median(list)
  local sorted = {}
  for i, x in ipairs(list) do sorted[i] = x end
  table.sort(sorted)
  local middle = #sorted / 2
  return #sorted % 2 == 1 and sorted[middle + 0.5] or (sorted[middle] + sorted[middle + 1]) / 2
end

--- One of the fields of each entry.
function lib.pluck(list, key)
  local values = {}
  for i, entry in ipairs(list) do values[i] = entry[key] end
  return values
end

--- What a run came to, as text: all its losses and the hash of its parameters.
---@param steps table[]
---@param worker bench.Worker
---@return string
function lib.fingerprint(steps, worker)
  local parts = {}
  for i, step in ipairs(steps) do parts[i] = table.concat(step.losses, ",") end
  return table.concat(parts, " ") .. " " .. worker:ask("hash").hash
end

--- A table with the entries of all, later ones winning.
function lib.merged(...)
  local all = {}
  for i = 1, select("#", ...) do
    for key, value in pairs((select(i, ...)) or {}) do all[key] = value end
  end
  return all
end

return lib
