-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's layers (bmt.nn) that the ranks along tp share. Each rank has columns or rows of a linear layer, or rows of
-- a word embedding. By default, ranks also share the rows of the batch between layers
-- (tensor_parallel.sequence_parallel). Rows are then the first dimension. A layer gathers the rows before its product,
-- and scatters the sums after the product. If ranks do not share the rows, every rank has all rows. Without tp_size, a
-- rank has the whole layer and all rows.
--
-- Sizes: n rows, t ranks along tp.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local init = require "ps.nn.weights"
local mesh = require "ps.dist.mesh"
local modules = require "ps.bmt.modules"
local loss = require "ps.bmt.loss"
local session = require "ps.bmt.session"
local shard = require "ps.tensor.shard"
local error = caller.error

local parallel = {}

-- Divides a size by the number of ranks that share it.
local function part_of(size, what, call)
  caller.whole(size, call .. ": " .. what, 1)
  local t = mesh.size "tp"
  if size % t ~= 0 then error(("%s: %s is %d, which is not a multiple of tp_size = %d"):format(call, what, size, t)) end
  return size / t
end

-- Returns the number of pieces in which rows are exchanged during a matrix product.
local function pieces_of(n, key, call)
  if n ~= nil and (n < 1 or n > mesh.MOST_PIECES) then
    error(("%s: %s is %d; rows can be exchanged in 1 to %d pieces"):format(call, key, n, mesh.MOST_PIECES))
  end
  return n or session.need(call).pieces
end

-- Gathers the rows [n / t, ...] of all ranks to a tensor [n, ...]. Backward sums the gradient over the ranks and passes
-- each rank its own rows of the sum.
local function gathered(group, x)
  return session.need "bmt.nn".keep_gathered and group:gathered(x) or group:gathered_again(x)
end

-- -- products -------------------------------------------------------------------------------------------------------
local PRODUCT = { gather_input = "boolean", gather_output = "boolean", split_input = "boolean",
  reduce_output_type = "string", async_chunks = "whole" }
local REDUCES = { all_reduce = true, reduce_scatter = true }

--- Computes x weight^T + bias. Each rank has a shard of the outputs. With reduce_output_type, each rank has a shard of
--- the inputs instead.
---@param input ps.Tensor [n, inputs], or [n / t, inputs] with gather_input
---@param weight ps.Tensor this rank's shard: [outputs / t, inputs], or [outputs, inputs / t]
---@param bias? ps.Tensor [outputs / t]
---@param options? {gather_input?: boolean, gather_output?: boolean, split_input?: boolean, reduce_output_type?:
--- "all_reduce"|"reduce_scatter", async_chunks?: integer} gather_input: the input has only this rank's rows, which are
--- gathered. Otherwise the input has all rows and is equal on all ranks, and its gradient is summed over the ranks.
--- gather_output: the result has all outputs. split_input: the input has all columns, and this rank uses its own
--- columns. Otherwise, if the weight is a shard of the inputs, the input has only this rank's columns.
--- reduce_output_type: sums the results over the ranks. Each rank then gets all rows (all_reduce) or its own rows
--- (reduce_scatter). async_chunks: the number of pieces in which rows are exchanged during the product, if they are
--- gathered or scattered. The default is the number that tensor_parallel.tp_overlap_comm sets.
---@return ps.Tensor
function parallel.OpParallelLinear(input, weight, bias, options)
  local call = "bmt.nn.OpParallelLinear"
  options = caller.options(options, "bmt.nn.OpParallelLinear", PRODUCT)
  session.need(call)
  local pieces = pieces_of(options.async_chunks, "async_chunks", call)
  local reduce, group, x = options.reduce_output_type, mesh.group "tp", input
  if reduce then
    caller.one_of(reduce, REDUCES, call .. ": reduce_output_type")
    if bias ~= nil then error(call .. ": with reduce_output_type the bias would be added once per rank") end
    if options.gather_output then error(call .. ": reduce_output_type and gather_output exclude each other") end
  elseif options.split_input then error(call .. ": split_input needs reduce_output_type") end
  if not group then return native.ops.linear(x, weight, bias, nil, 1) end
  if reduce then
    if options.gather_input then x = group:gather_from(x, 0) end
    if options.split_input then x = group:scatter_to(x) end
    if reduce == "reduce_scatter" then return group:linear_scattered(x, weight, { pieces = pieces }) end
    return group:reduce_from(native.ops.linear(x, weight, nil, nil, 1))
  end
  local y
  if options.gather_input then
    y = group:gathered_linear(x, weight, bias, { pieces = pieces, keep = session.need(call).keep_gathered })
  else
    y = native.ops.linear(group:copy_to(x), weight, bias, nil, 1)
  end
  return options.gather_output and group:gather_from(y) or y
end

-- Creates a weight [outputs, inputs] and an optional bias. `outputs` and `inputs` are the sizes of this rank's part.
local function fill(self, outputs, inputs, given, weight, bias)
  weight.init_method, bias.init_method = init.xavier_normal_, init.zeros_
  local dtype = given.dtype or "fp32"
  self.weight = modules.DistributedParameter(create.zeros({ outputs, inputs }, { dtype = dtype }), weight)
  if given.bias ~= false then
    self.bias = modules.DistributedParameter(create.zeros({ outputs }, { dtype = dtype }), bias)
  end
end

-- Creates the parameters of a layer that is sharded over t ranks. If `dim` is 0, the outputs are sharded. If `dim` is
-- 1, the inputs are sharded. `chunks` is the name of the option for the number of pieces in which rows are exchanged.
-- Returns the number of pieces.
local function fill_part(self, inputs, outputs, dim, given, chunks)
  local call, sizes = "bmt.nn." .. self.class_name, { [0] = outputs, inputs }
  local pieces = pieces_of(given[chunks], chunks, call)
  sizes[dim] = part_of(sizes[dim], dim == 0 and "the number of outputs" or "the number of inputs", call)
  self.inputs, self.outputs = inputs, outputs
  fill(self, sizes[0], sizes[1], given, { tp_mode = true, tp_split_dim = dim },
    { tp_mode = true, tp_split_dim = dim == 0 and 0 or nil })
  return pieces
end

local function describe(self) return ("%d, %d, bias=%s"):format(self.inputs, self.outputs, self.bias ~= nil) end

local LINEAR = { bias = "boolean", dtype = "string" }

---@class ps.bmt.Linear: ps.bmt.DistributedModule
---@field weight ps.Tensor [outputs, inputs]
---@field bias? ps.Tensor [outputs]
local Linear = nn_module.class("Linear", modules.DistributedModule)
parallel.Linear = Linear

--- Creates a layer x weight^T + bias that is whole on all ranks. bmt.init_parameters fills the weight with
--- xavier_normal_, and the bias with zeros.
---@param inputs integer
---@param outputs integer
---@param options? {bias?: boolean, dtype?: string} bias: default true. dtype: default "fp32".
function Linear:init(inputs, outputs, options)
  options = caller.options(options, "bmt.nn.Linear", LINEAR)
  self.inputs, self.outputs = inputs, outputs
  fill(self, outputs, inputs, options, {}, {})
end

---@param input ps.Tensor [..., inputs]
---@return ps.Tensor [..., outputs]
function Linear:forward(input) return native.ops.linear(input, self.weight, self.bias, nil, 1) end

Linear.extra_repr = describe

local COLUMN = { bias = "boolean", dtype = "string", gather_output = "boolean", gather_input = "boolean",
  async_gather_chunks = "whole" }

---@class ps.bmt.ColumnParallelLinear: ps.bmt.DistributedModule
---@field weight ps.Tensor [outputs / t, inputs]
---@field bias? ps.Tensor [outputs / t]
local Column = nn_module.class("ColumnParallelLinear", modules.DistributedModule)
parallel.ColumnParallelLinear = Column

--- Creates a layer x weight^T + bias whose outputs are sharded over the ranks. bmt.init_parameters fills its parameters
--- as it does for Linear.
---@param inputs integer
---@param outputs integer a multiple of t
---@param options? {bias?: boolean, dtype?: string, gather_output?: boolean, gather_input?: boolean,
--- async_gather_chunks?: integer} gather_output: whether the result has all outputs (default false). gather_input:
--- whether the input has only this rank's rows (default true if ranks share the rows). Otherwise the input has all rows
--- and is equal on all ranks. async_gather_chunks: see async_chunks of OpParallelLinear.
function Column:init(inputs, outputs, options)
  options = caller.options(options, "bmt.nn.ColumnParallelLinear", COLUMN)
  local pieces = fill_part(self, inputs, outputs, 0, options, "async_gather_chunks")
  local gather = options.gather_input
  if gather == nil then gather = session.need("bmt.nn.ColumnParallelLinear").sequence end
  self.how = { gather_input = gather, gather_output = options.gather_output or false,
    async_chunks = pieces }
end

---@param input ps.Tensor [n / t, ..., inputs], or [n, ..., inputs] without gather_input
---@return ps.Tensor [n, ..., outputs / t], or [n, ..., outputs] with gather_output
function Column:forward(input) return parallel.OpParallelLinear(input, self.weight, self.bias, self.how) end

Column.extra_repr = describe

local ROW = { bias = "boolean", dtype = "string", split_input = "boolean", all_reduce_output = "boolean",
  async_chunks = "whole" }

---@class ps.bmt.RowParallelLinear: ps.bmt.DistributedModule
---@field weight ps.Tensor [outputs, inputs / t]
---@field bias? ps.Tensor [outputs]
local Row = nn_module.class("RowParallelLinear", modules.DistributedModule)
parallel.RowParallelLinear = Row

--- Creates a layer x weight^T + bias whose inputs are sharded over the ranks. All ranks have the whole bias.
--- bmt.init_parameters fills its parameters as it does for Linear.
---@param inputs integer a multiple of t
---@param outputs integer
---@param options? {bias?: boolean, dtype?: string, split_input?: boolean, all_reduce_output?: boolean, async_chunks?:
--- integer} split_input: if true, the input has this rank's rows and all columns, and is gathered and split. If false
--- (default), the input has all rows and this rank's columns. all_reduce_output: whether each rank gets all rows of the
--- result. If ranks share the rows, the default is false, and each rank gets its own rows. async_chunks: see
--- OpParallelLinear.
function Row:init(inputs, outputs, options)
  options = caller.options(options, "bmt.nn.RowParallelLinear", ROW)
  local pieces = fill_part(self, inputs, outputs, 1, options, "async_chunks")
  local whole, split = options.all_reduce_output, options.split_input
  if whole == nil then whole = not session.need("bmt.nn.RowParallelLinear").sequence end
  self.how = { gather_input = split, split_input = split, async_chunks = pieces,
    reduce_output_type = whole and "all_reduce" or "reduce_scatter" }
  if self.bias ~= nil and not whole and mesh.group "tp" then shard.set_partial(self.bias) end
end

---@param input ps.Tensor [n, ..., inputs / t], or [n / t, ..., inputs] with split_input
---@return ps.Tensor [n / t, ..., outputs], or [n, ..., outputs] with all_reduce_output
function Row:forward(input)
  local y, bias = parallel.OpParallelLinear(input, self.weight, nil, self.how), self.bias
  return bias ~= nil and y + bias or y
end

Row.extra_repr = describe

-- -- the vocabulary -------------------------------------------------------------------------------------------------
local VOCABULARY = { dtype = "string", init_mean = "number", init_std = "number" }

---@class ps.bmt.VPEmbedding: ps.bmt.DistributedModule
---@field weight ps.Tensor [words / t, width]
local Vocabulary = nn_module.class("VPEmbedding", modules.DistributedModule)
parallel.VPEmbedding = Vocabulary

--- Creates an embedding whose vocabulary is sharded over the ranks. bmt.init_parameters fills it from a normal
--- distribution.
---@param words integer the vocabulary size, a multiple of t
---@param width integer
---@param options? {dtype?: string, init_mean?: number, init_std?: number} dtype: default "fp16". init_mean: default 0.
--- init_std: default 1.
function Vocabulary:init(words, width, options)
  local call = "bmt.nn.VPEmbedding"
  options = caller.options(options, "bmt.nn.VPEmbedding", VOCABULARY)
  local own = part_of(words, "the number of words", call)
  self.words, self.width, self.sequence = words, width, session.need(call).sequence
  self.weight = modules.DistributedParameter(create.zeros({ own, width }, { dtype = options.dtype or "fp16" }), {
    init_method = modules.ParameterInitializer(init.normal_, options.init_mean or 0, options.init_std or 1),
    tp_mode = true, tp_split_dim = 0 })
end

-- Returns the embedding vectors for indices. If ranks share the rows, each rank has its own indices. All ranks have the
-- same number of indices.
local function look_up(self, group, index)
  local weight = self.weight
  local function own(x) return native.ops.embedding(weight, x, nil, group:rank() * weight:size(0), self.words) end
  if not self.sequence then return group:reduce_from(own(index)) end
  local shape = index:shape()
  shape[1] = shape[1] * group:size()
  local all = group:all_gather(create.empty(shape, { dtype = index:dtype(), device = index:device() }),
    index:contiguous())
  return group:scattered(own(all))
end

--- Returns the embedding vectors for indices. With projection, returns the logits for this rank's shard of the
--- vocabulary.
---@param x ps.Tensor without projection: indices [...], or only the indices of this rank's rows if ranks share the
--- rows. With projection: [n, width] or [B, T, width], or [n / t, width] or [B, T / t, width] if ranks share the rows
---@param projection? boolean whether to compute logits (default false)
---@return ps.Tensor [..., width], or [n, words / t] or [B, T, words / t] with projection
function Vocabulary:forward(x, projection)
  local group = mesh.group "tp"
  if not projection then
    if group then return look_up(self, group, x) end
    return functional.embedding(x, self.weight)
  end
  if group and not self.sequence then x = group:copy_to(x)
  elseif group and x:dim() == 3 then x = gathered(group, x:transpose(0, 1):contiguous()):transpose(0, 1):contiguous()
  elseif group then x = gathered(group, x) end
  return native.ops.linear(x, self.weight, nil, nil, 1)
end

function Vocabulary:extra_repr() return ("%d, %d"):format(self.words, self.width) end

local CROSS_ENTROPY = { ignore_index = "whole", reduction = "string" }

--- Creates a bmt.loss.FusedCrossEntropy with parallel = true, for logits that are sharded along the vocabulary.
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum"|"none"} ignore_index: default -100. reduction:
--- default "mean".
---@return ps.bmt.FusedCrossEntropy
function parallel.ParallelCrossEntropy(options)
  options = caller.options(options, "bmt.nn.ParallelCrossEntropy", CROSS_ENTROPY)
  return loss.FusedCrossEntropy { ignore_index = options.ignore_index, reduction = options.reduction, parallel = true }
end

return parallel
