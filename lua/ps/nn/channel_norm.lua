-- SPDX-License-Identifier: BSD-3-Clause
-- Norms over channels: BatchNorm1d and BatchNorm2d, SyncBatchNorm (statistics over the batches of all data-parallel
-- ranks), GroupNorm and InstanceNorm.
--
-- Running statistics are updated once for each forward of a micro-batch in training. They are not updated when backward
-- recomputes the forward, and not in a dry run. In an engine's step, the first forward saves a copy of the statistics.
-- If the step is abandoned after an error, or skipped after an overflow, the copy is restored.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local images = require "ps.tensor.images"
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local scope = require "ps.core.scope"
local core = require "ps.nn.module"
local error, ops = caller.error, native.ops
local F = functional

local exports = {}

-- -- steps ------------------------------------------------------------------------------------------------------------
local STATISTICS = { "running_mean", "running_var", "num_batches_tracked" }
-- The state of a layer in its engine's step. The state is true until the layer's statistics are updated. Afterwards it
-- is a table with copies of the statistics from before the step.
local in_step = setmetatable({}, { __mode = "k" })
local layers = setmetatable({}, { __mode = "k" })                -- layers that have running statistics

-- Returns the layers in a model that have running statistics.
local function layers_in(model)
  local list = {}
  if next(layers) == nil then return list end
  model:apply(function(module) if layers[module] then list[#list + 1] = module end end)
  return list
end

-- Saves the statistics from before the step, once per step.
local function keep_statistics(layer)
  if in_step[layer] ~= true then return end
  local copies = layer.kept or {}
  rawset(layer, "kept", copies)
  scope.no_grad(function()
    for _, name in ipairs(STATISTICS) do
      if copies[name] then copies[name]:copy_(layer[name]) else copies[name] = layer[name]:clone():keep() end
    end
  end)
  in_step[layer] = copies
end

local function restore_statistics(layer)
  local copies = in_step[layer]
  if type(copies) ~= "table" then return end
  scope.no_grad(function() for _, name in ipairs(STATISTICS) do layer[name]:copy_(copies[name]) end end)
end

hooks.on("stepped", function(model, how)
  for _, layer in ipairs(layers_in(model)) do
    if how == "given_up" then restore_statistics(layer) end
    in_step[layer] = how == "begins" or nil
  end
end)

-- -- batch norm -------------------------------------------------------------------------------------------------------
---@class ps.nn.BatchNorm: ps.nn.Module
---@field weight? ps.Tensor [num_features]
---@field bias? ps.Tensor [num_features]
---@field running_mean? ps.Tensor [num_features]
---@field running_var? ps.Tensor [num_features]
---@field num_batches_tracked? ps.Tensor int64, of 0 dimensions
local BatchNorm = core.class("BatchNorm")
BatchNorm.unscoped = true

local BATCH_NORM = { eps = "number", momentum = "number|boolean", affine = "boolean", track_running_stats = "boolean",
  dtype = "string", device = "string" }

local function init(self, num_features, options, kinds)
  local name = "nn." .. self.class_name
  options = caller.options(options, name, kinds or BATCH_NORM)
  self.num_features, self.eps = caller.whole(num_features, name .. ": num_features", 1), options.eps or 1e-5
  self.momentum = options.momentum == nil and 0.1 or options.momentum
  if self.momentum == true then
    error(name .. ": momentum is true; it must be a number, or false for the mean of all")
  end
  local where = { dtype = options.dtype, device = options.device }
  if options.affine ~= false then
    self:param("weight", create.ones({ num_features }, where))
    self:param("bias", create.zeros({ num_features }, where))
  end
  if options.track_running_stats == false then return end
  local code = options.dtype and native.dtype_code(options.dtype) or create.default_code()
  local dtype = code == native.C.PS_F64 and "fp64" or "fp32"
  self:buffer("running_mean", create.zeros({ num_features }, { dtype = dtype, device = options.device }))
  self:buffer("running_var", create.ones({ num_features }, { dtype = dtype, device = options.device }))
  self:buffer("num_batches_tracked", create.zeros({}, { dtype = "int64", device = options.device }))
  layers[self] = true
end

--- Normalises each channel over the batch and all positions. The subclasses nn.BatchNorm1d and nn.BatchNorm2d define
--- which shapes are allowed.
---@param num_features integer
---@param options? table
function BatchNorm:init(num_features, options) init(self, num_features, options) end

local function check_input(self, x)
  local name = "nn." .. self.class_name
  if caller.tensor(x, name, "the input") == nil then error(name .. ": no input was given") end
  if not self.dims[x:dim()] then
    error(("%s takes %s, not a tensor of %s, [%s]"):format(name, self.takes, caller.counted(x:dim(), "dimension"),
      table.concat(x:shape(), ", ")))
  end
  if x:size(1) ~= self.num_features then
    error(("%s: the input has %d channels, but num_features is %d"):format(name, x:size(1), self.num_features))
  end
end

-- Counts a forward in training. Returns the weight of the batch's statistics in the update of the running statistics.
local function count_batch(self)
  keep_statistics(self)
  local n = self.num_batches_tracked
  scope.no_grad(function() n:add_(1) end)
  return self.momentum or n:to(self.running_mean:dtype()):reciprocal()
end

--- Normalises the input. In training, uses the mean and variance of the input, and updates the running statistics with
--- this mean and variance. In evaluation mode, uses the running statistics.
---@param x ps.Tensor [N, num_features, ...]
---@return ps.Tensor of x's shape
function BatchNorm:forward(x)
  check_input(self, x)
  local mean, var = self.running_mean, self.running_var
  if not self.training and mean ~= nil then
    return F.batch_norm(x, mean, var, self.weight, self.bias, { eps = self.eps })
  end
  if not self.training or mean == nil or not images.counts() then
    return F.batch_norm(x, nil, nil, self.weight, self.bias, { training = true, eps = self.eps })
  end
  local y, batch_mean, batch_var, count = images.batch_statistics(x, self.weight, self.bias, self.eps)
  images.move_statistics(batch_mean, batch_var, count, mean, var, count_batch(self))
  return y
end

function BatchNorm:extra_repr()
  return ("%d, eps=%g, momentum=%s, affine=%s, track_running_stats=%s"):format(self.num_features, self.eps,
    self.momentum and ("%g"):format(self.momentum) or "None", self.weight ~= nil and "True" or "False",
    self.running_mean ~= nil and "True" or "False")
end

---@class ps.nn.BatchNorm1d: ps.nn.BatchNorm
local BatchNorm1d = core.class("BatchNorm1d", BatchNorm)
BatchNorm1d.unscoped, BatchNorm1d.dims, BatchNorm1d.takes = true, { [2] = true, [3] = true }, "[N, C] or [N, C, L]"

--- Normalises each channel over the batch and all positions (Ioffe and Szegedy 2015). The initial weight is 1 and the
--- initial bias is 0. Each rank has running statistics of its own rows, and only the statistics of rank 0 are saved.
--- nn.SyncBatchNorm uses the rows of all ranks.
---@param num_features integer C
---@param options? {eps?: number, momentum?: number|false, affine?: boolean, track_running_stats?: boolean, dtype?:
--- string, device?: string} eps (default 1e-5); momentum (default 0.1; if it is false, the running statistics are the
--- mean over all batches, like PyTorch's None); affine = false: without weight and bias; track_running_stats = false:
--- always uses the batch's statistics
function BatchNorm1d:init(num_features, options) init(self, num_features, options) end
exports.BatchNorm1d = BatchNorm1d

---@class ps.nn.BatchNorm2d: ps.nn.BatchNorm
local BatchNorm2d = core.class("BatchNorm2d", BatchNorm)
BatchNorm2d.unscoped, BatchNorm2d.dims, BatchNorm2d.takes = true, { [4] = true }, "[N, C, H, W]"

--- Normalises each channel over the batch and all positions (Ioffe and Szegedy 2015). The initial weight is 1 and the
--- initial bias is 0. Each rank has running statistics of its own rows, and only the statistics of rank 0 are saved.
--- nn.SyncBatchNorm uses the rows of all ranks.
---@param num_features integer C
---@param options? {eps?: number, momentum?: number|false, affine?: boolean, track_running_stats?: boolean, dtype?:
--- string, device?: string} eps (default 1e-5); momentum (default 0.1; if it is false, the running statistics are the
--- mean over all batches, like PyTorch's None); affine = false: without weight and bias; track_running_stats = false:
--- always uses the batch's statistics
function BatchNorm2d:init(num_features, options) init(self, num_features, options) end
exports.BatchNorm2d = BatchNorm2d

-- -- over ranks -------------------------------------------------------------------------------------------------------
---@class ps.nn.SyncBatchNorm: ps.nn.BatchNorm
local SyncBatchNorm = core.class("SyncBatchNorm", BatchNorm)
SyncBatchNorm.dims, SyncBatchNorm.takes = { true, true, true, true, true, true, true, true }, "[N, C, ...]"
SyncBatchNorm.dims[1] = nil
SyncBatchNorm.unscoped = false

--- Normalises like nn.BatchNorm1d and nn.BatchNorm2d, but with statistics over the batches of all data-parallel ranks.
--- All ranks have the same running statistics. With one rank, the results equal those batch norms' results.
---@param num_features integer C
---@param options? {eps?: number, momentum?: number|false, affine?: boolean, track_running_stats?: boolean, dtype?:
--- string, device?: string} the options of nn.BatchNorm2d
function SyncBatchNorm:init(num_features, options) init(self, num_features, options) end

-- Normalises x [N, C, ...] over all ranks. Returns the result, and the mean, variance and count over all ranks.
-- Gradients pass through the exchanges between ranks.
local function over_ranks(self, x, group)
  local dtype = x:dtype()
  local wide = (dtype == "fp64" or dtype == "fp32") and x or x:float()
  local dims, shape, C = { 0 }, { 1, x:size(1) }, x:size(1)
  for d = 2, x:dim() - 1 do dims[d], shape[d + 1] = d, 1 end
  local own = create.full({ 1 }, x:numel() / C, { dtype = wide:dtype(), device = wide:device() })
  local sums = group:sum(ops.concat({ wide:sum(dims), own }, 0))
  local count = sums:narrow(0, C, 1):detach()
  local mean = sums:narrow(0, 0, C) / count
  local d = wide - mean:reshape(shape)
  local var = group:sum((d * d):sum(dims)) / count
  local y = d * (var + self.eps):rsqrt():reshape(shape)
  if self.weight ~= nil then
    y = y * self.weight:to(y:dtype()):reshape(shape) + self.bias:to(y:dtype()):reshape(shape)
  end
  return y:to(dtype), mean:detach(), var:detach(), count:reshape({})
end

--- Normalises the input. In training, uses the mean and variance of the inputs of all ranks. In evaluation mode, uses
--- the running statistics.
---@param x ps.Tensor [N, num_features, ...]; N may differ between ranks
---@return ps.Tensor of x's shape
function SyncBatchNorm:forward(x)
  local group = require("ps.dist.mesh").group "dp"
  if group == nil or not self.training and self.running_mean ~= nil then return BatchNorm.forward(self, x) end
  check_input(self, x)
  local y, mean, var, count = over_ranks(self, x, group)
  if self.training and self.running_mean ~= nil and images.counts() then
    images.move_statistics(mean, var, count, self.running_mean, self.running_var, count_batch(self))
  end
  return y
end

--- Replaces each nn.BatchNorm1d and nn.BatchNorm2d in a model by an nn.SyncBatchNorm with the same parameters,
--- statistics and settings.
---@param model ps.nn.Module
---@return ps.nn.Module the model, or its replacement if the model itself is a batch norm
function SyncBatchNorm.convert_sync_batchnorm(model)
  if not core.is_module(model) then error("nn.SyncBatchNorm.convert_sync_batchnorm takes a module") end
  if model.class_name == "BatchNorm1d" or model.class_name == "BatchNorm2d" then
    local made = SyncBatchNorm(model.num_features, { eps = model.eps, momentum = model.momentum,
      affine = false, track_running_stats = false })
    if model.weight ~= nil then made.weight, made.bias = model.weight, model.bias end
    if model.running_mean ~= nil then
      for _, name in ipairs(STATISTICS) do made:buffer(name, model[name]) end
      layers[made] = true
    end
    return made:train(model.training)
  end
  for name, child in model:named_children() do
    local made = SyncBatchNorm.convert_sync_batchnorm(child)
    if not rawequal(made, child) then
      local key = model[name] ~= nil and name or tonumber(name)
      model[key] = made
    end
  end
  return model
end
exports.SyncBatchNorm = SyncBatchNorm

-- -- group norm -------------------------------------------------------------------------------------------------------
---@class ps.nn.GroupNorm: ps.nn.Module
---@field weight? ps.Tensor [num_channels]
---@field bias? ps.Tensor [num_channels]
local GroupNorm = core.class("GroupNorm")
GroupNorm.unscoped = true

local GROUP_NORM = { eps = "number", affine = "boolean", dtype = "string", device = "string" }

--- Normalises groups of adjacent channels of each sample over all positions (Wu and He 2018). The initial weight is 1
--- and the initial bias is 0.
---@param num_groups integer
---@param num_channels integer
---@param options? {eps?: number, affine?: boolean, dtype?: string, device?: string} eps (default 1e-5); affine = false:
--- without weight and bias
function GroupNorm:init(num_groups, num_channels, options)
  options = caller.options(options, "nn.GroupNorm", GROUP_NORM)
  self.num_groups = caller.whole(num_groups, "nn.GroupNorm: num_groups", 1)
  self.num_channels = caller.whole(num_channels, "nn.GroupNorm: num_channels", 1)
  if num_channels % num_groups ~= 0 then
    error(("nn.GroupNorm: %d channels cannot be divided into %d groups"):format(num_channels, num_groups))
  end
  self.eps = options.eps or 1e-5
  if options.affine == false then return end
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", create.ones({ num_channels }, where))
  self:param("bias", create.zeros({ num_channels }, where))
end

--- Normalises the input.
---@param x ps.Tensor [N, num_channels, ...]
---@return ps.Tensor of x's shape
function GroupNorm:forward(x) return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps) end

function GroupNorm:extra_repr()
  return ("%d, %d, eps=%g, affine=%s"):format(self.num_groups, self.num_channels, self.eps,
    self.weight ~= nil and "True" or "False")
end
exports.GroupNorm = GroupNorm

-- -- instance norm ----------------------------------------------------------------------------------------------------
local INSTANCE_NORM = { eps = "number", affine = "boolean", track_running_stats = "boolean", momentum = "number",
  dtype = "string", device = "string" }

-- Creates the class of an InstanceNorm whose inputs have `dims` dimensions.
local function instance_norm(class_name, dims, takes)
  local class = core.class(class_name)
  class.unscoped = true
  --- Normalises each channel of each sample over all positions (Ulyanov et al. 2016). Does the same in training and
  --- evaluation. There are no running statistics.
  ---@param num_features integer C
  ---@param options? {eps?: number, affine?: boolean, dtype?: string, device?: string} eps (default 1e-5); affine:
  --- whether each channel has a trained weight and bias (default false)
  function class:init(num_features, options)
    local name = "nn." .. class_name
    options = caller.options(options, name, INSTANCE_NORM)
    if options.track_running_stats then
      error(name .. ": track_running_stats = true does not exist here; use nn.BatchNorm for running statistics")
    end
    self.num_features, self.eps = caller.whole(num_features, name .. ": num_features", 1), options.eps or 1e-5
    if not options.affine then return end
    local where = { dtype = options.dtype, device = options.device }
    self:param("weight", create.ones({ num_features }, where))
    self:param("bias", create.zeros({ num_features }, where))
  end
  --- Normalises the input.
  ---@param x ps.Tensor [N, num_features, ...]
  ---@return ps.Tensor of x's shape
  function class:forward(x)
    local name = "nn." .. class_name
    if caller.tensor(x, name, "the input") == nil then error(name .. ": no input was given") end
    if x:dim() ~= dims or x:size(1) ~= self.num_features then
      error(("%s: the input is [%s]; it must be %s with C = %d"):format(name, table.concat(x:shape(), ", "), takes,
        self.num_features))
    end
    return F.group_norm(x, self.num_features, self.weight, self.bias, self.eps)
  end
  function class:extra_repr()
    return ("%d, eps=%g, affine=%s"):format(self.num_features, self.eps, self.weight ~= nil and "True" or "False")
  end
  exports[class_name] = class
end
instance_norm("InstanceNorm1d", 3, "[N, C, L]")
instance_norm("InstanceNorm2d", 4, "[N, C, H, W]")

return exports
