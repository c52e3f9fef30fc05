-- SPDX-License-Identifier: BSD-3-Clause
-- The driver of a model that is cut into stages. It runs the loops over the micro-batches of a step or of an
-- evaluation. It also runs the forwards of generate. The script decides when the next iteration or forward runs. A
-- pipeline runs one loop or forward at a time. The ranks of the pipeline check that all ranks begin the same loop or
-- forward. engine/step/table.lua describes the interface of drivers, and engine/pipeline/row.lua runs a row of actions.
local batch = require "ps.data.batch"
local caller = require "ps.core.caller"
local module_hooks = require "ps.nn.hooks"
local collector = require "ps.core.collector"
local hooks = require "ps.core.hooks"
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local actions = require "ps.engine.step.actions"
local ending = require "ps.engine.step.ending"
local forward = require "ps.engine.step.forward"
local overlap = require "ps.engine.step.overlap"
local state = require "ps.engine.step.state"
local table_driver = require "ps.engine.step.table"
local weigh = require "ps.engine.step.weigh"
local C = native.C

local FORWARD = C.PS_ACT_FORWARD

---@class ps.engine.RowDriver: ps.engine.Driver
---@field pipe ps.engine.Pipe the row of actions that this driver performs
local Driver = { in_loops = true }
Driver.__index = Driver

-- Functions by the kind of an action. Each function performs an action in Lua. C performs all other actions. `v` is the
-- virtual stage and `micro` is the micro-batch, both from 0.
Driver.work = {
  [FORWARD] = function(engine, v, micro) return engine.run(engine.driver.forward, engine.driver, v, micro) end,
  [C.PS_ACT_NORM] = table_driver.work[C.PS_ACT_NORM], [C.PS_ACT_UPDATE] = table_driver.work[C.PS_ACT_UPDATE],
}

local driver = {}

--- Returns the driver of an engine whose model is cut into stages.
---@param engine ps.Engine
---@param pipe ps.engine.Pipe
---@return ps.engine.RowDriver
function driver.new(engine, pipe) return setmetatable({ engine = engine, pipe = pipe }, Driver) end

function Driver:actions(micros) return self.pipe:actions(micros) end

function Driver:forward(v, micro) return self.pipe:forward(v, micro) end

function Driver:fingerprint() return self.pipe:fingerprint() end

-- -- performing a row -------------------------------------------------------------------------------------------------
-- Returns the next event of the row (Pipe:next). Before it returns, C performs the backwards, weight gradients and
-- reductions that precede this event in the row.
local function next_event(engine, s, pipe)
  local report = engine.report
  local ok, kind, v, micro = pcall(pipe.next, pipe)
  if not ok and s.is.now.kind ~= C.PS_ACT_NONE then actions.fail(engine, kind) end  -- an action raised the error
  if not ok then error(kind, 0) end
  local seconds = pipe:tell()
  if report and seconds > 0 then report:took(actions.PART[C.PS_ACT_BACKWARD], seconds) end
  return kind, v, micro
end

-- Runs the forward of a recompute segment again. C's backward walk has stopped at this segment.
local function resume(engine, pipe, factor)
  local ok, problem = pcall(scope.resume, pipe:segment(), factor)
  if not ok then actions.fail(engine, problem) end
end

-- Performs the row up to the next yield. Returns the micro-batch of the yield, from 0, or nil if the row has ended.
-- `before` is called before each forward.
local function advance(self, dry, before)
  local engine, pipe = self.engine, self.pipe
  local s, report = state.of(engine), not dry and engine.report
  while true do
    local kind, v, micro = next_event(engine, s, pipe)
    if kind == nil then return nil end
    if kind == FORWARD then
      if before then before() end
      if not pipe:is_again() then
        local perform = dry and actions.perform or actions.timed
        perform(engine, FORWARD, pipe:how_forward(v, micro), v, micro)
      end
    elseif kind == C.PS_ACT_SEGMENT then
      local factor = dry and weigh.dry_factor(engine, pipe.count) or pipe.micros[micro].factor
      if report then report:timed(actions.PART[C.PS_ACT_BACKWARD], resume, engine, pipe, factor)
      else resume(engine, pipe, factor) end
    elseif pipe:collects() then
      collector.before_walk()
      if dry then pipe:collected() end
    end
    pipe:done()
    if kind == C.PS_ACT_YIELD then return micro end
  end
end

-- Passes the settings for the last backwards of the row to C.
local function set_last(self, dry) self.pipe:set_last(overlap.backward(self.engine, 0, true, dry)) end

-- Performs the row of a step up to its next yield.
local function advance_step(self)
  if self.pipe.marked == self.pipe.count then set_last(self, false) end
  return advance(self, false)
end

function Driver:dry_run()
  local pipe, forwards = self.pipe, 0
  local function before()
    forwards = forwards + 1
    if collector.in_dry_run(forwards) then pipe:collected() end
  end
  pipe:begin(state.of(self.engine).c, true)
  set_last(self, true)
  repeat
    local micro = advance(self, true, before)
    if micro then pipe:drop_output(micro) end
  until micro == nil
end

function Driver:end_dry() return self.pipe:drop_dry() end

-- -- beginning --------------------------------------------------------------------------------------------------------
-- Returns all micro-batches of a loop. A pipeline needs all of them before the first iteration.
local function all_of(engine, loop)
  local micros = { n = loop.count }
  for i = 1, loop.count do
    local given, rng = loop.take(i), random.state()
    given = hooks.ask("batch", engine, given) or given
    -- the loader then frees no tensor of the batch
    if loop.draws then for _, t in ipairs(batch.tensors(given)) do t:keep() end end
    micros[i - 1] = { given = given, args = batch.on(given, engine.device, engine.device_name), number = i - 1,
      sample = tonumber(rng.sample), op = tonumber(rng.op), targets = batch.targets(engine.module, given) or false }
  end
  return micros
end

-- Raises an error if a loop over micro-batches is running.
local function check_free(self, what)
  if not self.pipe.row then return end
  ending.give_loop_up(self.engine, what .. " of this pipeline, or after one that was left early: each has to reach its "
    .. "end before the next one begins")
end

local SECOND = "a loop over micro-batches began within another loop"

-- Returns a description of a loop over a pipeline, for errors. It mentions `gather`, because ranks with `gather` would
-- wait for ranks without `gather`.
local function said(what, loop)
  return ("%s of %d micro-batches%s"):format(what, loop.count, loop.gather and " with gather = true" or "")
end

-- Raises an error if the whole model has hooks, because no stage calls the whole model.
local function check_hooks(engine)
  if not module_hooks.has(engine.module) then return end
  caller.error(("%s has hooks, and a pipeline never calls the whole model: register them on modules of its parts")
    :format(engine.module.class_name))
end

-- Begins a step, and passes the micro-batches of the step's loop to the pipeline.
local function enter(self, loop)
  local engine, pipe = self.engine, self.pipe
  check_free(self, SECOND)
  check_hooks(engine)
  pipe:load(all_of(engine, loop))
  pipe:compare_begin(said("a step", loop))
  forward.begin_step(engine, pipe.micros[0].args)
  pipe:begin(state.of(engine).c)
end

function Driver:compare(what) self.pipe:compare_begin(what) end

--- Raises an error if generate is called within a loop over micro-batches, or if another rank has begun something else
--- than generate.
function Driver:begin_generate()
  check_free(self, "model:generate was called within a loop over micro-batches")
  self.pipe:compare_begin "generate"
end

-- -- turns ------------------------------------------------------------------------------------------------------------
-- Performs forwards and backwards until the loss of the current micro-batch has arrived.
function Driver:turn(loop)
  local pipe = self.pipe
  if loop.at == 0 then enter(self, loop) else pipe:check_unchanged() end
  local number = advance_step(self)
  loop.at = loop.at + 1
  assert(number == loop.at - 1, "yields come in order")
  local micro = pipe.micros[number]
  local out = pipe:output(number, loop.gather)
  loop.given = micro.given
  state.of(self.engine).targets, state.of(self.engine).score = micro.targets, micro.score
  return out
end

function Driver:drain()
  self.pipe:check_unchanged()
  assert(advance_step(self) == nil, "no yield is left")
end

function Driver:look(loop)
  local pipe = self.pipe
  if loop.at == 0 then
    check_free(self, SECOND)
    check_hooks(self.engine)
    pipe:load(all_of(self.engine, loop))
    pipe:compare_begin(said("an evaluation", loop), true)
    pipe:begin(nil)
  end
  return scope.no_grad(function()
    local number = pipe:look()
    if number == nil then return nil end
    local out = pipe:output(number, loop.gather)
    local micro = pipe.micros[number]
    loop.given, loop.targets, loop.score, loop.at = micro.given, micro.targets, micro.score, loop.at + 1
    return out
  end)
end

--- Runs a forward of all stages for generate. All rows are in one micro-batch, because on the CPU, a product of fewer
--- rows has different bits. All ranks must call this function.
---@param ids ps.Tensor int [R, n], on the device
---@param given table the batch that the parts read, including ids
---@return table<string, ps.Tensor>? output of the last part, on the rank of the last stage; nil on other ranks
function Driver:once(ids, given)
  local pipe, rng, args = self.pipe, random.state(), { n = 1, ids }
  pipe:load { n = 1, [0] = { given = args, args = args, number = 0, sample = tonumber(rng.sample),
    op = tonumber(rng.op), targets = false, batch = given } }
  local micros = pipe.micros
  local ok, problem = pcall(function()
    pipe:begin(nil)
    repeat until pipe:look() == nil
  end)
  pipe.micros = false                                        -- the batch in pipe.micros contains the caches
  if ok then return micros[0].out end
  pipe:abandon(problem)
  error(problem, 0)
end

-- -- the script's backward --------------------------------------------------------------------------------------------
function Driver:backwards() return self.pipe.marked end

function Driver:is_last() return self.pipe.marked + 1 == self.pipe.count end

function Driver:weight(weight, last)
  local total = self.pipe.total + weight
  if last then self.pipe:check_weights(total) end
  return total
end

-- Returns true, because each virtual stage updates its parameters after its own last backward.
function Driver:overlaps() return true end

-- Stores the loss at which the backward walk will begin. The row continues with the next iteration.
function Driver:backward(loss, weight, factor)
  self.pipe:mark(weigh.root(self.engine, loss, weight, factor), weight, factor)
end

-- -- giving up --------------------------------------------------------------------------------------------------------
function Driver:abandon(why) self.pipe:abandon(why) end

function Driver:refuse(text)
  text = text .. "; its messages are under way between the stages, so the run ends: continue from a checkpoint"
  self.pipe:abandon(text)
  return text
end

function Driver:close() self.pipe:close() end

return driver
