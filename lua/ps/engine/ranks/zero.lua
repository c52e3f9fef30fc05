-- SPDX-License-Identifier: BSD-3-Clause
-- Divides the chunks of layout/build.lua among ranks (ZeRO, src/zero/shard.h). layout/share.lua chooses the owner of
-- each chunk.
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local zero = {}

local part_out, tensor_out = ffi.new("int32_t[1]"), ffi.new("ps_tensor *[1]")

---@class ps.engine.Sharding the way in which ranks share chunks, for build.lua
---@field group ps.Group of the ranks that train the same parameters
---@field stage integer ZeRO stage, 0 to 3
---@field stays boolean true if gathered parameters that other ranks own are kept until the end of the step
---@field once boolean true if stages 2 and 3 reduce the gradients of several micro-batches only once per step
---@field rank integer
---@field size integer
---@field stripes integer number of stripes assigned so far
---@field staged number[] by rank from 1, the total size in bytes of the parameters that the rank has staged so far
local Sharding = {}
Sharding.__index = Sharding

--- Sets up the sharing of the engine's chunks.
---@param group ps.Group
---@param stage integer
---@param stays boolean true if gathered parameters are kept until the end of the step
---@param once boolean true if gradients that other ranks own are kept until the end of the step
---@return ps.engine.Sharding
function zero.new(group, stage, stays, once)
  local self = setmetatable({ group = group, stage = stage, stays = stage < 3 or stays, once = once,
    rank = group:rank(), size = group:size(), stripes = 0, staged = {} }, Sharding)
  for rank = 1, self.size do self.staged[rank] = 0 end
  native.check(C.ps_engine_shard(native.ctx, group.c, stage, once and 1 or 0))
  return self
end

--- These functions return true if ranks share the optimizer state, the gradients or the parameters. Only one rank owns
--- bytes that are shared.
function Sharding:state() return self.stage >= 1 end
function Sharding:gradients() return self.stage >= 2 end
function Sharding:parameters() return self.stage >= 3 end

--- Creates a part. A part represents the bytes of one chunk on all ranks. at.chunk is nil if another rank owns the
--- chunk.
---@param at {owner: integer, stripe: integer, dtype: string, nbytes: integer, chunk?: integer, device: integer, reads?:
---  boolean, keeps?: boolean}
---@return integer
function Sharding:part(at)
  local c = ffi.new("ps_part_config")
  c.owner, c.stripe, c.dtype, c.nbytes = at.owner, at.stripe, native.dtype_code(at.dtype), at.nbytes
  c.chunk, c.device = at.chunk or -1, at.device
  c.reads, c.keeps = at.reads and 1 or 0, at.keeps and 1 or 0
  native.check(C.ps_engine_part(native.ctx, c, part_out))
  return part_out[0]
end

--- Drops a part whose chunk will be freed. If the part still holds tensors, it is freed together with the last of these
--- tensors.
---@param part integer
function Sharding:drop(part)
  native.check(C.ps_engine_part_drop(native.ctx, part))
end

--- Moves a tensor into a part, at `offset` bytes from the beginning of the part. All ranks must call this function
--- together.
function Sharding:adopt(tensor, part, offset, name)
  native.retry(C.ps_engine_part_adopt, native.ctx, tensor, part, offset, name)
end

--- Creates a tensor in a part, at `offset` bytes from the beginning of the part. It has the shape of `like`.
---@return ps.Tensor
function Sharding:tensor(like, dtype, device, part, offset, name)
  native.retry(C.ps_engine_part_tensor, native.ctx, like, native.dtype_code(dtype), device, part, offset, name,
    tensor_out)
  return native.own(tensor_out[0])
end

--- Returns a tensor that accesses this rank's own bytes of `tensor` from a device. Returns nil if another rank owns the
--- bytes.
---@return ps.Tensor?
function Sharding:own(tensor, device)
  native.retry(C.ps_engine_own, native.ctx, tensor, device, tensor_out)
  if tensor_out[0] ~= nil then return native.own(tensor_out[0]) end
end

--- Reserves indices for `count` further stripes, and returns the first index.
---@return integer first
function Sharding:take_stripes(count)
  self.stripes = self.stripes + count
  return self.stripes - count
end

--- Returns the rank that will stage the next parameter. `nbytes` is the size of this parameter in bytes.
---@return integer
function Sharding:stage_owner(nbytes)
  local rank = 1
  for r = 2, self.size do if self.staged[r] < self.staged[rank] then rank = r end end
  self.staged[rank] = self.staged[rank] + nbytes
  return rank - 1
end

return zero
