-- SPDX-License-Identifier: BSD-3-Clause
-- The examples of a loader. An example consists of token ids and labels. It is made from a row of a table, which
-- contains a text, a conversation or ids. Lua reads one row after the other and runs the chat template. At the same
-- time, threads encode the texts of the rows that Lua has already read (src/data/encode.c). Examples from files are
-- stored in a cache file. A later loader with the same files, tokenizer and options maps this cache file.
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local chat = require "ps.chat"
local formats = require "ps.data.formats"
local lost = require "ps.core.lost"
local note = require "ps.data.note"
local scope = require "ps.core.scope"
local unpacked = require "ps.data.unpacked"
local IGNORED = require("ps.data.batch").IGNORED
local bit = require "bit"
local cjson = require "cjson"
local ffi = require "ffi"
local leftovers = require "ps.core.leftovers"
local lfs = require "lfs"
local error = caller.error
local C, check = native.C, native.check
local int_array, key_array, float_array = array "int32_t", array "uint64_t", array "float"
local span_array = array "int64_t"

local examples = {}

local VERSION = 3                                          -- version of the format of cache files
local MOST_THREADS = 8

-- The maximum number of texts of a stream that wait to be encoded. It limits the memory for these texts. If the queue
-- is full when another row must be read, the script waits until the oldest text is encoded. ps.data.stream, and not
-- QUEUE, determines which rows are read in advance.
local QUEUE = 1024

---@class ps.Examples
---@field handle ffi.cdata*
---@field count integer
---@field cached boolean true if the examples were read from a cache file
---@field hash string hash of all tokens
---@field key? string hash of the data, the tokenizer and the options, or nil if the data has no key

-- -- encoding -------------------------------------------------------------------------------------------------------
local function free_later(out, free) return ffi.gc(out[0], free) end

local function ids_of(list)
  local buffer = int_array(math.max(#list, 1))
  for i, id in ipairs(list) do buffer[i - 1] = id end
  return buffer
end

-- Returns a list of the ids that the tokenizer puts before a whole text, and a list of the ids that it puts after it.
local function around(tokenizer)
  local before, after = {}, {}
  local list = before
  for _, piece in ipairs(rawget(tokenizer, "around")[1]) do
    if piece.id then list[#list + 1] = piece.id else list = after end
  end
  return before, after
end

-- Converts a list of ranges {first byte, last byte}, counted from 1, to an array of half-open byte ranges, counted
-- from 0.
local function spans_of(self, list)
  local n = list and #list or 0
  if n == 0 then return nil, 0 end
  local spans = span_array(2 * n)
  self.kept[#self.kept + 1] = spans
  for i, span in ipairs(list) do spans[2 * i - 2], spans[2 * i - 1] = span[1] - 1, span[2] end
  return spans, n
end

-- Raises an error that says what to do if `problem` is that a cache file cannot be written.
local function unwritable(problem)
  if problem.name ~= "ENOSPC" and problem.name ~= "EIO" then return end
  error(("ps.data.loader: the token cache: %s; free space, choose another folder (cache = \"folder\"), or keep "
    .. "tokens in memory (cache = false)"):format(tostring(problem)))
end

local Encoder = {}
Encoder.__index = Encoder

-- Returns an encoder. It encodes texts and stores the result as examples in `handle`. place(i) returns the file and
-- line of example i, for errors.
local function encoder_of(tokenizer, handle, place, queue)
  local special, before, after = {}, around(tokenizer)
  for id in pairs(rawget(tokenizer, "special_ids")) do special[#special + 1] = id end
  table.sort(special)
  local lists = { ids_of(special), ids_of(before), ids_of(after) }       -- kept alive until the call copies them
  local config = ffi.new("ps_encoder_config", { threads = math.max(1, math.min(MOST_THREADS, C.ps_threads())),
    special = lists[1], n_special = #special, prefix = lists[2], n_prefix = #before, suffix = lists[3],
    n_suffix = #after, flags = rawget(tokenizer, "splits_special") and C.PS_TOK_PLAIN or 0, queue = queue or 0 })
  local out = ffi.new("ps_encoder *[1]")
  check(C.ps_encoder_new(rawget(tokenizer, "handle"), handle, config, out))
  return setmetatable({ handle = free_later(out, C.ps_encoder_free), text = ffi.new "ps_encoder_text", place = place,
    kept = {}, name = rawget(tokenizer, "name") }, Encoder)
end

-- Raises an error if `rc`, the result of a C function, is an error code. The error contains the file and line of the
-- example that caused it.
function Encoder:checked(rc)
  if rc >= 0 then return end
  local failed = tonumber(C.ps_encoder_failed(self.handle))
  if failed < 0 then check(rc) end
  local _, problem = pcall(check, rc)
  unwritable(problem)
  error(("ps.data.loader: %s: %s"):format(self.place(failed + 1), tostring(problem)))
end

-- Returns two lists of byte ranges of a rendered conversation. The first list contains the ranges in which special
-- tokens are encoded as ordinary text: messages, and roles that templates do not know. The second list contains the
-- roles that templates know.
local function foreign_of(rendered)
  local foreign, known, mixed = {}, {}, false
  for i, part in ipairs(rendered.message or {}) do foreign[i] = part end
  for _, part in ipairs(rendered.roles or {}) do
    if part.known then known[#known + 1] = part else foreign[#foreign + 1], mixed = part, true end
  end
  if mixed then table.sort(foreign, function(a, b) return a[1] < b[1] end) end
  return foreign, known
end

-- Encodes `rendered` as example i. `rendered` is a table {text =, message =, roles =, spans =} from
-- tokenizer:render_chat. If rendered.spans is nil, the whole text is trained.
function Encoder:put(i, rendered, need, weight)
  local text = self.text
  self.kept = {}
  text.text, text.nbytes, text.weight, text.need = rendered.text, #rendered.text, weight, need
  text.number = i - 1
  text.whole = rendered.spans and 0 or 1
  local foreign, known = foreign_of(rendered)
  text.message, text.n_message = spans_of(self, foreign)
  text.role, text.n_role = spans_of(self, known)
  text.trained, text.n_trained = spans_of(self, rendered.spans)
  self:checked(C.ps_encoder_put(self.handle, text))
end

function Encoder:wait() self:checked(C.ps_encoder_finish(self.handle)) end

--- Ends the threads. If the vocabulary could not represent some characters, prints the number of these characters. Only
--- one rank prints the number, because all ranks encode the same texts.
function Encoder:close()
  local found = ffi.new "ps_tok_lost"
  check(C.ps_encoder_lost(self.handle, found))
  C.ps_encoder_free(ffi.gc(self.handle, nil))
  if found.characters > 0 then note(lost.total(self.name, found, self.place(tonumber(found.example) + 1))) end
end

-- -- rows -----------------------------------------------------------------------------------------------------------
-- The smallest and the largest weight. With these limits, sums of weights and their inverses fit into fp32.
local LEAST_WEIGHT, MOST_WEIGHT = 1e-12, 1e12
local WEIGHTS = "a weight must be 0, or a number of 1e-12 to 1e12"

local function is_weight(w)
  return type(w) == "number" and (w == 0 or w >= LEAST_WEIGHT and w <= MOST_WEIGHT)
end

local function weight_of(row, field, rows, i)
  if not field then return 1 end
  local weight = row[field]
  if not is_weight(weight) then
    local text = type(weight) == "string" and tonumber(weight) and ("the text '%s', as all values of CSV and TSV are; "
      .. "convert it: rows:map(function(row) row.%s = tonumber(row.%s) return row end)"):format(weight, field, field)
    error(("ps.data.loader: %s: the field '%s' is %s"):format(rows:place(i), field, text
      or (weight == nil and "missing" or tostring(weight)) .. "; " .. WEIGHTS))
  end
  return weight
end

local function add(handle, i, ids, labels, weights, weight)
  local n = #ids
  local label_list, weight_list = labels and ids_of(labels) or nil, nil
  if weights then
    weight_list = float_array(math.max(n, 1))
    for k, w in ipairs(weights) do weight_list[k - 1] = w end
  end
  check(C.ps_examples_put(handle, i - 1, ids_of(ids), label_list, weight_list, n, weight))
end

-- Checks row i, which contains ids, and stores it as example i.
local function add_ids(handle, rows, i, row, tokenizer, weight)
  local ids, labels = formats.ids_of(rows, i, row, tokenizer.vocab_size)
  local trained = not labels
  for _, label in ipairs(labels or {}) do trained = trained or label ~= IGNORED end
  if not trained then
    error(("ps.data.loader: %s: none of its %d tokens are trained: every label is %d; remove the row"):format(
      rows:place(i), #ids, IGNORED))
  end
  local weights = row.loss_weights
  if weights == cjson.null then weights = nil end
  if weights ~= nil and #caller.list(weights, rows:place(i) .. ": loss_weights") ~= #ids then
    error(("%s: there are %d loss_weights for %d input_ids; give one weight per id"):format(rows:place(i), #weights,
      #ids))
  end
  for k, w in ipairs(weights or {}) do
    if not is_weight(w) then
      error(("%s: loss_weights[%d] is %s; %s"):format(rows:place(i), k, tostring(w), WEIGHTS))
    end
  end
  add(handle, i, ids, labels, weights, weight)
end

-- Makes labels from a list of ids and a mask (1 for a trained id). This function is used for tokenizers that were not
-- made by ps.tokenizer.
local function labels_of(ids, mask, place, train_on)
  local labels, trained = {}, 0
  for k, id in ipairs(ids) do
    labels[k] = mask[k] == 1 and id or IGNORED
    trained = trained + mask[k]
  end
  if trained == 0 or train_on == "assistant" and trained == #ids then
    error(("ps.data.loader: %s: %s of its %d tokens are trained; `psluajit tools/data.lua show` prints what the model "
      .. "sees"):format(place, trained == 0 and "none" or "all", #ids))
  end
  return labels
end

-- Returns a function add(i), which makes an example from row i of a table. Also returns the encoder whose threads
-- complete the example, or nil if add(i) completes it. `form` is the form of the table's rows.
local function adder(handle, rows, tokenizer, form, given, queue)
  local function place(i) return rows:place(i) end
  local own = rawget(tokenizer, "handle") ~= nil
  local threaded = own and not rawget(tokenizer, "special_strips")       -- encode.c does not support lstrip and rstrip
  local encoder = own and form ~= "ids" and encoder_of(tokenizer, handle, place, queue) or nil
  local train_on, field = given.train_on or "assistant", given.weight_field
  local need = train_on == "assistant" and 2 or 1
  local keys = (form == "ids" or form == "text") and { "text", "input_ids", "labels", "loss_weights", field } or {}
  return function(i)
    local row = formats.check(rows, i, form)
    formats.check_keys(rows, i, keys)                      -- formats.conversation_of checks the keys of conversations
    local weight = field and weight_of(row, field, rows, i) or 1
    if form == "ids" then add_ids(handle, rows, i, row, tokenizer, weight)
    elseif form == "text" then
      local text = row.text
      if type(text) ~= "string" then caller.typed(text, "string", place(i) .. ": text") end
      if own then encoder:put(i, { text = text }, 0, weight)
      else
        local ids = tokenizer:encode(text)
        if #ids == 0 then error(("ps.data.loader: %s has no tokens"):format(place(i))) end
        add(handle, i, ids, nil, nil, weight)
      end
    else
      local messages, tools = formats.conversation_of(rows, i, form, row)
      local how = { train_on = train_on, date = given.date, tools = tools }
      if threaded then
        encoder:put(i, formats.of_row(rows, i, tokenizer.render_chat, tokenizer, messages, how), need, weight)
      else
        if not tokenizer.apply_chat_template then
          error(("ps.data.loader: %s is a conversation, but the tokenizer has no chat template"):format(place(i)))
        end
        local ids, mask = formats.of_row(rows, i, tokenizer.apply_chat_template, tokenizer, messages, how)
        add(handle, i, ids, labels_of(ids, mask, place(i), train_on), nil, weight)
      end
    end
  end, encoder
end

-- Makes examples from all rows of a table by calling add_row(i) for each row. `encoder` is the encoder that add_row
-- uses, or nil.
local function add_all(rows, add_row, encoder)
  local ok, problem = xpcall(function() for i = 1, #rows do add_row(i) end end, scope.trace)
  if encoder then
    local encoded, earlier = xpcall(encoder.wait, scope.trace, encoder)
    encoder:close()
    if not encoded then error(earlier, 0) end              -- the row of this error is before the row of `problem`
  end
  if not ok then error(problem, 0) end
end

-- -- the cache ------------------------------------------------------------------------------------------------------
local function hash_of(list)
  local text = table.concat(list, "\0")
  local key = key_array(2)
  key[0] = C.ps_xxh3(text, #text)
  text = text .. "\1"
  key[1] = C.ps_xxh3(text, #text)
  return key
end

-- Returns the hashes of a tokenizer's files as a text, or nil if it has no files.
local function tokenizer_key(tokenizer)
  local source = rawget(tokenizer, "source")
  if not source or rawget(tokenizer, "handle") == nil then return nil end
  local list, names = {}, {}
  if lfs.attributes(source, "mode") == "directory" then
    for name in lfs.dir(source) do
      if name:find "%.json$" or name:find "%.jinja$" or name:find "%.txt$" or name:find "%.model$" then
        names[#names + 1] = source .. "/" .. name
      end
    end
    table.sort(names)
  else names[1] = source end
  local hash = ffi.new "uint64_t[1]"
  for _, name in ipairs(names) do
    if not name:find("safetensors", 1, true) then
      check(C.ps_file_hash(name, hash))
      list[#list + 1] = name:match "[^/]*$" .. bit.tohex(hash[0])
    end
  end
  for name, token in pairs(tokenizer:special_tokens()) do list[#list + 1] = name .. "=" .. tostring(token) end
  table.sort(list)
  return table.concat(list, " ")
end

-- Returns whether the chat template in the tokenizer's folder uses the date.
local function reads_date(tokenizer, form)
  if form == "ids" or form == "text" then return false end
  return tokenizer:chat_template():reads_date() or tokenizer:chat_template({ tools = true }):reads_date()
end

-- Returns the key that identifies the data in a cache file. Returns nil if a part of the data cannot have a key, such
-- as a Lua function.
local function key_of(rows, tokenizer, form, given)
  if type(given.train_on) == "function" then return nil end
  local tok = tokenizer_key(tokenizer)
  local files = tok and rows:key()                         -- this call reads the files
  if not files then return nil end
  return hash_of { VERSION, files, tok, form, given.train_on or "assistant",
    reads_date(tokenizer, form) and given.date or "", given.weight_field or "" }
end

-- The age in seconds at which an incomplete cache file is removed if the process that wrote it no longer exists.
local STALE_S = 86400

-- Returns the folder for cache files, or nil if there is no such folder. If the script chose the folder, `given` is its
-- path.
local function cache_folder(given)
  local folder = type(given) == "string" and given or unpacked.folder "examples"
  if folder == given then lfs.mkdir(given) end
  if folder and lfs.attributes(folder, "mode") == "directory" then
    leftovers.remove(folder, ".*%.examples", STALE_S)
  end
  return folder
end

-- Maps a cache file. Returns nil if there is no cache file for this data.
local function mapped(path, key)
  local out = ffi.new("ps_examples *[1]")
  if lfs.attributes(path, "mode") ~= "file" or C.ps_examples_open(path, key, out) < 0 then return nil end
  return free_later(out, C.ps_examples_free)
end

-- Creates examples by calling fn(handle), and returns the handle. If `path` is not "", the examples are stored in a
-- cache file. If this file cannot be created, the examples are kept in memory. However, if `given` is true (the script
-- chose the folder), this function raises an error instead. When fn returns, no encoder may still use the handle.
local function made(path, key, wide, fn, given)
  local out = ffi.new("ps_examples *[1]")
  local rc = C.ps_examples_new(path, key, wide and 1 or 0, out)
  if rc < 0 and path ~= "" and not given then rc = C.ps_examples_new("", key, wide and 1 or 0, out) end
  local ok, problem = pcall(check, rc)
  if not ok then
    error("ps.data.loader: the cache folder cannot be written to: " .. tostring(problem))
  end
  local handle = free_later(out, C.ps_examples_free)
  ok, problem = xpcall(function()
    fn(handle)
    check(C.ps_examples_finish(handle))
  end, scope.trace)
  if ok then return handle end
  C.ps_examples_free(ffi.gc(handle, nil))                  -- this also removes the incomplete file
  unwritable(problem)
  error(problem, 0)
end

local function text_of(key) return key and bit.tohex(key[0]) .. bit.tohex(key[1]) or nil end

local function finished(handle, cached, key)
  return { handle = handle, count = tonumber(C.ps_examples_count(handle)), cached = cached,
    hash = bit.tohex(C.ps_examples_hash(handle)), key = text_of(key) }
end

-- -- streams --------------------------------------------------------------------------------------------------------
---@class ps.ExampleSource examples that are made one by one, in any order, while a loader already uses them
---@field handle ffi.cdata*
---@field count integer
---@field key? string the same as ps.Examples.key
---@field is_stream boolean true
---@field add fun(i: integer) makes example i, or begins to make it
---@field gathered fun(): ps.Examples returns all examples in the order of the table; add must have been called for each
local Source = {}
Source.__index = Source

--- Stores the examples whose texts the threads have encoded. If `wait` is true, first waits until the threads have
--- encoded all texts.
---@param wait boolean
function Source:drain(wait)
  local encoder = self.encoder
  if encoder then encoder:checked((wait and C.ps_encoder_finish or C.ps_encoder_drain)(encoder.handle)) end
end

--- Ends the threads that encode texts. `add` must have been called for all examples.
function Source:close()
  if self.encoder then self.encoder:close() end
  self.encoder = nil
end

local function source_of(rows, tokenizer, form, given, key, gather)
  local out = ffi.new "ps_examples *[1]"
  check(C.ps_examples_scattered(#rows, form == "ids" and 1 or 0, out))
  local handle = free_later(out, C.ps_examples_free)
  local add_row, encoder = adder(handle, rows, tokenizer, form, given, QUEUE)
  return setmetatable({ handle = handle, count = #rows, encoder = encoder, key = text_of(key), is_stream = true,
    add = add_row, gathered = function() return gather(handle) end }, Source)
end

--- Returns the examples of a table. If there is a cache file for the examples, they are read from this file. If several
--- ranks start at the same time, each rank writes the cache file and replaces the file of another rank. This is
--- harmless, because all ranks write the same contents.
---@param rows ps.DataTable
---@param tokenizer ps.Tokenizer
---@param given {train_on?: string|function, date?: string, weight_field?: string, cache?: boolean|string, stream?:
--- boolean} cache: a folder, or false for no cache. stream = true: returns a ps.ExampleSource, unless the cache
--- contains the examples.
---@return ps.Examples|ps.ExampleSource
function examples.of_table(rows, tokenizer, given)
  if #rows == 0 then error(("ps.data.loader: the table has no rows: %s"):format(tostring(rows))) end
  local form = formats.recognise(rows, { check = 1 })
  if type(given.train_on) == "string" then caller.one_of(given.train_on, chat.TRAIN_ON, "ps.data.loader: train_on") end
  if form:find "preference" then
    error(("ps.data.loader: rows in the form '%s' are for preference training, which needs pairs; this loader does not "
      .. "read them"):format(form))
  end
  if given.date ~= nil then chat.moment(given.date) end     -- check the date even if it is not needed (cache)
  given = setmetatable({ date = given.date or os.date "%Y-%m-%d" }, { __index = given })  -- the same for all rows
  local key = given.cache ~= false and key_of(rows, tokenizer, form, given)
  local folder = key and cache_folder(given.cache)
  local path = folder and ("%s/%s.examples"):format(folder, bit.tohex(key[0])) or ""
  local handle = folder and mapped(path, key)
  if handle then return finished(handle, true, key) end
  local function make(fn)
    return finished(made(path, key or key_array(2), form == "ids", fn, type(given.cache) == "string"), false, key)
  end
  if given.stream then
    return source_of(rows, tokenizer, form, given, key, function(scattered)
      local function gather(new) check(C.ps_examples_gather(new, scattered)) end
      local ok, all = pcall(make, gather)
      if ok then return all end
      if path == "" then error(all, 0) end
      note(("psluajit: %s\nThe tokens stay in memory, and the next run tokenizes again.\n"):format(tostring(all)))
      path = ""                                            -- training continues, because all tokens are in memory
      return make(gather)
    end)
  end
  return make(function(new) add_all(rows, adder(new, rows, tokenizer, form, given)) end)
end

--- Returns the examples of a list of texts.
---@param texts string[]
---@param tokenizer ps.Tokenizer
---@return ps.Examples
function examples.of_texts(texts, tokenizer)
  return finished(made("", key_array(2), false, function(handle)
    local own = rawget(tokenizer, "handle") ~= nil
    local function place(i) return ("texts[%d]"):format(i) end
    local encoder = own and encoder_of(tokenizer, handle, place)
    add_all(texts, function(i)
      local text = texts[i]
      if type(text) ~= "string" then
        error(("ps.data.loader: texts[%d] is a %s, not a string"):format(i, type(text)))
      end
      if own then encoder:put(i, { text = text }, 0, 1)
      else
        local ids = tokenizer:encode(text)
        if #ids == 0 then error(("ps.data.loader: texts[%d] has no tokens; remove it from the list"):format(i)) end
        add(handle, i, ids, nil, nil, 1)
      end
    end, encoder)
  end), false)
end

return examples
