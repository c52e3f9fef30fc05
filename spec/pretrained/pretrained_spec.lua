-- SPDX-License-Identifier: BSD-3-Clause
-- GPT-2 folders of Hugging Face: every field of config.json that changes the numbers is supported or refused by name,
-- the saved weights are the trained ones (an engine's masters, one file for several ranks), and both directions
-- against transformers, if a Python with it is found (PS_TORCH_PYTHON names one).
local ps = require "ps"
local gpt2 = require "models.gpt2"
local json = require "cjson"
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local ranks = require "spec.ranks_lib"
local F, fails = ps.functional, check.fails_saying

local folder
local function path(name) return folder .. "/" .. name end

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
end)
teardown(function() os.execute("rm -rf " .. folder) end)

local SMALL = { vocab_size = 61, n_positions = 37, n_embd = 48, n_layer = 3, n_head = 3, initializer_range = 0.2 }

local function with(...)
  local all = {}
  for i = 1, select("#", ...) do for key, value in pairs((select(i, ...))) do all[key] = value end end
  return all
end

local function ids(rows, columns)
  return ps.randint(0, SMALL.vocab_size, { rows, columns }, { dtype = "int32" })
end

-- Writes a folder with this config.json (SMALL's fields unless overridden) and a model's weights, and returns its path.
local function write_folder(name, model, fields)
  model:save_pretrained(path(name))
  check.write(path(name) .. "/config.json", json.encode(with({ model_type = "gpt2" }, SMALL, fields or {})))
  return path(name)
end

local function config_of(name) return json.decode(check.read(path(name) .. "/config.json")) end

local function bytes_of(state)
  local all = {}
  for name, t in pairs(state) do
    local text = check.bytes(t)
    all[name] = ("%s %s"):format(t:dtype(), require("bit").tohex(ps.C.ps_xxh3(text, #text), 16))
  end
  return all
end

local engine                                               -- the open engine, closed if a test fails

local function initialize(options)
  local model, optimizer = ps.initialize(options)
  engine = model
  return model, optimizer
end

after_each(function() if engine then engine:close() end end)

local CHUNKS = { host = 2 ^ 24 }                            -- an engine's memory

local ERF = 0.70710678118654752
local ACTIVATIONS = {
  gelu_new = function(x)
    return 0.5 * x * (1 + (0.79788456080286536 * (x + 0.044715 * x * x * x)):tanh())
  end,
  gelu = function(x) return 0.5 * x * (1 + (x * ERF):erf()) end,
  relu = function(x) return ps.maximum(x, ps.zeros_like(x)) end,
  silu = function(x) return x / (1 + (-x):exp()) end,
  quick_gelu = function(x) return x / (1 + (-1.702 * x):exp()) end,
  tanh = function(x) return x:tanh() end,
}

-- Computes logits [B, T, V] for a model's weights in fp64, from the formulas in the paper and in Hugging Face's
-- modeling_gpt2.py.
local function formula(model, c, x)
  local w = {}
  for name, t in pairs(model:state_dict()) do w[name] = t:detach():double() end
  local B, T, C, H = x:size(0), x:size(1), c.n_embd, c.n_head
  local function norm(h, name)
    local centred = h - h:mean(-1, true)
    local variance = (centred * centred):mean(-1, true)
    return centred / (variance + 1e-5):sqrt() * w[name .. ".weight"] + w[name .. ".bias"]
  end
  local function layer(h, name) return h:matmul(w[name .. ".weight"]) + w[name .. ".bias"] end
  local later = ps.arange(T):reshape(1, T):gt(ps.arange(T):reshape(T, 1))          -- [T, T], true where key j > query i
  local h = F.embedding(x, w["transformer.wte.weight"]) + w["transformer.wpe.weight"]:narrow(0, 0, T)
  for i = 0, c.n_layer - 1 do
    local at = ("transformer.h.%d."):format(i)
    local qkv = layer(norm(h, at .. "ln_1"), at .. "attn.c_attn")
    local function part(k) return qkv:narrow(2, k * C, C):reshape(B, T, H, C / H):permute(0, 2, 1, 3):contiguous() end
    local scale = (c.scale_attn_weights == false and 1 or (C / H) ^ -0.5)
      / (c.scale_attn_by_inverse_layer_idx and i + 1 or 1)
    local scores = part(0):matmul(part(1):transpose(2, 3):contiguous()) * scale
    local p = scores:masked_fill(later:expand(B, H, T, T), -math.huge):softmax(-1)
    h = h + layer(p:matmul(part(2)):permute(0, 2, 1, 3):reshape(B, T, C), at .. "attn.c_proj")
    local act = ACTIVATIONS[c.activation_function or "gelu_new"]
    h = h + layer(act(layer(norm(h, at .. "ln_2"), at .. "mlp.c_fc")), at .. "mlp.c_proj")
  end
  return norm(h, "transformer.ln_f"):matmul((w["lm_head.weight"] or w["transformer.wte.weight"]):t():contiguous())
end

local FIELDS = { {}, { scale_attn_weights = false }, { scale_attn_by_inverse_layer_idx = true },
  { scale_attn_by_inverse_layer_idx = true, reorder_and_upcast_attn = true, scale_attn_weights = false },
  { tie_word_embeddings = false }, { activation_function = "gelu" }, { activation_function = "relu", n_inner = 80 },
  { activation_function = "silu" }, { activation_function = "quick_gelu" }, { activation_function = "tanh" } }

describe("GPT-2's settings", function()
  it("follow Hugging Face's formulas", function()
    for i, fields in ipairs(FIELDS) do
      ps.manual_seed(i)
      local model, x = gpt2.new(with(SMALL, fields)), ids(2, 9)
      ps.no_grad(function()
        local want = formula(model, with(SMALL, fields), x)
        local distance = (model(x):double() - want):abs():amax():item()
        assert.truthy(want:abs():amax():item() > 1 and distance < 3e-5, json.encode(fields) .. " " .. distance)
        -- the loss, and generate with its cache, compute the same logits
        local y = ids(2, 9)
        local loss = F.cross_entropy(want:reshape(18, 61), y:reshape(18):to("int64"))
        assert.truthy(math.abs(loss:item() - model(x, y):item()) < 1e-5)
      end)
      local prompt = x:narrow(0, 0, 1):contiguous()
      local list = model:generate(prompt, 6, { temperature = 0 })[1]
      for n = 9, 14 do
        local row = ps.tensor({ { unpack(list, 1, n) } }, "int32")
        local best = formula(model, with(SMALL, fields), row):select(1, n - 1):argmax(-1)
        assert.equal(list[n + 1], best:item(), json.encode(fields))
      end
    end
  end)

  it("train a separate head, also in an engine", function()
    local x, y = ids(4, 8), ids(4, 8)
    local c = with(SMALL, { tie_word_embeddings = false })
    local function trained(config)
      ps.manual_seed(3)
      local model, optimizer
      if config then
        model, optimizer = initialize { quiet = true, model_func = function() return gpt2.new(c) end,
          config = with({ plan_print = false, gradient_clipping = 0,
            optimizer = { type = "AdamW", params = { lr = 1e-3, weight_decay = 0.1 } } }, config) }
      else
        model = gpt2.new(c)
        optimizer = ps.optim.AdamW(model, { lr = 1e-3, weight_decay = 0.1 })
      end
      for _ = 1, 3 do
        local loss = model(x, y)
        if config then model:backward(loss) else loss:backward() end
        optimizer:step()
        optimizer:zero_grad()
      end
      local state = bytes_of(model:state_dict())
      if config then model:close() end
      return state
    end
    local want = trained()
    assert.truthy(want["lm_head.weight"])
    assert.same(want, trained { memory = CHUNKS })
    assert.same(want, trained { memory = "plain" })
    local model = gpt2.new(c)
    assert.equal(gpt2.new(SMALL):flops_per_token(8), model:flops_per_token(8))    -- the embedding only looks up rows
  end)

  it("that are not supported are refused by name", function()
    local model = gpt2.new(SMALL)
    for _, case in ipairs {
      { { add_cross_attention = true }, "add_cross_attention = true: attention to an encoder is not supported" },
      { { quantization_config = { bits = 4 } }, "quantization_config = {...}: it has no quant_method; only" },
      { { auto_map = { AutoModel = "x.Y" } }, "auto_map = {...}: the model's own code" },
      { { pruned_heads = { ["0"] = { 1 } } }, "pruned_heads" }, { { model_type = "llama" }, "model_type = llama" },
      { { is_encoder_decoder = true }, "is_encoder_decoder" },
      { { is_causal = false }, "refused: is_causal = false: attention to later positions is not supported" },
      { { is_causal = json.null }, "refused: is_causal = false" },
      { { transformers_weights = "x.safetensors" }, "refused: transformers_weights = x.safetensors: weights are read" },
      { { per_layer_config = { ["0"] = { n_head = 2 } } }, "refused: per_layer_config = {...}: a model whose layers" },
      { { compression_config = { bits = 4 } }, "refused: compression_config" },
      { { architectures = "GPT2Model" }, "refused: architectures = GPT2Model: it is a list of names of classes" },
      { { architectures = { 5 } }, "refused: architectures = 5" },
      { { id2label = { x = "a" } }, "id2label = {...}: 'x' is not a label's number" },
      { { num_labels = 1, problem_type = "single_label_classification" },
        "problem_type = single_label_classification: num_labels is 1" },
      { { activation_function = "mish" }, "activation_function = mish: the supported values are gelu, gelu_accurate" },
      { { activation_function = "gelu_10" }, "activation_function" },
      { { num_attention_heads = 4 }, "num_attention_heads = 4, but n_head = 3: they are two names of one setting" },
      { { hidden_size = 96 }, "hidden_size" }, { { num_hidden_layers = 4 }, "num_hidden_layers" },
      { { max_position_embeddings = 3 }, "max_position_embeddings" },
      { { n_layer = 2.5 }, "gpt2: n_layer is 2.5; it must be a whole number" }, { { n_head = 0 }, "n_head = 0" },
      { { n_head = 5 }, "n_head = 5 does not divide n_embd = 48" }, { { n_inner = -1 }, "n_inner = -1" },
      { { attn_pdrop = 1 }, "attn_pdrop = 1" }, { { embd_pdrop = "x" }, "embd_pdrop is a string" },
      { { tie_word_embeddings = "no" }, "tie_word_embeddings is a string" },
      { { scale_attn_weights = 1 }, "scale_attn_weights is a number" }, { { vocab_size = "61" }, "vocab_size" },
    } do
      write_folder("refused", model, case[1])
      fails({ "pretrained_spec.lua", case[2] }, function() gpt2.from_pretrained(path "refused") end)
    end
    fails({ "n_layer = 0" }, function() gpt2.new("tiny", { n_layer = 0 }) end)
    fails({ "num_labels = 2: id2label has 3" }, function()
      gpt2.new("tiny", { num_labels = 2, id2label = { "a", "b", "c" } })
    end)
    write_folder("refused", model)
    fails({ "num_labels = 2: id2label has 3" }, function()
      gpt2.from_pretrained(path "refused", { num_labels = 2, id2label = { "a", "b", "c" } })
    end)
    fails({ "add_cross_attention" }, function() gpt2.new { add_cross_attention = true } end)
  end)

  it("accept Hugging Face's other names, nulls and defaults", function()
    local model = gpt2.new(SMALL)
    model:save_pretrained(path "alias")
    check.write(path "alias/config.json", json.encode { vocab_size = 61, max_position_embeddings = 37, hidden_size = 48,
      num_hidden_layers = 3, num_attention_heads = 3, n_inner = json.null, quantization_config = json.null,
      pruned_heads = {}, architectures = {}, n_ctx = 37, id2label = { ["0"] = "a" }, unknown = { 1 } })
    local back = gpt2.from_pretrained(path "alias"):eval()
    local x = ids(2, 7)
    assert.equal(check.bytes(model(x)), check.bytes(back(x)))
    assert.same({ 3, 3, 0.1, 0.1, 0.1, 0.02 }, { back.config.n_head, back.config.n_layer, back.config.attn_pdrop,
      back.config.embd_pdrop, back.config.resid_pdrop, back.config.initializer_range })
    back:save_pretrained(path "again")
    local fields = config_of "again"
    assert.same({ 3, 48, { ["0"] = "a" }, { 1 }, 37 },
      { fields.n_head, fields.n_embd, fields.id2label, fields.unknown, fields.n_ctx })
    assert.is_nil(fields.num_attention_heads)
    assert.same({ a = 0 }, fields.label2id)
    local options = { task = "sequence_classification", quiet = true, id2label = { "no", "yes" }, num_labels = 2 }
    gpt2.from_pretrained(path "again", options):save_pretrained(path "named")
    fields = config_of "named"
    assert.same({ { ["0"] = "no", ["1"] = "yes" }, { no = 0, yes = 1 } }, { fields.id2label, fields.label2id })
  end)

  it("are also accepted by their other names in a script", function()
    local model, x = gpt2.new(SMALL), ids(2, 7)
    model:save_pretrained(path "script")
    local function loaded(options) return gpt2.from_pretrained(path "script", options):eval() end
    local other, want = loaded { num_attention_heads = 6 }, loaded { n_head = 6 }
    assert.equal(6, other.config.n_head)
    assert.equal(check.bytes(want(x)), check.bytes(other(x)))
    assert.not_equal(check.bytes(model(x)), check.bytes(other(x)))
    assert.equal(2, loaded { num_hidden_layers = 2, quiet = true }.config.n_layer)
    assert.equal(6, loaded { num_attention_heads = 6, n_head = 6 }.config.n_head)
    fails({ "num_attention_heads = 4, but n_head = 6: they are two names" }, function()
      loaded { num_attention_heads = 4, n_head = 6 }
    end)
    -- one rank prints it, then all ranks do
    local c = gpt2.new("tiny", { dropout = 0.3, attn_pdrop = 0.2 }).config
    assert.same({ 0.2, 0.3, 0.3 }, { c.attn_pdrop, c.embd_pdrop, c.resid_pdrop })
  end)

  it("are written as numbers of the kind that transformers 5 needs", function()
    gpt2.new("tiny", { layer_norm_epsilon = 0, initializer_range = 1, attn_pdrop = 0 }):save_pretrained(path "floats")
    local text = check.read(path "floats/config.json")
    assert.truthy(text:find('"layer_norm_epsilon":0.0,', 1, true) and text:find('"initializer_range":1.0,', 1, true))
    assert.truthy(text:find('"n_layer":2,', 1, true))
    gpt2.from_pretrained(path "floats", { layer_norm_epsilon = 1.25e-5 }):save_pretrained(path "floats")
    assert.truthy(check.read(path "floats/config.json"):find('"layer_norm_epsilon":1.25e-05,', 1, true))
  end)
end)

describe("GPT-2's files", function()
  local function model_of(fields)
    ps.manual_seed(2)
    return gpt2.new(with(SMALL, fields or {}))
  end

  it("may be one or several, of safetensors or of PyTorch", function()
    local model = model_of()
    local want = bytes_of(model:state_dict())
    local halves, map, n = { {}, {} }, {}, 0
    for name, t in pairs(model:state_dict()) do
      n = n + 1
      halves[n % 2 + 1][name:match "^transformer%.(.*)$"] = t          -- as GPT2Model saves them
    end
    for i, half in ipairs(halves) do
      for name in pairs(half) do map[name] = ("part-%d"):format(i) end
    end
    local function index(suffix)
      local files = {}
      for name, part in pairs(map) do files[name] = part .. suffix end
      return json.encode { metadata = { total_size = 1 }, weight_map = files }
    end
    local at = write_folder("files", model)
    local function loaded() return bytes_of(gpt2.from_pretrained(at):state_dict()) end
    os.remove(at .. "/model.safetensors")
    fails({ "no model file", at, "neither model.safetensors nor pytorch_model.bin" }, loaded)
    for i, half in ipairs(halves) do
      half["h.0.attn.bias"] = i == 1 and ps.ones { 1, 1, 4, 4 } or nil  -- masks that old checkpoints contain
      ps.save(half, ("%s/part-%d.bin"):format(at, i))
      ps.safetensors.save(("%s/part-%d.safetensors"):format(at, i), half)
    end
    check.write(at .. "/pytorch_model.bin.index.json", index ".bin")
    assert.same(want, loaded())
    ps.save(model:state_dict(), at .. "/pytorch_model.bin")
    os.remove(at .. "/pytorch_model.bin.index.json")
    assert.same(want, loaded())
    os.remove(at .. "/pytorch_model.bin")
    check.write(at .. "/model.safetensors.index.json", index ".safetensors")
    assert.same(want, loaded())
    -- the weights that were saved last are used, whatever other files exist
    local other = model_of()
    ps.no_grad(function() other.transformer.wpe.weight:fill_(3) end)
    other:save_pretrained(at)
    assert.same(bytes_of(other:state_dict()), loaded())
    for _, text in ipairs { "[]", "{}", '{"weight_map":{"wte.weight":3}}', "", "{" } do
      os.remove(at .. "/model.safetensors")
      check.write(at .. "/model.safetensors.index.json", text)
      fails({ "model.safetensors.index.json" }, loaded)
    end
    check.write(at .. "/model.safetensors.index.json", '{"weight_map":{"a":"missing.safetensors"}}')
    fails({ "missing.safetensors" }, loaded)
  end)

  it("are opened once by from_pretrained, and closed", function()
    -- Counts the calls of open functions by path, and the open files.
    local function counted(fn)
      local counts, files, undo = {}, {}, {}
      for _, format in ipairs { require "ps.io.safetensors", require "ps.io.torch_pt" } do
        local open = format.open
        function format.open(from, ...)
          local file = open(from, ...)
          local name = from:match "[^/]*$"
          counts[name], files[#files + 1] = (counts[name] or 0) + 1, file
          return file
        end
        undo[#undo + 1] = function() format.open = open end
      end
      local ok, problem = pcall(fn)
      for _, put_back in ipairs(undo) do put_back() end
      for _, file in ipairs(files) do
        assert.truthy(not pcall(file.names, file), file.path .. " is still open")
      end
      return counts, not ok and tostring(problem) or nil
    end
    local at = write_folder("once", model_of())
    local one = { ["model.safetensors"] = 1 }
    for _, options in ipairs { {}, { mmap = true }, { mmap = "auto", dtype = "bf16" }, { dtype = "auto" } } do
      assert.same(one, (counted(function() ps.from_pretrained(at, options) end)))
    end
    assert.same(one, (counted(function()
      initialize { model_func = function() return ps.from_pretrained(at) end, config = { memory = CHUNKS },
        quiet = true }
      engine:close()
    end)))
    local counts, problem = counted(function() ps.from_pretrained(at, { n_head = 3, n_embd = 51 }) end)
    assert.same(one, counts)
    assert.matches("n_embd", problem)
    model_of():save_pretrained(at, { max_shard_size = 60000 })
    counts = counted(function() ps.from_pretrained(at) end)
    assert.truthy(next(counts, next(counts)))
    for name, count in pairs(counts) do assert.equal(1, count, name) end
    model_of():save_parallelized(at)
    assert.same({ ["pytorch_model_tp_0_pp_0.bin"] = 1 }, (counted(function() ps.from_pretrained(at) end)))
  end)

  it("are not read while they have files of two models", function()
    local at = write_folder("two", model_of())
    local new, remove = model_of(), os.remove
    os.remove = function(name) -- luacheck: ignore 122
      if name:find "model%.safetensors$" then error("the process ends here", 0) end
      return remove(name)
    end
    local ok, problem = pcall(new.save_pretrained, new, at, { max_shard_size = 60000 })
    os.remove = remove -- luacheck: ignore 122
    assert.is_false(ok)
    assert.matches("the process ends here", problem)
    assert.truthy(lfs.attributes(at .. "/model.safetensors"))              -- the older weights
    fails({ "config.json" }, function() ps.from_pretrained(at) end)
    new:save_pretrained(at, { max_shard_size = 60000 })
    ps.from_pretrained(at)
  end)

  it("are written through links, also to files that do not exist yet", function()
    local at, away = path "links", path "away"
    assert(lfs.mkdir(at) and lfs.mkdir(away))
    assert(lfs.link("../away/weights", at .. "/model.safetensors", true))
    for _ = 1, 2 do
      model_of():save_pretrained(at)
      assert.equal("link", lfs.symlinkattributes(at .. "/model.safetensors", "mode"))
      assert.equal("file", lfs.symlinkattributes(away .. "/weights", "mode"))
    end
    ps.from_pretrained(at)
  end)

  it("may have the head of a tied model, which must equal its table", function()
    local model = model_of()
    local state = model:state_dict()
    local at = write_folder("tied", model)
    for _, name in ipairs { "pytorch_model.bin", "model.safetensors" } do
      os.remove(at .. "/model.safetensors")
      state["lm_head.weight"] = ps.no_grad(function() return state["transformer.wte.weight"] * 1 end)
      ps.save(state, at .. "/" .. name)
      local loaded = gpt2.from_pretrained(at)
      assert.equal(check.bytes(state["lm_head.weight"]), check.bytes(loaded.transformer.wte.weight))
      assert.is_nil(loaded.lm_head)
      ps.no_grad(function() state["lm_head.weight"][{ 60, 47 }] = 0.25 end)
      ps.save(state, at .. "/" .. name)
      fails({ name, "lm_head.weight differs from transformer.wte.weight", "tie_word_embeddings = false" },
        function() gpt2.from_pretrained(at) end)
    end
    state["transformer.wte.weight"] = nil                  -- the head alone also fills the embedding
    ps.save(state, at .. "/model.safetensors")
    local loaded = gpt2.from_pretrained(at)
    assert.equal(check.bytes(state["lm_head.weight"]), check.bytes(loaded.transformer.wte.weight))
    local untied = model_of { tie_word_embeddings = false }
    write_folder("untied", untied, { tie_word_embeddings = false })
    ps.safetensors.save(path "untied/model.safetensors", model:state_dict())
    -- a head that the file lacks is initialized from the seed
    local fresh = gpt2.from_pretrained(path "untied", { quiet = true })
    assert.same({ "lm_head.weight" }, fresh.loaded.missing)
    assert.truthy(fresh.lm_head.weight:abs():amax():item() > 0)
  end)

  it("of an unsupported type are refused by the type's name", function()
    local at = write_folder("typed", gpt2.new(SMALL)) .. "/model.safetensors"
    local text, n = check.read(at):gsub('("transformer%.ln_f%.weight":{"dtype":")F32', "%1U32")
    assert.equal(1, n)
    check.write(at, text)
    fails({ "config.json: refused: dtype = U32: the files have transformer.ln_f.weight of that type" }, function()
      gpt2.from_pretrained(path "typed")
    end)
  end)

  it("must have the sizes of config.json, which is checked before a model is made", function()
    local model = model_of { tie_word_embeddings = false, n_inner = 96 }
    for _, case in ipairs {
      { { n_layer = 1e9 }, "n_layer is 1000000000, but the files have weights of 3 layers" },
      { { n_layer = 4 }, "n_layer is 4, but" },
      { { vocab_size = 1e9 }, "vocab_size is 1000000000, but transformer.wte.weight in the files is [61, 48]" },
      { { n_positions = 38 }, "n_positions is 38, but transformer.wpe.weight in the files is [37, 48]" },
      { { n_embd = 3e6 }, "n_embd is 3000000, but transformer.wte.weight in the files is [61, 48]" },
      { { n_inner = 1e9 }, "n_inner is 1000000000, but transformer.h.0.mlp.c_fc.weight in the files is [48, 96]" },
      { { n_inner = json.null }, "n_inner is 192, but transformer.h.0.mlp.c_fc.weight in the files is [48, 96]" },
    } do
      write_folder("sized", model, with({ n_inner = 96, tie_word_embeddings = false }, case[1]))
      fails({ "pretrained_spec.lua", path "sized" .. "/config.json: " .. case[2] },
        function() gpt2.from_pretrained(path "sized") end)
    end
    local state = model:state_dict()
    write_folder("sized", model, { n_inner = 96, tie_word_embeddings = false })
    state["transformer.wte.weight"] = nil                  -- load_state_dict reports the missing names
    ps.safetensors.save(path "sized/model.safetensors", state)
    fails({ "missing", "transformer.wte.weight" }, function() gpt2.from_pretrained(path "sized") end)
  end)

  it("of another type than the model's are reported once", function()
    local model = model_of()
    write_folder("told", model, { torch_dtype = "bfloat16" })
    write_folder("told fp16", model, { dtype = "float16", torch_dtype = "bfloat16" })
    local said = check.run("", ([[
      local ps, gpt2 = require "ps", require "models.gpt2"
      for _ = 1, 2 do gpt2.from_pretrained("%s") end
      gpt2.from_pretrained("%s", { dtype = "bf16" })
      gpt2.from_pretrained("%s")
      gpt2.from_pretrained("%s", { dtype = "bf16" })
    ]]):format(path "told", path "told", path "told fp16", path "told fp16"))
    local words = "psluajit: %s/config.json: dtype %s is ignored: parameters are made in fp32, unless "
      .. "from_pretrained(folder, { dtype = \"%s\" }) or an engine's configuration sets another dtype\n"
    assert.equal(words:format(path "told", "bfloat16", "bf16") .. words:format(path "told fp16", "float16", "fp16"),
      said)
  end)

  it("record the type of their weights", function()
    local model = model_of { tie_word_embeddings = false }
    write_folder("typed", model, { dtype = "bfloat16", torch_dtype = "float16", tie_word_embeddings = false })
    for dtype, word in pairs { fp32 = "float32", bf16 = "bfloat16", fp16 = "float16" } do
      local loaded = gpt2.from_pretrained(path "typed", { dtype = dtype })
      loaded:save_pretrained(path "typed-again")
      local fields = config_of "typed-again"
      assert.same({ word, word, false }, { fields.dtype, fields.torch_dtype, fields.tie_word_embeddings })
      local back = gpt2.from_pretrained(path "typed-again", { dtype = dtype })
      assert.same(bytes_of(loaded:state_dict()), bytes_of(back:state_dict()))
      assert.truthy(back:state_dict()["lm_head.weight"])
      write_folder("typed-again", back, { tie_word_embeddings = false })              -- without a type
      assert.equal(dtype, gpt2.from_pretrained(path "typed-again", { dtype = "auto" }):parameters()[1]:dtype())
    end
  end)

  it("cannot have a type of integers", function()
    write_folder("typed", model_of(), {})
    for _, dtype in ipairs { "int32", "uint8", "bool", "bf17" } do
      local why = ("dtype is '%s', but weights are fp32, bf16, fp16 or fp64"):format(dtype)
      check.fails(function() ps.from_pretrained(path "typed", { dtype = dtype }) end, "from_pretrained: " .. why)
      check.fails(function() ps.from_config(path "typed", { dtype = dtype }) end, "from_config: " .. why)
      check.fails(function() gpt2.new("tiny", { dtype = dtype }) end, "gpt2.new: " .. why)
    end
  end)

  it("of an engine contain its masters", function()
    for _, memory in ipairs { "plain", CHUNKS } do
      local model, optimizer = initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
        optimizer = { type = "AdamW", params = { lr = 1e-3 } }, memory = memory },
        model_func = function() return model_of() end }
      local x = ids(2, 8)
      model:backward(model(x, x))
      fails({ "save_pretrained", "between steps" }, function() model:save_pretrained(path "early") end)
      optimizer:step()
      local want = bytes_of(model:state_dict())
      model:save_pretrained(path "masters")
      model:close()
      assert.equal("float32", config_of("masters").dtype)
      local back = gpt2.from_pretrained(path "masters")
      assert.same(want, bytes_of(back:state_dict()))
      local table_ = back.transformer.wte.weight
      assert.truthy((table_:bfloat16():float() - table_):abs():amax():item() > 0)      -- not rounded
    end
  end)

  it("of several ranks are written once, at any ZeRO stage", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    for _, stage in ipairs { 0, 3 } do
      local all = ranks.check(folder, 2, ranks.TRAINING .. ([[
        local gpt2 = require "models.gpt2"
        local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 8192,
          zero_optimization = { stage = %d }, bf16 = { enabled = true },
          optimizer = { type = "AdamW", params = { lr = 1e-3 } } }, model_func = function()
          local made = gpt2.new "tiny"
          for name, p in made:named_parameters() do
            if name:find("h.0.mlp", 1, true) then p:requires_grad(false) end
          end
          return made
        end }
        train(model, optimizer, 1, 1)
        model:save_pretrained(folder .. "/ranks")
        for _, line in ipairs(sums(model)) do print("sum " .. line) end
        -- One rank cannot write. All ranks get the error, and none of them waits.
        local ok, problem = pcall(model.save_pretrained, model, folder .. "/script.lua/under")
        assert(not ok and tostring(problem):find("script.lua", 1, true), tostring(problem))
        ok, problem = pcall(model.save_pretrained, model, folder .. "/rank" .. rank)
        assert(not ok and tostring(problem):find("the folder is", 1, true), tostring(problem))
        ps.C.ps_test_fail_file(rank == 0 and 1 or -1, rank == 0 and 1 or 0, 28)
        ok, problem = pcall(model.save_pretrained, model, folder .. "/full")
        ps.C.ps_test_fail_file(-1, 0, 0)
        assert(not ok and tostring(problem):find("No space left", 1, true), tostring(problem))
        train(model, optimizer, 1, 1)
      ]]):format(stage))
      local want = {}
      for rank = 0, 1 do
        for name, sum in all[rank].text:gmatch "sum (%S+) ([^\n]*)" do want[name] = sum end
      end
      local got = {}
      for name, t in pairs(gpt2.from_pretrained(path "ranks"):state_dict()) do
        local t64 = t:detach():to("fp64")
        got[name] = ("%.17g %.17g"):format(t64:sum():item(), (t64 * t64):sum():item())
      end
      for name in pairs(want) do if name:find("h.0.mlp", 1, true) then want[name], got[name] = nil, nil end end
      assert.same(want, got)
      assert.is_nil(lfs.attributes(path "full/model.safetensors"))
      os.execute(("rm -rf '%s' '%s'"):format(path "ranks", path "full"))
    end
  end)
end)

describe("transformers", function()
  local python

  setup(function()
    for _, candidate in ipairs { os.getenv "PS_TORCH_PYTHON" or "python3" } do
      if os.execute(candidate .. " -c 'import transformers, torch, safetensors' 2>/dev/null") == 0 then
        python = candidate
      end
    end
  end)

  it("writes folders with the same logits here, and reads the saved ones", function()
    if not python then return pending("no Python with transformers (PS_TORCH_PYTHON names one)") end
    check.write(path "between.lua", [[
      local ps, gpt2 = require "ps", require "models.gpt2"
      for i = 0, 9 do
        local x = ps.load(("io%d.safetensors"):format(i)).x
        local model = gpt2.from_pretrained("hf" .. i):eval()
        local function logits() return ps.no_grad(model, x) end
        local before = logits()
        ps.no_grad(function() model.transformer.wte.weight:add_(1e-4) end)
        model:save_pretrained("back" .. i)
        ps.save({ before = before, after = logits() }, ("ours%d.safetensors"):format(i))
      end
    ]])
    check.write(path "script.py", [[
import json, subprocess, sys, warnings
warnings.filterwarnings("ignore")
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
transformers.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()
FIELDS = [{}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"tie_word_embeddings": False},
          {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}, {"activation_function": "relu"},
          {"activation_function": "gelu_fast"}, {"activation_function": "quick_gelu"}, {"n_inner": 70},
          {"activation_function": "silu", "tie_word_embeddings": False}]
wanted = []
for i, fields in enumerate(FIELDS):
    torch.manual_seed(i)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=37, n_embd=48, n_layer=3, n_head=3,
                                       initializer_range=.2, **fields)).eval()
    if i == 9: model = model.to(torch.bfloat16)
    model.save_pretrained(f"hf{i}")
    if i == 0:
        c = json.load(open("hf0/config.json"))
        c["num_attention_heads"] = c.pop("n_head")
        json.dump(c, open("hf0/config.json", "w"))
    x = torch.randint(0, 61, (2, 20), dtype=torch.int32)
    with torch.no_grad(): wanted.append((x, model.float()(x.long()).logits))
    save_file({"x": x}, f"io{i}.safetensors")
subprocess.run([sys.argv[1], "between.lua"], check=True)
for i, fields in enumerate(FIELDS):
    ours, (x, y) = load_file(f"ours{i}.safetensors"), wanted[i]
    assert (ours["before"] - y).abs().max() < 2e-5, (i, (ours["before"] - y).abs().max())
    model, info = GPT2LMHeadModel.from_pretrained(f"back{i}", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], (i, info)
    assert model.dtype == torch.float32, (i, model.dtype)
    with torch.no_grad(): distance = (model.eval()(x.long()).logits - ours["after"]).abs().max()
    assert distance < 2e-5, (i, distance)
    for key, value in fields.items(): assert getattr(model.config, key) == value, (i, key)
]])
    local out, code = check.shell(("cd '%s' && '%s' script.py '%s'"):format(folder, python, paths.exe))
    assert.equal(0, code, out)
  end)
end)
