-- SPDX-License-Identifier: BSD-3-Clause
-- Configurations: files for other programs, every kind of error, and the list of keys in docs/config.md.
local paths = require "ps.paths"
local config = require "ps.config"
local nearest = require "ps.core.nearest"
local json = require "ps.config.json"

local GIB = 1024 ^ 3
local examples = paths.root .. "/spec/config/"

-- Returns the message of config.read's error.
local function failure(given, options)
  local ok, message = pcall(config.read, given, options)
  assert(not ok, "this should have been refused")
  return message
end

local function has(message, ...)
  for _, part in ipairs { ... } do
    assert(message:find(part, 1, true), ("%q does not say %q"):format(message, part))
  end
end

local function with_file(suffix, text, run)
  local path = os.tmpname() .. suffix
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
  local ok, why = pcall(run, path)
  os.remove(path)
  os.remove((path:gsub(suffix:gsub("%.", "%%.") .. "$", "")))
  if not ok then error(why, 0) end
end

-- Returns "{a={b=1}}" for "a.b" and 1.
local function nested(path, value)
  local out = value
  local names = {}
  for name in path:gmatch("[^.]+") do table.insert(names, 1, name) end
  for _, name in ipairs(names) do out = { [name] = out } end
  return out
end

describe("config files", function()
  it("accept DeepSpeed's stage 3 with offload to nvme", function()
    local cfg, notes = config.read(examples .. "zero3_nvme.json", { available = { host = 10 * GIB, device = GIB } })
    assert.equal("AdamW", cfg.optimizer.type)
    assert.same({ 0.8, 0.999 }, cfg.optimizer.params.betas)
    assert.same({ "WarmupLR", 3e-5 }, { cfg.scheduler.type, cfg.scheduler.params.warmup_max_lr })
    assert.same({ "bf16", 8, 4, "fp32" }, { cfg.precision, cfg.train_batch_size, cfg.gradient_accumulation_steps,
      cfg.grad_accum_dtype })
    assert.same({ kind = "chunk", host = math.floor(8 * GIB), device = math.floor(0.8 * GIB),
      disk = { path = "/local_nvme" } }, cfg.memory)
    assert.is_true(cfg.activation_checkpointing.cpu_checkpointing)
    assert.equal(1, cfg.gradient_clipping)
    assert.same({ enabled = true, output_path = "runs/", job_name = "zero3" }, cfg.tensorboard)
    has(table.concat(notes, "\n"), "zero_optimization.stage", "aio.thread_count")
    local seen = {}
    for _, note in ipairs(notes) do
      assert.is_nil(seen[note])
      seen[note] = true
    end
  end)

  it("accept Hugging Face's with \"auto\"", function()
    has(failure(examples .. "hf_auto.json"), "scheduler.params.total_num_steps",
      "ps.initialize { auto = { total_num_steps = ... } }")
    local cfg, notes = config.read(examples .. "hf_auto.json", { auto = { total_num_steps = 100, lr = 5e-5,
      ["scheduler.params.warmup_num_steps"] = 10, train_micro_batch_size_per_gpu = 4, ["bf16.enabled"] = true } })
    assert.equal(5e-5, cfg.optimizer.params.lr)
    assert.same({ 100, 10, 1e-3 }, { cfg.scheduler.params.total_num_steps, cfg.scheduler.params.warmup_num_steps,
      cfg.scheduler.params.warmup_max_lr })
    assert.same({ 4, 1, 4, "bf16" }, { cfg.train_batch_size, cfg.gradient_accumulation_steps,
      cfg.train_micro_batch_size_per_gpu, cfg.precision })
    has(table.concat(notes, "\n"), '"auto" was replaced: ', "gradient_clipping = 0")
    has(failure(examples .. "hf_auto.json", { auto = { total_num_steps = "many" } }), "total_num_steps", '"many"')
    cfg, notes = config.read { fp16 = { enabled = "auto" } }
    assert.equal("fp32", cfg.precision)
    has(table.concat(notes, "\n"), '"auto" was replaced: fp16.enabled')
    assert.not_matches("is missing", table.concat(notes, "\n"), 1, true)
  end)

  -- Returns the sizes in a configuration: stages, tensor-parallel ranks, and data-parallel processes times rows.
  local function sizes(raw, world, asked)
    local cfg = config.read(raw, { later = true, world_size = world, asked = asked })
    return { cfg.pipeline.stages, cfg.tensor_parallel.size, cfg.train_batch_size or 0,
      cfg.train_micro_batch_size_per_gpu or 0, cfg.gradient_accumulation_steps }
  end

  it("accept stages, parts of layers and micro-batches in the spelling of DeepSpeed, OSLO and BMTrain", function()
    local function pipe(stages) return { pipeline = { stages = stages } } end
    assert.same({ 4, 1, 0, 0, 1 }, sizes(pipe(4)))
    assert.same({ 1, 1, 0, 0, 1 }, sizes(pipe "auto"))
    assert.same({ 1, 8, 0, 0, 1 }, sizes { tensor_parallel = { autotp_size = 8 } })
    assert.same({ 1, 1, 0, 0, 1 }, sizes { tensor_parallel = { autotp_size = 0 } })
    assert.same({ 1, 2, 0, 0, 1 }, sizes { tensor_parallel = { autotp_size = 2, tp = { tp_size = 2 } } })
    assert.same({ 4, 2, 0, 0, 1 }, sizes({ model_parallelism = { enable = true, pipeline_parallel_size = 4,
      tensor_parallel_size = 2 } }, 8))
    assert.same({ 4, 1, 0, 0, 1 }, sizes { model_parallelism = { pipeline_parallel_size = 4 } })
    assert.same({ 1, 1, 0, 0, 1 }, sizes { model_parallelism = { enable = false, pipeline_parallel_size = 1 } })
    assert.same({ 1, 1, 24, 4, 6 }, sizes { num_micro_batches = 6, micro_batch_size = 4 })
    assert.same({ 1, 1, 3, 3, 1 }, sizes { model_parallelism = { micro_batch_size = 3 } })
    assert.same({ 2, 2, 0, 0, 8 }, sizes({}, 4, { ["pipeline.stages"] = { 2, "the script's pipe_size" },
      ["tensor_parallel.size"] = { 2, "the script's tp_size" },
      ["gradient_accumulation_steps"] = { 8, "the script's num_micro_batches" } }))
    with_file(".json", '// oslo-config.json\n\n{ // "model": 3\n "seed": 2, "model_parallelism": {"enable": true,'
      .. ' // on\n"pipeline_parallel_size": 4} }//', function(path) assert.same({ 4, 1, 0, 0, 1 }, sizes(path)) end)
    with_file(".json", '{"seed": / 3}', function(path) has(failure(path), "1:10: '/' is not a JSON value") end)
  end)

  it("count the rows of processes with different rows", function()
    local cut = { pipeline = { stages = 2 }, tensor_parallel = { size = 2 } }
    local function rows(more)
      for key, value in pairs(cut) do more[key] = value end
      return more
    end
    assert.same({ 2, 2, 24, 2, 4 }, sizes(rows { train_micro_batch_size_per_gpu = 2,
      gradient_accumulation_steps = 4 }, 12))
    assert.same({ 2, 2, 24, 4, 2 }, sizes(rows { train_batch_size = 24, gradient_accumulation_steps = 2 }, 12))
    local function fails_with(raw, world, ...)
      local ok, message = pcall(sizes, raw, world)
      assert(not ok)
      has(tostring(message), ...)
    end
    fails_with(rows {}, 6, "pipeline.stages x tensor_parallel.size is 2 x 2 = 4", "does not divide", "processes, 6")
    fails_with({ model_parallelism = { pipeline_parallel_size = 4 } }, 2,
      "model_parallelism.pipeline_parallel_size x tensor_parallel.size is 4 x 1 = 4", "processes, 2")
    fails_with(rows { train_batch_size = 13, gradient_accumulation_steps = 2, train_micro_batch_size_per_gpu = 3 }, 8,
      "2 data-parallel processes")
  end)

  it("refuse sizes that disagree or are invalid", function()
    has(failure { pipeline = { stages = 2 }, model_parallelism = { pipeline_parallel_size = 4 } },
      "pipeline.stages and model_parallelism.pipeline_parallel_size are both given (2 and 4)", "keep one")
    has(failure { tensor_parallel = { autotp_size = 4, tp = { tp_size = 2 } } }, "autotp_size", "tp.tp_size",
      "both given")
    has(failure { num_micro_batches = 2, gradient_accumulation_steps = 3 }, "both given (3 and 2)")
    local asked = { ["pipeline.stages"] = { 2, "ps.init_distributed's pipe_size" } }
    has(failure({ pipeline = { stages = 4 } }, { asked = asked, later = true }), "pipeline.stages is 4",
      "ps.init_distributed's pipe_size is 2", "keep one")
    has(failure({}, { world_size = 3, asked = { ["tensor_parallel.size"] = { 2, "ps.init_distributed's tp_size" } } }),
      "ps.init_distributed's tp_size is 1 x 2 = 2, which does not divide the number of processes, 3")
    has(failure({ pipeline = { stages = 2 } }, { world_size = 1 }), "pipeline.stages x tensor_parallel.size is 2 x 1")
    has(failure({ model_parallelism = { enable = false, tensor_parallel_size = 2 } }, { later = true }),
      "model_parallelism.enable is false", "model_parallelism.tensor_parallel_size is 2")
    for _, size in ipairs { 0, -2, 1.5, "2" } do
      has(failure { model_parallelism = { pipeline_parallel_size = size } },
        "model_parallelism.pipeline_parallel_size is", "a whole number of at least 1")
    end
    has(failure({ model_parallelism = { tensor_parallel_size = 2 } }, { world_size = 1 }),
      "model_parallelism.tensor_parallel_size is 1 x 2 = 2, which does not divide the number of processes, 1")
    has(failure { pipeline = { schedule = "1F1B" } }, "pipeline.schedule", '"zb_v"')
    has(failure { recompute = false, pipeline = { activation_checkpoint_interval = 1 } }, "contradict each other")
  end)

  it("take PatrickStar's README", function()
    local cfg = config.read(examples .. "patrickstar.lua", { available = { host = 1000, device = 100 } })
    assert.same({ "Adam", 1e-6, true }, { cfg.optimizer.type, cfg.optimizer.params.eps,
      cfg.optimizer.params.use_hybrid_adam })
    assert.same({ "fp16", 256, true, 2 }, { cfg.precision, cfg.fp16.initial_scale, cfg.fp16.dynamic,
      cfg.fp16.hysteresis })
    assert.equal(64 * 1024 * 1024, cfg.chunk_size)
    assert.same({ kind = "chunk", host = 900, device = 90 }, cfg.memory)
    assert.is_false(cfg.use_cpu_embedding)
    assert.is_true(cfg.prefetch)
  end)

  it("accept PatrickStar's later spellings", function()
    local cfg = config.read { fp16 = { loss_scale = "dynamic", init_scale = 1024 }, chunk_size = 10,
      client = { memtracer = { overall_cpu_mem_ratio = 0.5 } } }
    assert.same({ "fp16", 1024, 0, true, 10, 0.5 }, { cfg.precision, cfg.fp16.initial_scale, cfg.fp16.loss_scale,
      cfg.fp16.dynamic, cfg.chunk_size, cfg.client.mem_tracer.overall_cpu_mem_ratio })
    assert.equal(0.5, config.read { mem_tracer = { overall_cpu_mem_ratio = 0.5 } }.client.mem_tracer
      .overall_cpu_mem_ratio)
    assert.is_false(config.read { client = { opts = { with_async_move = false } } }.prefetch)
    has(failure { memtracer = { margin_use_ratio = 2 } }, "memtracer.margin_use_ratio is 2")
  end)

  it("may be base64, in either alphabet", function()
    -- {"gradient_clipping": 0.5}
    assert.equal(0.5, config.read("eyJncmFkaWVudF9jbGlwcGluZyI6IDAuNX0=").gradient_clipping)
    has(failure("/nowhere/config.json"), "/nowhere/config.json", "No such file")
    has(failure("not*base64"), "not*base64")
    has(failure(7), "a number was given")
  end)

  it("in Lua have no globals, and are not changed", function()
    with_file(".lua", "return { seed = 3 }", function(path) assert.equal(3, config.read(path).seed) end)
    with_file(".lua", "os.exit(3)", function(path) has(failure(path), path, "without globals") end)
    with_file(".lua", "return 3", function(path) has(failure(path), path, "returns a number") end)
    with_file(".lua", "return {", function(path) has(failure(path), path) end)
    with_file(".lua", string.dump(function() return {} end), function(path) has(failure(path), "compiled") end)
    local mine = { default_chunk_size = 5, client = { memtracer = {} }, memory = "chunk" }
    config.read(mine)
    assert.same({ default_chunk_size = 5, client = { memtracer = {} }, memory = "chunk" }, mine)
    local loop = {}
    loop.elasticity = loop
    has(failure(loop), "is nested more than")
  end)

  it("in JSON are read strictly, with line and column", function()
    for _, case in ipairs {
      { '{"a": 1,\n "a": 2}', '2:2: the key "a" occurs twice' },
      { '{"fp16": {"enabled": true,\n\n  "enabled": false}}', "3:3" },
      { '{"a" 1}', "1:6: expected ':'" }, { '{"a": }', "1:7" }, { '{"a": 1,}', "1:9: expected a key" },
      { '{"a": [1, 2', "1:12: expected ',' or ']', found the end" }, { '{"a": nan}', "1:7: 'nan' is not a JSON value" },
      { '{"a": 01}', "1:7" }, { '{"a": 0x10}', "1:7" }, { '{"a": "x', "1:7: this string does not end" },
      { '{"a": "\\q"}', "unknown escape" }, { '{"a": "\\ud800"}', "surrogate" },
      { "{} x", "1:4: the JSON value ended" },
      { "[1]", "JSON object" }, { "", "1:1" }, { "{'a': 1}", "1:2: expected a key" }, { '{"a": tru}', "1:7" },
      { ("["):rep(200), "is nested more than" }, { '{"a": "\n"}', "control character" },
    } do
      with_file(".json", case[1], function(path) has(failure(path), path .. ":", case[2]) end)
    end
    local library = require "cjson"                        -- a table that the script decoded is the same
    local text = '{"gradient_clipping": null, "activation_checkpointing": {"number_checkpoints": null}}'
    with_file(".json", text, function(path) assert.same(config.read(path), (config.read(library.decode(text)))) end)
    local value = json.decode('{"a":[1,-2.5e3,true,null,"\\u00e9\\ud83d\\ude00\\n"],"b":{},' ..
      '"c":12345678901234567890}', "t")
    assert.same({ 1, -2500, true, json.null, "\195\169\240\159\152\128\n" }, value.a)
    assert.same({}, value.b)
    assert.equal(12345678901234567890, value.c)
  end)
end)

describe("config errors", function()
  it("name a key of the wrong type, its value and what is expected", function()
    for _, case in ipairs {
      { "optimizer.params.lr", "3e-4", "a number" }, { "optimizer.params.lr", -1, "at least 0" },
      { "optimizer.params.lr", 0 / 0, "a number" }, { "optimizer.params.betas", { 0.9 }, "two numbers" },
      { "optimizer.params.betas", { 0.9, 1 }, "two numbers" }, { "fp16.enabled", 1, "true or false" },
      { "fp16.loss_scale", "static", '"dynamic"' }, { "fp16.loss_scale_window", 0, "at least 1" },
      { "fp16.loss_scale_window", 1.5, "whole number" }, { "zero_optimization.stage", 4, "from 0 to 3" },
      { "zero_optimization.offload_optimizer.device", "gpu", '"none", "cpu" or "nvme"' },
      { "zero_optimization.offload_optimizer.ratio", 1.5, "from 0 to 1" }, { "chunk_size", 0, "at least 1" },
      { "default_chunk_size", -4, "at least 1" }, { "chunk_size", "32M", "whole number" },
      { "memory.host", 0, "bytes above 0" }, { "memory.host", "-1GiB", "bytes above 0" },
      { "memory.host", "6GiBs", "GiB" }, { "memory.device", "120%", "share" }, { "memory.host", "0%", "share" },
      { "memory", "plane", '"plain", "chunk"' }, { "memory", 5, '"plain", "chunk"' }, { "eviction", "mru", '"lru"' },
      { "device", "gpu", '"cuda"' }, { "client.mem_tracer.overall_gpu_mem_ratio", 1.01, "up to 1" },
      { "client.mem_tracer.overall_cpu_mem_ratio", 0, "above 0" },
      { "client.mem_tracer.margin_use_ratio", -0.1, "from 0 to 1" },
      { "gradient_clipping", true, "a number" }, { "gradient_clipping", -2, "0 turns clipping off" },
      { "steps_per_print", -1, "at least 0" }, { "data_types.grad_accum_dtype", "int8", '"fp32"' },
      { "fp16", { 1 }, "a table of settings" }, { "zero_optimization", true, "a table of settings" },
      { "train_batch_size", 0, "at least 1" }, { "train_batch_size", 2.5, "whole number" },
      { "seed", -1, "at least 0" },
      { "prefetch", 0, "true or false" }, { "overlap_optimizer", "maybe", '"auto"' },
      { "tensorboard.output_path", 3, "a string" }, { "aio.block_size", "1MB", "whole number" },
    } do
      has(failure(nested(case[1], case[2])), case[1], case[3])
    end
  end)

  it("suggest the key that an unknown one was meant to be", function()
    for _, case in ipairs {
      { "stage", "'stage' belongs in zero_optimization" }, { "optimiser", "did you mean 'optimizer'" },
      { "optimizer.lr", "'lr' belongs in optimizer.params" }, { "optimizer.params.betta", "did you mean 'betas'" },
      { "fp16.loss_scael", "did you mean 'loss_scale'" }, { "zero_optimization.bf16", "belongs in the top level" },
      { "zero_optimization.offload_optimzer", "did you mean 'offload_optimizer'" },
      { "gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'" },
      { "nvme_pth", "did you mean zero_optimization.offload" }, { "memory.disc", "did you mean 'disk'" },
      { "Train_Batch_Size", "did you mean 'train_batch_size'" }, { "utterly_unrelated_words", "docs/config.md" },
      { "client.mem_trace", "did you mean 'mem_tracer'" },
    } do
      has(failure(nested(case[1], 1)), "unknown key " .. case[1], case[2])
    end
    has(failure { scheduler = { type = "WarmupLR", params = { total_num_steps = 5 } } },
      "scheduler.params.total_num_steps: WarmupLR does not have it; it is for WarmupCosineLR and WarmupDecayLR")
    has(failure { fp16 = { [true] = 1 } }, "is not a key")
    assert.equal(1, nearest.distance("lr", "rl"))
    assert.equal(3, nearest.distance("kitten", "sitting"))
  end)

  it("name both sides of a contradiction", function()
    local nvme = { device = "nvme", nvme_path = "/a" }
    for _, case in ipairs {
      { { fp16 = { enabled = true }, bf16 = { enabled = true } }, "fp16.enabled", "bf16.enabled" },
      { { fp16 = { enabled = true }, bfloat16 = { enabled = true } }, "fp16.enabled", "bfloat16.enabled" },
      { { chunk_size = 4, default_chunk_size = 5 }, "chunk_size", "default_chunk_size" },
      { { client = { mem_tracer = {} }, mem_tracer = {} }, "client.mem_tracer", "mem_tracer" },
      { { zero_optimization = { offload_optimizer = { device = "nvme" } } }, "offload_optimizer.device",
        "nvme_path", "memory.disk.path" },
      { { zero_optimization = { offload_param = nvme }, memory = { disk = { path = "/b" } } }, "memory.disk.path",
        "offload_param.nvme_path" },
      { { zero_optimization = { offload_param = nvme, offload_optimizer = { device = "nvme", nvme_path = "/b" } } },
        "offload_optimizer.nvme_path", "offload_param.nvme_path" },
      { { memory = { disk = { limit = "1GiB" } } }, "memory.disk.limit", "memory.disk.path" },
      { { memory = "plain", zero_optimization = { offload_param = nvme } }, "memory", "offload_param.device" },
      { { memory = { kind = "plain", host = 5 } }, "memory.kind", "memory.host" },
      { { zero_optimization = { cpu_offload = true, offload_optimizer = { device = "none" } } }, "cpu_offload",
        "offload_optimizer.device" },
      { { optimizer = { type = "AdamW", params = { adam_w_mode = false } } }, "optimizer.type", "adam_w_mode" },
      { { fp16 = { init_scale = 3, initial_scale_power = 2 } }, "fp16.init_scale", "fp16.initial_scale_power" },
      { { fp16 = { enabled = true, initial_scale_power = 0, min_loss_scale = 2 } }, "min_loss_scale",
        "initial_scale_power" },
      { { data_types = { param_dtype = "bf16" } }, "data_types.param_dtype", "bf16" },
      { { bf16 = { enabled = true }, data_types = { grad_accum_dtype = "fp16" } }, "grad_accum_dtype", "bf16" },
      { { prefetch = true, client = { opts = { with_async_move = false } } }, "prefetch", "with_async_move" },
      { { memory = { host = "50%" } }, "memory.host", "bytes" },
    } do
      has(failure(case[1]), case[2], case[3], case[4])
    end
  end)

  it("refuse settings that would change the result, and accept them if they are off", function()
    for _, case in ipairs {
      { "amp.enabled", true }, { "torch_autocast.enabled", true }, { "progressive_layer_drop.enabled", true },
      { "curriculum_learning.enabled", true }, { "data_efficiency.enabled", true },
      { "sparse_attention.mode", "fixed", {} }, { "fp16.fp16_master_weights_and_grads", true },
      { "bf16.bf16_optimizer_states", true }, { "bf16.bf16_master_weights_and_grads", true },
      { "client.mem_tracer.use_fake_dist", true }, { "zero_optimization.zenflow.topk_ratio", 0.1, "none" },
      { "managed_gradient_accumulation", false, true },
      { "pipeline.activation_checkpoint_interval", 2, 1 },
      { "optimizer.params.amsgrad", true },
      { "compression_training.weight_quantization.shared_parameters.enabled", true },
      { "gradient_allreduce_op", "sum", "mean" }, { "sequence_parallel_size", 2, 1 }, { "sequence.autosp_size", 2, 1 },
    } do
      local off = case[3]
      if off == nil then off = false end
      has(failure(nested(case[1], case[2])), case[1]:match("^[^.]+"), case[1]:match("compression") or ": ")
      if case[1] == "sparse_attention.mode" then config.read { sparse_attention = off }
      elseif off ~= "none" then config.read(nested(case[1], off)) end
    end
    for _, name in ipairs { "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Adamx" } do
      has(failure { optimizer = { type = name } }, "optimizer.type", name, "AdamW")
    end
    has(failure { scheduler = { type = "WarmupCosinLR" } }, 'did you mean "WarmupCosineLR"')
    has(failure { scheduler = {} }, "scheduler.type is needed")
    has(failure { scheduler = { type = "OneCycle" } }, "scheduler.params.cycle_min_lr is needed")
  end)
end)

describe("config values", function()
  it("are complete without a file", function()
    local cfg, notes = config.read {}
    assert.same({}, notes)
    assert.same({ "Adam", 1e-3, 0 }, { cfg.optimizer.type, cfg.optimizer.params.lr, cfg.optimizer.params.weight_decay })
    assert.same({ "fp32", 0, 1, "fp32" }, { cfg.precision, cfg.gradient_clipping, cfg.gradient_accumulation_steps,
      cfg.grad_accum_dtype })
    assert.same({ kind = "chunk" }, cfg.memory)
    assert.is_nil(cfg.scheduler)
    assert.is_nil(cfg.train_batch_size)
    assert.same({ "auto", "plan", true, "auto", false, true }, { cfg.device, cfg.eviction, cfg.prefetch,
      cfg.overlap_optimizer, cfg.recompute, cfg.plan_print })
    assert.same({ 0.1, 0.8, 0.8, 0.8 }, { cfg.client.mem_tracer.warmup_gpu_chunk_mem_ratio,
      cfg.client.mem_tracer.overall_gpu_mem_ratio, cfg.client.mem_tracer.overall_cpu_mem_ratio,
      cfg.client.mem_tracer.margin_use_ratio })
    assert.same({ 65536, 1000, 2, false, 1 }, { cfg.fp16.initial_scale, cfg.fp16.loss_scale_window,
      cfg.fp16.hysteresis, cfg.fp16.consecutive_hysteresis, cfg.fp16.min_loss_scale })
    cfg.optimizer.params.betas[1] = 0
    assert.equal(0.9, config.read({}).optimizer.params.betas[1])
  end)

  it("follow the batch arithmetic", function()
    local function sizes(total, micro, steps, world)
      local cfg = config.read({ train_batch_size = total, train_micro_batch_size_per_gpu = micro,
        gradient_accumulation_steps = steps }, { world_size = world })
      return { cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_accumulation_steps }
    end
    assert.same({ 32, 4, 4 }, sizes(32, 4, 4, 2))
    assert.same({ 32, 4, 4 }, sizes(32, 4, nil, 2))
    assert.same({ 32, 4, 4 }, sizes(32, nil, 4, 2))
    assert.same({ 32, 4, 4 }, sizes(nil, 4, 4, 2))
    assert.same({ 32, 16, 1 }, sizes(32, nil, nil, 2))
    assert.same({ 8, 4, 1 }, sizes(nil, 4, nil, 2))
    assert.equal(3, config.read({ gradient_accumulation_steps = 3 }).gradient_accumulation_steps)
    has(failure({ train_batch_size = 32, train_micro_batch_size_per_gpu = 4, gradient_accumulation_steps = 3 },
      { world_size = 2 }), "train_batch_size 32", "train_micro_batch_size_per_gpu 4", "gradient_accumulation_steps 3",
      "2 data-parallel processes", "= 24")
    has(failure { train_batch_size = 7, train_micro_batch_size_per_gpu = 2 }, "train_batch_size 7", "rounding down")
    has(failure { train_batch_size = 2, train_micro_batch_size_per_gpu = 4 }, "gradient_accumulation_steps 0")
  end)

  it("accept whole numbers that a double holds exactly, and name the limit", function()
    local MOST = 2 ^ 53 - 1
    for _, key in ipairs { "seed", "train_batch_size", "train_micro_batch_size_per_gpu",
      "chunk_size", "steps_per_print" } do
      for _, value in ipairs { "18446744073709551616", "9007199254740993", "1e308" } do
        with_file(".json", ('{ "%s": %s }'):format(key, value), function(path)
          has(failure(path), key .. " is ", "expected a whole number from ", "to 9007199254740991 (2^53 - 1)")
        end)
      end
    end
    assert.equal(MOST, config.read({ seed = MOST }).seed)
    has(failure { train_micro_batch_size_per_gpu = MOST, gradient_accumulation_steps = 2 }, "per step; the limit is")
    has(failure { memory = { host = 1e308 } }, "memory.host is 1e+308; expected bytes above 0")
    has(failure { fp16 = { enabled = true, loss_scale = 1e308 } }, "fp16.loss_scale is 1e+308; expected a number")
    has(failure { fp16 = { enabled = true, init_scale = 1e308 } }, "fp16.init_scale is 1e+308", "up to 2^127")
    has(failure { optimizer = { params = { lr = 1e308 } } }, "optimizer.params.lr is 1e+308", "that fp32 holds")
    config.read { zero_optimization = { stage3_model_persistence_threshold = 2 ^ 63 } }      -- DeepSpeed's default
  end)

  it("accept their own result, changed or not", function()
    local there = { available = { device = 1000, host = 10000 } }
    for _, given in ipairs { {}, examples .. "zero3_nvme.json", examples .. "patrickstar.lua",
      { memory = "plain" }, { optimizer = { type = "AdamW" }, fp16 = { init_scale = 3 }, train_batch_size = 8 },
      { memory = { host = "25%", disk = { path = "/d", limit = 5000 } }, bf16 = { enabled = true } },
      { zero_optimization = { offload_optimizer = { device = "none" } } },
      { scheduler = { type = "onecycle", params = { cycle_min_lr = 0, cycle_max_lr = 1 } } } } do
      local cfg = config.read(given, there)
      local again = config.read(cfg, there)
      assert.same(cfg, again)
      assert.same(cfg, config.read(again, there))
    end
    local _, notes = config.read(config.read {})
    assert.same({}, notes)
    local cfg = config.read { optimizer = { params = { lr = 0.5 } } }
    cfg.optimizer.params.lr, cfg.seed = 0.25, 7
    local again = config.read(cfg)
    assert.same({ 0.25, 7 }, { again.optimizer.params.lr, again.seed })
    cfg.optimzer = {}
    has(failure(cfg), "unknown key optimzer; did you mean 'optimizer'?")
    cfg.optimzer, cfg.optimizer.params.lr = nil, "fast"
    has(failure(cfg), 'optimizer.params.lr is "fast"')
  end)

  it("accept values for \"auto\" by the names of keys", function()
    local given = { optimizer = { params = { lr = "auto" } } }
    has(failure(given, { auto = { learning_rat = 1 } }), 'auto has "learning_rat", which is not a key')
    has(failure(given, { auto = { lrr = 1 } }), "did you mean 'lr'?")
    has(failure(given, { auto = { ["optimizer.lr"] = 1 } }), 'auto has "optimizer.lr"')
    assert.equal(3, config.read(given, { auto = { lr = 3, total_num_steps = 4 } }).optimizer.params.lr)
  end)

  it("add settings of the argument client to those of a file", function()
    local client = { mem_tracer = { overall_cpu_mem_ratio = 0.5 } }
    local function host(from) return config.read(from, { client = client, available = { host = 1000 } }).memory.host end
    assert.equal(500, host {})
    assert.equal(500, host(examples .. "patrickstar.lua"))
    with_file(".json", '{ "client": { "opts": { "with_async_move": false } } }', function(path)
      assert.equal(500, host(path))
      assert.equal(false, config.read(path, { client = client }).prefetch)
    end)
  end)

  it("report the cost of a vocabulary that is not a multiple of 8", function()
    local _, notes = config.read { vocabulary_size = 50257 }
    has(notes[1], "vocabulary_size is 50257", "50264 rows")
    _, notes = config.read { vocabulary_size = 50264 }
    assert.same({}, notes)
  end)

  it("refuse settings that contradict \"none\"", function()
    local none = { device = "none" }
    local function offload(more)
      more.zero_optimization, more.device = { offload_optimizer = none }, more.device or "sim"
      return more
    end
    has(failure(offload { use_cpu_embedding = true }), 'device is "none" and use_cpu_embedding is true')
    has(failure(offload { optimizer = { params = { use_hybrid_adam = false } } }), "use_hybrid_adam is false")
    assert.equal(true, config.read(offload {}).zero_optimization.offload_optimizer.stays)
    assert.is_nil(config.read({}).zero_optimization.offload_optimizer.stays)
    for _, word in ipairs { "none", "cpu" } do
      local _, notes = config.read { device = "sim", zero_optimization = { offload_param = { device = word } } }
      has(table.concat(notes, "\n"), ('offload_param.device: "%s" has no effect'):format(word))
    end
  end)

  it("note settings without effect in plain memory, or if the cpu computes", function()
    local given = { eviction = "lru", prefetch = false, rates = { up = 1 }, overlap_optimizer = true,
      optimizer = { params = { use_hybrid_adam = true } }, mem_tracer = { margin_use_ratio = 0.5 } }
    given.memory = "plain"
    local _, notes = config.read(given)
    has(table.concat(notes, "\n"), "eviction, prefetch, overlap_optimizer, rates, mem_tracer.margin_use_ratio, "
      .. "optimizer.params.use_hybrid_adam: ignored: plain memory has no chunks")
    given.memory, given.device = nil, "cpu"
    _, notes = config.read(given)
    has(table.concat(notes, "\n"),
      "rates, mem_tracer.margin_use_ratio, optimizer.params.use_hybrid_adam: ignored: the cpu")
    given.device = "sim"
    _, notes = config.read(given)
    assert.same({}, notes)
  end)

  it("refuse a schedule that ends within its warm-up", function()
    for name, key in pairs { WarmupDecayLR = "num_steps", WarmupCosineLR = "num_steps", warmup_cosine = "",
      warmup_linear = "" } do
      local warmup, total = key == "" and "warmup" or "warmup_num_steps", key == "" and "total" or "total_num_steps"
      has(failure { scheduler = { type = name, params = { [warmup] = 9, [total] = 8 } } },
        ("scheduler.params.%s is 9, so the rate would never decay; it must be at most scheduler.params.%s, which is 8")
          :format(warmup, total))
      config.read { scheduler = { type = name, params = { [warmup] = 8, [total] = 8 } } }
      if key ~= "" then
        has(failure { scheduler = { type = name, params = { total_num_steps = 8 } } },
          "scheduler.params.warmup_num_steps is 1000 (the default), so the rate would never decay; it must be at most "
            .. "scheduler.params.total_num_steps, which is 8")
      end
    end
  end)

  it("name the spelling of a schedule in other programs", function()
    local _, notes = config.read { scheduler = { type = "warmuplr", params = {} } }
    has(notes[1], 'scheduler.type: "warmuplr" is read as "WarmupLR"')
    _, notes = config.read { scheduler = { type = "WarmupLR", params = {} } }
    assert.same({}, notes)
  end)

  it("name the kind of Adam", function()
    local function kind(name, params) return config.read { optimizer = { type = name, params = params } } end
    local cfg, notes = kind("Adam", { weight_decay = 0.1 })
    assert.equal("Adam", cfg.optimizer.type)
    has(notes[1], "weight_decay 0.1", "adam_w_mode")
    assert.equal("AdamW", kind("Adam", { adam_w_mode = true }).optimizer.type)
    cfg, notes = kind("Adam", { adam_w_mode = false, weight_decay = 0.1 })
    assert.same({ "Adam", 0 }, { cfg.optimizer.type, #notes })
    assert.equal("AdamW", kind("adamw").optimizer.type)
  end)

  it("resolve budgets", function()
    local there = { available = { device = 1000, host = 10000, disk = 5000 } }
    local function memory(given) return config.read(given, there).memory end
    assert.same({ kind = "chunk", device = 800, host = 8000 }, memory {})
    assert.same({ kind = "plain" }, memory { memory = "plain" })
    assert.same({ kind = "chunk", device = 8 * GIB, host = 500e6, disk = { path = "/d", limit = 2500 } }, memory {
      memory = { device = "8 GiB", host = "0.5GB", disk = { path = "/d", limit = "50%" } } })
    assert.same({ kind = "chunk", device = 250, host = 7 }, memory { memory = { device = "25%", host = 7 } })
    assert.same({ kind = "chunk", host = 5 }, memory { device = "cpu", memory = { device = 5 } })
    assert.same({ kind = "chunk", host = 16 }, config.read({}, { device = "cpu", available = function(device)
      return { host = device == "cpu" and 20 or 0 }
    end }).memory)
    assert.same({ kind = "chunk", device = 800, host = 8000 }, memory { mem_tracer = { with_static_partition = true } })
    assert.same("/n", memory { zero_optimization = { offload_param = { device = "nvme", nvme_path = "/n/" } },
      memory = { disk = { path = "/n" } } }.disk.path)
    assert.equal("cpu", config.read({ zero_optimization = { cpu_offload = true } }).zero_optimization
      .offload_optimizer.device)
    local _, notes = config.read({ memory = { host = 5 }, mem_tracer = { overall_cpu_mem_ratio = 0.9 } }, there)
    has(notes[1], "mem_tracer.overall_cpu_mem_ratio", "memory.host")
    _, notes = config.read({ device = "cuda", memory = { device = "8GiB" } }, { available = { device = 2 * GIB,
      host = GIB } })
    assert.same({ "memory.device: 8.00 GiB is more than the 2.00 GiB free on cuda" }, notes)
    assert.equal(4096, config.read({ prefetch = "4KiB" }).prefetch)
  end)
end)
