-- SPDX-License-Identifier: BSD-3-Clause
-- A pipeline at the pace of a script: loops over the micro-batches of a step or of an evaluation, and the forwards of
-- generate. A pipeline goes through one of them at a time, and its ranks compare what they begin. This file has no
-- state: engine/pipeline/row.lua has the row that is under way, engine/step/init.lua the step.
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local batch = require "ps.data.batch"
local hooks = require "ps.core.hooks"
local step = require "ps.engine.step"

local pipe_step = {}

-- All micro-batches of a loop, which a pipeline needs before its first turn.
local function all_of(engine, loop)
  local micros = { n = loop.count }
  for i = 1, loop.count do
    local given, rng = loop.take(i), random.state()
    given = hooks.ask("batch", engine, given) or given
    if loop.draws then for _, t in ipairs(batch.tensors(given)) do t:keep() end end     -- past the loader's next turn
    micros[i - 1] = { given = given, args = batch.on(given, engine.device, engine.device_name), number = i - 1,
      sample = tonumber(rng.sample), op = tonumber(rng.op), targets = batch.targets(engine.module, given) or false }
  end
  return micros
end

-- Refuses what comes within a loop: a pipeline goes through one thing at a time.
local function check_free(engine, what)
  if not engine.pipe.row then return end
  step.give_loop_up(engine, what .. " of this pipeline, or behind one that was left early: each goes on to its end "
    .. "before the next")
end

local SECOND = "a loop over micro-batches came within another one"

-- What a loop over a pipeline is, in the words of an error. Ranks that gather wait for those that do not.
local function said(what, loop)
  return ("%s of %d micro-batches%s"):format(what, loop.count, loop.gather and " with gather = true" or "")
end

-- Enters a pipeline with the micro-batches of a loop.
local function enter(engine, loop)
  check_free(engine, SECOND)
  step.check_row(engine)
  engine.pipe:load(all_of(engine, loop))
  engine.pipe:compare_begin(said("a step", loop))
  step.begin_row(engine)
end

--- The next micro-batch of a loop over a pipeline: forwards and backwards go on until its loss is there.
---@param engine ps.Engine
---@param loop ps.engine.Loop
---@return table out
function pipe_step.turn(engine, loop)
  if loop.at == 0 then enter(engine, loop) else engine.pipe:check_unchanged() end
  local pipe, number = engine.pipe, step.advance_row(engine)
  loop.at = loop.at + 1
  assert(number == loop.at - 1, "yields come in order")
  local micro = pipe.micros[number]
  local out = pipe:output(number, loop.gather)
  loop.given = micro.given
  return step.turned(engine, loop.at, micro.targets, out)
end

--- The next micro-batch of a loop over a pipeline that has forwards alone.
---@param engine ps.Engine
---@param loop ps.engine.Loop
---@return table? out nil behind the last
function pipe_step.look(engine, loop)
  local pipe = engine.pipe
  if loop.at == 0 then
    check_free(engine, SECOND)
    pipe:load(all_of(engine, loop))
    pipe:compare_begin(said("an evaluation", loop), true)
    pipe:begin(nil)
  end
  return scope.no_grad(function()
    local number = pipe:look()
    if number == nil then return nil end
    local out = pipe:output(number, loop.gather)
    loop.given, loop.at = pipe.micros[number].given, loop.at + 1
    return out
  end)
end

--- A forward through all stages for generate: the last part's output, on the rank of the last stage; else nil. All
--- rows are one micro-batch, since products of fewer rows have other bits on the CPU. All ranks call it.
---@param engine ps.Engine
---@param ids ps.Tensor int [R, n], on the device
---@param given table what the parts read, ids among it
---@return table<string, ps.Tensor>?
function pipe_step.once(engine, ids, given)
  local pipe, rng, args = engine.pipe, random.state(), { n = 1, ids }
  pipe:load { n = 1, [0] = { given = args, args = args, number = 0, sample = tonumber(rng.sample),
    op = tonumber(rng.op), targets = false, batch = given } }
  local micros = pipe.micros
  local ok, problem = pcall(function()
    pipe:begin(nil)
    repeat until pipe:look() == nil
  end)
  pipe.micros = false                                        -- it holds the caches
  if ok then return micros[0].out end
  pipe:abandon(problem)
  error(problem, 0)
end

--- Refuses generate within a loop over micro-batches, and tells the ranks apart that begin something else.
---@param engine ps.Engine
function pipe_step.begin_generate(engine)
  check_free(engine, "model:generate came within a loop over micro-batches")
  engine.pipe:compare_begin "generate"
end

--- Performs the actions that are left of the row behind the last turn.
---@param engine ps.Engine
---@param loop ps.engine.Loop
function pipe_step.drain(engine, loop)
  local rest
  if loop.trains then engine.pipe:check_unchanged() end
  if loop.trains then rest = step.advance_row(engine) else rest = pipe_step.look(engine, loop) end
  assert(rest == nil, "no yield is left")
end

return pipe_step
