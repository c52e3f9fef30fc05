-- SPDX-License-Identifier: BSD-3-Clause
-- Reads and describes sharded parameters (ps.tensor.shard) in saved states. Files contain whole tensors without
-- padding, possibly divided into pieces. The exponential averages and the master of a parameter are sharded like the
-- parameter.
--
-- A source of values is an open file or a table of tensors. An open file has the methods has, shape, read_into and
-- read_part, which take names. A source has whole tensors, and a rank reads its pieces from them. Only a rank's own
-- state_dict has shards. These shards contain their padding.
local scope = require "ps.core.scope"
local handle = require "ps.nn.handle"
local rectangles = require "ps.core.rectangles"
local shard = require "ps.tensor.shard"

local sharded = {}

---@class ps.nn.Sharded a sharded parameter
---@field shape integer[] shape of the whole tensor
---@field index integer index of the rank that holds these pieces, along the axis tp
---@field pieces ps.nn.Shard.Piece[] this rank's rectangles of the whole tensor

--- Returns the sharded parameters of a model by name, or nil if no parameter is sharded. A tied parameter is listed
--- under its first name.
---@param model ps.nn.Module|ps.Engine
---@return table<string, ps.nn.Sharded>?
function sharded.of(model)
  local found
  for name, parameter in handle.module(model):named_parameters() do
    local desc = shard.of(parameter)
    if desc then
      found = found or {}
      found[name] = { shape = { unpack(desc.full_shape) }, index = desc.index, pieces = shard.pieces(desc) }
    end
  end
  return found
end

--- Returns the shape of a shard without its padding. Returns nil if the shard consists only of padding.
---@param at ps.nn.Sharded
---@return integer[]?
function sharded.own_shape(at)
  local shape = rectangles.zeros(at.shape)
  for _, piece in ipairs(at.pieces) do
    for d, size in ipairs(piece.shape) do shape[d] = math.max(shape[d], piece.at[d] + size) end
  end
  return at.pieces[1] and shape or nil
end

--- Returns a view of a shard without its padding. Returns nil if the shard consists only of padding.
---@param tensor ps.Tensor of the shard's shape
---@param at ps.nn.Sharded
---@return ps.Tensor?
function sharded.own(tensor, at)
  local shape = sharded.own_shape(at)
  return shape and rectangles.view(tensor, rectangles.zeros(shape), shape) or nil
end

--- Returns the shape of a whole parameter, which may be sharded.
---@param parameter ps.Tensor
---@return integer[]
function sharded.shape(parameter)
  local desc = shard.of(parameter)
  return desc and { unpack(desc.full_shape) } or parameter:shape()
end

--- Returns "whole" if a shape is the shape of the whole parameter, and "own" if it is the shape of this rank's shard.
--- Returns nil for any other shape.
---@param shape integer[]
---@param parameter ps.Tensor
---@return "whole"|"own"|nil
function sharded.fit(shape, parameter)
  local desc = shard.of(parameter)
  if rectangles.same(shape, desc and desc.full_shape or parameter:shape()) then return "whole" end
  return desc and rectangles.same(shape, shard.shape(desc)) and "own" or nil
end

--- Raises an error if a tensor of a state is another rank's shard of a parameter. Only the description of the shard can
--- show this, because the shards of all ranks have the same name, and usually the same shape.
---@param given? ps.nn.Shard description of the tensor's shard, if it is known
---@param parameter ps.Tensor
---@param name string
function sharded.check_rank(given, parameter, name)
  local desc = shard.of(parameter)
  if not (given and desc) or given.index == desc.index and given.count == desc.count and given.dim == desc.dim then
    return
  end
  error(("load_state_dict: '%s' of the state is the part of rank %d of %d along tp, but this is rank %d of %d: load "
    .. "this rank's own file, or whole tensors (ps.checkpoints, or model:save_parallelized(folder, "
    .. "{ merge_checkpoints = true }))"):format(name, given.index, given.count, desc.index, desc.count), 0)
end

-- Copies a rectangle of one tensor in memory into another tensor. The rectangle begins at `offset` and has the shape of
-- the other tensor.
local function copy_part(from, tensor, offset)
  scope.no_grad(scope.scope, function()
    tensor:copy_(rectangles.view(from:detach(), offset, tensor:shape()):to(tensor:device()))
  end)
end

--- Reads a parameter's shard from a tensor of a source. The padding of the shard is not changed.
---@param source table an open file, or tensors by name
---@param name string name of the tensor in the source
---@param tensor ps.Tensor the destination: the parameter, its master or an exponential average
---@param parameter ps.Tensor
function sharded.read(source, name, tensor, parameter)
  local is_file, desc = source.read_into ~= nil, shard.of(parameter)
  local from = not is_file and source[name] or nil
  if not desc or sharded.fit(is_file and source:shape(name) or from:shape(), parameter) == "own" then
    if is_file then return source:read_into(name, tensor) end
    return scope.no_grad(function() tensor:copy_(from:to(tensor:device())) end)
  end
  for _, piece in ipairs(shard.pieces(desc)) do
    local place = rectangles.view(tensor, piece.at, piece.shape)
    if is_file then source:read_part(name, place, piece.offset) else copy_part(from, place, piece.offset) end
  end
end

--- Reads a tensor from a source. The tensor is not sharded.
---@param source table an open file, or tensors by name
---@param name string
---@param tensor ps.Tensor the destination
function sharded.read_plain(source, name, tensor)
  if source.read_into ~= nil then return source:read_into(name, tensor) end
  return scope.no_grad(function() tensor:copy_(source[name]:to(tensor:device())) end)
end

return sharded
