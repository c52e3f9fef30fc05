-- SPDX-License-Identifier: BSD-3-Clause
-- Files of Lua's readers changed at random: config.json, indices of weights, generation_config.json, tokenizers'
-- settings, files of ranks. Each is either read, or rejected by an error about the file. It never causes an error of
-- our own Lua code, a crash, or a hang. PS_MUTATE_SEED=n draws others, PS_FULL=1 fifty times as many. The C parsers are
-- in spec/fuzz.
local ps = require "ps"
local json = require "cjson"
local lfs = require "lfs"
local check = require "spec.check_lib"

local SEED = tonumber(os.getenv "PS_MUTATE_SEED" or "") or 1
local DRAWN = os.getenv "PS_FULL" == "1" and 6000 or 120
local SECONDS = 20                                         -- time for one file, since a loaded machine is slow

local folder = os.tmpname()
os.remove(folder)
assert(lfs.mkdir(folder))
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)
local function path(name) return folder .. "/" .. name end

local function pick(list) return list[math.random(#list)] end

-- -- changes of JSON ------------------------------------------------------------------------------------------------
local VALUES = { "null", "true", "false", "-1", "0", "1", "2", "3", "0.5", "7", "65537", "2147483648", "1e9", "-1e9",
  "1e300", "9007199254740993", '""', '"x"', '"gelu"', '"../x"', '"\\u0000"', "[]", "{}", "[[]]", "[1,2]", '["a"]',
  '{"a":1}', '{"0":{}}', '[null]', '[{"type":"x"}]' }

-- Returns all positions in a decoded text as {table, key}.
local function places(t, list)
  list = list or {}
  for key, value in pairs(t) do
    list[#list + 1] = { t, key }
    if type(value) == "table" then places(value, list) end
  end
  table.sort(list, function(a, b) return tostring(a[2]) < tostring(b[2]) end)
  return list
end

-- Returns a text with one to three of its values replaced or removed.
local function other_values(text)
  local value = json.decode(text)
  for _ = 1, math.random(3) do
    local list = places(value)
    if #list == 0 then break end
    local place = pick(list)
    place[1][place[2]] = math.random(6) > 1 and json.decode("[" .. pick(VALUES) .. "]")[1] or nil
  end
  local ok, out = pcall(json.encode, value)
  return ok and out or text
end

-- Returns a text with bytes changed, removed or duplicated.
local function other_bytes(text)
  for _ = 1, math.random(4) do
    local at, n = math.random(#text), math.random(8)
    local middle = pick { "", text:sub(at, at + n):rep(2), string.char(math.random(0, 255)), "{", "]", '"', "\0",
      ("["):rep(2000), "NaN", "-", "99999999999" }
    text = text:sub(1, at - 1) .. middle .. text:sub(at + pick { 0, 1, n })
    if text == "" then return "{" end
  end
  return text
end

-- -- trying ---------------------------------------------------------------------------------------------------------
-- Errors that LuaJIT raises for a mistake in our code, and errors without information.
local MISTAKES = { "attempt to ", "bad argument", "stack overflow", "not enough memory", "invalid order function",
  "ambiguous", "cannot convert", "^nil$", "table: 0x" }

local function try(what, text, open)
  local began = os.clock()
  local ok, problem = pcall(open)
  local said = tostring(problem)
  for _, mistake in ipairs(not ok and MISTAKES or {}) do
    if said:find(mistake) then
      check.write(path "found", text)
      error(("%s: %s\n%s"):format(what, said, text:sub(1, 3000)), 0)
    end
  end
  local took = os.clock() - began
  if took > SECONDS then error(("%s: %.1f s\n%s"):format(what, took, text:sub(1, 3000)), 0) end
  return ok
end

-- Opens a file changed in `n` ways, and restores it afterwards. Some of the changed files are read, and some are
-- rejected.
local function mutate(file, n, open)
  local text, read, refused = check.read(file), 0, 0
  for i = 1, n do
    local is_json = file:match "%.json$" and math.random(4) > 1
    local other = (is_json and other_values or other_bytes)(text)
    check.write(file, other)
    if try(("%s, change %d of seed %d"):format(file:match "[^/]*$", i, SEED), other, open) then read = read + 1
    else refused = refused + 1 end
  end
  check.write(file, text)
  assert.truthy(refused > 0, file .. ": nothing was refused")
  return read
end

before_each(function() math.randomseed(SEED) end)

local TINY = {
  gpt2 = { vocab_size = 31, n_positions = 16, n_embd = 16, n_layer = 2, n_head = 2 },
  bert = { vocab_size = 31, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 24,
    max_position_embeddings = 16 },
  llama = { vocab_size = 31, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 24,
    max_position_embeddings = 16, rope_parameters = { rope_type = "yarn", factor = 2, rope_theta = 500 } },
  qwen3 = { vocab_size = 31, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 24,
    max_position_embeddings = 16, head_dim = 8, use_sliding_window = true, sliding_window = 4,
    layer_types = { "full_attention", "sliding_attention" } },
}
TINY.roberta, TINY.qwen2 = TINY.bert, TINY.llama
TINY.mistral = { vocab_size = 31, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2,
  intermediate_size = 24, max_position_embeddings = 16, num_key_value_heads = 1, sliding_window = 4 }
local HEAD = { bert = { task = "sequence_classification" }, roberta = { task = "token_classification" } }

local function make(family)
  local at = path(family)
  if not lfs.attributes(at) then require("models." .. family).new(TINY[family], HEAD[family]):save_pretrained(at) end
  return at
end

describe("a changed config.json", function()
  for _, family in ipairs { "gpt2", "bert", "roberta", "llama", "mistral", "qwen2", "qwen3" } do
    it("is read, or refused with the fault: " .. family, function()
      local at = make(family)
      local ids = ps.tensor({ { 1, 2, 3 } }, { dtype = "int32" })
      local read = mutate(at .. "/config.json", DRAWN / 3, function()
        local model = ps.from_pretrained(at, { quiet = true }):eval()
        ps.no_grad(ps.scope, model, { input_ids = ids })
      end)
      assert.truthy(read > 0, "nothing was read")
    end)
  end
end)

describe("a changed index", function()
  it("of weights is read, or refused", function()
    local at = path "shards"
    require("models.gpt2").new(TINY.gpt2):save_pretrained(at, { max_shard_size = 4096 })
    mutate(at .. "/model.safetensors.index.json", DRAWN, function() ps.from_pretrained(at, { quiet = true }) end)
  end)
end)

describe("a changed generation_config.json", function()
  it("is followed, or refused", function()
    local at = make "gpt2"
    check.write(at .. "/generation_config.json", json.encode { max_new_tokens = 3, temperature = 0.7, top_k = 5,
      top_p = 0.9, do_sample = true, eos_token_id = { 3, 4 }, num_beams = 1, repetition_penalty = 1.1,
      no_repeat_ngram_size = 2, min_new_tokens = 1 })
    mutate(at .. "/generation_config.json", DRAWN, function()
      ps.from_pretrained(at, { quiet = true }):generate({ 1, 2 }, 2)
    end)
  end)
end)

describe("a changed file of a tokenizer", function()
  -- Writes a vocab.json with the 256 letters of byte-level BPE, and two merges.
  local function gpt2_folder(at)
    local vocab, n = {}, 0
    local function add(name) vocab[name], n = n, n + 1 end
    local other = 256
    for byte = 0, 255 do
      local self = byte >= 33 and byte <= 126 or byte >= 161 and byte <= 172 or byte >= 174
      local point = self and byte or other
      if not self then other = other + 1 end
      add(point < 128 and string.char(point) or string.char(192 + math.floor(point / 64), 128 + point % 64))
    end
    for _, name in ipairs { "th", "the", "<|endoftext|>", "<pad>" } do add(name) end
    lfs.mkdir(at)
    check.write(at .. "/vocab.json", json.encode(vocab))
    check.write(at .. "/merges.txt", "#version: 0.2\nt h\nth e\n")
    check.write(at .. "/tokenizer_config.json", json.encode { tokenizer_class = "GPT2Tokenizer", model_max_length = 16,
      add_prefix_space = false, eos_token = "<|endoftext|>", pad_token = { content = "<pad>", lstrip = false },
      added_tokens_decoder = { ["258"] = { content = "<|endoftext|>", special = true } } })
    check.write(at .. "/special_tokens_map.json", json.encode { eos_token = "<|endoftext|>", pad_token = "<pad>" })
    check.write(at .. "/added_tokens.json", json.encode { ["<more>"] = 260 })
  end

  local function use(at, options)
    local tok = ps.tokenizer.from_pretrained(at, options)
    tok:decode(tok("the cat's 12\n <|endoftext|> \255").input_ids:tolist()[1])
  end

  it("is read, or refused", function()
    local at = path "tokenizer"
    gpt2_folder(at)
    use(at)
    for _, name in ipairs { "tokenizer_config.json", "special_tokens_map.json" } do
      mutate(at .. "/" .. name, DRAWN / 2, function() use(at) end)
    end
    check.write(at .. "/tokenizer_config.json", json.encode { tokenizer_class = "GPT2Tokenizer" })
    mutate(at .. "/added_tokens.json", DRAWN / 2, function() use(at) end)
    for _, name in ipairs { "vocab.json", "merges.txt" } do
      mutate(at .. "/" .. name, DRAWN / 10, function() use(at) end)
    end
  end)

  it("tokenizer.json is read, or refused", function()
    local at, vocab = path "whole", { ["[UNK]"] = 0, ["the"] = 1, ["##s"] = 2, ["[CLS]"] = 3, ["[SEP]"] = 4, t = 5 }
    lfs.mkdir(at)
    check.write(at .. "/tokenizer.json", json.encode { version = "1.0",
      truncation = { max_length = 8, stride = 0, direction = "Right", strategy = "LongestFirst" },
      padding = { strategy = "BatchLongest", direction = "Right", pad_id = 0, pad_type_id = 0, pad_token = "[UNK]" },
      added_tokens = { { id = 3, content = "[CLS]", special = true, normalized = false },
        { id = 4, content = "[SEP]", special = true, lstrip = true } },
      normalizer = { type = "Sequence", normalizers = { { type = "NFC" }, { type = "Lowercase" },
        { type = "BertNormalizer", clean_text = true, handle_chinese_chars = true, lowercase = true } } },
      pre_tokenizer = { type = "BertPreTokenizer" },
      post_processor = { type = "TemplateProcessing", single = { { SpecialToken = { id = "[CLS]", type_id = 0 } },
        { Sequence = { id = "A", type_id = 0 } }, { SpecialToken = { id = "[SEP]", type_id = 0 } } },
        pair = { { Sequence = { id = "A", type_id = 0 } }, { Sequence = { id = "B", type_id = 1 } } },
        special_tokens = { ["[CLS]"] = { id = "[CLS]", ids = { 3 }, tokens = { "[CLS]" } },
          ["[SEP]"] = { id = "[SEP]", ids = { 4 }, tokens = { "[SEP]" } } } },
      decoder = { type = "WordPiece", prefix = "##", cleanup = true },
      model = { type = "WordPiece", unk_token = "[UNK]", continuing_subword_prefix = "##",
        max_input_chars_per_word = 100, vocab = vocab } })
    mutate(at .. "/tokenizer.json", DRAWN * 2, function() use(at) end)
  end)

  it(".tiktoken is read, or refused", function()
    local digits, lines = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", {}
    local function digit(i) return digits:sub(i + 1, i + 1) end
    for byte = 0, 255 do
      lines[byte + 1] = ("%s%s== %d\n"):format(digit(math.floor(byte / 4)), digit(byte % 4 * 16), byte)
    end
    lines[257], lines[258] = "dGg= 256\n", "dGhl 257\n"
    check.write(path "gpt2.tiktoken", table.concat(lines))
    local options = { encoding = "gpt2", special_tokens = { ["<|endoftext|>"] = 300 } }
    mutate(path "gpt2.tiktoken", DRAWN, function() use(path "gpt2.tiktoken", options) end)
  end)

  it(".tiktoken of long tokens is read in linear time", function()
    local letters, lines = { "YWFh", "YmFh", "Y2Fh" }, {}
    for i, letter in ipairs(letters) do lines[i] = letter .. ("YWFh"):rep(20000) .. " " .. (i - 1) .. "\n" end
    check.write(path "long.tiktoken", table.concat(lines))
    local began = os.clock()
    pcall(ps.tokenizer.from_pretrained, path "long.tiktoken", { encoding = "gpt2" })
    assert.truthy(os.clock() - began < 1, os.clock() - began)
  end)
end)
