-- SPDX-License-Identifier: BSD-3-Clause
-- Layers that multiply by a weight. The weight of Linear is [out, in], as in PyTorch. The weight of Conv1D is [in,
-- out], as in GPT-2. LMHead multiplies by the vectors of a vocabulary.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local init = require "ps.nn.weights"
local F = functional

---@class ps.nn.Linear: ps.nn.Module
---@field weight ps.Tensor [out, in]
---@field bias? ps.Tensor [out]
local Linear = nn_module.class("Linear")
Linear.unscoped = true

local LINEAR = { bias = "boolean", std = "number", dtype = "string", device = "string" }

--- Creates a layer that computes y = x weight^T + bias. By default, weight and bias are uniform in [-b, b], as in
--- PyTorch, where b = 1 / sqrt(inputs). With `std`, the weight is normally distributed with this standard deviation and
--- the bias is 0, as in GPT-2 and Llama.
---@param inputs integer
---@param outputs integer
---@param options? {bias?: boolean, std?: number, dtype?: string, device?: string} bias (default true)
function Linear:init(inputs, outputs, options)
  options = caller.options(options, "nn.Linear", LINEAR)
  caller.whole(inputs, "nn.Linear: the number of inputs")
  caller.whole(outputs, "nn.Linear: the number of outputs")
  self.inputs, self.outputs = inputs, outputs
  local where = { dtype = options.dtype, device = options.device }
  local weight, std = create.empty({ outputs, inputs }, where), options.std
  self:param("weight", std and init.normal_(weight, 0, std) or init.kaiming_uniform_(weight, math.sqrt(5)))
  if options.bias == false then return end
  local bias, bound = create.empty({ outputs }, where), 1 / math.sqrt(inputs)
  self:param("bias", std and init.zeros_(bias) or init.uniform_(bias, -bound, bound))
end

--- Returns x weight^T + bias. A residual is added when the product is written to memory.
---@param x ps.Tensor [..., inputs]
---@param residual? ps.Tensor [..., outputs]
---@return ps.Tensor [..., outputs]
function Linear:forward(x, residual)
  return native.ops.linear(x, self.weight, self.bias, residual, 1)
end

function Linear:extra_repr()
  return ("%d, %d%s"):format(self.inputs, self.outputs, self.bias == nil and ", bias=false" or "")
end

---@class ps.nn.Conv1D: ps.nn.Module
---@field weight ps.Tensor [in, out]
---@field bias ps.Tensor [out]
local Conv1D = nn_module.class("Conv1D")
Conv1D.unscoped = true

local CONV1D = { std = "number", dtype = "string", device = "string" }

--- Creates a layer that computes y = x weight + bias, like the layer of this name in Hugging Face's GPT-2. The weight
--- is normally distributed with the standard deviation `std`, and the bias is 0.
---@param inputs integer
---@param outputs integer
---@param options? {std?: number, dtype?: string, device?: string} std (default 0.02)
function Conv1D:init(inputs, outputs, options)
  options = caller.options(options, "nn.Conv1D", CONV1D)
  caller.whole(inputs, "nn.Conv1D: the number of inputs")
  caller.whole(outputs, "nn.Conv1D: the number of outputs")
  self.inputs, self.outputs = inputs, outputs
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", init.normal_(create.empty({ inputs, outputs }, where), 0, options.std or 0.02))
  self:param("bias", create.zeros({ outputs }, where))
end

--- Returns x weight + bias. A residual is added when the product is written to memory.
---@param x ps.Tensor [..., inputs]
---@param residual? ps.Tensor [..., outputs]
---@return ps.Tensor [..., outputs]
function Conv1D:forward(x, residual)
  return native.ops.linear(x, self.weight, self.bias, residual, 0)
end

function Conv1D:extra_repr() return ("%d, %d"):format(self.inputs, self.outputs) end

---@class ps.nn.LMHead: ps.nn.Module
---@field weight ps.Tensor [words, width]
local LMHead = nn_module.class("LMHead")
LMHead.unscoped = true

local LM_HEAD = { std = "number", dtype = "string", device = "string", tied = "table" }

--- Creates the head of a language model. The head computes logits over a vocabulary, or the loss of these logits. The
--- weight is normally distributed with the standard deviation `std`. With `tied`, the head uses the weight of a token
--- embedding instead, and this weight remains a parameter of the embedding.
---@param width integer C
---@param words integer V
---@param options? {std?: number, dtype?: string, device?: string, tied?: ps.nn.Embedding} std (default 0.02)
function LMHead:init(width, words, options)
  options = caller.options(options, "nn.LMHead", LM_HEAD)
  caller.whole(width, "nn.LMHead: the width")
  caller.whole(words, "nn.LMHead: the number of words")
  self.inputs, self.outputs = width, words
  if options.tied then
    -- The embedding is not registered as a child module, so that its parameter has only one name.
    rawset(self, "tied", options.tied)
    return
  end
  local weight = create.empty({ words, width }, { dtype = options.dtype, device = options.device })
  self:param("weight", init.normal_(weight, 0, options.std or 0.02))
end

-- Returns the head's weight [V, C].
local function weight_of(head) return (rawget(head, "tied") or head).weight end

--- Returns the logits.
---@param x ps.Tensor [..., C]
---@return ps.Tensor [..., V]
function LMHead:forward(x) return native.ops.linear(x, weight_of(self), nil, nil, 1) end

--- Returns the mean cross entropy of the logits. Never holds all logits in memory at once.
---@param x ps.Tensor [..., C]
---@param targets ps.Tensor integers [...]; targets of -100 are ignored
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum"} the options of F.lm_loss
---@return ps.Tensor of 0 dimensions
function LMHead:loss(x, targets, options) return F.lm_loss(x, weight_of(self), targets, options) end

function LMHead:extra_repr() return ("%d, %d"):format(self.inputs, self.outputs) end

return { Linear = Linear, Conv1D = Conv1D, LMHead = LMHead }
