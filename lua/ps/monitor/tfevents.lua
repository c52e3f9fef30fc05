-- SPDX-License-Identifier: BSD-3-Clause
-- Writes event files of TensorBoard. An event file is a sequence of records in the format TFRecord
-- (tensorflow/core/lib/io/record_writer). A record contains the following, where all numbers are little-endian:
--
--   uint64   length of the data in bytes
--   uint32   masked CRC of the length
--   bytes    the data: a protocol buffer of the type Event (tensorflow/core/util/event.proto, summary.proto)
--   uint32   masked CRC of the data
--
-- The CRC is CRC-32C (Castagnoli). The masked CRC is the CRC rotated right by 15 bits, plus 0xa282ead8. The protocol
-- buffers that this file writes have the following fields. The number of each field follows its name.
--
--   Event        wall_time 1, step 2, file_version 3, summary 5, session_log 7
--   Summary      value 1
--   Value        tag 1, simple_value 2
--   SessionLog   status 1
local ffi = require "ffi"
local band, bxor, bor, rshift, lshift, ror, tobit =
  bit.band, bit.bxor, bit.bor, bit.rshift, bit.lshift, bit.ror, bit.tobit

local tfevents = {}

local table_of_crc = ffi.new("int32_t[256]")
for byte = 0, 255 do
  local crc = byte
  for _ = 1, 8 do crc = bxor(rshift(crc, 1), band(crc, 1) ~= 0 and tobit(0x82F63B78) or 0) end
  table_of_crc[byte] = crc
end

--- Returns the CRC-32C of a text.
---@param text string
---@return integer crc Signed 32 bits, like the results of LuaJIT's `bit`.
function tfevents.crc32c(text)
  local crc = -1
  for i = 1, #text do crc = bxor(rshift(crc, 8), table_of_crc[band(bxor(crc, text:byte(i)), 255)]) end
  return bxor(crc, -1)
end

local function uint32(value)
  return string.char(band(value, 255), band(rshift(value, 8), 255), band(rshift(value, 16), 255), rshift(value, 24))
end

local function masked(text) return uint32(tobit(ror(tfevents.crc32c(text), 15) + 0xa282ead8)) end

--- Returns a TFRecord that contains the data.
---@param data string
---@return string
function tfevents.record(data)
  local length = uint32(#data) .. "\0\0\0\0"
  return length .. masked(length) .. data .. masked(data)
end

-- Encodes a whole number from 0 to 2^53 as a varint: groups of 7 bits, beginning with the lowest bits.
local function varint(value)
  local bytes = {}
  while value >= 128 do
    bytes[#bytes + 1] = string.char(value % 128 + 128)
    value = math.floor(value / 128)
  end
  return table.concat(bytes) .. string.char(value)
end

local function double(value) return ffi.string(ffi.new("double[1]", value), 8) end
local function float(value) return ffi.string(ffi.new("float[1]", value), 4) end

local VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
local function field(number, kind, data)
  return varint(bor(lshift(number, 3), kind)) .. (kind == BYTES and varint(#data) or "") .. data
end

local function event(seconds, step, rest)
  return tfevents.record(field(1, FIXED64, double(seconds)) .. (step and field(2, VARINT, varint(step)) or "") .. rest)
end

--- Returns the record that must be the first record of a file.
---@param seconds number seconds since 1970
---@return string
function tfevents.version(seconds) return event(seconds, nil, field(3, BYTES, "brain.Event:2")) end

--- Returns a record that says that a run begins or resumes at `step`. If earlier files contain events of this step or
--- of later steps, TensorBoard drops these events.
---@param seconds number seconds since 1970
---@param step integer
---@return string
function tfevents.start(seconds, step) return event(seconds, step, field(7, BYTES, field(1, VARINT, varint(1)))) end

--- Returns a record with the scalars of one step.
---@param seconds number seconds since 1970
---@param step integer
---@param list {[1]: string, [2]: number}[] pairs of a tag and its value
---@return string
function tfevents.scalars(seconds, step, list)
  local values = {}
  for i, row in ipairs(list) do
    values[i] = field(1, BYTES, field(1, BYTES, row[1]) .. field(2, FIXED32, float(row[2])))
  end
  return event(seconds, step, field(5, BYTES, table.concat(values)))
end

return tfevents
