-- SPDX-License-Identifier: BSD-3-Clause
-- A run of ps.bmt, from init_distributed to close. BMTrain's scripts create their model without the engine, so the
-- engine is opened in two steps. First, the script creates its first distributed parameter. The dtype of this parameter
-- selects the precision, and the engine opens its chunks. Parameters are moved into the chunks as they are created.
-- Second, the script calls the model for training for the first time. The engine then receives the model and the
-- optimizers of the OptimManager. Each later call of the model is a forward of the engine's step.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local adopt = require "ps.engine.state.adopt"
local build = require "ps.engine.layout.build"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local optim_groups = require "ps.optim.groups"
local deferred = require "ps.nn.deferred"
local registry = require "ps.nn.registry"
local dist = require "ps.dist"
local engines = require "ps.engine"
local hooks = require "ps.core.hooks"
local mesh = require "ps.dist.mesh"
local shard = require "ps.tensor.shard"
local source = require "ps.config.source"
local stages = require "ps.engine.pipeline.stages"
local error = caller.error

local session = {}

---@class ps.bmt.Session
---@field group ps.Group the group of all ranks
---@field config table the engine's configuration
---@field quiet boolean? the option quiet of init_distributed
---@field engine ps.Engine|false
---@field module ps.nn.Module|false the engine's model
---@field dtype string|false the dtype of all parameters
---@field inside boolean whether a call of the model is in progress
---@field manager ps.bmt.OptimManager|false the manager that has the optimizers; false before the first optimizer
---@field groups fun(): table[] returns the groups of all optimizers of the manager
---@field taken fun(engine: ps.Engine) is called after the engine has received the model and these groups
---@field off fun()|false a function that stops the staging of new parameters
---@field sequence boolean whether ranks along tp share the rows between layers
---@field keep_gathered boolean whether backward keeps the rows that the ranks along tp gathered
---@field pieces integer number of pieces in which the ranks along tp exchange rows during matrix products
---@field pipe ps.bmt.Pipe|false the pipeline, if blocks are assigned to stages
---@field stays table<ps.Tensor, boolean> for parameters of blocks with their own zero_level: whether gathered values
--- are kept until the end of the step
---@field alike table<ps.Tensor, boolean> parameters that are sharded along tp, or whose gradients are equal along tp
---@field device string|false the default device before the engine was opened
local Session = {}
Session.__index = Session

---@class ps.bmt.Pipe
---@field group ps.Group a group with one rank of each stage
---@field rank integer the stage of this rank, counted from 0
---@field size integer number of stages
---@field micros integer number of micro-batches into which a list of blocks splits the rows of all stages
---@field before ps.Group|false the group of the previous stage and this stage; false on the first stage
---@field after ps.Group|false the group of this stage and the next stage; false on the last stage
---@field stage_of table<ps.Tensor, integer> the stage of each parameter and buffer of a block
---@field inside table<ps.nn.Module, integer> the stage of each block and of its submodules
---@field sample number|false the sample number that the last call set

local current                                      -- the current run, or nil

--- The sizes and ranks that BMTrain's scripts read from bmt.config. Most are set by init_distributed.
---@type table<string, any>
session.facts = { initialized = false, rank = 0, local_rank = 0, world_size = 1 }

-- Configuration keys that a script cannot set, because calls of ps.bmt determine their values.
local DECIDED = { fp16 = "the parameters' type", bf16 = "the parameters' type", optimizer = "bmt.optim",
  scheduler = "bmt.lr_scheduler", gradient_clipping = "OptimManager:clip_grad_norm",
  overlap_optimizer = "OptimManager, whose steps update after backward",
  pipeline = "pipe_size, with num_micro_batches" }

local OPTIONS = { init_method = "string", seed = "number", zero_level = "whole", pipe_size = "whole", tp_size = "whole",
  num_micro_batches = "whole", config = "table|string", backend = "string", rendezvous = "string", rank = "number",
  world_size = "number", local_rank = "number", timeout = "number", heartbeat = "number", quiet = "boolean" }

local JOINING = { "backend", "rank", "world_size", "local_rank", "timeout", "heartbeat", "quiet", "rendezvous" }

local function configuration(given, level, tp_size, pipe_size)
  local cfg = {}
  for key, value in pairs(given and (source.read(given)) or {}) do
    local schedule = key == "pipeline" and type(value) == "table" and value.schedule
    if schedule and schedule ~= "gpipe" then
      error(("bmt.init_distributed: config has pipeline.schedule = %s; a model of ps.bmt supports only gpipe, "
        .. "since its "
        .. "loss is computed from all micro-batches, after the list (docs/bmtrain.md); remove pipeline, since "
        .. "pipe_size sets "
        .. "the number of stages"):format(tostring(schedule)))
    end
    if DECIDED[key] then
      error(("bmt.init_distributed: config has %s, which %s determines"):format(key, DECIDED[key]))
    end
    cfg[key] = value
  end
  if cfg.memory == "plain" then
    error "bmt.init_distributed: config has memory = \"plain\", which has no chunks for parameters; remove it"
  end
  local zero = {}
  for key, value in pairs(cfg.zero_optimization or {}) do zero[key] = value end
  if level and (level < 0 or level > 3) then
    error(("bmt.init_distributed: zero_level is %d; it must be 0 to 3"):format(level))
  end
  if level and zero.stage and zero.stage ~= level then
    error(("bmt.init_distributed: zero_level is %d, but config's zero_optimization.stage is %s; they mean the "
      .. "same, keep "
      .. "one"):format(level, tostring(zero.stage)))
  end
  zero.stage = zero.stage or level or 3
  local layers = {}
  for key, value in pairs(cfg.tensor_parallel or {}) do layers[key] = value end
  if tp_size and layers.size and layers.size ~= tp_size then
    error(("bmt.init_distributed: tp_size is %d, but config's tensor_parallel.size is %s; they mean the same, keep "
      .. "one"):format(tp_size, tostring(layers.size)))
  end
  layers.size = layers.size or tp_size or 1
  cfg.tensor_parallel, cfg.pipeline = layers, { stages = pipe_size }
  cfg.zero_optimization, cfg.overlap_optimizer = zero, false
  return cfg
end

local function set_facts(pipe_size, tp_size)
  local e, facts = mesh.env(), session.facts
  for key in pairs(facts) do facts[key] = nil end
  facts.initialized, facts.rank, facts.local_rank = true, e.rank, e.local_rank
  facts.world_size, facts.local_size = e.world_size, e.local_world_size
  facts.pipe_size, facts.pipe_enabled, facts.tp_size = pipe_size, pipe_size > 1, tp_size
  facts.tp_rank = e.rank % tp_size
  facts.zero_size, facts.tp_zero_size = e.world_size / pipe_size, e.world_size / tp_size
  facts.zero_rank = e.rank % facts.zero_size
  facts.tp_zero_rank = math.floor(e.rank / tp_size)
end

-- Returns two groups: the group of the previous stage and this stage, and the group of this stage and the next stage.
-- The first group is false on the first stage, and the second group is false on the last stage.
local function pairs_of(group)
  local rank, size, made = group:rank(), group:size(), {}
  for odd = 0, 1 do
    local first = rank - (rank + odd) % 2
    local both = first >= 0 and first + 1 < size
    local pair = group:split(both and { first, first + 1 } or { rank }, odd == 0 and "pipe_even" or "pipe_odd")
    if both then made[first] = pair end
  end
  return made[rank - 1] or false, made[rank] or false
end

local function new_pipe(micros)
  local group = mesh.group "pp"
  if not group then return false end
  local before, after = pairs_of(group)
  return { group = group, rank = group:rank(), size = group:size(), micros = micros or group:size(), before = before,
    after = after, stage_of = setmetatable({}, { __mode = "k" }), inside = setmetatable({}, { __mode = "k" }),
    sample = false }
end

--- Connects to the other ranks and begins a run. bmt.close() ends the run.
---@param options? {seed?: integer, zero_level?: integer, init_method?: string, config?: table|string, quiet?: boolean,
--- backend?: string, timeout?: number, heartbeat?: number, rank?: integer, world_size?: integer, local_rank?: integer,
--- rendezvous?: string, pipe_size?: integer, tp_size?: integer, num_micro_batches?: integer} seed: default 0.
--- zero_level: the ZeRO level, 0 to 3 (default 3). tp_size: the number of ranks that share layers (bmt.nn). pipe_size:
--- the number of stages to which blocks are assigned (bmt.PipelineTransformerBlockList). num_micro_batches: the number
--- of micro-batches into which the rows of all stages are split (default pipe_size). config: keys of ps.initialize's
--- configuration (memory, device, gradient_accumulation_steps, ...). The other options are described at
--- ps.init_distributed.
function session.begin(options)
  options = caller.options(options, "bmt.init_distributed", OPTIONS)
  if current then error "bmt.init_distributed was already called; call bmt.close() to end that run" end
  if options.init_method and options.init_method ~= "env://" and options.rendezvous then
    error "bmt.init_distributed: init_method and rendezvous mean the same, keep one"
  end
  local pipe_size = math.max(1, options.pipe_size or 1)
  local cfg, joining = configuration(options.config, options.zero_level, options.tp_size and math.max(1,
    options.tp_size), pipe_size), {}
  if options.num_micro_batches then
    caller.whole(options.num_micro_batches, "bmt.init_distributed: num_micro_batches", 1)
  end
  local tp_size = cfg.tensor_parallel.size
  for _, key in ipairs(JOINING) do joining[key] = options[key] end
  if options.init_method and options.init_method ~= "env://" then joining.rendezvous = options.init_method end
  joining.seed = options.seed or 0
  local group = dist.init_distributed(joining)
  local world = group:size()
  if world % (tp_size * pipe_size) ~= 0 then
    group:close()
    error(("bmt.init_distributed: the number of processes is not a multiple of pipe_size = %d times tp_size = %d: "
      .. "it is %d; start "
      .. "a multiple with tools/launch.lua --nproc-per-node"):format(pipe_size, tp_size, world))
  end
  mesh.cut { tp = tp_size, pp = pipe_size }
  current = setmetatable({ group = group, config = cfg, quiet = options.quiet, engine = false, module = false,
    sequence = tp_size > 1 and cfg.tensor_parallel.sequence_parallel ~= false,
    keep_gathered = cfg.tensor_parallel.tp_keep_gathered or false,
    pieces = mesh.pieces(cfg.tensor_parallel.tp_overlap_comm), alike = setmetatable({}, { __mode = "k" }),
    stays = setmetatable({}, { __mode = "k" }), pipe = new_pipe(options.num_micro_batches),
    dtype = false, inside = false, manager = false, off = false, device = false }, Session)
  set_facts(pipe_size, tp_size)
end

--- Returns the current run. Raises an error if there is no run.
---@param call string the name of the called function
---@return ps.bmt.Session
function session.need(call)
  return current or error(call .. ": call bmt.init_distributed first")
end

--- Returns the current run, or nil if there is no run.
---@return ps.bmt.Session?
function session.get() return current end

--- Ends the run, and frees its parameters and optimizers. Afterwards, init_distributed can be called again.
function session.close()
  if not current then return end
  local self = current
  current = nil
  for key in pairs(session.facts) do session.facts[key] = nil end
  session.facts.initialized, session.facts.rank, session.facts.local_rank = false, 0, 0
  session.facts.world_size = 1
  self:stop_staging()
  if self.engine then self.engine:close() end
  self.group:close()
end

-- -- parameters -------------------------------------------------------------------------------------------------------
function Session:stop_staging()
  if not self.off then return end
  self.off()
  self.off = false
  create.set_default_device(self.device)
end

-- Opens the engine's chunks for parameters of the given dtype.
function Session:open(dtype)
  local cfg = { optimizer = { type = dtype == "fp32" and "Adam" or "AdamW", params = { weight_decay = 0 } } }
  for key, value in pairs(self.config) do cfg[key] = value end
  if dtype ~= "fp32" then cfg[dtype] = { enabled = true } end
  self.engine = engines.open { config = cfg, quiet = self.quiet }
  self.dtype = dtype
  self.device = create.set_default_device(self.engine.device_name)
  self.off = hooks.on("parameter", function(tensor) self:stage(tensor) end)
end

local TRAINED = { fp32 = true, bf16 = true, fp16 = true }

--- Opens the engine for parameters of this dtype, unless it is already open.
---@param dtype string
---@param call string
function Session:ready(dtype, call)
  if self.module then error(call .. ": the model has begun to train; create all parameters before its first call") end
  if not TRAINED[dtype] then error(("%s takes fp32, bf16 or fp16, not %s"):format(call, dtype)) end
  if not self.engine then self:open(dtype) end
end

--- Moves a parameter into the engine's chunks, unless it belongs to another stage. All ranks get the values of rank 0.
--- If the parameter is a shard, each rank gets the values of the first rank that has the same shard.
---@param tensor ps.Tensor
function Session:stage(tensor)
  -- A parameter is on device meta until its file is mapped.
  if session.elsewhere(tensor) or tensor:device() == "meta" then return end
  if tensor:dtype() ~= self.dtype then
    error(("a parameter is %s, but the first one was %s: all parameters of a model of ps.bmt must have one "
      .. "dtype"):format(
      tensor:dtype(), self.dtype))
  end
  if self.sequence and not self.alike[tensor] then shard.set_partial(tensor) end
  if native.C.ps_engine_holds(native.ctx, tensor) ~= 0 then return end
  local ranks = self.engine.ranks
  if ranks and ranks.tp and not shard.of(tensor) and tensor:numel() > 0 then ranks.tp:broadcast(tensor, 0) end
  if ranks and ranks.dp:size() > 1 and tensor:numel() > 0 then ranks.dp:broadcast(tensor, 0) end
  if self.pipe and tensor:numel() > 0 then self.pipe.group:broadcast(tensor, 0) end
  build.to_chunk(tensor, ranks and ranks.shards)
end

--- Moves all remaining parameters of a module into chunks. Parameters that were created before the engine was opened
--- may be on another device, so the module is moved to the engine's device first.
---@param module ps.nn.Module
---@param call string
function Session:stage_all(module, call)
  for _, param in ipairs(module:parameters()) do self:ready(param:dtype(), call) end
  if self.engine then module:to { device = self.engine.device_name } end
  for _, param in ipairs(module:parameters()) do self:stage(param) end
end

--- Assigns a block to a stage. This rank stores no values for blocks of other stages.
---@param block ps.nn.Module
---@param stage integer the stage, counted from 0
function Session:deal(block, stage)
  local pipe = self.pipe
  for _, module in block:named_modules() do pipe.inside[module] = stage end
  for _, iterate in ipairs { block.named_parameters, block.named_buffers } do
    for name, tensor in iterate(block) do
      if (pipe.stage_of[tensor] or stage) ~= stage then
        error(("bmt.PipelineTransformerBlockList: %s is in blocks of stages %d and %d; blocks of different stages "
          .. "must not share "
          .. "no parameters"):format(name, pipe.stage_of[tensor], stage))
      end
      pipe.stage_of[tensor] = stage
    end
  end
  if stage == pipe.rank then return end
  for name, param in block:named_parameters() do
    deferred.leave(param, ("%s belongs to a block on stage %d of the pipeline"):format(name, stage))
  end
end

--- If a parameter is only on another stage, returns this other stage. Returns nil if this rank's stage
--- has the parameter.
---@param tensor ps.Tensor
---@return integer? stage
function session.elsewhere(tensor)
  local pipe = current and current.pipe
  local stage = pipe and pipe.stage_of[tensor]
  return stage and stage ~= pipe.rank and tensor:device() == "meta" and stage or nil
end

--- Returns the stage of a block's parameter. Returns nil if all stages have the parameter.
---@param tensor ps.Tensor
---@return integer? stage
function session.stage_of(tensor) return current and current.pipe and current.pipe.stage_of[tensor] end

-- -- the model -------------------------------------------------------------------------------------------------------
-- Returns the model's stages for the engine, or nil if the model has one stage.
local function stages_for(self, module)
  local pipe = self.pipe
  if not pipe then return nil end
  for path, owner in module:named_modules() do
    for key, value in registry.tensors(owner) do
      local stage = pipe.stage_of[value]
      if stage and pipe.inside[owner] ~= stage then
        error(("%s%s is also a parameter of a block on stage %d: blocks of a PipelineTransformerBlockList must "
          .. "not share "
          .. "parameters with modules outside the list"):format(path == "" and "" or path .. ".", tostring(key), stage))
      end
    end
  end
  return stages.of_itself(module, function(tensor) return pipe.stage_of[tensor] end, pipe.rank, pipe.size)
end

-- Passes the model and the manager's optimizers to the engine.
function Session:take(module)
  local groups, engine = self.groups(), self.engine
  self:stop_staging()
  if engine.closed then
    error "the engine was closed by an error; call bmt.close() and bmt.init_distributed to start again"
  end
  for _, param in ipairs(module:parameters()) do self:stage(param) end
  engine:take { module = module, is_cut = true, stages = stages_for(self, module),
    stays = function(param) return self.stays[param] end,
    param_groups = adopt.groups({ groups = groups, kind = { name = "AdamW" } }, module) }
  for number, group in ipairs(engine.optimizer.groups) do
    for key, value in pairs(group) do if groups[number][key] == nil then groups[number][key] = value end end
    engine.optimizer.groups[number] = groups[number]
  end
  optim_groups.record(engine.optimizer)
  self.module = module
  self.taken(engine)
end

--- Passes the model to the engine before the model's first call, if the optimizers have all trained parameters of the
--- model. Values that are loaded into the model after this call are then also written to the fp32 masters.
---@param module ps.nn.Module
function session.hand_over(module)
  local self, there = current, {}
  if not (self and self.engine and self.manager) or self.module or not nn_module.is_module(module) then return end
  for _, group in ipairs(self.groups()) do
    for _, param in ipairs(group.params) do there[nn_module.address(param)] = true end
  end
  for _, param in ipairs(module:parameters()) do
    if param:needs_grad() and not there[nn_module.address(param)] then return end
  end
  self:take(module)
end

-- Sets the number of this rank's first sample, which determines the dropout masks. The samples of a pipeline's stages
-- are numbered consecutively, in the order in which the lists of blocks gather their rows. If the script uses a loader,
-- the loader sets the number itself, and this function does not change it.
local function number_samples(self, first)
  local rng, pipe = random.state(), self.pipe
  if rng.sample ~= 0 and rng.sample ~= pipe.sample then return end
  local rows = scope.is_tensor(first) and first:dim() > 0 and first:size(0) or 0
  pipe.sample = mesh.rank "dp" * 2 ^ 20 + pipe.rank * rows
  rng.sample = pipe.sample
end

local function leave(self, ok, ...)
  self.inside = false
  if not ok then error((...), 0) end
  return ...
end

--- Runs a call of a DistributedModule that no other module makes. If the module is the trained model, the call is a
--- forward of the engine.
---@param module ps.nn.Module
---@param run fun(module: ps.nn.Module, ...): any the function that performs the call
---@return any ...
function session.call(module, run, ...)
  local self = current
  if not self or self.inside or not self.engine then return run(module, ...) end
  if not self.module and self.manager and scope.grad_enabled() then self:take(module) end
  if self.module ~= module then return run(module, ...) end
  local engine = self.engine
  if scope.grad_enabled() and engine.micro > 0 and engine:at_boundary() then
    error(("the model was called again before OptimManager:step(), after %d of %d backwards of the step; "
      .. "gradient_accumulation_steps in bmt.init_distributed's config sets their number per step"):format(engine.micro,
      engine.accumulate))
  end
  if self.pipe then number_samples(self, (...)) end
  self.inside = true
  return leave(self, pcall(self.engine.call, self.engine, ...))
end

--- Returns the engine if the module is the engine's model. Otherwise returns the module.
---@param module any
---@return any
function session.target(module)
  if current and current.module and current.module == module then return current.engine end
  if not nn_module.is_module(module) then error("this is a " .. type(module) .. ", not a model") end
  return module
end

return session
