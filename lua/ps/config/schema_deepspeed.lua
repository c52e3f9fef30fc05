-- SPDX-License-Identifier: BSD-3-Clause
-- DeepSpeed's remaining keys. Each key either has no effect here, or is refused because it would change the result.
-- This file is a part of schema.lua and has the same form.
jit.off(true, true)                    -- compiled traces would keep this file in memory after it is unloaded
local call_names = require "ps.core.call_names"

local H, I, R, L = "honoured", "ignored", "refused", "later"

-- The files that act on keys.
local COMMS = "lua/ps/profile/comms_summary.lua"
local FLOPS = "lua/ps/engine/report/flops_profiler.lua"
local MONITOR = "lua/ps/monitor/init.lua"
local REPORT = "lua/ps/engine/report/init.lua"
local SETTLED = "lua/ps/config/init.lua"

local ACCOUNT = "it sends a run to a service through that service's client and account, and training opens no external "
  .. "connections; tensorboard, csv_monitor and the JSONL log of ps.train.run write files"
local CHECKPOINT = "ps.checkpoints.save writes a file, or a folder of all processes, atomically; DeepSpeed's folders "
  .. "are not read or written"
local SEQUENCE = "sequences are not split among processes"
local TUNER = "the plan finds the settings, without trial runs"
local GRAPH = "there is no graph compiler"
local DIVIDED = "gradients are summed over the processes in fp32 and divided once, in the update"
local TRAVEL = "values are sent between processes in the type in which they are stored; sums are in fp32"
local LATE = "delayed updates change the result"
local OFF = "has no effect while the section is off"

-- If a feature is enabled in a table, returns the reason to refuse the table. Otherwise returns nil.
local function enabled_inside(value, path)
  if type(value) ~= "table" then return nil end
  for key, item in pairs(value) do
    local here = path and path .. "." .. tostring(key) or tostring(key)
    if key == "enabled" and item == true then return here .. " is true, and that would change the model" end
    local inside = enabled_inside(item, here)
    if inside then return inside end
  end
end

local function not_empty(value)
  if next(value) ~= nil then return "it is not empty" end
end

-- Returns nil if each item of a list is the name of a call between processes. Otherwise returns an error about the
-- first item that is not such a name.
local function known_calls(list)
  for _, name in ipairs(list) do
    if type(name) ~= "string" or not call_names[name] then
      local names = {}
      for known in pairs(call_names) do names[#names + 1] = known end
      table.sort(names)
      return ("%s is not a known call; there are %s"):format(tostring(name), table.concat(names, ", "))
    end
  end
end

-- Returns a section that is refused as a whole, because its presence alone enables the feature.
local function zenflow(T)
  local rows = {}
  for key in ("topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
    .. "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"):gmatch("%S+") do
    rows[#rows + 1] = { key, T.any, nil, R, LATE }
  end
  return { "zero_optimization.zenflow", "", rows, refused = LATE }
end

-- Returns the section of a monitor that writes files.
local function monitor(T, path, files)
  return { path, "Writes the loss (over all ranks and micro-batches), the learning rate and the loss scale of each "
    .. "step as " .. files
    .. ", with `wall_clock_breakdown` also its times. Events have DeepSpeed's names; their x is the number of samples "
    .. "so far, which needs a batch size in the configuration.", acts = MONITOR, {
    { "enabled", T.boolean, false, H, "whether rank 0 writes " .. files },
    { "output_path", T.string, "", H, "the folder, or empty for the script's working folder" },
    { "job_name", T.path, "DeepSpeedJobName", H, "a subfolder, which is created if it is missing" } } }
end

---@param T table ps.core.types
---@return table[] sections
return function(T)
  local off = { "enabled", T.boolean, false }

  -- Returns a section in which all keys have the same reason. Each key is { key, type, default }.
  local function all(path, words, why, keys)
    local rows = {}
    for i, key in ipairs(keys) do rows[i] = { key[1], key[2], key[3], I, why } end
    return { path, words, rows }
  end

  -- Returns a section that must be disabled. `why` is the reason to refuse it, and `keys` are its other keys.
  local function never(path, why, keys)
    local section = all(path, "", OFF, keys)
    table.insert(section[3], 1, { "enabled", T.boolean, false, R, why })
    return section
  end

  local sections = {
    { "", "DeepSpeed's other keys at the top of the file.", {
      { "memory_breakdown", T.boolean, false, H, "whether to print, after each line of steps_per_print (by default "
        .. "every 10 steps), the current and peak bytes of each tier, and the largest tensors of the device's "
        .. "peak", acts = REPORT },
      { "dump_state", T.boolean, false, I, "the plan is printed instead (plan_print)" },
      { "dataloader_drop_last", T.boolean, false, I, "a script makes its own loader" },
      { "log_level", T.any, nil, I, "the environment variable PS_LOG sets the log level" },
      { "graph_harvesting", T.boolean, false, I, GRAPH },
      { "prescale_gradients", T.boolean, false, I, DIVIDED },
      { "gradient_predivide_factor", T.above_zero, 1.0, I, DIVIDED },
      { "gradient_allreduce_op", T.enum("mean|sum"), "mean", R,
        "the loss is the mean over the targets of all processes; gradients of their sum would be "
          .. "larger by the number of processes" },
      { "sparse_gradients", T.boolean, false, I, "gradients of embeddings are dense; their values are the same" },
      { "communication_data_type", T.string, nil, I, TRAVEL },
      { "seq_parallel_communication_data_type", T.string, "fp32", I, SEQUENCE },
      { "fp32_allreduce", T.boolean, false, I, TRAVEL },
      { "disable_allgather", T.boolean, false, I, "a parameter sharded by stage 3 is gathered when it is read" },
      { "zero_allow_untested_optimizer", T.boolean, false, I, "only the optimizers of ps.optim are supported" },
      { "zero_force_ds_cpu_optimizer", T.boolean, true, I, "every tier has the same optimizers" },
      { "vocabulary_size", T.integer(1), nil, H, "a size that is not a multiple of 8 is noted, because products with "
        .. "it are slow on GPUs. Nothing is padded", acts = SETTLED },
      { "use_data_before_expert_parallelism", T.boolean, false, I, "there are no experts" },
      { "sparse_attention", T.tree, nil, R, "attention here is dense; the model would be a different one",
        check = not_empty },
      { "compression_training", T.tree, nil, I, "nothing is compressed", check = enabled_inside },
      { "quantize_training", T.tree, nil, I, "nothing is quantized", check = enabled_inside },
      { "weight_quantization", T.tree, nil, I, "it is for inference", check = enabled_inside },
      { "hybrid_engine", T.tree, nil, I, "training and generation already use the same weights" },
      { "timers", T.tree, nil, I, "wall_clock_breakdown and ps.profiler report times" },
    } },
    never("amp", "Apex is not supported; use bf16 or fp16", { { "opt_level", T.string } }),
    never("torch_autocast", "types are chosen per model, not per op; use bf16 or fp16", {
      { "dtype", T.string, "bfloat16" }, { "lower_precision_safe_modules", T.list } }),
    never("progressive_layer_drop", "no layers are dropped", {
      { "theta", T.number(), 1.0 }, { "gamma", T.number(), 0.001 } }),
    never("curriculum_learning", "the script chooses its data; this would shorten sequences", {
      { "curriculum_type", T.string }, { "min_difficulty", T.number() }, { "max_difficulty", T.number() },
      { "schedule_type", T.string }, { "schedule_config", T.tree } }),
    never("data_efficiency", "the script chooses its data", {
      { "seed", T.integer(), 1234 }, { "data_sampling", T.tree }, { "data_routing", T.tree },
      { "dynamic_batching", T.tree } }),
    all("eigenvalue", "", "it is part of compression, which does not exist here", {
      off, { "verbose", T.boolean, false }, { "max_iter", T.integer(1), 100 }, { "tol", T.number(0), 1e-2 },
      { "stability", T.number(0), 1e-6 }, { "gas_boundary_resolution", T.integer(1), 1 },
      { "layer_name", T.string }, { "layer_num", T.integer(0), 0 } }),
    zenflow(T),
    { "aio", "", {
      { "block_size", T.integer(1), 1048576, I, "reads and writes have the length of a chunk, split as the kernel "
        .. "needs" },
      { "queue_depth", T.integer(1), 8, I, "the plan sets the number of requests in flight" },
      { "intra_op_parallelism", T.integer(1), 1, I, "one thread owns the ring" },
      { "thread_count", T.integer(1), 1, "alias", "aio.intra_op_parallelism" },
      { "single_submit", T.boolean, false, I, "the disk tier submits all requests that are ready" },
      { "overlap_events", T.boolean, true, I, "transfers always overlap" },
      { "use_gds", T.boolean, false, I, "chunks are copied through the host" },
    } },
    { "sequence", "", { { "autosp_size", T.integer(1), 1, L, SEQUENCE } } },
    { "expert_parallel", "", {
      { "enabled", T.boolean, false, L, "there are no experts" },
      { "autoep_size", T.integer(1), 1, I, OFF }, { "preset_model", T.string, nil, I, OFF },
      { "top_k", T.either(T.integer(1), T.enum("auto")), "auto", I, OFF },
    } },
    { "flops_profiler", "Reports time, operations and bytes of one step by module, from the record of events "
      .. "(docs/profiling.md), printed once. With several processes, rank 0 reports its own step. The "
      .. "profiler discards a record that ps.profiler.stop ended before that step.", acts = FLOPS, {
      { "enabled", T.boolean, false, H, "whether to write the report after the profiled step" },
      { "profile_step", T.integer(0), 1, H, "number of steps before the profiled step" },
      { "module_depth", T.integer(-1), -1, H, "number of levels of modules below the model that are reported, or -1 "
        .. "for all" },
      { "top_modules", T.integer(0), 1, H, "number of modules of each level that are listed: those with the most time, "
        .. "and those with the most operations" },
      { "detailed", T.boolean, true, H, "whether to add the table of all modules" },
      { "output_file", T.path, nil, H, "file for the report (default: the terminal)" },
      { "recompute_fwd_factor", T.number(0), 0, I, "the record contains recomputed forwards, so they are counted" } } },
    monitor(T, "tensorboard", "event files of TensorBoard"),
    never("wandb", ACCOUNT, {
      { "group", T.string }, { "team", T.string }, { "project", T.string, "deepspeed" } }),
    monitor(T, "csv_monitor", "a CSV file for each event"),
    never("comet", ACCOUNT, {
      { "samples_log_interval", T.integer(1), 100 }, { "project", T.string }, { "workspace", T.string },
      { "api_key", T.string }, { "experiment_name", T.string }, { "experiment_key", T.string },
      { "online", T.boolean }, { "mode", T.string } }),
    { "comms_logger", "Counts and times calls between processes, by call and size, from the record of events "
      .. "(docs/profiling.md).", acts = COMMS, {
      { "enabled", T.boolean, false, H, "whether to count the calls; rank 0 prints DeepSpeed's table when the engine "
        .. "is closed, and in ps.comms_logger.log_summary()", acts = REPORT },
      { "verbose", T.boolean, false, H, "whether rank 0 prints each call when it ends" },
      { "prof_all", T.boolean, true, H, "whether to count all calls; if false, only the calls in prof_ops are "
        .. "counted" },
      { "prof_ops", T.list, nil, H, "names of calls, such as \"all_reduce\"; a call on chunks has the name of its "
        .. "operation, so a gather of chunks is an \"all_gather\"", check = known_calls },
      { "debug", T.boolean, false, R, "C begins most calls, so they have no calling function in the script; a profile "
        .. "(ps.profiler.save) has each call with its step and phase" } } },
    all("checkpoint", "", CHECKPOINT, {
      { "tag_validation", T.string, "Warn" }, { "load_universal", T.boolean, false },
      { "use_node_local_storage", T.boolean, false }, { "checkpoint_serialization", T.boolean, true } }),
    all("checkpoint.parallel_write", "", CHECKPOINT, { { "pipeline_stage", T.boolean, false } }),
    all("checkpoint.writer", "", CHECKPOINT, {
      { "type", T.string, "fast" }, { "io_buffer_size", T.integer(1), 64 * 1024 * 1024 },
      { "io_buffer_double", T.boolean, true }, { "io_multiplier", T.integer(1), 1 }, { "data_parallel", T.string },
      { "show_statistics", T.boolean, false }, { "decoupled", T.boolean, false } }),
    all("datastates_ckpt", "", CHECKPOINT, { { "host_cache_size", T.number(0) } }),
    all("nebula", "", CHECKPOINT, {
      off, { "persistent_storage_path", T.string }, { "persistent_time_interval", T.number(0), 100 },
      { "num_of_version_in_retention", T.integer(0), 2 }, { "enable_nebula_load", T.boolean, true },
      { "load_path", T.string } }),
    all("compile", "", GRAPH, {
      { "deepcompile", T.boolean, false }, { "free_activation", T.boolean, false },
      { "offload_activation", T.boolean, false }, { "offload_activation_pin_memory", T.boolean, true },
      { "offload_opt_states", T.boolean, false }, { "offload_parameters", T.boolean, false },
      { "double_buffer", T.boolean, true }, { "symmetric_memory", T.boolean, false }, { "debug_log", T.boolean, false },
      { "free_activation_threshold", T.integer(0) }, { "passes", T.list } }),
    all("elasticity", "", "the batch sizes of the file apply; tools/launch.lua accepts MIN:MAX machines, and a "
      .. "checkpoint fits any number of processes", {
      off, { "max_train_batch_size", T.integer(1), 2000 }, { "micro_batch_sizes", T.list, { 2, 4, 6 } },
      { "min_gpus", T.integer(1), 1 }, { "max_gpus", T.integer(1), 10000 }, { "min_time", T.number(0), 0 },
      { "prefer_larger_batch", T.boolean, true }, { "version", T.number(0), 0.2 },
      { "ignore_non_elastic_batch_info", T.boolean, false }, { "num_gpus_per_node", T.integer(1), 1 },
      { "model_parallel_size", T.integer(1), 1 } }),
    all("autotuning", "", TUNER, {
      off, { "metric", T.string, "throughput" }, { "start_profile_step", T.integer(0), 3 },
      { "end_profile_step", T.integer(0), 5 }, { "fast", T.boolean, true }, { "tuner_type", T.string, "model_based" },
      { "tuner_early_stopping", T.integer(0), 5 }, { "tuner_num_trials", T.integer(0), 50 },
      { "results_dir", T.string }, { "exps_dir", T.string }, { "overwrite", T.boolean }, { "metric_path", T.string },
      { "arg_mappings", T.tree }, { "max_train_batch_size", T.integer(1) }, { "min_train_batch_size", T.integer(1) },
      { "max_train_micro_batch_size_per_gpu", T.integer(1) }, { "min_train_micro_batch_size_per_gpu", T.integer(1) },
      { "num_tuning_micro_batch_sizes", T.integer(1) }, { "mp_size", T.integer(1) }, { "model_info", T.tree },
      { "model_info_path", T.string } }),
  }
  return sections
end
