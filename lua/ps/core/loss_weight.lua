-- SPDX-License-Identifier: BSD-3-Clause
-- The weight of a loss among the micro-batches, ranks and evaluation batches that it is averaged with: the sum that its
-- mean divides by. The functions of losses (F.cross_entropy, F.lm_loss, F.nll_loss, nn.ParallelLMHead's) note how their
-- targets count, so that no ignore_index and no class weights can be missed. A loss that a script makes of noted ones,
-- by factors or as a sum, has their weight: the tape tells which ops it was made by. Losses of unlike weights have no
-- weight together.
--
-- A note has the number of the op that made the loss, since a script's inner losses may be collected before backward.
-- It holds labels of the host and numbers, never a loss with a history, so it keeps no graph alive.
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C = native.C
local number_array, found_array = array "int64_t", array "int8_t"

local loss_weight = {}

local MOST = 256                    -- notes that are kept of losses that never come to a backward

---@class ps.LossNote
---@field op integer the number of the op that made the loss; -1: no recorded op
---@field loss? ps.Tensor of a loss without history
---@field inside boolean the loss was made within a function that ps.recompute ran
---@field places number its targets, ignored ones too
---@field count? number|ps.Tensor what the targets count; a tensor of one element lies on a device
---@field labels? ps.Tensor the targets on the host, as the script gave them; `count` is not known yet
---@field ignore? integer the target that does not count
---@field weight? ps.Tensor [V] what each class counts

---@type ps.LossNote[]
local notes = {}
local watching, muted = 0, 0        -- who may ask; how deep losses are made that are not to be noted
local pairs_of_batch = {}           -- {on the device, on the host}: the integer tensors of the batch under way

--- Notes losses from now on: an engine, ps.train.run or ps.train.evaluate may ask for weights.
---@return fun() off ends it; calling it twice is harmless
function loss_weight.watch()
  local on = true
  watching = watching + 1
  return function()
    if not on then return end
    on, watching = false, watching - 1
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

--- Begins a batch: targets that the model gets are counted where the script has them, so that no host waits for a
--- device.
---@param given any[] the model's arguments as the script gave them, and their number n
---@param args any[] the same on the device
function loss_weight.begin(given, args)
  pairs_of_batch = {}
  for i = #notes, 1, -1 do
    if notes[i].op < 0 then table.remove(notes, i) end
  end
  for i = 1, watching > 0 and args.n or 0 do add_pairs(pairs_of_batch, args[i], given[i], 6) end
end

--- Forgets the batch and all notes.
function loss_weight.forget() notes, pairs_of_batch = {}, {} end

-- The script's own tensor of targets; nil: ops made them, or the script did not give them to the model.
local function given_as(target)
  for _, pair in ipairs(pairs_of_batch) do
    local there = pair[1]
    if there.storage == target.storage and there.offset == target.offset and there.numel_ == target.numel_
      and there.dtype_ == target.dtype_ and there:is_contiguous() and target:is_contiguous() then
      return pair[2]
    end
  end
end

-- -- notes ------------------------------------------------------------------------------------------------------------
-- What targets count: a tensor of one element.
local function sum_of(target, ignore, weight)
  local counts = target:ne(ignore)
  if weight == nil then return counts:sum() end
  local classes = target:to("int64"):reshape(-1):clamp(0, weight:size(0) - 1)
  return (weight:to("fp64"):gather(0, classes) * counts:reshape(-1):to("fp64")):sum()
end

local on_host = setmetatable({}, { __mode = "k" })       -- by tensor of classes' weights: {version, copy}

-- Classes' weights on the host. The host waits once for each version of their values.
local function host_copy(weight)
  if native.device_info(weight.device_).is_host ~= 0 then return weight end
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

-- Whether a loss is to be noted. A segment that backward runs again was noted before.
local function notes_it(loss)
  return watching > 0 and muted == 0 and native.device_info(loss.device_).has_data ~= 0
    and not (scope.segment and scope.segment.again)
end

--- Notes a loss. A mean weighs what its targets count; a sum weighs 1, whatever its targets. reduction "none" gives no
--- loss, and is not noted.
---@param loss ps.Tensor
---@param reduction string|nil "mean" (default), "sum" or "none"
---@param target ps.Tensor integers
---@param ignore? integer the target that does not count, default -100
---@param weight? ps.Tensor [V] what each class counts
---@return ps.Tensor loss
function loss_weight.note(loss, reduction, target, ignore, weight)
  if reduction == "none" or not notes_it(loss) then return loss end
  if reduction == "sum" then return add(loss, { count = 1, places = 1 }) end
  ignore = ignore or -100
  local note, labels = { places = tonumber(target.numel_) }, given_as(target)
  if labels ~= nil then note.labels, note.ignore, note.weight = labels, ignore, weight and weight:detach()
  else
    scope.no_grad(function()
      note.count = sum_of(target, ignore, weight)
      note.count:keep()
    end)
  end
  return add(loss, note)
end

--- Calls fn(...), whose losses nobody weighs: a dry run.
---@param fn function
---@return boolean ok
---@return any ... what fn gave, or its error
function loss_weight.without(fn, ...)
  muted = muted + 1
  local function done(...)
    muted = muted - 1
    return ...
  end
  return done(pcall(fn, ...))
end

--- Calls fn, which makes a loss of several, and notes that by one weight.
---@param fn fun(): ps.Tensor
---@param weight number
---@return ps.Tensor loss
function loss_weight.as(fn, weight)
  local ok, loss = loss_weight.without(fn)
  if not ok then error(loss, 0) end
  return notes_it(loss) and add(loss, { count = weight, places = weight }) or loss
end

-- -- asked for --------------------------------------------------------------------------------------------------------
-- What a note's targets count.
local function count_of(note)
  if note.labels ~= nil then
    local labels, weight = note.labels, note.weight
    note.count = scope.no_grad(function()
      local host = native.device_info(labels.device_).is_host ~= 0
      return sum_of(labels, note.ignore, weight and (host and host_copy(weight) or weight:to(labels:device())))
    end)
    note.labels, note.weight = nil, nil
  end
  if type(note.count) ~= "number" then note.count = devices.known(note.count.item, note.count) or note.places end
  return note.count
end

-- The notes of the losses that a loss was made of.
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

--- The weight of a loss, by the ops that made it. Of a loss without history it is that of all losses since
--- loss_weight.begin. The host waits for targets that ops made on a device.
---@param loss ps.Tensor
---@return ps.Targets? weight nil: no noted loss is in it
function loss_weight.of(loss)
  local found
  for _, note in ipairs(notes_in(loss)) do
    local count = count_of(note)
    if found and found.count ~= count then
      caller.error(("the loss is made of losses that are means over unlike targets, which weigh %.14g and %.14g, so "
        .. "its weight among micro-batches, ranks and batches is not known: give it, model:backward(loss, "
        .. "{ weight = ... }), or by the model's method count_targets(...)"):format(found.count, count))
    end
    local places = note.places
    found = found or { count = count, places = count > places and count or places }
  end
  return found
end

--- Forgets the notes that a loss was made of: its backward begins.
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
