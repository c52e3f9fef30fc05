-- SPDX-License-Identifier: BSD-3-Clause
-- Makes the engine's tokenizer from a description. The description has the form of tokenizer.json (normalizer,
-- pre_tokenizer, model, post_processor, decoder, added_tokens). If a part of the description is not supported, the
-- error names this part.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local object = require "ps.tokenizer.object"
local patterns = require "ps.tokenizer.pattern"
local ffi = require "ffi"
local error = caller.error
local C, check = native.C, native.check
local fields, is_null, listed, refuse = object.fields, object.is_null, object.listed, object.refuse

local description = {}

local function set(t, name, value) check(C.ps_tok_set(t.handle, name, value == true and 1 or value or 0)) end

--- Adds a regular expression by which the tokenizer splits texts into words.
---@param t table the tokenizer
---@param field string name of the field, for errors
---@param given string the regular expression
---@param dialect? "onig"|"rust" the expression's dialect (default: PCRE2's)
function description.split(t, field, given, dialect)
  local text = dialect and patterns.of(t.path, field, given, dialect) or given
  t.cuts = t.cuts ~= false and patterns.is_of_lines(given)
  set(t, "cuts", t.cuts)
  local rc = C.ps_tok_split(t.handle, text, #text)
  if rc < 0 then error(("%s: %s: %s"):format(t.path, field, ffi.string(C.ps_error_message()))) end
end

--- Returns the id of a token that must be in the vocabulary.
---@param t table the tokenizer
---@param token any
---@param what string name of the token's role, for errors
---@return integer
function description.id_of(t, token, what)
  local id = type(token) == "string" and C.ps_tok_find(t.handle, token, #token) or -1
  if id < 0 then error(("%s: %s is '%s', which is not in the vocabulary"):format(t.path, what, tostring(token))) end
  return id
end

local MODELS = {
  BPE = function(t, node)
    fields(t.path, "model", node, { dropout = { 0 }, unk_token = "string", continuing_subword_prefix = { "" },
      end_of_word_suffix = { "" }, fuse_unk = "boolean", byte_fallback = "boolean", ignore_merges = "boolean",
      vocab = "any", merges = "any" })
    if not is_null(node.unk_token) then set(t, "unk", description.id_of(t, node.unk_token, "model.unk_token")) end
    set(t, "whole_words", node.ignore_merges == true)
    set(t, "byte_fallback", node.byte_fallback == true)
    set(t, "fuse_unk", node.fuse_unk == true)
  end,
  WordPiece = function(t, node)
    fields(t.path, "model", node, { unk_token = "string", continuing_subword_prefix = { "##" },
      max_input_chars_per_word = "number", vocab = "any" })
    set(t, "unk", description.id_of(t, node.unk_token, "model.unk_token"))
    local longest = node.max_input_chars_per_word
    set(t, "longest_word", is_null(longest) and 100 or longest)
  end,
}

local BLANK = "\u{2581}"                                    -- the character for a blank in SentencePiece

local NORMALIZERS
NORMALIZERS = {
  NFC = function(t) check(C.ps_tok_normalize(t.handle, "nfc", "", "")) end,
  Prepend = function(t, node)
    fields(t.path, "normalizer", node, { prepend = "string" })
    check(C.ps_tok_normalize(t.handle, "prepend", "", node.prepend))
  end,
  Replace = function(t, node)
    fields(t.path, "normalizer", node, { pattern = "table", content = "string" })
    fields(t.path, "normalizer.pattern", node.pattern, { String = "string" })
    check(C.ps_tok_normalize(t.handle, "replace", node.pattern.String, node.content))
  end,
  Sequence = function(t, node)
    fields(t.path, "normalizer", node, { normalizers = "table" })
    for i, one in ipairs(listed(t.path, "normalizer.normalizers", node.normalizers)) do
      if type(one) ~= "table" or not NORMALIZERS[one.type] or one.type == "BertNormalizer" then
        refuse(t.path, "normalizer.normalizers[" .. i - 1 .. "].type", type(one) == "table" and one.type or one,
          "this is not supported")
      end
      NORMALIZERS[one.type](t, one)
    end
  end,
  BertNormalizer = function(t, node)
    fields(t.path, "normalizer", node, { clean_text = "boolean", handle_chinese_chars = "boolean",
      strip_accents = "boolean", lowercase = "boolean" })
    set(t, "clean_text", node.clean_text == true)
    set(t, "chinese", node.handle_chinese_chars == true)
    set(t, "lower_case", node.lowercase == true)
    local strip = node.strip_accents
    if is_null(strip) then strip = node.lowercase end
    set(t, "strip_accents", strip == true)
  end,
}

local SCHEMES = { always = 1, first = 2, never = 3 }

local SPLITS
SPLITS = {
  ByteLevel = function(t, node)
    fields(t.path, "pre_tokenizer", node, { add_prefix_space = "boolean", trim_offsets = "any", use_regex = "boolean" })
    set(t, "byte_level", true)
    set(t, "prefix_space", node.add_prefix_space == true)
    if node.use_regex ~= false then description.split(t, "pre_tokenizer", patterns.GPT2) end
    t.byte_level = true
  end,
  Split = function(t, node)
    fields(t.path, "pre_tokenizer", node, { pattern = "table", behavior = { "Isolated" }, invert = { false } })
    local pattern = node.pattern
    fields(t.path, "pre_tokenizer.pattern", pattern, { Regex = "string", String = "string" })
    if not is_null(pattern.Regex) then
      return description.split(t, "pre_tokenizer.pattern.Regex", pattern.Regex, "onig")
    end
    if is_null(pattern.String) then
      refuse(t.path, "pre_tokenizer.pattern", pattern, "it must be a Regex or a String")
    end
    description.split(t, "pre_tokenizer.pattern.String",
      "\\Q" .. pattern.String:gsub("\\E", "\\E\\\\E\\Q") .. "\\E")
  end,
  Sequence = function(t, node)
    fields(t.path, "pre_tokenizer", node, { pretokenizers = "table" })
    for i, one in ipairs(listed(t.path, "pre_tokenizer.pretokenizers", node.pretokenizers)) do
      local name = "pre_tokenizer.pretokenizers[" .. i - 1 .. "].type"
      if type(one) ~= "table" or not SPLITS[one.type] then
        refuse(t.path, name, type(one) == "table" and one.type, "this is not supported")
      end
      local before = i > 1 and node.pretokenizers[i - 1].type
      if before and one.type == "ByteLevel" and one.add_prefix_space == true then
        refuse(t.path, "add_prefix_space", true, "this is not supported after another pre-tokenizer")
      end
      -- Raises an error if this order is not supported. After ByteLevel, the text consists of letters that represent
      -- bytes, so no other step can follow. A blank may be prepended only once. The words of BertPreTokenizer cannot be
      -- split further.
      if one.type == "Sequence" or before and (one.type ~= "Split" and one.type ~= "ByteLevel" or before == "ByteLevel")
        or i < #node.pretokenizers and one.type == "BertPreTokenizer" then
        refuse(t.path, name, one.type, "it is not supported at this position")
      end
      SPLITS[one.type](t, one)
    end
  end,
  BertPreTokenizer = function(t) t.bert_words = true end,
  Metaspace = function(t, node)
    fields(t.path, "pre_tokenizer", node, { replacement = { BLANK }, prepend_scheme = "string", split = "boolean",
      add_prefix_space = "boolean", str_rep = { BLANK } })
    local scheme = node.prepend_scheme
    if is_null(scheme) then scheme = node.add_prefix_space == false and "never" or "always"
    elseif node.add_prefix_space == false and scheme ~= "never" then
      refuse(t.path, "pre_tokenizer.add_prefix_space", false, ("prepend_scheme is \"%s\""):format(scheme))
    end
    local number = SCHEMES[scheme]
    if not number then refuse(t.path, "pre_tokenizer.prepend_scheme", scheme, "this is not supported") end
    set(t, "metaspace", number)
    t.metaspace = true
    if node.split ~= false then
      local words = BLANK .. "[^" .. BLANK .. "]*+|[^" .. BLANK .. "]++"
      description.split(t, "pre_tokenizer", words)
    end
  end,
}

-- Returns `value`, such as an id or a token type. Raises an error if the value is not a whole number of at least 0.
local function whole_number(t, field, value)
  if type(value) ~= "number" or value < 0 or value >= 2 ^ 31 or value % 1 ~= 0 then
    refuse(t.path, field, value, "it must be a whole number of at least 0")
  end
  return value
end

-- Returns the id in a pair { token, id }. BertProcessing and RobertaProcessing contain such pairs.
local function second(t, field, value)
  return whole_number(t, field .. "[1]", listed(t.path, field, value)[2])
end

-- Converts a TemplateProcessing template to a list. An entry is { id = the id, kind = } for a special token, or
-- { text = 1 or 2, kind = } for the place of the first or second text. `kind` is the token type.
local function template(t, list, where)
  local out = {}
  for _, piece in ipairs(listed(t.path, where, list, true)) do
    local special, sequence, node
    if type(piece) == "table" then special, sequence = piece.SpecialToken, piece.Sequence end
    node = special or sequence
    if type(node) ~= "table" then refuse(t.path, where, piece, "it must be a SpecialToken or a Sequence") end
    local kind = is_null(node.type_id) and 0 or whole_number(t, where .. ".type_id", node.type_id)
    if special then
      local ids = t.template_tokens[special.id]
      if not ids then refuse(t.path, where, special.id, "special_tokens does not have this token") end
      for _, id in ipairs(ids) do out[#out + 1] = { id = id, kind = kind } end
    else
      out[#out + 1] = { text = sequence.id == "B" and 2 or 1, kind = kind }
    end
  end
  return out
end

-- Sets whether the byte range of a token excludes the blanks at the token's ends.
local function trim(t, node)
  set(t, "trim_offsets", node.trim_offsets ~= false)
  set(t, "keep_first", node.add_prefix_space ~= false)
end

local POST
POST = {
  ByteLevel = function(t, node)
    fields(t.path, "post_processor", node, { add_prefix_space = "boolean", trim_offsets = "boolean",
      use_regex = "any" })
    trim(t, node)
  end,
  TemplateProcessing = function(t, node)
    fields(t.path, "post_processor", node, { single = "table", pair = "table", special_tokens = "table" })
    t.template_tokens = {}
    local where = "post_processor.special_tokens"
    for name, one in pairs(listed(t.path, where, node.special_tokens, true)) do
      local field = ("%s['%s']"):format(where, tostring(name))
      local ids = listed(t.path, field .. ".ids", listed(t.path, field, one).ids)
      for _, id in ipairs(ids) do whole_number(t, field .. ".ids", id) end
      t.template_tokens[name] = ids
    end
    t.single = template(t, node.single, "post_processor.single")
    t.pair = template(t, node.pair, "post_processor.pair")
  end,
  BertProcessing = function(t, node)
    fields(t.path, "post_processor", node, { sep = "table", cls = "table" })
    local cls, sep = second(t, "post_processor.cls", node.cls), second(t, "post_processor.sep", node.sep)
    t.single = { { id = cls, kind = 0 }, { text = 1, kind = 0 }, { id = sep, kind = 0 } }
    t.pair = { { id = cls, kind = 0 }, { text = 1, kind = 0 }, { id = sep, kind = 0 }, { text = 2, kind = 1 },
      { id = sep, kind = 1 } }
  end,
  RobertaProcessing = function(t, node)
    fields(t.path, "post_processor", node, { sep = "table", cls = "table", trim_offsets = "boolean",
      add_prefix_space = "boolean" })
    local cls = { id = second(t, "post_processor.cls", node.cls), kind = 0 }
    local sep = { id = second(t, "post_processor.sep", node.sep), kind = 0 }
    local a, b = { text = 1, kind = 0 }, { text = 2, kind = 0 }
    trim(t, node)
    t.single, t.pair = { cls, a, sep }, { cls, a, sep, sep, b, sep }
  end,
  Sequence = function(t, node)
    fields(t.path, "post_processor", node, { processors = "table" })
    for i, one in ipairs(listed(t.path, "post_processor.processors", node.processors)) do
      if type(one) ~= "table" or not POST[one.type] then
        refuse(t.path, "post_processor.processors[" .. i - 1 .. "]", one, "this is not supported")
      end
      POST[one.type](t, one)
    end
  end,
}

local DECODERS = {
  ByteLevel = function(t)
    if not t.byte_level then refuse(t.path, "decoder.type", "ByteLevel", "its pre_tokenizer is not ByteLevel") end
  end,
  WordPiece = function(t, node) fields(t.path, "decoder", node, { prefix = { "##" }, cleanup = { true } }) end,
  -- Llama 2's decoder. Its steps are: replace the character that represents a blank, replace the tokens that represent
  -- bytes, join the tokens, and, optionally, remove a blank at the beginning.
  Sequence = function(t, node)
    fields(t.path, "decoder", node, { decoders = "table" })
    local kinds = {}
    for i, one in ipairs(listed(t.path, "decoder.decoders", node.decoders)) do
      local where = "decoder.decoders[" .. i - 1 .. "]"
      kinds[i] = type(one) == "table" and one.type
      if kinds[i] == "Replace" then
        fields(t.path, where, one, { pattern = "table", content = { " " } })
        fields(t.path, where .. ".pattern", one.pattern, { String = { BLANK } })
      elseif kinds[i] == "Strip" then
        fields(t.path, where, one, { content = { " " }, start = { 0, 1 }, stop = { 0 } })
        set(t, "strip_first", one.start == 1)
      end
    end
    local list = table.concat(kinds, " ")
    if t.byte_level or list ~= "Replace ByteFallback Fuse" and list ~= "Replace ByteFallback Fuse Strip" then
      refuse(t.path, "decoder.decoders", list,
        "only Replace, ByteFallback, Fuse and Strip, in this order, are supported")
    end
    t.decodes = true
  end,
}

-- Applies the part `name` of the description `all`. `kinds` contains a function for each type of this part.
local function part(t, all, name, kinds)
  local node = all[name]
  if is_null(node) then return end
  local kind = type(node) == "table" and kinds[node.type]
  if not kind then refuse(t.path, name .. ".type", type(node) == "table" and node.type or node,
    "this is not supported") end
  kind(t, node)
end

--- Adds a token that the tokenizer searches for in texts before it splits them into words.
---@param t table the tokenizer
---@param content any
---@param id any
---@param options table fields as in added_tokens: special, lstrip, rstrip, normalized
function description.add_token(t, content, id, options)
  if type(content) ~= "string" or type(id) ~= "number" then
    refuse(t.path, "added_tokens", { content = content, id = id }, "a token has a content and an id")
  end
  if options.single_word == true then
    refuse(t.path, ("added_tokens['%s'].single_word"):format(content), true, "this is not supported")
  end
  local flags = (options.special and C.PS_TOK_SPECIAL or 0) + (options.lstrip and C.PS_TOK_LSTRIP or 0)
    + (options.rstrip and C.PS_TOK_RSTRIP or 0) + (options.normalized and C.PS_TOK_NORMALIZED or 0)
  check(C.ps_tok_add(t.handle, content, #content, id, flags))
  t.special_ids = t.special_ids or {}
  if options.special then
    t.special_ids[id] = content
    t.special_strips = t.special_strips or options.lstrip == true or options.rstrip == true
  end
end

--- Creates a tokenizer of the engine with an empty vocabulary.
---@param model "bpe"|"wordpiece"
---@return ffi.cdata*
function description.new_handle(model)
  local out = ffi.new("ps_tok *[1]")
  check(C.ps_tok_new(model, out))
  return ffi.gc(out[0], C.ps_tok_free)
end

-- Converts a direction as written in tokenizer.json ("Left") to the form of tokenizer_config.json ("left").
local function side_of(node) return type(node.direction) == "string" and node.direction:lower() or nil end

--- Returns whether a kind of model, such as "BPE", is supported.
---@param kind any
---@return boolean
function description.has_model(kind) return MODELS[kind] ~= nil end

--- Applies a description to a tokenizer. The tokenizer's vocabulary must have been read before.
---@param t table the tokenizer
---@param all table the description
---@return {max_length: any, pad_token: any, truncation_side: any, padding_side: any}
function description.apply(t, all)
  part(t, all, "model", MODELS)
  part(t, all, "normalizer", NORMALIZERS)
  part(t, all, "pre_tokenizer", SPLITS)
  local kind = all.model.type
  for _, name in ipairs { "byte_fallback", "fuse_unk" } do
    if t.byte_level and all.model[name] == true then
      refuse(t.path, "model." .. name, true, "it is not supported with ByteLevel")
    end
  end
  if kind == "BPE" and t.metaspace and t.byte_level then
    refuse(t.path, "pre_tokenizer", all.pre_tokenizer, "ByteLevel with Metaspace is not supported")
  end
  if kind == "WordPiece" and (t.byte_level or not t.bert_words) then
    refuse(t.path, "pre_tokenizer", all.pre_tokenizer, "WordPiece is supported only with BertPreTokenizer")
  end
  if kind == "BPE" and t.bert_words then
    refuse(t.path, "pre_tokenizer", all.pre_tokenizer, "BertPreTokenizer is not supported with BPE")
  end
  local normalizer = not is_null(all.normalizer) and all.normalizer.type
  if normalizer and (normalizer == "BertNormalizer") ~= (kind == "WordPiece") then
    refuse(t.path, "normalizer.type", normalizer, "this is not supported with a " .. kind)
  end
  for _, one in ipairs(listed(t.path, "added_tokens", all.added_tokens, true)) do
    listed(t.path, "added_tokens", one)
    description.add_token(t, one.content, one.id, one)
  end
  part(t, all, "post_processor", POST)
  part(t, all, "decoder", DECODERS)
  if kind == "BPE" and not t.byte_level and not t.decodes then
    refuse(t.path, "decoder", all.decoder, "tokens that spell characters need a decoder with ByteFallback")
  end
  local truncation = listed(t.path, "truncation", all.truncation, true)
  local padding = listed(t.path, "padding", all.padding, true)
  return { max_length = truncation.max_length, pad_token = padding.pad_token,
    truncation_side = side_of(truncation), padding_side = side_of(padding) }
end

return description
