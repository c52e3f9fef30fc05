-- SPDX-License-Identifier: BSD-3-Clause
-- Embedding: a table of vectors looked up by integer.
local ps = require "ps"
local core = require "ps.nn.module"
local init = require "ps.nn.weights"
local F = ps.functional

---@class ps.nn.Embedding: ps.nn.Module
---@field weight ps.Tensor [rows, width]
local Embedding = core.class("Embedding")
Embedding.unscoped = true

---@param rows integer
---@param width integer
---@param options? {std?: number, dtype?: string, device?: string} std of the normal start, default 1
function Embedding:init(rows, width, options)
  options = options or {}
  self.rows, self.width = rows, width
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", init.normal_(ps.empty({ rows, width }, where), 0, options.std or 1))
end

---@param index ps.Tensor integers [...]
---@return ps.Tensor [..., width]
function Embedding:forward(index) return F.embedding(index, self.weight) end

function Embedding:extra_repr() return ("%d, %d"):format(self.rows, self.width) end

return { Embedding = Embedding }
