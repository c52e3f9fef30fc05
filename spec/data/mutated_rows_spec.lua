-- SPDX-License-Identifier: BSD-3-Clause
-- Data files with random changes: rows of every form, lists, CSV, SQuAD's and packed files. Each row is a conversation,
-- or refused by an error that names the file. Then large, deep and otherwise bad rows, and random expressions of chat
-- templates with every filter, test and method.
local chat = require "ps.chat"
local check = require "spec.check_lib"
local filters, methods, tests = require "ps.chat.filters", require "ps.chat.methods", require "ps.chat.tests"
local ps = require "ps"
local tokens = require "spec.tokenizer_lib"
local fails = check.fails

local SEED = tonumber(os.getenv "PS_MUTATE_SEED") or 1
local COUNT = os.getenv "PS_FULL" == "1" and 20000 or 1500
local RAW = { "attempt to", "bad argument", "stack overflow", "got values that it does not support",
  "%.lua:%d+: %.lua" }

-- Fails if an error is one of Lua's own errors.
local function of_ours(problem, what)
  problem = tostring(problem)
  for _, raw in ipairs(RAW) do
    if problem:find(raw) then error(("seed %d: %s: %s"):format(SEED, what, problem), 0) end
  end
  return problem
end

local function pick(list) return list[math.random(#list)] end

local ROWS = {
  '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"x": 1.0}]}]}',
  '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s", "tools": []}',
  '{"prompt": "a", "completion": "b"}', '{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}',
  '{"instruction": "a", "input": "c", "output": "b"}', '{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}',
  '{"context": "c", "question": "a", "answers": {"text": ["b"], "answer_start": [0]}}', '{"text": "a"}',
}
local PIECES = { "{", "}", "[", "]", '"', ",", ":", "null", "true", "1", "-5", "1.5", "1e400", '"role"', '"x"', "\\",
  "\0", "\255", "\195", "\n", "\r\n", " ", '"content": 5,', '"from": null', "{}", "[]", '"\\ud800"',
  "9007199254740993" }

local function mutated(source)
  for _ = 1, math.random(4) do
    local at = math.random(#source)
    source = source:sub(1, at - 1) .. pick(PIECES) .. source:sub(at + math.random(0, 6))
    if source == "" then return "{" end
  end
  return source
end

describe("rows with random changes", function()
  local folder
  setup(function() folder = tokens.folder {} end)
  teardown(function() tokens.remove(folder) end)

  -- Reads the whole content of a file. Returns the number of conversations.
  local function read_all(path, text)
    check.write(path, text)
    local good = 0
    local function try(fn)
      local ok, problem = pcall(fn)
      if ok then good = good + 1
      else
        problem = of_ours(problem, text)
        assert.truthy(problem:find(folder, 1, true), problem)
      end
    end
    local ok, rows = pcall(ps.data.table, path)
    if not ok then return 0, of_ours(rows, text) end
    for i = 1, #rows do
      try(function() ps.data.conversation(rows, i) end)
      try(function() ps.data.ids(rows, i, 100) end)
      try(function() return rows:map(function(row) return row end)[i] end)
    end
    if #rows > 0 then try(function() ps.data.format(rows) end) end
    return good
  end

  it("are conversations, or refused with the file's name", function()
    math.randomseed(SEED)
    local good = 0
    for i = 1, COUNT do
      local lines = {}
      for k = 1, math.random(3) do
        lines[k] = math.random(3) == 1 and pick(ROWS) or mutated(pick(ROWS))
      end
      if i % 3 == 0 then good = good + read_all(folder .. "/a.json", mutated("[" .. table.concat(lines, ", ") .. "]"))
      else good = good + read_all(folder .. "/a.jsonl", table.concat(lines, "\n")) end
    end
    assert.is_true(good > COUNT / 4, good)
  end)

  it("are CSV, TSV and SQuAD's JSON, too", function()
    math.randomseed(SEED)
    local csv = 'prompt,completion\n"a, ""b""\n",c\nd,"e"\n'
    local squad = '{"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": [{"id": "1", "question": "q", '
      .. '"answers": [{"text": "a", "answer_start": 0}]}]}]}]}'
    local good = 0
    for _ = 1, COUNT / 5 do
      good = good + read_all(folder .. "/a.csv", mutated(csv))
      good = good + read_all(folder .. "/a.tsv", mutated((csv:gsub(",", "\t"))))
      good = good + read_all(folder .. "/b.json", mutated(squad))
    end
    assert.is_true(good > COUNT / 20, good)
  end)

  it("are named if they are deep, long, or have a key twice", function()
    local function write(text)
      check.write(folder .. "/c.jsonl", text)
      return ps.data.table(folder .. "/c.jsonl")
    end
    local deep = write('{"messages": ' .. ("["):rep(100000) .. ("]"):rep(100000) .. "}")
    fails(function() return deep[1] end, "c.jsonl:1: not JSON")
    fails(function() ps.data.conversation(deep, 1) end, "c.jsonl:1: not JSON: byte 213: lists and objects are")
    local twice = write '\n{"prompt": "a", "prompt": "b", "completion": "c"}'
    fails(function() ps.data.conversation(twice, 1) end, "c.jsonl:2: not JSON", "the key 'prompt' occurs twice")
    local long = write('{"prompt": "a", "completion": "' .. ("x"):rep(1e8) .. '"}\n'
      .. '{"prompt": "a", "completion": "b"}\n')
    assert.equal(2, #long)
    assert.equal(1e8, #long[1].completion)
    local messages = ps.data.conversation(long, 1)
    fails(function() chat.template("{% for m in messages %}{{ m.content }}{% endfor %}"):render(messages) end,
      "bytes of a string: 100000001; the limit is 67108864")
    assert.equal("b", long[2].completion)
  end)
end)

describe("random expressions of a template", function()
  local function names(set)
    local list = {}
    for name in pairs(set) do list[#list + 1] = name end
    table.sort(list)
    return list
  end
  local FILTERS, TESTS = names(filters), names(tests)
  local METHODS = { names(methods.str), names(methods.list), names(methods.dict) }
  local VALUES = { "1", "-3", "0", "2.5", "true", "none", "'abc'", "''", "'a\195\169b'", "[]", "[1, 2]", "['b', 'a']",
    "{}", "{'a': 1}", "messages", "messages[0]", "messages[0].content", "x", "(1,)", "range(3)", "namespace(a=1)",
    "range", "9007199254740992", "[[1], none]", "{'a': {'b': [1.5]}}.items()", "['a']|map('upper')", "'a'|safe", "-0.0",
    "10000000000", "'%s'", "'{}'", "'{0.a}'", "'5'", "messages[0].items()", "strftime_now" }
  local NAMED = { "default=", "attribute=", "width=", "indent=", "reverse=", "start=", "count=", "sep=", "boolean=" }
  local OPERATORS = { "+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "not in", ">=" }
  local value

  local function arguments(most)
    local list = {}
    for i = 1, math.random(0, most) do list[i] = (math.random(6) == 1 and pick(NAMED) or "") .. value(true) end
    return "(" .. table.concat(list, ", ") .. ")"
  end

  function value(inner)
    local kind = math.random(inner and 8 or 12)
    if kind <= 6 then return pick(VALUES) end
    local v = "(" .. value(true) .. ")"
    if kind == 7 then return v .. "|" .. pick(FILTERS) .. arguments(3) end
    if kind == 8 then return v .. "." .. pick(pick(METHODS)) .. arguments(3) end
    if kind == 9 then return v .. " is " .. pick(TESTS) .. arguments(1) end
    if kind == 10 then return v .. " " .. pick(OPERATORS) .. " (" .. value(true) .. ")" end
    if kind == 11 then return v .. "[" .. value(true) .. (math.random(2) == 1 and ":" .. value(true) or "") .. "]" end
    return "-" .. v
  end

  it("give a text, or an error of Python's or psluajit's", function()
    math.randomseed(SEED)
    local messages = { { role = "user", content = "h\195\169llo <b>" }, { role = "assistant", content = "ok" } }
    local rendered = 0
    for _ = 1, 2 * COUNT do
      local source = "{{ " .. value() .. " }}"
      local ok, problem = pcall(function() return chat.template(source):trained(messages) end)
      if ok then rendered = rendered + 1 else of_ours(problem, source) end
    end
    assert.is_true(rendered > COUNT / 2, rendered)
  end)
end)
