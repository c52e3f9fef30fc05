-- SPDX-License-Identifier: BSD-3-Clause
-- A training loop with what a run needs besides its model: accumulation, clipping, evaluation, a log, checkpoints and
-- Ctrl-C.
--
--   local result = train.run { model =, optimizer =, loader =, sched =, steps = 1000,
--     eval = { every = 100, data = function() return ps.data.windows { ... } end },
--     checkpoint = { folder = "out", every = 200 }, log = "out/log.csv" }
--
-- An engine (ps.initialize) as the model brings its accumulation, clipping, loss scale and schedule along.
-- The first Ctrl-C (or SIGTERM, or SIGHUP) finishes the step, saves and returns with interrupted = true; the second
-- Ctrl-C or SIGTERM ends the process.
local ps = require "ps"
local caller = require "ps.caller"
local types = require "ps.config.types"
local error = caller.error
local checkpoint = require "ps.checkpoint"
local progress = require "ps.progress"
local train_log = require "ps.train_log"
local C = ps.C

local train = {}

local EVALUATE = { loss = "callable", stop = "callable" }

--- Mean loss over an iterator of batches, without gradients and with the model in evaluation mode.
---@param model ps.nn.Module
---@param batches fun(): ps.Tensor?, ps.Tensor?
---@param options? {loss?: fun(model, x, y): ps.Tensor, stop?: fun(): boolean}
---@return number? loss nil when `stop` said so
function train.evaluate(model, batches, options)
  options = caller.options(options, "ps.train.evaluate", EVALUATE)
  caller.typed(model, "table", "ps.train.evaluate: the model")
  caller.callable(batches, "ps.train.evaluate, behind the model,")
  local was_training = model.training
  model:eval()
  local sum, rows, stopped = 0, 0, false
  local ok, problem = pcall(ps.no_grad, function()
    for x, y in batches do
      local loss = options.loss and options.loss(model, x, y) or model(x, y)
      sum, rows = sum + loss:item() * x:size(0), rows + x:size(0)
      stopped = options.stop and options.stop() or false
      if stopped then break end
    end
  end)
  model:train(was_training)
  if not ok then error(problem, 0) end
  if stopped or rows == 0 then return nil end
  return sum / rows
end

local function cell(value, format) return value and format:format(value) or "" end

-- Forward and backward of one optimizer step; gives the mean loss of its batches. After all but the last it calls
-- between(i).
local function gradients(options, accumulate, between)
  local sum, engine = 0, options.model.is_engine
  for i = 1, accumulate do
    local x, y = options.loader:next()
    local loss = options.loss and options.loss(options.model, x, y) or options.model(x, y)
    local value = loss:item()
    sum = sum + value
    if value ~= value or math.abs(value) == math.huge then return sum end
    if options.scaler then loss = options.scaler:scale_loss(loss) end
    if engine then options.model:backward(loss) else loss:backward() end
    if i < accumulate then between(i) end
  end
  return sum / accumulate
end

---@class ps.TrainOptions
---@field model ps.nn.Module|ps.Engine
---@field optimizer ps.Optimizer|ps.EngineOptimizer
---@field loader ps.Loader
---@field steps integer optimizer steps in the whole run
---@field start? integer steps already done (what checkpoint.load gave)
---@field sched? ps.Schedule
---@field scaler? ps.GradScaler
---@field accumulate? integer batches a step: 1 (default) to 4096
---@field max_norm? number clip the gradient norm
---@field loss? fun(model, x, y): ps.Tensor default model(x, y)
---@field eval? {every: integer, data: fun(): fun()} data gives a fresh iterator of batches
---@field checkpoint? {folder: string, every?: integer, keep?: integer, extra?: table, async?: boolean}
---@field log? string a CSV file; lines that it does not take are tried again; an error at the end where some are lost
---@field quiet? boolean

local Run = {}
Run.__index = Run

local function interrupted() return C.ps_interrupts() > 0 end

function Run:save(step)
  local to, options = self.options.checkpoint, self.options
  if not to then return end
  self.saved = checkpoint.save(to.folder, { model = options.model, optimizer = options.optimizer,
    sched = options.sched, loader = options.loader, scaler = options.scaler, step = step, extra = to.extra,
    keep = to.keep, async = to.async, quiet = options.quiet })
  self.saved_step = step
end

function Run:fail(step, loss)
  local group = self.options.optimizer.groups[1]
  error(("training: the loss is %s at step %d (learning rate %.3g, last gradient norm %s). Last good checkpoint: %s. "
    .. "Try a lower learning rate, a longer warm-up or max_norm"):format(tostring(loss), step, group.lr,
    self.grad_norm and ("%.3g"):format(self.grad_norm) or "not measured", self.saved or "none"), 0)
end

function Run:evaluate(step)
  local options = self.options
  local val = train.evaluate(options.model, options.eval.data(), { loss = options.loss, stop = interrupted })
  if val then
    self.val_loss = val
    self.display:note(("step %d: held-out loss %.4f"):format(step, val))
  end
  return val
end

function Run:record(step, loss, lr, rate, val)
  self.history[#self.history + 1] = { step = step, loss = loss, val_loss = val }
  if self.log then
    local problem = self.log:write(("%d,%.6f,%.6g,%s,%.0f,%s\n"):format(step, loss, lr,
      cell(self.grad_norm, "%.5g"), rate, cell(val, "%.6f")))
    if problem then self.display:warn(problem) end
  end
end

-- A step of many batches may take long to end after the first Ctrl-C: says so, once.
function Run:tell(step, done, of)
  if self.told or not interrupted() then return end
  self.told = true
  self.display:warn(("interrupted after batch %d of %d of step %d: the step is finished first; the next Ctrl-C or "
    .. "SIGTERM ends at once"):format(done, of, step))
end

-- One optimizer step and what follows it; `step` is its number, from 1.
function Run:step(step)
  local options, accumulate = self.options, self.options.accumulate or 1
  local began = C.ps_now()
  local lr = options.optimizer.groups[1].lr
  local loss = gradients(options, accumulate, function(done) self:tell(step, done, accumulate) end)
  if loss ~= loss or math.abs(loss) == math.huge then self:fail(step, loss) end
  local info
  if options.model.is_engine then
    info = options.optimizer:step()
  else
    info = options.optimizer:step { max_norm = options.max_norm, scaler = options.scaler, grad_scale = 1 / accumulate }
  end
  options.optimizer:zero_grad()
  if options.sched and not info.skipped then options.sched:step() end
  self.grad_norm, self.loss = info.grad_norm, loss
  local seconds = C.ps_now() - began
  self.seconds = self.seconds + seconds
  local tokens = accumulate * options.loader.global_batch * options.loader.seq
  self.tokens = self.tokens + tokens
  self.step_s = self.step_s and 0.9 * self.step_s + 0.1 * seconds or seconds
  local rate = tokens / self.step_s
  local last = step == options.steps
  local due = options.eval and (last or step % options.eval.every == 0) and not interrupted()
  local val = due and self:evaluate(step) or nil
  self:record(step, loss, lr, rate, val)
  self.display:update(step, { loss = loss, val_loss = self.val_loss, tokens_per_s = rate })
  local to = options.checkpoint
  if to and (last or interrupted() or to.every and step % to.every == 0) then self:save(step) end
end

local function loop(self)
  local options = self.options
  if (options.accumulate or 1) > 1 and not options.model.is_engine then
    for _, p in ipairs(options.model:parameters()) do p:grad_in_fp32() end
  end
  options.model:train()
  local step = options.start or 0
  while step < options.steps and not interrupted() do
    step = step + 1
    self:step(step)
  end
  if interrupted() and self.saved_step ~= step then self:save(step) end
  checkpoint.wait()
  return step
end

-- What the engine's configuration settles is not for train.run to say again.
local SETTLED = { accumulate = "gradient_accumulation_steps", max_norm = "gradient_clipping", scaler = "fp16" }

local RUN = { model = "table", optimizer = "table", loader = "table", steps = "whole", start = "whole",
  sched = "table", scaler = "table", accumulate = "whole", max_norm = "number", loss = "callable", eval = "table",
  checkpoint = "table", log = "string", quiet = "boolean" }
local EVAL = { every = "whole", data = "callable" }
local CHECKPOINT = { folder = "string", every = "whole", keep = "whole", extra = "table", async = "boolean" }

local function settled(options)
  options = caller.options(options, "ps.train.run", RUN)
  caller.options(options.eval, "ps.train.run: eval", EVAL)
  caller.options(options.checkpoint, "ps.train.run: checkpoint", CHECKPOINT)
  local model = options.model
  for _, part in ipairs { "model", "optimizer", "loader" } do
    caller.typed(options[part], "table", "ps.train.run: " .. part)
  end
  caller.whole(options.steps, "ps.train.run: steps")
  local most = types.MICRO_BATCHES
  if options.accumulate and (options.accumulate < 1 or options.accumulate > most) then
    error(("ps.train.run: accumulate is %.17g; a step has 1 to %d batches"):format(options.accumulate, most))
  end
  if not model.is_engine then return options end
  for key, of in pairs(SETTLED) do
    if options[key] and not (key == "accumulate" and options[key] == model.accumulate) then
      error(("train.run: the model is an engine, so %s is set by %s in its configuration"):format(key, of))
    end
  end
  if options.sched and model.scheduler then
    error("train.run: the engine has a schedule already (scheduler in its configuration); give sched or that")
  end
  return setmetatable({ accumulate = model.accumulate }, { __index = options })
end

--- Trains. Errors leave saved checkpoints as they are.
---@param options ps.TrainOptions
---@return {step: integer, loss?: number, val_loss?: number, seconds: number, tokens_per_s: number, history: table[],
---  interrupted: boolean, saved?: string}
function train.run(options)
  options = settled(options)
  if ps.group_or_alone "ps.train.run" and not options.model.is_engine then
    error("ps.train.run: a model of several processes is made by ps.initialize (examples/train_chunked.lua)")
  end
  local start = options.start or 0
  local self = setmetatable({ options = options, seconds = 0, tokens = 0, history = {} }, Run)
  self.display = progress.new { total = options.steps, start = start, quiet = options.quiet }
  if options.log then self.log, self.history = train_log.open(options.log, start) end
  ps.check(C.ps_interrupts_install())
  local ok, step = pcall(loop, self)
  local stopped = interrupted()
  C.ps_interrupts_remove()
  self.display:finish()
  local lost = self.log and self.log:close()
  if not ok then error(step, 0) end
  if lost then error(("training reached step %d, but %s. Last checkpoint: %s"):format(step, lost,
    self.saved or "none"), 0) end
  return { step = step, loss = self.loss, val_loss = self.val_loss, seconds = self.seconds,
    tokens_per_s = self.tokens / math.max(self.seconds, 1e-9), history = self.history, saved = self.saved,
    interrupted = stopped and step < options.steps }
end

return train
