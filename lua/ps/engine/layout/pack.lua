-- SPDX-License-Identifier: BSD-3-Clause
-- Assigns tensors to positions in chunks, and chooses the size of chunks. All functions are pure, so equal arguments
-- give equal results on all ranks.
--
-- Packing. The list of tensors is in the order of registration, which is assumed to be the order of first use. The
-- tensors are divided into groups, and a chunk contains tensors of only one group. The tensors of a group have the same
-- dtype, optimizer states and virtual stage. In addition, either all or none of them train, stay on the rank after a
-- gather, and have their bytes in a file of the user. All kinds of chunks of a group (parameter, master, averages) have
-- the same layout.
--
-- A tensor is placed in the newest chunk of its group if this chunk has room, and otherwise in a new chunk. Therefore
-- tensors that are used one after the other are in the same chunk, and one fetch moves them together. A tensor that is
-- larger than the chunk size gets a chunk of its own. The small tensors before and after this tensor share a chunk.
-- Packing works with any chunk size.
--
-- Offsets are multiples of 128 elements (256 bytes in bf16). The size of a chunk is the end of its last tensor, rounded
-- up to a multiple of 2048 elements. In bf16, 2048 elements have 4096 bytes, which is the unit of direct I/O. With
-- `uniform`, all chunks of a group have the same size, except the last chunk, which may be shorter. A tensor may then
-- also fill a gap in one of the `lookback` chunks before the newest chunk.
--
-- Searching. For each chunk size, the search adds four costs. It chooses the size with the smallest sum. If several
-- sizes have this sum, it chooses the smallest of these sizes. Each cost is a fraction of the whole:
--   waste      the bytes of chunks that no tensor uses
--   copies     the fixed time of the copies. For each copy, it is about the time in which MOVE_COST elements are
--              transferred. This cost is high if chunks are small
--   coarse     the fast memory that is allocated but not needed. Fast memory is allocated and freed in whole chunks. On
--              average, the fraction COARSE of a working set is not needed at the moment. This cost is proportional to
--              (chunk size) / (size of the fast memory)
--   uneven     (bytes of the fullest rank) / (mean over all ranks) - 1, if ranks share the chunks
-- The working set of a chunk consists of the chunks of all kinds at the same position. SETS working sets must fit into
-- the fastest tier, so that chunks can be fetched before they are needed. The fastest tier may be smaller only if all
-- chunks fit into it at once. The search tries round sizes, equal parts of the whole, and sums of adjacent tensors in a
-- repeated block. If the size is such a sum, chunks end at layer boundaries.
local caller = require "ps.core.caller"
local share = require "ps.engine.layout.share"
local human = require("ps.core.readable").bytes
local error = caller.error

local layout = {}

layout.ALIGN = 128             -- the offset of a tensor is a multiple of this number of elements
layout.UNIT = 2048             -- the size of a chunk is a multiple of this number of elements
layout.SMALLEST = 1024         -- smallest chunk size that can be set, in elements
-- This number of working sets must fit into the fastest tier, so that copies can begin early.
layout.SETS = 6

local ALIGN, UNIT, MI = layout.ALIGN, layout.UNIT, 1024 * 1024
-- The fixed cost of a copy, in elements. 65,536 elements of bf16 (128 KiB) take 50 us at 2.6 GB/s.
local MOVE_COST = 65536
local COARSE = 0.25
local FOR_A_RANK = 16          -- minimum number of chunks per rank, if the model is large enough
local BLOCK_TENSORS = 32       -- if a block has more than 32 tensors, each sum begins at one of the first 32 tensors

local ELEMENT = require("ps.core.dtype").nbytes
-- Bytes per element of a trained parameter with Adam, whose master, exp_avg and exp_avg_sq are in fp32. The gradient of
-- a bf16 or fp16 parameter is stored in the memory of the parameter. An fp32 parameter is its own master and has a
-- separate gradient.
local TRAINED = { bf16 = 14, fp16 = 14, fp32 = 16 }

---@class ps.layout.Entry
---@field numel integer
---@field dtype "bf16"|"fp16"|"fp32"
---@field trains boolean
---@field name? string
---@field states? ps.optimizers.State[] the tensor's optimizer states; it shares chunks only with tensors that have the
---  same optimizer states
---@field bytes? number bytes per element, summed over all kinds of chunks, if the tensor trains
---@field apart? boolean true if the tensor shares chunks only with tensors that also have `apart`
---@field lent? boolean true if the tensor's bytes are in a file; it shares chunks only with tensors that also have
---  `lent`
---@field vstage? integer index of the tensor's virtual stage among the virtual stages of this process (default 0)
---@field stays? boolean true if the tensor stays on this rank from its first gather to the end of the step (default:
---  the configuration's setting)

---@class ps.layout.Group
---@field dtype string
---@field trains boolean
---@field vstage integer
---@field stays? boolean value of `stays`, which is equal in all entries of the group
---@field states? ps.optimizers.State[] the optimizer states, which are equal in all entries of the group
---@field bytes number largest `bytes` among the entries of the group, or 0 if it is unknown
---@field chunks integer number of chunks
---@field numel integer number of elements of the group's chunks
---@field used integer number of elements of the group's tensors

---@class ps.layout.Chunk
---@field group integer index in Layout.groups, from 1
---@field index integer index within the group, from 0
---@field numel integer number of elements, a multiple of UNIT
---@field used integer number of elements of the chunk's tensors
---@field alone? boolean true if the chunk holds only one tensor, and this tensor is larger than chunk_size
---@field tensors {index: integer, offset: integer}[] `index` in the list of entries, `offset` in elements

---@class ps.layout.Layout
---@field chunk_size integer requested chunk size in elements, rounded up to a multiple of UNIT
---@field groups ps.layout.Group[] in the order of their first tensors
---@field chunks ps.layout.Chunk[] in the order of their first tensors
---@field numel integer
---@field used integer
---@field waste integer numel - used
---@field waste_share number waste / used (0 when there are no tensors)

local function round_up(n, unit) return math.ceil(n / unit) * unit end

local function whole(value, least)
  return type(value) == "number" and value == math.floor(value) and value >= least and value < 2 ^ 53
end

local function check_entry(entry, i)
  if type(entry) ~= "table" then error(("chunk layout: entry %d is a %s"):format(i, type(entry))) end
  local function refuse(key, expected)
    error(("chunk layout: entry %d (%s): %s is %s, expected %s"):format(i, tostring(entry.name or "no name"), key,
      tostring(entry[key]), expected))
  end
  if not whole(entry.numel, 0) then refuse("numel", "a whole number") end
  if not ELEMENT[entry.dtype] then refuse("dtype", "bf16, fp16 or fp32") end
  if type(entry.trains) ~= "boolean" then refuse("trains", "true or false") end
end

local function check_entries(entries)
  if type(entries) ~= "table" then error("chunk layout: expected a list of tensors, got " .. type(entries)) end
  for i, entry in ipairs(entries) do check_entry(entry, i) end
end

local function check_size(size, key)
  if not whole(size, layout.SMALLEST) then
    error(("chunk layout: %s = %s: expected a whole number of elements (not bytes), at least %d; larger tensors get "
      .. "chunks of their own, so any such size works"):format(key, tostring(size), layout.SMALLEST))
  end
end

-- Returns a chunk of `list` that has room for `need` more elements. Searches the newest chunk, and then the `lookback`
-- chunks before the newest chunk. Returns nil if none of these chunks has room.
local function place(list, need, capacity, lookback)
  for i = #list, math.max(1, #list - lookback), -1 do
    if list[i].fill + need <= capacity then return list[i] end
  end
end

local function state_names(entry)
  local names = {}
  for k, state in ipairs(entry.trains and entry.states or {}) do names[k] = state.name end
  return table.concat(names, " ")
end

local function pack(entries, chunk_size, uniform, lookback)
  local capacity = round_up(chunk_size, UNIT)
  local made = { chunk_size = capacity, groups = {}, chunks = {}, numel = 0, used = 0 }
  local groups, open = {}, {}
  local function new_chunk(group, alone)
    local chunk = { group = group, index = made.groups[group].chunks, used = 0, fill = 0, alone = alone, tensors = {} }
    made.groups[group].chunks = chunk.index + 1
    made.chunks[#made.chunks + 1] = chunk
    if not alone then table.insert(open[group], chunk) end
    return chunk
  end
  for i, entry in ipairs(entries) do
    local vstage = entry.vstage or 0
    local key = entry.dtype .. (entry.trains and "+" or "-") .. (entry.apart and "@" or "")
      .. (entry.lent and "~" or "") .. tostring(entry.stays) .. vstage .. " " .. state_names(entry)
    if not groups[key] then
      groups[key] = #made.groups + 1
      made.groups[groups[key]] = { dtype = entry.dtype, trains = entry.trains, vstage = vstage, stays = entry.stays,
        states = entry.states, bytes = 0, chunks = 0, numel = 0, used = 0 }
      open[groups[key]] = {}
    end
    local group, need = groups[key], math.max(ALIGN, round_up(entry.numel, ALIGN))
    local chunk = need > capacity and new_chunk(group, true)
      or place(open[group], need, capacity, lookback) or new_chunk(group)
    chunk.tensors[#chunk.tensors + 1] = { index = i, offset = chunk.fill }
    chunk.fill, chunk.used = chunk.fill + need, chunk.used + entry.numel
    made.groups[group].bytes = math.max(made.groups[group].bytes, entry.bytes or 0)
  end
  for _, chunk in ipairs(made.chunks) do
    local group, list = made.groups[chunk.group], open[chunk.group]
    local full = uniform and not chunk.alone and chunk ~= list[#list]
    chunk.numel = full and capacity or round_up(chunk.fill, UNIT)
    chunk.fill = nil
    group.numel, group.used = group.numel + chunk.numel, group.used + chunk.used
    made.numel, made.used = made.numel + chunk.numel, made.used + chunk.used
  end
  made.waste = made.numel - made.used
  made.waste_share = made.used > 0 and made.waste / made.used or 0
  return made
end

-- Packs tensors into chunks of one size. With `uniform`, a lookback lets tensors fill the unused ends of earlier
-- chunks. If the caller sets no lookback, this function tries several lookbacks, and returns the layout that wastes the
-- fewest elements.
local function pack_best(entries, chunk_size, options)
  if not options.uniform then return pack(entries, chunk_size, false, options.lookback or 0) end
  if options.lookback then return pack(entries, chunk_size, true, options.lookback) end
  local best
  for lookback = 0, 2 do
    local made = pack(entries, chunk_size, true, lookback)
    if not best or made.waste < best.waste then best = made end
  end
  return best
end

local PACK = { uniform = "boolean", lookback = "whole" }

--- Packs tensors into chunks of `chunk_size` elements, in order. The size must be at least SMALLEST.
---@param entries ps.layout.Entry[] in the order of use; a tied tensor appears once
---@param chunk_size integer
---@param options? {uniform?: boolean, lookback?: integer} uniform: if true, all chunks of a group have the same size,
---  except the last chunk. lookback: number of chunks before the newest chunk that may be filled (default 0; with
---  `uniform`, the number from 0 to 2 that wastes the fewest elements)
---@return ps.layout.Layout
function layout.pack(entries, chunk_size, options)
  check_entries(entries)
  check_size(chunk_size, "chunk_size")
  return pack_best(entries, chunk_size, caller.options(options, "layout.pack", PACK))
end

--- Returns the number of bytes per element that are needed at once for an update, summed over all kinds of chunks.
---@param group {dtype: string, trains: boolean, bytes?: number} a group or an entry
---@param trained? number bytes per element if the group trains (default 14 in a half dtype, 16 in fp32)
---@return number
function layout.state_bytes(group, trained)
  if not group.trains then return ELEMENT[group.dtype] end
  if group.bytes and group.bytes > 0 then return group.bytes end
  return trained or TRAINED[group.dtype]
end

-- -- search ---------------------------------------------------------------------------------------------------------

---@class ps.layout.Row
---@field size integer chunk size in elements
---@field layout ps.layout.Layout
---@field waste_share number
---@field bytes number total size in bytes of all chunks of all kinds
---@field bytes_per_param number bytes per parameter element, including waste
---@field set_bytes number size in bytes of the largest working set of a chunk that is not `alone`
---@field alone_bytes number size in bytes of the largest working set of a chunk that is `alone` (0 if there is none)
---@field copies number one of the costs that are described at the top of this file, as are `coarse` and `uneven`
---@field coarse number
---@field uneven number
---@field score number waste_share + copies + coarse + uneven
---@field feasible boolean
---@field why? string if the size is not feasible, the reason

-- Returns nil if the chunks of this layout fit into `capacity` bytes of the fastest tier. Otherwise returns the reason
-- why they do not fit.
local function obstacle(row, entries, capacity)
  if not capacity or row.bytes <= capacity then return nil end
  if row.alone_bytes > capacity then
    local name = entries[row.largest_alone.tensors[1].index].name or "the largest tensor"
    return ("%s with its state needs %s, more than the budget of %s"):format(
      name, human(row.alone_bytes), human(capacity))
  end
  if layout.SETS * row.set_bytes > capacity then
    return ("%d chunks with their state need %s, more than the budget of %s"):format(
      layout.SETS, human(layout.SETS * row.set_bytes),
      human(capacity))
  end
end

local function judge(entries, size, options)
  local made = pack_best(entries, size, options)
  local row = { size = made.chunk_size, layout = made, waste_share = made.waste_share, bytes = 0, set_bytes = 0,
    alone_bytes = 0 }
  local squares = 0  -- sum over all chunks of (elements of the chunk) * (size in bytes of its working set)
  for _, chunk in ipairs(made.chunks) do
    local set = chunk.numel * layout.state_bytes(made.groups[chunk.group], options.state_bytes)
    row.bytes, squares = row.bytes + set, squares + chunk.numel * set
    if not chunk.alone then
      row.set_bytes = math.max(row.set_bytes, set)
    elseif set > row.alone_bytes then
      row.alone_bytes, row.largest_alone = set, chunk
    end
  end
  local used, fast = math.max(made.used, 1), math.max(row.bytes, 1)
  if options.capacity then fast = math.min(fast, options.capacity) end
  row.bytes_per_param = row.bytes / used
  row.copies = #made.chunks * MOVE_COST / used
  row.coarse = COARSE * squares / math.max(made.numel, 1) / fast
  row.uneven = share.imbalance(share.out(made.chunks, options.ranks or 1, function(chunk)
    return chunk.numel * layout.state_bytes(made.groups[chunk.group], options.state_bytes)
  end))
  row.score = row.waste_share + row.copies + row.coarse + row.uneven
  row.why = obstacle(row, entries, options.capacity)
  row.feasible = row.why == nil
  return row
end

-- Returns the repeated blocks of a model. A block is a run of entries whose names are equal up to the first number
-- ("h.0.", "h.1.", ...). It is returned as the list of its entries' sizes in elements. If several blocks have the same
-- total size, only the first of these blocks is returned.
local function blocks_of(entries)
  local blocks, last, seen = {}, nil, {}
  for _, entry in ipairs(entries) do
    local key = entry.name and entry.name:match("^(.-%f[%d]%d+)%.")
    if key then
      key = key .. " " .. entry.dtype .. tostring(entry.trains)
      if not last or last.key ~= key then
        last = { key = key, total = 0 }
        blocks[#blocks + 1] = last
      end
      last[#last + 1] = math.max(ALIGN, round_up(entry.numel, ALIGN))
      last.total = last.total + last[#last]
    end
  end
  local distinct = {}
  for _, block in ipairs(blocks) do
    if not seen[block.total] and #distinct < 8 then distinct[#distinct + 1] = block end
    seen[block.total] = true
  end
  return distinct
end

local function candidates(entries, min, max)
  local sizes, seen, total = {}, {}, 0
  for _, entry in ipairs(entries) do total = total + math.max(ALIGN, round_up(entry.numel, ALIGN)) end
  max = math.max(min, math.min(max, round_up(total, UNIT)))  -- any larger size would also make only one chunk
  local function add(size)
    size = round_up(size, UNIT)
    if size >= min and size <= max and not seen[size] then
      seen[size] = true
      sizes[#sizes + 1] = size
    end
  end
  add(min)
  for power = 10, 40 do
    add(2 ^ power)
    add(1.5 * 2 ^ power)
  end
  for parts = 1, 64 do add(total / parts) end
  for _, block in ipairs(blocks_of(entries)) do
    for parts = 1, 4 do
      add(block.total / parts)
      add(block.total * parts)
    end
    for first = 1, math.min(#block, BLOCK_TENSORS) do
      local sum = 0
      for i = first, #block do
        sum = sum + block[i]
        add(sum)
      end
    end
  end
  table.sort(sizes)
  return sizes
end

-- Returns the smallest and the largest chunk size to try. The smallest size is reduced if there would be no room to
-- fetch chunks ahead, or if there would be too few chunks per rank.
local function range(entries, options)
  local min, max = options.min or MI, options.max or 64 * MI
  if (options.ranks or 1) > 1 and not options.min then
    local total = 0
    for _, entry in ipairs(entries) do total = total + entry.numel end
    min = math.max(UNIT, math.min(min, math.floor(total / options.ranks / FOR_A_RANK / UNIT) * UNIT))
  end
  if options.capacity and not options.min then
    local dearest = ELEMENT.bf16
    for _, entry in ipairs(entries) do
      dearest = math.max(dearest, layout.state_bytes(entry, options.state_bytes))
    end
    local most = options.capacity / dearest / layout.SETS
    if most < min then min = math.max(UNIT, math.floor(most / 8 / UNIT) * UNIT) end
  end
  return round_up(min, UNIT), math.max(round_up(max, UNIT), round_up(min, UNIT))
end

local SEARCH = { capacity = "number", state_bytes = "number", min = "number", max = "number", sizes = "table",
  chunk_size = "number", uniform = "boolean", lookback = "whole", ranks = "whole" }

local function check_options(options)
  for _, key in ipairs { "capacity", "state_bytes" } do
    local value = options[key]
    if value ~= nil and not (type(value) == "number" and value > 0) then
      error(("chunk layout: %s = %s: expected a number of bytes above 0"):format(key, tostring(value)))
    end
  end
  for _, key in ipairs { "min", "max", "chunk_size" } do
    if options[key] ~= nil then check_size(options[key], key) end
  end
  for _, size in ipairs(options.sizes or {}) do check_size(size, "sizes") end
end

---@class ps.layout.Options
---@field capacity? number bytes of the fastest tier that chunks may use, or nil if everything fits
---@field state_bytes? number bytes per trained element, summed over all kinds of chunks (default 14, or 16 in fp32)
---@field min? integer smallest size to try, in elements (default 1 Mi, or less if `capacity` or `ranks` requires a
---  smaller size)
---@field max? integer largest size to try, in elements (default 64 Mi)
---@field sizes? integer[] the only sizes to try
---@field chunk_size? integer the only size to try
---@field uniform? boolean see layout.pack
---@field lookback? integer see layout.pack
---@field ranks? integer number of ranks among which the chunks are shared (default 1)

---@class ps.layout.Search
---@field chosen ps.layout.Row the best feasible size, or the smallest size if none is feasible; its fields `feasible`
---  and `why` say whether it is feasible
---@field rows ps.layout.Row[] all sizes that were tried, in order of size

--- Tries chunk sizes and chooses one.
---@param entries ps.layout.Entry[]
---@param options? ps.layout.Options
---@return ps.layout.Search
function layout.search(entries, options)
  options = caller.options(options, "chunk layout", SEARCH)
  check_entries(entries)
  check_options(options)
  local sizes = options.chunk_size and { options.chunk_size } or options.sizes
  if not sizes or #sizes == 0 then sizes = candidates(entries, range(entries, options)) end
  local rows, chosen = {}, nil
  for i, size in ipairs(sizes) do rows[i] = judge(entries, size, options) end
  table.sort(rows, function(a, b) return a.size < b.size end)
  for _, row in ipairs(rows) do
    if row.feasible and (not chosen or row.score < chosen.score) then chosen = row end
  end
  return { chosen = chosen or rows[1], rows = rows }
end

return layout
