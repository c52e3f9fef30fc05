-- SPDX-License-Identifier: BSD-3-Clause
-- t[key], t[key] = value and t:index_put(key, value), with PyTorch's rules. A key contains numbers, ranges, new axes,
-- index tensors and masks. Numbers, ranges and new axes select a view. Index tensors and masks then copy from this view
-- or write into it. Several index tensors are broadcast to a common shape, and each position of this shape selects one
-- element. If the indexed dimensions are adjacent, the dimensions of the common shape replace the indexed dimensions.
-- Otherwise the dimensions of the common shape are the first dimensions of the result.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C, ops, caller = native.C, native.ops, native.caller
local create = require "ps.tensor.create"
local error = caller.error
local is_tensor = scope.is_tensor

local M = {}

--- A part of a key that inserts a new dimension of size 1 (ps.newaxis).
M.newaxis = setmetatable({}, { __tostring = function() return "ps.newaxis" end })

local INTEGER = { [C.PS_I32] = true, [C.PS_I64] = true }

local function mask_misfit(k, d, t)
  error(("a bool index of shape [%s] at dimension %d of a tensor of shape [%s]: the shapes must match there"):format(
    table.concat(k:shape(), ", "), d, table.concat(t:shape(), ", ")))
end

-- Appends the index tensors of `k` to `picks`. The first appended index tensor is for dimension d. Returns the number
-- of dimensions that `k` covers.
local function add(picks, t, d, k, place)
  if k.dtype_ ~= C.PS_BOOL then
    if k.dtype_ == C.PS_U8 then
      error(("index %d is a tensor of uint8: write index:to \"bool\" for a mask, which PyTorch takes it for, or "
        .. "index:long() for positions"):format(place))
    end
    if not INTEGER[k.dtype_] then
      error(("index %d is a tensor of %s; its type must be an integer type or bool"):format(place, k:dtype()))
    end
    picks[#picks + 1] = { d = d, index = k }
    return 1
  end
  for i = 0, k.ndim - 1 do
    local size = d + i < t.ndim and t:size(d + i)
    if size ~= k:size(i) then mask_misfit(k, d, t) end
  end
  if k.ndim == 0 then
    error(("index %d is a bool tensor without dimensions, which cannot index; test mask:item() instead"):format(place))
  end
  local at = k:nonzero()
  for i = 0, k.ndim - 1 do picks[#picks + 1] = { d = d + i, index = at:select(1, i) } end
  return k.ndim
end

local function product(list)
  local n = 1
  for _, size in ipairs(list) do n = n * size end
  return n
end

local function part(list, first, last)
  local some = {}
  for i = first, last do some[#some + 1] = list[i] end
  return some
end

local function joined(...)
  local all = {}
  for i = 1, select("#", ...) do for _, n in ipairs((select(i, ...))) do all[#all + 1] = n end end
  return all
end

-- Describes the elements of t that index tensors select. `picks` is a list of { d =, index = }, sorted by d.
--   index: for each selected element, its row-major index in the picked dimensions
--   together: whether the picked dimensions are adjacent. In that case t is treated as [outer, rows, inner]
--   axes: the picked dimensions, then the other dimensions. t permuted by these axes is treated as [rows, inner]
--   shape: the shape of t[key]
local function named(t, picks)
  local sizes, dims, picked, shape, indices = {}, {}, {}, t:shape(), {}
  local p = { axes = {}, together = true, first = picks[1].d, t = t }
  for i, pick in ipairs(picks) do
    p.axes[i], picked[pick.d], dims[i], sizes[i], indices[i] = pick.d, true, pick.d, shape[pick.d + 1], pick.index
    p.together = p.together and pick.d == p.first + i - 1
  end
  local rest = {}
  for d = 0, t.ndim - 1 do
    if not picked[d] then p.axes[#p.axes + 1], rest[#rest + 1] = d, shape[d + 1] end
  end
  p.index, p.rows = ops.flat_index(indices, sizes, dims), product(sizes)
  if p.together then
    local before, after = part(shape, 1, p.first), part(shape, p.first + #picks + 1, #shape)
    p.outer, p.inner, p.shape = product(before), product(after), joined(before, p.index:shape(), after)
  else
    p.outer, p.inner, p.shape = 1, product(rest), joined(p.index:shape(), rest)
  end
  return p
end

-- Returns x as [outer, rows, inner] or [rows, inner]. Also returns the flat index and the dimension that the flat index
-- indexes, which is 1 or 0.
local function parts_of(p, x)
  local flat = p.index:reshape(-1)
  if p.outer == 1 then return x:reshape(p.rows, p.inner), flat, 0 end
  return x:reshape(p.outer, p.rows, p.inner), flat:reshape(1, -1):expand(p.outer, flat:size(0)), 1
end

-- Returns a copy of the elements that index tensors select.
local function pick_all(t, picks)
  local p = named(t, picks)
  local x, index, d = parts_of(p, p.together and t or t:permute(p.axes))
  local y = d == 0 and ops.embedding(x, index) or ops.gather(x, index:contiguous(), d)
  return y:reshape(p.shape)
end

-- Raises an error if a key covers more dimensions than the tensor has.
local function check_count(t, key)
  local taken = 0
  for i = 1, #key do
    local k = key[i]
    if is_tensor(k) then taken = taken + (k.dtype_ == C.PS_BOOL and k.ndim or 1)
    elseif k ~= M.newaxis then taken = taken + 1 end
  end
  if taken > t.ndim then
    error(("%d indices for a tensor with %s"):format(taken, caller.counted(t.ndim, "dimension")))
  end
end

-- Returns the view that numbers, ranges and new axes select, and the index tensors to apply to this view. An integer
-- tensor without dimensions counts as a number. With `writes`, the host reads this number, so that the result is a view
-- and not a copy.
local function of_list(t, key, writes)
  local d, picks = 0, {}
  check_count(t, key)
  for i = 1, #key do
    local k = key[i]
    if type(k) == "number" then t = t:select(d, k)
    elseif is_tensor(k) then
      if k.ndim == 0 and INTEGER[k.dtype_] then
        if writes then t = t:select(d, k:item())
        else t = t:index_select(d, ops.flat_index({ k }, { t:size(d) }, { d })) end
      else
        d = d + add(picks, t, d, k, i)
      end
    elseif k == M.newaxis then
      t = t:unsqueeze(d)
      d = d + 1
    elseif type(k) == "table" then
      if k[1] ~= nil or k[2] ~= nil or k[3] ~= nil then t = t:slice(d, k[1], k[2], k[3]) end
      d = d + 1
    else
      error(("index %d is a %s"):format(i, type(k)))
    end
  end
  return t, picks
end

local function list_of(key)
  if type(key) == "number" or is_tensor(key) or key == M.newaxis then return { key } end
  if type(key) ~= "table" then error("a tensor is indexed with a number, tensor or table, not a " .. type(key)) end
  return key
end

local row_key, row_size, FIRST = {}, {}, { 0 }
local pair_key, pair_size, PAIR = {}, {}, { 0, 1 }
local COLUMN, ALL = { -1, 1 }, { -1 }

local function is_index(k) return is_tensor(k) and k.ndim > 0 and INTEGER[k.dtype_] end

-- Returns the row-major indices of the rows that an index tensor selects.
local function row_numbers(t, index)
  row_size[1], row_key[1] = tonumber(t.shape_[0]), index
  local numbers = ops.flat_index(row_key, row_size, FIRST)
  row_key[1] = nil
  return numbers
end

-- Returns the row-major indices of the elements of a matrix in rows i and columns j. Sets pair_size to the matrix's
-- shape.
local function pair_numbers(t, i, j)
  pair_size[1], pair_size[2] = tonumber(t.shape_[0]), tonumber(t.shape_[1])
  pair_key[1], pair_key[2] = i, j
  local index = ops.flat_index(pair_key, pair_size, PAIR)
  pair_key[1], pair_key[2] = nil, nil
  return index
end

local function is_vector_of(k, like) return is_index(k) and k.ndim == 1 and k.shape_[0] == like.shape_[0] end

-- Returns t[{ i, j }] for a matrix. Is faster than pick_all and returns the same result.
local function pick_pairs(t, i, j)
  local index = pair_numbers(t, i, j)
  local shape = index:shape()
  return ops.reshape(ops.embedding(ops.reshape(t:contiguous(), 2, COLUMN), index), #shape, shape)
end

--- Returns the elements that a key selects. The forms are t[i], t[{i, {start, stop, step}, {}}], t[index tensor],
--- t[{index tensor, index tensor}] and t[bool tensor].
---@param t ps.Tensor
---@param key number|ps.Tensor|table
---@return ps.Tensor
function M.get(t, key)
  if type(key) == "number" then return t:select(0, key) end
  if is_tensor(key) and key.dtype_ == C.PS_BOOL and key.ndim == t.ndim then return t:masked_select(key) end
  -- Faster ways for common keys. The results are the same.
  if t.ndim == 2 and is_index(key) then return ops.embedding(t, row_numbers(t, key)) end
  if t.ndim == 2 and type(key) == "table" and #key == 2 and is_index(key[1]) and is_index(key[2]) then
    return pick_pairs(t, key[1], key[2])
  end
  local view, picks = of_list(t, list_of(key))
  return #picks > 0 and pick_all(view, picks) or view
end

-- -- writing --------------------------------------------------------------------------------------------------------
-- Performs t[mask] = value. A number, or a tensor of one element, is written to each place where the mask is true. Any
-- other tensor must have one slice for each of these places, in order.
local function masked(t, mask, value)
  local whole = mask
  if mask.ndim > 0 and mask.ndim <= t.ndim then
    local shape = mask:shape()
    for i, n in ipairs(shape) do if n ~= t:size(i - 1) then mask_misfit(mask, 0, t) end end
    for i = mask.ndim + 1, t.ndim do shape[i] = 1 end
    whole = mask:reshape(shape)
  else
    mask_misfit(mask, 0, t)
  end
  if type(value) == "number" then value = create.scalar_like(t, value) end
  if caller.tensor(value, "t[mask] = value", "the value") ~= nil and value:numel() ~= 1 then
    local count, shape = mask:long():sum():item(), {}
    shape[1] = count
    for i = mask.ndim, t.ndim - 1 do shape[#shape + 1] = t:size(i) end
    if value.ndim == #shape and value:size(0) ~= count and value:size(0) ~= 1 then
      error(("t[mask] = value: the mask has %d true elements, but the value has %d"):format(count, value:size(0)))
    end
    if count == 0 then return t end
    local place = mask:long():reshape(-1):cumsum(0) - 1
    value = value:expand(shape):index_select(0, place:clamp(0)):reshape(t:shape())
  end
  return ops.where(whole, value, t)
end

-- Converts `value` to a tensor of t's type, and broadcasts it to a shape.
local function spread(t, value, shape, call)
  if type(value) == "number" then
    return create.full(shape, value, { dtype = t:dtype(), device = t:device() })
  end
  if caller.tensor(value, call, "the value") == nil then error(call .. ": the value is missing") end
  local have, extra = value:shape(), value.ndim - #shape
  for i, n in ipairs(have) do                              -- leading sizes of 1 are dropped, as in PyTorch
    if i <= extra and n == 1 then have[i] = 0
    elseif i <= extra or n ~= 1 and n ~= shape[i - extra] then
      error(("%s: the value has shape [%s], which does not broadcast to [%s], the shape of the key's "
        .. "elements"):format(call,
        table.concat(value:shape(), ", "), table.concat(shape, ", ")))
    end
  end
  if extra > 0 then value = value:reshape(part(have, extra + 1, #have)) end
  if value.dtype_ ~= t.dtype_ then value = ops.cast(value, t.dtype_) end
  return value:expand(shape)
end

-- Writes a value to the elements of a view that index tensors select.
local function put_all(t, picks, value, call)
  local p = named(t, picks)
  local src = spread(t, value, p.shape, call)
  local v = p.together and t or t:permute(p.axes)
  local in_place = v:is_contiguous()
  local x, index, d = parts_of(p, v)
  local shape = d == 0 and { -1, p.inner } or { p.outer, -1, p.inner }
  if product(p.shape) == 0 then return end
  src = src:reshape(shape)
  if in_place then ops.scatter_(x, index, src, d)
  else ops.copy_(v, ops.scatter(x, index, src, d):reshape(v:shape())) end
end

--- Performs t[key] = value in place. Raises an error if t or the value requires a gradient.
---@param t ps.Tensor
---@param key number|ps.Tensor|table
---@param value number|ps.Tensor
function M.set(t, key, value)
  local call = "t[key] = value"
  create.check_gradients(t, value, call, "index_put(key, value)")
  if is_tensor(key) and key.dtype_ == C.PS_BOOL and key.ndim > 0 then
    ops.copy_(t, masked(t, key, value))
    return
  end
  -- Writing whole rows of a matrix is faster this way. The result is the same.
  if is_index(key) and key.ndim == 1 and t.ndim == 2 and is_tensor(value) and value.ndim == 2 and
    value.dtype_ == t.dtype_ and value.shape_[0] == key.shape_[0] and value.shape_[1] == t.shape_[1] and
    t:is_contiguous() and value.device_ == t.device_ then
    create.alone(t, ops.scatter_(t, row_numbers(t, key), value, 0))
    return
  end
  local view, picks = of_list(t, list_of(key), true)
  if #picks > 0 then return put_all(view, picks, value, call) end
  if type(value) == "number" then view:fill_(value)
  elseif is_tensor(value) and create.broadcasts(value, view, true) then view:copy_(value)
  else view:copy_(spread(view, value, view:shape(), call)) end
end

--- Returns a copy of t in which a value replaces the elements that t[key] reads. Gradients reach both t and the value.
--- If index tensors select an element several times, the last value in row-major order is used.
---@param t ps.Tensor
---@param key number|ps.Tensor|table
---@param value number|ps.Tensor
---@param accumulate? boolean (default false); with true, all values are added to the elements
---@return ps.Tensor of t's shape
function M.put(t, key, value, accumulate)
  local call = "index_put"
  if accumulate ~= nil then caller.typed(accumulate, "boolean", "index_put: accumulate") end
  if is_tensor(value) and value.dtype_ ~= t.dtype_ then
    error(("index_put: the value is a tensor of %s, but t is one of %s; convert with :to"):format(value:dtype(),
      t:dtype()))
  end
  if not accumulate and is_tensor(key) and key.dtype_ == C.PS_BOOL and key.ndim > 0 then
    return masked(t, key, value)
  end
  local keys = list_of(key)
  local op = accumulate and ops.scatter_add or ops.scatter
  if t.ndim == 2 and #keys == 2 and is_tensor(value) and value.ndim == 1 and is_vector_of(keys[1], value) and
    is_vector_of(keys[2], value) and t:is_contiguous() then                      -- faster, with the same result
    local y = op(ops.reshape(t, 1, ALL), pair_numbers(t, keys[1], keys[2]), value, 0)
    return ops.reshape(y, 2, pair_size)
  end
  local view, picks = of_list(t, keys)
  if #picks > 0 and #picks == #keys then                   -- the key consists of index tensors for the first dimensions
    local p = named(view, picks)
    if p.together and p.first == 0 then
      local src = spread(t, value, p.shape, call):reshape(-1, p.inner)
      return op(t:reshape(p.rows, p.inner), p.index:reshape(-1), src, 0):reshape(t:shape())
    end
  end
  local numbers = M.get(create.arange(t:numel(), { device = t:device() }):reshape(t:shape()), key)
  local src = spread(t, value, numbers:shape(), call):reshape(-1)
  return op(t:reshape(-1), numbers:reshape(-1), src, 0):reshape(t:shape())
end

return M
