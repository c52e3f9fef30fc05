-- SPDX-License-Identifier: BSD-3-Clause
-- nn.MultiheadAttention: attention from queries to keys and values. The widths of keys and values may differ from the
-- width of queries. The names of parameters and the layout ([T, B, C] unless batch_first) are PyTorch's. In masks, true
-- hides a position, as in PyTorch. For decoding, a cache keeps the keys and values of earlier calls.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local init = require "ps.nn.weights"
local linear = require "ps.nn.linear"
local tensor = require "ps.tensor"
local C = native.C
local F, error = functional, caller.error

---@class ps.nn.MultiheadAttention: ps.nn.Module
---@field in_proj_weight? ps.Tensor [3 E, E]; if it is nil, the module has q_proj_weight, k_proj_weight and
--- v_proj_weight instead
---@field in_proj_bias? ps.Tensor [3 E]
---@field out_proj ps.nn.Linear
local MultiheadAttention = nn_module.class("MultiheadAttention")

local OPTIONS = { dropout = "number", bias = "boolean", kdim = "whole", vdim = "whole", batch_first = "boolean",
  dtype = "string", device = "string" }

--- Creates attention with E / heads columns per head. Parameters are initialised as in PyTorch. The weights of queries,
--- keys and values are Xavier uniform. The weight of out_proj is initialised as in nn.Linear. Biases are 0.
---@param width integer E, the width of queries and of the result
---@param heads integer number of heads, which must divide E
---@param options? {dropout?: number, bias?: boolean, kdim?: integer, vdim?: integer, batch_first?: boolean, dtype?:
--- string, device?: string} dropout: probability that an attention weight is dropped in training (default 0); bias:
--- whether there are biases (default true); kdim, vdim: widths of keys and values (default E); batch_first: whether
--- tensors are [B, T, C] instead of [T, B, C] (default false)
function MultiheadAttention:init(width, heads, options)
  options = caller.options(options, "nn.MultiheadAttention", OPTIONS)
  caller.whole(width, "nn.MultiheadAttention: the width", 1)
  caller.whole(heads, "nn.MultiheadAttention: the number of heads", 1)
  if width % heads ~= 0 then
    error(("nn.MultiheadAttention: %d heads do not divide a width of %d"):format(heads, width))
  end
  local p = options.dropout or 0
  if not (p >= 0 and p < 1) then error(("nn.MultiheadAttention: dropout is %g; it must be in [0, 1)"):format(p)) end
  self.width, self.heads, self.dropout, self.batch_first = width, heads, p, options.batch_first == true
  self.head_size, self.inner = width / heads, width           -- inner: number of columns of this rank's heads
  self.kdim, self.vdim = options.kdim or width, options.vdim or width
  local where = { dtype = options.dtype, device = options.device }
  local function weight(name, rows, columns)
    self:param(name, init.xavier_uniform_(create.empty({ rows, columns }, where)))
  end
  if self.kdim == width and self.vdim == width then weight("in_proj_weight", 3 * width, width)
  else
    weight("q_proj_weight", width, width)
    weight("k_proj_weight", width, self.kdim)
    weight("v_proj_weight", width, self.vdim)
  end
  if options.bias ~= false then self:param("in_proj_bias", create.zeros({ 3 * width }, where)) end
  self.out_proj = linear.Linear(width, width, { bias = options.bias, dtype = options.dtype, device = options.device })
  if self.out_proj.bias ~= nil then init.zeros_(self.out_proj.bias) end
end

-- Returns the weight and bias of the projection of queries (i = 0), keys (i = 1) or values (i = 2).
local NAMES = { [0] = "q_proj_weight", "k_proj_weight", "v_proj_weight" }
local function part(self, i)
  local E = self.inner
  local w = self.in_proj_weight ~= nil and self.in_proj_weight:narrow(0, i * E, E) or self[NAMES[i]]
  return w, self.in_proj_bias ~= nil and self.in_proj_bias:narrow(0, i * E, E) or nil
end

-- Projects x [B, T, ...]. Returns the projection of shape [B, H, T, D].
local function headed(self, x, i)
  local w, b = part(self, i)
  local y = F.linear(x, w, b)
  return y:reshape(x:size(0), x:size(1), self.heads, self.head_size):transpose(1, 2)
end

local function batched(self, x, what, width)
  if caller.tensor(x, "nn.MultiheadAttention", what) == nil then
    error(("nn.MultiheadAttention: the %s is missing"):format(what))
  end
  if x:dim() ~= 2 and x:dim() ~= 3 or x:size(-1) ~= width then
    error(("nn.MultiheadAttention: the %s is [%s]; it must be [%s, %d] or [T, %d]"):format(what,
      table.concat(x:shape(), ", "), self.batch_first and "B, T" or "T, B", width, width))
  end
  if x:dim() == 2 then return x:unsqueeze(0) end
  return self.batch_first and x or x:transpose(0, 1)
end

local function shown(t) return "[" .. table.concat(t:shape(), ", ") .. "]" end

-- Returns a mask that the script passed, or nil if the script passed no mask. Raises an error unless the mask is a bool
-- or float tensor.
local function given_mask(mask, name)
  if caller.tensor(mask, "nn.MultiheadAttention", name) == nil then return nil end
  if mask.dtype_ ~= C.PS_BOOL and not mask:is_float() then
    error(("nn.MultiheadAttention: %s is %s; it must be bool, where true hides a key (for a mask where 1 shows a key: "
      .. "mask:eq(0)), or floats, which are added to the scores"):format(name, mask:dtype()))
  end
  return mask
end

-- Converts a mask from PyTorch's form to the form of F.attention. In PyTorch's form, true hides a key. In the form of
-- F.attention, true shows a key. In both forms, floats are added to the scores.
local function of_mask(mask, B, H, T, S)
  if given_mask(mask, "attn_mask") == nil then return nil end
  local shape = mask:shape()
  local rows, columns = shape[#shape - 1], shape[#shape]
  if #shape == 2 and rows == T and columns == S then mask = mask:reshape(1, 1, T, S)
  elseif #shape == 3 and shape[1] == B * H and rows == T and columns == S then mask = mask:reshape(B, H, T, S)
  else
    error(("nn.MultiheadAttention: attn_mask is %s; it must be [%d, %d] or [%d, %d, %d]"):format(
      shown(mask), T, S, B * H,
      T, S))
  end
  return mask.dtype_ == C.PS_BOOL and mask:logical_not() or mask
end

local function of_padding(mask, B, S)
  if given_mask(mask, "key_padding_mask") == nil then return nil end
  if mask:dim() == 1 then mask = mask:unsqueeze(0) end
  if mask:dim() ~= 2 or mask:size(0) ~= B or mask:size(1) ~= S then
    error(("nn.MultiheadAttention: key_padding_mask is %s; it must be [%d, %d]"):format(shown(mask), B, S))
  end
  return mask.dtype_ == C.PS_BOOL and mask:logical_not():reshape(B, 1, 1, S) or mask:reshape(B, 1, 1, S)
end

-- Combines two masks. If both are bool, a key is visible if both masks show it. Otherwise the masks are converted to
-- floats, with -inf for a hidden key, and added.
local function both(a, b, dtype)
  if a == nil or b == nil then return a or b end
  if a.dtype_ == C.PS_BOOL and b.dtype_ == C.PS_BOOL then return a:logical_and(b) end
  local function floats(m)
    if m.dtype_ ~= C.PS_BOOL then return m end
    return tensor.where(m, 0, -math.huge):to(dtype)
  end
  return floats(a) + floats(b)
end

-- Appends keys and values, each [B, H, S, D], to a cache. Returns all keys and values of the cache. If `k` is nil,
-- appends nothing.
local function cached(cache, k, v)
  if k ~= nil then
    if cache.key ~= nil then
      local was = { cache.key, cache.value }
      k, v = tensor.cat({ cache.key, k }, 2), tensor.cat({ cache.value, v }, 2)
      if not scope.grad_enabled() then for _, old in ipairs(was) do old:release() end end
    else
      k, v = k:contiguous(), v:contiguous()
    end
    cache.key, cache.value = k:keep(), v:keep()
  elseif cache.key == nil then
    error("nn.MultiheadAttention: the cache is empty and no keys were given: pass key and value in the first call")
  end
  return cache.key, cache.value
end

local FORWARD = { key_padding_mask = "tensor", need_weights = "boolean", attn_mask = "tensor",
  average_attn_weights = "boolean", is_causal = "boolean", cache = "table" }

--- For each query, returns the sum of all values. Each value is multiplied by the query's attention weight for its key.
---@param query ps.Tensor [T, B, E], or [B, T, E] with batch_first, or [T, E] without a batch
---@param key? ps.Tensor [S, B, kdim], or [B, S, kdim] with batch_first; if it is nil, only the keys in the cache are
--- used
---@param value? ps.Tensor [S, B, vdim], or [B, S, vdim] with batch_first
---@param options? {key_padding_mask?: ps.Tensor, need_weights?: boolean, attn_mask?: ps.Tensor, average_attn_weights?:
--- boolean, is_causal?: boolean, cache?: table} key_padding_mask [B, S] and attn_mask [T, S] or [B heads, T, S] are
--- bool or float tensors. In a bool mask, true hides a key. A float mask is added to the scores and may require a
--- gradient. need_weights: return the weights as the second result (default true). average_attn_weights: average the
--- weights over heads (default true). is_causal: query i sees the keys up to i + S - T. cache: a table that is empty at
--- first; each call appends its keys and values to the table, and queries see all keys in the table
---@return ps.Tensor output of query's shape
---@return ps.Tensor? weights [B, T, S], or [B, heads, T, S] with average_attn_weights = false, or [T, S] without a
---  batch
function MultiheadAttention:forward(query, key, value, options)
  options = caller.options(options, "nn.MultiheadAttention's forward", FORWARD)
  local q = batched(self, query, "query", self.width)
  local cache, k, v = options.cache, nil, nil
  if key ~= nil or not cache then
    k, v = batched(self, key, "key", self.kdim), batched(self, value, "value", self.vdim)
    if k:size(0) ~= q:size(0) or v:size(0) ~= q:size(0) or k:size(1) ~= v:size(1) then
      error(("nn.MultiheadAttention: the shapes of query %s, key %s and value %s do not fit together"):format(
        shown(query), shown(key),
        shown(value)))
    end
    k, v = headed(self, k, 1), headed(self, v, 2)
  end
  if cache then k, v = cached(cache, k, v) end
  q = headed(self, q, 0)
  if self.dropout > 0 and not self.training then nn_module.dropout_is_off(self) end
  local B, T, S = q:size(0), q:size(2), k:size(2)
  local mask = both(of_mask(options.attn_mask, B, self.heads, T, S), of_padding(options.key_padding_mask, B, S),
    q:dtype())
  local how = { mask = mask, causal = options.is_causal, dropout = self.training and self.dropout or 0 }
  local y, weights
  if options.need_weights == false then y = F.attention(q, k, v, how)
  else y, weights = F.attention_weights(q, k, v, how) end
  y = self.out_proj(y:transpose(1, 2):reshape(B, T, self.inner))
  if weights ~= nil and options.average_attn_weights ~= false then weights = weights:mean(1) end
  if query:dim() == 2 then y, weights = y:squeeze(0), weights and weights:squeeze(0)
  elseif not self.batch_first then y = y:transpose(0, 1) end
  if weights == nil then return y end
  return y, weights
end

function MultiheadAttention:extra_repr() return ("%d, %d"):format(self.width, self.heads) end

return { MultiheadAttention = MultiheadAttention }
