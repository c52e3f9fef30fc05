-- SPDX-License-Identifier: BSD-3-Clause
-- The attention and the MLP of a transformer block, for models whose parameters need no particular names.
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local linear = require "ps.nn.linear"
local activation = require "ps.nn.activation"
local F = functional

---@class ps.nn.MultiheadSelfAttention: ps.nn.Module
local MultiheadSelfAttention = nn_module.class("MultiheadSelfAttention")

local ATTENTION = { causal = "boolean", dropout = "number", bias = "boolean", dtype = "string", device = "string" }
local FORWARD = { mask = "tensor", residual = "tensor" }

-- Returns the options for the linear layers.
local function of_linear(options) return { bias = options.bias, dtype = options.dtype, device = options.device } end

--- Creates self-attention. One product computes queries, keys and values, and another product computes the result.
---@param width integer C
---@param heads integer number of heads, which must divide width
---@param options? {causal?: boolean, dropout?: number, bias?: boolean, dtype?: string, device?: string} causal (default
---  false); dropout: probability of dropping a weight in training (default 0); bias (default true)
function MultiheadSelfAttention:init(width, heads, options)
  options = caller.options(options, "nn.MultiheadSelfAttention", ATTENTION)
  caller.whole(width, "nn.MultiheadSelfAttention: the width")
  caller.whole(heads, "nn.MultiheadSelfAttention: the number of heads")
  if heads < 1 or width % heads ~= 0 then
    caller.error(("MultiheadSelfAttention: %d heads do not divide a width of %d"):format(heads, width))
  end
  self.heads, self.causal, self.dropout = heads, options.causal or false, options.dropout or 0
  self.qkv = linear.Linear(width, 3 * width, of_linear(options))
  self.proj = linear.Linear(width, width, of_linear(options))
end

--- Applies self-attention. Each position attends to all positions. With `causal`, it attends to itself and earlier
--- positions.
---@param x ps.Tensor [B, T, C]
---@param options? {mask?: ps.Tensor, residual?: ps.Tensor} mask: bool [B, T], in which false hides a key; residual: [B,
--- T, C], which is added to the result
---@return ps.Tensor [B, T, C]
function MultiheadSelfAttention:forward(x, options)
  options = caller.options(options, "nn.MultiheadSelfAttention's forward", FORWARD)
  if self.dropout > 0 and not self.training then nn_module.dropout_is_off(self) end
  local y = F.attention_packed(self.qkv(x), self.heads, { causal = self.causal, mask = options.mask,
    dropout = self.training and self.dropout or 0 })
  return self.proj(y, options.residual)
end

---@class ps.nn.MLP: ps.nn.Module
local MLP = nn_module.class("MLP")

local OF_MLP = { activation = "callable", dropout = "number", bias = "boolean", dtype = "string", device = "string" }

--- Creates a module that computes down(activation(up(x))), followed by dropout.
---@param width integer C
---@param hidden? integer default 4 * width
---@param options? {activation?: ps.nn.Module, dropout?: number, bias?: boolean, dtype?: string, device?: string}
---  activation (default nn.GELU()); dropout (default 0); bias (default true)
function MLP:init(width, hidden, options)
  options = caller.options(options, "nn.MLP", OF_MLP)
  caller.whole(width, "nn.MLP: the width")
  if hidden ~= nil then caller.whole(hidden, "nn.MLP: the hidden width") end
  self.up = linear.Linear(width, hidden or 4 * width, of_linear(options))
  self.act = options.activation or activation.GELU()
  self.down = linear.Linear(hidden or 4 * width, width, of_linear(options))
  self.drop = activation.Dropout(options.dropout or 0)
end

--- Computes down(activation(up(x))) with dropout. If a residual is passed, adds it.
---@param x ps.Tensor [..., C]
---@param residual? ps.Tensor [..., C]
---@return ps.Tensor [..., C]
function MLP:forward(x, residual)
  local h = self.act(self.up(x))
  if not self.drop:active() then return self.down(h, residual) end
  local y = self.drop(self.down(h))
  if residual == nil then return y end
  return y + residual
end

return { MultiheadSelfAttention = MultiheadSelfAttention, MLP = MLP }
