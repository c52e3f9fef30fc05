-- SPDX-License-Identifier: BSD-3-Clause
-- Plans of several simulated ranks (tools/plan.lua --ranks), compared with real ranks of the same script: a small GPT-2
-- that is cut into stages, on four processes, and along all axes, on eight.
local cjson = require "cjson"
local paths = require "ps.paths"
local ranks_lib = require "spec.ranks_lib"

local WIDTH, POSITIONS, ROWS, MICROS, VOCAB = 64, 64, 8, 8, 512

-- Returns a script for four ranks. `settings` is the part of the configuration that differs. Real ranks print the peaks
-- of their tiers.
local function script(folder, settings, micros, rows)
  micros = micros or MICROS
  return ranks_lib.begin(folder) .. ([[
  local gpt2 = require "models.gpt2"
  local model, optimizer = ps.initialize { quiet = true,
    model_func = function() return gpt2.new { n_layer = 20, n_embd = %d, n_head = 4, n_positions = %d,
      vocab_size = %d, tie_word_embeddings = false } end,
    config = { gradient_accumulation_steps = %d, %s } }
  local x = ps.randint(0, %d, { %d, %d }, { dtype = "int32" })
  for step = 1, 2 do
    optimizer:zero_grad()
    for out in model:micro_batches(x, x) do model:backward(out.loss) end
    optimizer:step()
  end
  print(require("cjson").encode(require("ps.memory.chunks").tiers()))
  ]]):format(WIDTH, POSITIONS, VOCAB, micros, settings, VOCAB, micros * (rows or ROWS), POSITIONS)
end

-- Calls fn with changed environment variables.
local function with_environment(variables, fn)
  local setenv = require("posix.stdlib").setenv
  for name, value in pairs(variables) do setenv(name, value) end
  local ok, problem = pcall(fn)
  for name in pairs(variables) do setenv(name) end
  if not ok then error(problem, 0) end
end

local function plan(folder, ranks, text, ...)
  local name = folder .. "/planned.lua"
  local f = assert(io.open(name, "w"))
  f:write(text)
  f:close()
  local words, quoted = { paths.exe, "tools/plan.lua", "--json", "--find", "nothing", "--ranks", tostring(ranks), ... },
    {}
  words[#words + 1] = name
  for i, word in ipairs(words) do quoted[i] = "'" .. word .. "'" end
  local p = assert(io.popen("OMP_NUM_THREADS=1 " .. table.concat(quoted, " ") .. " 2>&1"))     -- as in ranks_lib
  local said = p:read "*a"
  p:close()
  local ok, value = pcall(cjson.decode, said)
  return assert(ok and value, said)
end

-- Returns a script for ranks on a mesh, in which a rank has `rows` of a batch. Real ranks print their tiers' peaks, and
-- the bytes that they sent along dp and tp in the second step.
local function mesh_script(folder, size, layers, settings)
  return ranks_lib.begin(folder) .. ([[
  local gpt2, C, hooks, mesh = require "models.gpt2", ps.C, require "ps.core.hooks", require "ps.dist.mesh"
  local size = %s
  local model, optimizer = ps.initialize { quiet = true,
    model_func = function() return gpt2.new({ n_layer = %d, n_embd = size.width, n_head = 4,
      n_positions = size.positions, vocab_size = 511, tie_word_embeddings = false }, { dropout = 0.1 }) end,
    config = { gradient_accumulation_steps = size.micros, %s } }
  local x = ps.randint(0, 511, { size.micros * size.rows, size.positions }, { dtype = "int32" })
  local before = {}
  hooks.on("action", function(action, begins)
    if not begins or action.kind ~= C.PS_ACT_FORWARD or action.micro > 0 or action.vstage > 0 then return end
    for _, axis in ipairs { "dp", "tp" } do before[axis] = mesh.group(axis) and mesh.group(axis):bytes_sent() end
  end)
  for step = 1, 2 do
    optimizer:zero_grad()
    for out in model:micro_batches(x, x) do model:backward(out.loss) end
    optimizer:step()
  end
  local sent = {}
  for axis, bytes in pairs(before) do sent[axis] = mesh.group(axis):bytes_sent() - bytes end
  print(require("cjson").encode { tiers = require("ps.memory.chunks").tiers(), sent = sent })
  ]]):format(size, layers, settings)
end

-- Returns the bytes of the disk's file without a limit: the memory of a rank's own fp32 parameters (value, exp_avg,
-- exp_avg_sq and gradient), 10 bytes per parameter while they are created, and 256 MiB.
local function file_of(parameters) return math.ceil(26 * parameters / 2 ^ 20 + 256) * 2 ^ 20 end

-- Draws a pipeline. Returns its number of ranks, its script, and whether a dry run can certainly repeat micro-batches.
-- On a device some micro-batches are run in full, for example if their activations move to the host.
local function drawn(folder, draw)
  local schedule = draw { "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v" }
  local stages, tp, dp = draw { 2, 3 }, draw { 1, 1, 2 }, draw { 1, 2 }
  local virtual = (schedule == "interleaved" or schedule == "looped_bfs") and 2 or schedule == "zb_v" and 2 or 1
  local micros, device = stages * draw { 3, 6, 9 }, draw { "cpu", "sim" }
  local settings = { ("device = '%s', pipeline = { stages = %d, schedule = '%s', virtual_stages = %d }"):format(device,
    stages, schedule, virtual) }
  local function set(text, ...) settings[#settings + 1] = text:format(...) end
  set("memory = { host = '%s', device = %s }", draw { "4GB", "40MB" },
    device == "sim" and draw { "12e6", "30e6", "80e6" } or "nil")
  if device == "sim" then set "rates = { host_adam = 1e9, device_adam = 4e9, up = 8e9, down = 8e9, at_once = 0 }" end
  if tp > 1 then set "tensor_parallel = { size = 2 }" end
  if dp > 1 then set("zero_optimization = { stage = %d }", draw { 0, 1, 2, 3 }) end
  if draw { true, false } then set "recompute = true" end
  if draw { true, false } then set "bf16 = { enabled = true }" end
  if draw { true, false, false, false } then set "activation_checkpointing = { cpu_checkpointing = true }" end
  local short = draw { true, false, false, false }           -- the last micro-batch has fewer rows
  local text = ranks_lib.begin(folder) .. ([[
  local gpt2 = require "models.gpt2"
  local model, optimizer = ps.initialize { quiet = true,
    model_func = function() return gpt2.new({ n_layer = %d, n_embd = 64, n_head = 4, n_positions = 32,
      vocab_size = 128, tie_word_embeddings = %s }, { dropout = %s }) end,
    config = { gradient_accumulation_steps = %d, %s } }
  local x = ps.randint(0, 128, { %d, 32 }, { dtype = "int32" })
  for out in model:micro_batches(x, x) do model:backward(out.loss) end
  optimizer:step()
  ]]):format(stages * virtual * 2, tostring(draw { true, false }), draw { "0", "0.1" }, micros,
    table.concat(settings, ", "), micros * 2 - (short and 1 or 0))
  return stages * tp * dp, text, device == "cpu"
end

describe("a dry run that performs few micro-batches", function()
  local folder
  setup(function() folder = ranks_lib.folder() end)
  teardown(function() ranks_lib.remove(folder) end)

  -- PS_PLAN_SEED=n draws other cases, and PS_FULL=1 draws more.
  it("has the plan of one that performs all, byte for byte", function()
    local seed = tonumber(os.getenv "PS_PLAN_SEED" or 1)
    local function draw(list)
      seed = seed * 16807 % (2 ^ 31 - 1)
      return list[1 + math.floor(seed / 1000) % #list]
    end
    local repeated = 0
    for number = 1, os.getenv "PS_FULL" == "1" and 60 or 7 do
      local ranks, text, repeats = drawn(folder, draw)
      local few, all = plan(folder, ranks, text), nil
      with_environment({ PS_DRY_RUN = "whole" }, function() all = plan(folder, ranks, text) end)
      local performed = few.cut and few.cut.performed
      if performed and repeats then assert.equal(4, performed, text) end
      if performed == 4 then repeated = repeated + 1 end
      for _, said in ipairs { few, all } do
        said.process = nil                                     -- a measurement, like rss
        if said.cut then said.cut.performed = nil end
        for _, run in ipairs(said.runs or {}) do run.rss = nil end
      end
      assert.same(all, few, ("case %d: %s"):format(number, text))
    end
    assert.truthy(repeated >= 4, repeated)
  end)
end)

describe("a plan of a mesh", function()
  local folder
  setup(function() folder = ranks_lib.folder() end)
  teardown(function() ranks_lib.remove(folder) end)

  it("has the peaks and bytes of eight real ranks, dp 2 x pp 2 x tp 2", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local text = mesh_script(folder, "{ width = 64, positions = 64, rows = 8, micros = 4 }", 8,
      "pipeline = { stages = 2 }, tensor_parallel = { size = 2 }, zero_optimization = { stage = 1 }")
    local said = plan(folder, 8, text)
    assert.truthy(said.fits, said.error and said.error.message)
    assert.same({ 2, 2, 2 }, { said.world, said.cut.stages, said.tp })
    for stage, run in ipairs(said.runs) do assert.equal(stage - 1, math.floor(run.rank / 4)) end
    for rank, got in pairs(ranks_lib.run(folder, 8, text)) do
      assert.equal(0, got.code, got.text)
      local run, real = said.runs[math.floor(rank / 4) + 1], cjson.decode(got.text)
      local off = run.tiers[1].peak / real.tiers[1].peak
      assert.truthy(off >= 0.97 and off <= 1.03, ("rank %d: planned %d, measured %d (%.4f)"):format(rank,
        run.tiers[1].peak, real.tiers[1].peak, off))
      if rank - rank % 2 == run.rank then            -- tp ranks send the same; dp ranks own different parameters
        assert.same(real.sent, { dp = run.axes.dp, tp = run.axes.tp })
      end
    end
  end)

  it("sends the theoretical bytes within a layer", function()
    for settings, factor in pairs { [""] = 10, [", tp_keep_gathered = true"] = 8, [", tp_overlap_comm = 3"] = 10 } do
      local function sent(layers)
        local said = plan(folder, 2, mesh_script(folder, "{ width = 256, positions = 128, rows = 8, micros = 2 }",
          layers, ("tensor_parallel = { size = 2%s }"):format(settings)))
        assert.truthy(said.fits, said.error and said.error.message)
        return said.axes.tp, said.pieces, said
      end
      -- (t - 1) / t of B T C fp32 numbers per micro-batch, and once per step the layer's six gradients of which both
      -- ranks have addends, with their flags.
      local rows = 2 * factor / 2 * 8 * 128 * 256 * 4
      local more, more_pieces, said = sent(3)
      local less, less_pieces = sent(2)
      assert.equal(rows + (6 * 256 + 16) * 4, more - less)
      if settings:find "overlap" then
        assert.equal(3, more_pieces.count)
        assert.equal(rows, more_pieces.nbytes - less_pieces.nbytes)
        local text = table.concat(require("ps.planning.report").lines(said), "\n")
        assert.truthy(text:find("during products in 3 pieces", 1, true), text)
      else
        assert.is_nil(more_pieces)
      end
    end
  end)

  it("reports that on cuda no rows are exchanged during products, and counts none as such", function()
    local said = plan(folder, 2, mesh_script(folder, "{ width = 64, positions = 16, rows = 2, micros = 1 }", 1,
      "device = 'cuda', tensor_parallel = { size = 2, tp_overlap_comm = true }"), "--hardware", "h200x2")
    assert.truthy(said.fits, said.error and said.error.message)
    assert.truthy(table.concat(said.notes, "\n"):find(
      "tp_overlap_comm: on cuda rows are exchanged before and after whole products", 1, true), said.notes[1])
    assert.is_nil(said.pieces)
    assert.truthy(said.axes.tp > 0)
  end)

  it("has a disk's file for a rank's part of the layers", function()
    local said = plan(folder, 2, mesh_script(folder, "{ width = 256, positions = 16, rows = 2, micros = 2 }", 4,
      'tensor_parallel = { size = 2 }, memory = { host = "64MiB", disk = { path = "/tmp" } }'))
    assert.truthy(said.fits, said.error and said.error.message)
    assert.same({ "disk", file_of(said.parameters) }, { said.tiers[2].name, said.tiers[2].budget })
  end)

  it("of one process reports how it is planned", function()
    local ok, why = pcall(plan, folder, 1, mesh_script(folder, "{ width = 64, positions = 16, rows = 2, micros = 2 }",
      2, "tensor_parallel = { size = 2 }"))
    assert.is_false(ok)
    assert.truthy(tostring(why):find("with --ranks 2 and a script", 1, true), tostring(why))
  end)
end)

describe("a plan of four stages", function()
  local folder
  setup(function() folder = ranks_lib.folder() end)
  teardown(function() ranks_lib.remove(folder) end)

  for name, settings in pairs {
    ["1f1b"] = 'pipeline = { stages = 4 }',
    ["zb_h1 in bf16"] = 'bf16 = { enabled = true }, pipeline = { stages = 4, schedule = "zb_h1" }',
  } do
    it("has the peaks of four real ranks, " .. name, function()
      if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
      local text = script(folder, settings)
      local said = plan(folder, 4, text)
      assert.truthy(said.fits, said.error and said.error.message)
      assert.same({ 0, 1, 2, 3 }, said.kinds)
      local kinds = {}
      for i, run in ipairs(said.runs) do kinds[i] = run.kind end
      assert.same({ "first", "middle", "before last", "last" }, kinds)
      for rank, got in pairs(ranks_lib.run(folder, 4, text)) do
        assert.equal(0, got.code, got.text)
        local tier, planned = cjson.decode(got.text)[1], said.runs[rank + 1].tiers[1]
        local off = planned.peak / tier.peak
        assert.truthy(off >= 0.97 and off <= 1.03, ("rank %d: planned %d, measured %d (%.4f)"):format(rank,
          planned.peak, tier.peak, off))
      end
    end)
  end

  it("has the bytes sent between stages, and the schedule's bubble", function()
    local said = plan(folder, 4, script(folder, 'pipeline = { stages = 4, partition = "uniform" }'))
    local border = ROWS * POSITIONS * WIDTH * 4              -- bytes of fp32 activations
    for i, run in ipairs(said.runs) do
      assert.equal(MICROS * border * ((i < 4 and 1 or 0) + (i > 1 and 1 or 0)), run.axes.pp)
    end
    assert.truthy(said.bubble[1] >= 3 / (MICROS + 3))        -- equal stages have the smallest bubble
    assert.equal(4, said.cut.stages)
    assert.equal(MICROS, said.cut.micro_batches)
  end)

  -- Tensors below 64 KiB wait for Lua's collector. A dry run that never collected garbage counted those of all
  -- micro-batches.
  it("has room for many small micro-batches, like four real ranks", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local text = script(folder, 'pipeline = { stages = 4 }, memory = { host = "32MiB", disk = { path = "/tmp" } }', 40,
      2)
    local said = plan(folder, 4, text)
    assert.truthy(said.fits, said.error and said.error.message)
    for rank, got in pairs(ranks_lib.run(folder, 4, text)) do
      assert.equal(0, got.code, got.text)
      local run, real = said.runs[rank + 1], cjson.decode(got.text)
      assert.truthy(real[1].peak <= 1.03 * run.tiers[1].peak and run.tiers[1].peak <= 32 * 2 ^ 20)
      assert.same({ "disk", file_of(run.parameters) }, { real[2].name, real[2].budget })
      assert.equal(real[2].budget, run.tiers[2].budget)
    end
  end)

  it("of eight ranks names the one that owns most in each kind of stage", function()
    local said = plan(folder, 8, script(folder, 'pipeline = { stages = 4 }, zero_optimization = { stage = 1 }'),
      "--hardware", "h200x8")
    assert.equal(2, said.world)
    for i, rank in ipairs(said.kinds) do
      assert.equal(i - 1, math.floor(rank / 2))
    end
    assert.truthy(said.axes.dp > 0 and said.axes.pp > 0)
    local text = table.concat(require("ps.planning.report").lines(said), "\n")
    for _, line in ipairs { "in 4 stages, 1f1b, 1 virtual stage each, 8 micro%-batches; bubble", "\nbefore last +2 ",
      "\naxis pp: a rank sends up to ", "\nseconds per step: " } do
      assert.truthy(text:find(line), text)
    end
  end)

  it("counts the gathered tensors on all stages", function()
    local text = script(folder, 'pipeline = { stages = 4 }'):gsub("micro_batches%(x, x%)",
      "micro_batches(x, x, { gather = true })"):gsub("initialize { quiet", ("initialize { loss = function(out, given) "
      .. "return ps.F.cross_entropy(out.logits:reshape(-1, %d), given[2]:reshape(-1)) end, quiet"):format(VOCAB))
      :gsub("model:backward", ("local of = out.logits:shape() assert(of[1] == %d and of[2] == %d and of[3] == %d) "
      .. "model:backward"):format(ROWS, POSITIONS, VOCAB))
    local said = plan(folder, 4, text)
    assert.truthy(said.fits, said.error and said.error.message)
  end)

  it("is printed by rank 0, or by all ranks if requested", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    for asked, printed in pairs { ["true"] = { [0] = 1, 0 }, ['"all"'] = { [0] = 1, 1 } } do
      local said = ranks_lib.run(folder, 2, ranks_lib.begin(folder) .. ([[
        local model, optimizer = ps.initialize { model_func = function() return ps.nn.Linear(4, 4) end,
          config = { plan_print = %s, optimizer = { type = "AdamW" } } }
        model:backward(model(ps.randn { 2, 4 }):sum())
        optimizer:step()
      ]]):format(asked))
      for rank = 0, 1 do
        assert.equal(0, said[rank].code, said[rank].text)
        assert.equal(printed[rank], select(2, said[rank].text:gsub("plan: %d+ parameters", "")), said[rank].text)
      end
    end
  end)

  it("cuts by counted operations if a dry run cannot measure, and reports that", function()
    local said = plan(folder, 4, script(folder, 'pipeline = { stages = 4, partition = "measured" }'))
    assert.same(1, #said.notes)
    assert.truthy(said.notes[1]:find("a dry run of a script cannot measure", 1, true), said.notes[1])
    local counted = plan(folder, 4, script(folder, "pipeline = { stages = 4 }"))
    assert.same({}, counted.notes)
    assert.same(counted.cut, said.cut)
  end)
end)
