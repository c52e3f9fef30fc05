-- SPDX-License-Identifier: BSD-3-Clause
-- Reads PyTorch's .pt files. torch_pt_write.lua writes them. An open file reads its values and tensors one at a time.
-- Nothing in a file is ever executed.
--
-- Memory: an open file needs a few hundred bytes per tensor. A tensor's bytes are copied from the memory map directly
-- to the new tensor. If the tensor in the file is strided, they are copied through a small buffer. If a tensor repeats
-- its elements by strides of 0, the new tensor is expanded, as in PyTorch. It therefore needs only as much memory as
-- its bytes in the file.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local shard_note = require "ps.io.shard_note"
local caller = require "ps.core.caller"
local ffi = require "ffi"
local pieces = require "ps.io.pieces"
local C, check = native.C, native.check
local error = caller.error

local torch_pt = {}

local EXACT_BELOW = 2 ^ 53                                 -- a double represents whole numbers below this limit exactly

--- Represents None in lists, and is written as None. If a dict has a key whose value is None, the key is absent.
torch_pt.none = setmetatable({}, { __tostring = function() return "none" end })

-- The kinds of tables that were read from a file or marked: { kind = "list" or "dict", keys = the keys in order }.
local marks = setmetatable({}, { __mode = "k" })

--- Marks a table as a list or a dict. This is needed if the keys do not determine the kind. There are two such cases:
--- an empty table, which is a dict unless marked, and a dict with the keys 1 .. n.
---@param kind "list"|"dict"
---@param value table
---@param keys? any[] the keys of a dict in order
---@return table value
function torch_pt.mark(kind, value, keys)
  marks[value] = { kind = kind, keys = keys }
  return value
end

--- Returns "list" or "dict" if the table was read from a file or marked. Otherwise returns nil.
---@param value table
---@return string?
function torch_pt.kind(value) return marks[value] and marks[value].kind end

--- Returns the keys of a table that was read from a file, in the order of the file. Returns nil for other tables.
---@param value table
---@return any[]?
function torch_pt.keys(value) return marks[value] and marks[value].keys end

-- -- reading --------------------------------------------------------------------------------------------------------
---@class ps.TorchFile an open .pt file, or one dict in it (see at)
---@field path string
---@field place string path of this dict, such as "model.encoder", or ""
local File = {}
File.__index = File

local value_out, tensor_out = ffi.new("ps_pt_value"), ffi.new("ps_pt_tensor")
local note_out = ffi.new("const char *[1]")
local KIND = {}                                            -- the values of PS_PT_* by name
for _, name in ipairs { "NONE", "BOOL", "INT", "FLOAT", "STRING", "BYTES", "NAME", "LIST", "TUPLE", "SET", "DICT",
                        "TENSOR" } do
  KIND[name] = C["PS_PT_" .. name]
end

local function opened(self)
  if getmetatable(self) ~= File then caller.error("call a file's methods with a colon: file:tensor(name)") end
  if not self.file.pt then error(self.path .. ": this file was closed") end
  return self.file.pt
end

local function whole(n)
  local number = tonumber(n)
  if number > -EXACT_BELOW and number < EXACT_BELOW then return number end
  return n + 0LL                                           -- int64_t represents it exactly
end

-- Returns a value that has no items as a Lua value, and its kind. For other values, returns nil, the kind, and the
-- number of items.
local function plain(pt, id)
  check(C.ps_pt_get(pt, id, value_out))
  local v = value_out
  local kind = v.kind
  if kind == KIND.INT then return whole(v.integer), kind end
  if kind == KIND.FLOAT then return v.number, kind end
  if kind == KIND.BOOL then return v.integer ~= 0, kind end
  if kind >= KIND.STRING and kind <= KIND.NAME then return ffi.string(v.text, v.integer), kind end
  return nil, kind, v.count
end

local function key_of(self, pt, id)
  local key, kind = plain(pt, id)
  if key == nil or key ~= key then
    error(("%s: a dict%s has a key that is not a string, number or boolean"):format(self.path,
      self.place == "" and "" or " in " .. self.place), 0)
  end
  if kind == KIND.INT then return tonumber(key) end
  return key
end

-- Returns the list of a dict's keys and a table from key to value. If the file has a key twice, the list contains it
-- once, and the last value is used.
local function dict_items(self, pt, id, count)
  local keys, values = {}, {}
  for i = 0, count - 2, 2 do
    local key = key_of(self, pt, check(C.ps_pt_item(pt, id, i)))
    if values[key] == nil then keys[#keys + 1] = key end
    values[key] = check(C.ps_pt_item(pt, id, i + 1))
  end
  return keys, values
end

local function entry_at(self, pt, id, label)
  check(C.ps_pt_tensor_get(pt, id, tensor_out))
  if tensor_out.dtype < 0 then
    error(("%s: tensor '%s' has type %s, which is not supported"):format(self.path, label,
      ffi.string(tensor_out.type)), 0)
  end
  return tensor_out
end

local function shape_at(pt, id)
  check(C.ps_pt_tensor_get(pt, id, tensor_out))
  local shape = {}
  for d = 0, tensor_out.ndim - 1 do shape[d + 1] = tonumber(tensor_out.shape[d]) end
  return shape
end

local function is_dense(t)
  local n = 1LL
  for d = t.ndim - 1, 0, -1 do
    if t.shape[d] ~= 1 and t.stride[d] ~= n then return false end
    n = n * t.shape[d]
  end
  return true
end

-- Fills a contiguous tensor of the file's type. Its shape must be the shape in `t`. If the elements in the file are
-- dense, they are copied directly from the map.
local function fill(self, pt, id, t, tensor)
  if self.file.verify then check(C.ps_pt_verify(pt, id)) end
  local nbytes = C.ps_tensor_nbytes(tensor)
  if nbytes > 0 and is_dense(t) then
    local offset = t.offset * C.ps_dtype_size(t.dtype)
    check(C.ps_pt_ready(pt))
    native.retry(C.ps_tensor_write, tensor, ffi.cast("const char *", t.data) + offset, nbytes)
  elseif nbytes > 0 then
    pieces.write(tensor, function(buffer, first, n) check(C.ps_pt_copy(pt, t, first, buffer, n)) end)
  end
  C.ps_pt_drop(pt, id)
end

-- Limits the total size of tensors whose elements overlap. In PyTorch such a tensor is a view. If its strides are 0, it
-- becomes a view here, too (expand). Otherwise it becomes a tensor with a copy of each element. A file of a few bytes
-- could therefore declare tensors of any size.
local MOST_SHARED = 2 ^ 28

local function check_shared(self, t, nbytes, label, made)
  local span = 1
  for d = 0, t.ndim - 1 do span = span + tonumber((t.shape[d] - 1) * t.stride[d]) end
  if nbytes <= span * tonumber(C.ps_dtype_size(t.dtype)) then return end
  made.shared = (made.shared or 0) + nbytes
  if made.shared > MOST_SHARED then
      error(("%s: tensor '%s' is a view whose elements overlap: %.0f bytes of the file would become %.0f (%.0f with "
        .. "those before it), more than the limit of %.0f; save it in PyTorch as .contiguous()"):format(self.path,
      label, span * tonumber(C.ps_dtype_size(t.dtype)), nbytes, made.shared, MOST_SHARED), 0)
  end
end

-- Reads a tensor. `made` contains the tensors that were already made in this call of `build`, and the total size of
-- those whose elements overlap.
local function new_tensor(self, pt, id, label, made)
  local t = ffi.new("ps_pt_tensor", entry_at(self, pt, id, label))
  local shape, once, repeats = {}, {}, false               -- `once`: the sizes without repetitions
  local nbytes = tonumber(C.ps_dtype_size(t.dtype))
  for d = 0, t.ndim - 1 do
    shape[d + 1] = tonumber(t.shape[d])
    if t.numel > 0 and t.stride[d] == 0 and t.shape[d] > 1 then repeats, t.shape[d] = true, 1 end
    once[d + 1] = tonumber(t.shape[d])
    nbytes = nbytes * once[d + 1]
  end
  if t.numel > 0 then check_shared(self, t, nbytes, label, made) end
  local tensor = create.empty(once, { dtype = ffi.string(C.ps_dtype_name(t.dtype)), device = made.device or "cpu" })
  fill(self, pt, id, t, tensor)
  return repeats and scope.no_grad(tensor.expand, tensor, shape) or tensor
end

-- Returns a key that identifies a tensor of the file. Two entries with the same key become one tensor, so that tied
-- weights stay tied.
local function identity(pt, id)
  check(C.ps_pt_tensor_get(pt, id, tensor_out))
  local t = tensor_out
  local parts = { t.storage, t.dtype, tonumber(t.offset) }
  for d = 0, t.ndim - 1 do
    parts[#parts + 1], parts[#parts + 2] = tonumber(t.shape[d]), tonumber(t.stride[d])
  end
  return table.concat(parts, ":")
end

-- Returns a value with all its items. If the file contains the value several times, it becomes one Lua value.
local function build(self, pt, id, label, made)
  if made[id] ~= nil then return made[id] end
  local value, kind, count = plain(pt, id)
  if value ~= nil then return value end
  if kind == KIND.NONE then return nil end
  if kind == KIND.TENSOR then
    local same = identity(pt, id)
    made[same] = made[same] or new_tensor(self, pt, id, label, made):keep()
    return made[same]
  end
  local result = {}
  made[id] = result
  if kind == KIND.DICT then
    local keys, values = dict_items(self, pt, id, count)
    marks[result] = { kind = "dict", keys = keys }
    for _, key in ipairs(keys) do
      result[key] = build(self, pt, values[key], ("%s%s%s"):format(label, label == "" and "" or ".", key), made)
    end
    return result
  end
  marks[result] = { kind = "list" }
  for i = 0, count - 1 do
    local item = build(self, pt, check(C.ps_pt_item(pt, id, i)), ("%s[%d]"):format(label, i), made)
    if item == nil then item = torch_pt.none end
    result[i + 1] = item
  end
  return result
end

local OPEN = { verify = "boolean" }

--- Opens a file and checks it, except for the bytes of tensors. These are checked when they are read.
---@param path string
---@param options? { verify: boolean? } verify = false: checksums are not compared
---@return ps.TorchFile
function torch_pt.open(path, options)
  options = caller.options(options, "torch_pt.open", OPEN)
  local out = ffi.new("ps_pt *[1]")
  check(C.ps_pt_open(path, out))
  local file = { pt = ffi.gc(out[0], C.ps_pt_close), verify = options.verify ~= false }
  return setmetatable({ path = path, place = "", file = file, id = C.ps_pt_root(out[0]) }, File)
end

-- Returns the keys and the items of this dict. Raises an error if the value is not a dict.
local function items_of(self)
  local pt = opened(self)
  if not self.order then
    local _, kind, count = plain(pt, self.id)
    if kind ~= KIND.DICT then
      error(("%s holds no dict of tensors; read it without lazy = true"):format(self.path))
    end
    self.order, self.items = dict_items(self, pt, self.id, count)
  end
  return self.order, self.items
end

local function kind_of(pt, id)
  check(C.ps_pt_get(pt, id, value_out))
  return value_out.kind
end

--- Returns the whole value as Lua tables, numbers, strings, booleans and tensors.
---@param device? string device of the tensors (default "cpu")
---@return any
function File:value(device) return build(self, opened(self), self.id, self.place, { device = device }) end

--- Returns descriptions of those tensors that are shards of tensor parallelism, by their paths in this dict. ps.save
--- writes these descriptions.
---@return table<string, ps.nn.Shard>
function File:shards()
  local nbytes = check(C.ps_pt_note(opened(self), note_out))
  local all, below = shard_note.read(nbytes > 0 and ffi.string(note_out[0], nbytes) or nil), {}
  local within = self.place == "" and "" or self.place .. "."
  for place, desc in pairs(all) do
    if place:sub(1, #within) == within then below[place:sub(#within + 1)] = desc end
  end
  return below
end

--- Returns the keys of this dict in the order of the file.
---@return any[]
function File:keys() return (items_of(self)) end

--- Returns whether this dict has a key.
---@param key any
---@return boolean
function File:holds(key)
  local _, items = items_of(self)
  return items[key] ~= nil
end

--- Returns the value of a key with all its items, or nil if there is no such key.
---@param key any
---@param device? string device of the tensors in it (default "cpu")
---@return any
function File:get(key, device)
  local _, items = items_of(self)
  if items[key] == nil then return nil end
  local place = ("%s%s%s"):format(self.place, self.place == "" and "" or ".", tostring(key))
  return build(self, self.file.pt, items[key], place, { device = device })
end

--- Returns a dict in this dict as a file object. For example, file:at("a", "b") is the dict "b" in the dict "a". If one
--- of these objects is closed, all are closed.
---@param key any
---@param ... any
---@return ps.TorchFile
function File:at(key, ...)
  local _, items = items_of(self)
  local place = ("%s%s%s"):format(self.place, self.place == "" and "" or ".", tostring(key))
  if not items[key] or kind_of(self.file.pt, items[key]) ~= KIND.DICT then
    error(("%s holds no dict '%s'"):format(self.path, place))
  end
  local inner = setmetatable({ path = self.path, place = place, file = self.file, id = items[key] }, File)
  if select("#", ...) > 0 then return inner:at(...) end
  return inner
end

--- Returns the names of the tensors in this dict, in the order of the file.
---@return string[]
function File:names()
  local order, items = items_of(self)
  local names, dicts, pt = {}, {}, self.file.pt
  for _, key in ipairs(order) do
    local kind = kind_of(pt, items[key])
    if kind == KIND.TENSOR and type(key) == "string" then names[#names + 1] = key end
    if kind == KIND.DICT then dicts[#dicts + 1] = tostring(key) end
  end
  if #names == 0 and #dicts > 0 then
      error(("%s has no tensors at its top level, only dicts of them: %s; choose one with "
        .. ":at(\"%s\")"):format(self.path,
      table.concat(dicts, ", ", 1, math.min(#dicts, 8)), dicts[1]))
  end
  return names
end

--- Returns whether this dict has a tensor of this name.
---@param name string
---@return boolean
function File:has(name)
  local _, items = items_of(self)
  return items[name] ~= nil and kind_of(self.file.pt, items[name]) == KIND.TENSOR
end

local function id_of(self, name)
  local _, items = items_of(self)
  if not items[name] or kind_of(self.file.pt, items[name]) ~= KIND.TENSOR then
    error(("%s holds no tensor '%s'"):format(self.path, tostring(name)))
  end
  return items[name], self.file.pt
end

--- Returns the shape of a tensor.
---@param name string
---@return integer[]
function File:shape(name)
  local id, pt = id_of(self, name)
  return shape_at(pt, id)
end

--- Returns the dtype of a tensor. If the tensor's type is not supported, returns nil and PyTorch's name of the type.
---@param name string
---@return string? dtype
---@return string? other
function File:dtype(name)
  local id, pt = id_of(self, name)
  check(C.ps_pt_tensor_get(pt, id, tensor_out))
  if tensor_out.dtype < 0 then return nil, ffi.string(tensor_out.type) end
  return ffi.string(C.ps_dtype_name(tensor_out.dtype))
end

--- Raises an error if there is no tensor of this name, or if its type is not supported.
---@param name string
function File:check(name)
  local id, pt = id_of(self, name)
  entry_at(self, pt, id, name)
end

--- Returns a new tensor with the values of `name`. The tensor is not freed at the end of a scope.
---@param name string
---@param device? string
---@return ps.Tensor
function File:tensor(name, device)
  local id, pt = id_of(self, name)
  return new_tensor(self, pt, id, name, { device = device }):keep()
end

--- Reads the values of `name` into a tensor of the same shape. If the tensor has another dtype, converts the values.
---@param name string
---@param tensor ps.Tensor
function File:read_into(name, tensor)
  local id, pt = id_of(self, name)
  if not scope.is_tensor(tensor) then
    caller.error("read_into takes a tensor after the name, not a " .. type(tensor))
  end
  local entry = ffi.new("ps_pt_tensor", entry_at(self, pt, id, name))
  if entry.dtype == tensor.dtype_ and C.ps_tensor_is_contiguous(tensor) ~= 0 then
    if entry.nbytes ~= C.ps_tensor_nbytes(tensor) then
      pieces.check_whole(self.path, name, shape_at(pt, id), tensor:shape())
    end
    fill(self, pt, id, entry, tensor)
  else
    scope.scope(function()
      local copy = new_tensor(self, pt, id, name, { device = tensor:device() })
      scope.no_grad(function() tensor:copy_(copy) end)
    end)
  end
end

--- Reads a rectangle of `name` into a tensor of the rectangle's shape. If the tensor has another dtype, converts the
--- values. Reads only the rectangle. But the first call reads all of `name` to compare its checksum.
---@param name string
---@param tensor ps.Tensor
---@param offset integer[] position of the rectangle's first element in `name`
function File:read_part(name, tensor, offset)
  local id, pt = id_of(self, name)
  local shape = tensor:shape()
  pieces.check_part(self.path, name, shape_at(pt, id), shape, offset)
  local t = ffi.new("ps_pt_tensor", entry_at(self, pt, id, name))
  if self.file.verify then check(C.ps_pt_verify(pt, id)) end
  for d, size in ipairs(shape) do
    t.offset = t.offset + offset[d] * t.stride[d - 1]
    t.shape[d - 1] = size
  end
  if tensor:numel() > 0 then
    pieces.convert(tensor, ffi.string(C.ps_dtype_name(t.dtype)), function(buffer, first, n)
      check(C.ps_pt_copy(pt, t, first, buffer, n))
    end)
  end
  C.ps_pt_drop(pt, id)
end

--- Closes the file. Tensors that were read from it remain valid.
function File:close()
  if getmetatable(self) ~= File then opened(self) end
  if self.file.pt then
    C.ps_pt_close(ffi.gc(self.file.pt, nil))
    self.file.pt = nil
  end
end

return torch_pt
