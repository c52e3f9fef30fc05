-- SPDX-License-Identifier: BSD-3-Clause
-- Writes PyTorch's .pt files. First the whole value is declared, which determines the size of the file. Then the bytes
-- of the tensors are written. This needs memory for a small buffer and a few hundred bytes per tensor. If a table
-- occurs twice in the value, it is stored once. The repeated elements of an expanded tensor are also stored once, as in
-- PyTorch. A text in the archive says which parameters are shards (ps.tensor.shard), so that one rank does not load the
-- shard of another rank.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local ffi = require "ffi"
local bit = require "bit"
local encode = require "ps.core.encode"
local pieces = require "ps.io.pieces"
local shard = require "ps.tensor.shard"
local torch_pt = require "ps.io.torch_pt"
local utf8 = require "ps.core.utf8"
local C, check = native.C, native.check

local MAX_DEPTH = 200  -- the limit in src/io/pickle.h; checked here because this error can contain the path
local EXACT_BELOW = 2 ^ 53                                 -- a double represents whole numbers below this limit exactly

local function refuse(label, what)
  error(("cannot save %s: %s"):format(label == "" and "this value" or "'" .. label .. "'", what), 0)
end

-- Writes a value without items, or begins a list or a dict. For a list or a dict, returns its number in the file.
local function put(writer, kind, fields)
  fields = fields or {}
  fields.kind = kind
  return check(C.ps_ptw_put(writer, ffi.new("ps_pt_value", fields)))
end

local function put_string(writer, text)
  put(writer, utf8.valid(text) and C.PS_PT_STRING or C.PS_PT_BYTES, { text = text, integer = #text })
end

local function put_number(writer, x)
  if x == math.floor(x) and x > -EXACT_BELOW and x < EXACT_BELOW and (x ~= 0 or 1 / x > 0) then
    put(writer, C.PS_PT_INT, { integer = x })
  else
    put(writer, C.PS_PT_FLOAT, { number = x })
  end
end

local int64_t, uint64_t = ffi.typeof("int64_t"), ffi.typeof("uint64_t")

-- Declares a tensor. If the same tensor occurs several times in the value, its bytes are declared only once.
local function put_tensor(state, t, label)
  if not t:alive() then refuse(label, "this tensor's bytes were freed: the scope that made it has ended") end
  local shape = t:shape()
  local same = ("%s:%d:%s:%s:%s"):format(tostring(ffi.cast("void *", t.storage)), t.dtype_, tostring(t.offset),
    table.concat(shape, ","), table.concat(t:stride(), ","))
  local entry = ffi.new("ps_pt_tensor", { ndim = #shape })
  local stride, once = 1, t                                -- `once`: a view of t without the repetitions of expand
  for d = #shape - 1, 0, -1 do
    entry.shape[d], entry.stride[d] = shape[d + 1], stride
    if t.stride_[d] == 0 and shape[d + 1] > 1 and t.numel_ > 0 then
      entry.stride[d], once = 0, scope.no_grad(once.narrow, once, d, 0, 1)
    else
      stride = stride * math.max(1, shape[d + 1])
    end
  end
  if not state.storages[same] then
    state.storages[same] = check(C.ps_ptw_storage(state.writer, t.dtype_, once.numel_))
    state.tensors[#state.tensors + 1] = { tensor = once, storage = state.storages[same] }
  end
  entry.storage = state.storages[same]
  state.shards[label] = shard.of(t)
  check(C.ps_ptw_tensor(state.writer, entry))
end

-- Returns the keys of a table in an order that is the same in every run. If the table was read from a file, its keys
-- have the order of the file. All other keys follow in sorted order.
local function ordered_keys(t)
  local keys, known = {}, {}
  for _, key in ipairs(torch_pt.keys(t) or {}) do
    if t[key] ~= nil and not known[key] then keys[#keys + 1], known[key] = key, true end
  end
  local others = {}
  for key in pairs(t) do if not known[key] then others[#others + 1] = key end end
  table.sort(others, function(a, b)
    if type(a) ~= type(b) or type(a) == "boolean" then return type(a) == "number" and type(b) ~= "number" end
    return a < b
  end)
  for _, key in ipairs(others) do keys[#keys + 1] = key end
  return keys
end

local function is_list(t)
  local kind = torch_pt.kind(t)
  if kind == "dict" or next(t) == nil then return kind == "list" end
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  for i = 1, n do if t[i] == nil then return false end end   -- #t may be n although the table has holes
  return true
end

local put_value

local function put_list(state, t, label, depth)
  local height = 0
  state.number[t] = put(state.writer, C.PS_PT_LIST, { count = #t })
  for i, item in ipairs(t) do
    height = math.max(height, put_value(state, item, ("%s[%d]"):format(label, i), depth + 1))
  end
  return height
end

local function put_dict(state, t, label, depth)
  for key in pairs(t) do
    if type(key) ~= "string" and (type(key) ~= "number" or key ~= math.floor(key)) then
      refuse(label, ("a table with the key %s; keys must be strings or whole numbers"):format(tostring(key)))
    end
  end
  local height, keys = 0, ordered_keys(t)
  state.number[t] = put(state.writer, C.PS_PT_DICT, { count = 2 * #keys })
  for _, key in ipairs(keys) do
    if type(key) == "string" then put_string(state.writer, key) else put_number(state.writer, key) end
    local below = put_value(state, t[key], ("%s%s%s"):format(label, label == "" and "" or ".", key), depth + 1)
    height = math.max(height, below)
  end
  return height
end

-- Declares a table and returns its height. The height is the number of nested levels, including the table itself: 1 for
-- a table that contains no tables.
local function put_table(state, t, label, depth)
  local meta, height = getmetatable(t), state.height
  if meta and meta.ps_module then refuse(label, "a module; save its state_dict()") end
  if state.open[t] then refuse(label, "a table that contains itself") end
  if depth + (height[t] or 1) - 1 > MAX_DEPTH then
    refuse(label, ("tables nested more than %d deep"):format(MAX_DEPTH))
  end
  if height[t] then
    check(C.ps_ptw_again(state.writer, state.number[t]))
    return height[t]
  end
  state.open[t] = true
  height[t] = 1 + (is_list(t) and put_list or put_dict)(state, t, label, depth)
  state.open[t] = nil
  return height[t]
end

-- Declares a value. Returns its height if it is a table, and 0 otherwise.
function put_value(state, value, label, depth)
  local kind, writer = type(value), state.writer
  if scope.is_tensor(value) then put_tensor(state, value, label)
  elseif value == torch_pt.none then put(writer, C.PS_PT_NONE)
  elseif kind == "table" then return put_table(state, value, label, depth)
  elseif kind == "number" then put_number(writer, value)
  elseif kind == "string" then put_string(writer, value)
  elseif kind == "boolean" then put(writer, C.PS_PT_BOOL, { integer = value and 1 or 0 })
  elseif ffi.istype(int64_t, value) then put(writer, C.PS_PT_INT, { integer = value })
  elseif ffi.istype(uint64_t, value) and bit.rshift(value, 63) == 0 then
    put(writer, C.PS_PT_INT, { integer = ffi.cast(int64_t, value) })
  else
    refuse(label, ("a %s (%s); files can hold tensors, numbers, strings, booleans and tables of these"):format(kind,
      tostring(value)))
  end
  return 0
end

local function write(writer, value)
  local state = { writer = writer, shards = {}, storages = {}, tensors = {}, open = {}, height = {}, number = {} }
  put_value(state, value, "", 1)
  if next(state.shards) then check(C.ps_ptw_note(writer, encode({ shards = state.shards }, "the shards"))) end
  check(C.ps_ptw_begin(writer))
  local largest = 1
  for _, entry in ipairs(state.tensors) do
    largest = math.max(largest, tonumber(C.ps_tensor_nbytes(entry.tensor)))
  end
  local buffer = pieces.buffer(largest)
  for _, entry in ipairs(state.tensors) do
    pieces.read(entry.tensor, buffer, function(data, nbytes)
      check(C.ps_ptw_write(writer, entry.storage, data, nbytes))
    end)
  end
  check(C.ps_ptw_commit(writer))
end

--- Writes a value to a file. If a file with this name exists, it is replaced only when the new file is complete on the
--- disk. A tensor that occurs twice in the value is written once.
---@param path string
---@param value any a tensor, number, string or boolean, or a table of such values
local function save(path, value)
  local out = ffi.new("ps_ptw *[1]")
  check(C.ps_ptw_new(path, out))
  local writer = ffi.gc(out[0], C.ps_ptw_free)
  local ok, problem = pcall(write, writer, value)
  C.ps_ptw_free(ffi.gc(writer, nil))                       -- freed at once, because this removes the temporary file
  if not ok then error(problem, 0) end
end

return { save = save }
