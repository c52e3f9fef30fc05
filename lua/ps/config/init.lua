-- SPDX-License-Identifier: BSD-3-Clause
-- Reads configurations. A configuration is a Lua table, a .lua file, or an unchanged DeepSpeed .json file. config.read
-- checks the configuration and adds missing values for the engine.
--
--   local cfg, notes = config.read("ds_config.json", { available = { host = bytes } })
--
-- Names and nesting are the same as in DeepSpeed. docs/config.md lists the keys. Each key is a
-- row in config/schema.lua.
-- `notes` is a list of texts that describe accepted keys without an effect, and decisions made for the user. Callers
-- print each text once.
local caller = require "ps.core.caller"
local source = require "ps.config.source"
local check = require "ps.config.check"
local batch_sizes = require "ps.config.batch_sizes"
local memory = require "ps.config.memory"
local copied = require "ps.core.copied"
local optimizers = require "ps.optimizers"

local config = {}

---@class ps.Config all fields are set, except that fields marked with ? can be nil
---@field train_batch_size? integer nil if no batch size was given
---@field train_micro_batch_size_per_gpu? integer nil if no batch size was given
---@field gradient_accumulation_steps integer
---@field counts_micro_batches boolean whether the number of micro-batches was given, or can be computed from given
--- sizes
---@field gradient_clipping number upper bound on the global norm, or 0 for no clipping
---@field optimizer ps.config.Optimizer
---@field scheduler? {type: string, params: table} description of the schedule for sched.from_config
---@field precision "fp32"|"bf16"|"fp16" dtype of the parameters
---@field fp16 ps.config.Fp16
---@field bf16 {enabled: boolean, check_grad_overflow: boolean}
---@field grad_accum_dtype "fp32"|"param" dtype in which gradients are accumulated
---@field pipeline ps.config.Pipeline
---@field tensor_parallel {size: integer, sequence_parallel: boolean, tp_keep_gathered: boolean, tp_overlap_comm:
--- boolean|integer} tp_overlap_comm: the argument of mesh.pieces
---@field zero_optimization ps.config.Zero
---@field memory ps.config.Memory
---@field chunk_size? integer number of elements of a chunk; nil to search for the best size
---@field device "auto"|"cpu"|"sim"|"cuda"
---@field eviction string one of ps.config.policies
---@field prefetch boolean|integer an integer is the largest number of bytes that are prefetched
---@field rate_given boolean whether optimizer.params.lr was given
---@field optimizer_given boolean whether optimizer.type or optimizer.params.lr was given
---@field overlap_optimizer boolean|"auto"
---@field recompute boolean
---@field activation_checkpointing {cpu_checkpointing: boolean}
---@field strict_gradients boolean
---@field plan_print boolean|"all" true if rank 0 prints the plan, "all" if all ranks print it
---@field seed? integer
---@field use_cpu_embedding boolean|"auto"
---@field client {mem_tracer: ps.config.MemTracer, opts: table}
---@field rates {host_adam?: number, device_adam?: number, up?: number, down?: number, at_once?: number} speeds of
--- updates and copies; a rate that is nil is measured
---@field steps_per_print? integer number of steps between printed lines; nil to print no lines
---@field wall_clock_breakdown boolean
---@field memory_breakdown boolean
---@field flops_profiler ps.config.FlopsProfiler
---@field comms_logger ps.config.CommsLogger

---@class ps.config.CommsLogger
---@field enabled boolean
---@field verbose boolean
---@field prof_all boolean
---@field prof_ops? string[]

---@class ps.config.FlopsProfiler
---@field enabled boolean
---@field profile_step integer number of steps before the profiled step
---@field module_depth integer number of levels of modules, or -1 for all levels
---@field top_modules integer
---@field detailed boolean
---@field output_file? string

---@class ps.config.Optimizer
---@field type "Adam"|"AdamW"|"SGD"
---@field params {lr: number, betas: number[], eps: number, weight_decay: number, use_hybrid_adam: boolean, momentum?:
---  number, dampening?: number, nesterov?: boolean} momentum, dampening and nesterov are settings of SGD
---@field rest? table<string, any> in Muon: settings of the groups with AdamW
---@field first_momentum? number set if a schedule changes beta1 and momentum: the first momentum of groups without
--- betas

---@class ps.config.Fp16
---@field enabled boolean
---@field dynamic boolean whether overflows change the loss scale
---@field loss_scale number the fixed loss scale, or 0 if the scale is dynamic
---@field initial_scale number the initial value of a dynamic loss scale
---@field loss_scale_window integer
---@field hysteresis integer
---@field consecutive_hysteresis boolean
---@field min_loss_scale number

---@class ps.config.Pipeline
---@field stages integer
---@field schedule "gpipe"|"1f1b"|"interleaved"|"looped_bfs"|"zb_h1"|"zb_v"
---@field virtual_stages integer number of virtual stages on each process
---@field partition string "best", or another method to cut the model
---@field activation_checkpoint_interval integer 0 or 1

---@class ps.config.Zero
---@field stage integer
---@field reshard_after_forward "auto"|"always"|"never"
---@field offload_optimizer {device: "none"|"cpu"|"nvme", ratio: number, stays?: boolean} stays: whether the
--- configuration itself sets device to "none", which is also the default
---@field offload_param {device: "none"|"cpu"|"nvme"}

---@class ps.config.MemTracer
---@field overall_gpu_mem_ratio number
---@field overall_cpu_mem_ratio number
---@field margin_use_ratio number

---@class ps.config.Memory budgets in bytes
---@field kind "chunk"|"plain" with "plain", the other fields are absent
---@field device? integer nil if the budget is unknown, or if the device is the host
---@field host? integer nil if the budget is unknown
---@field disk? {path: string, limit?: integer, checksums?: boolean} nil if there is no disk tier. limit: nil means that
--- the plan determines the number of bytes

---@class ps.config.Available
---@field device? number
---@field host? number
---@field disk? number

---@class ps.config.Options
---@field asked? table<string, any[]> path -> { value, place } for values that were set outside the configuration;
--- errors name the place
---@field later? boolean whether to accept keys that only a later version honours. If false, such keys are errors.
--- Planning tools set this option
---@field world_size? integer number of processes (default: the processes of one model replica)
---@field device? string|fun(): string the device that replaces "auto"; a function is called only for the device "auto"
---@field available? ps.config.Available|fun(device: string): ps.config.Available numbers of available bytes. Ratios,
--- and shares such as "80%", are fractions of these numbers. A function is called with the configuration's device
---@field auto? table<string, any> values that replace "auto", by full path ("optimizer.params.lr") or last name ("lr")
---@field client? table settings for the section client, which override the settings in the configuration

local OF_ADAM = { adam_w_mode = true, torch_adam = true }          -- keys that are not settings of Adam

-- Raises an error for a setting that belongs to another optimizer.
local function refuse_others(state, made)
  local own, owners = {}, {}
  for _, key in ipairs(made.settings) do own[key] = true end
  for _, key in ipairs(made.rest and optimizers.of(made.rest).settings or {}) do own[key] = true end
  for _, name in ipairs(optimizers.names) do
    for _, key in ipairs(optimizers.of(name).settings) do
      if not own[key] then owners[key] = (owners[key] and owners[key] .. ", " or "") .. name end
    end
  end
  owners.muon_lr, owners.adam_lr = not made.matrices and "Muon" or nil, not made.matrices and "Muon" or nil
  if made.op ~= optimizers.of("Adam").op then for key in pairs(OF_ADAM) do owners[key] = "Adam, AdamW" end end
  for key, owner in pairs(owners) do
    local path = "optimizer.params." .. key
    if state.given[path] then
      state:fail("%s is given, but optimizer.type is \"%s\"; the key is for %s: remove it", state:shown(path),
        made.name, owner)
    end
  end
end

-- Sets the settings that are not given to the defaults of this optimizer.
local function fill_settings(state, made, params)
  for _, key in ipairs(made.settings) do
    if not state.given["optimizer.params." .. key] and (params[key] == nil or key == "betas" or key == "eps") then
      local default = made.defaults[key]
      params[key] = type(default) == "table" and copied(default) or default
    end
  end
end

-- Returns the settings of the groups with the optimizer `rest`. As in DeepSpeed, they have the configuration's weight
-- decay, and its betas and eps if these are given.
local function settings_of_rest(state, made, params)
  local settings = { weight_decay = params.weight_decay }
  for _, key in ipairs { "betas", "eps" } do
    if state.given["optimizer.params." .. key] then settings[key] = params[key] end
  end
  return made.rest and settings or nil
end

-- Determines the kind of Adam from `type` and `adam_w_mode`.
local function resolve_optimizer(state, cfg)
  local optimizer = cfg.optimizer
  local params = optimizer.params
  cfg.rate_given = state.given["optimizer.params.lr"] ~= nil
  cfg.optimizer_given = cfg.rate_given or state.given["optimizer.type"] ~= nil
  local made = optimizers.of(optimizers.find(optimizer.type))
  refuse_others(state, made)
  optimizer.type = made.name
  optimizer.rest = settings_of_rest(state, made, params)
  fill_settings(state, made, params)
  if made.op ~= optimizers.of("Adam").op then return end
  local is_w = made.name == "AdamW"
  if is_w and params.adam_w_mode == false then
    state:fail("optimizer.type is \"AdamW\" and optimizer.params.adam_w_mode is false: they contradict each other")
  end
  if not is_w and params.adam_w_mode == nil and params.weight_decay ~= 0 then
    state:note("optimizer.type \"Adam\": weight_decay %g is added to the gradient, as in PyTorch and PatrickStar; "
      .. "DeepSpeed's default is adam_w_mode = true: set that, or type \"AdamW\", for decoupled decay",
      params.weight_decay)
  end
  optimizer.type = (is_w or params.adam_w_mode) and "AdamW" or "Adam"
  params.adam_w_mode = optimizer.type == "AdamW"
end

local SCHEDULERS = {}
for _, name in ipairs(require "ps.config.schedules") do SCHEDULERS[name:lower()] = name end

-- Schedules whose option max_lr has the optimizer's rate as its default.
local RISES = { warmup_cosine = true, warmup_linear = true, constant = true }

-- Resolves cycle_momentum of DeepSpeed's OneCycle, which changes only betas.
local function resolve_cycle(state, optimizer, params)
  local made = optimizers.of(optimizer.type)
  if made.defaults.betas then
    state:note("scheduler.params.cycle_momentum: beta1 follows the cycle and beta2 is 0.99; optimizer.params.betas has "
      .. "no effect")
    return
  end
  if state.given["scheduler.params.cycle_momentum"] then
    state:fail("scheduler.params.cycle_momentum moves Adam's beta1, and optimizer.type is \"%s\"; write false",
      made.name)
  end
  params.cycle_momentum = false
  state:note("scheduler.params.cycle_momentum: off, as in DeepSpeed, because %s has no betas", made.name)
end

-- Resolves cycle_momentum of PyTorch's OneCycleLR, which changes beta1, or the momentum of groups without betas.
-- Optimizers keep a momentum buffer only if the momentum is not 0, so such groups begin with a momentum above 0.
local function resolve_cycle_of_torch(state, optimizer, params)
  optimizer.first_momentum = math.max(params.max_momentum, params.base_momentum)
  local made = optimizers.of(optimizer.type)
  local key = made.defaults.betas and "betas" or "momentum"
  local path, given = state:shown("optimizer.params." .. key), state.given["optimizer.params." .. key]
  if key == "momentum" or given then
    local unused = key == "betas" and "the first number of " .. path or path
    state:note("scheduler.params.cycle_momentum: %s follows the cycle, between %g and %g%s", key == "betas" and "beta1"
      or "the momentum", params.base_momentum, params.max_momentum, given and ("; %s has no effect"):format(unused)
      or "")
  end
end

local function resolve_scheduler(state, cfg)
  local scheduler = cfg.scheduler
  if not scheduler then return end
  local params, lr = scheduler.params, cfg.rate_given and cfg.optimizer.params.lr or nil
  local name = SCHEDULERS[scheduler.type:lower()]
  if name ~= scheduler.type then
    state:note("scheduler.type: \"%s\" is read as \"%s\", the spelling that DeepSpeed requires", scheduler.type,
      name)
  end
  scheduler.type = name
  if scheduler.type == "WarmupLR" then params.warmup_max_lr = params.warmup_max_lr or lr end
  if RISES[scheduler.type] then params.max_lr = params.max_lr or lr end
  for warmup, total in pairs { warmup_num_steps = "total_num_steps", warmup = "total",
    num_warmup_steps = "num_training_steps" } do
    if params[total] and params[warmup] and params[warmup] > params[total] then
      local path = "scheduler.params." .. warmup
      state:fail("%s is %.14g%s, so the rate would never decay; it must be at most scheduler.params.%s, which is %.14g",
        path, params[warmup], state.given[path] and "" or " (the default)", total, params[total])
    end
  end
  if params.cycle_momentum then
    if scheduler.type == "OneCycle" then resolve_cycle(state, cfg.optimizer, params)
    else resolve_cycle_of_torch(state, cfg.optimizer, params) end
  end
end

local function resolve_fp16(state, fp16)
  local by_spelling = state.given["fp16.init_scale"] or fp16.loss_scale == "dynamic"
  if fp16.enabled == nil then
    fp16.enabled = by_spelling or false
    if not by_spelling and state.given.fp16 and not state:was_auto "fp16.enabled" then
      state:note("fp16: fp16.enabled = true is missing, so fp16 is off")
    end
  end
  if fp16.init_scale and state.given["fp16.initial_scale_power"]
    and fp16.init_scale ~= 2 ^ fp16.initial_scale_power then
    state:fail("fp16.init_scale is %g and fp16.initial_scale_power is %d, which is %g: they contradict each other",
      fp16.init_scale, fp16.initial_scale_power, 2 ^ fp16.initial_scale_power)
  end
  fp16.dynamic = fp16.loss_scale == 0 or fp16.loss_scale == "dynamic"
  if fp16.dynamic then fp16.loss_scale = 0 end
  fp16.initial_scale = fp16.init_scale or 2 ^ fp16.initial_scale_power
  if fp16.enabled and fp16.dynamic and fp16.min_loss_scale > fp16.initial_scale then
    state:fail("fp16.min_loss_scale is %g, above the first scale %g (%s)", fp16.min_loss_scale, fp16.initial_scale,
      fp16.init_scale and "fp16.init_scale" or "fp16.initial_scale_power")
  end
end

local function resolve_precision(state, cfg)
  resolve_fp16(state, cfg.fp16)
  if cfg.fp16.enabled and cfg.bf16.enabled then
    state:fail("fp16.enabled and %s are both true; parameters have one type", state:shown("bf16.enabled"))
  end
  cfg.precision = cfg.fp16.enabled and "fp16" or cfg.bf16.enabled and "bf16" or "fp32"
  local types = cfg.data_types
  if types.param_dtype and types.param_dtype ~= cfg.precision then
    state:fail("data_types.param_dtype is \"%s\", but the sections fp16 and bf16 select %s; enable "
      .. "%s", types.param_dtype,
      cfg.precision, types.param_dtype == "fp32" and "neither" or types.param_dtype .. ".enabled")
  end
  local accum = types.grad_accum_dtype
  if accum and accum ~= "fp32" and accum ~= cfg.precision then
    state:fail("data_types.grad_accum_dtype is \"%s\"; gradients accumulate in fp32 or in the parameters' type, %s",
      accum, cfg.precision)
  end
  local adds_up = cfg.gradient_accumulation_steps > 1 or cfg.pipeline.stages > 1
  accum = accum or adds_up and "fp32" or cfg.precision
  cfg.grad_accum_dtype = accum == "fp32" and "fp32" or "param"
end

local function resolve_prefetch(state, cfg)
  local moves = cfg.client.opts.with_async_move
  if moves == nil then return end
  local path = state:shown("client.opts.with_async_move")
  if state.given.prefetch and (cfg.prefetch ~= false) ~= moves then
    state:fail("prefetch is %s and %s is %s: they contradict each other", check.show(cfg.prefetch), path,
      tostring(moves))
  end
  if not state.given.prefetch then cfg.prefetch = moves end
end

-- Adds a note if the vocabulary size is not a multiple of 8. DeepSpeed prints a warning in this case.
local function look_at_vocabulary(state, size)
  if size and size % 8 ~= 0 then
    state:note("vocabulary_size is %d, not a multiple of 8: products with it are slow on GPUs; %d rows would be "
      .. "fast", size,
      math.ceil(size / 8) * 8)
  end
end

-- Adds the notes about ignored keys and defaults, one note for each reason. These notes follow all other notes.
local function finish_notes(state, cfg)
  if #state.defaulted > 0 then
    local list = {}
    for i, path in ipairs(state.defaulted) do
      local value = cfg
      for name in path:gmatch("[^.]+") do value = type(value) == "table" and value[name] or nil end
      list[i] = path .. (value ~= nil and " = " .. check.show(value) or "")
    end
    state:note('"auto" was replaced: %s', table.concat(list, ", "))
  end
  for _, group in ipairs(state.ignored) do
    state:note("%s: ignored: %s", table.concat(group.paths, ", "), group.words)
  end
  return state.notes
end

-- Resolves the remaining keys of OSLO's section (model_parallelism). The sizes in this section have already been moved
-- to the sections `pipeline` and `tensor_parallel`.
local function resolve_parallelism(state, cfg)
  local off = cfg.model_parallelism.enable == false
  for _, path in ipairs { "pipeline.stages", "tensor_parallel.size" } do
    local section, key = path:match "(.*)%.(.*)"
    if off and cfg[section][key] > 1 then
      state:fail("model_parallelism.enable is false, but %s is %d", state:shown(path), cfg[section][key])
    end
  end
  if cfg.pipeline.activation_checkpoint_interval == 1 then
    if state.given.recompute and not cfg.recompute then
      state:fail("pipeline.activation_checkpoint_interval is 1 and recompute is false: they contradict each other")
    end
    cfg.recompute = true
  end
  local parts, path = cfg.tensor_parallel, "tensor_parallel.tp_overlap_comm"
  local overlap = parts.tp_overlap_comm
  if overlap and overlap ~= 1 and not parts.sequence_parallel then
    state:fail("%s is %s and tensor_parallel.sequence_parallel is false: communication can overlap only if rows are "
      .. "shared between processes; set the first to false or the second to true", state:shown(path),
      check.show(overlap))
  end
end

local OPTIONS = { world_size = "whole", device = "string|function", available = "table|function", auto = "table",
  client = "table", asked = "table", later = "boolean" }

-- Maps a checked table to the paths that were given.
local checked = setmetatable({}, { __mode = "k" })

-- Merges the argument `client` into the configuration's section of the same name, and overrides its values.
local function add_client(raw, client)
  local into = type(raw.client) == "table" and raw.client or {}
  for key, value in pairs(client) do into[key] = value end
  raw.client = into
end

--- Reads, checks and completes a configuration. The result can be passed to config.read again, even after changes.
---@param from table|string a table, the path of a .lua or JSON file, or JSON as base64
---@param options? ps.config.Options
---@return ps.Config cfg
---@return string[] notes
function config.read(from, options)
  options = caller.options(options, "config.read", OPTIONS)
  local raw, name = source.read(checked[from] and check.written(from, checked[from]) or from)
  if options.client then add_client(raw, options.client) end
  local cfg, state = check.run(raw, name, options.auto, options.asked, options.later)
  if cfg.gradient_clipping < 0 then cfg.gradient_clipping = 0 end
  resolve_optimizer(state, cfg)
  resolve_scheduler(state, cfg)
  resolve_parallelism(state, cfg)
  batch_sizes.resolve(state, cfg, batch_sizes.data_parallel(state, cfg, options.world_size))
  if checked[from] and cfg.gradient_accumulation_steps == from.gradient_accumulation_steps then
    cfg.counts_micro_batches = from.counts_micro_batches
  end
  resolve_precision(state, cfg)
  if cfg.device == "auto" then
    local auto = options.device
    if type(auto) == "function" then auto = auto() end
    cfg.device = auto or "auto"
  end
  local available = options.available or {}
  if type(available) == "function" then available = available(cfg.device) end
  memory.resolve(state, cfg, available)
  resolve_prefetch(state, cfg)
  look_at_vocabulary(state, cfg.vocabulary_size)
  checked[cfg] = state.given
  return cfg, finish_notes(state, cfg)
end

return config
