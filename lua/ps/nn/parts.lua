-- SPDX-License-Identifier: BSD-3-Clause
-- A model as a list of parts, between which it can be cut. A model has a method parts(), which returns the list, and a
-- method batch_of(...), which returns the values that its parts read from a call's arguments. Its forward folds them:
--
--   function Net:parts()
--     local list = { { name = "embed", modules = { self.embed }, forward = function(carry, batch) ... end } }
--     ...
--   end
--   function Net:forward(...) return parts.fold(self:parts(), self:batch_of(...)) end
--
-- A part uses only the parameters of its modules. The carry is everything that it gets from the part before it: a table
-- of tensors, {} for the first part. The batch is the same for all parts: ids, masks and targets, never values that
-- parts computed.
local scope = require "ps.core.scope"

---@class ps.nn.Part
---@field name string for a part of one module, the prefix of its parameters' names, e.g. "h.0"
---@field modules ps.nn.Module[] a tied table belongs to every part that uses it
---@field forward fun(carry: table<string, ps.Tensor>, batch: table<string, any>): table<string, ps.Tensor>

local parts = {}

--- Runs parts first to last.
---@param list ps.nn.Part[]
---@param first integer from 1
---@param last integer
---@param carry table<string, ps.Tensor>
---@param batch table<string, any>
---@return table<string, ps.Tensor> carry
function parts.run(list, first, last, carry, batch)
  for i = first, last do carry = list[i].forward(carry, batch) end
  return carry
end

--- Runs all parts. All but the last run in one scope, which frees their tensors except the carry to the last part.
---@param list ps.nn.Part[]
---@param batch table<string, any>
---@return table<string, ps.Tensor> carry the last part's: { loss = }, { logits = }, ...
function parts.fold(list, batch)
  local n = #list
  return list[n].forward(scope.scope(parts.run, list, 1, n - 1, {}, batch), batch)
end

-- -- weights that are read past their layers --------------------------------------------------------------------------
-- For code that reads a layer's weight instead of calling the layer, such as fused ops and tied heads. Adapters
-- (ps.lora) give a layer a forward of its own and a function weight_now.

--- Whether a layer is of a class and has no forward of its own.
---@param layer ps.nn.Module
---@param class table
---@return boolean
function parts.is_plain(layer, class)
  return getmetatable(layer) == class.instance and rawget(layer, "forward") == nil
end

--- The weight that a layer computes with: with its active adapter, else its parameter.
---@param layer ps.nn.Module
---@return ps.Tensor
function parts.weight(layer)
  local now = rawget(layer, "weight_now")
  return now and now(layer) or layer.weight
end

return parts
