-- SPDX-License-Identifier: BSD-3-Clause
-- Tokenizers' files as Hugging Face has them. Whatever the files are, they are brought to one description, that of
-- tokenizer.json (normalizer, pre_tokenizer, model, post_processor, decoder, added_tokens), and the engine's tokenizer
-- is made by it. What a description asks for and is not here is refused by name; vocabularies and merges are read in C.
local ps = require "ps"
local caller = require "ps.caller"
local classes = require "ps.tokenizer.classes"
local ffi = require "ffi"
local json = require "cjson"
local lfs = require "lfs"
local error = caller.error
local C, check = ps.C, ps.check

local read = {}

local NO_LIMIT = 1e18              -- what transformers writes for no limit is more

-- -- JSON -----------------------------------------------------------------------------------------------------------
local function decode(text, path)
  local ok, value = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then
    error(("%s: %s"):format(path, ok and "it holds no JSON object" or tostring(value)))
  end
  return value
end

-- The object in a file; nil: there is no such file.
local function object(path)
  if lfs.attributes(path, "mode") ~= "file" then return nil end
  local file, why = io.open(path, "rb")
  if not file then error("no tokenizer: " .. why) end
  local text = file:read("*a")
  file:close()
  return decode(text or "", path)
end

local function is_null(value) return value == nil or value == json.null end

-- A value as an error shows it.
local function shown(value)
  if value == json.null then return "null" end
  local ok, text = pcall(json.encode, value)
  text = ok and text or tostring(value)
  return #text > 60 and text:sub(1, 57) .. "..." or text
end

local function refuse(path, field, value, why)
  error(("%s: %s = %s: %s"):format(path, field, shown(value), why))
end

-- A list or an object of a file; null, where a file may leave it out, is an empty one.
local function listed(path, field, value, may_lack)
  if may_lack and is_null(value) then return {} end
  if type(value) ~= "table" then refuse(path, field, value, "a list or an object expected") end
  return value
end

-- Every field of an object has to be known: its value is one of the Lua type that `known` names, or null; or anything
-- where that is "any"; else that very value alone is supported.
local function fields(path, where, node, known)
  if type(node) ~= "table" then refuse(path, where, node, "an object expected") end
  for name, value in pairs(node) do
    local want = known[name]
    local field = where .. "." .. tostring(name)
    if want == nil and name ~= "type" then refuse(path, field, value, "this is not supported") end
    if want and want ~= "any" and not is_null(value) then
      local kind = type(want) == "table" and "value" or want
      if kind == "value" then
        local fits = false
        for _, one in ipairs(want) do fits = fits or value == one end
        if not fits then refuse(path, field, value, "this is not supported") end
      elseif type(value) ~= kind then
        refuse(path, field, value, "a " .. kind .. " expected")
      end
    end
  end
end

-- -- from a description to the engine's tokenizer -------------------------------------------------------------------
-- GPT-2's words: short forms, letters, digits, other characters, blanks (the last of which goes to the next word).
local GPT2 = [['(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+]]

local function set(t, name, value) check(C.ps_tok_set(t.handle, name, value == true and 1 or value or 0)) end

local function id_of(t, token, what)
  local id = type(token) == "string" and C.ps_tok_find(t.handle, token, #token) or -1
  if id < 0 then error(("%s: %s is '%s', which the vocabulary lacks"):format(t.path, what, tostring(token))) end
  return id
end

local MODELS = {
  BPE = function(t, node)
    fields(t.path, "model", node, { dropout = { 0 }, unk_token = "string", continuing_subword_prefix = { "" },
      end_of_word_suffix = { "" }, fuse_unk = "boolean", byte_fallback = "boolean", ignore_merges = "boolean",
      vocab = "any", merges = "any" })
    if not is_null(node.unk_token) then set(t, "unk", id_of(t, node.unk_token, "model.unk_token")) end
    set(t, "whole_words", node.ignore_merges == true)
    set(t, "byte_fallback", node.byte_fallback == true)
    set(t, "fuse_unk", node.fuse_unk == true)
  end,
  WordPiece = function(t, node)
    fields(t.path, "model", node, { unk_token = "string", continuing_subword_prefix = { "##" },
      max_input_chars_per_word = "number", vocab = "any" })
    set(t, "unk", id_of(t, node.unk_token, "model.unk_token"))
    local longest = node.max_input_chars_per_word
    set(t, "longest_word", is_null(longest) and 100 or longest)
  end,
}

local BLANK = "\u{2581}"                                    -- a blank, as SentencePiece writes it

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
    if node.use_regex ~= false then check(C.ps_tok_split(t.handle, GPT2, #GPT2)) end
    t.byte_level = true
  end,
  Split = function(t, node)
    fields(t.path, "pre_tokenizer", node, { pattern = "table", behavior = { "Isolated" }, invert = { false } })
    local pattern = node.pattern
    fields(t.path, "pre_tokenizer.pattern", pattern, { Regex = "string", String = "string" })
    local text = pattern.Regex or "\\Q" .. tostring(pattern.String):gsub("\\E", "\\E\\\\E\\Q") .. "\\E"
    local rc = C.ps_tok_split(t.handle, text, #text)
    if rc < 0 then error(("%s: pre_tokenizer: %s"):format(t.path, ffi.string(C.ps_error_message()))) end
  end,
  Sequence = function(t, node)
    fields(t.path, "pre_tokenizer", node, { pretokenizers = "table" })
    for i, one in ipairs(listed(t.path, "pre_tokenizer.pretokenizers", node.pretokenizers)) do
      local name = "pre_tokenizer.pretokenizers[" .. i - 1 .. "].type"
      if type(one) ~= "table" or not SPLITS[one.type] then
        refuse(t.path, name, type(one) == "table" and one.type, "this is not supported")
      end
      if one.add_prefix_space == true and i > 1 then
        refuse(t.path, "add_prefix_space", true, "behind another pre-tokenizer this is not supported")
      end
      SPLITS[one.type](t, one)
    end
  end,
  BertPreTokenizer = function(t) t.bert_words = true end,
  Metaspace = function(t, node)
    fields(t.path, "pre_tokenizer", node, { replacement = { BLANK }, prepend_scheme = "string", split = "boolean",
      add_prefix_space = "boolean", str_rep = { BLANK } })
    local scheme = node.prepend_scheme
    if is_null(scheme) then scheme = node.add_prefix_space == false and "never" or "always" end
    local number = SCHEMES[scheme]
    if not number then refuse(t.path, "pre_tokenizer.prepend_scheme", scheme, "this is not supported") end
    set(t, "metaspace", number)
    t.metaspace = true
    if node.split ~= false then
      local words = BLANK .. "[^" .. BLANK .. "]*+|[^" .. BLANK .. "]++"
      check(C.ps_tok_split(t.handle, words, #words))
    end
  end,
}

-- A whole number from 0 on, as ids and types of tokens are.
local function whole_number(t, field, value)
  if type(value) ~= "number" or value < 0 or value >= 2 ^ 31 or value % 1 ~= 0 then
    refuse(t.path, field, value, "a whole number from 0 on expected")
  end
  return value
end

-- The id of { token, id }, as BertProcessing and RobertaProcessing have it.
local function second(t, field, value)
  return whole_number(t, field .. "[1]", listed(t.path, field, value)[2])
end

-- What stands around texts: lists of { id = } and { text = 1 or 2 }, each with the type of its tokens.
local function template(t, list, where)
  local out = {}
  for _, piece in ipairs(listed(t.path, where, list, true)) do
    local special, sequence, node
    if type(piece) == "table" then special, sequence = piece.SpecialToken, piece.Sequence end
    node = special or sequence
    if type(node) ~= "table" then refuse(t.path, where, piece, "a SpecialToken or a Sequence expected") end
    local kind = is_null(node.type_id) and 0 or whole_number(t, where .. ".type_id", node.type_id)
    if special then
      local ids = t.template_tokens[special.id]
      if not ids then refuse(t.path, where, special.id, "special_tokens lacks this one") end
      for _, id in ipairs(ids) do out[#out + 1] = { id = id, kind = kind } end
    else
      out[#out + 1] = { text = sequence.id == "B" and 2 or 1, kind = kind }
    end
  end
  return out
end

-- { token, id } as BertProcessing and RobertaProcessing have them.
local function around(t, single, pair)
  t.single, t.pair = single, pair
end

-- Offsets without a token's blanks.
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
    around(t, { { id = cls, kind = 0 }, { text = 1, kind = 0 }, { id = sep, kind = 0 } },
      { { id = cls, kind = 0 }, { text = 1, kind = 0 }, { id = sep, kind = 0 }, { text = 2, kind = 1 },
        { id = sep, kind = 1 } })
  end,
  RobertaProcessing = function(t, node)
    fields(t.path, "post_processor", node, { sep = "table", cls = "table", trim_offsets = "boolean",
      add_prefix_space = "boolean" })
    local cls = { id = second(t, "post_processor.cls", node.cls), kind = 0 }
    local sep = { id = second(t, "post_processor.sep", node.sep), kind = 0 }
    local a, b = { text = 1, kind = 0 }, { text = 2, kind = 0 }
    trim(t, node)
    around(t, { cls, a, sep }, { cls, a, sep, sep, b, sep })
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
  -- Llama 2's: blanks, bytes, all in one, and perhaps without a blank in front.
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
      refuse(t.path, "decoder.decoders", list, "there is Replace, ByteFallback, Fuse, Strip in this order")
    end
    t.decodes = true
  end,
}

-- Calls what `kinds` has for a part of the description.
local function part(t, description, name, kinds)
  local node = description[name]
  if is_null(node) then return end
  local kind = type(node) == "table" and kinds[node.type]
  if not kind then refuse(t.path, name .. ".type", type(node) == "table" and node.type or node,
    "this is not supported") end
  kind(t, node)
end

local function add_token(t, content, id, options)
  if type(content) ~= "string" or type(id) ~= "number" then
    refuse(t.path, "added_tokens", { content = content, id = id }, "a token has a content and an id")
  end
  if options.single_word == true then
    refuse(t.path, ("added_tokens['%s'].single_word"):format(content), true, "this is not supported")
  end
  local flags = (options.special and C.PS_TOK_SPECIAL or 0) + (options.lstrip and C.PS_TOK_LSTRIP or 0)
    + (options.rstrip and C.PS_TOK_RSTRIP or 0) + (options.normalized and C.PS_TOK_NORMALIZED or 0)
  check(C.ps_tok_add(t.handle, content, #content, id, flags))
end

local function new_handle(model)
  local out = ffi.new("ps_tok *[1]")
  check(C.ps_tok_new(model, out))
  return ffi.gc(out[0], C.ps_tok_free)
end

-- A side as tokenizer_config.json has it, of tokenizer.json's "Left".
local function side_of(node) return type(node.direction) == "string" and node.direction:lower() or nil end

-- Makes t's handle what the description says. Its vocabulary has been read.
local function configure(t, description)
  part(t, description, "model", MODELS)
  part(t, description, "normalizer", NORMALIZERS)
  part(t, description, "pre_tokenizer", SPLITS)
  local kind = description.model.type
  for _, name in ipairs { "byte_fallback", "fuse_unk" } do
    if t.byte_level and description.model[name] == true then
      refuse(t.path, "model." .. name, true, "with ByteLevel this is not supported")
    end
  end
  if kind == "BPE" and t.metaspace and t.byte_level then
    refuse(t.path, "pre_tokenizer", description.pre_tokenizer, "ByteLevel with Metaspace is not supported")
  end
  if kind == "WordPiece" and (t.byte_level or not t.bert_words) then
    refuse(t.path, "pre_tokenizer", description.pre_tokenizer, "WordPiece is supported with BertPreTokenizer alone")
  end
  local normalizer = not is_null(description.normalizer) and description.normalizer.type
  if normalizer and (normalizer == "BertNormalizer") ~= (kind == "WordPiece") then
    refuse(t.path, "normalizer.type", normalizer, "this is not supported with a " .. kind)
  end
  for _, one in ipairs(listed(t.path, "added_tokens", description.added_tokens, true)) do
    listed(t.path, "added_tokens", one)
    add_token(t, one.content, one.id, one)
  end
  part(t, description, "post_processor", POST)
  part(t, description, "decoder", DECODERS)
  if kind == "BPE" and not t.byte_level and not t.decodes then
    refuse(t.path, "decoder", description.decoder, "tokens that spell characters need one with ByteFallback")
  end
  local truncation = listed(t.path, "truncation", description.truncation, true)
  local padding = listed(t.path, "padding", description.padding, true)
  return { max_length = truncation.max_length, pad_token = padding.pad_token,
    truncation_side = side_of(truncation), padding_side = side_of(padding) }
end

-- -- folders ----------------------------------------------------------------------------------------------------------
local NAMES = { "bos", "eos", "unk", "sep", "pad", "cls", "mask" }

-- "[SEP]", or { content = "[SEP]", ... }; nil for null.
local function content_of(value)
  if is_null(value) then return nil end
  if type(value) == "table" then return value.content, value end
  return value
end

-- The first of several names that is a file of the folder.
local function first_file(folder, ...)
  for _, name in ipairs { ... } do
    if lfs.attributes(folder .. "/" .. name, "mode") == "file" then return folder .. "/" .. name end
  end
end

-- tokenizer_config.json and its older companions, together.
local function settings_of(folder)
  local config = object(folder .. "/tokenizer_config.json") or {}
  local map = object(folder .. "/special_tokens_map.json") or {}
  for _, name in ipairs(NAMES) do
    local key = name .. "_token"
    if is_null(config[key]) then config[key] = map[key] end
    local content = content_of(config[key])
    if content ~= nil and type(content) ~= "string" then
      refuse(folder .. "/tokenizer_config.json", key, config[key], "a token expected")
    end
  end
  local added = {}
  local path, field = folder .. "/tokenizer_config.json", "added_tokens_decoder"
  for id, one in pairs(listed(path, field, config[field], true)) do
    listed(path, ("%s['%s']"):format(field, tostring(id)), one)
    added[#added + 1] = { id = tonumber(id), content = one.content, node = one }
  end
  if not added[1] then
    for content, id in pairs(object(folder .. "/added_tokens.json") or {}) do
      added[#added + 1] = { id = id, content = content, node = { normalized = true } }
    end
  end
  for _, one in ipairs(added) do
    if type(one.id) ~= "number" then refuse(folder, "added tokens", one.content, "a token has a content and an id") end
  end
  table.sort(added, function(a, b) return a.id < b.id end)
  return config, added
end

-- The class, and whether files name it.
local function class_of(folder, config, has_words)
  local name = config.tokenizer_class
  if not is_null(name) and type(name) ~= "string" then
    refuse(folder .. "/tokenizer_config.json", "tokenizer_class", name, "a name expected")
  end
  if is_null(name) then
    local model = object(folder .. "/config.json") or {}
    name = classes.of(model.model_type)
  end
  if not name then return has_words and "BertTokenizer" or "GPT2Tokenizer", false end
  return (name:gsub("Fast$", "")), true
end

-- The description of a folder without tokenizer.json.
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
        cls = { "", id_of(t, content_of(config.cls_token) or defaults.cls, "cls_token") },
        sep = { "", id_of(t, content_of(config.sep_token) or defaults.sep, "sep_token") } } }
  end
  local space = config.add_prefix_space == true
  local description = { model = { type = "BPE" }, pre_tokenizer = { type = "ByteLevel", add_prefix_space = space },
    post_processor = { type = "ByteLevel", trim_offsets = false } }
  if class == "RobertaTokenizer" then
    description.post_processor = { type = "RobertaProcessing", trim_offsets = true, add_prefix_space = space,
      cls = { "", id_of(t, content_of(config.cls_token) or defaults.cls, "cls_token") },
      sep = { "", id_of(t, content_of(config.sep_token) or defaults.sep, "sep_token") } }
  else
    for _, name in ipairs { "bos", "eos" } do
      if config["add_" .. name .. "_token"] == true then
        description[name] = id_of(t, content_of(config[name .. "_token"]) or defaults[name], name .. "_token")
      end
    end
  end
  return description
end

-- Special tokens by name, from the settings or the class, as far as the vocabulary has them.
local function name_tokens(t, config, defaults)
  t.special = {}
  for _, name in ipairs(NAMES) do
    local content, node = content_of(config[name .. "_token"])
    local given = content ~= nil
    content = content or defaults[name]
    local id = content and C.ps_tok_find(t.handle, content, #content) or -1
    if given and id < 0 then error(("%s: %s_token is '%s', which the vocabulary lacks"):format(t.path, name, content),
      2) end
    if id >= 0 then t.special[name] = { content, id, node } end
  end
end

-- Special tokens are looked for in texts; those that added_tokens names are so already.
local function add_named(t, class)
  for name, one in pairs(t.special) do
    if not t.added[one[2]] then
      t.added[one[2]] = true
      local node = one[3] or {}
      add_token(t, one[1], one[2], { special = true, rstrip = node.rstrip == true,
        lstrip = node.lstrip == true or (class == "RobertaTokenizer" and name == "mask") })
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
    if side ~= "left" and side ~= "right" then refuse(t.path, name, side, "it is \"left\" or \"right\"") end
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
  local missing = tonumber(C.ps_tok_missing(t.handle))
  if missing > 0 then
    io.stderr:write(("%s: no tokens for %d of 256 bytes; they are left out of texts\n"):format(t.path, missing))
  end
  return t
end

-- class: the one that files name, or nil.
local function from_json(t, path, config, defaults, class)
  local rest, n = ffi.new("const char *[1]"), ffi.new("int64_t[1]")
  -- The kind of model is known only when the file has been read, which takes a tokenizer.
  t.path = path
  local function load(model)
    t.handle, t.model = new_handle(model), model
    check(C.ps_tok_read(t.handle, "tokenizer.json", path))
    check(C.ps_tok_rest(t.handle, rest, n))
    return decode(ffi.string(rest[0], n[0]), path)
  end
  local description = load("bpe")
  local model = type(description.model) == "table" and description.model or {}
  local kind = model.type
  if kind == nil and model.merges ~= nil then kind, model.type = "BPE", "BPE" end
  if not MODELS[kind] then refuse(path, "model.type", kind, "there are BPE and WordPiece") end
  if kind == "WordPiece" then description = load("wordpiece") end
  if class then classes.apply(description, class, config) end
  local options = configure(t, description)
  if is_null(config.pad_token) then config.pad_token = options.pad_token end
  name_tokens(t, config, defaults)
  return finish(t, config, defaults, options)
end

local function from_vocab(t, class, defaults, config, added, vocab, merges)
  t.path, t.model, t.handle = vocab, defaults.model, new_handle(defaults.model)
  check(C.ps_tok_read(t.handle, merges and "vocab.json" or "vocab.txt", vocab))
  if merges then check(C.ps_tok_read(t.handle, "merges.txt", merges)) end
  t.added = {}
  for _, one in ipairs(added) do
    t.added[one.id or -1] = true
    add_token(t, one.content, one.id, one.node)
  end
  name_tokens(t, config, defaults)
  add_named(t, class)
  local description = describe(t, class, defaults, config)
  local options = configure(t, description)
  if description.bos or description.eos then
    local function add(text, list)
      local kind = text - 1
      if description.bos then list[#list + 1] = { id = description.bos, kind = kind } end
      list[#list + 1] = { text = text, kind = kind }
      if description.eos then list[#list + 1] = { id = description.eos, kind = kind } end
      return list
    end
    t.single, t.pair = add(1, {}), add(2, add(1, {}))
  end
  return finish(t, config, defaults, options)
end

-- -- tiktoken ---------------------------------------------------------------------------------------------------------
-- What the package tiktoken has in its code, and Qwen and Llama 3 in theirs: how a text is cut, and special tokens.
local CL100K = [['(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$]]
  .. [[|\s*[\r\n]|\s+(?!\S)|\s]]
local LLAMA3 = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*]]
  .. [[|\s*[\r\n]+|\s+(?!\S)|\s+]]
local SHORT = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)?]]
local O200K = [[[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+]] .. SHORT
  .. [[|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*]] .. SHORT
  .. [=[|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]=]
local OF_GPT2 = { pattern = GPT2, special = { ["<|endoftext|>"] = 50256 } }
local ENCODINGS = {
  gpt2 = OF_GPT2, r50k_base = OF_GPT2, p50k_base = OF_GPT2,
  cl100k_base = { pattern = CL100K, special = { ["<|endoftext|>"] = 100257, ["<|fim_prefix|>"] = 100258,
    ["<|fim_middle|>"] = 100259, ["<|fim_suffix|>"] = 100260, ["<|endofprompt|>"] = 100276 } },
  o200k_base = { pattern = O200K, special = { ["<|endoftext|>"] = 199999, ["<|endofprompt|>"] = 200018 } },
  qwen = { pattern = (LLAMA3:gsub("{1,3}", "")), special = { ["<|endoftext|>"] = 151643, ["<|im_start|>"] = 151644,
    ["<|im_end|>"] = 151645 } },
  llama3 = { pattern = LLAMA3, special = { ["<|begin_of_text|>"] = 128000, ["<|end_of_text|>"] = 128001,
    ["<|start_header_id|>"] = 128006, ["<|end_header_id|>"] = 128007, ["<|eot_id|>"] = 128009 } },
}

-- A file of ranks: its encoding by name, that of the file's name, or a pattern and special tokens.
local function from_tiktoken(t, path, given)
  local stem = path:match("([^/]*)%.tiktoken$")
  local encoding = ENCODINGS[given.encoding or stem]
  if given.encoding and not encoding then caller.one_of(given.encoding, ENCODINGS, path .. ": encoding") end
  if not encoding and not given.pattern then
    refuse(path, "encoding", given.encoding or stem or json.null, "it is none that is known; say which by encoding "
      .. "(cl100k_base, gpt2, llama3, o200k_base, qwen), or by pattern and special_tokens")
  end
  t.path, t.model, t.handle, t.special, t.byte_level = path, "bpe", new_handle "bpe", {}, true
  check(C.ps_tok_read(t.handle, "tiktoken", path))
  set(t, "byte_level", true)
  set(t, "whole_words", true)
  local pattern = given.pattern or encoding.pattern
  local rc = C.ps_tok_split(t.handle, pattern, #pattern)
  if rc < 0 then error(("%s: pattern: %s"):format(path, ffi.string(C.ps_error_message()))) end
  for content, id in pairs(given.special_tokens or encoding and encoding.special or {}) do
    add_token(t, content, id, { special = true })
  end
  local ending = C.ps_tok_find(t.handle, "<|endoftext|>", 13)
  if ending >= 0 then t.special.eos = { "<|endoftext|>", ending } end
  return finish(t, {}, {}, {})
end

local RANKS = { encoding = "string", pattern = "string", special_tokens = "table" }

--- What a folder's files, or one file, say: {handle, model, path, special, single, pair, type_ids, padding_side,
--- truncation_side, model_max_length}.
---@param path string
---@param options? {encoding?: string, pattern?: string, special_tokens?: table<string, integer>} of a file of ranks
---@return table
function read.open(path, options)
  options = caller.options(options, "tokenizer.from_pretrained", RANKS)
  local mode, t = lfs.attributes(path, "mode"), {}
  if not mode then error(("no tokenizer: there is no folder or file %s"):format(path)) end
  if mode ~= "directory" and (next(options) or path:match("%.tiktoken$")) then
    return from_tiktoken(t, path, options)
  end
  if next(options) then
    refuse(path, next(options), select(2, next(options)), "options are of a file of ranks, .tiktoken")
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
  if whole then return from_json(t, whole, config, defaults, is_named and class or nil) end
  if not defaults.model then
    refuse(folder .. "/tokenizer_config.json", "tokenizer_class", class, "without tokenizer.json this is not supported")
  end
  if defaults.model == "bpe" and vocab and merges then
    return from_vocab(t, class, defaults, config, added, vocab, merges)
  end
  if defaults.model == "wordpiece" and words then return from_vocab(t, class, defaults, config, added, words) end
  error(("no tokenizer: %s has neither tokenizer.json, nor vocab.json (or encoder.json) with merges.txt (or " ..
    "vocab.bpe), nor vocab.txt"):format(folder))
end

return read
