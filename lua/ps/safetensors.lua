-- SPDX-License-Identifier: BSD-3-Clause
-- safetensors files: read by memory map, written whole or not at all (a temporary file, fsync, rename).
local ps = require "ps"
local ffi = require "ffi"
local C, check = ps.C, ps.check

local safetensors = {}

local DTYPE = {}
for i = 0, C.PS_DTYPE_COUNT - 1 do DTYPE[ffi.string(C.ps_dtype_name(i))] = i end

---@class ps.SafeTensors an open file
---@field path string
---@field metadata table<string, string>
local File = {}
File.__index = File

--- Opens a file and checks its whole header.
---@param path string
---@return ps.SafeTensors
function safetensors.open(path)
  local out = ffi.new("ps_st *[1]")
  check(C.ps_st_open(path, out))
  local self = setmetatable({ path = path, metadata = {}, st = ffi.gc(out[0], C.ps_st_close) }, File)
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

local function new_tensor(self, name, device)
  local entry, i = entry_of(self, name)
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

local function write(writer, tensors, metadata)
  local names, largest = {}, 1
  for name in pairs(tensors) do names[#names + 1] = name end
  table.sort(names)
  local keys = {}
  for key in pairs(metadata or {}) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do check(C.ps_stw_meta(writer, key, metadata[key])) end
  for _, name in ipairs(names) do
    local t = tensors[name]
    local shape = t:shape()
    check(C.ps_stw_add(writer, name, DTYPE[t:dtype()], #shape, ffi.new("int64_t[8]", shape)))
    largest = math.max(largest, tonumber(C.ps_tensor_nbytes(t)))
  end
  check(C.ps_stw_begin(writer))
  local buffer = ffi.new("uint8_t[?]", largest)
  for _, name in ipairs(names) do
    ps.scope(function()
      local tensor = ps.no_grad(function() return tensors[name]:contiguous() end)
      local nbytes = C.ps_tensor_nbytes(tensor)
      ps.retry(C.ps_tensor_read, tensor, buffer, nbytes)
      check(C.ps_stw_write(writer, name, buffer, nbytes))
    end)
  end
  buffer = nil -- luacheck: ignore 311
  if largest > 2 ^ 20 then collectgarbage() end            -- the buffer's bytes, which no budget counts
  check(C.ps_stw_commit(writer))
end

--- Writes tensors to a file, in order of name, replacing an older file only when all is on disk.
---@param path string
---@param tensors table<string, ps.Tensor>
---@param metadata? table<string, string>
function safetensors.save(path, tensors, metadata)
  local out = ffi.new("ps_stw *[1]")
  check(C.ps_stw_new(path, out))
  local writer = ffi.gc(out[0], C.ps_stw_free)
  local ok, problem = pcall(write, writer, tensors, metadata)
  C.ps_stw_free(ffi.gc(writer, nil))                       -- at once: it removes the temporary file
  if not ok then error(problem, 0) end
end

return safetensors
