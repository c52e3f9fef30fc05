-- SPDX-License-Identifier: BSD-3-Clause
-- Reads tokenizers' files in the forms that Hugging Face uses. Each form is converted to a description, which has the
-- form of tokenizer.json. tokenizer/description.lua makes the engine's tokenizer from the description. C code reads the
-- vocabulary and the merges.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local classes = require "ps.tokenizer.classes"
local description = require "ps.tokenizer.description"
local object = require "ps.tokenizer.object"
local pattern = require "ps.tokenizer.pattern"
local array = require "ps.core.array"
local ffi = require "ffi"
local models = require "ps.pretrained.folder"
local gguf = require "ps.io.gguf"
local gguf_tokenizer = require "ps.pretrained.gguf_tokenizer"
local json = require "cjson"
local lfs = require "lfs"
local error = caller.error
local C, check = native.C, native.check
local floats = array "float"
local is_null, listed, refuse = object.is_null, object.listed, object.refuse

local read = {}

local NO_LIMIT = 1e18              -- transformers writes a model_max_length above 1e18 if there is no limit

-- -- folders ----------------------------------------------------------------------------------------------------------
local NAMES = { "bos", "eos", "unk", "sep", "pad", "cls", "mask" }

-- Returns the text of a token. In a file, a token is either its text, such as "[SEP]", or a table, such as
-- { content = "[SEP]", ... }. For a table, also returns the table. Returns nil for null.
local function content_of(value)
  if is_null(value) then return nil end
  if type(value) == "table" then return value.content, value end
  return value
end

-- Returns the path of the first of the given files that exists in a folder, or nil if none exists.
local function first_file(folder, ...)
  for _, name in ipairs { ... } do
    if lfs.attributes(folder .. "/" .. name, "mode") == "file" then return folder .. "/" .. name end
  end
end

-- Returns the settings of a folder, and the list of its added tokens, sorted by id. The settings are the fields of
-- tokenizer_config.json. A special token that this file does not set is read from special_tokens_map.json. If
-- tokenizer_config.json has no added tokens, they are read from added_tokens.json.
local function settings_of(folder)
  local config = object.of_file(folder .. "/tokenizer_config.json") or {}
  local map = object.of_file(folder .. "/special_tokens_map.json") or {}
  for _, name in ipairs(NAMES) do
    local key = name .. "_token"
    if is_null(config[key]) then config[key] = map[key] end
    local content = content_of(config[key])
    if content ~= nil and type(content) ~= "string" then
      refuse(folder .. "/tokenizer_config.json", key, config[key], "it must be a token")
    end
  end
  local added = {}
  local path, field = folder .. "/tokenizer_config.json", "added_tokens_decoder"
  for id, one in pairs(listed(path, field, config[field], true)) do
    listed(path, ("%s['%s']"):format(field, tostring(id)), one)
    added[#added + 1] = { id = tonumber(id), content = one.content, node = one }
  end
  if not added[1] then
    for content, id in pairs(object.of_file(folder .. "/added_tokens.json") or {}) do
      added[#added + 1] = { id = id, content = content, node = { normalized = true } }
    end
  end
  for _, one in ipairs(added) do
    if type(one.id) ~= "number" then refuse(folder, "added tokens", one.content, "a token has a content and an id") end
  end
  table.sort(added, function(a, b) return a.id < b.id end)
  return config, added
end

-- Returns the name of the tokenizer's class, and whether the files name the class.
local function class_of(folder, config, has_words)
  local name = config.tokenizer_class
  if not is_null(name) and type(name) ~= "string" then
    refuse(folder .. "/tokenizer_config.json", "tokenizer_class", name, "it must be a name")
  end
  if is_null(name) then
    local model = object.of_file(folder .. "/config.json") or {}
    name = classes.of(model.model_type)
  end
  if not name then return has_words and "BertTokenizer" or "GPT2Tokenizer", false end
  return (name:gsub("Fast$", "")), true
end

-- Returns a description for a folder that has no tokenizer.json.
local function describe(t, class, defaults, config)
  if defaults.model == "wordpiece" then
    local strip = config.strip_accents
    if is_null(strip) then strip = json.null end
    local function or_true(value) return is_null(value) or value == true end
    return { model = { type = "WordPiece", unk_token = content_of(config.unk_token) or defaults.unk },
      normalizer = { type = "BertNormalizer", clean_text = true, strip_accents = strip,
        handle_chinese_chars = or_true(config.tokenize_chinese_chars), lowercase = or_true(config.do_lower_case) },
      pre_tokenizer = { type = "BertPreTokenizer" },
      post_processor = { type = "BertProcessing",
        cls = { "", description.id_of(t, content_of(config.cls_token) or defaults.cls, "cls_token") },
        sep = { "", description.id_of(t, content_of(config.sep_token) or defaults.sep, "sep_token") } } }
  end
  local space = config.add_prefix_space == true
  local all = { model = { type = "BPE" }, pre_tokenizer = { type = "ByteLevel", add_prefix_space = space },
    post_processor = { type = "ByteLevel", trim_offsets = false } }
  if class == "RobertaTokenizer" then
    all.post_processor = { type = "RobertaProcessing", trim_offsets = true, add_prefix_space = space,
      cls = { "", description.id_of(t, content_of(config.cls_token) or defaults.cls, "cls_token") },
      sep = { "", description.id_of(t, content_of(config.sep_token) or defaults.sep, "sep_token") } }
  else
    for _, name in ipairs { "bos", "eos" } do
      if config["add_" .. name .. "_token"] == true then
        all[name] = description.id_of(t, content_of(config[name .. "_token"]) or defaults[name], name .. "_token")
      end
    end
  end
  return all
end

-- Sets the special tokens that have names, such as eos_token. A token that is not in the settings is read from the
-- class's defaults, but a default that is not in the vocabulary is omitted.
local function name_tokens(t, config, defaults)
  t.special = {}
  for _, name in ipairs(NAMES) do
    local content, node = content_of(config[name .. "_token"])
    local given = content ~= nil
    content = content or defaults[name]
    local id = content and C.ps_tok_find(t.handle, content, #content) or -1
    if given and id < 0 then error(("%s: %s_token is '%s', which is not in the vocabulary"):format(
      t.path, name, content),
      2) end
    if id >= 0 then t.special[name] = { content, id, node } end
  end
end

-- Adds the special tokens that have names, so that the tokenizer searches for them in texts. Skips tokens that were
-- already added as special. If `given` (the settings) is not nil, adds only tokens that the settings contain, and not
-- the class's defaults.
local function add_named(t, class, given)
  for name, one in pairs(t.special) do
    local known = t.added[one[2]]
    if not (given and is_null(given[name .. "_token"])) and not (known and known.special) then
      local node = known or one[3] or {}
      t.added[one[2]] = node
      description.add_token(t, one[1], one[2], { special = true, rstrip = node.rstrip == true,
        normalized = node.normalized == true,
        lstrip = node.lstrip == true or (not known and class == "RobertaTokenizer" and name == "mask") })
    end
  end
end

-- Adds the tokens in the settings. The tokens in added_tokens_decoder (the list `added`) come first. Then the tokens in
-- the lists additional_special_tokens and extra_special_tokens are added, unless they are already special. If a token
-- in a list is not in the vocabulary, its id is the next free id.
local function add_more(t, path, config, added)
  for _, one in ipairs(added) do
    if type(one.content) ~= "string" then refuse(path, "added_tokens_decoder", one.node, "a token has a content") end
    local node, known = one.node, t.added[one.id]
    description.add_token(t, one.content, one.id, { special = node.special == true or known and known.special == true,
      lstrip = node.lstrip == true, rstrip = node.rstrip == true, normalized = node.normalized == true,
      single_word = node.single_word })
    if not (known and known.special) then t.added[one.id] = node end
  end
  for _, key in ipairs { "additional_special_tokens", "extra_special_tokens" } do
    local more = listed(path, key, config[key], true)
    local list, names = {}, {}
    for name in pairs(more) do if type(name) == "string" then names[#names + 1] = name end end
    table.sort(names)
    for i, one in ipairs(more) do list[i] = one end
    for _, name in ipairs(names) do list[#list + 1] = more[name] end
    for _, one in ipairs(list) do
      local content, node = content_of(one)
      if type(content) ~= "string" then refuse(path, key, more, "it must be a list of tokens") end
      local id = C.ps_tok_find(t.handle, content, #content)
      if id < 0 then id = tonumber(C.ps_tok_count(t.handle)) end
      local known = t.added[id]
      if not (known and known.special) then
        node = known or node or {}
        t.added[id] = node
        description.add_token(t, content, id, { special = true, lstrip = node.lstrip == true,
          rstrip = node.rstrip == true, normalized = node.normalized == true })
      end
    end
  end
end

local function finish(t, config, defaults, limits)
  check(C.ps_tok_ready(t.handle))
  local limit = config.model_max_length
  if type(limit) ~= "number" or limit >= NO_LIMIT then limit = limits.max_length end
  t.model_max_length = type(limit) == "number" and limit or nil
  for _, name in ipairs { "padding_side", "truncation_side" } do
    local side = config[name]
    if is_null(side) then side = limits[name] or defaults[name] or "right" end
    if side ~= "left" and side ~= "right" then refuse(t.path, name, side, "it must be \"left\" or \"right\"") end
    t[name] = side
  end
  t.splits_special = config.split_special_tokens == true
  t.cleans_up = t.model == "wordpiece" and config.clean_up_tokenization_spaces == true
  local inputs = config.model_input_names
  t.type_ids = t.model == "wordpiece"
  if type(inputs) == "table" then
    t.type_ids = false
    for _, name in ipairs(inputs) do t.type_ids = t.type_ids or name == "token_type_ids" end
  end
  return t
end

-- Reads a tokenizer.json. `class` is the name of the class if the files name it, or nil.
local function from_json(t, path, config, defaults, class, added)
  local rest, n = ffi.new("const char *[1]"), ffi.new("int64_t[1]")
  -- A tokenizer of the engine reads the file, and is created for one kind of model. But the file says which kind it
  -- needs. Therefore the file is first read as BPE, and read again if it contains WordPiece.
  t.path = path
  local function load(model)
    t.handle, t.model = description.new_handle(model), model
    check(C.ps_tok_read(t.handle, "tokenizer.json", path))
    check(C.ps_tok_rest(t.handle, rest, n))
    return object.decode(ffi.string(rest[0], n[0]), path)
  end
  local all = load("bpe")
  local model = type(all.model) == "table" and all.model or {}
  local kind = model.type
  if kind == nil and model.merges ~= nil then kind, model.type = "BPE", "BPE" end
  if not description.has_model(kind) then refuse(path, "model.type", kind, "only BPE and WordPiece are supported") end
  if kind == "WordPiece" then all = load("wordpiece") end
  if class then classes.apply(all, class, config) end
  local options = description.apply(t, all)
  if is_null(config.pad_token) then config.pad_token = options.pad_token end
  t.added = {}
  for _, one in ipairs(listed(path, "added_tokens", all.added_tokens, true)) do t.added[one.id] = one end
  add_more(t, (path:match("^(.*)/[^/]*$") or ".") .. "/tokenizer_config.json", config, added)
  name_tokens(t, config, defaults)
  add_named(t, class, not class and config or nil)
  return finish(t, config, defaults, options)
end

local function from_vocab(t, class, defaults, config, added, vocab, merges)
  t.path, t.model, t.handle = vocab, defaults.model, description.new_handle(defaults.model)
  check(C.ps_tok_read(t.handle, merges and "vocab.json" or "vocab.txt", vocab))
  if merges then check(C.ps_tok_read(t.handle, "merges.txt", merges)) end
  t.added = {}
  for _, one in ipairs(added) do
    t.added[one.id or -1] = one.node
    description.add_token(t, one.content, one.id, one.node)
  end
  name_tokens(t, config, defaults)
  add_named(t, class)
  local all = describe(t, class, defaults, config)
  local options = description.apply(t, all)
  if all.bos or all.eos then
    local function add(text, list)
      local kind = text - 1
      if all.bos then list[#list + 1] = { id = all.bos, kind = kind } end
      list[#list + 1] = { text = text, kind = kind }
      if all.eos then list[#list + 1] = { id = all.eos, kind = kind } end
      return list
    end
    t.single, t.pair = add(1, {}), add(2, add(1, {}))
  end
  return finish(t, config, defaults, options)
end

-- -- tiktoken ---------------------------------------------------------------------------------------------------------
-- Encodings that are defined in the code of tiktoken, Qwen and Llama 3. Each encoding has a pattern that splits texts
-- into words, and a table of special tokens.
local OF_GPT2 = { pattern = pattern.GPT2, special = { ["<|endoftext|>"] = 50256 } }
local ENCODINGS = {
  gpt2 = OF_GPT2, r50k_base = OF_GPT2, p50k_base = OF_GPT2,
  cl100k_base = { pattern = pattern.CL100K, special = { ["<|endoftext|>"] = 100257, ["<|fim_prefix|>"] = 100258,
    ["<|fim_middle|>"] = 100259, ["<|fim_suffix|>"] = 100260, ["<|endofprompt|>"] = 100276 } },
  o200k_base = { pattern = pattern.O200K, special = { ["<|endoftext|>"] = 199999, ["<|endofprompt|>"] = 200018 } },
  qwen = { pattern = pattern.QWEN, special = { ["<|endoftext|>"] = 151643, ["<|im_start|>"] = 151644,
    ["<|im_end|>"] = 151645 } },
  llama3 = { pattern = pattern.LLAMA3, special = { ["<|begin_of_text|>"] = 128000, ["<|end_of_text|>"] = 128001,
    ["<|start_header_id|>"] = 128006, ["<|end_header_id|>"] = 128007, ["<|eot_id|>"] = 128009 } },
}

-- Reads a .tiktoken file. The encoding is given.encoding, or the encoding that the file is named after. If
-- given.pattern is set, no encoding is needed.
local function from_tiktoken(t, path, given)
  local stem = path:match("([^/]*)%.tiktoken$")
  local encoding = ENCODINGS[given.encoding or stem]
  if given.encoding and not encoding then caller.one_of(given.encoding, ENCODINGS, path .. ": encoding") end
  if not encoding and not given.pattern then
    refuse(path, "encoding", given.encoding or stem or json.null, "unknown encoding; set encoding "
      .. "(cl100k_base, gpt2, llama3, o200k_base, qwen), or pattern and special_tokens")
  end
  t.path, t.model, t.handle, t.special, t.byte_level = path, "bpe", description.new_handle "bpe", {}, true
  check(C.ps_tok_read(t.handle, "tiktoken", path))
  for _, setting in ipairs { "byte_level", "whole_words" } do check(C.ps_tok_set(t.handle, setting, 1)) end
  description.split(t, "pattern", given.pattern or encoding.pattern, given.pattern and "rust")
  for content, id in pairs(given.special_tokens or encoding and encoding.special or {}) do
    description.add_token(t, content, id, { special = true })
  end
  local ending = C.ps_tok_find(t.handle, "<|endoftext|>", 13)
  if ending >= 0 then t.special.eos = { "<|endoftext|>", ending } end
  return finish(t, {}, {}, {})
end

-- -- GGUF -------------------------------------------------------------------------------------------------------------
-- Fills the vocabulary of a tokenizer, and its merges or scores, from the metadata of a GGUF file.
local function fill(t, given)
  for i, token in ipairs(given.tokens) do check(C.ps_tok_token(t.handle, token, #token, i - 1)) end
  for i, merge in ipairs(given.merges or {}) do
    local at = merge:find(" ", 2, true)
    if not at then refuse(t.path, ("tokenizer.ggml.merges[%d]"):format(i - 1), merge, "it must have two tokens") end
    local left, right = merge:sub(1, at - 1), merge:sub(at + 1)
    check(C.ps_tok_merge(t.handle, left, #left, right, #right))
  end
  if given.scores then check(C.ps_tok_scores(t.handle, floats(#given.scores, given.scores), #given.scores)) end
end

local function from_gguf(t, path)
  local given = gguf.with(path, gguf_tokenizer.of)
  t.path, t.model = path, given.kind == "bert" and "wordpiece" or "bpe"
  t.handle, t.added, t.template = description.new_handle(t.model), {}, given.template
  local filled, problem = pcall(fill, t, given)
  if not filled then error(("%s: %s"):format(path, tostring(problem)), 0) end
  local options = description.apply(t, given.description)
  for _, one in ipairs(given.description.added_tokens) do t.added[one.id] = one end
  name_tokens(t, given.config, {})
  return finish(t, {}, { padding_side = given.kind == "llama" and "left" or nil }, options)
end

local RANKS = { encoding = "string", pattern = "string", special_tokens = "table" }

--- Reads a tokenizer from a folder or from one of a folder's files. Returns {handle, model, path, special, single,
--- pair, type_ids, padding_side, truncation_side, model_max_length}.
---@param path string
---@param options? {encoding?: string, pattern?: string, special_tokens?: table<string, integer>} only for a .tiktoken
--- file
---@return table
function read.open(path, options)
  options = caller.options(options, "tokenizer.from_pretrained", RANKS)
  local mode, t = lfs.attributes(path, "mode"), {}
  if not mode then error(("no tokenizer: there is no folder or file %s"):format(path)) end
  if mode ~= "directory" and gguf.is_path(path) and not next(options) then return from_gguf(t, path) end
  if mode ~= "directory" and (next(options) or path:match("%.tiktoken$")) then
    return from_tiktoken(t, path, options)
  end
  if next(options) then
    refuse(path, next(options), select(2, next(options)), "options are only for a file of ranks, .tiktoken")
  end
  local folder = mode == "directory" and path or path:match("^(.*)/[^/]*$") or "."
  local config, added = settings_of(folder)
  local name = mode ~= "directory" and path:match("[^/]*$") or nil
  local whole = first_file(folder, "tokenizer.json")
  local vocab, merges = first_file(folder, "vocab.json", "encoder.json"), first_file(folder, "merges.txt", "vocab.bpe")
  local words = first_file(folder, "vocab.txt")
  if name and name:match("%.txt$") and name ~= "merges.txt" then words, vocab, whole = path, nil, nil
  elseif name == "vocab.json" or name == "encoder.json" then vocab, whole, words = path, nil, nil
  elseif name == "merges.txt" or name == "vocab.bpe" then merges, whole, words = path, nil, nil
  elseif name then whole = path end
  local class, is_named = class_of(folder, config, words and not (vocab and merges))
  local defaults = classes.defaults(class)
  if whole then return from_json(t, whole, config, defaults, is_named and class or nil, added) end
  if not defaults.model then
    if not is_null(config.tokenizer_class) then
      refuse(folder .. "/tokenizer_config.json", "tokenizer_class", class,
        "without tokenizer.json this is not supported")
    end
    error(("no tokenizer: %s has no tokenizer.json, and the other files of such a model do not say how texts are "
      .. "split; save the tokenizer with transformers' AutoTokenizer, which writes tokenizer.json"):format(folder))
  end
  if defaults.model == "bpe" and vocab and merges then
    return from_vocab(t, class, defaults, config, added, vocab, merges)
  end
  if defaults.model == "wordpiece" and words then return from_vocab(t, class, defaults, config, added, words) end
  models.refuse_checkpoints(folder)
  error(("no tokenizer: %s has neither tokenizer.json, nor vocab.json (or encoder.json) with merges.txt (or " ..
    "vocab.bpe), nor vocab.txt"):format(folder))
end

return read
