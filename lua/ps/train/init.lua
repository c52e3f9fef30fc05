-- SPDX-License-Identifier: BSD-3-Clause
-- A training loop with accumulation, clipping, evaluation, a log, checkpoints and handling of Ctrl-C.
--
--   local result = train.run { model =, optimizer =, loader =, sched =, steps = 1000,
--     eval = { every = 100, data = function() return ps.data.windows { ... } end },
--     checkpoint = { folder = "out", every = 200 }, log = "out/log.csv" }
--
-- If the model is an engine (ps.initialize), its accumulation, clipping, loss scale and schedule apply. `callbacks` are
-- called after steps, evaluations and checkpoints, and can end the run. After the first Ctrl-C (or SIGTERM, or SIGHUP),
-- the run finishes the step, saves and returns with interrupted = true. A second Ctrl-C or SIGTERM ends the process.
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

-- Returns the loss in a model's output. Raises an error if there is none.
local function checked_loss(output)
  local loss = batch.loss(output)
  if loss == nil then error("ps.train: the model must return a loss: a tensor, or a table with a tensor `loss`") end
  return loss
end

-- Computes the loss of a batch, by the model or by the script's own function.
local function loss_of(model, given, own)
  if own then return checked_loss(own(model, unpack(given, 1, given.n))) end
  return checked_loss(model(unpack(given, 1, given.n)))
end

-- Returns whether the steps of a model call model:micro_batches. The loss is then the model's own.
local function loops(model, own)
  local engine = handle.of(model)
  if engine and engine.driver.in_loops and own then
    error("ps.train: the model is split into stages, and the last stage computes the loss: pass your own loss to "
      .. "ps.initialize { loss = function(out, batch) ... end }")
  end
  return engine and engine.adds_up and not own
end

-- `for loss, given, targets, score in losses_of(...)` iterates over the losses of a held-out batch. If the model works
-- on micro-batches, it iterates over the micro-batches of the batch. In a pipeline, `targets` and `score` are values
-- that the last stage sent to all ranks.
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

-- Returns the weight of a held-out batch. If the model has a method count_targets, this method returns the weight.
-- Otherwise the ops of the model's loss count it. If they do not, the weight is the number of labels that are not -100.
-- If there are no targets to count, the weight is the number of rows. In a pipeline, the ops run on the last stage,
-- which sends `told` to all ranks.
local function held_out_weight(model, loss, given, told)
  local found, first = told, given[1]
  if not told then
    found = batch.targets(model, given)
    if not (found and found.explicit) then found = loss_weight.of(loss) or found end
  end
  if found then return found.count end
  return scope.is_tensor(first) and first:dim() > 0 and first:size(0) or 1
end

-- Sums numbers over the ranks of a group.
local function sums(group, ...)
  if not group then return ... end
  return unpack(group:all_reduce(create.tensor({ ... }, { dtype = "fp64" })):tolist())
end

-- Returns whether all ranks have a batch, and whether to stop. Each rank has some of the model's parts, so either all
-- ranks compute or no rank does.
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

-- Returns the number of targets that the model predicted correctly, and the number of targets. In a pipeline, the last
-- stage has sent these numbers. Otherwise the ops of the loss have counted them.
local function score_of(loss, told)
  if told ~= nil then return told and told.hits or 0, told and told.targets or 0 end
  local hits, targets = loss_weight.score(loss)
  return hits or 0, targets or 0
end

-- Returns the fraction of correctly predicted targets, or nil if no target was counted.
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

--- Returns the mean loss over an iterator of batches, without gradients and with the model in evaluation mode. Each
--- batch is weighted by the weights of its targets, or by its rows if neither a loss op nor labels define targets. With
--- an engine of several ranks, all ranks call this function with the same number of batches, and get the mean over all
--- ranks.
---@param model ps.nn.Module|ps.Engine
---@param batches fun(): ... returns x, y or one table of named tensors, and nil at the end
---@param options? {loss?: fun(model, ...): ps.Tensor, stop?: fun(): boolean}
---@return number? loss nil if `stop` returned true on any rank, or if all targets are ignored
---@return number? accuracy the fraction of targets whose logit is the first largest of its row, or nil if the loss is
--- not computed by F.cross_entropy, F.lm_loss or F.nll_loss
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
---@field start? integer number of completed steps (default: the step of the checkpoint that checkpoints.load has just
--- read into the optimizer, with a note, or else 0)
---@field sched? ps.Schedule
---@field scaler? ps.LossScaler
---@field accumulate? integer number of batches per step, 1 (default) to 4096
---@field max_norm? number the norm to which gradients are clipped
---@field loss? fun(model, ...): ps.Tensor computes the loss from the loader's batch (default: model(...))
---@field eval? {every: integer, data: fun(): fun()} `data` returns a new iterator over batches
---@field checkpoint? {folder: string, every?: integer, keep?: integer, extra?: table, async?: boolean}
---@field log? string the path of a CSV file. A JSONL file with the same name and the extension .jsonl is written next
--- to it. A run without `log` writes log.jsonl in the folder of checkpoints. If a line cannot be written, writing is
--- retried. If lines are lost, the run ends with an error
---@field callbacks? ps.TrainCallbacks
---@field quiet? boolean

---@class ps.train.Source a loader of the script
---@field next fun(self: ps.train.Source): ... returns the next batch: x, y, or one table of named tensors; never
--- returns nil
---@field global_batch? integer number of rows per batch on all ranks, for tokens/s; if it is nil, the rows are counted
---@field seq? integer number of tokens per row; if it is nil, the tokens are counted
---@field state_dict? fun(self: ps.train.Source): table returns its position, which must be convertible to JSON;
--- required with `checkpoint`
---@field load_state_dict? fun(self: ps.train.Source, state: table)

---@class ps.TrainCallbacks called on all ranks; if one returns "stop", the run ends on all ranks after the step
---@field step? fun(line: ps.TrainLine): string? called after each step's update and log
---@field evaluate? fun(line: ps.TrainLine): string? called before `step` if the step had an evaluation
---@field save? fun(at: {step: integer, saved: string}): string? called after each checkpoint

local Run = {}
Run.__index = Run

local function interrupted() return C.ps_interrupts() > 0 end

-- Returns whether the run ends after this step. A signal or a callback on any rank can end the run. Ranks agree on this
-- at the same points, so that all ranks save, evaluate or continue together. `now` marks such a point.
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

-- Returns the schedule of a run. It is the run's own schedule or that of the engine.
local function schedule_of(options)
  local engine = handle.of(options.model)
  return options.sched or engine and engine.scheduler
end

-- Switches the parameters to their values for training or to those for evaluation. The two differ only with a
-- schedule-free optimizer.
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
  self:stopping(true)                                    -- all ranks agree here whether the run ends
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

-- Calls the callback `name` of the run.
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

-- Prints once, after the first Ctrl-C, that the current step will be completed first. Only steps of many batches need
-- this message.
function Run:tell(step, done, of)
  if self.told or not interrupted() then return end
  self.told = true
  self.display:warn(("interrupted after batch %d of %d in step %d: the step is finished first; the next Ctrl-C or "
    .. "SIGTERM ends the run at once"):format(done, of, step))
end

-- Returns the weight of a batch within its step. An engine computes the weight itself. Otherwise, the weight is the
-- batch's number of targets that are not ignored, divided by the number of targets in the step's first batch. So it is
-- 1 if no target is ignored. If a step has only one batch, its weight is 1, or 0 if all targets are ignored.
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

-- Returns an iterator over the micro-batches of a step, for a loop `for i, loss, given in`. Also returns their number.
-- The body of the loop must run backward for each loss before the next iteration.
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

-- Returns the number of tokens in a batch. It is the size of the batch's first tensor of ids. If there is none, it is
-- the number of rows. In a table of tensors, the first tensor is input_ids, or else the tensor whose name is the first
-- in alphabetical order.
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

-- Returns the total number of tokens of a step on all ranks.
local function tokens_of_step(self, accumulate)
  local loader = self.options.loader
  if loader.global_batch and loader.seq and not loader.rows then          -- not for rows of texts, because their
                                                                          -- lengths differ
    return accumulate * loader.global_batch * loader.seq
  end
  return self.counted * mesh.size "dp"
end

-- Runs forward and backward of one optimizer step. Returns three results. First, the weighted mean of all ranks'
-- losses, or nil if all targets are ignored. Second, the sum of the weights. Third, the accuracy, or nil if no op
-- counts correct predictions. If a loss is not finite, the run ends on all ranks before the last backward.
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
    local value = devices.computes and weight > 0 and loss:item() or 0      -- a dry run of a script has no loss values
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

-- Updates the parameters, and returns the result of the update. The engine's configuration or the options of this run
-- define the update. If all targets are ignored, the parameters do not change.
function Run:update(weights)
  local options = self.options
  if handle.of(options.model) then return options.optimizer:step() end
  if weights == 0 then return options.optimizer:skip() end
  return options.optimizer:step { max_norm = options.max_norm, scaler = options.scaler, grad_scale = 1 / weights }
end

-- Runs one optimizer step. If they are due, runs the evaluation, writes the log, and saves a checkpoint. `step` is the
-- number of the step, counted from 1.
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

-- Options of train.run that are errors for an engine. The values are the configuration keys to use instead.
local SETTLED = { accumulate = "gradient_accumulation_steps", max_norm = "gradient_clipping", scaler = "fp16" }

local RUN = { model = "table", optimizer = "table", loader = "table", steps = "whole", start = "whole",
  sched = "table", scaler = "table", accumulate = "whole", max_norm = "number", loss = "callable", eval = "table",
  checkpoint = "table", log = "string", quiet = "boolean", callbacks = "table" }
-- The names of the callbacks and their types.
local CALLBACKS = { step = "callable", evaluate = "callable", save = "callable" }
local EVAL = { every = "whole", data = "callable" }
local CHECKPOINT = { folder = "string", every = "whole", keep = "whole", extra = "table", async = "boolean" }

-- Raises an error for a schedule that the run would never advance. Prints a note if the schedule and the run end at
-- different steps.
local function check_schedule(options)
  local sched = schedule_of(options)
  if not sched then return end
  if sched.judge and not options.eval then
    error(("ps.train.run: the schedule %s follows the held-out loss, and the run has no eval"):format(sched.name))
  end
  local text = schedule.mismatch(sched, math.max(0, options.steps - (options.start or 0)))
  if text and not options.quiet and dist.rank() == 0 then io.stderr:write("psluajit: ", text, "\n") end
end

-- Returns the options of a run. If the run continues a checkpoint, their `start` is the step of the checkpoint.
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

-- Opens the log. The first rank writes it. All ranks begin with the history that is in the log.
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

--- Trains a model. An error leaves saved checkpoints untouched. With an engine of several ranks, all ranks call this
--- function. Losses are means over all ranks, a signal to one rank ends the run on all ranks after the same step, and
--- rank 0 writes the log. With AdamWScheduleFree, held-out losses are those of the averages, and the model holds the
--- averages at the end (optimizer:train() moves it back). `interrupted` is true if a signal or a callback ended the run
--- before its last step.
---@param options ps.TrainOptions
---@return {step: integer, loss?: number, accuracy?: number, val_loss?: number, val_accuracy?: number, seconds: number,
--- tokens_per_s: number, history: table[], interrupted: boolean, saved?: string} accuracy: the fraction of the last
--- step's targets with the largest logit, and val_accuracy the same for the held-out data, if loss ops count them.
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
