-- SPDX-License-Identifier: BSD-3-Clause
-- Implements ps.data.loader for texts and for tables of examples: the order of the rows in each epoch, and the batches.
-- A row contains one example that is padded at its end, or several packed examples. The examples, the settings and the
-- epoch determine which examples are in a row (src/data/rows.c). The batch size and the number of ranks have no
-- influence. Therefore a run can resume at a row with any number of ranks. A thread makes batches in advance
-- (src/data/batches.c).
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local examples = require "ps.data.examples"
local stream = require "ps.data.stream"
local tables = require "ps.data.table"
local ffi = require "ffi"
local error = caller.error
local C, check = native.C, native.check
local count_array, weight_array = array "int64_t", array "double"

---@class ps.TextRows
---@field count integer number of examples in the first epoch. With a stream, rows.complete sets count, cut and dropped.
---@field seq integer maximum number of tokens in a row
---@field cut integer number of examples that were truncated because they have more than seq tokens
---@field dropped integer number of examples that were left out, because they have more than seq tokens or because no
--- trained token remained after truncation
---@field private examples ps.Examples|ps.ExampleSource
---@field private stream? ps.Stream the rows of the first epoch while its examples are being tokenized
---@field private batches? ffi.cdata* a ps_batches, whose thread makes batches in advance
---@field private weights? "token"|"example" how loss_weights are computed; nil if batches have no loss_weights
local Rows = {}
Rows.__index = Rows

local rows = {}

local LONG = { cut = C.PS_LONG_RIGHT, right = C.PS_LONG_RIGHT, left = C.PS_LONG_LEFT, drop = C.PS_LONG_DROP,
  error = C.PS_LONG_ERROR }
local EXHAUSTED = { leave = C.PS_MIX_LEAVE, ["repeat"] = C.PS_MIX_REPEAT, stop = C.PS_MIX_STOP }
rows.WINDOW = 4096                       -- number of consecutive examples that are packed or grouped together
rows.AHEAD = 2                           -- number of batches that the thread makes in advance

-- -- an epoch -------------------------------------------------------------------------------------------------------
-- Raises an error that says that example `failed` is too long.
local function refuse(self, handle, failed)
  local n = ffi.new "int64_t[1]"
  check(C.ps_examples_read(handle, failed, nil, nil, 0, n))
  error(("ps.data.loader: %s has %d tokens, more than seq = %d"):format(self.place(failed + 1), tonumber(n[0]),
    self.seq))
end

-- Returns the rows of an epoch. If the thread that makes batches has already made these rows, they are not made again.
local function make(self, epoch)
  local info, out = ffi.new "ps_rows_info", ffi.new "ps_rows *[1]"
  local rc
  if self.batches then rc = C.ps_batches_rows(self.batches, epoch, info, out)
  else
    self.config.epoch = epoch
    rc = C.ps_rows_new(self.examples.handle, self.config, info, out)
  end
  if rc < 0 and info.failed >= 0 then refuse(self, self.examples.handle, tonumber(info.failed)) end
  check(rc)
  return { epoch = epoch, handle = ffi.gc(out[0], C.ps_rows_free), rows = tonumber(info.rows),
    examples = tonumber(info.examples), tokens = tonumber(info.tokens), cut = tonumber(info.cut),
    dropped = tonumber(info.dropped) }
end

--- Returns the rows of an epoch. The first call for an epoch makes the rows.
---@param epoch integer
---@return {rows: integer, examples: integer, tokens: integer, handle: ffi.cdata*}
function Rows:epoch(epoch)
  if not self.now or self.now.epoch ~= epoch then self.now = make(self, epoch) end
  return self.now
end

--- Returns the window that contains a row, and the row's index in this window, counted from 0.
---@param epoch integer
---@param row integer
---@return integer window
---@return integer within
function Rows:window(epoch, row)
  local out = ffi.new "int64_t[2]"
  local handle = self.stream and self.stream.handle or self:epoch(epoch).handle
  check(C.ps_rows_window(handle, row, out, out + 1))
  return tonumber(out[0]), tonumber(out[1])
end

--- Returns the row that has the index `within` in a window.
---@param epoch integer
---@param window integer
---@param within integer
---@return integer row
function Rows:at(epoch, window, within)
  local first = C.ps_rows_first(self:epoch(epoch).handle, window)
  check(first)
  local row = tonumber(first) + within
  if row > self.now.rows then
    error(("loader:seek: there is no row %d in window %d of epoch %d"):format(within, window, epoch))
  end
  return row
end

--- Returns the numbers of the examples, counted from 1, that are in n rows of an epoch. Tests and reports use this
--- function.
---@param epoch integer
---@param first integer index of the first of the n rows, counted from 0
---@param n integer
---@return integer[]
function Rows:numbers(epoch, first, n)
  if self.stream then self.complete() end
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

-- Makes the tensors of a batch from the arrays in a ps_batch (`given`).
local function tensors(self, given, device)
  local n, length = tonumber(given.rows), tonumber(given.length)
  local lists = { input_ids = given.ids, labels = given.labels }
  lists[self.packing and "segment_ids" or "attention_mask"] = given.mask
  if self.packing then lists.position_ids = given.positions end
  local batch = {}
  for name, values in pairs(lists) do batch[name] = tensor_of(values, n, length, "int32", device) end
  if self.weights then batch.loss_weights = tensor_of(given.weights, n, length, "fp32", device) end
  return batch
end

-- -- options --------------------------------------------------------------------------------------------------------
-- Options that are only for a loader of shards.
local OF_SHARDS = { "shards", "file", "width", "first", "last", "split", "vocab" }
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
    if not tables.is(given.table) then error "ps.data.loader: table must be a result of ps.data.table" end
    self.place = function(i) return given.table:place(i) end
    self.examples = examples.of_table(given.table, tokenizer, { train_on = given.train_on, date = given.date,
      cache = given.cache, stream = given.stream, weight_field = weights and not WEIGHTS[weights] and weights or nil })
  else
    self.place = function(i) return ("texts[%d]"):format(i) end
    self.examples = examples.of_texts(caller.list(given.texts, "ps.data.loader: texts"), tokenizer)
  end
end

-- Raises an error if n rows are too few for one batch. Also raises an error if the last batch would have fewer rows
-- than there are ranks.
local function check_size(self, given, drop, n)
  local global, what = self.global_batch, given.table and "rows" or "texts"
  local rest = n % global
  if n < (drop and global or 1) then
    local hint = (self.rows.dropped or 0) > 0 and ("; %d of more than seq = %d tokens were left out"):format(
      self.rows.dropped, given.seq) or n > 0 and "; drop_last = false gives a smaller one" or ""
    error(("ps.data.loader: %d %s are fewer than a batch of %d (%d on each of %d ranks)%s"):format(n, what, global,
      given.batch, self.world_size, hint))
  end
  if not drop and not self.fills and rest > 0 and rest < self.world_size then
    error(("ps.data.loader: the last batch of %d %s, in batches of %d, has only %d, too few for %d ranks; drop_last = "
      .. "true drops it"):format(n, what, global, rest, self.world_size))
  end
end

-- Creates the ps_batches, whose thread makes batches. It begins with the first batch of epoch 0.
local function batches_of(self, settings)
  local own, out = self.rows, ffi.new "ps_batches *[1]"
  local first = own.stream and own.stream.handle or own:epoch(0).handle
  check(C.ps_batches_new(own.examples.handle, own.config, ffi.new("ps_batches_config", settings), first, out))
  return ffi.gc(out[0], C.ps_batches_free)
end

-- Sets the fields that are known only when all examples are tokenized.
local function set_totals(self, given, drop)
  local own = self.rows
  local first = own:epoch(0)
  own.count, own.cut, own.dropped = first.examples, first.cut, first.dropped
  own.most = first.examples + first.dropped
  if own.cut + own.dropped > 0 and self.rank == 0 then
    io.stderr:write(("psluajit: ps.data.loader: examples of more than %d tokens, of %d in all: %d cut, %d left out\n")
      :format(self.seq, own.most, own.cut, own.dropped))
  end
  check_size(self, given, drop, first.rows)
  self.texts = own.examples.hash
end

--- Tokenizes the remaining examples of a stream. Then sets the fields that are known only when all examples are
--- tokenized.
---@param self table the loader
function rows.complete(self)
  local own = self.rows
  if own.stream then
    own.examples, own.stream = own.stream:finish(), nil
    check(C.ps_batches_examples(own.batches, own.examples.handle))
    local ok, problem = pcall(own.set_totals)
    if not ok then own.problem = problem end
    rows.count(self, 0)
  end
  if own.problem ~= nil then error(own.problem, 0) end
end

--- Sets the fields of a loader of texts or of a loader of a table.
---@param self table the loader; its fields global_batch and world_size are already set
---@param options table the options of ps.data.loader
---@return table self
function rows.fill(self, options)
  for _, name in ipairs(OF_SHARDS) do
    if options[name] ~= nil then
      error(("ps.data.loader: %s is for token shards, not for texts: remove one of the two"):format(name))
    end
  end
  caller.whole(options.batch, "ps.data.loader: batch", 1)
  caller.whole(options.seq, "ps.data.loader: seq", 1)
  for _, name in ipairs { "window", "accumulate", "pad_to_multiple_of", "ahead" } do
    caller.whole(options[name] or 1, "ps.data.loader: " .. name, 1)
  end
  local tokenizer = caller.typed(options.tokenizer, "table", "ps.data.loader: the tokenizer, which texts need,")
  local pads = { longest = 1, max_length = 2 }
  local to_seq = caller.one_of(options.padding or "longest", pads, "ps.data.loader: padding") == pads.max_length
  if options.packing and options.group_by_length then
    error("ps.data.loader: packing and group_by_length were both given; give only one of them, since packed rows all "
      .. "have seq tokens")
  end
  local mix = options.table and tables.is(options.table) and options.table:mixture()
  local own = setmetatable({ seq = options.seq, packing = options.packing or false }, Rows)
  self.rows = own
  read(own, options, tokenizer)
  own.config = config_of(own, options, self.seed, mix)
  local drop = options.drop_last
  if drop == nil then drop = options.table == nil end
  self.fills = options.table ~= nil
  self.accumulate = options.accumulate or 1
  self.drop_last, self.at = drop, { epoch = 0, row = 0 }
  own.set_totals = function() set_totals(self, options, drop) end
  own.complete = function() rows.complete(self) end
  if own.examples.is_stream then
    local whole = options.packing or options.group_by_length
    local lead = ((options.ahead or rows.AHEAD) + 2) * self.global_batch * self.accumulate
    own.stream = stream.new(own.examples, own.config, { batch = self.global_batch, lead = lead,
      window = whole and (options.window or rows.WINDOW) or 0 }, function(...) refuse(own, ...) end)
    check_size(self, options, drop, own.stream.places)
  else own.set_totals() end
  -- The ranks compare self.source, which must be equal on all of them. Therefore it must not depend on whether a rank
  -- read the examples from the cache.
  self.source = options.stream and (own.examples.key or "without a key") or nil
  self.table_rows = options.table and #options.table
  self.window, self.packing = options.window or rows.WINDOW, own.packing
  self.group_by_length = options.group_by_length or false
  self.too_long, self.loss_weights = options.too_long or "cut", options.loss_weights or false
  self.mixture = mix and mix.name or false
  own.batches = batches_of(self, { batch = options.batch, accumulate = self.accumulate,
    multiple = options.pad_to_multiple_of or 1, rank = self.rank, world_size = self.world_size,
    ahead = options.ahead or rows.AHEAD, to_seq = (to_seq or own.packing) and 1 or 0, drop_last = drop and 1 or 0,
    fills = self.fills and 1 or 0, weights = own.weights and 1 or 0,
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    by = own.weights == "example" and C.PS_WEIGHTS_EXAMPLE or C.PS_WEIGHTS_TOKEN })
  if not own.stream then rows.count(self, 0) end
  return self
end

--- Sets loader.batches to the number of batches in an epoch.
---@param self table the loader
---@param epoch integer
function rows.count(self, epoch)
  local n = self.rows:epoch(epoch).rows / self.global_batch
  self.batches = self.drop_last and math.floor(n) or math.ceil(n)
end

--- Returns the next batch, or nil at the end of an epoch. The next call after nil begins a new epoch.
---@param self table the loader
---@param rng table the random state, whose field `sample` this function sets
---@return table<string, ps.Tensor>? batch int32 tensors [n, length], except loss_weights, which is fp32. The last batch
---  of a table is filled up with rows of weight 0.
function rows.next(self, rng)
  local own = self.rows
  own.given = own.given or ffi.new "ps_batch"
  local given, row = own.given, self.at.row
  if own.stream then own.stream:ahead(row) end
  local rc = C.ps_batches_next(own.batches, given)
  while rc == C.PS_BATCHES_MORE do
    if not own.stream:more(row) then rows.complete(self) end
    rc = C.ps_batches_next(own.batches, given)
  end
  check(rc)
  if rc == 0 then
    rows.complete(self)
    self.at = { epoch = self.at.epoch + 1, row = 0 }
    rows.count(self, self.at.epoch)
    return nil
  end
  local epoch = tonumber(given.epoch)
  rng.sample, rng.op = epoch * (own.most or 0) + tonumber(given.first), 0
  local batch = tensors(own, given, self.device)
  self.at = { epoch = epoch, row = tonumber(given.next) }
  return batch
end

--- Returns the position of the next batch: its epoch, the window of its first row, the index of the first row in the
--- window, and the index of the batch in the epoch.
---@param self table
---@return {epoch: integer, window: integer, row: integer, batch: integer}
function rows.position(self)
  local at = self.at
  local window, row = self.rows:window(at.epoch, at.row)
  return { epoch = at.epoch, window = window, row = row, batch = math.ceil(at.row / self.global_batch) }
end

--- Makes the loader continue at a position. The position contains either `window` and `row`, or `batch`.
---@param self table
---@param position {epoch: integer, window?: integer, row?: integer, batch?: integer}
function rows.seek(self, position)
  rows.complete(self)
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
  check(C.ps_batches_seek(self.rows.batches, epoch, self.rows:epoch(epoch).handle, row))
  self.at = { epoch = epoch, row = row }
end

return rows
