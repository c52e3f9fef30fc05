-- SPDX-License-Identifier: BSD-3-Clause
-- Runs other processes, of two kinds. The output of the first kind ends with a line of JSON. A process of the second
-- kind reads commands, one per line. It answers each command with a line that consists of "@" and JSON. All its other
-- output lines are printed. Several processes of the second kind can run at the same time and be measured alternately.
local cjson = require "cjson"

local lib = {}

---@class bench.Process
---@field input file*
---@field output file*
local Process = {}
Process.__index = Process

--- Quotes a text so that it is one word of a shell command.
---@param text any
---@return string
function lib.quote(text) return "'" .. tostring(text):gsub("'", "'\\''") .. "'" end
local quote = lib.quote

--- Runs a shell command. Returns the decoded JSON in the last line of its output, or nil if there is none.
---@param command string
---@return table?
function lib.last_json(command)
  local pipe, last = assert(io.popen(command)), nil
  for line in pipe:lines() do last = line end
  pipe:close()
  local ok, value = pcall(cjson.decode, last or "")
  return ok and type(value) == "table" and value or nil
end

--- Starts a program.
---@param program string[] the program and its arguments
---@param environment? table<string, any> environment variables for the program
---@return bench.Process
function lib.start(program, environment)
  local pipe = os.tmpname()
  os.remove(pipe)
  if os.execute("mkfifo -m 600 " .. quote(pipe)) ~= 0 then error("cannot make a pipe at " .. pipe, 0) end
  local words = { "env" }
  for name, value in pairs(environment or {}) do words[#words + 1] = name .. "=" .. quote(value) end
  for _, word in ipairs(program) do words[#words + 1] = quote(word) end
  local self = setmetatable({}, Process)
  self.output = assert(io.popen(table.concat(words, " ") .. " <" .. quote(pipe), "r"))
  self.input = assert(io.open(pipe, "w"))
  os.remove(pipe)
  return self
end

--- Reads the next answer from the process.
---@return table
function Process:answer()
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

--- Sends a command to the process and returns its answer.
---@param command string
---@return table
function Process:ask(command)
  self.input:write(command, "\n")
  self.input:flush()
  return self:answer()
end

--- Runs n steps, and returns the list of their answers.
---@param n integer
---@return table[]
function Process:steps(n)
  local list = {}
  for i = 1, n do list[i] = self:ask("step") end
  return list
end

--- Ends the process with the command "quit". Closing the process's input is not enough, because processes that were
--- started later keep this input open.
function Process:close()
  self.input:write("quit\n")
  self.input:close()
  self.output:close()
end

return lib
