-- SPDX-License-Identifier: BSD-3-Clause
-- Decides whether the ranks of tensor parallelism share the rows between layers (sequence parallelism, Korthikanti et
-- al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). The layers of a model share one Region.
-- Sequence parallelism begins at a certain module, and the Region reads the number of rows from this module's input.
--
-- Sizes: B samples, T positions, t ranks.
local caller = require "ps.core.caller"
local error = caller.error

local region = {}

---@class ps.nn.Region state that the layers of a model share
---@field group ps.Group
---@field size integer t, the number of ranks
---@field rank integer
---@field wanted boolean whether sequence parallelism is requested
---@field keep boolean whether gathered rows are kept for backward
---@field pieces integer number of pieces in which rows are exchanged while products are computed; with 1, rows are
--- exchanged before and after the products
---@field on boolean true if each rank has its own B T / t rows between layers, false if each rank has all rows [B, T,
--- C]
---@field keeps_dims boolean true if the tensor of a rank's rows has as many dimensions as the tensor of all rows; false
--- if it is [B T / t, C]
---@field cached boolean whether the current forward uses cached keys; all ranks then have all rows
---@field begun table<ps.nn.ColumnParallelLinear, {x: ps.Tensor, y: ps.Tensor}> outputs that begin_columns has computed
--- and that the columns' forwards have not returned yet
---@field dims integer[] dimensions of all rows, such as { B, T }
---@field rows integer number of all rows, B T
local Region = {}
Region.__index = Region
region.Region = Region

--- Creates the state that the layers of a model share. Before `set` or `enter`, all ranks have all rows.
---@param group ps.Group the ranks that share the layers
---@param sequence? boolean whether the ranks share the rows between layers, if t divides the number of rows
---@param keep? boolean whether gathered rows are kept for backward; otherwise backward gathers them again
---@param pieces? integer number of pieces in which rows are exchanged (default 1); with 2 to 8 pieces, rows are
--- exchanged while column and row layers compute
---@return ps.nn.Region
function Region.new(group, sequence, keep, pieces)
  if type(group) ~= "table" or not group.copy_to then
    error(("nn.Region.new takes a group of ranks, not %s; pass ps.mesh.group \"tp\""):format(tostring(group)))
  end
  return setmetatable({ group = group, size = group:size(), rank = group:rank(), wanted = sequence or false,
    keep = keep or false, pieces = pieces or 1, on = false, keeps_dims = false, cached = false, dims = { 0 }, rows = 0,
    begun = {} }, Region)
end

-- Sets the dimensions of all rows. The ranks share the rows if sequence parallelism is requested and t divides the
-- number of rows. Also frees outputs of begin_columns that remain from an interrupted forward.
function region.set_rows(self, dims)
  local rows = 1
  for _, size in ipairs(dims) do rows = rows * size end
  self.dims, self.rows = dims, rows
  self.on = self.wanted and not self.cached and rows % self.size == 0
  if next(self.begun) then self.begun = {} end
end

--- Sets the number of rows of the next forward. The ranks share the rows if sequence parallelism is requested and t
--- divides the number of rows. Also frees outputs of begin_columns that remain from an interrupted forward.
---@param B integer number of samples
---@param T integer number of positions
---@param cached? boolean whether the forward uses cached keys, as in decoding; all ranks then have all rows
function Region:set(B, T, cached)
  self.cached = cached and true or false
  region.set_rows(self, { B, T })
end

--- Begins a forward. All ranks have all rows until the forward reaches the module at which the region begins.
---@param cached? boolean whether the forward uses cached keys; all ranks then have all rows
function Region:begin(cached)
  self.on, self.cached = false, cached and true or false
  if next(self.begun) then self.begun = {} end
end

--- Returns the state for `restore`. `restore` is called before backward runs a function again (ps.recompute). A
--- pipeline also calls `restore` before it runs a part for another micro-batch.
---@return {on: boolean, cached: boolean, dims: integer[], rows: integer}
function Region:state() return { on = self.on, cached = self.cached, dims = self.dims, rows = self.rows } end

---@param state {on: boolean, cached: boolean, dims: integer[], rows: integer}
function Region:restore(state)
  self.on, self.cached, self.dims, self.rows = state.on, state.cached, state.dims, state.rows
end

-- Returns the dimensions of x except the last one.
local function rows_dims(x)
  local dims = x:shape()
  dims[#dims] = nil
  return dims
end

-- Returns x [..., C] as [rows, C].
function region.flat(x) return x:dim() == 2 and x or x:reshape(-1, x:size(-1)) end

-- Returns a rank's rows x [B T / t, C]. With keeps_dims, the result has as many dimensions as the tensor of all rows:
-- it is [B / t, T, C] if t divides B, and [1, B T / t, C] otherwise.
function region.own_dims(self, x)
  if not self.keeps_dims then return x end
  local dims, n, C = { unpack(self.dims) }, self.rows / self.size, x:size(-1)
  if #dims < 2 then return x:reshape(n, C) end
  if dims[1] % self.size == 0 then dims[1] = dims[1] / self.size
  else
    for d = 1, #dims - 1 do dims[d] = 1 end
    dims[#dims] = n
  end
  dims[#dims + 1] = C
  return x:reshape(dims)
end

-- Reshapes all rows [B T, C] to [B, T, C].
function region.all_dims(self, x)
  local shape = { unpack(self.dims) }
  shape[#shape + 1] = x:size(-1)
  return x:reshape(shape)
end

--- Returns this rank's rows of x. This function is called at the input of the module at which the ranks begin
--- to share rows.
---@param x ps.Tensor [B, T, C], equal on all ranks
---@return ps.Tensor [B T / t, C]. With keeps_dims, it is [B / t, T, C] if t divides B, otherwise [1, B T / t, C]. If
---  the ranks do not share the rows, it is x itself
function Region:enter(x)
  region.set_rows(self, rows_dims(x))
  if not self.on then return x end
  return region.own_dims(self, self.group:scatter_to(region.flat(x), 0))
end

--- Returns all rows. This is for layers that every rank computes in full.
---@param x ps.Tensor has this rank's rows, or all rows [B, T, C]
---@return ps.Tensor [B, T, C]
function Region:leave(x)
  if not self.on then return x end
  return region.all_dims(self, self:has_part(x) and self.group:gather_from(x, 0) or x)
end

--- Returns all rows. This is for products whose outputs are split among the ranks. Backward sums the gradient over the
--- ranks. Each rank gets its own rows of the sum, or all rows if x has all rows. After `leave`, x has all rows.
---@param x ps.Tensor has this rank's rows, or all rows
---@return ps.Tensor [B, T, C], or all rows in x's shape
function Region:gather(x)
  if not self:has_part(x) then return self.group:copy_to(x) end
  return region.all_dims(self, self.keep and self.group:gathered(x) or self.group:gathered_again(x))
end

--- Returns whether x has only this rank's rows.
---@param x ps.Tensor [..., C]
---@return boolean
function Region:has_part(x) return self.on and x:numel() * self.size == self.rows * x:size(-1) end

--- Sums y over the ranks. Returns this rank's rows of the sum if the ranks share the rows, otherwise all rows.
---@param y ps.Tensor [B, T, C], or [B T, C]
---@return ps.Tensor this rank's rows, or y's shape
function Region:reduce(y)
  if not self.on then return self.group:reduce_from(y) end
  return region.own_dims(self, self.group:scattered(y:reshape(self.rows, -1)))
end

--- Returns the position of x in the tensor of all rows, in the form that F.dropout expects. Returns nil if x has all
--- rows.
---@param x ps.Tensor has this rank's rows
---@return {first: integer, per_sample: integer}?
function Region:part(x)
  if not self:has_part(x) then return nil end
  return { first = self.rank * x:numel(), per_sample = self.rows / self.dims[1] * x:size(-1) }
end

--- Prepares a parameter that all ranks have, for use with rows that all ranks have. If the ranks share rows in other
--- forwards, the ranks' gradients of this parameter are summed. Each rank would then add the same gradient of this use.
--- The returned tensor makes the sum contain this gradient only once.
---@param t ps.Tensor
---@return ps.Tensor
function Region:once(t) return self.wanted and not self.on and self.group:counted_once(t) or t end

return region
