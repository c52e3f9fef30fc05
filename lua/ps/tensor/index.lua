-- SPDX-License-Identifier: BSD-3-Clause
-- t[key] and t[key] = value: numbers, ranges, new axes, index tensors and masks, by PyTorch's rules. Numbers, ranges
-- and new axes give a view. Index tensors and masks then copy from that view. Several of them are broadcast together
-- and name one element each. If they are neighbours, the broadcast dimensions stand in their place, else in front.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C, ops, caller = native.C, native.ops, native.caller
local create = require "ps.tensor.create"
local error = caller.error
local is_tensor = scope.is_tensor

local M = {}

--- In a key: a new dimension of size 1. (ps.newaxis)
M.newaxis = setmetatable({}, { __tostring = function() return "ps.newaxis" end })

local INTEGER = { [C.PS_U8] = true, [C.PS_I32] = true, [C.PS_I64] = true }

local function mask_misfit(k, d, t)
  error(("a bool index of shape [%s] at dimension %d of a tensor of shape [%s]: they must be the same"):format(
    table.concat(k:shape(), ", "), d, table.concat(t:shape(), ", ")))
end

-- Adds the index tensors of dimensions from d on that `k` stands for; returns how many dimensions it takes.
local function add(picks, t, d, k, place)
  if k.dtype_ ~= C.PS_BOOL then
    if not INTEGER[k.dtype_] then
      error(("index %d is a tensor of %s; it takes integers or bool"):format(place, k:dtype()))
    end
    picks[#picks + 1] = { d = d, index = k }
    return 1
  end
  for i = 0, k.ndim - 1 do
    local size = d + i < t.ndim and t:size(d + i)
    if size ~= k:size(i) then mask_misfit(k, d, t) end
  end
  if k.ndim == 0 then
    error(("index %d is a bool tensor without dimensions, which cannot index; write if mask:item() then"):format(place))
  end
  local at = k:nonzero()
  for i = 0, k.ndim - 1 do picks[#picks + 1] = { d = d + i, index = at:select(1, i):contiguous() } end
  return k.ndim
end

-- The index tensors as one: its number n stands for element n of the picked dimensions in row-major order. Values are
-- looked at, since one that lies outside of its dimension would name another element.
local function joined(t, picks)
  local all
  for _, pick in ipairs(picks) do
    local size, index = t:size(pick.d), pick.index:to("int64")
    if index:numel() > 0 and C.ps_machine_pretended() == 0 then
      local low, high = index:amin():item(), index:amax():item()
      if low < 0 or high >= size then
        error(("index %.0f of dimension %d with size %d, in an index tensor"):format(low < 0 and low or high, pick.d,
          size))
      end
    end
    all = all and all * size + index or index
  end
  return all
end

-- Copies the elements that index tensors name. picks: {d =, index =}, by rising d.
local function pick_all(t, picks)
  if #picks == 1 then return t:index_select(picks[1].d, picks[1].index) end
  local axes, picked, rest, together = {}, {}, {}, true
  for i, pick in ipairs(picks) do
    axes[i], picked[pick.d] = pick.d, true
    together = together and pick.d == picks[1].d + i - 1
  end
  for d = 0, t.ndim - 1 do
    if not picked[d] then axes[#axes + 1], rest[#rest + 1] = d, t:size(d) end
  end
  local rows, width, index = 1, 1, joined(t, picks)
  for _, pick in ipairs(picks) do rows = rows * t:size(pick.d) end
  for _, n in ipairs(rest) do width = width * n end
  local shape = index:shape()
  for _, n in ipairs(rest) do shape[#shape + 1] = n end
  local y = ops.embedding(t:permute(axes):reshape(rows, width), index):reshape(shape)
  local before = picks[1].d
  if not together or before == 0 or index.ndim == 0 then return y end
  local order = {}
  for i = 0, before - 1 do order[#order + 1] = index.ndim + i end
  for i = 0, index.ndim - 1 do order[#order + 1] = i end
  for i = index.ndim + before, y.ndim - 1 do order[#order + 1] = i end
  return y:permute(order)
end

-- How many dimensions a key's elements take; more than the tensor has is an error.
local function check_count(t, key)
  local taken = 0
  for i = 1, #key do
    local k = key[i]
    if is_tensor(k) then taken = taken + (k.dtype_ == C.PS_BOOL and k.ndim or 1)
    elseif k ~= M.newaxis then taken = taken + 1 end
  end
  if taken > t.ndim then error(("%d indices for a tensor with %d dimensions"):format(taken, t.ndim)) end
end

local function of_list(t, key)
  local d, picks = 0, {}
  check_count(t, key)
  for i = 1, #key do
    local k = key[i]
    if type(k) == "number" then t = t:select(d, k)
    elseif is_tensor(k) then
      if k.ndim == 0 and INTEGER[k.dtype_] then t = t:index_select(d, k)
      else d = d + add(picks, t, d, k, i) end
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
  return #picks > 0 and pick_all(t, picks) or t
end

--- t[i], t[{i, {start, stop, step}, {}}], t[index tensor], t[{index tensor, index tensor}], t[bool tensor].
---@param t ps.Tensor
---@param key number|ps.Tensor|table
---@return ps.Tensor
function M.get(t, key)
  if type(key) == "number" then return t:select(0, key) end
  if is_tensor(key) then
    if key.dtype_ ~= C.PS_BOOL then return t:index_select(0, key) end
    if key.ndim == t.ndim then return t:masked_select(key) end
    return of_list(t, { key })
  end
  if type(key) ~= "table" then error("a tensor is indexed with a number, tensor or table, not a " .. type(key)) end
  if key == M.newaxis then return t:unsqueeze(0) end
  return of_list(t, key)
end

-- t[mask] = value: a number or a tensor of one element everywhere, else part n of `value` at true element n.
local function set_masked(t, mask, value)
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
      error(("t[mask] = value: the mask has %d true elements, the value has %d"):format(count, value:size(0)))
    end
    if count == 0 then return end
    local place = mask:long():reshape(-1):cumsum(0) - 1
    value = value:expand(shape):index_select(0, place:clamp(0)):reshape(t:shape())
  end
  ops.copy_(t, ops.where(whole, value, t))
end

--- t[key] = value; a key has numbers, ranges and new axes, or is one mask.
---@param t ps.Tensor
---@param key number|ps.Tensor|table
---@param value number|ps.Tensor
function M.set(t, key, value)
  if is_tensor(key) and key.dtype_ == C.PS_BOOL then return set_masked(t, key, value) end
  local through = is_tensor(key)                            -- those parts would be copies
  for i = 1, type(key) == "table" and #key or 0 do through = through or is_tensor(key[i]) end
  if through then error("assignment through an index tensor is not supported; use ps.where or scatter_add") end
  local part = M.get(t, key)
  if type(value) == "number" then part:fill_(value) else part:copy_(value) end
end

return M
