-- SPDX-License-Identifier: BSD-3-Clause
-- Implements the driver of a model whose layers are all in this process. The actions of a micro-batch are a forward and
-- a backward. With several ranks, there is also a reduction. engine/pipeline/driver.lua implements the same interface
-- for a model that is cut into stages. An engine has one driver, engine.driver.
local batch = require "ps.data.batch"
local collector = require "ps.core.collector"
local create = require "ps.tensor.create"
local hooks = require "ps.core.hooks"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local actions = require "ps.engine.step.actions"
local forward = require "ps.engine.step.forward"
local overlap = require "ps.engine.step.overlap"
local state = require "ps.engine.step.state"
local weigh = require "ps.engine.step.weigh"
local C = native.C

local FORWARD, BACKWARD, REDUCE = C.PS_ACT_FORWARD, C.PS_ACT_BACKWARD, C.PS_ACT_REDUCE

---@class ps.engine.Driver
---@field engine ps.Engine
---@field in_loops boolean true if steps are loops over micro-batches. A backward outside a loop then raises an error
---@field work table<integer, fun(engine: ps.Engine, ...): any> by the kind of an action, the function that performs
---  Lua's work for the action
---@field actions fun(self: ps.engine.Driver, micros: integer): table[] returns a new list of a step's forwards,
---  backwards and reductions. An action is {kind, index of the virtual stage among the virtual stages of this rank,
---  micro-batch}
---@field backwards fun(self: ps.engine.Driver): integer returns how many micro-batches of the step have had their
---  backward called by the script
---@field is_last fun(self: ps.engine.Driver): boolean returns true if the next backward is the last backward of the
---  step
---@field weight fun(self: ps.engine.Driver, weight: number, last: boolean): number returns the sum of the weights of
---  the step's micro-batches, including the next micro-batch; all ranks must call this function together
---@field overlaps fun(self: ps.engine.Driver): boolean returns true if the last backward of the step can update
---  parameters
---@field backward fun(self: ps.engine.Driver, loss: ps.Tensor, weight: number, factor: number, last: boolean) performs
---  the backward that the script has called on a loss, or stores the loss for a later action
---@field compare fun(self: ps.engine.Driver, what: string) raises an error unless all ranks of one model make the same
--- call
---@field turn fun(self: ps.engine.Driver, loop: ps.engine.Loop): table performs the next iteration of a step's loop,
---  and returns the output that the script gets
---@field drain fun(self: ps.engine.Driver, loop: ps.engine.Loop) performs the actions that remain after the last
--- iteration of a loop
---@field look fun(self: ps.engine.Driver, loop: ps.engine.Loop): table? performs the next iteration of a loop of
---  forwards without gradients; returns nil after the last iteration
---@field abandon fun(self: ps.engine.Driver, why: any) abandons the current actions. Other ranks get an error with the
---  reason `why`
---@field refuse fun(self: ps.engine.Driver, text: string): string abandons a loop in which the script made a mistake.
---  Returns the text of the error, which also contains the consequence
---@field dry_run fun(self: ps.engine.Driver, args: any[]) performs the forwards, backwards and reductions of a dry run
---@field fingerprint fun(self: ps.engine.Driver): number? returns a hash of the micro-batches of a loop. The hash must
---  be equal on all stages of a model. Returns nil if the micro-batches are not known when the step begins
---@field pipe ps.engine.Pipe|false the row of actions of a model that is cut into stages
---@field end_dry fun(self: ps.engine.Driver): boolean ends a dry run; returns true if another dry run must follow
---@field close fun(self: ps.engine.Driver)

---@class ps.engine.TableDriver: ps.engine.Driver
local Driver = { in_loops = false, pipe = false }
Driver.__index = Driver

local driver = {}

--- Functions for the norm and the update. They are the same in every driver.
---@type table<integer, fun(engine: ps.Engine, ...): any>
driver.work = {
  [C.PS_ACT_NORM] = function(engine, wanted) return wanted and engine.optimizer:norm() end,
  [C.PS_ACT_UPDATE] = function(engine, scale)
    if scale then engine.optimizer:update(scale) else engine.optimizer:drop() end
  end,
}

Driver.work = {
  [FORWARD] = function(engine, args) return engine.run(engine.module, unpack(args, 1, args.n)) end,
  [BACKWARD] = function(_, root, factor, gradient) return scope.walk_back(root, gradient, factor) end,
  [REDUCE] = function() end,                                    -- C performs the whole action
  [C.PS_ACT_NORM] = driver.work[C.PS_ACT_NORM], [C.PS_ACT_UPDATE] = driver.work[C.PS_ACT_UPDATE],
}

function Driver:actions(micros)
  local list = {}
  for micro = 0, micros - 1 do
    list[#list + 1] = { FORWARD, 0, micro }
    list[#list + 1] = { BACKWARD, 0, micro }
    if self.engine.ranks then list[#list + 1] = { REDUCE, 0, micro } end
  end
  return list
end

function Driver:backwards() return state.of(self.engine).is.micro end

function Driver:is_last()
  local is = state.of(self.engine).is
  return is.micro + 1 == is.n_micro
end

function Driver:weight(weight) return state.of(self.engine).is.weight + weight end

-- Returns true if the last backward of the step can update parameters. It can if the step has only one backward. In a
-- step with several backwards, gradients are final only after the last backward.
function Driver:overlaps() return not self.engine.adds_up and state.of(self.engine).is.n_micro == 1 end

function Driver:backward(loss, weight, factor, last)
  local engine = self.engine
  local how = overlap.backward(engine, weight, last)
  actions.timed(engine, BACKWARD, how, weigh.root(engine, loss, weight, factor), factor)
  if state.of(engine).is.due.kind == REDUCE then actions.timed(engine, REDUCE) end
end

function Driver:compare() end

function Driver:turn(loop)
  local engine, given = self.engine, loop:draw()
  loop.at = loop.at + 1
  given = hooks.ask("batch", engine, given) or given
  return batch.output(forward.train(engine, given, batch.on(given, engine.device, engine.device_name)))
end

function Driver:drain() end

function Driver:look(loop)
  if loop.at == loop.count then return nil end
  local given = loop:draw()
  loop.at = loop.at + 1
  return forward.look(self.engine, given)
end

function Driver:fingerprint() end

function Driver:abandon() end

function Driver:refuse(text) return text end

function Driver:close() end

-- -- dry runs ---------------------------------------------------------------------------------------------------------
local dry = {
  [FORWARD] = function(engine, run, micro)
    collector.in_dry_run(micro + 1)
    local root = batch.loss(actions.perform(engine, FORWARD, nil, run.args))
    if root == nil then error("the model returned no tensor", 0) end
    run.root, run.gradient = root, nil
    if root:numel() ~= 1 then
      run.gradient = create.empty(root:shape(), { dtype = root:dtype(), device = root:device() })
    end
  end,
  [BACKWARD] = function(engine, run, micro)
    local n = state.of(engine).is.n_micro
    local how = overlap.backward(engine, 1, micro + 1 == n, true)
    actions.perform(engine, BACKWARD, how, run.root, weigh.dry_factor(engine, n), run.gradient)
    run.root, run.gradient = nil, nil
  end,
  [REDUCE] = function(engine) actions.perform(engine, REDUCE) end,
}

function Driver:dry_run(args)
  local is, run = state.of(self.engine).is, { args = args }
  while dry[is.due.kind] do dry[is.due.kind](self.engine, run, is.due.micro) end
end

function Driver:end_dry() return false end

--- Returns the driver of an engine whose model is not cut into stages.
---@param engine ps.Engine
---@return ps.engine.Driver
function driver.new(engine) return setmetatable({ engine = engine }, Driver) end

return driver
