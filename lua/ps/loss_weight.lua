-- SPDX-License-Identifier: BSD-3-Clause
-- What a loss weighs among the micro-batches, ranks and evaluation batches that it is averaged with: the sum of what
-- its targets count. The functions of losses (F.cross_entropy, F.lm_loss, F.nll_loss, nn.ParallelLMHead's) note it, so
-- that no ignore_index and no class weights can be missed. A loss that a script made of noted ones, by factors or as a
-- sum, has their weight, found by the graph of its ops. Noted losses of unlike weights are not added up by one weight.
local caller = require "ps.caller"
local scope = require "ps.scope"

local loss_weight = {}

local MOST = 64                     -- notes that are kept: of losses that never come to a backward the last ones

---@class ps.LossNote
---@field loss ps.Tensor
---@field sum ps.Tensor|number what its targets count, a number on the device
---@field places number its targets, ignored ones too

---@type ps.LossNote[]
local notes, watching = {}, false

--- Notes losses from now on: an engine, ps.train.run or ps.train.evaluate will ask for weights.
function loss_weight.watch() watching = true end

--- Whether losses are noted.
---@return boolean
function loss_weight.watched() return watching end

--- Notes a loss. A mean weighs what its targets count; a sum weighs 1, whatever its targets.
---@param loss ps.Tensor
---@param reduction string|nil "mean" (default), "sum" or "none", which is not noted
---@param sum fun(): ps.Tensor|number gives what the targets count; called without gradients
---@param places integer
---@return ps.Tensor loss
function loss_weight.note(loss, reduction, sum, places)
  if not watching or reduction == "none" or loss:device() == "meta" then return loss end
  local note = { loss = loss, sum = 1, places = 1 }
  if reduction ~= "sum" then note.sum, note.places = scope.no_grad(sum), places end
  if #notes >= MOST then table.remove(notes, 1) end
  notes[#notes + 1] = note
  return loss
end

--- Calls fn, which gives a loss whose parts are not noted, and notes it by one weight.
---@param fn fun(): ps.Tensor
---@param weight number
---@return ps.Tensor loss
function loss_weight.as(fn, weight)
  local was = watching
  watching = false
  local ok, loss = pcall(fn)
  watching = was
  if not ok then error(loss, 0) end
  loss_weight.note(loss, "mean", function() return weight end, weight)
  return loss
end

--- Forgets all notes.
function loss_weight.forget() notes = {} end

-- What a note's targets count; nil: a dry run does not know it.
local function count_of(note)
  if type(note.sum) == "number" then return note.sum end
  local ok, value = pcall(note.sum.item, note.sum)
  if ok then return value end
  if type(value) ~= "table" or value.name ~= "EDRY" then error(value, 0) end
end

-- The one weight of some notes.
local function together(list, of)
  local found
  for _, note in ipairs(list) do
    local count = count_of(note) or note.places
    if found and found.count ~= count then
      caller.error(("the loss is made of losses that are means over unlike targets (they weigh %.14g and %.14g), so "
        .. "its weight among micro-batches, ranks and batches is not known: say it, %s"):format(found.count, count, of))
    end
    found = found or { count = count, places = note.places }
  end
  return found
end

--- The weight of a loss by its graph; nil: no noted loss is in it.
---@param loss ps.Tensor
---@return ps.Targets?
function loss_weight.of(loss)
  local list = {}
  for _, note in ipairs(notes) do
    if rawequal(note.loss, loss) or loss.node ~= nil and scope.made_from(loss, { note.loss }) then
      list[#list + 1] = note
    end
  end
  return together(list, "model:backward(loss, { weight = ... })")
end

--- Calls fn and gives the weight of all losses that it notes, since without gradients there is no graph.
---@param fn fun(): any
---@return any result
---@return ps.Targets? weight nil: it noted none
function loss_weight.during(fn)
  local was, were = notes, watching
  notes, watching = {}, true
  local ok, result = pcall(fn)
  local mine = notes
  notes, watching = was, were
  if not ok then error(result, 0) end
  return result, together(mine, "by the model's method count_targets(...)")
end

return loss_weight
