-- SPDX-License-Identifier: BSD-3-Clause
-- Computes log-probabilities of texts with a causal model. For perplexity, a long text is divided into windows. For
-- multiple choice, the log-probabilities of a continuation after a context are added up. The windows, and the border
-- between a context and its continuation, are defined as in lm-eval (EleutherAI's evaluation harness), so that the
-- results can be compared with results of lm-eval.
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local F = require "ps.tensor.functional"
local native = require "ps.core.ffi"
local nn_module = require "ps.nn.module"
local handle = require "ps.nn.handle"
local scope = require "ps.core.scope"
local text = require "ps.chat.text"
local error = caller.error
local int_array = array "int32_t"

local likelihood = {}

local IGNORED = require("ps.data.batch").IGNORED
-- The maximum number of logits that a batch of continuations produces. 2^26 logits need 256 MiB in fp32.
local LOGITS = 2 ^ 26

---@class ps.evaluate.Window inputs[t] predicts targets[t]
---@field inputs integer[]
---@field targets integer[] token ids; a target of -100 is ignored
---@field count integer number of targets that are not ignored

--- Returns the id of the prefix token, which is put before the first token of a text. The prefix token is the
--- tokenizer's bos_token. If the tokenizer has no bos_token, it is eos_token. Returns nil if the tokenizer has neither
--- token.
---@param tok ps.TextTokenizer
---@return integer?
function likelihood.prefix(tok) return tok.bos_token_id or tok.eos_token_id end

--- Returns the ids of a text. The tokenizer adds its special tokens, unless the text already begins with the prefix
--- token.
---@param tok ps.TextTokenizer
---@param s string
---@return integer[]
function likelihood.encode(tok, s)
  local first = tok.bos_token or tok.eos_token
  return tok:encode(s, { add_special_tokens = not (first and s:sub(1, #first) == first) })
end

--- Appends the windows of a text to a list. Each token is predicted once. The first window predicts `most` tokens, and
--- each later window predicts the next `stride` tokens. If a window predicts fewer than `most` tokens, the tokens
--- before the predicted tokens are added to its inputs, up to `most` inputs.
---@param windows ps.evaluate.Window[]
---@param prefix integer the token that precedes ids[1]
---@param ids integer[]
---@param most integer number of tokens in a window
---@param stride integer number of tokens that each window after the first window predicts, at most `most`
---@param counts? integer[] counts[i] is 1 if ids[i] is scored, and 0 otherwise (default: all tokens are scored)
function likelihood.windows(windows, prefix, ids, most, stride, counts)
  local done, all = 0, { prefix }
  for i, id in ipairs(ids) do all[i + 1] = id end         -- all[i] is the token before ids[i]
  while done < #ids do
    local n = math.min(#ids - done, done == 0 and most or stride)
    local last = done + n
    local first = math.max(1, last - most + 1)
    local window = { inputs = {}, targets = {}, count = 0 }
    for i = first, last do
      local yes = i > done and (not counts or counts[i] == 1)
      window.inputs[#window.inputs + 1] = all[i]
      window.targets[#window.targets + 1] = yes and ids[i] or IGNORED
      window.count = window.count + (yes and 1 or 0)
    end
    if window.count > 0 then windows[#windows + 1] = window end
    done = last
  end
end

-- Makes an int32 tensor [n, length of the longest list] from n lists. The other lists are padded with the value `pad`.
local function padded(lists, pad, device)
  local longest = 1
  for _, list in ipairs(lists) do longest = math.max(longest, #list) end
  local values = int_array(#lists * longest)
  for r, list in ipairs(lists) do
    for k = 1, longest do values[(r - 1) * longest + k - 1] = list[k] or pad end
  end
  local out = create.empty({ #lists, longest }, { dtype = "int32", device = device })
  native.check(native.C.ps_tensor_write(out, values, 4 * #lists * longest))
  return out
end

--- Returns an iterator over batches x, y of windows, for ps.train.evaluate. Rank r gets the windows r, r + ranks,
--- r + 2 * ranks and so on, counted from 0. All ranks get the same number of batches.
---@param windows ps.evaluate.Window[]
---@param rows integer number of windows per batch
---@param pad integer
---@param rank integer
---@param ranks integer number of ranks
---@param device? string
---@return fun(): ps.Tensor?, ps.Tensor?
---@return integer batches
---@return integer counted number of targets in the windows of this rank that are not ignored
function likelihood.batches(windows, rows, pad, rank, ranks, device)
  local at, n, counted = 0, math.ceil(math.ceil(#windows / ranks) / rows), 0
  for i = 1 + rank, #windows, ranks do counted = counted + windows[i].count end
  return function()
    if at == n then return nil end
    local inputs, targets = {}, {}
    for r = 1, rows do
      local window = windows[(at * rows + r - 1) * ranks + rank + 1]
      inputs[r], targets[r] = window and window.inputs, window and window.targets
    end
    if not inputs[1] then inputs, targets = { { pad } }, { { IGNORED } } end
    at = at + 1
    return padded(inputs, pad, device), padded(targets, IGNORED, device)
  end, n, counted
end

--- Returns the ids of a context and the ids of its continuation, as in lm-eval. Spaces at the end of the context are
--- moved to the beginning of the continuation. Context and continuation are encoded as one text. The first n ids of
--- this text belong to the context, where n is the number of ids of the context when it is encoded alone. If n is 0,
--- the context is the prefix token, or nil if the tokenizer has no prefix token.
---@param tok ps.TextTokenizer
---@param context string
---@param continuation string
---@return integer[]? context
---@return integer[] continuation
function likelihood.pair(tok, context, continuation)
  if context == "" then
    local ids, prefix = tok:encode(continuation, { add_special_tokens = false }), likelihood.prefix(tok)
    if prefix and ids[1] == prefix then table.remove(ids, 1) end
    return prefix and { prefix }, ids
  end
  local kept = text.flat(text.strip(context, nil, false, true))
  continuation = context:sub(#kept + 1) .. continuation
  local whole, first = likelihood.encode(tok, kept .. continuation), likelihood.encode(tok, kept)
  local rest = {}
  for i = #first + 1, #whole do rest[#rest + 1] = whole[i] end
  if #first > 0 then return first, rest end
  local prefix = likelihood.prefix(tok)
  return prefix and { prefix }, rest
end

--- Calls fn() without gradients, while the model is in evaluation mode. Then restores the mode that the model had.
---@param model ps.nn.Module|ps.Engine
---@param fn fun(): any
---@return any
function likelihood.still(model, fn)
  local restore = nn_module.modes(handle.module(model))
  model:eval()
  local ok, result = pcall(scope.no_grad, fn)
  restore()
  if not ok then error(result, 0) end
  return result
end

-- Returns the inputs and the targets for a context and its continuation. If there are more than `most` inputs, keeps
-- the last `most` inputs.
local function row_of(context, continuation, most)
  local ids = {}
  for _, list in ipairs { context, continuation } do for _, id in ipairs(list) do ids[#ids + 1] = id end end
  local first = math.max(1, #ids - most)
  local row = { inputs = {}, targets = {} }
  for i = first, #ids - 1 do
    row.inputs[#row.inputs + 1] = ids[i]
    row.targets[#row.targets + 1] = i >= #context and ids[i + 1] or IGNORED
  end
  return row
end

-- Returns the logits of a model for a tensor of ids.
local function logits_of(model, ids)
  local out = model(ids)
  if type(out) == "table" and not scope.is_tensor(out) then out = out.logits or out[1] end
  if not scope.is_tensor(out) or out:dim() ~= 3 then
    error "ps.evaluate: the model returns no logits [batch, tokens, vocabulary]; use a causal language model"
  end
  return out
end

-- Returns the list `sums` for a batch of rows, and the size of the vocabulary. sums[r] is the sum of the
-- log-probabilities of all targets of row r.
local function sums_of(model, rows, how)
  local inputs, targets, sums = {}, {}, {}
  for r, row in ipairs(rows) do inputs[r], targets[r] = row.inputs, row.targets end
  local logits = logits_of(model, padded(inputs, how.pad, how.device))
  local losses = F.cross_entropy(logits, padded(targets, IGNORED, how.device), { reduction = "none" }):tolist()
  for r, list in ipairs(targets) do
    local sum = 0
    for k, id in ipairs(list) do if id ~= IGNORED then sum = sum - losses[r][k] end end
    sums[r] = sum
  end
  return sums, logits:size(2)
end

-- Divides rows into batches. Returns a list of batches, where a batch is a list of row indices. The rows are sorted
-- from the longest to the shortest, so that rows of similar length are in the same batch.
local function batches_of(rows, how, vocabulary)
  local order, batches, at = {}, {}, 1
  for i in ipairs(rows) do order[i] = i end
  table.sort(order, function(a, b)
    if #rows[a].inputs ~= #rows[b].inputs then return #rows[a].inputs > #rows[b].inputs end
    return a < b
  end)
  while at <= #order do
    local longest = #rows[order[at]].inputs
    local n = math.max(1, math.min(how.rows, #order - at + 1, math.floor(LOGITS / (longest * vocabulary))))
    batches[#batches + 1] = { unpack(order, at, at + n - 1) }
    at = at + n
  end
  return batches
end

--- Takes pairs of a context and a continuation. For each pair, returns the sum of the log-probabilities of the
--- continuation's tokens after the context.
---@param model ps.nn.Module|ps.Engine
---@param pairs_ {[1]: integer[], [2]: integer[]}[] the ids of each context and the ids of its continuation. A
--- continuation has at most `most` ids.
---@param options {rows: integer, most: integer, pad: integer, device?: string, vocabulary?: integer, group?: ps.Group,
--- tick?: fun(n: integer)} rows: maximum number of pairs in a batch. most: maximum number of inputs in a row.
--- vocabulary: number of logits per token (default: found by computing the first row). group: the ranks that divide the
--- batches; all ranks of the group compute the same number of batches. tick: called with the number of finished pairs.
---@return number[] sums
function likelihood.sums(model, pairs_, options)
  local rows, sums = {}, {}
  for i, pair in ipairs(pairs_) do
    rows[i], sums[i] = row_of(pair[1], pair[2], options.most), 0
  end
  if #rows == 0 then return sums end
  local group = options.group
  local rank, ranks = group and group:rank() or 0, group and group:size() or 1
  local batches = batches_of(rows, options, options.vocabulary or select(2, sums_of(model, { rows[1] }, options)))
  local done = 0
  for round = 0, math.ceil(#batches / ranks) - 1 do
    for k = 1, ranks do done = done + #(batches[round * ranks + k] or {}) end
    local own = batches[round * ranks + rank + 1]
    local batch = {}
    for r, i in ipairs(own or batches[1]) do batch[r] = rows[i] end  -- a rank without a batch computes batch 1 again
    local got = sums_of(model, batch, options)
    for r, i in ipairs(own or {}) do sums[i] = got[r] end
    if options.tick then options.tick(done) end
  end
  return group and group:all_reduce(create.tensor(sums, { dtype = "fp64" })):tolist() or sums
end

return likelihood
