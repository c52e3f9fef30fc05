-- SPDX-License-Identifier: BSD-3-Clause
-- Rows of texts or of a table of examples for ps.data.loader: their order in each epoch, and batches of them. A row is
-- an example, padded at its end, or several packed examples. Which examples a row has depends on the examples, the
-- settings and the epoch (src/data/rows.c), not on batches and ranks, so that a position among rows continues with any
-- number of them.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local examples = require "ps.data.examples"
local tables = require "ps.data.table"
local ffi = require "ffi"
local error = caller.error
local C, check = native.C, native.check
local int_array, float_array, count_array, weight_array = array "int32_t", array "float", array "int64_t",
  array "double"

---@class ps.TextRows
---@field count integer number of examples in the first epoch
---@field seq integer the largest number of tokens in a row
---@field cut integer number of examples that were longer and were truncated
---@field dropped integer number of omitted examples: longer than seq, or without a trained token after truncation
---@field private examples ps.Examples
---@field private pad integer
---@field private to_seq boolean whether every row has seq tokens
---@field private multiple integer rows are padded to a multiple of this number of tokens
---@field private weights? "token"|"example" the kind of loss_weights in a batch, or nil if it has none
local Rows = {}
Rows.__index = Rows

local rows = {}

local LONG = { cut = C.PS_LONG_RIGHT, right = C.PS_LONG_RIGHT, left = C.PS_LONG_LEFT, drop = C.PS_LONG_DROP,
  error = C.PS_LONG_ERROR }
local EXHAUSTED = { leave = C.PS_MIX_LEAVE, ["repeat"] = C.PS_MIX_REPEAT, stop = C.PS_MIX_STOP }
rows.WINDOW = 4096                       -- number of consecutive examples that are packed or grouped together
local STEPS = 8                          -- number of different lengths between a length and its double

-- -- an epoch -------------------------------------------------------------------------------------------------------
-- Creates the rows of an epoch.
local function make(self, epoch)
  local config, info, out = self.config, ffi.new "ps_rows_info", ffi.new "ps_rows *[1]"
  config.epoch = epoch
  local rc = C.ps_rows_new(self.examples.handle, config, info, out)
  if rc < 0 and info.failed >= 0 then
    local n = ffi.new "int64_t[1]"
    check(C.ps_examples_read(self.examples.handle, info.failed, nil, nil, 0, n))
    error(("ps.data.loader: %s has %d tokens, more than seq = %d"):format(self.place(tonumber(info.failed) + 1),
      tonumber(n[0]), self.seq))
  end
  check(rc)
  return { epoch = epoch, handle = ffi.gc(out[0], C.ps_rows_free), rows = tonumber(info.rows),
    examples = tonumber(info.examples), tokens = tonumber(info.tokens), cut = tonumber(info.cut),
    dropped = tonumber(info.dropped) }
end

--- Returns the rows of an epoch, which are created by the first call for that epoch.
---@param epoch integer
---@return {rows: integer, examples: integer, tokens: integer, handle: ffi.cdata*}
function Rows:epoch(epoch)
  if not self.now or self.now.epoch ~= epoch then self.now = make(self, epoch) end
  return self.now
end

-- Returns the length to which rows are padded if the longest row has `longest` tokens. It is a multiple of a step that
-- grows with the length, so that only a few different lengths occur.
local function padded(self, longest)
  if self.to_seq then return self.seq end
  local step = self.multiple
  if step > 1 then
    while longest > 2 * STEPS * step do step = 2 * step end
  end
  return math.max(1, math.min(math.ceil(longest / step) * step, math.max(self.seq, longest)))
end

--- Returns the window that contains a row, and the row's index in the window, from 0.
---@param epoch integer
---@param row integer
---@return integer window
---@return integer within
function Rows:window(epoch, row)
  local out = ffi.new "int64_t[2]"
  check(C.ps_rows_window(self:epoch(epoch).handle, row, out, out + 1))
  return tonumber(out[0]), tonumber(out[1])
end

--- Returns the row at an index in a window.
---@param epoch integer
---@param window integer
---@param within integer
---@return integer row
function Rows:at(epoch, window, within)
  local first = C.ps_rows_first(self:epoch(epoch).handle, window)
  check(first)
  local row = tonumber(first) + within
  if row > self.now.rows then
    error(("loader:seek: there is no row %d of window %d in epoch %d"):format(within, window, epoch))
  end
  return row
end

--- Returns the numbers, from 1, of the examples in n rows of an epoch, beginning at row `first`, for tests and reports.
---@param epoch integer
---@param first integer the first row, from 0
---@param n integer
---@return integer[]
function Rows:numbers(epoch, first, n)
  local now, list, room = self:epoch(epoch), {}, count_array(self.seq)
  for row = first, math.min(first + n, now.rows) - 1 do
    local k = C.ps_rows_examples(now.handle, row, room, self.seq)
    check(k)
    for i = 0, tonumber(k) - 1 do list[#list + 1] = tonumber(room[i]) + 1 end
  end
  return list
end

local function tensor_of(values, n, length, dtype, device)
  local t = create.empty({ n, length }, { dtype = dtype, device = device })
  check(C.ps_tensor_write(t, values, 4 * n * length))
  return t
end

--- Returns a batch from the rows of an epoch.
---@param epoch integer
---@param first integer the first row, from 0
---@param n integer number of rows in the batch
---@param from integer the first of the `count` rows of a step, which all have the same length
---@param count integer
---@param device? string
---@return table<string, ps.Tensor> batch all int32 [n, length]; rows after the last row of the epoch have weight 0
function Rows:batch(epoch, first, n, from, count, device)
  local now = self:epoch(epoch)
  local longest = C.ps_rows_longest(now.handle, from, count)
  check(longest)
  local length = padded(self, tonumber(longest))
  local size = n * length
  local given = ffi.new("ps_rows_batch", { rows = n, length = length, real = n, filler = math.min(from, now.rows - 1),
    pad = self.pad, by = self.weights == "example" and C.PS_WEIGHTS_EXAMPLE or C.PS_WEIGHTS_TOKEN })
  local lists = { input_ids = int_array(size), labels = int_array(size) }
  local mask, positions = int_array(size), self.packing and int_array(size) or nil
  local weights = self.weights and float_array(size) or nil
  given.ids, given.labels, given.mask, given.positions, given.weights = lists.input_ids, lists.labels, mask, positions,
    weights
  check(C.ps_rows_fill(now.handle, first, given))
  lists[self.packing and "segment_ids" or "attention_mask"], lists.position_ids = mask, positions
  local batch = {}
  for name, values in pairs(lists) do batch[name] = tensor_of(values, n, length, "int32", device) end
  if weights then batch.loss_weights = tensor_of(weights, n, length, "fp32", device) end
  return batch
end

-- -- options --------------------------------------------------------------------------------------------------------
-- Options that only a loader of shards accepts.
local OF_SHARDS = { "shards", "file", "width", "first", "last", "split", "vocab", "ahead" }
local WEIGHTS = { token = 1, example = 1 }

local function config_of(self, given, seed, mix)
  local n = mix and #mix.counts or 1
  self.counts, self.shares = count_array(n, mix and mix.counts or { self.examples.count }),
    weight_array(n, mix and mix.weights or { 1 })
  local long = given.too_long or "cut"
  caller.one_of(long, LONG, "ps.data.loader: too_long")
  return ffi.new("ps_rows_config", { seq = given.seq, window = given.window or rows.WINDOW, seed = seed,
    counts = self.counts, weights = self.shares, n_sources = n, exhausted = EXHAUSTED[mix and mix.exhausted or "leave"],
    shuffle = given.shuffle ~= false and 1 or 0, packing = given.packing and 1 or 0,
    grouping = given.group_by_length and 1 or 0, rule = LONG[long] })
end

local function read(self, given, tokenizer)
  local weights = given.loss_weights
  self.weights = weights and (WEIGHTS[weights] and weights or "token") or nil
  if given.table then
    if not tables.is(given.table) then error "ps.data.loader: table is what ps.data.table gives" end
    self.place = function(i) return given.table:place(i) end
    self.examples = examples.of_table(given.table, tokenizer, { train_on = given.train_on, date = given.date,
      cache = given.cache, weight_field = weights and not WEIGHTS[weights] and weights or nil })
  else
    self.place = function(i) return ("texts[%d]"):format(i) end
    self.examples = examples.of_texts(caller.list(given.texts, "ps.data.loader: texts"), tokenizer)
  end
end

-- Raises an error if a loader has too few rows for a batch, or for a last batch with rows on all ranks.
local function check_size(self, given, drop)
  local n, global, what = self.rows.now.rows, self.global_batch, given.table and "rows" or "texts"
  local rest = n % global
  if n < (drop and global or 1) then
    local hint = self.rows.dropped > 0 and ("; %d of more than seq = %d tokens were left out"):format(
      self.rows.dropped, given.seq) or n > 0 and "; drop_last = false gives a smaller one" or ""
    error(("ps.data.loader: %d %s are fewer than a batch of %d (%d on each of %d ranks)%s"):format(n, what, global,
      given.batch, self.world_size, hint))
  end
  if not drop and not self.fills and rest > 0 and rest < self.world_size then
    error(("ps.data.loader: %d %s in batches of %d leave %d, too few for %d ranks: drop_last = true leaves them out")
      :format(n, what, global, rest, self.world_size))
  end
end

--- Sets the fields of a loader of texts or of a table of examples.
---@param self table the loader, with global_batch and world_size
---@param options table the options of ps.data.loader
---@return table self
function rows.fill(self, options)
  for _, name in ipairs(OF_SHARDS) do
    if options[name] ~= nil then
      error(("ps.data.loader: %s is for token shards, not for texts: leave one of the two out"):format(name))
    end
  end
  caller.whole(options.batch, "ps.data.loader: batch", 1)
  caller.whole(options.seq, "ps.data.loader: seq", 1)
  for _, name in ipairs { "window", "accumulate", "pad_to_multiple_of" } do
    caller.whole(options[name] or 1, "ps.data.loader: " .. name, 1)
  end
  local tokenizer = caller.typed(options.tokenizer, "table", "ps.data.loader: the tokenizer, which texts need,")
  local pads = { longest = 1, max_length = 2 }
  local to_seq = caller.one_of(options.padding or "longest", pads, "ps.data.loader: padding") == pads.max_length
  if options.packing and options.group_by_length then
    error "ps.data.loader: packing and group_by_length: give one of the two; packed rows all have seq tokens"
  end
  local mix = options.table and tables.is(options.table) and options.table:mixture()
  local own = setmetatable({ seq = options.seq, packing = options.packing or false,
    to_seq = to_seq or options.packing or false, multiple = options.pad_to_multiple_of or 1,
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id or 0 }, Rows)
  self.rows = own
  read(own, options, tokenizer)
  own.config = config_of(own, options, self.seed, mix)
  local first = own:epoch(0)
  own.count, own.cut, own.dropped = first.examples, first.cut, first.dropped
  own.most = first.examples + first.dropped
  if own.cut + own.dropped > 0 and self.rank == 0 then
    io.stderr:write(("psluajit: ps.data.loader: of %d examples, %d have more than %d tokens and are cut, %d are left "
      .. "out\n"):format(own.most, own.cut, options.seq, own.dropped))
  end
  local drop = options.drop_last
  if drop == nil then drop = options.table == nil end
  self.fills = options.table ~= nil
  check_size(self, options, drop)
  self.texts, self.drop_last, self.at, self.base = own.examples.hash, drop, { epoch = 0, row = 0 }, 0
  self.accumulate = options.accumulate or 1
  self.window, self.packing = options.window or rows.WINDOW, own.packing
  self.group_by_length = options.group_by_length or false
  self.too_long, self.loss_weights = options.too_long or "cut", options.loss_weights or false
  self.mixture = mix and mix.name or false
  rows.count(self, 0)
  return self
end

--- Sets loader.batches to the number of batches in an epoch.
---@param self table the loader
---@param epoch integer
function rows.count(self, epoch)
  local n = self.rows:epoch(epoch).rows / self.global_batch
  self.batches = self.drop_last and math.floor(n) or math.ceil(n)
end

-- Returns the first of this rank's rows in the epoch, and their count. If the last batch of texts is not full, the
-- ranks divide it as evenly as possible. The last batch of a table is filled with rows of weight 0.
local function own_rows(self, row, total)
  local there = math.min(self.global_batch, total - row)
  if self.fills or there == self.global_batch then return row + self.rank * self.batch, self.batch end
  local from = math.floor(there * self.rank / self.world_size)
  return row + from, math.floor(there * (self.rank + 1) / self.world_size) - from
end

--- Returns the next batch, or nil at the end of an epoch. The next call begins the next epoch.
---@param self table the loader
---@param rng table the random state; its field sample is set
---@return table<string, ps.Tensor>? batch
function rows.next(self, rng)
  local at, total = self.at, self.rows:epoch(self.at.epoch).rows
  if at.row >= total or self.drop_last and at.row + self.global_batch > total then
    self.at, self.base = { epoch = at.epoch + 1, row = 0 }, 0
    rows.count(self, at.epoch + 1)
    return nil
  end
  local step = self.global_batch * self.accumulate
  local from = at.row - (at.row - self.base) % step
  local first, n = own_rows(self, at.row, total)
  local count = self.fills and step or self.global_batch
  if not self.fills then from, count = first, n end
  rng.sample, rng.op = at.epoch * self.rows.most + first, 0
  local batch = self.rows:batch(at.epoch, first, n, from, count, self.device)
  self.at = { epoch = at.epoch, row = math.min(at.row + self.global_batch, total) }
  return batch
end

--- Returns the position of the next batch: the epoch, the window, the row in the window, and the index of the batch.
---@param self table
---@return {epoch: integer, window: integer, row: integer, batch: integer}
function rows.position(self)
  local at = self.at
  local window, row = self.rows:window(at.epoch, at.row)
  return { epoch = at.epoch, window = window, row = row, batch = math.ceil(at.row / self.global_batch) }
end

--- Moves to a position, which is a window and a row, or a batch.
---@param self table
---@param position {epoch: integer, window?: integer, row?: integer, batch?: integer}
function rows.seek(self, position)
  local epoch = caller.whole(tonumber(position.epoch), "loader:seek: epoch", 0)
  local row
  if position.window ~= nil then
    row = self.rows:at(epoch, caller.whole(tonumber(position.window), "loader:seek: window", 0),
      caller.whole(tonumber(position.row), "loader:seek: row", 0))
  else
    local batch = caller.whole(tonumber(position.batch), "loader:seek: batch", 0)
    rows.count(self, epoch)
    if batch > self.batches then
      error(("loader:seek: there is no batch %d of epoch %d; an epoch has %d batches"):format(batch, epoch,
        self.batches))
    end
    row = math.min(batch * self.global_batch, self.rows:epoch(epoch).rows)
  end
  rows.count(self, epoch)
  self.at, self.base = { epoch = epoch, row = row }, row % (self.global_batch * self.accumulate) ~= 0 and row or 0
end

return rows
