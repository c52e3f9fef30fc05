-- SPDX-License-Identifier: BSD-3-Clause
-- Every configuration key that docs/config.md calls honoured has an effect: an engine with the key behaves differently
-- from an engine with the default. Each key has a case here; a key without a case fails.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local nn = require "ps.nn"
local lfs = require "lfs"
local unistd = require "posix.unistd"
local config = require "ps.config"
local schema = require "ps.config.schema"
local chunks = require "ps.memory.chunks"
local ranks_lib = require "spec.ranks_lib"
local check_lib = require "spec.check_lib"
local bytes, text_of = check_lib.bytes, check_lib.read
local F = ps.F

local folder

-- -- a model, and runs of it ----------------------------------------------------------------------------------------
local Net = nn.class("HonouredNet")
function Net:init(width)
  self.tokens = nn.Embedding(256, width, { std = 0.3 })
  self.h = nn.ModuleList()
  for _ = 1, 4 do self.h:append(nn.Linear(width, width)) end
  self.out = nn.Linear(width, 256)
end
function Net:forward(x)
  local h = self.tokens(x)
  for _, layer in self.h:each() do h = F.gelu(layer(h)) end
  return F.cross_entropy(self.out(h):reshape(-1, 256), x:reshape(-1))
end

-- Merges settings over other settings. Tables are merged entry by entry.
local function over(base, more)
  local out = {}
  for key, value in pairs(base) do out[key] = value end
  for key, value in pairs(more) do
    local both = type(value) == "table" and type(out[key]) == "table" and value[1] == nil
    out[key] = both and over(out[key], value) or value
  end
  return out
end

-- Returns { a = { b = value } } for "a.b".
local function nested(path, value)
  for name in path:reverse():gmatch("[^.]+") do value = { [name:reverse()] = value } end
  return value
end

-- Opens an engine with these settings, calls see(model, optimizer) and closes it. Returns see's result, or the error's
-- text. The output is collected in `printed`, which replaces the result if `see` is `printed`.
local printed = {}
local function run(settings, see, width)
  ps.manual_seed(7)
  local out, err, text = io.stdout, io.stderr, {}
  rawset(io, "stdout", { write = function(_, ...) text[#text + 1] = table.concat { ... } end, flush = function() end })
  rawset(io, "stderr", { write = function() end })
  local model
  local ok, result = pcall(function()
    local optimizer
    model, optimizer = ps.initialize { model_func = function() return Net(width or 64) end,
      config = over({ plan_print = false }, settings) }
    return see(model, optimizer)
  end)
  rawset(io, "stdout", out)
  rawset(io, "stderr", err)
  if model then model:close() end
  if not ok then return "error: " .. tostring(result) end
  if result == printed then return table.concat(text) end
  return result
end

local function batch(rows) return ps.randint(0, 256, { rows or 2, 8 }, { dtype = "int32" }) end

local function train(model, optimizer, steps)
  for _ = 1, steps do
    for _ = 1, inner(model).accumulate do
      model:backward(model(batch()))
      optimizer:step()
    end
    optimizer:zero_grad()
  end
end

-- -- observations ----------------------------------------------------------------------------------------------
local see = {}

--- Returns all values after some steps as bytes.
function see.values(model, optimizer)
  train(model, optimizer, 3)
  local all = {}
  for name, t in pairs(model:state_dict()) do all[name] = bytes(t) end
  return all
end

--- Returns the bytes of all chunks.
function see.state_bytes(model) return tonumber(inner(model).built.state_bytes) end

--- Returns whether a step can end in which a layer gets no gradient.
function see.forgotten(model, optimizer)
  model:backward((model.module.out.weight * 2):sum())
  return (pcall(optimizer.step, optimizer))
end

--- Returns the number of updates after four micro-batches of two rows.
function see.updates(model, optimizer)
  for _ = 1, 4 do
    model:backward(model(batch()))
    optimizer:step()
  end
  return optimizer.steps
end

--- Returns whether backward has updated parameters.
function see.overlap(model, optimizer)
  local before = bytes(model.out.bias)
  model:backward(model(batch()))
  local after = bytes(model.out.bias)
  optimizer:step()
  return after ~= before
end

--- Returns the learning rates and betas of twelve steps.
function see.rates(model, optimizer)
  local all, schedule = {}, inner(model).scheduler
  for _, value in ipairs { 10, 9.9995, 10, 8, 8, 8, 8, 8, 8, 8, 8, 8 } do
    local group = optimizer.groups[1]
    all[#all + 1] = ("%.9g %.9g %.9g"):format(group.lr, group.betas[1], group.betas[2])
    train(model, optimizer, 1)
    if schedule and schedule.judge then schedule:step(value) end
  end
  return all
end

--- Returns the loss scales of steps, some of which (x) overflow.
function see.scales(model, optimizer)
  local all = {}
  for step in ("..x.xx...x...xx"):gmatch(".") do
    all[#all + 1] = optimizer.scaler and optimizer.scaler.scale or "none"
    local loss = model(batch())
    model:backward(step == "x" and loss * math.huge or loss)
    optimizer:step()
  end
  return all
end

function see.printed(model, optimizer)
  train(model, optimizer, 10)
  return printed
end

function see.said(model)
  local list = {}
  for text in pairs(inner(model).said) do list[#list + 1] = text end
  table.sort(list)
  return table.concat(list, "\n")
end

--- Returns the chunks by kind, dtype and size.
function see.chunks()
  local list = {}
  for i, chunk in ipairs(chunks.chunks()) do list[i] = chunk.kind .. " " .. chunk.nbytes end
  return list
end

function see.tiers()
  local list = {}
  for i, tier in ipairs(chunks.tiers() or {}) do list[i] = tier.name .. " " .. tier.budget end
  return list
end

--- Changes one bit in each block of the disk tier's file, and returns the next step's result.
function see.damage(model, optimizer)
  train(model, optimizer, 2)
  ps.check(ps.C.ps_engine_settle(ps.ctx))
  local list = assert(io.popen(("ls -l /proc/%d/fd"):format(unistd.getpid())))
  local links = list:read "*a"
  list:close()
  for number, name in links:gmatch "(%d+) %-> ([^\n]*)" do
    if name:find(folder, 1, true) and name:find("deleted", 1, true) then
      local file = assert(io.open("/proc/self/fd/" .. number, "r+b"))
      local size = file:seek "end"
      for at = 0, size - 1, 4096 do
        file:seek("set", at)
        local byte = file:read(1):byte()
        file:seek("set", at)
        file:write(string.char(byte % 2 == 0 and byte + 1 or byte - 1))
      end
      file:close()
    end
  end
  local ok, problem = pcall(train, model, optimizer, 1)
  return ok and "trained" or tostring(problem):match "are damaged: their checksum" or tostring(problem)
end

--- Returns the bytes that move in five steps.
function see.moved(model, optimizer)
  train(model, optimizer, 5)
  local list = {}
  for i, tier in ipairs(chunks.tiers()) do list[i] = ("%d up, %d down"):format(tier.bytes_up, tier.bytes_down) end
  return list
end

--- Returns the bytes copied to the device before each layer of a forward pass, minus those copied before the first
--- layer.
function see.ahead(model, optimizer)
  train(model, optimizer, 2)
  local up = {}
  for _, layer in model.h:each() do
    rawset(layer, "forward", function(self, ...)
      ps.check(ps.C.ps_engine_settle(ps.ctx))
      up[#up + 1] = chunks.tiers()[2].bytes_up - (up[1] or 0)
      return nn.Linear.forward(self, ...)
    end)
  end
  train(model, optimizer, 1)
  up[1] = 0
  return { unpack(up, 1, 4) }
end

--- Returns the placement of Adam's updates and their predicted time.
function see.split(model, optimizer)
  train(model, optimizer, 1)
  local split = inner(model).plan.adam_split
  if not split then return "none" end
  return ("%d of %d: %.6g %.6g %.6g"):format(split.count, inner(model).built.units, split.link or 0, split.host or 0,
    split.device or 0)
end

--- Returns the open files in the spec's folder, which belong to the disk tier.
function see.files()
  local n = 0
  for name in lfs.dir("/proc/self/fd") do
    local at = lfs.symlinkattributes("/proc/self/fd/" .. name, "target")
    if at and at:find(folder, 1, true) then n = n + 1 end
  end
  return n
end

--- Returns the monitors' files in the spec's folder after two steps.
function see.monitored(model, optimizer)
  train(model, optimizer, 2)
  local list = {}
  local files = io.popen(("find '%s' -name '*.csv' -o -name '*tfevents*'"):format(folder))
  for path in files:lines() do list[#list + 1] = path:gsub("tfevents.*", "") end
  files:close()
  os.execute(("rm -rf '%s'/*"):format(folder))
  table.sort(list)
  return list
end

local MIB = 1024 * 1024
local KIB = 1024
local FAST = { up = 1e15, down = 1e15, host_adam = 1e6, device_adam = 1e12, at_once = 1 }
local SLOW = { up = 1e6, down = 1e6, host_adam = 1e12, device_adam = 1e12, at_once = 0.5 }
local SIM = { device = "sim", memory = { device = "64MiB", host = "64MiB" }, use_cpu_embedding = false, rates = SLOW }
local TIGHT = over(SIM, { chunk_size = 4096, bf16 = { enabled = true }, memory = { device = 400 * KIB },
  client = { mem_tracer = { margin_use_ratio = 0.3 } } })
local NARROW = over(SIM, { chunk_size = 4096, bf16 = { enabled = true }, memory = { device = 300 * KIB } })
local SGD = { optimizer = { type = "SGD" } }
local MOMENTUM = over(SGD, { optimizer = { params = { momentum = 0.9 } } })
local FP16 = { fp16 = { enabled = true, initial_scale_power = 8, hysteresis = 1, loss_scale_window = 3 } }

-- Returns settings for the cpu with a disk that holds half of the state.
local function disk(more)
  return over({ chunk_size = 4096, memory = { host = 700 * KIB, disk = { path = folder } } }, more or {})
end

-- Returns the number of a block's forwards within backward.
local function see_recompute(model, optimizer)
  local calls = 0
  local layer = model.h[1]
  rawset(layer, "forward", function(self, ...)
    calls = calls + 1
    return nn.Linear.forward(self, ...)
  end)
  model:backward(model(batch()))
  optimizer:step()
  calls = 0
  model:backward(model(batch()))
  return calls
end

-- -- the cases: path, value, observation, the settings around it -----------------------------------------------------
-- The cases: path, value, observation, and the settings around it. Each is { value, see, base = settings (or a function
-- that returns them), other = a value to compare with in place of the default, width = the model's width, differs =
-- fun(given, otherwise) in place of "not equal", refused = a pattern for the error }.
local CASES = {
  train_batch_size = { 4, see.updates, base = { train_micro_batch_size_per_gpu = 2 } },
  train_micro_batch_size_per_gpu = { 2, see.updates, base = { train_batch_size = 4 } },
  gradient_accumulation_steps = { 2, see.updates },
  steps_per_print = { 5, see.printed },
  wall_clock_breakdown = { true, see.printed, differs = function(given)
    local seconds, speed = given:match("^step 10: .* (%S+) s per step %(forward [%d.e-]+, backward [%d.e-]+, "
      .. "step [%d.e-]+%), (%S+) TFLOP/s\n$")
    -- products of 16 rows, in four layers of 64 x 64 and one of 64 x 256: one in forward, and two in backward
    local flops = seconds * speed * 1e12 / (3 * 2 * 16 * (4 * 64 * 64 + 64 * 256))
    assert.truthy(math.abs(flops - 1) < 0.01, given)                  -- both are rounded to three digits
  end },
  memory_breakdown = { true, function(model, optimizer)
    ps.collect_all()
    ps.reset_peak_memory()
    return see.printed(model, optimizer)
  end, differs = function(given, otherwise)
    assert.matches("^step 10: [^\n]*\ntier .*\nhost .*\ncpu: %S+ %S+ in use, .*\n"
      .. "the largest of %S+ %S+ in use:\n.*of out", given)
    assert.equal("", otherwise)
  end },
  gradient_clipping = { 0.01, see.values },
  device = { "sim", function(model) return model:parameters()[1]:device() end },
  memory = { "plain", see.chunks },
  chunk_size = { 4096, see.chunks },
  eviction = { "fifo", see.moved, base = disk },
  prefetch = { false, see.ahead, base = NARROW },
  overlap_optimizer = { false, see.overlap },
  recompute = { true, see_recompute },
  ["pipeline.activation_checkpoint_interval"] = { 1, see_recompute },
  plan_print = { false, see.printed, other = true },
  strict_gradients = { true, see.forgotten },
  seed = { 5, see.values },
  use_cpu_embedding = { true, function(model, optimizer)
    train(model, optimizer, 1)
    return model.tokens.weight:device()
  end, base = over(SIM, {}), other = false },
  vocabulary_size = { 50257, see.said },

  ["memory.kind"] = { "plain", see.chunks },
  ["memory.master"] = { "remainder", see.state_bytes, base = { bf16 = { enabled = true } } },
  ["memory.device"] = { 32 * MIB, see.tiers, base = { device = "sim" } },
  ["memory.host"] = { 32 * MIB, see.tiers },
  ["memory.disk.path"] = { function() return folder end, see.tiers, base = { memory = { host = "32MiB" } } },
  ["memory.disk.limit"] = { 48 * MIB, see.tiers, base = disk },
  ["memory.disk.checksums"] = { true, see.damage, base = disk },

  ["optimizer.type"] = { "AdamW", see.values, base = { optimizer = { params = { weight_decay = 0.1 } } } },
  ["optimizer.params.lr"] = { 0.01, see.values },
  ["optimizer.params.betas"] = { { 0.5, 0.6 }, see.values },
  ["optimizer.params.eps"] = { 0.1, see.values },
  ["optimizer.params.weight_decay"] = { 0.1, see.values },
  ["optimizer.params.momentum"] = { 0.9, see.values, base = SGD },
  ["optimizer.params.dampening"] = { 0.5, see.values, base = MOMENTUM },
  ["optimizer.params.nesterov"] = { true, see.values, base = MOMENTUM },
  ["optimizer.params.warmup_steps"] = { 9, see.values, base = { optimizer = { type = "AdamWScheduleFree" } } },
  ["optimizer.params.r"] = { 3, see.values, base = { optimizer = { type = "AdamWScheduleFree" } } },
  ["optimizer.params.weight_lr_power"] = { 0, see.values, base = { optimizer = { type = "AdamWScheduleFree",
    params = { warmup_steps = 9 } } } },
  ["optimizer.params.alpha"] = { 0.5, see.values, base = { optimizer = { type = "RMSprop" } } },
  ["optimizer.params.muon_lr"] = { 0.01, see.values, base = { optimizer = { type = "Muon" } } },
  ["optimizer.params.adam_lr"] = { 0.01, see.values, base = { optimizer = { type = "Muon" } } },
  ["optimizer.params.ns_coefficients"] = { { 3, -4, 2 }, see.values, base = { optimizer = { type = "Muon" } } },
  ["optimizer.params.ns_steps"] = { 2, see.values, base = { optimizer = { type = "Muon" } } },
  ["optimizer.params.adjust_lr_fn"] = { "match_rms_adamw", see.values, base = { optimizer = { type = "Muon" } } },
  ["optimizer.params.beta2_decay"] = { -0.5, see.values, base = { optimizer = { type = "Adafactor" } } },
  ["optimizer.params.eps2"] = { 0.5, see.values, base = { optimizer = { type = "Adafactor" } } },
  ["optimizer.params.d"] = { 100, see.values, base = { optimizer = { type = "Adafactor" } } },
  ["optimizer.params.eps1"] = { 0.1, see.values, base = { optimizer = { type = "Adafactor" } } },
  ["optimizer.params.decay_rate"] = { -0.5, see.values, base = { optimizer = { type = "HuggingFaceAdafactor" } } },
  ["optimizer.params.clip_threshold"] = { 0.01, see.values, base = { optimizer = { type = "HuggingFaceAdafactor" } } },
  ["optimizer.params.scale_parameter"] = { true, see.values, base = { optimizer = { type = "HuggingFaceAdafactor" } } },
  ["optimizer.params.relative_step"] = { true, see.values, base = { optimizer = { type = "HuggingFaceAdafactor" } } },
  ["optimizer.params.warmup_init"] = { true, see.values, base = { optimizer = {
    type = "HuggingFaceAdafactor", params = { relative_step = true } } } },
  ["optimizer.params.grad_averaging"] = { false, see.values, base = { optimizer = { type = "LAMB" } } },
  ["optimizer.params.always_adapt"] = { true, see.values, base = { optimizer = { type = "LAMB",
    params = { weight_decay = 0 } } } },
  ["optimizer.params.trust_clip"] = { true, see.values, base = { optimizer = { type = "LAMB",
    params = { weight_decay = 0.1 } } } },
  ["optimizer.params.adam_w_mode"] = { true, see.values, base = { optimizer = { params = { weight_decay = 0.1 } } } },
  ["optimizer.params.use_hybrid_adam"] = { false, see.split, base = over(TIGHT, { rates = FAST }) },
  ["scheduler.type"] = { "warmup_linear", see.rates, other = "warmup_cosine",
    base = { scheduler = { params = { total = 20, warmup = 2 } } } },

  ["fp16.enabled"] = { true, function(model) return model.out.bias:dtype() end },
  ["fp16.loss_scale"] = { 32, see.scales, base = FP16 },
  ["fp16.initial_scale_power"] = { 12, see.scales, base = FP16 },
  ["fp16.init_scale"] = { 48, see.scales, base = { fp16 = { enabled = true } } },
  ["fp16.loss_scale_window"] = { 2, see.scales, base = FP16, other = 1000 },
  ["fp16.hysteresis"] = { 3, see.scales, base = FP16, other = 1 },
  ["fp16.consecutive_hysteresis"] = { true, see.scales, base = over(FP16, { fp16 = { hysteresis = 2 } }) },
  ["fp16.min_loss_scale"] = { 128, function(model, optimizer)
    local ok, all = pcall(see.scales, model, optimizer)
    return ok and math.min(unpack(all)) or tostring(all):match("at the smallest loss scale, %d+")
  end, base = FP16, differs = function(given, otherwise)
    assert.same({ "at the smallest loss scale, 128", 8 }, { given, otherwise })
  end },
  ["bf16.enabled"] = { true, function(model) return model.out.bias:dtype() end },
  ["bf16.check_grad_overflow"] = { true, function(model, optimizer)
    model:backward(model(batch()) * math.huge)
    return optimizer:step().skipped
  end, base = { bf16 = { enabled = true } } },
  ["data_types.grad_accum_dtype"] = { "bf16", see.chunks, base = { bf16 = { enabled = true },
    gradient_accumulation_steps = 2 } },
  ["data_types.param_dtype"] = { "bf16", see.chunks, refused = "data_types.param_dtype is \"bf16\", but" },

  ["zero_optimization.cpu_offload"] = { true, see.split, base = over(SIM, { rates = FAST }) },
  ["zero_optimization.cpu_offload_params"] = { true, see.said, base = SIM },
  ["zero_optimization.offload_optimizer.device"] = { "cpu", see.split, base = over(SIM, { rates = FAST }) },
  ["zero_optimization.offload_optimizer.nvme_path"] = { function() return folder end, see.files,
    base = { zero_optimization = { offload_optimizer = { device = "nvme" } } } },
  ["zero_optimization.offload_optimizer.ratio"] = { 0.5, see.split, base = over(SIM, { rates = FAST,
    chunk_size = 4096, zero_optimization = { offload_optimizer = { device = "cpu" } } }) },
  ["zero_optimization.offload_param.device"] = { "nvme", see.tiers, base = function()
    return { memory = { host = "32MiB" }, zero_optimization = { offload_param = { nvme_path = folder } } }
  end },
  ["zero_optimization.offload_param.nvme_path"] = { function() return folder end, see.files,
    base = { zero_optimization = { offload_param = { device = "nvme" } } } },
  ["activation_checkpointing.cpu_checkpointing"] = { true, function(model, optimizer)
    for _ = 1, 2 do
      model:backward(model(batch(64)))
      optimizer:step()
    end
    return chunks.tiers()[2].peak
  end, base = SIM, differs = function(given, otherwise)
    assert.truthy(given > 2 * otherwise, ("%d and %d bytes of the host"):format(given, otherwise))
  end },

  ["client.mem_tracer.overall_gpu_mem_ratio"] = { 0.4, function() return chunks.tiers()[1].budget end,
    base = { device = "sim" }, differs = function(given, otherwise)
      assert.truthy(math.abs(given / otherwise - 0.5) < 0.05, given / otherwise)
    end },
  ["client.mem_tracer.overall_cpu_mem_ratio"] = { 0.2, function() return chunks.tiers()[1].budget end,
    differs = function(given, otherwise)                              -- a fraction of the free memory, which changes
      assert.truthy(given / otherwise > 0.15 and given / otherwise < 0.4, given / otherwise)
    end },
  ["client.mem_tracer.margin_use_ratio"] = { 0.1, see.split, base = TIGHT, other = 0.8 },
  ["client.opts.with_async_move"] = { false, see.ahead, base = NARROW },
}

for _, name in ipairs { "tensorboard", "csv_monitor" } do
  local function on(more) return over({ train_batch_size = 2 }, { [name] = more }) end
  local function where(key)
    return function(given, otherwise)
      assert.truthy(#given > 0 and #given == #otherwise, "no files, or others")
      for _, text in ipairs(given) do assert.matches(key, text) end
      for _, text in ipairs(otherwise) do assert.not_matches(key, text) end
    end
  end
  CASES[name .. ".enabled"] = { true, see.monitored, base = function() return on { output_path = folder } end,
    differs = function(given, otherwise) assert.truthy(#given > 0 and #otherwise == 0) end }
  CASES[name .. ".output_path"] = { function() return folder .. "/elsewhere" end, see.monitored,
    base = function() return on { enabled = true, output_path = folder } end, differs = where "/elsewhere/" }
  CASES[name .. ".job_name"] = { "gpt", see.monitored,
    base = function() return on { enabled = true, output_path = folder } end, differs = where "/gpt/" }
end

do
  local function case(value, differs)
    return { value, see.printed, base = { flops_profiler = { enabled = true } }, differs = differs }
  end
  CASES["flops_profiler.enabled"] = { true, see.printed, differs = function(given, otherwise)
    assert.equal("", otherwise)
    assert.equal(1, select(2, given:gsub("flops_profiler: step ", "")))
    -- One product in forward and two in backward, of 16 rows, in four layers of 64 x 64 and one of 64 x 256.
    local flops = 3 * 2 * 16 * (4 * 64 * 64 + 64 * 256)
    assert.truthy(given:find(("most operations (the model) %.4g GFLOP"):format(flops * 1e-9), 1, true), given)
    assert.truthy(given:find(("most operations h %.4g GFLOP\n"):format(flops * 0.5e-9), 1, true)
      or given:find(("most operations out %.4g GFLOP\n"):format(flops * 0.5e-9), 1, true), given)
  end }
  CASES["flops_profiler.profile_step"] = case(0, function(given, otherwise)
    assert.matches("^flops_profiler: step 1\n", given)
    assert.matches("^flops_profiler: step 2\n", otherwise)
  end)
  CASES["flops_profiler.module_depth"] = case(1, function(given, otherwise)
    assert.matches("\nout ", given)
    assert.not_matches("h%.0", given)
    assert.matches("\nh%.0 ", otherwise)
    assert.matches("\ndepth 2: ", otherwise)
  end)
  CASES["flops_profiler.top_modules"] = case(2, function(given, otherwise)
    assert.matches("\ndepth 1: most time %S+ %S+ ms, %S+ %S+ ms; most operations %S+ %S+ GFLOP, %S+ %S+ GFLOP\n", given)
    assert.matches("\ndepth 1: most time %S+ %S+ ms; most operations %S+ %S+ GFLOP\n", otherwise)
  end)
  CASES["flops_profiler.detailed"] = case(false, function(given, otherwise)
    assert.matches("^flops_profiler: step 2\nper step: %S+ ms; [^\n]*\ndepth 0: ", given)
    assert.matches("^flops_profiler: step 2\nmodule .*\nh%.0 .*\nper step: ", otherwise)
  end)
  CASES["flops_profiler.output_file"] = { function() return folder .. "/flops.txt" end, function(model, optimizer)
    train(model, optimizer, 2)
    local text = text_of(folder .. "/flops.txt")
    os.remove(folder .. "/flops.txt")
    return text or "nothing"
  end, base = { flops_profiler = { enabled = true } }, differs = function(given, otherwise)
    assert.matches("^flops_profiler: step 2\n.*\ndepth 2: [^\n]*\n$", given)
    assert.equal("nothing", otherwise)
  end }
end

for _, key in ipairs { "host_adam", "device_adam", "up", "down", "at_once" } do
  CASES["rates." .. key] = { key == "at_once" and 1 or key:match("adam") and 1e7 or 1e5, see.split, other = SLOW[key],
    base = over(TIGHT, {}) }
end

-- Schedules: the effect of each key on the rates of twelve steps.
local SCHEDULES = {
  WarmupLR = { base = { warmup_num_steps = 5, warmup_max_lr = 0.1 }, warmup_min_lr = 0.01, warmup_max_lr = 0.2,
    warmup_num_steps = 8, warmup_type = "linear",
    last_batch_iteration = 3 },
  WarmupDecayLR = { base = { total_num_steps = 10, warmup_num_steps = 4 }, total_num_steps = 12, warmup_min_lr = 1e-4,
    warmup_max_lr = 0.2, warmup_num_steps = 8, warmup_type = "linear",
    last_batch_iteration = 3 },
  WarmupCosineLR = { base = { total_num_steps = 10, warmup_num_steps = 4 }, total_num_steps = 12,
    warmup_min_ratio = 0.1, warmup_num_steps = 8, cos_min_ratio = 0.3, warmup_type = "linear",
    last_batch_iteration = 3 },
  OneCycle = { base = { cycle_min_lr = 0.01, cycle_max_lr = 0.1, cycle_first_step_size = 3, decay_step_size = 2,
    decay_lr_rate = 0.5 }, cycle_min_lr = 0.02, cycle_max_lr = 0.2, decay_lr_rate = 0.9, cycle_first_step_size = 4,
    cycle_second_step_size = 5, cycle_first_stair_count = 2, cycle_second_stair_count = 1, decay_step_size = 1,
    cycle_momentum = false, cycle_min_mom = 0.7, cycle_max_mom = 0.95, decay_mom_rate = 0.01,
    last_batch_iteration = 3 },
  LRRangeTest = { base = { lr_range_test_step_size = 3 }, lr_range_test_min_lr = 0.01, lr_range_test_step_size = 4,
    lr_range_test_step_rate = 2, lr_range_test_staircase = true,
    last_batch_iteration = 3 },
  warmup_cosine = { base = { total = 10 }, max_lr = 0.1, min_lr = 1e-4, warmup = 3, total = 12 },
  warmup_linear = { base = { total = 10 }, max_lr = 0.1, min_lr = 1e-4, warmup = 3, total = 12 },
  constant = { base = {}, max_lr = 0.1, warmup = 3 },
  linear = { base = { num_training_steps = 10 }, num_warmup_steps = 3, num_training_steps = 12, last_epoch = 3 },
  cosine = { base = { num_training_steps = 10 }, num_warmup_steps = 3, num_training_steps = 12, num_cycles = 2,
    last_epoch = 3 },
  cosine_with_restarts = { base = { num_training_steps = 10 }, num_warmup_steps = 3, num_training_steps = 12,
    num_cycles = 2, last_epoch = 3 },
  polynomial = { base = { num_training_steps = 10 }, num_warmup_steps = 3, num_training_steps = 12, lr_end = 1e-4,
    power = 2, last_epoch = 3 },
  constant_with_warmup = { base = { num_warmup_steps = 5 }, num_warmup_steps = 3, last_epoch = 3 },
  inverse_sqrt = { base = { num_warmup_steps = 5 }, num_warmup_steps = 3, timescale = 2, last_epoch = 3 },
  cosine_with_min_lr = { base = { num_training_steps = 10, min_lr_rate = 0.1 }, num_warmup_steps = 3,
    num_training_steps = 12, num_cycles = 2, min_lr_rate = 0.2, last_epoch = 3 },
  cosine_warmup_with_min_lr = { base = { num_training_steps = 10, num_warmup_steps = 4, min_lr_rate = 0.1 },
    num_warmup_steps = 3, num_training_steps = 12, num_cycles = 2, min_lr_rate = 0.2, warmup_lr_rate = 0.5,
    last_epoch = 3 },
  warmup_stable_decay = { base = { num_warmup_steps = 3, num_decay_steps = 5, num_training_steps = 10 },
    num_warmup_steps = 4, num_decay_steps = 4, num_training_steps = 11, warmup_type = "cosine",
    decay_type = "1-sqrt", min_lr_ratio = 0.2, num_cycles = 1, last_epoch = 3 },
  reduce_lr_on_plateau = { base = { patience = 1 }, mode = "max", factor = 0.5, patience = 2, threshold = 0.3,
    threshold_mode = "abs", cooldown = 1, min_lr = 5e-4, eps = 5e-4 },
  OneCycleLR = { base = { max_lr = 0.1, total_steps = 10 }, max_lr = 0.2, total_steps = 12, pct_start = 0.5,
    anneal_strategy = "linear", cycle_momentum = false, base_momentum = 0.7, max_momentum = 0.97, div_factor = 10,
    final_div_factor = 100, three_phase = true, last_epoch = 3 },
  LambdaLR = { base = { lr_lambda = function(n) return 1 / (n + 1) end },
    lr_lambda = function() return function(n) return 2 / (n + 2) end end, last_epoch = 3 },
}
-- Settings for keys that replace other keys.
local SCHEDULE_BASES = {
  ["min_lr of cosine_with_min_lr"] = { { num_training_steps = 10, min_lr = 1e-4 }, 2e-4 },
  ["min_lr of cosine_warmup_with_min_lr"] = { { num_training_steps = 10, min_lr = 1e-4 }, 2e-4 },
  ["num_stable_steps of warmup_stable_decay"] = { { num_decay_steps = 5, num_stable_steps = 2 }, 3 },
  ["epochs of OneCycleLR"] = { { max_lr = 0.1, epochs = 2, steps_per_epoch = 4 }, 3 },
  ["steps_per_epoch of OneCycleLR"] = { { max_lr = 0.1, epochs = 2, steps_per_epoch = 4 }, 5 },
}
for name, case_of in pairs(SCHEDULE_BASES) do
  local key, kind = name:match "^(%S+) of (%S+)$"
  CASES["scheduler.params." .. name] = { case_of[2], see.rates, width = 4, other = case_of[1][key],
    base = { scheduler = { type = kind, params = case_of[1] } } }
end
for kind, settings in pairs(SCHEDULES) do
  for key, value in pairs(settings) do
    if key ~= "base" then
      CASES[("scheduler.params.%s of %s"):format(key, kind)] = { value, see.rates, width = 4,
        other = settings.base[key], base = { scheduler = { type = kind, params = settings.base } } }
    end
  end
end

-- Additional values for keys that have a case: path, then a case.
local MORE = {
  { "wall_clock_breakdown", { true, see.printed, base = { train_batch_size = 2 }, differs = function(given)
    local seconds, rate = given:match("^step 10: .* (%S+) s per step %(.*%), %S+ TFLOP/s, (%S+) samples/s\n$")
    assert.truthy(math.abs(seconds * rate / 2 - 1) < 0.01, given)
  end } },
  { "eviction", { "lru", see.moved, base = disk } },
  { "overlap_optimizer", { true, see.overlap, base = SIM } },
  { "fp16.loss_scale", { "dynamic", see.scales } },
  { "zero_optimization.offload_optimizer.device", { "nvme", see.tiers, base = function()
    return { memory = { host = "32MiB" }, zero_optimization = { offload_optimizer = { nvme_path = folder } } }
  end } },
}

-- Keys that only matter with several processes. They are tested below, except those of pipelines
-- (spec/parallel/pipeline_spec.lua), of tensor parallelism (spec/parallel/tensor_parallel_ranks_spec.lua) and
-- comms_logger (spec/profile/profiler_ranks_spec.lua).
local OF_RANKS = { ["zero_optimization.stage"] = true, ["zero_optimization.reshard_after_forward"] = true,
  compare_ranks_every = true, ["pipeline.stages"] = true, ["pipeline.schedule"] = true,
  ["pipeline.virtual_stages"] = true, ["pipeline.partition"] = true, ["tensor_parallel.size"] = true,
  ["tensor_parallel.sequence_parallel"] = true, ["tensor_parallel.tp_keep_gathered"] = true,
  ["tensor_parallel.tp_overlap_comm"] = true,
  ["comms_logger.enabled"] = true, ["comms_logger.verbose"] = true, ["comms_logger.prof_all"] = true,
  ["comms_logger.prof_ops"] = true }

-- -- the walk -------------------------------------------------------------------------------------------------------
local function each_honoured(visit)
  for _, section in ipairs(schema.sections) do
    for _, row in ipairs(section[3]) do
      if row.status == "honoured" then visit(row.path .. (section.of and " of " .. section.of or ""), row) end
    end
  end
end

setup(function() folder = ranks_lib.folder() end)
teardown(function() ranks_lib.remove(folder) end)
after_each(function()
  local open = require("ps.engine.setup").current()
  if open and not open.closed then open:close() end
end)

describe("a configuration key that is called honoured", function()
  local function differs(path, case)
    local base = type(case.base) == "function" and case.base() or case.base or {}
    local value = case[1]
    if type(value) == "function" then value = value() end
    local given = run(over(base, nested(path, value)), case[2], case.width)
    local without = over(base, {})
    if case.other ~= nil then without = over(base, nested(path, case.other)) end
    local otherwise = run(without, case[2], case.width)
    local said = type(given) == "string" and given:match("^error: (.*)") or ""
    assert.truthy(said:find(case.refused or "^$"), said)
    if case.differs then case.differs(given, otherwise) else assert.not_same(given, otherwise) end
  end

  each_honoured(function(name, row)
    if OF_RANKS[name] then return end
    it("does something: " .. name, function()
      differs(row.path, assert(CASES[name], "no case in spec/config/honoured_spec.lua tries it"))
    end)
  end)

  for _, more in ipairs(MORE) do
    it(("does something: %s = %s"):format(more[1], tostring(more[2][1])), function() differs(more[1], more[2]) end)
  end

  it("exists: every case belongs to a key", function()
    local known = {}
    each_honoured(function(name) known[name] = true end)
    for name in pairs(CASES) do assert.truthy(known[name], name) end
    for name in pairs(OF_RANKS) do assert.truthy(known[name], name) end
  end)

  it("has an effect with several processes: zero_optimization's, compare_ranks_every", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local all = ranks_lib.run(folder, 2, ranks_lib.begin(folder) .. [[
      local function bytes_held(stage)
        local model = ps.initialize { quiet = true, config = { chunk_size = 16384, plan_print = false,
          zero_optimization = { stage = stage } }, model_func = function()
            return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
          end }
        local sum = 0
        for _, chunk in ipairs(ps.chunks()) do if next(chunk.tiers) then sum = sum + chunk.nbytes end end
        model:close()
        return sum
      end
      local one, three = bytes_held(), bytes_held(3)
      if one > 1.6 * three then print "shared" end
      -- Two stripes of two layers, and each layer is a chunk. Two micro-batches gather them in the order 0 1 0 1 0,
      -- since each pass begins with the last stripe of the previous pass. Otherwise each stripe is gathered once. Each
      -- micro-batch sums both.
      local function sent(reshard)
        local model, optimizer = ps.initialize { quiet = true, config = { chunk_size = 16512, plan_print = false,
          gradient_accumulation_steps = 2, compare_ranks_every = 0,
          zero_optimization = { stage = 3, reshard_after_forward = reshard } }, model_func = function()
            return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
          end }
        local before
        for step = 1, 3 do
          if step == 3 then before = group:bytes_sent() end
          for _ = 1, 2 do model:backward(model(ps.ones { 2, 128 }):sum()) end
          optimizer:step()
          optimizer:zero_grad()
        end
        local chunks = (group:bytes_sent() - before) / ps.chunks()[1].nbytes
        model:close()
        -- the comparison of ranks before a step also sends some bytes
        return ("%.2f"):format(chunks)
      end
      if ("%s %s %s"):format(sent "always", sent(), sent "never") == "9.00 9.00 6.00" then print "stays" end
      local function drifts(every)
        local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false,
          compare_ranks_every = every }, model_func = function() return nn.Linear(8, 8) end }
        if rank == 1 then ps.no_grad(function() model.bias:add_(1) end) end
        local ok, problem = pcall(function()
          for _ = 1, 2 do
            model:backward(model(ps.ones { 2, 8 }):sum())
            optimizer:step()
          end
        end)
        model:close()
        return not ok and tostring(problem):find("states differ after step 2", 1, true) ~= nil
      end
      if drifts(2) and not drifts() then print "compared" end
    ]])
    for rank = 0, 1 do assert.equal("shared\nstays\ncompared\n", all[rank].text) end
  end)
end)

describe("numbers that no computation can represent", function()
  it("are refused, by key, or train to finite values", function()
    each_honoured(function(name, row)
      if name == "train_batch_size" then return end            -- it fails as the micro-batch size that follows from it
      for _, value in ipairs(row.type.least and { 1e308, 2 ^ 53 - 1 } or { 1e308 }) do
        local kind = name:match(" of (.*)")
        local settings = nested(row.path, value)
        if kind then
          settings.scheduler.type = kind
          settings = over({ scheduler = { params = SCHEDULES[kind].base } }, settings)
        end
        local seen = run(settings, function(model, optimizer)
          train(model, optimizer, 2)
          local sum = model:state_dict()["out.bias"]:sum():item()
          assert(math.abs(sum) < math.huge, "the values are not finite")
          return "fine"
        end, 4)
        assert.truthy(seen == "fine" or seen:find(row.key, 1, true), ("%s = %g: %s"):format(name, value, seen))
      end
    end)
  end)
end)

describe("another spelling of a key", function()
  local SPELT = { default_chunk_size = 4096, mem_tracer = { overall_cpu_mem_ratio = 0.3 },
    memtracer = { overall_cpu_mem_ratio = 0.3 }, bfloat16 = { enabled = true },
    ["client.memtracer"] = { overall_cpu_mem_ratio = 0.3 }, ["aio.thread_count"] = 2,
    micro_batch_size = 2, num_micro_batches = 3, ["tensor_parallel.autotp_size"] = 2,
    ["tensor_parallel.tp.tp_size"] = 2, ["model_parallelism.pipeline_parallel_size"] = 2,
    ["model_parallelism.tensor_parallel_size"] = 2, ["model_parallelism.micro_batch_size"] = 2 }

  for _, section in ipairs(schema.sections) do
    for _, row in ipairs(section[3]) do
      if row.status == "alias" then
        it("has the same effect as that key: " .. row.path, function()
          local function read(path) return config.read(nested(path, SPELT[row.path]), { later = true }) end
          assert.same(read(row.words), read(row.path))
          assert.not_same(config.read {}, read(row.path))
        end)
      end
    end
  end
end)

describe("ps.initialize", function()
  local HF = require("ps.paths").root .. "/spec/config/hf_auto.json"
  local AUTO = { lr = 0.25, total_num_steps = 100, warmup_num_steps = 10, ["bf16.enabled"] = true,
    gradient_accumulation_steps = 3 }
  local function facts(model, optimizer)
    local engine = inner(model)
    return { optimizer.defaults and optimizer.defaults.lr or engine.cfg.optimizer.params.lr, engine.accumulate,
      model.out.bias:dtype(), engine.scheduler:lr(1000), engine.cfg }
  end
  local function open(from, auto)
    local model, optimizer = ps.initialize { model_func = function() return Net(4) end, config = from, auto = auto,
      quiet = true }
    local seen = facts(model, optimizer)
    model:close()
    return seen
  end

  it("accepts values for \"auto\" and a table that was checked before", function()
    local seen = open(HF, AUTO)
    assert.same({ 0.25, 3, "bf16" }, { seen[1], seen[2], seen[3] })
    local again = open(seen[5])
    assert.same(seen[5], again[5])
    seen[5].optimizer.params.lr = 0.5
    assert.equal(0.5, open(seen[5])[1])
    local ok, why = pcall(open, HF, { learning_rate = 1 })
    assert.falsy(ok)
    assert.truthy(tostring(why):find('auto has "learning_rate"', 1, true), why)
    ok, why = pcall(open, HF)
    assert.falsy(ok)
    assert.truthy(tostring(why):find("ps.initialize { auto = { total_num_steps = ... } }", 1, true), why)
  end)

  it("adds the argument client to a file's settings", function()
    local model = ps.initialize { model = nn.Linear(4, 4), config = HF:gsub("hf_auto.json", "patrickstar.lua"),
      quiet = true, client = { opts = { with_async_move = false } } }
    assert.equal(false, inner(model).cfg.prefetch)
    model:close()
  end)
end)

describe("train_micro_batch_size_per_gpu", function()
  local Named = nn.class("NamedNet", Net)
  function Named:forward(given) return Net.forward(self, ps.is_tensor(given) and given or given.input_ids) end

  for _, settings in ipairs { { train_micro_batch_size_per_gpu = 2 }, { train_batch_size = 4,
    gradient_accumulation_steps = 2 }, { train_micro_batch_size_per_gpu = 2, memory = "plain" } } do
    it("is checked for batches of a training step, and for no others", function()
      local model, optimizer = ps.initialize { model_func = function() return Named(8) end, quiet = true,
        config = over({ plan_print = false }, settings) }
      local function try(x)
        return select(2, pcall(function()
          model:backward(model(x))
          optimizer:step()
        end))
      end
      assert.is_nil(try(batch(2)))
      assert.is_nil(try { input_ids = batch(2) })
      for _, wrong in ipairs { batch(3), { input_ids = batch(3), labels = batch(3) }, { batch(1) } } do
        local said = tostring(try(wrong))
        assert.truthy(said:find("train_micro_batch_size_per_gpu is 2", 1, true), said)
        assert.truthy(said:find("^spec/config/honoured_spec.lua:%d+: the batch has %d samples"), said)
      end
      assert.is_nil(try(batch(2)))
      assert.truthy(ps.is_tensor(ps.no_grad(function() return model(batch(3)) end)))
      model:eval()
      assert.truthy(tostring(try(batch(3))):find("train_micro_batch_size_per_gpu is 2", 1, true))
      assert.truthy(ps.is_tensor(ps.no_grad(function() return model(batch(3)) end)))
      model:close()
    end)
  end
end)

describe("offload_optimizer.device", function()
  local function offload(more)
    return over({ device = "sim", chunk_size = 4096, bf16 = { enabled = true }, rates = SLOW }, more)
  end
  local NONE = { zero_optimization = { offload_optimizer = { device = "none" } } }

  -- Returns the tiers that have chunks of optimizer state after a step, and the fraction of updates on the device.
  local function state_at(model, optimizer)
    train(model, optimizer, 2)
    local on = {}
    for _, chunk in ipairs(chunks.chunks()) do
      if chunk.kind == "exp_avg" then for tier in pairs(chunk.tiers) do on[tier] = true end end
    end
    return { device = on.device or false, host = on.host or false, count = inner(model).plan.adam_split.count,
      units = inner(model).built.units }
  end

  it("cpu keeps the state and its updates on the host", function()
    local seen = run(offload { memory = { device = "64MiB", host = "64MiB" },
      zero_optimization = { offload_optimizer = { device = "cpu" } } }, state_at)
    assert.same({ device = false, host = true, count = 0, units = seen.units }, seen)
  end)

  it("none keeps both on the device, even beyond the margin", function()
    local little = { memory = { device = "64MiB", host = "64MiB" },
      client = { mem_tracer = { margin_use_ratio = 0.001 } } }
    local free = run(offload(little), state_at)
    local kept = run(offload(over(little, NONE)), state_at)
    assert.truthy(free.count < free.units)
    assert.equal(kept.units, kept.count)
    assert.truthy(kept.device)
    assert.equal(run(offload(little), see.values)["out.bias"], run(offload(over(little, NONE)), see.values)["out.bias"])
  end)

  it("none is an error if the state does not fit, on every device", function()
    local tight = { memory = { device = 400 * KIB, host = "64MiB" } }
    assert.equal(4, run(offload(tight), see.updates))
    local said = run(offload(over(tight, NONE)), see.updates)
    assert.truthy(said:find('offload_optimizer.device is "none", but', 1, true), said)
    assert.truthy(said:find("raise memory.device", 1, true), said)
    assert.equal(4, run(disk(), see.updates))
    said = run(disk(NONE), see.updates)
    assert.truthy(said:find("between host and disk", 1, true), said)
  end)
end)

