-- SPDX-License-Identifier: BSD-3-Clause
-- Splits a layout (layout/pack.lua) into smaller chunks. The tensors of a large chunk are divided among several new
-- chunks, in the same order. The new chunks have the owner of the large chunk. A chunk is not split if it is small
-- enough or holds only one tensor. The functions are pure, so all ranks get the same result.
local pack = require "ps.engine.layout.pack"

local split = {}

local UNIT = pack.UNIT
local AT_MOST = 0.75  -- maximum of (next size) / (present size), so that a few tries reach any size

--- Returns the next chunk size to try. It is the size of the largest chunk that can be split, times the smaller of
--- `share` and AT_MOST. Returns nil if no chunk can be split.
---@param made ps.layout.Layout
---@param share number the fraction of an op's chunks for which there is room
---@return integer?
function split.next_size(made, share)
  local most = 0
  for _, chunk in ipairs(made.chunks) do
    if #chunk.tensors > 1 then most = math.max(most, chunk.numel) end
  end
  if most <= UNIT then return nil end
  return math.max(UNIT, math.floor(most * math.min(share, AT_MOST) / UNIT) * UNIT)
end

--- Packs some of a chunk's tensors into new chunks, which belong to the same group and the same owner. The first new
--- chunk has the index of `chunk`.
---@param chunk ps.layout.Chunk
---@param group ps.layout.Group the group in the new layout; its number of chunks is updated
---@param tensors {index: integer}[] entries of chunk.tensors, in order
---@param numel integer[] by a tensor's `index`, its number of elements
---@param size integer chunk size in elements, a multiple of UNIT
---@return ps.layout.Chunk[]
function split.pieces(chunk, group, tensors, numel, size)
  local entries = {}
  for k, at in ipairs(tensors) do
    entries[k] = { numel = numel[at.index], dtype = group.dtype, trains = group.trains, vstage = group.vstage }
  end
  local made = pack.pack(entries, size).chunks
  for k, piece in ipairs(made) do
    for _, at in ipairs(piece.tensors) do at.index = tensors[at.index].index end
    piece.group, piece.owner = chunk.group, chunk.owner
    piece.index = k == 1 and chunk.index or group.chunks      -- this index is not used by another chunk of the group
    group.chunks = group.chunks + (k == 1 and 0 or 1)
  end
  return made
end

--- Splits chunks that have more than `size` elements. A chunk that is not split keeps its Lua table. The new chunks
--- have the owner of the chunk that was split.
---@param made ps.layout.Layout
---@param numel integer[] by a tensor's `index`, its number of elements
---@param size integer chunk size in elements, a multiple of UNIT
---@return ps.layout.Layout
function split.chunks(made, numel, size)
  local new = { chunk_size = size, groups = {}, chunks = {}, numel = 0, used = made.used }
  for i, group in ipairs(made.groups) do
    new.groups[i] = { dtype = group.dtype, trains = group.trains, vstage = group.vstage, stays = group.stays,
      states = group.states, bytes = group.bytes, chunks = group.chunks, numel = 0, used = group.used }
  end
  local function add(chunk)
    local group = new.groups[chunk.group]
    new.chunks[#new.chunks + 1] = chunk
    group.numel, new.numel = group.numel + chunk.numel, new.numel + chunk.numel
  end
  for _, chunk in ipairs(made.chunks) do
    if #chunk.tensors == 1 or chunk.numel <= size then
      add(chunk)
    else
      for _, piece in ipairs(split.pieces(chunk, new.groups[chunk.group], chunk.tensors, numel, size)) do add(piece) end
    end
  end
  new.waste = new.numel - new.used
  new.waste_share = new.used > 0 and new.waste / new.used or 0
  return new
end

return split
