-- SPDX-License-Identifier: BSD-3-Clause
-- Rows of texts for ps.data.loader: a list of strings becomes ids once, when the loader is made. A batch is the rows of
-- some texts, padded behind to the longest of them, with labels for a causal language model. Which texts come when
-- depends on the seed and the epoch alone.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local ffi = require "ffi"
local error = caller.error
local C = native.C
local int_array, key_array = array "int32_t", array "uint64_t"

local IGNORED = require("ps.data.batch").IGNORED

---@class ps.TextRows
---@field count integer texts
---@field seq integer tokens of a row at most
---@field cut integer texts that were longer, and lost their last tokens
---@field private ids ffi.cdata* int32_t[], all texts one after the other
---@field private starts integer[] where text i begins in `ids`, from 0; one more at the end
---@field private pad integer
---@field private to_seq boolean every row has seq tokens
local Rows = {}
Rows.__index = Rows

local rows = {}

-- All ids one after the other, no text with more than `seq`; where each text begins; how many were cut.
local function encoded(texts, tokenizer, seq)
  local room, n, starts, cut = 4096, 0, {}, 0
  local all = int_array(room)
  for i, text in ipairs(texts) do
    if type(text) ~= "string" then error(("ps.data.loader: texts[%d] is a %s, not a string"):format(i, type(text))) end
    local ids = tokenizer:encode(text)
    if #ids == 0 then error(("ps.data.loader: texts[%d] has no tokens: take it out of the list"):format(i)) end
    local take = math.min(#ids, seq)
    if take < #ids then cut = cut + 1 end
    if n + take > room then
      room = math.max(2 * room, n + take)
      local more = int_array(room)
      ffi.copy(more, all, 4 * n)
      all = more
    end
    starts[i] = n
    for k = 1, take do all[n + k - 1] = ids[k] end
    n = n + take
  end
  starts[#texts + 1] = n
  return all, starts, cut
end

--- Reads the texts.
---@param texts string[]
---@param tokenizer ps.Tokenizer
---@param seq integer
---@param to_seq boolean rows are padded to seq, not to the longest of their batch
---@return ps.TextRows
function rows.read(texts, tokenizer, seq, to_seq)
  local ids, starts, cut = encoded(texts, tokenizer, seq)
  local pad = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
  return setmetatable({ count = #texts, seq = seq, cut = cut, ids = ids, starts = starts, pad = pad, to_seq = to_seq },
    Rows)
end

--- What is equal for two lists of the same rows: a hash of all ids and lengths.
---@return string
function Rows:hash()
  local lengths = int_array(self.count)
  for i = 1, self.count do lengths[i - 1] = self.starts[i + 1] - self.starts[i] end
  local ids = C.ps_xxh3(self.ids, 4 * self.starts[self.count + 1])
  local both = key_array(2)
  both[0], both[1] = ids, C.ps_xxh3(lengths, 4 * self.count)
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
  for i = 1, self.count do                                   -- each text draws a number, and they are sorted by it
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
---@param first integer the first one's place in `order`, from 1
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
      mask[at + k], labels[at + k] = is and 1 or 0, is and self.ids[from + k] or IGNORED
    end
  end
  local batch = {}
  for name, values in pairs { input_ids = ids, attention_mask = mask, labels = labels } do
    batch[name] = create.empty({ n, longest }, { dtype = "int32", device = device })
    native.check(C.ps_tensor_write(batch[name], values, 4 * n * longest))
  end
  return batch
end

return rows
