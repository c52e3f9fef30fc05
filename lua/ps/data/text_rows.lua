-- SPDX-License-Identifier: BSD-3-Clause
-- Rows of texts or of conversations for ps.data.loader. Each is encoded to ids and labels once, when the loader is
-- made. A batch is some of the rows, padded at their ends to the longest of them, with labels for a causal language
-- model. The order of the rows depends only on the seed and the epoch.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local ffi = require "ffi"
local error = caller.error
local C = native.C
local int_array, key_array = array "int32_t", array "uint64_t"

local formats = require "ps.data.formats"
local tables = require "ps.data.table"
local IGNORED = require("ps.data.batch").IGNORED

---@class ps.TextRows
---@field count integer texts
---@field seq integer most tokens of a row
---@field cut integer number of texts that were longer, and lost their last tokens
---@field dropped integer number of rows left out: longer than seq, or without a trained token after the cut
---@field private ids ffi.cdata* int32_t[], all texts one after the other
---@field private labels ffi.cdata* int32_t[] by id; -100 for a token that is not trained
---@field private starts integer[] where text i begins in `ids`, from 0; the last entry is the end
---@field private masked boolean some labels differ from the ids
---@field private pad integer
---@field private to_seq boolean every row has seq tokens
local Rows = {}
Rows.__index = Rows

local rows = {}

-- Two buffers of the same length that grow: ids and labels.
local function buffers()
  local self = { room = 4096, n = 0, ids = int_array(4096), labels = int_array(4096) }
  function self.reserve(n)
    if self.n + n <= self.room then return end
    self.room = math.max(2 * self.room, self.n + n)
    for _, name in ipairs { "ids", "labels" } do
      local more = int_array(self.room)
      ffi.copy(more, self[name], 4 * self.n)
      self[name] = more
    end
  end
  return self
end

-- Makes rows of n examples. example(i) returns the ids of example i, their labels (nil: the ids themselves), and a
-- function that returns the example's place for errors. too_long: the treatment of rows of more than seq tokens.
local function collected(n, example, seq, too_long)
  local all, starts, cut, dropped, masked = buffers(), { 0 }, 0, 0, false
  for i = 1, n do
    local ids, labels, place = example(i)
    local take, trained = math.min(#ids, seq), labels == nil
    masked = masked or labels ~= nil
    if take < #ids and too_long == "error" then
      error(("ps.data.loader: %s has %d tokens, more than seq = %d"):format(place(), #ids, seq))
    end
    for k = 1, labels and take or 0 do trained = trained or labels[k] ~= IGNORED end
    if take < #ids and (too_long == "drop" or not trained) then dropped = dropped + 1
    else
      if take < #ids then cut = cut + 1 end
      all.reserve(take)
      for k = 1, take do
        all.ids[all.n + k - 1], all.labels[all.n + k - 1] = ids[k], labels and labels[k] or ids[k]
      end
      all.n = all.n + take
      starts[#starts + 1] = all.n
    end
  end
  return { count = #starts - 1, seq = seq, cut = cut, dropped = dropped, ids = all.ids, labels = all.labels,
    starts = starts, masked = masked }
end

local function finish(self, tokenizer, to_seq)
  self.pad, self.to_seq = tokenizer.pad_token_id or tokenizer.eos_token_id or 0, to_seq
  return setmetatable(self, Rows)
end

--- Reads the texts.
---@param texts string[]
---@param tokenizer ps.Tokenizer
---@param seq integer
---@param to_seq boolean pad rows to seq, not to the longest of their batch
---@param too_long "cut"|"drop"|"error"
---@return ps.TextRows
function rows.read(texts, tokenizer, seq, to_seq, too_long)
  return finish(collected(#texts, function(i)
    local text = texts[i]
    if type(text) ~= "string" then error(("ps.data.loader: texts[%d] is a %s, not a string"):format(i, type(text))) end
    local ids = tokenizer:encode(text)
    if #ids == 0 then error(("ps.data.loader: texts[%d] has no tokens; remove it from the list"):format(i)) end
    return ids, nil, function() return ("texts[%d]"):format(i) end
  end, seq, too_long), tokenizer, to_seq)
end

-- Returns labels for ids by a mask: 1 trains an id, 0 does not. At least one id must be trained, and with train_on =
-- "assistant" not all of them.
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

--- Reads the rows of a table of examples: conversations (encoded by the tokenizer's chat template; the turns that
--- train_on names are trained), texts, or ids with labels.
---@param examples ps.DataTable
---@param tokenizer ps.TextTokenizer
---@param seq integer
---@param to_seq boolean
---@param too_long "cut"|"drop"|"error"
---@param options {train_on?: string|function, date?: string} as in tokenizer:apply_chat_template
---@return ps.TextRows
function rows.of_table(examples, tokenizer, seq, to_seq, too_long, options)
  local form, train_on = formats.recognise(examples), options.train_on or "assistant"
  if form:find "preference" then
    error(("ps.data.loader: rows in the form '%s' are for training by preferences"):format(form))
  end
  return finish(collected(#examples, function(i)
    local function place() return examples:place(i) end
    if form == "text" then
      local ids = tokenizer:encode(caller.typed(examples[i].text, "string", place() .. ": text"))
      if #ids == 0 then error(("ps.data.loader: %s has no tokens"):format(place())) end
      return ids, nil, place
    elseif form == "ids" then
      local ids, labels = formats.ids(examples, i, tokenizer.vocab_size)
      return ids, labels, place
    end
    local messages, tools = formats.conversation(examples, i, form)
    local ids, mask = tokenizer:apply_chat_template(messages,
      { train_on = train_on, date = options.date, tools = tools })
    return ids, labels_of(ids, mask, place(), train_on), place
  end, seq, too_long), tokenizer, to_seq)
end

--- A hash of all ids and lengths, which is equal for two lists with the same rows.
---@return string
function Rows:hash()
  local lengths = int_array(self.count)
  for i = 1, self.count do lengths[i - 1] = self.starts[i + 1] - self.starts[i] end
  local nbytes = 4 * self.starts[self.count + 1]
  local both = key_array(2)
  both[0] = C.ps_xxh3(self.ids, nbytes)
  both[1] = C.ps_xxh3(lengths, 4 * self.count)
  local all = C.ps_xxh3(both, 16)
  if not self.masked then return bit.tohex(all) end
  both[0], both[1] = all, C.ps_xxh3(self.labels, nbytes)
  return bit.tohex(C.ps_xxh3(both, 16))
end

--- The order of the texts in an epoch: their numbers, from 1.
---@param seed integer
---@param epoch integer
---@param shuffle boolean
---@return integer[]
function Rows:order(seed, epoch, shuffle)
  local order, keys, word = {}, {}, key_array(3)
  for i = 1, self.count do order[i] = i end
  if not shuffle then return order end
  word[0], word[1] = seed, epoch
  for i = 1, self.count do                                   -- each text draws a number, by which the texts are sorted
    word[2] = i
    keys[i] = tonumber(bit.rshift(C.ps_xxh3(word, 24), 11))
  end
  table.sort(order, function(a, b)
    if keys[a] ~= keys[b] then return keys[a] < keys[b] end
    return a < b
  end)
  return order
end

--- The batch of some texts.
---@param order integer[]
---@param first integer the place of the first text in `order`, from 1
---@param n integer
---@param device? string
---@return {input_ids: ps.Tensor, attention_mask: ps.Tensor, labels: ps.Tensor} batch int32 [n, tokens] each
function Rows:batch(order, first, n, device)
  local longest = self.to_seq and self.seq or 0
  for i = first, first + n - 1 do
    longest = math.max(longest, self.starts[order[i] + 1] - self.starts[order[i]])
  end
  local ids, mask, labels = int_array(n * longest), int_array(n * longest), int_array(n * longest)
  for row = 0, n - 1 do
    local from = self.starts[order[first + row]]
    local length, at = self.starts[order[first + row] + 1] - from, row * longest
    for k = 0, longest - 1 do
      local is = k < length
      ids[at + k] = is and self.ids[from + k] or self.pad
      mask[at + k], labels[at + k] = is and 1 or 0, is and self.labels[from + k] or IGNORED
    end
  end
  local batch = {}
  for name, values in pairs { input_ids = ids, attention_mask = mask, labels = labels } do
    batch[name] = create.empty({ n, longest }, { dtype = "int32", device = device })
    native.check(C.ps_tensor_write(batch[name], values, 4 * n * longest))
  end
  return batch
end

-- Options that only a loader of shards takes.
local OF_SHARDS = { "shards", "file", "width", "first", "last", "split", "vocab", "ahead" }

--- Sets the fields of a loader of texts or of a table of examples.
---@param self table the loader, with global_batch and world_size
---@param options table as of ps.data.loader
---@return table self
function rows.fill(self, options)
  for _, name in ipairs(OF_SHARDS) do
    if options[name] ~= nil then
      error(("ps.data.loader: %s is for token shards, not for texts: leave one of the two out"):format(name))
    end
  end
  local batch, global = options.batch, self.global_batch
  caller.whole(batch, "ps.data.loader: batch", 1)
  caller.whole(options.seq, "ps.data.loader: seq", 1)
  local tokenizer = caller.typed(options.tokenizer, "table", "ps.data.loader: the tokenizer, which texts need,")
  local pads = { longest = 1, max_length = 2 }
  local to_seq = caller.one_of(options.padding or "longest", pads, "ps.data.loader: padding") == pads.max_length
  local long = options.too_long or "cut"
  caller.one_of(long, { cut = true, drop = true, error = true }, "ps.data.loader: too_long")
  if options.table then
    if not tables.is(options.table) then error "ps.data.loader: table is what ps.data.table gives" end
    self.rows = rows.of_table(options.table, tokenizer, options.seq, to_seq, long, options)
  else
    local texts = caller.list(options.texts, "ps.data.loader: texts")
    self.rows = rows.read(texts, tokenizer, options.seq, to_seq, long)
  end
  local n, what = self.rows.count, options.table and "rows" or "texts"
  local drop, rest = options.drop_last ~= false, n % global
  if n < (drop and global or 1) then
    local hint = self.rows.dropped > 0 and ("; %d of more than seq = %d tokens were left out"):format(
      self.rows.dropped, options.seq) or n > 0 and "; drop_last = false gives a smaller one" or ""
    error(("ps.data.loader: %d %s are fewer than a batch of %d (%d on each of %d ranks)%s"):format(n, what, global,
      batch, self.world_size, hint))
  end
  if not drop and rest > 0 and rest < self.world_size then
    error(("ps.data.loader: %d %s in batches of %d leave %d, too few for %d ranks: drop_last = true leaves them out")
      :format(n, what, global, rest, self.world_size))
  end
  self.texts, self.drop_last, self.at = self.rows:hash(), drop, { epoch = 0, batch = 0 }
  self.batches = drop and math.floor(n / global) or math.ceil(n / global)
  return self
end

return rows
