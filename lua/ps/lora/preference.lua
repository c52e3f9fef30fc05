-- SPDX-License-Identifier: BSD-3-Clause
-- Trains on preferences: DPO (Rafailov et al. 2023, "Direct Preference Optimization") and IPO (Azar et al. 2023, "A
-- General Theoretical Paradigm to Understand Learning from Human Preferences"). The losses are the same as in TRL's
-- DPOTrainer.
--
--   ps.preference.wrap(model, { beta = 0.1 })            -- calls of the model now return the loss of pairs
--   local out = model(ps.preference.batch(pairs))        -- rows: chosen, rejected, chosen, rejected, ...
--   out.loss:backward()
--
-- The log-probability of a row is computed from the head's loss for this row. The logits over the whole vocabulary are
-- therefore never in memory. The reference is either the model without its adapter, or values that were computed once
-- (preference.reference).
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local mesh = require "ps.dist.mesh"
local handle = require "ps.nn.handle"
local nn_module = require "ps.nn.module"
local parts = require "ps.nn.parts"
local serialize = require "ps.io.serialize"
local losses = require "ps.tensor.functional"
local adapters_of = require "ps.lora.adapters"
local files = require "ps.lora.files"
local lfs = require "lfs"
local C = native.C
local error = caller.error

local preference = {}

local IGNORED = -100

-- -- log-probabilities ------------------------------------------------------------------------------------------------
-- Returns the sum of the log-probabilities of each row's targets, as fp32 [rows]. Also returns each row's number of
-- targets. The sum is computed from the row's loss, which the last part of a causal model returns. The loss is the mean
-- over the row's targets.
local function rows_of(last, carry, batch)
  local targets, list = batch.targets, {}
  local counts = targets:ne(IGNORED):to("fp32"):sum(1)                                    -- [rows]
  for i = 0, targets:size(0) - 1 do
    local one = {}
    for key, value in pairs(batch) do one[key] = value end
    one.targets = targets:narrow(0, i, 1)
    list[i + 1] = last({ x = carry.x:narrow(0, i, 1) }, one).loss:reshape(1)
  end
  return tensors.cat(list, 0):to "fp32" * counts * -1, counts
end

-- -- the loss ---------------------------------------------------------------------------------------------------------
local LOSSES = {
  -- The loss is -log sigmoid(beta (chosen - rejected)), with label smoothing as in cDPO.
  sigmoid = function(chosen, rejected, _, how)
    local z = (chosen - rejected) * how.beta
    local smooth = how.label_smoothing
    local loss = losses.softplus(z * -1)
    return smooth == 0 and loss or loss * (1 - smooth) + losses.softplus(z) * smooth
  end,
  -- The loss is the squared difference between two numbers: the difference of the means per token, and 1 / (2 beta).
  ipo = function(chosen, rejected, counts, how)
    local difference = chosen / counts.chosen:clamp(1, math.huge) - rejected / counts.rejected:clamp(1, math.huge)
    return (difference - 1 / (2 * how.beta)) ^ 2
  end,
}

-- Returns rows 0, 2, 4, ... of t [2 P] if `first` is 0, or rows 1, 3, 5, ... if it is 1.
local function every_other(t, first) return t:reshape(-1, 2):select(1, first) end

-- Computes a batch's outputs from the log-probabilities of the policy, [2 P], and of the reference, [2 P].
local function outputs_of(log_probs, counts, reference, how)
  local ratio = log_probs - reference:to "fp32"
  local chosen, rejected = every_other(ratio, 0), every_other(ratio, 1)
  local loss = LOSSES[how.loss_type](chosen, rejected,
    { chosen = every_other(counts, 0), rejected = every_other(counts, 1) }, how):mean()
  local won, lost = chosen:detach() * how.beta, rejected:detach() * how.beta
  return { loss = loss, log_probs = log_probs:detach(), chosen_rewards = won, rejected_rewards = lost,
    accuracy = won:gt(lost):to("fp32"):mean() }
end

-- -- the wrapped model ------------------------------------------------------------------------------------------------
local OPTIONS = { beta = "number", loss_type = "string", label_smoothing = "number" }

local function check_batch(given)
  if type(given) ~= "table" or given.input_ids == nil or given.labels == nil then
    error "preference: the model takes a batch by names, with input_ids and labels (ps.preference.batch makes one)"
  end
  if given.input_ids:size(0) % 2 ~= 0 then
    error(("preference: %d rows do not form pairs; their order must be chosen, rejected, chosen, rejected, ..."):format(
      given.input_ids:size(0)))
  end
end

-- Splits a batch into two parts: a batch for the model's own batch_of, and the values of the reference.
local function split(given)
  local rest = {}
  for key, value in pairs(given) do if key ~= "reference" then rest[key] = value end end
  return rest, given.reference
end

local function restored(restore, ok, ...)
  restore()
  if not ok then error((...), 0) end
  return ...
end

-- Calls fn(...) with the model in evaluation mode, because dropout would make the reference random.
local function without_dropout(model, fn, ...)
  local restore = nn_module.modes(handle.module(model))
  model:eval()
  return restored(restore, pcall(fn, ...))
end

-- Returns the log-probabilities of a batch under the base model.
local function of_base(model, run, given)
  local adapters = adapters_of.of(model)
  if not adapters or adapters.merged then
    error("preference: the batch has no reference, and the model has no adapter to switch off: compute the reference "
      .. "once, before training (ps.preference.reference)")
  end
  return without_dropout(model, scope.no_grad, model.disable_adapter, model, run, given)
end

--- Makes calls of a causal model return a preference loss. The model then accepts batches of ps.preference.batch. A
--- call returns a table with loss, log_probs [rows], chosen_rewards and rejected_rewards [pairs], and accuracy, which
--- is the fraction of pairs whose chosen reward is higher. If a batch has no reference values, the reference is the
--- model without its adapter. In a pipeline, a batch must have reference values. Text generation does not change.
---@param model ps.nn.Module a model with a causal head, usually with an adapter (ps.lora.wrap)
---@param options? {beta?: number, loss_type?: "sigmoid"|"ipo", label_smoothing?: number} beta: how strongly the loss
--- keeps the model close to the reference (default 0.1). loss_type: "sigmoid" (default) is DPO.
---@return ps.nn.Module model
function preference.wrap(model, options)
  local given = caller.options(options, "preference.wrap", OPTIONS)
  if handle.of(model) then
    error "preference.wrap: ps.initialize made this model; wrap the module before, in model_func"
  end
  local how = { beta = given.beta or 0.1, loss_type = given.loss_type or "sigmoid",
    label_smoothing = given.label_smoothing or 0 }
  caller.one_of(how.loss_type, LOSSES, "preference.wrap: loss_type")
  if how.beta <= 0 or how.beta ~= how.beta then
    error(("preference.wrap: beta = %.14g; it must be above 0"):format(how.beta))
  end
  if not (how.label_smoothing >= 0 and how.label_smoothing < 0.5) then
    error(("preference.wrap: label_smoothing = %.14g; it must be in [0, 0.5)"):format(how.label_smoothing))
  end
  if type(model.parts) ~= "function" or type(model.head) ~= "function" then
    error(("preference.wrap: %s is not a causal language model of models/"):format(tostring(model.class_name)))
  end
  local parts_of, batch_of = model.parts, model.batch_of
  rawset(model, "parts", function(self)
    local list = parts_of(self)
    local last, n = list[#list], #list
    list[n] = { name = last.name, modules = last.modules, parameters = last.parameters,
      forward = function(carry, batch)
      if not batch.pairs then return last.forward(carry, batch) end
      local log_probs, counts = rows_of(last.forward, carry, batch)
      if batch.pairs == "rows" then return { log_probs = log_probs } end
      if batch.reference == nil then
        error "preference: in a pipeline each batch needs a reference (ps.preference.reference computes it)"
      end
      return outputs_of(log_probs, counts, batch.reference, how)
    end }
    return list
  end)
  rawset(model, "batch_of", function(self, named, ...)
    if type(named) ~= "table" or named.labels == nil then return batch_of(self, named, ...) end
    check_batch(named)
    local rest, reference = split(named)
    local batch = batch_of(self, rest)
    batch.pairs, batch.reference = true, reference
    return batch
  end)
  local forward = model.forward
  rawset(model, "forward", function(self, named, ...)
    if type(named) ~= "table" or named.labels == nil then return forward(self, named, ...) end
    local batch, list = self:batch_of(named), self:parts()
    if batch.reference == nil then
      batch.reference = of_base(self, function()
        local rows = {}
        for key, value in pairs(batch) do rows[key] = value end
        rows.pairs = "rows"
        return parts.fold(list, rows).log_probs
      end)
    end
    return parts.fold(list, batch)
  end)
  local splits = {}
  for key, value in pairs(model.split_inputs or {}) do splits[key] = value end
  splits.reference = "rows"
  rawset(model, "split_inputs", splits)
  rawset(model, "count_targets", function(_, named) return type(named) == "table" and named.input_ids:size(0) / 2 end)
  return model
end

-- -- batches ----------------------------------------------------------------------------------------------------------
---@class ps.preference.Pair
---@field prompt integer[] ids of the prompt
---@field chosen integer[] ids of the chosen answer, which follow the prompt
---@field rejected integer[] ids of the rejected answer, which follow the prompt
---@field truncated? boolean whether an answer was truncated (preference.encode)

local ENCODE = { seq = "whole", date = "string" }

-- Returns the ids of a text or of messages. If `opens` is true, the ids end with the header of the model's turn.
local function ids_of(tokenizer, value, opens, date)
  if type(value) == "string" then return tokenizer:encode(value) end
  return tokenizer:apply_chat_template(value, { add_generation_prompt = opens, date = date })
end

local function joined(prompt, answer)
  if type(prompt) ~= type(answer) then
    error(("preference.encode: the prompt is a %s and the answer a %s; both must be texts, or both lists of messages")
      :format(type(prompt), type(answer)))
  end
  if type(prompt) == "string" then return prompt .. answer end
  local list = copied(prompt)
  for _, message in ipairs(answer) do list[#list + 1] = message end
  return list
end

-- Returns three lists: the messages with which both conversations begin, the remaining messages of `chosen`, and the
-- remaining messages of `rejected`.
local function common_prompt(chosen, rejected)
  local n = 0
  while chosen[n + 1] and rejected[n + 1] and chosen[n + 1].role == rejected[n + 1].role
    and chosen[n + 1].content == rejected[n + 1].content do n = n + 1 end
  return { unpack(chosen, 1, n) }, { unpack(chosen, n + 1) }, { unpack(rejected, n + 1) }
end

local function cut(list, first, n)
  local part = {}
  for i = first, math.min(#list, n) do part[#part + 1] = list[i] end
  return part
end

--- Encodes a pair of answers. A row has prompt, chosen and rejected, each of which is a text or a list of messages.
--- Without prompt, chosen and rejected are two conversations with the same beginning. An answer begins at the first id
--- that differs from the prompt's ids. If prompt and answer have more than seq ids, they are truncated at the end.
---@param tokenizer ps.Tokenizer
---@param row {prompt?: string|table[], chosen: string|table[], rejected: string|table[]}
---@param options? {seq?: integer, date?: string}
---@return ps.preference.Pair? pair nil if the prompt alone has seq ids or more
function preference.encode(tokenizer, row, options)
  local given = caller.options(options, "preference.encode", ENCODE)
  caller.typed(row, "table", "preference.encode: the row")
  local prompt, chosen, rejected = row.prompt, row.chosen, row.rejected
  if chosen == nil or rejected == nil then
    error "preference.encode: a row needs chosen and rejected, and usually prompt"
  end
  if prompt == nil and type(chosen) == "table" then prompt, chosen, rejected = common_prompt(chosen, rejected) end
  prompt = prompt or ""
  local start = ids_of(tokenizer, prompt, true, given.date)
  local one = ids_of(tokenizer, joined(prompt, chosen), false, given.date)
  local other = ids_of(tokenizer, joined(prompt, rejected), false, given.date)
  local n = 0
  while start[n + 1] and start[n + 1] == one[n + 1] and start[n + 1] == other[n + 1] do n = n + 1 end
  local seq = given.seq or math.huge
  if n >= seq then return nil end
  local pair = { prompt = cut(start, 1, n), chosen = cut(one, n + 1, seq), rejected = cut(other, n + 1, seq),
    truncated = (#one > seq or #other > seq) or nil }
  if #pair.chosen == 0 or #pair.rejected == 0 then error "preference.encode: an answer of the row has no ids" end
  return pair
end

local BATCH = { pad = "whole", reference = "table" }

-- Raises an error for a pair that has no lists of ids, or whose reference is not a list of two numbers.
local function check_pair(i, pair, reference)
  for _, key in ipairs { "prompt", "chosen", "rejected" } do
    local ids = type(pair) == "table" and pair[key] or nil
    if type(ids) ~= "table" then
      error(("preference.batch: %s of pair %d is %s; it must be a list of ids (ps.preference.encode makes a pair of "
        .. "texts)"):format(key, i, ids == nil and "missing" or "a " .. type(ids)))
    end
  end
  if reference and not (type(reference) == "table" and tonumber(reference[1]) and tonumber(reference[2])) then
    error(("preference.batch: the reference of pair %d must be two numbers, the log-probabilities of its answers")
      :format(i))
  end
end

--- Returns a batch of P pairs: input_ids, attention_mask and labels [2 P, T], padded at the end. Row 2 * i is the
--- chosen answer of pair i, and row 2 * i + 1 is the rejected answer of pair i. Rows and pairs are counted from 0.
---@param list ps.preference.Pair[]
---@param options? {pad?: integer, reference?: number[][]} pad: the padding id (default 0). reference: the
--- log-probabilities of the chosen and the rejected answer of each pair.
---@return table batch
function preference.batch(list, options)
  local given = caller.options(options, "preference.batch", BATCH)
  local rows, longest, reference = {}, 1, given.reference and {}
  if reference and #given.reference ~= #list then
    error(("preference.batch: the reference has %d rows for %d pairs"):format(#given.reference, #list))
  end
  for i, pair in ipairs(list) do
    check_pair(i, pair, reference and given.reference[i])
    for k, answer in ipairs { pair.chosen, pair.rejected } do
      local row = { ids = copied(pair.prompt), first = #pair.prompt }
      for _, id in ipairs(answer) do row.ids[#row.ids + 1] = id end
      rows[#rows + 1], longest = row, math.max(longest, #row.ids)
      if reference then reference[#rows] = given.reference[i][k] end
    end
  end
  if #rows == 0 then error "preference.batch: the list of pairs is empty" end
  local ids, labels, mask = {}, {}, {}
  for i, row in ipairs(rows) do
    ids[i], labels[i], mask[i] = {}, {}, {}
    for t = 1, longest do
      ids[i][t], mask[i][t] = row.ids[t] or given.pad or 0, row.ids[t] and 1 or 0
      labels[i][t] = t > row.first and row.ids[t] or IGNORED
    end
  end
  return { input_ids = create.tensor(ids, "int32"), labels = create.tensor(labels, "int32"),
    attention_mask = create.tensor(mask, "int32"), reference = reference and create.tensor(reference, "fp32") or nil }
end

-- -- a cache of the reference -----------------------------------------------------------------------------------------
local REFERENCE = { batch = "whole", pad = "whole", path = "string" }

-- Returns a hash of all ids of the pairs, and of the base model's weights.
local function hash_of(list, model, shared)
  local texts = {}
  for i, pair in ipairs(list) do
    texts[i] = table.concat(pair.prompt, " ") .. "|" .. table.concat(pair.chosen, " ") .. "|"
      .. table.concat(pair.rejected, " ")
  end
  local base, why = files.base_id(model, shared)
  if not base then
    error(("preference.reference: path = FILE needs a base model whose weights are those of its files, but %s; compute "
      .. "the reference before ps.initialize, or without a path"):format(why))
  end
  local text = table.concat(texts, "\n") .. "\n" .. base
  return bit.tohex(C.ps_xxh3(text, #text))
end

--- Returns the log-probabilities of all pairs under the current model. If the model has an adapter, the adapter is not
--- applied. Dropout is off. The result is the option `reference` of ps.preference.batch. If `path` is given, the first
--- call writes the log-probabilities to a safetensors file, and later calls read the file. Raises an error if the file
--- was written for other pairs or for another base model.
---@param model ps.nn.Module|ps.Engine a model that preference.wrap has changed
---@param list ps.preference.Pair[]
---@param options? {batch?: integer, pad?: integer, path?: string} batch: the number of pairs per call (default 4)
---@return number[][] reference {chosen, rejected} for each pair
function preference.reference(model, list, options)
  local given = caller.options(options, "preference.reference", REFERENCE)
  local module = handle.module(model)
  local shared = handle.of(model) ~= nil and mesh.group "world" ~= nil
  local hash, values = given.path and hash_of(list, module, shared), {}
  if given.path and lfs.attributes(given.path, "mode") then
    local state = serialize.load(given.path)
    if not state["pairs." .. hash] then
      error(("preference.reference: %s has the values of other pairs, or of another model; remove the file, or "
        .. "name another one"):format(given.path))
    end
    return state["pairs." .. hash]:tolist()
  end
  local function compute()
    for first = 1, #list, given.batch or 4 do
      scope.scope(function()
        local some, zeros = {}, {}
        for i = first, math.min(#list, first + (given.batch or 4) - 1) do
          some[#some + 1], zeros[#zeros + 1] = list[i], { 0, 0 }
        end
        local out = scope.no_grad(model, preference.batch(some, { pad = given.pad, reference = zeros }))
        for _, row in ipairs(out.log_probs:reshape(-1, 2):tolist()) do values[#values + 1] = row end
      end)
    end
  end
  if adapters_of.of(module) then without_dropout(module, module.disable_adapter, module, compute)
  else without_dropout(module, compute) end
  if given.path then serialize.save({ ["pairs." .. hash] = create.tensor(values, "fp32") }, given.path) end
  return values
end

return preference
