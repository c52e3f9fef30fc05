-- SPDX-License-Identifier: BSD-3-Clause
-- Describes a model that is cut into virtual stages. For each virtual stage, the description contains the parts of the
-- model (ps.nn.parts) and the rank that runs the virtual stage. It also contains the parameters that each rank holds.
-- Virtual stages are numbered from 0 in the order of the model, and ranks from 0 along the pipeline. A process creates
-- the whole model without data (ps.deferred). It then creates values only for its own virtual stages.
local caller = require "ps.core.caller"
local devices = require "ps.core.devices"
local scope = require "ps.core.scope"
local nn_module = require "ps.nn.module"
local count = require "ps.engine.pipeline.count"
local deferred = require "ps.nn.deferred"
local hooks = require "ps.core.hooks"
local parts = require "ps.nn.parts"
local agree = require "ps.dist.agree"
local measure = require "ps.engine.pipeline.measure"
local mesh = require "ps.dist.mesh"
local pipe_table = require "ps.parallel.pipeline.table"

local stages = {}

local MOST_POSITIONS = 2048               -- maximum number of positions in the batch with which costs are counted

---@class ps.engine.Pipeline the pipeline that the configuration and the mesh define
---@field table ps.pipe.Table the virtual stages, and the rank of each virtual stage
---@field rank integer this rank's index along the pipeline, from 0
---@field partition? string|integer[] how to cut the model (stages.cut)
---@field example? any[] a batch in the form that model:micro_batches accepts, and its number of arguments `n`
---@field found? {costs: ps.engine.PartCost[], first: integer[], times?: ps.engine.CutTimes} the cut, if it has already
---  been computed

---@class ps.engine.Stages
---@field parts ps.nn.Part[]|false parts of the model, or false if the model's own forward runs the stages
---@field costs ps.engine.PartCost[]
---@field first integer[] for each virtual stage, the index of its first part, from 1; the last element is the number of
---  parts + 1
---@field ranks integer[] the rank of each virtual stage, in the order of the model
---@field mine integer[] this rank's virtual stages, as indices in the model from 0
---@field rank integer
---@field times? ps.engine.CutTimes
---@field vstages_of table<string, integer[]> the key is the name of a parameter or buffer (of a tied tensor, the first
---  name); the value is the list of virtual stages that use it
local Stages = {}
Stages.__index = Stages

-- -- cutting --------------------------------------------------------------------------------------------------------
-- Cuts `weights` into n contiguous runs, none of which is empty, so that the largest sum of a run is as small as
-- possible. Returns the index at which each run begins. The smallest possible bound of the sums is found by bisection.
-- If several cuts are equally good, the cut whose first runs have the largest sums is chosen.
local function balance(weights, n)
  local function fits(bound)
    local first, sum = { 1 }, 0
    for i, w in ipairs(weights) do
      local must = #weights - i < n - #first          -- each remaining part has to begin a run
      if i > first[#first] and (must or sum + w > bound) then
        if #first == n then return nil end
        first[#first + 1], sum = i, 0
      end
      sum = sum + w
      if sum > bound then return nil end
    end
    return #first == n and first or nil
  end
  local low, high = 0, 0
  for _, w in ipairs(weights) do high = high + w end
  local best = fits(high)
  for _ = 1, 100 do
    local middle = (low + high) / 2
    local found = fits(middle)
    if found then best, high = found, middle else low = middle end
  end
  return best
end

local function numbers(list)
  local said = {}
  for i, part in ipairs(list) do said[i] = part.name end
  if #said > 6 then said = { said[1], said[2], said[3], "...", said[#said - 1], said[#said] } end
  return table.concat(said, ", ")
end

-- Returns the number of layers. Layers are the parts whose names end in a number. If no name ends in a number, all
-- parts are layers.
local function layers_of(list)
  local n = 0
  for _, part in ipairs(list) do if part.name:match "%.%d+$" then n = n + 1 end end
  return n > 0 and n or #list
end

local WEIGHTS = {
  uniform = function() return 1 end,
  parameters = function(cost) return cost.numel end,
}

-- Returns a list with the letter of each part in Megatron's layouts. The letter is E for the first part, L for the last
-- part, t for a layer, and m for any other part.
local function kinds_of(list)
  local kinds = {}
  for i, part in ipairs(list) do
    local layer = part.name:match "%.%d+$"
    kinds[i] = layer and "t" or i == 1 and "E" or i == #list and "L" or "m"
  end
  return table.concat(kinds)
end

-- Finds the cut whose simulated step is shortest, and returns the number of parts in each virtual stage. In the
-- simulation, a slow part, such as the head, delays the other stages.
local function by_cost(costs, table_)
  local given = {}
  for i, cost in ipairs(costs) do
    given[i] = { forward = cost.forward, input = cost.input, weight = cost.weight, nbytes = cost.carry_nbytes,
      held = cost.activations }
  end
  local counts, times = pipe_table.cut(table_, given)
  times.bound_part = times.bound_part and costs[times.bound_part].name
  return counts, times
end

-- Returns the weight of each part for DeepSpeed's method "type:NAME|NAME". The weight is 1 if the part contains a
-- module whose class name contains one of the names (in upper or lower case), and 0 otherwise.
local function of_type(how, list)
  local names, weights, any = how:match "^type:([%w_|]+)$", {}, false
  if not names then
    error(("pipeline.partition: %s: after \"type:\" write the name of a class, or several names with | between "
      .. "them"):format(how), 0)
  end
  for i, part in ipairs(list) do
    weights[i] = 0
    for _, module in ipairs(part.modules or {}) do
      for name in names:gmatch "[^|]+" do
        if module.class_name:lower():find(name:lower(), 1, true) then weights[i], any = 1, true end
      end
    end
  end
  if not any then error(("pipeline.partition: %s: no part of the model has a module of such a class"):format(
    how), 0) end
  return weights
end

---@class ps.engine.CutTimes
---@field makespan number makespan of the cut, in floating-point operations or in seconds
---@field equal number makespan of a cut in which all virtual stages have equally many parts
---@field bound number lower bound of the makespan of any cut
---@field bound_part? string the part that determines the bound

--- Cuts a list of parts into the virtual stages of a table.
---@param costs ps.engine.PartCost[]
---@param table_ ps.pipe.Table
---@param how? string|integer[] the method. "cost" (the default) or "best" minimises the time of a simulated step, which
---  is computed from counted operations. "measured" does the same with measured seconds, which `costs` must contain
---  instead of operations. "parameters" minimises the largest number of parameters in a virtual stage. "uniform"
---  minimises the largest number of parts in a virtual stage. "type:NAME" minimises the largest number of parts that
---  contain a module whose class name contains NAME. A list sets the number of parts in each virtual stage. Any other
---  text is Megatron's layout, such as "Et*3|(tt|)*29,m|L"
---@param list? ps.nn.Part[] the parts; needed for "type:NAME"
---@return integer[] first for each virtual stage, the index of its first part, from 1; the last element is the number
---  of parts + 1
---@return ps.engine.CutTimes? times the times of the cut, if the method is "cost", "best" or "measured"
function stages.cut(costs, table_, how, list)
  local n, layers = table_.vstages, layers_of(costs)
  if layers < n then
    error(("pipeline: the model has %d layers (parts: %s), fewer than the %d virtual stages"):format(layers,
      numbers(costs), n), 0)
  end
  local counts, first, times = how, nil, nil
  if how == nil or how == "cost" or how == "best" or how == "measured" then
    counts, times = by_cost(costs, table_)
  elseif type(how) == "string" and how:match "^type:" then
    first = balance(of_type(how, list), n)
  elseif WEIGHTS[how] then
    local weights = {}
    for i, cost in ipairs(costs) do weights[i] = WEIGHTS[how](cost) end
    first = balance(weights, n)
  elseif type(how) == "string" then
    counts = pipe_table.layout(how, kinds_of(costs), n)
  end
  if not first then
    local sum = 0
    first = {}
    for i, k in ipairs(counts) do first[i], sum = sum + 1, sum + k end
    if #counts ~= n or sum ~= #costs then
      error(("pipeline.partition: { %s } makes %d virtual stages from %d parts; this model has %d parts (%s), the "
        .. "pipeline "
        .. "%d virtual stages"):format(table.concat(counts, ", "), #counts, sum, #costs, numbers(costs), n), 0)
    end
  end
  first[n + 1] = #costs + 1
  return first, times
end

-- -- stages ---------------------------------------------------------------------------------------------------------
-- For each part, returns the names of the parameters and buffers that the part declares. A tied tensor has the first of
-- its names.
local function declared(self, module)
  local name_of, all = count.first_names(module, nn_module.address), {}
  for i, part in ipairs(self.parts) do
    local names = {}
    parts.each_tensor(module, part, function(at)
      local name = at.kind and name_of[nn_module.address(at.tensor)]
      if name then names[name] = true end
    end)
    all[i] = names
  end
  return all
end

-- Raises an error if parts overlap. If several parts declare the same parameter, each of these parts must use it, as
-- with a tied embedding. uses[i] contains the names that the ops of part i read (ps.engine.PartCost.uses).
local function check_overlaps(self, names_of, uses)
  local by_name = {}
  for i, names in ipairs(names_of) do
    for name in pairs(names) do
      by_name[name] = by_name[name] or {}
      table.insert(by_name[name], i)
    end
  end
  for _, name in ipairs(caller.sorted_names(by_name)) do
    local list, user, idle = by_name[name], nil, nil
    for _, i in ipairs(#list > 1 and list or {}) do
      if uses[i][name] then user = user or i else idle = idle or i end
    end
    if user and idle then
      error(("pipeline: parts %s and %s overlap: both declare parameter %s, but only %s uses it; remove its module "
        .. "from the modules of %s"):format(self.parts[list[1]].name, self.parts[list[2]].name, name,
        self.parts[user].name, self.parts[idle].name), 0)
    end
  end
end

-- Returns a table from the name of a parameter or buffer to the virtual stages that use it. A virtual stage uses a
-- tensor if one of its parts declares the tensor, or if one of its parts read the tensor when the parts were counted. A
-- head therefore need not declare a tied embedding.
local function users(self, module)
  local of, names_of, uses, counted = {}, declared(self, module), {}, true
  for i = 1, #self.parts do
    uses[i] = {}
    local cost = self.costs[i]
    counted = counted and cost ~= nil and cost.uses ~= nil
    for _, name in ipairs(cost and cost.uses or {}) do uses[i][name] = true end
  end
  if counted then check_overlaps(self, names_of, uses) end
  for v = 1, #self.ranks do
    for i = self.first[v], self.first[v + 1] - 1 do
      for _, set in ipairs { names_of[i], uses[i] } do
        for name in pairs(set) do
          of[name] = of[name] or {}
          if of[name][#of[name]] ~= v - 1 then table.insert(of[name], v - 1) end
        end
      end
    end
  end
  return of
end

-- Raises an error if a parameter's gradients would not be added in the order of its virtual stages. Each rank adds the
-- gradients of its own virtual stages in order. Then the sums of the ranks are added in rank order (src/engine/ties.c).
-- With two virtual stages, the order does not matter. With more virtual stages, their ranks must be ascending, and only
-- the lowest rank may have several of these virtual stages.
local function check_order(self, name, list)
  if #list < 3 then return end
  local on, ordered = {}, true
  for i, v in ipairs(list) do
    on[i] = self.ranks[v + 1]
    ordered = ordered and (i == 1 or on[i] > on[i - 1] or on[i] == on[1] and on[i - 1] == on[1])
  end
  if ordered then return end
  error(("pipeline: parameter %s is used by virtual stages %s, on ranks %s: its gradients would be added in a "
    .. "different "
    .. "order from that of other schedules. Cut the model so that at most two virtual stages use it "
    .. "(pipeline.partition), or give each rank one virtual stage"):format(name, table.concat(list, ", "),
    table.concat(on, ", ")), 0)
end

--- Creates the description of a model that is cut into virtual stages, for one rank.
---@param module ps.nn.Module
---@param costs ps.engine.PartCost[]
---@param first integer[] the result of stages.cut
---@param pipeline ps.engine.Pipeline
---@return ps.engine.Stages
function stages.new(module, costs, first, pipeline)
  if rawget(module, "unpad") == true then
    error("pipeline: with unpad = true the number of rows between stages is unknown before a batch arrives; make "
      .. "the model without it", 0)
  end
  local self = setmetatable({ parts = parts.of(module), costs = costs, first = first, ranks = {}, mine = {},
    rank = pipeline.rank }, Stages)
  for v = 1, #first - 1 do
    local rank, own = pipeline.table:place(v - 1)
    self.ranks[v] = rank
    if rank == self.rank then self.mine[own + 1] = v - 1 end
  end
  self.vstages_of = users(self, module)
  for name in module:named_parameters() do
    if not self.vstages_of[name] then
      error(("pipeline: no part of the model uses parameter %s: model:parts() has to list the modules of each "
        .. "part, and the model's own parameters in the part's `parameters`"):format(name), 0)
    end
    check_order(self, name, self.vstages_of[name])
  end
  return self
end

--- Creates the stages of a model whose own forward runs the stages. An example is a model of ps.bmt. Each rank has one
--- virtual stage.
---@param module ps.nn.Module
---@param stage_of fun(tensor: ps.Tensor): integer? returns the stage of a parameter or buffer, from 0, or nil if all
---  stages have the tensor
---@param rank integer index of this process among the stages
---@param size integer
---@return ps.engine.Stages
function stages.of_itself(module, stage_of, rank, size)
  local self = setmetatable({ parts = false, costs = {}, first = {}, ranks = {}, mine = { rank }, rank = rank,
    vstages_of = {} }, Stages)
  local all = {}
  for v = 1, size do self.ranks[v], all[v] = v - 1, v - 1 end
  for name, tensor in module:named_parameters() do
    local stage = stage_of(tensor)
    self.vstages_of[name] = stage and { stage } or all
  end
  for name, tensor in module:named_buffers() do
    local stage = stage_of(tensor)
    self.vstages_of[name] = stage and { stage } or nil
  end
  return self
end

--- Returns the first virtual stage of this rank that uses a parameter, as an index among the virtual stages of this
--- rank. Returns nil if no virtual stage of this rank uses the parameter.
---@param name string the first name of a tied parameter
---@return integer? vstage from 0
function Stages:own(name)
  for _, v in ipairs(self.vstages_of[name] or {}) do
    for i, mine in ipairs(self.mine) do if mine == v then return i - 1 end end
  end
end

--- Returns the virtual stages of this rank that use a parameter, except the first virtual stage, which own() returns.
--- The results are indices among the virtual stages of this rank.
---@param name string
---@return integer[]
function Stages:other_uses(name)
  local list, first = {}, self:own(name)
  for _, v in ipairs(self.vstages_of[name] or {}) do
    for i, mine in ipairs(self.mine) do if mine == v and i - 1 ~= first then list[#list + 1] = i - 1 end end
  end
  return list
end

--- Returns true if several virtual stages, on any ranks, use the same parameter.
---@return boolean
function Stages:has_ties()
  for _, list in pairs(self.vstages_of) do if #list > 1 then return true end end
  return false
end

--- If only another rank holds a parameter or buffer, returns a text that names that rank. Returns nil if this rank
--- holds the tensor. All ranks hold buffers that belong to no part.
---@param name string
---@return string?
function Stages:elsewhere(name)
  local list = self.vstages_of[name]
  if not list or self:own(name) then return nil end
  return ("rank %d of the pipeline (virtual stage %d)"):format(self.ranks[list[1] + 1], list[1])
end

--- Returns the other ranks that hold a copy of one of this rank's parameters. An example is a tied embedding.
---@param name string
---@return integer[]
function Stages:sharers(name)
  local list, seen = {}, { [self.rank] = true }
  for _, v in ipairs(self.vstages_of[name] or {}) do
    local rank = self.ranks[v + 1]
    if not seen[rank] then seen[rank], list[#list + 1] = true, rank end
  end
  return list
end

--- Returns true if this rank saves a parameter or buffer. Only one rank of a pipeline saves it, because all copies of a
--- tied embedding are equal.
---@param name string
---@return boolean
function Stages:saves(name)
  local list = self.vstages_of[name]
  return (list and self.ranks[list[1] + 1] or 0) == self.rank
end

--- Returns the ranks that hold copies of tied parameters, or nil if each parameter is on only one rank.
---@return integer[]?
function Stages:copies()
  local found
  for name, list in pairs(self.vstages_of) do
    local ranks, seen = {}, {}
    for _, v in ipairs(list) do
      local rank = self.ranks[v + 1]
      if not seen[rank] then seen[rank], ranks[#ranks + 1] = true, rank end
    end
    if #ranks > 1 then
      table.sort(ranks)
      local key = table.concat(ranks, ", ")
      if found and found.key ~= key then
        error(("pipeline: parameter %s is used by ranks %s, %s by ranks %s; all tied parameters must be on the same "
          .. "ranks: cut the model at other parts (pipeline.partition)"):format(name, key, found.name, found.key), 0)
      end
      found = { key = key, name = name, ranks = ranks }
    end
  end
  return found and found.ranks
end

--- Removes the tensors of other ranks' virtual stages from a state_dict. Buffers that all ranks have are removed on all
--- ranks except rank 0.
---@param state table<string, ps.Tensor>
function Stages:keep_own(state)
  for name in pairs(state) do
    local everywhere = not self.vstages_of[name]
    if everywhere and self.rank > 0 or self:elsewhere(name) then state[name] = nil end
  end
end

--- Returns true if a state contains no tensor that only other ranks hold. The results of keep_own contain no such
--- tensor. The state may be empty if other ranks of the same stage own all its tensors.
---@param state table<string, ps.Tensor>|table a table of tensors, or an open file with names()
---@return boolean
function Stages:is_own(state)
  if type(state) ~= "table" then return false end
  local names = {}
  if state.read_into then names = state:names() else for name in pairs(state) do names[#names + 1] = name end end
  for _, name in ipairs(names) do if self:elsewhere(name) then return false end end
  return true
end

--- Runs one of this rank's virtual stages.
---@param vstage integer index among this rank's virtual stages, from 0
---@param carry table<string, ps.Tensor> outputs of the previous virtual stage; {} for the first virtual stage
---@param batch table<string, any> the result of model:batch_of for the micro-batch
---@return table<string, ps.Tensor>
function Stages:run(vstage, carry, batch)
  local v = self.mine[vstage + 1] + 1
  return scope.scope(parts.run, self.parts, self.first[v], self.first[v + 1] - 1, carry, batch)
end

--- Returns the cost of a virtual stage. The operations, elements and bytes are sums over the parts of the virtual
--- stage. `carry` is the carry of the last part.
---@param v integer index in the model, from 0
---@return ps.engine.PartCost
function Stages:cost(v)
  local sum = { name = "virtual stage " .. v, forward = 0, input = 0, weight = 0, numel = 0, nbytes = 0,
    activations = 0, dropouts = 0, trains = false }
  for i = self.first[v + 1], self.first[v + 2] - 1 do
    local cost = self.costs[i]
    for _, key in ipairs { "forward", "input", "weight", "numel", "nbytes", "activations", "dropouts" } do
      sum[key] = sum[key] + cost[key]
    end
    sum.trains = sum.trains or cost.trains
    sum.first_dropout = sum.first_dropout or cost.first_dropout
    sum.carry, sum.carry_nbytes = cost.carry, cost.carry_nbytes
  end
  return sum
end

--- Returns true if a virtual stage sends a gradient to the previous virtual stage. It sends a gradient if a tensor that
--- it receives requires a gradient.
---@param v integer index in the model, from 0
---@return boolean
function Stages:sends_gradient(v)
  for _, carry in ipairs(v > 0 and self.costs[self.first[v + 1] - 1].carry or {}) do
    if carry.needs_grad then return true end
  end
  return false
end

--- Returns true if the costs were made by by_parameters, because no batch was known when the model was cut.
---@return boolean
function Stages:is_uncounted() return self.costs[1] ~= nil and self.costs[1].uses == nil end

--- Counts the costs for another batch. After this call, cost() and sends_gradient() use the new costs.
---@param module ps.nn.Module
---@param args any[] the model's arguments for a micro-batch
---@param precision? string
function Stages:recount(module, args, precision) self.costs = count.parts(module, args, precision) end

--- Raises an error if a part reads a parameter that the virtual stage of the part does not hold.
---@param costs ps.engine.PartCost[] the costs of a micro-batch
function Stages:check_uses(costs)
  for v = 1, #self.ranks do
    for i = self.first[v], self.first[v + 1] - 1 do
      for _, name in ipairs(costs[i].uses or {}) do
        local list, has = self.vstages_of[name] or { v - 1 }, false
        for _, other in ipairs(list) do has = has or other == v - 1 end
        if not has then
          error(("pipeline: part %s uses %s, which its virtual stage %d does not hold: name it in the part's "
            .. "`parameters`, or give ps.initialize a batch as `example`, with which it finds tied embeddings"):format(
            costs[i].name, name, v - 1), 0)
        end
      end
    end
  end
end

-- -- making a model ---------------------------------------------------------------------------------------------------
-- Returns the batch with which a model's parts are counted. It is the `example` of ps.initialize. If there is none, it
-- is the example that the model makes. Returns nil if the model makes no example.
local function example_of(module, pipeline)
  if pipeline.example then return pipeline.example end
  return type(module.example) == "function" and { module:example(1, MOST_POSITIONS) } or nil
end

-- Returns approximate costs of a model's parts, for use before a batch is known. The number of operations of a part is
-- replaced by the number of elements of its parameters. When the first batch arrives, the parts are counted (row.lua).
local function by_parameters(module)
  local costs = {}
  for i, part in ipairs(parts.of(module)) do
    local cost = { name = part.name, forward = 0, input = 0, weight = 0, numel = 0, nbytes = 0, activations = 0,
      dropouts = 0, first_dropout = 0, trains = false, carry = {}, carry_nbytes = 0 }
    count.add_parameters(module, part, cost)
    cost.forward, cost.input, cost.weight = cost.numel, cost.numel, cost.numel
    costs[i] = cost
  end
  return costs
end

-- Returns the costs with measured seconds instead of counted operations. The seconds are measured on the device of rank
-- 0. All ranks use these seconds, because they must cut the model in the same way.
local function measured(module, costs, args, where)
  if not devices.computes then
    hooks.tell("plan_note",
      'pipeline.partition = "measured": a dry run of a script cannot measure, so it cut the model '
      .. "by counted operations; a real run may cut it elsewhere, and its stages then hold more or fewer bytes")
    return costs
  end
  local text = agree.first(mesh.group "world", function()
    local seconds = {}
    for i, part in ipairs(measure.parts(module, costs, args, where.device, where.precision)) do
      seconds[i] = ("%.17g %.17g %.17g"):format(part.forward, part.input, part.weight)
    end
    return table.concat(seconds, "\n")
  end)
  local list = {}
  for forward, input, weight in text:gmatch "(%S+) (%S+) (%S+)" do
    local cost = {}
    for key, value in pairs(costs[#list + 1]) do cost[key] = value end
    cost.forward, cost.input, cost.weight = tonumber(forward), tonumber(input), tonumber(weight)
    list[#list + 1] = cost
  end
  return list
end

local MEASURES = 'pipeline.partition = "measured" runs the parts with a batch: ps.initialize { example = BATCH, ... }'

-- Counts the costs of a model's parts, and cuts the model into virtual stages.
local function cut_of(module, pipeline, where)
  local how, args = pipeline.partition, example_of(module, pipeline)
  if not args then
    if how == "measured" then error(MEASURES, 0) end
    local costs = by_parameters(module)
    return { costs = costs, first = stages.cut(costs, pipeline.table, how, module:parts()) }
  end
  local found = { costs = count.parts(module, args, where.precision) }
  local weighed = how == "measured" and measured(module, found.costs, args, where) or found.costs
  found.first, found.times = stages.cut(weighed, pipeline.table, how, module:parts())
  return found
end

--- Makes a model that has no values yet, and cuts it into virtual stages.
---@param model_func fun(): ps.nn.Module
---@param pipeline ps.engine.Pipeline
---@param where {device: string, precision?: string, cut?: fun(module: ps.nn.Module)} cut: cuts the layers of the model
---  for tensor parallelism
---@return ps.nn.Module
---@return ps.engine.Stages
function stages.divide(model_func, pipeline, where)
  local module = deferred.make(model_func)
  if type(module.parts) ~= "function" then
    error(("pipeline: %s has no method parts(), which defines where it can be cut (docs/models.md)")
      :format(module.class_name), 0)
  end
  if where.cut then where.cut(module) end
  local found = pipeline.found or hooks.ask "before_cut" or cut_of(module, pipeline, where)
  local made = stages.new(module, found.costs, found.first, pipeline)
  made.times = found.times
  return module, made
end

--- Creates a model of which this process holds only its own virtual stages. Random numbers are the same as in a process
--- that creates the whole model. Therefore the parameters have the same bits.
---@param model_func fun(): ps.nn.Module
---@param pipeline ps.engine.Pipeline
---@param where {device: string, precision?: string, stage?: fun(parameter: ps.Tensor), cut?: fun(module: ps.nn.Module)}
---  stage: called with each parameter of this process after the values of the parameter have been set. cut: cuts the
---  layers of the model for tensor parallelism, while the model has no values
---@return ps.nn.Module
---@return ps.engine.Stages
function stages.make(model_func, pipeline, where)
  local module, made = stages.divide(model_func, pipeline, where)
  local off = where.stage and hooks.on("parameter", where.stage)
  local ok, problem = pcall(deferred.materialize, module, { device = where.device,
    elsewhere = function(name) return made:elsewhere(name) end })
  if off then off() end
  if not ok then error(problem, 0) end
  return module, made
end

return stages
