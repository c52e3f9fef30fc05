-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's lists of blocks: TransformerBlockList and PipelineTransformerBlockList. The blocks of the second list are
-- assigned to pipeline stages.
--
-- In a model with stages, each rank has its own rows of the batch, and only the blocks of its own stage. A call of a
-- pipeline list gathers the rows of all stages and splits these rows into micro-batches. Each stage runs its blocks on
-- each micro-batch and sends the result to the next stage. At the end, each rank gets the results for its own rows from
-- the last stage.
--
-- All these exchanges are ops, so backward sends gradients in the opposite direction (GPipe, Huang et al. 2019).
-- Backward begins with the last micro-batch and ends with the first micro-batch. Each micro-batch passes from the last
-- stage to the first stage. Parameters outside the list are on all stages, and their gradients are summed over the
-- stages (src/engine/ties.c).
--
-- Sizes: n rows per rank, p stages, m micro-batches.
local create = require "ps.tensor.create"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"
local caller = require "ps.core.caller"
local container = require "ps.nn.container"
local nn_module = require "ps.nn.module"
local module_lists = require "ps.core.lists"
local modules = require "ps.bmt.modules"
local session = require "ps.bmt.session"
local error = caller.error

local lists = {}

---@class ps.bmt.TransformerBlockList: ps.nn.ModuleList
---@field num_hidden integer
---@field dropouts? integer number of dropout indices that are reserved for each block. The indices of block i start at
--- this number times i. nil if the dropouts of all blocks are numbered consecutively
local TransformerBlockList = nn_module.class("TransformerBlockList", container.ModuleList)
lists.TransformerBlockList = TransformerBlockList

local LIST = { num_hidden = "whole" }

--- Creates a list of blocks that is called as a whole. Items are indexed from 0. A module that is not a block becomes a
--- block.
---@param list ps.nn.Module[]
---@param options? {num_hidden?: integer} number of results of a block that are the first arguments of the next block
--- (default 1)
function TransformerBlockList:init(list, options)
  if nn_module.is_module(list) and not module_lists.is_list(list) then
    error(("bmt.%s takes one list of blocks: %s { a, b }, not %s(a, b)"):format(self.class_name, self.class_name,
      self.class_name))
  end
  if module_lists.is_list(list) then list = { unpack(list) } end
  options = caller.options(options, "bmt." .. self.class_name, LIST)
  caller.typed(list, "table", "bmt." .. self.class_name .. ": its list of blocks")
  self.num_hidden = caller.whole(options.num_hidden or 1, "bmt." .. self.class_name .. ": num_hidden", 1)
  if #list == 0 then error("bmt." .. self.class_name .. " needs at least one block") end
  container.ModuleList.init(self, list)
  for _, module in ipairs(list) do if not modules.is_block(module) then modules.CheckpointBlock(module) end end
end

-- Returns whether a call's last argument is a table of options. Otherwise it is an argument for the blocks.
local function are_options(value)
  if type(value) ~= "table" or getmetatable(value) ~= nil then return false end
  for key in pairs(value) do
    if type(key) == "string" and (key:match "^return_hidden" or key == "batch_related") then return true end
  end
  return false
end

-- Splits the arguments of a call into the arguments for the blocks, and the table of options at the end.
local function arguments(...)
  local args, options = { n = select("#", ...), ... }, {}
  if are_options(args[args.n]) then options, args[args.n], args.n = args[args.n], nil, args.n - 1 end
  return args, options
end

local CALL = { return_hidden_states = "boolean", batch_related = "table" }

local function append(list, from, first)
  for i = first, from.n do
    list.n = list.n + 1
    list[list.n] = from[i]
  end
  return list
end

local function pack(...) return { n = select("#", ...), ... } end

--- Applies the blocks one after another. The first num_hidden results of a block are the first arguments of the next
--- block. All blocks get the remaining arguments of the call unchanged, whatever their type.
---@param ... any the arguments of a block, and optionally { return_hidden_states = true }. With this option, the call
--- also returns the inputs of all blocks, after the last block's results: one tensor [blocks, ...] for each of the
--- first num_hidden arguments. The option batch_related has no effect here. It is for PipelineTransformerBlockList.
---@return ps.Tensor ... the results of the last block
function TransformerBlockList:forward(...)
  local args, options = arguments(...)
  caller.options(options, "a call of bmt." .. self.class_name, CALL)
  local n, seen, outs, rng = self.num_hidden, {}, nil, random.state()
  local op = self.dropouts and tonumber(rng.op)
  if args.n < n then error(("this list has num_hidden = %d, but got %d arguments"):format(n, args.n)) end
  for k = 1, n do seen[k] = {} end
  for i = 0, self.length - 1 do
    if options.return_hidden_states then for k = 1, n do seen[k][i + 1] = args[k] end end
    if op then rng.op = op + i * self.dropouts end
    outs = pack(self[i](unpack(args, 1, args.n)))
    if outs.n < n then error(("block %d returned %d tensors, but num_hidden is %d"):format(i, outs.n, n)) end
    args = append(append({ n = 0 }, outs, 1), args, n + 1)
  end
  if op then rng.op = op + self.length * self.dropouts end
  if not options.return_hidden_states then return unpack(outs, 1, n) end
  for k = 1, n do outs[outs.n + k] = tensors.stack(seen[k], 0) end
  return unpack(outs, 1, outs.n + n)
end

-- -- stages -----------------------------------------------------------------------------------------------------------
local DROPOUTS = 4096                     -- number of dropouts reserved for each block in a forward, equal on all ranks

---@class ps.bmt.PipelineTransformerBlockList: ps.bmt.TransformerBlockList
local PipelineTransformerBlockList = nn_module.class("PipelineTransformerBlockList", TransformerBlockList)
PipelineTransformerBlockList.dropouts = DROPOUTS
lists.PipelineTransformerBlockList = PipelineTransformerBlockList

--- Creates a list of blocks that are assigned, in order, to the pipe_size stages of init_distributed. With n blocks and
--- p stages, each of the first n mod p stages has one block more than the other stages. A module that is not a block
--- becomes a block. The list has the names and indices of all blocks. For the blocks of other stages, a rank has only
--- shapes and dtypes.
---@param list ps.nn.Module[] at least one block per stage; blocks must not share parameters
---@param options? {num_hidden?: integer} num_hidden must be 1 if there are several stages
function PipelineTransformerBlockList:init(list, options)
  TransformerBlockList.init(self, list, options)
  local run = session.need "bmt.PipelineTransformerBlockList"
  local pipe = run.pipe
  if not pipe then return end
  if self.num_hidden > 1 then
    error(("bmt.PipelineTransformerBlockList: num_hidden is %d, but stages pass on one tensor (pipe_size = %d)")
      :format(self.num_hidden, pipe.size))
  end
  local n = self.length
  if n < pipe.size then
    error(("bmt.PipelineTransformerBlockList: %d blocks for pipe_size = %d; each stage needs at least one"):format(n,
      pipe.size))
  end
  local least, more, first = math.floor(n / pipe.size), n % pipe.size, 0
  rawset(self, "firsts", {})  -- the index of each stage's first block, and then the number of blocks
  for stage = 0, pipe.size do
    self.firsts[stage], first = first, first + least + (stage < more and 1 or 0)
  end
  for stage = 0, pipe.size - 1 do
    for i = self.firsts[stage], self.firsts[stage + 1] - 1 do run:deal(self[i], stage) end
  end
end

-- Returns the first row of micro-batch i. Rows and micro-batches are counted from 0. If the number of rows is not a
-- multiple of the number of micro-batches, the first micro-batches have one row more than the last micro-batches.
local function first_row(rows, micros, i)
  return i * math.floor(rows / micros) + math.min(i, rows % micros)
end

-- Gathers the rows [n, ...] of all ranks to a tensor [p n, ...].
local function all_rows(group, t)
  if t:needs_grad() then return group:gathered(t) end
  local shape = t:shape()
  shape[1] = shape[1] * group:size()
  return group:all_gather(create.empty(shape, { dtype = t:dtype(), device = t:device() }), t:contiguous())
end

-- Returns a list with a function for each argument of the blocks, starting at index 2. A function (first, count)
-- returns the value of its argument for the rows [first, first + count).
local function arguments_of_micros(args, group, related)
  local x, give, said = args[1], {}, {}
  for _, k in ipairs(related or {}) do said[k + 2] = true end
  for k = 2, args.n do
    local value = args[k]
    local function same() return value end
    give[k] = same
    if scope.is_tensor(value) then
      local has_rows = value:dim() > 0 and value:size(0) == x:size(0)
      if said[k] and not has_rows then
        error(("batch_related: argument %d has the shape [%s], but the batch has %d rows"):format(k - 2,
          table.concat(value:shape(), ", "), x:size(0)))
      elseif has_rows and not related and value:dim() ~= x:dim() then
        error(("argument %d after the hidden states has the shape [%s]: declare whether it has a row for each "
          .. "sample, by "
          .. "{ batch_related = { %d } }, or {} for none"):format(k - 2, table.concat(value:shape(), ", "), k - 2))
      elseif said[k] or has_rows and not related then
        local whole = all_rows(group, value)
        give[k] = function(first, count) return whole:narrow(0, first, count) end
      end
    end
  end
  return give
end

-- Runs a block on one micro-batch and returns the result. `op` is the index of the list's first dropout.
local function through(list, i, op, h, args)
  random.state().op = op + i * DROPOUTS
  args[1] = h
  local y = list[i](unpack(args, 1, args.n))
  if not (scope.is_tensor(y) and nn_module.same_shape(y:shape(), h:shape()) and y:dtype() == h:dtype()) then
    error(("block %d returned %s for a %s of shape [%s]: the tensor between stages must keep its shape and "
      .. "dtype"):format(i,
      scope.is_tensor(y) and ("a %s of shape [%s]"):format(y:dtype(), table.concat(y:shape(), ", ")) or "a " .. type(y),
      h:dtype(), table.concat(h:shape(), ", ")))
  end
  return y
end

-- Returns this rank's rows of the tensor x on stage `root`. There, x contains the rows of all ranks along dimension
-- `dim`. On other stages, only the shape of x is used. These stages also pass x so that their backward runs.
local function own_rows(pipe, x, root, dim, n)
  return pipe.group:copied(x, root):narrow(dim, pipe.rank * n, n)
end

-- Returns the inputs of all blocks, [blocks, n, ...]. `seen` has the inputs of this stage's blocks, by block and
-- micro-batch. `all` is the input of the list, [p n, ...].
local function hidden_states(list, pipe, seen, all, n)
  local of_stages = {}
  for stage = 0, pipe.size - 1 do
    local blocks = list.firsts[stage + 1] - list.firsts[stage]
    local x
    if stage == pipe.rank then
      local rows = {}
      for k = 1, blocks do rows[k] = tensors.cat(seen[k], 0) end
      x = tensors.stack(rows, 0)
    else
      local shape = all:shape()
      table.insert(shape, 1, blocks)
      x = all:unsqueeze(0):expand(shape):contiguous()
    end
    of_stages[stage + 1] = own_rows(pipe, x, stage, 1, n)
  end
  return tensors.cat(of_stages, 0)
end

-- Runs a call of the list in a model with several stages. `how` has the options of the call.
local function staged(list, pipe, args, how)
  local x, group, rng = args[1], pipe.group, random.state()
  if not scope.is_tensor(x) or x:dim() == 0 then
    error "a pipeline needs hidden states [rows, ...] as its first argument"
  end
  local n = x:size(0)
  local rows, micros = n * pipe.size, pipe.micros
  if rows < micros then
    error(("%d rows on each of %d stages are fewer than num_micro_batches = %d"):format(n, pipe.size, micros))
  end
  -- Gradients must pass through all stages, even if this stage's hidden states do not require a gradient.
  if scope.grad_enabled() and not x:needs_grad() then x = x:detach():requires_grad(true) end
  local all, give, outs, seen = all_rows(group, x), arguments_of_micros(args, group, how.batch_related), {}, {}
  local first_block, behind, sample = list.firsts[pipe.rank], list.firsts[pipe.rank + 1], rng.sample
  local op = tonumber(rng.op)
  for micro = 0, micros - 1 do
    local first = first_row(rows, micros, micro)
    local count, given = first_row(rows, micros, micro + 1) - first, { n = args.n }
    local h = all:narrow(0, first, count)
    if pipe.before then h = pipe.before:copied(h, 0) end
    for k = 2, args.n do given[k] = give[k](first, count) end
    rng.sample = sample - pipe.rank * n + first
    for i = first_block, behind - 1 do
      if how.return_hidden_states then
        local k = i - first_block + 1
        seen[k] = seen[k] or {}
        seen[k][micro + 1] = h
      end
      h = through(list, i, op, h, given)
    end
    if pipe.after then h = pipe.after:copied(h, 0) end
    outs[micro + 1] = h
  end
  rng.op, rng.sample = op + list.length * DROPOUTS, sample
  local y = own_rows(pipe, tensors.cat(outs, 0), pipe.size - 1, 0, n)
  if not how.return_hidden_states then return y end
  return y, hidden_states(list, pipe, seen, all, n)
end

--- Applies the blocks one after another, each on the rank of its stage. All ranks of the pipeline call this function,
--- each with its own rows. All ranks must have the same number of rows. The dropout masks are the same as if a single
--- stage computed the rows of all ranks.
---@param ... any the hidden states [n, ...], the other arguments of a block, and optionally { return_hidden_states =
--- true, batch_related = { 0, 2 } }. return_hidden_states: also returns the inputs of all blocks, [blocks, n, ...].
--- batch_related: the indices of tensors that have one row per sample. The first argument after the hidden states has
--- index 0. By default, these are the tensors with as many rows and dimensions as the hidden states. Each rank passes
--- its own values of all other arguments to its blocks.
---@return ps.Tensor hidden the results for this rank's rows
---@return ps.Tensor? hidden_states only with return_hidden_states
function PipelineTransformerBlockList:forward(...)
  local run = session.get()
  if not (run and run.pipe) then return TransformerBlockList.forward(self, ...) end
  local args, options = arguments(...)
  caller.options(options, "a call of bmt." .. self.class_name, CALL)
  return staged(self, run.pipe, args, options)
end

return lists
