-- SPDX-License-Identifier: BSD-3-Clause
-- require "ps.bmt" returns BMTrain's API for training scripts (docs/bmtrain.md). The API uses the engine that
-- ps.initialize makes.
--
--   local bmt = require "ps.bmt"
--   bmt.init_distributed { seed = 0 }
--   local model = MyModel()                                  -- a class that derives from bmt.DistributedModule
--   local optimizer = bmt.optim.AdamOffloadOptimizer(model:parameters(), { weight_decay = 1e-2 })
--   local manager = bmt.optim.OptimManager { loss_scale = 2 ^ 20 }
--   manager:add_optimizer(optimizer, bmt.lr_scheduler.Noam(optimizer, { start_lr = 1e-3, warmup_iter = 40,
--     end_iter = 1000 }))
--   for x, y in loader:epoch() do
--     manager:zero_grad()
--     manager:backward(loss_func(model(x), y))
--     manager:clip_grad_norm(optimizer.param_groups, 1.0)
--     manager:step()
--   end
--
-- Keyword arguments of Python are passed in one table, which is the last argument. If a script calls a function of
-- BMTrain that ps.bmt does not have, the error names the replacement.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local dist = require "ps.dist"
local inspect = require "ps.inspect"
local lists = require "ps.bmt.lists"
local mesh = require "ps.dist.mesh"
local modules = require "ps.bmt.modules"
local session = require "ps.bmt.session"
local store = require "ps.bmt.store"
local utils = require "ps.bmt.utils"
local error = caller.error

local bmt = { config = session.facts, optim = require "ps.bmt.optim", lr_scheduler = require "ps.bmt.lr_scheduler",
  loss = require "ps.bmt.loss", nn = require "ps.bmt.parallel", inspect = {}, save = store.save, load = store.load,
  init_distributed = session.begin, close = session.close }
for _, part in ipairs { modules, lists } do for name, value in pairs(part) do bmt[name] = value end end
bmt.is_block = nil
bmt.utils, bmt.print_block, bmt.print_dict = utils, utils.print_block, utils.print_dict
bmt.see_memory = utils.see_memory
bmt.Block = bmt.CheckpointBlock

--- Returns this process's rank.
---@return integer
function bmt.rank() return dist.rank() end

--- Returns the number of ranks.
---@return integer
function bmt.world_size() return dist.world_size() end

--- Waits until all ranks have called this function.
function bmt.synchronize()
  session.need "bmt.synchronize"
  dist.synchronize()
end

--- Returns the mean of a loss over all ranks, without a gradient. The name is BMTrain's. BMTrain's sum_loss also
--- computes the mean instead of the sum.
---@param loss ps.Tensor
---@param comm? any must be nil, because the mean is always over all ranks
---@return ps.Tensor
function bmt.sum_loss(loss, comm)
  session.need "bmt.sum_loss"
  if comm ~= nil then error "bmt.sum_loss: comm: the mean is over all ranks; groups of ps.mesh have all_reduce" end
  if not scope.is_tensor(loss) then error("bmt.sum_loss takes a tensor, not a " .. type(loss)) end
  return scope.no_grad(function()
    local copy, group = loss:detach():to("fp32"):clone(), mesh.group "world"
    if group then group:all_reduce(copy) end
    return copy / dist.world_size()
  end)
end

--- Concatenates the tensors [n, ...] of all ranks to a tensor [ranks * n, ...], without a gradient.
---@param result ps.Tensor
---@return ps.Tensor
function bmt.gather_result(result)
  session.need "bmt.gather_result"
  if not scope.is_tensor(result) then error("bmt.gather_result takes a tensor, not a " .. type(result)) end
  return scope.no_grad(function()
    local group, own = mesh.group "world", result:detach():contiguous()
    if not group then return own:clone() end
    local shape = own:shape()
    shape[1] = shape[1] * group:size()
    return group:all_gather(create.empty(shape, { dtype = own:dtype(), device = own:device() }), own)
  end)
end

--- Prints values like print, but only on one rank.
---@param ... any the values, and optionally { rank = n } (default 0)
function bmt.print_rank(...)
  local given, rank = { n = select("#", ...), ... }, 0
  local last = given[given.n]
  if type(last) == "table" and getmetatable(last) == nil and type(last.rank) == "number" then
    rank, given.n = last.rank, given.n - 1
  end
  if dist.rank() ~= rank then return end
  print(unpack(given, 1, given.n))
  io.stdout:flush()
end

-- -- inspect ----------------------------------------------------------------------------------------------------------
bmt.inspect.inspect_tensor, bmt.inspect.record_tensor = inspect.inspect_tensor, inspect.record_tensor
bmt.inspect.format_summary = inspect.format_summary

--- Calls ps.inspect.inspect_model. The model may be in training, and ranks may share it. All ranks call this function.
---@param model ps.nn.Module
---@param pattern? string a pattern for the names of parameters (default: all parameters)
---@param prefix? string
---@return ps.inspect.Row[]
function bmt.inspect.inspect_model(model, pattern, prefix)
  local target, run = session.target(model), session.get()
  if run and run.pipe and not handle.of(target) then
    error("bmt.inspect.inspect_model: a model in stages can be inspected only after it has begun to train, since "
      .. "each rank has only its own blocks")
  end
  return inspect.inspect_model(target, pattern, prefix)
end

-- -- calls of BMTrain without a counterpart ---------------------------------------------------------------------------
local ABSENT = {
  BMTrainModelWrapper = "derive the model's class from bmt.DistributedModule, or train it with ps.initialize",
  wait_loader = "moves of parameters are planned, and there is nothing to wait for",
  nccl = "use ps.dist and its groups", distributed = "use ps.dist and its groups",
  benchmark = "bench/ has measurements", debug = "bmt.inspect.record_tensor keeps tensors",
}
local function refusing(what, absent)
  return { __index = function(_, name)
    if absent[name] then error(("%s.%s: not in ps.bmt: %s"):format(what, name, absent[name])) end
  end }
end

return setmetatable(bmt, refusing("bmt", ABSENT))
