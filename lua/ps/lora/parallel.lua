-- SPDX-License-Identifier: BSD-3-Clause
-- Adapters of layers that tensor-parallel ranks share. lua/ps/parallel/tensor/cut.lua replaces a layer with a new layer
-- that has this rank's part of the weight. It then calls cut_into, which moves the adapters to the new layer. Each kind
-- of layer is cut differently:
--
--   column       B and the magnitudes are cut along the outputs. All ranks have A.
--   row          A is cut along the inputs. All ranks have B and the magnitudes. The products with A are summed over
--                the ranks.
--   vocabulary   A is cut along the table's rows. All ranks have B. The looked-up rows are summed over the ranks.
--   head         B is cut along the vocabulary. All ranks have A.
--
-- If all ranks have a tensor, its gradient is equal on all ranks, because copy_to sums the ranks' gradients. With
-- sequence parallelism, a rank computes only the gradient of its own rows, and the engine sums these gradients
-- (shard.set_partial).
local native = require "ps.core.ffi"
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local scope = require "ps.core.scope"
local shard = require "ps.tensor.shard"
local error = require("ps.core.caller").error
local ops = native.ops

local parallel = {}

---@class ps.lora.ParallelTools functions from lua/ps/lora/layers.lua
---@field acting fun(layer: ps.nn.Module): ps.lora.Adapter?, string?
---@field tensors fun(layer: ps.nn.Module, name: string): ps.Tensor, ps.Tensor, ps.Tensor?
---@field dropped fun(adapter: ps.lora.Adapter, x: ps.Tensor): ps.Tensor, boolean
---@field factor fun(layer: ps.nn.Module, name: string, magnitude: ps.Tensor, dtype: string): ps.Tensor
---@field as fun(t: ps.Tensor, dtype: string): ps.Tensor
local tools

-- Reshapes u to the leading dimensions of y.
local function like(u, y)
  local shape = y:shape()
  shape[#shape] = u:size(-1)
  return u:reshape(shape)
end

local function scaled(u, adapter) return adapter.scale == 1 and u or u * adapter.scale end

-- Returns y + scale B u, where u is A x. With magnitudes, returns (y - bias + scale B u) * factor + bias, where
-- `factor` is DoRA's factor.
local function joined(layer, name, adapter, u, B, magnitude, y, bias)
  u = scaled(like(u, y), adapter)
  if not magnitude then return ops.linear(u, B, nil, y, 1) end
  if bias ~= nil then y = y - bias end
  y = ops.linear(u, B, nil, y, 1) * tools.factor(layer, name, magnitude, y:dtype())
  return bias ~= nil and y + bias or y
end

local function column(self, x)
  local state, region = self.lora_, self.region
  local adapter, name = tools.acting(self)
  local y = state.base(self, x)
  if not adapter then return y end
  local A, B, magnitude = tools.tensors(self, name)
  local given = tools.dropped(adapter, x)
  local a = tools.as(A, x:dtype())
  local u
  if self.gather_input == false then                       -- x has all rows; the ranks' gradients are summed
    u = ops.linear(given, region.on and a or region.group:copy_to(region:once(a)), nil, nil, 1)
  elseif region:has_part(x) then u = region:gather(ops.linear(given, a, nil, nil, 1))
  else u = region.group:copy_to(ops.linear(given, region:once(a), nil, nil, 1)) end
  return joined(self, name, adapter, u, tools.as(B, y:dtype()), magnitude, y, self.bias)
end

local function row(self, x, residual)
  local state, region = self.lora_, self.region
  local adapter, name = tools.acting(self)
  if not adapter then return state.base(self, x, residual) end
  local A, B, magnitude = tools.tensors(self, name)
  local given = tools.dropped(adapter, x)
  local u = region:reduce(ops.linear(given, tools.as(A, x:dtype()), nil, nil, 1))
  local b = region:once(tools.as(B, x:dtype()))
  if not magnitude then
    return joined(self, name, adapter, u, b, nil, state.base(self, x, residual))
  end
  local bias = self.bias ~= nil and region:once(self.bias) or nil
  local y = joined(self, name, adapter, u, b, region:once(magnitude), state.base(self, x), bias)
  return residual ~= nil and y + residual or y
end

local function vocabulary(self, index)
  local state, region = self.lora_, self.region
  local adapter, name = tools.acting(self)
  local y = state.base(self, index)
  if not adapter then return y end
  local A, B, magnitude = tools.tensors(self, name)
  local table_of = A:transpose(0, 1):contiguous()          -- shape [rows / t, r]
  local u = ops.embedding(table_of, index, self.padding_idx, region.rank * table_of:size(0), self.rows)
  u = tools.as(self.enter and region:reduce(u) or region.group:reduce_from(u), y:dtype())
  local function shared(t) return self.enter and region:once(t) or t end
  y = ops.linear(scaled(like(u, y), adapter), shared(tools.as(B, y:dtype())), nil, y, 1)
  return magnitude and y * tools.factor(self, name, shared(magnitude), y:dtype()) or y
end

-- Returns this rank's shard of the head's weight, including the active adapter.
local function head_weight(self)
  local adapter, name = tools.acting(self)
  local weight = self.weight
  if not adapter then return weight end
  local A, B, magnitude = tools.tensors(self, name)
  local a = self.region.group:copy_to(tools.as(A, weight:dtype()))
  weight = ops.linear(tools.as(B * adapter.scale, weight:dtype()), a, nil, weight, 0)
  if not magnitude then return weight end
  return weight * tools.factor(self, name, magnitude, weight:dtype()):reshape(-1, 1)
end

-- Returns how an adapter's tensor is split over the ranks in a layer of this kind. Returns nil if all ranks have the
-- whole tensor.
local function cut_of(kind, which, blocks, whole, size)
  local function padded(dim) return { dim = dim, padded = -whole:size(dim) % size } end
  if kind == "column" then return which ~= "A" and { dim = 0, blocks = blocks } or nil end
  if kind == "row" then return which == "A" and { dim = 1 } or nil end
  if kind == "vocabulary" then return which == "A" and padded(1) or nil end
  return which ~= "A" and padded(0) or nil
end

-- This is a list instead of a set, because all ranks must split the tensors in the same order.
local KEYS = { { "lora_A", "A" }, { "lora_B", "B" }, { "lora_embedding_A", "A" }, { "lora_embedding_B", "B" },
  { "lora_magnitude_vector", "magnitude" } }

-- Moves the tensors of a layer's adapters to the layer that has this rank's part.
local function move_tensors(old, new, kind, claim, cut)
  for _, entry in ipairs(KEYS) do
    local key, which = unpack(entry)
    if registry.kind(old, key) then
      local from = old[key]
      local to = setmetatable({ _names = {}, _kind = {}, _fields = {}, training = from.training }, getmetatable(from))
      nn_module.register(new, key, "module", to)
      for name, value, what in registry.members(from) do
        local holder, inner, field = from, to, name
        if what == "module" then
          holder, field = value, "weight"
          inner = setmetatable({ _names = {}, _kind = {}, _fields = {}, training = value.training },
            getmetatable(value))
          nn_module.register(to, name, "module", inner)
        end
        local whole = holder[field]
        cut:take({ module = holder, path = ("%s.%s.%s"):format(claim.path, key, name) }, inner, field,
          cut_of(kind, which, claim.entry.blocks, whole, cut.region.size))
        if kind == "vocabulary" and which ~= "A" and new.enter and cut.region.wanted then
          shard.set_partial(inner[field])
        end
      end
    end
  end
  if registry.kind(old, "lora_dropout") then nn_module.register(new, "lora_dropout", "module", old.lora_dropout) end
end

local FORWARDS = { column = column, row = row, vocabulary = vocabulary }

--- Moves the adapters of the layer `old` to the layer `new`, which has this rank's part of `old`.
---@param given ps.lora.ParallelTools
---@param old ps.nn.Module
---@param new ps.nn.Module
---@param kind string the kind of layer in lua/ps/parallel/tensor/cut.lua
---@param claim ps.tensor_parallel.Claim
---@param cut ps.tensor_parallel.Cut
function parallel.cut_into(given, old, new, kind, claim, cut)
  tools = given
  local state = old.lora_
  for name, adapter in pairs(state.adapters) do
    if adapter.dora and adapter.dropout then
      error(("tensor_parallel: the adapter '%s' of %s has use_dora and dropout, which layers in parts do not support "
        .. "together; set dropout = 0"):format(name, claim.path))
    end
  end
  if new.gather_output or new.split_input then
    error(("tensor_parallel: %s has an adapter, and gather_output or split_input"):format(claim.path))
  end
  move_tensors(old, new, kind, claim, cut)
  local group = cut.region.group
  local sums = kind == "row" or kind == "vocabulary"
  local now = { base = new.forward, adapters = state.adapters, active = state.active, entry = state.entry,
    kind = { out_in = new.out_in or kind == "vocabulary" and 0 or 1, table = kind == "vocabulary",
      sum = sums and function(t) return scope.no_grad(group.sum, group, t) end or nil } }
  rawset(new, "lora_", now)
  state.entry.module, state.entry.kind = new, now.kind
  if FORWARDS[kind] then rawset(new, "forward", FORWARDS[kind])
  else rawset(new, "weight_now", head_weight) end
end

return parallel
