-- SPDX-License-Identifier: BSD-3-Clause
-- ps.data. This file contains:
--
--   tokens                                   maps a token shard into memory
--   write_tokens, encode_text, encode_file   write token shards
--   loader                                   returns shuffled batches, for training
--   windows                                  reads all windows of tokens in order, for evaluation
--
-- C code reads the shards for a loader. Loaders of texts and of tables are in text_rows.lua.
local create = require "ps.tensor.create"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local caller = require "ps.core.caller"
local error = caller.error
local bit = require "bit"
local ffi = require "ffi"
local array = require "ps.core.array"
local mesh = require "ps.dist.mesh"
local text_rows = require "ps.data.text_rows"
local tables = require "ps.data.table"
local formats = require "ps.data.formats"
local exact = require "ps.core.exact"
local C, check = native.C, native.check
local int_array, handle_array = array "int32_t", array "ps_tokens *"

local data = {}

---@class ps.Tokens a mapped shard
---@field path string
---@field width integer
local Tokens = {}
Tokens.__index = Tokens
function Tokens:__tostring() return ("Tokens(%s, %.0f)"):format(self.path, self:count()) end

local MAGIC = { ["\136\216\052\001"] = true, ["\161\217\052\001"] = true } -- magic 20240520 and 20240801, little-endian

local function has_header(path)
  local file, why = io.open(path, "rb")
  if not file then error("cannot open token file " .. why) end
  local head = file:read(4)
  file:close()
  return MAGIC[head] or false
end

local TOKENS = { width = "whole" }

--- Maps a token file into memory. If the file begins with the header of llm.c, the header contains the number of bytes
--- per token. If the file has no header, `width` is the number of bytes per token. If the file has no header and
--- `width` is not given, a .bin file causes an error, and any other file is text in which each byte is a token.
---@param path string
---@param options? {width?: 1|2|4} width: number of bytes per token
---@return ps.Tokens
function data.tokens(path, options)
  caller.typed(path, "string", "ps.data.tokens: the path")
  local width = caller.options(options, "ps.data.tokens", TOKENS).width
  if not width then width = (has_header(path) or path:match("%.bin$")) and 0 or 1 end
  local out = ffi.new("ps_tokens *[1]")
  check(C.ps_tokens_open(path, width, out))
  return setmetatable({ path = path, width = width, handle = ffi.gc(out[0], C.ps_tokens_close) }, Tokens)
end

--- Returns the number of tokens in the shard.
---@return integer
function Tokens:count() return tonumber(C.ps_tokens_count(self.handle)) end

--- Returns n tokens of the shard in a new int32 buffer, starting at token `first`, counted from 0.
---@param first integer
---@param n integer
---@return ffi.cdata* ids int32_t[n]
function Tokens:read(first, n)
  caller.whole(first, "tokens:read: the first token")
  if caller.whole(n, "tokens:read: the count") > self:count() then
    error(("tokens:read: %.0f tokens requested, but the file has %.0f"):format(n, self:count()))
  end
  local ids = int_array(math.max(n, 1))
  check(C.ps_tokens_read(self.handle, first, n, ids))
  return ids
end

local function write_shard(path, width, fill)
  local out = ffi.new("ps_tokw *[1]")
  check(C.ps_tokw_new(path, width, out))
  local writer = ffi.gc(out[0], C.ps_tokw_free)
  local ok, problem = pcall(fill, writer)
  if ok then ok, problem = pcall(check, C.ps_tokw_commit(writer)) end
  C.ps_tokw_free(ffi.gc(writer, nil))                      -- freed at once, because this removes the temporary file
  if not ok then error(problem, 0) end
end

local WRITTEN = { width = "whole", n = "whole" }

--- Writes token ids to a shard with llm.c's header.
---@param path string
---@param ids integer[]|ffi.cdata* a Lua list, or an int32 buffer, for which options.n must be given
---@param options? {width?: 2|4, n?: integer} width: number of bytes per token (default 2). n: number of ids in a
--- buffer.
function data.write_tokens(path, ids, options)
  options = caller.options(options, "ps.data.write_tokens", WRITTEN)
  caller.typed(path, "string", "ps.data.write_tokens: the path")
  local n, buffer = options.n, ids
  if type(ids) == "table" then
    n = #ids
    for i = 1, n do caller.whole(ids[i], "ps.data.write_tokens: a token") end
    buffer = int_array(math.max(n, 1), ids)
    if n == 1 then buffer[0] = ids[1] end
  end
  if type(ids) ~= "table" and type(ids) ~= "cdata" then
    error("ps.data.write_tokens takes a list of tokens or an int32 buffer, not " .. tostring(ids))
  end
  caller.whole(n, "ps.data.write_tokens: n, which a buffer needs,")
  write_shard(path, options.width or 2, function(writer) check(C.ps_tokw_append(writer, buffer, n)) end)
end

local function append(writer, tokenizer, text)
  if tokenizer.append then return tokenizer:append(writer, text) end
  local ids = tokenizer:encode(text)
  local buffer = int_array(math.max(#ids, 1))
  for i = 1, #ids do buffer[i - 1] = ids[i] end
  check(C.ps_tokw_append(writer, buffer, #ids))
end

--- Writes the tokens of a string to a shard.
---@param text string
---@param shard_path string
---@param tokenizer ps.Tokenizer
function data.encode_text(text, shard_path, tokenizer)
  caller.typed(text, "string", "ps.data.encode_text: the text")
  caller.typed(shard_path, "string", "ps.data.encode_text: the path of the shard")
  caller.typed(tokenizer, "table", "ps.data.encode_text: the tokenizer")
  local width = tokenizer.vocab_size > 65536 and 4 or 2
  write_shard(shard_path, width, function(writer) append(writer, tokenizer, text) end)
end

-- Raises an error if a file was compressed by gzip, because its bytes are not text.
local function check_text(path)
  local file, why = io.open(path, "rb")
  if not file then error("cannot open the text file: " .. why) end
  local magic = file:read(2)
  file:close()
  if magic == "\31\139" then
    error(("ps.data.encode_file: %s is compressed by gzip: unpack it (gzip -dk FILE), or read it with "
      .. "ps.data.table"):format(path))
  end
end

--- Writes the tokens of a text file to a shard. The file may have any size, because it is read and encoded in pieces.
---@param text_path string
---@param shard_path string
---@param tokenizer ps.Tokenizer
---@param options? {lossy?: boolean} lossy: malformed UTF-8 becomes U+FFFD (default: it is an error that names the
--- line). ps.tokenizer.bytes() accepts any bytes.
function data.encode_file(text_path, shard_path, tokenizer, options)
  caller.typed(text_path, "string", "ps.data.encode_file: the path of the text")
  caller.typed(shard_path, "string", "ps.data.encode_file: the path of the shard")
  caller.typed(tokenizer, "table", "ps.data.encode_file: the tokenizer")
  options = caller.options(options, "ps.data.encode_file", { lossy = "boolean" })
  check_text(text_path)
  local width = tokenizer.vocab_size > 65536 and 4 or 2
  if tokenizer.encode_file then                            -- the tokenizer decides where the text is split
    write_shard(shard_path, width, function(writer)
      tokenizer:encode_file(text_path, function(ids, n) check(C.ps_tokw_append(writer, ids, n)) end,
        { lossy = options.lossy })
    end)
    return
  end
  local file, why = io.open(text_path, "rb")
  if not file then error("cannot open the text file: " .. why) end
  local ok, problem = pcall(write_shard, shard_path, width, function(writer)
    while true do
      local text, rest = file:read(2 ^ 24, "*L")
      if not text then break end
      append(writer, tokenizer, rest and text .. rest or text)
    end
  end)
  file:close()
  if not ok then error(problem, 0) end
end

-- Returns the shards of a loader as a list of ps.Tokens. options.shards is a list in which each item is a path or a
-- ps.Tokens. If options.shards is nil, options.file is the only shard.
local function shards_of(options)
  local given = options.shards or { options.file }
  if type(given) ~= "table" or getmetatable(given) == Tokens then given = { given } end
  local shards = {}
  for i, shard in ipairs(given) do
    shards[i] = type(shard) == "string" and data.tokens(shard, { width = options.width }) or shard
    if getmetatable(shards[i]) ~= Tokens then error("a shard must be a path or a result of ps.data.tokens") end
  end
  if #shards == 0 then error("the loader needs shards = { paths } or file = path") end
  return shards
end

-- Returns the half-open range of tokens that a loader reads. The options define this range by token numbers (`first`
-- and `last`) or by fractions of all tokens (split = { from, to }).
local function range_of(options, shards)
  local total = 0
  for _, shard in ipairs(shards) do total = total + shard:count() end
  if options.split then
    for i = 1, 2 do caller.typed(options.split[i], "number", "a share of the loader's split") end
    return math.floor(options.split[1] * total), math.floor(options.split[2] * total)
  end
  return options.first or 0, options.last or total
end

local function batch_tensor(ids, rows, seq, device)
  local tensor = create.empty({ rows, seq }, { dtype = "int32", device = device })
  check(C.ps_tensor_write(tensor, ids, rows * seq * 4))
  return tensor
end

-- Returns the next batch of a loader of texts, or nil at the end of an epoch. The next call after nil begins a new
-- epoch.
local function give_rows(self)
  return text_rows.next(self, random.state())
end

local function give(self, x, y, rows, seq)
  return batch_tensor(x, rows, seq, self.device), batch_tensor(y, rows, seq, self.device)
end

-- Maps the group of all ranks to a loader: the first loader that uses the ranks of the mesh and has returned a batch.
local read_by = setmetatable({}, { __mode = "k" })
local SAMPLE = 1024                      -- number of tokens at each end of a shard that ranks compare

--- Returns a text that must be equal on all ranks. The text describes the tokens of a loader, the beginning of the
--- loader's range, and the order. Returns nil if no loader that uses the ranks of the mesh has returned a batch yet.
---@param group ps.Group the group of all ranks
---@return string?
function data.read_by(group)
  local loader = read_by[group]
  if not loader then return nil end
  if loader.rows then
    local from = loader.source and ("rows of a stream: %s"):format(loader.source) or loader.texts
    return ("%d texts (%s) in rows of at most %d tokens, batches of %d, %s"):format(
      loader.source and loader.table_rows or loader.rows.count, from, loader.seq, loader.batch,
      loader.shuffle and ("shuffled with seed %s"):format(tostring(loader.seed)) or "in order")
  end
  if not loader.reads then
    local total, bytes = 0, {}
    for _, shard in ipairs(loader.shards) do
      local count = shard:count()
      local n = math.min(count, SAMPLE)
      total = total + count
      bytes[#bytes + 1] = ffi.string(shard:read(0, n), 4 * n) .. ffi.string(shard:read(count - n, n), 4 * n)
    end
    local sample = table.concat(bytes)
    loader.reads = ("%.0f tokens in %d shards (sample %s), %.0f to %.0f of them in rows of %d, batches of %d, %s")
      :format(total, #loader.shards, bit.tohex(tonumber(C.ps_xxh3(sample, #sample) % 2 ^ 32)), loader.first,
      loader.last, loader.seq, loader.batch, loader.shuffle and ("shuffled with seed %.0f"):format(loader.seed)
      or "in order")
  end
  return loader.reads
end

---@class ps.Loader
---@field batch integer number of rows of a batch on this rank
---@field rank integer number of this rank, counted from 0
---@field world_size integer
---@field global_batch integer number of rows of a batch on all ranks together: batch * world_size
---@field seq integer
---@field batches integer number of full batches per epoch, equal on all ranks. `#loader` is 0, because LuaJIT does not
--- call __len for tables.
local Loader = require("ps.core.foreign").stand({}, "loader")
Loader.__index = Loader
function Loader:__tostring()
  local tokens, at = 0, self:position()
  if self.rows then
    text_rows.complete(self)
    local rows = self.rows
    return ("Loader(%d texts, %d of them cut to %d tokens, %sbatches of %d, %d per epoch; next: batch %d of epoch %d)")
      :format(rows.count, rows.cut, self.seq, rows.dropped > 0 and ("%d left out, "):format(rows.dropped) or "",
      self.batch, self.batches, at.batch, at.epoch)
  end
  for _, shard in ipairs(self.shards) do tokens = tokens + shard:count() end
  return ("Loader(%.0f tokens of %s, batches of %d x %d, %d per epoch; next: batch %d of epoch %d)"):format(tokens,
    #self.shards == 1 and self.shards[1].path or #self.shards .. " shards", self.batch, self.seq, self.batches,
    at.batch, at.epoch)
end

-- The class of loaders with stream = true. The fields in OF_ALL depend on all rows. Therefore reading one of these
-- fields first tokenizes all remaining rows.
local OF_ALL = { batches = true, texts = true }
local Streaming = { __tostring = Loader.__tostring, __call = function(self) return Loader.__call(self) end }
function Streaming.__index(self, key)
  if OF_ALL[key] then text_rows.complete(self) end
  return OF_ALL[key] and rawget(self, key) or Loader[key]
end

-- Options that both ps.data.loader and ps.data.windows have.
local SOURCE = { shards = "string|table", file = "string|table", width = "whole", batch = "whole", seq = "whole",
  first = "whole", last = "whole", split = "table", device = "string" }

local function and_also(keys)
  for key, kind in pairs(SOURCE) do keys[key] = kind end
  return keys
end
local LOADER = and_also { shuffle = "boolean", seed = "whole", vocab = "whole", ahead = "whole", rank = "whole",
  world_size = "whole", texts = "table", table = "cdata|string", tokenizer = "table", padding = "string",
  drop_last = "boolean", too_long = "string", train_on = "string|function", date = "string", packing = "boolean",
  group_by_length = "boolean", pad_to_multiple_of = "whole", window = "whole", accumulate = "whole",
  loss_weights = "string", cache = "boolean|string", stream = "boolean" }
-- OF_TEXTS lists the options that only loaders of texts and loaders of tables have. OF_TABLES lists the options that
-- only loaders of tables have.
local OF_TEXTS = { "tokenizer", "padding", "drop_last", "too_long", "packing", "group_by_length", "pad_to_multiple_of",
  "window", "accumulate" }
local OF_TABLES = { "train_on", "date", "loss_weights", "cache", "stream" }
local WINDOWS = and_also { limit = "whole" }

-- Returns an option that C stores as int32. Raises an error if its magnitude is 2^31 or more.
local function small(options, name, default)
  local value = options[name]
  if value == nil then return default end
  if math.abs(tonumber(value)) >= 2 ^ 31 then
    error(("ps.data.loader: %s is %.14g; it must be below 2^31"):format(name, tonumber(value)))
  end
  return value
end

--- Returns a loader of batches. For token shards, a batch consists of two tensors, x [batch, seq] and y [batch, seq].
--- For each token of x, y contains the token that follows it in the shard. A background thread prepares batches in
--- advance.
---
--- With several ranks, `batch` is the number of rows per rank. All ranks together read the same batches as one process
--- whose batches have batch * world_size rows. Rank r reads `batch` of these rows, starting at row r * batch. Ranks
--- that hold different stages or layers of the same copy of the model read the same rows.
---
--- For texts, a batch is one table { input_ids, attention_mask, labels } of int32 tensors [batch, tokens], for models
--- with named inputs. Each text becomes a row, including the special tokens that the tokenizer adds. A text of more
--- than seq tokens is truncated at its end. `tostring(loader)` contains the number of truncated texts. Rows are padded
--- at their end with the tokenizer's pad token. If the tokenizer has no pad token, its end token is used, and if it has
--- no end token, 0 is used. The label of padding is -100.
---
--- For a table of examples (ps.data.table), a batch has the same fields as for texts. The chat template of the
--- tokenizer converts conversations to ids. Tokens that the model must not produce have the label -100.
---@param options {shards?: (string|ps.Tokens)[], file?: string, width?: integer, batch: integer, seq: integer, first?:
--- integer, last?: integer, split?: number[], shuffle?: boolean, seed?: integer, vocab?: integer, ahead?: integer,
--- rank?: integer, world_size?: integer, device?: string, texts?: string[], tokenizer?: ps.Tokenizer, padding?:
--- "longest"|"max_length", drop_last?: boolean, table?: ps.DataTable, too_long?: "right"|"left"|"drop"|"error",
--- train_on?: string|fun(i: integer, role: string): boolean, date?: string, packing?: boolean, group_by_length?:
--- boolean, pad_to_multiple_of?: integer, window?: integer, accumulate?: integer, loss_weights?: string, cache?:
--- boolean|string, stream?: boolean} shuffle: whether the order is random (default true). split: { 0, 0.9 } selects the
--- first nine tenths of the tokens. vocab: size of the vocabulary; an id of `vocab` or more is an error. ahead: number
--- of batches that are prepared in advance (default 2). rank and world_size: default to the rank and size of the axis
--- dp of ps.init_distributed, or to a single process. device: device of the tensors; an engine accepts any device.
--- texts: a list of texts, in place of shards; a loader of texts also needs a tokenizer. padding: "longest" pads rows
--- to the length of the longest row of the batch (default), and "max_length" pads rows to seq. drop_last: whether an
--- incomplete last batch is skipped (default true for texts and false for a table). If drop_last is false, the last
--- batch of texts has fewer rows, and the last batch of a table is filled with rows of weight 0. table: a table of
--- examples, in place of texts. too_long: says what happens to an example of more than seq tokens. By default
--- ("right"), its last tokens are removed, and the example is skipped if no trained token remains. train_on and date:
--- as in tokenizer:apply_chat_template (train_on is "assistant" by default). stream: true: rows are tokenized during
--- the first epoch, shortly before the batches that need them; false (default): all rows are tokenized before the first
--- batch. docs/data.md describes the other options.
---@return ps.Loader
function data.loader(options)
  options = caller.options(options, "ps.data.loader", LOADER)
  for _, name in ipairs(OF_TEXTS) do
    if options[name] ~= nil and not (options.texts or options.table) then
      error(("ps.data.loader: %s applies only to texts; pass texts = { strings }, or "
        .. "table = ps.data.table(path)"):format(name))
    end
  end
  for _, name in ipairs(OF_TABLES) do
    if options[name] ~= nil and not options.table then
      error(("ps.data.loader: %s applies only to conversations; pass table = ps.data.table(path)"):format(name))
    end
  end
  if type(options.table) == "string" then
    error(("ps.data.loader: table is a text; write table = ps.data.table %q"):format(options.table))
  end
  if options.texts and options.table then
    error "ps.data.loader: texts and table were both given; give only one of them"
  end
  if not (options.batch and options.seq) then error("the loader needs batch and seq") end
  for _, name in ipairs { "batch", "seq", "vocab", "ahead" } do small(options, name) end
  if options.device ~= nil then devices.open(options.device) end
  local seed = caller.seed(options.seed or 0, "ps.data.loader: seed")
  local shuffle = options.shuffle ~= false
  local of_mesh = options.rank == nil and options.world_size == nil
  local rank = small(options, "rank", of_mesh and mesh.rank "dp" or 0)
  local world_size = small(options, "world_size", of_mesh and mesh.size "dp" or 1)
  if rank < 0 or rank >= world_size then
    error(("the loader's rank must be 0 to world_size - 1, not %d with a world_size of %d"):format(rank, world_size))
  end
  local self = { batch = options.batch, seq = options.seq, shuffle = shuffle, rank = rank, world_size = world_size,
    global_batch = options.batch * world_size, seed = seed, device = options.device, of_mesh = of_mesh,
    group = of_mesh and mesh.group "dp" or nil, world = of_mesh and mesh.group "world" or nil }
  if options.texts or options.table then
    text_rows.fill(self, options)
    return setmetatable(self, self.rows.stream and Streaming or Loader)
  end
  local shards = shards_of(options)
  local first, last = range_of(options, shards)
  local config = ffi.new("ps_loader_config", { batch = options.batch, seq = options.seq, vocab = options.vocab or 0,
    first = first, last = last, seed = seed, shuffle = shuffle and 1 or 0, ahead = options.ahead or 2,
    rank = rank, world_size = world_size })
  local handles = handle_array(#shards)
  for i, shard in ipairs(shards) do handles[i - 1] = shard.handle end
  local out = ffi.new("ps_loader *[1]")
  check(C.ps_loader_new(#shards, handles, config, out))
  local n = options.batch * options.seq
  self.handle, self.first, self.last, self.shards = ffi.gc(out[0], C.ps_loader_free), first, last, shards
  self.batches, self.at = tonumber(C.ps_loader_batches(out[0])), ffi.new("ps_loader_position")
  self.x, self.y = int_array(n), int_array(n)
  return setmetatable(self, Loader)
end

-- Returns the next batch. Returns nil at the end of an epoch.
local function turn(self)
  if self.of_mesh and mesh.is_open() and mesh.group "dp" ~= self.group then
    error("the loader was made before the processes joined a group or were divided into stages, and would read " ..
      "other ranks' rows: "
      .. "make it after ps.initialize, or call ps.mesh { pp = ... } first")
  end
  native.collect_turn()
  if self.rows then
    local batch = give_rows(self)
    if batch and self.world and not read_by[self.world] then read_by[self.world] = self end
    return batch
  end
  check(C.ps_loader_get_position(self.handle, self.at))
  local given = C.ps_loader_next(self.handle, self.x, self.y)
  check(given)
  if given == 0 then return nil end
  if self.world and not read_by[self.world] then read_by[self.world] = self end
  local rng = random.state()
  rng.sample = (self.at.epoch * self.batches + self.at.batch) * self.global_batch + self.rank * self.batch
  rng.op = 0
  return give(self, self.x, self.y, self.batch, self.seq)
end

--- Returns the next batch. After the last batch of an epoch it returns the first batch of the next epoch.
---@return ps.Tensor|table x int32 [batch, seq]; for texts and tables, the whole batch
---@return ps.Tensor? y int32 [batch, seq]; for each token of x, the token that follows it
function Loader:next()
  local x, y = turn(self)
  if x == nil then x, y = turn(self) end
  return x, y
end

--- `for batch in loader do` iterates over the remaining batches of the current epoch. Each batch is a table {x, y},
--- which can be passed to the model of an engine.
---@return ps.Tensor[]|table? batch nil at the end of the epoch
function Loader:__call()
  local x, y = turn(self)
  if x ~= nil then return self.rows and x or { x, y } end
end

--- `for x, y in loader:epoch() do` iterates over the remaining batches of the current epoch.
---@return fun(): ps.Tensor|table?, ps.Tensor? x and y, both int32 [batch, seq]; for texts and tables, the whole batch
function Loader:epoch()
  return function() return turn(self) end
end

--- Returns the number of batches per epoch. `loader.batches` is the same number.
---@return integer
function Loader:size() return self.batches end

--- Returns the position of the next batch. A global batch consists of the batches of all ranks. `batch` is the index of
--- the next global batch in its epoch, counted from 0.
---@return {epoch: integer, batch: integer, window?: integer, row?: integer} a loader of texts or of a table also
--- returns its exact position as `window` and `row`
function Loader:position()
  if self.rows then return text_rows.position(self) end
  check(C.ps_loader_get_position(self.handle, self.at))
  return { epoch = tonumber(self.at.epoch), batch = tonumber(self.at.batch) }
end

--- Makes the loader continue at a position that Loader:position returned.
---@param position {epoch: integer, batch?: integer, window?: integer, row?: integer}
function Loader:seek(position)
  caller.typed(position, "table", "loader:seek: the position")
  if self.rows then
    text_rows.seek(self, position)
    return
  end
  for _, key in ipairs { "epoch", "batch" } do
    if type(position[key]) ~= "cdata" then caller.whole(position[key], "loader:seek: " .. key) end
  end
  local at = ffi.new("ps_loader_position", { epoch = position.epoch, batch = position.batch })
  check(C.ps_loader_set_position(self.handle, at))
end

-- Fields that must be equal in the loader that saved a position and in the loader that loads it. If a field differs,
-- the position refers to other samples.
local IDENTITY = { "seq", "shuffle", "seed", "first", "last", "texts", "drop_last", "window", "packing",
  "group_by_length", "too_long", "mixture" }

--- Returns the loader's position as a state that can be saved. The state is equal on all ranks. A run can resume from
--- it with any number of ranks (see load_state_dict).
---@return table state its field `batch` is the number of rows of a global batch
function Loader:state_dict()
  local state = { position = self:position(), batch = self.global_batch, batches = self.batches }
  for _, key in ipairs(IDENTITY) do state[key] = self[key] end
  state.seed = tostring(self.seed)
  return state
end

-- Converts a saved position to a position of this loader, whose global batch may have another size. If the saved
-- position is the end of an epoch, the result is also the end of the epoch. Inside an epoch, the number of samples that
-- were used must be a multiple of this loader's global batch. Otherwise some samples would be repeated or skipped.
local function position_here(self, state)
  local at, here = state.position, self.global_batch
  if type(at) ~= "table" or type(state.batch) ~= "number" or not tonumber(at.epoch)
    or not tonumber(at.batch or at.window) then
    error("this is not the state of a loader: its position or batch is missing")
  end
  if at.window ~= nil then return at end  -- `window` and `row` do not depend on the batch size
  if state.batch == here then return at end
  if at.batch == state.batches then return { epoch = at.epoch, batch = self.batches } end
  local given = at.batch * state.batch
  if given % here ~= 0 then
    error(("the saved loader has used %d samples of epoch %d, %d batches of %d rows; with batches of %d rows (%d " ..
      "on each of %d ranks) it cannot continue there without repeating or skipping some: use a batch times world_size "
        .. "" ..
      "that divides %d, such as the old %d, or save at the end of an "
        .. "epoch"):format(given, at.epoch, at.batch, state.batch,
      here, self.batch, self.world_size, given, state.batch))
  end
  return { epoch = at.epoch, batch = given / here }
end

--- Makes the loader continue at a saved position. The number of ranks may differ from the run that saved the position.
--- The global batch (batch * world_size) may differ in two cases: if the position is the end of an epoch, or if this
--- loader's global batch divides the number of samples that the saved loader had used in the epoch. If any other
--- setting differs, this function raises an error.
---@param state table
function Loader:load_state_dict(state)
  caller.typed(state, "table", "the saved state of a loader")
  for _, key in ipairs(IDENTITY) do
    if tostring(state[key]) ~= tostring(self[key]) then
      error(("the saved loader has %s = %s, but this one has %s, so its position would select other data; use the "
        .. "data and " ..
        "settings with which it was saved"):format(key, tostring(state[key]), tostring(self[key])))
    end
  end
  self:seek(position_here(self, state))
end

--- `for x, y in ps.data.windows { file =, batch =, seq = } do` iterates once over all windows of `seq` tokens, in
--- order, for evaluation. A batch has `batch` rows, but the last batch may have fewer rows.
---@param options {shards?: (string|ps.Tokens)[], file?: string, width?: integer, batch: integer, seq: integer, first?:
--- integer, last?: integer, split?: number[], limit?: integer, device?: string} limit: maximum number of windows; the
--- windows are then spread evenly over the range of tokens
---@return fun(): ps.Tensor?, ps.Tensor? x and y, both int32 [rows, seq]
function data.windows(options)
  options = caller.options(options, "ps.data.windows", WINDOWS)
  local shards = shards_of(options)
  if #shards > 1 then error("ps.data.windows reads only one shard; pass one") end
  for _, name in ipairs { "batch", "seq" } do caller.whole(options[name], "ps.data.windows: " .. name) end
  local first, last = range_of(options, shards)
  local tokens, seq = shards[1], options.seq
  local count = math.floor((last - first - 1) / seq)
  local given = math.min(count, options.limit or count)
  if given < 1 then
    error(("%s: %d tokens are fewer than a window of %d and its targets, %d together; use more text, or a smaller seq")
      :format(tokens.path, last - first, seq, seq + 1))
  end
  if options.device ~= nil then devices.open(options.device) end
  local self, at = { device = options.device }, 0
  return function()
    if at >= given then return nil end
    native.collect_turn()
    local rows = math.min(options.batch, given - at)
    local x, y = int_array(rows * seq), int_array(rows * seq)
    for r = 0, rows - 1 do
      local start = first + math.floor((at + r) * count / given) * seq
      local ids = tokens:read(start, seq + 1)
      ffi.copy(x + r * seq, ids, seq * 4)
      ffi.copy(y + r * seq, ids + 1, seq * 4)
    end
    at = at + rows
    return give(self, x, y, rows, seq)
  end
end

data.iterate = require("ps.data.iterator").of
data.table, data.mix, data.format = tables.open, tables.mix, formats.recognise
data.conversation, data.prompt, data.ids = formats.conversation, formats.prompt, formats.ids

exact.all(Tokens, "tokens:", true)
exact.all(Loader, "loader:", true)

return data
