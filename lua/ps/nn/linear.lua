-- SPDX-License-Identifier: BSD-3-Clause
-- Products with a weight: Linear (PyTorch's layout [out, in]) and Conv1D (GPT-2's layout [in, out]).
local ps = require "ps"
local caller = require "ps.caller"
local core = require "ps.nn.module"
local init = require "ps.nn.weights"
local F = ps.functional

---@class ps.nn.Linear: ps.nn.Module
---@field weight ps.Tensor [out, in]
---@field bias? ps.Tensor [out]
local Linear = core.class("Linear")
Linear.unscoped = true

--- y = x weight^T + bias, initialised as PyTorch does (uniform in +-1 / sqrt(inputs)).
---@param inputs integer
---@param outputs integer
---@param options? {bias?: boolean, dtype?: string, device?: string}
function Linear:init(inputs, outputs, options)
  options = caller.options(options, "nn.Linear")
  caller.whole(inputs, "nn.Linear: the number of inputs")
  caller.whole(outputs, "nn.Linear: the number of outputs")
  self.inputs, self.outputs = inputs, outputs
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", init.kaiming_uniform_(ps.empty({ outputs, inputs }, where), math.sqrt(5)))
  if options.bias ~= false then
    local bound = 1 / math.sqrt(inputs)
    self:param("bias", init.uniform_(ps.empty({ outputs }, where), -bound, bound))
  end
end

local OUT_IN, IN_OUT = { out_in = true }, { out_in = false }
local function product(x, w, b, residual, out_in)
  if residual == nil then return F.linear(x, w, b, out_in and OUT_IN or IN_OUT) end
  return F.linear(x, w, b, { out_in = out_in, residual = residual })
end

---@param x ps.Tensor [..., in]
---@param residual? ps.Tensor [..., out], added while the product is written
---@return ps.Tensor [..., out]
function Linear:forward(x, residual)
  return product(x, self.weight, self.bias, residual, true)
end

function Linear:extra_repr()
  return ("%d, %d%s"):format(self.inputs, self.outputs, self.bias == nil and ", bias=false" or "")
end

---@class ps.nn.Conv1D: ps.nn.Module
---@field weight ps.Tensor [in, out]
---@field bias ps.Tensor [out]
local Conv1D = core.class("Conv1D")
Conv1D.unscoped = true

--- y = x weight + bias: Hugging Face's GPT-2 layer of that name. Normal with deviation `std`, zero bias.
---@param inputs integer
---@param outputs integer
---@param options? {std?: number, dtype?: string, device?: string}
function Conv1D:init(inputs, outputs, options)
  options = caller.options(options, "nn.Conv1D")
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
  return product(x, self.weight, self.bias, residual, false)
end

function Conv1D:extra_repr() return ("%d, %d"):format(self.inputs, self.outputs) end

return { Linear = Linear, Conv1D = Conv1D }
