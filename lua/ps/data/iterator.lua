-- SPDX-License-Identifier: BSD-3-Clause
-- Implements ps.data.iterate(make), which makes a loader from Lua iterators. make(epoch) returns an iterator over the
-- batches of an epoch. The loader counts the batches that it has returned, so that its position can be saved. When a
-- position is loaded, the loader calls `make` for the epoch of the position and skips the batches before the position.
local caller = require "ps.core.caller"
local scope = require "ps.core.scope"
local error = caller.error

local iterator = {}

---@class ps.data.Iterated a loader over a Lua iterator
---@field at {epoch: integer, batch: integer} position of the next batch; both numbers count from 0
local Iterated = {}
Iterated.__index = Iterated

local OPTIONS = { seeks = "boolean" }
local CALL = "ps.data.iterate"

--- Returns a loader whose batches come from a Lua iterator. The loader can be used in loops and by ps.train.run. Each
--- rank calls `make` for itself, and the iterator must return the rows of this rank.
---@param make fun(epoch: integer, from: integer): fun(): any returns an iterator over the batches of an epoch; epochs
--- count from 0. A batch is a table of named tensors, or two values x, y. For the same epoch, the iterator must always
--- return the same batches.
---@param options? {seeks?: boolean} seeks = true: the iterator begins at batch `from`, which is above 0 if a position
--- inside the epoch was loaded. seeks = false: the iterator begins at batch 0, and the loader skips the batches before
--- the position.
---@return ps.data.Iterated
function iterator.of(make, options)
  options = caller.options(options, CALL, OPTIONS)
  caller.callable(make, CALL)
  return setmetatable({ make = make, seeks = options.seeks == true, at = { epoch = 0, batch = 0 } }, Iterated)
end

-- Raises an error if a batch neither begins with a tensor nor is a table that contains tensors.
local function check(self, batch)
  if scope.is_tensor(batch) then return end
  local found = false
  for _, value in pairs(type(batch) == "table" and batch or {}) do found = found or scope.is_tensor(value) end
  if found then return end
  error(("%s: batch %d of epoch %d is %s; a batch is a table of named tensors, or x, y"):format(CALL, self.at.batch,
    self.at.epoch, type(batch) == "table" and "a table without tensors" or "a " .. type(batch)))
end

-- Returns an iterator over the current epoch. The iterator has already skipped all batches before self.at.
local function opened(self)
  local at = self.at
  local turn = self.make(at.epoch, self.seeks and at.batch or 0)
  if type(turn) ~= "function" then
    error(("%s: make(%d) returned a %s; it must return an iterator: a function that returns the next batch")
      :format(CALL, at.epoch, type(turn)))
  end
  for dropped = 1, self.seeks and 0 or at.batch do
    if turn() == nil then
      error(("%s: the position is batch %d of epoch %d, but that epoch has only %d batches"):format(CALL, at.batch,
        at.epoch, dropped - 1))
    end
  end
  return turn
end

local function given(self, batch, ...)
  if batch == nil then
    self.turn, self.at = nil, { epoch = self.at.epoch + 1, batch = 0 }
    return nil
  end
  check(self, batch)
  self.at = { epoch = self.at.epoch, batch = self.at.batch + 1 }
  return batch, ...
end

-- Returns the next batch of the epoch, or nil at the end of the epoch.
local function step(self)
  self.turn = self.turn or opened(self)
  return given(self, self.turn())
end

local function first_of_epoch(self, batch, ...)
  if batch == nil then
    error(("%s: epoch %d has no batch: the iterator returned nil at once"):format(CALL, self.at.epoch - 1))
  end
  return batch, ...
end

local function or_next_epoch(self, batch, ...)
  if batch ~= nil then return batch, ... end
  return first_of_epoch(self, step(self))
end

--- Returns the next batch. After the last batch of an epoch it returns the first batch of the next epoch.
---@return any ... a table of named tensors, or the two values x, y
function Iterated:next() return or_next_epoch(self, step(self)) end

--- `for batch in loader:epoch() do` iterates over the remaining batches of the current epoch.
---@return fun(): any
function Iterated:epoch() return function() return step(self) end end

--- Returns the position of the next batch. Both numbers count from 0.
---@return {epoch: integer, batch: integer}
function Iterated:state_dict() return { epoch = self.at.epoch, batch = self.at.batch } end

--- Makes the loader continue at a position that state_dict returned.
---@param state {epoch: integer, batch: integer}
function Iterated:load_state_dict(state)
  caller.typed(state, "table", CALL .. ": the position")
  for _, key in ipairs { "epoch", "batch" } do caller.whole(state[key], CALL .. ": the position's " .. key, 0) end
  self.turn, self.at = nil, { epoch = state.epoch, batch = state.batch }
end

return iterator
