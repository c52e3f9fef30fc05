-- SPDX-License-Identifier: BSD-3-Clause
-- Writes GGUF files (src/io/gguf_write.c). The caller first passes the metadata as a list of entries. Then it appends
-- the values of each tensor, one piece at a time.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local leftovers = require "ps.core.leftovers"
local ffi = require "ffi"
local C, check = native.C, native.check
local error = caller.error

local writing = {}

local NUMBERS = { uint8 = 0, int8 = 1, uint16 = 2, int16 = 3, uint32 = 4, int32 = 5, float32 = 6, bool = 7, string = 8,
  uint64 = 10, int64 = 11, float64 = 12 }
local ARRAY = 9
local C_TYPES = { uint8 = "uint8_t[1]", int8 = "int8_t[1]", uint16 = "uint16_t[1]", int16 = "int16_t[1]",
  uint32 = "uint32_t[1]", int32 = "int32_t[1]", float32 = "float[1]", bool = "uint8_t[1]", uint64 = "uint64_t[1]",
  int64 = "int64_t[1]", float64 = "double[1]" }
local packers = {}

local function packed(kind, value)
  if kind == "bool" then value = value and 1 or 0 end
  local one = packers[kind] or ffi.new(C_TYPES[kind])
  packers[kind] = one
  one[0] = value
  return ffi.string(one, ffi.sizeof(one))
end

local function bytes_of(kind, value)
  if kind == "string" then return packed("uint64", #value) .. value end
  return packed(kind, value)
end

---@class ps.gguf.Entry an entry of the metadata
---@field [1] string the key
---@field [2] string the type, such as "uint32" or "string"; for an array, the type of its values
---@field [3] any the value; an array is a list

--- Returns the entries as they are stored in a file.
---@param entries ps.gguf.Entry[]
---@return string
function writing.entries(entries)
  local parts, seen = {}, {}
  for _, one in ipairs(entries) do
    local key, kind, value = one[1], one[2], one[3]
    if not NUMBERS[kind] then error(("the metadata's %s: there is no type '%s'"):format(key, tostring(kind))) end
    if seen[key] then error(("the metadata has %s twice"):format(key)) end
    seen[key] = true
    parts[#parts + 1] = bytes_of("string", key)
    if type(value) == "table" then
      parts[#parts + 1] = packed("uint32", ARRAY) .. packed("uint32", NUMBERS[kind]) .. packed("uint64", #value)
      for _, item in ipairs(value) do parts[#parts + 1] = bytes_of(kind, item) end
    else
      parts[#parts + 1] = packed("uint32", NUMBERS[kind]) .. bytes_of(kind, value)
    end
  end
  return table.concat(parts)
end

--- Overwrites the value of a metadata entry in a file. The file must already have an entry with this key, and the old
--- value must be a number of the same type.
---@param path string
---@param entry ps.gguf.Entry
function writing.replace(path, entry)
  local whole, key = writing.entries { entry }, bytes_of("string", entry[1]) .. packed("uint32", NUMBERS[entry[2]])
  local file, why = io.open(path, "r+b")
  if not file then error("cannot change a GGUF file: " .. why) end
  local at, text, base = nil, "", 0
  while not at do
    local piece = file:read(2 ^ 20)
    if not piece then break end
    text = text .. piece
    at = text:find(key, 1, true)
    if not at and #text > #key then text, base = text:sub(-#key), base + #text - #key end
  end
  local fine = at and entry[2] ~= "string" and type(entry[3]) ~= "table" and file:seek("set", base + at - 1)
    and file:write(whole)
  local closed, problem = file:close()
  if not closed then error(("cannot change the entry %s of %s: %s"):format(entry[1], path, problem)) end
  if not fine then error(("%s: it has no entry %s of type %s that can be changed"):format(path, entry[1], entry[2])) end
end

---@class ps.gguf.Declared a tensor that will be written
---@field name string name in the file
---@field type string such as "F32" or "Q4_0"
---@field shape integer[] shape of the values that are passed to append
---@field heads? integer see ps_gguf_layout in src/ps.h
---@field transposed? boolean

---@class ps.gguf.Writer
---@field private w ffi.cdata*
local Writer = {}
Writer.__index = Writer

--- Begins a file. If a file with this name exists, only commit replaces it. The caller must close the writer in any
--- case, also after commit.
---@param path string
---@param entries ps.gguf.Entry[]
---@param tensors ps.gguf.Declared[]
---@return ps.gguf.Writer
function writing.open(path, entries, tensors)
  local out, meta = ffi.new("ps_ggufw *[1]"), writing.entries(entries)
  leftovers.of(caller.typed(path, "string", "a GGUF file to write: the path"))
  check(C.ps_ggufw_new(path, out))
  local self = setmetatable({ w = ffi.gc(out[0], C.ps_ggufw_free) }, Writer)
  local ok, problem = pcall(function()
    for _, one in ipairs(tensors) do
      check(C.ps_ggufw_add(self.w, one.name, one.type, #one.shape, ffi.new("int64_t[8]", one.shape), one.heads or 0,
        one.transposed and 1 or 0))
    end
    check(C.ps_ggufw_begin(self.w, meta, #meta, #entries))
  end)
  if ok then return self end
  self:close()
  error(problem, 0)
end

--- Converts the next values of a tensor to the tensor's type and appends them to the file. If writing fails, the error
--- may be raised only by a later call of append or by commit.
---@param name string
---@param dtype string dtype of the values
---@param data ffi.cdata*
---@param numel integer
function Writer:append(name, dtype, data, numel)
  check(C.ps_ggufw_append(self.w, name, native.dtype_code(dtype), data, numel))
end

--- Completes the file after all tensors were appended: flushes the temporary file to the disk and renames it to `path`.
function Writer:commit() check(C.ps_ggufw_commit(self.w)) end

--- Closes the writer. If commit was not called, close removes the unfinished file.
function Writer:close()
  if self.w then C.ps_ggufw_free(ffi.gc(self.w, nil)) end
  self.w = nil
end

return writing
