-- SPDX-License-Identifier: BSD-3-Clause
-- Makes an engine: reads the arguments of ps.initialize, applies the configuration to this machine, sets budgets,
-- builds the module in staging chunks, and decides where updates run. Files that are needed only for several ranks are
-- loaded only if there are several ranks. Otherwise they would make every full collection of Lua's garbage slower.
local create = require "ps.tensor.create"
local deferred = require "ps.nn.deferred"
local environment = require "ps.core.environment"
local devices = require "ps.core.devices"
local dist = require "ps.dist"
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local collector = require "ps.core.collector"
local copied = require "ps.core.copied"
local hooks = require "ps.core.hooks"
local check = require "ps.config.check"
local types = require "ps.core.types"
local nn_module = require "ps.nn.module"
local origin = require "ps.nn.origin"
local packed = require "ps.nn.packed"
local adopt = require "ps.engine.state.adopt"
local batch = require "ps.data.batch"
local build = require "ps.engine.layout.build"
local embed = require "ps.engine.layout.embed"
local hybrid = require "ps.engine.plan.hybrid"
local rates = require "ps.engine.plan.rates"
local mesh = require "ps.dist.mesh"
local place_options = require "ps.engine.layout.options"
local own_loss = require "ps.engine.step.own_loss"
local shortage = require "ps.engine.plan.shortage"
local optim_groups = require "ps.optim.groups"
local engine_groups = require "ps.optim.engine_groups"
local optimizers = require "ps.optimizers"
local random_state = require "ps.dist.random_state"
local ffi, C = native.ffi, native.C
local error = caller.error

local setup = {}

local open                  -- the engine that owns the chunks of the context until the engine is closed

local int_out = ffi.new("int[1]")
local ARGUMENTS = { model_func = "function|table", model = "table", local_rank = "whole", config = "any",
  client = "table", param_groups = "any", quiet = "boolean", auto = "table", loss = "callable", optimizer = "table",
  example = "table|tensor" }

-- Returns the keys that a group of parameters may have, with the types of their values.
local function group_keys()
  local keys = { match = "function", optimizer = "string" }
  for _, name in ipairs(optimizers.names) do
    for key, default in pairs(optimizers.of(name).defaults) do keys[key] = type(default) end
  end
  return keys
end

-- Returns the description of the optimizer that a group of the list names. Returns nil if it names none.
local function optimizer_of(group, i)
  if group.optimizer == nil then return nil end
  local name = type(group.optimizer) == "string" and optimizers.find(group.optimizer)
  if not name then
    error(("ps.initialize: param_groups[%d].optimizer is '%s'; the optimizers are %s"):format(i,
      tostring(group.optimizer), table.concat(optimizers.names, ", ")))
  end
  return optimizers.of(name)
end

-- Checks groups of parameters. A parameter belongs to the first group whose match function returns true. Only the last
-- group may lack a match function. It then contains all remaining parameters. Returns a copy of the groups in which
-- optimizers have their own names, not aliases.
local function checked_groups(groups)
  local function refuse(text, ...) error(("ps.initialize: param_groups" .. text):format(...)) end
  if groups == nil then return end
  local of_groups = group_keys()
  if type(groups) ~= "table" or #groups == 0 then refuse(" must be a list of tables, one for each group") end
  local list = copied(groups)
  for i, group in ipairs(groups) do
    if type(group) ~= "table" then refuse("[%d] is a %s, not a table", i, type(group)) end
    for key, value in pairs(group) do
      local kind = of_groups[key]
      if not kind then
        local made = optimizer_of(group, i) or optimizers.of "AdamW"
        refuse("[%d] has an unknown key '%s'; a group may have match = function(name, parameter), optimizer = \"%s\" "
          .. "or another, and the settings of its optimizer (%s: %s)", i, tostring(key), made.name, made.name,
          table.concat(made.settings, ", "))
      elseif type(value) ~= kind then
        refuse("[%d].%s is a %s, not a %s", i, key, type(value), kind)
      end
      local problem = types.OPTIMIZER[key] and check.problem(value, types.OPTIMIZER[key])
      if problem then refuse("[%d].%s %s", i, key, problem) end
    end
    local made = optimizer_of(group, i)
    list[i] = copied(group)
    list[i].optimizer = made and made.name
  end
  return list
end

-- Raises an error if a group contains settings that are not settings of its optimizer.
local function check_kind(list, default)
  for i, group in ipairs(list or {}) do
    local kind = group.optimizer or default
    local known = { match = true, optimizer = true }
    for _, key in ipairs(optimizers.of(kind).settings) do known[key] = true end
    for key in pairs(group) do
      if not known[key] then error(("ps.initialize: param_groups[%d].%s is not a setting of %s"):format(
        i, key, kind)) end
    end
  end
end

-- Raises an error if OneCycleLR is to change the momentum of a group that has none.
local function check_cycle(list)
  for number, group in ipairs(list) do
    if not group.betas and not group.momentum then
      error(("ps.initialize: scheduler.params.cycle_momentum is true (the default), but %s (group %d) has neither "
        .. "betas nor momentum; write false"):format(group.kind, number))
    end
  end
end

--- Returns the arguments of ps.initialize as a table of names.
---@return {model_func?: function, optimizer?: ps.Optimizer, module?: ps.nn.Module, config: table|string, client?:
---  table, auto?: table, param_groups?: table[], quiet?: boolean, example?: any, loss?: fun(out: table, batch: table):
---  ps.Tensor}
function setup.request(first, local_rank, cfg, client)
  local request
  if (nn_module.is_module(first) or type(first) == "function") and
    (type(local_rank) == "table" or type(local_rank) == "string") then
    if cfg ~= nil then error "ps.initialize: both the second and the third argument are a configuration; pass one" end
    request = { config = local_rank, client = client }
    if nn_module.is_module(first) then request.model = first else request.model_func = first end
    request.module = request.model
  elseif nn_module.is_module(first) then
    request = { module = first, local_rank = local_rank, config = cfg, client = client }
  elseif type(first) == "function" then
    request = { model_func = first, local_rank = local_rank, config = cfg, client = client }
  elseif type(first) == "table" then
    request = copied(caller.options(first, "ps.initialize", ARGUMENTS))
    if nn_module.is_module(request.model_func) then request.module, request.model_func = request.model_func, nil end
    request.module = request.module or request.model
  else
    error("ps.initialize takes a function that makes the model, a module, or a table of arguments, not a "
      .. type(first))
  end
  if request.module and request.model == nil and request.client == nil then
    error("ps.initialize: this model already exists, whole, in plain memory: write model_func = function() "
      .. "return MODEL end to make it in chunks, or ps.initialize(MODEL, CONFIG) to move this one into chunks")
  end
  if not request.module and type(request.model_func) ~= "function" then
    error("ps.initialize: model_func must be a function that makes the model")
  end
  if request.optimizer then
    if request.param_groups then error "ps.initialize: the optimizer has its own groups; remove param_groups" end
    if not request.module then error "ps.initialize: an optimizer needs its module; pass it as `model`" end
    adopt.check(request.optimizer)
    request.param_groups = adopt.groups(request.optimizer, request.module)
  elseif type(request.param_groups) == "table" then
    optim_groups.check_whole(request.param_groups, "ps.initialize", "param_groups")
  end
  request.param_groups = checked_groups(request.param_groups)
  mesh.check_joined "ps.initialize"
  local group = mesh.group "world"
  local mine = group and dist.local_rank() or 0
  if (request.local_rank or mine) ~= mine then
    error(("ps.initialize: local_rank is %s, but this is %s"):format(tostring(request.local_rank),
      group and "local rank " .. mine or "a single process (call ps.init_distributed before ps.initialize)"))
  end
  request.config = request.config or {}
  return request
end

local function disk_free(path)
  local stat = require("posix.sys.statvfs").statvfs(path)
  return stat and stat.f_bavail * stat.f_frsize or nil
end

-- Returns two numbers of bytes, one for the host and one for the device. Ratios and shares in the configuration are
-- relative to these numbers. Each number is the sum of the free bytes and of the bytes that this process holds, because
-- budgets include both. Collecting garbage first would not change a sum: the regions hold the memory of garbage, too.
local function available(device)
  local sharing = mesh.group "world" and mesh.env().local_world_size or 1    -- number of ranks on this machine
  local function held(name) return tonumber(C.ps_memory_held(native.ctx, native.device_index(name))) end
  local there = { host = devices.available("cpu") / sharing + held "cpu" }
  if device ~= "cpu" then there.device = devices.available(device) + held(device) end
  return there
end

-- Returns the device that "auto" selects. This is cuda if a GPU can be used, and otherwise cpu. Prints a note if there
-- is a GPU that cannot be used.
local function choose_device(engine)
  local ok, err = pcall(devices.open, "cuda")
  if ok then return "cuda" end
  if err.sub ~= "NO_DEVICE" then engine:note(('device: "auto" is the cpu here: %s'):format(tostring(err))) end
  return "cpu"
end

-- Returns the settings that the mesh and the script's optimizer define outside the configuration, by keys of the
-- configuration.
local function asked(request)
  local all = copied(mesh.asked())
  for key, said in pairs(request.optimizer and adopt.settings(request.optimizer) or {}) do all[key] = said end
  return all
end

local said = {}                 -- notes on configurations that this process has printed, for any of its engines

local function note_of_job(engine, text)
  if said[text] then return end
  said[text] = not engine.quiet or nil
  engine:note(text)
end

-- Returns a table that describes how ranks share the layers of a model. Returns false if ranks do not share layers.
local function layers_of(engine, cfg)
  local group, how = mesh.group "tp", cfg.tensor_parallel
  if not group then return false end
  local function note(text) if mesh.group("world"):rank() == 0 then engine:note(text) end end
  local layers = { group = group, sequence = how.sequence_parallel, keep_gathered = how.tp_keep_gathered,
    pieces = mesh.pieces(how.tp_overlap_comm), note = note }
  -- true if rows are exchanged while a product is computed
  layers.beside = layers.pieces > 1 and not cfg.device:find "^cuda"
  if layers.pieces > 1 and not layers.beside then
    local text = "tp_overlap_comm: on " .. cfg.device .. " rows are exchanged before and after whole products"
    note(text)
    hooks.tell("plan_note", text)
  end
  return layers
end

-- Returns true if embedding matrices of nn.Embedding may be looked up on the host.
local function lookups_of(engine, fields)
  local wanted = embed.wanted(fields, function(text) engine:note(text) end)
  if not wanted or fields.zero_stage == 0 then return wanted end
  if fields.cfg.use_cpu_embedding == true then
    engine:note("use_cpu_embedding has no effect: ranks share the parameters, and tables are looked up where they "
      .. "are gathered")
  end
  return false
end

-- Returns true if, with this configuration, every update runs inside backward. Gradients then need no separate memory.
local function updates_inside(fields, cfg)
  return fields.device == fields.host and not mesh.group "world" and not fields.adds_up and cfg.gradient_clipping <= 0
    and cfg.overlap_optimizer ~= false and not (cfg.precision == "bf16" and cfg.bf16.check_grad_overflow)
end

-- Returns true if remainders are stored instead of masters. With clipping and without accumulation, remainders would
-- save no memory: a gradient would be stored in the memory of its parameter, but the parameter is needed together with
-- the remainders.
local function keeps_remainders(engine, fields, cfg)
  local wanted = cfg.memory.master
  if not wanted then return false end
  local saves = cfg.precision == "bf16" and cfg.memory.kind ~= "plain" and (fields.adds_up or fields.updates_inside)
  if wanted == "auto" then
    engine:note(("memory.master = \"auto\": masters are %s"):format(saves and "kept as remainders" or "whole"))
    return saves
  end
  if cfg.precision ~= "bf16" or cfg.memory.kind == "plain" then
    error(("ps.initialize: memory.master is \"remainder\", which is for bf16 parameters in chunks, and the "
      .. "configuration has %s%s"):format(cfg.precision, cfg.memory.kind == "plain" and " in plain memory" or ""))
  end
  if not saves then
    engine:note("memory.master = \"remainder\" saves no memory here: gradients have memory of their own until they are "
      .. "clipped (14 bytes per parameter with AdamW, as with whole masters); memory.master = \"auto\" decides by this")
  end
  return true
end

--- Reads the configuration.
---@param engine ps.Engine the engine that prints the notes
---@param request table
---@param config table the module ps.config
---@return table fields of the engine that depend on the configuration
---@return ps.engine.Pipeline? pipeline how the configuration cuts the model into stages, or nil if the model is not cut
function setup.configure(engine, request, config)
  local world = mesh.group "world"
  local cfg, notes = config.read(request.config, { world_size = world and world:size() or 1,
    asked = asked(request), available = available,
    auto = request.auto, client = request.client, device = function() return choose_device(engine) end })
  hooks.tell("settings", cfg)
  if request.optimizer and cfg.optimizer.type ~= request.optimizer.kind.name then
    error(("ps.initialize: the optimizer is %s, but optimizer.params.adam_w_mode makes it %s"):format(
      request.optimizer.kind.name, cfg.optimizer.type))
  end
  request.param_groups = request.param_groups or optim_groups.split(cfg.optimizer.type)
  check_kind(request.param_groups, cfg.optimizer.type)
  local list = engine_groups.configured(cfg.optimizer, request.param_groups)
  optim_groups.check(list)
  if cfg.optimizer.first_momentum then check_cycle(list) end
  if cfg.scheduler and request.optimizer and optim_groups.changes(request.optimizer.groups) then
    error(("ps.initialize: the optimizer already has a schedule of ps.sched, and the configuration has the schedule "
      .. "%s; remove one of them"):format(cfg.scheduler.type))
  end
  if not world or world:rank() == 0 then
    for _, text in ipairs(notes or {}) do note_of_job(engine, text) end
  end
  mesh.cut { pp = cfg.pipeline.stages, tp = cfg.tensor_parallel.size }
  local group, stages_group = mesh.group "dp", mesh.group "pp"
  local fields = { cfg = cfg, device_name = cfg.device, policy = cfg.eviction, precision = cfg.precision,
    tensor_parallel = layers_of(engine, cfg),
    device = native.device_index(cfg.device), host = native.device_index("cpu"),
    accumulate = cfg.gradient_accumulation_steps,
    scaler_config = cfg.precision == "fp16" and cfg.fp16 or nil,
    zero_stage = group and group:size() > 1 and cfg.zero_optimization.stage or 0 }
  fields.adds_up = fields.accumulate > 1 or cfg.pipeline.stages > 1
  fields.lookups = lookups_of(engine, fields)
  fields.param_groups = request.param_groups
  fields.updates_inside = updates_inside(fields, cfg)
  fields.remainder = keeps_remainders(engine, fields, cfg)
  if cfg.seed then random.seed(cfg.seed) end
  if not stages_group then return fields end
  local pipeline = require("ps.engine.pipeline.row").request(cfg, stages_group)
  pipeline.example = request.example ~= nil and batch.spread(request.example) or nil
  return fields, pipeline
end

-- Returns three numbers for a module: the number of parameter elements, the number of parameter elements that train,
-- and the number of bytes of packed weights. If `stages` is given, counts only the parameters of this rank's stages.
local function count(module, stages)
  local numel, trained, blocks = 0, 0, 0
  local function is_here(name) return not (stages and stages:elsewhere(name)) end
  for name, p in module:named_parameters() do
    if is_here(name) then numel, trained = numel + p:numel(), trained + (p:needs_grad() and p:numel() or 0) end
  end
  packed.each(module, function(weight, name)
    if is_here(name) then blocks = blocks + weight:nbytes() end
  end)
  return { numel = numel, trained = trained, blocks = blocks }
end

-- Returns the function that creates the model. This is the script's function, unless a planner that tries other model
-- sizes has provided another function.
local function model_of(model_func) return hooks.ask("model", model_func) or model_func end

-- Creates a model without data, and returns the same numbers as `count` for this model. Returns nil if the model's
-- function cannot run without data.
local function count_parameters(model_func)
  local restore = random_state.keep()
  local ok, counted = pcall(scope.scope, function() return count(deferred.make(model_func)) end)
  restore()
  if not ok and caller.is_interrupt(counted) then error(counted, 0) end
  return ok and counted or nil
end

-- Returns a function that cuts the layers of a model without data. Returns nil if ranks do not share layers.
local function cutter(engine)
  local how = engine.tensor_parallel
  return how and function(module) require("ps.parallel.tensor.cut").cut(module, how) end or nil
end

-- Returns the same numbers as `count` for the parameters that this rank has after the model was cut. If the model is
-- cut into stages, computes this cut, and stores it in `pipeline`. All ranks must call this function.
local function count_own(engine, pipeline)
  local model_func, cut, restore = model_of(engine.request_model_func), cutter(engine), random_state.keep()
  local module, made
  if pipeline then
    module, made = require("ps.engine.pipeline.stages").divide(model_func, pipeline, { device = engine.device_name,
      precision = engine.precision, cut = cut })
    pipeline.found = { costs = made.costs, first = made.first, times = made.times }
  else
    module = deferred.make(model_func)
    cut(module)
  end
  restore()
  return count(module, made)
end

-- Returns the same numbers as `count` for the parameters whose state this process keeps or shares. Returns nil if these
-- parameters cannot be counted.
local function count_kept(engine, pipeline)
  if not engine.request_model_func then return nil end
  if pipeline or engine.tensor_parallel then return count_own(engine, pipeline) end
  return count_parameters(model_of(engine.request_model_func))
end

-- Returns an upper bound of the bytes that this process keeps per trained parameter. They are for the state, the
-- gradient and staging. If ranks share one of these, its bytes are divided by the number of ranks, and 10 % are added,
-- because shares are uneven.
local function bytes_a_parameter(engine)
  local group = mesh.group "dp"
  local share = group and 1.1 / group:size() or 1
  local stage = engine.zero_stage
  local state, list = 0, engine_groups.configured(engine.cfg.optimizer, engine.param_groups)
  for _, states in ipairs(engine_groups.states(list)) do state = math.max(state, 4 + optimizers.states_most(states)) end
  return (stage >= 1 and state * share or state) + (stage >= 2 and 4 * share or 4) + (stage >= 3 and 10 * share or 10)
end

-- maximum number of bytes per frozen parameter: an fp32 element in its first chunk, and one in its final chunk
local FROZEN_BYTES = 8

-- Returns the size of the disk file in bytes. This is the configured limit. If no limit is configured, it is the size
-- of this process's share of the model's state, plus the size of the chunks in which its parameters are staged.
local function disk_bytes(engine, pipeline)
  local disk = engine.cfg.memory.disk
  if not disk then return 0 end
  if disk.limit then return disk.limit end
  local counted, free = count_kept(engine, pipeline), disk_free(disk.path)
  if counted then
    local trained = counted.trained * bytes_a_parameter(engine) + 2 ^ 28
    local all = trained + (counted.numel - counted.trained) * FROZEN_BYTES + counted.blocks
    -- frozen parameters may stay in files
    if free and all > free then all = math.max(trained, math.min(all, free / 2)) end
    return math.ceil(all / 1048576) * 1048576
  end
  if not free then return 2 ^ 30 end
  engine:note("memory.disk.limit is not set, and the model's parameters cannot be counted before it is made: half of "
    .. "the disk's free space is reserved")
  return math.floor(free / 2)
end

--- Records that an engine has been closed, so that another engine can be opened.
---@param engine ps.Engine
---@return boolean was true if this engine owned the chunks of the context
function setup.closed(engine)
  if open ~= engine then return false end
  open = nil
  return true
end

--- Returns the engine that owns the chunks of the context, or nil if there is no such engine.
---@return ps.Engine?
function setup.current() return open end

--- Opens the C engine with the configuration's budgets.
---@param engine ps.Engine
---@param step ffi.cdata* the ps_step of the engine
---@param pipeline? ps.engine.Pipeline the result of setup.configure
---@return {adam_rates: table|false, ranks: ps.engine.Ranks|nil} fields of the engine
function setup.open_engine(engine, step, pipeline)
  if open then
    error("ps.initialize: another engine is open; close it with model:close() first", 0)
  end
  local memory, c = engine.cfg.memory, ffi.new("ps_chunk_config")
  c.device, c.host = engine.device, engine.host
  native.check(C.ps_policy_find(engine.policy, int_out))
  c.policy = int_out[0]
  c.prefetch = engine.cfg.prefetch and 1 or 0
  c.stress = environment.get "PS_STRESS" == "1" and 1 or 0
  c.disk_threads = environment.whole("PS_DISK_THREADS", 1) or 0
  c.disk_checksums = memory.disk and memory.disk.checksums and 1 or 0
  c.budget[0], c.budget[1], c.budget[2] = memory.device or 0, memory.host or 0, disk_bytes(engine, pipeline)
  if type(engine.cfg.prefetch) == "number" then
    for t = 0, 2 do c.ahead[t] = engine.cfg.prefetch end
  end
  local group = mesh.group "world"
  local weighs = engine.device ~= engine.host and (group ~= nil or engine.lookups or hybrid.wanted(engine))
  local adam_rates = weighs and rates.of(engine)     -- speeds are measured before budgets are in use
  scope.collect_all()                                -- garbage must not be counted in the budgets
  native.check(C.ps_engine_open(native.ctx, step, c, memory.disk and memory.disk.path or nil))
  open = engine
  local ranks = group and require("ps.engine.ranks.agreement").new(engine) or nil
  if ranks and weighs then adam_rates = rates.of(engine, function(value) return ranks:least(value) end) end
  return { adam_rates = adam_rates, ranks = ranks }
end

-- Raises an error if a module already has values, although its layers must be cut.
local function refuse_whole(request)
  local optimizer, more = request.optimizer, ""
  if optimizer then
    more = (", and optimizer = { type = \"%s\", params = { lr = %.14g } } in the configuration"):format(
      optimizer.kind.name, optimizer.given_lr or optimizer.groups[1].lr)
  end
  error("ps.initialize: this model already exists, whole on each rank, but tensor parallelism cuts layers while they "
    .. "are made: move the line that makes it into model_func = function() return MODEL_CLASS(...) end" .. more, 0)
end

-- Runs fn(...). Each packed weight is moved into a chunk as soon as the weight's blocks exist.
local function with_packed(fn, ...)
  local off = hooks.on("packed", build.to_own_chunk)
  local function done(ok, ...)
    off()
    if not ok then error((...), 0) end
    return ...
  end
  return done(pcall(fn, ...))
end

-- Runs model_func on the engine's device. Each parameter is staged in a chunk as soon as nn.Parameter creates the
-- parameter.
local function run_model(engine, model_func, to_chunk)
  local was = create.set_default_device(engine.device_name)
  local off = hooks.on("parameter", to_chunk)
  local ok, module = pcall(model_func)
  off()
  create.set_default_device(was)
  if not ok then error(module, 0) end
  if not nn_module.is_module(module) then
    error("ps.initialize: model_func returned a " .. type(module) .. ", not a "
    .. "module", 0)
  end
  collector.after_making()
  return module
end

--- Makes the module of an engine. Runs model_func and moves the parameters into chunks as soon as they are created, or
--- uses an existing module.
---@param engine ps.Engine
---@param request table
---@return {module: ps.nn.Module, stages: ps.engine.Stages|false, stays: function|nil|false} fields of the engine
function setup.make_module(engine, request)
  local shards = engine.ranks and engine.ranks.shards
  local function to_chunk(tensor) build.to_chunk(tensor, shards) end
  local cut = engine.tensor_parallel
  local given, model_func, pipeline = request.module, request.model_func, request.pipeline
  if given then origin.settle(given) end
  if given and cut and not request.is_cut then refuse_whole(request) end
  -- A stage keeps only its own parameters of an existing module. It frees the bytes of the other parameters.
  if given and pipeline and not request.stages then
    given, model_func = nil, function() return request.module end
  end
  if given then
    local cut_into = request.stages or false
    for name, p in given:named_parameters() do
      if not (cut_into and cut_into:elsewhere(name)) then to_chunk(p) end
    end
    packed.each(given, build.to_own_chunk)
    return { module = given, stages = cut_into, stays = request.stays }
  end
  model_func = model_of(model_func)
  if pipeline then
    local stages = require "ps.engine.pipeline.stages"
    local module, cut_into = with_packed(stages.make, model_func, pipeline, { device = engine.device_name,
      precision = engine.precision, stage = to_chunk, cut = cutter(engine) })
    return { module = module, stages = cut_into }
  end
  if cut then
    local tensor_parallel = require "ps.parallel.tensor.cut"
    local where = { device = engine.device_name, stage = to_chunk }
    return { module = with_packed(tensor_parallel.make, model_func, cut, where) }
  end
  return { module = with_packed(run_model, engine, model_func, to_chunk) }
end

--- Completes an error of a model that could not be created. If memory was insufficient, adds the size of the whole
--- model in bytes to the error's text.
---@param problem any
---@return any
function setup.explain(engine, problem)
  if type(problem) ~= "table" or open ~= engine then return problem end
  local group = mesh.group "dp"
  local counted = engine.module and count(engine.module)
    or engine.request_model_func and count_parameters(engine.request_model_func) or nil
  return shortage.explain(problem, counted, place_options(engine), engine.zero_stage, group and group:size() or 1)
end

local function call(module, ...) return module(...) end

-- Returns a function that calls the module, and then the script's own loss function.
local function with_loss(loss)
  return function(module, ...)
    local given = { n = select("#", ...), ... }
    local args = own_loss.inputs(given)
    return own_loss.of(loss, module(unpack(args, 1, args.n)), given)
  end
end

-- Adds the configuration's loss scale to the optimizer.
local function finish_optimizer(engine)
  local optimizer, f = engine.optimizer, engine.scaler_config
  optimizer.checks_overflow = engine.precision == "bf16" and engine.cfg.bf16.check_grad_overflow or f ~= nil
  if not f then return end
  optimizer.scaler = require("ps.optim.loss_scaler").new {
    loss_scale = f.dynamic and 0 or f.loss_scale, initial_scale = f.initial_scale,
    loss_scale_window = f.loss_scale_window, hysteresis = f.hysteresis,
    consecutive_hysteresis = f.consecutive_hysteresis, min_loss_scale = f.min_loss_scale }
end

-- Returns the function that runs a forward by calling fn(...). It may store activations on the host.
local function runner(engine, run)
  if not engine.cfg.activation_checkpointing.cpu_checkpointing then return run end
  if engine.device ~= engine.host then
    return function(...) return scope.offload_activations(run, ...) end
  end
  engine:note("activation_checkpointing.cpu_checkpointing has no effect: the model is already in host memory")
  return run
end

-- If backward cannot update the parameters of this rank, returns the reason. If it can, returns nil.
local function why_not_overlap(engine, staged)
  local optimizer = engine.optimizer
  if staged and engine.ranks.dp:size() > 1 then return "ranks share the parameters of a stage" end
  if staged and engine.stages:has_ties() then return "stages share a table" end
  if optimizer.max_norm then return "gradient_clipping needs the norm of all gradients first" end
  if optimizer.checks_overflow then return "all gradients are first checked for overflow" end
  if engine.adds_up and not staged then return "gradients of several micro-batches are added up" end
end

-- Returns true if, with this configuration, the last backward of a step may update parameters.
local function overlaps(engine, staged)
  local wanted, why = engine.cfg.overlap_optimizer, why_not_overlap(engine, staged)
  if wanted == true and why then
    engine:note(("overlap_optimizer: %s, so updates run in optimizer:step()"):format(why))
  end
  if staged and (engine.ranks.dp:size() > 1 or engine.stages:has_ties()) then return false end
  return wanted == true or wanted == "auto" and engine.device == engine.host and not staged
end

--- Completes an engine that already has its module and its optimizer.
---@param engine ps.Engine
---@return table fields of the engine
function setup.finish(engine)
  local cfg, fields = engine.cfg, {}
  if engine.stages and engine.stages.parts then
    local row = require("ps.engine.pipeline.row").new(engine, engine.stages, mesh.group "pp")
    fields.driver = require("ps.engine.pipeline.driver").new(engine, row)
  end
  local in_loops = (fields.driver or engine.driver).in_loops
  fields.slots = not engine.adds_up and engine.precision ~= "fp32" and not engine.remainder
  finish_optimizer(engine)
  if #engine.optimizer.groups > 1 and optimizers.of(cfg.optimizer.type).matrices then
    engine:note(tostring(engine.optimizer))
  end
  fields.overlap = overlaps(engine, in_loops)
  if cfg.scheduler then
    fields.scheduler = require("ps.optim.sched").from_config(cfg.scheduler, engine.optimizer)
  end
  if cfg.recompute and engine.module:recompute_blocks() == 0 then
    engine:note("recompute has no effect: the model has no nn.ModuleList whose elements could be recomputed; "
      .. "ps.recompute(fn) in its code recomputes any function")
  end
  fields.apply = engine.own_loss and with_loss(engine.own_loss) or call
  fields.run = runner(engine, in_loops and call or fields.apply)
  return fields
end

return setup
