-- SPDX-License-Identifier: BSD-3-Clause
-- Batches without their padding: an encoder computes the rows of [B, T] that count, one after the other, [S, C], and
-- only attention sees [B, T]. A row counts where its position is a key, where it is the first of its sequence (a pooler
-- reads it), and where it has a label. Nothing reads the others, so the numbers are those of the padded batch up to the
-- rounding of products with fewer rows, and masks of dropout are the same.
local ps = require "ps"
local IGNORED = require("ps.batch").IGNORED
local F = ps.functional
local META = ps.device_index "meta"

local unpad = {}

-- Numbers of rows that count, int64 [S], rising. A dry run and device meta know no values: all rows count there, which
-- is the most there can be.
local function numbers(kept)
  local all = { kept:numel() }
  if kept.device_ == META then return ps.empty(all, { dtype = "int64", device = "meta" }) end
  local ok, found = pcall(function() return kept:to("cpu"):nonzero():reshape(-1):to(kept:device()) end)
  if ok then return found end
  if type(found) ~= "table" or found.name ~= "EDRY" then error(found, 0) end
  return ps.empty(all, { dtype = "int64", device = kept:device() })
end

--- Which rows count. The host waits for a mask that lies on a device.
---@param mask ps.Tensor bool [B, T], the keys
---@param labels? ps.Tensor int [B, T], -100 where there is none
---@return ps.Tensor rows int64 [S], rising: their numbers among the B * T
---@return ps.Tensor places int64 [B * T]: the place of each row among the S, or S where it does not count
function unpad.plan(mask, labels)
  return ps.no_grad(function()
    local B, T = mask:size(0), mask:size(1)
    local kept = ps.arange(0, T, 1, { dtype = "int64", device = mask:device() }):eq(0):reshape(1, T):logical_or(mask)
    if labels ~= nil then kept = kept:logical_or(labels:ne(IGNORED)) end
    kept = kept:reshape(B * T)
    local rows, counts = numbers(kept), kept:to("int64")
    local S = rows:size(0)
    return rows, (counts:cumsum(0) - (S + 1)) * counts + S
  end)
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
  return ps.ops.embedding(x, places, -1, 0, x:size(0) + 1):reshape(shape[1], shape[2], x:size(1))
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
