-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the tokenizer in a GGUF file's metadata. Returns the contents of a tokenizer.json without the vocabulary, and
-- the settings of a tokenizer_config.json. ps/tokenizer/read.lua makes the engine's tokenizer from both results.
-- gguf_companions.lua writes both results to a folder.
local caller = require "ps.core.caller"
local settings = require "ps.pretrained.settings"
local error = caller.error

local tokenizer = {}

local NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
local BLANK = "\226\150\129"

-- Regular expressions of pre-tokenizers. Inside a character class, \s and \p have the meaning of Oniguruma and PCRE2.
local CONTRACTIONS = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)]]
local REST = [[| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+]]
local GPT2 = [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]]
local LLAMA3 = CONTRACTIONS .. [[|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}]] .. REST
local QWEN2 = CONTRACTIONS .. [[|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}]] .. REST
local QWEN35 = CONTRACTIONS .. [[|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*]]
  .. [[|\s*[\r\n]+|\s+(?!\S)|\s+]]
local O200K = [[[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+]]
local O200K_MORE = [[|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*]]
local GPT4O = O200K .. CONTRACTIONS .. "?" .. O200K_MORE .. CONTRACTIONS
  .. [[?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]]
local TEKKEN = O200K .. O200K_MORE .. [[|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]]
local FALCON = [[[\p{P}\$\+<=>\^~\|`]+]]
local DEEPSEEK_HAN = "[\228\184\128-\233\190\165\227\129\128-\227\130\159\227\130\160-\227\131\191]+"

local CODER_HAN = "[\228\184\128-\233\190\165\224\160\128-\228\184\128\234\176\128-\237\159\191]+"

-- Maps a name in tokenizer.ggml.pre to a pre-tokenizer. The list items are the expressions that split a text. They are
-- applied in order. A pre-tokenizer can also have these fields:
--   whole   if a word is a token, the word is not split into pieces that are then merged
--   bos     texts begin with the bos token unless the file sets add_bos_token
local PRE = { ["llama-bpe"] = { LLAMA3, whole = true, bos = true }, ["gpt-2"] = { GPT2 }, mpt = { GPT2 },
  olmo = { GPT2 }, jais = { GPT2 }, trillion = { GPT2 }, ["granite-docling"] = { GPT2 }, qwen2 = { QWEN2 },
  stablelm2 = { QWEN2 }, hunyuan = { QWEN2 }, ["solar-open"] = { QWEN2 }, megrez = { QWEN2 }, ["grok-2"] = { QWEN2 },
  qwen35 = { QWEN35 }, dbrx = { LLAMA3 }, ["smaug-bpe"] = { LLAMA3 }, ["chatglm-bpe"] = { LLAMA3 },
  glm4 = { LLAMA3, whole = true }, smollm = { [[\p{N}]], GPT2 }, starcoder = { [[\p{N}]], GPT2 },
  refact = { [[\p{N}]], GPT2 }, ["command-r"] = { [[\p{N}]], GPT2 }, codeshell = { [[\p{N}]], GPT2 },
  exaone = { [[\p{N}]], GPT2 }, ["minerva-7b"] = { [[\p{N}]], GPT2 }, mellum2 = { [[\p{N}]], GPT2 },
  falcon = { FALCON, GPT2, [=[[0-9][0-9][0-9]]=] }, ["gpt-4o"] = { GPT4O }, ["minimax-m2"] = { GPT4O },
  tekken = { TEKKEN, whole = true, bos = true },
  ["deepseek-coder"] = { [=[[\r\n]]=], [[\s?\p{L}+]], [[\s?\p{P}+]], CODER_HAN, [[\p{N}]] },
  ["deepseek-v3"] = { [[\p{N}{1,3}]], DEEPSEEK_HAN, [=[[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|]=]
    .. [=[[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+]=] } }
for other, same in pairs { llama3 = "llama-bpe", ["llama-v3"] = "llama-bpe", falcon3 = "llama-bpe",
  pixtral = "llama-bpe", lfm2 = "llama-bpe", ["phi-2"] = "gpt-2", ["a.x-4.0"] = "gpt-2", mellum = "gpt-2",
  exaone4 = "gpt-2", ["deepseek-r1-qwen"] = "qwen2", kormo = "qwen2", f2llmv2 = "qwen2", llama4 = "gpt-4o",
  kanana2 = "gpt-4o", glm5 = "glm4", ["hunyuan-dense"] = "deepseek-v3" } do PRE[other] = PRE[same] end

-- Returns a post-processor that adds tokens before and after a text, or nil if there are no tokens to add.
local function around(t, first, last)
  local special, single, pair = {}, {}, {}
  local function token(id, kind)
    local content = t.tokens[id + 1]
    special[content] = { id = content, ids = { id }, tokens = { content } }
    return { SpecialToken = { id = content, type_id = kind } }
  end
  local function add(list, name, kind)
    if first and (name == "A" or t.kind ~= "bert") then list[#list + 1] = token(first, kind) end
    list[#list + 1] = { Sequence = { id = name, type_id = kind } }
    if last then list[#list + 1] = token(last, kind) end
  end
  if not first and not last then return nil end
  add(single, "A", 0)
  add(pair, "A", 0)
  add(pair, "B", 1)
  return { type = "TemplateProcessing", single = single, pair = pair, special_tokens = special }
end

local function of_bytes(t, file)
  local name = file:get("tokenizer.ggml.pre", "string") or "default"
  local pre = PRE[name]
  if not pre then
    settings.refuse(file.path, "tokenizer.ggml.pre", name, settings.supported(PRE))
  end
  local steps = {}
  for i, regex in ipairs(pre) do
    steps[i] = { type = "Split", pattern = { Regex = regex }, behavior = "Isolated", invert = false }
  end
  steps[#steps + 1] = { type = "ByteLevel", add_prefix_space = false, trim_offsets = false, use_regex = false }
  t.merges = file:get("tokenizer.ggml.merges", "strings", true)
  t.adds_bos = pre.bos or false
  t.description = { model = { type = "BPE", ignore_merges = pre.whole or false },
    pre_tokenizer = { type = "Sequence", pretokenizers = steps },
    decoder = { type = "ByteLevel", add_prefix_space = false, trim_offsets = false, use_regex = false } }
  return t
end

-- Describes a SentencePiece BPE tokenizer. Blanks become U+2581, and characters without a token become byte tokens.
local function of_pieces(t, file)
  t.scores = file:get("tokenizer.ggml.scores", "numbers", true)
  if #t.scores ~= #t.tokens then
    error(("%s: tokenizer.ggml.scores has %d numbers for %d tokens"):format(file.path, #t.scores, #t.tokens))
  end
  t.adds_bos = true
  local prefix = file:get("tokenizer.ggml.add_space_prefix", "boolean")
  if prefix == nil then prefix = true end
  local replace = { type = "Replace", pattern = { String = " " }, content = BLANK }
  local steps = { { type = "Replace", pattern = { String = BLANK }, content = " " }, { type = "ByteFallback" },
    { type = "Fuse" } }
  if prefix then steps[4] = { type = "Strip", content = " ", start = 1, stop = 0 } end
  local unknown = file:get("tokenizer.ggml.unknown_token_id", "whole") or 0
  t.description = { model = { type = "BPE", byte_fallback = true, fuse_unk = true, unk_token = t.tokens[unknown + 1] },
    normalizer = prefix and { type = "Sequence", normalizers = { { type = "Prepend", prepend = BLANK }, replace } }
      or replace, decoder = { type = "Sequence", decoders = steps } }
  return t
end

-- Describes a WordPiece tokenizer. llama.cpp writes the prefix U+2581 before the first piece of a word, and no "##"
-- before the word's other pieces.
local function of_words(t, file)
  for i, token in ipairs(t.tokens) do
    if t.types[i] ~= CONTROL and t.types[i] ~= UNKNOWN then
      t.tokens[i] = token:sub(1, #BLANK) == BLANK and token:sub(#BLANK + 1) or "##" .. token
    end
  end
  t.adds_bos, t.adds_sep = true, true
  local unknown = file:get("tokenizer.ggml.unknown_token_id", "whole") or 100
  local lower = file:get("tokenizer.ggml.normalizer.lowercase", "boolean")
  if lower == nil then  -- in older files, text is lower-cased unless the vocabulary has capitals
    lower = true
    for i, token in ipairs(t.tokens) do
      if t.types[i] == NORMAL and token:match "^%u%l+$" then lower = false end
    end
  end
  t.description = { model = { type = "WordPiece", unk_token = t.tokens[unknown + 1],
    continuing_subword_prefix = "##", max_input_chars_per_word = 100 },
    normalizer = { type = "BertNormalizer", clean_text = true, handle_chinese_chars = true, strip_accents = lower,
      lowercase = lower },
    pre_tokenizer = { type = "BertPreTokenizer" }, decoder = { type = "WordPiece", prefix = "##", cleanup = true } }
  return t
end

local KINDS = { gpt2 = of_bytes, llama = of_pieces, bert = of_words }
-- Special tokens: maps KEY in tokenizer.ggml.KEY_token_id to the name in tokenizer_config.json.
local SPECIAL = { bos = "bos", eos = "eos", unknown = "unk", seperator = "sep", padding = "pad", cls = "cls",
  mask = "mask" }

local function add_special(t, file)
  t.config, t.ids = {}, {}
  for key, name in pairs(SPECIAL) do
    local id = file:get(("tokenizer.ggml.%s_token_id"):format(key), "whole")
    if id and id >= #t.tokens then
      error(("%s: tokenizer.ggml.%s_token_id is %d, but there are %d tokens"):format(file.path, key, id, #t.tokens))
    end
    if id then t.ids[name], t.config[name .. "_token"] = id, t.tokens[id + 1] end
  end
  if t.kind == "bert" then
    for name, given in pairs { cls = t.ids.bos, sep = t.ids.eos } do
      if not t.ids[name] and given then t.ids[name], t.config[name .. "_token"] = given, t.tokens[given + 1] end
    end
  end
  local function says(key, default)
    local given = file:get("tokenizer.ggml.add_" .. key, "boolean")
    if given == nil then return default end
    return given
  end
  local first = says("bos_token", t.adds_bos) and (t.kind == "bert" and t.ids.cls or t.ids.bos) or nil
  local last = says("eos_token", false) and t.ids.eos or says("sep_token", t.adds_sep or false) and t.ids.sep or nil
  t.description.post_processor = around(t, first, last)
  t.description.added_tokens = {}
  for i, kind in ipairs(t.types) do
    if kind == CONTROL or kind == UNKNOWN or kind == USER then
      table.insert(t.description.added_tokens, { id = i - 1, content = t.tokens[i], special = kind ~= USER,
        single_word = false, lstrip = false, rstrip = false, normalized = false })
    end
  end
end

---@class ps.gguf.Tokenizer
---@field kind "gpt2"|"llama"|"bert" the value of tokenizer.ggml.model
---@field description table the contents of tokenizer.json without the vocabulary
---@field tokens string[] the tokens as tokenizer.json spells them; the index is the id plus 1
---@field types integer[]
---@field merges? string[] the merges, each as "left right"
---@field scores? number[] the tokens' scores
---@field config table<string, any> the contents of tokenizer_config.json
---@field ids table<string, integer> the ids of special tokens
---@field template? string|table the chat template, or a list of named templates

local NONE = { none = true, no_vocab = true }              -- llama.cpp's values if a model has only token ids

--- Returns the kind of an open file's tokenizer, or nil if the file has none.
---@param file ps.Gguf
---@return string?
function tokenizer.kind(file)
  local kind = file:get("tokenizer.ggml.model", "string")
  return not NONE[kind] and kind or nil
end

--- Returns the tokenizer of an open file. Raises an error if the tokenizer's kind or its pre-tokenization rule is not
--- supported. The error names the kind or the rule.
---@param file ps.Gguf
---@return ps.gguf.Tokenizer
function tokenizer.of(file)
  local kind = file:get("tokenizer.ggml.model", "string", true)
  if NONE[kind] then
    settings.refuse(file.path, "tokenizer.ggml.model", kind, "the file has no tokenizer; load one from the folder of "
      .. "the original model")
  elseif not KINDS[kind] then
    settings.refuse(file.path, "tokenizer.ggml.model", kind, settings.supported(KINDS))
  end
  local t = { kind = kind, tokens = file:get("tokenizer.ggml.tokens", "strings", true),
    types = file:get("tokenizer.ggml.token_type", "numbers") or {} }
  for i = #t.types + 1, #t.tokens do t.types[i] = NORMAL end
  KINDS[kind](t, file)
  add_special(t, file)
  t.template = tokenizer.template(file)
  return t
end

--- Returns an open file's chat template as text. If the file has several named templates, returns a list of all
--- templates. Returns nil if the file has no template.
---@param file ps.Gguf
---@return string|{name: string, template: string}[]|nil
function tokenizer.template(file)
  local one = file:get("tokenizer.chat_template", "string")
  local named = file:get("tokenizer.chat_templates", "strings")
  if not named then return one end
  local list = { one and { name = "default", template = one } or nil }
  for _, name in ipairs(named) do
    list[#list + 1] = { name = name, template = file:get("tokenizer.chat_template." .. name, "string", true) }
  end
  return list
end

tokenizer.TYPES = { normal = NORMAL, unknown = UNKNOWN, control = CONTROL, user = USER, unused = UNUSED, byte = BYTE }
tokenizer.PRE = PRE

return tokenizer
