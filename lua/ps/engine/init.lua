-- SPDX-License-Identifier: BSD-3-Clause
-- ps.initialize: a model and an optimizer whose parameters, gradients and state lie in chunks on device, host and disk.
--
--   local model, optimizer = ps.initialize{ model_func = function() return gpt2.new("gpt2") end, config = config }
--   for x, y in loader:epoch() do
--     optimizer:zero_grad()
--     local loss = model(x, y)
--     model:backward(loss)
--     optimizer:step()
--   end
--
-- The model behaves like the module it holds (model:parameters(), model:generate(...), model.config); calling it in
-- training mode begins a step. Before the first step of each shape a dry run tells which chunks are used when; from
-- that the step is planned, printed and carried out (engine/plan.lua, src/chunk/).
local ps = require "ps"
local assign = require "ps.engine.assign"
local masters = require "ps.engine.masters"
local replicas = require "ps.engine.replicas"
local mesh = require "ps.mesh"
local report = require "ps.engine.report"
local samples = require "ps.engine.samples"
local config = require "ps.config"
local build = require "ps.engine.layout.build"
local optimizer = require "ps.engine.optimizer"
local plain = require "ps.engine.plain"
local setup = require "ps.engine.setup"
local begin = require "ps.engine.begin"
local batch = require "ps.batch"
local trained = require "ps.engine.trained"
local weigh = require "ps.engine.weigh"
local ffi, C = ps.ffi, ps.C

local id_out, tier_out = ffi.new("int32_t[1]"), ffi.new("ps_tier_info")

---@class ps.Engine
---@field module ps.nn.Module
---@field optimizer ps.EngineOptimizer
---@field cfg ps.Config
---@field accumulate integer micro-batches a step
---@field built ps.engine.Built
---@field steps integer calls of optimizer:step() that ended a step, skipped ones too
---@field torn false|{model: boolean, optimizer: boolean, text: string} an update failed in the middle: what is between
---  two steps, and the error of using it
local Engine = { is_engine = true }

-- A method of the module is called on the module, whoever holds it.
local function bound(self, name, fn)
  local wrapper = function(first, ...)
    if rawequal(first, self) then return fn(self.module, ...) end
    return fn(first, ...)
  end
  rawget(self, "_bound")[name] = wrapper
  return wrapper
end

local function index(self, key)
  local own = Engine[key]
  if own ~= nil then return own end
  local cached = rawget(self, "_bound")[key]
  if cached then return cached end
  local module = rawget(self, "module")
  if module == nil then return nil end
  local value = module[key]
  if type(value) == "function" then return bound(self, key, value) end
  return value
end

--- Says something once.
---@param text string
function Engine:note(text)
  if self.said[text] then return end
  self.said[text] = true
  if not self.quiet then io.stderr:write("psluajit: ", text, "\n") end
end

--- True between the first and the last micro-batch of a step.
function Engine:accumulating() return self.micro > 0 and self.micro < self.accumulate end
--- True once backward of the last micro-batch has run (or when nothing has).
function Engine:at_boundary() return self.micro == self.accumulate end
--- A norm of all gradients is needed before the update.
function Engine:measures()
  local opt = self.optimizer
  return opt.max_norm ~= nil or opt.checks_overflow
end

--- Tells the engine what the next backward does with gradients.
---@param last boolean
---@param dry? boolean
function Engine:set_mode(last, dry)
  local mode, measures = self.mode, self:measures()
  local nothing = not dry and weigh.nothing(self)                -- then backward must not update
  local overlap = last and not measures and self.overlap and self.accumulate_by_count and not nothing
  mode.last, mode.squares = last and 1 or 0, last and measures and 1 or 0
  mode.slot = (last and self.slots and (not overlap or self.device ~= self.host or self.ranks ~= nil)) and 1 or 0
  mode.overlap = overlap and 1 or 0
  mode.grad_scale = dry and 1 or self.optimizer:grad_scale()
  ps.check(C.ps_engine_backward_mode(ps.ctx, mode))
  return overlap
end

local function end_step(self)
  if not self.in_step then return end
  self.in_step = false
  ps.check(C.ps_engine_step_end(ps.ctx, id_out))
  if id_out[0] >= 0 then self.traces[self.step_key] = id_out[0] end
end

-- What the module is called with, on its device; and as it was given.
local function arguments(self, ...)
  local given = batch.spread(...)
  if self.module.training and ps.grad_enabled() then samples.check(self, given) end
  return batch.on(given, self.device, self.device_name), given
end

--- Refuses an engine that was closed: another one may be open.
---@param level? integer
function Engine:check_open(level)
  if self.closed then error("this engine was closed; ps.initialize makes another", (level or 1) + 2) end
end

-- A forward that fails takes no random numbers.
local function run_forward(self, args)
  local rng = ps.rng()
  local op, offset = rng.op, rng.offset
  local function finish(ok, ...)
    if ok then return ... end
    rng.op, rng.offset = op, offset
    if self.ranks then self.ranks:explain((...)) end
    error((...), 0)
  end
  local timer, module = self.report, self.module
  if timer then return finish(pcall(timer.timed, timer, "forward", self.run, module, unpack(args, 1, args.n))) end
  return finish(pcall(self.run, module, unpack(args, 1, args.n)))
end

local function forward(self, ...)
  self:check_open()
  local args, given = arguments(self, ...)
  if not ps.grad_enabled() then return self.module(unpack(args, 1, args.n)) end
  local training = self.module.training
  if training then
    self:check_whole()
    if self.cleared and self.micro == 0 then self:abandon() end
    self.cleared = false
    if not self.in_step and self.micro == 0 then
      trained.check(self, self.built.list)
      begin.step(self, args)
    end
  end
  weigh.batch(self, given)
  if not training then return weigh.output(self, self.module(unpack(args, 1, args.n))) end
  if self.ranks then self.ranks:number_samples() end
  C.ps_engine_stage(ps.ctx, C.PS_STAGE_FWD)
  return weigh.output(self, run_forward(self, args))
end

-- A step failed in its updates, or in a backward that makes them: parameters have values of two steps, if this rank had
-- made some, or if other ranks may have.
local function note_torn(self, problem)
  local n, all = 0, #self.built.list
  for i = 1, all do n = n + C.ps_engine_param_updated(ps.ctx, i - 1) end
  if n == 0 and not self.ranks then return end
  self.torn = { model = true, optimizer = true, text = ("step %d failed in its update (%s), after %d of %d parameters "
    .. "had been updated%s: load a checkpoint, or states of both model and optimizer, before it goes on"):format(
    self.steps + 1, tostring(problem):match("^[^\n]*"), n, all, self.ranks and " on this rank" or "") }
end

--- Refuses a model that is between two steps, since one failed in the middle of its update.
---@param level? integer
function Engine:check_whole(level)
  self:check_open((level or 1) + 1)
  if self.torn then error(self.torn.text, (level or 1) + 2) end
end

--- What load_state_dict brought is whole again.
---@param part "model"|"optimizer"
function Engine:mend(part)
  local torn = self.torn
  if not torn then return end
  torn[part] = false
  if not (torn.model or torn.optimizer) then self.torn = false end
end

--- Gives a step up: gradients go, parameters are what they were before it. If it failed while it updated them, the
--- model is torn until a state is loaded.
---@param failed? any the error of an update that failed
function Engine:abandon(failed)
  if failed ~= nil then note_torn(self, failed) end
  C.ps_backward_end(ps.ctx)
  self.half_restored = C.ps_engine_drop_grads(ps.ctx) < 0      -- then a gradient stays, and zero_grad tries again
  self.micro, self.overlapped = 0, false
  weigh.begin(self)
  if self.in_step then
    self.in_step = false
    C.ps_engine_step_end(ps.ctx, nil)
    ps.rng().op = self.step_op                    -- the next step's dropouts are those of a first try
  end
  self.masters:note()
end

-- Small tensors wait for Lua's collector. A walk back has no way to call it, so it does not begin with garbage where
-- the first tier is full. Nor with that of earlier micro-batches where there is not room to spare: kernels' scratch, of
-- which a dry run knows nothing, may need its bytes. What the first micro-batch had room for, each one then has.
local function collect_where_full(micro)
  ps.check(C.ps_engine_tier_get(ps.ctx, 0, tier_out))
  local enough = tier_out.budget / (micro == 0 and 8 or 2)
  if tier_out.budget > 0 and tier_out.free < enough then collectgarbage() end
end

--- Backward from a loss: scales it for fp16, and adds micro-batches up. With gradient_accumulation_steps > 1 or several
--- ranks, each weighs as much as it has targets (those that are not -100), so that cutting a batch into micro-batches
--- leaves the mean over its tokens what it is; `weight` says how many there are where the engine cannot count them.
--- Where no target of a step counts, step() skips it (engine/weigh.lua).
---@param loss ps.Tensor
---@param options? {weight?: number}
function Engine:backward(loss, options)
  self:check_whole()
  if not ps.is_tensor(loss) then error(weigh.no_loss(loss), 2) end
  if self.micro == self.accumulate then
    error(("backward was called %d times since the last optimizer:step(), gradient_accumulation_steps is %d"):format(
      self.micro + 1, self.accumulate), 2)
  end
  if not self.in_step and self.micro == 0 then self.masters:sync() end      -- a step without a forward in training mode
  local weight, places = weigh.loss(self, loss, options)
  local last = self.micro + 1 == self.accumulate
  collect_where_full(self.micro)
  local ok, problem = pcall(function()
    local factor = weigh.add(self, weight, places, last)
    if last then self.optimizer:before_last_backward() end
    self.overlapped = self:set_mode(last) or false
    local root = factor ~= 1 and loss * factor or loss
    C.ps_engine_stage(ps.ctx, C.PS_STAGE_BWD)
    if self.report then
      self.report:take_loss(loss, weight)
      self.report:timed("backward", ps.backward, root)
    else
      ps.backward(root)
    end
    ps.check(C.ps_engine_backward_end(ps.ctx))
  end)
  if not ok then
    if self.ranks then self.ranks:explain(problem, true) end
    self:abandon(self.overlapped and problem or nil)
    error(problem, 0)
  end
  self.micro = self.micro + 1
end

--- Called by the optimizer: the step is over.
function Engine:finish_step(info)
  self.micro, self.overlapped = 0, false
  weigh.begin(self)
  end_step(self)
  self.masters:note()
  self.steps = self.steps + 1
  if self.report then self.report:step_done(info) end
  if self.scheduler and not info.skipped then self.scheduler:step() end
  local rng = ps.rng()
  rng.step = rng.step + 1
  rng.op = 0
  local every = self.ranks and self.cfg.compare_ranks_every or 0
  if every > 0 and self.steps % every == 0 then replicas.compare(self) end
  ps.step_scope()
end

--- Module to training mode.
function Engine:train(mode)
  self.module:train(mode)
  return self
end
function Engine:eval() return self:train(false) end
Engine.to = trained.to

--- Name -> tensor: fp32 values (masters where the parameter is of a half type) and buffers, as the host sees them; of
--- several ranks that share the state out (zero_optimization.stage 1 to 3), each gets what it owns, and rank 0 the
--- buffers. Lent: read or save them before the next step.
---@return table<string, ps.Tensor>
function Engine:state_dict()
  self:check_whole()
  if not self.in_step and self.micro == 0 then self.masters:sync() end
  local state = self.module:state_dict()
  if self.zero_stage > 0 then self.ranks:keep_own(state) end
  for _, row in ipairs(self.built.list) do state[row.name] = row.values end
  return state
end

--- The module's save_pretrained, of the fp32 values; all ranks call it, rank 0 writes.
---@param folder string
function Engine:save_pretrained(folder)
  local save = self.module.save_pretrained
  if not save then
    error("this model has no save_pretrained; ps.safetensors.save(path, model:state_dict()) writes its values", 2)
  end
  save(self.module, folder, self)
end

--- Copies values in by name, into the masters where there are any; a step under way is given up. A tensor at a time is
--- in memory, whatever the budgets. Of several ranks that share the state out each takes what it owns; all call it.
---@param state table<string, ps.Tensor>|table an open file (ps.safetensors.open, ps.load with lazy = true), or a table
---@param options? {strict?: boolean, check_only?: boolean}
---@return {missing: string[], unexpected: string[]}
function Engine:load_state_dict(state, options)
  self:check_open()
  local writes = not (type(options) == "table" and options.check_only)
  if writes then self:settle() end
  local result = self.module:load_state_dict(state, options)
  if writes then
    ps.check(C.ps_engine_forget(ps.ctx))
    self:mend "model"
  end
  return result
end

--- Between steps, with no gradients about: what was begun is given up.
function Engine:settle()
  if self.in_step or self.micro > 0 then self:abandon() end
end

--- Ends the engine: chunks, budgets and the disk file go, and with them the parameters' bytes.
function Engine:close()
  if self.closed then return end
  self.closed = true
  if setup.open == self then setup.open = nil end
  if self.masters then self.masters:close() end
  C.ps_engine_close(ps.ctx)
end

-- What scripts call; the other methods are for the files of engine/.
Engine.PUBLIC = { "backward", "train", "eval", "state_dict", "load_state_dict", "accumulating", "at_boundary", "close" }

--- An engine's own methods for scripts, by name: what TAB offers.
---@param engine ps.Engine
---@return table<string, function>
function Engine.public(engine)
  local methods = {}
  for _, name in ipairs(Engine.PUBLIC) do methods[name] = engine[name] end
  return methods
end

Engine.instance = { __index = index, __newindex = assign.with(Engine), __call = forward,
  __names = function(self) return Engine.public(self), rawget(self, "module") end,
  __tostring = function(self) return "Engine(" .. tostring(self.module) .. ")" end }

--- Makes an engine.
---@param model_func fun(): ps.nn.Module|ps.nn.Module|table a function; a module (then `client` too); or a table of
---  these arguments by name, with param_groups as well
---@param local_rank? integer
---@param cfg? table|string configuration: a table, or the path of a .lua or .json file (docs/config.md)
---@param client? table memory settings for a module that exists already
---@return ps.Engine model
---@return ps.EngineOptimizer optimizer
local function initialize(model_func, local_rank, cfg, client)
  local request = setup.request(model_func, local_rank, cfg, client)
  local self = setmetatable({ _bound = {}, said = {}, traces = {}, unplanned = {}, micro = 0, steps = 0,
    closed = false, torn = false, in_step = false, cleared = false, overlapped = false, targets = false,
    targets_of = setmetatable({}, { __mode = "k" }), adam_split = false, adam_rates = false, tables_on_host = false,
    step_key = false, step_op = false, half_restored = false, no_finer = false, changes_seen = false, forecast = false,
    mode = ffi.new("ps_backward_mode"),
    param_groups = request.param_groups, quiet = request.quiet, policy = "plan",
    request_model_func = request.model_func }, Engine.instance)
  weigh.begin(self)
  setup.configure(self, request, config)
  if self.cfg.memory.kind == "plain" then
    if mesh.group "dp" then
      self.closed = true
      error("memory = \"plain\" trains in one process; leave it out, or set budgets, to train with several", 0)
    end
    plain.initialize(self, request, { arguments = arguments, note = Engine.note,
      save_pretrained = Engine.save_pretrained })
    setup.finish(self)
    self.report = report.new(self)
    assign.begin(self)
    return self, self.optimizer
  end
  local ok, problem = pcall(function()
    setup.open_engine(self)
    self.module = setup.make_module(self, request)
    self.built = build.place(self.module, setup.place_options(self))
    self.masters = masters.new(self.built)
    self.optimizer = optimizer.new(self, self.built, self.cfg)
    build.register(self.built, self.optimizer.group_of, #self.optimizer.groups, self)
    setup.finish(self)
    self.report = report.new(self)
    if self.ranks then self.ranks:begin() end
    assign.begin(self)
  end)
  if not ok then
    problem = setup.explain(self, problem)
    self:close()
    error(problem, 0)
  end
  return self, self.optimizer
end

return { initialize = initialize, Engine = Engine }
