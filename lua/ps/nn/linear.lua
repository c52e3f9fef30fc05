-- SPDX-License-Identifier: BSD-3-Clause
-- Products with a weight: Linear (PyTorch's layout [out, in]) and Conv1D (GPT-2's layout [in, out]).
local ps = require "ps"
local caller = require "ps.caller"
local core = require "ps.nn.module"
local init = require "ps.nn.weights"

---@class ps.nn.Linear: ps.nn.Module
---@field weight ps.Tensor [out, in]
---@field bias? ps.Tensor [out]
local Linear = core.class("Linear")
Linear.unscoped = true

local LINEAR = { bias = "boolean", std = "number", dtype = "string", device = "string" }

--- y = x weight^T + bias, initialised as PyTorch does (uniform in +-1 / sqrt(inputs)); with `std` the weight is normal
--- with that deviation and the bias zero, as in GPT-2 and Llama.
---@param inputs integer
---@param outputs integer
---@param options? {bias?: boolean, std?: number, dtype?: string, device?: string} bias default true
function Linear:init(inputs, outputs, options)
  options = caller.options(options, "nn.Linear", LINEAR)
  caller.whole(inputs, "nn.Linear: the number of inputs")
  caller.whole(outputs, "nn.Linear: the number of outputs")
  self.inputs, self.outputs = inputs, outputs
  local where = { dtype = options.dtype, device = options.device }
  local weight, std = ps.empty({ outputs, inputs }, where), options.std
  self:param("weight", std and init.normal_(weight, 0, std) or init.kaiming_uniform_(weight, math.sqrt(5)))
  if options.bias == false then return end
  local bias, bound = ps.empty({ outputs }, where), 1 / math.sqrt(inputs)
  self:param("bias", std and init.zeros_(bias) or init.uniform_(bias, -bound, bound))
end

---@param x ps.Tensor [..., in]
---@param residual? ps.Tensor [..., out], added while the product is written
---@return ps.Tensor [..., out]
function Linear:forward(x, residual)
  return ps.ops.linear(x, self.weight, self.bias, residual, 1)
end

function Linear:extra_repr()
  return ("%d, %d%s"):format(self.inputs, self.outputs, self.bias == nil and ", bias=false" or "")
end

---@class ps.nn.Conv1D: ps.nn.Module
---@field weight ps.Tensor [in, out]
---@field bias ps.Tensor [out]
local Conv1D = core.class("Conv1D")
Conv1D.unscoped = true

local CONV1D = { std = "number", dtype = "string", device = "string" }

--- y = x weight + bias: Hugging Face's GPT-2 layer of that name. Normal with deviation `std`, zero bias.
---@param inputs integer
---@param outputs integer
---@param options? {std?: number, dtype?: string, device?: string}
function Conv1D:init(inputs, outputs, options)
  options = caller.options(options, "nn.Conv1D", CONV1D)
  caller.whole(inputs, "nn.Conv1D: the number of inputs")
  caller.whole(outputs, "nn.Conv1D: the number of outputs")
  self.inputs, self.outputs = inputs, outputs
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", init.normal_(ps.empty({ inputs, outputs }, where), 0, options.std or 0.02))
  self:param("bias", ps.zeros({ outputs }, where))
end

---@param x ps.Tensor [..., in]
---@param residual? ps.Tensor [..., out], added while the product is written
---@return ps.Tensor [..., out]
function Conv1D:forward(x, residual)
  return ps.ops.linear(x, self.weight, self.bias, residual, 0)
end

function Conv1D:extra_repr() return ("%d, %d"):format(self.inputs, self.outputs) end

return { Linear = Linear, Conv1D = Conv1D }
