-- SPDX-License-Identifier: BSD-3-Clause
-- For merge.lua and nobody else: a file of a checkpoint as a tree of what it holds, and tensors' bytes a piece at a
-- time. Memory: some hundred bytes a tensor; a piece; and a strided tensor of a .pt file, while it is read.
local ps = require "ps"
local ffi = require "ffi"
local C, check = ps.C, ps.check

local shard = {}

local PIECE = 8 * 2 ^ 20                                   -- bytes that are in memory at a time
ffi.cdef "int memcmp(const void *a, const void *b, size_t n);"

local KIND = {}
shard.KIND = KIND                                          -- PS_PT_* by name
for _, name in ipairs { "NONE", "BOOL", "INT", "FLOAT", "STRING", "BYTES", "NAME", "LIST", "TUPLE", "SET", "DICT",
                        "TENSOR" } do
  KIND[name] = C["PS_PT_" .. name]
end

local pointer = ffi.typeof "const uint8_t *"
local value_out, tensor_out = ffi.new("ps_pt_value"), ffi.new("ps_pt_tensor")

---@class ps.merge.Shard an open file
---@field path string
---@field metadata table<string, string>
---@field pt ffi.cdata*? ps_pt
---@field st ffi.cdata*? ps_st
---@field root ps.merge.Node

---@class ps.merge.Node
---@field kind integer PS_PT_*
---@field file ps.merge.Shard
---@field id integer of the value in its file
---@field text string? of a key that is in no file; or `number`
---@field keys string[]? of a dict: tokens, in order
---@field entries table<string, { key: ps.merge.Node, value: ps.merge.Node }>?
---@field items ps.merge.Node[]? of a list
---@field dtype integer? of a tensor; with shape, numel, nbytes
---@field identity string? equal for tensors of a file that are one

-- Raises `problem` with words before it; what it says itself stays as it is.
local function raise(problem, ...)
  error(("%s: %s"):format(string.format(...), tostring(problem)), 0)
end

-- -- shards as trees ------------------------------------------------------------------------------------------------
--- "a.b" for the item b of a.
function shard.inside(label, key) return label == "" and key or label .. "." .. key end

--- Type and shape of a tensor, to compare and to show: "fp32 [2, 3]".
function shard.shape_text(node)
  return ("%s [%s]"):format(ffi.string(C.ps_dtype_name(node.dtype)), table.concat(node.shape, ", "))
end

local function add_tensor(node, t, label, type_text)
  if t.dtype < 0 then
    error(("%s: tensor '%s' has type %s, which is not supported"):format(node.file.path, label, type_text), 0)
  end
  node.dtype, node.shape, node.nbytes, node.numel = t.dtype, {}, tonumber(t.nbytes), 1
  for d = 0, t.ndim - 1 do
    node.shape[d + 1] = tonumber(t.shape[d])
    node.numel = node.numel * node.shape[d + 1]
  end
  return node
end

local function pt_tensor(node, label)
  check(C.ps_pt_tensor_get(node.file.pt, node.id, tensor_out))
  local t = tensor_out
  add_tensor(node, t, label, ffi.string(t.type))
  local parts, run = { t.storage, t.dtype, tonumber(t.offset), table.concat(node.shape, ",") }, 1
  node.dense = true
  for d = t.ndim - 1, 0, -1 do
    parts[#parts + 1] = tonumber(t.stride[d])
    node.dense = node.dense and (t.shape[d] == 1 or t.stride[d] == run)
    run = run * node.shape[d + 1]
  end
  node.identity = table.concat(parts, ":")
  return node
end

-- What a key is called, and what tells it from other keys.
local function key_text(key, label)
  local v, kind, text = value_out, key.kind, nil
  check(C.ps_pt_get(key.file.pt, key.id, v))
  if kind == KIND.INT then text = tostring(v.integer):gsub("LL$", "")
  elseif kind == KIND.BOOL then text = v.integer ~= 0 and "true" or "false"
  elseif kind == KIND.FLOAT then text = ("%.17g"):format(v.number)
  elseif kind == KIND.STRING or kind == KIND.BYTES then text = ffi.string(v.text, v.integer)
  else
    error(("%s: a dict%s has a key that is no string, number or boolean"):format(key.file.path,
      label == "" and "" or " in '" .. label .. "'"), 0)
  end
  return text, kind .. ":" .. text
end

-- The tree of a .pt file's value; what the file shares is one node.
local function pt_node(file, id, label, made)
  if made[id] then return made[id] end
  check(C.ps_pt_get(file.pt, id, value_out))
  local kind, count = value_out.kind, value_out.count
  local node = { kind = kind, file = file, id = id }
  made[id] = node
  if kind == KIND.TENSOR then
    pt_tensor(node, label)
  elseif kind == KIND.DICT then
    node.keys, node.entries = {}, {}
    for i = 0, count - 2, 2 do
      local key = pt_node(file, check(C.ps_pt_item(file.pt, id, i)), label, made)
      local text, token = key_text(key, label)
      if not node.entries[token] then node.keys[#node.keys + 1] = token end
      local value = pt_node(file, check(C.ps_pt_item(file.pt, id, i + 1)), shard.inside(label, text), made)
      node.entries[token] = { key = key, text = text, value = value }
    end
  elseif kind >= KIND.LIST then
    node.items = {}
    for i = 0, count - 1 do
      node.items[i + 1] = pt_node(file, check(C.ps_pt_item(file.pt, id, i)), ("%s[%d]"):format(label, i), made)
    end
  end
  return node
end

local function st_node(file)
  local root = { kind = KIND.DICT, file = file, keys = {}, entries = {} }
  local entry = ffi.new("ps_st_entry")
  for i = 0, C.ps_st_count(file.st) - 1 do
    local name = ffi.string(C.ps_st_name(file.st, i))
    local token = KIND.STRING .. ":" .. name
    check(C.ps_st_get(file.st, i, entry))
    local node = { kind = KIND.TENSOR, file = file, id = i, identity = ("%d"):format(i), dense = true }
    root.keys[i + 1] = token
    root.entries[token] = { key = { kind = KIND.STRING, text = name }, text = name,
      value = add_tensor(node, entry, name, ffi.string(C.ps_st_dtype_text(file.st, i))) }
  end
  return root
end

local function is_safetensors(path)
  local f = io.open(path, "rb")
  local head = f and f:read(9) or ""
  if f then f:close() end
  return #head == 9 and head:sub(9) == "{" and head:sub(1, 2) ~= "PK"
end

local CLASS = { [KIND.DICT] = "a dict", [KIND.LIST] = "a list", [KIND.TUPLE] = "a list", [KIND.SET] = "a list",
  [KIND.TENSOR] = "a tensor" }

--- A list as the dict it is as a Lua table, with the keys 1 .. n.
---@param node ps.merge.Node
---@return ps.merge.Node
function shard.as_dict(node)
  if node.kind == KIND.DICT then return node end
  local dict = { kind = KIND.DICT, file = node.file, keys = {}, entries = {} }
  for i, item in ipairs(node.items) do
    local text = ("%d"):format(i)
    dict.keys[i] = KIND.INT .. ":" .. text
    dict.entries[dict.keys[i]] = { key = { kind = KIND.INT, number = i }, text = text, value = item }
  end
  return dict
end

---@return string "a dict", "a list", "a tensor" or "a value"
function shard.class(node) return CLASS[node.kind] or "a value" end

--- Opens a .pt or safetensors file and reads all of it but tensors' bytes.
---@param path string
---@return ps.merge.Shard
function shard.open(path)
  local file = { path = path, metadata = {} }
  if is_safetensors(path) then
    local out = ffi.new("ps_st *[1]")
    check(C.ps_st_open(path, out))
    file.st = ffi.gc(out[0], C.ps_st_close)
    for i = 0, C.ps_st_meta_count(file.st) - 1 do
      file.metadata[ffi.string(C.ps_st_meta_key(file.st, i))] = ffi.string(C.ps_st_meta_value(file.st, i))
    end
    file.root = st_node(file)
  else
    local out = ffi.new("ps_pt *[1]")
    check(C.ps_pt_open(path, out))
    file.pt = ffi.gc(out[0], C.ps_pt_close)
    file.root = pt_node(file, C.ps_pt_root(file.pt), "", {})
    if file.root.kind ~= KIND.DICT then
      error(("%s holds %s, not the dict of a state"):format(path, shard.class(file.root)), 0)
    end
  end
  return file
end

--- Unmaps a file.
---@param file ps.merge.Shard
function shard.close(file)
  if file.pt then C.ps_pt_close(ffi.gc(file.pt, nil)) end
  if file.st then C.ps_st_close(ffi.gc(file.st, nil)) end
  file.pt, file.st = nil, nil
end

-- -- tensors' bytes -------------------------------------------------------------------------------------------------

-- The bytes of a tensor, row-major, checked against their checksum; those of a strided one are gathered in a buffer.
local function lend(node)
  local file = node.file
  if file.st then
    check(C.ps_st_verify(file.st, node.id))
    local data = C.ps_st_data(file.st, node.id)
    if data == nil then ps.raise(C.PS_EIO) end
    return ffi.cast(pointer, data)
  end
  local rc = C.ps_pt_verify(file.pt, node.id)
  if rc == C.PS_EFORMAT then
    error("its bytes were damaged, their checksum is not the one that the file holds; copy the file again", 0)
  end
  check(rc)
  if node.dense then
    check(C.ps_pt_tensor_get(file.pt, node.id, tensor_out))
    return ffi.cast(pointer, tensor_out.data) + tensor_out.offset * C.ps_dtype_size(node.dtype)
  end
  local buffer = ffi.new("uint8_t[?]", node.nbytes)
  check(C.ps_pt_copy(file.pt, node.id, buffer, node.nbytes))
  C.ps_pt_drop(file.pt, node.id)
  return ffi.cast(pointer, buffer), buffer                 -- the buffer must outlive the pointer
end

-- Before a piece is read: the file is still as long as it was.
local function ready(node)
  if C.ps_interrupts() > 0 then error("interrupted", 0) end
  if node.file.pt then check(C.ps_pt_ready(node.file.pt))
  elseif C.ps_st_data(node.file.st, node.id) == nil then ps.raise(C.PS_EIO) end
end

-- After it: its pages go.
local function drop(node)
  if node.file.pt then C.ps_pt_drop(node.file.pt, node.id) else C.ps_st_drop(node.file.st, node.id) end
end

local function lend_named(node, label)
  local ok, at, buffer = pcall(lend, node)
  if not ok then raise(at, "%s: tensor '%s' cannot be read", node.file.path, label) end
  return at, buffer
end

local function same_bytes(a, b, label)
  if a.nbytes == 0 then return true end
  local from, keep_from = lend_named(a, label)
  local to, keep_to = lend_named(b, label)
  local same, at = true, 0
  while same and at < a.nbytes do
    local n = math.min(PIECE, a.nbytes - at)
    ready(a)
    ready(b)
    same = C.memcmp(from + at, to + at, n) == 0
    drop(a)
    drop(b)
    at = at + n
  end
  return same, keep_from, keep_to
end

--- Whether two tensors of one type and shape, or two plain values, are the same.
---@param a ps.merge.Node
---@param b ps.merge.Node
---@param label string for errors
---@return boolean
function shard.same(a, b, label)
  if a.kind ~= b.kind then return false end
  if a.kind == KIND.TENSOR then return (same_bytes(a, b, label)) end
  local v = ffi.new("ps_pt_value")
  check(C.ps_pt_get(a.file.pt, a.id, v))
  check(C.ps_pt_get(b.file.pt, b.id, value_out))
  local w = value_out
  if v.text ~= nil then return ffi.string(v.text, v.integer) == ffi.string(w.text, w.integer) end
  return v.integer == w.integer and (v.number == w.number or v.number ~= v.number and w.number ~= w.number)
end

--- Writes a tensor's bytes by put(pointer, nbytes) to the file `path`.
---@param node ps.merge.Node
---@param label string
---@param path string
---@param put fun(at: ffi.cdata*, nbytes: integer): integer
function shard.copy(node, label, path, put)
  if node.nbytes == 0 then return end
  local from, buffer = lend_named(node, label)
  local at = 0
  while at < node.nbytes do
    local n = math.min(PIECE, node.nbytes - at)
    local ok, problem = pcall(function()
      ready(node)
      check(put(from + at, n))
    end)
    if not ok then raise(problem, "copying tensor '%s' of %s to %s", label, node.file.path, path) end
    drop(node)
    at = at + n
  end
  local gathered = buffer ~= nil and node.nbytes > PIECE
  buffer = nil -- luacheck: ignore 311
  if gathered then collectgarbage() end
end

return shard
