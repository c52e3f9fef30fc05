-- SPDX-License-Identifier: BSD-3-Clause
-- Describes how the ranks of tensor parallelism store a parameter. A parameter is either whole on every rank, or cut
-- along one dimension into equal parts, one on each rank. Such a part is called a shard. Files, the engine and layers
-- use the description to find a rank's values in the whole tensor.
--
-- A dimension may consist of several equal blocks, such as the queries, keys and values in one weight of GPT-2. In that
-- case each block is cut, and a rank has its part of each block. If the number of ranks does not divide a dimension (of
-- a vocabulary, for example), the dimension may be padded at its end. The last shards contain the padding. Files never
-- contain padding.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local error = caller.error

local shard = {}

---@class ps.nn.Shard
---@field dim integer the dimension that is cut, counted from 0
---@field blocks integer number of blocks in this dimension; each block is cut
---@field index integer index of the rank that has this shard, counted from 0
---@field count integer number of ranks
---@field full_shape integer[] shape of the whole tensor, without padding
---@field padded? integer total number of elements of padding at the end of the dimension, over all ranks

---@class ps.nn.Shard.Piece a rectangle of the whole tensor
---@field offset integer[] coordinates of its first element in the whole tensor
---@field shape integer[]
---@field at integer[] coordinates of its first element in this rank's shard

local descriptions = setmetatable({}, { __mode = "k" })     -- description of each parameter's shard
local partial = setmetatable({}, { __mode = "k" })          -- parameters whose gradients are summed over ranks

local OPTIONS = { dim = "whole", blocks = "whole", index = "whole", count = "whole", full_shape = "table",
  padded = "whole" }

-- Returns the number of elements that each rank holds of each block in the cut dimension.
local function run_of(desc)
  return (desc.full_shape[desc.dim + 1] + (desc.padded or 0)) / desc.blocks / desc.count
end

--- Describes one rank's shard.
---@param given {dim: integer, blocks?: integer, index: integer, count: integer, full_shape: integer[], padded?:
---  integer} blocks (default 1); a padded dimension has one block
---@param name? string name of the parameter, for errors
---@return ps.nn.Shard
function shard.new(given, name)
  caller.options(given, "shard.new", OPTIONS)
  local desc = { dim = given.dim, blocks = given.blocks or 1, index = given.index, count = given.count,
    full_shape = { unpack(given.full_shape) }, padded = (given.padded or 0) > 0 and given.padded or nil }
  local size, who = desc.full_shape[desc.dim + 1], name or "a parameter"
  local text = table.concat(desc.full_shape, ", ")
  if not size then error(("%s [%s] has no dimension %d"):format(who, text, desc.dim), 0) end
  if desc.count < 1 or desc.index < 0 or desc.index >= desc.count then
    error(("%s: shard %d of %d; shards count from 0"):format(who, desc.index, desc.count), 0)
  end
  if desc.padded and desc.blocks > 1 then
    error(("%s: a dimension of %d blocks cannot be padded"):format(who, desc.blocks), 0)
  end
  if run_of(desc) % 1 ~= 0 then
    local cut = desc.blocks > 1 and ("%d blocks of %g"):format(desc.blocks, size / desc.blocks) or tostring(size)
    error(("%s [%s]: dimension %d, %s, cannot be cut into %d equal parts"):format(who, text, desc.dim, cut,
      desc.count), 0)
  end
  return desc
end

--- Returns the shape of a rank's shard. The shape includes padding.
---@param desc ps.nn.Shard
---@return integer[]
function shard.shape(desc)
  local shape = { unpack(desc.full_shape) }
  shape[desc.dim + 1] = run_of(desc) * desc.blocks
  return shape
end

--- Returns the rectangles of the whole tensor that a rank holds, in order. If a shard consists only of padding, the
--- list is empty.
---@param desc ps.nn.Shard
---@return ps.nn.Shard.Piece[]
function shard.pieces(desc)
  local d, run, list = desc.dim + 1, run_of(desc), {}
  local block = desc.full_shape[d] / desc.blocks
  for b = 0, desc.blocks - 1 do
    local first = desc.index * run
    local size = math.min(first + run, block) - first
    if size > 0 then
      local piece = { offset = {}, shape = { unpack(desc.full_shape) }, at = {} }
      for i = 1, #desc.full_shape do piece.offset[i], piece.at[i] = 0, 0 end
      piece.offset[d], piece.shape[d], piece.at[d] = b * block + first, size, b * run
      list[#list + 1] = piece
    end
  end
  return list
end

--- Returns a copy of a rank's shard of a whole tensor. The padding is 0.
---@param desc ps.nn.Shard
---@param whole ps.Tensor of desc.full_shape
---@return ps.Tensor
function shard.of_whole(desc, whole)
  local where = { dtype = whole:dtype(), device = whole:device() }
  local t, d = (desc.padded and create.zeros or create.empty)(shard.shape(desc), where), desc.dim
  scope.no_grad(function()
    for _, piece in ipairs(shard.pieces(desc)) do
      local size = piece.shape[d + 1]
      t:narrow(d, piece.at[d + 1], size):copy_(whole:narrow(d, piece.offset[d + 1], size))
    end
  end)
  return t
end

--- Joins the shards of all ranks into the whole tensor.
---@param desc ps.nn.Shard the description of any rank's shard
---@param shards ps.Tensor[] the shards, by rank + 1
---@return ps.Tensor
function shard.join(desc, shards)
  local whole, d = create.empty(desc.full_shape, { dtype = shards[1]:dtype(), device = shards[1]:device() }), desc.dim
  scope.no_grad(function()
    for rank, part in ipairs(shards) do
      local other = setmetatable({ index = rank - 1 }, { __index = desc })
      for _, piece in ipairs(shard.pieces(other)) do
        local size = piece.shape[d + 1]
        whole:narrow(d, piece.offset[d + 1], size):copy_(part:narrow(d, piece.at[d + 1], size))
      end
    end
  end)
  return whole
end

--- Marks a parameter as a shard.
---@param parameter ps.Tensor of shard.shape(desc)
---@param desc ps.nn.Shard
---@return ps.Tensor parameter
function shard.set(parameter, desc)
  local has, wants = table.concat(parameter:shape(), ", "), table.concat(shard.shape(desc), ", ")
  if has ~= wants then error(("a shard of [%s] is [%s], not [%s]"):format(table.concat(desc.full_shape, ", "), wants,
    has), 0) end
  descriptions[parameter] = desc
  return parameter
end

--- Returns the description of a parameter's shard, or nil if the parameter is whole.
---@param parameter ps.Tensor
---@return ps.nn.Shard?
function shard.of(parameter) return descriptions[parameter] end

--- Returns the number of elements of the whole tensor, without padding.
---@param parameter ps.Tensor
---@return integer
function shard.whole_numel(parameter)
  local desc = descriptions[parameter]
  if not desc then return parameter:numel() end
  local n = 1
  for _, size in ipairs(desc.full_shape) do n = n * size end
  return n
end

--- Marks a parameter that is whole on every rank, but that each rank applies to different inputs. The gradient of such
--- a parameter is the sum over all ranks.
---@param parameter ps.Tensor
---@return ps.Tensor parameter
function shard.set_partial(parameter)
  partial[parameter] = true
  return parameter
end

--- Returns whether a parameter's gradient must be summed over all ranks.
---@param parameter ps.Tensor
---@return boolean
function shard.is_partial(parameter) return partial[parameter] == true end

--- Moves the description and the mark of a parameter to the parameter that replaces it.
---@param from ps.Tensor
---@param to ps.Tensor
function shard.move(from, to) descriptions[to], partial[to] = descriptions[from], partial[from] end

return shard
