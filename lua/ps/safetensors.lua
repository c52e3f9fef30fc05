-- SPDX-License-Identifier: BSD-3-Clause
-- safetensors files: read by memory map, written whole or not at all (a temporary file, fsync, rename). Files with
-- checksums (checkpoints have them) are compared with these when they are opened and as tensors are read.
local ps = require "ps"
local caller = require "ps.caller"
local ffi = require "ffi"
local pieces = require "ps.pieces"
local C, check = ps.C, ps.check

local safetensors = {}

local DTYPE = {}
for i = 0, C.PS_DTYPE_COUNT - 1 do DTYPE[ffi.string(C.ps_dtype_name(i))] = i end

---@class ps.SafeTensors an open file
---@field path string
---@field metadata table<string, string>
---@field private compares boolean tensors are compared with their checksums
---@field private compared table<integer, boolean> those that were
local File = {}
File.__index = File

local OPEN, SAVE = { verify = "boolean" }, { checksums = "boolean" }

--- Opens a file and checks its whole header.
---@param path string
---@param options? {verify?: boolean} false: tensors are read without comparing their checksums
---@return ps.SafeTensors
function safetensors.open(path, options)
  options = caller.options(options, "ps.safetensors.open", OPEN)
  local out = ffi.new("ps_st *[1]")
  check(C.ps_st_open(path, out))
  local self = setmetatable({ path = path, metadata = {}, compared = {}, st = ffi.gc(out[0], C.ps_st_close),
    compares = options.verify ~= false }, File)
  for i = 0, C.ps_st_meta_count(self.st) - 1 do
    self.metadata[ffi.string(C.ps_st_meta_key(self.st, i))] = ffi.string(C.ps_st_meta_value(self.st, i))
  end
  return self
end

local function opened(self)
  if not self.st then error(self.path .. ": this file was closed", 3) end
  return self.st
end

local function entry_of(self, name)
  local st = opened(self)
  local i = C.ps_st_find(st, name)
  if i < 0 then error(("%s holds no tensor '%s'"):format(self.path, name), 3) end
  local entry = ffi.new("ps_st_entry")
  check(C.ps_st_get(st, i, entry))
  return entry, i
end

--- Names in file order.
---@return string[]
function File:names()
  local names, st = {}, opened(self)
  for i = 0, C.ps_st_count(st) - 1 do names[i + 1] = ffi.string(C.ps_st_name(st, i)) end
  return names
end

---@param name string
---@return boolean
function File:has(name) return C.ps_st_find(opened(self), name) >= 0 end

---@param name string
---@return integer[]
function File:shape(name)
  local entry, shape = entry_of(self, name), {}
  for d = 0, entry.ndim - 1 do shape[d + 1] = tonumber(entry.shape[d]) end
  return shape
end

--- The type as this engine calls it, or nil and the file's word for one it lacks.
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
  if not dtype then error(("%s: tensor '%s' has type %s, which is not supported"):format(self.path, name, other), 3) end
  return dtype
end

--- Fails when `name` is not there or of a type that this engine lacks.
---@param name string
function File:check(name) known_dtype(self, name) end

--- Compares a tensor's bytes with their checksum, once; a damaged one is an error that names it and the file.
---@param name string
---@return boolean has false: the file has no checksums
function File:verify(name)
  local _, i = entry_of(self, name)
  if self.compared[i] == nil then self.compared[i] = check(C.ps_st_verify(self.st, i)) == 1 end
  return self.compared[i]
end

--- A tensor's checksum as the file has it, 16 hexadecimal digits; nil when it has none.
---@param name string
---@return string?
function File:checksum(name)
  local _, i = entry_of(self, name)
  local digits = (self.metadata.xxh3_64 or ""):sub((i + 1) * 17 + 1, (i + 1) * 17 + 16)
  return #digits == 16 and digits or nil
end

---@param name string
---@return integer
function File:nbytes(name) return tonumber((entry_of(self, name)).nbytes) end

local function new_tensor(self, name, device)
  local entry, i = entry_of(self, name)
  if self.compares then self:verify(name) end
  local tensor = ps.empty(self:shape(name), { dtype = known_dtype(self, name), device = device })
  ps.retry(C.ps_tensor_write, tensor, C.ps_st_data(self.st, i), entry.nbytes)
  C.ps_st_drop(self.st, i)
  return tensor
end

--- A new tensor with the bytes of `name`; it outlives scopes.
---@param name string
---@param device? string
---@return ps.Tensor
function File:tensor(name, device) return new_tensor(self, name, device):keep() end

--- Writes the values of `name` into a tensor of the same shape, converting the type where it differs.
---@param name string
---@param tensor ps.Tensor
function File:read_into(name, tensor)
  local entry, i = entry_of(self, name)
  if known_dtype(self, name) == tensor:dtype() and C.ps_tensor_is_contiguous(tensor) ~= 0 then
    if self.compares then self:verify(name) end
    ps.retry(C.ps_tensor_write, tensor, C.ps_st_data(self.st, i), entry.nbytes)
    C.ps_st_drop(self.st, i)
  else
    ps.scope(function()
      ps.no_grad(function() tensor:copy_(new_tensor(self, name, tensor:device())) end)
    end)
  end
end

--- Unmaps the file; tensors read from it stay.
function File:close()
  if self.st then
    C.ps_st_close(ffi.gc(self.st, nil))
    self.st = nil
  end
end

-- Declares all and begins; gives the names in order and the bytes of the largest.
local function declare(writer, tensors, metadata, checksums)
  caller.typed(tensors, "table", "ps.safetensors.save: the tensors by name")
  local names, largest = {}, 1
  for name in pairs(tensors) do names[#names + 1] = name end
  table.sort(names)
  local keys = {}
  for key in pairs(metadata or {}) do keys[#keys + 1] = key end
  table.sort(keys)
  if checksums then check(C.ps_stw_checksums(writer)) end
  for _, key in ipairs(keys) do check(C.ps_stw_meta(writer, key, metadata[key])) end
  for _, name in ipairs(names) do
    local t = tensors[name]
    local shape = t:shape()
    check(C.ps_stw_add(writer, name, DTYPE[t:dtype()], #shape, ffi.new("int64_t[8]", shape)))
    largest = math.max(largest, tonumber(C.ps_tensor_nbytes(t)))
  end
  check(C.ps_stw_begin(writer))
  return names, largest
end

-- Copies a tensor's bytes to host memory at `to`.
local function copy_out(tensor, to)
  ps.scope(function()
    local whole = ps.no_grad(function() return tensor:contiguous() end)
    ps.retry(C.ps_tensor_read, whole, to, C.ps_tensor_nbytes(whole))
  end)
end

-- Tensors pass through a small buffer, a piece at a time.
local function write(writer, tensors, metadata, checksums)
  local names, largest = declare(writer, tensors, metadata, checksums)
  local buffer = pieces.buffer(largest)
  for _, name in ipairs(names) do
    pieces.read(tensors[name], buffer, function(data, nbytes) check(C.ps_stw_append(writer, name, data, nbytes)) end)
  end
  check(C.ps_stw_commit(writer))
end

-- Calls fn(writer) with a new writer, which is freed when fn fails, so that its temporary file goes.
local function with_writer(path, fn)
  local out = ffi.new("ps_stw *[1]")
  check(C.ps_stw_new(path, out))
  local writer = ffi.gc(out[0], C.ps_stw_free)
  local ok, problem = pcall(fn, writer)
  if not ok then
    C.ps_stw_free(ffi.gc(writer, nil))
    error(problem, 0)
  end
  return writer
end

--- Writes tensors to a file, in order of name, replacing an older file only when all is on disk.
---@param path string
---@param tensors table<string, ps.Tensor>
---@param metadata? table<string, string>
---@param options? {checksums?: boolean} checksums: the file has one for each tensor
function safetensors.save(path, tensors, metadata, options)
  local checksums = caller.options(options, "ps.safetensors.save", SAVE).checksums
  local writer = with_writer(path, function(writer) write(writer, tensors, metadata, checksums) end)
  C.ps_stw_free(ffi.gc(writer, nil))
end

--- Copies tensors to memory as they are to lie in a file, for ps_saver_start. The file has its space by then.
---@param path string
---@param tensors table<string, ps.Tensor>
---@param metadata table<string, string>
---@param room fun(nbytes: integer): ffi.cdata* gives the memory
---@return ffi.cdata* writer ps_stw, the caller's
---@return ffi.cdata* data
function safetensors.copy(path, tensors, metadata, room)
  local data
  local writer = with_writer(path, function(writer)
    local names, place = declare(writer, tensors, metadata, true), ffi.new("int64_t[1]")
    data = room(tonumber(C.ps_stw_nbytes(writer)))
    for _, name in ipairs(names) do
      check(C.ps_stw_place(writer, name, place))
      copy_out(tensors[name], data + place[0])
    end
  end)
  return writer, data
end

return safetensors
