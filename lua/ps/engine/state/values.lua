-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the fp32 values of an engine's parameters, and the gradients of the parameters without the loss scale. The
-- values can be read even while the memory of the parameters contains gradients. Each rank returns the values that it
-- owns.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local nn_module = require "ps.nn.module"
local scope = require "ps.core.scope"
local step = require "ps.engine.step"
local bit = require "bit"
local C = native.C

local values = {}

-- Returns the bytes of a gradient that this rank owns, as a tensor on the host. Returns nil if another rank owns the
-- gradient. Does not read the tensor of the gradient in its part, because a read would gather the bytes of the other
-- ranks.
local function own_gradient(engine, grad)
  if not (engine.ranks and engine.ranks.shards:state() and C.ps_engine_holds(native.ctx,
    grad) ~= 0) then return grad end
  local own = engine.ranks.shards:own(grad, engine.host)
  if own ~= nil then own.flags = bit.bor(own.flags, bit.band(grad.flags, C.PS_T_SLOT)) end
  return own
end

--- Returns two values. The first value is the gradient of an engine's parameter in the current step. The second value
--- is the factor that undoes the loss scale and the sums over micro-batches and ranks.
---@param engine ps.Engine
---@param param ps.Tensor
---@return ps.Tensor? grad nil if there is no gradient, or if another rank owns the gradient
---@return number factor
function values.gradient(engine, param)
  local grad = scope.grad_of(param)
  return grad ~= nil and own_gradient(engine, grad) or nil, engine.micro > 0 and engine.optimizer:grad_scale() or 1
end

--- Returns the name of a parameter that the engine trains, or nil for any other tensor.
---@param engine ps.Engine
---@param param ps.Tensor
---@return string?
function values.name_of(engine, param)
  local at = nn_module.address(param)
  for _, row in ipairs(engine.built.list) do if nn_module.address(row.param) == at then return row.name end end
end

--- Returns the parameters whose values this rank has, in the order of the model.
---@param engine ps.Engine
---@return {name: string, value: ps.Tensor, grad?: ps.Tensor, factor: number}[] list the tensors belong to the engine;
---  `grad` must be multiplied by `factor`
function values.parameters(engine)
  local state, rows, list = engine:state_dict { tied = false }, {}, {}
  for _, row in ipairs(engine.built.list) do rows[nn_module.address(row.param)] = row end
  local factor = engine.micro > 0 and engine.optimizer:grad_scale() or 1
  for name, param in engine.module:named_parameters() do
    local value, row = state[name], rows[nn_module.address(param)]
    if value ~= nil then
      list[#list + 1] = { name = name, value = value, grad = row and values.gradient(engine, param) or nil,
        factor = factor }
    end
  end
  return list
end

local STATE = { __tostring = function(self)
  local where = not self.in_step and "between steps"
    or ("in step %d, %d of %d micro-batches backward"):format(self.steps + 1, self.micro, self.micros)
  return ("an engine of %s parameters on %s, %s, ZeRO stage %d; %s done; %s"):format(
    tostring(self.parameters):reverse():gsub("(%d%d%d)", "%1 "):reverse():gsub("^ ", ""), self.device, self.precision,
    self.zero_stage, caller.counted(self.steps, "step"), where)
end }

--- Returns the engine's state as a table. As text, this table is one line.
---@param engine ps.Engine
---@return {model: ps.Engine, optimizer: ps.EngineOptimizer, device: string, precision: string, zero_stage: integer,
---  parameters: integer, steps: integer, micro: integer, micros: integer, in_step: boolean, config: ps.Config}
function values.state(engine)
  return setmetatable({ model = engine.handle, optimizer = engine.optimizer, device = engine.device_name,
    precision = engine.precision, zero_stage = engine.zero_stage, parameters = engine.module:num_parameters(),
    scheduler = engine.scheduler, steps = engine.steps, micro = engine.micro, micros = step.count(engine),
    in_step = step.is_open(engine) and not step.evaluates(engine), config = engine.cfg }, STATE)
end

return values
