-- SPDX-License-Identifier: BSD-3-Clause
-- Models and tokenizers in GGUF files (ps/pretrained/gguf*.lua): a file whose tensors this spec writes byte by byte
-- loads with the numbers of the model that it was written from. spec/oracle/gguf_oracle.py has files of llama.cpp.
local ps = require "ps"
local lib = require "spec.gguf_lib"
local check = require "spec.check_lib"

local folder = os.tmpname()
os.remove(folder)
assert(require("lfs").mkdir(folder))
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

-- Returns the rows of each head in pairs, in llama.cpp's order.
local function paired(t, heads)
  local shape = t:shape()
  local width = shape[1] / heads
  local whole = t:reshape(heads, 2, width / 2, -1):permute(0, 2, 1, 3)
  return whole:contiguous():reshape(unpack(shape))
end

local LLAMA = { ["model.embed_tokens.weight"] = "token_embd.weight", ["model.norm.weight"] = "output_norm.weight",
  ["lm_head.weight"] = "output.weight", input_layernorm = "attn_norm", post_attention_layernorm = "ffn_norm",
  ["self_attn.q_proj"] = "attn_q", ["self_attn.k_proj"] = "attn_k", ["self_attn.v_proj"] = "attn_v",
  ["self_attn.o_proj"] = "attn_output", ["mlp.gate_proj"] = "ffn_gate", ["mlp.up_proj"] = "ffn_up",
  ["mlp.down_proj"] = "ffn_down", ["self_attn.q_norm"] = "attn_q_norm", ["self_attn.k_norm"] = "attn_k_norm" }
local GPT2 = { ["transformer.wte.weight"] = "token_embd.weight", ["transformer.wpe.weight"] = "position_embd.weight",
  ["transformer.ln_f.weight"] = "output_norm.weight", ["transformer.ln_f.bias"] = "output_norm.bias",
  ln_1 = "attn_norm", ln_2 = "ffn_norm", ["attn.c_attn"] = "attn_qkv", ["attn.c_proj"] = "attn_output",
  ["mlp.c_fc"] = "ffn_up", ["mlp.c_proj"] = "ffn_down" }

-- Returns a model's tensors for lib.file.
local function tensors_of(model, names, change)
  local list = {}
  for name, t in pairs(model:state_dict()) do
    local layer, middle, kind = name:match "%.(%d+)%.(.*)%.(%l+)$"
    local own = layer and ("blk.%s.%s.%s"):format(layer, names[middle], kind) or names[name]
    local value = (change and change(own, t) or t):contiguous()
    list[#list + 1] = { own, 0, value:shape(), lib.floats(value:reshape(-1):tolist()) }
  end
  table.sort(list, function(a, b) return a[1] < b[1] end)
  return list
end

local function write(name, bytes) return lib.write(folder .. "/" .. name, bytes) end

local SIZES = { { "context_length", "uint32", 64 }, { "embedding_length", "uint32", 32 },
  { "block_count", "uint32", 2 }, { "feed_forward_length", "uint32", 48 }, { "attention.head_count", "uint32", 4 },
  { "attention.head_count_kv", "uint32", 2 }, { "attention.layer_norm_rms_epsilon", "float32", 1e-5 },
  { "rope.freq_base", "float32", 5000 } }
local CONFIG = { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
  num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, rms_norm_eps = 1e-5,
  rope_theta = 5000 }

local function meta_of(arch, sizes, more)
  local meta = { { "general.architecture", "string", arch } }
  for _, one in ipairs(sizes) do meta[#meta + 1] = { arch .. "." .. one[1], one[2], one[3] } end
  for _, one in ipairs(more or {}) do meta[#meta + 1] = one end
  return meta
end

local function logits(model, ids)
  return ps.no_grad(function() return model({ input_ids = ids }).logits end)
end

local function same_logits(a, b)
  local ids = (ps.rand { 2, 9 } * 39):to("int32")
  assert.equal(0, (logits(a, ids) - logits(b, ids)):abs():max():item())
end

local function permuted(own, t)
  local kind = own:match "attn_([qk])%.weight$" or own:match "attn_([qk])%.bias$"
  return kind and paired(t, kind == "q" and 4 or 2)
end

local function llama(more)
  local config = {}
  for key, value in pairs(CONFIG) do config[key] = value end
  for key, value in pairs(more or {}) do config[key] = value end
  return require("models.llama").new(config):eval()
end

describe("ps.from_pretrained of a GGUF file", function()
  it("has the numbers of a Llama, whose rows it reorders", function()
    local model = llama()
    local path = write("llama.gguf", lib.file(meta_of("llama", SIZES), tensors_of(model, LLAMA, permuted)))
    local got = ps.from_pretrained(path)
    assert.equal("LlamaForCausalLM", got.class_name)
    assert.equal(false, got.config.tie_word_embeddings)
    assert.equal(1e-5, got.config.rms_norm_eps)
    same_logits(model, got)
    same_logits(model, ps.from_pretrained(path, { mmap = "auto" }))
    got:save_pretrained(folder .. "/saved")
    same_logits(model, ps.from_pretrained(folder .. "/saved", { quiet = true }))
  end)

  it("supports biases, tied tables and factors of rotary frequencies", function()
    local factors = {}
    for i = 1, 4 do factors[i] = 1 + i / 8 end
    local model = llama { attention_bias = true, tie_word_embeddings = true, rope_scaling = { rope_type = "longrope",
      short_factor = factors, long_factor = factors, attention_factor = 1 } }
    for name, p in pairs(model:state_dict()) do
      if name:match "bias$" then ps.no_grad(function() p:copy_(ps.randn(p:shape())) end) end
    end
    local list = tensors_of(model, LLAMA, permuted)
    list[#list + 1] = { "rope_freqs.weight", 0, { 4 }, lib.floats(factors) }
    local got = ps.from_pretrained(write("llama.gguf", lib.file(meta_of("llama", SIZES), list)))
    assert.equal("longrope", got.config.rope_scaling.rope_type)
    assert.equal(true, got.config.attention_bias)
    same_logits(model, got)
  end)

  it("recognises the factors of Llama 3.1", function()
    local scaling = { rope_type = "llama3", factor = 8, low_freq_factor = 1, high_freq_factor = 4,
      original_max_position_embeddings = 8192 }
    local model = llama { rope_scaling = scaling, rope_theta = 500000, head_dim = 16 }
    local rope = require "ps.pretrained.rope"
    local factors = {}
    local stretched = rope.frequencies({ rope_type = "llama3", rope_theta = 500000, factor = 8, low_freq_factor = 1,
      high_freq_factor = 4, original_max_position_embeddings = 8192 }, 16, 64, 0)
    local plain = rope.frequencies({ rope_type = "default", rope_theta = 500000 }, 16, 64, 0)
    for i, f in ipairs(plain) do factors[i] = f / stretched[i] end
    local list = tensors_of(model, LLAMA, permuted)
    list[#list + 1] = { "rope_freqs.weight", 0, { 8 }, lib.floats(factors) }
    local sizes = { { "attention.key_length", "uint32", 16 }, { "attention.value_length", "uint32", 16 } }
    for _, one in ipairs(SIZES) do
      sizes[#sizes + 1] = one[1] == "rope.freq_base" and { one[1], one[2], 500000 } or one
    end
    local got = ps.from_pretrained(write("llama.gguf", lib.file(meta_of("llama", sizes), list)))
    assert.equal("llama3", got.config.rope_scaling.rope_type)
    same_logits(model, got)
  end)

  it("has the numbers of GPT-2 and of Qwen 3, whose rows are not reordered", function()
    local model = require("models.gpt2").new({ vocab_size = 40, n_positions = 64, n_embd = 32, n_layer = 2,
      n_head = 4 }):eval()
    local meta = { { "context_length", "uint32", 64 }, { "embedding_length", "uint32", 32 },
      { "block_count", "uint32", 2 }, { "feed_forward_length", "uint32", 128 }, { "attention.head_count", "uint32", 4 },
      { "attention.layer_norm_epsilon", "float32", 1e-5 } }
    local list = tensors_of(model, GPT2, function(own, t)
      return own:match "^blk.*weight$" and t:dim() == 2 and t:t() or t
    end)
    same_logits(model, ps.from_pretrained(write("gpt2.gguf", lib.file(meta_of("gpt2", meta), list))))
    local qwen = require("models.qwen3").new({ vocab_size = 40, hidden_size = 32, intermediate_size = 48,
      num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8,
      max_position_embeddings = 64, rms_norm_eps = 1e-5, rope_theta = 5000 }):eval()
    local sizes = { { "attention.key_length", "uint32", 8 }, { "attention.value_length", "uint32", 8 } }
    for _, one in ipairs(SIZES) do sizes[#sizes + 1] = one end
    same_logits(qwen, ps.from_pretrained(write("qwen3.gguf", lib.file(meta_of("qwen3", sizes),
      tensors_of(qwen, LLAMA)))))
  end)

  it("refuses settings by name that would change the numbers", function()
    local list = tensors_of(llama(), LLAMA, permuted)
    local function refused(text, meta, tensors)
      check.fails(function() ps.from_pretrained(write("x.gguf", lib.file(meta, tensors or list))) end, text)
    end
    refused("general.architecture = mamba", meta_of("mamba", {}))
    refused("llama.logit_scale = 2", meta_of("llama", SIZES, { { "llama.logit_scale", "float32", 2 } }))
    refused("llama.expert_count = 8", meta_of("llama", SIZES, { { "llama.expert_count", "uint32", 8 } }))
    refused("rope.dimension_count = 4", meta_of("llama", SIZES, { { "llama.rope.dimension_count", "uint32", 4 } }))
    refused("rope.scaling.type = longrope", meta_of("llama", SIZES, { { "llama.rope.scaling.type", "string",
      "longrope" } }))
    refused("the metadata has no llama.attention.head_count", meta_of("llama", {}))
    refused("tensor = extra.weight", meta_of("llama", SIZES), { { "extra.weight", 0, { 1 }, lib.floats { 1 } },
      unpack(list) })
    refused("no tensor 'token_embd.weight'", meta_of("llama", SIZES), { unpack(list, 1, #list - 2) })
    refused("1 missing", meta_of("llama", SIZES), { unpack(list, 2) })
  end)
end)

describe("model:save_gguf", function()
  local gguf = require "ps.io.gguf"
  local path = folder .. "/out.gguf"

  it("writes a file with the same numbers, for each architecture, in fp32", function()
    local scaling = { rope_type = "llama3", factor = 8, low_freq_factor = 1, high_freq_factor = 4,
      original_max_position_embeddings = 8192 }
    for _, model in ipairs { llama(), llama { tie_word_embeddings = true, attention_bias = true, mlp_bias = true },
      llama { rope_scaling = { rope_type = "linear", factor = 4 } },
      llama { rope_scaling = { rope_type = "yarn", factor = 4, original_max_position_embeddings = 16 } },
      llama { rope_scaling = scaling, rope_theta = 500000, head_dim = 16 },
      require("models.mistral").new({ vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
        num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, sliding_window = 4 }):eval(),
      require("models.qwen2").new({ vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
        num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }):eval(),
      require("models.qwen3").new({ vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
        num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, max_position_embeddings = 64 }):eval(),
      require("models.gpt2").new({ vocab_size = 40, n_positions = 64, n_embd = 32, n_layer = 2,
        n_head = 4 }):eval() } do
      model:save_gguf(path, { type = "f32" })
      same_logits(model, ps.from_pretrained(path))
    end
    local bert = require("models.bert").new({ vocab_size = 40, hidden_size = 32, intermediate_size = 48,
      num_hidden_layers = 2, num_attention_heads = 4, max_position_embeddings = 64 }, { task = "base" })
    bert:eval():save_gguf(path, { type = "f32" })
    local got = ps.from_pretrained(path, { quiet = true })
    local ids = (ps.rand { 2, 9 } * 39):to("int32")
    local function hidden(m) return ps.no_grad(function() return m({ input_ids = ids }).last_hidden_state end) end
    assert.equal(0, (hidden(bert) - hidden(got)):abs():max():item())
  end)

  it("chooses types like llama-quantize", function()
    local model = require("models.llama").new({ vocab_size = 64, hidden_size = 256, intermediate_size = 288,
      num_hidden_layers = 8, num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 64 }):eval()
    local function types(kind)
      model:save_gguf(path, { type = kind })
      local file, found = gguf.open(path), {}
      for _, name in ipairs(file:names()) do found[name] = file:type(name) end
      file:close()
      return found
    end
    local t = types "q4_k_m"
    assert.equal("Q6_K", t["output.weight"])
    assert.equal("Q4_K", t["token_embd.weight"])
    assert.equal("F32", t["blk.0.attn_norm.weight"])
    local bits = {}
    for layer = 0, 7 do bits[layer + 1] = t[("blk.%d.attn_v.weight"):format(layer)] end
    assert.same({ "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K" }, bits)
    assert.equal("Q5_0", t["blk.1.ffn_down.weight"])       -- rows of 288 have no blocks of 256
    assert.equal("Q8_0", t["blk.0.ffn_down.weight"])
    t = types "q4_0"
    assert.equal("Q6_K", t["output.weight"])
    assert.equal("Q4_0", t["blk.1.ffn_down.weight"])
    assert.equal("Q8_0", types("q8_0")["output.weight"])
    assert.equal("BF16", types("bf16")["token_embd.weight"])
  end)

  it("keeps values within half a step of each type", function()
    local model = require("models.llama").new({ vocab_size = 64, hidden_size = 256, intermediate_size = 256,
      num_hidden_layers = 1, num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 64 }):eval()
    local name, most = "model.layers.0.mlp.up_proj.weight", { bf16 = 0.005, f16 = 0.0006, q8_0 = 0.005, q6_k = 0.04,
      q4_k_m = 0.12, q4_0 = 0.14 }
    local want = model:state_dict()[name]
    for kind, off in pairs(most) do
      model:save_gguf(path, { type = kind })
      local got = ps.from_pretrained(path, { quiet = true }):state_dict()[name]
      local share = (got - want):abs():max():item() / want:abs():max():item()
      assert.truthy(share > 0 and share <= off, ("%s: %g"):format(kind, share))
    end
  end)

  it("includes the tokenizer, from a folder and from a file", function()
    local model = llama { vocab_size = 259 }
    local source = folder .. "/source"
    model:save_pretrained(source)
    local words = {}
    for byte = 0, 255 do
      local code = byte
      local self = byte >= 33 and byte <= 126 or byte >= 161 and byte <= 172 or byte >= 174
      if not self then
        code = 256 + (byte <= 32 and byte or byte <= 160 and byte - 127 + 33 or 67)
      end
      local utf = code < 128 and string.char(code) or string.char(192 + math.floor(code / 64), 128 + code % 64)
      words[utf] = byte
    end
    words.ab, words["\196\160ab"] = 256, 257
    local tokenizer = { version = "1.0", added_tokens = { { id = 258, content = "<s>", special = true } },
      pre_tokenizer = { type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = true },
      decoder = { type = "ByteLevel" },
      model = { type = "BPE", vocab = words, merges = { "a b", "\196\160 ab" } } }
    lib.write(source .. "/tokenizer.json", require("cjson").encode(tokenizer))
    lib.write(source .. "/tokenizer_config.json", '{"bos_token": "<s>", "chat_template": "{{ messages[0].content }}"}')
    local first = ps.from_pretrained(source, { quiet = true })
    first:save_gguf(path, { type = "f32" })
    local again = folder .. "/again.gguf"
    ps.from_pretrained(path):save_gguf(again, { type = "f32" })
    local text = "ab ab, \226\130\172 x<s>"
    local want = ps.tokenizer.from_pretrained(source):encode(text)
    for _, one in ipairs { path, again } do
      local tok = ps.tokenizer.from_pretrained(one)
      assert.same(want, tok:encode(text))
      assert.equal("<s>", tok.bos_token)
      assert.truthy(tok:has_chat_template())
      local file = gguf.open(one)
      assert.equal("gpt-2", (file:meta "tokenizer.ggml.pre"))
      file:close()
    end
  end)

  it("without a tokenizer names none, as llama.cpp's converter does, and the number of ids", function()
    local gpt2 = require("models.gpt2").new({ vocab_size = 40, n_positions = 64, n_embd = 32, n_layer = 1, n_head = 4 })
    local again = folder .. "/again.gguf"
    for name, model in pairs { llama = llama(), gpt2 = gpt2:eval() } do
      model:save_gguf(path, { type = "f32" })
      ps.from_pretrained(path, { quiet = true }):save_gguf(again, { type = "f32" })
      for _, one in ipairs { path, again } do
        local file = gguf.open(one)
        assert.equal("none", (file:meta "tokenizer.ggml.model"))
        assert.equal(40, (file:meta(name .. ".vocab_size")))
        file:close()
        same_logits(model, ps.from_pretrained(one, { quiet = true }))
        check.fails(function() ps.tokenizer.from_pretrained(one) end, "tokenizer.ggml.model = none", "has no tokenizer")
      end
    end
  end)

  it("writes an engine's masters, and refuses models that the format cannot express", function()
    local model = llama()
    local want = model:state_dict()["model.norm.weight"]:clone():keep()
    local engine = ps.initialize { quiet = true, model_func = function() return model end,
      config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
    engine:save_gguf(path, { type = "f32" })
    local got = ps.from_pretrained(path):state_dict()["model.norm.weight"]
    assert.equal(0, (got - want):abs():max():item())
    engine:close()
    local large = llama()
    ps.no_grad(function() large:state_dict()["lm_head.weight"]:fill_(1e5) end)
    check.fails(function() large:save_gguf(folder .. "/none.gguf", { type = "f16" }) end, "output.weight", "100000",
      "F16 cannot hold")
    assert.equal(nil, require("lfs").attributes(folder .. "/none.gguf"))
    ps.no_grad(function() large:state_dict()["lm_head.weight"]:fill_(0 / 0) end)
    check.fails(function() large:save_gguf(folder .. "/none.gguf", { type = "q8_0" }) end, "output.weight",
      "Q8_0 cannot hold")
    check.fails(function() large:save_gguf(path, { type = "q3" }) end, "type")
    check.fails(function()
      llama({ hidden_act = "relu" }):save_gguf(path)
    end, "hidden_act = relu")
  end)
end)

describe("a tokenizer in a GGUF file", function()
  local function of(meta)
    return ps.tokenizer.from_pretrained(write("t.gguf", lib.file({ { "general.architecture", "string", "llama" },
      unpack(meta) }, {})))
  end

  it("merges bytes by its merges, cut by the rule of its name", function()
    local tok = of { { "tokenizer.ggml.model", "string", "gpt2" }, { "tokenizer.ggml.pre", "string", "smollm" },
      { "tokenizer.ggml.tokens", "string", { "a", "b", "1", "ab", "11", "\196\160", "\196\160ab", "<s>", "<u>" } },
      { "tokenizer.ggml.token_type", "int32", { 1, 1, 1, 1, 1, 1, 1, 3, 4 } },
      { "tokenizer.ggml.merges", "string", { "a b", "1 1", "\196\160 ab" } },
      { "tokenizer.ggml.bos_token_id", "uint32", 7 }, { "tokenizer.ggml.add_bos_token", "bool", true },
      { "tokenizer.chat_template", "string", "{{ messages[0].content }}!" } }
    assert.same({ 7, 3, 6, 2, 2, 8, 7 }, tok:encode "ab ab11<u><s>")
    assert.same({ 3 }, tok:encode("ab", { add_special_tokens = false }))
    assert.same({ 8, 0 }, tok:encode("<u>a", { add_special_tokens = false, split_special_tokens = true }))
    assert.equal("ab ab11", tok:decode { 3, 6, 2, 2 })
    assert.equal("<s>", tok.bos_token)
    assert.equal("x!", tok:apply_chat_template({ { role = "user", content = "x" } }, { tokenize = false }))
  end)

  it("merges pieces by their scores, the leftmost of equal ones first", function()
    local tokens = { "<unk>", "<s>", "\226\150\129", "a", "b", "aa", "ab", "\226\150\129a", "<0x63>" }
    local tok = of { { "tokenizer.ggml.model", "string", "llama" }, { "tokenizer.ggml.tokens", "string", tokens },
      { "tokenizer.ggml.scores", "float32", { 0, 0, -9, -9, -9, -1, -1, -2, 0 } },
      { "tokenizer.ggml.token_type", "int32", { 2, 3, 1, 1, 1, 1, 1, 1, 6 } },
      { "tokenizer.ggml.bos_token_id", "uint32", 1 } }
    assert.same({ 1, 2, 5, 6 }, tok:encode "aaab")
    assert.same({ 1, 7, 8 }, tok:encode "ac")
    assert.equal("ac aab", tok:decode { 7, 8, 2, 5, 4 })
  end)

  it("finds words of BERT, with ## before their later parts", function()
    local blank = "\226\150\129"
    local tok = of { { "tokenizer.ggml.model", "string", "bert" },
      { "tokenizer.ggml.tokens", "string", { "[PAD]", "[UNK]", "[CLS]", "[SEP]", blank .. "play", "ing",
        blank .. "." } },
      { "tokenizer.ggml.token_type", "int32", { 3, 3, 3, 3, 1, 1, 1 } },
      { "tokenizer.ggml.unknown_token_id", "uint32", 1 }, { "tokenizer.ggml.cls_token_id", "uint32", 2 },
      { "tokenizer.ggml.seperator_token_id", "uint32", 3 }, { "tokenizer.ggml.padding_token_id", "uint32", 0 } }
    assert.same({ 2, 4, 5, 6, 1, 3 }, tok:encode "Playing. x")
    assert.equal("[PAD]", tok.pad_token)
  end)

  it("is refused by name if its kind or rule is not supported", function()
    check.fails(function() of { { "tokenizer.ggml.model", "string", "rwkv" } } end, "tokenizer.ggml.model = rwkv")
    check.fails(function()
      of { { "tokenizer.ggml.model", "string", "gpt2" }, { "tokenizer.ggml.tokens", "string", { "a" } },
        { "tokenizer.ggml.pre", "string", "mystery" } }
    end, "tokenizer.ggml.pre = mystery")
    check.fails(function()
      of { { "tokenizer.ggml.model", "string", "gpt2" }, { "tokenizer.ggml.tokens", "string", { "a", "a" } },
        { "tokenizer.ggml.pre", "string", "gpt-2" }, { "tokenizer.ggml.merges", "string", {} } }
    end, "twice")
    check.fails(function()
      of { { "tokenizer.ggml.model", "string", "llama" }, { "tokenizer.ggml.tokens", "string", { "a" } },
        { "tokenizer.ggml.scores", "float32", {} } }
    end, "0 numbers for 1 tokens")
  end)
end)
