-- SPDX-License-Identifier: BSD-3-Clause
-- Folders of adapters: PEFT's names and shapes in the file, refusals by name, other base models, merged folders and
-- their memory. spec/oracle/lora_oracle.py compares with PEFT itself.
local ps = require "ps"
local check = require "spec.check_lib"
local cjson = require "cjson"
local lfs = require "lfs"
local paths = require "ps.paths"
local fails = check.fails

local folder
setup(function()
  folder = os.tmpname()
  os.remove(folder)
  os.execute("mkdir -p " .. folder)
end)
teardown(function() os.execute("rm -rf " .. folder) end)

local function at(name) return folder .. "/" .. name end

local function base(family, options)
  ps.manual_seed(5)
  local given = { pad_token_id = 0, initializer_range = 0.1 }
  for key, value in pairs(options or {}) do given[key] = value end
  require("models." .. family).new("tiny", given):save_pretrained(at "base")
  return ps.from_pretrained(at "base", { quiet = true })
end

local function noise(m)
  ps.no_grad(function()
    for _, p in m:named_parameters() do if p:needs_grad() then p:copy_(p + ps.randn(p:shape()) * 0.1) end end
  end)
  return m
end

local x = ps.randint(3, 60, { 2, 7 }, { dtype = "int32" }):keep()
local function output(m)
  local out = ps.no_grad(m, { input_ids = x })
  return (out.logits or out.last_hidden_state):detach():clone():keep()
end
local function far(a, b) return (a:to "fp64" - b:to "fp64"):abs():amax():item() end

local function fields_of(name) return cjson.decode(check.read(at(name .. "/adapter_config.json"))) end
local function change(name, key, value)
  local fields = fields_of(name)
  fields[key] = value
  check.write(at(name .. "/adapter_config.json"), cjson.encode(fields))
end

-- Rewrites the adapter's file with changed tensors.
local function rewrite(name, fn)
  local path = at(name .. "/adapter_model.safetensors")
  local file, tensors = ps.safetensors.open(path), {}
  for _, key in ipairs(file:names()) do tensors[key] = file:tensor(key) end
  file:close()
  fn(tensors)
  ps.safetensors.save(path, tensors, { format = "pt" })
end

describe("the file of an adapter", function()
  it("has PEFT's names and shapes", function()
    local m = base("gpt2", { tie_word_embeddings = false })
    ps.lora.wrap(m, { r = 3, use_dora = true, targets = { "c_attn", "wte", "lm_head" }, name = "mine" })
    m:save_pretrained(at "a")
    local file, shapes = ps.safetensors.open(at "a/adapter_model.safetensors"), {}
    for _, name in ipairs(file:names()) do shapes[name] = table.concat(file:shape(name), "x") end
    assert.equal("pt", file.metadata.format)
    file:close()
    local front = "base_model.model.transformer."
    local want = { ["base_model.model.lm_head.lora_A.weight"] = "3x32",
      ["base_model.model.lm_head.lora_B.weight"] = "256x3",
      ["base_model.model.lm_head.lora_magnitude_vector"] = "256",
      [front .. "wte.lora_embedding_A"] = "3x256", [front .. "wte.lora_embedding_B"] = "32x3",
      [front .. "wte.lora_magnitude_vector"] = "32" }
    for layer = 0, 1 do
      want[front .. "h." .. layer .. ".attn.c_attn.lora_A.weight"] = "3x32"
      want[front .. "h." .. layer .. ".attn.c_attn.lora_B.weight"] = "96x3"
      want[front .. "h." .. layer .. ".attn.c_attn.lora_magnitude_vector"] = "96"
    end
    assert.same(want, shapes)
    local fields = fields_of "a"
    assert.equal("LORA", fields.peft_type)
    assert.equal("CAUSAL_LM", fields.task_type)
    assert.equal(at "base", fields.base_model_name_or_path)
    assert.is_true(fields.fan_in_fan_out)
    assert.is_true(fields.inference_mode)
    assert.same({ "c_attn", "wte", "lm_head" }, fields.target_modules)
  end)

  it("names the layers that all-linear selected, and the head of a classifier", function()
    local m = ps.lora.wrap(base("llama", { task = "sequence_classification" }), { r = 1 })
    m:save_pretrained(at "a")
    local fields = fields_of "a"
    assert.same({ "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj" }, fields.target_modules)
    assert.same({ "score" }, fields.modules_to_save)
    assert.equal("SEQ_CLS", fields.task_type)
    local file = ps.safetensors.open(at "a/adapter_model.safetensors")
    assert.is_true(file:has "base_model.model.score.weight")
    for _, name in ipairs(file:names()) do assert.is_nil(name:find "modules_to_save" or name:find "original", name) end
    file:close()
  end)

  it("has the biases that are trained, under the base layer's name", function()
    for bias, count in pairs { lora_only = 2, all = 13 } do
      local m = noise(ps.lora.wrap(base "gpt2", { r = 1, targets = { "c_attn" }, bias = bias }))
      local want = output(m)
      m:save_pretrained(at "a")
      local file, n = ps.safetensors.open(at "a/adapter_model.safetensors"), 0
      for _, name in ipairs(file:names()) do
        if name:find "bias$" then n = n + 1 end
        assert.is_nil(name:find "c_attn%.bias$", name)
      end
      assert.is_true(file:has "base_model.model.transformer.h.0.attn.c_attn.base_layer.bias")
      file:close()
      assert.equal(count, n)
      assert.equal(0, far(want, output(ps.from_pretrained(at "a", { quiet = true }))))
    end
  end)

  it("has the biases of modules that are trained as a whole once", function()
    for _, saved in ipairs { { "ln_f" }, { "h.0.mlp", "ln_f" } } do
      local m = noise(ps.lora.wrap(base "gpt2", { r = 1, targets = { "c_attn" }, bias = "all",
        modules_to_save = saved }))
      local want = output(m)
      m:save_pretrained(at "a")
      assert.equal(0, far(want, output(ps.from_pretrained(at "a", { quiet = true }))))
      ps.lora.merge_folder(at "base", at "a", at "merged")
      assert(far(want, output(ps.from_pretrained(at "merged", { quiet = true }))) < 1e-5)
    end
  end)

  it("is read back exactly, for each of several adapters", function()
    local m = noise(ps.lora.wrap(base "qwen3", { name = "one" }))
    local one = output(m)
    noise(ps.lora.wrap(m, { name = "two-2", use_rslora = true, r = 2, targets = [[.*\.layers\.1\..*_proj]] }))
    local two = output(m)
    ps.lora.save(m, at "one", "one")
    m:save_pretrained(at "two", { adapter = "two-2" })
    assert.equal([[.*\.layers\.1\..*_proj]], fields_of "two".target_modules)
    local again = ps.lora.load(ps.from_pretrained(at "base", { quiet = true }), at "one", { name = "first" })
    assert.equal(0, far(one, output(again)))
    ps.lora.load(again, at "two", { name = "second", trainable = false })
    assert.equal(0, far(two, output(again)))
    for name, p in again:named_parameters() do assert.is_false(p:needs_grad(), name) end
    assert.equal(0, far(one, output(again:set_adapter "first")))
  end)

  it("is also read from PyTorch's form", function()
    local m = noise(ps.lora.wrap(base "llama", { r = 2 }))
    local want = output(m)
    m:save_pretrained(at "bin")
    local file, tensors = ps.safetensors.open(at "bin/adapter_model.safetensors"), {}
    for _, name in ipairs(file:names()) do tensors[name] = file:tensor(name) end
    file:close()
    ps.save(tensors, at "bin/adapter_model.bin")
    os.remove(at "bin/adapter_model.safetensors")
    assert.equal(0, far(want, output(ps.lora.load(ps.from_pretrained(at "base", { quiet = true }), at "bin"))))
  end)
end)

describe("an adapter that does not fit", function()
  local function load(options)
    return ps.lora.load(ps.from_pretrained(at "base", { quiet = true }), at "a", options)
  end
  before_each(function() noise(ps.lora.wrap(base "llama", { r = 2, use_dora = true })):save_pretrained(at "a") end)

  it("is refused by the name of the option", function()
    for key, value in pairs { peft_type = "LOHA", lora_bias = true, use_qalora = true, init_lora_weights = "olora",
      layer_replication = { { 0, 1 } }, eva_config = { rho = 2 }, an_option_of_tomorrow = 3, r = 0,
      target_parameters = { "a" } } do
      local was = check.read(at "a/adapter_config.json")
      change("a", key, value)
      fails(load, "refused: " .. key .. " = ")
      check.write(at "a/adapter_config.json", was)
    end
    change("a", "lora_ga_config", cjson.null)
    change("a", "megatron_core", "megatron.core")
    load()
  end)

  it("is refused for missing, surplus and misshapen tensors, before anything changes", function()
    local name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    rewrite("a", function(t) t[name] = nil end)
    local m = ps.from_pretrained(at "base", { quiet = true })
    local before = output(m)
    fails(function() ps.lora.load(m, at "a") end, "lacks 1 tensor", name)
    assert.is_nil(m.set_adapter)
    assert.equal(0, far(before, output(m)))
    for own, p in m:named_parameters() do
      assert.is_true(p:needs_grad(), own)
      assert.is_nil(own:find "lora_", own)
    end
    rewrite("a", function(t) t[name] = ps.zeros { 48, 3 } end)
    fails(load, name, "[48, 3]", "[48, 2]", "another base model")
    rewrite("a", function(t)
      t[name], t["base_model.model.other.lora_A.weight"] = ps.zeros { 48, 2 }, ps.zeros { 2 }
    end)
    fails(load, "no parameters", "base_model.model.other.lora_A.weight")
  end)

  it("is refused if PEFT trained the head of a model whose head is tied", function()
    local m = noise(ps.lora.wrap(base("gpt2", { tie_word_embeddings = true }), { r = 2 }))
    m:save_pretrained(at "tied")
    rewrite("tied", function(tensors)
      tensors["base_model.model.lm_head.weight"] = m.transformer.wte.weight + 1
    end)
    local fresh = base("gpt2", { tie_word_embeddings = true })
    ps.lora.load(fresh, at "tied")                         -- a copy, as of save_embedding_layers
    change("tied", "modules_to_save", { "lm_head" })
    fresh = base("gpt2", { tie_word_embeddings = true })
    fails(function() ps.lora.load(fresh, at "tied") end, "lm_head.weight", "modules_to_save has 'lm_head'",
      "ensure_weight_tying")
    fails(function() ps.lora.merge_folder(at "base", at "tied", at "merged_tied") end, "modules_to_save has 'lm_head'")
    change("tied", "ensure_weight_tying", true)
    ps.lora.load(fresh, at "tied")
  end)

  it("leaves the adapters of the model as they are", function()
    local function state(m)
      local list = {}
      for own, p in m:named_parameters() do list[#list + 1] = ("%s %s"):format(own, tostring(p:needs_grad())) end
      return list
    end
    local m = noise(ps.lora.wrap(ps.from_pretrained(at "base", { quiet = true }), { r = 3, targets = { "q_proj" },
      modules_to_save = { "lm_head" }, name = "first" }))
    local before, want = state(m), output(m)
    rewrite("a", function(t) t["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] = nil end)
    change("a", "modules_to_save", { "lm_head", "norm" })
    fails(function() ps.lora.load(m, at "a", { name = "second" }) end, "lacks")
    fails(function() ps.lora.wrap(m, { r = 3, targets = { "no_proj" }, name = "second" }) end, "no_proj")
    assert.same(before, state(m))
    assert.equal("first", m:active_adapter())
    assert.equal(0, far(want, output(m)))
    m:save_pretrained(at "first")
    ps.lora.wrap(m, { r = 2, name = "second" })            -- the name is free
    fails(function() ps.lora.load(m, at "first", { name = "second" }) end, "has an adapter 'second'")
    assert.equal("second", m:active_adapter())
    m:set_adapter "first"
    assert.equal(0, far(want, output(m)))
  end)

  it("is refused over other weights, unless other_base is set", function()
    ps.manual_seed(99)
    require("models.llama").new("tiny", { pad_token_id = 0 }):save_pretrained(at "base")
    fails(load, "other weights", at "base", "other_base")
    load { other_base = true }
    base("llama", { hidden_size = 64, num_attention_heads = 8 })
    fails(function() load { other_base = true } end, "another base model")
    fails(function() ps.lora.load(ps.from_pretrained(at "base", { quiet = true }), at "base") end,
      "adapter_config.json")
  end)
end)

describe("tools/merge_adapter.lua", function()
  local function merge(...)
    local words = {}
    for i = 1, select("#", ...) do words[i] = ("'%s'"):format((select(i, ...))) end
    return check.shell(("'%s' '%s/tools/merge_adapter.lua' %s"):format(paths.exe, paths.root,
      table.concat(words, " ")))
  end

  it("writes folders with the adapter in the weights", function()
    for family, options in pairs { gpt2 = { tie_word_embeddings = true }, llama = {},
      roberta = { task = "masked_lm" } } do
      local m = base(family, options)
      local targets = family == "llama" and "all-linear" or family == "gpt2" and { "c_fc", "wte", "wpe" }
        or { "dense", "word_embeddings" }
      noise(ps.lora.wrap(m, { r = 2, use_dora = family ~= "roberta", targets = targets }))
      local want = output(m)
      m:save_pretrained(at "a")
      os.execute("rm -rf " .. at "out")
      local text, code = merge(at "base", at "a", "--out", at "out")
      assert.equal(0, code, text)
      local merged = ps.from_pretrained(at "out", { quiet = true })
      assert(far(want, output(merged)) < 1e-5, family)
      for name in merged:named_parameters() do assert.is_nil(name:find "lora", name) end
    end
  end)

  it("keeps the base model's types and file sizes, and refuses by name", function()
    local m = base("llama")
    noise(ps.lora.wrap(m, { r = 2 })):save_pretrained(at "a")
    ps.from_pretrained(at "base", { dtype = "bf16", quiet = true }):save_pretrained(at "base")
    local text, code = merge(at "base", at "a", "--out", at "out2")
    assert.equal(1, code)
    assert.truthy(text:find("other weights", 1, true), text)
    text, code = merge(at "base", at "a", "--out", at "out2", "--other-base", "--max-shard-size", "40KB")
    assert.equal(0, code, text)
    assert.truthy(io.open(at "out2/model.safetensors.index.json"))
    assert.equal("bf16", ps.from_pretrained(at "out2", { dtype = "auto", quiet = true }).model.norm.weight:dtype())
    text, code = merge(at "base", at "nowhere", "--out", at "out3")
    assert.equal(1, code)
    assert.truthy(text:find("nowhere", 1, true), text)
    text, code = merge(at "base", at "a", "--out", at "base", "--other-base", "--force")
    assert.equal(1, code)
    assert.truthy(text:find("choose another folder", 1, true), text)
  end)

  it("replaces a model only with --force", function()
    noise(ps.lora.wrap(base("llama"), { r = 2 })):save_pretrained(at "a")
    local weights = at "kept/model.safetensors"
    require("models.llama").new("tiny"):save_pretrained(at "kept")
    local before = check.read(weights)
    local text, code = merge(at "base", at "a", "--out", at "kept")
    assert.truthy(code == 1 and text:find(at "kept" .. " has a model, at " .. at "kept/config.json: --force", 1, true),
      text)
    assert.truthy(check.read(weights) == before)
    text, code = merge(at "base", at "a", "--out", at "kept", "--force")
    assert.equal(0, code, text)
    assert.is_false(check.read(weights) == before)
  end)

  it("needs the memory of two copies of the largest adapted tensor, and 64 MiB", function()
    local script = ([[
      local ps = require "ps"
      local function peak()
        for line in io.lines "/proc/self/status" do
          local kib = line:match "^VmHWM:%%s+(%%d+) kB"
          if kib then return tonumber(kib) / 1024 end
        end
      end
      if arg[1] == "make" then
        local model = require("models.llama").new("tiny", { hidden_size = 512, intermediate_size = 4096,
          num_hidden_layers = 16, num_attention_heads = 8, pad_token_id = 0, dtype = "bf16" })
        model:save_pretrained "%s"
        ps.lora.wrap(model, { r = 2, targets = { "up_proj" } }):save_pretrained "%s"
        return
      end
      ps.ones({ 4 })
      local before = peak()
      ps.lora.merge_folder("%s", "%s", "%s", { other_base = true })
      print(peak() - before)
    ]]):format(at "big", at "big-adapter", at "big", at "big-adapter", at "big-merged")
    check.write(at "memory.lua", script)
    local function run(word) return check.shell(("OMP_NUM_THREADS=1 '%s' '%s' %s"):format(paths.exe, at "memory.lua",
      word)) end
    local out, code = run "make"
    assert.equal(0, code, out)
    local whole, largest = 0, 4 * 512 * 4096 / 2 ^ 20      -- in MiB; `largest` is the largest tensor in fp32
    for name in lfs.dir(at "big") do whole = whole + lfs.attributes(at("big/" .. name), "size") / 2 ^ 20 end
    out, code = run "merge"
    assert.equal(0, code, out)
    local most = 2 * largest + 64
    assert.is_true(whole > 2 * most, whole)                -- so the whole model was never in memory
    assert.is_true(tonumber(out) <= most, ("%s MiB, at most %.0f"):format(out, most))
    os.execute(("rm -rf '%s' '%s'"):format(at "big", at "big-merged"))
  end)
end)

describe("save_pretrained of a wrapped model", function()
  it("writes the merged model if asked", function()
    local m = noise(ps.lora.wrap(base("mistral"), { r = 3, use_dora = true }))
    local want = output(m)
    m:save_pretrained(at "merged", { merged = true })
    assert(far(want, output(ps.from_pretrained(at "merged", { quiet = true }))) < 1e-5)
    assert.equal(0, far(want, output(m)))
    fails(function() m:save_pretrained(at "x", { adapter = "no" }) end, "no adapter 'no'")
    m:unload_adapter()
    fails(function() m:save_pretrained(at "x", { merged = true }) end, "models with an adapter")
  end)
end)

-- The base model's weights in memory can differ from its files. Files of an adapter, and checkpoints that contain only
-- trained values, refer to the files.
describe("an adapter over weights that are not those of the base model's files", function()
  local printed = check.printed

  local function changed()
    local m = base "llama"
    ps.no_grad(function() m.model.layers[0].mlp.down_proj.weight:mul_(1.5) end)
    return ps.lora.wrap(m, { r = 4 })
  end
  local function wrapped() return ps.lora.wrap(ps.from_pretrained(at "base", { quiet = true }), { r = 4 }) end

  it("is saved with a note and without the fingerprint of the files", function()
    local m = noise(changed())
    local text = printed(function() m:save_pretrained(at "a") end)
    assert.matches("model.layers.0.mlp.down_proj.weight has not the value that", text, 1, true)
    assert.matches("merged = true", text, 1, true)
    m:save_pretrained(at "m", { merged = true })
    assert(far(output(m), output(ps.from_pretrained(at "m", { quiet = true }))) < 1e-5)
    local ours = wrapped()
    assert.equal("", printed(function() ours:save_pretrained(at "b") end))
    assert.equal("", printed(function() ours:to "bf16":save_pretrained(at "b") end))     -- a conversion is no change
    text = printed(function() ps.lora.wrap(ps.from_config(at "base"), { r = 4 }):save_pretrained(at "c") end)
    assert.matches("the weights of the model were not loaded from", text, 1, true)
  end)

  it("is in checkpoints together with these weights, in engines, too", function()
    for _, how in ipairs { "plain", "engine", "load_state_dict" } do
      local m = noise(how == "load_state_dict" and wrapped() or changed())
      if how ~= "plain" then
        m = ps.initialize { model = m, quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" } } }
      end
      if how == "load_state_dict" then
        local state = m:state_dict()
        for name, t in pairs(state) do if name:find "down_proj.weight" then state[name] = t * 1.5 end end
        m:load_state_dict(state)
      end
      local want = ps.no_grad(function() return m({ input_ids = x }).logits end):detach():clone():keep()
      ps.checkpoints.save(at("ck_" .. how), { model = m, step = 1 })
      if how ~= "plain" then m:close() end
      local other = wrapped()
      ps.checkpoints.load(at("ck_" .. how), { model = other })
      assert(far(want, output(other)) < 1e-5, how)
    end
  end)

  it("is loaded into a model that is merged like the saved one", function()
    local m = noise(wrapped())
    local want = output(m)
    m:merge_adapter()
    ps.checkpoints.save(at "ck_merged", { model = m, step = 1 })
    local other = wrapped()
    fails(function() ps.checkpoints.load(at "ck_merged", { model = other }) end,
      "was saved while the adapter 'default' was merged", "call model:merge_adapter() before")
    other:merge_adapter()
    ps.checkpoints.load(at "ck_merged", { model = other })
    assert(far(want, output(other)) < 1e-4)
    m:unmerge_adapter()
    ps.checkpoints.save(at "ck_unmerged", { model = m, step = 1 })
    fails(function() ps.checkpoints.load(at "ck_unmerged", { model = other }) end, "no adapter was merged",
      "call model:unmerge_adapter() before")
    assert.equal("", printed(function() m:save_pretrained(at "d") end))      -- the base is that of the files again
  end)

  it("is saved with a note if the files were replaced since they were read", function()
    local m = wrapped()
    os.execute(("cp -r %s %s && rm -r %s && mv %s %s"):format(at "base", at "copy", at "base", at "copy", at "base"))
    assert.matches("model.safetensors has changed since the model was loaded from it",
      printed(function() m:save_pretrained(at "e") end), 1, true)
  end)

  it("is not saved into the folder of its base model", function()
    local m = wrapped()
    fails(function() m:save_pretrained(at "base/") end, "is the folder of the base model", "its own folder")
    assert.is_nil(lfs.attributes(at "base/adapter_config.json"))
  end)
end)

describe("a folder that had another model", function()
  it("has no adapter after a whole model was written to it", function()
    local m = noise(ps.lora.wrap(base "llama", { r = 4 }))
    m:save_pretrained(at "both")
    assert(lfs.attributes(at "both/adapter_config.json"))
    m:unload_adapter { merge = true }
    m:save_pretrained(at "both")
    for _, name in ipairs { "adapter_config.json", "adapter_model.safetensors" } do
      assert.is_nil(lfs.attributes(at("both/" .. name)), name)
    end
    assert(far(output(m), output(ps.from_pretrained(at "both", { quiet = true }))) < 1e-5)
  end)

  it("keeps files of a tokenizer with a note, or loses them if a run replaces the model", function()
    local m = base "llama"
    check.write(at "base/vocab.txt", "a\n")
    os.execute(("rm -rf %s && mkdir %s"):format(at "old", at "old"))
    check.write(at "old/config.json", "{}")
    for _, name in ipairs { "vocab.txt", "chat_template.jinja" } do check.write(at("old/" .. name), name) end
    local text = check.printed(function() m:save_pretrained(at "old") end)
    assert.matches("keeps its own vocab.txt, chat_template.jinja, different from", text, 1, true)
    assert.equal("vocab.txt", check.read(at "old/vocab.txt"))
    ps.checkpoints.new_run(at "old", { force = true })
    assert.equal("", check.printed(function() m:save_pretrained(at "old") end))
    assert.equal("a\n", check.read(at "old/vocab.txt"))
    assert.is_nil(lfs.attributes(at "old/chat_template.jinja"))
    os.remove(at "base/vocab.txt")
  end)

  it("is refused if its files are links to those of the model that is read", function()
    local m = base "llama"
    noise(ps.lora.wrap(m, { r = 4 })):save_pretrained(at "ad")
    os.execute(("rm -rf %s && mkdir %s && ln -s ../base/model.safetensors %s"):format(at "links", at "links",
      at "links/model.safetensors"))
    local before = check.read(at "base/model.safetensors")
    fails(function() ps.lora.merge_folder(at "base", at "ad", at "links") end, "model.safetensors is a link to",
      "would be replaced while it is read")
    assert.equal(before, check.read(at "base/model.safetensors"))
  end)
end)
