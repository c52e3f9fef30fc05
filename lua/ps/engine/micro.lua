-- SPDX-License-Identifier: BSD-3-Clause
-- Loops over a step's micro-batches, which are slices of a batch or are read from a loader.
--
--   for x, y in loader:epoch() do
--     optimizer:zero_grad()
--     for out in model:micro_batches(x, y) do model:backward(out.loss) end
--     optimizer:step()
--   end
--
-- The gradient of a step is the gradient of the mean loss of the whole batch, because each micro-batch is weighted by
-- its number of targets. Random numbers do not depend on how the batch is sliced, because dropout counts samples by
-- their position in the whole batch. engine/step/loops.lua performs the iterations.
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local batch = require "ps.data.batch"
local caller = require "ps.core.caller"
local types = require "ps.core.types"
local handle = require "ps.nn.handle"
local step = require "ps.engine.step"

local micro = {}

local OPTIONS = { gather = "boolean" }

local function is_options(value)
  return type(value) == "table" and getmetatable(value) == nil and #value == 0
end

-- Parses the arguments of micro_batches. Returns the options, the loader or nil, and the batch or nil. The batch is a
-- list whose field `n` is its length.
local function request(...)
  local given = { n = select("#", ...), ... }
  local first = given[1]
  if type(first) ~= "table" and not scope.is_tensor(first) then
    caller.error(("model:micro_batches takes a batch (x, y, or a table with names) or a loader, not a %s"):format(
      type(first)))
  end
  local options = {}
  if given.n > 1 and is_options(given[given.n]) then
    options = caller.options(given[given.n], "model:micro_batches", OPTIONS)
    given[given.n], given.n = nil, given.n - 1
  end
  local draws = type(first) == "table" and type(first.next) == "function"
  if draws and given.n > 1 then caller.error "model:micro_batches takes either a loader or a batch" end
  return options, draws and first or nil, not draws and batch.spread(unpack(given, 1, given.n)) or nil
end

local function drawn(loader, number, count)
  local given = batch.spread(loader:next())
  if given[1] == nil then
    caller.error(("the loader has no batch for micro-batch %d of %d"):format(number, count))
  end
  return given
end

-- Returns the number of micro-batches into which a batch of `rows` rows is divided. All ranks get the same number. If
-- the configuration does not set the number (gradient_accumulation_steps), a micro-batch has
-- train_micro_batch_size_per_gpu rows. If this setting is also absent, a micro-batch has one row.
local function count_of(engine, rows, trains)
  local cfg = engine.cfg
  local most, size = engine.accumulate, cfg.train_micro_batch_size_per_gpu
  if rows == 0 then caller.error "a batch without rows cannot be cut into micro-batches" end
  if trains and cfg.counts_micro_batches and size and rows > size * most then
    caller.error(("the batch has %d rows, but the configuration's train_micro_batch_size_per_gpu x "
      .. "gradient_accumulation_steps is %d x %d"):format(rows, size, most))
  end
  if not cfg.counts_micro_batches then most = math.ceil(rows / (size or 1)) end
  local count = math.min(most, rows)
  if engine.ranks then count = engine.ranks:least(count) end
  if count > types.MICRO_BATCHES then
    caller.error(("the batch makes %d micro-batches of one row; a step has at most %d: set "
      .. "gradient_accumulation_steps"):format(
      count, types.MICRO_BATCHES))
  end
  if count > 1 and not engine.adds_up and engine.precision ~= "fp32" then
    caller.error(("%d micro-batches in %s need memory to accumulate gradients: set "
      .. "gradient_accumulation_steps in the configuration"):format(count, engine.precision))
  end
  return count
end

---@class ps.engine.MicroBatches: ps.engine.Loop
---@field engine ps.Engine
---@field trains boolean true if the loop runs a step, false if it runs only forwards without gradients
---@field take fun(number: integer): any[] returns the micro-batch with this number, from 1, and sets the random state
---  for it
---@field ended boolean
---@field sample integer index of the batch's first sample when the loop began
local Loop = {}
Loop.__index = Loop

--- Returns the next micro-batch's output, or nil after the last micro-batch.
---@return table? out
function Loop:__call()
  local out
  if not self.ended then out = self:next() end
  self.ended = out == nil
  return out
end

function Loop:next()
  local engine = self.engine
  if self.trains then return step.next(engine, self) end
  local ok, out = pcall(engine.driver.look, engine.driver, self)
  if not ok then engine.driver:abandon(out) end  -- abandons the step, so that the other ranks report the cause
  if not (ok and out) then self:left() end
  if not ok then error(out, 0) end
  return out
end

--- Returns the batch of the next iteration.
---@return any[] given
function Loop:draw()
  self.given = nil
  native.collect_turn()
  self.given = self.take(self.at + 1)
  return self.given
end

--- Restores the sample index that was current before the loop. Called once, when the loop has ended.
function Loop:left()
  if self.sample then random.state().sample = self.sample end
end

-- Creates a loop over slices of a batch. If the rows cannot be divided evenly, each of the first micro-batches has one
-- row more than each of the last micro-batches.
local function split_rows(self, given)
  local engine, rng = self.engine, random.state()
  local rows = batch.rows(engine.module, given)
  local count = count_of(engine, rows, self.trains)
  if self.trains and engine.ranks then engine.ranks:number_samples() end
  local sample, op = rng.sample, rng.op
  self.count, self.rows, self.sample = count, rows, sample
  self.take = function(number)
    local least, more = math.floor(rows / count), rows % count
    local first = (number - 1) * least + math.min(number - 1, more)
    rng.sample, rng.op = sample + first, op
    return batch.narrow(engine.module, given, rows, first, least + (number <= more and 1 or 0))
  end
  return self
end

--- Returns a loop over the micro-batches of a step: `for out in model:micro_batches(x, y) do`. The batch can be given
--- in three ways. If it is given as x and y, y[i] is the target of x[i]. It can be a table that contains the tensors by
--- name ({ input_ids =, labels =, ... }). If a loader is given, the loop reads one batch for each micro-batch from the
--- loader. A step has gradient_accumulation_steps micro-batches, or fewer if the batch has fewer rows. If
--- gradient_accumulation_steps is not set, a micro-batch has train_micro_batch_size_per_gpu rows. If that setting is
--- also absent, a micro-batch has one row.
---
--- In each iteration, call model:backward(out.loss) or out.loss:backward(). After the loop, call optimizer:step().
--- out.loss is the mean loss of the micro-batch. The gradient of the step is the gradient of the mean loss over all
--- targets of the step. In ps.no_grad, the loop runs only forwards. All ranks must call this function.
---@param ... any the batch (x and y, a table or a loader), optionally followed by {gather?: boolean}. If `gather` is
---  true, all ranks get all tensors of `out`, such as out.logits. Otherwise the ranks that have not computed a tensor
---  get only out.loss
---@return fun(): table? turns
function micro.batches(engine, ...)
  engine = handle.own(engine, "micro_batches")
  engine:check_open()
  local options, loader, given = request(...)
  local self = setmetatable({ engine = engine, at = 0, rows = false, ended = false, sample = false,
    gather = options.gather or false, draws = loader ~= nil,
    training = engine.module.training, trains = scope.grad_enabled() }, Loop)
  if given then return split_rows(self, given) end
  if not engine.cfg.counts_micro_batches and not engine.cfg.train_micro_batch_size_per_gpu then
    return split_rows(self, drawn(loader, 1, 1))
  end
  self.count = engine.accumulate
  self.take = function(number) return drawn(loader, number, self.count) end
  return self
end

--- Calls a model that is cut into stages. If the argument is a batch as a table of names, returns a loop over its
--- micro-batches.
---@param engine ps.Engine
---@return fun(): table? turns
function micro.call(engine, ...)
  engine:check_open()
  if not batch.is_named(batch.spread(...)) then
    caller.error(("this model is cut into %d stages, which run forwards and backwards at the same time: write `for out "
      .. "in model:micro_batches(x, y) do` instead of model(x, y)"):format(engine.cfg.pipeline.stages))
  end
  return micro.batches(engine, ...)
end

return micro
