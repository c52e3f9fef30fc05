-- SPDX-License-Identifier: BSD-3-Clause
-- Changes logits before a token is chosen. The changes are applied in the order of transformers: the repetition penalty
-- (Keskar et al. 2019, "CTRL"), a ban on repeated n-grams, a ban on end tokens before the minimum length, and a user's
-- function. Padding is ignored. Sizes: R rows, L filled columns, V words of the vocabulary.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"
local caller = require "ps.core.caller"
local same_shape = require("ps.nn.module").same_shape
local error = caller.error

local choose = {}

-- Returns a bool tensor [R, V] that marks the tokens which occur in each row of ids (int [R, n]). Only columns where
-- `chosen` (bool [R, n]) is true are searched. If `chosen` is nil, all columns are searched.
local function words(logits, ids, chosen)
  local zero = create.zeros(logits:shape(), { dtype = "fp32", device = logits:device() })
  local one
  if chosen ~= nil then one = chosen:to("fp32")
  else one = create.ones(ids:shape(), { dtype = "fp32", device = logits:device() }) end
  return zero:scatter_add(1, ids:contiguous(), one):gt(0)
end

local function less_repetition(logits, rows, penalty)
  local seen = words(logits, rows.ids:narrow(1, 0, rows.length), rows:real(rows.length))
  local scaled = tensors.where(logits:lt(0), logits * penalty, logits / penalty)
  return tensors.where(seen, scaled, logits)
end

-- Forbids each token that would complete an n-gram which the row already contains.
local function no_ngram_again(logits, rows, n)
  local ids, m = rows.ids, rows.length - n + 1                          -- m: number of n-grams
  if m < 1 then return logits end
  local found = rows:real(m)
  for i = 0, n - 2 do
    local same = ids:narrow(1, i, m):eq(ids:narrow(1, m + i, 1))         -- [R, m]
    found = found == nil and same or native.ops.logical_and(found, same)
  end
  local banned = words(logits, ids:narrow(1, n - 1, m), found)
  return tensors.where(banned, create.full({ 1 }, -math.huge, { device = logits:device() }), logits)
end

--- Returns the logits from which the next token is chosen.
---@param logits ps.Tensor fp32 [R, V]; the function may overwrite them
---@param rows ps.pretrained.Rows
---@param chosen table generate's settings
---@param together? fun(fn: fun(): boolean): boolean calls fn, and raises one rank's error on all ranks; nil unless
--- several ranks share the model
---@return ps.Tensor
function choose.process(logits, rows, chosen, together)
  if chosen.repetition_penalty ~= 1 then logits = less_repetition(logits, rows, chosen.repetition_penalty) end
  if chosen.no_repeat_ngram_size > 0 then logits = no_ngram_again(logits, rows, chosen.no_repeat_ngram_size) end
  if rows.length - rows.width < chosen.min_new_tokens then
    for id in pairs(chosen.eos) do logits:narrow(1, id, 1):fill_(-math.huge) end
  end
  local function by_function()
    local shape = logits:shape()
    logits = chosen.logits_processor(rows.ids:narrow(1, 0, rows.length), logits)
    if not scope.is_tensor(logits) or not same_shape(logits:shape(), shape) then
      error(("generate: logits_processor must return logits [%d, %d]"):format(shape[1], shape[2]), 0)
    end
    return true
  end
  if chosen.logits_processor then
    if together then together(by_function) else by_function() end
  end
  return logits
end

return choose
