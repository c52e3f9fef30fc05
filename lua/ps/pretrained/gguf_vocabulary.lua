-- SPDX-License-Identifier: BSD-3-Clause
-- Returns the metadata entries that describe a tokenizer in a GGUF file. If the tokenizer is in a Hugging Face folder
-- (tokenizer_config.json, and tokenizer.json or older files), the keys and values are the same as llama.cpp's converter
-- writes. If the tokenizer is in a GGUF file, its entries are copied.
local caller = require "ps.core.caller"
local io_gguf = require "ps.io.gguf"
local json = require "cjson"
local read_file = require "ps.core.read_file"
local without_bom = require "ps.core.bom"
local gguf_tokenizer = require "ps.pretrained.gguf_tokenizer"
local settings = require "ps.pretrained.settings"
local error = caller.error

local vocabulary = {}

local TYPES = gguf_tokenizer.TYPES
local BLANK = "\226\150\129"
-- The expression that splits texts for ByteLevel in tokenizer.json.
local GPT2 = gguf_tokenizer.PRE["gpt-2"][1]
-- If several rules have the same expressions, the name that is first in this list is written to the file.
local PREFERRED = { "llama-bpe", "gpt-2", "qwen2", "smollm", "gpt-4o", "falcon", "deepseek-v3", "tekken", "qwen35" }

local function read(path)
  local text, why, absent = read_file(path)
  if not text and not absent then error("cannot read a tokenizer's file: " .. why) end
  return text and without_bom(text)
end

local function object(path)
  local text = read(path)
  if not text then return nil end
  local ok, value = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then error(("%s: it does not contain a JSON object"):format(path)) end
  return value
end

local function given(value) if value ~= json.null then return value end end
local function content(value)
  value = given(value)
  if type(value) == "table" then return given(value.content) end
  return value
end

-- Appends the expressions that split texts to `list`, in order, and returns the list. Returns nil if llama.cpp does not
-- support a step of the pre-tokenizer.
local function expressions(node, list)
  list = list or {}
  if type(node) ~= "table" then return list end
  if node.type == "Sequence" then
    for _, one in ipairs(node.pretokenizers or {}) do list = list and expressions(one, list) end
    return list
  elseif node.type == "ByteLevel" then
    if node.use_regex ~= false then list[#list + 1] = GPT2 end
    return list
  elseif node.type == "Digits" then
    list[#list + 1] = node.individual_digits and [[\p{N}]] or [[\p{N}+]]
    return list
  elseif node.type == "Split" and type(node.pattern) == "table" and type(node.pattern.Regex) == "string" then
    list[#list + 1] = node.pattern.Regex
    return list
  end
end

-- Returns the name of llama.cpp's pre-tokenization rule that splits texts as a tokenizer.json does.
local function rule_of(path, all)
  local list = expressions(all.pre_tokenizer)
  local whole = type(all.model) == "table" and all.model.ignore_merges == true
  local merges, names = type(all.model) == "table" and all.model.merges, {}
  -- Without merges, all rules give the same tokens, which are single bytes.
  if list and not whole and type(merges) == "table" and #merges == 0 then return "gpt-2" end
  for name in pairs(gguf_tokenizer.PRE) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(PREFERRED) do table.insert(names, i, name) end
  for _, name in ipairs(list and names or {}) do
    local pre = gguf_tokenizer.PRE[name]
    local same = #pre == #list and (pre.whole or false) == whole
    for i, one in ipairs(pre) do same = same and one == list[i] end
    if same then return name end
  end
  return settings.refuse(path, "pre_tokenizer", json.encode(all.pre_tokenizer), "llama.cpp has no rule that splits "
    .. "texts in this way; pass the name of a matching rule as the option pre, if there is one")
end

-- Returns two tables that are indexed by token id: the tokens of a tokenizer.json, and the types of these tokens.
local function tokens_of(all, size)
  local tokens, types = {}, {}
  for token, id in pairs(all.model.vocab) do tokens[id + 1], types[id + 1] = token, TYPES.normal end
  for _, one in ipairs(given(all.added_tokens) or {}) do
    tokens[one.id + 1] = one.content
    types[one.id + 1] = one.special and TYPES.control or TYPES.user
  end
  local most = 0
  for id in pairs(tokens) do most = math.max(most, id) end
  size = size or most
  if most > size then error(("the tokenizer has %d tokens, but the model has %d"):format(most, size)) end
  for i = 1, size do
    if not tokens[i] then tokens[i], types[i] = ("[PAD%d]"):format(i - 1), TYPES.unused end
    if types[i] == TYPES.user then tokens[i] = tokens[i]:gsub(BLANK, " ") end
  end
  return tokens, types
end

local SPECIAL = { { "bos", "bos" }, { "eos", "eos" }, { "unk", "unknown" }, { "sep", "seperator" },
  { "pad", "padding" }, { "cls", "cls" }, { "mask", "mask" } }

-- Appends entries for special tokens. The entries contain the tokens' ids, and whether texts begin and end with special
-- tokens. Also appends the chat template.
local function add_special(entries, home, tokens, fields)
  local config, ids = object(home .. "/tokenizer_config.json") or {}, {}
  for i, token in ipairs(tokens) do ids[token] = ids[token] or i - 1 end
  for _, pair in ipairs(SPECIAL) do
    local token = content(config[pair[1] .. "_token"])
    local id = token and ids[token] or given(fields[pair[1] .. "_token_id"])
    if type(id) == "table" then id = id[1] end
    if type(id) == "number" and id >= 0 then
      entries[#entries + 1] = { ("tokenizer.ggml.%s_token_id"):format(pair[2]), "uint32", id }
    end
  end
  for _, name in ipairs { "bos", "eos" } do
    local adds = config[("add_%s_token"):format(name)]
    if type(adds) == "boolean" then
      entries[#entries + 1] = { ("tokenizer.ggml.add_%s_token"):format(name), "bool", adds }
    end
  end
  local template = read(home .. "/chat_template.jinja") or given(config.chat_template)
  if type(template) == "table" then
    for _, one in ipairs(template) do if one.name == "default" then template = one.template end end
  end
  if type(template) == "string" then entries[#entries + 1] = { "tokenizer.chat_template", "string", template } end
  return config
end

local function merges_of(all)
  local merges = {}
  for i, merge in ipairs(all.model.merges or {}) do
    if type(merge) == "table" then merge = merge[1] .. " " .. merge[2] end
    merges[i] = merge
  end
  return merges
end

local function of_bytes(path, home, all, fields, pre)
  local tokens, types = tokens_of(all, fields.vocab_size)
  local entries = { { "tokenizer.ggml.model", "string", "gpt2" },
    { "tokenizer.ggml.pre", "string", pre or rule_of(path, all) }, { "tokenizer.ggml.tokens", "string", tokens },
    { "tokenizer.ggml.token_type", "int32", types }, { "tokenizer.ggml.merges", "string", merges_of(all) } }
  add_special(entries, home, tokens, fields)
  return entries
end

-- Returns the entries for a BPE tokenizer over characters. SentencePiece merges the pair with the highest score first.
-- A token's score is therefore minus the index of the first merge that produces the token, which keeps the order of the
-- merges.
local function of_pieces(home, all, fields)
  local tokens, types = tokens_of(all, fields.vocab_size)
  local scores, ids = {}, {}
  for i, token in ipairs(tokens) do
    ids[token], scores[i] = i, types[i] == TYPES.normal and -1e6 or 0
    if token:match "^<0x%x%x>$" then types[i] = TYPES.byte end
  end
  for rank, merge in ipairs(merges_of(all)) do
    local at = merge:find(" ", 2, true)
    local id = ids[merge:sub(1, at - 1) .. merge:sub(at + 1)]
    if id and scores[id] == -1e6 then scores[id] = 1 - rank end
  end
  local unknown = content(all.model.unk_token)
  if unknown and ids[unknown] then types[ids[unknown]] = TYPES.unknown end
  local entries = { { "tokenizer.ggml.model", "string", "llama" }, { "tokenizer.ggml.pre", "string", "default" },
    { "tokenizer.ggml.tokens", "string", tokens }, { "tokenizer.ggml.scores", "float32", scores },
    { "tokenizer.ggml.token_type", "int32", types } }
  local config = add_special(entries, home, tokens, fields)
  local prefix = config.add_prefix_space
  if type(prefix) ~= "boolean" then prefix = json.encode(all):find('"Prepend"', 1, true) ~= nil end
  entries[#entries + 1] = { "tokenizer.ggml.add_space_prefix", "bool", prefix }
  return entries
end

local function of_words(home, all, fields)
  local tokens, types = tokens_of(all, fields.vocab_size)
  for i, token in ipairs(tokens) do
    if types[i] ~= TYPES.control then
      if token == content(all.model.unk_token) then types[i] = TYPES.unknown end
      tokens[i] = token:sub(1, 2) == "##" and token:sub(3) or BLANK .. token
    end
  end
  local entries = { { "tokenizer.ggml.token_type_count", "uint32", fields.type_vocab_size or 1 },
    { "tokenizer.ggml.model", "string", "bert" }, { "tokenizer.ggml.pre", "string", "default" },
    { "tokenizer.ggml.tokens", "string", tokens }, { "tokenizer.ggml.token_type", "int32", types } }
  add_special(entries, home, tokens, fields)
  local lower = type(all.normalizer) == "table" and all.normalizer.lowercase
  if type(lower) == "boolean" then
    entries[#entries + 1] = { "tokenizer.ggml.normalizer.lowercase", "bool", lower }
  end
  return entries
end

-- Returns the tokenizer entries of a GGUF file, copied key by key.
local function copied(path)
  return io_gguf.with(path, function(file)
    return gguf_tokenizer.kind(file) and io_gguf.entries(file, "^tokenizer%.") or {}
  end)
end

-- Returns the description of a tokenizer for a folder without tokenizer.json. The description is made from vocab.json
-- and merges.txt (GPT-2), or from vocab.txt (BERT).
local function of_older_files(home)
  local vocab = object(home .. "/vocab.json") or object(home .. "/encoder.json")
  local merges = read(home .. "/merges.txt") or read(home .. "/vocab.bpe")
  if vocab and merges then
    local list = {}
    for line in merges:gmatch "[^\r\n]+" do if not line:match "^#version" then list[#list + 1] = line end end
    return { model = { type = "BPE", vocab = vocab, merges = list }, pre_tokenizer = { type = "ByteLevel" },
      added_tokens = {} }
  end
  local words = read(home .. "/vocab.txt")
  if not words then return nil end
  local ids, n, added = {}, 0, {}
  for line in words:gmatch "([^\n]*)\n?" do
    line = line:gsub("\r$", "")
    if line ~= "" then
      ids[line] = n
      if line:match "^%[%u+%]$" then added[#added + 1] = { id = n, content = line, special = true } end
      n = n + 1
    end
  end
  local config = object(home .. "/tokenizer_config.json") or {}
  return { model = { type = "WordPiece", vocab = ids }, added_tokens = added,
    normalizer = { lowercase = config.do_lower_case ~= false } }
end

--- Returns the metadata entries for the tokenizer of a model's source.
---@param source string? a folder or a GGUF file, or nil if there is no source
---@param fields table the contents of the model's config.json
---@param pre? string the name of the pre-tokenization rule (default: the rule that corresponds to tokenizer.json)
---@return ps.gguf.Entry[] entries The list is empty if the source has no tokenizer.
function vocabulary.entries(source, fields, pre)
  if not source then return {} end
  if io_gguf.is_path(source) then return copied(source) end
  local path = source .. "/tokenizer.json"
  local all = object(path) or of_older_files(source)
  if not all then return {} end
  local kind = type(all.model) == "table" and all.model.type
  if kind == "WordPiece" then return of_words(source, all, fields) end
  if fields.model_type == "bert" then
    settings.refuse(path, "model.type", tostring(kind), "a GGUF file of a BERT needs WordPiece")
  end
  if kind ~= "BPE" then settings.refuse(path, "model.type", tostring(kind), "only BPE and WordPiece can be written") end
  if all.model.byte_fallback == true then return of_pieces(source, all, fields) end
  return of_bytes(path, source, all, fields, pre)
end

return vocabulary
