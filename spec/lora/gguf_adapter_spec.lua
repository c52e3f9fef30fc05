-- SPDX-License-Identifier: BSD-3-Clause
-- Adapters in GGUF files, models that are written with an adapter in their weights, and conversions one tensor at a
-- time. spec/oracle/gguf_adapter_oracle.py compares files of adapters with those of llama.cpp's converter.
local ps = require "ps"
local check = require "spec.check_lib"
local gguf = require "ps.io.gguf"
local merge = require "ps.lora.merge_folder"
local paths = require "ps.paths"
local writing = require "ps.io.gguf_write"

local function fails(text, fn) check.fails(fn, text) end

local folder = os.tmpname()
os.remove(folder)
assert(require("lfs").mkdir(folder))
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

local function at(name) return folder .. "/" .. name end

local LLAMA = { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
  num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, initializer_range = 0.3,
  pad_token_id = 0 }

local function base(more)
  local config = {}
  for key, value in pairs(LLAMA) do config[key] = value end
  for key, value in pairs(more or {}) do config[key] = value end
  ps.manual_seed(1)
  require("models.llama").new(config):save_pretrained(at "base")
  return ps.from_pretrained(at "base", { quiet = true })
end

local function noise(model)
  ps.no_grad(function()
    for _, p in model:named_parameters() do if p:needs_grad() then p:copy_(ps.randn(p:shape()) * 0.2) end end
  end)
  return model
end

local ids = ps.randint(1, 39, { 2, 9 }, { dtype = "int32" }):keep()
local function logits(model) return ps.no_grad(function() return model({ input_ids = ids }).logits:keep() end) end
local function far(a, b) return (a:to "fp64" - b:to "fp64"):abs():max():item() end

describe("an adapter of other weights", function()
  it("is refused by tools with the option of their command line", function()
    noise(ps.lora.wrap(base(), { r = 2 })):save_pretrained(at "other")
    ps.manual_seed(2)
    require("models.llama").new(LLAMA):save_pretrained(at "base")
    for _, line in ipairs { "merge_adapter.lua BASE OTHER --out DIR/merged",
      "gguf.lua convert OTHER --base BASE --out DIR/other.gguf" } do
      local words = line:gsub("BASE", at "base"):gsub("OTHER", at "other"):gsub("DIR", folder)
      local command = ("'%s' '%s'/tools/%s"):format(paths.exe, paths.root, words)
      local text, code = check.shell(command)
      assert.equal(1, code, text)
      assert.matches("or pass --other-base to use it with this one", text, 1, true)
      text, code = check.shell(command .. " --other-base")
      assert.equal(0, code, text)
    end
  end)
end)

describe("an adapter in a GGUF file", function()
  it("is read back with the same bits, also with ranks and scales that differ by layer", function()
    for _, options in ipairs { { r = 3, alpha = 6 }, { r = 4, alpha = 8, use_rslora = true },
      { r = 2, alpha = 3, rank_pattern = { ["layers\\.1\\..*v_proj"] = 5 }, alpha_pattern = { k_proj = 12 } } } do
      local model = noise(ps.lora.wrap(base(), options))
      local want = logits(model)
      assert.truthy(far(want, logits(base())) > 1e-3)
      model:save_gguf(at "a.gguf", { adapter = true })
      local got = ps.lora.load(base(), at "a.gguf")
      if options.alpha_pattern or options.use_rslora then assert.truthy(far(want, logits(got)) < 1e-5)
      else assert.equal(0, far(want, logits(got))) end
      assert.equal("default", got:active_adapter())
    end
  end)

  it("has llama.cpp's names, shapes and metadata", function()
    local model = noise(ps.lora.wrap(base(), { r = 3, alpha = 6, targets = { "q_proj", "down_proj" } }))
    model:save_gguf(at "a.gguf", { adapter = "default", type = "f16", name = "Mine" })
    gguf.with(at "a.gguf", function(file)
      assert.equal("llama", file:meta "general.architecture")
      assert.equal("adapter", file:meta "general.type")
      assert.equal("lora", file:meta "adapter.type")
      assert.equal("Mine", file:meta "general.name")
      assert.equal(6, file:meta "adapter.lora.alpha")
      assert.equal(8, #file:names())
      assert.same({ 3, 32 }, file:shape "blk.0.attn_q.weight.lora_a")
      assert.same({ 32, 3 }, file:shape "blk.0.attn_q.weight.lora_b")
      assert.same({ 3, 48 }, file:shape "blk.1.ffn_down.weight.lora_a")
      assert.equal("F16", file:type "blk.1.ffn_down.weight.lora_b")
    end)
  end)

  it("has the rows of lora_b in the order of the base model's file", function()
    local model = base()
    model:save_gguf(at "base.gguf", { type = "f32" })
    noise(ps.lora.wrap(model, { r = 3, alpha = 6, targets = { "q_proj", "k_proj", "o_proj" } }))
    model:save_gguf(at "a.gguf", { adapter = true })
    model:save_gguf(at "merged.gguf", { merged = true, type = "f32" })
    gguf.with(at "a.gguf", function(adapter)
      gguf.with(at "base.gguf", function(whole)
        gguf.with(at "merged.gguf", function(merged)
          for _, name in ipairs { "blk.0.attn_q.weight", "blk.1.attn_k.weight", "blk.1.attn_output.weight" } do
            local delta = adapter:tensor(name .. ".lora_b"):matmul(adapter:tensor(name .. ".lora_a")) * 2
            assert.truthy(far(merged:tensor(name), whole:tensor(name) + delta) < 1e-5, name)
          end
        end)
      end)
    end)
    assert.truthy(far(logits(model), logits(ps.from_pretrained(at "merged.gguf", { quiet = true }))) < 1e-4)
  end)

  it("has the token table of an untied model, transposed", function()
    local model = base { tie_word_embeddings = false }
    noise(ps.lora.wrap(model, { r = 3, targets = { "embed_tokens", "lm_head" } }))
    model:save_gguf(at "a.gguf", { adapter = true })
    gguf.with(at "a.gguf", function(file)
      assert.same({ 40, 3 }, file:shape "token_embd.weight.lora_a")
      assert.same({ 32, 3 }, file:shape "token_embd.weight.lora_b")
      assert.same({ 3, 32 }, file:shape "output.weight.lora_a")
    end)
    assert.equal(0, far(logits(model), logits(ps.lora.load(base { tie_word_embeddings = false }, at "a.gguf"))))
  end)

  it("goes through the engine", function()
    local model, optimizer = ps.initialize { model_func = function()
      return ps.lora.wrap(base(), { r = 2, alpha = 4, targets = { "q_proj", "v_proj" } })
    end, config = { train_batch_size = 2, optimizer = { type = "adam", params = { lr = 0.05 } } } }
    for _ = 1, 3 do
      local loss = model({ input_ids = ids, labels = ids }).loss
      model:backward(loss)
      optimizer:step()
    end
    model:save_gguf(at "a.gguf", { adapter = true })
    local want = ps.no_grad(function() return model({ input_ids = ids }).logits:keep() end)
    assert.truthy(far(want, logits(ps.lora.load(base(), at "a.gguf"))) < 1e-5)
  end)

  it("refuses what llama.cpp cannot apply, by name", function()
    local function refused(text, options, more)
      local model = ps.lora.wrap(base(more), options)
      fails(text, function() model:save_gguf(at "x.gguf", { adapter = true }) end)
      assert.is_nil(io.open(at "x.gguf", "rb"))
    end
    refused("use_dora", { use_dora = true })
    refused("modules_to_save = lm_head", { modules_to_save = { "lm_head" } }, { tie_word_embeddings = false })
    refused("also the head's", { targets = { "embed_tokens" } }, { tie_word_embeddings = true })
    local model = ps.lora.wrap(base(), { r = 2 })
    fails("merged = true", function() model:save_gguf(at "x.gguf", { type = "f32" }) end)
    fails("bf16", function() model:save_gguf(at "x.gguf", { adapter = true, type = "q4_0" }) end)
  end)

  it("refuses files that are not an adapter of the model", function()
    local model = noise(ps.lora.wrap(base(), { r = 2, targets = { "q_proj" } }))
    model:save_gguf(at "a.gguf", { adapter = true })
    base():save_gguf(at "base.gguf", { type = "f32" })
    fails("general.type = model", function() ps.lora.load(base(), at "base.gguf") end)
    fails("ps.lora.load", function() ps.from_pretrained(at "a.gguf") end)
    fails("general.architecture = llama", function()
      ps.lora.load(require("models.gpt2").new("tiny", {}), at "a.gguf")
    end)
    fails("made for another base model", function()
      ps.lora.load(require("models.llama").new(LLAMA, { hidden_size = 64 }), at "a.gguf", { other_base = true })
    end)
    fails("fingerprint", function()
      base()
      require("models.llama").new(LLAMA):save_pretrained(at "other")
      ps.lora.load(ps.from_pretrained(at "other", { quiet = true }), at "a.gguf")
    end)
    local function file_of(name, meta, tensors)
      local entries = { { "general.architecture", "string", "llama" }, { "general.type", "string", "adapter" },
        { "adapter.type", "string", "lora" } }
      for _, one in ipairs(meta) do entries[#entries + 1] = one end
      local writer = writing.open(at(name), entries, tensors)
      for _, one in ipairs(tensors) do
        local t = ps.ones(one.shape)
        writer:append(one.name, "fp32", require "ps.core.array" "float"(t:numel()), t:numel())
      end
      writer:commit()
      writer:close()
      return at(name)
    end
    local A = { name = "blk.0.attn_q.weight.lora_a", type = "F32", shape = { 2, 32 } }
    local B = { name = "blk.0.attn_q.weight.lora_b", type = "F32", shape = { 32, 2 } }
    fails("adapter.alora.invocation_tokens", function()
      ps.lora.load(base(), file_of("y.gguf", { { "adapter.alora.invocation_tokens", "uint32", { 1, 2 } } }, { A, B }))
    end)
    fails("blk.9.ffn_gate_inp.weight.lora_a", function()
      ps.lora.load(base(), file_of("y.gguf", {}, { A, B, { name = "blk.9.ffn_gate_inp.weight.lora_a", type = "F32",
        shape = { 2, 2 } } }))
    end)
    fails("lora_A.weight", function() ps.lora.load(base(), file_of("y.gguf", {}, { B })) end)
    local got = ps.lora.load(base(), file_of("y.gguf", {}, { A, B }))       -- without alpha, the scale is 1
    assert.equal(1, got.adapters_.layers[1].module.lora_.adapters.default.scale)
  end)
end)

describe("conversions one tensor at a time", function()
  local function run(options)
    return check.shell(("'%s' '%s'/tools/gguf.lua %s"):format(paths.exe, paths.root, options))
  end

  it("write the bytes of save_gguf, and merge an adapter", function()
    local model = base()
    for _, kind in ipairs { "f32", "q8_0", "q4_k_m" } do
      model:save_gguf(at "want.gguf", { type = kind, name = "x" })
      merge.convert(at "base", at "got.gguf", { type = kind, name = "x" })
      assert.truthy(check.read(at "want.gguf") == check.read(at "got.gguf"))
    end
    noise(ps.lora.wrap(model, { r = 3 }))
    model:save_pretrained(at "adapter")
    model:save_gguf(at "adapter.gguf", { adapter = true })
    model:save_gguf(at "want.gguf", { type = "f32", merged = true, name = "x" })
    for _, adapter in ipairs { "adapter", "adapter.gguf" } do
      local out, code = run(("convert %s --adapter %s --out %s --type f32 --name x"):format(at "base", at(adapter),
        at "got.gguf"))
      assert.equal(0, code, out)
      assert.truthy(check.read(at "want.gguf") == check.read(at "got.gguf"))
    end
  end)

  it("turn the file of an adapter into PEFT's folder, and back", function()
    local model = noise(ps.lora.wrap(base(), { r = 3, alpha = 5 }))
    model:save_pretrained(at "adapter")
    local out, code = run(("convert %s --out %s"):format(at "adapter", at "a.gguf"))
    assert.equal(0, code, out)
    out, code = run(("convert %s --base %s --out %s"):format(at "a.gguf", at "base", at "back"))
    assert.equal(0, code, out)
    assert.truthy(check.read(at "adapter/adapter_model.safetensors") == check.read(at "back/adapter_model.safetensors"))
    assert.equal(0, far(logits(model), logits(ps.lora.load(base(), at "back"))))
    out, code = run(("convert %s --base %s --out %s"):format(at "a.gguf", at "base", at "back"))
    assert.truthy(code == 1 and out:find("adapter_config.json: --force writes the new one in its place", 1, true), out)
    out, code = run(("convert %s --out %s --force"):format(at "a.gguf", at "back"))
    assert.truthy(code == 1 and out:find("--base", 1, true), out)
    out, code = run(("convert %s --base %s --out %s --type f32"):format(at "base", at "base", at "b.gguf"))
    assert.truthy(code == 1 and out:find("is for an adapter", 1, true), out)
  end)

  it("leave no tokenizer or template of an older model in the folder", function()
    base()
    check.write(at "base/tokenizer.json", '{ "new": 1 }')
    assert(require("lfs").mkdir(at "used"))
    for _, name in ipairs { "tokenizer.json", "chat_template.jinja", "vocab.json", "mine.txt" } do
      check.write(at("used/" .. name), "old")
    end
    merge.convert(at "base", at "used")
    assert.equal('{ "new": 1 }', check.read(at "used/tokenizer.json"))
    assert.is_nil(io.open(at "used/chat_template.jinja"))
    assert.is_nil(io.open(at "used/vocab.json"))
    assert.equal("old", check.read(at "used/mine.txt"))
    os.remove(at "base/tokenizer.json")
  end)

  it("are not certified if logits are NaN", function()
    local verify = require "ps.pretrained.gguf_verify"
    local fine, bad = base(), base()
    ps.no_grad(function() bad:state_dict()["model.norm.weight"]:mul_(0 / 0) end)
    local list = { 1, 2, 3, 4, 5 }
    for _, case in ipairs { { bad, fine, "the file's logits of tokens 1 to 4" },
      { fine, bad, "the reference's logits" }, { bad, bad, "are not finite" } } do
      fails(case[3], function() verify.compare(case[1], case[2], list, { 1, 0 }) end)
    end
    assert.truthy(verify.compare(fine, fine, list, { 1, 0 }).pass)
  end)

  it("refuse to replace their input, and models without all their tensors", function()
    base():save_gguf(at "base.gguf", { type = "f32" })
    fails("would be replaced", function() merge.convert(at "base.gguf", at "base.gguf", { type = "f16" }) end)
    check.write(at "base-00002-of-00003.gguf", "a part of the input")
    for _, from in ipairs { "base.gguf", "base" } do
      fails("one of 3 parts", function() merge.convert(at(from), at "base-00002-of-00003.gguf", { type = "f16" }) end)
    end
    assert.equal("a part of the input", check.read(at "base-00002-of-00003.gguf"))
    fails("one of 3 parts", function()
      ps.lora.wrap(base(), {}):save_gguf(at "base-00002-of-00003.gguf", { adapter = true })
    end)
    base():save_gguf(at "base-00001-of-00001.gguf")
    ps.from_pretrained(at "base-00001-of-00001.gguf", { quiet = true })
    local tensors = ps.load(at "base/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = nil
    ps.safetensors.save(at "base/model.safetensors", tensors)
    fails("up_proj.weight", function() merge.convert(at "base", at "y2.gguf", { type = "f16" }) end)
    assert.is_nil(io.open(at "y2.gguf", "rb"))
  end)
end)
