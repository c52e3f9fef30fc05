-- SPDX-License-Identifier: BSD-3-Clause
-- ps.functional (ps.F): functions over tensors without state, in PyTorch's terms. Random masks come from counters
-- (seed, optimizer step, dropout number in the forward, global sample), so micro-batches and recomputation agree.
local E = require "ps.ffi"
local tensor = require "ps.tensor"
local ops, C, caller = E.ops, E.C, E.caller
local error = caller.error
local rng = C.ps_rng_get(E.ctx)

---@class ps.functional
local F = {}

local LINEAR = { out_in = "boolean", residual = "tensor" }

--- x [..., I] by w: [O, I] (out_in, the default) or [I, O]; plus b [O], plus residual [..., O] in the same pass.
---@param x ps.Tensor
---@param w ps.Tensor
---@param b? ps.Tensor
---@param options? { out_in: boolean?, residual: ps.Tensor? }
function F.linear(x, w, b, options)
  if options == nil then return ops.linear(x, w, b, nil, 1) end
  caller.options(options, "F.linear", LINEAR)
  return ops.linear(x, w, b, options.residual, options.out_in == false and 0 or 1)
end

--- linear(gelu(linear(x, w1, b1)), w2, b2), gelu the tanh approximation, as one op: on a GPU the GELU, its gradient and
--- those of the biases are parts of the products. Weights as in F.linear.
---@param x ps.Tensor
---@param w1 ps.Tensor
---@param b1? ps.Tensor
---@param w2 ps.Tensor
---@param b2? ps.Tensor
---@param options? { out_in: boolean?, residual: ps.Tensor? }
function F.mlp(x, w1, b1, w2, b2, options)
  options = caller.options(options, "F.mlp", LINEAR)
  return ops.mlp(x, w1, b1, w2, b2, options.residual, options.out_in == false and 0 or 1)
end

--- Over the last dimension.
function F.layer_norm(x, w, b, eps) return ops.layer_norm(x, w, b, eps) end
function F.rms_norm(x, w, eps) return ops.rms_norm(x, w, eps) end

--- The number of this dropout in the forward; the counter is the context's, so that recomputation can restore it.
local function next_op()
  local op = rng.op
  rng.op = op + 1
  return op
end

--- Zeroes elements with probability p and scales the others by 1 / (1 - p); only while training (default true).
function F.dropout(x, p, training)
  if training == false or p == 0 then return x end
  return ops.dropout(x, p, rng.seed, rng.step, rng.sample, next_op())
end

local GELU = { none = 0, tanh = 1 }

--- x times the normal distribution's share below it, or the approximation of that by tanh.
---@param x ps.Tensor
---@param approximate? "none"|"tanh" default "none"
function F.gelu(x, approximate)
  return ops.gelu(x, GELU[approximate or "none"] or caller.one_of(approximate, GELU, "F.gelu: approximate"))
end

F.relu, F.silu, F.tanh, F.sigmoid = tensor.methods.relu, ops.silu, ops.tanh, ops.sigmoid
function F.softmax(x, dim) return tensor.along_last(ops.softmax, x, dim) end
function F.log_softmax(x, dim) return tensor.along_last(ops.log_softmax, x, dim) end

local reductions = { none = 0, mean = 1, sum = 2 }
local LOSS = { ignore_index = "whole", reduction = "string" }

local function reduction_of(options, call)
  local name = options.reduction or "mean"
  return reductions[name] or caller.one_of(name, reductions, call .. ": reduction")
end

--- logits [..., V] against integer targets [...]; rows whose target is ignore_index (-100) do not count. The mean of no
--- targets is 0 and has no gradient (PyTorch's is NaN): a batch without targets adds nothing.
---@param options? { ignore_index: integer?, reduction: "mean"|"sum"|"none"? }
function F.cross_entropy(logits, target, options)
  options = caller.options(options, "F.cross_entropy", LOSS)
  return ops.cross_entropy(logits, target, options.ignore_index, reduction_of(options, "F.cross_entropy"))
end

--- Cross entropy of x [..., C] times w [V, C] transposed, without ever holding all logits; ignored targets as above.
---@param options? { ignore_index: integer?, reduction: "mean"|"sum"? }
function F.lm_loss(x, w, target, options)
  options = caller.options(options, "F.lm_loss", LOSS)
  return ops.lm_loss(x, w, target, options.ignore_index, reduction_of(options, "F.lm_loss"))
end

--- Rows of w [V, C] by integer indices.
function F.embedding(index, w) return ops.embedding(w, index) end

local ATTENTION = { mask = "tensor", causal = "boolean", scale = "number", dropout = "number" }

--- softmax(scale q k^T + mask) v; q [B, H, T, D], k and v [B, H, S, D]; mask bool [B, S] (false hides a key).
---@param options? { mask: ps.Tensor?, causal: boolean?, scale: number?, dropout: number? }
function F.attention(q, k, v, options)
  options = caller.options(options, "F.attention", ATTENTION)
  if caller.tensor(q, "F.attention", "q") == nil then error("F.attention: q is missing") end
  local p = options.dropout or 0
  return ops.attention(q, k, v, options.mask, options.scale or 1 / math.sqrt(q:size(-1)), options.causal and 1 or 0, p,
                       rng.seed, rng.step, rng.sample, p > 0 and next_op() or 0)
end

--- Self-attention over qkv [B, T, 3C]; gives [B, T, C].
---@param options? { mask: ps.Tensor?, causal: boolean?, scale: number?, dropout: number? }
function F.attention_packed(qkv, heads, options)
  options = caller.options(options, "F.attention_packed", ATTENTION)
  local p = options.dropout or 0
  return ops.attention_packed(qkv, options.mask, heads, options.causal and 1 or 0, options.scale or 0, p, rng.seed,
                              rng.step, rng.sample, p > 0 and next_op() or 0)
end

return F
