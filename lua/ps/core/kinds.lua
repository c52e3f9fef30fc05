-- SPDX-License-Identifier: BSD-3-Clause
-- Computes the size in bytes of a chunk of each kind (PS_KIND_ of src/ps.h). An update reads chunks of several kinds at
-- once. In these chunks, the tensors begin at different offsets, for the reason given at PS_KIND_SHIFT (src/ps.h).
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local kinds = {}

local PAGE = 4096                       -- chunk sizes are multiples of this number of bytes
-- Tensors begin at an offset only if the elements of their chunk have at least this total size in bytes. In a smaller
-- chunk the offset would waste memory.
local SHIFTED_FROM = 2 ^ 20
local function size_of(dtype) return tonumber(C.ps_dtype_size(native.dtype_code(dtype))) end

--- The names of kinds by number, and the numbers of kinds by name.
kinds.name, kinds.number = {}, {}
for i = 0, C.PS_KIND_STATE - 1 do
  local name = ffi.string(C.ps_kind_name(i))
  kinds.name[i], kinds.number[name] = name, i
end

-- The offset of each kind, in units of PS_KIND_SHIFT. States that never exist at the same time may share an offset.
local PLACE = { param = 0, param_fp32 = 1, grad = 4 }
local PLACE_OF_STATE = { 2, 3, 5, 6, 7, 8 }
local ALIKE = 3  -- each fp32 chunk of masters or states has room for at least this offset
local LAST = PLACE_OF_STATE[#PLACE_OF_STATE]

--- Adds a kind of chunks for an optimizer state, unless the kind exists.
---@param name string
---@param place integer index among the states of its optimizer, from 1
---@param instead? string the kind that the new kind replaces; the new kind gets the offset of the replaced kind
function kinds.add_state(name, place, instead)
  if kinds.number[name] then return end
  local number = C.ps_kind_state(name)
  native.check(number)
  kinds.name[number], kinds.number[name] = name, number
  PLACE[name] = instead and PLACE[instead] or PLACE_OF_STATE[place]
end

--- Returns an upper bound in bytes for the difference between the size of a chunk and the size of its `numel` fp32
--- elements. The bound holds for chunks of all kinds.
---@param numel integer
---@return integer
function kinds.most_extra(numel)
  if numel * size_of "fp32" < SHIFTED_FROM then return PAGE end
  return (math.ceil(LAST * C.PS_KIND_SHIFT / PAGE) + 1) * PAGE
end

local function start_at(place, numel, dtype)
  return numel * size_of(dtype) >= SHIFTED_FROM and place * C.PS_KIND_SHIFT or 0
end

--- Returns the offset in bytes of the first tensor in a chunk. The chunk has the given kind and holds `numel` elements
--- of a type.
---@param kind string
---@param numel integer
---@param dtype string
---@return integer
function kinds.start(kind, numel, dtype) return start_at(PLACE[kind], numel, dtype) end

--- Returns the size in bytes of a chunk. The chunk has the given kind and holds `numel` elements of a type. Chunks of
--- masters and of the first two fp32 states have the same size. Each such chunk can therefore reuse the memory of
--- another such chunk.
---@param kind string
---@param numel integer
---@param dtype string
---@return integer
function kinds.bytes(kind, numel, dtype)
  local place = PLACE[kind]
  if place ~= PLACE.grad and place ~= PLACE.param and dtype == "fp32" then place = math.max(place, ALIKE) end
  return math.ceil((numel * size_of(dtype) + start_at(place, numel, dtype)) / PAGE) * PAGE
end

return kinds
