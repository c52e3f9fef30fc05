-- SPDX-License-Identifier: BSD-3-Clause
-- Tokenizers. A tokenizer is an object with the following members:
--
--   vocab_size                   the number of ids
--   :encode(text)                returns the ids of a text
--   :decode(ids)                 returns the text of a list of ids
--   :append(writer, text)        optional: writes a text's tokens directly to a shard, without a Lua table
--
-- This file contains the byte tokenizer. tokenizer/text.lua contains the tokenizers that are read from Hugging Face's
-- files.
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

--- Returns the byte tokenizer: each byte of a text is a token, whose id is the byte's value.
---@return ps.Tokenizer
function tokenizer.bytes() return setmetatable({}, Bytes) end

--- Reads a tokenizer from a Hugging Face folder, or from one of the folder's files. Three kinds of files are supported.
--- tokenizer.json contains byte-level BPE, BPE over characters with byte_fallback (as in Llama 2), or WordPiece.
--- vocab.json (or encoder.json) with merges.txt (or vocab.bpe) contains the BPE of GPT-2 and RoBERTa. vocab.txt
--- contains the WordPiece of BERT.
---
--- Settings are read from tokenizer_config.json and its companions. If these files name the tokenizer's class, four of
--- their settings override tokenizer.json, as in transformers: add_prefix_space, do_lower_case, strip_accents and
--- tokenize_chinese_chars. The special tokens and the added_tokens_decoder in these files are added to the tokens of
--- tokenizer.json. If a setting is not supported, this function raises an error that contains the setting's name.
---
--- `path` can also be a .tiktoken file, which contains the ranks of an encoding. If `path` is neither a folder nor a
--- file, it is the name of a model in Hugging Face's cache, as in ps.from_pretrained.
---@param path string
---@param options? {encoding?: string, pattern?: string, special_tokens?: table<string, integer>} for a .tiktoken file.
--- encoding: "cl100k_base", "gpt2", "llama3" (whose file is called tokenizer.model), "o200k_base" or "qwen" (default:
--- determined by the file's name). pattern: a regular expression that splits texts into words, in place of the
--- encoding's expression. special_tokens: the ids of the special tokens, in place of the encoding's special tokens.
---@return ps.TextTokenizer
function tokenizer.from_pretrained(path, options)
  caller.typed(path, "string", "tokenizer.from_pretrained: the folder")
  local is_name = path:match("^[%w%-_.]+$") or path:match("^[%w%-_]+/[%w%-_.]+$")
  if is_name and not lfs.attributes(path, "mode") then path = require("ps.pretrained.folder").find(path) end
  return require("ps.tokenizer.text").open(path, options)
end

--- Returns the token ids of a text as a Lua list.
---@param text string
---@param options? {add_special_tokens?: boolean, split_special_tokens?: boolean} accepted because other tokenizers have
--- these options; they have no effect, because the byte tokenizer has no special tokens
---@return integer[]
function Bytes:encode(text, options) -- luacheck: ignore 212
  caller.typed(text, "string", "encode: the text")
  caller.options(options, "encode", ENCODE)
  local ids, bytes = {}, ffi.cast("const uint8_t *", text)
  for i = 1, #text do ids[i] = bytes[i - 1] end
  return ids
end

--- Returns the token ids of a text as an int32 buffer. Prefer this method to `encode` for long texts.
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
--- number in place of the table is n. The other two options are accepted because other tokenizers have them. They have
--- no effect: the byte tokenizer has no special tokens, and it always returns the bytes unchanged.
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

--- Writes the tokenizer to a folder, in the form of Hugging Face's files. The files describe a byte-level BPE without
--- merges, in which the id of a token is the value of its byte. tokenizer.from_pretrained and transformers can read
--- the files. The folder is created if it does not exist.
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
