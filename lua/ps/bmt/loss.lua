-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's losses.
local ps = require "ps"
local caller = require "ps.caller"
local core = require "ps.nn.module"
local error = caller.error

local loss = {}

---@class ps.bmt.FusedCrossEntropy: ps.nn.Module
local FusedCrossEntropy = core.class("FusedCrossEntropy")
loss.FusedCrossEntropy = FusedCrossEntropy

local OPTIONS = { weight = "tensor", ignore_index = "whole", reduction = "string", label_smoothing = "number",
  parallel = "boolean" }

--- The cross entropy of logits [N, C] against classes [N], in fp32 (F.cross_entropy). The mean of no targets is 0.
---@param options? {weight?: ps.Tensor, ignore_index?: integer, reduction?: "mean"|"sum"|"none",
---  label_smoothing?: number, parallel?: boolean} ignore_index default -100, reduction "mean"
function FusedCrossEntropy:init(options)
  options = caller.options(options, "bmt.loss.FusedCrossEntropy", OPTIONS)
  if options.parallel then
    error "bmt.loss.FusedCrossEntropy: parallel = true: ps.bmt has no vocabulary that is cut among processes"
  end
  self.how = { weight = options.weight, ignore_index = options.ignore_index, reduction = options.reduction,
    label_smoothing = options.label_smoothing }
end

--- The loss.
---@param input ps.Tensor [N, C]
---@param target ps.Tensor integers [N]
---@return ps.Tensor fp32 of 0 dimensions; [N] with reduction "none"
function FusedCrossEntropy:forward(input, target) return ps.F.cross_entropy(input, target, self.how) end

return loss
