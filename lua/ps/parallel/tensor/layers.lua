-- SPDX-License-Identifier: BSD-3-Clause
-- Layers that the ranks of a group share (tensor parallelism): ColumnParallelLinear, RowParallelLinear,
-- VocabParallelEmbedding, ParallelLMHead and ParallelCrossEntropy (Shoeybi et al. 2019, "Megatron-LM"). A Region
-- (region.lua) says whether the ranks share the rows between a model's layers.
--
-- On each rank, a column layer has a part of the outputs, and a row layer has a part of the inputs. In attention and
-- MLPs, a row layer follows a column layer. Such a pair communicates only once, after the row layer, when the ranks'
-- products are summed.
--
-- Sizes: B samples, T positions, t ranks.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"
local caller = require "ps.core.caller"
local loss_weight = require "ps.core.loss_weight"
local nn_module = require "ps.nn.module"
local embedding = require "ps.nn.embedding"
local linear = require "ps.nn.linear"
local parts = require "ps.nn.parts"
local shard = require "ps.tensor.shard"
local region_file = require "ps.parallel.tensor.region"
local error = caller.error
local Region, flat = region_file.Region, region_file.flat
local all_dims, own_dims = region_file.all_dims, region_file.own_dims

-- -- shared functions -----------------------------------------------------------------------------------------------
-- Returns the region in a layer's options. If the options have only a group, returns a new region in which rows are not
-- shared.
local function region_of(options, call)
  local region = options.region
  if region == nil and options.group == nil then error(call .. ": region, or group, is missing") end
  if region ~= nil and options.group ~= nil then error(call .. ": region has a group; give one of the two") end
  if region ~= nil and getmetatable(region) ~= Region then error(call .. ": region is not an nn.Region") end
  return region or Region.new(options.group)
end

-- Adds a parameter `key` to `self`. The parameter is this rank's shard of the parameter `key` of the layer `whole`.
local function take(self, whole, key, cut, call)
  local t = whole[key]
  if t == nil then return end
  if not cut then
    self:param(key, t)
    return
  end
  cut.index, cut.count, cut.full_shape = self.region.rank, self.region.size, t:shape()
  local desc = shard.new(cut, call .. ": " .. key)
  self:param(key, shard.of_whole(desc, t))
  shard.set(self[key], desc)
end

local function describe(self, ...) return ("%s, %d ranks"):format(string.format(...), self.region.size) end

-- -- products -------------------------------------------------------------------------------------------------------
local COMMON = { region = "table", group = "table", out_in = "boolean", bias = "boolean", std = "number",
  dtype = "string", device = "string", parameters = "boolean" }
local function with(more)
  for name, kind in pairs(COMMON) do more[name] = kind end
  return more
end
local COLUMN = with { gather_input = "boolean", gather_output = "boolean", blocks = "whole" }
local ROW = with { split_input = "boolean", all_reduce_output = "boolean" }

local function begin(self, inputs, outputs, given, call)
  caller.whole(inputs, call .. ": the number of inputs")
  caller.whole(outputs, call .. ": the number of outputs")
  rawset(self, "region", region_of(given, call))
  self.inputs, self.outputs, self.out_in = inputs, outputs, given.out_in == false and 0 or 1
end

-- Returns the whole layer that a single rank would have.
local function whole_of(self, of)
  local given = { std = of.std, dtype = of.dtype, device = of.device }
  if self.out_in == 0 then
    local whole = linear.Conv1D(self.inputs, self.outputs, given)
    if of.bias == false then whole.bias = nil end
    return whole
  end
  given.bias = of.bias
  return linear.Linear(self.inputs, self.outputs, given)
end

---@class ps.nn.ColumnParallelLinear: ps.nn.Module
---@field weight ps.Tensor [outputs / t, inputs], or [inputs, outputs / t]
---@field bias? ps.Tensor [outputs / t]
local Column = nn_module.class("ColumnParallelLinear")
Column.unscoped = true

--- Creates a layer that computes x weight^T + bias, whose outputs are split among the ranks. Weight and bias are this
--- rank's shards of the parameters of nn.Linear, or of nn.Conv1D if out_in is false.
---@param inputs integer
---@param outputs integer must be divisible by t; the size of each block must also be divisible by t
---@param options {region?: ps.nn.Region, group?: ps.Group, out_in?: boolean, bias?: boolean, std?: number, dtype?:
--- string, device?: string, blocks?: integer, gather_input?: boolean, gather_output?: boolean, parameters?: boolean}
--- region or group: the ranks. blocks: the number of equal blocks in the outputs (default 1). A rank has a part of each
--- block. gather_input: if true, x has this rank's rows, and the layer gathers the rows. If false, x is a result of
--- region:gather. If nil, the region decides. gather_output: whether all ranks get all outputs. parameters: if false,
--- the caller sets the layer's weight and bias
function Column:init(inputs, outputs, options)
  local call = "nn.ColumnParallelLinear"
  options = caller.options(options, call, COLUMN)
  begin(self, inputs, outputs, options, call)
  self.gather_input, self.gather_output = options.gather_input, options.gather_output or false
  local blocks = options.blocks or 1
  if self.gather_output and blocks > 1 then
    error(("%s: gather_output would mix the parts of %d blocks"):format(call, blocks))
  end
  if options.parameters == false then return end
  local whole = whole_of(self, options)
  take(self, whole, "weight", { dim = self.out_in == 1 and 0 or 1, blocks = blocks }, call)
  take(self, whole, "bias", { dim = 0, blocks = blocks }, call)
end

--- Returns this rank's outputs for all rows.
---@param x ps.Tensor [B T / t, inputs] if the ranks share the region's rows, otherwise [..., inputs]
---@return ps.Tensor [B, T, outputs / t], or [..., outputs / t]; with gather_output, the last dimension is `outputs`
function Column:forward(x)
  local region, gather = self.region, self.gather_input
  local begun = region.begun[self]
  local y
  if begun then
    region.begun[self] = nil
    if not rawequal(x, begun.x) then
      error("nn.ColumnParallelLinear: its input is not the input of the other columns in the same list "
        .. "`gather` of the model; use gather = true for columns with different inputs (docs/tensor_parallel.md)")
    end
    y = begun.y
  elseif gather or gather == nil and region:has_part(x) then
    y = region.group:gathered_linear(x, self.weight, self.bias,
      { out_in = self.out_in == 1, pieces = region.pieces, keep = region.keep })
  else
    if gather == nil then x = region.group:copy_to(x) end
    y = native.ops.linear(x, self.weight, self.bias, nil, self.out_in)
  end
  if region.on and y:numel() == region.rows * y:size(-1) then y = all_dims(region, y) end
  return self.gather_output and region.group:gather_from(y) or y
end

--- Computes up to three column layers that have the same input. The ranks share the rows of the input. The rows are
--- exchanged once, while the products of all layers are computed. The next forward of a layer returns the outputs that
--- were computed here.
---@param columns ps.nn.ColumnParallelLinear[] 1 to 3 layers of this region, in the order in which their forwards are
--- called
---@param x ps.Tensor [B T / t, inputs]
function Region:begin_columns(columns, x)
  local first, layers = columns[1], {}
  for i, column in ipairs(columns) do
    if column.out_in ~= first.out_in then
      error("region:begin_columns: some weights have the layout of nn.Linear and others that of nn.Conv1D; "
        .. "columns of one input need one layout")
    end
    layers[i] = { column.weight, column.bias }
  end
  local y = { self.group:gathered_linears(x, layers,
    { out_in = first.out_in == 1, pieces = self.pieces, keep = self.keep }) }
  for i, column in ipairs(columns) do self.begun[column] = { x = x, y = y[i] } end
end

function Column:extra_repr() return describe(self, "%d, %d", self.inputs, self.outputs) end

---@class ps.nn.RowParallelLinear: ps.nn.Module
---@field weight ps.Tensor [outputs, inputs / t], or [inputs / t, outputs]
---@field bias? ps.Tensor [outputs]
local Row = nn_module.class("RowParallelLinear")
Row.unscoped = true

--- Creates a layer that computes x weight^T + bias, whose inputs are split among the ranks. The result is the sum of
--- the ranks' products, plus bias and residual. The weight is this rank's shard of the weight of nn.Linear, or of
--- nn.Conv1D if out_in is false. All ranks have the whole bias. If each rank gets only its own rows of the result, the
--- gradient of the bias on a rank is computed from these rows only (shard.is_partial).
---@param inputs integer must be divisible by t
---@param outputs integer
---@param options {region?: ps.nn.Region, group?: ps.Group, out_in?: boolean, bias?: boolean, std?: number, dtype?:
--- string, device?: string, split_input?: boolean, all_reduce_output?: boolean, parameters?: boolean} region or group:
--- the ranks. split_input: whether x has all inputs; this rank then uses its own part. all_reduce_output: if true, all
--- ranks get all rows of the result; if false, each rank gets its own rows, which are one of t equal parts of the first
--- dimension; if nil, the region decides. parameters: if false, the caller sets the layer's weight and bias
function Row:init(inputs, outputs, options)
  local call = "nn.RowParallelLinear"
  options = caller.options(options, call, ROW)
  begin(self, inputs, outputs, options, call)
  self.split_input, self.all_reduce_output = options.split_input or false, options.all_reduce_output
  if options.parameters == false then return end
  local whole = whole_of(self, options)
  take(self, whole, "weight", { dim = self.out_in == 1 and 1 or 0 }, call)
  take(self, whole, "bias", nil, call)
  local rows = self.all_reduce_output == false or self.all_reduce_output == nil and self.region.wanted
  if rows and self.bias ~= nil then shard.set_partial(self.bias) end
end

--- Returns the sum of the ranks' products, plus bias and residual.
---@param x ps.Tensor [..., inputs / t], or [..., inputs] with split_input
---@param residual? ps.Tensor has the result's shape
---@return ps.Tensor [B T / t, outputs] if the ranks share the region's rows, otherwise [..., outputs]
function Row:forward(x, residual)
  local region, whole = self.region, self.all_reduce_output
  if self.split_input then x = region.group:scatter_to(x) end
  local in_region = whole == nil and region.on       -- y has this rank's rows of [B T, outputs]
  if whole == nil then whole = not region.on end
  local y
  if whole then
    y = region.group:reduce_from(native.ops.linear(x, self.weight, nil, nil, self.out_in))
  else
    y = region.group:linear_scattered(x, self.weight,
      { out_in = self.out_in == 1, pieces = region.pieces, flat = in_region })
    if in_region then y = own_dims(region, y) end
  end
  local bias = self.bias
  if bias ~= nil then
    y = y + (whole and shard.is_partial(bias) and region.group:counted_once(bias) or bias)
  end
  return residual ~= nil and y + residual or y
end

function Row:extra_repr() return describe(self, "%d, %d", self.inputs, self.outputs) end

-- -- the vocabulary -------------------------------------------------------------------------------------------------
-- Describes how the rows of a vocabulary of n words are split. The number of rows is padded to a multiple of t.
local function rows_of(n, region) return { dim = 0, padded = -n % region.size } end

---@class ps.nn.VocabParallelEmbedding: ps.nn.Module
---@field weight ps.Tensor [ceil(rows / t), width]
local Vocabulary = nn_module.class("VocabParallelEmbedding")
Vocabulary.unscoped = true

local VOCABULARY = { region = "table", group = "table", std = "number", padding_idx = "whole", dtype = "string",
  device = "string", enter = "boolean", parameters = "boolean" }

--- Creates an embedding that the ranks share. The weight contains this rank's rows of the weight of nn.Embedding. Rows
--- of padding after the last word are 0.
---@param rows integer V, the number of rows
---@param width integer C
---@param options {region?: ps.nn.Region, group?: ps.Group, std?: number, padding_idx?: integer, dtype?: string,
--- device?: string, enter?: boolean, parameters?: boolean} region or group: the ranks. std, padding_idx: as in
--- nn.Embedding. enter: whether the ranks share the rows of the result, if the region allows it. parameters: if false,
--- the caller sets the layer's weight
function Vocabulary:init(rows, width, options)
  local call = "nn.VocabParallelEmbedding"
  options = caller.options(options, call, VOCABULARY)
  rawset(self, "region", region_of(options, call))
  self.rows, self.width, self.padding_idx, self.enter = rows, width, options.padding_idx, options.enter or false
  if options.parameters == false then return end
  local whole = embedding.Embedding(rows, width, { std = options.std, padding_idx = options.padding_idx,
    dtype = options.dtype, device = options.device })
  take(self, whole, "weight", rows_of(rows, self.region), call)
end

--- Returns the embedding's rows at the given indices.
---@param index ps.Tensor integers [B, T] if the ranks start to share the region's rows here, otherwise [...]
---@return ps.Tensor [B T / t, width], or [..., width]
function Vocabulary:forward(index)
  local region, weight = self.region, self.weight
  local y = native.ops.embedding(weight, index, self.padding_idx, region.rank * weight:size(0), self.rows)
  if self.enter then
    region_file.set_rows(region, index:shape())
    return region:reduce(y)
  end
  return region.group:reduce_from(y)
end

function Vocabulary:extra_repr() return describe(self, "%d, %d", self.rows, self.width) end

---@class ps.nn.ParallelLMHead: ps.nn.Module
---@field weight ps.Tensor [ceil(words / t), width]
---@field bias? ps.Tensor [ceil(words / t)]
local Head = nn_module.class("ParallelLMHead")
Head.unscoped = true

local HEAD = { region = "table", group = "table", std = "number", dtype = "string", device = "string", tied = "table",
  biased = "table", parameters = "boolean" }

--- Creates the head of a language model (nn.LMHead). Its logits are split among the ranks by words. With `tied`, the
--- head uses the weight of a token embedding. The weight is then still a parameter of the embedding.
---@param width integer C
---@param words integer V
---@param options {region?: ps.nn.Region, group?: ps.Group, std?: number, dtype?: string, device?: string, tied?:
--- ps.nn.VocabParallelEmbedding, biased?: ps.nn.Module, parameters?: boolean} region or group: the ranks. std: as in
--- nn.LMHead. biased: a module whose `bias` [ceil(V / t)] is added to the logits. parameters: if false, the caller sets
--- the head's weight, and its bias if it has one
function Head:init(width, words, options)
  local call = "nn.ParallelLMHead"
  options = caller.options(options, call, HEAD)
  rawset(self, "region", region_of(options, call))
  self.inputs, self.outputs = width, words
  if options.biased then rawset(self, "biased", options.biased) end
  if options.tied then
    -- `tied` is not registered as a child module, because the parameter must have only one name.
    rawset(self, "tied", options.tied)
    return
  end
  if options.parameters == false then return end
  local whole = linear.LMHead(width, words, { std = options.std, dtype = options.dtype, device = options.device })
  take(self, whole, "weight", rows_of(words, self.region), call)
end

-- Returns the weight [ceil(V / t), C].
local function weight_of(head)
  local tied = rawget(head, "tied")
  return tied and tied.weight or parts.weight(head)
end

-- Returns the bias [ceil(V / t)], or nil.
local function bias_of(head) return (rawget(head, "biased") or head).bias end

--- Returns the logits of all words.
---@param x ps.Tensor [B T / t, C] if the ranks share the region's rows, otherwise [..., C]
---@return ps.Tensor [B, T, V], or [..., V]
function Head:forward(x)
  local region = self.region
  local y = region.group:gather_from(native.ops.linear(region:gather(x), weight_of(self), bias_of(self), nil, 1))
  y = y:narrow(-1, 0, self.outputs)
  return region.on and y:numel() == region.rows * y:size(-1) and all_dims(region, y) or y
end

-- Returns a bias [per] for this rank's columns of logits. The bias is -1e30 for columns after the last of `total`
-- words, and 0 for all other columns. Returns nil if all columns are words.
local function padding_of(total, first, per, where)
  local words = math.max(0, math.min(per, total - first))
  if words == per then return nil end
  local low = create.zeros({ per }, where)
  scope.no_grad(function() low:narrow(0, words, per - words):fill_(-1e30) end)
  return low
end

-- Raises an error if a target that `counts` marks is outside [0, total), like the op lm_loss.
local function check_targets(targets, counts, total, call)
  -- The lookup raises an error for an index outside [0, total).
  local known = tensors.where(counts, targets, 0)
  local ok, problem = pcall(native.ops.embedding, create.zeros({ 1, 1 }, { device = targets:device() }), known, -1,
    total,
    total)
  if ok then return end
  for row, target in ipairs(problem.name == "ERANGE" and known:reshape(-1):tolist() or {}) do
    if target < 0 or target >= total then
      problem.msg = ("%s: target %d of row %d is outside the vocabulary [0, %d)"):format(call, target, row - 1, total)
      problem.op = nil                                             -- the caller did not request this lookup
      break
    end
  end
  error(problem, 0)
end

-- Returns a bool [N] that marks the targets which are not ignored. Raises an error if a marked target is outside
-- [0, total).
local function counted(targets, ignore, total, call)
  local counts = targets:ne(ignore)
  check_targets(targets, counts, total, call)
  return counts
end

-- Returns this rank's part [per] of a tensor [V] with a value for each word. Values after the last word are 0.
local function own_classes(t, first, per)
  local from, words = math.min(first, t:numel()), t:numel()
  local n = math.min(per, words - from)
  if n == per then return t:narrow(0, from, n) end
  local zeros = create.zeros({ per - n }, { dtype = t:dtype(), device = t:device() })
  return n == 0 and zeros or tensors.cat({ t:narrow(0, from, n), zeros }, 0)
end

-- Returns the weights [N] of the targets' classes, and the label smoothing. With smoothing, also returns this rank's
-- class weights [per] and the sum of all class weights.
local function weights_of(chosen, targets, counts, words, first, per, dtype, call)
  local smooth, weight, share = chosen.label_smoothing or 0, chosen.weight, counts
  if not (smooth >= 0 and smooth <= 1) then
    error(("%s: label_smoothing = %.14g; it must be in [0, 1]"):format(call, smooth))
  end
  if weight ~= nil then
    if not (weight:dim() == 1 and weight:size(0) == words) then
      error(("%s: weight is [%s]; it must have one value for each of %d classes"):format(
        call, table.concat(weight:shape(), ", "), words))
    end
    weight = weight:detach():to(dtype)
    share = weight:gather(0, targets:clamp(0, words - 1)) * counts
  end
  if smooth == 0 then return share, 0 end
  if weight == nil then weight = create.ones({ words }, { dtype = dtype, device = targets:device() }) end
  return share, smooth, own_classes(weight, first, per), weight:sum()
end

local LOSS = { ignore_index = "whole", reduction = "string", weight = "tensor", label_smoothing = "number" }
local MEAN_OR_SUM = { mean = true, sum = true }

-- Returns the loss's factors [3, N]. For each row, factor 0 multiplies the log-sum-exp, factor 1 multiplies the
-- target's logit, and factor 2 multiplies the sum of logits. The parameters are:
--   share    [N], the weights of the targets' classes, 0 for ignored rows
--   counts   [N], whether the target is not ignored
--   smooth   the label smoothing
--   mass     the sum of all class weights, or nil without smoothing
--   words    the number of classes
local function coefficients(share, counts, smooth, mass, words, reduction)
  local one, some = share * (1 - smooth), counts * (smooth / words)
  local all = mass and one + some * mass or one
  local rows = tensors.cat({ all:reshape(1, -1), one:reshape(1, -1), some:reshape(1, -1) }, 0)
  if reduction == "sum" then return rows end
  local sum = share:sum()
  return rows / tensors.where(sum:eq(0), 1, sum)  -- if there are no rows, the mean is 0
end

-- Returns a power of two that scales gradients in fp16, like the op lm_loss. Without it, the gradients of a mean over
-- many rows would underflow.
local function scale_of(dtype, reduction, N)
  local scale = 1
  while dtype == "fp16" and reduction == "mean" and 2 * scale <= N do scale = 2 * scale end
  return scale
end

--- Returns the mean cross entropy of the logits. Logits and their gradients are computed for one panel of rows at a
--- time, so they are never all in memory. No logits are kept for backward. For each row, the ranks exchange the largest
--- logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3). With label smoothing, the
--- ranks also exchange the sum of all logits. Rows that the ranks share are gathered once.
---@param x ps.Tensor [B T / t, C] if the ranks share the region's rows, otherwise [..., C]
---@param targets ps.Tensor integers [B, T], or [...]; targets of -100 are ignored
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum", weight?: ps.Tensor, label_smoothing?: number} the
--- options of F.lm_loss. weight [V] must be equal on all ranks
---@return ps.Tensor of 0 dimensions
function Head:loss(x, targets, options)
  local call = "nn.ParallelLMHead's loss"
  options = caller.options(options, call, LOSS)
  local reduction = options.reduction or "mean"
  caller.one_of(reduction, MEAN_OR_SUM, call .. ": reduction")
  caller.tensor(targets, call, "targets")
  local region, w, words = self.region, weight_of(self), self.outputs
  local per, N, dtype = w:size(0), targets:numel(), w:dtype() == "fp64" and "fp64" or "fp32"
  local given = targets
  targets = targets:reshape(N):to "int64"
  local rows, mass = scope.no_grad(function()
    local counts = counted(targets, options.ignore_index or -100, words, call):to(dtype)
    local share, smooth, own, all = weights_of(options, targets, counts, words, region.rank * per, per, dtype, call)
    return coefficients(share, counts, smooth, all, words, reduction), own
  end)
  local parted = region:has_part(x)
  x = parted and flat(x) or x:reshape(N, -1)
  local loss, hits = region.group:lm_loss(x, w, targets, rows, { bias = bias_of(self),
    mass = mass, words = words, parted = parted, dloss = scale_of(w:dtype(), reduction, N),
    hits = loss_weight.wants_hits() == 1 })
  return loss_weight.note(loss, reduction, given, options.ignore_index, options.weight, hits)
end

function Head:extra_repr() return describe(self, "%d, %d", self.inputs, self.outputs) end

---@class ps.nn.ParallelCrossEntropy: ps.nn.Module
local CrossEntropy = nn_module.class("ParallelCrossEntropy")
CrossEntropy.unscoped = true

local CROSS_ENTROPY = { region = "table", group = "table", words = "whole", ignore_index = "whole",
  reduction = "string" }
local REDUCTIONS = { none = true, mean = true, sum = true }

--- Creates a cross entropy loss for logits that are split among the ranks by words. The ranks exchange three numbers
--- per row.
---@param options {region?: ps.nn.Region, group?: ps.Group, words?: integer, ignore_index?: integer, reduction?:
--- "mean"|"sum"|"none"} region or group: the ranks. words: the number of words V (default: t times the number of logits
--- of a rank); columns after V are padding. ignore_index, reduction: as in F.cross_entropy
function CrossEntropy:init(options)
  local call = "nn.ParallelCrossEntropy"
  options = caller.options(options, call, CROSS_ENTROPY)
  rawset(self, "region", region_of(options, call))
  self.words, self.ignore_index = options.words, options.ignore_index or -100
  self.reduction = options.reduction or "mean"
  caller.one_of(self.reduction, REDUCTIONS, call .. ": reduction")
end

-- Returns statistics [3, n] of logits [n, v]: this rank's largest logit, the sum of exp(logit - largest), and the
-- target's logit. If another rank has the target's logit, the third number is 0.
local function stats_of(logits, low, own, here, dtype)
  logits = logits:to(dtype)
  logits = low and logits + low or logits
  local top = logits:detach():amax(-1, true)
  local sum = (logits - top):exp():sum(-1)
  local target = logits:gather(-1, own:reshape(-1, 1)):reshape(-1) * here
  return tensors.cat({ top:reshape(1, -1), sum:reshape(1, -1), target:reshape(1, -1) }, 0)
end

-- Returns the losses [N] of the rows, computed from this rank's statistics `mine` [3, N]. Where `counts` is 0, the loss
-- is 0.
local function losses_of(group, mine, counts)
  local all = group:gather_from(mine:reshape(1, 3, -1):contiguous(), 0)                 -- [t, 3, N]
  local top = all:select(1, 0):detach()                                                 -- [t, N]
  local most = top:amax(0, true)
  local sum = (all:select(1, 1) * (top - most):exp()):sum(0)
  return (sum:log() + most:reshape(-1) - all:select(1, 2):sum(0)) * counts
end

-- Returns two counts as int64 [2], or nil if they were not requested. The first is the number of targets that are not
-- ignored and are the first word with the largest logit. The second is the number of targets that are not ignored. For
-- these counts, the ranks exchange two numbers per row, in addition to the numbers for the loss.
local function hits_of(group, logits, low, own, here, counts, dtype)
  if loss_weight.wants_hits() == 0 then return nil end
  return scope.no_grad(function()
    logits = logits:to(dtype)
    logits = low and logits + low or logits
    local first = logits:argmax(-1, true)
    local top, is_own = logits:gather(-1, first):reshape(1, -1), first:reshape(-1):eq(own):to(dtype) * here
    local all = group:gather_from(tensors.cat({ top, is_own:reshape(1, -1) }, 0):reshape(1, 2, -1):contiguous(), 0)
    local tops, flags = all:select(1, 0):contiguous(), all:select(1, 1):contiguous()    -- [t, N]
    local rank = tops:argmax(0, true)
    local hit = flags:gather(0, rank) * tops:gather(0, rank):isfinite():to(dtype) * counts
    return tensors.cat({ hit:ne(0):sum():reshape(1), counts:ne(0):sum():reshape(1) }, 0)
  end)
end

local function reduced(losses, share, reduction)
  if reduction == "sum" then return losses:sum() end
  local sum = share:sum()
  -- If there are no rows, the mean is 0.
  return losses:sum() / tensors.where(sum:eq(0), 1, sum)
end

--- Returns the loss, which is equal on all ranks. In backward, each rank computes the gradient of its own logits.
---@param logits ps.Tensor [..., ceil(V / t)], the logits of this rank's words
---@param targets ps.Tensor integers [...], equal on all ranks
---@return ps.Tensor of 0 dimensions, or [...] with reduction "none"
function CrossEntropy:forward(logits, targets)
  caller.tensor(logits, "nn.ParallelCrossEntropy", "logits")
  caller.tensor(targets, "nn.ParallelCrossEntropy", "targets")
  local region, per, N = self.region, logits:size(-1), targets:numel()
  local total, first = self.words or per * region.size, region.rank * per
  if math.ceil(total / region.size) ~= per then
    error(("nn.ParallelCrossEntropy: %d words shared by %d ranks do not give %d logits per "
      .. "rank"):format(total, region.size, per))
  end
  local dtype = logits:dtype() == "fp64" and "fp64" or "fp32"
  local places = targets:reshape(N):to "int64"
  local counts = counted(places, self.ignore_index, total, "nn.ParallelCrossEntropy")
  local own = places - first
  local here = own:ge(0):logical_and(own:lt(per)):logical_and(counts):to(dtype)
  counts = counts:to(dtype)
  local low = padding_of(total, first, per, { dtype = dtype, device = logits:device() })
  local mine = scope.recompute(stats_of, logits:reshape(N, per), low, own:clamp(0, per - 1), here, dtype)
  local losses = losses_of(region.group, mine, counts)
  if self.reduction == "none" then return losses:reshape(targets:shape()) end
  return loss_weight.note(reduced(losses, counts, self.reduction), self.reduction, targets, self.ignore_index, nil,
    hits_of(region.group, logits:reshape(N, per), low, own, here, counts, dtype))
end

return { Region = Region, ColumnParallelLinear = Column, RowParallelLinear = Row, VocabParallelEmbedding = Vocabulary,
  ParallelLMHead = Head, ParallelCrossEntropy = CrossEntropy }
