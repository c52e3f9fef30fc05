-- SPDX-License-Identifier: BSD-3-Clause
-- Begins a step, either on all ranks or on no rank. The step's plan is made from the trace of an earlier step with the
-- same shapes, or from a dry run. If memory is short, three methods make room, in this order: collect Lua's garbage,
-- finish the checkpoint that is being saved, and use smaller chunks (engine/layout/rechunk.lua). If parameters were
-- thawed since the last step, the model first gets a layout in which these parameters train (engine/layout/thaw.lua).
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local forecasts = require "ps.engine.plan.forecast"
local plan_step = require "ps.engine.plan.step"
local step = require "ps.engine.step"
local rechunk = require "ps.engine.layout.rechunk"
local thaw = require "ps.engine.layout.thaw"
local ffi, C = native.ffi, native.C

local begin = {}

--- Creates the masters, gradients and optimizer states of thawed parameters now, instead of at the beginning of the
--- next step. A checkpoint can then contain or load these states. All ranks must call this function, between steps.
---@param engine ps.Engine
function begin.train_thawed(engine)
  local replace
  local function prepare()
    local names
    names, replace = thaw.prepare(engine)
    return names
  end
  if engine.ranks then engine.ranks:agree_on_thawed(prepare) else prepare() end
  if not replace then return end
  engine.masters:sync()
  replace()
end

local left_out = ffi.new("int64_t[1]")

-- Collects tensors that earlier steps left as garbage, and adds the tensors that survive the collection to the plan of
-- trace `id`. This is necessary because small tensors live until Lua's collector runs, but a plan counts only the
-- tensors of its own step.
local function leave_nothing(id)
  if C.ps_engine_leftover(native.ctx, id, 0, left_out) < 0 or left_out[0] == 0 then return end
  scope.collect_tensors()
  C.ps_engine_leftover(native.ctx, id, 1, left_out)
end

-- Begins a step that is expected to repeat trace `id`. If memory is short, collects Lua's garbage and tries once more.
local function begin_like(engine, key, id)
  if id then leave_nothing(id) end
  local rc = step.begin(engine, key, id)
  if rc ~= C.PS_ENOMEM then return rc end
  scope.collect_all()
  if id then leave_nothing(id) end
  return step.begin(engine, key, id)
end

-- Raises an error that asks for smaller chunks, if smaller chunks may help. An op's chunks may have room only because
-- the other tensors need less memory at the moment of the op than at their peak. In this case, the same memory is
-- used alternately for chunks and for other tensors in every step.
local function rather_smaller(engine, forecast)
  local short = forecast.short
  if not short then return end
  local msg = "an op has room for its chunks only if memory alternates between chunks and other tensors in each step"
  local problem = setmetatable({ name = "ENOMEM", code = C.PS_ENOMEM, sub = "OP_CHUNKS", msg = msg, tier = short.tier,
    wanted = short.wanted, left = short.left, lacking = short.wanted - short.left }, native.Error)
  if rechunk.share(engine, problem) then error(problem, 0) end
end

-- Finds or creates the trace of a step with these arguments, prints its plan if the plan is new, and begins the step.
local function plan_and_begin(engine, args, key)
  local id = engine.traces[key]
  local function look(forecast) rather_smaller(engine, forecast) end
  if id == nil and not engine.unplanned[key] then
    id = plan_step(engine, args, look)
    engine.traces[key] = id
    engine.unplanned[key] = id == nil or nil
  end
  local rc = begin_like(engine, key, id)
  if rc == C.PS_ERANGE then                       -- the trace was dropped to make room for other traces
    engine.traces[key] = not engine.unplanned[key] and plan_step(engine, args, look) or nil
    id = engine.traces[key]
    rc = begin_like(engine, key, id)
  end
  native.check(rc)
end

-- Tries to begin a step. Returns nil on success. If parameters were thawed, returns a function that replaces the
-- layout. If smaller chunks may help, returns a fraction for rechunk.split. The fraction is 0 if a rank has no room for
-- the new layout.
local function try_step(engine, args, key)
  local replace
  local function try()
    local names
    names, replace = thaw.prepare(engine)
    if names then return names end
    local ok, problem = pcall(plan_and_begin, engine, args, key)
    if ok then return end
    if not (type(problem) == "table" and problem.name == "ENOMEM" and native.give_room()) then error(problem, 0) end
    plan_and_begin(engine, args, key)
  end
  local function share(problem) return rechunk.share(engine, problem) end
  if engine.ranks then
    local part, thaws = engine.ranks:begin_step(try, share, function() return rechunk.limit(engine) end, key)
    return thaws and (replace or function() end) or part
  end
  local ok, problem = pcall(try)
  if ok then return replace end
  return share(problem) or error(problem, 0)
end

--- Begins a step with these arguments. If possible, makes a plan for the step, so that its ops have room.
---@param engine ps.Engine
---@param args any[]
function begin.step(engine, args)
  local key, was = forecasts.signature(engine, args), engine.built.layout.chunk_size
  engine.masters:sync()
  repeat
    local ok, part = pcall(try_step, engine, args, key)
    if not ok then step.give_up(engine) elseif part then step.take_back(engine) end
    if not ok then error(part, 0) end
    if type(part) == "function" then part()
    elseif part == 0 then engine.plan.no_finer = true
    elseif part then rechunk.split(engine, part) end
  until not part
  local now = engine.built.layout.chunk_size
  if now ~= was then
    engine:note(("a step did not fit in chunks of %d elements; the model got a new layout in chunks of %d"):format(was,
      now))
  end
end

return begin
