-- SPDX-License-Identifier: BSD-3-Clause
-- Evaluates language models. There are three tasks: the perplexity of texts and of conversations, multiple choice by
-- log-probabilities, and answers that the model generates. The windows, sums and measures are defined as in lm-eval
-- (EleutherAI's evaluation harness), so that the results can be compared with results of lm-eval.
local agree = require "ps.dist.agree"
local caller = require "ps.core.caller"
local characters = require "ps.chat.characters"
local create = require "ps.tensor.create"
local dist = require "ps.dist"
local formats = require "ps.data.formats"
local handle = require "ps.nn.handle"
local likelihood = require "ps.evaluate.likelihood"
local mesh = require "ps.dist.mesh"
local metrics = require "ps.evaluate.metrics"
local rows_of = require "ps.evaluate.rows"
local cjson = require "cjson"
local tables = require "ps.data.table"
local text = require "ps.chat.text"
local train = require "ps.train"
local values = require "ps.chat.values"
local error = caller.error

local evaluate = { accuracy = metrics.accuracy, f1 = metrics.f1, exact_match = metrics.exact_match,
  word_f1 = metrics.word_f1 }

---@class ps.evaluate.Options
---@field data ps.DataTable|string|table the rows, or a source for ps.data.table
---@field task? "perplexity"|"choices"|"answers" the task (default: "choices" if the first row has choices, otherwise
--- "perplexity")
---@field max_length? integer number of tokens in a window (default: number of the model's positions, at most 2048)
---@field stride? integer number of tokens that a window predicts (default: max_length, so that windows do not overlap)
---@field batch? integer number of windows in a batch; for "choices", number of choices in a batch (default 8)
---@field limit? integer number of rows to evaluate, starting at the first row (default: all rows)
---@field train_on? "assistant"|"last"|"all" the turns of a conversation that are evaluated (default "assistant")
---@field date? string "YYYY-MM-DD", for chat templates that print the date
---@field chat? boolean for "answers": true: a question is asked as a message of the user (default: true if the
--- tokenizer's folder has a chat template)
---@field max_new? integer for "answers": maximum number of tokens in an answer (default 32)
---@field device? string device of the model's inputs (default: device of the model's first parameter)
---@field divide? boolean only for a model without an engine. true: all ranks call this function and divide the rows
--- among them. The ranks of an engine's data-parallel axis always divide the rows.
---@field progress? fun(done: integer, total: integer) a function that is called after each batch

local OPTIONS = { data = "any", task = "string", max_length = "whole", stride = "whole", batch = "whole",
  limit = "whole", train_on = "string|function", date = "string", chat = "boolean", max_new = "whole",
  device = "string", divide = "boolean", progress = "callable" }
local LENGTH = 2048
local IGNORED = require("ps.data.batch").IGNORED

-- Returns the maximum number of tokens that a model accepts, or nil if its configuration has no limit.
local function positions(model)
  local config = (handle.module(model) or model).config or {}
  local most = config.max_position_embeddings or config.n_positions
  return type(most) == "number" and most or nil
end

local function device_of(model)
  local first = (handle.module(model) or model):parameters()[1]
  return first and first:device()
end

-- Returns the number of words in a text, counted as in lm-eval: the number of runs of spaces, plus one.
local function words_in(s)
  local n, inside = 1, false
  for c in s:gmatch(characters.PATTERN) do
    local space = text.is_space(c)
    if space and not inside then n = n + 1 end
    inside = space
  end
  return n
end

local TASKS = {}

-- Returns the group of the ranks that divide the rows among them. Returns nil if each process evaluates all rows.
local function group_of(model, divide)
  if handle.of(model) then return mesh.group "dp" end
  return divide and mesh.group "world" or nil
end

-- Returns the windows of rows 1 to n, and the form of the rows. For texts, also returns the number of words, the number
-- of bytes, and the number of tokens that cannot be predicted because no token precedes them.
local function windows_of(tok, rows, n, options)
  local windows, words, bytes, unpredicted = {}, 0, 0, 0
  local form = formats.recognise(rows)
  local most, stride = options.max_length, options.stride
  for i = 1, n do
    local ids, mask, prefix
    if form == "text" then
      local s = caller.typed(rows[i].text, "string", rows:place(i) .. ": text")
      ids, prefix = likelihood.encode(tok, s), likelihood.prefix(tok)
      if not prefix and ids[1] then prefix, unpredicted = table.remove(ids, 1), unpredicted + 1 end
      words, bytes = words + words_in(s), bytes + #s
    else
      local labels
      if form == "ids" then ids, labels = formats.ids(rows, i, tok.vocab_size)
      else
        local messages, tools = formats.conversation(rows, i, form)
        ids, mask = formats.of_row(rows, i, tok.apply_chat_template, tok, messages,
          { train_on = options.train_on or "assistant", date = options.date, tools = tools })
      end
      if labels then
        mask = {}
        for k, label in ipairs(labels) do mask[k] = label ~= IGNORED and 1 or 0 end
      end
      prefix = table.remove(ids, 1)                        -- there are no logits for the first token
      if mask then table.remove(mask, 1) end
    end
    likelihood.windows(windows, prefix, ids, most, stride, mask)
  end
  return windows, form, words, bytes, unpredicted
end

function TASKS.perplexity(model, tok, rows, n, options)
  local windows, form, words, bytes, unpredicted = windows_of(tok, rows, n, options)
  local tokens = 0
  for _, window in ipairs(windows) do tokens = tokens + window.count end
  if tokens == 0 then error(("%s: the row has no token to evaluate"):format(rows:place(1))) end
  local group = group_of(model, options.divide)
  local next_batch, batches, counted = likelihood.batches(windows, options.batch, tok.pad_token_id or 0,
    group and group:rank() or 0, group and group:size() or 1, options.device)
  local done = 0
  local loss, accuracy = train.evaluate(model, function()
    local x, y = next_batch()
    if done > 0 and options.progress then options.progress(done, batches) end
    done = done + 1
    if x then return x, y end
  end)
  if group and not handle.of(model) then                   -- train.evaluate sums over ranks only if there is an engine
    local sums = group:all_reduce(create.tensor({ (loss or 0) * counted, (accuracy or 0) * counted },
      { dtype = "fp64" })):tolist()
    loss, accuracy = sums[1] / tokens, sums[2] / tokens
  end
  local total = loss * tokens
  local result = { task = "perplexity", form = form, rows = n, tokens = tokens, loss = loss, accuracy = accuracy,
    token_perplexity = math.exp(loss), loglikelihood = -total }
  if form == "text" then
    result.words, result.bytes = words, bytes
    result.word_perplexity, result.byte_perplexity = math.exp(total / words), math.exp(total / bytes)
    result.bits_per_byte = total / bytes / math.log(2)
    result.unpredicted = unpredicted > 0 and unpredicted or nil
  end
  return result
end

-- Returns the index of the largest number in a list. If this number occurs several times, returns its first index.
local function largest(list)
  local at = 1
  for i, x in ipairs(list) do if x > list[at] then at = i end end
  return at
end

-- Returns the standard error of the mean of n values. Each value is 0 or 1.
local function error_of(mean, n) return n > 1 and math.sqrt(mean * (1 - mean) / (n - 1)) or nil end

function TASKS.choices(model, tok, rows, n, options)
  local pairs_, questions = {}, {}
  for i = 1, n do
    local context, choices, gold = rows_of.choices(rows[i], rows:place(i))
    questions[i] = { first = #pairs_, choices = choices, gold = gold }
    for _, choice in ipairs(choices) do
      local first, rest = likelihood.pair(tok, context, " " .. choice)
      if not first then
        error(("%s: the context has no token, and the tokenizer has neither bos_token nor eos_token to precede the "
          .. "choices; write a context, or add eos_token to tokenizer_config.json"):format(rows:place(i)))
      end
      if #rest > options.max_length then
        error(("%s: a choice has %d tokens, more than the %d that the model reads at once (max_length)"):format(
          rows:place(i), #rest, options.max_length))
      end
      pairs_[#pairs_ + 1] = { first, rest }
    end
  end
  local config = (handle.module(model) or model).config or {}
  local sums = likelihood.still(model, function()
    return likelihood.sums(model, pairs_, { rows = options.batch, most = options.max_length,
      pad = tok.pad_token_id or 0, device = options.device, group = group_of(model, options.divide),
      vocabulary = type(config.vocab_size) == "number" and config.vocab_size or nil,
      tick = options.progress and function(done) options.progress(done, #pairs_) end })
  end)
  local samples, right, right_norm = {}, 0, 0
  for i, question in ipairs(questions) do
    local of, per_character = {}, {}
    for k, choice in ipairs(question.choices) do
      of[k] = sums[question.first + k]
      per_character[k] = of[k] / text.length(choice)
    end
    local at, at_norm = largest(of), largest(per_character)
    right = right + (at == question.gold and 1 or 0)
    right_norm = right_norm + (at_norm == question.gold and 1 or 0)
    samples[i] = { loglikelihoods = of, choice = at - 1, choice_norm = at_norm - 1, gold = question.gold - 1 }
  end
  return { task = "choices", rows = n, acc = right / n, acc_stderr = error_of(right / n, n), acc_norm = right_norm / n,
    acc_norm_stderr = error_of(right_norm / n, n), samples = samples }
end

-- Returns the ids of the prompt that row i contains, and a list of the correct answers. The prompt is a question, or a
-- conversation without its last answer.
local function asked(tok, rows, i, chat, date)
  local row = rows[i]
  if row.messages or row.conversations then
    local messages, tools = formats.prompt(rows, i)
    local all = formats.conversation(rows, i)
    local last = #messages < #all and values.get(all[#messages + 1], "content")
    if not text.is(last) then error(rows:place(i) .. ": the last turn of the assistant has no text") end
    return formats.of_row(rows, i, tok.apply_chat_template, tok, messages,
      { add_generation_prompt = true, date = date, tools = tools }), { text.flat(last) }
  end
  local question = rows_of.question(row, rows:place(i))
  if row.context and row.question then question = row.context .. "\n\n" .. question end
  local answers = rows_of.answers(row, rows:place(i))
  if not chat then return tok:encode(question), answers end
  return tok:apply_chat_template({ { role = "user", content = question } },
    { add_generation_prompt = true, date = date }), answers
end

-- Exchanges samples between ranks. Before the call, each rank has computed some of the n samples. After the call,
-- `samples` contains all n samples on each rank.
local function gather_samples(group, samples, n)
  if not group then return end
  local mine = {}
  for i = 1, n do if samples[i] then mine[#mine + 1] = { i, samples[i] } end end
  for _, given in ipairs(agree.texts(group, cjson.encode(mine))) do
    for _, pair in ipairs(cjson.decode(given)) do samples[pair[1]] = pair[2] end
  end
end

function TASKS.answers(model, tok, rows, n, options)
  local chat = options.chat
  if chat == nil then chat = tok.has_chat_template and tok:has_chat_template() end
  local exact, f1, samples = 0, 0, {}
  -- All ranks of an engine take part in the decoding of each row. Therefore each rank computes all rows.
  local group = not handle.of(model) and group_of(model, options.divide) or nil
  local rank, ranks = group and group:rank() or 0, group and group:size() or 1
  likelihood.still(model, function()
    for i = 1 + rank, n, ranks do
      local ids, answers = asked(tok, rows, i, chat, options.date)
      local out = model:generate({ ids }, options.max_new or 32, { temperature = 0, tokenizer = tok })[1]
      local answer = tok:decode({ unpack(out, #ids + 1) }, { skip_special_tokens = true }):match "^%s*(.-)%s*$"
      samples[i] = { answer = answer, exact_match = metrics.exact_match(answer, answers),
        f1 = metrics.word_f1(answer, answers) }
      if options.progress then options.progress(i, n) end
    end
  end)
  gather_samples(group, samples, n)
  for _, sample in ipairs(samples) do exact, f1 = exact + sample.exact_match, f1 + sample.f1 end
  return { task = "answers", rows = n, exact_match = exact / n, exact_match_stderr = error_of(exact / n, n),
    f1 = f1 / n, samples = samples }
end

-- Checks the arguments. Returns the options with defaults filled in, and the rows.
local function checked(model, tok, options, call)
  caller.typed(model, "table", call .. ": the model")
  caller.typed(tok, "table", call .. ": the tokenizer")
  options = caller.options(options, call, OPTIONS)
  local rows = options.data
  if rows == nil then error(call .. ": data is missing: a table of examples, a path, or a list of rows") end
  if not tables.is(rows) then rows = tables.open(rows) end
  if #rows == 0 then error(call .. ": the data has no rows") end
  for _, name in ipairs { "max_length", "stride", "batch", "limit", "max_new" } do
    if options[name] then caller.whole(options[name], ("%s: %s"):format(call, name), 1) end
  end
  local most = positions(model)
  local full = setmetatable({ batch = options.batch or 8, device = options.device or device_of(model) },
    { __index = options })
  full.max_length = options.max_length or math.min(most or LENGTH, LENGTH)
  if most and full.max_length > most then
    error(("%s: max_length is %d, but the model has only %d positions"):format(call, full.max_length, most))
  end
  if options.limit and options.limit < #rows then rows = rows:take(options.limit) end
  full.stride = options.stride or full.max_length
  if full.stride > full.max_length then
    error(("%s: a stride of %d tokens is longer than a window of %d"):format(call, full.stride, full.max_length))
  end
  return full, rows
end

-- Runs the task that full.task selects. `full` and `rows` are from checked().
local function run(model, tokenizer, full, rows)
  local task = full.task or (rows_of.has_choices(rows[1]) and "choices" or "perplexity")
  caller.one_of(task, TASKS, "ps.evaluate.run: task")
  local engine = handle.of(model)
  if engine then return engine:averaged("ps.evaluate.run", TASKS[task], model, tokenizer, rows, #rows, full) end
  return TASKS[task](model, tokenizer, rows, #rows, full)
end

--- Evaluates a causal language model on rows. There are three tasks.
---
--- "perplexity" evaluates texts, conversations or ids. In a conversation, only the tokens that the assistant has to
--- produce are evaluated. Returns { tokens, loss, accuracy, token_perplexity }. `loss` is the mean loss per token.
--- `accuracy` is the fraction of tokens for which the model predicts the correct token as the most probable one. For
--- texts, the result also contains { words, bytes, word_perplexity, byte_perplexity, bits_per_byte }. If the tokenizer
--- has neither bos_token nor eos_token, the first token of each text is not predicted, and `unpredicted` is the number
--- of these tokens.
---
--- "choices" evaluates rows with the fields query, choices and gold. Returns { acc, acc_norm, samples }. acc is the
--- fraction of rows in which the correct choice has the highest score. The score of a choice is the sum of the
--- log-probabilities of its tokens, where the choice follows the query after a space. For acc_norm, this sum is divided
--- by the number of characters in the choice.
---
--- "answers" evaluates rows with a question and answers, or conversations. The model answers by greedy decoding.
--- Returns { exact_match, f1, samples }, computed as in SQuAD's script.
---
--- If an engine has several ranks, all ranks must call this function, and all ranks return the same result. They divide
--- the rows among them, except for "answers", where each rank computes all rows. With `divide`, ranks without an engine
--- divide the rows in all tasks. Each of these ranks must have the whole model.
---@param model ps.nn.Module|ps.Engine
---@param tokenizer ps.TextTokenizer
---@param options ps.evaluate.Options
---@return table
function evaluate.run(model, tokenizer, options)
  local full, rows = checked(model, tokenizer, options, "ps.evaluate.run")
  return run(model, tokenizer, full, rows)
end

-- The measures that evaluate.line prints, in this order.
local SHOWN = { "token_perplexity", "word_perplexity", "byte_perplexity", "accuracy", "acc", "acc_norm", "exact_match",
  "f1" }

--- Returns the measures of a result as one line of text.
---@param result table a result of evaluate.run
---@return string
function evaluate.line(result)
  local parts = {}
  for _, name in ipairs(SHOWN) do
    if result[name] then parts[#parts + 1] = ("%s %.4f"):format(name, result[name]) end
  end
  return table.concat(parts, ", ")
end

--- Returns a callback for ps.train.run { callbacks = { step = ... } }. The callback evaluates the model every `every`
--- steps. evaluate.callback opens the data once, and all evaluations use it.
---@param every integer number of steps between two evaluations
---@param model ps.nn.Module|ps.Engine
---@param tokenizer ps.TextTokenizer
---@param options ps.evaluate.Options
---@param report? fun(result: table, line: table): string? called with the result of an evaluation and the log line of
--- the step; may return "stop" to end the run (default: rank 0 prints a line)
---@return fun(line: table): string?
function evaluate.callback(every, model, tokenizer, options, report)
  caller.whole(every, "ps.evaluate.callback: every", 1)
  if report ~= nil then caller.callable(report, "ps.evaluate.callback: report") end
  local full, rows = checked(model, tokenizer, options, "ps.evaluate.callback")
  return function(line)
    if line.step % every ~= 0 then return nil end
    local result = run(model, tokenizer, full, rows)
    if report then return report(result, line) end
    dist.print_rank(("step %d: %s"):format(line.step, evaluate.line(result)))
  end
end

return evaluate
