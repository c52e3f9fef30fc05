-- SPDX-License-Identifier: BSD-3-Clause
-- Numbers segments for dropout. A row of [B, T] can contain several sequences, which are called segments. While a part
-- of a model computes rows with segments, each segment is a separate sample. A sequence then has the same dropout masks
-- as in a batch that contains only this sequence (src/base/philox.h). Attention gets the same segments as its mask.
local create = require "ps.tensor.create"
local hooks = require "ps.core.hooks"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"

local segments = {}

local STRIDE = 0x9E3779B1              -- the constant of ps_segment_sample in src/base/philox.h

-- The segments of the rows that a part of a model is computing now. False if the rows have no segments.
local now = { segments = false }
function now:state() return { segments = self.segments } end
function now:restore(state) self.segments = state.segments end
scope.carry_state(now)                 -- so that a recomputed part draws the same masks
hooks.on("begins", function() now.segments = false end)                  -- a part may have failed in the previous step

--- Returns for each position the first position of its segment. A segment is a run of equal numbers.
---@param given ps.Tensor int [B, T]
---@return ps.Tensor fp32 [B, T]
function segments.begins(given)
  local B, T, device = given:size(0), given:size(1), given:device()
  local differs = given:narrow(1, 1, T - 1):ne(given:narrow(1, 0, T - 1)):float()
  local begins = tensors.cat({ create.ones({ B, 1 }, { device = device }), differs }, 1)
  local at = create.arange(0, T, 1, { device = device }):reshape(1, T)
  local run = begins:cumsum(1)
  -- A token that does not begin a run is added to column 0, which is never read.
  local starts = create.zeros({ B, T + 1 }, { device = device }):scatter_add(1, (run * begins):to "int64", at * begins)
  return starts:gather(1, run:to "int64")
end

-- Returns the index of each position for dropout, as int64 [B T]. There are T indices per sample.
local function numbers(given)
  local B, T, device = given:size(0), given:size(1), given:device()
  local function range(n) return create.arange(0, n, 1, { dtype = "fp64", device = device }) end
  local begin = segments.begins(given):to "fp64"
  local sample = range(B):reshape(B, 1) + begin * STRIDE
  sample = sample - (sample * 2 ^ -32):floor() * 2 ^ 32                     -- exact: all are below 2^53
  return (sample * T + range(T):reshape(1, T) - begin):to("int64"):reshape(B * T)
end

--- Returns the positions of x's rows in their segments, for the op `dropout`. Returns `part` unchanged in two cases: if
--- the rows that the model is computing have no segments, or if x does not have one row for each position.
---@param x ps.Tensor [B, T, C] or [B T, C], or a part of such a tensor
---@param part? {first?: integer, rows?: ps.Tensor, per_sample: integer} which rows of the whole tensor x contains
---@return {first?: integer, rows?: ps.Tensor, per_sample: integer}?
function segments.part(x, part)
  local given = now.segments
  if not given then return part end
  local B, T, n = given:size(0), given:size(1), x:numel()
  local whole = x:dim() == 3 and x:size(0) == B and x:size(1) == T or x:dim() == 2 and x:size(0) == B * T
  if n == 0 or not (part or whole) then return part end
  return scope.no_grad(function()
    local width = part and part.per_sample / T or n / (B * T)
    local rows = numbers(given)
    if part and part.rows ~= nil then rows = rows:gather(0, part.rows:to "int64")
    elseif part then rows = rows:narrow(0, (part.first or 0) / width, n / width) end
    return { rows = rows:contiguous(), per_sample = T * width }
  end)
end

local function leave(was, ...)
  now.segments = was
  return ...
end

--- Wraps the parts of a model (nn/parts.lua). Dropout in these parts then numbers the segments in the batch's mask.
---@param list ps.nn.Part[]
---@return ps.nn.Part[] list
function segments.parts(list)
  for _, part in ipairs(list) do
    local forward = part.forward
    part.forward = function(carry, batch)
      local mask, was = batch.mask, now.segments
      now.segments = mask ~= nil and mask:dim() == 2 and mask:dtype() == "int32" and mask or false
      return leave(was, forward(carry, batch))
    end
  end
  return list
end

return segments
