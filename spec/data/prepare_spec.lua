-- SPDX-License-Identifier: BSD-3-Clause
-- tools/prepare.lua: shards of text and JSON lines have the tokens of the whole texts, for any blocks and threads.
local ps = require "ps"
local check = require "spec.check_lib"
local check_lib = require "spec.check_lib"
local json = require "cjson"
local lib = require "spec.tokenizer_lib"
local paths = require "ps.paths"

local MERGES = { { "\196\138", "\196\138" }, { "t", "h" }, { "th", "e" }, { "\196\160", "the" }, { "\196\160",
  "\196\160" } }
local folder, tok, END

setup(function()
  folder = lib.gpt2(MERGES)
  tok = ps.tokenizer.from_pretrained(folder)
  END = tok.eos_token_id
end)
teardown(function() lib.remove(folder) end)

local function write(name, text)
  check_lib.write(folder .. "/" .. name, text)
  return folder .. "/" .. name
end

-- Returns a text with everything that a split could affect: empty lines, blanks before and after them, and a long text
-- without line ends.
local function drawn(seed, n)
  local out = {}
  math.randomseed(seed)
  local parts = { "the", " the", "\n", "\n\n", " \n", "\n ", "  ", "a,b", "\195\169", "\r\n", "x\ny", ".\nThe", "\t\n" }
  for i = 1, n do out[i] = parts[math.random(#parts)] end
  return table.concat(out)
end

local function ids_of(path, options)
  local ids = {}
  tok:encode_file(path, function(some, n) for i = 0, n - 1 do ids[#ids + 1] = some[i] end end, options)
  return ids
end

local function prepare(arguments)
  return check.shell(("'%s' '%s/tools/prepare.lua' --tokenizer '%s' %s"):format(paths.exe,
    paths.root, folder, arguments))
end

local function shard(name)
  local tokens, ids = ps.data.tokens(folder .. "/" .. name), {}
  local all = tokens:read(0, tokens:count())
  for i = 1, tokens:count() do ids[i] = all[i - 1] end
  return ids
end

describe("a file's tokens", function()
  it("are those of the whole text, in any blocks, on any threads", function()
    for seed = 1, 5 do
      local text = drawn(seed, 3000)
      local path, whole = write("text.txt", text), tok:encode(text)
      for _, block in ipairs { 1, 7, 64, 1000, 2 ^ 20 } do
        assert.same(whole, ids_of(path, { block = block, threads = 1 + seed % 3 }))
      end
    end
    local text = drawn(9, 200000)
    assert.same(tok:encode(text), ids_of(write("text.txt", text), { threads = 4 }))
    assert.same({}, ids_of(write("empty.txt", "")))
  end)

  it("begin with one blank if the tokenizer adds one", function()
    local spaced = lib.gpt2(MERGES, { ["tokenizer_config.json"] = { add_prefix_space = true } })
    local plain = tok
    tok = ps.tokenizer.from_pretrained(spaced)
    lib.remove(spaced)
    local text = drawn(3, 500)
    local whole, cut = tok:encode(text), ids_of(write("text.txt", text), { block = 16, threads = 2 })
    tok = plain
    assert.same(whole, cut)
  end)

  it("are those of the whole text if words, normalizers or added tokens cross line ends", function()
    local function split(regex)
      return { type = "Sequence", pretokenizers = {
        { type = "Split", pattern = { Regex = regex }, behavior = "Isolated", invert = false },
        { type = "ByteLevel", use_regex = false, add_prefix_space = false } } }
    end
    local bytes, vocab = { type = "ByteLevel", add_prefix_space = false }, lib.vocab(MERGES)
    local blank = { type = "Replace", pattern = { String = "e\nT" }, content = "the" }
    local characters = { ["\u{2581}"] = 0, t = 1, h = 2, e = 3, ["\n"] = 4, ["\u{2581}t"] = 5, ["e\n"] = 6,
      ["e\nt"] = 7 }
    local function open(whole)
      whole.model = whole.model or { type = "BPE", vocab = vocab, merges = { "t h", "th e", "\196\160 the" } }
      local path = lib.folder { ["tokenizer.json"] = whole }
      local opened = ps.tokenizer.from_pretrained(path)
      lib.remove(path)
      return opened
    end
    local plain, text = tok, drawn(4, 4000) .. ("the\nthe"):rep(30000)
    local path = write("text.txt", text)
    for _, whole in ipairs { { pre_tokenizer = split "(?:.|\\n){1,5}" }, { pre_tokenizer = split "[a-z]+\\n?[a-z]+" },
      { pre_tokenizer = bytes, added_tokens = { { id = 300, content = "the\nthe" } } },
      { pre_tokenizer = bytes, added_tokens = { { id = 300, content = "The", lstrip = true } } },
      { pre_tokenizer = bytes, normalizer = blank },
      { pre_tokenizer = bytes, normalizer = { type = "Prepend", prepend = "x" } },
      { pre_tokenizer = { type = "Metaspace", replacement = "\u{2581}", prepend_scheme = "always" },
        model = { type = "BPE", vocab = characters, merges = { "\u{2581} t", "e \n", { "e\n", "t" } } },
        decoder = { type = "Sequence", decoders = {
          { type = "Replace", pattern = { String = "\u{2581}" }, content = " " }, { type = "ByteFallback" },
          { type = "Fuse" } } } } } do
      tok = open(whole)
      local want = tok:encode(text, { split_special_tokens = true })
      local got, others = ids_of(path, { block = 64 }), ids_of(path, { threads = 4 })
      tok = plain
      assert.same(want, got)
      assert.same(want, others)
    end
  end)

  it("of JSON lines are those of its documents, each after a mark", function()
    local want, lines = {}, {}
    for i = 1, 50 do
      local text = drawn(i, i % 7) .. (i % 3 == 0 and "<|endoftext|>" or "")
      want[#want + 1] = END
      for _, id in ipairs(tok:encode(text, { split_special_tokens = true })) do want[#want + 1] = id end
      lines[i] = json.encode { id = i, text = text, more = { { text = "no" }, {} } } .. (i % 5 == 0 and "\n" or "")
    end
    local path = write("lines.jsonl", table.concat(lines, "\n"))
    local marked = write("marked.jsonl", "\239\187\191" .. table.concat(lines, "\n"))  -- begins with a byte order mark
    assert.same(ids_of(path, { field = "text" }), ids_of(marked, { field = "text" }))
    for _, block in ipairs { 3, 100, 2 ^ 20 } do
      assert.same(want, ids_of(path, { field = "text", mark = END, block = block, threads = 3 }))
    end
  end)

  it("are not written if a line is invalid, and the error has its number", function()
    local good = '{"text":"a"}\n'
    for bad, why in pairs { ["{"] = "byte", ["[]"] = "'{' expected", ['{"a":1}'] = "no string 'text'",
      ['{"text":3}'] = "'\"' expected", ['{"text":"a"} x'] = "more text", ['{"text":"\\x"}'] = "no such escape" } do
      local path = write("bad.jsonl", good:rep(2) .. "\n" .. bad .. "\n" .. good)
      for _, block in ipairs { 5, 2 ^ 20 } do
        check_lib.fails(function() ids_of(path, { field = "text", block = block }) end, "bad.jsonl: line 4", why)
      end
    end
    check_lib.fails(function() ids_of(folder .. "/none.txt") end, "cannot open the text file", "none.txt")
  end)
end)

describe("a file that is not valid UTF-8", function()
  local long = ("caf\195\169\n"):rep(40)

  it("is refused with its line and byte, in any blocks", function()
    for text, at in pairs { ["caf\233 latin1 text\n"] = 3, ["\226\130"] = 0, ["\237\160\128"] = 0, ["a\192\128"] = 1,
      ["\244\144\128\128"] = 0 } do
      local path = write("latin.txt", long .. text)
      for _, block in ipairs { 1, 7, 2 ^ 20 } do
        check.fails(function() ids_of(path, { block = block }) end,
          ("latin.txt:41: not valid UTF-8 at byte %d of the file"):format(#long + at), "iconv", "lossy = true")
      end
    end
    local path = write("latin.jsonl", '{"text":"a"}\n{"text":"caf\233"}\n')
    check.fails(function() ids_of(path, { field = "text" }) end, "latin.jsonl:2: not valid UTF-8 at byte 25")
    check.fails(function() ps.data.encode_file(path, folder .. "/latin.bin", tok) end, "latin.jsonl:2: not valid")
    ps.data.encode_file(path, folder .. "/latin.bin", ps.tokenizer.bytes())
    assert.equal(#check.read(path), #shard "latin.bin")
  end)

  it("has U+FFFD if the option lossy is set", function()
    local path = write("latin.txt", "caf\233")
    assert.same(tok:encode "caf\239\191\189", ids_of(path, { lossy = true }))
    ps.data.encode_file(path, folder .. "/latin.bin", tok, { lossy = true })
    assert.same(tok:encode "caf\239\191\189", shard "latin.bin")
    local out, code = prepare(("--out %s/l --mark none %s"):format(folder, path))
    assert.equal(1, code)
    assert.equal(1, (out:find(("prepare: %s:1: not valid UTF-8 at byte 3 of the file;"):format(path), 1, true)))
    assert.matches("iconv %-f LATIN1.*pass %-%-lossy to ", out)
    out, code = prepare(("--out %s/l --lossy --mark none %s"):format(folder, path))
    assert.equal(0, code, out)
    assert.same(tok:encode "caf\239\191\189", shard "l_000000.bin")
  end)

  it("is found by the same rules for whole texts and pieces", function()
    local utf8 = require "ps.core.utf8"
    local good = { "a", "\n", "\195\169", "\226\130\172", "\240\159\152\128", "\224\160\128", "\237\159\191",
      "\244\143\191\191", "some ASCII" }
    local bad = { "\255", "\128", "\192\128", "\237\160\128", "\224\159\191", "\240\143\191\191", "\195", "\226\130" }
    math.randomseed(2)
    for i = 1, 3000 do
      local parts, want = {}, nil
      for k = 1, math.random(0, 12) do parts[k] = good[math.random(#good)] end
      if i % 2 == 0 then
        local at = math.random(#parts + 1)
        want = #table.concat(parts, "", 1, at - 1)
        table.insert(parts, at, bad[math.random(#bad)])
      end
      local text, next_bad, got, at = table.concat(parts), utf8.checker(), nil, 1
      while at <= #text and not got do
        local n = math.random(7)
        got, at = next_bad(text:sub(at, at + n - 1)), at + n
      end
      assert.equal(want, got or next_bad())
      assert.equal(want == nil, utf8.valid(text))
    end
  end)
end)

describe("tools/prepare.lua", function()
  it("ends with code 130 at Ctrl-C", function()
    local tool = require("spec.terminal_lib").start { "prepare", "--tokenizer", folder, "--out", folder .. "/int",
      "/dev/stdin" }
    local function begun()
      for name in require("lfs").dir(folder) do if name:find "^int_" then return true end end
    end
    for _ = 1, 300 do if begun() then break end tool:wait(0.1) end
    assert.is_true(begun())
    tool:interrupt()
    tool:type "\4"                                         -- the end of the input, for which prepare waits
    local text, status = tool:finish()
    assert.matches("prepare: interrupted!\n", text, 1, true)
    assert.equal(130, status)
  end)

  it("writes shards that do not depend on threads", function()
    local text = drawn(11, 50000)
    local a, b = write("a.txt", text), write("b.jsonl", json.encode { body = "the" } .. "\n")
    local want = { END }
    for _, id in ipairs(tok:encode(text)) do want[#want + 1] = id end
    want[#want + 1], want[#want + 2] = END, tok:token_to_id "the"
    for threads = 1, 4, 3 do
      local out,
        code = prepare(("--out %s/s --field body --shard-tokens 20000 --threads %d --json %s %s"):format(folder,
        threads, a, b))
      assert.equal(0, code, out)
      local said, got = json.decode(out), {}
      assert.equal(#want, said.tokens)
      assert.equal(math.ceil(#want / 20000), said.shards)
      for i = 0, said.shards - 1 do
        for _, id in ipairs(shard(("s_%06d.bin"):format(i))) do got[#got + 1] = id end
      end
      assert.same(want, got)
    end
  end)

  it("reports shards with higher numbers that an older run left", function()
    local a = write("a.txt", drawn(1, 500))
    local out = prepare("--shard-tokens 100 --out " .. folder .. "/o " .. a)
    local n = tonumber(out:match "in (%d+) shards")
    assert.truthy(n > 2 and not out:find "older", out)
    assert.truthy(out:find(("MB/s): %s/o_000000.bin to %s/o_%06d.bin\n"):format(folder, folder, n - 1), 1, true), out)
    out = prepare("--shard-tokens 100000 --out " .. folder .. "/o " .. a)
    assert.truthy(out:find(("%s/o_000001.bin to %s/o_%06d.bin are of an older run"):format(folder, folder, n - 1), 1,
      true), out)
    assert.truthy(out:find("in 1 shard,", 1, true) and out:find("MB/s): " .. folder .. "/o_000000.bin\n", 1, true), out)
    -- The same after a run that ended in the middle. It has written all of its complete shards.
    local code
    out, code = prepare(("--shard-tokens 300 --out %s/o %s /nowhere.txt"):format(folder, a))
    local whole = 0
    while #shard(("o_%06d.bin"):format(whole)) == 300 do whole = whole + 1 end
    assert.truthy(code == 1 and whole >= 1 and whole < n - 1, out)
    assert.truthy(out:find(("%s/o_%06d.bin to %s/o_%06d.bin are of an older run"):format(folder, whole, folder, n - 1),
      1, true), out)
    assert.matches("in 0 shards, [%d.]+ s %([%d.]+ MB/s%)\n$", prepare("--mark none --out " .. folder .. "/none "
      .. write("empty.txt", "")))
  end)

  it("names the fault of a line", function()
    local a = write("a.txt", "the")
    for arguments, words in pairs { ["--out " .. folder .. "/x --mark nope " .. a] = "no token 'nope'",
      ["--out " .. folder .. "/x /nowhere.txt"] = "/nowhere.txt", ["--out /nowhere/x " ..
        a] = "/nowhere/x_000000.bin" } do
      local out, code = prepare(arguments)
      assert.equal(1, code)
      assert.truthy(out:find(words, 1, true), out)
      assert.is_nil(out:find("traceback", 1, true))
    end
    local lines = write("lines.json", '[{"text":"the"}]\n')
    local out, code = prepare("--out " .. folder .. "/x " .. lines)
    assert.same({ ("prepare: %s: line 1: a line must be an object whose 'text' is a string: JSON: byte 0: '{' "
      .. "expected\n"):format(lines), 1 }, { out, code })
    out = prepare("--out " .. folder .. "/x " .. folder)
    assert.equal(("prepare: %s: Is a directory\n"):format(folder), out)
    out, code = prepare("--out " .. folder .. "/m --mark none " .. a)
    assert.equal(0, code, out)
    assert.same(tok:encode "the", shard "m_000000.bin")
  end)
end)
