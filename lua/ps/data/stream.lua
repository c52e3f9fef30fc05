-- SPDX-License-Identifier: BSD-3-Clause
-- The first epoch of a loader that tokenizes while it trains. Before each batch, Lua reads the rows that later batches
-- need and renders their templates. Threads encode the texts during the step (src/data/encode.c). The rows of the epoch
-- grow when new examples are complete (src/data/rows.c). The batches are the same as those of a loader that tokenizes
-- before the first step.
local native = require "ps.core.ffi"
local ffi = require "ffi"
local array = require "ps.core.array"
local scope = require "ps.core.scope"
local C, check = native.C, native.check
local byte_array = array "uint8_t"

---@class ps.Stream
---@field handle ffi.cdata* ps_rows of the first epoch
---@field places integer number of examples in the first epoch, including those that will be left out
---@field info ffi.cdata* ps_rows_info
---@field private source ps.ExampleSource
---@field private put integer number of examples that were put, in the order of the epoch
---@field private problem? any error of the next example in the order of the epoch
local Stream = {}
Stream.__index = Stream

local stream = {}

--- Begins to make the rows of the first epoch.
---@param source ps.ExampleSource its examples are scattered
---@param config ffi.cdata* ps_rows_config
---@param pace {batch: integer, lead: integer, window: integer} batch: number of rows of a batch on all ranks. lead:
--- number of rows to prepare in advance. window: number of examples that are packed or grouped together, or 0.
---@param refuse fun(handle: ffi.cdata*, failed: integer) raises the error of an example that is too long
---@return ps.Stream
function stream.new(source, config, pace, refuse)
  local out = ffi.new "ps_rows *[1]"
  check(C.ps_rows_begin(source.handle, config, out))
  local self = setmetatable({ source = source, handle = ffi.gc(out[0], C.ps_rows_free), info = ffi.new "ps_rows_info",
    pace = pace, refuse = refuse, put = 0, there = byte_array(source.count + 1) }, Stream)
  self:grow()
  self.places = tonumber(self.info.places)
  return self
end

-- Stores an error if none was stored before. The callers report errors in the order of the examples.
function Stream:fail(problem)
  if self.problem == nil then self.problem = problem end
end

-- Adds the rows of the examples that are encoded.
function Stream:grow()
  local ok, problem, _ = pcall(check, C.ps_rows_grow(self.handle, self.info))
  if ok then return end
  if self.info.failed >= 0 then _, problem = pcall(self.refuse, self.source.handle, tonumber(self.info.failed)) end
  self:fail(problem)
end

-- Puts example i if it was not put before. Returns false if this fails.
function Stream:add(i)
  if self.there[i] ~= 0 then return true end
  local ok, problem = xpcall(self.source.add, scope.trace, i + 1)
  if ok then
    self.there[i] = 1
    return true
  end
  self:drain(true)                                         -- the error of an earlier example is reported first
  self:fail(problem)
  return false
end

-- Puts the examples of the epoch up to the one at place `last` in the order. If one fails, its error is stored until a
-- batch needs the example.
function Stream:feed(last)
  last = math.min(last, self.places)
  while self.put < last and self.problem == nil do
    local i = C.ps_rows_order(self.handle, self.put)
    check(i)
    if not self:add(i) then return end
    self.put = self.put + 1
  end
end

-- Stores the examples whose texts were encoded. If `wait` is true, waits until all examples that were put are encoded.
function Stream:drain(wait)
  local ok, problem = pcall(self.source.drain, self.source, wait)
  self:grow()                                              -- an example before the one that failed may be too long
  if not ok then self:fail(problem) end
end

-- Returns up to which place of the order examples are needed. They are needed for the next window or, without windows,
-- for `lead` rows after `row`.
function Stream:due(row)
  local info, pace = self.info, self.pace
  local taken = tonumber(info.taken)
  if pace.window > 0 then return taken + pace.window - tonumber(info.examples) % pace.window end
  return taken + math.max(1, row + pace.lead - tonumber(info.rows))
end

--- Puts some of the examples that later batches need. If there are windows, the examples of a window are put in equal
--- parts, one part before each batch. This way they are complete when the batches reach the window.
---@param row integer index of the next batch's first row
function Stream:ahead(row)
  if self.problem ~= nil then return end
  self:drain(false)
  local due, pace = self:due(row), self.pace
  if pace.window > 0 then
    local turns = math.floor((tonumber(self.info.rows) - row - pace.lead) / pace.batch)
    due = self.put + math.ceil(math.max(0, due - self.put) / math.max(1, turns))
  end
  self:feed(due)
end

--- Adds rows that the batch at `row` needs, and waits until they are complete. If the next example has an error, raises
--- that error.
---@param row integer
---@return boolean more false if the rows are complete
function Stream:more(row)
  if self.info.taken == self.info.places then return false end
  self:feed(self:due(row))
  local before = self.info.taken
  self:drain(true)
  if self.info.taken == before then error(self.problem, 0) end
  return true
end

--- Puts all examples, and returns them in the order of the table. After this the rows of the first epoch are complete.
---@return ps.Examples
function Stream:finish()
  self:feed(math.huge)
  self:drain(true)
  if self.info.taken < self.info.places then error(self.problem, 0) end
  for i = 0, self.source.count - 1 do                      -- a mixture may have left examples out of the first epoch
    if not self:add(i) then break end
  end
  self:drain(true)
  if self.problem ~= nil then error(self.problem, 0) end
  self.source:close()
  return self.source.gathered()
end

return stream
