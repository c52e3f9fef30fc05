-- SPDX-License-Identifier: BSD-3-Clause
-- Tokenizers. A tokenizer is an object with the field vocab_size and the methods :encode(text), which returns ids, and
-- :decode(ids), which returns a text. It may also have the method :append, which writes a text's tokens directly to a
-- shard, without a Lua table. The byte tokenizer is in this file. Tokenizers of Hugging Face's files are in
-- tokenizer/text.lua.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local ffi = require "ffi"
local encode = require "ps.core.encode"
local letters = require "ps.tokenizer.letters"
local lfs = require "lfs"
local array = require "ps.core.array"
local int_array, byte_array = array "int32_t", array "uint8_t"
local error = caller.error

local tokenizer = {}

---@class ps.Tokenizer
---@field name string
---@field vocab_size integer
local Bytes = { name = "bytes", vocab_size = 256 }
local ENCODE = { add_special_tokens = "boolean", split_special_tokens = "boolean" }
local DECODE = { skip_special_tokens = "boolean", bytes = "boolean", n = "whole" }
Bytes.__index = Bytes

--- Returns a tokenizer whose tokens are bytes.
---@return ps.Tokenizer
function tokenizer.bytes() return setmetatable({}, Bytes) end

--- Returns the tokenizer of a Hugging Face folder, or of one of its files. Three kinds of files are supported.
--- tokenizer.json contains byte-level BPE, BPE over characters with byte_fallback (as in Llama 2), or WordPiece.
--- vocab.json (or encoder.json) with merges.txt (or vocab.bpe) contains the BPE of GPT-2 and RoBERTa. vocab.txt
--- contains the WordPiece of BERT.
---
--- Settings are read from tokenizer_config.json and its companions. If these files name the tokenizer's class, some of
--- their settings override tokenizer.json, as in transformers: add_prefix_space, do_lower_case, strip_accents and
--- tokenize_chinese_chars. The special tokens and the added_tokens_decoder of these files are added to those of
--- tokenizer.json. A setting that is not supported raises an error that names it.
---
--- The argument can also be a .tiktoken file, which contains the ranks of an encoding. If it is neither a folder nor a
--- file, it is the name of a model in Hugging Face's cache, as in ps.from_pretrained.
---@param path string
---@param options? {encoding?: string, pattern?: string, special_tokens?: table<string, integer>} for a .tiktoken file.
--- encoding: "cl100k_base", "gpt2", "llama3" (whose file is called tokenizer.model), "o200k_base" or "qwen" (default:
--- determined by the file's name). pattern: a regular expression that splits texts into words, instead of an encoding.
--- special_tokens: the special tokens with their ids, instead of those of an encoding.
---@return ps.TextTokenizer
function tokenizer.from_pretrained(path, options)
  caller.typed(path, "string", "tokenizer.from_pretrained: the folder")
  local is_name = path:match("^[%w%-_.]+$") or path:match("^[%w%-_]+/[%w%-_.]+$")
  if is_name and not lfs.attributes(path, "mode") then path = require("ps.pretrained.folder").find(path) end
  return require("ps.tokenizer.text").open(path, options)
end

--- Returns the token ids of a text as a Lua list.
---@param text string
---@param options? {add_special_tokens?: boolean, split_special_tokens?: boolean} the options of other tokenizers. They
--- have no effect, because there are no special tokens.
---@return integer[]
function Bytes:encode(text, options) -- luacheck: ignore 212
  caller.typed(text, "string", "encode: the text")
  caller.options(options, "encode", ENCODE)
  local ids, bytes = {}, ffi.cast("const uint8_t *", text)
  for i = 1, #text do ids[i] = bytes[i - 1] end
  return ids
end

--- Returns the token ids of a text as an int32 buffer. Use it for long texts.
---@param text string
---@return ffi.cdata* ids int32_t[n]
---@return integer n
function Bytes:encode_buffer(text) -- luacheck: ignore 212
  caller.typed(text, "string", "encode: the text")
  local ids, bytes = int_array(math.max(#text, 1)), ffi.cast("const uint8_t *", text)
  for i = 0, #text - 1 do ids[i] = bytes[i] end
  return ids, #text
end

--- Decodes a list, a tensor or an int32 buffer of ids. For a buffer, n must be given.
---@param ids integer[]|ps.Tensor|ffi.cdata*
---@param options? {skip_special_tokens?: boolean, bytes?: boolean, n?: integer}|integer n: number of ids in a buffer. A
--- number in place of the table is n. The other options are those of other tokenizers. They have no effect, because
--- there are no special tokens and the returned text is always the bytes.
---@return string
function Bytes:decode(ids, options) -- luacheck: ignore 212
  local n = options
  if type(options) ~= "number" then n = caller.options(options, "tokenizer:decode", DECODE).n end
  if type(ids) == "cdata" and not n then ids = ids:reshape(ids:numel()):tolist() end
  local first = n and 0 or 1
  if not n then caller.typed(ids, "table", "decode: the list of ids") end
  n = n or #ids
  local bytes = byte_array(math.max(n, 1))
  for i = 0, n - 1 do
    local id = caller.typed(ids[first + i], "number", "decode: a token")
    if id < 0 or id > 255 then error(("decode: token %s is not a byte"):format(tostring(id))) end
    bytes[i] = id
  end
  return ffi.string(bytes, n)
end

--- Appends the tokens of a text to an open shard.
---@param writer ffi.cdata* ps_tokw
---@param text string
function Bytes:append(writer, text) -- luacheck: ignore 212
  caller.typed(text, "string", "the text to tokenize")
  native.check(native.C.ps_tokw_append_bytes(writer, text, #text))
end

local TOKENIZER_JSON = [[
{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"post_processor":null,
"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false},
"decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false},
"model":{"type":"BPE","merges":[],"vocab":%s}}
]]

--- Writes the tokenizer to a folder, in the form of Hugging Face's files. They describe a byte-level BPE without
--- merges, whose ids are the bytes. tokenizer.from_pretrained and transformers can read them. The folder is created if
--- it does not exist.
---@param path string
function Bytes:save_pretrained(path) -- luacheck: ignore 212
  caller.typed(path, "string", "tokenizer:save_pretrained: the folder")
  local vocab = {}
  for byte = 0, 255 do vocab[letters[byte]] = byte end
  require("ps.tokenizer.save").write(path, {
    ["tokenizer.json"] = TOKENIZER_JSON:format(encode(vocab)),
    ["tokenizer_config.json"] = encode { tokenizer_class = "PreTrainedTokenizerFast",
      clean_up_tokenization_spaces = false },
  })
end

require("ps.core.exact").all(Bytes, "tokenizer:", true)

return tokenizer
