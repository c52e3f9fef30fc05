-- SPDX-License-Identifier: BSD-3-Clause
-- Reads PyTorch's .pt files. torch_pt_write.lua writes such files. Values and tensors can be read one at a time. The
-- pickle in a file is only parsed; nothing in it is executed.
--
-- Memory: an open file needs a few hundred bytes per tensor. A tensor's bytes are copied directly from the memory map
-- to the new tensor, or through a small buffer if the tensor in the file is strided. If a tensor in the file repeats
-- its elements by strides of 0, the new tensor is expanded, as in PyTorch. The new tensor then needs only as much
-- memory as its elements without the repetitions.
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

--- Represents None in lists, and is written as None. In dicts, None is not represented: when a file is read, keys whose
--- value is None are omitted.
torch_pt.none = setmetatable({}, { __tostring = function() return "none" end })

-- For each table that was read from a file or passed to mark(): { kind = "list" or "dict", keys = the keys in order }.
local marks = setmetatable({}, { __mode = "k" })

--- Marks a table as a list or a dict. This is needed in two cases: for an empty list, because an empty table without a
--- mark is saved as a dict, and for a dict with the keys 1 .. n.
---@param kind "list"|"dict"
---@param value table
---@param keys? any[] the keys of a dict in order
---@return table value
function torch_pt.mark(kind, value, keys)
  marks[value] = { kind = kind, keys = keys }
  return value
end

--- Returns "list" or "dict" if the table was read from a file or marked (see mark). Otherwise returns nil.
---@param value table
---@return string?
function torch_pt.kind(value) return marks[value] and marks[value].kind end

--- Returns the keys of a table that was read from a file, in the order of the file. Returns nil if the table was not
--- read from a file.
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
local KIND = {}                                            -- KIND.LIST is C.PS_PT_LIST, and so on
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

-- Reads value number `id` of a file. Returns a number, boolean or string as a Lua value, followed by its kind. For
-- other values, returns nil, the kind, and the number of items.
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

-- Returns a list of a dict's keys, and a table that maps each key to the id of its value. If the file contains a key
-- twice, the list contains the key once, and the table contains the last value.
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

-- Fills a contiguous tensor. Its dtype must be the dtype in the file, and its shape must be the shape in `t`. If the
-- elements in the file are dense, they are copied directly from the memory map.
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

-- Largest total size in bytes of the tensors that are made from views whose elements overlap in the file. If an element
-- repeats because of a stride of 0, the new tensor is expanded and needs no space for the repetitions. Other
-- overlapping views are copied element by element. Without a limit, a file of a few bytes could therefore declare
-- tensors of any size.
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

-- Reads a tensor. `made` is the table of the current build() call. It contains the tensors that were already made, and
-- in made.shared the total size of the tensors whose elements overlap.
local function new_tensor(self, pt, id, label, made)
  local t = ffi.new("ps_pt_tensor", entry_at(self, pt, id, label))
  local shape, once, repeats = {}, {}, false               -- `once`: the shape, with 1 for each repeated dimension
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

-- Returns a text that identifies a tensor of the file. Two entries with the same text are read as one tensor, so that
-- tied weights stay tied.
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

--- Opens a file and checks its structure. The checksums of tensors are compared later, when the tensors are read.
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

--- Returns the descriptions of all tensors in this dict that are shards of tensor parallelism, by the tensors' paths in
--- the dict. ps.save writes these descriptions to the file.
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
---@param device? string device of the tensors in the value (default "cpu")
---@return any
function File:get(key, device)
  local _, items = items_of(self)
  if items[key] == nil then return nil end
  local place = ("%s%s%s"):format(self.place, self.place == "" and "" or ".", tostring(key))
  return build(self, self.file.pt, items[key], place, { device = device })
end

--- Returns a nested dict as a file object. For example, file:at("a", "b") is the dict "b" in the dict "a". Closing any
--- of these objects closes the file for all of them.
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

--- Reads the values of `name` into `tensor`, which must have the same shape. Converts the values to the dtype of
--- `tensor`.
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

--- Reads a rectangle of the tensor `name` into `tensor`, which must have the rectangle's shape. Converts the values to
--- the dtype of `tensor`. Reads only the rectangle. However, the first call reads all of `name` to compare its
--- checksum.
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
