-- SPDX-License-Identifier: BSD-3-Clause
-- Methods of ps.Group that are ops. Each op returns a new tensor with a gradient (src/tensor_parallel/).
-- dist/init.lua adds them to the class. copy_to, reduce_from, scatter_to and gather_from have Megatron's names. In
-- shapes, `size` is the number of ranks.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local arguments = require "ps.dist.arguments"
local mesh = require "ps.dist.mesh"
local C = native.C
local open, tensor, whole = arguments.open, arguments.tensor, arguments.whole
local error = caller.error

local Group = {}

local ops = native.ops
local PRODUCT = {
  gathered_linear = { out_in = "boolean", pieces = "whole", keep = "boolean" },
  gathered_linears = { out_in = "boolean", pieces = "whole", keep = "boolean" },
  linear_scattered = { out_in = "boolean", pieces = "whole", flat = "boolean" },
}

local function attributes(self, call, t)
  local c = open(self)
  tensor(t, "x", call)
  local number = C.ps_group_number(c)
  if number < 0 then error(("group:%s: at most 64 groups can have ops at a time; close others first"):format(call)) end
  return number, C.ps_group_size(c), C.ps_group_rank(c)
end

--- Returns the sum of all ranks' tensors. The gradient is the sum of all ranks' gradients, because every rank's loss
--- counts.
---@param x ps.Tensor
---@return ps.Tensor
function Group:sum(x) return ops.all_reduce(x, attributes(self, "sum", x)) end

--- Concatenates the ranks' tensors [n, ...] to a tensor [size * n, ...]. All ranks' gradients of the result are summed,
--- and the gradient of x [n, ...] is this rank's part of the sum.
---@param x ps.Tensor
---@return ps.Tensor
function Group:gathered(x) return ops.all_gather(x, attributes(self, "gathered", x)) end

--- Sums all ranks' x [size * n, ...] and returns this rank's part [n, ...] of the sum. The gradient [size * n, ...] is
--- the concatenation of all ranks' gradients.
---@param x ps.Tensor
---@return ps.Tensor
function Group:scattered(x) return ops.reduce_scatter(x, attributes(self, "scattered", x)) end

--- Returns `gathered(x)`. If the result has a size of at least 1 MiB, backward keeps only x and gathers x again.
---@param x ps.Tensor
---@return ps.Tensor
function Group:gathered_again(x) return ops.all_gather_again(x, attributes(self, "gathered_again", x)) end

-- Checks the arguments of a product over several ranks.
local function of_product(self, call, x, w, how)
  local number, size, rank = attributes(self, call, x)
  tensor(w, "w", call)
  how = caller.options(how, "group:" .. call, PRODUCT[call])
  if x:dim() < 2 then
    error(("group:%s: x has %d dimensions; it must have rows, so at least 2"):format(call, x:dim()))
  end
  local pieces = how.pieces or 1
  if pieces < 1 or pieces > mesh.MOST_PIECES then
    error(("group:%s: pieces is %d; rows can be exchanged in 1 to %d pieces"):format(call, pieces, mesh.MOST_PIECES))
  end
  return how, pieces, how.out_in == false and 0 or 1, number, size, rank
end

-- Reshapes the rows y [size * n ..., O] so that they have the dimensions of an x with the shape [n, ..., I].
local function with_dims(y, shape)
  local rows, to = 1, { unpack(shape) }
  for i = 2, #shape - 1 do rows = rows * shape[i] end
  to[1], to[#to] = rows > 0 and y:size(0) / rows or 0, y:size(1)
  return y:reshape(to)
end

-- Returns several results: for each layer, `gathered(x)` times the layer's w, plus its b. `call` is the name of the
-- function that the script called.
local function gathered_linears(self, call, x, layers, how)
  local shape, given, pieces, out_in, number, size, rank
  for _, layer in ipairs(layers) do
    given, pieces, out_in, number, size, rank = of_product(self, call, x, layer[1], how)
  end
  if pieces == 1 then
    local all, y = given.keep and self:gathered(x) or self:gathered_again(x), {}
    for i, layer in ipairs(layers) do y[i] = ops.linear(all, layer[1], layer[2], nil, out_in) end
    return unpack(y, 1, #layers)
  end
  shape = x:shape()
  local one, two, three = layers[1], layers[2] or {}, layers[3] or {}
  local y = { ops.column_linear(#shape == 2 and x or x:reshape(-1, shape[#shape]), one[1], one[2], two[1], two[2],
    three[1], three[2], number, size, rank, 0, out_in, pieces, given.keep and 1 or 0) }
  for i = 1, #shape > 2 and #layers or 0 do y[i] = with_dims(y[i], shape) end
  return unpack(y, 1, #layers)
end

--- Returns `gathered(x)` times w, plus b. With several pieces, a single op gathers and multiplies: it sends one piece
--- while it multiplies another piece. Backward gathers x again, and sums the gradient of x over the ranks. Backward
--- also multiplies during these exchanges.
---@param x ps.Tensor [n, ..., I], this rank's rows
---@param w ps.Tensor [O, I], or [I, O]
---@param b? ps.Tensor [O]
---@param how? {out_in?: boolean, pieces?: integer, keep?: boolean} out_in: false if w is [I, O]. pieces: 1 to 8; with
--- 1, the default, all rows are gathered before the product begins. keep: if true, backward keeps the gathered rows;
--- rows of less than 1 MiB in total are always kept
---@return ps.Tensor [size * n, ..., O]
function Group:gathered_linear(x, w, b, how)
  return (gathered_linears(self, "gathered_linear", x, { { w, b } }, how))
end

--- Returns the results of `gathered_linear` for up to three weights, but gathers the rows only once. In the gradient of
--- x, the terms of the products are added from the last product to the first.
---@param x ps.Tensor [n, ..., I], this rank's rows
---@param layers {[1]: ps.Tensor, [2]?: ps.Tensor}[] 1 to 3 pairs {w, b}, or {w}
---@param how? {out_in?: boolean, pieces?: integer, keep?: boolean}
---@return ps.Tensor ... [size * n, ..., O], one result for each pair
function Group:gathered_linears(x, layers, how)
  local call = "gathered_linears"
  if type(layers) ~= "table" or #layers < 1 or #layers > C.PS_MAX_COLUMNS then
    error(("group:%s takes a list of 1 to %d pairs {w, b}"):format(call, C.PS_MAX_COLUMNS))
  end
  for i, layer in ipairs(layers) do
    if type(layer) ~= "table" then
      error(("group:%s: layer %d is a %s; it must be a pair {w, b}"):format(call, i, type(layer)))
    end
  end
  return gathered_linears(self, call, x, layers, how)
end

--- Returns `scattered(x times w)`. With several pieces, a single op multiplies and scatters: it sends one piece while
--- it multiplies another piece. Backward does the same.
---@param x ps.Tensor [size * n, ..., I]
---@param w ps.Tensor [O, I], or [I, O]
---@param how? {out_in?: boolean, pieces?: integer, flat?: boolean} out_in and pieces: as in gathered_linear; with
--- pieces = 1 the whole product is computed before rows are exchanged. flat: all dimensions of x except the last are
--- rows
---@return ps.Tensor [n, ..., O], or [rows / size, O] with flat
function Group:linear_scattered(x, w, how)
  local pieces, out_in, number, size, rank
  how, pieces, out_in, number, size, rank = of_product(self, "linear_scattered", x, w, how)
  if pieces == 1 then
    local y = ops.linear(x, w, nil, nil, out_in)
    return self:scattered(how.flat and y:reshape(-1, y:size(-1)) or y)
  end
  local shape = x:shape()
  if not how.flat and shape[1] % size ~= 0 then
    error(("group:linear_scattered: the first dimension of x, %d, cannot be cut into %d equal parts"):format(shape[1],
      size))
  end
  -- x is passed without a reshape. Backward can then recompute x, for example the output of a gelu, instead of keeping
  -- it.
  local y = ops.row_linear(x, w, number, size, rank, 0, out_in, pieces)                -- [rows / size, O]
  if how.flat or #shape == 2 then return y end
  shape[1], shape[#shape] = shape[1] / size, y:size(1)
  return y:reshape(shape)
end

local LM_LOSS = { bias = "tensor", mass = "tensor", words = "whole", parted = "boolean", dloss = "number",
  hits = "boolean" }

--- Returns the cross entropy of the logits x w^T + bias. The words are divided among the ranks. Each rank computes the
--- logits of its V words, in panels of rows. For each row, the ranks exchange three numbers, or four numbers with
--- `mass`. Gradients are computed together with the loss, as in F.lm_loss.
---
--- A row's loss is share[0] * lse - share[1] * logit(target) - share[2] * sum(mass * logit), where lse is the
--- log-sum-exp of the row's logits over all words. The result is the sum over the rows. It is equal on all ranks and
--- counts once. Each rank computes the gradients of w and bias for its own words. The gradient of x is summed over
--- ranks.
---@param x ps.Tensor [N, C], equal on all ranks; with `parted`, this rank's rows [N / size, C]
---@param w ps.Tensor [V, C], this rank's words
---@param targets ps.Tensor integers [N], equal on all ranks
---@param share ps.Tensor fp32 (fp64 if x is fp64) [3, N], equal on all ranks; 0 for rows that do not count
---@param options {words: integer, parted?: boolean, bias?: ps.Tensor, mass?: ps.Tensor, dloss?: number, hits?: boolean}
--- words: number of words of all ranks together. Each rank has ceil(words / size) words, and the last words of the last
--- rank may be padding. bias: [V]. mass: [V], with the dtype of `share`. dloss: a power of two, to avoid underflow in
--- fp16 (default 1). The loss is multiplied by dloss before gradients are computed, and the gradients are divided by
--- dloss afterwards. hits: whether to count hits
---@return ps.Tensor of 0 dimensions
---@return ps.Tensor? hits int64 [2], if `hits` is true: the number of rows in which the first largest logit over all
--- words is the target's logit, and the number of rows that count
function Group:lm_loss(x, w, targets, share, options)
  local number, size, rank = attributes(self, "lm_loss", x)
  local given = caller.options(options, "group:lm_loss", LM_LOSS)
  return ops.parallel_lm_loss(x, tensor(w, "w", "lm_loss"), tensor(targets, "targets", "lm_loss"),
    tensor(share, "share", "lm_loss"), given.bias, given.mass, number, size, rank, 0, given.parted and 1 or 0, 0,
    whole(given.words, "words", "lm_loss"), given.dloss, given.hits and 1 or 0)
end

--- Returns the root's tensor on all ranks. On the other ranks, x must have the same shape. The gradient on the root is
--- the sum of all ranks' gradients. On the other ranks the gradient is zero.
---@param x ps.Tensor
---@param root? integer (default 0)
---@return ps.Tensor
function Group:copied(x, root)
  local number, size, rank = attributes(self, "copied", x)
  return ops.broadcast(x, number, size, rank, whole(root or 0, "root", "copied"))
end

-- -- for layers that the ranks share ----------------------------------------------------------------------------------
-- All ranks compute the same loss. Outside these layers, every tensor and its gradient are the same on all ranks.

--- Returns x itself, as the input of products whose outputs are divided among the ranks. The gradient is the sum of all
--- ranks' gradients, because each rank computes only its part of the gradient.
---@param x ps.Tensor equal on all ranks
---@return ps.Tensor
function Group:copy_to(x) return ops.copy_to_tp(x, attributes(self, "copy_to", x)) end

--- Returns the sum of all ranks' tensors. Used for the output of products whose inputs are divided among the ranks. The
--- gradient is passed on unchanged.
---@param x ps.Tensor
---@return ps.Tensor equal on all ranks
function Group:reduce_from(x) return ops.reduce_from_tp(x, attributes(self, "reduce_from", x)) end

--- Returns x itself. The gradient is unchanged on rank 0 and zero on the other ranks, so that a sum over the ranks
--- counts x only once.
---@param x ps.Tensor equal on all ranks
---@return ps.Tensor
function Group:counted_once(x) return ops.counted_once(x, attributes(self, "counted_once", x)) end

local function dimension(x, dim, call)
  local n = x:dim()
  if dim == nil then dim = -1 end
  if type(dim) ~= "number" or dim % 1 ~= 0 or dim < -n or dim >= n then
    error(("group:%s: dim is %s; x has %d dimensions"):format(call, tostring(dim), n))
  end
  return dim < 0 and dim + n or dim
end

-- Returns the dimensions 0 to n - 1 in order, except that dimension `from` is moved to position `to`.
local function moved(n, from, to)
  local axes = {}
  for i = 0, n - 1 do if i ~= from then axes[#axes + 1] = i end end
  table.insert(axes, to + 1, from)
  return axes
end

--- Divides x along a dimension into equal parts, one per rank, and returns this rank's part. The gradient is the
--- concatenation of all ranks' gradients.
---@param x ps.Tensor equal on all ranks
---@param dim? integer (default -1, the last dimension)
---@return ps.Tensor a view of x
function Group:scatter_to(x, dim)
  local number, size, rank = attributes(self, "scatter_to", x)
  dim = dimension(x, dim, "scatter_to")
  if dim == 0 then return ops.scatter_to_tp(x, number, size, rank) end
  local shape = x:shape()
  if shape[dim + 1] % size ~= 0 then
    error(("group:scatter_to: dimension %d of x, %d, cannot be cut into %d equal parts"):format(dim, shape[dim + 1],
      size))
  end
  shape[dim + 1] = shape[dim + 1] / size
  table.insert(shape, dim + 1, size)
  return ops.scatter_to_tp(x:reshape(shape):permute(moved(#shape, dim, 0)), number, size, rank):squeeze(0)
end

--- Concatenates the ranks' tensors along a dimension. The gradient is this rank's part of the result's gradient.
---@param x ps.Tensor
---@param dim? integer (default -1, the last dimension)
---@return ps.Tensor equal on all ranks
function Group:gather_from(x, dim)
  local number, size, rank = attributes(self, "gather_from", x)
  dim = dimension(x, dim, "gather_from")
  if dim == 0 then return ops.gather_from_tp(x, number, size, rank) end
  local shape, all = x:shape(), ops.gather_from_tp(x:unsqueeze(0), number, size, rank)
  shape[dim + 1] = shape[dim + 1] * size
  return all:permute(moved(#shape + 1, 0, dim)):reshape(shape)
end

return Group
