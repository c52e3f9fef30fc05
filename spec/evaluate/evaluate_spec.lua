-- SPDX-License-Identifier: BSD-3-Clause
-- ps.evaluate and tools/evaluate.lua: log-probabilities against those of the model's logits, windows, choices, answers,
-- measures, the callback of ps.train.run, ranks, and wrong rows. spec/oracle/evaluate_oracle.py compares it with
-- lm-eval.
local cjson = require "cjson"
local gpt2 = require "models.gpt2"
local likelihood = require "ps.evaluate.likelihood"
local paths = require "ps.paths"
local ps = require "ps"
local check = require "spec.check_lib"
local tokens = require "spec.tokenizer_lib"
local fails = check.fails

local TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
  .. "{{ '[assistant]' if add_generation_prompt }}"
local folder, tok, model

setup(function()
  folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE,
    eos_token = "<|endoftext|>" } })
  tok = ps.tokenizer.from_pretrained(folder)
  ps.manual_seed(3)
  model = gpt2.new("tiny", { vocab_size = 258, n_positions = 32 })
  model:save_pretrained(folder)
  model:eval()
end)
teardown(function() tokens.remove(folder) end)

-- Returns the log-probability of ids[i] after ids[first] to ids[i - 1], and whether ids[i] is the likeliest token.
local function logp(ids, first, i)
  local given = {}
  for k = first, i - 1 do given[#given + 1] = ids[k] end
  local last = ps.no_grad(function()
    return model(ps.tensor({ given }, { dtype = "int32" })):log_softmax(-1):tolist()[1][#given]
  end)
  local best = 1
  for k, x in ipairs(last) do if x > last[best] then best = k end end
  return last[ids[i] + 1], best == ids[i] + 1
end

local function near(want, got, tolerance)
  assert.is_true(math.abs(want - got) <= (tolerance or 1e-5) * math.abs(want), ("%.8g, want %.8g"):format(got, want))
end

describe("windows over a text", function()
  local function shown(n, most, stride)
    local ids, windows, list = {}, {}, {}
    for i = 1, n do ids[i] = i end
    likelihood.windows(windows, 0, ids, most, stride)
    for i, window in ipairs(windows) do
      local targets = {}
      for _, id in ipairs(window.targets) do if id ~= -100 then targets[#targets + 1] = id end end
      list[i] = ("%d-%d:%d-%d"):format(window.inputs[1], window.inputs[#window.inputs], targets[1], targets[#targets])
      assert.equal(#window.inputs, #window.targets)
      assert.equal(#targets, window.count)
    end
    return table.concat(list, " ")
  end

  it("predict each token once, and fill the last window with the tokens before it", function()
    assert.equal("0-2:1-3", shown(3, 4, 4))
    assert.equal("0-3:1-4 4-7:5-8", shown(8, 4, 4))
    assert.equal("0-3:1-4 4-7:5-8 6-9:9-10", shown(10, 4, 4))
    assert.equal("0-3:1-4 2-5:5-6 4-7:7-8 5-8:9-9", shown(9, 4, 2))
    assert.equal("0-0:1-1 1-1:2-2", shown(2, 1, 1))
    assert.equal("", shown(0, 4, 4))
  end)
end)

describe("ps.evaluate.run", function()
  it("has the perplexity of texts by token, word and byte", function()
    local texts = { "ab cab, the end\n of a  longer text than one window has", "ab", "caf\195\169" }
    local sum, n, hits, bytes = 0, 0, 0, 0
    for _, text in ipairs(texts) do
      local ids = tok:encode(text)
      bytes = bytes + #text
      table.insert(ids, 1, tok.eos_token_id)
      for i = 2, #ids do
        local done = math.floor((i - 2) / 16) * 16         -- number of tokens in the full windows that precede it
        local last = math.min(done + 16, #ids - 1)
        local x, best = logp(ids, math.max(1, last - 15), i)
        sum, n, hits = sum + x, n + 1, hits + (best and 1 or 0)
      end
    end
    local rows = {}
    for i, text in ipairs(texts) do rows[i] = { text = text } end
    for _, batch in ipairs { 1, 3 } do
      local result = ps.evaluate.run(model, tok, { data = rows, max_length = 16, batch = batch })
      near(-sum, -result.loglikelihood)
      near(math.exp(-sum / n), result.token_perplexity)
      near(math.exp(-sum / 14), result.word_perplexity)    -- 12, 1 and 1 words
      near(math.exp(-sum / bytes), result.byte_perplexity)
      near(hits / n, result.accuracy)
      assert.same({ n, 14, bytes, 3 }, { result.tokens, result.words, result.bytes, result.rows })
    end
    rows[3] = { text = 5 }                                 -- this row is not read
    assert.equal(2, ps.evaluate.run(model, tok, { data = rows, limit = 2 }).rows)
    rows[3] = { prompt = "another form" }
    assert.equal(1, ps.evaluate.run(model, tok, { data = rows, limit = 1 }).rows)
  end)

  it("has the perplexity of the assistant's tokens, and of ids with labels", function()
    local talk = { { role = "user", content = "ab" }, { role = "assistant", content = "ba" } }
    local ids, mask = tok:apply_chat_template(talk, { train_on = "assistant" })
    local sum, n, labels = 0, 0, {}
    for i = 2, #ids do
      if mask[i] == 1 then sum, n = sum + logp(ids, 1, i), n + 1 end
    end
    for i, id in ipairs(ids) do labels[i] = mask[i] == 1 and id or -100 end
    for _, row in ipairs { { messages = talk }, { input_ids = ids, labels = labels } } do
      local result = ps.evaluate.run(model, tok, { data = { row } })
      assert.equal(n, result.tokens)
      near(math.exp(-sum / n), result.token_perplexity)
      assert.is_nil(result.word_perplexity)
    end
  end)

  it("chooses by sums of log-probabilities, and per character", function()
    local questions = { { query = "ab ", choices = { "a", "bab", "a longer choice" }, gold = 2 },
      { question = "", choices = { text = { "ab", "ba" }, label = { "A", "B" } }, answerKey = "B" },
      { ctx = "x", endings = { "one", "two" }, label = "0" }, { query = "x", choices = { "yes", "no" }, gold = "B" } }
    for _, batch in ipairs { 1, 8 } do
      local result, acc, acc_norm = ps.evaluate.run(model, tok, { data = questions, batch = batch }), 0, 0
      for i, question in ipairs(questions) do
        local best, best_norm
        local choices = question.choices or question.endings
        for k, choice in ipairs(choices.text or choices) do
          local context = (question.query or question.question or question.ctx):gsub("%s+$", "")
          local ids, sum = tok:encode(i == 1 and "ab  " .. choice or context .. " " .. choice), 0
          local from = #tok:encode(context)
          if context == "" then table.insert(ids, 1, tok.eos_token_id) from = 1 end
          for at = from + 1, #ids do sum = sum + logp(ids, 1, at) end
          near(-sum, -result.samples[i].loglikelihoods[k])
          if not best or sum > best[1] then best = { sum, k - 1 } end
          if not best_norm or sum / #choice > best_norm[1] then best_norm = { sum / #choice, k - 1 } end
        end
        local gold = ({ 2, 1, 0, 1 })[i]
        assert.same({ gold, best[2], best_norm[2] }, { result.samples[i].gold, result.samples[i].choice,
          result.samples[i].choice_norm })
        acc, acc_norm = acc + (best[2] == gold and 1 or 0), acc_norm + (best_norm[2] == gold and 1 or 0)
      end
      assert.same({ acc / 4, acc_norm / 4, 4 }, { result.acc, result.acc_norm, result.rows })
    end
  end)

  it("does not predict the first token of texts if the tokenizer has neither bos_token nor eos_token", function()
    local bytes = ps.tokenizer.bytes()
    local sum, n = 0, 0
    for _, text in ipairs { "ab cab", "b" } do
      local ids = bytes:encode(text)
      for i = 2, #ids do sum, n = sum + logp(ids, 1, i), n + 1 end
    end
    local result = ps.evaluate.run(model, bytes, { data = { { text = "ab cab" }, { text = "b" }, { text = "" } } })
    assert.same({ n, 2, 7 }, { result.tokens, result.unpredicted, result.bytes })
    near(-sum, -result.loglikelihood)
    assert.is_nil(ps.evaluate.run(model, tok, { data = { { text = "ab" } } }).unpredicted)
    fails(function() ps.evaluate.run(model, bytes, { data = { { text = "b" } } }) end, "no token to evaluate")
    local question = { query = "a", choices = { "b", "ab" }, gold = 0 }
    local whole = bytes:encode "a ab"
    near(-logp(whole, 1, 2) - logp(whole, 1, 3) - logp(whole, 1, 4),
      -ps.evaluate.run(model, bytes, { data = { question } }).samples[1].loglikelihoods[2])
    for _, query in ipairs { "", " " } do
      fails(function()
        ps.evaluate.run(model, bytes, { data = { question, { query = query, choices = { "b", "ab" }, gold = 0 } } })
      end, "rows[2]: the context has no token, and the tokenizer has neither bos_token nor eos_token")
    end
  end)

  it("compares the model's answers with the right ones", function()
    local prompt = tok:apply_chat_template({ { role = "user", content = "ab" } }, { add_generation_prompt = true })
    local row = model:generate({ prompt }, 4, { temperature = 0, tokenizer = tok })[1]
    local answer = tok:decode({ unpack(row, #prompt + 1) }, { skip_special_tokens = true }):match "^%s*(.-)%s*$"
    local result = ps.evaluate.run(model, tok, { task = "answers", max_new = 4, data = {
      { question = "ab", answers = { "no", answer } }, { question = "ab", answer = "something else" } } })
    assert.equal(answer, result.samples[1].answer)
    assert.equal(1, result.samples[1].exact_match)
    near(0.5, result.exact_match)
    local talk = { messages = { { role = "user", content = "ab" }, { role = "assistant", content = answer } } }
    near(1, ps.evaluate.run(model, tok, { task = "answers", max_new = 4, data = { talk } }).exact_match)
  end)

  it("leaves the model's mode unchanged, and refuses invalid arguments", function()
    model:train()
    ps.evaluate.run(model, tok, { data = { { text = "ab" } } })
    assert.is_true(model.training)
    model:eval()
    local function run(options) return function() ps.evaluate.run(model, tok, options) end end
    fails(run {}, "data is missing")
    fails(run { data = {} }, "the data has no rows")
    fails(run { data = { { text = "x" } }, max_length = 33 }, "max_length is 33, but the model has only 32 positions")
    fails(run { data = { { text = "x" } }, max_length = 8, stride = 9 }, "a stride of 9 tokens is longer")
    fails(run { data = { { text = "" } } }, "the row has no token to evaluate")
    fails(run { data = { { text = "x" } }, task = "guess" }, "task")
    for want, row in pairs { ["rows[1]: the correct choice is missing"] = { query = "x", choices = { "a", "b" } },
      ["gold = 2; it must be a number of 0 to 1"] = { query = "x", choices = { "a", "b" }, gold = 2 },
      ["is not a list of two or more choices"] = { query = "x", choices = { "a" }, gold = 0 },
      ["choices[2] is a number, not a text"] = { query = "x", choices = { "a", 5 }, gold = 0 },
      ["rows[1]: a choice has 601 tokens, more than the "] = { query = "x", choices = { "a", ("b"):rep(600) },
        gold = 0 },
      ["choices[1] is empty"] = { query = "x", choices = { "", "a" }, gold = 0 },
      ["both 'ctx' and 'prompt' could precede the choices"] = { ctx = "x", prompt = "y", choices = { "a", "b" },
        gold = 0 },
      ["the field 'gold' is a table"] = { query = "x", choices = { "a", "b" }, gold = { 1 } },
      ["rows[1]: the row has no choices"] = { query = "x", gold = 1 },
      ["the field 'query' is a number"] = { query = 5, choices = { "a", "b" }, gold = 0 } } do
      fails(run { data = { row }, task = "choices" }, want)
    end
    fails(run { data = { { question = "x" } }, task = "answers" }, "an answer is missing")
    fails(run { data = { { question = 5, answer = "x" } }, task = "answers" }, "the field 'question' is a number")
  end)
end)

describe("a row with choices", function()
  local choices = require("ps.evaluate.rows").choices
  local list = { text = { "x", "y", "z" }, label = { "1", "2", "3" } }
  it("has a context before its question", function()
    assert.equal("c\n\nq", (choices({ context = "c", question = "q", choices = { "a", "b" }, gold = 0 }, "row")))
    assert.equal("all", (choices({ query = "all", context = "c", choices = { "a", "b" }, gold = 0 }, "row")))
  end)
  it("finds its label, whether that is a number or a text", function()
    for _, key in ipairs { 1, "1" } do
      assert.equal(1, (select(3, choices({ question = "q", choices = list, answerKey = key }, "row"))))
      assert.equal(1, (select(3, choices({ question = "q", choices = { text = list.text, label = { 1, 2, 3 } },
        answerKey = key }, "row"))))
    end
  end)
end)

describe("measures", function()
  it("are accuracy, F1, exact match and F1 of words", function()
    near(0.75, ps.evaluate.accuracy({ 1, 0, 1, 1 }, { 1, 0, 0, 1 }))
    near(0.8, ps.evaluate.f1({ 1, 0, 1, 1 }, { 1, 0, 0, 1 }))
    near((0.8 + 2 / 3) / 2, ps.evaluate.f1({ 1, 0, 1, 1 }, { 1, 0, 0, 1 }, { average = "macro" }))
    near(0.75, ps.evaluate.f1({ "a", "b", "a", "a" }, { "a", "b", "b", "a" }, { average = "micro" }))
    assert.equal(0, ps.evaluate.f1({ 0 }, { 0 }))
    assert.equal(1, ps.evaluate.exact_match("The  Cat!", "cat"))
    assert.equal(0, ps.evaluate.exact_match("cat", { "dog", "cats" }))
    near(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3), ps.evaluate.word_f1("red cat", { "x", "cat on mat" }))
    assert.equal(1, ps.evaluate.word_f1("the", "a"))
    assert.equal(1, ps.evaluate.exact_match("[1]^\\`", "{1}"))
    assert.equal(1, ps.evaluate.word_f1("snake_case", "snakecase"))
    assert.equal(1, ps.evaluate.exact_match("\u{201c}the\u{201d} cat", "\u{201c} \u{201d} cat"))
    assert.equal(0, ps.evaluate.exact_match("th\u{e9} cat", "cat"))
    fails(function() ps.evaluate.accuracy({ 1 }, { 1, 2 }) end, "1 predictions for 2 labels")
    fails(function() ps.evaluate.f1({}, {}) end, "there are no predictions")
  end)
end)

describe("ps.evaluate.callback", function()
  it("evaluates every n steps of ps.train.run, on one rank and with ZeRO 3 on two", function()
    local script = [[
      local ps = require "ps"
      ps.init_distributed { quiet = true, seed = 1 }
      local tok = ps.tokenizer.from_pretrained "%s"
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return ps.from_pretrained("%s", { quiet = true }):train() end,
        config = { train_micro_batch_size_per_gpu = %d, optimizer = { type = "SGD", params = { lr = 0.1 } },
          zero_optimization = ps.world_size() > 1 and { stage = 3 } or nil } }
      local rows = {}
      for i = 1, 8 do rows[i] = { text = ("ab"):rep(i) } end
      local loader = ps.data.loader { table = ps.data.table(rows), tokenizer = tok, batch = %d, seq = 16,
        shuffle = false }
      local function report(result, line)
        ps.print_rank(("%%d %%.5f %%d"):format(line.step, result.token_perplexity, result.tokens))
      end
      ps.train.run { model = model, optimizer = optimizer, loader = loader, steps = 4, quiet = true,
        callbacks = { step = ps.evaluate.callback(2, model, tok, { data = rows, batch = 2 }, report) } }
      local questions = { { query = "a", choices = { "b", "ab" }, gold = 0 },
        { query = "ab", choices = { "ba", "abab", "b" }, gold = 2 } }
      for _, n in ipairs { 1, 2, 8 } do
        local choices = ps.evaluate.run(model, tok, { data = questions, batch = n })
        for _, sample in ipairs(choices.samples) do
          for _, sum in ipairs(sample.loglikelihoods) do ps.print_rank(("%%.4f"):format(sum)) end
        end
      end
    ]]
    local path = folder .. "/callback.lua"
    local function run(launch, batch)
      check.write(path, script:format(folder, folder, batch, batch))
      local p = io.popen(("OMP_NUM_THREADS=1 '%s' %s '%s' 2>&1"):format(paths.exe, launch, path))
      local out = p:read "*a"
      p:close()
      return out
    end
    local one = run("", 4)
    assert.truthy(one:find("^2 %d+%.%d+ 36\n4 %d+%.%d+ 36\n" .. ("%-%d+%.%d+\n"):rep(15) .. "$"), one)
    local two = run(("'%s/tools/launch.lua' --nproc-per-node 2"):format(paths.root), 2)
    local a, b = {}, {}
    for x in one:gmatch "%-?%d+%.%d+" do a[#a + 1] = tonumber(x) end
    for x in two:gmatch "%-?%d+%.%d+" do b[#b + 1] = tonumber(x) end
    assert.equal(#a, #b, two)
    for i, x in ipairs(a) do near(x, b[i], 1e-4) end
  end)

  it("opens the data once", function()
    local opened = 0
    local function rows_of(i)
      if i == 1 then opened = opened + 1 end
      if i <= 2 then return { text = ("ab"):rep(i) } end
    end
    local seen = {}
    local step = ps.evaluate.callback(2, model, tok, { data = rows_of }, function(result) seen[#seen + 1] = result end)
    for at = 1, 5 do step { step = at } end
    assert.same({ 1, 2, 2 }, { opened, #seen, seen[1].rows })
    assert.equal(seen[1].loss, seen[2].loss)
  end)
end)

describe("tools/evaluate.lua", function()
  local function run(words)
    return check.shell(("'%s' '%s'/tools/evaluate.lua %s %s"):format(paths.exe, paths.root,
      folder, words))
  end

  it("divides the rows of each task among processes", function()
    local lines = { perplexity = { '{"text": "ab cab"}', '{"text": "b"}', '{"text": "ca"}' },
      choices = { '{"query": "a", "choices": ["b", "ab", "cc"], "gold": 0}', '{"query": "b", "choices": ["b", "a"], '
        .. '"gold": 1}' },
      answers = { '{"question": "a", "answer": "b"}', '{"question": "b", "answer": "b"}', '{"question": "c", "answer": '
        .. '"b"}' } }
    for task, list in pairs(lines) do
      local data = ("%s/%s.jsonl"):format(folder, task)
      check.write(data, table.concat(list, "\n") .. "\n")
      local words = ("--data %s --json --batch 2 --max-new 4 --task %s"):format(data, task)
      local one = cjson.decode((run(words)))
      local out, code = check.shell(("OMP_NUM_THREADS=1 '%s' '%s/tools/launch.lua' --nproc-per-node 2 "
        .. "'%s/tools/evaluate.lua' %s %s"):format(paths.exe, paths.root, paths.root, folder, words))
      assert.equal(0, code, out)
      local two = cjson.decode(out:match "^%[0%] ({[^\n]*})\n$" or out)   -- one process prints
      for name, want in pairs(one) do
        if type(want) == "number" and want ~= 0 then near(want, two[name], 1e-6) else assert.equal(want, two[name]) end
      end
    end
  end)

  it("says how many first tokens are not predicted if no token precedes texts", function()
    local plain = folder .. "/plain"
    model:save_pretrained(plain)
    ps.tokenizer.bytes():save_pretrained(plain)
    local data = folder .. "/first.jsonl"
    check.write(data, '{"text": "ab"}\n{"text": "b"}\n')
    local command = ("'%s' '%s'/tools/evaluate.lua %s --data %s"):format(paths.exe, paths.root, plain, data)
    local out, code = check.shell(command)
    assert.truthy(code == 0 and out:find "tokens +1\n" and out:find "unpredicted +2\n", out)
    assert.truthy(out:find("The first token of each text is not predicted: the tokenizer has neither ", 1, true), out)
    out, code = check.shell(command .. " --json")
    tokens.remove(plain)
    assert.equal(0, code, out)
    assert.equal(2, cjson.decode(out).unpredicted)
  end)

  it("prints measures, JSON, and samples to a file", function()
    local data = folder .. "/choices.jsonl"
    check.write(data, '{"query": "a", "choices": ["b", "ab"], "gold": 0}\n'
      .. '{"query": "b", "choices": ["b", "a"], "gold": 1}\n')
    local out, code = run(("--data %s --json --samples %s/samples.jsonl"):format(data, folder))
    assert.equal(0, code, out)
    local result = cjson.decode(out)
    assert.same({ "choices", 2 }, { result.task, result.rows })
    local n = 0
    for line in io.lines(folder .. "/samples.jsonl") do
      n = n + 1
      assert.equal(2, #cjson.decode(line).loglikelihoods)
    end
    assert.equal(2, n)
    out, code = run(("--data %s --samples %s/absent/samples.jsonl"):format(data, folder))
    assert.truthy(code ~= 0 and out:find("--samples: the file ", 1, true) and not out:find "acc +[%d.]", out)
    check.write(folder .. "/text.jsonl", '{"text": "ab"}\n')
    for _, words in ipairs { "--data DIR/text.jsonl", "--data DIR/choices.jsonl --task perplexity" } do
      out, code = run((words:gsub("DIR", folder)) .. " --samples " .. folder .. "/samples.jsonl")
      assert.equal(1, code, out)
      assert.matches("^evaluate: %-%-samples: perplexity has no results by row", out)      -- the first output
    end
    local plain = {}                                         -- --plain changes the prompt, and so the answer
    check.write(folder .. "/answers.jsonl", '{"question": "ab", "answer": "b"}\n')
    for i, flag in ipairs { "", "--plain" } do
      local words = ("--data %s/answers.jsonl --task answers --max-new 4 --samples %s/samples.jsonl %s"):format(folder,
        folder, flag)
      out, code = run(words)
      assert.equal(0, code, out)
      plain[i] = cjson.decode((check.read(folder .. "/samples.jsonl"))).answer
      local rows = { { question = "ab", answer = "b" } }
      local chat
      if i == 2 then chat = false end
      assert.equal(ps.evaluate.run(model, tok, { data = rows, task = "answers", max_new = 4, chat = chat }).samples[1]
        .answer, plain[i])
    end
    assert.not_equal(plain[1], plain[2])
    check.write(folder .. "/text.txt", "ab\nba\n")
    out, code = run(("--data %s/text.txt --batch 2"):format(folder))
    assert.truthy(code == 0 and out:find "token_perplexity +%d" and out:find "rows +1\n", out)
    out = run(("--data %s/text.txt --text line"):format(folder))
    assert.truthy(out:find "rows +2\n", out)
    out, code = run(("--data %s --max-length 33"):format(data))
    assert.truthy(code == 1 and out:find("evaluate: ", 1, true), out)
    assert.truthy(out:find("33, but the model has only 32", 1, true), out)
  end)
end)
