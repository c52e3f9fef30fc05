-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/evaluate_cases.lua CASES.json RESULTS.json: evaluates models on rows. A case has a folder, rows
-- of texts and rows with choices, and the tokens of a window. A result has both of ps.evaluate's, or {error}.
local cjson = require "cjson"
local ps = require "ps"

local file = assert(io.open(arg[1], "rb"))
local cases = cjson.decode(file:read "*a")
file:close()

local function answer(case)
  local tok = ps.tokenizer.from_pretrained(case.folder)
  local model = ps.from_pretrained(case.folder, { dtype = "fp32", quiet = true })
  local function run(rows)
    return ps.evaluate.run(model, tok, { data = rows, max_length = case.max_length, batch = case.batch })
  end
  local ok, choices = pcall(run, case.questions)           -- a choice can be longer than a window
  local out = { perplexity = run(case.texts), choices = ok and choices or { error = tostring(choices) }, metrics = {} }
  for i, pair in ipairs(case.answers) do
    out.metrics[i] = { ps.evaluate.exact_match(pair[1], pair[2]), ps.evaluate.word_f1(pair[1], pair[2]) }
  end
  return out
end

local results = {}
for i, case in ipairs(cases) do
  local ok, result = pcall(answer, case)
  results[i] = ok and result or { error = tostring(result) }
end
file = assert(io.open(arg[2], "wb"))
file:write(cjson.encode(results))
file:close()
