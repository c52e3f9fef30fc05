-- SPDX-License-Identifier: BSD-3-Clause
-- Measures of predictions. The measures of predicted classes are accuracy and F1. The measures of predicted texts are
-- exact match and word F1, computed as in SQuAD's own script (Rajpurkar et al. 2016).
local caller = require "ps.core.caller"
local characters = require "ps.chat.characters"
local letters = require "ps.chat.letters"
local text = require "ps.chat.text"
local error = caller.error

local metrics = {}

local function checked(predictions, labels, call)
  caller.typed(predictions, "table", call .. ": the predictions")
  caller.typed(labels, "table", call .. ": the labels")
  if #predictions ~= #labels then
    error(("%s: %d predictions for %d labels; give one prediction per label"):format(call, #predictions, #labels))
  end
  if #labels == 0 then error(call .. ": there are no predictions") end
end

--- Returns the fraction of predictions that equal their labels.
---@param predictions any[]
---@param labels any[]
---@return number
function metrics.accuracy(predictions, labels)
  checked(predictions, labels, "ps.evaluate.accuracy")
  local hits = 0
  for i, label in ipairs(labels) do if predictions[i] == label then hits = hits + 1 end end
  return hits / #labels
end

local AVERAGE = { binary = true, macro = true, micro = true }
local F1 = { average = "string", positive = "any" }

-- Returns the F1 score for tp true positives, fp false positives and fn false negatives. Returns 0 if tp is 0.
local function f1_of(tp, fp, fn)
  return tp > 0 and 2 * tp / (2 * tp + fp + fn) or 0
end

--- Returns the F1 score of predicted classes. The F1 score is the harmonic mean of precision and recall.
---@param predictions any[]
---@param labels any[]
---@param options? {average?: "binary"|"macro"|"micro", positive?: any} average: "binary" (default) is the score of the
--- class `positive` (default 1). "macro" is the mean of the scores of all classes. "micro" is the score that is
--- computed from the counts of all classes added together.
---@return number
function metrics.f1(predictions, labels, options)
  options = caller.options(options, "ps.evaluate.f1", F1)
  checked(predictions, labels, "ps.evaluate.f1")
  local average = options.average or "binary"
  caller.one_of(average, AVERAGE, "ps.evaluate.f1: average")
  -- Each wrong prediction is a false positive of one class and a false negative of another class, so that the micro F1
  -- score equals the accuracy.
  if average == "micro" then return metrics.accuracy(predictions, labels) end
  local classes, counts = {}, {}
  local function of(class)
    if not counts[class] then
      counts[class] = { 0, 0, 0 }
      classes[#classes + 1] = class
    end
    return counts[class]
  end
  for i, label in ipairs(labels) do
    local wanted, got = of(label), of(predictions[i])
    if label == predictions[i] then wanted[1] = wanted[1] + 1
    else got[2], wanted[3] = got[2] + 1, wanted[3] + 1 end
  end
  if average == "binary" then
    local positive = options.positive
    if positive == nil then positive = 1 end
    return f1_of(unpack(counts[positive] or { 0, 0, 0 }))
  end
  local sum = 0
  for _, class in ipairs(classes) do sum = sum + f1_of(unpack(counts[class])) end
  return sum / #classes
end

local ARTICLES = { a = true, an = true, the = true }

-- Replaces the articles in a text by spaces. A word is a run of letters and numbers.
local function without_articles(s)
  local parts, word = {}, {}
  local function finish()
    local whole = table.concat(word)
    parts[#parts + 1], word = ARTICLES[whole] and " " or whole, {}
  end
  for c in s:gmatch(characters.PATTERN) do
    if letters.is_letter(c) or letters.is_number(c) then word[#word + 1] = c
    else
      finish()
      parts[#parts + 1] = c
    end
  end
  finish()
  return table.concat(parts)
end

-- Converts a text to lower case, and removes ASCII punctuation, English articles and redundant space.
local function normalized(answer)
  local s = text.flat(letters.lower(answer)):gsub("[!-/:-@%[\\%]^_`{|}~]", "")
  local words = {}
  for i, word in ipairs(text.split(without_articles(s), nil, -1)) do words[i] = text.flat(word) end
  return words
end

-- Calls fn(words of the prediction, words of the reference) for each reference, and returns the largest result.
local function best(prediction, references, call, fn)
  caller.typed(prediction, "string", call .. ": the prediction")
  if type(references) == "string" then references = { references } end
  caller.typed(references, "table", call .. ": the references")
  local words, most = normalized(prediction), 0
  for _, reference in ipairs(references) do
    most = math.max(most, fn(words, normalized(caller.typed(reference, "string", call .. ": a reference"))))
  end
  return most
end

--- Returns 1 if the prediction equals one of the references, and 0 otherwise. Case, punctuation, articles and extra
--- spaces are ignored.
---@param prediction string
---@param references string|string[]
---@return integer
function metrics.exact_match(prediction, references)
  return best(prediction, references, "ps.evaluate.exact_match", function(a, b)
    return table.concat(a, " ") == table.concat(b, " ") and 1 or 0
  end)
end

--- Compares the words of the prediction with the words of a reference, and returns their F1 score. If there are several
--- references, returns the largest score. Case, punctuation, articles and extra spaces are ignored, as in exact_match.
---@param prediction string
---@param references string|string[]
---@return number
function metrics.word_f1(prediction, references)
  return best(prediction, references, "ps.evaluate.word_f1", function(a, b)
    if #a == 0 or #b == 0 then return #a == #b and 1 or 0 end
    local left, common = {}, 0
    for _, word in ipairs(b) do left[word] = (left[word] or 0) + 1 end
    for _, word in ipairs(a) do
      if (left[word] or 0) > 0 then left[word], common = left[word] - 1, common + 1 end
    end
    return f1_of(common, #a - common, #b - common)
  end)
end

return metrics
