-- SPDX-License-Identifier: BSD-3-Clause
-- nn.Embedding looks up the vectors of integer ids. nn.EmbeddingBag combines the vectors of several ids.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local nn_module = require "ps.nn.module"
local init = require "ps.nn.weights"

---@class ps.nn.Embedding: ps.nn.Module
---@field weight ps.Tensor [rows, width]
local Embedding = nn_module.class("Embedding")
Embedding.unscoped = true

local META = native.device_index "meta"                        -- an embedding matrix on meta has no values to send
local OPTIONS = { std = "number", padding_idx = "whole", dtype = "string", device = "string" }

--- Creates an embedding. An embedding is a matrix whose rows are looked up by index.
---@param rows integer V, the number of rows
---@param width integer C, the size of each row
---@param options? {std?: number, padding_idx?: integer, dtype?: string, device?: string} std: standard deviation of the
--- initial values (default 1); padding_idx: index of a row that is initially 0 and gets no gradient from lookups
function Embedding:init(rows, width, options)
  options = caller.options(options, "nn.Embedding", OPTIONS)
  caller.whole(rows, "nn.Embedding: the number of rows")
  caller.whole(width, "nn.Embedding: the width")
  self.rows, self.width, self.padding_idx = rows, width, options.padding_idx
  if self.padding_idx and self.padding_idx < 0 then self.padding_idx = self.padding_idx + rows end   -- from the end
  if self.padding_idx and not (self.padding_idx >= 0 and self.padding_idx < rows) then
    caller.error(("nn.Embedding: padding_idx is %.14g, but the rows are 0 to %.14g - 1"):format(options.padding_idx,
      rows))
  end
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", init.normal_(create.empty({ rows, width }, where), 0, options.std or 1))
  if self.padding_idx then init.zeros_(self.weight:narrow(0, self.padding_idx, 1)) end
end

--- Returns the rows at the given indices. If weight and indices are on different devices, the rows are looked up on the
--- weight's device and copied to the indices' device.
---@param index ps.Tensor integers [...]
---@return ps.Tensor [..., width]
function Embedding:forward(index)
  local weight = self.weight
  if not scope.is_tensor(index) then caller.error("nn.Embedding takes a tensor of indices, not " .. tostring(index)) end
  if index.device_ == weight.device_ or weight.device_ == META then
    return native.ops.embedding(weight, index, self.padding_idx)
  end
  local rows = native.ops.embedding(weight, index:to(weight:device()), self.padding_idx)
  hooks.tell("lookup", self, rows:nbytes())
  return rows:to(index:device())
end

function Embedding:extra_repr() return ("%d, %d"):format(self.rows, self.width) end

---@class ps.nn.EmbeddingBag: ps.nn.Module
---@field weight ps.Tensor [rows, width]
local EmbeddingBag = nn_module.class("EmbeddingBag")
EmbeddingBag.unscoped = true

local BAG = { mode = "string", std = "number", padding_idx = "whole", include_last_offset = "boolean",
  dtype = "string", device = "string" }

--- Creates an embedding that combines the rows of each bag of indices.
---@param rows integer V, the number of rows
---@param width integer C, the size of each row
---@param options? {mode?: "mean"|"sum"|"max", std?: number, padding_idx?: integer, include_last_offset?: boolean,
--- dtype?: string, device?: string} mode (default "mean"); std: standard deviation of the initial values (default 1);
--- padding_idx, include_last_offset: as in F.embedding_bag
function EmbeddingBag:init(rows, width, options)
  options = caller.options(options, "nn.EmbeddingBag", BAG)
  Embedding.init(self, rows, width, { std = options.std, padding_idx = options.padding_idx, dtype = options.dtype,
    device = options.device })
  self.mode = options.mode or "mean"
  caller.one_of(self.mode, { mean = true, sum = true, max = true }, "nn.EmbeddingBag: mode")
  self.include_last_offset = options.include_last_offset
end
--- Returns the mean, sum or maximum of the rows of each bag.
---@param index ps.Tensor integers [B, L], where each row is a bag; or integers [N], with `offsets`
---@param offsets? ps.Tensor integers [B], the index of each bag's first element
---@param per_sample_weights? ps.Tensor factors of index's shape, for mode "sum"
---@return ps.Tensor [B, width]
function EmbeddingBag:forward(index, offsets, per_sample_weights)
  return functional.embedding_bag(index, self.weight, offsets, { mode = self.mode, padding_idx = self.padding_idx,
    per_sample_weights = per_sample_weights, include_last_offset = self.include_last_offset })
end
function EmbeddingBag:extra_repr() return ("%d, %d, mode=%s"):format(self.rows, self.width, self.mode) end

return { Embedding = Embedding, EmbeddingBag = EmbeddingBag }
