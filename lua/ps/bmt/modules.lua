-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's modules: DistributedModule, DistributedParameter and blocks. The lists of blocks are in bmt/lists.lua.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local shard = require "ps.tensor.shard"
local mesh = require "ps.dist.mesh"
local session = require "ps.bmt.session"
local error = caller.error

local modules = {}

---@class ps.bmt.DistributedModule: ps.nn.Module
local DistributedModule = nn_module.class("DistributedModule")
modules.DistributedModule = DistributedModule

--- Runs a call of this module that no other module makes. If OptimManager trains the module, the call is the forward of
--- a step.
---@param run fun(module: ps.nn.Module, ...): any
---@param ... any
---@return any ...
function DistributedModule:outermost(run, ...) return session.call(self, run, ...) end

-- Maps each DistributedParameter to its options: {init_method, group}.
local told = setmetatable({}, { __mode = "k" })

local PARAMETER = { requires_grad = "boolean", init_method = "callable", group = "string", tp_mode = "boolean",
  tp_split_dim = "whole" }

-- Returns the shard description of a parameter that ranks along tp share. The description is computed from this rank's
-- shard. Returns nil if each rank has the whole parameter.
local function shard_of(part, dim, call)
  local group, full = mesh.group "tp", part:shape()
  if dim == -1 or not group then return nil end
  if dim < 0 or dim >= #full then
    error(("%s: tp_split_dim is %d; it must be 0 to %d, or -1: all ranks have the whole parameter"):format(
      call, dim, #full - 1))
  end
  full[dim + 1] = full[dim + 1] * group:size()
  return shard.new({ dim = dim, index = group:rank(), count = group:size(), full_shape = full }, call)
end

--- Creates a parameter that is sharded over the ranks and gets the values of rank 0. Each op that reads the parameter
--- gathers the parameter first. With tensor parallelism, if tp_split_dim is not -1, `data` is this rank's shard. The
--- shard then gets the values of the first rank that has the same shard.
---@param data ps.Tensor fp32, bf16 or fp16; all parameters of a model have one dtype
---@param options? {requires_grad?: boolean, init_method?: fun(t: ps.Tensor), group?: string, tp_mode?: boolean,
--- tp_split_dim?: integer} requires_grad: default true. init_method: a function for bmt.init_parameters, which fills a
--- tensor with the shape of the whole parameter. group: see bmt.grouped_parameters. tp_mode: whether the parameter
--- belongs to a layer that ranks along tp share. tp_split_dim: the dimension that is split among these ranks. With -1
--- (default), each rank has the whole parameter and computes the same gradient. Without tp_mode, the gradients of ranks
--- along tp are summed if these ranks share the rows.
---@return ps.Tensor
function modules.DistributedParameter(data, options)
  local call = "bmt.DistributedParameter"
  options = caller.options(options, "bmt.DistributedParameter", PARAMETER)
  if not scope.is_tensor(data) then error(call .. " takes a tensor, not a " .. type(data)) end
  local dim = options.tp_split_dim or -1
  if dim ~= -1 and not options.tp_mode then error(call .. ": tp_split_dim needs tp_mode = true") end
  if options.tp_mode and options.group then
    error(call .. ": group and tp_mode exclude each other: a parameter with tp_mode is in the group \"tp\"")
  end
  local run = session.need(call)
  run:ready(data:dtype(), call)
  local desc = options.tp_mode and shard_of(data, dim, call) or nil
  local own = scope.no_grad(function()
    local there = data:detach():to(run.engine.device_name)
    return (there.storage == data.storage and there:clone() or there:contiguous())
  end)
  if desc then shard.set(own, desc) end
  if options.tp_mode then run.alike[own] = true end
  local param = nn_module.Parameter(own)                            -- nn_module.Parameter moves it into a chunk
  if options.requires_grad == false then param:requires_grad(false) end
  told[param] = { init_method = options.init_method, group = options.tp_mode and "tp" or options.group }
  return param
end

--- Returns a function for init_method, which fills a tensor with `func`. An example is
--- ParameterInitializer(nn.init.normal_, 0, 0.02).
---@param func fun(t: ps.Tensor, ...)
---@param ... any the arguments after the tensor
---@return fun(t: ps.Tensor)
function modules.ParameterInitializer(func, ...)
  caller.callable(func, "bmt.ParameterInitializer")
  local given, n = { ... }, select("#", ...)
  return function(t) return func(t, unpack(given, 1, n)) end
end

--- Fills the parameters that have an init_method, in the model's order. All ranks call this function.
---@param model ps.nn.Module
function modules.init_parameters(model)
  session.need "bmt.init_parameters"
  if not nn_module.is_module(model) then error("bmt.init_parameters takes a model, not a " .. type(model)) end
  for _, param in model:named_parameters() do
    local about = told[param]
    if about and about.init_method then
      scope.scope(scope.no_grad, function()
        local desc = shard.of(param)
        local whole = create.empty(desc and desc.full_shape or param:shape(),
          { dtype = param:dtype(), device = param:device() })
        -- For parameters of other stages, `whole` has no data, but the call advances the random numbers.
        about.init_method(whole)
        if param:device() ~= "meta" then param:copy_(desc and shard.of_whole(desc, whole) or whole) end
      end)
    end
  end
end

--- `for group, parameters in bmt.grouped_parameters(model) do` iterates over groups of parameters. `group` is the
--- option `group` of DistributedParameter. Parameters without this option are in the first group, for which
--- `group` is false.
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

--- Returns whether a module is a block that CheckpointBlock created.
---@param module ps.nn.Module
---@return boolean
function modules.is_block(module) return blocks[module] == true end

local BLOCK = { use_checkpoint = "boolean", zero_level = "whole", initialized = "boolean", mode = "string" }
local MODES = { BLOCK = true, PIPE = true }

--- Turns a module into a block. In training, backward recomputes the activations of a block. Returns the same module,
--- so the module's names and fields do not change. The module's parameters become distributed.
---@param module ps.nn.Module a module whose forward returns only tensors
---@param options? {use_checkpoint?: boolean, zero_level?: integer, mode?: "BLOCK"|"PIPE"} use_checkpoint: default true.
--- zero_level: in a run of level 3, zero_level may be 3 or 2. With 3, gathered parameters are freed after each pass,
--- and backward gathers them again. With 2, gathered parameters are kept until the end of the step. The default follows
--- zero_optimization.reshard_after_forward of the configuration. In a run of level 0, 1 or 2, zero_level must be the
--- level of the run.
---@return ps.nn.Module
function modules.CheckpointBlock(module, options)
  local call = "bmt.CheckpointBlock"
  options = caller.options(options, "bmt.CheckpointBlock", BLOCK)
  if not nn_module.is_module(module) then error(call .. " takes a module, not a " .. type(module)) end
  caller.one_of(options.mode or "BLOCK", MODES, call .. ": mode")
  local run = session.need(call)
  local stage, level = run.config.zero_optimization.stage, options.zero_level
  if level and level ~= stage and not (stage == 3 and level == 2) then
    error(("%s: zero_level is %d, but that of the run (bmt.init_distributed's zero_level) is %d: blocks in a run of "
      .. "level 3 may have level 2, all others have the run's level"):format(call, level, stage))
  end
  run:stage_all(module, call)
  for _, param in ipairs(level and stage == 3 and module:parameters() or {}) do run.stays[param] = level == 2 end
  rawset(module, "recomputes", options.use_checkpoint ~= false or nil)
  blocks[module] = true
  return module
end

return modules
