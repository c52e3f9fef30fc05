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

--- x [..., I] by w: [O, I] (out_in, the default) or [I, O]; plus b [O], plus residual [..., O] in the same pass.
---@param x ps.Tensor
---@param w ps.Tensor
---@param b? ps.Tensor
---@param options? { out_in: boolean?, residual: ps.Tensor? }
function F.linear(x, w, b, options)
  if options then return ops.linear(x, w, b, options.residual, options.out_in == false and 0 or 1) end
  return ops.linear(x, w, b, nil, 1)
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
  return ops.mlp(x, w1, b1, w2, b2, options and options.residual, options and options.out_in == false and 0 or 1)
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

function F.gelu(x, approximate) return ops.gelu(x, approximate == "tanh" and 1 or 0) end
F.relu, F.silu, F.tanh, F.sigmoid = ops.relu, ops.silu, ops.tanh, ops.sigmoid
function F.softmax(x, dim) return tensor.along_last(ops.softmax, x, dim) end
function F.log_softmax(x, dim) return tensor.along_last(ops.log_softmax, x, dim) end

local reductions = { none = 0, mean = 1, sum = 2 }
local function reduction_of(options)
  local name = options and caller.options(options, "a loss").reduction or "mean"
  return reductions[name] or error("reduction '" .. tostring(name) .. "' is not none, mean or sum")
end

--- logits [..., V] against integer targets [...].
---@param options? { ignore_index: integer?, reduction: "mean"|"sum"|"none"? }
function F.cross_entropy(logits, target, options)
  local reduction = reduction_of(options)
  return ops.cross_entropy(logits, target, options and options.ignore_index, reduction)
end

--- Cross entropy of x [..., C] times w [V, C] transposed, without ever holding all logits.
---@param options? { ignore_index: integer?, reduction: "mean"|"sum"? }
function F.lm_loss(x, w, target, options)
  local reduction = reduction_of(options)
  return ops.lm_loss(x, w, target, options and options.ignore_index, reduction)
end

--- Rows of w [V, C] by integer indices.
function F.embedding(index, w) return ops.embedding(w, index) end

--- softmax(scale q k^T + mask) v; q [B, H, T, D], k and v [B, H, S, D]; mask bool [B, S] (false hides a key).
---@param options? { mask: ps.Tensor?, causal: boolean?, scale: number?, dropout: number? }
function F.attention(q, k, v, options)
  options = caller.options(options, "F.attention")
  if caller.tensor(q, "F.attention", "q") == nil then error("F.attention: q is missing") end
  local p = caller.number(options.dropout, "F.attention", "dropout") or 0
  return ops.attention(q, k, v, options.mask, options.scale or 1 / math.sqrt(q:size(-1)), options.causal and 1 or 0, p,
                       rng.seed, rng.step, rng.sample, p > 0 and next_op() or 0)
end

--- Self-attention over qkv [B, T, 3C]; gives [B, T, C].
---@param options? { mask: ps.Tensor?, causal: boolean?, scale: number?, dropout: number? }
function F.attention_packed(qkv, heads, options)
  options = caller.options(options, "F.attention_packed")
  local p = caller.number(options.dropout, "F.attention_packed", "dropout") or 0
  return ops.attention_packed(qkv, options.mask, heads, options.causal and 1 or 0, options.scale or 0, p, rng.seed,
                              rng.step, rng.sample, p > 0 and next_op() or 0)
end

return F
