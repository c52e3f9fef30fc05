-- SPDX-License-Identifier: BSD-3-Clause
-- ps.data.loader of a table of examples: ids and labels of conversations, texts and ids, rows that are too long, wrong
-- masks, and a position that another table's loader refuses.
local lfs = require "lfs"
local ps = require "ps"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"
local tokens = require "spec.tokenizer_lib"
local fails = check.fails

local TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
  .. "{{ '[assistant]' if add_generation_prompt }}"
local folder, tok

setup(function()
  folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE } })
  tok = ps.tokenizer.from_pretrained(folder)
end)
teardown(function() tokens.remove(folder) end)

local function loader(rows, more)
  local options = { table = ps.data.table(rows), tokenizer = tok, batch = 2, seq = 64, shuffle = false }
  for key, value in pairs(more or {}) do options[key] = value end
  return ps.data.loader(options)
end

it("a loader of a table removes the parts of cache files whose processes have ended", function()
  local cache = os.tmpname()
  os.remove(cache)
  assert(lfs.mkdir(cache))
  local kept = {}
  for name, old in pairs { ["a.examples.tmp-4194305-0"] = true, ["b.examples.tmp-1-0"] = true,
    ["c.examples.tmp-4194305-1"] = false } do                -- no process has number 4194305, and 1 always runs
    check.write(cache .. "/" .. name, "part")
    if old then lfs.touch(cache .. "/" .. name, os.time() - 2 * 86400, os.time() - 2 * 86400) end
  end
  check.write(cache .. "/rows.jsonl", '{"text": "ab"}\n')                -- lists of rows have no cache
  ps.data.loader { table = ps.data.table(cache .. "/rows.jsonl"), tokenizer = tok, batch = 1, seq = 8, cache = cache }
  for name in lfs.dir(cache) do
    if name:find(".tmp-", 1, true) then kept[#kept + 1] = name end
    os.remove(cache .. "/" .. name)
  end
  lfs.rmdir(cache)
  table.sort(kept)
  assert.same({ "b.examples.tmp-1-0", "c.examples.tmp-4194305-1" }, kept)
end)

it("a loader of a table names what a table or a weight must be", function()
  fails(function() ps.data.loader { table = "a.jsonl", tokenizer = tok, batch = 1, seq = 8 } end,
    'write table = ps.data.table "a.jsonl"')
  fails(function() loader({ { text = "ab", w = "0.5" } }, { batch = 1, loss_weights = "w" }) end,
    "the field 'w' is the text '0.5', as all values of CSV and TSV are")
  fails(function() loader({ { messages = { { role = "user", content = "a" } } } },
    { batch = 1, tokenizer = ps.tokenizer.bytes() }) end, "the tokenizer has no chat template")
  fails(function() loader({ { messages = { { role = "user", content = "a" } }, chat_template_kwargs = { x = 1 } } },
    { batch = 1 }) end, "the field 'chat_template_kwargs' is not applied")
  fails(function() ps.data.table { text = "a" } end, "a table of one row is { row }")
  local path = os.tmpname()
  check.write(path, "\31\139\8text")
  fails(function() ps.data.encode_file(path, path .. ".bin", ps.tokenizer.bytes()) end, "is compressed by gzip")
  os.remove(path)
end)

local function talk(question, answer)
  return { messages = { { role = "user", content = question }, { role = "assistant", content = answer } } }
end

-- Returns the texts of a row's ids and of its labels.
local function texts_of(batch, row)
  local function list(name) return batch[name]:tolist()[row] end
  local ids, labels, mask = list "input_ids", list "labels", list "attention_mask"
  local seen, trained = {}, {}
  for k, id in ipairs(ids) do
    if mask[k] == 1 then seen[#seen + 1] = id end
    if labels[k] ~= -100 then
      assert.equal(id, labels[k])
      trained[#trained + 1] = id
    end
  end
  return tok:decode(seen), tok:decode(trained)
end

describe("a loader of a table", function()
  it("has labels for the tokens that the model has to produce", function()
    local batch = loader({ talk("Q", "ab"), talk("QQQ", "abab") }):next()
    assert.same({ "[user]Q;[assistant]ab;", "ab;" }, { texts_of(batch, 1) })
    assert.same({ "[user]QQQ;[assistant]abab;", "abab;" }, { texts_of(batch, 2) })
    local function asked(_, role) return role == "user" end
    batch = loader({ talk("Q", "ab"), talk("R", "b") }, { train_on = asked }):next()
    assert.same({ "[user]Q;[assistant]ab;", "Q;" }, { texts_of(batch, 1) })
    batch = loader({ talk("Q", "ab"), talk("R", "b") }, { train_on = "all" }):next()
    assert.same({ "[user]Q;[assistant]ab;", "[user]Q;[assistant]ab;" }, { texts_of(batch, 1) })
  end)

  it("refuses a row whose labels are all -100, as it refuses a conversation without a trained token", function()
    local rows = { { input_ids = { 5, 6 }, labels = { -100, 6 } }, { input_ids = { 5, 6, 7 },
      labels = { -100, -100, -100 } } }
    fails(function() loader(rows) end, "rows[2]: none of its 3 tokens are trained: every label is -100; remove the row")
  end)

  it("counts the characters that the vocabulary cannot spell, and names the first row that has one", function()
    local vocab = tokens.vocab {}
    vocab[tokens.letters()[4]], vocab[tokens.letters()[0xc3]] = nil, nil
    local place = tokens.folder { ["vocab.json"] = vocab, ["merges.txt"] = tokens.merges_text {} }
    local poor
    local function said(text)
      return check.printed(function()
        loader({ { text = "whole" }, { text = text }, { text = "a\5b" .. text } }, { tokenizer = poor, cache = false })
      end)
    end
    assert.equal("", check.printed(function() poor = ps.tokenizer.from_pretrained(place) end))
    assert.equal("", said "a\5b\226\130\172\n")
    for _ = 1, 2 do
      assert.equal(("%s/vocab.json: 8 characters at 8 places cannot be spelled by this vocabulary and were left out "
        .. "(first: U+0004 in rows[2])\n"):format(place), said "a\4b\4\195\169\4")
    end
    tokens.remove(place)
  end)

  it("prints notes about all rows once, on rank 0", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local vocab = tokens.vocab {}
    vocab[tokens.letters()[4]] = nil
    local place = tokens.folder { ["vocab.json"] = vocab, ["merges.txt"] = tokens.merges_text {} }
    local base = ranks_lib.folder()
    check.write(base .. "/rows.jsonl", '{"text": "a\\u0004b"}\n{"text"}\n{"text": "abc"}\n{"text": "\\u0004c"}\n')
    local out = ranks_lib.run(base, 2, ranks_lib.begin(base) .. ([[
      local tok = ps.tokenizer.from_pretrained(%q)
      local rows = ps.data.table(folder .. "/rows.jsonl", { on_error = "skip" })
      for _, stream in ipairs { false, true } do
        local loader = ps.data.loader { table = rows, tokenizer = tok, batch = 1, seq = 8, cache = false,
          stream = stream, drop_last = false, shuffle = false }
        for _ in loader do end
      end
      print "done"
    ]]):format(place))
    local name = base .. "/rows.jsonl"
    local note = ("%s/vocab.json: 2 characters at 2 places cannot be spelled by this vocabulary and were left out "
      .. "(first: U+0004 in %s:1)\n"):format(place, name)
    assert.equal("done\n", out[1].text)
    local skipped = out[0].text:match "^[^\n]*\n"
    assert.matches("skipped 1 of 4 rows", skipped, 1, true)
    assert.equal(skipped .. note .. note .. "done\n", out[0].text)
    tokens.remove(place)
    ranks_lib.remove(base)
  end)

  it("accepts texts, and ids with labels", function()
    local batch = loader { { text = "ab" }, { text = "b" } }:next()
    assert.same({ "ab", "ab" }, { texts_of(batch, 1) })
    batch = loader { { input_ids = { 5, 6, 7 }, labels = { -100, 6, 7 } }, { input_ids = { 8 } } }:next()
    local pad = tok.pad_token_id or tok.eos_token_id or 0
    assert.same({ { 5, 6, 7 }, { 8, pad, pad } }, batch.input_ids:tolist())
    assert.same({ { -100, 6, 7 }, { 8, -100, -100 } }, batch.labels:tolist())
  end)

  it("cuts, drops or refuses rows that are too long", function()
    local long, short = talk("Q", ("b"):rep(100)), talk("Q", "b")
    local cut = loader { long, short }
    assert.truthy(tostring(cut):find("2 texts, 1 of them cut to 64 tokens", 1, true), tostring(cut))
    assert.equal(64, cut:next().input_ids:size(1))
    local none = loader { talk(("b"):rep(100), "x"), short, short }
    assert.truthy(tostring(none):find("2 texts, 0 of them cut to 64 tokens, 1 left out", 1, true), tostring(none))
    assert.truthy(tostring(loader({ long, short, short }, { too_long = "drop" })):find("1 left out", 1, true))
    fails(function() loader({ short, long }, { too_long = "error" }) end, "rows[2] has 120 tokens, more than seq = 64")
  end)

  it("refuses masks of none or all, and rows of other forms", function()
    fails(function() loader { { messages = { { role = "user", content = "x" } } } } end,
      "rows[1]: none of its 8 tokens are trained")
    fails(function() loader({ talk("Q", "b") }, { tokenizer = setmetatable({ apply_chat_template = function()
      return { 1, 2 }, { 1, 1 } end }, { __index = tok }) }) end, "all of its 2 tokens are trained")
    fails(function() loader { { chosen = "a", rejected = "b" } } end, "preference training")
    fails(function() loader { { messages = require("cjson").null } } end, "rows[1]: the fields messages (null) match")
    local refused = talk("Q", "b")
    refused.messages[1].role = "critic"
    local strict = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template =
      "{% for m in messages if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endfor %}" .. TEMPLATE } })
    fails(function() loader({ talk("Q", "b"), refused }, { tokenizer = ps.tokenizer.from_pretrained(strict) }) end,
      "rows[2]: ", "no critics")
    local _, why = pcall(function()
      loader({ talk("Q", "b"), refused }, { tokenizer = ps.tokenizer.from_pretrained(strict) })
    end)
    assert(tostring(why):find "^[^:]*table_loader_spec.lua:%d+: rows%[2%]: ", why)    -- the script's line, then the row
    tokens.remove(strict)
    local misspelt = talk("Q", "b")
    misspelt.messages[2].role = "Asistant"
    fails(function() loader { talk("Q", "b"), misspelt } end, "rows[2]: ", "messages[2]", "no role 'Asistant'",
      "did you mean 'assistant'?")
    fails(function() loader({ talk("Q", "b") }, { tokenizer = setmetatable({ apply_chat_template =
      function() error "of the script" end }, { __index = tok }) }) end, "rows[1]: ", "of the script")
    for want, row in pairs {
      ["rows[1]: there are 1 labels for 2 input_ids"] = { input_ids = { 1, 2 }, labels = { 1 } },
      ["input_ids[2] is 258; the vocabulary has the ids 0 to 257"] = { input_ids = { 1, 258 } },
      ["input_ids[1] is -1"] = { input_ids = { -1 } },
      ["labels[1] is -5; it must be -100 or an id of 0 to 257"] = { input_ids = { 1 }, labels = { -5 } },
      ["input_ids[1] is x, not a token id"] = { input_ids = { "x" } },
      ["input_ids[1] is 1.5, not a token id"] = { input_ids = { 1.5 } },
      ["the field 'input_ids' is not a list of token ids"] = { input_ids = "abc" },
      ["the field 'input_ids' has no token id"] = { input_ids = {} },
      ["the field 'labels' is not a list"] = { input_ids = { 1 }, labels = { a = 1 } },
    } do fails(function() loader { row } end, want) end
    fails(function() ps.data.loader { texts = { "a" }, tokenizer = tok, batch = 1, seq = 4, train_on = "all" } end,
      "train_on applies only to conversations")
    fails(function() loader({ talk("Q", "b") }, { texts = { "a" } }) end, "texts and table were both given")
  end)

  it("names the first of two bad rows, whichever thread finds it", function()
    local rows = {}
    for i = 1, 12 do rows[i] = talk("Q", "ab") end
    rows[3], rows[9] = { messages = { rows[1].messages[1] } }, { messages = {} }
    for _, stream in ipairs { false, true } do
      fails(function() for _ in loader(rows, { stream = stream }) do end end, "rows[3]: none of its ")
    end
  end)

  it("refuses options and keys that would be ignored", function()
    fails(function() loader({ { text = "ab" }, { text = "b" } }, { train_on = "asistant" }) end,
      "train_on is 'asistant'; did you mean 'assistant'?")
    local path = folder .. "/twice.jsonl"
    for _, row in ipairs { '{"text": "a", "text": "b"}', '{"input_ids": [1], "input_ids": [2]}' } do
      check.write(path, row:gsub(", .*", "}") .. "\n" .. row .. "\n")
      fails(function() loader(path, { cache = false }) end, "twice.jsonl:2: not JSON: byte ", "occurs twice")
    end
    check.write(path, '{"text": "\\"text\\": \\"text\\""}\n')
    assert.equal(1, loader(path, { cache = false }).batches)
  end)

  it("trains a model, and continues where it was saved", function()
    local model = require("models.gpt2").new("tiny", { vocab_size = 300, n_positions = 64 })
    local rows = {}
    for i = 1, 6 do rows[i] = talk(("a"):rep(i), ("b"):rep(i)) end
    local at = loader(rows, { shuffle = true, seed = 3 })
    local first = model(at:next()).loss:item()
    assert.is_true(first > 0 and first < 10)
    local saved = at:state_dict()
    local want = at:next().input_ids:tolist()
    local other = loader(rows, { shuffle = true, seed = 3 })
    other:load_state_dict(saved)
    assert.same(want, other:next().input_ids:tolist())
    rows[1].messages[2].content = "other"
    fails(function() loader(rows, { shuffle = true, seed = 3 }):load_state_dict(saved) end, "texts")
  end)
end)
