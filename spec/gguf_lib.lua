-- SPDX-License-Identifier: BSD-3-Clause
-- Writes GGUF files byte by byte for specs, also invalid ones.
local bit = require "bit"
local ffi = require "ffi"

local lib = {}

function lib.u32(n) return string.char(n % 256, math.floor(n / 256) % 256, math.floor(n / 65536) % 256,
  math.floor(n / 16777216) % 256) end
function lib.u64(n) return lib.u32(n % 2 ^ 32) .. lib.u32(math.floor(n / 2 ^ 32)) end
function lib.str(s) return lib.u64(#s) .. s end
function lib.f32(x) return ffi.string(ffi.new("float[1]", x), 4) end
function lib.f16(x)  -- Returns the fp16 bits of small whole numbers and their halves.
  if x == 0 then return "\0\0" end
  local sign, m, e = x < 0 and 0x8000 or 0, math.frexp(math.abs(x))
  local bits = sign + (e + 14) * 1024 + (m * 2 - 1) * 1024
  return string.char(bits % 256, bit.rshift(bits, 8))
end

local NUMBERS = { uint8 = 0, int8 = 1, uint16 = 2, int16 = 3, uint32 = 4, int32 = 5, float32 = 6, bool = 7, string = 8,
  uint64 = 10, int64 = 11, float64 = 12 }
local C_TYPES = { uint8 = "uint8_t", int8 = "int8_t", uint16 = "uint16_t", int16 = "int16_t", uint32 = "uint32_t",
  int32 = "int32_t", float32 = "float", bool = "uint8_t", uint64 = "uint64_t", int64 = "int64_t", float64 = "double" }

local function value_of(kind, value)
  if kind == "string" then return lib.str(value) end
  if kind == "bool" then value = value and 1 or 0 end
  local one = ffi.new(C_TYPES[kind] .. "[1]", value)
  return ffi.string(one, ffi.sizeof(one))
end

-- Returns an entry of the metadata. For an array, `value` is a list.
function lib.entry(key, kind, value)
  if type(value) ~= "table" then return lib.str(key) .. lib.u32(NUMBERS[kind]) .. value_of(kind, value) end
  local parts = { lib.str(key), lib.u32(9), lib.u32(NUMBERS[kind]), lib.u64(#value) }
  for i, one in ipairs(value) do parts[4 + i] = value_of(kind, one) end
  return table.concat(parts)
end

-- Returns the bytes of a file. `meta` is a list of { key, kind, value }, and `tensors` is a list of { name, type id,
-- shape from the outermost dimension on, bytes }. `how` has version and alignment.
function lib.file(meta, tensors, how)
  how = how or {}
  local alignment, parts, data, at = how.alignment or 32, {}, {}, 0
  parts[1] = "GGUF" .. lib.u32(how.version or 3) .. lib.u64(#tensors) .. lib.u64(#meta)
  for _, one in ipairs(meta) do parts[#parts + 1] = lib.entry(one[1], one[2], one[3]) end
  for _, t in ipairs(tensors) do
    parts[#parts + 1] = lib.str(t[1]) .. lib.u32(#t[3])
    for d = #t[3], 1, -1 do parts[#parts + 1] = lib.u64(t[3][d]) end
    parts[#parts + 1] = lib.u32(t[2]) .. lib.u64(at)
    local padding = -#t[4] % alignment
    data[#data + 1] = t[4] .. ("\0"):rep(padding)
    at = at + #t[4] + padding
  end
  local head = table.concat(parts)
  return head .. ("\0"):rep(-#head % alignment) .. table.concat(data)
end

function lib.write(path, bytes)
  local file = assert(io.open(path, "wb"))
  file:write(bytes)
  file:close()
  return path
end

-- Returns the fp32 bytes of a list of numbers.
function lib.floats(list) return ffi.string(ffi.new("float[?]", #list, list), 4 * #list) end

return lib
