-- SPDX-License-Identifier: BSD-3-Clause
-- ps.initialize creates a model and an optimizer. Their parameters, gradients and optimizer state are in chunks on the
-- device, the host and the disk.
--
--   local model, optimizer = ps.initialize{ model_func = function() return gpt2.new("gpt2") end, config = config }
--   for x, y in loader:epoch() do
--     optimizer:zero_grad()
--     local loss = model(x, y)
--     model:backward(loss)
--     optimizer:step()
--   end
--
-- The model has all methods and fields of the module that it contains, such as model:parameters(), model:generate(...)
-- and model.config. A call of the model begins a step if gradients are enabled. Before the first step with new input
-- shapes, a dry run records which chunks each op uses. The engine uses this record to plan the step
-- (engine/plan/forecast.lua, src/chunk/).
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local adopt = require "ps.engine.state.adopt"
local averaged = require "ps.engine.state.averaged"
local handle = require "ps.nn.handle"
local origin = require "ps.nn.origin"
local masters = require "ps.engine.state.masters"
local replicas = require "ps.engine.ranks.replicas"
local mesh = require "ps.dist.mesh"
local own_state = require "ps.engine.own_state"
local report = require "ps.engine.report"
local config = require "ps.config"
local build = require "ps.engine.layout.build"
local place_options = require "ps.engine.layout.options"
local optimizer = require "ps.engine.state.optimizer"
local plain = require "ps.engine.state.plain"
local setup = require "ps.engine.setup"
local begin = require "ps.engine.plan.begin"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local exact = require "ps.core.exact"
local trained = require "ps.engine.step.trained"
local unused = require "ps.engine.step.unused"
local step = require "ps.engine.step"
local tied = require "ps.nn.tied"
local table_driver = require "ps.engine.step.table"
local schedule = require "ps.optim.schedule"
local micro = require "ps.engine.micro"
require "ps.engine.step.clip"
local C = native.C

---@class ps.Engine
---@field module ps.nn.Module
---@field optimizer ps.EngineOptimizer
---@field cfg ps.Config
---@field accumulate integer number of micro-batches per step (gradient_accumulation_steps)
---@field built ps.engine.Built
---@field steps integer number of optimizer:step() calls that ended a step, including skipped updates
---@field micro integer how many micro-batches of the step have run their backward (engine/step/state.lua)
---@field torn false|{model: boolean, optimizer: boolean, text: string} set when an update failed in the middle. `model`
---  and `optimizer` are true if the model or the optimizer holds values of two steps. `text` is the error that is
---  raised if the model or the optimizer is used
---@field plain boolean true if parameters are in plain memory (engine/state/plain.lua) instead of chunks
---@field driver ps.engine.Driver the object that performs the actions of a step (engine/step/table.lua)
---@field plan ps.engine.PlanState the plans (engine/plan/)
---@field begin_step fun(self: ps.Engine, args: any[]) called before the first forward of a step
local Engine = {}

--- Writes a note to stderr, unless the same text was written before.
---@param text string
function Engine:note(text)
  if self.said[text] then return end
  self.said[text] = true
  if not self.quiet then io.stderr:write("psluajit: ", text, "\n") end
end

--- Returns true while a step accumulates gradients: at least one backward of the step has run, but not the backward of
--- the last micro-batch.
---@return boolean
function Engine:accumulating()
  self = handle.own(self, "accumulating")
  return self.micro > 0 and self.micro < step.count(self)
end
--- Returns true after the backward of the step's last micro-batch has run.
---@return boolean
function Engine:at_boundary()
  self = handle.own(self, "at_boundary")
  return self.micro == step.count(self)
end

--- Raises an error at the script's line if this engine was closed. Its chunks may now belong to another engine.
function Engine:check_open()
  if self.closed then caller.error "this engine was closed; ps.initialize makes another" end
end

--- Raises an error if the model is torn, which means that it holds values of two steps.
function Engine:check_whole() step.check_whole(self) end

--- Abandons the current step and drops its gradients. The parameters keep the values that they had before the step.
function Engine:abandon() step.give_up(self) end

Engine.backward = step.backward
Engine.micro_batches = micro.batches

--- Sets the number of finished steps. Called after a state has been loaded.
---@param steps integer
function Engine:set_steps(steps) self.steps = steps end

--- Replaces the masters and drops the plans. Called after the model has got a new layout.
---@param new_masters ps.engine.Masters
function Engine:laid_out(new_masters)
  self.masters, self.traces, self.unplanned = new_masters, {}, {}
  self.plan.adam_split, self.plan.tables_on_host = false, false
end

--- Creates the masters, gradients and optimizer states of the parameters that were thawed since the last step. If this
--- function is not called, the next step creates them. All ranks must call this function, between steps.
function Engine:train_thawed()
  if self.plain then plain.train_thawed(self) else begin.train_thawed(self) end
end

--- Ends the step. Called by the optimizer.
function Engine:finish_step(info)
  self.steps = self.steps + 1
  if self.report then self.report:step_done(info) end
  if self.scheduler and not info.skipped then schedule.advance(self.scheduler) end
  local rng = random.state()
  rng.step = rng.step + 1
  rng.op = 0
  local every = self.ranks and self.cfg.compare_ranks_every or 0
  if every > 0 and self.steps % every == 0 then replicas.compare(self) end
  scope.end_step()
  if not info.skipped then unused.look(self) end
end

--- Sets the module to training mode or to evaluation mode. ps.initialize does not change the mode.
---@param mode? boolean (default true)
---@return ps.Engine self
function Engine:train(mode)
  self = handle.own(self, "train")
  self.module:train(mode)
  return self.handle
end
--- Sets the module to evaluation mode, in which dropout does nothing. Gradients are still computed, except in
--- ps.no_grad.
---@return ps.Engine self
function Engine:eval()
  self = handle.own(self, "eval")
  self.module:eval()
  return self.handle
end
local STATE = { tied = "boolean" }

-- Returns the model's state as a table from name to tensor. The table contains the buffers and the frozen parameters.
-- For each row of built.list, it contains the result of value(row).
local function by_name(self, value)
  self:check_whole()
  if not step.is_open(self) then self.masters:sync() end
  local state = self.module:state_dict { tied = false }
  own_state.keep(self, state)
  for _, row in ipairs(self.built.list) do state[row.name] = value(row) end
  return state
end

-- Returns the same state as state_dict { tied = false }, except that a value without a tensor is replaced by a
-- description (masters.values_later). Writers use this function because they need only one tensor at a time.
function Engine:values_later() return by_name(self, masters.values_later) end
Engine.to = trained.to
-- names of methods that would convert the model's parameters; an engine rejects them
local CONVERTERS = { "to", "half", "bfloat16", "float", "double", "cpu", "cuda" }

--- Returns the model's state by name. The state consists of the fp32 values of the parameters, on the host, and of the
--- buffers. The fp32 value of a bf16 or fp16 parameter is its master. If ranks share the state (zero_optimization.stage
--- 1 to 3), each rank gets only the tensors that it owns, and rank 0 also gets the buffers. The tensors belong to the
--- engine. The script must read or save them before the next step.
---@param options? {tied?: boolean} tied: if false, a tied weight is listed only under its first name (default: under
--- all names)
---@return table<string, ps.Tensor>
function Engine:state_dict(options)
  self = handle.own(self, "state_dict")
  options = caller.options(options, "state_dict", STATE)
  local state = by_name(self, masters.values)
  return options.tied == false and state or tied.add(self.module, state)
end

--- Calls fn while the parameters have their values for evaluation. Only with AdamWScheduleFree do these values differ
--- from the training values.
---@param call string name of the calling function, for messages
---@param fn fun(...: any): ...
---@param ... any arguments of fn
---@return any ...
function Engine:averaged(call, fn, ...) return averaged.run(self, call, fn, ...) end

--- Calls save_pretrained of the module with the fp32 values. All ranks must call this function, but only rank 0 writes.
---@param folder string|{save_directory: string} the folder, or a table with the folder and the options
---@param options? {max_shard_size?: integer|string} the options of the module's save_pretrained
---@return any ... the results of save_pretrained
function Engine:save_pretrained(folder, options)
  self = handle.own(self, "save_pretrained")
  local save = self.module.save_pretrained
  if not save then
    caller.error "this model has no save_pretrained; ps.safetensors.save(path, model:state_dict()) saves its values"
  end
  return self:averaged("save_pretrained", save, self.module, folder, self.handle, options)
end

--- Calls save_gguf of the module with the fp32 values. All ranks must call this function, but only rank 0 writes.
---@param path string
---@param options? {type?: string, name?: string, pre?: string} the options of the module's save_gguf
function Engine:save_gguf(path, options)
  self = handle.own(self, "save_gguf")
  local write = self.module.save_gguf
  if not write then caller.error "this model has no save_gguf; models of ps.from_pretrained have it" end
  self:averaged("save_gguf", write, self.module, path, self.handle, options)
end

--- Calls save_parallelized of the module with the fp32 values. All ranks must call this function. It may be called
--- between backward and step.
---@param folder string|{save_directory: string} the folder, or a table with the folder and the options
---@param options? {merge_checkpoints?: boolean}
---@return any ... the results of save_parallelized
function Engine:save_parallelized(folder, options)
  self = handle.own(self, "save_parallelized")
  local write = self.module.save_parallelized
  if not write then caller.error "this model has no save_parallelized; ps.checkpoints.save saves its state" end
  return self:averaged("save_parallelized", write, self.module, folder, self.handle, options)
end

--- Calls generate of the module. If ranks share the model by pipeline or tensor parallelism, all these ranks must call
--- this function.
---@param ... any the arguments of the module's generate
---@return integer[]|integer[][] ids
function Engine:generate(...)
  self = handle.own(self, "generate")
  self:check_open()
  if self.driver.in_loops or self.tensor_parallel then
    return self:averaged("generate", require("ps.engine.pipeline.generate").generate, self, ...)
  end
  return self:averaged("generate", self.module.generate, self.module, ...)
end

--- Loads values into the model by name. The values of bf16 and fp16 parameters are also loaded into their masters.
--- Abandons the current step. All ranks must call this function. An error on one rank is raised on all ranks.
---
--- If ranks share the state, each rank loads only the tensors that it owns. `state` may be the result of state_dict on
--- this rank, which lacks the tensors of other ranks. Rank 0 then sends the buffers that other ranks' states lack. Only
--- one tensor at a time is in memory, whatever the budgets are.
---@param state table<string, ps.Tensor>|table an open file (ps.safetensors.open, ps.load with lazy = true), or a table
---@param options? {strict?: boolean, check_only?: boolean}
---@return {missing: string[], unexpected: string[]}
function Engine:load_state_dict(state, options)
  self = handle.own(self, "load_state_dict")
  self:check_open()
  return own_state.load(self, state, options)
end

--- Abandons the current step if there is one. After this call, the engine is between two steps and has no gradients.
function Engine:end_step()
  if step.acts(self) then
    caller.error "a state cannot be loaded inside the model's forward, or inside its backward: load it between steps"
  end
  if step.is_open(self) then step.give_up(self) end
end

--- Closes the engine. Frees its chunks, the parameters in these chunks, the budgets and the disk file.
function Engine:close()
  self = handle.own(self, "close")
  if self.closed then return end
  native.check_running "model:close()"
  self.closed = true
  step.closed(self)
  step.leave_loop(self)
  local had_chunks = setup.closed(self)
  if self.masters then self.masters:close() end
  self.driver:close()
  if self.report then self.report:close() end
  if had_chunks then
    scope.engine_closes()
    C.ps_engine_close(native.ctx)
  end
  scope.collect_all()
end

-- names of the methods that scripts may call; all other methods are called only by psluajit's own files
Engine.PUBLIC = { "micro_batches", "backward", "train", "eval", "state_dict", "load_state_dict", "save_pretrained",
  "save_gguf", "save_parallelized", "generate", "accumulating", "at_boundary", "close", "to" }

Engine.methods = {}
for _, name in ipairs(Engine.PUBLIC) do
  Engine.methods[name] = exact.of(assert(Engine[name]), "model:" .. name, true)
end
for _, name in ipairs(CONVERTERS) do Engine.methods[name] = trained.to end     -- always raises an error

--- Calls the model. If gradients are enabled, this call is the forward of a micro-batch and may begin a step.
---@param ... any
---@return any ...
function Engine:call(...)
  if self.driver.in_loops then return micro.call(self, ...) end
  return step.forward(self, ...)
end

local HANDLE = handle.instance(Engine.methods, Engine.call)

-- Metatable of an engine. A key is first looked up in the fields of the step's state, then in the methods.
local INSTANCE = { __index = function(self, key)
  local field = step.fields[key]
  if field then return field(self) end
  return Engine[key]
end, __newindex = function(self, key, value)
  if step.fields[key] then error(("engine.%s is read-only: the step sets it"):format(key), 2) end
  rawset(self, key, value)
end }

-- Runs one phase of ps.initialize. If the phase fails, closes the engine and raises the error.
local function making(self, fn)
  local ok, problem = pcall(fn)
  if ok then return end
  problem = setup.explain(self, problem)
  self:close()
  error(problem, 0)
end

-- Copies the fields of the table that a setup file has returned into an engine.
local function assemble(self, fields)
  for name, value in pairs(fields) do self[name] = value end
end

--- Opens an engine that has no model yet: reads the configuration and opens the chunks. After that, new parameters can
--- move into chunks as soon as they are created. Engine:take sets the model.
---@param request table the result of setup.request, or a table with the same fields (config, quiet, loss, param_groups,
---  ...)
---@return ps.Engine
local function open(request)
  local self = setmetatable({ said = {}, traces = {}, unplanned = {}, steps = 0, closed = false, updates = {},
    plain = false, begin_step = begin.step, adam_rates = false, bound = setmetatable({}, { __mode = "k" }),
    plan = { adam_split = false, forecast = false, no_finer = false, printed = false, tables_on_host = false },
    stages = false, stays = false, tensor_parallel = false,
    own_loss = request.loss or false, param_groups = request.param_groups,
    quiet = request.quiet, policy = "plan", request_model_func = request.model_func }, INSTANCE)
  self.handle, self.driver = handle.new(self, HANDLE), table_driver.new(self)
  local c_step = step.new(self)
  local fields, pipeline = setup.configure(self, request, config)
  request.pipeline = pipeline
  assemble(self, fields)
  if self.cfg.memory.kind ~= "plain" then
    making(self, function() assemble(self, setup.open_engine(self, c_step, pipeline)) end)
  elseif mesh.group "world" then
    self.closed = true
    error("memory = \"plain\" trains only in one process; to train in several processes, remove it or set budgets", 0)
  end
  return self
end

-- Raises an error if no parameter of the model trains. A configuration without an optimizer is only for evaluation, and
-- raises no error.
local function check_trains(self)
  if #self.built.list > 0 or #(self.built.elsewhere or {}) > 0 or not self.cfg.optimizer_given then return end
  caller.error("ps.initialize: every parameter of the model is frozen, so the optimizer has nothing to train; thaw "
    .. "some (model:thaw \"layers.11\"), add an adapter (ps.lora.wrap), or leave optimizer out of the configuration to "
    .. "evaluate only")
end

local function take_plain(self, request)
  local made, fields = pcall(plain.initialize, self, request)
  if not made then
    self.closed = true
    error(fields, 0)
  end
  assemble(self, fields)
  making(self, function() check_trains(self) end)
  assemble(self, setup.finish(self))
  self.slots, self.overlap = false, false
  self.report = report.new(self)
end

--- Creates the model that the request describes, moves its parameters into chunks, and creates the optimizer. If one of
--- these steps fails, closes the engine.
---@param request table
function Engine:take(request)
  self.param_groups = request.param_groups
  if self.cfg.memory.kind == "plain" then take_plain(self, request)
  else
    making(self, function()
      assemble(self, setup.make_module(self, request))
      origin.settle(self.module)
      adopt.take(self, self.module)
      self.built = build.place(self.module, place_options(self))
      check_trains(self)
      self.masters = masters.new(self.built)
      self.optimizer = optimizer.new(self, self.built, self.cfg)
      if self.stages then require("ps.engine.pipeline.row").join(self.module, self.stages, self.built) end
      build.register(self.built, self.optimizer.group_of, #self.optimizer.groups, self)
      assemble(self, setup.finish(self))
      self.report = report.new(self)
      if self.ranks then self.ranks:begin() end
    end)
  end
  if request.optimizer then adopt.become(request.optimizer, self.optimizer) end
end

--- Creates an engine for a model, and its optimizer.
---@param model_func fun(): ps.nn.Module|ps.nn.Module|table a function that returns a module, a module, or a table with
---  these fields. `model_func` is the function; a module that already exists is `model` instead. `local_rank`, `config`
---  and `client` are the other arguments. `auto` has the values that replace "auto" in the configuration. If `quiet` is
---  true, the engine prints neither plans nor notes. `param_groups` are the groups of parameters. `optimizer` is an
---  unused optimizer of ps.optim for the parameters of `model`, and becomes the engine's optimizer. `loss` is a
---  function of the model's output and the batch. `example` is a batch in the form that the model accepts; a pipeline
---  uses it to count the cost of the model's parts before it cuts the model
---@param local_rank? integer|table|string the local rank, or the configuration if it is the second argument
---@param cfg? table|string the configuration: a table, or the path of a .lua or .json file (docs/config.md)
---@param client? table memory settings, for a module that already exists
---@return ps.Engine model
---@return ps.EngineOptimizer optimizer
local function initialize(model_func, local_rank, cfg, client)
  local request = setup.request(model_func, local_rank, cfg, client)
  local self = open(request)
  self:take(request)
  return self.handle, self.optimizer
end

return { initialize = initialize, open = open, Engine = Engine }
