-- SPDX-License-Identifier: BSD-3-Clause
-- The engine over plain memory (memory = "plain"): the same configuration, model and optimizer calls, with parameters
-- where they were made and the optimizer of ps.optim. It is what chunks are compared with, bit for bit, and what a
-- model with parameters of unusual types uses.
local ps = require "ps"
local caller = require "ps.caller"
local core = require "ps.nn.module"
local assign = require "ps.engine.assign"
local optim_groups = require "ps.optim_groups"
local optim = require "ps.optim"
local masters = require "ps.engine.masters"
local optimizer = require "ps.engine.optimizer"
local state = require "ps.engine.state"
local trained = require "ps.engine.trained"
local weigh = require "ps.engine.weigh"
local C = ps.C

local plain = {}
local NONE = {}                     -- options of step: what those of ps.optim say is in the configuration

---@class ps.engine.PlainOptimizer
local PlainOptimizer = {}
PlainOptimizer.instance = { __index = PlainOptimizer, __tostring = function(self) return tostring(self.inner) end }

--- One update, when the step's last micro-batch has been backward; before that it does nothing.
function PlainOptimizer:step(options)
  caller.options(options, "optimizer:step of an engine", NONE)
  local engine = self.engine
  if engine.micro == 0 then error(optimizer.NO_BACKWARD, 2) end
  local info = { skipped = false, accumulating = engine.micro ~= engine.accumulate }
  if info.accumulating then return info end
  optim_groups.check(self.groups, self.kind)
  local settings = { max_norm = self.max_norm, scaler = self.scaler, grad_scale = weigh.factor(engine) }
  local report = engine.report
  local function update()
    if weigh.nothing(engine) then return self.inner:skip() end
    return self.inner:step(settings)
  end
  local ok, done = pcall(report and report.timed or update, report, "step", update)
  engine.micro, engine.in_step = 0, false
  weigh.begin(engine)
  self.inner:zero_grad()
  engine.masters:note()
  if not ok then error(done, 0) end
  done.accumulating = false
  self.steps, self.grad_norm = self.inner.steps, done.grad_norm
  engine.steps = engine.steps + 1
  if report then report:step_done(done) end
  if engine.scheduler and not done.skipped then engine.scheduler:step() end
  return done
end

function PlainOptimizer:zero_grad()
  local engine = self.engine
  if engine.micro > 0 and engine.micro < engine.accumulate then return end
  if engine.micro > 0 then return engine:abandon() end
  self.inner:zero_grad()
  engine.cleared = engine.in_step
end

function PlainOptimizer:set_lr(lr)
  self.inner:set_lr(lr)
  self.lr = lr
end

-- What state.lua asks of an optimizer.
function PlainOptimizer:count() return #self.engine.rows end
function PlainOptimizer:slot(i)
  local row = self.engine.rows[i]
  local entry, param = row.entry, row.param
  if entry.exp_avg == nil then
    for _, name in ipairs { "exp_avg", "exp_avg_sq" } do
      local dtype = param:dtype() == "fp64" and "fp64" or "fp32"
      entry[name] = ps.zeros(param:shape(), { dtype = dtype, device = param:device() }):keep()
    end
  end
  return { name = row.name, param = param, m = entry.exp_avg, v = entry.exp_avg_sq,
    master = not rawequal(entry.master, param) and entry.master or nil }
end
function PlainOptimizer:updates(i) return self.engine.rows[i].entry.t end
function PlainOptimizer:set_updates(i, t) self.engine.rows[i].entry.t = t end

--- As the other engine's optimizer.
function PlainOptimizer:state_dict(model)
  if model ~= nil then return state.named(self) end
  return state.torch(self)
end
function PlainOptimizer:load_state_dict(saved)
  self.engine:settle()
  state.load(self, saved)
  self.inner.steps = self.steps
end

local PlainEngine = { is_engine = true }

local function bound(self, name, fn)
  local wrapper = function(first, ...)
    if rawequal(first, self) then return fn(self.module, ...) end
    return fn(first, ...)
  end
  rawget(self, "_bound")[name] = wrapper
  return wrapper
end

-- As the other engine's: a forward that fails takes no random numbers.
local function run_forward(self, args)
  local rng = ps.rng()
  local op, offset = rng.op, rng.offset
  local function finish(ok, ...)
    if ok then return ... end
    rng.op, rng.offset = op, offset
    error((...), 0)
  end
  local timer = self.report
  if timer then return finish(pcall(timer.timed, timer, "forward", self.run, self.module, unpack(args, 1, args.n))) end
  return finish(pcall(self.run, self.module, unpack(args, 1, args.n)))
end

local instance = {
  __names = function(self) return require("ps.engine").Engine.public(self), rawget(self, "module") end,
  __index = function(self, key)
    local own = PlainEngine[key]
    if own ~= nil then return own end
    local cached = rawget(self, "_bound")[key]
    if cached then return cached end
    local module = rawget(self, "module")
    local value = module and module[key]
    if type(value) == "function" then return bound(self, key, value) end
    return value
  end,
  __newindex = assign.with(PlainEngine),
  __call = function(self, ...)
    local args, given = self.arguments(self, ...)
    if not ps.grad_enabled() then return self.run(self.module, unpack(args, 1, args.n)) end
    weigh.batch(self, given)
    if not self.module.training then return weigh.output(self, self.run(self.module, unpack(args, 1, args.n))) end
    if self.cleared and self.micro == 0 then self:abandon() end
    if not self.in_step and self.micro == 0 then
      trained.check(self, self.rows)
      self.masters:sync()
      self.in_step, self.step_op = true, ps.rng().op
    end
    self.cleared = false
    return weigh.output(self, run_forward(self, args))
  end,
}

--- As Engine:backward.
function PlainEngine:backward(loss, options)
  if not ps.is_tensor(loss) then error(weigh.no_loss(loss), 2) end
  if self.micro == self.accumulate then
    error(("backward was called %d times since the last optimizer:step(), gradient_accumulation_steps is %d"):format(
      self.micro + 1, self.accumulate), 2)
  end
  if not self.in_step and self.micro == 0 then self.masters:sync() end
  local weight, places = weigh.loss(self, loss, options)
  local factor = weigh.add(self, weight, places, self.micro + 1 == self.accumulate)
  if self.report then self.report:take_loss(loss, weight) end
  local ok, problem = pcall(function()
    local root = factor ~= 1 and loss * factor or loss
    if self.report then return self.report:timed("backward", ps.backward, root) end
    ps.backward(root)
  end)
  if not ok then
    self:abandon()
    error(problem, 0)
  end
  self.micro = self.micro + 1
end

--- Name -> tensor: fp32 masters where the parameter is of a half type, else the parameter; and buffers.
function PlainEngine:state_dict()
  if not self.in_step and self.micro == 0 then self.masters:sync() end
  local all = self.module:state_dict()
  for _, row in ipairs(self.rows) do all[row.name] = row.entry.master end
  return all
end

--- As Engine:load_state_dict.
function PlainEngine:load_state_dict(saved, options)
  if not (type(options) == "table" and options.check_only) then self:settle() end
  return self.module:load_state_dict(saved, options)
end

--- As Engine:abandon.
function PlainEngine:abandon()
  C.ps_backward_end(ps.ctx)
  self.micro = 0
  weigh.begin(self)
  self.optimizer.inner:zero_grad()
  if self.in_step then
    self.in_step = false
    ps.rng().op = self.step_op
  end
  self.masters:note()
end

--- As Engine:settle.
function PlainEngine:settle()
  if self.in_step or self.micro > 0 then self:abandon() end
end

function PlainEngine:train(mode)
  self.module:train(mode)
  return self
end
function PlainEngine:eval() return self:train(false) end
PlainEngine.to = trained.to
function PlainEngine:close()
  self.closed = true
  self.masters:close()
end

-- Parameters of fp32 become the configuration's type; their fp32 values go on as masters.
local function convert(module, precision)
  local made, replaced = {}, {}
  local function walk(at)
    for _, key in ipairs(at._names) do
      local value, kind = at._fields[key], at._kind[key]
      if kind == "module" then
        walk(value)
      elseif kind == "param" and value ~= nil and value:dtype() == "fp32" and precision ~= "fp32" then
        local from = core.address(value)
        if not replaced[from] then
          local trains = value:needs_grad()
          local copy = core.Parameter(ps.no_grad(function() return value:detach():to(precision) end))
          copy:requires_grad(trains)
          value:requires_grad(false)
          replaced[from] = copy
          made[core.address(copy)] = value
        end
        at._fields[key] = replaced[from]
      end
    end
  end
  walk(module)
  return made
end

-- The optimizer's entries with names, in order of registration; each with its master from the start.
local function named_rows(module, inner, made)
  local entries, rows = {}, {}
  for _, entry in ipairs(inner.entries) do entries[core.address(entry.param)] = entry end
  for name, param in module:named_parameters() do
    local entry = entries[core.address(param)]
    if entry then
      local half = param:dtype() == "bf16" or param:dtype() == "fp16"
      local master = made[core.address(param)]
      if master == nil and half then master = ps.no_grad(function() return param:detach():to("fp32") end):keep() end
      if master == nil then master = param end
      entry.master = master
      rows[#rows + 1] = { name = name, param = param, entry = entry, master = master }
    end
  end
  return rows
end

-- Optimizer groups by name, as the engine's.
local function groups_of(module, cfg, param_groups)
  local params, chosen, groups = cfg.optimizer.params, param_groups or { {} }, {}
  for number, given in ipairs(chosen) do
    groups[number] = { params = {}, lr = params.lr, betas = { params.betas[1], params.betas[2] }, eps = params.eps,
      weight_decay = params.weight_decay, decoupled = cfg.optimizer.type == "AdamW" }
    for key, value in pairs(given) do if key ~= "match" then groups[number][key] = value end end
  end
  for name, p in module:named_parameters() do
    if p:needs_grad() then
      local at = #chosen
      for number, given in ipairs(chosen) do
        if given.match and given.match(name, p) then
          at = number
          break
        end
      end
      table.insert(groups[at].params, p)
    end
  end
  return groups
end

--- Makes the engine from a request and a configuration that engine/setup.lua has read.
---@param self table with cfg, accumulate, precision, device_name and so on
---@param request table
---@param helpers table<string, function> of lua/ps/engine/init.lua: arguments, note
function plain.initialize(self, request, helpers)
  local was = ps.set_default_device(self.device_name)
  local ok, module = pcall(request.module and function() return request.module end or request.model_func)
  ps.set_default_device(was)
  if not ok then error(module, 0) end
  if not core.is_module(module) then error("ps.initialize: model_func gave a " .. type(module) .. ", no module", 0) end
  local cfg = self.cfg
  self.module = module
  for name, helper in pairs(helpers) do self[name] = helper end
  local made = convert(module, self.precision)
  if self.accumulate > 1 and cfg.grad_accum_dtype == "fp32" then
    for _, p in ipairs(module:parameters()) do p:grad_in_fp32() end
  end
  local groups = groups_of(module, cfg, request.param_groups)
  local inner = optim[cfg.optimizer.type](groups, { lr = cfg.optimizer.params.lr })
  self.rows = named_rows(module, inner, made)
  self.masters = masters.new { list = self.rows, frozen = {} }
  local group_of, numbers = {}, {}
  for number, group in ipairs(inner.groups) do numbers[group] = number - 1 end
  for i, row in ipairs(self.rows) do group_of[i] = numbers[row.entry.group] end
  self.optimizer = setmetatable({ engine = self, inner = inner, groups = inner.groups, group_of = group_of,
    kind = cfg.optimizer.type, steps = 0, lr = cfg.optimizer.params.lr,
    max_norm = cfg.gradient_clipping > 0 and cfg.gradient_clipping or nil }, PlainOptimizer.instance)
  return setmetatable(self, instance)
end

return plain
