-- SPDX-License-Identifier: BSD-3-Clause
-- Event files of TensorBoard. They consist of records in the framing of TFRecord. Each record is a protocol buffer of
-- the type Event (tensorflow/core/util/event.proto, summary.proto, framing of tensorflow/core/lib/io/record_writer). A
-- record is little-endian and has these fields:
--   uint64 length, uint32 masked CRC of these 8 bytes, the bytes, uint32 masked CRC of the bytes
-- The CRC is CRC-32C (Castagnoli). The masked CRC is the CRC rotated right by 15 bits, plus 0xa282ead8. This file
-- writes the following fields of the protocol buffers, which are listed with their numbers: Event.wall_time 1, step 2,
-- file_version 3, summary 5, session_log 7; Summary.value 1; Value.tag 1, simple_value 2; SessionLog.status 1.
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
---@return integer crc Signed, like the results of `bit`.
function tfevents.crc32c(text)
  local crc = -1
  for i = 1, #text do crc = bxor(rshift(crc, 8), table_of_crc[band(bxor(crc, text:byte(i)), 255)]) end
  return bxor(crc, -1)
end

local function uint32(value)
  return string.char(band(value, 255), band(rshift(value, 8), 255), band(rshift(value, 16), 255), rshift(value, 24))
end

local function masked(text) return uint32(tobit(ror(tfevents.crc32c(text), 15) + 0xa282ead8)) end

--- Frames data as a TFRecord.
---@param data string
---@return string
function tfevents.record(data)
  local length = uint32(#data) .. "\0\0\0\0"
  return length .. masked(length) .. data .. masked(data)
end

-- Encodes a whole number from 0 to 2^53 in groups of 7 bits, lowest first.
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

--- Returns the first record of a file.
---@param seconds number seconds since 1970
---@return string
function tfevents.version(seconds) return event(seconds, nil, field(3, BYTES, "brain.Event:2")) end

--- Returns the record of a run that begins or continues at `step`. TensorBoard drops those events of earlier files that
--- have this step or a later one.
---@param seconds number seconds since 1970
---@param step integer
---@return string
function tfevents.start(seconds, step) return event(seconds, step, field(7, BYTES, field(1, VARINT, varint(1)))) end

--- Returns a record with the scalars of one step.
---@param seconds number seconds since 1970
---@param step integer
---@param list {[1]: string, [2]: number}[] the tags and their values
---@return string
function tfevents.scalars(seconds, step, list)
  local values = {}
  for i, row in ipairs(list) do
    values[i] = field(1, BYTES, field(1, BYTES, row[1]) .. field(2, FIXED32, float(row[2])))
  end
  return event(seconds, step, field(5, BYTES, table.concat(values)))
end

return tfevents
