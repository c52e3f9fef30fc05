-- SPDX-License-Identifier: BSD-3-Clause
-- The first epoch of a loader with stream = true, which tokenizes examples during training. Before each batch, Lua
-- reads rows of the table that later batches need, and applies the chat template. Threads encode the resulting texts
-- during the training step (src/data/encode.c). When examples are complete, they are added to the rows of the epoch
-- (src/data/rows.c). The loader returns the same batches as a loader that tokenizes all examples before the first step.
local native = require "ps.core.ffi"
local ffi = require "ffi"
local array = require "ps.core.array"
local scope = require "ps.core.scope"
local C, check = native.C, native.check
local byte_array = array "uint8_t"

---@class ps.Stream
---@field handle ffi.cdata* ps_rows of the first epoch
---@field places integer number of examples in the first epoch, including examples that will be left out as too long
---@field info ffi.cdata* ps_rows_info
---@field private source ps.ExampleSource
---@field private put integer number of examples, in the order of the epoch, that were passed to the source
---@field private problem? any the error of the first example, in the order of the epoch, that failed
local Stream = {}
Stream.__index = Stream

local stream = {}

--- Begins to make the rows of the first epoch.
---@param source ps.ExampleSource its examples can be made in any order
---@param config ffi.cdata* ps_rows_config
---@param pace {batch: integer, lead: integer, window: integer} batch: number of rows of a batch on all ranks. lead:
--- number of rows to prepare in advance. window: number of examples that are packed or grouped together, or 0.
---@param refuse fun(handle: ffi.cdata*, failed: integer) raises the error that example number `failed` is too long
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

-- Stores an error, unless an error is already stored. The callers pass errors in the order of the examples, so the
-- error of the first failed example is kept.
function Stream:fail(problem)
  if self.problem == nil then self.problem = problem end
end

-- Makes rows from the examples that have been encoded since the last call.
function Stream:grow()
  local ok, problem, _ = pcall(check, C.ps_rows_grow(self.handle, self.info))
  if ok then return end
  if self.info.failed >= 0 then _, problem = pcall(self.refuse, self.source.handle, tonumber(self.info.failed)) end
  self:fail(problem)
end

-- Passes example i to the source, unless it was already passed. Returns false if this fails.
function Stream:add(i)
  if self.there[i] ~= 0 then return true end
  local ok, problem = xpcall(self.source.add, scope.trace, i + 1)
  if ok then
    self.there[i] = 1
    return true
  end
  self:drain(true)                                         -- stores the error of an earlier example, if one failed
  self:fail(problem)
  return false
end

-- Passes examples to the source until the first `last` examples of the epoch have been passed. If an example fails, its
-- error is stored until a batch needs the example.
function Stream:feed(last)
  last = math.min(last, self.places)
  while self.put < last and self.problem == nil do
    local i = C.ps_rows_order(self.handle, self.put)
    check(i)
    if not self:add(i) then return end
    self.put = self.put + 1
  end
end

-- Stores the examples that the threads have encoded, and makes rows from them. If `wait` is true, first waits until the
-- threads have encoded all examples that were passed to the source.
function Stream:drain(wait)
  local ok, problem = pcall(self.source.drain, self.source, wait)
  self:grow()                                              -- an example before the failed example may be too long
  if not ok then self:fail(problem) end
end

-- Returns how many examples of the epoch are needed now, counted from the beginning of the epoch. With windows, all
-- examples up to the end of the next window are needed. Without windows, the examples for `lead` rows after `row` are
-- needed.
function Stream:due(row)
  local info, pace = self.info, self.pace
  local taken = tonumber(info.taken)
  if pace.window > 0 then return taken + pace.window - tonumber(info.examples) % pace.window end
  return taken + math.max(1, row + pace.lead - tonumber(info.rows))
end

--- Passes some of the examples that later batches need to the source. With windows, the examples of the next window are
--- divided into equal parts, and one part is passed before each batch, so that all examples of the window are complete
--- when the batches reach it.
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

--- Makes the rows that the batch beginning at `row` needs, and waits until they are complete. If the next example
--- failed, raises its error.
---@param row integer
---@return boolean more false if all rows of the epoch were already complete
function Stream:more(row)
  if self.info.taken == self.info.places then return false end
  self:feed(self:due(row))
  local before = self.info.taken
  self:drain(true)
  if self.info.taken == before then error(self.problem, 0) end
  return true
end

--- Passes all remaining examples to the source, and waits for them. Completes the rows of the first epoch. Returns all
--- examples in the order of the table.
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
