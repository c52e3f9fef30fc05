-- SPDX-License-Identifier: BSD-3-Clause
-- nn.Embedding: looks up the vectors of integer ids.
local create = require "ps.tensor.create"
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

--- Creates an embedding: a matrix whose rows are looked up by integer.
---@param rows integer V, the number of rows
---@param width integer C, the size of each row
---@param options? {std?: number, padding_idx?: integer, dtype?: string, device?: string} std: deviation of the initial
---  values (default 1); padding_idx: a row that is initially 0 and gets no gradient from lookups
function Embedding:init(rows, width, options)
  options = caller.options(options, "nn.Embedding", OPTIONS)
  caller.whole(rows, "nn.Embedding: the number of rows")
  caller.whole(width, "nn.Embedding: the width")
  self.rows, self.width, self.padding_idx = rows, width, options.padding_idx
  if self.padding_idx and not (self.padding_idx >= 0 and self.padding_idx < rows) then
    caller.error(("nn.Embedding: padding_idx is %.14g, but the rows are 0 to %.14g - 1"):format(self.padding_idx, rows))
  end
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", init.normal_(create.empty({ rows, width }, where), 0, options.std or 1))
  if self.padding_idx then init.zeros_(self.weight:narrow(0, self.padding_idx, 1)) end
end

--- Returns the rows at the given indices. If the weight is on another device than the indices, rows are looked up on
--- the weight's device and copied to the indices' device.
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

return { Embedding = Embedding }
