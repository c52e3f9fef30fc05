-- SPDX-License-Identifier: BSD-3-Clause
-- ps.TextTokenizer, the object for a tokenizer that was read from Hugging Face's files. It converts batches of texts to
-- tensors, and single texts to ids and back. C code converts texts to ids (src/data/tokenizer.c). This file adds the
-- special tokens around texts, truncates texts, and pads them.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local characters = require "ps.chat.characters"
local classes = require "ps.tokenizer.classes"
local copied = require "ps.core.copied"
local ffi = require "ffi"
local lost = require "ps.core.lost"
local nearest = require "ps.core.nearest"
local json = require "cjson"
local read = require "ps.tokenizer.read"
local utf8 = require "ps.core.utf8"
local save = require "ps.tokenizer.save"
local conversations = require "ps.tokenizer.conversations"
local error = caller.error
local C, check = native.C, native.check
local int_array = array "int32_t"

local text = {}

---@class ps.TextTokenizer: ps.Tokenizer
---@field vocab_size integer the largest id plus 1, including added tokens
---@field model_max_length integer? number of tokens to which texts are truncated if max_length is not given
---@field padding_side "right"|"left"
---@field truncation_side "right"|"left"
---@field pad_token string? the pad token. The fields bos_token, eos_token, unk_token, sep_token, cls_token and
--- mask_token contain the other special tokens. Each of these fields can be set to any token of the vocabulary.
---@field pad_token_id integer? the id of the pad token. The other special tokens also have such a field: bos_token_id
--- and so on.
local Tokenizer = {}

local NAMES = { "bos", "eos", "unk", "sep", "pad", "cls", "mask" }
local PLAIN = { padding_side = true, truncation_side = true, model_max_length = true }
local NAME_OF = {}
for _, name in ipairs(NAMES) do NAME_OF[name .. "_token"], NAME_OF[name .. "_token_id"] = name, name end

local function find(self, token) return C.ps_tok_find(self.handle, token, #token) end

local function get(self, key)
  if Tokenizer[key] ~= nil then return Tokenizer[key] end
  local name = type(key) == "string" and NAME_OF[key]
  local one = name and rawget(self, "special")[name]
  if one then return one[key == name .. "_token" and 1 or 2] end
end

local function set(self, key, value)
  local name = type(key) == "string" and NAME_OF[key]
  if name and key == name .. "_token" then
    if value ~= nil then
      caller.typed(value, "string", "tokenizer." .. key)
      local id = find(self, value)
      if id < 0 then error(("tokenizer.%s: the vocabulary has no token '%s'"):format(key, value)) end
      value = { value, id }
    end
    rawget(self, "special")[name] = value
    return
  end
  if PLAIN[key] then
    if key ~= "model_max_length" then caller.one_of(value, { left = "left", right = "right" }, "tokenizer." .. key)
    elseif value ~= nil then caller.whole(value, "tokenizer.model_max_length", 1) end
    rawget(self, "plain")[key] = value
    return
  end
  local names = { "padding_side", "truncation_side", "model_max_length" }
  for _, one in ipairs(NAMES) do names[#names + 1] = one .. "_token" end
  local near = type(key) == "string" and nearest.find(key, names)
  error(("a tokenizer has no field '%s' that can be set%s"):format(tostring(key),
    near and ("; did you mean '%s'?"):format(near) or ""))
end

local META = { __newindex = set }
function META.__index(self, key)
  if PLAIN[key] then return rawget(self, "plain")[key] end
  return get(self, key)
end

--- See tokenizer.from_pretrained.
---@param path string
---@param options? table
---@return ps.TextTokenizer
function text.open(path, options)
  local made, tokens = read.open(path, options), {}
  local plain = { padding_side = made.padding_side, truncation_side = made.truncation_side,
    model_max_length = made.model_max_length }
  for name, one in pairs(made.special) do tokens[name] = one[1] end
  return setmetatable({ name = made.path, source = path, opened = { tokens = tokens, plain = copied(plain) },
    handle = made.handle, special = made.special, special_ids = made.special_ids or {},
    special_strips = made.special_strips or false,
    type_ids = made.type_ids, template = made.template, splits_special = made.splits_special,
    cleans_up = made.cleans_up,
    vocab_size = tonumber(C.ps_tok_count(made.handle)), out = ffi.new("ps_tok_ids"), bytes = ffi.new("const char *[1]"),
    nbytes = ffi.new("int64_t[1]"), around = { made.single or { { text = 1, kind = 0 } },
      made.pair or { { text = 1, kind = 0 }, { text = 2, kind = 1 } } },
    plain = plain, lost = ffi.new "ps_tok_lost", told_lost = false }, META)
end

--- Writes the tokenizer's files to a folder. tokenizer.from_pretrained and transformers can read the folder. The source
--- files are copied. Settings that were changed are written to tokenizer_config.json.
---@param path string
function Tokenizer:save_pretrained(path)
  local tokens, plain = {}, {}
  for _, name in ipairs(NAMES) do
    local now, was = rawget(self, "special")[name], rawget(self, "opened").tokens[name]
    if (now and now[1]) ~= was then tokens[name .. "_token"] = now and now[1] or json.null end
  end
  for key in pairs(PLAIN) do
    local now, was = rawget(self, "plain")[key], rawget(self, "opened").plain[key]
    if now ~= was then plain[key] = now == nil and json.null or now end
  end
  save.run(rawget(self, "source"), path, tokens, plain)
end

for name, method in pairs(conversations) do Tokenizer[name] = method end

-- Encodes a text. Returns a struct with ids, offsets and n, which is valid until the next call.
local function run(self, one, flags)
  check(C.ps_tok_encode(self.handle, one, #one, flags, self.out))
  if not self.told_lost then lost.tell(self, "a text") end
  return self.out
end

-- Returns PS_TOK_PLAIN if the special tokens in a text must be encoded as ordinary text, and 0 otherwise. `splits` is
-- the option split_special_tokens. If it is nil, the setting in tokenizer_config.json is used.
local function plain_flag(self, splits)
  if splits == nil then splits = rawget(self, "splits_special") end
  return splits and C.PS_TOK_PLAIN or 0
end

-- -- one text -------------------------------------------------------------------------------------------------------
local ENCODE = { add_special_tokens = "boolean", split_special_tokens = "boolean" }

--- Returns the token ids of a text as an int32 buffer. Prefer this method to `encode` for long texts. No special tokens
--- are added.
---@param one string
---@param options? {split_special_tokens?: boolean}
---@return ffi.cdata* ids int32_t[n]
---@return integer n
function Tokenizer:encode_buffer(one, options)
  caller.typed(one, "string", "encode: the text")
  options = caller.options(options, "tokenizer:encode_buffer", { split_special_tokens = "boolean" })
  local out = run(self, one, plain_flag(self, options.split_special_tokens))
  local n = tonumber(out.n)
  local ids = int_array(math.max(n, 1))
  ffi.copy(ids, out.ids, 4 * n)
  return ids, n
end

--- Returns the token ids of a text as a Lua list. The special tokens that the model needs are added around the text.
--- Malformed UTF-8 becomes U+FFFD.
---@param one string
---@param options? {add_special_tokens?: boolean, split_special_tokens?: boolean} add_special_tokens = false: adds no
--- special tokens (default true). split_special_tokens = true: encodes special tokens in the text as ordinary text.
---@return integer[]
function Tokenizer:encode(one, options)
  caller.typed(one, "string", "encode: the text")
  options = caller.options(options, "tokenizer:encode", ENCODE)
  local out = run(self, one, plain_flag(self, options.split_special_tokens))
  local pieces = options.add_special_tokens == false and { { text = 1 } } or self.around[1]
  local ids = {}
  for _, piece in ipairs(pieces) do
    if piece.id then ids[#ids + 1] = piece.id
    else
      local first = #ids
      for i = 0, tonumber(out.n) - 1 do ids[first + 1 + i] = out.ids[i] end
    end
  end
  return ids
end

--- Encodes a text like `encode`, but returns the ids as a text of decimal numbers that are separated by blanks.
---@param one string
---@param options? {add_special_tokens?: boolean, split_special_tokens?: boolean} the options of encode
---@return string
function Tokenizer:encode_line(one, options)
  caller.typed(one, "string", "encode_line: the text")
  options = caller.options(options, "tokenizer:encode_line", ENCODE)
  local out = run(self, one, plain_flag(self, options.split_special_tokens))
  check(C.ps_tok_print(self.handle, out.ids, out.n, self.bytes, self.nbytes))
  local line = ffi.string(self.bytes[0], self.nbytes[0])
  if options.add_special_tokens == false or not self.around[1][2] then return line end
  local parts = {}
  for _, piece in ipairs(self.around[1]) do
    local part = piece.id and tostring(piece.id) or line
    if part ~= "" then parts[#parts + 1] = part end
  end
  return table.concat(parts, " ")
end

--- Appends the tokens of a text to an open shard. No special tokens are added.
---@param writer ffi.cdata* ps_tokw
---@param one string
function Tokenizer:append(writer, one)
  caller.typed(one, "string", "the text to tokenize")
  local out, found = self.out, self.lost
  check(C.ps_tok_take_lost(self.handle, found))            -- discards the counts of earlier texts
  check(C.ps_tok_encode(self.handle, one, #one, C.PS_TOK_PLAIN, out))
  check(C.ps_tok_take_lost(self.handle, found))
  if found.characters > 0 then io.stderr:write(lost.total(rawget(self, "name"), found, "a text")) end
  check(C.ps_tokw_append(writer, out.ids, out.n))
end

-- Adds the numbers of characters that were lost in a block (`found`) to the sums in `all`. Also stores the first lost
-- character in the file and its place for a message. If the file contains JSON lines, `whole` is false, and the place
-- is the number of the line. Otherwise `whole` is the block's text, which begins at byte `from` of the file, and the
-- place is the number of a byte. If a normalizer changed the character, its place is unknown, and all.place is "".
local function add_lost(all, found, whole, from)
  if not all.first then
    local at = whole and whole:find(characters.utf8(tonumber(found.first)), 1, true)
    all.first = tonumber(found.first)
    all.place = at and (", byte %d"):format(from + at) or not whole and (":%d"):format(tonumber(found.line)) or ""
  end
  all.characters = (all.characters or 0) + tonumber(found.characters)
  all.places = (all.places or 0) + tonumber(found.places)
end

local FILE = { field = "string", mark = "whole|boolean", threads = "whole", block = "whole", lossy = "boolean" }
local BLOCK = 2 ^ 24               -- number of bytes per read

-- Raises the error for a file whose byte at offset `at` begins a malformed character. The error names the line, unless
-- the file is a pipe, which cannot be read again.
local function refuse_malformed(file, path, at)
  local line, rest = 1, at
  local can_seek = file:seek "set"
  while can_seek and rest > 0 do                           -- the file may be larger than memory
    local piece = file:read(math.min(rest, BLOCK)) or error(path .. " was truncated while it was read")
    line, rest = line + select(2, piece:gsub("\n", "")), rest - #piece
  end
  error(("%s: not valid UTF-8 at byte %d of the file; convert the file, for example by iconv -f LATIN1 -t UTF-8 %s "
    .. "> NEW, or pass lossy = true to replace such bytes by U+FFFD"):format(
    can_seek and ("%s:%d"):format(path, line) or path, at, path), 0)
end

--- Encodes a file of any size. Calls `give` with the token ids, one piece after the other. The ids are the same as if
--- the file were encoded at once: they do not depend on the sizes of the pieces or on the number of threads. No special
--- tokens are added, and special tokens in the file are encoded as ordinary text.
---@param path string
---@param give fun(ids: ffi.cdata*, n: integer) gets n ids in an int32 buffer, which is valid only during the call
---@param options? {field?: string, mark?: integer|false, threads?: integer, block?: integer, lossy?: boolean} field:
--- the file contains JSON lines, and this field of each line is a document. mark: an id that precedes the ids of each
--- document. threads: number of threads (default 1). block: number of bytes per read. lossy: malformed UTF-8 becomes
--- U+FFFD (default: it is an error that names the line).
---@return integer bytes size of the file in bytes
function Tokenizer:encode_file(path, give, options)
  caller.typed(path, "string", "tokenizer:encode_file: the path")
  caller.callable(give, "tokenizer:encode_file")
  options = caller.options(options, "tokenizer:encode_file", FILE)
  local file, why = io.open(path, "rb")
  if not file then error("cannot open the text file: " .. why) end
  local size = caller.whole(options.block or BLOCK, "tokenizer:encode_file: block", 1)
  local field = options.field
  local block = ffi.new("ps_tok_block", { path = path, field = field, mark = options.mark or -1,
    threads = options.threads or 1, flags = C.PS_TOK_PLAIN })
  local total, rest, want = 0, "", size
  local malformed = not options.lossy and utf8.checker()
  local found, all = ffi.new "ps_tok_lost", {}
  check(C.ps_tok_take_lost(self.handle, found))            -- discards the counts of earlier texts
  local ok, problem = pcall(function()
    repeat
      local piece, unread = file:read(want)
      if unread then error(("%s: %s"):format(path, unread)) end
      local bad = malformed and malformed(piece)
      if bad then refuse_malformed(file, path, bad) end
      total = total + #(piece or "")
      local whole = rest .. (piece or "")
      block.last = piece and 0 or 1
      check(C.ps_tok_encode_block(self.handle, block, whole, #whole, self.out))
      check(C.ps_tok_take_lost(self.handle, found))
      if found.characters > 0 then
        add_lost(all, found, found.line == 0 and whole, total - #whole)
      end
      if self.out.n > 0 then give(self.out.ids, tonumber(self.out.n)) end
      local used = tonumber(block.used)
      rest, want = whole:sub(used + 1), used == 0 and 2 * want or size
    until not piece
  end)
  file:close()
  if all.first then io.stderr:write(lost.total(rawget(self, "name"), all, path .. all.place)) end
  if not ok then error(problem, 0) end
  return total
end

-- -- ids to text ----------------------------------------------------------------------------------------------------
-- Converts a list, a tensor or a buffer of n ids to an int32 buffer. Returns the buffer and the number of ids.
local function buffer_of(ids, n)
  if type(ids) == "cdata" and not n then ids = ids:reshape(ids:numel()):tolist() end
  if n then return ids, n end
  if type(ids) == "number" then ids = { ids } end
  caller.typed(ids, "table", "decode: the list of ids")
  local buffer = int_array(math.max(#ids, 1))
  for i, id in ipairs(ids) do
    caller.whole(id, "decode: a token")
    if id < 0 or id >= 2 ^ 31 then error(("decode: there is no token %.14g"):format(id)) end
    buffer[i - 1] = id
  end
  return buffer, #ids
end

local BATCH_DECODE = { skip_special_tokens = "boolean", bytes = "boolean" }
local DECODE = { skip_special_tokens = "boolean", bytes = "boolean", n = "whole" }

--- Decodes a list, a tensor or an int32 buffer of ids. For a buffer, n must be given.
---@param ids integer[]|integer|ps.Tensor|ffi.cdata*
---@param options? {skip_special_tokens?: boolean, bytes?: boolean, n?: integer}|integer bytes = true: returns the bytes
--- of the tokens unchanged; otherwise invalid UTF-8 becomes U+FFFD. n: number of ids in a buffer.
---@return string
function Tokenizer:decode(ids, options)
  if type(options) == "number" then options = { n = options } end
  options = caller.options(options, "tokenizer:decode", DECODE)
  local buffer, n = buffer_of(ids, options.n)
  local flags = (options.skip_special_tokens and C.PS_TOK_SKIP or 0) + (options.bytes and C.PS_TOK_BYTES or 0)
  check(C.ps_tok_decode(self.handle, buffer, n, flags, self.bytes, self.nbytes))
  local spelt = ffi.string(self.bytes[0], self.nbytes[0])
  return rawget(self, "cleans_up") and not options.bytes and classes.clean_up(spelt) or spelt
end

--- Decodes each list in a list, or each row of a tensor.
---@param rows integer[][]|ps.Tensor [rows, tokens]
---@param options? {skip_special_tokens?: boolean, bytes?: boolean}
---@return string[]
function Tokenizer:batch_decode(rows, options)
  options = caller.options(options, "tokenizer:batch_decode", BATCH_DECODE)
  if type(rows) == "cdata" then rows = rows:tolist() end
  local texts = {}
  for i, row in ipairs(caller.typed(rows, "table", "batch_decode: the rows")) do
    texts[i] = self:decode(row, options)
  end
  return texts
end

--- Returns the token that has the given id, as spelled in the vocabulary.
---@param id integer
---@return string
function Tokenizer:id_to_token(id)
  check(C.ps_tok_name(self.handle, caller.whole(id, "id_to_token: the id"), self.bytes, self.nbytes))
  return ffi.string(self.bytes[0], self.nbytes[0])
end

--- Returns the id of a token, or nil if the vocabulary does not contain the token. The token must be spelled as in the
--- vocabulary.
---@param token string
---@return integer?
function Tokenizer:token_to_id(token)
  local id = find(self, caller.typed(token, "string", "token_to_id: the token"))
  return id >= 0 and id or nil
end

-- -- batches --------------------------------------------------------------------------------------------------------
local CALL = { text_pair = "string|table", padding = "boolean|string", truncation = "boolean|string",
  max_length = "whole",
  pad_to_multiple_of = "whole", offsets = "boolean", add_special_tokens = "boolean", split_special_tokens = "boolean",
  token_type_ids = "boolean" }

-- Encodes a text and returns a copy of its tokens, {ids, offsets, n, first}. `first` is the index of the first token
-- that remains after truncation.
local function tokens_of(self, one, flags)
  local out = run(self, one, flags)
  local n = tonumber(out.n)
  local kept = { n = n, first = 0, ids = int_array(math.max(n, 1)) }
  ffi.copy(kept.ids, out.ids, 4 * n)
  if out.offsets ~= nil then
    kept.offsets = int_array(math.max(2 * n, 1))
    ffi.copy(kept.offsets, out.offsets, 8 * n)
  end
  return kept
end

local function shorten(self, kept, n)
  if self.truncation_side == "left" then kept.first = kept.first + kept.n - n end
  kept.n = n
end

-- Truncates one or two texts, so that all texts and `extra` special tokens have at most `limit` tokens together. `way`
-- is the option truncation. With "longest_first", tokens are removed from the longer text until both texts have the
-- same length, and then from both.
local function truncate(self, way, parts, extra, limit)
  local room = limit - extra
  if room < 0 then error(("max_length is %d, fewer than the %d special tokens around a text"):format(limit, extra)) end
  local a, b = parts[1], parts[2]
  local over = a.n + (b and b.n or 0) - room
  if over <= 0 then return end
  if not b or way ~= "longest_first" then
    local one = a
    if way == "only_second" then one = b or error("truncation = \"only_second\": there is no text_pair") end
    if one.n < over then error(("truncation = \"%s\": %d tokens are too many"):format(way, over)) end
    return shorten(self, one, one.n - over)
  end
  local short = math.min(a.n, b.n)
  if 2 * short >= room then                                -- both texts must be truncated
    local n = a.n > b.n and math.ceil(room / 2) or math.floor(room / 2)
    if a.n == b.n then n = math.floor(room / 2) end
    shorten(self, a, math.min(a.n, n))
    return shorten(self, b, room - a.n)
  end
  local one = a.n > b.n and a or b
  shorten(self, one, room - short)
end

local function list_of(texts, what)
  if type(texts) == "string" then return { texts } end
  caller.typed(texts, "table", what)
  for i, one in ipairs(texts) do caller.typed(one, "string", ("%s: text %d"):format(what, i)) end
  if #texts == 0 then error(what .. ": the list is empty") end
  return texts
end

local WAYS = { longest_first = "longest_first", only_first = "only_first", only_second = "only_second",
  do_not_truncate = false }

local function way_of(truncation)
  if type(truncation) ~= "string" then return truncation and "longest_first" end
  if truncation == "do_not_truncate" then return false end
  return caller.one_of(truncation, WAYS, "tokenizer: truncation")
end

-- Returns the length to which all rows are padded. Without padding, returns the common length of the rows, or raises an
-- error if their lengths differ.
local function width_of(self, asked, rows)
  local padding, longest = asked.padding, 0
  for _, row in ipairs(rows) do longest = math.max(longest, row.n) end
  if padding == true or padding == "longest" then padding = "longest"
  elseif type(padding) == "string" and padding ~= "max_length" and padding ~= "do_not_pad" then
    error(("tokenizer: padding is '%s' (allowed: true, false, longest, max_length, do_not_pad)"):format(padding))
  elseif padding ~= "max_length" then
    for i, row in ipairs(rows) do
      if row.n ~= longest then
        error(("text %d has %d tokens, another has %d: set padding = true, since they are rows of one tensor"):format(i,
          row.n,
          longest))
      end
    end
    return longest
  end
  if not self.pad_token_id then
    error("this tokenizer has no pad_token: set one, such as tokenizer.pad_token = tokenizer.eos_token")
  end
  if padding == "max_length" then
    local limit = asked.max_length or self.model_max_length
    if not limit then error("padding = \"max_length\" needs max_length: the tokenizer's files do not set it") end
    longest = math.max(longest, limit)
  end
  local multiple = asked.pad_to_multiple_of
  if multiple then
    longest = math.ceil(longest / multiple) * multiple
  end
  return longest
end

-- Writes a value n times, starting at index `at`.
local function fill(target, at, n, value)
  if n > 0 then ffi.copy(target + at, int_array(n, value), 4 * n) end
end

-- Writes the tokens of a row to the arrays ids, types and offsets, starting at index `at`.
local function put(row, at, ids, types, offsets)
  for _, piece in ipairs(row.pieces) do
    local part, n = row.parts[piece.text], 1
    if piece.id then ids[at] = piece.id
    else
      n = part.n
      ffi.copy(ids + at, part.ids + part.first, 4 * n)
      if offsets and n > 0 then ffi.copy(offsets + 2 * at, part.offsets + 2 * part.first, 8 * n) end
    end
    if types and piece.kind ~= 0 then fill(types, at, n, piece.kind) end
    at = at + n
  end
end

local function tensor_of(buffer, shape, numel)
  local out = create.empty(shape, { dtype = "int32", device = "cpu" })
  if numel > 0 then check(C.ps_tensor_write(out, buffer, 4 * numel)) end
  return out
end

local function rows_of(self, texts, asked)
  local first = list_of(texts, "tokenizer: the texts")
  local second = asked.text_pair and list_of(asked.text_pair, "tokenizer: text_pair")
  if second and #second ~= #first then
    error(("tokenizer: %d texts, but %d in text_pair"):format(#first, #second))
  end
  local way = way_of(asked.truncation)
  local limit = asked.max_length or self.model_max_length
  if asked.max_length then caller.whole(asked.max_length, "tokenizer: max_length", 1) end
  if way and not limit then error("truncation needs max_length: the tokenizer's files do not set it") end
  local multiple = asked.pad_to_multiple_of
  if multiple then caller.whole(multiple, "tokenizer: pad_to_multiple_of", 1) end
  if way and multiple and asked.padding and asked.padding ~= "do_not_pad" and limit % multiple ~= 0 then
    error(("tokenizer: truncation to %d tokens and pad_to_multiple_of = %d: rows could exceed max_length; "
      .. "set max_length to a multiple of %d"):format(limit, multiple, multiple))
  end
  local flags = (asked.offsets and C.PS_TOK_OFFSETS or 0) + plain_flag(self, asked.split_special_tokens)
  local pieces, extra = {}, 0
  for _, piece in ipairs(self.around[second and 2 or 1]) do
    if piece.text or asked.add_special_tokens ~= false then pieces[#pieces + 1] = piece end
    if piece.id and asked.add_special_tokens ~= false then extra = extra + 1 end
  end
  local rows = {}
  for i, one in ipairs(first) do
    local parts = { tokens_of(self, one, flags), second and tokens_of(self, second[i], flags) or nil }
    if way then truncate(self, way, parts, extra, limit) end
    rows[i] = { parts = parts, pieces = pieces, n = parts[1].n + (parts[2] and parts[2].n or 0) + extra }
  end
  return rows
end

--- Encodes texts to tensors on the cpu. `tok(texts, options)` is the same as `tok:batch(texts, options)`. All rows of a
--- tensor have the same length. Therefore texts of different lengths must be padded.
---@param texts string|string[] the texts; a single text becomes a batch of one
---@param options? {text_pair?: string|string[], padding?: boolean|"longest"|"max_length"|"do_not_pad", truncation?:
--- boolean|"longest_first"|"only_first"|"only_second"|"do_not_truncate", max_length?: integer, pad_to_multiple_of?:
--- integer, offsets?: boolean, add_special_tokens?: boolean, split_special_tokens?: boolean, token_type_ids?: boolean}
--- The options have the meaning that they have in transformers. offsets = true: also returns the byte range of each
--- token in its text.
--- token_type_ids: whether to return token types (default: true if the model uses them).
---@return {input_ids: ps.Tensor, attention_mask: ps.Tensor, token_type_ids: ps.Tensor?, offsets: ps.Tensor?} int32
--- tensors [texts, tokens]. offsets is [texts, tokens, 2] and contains a half-open range (first, last) for each token,
--- so that text:sub(first + 1, last) is the token's text. Special tokens and padding have the range (0, 0).
function Tokenizer:batch(texts, options)
  options = caller.options(options, "tokenizer", CALL)
  local rows = rows_of(self, texts, options)
  local width, pad = width_of(self, options, rows), self.pad_token_id or 0
  local with_types = options.token_type_ids
  if with_types == nil then with_types = self.type_ids end
  local numel = #rows * width
  local ids, mask = int_array(math.max(numel, 1), pad), int_array(math.max(numel, 1))
  local types, offsets = with_types and int_array(math.max(numel, 1)), nil
  if options.offsets then offsets = int_array(math.max(2 * numel, 1)) end
  for i, row in ipairs(rows) do
    local at = (i - 1) * width + (self.padding_side == "left" and width - row.n or 0)
    fill(mask, at, row.n, 1)
    put(row, at, ids, types, offsets)
  end
  local shape = { #rows, width }
  return { input_ids = tensor_of(ids, shape, numel), attention_mask = tensor_of(mask, shape, numel),
    token_type_ids = types and tensor_of(types, shape, numel) or nil,
    offsets = offsets and tensor_of(offsets, { #rows, width, 2 }, 2 * numel) or nil }
end
require("ps.core.exact").all(Tokenizer, "tokenizer:", true)
META.__call = Tokenizer.batch

text.Tokenizer = Tokenizer
return text
