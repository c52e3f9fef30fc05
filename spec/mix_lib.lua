-- SPDX-License-Identifier: BSD-3-Clause
-- Training scripts that do more than the usual loop: between forward, backward and step they read, write, evaluate,
-- fail, abandon steps, save, and continue in another engine. A plan, drawn by seed, has the events of each step; the
-- same plan gives the same numbers over plain memory and over chunks, whatever the settings. Cases and settings are
-- chunks_lib.lua's.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local L = dofile((debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$") or "spec") .. "/chunks_lib.lua")
local random_state = require "ps.dist.random_state"
local background = require "ps.checkpoints.background"
local checkpoints = ps.checkpoints

local M = { L = L }

local FAILURE = "this forward was to fail"

---@class mix.Run
---@field case table
---@field settings table[] the settings of each engine of the run
---@field life integer
---@field step integer
---@field micro integer
---@field here table<string, boolean> the events of this step
---@field file string path of saved files, without an extension
---@field out string[] all observations

local function say(run, ...) run.out[#run.out + 1] = table.concat({ ... }, " ") end

local function number(t) return ("%.17g"):format(t:to("fp64"):sum():item()) end

-- Returns a batch that depends only on the step, and does not advance the run's random numbers.
local function batch(run, which, times)
  local case, restore = run.case, random_state.keep()
  ps.manual_seed(case.seed * 1000 + run.step * 10 + which)
  local rows = case.rows[(run.step - 1) % #case.rows + 1] * (times or run.here.larger and 2 or 1)
  local x, y
  if case.model == "gpt2" then
    local T = case.lengths[(run.step - 1) % #case.lengths + 1]
    x = ps.randint(0, case.vocab, { rows, T }, { dtype = "int32" })
    y = ps.randint(0, case.vocab, { rows, T }, { dtype = "int32" })
    if case.masked then y[{ 0, which % T }] = -100 end
  else
    x, y = ps.randn({ rows, 16 }), ps.randint(0, 8, { rows }, { dtype = "int32" })
  end
  x, y = x:keep(), y:keep()
  restore()
  return x, y
end

-- -- an engine's life -------------------------------------------------------------------------------------------------
-- Makes the forward of the last layer fail while run.fails is set.
local function instrument(run, module)
  local victim = module.last or module.transformer.ln_f
  local was = victim.forward
  rawset(victim, "forward", function(self, ...)
    if run.fails then error(FAILURE, 0) end
    return was(self, ...)
  end)
  return module
end

local function open(run)
  local case, setting = run.case, run.settings[run.life]
  local request = L.request(case, setting)
  local config, make = request.config, request.model_func
  request.model_func = function() return instrument(run, make()) end
  config.use_cpu_embedding = setting.tables
  config.activation_checkpointing = { cpu_checkpointing = setting.activations_away }
  if setting.ratio then
    config.zero_optimization = { stage = 0, offload_optimizer = { device = "cpu", ratio = setting.ratio } }
  end
  if case.warmup then
    config.scheduler = { type = "WarmupLR", params = { warmup_min_lr = 1e-4, warmup_max_lr = 3e-3,
      warmup_num_steps = 3 } }
  end
  run.model, run.optimizer = ps.initialize(request)
end

local function close(run)
  local setting = run.settings[run.life]
  if setting.memory ~= "plain" then
    L.check_tiers(setting)
    run.resident = math.max(run.resident, (inner(run.model).plan.forecast or { resident = 0 }).resident)
  end
  checkpoints.wait()
  run.model:close()
  run.model = nil
end

local function parts(run, more)
  local all = { model = run.model, optimizer = run.optimizer, quiet = true }
  for key, value in pairs(more or {}) do all[key] = value end
  return all
end

local function save(run)
  checkpoints.save(run.file .. ".safetensors", parts(run))
  run.saved = true
end

local function save_beside(run)
  local ok, why = pcall(checkpoints.save, run.file .. ".safetensors", parts(run, { async = true }))
  if not ok and tostring(why):find("Save without async", 1, true) then return save(run) end
  if not ok then error(why, 0) end
  run.saved = true
end

local function load(run)
  checkpoints.load(run.file .. ".safetensors", { model = run.model, optimizer = run.optimizer })
end

local function reopen(run)
  if run.step == 1 then return end
  save(run)
  close(run)
  collectgarbage()
  run.life = run.life % #run.settings + 1
  open(run)
  load(run)
end

-- -- events -----------------------------------------------------------------------------------------------------
-- Returns a parameter of the model that a number selects.
local function some(run, n)
  local list = {}
  for name, p in run.model:named_parameters() do list[#list + 1] = { name, p } end
  return unpack(list[n % #list + 1])
end

local function evaluate(run, what, which, times)
  run.model:eval()
  ps.no_grad(function() say(run, what, number(run.model(batch(run, which, times)))) end)
  run.model:train()
end

local function fail(run)
  run.fails = true
  local ok, why = pcall(function() return run.model(batch(run, 0)) end)
  run.fails = false
  assert(not ok)
  if why ~= FAILURE then error(why, 0) end
end

local function states(run)
  local state, names = run.model:state_dict(), {}
  for name in pairs(state) do names[#names + 1] = name end
  table.sort(names)
  for k = 1, #names, 3 do say(run, "state", names[k], number(state[names[k]])) end
end

-- Trains a model in plain memory with a separate optimizer, in addition to the engine.
local function train_another(run)
  if not run.other then
    ps.manual_seed(77)
    run.other = ps.nn.Linear(20, 10)
    run.others = ps.optim.AdamW(run.other:parameters(), { lr = 1e-2 })
  end
  local loss = run.other(ps.ones { 3, 20 }):pow(2):mean()
  ps.backward(loss)
  say(run, "the other's loss", number(loss))
  run.others:step()
  run.others:zero_grad()
end

local function through_file(run, state, load_into)
  local path = run.file .. ".pt"
  ps.save(state, path)
  load_into(ps.load(path, { lazy = run.step % 2 == 0 }))
end

-- Events before a step, between forward and backward, between backward and step, and after a step: {name, chance,
-- function}. With `whole`, the event happens only if backward has not updated parameters yet.
local AT = {
  before = {
    { "collects", 0.2, function() collectgarbage() end },
    { "holds", 0.15, function(run) run.held = ps.zeros { 500 } end },
    { "reopens", 0.2, reopen },
    { "reads", 0.2, function(run)
      local name, p = some(run, run.step * 7)
      say(run, name, number(p), (tostring(p:to "cpu"):gsub(" requires_grad", "")))
    end },
    { "writes", 0.2, function(run)
      local _, p = some(run, run.step * 3)
      local _, q = some(run, run.step * 11 + 1)
      ps.no_grad(function()
        p:mul_(0.75)
        q:fill_(0.03125)
      end)
    end },
    { "sets a rate", 0.15, function(run) run.optimizer:set_lr(1e-3 * (run.step % 4)) end },
    { "freezes", 0.06, function(run) select(2, some(run, run.step * 13)):requires_grad(false) end },
    { "trains another", 0.2, train_another },
    { "clears", 0.8, function(run) run.optimizer:zero_grad() end },
    { "clears again", 0.15, function(run) run.optimizer:zero_grad() end },
    { "fails", 0.12, fail },
    { "loses a forward", 0.12, function(run)
      say(run, "lost", number(run.model(batch(run, 9))))
      run.optimizer:zero_grad()
    end },
    { "gives up", 0.12, whole = true, function(run)
      if run.case.accumulate > 1 then return end
      local loss = run.model(batch(run, 8))
      run.model:backward(loss)
      run.optimizer:zero_grad()
    end },
  },
  loss = {
    { "evaluates", 0.12, function(run) evaluate(run, "evaluated", 7) end },
    { "reads state", 0.1, states },
  },
  gradients = {
    { "goes back twice", 0.08, function(run)
      if run.micro == run.case.accumulate then assert(not pcall(run.model.backward, run.model, run.loss)) end
    end },
    { "reads gradients", 0.2, whole = true, function(run)
      for k = 1, 3 do
        local name, p = some(run, run.step * k * 5 + run.micro)
        local g = p:grad()
        say(run, name, g ~= nil and number(g) or "nothing")
      end
    end },
    { "reads state late", 0.1, whole = true, states },
  },
  after = {
    { "generates", 0.12, function(run)
      if run.case.model ~= "gpt2" then return end
      say(run, unpack(run.model:generate({ 1, 2, 3 }, 5, { temperature = 1, seed = run.step })))
    end },
    { "evaluates more", 0.1, function(run) evaluate(run, "more", 5, 3) end },
    { "evaluates with gradients", 0.06, function(run)
      run.model:eval()
      say(run, "with gradients", number(run.model(batch(run, 6))))
      run.model:train()
    end },
    { "saves", 0.15, save },
    { "saves beside", 0.15, save_beside },
    { "goes back to what was saved", 0.08, function(run) if run.saved then load(run) end end },
    { "loads moments", 0.06, function(run)
      through_file(run, run.optimizer:state_dict(), function(state) run.optimizer:load_state_dict(state) end)
    end },
    { "loads values", 0.06, function(run)
      through_file(run, run.model:state_dict(), function(state) run.model:load_state_dict(state) end)
    end },
  },
}
-- Variants of a step's forwards.
local WAYS = { { "larger", 0.15 }, { "twice", 0.12 }, { "two batches", 0.1 }, { "in eval mode", 0.12 },
  { "not by the engine", 0.08 }, { "weighed", 0.1 } }

local function happen(run, place)
  for _, event in ipairs(AT[place]) do
    if run.here[event[1]] and not (event.whole and not run.case.whole) then event[3](run) end
  end
end

local function micro_batch(run)
  local model, here = run.model, run.here
  local x, y = batch(run, run.micro)
  if here["in eval mode"] then model:eval() end
  if here.twice then say(run, "first", number(model(x, y))) end
  if here["not by the engine"] and run.case.accumulate == 1 then
    run.loss = model.module(x:to(inner(model).device_name), y:to(inner(model).device_name))
  else
    run.loss = model(x, y)
  end
  if here["two batches"] then run.loss = run.loss + model(batch(run, run.micro + 4)) end
  model:train()
  say(run, "loss", number(run.loss))
  happen(run, "loss")
  model:backward(run.loss, here.weighed and { weight = 2 * run.micro } or nil)
  happen(run, "gradients")
  run.loss = nil
  return run.optimizer:step()
end

local function train(run, plan)
  open(run)
  for step = 1, run.case.steps do
    run.step, run.here = step, plan[step]
    happen(run, "before")
    local info
    for micro = 1, run.case.accumulate do
      run.micro = micro
      info = micro_batch(run)
    end
    say(run, info.skipped and "skipped" or "norm", run.case.clip and info.grad_norm
      and ("%.17g"):format(info.grad_norm) or "")
    happen(run, "after")
  end
  checkpoints.wait()
  run.state = L.state(run.model, run.optimizer)
  close(run)
end

-- -- runs, and how they are drawn --------------------------------------------------------------------------------
--- Draws the events in each step of a case.
---@param case table
---@param r table the random generator
---@return table<string, boolean>[]
function M.plan(case, r)
  local plan = {}
  for step = 1, case.steps do
    plan[step] = {}
    for _, list in ipairs { AT.before, AT.loss, AT.gradients, AT.after, WAYS } do
      for _, event in ipairs(list) do plan[step][event[1]] = r.chance(event[2]) or nil end
    end
  end
  return plan
end

--- Draws a case, its plan, and settings for the run's engines from a seed.
---@param seed integer
---@param folder string
---@return table case
---@return table plan
---@return table[] settings
function M.draw(seed, folder)
  local case, r, settings = L.case(seed), L.random(seed + 7000), {}
  case.steps, case.whole, case.warmup = 5, r.chance(0.5), r.chance(0.2)
  if case.model ~= "gpt2" and r.chance(0.3) then case.model = "deep" end
  local plan = M.plan(case, r)
  for i = 1, r.int(2, 3) do
    local setting = r.chance(0.5) and L.scarce(case, r, folder) or L.setting(case, r, folder)
    if case.whole then setting.overlap = false end
    setting.activations_away = r.chance(0.3)
    setting.tables = r.pick { true, false, "auto" }
    setting.ratio = setting.device == "sim" and r.chance(0.2) and r.pick { 0.3, 0.7, 1 } or nil
    settings[i] = setting
  end
  return case, plan, settings
end

--- Runs a case with a plan. Each reopened engine uses the next settings.
---@param case table
---@param plan table
---@param settings table[]
---@param file string path of saved files, without an extension
---@return {out: string[], state: table<string, string>, resident: integer}
function M.run(case, plan, settings, file)
  local run = { case = case, settings = settings, life = 1, out = {}, file = file, resident = 0 }
  ps.manual_seed(case.seed)
  local ok, problem = pcall(train, run, plan)
  pcall(checkpoints.wait)
  background.release()
  if run.model then run.model:close() end
  for _, extension in ipairs { ".safetensors", ".pt" } do os.remove(file .. extension) end
  if ok then return run end
  if type(problem) == "table" then problem.setting = settings[run.life] end
  error(problem, 0)
end

--- Runs a case like `run`, but raises budgets that are too small.
function M.run_fitting(case, plan, settings, file)
  for _ = 1, 60 do
    local ok, result = pcall(M.run, case, plan, settings, file)
    if ok then return result end
    if not L.grow(result) then error(tostring(result), 0) end
  end
  error("budgets that fit were not found", 0)
end

--- Runs a case like `run`, but in plain memory.
function M.run_plain(case, plan, settings, file)
  local plain = {}
  for i, setting in ipairs(settings) do plain[i] = { memory = "plain", overlap = setting.overlap } end
  return M.run(case, plan, plain, file)
end

return M
