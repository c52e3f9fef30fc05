-- SPDX-License-Identifier: BSD-3-Clause
-- Every key of a configuration. Reading, errors and docs/config.md all use this table. The sections below have the keys
-- that have an effect here. schema_mesh.lua has the keys that split a model among processes, and schema_deepspeed.lua
-- has DeepSpeed's other keys. The sections of all files are joined into one list.
--
-- A section is { path, its description, rows }, with these optional fields:
--   of         the rows apply only if the parent's `type` has this value
--   acts       the default of `acts` for honoured rows.
-- Each row is { key, type, default, status, words, check =, required =, acts = }. The status is one of these:
--   honoured   does what DeepSpeed or PatrickStar document. If they do not document it, `words` describes the effect
--   ignored    is accepted, and a note is printed once; `words` says why it has no effect here
--   refused    is an error unless it has its default, because the result would differ; `words` says why
--   later      is refused, but planned for a later version
--   alias      is another name of the key in `words`; `as` converts its value
-- check(value) returns a reason to refuse a value of the right type, or nil. `acts` is the file that acts on an
-- honoured key. If only C acts on the key, `acts` is the Lua file that passes the value to C. spec/config/acts_spec.lua
-- checks that this file reads the key.
jit.off(true, true)                    -- compiled traces would keep this file in memory after it is unloaded
local types = require "ps.core.types"
local nearest = require "ps.core.nearest"
local optimizers = require "ps.optimizers"
local policies = require "ps.config.policies"

local H, I, R, L, A = "honoured", "ignored", "refused", "later", "alias"

-- The files that act on keys.
local AGREEMENT = "lua/ps/engine/ranks/agreement.lua"
local BATCH = "lua/ps/config/batch_sizes.lua"
local BUDGETS = "lua/ps/config/memory.lua"
local EMBED = "lua/ps/engine/layout/embed.lua"
local ENGINE = "lua/ps/engine/init.lua"
local GROUPS = "lua/ps/optim/engine_groups.lua"
local HYBRID = "lua/ps/engine/plan/hybrid.lua"
local OPTIMIZER = "lua/ps/engine/state/optimizer.lua"
local OPTIONS = "lua/ps/engine/layout/options.lua"
local PLANNED = "lua/ps/engine/plan/step.lua"
local RATES = "lua/ps/engine/plan/rates.lua"
local REPORT = "lua/ps/engine/report/init.lua"
local SAMPLES = "lua/ps/engine/step/samples.lua"
local SETTLED = "lua/ps/config/init.lua"
local SETUP = "lua/ps/engine/setup.lua"
local UNUSED = "lua/ps/engine/step/unused.lua"
local T = types

local REDUCE = "whole chunks are gathered and reduced, in the order of their use (docs/zero.md)"
local SAVED = "ps.checkpoints.save writes the whole model in fp32 at every stage; state_dict returns each process's "
  .. "share"
local PLAN = "the plan keeps, fetches and drops chunks by the traced order and the budgets"
local COPIES = "copies always overlap with computation, through chunk-sized buffers"
local STATIC = "chunks use the memory that other tensors leave at each moment; memory.device limits both"
local PINNED = "host memory is pinned if there is a GPU"
local OTHER = "belongs to an optimizer that does not exist here"

-- Returns a function for the field `check` of a row. The function accepts only the names in `names`. `why` is the text
-- before the list of names in errors.
local function one_of(names, why)
  return function(value)
    for _, name in ipairs(names) do
      if value:lower() == name:lower() then return nil end
    end
    local near = nearest.find(value, names)
    return (near and ('did you mean "%s"? '):format(near) or "") .. why .. table.concat(names, ", ")
  end
end

local function one_of_optimizers(value)
  return not optimizers.find(value) and one_of(optimizers.names, "chunks hold the state of ")(value) or nil
end

local function shown(value)
  if type(value) ~= "table" then return ("%.6g"):format(value) end
  return shown(value[1]) .. ", " .. shown(value[2])
end

-- Describes the defaults of a setting in ps.optim that differ from `default`: "0.01 in AdamW, LAMB; 0.1 in Muon".
local function other_defaults(key, default)
  local list, of = {}, {}
  for _, name in ipairs(optimizers.names) do
    local own = optimizers.of(name).defaults[key]
    local text = own ~= nil and shown(own)
    if text and text ~= shown(default) then
      if not of[text] then list[#list + 1] = text end
      of[text] = (of[text] and of[text] .. ", " or "") .. name
    end
  end
  for i, text in ipairs(list) do list[i] = text .. " in " .. of[text] end
  return table.concat(list, "; ")
end

local sections = {
  { "", "The keys at the top of the file. train_batch_size is train_micro_batch_size_per_gpu x "
    .. "gradient_accumulation_steps x the number of data-parallel processes, where processes that share one model's "
    .. "stages and layers count as one. A missing size is computed from the others. Without any batch size, nothing is "
    .. "checked.", {
    { "train_batch_size", T.integer(1), nil, H, "number of samples per optimizer step, over all processes",
      acts = BATCH },
    { "train_micro_batch_size_per_gpu", T.integer(1), nil, H, "number of samples per forward and backward pass; in "
      .. "training, a batch of another size is an error (model:micro_batches divides a batch by itself)",
      acts = SAMPLES },
    { "gradient_accumulation_steps", T.integer(1, T.MICRO_BATCHES), nil, H, "number of micro-batches per optimizer "
      .. "step", acts = SETUP },
    { "sequence_parallel_size", T.integer(1), 1, L, "sequences are not split among processes" },
    { "managed_gradient_accumulation", T.boolean, true, R, "the engine counts the micro-batches of a step" },
    { "steps_per_print", T.integer(0), nil, H, "number of steps between printed lines; by default, and with 0, there "
      .. "are no lines",
      acts = REPORT },
    { "wall_clock_breakdown", T.boolean, false, H, "adds to the printed lines the times of forward, backward and step, "
      .. "the process's TFLOP/s (of products and attention, including recomputation) and, if a batch size is given, "
      .. "the samples per second of all processes; without steps_per_print, a line is printed every 10 steps",
      acts = REPORT },
    { "gradient_clipping", T.number(), 0, H, "upper bound on the global norm; 0 and -1 disable clipping, as does the "
      .. "default (DeepSpeed's default is 1.0)", check = function(value)
        if value < 0 and value ~= -1 then return "a norm is not negative; 0 turns clipping off" end
      end, acts = OPTIMIZER },
    { "device", T.enum("auto|cpu|sim|cuda"), "auto", H, "the device that computes; auto selects cuda if there is a "
      .. "GPU, else cpu", acts = SETUP },
    { "memory", T.either(T.enum("plain|chunk"), T.tree), nil, H, "see the section memory", acts = ENGINE },
    { "chunk_size", T.integer(1), nil, H, "number of elements (not bytes) of a chunk (default: the size with the least "
      .. "waste)", acts = OPTIONS },
    { "default_chunk_size", T.integer(1), nil, A, "chunk_size" },
    { "compare_ranks_every", T.integer(0), 100, H, "number of steps between comparisons of the state that must be "
      .. "equal on all processes; 0 disables them", acts = ENGINE },
    { "strict_gradients", T.boolean, false, H, "whether parameters without a gradient in the first step are an error; "
      .. "if false, a printed line names them. Frozen parameters do not count", acts = UNUSED },
    { "eviction", T.enum(table.concat(policies, "|")), "plan", H, "the policy that selects the chunk to evict from a "
      .. "full tier; plan and belady use the traced step", acts = SETUP },
    { "prefetch", T.either(T.boolean, T.bytes), true, H, "whether chunks are fetched before their use, or the largest "
      .. "number of bytes that are fetched at once", acts = SETUP },
    { "overlap_optimizer", T.either(T.boolean, T.enum("auto")), "auto", H, "whether a chunk is updated during "
      .. "backward; auto does so if the result is exact", acts = SETUP },
    { "recompute", T.boolean, false, H, "whether blocks recompute their activations in backward", acts = SETUP },
    { "plan_print", T.either(T.boolean, T.enum("all")), true, H, "whether rank 0 prints the plan before step 1; with "
      .. "all, each rank prints it", acts = PLANNED },
    { "seed", T.integer(0), nil, H, "seed of the random numbers (default: their state is not changed)", acts = SETUP },
    { "release_after_init", T.boolean, false, I, "a parameter is moved to its tier and its owner as soon as it is "
      .. "created, with the weights that a single process would create" },
    { "use_cpu_embedding", T.either(T.boolean, T.enum("auto")), "auto", H, "whether embeddings are looked up on the "
      .. "host; auto does so if it makes a step shorter (PatrickStar's default is true)", acts = EMBED },
    { "mem_tracer", T.tree, nil, A, "client.mem_tracer" },
    { "memtracer", T.tree, nil, A, "client.mem_tracer" },
    { "bfloat16", T.tree, nil, A, "bf16" },
  } },
  { "memory", 'Memory budgets. With "plain", everything stays where it was created. With "chunk", the default, memory '
    .. "is managed in chunks, with budgets from client.mem_tracer.", acts = SETUP, {
    { "kind", T.enum("chunk|plain"), "chunk", H, "\"plain\" has the same effect as memory = \"plain\"", acts = ENGINE },
    { "master", T.enum("auto|full|remainder"), "full", H, "how fp32 values are kept. With remainder, only the lower "
      .. "half of the fp32 value is kept in addition to a bf16 parameter, which takes 2 bytes instead of 4; auto does "
      .. "so if it saves memory", acts = SETUP },
    { "device", T.budget, nil, H, "budget of the accelerator (default: the share overall_gpu_mem_ratio of its free "
      .. "memory)" },
    { "host", T.budget, nil, H, "budget of the host (default: the share overall_cpu_mem_ratio of its free memory)" },
  } },
  { "memory.disk", "The third tier, which is one file that is removed at exit.", acts = SETUP, {
    { "path", T.path, nil, H, "folder for the file" },
    { "limit", T.budget, nil, H, "largest size of the file (default: the size of this process's share of the model "
      .. "state, plus the space needed to make the model)" },
    { "checksums", T.boolean, false, H, "whether bytes read from the file are compared with the written bytes; damage "
      .. "is then an error" },
  } },
  { "rates", "Speeds with which the plan of an accelerator decides where Adam runs and where embeddings are looked up. "
    .. "Missing speeds are measured once per process (docs/memory.md).", acts = RATES, {
    { "host_adam", T.above_zero, nil, H, "parameters per second that Adam updates on the host while copies run" },
    { "device_adam", T.above_zero, nil, H, "parameters per second that Adam updates on the device" },
    { "up", T.bytes, nil, H, "bytes per second from the host to the device, with both directions busy" },
    { "down", T.bytes, nil, H, "bytes per second from the device to the host, with both directions busy" },
    { "at_once", T.ratio, nil, H, "share of the device's time in Adam during which the host is free to work" },
  } },
  { "optimizer", "Without this section, the optimizer is Adam with its defaults.", {
    { "type", T.string, "Adam", H, "a name of ps.optim (docs/optimizers.md), DeepSpeed or Hugging Face. "
      .. "Adam adds the decay to the gradient, as in PyTorch and PatrickStar, unless adam_w_mode is true (which is "
      .. "DeepSpeed's default)",
      check = one_of_optimizers, acts = OPTIMIZER },
    { "legacy_fusion", T.boolean, false, I, "the update is always one pass" },
  } },
  { "optimizer.params", "The defaults are DeepSpeed's.", acts = GROUPS, {
    { "lr", T.fp32, 1e-3, H, "learning rate. Here the default is the same for all types; ps.optim has other defaults "
      .. "for some (" .. other_defaults("lr", 1e-3) .. ")" },
    { "betas", T.betas, { 0.9, 0.999 }, H, "decay of the averages in Adam, LAMB and Lion (default "
      .. other_defaults("betas", { 0.9, 0.999 }) .. "); with type Muon, of its groups with AdamW" },
    { "eps", T.fp32, 1e-8, H, "addend to the root in Adam, LAMB and RMSprop, and smallest norm in Muon (default "
      .. other_defaults("eps", 1e-8) .. "); with type Muon, also the addend of its groups with AdamW" },
    { "weight_decay", T.fp32, 0, H, "weight decay (see type), with type Muon also of its groups with AdamW; SGD "
      .. "adds it to the gradient. Here the default is the same for all types; ps.optim, and groups of param_groups "
      .. "with another optimizer, have other defaults for some (" .. other_defaults("weight_decay", 0) .. ")" },
    { "momentum", T.fp32, nil, H, "momentum of SGD and RMSprop (default 0, which needs no state) and of Muon (default "
      .. "0.95)" },
    { "alpha", T.ratio, nil, H, "decay of the average of squares in RMSprop (default 0.99)" },
    { "dampening", T.fp32, nil, H, "in SGD, 1 - dampening of a gradient is added to the momentum (default 0)" },
    { "nesterov", T.boolean, nil, H, "whether SGD (default false) and Muon (default true) use Nesterov's momentum" },
    { "maximize", T.boolean, false, R, "not implemented" },
    { "adam_w_mode", T.boolean, nil, H, "true selects AdamW, false Adam (default: according to type)", acts = SETTLED },
    { "use_hybrid_adam", T.boolean, true, H, "whether state that fits on the device next to the model is updated "
      .. "there, also with SGD; if false, all state is updated on the host", acts = HYBRID },
    { "torch_adam", T.boolean, false, I, "there is one Adam, and it is fused" },
    { "amsgrad", T.boolean, false, R, "not implemented" },
    { "bias_correction", T.boolean, true, R, "Adam here always corrects its bias" },
    { "max_grad_norm", T.any, nil, R, "set gradient_clipping at the top" },
    { "max_coeff", T.any, nil, R, OTHER }, { "min_coeff", T.any, nil, R, OTHER },
    { "coeff_beta", T.any, nil, R, OTHER }, { "factor_max", T.any, nil, R, OTHER },
    { "factor_min", T.any, nil, R, OTHER }, { "factor_threshold", T.any, nil, R, OTHER },
    { "freeze_step", T.any, nil, R, OTHER }, { "cuda_aware", T.any, nil, R, OTHER },
    { "comm_backend_name", T.any, nil, R, OTHER },
    { "muon_lr", T.fp32, nil, H, "in Muon, the rate of its matrices (default lr)" },
    { "adam_lr", T.fp32, nil, H, "in Muon, the rate of all other parameters (default lr)" },
    { "ns_coefficients", T.numbers(3), nil, H, "in Muon, the coefficients a, b and c of an iteration" },
    { "ns_steps", T.integer(1, 99), nil, H, "in Muon, the number of iterations" },
    { "adjust_lr_fn", T.enum("original|match_rms_adamw|spectral_unclamped"), nil, H,
      "in Muon, how the rate depends on the shape, by PyTorch's names" },
    { "beta2_decay", T.number(nil, 0), nil, H, "in Adafactor, averages keep the share 1 - step ^ beta2_decay" },
    { "decay_rate", T.number(nil, 0), nil, H, "in HuggingFaceAdafactor, what beta2_decay is in Adafactor" },
    { "eps1", T.number(0), nil, H, "in both Adafactors, the first number of their eps" },
    { "eps2", T.number(0), nil, H, "in both Adafactors, the second number of their eps" },
    { "d", T.number(1), nil, H, "in Adafactor, the upper bound on the root mean square of an update" },
    { "clip_threshold", T.number(0), nil, H, "in HuggingFaceAdafactor, what d is in Adafactor" },
    { "scale_parameter", T.boolean, nil, H, "in HuggingFaceAdafactor, whether rates are multiples of a parameter's "
      .. "size" },
    { "relative_step", T.boolean, nil, H, "in HuggingFaceAdafactor, whether the rate depends on the step" },
    { "warmup_init", T.boolean, nil, H, "in HuggingFaceAdafactor, whether the rate of relative_step rises slowly" },
    { "grad_averaging", T.boolean, nil, H, "in LAMB, whether the average adds 1 - beta1 of a gradient instead of all "
      .. "of it" },
    { "always_adapt", T.boolean, nil, H, "in LAMB, whether rates depend on norms without weight decay, too" },
    { "trust_clip", T.boolean, nil, H, "in LAMB, whether the ratio of norms is limited to 1" },
    { "warmup_steps", T.integer(0, 2 ^ 53), nil, H, "in AdamWScheduleFree, the number of steps in which the rate rises "
      .. "to lr (default 0)" },
    { "r", T.number(0, 1e3), nil, H, "in AdamWScheduleFree, the weight of step k in the average is k ^ r times a power "
      .. "of the rate (default 0)" },
    { "weight_lr_power", T.number(0, 1e3), nil, H, "in AdamWScheduleFree, that power of the largest rate so far "
      .. "(default 2)" },
    { "ns_method", T.any, nil, R, OTHER },
  } },
  { "fp16", "Training with fp16 parameters, fp32 masters and a loss scale. If neither fp16 nor bf16 is enabled, "
    .. "training uses fp32.", acts = SETUP, {
    { "enabled", T.boolean, nil, H, "whether to train in fp16 (default: true with init_scale or loss_scale "
      .. "\"dynamic\", else false)", acts = SETTLED },
    { "loss_scale", T.either(T.number(0, 2 ^ 127), T.enum("dynamic")), 0, H,
      "a fixed scale, or 0 or \"dynamic\" for a scale that adapts to overflows", acts = SETTLED },
    { "initial_scale_power", T.integer(0, 127), 16, H, "the initial scale is 2 to this power", acts = SETTLED },
    { "init_scale", T.scale, nil, H, "the initial scale itself (PatrickStar's later spelling)", acts = SETTLED },
    { "loss_scale_window", T.integer(1), 1000, H, "number of steps without an overflow before the scale is doubled" },
    { "hysteresis", T.integer(1), 2, H, "number of overflows before the scale is halved" },
    { "consecutive_hysteresis", T.boolean, false, H, "whether a step without an overflow restores the whole "
      .. "hysteresis" },
    { "min_loss_scale", T.scale, 1, H, "the smallest scale" },
    { "auto_cast", T.boolean, false, I, "inputs are not cast; a script converts float inputs itself (x:to \"fp16\")" },
    { "fp16_master_weights_and_grads", T.boolean, false, R, "masters are fp32" },
  } },
  { "bf16", "Training with bf16 parameters and fp32 masters.", {
    { "enabled", T.boolean, false, H, "whether to train in bf16", acts = SETTLED },
    { "check_grad_overflow", T.boolean, false, H, "whether a step is skipped if its gradients are not finite; it is "
      .. "off by default (in DeepSpeed on), because it needs all gradients before the first update", acts = SETUP },
    { "immediate_grad_update", T.boolean, false, I, "gradients are always accumulated as soon as they are computed" },
    { "bf16_master_weights_and_grads", T.boolean, false, R, "masters have fp32 values; set memory.master = "
      .. "\"remainder\" for smaller masters" },
    { "bf16_optimizer_states", T.boolean, false, R, "optimizer.type selects the type of the states; set AdamWBF16 or "
      .. "AdamW8bit for smaller states" },
  } },
  { "data_types", "", {
    { "grad_accum_dtype", T.dtype, nil, H, "dtype in which gradients are accumulated: fp32 or the parameters' dtype "
      .. "(default: fp32 with more than one micro-batch)", acts = SETTLED },
    { "param_dtype", T.dtype, nil, H, "dtype of the parameters, which must agree with fp16 and bf16", acts = SETTLED },
    { "buffer_dtype", T.dtype, nil, I, "the model sets the types of its buffers" },
  } },
  { "zero_optimization", "Sharding of the state over several processes. A single process holds all state at every "
    .. "stage.", {
    { "stage", T.integer(0, 3), 0, H, "the state that is sharded over the processes: none (0), optimizer state (1), "
      .. "also gradients (2), or also parameters (3) (docs/zero.md)", acts = SETUP },
    { "reshard_after_forward", T.enum "auto|always|never", "auto", H, "in stage 3, when parameters of other processes "
      .. "are gathered: for each forward and each backward (always), or once per step, after which they are kept until "
      .. "the end of the step (never). auto selects never in a model of several pipeline stages, else always. In such "
      .. "a model, never and auto also sum the gradients of stages 2 and 3 over the processes once per step, and "
      .. "always does so in each backward",
      acts = AGREEMENT },
    { "cpu_offload", T.boolean, false, H, "former spelling of offload_optimizer = {device = \"cpu\"}", acts = BUDGETS },
    { "cpu_offload_params", T.boolean, false, H, "former spelling of offload_param = {device = \"cpu\"}",
      acts = BUDGETS },
    { "cpu_offload_use_pin_memory", T.boolean, false, I, PINNED },
    { "contiguous_gradients", T.boolean, true, I, "gradients are in chunks" },
    { "reduce_scatter", T.boolean, true, I, REDUCE },
    { "reduce_bucket_size", T.integer(0), 5e8, I, REDUCE },
    { "use_multi_rank_bucket_allreduce", T.boolean, true, I, REDUCE },
    { "allgather_partitions", T.boolean, true, I, REDUCE },
    { "allgather_bucket_size", T.integer(0), 5e8, I, REDUCE },
    { "overlap_comm", T.boolean, nil, I, REDUCE },
    { "round_robin_gradients", T.boolean, false, I, REDUCE },
    { "stage3_gather_16bit_weights_on_model_save", T.boolean, false, I, SAVED },
    { "stage3_gather_fp16_weights_on_model_save", T.boolean, false, I, SAVED },
    { "stage3_use_all_reduce_for_fetch_params", T.boolean, false, I, REDUCE },
    { "stage3_allgather_sequential", T.boolean, false, I, REDUCE },
    { "zero_hpz_partition_size", T.integer(1), 1, I, REDUCE },
    { "zero_quantized_weights", T.boolean, false, I, REDUCE },
    { "zero_quantized_nontrainable_weights", T.boolean, false, I, REDUCE },
    { "zero_quantized_gradients", T.boolean, false, I, REDUCE },
    { "zeropp_loco_param", T.tree, nil, I, REDUCE },
    { "mics_shard_size", T.integer(-1), -1, I, REDUCE },
    { "mics_hierarchical_params_gather", T.boolean, false, I, REDUCE },
    { "sub_group_size", T.integer(1), 1e9, I, PLAN },
    { "stage3_prefetch_bucket_size", T.integer(0), 5e7, I, PLAN },
    { "stage3_param_persistence_threshold", T.integer(0), 1e5, I, PLAN },
    { "stage3_model_persistence_threshold", T.integer(0), nil, I, PLAN },
    { "stage3_max_live_parameters", T.integer(0), 1e9, I, PLAN },
    { "stage3_max_reuse_distance", T.integer(0), 1e9, I, PLAN },
    { "stage3_module_granularity_threshold", T.integer(0), 0, I, PLAN },
    { "leaf_module", T.tree, nil, I, PLAN },
    { "log_trace_cache_warnings", T.boolean, false, I, PLAN },
    { "load_from_fp32_weights", T.boolean, true, I, "masters are loaded from the fp32 state if the file has it" },
    { "elastic_checkpoint", T.boolean, false, I, "a checkpoint fits any budget and layout" },
    { "pipeline_loading_checkpoint", T.boolean, false, I, "checkpoints are read tensor by tensor" },
    { "ignore_unused_parameters", T.boolean, true, I, "parameters without a gradient keep their values" },
    { "legacy_stage1", T.boolean, false, I, "there is one implementation" },
    { "memory_efficient_linear", T.boolean, true, I, "linear layers keep only their input" },
    { "override_module_apply", T.boolean, true, I, "models are plain Lua; nothing is overridden" },
    { "enable_sanity_checks", T.boolean, false, I, "states of chunks are always checked" },
    { "grad_hooks", T.boolean, true, I, "the engine needs no hooks to see gradients" },
    { "save_muon_momentum_buffer_in_memory", T.boolean, false, I, "the plan decides which states stay in memory" },
  } },
  { "zero_optimization.offload_optimizer", "Where masters, exp_avg and exp_avg_sq are stored.", {
    { "device", T.enum("none|cpu|nvme"), "none", H, "with cpu, updates run on the host and their state stays there; "
      .. "nvme adds a disk tier; an explicit none keeps state and updates on the device, or is an error if they do not "
      .. "fit. By default, they are divided between host and device so that a step is as short as possible",
      acts = HYBRID },
    { "nvme_path", T.path, nil, H, "folder of the disk tier, like memory.disk.path", acts = BUDGETS },
    { "ratio", T.ratio, 1.0, H, "with cpu and nvme, the share of the updates, in parameters, that run on the host",
      acts = HYBRID },
    { "pin_memory", T.boolean, true, I, PINNED },
    { "buffer_count", T.integer(1), 4, I, COPIES },
    { "pipeline_read", T.boolean, false, I, COPIES },
    { "pipeline_write", T.boolean, false, I, COPIES },
    { "fast_init", T.boolean, false, I, "the state starts as zeros without being written" },
    { "super_offload", T.boolean, false, I, "the update already overlaps with backward if that is exact" },
    { "cpuadam_cores_perc", T.ratio, 0.8, I, "Adam runs on the compute threads" },
  } },
  { "zero_optimization.offload_param", "Where parameters are stored.", {
    { "device", T.enum("none|cpu|nvme"), "none", H, "nvme adds the disk tier; none and cpu have no effect and print a "
      .. "note: parameters are on the device while memory.device has room, otherwise on the host", acts = BUDGETS },
    { "nvme_path", T.path, nil, H, "folder of the disk tier, like memory.disk.path", acts = BUDGETS },
    { "ratio", T.ratio, 1.0, I, PLAN },
    { "pin_memory", T.boolean, true, I, PINNED },
    { "buffer_count", T.integer(1), 5, I, COPIES },
    { "buffer_size", T.integer(1), 1e8, I, COPIES },
    { "max_in_cpu", T.integer(0), 1e9, I, "memory.host is the limit" },
  } },
  { "activation_checkpointing", "", {
    { "cpu_checkpointing", T.boolean, false, H, "whether activations are kept on the host until "
      .. "backward", acts = SETUP },
    { "partition_activations", T.boolean, false, I, "each process keeps its own activations" },
    { "contiguous_memory_optimization", T.boolean, false, I, "activations are in arenas, which do not fragment" },
    { "number_checkpoints", T.integer(0), nil, I, "no memory is reserved for them" },
    { "synchronize_checkpoint_boundary", T.boolean, false, I, "a debugging aid for streams" },
    { "profile", T.boolean, false, I, "ps.profiler.report { by = \"module\" } reports the time of each" },
  } },
  { "client", "PatrickStar's client. Each key is optional.", {
    { "memtracer", T.tree, nil, A, "client.mem_tracer" },
  } },
  { "client.mem_tracer", "Budgets as shares, if the section memory has none.", {
    { "warmup_gpu_chunk_mem_ratio", T.share, 0.1, I, "a dry run precedes the first step, which is planned like the "
      .. "others" },
    { "overall_gpu_mem_ratio", T.share, 0.8, H, "share of the device memory that is free or held by this process",
      acts = BUDGETS },
    { "overall_cpu_mem_ratio", T.share, 0.8, H, "share of the host memory that is free or held by this process, "
      .. "divided equally among the processes of a machine",
      acts = BUDGETS },
    { "margin_use_ratio", T.ratio, 0.8, H, "share of the device's remaining memory for optimizer chunks",
      acts = HYBRID },
    { "with_static_partition", T.boolean, false, I, STATIC },
    { "use_async_mem_monitor", T.boolean, true, I, "the tracer counts every allocation and does not sample" },
    { "use_fake_dist", T.boolean, false, R, "several processes on one device are not simulated" },
  } },
  { "client.opts", "", {
    { "with_async_move", T.boolean, nil, H, "another name for prefetch (PatrickStar's default is "
      .. "false)", acts = SETTLED },
    { "with_mem_saving_comm", T.boolean, false, I, REDUCE },
    { "with_mem_cache", T.boolean, false, I, "the memory of a freed chunk is always kept for the next one" },
  } },
}

for _, name in ipairs { "ps.config.schema_scheduler", "ps.config.schema_mesh", "ps.config.schema_deepspeed" } do
  for _, section in ipairs(require(name)(types, one_of)) do sections[#sections + 1] = section end
end

---@class ps.config.Row
---@field key string
---@field path string
---@field type ps.config.Type
---@field default any
---@field status "honoured"|"ignored"|"refused"|"later"|"alias"
---@field words string
---@field check? fun(value: any): string?
---@field as? fun(value: any): any for an alias: converts the value for the other key, or returns false if the other key
--- gets no value
---@field required? boolean
---@field acts? string for an honoured key: the file that acts on it

---@class ps.config.Node a section and its subsections
---@field path string
---@field rows ps.config.Row[]
---@field row table<string, ps.config.Row>
---@field subs table[] {name =, node =}
---@field sub table<string, ps.config.Node>
---@field variants? table<string, ps.config.Node> the sections for values of the parent's type
---@field of? string the value of the parent's type for which this section applies
---@field siblings? table<string, ps.config.Node> the sections for other values of the parent's type
---@field optional? boolean whether the section is absent from the result if the file does not have it
---@field refused? string the reason why the whole section is refused
local schema = { sections = sections, statuses = { H, I, R, L, A } }

local function node(path) return { path = path, rows = {}, row = {}, subs = {}, sub = {} } end

-- Returns the node of a path. Creates it and its parents if they are missing.
local function reach(root, path)
  local at, walked = root, nil
  for name in path:gmatch("[^.]+") do
    walked = walked and walked .. "." .. name or name
    if not at.sub[name] then
      at.sub[name] = node(walked)
      at.subs[#at.subs + 1] = { name = name, node = at.sub[name] }
    end
    at = at.sub[name]
  end
  return at
end

schema.root = node("")
for _, section in ipairs(sections) do
  local path, at = section[1], reach(schema.root, section[1])
  if section.of then
    at.variants = at.variants or {}
    at.variants[section.of] = node(path)
    at.variants[section.of].siblings = at.variants
    at = at.variants[section.of]
    at.of = section.of
  end
  at.optional, at.refused = section.optional, section.refused
  for i, row in ipairs(section[3]) do
    local made = { key = row[1], type = row[2], default = row[3], status = row[4], words = row[5], check = row.check,
      as = row.as, required = row.required, acts = row[4] == H and (row.acts or section.acts) or nil,
      path = (path ~= "" and path .. "." or "") .. row[1] }
    section[3][i], at.rows[#at.rows + 1], at.row[made.key] = made, made, made
  end
end
schema.root.row.memory.section = true      -- a table here is the section of the same name

return schema
