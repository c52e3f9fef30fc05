-- SPDX-License-Identifier: BSD-3-Clause
-- Log-probabilities of texts by a causal model: windows over long texts for perplexity, and sums over continuations of
-- contexts. Windows and the border between context and continuation are those of lm-eval (EleutherAI's evaluation
-- harness), so that its numbers can be compared.
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
-- largest number of logits in a batch of continuations: 256 MiB in fp32
local LOGITS = 2 ^ 26

---@class ps.evaluate.Window inputs[t] predicts targets[t]
---@field inputs integer[]
---@field targets integer[] the targets; -100 is ignored
---@field count integer number of targets that are not ignored

--- Returns the token that precedes the first token of a text: the tokenizer's bos_token, or else its eos_token. Returns
--- nil if the tokenizer has neither.
---@param tok ps.TextTokenizer
---@return integer?
function likelihood.prefix(tok) return tok.bos_token_id or tok.eos_token_id end

--- Returns the ids of a text with the special tokens that the tokenizer adds, unless the text itself begins with the
--- token that precedes texts.
---@param tok ps.TextTokenizer
---@param s string
---@return integer[]
function likelihood.encode(tok, s)
  local first = tok.bos_token or tok.eos_token
  return tok:encode(s, { add_special_tokens = not (first and s:sub(1, #first) == first) })
end

--- Appends the windows of a text. Each token is predicted once. A window predicts `stride` tokens (by default all of
--- its tokens, so that windows do not overlap). The last window is filled with the tokens that precede its predicted
--- tokens.
---@param windows ps.evaluate.Window[]
---@param prefix integer the token that precedes the first token
---@param ids integer[]
---@param most integer number of tokens in a window
---@param stride integer number of tokens that a window predicts, at most `most`
---@param counts? integer[] 1 for each token that is scored, else 0 (default: all tokens are scored)
function likelihood.windows(windows, prefix, ids, most, stride, counts)
  local done, all = 0, { prefix }
  for i, id in ipairs(ids) do all[i + 1] = id end         -- all[i] precedes ids[i]
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

-- Creates an int32 tensor [n, longest] from n lists. Shorter lists are padded with a value.
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

--- Returns an iterator over batches x, y of windows for ps.train.evaluate.
---@param windows ps.evaluate.Window[]
---@param rows integer number of windows per batch
---@param pad integer
---@param rank integer
---@param ranks integer number of ranks; each gets every ranks-th window, and all get the same number of batches
---@param device? string
---@return fun(): ps.Tensor?, ps.Tensor?
---@return integer batches
---@return integer counted number of this rank's targets that are not ignored
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

--- Returns the ids of a context and of its continuation. As in lm-eval, space at the end of the context belongs to the
--- continuation. The text is encoded as a whole, and the context has as many ids as it has alone. A context without ids
--- is the token that precedes texts, or nil if the tokenizer has none.
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

--- Calls fn with the model in evaluation mode and without gradients, and restores the model's mode afterwards.
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

-- Returns the inputs and targets of a pair. Only the last `most` inputs are kept.
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

-- Computes a model's logits for ids.
local function logits_of(model, ids)
  local out = model(ids)
  if type(out) == "table" and not scope.is_tensor(out) then out = out.logits or out[1] end
  if not scope.is_tensor(out) or out:dim() ~= 3 then
    error "ps.evaluate: the model returns no logits [batch, tokens, vocabulary]; use a causal language model"
  end
  return out
end

-- Computes the sums of a batch of rows: sums[r] belongs to row r. The second result is the vocabulary size.
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

-- Returns the indices of the rows in each batch. Long rows come first, so that short rows share a batch.
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

--- Returns the sum of the log-probabilities of each continuation, given its context.
---@param model ps.nn.Module|ps.Engine
---@param pairs_ {[1]: integer[], [2]: integer[]}[] the ids of each context and its continuation, which has
--- at most `most` ids
---@param options {rows: integer, most: integer, pad: integer, device?: string, vocabulary?: integer, group?: ps.Group,
--- tick?: fun(n: integer)} rows: largest number of pairs per batch. most: largest number of inputs in a row.
--- vocabulary: number of logits (default: that of the first row). group: the ranks that divide the batches; all compute
--- equally many batches. tick: called with the number of pairs that are finished.
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
    for r, i in ipairs(own or batches[1]) do batch[r] = rows[i] end  -- a rank without a batch repeats the first batch
    local got = sums_of(model, batch, options)
    for r, i in ipairs(own or {}) do sums[i] = got[r] end
    if options.tick then options.tick(done) end
  end
  return group and group:all_reduce(create.tensor(sums, { dtype = "fp64" })):tolist() or sums
end

return likelihood
