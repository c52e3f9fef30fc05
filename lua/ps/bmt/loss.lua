-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's losses.
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local mesh = require "ps.dist.mesh"
local layers = require "ps.parallel.tensor.layers"
local session = require "ps.bmt.session"
local error = caller.error

local loss = {}

---@class ps.bmt.FusedCrossEntropy: ps.nn.Module
local FusedCrossEntropy = nn_module.class("FusedCrossEntropy")
loss.FusedCrossEntropy = FusedCrossEntropy

local OPTIONS = { weight = "tensor", ignore_index = "whole", reduction = "string", label_smoothing = "number",
  parallel = "boolean" }

--- Creates a cross entropy loss for logits [N, C] and classes [N], computed in fp32 (F.cross_entropy). If there are no
--- targets, the mean is 0.
---@param options? {weight?: ps.Tensor, ignore_index?: integer, reduction?: "mean"|"sum"|"none", label_smoothing?:
--- number, parallel?: boolean} ignore_index: the class to ignore (default -100). reduction: default "mean". parallel:
--- whether each rank along tp has the logits of its own shard of the classes. The loss then covers all classes
--- (nn.ParallelCrossEntropy).
function FusedCrossEntropy:init(options)
  options = caller.options(options, "bmt.loss.FusedCrossEntropy", OPTIONS)
  if options.parallel then
    if options.weight ~= nil or (options.label_smoothing or 0) ~= 0 then
      error "bmt.loss.FusedCrossEntropy: parallel = true does not support weight and label_smoothing"
    end
    session.need "bmt.loss.FusedCrossEntropy with parallel = true"
  end
  local group = options.parallel and mesh.group "tp"
  if group then
    self.parallel = layers.ParallelCrossEntropy { group = group, ignore_index = options.ignore_index,
      reduction = options.reduction }
  end
  self.how = { weight = options.weight, ignore_index = options.ignore_index, reduction = options.reduction,
    label_smoothing = options.label_smoothing }
end

--- Returns the loss.
---@param input ps.Tensor [N, C], or [N, C / tp] with parallel
---@param target ps.Tensor integers [N]; with parallel, they must be equal on all ranks along tp
---@return ps.Tensor fp32 with 0 dimensions, or [N] with reduction "none"
function FusedCrossEntropy:forward(input, target)
  if self.parallel then return self.parallel(input, target) end
  return functional.cross_entropy(input, target, self.how)
end

return loss
