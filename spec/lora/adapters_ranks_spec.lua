-- SPDX-License-Identifier: BSD-3-Clause
-- Adapters on two ranks: ZeRO, pipelines and tensor parallelism have the losses, the adapter and the text of one rank.
local ps = require "ps"
local check = require "spec.check_lib"
local paths = require "ps.paths"

local folder
setup(function()
  folder = os.tmpname()
  os.remove(folder)
  os.execute("mkdir -p " .. folder)
end)
teardown(function() os.execute("rm -rf " .. folder) end)

local SCRIPT = [[
local ps = require "ps"
local out, family, config, options, targets = arg[1], arg[2], loadstring("return " .. arg[3])(),
  loadstring("return " .. arg[4])(), loadstring("return " .. arg[5])()
ps.init_distributed { seed = 3, quiet = true }
local function make()
  ps.manual_seed(3)
  options.dropout, options.initializer_range = 0, 0.1
  local m = require("models." .. family).new("tiny", options)
  targets.init, targets.r, targets.alpha = false, 4, 8
  return ps.lora.wrap(m, targets)
end
config.plan_print, config.gradient_clipping = false, 1
config.optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0 } }
local model, optimizer = ps.initialize { quiet = true, model_func = make, config = config }
local list = {}
for i = 1, 4 do
  list[i] = {}
  for t = 1, 8 do list[i][t] = (7 * i + t * t * 3) % 60 end
end
local x, losses = ps.tensor(list, "int32"), {}
for step = 1, 5 do
  local sum, n = 0, 0
  for turn in model:micro_batches { input_ids = x, labels = x } do
    sum, n = sum + turn.loss:item(), n + 1
    turn.loss:backward()
  end
  optimizer:step()
  losses[step] = ("%.9g"):format(sum / n)
end
model:save_pretrained(out)
local ids = model:generate({ 1, 2, 3 }, 4, { temperature = 0 })
if ps.rank() == 0 then print("losses " .. table.concat(losses, " ") .. "|" .. table.concat(ids, " ") .. "|") end
model:close()
]]

-- Returns the losses, the text and the adapter's tensors of a run.
local function run(name, ranks, family, config, options, targets)
  local script, out = folder .. "/run.lua", folder .. "/" .. name
  check.write(script, SCRIPT)
  local launch = ranks > 1 and ("'%s/tools/launch.lua' --nproc-per-node %d"):format(paths.root, ranks) or ""
  local p = io.popen(("OMP_NUM_THREADS=1 timeout 300 '%s' %s '%s' %s %s '%s' '%s' '%s' 2>&1"):format(paths.exe, launch,
    script, out, family, config, options, targets))
  local text = p:read "*a"
  p:close()
  local line, ids = text:match "losses ([^|]*)|([^|]*)|"
  assert.truthy(line, text)
  local losses = {}
  for word in line:gmatch "%S+" do losses[#losses + 1] = tonumber(word) end
  local file, tensors = ps.safetensors.open(out .. "/adapter_model.safetensors"), {}
  for _, key in ipairs(file:names()) do tensors[key] = file:tensor(key) end
  file:close()
  return { losses = losses, ids = ids, tensors = tensors }
end

local TWO = "gradient_accumulation_steps = 2, train_micro_batch_size_per_gpu = 2"
local LAYOUTS = {
  { "ZeRO 3", "{ zero_optimization = { stage = 3 }, gradient_accumulation_steps = 1 }" },
  { "ZeRO 1", "{ zero_optimization = { stage = 1 }, gradient_accumulation_steps = 1 }" },
  { "a pipeline", "{ pipeline = { stages = 2 }, " .. TWO .. " }" },
  { "tensor parallelism", "{ tensor_parallel = { size = 2 }, " .. TWO .. " }" },
  { "tensor parallelism without shared rows",
    "{ tensor_parallel = { size = 2, sequence_parallel = false }, " .. TWO .. " }" },
}
local CASES = {
  { "gpt2", "{}", "{ targets = \"all-linear\" }" },
  { "llama", "{}", "{ targets = \"all-linear\", use_dora = true }" },
  { "gpt2", "{ tie_word_embeddings = false }",
    "{ targets = { \"wte\", \"c_proj\", \"lm_head\" }, use_rslora = true }" },
  { "llama", "{ tie_word_embeddings = false }",
    "{ targets = { \"embed_tokens\", \"lm_head\", \"up_proj\" }, use_dora = true }" },
}

describe("adapters of", function()
  for number, case in ipairs(CASES) do
    local family, options, targets = unpack(case)
    it(("%s, %s, have one rank's results on two ranks"):format(family, targets), function()
      local want = run("one", 1, family, "{ " .. TWO .. " }", options, targets)
      assert(want.losses[5] < want.losses[1])
      for at, layout in ipairs(LAYOUTS) do
        local got = run(("two%d%d"):format(number, at), 2, family, layout[2], options, targets)
        for step, loss in ipairs(want.losses) do
          assert(math.abs(got.losses[step] - loss) < 2e-5 * loss, ("%s, step %d: %.8g, not %.8g"):format(layout[1],
            step, got.losses[step], loss))
        end
        assert.equal(want.ids, got.ids, layout[1])
        for name, tensor in pairs(want.tensors) do
          assert.truthy(got.tensors[name] ~= nil, name)
          local far = (tensor - got.tensors[name]):abs():amax():item()
          assert(far < 2e-3, ("%s, %s: %.3g"):format(layout[1], name, far))
          got.tensors[name] = nil
        end
        assert.is_nil((next(got.tensors)))
      end
    end)
  end
end)

-- Two adapters train different modules as a whole, and a third one has adapters in these modules.
local SWITCHED = [[
local ps = require "ps"
local config, saved, out = loadstring("return " .. arg[1])(), loadstring("return " .. arg[2])(), arg[3]
ps.init_distributed { seed = 3, quiet = true }
local function make()
  ps.manual_seed(3)
  local m = require("models." .. saved.family).new("tiny", { dropout = 0, initializer_range = 0.1,
    tie_word_embeddings = saved.tied or false })
  ps.lora.wrap(m, { r = 2, init = false, name = "linear" })
  ps.lora.wrap(m, { r = 2, init = false, name = "one", targets = saved.targets, modules_to_save = saved.one,
    ensure_weight_tying = saved.tied })
  return ps.lora.wrap(m, { r = 3, init = false, targets = saved.targets, name = "two", modules_to_save = saved.two })
end
config.plan_print = false
config.optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0 } }
local model, optimizer = ps.initialize { quiet = true, model_func = make, config = config }
local list, values = {}, {}
for i = 1, 4 do
  list[i] = {}
  for t = 1, 8 do list[i][t] = (7 * i + t * t * 3) % 60 end
end
local x = ps.tensor(list, "int32")
local function loss() return ps.no_grad(model, { input_ids = x, labels = x }).loss:item() end
local function note() values[#values + 1] = ("%.9g"):format(loss()) end
for _, name in ipairs { "two", "one", "linear" } do
  model:set_adapter(name)
  for _ = 1, 2 do
    model:backward(model({ input_ids = x, labels = x }).loss)
    optimizer:step()
  end
  note()
  model:disable_adapter(note)
end
for _, name in ipairs { "one", "two" } do
  model:set_adapter(name)
  note()
  model:save_pretrained(out .. name)
end
if ps.rank() == 0 then print("values " .. table.concat(values, " ") .. "|") end
model:close()
]]

describe("modules that adapters train as a whole", function()
  -- Returns the losses of a run: three adapters with the base model after each, then two adapters again.
  local function losses(launch, config, saved, out)
    local script = folder .. "/switched.lua"
    check.write(script, SWITCHED)
    local p = io.popen(("OMP_NUM_THREADS=1 timeout 300 '%s' %s '%s' '%s' '%s' '%s' 2>&1"):format(paths.exe, launch,
      script, config, saved, out))
    local text, list = p:read "*a", {}
    p:close()
    for word in assert(text:match "values ([^|]*)|", text):gmatch "%S+" do list[#list + 1] = tonumber(word) end
    return list
  end

  for number, saved in ipairs {
    [[{ family = "llama", targets = { "v_proj" }, one = { "lm_head", "q_proj" }, two = { "mlp", "model.norm" } }]],
    [[{ family = "llama", targets = { "up_proj" }, one = { "embed_tokens", "down_proj" }, two = { "self_attn" } }]],
    [[{ family = "gpt2", tied = true, targets = { "c_fc" }, one = { "wte", "attn.c_proj" }, two = { "ln_f" } }]],
  } do
    it("are those of the active adapter on two ranks, too: " .. saved, function()
      local one = ("%s/one%d."):format(folder, number)
      local want = losses("", "{}", saved, one)
      assert.equal(want[2], want[4])
      assert.equal(want[2], want[6])
      for _, config in ipairs { "{ tensor_parallel = { size = 2 } }",
        "{ tensor_parallel = { size = 2, sequence_parallel = false } }", "{ zero_optimization = { stage = 3 } }" } do
        local two = ("%s/two%d."):format(folder, number)
        local got = losses(("'%s/tools/launch.lua' --nproc-per-node 2"):format(paths.root), config, saved, two)
        for i, value in ipairs(want) do
          assert(math.abs(got[i] - value) < 2e-5 * value, ("%s, loss %d: %.8g, not %.8g"):format(config, i, got[i],
            value))
        end
        for _, name in ipairs { "one", "two" } do
          local a = ps.safetensors.open(one .. name .. "/adapter_model.safetensors")
          local b = ps.safetensors.open(two .. name .. "/adapter_model.safetensors")
          assert.same(a:names(), b:names())
          for _, key in ipairs(a:names()) do
            assert.is_nil(key:find "lora_.*linear", key)
            assert((a:tensor(key) - b:tensor(key)):abs():amax():item() < 2e-3, key)
          end
          a:close()
          b:close()
        end
      end
    end)
  end
end)
