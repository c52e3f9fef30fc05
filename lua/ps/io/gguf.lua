-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the metadata and the tensors of GGUF files (src/io/gguf.c). GGUF is the file format of llama.cpp, whose program
-- gguf-split divides a file into parts (NAME-00001-of-00003.gguf). A divided file is opened by the path of any part.
-- A tensor has the same name as in the file, unless `present` renames the tensor.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local exact = require "ps.core.exact"
local ffi = require "ffi"
local chars = require "ps.core.array" "char"
local pieces = require "ps.io.pieces"
local rectangles = require "ps.core.rectangles"
local C, check = native.C, native.check
local error = caller.error

local gguf = {}

local VALUES = { [0] = "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array",
  "uint64", "int64", "float64" }
local STRING, ARRAY, BOOL, UINT64, FLOAT32, FLOAT64 = 8, 9, 7, 10, 6, 12
local EXACT = 2 ^ 53                                       -- Lua represents whole numbers up to this limit exactly

---@class ps.Gguf an open file; if the file was split, all of its parts
---@field path string path of the first part
---@field private mmap boolean true if tensors use the mapped bytes of the file where possible
---@field private parts ffi.cdata*[] the open parts
---@field private home table<string, {g: ffi.cdata*, i: integer, heads?: integer, packed?: boolean}> the location of
---  each tensor; the keys are the tensors' names after `present`
---@field private order string[] the tensors' names after `present`, in file order
local File = {}
File.__index = File

local OPEN = { mmap = "boolean" }

-- Takes the path of one part of a file. Returns the paths of all parts, and the given part's index, counted from 0.
-- Returns nil if the path does not have the form of a part's name.
local function parts_of(path)
  local stem, number, count = path:match("^(.*)%-(%d%d%d%d%d)%-of%-(%d%d%d%d%d)%.gguf$")
  if not stem then return nil end
  local paths = {}
  for i = 1, tonumber(count) do paths[i] = ("%s-%05d-of-%s.gguf"):format(stem, i, count) end
  return paths, tonumber(number) - 1
end

local function open_part(path)
  local out = ffi.new("ps_gguf *[1]")
  check(C.ps_gguf_open(path, out))
  return ffi.gc(out[0], C.ps_gguf_close)
end

-- Converts a metadata value to a Lua value. Whole numbers above 2^53 become cdata.
local function value_of(out)
  local of = out.of
  if of == STRING then return ffi.string(out.text, out.whole) end
  if of == BOOL then return out.whole ~= 0 end
  if of == FLOAT32 or of == FLOAT64 then return out.number end
  if math.abs(out.number) <= EXACT then return tonumber(out.whole) end
  return of == UINT64 and ffi.cast("uint64_t", out.whole) or out.whole
end

-- Adds the tensors of a part to the file. Each tensor keeps its name.
local function add_part(self, g)
  self.parts[#self.parts + 1] = g
  for i = 0, C.ps_gguf_count(g) - 1 do
    local name = ffi.string(C.ps_gguf_name(g, i))
    if self.home[name] then error(("%s: tensor '%s' is in two of its parts"):format(self.path, name)) end
    self.home[name] = { g = g, i = i }
    self.order[#self.order + 1] = name
  end
end

-- Opens all parts of a split file except the first, which is already open. Checks that all parts belong together.
local function open_parts(self, paths)
  local count, total = self:meta "split.count" or 1, self:meta "split.tensors.count"
  if paths and count ~= #paths then
    error(("%s: its name says %d parts, but split.count says %s"):format(self.path, #paths, tostring(count)))
  end
  if not paths and count ~= 1 then
    error(("%s: it is one of %s parts; rename it to its original name, such as NAME-00001-of-%05d.gguf, next to " ..
      "the others"):format(
      self.path, tostring(count), tonumber(count) or 0))
  end
  for k = 2, #(paths or {}) do
    local g = open_part(paths[k])
    local at = C.ps_gguf_meta_find(g, "split.no")
    local out = ffi.new("ps_gguf_value")
    if at >= 0 then check(C.ps_gguf_meta_get(g, at, 0, out)) end
    if at < 0 or tonumber(out.whole) ~= k - 1 then
      error(("%s: its split.no is %s; it must be %d"):format(paths[k], at < 0 and "missing"
        or tostring(tonumber(out.whole)), k - 1))
    end
    add_part(self, g)
  end
  if total and total ~= #self.order then
    error(("%s: all parts together have %d tensors, but split.tensors.count says %s"):format(self.path, #self.order,
      tostring(total)))
  end
end

--- Opens a file and checks its whole header.
---@param path string path of the file or, if the file was split, of any of its parts
---@param options? {mmap?: boolean} mmap has the same meaning as in ps.load
---@return ps.Gguf
function gguf.open(path, options)
  caller.typed(path, "string", "a GGUF file: the path")
  options = caller.options(options, "gguf.open", OPEN)
  local paths = parts_of(path)
  local self = setmetatable({ path = paths and paths[1] or path, mmap = options.mmap or false, parts = {}, home = {},
    order = {} }, File)
  local ok, problem = pcall(function()
    add_part(self, open_part(self.path))
    open_parts(self, paths)
  end)
  if ok then return self end
  self:close()
  error(problem, 0)
end

--- Opens a file, calls fn with it, and closes it. The file is closed even if fn raises an error.
---@param path string
---@param fn fun(file: ps.Gguf): any
---@return any result of fn
function gguf.with(path, fn)
  local file = gguf.open(path)
  local ok, result = pcall(fn, file)
  file:close()
  if not ok then error(result, 0) end
  return result
end

--- Returns whether a path ends in ".gguf".
---@param path string
---@return boolean
function gguf.is_path(path) return path:match("%.gguf$") ~= nil end

--- Returns a list of the files that belong to a path. If the path is the name of a part, the list contains the paths of
--- all parts. Otherwise it contains only the given path.
---@param path string
---@return string[]
function gguf.paths(path) return (parts_of(path)) or { path } end

--- Returns the metadata entries whose keys match a Lua pattern, in file order.
---@param file ps.Gguf
---@param pattern string
---@return ps.gguf.Entry[]
function gguf.entries(file, pattern)
  local entries = {}
  for _, key in ipairs(file:keys()) do
    if key:match(pattern) then
      local value, kind = file:meta(key)
      entries[#entries + 1] = { key, kind, value }
    end
  end
  return entries
end

--- Checks the path of a file that will be written. Raises an error if the path has the form of a part's name, such as
--- NAME-00001-of-00003.gguf. Files are always written whole, so a file with such a name could not be opened. It could
--- also replace a part of the model that is being read.
---@param path string
---@param call string name of the calling function, for the error
function gguf.check_whole(path, call)
  local paths = parts_of(path)
  if paths and #paths ~= 1 then
    error(("%s: %s is the name of one of %d parts, but the file is written whole; choose another name"):format(call,
      path, #paths))
  end
end

local function opened(self)
  if getmetatable(self) ~= File then error("call a file's methods with a colon: file:tensor(name)") end
  if not self.parts[1] then error(self.path .. ": this file was closed") end
  return self.parts[1]
end

-- -- metadata -------------------------------------------------------------------------------------------------------
--- Returns the keys of the metadata, in file order.
---@return string[]
function File:keys()
  local keys, g = {}, opened(self)
  for i = 0, C.ps_gguf_meta_count(g) - 1 do keys[i + 1] = ffi.string(C.ps_gguf_meta_key(g, i)) end
  return keys
end

-- Finds a metadata entry. Returns a ps_gguf_value with the entry's type and number of values, the part that contains
-- the entry, and the entry's index in this part. Returns nil if no entry has this key.
local function meta_of(self, key)
  local g, out = opened(self), ffi.new("ps_gguf_value")
  local i = C.ps_gguf_meta_find(g, key)
  if i < 0 then return nil end
  check(C.ps_gguf_meta_get(g, i, -1, out))
  return out, g, i
end

--- Returns a metadata value. An array is returned as a list, and any other value as a number, a string or a boolean.
--- Returns nil if no entry has this key.
---@param key string
---@return any value
---@return string? type the value's type, such as "uint32"; for an array, the type of its values
---@return boolean? is_array
function File:meta(key)
  local out, g, i = meta_of(self, key)
  if not out then return nil end
  local kind = VALUES[out.of]
  if out.type ~= ARRAY then
    check(C.ps_gguf_meta_get(g, i, 0, out))
    return value_of(out), kind, false
  end
  local list, n = {}, tonumber(out.n)
  for k = 0, n - 1 do
    check(C.ps_gguf_meta_get(g, i, k, out))
    list[k + 1] = value_of(out)
  end
  return list, kind, true
end

--- Returns the length of an array in the metadata, or nil if no entry has this key.
---@param key string
---@return integer?
function File:meta_length(key)
  local out = meta_of(self, key)
  return out and tonumber(out.n) or nil
end

--- Returns a metadata value. Raises an error if the value is not of the given kind. If no entry has this key, returns
--- nil, or raises an error if `needed` is true.
---@param key string
---@param kind "number"|"whole"|"string"|"boolean"|"strings"|"numbers"
---@param needed? boolean
---@return any
function File:get(key, kind, needed)
  local value, of, is_array = self:meta(key)
  if value == nil then
    if needed then error(("%s: the metadata has no %s"):format(self.path, key)) end
    return nil
  end
  local list = kind == "strings" or kind == "numbers"
  local one = list and kind:sub(1, -2) or kind == "whole" and "number" or kind
  local first = value
  if is_array then first = value[1] end
  local fine = is_array == list and (first == nil or type(first) == one)
    and (kind ~= "whole" or value % 1 == 0 and value >= 0)
  if not fine then
    error(("%s: %s is %s%s%s; it must be %s"):format(self.path, key, is_array and "an array of " or "", of,
      type(value) ~= "table" and (" (%s)"):format(tostring(value)) or "", kind))
  end
  return value
end

-- -- tensors ----------------------------------------------------------------------------------------------------------
local function home_of(self, name)
  opened(self)
  local home = self.home[caller.typed(name, "string", "the name of a tensor in " .. self.path)]
  if not home then error(("%s holds no tensor '%s'"):format(self.path, name)) end
  return home
end

local function entry_of(self, name)
  local home, entry = home_of(self, name), ffi.new("ps_gguf_entry")
  check(C.ps_gguf_get(home.g, home.i, entry))
  return entry, home
end

--- Renames a tensor. Also sets the layout in which the tensor is read (see ps_gguf_layout in src/ps.h).
---@param raw string the tensor's name in the file
---@param name string? the new name; nil excludes the tensor from names()
---@param layout? {heads?: integer, transposed?: boolean}
function File:present(raw, name, layout)
  local home = home_of(self, raw)
  layout = layout or {}
  check(C.ps_gguf_layout(home.g, home.i, layout.heads or 0, layout.transposed and 1 or 0))
  home.heads = layout.heads
  self.home[raw] = nil
  for i, one in ipairs(self.order) do
    if one == raw then
      if name then self.order[i] = name else table.remove(self.order, i) end
      break
    end
  end
  if name then
    if self.home[name] then error(("%s: two tensors are '%s'"):format(self.path, name)) end
    self.home[name] = home
  end
end

--- Returns the names of the tensors in file order.
---@return string[]
function File:names()
  opened(self)
  return { unpack(self.order) }
end

--- Returns whether the file has a tensor of this name.
---@param name string
---@return boolean
function File:has(name)
  opened(self)
  return self.home[name] ~= nil
end

--- Makes later reads of a quantized matrix return its blocks unchanged, as a uint8 tensor [rows, bytes per row]. The
--- rows are in the order that `present` sets. The dimensions are not swapped, even if `present` was called with
--- transposed = true.
---@param name string
function File:keep_packed(name) home_of(self, name).packed = true end

--- Returns the shape of a tensor, with the outermost dimension first.
---@param name string
---@return integer[]
function File:shape(name)
  local entry, home = entry_of(self, name)
  local shape = {}
  if home.packed then
    local rows = tonumber(C.ps_gguf_rows(home.g, home.i))
    return { rows, tonumber(entry.nbytes) / rows }
  end
  for d = 0, entry.ndim - 1 do shape[d + 1] = tonumber(entry.shape[d]) end
  return shape
end

--- Returns a tensor's type in the file, such as "F32" or "Q4_0".
---@param name string
---@return string
function File:type(name) return ffi.string(C.ps_gguf_type_name((entry_of(self, name)).type)) end

--- Returns the dtype that a tensor's values have after they are read. The dtype is fp32 if the file stores the tensor
--- in quantized blocks. If the type in the file is not supported, returns nil and the name of this type.
---@param name string
---@return string? dtype
---@return string? other
function File:dtype(name)
  local entry, home = entry_of(self, name)
  if home.packed then return "uint8" end
  if entry.dtype < 0 then return nil, ffi.string(C.ps_gguf_type_name(entry.type)) end
  return ffi.string(C.ps_dtype_name(entry.dtype))
end

local function known_dtype(self, name)
  local dtype, other = self:dtype(name)
  if not dtype then error(("%s: tensor '%s' has type %s, which is not supported"):format(self.path, name, other)) end
  return dtype
end

--- Raises an error if there is no tensor of this name, or if its type is not supported.
---@param name string
function File:check(name) known_dtype(self, name) end

--- Returns a tensor's size in the file in bytes.
---@param name string
---@return integer
function File:nbytes(name) return tonumber((entry_of(self, name)).nbytes) end

-- Fills a contiguous tensor of the entry's dtype. The entry must not be quantized: the file must store plain values of
-- this dtype.
local function fill(self, entry, home, tensor)
  if self.mmap then
    local rc = C.ps_tensor_borrow(tensor, C.ps_gguf_lend, home.g, entry.at, entry.nbytes)
    -- PS_EUNSUP: this tensor cannot use the mapped bytes (see ps_tensor_borrow), so the bytes are copied below.
    if rc ~= C.PS_EUNSUP then return check(rc) end
  end
  native.retry(C.ps_tensor_load, tensor, C.ps_gguf_read, home.g, entry.at, entry.nbytes)
end

--- Returns up to n bytes from the middle of a tensor's data in the file, without conversion.
---@param name string
---@param n integer
---@return string
function File:middle(name, n)
  local entry, home = entry_of(self, name)
  n = math.min(n, tonumber(entry.nbytes))
  local bytes, buffer = create.empty({ n }, { dtype = "uint8", device = "cpu" }), chars(n)
  local first = math.floor((tonumber(entry.nbytes) - n) / 2)
  native.retry(C.ps_tensor_load, bytes, C.ps_gguf_read, home.g, entry.at + first, n)
  check(C.ps_tensor_read(bytes, buffer, n))
  C.ps_gguf_drop(home.g, home.i)
  return ffi.string(buffer, n)
end

--- Returns a new tensor with the values of `name`. The tensor is not freed at the end of a scope.
---@param name string
---@param device? string
---@return ps.Tensor
function File:tensor(name, device)
  local tensor = create.empty(self:shape(name), { dtype = known_dtype(self, name), device = device })
  self:read_into(name, tensor)
  return tensor:keep()
end

--- Reads the values of `name` into `tensor`, which must have the same shape. Converts the values to the dtype of
--- `tensor`.
---@param name string
---@param tensor ps.Tensor
function File:read_into(name, tensor)
  local entry, home = entry_of(self, name)
  if not scope.is_tensor(tensor) then error("read_into takes a tensor after the name, not a " .. type(tensor)) end
  local shape = self:shape(name)
  pieces.check_whole(self.path, name, shape, tensor:shape())
  local as_it_is = entry.as_it_is ~= 0 or home.packed and not home.heads
  if as_it_is and known_dtype(self, name) == tensor:dtype() and C.ps_tensor_is_contiguous(tensor) ~= 0 then
    return fill(self, entry, home, tensor)
  end
  self:read_part(name, tensor, rectangles.zeros(shape))
end

--- Reads a rectangle of the tensor `name` into `tensor`, which must have the rectangle's shape. Converts the values to
--- the dtype of `tensor`. Reads only the blocks that contain a part of the rectangle.
---@param name string
---@param tensor ps.Tensor
---@param offset integer[] position of the rectangle's first element in `name`
function File:read_part(name, tensor, offset)
  local entry, home = entry_of(self, name)
  local dtype, shape = known_dtype(self, name), tensor:shape()
  pieces.check_part(self.path, name, self:shape(name), shape, offset)
  if home.packed then
    if not rectangles.same(self:shape(name), shape) then
      error(("%s: tensor '%s' is packed, and only all of it can be read"):format(self.path, name))
    end
    pieces.convert(tensor, dtype, function(buffer, first, n)
      check(C.ps_gguf_copy_packed(home.g, home.i, first, buffer, n))
    end)
    return C.ps_gguf_drop(home.g, home.i)
  end
  local from, size = ffi.new("int64_t[8]", offset), ffi.new("int64_t[8]", shape)
  pieces.convert(tensor, dtype, function(buffer, first, n)
    check(C.ps_gguf_copy(home.g, home.i, from, size, first, buffer, n))
  end)
  if entry.nbytes > 0 then C.ps_gguf_drop(home.g, home.i) end
end

--- Closes the file. Tensors that were read from it remain valid. If tensors use bytes of the mapped file, the file
--- remains mapped until these tensors are freed.
function File:close()
  if getmetatable(self) ~= File then opened(self) end
  for _, g in ipairs(self.parts) do C.ps_gguf_close(ffi.gc(g, nil)) end
  self.parts, self.home, self.order = {}, {}, {}
end

exact.all(File, "file:", true)

return gguf
