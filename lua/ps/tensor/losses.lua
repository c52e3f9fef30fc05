-- SPDX-License-Identifier: BSD-3-Clause
-- Losses that call other ops, with PyTorch's names and formulas. They are functions of ps.functional, such as
-- F.mse_loss. Input and target must have the same shape. They are not broadcast, because a loss of [N] against [N, 1]
-- is nearly always a mistake.
local autocast = require "ps.core.autocast"
local native = require "ps.core.ffi"
local tensor = require "ps.tensor"
local loss_weight = require "ps.core.loss_weight"
local scope = require "ps.core.scope"
local C, ops, caller = native.C, native.ops, native.caller
local error = caller.error

local losses = {}

local REDUCTIONS = { none = true, mean = true, sum = true }
local REDUCE = { reduction = "string" }

local function reduced(x, reduction, call)
  reduction = reduction or "mean"
  caller.one_of(reduction, REDUCTIONS, call .. ": reduction")
  if reduction == "none" then return x end
  return reduction == "sum" and x:sum() or x:mean()
end

local function pair(x, target, call)
  caller.tensor(x, call, "the first argument")
  caller.tensor(target, call, "the target")
  if x == nil or target == nil then error(call .. " takes two tensors") end
  if not tensor.same_shape(x, target) then
    error(("%s: shapes differ, [%s] and [%s]"):format(call, table.concat(x:shape(), ", "),
      table.concat(target:shape(), ", ")))
  end
  if not x:is_float() then error(("%s takes floats, not %s"):format(call, x:dtype())) end
  if x.device_ ~= target.device_ then
    error(("%s: the tensors are on different devices, %s and %s; move one with :to(device)"):format(call, x:device(),
      target:device()))
  end
  return target
end

--- Returns the mean of the squared differences of x and target.
---@param x ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none"} default "mean"
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.mse_loss(x, target, options)
  options = caller.options(options, "F.mse_loss", REDUCE)
  x, target = autocast.full(x, target)
  local d = x - pair(x, target, "F.mse_loss")
  return reduced(d * d, options.reduction, "F.mse_loss")
end

--- Returns the mean of the absolute differences of x and target.
---@param x ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none"} default "mean"
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.l1_loss(x, target, options)
  options = caller.options(options, "F.l1_loss", REDUCE)
  x, target = autocast.full(x, target)
  return reduced((x - pair(x, target, "F.l1_loss")):abs(), options.reduction, "F.l1_loss")
end

local SMOOTH = { reduction = "string", beta = "number" }

--- Returns the mean of the absolute differences d of x and target, replaced by squares near 0. A term is 0.5 * d^2 /
--- beta where |d| is below beta, and |d| - 0.5 * beta elsewhere. With beta = 0 the loss equals F.l1_loss.
---@param x ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none", beta?: number} reduction (default "mean"); beta (default 1)
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.smooth_l1_loss(x, target, options)
  options = caller.options(options, "F.smooth_l1_loss", SMOOTH)
  local beta = options.beta or 1
  if beta < 0 or beta ~= beta then error(("F.smooth_l1_loss: beta is %g; it must be 0 or more"):format(beta)) end
  x, target = autocast.full(x, target)
  local d = x - pair(x, target, "F.smooth_l1_loss")
  return reduced(beta == 0 and d:abs() or ops.huber(d, beta), options.reduction, "F.smooth_l1_loss")
end

local HUBER = { reduction = "string", delta = "number" }

--- Returns Huber's loss of the differences d of x and target. A term is 0.5 * d^2 where |d| is below delta, and delta *
--- (|d| - 0.5 * delta) elsewhere.
---@param x ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none", delta?: number} reduction (default "mean"); delta (default 1)
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.huber_loss(x, target, options)
  options = caller.options(options, "F.huber_loss", HUBER)
  local delta = options.delta or 1
  if delta <= 0 or delta ~= delta then error(("F.huber_loss: delta is %g; it must be above 0"):format(delta)) end
  x, target = autocast.full(x, target)
  local d = x - pair(x, target, "F.huber_loss")
  d = ops.huber(d, delta)
  return reduced(delta == 1 and d or d * delta, options.reduction, "F.huber_loss")
end

-- Returns the binary cross entropy of each element. With `slopes`, also returns the derivatives of the cross entropy
-- with respect to p and with respect to target.
local function entropy(p, target, slopes)
  local q = ops.affine(p, -1, 1)
  local yes, no = ops.clamp(ops.log(p), -100, math.huge), ops.clamp(ops.log(q), -100, math.huge)
  local value = -(target * yes + (1 - target) * no)
  if not slopes then return value end
  return value, (p - target) / ops.clamp(p * q, 1e-12, math.huge), no - yes
end

--- Returns the binary cross entropy of probabilities p in [0, 1] against targets in [0, 1]. As in PyTorch, logarithms
--- are at least -100, and the gradient's denominator p * (1 - p) is at least 1e-12. Values outside [0, 1] result in a
--- NaN loss.
---@param p ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none"} default "mean"
---@return ps.Tensor of 0 dimensions, or of p's shape with reduction "none"
function losses.binary_cross_entropy(p, target, options)
  options = caller.options(options, "F.binary_cross_entropy", REDUCE)
  pair(p, target, "F.binary_cross_entropy")
  if autocast.dtype() then
    error("F.binary_cross_entropy in ps.autocast: a probability in a half type is too coarse near 1; write "
      .. "F.binary_cross_entropy_with_logits(x, target) of the logits")
  end
  if not scope.grad_enabled() or not (p:needs_grad() or target:needs_grad()) then
    return reduced(entropy(p, target), options.reduction, "F.binary_cross_entropy")
  end
  local value, slope, slope_of_target = scope.no_grad(entropy, p, target, true)
  local loss = value + (p - p:detach()) * slope            -- PyTorch's gradient, with the value of the loss
  if target:is_float() and target:needs_grad() then loss = loss + (target - target:detach()) * slope_of_target end
  return reduced(loss, options.reduction, "F.binary_cross_entropy")
end

local WEIGHT_NAMES = { "pos_weight", "the logits" }
local WITH_LOGITS = { reduction = "string", pos_weight = "tensor" }

--- Returns the binary cross entropy of logits x against targets in [0, 1]. pos_weight is the weight of targets that are
--- 1. pos_weight is broadcast to x's shape.
---@param x ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none", pos_weight?: ps.Tensor} reduction default "mean"
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.binary_cross_entropy_with_logits(x, target, options)
  local call = "F.binary_cross_entropy_with_logits"
  options = caller.options(options, "F.binary_cross_entropy_with_logits", WITH_LOGITS)
  x, target = autocast.full(x, target)
  pair(x, target, call)
  if options.pos_weight == nil then return reduced(ops.logit_entropy(x, target), options.reduction, call) end
  tensor.check_broadcast(options.pos_weight, x, call, WEIGHT_NAMES, true)
  local weight = (options.pos_weight - 1) * target + 1
  return reduced((1 - target) * x - ops.logsigmoid(x) * weight, options.reduction, call)
end

local KL_REDUCTIONS = { none = true, mean = true, sum = true, batchmean = true }
local KL = { reduction = "string", log_target = "boolean" }

--- Returns the Kullback-Leibler divergence target * (log(target) - x). x contains logarithms of probabilities. target
--- contains probabilities, or with log_target their logarithms. "batchmean" divides the sum by the size of the first
--- dimension, as in the definition of the divergence. "mean" divides the sum by the number of elements. The default is
--- "mean", as in PyTorch.
---@param x ps.Tensor floats of any shape
---@param target ps.Tensor of the same shape
---@param options? {reduction?: "mean"|"sum"|"none"|"batchmean", log_target?: boolean} reduction default "mean"
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.kl_div(x, target, options)
  options = caller.options(options, "F.kl_div", KL)
  x, target = autocast.full(x, target)
  pair(x, target, "F.kl_div")
  local reduction = options.reduction or "mean"
  caller.one_of(reduction, KL_REDUCTIONS, "F.kl_div: reduction")
  local terms
  if options.log_target then terms = target:exp() * (target - x)
  else
    local some = target:gt(0)                              -- 0 * log(0) counts as 0
    local safe = tensor.where(some, target, 1)
    terms = tensor.where(some, target * safe:log(), 0) - target * x
  end
  if reduction == "batchmean" then return terms:sum() / math.max(1, x:dim() > 0 and x:size(0) or 1) end
  return reduced(terms, reduction, "F.kl_div")
end

-- -- of distances ---------------------------------------------------------------------------------------------------
--- Returns the p-norms of the differences of two sets of vectors. Vectors are along the last dimension.
---@param a ps.Tensor floats [..., D]
---@param b ps.Tensor of a shape that broadcasts with a's
---@param p? number (default 2)
---@param eps? number added to each difference (default 1e-6)
---@param keepdim? boolean whether to keep the last dimension with size 1 (default false)
---@return ps.Tensor [...]
function losses.pairwise_distance(a, b, p, eps, keepdim)
  if caller.tensor(a, "F.pairwise_distance", "a") == nil or caller.tensor(b, "F.pairwise_distance", "b") == nil then
    error "F.pairwise_distance takes two tensors"
  end
  tensor.check_broadcast(a, b, "F.pairwise_distance", { "a", "b" })
  return (a - b + (eps or 1e-6)):norm(p or 2, -1, keepdim)
end

local TRIPLET = { margin = "number", p = "number", eps = "number", swap = "boolean", reduction = "string" }

--- Returns max(0, margin + d(anchor, positive) - d(anchor, negative)), where d is the distance between two vectors.
--- Vectors are along the last dimension.
---@param anchor ps.Tensor floats [..., D]
---@param positive ps.Tensor of the same shape
---@param negative ps.Tensor of the same shape
---@param options? {margin?: number, p?: number, eps?: number, swap?: boolean, reduction?: "mean"|"sum"|"none"} margin
--- (default 1); p (default 2); eps (default 1e-6); swap: whether d(positive, negative) replaces d(anchor, negative)
--- where d(positive, negative) is smaller
---@return ps.Tensor of 0 dimensions, or [...] with reduction "none"
function losses.triplet_margin_loss(anchor, positive, negative, options)
  local call = "F.triplet_margin_loss"
  options = caller.options(options, "F.triplet_margin_loss", TRIPLET)
  anchor, positive, negative = autocast.full(anchor, positive, negative)
  pair(anchor, positive, call)
  pair(anchor, negative, call)
  local distance, p, eps = losses.pairwise_distance, options.p, options.eps
  local near, far = distance(anchor, positive, p, eps), distance(anchor, negative, p, eps)
  if options.swap then far = ops.minimum(far, distance(positive, negative, p, eps)) end
  return reduced(ops.relu(near - far + (options.margin or 1)), options.reduction, call)
end

local MARGIN = { margin = "number", reduction = "string" }

local SIGN_NAMES = { "the target", "the inputs" }

-- Checks and returns a target of signs. If `like` is not nil, the target must broadcast to the shape of `like`.
local function signs(y, call, like)
  if caller.tensor(y, call, "the target") == nil then error(call .. ": the target is missing") end
  if like ~= nil then tensor.check_broadcast(y, like, call, SIGN_NAMES, true) end
  return y
end

--- Returns max(0, margin - y * (a - b)). y is 1 where a should be larger than b, and -1 where a should be smaller.
---@param a ps.Tensor floats
---@param b ps.Tensor of the same shape
---@param y ps.Tensor of 1 and -1, with a's number of dimensions, of a shape that broadcasts to a's shape
---@param options? {margin?: number, reduction?: "mean"|"sum"|"none"} margin (default 0)
---@return ps.Tensor of 0 dimensions, or of a's shape with reduction "none"
function losses.margin_ranking_loss(a, b, y, options)
  local call = "F.margin_ranking_loss"
  options = caller.options(options, "F.margin_ranking_loss", MARGIN)
  a, b = autocast.full(a, b)
  pair(a, b, call)
  if caller.tensor(y, call, "the target") ~= nil and y.ndim ~= a.ndim then
    error(("%s: the target has shape [%s], but the inputs have %s"):format(call, table.concat(y:shape(), ", "),
      caller.counted(a.ndim, "dimension")))
  end
  return reduced(ops.relu(-signs(y, call, a) * (a - b) + (options.margin or 0)), options.reduction, call)
end

local function squares(x) return (x * x):sum(-1) + 1e-12 end

--- Returns 1 - cos(a, b) where y is 1, and max(0, cos(a, b) - margin) where y is -1. Vectors are along the last
--- dimension.
---@param a ps.Tensor floats [N, D] or [D]
---@param b ps.Tensor of the same shape
---@param y ps.Tensor of 1 and -1, [N], or of 0 dimensions
---@param options? {margin?: number, reduction?: "mean"|"sum"|"none"} margin (default 0)
---@return ps.Tensor of 0 dimensions, or [N] with reduction "none"
function losses.cosine_embedding_loss(a, b, y, options)
  local call = "F.cosine_embedding_loss"
  options = caller.options(options, "F.cosine_embedding_loss", MARGIN)
  a, b = autocast.full(a, b)
  pair(a, b, call)
  signs(y, call)
  if a:dim() < 1 or a:dim() > 2 or y:dim() ~= a:dim() - 1 or y:dim() == 1 and y:size(0) ~= a:size(0) then
    error(("%s takes vectors [N, D] with a target [N], or [D] with one number, not [%s] with [%s]"):format(call,
      table.concat(a:shape(), ", "), table.concat(y:shape(), ", ")))
  end
  local cos = (a * b):sum(-1) / (squares(a) * squares(b)):sqrt()
  local like = tensor.where(y:eq(1), 1 - cos, 0)
  return reduced(like + tensor.where(y:eq(-1), ops.relu(cos - (options.margin or 0)), 0), options.reduction, call)
end

--- Returns x where y is 1, and max(0, margin - x) where y is -1.
---@param x ps.Tensor floats, such as distances
---@param y ps.Tensor of 1 and -1, of the same shape
---@param options? {margin?: number, reduction?: "mean"|"sum"|"none"} margin (default 1)
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.hinge_embedding_loss(x, y, options)
  local call = "F.hinge_embedding_loss"
  options = caller.options(options, "F.hinge_embedding_loss", MARGIN)
  x = autocast.full(x)
  pair(x, y, call)
  local far = ops.relu((options.margin or 1) - x)
  return reduced(tensor.where(y:eq(1), x, 0) + tensor.where(y:eq(-1), far, 0), options.reduction, call)
end

-- Returns the variances of F.gaussian_nll_loss in a shape that broadcasts to x's shape. The accepted shapes are
-- PyTorch's.
local function variances(var, x, call)
  if tensor.same_shape(var, x) then return var end
  local lacks, ones = var.ndim == x.ndim - 1, 0
  for i = 0, x.ndim - 1 do
    if lacks and i < var.ndim and var.shape_[i] ~= x.shape_[i] then lacks = false end
    if var.ndim == x.ndim and var.shape_[i] ~= x.shape_[i] then ones = ones + (var.shape_[i] == 1 and 1 or 2) end
  end
  if lacks then return var:unsqueeze(-1) end
  if ones == 1 then return var end
  error(("%s: the variance has shape [%s]; it must be [%s], or this without the last dimension, or with one dimension "
    .. "of size 1"):format(call, table.concat(var:shape(), ", "), table.concat(x:shape(), ", ")))
end

local GAUSS = { full = "boolean", eps = "number", reduction = "string" }

--- Returns 0.5 * (log(var) + (x - target)^2 / var). This is the negative log-likelihood of normal distributions, up to
--- a constant.
---@param x ps.Tensor floats, the means
---@param target ps.Tensor of the same shape
---@param var ps.Tensor variances of x's shape; the last dimension may be missing, or one dimension may have size 1;
--- variances below eps are replaced by eps
---@param options? {full?: boolean, eps?: number, reduction?: "mean"|"sum"|"none"} full: whether the constant 0.5 *
--- log(2 * pi) is added; eps (default 1e-6)
---@return ps.Tensor of 0 dimensions, or of x's shape with reduction "none"
function losses.gaussian_nll_loss(x, target, var, options)
  local call = "F.gaussian_nll_loss"
  options = caller.options(options, "F.gaussian_nll_loss", GAUSS)
  pair(x, target, call)
  if caller.tensor(var, call, "the variance") == nil then error(call .. ": the variance is missing") end
  var = variances(var, x, call)
  if var:lt(0):any():item() then error(("%s: a variance is negative (%g)"):format(call, var:amin():item())) end
  local eps = options.eps or 1e-6
  -- The values are limited, but the gradient passes through, as in PyTorch.
  var = var + scope.no_grad(function() return var:clamp(eps) - var end)
  local loss = 0.5 * (var:log() + (x - target):square() / var)
  if options.full then loss = loss + 0.5 * math.log(2 * math.pi) end
  return reduced(loss, options.reduction, call)
end

-- -- of classes -----------------------------------------------------------------------------------------------------
-- Returns a mask bool [...] of the targets that count. Also returns the targets as int64 [..., 1], in which ignored
-- targets are replaced by 0.
local function countable(target, ignore)
  local counts = target:ne(ignore)
  return counts, tensor.where(counts, target, 0):to("int64"):unsqueeze(-1)
end

local function shown(shape) return "[" .. table.concat(shape, ", ") .. "]" end

local function without(shape, i)
  local left = { unpack(shape) }
  table.remove(left, i)
  return left
end

local function has_rows_of(target, x)
  if target.ndim ~= x.ndim - 1 then return false end
  for i = 0, target.ndim - 1 do if target.shape_[i] ~= x.shape_[i] then return false end end
  return true
end

--- Checks the targets of a loss of classes. There must be one integer target for each row of x.
---@param x ps.Tensor [..., V]
---@param target ps.Tensor
---@param call string name of the loss in errors
---@param soft? boolean whether the targets may also be class probabilities, which are floats of x's shape
---@return boolean soft whether the targets are class probabilities
function losses.check_targets(x, target, call, soft)
  if caller.tensor(x, call, "the input") == nil then error(call .. ": the input is missing") end
  if caller.tensor(target, call, "the target") == nil then error(call .. ": the target is missing") end
  local indices = target.dtype_ == C.PS_I64 or target.dtype_ == C.PS_I32
  if indices and has_rows_of(target, x) or soft and target:is_float() and tensor.same_shape(x, target) then
    return not indices
  end
  local have, of, floats = x:shape(), target:shape(), target:is_float()
  local hint = #have > 2 and (floats and soft or shown(of) == shown(without(have, 2)))
    and "; classes come last here, not second: write x:movedim(1, -1) for an input of PyTorch's shape [N, C, ...]" or ""
  if floats and soft then
    error(("%s: float targets are class probabilities, which must have the input's shape %s, not %s; targets that are "
      .. "class indices must be int32 or int64: write target:to(\"int64\")%s"):format(call, shown(have), shown(of),
      hint))
  elseif not indices then
    error(("%s: targets must be int32 or int64, not %s; write target:to(\"int64\")%s"):format(call, target:dtype(),
      floats and #of == #have and ", or F.cross_entropy for class probabilities" or ""))
  end
  error(("%s: targets must have the shape of x without its last dimension, %s, one target per row, not %s%s"):format(
    call, shown(without(have, #have)), shown(of), hint))
end

-- Returns the elements of x at targets. If the op fails, the error names the loss instead of the op.
local function picked(x, at, d, call)
  local ok, y = pcall(ops.gather, x, at, d)
  if ok then return y end
  error((tostring(y):gsub("^gather: index", call .. ": target")), 0)
end

-- Computes the loss term of each target from log-probabilities [..., V]. Also returns each target's share of the
-- divisor of the mean. `smooth` is the label smoothing.
local function class_terms(logp, target, weight, ignore, smooth, call)
  local V = logp:size(-1)
  local counts, at = countable(target, ignore)
  -- For each target, `share` [...] is the weight of its class. It is 0 if the target is ignored.
  local share = counts:to(logp:dtype())
  if weight ~= nil then
    share = share * picked(weight:to(logp:dtype()), at:reshape(-1), 0, call):reshape(target:shape())
  end
  local terms = -picked(logp, at, -1, call):squeeze(-1) * share
  if smooth > 0 then
    local all = weight ~= nil and (logp * weight:to(logp:dtype())):sum(-1) or logp:sum(-1)
    all = tensor.where(counts, all, 0)
    terms = terms * (1 - smooth) - all * (smooth / V)
  end
  return terms, share:detach()
end

-- Returns the number of hits and the number of targets, as int64 [2]. A hit is a target whose class has the largest of
-- the scores [..., V]. If several scores are equal, only the first counts as the largest. Ignored targets do not count.
-- A target whose class has the weight 0 also does not count, unless labels are smoothed.
local function count_hits(scores, target, weight, ignore, smooth)
  local counts, at = countable(target, ignore)
  counts, at = counts:reshape(-1), at:reshape(-1)
  if weight ~= nil and smooth == 0 then counts = counts:logical_and(ops.gather(weight, at, 0):ne(0)) end
  local first = ops.argmax(scores, scores:dim() - 1, 1)
  local known = ops.isfinite(ops.gather(scores, first, scores:dim() - 1)):reshape(-1)
  return tensor.stack { first:reshape(-1):eq(at):logical_and(known):logical_and(counts):sum(), counts:sum() }
end

local function check_weight(weight, logp, call)
  if weight ~= nil and not (weight:dim() == 1 and weight:size(0) == logp:size(-1)) then
    error(("%s: weight has shape [%s], but there are %d classes"):format(call, table.concat(weight:shape(), ", "),
      logp:size(-1)))
  end
end

-- Returns the loss for targets that are classes. `scores` are the logits [..., V] from which logp was computed.
local function class_loss(logp, scores, target, chosen, smooth, call)
  local reduction = chosen.reduction or "mean"
  caller.one_of(reduction, REDUCTIONS, call .. ": reduction")
  local weight = chosen.weight
  check_weight(weight, logp, call)
  local terms, share = class_terms(logp, target, weight, chosen.ignore_index or -100, smooth, call)
  if reduction == "none" then return terms end
  local loss = terms:sum()
  if reduction == "mean" then
    local sum = share:sum()
    loss = loss / tensor.where(sum:eq(0), 1, sum)                        -- if no target counts, the mean is 0
  end
  return loss_weight.note(loss, reduction, target, chosen.ignore_index, weight,
    loss_weight.wants_hits() ~= 0
      and scope.no_grad(count_hits, scores, target, weight, chosen.ignore_index or -100, smooth) or nil)
end

local CODE = { none = 0, mean = 1, sum = 2 }
local NLL = { ignore_index = "whole", reduction = "string", weight = "tensor" }

--- Returns the negative log-probability of each target. Classes are the last dimension. In PyTorch, classes are the
--- second dimension; write logp:movedim(1, -1) for such inputs. `weight` contains the weight of each class, which also
--- weights the mean. Targets equal to ignore_index are left out. If no target remains, the mean is 0.
---@param logp ps.Tensor [..., V]
---@param target ps.Tensor integers [...]
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum"|"none", weight?: ps.Tensor} ignore_index (default
--- -100); reduction (default "mean"); weight: [V]
---@return ps.Tensor of 0 dimensions, or [...] with reduction "none"
function losses.nll_loss(logp, target, options)
  options = caller.options(options, "F.nll_loss", NLL)
  losses.check_targets(logp, target, "F.nll_loss")
  logp = autocast.full(logp)
  local weight, reduction = options.weight, options.reduction or "mean"
  if native.on_host(logp) and loss_weight.wants_hits() == 0 and
    not (weight ~= nil and (weight:needs_grad() or weight.ndim ~= 1 or weight:size(0) ~= logp:size(-1))) then
    if weight ~= nil and weight.dtype_ ~= logp.dtype_ then weight = weight:to(logp:dtype()) end
    local loss = ops.nll_loss(logp, target, weight, options.ignore_index,
      CODE[reduction] or caller.one_of(reduction, CODE, "F.nll_loss: reduction"))
    return loss_weight.note(loss, reduction, target, options.ignore_index, weight)
  end
  return class_loss(logp, logp, target, options, 0, "F.nll_loss")
end

-- Returns the loss against class probabilities. As in PyTorch, the divisor of the mean is the number of rows, whatever
-- the weights are.
local function soft_loss(logp, target, chosen, smooth, call)
  local reduction, V = chosen.reduction or "mean", logp:size(-1)
  caller.one_of(reduction, REDUCTIONS, call .. ": reduction")
  if (chosen.ignore_index or -1) >= 0 then
    error(("%s: ignore_index = %d is for targets that are class indices; these are class probabilities"):format(call,
      chosen.ignore_index))
  end
  target = target:to(logp:dtype())
  if smooth > 0 then target = target * (1 - smooth) + smooth / V end
  local terms = logp * target
  if chosen.weight ~= nil then terms = terms * chosen.weight:to(logp:dtype()) end
  terms = -terms:sum(-1)
  if reduction == "none" then return terms end
  local rows = math.max(1, terms:numel())
  if reduction == "sum" then return loss_weight.as(function() return terms:sum() end, 1) end
  return loss_weight.as(function() return terms:sum() / rows end, rows)
end

--- Computes F.cross_entropy or F.lm_loss with class weights, label smoothing, or class probabilities as targets. Holds
--- all log-probabilities in memory.
---@param logits ps.Tensor [..., V]
---@param target ps.Tensor integers [...], or floats [..., V]
---@param chosen {ignore_index: integer?, reduction: string?, weight: ps.Tensor?, label_smoothing: number?}
---@param call string
---@return ps.Tensor
function losses.smoothed(logits, target, chosen, call)
  local smooth = chosen.label_smoothing or 0
  if not (smooth >= 0 and smooth <= 1) then
    error(("%s: label_smoothing = %.14g; it must be in [0, 1]"):format(call, smooth))
  end
  local soft = losses.check_targets(logits, target, call, true)
  local dtype = logits:dtype()
  if dtype ~= "fp64" then logits = logits:to("fp32") end
  if soft then
    check_weight(chosen.weight, logits, call)
    return soft_loss(ops.log_softmax(logits), target, chosen, smooth, call)
  end
  return class_loss(ops.log_softmax(logits), logits, target, chosen, smooth, call)
end

return losses
