-- SPDX-License-Identifier: BSD-3-Clause
-- A training loop that supports accumulation, gradient clipping, evaluation, a log, checkpoints and Ctrl-C.
--
--   local result = train.run { model =, optimizer =, loader =, sched =, steps = 1000,
--     eval = { every = 100, data = function() return ps.data.windows { ... } end },
--     checkpoint = { folder = "out", every = 200 }, log = "out/log.csv" }
--
-- If the model is an engine (ps.initialize), the engine's accumulation, clipping, loss scale and schedule are used.
-- `callbacks` are called after steps, evaluations and checkpoints, and can end the run. After the first Ctrl-C (or
-- SIGTERM, or SIGHUP), the run finishes the current step, saves a checkpoint and returns with interrupted = true. A
-- second Ctrl-C or SIGTERM ends the process.
local create = require "ps.tensor.create"
local devices = require "ps.core.devices"
local dist = require "ps.dist"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local nn_module = require "ps.nn.module"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local types = require "ps.core.types"
local error = caller.error
local agree = require "ps.dist.agree"
local batch = require "ps.data.batch"
local checkpoints = require "ps.checkpoints"
local loaded = require "ps.checkpoints.restore"
local writable = require "ps.core.writable"
local mesh = require "ps.dist.mesh"
local progress = require "ps.train.progress"
local train_log = require "ps.train.log"
local engine_step = require "ps.engine.step"
local unused = require "ps.engine.step.unused"
local schedule = require "ps.optim.schedule"
local average = require "ps.optim.average"
local C = native.C

local train = {}

local EVALUATE = { loss = "callable", stop = "callable" }

-- Returns the loss in a model's output. Raises an error if the output contains no loss.
local function checked_loss(output)
  local loss = batch.loss(output)
  if loss == nil then error("ps.train: the model must return a loss: a tensor, or a table with a tensor `loss`") end
  return loss
end

-- Computes the loss of a batch. `own` is the script's loss function, or nil if the model computes the loss.
local function loss_of(model, given, own)
  if own then return checked_loss(own(model, unpack(given, 1, given.n))) end
  return checked_loss(model(unpack(given, 1, given.n)))
end

-- Returns whether the steps of a model call model:micro_batches. In this case, the model must compute the loss itself.
local function loops(model, own)
  local engine = handle.of(model)
  if engine and engine.driver.in_loops and own then
    error("ps.train: the model is split into stages, and the last stage computes the loss: pass your own loss to "
      .. "ps.initialize { loss = function(out, batch) ... end }")
  end
  return engine and engine.adds_up and not own
end

-- `for loss, given, targets, score in losses_of(...)` iterates over the losses of a held-out batch: one loss per
-- micro-batch if the model works on micro-batches, and otherwise a single loss. In a pipeline, the last stage sends
-- `targets` and `score` to all ranks. Otherwise they are nil.
local function losses_of(model, given, own)
  if loops(model, own) then
    local loop = model:micro_batches(unpack(given, 1, given.n))
    return function()
      loss_weight.begin(given, given)
      local out = loop()
      if out then return checked_loss(out), loop.given, loop.targets, loop.score end
    end
  end
  loss_weight.begin(given, given)
  local done = false
  return function()
    if done then return nil end
    done = true
    return loss_of(model, given, own), given
  end
end

-- Returns the weight of a held-out batch, which is a number of targets. It is the first of these numbers that is known:
-- 1. the result of the model's method count_targets
-- 2. the number of targets that the ops of the loss have counted
-- 3. the number of labels that are not -100
-- 4. the number of rows
-- In a pipeline, only the last stage computes the loss. It sends its numbers to all ranks as `told`.
local function held_out_weight(model, loss, given, told)
  local found, first = told, given[1]
  if not told then
    found = batch.targets(model, given)
    if not (found and found.explicit) then found = loss_weight.of(loss) or found end
  end
  if found then return found.count end
  return scope.is_tensor(first) and first:dim() > 0 and first:size(0) or 1
end

-- Returns the sum of each argument over the ranks of a group.
local function sums(group, ...)
  if not group then return ... end
  return unpack(group:all_reduce(create.tensor({ ... }, { dtype = "fp64" })):tolist())
end

-- Returns whether all ranks have a batch, and whether any rank wants to stop. `has` and `stop` say so for this rank.
-- All ranks must decide the same, because each rank holds only some parts of the model. `number` is the number of the
-- batch, for errors.
local function agreed(group, has, stop, number)
  if not group then return has, stop end
  local all, stops = sums(group, has and 1 or 0, stop and 1 or 0)
  if stops > 0 then return has, true end
  if all > 0 and all < group:size() then
    error(("ps.train.evaluate: %d of %d ranks have no batch %d: all ranks need the same number of batches"):format(
      group:size() - all,
      group:size(), number), 0)
  end
  return has, false
end

-- Returns the number of targets that the model predicted correctly, and the number of targets. In a pipeline, `told`
-- contains these numbers, which the last stage has sent. Otherwise the ops of the loss have counted them.
local function score_of(loss, told)
  if told ~= nil then return told and told.hits or 0, told and told.targets or 0 end
  local hits, targets = loss_weight.score(loss)
  return hits or 0, targets or 0
end

-- Returns the fraction of targets that were predicted correctly, or nil if no target was counted.
local function accuracy(hits, targets) return targets > 0 and hits / targets or nil end

-- Performs train.evaluate with the current values of the parameters.
local function held_out(model, batches, options)
  local engine = handle.of(model)
  local restore, ranks = nn_module.modes(handle.module(model)), engine and engine.ranks or {}
  model:eval()
  local off = loss_weight.watch(true)
  local sum, weights, hits, targets, stopped, number = 0, 0, 0, 0, false, 0
  local ok, problem = pcall(scope.no_grad, function()
    while true do
      local given = number > 0 and options.stop and options.stop() and {} or batch.spread(batches())
      local has, stop = agreed(ranks.world, given[1] ~= nil, given.n == nil, number + 1)
      stopped = stop
      if stop or not has then break end
      number = number + 1
      for loss, part, told, score in losses_of(model, given, options.loss) do
        local weight, hit, of = held_out_weight(model, loss, part, told), score_of(loss, score)
        if weight > 0 then sum, weights = sum + loss:item() * weight, weights + weight end
        hits, targets = hits + hit, targets + of
      end
    end
    sum, weights, hits, targets = sums(ranks.dp, sum, weights, hits, targets)
  end)
  restore()
  off()
  if not ok then error(problem, 0) end
  if stopped or weights == 0 then return nil end
  return sum / weights, accuracy(hits, targets)
end

--- Computes the mean loss over an iterator of batches, without gradients and with the model in evaluation mode. The
--- weight of a batch is the total weight of its targets, or its number of rows if neither a loss op nor labels define
--- targets. If an engine has several ranks, all ranks must call this function with the same number of batches, and the
--- result is the mean over all ranks.
---@param model ps.nn.Module|ps.Engine
---@param batches fun(): ... returns the next batch, as x, y or as one table of named tensors; returns nil at the end
---@param options? {loss?: fun(model, ...): ps.Tensor, stop?: fun(): boolean} loss: computes the loss (default: the
--- model computes it). stop: called before each batch except the first; if it returns true, the evaluation ends
---@return number? loss nil if `stop` returned true on any rank, or if all targets are ignored
---@return number? accuracy the fraction of targets with the largest logit of their row (if several logits are equal and
--- largest, the first of them counts). nil if no op of the loss counts hits (docs/monitoring.md)
function train.evaluate(model, batches, options)
  options = caller.options(options, "ps.train.evaluate", EVALUATE)
  caller.typed(model, "table", "ps.train.evaluate: the model")
  caller.callable(batches, "ps.train.evaluate, after the model,")
  local engine = handle.of(model)
  if engine then return engine:averaged("ps.train.evaluate", held_out, model, batches, options) end
  return held_out(model, batches, options)
end

local function cell(value, format) return value and format:format(value) or "" end

---@class ps.TrainOptions
---@field model ps.nn.Module|ps.Engine
---@field optimizer ps.Optimizer|ps.EngineOptimizer
---@field loader ps.Loader|ps.train.Source
---@field steps integer number of optimizer steps in the whole run
---@field start? integer number of completed steps (default: if checkpoints.load has just read a checkpoint into the
--- optimizer, the step of the checkpoint, and otherwise 0)
---@field sched? ps.Schedule
---@field scaler? ps.LossScaler
---@field accumulate? integer number of batches per step, 1 (default) to 4096
---@field max_norm? number the norm to which gradients are clipped
---@field loss? fun(model, ...): ps.Tensor computes the loss of a batch from the loader (default: model(...))
---@field eval? {every: integer, data: fun(): fun()} every: number of steps between two evaluations. data: returns a new
--- iterator over held-out batches
---@field checkpoint? {folder: string, every?: integer, keep?: integer, extra?: table, async?: boolean}
---@field log? string path of a CSV file. A JSONL file of the same name, but with the extension .jsonl, is written to
--- the same folder. A run without `log` writes log.jsonl to the folder of checkpoints. If a line cannot be written, the
--- run tries again at later steps. If lines are still missing at the end of the run, the run ends with an error
---@field callbacks? ps.TrainCallbacks
---@field quiet? boolean

---@class ps.train.Source a loader that the script defines
---@field next fun(self: ps.train.Source): ... returns the next batch, as x, y or as one table of named tensors; never
--- returns nil
---@field global_batch? integer number of rows of a batch on all ranks, for tokens/s. If global_batch or seq is nil, the
--- tokens of each batch are counted
---@field seq? integer number of tokens per row
---@field state_dict? fun(self: ps.train.Source): table returns the loader's position as a table that can be converted
--- to JSON; required with `checkpoint`
---@field load_state_dict? fun(self: ps.train.Source, state: table)

---@class ps.TrainCallbacks called on all ranks. If a callback returns "stop" on any rank, the run ends on all ranks
--- after the current step
---@field step? fun(line: ps.TrainLine): string? called after the update of each step, when its log line is written
---@field evaluate? fun(line: ps.TrainLine): string? called after each evaluation, before the callback `step`
---@field save? fun(at: {step: integer, saved: string}): string? called after each checkpoint is saved

local Run = {}
Run.__index = Run

local function interrupted() return C.ps_interrupts() > 0 end

-- Returns whether the run ends after this step. A signal or a callback on any rank can end the run. All ranks must
-- return the same, so that they save, evaluate or continue together. Therefore the ranks exchange their answers if
-- `now` is true, and return the answer of the last exchange if it is not. All ranks must pass now = true at the same
-- points.
function Run:stopping(now)
  local stop = self.asked or interrupted()
  if not self.world then return stop end
  if now and not self.stop then self.stop = dist.any_rank(stop) end
  return self.stop
end

function Run:save(step)
  local to, options = self.options.checkpoint, self.options
  if not to then return end
  self.saved = checkpoints.save(to.folder, { model = options.model, optimizer = options.optimizer,
    sched = options.sched, loader = options.loader, scaler = options.scaler, step = step, extra = to.extra,
    keep = to.keep, async = to.async, quiet = options.quiet })
  self.saved_step = step
  self:tell_callbacks("save", { step = step, saved = self.saved })
end

function Run:fail(step, loss)
  local group = self.options.optimizer.groups[1]
  error(("training: the loss is %s at step %d (learning rate %.3g, last gradient norm %s). Last good checkpoint: %s. "
    .. "Try a lower learning rate, a longer warm-up or max_norm"):format(tostring(loss), step, group.lr,
    self.grad_norm and ("%.3g"):format(self.grad_norm) or "not measured", self.saved or "none"), 0)
end

-- Returns the schedule of a run: the option `sched`, or the schedule of the engine, or nil.
local function schedule_of(options)
  local engine = handle.of(options.model)
  return options.sched or engine and engine.scheduler
end

-- Switches the parameters to the values for training (if `train_mode` is true) or to the values for evaluation. The two
-- kinds of values differ only for a schedule-free optimizer.
function Run:set_mode(train_mode)
  local optimizer = self.options.optimizer
  if not average.of(optimizer) then return end
  if train_mode then optimizer:train() else optimizer:eval() end
end

function Run:evaluate(step)
  local options = self.options
  self:set_mode(false)
  local val, hit = train.evaluate(options.model, options.eval.data(), { loss = options.loss, stop = interrupted })
  self:set_mode(true)
  self:stopping(true)                                    -- the ranks decide here whether the run ends
  if val then
    self.val_loss, self.val_accuracy = val, hit
    local sched = schedule_of(options)
    if sched and sched.judge then sched:step(val) end
    self.display:note(("step %d: held-out loss %.4f%s"):format(step, val,
      hit and (", accuracy %.4f"):format(hit) or ""))
  end
  return val, hit
end

---@param line ps.TrainLine
function Run:record(line)
  self.history[#self.history + 1] = { step = line.step, loss = line.loss, val_loss = line.val_loss,
    accuracy = line.accuracy, val_accuracy = line.val_accuracy }
  local problem = self.log and self.log:write(line)
  if problem then self.display:warn(problem) end
end

-- Calls the callback `name` of the run, if there is one.
function Run:tell_callbacks(name, line)
  local callback = self.options.callbacks and self.options.callbacks[name]
  if not callback then return end
  local answer = callback(line)
  if answer == "stop" then
    self.asked = true
  elseif answer ~= nil then
    error(('ps.train.run: callbacks.%s returned %s; it must return nothing, or "stop" to end the run after this '
      .. "step"):format(name, tostring(answer)), 0)
  end
end

-- After the first Ctrl-C, prints a message that the run ends when the current step is complete. Prints it only once,
-- and only in steps of several batches, which may take long.
function Run:tell(step, done, of)
  if self.told or not interrupted() then return end
  self.told = true
  self.display:warn(("interrupted after batch %d of %d in step %d: the step is finished first; the next Ctrl-C or "
    .. "SIGTERM ends the run at once"):format(done, of, step))
end

-- Returns the weight of a batch within its step. An engine computes the weight itself. Otherwise, the weight is n /
-- places, where n is the number of targets in the batch that are not ignored, and places is the number of all targets
-- in the step's first batch. If batches have the same size and no target is ignored, the weight is 1. If a step has
-- only one batch, the weight is 1, or 0 if all targets are ignored.
function Run:weight(given, loss)
  local model = self.options.model
  local engine = handle.of(model)
  if engine then return (engine_step.weight_of(engine, loss)) end
  local found, alone = batch.targets(model, given), (self.options.accumulate or 1) == 1
  if not (alone or found and found.explicit) then found = loss_weight.of(loss) or found end
  loss_weight.used(loss)
  if not found then return 1 end
  if alone then return found.count > 0 and 1 or 0 end
  if not self.places and found.places > 0 then self.places = found.places end
  return found.count / (self.places or 1)
end

-- Returns the number of micro-batches in a step, and an iterator over the micro-batches. The iterator returns i, loss
-- and given, where i counts from 1. The body of the loop must run backward for the loss before the next iteration.
function Run:turns()
  local options, count = self.options, self.options.accumulate or 1
  if loops(options.model, options.loss) then
    local loop = options.model:micro_batches(options.loader)
    return loop.count, function()
      local out = loop()
      if out then return loop.at, checked_loss(out), loop.given end
    end
  end
  return count, function(_, i)
    i = (i or 0) + 1
    if i > count then return nil end
    local given = batch.spread(options.loader:next())
    loss_weight.begin(given, given)
    return i, loss_of(options.model, given, options.loss), given
  end
end

-- Returns the number of tokens in a batch. The first tensor of the batch determines this number. In a table of tensors,
-- the first tensor is input_ids. If there is no input_ids, it is the tensor whose name comes first in alphabetical
-- order. If the first tensor is a matrix of ids, the number is rows * columns. Otherwise the number is the number of
-- rows.
local function tokens_of(given)
  local first = given[1]
  if type(first) == "table" and not scope.is_tensor(first) then
    local names = {}
    for name, value in pairs(first) do if scope.is_tensor(value) then names[#names + 1] = name end end
    table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
    first = first.input_ids or first[names[1]]
  end
  if not scope.is_tensor(first) or first:dim() == 0 then return 1 end
  if first:is_float() or first:dim() == 1 then return first:size(0) end
  return first:size(0) * first:size(1)
end

-- Returns the number of tokens that all ranks together process in a step.
local function tokens_of_step(self, accumulate)
  local loader = self.options.loader
  if loader.global_batch and loader.seq and not loader.rows then          -- loader.rows: rows of texts differ in
                                                                          -- length, so their tokens are counted
    return accumulate * loader.global_batch * loader.seq
  end
  return self.counted * mesh.size "dp"
end

-- Runs the forwards and backwards of one optimizer step. Returns three results:
-- 1. the weighted mean of the losses on all ranks, or nil if all targets are ignored
-- 2. the sum of the weights
-- 3. the accuracy, or nil if no op counts correct predictions
-- If the mean loss is not finite, raises an error on all ranks before the last backward of the step.
function Run:gradients(step)
  local options = self.options
  local engine = handle.of(options.model)
  local sum, weights, hits, targets, mean = 0, 0, 0, 0, nil
  self.places, self.counted = nil, 0
  local accumulate, turns = self:turns()
  for i, loss, given in turns do
    self.counted = self.counted + tokens_of(given)
    local hit, of
    if engine then hit, of = engine_step.score_of(engine, loss) else hit, of = loss_weight.score(loss) end
    hits, targets = hits + (hit or 0), targets + (of or 0)
    local weight = self:weight(given, loss)
    local value = devices.computes and weight > 0 and loss:item() or 0      -- a script's dry run computes no values
    if weight > 0 then sum, weights = sum + value * weight, weights + weight end
    if i == accumulate then
      sum, weights, hits, targets = sums(mesh.group "dp", sum, weights, hits, targets)
    end
    if weights > 0 then mean = sum / weights end
    local bad = mean and (mean ~= mean or math.abs(mean) == math.huge)
    if bad and (i == accumulate or not self.world) then self:fail(step, mean) end
    if options.scaler then loss = options.scaler:scale_loss(loss) end
    if engine then options.model:backward(loss)
    else (weight ~= 1 and loss * weight or loss):backward() end
    if i < accumulate then self:tell(step, i, accumulate) end
  end
  return mean, weights, accuracy(hits, targets)
end

-- Updates the parameters, and returns the result of optimizer:step(). With an engine, the engine's configuration
-- defines clipping and loss scale. Otherwise the options of the run define them. `weights` is the sum of the batches'
-- weights. If all targets are ignored (weights is 0), the parameters do not change.
function Run:update(weights)
  local options = self.options
  if handle.of(options.model) then return options.optimizer:step() end
  if weights == 0 then return options.optimizer:skip() end
  return options.optimizer:step { max_norm = options.max_norm, scaler = options.scaler, grad_scale = 1 / weights }
end

-- Runs optimizer step number `step`, counted from 1, and writes its log line. Also runs an evaluation and saves a
-- checkpoint if they are due after this step.
function Run:step(step)
  local options, accumulate = self.options, self.options.accumulate or 1
  local began = C.ps_now()
  local lr = options.optimizer.groups[1].lr
  local loss, weights, hit = self:gradients(step)
  local info = self:update(weights)
  options.optimizer:zero_grad()
  if options.sched and not info.skipped then schedule.advance(options.sched) end
  if not self.looked and not info.skipped and options.optimizer.entries and devices.computes then
    self.looked = true
    local text = unused.of_plain(options.model, options.optimizer)
    if text and dist.rank() == 0 then io.stderr:write("psluajit: ", text, "\n") end
  end
  self.grad_norm, self.loss, self.accuracy = info.grad_norm, loss or self.loss, hit or self.accuracy
  local seconds = C.ps_now() - began
  self.seconds = self.seconds + seconds
  local tokens = tokens_of_step(self, accumulate)
  self.tokens = self.tokens + tokens
  self.step_s = self.step_s and 0.9 * self.step_s + 0.1 * seconds or seconds
  local rate = tokens / self.step_s
  local last = step == options.steps
  local due = options.eval and (last or step % options.eval.every == 0) and not self:stopping(true)
  local val, val_hit
  if due then val, val_hit = self:evaluate(step) end
  local scaler = options.scaler or options.optimizer.scaler
  local line = { step = step, loss = loss, accuracy = hit, lr = lr, grad_norm = self.grad_norm, val_loss = val,
    val_accuracy = val_hit, tokens = self.tokens, tokens_per_s = rate, loss_scale = scaler and scaler.scale,
    skipped = info.skipped and true or false }
  self:record(line)
  self.display:update(step, { loss = self.loss, accuracy = self.accuracy, val_loss = self.val_loss,
    tokens_per_s = rate })
  if val then self:tell_callbacks("evaluate", line) end
  self:tell_callbacks("step", line)
  local to = options.checkpoint
  if to and (last or self:stopping(true) or to.every and step % to.every == 0) then self:save(step) end
end

local function loop(self)
  local options = self.options
  if (options.accumulate or 1) > 1 and not handle.of(options.model) then
    for _, p in ipairs(options.model:parameters()) do p:grad_in_fp32(true) end
  end
  options.model:train()
  self:set_mode(true)
  local step = options.start or 0
  while step < options.steps and not self:stopping(true) do
    step = step + 1
    self:step(step)
  end
  if self:stopping() and self.saved_step ~= step then self:save(step) end
  checkpoints.wait()
  self:set_mode(false)
  return step
end

-- Options of train.run that are not allowed if the model is an engine. The values are the keys of the engine's
-- configuration that replace these options.
local SETTLED = { accumulate = "gradient_accumulation_steps", max_norm = "gradient_clipping", scaler = "fp16" }

local RUN = { model = "table", optimizer = "table", loader = "table", steps = "whole", start = "whole",
  sched = "table", scaler = "table", accumulate = "whole", max_norm = "number", loss = "callable", eval = "table",
  checkpoint = "table", log = "string", quiet = "boolean", callbacks = "table" }
-- The allowed fields of the option `callbacks`.
local CALLBACKS = { step = "callable", evaluate = "callable", save = "callable" }
local EVAL = { every = "whole", data = "callable" }
local CHECKPOINT = { folder = "string", every = "whole", keep = "whole", extra = "table", async = "boolean" }

-- Raises an error if the run would never advance its schedule, because the schedule depends on the held-out loss and
-- the run has no evaluation. Prints a note if the schedule and the run end at different steps.
local function check_schedule(options)
  local sched = schedule_of(options)
  if not sched then return end
  if sched.judge and not options.eval then
    error(("ps.train.run: the schedule %s follows the held-out loss, and the run has no eval"):format(sched.name))
  end
  local text = schedule.mismatch(sched, math.max(0, options.steps - (options.start or 0)))
  if text and not options.quiet and dist.rank() == 0 then io.stderr:write("psluajit: ", text, "\n") end
end

-- Returns the options of a run. If the run resumes from a checkpoint and the script has not set `start`, `start`
-- becomes the step of the checkpoint.
local function with_start(given)
  local step = loaded.continued(given.optimizer)
  if given.start or not step or step == 0 then return given end
  if not given.quiet and dist.rank() == 0 then
    io.stderr:write(("psluajit: ps.train.run continues after step %d, with which the optimizer was loaded; pass "
      .. "start = 0 to count from step 1\n"):format(step))
  end
  return setmetatable({ start = step }, { __index = given })
end

local function checked(options)
  options = caller.options(options, "ps.train.run", RUN)
  caller.options(options.eval, "ps.train.run: eval", EVAL)
  caller.options(options.checkpoint, "ps.train.run: checkpoint", CHECKPOINT)
  caller.options(options.callbacks, "ps.train.run: callbacks", CALLBACKS)
  local model = options.model
  for _, part in ipairs { "model", "optimizer", "loader" } do
    caller.typed(options[part], "table", "ps.train.run: " .. part)
  end
  caller.whole(options.steps, "ps.train.run: steps", 0)
  caller.whole(options.start or 0, "ps.train.run: start", 0)
  local most = types.MICRO_BATCHES
  if options.accumulate and (options.accumulate < 1 or options.accumulate > most) then
    error(("ps.train.run: accumulate is %.17g; a step may have 1 to %d batches"):format(options.accumulate, most))
  end
  caller.callable(options.loader.next, "ps.train.run: loader.next")
  for _, name in ipairs(options.checkpoint and { "state_dict", "load_state_dict" } or {}) do
    if options.loader[name] == nil then
      error(("ps.train.run: checkpoint is given, but the loader has no %s: a checkpoint stores the loader's "
        .. "position, so "
        .. "define loader:state_dict() and loader:load_state_dict(state), or remove checkpoint"):format(name))
    end
  end
  local problem = options.checkpoint and writable.folder(options.checkpoint.folder or "")
  if problem then error("ps.train.run: checkpoint.folder: " .. problem) end
  options = with_start(options)
  local engine = handle.of(model)
  if not engine then
    check_schedule(options)
    return options
  end
  for key, of in pairs(SETTLED) do
    if options[key] and not (key == "accumulate" and options[key] == engine.accumulate) then
      error(("train.run: the model is an engine: set %s by %s in its configuration"):format(key, of))
    end
  end
  if options.sched and engine.scheduler then
    error("train.run: the engine already has a schedule (scheduler in its configuration); remove that or sched")
  end
  check_schedule(options)
  return setmetatable({ accumulate = engine.accumulate }, { __index = options })
end

-- Opens the log on the first rank, which writes it. Stores the history of the run, which the log contains, on all
-- ranks.
local function open_log(self, start)
  local text = agree.first(self.world, function()
    local lines = {}
    local to = self.options.checkpoint
    self.log, self.history = train_log.open(self.options.log, to and to.folder, start)
    for i, at in ipairs(self.history) do
      lines[i] = ("%d %s %s %s %s"):format(at.step, cell(at.loss, "%.17g"), cell(at.val_loss, "%.17g"),
        cell(at.accuracy, "%.17g"), cell(at.val_accuracy, "%.17g"))
    end
    return table.concat(lines, "\n")
  end)
  if self.log then return end
  for step, loss, val, hit, val_hit in text:gmatch("(%d+) (%S*) (%S*) (%S*) (%S*)") do
    self.history[#self.history + 1] = { step = tonumber(step), loss = tonumber(loss), val_loss = tonumber(val),
      accuracy = tonumber(hit), val_accuracy = tonumber(val_hit) }
  end
end

--- Trains a model. If the run fails, the checkpoints that were already saved are not changed. `interrupted` is true if
--- a signal or a callback ended the run before its last step.
---
--- If an engine has several ranks, all ranks must call this function. Losses are means over all ranks. A signal to one
--- rank ends the run on all ranks after the same step. Rank 0 writes the log.
---
--- With AdamWScheduleFree, held-out losses are computed with the averages of the parameters. When the run ends, the
--- model contains the averages (optimizer:train() moves it back to the values for training).
---@param options ps.TrainOptions
---@return {step: integer, loss?: number, accuracy?: number, val_loss?: number, val_accuracy?: number, seconds: number,
--- tokens_per_s: number, history: table[], interrupted: boolean, saved?: string} accuracy: the fraction of the last
--- step's targets that have the largest logit. val_accuracy: this fraction for the held-out data. Both are nil if no
--- loss op counts correct predictions.
function train.run(options)
  options = checked(options)
  mesh.check_joined "ps.train.run"
  local group = mesh.group "world"
  if group and not handle.of(options.model) then
    error("ps.train.run: to train with several processes, make the model with ps.initialize "
      .. "(examples/train_chunked.lua)")
  end
  local start = options.start or 0
  local self = setmetatable({ options = options, world = group, stop = false, seconds = 0, tokens = 0, history = {} },
    Run)
  self.display = progress.new { total = options.steps, start = start,
    quiet = options.quiet or group and group:rank() > 0 }
  if options.log or options.checkpoint then open_log(self, start) end
  native.check(C.ps_interrupts_install())
  local off = loss_weight.watch(true)
  local ok, step = pcall(loop, self)
  off()
  local stopped = self:stopping()
  C.ps_interrupts_remove()
  self.display:finish()
  local function close() return self.log and self.log:close() or "" end
  if not ok then
    close()
    error(step, 0)
  end
  local lost = agree.first(group, close)
  if lost ~= "" then error(("training reached step %d, but %s. Last checkpoint: %s"):format(step, lost,
    self.saved or "none"), 0) end
  return { step = step, loss = self.loss, accuracy = self.accuracy, val_loss = self.val_loss,
    val_accuracy = self.val_accuracy, seconds = self.seconds,
    tokens_per_s = self.tokens / math.max(self.seconds, 1e-9), history = self.history, saved = self.saved,
    interrupted = stopped and step < options.steps }
end

return train
