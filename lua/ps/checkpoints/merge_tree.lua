-- SPDX-License-Identifier: BSD-3-Clause
-- Reads a file of a checkpoint as a tree of its values. The bytes of tensors are read one piece at a time. A value that
-- occurs several times is one node. The tree may therefore have far more paths than nodes, and walks record the nodes
-- that they have visited. The tree needs a few hundred bytes of memory per tensor, and the buffer of one piece.
local native = require "ps.core.ffi"
local ffi = require "ffi"
local array = require "ps.core.array"
local rectangles = require "ps.core.rectangles"
local serialize = require "ps.io.serialize"
local C, check = native.C, native.check

local tree = {}

local PIECE = 8 * 2 ^ 20                                   -- largest number of bytes in memory at a time
ffi.cdef "int memcmp(const void *a, const void *b, size_t n);"

local KIND = {}
tree.KIND = KIND                                          -- PS_PT_* by name
for _, name in ipairs { "NONE", "BOOL", "INT", "FLOAT", "STRING", "BYTES", "NAME", "LIST", "TUPLE", "SET", "DICT",
                        "TENSOR" } do
  KIND[name] = C["PS_PT_" .. name]
end

local pointer = ffi.typeof "const uint8_t *"
local value_out, text_out = ffi.new "ps_pt_value", ffi.new "const char *[1]"
local byte_array = array "uint8_t"

---@class ps.merge.File an open file
---@field path string
---@field metadata table<string, string>
---@field pt ffi.cdata*? ps_pt
---@field st ffi.cdata*? ps_st
---@field root ps.merge.Node

---@class ps.merge.Node
---@field kind integer PS_PT_*
---@field file ps.merge.File
---@field id integer id of the value in its file
---@field text string? text of a key that is not in a file; such a key may have `number` instead
---@field keys string[]? tokens of a dict's keys, in order
---@field entries table<string, { key: ps.merge.Node, value: ps.merge.Node }>?
---@field items ps.merge.Node[]? items of a list
---@field dtype integer? dtype of a tensor. The node of a tensor also has the fields shape, numel and nbytes
---@field tensor ffi.cdata*? the ps_pt_tensor of a tensor in a .pt file
---@field dense boolean? whether a tensor's elements have the same order in the file and in the result
---@field span integer? set for a view whose elements share bytes and that is written as a view: the number of elements
---  from the first to the last element in the file
---@field identity string? a text that is equal for the entries of a file that are the same tensor
---@field parts { node: ps.merge.Node, offset: integer[], shape: integer[], at: integer[] }[]? set for a tensor whose
---  pieces are in several other tensors: a rectangle for each piece. `offset` is the piece's position in this tensor,
---  and `at` is the piece's position in the tensor `node`

-- Raises `problem`, preceded by a text.
local function raise(problem, ...)
  error(("%s: %s"):format(string.format(...), tostring(problem)), 0)
end

-- -- shards as trees ------------------------------------------------------------------------------------------------
--- Returns the path of the item `key` in the table with the path `label`, such as "a.b".
function tree.inside(label, key) return label == "" and key or label .. "." .. key end

--- Returns the dtype and the shape of a tensor as text, for comparison and messages: "fp32 [2, 3]".
function tree.shape_text(node)
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
  local t = ffi.new "ps_pt_tensor"
  check(C.ps_pt_tensor_get(node.file.pt, node.id, t))
  add_tensor(node, t, label, ffi.string(t.type))
  local parts, run, span = { t.storage, t.dtype, tonumber(t.offset), table.concat(node.shape, ",") }, 1, 1
  node.tensor, node.dense = t, true
  for d = t.ndim - 1, 0, -1 do
    parts[#parts + 1] = tonumber(t.stride[d])
    node.dense = node.dense and (t.shape[d] == 1 or t.stride[d] == run)
    run = run * node.shape[d + 1]
    span = span + (node.shape[d + 1] - 1) * tonumber(t.stride[d])
  end
  if node.numel > 0 and node.numel > span then node.span = span end
  node.identity = table.concat(parts, ":")
  return node
end

-- Returns the name of a key for errors, and a text that identifies the key.
local function key_text(key, label)
  local v, kind, text = value_out, key.kind, nil
  check(C.ps_pt_get(key.file.pt, key.id, v))
  if kind == KIND.INT then text = tostring(v.integer):gsub("LL$", "")
  elseif kind == KIND.BOOL then text = v.integer ~= 0 and "true" or "false"
  elseif kind == KIND.FLOAT then text = ("%.17g"):format(v.number)
  elseif kind == KIND.STRING or kind == KIND.BYTES then text = ffi.string(v.text, v.integer)
  else
    error(("%s: a dict%s has a key that is not a string, number or boolean"):format(key.file.path,
      label == "" and "" or " in '" .. label .. "'"), 0)
  end
  return text, kind .. ":" .. text
end

-- Returns the tree of a .pt file's value. A value that occurs several times in the file is one node.
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
      local value = pt_node(file, check(C.ps_pt_item(file.pt, id, i + 1)), tree.inside(label, text), made)
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

--- Returns the node of a tensor whose pieces are in several files.
---@param name string
---@param entry { dtype: string, shape: integer[] }
---@param parts { node: ps.merge.Node, offset: integer[], shape: integer[], at: integer[] }[]
---@return ps.merge.Node
function tree.pieced(name, entry, parts)
  local each = tonumber(C.ps_dtype_size(native.dtype_code(entry.dtype)))
  local node = { kind = KIND.TENSOR, file = parts[1].node.file, id = parts[1].node.id,
    dtype = native.dtype_code(entry.dtype), shape = entry.shape, numel = rectangles.numel(entry.shape), dense = true,
    identity = "pieces of " .. name, parts = parts }
  node.nbytes = node.numel * each
  for _, part in ipairs(parts) do
    if part.node.kind ~= KIND.TENSOR or part.node.dtype ~= node.dtype or not rectangles.inside(part.node.shape, part.at,
      part.shape) then
      error(("%s: '%s' is %s, without a part of shape [%s] at [%s] of the whole, %s"):format(part.node.file.path, name,
        part.node.kind == KIND.TENSOR and tree.shape_text(part.node) or tree.class(part.node),
        rectangles.text(part.shape), rectangles.text(part.at), tree.shape_text(node)), 0)
    end
  end
  rectangles.check(name, entry.shape, parts, function(part) return part.node.file.path end)
  return node
end

local CLASS = { [KIND.DICT] = "a dict", [KIND.LIST] = "a list", [KIND.TUPLE] = "a list", [KIND.SET] = "a list",
  [KIND.TENSOR] = "a tensor" }

--- Returns a list's node in the form of a dict with the keys 1 .. n, because Lua represents lists in this form.
---@param node ps.merge.Node
---@return ps.merge.Node
function tree.as_dict(node)
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
function tree.class(node) return CLASS[node.kind] or "a value" end

--- Opens a .pt or safetensors file and reads everything except the tensors' bytes.
---@param path string
---@return ps.merge.File
function tree.open(path)
  local file = { path = path, metadata = {} }
  if serialize.format(path) == "safetensors" then
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
    local nbytes = check(C.ps_pt_note(file.pt, text_out))
    if nbytes > 0 then file.metadata.psluajit_shards = ffi.string(text_out[0], nbytes) end
    file.root = pt_node(file, C.ps_pt_root(file.pt), "", {})
    if file.root.kind ~= KIND.DICT then
      error(("%s has %s at its top level, not the dict of a state"):format(path, tree.class(file.root)), 0)
    end
  end
  return file
end

--- Closes a file.
---@param file ps.merge.File
function tree.close(file)
  if file.pt then C.ps_pt_close(ffi.gc(file.pt, nil)) end
  if file.st then C.ps_st_close(ffi.gc(file.st, nil)) end
  file.pt, file.st = nil, nil
end

-- -- tensors' bytes -------------------------------------------------------------------------------------------------


local lender_of

-- Compares a tensor with its checksum, and returns two functions. lend(at, n) returns n bytes, starting at byte `at`.
-- The bytes are valid until the next call of lend(). done() releases the pages of the bytes. If `as_is` is true, bytes
-- are in the file's order, beginning with the first element. Otherwise the bytes are in row-major order.
local function lender(node, as_is)
  if node.parts then return tree.lend_parts(node) end
  local file, each = node.file, tonumber(C.ps_dtype_size(node.dtype))
  if file.st then
    check(C.ps_st_verify(file.st, node.id))
    return function(at)
      local data = C.ps_st_data(file.st, node.id)
      if data == nil then native.raise(C.PS_EIO) end
      return ffi.cast(pointer, data) + at
    end, function() C.ps_st_drop(file.st, node.id) end
  end
  local rc = C.ps_pt_verify(file.pt, node.id)
  if rc == C.PS_EFORMAT then
    error("its bytes are damaged: their checksum differs from the one in the file; copy the file again", 0)
  end
  check(rc)
  local function done() C.ps_pt_drop(file.pt, node.id) end
  if as_is or node.dense then
    local first = ffi.cast(pointer, node.tensor.data) + node.tensor.offset * each
    return function(at)
      check(C.ps_pt_ready(file.pt))
      return first + at
    end, done
  end
  local buffer = byte_array(math.min(PIECE, node.nbytes))
  return function(at, n)
    check(C.ps_pt_copy(file.pt, node.tensor, at / each, buffer, n / each))
    return buffer
  end, done
end

-- Divides a part into runs that are contiguous both in the whole tensor and in the part's own tensor. Returns the
-- length of the runs, their number, and a function place(i). place(i) returns the index of run i's first element in the
-- whole tensor, and its index in the part's own tensor. Both indices count from 0.
local function runs_of(node, part)
  local d, length, count = #node.shape, 1, 1
  while d > 0 do
    length = length * part.shape[d]
    if part.shape[d] ~= node.shape[d] or part.shape[d] ~= part.node.shape[d] then break end
    d = d - 1
  end
  for k = 1, d - 1 do count = count * part.shape[k] end
  local function place(i)
    local from, at, row, own_row = 0, 0, 1, 1
    for k = #node.shape, 1, -1 do
      local index = 0
      if k < d then
        index = i % part.shape[k]
        i = (i - index) / part.shape[k]
      end
      from, at = from + (part.offset[k] + index) * row, at + (part.at[k] + index) * own_row
      row, own_row = row * node.shape[k], own_row * part.node.shape[k]
    end
    return from, at
  end
  return length, count, place
end

-- Copies a part's elements into the buffer. The buffer holds n elements of the whole tensor, starting at element
-- `first`.
local function take_part(part, buffer, first, n, each)
  local length, low, high = part.length, 0, part.count
  while low < high do                                      -- find the first run that ends after `first`
    local middle = math.floor((low + high) / 2)
    if part.place(middle) + length > first then high = middle else low = middle + 1 end
  end
  for i = low, part.count - 1 do
    local from, at = part.place(i)
    if from >= first + n then return end
    local skip = math.max(0, first - from)
    local take = math.min(from + length, first + n) - from - skip
    for done = 0, take - 1, PIECE / each do
      local some = math.min(take - done, PIECE / each)
      ffi.copy(buffer + (from + skip + done - first) * each, part.lend((at + skip + done) * each, some * each),
        some * each)
    end
  end
end

-- Returns two functions like lender(), for a tensor that consists of pieces. Each call of lend() assembles the
-- requested bytes.
function tree.lend_parts(node)
  local each, parts = tonumber(C.ps_dtype_size(node.dtype)), {}
  for i, part in ipairs(node.parts) do
    local lend, done = lender_of(part.node, node.identity)
    local length, count, place = runs_of(node, part)
    parts[i] = { lend = lend, done = done, length = length, count = count, place = place }
  end
  local buffer = byte_array(math.min(PIECE, node.nbytes))
  return function(at, n)
    for _, part in ipairs(parts) do take_part(part, buffer, at / each, n / each, each) end
    return buffer
  end, function() for _, part in ipairs(parts) do part.done() end end
end

function lender_of(node, label, as_is)
  local ok, lend, done = pcall(lender, node, as_is)
  if not ok then raise(lend, "%s: tensor '%s' cannot be read", node.file.path, label) end
  return lend, done
end

-- Calls fn(at, n) for consecutive pieces of at most PIECE bytes.
local function each_piece(nbytes, fn)
  for at = 0, nbytes - 1, PIECE do
    if C.ps_interrupts() > 0 then error("interrupted", 0) end
    fn(at, math.min(PIECE, nbytes - at))
  end
end

local function same_bytes(a, b, label, nbytes, as_is)
  local from, from_done = lender_of(a, label, as_is)
  local to, to_done = lender_of(b, label, as_is)
  local same = true
  each_piece(nbytes, function(at, n)
    if not same then return end
    same = C.memcmp(from(at, n), to(at, n), n) == 0
    from_done()
    to_done()
  end)
  return same
end

-- Returns the size of a tensor in a .pt result, in bytes.
local function kept_nbytes(node) return (node.span or node.numel) * tonumber(C.ps_dtype_size(node.dtype)) end
tree.kept_nbytes = kept_nbytes

local function same_tensors(a, b, label)
  if a.nbytes == 0 then return true end
  -- Two views with the same strides are equal if all bytes from their first to their last element are equal. If these
  -- bytes differ, each element is compared.
  if a.span and b.span and C.memcmp(a.tensor.stride, b.tensor.stride, ffi.sizeof(a.tensor.stride)) == 0
    and same_bytes(a, b, label, kept_nbytes(a), true) then return true end
  return same_bytes(a, b, label, a.nbytes, false)
end

--- Compares two tensors of the same dtype and shape, or two plain values. Returns whether they are equal.
---@param a ps.merge.Node
---@param b ps.merge.Node
---@param label string for errors
---@return boolean
function tree.same(a, b, label)
  if a.kind ~= b.kind then return false end
  if a.kind == KIND.TENSOR then return same_tensors(a, b, label) end
  local v = ffi.new("ps_pt_value")
  check(C.ps_pt_get(a.file.pt, a.id, v))
  check(C.ps_pt_get(b.file.pt, b.id, value_out))
  local w = value_out
  if v.text ~= nil then return ffi.string(v.text, v.integer) == ffi.string(w.text, w.integer) end
  return v.integer == w.integer and (v.number == w.number or v.number ~= v.number and w.number ~= w.number)
end

--- Writes a tensor's bytes with put(pointer, nbytes) to the file `path`. The bytes are in row-major order. If the
--- tensor is a view that is written as a view (node.span), the bytes are in the file's order.
---@param node ps.merge.Node
---@param label string
---@param path string
---@param put fun(at: ffi.cdata*, nbytes: integer): integer
function tree.copy(node, label, path, put)
  if node.nbytes == 0 then return end
  local lend, done = lender_of(node, label, node.span ~= nil)
  each_piece(kept_nbytes(node), function(at, n)
    local ok, problem = pcall(function() check(put(lend(at, n), n)) end)
    if not ok then raise(problem, "copying tensor '%s' of %s to %s", label, node.file.path, path) end
    done()
  end)
end

return tree
