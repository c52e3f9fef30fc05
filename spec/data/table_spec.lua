-- SPDX-License-Identifier: BSD-3-Clause
-- ps.data.table: files of JSON lines, JSON lists and text, rows of a script, views, shuffles, forms and conversations,
-- faults of files, and tools/data.lua.
local ps = require "ps"
local json = require "ps.chat.json"
local check = require "spec.check_lib"
local tokens = require "spec.tokenizer_lib"
local paths = require "ps.paths"
local permutation = require "ps.data.permutation"
local lfs = require "lfs"
local fails = check.fails

local folder
before_each(function() folder = tokens.folder {} end)
after_each(function()
  collectgarbage()
  tokens.remove(folder)
end)

local function file(name, text)
  check.write(folder .. "/" .. name, text)
  return folder .. "/" .. name
end

local function numbers(rows)
  local list = {}
  for i, row in ipairs(rows) do list[i] = row.n end
  return list
end

local function counting(n)
  local list = {}
  for i = 1, n do list[i] = { n = i } end
  return ps.data.table(list)
end

describe("a table of examples", function()
  it("has the rows of JSON lines, with #, an index and ipairs", function()
    local rows = ps.data.table(file("a.jsonl", '\239\187\191{"n": 1}\r\n\n{"n": 2}\n{"n": 3}'))
    assert.equal(3, #rows)
    assert.equal(2, rows[2].n)
    assert.same({ 1, 2, 3 }, numbers(rows))
    assert.equal('{"n": 3}', rows:json(3))
    assert.equal(folder .. "/a.jsonl:4", rows:place(3))
    fails(function() return rows[4] end, "there is no row 4; the table has rows 1 to 3")
    fails(function() return rows[0] end, "there is no row 0")
    fails(function() rows[1] = {} end, "cannot be changed")
    fails(function() return rows:nosuch() end, "no method 'nosuch'")
  end)

  it("has the rows of lists, text, folders, patterns, Lua lists and functions", function()
    local a, b = file("a.jsonl", '{"n": 1}\n'), file("b.json", '[{"n": 2}, {"n": 3}]')
    assert.same({ 1, 2, 3 }, numbers(ps.data.table(folder)))
    assert.same({ 2, 3, 1 }, numbers(ps.data.table { b, a }))
    assert.same({ 1 }, numbers(ps.data.table(folder .. "/*.jsonl")))
    assert.same({ 1, 2 }, numbers(ps.data.table { { n = 1 }, { n = 2 } }))
    assert.same({ 1, 2 }, numbers(ps.data.table(function(i) return i < 3 and { n = i } or nil end)))
    local text = file("c.txt", "one\n\ntwo\n")
    assert.equal("two", ps.data.table(text)[2].text)
    assert.equal("one\n\ntwo\n", ps.data.table(text, { text = "file" })[1].text)
  end)

  it("has views: map, filter, take, skip, split, concat, select", function()
    local rows = counting(10)
    local even = rows:filter(function(row) return row.n % 2 == 0 end)
    assert.same({ 2, 4, 6, 8, 10 }, numbers(even))
    assert.same({ 4, 8 }, numbers(even:map(function(row) return { n = 2 * row.n } end):take(2)))
    assert.same({ 8, 10 }, numbers(even:skip(3)))
    local first, rest = rows:split(0.7)
    assert.same({ 7, 3 }, { #first, #rest })
    assert.same({ 8, 9, 10, 2 }, numbers(rest:concat(even:take(1))))
    assert.same({ 5, 5, 1 }, numbers(rows:select { 5, 5, 1 }))
    assert.same({}, numbers(rows:skip(20)))
    fails(function() return rows:select { 11 } end, "row 11; the table has 10")
    fails(function() return rows:map(function() end)[1] end, "returned a nil for row 1")
  end)

  it("shuffles: every row once, by the seed alone", function()
    for _, n in ipairs { 1, 2, 3, 4, 5, 16, 17, 1000 } do
      local seen, place = {}, permutation.new(n, 7)
      for i = 1, n do
        local at = place(i)
        assert.is_nil(seen[at])
        assert.is_true(at >= 1 and at <= n)
        seen[at] = true
      end
    end
    local rows = counting(100)
    assert.same(numbers(rows:shuffle(3)), numbers(rows:shuffle(3)))
    assert.are_not.same(numbers(rows:shuffle(3)), numbers(rows:shuffle(4)))
    -- In a random permutation, the mean of |place - i| is (n^2 - 1) / (3 n), which is 333 here, with a standard
    -- deviation of about 7.
    local moved, place = 0, permutation.new(1000, 1)
    for i = 1, 1000 do moved = moved + math.abs(place(i) - i) end
    assert.is_true(math.abs(moved / 1000 - 333) < 35, tostring(moved / 1000))
  end)

  it("keeps an index of a large file, and does not use the index of another file", function()
    local line = '{"n": 1, "text": "' .. ("x"):rep(1000) .. '"}\n'
    local path = file("big.jsonl", line:rep(17000))
    assert.equal(17000, #ps.data.table(path))
    assert.equal("file", lfs.attributes(path .. ".rows", "mode"))
    assert.equal(17000, #ps.data.table(path))
    check.write(path, line:rep(16999) .. '{"n": 2}\n')
    local rows = ps.data.table(path)
    assert.equal(2, rows[17000].n)
    check.write(path, line:rep(17000))
    fails(function() return rows[1] end, "big.jsonl")
    local times = lfs.attributes(path, "modification")      -- a copy that keeps size and time has another content
    check.write(path, line:rep(17000))
    lfs.touch(path, times, times)
    assert.equal(17000, #ps.data.table(path))
    check.write(path, ("\n"):rep(#line) .. line:rep(16999))
    lfs.touch(path, times, times)
    assert.equal(16999, #ps.data.table(path))
    check.write(path, line:rep(17000))
    check.write(path .. ".rows", "notes of the user")
    assert.equal(17000, #ps.data.table(path))
    assert.equal("notes of the user", check.read(path .. ".rows"))
  end)

  it("names the line of a bad row, or skips it and prints how many", function()
    local path = file("a.jsonl", '{"n": 1}\n{"n": \n{"n": 3}\n[]\n5\n')
    local rows = ps.data.table(path)
    fails(function() return rows[2] end, "a.jsonl:2: not JSON")
    fails(function() return rows[5] end, "a.jsonl:5: each row must be a JSON object; this one is 5")
    local script = "local t = require('ps').data.table('%s', { on_error = 'skip' }) print(#t)"
    local out = check.run("", script:format(path))
    assert.truthy(out:find("skipped 3 of 5 rows; the first:", 1, true), out)
    assert.truthy(out:find("\n2\n", 1, true), out)
    fails(function() return rows[4] end, "a.jsonl:4: each row must be a JSON object; this one is []")
    check.write(path, '{"n": 1}\n{"n": 1, "n": 2}\n{"n": "\255"}\n')
    fails(function() return ps.data.table(path)[3] end, "a.jsonl:3: not valid UTF-8")
    assert.truthy(check.run("", script:format(path)):find("skipped 2 of 3 rows", 1, true))
  end)

  it("names the line of a text that is not UTF-8", function()
    local path = file("a.txt", "a\n\nb\255\n")
    local rows = ps.data.table(path)
    assert.equal("a", rows[1].text)
    fails(function() return rows[2] end, "a.txt:3: not valid UTF-8")
    fails(function() ps.data.table(path, { text = "file" }) end, "a.txt:3: not valid UTF-8")
    assert.equal(1, #ps.data.table(path, { on_error = "skip" }))
  end)

  it("names the row for which a function of map or filter fails", function()
    local rows = ps.data.table(file("a.jsonl", '{"n": 1}\n\n{"n": 2}\n'))
    local function wrong(row) return row.n == 1 and row or row.missing.field end
    fails(function() return rows:map(wrong)[2] end, "table:map: ", "a.jsonl:3: ", "attempt to index field 'missing'")
    fails(function() rows:filter(wrong) end, "table:filter: ", "a.jsonl:3: ", "attempt to index field 'missing'")
    fails(function() return rows:map(function() end)[2] end, "table:map: ", "a.jsonl:3: the function returned a nil")
    local own = setmetatable({}, { __tostring = function() return "own" end })
    local ok, problem = pcall(function() return rows:map(function() error(own) end)[1] end)
    assert.is_true(not ok and rawequal(problem, own))
    rows = ps.data.table(file("a.jsonl", '{"n": 1}\n{"n": 2, "n": 3}\n'))
    fails(function() return rows:map(function(row) return row end)[2] end,
      "a.jsonl:2: not JSON: byte 10: the key 'n' occurs twice in one object")
    fails(function() ps.data.table(nil) end, "ps.data.table: the source is nil")
    rows = ps.data.table(file("a.jsonl", '{"text": "a"}\n{}\n'))
    fails(function() ps.data.format(rows) end, "a.jsonl:2: the row has no fields")
  end)

  it("refuses rows of a file that was written to", function()
    local path = folder .. "/written.jsonl"
    check.write(path, '{"text": "a"}\n')
    local rows = ps.data.table(path)
    assert.equal("a", rows[1].text)
    check.write(path, '{"text": "b"}\n{"text": "c"}\n')
    fails(function() return rows[1] end, path, "was written to while it is open as a table")
    check.write(path, "")
    fails(function() return rows[1] end, path, "truncated")
    os.remove(path)
  end)

  it("leaves out lines of spaces", function()
    local rows = ps.data.table(file("a.jsonl", '  \n{"n": 1}\n \t\r\n{"n": 2}\n  '))
    assert.same({ 1, 2 }, numbers(rows))
    assert.equal(folder .. "/a.jsonl:4", rows:place(2))
    local long = (" "):rep(3000000)                        -- longer than several blocks of the reader
    assert.same({ 1, 2 }, numbers(ps.data.table(file("b.jsonl", long .. "\n" .. long .. '{"n": 1}\n' .. long
      .. '\n{"n": 2}' .. long .. "\n" .. long))))
  end)

  it("refuses invalid counts", function()
    local rows = counting(3)
    fails(function() rows:take(-1) end, "table:take: the count")
    fails(function() rows:skip(-1) end, "table:skip: the count")
    fails(function() rows:take(1.5) end, "table:take: the count")
    fails(function() ps.data.format(rows, { check = 0 }) end, "ps.data.format: check")
    fails(function() ps.data.format(nil) end, "ps.data.format: the first argument is a nil")
    local none = rows:take(0)
    fails(function() ps.data.format(none) end, "ps.data.format: the table has no rows: ", tostring(none))
    fails(function() ps.data.conversation({}, 1) end, "ps.data.conversation: the first argument is a table")
    fails(function() ps.data.table(function(i) return i end) end, "row 1 of the function")
  end)

  it("reads a list of JSON item by item, and names the line where it is wrong", function()
    local rows = ps.data.table(file("a.json", '\239\187\191[\n{"a": "]}\\"{", "b": [1, {}]} ,\n {"a": "x"}\n]\n'))
    assert.equal(2, #rows)
    assert.equal(']}"{', rows[1].a)
    assert.equal('{"a": "x"}', rows:json(2))
    assert.equal(0, #ps.data.table(file("a.json", " [ ] ")))
    for source, want in pairs { ['[{"a": 1}'] = "a.json:1: not a JSON list of objects: expected ',' or ']'",
      ['[{"a": 1},\n\n{"a": "x]'] = "a.json:3: not a JSON list of objects: a value is missing or not closed",
      ['[{"a": 1},]'] = "a value is missing or not closed", ['[{"a": 1}] x'] = "more text follows the list",
      ["[] x"] = "more text follows the list" } do
      fails(function() ps.data.table(file("a.json", source)) end, want)
    end
    fails(function() return ps.data.table(file("a.json", '[{"a": 1}, 5]'))[2] end, "a.json[2]: each row must be a JSON")
  end)

  it("passes copies of rows to functions, and keeps JSON's order of keys, 1.0 and {}", function()
    local said = '{"role": "assistant", "z": 1, "a": 2.0, "e": {}, "l": [], "big": 12345678901234567890}'
    local line = ('{"messages": [%s]}'):format(said)
    local mine = { { n = 1, list = { 1 } } }
    local function spoil(row)
      row.n, row.list[1] = 5, 7
      return row
    end
    assert.equal(5, ps.data.table(mine):map(spoil)[1].n)
    assert.equal(1, #ps.data.table(mine):filter(spoil))
    assert.same({ { n = 1, list = { 1 } } }, mine)
    for name, source in pairs { ["a.jsonl"] = line, ["a.json"] = "[" .. line .. "]" } do
      local rows = ps.data.table(file(name, source))
      local mapped = rows:map(function(row) return { messages = row.messages, extra = 1 } end)
      for _, one in ipairs { rows, mapped, mapped:map(function(row) return row end), mapped:take(1):concat(rows) } do
        local message = ps.data.conversation(one, 1)[1]
        assert.equal(said, json.encode(message))
      end
      local changed = rows:map(function(row)
        local message = row.messages[1]
        message.a, message.z, message.l, message.new, message.m = 3, nil, { 1 }, "x", "y"
        return row
      end)
      assert.equal('{"role": "assistant", "a": 3.0, "e": {}, "l": [1], "big": 12345678901234567890, "m": "y", '
        .. '"new": "x"}', json.encode(ps.data.conversation(changed, 1)[1]))
    end
  end)

  it("refuses formats that it does not read", function()
    fails(function() ps.data.table(file("a.parquet", "x")) end, "write it as JSON lines")
    fails(function() ps.data.table(file("a.jsonl.zst", "x")) end, "unpack it with zstd -d")
    fails(function() ps.data.table(folder .. "/none.jsonl") end, "there is no such file or folder")
    fails(function() ps.data.table(folder .. "/*.json") end, "no file matches this pattern")
    fails(function() ps.data.table(tokens.folder {}) end, "the folder has no file of a kind that is read (.jsonl")
    fails(function() ps.data.table(file("b.json", '{"a": 1}')) end, "a list of objects, or SQuAD's object")
    fails(function() ps.data.table(folder, { txt = 1 }) end, "txt")
  end)
end)

describe("files of other kinds", function()
  local function packed(name, text)
    local path = file(name, text)
    assert(os.execute(("gzip -f '%s'"):format(path)) == 0)
    return path .. ".gz"
  end

  -- Runs a script with a separate cache folder.
  local function cached(script)
    check.write(folder .. "/script.lua", script)
    local p = io.popen(("XDG_CACHE_HOME='%s/cache' '%s' '%s/script.lua' 2>&1"):format(folder, paths.exe, folder))
    local out = p:read "*a"
    p:close()
    return out
  end

  it("are unpacked once into the cache", function()
    local path = packed("a.jsonl", '{"n": 1}\n{"n": 2}\n')
    local script = ("local rows = require('ps').data.table('%s') print(#rows, rows[2].n, rows:place(2))"):format(path)
    assert.equal(("2\t2\t%s:2\n"):format(path), cached(script))
    local function names()
      local list = {}
      for name in lfs.dir(folder .. "/cache/psluajit/unpacked") do
        if name:sub(1, 1) ~= "." then list[#list + 1] = name end
      end
      return list
    end
    local first = names()
    assert.equal(1, #first)
    local copy = folder .. "/cache/psluajit/unpacked/" .. first[1]
    check.write(copy, '{"n": 3}\n{"n": 4}\n')              -- the copy is read, and not unpacked again
    assert.equal(("2\t4\t%s:2\n"):format(path), cached(script))
    packed("a.jsonl", '{"n": 5}\n{"n": 6}\n{"n": 7}\n')
    assert.equal(("3\t6\t%s:2\n"):format(path), cached(script))
    assert.equal(1, #names())
    assert.are_not.same(first, names())
    local before = names()
    os.execute(("touch -r '%s' '%s/time'"):format(path, folder))
    packed("a.jsonl", '{"n": 5}\n{"n": 8}\n{"n": 7}\n')   -- as long, and written at the same time
    os.execute(("touch -r '%s/time' '%s'"):format(folder, path))
    assert.equal(("3\t8\t%s:2\n"):format(path), cached(script))
    assert.are_not.same(before, names())
    local whole = check.read(path)
    check.write(path, whole:sub(1, #whole - 6))
    local out = cached(script)
    assert.truthy(out:find("a.jsonl.gz: cannot be unpacked to ", 1, true), out)
    assert.truthy(out:find("unexpected end of file", 1, true), out)
    assert.equal(1, #names())
    assert.truthy(cached(("local rows = require('ps').data.table('%s') print(#rows, rows[1].a)"):format(
      packed("b.csv", "a\nx\n"))):find("1\tx\n", 1, true))
  end)

  it("leave no part in the cache after a kill, except parts that another process writes or has just created", function()
    local place = folder .. "/cache/psluajit/unpacked"
    local stale, used, new = place .. "/a-1.csv.11.part", place .. "/a-2.csv.12.part", place .. "/a-3.csv.13.part"
    assert(os.execute(("mkdir -p '%s'"):format(place)) == 0)
    for _, path in ipairs { stale, used, new } do check.write(path, "x") end
    for _, path in ipairs { stale, used } do assert(lfs.touch(path, os.time() - 3600)) end
    local held = assert(io.open(used, "r+b"))
    assert(lfs.lock(held, "w"))
    local script = ("print(#require('ps').data.table('%s'))"):format(packed("a.csv", "a\nx\n"))
    assert.equal("1\n", cached(script))
    assert.same({ [used] = "file", [new] = "file" }, { [stale] = lfs.attributes(stale, "mode"),
      [used] = lfs.attributes(used, "mode"), [new] = lfs.attributes(new, "mode") })
    held:close()
  end)

  it("are unpacked to the home folder's cache if XDG_CACHE_HOME is not absolute, and name a folder that is closed",
    function()
      local path = packed("a.jsonl", '{"n": 1}\n')
      check.write(folder .. "/script.lua", ("print(pcall(require('ps').data.table, '%s'))"):format(path))
      local function run(variables)
        return (check.shell(("cd '%s' && %s '%s' script.lua 2>&1"):format(folder, variables, paths.exe)))
      end
      assert.truthy(run(("HOME='%s' XDG_CACHE_HOME=nearby"):format(folder)):find "^true")
      assert.is_nil(lfs.attributes(folder .. "/nearby") or lfs.attributes "/nearby")
      assert.equal("directory", lfs.attributes(folder .. "/.cache/psluajit/unpacked", "mode"))
      local out = run("XDG_CACHE_HOME=/proc")
      assert.truthy(out:find "^false", out)                -- no line of the shell's own
      assert.truthy(out:find("a.jsonl.gz: cannot be unpacked to /proc/psluajit/unpacked: cannot create ", 1, true), out)
    end)

  it("are named in the error if the disk of the cache is full", function()
    local path = packed("a.jsonl", ('{"n": 1}\n'):rep(100000))
    check.write(folder .. "/script.lua", ("print(pcall(require('ps').data.table, '%s'))"):format(path))
    local p = io.popen(("XDG_CACHE_HOME='%s/cache' sh -c \"ulimit -f 8; exec '%s' '%s/script.lua'\" 2>&1"):format(
      folder, paths.exe, folder))
    local out = p:read "*a"
    p:close()
    assert.truthy(out:find("false", 1, true) and out:find("a.jsonl.gz: cannot be unpacked to ", 1, true), out)
  end)

  it("are CSV and TSV, with quotes, ends of lines in values, and their lines for errors", function()
    local rows = ps.data.table(file("a.csv",
      '\239\187\191prompt,completion\r\n"a, ""b""\nc",d\r\n\r\ne"f,\n"",""\n'))
    assert.same({ { prompt = 'a, "b"\nc', completion = "d" }, { prompt = 'e"f', completion = "" },
      { prompt = "", completion = "" } }, { rows[1], rows[2], rows[3] })
    assert.equal(folder .. "/a.csv:5", rows:place(2))
    assert.equal("prompt and completion", ps.data.format(rows))
    rows = ps.data.table(file("a.tsv", "text\tn\na,b\t1\nc\t"))
    assert.same({ { text = "a,b", n = "1" }, { text = "c", n = "" } }, { rows[1], rows[2] })
    local list, want = {}, {}
    for i = 1, 3000 do
      list[i] = ('%d,"x""%d\n"'):format(i, i)
      want[i] = ('x"%d\n'):format(i)
    end
    rows = ps.data.table(file("long.csv", "n,t\n" .. table.concat(list, "\n")))
    assert.equal(3000, #rows)
    for i = 1, 3000 do assert.equal(want[i], rows[i].t) end
    fails(function() return ps.data.table(file("b.csv", "a,b\n1,2\n3\n"))[2] end, "b.csv:3: the row has 1 values, but "
      .. "the first row names 2 fields")
    fails(function() ps.data.table(file("b.csv", 'a,b\n1,2\n"3,4\n')) end,
      "b.csv:3: the closing quote of a value is missing")
    fails(function() ps.data.table(file("b.csv", "a,a\n")) end,
      "b.csv:1: field 2 has the same name as another field, a")
    fails(function() ps.data.table(file("b.csv", "a,\n")) end, "b.csv:1: field 2 has no name")
    fails(function() ps.data.table(file("b.csv", "\n")) end, "its first row must have the names of its fields")
    fails(function() ps.data.table(file("b.csv", "a\n\255\n")) end, "b.csv:2: not valid UTF-8")
  end)

  it("are SQuAD's, whose rows are questions", function()
    local path = file("squad.json", '{"version": "1.1", "data": [{"title": "T", "paragraphs": [{'
      .. '"context": "Ann has a cat.", "qas": [{"id": "1", "question": "Who?", "answers": [{"text": "Ann", '
      .. '"answer_start": 0}]}, '
      .. '{"id": "2", "question": "Why?", "answers": [], "is_impossible": true}]}]}]}')
    local rows = ps.data.table(path)
    assert.equal(2, #rows)
    assert.equal("squad", ps.data.format(rows))
    local messages = ps.data.conversation(rows, 1)
    assert.equal('[{"role": "user", "content": "Ann has a cat.\\n\\nWho?"}, {"role": "assistant", "content": "Ann"}]',
      json.encode(messages))
    fails(function() ps.data.conversation(rows, 2) end, "squad.json[2]: the question has no answer")
    path = file("squad.json", '{"data": [{"paragraphs": [{"context": "x", "qas": [{}]}]}]}')
    fails(function() ps.data.table(path) end,
      "squad.json: data[1].paragraphs[1].qas[1]: the row must have a question and its paragraph's context")
    for text, want in pairs {
      ['{"data": [5]}'] = "SQuAD's object", ['{"data": [null]}'] = "SQuAD's object",
      ['{"data": {}}'] = "SQuAD's object",
      ['{"data": [{"paragraphs": 5}]}'] = "data[1].paragraphs must be a list of objects",
      ['{"data": [{"paragraphs": []}, {"title": "T"}]}'] = "data[2].paragraphs must be a list of objects",
      ['{"data": [{"paragraphs": [null]}]}'] = "data[1].paragraphs[1] must be an object",
      ['{"data": [{"paragraphs": [{"qas": null}]}]}'] = "data[1].paragraphs[1].qas must be a list of objects",
      ['{"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q", "answers": {"text": "a"}}]}]}]}'] =
        "data[1].paragraphs[1].qas[1].answers must be a list of objects",
      ['{"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q", "answers": ["a"]}]}]}]}'] =
        "data[1].paragraphs[1].qas[1].answers[1] must be an object",
      ['{"data": [\n{"paragraphs": [{"context": "\255", "qas": []}]}]}'] = "squad.json:2: not valid UTF-8",
    } do
      path = file("squad.json", text)
      fails(function() ps.data.table(path) end, want)
    end
  end)
end)

local USER, REPLY = { role = "user", content = "Q" }, { role = "assistant", content = "A" }

describe("the form of rows", function()
  local function conversation(row)
    local rows = ps.data.table { row }
    local list = {}
    for i, message in ipairs(ps.data.conversation(rows, 1)) do
      list[i] = message.map.srole .. ": " .. message.map.scontent
    end
    return ps.data.format(rows), list
  end

  it("is recognised, and is a conversation", function()
    for form, row in pairs {
      messages = { messages = { USER, REPLY } },
      sharegpt = { conversations = { { from = "human", value = "Q" }, { from = "gpt", value = "A" } } },
      ["prompt and completion"] = { prompt = "Q", completion = "A" },
      alpaca = { instruction = "Q", input = "", output = "A" },
    } do
      local found, list = conversation(row)
      assert.equal(form, found)
      assert.same({ "user: Q", "assistant: A" }, list)
    end
    assert.same({ "user: Q\n\nI", "assistant: A" },
      select(2, conversation { instruction = "Q", input = "I", output = "A" }))
    assert.same({ "user: Q", "assistant: A" }, select(2, conversation { prompt = { USER }, completion = { REPLY } }))
    for form, row in pairs { text = { text = "x" }, preference = { prompt = "p", chosen = "c", rejected = "r" },
      ids = { input_ids = { 1 } }, ["unpaired preference"] = { prompt = "p", completion = "c", label = true } } do
      assert.equal(form, ps.data.format(ps.data.table { row }))
    end
  end)

  it("has the row's tools, and ShareGPT's system message", function()
    local rows = ps.data.table { { messages = { USER, REPLY }, tools = { { name = "f" } } } }
    local _, tools = ps.data.conversation(rows, 1)
    assert.equal("f", tools[1].map.sname)
    local row = { system = "S", conversations = { { from = "human", value = "Q" } } }
    assert.same({ "system: S", "user: Q" }, select(2, conversation(row)))
  end)

  it("keeps the order of keys of a file", function()
    local rows = ps.data.table(file("a.jsonl",
      '{"messages": [{"role": "assistant", "tool_calls": [{"z": 1, "a": 2.0}], "content": ""}]}\n'))
    local call = ps.data.conversation(rows, 1)[1].map.stool_calls[1]
    assert.same({ "z", "a" }, call.keys)
  end)

  it("is one for all rows, and known", function()
    local rows = ps.data.table { { text = "x" }, { messages = { USER } } }
    fails(function() ps.data.format(rows) end,
      "rows[2]: this row has the form 'messages', but the first row has the form 'text'")
    fails(function() ps.data.format(ps.data.table { { a = 1, b = 2 } }) end, "the fields a, b match no known form")
    fails(function() ps.data.conversation(rows, 1) end, "rows[1]: a row in the form 'text' is not a conversation")
    fails(function() conversation { conversations = { { from = "alien", value = "x" } } } end, "from is 'alien'")
    fails(function() conversation { messages = {} } end, "the conversation has no message")
  end)

  it("has fields of the types that it needs", function()
    for want, row in pairs {
      ["rows[1]: the field 'conversations' has type int; it must have type list"] = { conversations = 5 },
      ["the field 'conversations' has type str; it must have type list"] = { conversations = "abc" },
      ["conversations[1]: from is '5'; it must be human, gpt"] = { conversations = { { from = 5, value = "x" } } },
      ["conversations[1]: from is 'nothing'"] = { conversations = { "x" } },
      ["conversations[1]: the field 'value' is missing"] = { conversations = { { from = "gpt" } } },
      ["the field 'prompt' has type int; it must have type str or list"] = { prompt = 5, completion = "x" },
      ["the field 'input' has type list; it must have type str"] = { instruction = "a", output = "b", input = { 1 } },
      ["the field 'output' has type int; it must have type str"] = { instruction = "a", output = 1 },
      ["the field 'messages' has type dict; it must have type list"] = { messages = { role = "user" } },
      ["message 1 has type int; it must be an object with role and content"] = { messages = { 5 } },
      ["message 1: its role is 5"] = { messages = { { role = 5, content = "x" } } },
      ["message 1: its role is missing"] = { prompt = { { content = "x" } }, completion = "x" },
      ["the field 'tools' has type int"] = { messages = { USER }, tools = 5 },
      ["a list with the key 'x'"] = { messages = { USER, x = 1 } },
    } do fails(function() ps.data.conversation(ps.data.table { row }, 1) end, want) end
  end)
end)

describe("tools/data.lua", function()
  local function run(words)
    return check.shell(("NO_COLOR=1 '%s' '%s'/tools/data.lua %s"):format(paths.exe,
      paths.root, words))
  end

  it("shows an example as the model reads it, and counts rows", function()
    local model = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template =
      "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
      .. "{{ '[assistant]' if add_generation_prompt }}" } })
    local path = file("c.jsonl", '{"prompt": "Q", "completion": "ab"}\n{"prompt": "R", "completion": "abab"}\n')
    local out, code = run(("show %s %s --row 2 --ids"):format(model, path))
    assert.equal(0, code, out)
    assert.truthy(out:find("[user]R;[assistant][[abab;]]", 1, true), out)
    assert.truthy(out:find("c.jsonl:2): 22 tokens, 3 of them trained", 1, true), out)
    path = file("e.jsonl", '{"prompt": "\\u001b[31m\\u009b", "completion": "a\\tb"}\n')
    out = run(("show %s %s"):format(model, path))
    assert.truthy(out:find("[user]\\x1b[31m\\x9b;[assistant][[a\tb;]]", 1, true), out)
    out, code = run(("stats %s %s/c.jsonl --max-length 21"):format(model, folder))
    assert.equal(0, code, out)
    assert.truthy(out:find("43 tokens, 5 of them trained", 1, true), out)
    assert.truthy(out:find("1 rows are longer than 21 tokens", 1, true), out)
    path = file("f.jsonl", '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a", '
      .. '"thinking": "b"}]}\n')
    assert.truthy(run(("show %s %s"):format(model, path)):find("leaves out the reasoning of message 2", 1, true))
    assert.truthy(run(("stats %s %s"):format(model, path)):find("1 rows have reasoning that the template leaves out", 1,
      true))
    path = file("g.jsonl", '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", '
      .. '"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}], "tools": [{"type": '
      .. '"function", "function": {"name": "add"}}]}\n{"messages": [{"role": "user", "content": "x"}, {"role": '
      .. '"assistant", "content": ""}]}\n')
    out = run(("show %s %s"):format(model, path))
    assert.truthy(out:find("the template leaves out tool calls of message 2", 1, true), out)
    assert.truthy(out:find("the template leaves out the tools", 1, true), out)
    out = run(("show %s %s --row 2"):format(model, path))
    assert.truthy(out:find("message 2 is an empty answer, which the model learns to give", 1, true), out)
    out = run(("stats %s %s"):format(model, path))
    assert.truthy(out:find("1 rows have tool calls that the template leaves out; the first is row 1", 1, true), out)
    assert.truthy(out:find("1 rows have tools that the template leaves out", 1, true), out)
    assert.truthy(out:find("1 rows have an empty answer, which the model learns to give; the first is row 2", 1, true),
      out)
    local rows = ps.data.table(path)
    assert.matches("leaves out tool calls of message 2 and the tools of row 1", require("ps.data.left_out").note(
      ps.tokenizer.from_pretrained(model), rows, ps.data.format(rows)), 1, true)
    out, code = run(("show %s %s"):format(model, file("d.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n')))
    assert.truthy(code ~= 0 and out:find("no token is trained", 1, true), out)
    tokens.remove(model)
  end)
end)
