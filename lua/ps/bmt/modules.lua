-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's modules: DistributedModule, DistributedParameter, blocks and lists of blocks.
local ps = require "ps"
local caller = require "ps.caller"
local core = require "ps.nn.module"
local shard = require "ps.nn.shard"
local mesh = require "ps.mesh"
local session = require "ps.bmt.session"
local container = require "ps.nn.container"
local error = caller.error

local modules = {}

---@class ps.bmt.DistributedModule: ps.nn.Module
local DistributedModule = core.class("DistributedModule")
modules.DistributedModule = DistributedModule

--- A call from outside of all modules. That of the model that OptimManager trains is a forward of its step.
---@param run fun(module: ps.nn.Module, ...): any
---@param ... any
---@return any ...
function DistributedModule:outermost(run, ...) return session.call(self, run, ...) end

-- What DistributedParameter was told, by parameter: {init_method, group}.
local told = setmetatable({}, { __mode = "k" })

local PARAMETER = { requires_grad = "boolean", init_method = "callable", group = "string", tp_mode = "boolean",
  tp_split_dim = "whole" }

-- This rank's shard of a parameter that ranks along tp share out, from its own part; nil: it is whole on all of them.
local function shard_of(part, dim, call)
  local group, full = mesh.group "tp", part:shape()
  if dim == -1 or not group then return nil end
  if dim < 0 or dim >= #full then
    error(("%s: tp_split_dim is %d; it takes 0 to %d, or -1: all ranks have the whole"):format(call, dim, #full - 1))
  end
  full[dim + 1] = full[dim + 1] * group:size()
  return shard.new({ dim = dim, index = group:rank(), count = group:size(), full_shape = full }, call)
end

--- A parameter whose bytes the ranks share out, of the values that rank 0 has. Ops on it gather it, wherever they are.
--- Under tp, data is this rank's part where tp_split_dim is not -1, and rank 0 is that of the ranks with the same part.
---@param data ps.Tensor fp32, bf16 or fp16; all parameters of a model have one type
---@param options? {requires_grad?: boolean, init_method?: fun(t: ps.Tensor), group?: string, tp_mode?: boolean,
---  tp_split_dim?: integer} requires_grad default true; init_method fills a tensor of the (whole) parameter's shape in
---  bmt.init_parameters; group: see bmt.grouped_parameters. tp_mode: the parameter is that of a layer which ranks along
---  tp share out; tp_split_dim: the dimension of which each has a part, default -1: each has the whole, and computes
---  the same gradient. Without tp_mode gradients of ranks along tp are parts of a sum, where they share out the rows
---@return ps.Tensor
function modules.DistributedParameter(data, options)
  local call = "bmt.DistributedParameter"
  options = caller.options(options, "bmt.DistributedParameter", PARAMETER)
  if not ps.is_tensor(data) then error(call .. " takes a tensor, not a " .. type(data)) end
  local dim = options.tp_split_dim or -1
  if dim ~= -1 and not options.tp_mode then error(call .. ": tp_split_dim needs tp_mode = true") end
  if options.tp_mode and options.group then
    error(call .. ": group and tp_mode: a parameter with tp_mode is in the group \"tp\"")
  end
  local run = session.need(call)
  run:ready(data:dtype(), call)
  local desc = options.tp_mode and shard_of(data, dim, call) or nil
  local own = ps.no_grad(function()
    local there = data:detach():to(run.engine.device_name)
    return (there.storage == data.storage and there:clone() or there:contiguous())
  end)
  if desc then shard.set(own, desc) end
  if options.tp_mode then run.alike[own] = true end
  local param = core.Parameter(own)                            -- which stages it
  if options.requires_grad == false then param:requires_grad(false) end
  told[param] = { init_method = options.init_method, group = options.tp_mode and "tp" or options.group }
  return param
end

--- A function of a tensor, for init_method: ParameterInitializer(nn.init.normal_, 0, 0.02).
---@param func fun(t: ps.Tensor, ...)
---@param ... any behind the tensor
---@return fun(t: ps.Tensor)
function modules.ParameterInitializer(func, ...)
  caller.callable(func, "bmt.ParameterInitializer")
  local given, n = { ... }, select("#", ...)
  return function(t) return func(t, unpack(given, 1, n)) end
end

--- Fills the parameters that have an init_method, in the order of the model. All ranks call it.
---@param model ps.nn.Module
function modules.init_parameters(model)
  session.need "bmt.init_parameters"
  if not core.is_module(model) then error("bmt.init_parameters takes a model, not a " .. type(model)) end
  for _, param in model:named_parameters() do
    local about = told[param]
    if about and about.init_method then
      ps.scope(ps.no_grad, function()
        local desc = shard.of(param)
        local whole = ps.empty(desc and desc.full_shape or param:shape(),
          { dtype = param:dtype(), device = param:device() })
        about.init_method(whole)
        param:copy_(desc and shard.cut(desc, whole) or whole)
      end)
    end
  end
end

--- `for group, parameters in bmt.grouped_parameters(model) do`: parameters by the group that DistributedParameter was
--- given; those without come first, with the group false.
---@param model ps.nn.Module
---@return fun(): (string|false)?, ps.Tensor[]?
function modules.grouped_parameters(model)
  local order, lists = {}, {}
  for _, param in ipairs(model:parameters()) do
    local group = told[param] and told[param].group or false
    if not lists[group] then
      lists[group] = {}
      table.insert(order, group == false and 1 or #order + 1, group)
    end
    table.insert(lists[group], param)
  end
  local i = 0
  return function()
    i = i + 1
    if order[i] ~= nil then return order[i], lists[order[i]] end
  end
end

-- -- blocks -----------------------------------------------------------------------------------------------------------
local blocks = setmetatable({}, { __mode = "k" })

local BLOCK = { use_checkpoint = "boolean", zero_level = "whole", initialized = "boolean", mode = "string" }
local MODES = { BLOCK = true, PIPE = true }

--- Makes a block of a module: in training its activations are computed again in backward. It gives the same module, so
--- that names and fields are the module's own. Parameters that are not distributed become so.
---@param module ps.nn.Module whose forward gives tensors only
---@param options? {use_checkpoint?: boolean, zero_level?: integer, mode?: "BLOCK"|"PIPE"} use_checkpoint default true;
---  zero_level, where it is given, is that of bmt.init_distributed
---@return ps.nn.Module
function modules.CheckpointBlock(module, options)
  local call = "bmt.CheckpointBlock"
  options = caller.options(options, "bmt.CheckpointBlock", BLOCK)
  if not core.is_module(module) then error(call .. " takes a module, not a " .. type(module)) end
  caller.one_of(options.mode or "BLOCK", MODES, call .. ": mode")
  local run = session.need(call)
  local stage = run.config.zero_optimization.stage
  if options.zero_level and options.zero_level ~= stage then
    error(("%s: zero_level is %d, that of the run is %d: a run has one; give it to bmt.init_distributed"):format(call,
      options.zero_level, stage))
  end
  run:stage_all(module, call)
  rawset(module, "recomputes", options.use_checkpoint ~= false or nil)
  blocks[module] = true
  return module
end

---@class ps.bmt.TransformerBlockList: ps.nn.ModuleList
---@field num_hidden integer
local TransformerBlockList = core.class("TransformerBlockList", container.ModuleList)
modules.TransformerBlockList = TransformerBlockList

local LIST = { num_hidden = "whole" }

---@class ps.bmt.PipelineTransformerBlockList: ps.bmt.TransformerBlockList
local PipelineTransformerBlockList = core.class("PipelineTransformerBlockList", TransformerBlockList)
modules.PipelineTransformerBlockList = PipelineTransformerBlockList

--- A list of blocks that is called as a whole; items count from 0. Other modules become blocks.
---@param list ps.nn.Module[]
---@param options? {num_hidden?: integer} how many of the first arguments go from block to block, default 1
function TransformerBlockList:init(list, options)
  options = caller.options(options, "bmt." .. self.class_name, LIST)
  caller.typed(list, "table", "bmt." .. self.class_name .. ": its list of blocks")
  self.num_hidden = caller.whole(options.num_hidden or 1, "bmt." .. self.class_name .. ": num_hidden", 1)
  if #list == 0 then error("bmt." .. self.class_name .. " takes one block or more") end
  container.ModuleList.init(self, list)
  for _, module in ipairs(list) do if not blocks[module] then modules.CheckpointBlock(module) end end
end

-- Whether a call's last argument is its options, and no table for the blocks.
local function are_options(value)
  if type(value) ~= "table" or getmetatable(value) ~= nil then return false end
  for key in pairs(value) do
    if type(key) == "string" and (key:match "^return_hidden" or key == "batch_related") then return true end
  end
  return false
end

-- The arguments of a call without the table of options at their end, and the options.
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

--- Applies the blocks one after the other. The first num_hidden arguments are what a block gives the next one; all
--- blocks get the others as they are, of whatever type.
---@param ... any the arguments of a block; then perhaps { return_hidden_states = true }: what went into each block is
---  given, too, one tensor [blocks, ...] for each of the num_hidden, behind the last block's results. (batch_related
---  says how a pipeline cuts arguments, and means nothing where there is one stage.)
---@return ps.Tensor ... what the last block gave
function TransformerBlockList:forward(...)
  local args, options = arguments(...)
  caller.options(options, "a call of bmt." .. self.class_name, CALL)
  local n, seen, outs = self.num_hidden, {}, nil
  if args.n < n then error(("this list has num_hidden = %d and got %d arguments"):format(n, args.n)) end
  for k = 1, n do seen[k] = {} end
  for i = 0, self.length - 1 do
    if options.return_hidden_states then for k = 1, n do seen[k][i + 1] = args[k] end end
    outs = pack(self[i](unpack(args, 1, args.n)))
    if outs.n < n then error(("block %d gave %d tensors, and num_hidden is %d"):format(i, outs.n, n)) end
    args = append(append({ n = 0 }, outs, 1), args, n + 1)
  end
  if not options.return_hidden_states then return unpack(outs, 1, n) end
  for k = 1, n do outs[outs.n + k] = ps.stack(seen[k], 0) end
  return unpack(outs, 1, outs.n + n)
end

--- The list of a model that may be cut into stages. A run of ps.bmt has one stage (pipe_size above 1 is refused), in
--- which the list is a TransformerBlockList.
---@param list ps.nn.Module[]
---@param options? {num_hidden?: integer}
function PipelineTransformerBlockList:init(list, options) TransformerBlockList.init(self, list, options) end

return modules
