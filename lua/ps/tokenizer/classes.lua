-- SPDX-License-Identifier: BSD-3-Clause
-- Facts about transformers' tokenizer classes that a tokenizer's files do not contain: the default special tokens of
-- each class, and the settings in tokenizer_config.json that override settings in tokenizer.json.
local json = require "cjson"

local classes = {}

local BERT = { model = "wordpiece", unk = "[UNK]", sep = "[SEP]", pad = "[PAD]", cls = "[CLS]", mask = "[MASK]" }
local CLASSES = {
  GPT2Tokenizer = { model = "bpe", bos = "<|endoftext|>", eos = "<|endoftext|>", unk = "<|endoftext|>" },
  RobertaTokenizer = { model = "bpe", bos = "<s>", eos = "</s>", sep = "</s>", cls = "<s>", unk = "<unk>",
    pad = "<pad>", mask = "<mask>" },
  BertTokenizer = BERT, DistilBertTokenizer = BERT, ElectraTokenizer = BERT,
  LlamaTokenizer = { bos = "<s>", eos = "</s>", unk = "<unk>", padding_side = "left" },
  Qwen2Tokenizer = { eos = "<|endoftext|>", unk = "<|endoftext|>", pad = "<|endoftext|>" },
}
local CLASS_OF = { gpt2 = "GPT2Tokenizer", roberta = "RobertaTokenizer", bert = "BertTokenizer",
  distilbert = "BertTokenizer", electra = "BertTokenizer", qwen2 = "Qwen2Tokenizer", qwen3 = "Qwen2Tokenizer",
  llama = "PreTrainedTokenizer", mistral = "PreTrainedTokenizer" }

--- Returns the defaults of a class: special tokens by name, padding_side, and `model`. `model` is the kind of model
--- that is used if a folder has no tokenizer.json ("bpe" or "wordpiece").
---@param name string
---@return table<string, string>
function classes.defaults(name) return CLASSES[name] or {} end

--- Returns the name of the tokenizer class for the model_type in a config.json.
---@param model_type any
---@return string? name
function classes.of(model_type) return CLASS_OF[model_type] end

-- Returns whether the file sets a boolean setting to true or false. null is not a setting.
local function given(config, key) return type(config[key]) == "boolean" end

-- Maps settings in tokenizer_config.json to the fields of BertNormalizer that they override.
local NORMALIZER = { do_lower_case = "lowercase", strip_accents = "strip_accents",
  tokenize_chinese_chars = "handle_chinese_chars" }

local function of_bert(description, config)
  local normalizer = description.normalizer
  if type(normalizer) ~= "table" or normalizer.type ~= "BertNormalizer" then return end
  for key, field in pairs(NORMALIZER) do if given(config, key) then normalizer[field] = config[key] end end
end

local function of_bytes(description, config)
  if not given(config, "add_prefix_space") then return end
  for _, name in ipairs { "pre_tokenizer", "post_processor" } do
    local node = description[name]
    local kind = type(node) == "table" and node.type
    if kind == "ByteLevel" or kind == "RobertaProcessing" then node.add_prefix_space = config.add_prefix_space end
  end
end

-- Returns whether a pre-tokenizer is ByteLevel, or a sequence that contains ByteLevel.
local function by_bytes(node)
  if type(node) ~= "table" then return false end
  if node.type == "ByteLevel" then return true end
  for _, one in ipairs(type(node.pretokenizers) == "table" and node.pretokenizers or {}) do
    if by_bytes(one) then return true end
  end
  return false
end

local BLANK = "\226\150\129"                              -- the character for a blank in Llama's tokens

-- Replaces the normalizer, the pre-tokenizer and the decoder in a description, so that they work like transformers'
-- LlamaTokenizer. This class uses only the vocabulary and the merges of tokenizer.json. It does not put a blank before
-- a text that already begins with a blank. A byte-level description is not changed: its files name LlamaTokenizer by
-- mistake.
local function of_llama(description, config)
  if by_bytes(description.pre_tokenizer) then return end
  local prefix = config.add_prefix_space ~= false
  description.normalizer = json.null
  description.pre_tokenizer = { type = "Metaspace", replacement = BLANK, split = false,
    prepend_scheme = not prefix and "never" or config.legacy == true and "always" or "first" }
  local steps = { { type = "Replace", pattern = { String = BLANK }, content = " " }, { type = "ByteFallback" },
    { type = "Fuse" } }
  if prefix then steps[4] = { type = "Strip", content = " ", start = 1, stop = 0 } end
  description.decoder = { type = "Sequence", decoders = steps }
end

local APPLY = { BertTokenizer = of_bert, DistilBertTokenizer = of_bert, ElectraTokenizer = of_bert,
  GPT2Tokenizer = of_bytes, RobertaTokenizer = of_bytes, LlamaTokenizer = of_llama }

--- Changes a description that was read from tokenizer.json. Some classes use settings in tokenizer_config.json instead
--- of settings in tokenizer.json. This function copies such settings from `config` to the description.
---@param description table
---@param class string
---@param config table
function classes.apply(description, class, config)
  if APPLY[class] then APPLY[class](description, config) end
end

-- The replacements, in this order, by which transformers removes blanks from decoded WordPiece tokens.
local TOGETHER = { { " %.", "." }, { " %?", "?" }, { " !", "!" }, { " ,", "," }, { " ' ", "'" }, { " n't", "n't" },
  { " 'm", "'m" }, { " 's", "'s" }, { " 've", "'ve" }, { " 're", "'re" } }

--- Removes blanks before punctuation and contractions. This implements clean_up_tokenization_spaces.
---@param text string
---@return string
function classes.clean_up(text)
  for _, pair in ipairs(TOGETHER) do text = text:gsub(pair[1], pair[2]) end
  return text
end

return classes
