-- SPDX-License-Identifier: BSD-3-Clause
-- ps.functional (ps.F): stateless functions of tensors, with PyTorch's names. A random mask is computed from counters:
-- the seed, the optimizer step, the index of the dropout in the forward, and the global index of the sample. The masks
-- are therefore the same for every division into micro-batches, and when a forward is recomputed.
local native = require "ps.core.ffi"
local tensor = require "ps.tensor"
local losses = require "ps.tensor.losses"
local activations = require "ps.tensor.activations"
local images = require "ps.tensor.images"
local segments_of = require "ps.tensor.segments"
local hooks = require "ps.core.hooks"
local scope = require "ps.core.scope"
local loss_weight = require "ps.core.loss_weight"
local ops, C, caller = native.ops, native.C, native.caller
local error = caller.error
local rng = C.ps_rng_get(native.ctx)

---@class ps.functional
local F = {}

local LINEAR = { out_in = "boolean", residual = "tensor" }

--- Returns x times a weight, plus a bias, plus a residual. One kernel call computes everything.
---@param x ps.Tensor [..., I]
---@param w ps.Tensor [O, I] with out_in (the default), otherwise [I, O]
---@param b? ps.Tensor [O]
---@param options? {out_in?: boolean, residual?: ps.Tensor} residual [..., O]
---@return ps.Tensor [..., O]
function F.linear(x, w, b, options)
  local head = hooks.ask("tied_head", w)
  if head then
    if options ~= nil then error "F.linear: options cannot be combined with a table that ranks share by rows" end
    return b == nil and head(x) or head(x) + b
  end
  if options == nil then return ops.linear(x, w, b, nil, 1) end
  caller.options(options, "F.linear", LINEAR)
  return ops.linear(x, w, b, options.residual, options.out_in == false and 0 or 1)
end

--- Returns linear(gelu(linear(x, w1, b1)), w2, b2), computed by one op. gelu is approximated with tanh. On a GPU, the
--- matrix products also compute the GELU, its gradient and the gradients of the biases.
---@param x ps.Tensor [..., C]
---@param w1 ps.Tensor [H, C] with out_in (the default), otherwise [C, H]
---@param b1? ps.Tensor [H]
---@param w2 ps.Tensor [C, H] with out_in (the default), otherwise [H, C]
---@param b2? ps.Tensor [C]
---@param options? {out_in?: boolean, residual?: ps.Tensor} residual [..., C]
---@return ps.Tensor [..., C]
function F.mlp(x, w1, b1, w2, b2, options)
  options = caller.options(options, "F.mlp", LINEAR)
  return ops.mlp(x, w1, b1, w2, b2, options.residual, options.out_in == false and 0 or 1)
end

-- Returns x with its last `dims` dimensions merged into one dimension.
local function over_last(x, dims, call)
  local shape = x:shape()
  if dims > #shape then
    error(("%s: over %d dimensions of a tensor with %d"):format(call, dims, #shape))
  end
  local rows, width = {}, 1
  for i, n in ipairs(shape) do
    if i <= #shape - dims then rows[i] = n else width = width * n end
  end
  rows[#rows + 1] = width
  return x:reshape(rows)
end

--- Returns (x - mean) / sqrt(variance + eps) * w + b (Ba, Kiros and Hinton 2016). Mean and variance are taken over the
--- last dimension, or over the last `dims` dimensions together.
---@param x ps.Tensor [..., C]
---@param w? ps.Tensor [C], or with `dims` dimensions
---@param b? ps.Tensor of w's shape
---@param eps? number default 1e-5
---@param dims? integer (default: the number of w's dimensions, or 1 without w)
---@return ps.Tensor [..., C]
function F.layer_norm(x, w, b, eps, dims)
  local given = dims ~= nil
  dims = dims or caller.tensor(w, "layer_norm", "w") ~= nil and w:dim() or 1
  if dims == 1 then return ops.layer_norm(x, w, b, eps) end
  caller.whole(dims, "F.layer_norm: dims", 1)
  for name, t in pairs { w = w, b = b } do
    local have, want = t:shape(), {}
    for i = x:dim() - dims + 1, x:dim() do want[#want + 1] = x:size(i - 1) end
    if table.concat(have, ", ") ~= table.concat(want, ", ") then
      if not given then return ops.layer_norm(x, w, b, eps) end                -- raises an error that names the shapes
      error(("F.layer_norm: %s is [%s]; over %d dimensions of [%s] it must be [%s]"):format(name,
        table.concat(have, ", "), dims, table.concat(x:shape(), ", "), table.concat(want, ", ")))
    end
  end
  local flat = over_last(x, dims, "F.layer_norm")
  return ops.layer_norm(flat, w and w:reshape(-1), b and b:reshape(-1), eps):reshape(x:shape())
end
--- Returns x / sqrt(mean(x^2) + eps) * w. The mean is taken over the last dimension (Zhang and Sennrich 2019).
---@param x ps.Tensor [..., C]
---@param w? ps.Tensor [C]
---@param eps? number default 1e-6
---@return ps.Tensor [..., C]
function F.rms_norm(x, w, eps) return ops.rms_norm(x, w, eps) end

--- Returns the index of this dropout in the forward. The counter is a field of the context, so that recomputation can
--- restore it.
local function next_op()
  local op = rng.op
  rng.op = op + 1
  return op
end

local DROPOUT = { first = "whole", per_sample = "whole", rows = "tensor" }

--- Sets elements to 0 with probability p and multiplies all other elements by 1 / (1 - p). Whether an element is set to
--- 0 depends on the seed, the step, the index of the call and the element's position in the batch.
---
--- Without `part`, the first dimension of x contains samples. The samples are numbered beginning with ps.rng().sample,
--- so ranks with different samples have different masks. If a row has several segments, each segment is a sample. If
--- ranks hold parts of one sample (rows along tp, for example), `part` says which elements x contains. Without `part`,
--- all these ranks would draw the same mask.
---@param x ps.Tensor
---@param p? number in [0, 1) (default 0.5)
---@param training? boolean (default true); false returns x unchanged
---@param part? {first?: integer, rows?: ps.Tensor, per_sample: integer} describes x as a part of the micro-batch's
--- whole tensor. first: row-major index of x's first element in the whole tensor. rows: used instead of first for x [R,
--- ...]; an int tensor [R] with the indices of x's rows in the whole tensor. per_sample: number of elements per sample
--- in the whole tensor; with rows, a multiple of the number of elements in a row
---@return ps.Tensor of x's shape
function F.dropout(x, p, training, part)
  if training == false or p == 0 then return x end
  p = p or 0.5
  if part ~= nil then caller.options(part, "F.dropout", DROPOUT) end
  part = segments_of.part(x, part)
  if part == nil then return ops.dropout(x, nil, p, rng.seed, rng.step, rng.sample, next_op()) end
  return ops.dropout(x, part.rows, p, rng.seed, rng.step, rng.sample, next_op(), part.first or 0, part.per_sample)
end

-- Drops whole channels of x [N, C, ...]. x must have `dims` dimensions.
local function drop_channels(x, p, training, dims, call)
  if caller.tensor(x, call, "x") == nil then error(call .. ": x is missing") end
  if x:dim() ~= dims then
    error(("%s takes a tensor of %d dimensions, [N, C, ...], not [%s]"):format(call, dims,
      table.concat(x:shape(), ", ")))
  end
  if training == false or p == 0 then return x end
  local shape = { x:size(0), x:size(1) }
  for i = 3, dims do shape[i] = 1 end
  return x * F.dropout(tensor.ones(shape, { dtype = x:dtype(), device = x:device() }), p)
end

--- Sets whole channels to 0 with probability p and multiplies all other channels by 1 / (1 - p).
---@param x ps.Tensor [N, C, L]
---@param p? number in [0, 1) (default 0.5)
---@param training? boolean (default true); false returns x unchanged
---@return ps.Tensor of x's shape
function F.dropout1d(x, p, training) return drop_channels(x, p, training, 3, "F.dropout1d") end
--- Sets whole channels to 0 with probability p and multiplies all other channels by 1 / (1 - p).
---@param x ps.Tensor [N, C, H, W]
---@param p? number in [0, 1) (default 0.5)
---@param training? boolean (default true); false returns x unchanged
---@return ps.Tensor of x's shape
function F.dropout2d(x, p, training) return drop_channels(x, p, training, 4, "F.dropout2d") end

local GELU = { none = 0, tanh = 1 }

--- Returns x times the probability that a standard normal variable is at most x. "tanh" approximates the probability.
---@param x ps.Tensor
---@param approximate? "none"|"tanh" (default "none")
---@return ps.Tensor of x's shape
function F.gelu(x, approximate)
  return ops.gelu(x, GELU[approximate or "none"] or caller.one_of(approximate, GELU, "F.gelu: approximate"))
end

local ACTS = { none = 1, tanh = 2 }

local function check_gate(gate, up, call)
  if caller.tensor(gate, call, "gate") == nil or caller.tensor(up, call, "up") == nil then
    error(call .. " takes two tensors, gate and up; write t:chunk(2, -1) for both halves of a tensor")
  end
  if gate.dtype_ ~= up.dtype_ or not tensor.same_shape(gate, up) then
    error(("%s: 'gate' is %s [%s] and 'up' is %s [%s]; they must have the same type and shape"):format(call,
      gate:dtype(), table.concat(gate:shape(), ", "), up:dtype(), table.concat(up:shape(), ", ")))
  end
end

--- Returns silu(gate) * up, computed by one kernel (SwiGLU, Shazeer 2020).
---@param gate ps.Tensor
---@param up ps.Tensor of gate's shape and type
---@return ps.Tensor of gate's shape
function F.swiglu(gate, up)
  check_gate(gate, up, "F.swiglu")
  return ops.act_mul(gate, up, 0)
end

--- Returns gelu(gate) * up, computed by one kernel (GeGLU, Shazeer 2020).
---@param gate ps.Tensor
---@param up ps.Tensor of gate's shape and type
---@param approximate? "none"|"tanh" (default "none")
---@return ps.Tensor of gate's shape
function F.geglu(gate, up, approximate)
  check_gate(gate, up, "F.geglu")
  return ops.act_mul(gate, up, ACTS[approximate or "none"] or caller.one_of(approximate, ACTS, "F.geglu: approximate"))
end

F.relu, F.silu, F.tanh, F.sigmoid = tensor.T.relu, ops.silu, ops.tanh, ops.sigmoid
--- Returns exp(x) divided by the sum of exp(x) along one dimension.
---@param x ps.Tensor
---@param dim? integer (default -1)
---@return ps.Tensor of x's shape
function F.softmax(x, dim) return tensor.along_last(ops.softmax, x, dim) end
--- Returns the logarithm of softmax along one dimension.
---@param x ps.Tensor
---@param dim? integer (default -1)
---@return ps.Tensor of x's shape
function F.log_softmax(x, dim) return tensor.along_last(ops.log_softmax, x, dim) end

local reductions = { none = 0, mean = 1, sum = 2 }
local LOSS = { ignore_index = "whole", reduction = "string", weight = "tensor", label_smoothing = "number" }

local function reduction_of(options, call)
  local name = options.reduction or "mean"
  return reductions[name] or caller.one_of(name, reductions, call .. ": reduction")
end

--- Returns the cross entropy of logits against target classes. Rows whose target is ignore_index are left out. If no
--- target counts, the mean is 0 and has no gradient, so that a batch without targets adds nothing. (In PyTorch the mean
--- is NaN.) Classes are the last dimension. In PyTorch, classes are the second dimension; write logits:movedim(1, -1)
--- for such logits.
---@param logits ps.Tensor [..., V]
---@param target ps.Tensor integers [...], or class probabilities, which are floats [..., V]
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum"|"none", weight?: ps.Tensor, label_smoothing?:
--- number} ignore_index (default -100); reduction (default "mean"); weight: [V], the weight of each class, which also
--- weights the mean; label_smoothing: share of a target that is spread evenly over all classes (default 0)
---@return ps.Tensor of 0 dimensions, or [...] with reduction "none"
function F.cross_entropy(logits, target, options)
  options = caller.options(options, "F.cross_entropy", LOSS)
  local soft = losses.check_targets(logits, target, "F.cross_entropy", true)
  if soft or options.weight ~= nil or (options.label_smoothing or 0) ~= 0 then
    return losses.smoothed(logits, target, options, "F.cross_entropy")
  end
  local loss, hits = ops.cross_entropy(logits, target, options.ignore_index, reduction_of(options, "F.cross_entropy"),
    loss_weight.wants_hits())
  return loss_weight.note(loss, options.reduction, target, options.ignore_index, nil, hits)
end

local LM_LOSS = { ignore_index = "whole", reduction = "string", bias = "tensor", weight = "tensor",
  label_smoothing = "number" }

--- Returns the cross entropy of the logits, which are x times w transposed, plus bias. The logits are computed in
--- panels of rows. All logits together are never in memory, except with weight or label_smoothing. Ignored targets,
--- weight and label_smoothing have the same meaning as in F.cross_entropy.
---@param x ps.Tensor [..., C]
---@param w ps.Tensor [V, C]
---@param target ps.Tensor integers [...], or class probabilities [..., V], for which all logits are in memory
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum", bias?: ps.Tensor, weight?: ps.Tensor,
--- label_smoothing?: number} ignore_index (default -100); reduction (default "mean"); bias [V]
---@return ps.Tensor of 0 dimensions
function F.lm_loss(x, w, target, options)
  options = caller.options(options, "F.lm_loss", LM_LOSS)
  local head = hooks.ask("tied_head", w)
  if head then
    if options.bias ~= nil then error "F.lm_loss: a bias cannot be combined with a table that ranks share by rows" end
    return head:loss(x, target, options)
  end
  local soft = scope.is_tensor(target) and target:is_float()
  if soft or options.weight ~= nil or (options.label_smoothing or 0) ~= 0 then
    return losses.smoothed(F.linear(x, w, options.bias), target, options, "F.lm_loss")
  end
  local loss, hits = ops.lm_loss(x, w, target, options.bias, options.ignore_index, reduction_of(options, "F.lm_loss"),
    nil, nil, loss_weight.wants_hits())
  return loss_weight.note(loss, options.reduction, target, options.ignore_index, nil, hits)
end

local EMBEDDING = { padding_idx = "whole" }

-- Returns the index of the padding row. A negative index counts from the end.
local function padding_of(at, w, call)
  if at == nil or at >= 0 then return at end
  if at + w:size(0) < 0 then
    error(("%s: padding_idx is %d, but the matrix has only %d rows"):format(call, at, w:size(0)))
  end
  return at + w:size(0)
end

--- Returns the rows of an embedding matrix at integer indices.
---@param index ps.Tensor integers [...]
---@param w ps.Tensor [V, C]
---@param options? {padding_idx?: integer} padding_idx: the row that gets no gradient
---@return ps.Tensor [..., C]
function F.embedding(index, w, options)
  if options == nil then return ops.embedding(w, index) end
  local at = caller.options(options, "F.embedding", EMBEDDING).padding_idx
  return ops.embedding(w, index, padding_of(at, w, "F.embedding"))
end

local BAG = { mode = "string", padding_idx = "whole", per_sample_weights = "tensor", include_last_offset = "boolean" }
local MODES = { mean = true, sum = true, max = true }
local BAG_DIM = 2                                             -- the bit of dimension 1

-- Returns the index of the bag to which each element of `index` belongs, and the number of bags.
local function bags_of(index, offsets, last, call)
  if caller.tensor(offsets, call, "the offsets") == nil or offsets:dim() ~= 1 or index:dim() ~= 1 then
    error(("%s takes indices [B, L] without offsets, or indices [N] with offsets [B]"):format(call))
  end
  if offsets:size(0) == 0 then error(call .. ": there are no offsets") end
  local n = offsets:size(0)
  if last then n, offsets = n - 1, offsets:narrow(0, 0, n - 1) end
  if n > 0 and offsets[0]:item() ~= 0 then
    error(("%s: the first offset is %d; it must be 0"):format(call, offsets[0]:item()))
  end
  local at = tensor.arange(0, index:size(0), 1, { dtype = offsets:dtype(), device = index:device() })
  return offsets:searchsorted(at, { right = true }) - 1, n
end

--- Returns the mean, sum or maximum of rows of an embedding matrix, for each bag of indices. The result of an empty bag
--- is 0.
---@param index ps.Tensor integers [B, L], where each row is a bag; or integers [N], with `offsets`
---@param w ps.Tensor [V, C]
---@param offsets? ps.Tensor integers [B], the index of each bag's first element
---@param options? {mode?: "mean"|"sum"|"max", padding_idx?: integer, per_sample_weights?: ps.Tensor,
--- include_last_offset?: boolean} mode (default "mean"); padding_idx: an index that is ignored; per_sample_weights:
--- factors of index's shape, only for mode "sum"; include_last_offset: whether `offsets` ends with N, which begins no
--- bag
---@return ps.Tensor [B, C]
function F.embedding_bag(index, w, offsets, options)
  local call = "F.embedding_bag"
  options = caller.options(options, call, BAG)
  local mode, factors = options.mode or "mean", options.per_sample_weights
  caller.one_of(mode, MODES, call .. ": mode")
  if caller.tensor(index, call, "the indices") == nil then error(call .. ": the indices are missing") end
  if factors and mode ~= "sum" then
    error(("%s: per_sample_weights requires mode \"sum\", not \"%s\""):format(call, mode))
  end
  local bag, n
  if offsets == nil then
    if index:dim() ~= 2 then
      error(("%s takes indices [B, L] without offsets, or indices [N] with offsets [B]"):format(call))
    end
    n = index:size(0)
    if not factors and not options.padding_idx and mode ~= "max" and index:size(1) > 0 then     -- fewer ops
      local rows = ops.embedding(w, index)                                                    -- [B, L, C]
      return mode == "sum" and ops.sum(rows, BAG_DIM, 0, 0) or ops.mean(rows, BAG_DIM, 0)
    end
    bag = tensor.arange(0, n, 1, { dtype = "int64", device = index:device() }):unsqueeze(1):expand(index:shape())
      :reshape(-1)
  else
    bag, n = bags_of(index, offsets, options.include_last_offset, call)
  end
  local flat, where = index:reshape(-1), { dtype = w:dtype(), device = w:device() }
  if factors then
    if not tensor.same_shape(factors, index) then
      error(call .. ": per_sample_weights must have the shape of the indices")
    end
    factors = factors:reshape(-1)
  end
  local padding = padding_of(options.padding_idx, w, "F.embedding_bag")
  if padding then
    local kept = scope.no_grad(function() return flat:ne(padding) end)
    flat, bag = flat:masked_select(kept), bag:masked_select(kept)
    factors = factors and factors:masked_select(kept)
  end
  local rows = ops.embedding(w, flat, padding)
  if factors then rows = rows * factors:unsqueeze(1) end
  local zeros = tensor.zeros({ n, w:size(1) }, where)
  if mode == "max" then
    if flat:size(0) == 0 then return zeros + rows:sum() end
    return zeros:scatter_reduce(0, bag:unsqueeze(1):expand(rows:shape()), rows, "amax", false)
  end
  local sums = zeros:index_add(0, bag, rows)
  if mode == "sum" then return sums end
  local count = scope.no_grad(function()
    return tensor.zeros({ n }, where):index_add(0, bag, tensor.ones({ flat:size(0) }, where)):clamp(1)
  end)
  return sums / count:unsqueeze(1)
end

local function full_table(t)
  return (t.dtype_ == C.PS_BF16 or t.dtype_ == C.PS_F16) and ops.cast(t, C.PS_F32) or t
end

--- Applies rotary position embedding (Su et al. 2021). It rotates each pair of columns d and d + R / 2 by an angle.
---@param x ps.Tensor [B, H, T, D]
---@param cos ps.Tensor [B or 1, T, R / 2], the cosines of the angles, in fp32 or a half type, or in fp64 for an fp64 x.
--- R is at most D. Columns R to D - 1 of x are not changed
---@param sin ps.Tensor sines of the angles, of cos's shape and type
---@return ps.Tensor [B, H, T, D]
function F.rope(x, cos, sin)
  if caller.tensor(cos, "F.rope", "cos") ~= nil and caller.tensor(sin, "F.rope", "sin") ~= nil then
    cos, sin = full_table(cos), full_table(sin)
  end
  return ops.rope(x, cos, sin, 0)
end

-- Returns the index of the first head for the dropout mask. If the options do not set this index, it is the index of
-- this rank's first head in the module whose forward is running. Ranks may share the heads of this module.
local function first_head(options, p, heads)
  if options.first_head or p == 0 then return options.first_head or 0 end
  return hooks.ask("first_head", heads) or 0
end

local PACKED = { mask = "tensor", causal = "boolean", scale = "number", dropout = "number", first_head = "whole" }
local ATTENTION = { mask = "tensor", key_mask = "tensor", causal = "boolean", scale = "number", dropout = "number",
  window = "whole", first_head = "whole" }

-- Returns the mask for an op of attention, or the mask of keys. Rejects a mask of shape [T, S], which PyTorch accepts,
-- because the function could not distinguish it from a mask of shape [B, S].
local function mask_of(given, call)
  local mask, keys = given.mask, given.key_mask
  if keys ~= nil then
    if mask ~= nil then
      error(call .. " takes mask or key_mask, not both; write mask = mask:logical_and(key_mask:reshape(B, 1, 1, S))")
    elseif keys.ndim ~= 2 then
      error(("%s: key_mask has shape [%s]; it must be [B, S]"):format(call, table.concat(keys:shape(), ", ")))
    end
    return keys
  end
  if mask ~= nil and mask.ndim ~= 4 and not (mask.ndim == 2 and mask.dtype_ == C.PS_I32) then
    error(("%s: mask is %s [%s]; it must be [B or 1, H or 1, T or 1, S]. Write mask:reshape(1, 1, T, S) for a mask of "
      .. "queries and keys, as in PyTorch, or key_mask = mask for a mask of keys [B, S]"):format(call, mask:dtype(),
      table.concat(mask:shape(), ", ")))
  end
  return mask
end

--- Returns softmax(scale * q k^T + mask) v. If a query sees no key, its result is 0. Keys may have fewer heads than
--- queries. In that case G must divide H, and each group of H / G adjacent heads of queries shares one head of keys
--- (grouped-query attention, Ainslie et al. 2023).
---@param q ps.Tensor [B, H, T, D]
---@param k ps.Tensor [B, G, S, D]
---@param v ps.Tensor [B, G, S, D]
---@param options? {mask?: ps.Tensor, key_mask?: ps.Tensor, causal?: boolean, window?: integer, scale?: number,
--- dropout?: number, first_head?: integer} mask: [B or 1, H or 1, T or 1, S], bool, fp32 or of q's type. A bool mask
--- hides a key where it is false. A float mask is added to the scores, and values of -1e30 or less hide a key. If a
--- float mask requires a gradient, F.attention_weights is used. key_mask: used instead of mask. A bool key_mask [B, S]
--- hides keys where it is false. An int32 key_mask [B, T], for T = S, contains segments. Adjacent positions with the
--- same number see only each other. Positions with the number 0 are padding, which sees nothing and is not seen.
--- causal: query i sees the keys up to i + S - T. window: query i sees only the last `window` of the keys up to i + S -
--- T. scale (default 1 / sqrt(D)). dropout: probability that a weight is dropped (default 0). first_head: index of q's
--- first head, if ranks share the heads. With first_head, the dropout masks equal the masks of a run with one rank. The
--- default is the first head of the running module if tensor_parallel divides its heads, and otherwise 0
---@return ps.Tensor [B, H, T, D]
function F.attention(q, k, v, options)
  options = caller.options(options, "F.attention", ATTENTION)
  if caller.tensor(q, "F.attention", "q") == nil then error("F.attention: q is missing") end
  local p = options.dropout or 0
  local mask = mask_of(options, "F.attention")
  if mask ~= nil and mask:is_float() and mask:needs_grad() and scope.grad_enabled() then
    return (F.attention_weights(q, k, v, options))
  end
  return ops.attention(q, k, v, mask, options.scale or 1 / math.sqrt(q:size(-1)), options.causal and 1 or 0, p,
                       rng.seed, rng.step, rng.sample, p > 0 and next_op() or 0, options.window or 0,
                       first_head(options, p, q:size(1)))
end

-- Returns a mask of the pairs of positions that are in the same segment, bool [B, 1, T, T]. A segment is a run of equal
-- numbers. The number 0 is padding.
local function pairs_of(segments)
  local B, T = segments:size(0), segments:size(1)
  local first = tensor.zeros({ B, 1 }, { device = segments:device() })
  local run = tensor.cat({ first, segments:narrow(1, 1, T - 1):ne(segments:narrow(1, 0, T - 1)):float() }, 1):cumsum(1)
  return run:reshape(B, 1, T, 1):eq(run:reshape(B, 1, 1, T)):logical_and(segments:ne(0):reshape(B, 1, 1, T))
end

-- Returns a mask of the keys that each query sees, bool [B or 1, H or 1, T, S]. Returns nil instead if all queries see
-- all keys. The second result is a bias that is added to the scores, or nil.
local function seen_and_bias(mask, causal, window, T, S, device)
  local seen, bias
  if mask ~= nil then
    local is_bool = mask.dtype_ == C.PS_BOOL
    if mask.dtype_ == C.PS_I32 then mask, is_bool = pairs_of(mask), true end
    local m = mask:dim() == 2 and is_bool and mask:reshape(mask:size(0), 1, 1, mask:size(1)) or mask
    if is_bool then seen = m
    else
      seen = m:gt(-1e30)
      bias = m:masked_fill(seen:logical_not(), 0)
    end
  end
  if causal then
    local where = { dtype = "int64", device = device }
    local last = tensor.arange(0, T, 1, where):reshape(T, 1) + (S - T)
    local key = tensor.arange(0, S, 1, where):reshape(1, S)
    local within = key:le(last)
    if window and window > 0 then within = within:logical_and(key:gt(last - window)) end
    seen = seen and seen:logical_and(within) or within
  end
  return seen, bias
end

--- Computes F.attention with separate ops, which keep all weights in memory. Also returns the weights. A float mask can
--- get a gradient.
---@param q ps.Tensor [B, H, T, D]
---@param k ps.Tensor [B, G, S, D]
---@param v ps.Tensor [B, G, S, D]
---@param options? {mask?: ps.Tensor, key_mask?: ps.Tensor, causal?: boolean, window?: integer, scale?: number,
--- dropout?: number, first_head?: integer} as for F.attention
---@return ps.Tensor [B, H, T, D]
---@return ps.Tensor weights [B, H, T, S] in the type of q, after dropout
function F.attention_weights(q, k, v, options)
  options = caller.options(options, "F.attention_weights", ATTENTION)
  for name, x in pairs { q = q or false, k = k or false, v = v or false } do
    if not caller.tensor(x or nil, "F.attention_weights", name) then
      error(("F.attention_weights: %s is missing"):format(name))
    elseif x:dim() ~= 4 then
      error(("F.attention_weights: %s is [%s]; it must be [B, H, T, D]"):format(name, table.concat(x:shape(), ", ")))
    end
  end
  local H, G, p = q:size(1), k:size(1), options.dropout or 0
  if p > 0 and first_head(options, p) ~= 0 then
    error("F.attention_weights: dropout on a part of the heads is not supported; use F.attention with a mask that "
      .. "needs no gradient")
  end
  if H ~= G then
    if G == 0 or H % G ~= 0 then
      error(("F.attention_weights: %d heads of keys do not divide %d heads of queries"):format(G, H))
    end
    local B, S, D, E = k:size(0), k:size(2), k:size(3), v:size(3)
    k = k:unsqueeze(2):expand(B, G, H / G, S, D):reshape(B, H, S, D)
    v = v:unsqueeze(2):expand(B, G, H / G, S, E):reshape(B, H, S, E)
  end
  local dtype = q:dtype()
  local function wide(x) return x:dtype() == "fp64" and x or x:to("fp32") end
  local scores = wide(q):matmul(wide(k):transpose(-1, -2)) * (options.scale or 1 / math.sqrt(q:size(-1)))
  local mask = mask_of(options, "F.attention_weights")
  local seen, bias = seen_and_bias(mask, options.causal, options.window, q:size(2), k:size(2), q:device())
  if bias ~= nil then scores = scores + bias end
  local weights
  if seen == nil then weights = ops.softmax(scores)
  else
    -- A hidden key gets the weight 0, even if the query sees no key at all.
    weights = ops.softmax(scores:masked_fill(seen:logical_not(), -1e30)):masked_fill(seen:logical_not(), 0)
  end
  if p > 0 then weights = F.dropout(weights, p) end
  weights = weights:to(dtype)
  return weights:matmul(v), weights
end

--- Computes self-attention. The queries, keys and values are adjacent in one tensor.
---@param qkv ps.Tensor [B, T, 3 C]
---@param heads integer number of heads, which must divide C; D = C / heads
---@param options? {mask?: ps.Tensor, causal?: boolean, scale?: number, dropout?: number, first_head?: integer} mask:
--- bool [B, T], or int32 [B, T] with segments; the other options are the same as in F.attention
---@return ps.Tensor [B, T, C]
function F.attention_packed(qkv, heads, options)
  options = caller.options(options, "F.attention_packed", PACKED)
  local p = options.dropout or 0
  return ops.attention_packed(qkv, options.mask, heads, options.causal and 1 or 0, options.scale or 0, p, rng.seed,
                              rng.step, rng.sample, p > 0 and next_op() or 0, first_head(options, p, heads))
end

for name, fn in pairs(activations) do F[name] = fn end
for _, name in ipairs { "mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy",
                        "binary_cross_entropy_with_logits", "kl_div", "nll_loss", "pairwise_distance",
                        "triplet_margin_loss", "margin_ranking_loss", "cosine_embedding_loss", "hinge_embedding_loss",
                        "gaussian_nll_loss" } do
  F[name] = losses[name]
end
for name, fn in pairs(images.functions) do F[name] = fn end

return F
