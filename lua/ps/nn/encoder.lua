-- SPDX-License-Identifier: BSD-3-Clause
-- PyTorch's encoder and decoder layers (Vaswani et al. 2017). The parameter names are PyTorch's. States can therefore
-- be exchanged with PyTorch in both directions. Tensors are [T, B, C] unless batch_first.
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local linear = require "ps.nn.linear"
local norm = require "ps.nn.norm"
local activation = require "ps.nn.activation"
local attention = require "ps.nn.attention"
local container = require "ps.nn.container"
local F, error = functional, caller.error

local OPTIONS = { dim_feedforward = "whole", dropout = "number", activation = "string|callable",
  layer_norm_eps = "number", batch_first = "boolean", norm_first = "boolean", bias = "boolean", dtype = "string",
  device = "string" }
local ACTIVATIONS = { relu = F.relu, gelu = F.gelu }

-- Creates the members that encoder and decoder layers share. The order of the members is PyTorch's: self_attn, linear1,
-- dropout, linear2, norm1 and so on.
local function init(self, call, width, heads, options, cross)
  options = caller.options(options, call, OPTIONS)
  self.made_of = { width, heads, options }
  local where = { bias = options.bias, dtype = options.dtype, device = options.device }
  local p = options.dropout or 0.1
  local of_attention = { dropout = p, bias = options.bias, batch_first = options.batch_first, dtype = options.dtype,
    device = options.device }
  self.norm_first, self.batch_first = options.norm_first == true, options.batch_first == true
  local act = options.activation or "relu"
  self.activation = type(act) == "string" and caller.one_of(act, ACTIVATIONS, call .. ": activation") or act
  self.self_attn = attention.MultiheadAttention(width, heads, of_attention)
  if cross then self.multihead_attn = attention.MultiheadAttention(width, heads, of_attention) end
  self.linear1 = linear.Linear(width, options.dim_feedforward or 2048, where)
  self.dropout = activation.Dropout(p)
  self.linear2 = linear.Linear(options.dim_feedforward or 2048, width, where)
  for i = 1, cross and 3 or 2 do
    self["norm" .. i] = norm.LayerNorm(width, { eps = options.layer_norm_eps, bias = options.bias,
      dtype = options.dtype, device = options.device })
  end
  for i = 1, cross and 3 or 2 do self["dropout" .. i] = activation.Dropout(p) end
end

-- Returns x + fn(norm(x)) with norm_first, and norm(x + fn(x)) otherwise.
local function step(self, x, which, fn)
  local layer_norm = self["norm" .. which]
  if self.norm_first then return x + fn(layer_norm(x)) end
  return layer_norm(x + fn(x))
end

local function feed(self, x, drop)
  return self["dropout" .. drop](self.linear2(self.dropout(self.activation(self.linear1(x)))))
end

---@class ps.nn.TransformerEncoderLayer: ps.nn.Module
local EncoderLayer = nn_module.class("TransformerEncoderLayer")

-- Returns the rules for splitting a layer with tensor parallelism, by member.
local function table_of(extra)
  return { self_attn = "attention", multihead_attn = extra, linear1 = "column", dropout = "columns", linear2 = "row" }
end
EncoderLayer.tensor_parallel = table_of()

--- Creates a layer of self-attention and a feed-forward network, which consists of two linear layers. The
--- self-attention and the network each have a residual and a LayerNorm.
---@param width integer E
---@param heads integer number of heads, which must divide E
---@param options? {dim_feedforward?: integer, dropout?: number, activation?: "relu"|"gelu"|function, layer_norm_eps?:
--- number, batch_first?: boolean, norm_first?: boolean, bias?: boolean, dtype?: string, device?: string} PyTorch's
--- options. Defaults: dim_feedforward 2048, dropout 0.1, activation "relu", layer_norm_eps 1e-5, batch_first false,
--- norm_first false, bias true
function EncoderLayer:init(width, heads, options)
  init(self, "nn.TransformerEncoderLayer", width, heads, options, false)
end

local ENCODE = { src_mask = "tensor", src_key_padding_mask = "tensor", is_causal = "boolean", cache = "table" }

--- Runs the layer.
---@param src ps.Tensor [T, B, E], or [B, T, E] with batch_first
---@param options? {src_mask?: ps.Tensor, src_key_padding_mask?: ps.Tensor, is_causal?: boolean, cache?: table} passed
--- to nn.MultiheadAttention as attn_mask, key_padding_mask, is_causal and cache
---@return ps.Tensor of src's shape
function EncoderLayer:forward(src, options)
  options = caller.options(options, "nn.TransformerEncoderLayer's forward", ENCODE)
  local x = step(self, src, 1, function(t)
    local y = self.self_attn(t, t, t, { attn_mask = options.src_mask, is_causal = options.is_causal,
      key_padding_mask = options.src_key_padding_mask, need_weights = false, cache = options.cache })
    return self.dropout1(y)
  end)
  return step(self, x, 2, function(t) return feed(self, t, 2) end)
end

---@class ps.nn.TransformerDecoderLayer: ps.nn.Module
local DecoderLayer = nn_module.class("TransformerDecoderLayer")
DecoderLayer.tensor_parallel = table_of "attention"

--- Creates a layer of self-attention, attention to an encoder's memory, and a feed-forward network, which consists of
--- two linear layers. Each of these three parts has a residual and a LayerNorm.
---@param width integer E
---@param heads integer number of heads, which must divide E
---@param options? {dim_feedforward?: integer, dropout?: number, activation?: "relu"|"gelu"|function, layer_norm_eps?:
--- number, batch_first?: boolean, norm_first?: boolean, bias?: boolean, dtype?: string, device?: string} PyTorch's
--- options. Defaults: dim_feedforward 2048, dropout 0.1, activation "relu", layer_norm_eps 1e-5, batch_first false,
--- norm_first false, bias true
function DecoderLayer:init(width, heads, options)
  init(self, "nn.TransformerDecoderLayer", width, heads, options, true)
end

local DECODE = { tgt_mask = "tensor", memory_mask = "tensor", tgt_key_padding_mask = "tensor",
  memory_key_padding_mask = "tensor", tgt_is_causal = "boolean", memory_is_causal = "boolean", cache = "table" }

--- Runs the layer.
---@param tgt ps.Tensor [T, B, E], or [B, T, E] with batch_first
---@param memory? ps.Tensor [S, B, E], or [B, S, E] with batch_first; nil if the cache has the memory's keys
---@param options? {tgt_mask?: ps.Tensor, memory_mask?: ps.Tensor, tgt_key_padding_mask?: ps.Tensor,
--- memory_key_padding_mask?: ps.Tensor, tgt_is_causal?: boolean, memory_is_causal?: boolean, cache?: table} masks have
--- the form of nn.MultiheadAttention's masks. cache: a table for decoding, which is empty at first. With a cache, each
--- call passes only the next positions, and the cache keeps the keys of these positions and of the memory
---@return ps.Tensor of tgt's shape
function DecoderLayer:forward(tgt, memory, options)
  options = caller.options(options, "nn.TransformerDecoderLayer's forward", DECODE)
  local cache = options.cache
  if cache and not cache.own then cache.own, cache.memory = {}, {} end
  local x = step(self, tgt, 1, function(t)
    local y = self.self_attn(t, t, t, { attn_mask = options.tgt_mask, is_causal = options.tgt_is_causal,
      key_padding_mask = options.tgt_key_padding_mask, need_weights = false, cache = cache and cache.own })
    return self.dropout1(y)
  end)
  x = step(self, x, 2, function(t)
    local there = memory
    if cache and cache.memory.key ~= nil then there = nil end          -- the keys of the memory are in the cache
    if there == nil and not cache then
      error("nn.TransformerDecoderLayer: the memory is missing: pass the result of an encoder")
    end
    local y = self.multihead_attn(t, there, there, { attn_mask = options.memory_mask, need_weights = false,
      is_causal = options.memory_is_causal, key_padding_mask = options.memory_key_padding_mask,
      cache = cache and cache.memory })
    return self.dropout2(y)
  end)
  return step(self, x, 3, function(t) return feed(self, t, 3) end)
end

-- -- stacks ---------------------------------------------------------------------------------------------------------
-- Returns n layers, as PyTorch does: the given layer, and n - 1 copies of it with its settings and values.
local function layers_of(call, layer, n)
  if type(layer) == "table" and not nn_module.is_module(layer) then
    if n ~= nil and n ~= #layer then
      error(("%s: n = %s, but the list has %d layers"):format(call, tostring(n), #layer))
    end
    return container.ModuleList(layer)
  end
  if not nn_module.is_module(layer) then error(("%s takes a layer, or a list of layers"):format(call)) end
  caller.whole(n, call .. ": the number of layers", 1)
  local list = { layer }
  local of = layer.made_of
  if n > 1 and not of then
    error(("%s: a %s cannot be copied; give a list of layers, { a, b }"):format(call, layer.class_name))
  end
  local class = layer.class_name == "TransformerEncoderLayer" and EncoderLayer or DecoderLayer
  for i = 2, n do
    list[i] = class(of[1], of[2], of[3])
    list[i]:load_state_dict(layer:state_dict())
  end
  return container.ModuleList(list)
end

local STACK = { norm = "table" }

---@class ps.nn.TransformerEncoder: ps.nn.Module
local Encoder = nn_module.class("TransformerEncoder")

--- Creates a stack of layers with an optional norm. PyTorch's form is nn.TransformerEncoder(layer, n, norm).
---@param layer ps.nn.Module|ps.nn.Module[] a layer to copy with its values, or a list of all layers
---@param n? integer number of layers (default: the length of the list)
---@param options? {norm?: ps.nn.Module}
function Encoder:init(layer, n, options)
  options = caller.options(options, "nn.TransformerEncoder", STACK)
  self.layers = layers_of("nn.TransformerEncoder", layer, n)
  if options.norm ~= nil then self.norm = options.norm end
end

local ENCODER = { mask = "tensor", src_key_padding_mask = "tensor", is_causal = "boolean" }

--- Runs the layers one after the other.
---@param src ps.Tensor [T, B, E], or [B, T, E] with batch_first
---@param options? {mask?: ps.Tensor, src_key_padding_mask?: ps.Tensor, is_causal?: boolean}
---@return ps.Tensor of src's shape
function Encoder:forward(src, options)
  options = caller.options(options, "nn.TransformerEncoder's forward", ENCODER)
  for _, layer in self.layers:each() do
    src = layer(src, { src_mask = options.mask, src_key_padding_mask = options.src_key_padding_mask,
      is_causal = options.is_causal })
  end
  return self.norm ~= nil and self.norm(src) or src
end

---@class ps.nn.TransformerDecoder: ps.nn.Module
local Decoder = nn_module.class("TransformerDecoder")

--- Creates a stack of layers with an optional norm. PyTorch's form is nn.TransformerDecoder(layer, n, norm).
---@param layer ps.nn.Module|ps.nn.Module[] a layer to copy with its values, or a list of all layers
---@param n? integer number of layers (default: the length of the list)
---@param options? {norm?: ps.nn.Module}
function Decoder:init(layer, n, options)
  options = caller.options(options, "nn.TransformerDecoder", STACK)
  self.layers = layers_of("nn.TransformerDecoder", layer, n)
  if options.norm ~= nil then self.norm = options.norm end
end

--- Runs the layers one after the other.
---@param tgt ps.Tensor [T, B, E], or [B, T, E] with batch_first
---@param memory? ps.Tensor [S, B, E], or [B, S, E] with batch_first; nil if the cache has the memory's keys
---@param options? {tgt_mask?: ps.Tensor, memory_mask?: ps.Tensor, tgt_key_padding_mask?: ps.Tensor,
--- memory_key_padding_mask?: ps.Tensor, tgt_is_causal?: boolean, memory_is_causal?: boolean, cache?: table} the options
--- of nn.TransformerDecoderLayer; the cache contains one cache per layer
---@return ps.Tensor of tgt's shape
function Decoder:forward(tgt, memory, options)
  options = caller.options(options, "nn.TransformerDecoder's forward", DECODE)
  local cache, own = options.cache, {}
  for key, value in pairs(options) do own[key] = value end
  for i, layer in self.layers:each() do
    if cache then
      cache[i] = cache[i] or {}
      own.cache = cache[i]
    end
    tgt = layer(tgt, memory, own)
  end
  return self.norm ~= nil and self.norm(tgt) or tgt
end

return { TransformerEncoderLayer = EncoderLayer, TransformerDecoderLayer = DecoderLayer, TransformerEncoder = Encoder,
  TransformerDecoder = Decoder }
