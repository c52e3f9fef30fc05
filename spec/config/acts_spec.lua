-- SPDX-License-Identifier: BSD-3-Clause
-- The schema names for each honoured key the file that acts on it (`acts`). This spec observes that the file reads the
-- key in training engines: of one process, and of ranks that cut a model.
local ps = require "ps"
local paths = require "ps.paths"
local nn = require "ps.nn"
local lfs = require "lfs"
local schema = require "ps.config.schema"
local reads_lib = require "spec.reads_lib"
local ranks_lib = require "spec.ranks_lib"
local F = ps.F

local folder, reads, stop
setup(function()
  folder = ranks_lib.folder()
  reads, stop = reads_lib.record()
end)
teardown(function()
  stop()
  ranks_lib.remove(folder)
end)

local Net = nn.class "ActsNet"
function Net:init()
  self.tokens = nn.Embedding(64, 16)
  self.h = nn.ModuleList()
  self.h:append(nn.Linear(16, 16))
  self.out = nn.Linear(16, 64)
end
function Net:forward(x)
  local h = self.tokens(x)
  for _, layer in self.h:each() do h = layer(h) end
  return F.cross_entropy(self.out(h):reshape(-1, 64), x:reshape(-1))
end

-- A model that does not use one of its layers.
local Forgetful = nn.class("ActsForgetful", Net)
function Forgetful:init()
  Net.init(self)
  self.unused = nn.Linear(16, 16)
end

-- Opens an engine with these settings and trains for two steps.
local function train(settings, class)
  settings.plan_print = settings.plan_print or false
  local model, optimizer = ps.initialize { model_func = function() return (class or Net)() end, config = settings,
    quiet = true }
  local out = io.stdout
  rawset(io, "stdout", { write = function() end, flush = function() end })
  local ok, problem = pcall(function()
    for _ = 1, 2 do
      model:backward(model(ps.randint(0, 64, { 2, 8 }, { dtype = "int32" })))
      optimizer:step()
      optimizer:zero_grad()
    end
  end)
  model:close()
  rawset(io, "stdout", out)
  assert(ok, problem)
end

-- Calls visit(name, row) for every supported key. The name of a schedule's parameter includes the schedule.
local function each_honoured(visit)
  for _, section in ipairs(schema.sections) do
    for _, row in ipairs(section[3]) do
      if row.status == "honoured" then visit(row.path .. (section.of and " of " .. section.of or ""), row) end
    end
  end
end

local SCHEDULES = { WarmupLR = {}, WarmupDecayLR = { total_num_steps = 2000 },
  WarmupCosineLR = { total_num_steps = 2000 }, OneCycle = { cycle_min_lr = 0.01, cycle_max_lr = 0.1,
  cycle_second_step_size = 9, cycle_second_stair_count = 1 }, LRRangeTest = {}, warmup_cosine = { total = 10 },
  warmup_linear = { total = 10 }, constant = {}, linear = { num_training_steps = 9 },
  cosine = { num_training_steps = 9 }, cosine_with_restarts = { num_training_steps = 9 },
  polynomial = { num_training_steps = 9 }, constant_with_warmup = {}, inverse_sqrt = { timescale = 9 },
  cosine_with_min_lr = { num_training_steps = 9, min_lr = 0 }, cosine_warmup_with_min_lr = { num_training_steps = 9,
  min_lr_rate = 0.1, warmup_lr_rate = 0.5 }, warmup_stable_decay = { num_decay_steps = 1, num_training_steps = 9,
  num_stable_steps = 8 }, reduce_lr_on_plateau = {}, OneCycleLR = { max_lr = 1, total_steps = 9 },
  LambdaLR = { lr_lambda = function() return 1 end } }
for kind, params in pairs { WarmupLR = "warmup_max_lr", warmup_cosine = "max_lr", warmup_linear = "max_lr",
  constant = "max_lr" } do SCHEDULES[kind][params] = 0.1 end

describe("every honoured key", function()
  it("names a file of the tree that acts on it", function()
    each_honoured(function(name, row)
      assert.equal("string", type(row.acts), name .. " has no `acts`")
      assert.equal("file", lfs.attributes(paths.root .. "/" .. row.acts, "mode"), name .. ": " .. row.acts)
    end)
  end)

  it("is read in engines of one process", function()
    train { train_batch_size = 2, steps_per_print = 1, wall_clock_breakdown = true, memory_breakdown = true, seed = 3,
      csv_monitor = { enabled = true, output_path = folder }, tensorboard = { enabled = true, output_path = folder },
      flops_profiler = { enabled = true, output_file = folder .. "/flops" }, plan_print = true, gradient_clipping = 1 }
    assert.matches("strict_gradients", select(2, pcall(train, { strict_gradients = true }, Forgetful)))
    train { memory = "plain" }
    train { optimizer = { type = "SGD", params = { momentum = 0.9 } } }
    train { optimizer = { type = "Muon", params = { muon_lr = 0.01, adam_lr = 0.01 } } }
    for _, kind in ipairs { "Adafactor", "HuggingFaceAdafactor", "Lion", "LAMB", "AdamW8bit", "AdamWBF16",
      "RMSprop", "AdamWScheduleFree", "Lion8bit" } do
      train { optimizer = { type = kind } }
    end
    train { fp16 = { enabled = true } }
    train { bf16 = { enabled = true }, device = "sim", memory = { device = "64MiB", host = "64MiB" },
      zero_optimization = { offload_optimizer = { device = "cpu" } } }
    train { memory = { host = "64MiB", disk = { path = folder } } }
    train { device = "sim", zero_optimization = { offload_optimizer = { device = "nvme", nvme_path = folder } } }
    train { device = "sim", zero_optimization = { offload_param = { device = "nvme", nvme_path = folder } },
      memory = { device = "64MiB" } }
    for kind, params in pairs(SCHEDULES) do train { scheduler = { type = kind, params = params } } end
    train { scheduler = { type = "cosine_with_min_lr", params = { num_training_steps = 9, min_lr_rate = 0.5 } } }
    train { scheduler = { type = "cosine_warmup_with_min_lr", params = { num_training_steps = 9, min_lr = 0.5 } } }
    train { scheduler = { type = "OneCycleLR", params = { max_lr = 1, epochs = 2, steps_per_epoch = 9 } } }
  end)

  it("is read in engines of ranks", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    for _, layout in ipairs { "dp = 2, config = { zero_optimization = { stage = 3 }, compare_ranks_every = 1, "
      .. "comms_logger = { enabled = true, prof_all = false, prof_ops = {} } }", "pp = 2", "tp = 2" } do
      local all = ranks_lib.check(folder, 2, ([[
        local reads_lib, mesh_lib = require "spec.reads_lib", require "bench.mesh_lib"
        local reads, stop = reads_lib.record()
        mesh_lib.rank { folder = folder, name = "run", micros = 2, steps = 1, %s }
        stop()
        io.write(reads_lib.text(reads))
      ]]):format(layout))
      for rank = 0, 1 do reads_lib.add(reads, all[rank].text) end
    end
  end)

  it("is read by that file", function()
    each_honoured(function(name, row)
      local files = {}
      for file in pairs(reads[name] or {}) do files[#files + 1] = file end
      table.sort(files)
      assert.truthy(reads[name] and reads[name][row.acts],
        ("%s: `acts` is %s; the files that read it are: %s"):format(name, tostring(row.acts),
        files[1] and table.concat(files, ", ") or "none"))
    end)
  end)
end)
