-- SPDX-License-Identifier: BSD-3-Clause
-- The step of an engine. C owns the step's table of actions and says which action is due (ps_step, src/base/step.h).
-- perform() performs one action. model(), model:backward and optimizer:step() perform them at the script's pace; a dry
-- run loops over the table. Lua's own state of a step is in `states`, which no other file can reach: other files read
-- it by the functions here.
local create = require "ps.tensor.create"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local batch = require "ps.data.batch"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local hooks = require "ps.core.hooks"
local scope = require "ps.core.scope"
local types = require "ps.core.types"
local handle = require "ps.nn.handle"
local samples = require "ps.engine.step.samples"
local trained = require "ps.engine.step.trained"
local weigh = require "ps.engine.step.weigh"
local ffi, C = native.ffi, native.C

local step = {}

local FORWARD, BACKWARD, REDUCE = C.PS_ACT_FORWARD, C.PS_ACT_BACKWARD, C.PS_ACT_REDUCE
local NORM, UPDATE = C.PS_ACT_NORM, C.PS_ACT_UPDATE
-- The part of a report's line that counts an action's seconds.
local PART = { [FORWARD] = "forward", [BACKWARD] = "backward", [REDUCE] = "backward", [NORM] = "step",
  [UPDATE] = "step" }

-- What is added to a norm before max_norm is divided by it: that of torch.nn.utils.clip_grad_norm_.
step.CLIP_EPS = 1e-6
--- Where gradients are, once backward has updated the parameters; of an error.
step.GONE = "backward has updated the parameters already, so their gradients are gone: write gradient_clipping into "
  .. "the configuration, which clips before the update, or overlap_optimizer = false, which keeps the gradients until "
  .. "optimizer:step()"

local id_out = ffi.new("int32_t[1]")
local action_array = array "ps_action"

---@class ps.engine.StepState
---@field c ffi.cdata* the ps_step
---@field is ffi.cdata* C's own fields (ps_step_state): open, micro, n_micro, now, due, updating
---@field backward_how ffi.cdata* settings of the last backward
---@field overlaps boolean a backward of the step updates parameters
---@field update_how ffi.cdata*
---@field config ffi.cdata* ps_step_config, with the table of actions of the last step
---@field actions ffi.cdata* that table
---@field config_measures boolean? the table has a norm
---@field config_micros integer? the table's micro-batches
---@field loop ps.engine.Loop|false the loop over micro-batches that the script is in
---@field turn false|{outs: ps.Tensor[], targets: ps.Targets|false} the last forward's output by names, until its
---  backward
---@field from table<ps.Tensor, {loop: ps.engine.Loop|false, at: integer}> by loss of an output by names: its loop and
---  the number of its micro-batch
---@field key string|false of the trace in engine.traces; false: the trace is not kept there
---@field last_key string|false that key, of the last step that began with one
---@field measures boolean the step has a norm
---@field evaluates boolean the step began in evaluation mode, and has had no backward yet
---@field cleared boolean zero_grad came between the step's first forward and its first backward: a forward begins the
---  step again
---@field scale number|false|nil the factor on gradients that optimizer:step() found; false: it skips the step
---@field kept table[]|nil the optimizer's groups as a backward that updates found them
---@field settings string|nil the optimizer's settings that backward or the update began with
---@field factors table<integer, number> by group of the optimizer: a factor on its gradients (step.clip)
---@field norm number|nil of all gradients, without the loss scale, once the step's norm was taken
---@field clipped table<table, number> by row of engine.built: a factor on its gradient (engine/step/clip.lua)
---@field total number sum of the weights of the micro-batches so far, with the last one's over all ranks
---@field unit number|false a power of two that losses are divided by (engine/step/weigh.lua)
---@field targets ps.Targets|false of the batch that the model was called with last
---@field targets_of table<ps.Tensor, ps.Targets|false> by loss: the targets of its batch
---@field half_restored boolean a parameter's value could not be brought back: zero_grad tries again
---@field torn false|{model: boolean, optimizer: boolean, text: string, given_up: string, again: boolean} an update
---  failed in the middle: the parts whose values are of two steps, and the error of using them; given_up: that error
---  once the step was given up; again: another optimizer:step() can finish the update

---@type table<ps.Engine, ps.engine.StepState>
local states = setmetatable({}, { __mode = "k" })

-- Forgets all that belongs to one step.
local function forget(s)
  s.key, s.measures, s.cleared, s.scale, s.settings, s.overlaps = false, false, false, nil, nil, false
  s.evaluates = false
  s.total, s.unit, s.factors, s.norm, s.clipped = 0, false, {}, nil, {}
end

--- Gives an engine its step.
---@param engine ps.Engine
---@return ffi.cdata* step for ps_engine_open
function step.new(engine)
  local out = ffi.new("ps_step *[1]")
  native.check(C.ps_step_new(native.ctx, out))
  local c = ffi.gc(out[0], C.ps_step_free)
  local s = { c = c, is = C.ps_step_look(c), backward_how = ffi.new("ps_action_how"),
    update_how = ffi.new("ps_action_how"), config = ffi.new("ps_step_config"), targets = false,
    targets_of = setmetatable({}, { __mode = "k" }), from = setmetatable({}, { __mode = "k" }), loop = false,
    turn = false, half_restored = false, torn = false, last_key = false }
  forget(s)
  states[engine] = s
  return c
end

-- -- read by other files --------------------------------------------------------------------------------------------
--- Fields of an engine that tell of its step. Nobody can set them.
---@type table<string, fun(engine: ps.Engine): any>
step.fields = {
  micro = function(engine) return states[engine].is.micro end,        -- micro-batches whose backward has run
  torn = function(engine) return states[engine].torn end,
}

--- Micro-batches of the step under way; before a step begins, those of the loop, or of the configuration.
---@param engine ps.Engine
---@return integer
function step.count(engine)
  local s = states[engine]
  return s.is.open == 1 and s.is.n_micro or s.loop and s.loop.count or engine.accumulate
end

--- A text for the cut of the next step into micro-batches. Steps with the same text share a plan.
---@param engine ps.Engine
---@return string
function step.cut(engine)
  local loop = states[engine].loop
  return ("%d %s"):format(step.count(engine), loop and loop.rows or "")
end

--- Whether a step has begun and not ended.
---@param engine ps.Engine
---@return boolean
function step.is_open(engine) return states[engine].is.open == 1 end

--- Whether the step is forwards in evaluation mode so far, and ends without a trace where the next call is no backward.
---@param engine ps.Engine
---@return boolean
function step.evaluates(engine) return states[engine].evaluates end

--- Whether an action of the step is under way: the model's forward, or a backward or an update that calls Lua.
---@param engine ps.Engine
---@return boolean
function step.acts(engine) return states[engine].is.now.kind ~= C.PS_ACT_NONE end

-- Whether backward has updated parameters, or may have.
local function overlapped(s) return s.is.open == 1 and s.is.micro == s.is.n_micro and s.overlaps end

--- Refuses a change of the optimizer's settings after a backward that has updated parameters with them.
---@param engine ps.Engine
---@param what string the call
function step.check_settings(engine, what)
  if not (overlapped(states[engine]) and states[engine].is.updating == 1) then return end
  caller.error(what .. " came between backward and optimizer:step(), and backward has updated parameters with the "
    .. "present settings already: call it after step(), or set overlap_optimizer = false")
end

-- The settings that a pause changed after backward began to update with others go back to what they were.
hooks.on("resumes", function()
  for engine, s in pairs(states) do
    local opt = engine.optimizer
    if s.kept and overlapped(s) and s.is.updating == 1 and opt:checked_settings() ~= s.settings then
      for i, group in ipairs(opt.groups) do
        for key, value in pairs(s.kept[i]) do group[key] = value end
      end
      io.stderr:write("psluajit: the optimizer's settings are what they were before the pause: backward has updated "
        .. "parameters with them already; change them once optimizer:step() has ended\n")
    end
  end
end)

-- -- beginning and ending ---------------------------------------------------------------------------------------------
-- The actions of a step: for each micro-batch a forward, a backward and, with several ranks, a reduction; in a pipeline
-- those of this rank's row instead. The norm, if one is asked for, and the update follow.
local function table_of(engine, micros, measures)
  local list = {}
  local function add(kind, micro) list[#list + 1] = { kind, 0, micro } end
  if engine.pipe then list = engine.pipe:actions(micros) end
  for micro = 0, engine.pipe and -1 or micros - 1 do
    add(FORWARD, micro)
    add(BACKWARD, micro)
    if engine.ranks then add(REDUCE, micro) end
  end
  if measures then add(NORM, 0) end
  add(UPDATE, 0)
  local actions = action_array(#list)
  for i, action in ipairs(list) do actions[i - 1].kind, actions[i - 1].vstage, actions[i - 1].micro = unpack(action) end
  return actions, #list
end

--- Whether a norm of all gradients is needed before the update.
---@param engine ps.Engine
---@return boolean
local function measures(engine)
  local opt = engine.optimizer
  return opt.max_norm ~= nil or opt.checks_overflow
end

-- Tries to begin a step, and returns C's code.
local function begin(engine, trace, dry)
  local s, config = states[engine], states[engine].config
  local wants, micros = measures(engine), step.count(engine)
  if wants ~= s.config_measures or micros ~= s.config_micros then
    s.actions, config.n_actions = table_of(engine, micros, wants)
    config.actions, s.config_measures, s.config_micros = s.actions, wants, micros
  end
  config.dry, config.trace = dry and 1 or 0, trace
  local rc = C.ps_step_begin(s.c, config)
  if rc == 0 then s.measures = wants end
  return rc
end

--- Tries to begin a step that is expected to go as a trace did. The step's own trace becomes engine.traces[key].
---@param engine ps.Engine
---@param key string|false false: its trace is not kept there
---@param trace? integer nil: no trace of such a step is known
---@return integer rc 0, or an error that was not raised
function step.begin(engine, key, trace)
  local rc = begin(engine, trace or C.PS_TRACE_UNKNOWN)
  local s = states[engine]
  if rc == 0 then s.key, s.last_key = key, key or s.last_key end
  return rc
end

--- The trace of the step under way, or else of the last one; nil: there is none.
---@param engine ps.Engine
---@return integer? id
function step.trace(engine)
  local key = states[engine].last_key
  return key and engine.traces[key] or nil
end

-- Notes that a step failed in its updates, or in a backward that makes them. Parameters then have values of two steps,
-- if this rank had updated some, or if other ranks may have.
local function note_torn(engine, s, problem, again)
  local n, all = engine.optimizer:updated()
  local others = engine.ranks or engine.pipe
  if n == 0 and not others then return end
  local text = ("step %d failed in its update (%s), after %d of %d parameters had been updated%s: "):format(
    engine.steps + 1, tostring(problem):match("^[^\n]*"), n, all, others and " on this rank" or "")
  local load = "load a checkpoint, or states of both model and optimizer, before it goes on"
  s.torn = { model = true, optimizer = true, again = again, given_up = text .. load,
    text = text .. (again and "call optimizer:step() again, which updates the others, or " or "") .. load }
end

--- Takes back a step that is to begin again: gradients go, and a loop over micro-batches stays.
---@param engine ps.Engine
---@param failed? any the error of a backward that updates parameters
function step.take_back(engine, failed)
  native.check_running "giving the step up"
  local s = states[engine]
  if failed == nil and overlapped(s) then failed = "given up by a load, after backward" end
  if failed ~= nil then note_torn(engine, s, failed, false) end
  if s.torn and s.torn.again then s.torn.again, s.torn.text = false, s.torn.given_up end
  s.half_restored = C.ps_step_end(s.c, nil) < 0                -- < 0: a gradient stays, and zero_grad tries again
  engine.optimizer:drop_own()
  forget(s)
  engine.masters:note()
end

--- Ends the loop over micro-batches that the script is in, if any.
---@param engine ps.Engine
function step.leave_loop(engine)
  if engine.pipe then engine.pipe:abandon "the step was given up" end
  local s = states[engine]
  local loop = s.loop
  s.loop, s.turn = false, false
  if loop then loop:left() end
end

--- Abandons a step. Its gradients go, and parameters are what they were before it. If it failed in a backward that
--- updates them, or is abandoned after such a backward, the model is torn until a state is loaded. A loop over
--- micro-batches ends.
---@param engine ps.Engine
---@param failed? any the error of that backward
function step.give_up(engine, failed)
  step.take_back(engine, failed)
  step.leave_loop(engine)
end

--- Gives a step up that failed in a loop over micro-batches. Behind the last turn of a pipeline's loop updates may have
--- begun.
---@param engine ps.Engine
---@param problem any
function step.fail_loop(engine, problem)
  step.give_up(engine, states[engine].is.updating == 1 and problem or nil)
end

-- Ends a step that is over, and keeps its trace.
local function finish(engine, s)
  native.check(C.ps_step_end(s.c, id_out))
  if s.key and id_out[0] >= 0 then engine.traces[s.key] = id_out[0] end
  forget(s)
  s.torn = false
  engine.masters:note()
end

--- Refuses a torn model: a step failed in the middle of its update.
---@param engine ps.Engine
---@param level? integer
function step.check_whole(engine, level)
  engine:check_open()
  local torn = states[engine].torn
  if torn then error(torn.text, (level or 1) + 2) end
end

--- Notes that a part is whole again: load_state_dict wrote all of it.
---@param engine ps.Engine
---@param part "model"|"optimizer"
function step.mend(engine, part)
  local s = states[engine]
  if not s.torn then return end
  s.torn[part] = false
  if not (s.torn.model or s.torn.optimizer) then s.torn = false end
end

-- -- actions ----------------------------------------------------------------------------------------------------------
-- Lua's work for an action, by the action's kind.
local work = {
  [FORWARD] = function(engine, args) return engine.run(engine.module, unpack(args, 1, args.n)) end,
  [BACKWARD] = function(_, root, gradient) return scope.walk_back(root, gradient) end,
  [REDUCE] = function() end,                                    -- C does it all
  [NORM] = function(engine, wanted) return wanted and engine.optimizer:norm() end,
  [UPDATE] = function(engine, scale)
    if scale then engine.optimizer:update(scale) else engine.optimizer:drop() end
  end,
}

-- The same of a model that is cut into stages, of what C does not perform by itself. v: virtual stage; micro:
-- micro-batch; both from 0.
local pipe_work = {
  [FORWARD] = function(engine, v, micro) return engine.run(engine.pipe.forward, engine.pipe, v, micro) end,
  [NORM] = work[NORM], [UPDATE] = work[UPDATE],
}

local function failed(engine, s, problem)
  local kind = s.is.now.kind
  C.ps_step_abandon(s.c)
  if engine.ranks then engine.ranks:explain(problem, kind == BACKWARD or kind == REDUCE) end
  error(problem, 0)
end

local function done(engine, s, ok, ...)
  if not ok then failed(engine, s, (...)) end
  hooks.tell("action", s.is.now, false)
  local rc = C.ps_step_done(s.c)
  if rc < 0 then failed(engine, s, select(2, pcall(native.raise, rc))) end
  return ...
end

-- Lua's garbage goes before a walk.
local function collect()
  collectgarbage()
  if not devices.computes then collectgarbage "stop" end              -- as dry_run.lua of ps.planning has it
end

-- Performs one action. Every action of every step comes through here, but for those that C performs on its way through
-- a pipeline's row (next_event).
local function perform(engine, kind, how, ...)
  local s = states[engine]
  if kind == BACKWARD and C.ps_step_collects(s.c) ~= 0 then collect() end
  native.check(C.ps_step_next(s.c, kind, how))
  hooks.tell("action", s.is.now, true)
  return done(engine, s, pcall((engine.pipe and pipe_work or work)[kind], engine, ...))
end

-- Performs one action, and the report counts its seconds.
local function timed(engine, kind, ...)
  local report = engine.report
  if report then return report:timed(PART[kind], perform, engine, kind, ...) end
  return perform(engine, kind, ...)
end

-- Settings of a backward (ps_action_how). dry: of a dry run, which knows no weights.
local function how_backward(engine, s, weight, last, dry)
  local how, opt = s.backward_how, engine.optimizer
  how.groups = nil
  local updates = last and engine.overlap and not s.measures and (dry or s.total ~= 0)
    and (engine.pipe or not engine.adds_up and s.is.n_micro == 1)
  how.weight, how.overlap, how.scale = weight, updates and 1 or 0, 1
  how.slot = (last and engine.slots and (not updates or engine.device ~= engine.host or engine.ranks ~= nil)) and 1 or 0
  if updates then
    s.overlaps, s.settings, s.kept = true, opt:checked_settings(), {}
    for i, group in ipairs(opt.groups) do s.kept[i] = copied(group) end
    opt:settings_into(how)
    if not dry then how.scale = opt:grad_scale() end
  end
  return how
end

-- -- model(...) -------------------------------------------------------------------------------------------------------
-- Notes the targets of the batch that an output's loss is of; returns its arguments from the second on.
local function output(s, result, ...)
  local loss = batch.loss(result)
  if loss ~= nil then s.targets_of[loss] = s.targets end
  return result, ...
end

-- Refuses a turn of a loop without gradients, or in another mode than the loop began in.
local function check_loop(engine, loop)
  if not scope.grad_enabled() then
    caller.error "gradients are off within a loop over micro-batches, and it began with them"
  end
  if engine.module.training ~= loop.training then
    caller.error(("the model went to %s mode within a loop over micro-batches: do it before or after the loop"):format(
      loop.training and "evaluation" or "training"))
  end
end

-- The forward of a micro-batch; the first one begins the step. A step that began in evaluation mode and has had no
-- backward is none: the next forward begins anew. given: the arguments of the script; args: the same on the device.
local function train_forward(engine, s, given, args)
  if s.loop then check_loop(engine, s.loop) end
  step.check_whole(engine)
  if s.is.micro == 0 and (s.cleared or s.evaluates) then step.take_back(engine) end
  s.cleared = false
  if s.is.open == 0 then
    hooks.tell "begins"
    trained.check(engine)
    if engine.ranks then engine.ranks:note_batch(given) end
    engine.begin_step(engine, args)
    s.evaluates = not engine.module.training
  elseif engine.ranks then
    engine.ranks:note_batch(given)
  end
  s.targets = batch.targets(engine.module, given) or false
  if engine.ranks then engine.ranks:number_samples() end
  return output(s, timed(engine, FORWARD, nil, args))
end

-- Notes an output by names, since a script may call backward of its loss; returns its arguments from the third on.
local function named(s, at, out, ...)
  s.turn = { outs = batch.tensors(out), targets = s.targets }
  local loss = batch.loss(out)
  if loss ~= nil then s.from[loss] = { loop = s.loop, at = at } end
  return out, ...
end

--- Ends the step by a script's mistake in a loop over micro-batches. The ranks of other stages hear of it, with the
--- script's line.
---@param engine ps.Engine
---@param text string
function step.give_loop_up(engine, text)
  text = caller.position() .. text
  if engine.pipe then
    text = text .. "; its messages are on their way between the stages, so the run ends: go on from a checkpoint"
    engine.pipe:abandon(text)
  end
  step.give_up(engine)
  caller.error(text, 0)
end

--- Refuses a call that does not belong into a loop over micro-batches, if there is one, and gives the step up.
---@param engine ps.Engine
---@param what string
function step.check_no_loop(engine, what)
  local loop = states[engine].loop
  if not loop then return end
  step.give_loop_up(engine, ("%s came before the end of a loop over micro-batches, at micro-batch %d of %d: the loop "
    .. "was left early, or it was called in the loop; optimizer:step() belongs behind it; the step was given up"
    ):format(what, loop.at, loop.count))
end

local function same(...) return ... end

--- model(...): the forward of a micro-batch, in training mode and in evaluation mode; the first one begins the step.
--- Within ps.no_grad it belongs to no step.
---@param engine ps.Engine
---@return any ... the module's results
function step.forward(engine, ...)
  engine:check_open()
  local given, s = batch.spread(...), states[engine]
  local is_named = batch.is_named(given)
  local turning = is_named and batch.turning or same
  local args = batch.on(given, engine.device, engine.device_name)
  if not scope.grad_enabled() then
    return turning(engine.apply(engine.module, unpack(args, 1, args.n)))
  end
  step.check_no_loop(engine, "model(...) with gradients (an evaluation goes within ps.no_grad)")
  samples.check(engine, given)
  local other = hooks.ask("batch", engine, given)
  if other then given, args = other, batch.on(other, engine.device, engine.device_name) end
  if is_named then return named(s, 1, turning(train_forward(engine, s, given, args))) end
  s.turn = false
  return train_forward(engine, s, given, args)
end

-- -- loops over micro-batches -----------------------------------------------------------------------------------------
---@class ps.engine.Loop
---@field count integer micro-batches
---@field rows integer|false of the whole batch, where it is cut
---@field training boolean the model's mode when the loop began
---@field gather boolean all ranks get the output's tensors
---@field draws boolean micro-batches come from a loader
---@field given any[] the micro-batch of the last turn
---@field at integer the number, from 1, of the last turn's micro-batch; 0: no turn yet
---@field left fun(self: ps.engine.Loop) called when the loop is over, or was given up

--- Enters a loop over micro-batches, whose first micro-batch will begin a step.
---@param engine ps.Engine
---@param loop ps.engine.Loop
function step.enter_loop(engine, loop)
  native.check_running "a loop over micro-batches"
  step.check_whole(engine)
  step.check_no_loop(engine, "model:micro_batches(...)")
  local s = states[engine]
  local is = s.is
  if is.micro > 0 then
    caller.error(("a loop over micro-batches is a whole step, but %d of %d micro-batches of a step have been backward: "
      .. "%s before it"):format(is.micro, is.n_micro, is.micro == is.n_micro and "call optimizer:step()"
      or "end that step"))
  end
  if is.open == 1 then step.take_back(engine) end
  s.loop = loop
end

-- The number of the loop's micro-batches that the script has called backward of.
local function backwards(engine, s) return engine.pipe and engine.pipe.marked or s.is.micro end

--- Whether the loop has another micro-batch. It is an error where the loop was given up, or where the last micro-batch
--- had no backward.
---@param engine ps.Engine
---@param loop ps.engine.Loop
---@return boolean
function step.loop_goes_on(engine, loop)
  local s = states[engine]
  if s.loop ~= loop then caller.error "this loop over micro-batches was given up" end
  if backwards(engine, s) < loop.at then
    step.give_loop_up(engine, ("micro-batch %d of %d has had no backward: call model:backward(out.loss) in each turn "
      .. "of the loop, or run a loop of forwards alone within ps.no_grad; the step was given up"):format(loop.at,
      loop.count))
  end
  return loop.at < loop.count
end

--- The forward of a loop's next micro-batch. An error gives the step up.
---@param engine ps.Engine
---@param loop ps.engine.Loop
---@param given any[] and n
---@return table out
function step.turn(engine, loop, given)
  local s = states[engine]
  loop.at = loop.at + 1
  given = hooks.ask("batch", engine, given) or given
  local args = batch.on(given, engine.device, engine.device_name)
  return (named(s, loop.at, batch.output(train_forward(engine, s, given, args))))
end

-- -- the row of a pipeline (engine/pipeline/pace.lua has the loop) ----------------------------------------------------
-- The next event of the row (Pipe:next). On the way to it C performs backwards, weight gradients and reductions.
local function next_event(engine, s)
  local pipe, report = engine.pipe, engine.report
  local ok, kind, v, micro = pcall(pipe.next, pipe)
  if not ok and s.is.now.kind ~= C.PS_ACT_NONE then failed(engine, s, kind) end            -- in one of them
  if not ok then error(kind, 0) end
  local seconds = pipe:tell()
  if report and seconds > 0 then report:took(PART[BACKWARD], seconds) end
  return kind, v, micro
end

-- Gives C the settings of the row's last backwards.
local function settle(engine, dry) engine.pipe:settle(how_backward(engine, states[engine], 0, true, dry)) end

-- Runs the recompute segment again at which the walk of C's action stopped.
local function run_again(engine, s)
  local ok, problem = pcall(scope.run_again, engine.pipe:segment())
  if not ok then failed(engine, s, problem) end
end

-- Performs the row up to the next yield; before: called before each forward. Returns the yield's micro-batch, from 0;
-- nil: the row is over.
local function advance(engine, dry, before)
  local s, pipe, report = states[engine], engine.pipe, not dry and engine.report
  while true do
    local kind, v, micro = next_event(engine, s)
    if kind == nil then return nil end
    if kind == FORWARD then
      if before then before() end
      if not pipe:is_again() then
        (dry and perform or timed)(engine, FORWARD, pipe:how_forward(v, micro), v, micro)
      end
    elseif kind == C.PS_ACT_SEGMENT then
      if report then report:timed(PART[BACKWARD], run_again, engine, s) else run_again(engine, s) end
    elseif pipe:collects() then
      collect()
      if dry then pipe:collected() end
    end
    pipe:done()
    if kind == C.PS_ACT_YIELD then return micro end
  end
end

--- Begins the row of a step whose micro-batches the pipeline has.
---@param engine ps.Engine
function step.begin_row(engine)
  hooks.tell "begins"
  trained.check(engine)
  engine.begin_step(engine, engine.pipe.micros[0].args)
  engine.pipe:begin(states[engine].c)
end

--- Refuses a step of a torn model, and takes back one that zero_grad cleared.
---@param engine ps.Engine
function step.check_row(engine)
  local s = states[engine]
  step.check_whole(engine)
  if s.cleared then step.take_back(engine) end
  s.cleared = false
end

--- Performs the row up to its next yield.
---@param engine ps.Engine
---@return integer? micro that of the yield, from 0; nil: the row is over
function step.advance_row(engine)
  if engine.pipe.marked == engine.pipe.count then settle(engine, false) end
  return advance(engine, false)
end

--- Notes a turn of a loop over a pipeline.
---@param engine ps.Engine
---@param at integer the number of its micro-batch, from 1
---@param targets ps.Targets|false
---@param out table what the script gets
---@return table out
function step.turned(engine, at, targets, out)
  local s = states[engine]
  s.targets = targets
  s.targets_of[batch.loss(out)] = targets
  return (named(s, at, out))
end

--- A forward without gradients, and without a step.
---@param engine ps.Engine
---@param given any[] and n
---@return table out
function step.look(engine, given)
  local args = batch.on(given, engine.device, engine.device_name)
  return batch.output(scope.no_grad(engine.apply, engine.module, unpack(args, 1, args.n)))
end

-- Refuses backward of a loss that is not of the loop's present micro-batch, and a second backward of it.
local function check_of_loop(engine, s, loss)
  local loop, of = s.loop, s.from[loss]
  local function refuse(text, ...)
    caller.error(("backward in a loop over micro-batches, at micro-batch %d of %d, "):format(loop.at, loop.count)
      .. text:format(...))
  end
  if of and of.loop ~= loop then refuse "of a loss of another loop" end
  if of and of.at < loop.at then refuse("of the loss of micro-batch %d", of.at) end
  if backwards(engine, s) >= loop.at then refuse "a second time: each micro-batch has one" end
  if not of and not scope.made_from(loss, s.turn.outs) then refuse "of a loss that was not made from what it gave" end
end

-- -- model:backward ---------------------------------------------------------------------------------------------------
--- The weight of a loss (weigh.loss). A loss that a script made of the model's output has the targets of the last
--- batch.
---@param engine ps.Engine
---@param loss ps.Tensor
---@param options? {weight?: number}
---@return number weight
---@return number places
function step.weight_of(engine, loss, options)
  local s = states[engine]
  local found = s.targets_of[loss]
  if found == nil then found = s.targets end
  if s.turn and s.from[loss] == nil then found = s.turn.targets end     -- s.targets may be of an evaluation since
  return weigh.loss(engine, step.count(engine), found, options)
end

-- Adds a micro-batch's weight to the step's, and returns the factor on its loss. All ranks call it together.
local function add_weight(engine, s, weight, places, last)
  local ranks, scaler = engine.ranks, engine.optimizer.scaler
  s.total = (engine.pipe and engine.pipe.total or s.is.weight) + weight
  if ranks and last then s.total = ranks:sum(s.total) end
  if ranks then ranks:note_weight(weight) end
  if not scaler then return weight end
  if not s.unit and weigh.several(engine, s.is.n_micro) then
    s.unit = weigh.unit((ranks and ranks:sum(places) or places) * s.is.n_micro)
  end
  return scaler.scale * weight / (s.unit or 1)
end

--- The factor on the step's gradients, without that of the loss scale; 0 for a step without targets.
---@param engine ps.Engine
---@return number
function step.weight_factor(engine)
  local s = states[engine]
  return s.total == 0 and 0 or (s.unit or 1) / s.total
end

-- A micro-batch's loss times its factor. With a loss scale every rank of a pipeline multiplies, also by 1: anomaly mode
-- pardons the op behind "scaled", whichever it is.
local function weighed(engine, loss, factor)
  local scaler = engine.optimizer.scaler
  if scaler then hooks.tell "scaled" end
  return (scaler or factor ~= 1) and loss * factor or loss
end

-- The script's backward in a pipeline: it notes the loss from which the walk will begin. The row goes on with the next
-- turn.
local function mark(engine, s, loss, weight, places)
  local pipe = engine.pipe
  local last = pipe.marked + 1 == pipe.count
  if last then pipe:check_weights(pipe.total + weight) end
  local factor = add_weight(engine, s, weight, places, last)
  local root = weighed(engine, loss, factor)
  if engine.report then engine.report:take_loss(loss, weight) end
  pipe:mark(root, weight)
  s.turn = false
end

local function backward(engine, s, loss, weight, places)
  if engine.pipe then return mark(engine, s, loss, weight, places) end
  local last = s.is.micro + 1 == s.is.n_micro
  local factor = add_weight(engine, s, weight, places, last)
  local how = how_backward(engine, s, weight, last)
  local root = weighed(engine, loss, factor)
  if engine.report then engine.report:take_loss(loss, weight) end
  timed(engine, BACKWARD, how, root)
  if s.is.due.kind == REDUCE then timed(engine, REDUCE) end
  s.turn = false
end

--- Backward from a loss: scales it for fp16, and adds micro-batches up. With gradient_accumulation_steps > 1 or several
--- ranks, a micro-batch weighs as much as it has targets (those that are not -100), so that the mean over a batch's
--- tokens does not depend on the cut into micro-batches. `weight` is the number of targets where the engine cannot
--- count them. Where no target of a step counts, step() skips the step (engine/step/weigh.lua).
---@param engine ps.Engine
---@param loss ps.Tensor of one element
---@param options? {weight?: number}
function step.backward(engine, loss, options)
  engine = handle.own(engine, "backward")
  native.check_running "model:backward"
  step.check_whole(engine)
  if not scope.is_tensor(loss) then caller.error(weigh.no_loss(loss)) end
  local s = states[engine]
  local is = s.is
  if s.loop then check_of_loop(engine, s, loss)
  elseif engine.pipe then
    caller.error("backward of a model in stages belongs into a loop that ran with gradients, for out in "
      .. "model:micro_batches(...) do model:backward(out.loss) end, not within ps.no_grad")
  elseif s.from[loss] and s.from[loss].loop then
    caller.error "backward of a loss of a loop over micro-batches that has ended: it belongs into the loop's turn"
  end
  if not engine.pipe and is.open == 1 and is.micro == is.n_micro then
    caller.error(("backward was called %d times since the last optimizer:step(), gradient_accumulation_steps is %d, "
      .. "which says how many backwards a step has"):format(is.micro + 1, is.n_micro))
  end
  local weight, places = step.weight_of(engine, loss, options)
  if is.micro == 0 then engine.optimizer:check_no_gradients() end
  if is.open == 0 then                                         -- a step without a forward of its own
    engine.masters:sync()
    native.check(begin(engine, C.PS_TRACE_NONE))
  end
  s.evaluates = false
  hooks.tell("backwards", function(text) engine:note(text) end)
  local ok, problem = pcall(backward, engine, s, loss, weight, places)
  if ok then return end
  if engine.pipe then engine.pipe:abandon(problem) end            -- other ranks get the cause
  step.give_up(engine, s.is.updating == 1 and problem or nil)
  error(problem, 0)
end

-- tensor:backward() of a script is model:backward for the loss of an output by names, and for a loss made of such an
-- output.
hooks.on("backward", function(loss, gradient)
  for engine, s in pairs(states) do
    if s.from[loss] or s.turn and scope.made_from(loss, s.turn.outs) then
      if gradient ~= nil then
        caller.error "backward of a tensor of a micro-batch with a gradient of its own: make it a loss, (t * g):sum()"
      end
      step.backward(engine, loss)
      return true
    end
  end
end)

-- -- optimizer:step ---------------------------------------------------------------------------------------------------
--- The norm of all gradients of the step, without the loss scale; 0 where no target counts. The first call performs
--- the step's action, of all ranks together.
---@param engine ps.Engine
---@return number
function step.norm(engine)
  local s = states[engine]
  if s.total == 0 then return 0 end
  if s.norm == nil then s.norm = timed(engine, NORM, nil, true) * engine.optimizer:grad_scale() end
  return s.norm
end

--- The factor on gradients in the update that undoes the loss scale and the sum over micro-batches and ranks.
---@param engine ps.Engine
---@return number
function step.unscale(engine) return engine.optimizer:grad_scale() end

--- The factors on gradients of this step, by row of engine.built (engine/step/clip.lua).
---@param engine ps.Engine
---@return table<table, number>
function step.factors(engine) return states[engine].clipped end

--- Whether backward of the step under way has updated the parameters.
---@param engine ps.Engine
---@return boolean
function step.gradients_gone(engine) return overlapped(states[engine]) end

--- Refuses a call that needs the gradients of a whole step, which are there from its last backward to optimizer:step().
---@param engine ps.Engine
---@param call string of messages
function step.check_gradients(engine, call)
  native.check_running(call)
  step.check_whole(engine)
  local s = states[engine]
  local is = s.is
  if s.loop then
    caller.error(call .. " came within a loop over micro-batches: it belongs after the loop, before optimizer:step()")
  end
  if is.micro == 0 then
    caller.error(call .. ": there was no backward since the last step, so there are no gradients: it belongs between "
      .. "model:backward(loss) and optimizer:step()")
  end
  if is.micro < is.n_micro then
    caller.error(("%s after %d of %d micro-batches (gradient_accumulation_steps): it belongs after the last backward "
      .. "of the step"):format(call, is.micro, is.n_micro))
  end
  if overlapped(s) then caller.error(call .. ": " .. step.GONE) end
  if s.scale ~= nil then caller.error(call .. ": optimizer:step() has begun to update the parameters") end
end

--- `for engine in`: the engines of the process, closed ones too.
---@return fun(): ps.Engine?
function step.engines() return pairs(states) end

-- Norm, overflow and clipping. Returns the factor on gradients in the update; false: the step is skipped.
local function measure(engine, s)
  local opt, skipped = engine.optimizer, false
  opt.grad_norm = nil
  if s.total == 0 then
    if s.measures then timed(engine, NORM, nil, false) end
    return false
  end
  local scale = opt:grad_scale()
  if s.measures or s.norm then
    local norm = step.norm(engine)
    opt.grad_norm = norm
    if not types.finite(norm) then
      skipped = opt.checks_overflow
      if not skipped and (s.measures or next(s.clipped)) then
        error(("%s: the gradient norm is %s; the parameters were left as they are"):format(opt.kind, tostring(norm)), 0)
      end
    elseif opt.max_norm then
      scale = scale * math.min(1, opt.max_norm / (norm + step.CLIP_EPS))
    end
  end
  if opt.scaler then opt.scaler:update(skipped) end
  return not skipped and scale
end

local function update(engine, s)
  if s.scale == nil then
    -- Sums of tied gradients, norms and owners go by different groups, in which a rank that is elsewhere is not heard.
    if engine.pipe then engine.pipe:compare_begin "optimizer:step()" end
    s.scale = measure(engine, s)
  end
  local how = s.update_how
  how.scale = s.scale or 1
  if s.scale then engine.optimizer:settings_into(how, s.factors) else how.groups = nil end
  timed(engine, UPDATE, how, s.scale)
end

--- The norm of the gradients of some groups of the optimizer, once the step's last backward has run. The update then
--- multiplies these gradients by max_norm / (norm + eps), where that is below 1. The step has to be one that measures a
--- norm and does not clip by it: optimizer.max_norm was math.huge when it began.
---@param engine ps.Engine
---@param numbers integer[] of the groups, from 1, rising; each once a step
---@param max_norm number
---@param eps number
---@return number norm without the loss scale; not finite where gradients, of whatever group, overflowed
function step.clip(engine, numbers, max_norm, eps)
  step.check_whole(engine)
  local s, opt = states[engine], engine.optimizer
  local is = s.is
  if is.micro == 0 then caller.error(opt.NO_BACKWARD) end
  if is.micro < is.n_micro then
    caller.error(("the norm of gradients after %d of %d micro-batches (gradient_accumulation_steps): it comes behind "
      .. "the last backward"):format(is.micro, is.n_micro))
  end
  for _, number in ipairs(numbers) do
    if s.factors[number] then
      caller.error(("the norm of the gradients of group %d was taken already: once a step"):format(number))
    end
  end
  assert(s.measures and opt.max_norm == math.huge, "the step's table has a norm")
  if s.scale == nil then
    local ok, scale = pcall(measure, engine, s)
    if not ok then
      step.give_up(engine)
      error(scale, 0)
    end
    s.scale = scale
  end
  local norm = s.scale and opt:norm_of(numbers) * s.scale or opt.grad_norm
  for _, number in ipairs(numbers) do s.factors[number] = s.scale and math.min(1, max_norm / (norm + eps)) or 1 end
  return norm
end

--- One update, once backward of the step's last micro-batch has run; before that it does nothing. A step whose
--- gradients overflowed, or in which no target counts, is skipped: nothing is updated. Where an update fails, another
--- call updates the remaining parameters with the same factor on gradients.
---@param engine ps.Engine
---@return {grad_norm?: number, skipped: boolean, accumulating: boolean}
function step.update(engine)
  native.check_running "optimizer:step()"
  local s = states[engine]
  step.check_no_loop(engine, "optimizer:step()")
  if not (s.torn and s.torn.again) then step.check_whole(engine, 2) end
  local is, opt = s.is, engine.optimizer
  if is.micro == 0 then caller.error(opt.NO_BACKWARD) end
  local info = { skipped = false, accumulating = is.micro < is.n_micro }
  if info.accumulating then return info end
  local settings = opt:checked_settings()
  if is.updating == 1 and settings ~= s.settings then
    caller.error("the optimizer's settings were changed between backward and step(), but backward has updated "
      .. "parameters already: change them after step(), or set overlap_optimizer = false")
  end
  s.settings = settings
  local ok, problem = pcall(update, engine, s)
  if not ok then
    if is.updating == 1 and s.scale then note_torn(engine, s, problem, true) else step.give_up(engine) end
    error(problem, 0)
  end
  info.skipped, info.grad_norm = s.scale == false, opt.grad_norm
  if not info.skipped then opt.steps = opt.steps + 1 end
  finish(engine, s)
  return info
end

--- Drops the gradients. While micro-batches are being accumulated it does nothing, so that the usual loop of zero_grad,
--- forward, backward and step works with any gradient_accumulation_steps. After the step's last backward it gives the
--- step up, but not where parameters have been updated.
---@param engine ps.Engine
---@param call? string of messages, default "optimizer:zero_grad()"
function step.zero_grad(engine, call)
  call = call or "optimizer:zero_grad()"
  native.check_running(call)
  engine:check_open()
  step.check_no_loop(engine, call)
  local s = states[engine]
  local is = s.is
  if is.micro > 0 and is.micro < is.n_micro then return end
  if s.torn and s.torn.again then caller.error(s.torn.text) end
  if overlapped(s) then
    caller.error(call .. ": the step cannot be given up any more: backward has updated the parameters already; call "
      .. "optimizer:step(), or set overlap_optimizer = false")
  end
  if is.micro > 0 then return step.give_up(engine) end
  engine.optimizer:drop()
  if s.half_restored then
    s.half_restored = false
    engine.masters:note()
  end
  s.cleared = is.open == 1                                      -- a forward that follows begins the step again
end

-- -- dry runs ---------------------------------------------------------------------------------------------------------
-- Called before the forward of that number in a dry run, from 1 on. Whether it collected.
local function collect_some(number)
  if number % C.PS_UNCOLLECTED ~= 0 then return false end
  collectgarbage()
  collectgarbage "stop"
  return true
end

local dry = {
  [FORWARD] = function(engine, run, micro)
    collect_some(micro + 1)
    local root = batch.loss(perform(engine, FORWARD, nil, run.args))
    if root == nil then error("the model gave no tensor", 0) end
    run.root, run.gradient = root, nil
    if root:numel() ~= 1 then
      run.gradient = create.empty(root:shape(), { dtype = root:dtype(), device = root:device() })
    end
  end,
  [BACKWARD] = function(engine, run, micro)
    local how = how_backward(engine, states[engine], 1, micro + 1 == states[engine].is.n_micro, true)
    perform(engine, BACKWARD, how, run.root, run.gradient)
    run.root, run.gradient = nil, nil
  end,
  [REDUCE] = function(engine) perform(engine, REDUCE) end,
  [NORM] = function(engine) perform(engine, NORM, nil, true) end,
  [UPDATE] = function(engine)
    local how = states[engine].update_how
    how.scale = 1
    engine.optimizer:settings_into(how)
    perform(engine, UPDATE, how, 1)
  end,
}

-- Performs the row of a pipeline in a dry run, in which its transfers do nothing.
local function through_row(engine)
  local forwards = 0
  local function before()
    forwards = forwards + 1
    if collect_some(forwards) then engine.pipe:collected() end
  end
  engine.pipe:begin(states[engine].c, true)
  settle(engine, true)
  repeat
    local micro = advance(engine, true, before)
    if micro then engine.pipe:drop_output(micro) end
  until micro == nil
end

local function through_table(engine, args)
  if engine.pipe then through_row(engine) end
  local is, run = states[engine].is, { args = args }
  while is.due.kind ~= C.PS_ACT_NONE do dry[is.due.kind](engine, run, is.due.micro) end
end

--- Performs all actions of a step without computing anything.
---@param engine ps.Engine
---@param args any[] and n
---@param like? integer a trace of this step: gathers from other ranks run ahead as they do by that trace
---@return integer? id of the step's trace; nil: an action failed
---@return any problem its error
function step.dry_run(engine, args, like)
  local s = states[engine]
  native.check(begin(engine, like or C.PS_TRACE_UNKNOWN, true))
  local ok, problem = pcall(scope.scope, function() scope.enable_grad(through_table, engine, args) end)
  local again = engine.pipe and engine.pipe:drop_dry()
  local rc = C.ps_step_end(s.c, ok and id_out or nil)
  forget(s)
  if again then
    scope.collect()
    collectgarbage "stop"
    return step.dry_run(engine, args, like)
  end
  if not ok then return nil, problem end
  native.check(rc)
  return id_out[0]
end

return step
