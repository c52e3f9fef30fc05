-- SPDX-License-Identifier: BSD-3-Clause
-- Reads and writes safetensors files. Whole tensors and whole rows are read directly into memory. Other parts of
-- tensors are read through the memory map. With mmap = true, tensors use the bytes of the map itself, and a byte is
-- read from the disk only when a tensor uses it. A file is written completely or not at all, by means of a temporary
-- file, fsync and rename. Some files contain checksums, such as the files of checkpoints. The checksums are compared
-- when the file is opened and when tensors are read.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local array = require "ps.core.array"
local shard_note = require "ps.io.shard_note"
local caller = require "ps.core.caller"
local leftovers = require "ps.core.leftovers"
local ffi = require "ffi"
local pieces = require "ps.io.pieces"
local rectangles = require "ps.core.rectangles"
local exact = require "ps.core.exact"
local C, check = native.C, native.check
local error = caller.error

local safetensors = {}

local DTYPE = {}
for i = 0, C.PS_DTYPE_COUNT - 1 do DTYPE[ffi.string(C.ps_dtype_name(i))] = i end

---@class ps.SafeTensors an open file
---@field path string
---@field metadata table<string, string>
---@field private compares boolean true if the bytes of tensors are compared with the tensors' checksums
---@field private mmap boolean true if tensors use the bytes of the mapped file where possible
---@field private compared table<integer, boolean> by index of the tensors that `verify` was called for: true if the
---  checksum matched, false if the tensor has no checksum
local File = {}
File.__index = File

local OPEN, SAVE = { verify = "boolean", mmap = "boolean" }, { checksums = "boolean" }

--- Opens a file and checks its whole header.
---@param path string
---@param options? {verify?: boolean, mmap?: boolean} verify = false: the checksums of tensors are not compared.
---  mmap has the same meaning as in ps.load
---@return ps.SafeTensors
function safetensors.open(path, options)
  options = caller.options(options, "ps.safetensors.open", OPEN)
  local out = ffi.new("ps_st *[1]")
  check(C.ps_st_open(caller.typed(path, "string", "ps.safetensors.open: the path"), out))
  local self = setmetatable({ path = path, metadata = {}, compared = {}, st = ffi.gc(out[0], C.ps_st_close),
    compares = options.verify ~= false, mmap = options.mmap or false }, File)
  for i = 0, C.ps_st_meta_count(self.st) - 1 do
    self.metadata[ffi.string(C.ps_st_meta_key(self.st, i))] = ffi.string(C.ps_st_meta_value(self.st, i))
  end
  return self
end

local function opened(self)
  if getmetatable(self) ~= File then error("call a file's methods with a colon: file:tensor(name)") end
  if not self.st then error(self.path .. ": this file was closed") end
  return self.st
end

local function entry_of(self, name)
  local st = opened(self)
  local i = C.ps_st_find(st, caller.typed(name, "string", "the name of a tensor in " .. self.path))
  if i < 0 then error(("%s holds no tensor '%s'"):format(self.path, name)) end
  local entry = ffi.new("ps_st_entry")
  check(C.ps_st_get(st, i, entry))
  return entry, i
end

--- Returns the descriptions of all tensors that are shards of tensor parallelism, by tensor name. ps.save writes these
--- descriptions to the file.
---@return table<string, ps.nn.Shard>
function File:shards()
  opened(self)
  self.shards_of = self.shards_of or shard_note.read(self.metadata.psluajit_shards)
  return self.shards_of
end

--- Returns the names of the tensors in file order.
---@return string[]
function File:names()
  local names, st = {}, opened(self)
  for i = 0, C.ps_st_count(st) - 1 do names[i + 1] = ffi.string(C.ps_st_name(st, i)) end
  return names
end

--- Returns whether the file has a tensor of this name.
---@param name string
---@return boolean
function File:has(name)
  local st = opened(self)
  return C.ps_st_find(st, caller.typed(name, "string", "the name of a tensor in " .. self.path)) >= 0
end

--- Returns the shape of a tensor.
---@param name string
---@return integer[]
function File:shape(name)
  local entry, shape = entry_of(self, name), {}
  for d = 0, entry.ndim - 1 do shape[d + 1] = tonumber(entry.shape[d]) end
  return shape
end

--- Returns the dtype of a tensor. If the tensor's type is not supported, returns nil and the name of the type in the
--- file.
---@param name string
---@return string? dtype
---@return string? other
function File:dtype(name)
  local entry, i = entry_of(self, name)
  if entry.dtype < 0 then return nil, ffi.string(C.ps_st_dtype_text(self.st, i)) end
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

--- Compares a tensor's bytes with the tensor's checksum. Later calls for the same tensor do not compare again. If the
--- tensor is damaged, raises an error that contains the names of the tensor and the file.
---@param name string
---@return boolean has false if the file has no checksums
function File:verify(name)
  local _, i = entry_of(self, name)
  if self.compared[i] == nil then self.compared[i] = check(C.ps_st_verify(self.st, i)) == 1 end
  return self.compared[i]
end

--- Returns a tensor's checksum in the file, as 16 hexadecimal digits. Returns nil if the file has no checksums.
---@param name string
---@return string?
function File:checksum(name)
  local _, i = entry_of(self, name)
  local digits = (self.metadata.xxh3_64 or ""):sub((i + 1) * 17 + 1, (i + 1) * 17 + 16)
  return #digits == 16 and digits or nil
end

--- Returns the size of a tensor in bytes.
---@param name string
---@return integer
function File:nbytes(name) return tonumber((entry_of(self, name)).nbytes) end

-- Fills a contiguous tensor with all values of `name`. The dtype must be the same as in the file. The bytes are read
-- from the disk again after `verify`, and the disk may return other bytes. Therefore ps_st_read checks that its bytes
-- are the bytes that `verify` read.
local function fill(self, name, entry, tensor)
  if self.compares then self:verify(name) end
  if self.mmap then
    local rc = C.ps_tensor_borrow(tensor, C.ps_st_lend, self.st, entry.at, entry.nbytes)
    -- PS_EUNSUP: this tensor cannot use the mapped bytes (see ps_tensor_borrow), so the bytes are copied below.
    if rc ~= C.PS_EUNSUP then return check(rc) end
  end
  native.retry(C.ps_tensor_load, tensor, C.ps_st_read, self.st, entry.at, entry.nbytes)
end

-- The integer types of files that tensors do not support. For each type: its name in C, and the next larger type that
-- tensors support. The larger type can represent all values of the smaller type.
local WIDER = { I8 = { "int8_t", "int32" }, I16 = { "int16_t", "int32" }, U16 = { "uint16_t", "int32" },
  U32 = { "uint32_t", "int64" } }
local wide_array = { int32 = array "int32_t", int64 = array "int64_t" }

-- Returns a new tensor with all values of `name`. The type in the file is an integer type that tensors do not support.
-- The values are converted to the larger type `wider[2]`.
local function widened(self, name, wider, device)
  local st = opened(self)
  local _, i = entry_of(self, name)
  if self.compares then self:verify(name) end
  local tensor = create.empty(self:shape(name), { dtype = wider[2], device = "cpu" })
  local n = tensor:numel()
  local from, to = ffi.cast("const " .. wider[1] .. " *", C.ps_st_data(st, i)), wide_array[wider[2]](math.max(n, 1))
  for k = 0, n - 1 do to[k] = from[k] end
  check(C.ps_tensor_write(tensor, to, tensor:nbytes()))
  return device and tensor:to(device) or tensor
end

local function new_tensor(self, name, device)
  local entry = entry_of(self, name)
  local dtype, other = self:dtype(name)
  if not dtype and WIDER[other] then return widened(self, name, WIDER[other], device) end
  local tensor = create.empty(self:shape(name), { dtype = known_dtype(self, name), device = device })
  fill(self, name, entry, tensor)
  return tensor
end

--- Returns a new tensor with the values of `name`. The tensor is not freed at the end of a scope. Values of an integer
--- type that tensors do not support are converted: I8, I16 and U16 become int32, and U32 becomes int64.
---@param name string
---@param device? string
---@return ps.Tensor
function File:tensor(name, device) return new_tensor(self, name, device):keep() end

--- Reads the values of `name` into `tensor`, which must have the same shape. Converts the values to the dtype of
--- `tensor`.
---@param name string
---@param tensor ps.Tensor
function File:read_into(name, tensor)
  local entry = entry_of(self, name)
  if not scope.is_tensor(tensor) then error("read_into takes a tensor after the name, not a " .. type(tensor)) end
  if known_dtype(self, name) == tensor:dtype() and C.ps_tensor_is_contiguous(tensor) ~= 0 then
    fill(self, name, entry, tensor)
  else
    local shape = self:shape(name)
    pieces.check_whole(self.path, name, shape, tensor:shape())
    self:read_part(name, tensor, rectangles.zeros(shape))
  end
end

-- Reads whole rows, starting at row `first`, into a contiguous tensor. The dtype must be the same as in the file. If
-- the file was opened with mmap = true, the tensor uses the mapped bytes where possible.
local function take_rows(self, entry, tensor, first)
  local at = entry.at + first * entry.nbytes / math.max(1, tonumber(entry.shape[0]))
  if self.mmap then
    local rc = C.ps_tensor_borrow(tensor, C.ps_st_lend, self.st, at, tensor:nbytes())
    -- PS_EUNSUP: this tensor cannot use the mapped bytes (see ps_tensor_borrow), so the bytes are copied below.
    if rc ~= C.PS_EUNSUP then return check(rc) end
  end
  native.retry(C.ps_tensor_load, tensor, C.ps_st_read, self.st, at, tensor:nbytes())
end

---@class ps.BlockPart tensor in a file; each block of another tensor contains some of its bytes
---@field file ps.SafeTensors
---@field name string
---@field width integer number of bytes of this tensor in each block

--- Makes a uint8 tensor that consists of blocks use the bytes of two tensors in mapped files. Each block contains the
--- next first.width bytes of the first tensor and then the next second.width bytes of the second tensor. Returns false
--- and changes nothing if the tensor cannot use mapped bytes. In this case the caller must read the bytes. This happens
--- if a file was opened without mmap = true, or if the tensor is in a chunk, is not in host memory, or is a part of
--- another tensor.
---@param tensor ps.Tensor
---@param first ps.BlockPart
---@param second ps.BlockPart
---@return boolean done
function safetensors.borrow_blocks(tensor, first, second)
  local ranges = ffi.new "ps_lent_range[2]"
  for i, part in ipairs { first, second } do
    if getmetatable(part.file) ~= File or not part.file.mmap then return false end
    if part.file.compares then part.file:verify(part.name) end
    ranges[i - 1].from, ranges[i - 1].at = part.file.st, entry_of(part.file, part.name).at
    ranges[i - 1].width = part.width
  end
  local rc = C.ps_tensor_borrow_blocks(tensor, C.ps_st_lend, ranges)
  if rc ~= C.PS_EUNSUP then check(rc) end
  return rc ~= C.PS_EUNSUP
end

-- Returns whether a rectangle consists of whole rows. The bytes of such a rectangle are one contiguous range of the
-- file. `full` is the tensor's shape, and `shape` is the rectangle's shape.
local function whole_rows(full, shape)
  for d = 2, #full do if full[d] ~= shape[d] then return false end end
  return #full > 0
end

--- Reads a rectangle of the tensor `name` into `tensor`, which must have the rectangle's shape. Converts the values to
--- the dtype of `tensor`. Reads only the rectangle. However, if the file has checksums, the first call reads all of
--- `name` to compare its checksum.
---@param name string
---@param tensor ps.Tensor
---@param offset integer[] position of the rectangle's first element in `name`
---@return ps.Tensor tensor
function File:read_part(name, tensor, offset)
  local entry, i = entry_of(self, name)
  local dtype, shape = known_dtype(self, name), tensor:shape()
  pieces.check_part(self.path, name, self:shape(name), shape, offset)
  local whole = rectangles.same(shape, self:shape(name))
  if whole and dtype == tensor:dtype() and C.ps_tensor_is_contiguous(tensor) ~= 0 then
    return self:read_into(name, tensor)
  end
  if self.compares then self:verify(name) end
  if dtype == tensor:dtype() and C.ps_tensor_is_contiguous(tensor) ~= 0 and whole_rows(self:shape(name), shape) then
    take_rows(self, entry, tensor, offset[1])
    return tensor
  end
  local from, size = ffi.new("int64_t[8]", offset), ffi.new("int64_t[8]", shape)
  pieces.convert(tensor, dtype, function(buffer, first, n)
    check(C.ps_st_copy(self.st, i, from, size, first, buffer, n))
  end)
  if entry.nbytes > 0 then C.ps_st_drop(self.st, i) end
end

--- Closes the file. Tensors that were read from it remain valid. If tensors use bytes of the mapped file, the file
--- remains mapped until these tensors are freed.
function File:close()
  if getmetatable(self) ~= File then opened(self) end
  if self.st then
    C.ps_st_close(ffi.gc(self.st, nil))
    self.st = nil
  end
end

---@class ps.SafeTensorsEntry a tensor to be written
---@field name string
---@field dtype string
---@field shape integer[]

---@class ps.LaterTensor a tensor that `make` creates just before it is written; only one of them exists at a time
---@field shape integer[]
---@field dtype string
---@field make fun(): ps.Tensor

-- Declares the metadata and all entries. Then begins the file, which reserves its disk space.
local function declare(writer, entries, metadata, checksums)
  local keys = {}
  for key, value in pairs(metadata or {}) do
    keys[#keys + 1] = caller.typed(key, "string", "a name in a safetensors file's metadata")
    caller.typed(value, "string", ("'%s' of a safetensors file's metadata"):format(key))
  end
  table.sort(keys)
  if checksums then check(C.ps_stw_checksums(writer)) end
  for _, key in ipairs(keys) do check(C.ps_stw_meta(writer, key, metadata[key])) end
  for _, entry in ipairs(entries) do
    check(C.ps_stw_add(writer, entry.name, DTYPE[entry.dtype], #entry.shape, ffi.new("int64_t[8]", entry.shape)))
  end
  check(C.ps_stw_begin(writer))
end

-- Returns a list of entries for tensors by name. The list is sorted by name.
local function entries_of(tensors)
  local entries = {}
  for name, t in pairs(caller.typed(tensors, "table", "ps.safetensors.save: the tensors by name")) do
    local later = type(t) == "table" and rawget(t, "make") and t
    if type(name) ~= "string" or not (later or scope.is_tensor(t)) then
      error(("ps.safetensors.save needs tensors by name, but '%s' is a %s"):format(tostring(name),
        type(name) ~= "string" and "name of type " .. type(name) or type(t)))
    end
    entries[#entries + 1] = later and { name = name, dtype = later.dtype, shape = later.shape, make = later.make }
      or { name = name, dtype = t:dtype(), shape = t:shape(), tensor = t }
  end
  table.sort(entries, function(one, other) return one.name < other.name end)
  return entries
end

-- Removes duplicate entries, so that a tensor with several names is written once. Of the entries for the same tensor,
-- only the first one remains. For each removed entry, metadata[name of the entry] becomes the name of the remaining
-- entry, as in Hugging Face's package safetensors. Returns the remaining entries and the metadata. The metadata is a
-- new table if an entry was removed.
local function once(entries, metadata)
  local list, first, all = {}, {}, nil
  for _, entry in ipairs(entries) do
    local t = entry.tensor
    local same = t == nil and entry.name or ("%s %d %s %s %s"):format(tostring(ffi.cast("void *", t.storage)),
      t.dtype_, tostring(t.offset), rectangles.text(entry.shape), rectangles.text(t:stride()))
    if first[same] and t ~= nil and t.numel_ > 0 then
      if not all then
        all = {}
        for key, value in pairs(metadata or {}) do all[key] = value end
      end
      all[entry.name] = all[entry.name] or first[same]
    else
      first[same] = entry.name
      list[#list + 1] = entry
    end
  end
  return list, all or metadata
end

-- Calls fn(writer) with a new writer, and returns the writer. If fn fails, frees the writer, which removes its
-- temporary file.
local function with_writer(path, fn)
  local out = ffi.new("ps_stw *[1]")
  leftovers.of(caller.typed(path, "string", "a safetensors file to write: the path"))
  check(C.ps_stw_new(path, out))
  local writer = ffi.gc(out[0], C.ps_stw_free)
  local ok, problem = pcall(fn, writer)
  if not ok then
    C.ps_stw_free(ffi.gc(writer, nil))
    error(problem, 0)
  end
  return writer
end

---@class ps.SafeTensorsWriter a file that is being written
---@field private w ffi.cdata*
local Writer = {}
Writer.__index = Writer

--- Begins a file with these entries. If a file with this name exists, only commit replaces it. The caller must close
--- the writer in any case, also after commit.
---@param path string
---@param entries ps.SafeTensorsEntry[]
---@param metadata? table<string, string>
---@param checksums? boolean true: writes a checksum for each tensor
---@return ps.SafeTensorsWriter
function safetensors.writer(path, entries, metadata, checksums)
  caller.typed(entries, "table", "ps.safetensors.writer: the list of tensors")
  return setmetatable({ w = with_writer(path, function(w) declare(w, entries, metadata, checksums) end) }, Writer)
end

--- Appends the next bytes of a tensor.
---@param name string
---@param data ffi.cdata*
---@param nbytes integer
function Writer:append(name, data, nbytes) check(C.ps_stw_append(self.w, name, data, nbytes)) end

--- Completes the file after all tensors were appended: flushes the temporary file to the disk and renames it to `path`.
function Writer:commit() check(C.ps_stw_commit(self.w)) end

--- Closes the writer. If commit was not called, close removes the unfinished file.
function Writer:close()
  if self.w then C.ps_stw_free(ffi.gc(self.w, nil)) end
  self.w = nil
end

--- Writes tensors to a file, sorted by name, one piece at a time. If a file with this name exists, it is replaced only
--- when the new file is complete on the disk. If a tensor has several names (a tied weight), it is written once, under
--- the name that comes first in the order.
---@param path string
---@param tensors table<string, ps.Tensor|ps.LaterTensor>
---@param metadata? table<string, string>
---@param options? {checksums?: boolean} checksums = true: writes a checksum for each tensor
function safetensors.save(path, tensors, metadata, options)
  local checksums = caller.options(options, "ps.safetensors.save", SAVE).checksums
  if metadata ~= nil then caller.typed(metadata, "table", "ps.safetensors.save: the metadata") end
  local entries, largest = entries_of(tensors), 1
  entries, metadata = once(entries, metadata)
  for _, entry in ipairs(entries) do
    largest = math.max(largest, rectangles.numel(entry.shape) * tonumber(C.ps_dtype_size(
      native.dtype_code(entry.dtype))))
  end
  local writer = safetensors.writer(path, entries, metadata, checksums)
  local ok, problem = pcall(function()
    local buffer = pieces.buffer(largest)
    for _, entry in ipairs(entries) do
      scope.scope(function()
        pieces.read(entry.tensor or entry.make(), buffer, function(data, nbytes)
          writer:append(entry.name, data, nbytes)
        end)
      end)
    end
    writer:commit()
  end)
  writer:close()
  if not ok then error(problem, 0) end
end

-- Copies the bytes of an entry's tensor to host memory at the address `to`.
local function copy_out(entry, to)
  scope.scope(function()
    local tensor = entry.tensor or entry.make()
    local whole = scope.no_grad(function() return tensor:contiguous() end)
    native.retry(C.ps_tensor_save, whole, to, C.ps_tensor_nbytes(whole))
  end)
end

--- Prepares a file that ps_saver_start can write. Copies all tensors to one block of memory, in which each tensor has
--- the same position as in the file's data. Also reserves the disk space of the file.
---@param path string
---@param tensors table<string, ps.Tensor|ps.LaterTensor>
---@param metadata table<string, string>
---@param room fun(nbytes: integer): ffi.cdata* returns memory of nbytes bytes
---@return ffi.cdata* writer a ps_stw, owned by the caller
---@return ffi.cdata* data the memory that `room` returned
function safetensors.copy(path, tensors, metadata, room)
  caller.callable(room, "ps.safetensors.copy, after the metadata,")
  local data
  local writer = with_writer(path, function(writer)
    local entries, place = entries_of(tensors), ffi.new("int64_t[1]")
    declare(writer, entries, metadata, true)
    data = room(tonumber(C.ps_stw_nbytes(writer)))
    for _, entry in ipairs(entries) do
      check(C.ps_stw_place(writer, entry.name, place))
      copy_out(entry, data + place[0])
    end
  end)
  return writer, data
end

exact.all(File, "file:", true)

return safetensors
