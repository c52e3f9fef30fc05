-- SPDX-License-Identifier: BSD-3-Clause
-- docs/config.md lists every DeepSpeed key as honoured, ignored or refused, in agreement with the schema.
local paths = require "ps.paths"
local config = require "ps.config"
local schema = require "ps.config.schema"
local doc = require "ps.config.doc"

-- DeepSpeed's keys by section.
local DEEPSPEED = {
  [""] = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    .. "steps_per_print wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last log_level "
    .. "graph_harvesting gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    .. "sparse_gradients communication_data_type seq_parallel_communication_data_type disable_allgather "
    .. "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer vocabulary_size sequence_parallel_size "
    .. "compression_training sparse_attention hybrid_engine weight_quantization",
  optimizer = "type legacy_fusion",
  ["optimizer.params"] = "lr betas eps weight_decay torch_adam adam_w_mode max_coeff min_coeff coeff_beta factor_max "
    .. "factor_min factor_threshold freeze_step cuda_aware comm_backend_name momentum muon_lr adam_lr ns_method",
  scheduler = "type",
  ["scheduler.params"] = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio "
    .. "cos_min_ratio cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    .. "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
    .. "decay_mom_rate lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    .. "last_batch_iteration",
  fp16 = "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    .. "min_loss_scale fp16_master_weights_and_grads",
  bf16 = "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
  amp = "enabled",
  torch_autocast = "enabled dtype lower_precision_safe_modules",
  data_types = "grad_accum_dtype param_dtype buffer_dtype",
  zero_optimization = "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    .. "allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint "
    .. "ignore_unused_parameters legacy_stage1 zero_hpz_partition_size zero_quantized_weights "
    .. "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param override_module_apply "
    .. "enable_sanity_checks leaf_module sub_group_size stage3_prefetch_bucket_size "
    .. "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
    .. "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
    .. "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential round_robin_gradients "
    .. "memory_efficient_linear mics_shard_size mics_hierarchical_params_gather pipeline_loading_checkpoint "
    .. "log_trace_cache_warnings save_muon_momentum_buffer_in_memory cpu_offload",
  ["zero_optimization.offload_param"] = "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
  ["zero_optimization.offload_optimizer"] = "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    .. "fast_init ratio super_offload cpuadam_cores_perc",
  ["zero_optimization.zenflow"] = "topk_ratio select_strategy select_interval update_interval overlap_step offload "
    .. "auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
  aio = "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
  pipeline = "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
  tensor_parallel = "autotp_size preset_model tp_overlap_comm partition_config dtype keep_module_on_host",
  ["tensor_parallel.tp"] = "tp_size tp_grain_size",
  sequence = "autosp_size",
  expert_parallel = "enabled autoep_size preset_model top_k",
  activation_checkpointing = "partition_activations cpu_checkpointing contiguous_memory_optimization "
    .. "number_checkpoints synchronize_checkpoint_boundary profile",
  flops_profiler = "enabled profile_step module_depth top_modules detailed output_file",
  tensorboard = "enabled output_path job_name",
  wandb = "enabled group team project",
  csv_monitor = "enabled output_path job_name",
  comet = "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
  checkpoint = "tag_validation load_universal use_node_local_storage checkpoint_serialization",
  ["checkpoint.parallel_write"] = "pipeline_stage",
  ["checkpoint.writer"] = "type io_buffer_size io_buffer_double io_multiplier data_parallel show_statistics decoupled",
  datastates_ckpt = "host_cache_size",
  nebula = "enabled persistent_time_interval num_of_version_in_retention",
  comms_logger = "enabled verbose prof_all debug prof_ops",
  compile = "deepcompile free_activation offload_activation offload_opt_states double_buffer symmetric_memory passes",
  elasticity = "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch version "
    .. "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
  autotuning = "enabled metric start_profile_step end_profile_step fast tuner_type tuner_early_stopping "
    .. "tuner_num_trials",
  curriculum_learning = "enabled curriculum_type min_difficulty max_difficulty schedule_type",
  data_efficiency = "enabled seed data_sampling data_routing",
  progressive_layer_drop = "enabled theta gamma",
  eigenvalue = "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
}

-- Calls visit for every row of the schema.
local function each_row(visit)
  for _, section in ipairs(schema.sections) do
    for _, row in ipairs(section[3]) do visit(row, section) end
  end
end

describe("docs/config.md", function()
  local f = assert(io.open(paths.root .. "/docs/config.md"))
  local text = f:read("*a")
  f:close()

  it("has the tables that psluajit tools/config_doc.lua writes", function()
    assert.equal(doc.renew(text), text)
  end)

  it("lists every DeepSpeed key with its status", function()
    local status = {}
    for path, word in text:gmatch("\n| `([%w_.]+)` |[^\n]-| (%l+) |[^|\n]*|%f[\n]") do status[path] = word end
    for section, keys in pairs(DEEPSPEED) do
      for key in keys:gmatch("%S+") do
        local word = status[(section ~= "" and section .. "." or "") .. key]
        assert(word == "honoured" or word == "ignored" or word == "refused",
          ("docs/config.md gives no status for %s %s"):format(section, key))
      end
    end
  end)
end)

describe("the schema", function()
  it("has a known status, words and a default of the right type in every row", function()
    local known = {}
    for _, status in ipairs(schema.statuses) do known[status] = true end
    each_row(function(row)
      assert(known[row.status], row.path)
      assert(row.words ~= "", row.path)
      if row.default ~= nil then assert(row.type.take(row.default), row.path) end
    end)
  end)

  -- Returns {a = {b = value}} for a path, with the other keys that the section requires. For example, a schedule
  -- requires its warm-up steps.
  local function written(row, section, value)
    local out = { [row.key] = value }
    if section.of then
      for _, other in ipairs(section[3]) do
        if other.required and other.key ~= row.key then
          out[other.key] = not other.type.take(1) and tostring or other.key:find "^total" and 2000 or 1
        end
      end
    end
    for name in (section[1]:reverse()):gmatch("[^.]+") do
      out = { [name:reverse()] = out }
      if section.of and out.params then out.type = section.of end
    end
    return out
  end

  it("notes every ignored key that is given", function()
    each_row(function(row, section)
      if row.status ~= "ignored" then return end
      local value = row.default
      for _, try in ipairs { 1, "text", "fp32", {} } do
        if value == nil and row.type.take(try) then value = try end
      end
      if value == nil then value = true end
      local _, notes = config.read(written(row, section, value))
      assert(table.concat(notes, "\n"):find(row.path, 1, true), row.path .. " was ignored in silence")
    end)
  end)

  it("accepts every default as if it had been written", function()
    each_row(function(row, section)
      if row.default ~= nil and not row.path:match("^memory%.") then config.read(written(row, section, row.default)) end
    end)
  end)
end)
