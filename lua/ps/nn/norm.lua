-- SPDX-License-Identifier: BSD-3-Clause
-- Normalisation over the last dimension: LayerNorm and RMSNorm.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local F = functional

---@class ps.nn.LayerNorm: ps.nn.Module
---@field weight ps.Tensor [width]
---@field bias? ps.Tensor [width]
local LayerNorm = nn_module.class("LayerNorm")
LayerNorm.unscoped = true

local LAYER_NORM = { eps = "number", bias = "boolean", dtype = "string", device = "string" }

--- (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; weight starts as 1, bias as 0.
---@param width integer
---@param options? {eps?: number, bias?: boolean, dtype?: string, device?: string} eps default 1e-5, bias default true
function LayerNorm:init(width, options)
  options = caller.options(options, "nn.LayerNorm", LAYER_NORM)
  caller.whole(width, "nn.LayerNorm: the width")
  self.width, self.eps = width, options.eps or 1e-5
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", create.ones({ width }, where))
  if options.bias ~= false then self:param("bias", create.zeros({ width }, where)) end
end

--- Normalises over the last dimension.
---@param x ps.Tensor [..., width]
---@return ps.Tensor [..., width]
function LayerNorm:forward(x) return F.layer_norm(x, self.weight, self.bias, self.eps) end

function LayerNorm:extra_repr() return ("%d, eps=%g"):format(self.width, self.eps) end

---@class ps.nn.RMSNorm: ps.nn.Module
---@field weight ps.Tensor [width]
local RMSNorm = nn_module.class("RMSNorm")
RMSNorm.unscoped = true

local RMS_NORM = { eps = "number", dtype = "string", device = "string" }

--- x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight starts as 1.
---@param width integer
---@param options? {eps?: number, dtype?: string, device?: string} eps default 1e-6
function RMSNorm:init(width, options)
  options = caller.options(options, "nn.RMSNorm", RMS_NORM)
  caller.whole(width, "nn.RMSNorm: the width")
  self.width, self.eps = width, options.eps or 1e-6
  self:param("weight", create.ones({ width }, { dtype = options.dtype, device = options.device }))
end

--- Normalises over the last dimension.
---@param x ps.Tensor [..., width]
---@return ps.Tensor [..., width]
function RMSNorm:forward(x) return F.rms_norm(x, self.weight, self.eps) end

function RMSNorm:extra_repr() return ("%d, eps=%g"):format(self.width, self.eps) end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm }
