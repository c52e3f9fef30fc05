-- SPDX-License-Identifier: BSD-3-Clause
-- Batches without their padding: an encoder computes the rows of [B, T] that count, one after the other, [S, C], and
-- only attention sees [B, T]. A row counts where its position is a key, where it is the first of its sequence (a pooler
-- reads it), and where it has a label. Nothing reads the others, so the numbers are those of the padded batch up to the
-- rounding of products with fewer rows, and masks of dropout are the same. A few rows that do not count are computed,
-- too, so that products have few sizes; nothing reads them, either.
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

-- To how many rows n of them are filled up, for fewer sizes of products: kernels are made for each size, which takes
-- as long as a layer or two. Tiles of products have 16 rows, so filling up to that costs nothing, and further at most
-- 1/32.
local function filled(n)
  local step = 16
  while n > 64 * step do step = 2 * step end
  return math.ceil(n / step) * step
end

-- Numbers of rows that count, rising, and then of some that do not, int64 [S]. A dry run and device meta know no
-- values: all rows count there, which is the most there can be.
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

--- Which rows count. The host waits for a mask that lies on a device.
---@param mask ps.Tensor bool [B, T], the keys
---@param labels? ps.Tensor int [B, T], -100 where there is none
---@return ps.Tensor rows int64 [S]: their numbers among the B * T, rising, and then those of a few that do not count
---@return ps.Tensor places int64 [B * T]: the place of each row among the S, or S where it does not count
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

--- The labels of the rows that count. Micro-batches are weighed by the labels that the script passed, on the host,
--- which thus does not wait for a device.
---@param t ps.Tensor int [B, T]
---@param rows ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor int [S]
function unpad.labels(t, rows, shape)
  local packed = unpad.ids(t, rows, shape)
  loss_weight.stands_for(packed, t)
  return packed
end

--- The rows that count of numbers [B, T]; [1, T] where all sequences have the same.
---@param t ps.Tensor int
---@param rows ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor [S]
function unpad.ids(t, rows, shape) return t:expand(shape[1], shape[2]):reshape(-1):gather(0, rows) end

--- The rows that count.
---@param x ps.Tensor [B, T, C]
---@param rows ps.Tensor
---@return ps.Tensor [S, C]
function unpad.pack(x, rows) return F.embedding(rows, x:reshape(-1, x:size(-1))) end

--- All rows: zeros where they do not count.
---@param x ps.Tensor [S, C]
---@param places ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor [B, T, C]
function unpad.unpack(x, places, shape)
  return native.ops.embedding(x, places, -1, 0, x:size(0) + 1):reshape(shape[1], shape[2], x:size(1))
end

--- The first row of each sequence.
---@param x ps.Tensor [S, C]
---@param places ps.Tensor
---@param shape integer[] {B, T}
---@return ps.Tensor [B, 1, C]
function unpad.first(x, places, shape)
  return F.embedding(places:reshape(shape[1], shape[2]):narrow(1, 0, 1):contiguous(), x)
end

--- Which part x is of the padded tensor, for dropout.
---@param x ps.Tensor [S, C]
---@param rows ps.Tensor
---@param shape integer[] {B, T}
---@return {rows: ps.Tensor, per_sample: integer}
function unpad.part(x, rows, shape) return { rows = rows, per_sample = shape[2] * x:size(1) } end

return unpad
