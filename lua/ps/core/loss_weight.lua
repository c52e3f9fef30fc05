-- SPDX-License-Identifier: BSD-3-Clause
-- Finds the weight of a loss. The weight is the divisor of the loss's mean. The engine averages the losses of
-- micro-batches, ranks and evaluation batches with these weights.
-- The loss functions (F.cross_entropy, F.lm_loss, F.nll_loss, and nn.ParallelLMHead's function) note the weight of
-- their targets. This weight takes ignore_index and class weights into account. A script may scale noted losses, or add
-- losses of equal weight. The result has the weight of these losses. The tape records which ops made the result. A loss
-- that combines losses of different weights has no weight.
--
-- A note also has the hits of a loss. A hit is a target whose logit is the largest of its row. If several logits are
-- equal, the first one counts as the largest. The ops count hits only while a user of loss_weight.watch reads hits.
--
-- A note stores the index of the op that made the loss. It does not store the loss itself, which may be collected
-- before backward. A note holds only numbers and host tensors of labels, and never a loss with a history, so it keeps
-- no graph alive.
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C = native.C
local number_array, found_array = array "int64_t", array "int8_t"

local loss_weight = {}

local MOST = 256  -- largest number of notes; the number is limited because some losses never reach a backward

---@class ps.LossNote
---@field op integer index of the op that made the loss, or -1 if the op was not recorded
---@field loss? ps.Tensor the loss, if it has no history
---@field inside boolean whether the loss was made within a function that ps.recompute ran
---@field places number number of its targets, including ignored targets
---@field count? number|ps.Tensor weight of the targets; if it is on a device, a tensor of one element
---@field labels? ps.Tensor targets on the host, as the script passed them, if `count` is not yet known
---@field ignore? integer the value of targets that do not count
---@field weight? ps.Tensor [V] weight of each class
---@field hits? ps.Tensor[] tensors int64 [2], each with the number of hits and the number of targets that count

---@type ps.LossNote[]
local notes = {}
local watching, muted = 0, 0        -- number of users of weights; nesting depth of code whose losses are not noted
local scoring = 0                   -- number of users that read hits
---@type ps.Tensor[]|false
local inner = false                 -- hits of the losses made within loss_weight.as; false outside of loss_weight.as
local pairs_of_batch = {}  -- integer tensors of the current batch: { tensor on the device, tensor on the host }

--- Begins to note losses for a user: an engine, ps.train.run or ps.train.evaluate.
---@param hits? boolean whether the user also reads hits
---@return fun() off ends the noting; a second call does nothing
function loss_weight.watch(hits)
  local on, more = true, hits and 1 or 0
  watching, scoring = watching + 1, scoring + more
  return function()
    if not on then return end
    on, watching, scoring = false, watching - 1, scoring - more
    if watching == 0 then loss_weight.forget() end
  end
end

-- -- where targets come from ------------------------------------------------------------------------------------------
local function add_pairs(list, there, here, depth)
  if scope.is_tensor(there) then
    if not there:is_float() then list[#list + 1] = { there, here } end
  elseif depth > 0 and type(there) == "table" and getmetatable(there) == nil and type(here) == "table" then
    for key, value in pairs(there) do add_pairs(list, value, here[key], depth - 1) end
  end
end

--- Begins a batch. If the script has the model's targets on the host, the targets are counted on the host. The host
--- then need not wait for a device.
---@param given any[] the model's arguments as the script passed them, and their number n
---@param args any[] the model's arguments on the device
function loss_weight.begin(given, args)
  pairs_of_batch = {}
  for i = #notes, 1, -1 do
    if notes[i].op < 0 then table.remove(notes, i) end
  end
  for i = 1, watching > 0 and args.n or 0 do add_pairs(pairs_of_batch, args[i], given[i], 6) end
end

--- Drops the batch and all notes.
function loss_weight.forget() notes, pairs_of_batch = {}, {} end

-- Returns the script's own tensor of targets. Returns nil if ops made the targets or if the script did not pass them to
-- the model.
local function given_as(target)
  for _, pair in ipairs(pairs_of_batch) do
    local there = pair[1]
    if there.storage == target.storage and there.offset == target.offset and there.numel_ == target.numel_
      and there.dtype_ == target.dtype_ and there:is_contiguous() and target:is_contiguous() then
      return pair[2]
    end
  end
end

--- Records that two tensors have the same targets that count. The order of these targets and the number of targets of
--- -100 may differ. A model that packs its labels calls this function. If the script has `target` on the host, the
--- targets are counted on the host.
---@param packed ps.Tensor
---@param target ps.Tensor
function loss_weight.stands_for(packed, target)
  local given = watching > 0 and given_as(target) or nil
  if given ~= nil then pairs_of_batch[#pairs_of_batch + 1] = { packed, given } end
end

-- -- notes ------------------------------------------------------------------------------------------------------------
-- Returns the weight of targets, as a tensor of one element.
local function sum_of(target, ignore, weight)
  local counts = target:ne(ignore)
  if weight == nil then return counts:sum() end
  local classes = target:to("int64"):reshape(-1):clamp(0, weight:size(0) - 1)
  return (weight:to("fp64"):gather(0, classes) * counts:reshape(-1):to("fp64")):sum()
end

local on_host = setmetatable({}, { __mode = "k" })       -- { version, copy } by tensor of class weights

-- Returns class weights on the host. The host waits for the device once for each version of the values.
local function host_copy(weight)
  if native.on_host(weight) then return weight end
  local version, known = C.ps_tensor_version(weight), on_host[weight]
  if not known or known[1] ~= version then
    known = { version, scope.no_grad(weight.to, weight, "cpu") }
    on_host[weight] = known
  end
  return known[2]
end

local function add(loss, note)
  note.op, note.inside = tonumber(C.ps_tensor_op_number(loss)), scope.segment ~= nil
  if note.op < 0 then note.loss = loss end
  if #notes >= MOST then table.remove(notes, 1) end
  notes[#notes + 1] = note
  return loss
end

-- Returns whether a loss must be noted. In backward, the second run of a segment repeats losses that are already noted.
local function notes_it(loss)
  return watching > 0 and muted == 0 and native.device_info(loss.device_).has_data ~= 0
    and not (scope.segment and scope.segment.again)
end

--- Returns the value of the attribute want_hits for the ops of losses. It is 1 while a user reads hits, and 0
--- otherwise.
---@return 0|1
function loss_weight.wants_hits() return scoring > 0 and 1 or 0 end

-- Keeps the tensors of hits alive after the scope of the forward has ended.
local function kept(hits)
  if hits == nil then return nil end
  hits:keep()
  if inner then inner[#inner + 1] = hits end
  return { hits }
end

--- Notes a loss. A mean has the weight of its targets. A sum has the weight 1. With the reduction "none" there is no
--- single loss, so nothing is noted.
---@param loss ps.Tensor
---@param reduction string|nil "mean" (default), "sum" or "none"
---@param target ps.Tensor integers
---@param ignore? integer the value of targets that do not count (default -100)
---@param weight? ps.Tensor [V] weight of each class
---@param hits? ps.Tensor int64 [2] number of hits and number of targets that count
---@return ps.Tensor loss
function loss_weight.note(loss, reduction, target, ignore, weight, hits)
  if reduction == "none" then return loss end
  hits = kept(hits)
  if not notes_it(loss) then return loss end
  if reduction == "sum" then return add(loss, { count = 1, places = 1, hits = hits }) end
  ignore = ignore or -100
  local note, labels = { places = tonumber(target.numel_), hits = hits }, given_as(target)
  if labels ~= nil then note.labels, note.ignore, note.weight = labels, ignore, weight and weight:detach()
  else
    note.count = scope.no_grad(sum_of, target, ignore, weight)
    note.count:keep()
  end
  return add(loss, note)
end

--- Calls fn(...) without noting its losses, for a dry run.
---@param fn function
---@return boolean ok
---@return any ... the results of fn, or its error
function loss_weight.without(fn, ...)
  muted = muted + 1
  local function done(...)
    muted = muted - 1
    return ...
  end
  return done(pcall(fn, ...))
end

--- Calls fn, which combines several losses into one loss, and notes this loss with `weight`.
---@param fn fun(): ps.Tensor
---@param weight number
---@return ps.Tensor loss
function loss_weight.as(fn, weight)
  local outer = inner
  inner = {}
  local ok, loss = loss_weight.without(fn)
  local hits = inner
  inner = outer
  if not ok then error(loss, 0) end
  for i = 1, outer and #hits or 0 do outer[#outer + 1] = hits[i] end
  return notes_it(loss) and add(loss, { count = weight, places = weight, hits = hits }) or loss
end

-- -- reading weights --------------------------------------------------------------------------------------------------
-- Returns the weight of a note's targets.
local function count_of(note)
  if note.labels ~= nil then
    local labels, weight = note.labels, note.weight
    note.count = scope.no_grad(function()
      local host = native.on_host(labels)
      return sum_of(labels, note.ignore, weight and (host and host_copy(weight) or weight:to(labels:device())))
    end)
    note.labels, note.weight = nil, nil
  end
  if type(note.count) ~= "number" then note.count = devices.known(note.count.item, note.count) or note.places end
  return note.count
end

-- Returns the notes of the losses that a loss was made from.
local function notes_in(loss)
  local list, made = {}, {}
  for _, note in ipairs(notes) do if note.op >= 0 then made[#made + 1] = note end end
  if loss.node ~= nil then
    local numbers, found = number_array(math.max(#made, 1)), found_array(math.max(#made, 1))
    for i, note in ipairs(made) do numbers[i - 1] = note.op end
    native.check(C.ps_tensor_made_by(loss, #made, numbers, found))
    for i, note in ipairs(made) do if found[i - 1] ~= 0 then list[#list + 1] = note end end
    if #list > 0 then return list end
    for _, note in ipairs(notes) do if note.inside then list[#list + 1] = note end end
    return list
  end
  for _, note in ipairs(notes) do if note.loss ~= nil and rawequal(note.loss, loss) then return { note } end end
  for _, note in ipairs(notes) do if note.op < 0 then list[#list + 1] = note end end
  return list
end

--- Returns the weight of a loss. The recorded ops of the loss determine it. A loss without history has the weight of
--- the losses noted since loss_weight.begin. If ops made the targets on a device, the host waits for the device.
---@param loss ps.Tensor
---@return ps.Targets? weight nil if the loss was made from no noted loss
function loss_weight.of(loss)
  local found
  for _, note in ipairs(notes_in(loss)) do
    local count = count_of(note)
    if found and found.count ~= count then
      caller.error(("the loss combines means over different targets, of weights %.14g and %.14g, so its weight among "
        .. "micro-batches, ranks and batches is unknown: pass it, model:backward(loss, { weight = ... }), or give the "
        .. "model a method count_targets(...)"):format(found.count, count))
    end
    local places = note.places
    found = found or { count = count, places = count > places and count or places }
  end
  return found
end

--- Returns the hits of a loss, as the loss's ops counted them. A hit is a target whose logit is the largest of its row.
--- If several logits are equal, the first counts as the largest. The host waits for the device that counted the hits.
---@param loss ps.Tensor
---@return number? hits nil if no op of the loss counted them
---@return number? targets number of targets that count
function loss_weight.score(loss)
  local hits, targets
  for _, note in ipairs(notes_in(loss)) do
    for _, t in ipairs(note.hits or {}) do
      local both = devices.known(t.tolist, t)
      if both then hits, targets = (hits or 0) + both[1], (targets or 0) + both[2] end
    end
  end
  return hits, targets
end

--- Drops the notes of the losses that a loss was made from. Called when the backward of the loss begins.
---@param loss ps.Tensor
function loss_weight.used(loss)
  local gone = {}
  for _, note in ipairs(notes_in(loss)) do gone[note] = true end
  if not next(gone) then return end
  local left = {}
  for _, note in ipairs(notes) do if not gone[note] then left[#left + 1] = note end end
  notes = left
end

return loss_weight
