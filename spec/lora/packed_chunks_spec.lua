-- SPDX-License-Identifier: BSD-3-Clause
-- Packed weights in an engine are in chunks: budgets hold for them, they move to the disk tier or are read from the
-- user's GGUF file, and the bits are those of plain memory. Checkpoints of adapters over them have only trained values.
local lfs = require "lfs"
local ps = require "ps"
local check = require "spec.check_lib"
local chunks = require "ps.memory.chunks"
local handle = require "ps.nn.handle"
local packed = require "ps.nn.packed"
local paths = require "ps.paths"
local fails = check.fails

local MIB = 2 ^ 20
local folder, ids, model
local function at(name) return folder .. "/" .. name end

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
  ps.manual_seed(3)
  local made = require("models.llama").new { vocab_size = 96, hidden_size = 256, intermediate_size = 1024,
    num_hidden_layers = 8, num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64,
    initializer_range = 0.06 }
  made:save_gguf(at "m.gguf", { type = "q8_0", name = "x" })                      -- 8.7 MB
  ps.quantize(made, { double_quant = true })
  made:save_pretrained(at "nf4")                                                  -- 4.2 MB
  ids = ps.randint(0, 90, { 2, 9 }, { dtype = "int32" }):keep()
end)
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)
-- Closes the engine. Releases the tensors of a model in plain memory, which would count towards the next budget until
-- Lua's collector finds them.
local function close()
  local plain = {}
  if model and not chunks.tiers() then
    plain = model:parameters()
    packed.each(handle.module(model), function(weight) plain[#plain + 1] = weight end)
  end
  if model then model:close() end
  for _, t in ipairs(plain) do t:release() end
  model = nil
  ps.collect()
end

-- Opens an engine over a model of a file with packed weights and an adapter.
local function open(file, memory, mmap)
  close()
  ps.manual_seed(11)
  local optimizer
  model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, memory = memory,
    optimizer = { type = "AdamW", params = { lr = 1e-2 } } }, model_func = function()
    return ps.lora.wrap(ps.from_pretrained(at(file), { quiet = true, keep_quantized = true, mmap = mmap }), { r = 2 })
  end }
  return optimizer
end

after_each(close)

local function losses(optimizer, steps)
  local list = {}
  for i = 1, steps or 3 do
    local loss = model({ input_ids = ids, labels = ids }).loss
    list[i] = ("%.17g"):format(loss:item())
    model:backward(loss)
    optimizer:step()
  end
  return list
end

local function tier(name)
  for _, row in ipairs(chunks.tiers()) do if row.name == name then return row end end
end

describe("packed weights in an engine", function()
  it("are in chunks, which have the bits of plain memory under any budget", function()
    for _, row in ipairs { { "m.gguf", 8.0 * MIB, true }, { "m.gguf", 8.0 * MIB }, { "nf4", 3.8 * MIB, true },
      { "nf4", 3.8 * MIB } } do
      local file, nbytes, mmap = unpack(row)
      local want = losses(open(file, "plain", mmap))
      assert.same(want, losses(open(file, {}, mmap)))
      assert.truthy(tier("host").chunks > nbytes, file)
      local host = math.ceil(6.5 * MIB + nbytes / 2)       -- less than the chunks and the other tensors need
      local limit = (mmap and 2 or 16) * MIB
      assert.same(want, losses(open(file, { host = host, disk = { path = folder, limit = limit } }, mmap)))
      assert.truthy(tier("host").peak <= host)
      assert.truthy(tier("disk").bytes_up > 3 * nbytes / 2, tier("disk").bytes_up)        -- read again in each step
      if not os.getenv "PS_STRESS" then assert.truthy(tier("disk").bytes_down < 2 * MIB + (mmap and 0 or nbytes)) end
    end
  end)

  it("have room on the disk, as the parameters of a model of files have, if the configuration sets no limit", function()
    local nbytes = 3.8 * MIB
    local want = losses(open("nf4", "plain"))
    assert.same(want, losses(open("nf4", { host = math.ceil(6.5 * MIB + nbytes / 2), disk = { path = folder } })))
    local budget = tier("disk").budget
    assert.truthy(budget > nbytes and budget < 300 * MIB, budget)       -- 256 MiB more than the model's state
  end)

  it("may be packed while the engine makes its model", function()
    local function run(memory)
      ps.manual_seed(5)
      local optimizer
      model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, memory = memory,
        optimizer = { type = "AdamW", params = { lr = 1e-2 } } }, model_func = function()
        local made = require("models.llama").new("tiny", { hidden_size = 64, intermediate_size = 128,
          initializer_range = 0.1 })
        return ps.lora.wrap(ps.quantize(made), { r = 2 })
      end }
      local list = losses(optimizer)
      local held = memory ~= "plain" and tier("host").chunks
      close()
      return list, held
    end
    local want = run "plain"
    local got, held = run {}
    assert.same(want, got)
    assert.truthy(held > 0)
  end)

  it("are not in a checkpoint, which names their file, and training continues with the same bits", function()
    for _, file in ipairs { "m.gguf", "nf4" } do
      local optimizer = open(file, {})
      losses(optimizer, 2)
      ps.checkpoints.save(at "run.safetensors", { model = model, optimizer = optimizer })
      assert.truthy(lfs.attributes(at "run.safetensors", "size") < 2 * MIB)
      local want = losses(optimizer, 2)
      optimizer = open(file, {})
      ps.checkpoints.load(at "run.safetensors", { model = model, optimizer = optimizer })
      assert.same(want, losses(optimizer, 2))
    end
    ps.manual_seed(4)
    require("models.llama").new { vocab_size = 96, hidden_size = 256, intermediate_size = 1024, num_hidden_layers = 8,
      num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }:save_gguf(at "other.gguf",
      { type = "q8_0", name = "x" })
    local optimizer = open("m.gguf", {})
    ps.checkpoints.save(at "run.safetensors", { model = model, optimizer = optimizer })
    optimizer = open("other.gguf", {})
    fails(function() ps.checkpoints.load(at "run.safetensors", { model = model, optimizer = optimizer }) end,
      "m.gguf", "fingerprint", "other.gguf")
  end)

  it("train on two ranks, and cannot be cut", function()
    local script = at "ranks.lua"
    check.write(script, [[
local ps = require "ps"
local file, config = arg[1], loadstring("return " .. arg[2])()
ps.init_distributed { seed = 3, quiet = true }
config.plan_print, config.optimizer = false, { type = "AdamW", params = { lr = 1e-2 } }
local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
  ps.manual_seed(3)
  return ps.lora.wrap(ps.from_pretrained(file, { quiet = true, keep_quantized = true, mmap = "auto" }), { r = 2 })
end }
local list = {}
for i = 1, 4 do
  list[i] = {}
  for t = 1, 8 do list[i][t] = (7 * i + t * t * 3) % 60 end
end
local x, losses = ps.tensor(list, "int32"), {}
for step = 1, 3 do
  local sum, n = 0, 0
  for turn in model:micro_batches { input_ids = x, labels = x } do
    sum, n = sum + turn.loss:item(), n + 1
    turn.loss:backward()
  end
  optimizer:step()
  losses[step] = ("%.9g"):format(sum / n)
end
if ps.rank() == 0 then print("losses " .. table.concat(losses, " ") .. "|") end
model:close()
]])
    local function run(ranks, file, config)
      local launch = ranks > 1 and ("'%s/tools/launch.lua' --nproc-per-node %d"):format(paths.root, ranks) or ""
      local text = check.shell(("OMP_NUM_THREADS=1 timeout 300 '%s' %s '%s' '%s' '%s' 2>&1"):format(paths.exe, launch,
        script, at(file), config))
      return text:match "losses ([^|]*)|", text
    end
    local TWO = "gradient_accumulation_steps = 2, train_micro_batch_size_per_gpu = 2"
    for _, file in ipairs { "m.gguf", "nf4" } do
      local want, text = run(1, file, "{ " .. TWO .. " }")
      assert.truthy(want, text)
      for _, config in ipairs { "{ zero_optimization = { stage = 3 }, train_micro_batch_size_per_gpu = 2 }",
        "{ pipeline = { stages = 2 }, " .. TWO .. " }" } do
        local got
        got, text = run(2, file, config)
        assert.truthy(got, text)
        local numbers = {}
        for word in want:gmatch "%S+" do numbers[#numbers + 1] = tonumber(word) end
        for word in got:gmatch "%S+" do
          local one = table.remove(numbers, 1)
          assert.truthy(math.abs(tonumber(word) - one) < 1e-5 * one, config .. "\n" .. want .. "\n" .. got)
        end
        assert.equal(0, #numbers)
      end
    end
    local got, text = run(2, "m.gguf", "{ tensor_parallel = { size = 2 }, " .. TWO .. " }")
    assert.is_nil(got)
    assert.truthy(text:find("is packed (Q8_0) and cannot be cut; load the model without keep_quantized", 1, true), text)
  end)
end)
