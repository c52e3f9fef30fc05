-- SPDX-License-Identifier: BSD-3-Clause
-- Removes the padding of batches. An encoder then computes only the needed rows of a batch [B, T], as a tensor [S, C].
-- Only attention uses the shape [B, T]. A row is needed in three cases:
--   its position is a key
--   it is the first row of its sequence, which a pooler reads
--   it has a label
-- Rows that are not needed are never read. The results are therefore the same as for the padded batch, except for the
-- rounding in matrix products, which have fewer rows. The masks of dropout are the same. A few rows that are not needed
-- are also computed, because this reduces the number of different matrix sizes.
local devices = require "ps.core.devices"
local create = require "ps.tensor.create"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local functional = require "ps.tensor.functional"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"
local IGNORED = require("ps.data.batch").IGNORED
local F = functional
local META = native.device_index "meta"

local unpad = {}

-- Returns the number of rows to compute for n needed rows. Rounding up reduces the number of different matrix sizes. A
-- kernel is generated for each size, which takes as long as a layer or two. Tiles have 16 rows, so rounding up to a
-- multiple of 16 is free. Rounding up to larger multiples adds at most 1/32 of the rows.
local function filled(n)
  local step = 16
  while n > 64 * step do step = 2 * step end
  return math.ceil(n / step) * step
end

-- Returns the indices of the needed rows in ascending order, followed by the indices of some other rows, as int64 [S].
-- In a dry run and on device meta, tensors have no values. The result then has its largest size, which is all rows.
local function numbers(kept)
  local all = { kept:numel() }
  if kept.device_ == META then return create.empty(all, { dtype = "int64", device = "meta" }) end
  local found = devices.known(function()
    local on_host = kept:to "cpu"
    local rows = on_host:nonzero():reshape(-1)
    local more = math.min(filled(rows:size(0)), all[1]) - rows:size(0)
    if more > 0 then
      rows = tensors.cat({ rows, on_host:logical_not():nonzero():reshape(-1):narrow(0, 0, more) }, 0)
    end
    return rows:to(kept:device())
  end)
  return found or create.empty(all, { dtype = "int64", device = kept:device() })
end

--- Determines which rows are needed. If the mask is on a device, the host waits for it.
---@param mask ps.Tensor bool [B, T], true for visible keys
---@param labels? ps.Tensor int [B, T]; -100 means no label
---@return ps.Tensor rows int64 [S]: the indices of the needed rows among B * T rows, in ascending order, followed by
--- the indices of a few other rows
---@return ps.Tensor places int64 [B * T]: each row's index among the needed rows, or S if it is not needed
function unpad.plan(mask, labels)
  return scope.no_grad(function()
    local B, T = mask:size(0), mask:size(1)
    local kept = create.arange(0, T, 1, { dtype = "int64", device = mask:device() }):eq(0):reshape(1,
      T):logical_or(mask)
    if labels ~= nil then kept = kept:logical_or(labels:ne(IGNORED)) end
    kept = kept:reshape(B * T)
    local rows, counts = numbers(kept), kept:to("int64")
    local S = rows:size(0)
    return rows, (counts:cumsum(0) - (S + 1)) * counts + S
  end)
end

--- Returns the labels of the needed rows. The weights of micro-batches are computed from the script's own labels
--- instead of the returned labels. The script's labels are on the host, so the host does not wait for a device.
---@param t ps.Tensor int [B, T]
---@param rows ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor int [S]
function unpad.labels(t, rows, shape)
  local packed = unpad.ids(t, rows, shape)
  loss_weight.stands_for(packed, t)
  return packed
end

--- Returns the needed rows of a tensor [B, T]. The tensor may be [1, T] if it is the same for all sequences.
---@param t ps.Tensor int
---@param rows ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor [S]
function unpad.ids(t, rows, shape) return t:expand(shape[1], shape[2]):reshape(-1):gather(0, rows) end

--- Returns the needed rows of activations.
---@param x ps.Tensor [B, T, C]
---@param rows ps.Tensor
---@return ps.Tensor [S, C]
function unpad.pack(x, rows) return F.embedding(rows, x:reshape(-1, x:size(-1))) end

--- Returns all rows of the batch. Rows that are not needed are zero.
---@param x ps.Tensor [S, C]
---@param places ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor [B, T, C]
function unpad.unpack(x, places, shape)
  return native.ops.embedding(x, places, -1, 0, x:size(0) + 1):reshape(shape[1], shape[2], x:size(1))
end

--- Returns the first row of each sequence.
---@param x ps.Tensor [S, C]
---@param places ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor [B, 1, C]
function unpad.first(x, places, shape)
  return F.embedding(places:reshape(shape[1], shape[2]):narrow(1, 0, 1):contiguous(), x)
end

--- Describes which rows of the padded tensor x contains, in the form that F.dropout expects.
---@param x ps.Tensor [S, C]
---@param rows ps.Tensor
---@param shape integer[] {B, T}
---@return {rows: ps.Tensor, per_sample: integer}
function unpad.part(x, rows, shape) return { rows = rows, per_sample = shape[2] * x:size(1) } end

return unpad
