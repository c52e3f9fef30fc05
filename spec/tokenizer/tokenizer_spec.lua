-- SPDX-License-Identifier: BSD-3-Clause
-- Tokenizers of Hugging Face's files: GPT-2's byte-pair encoding, WordPiece, batches, and invalid files.
-- spec/oracle/tokens_oracle.py compares results on drawn texts with the packages tokenizers and tiktoken.
local ps = require "ps"
local json = require "cjson"
local check_lib = require "spec.check_lib"
local lib = require "spec.tokenizer_lib"
local paths = require "ps.paths"
local fails = check_lib.fails

local MERGES = { { "t", "h" }, { "th", "e" }, { "\196\160", "the" }, { "a", "a" }, { "aa", "aa" }, { "\196\160", "c" },
  { "\196\160c", "a" }, { "\196\160ca", "t" }, { "aaaa", "aaaa" } }
local THE, S_THE, AA, AAAA, S_CAT, END = 257, 258, 259, 260, 263, 265
local folders = {}

local function folder(path)
  folders[#folders + 1] = path
  return path
end
local function open(path) return ps.tokenizer.from_pretrained(folder(path)) end
local function gpt2(more) return open(lib.gpt2(MERGES, more)) end

local WORDS = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "cafe", "hello", ",", "!", "a",
  "b", "##b",
  "\228\184\173" }
local ID = {}
for i, word in ipairs(WORDS) do ID[word] = i - 1 end
local function bert(config, more)
  local files = { ["vocab.txt"] = table.concat(WORDS, "\n") .. "\n", ["tokenizer_config.json"] = config }
  for name, content in pairs(more or {}) do files[name] = content end
  return open(lib.folder(files))
end

teardown(function() for _, path in ipairs(folders) do lib.remove(path) end end)

describe("GPT-2's tokenizer", function()
  it("merges pairs of lowest rank, leftmost first, within words", function()
    local tok = gpt2()
    assert.same({ THE, S_CAT, S_THE }, tok:encode "the cat the")
    assert.same({ AA, 97 }, tok:encode "aaa")
    assert.same({ AAAA, AA, 97 }, tok:encode "aaaaaaa")
    assert.same({}, tok:encode "")
    assert.equal(266, tok.vocab_size)
  end)

  it("equals GPT-2's on the texts for which these are all the merges of GPT-2 that matter", function()
    -- The order is that of GPT-2's file. \196\160 is a blank, and \196\138 is a newline.
    local text = "\196\160 w\no r\nl l\nl d\ne l\n\196\160w or\n\196\138 \196\138\ne ll\n\196\160wor ld\n"
      .. "H e\nor ld\n\196\160 x\nl o\nw orld\nell o\nH el\nH ello\nll o\nw o\n\196\160w o\nH ell\nr l\n"
    local merges = {}
    for left, right in text:gmatch "(%S+) (%S+)" do merges[#merges + 1] = { left, right } end
    local tok = open(lib.gpt2(merges))
    local function pieces(words)
      local list = {}
      for i, id in ipairs(tok:encode(words)) do list[i] = tok:decode { id } end
      return list
    end
    -- OpenAI's encoder returns the ids 15496, 995, 0 for the first text and 220, 220, 628, 2124 for the second.
    assert.same({ "Hello", " world", "!" }, pieces "Hello world!")
    assert.same({ " ", " ", "\n\n", " x" }, pieces "  \n\n x")
    assert.same({ "<|endoftext|>" }, pieces "<|endoftext|>")
    assert.equal("Hello world!", tok:decode(tok:encode "Hello world!"))
  end)

  it("reads malformed UTF-8 as U+FFFD, each sequence as one", function()
    local tok = gpt2()
    assert.equal("a\239\191\189b\239\191\189\239\191\189", tok:decode(tok:encode "a\240\159\152b\255\192"))
    assert.same(tok:encode "x\239\191\189", tok:encode "x\237")
  end)

  it("restores the text", function()
    local tok = gpt2()
    for _, text in ipairs { "the cat", " \t\n\n ", "caf\195\169 \240\159\152\128", "'s 'll 12,3", ("a"):rep(1000),
      "\0" } do
      assert.equal(text, tok:decode(tok:encode(text)))
      local ids, n = tok:encode_buffer(text)
      assert.equal(text, tok:decode(ids, n))
      assert.equal(table.concat(tok:encode(text), " "), tok:encode_line(text))
    end
    assert.equal("\240\159", tok:decode({ 240, 159 }, { bytes = true }))
    assert.equal("\239\191\189", tok:decode { 240, 159 })
    assert.same({ "the", " cat" }, tok:batch_decode { { THE }, { S_CAT } })
  end)

  it("recognises special tokens in texts", function()
    local tok = gpt2()
    assert.same({ THE, END, THE }, tok:encode "the<|endoftext|>the")
    assert.truthy(#tok:encode("<|endoftext|>", { split_special_tokens = true }) > 1)
    assert.equal("thethe", tok:decode({ THE, END, THE }, { skip_special_tokens = true }))
    assert.equal("the<|endoftext|>", tok:decode { THE, END })
    assert.equal("<|endoftext|>", tok.eos_token)
    assert.equal(END, tok.eos_token_id)
    assert.is_nil(tok.pad_token)
    tok.pad_token = tok.eos_token
    assert.equal(END, tok.pad_token_id)
    fails(function() tok.pad_token = "nope" end, "pad_token", "no token 'nope'")
    fails(function() tok.pad_tokn = "a" end, "did you mean 'pad_token'?")
    assert.equal(THE, tok:token_to_id "the")
    assert.equal("\196\160the", tok:id_to_token(S_THE))
  end)

  it("uses settings of tokenizer_config.json", function()
    local tok = gpt2 { ["tokenizer_config.json"] = { add_bos_token = true, add_prefix_space = true,
      model_max_length = 4,
      padding_side = "left", bos_token = { content = "<|endoftext|>" }, pad_token = "!" } }
    assert.same({ END, S_THE, S_CAT }, tok:encode "the cat")
    local batch = tok({ "the", "the cat" }, { padding = true })
    assert.same({ { 33, END, S_THE }, { END, S_THE, S_CAT } }, batch.input_ids:tolist())
    assert.same({ { 0, 1, 1 }, { 1, 1, 1 } }, batch.attention_mask:tolist())
    assert.same({ { END, S_THE, S_CAT, S_THE } }, tok("the cat the cat", { truncation = true }).input_ids:tolist())
    tok = gpt2 { ["tokenizer_config.json"] = { add_bos_token = true, add_eos_token = true } }
    assert.same({ END, THE, END }, tok:encode "the")
    local pair = tok("the", { text_pair = "the", token_type_ids = true })
    assert.same({ { { END, THE, END, END, THE, END } }, { { 0, 0, 0, 1, 1, 1 } } }, { pair.input_ids:tolist(),
      pair.token_type_ids:tolist() })
    tok = gpt2 { ["tokenizer_config.json"] = { split_special_tokens = true } }
    assert.same(gpt2():encode("<|endoftext|>", { split_special_tokens = true }), tok:encode "<|endoftext|>")
    assert.same({ END }, tok:encode("<|endoftext|>", { split_special_tokens = false }))
  end)

  it("is byte-pair encoding as defined, for words of any length and merges in any order", function()
    local drawn, seen, at = {}, {}, 1
    math.randomseed(7)
    local tokens = { "a", "b", "c" }
    while #drawn < 60 do
      local pair = { tokens[math.random(#tokens)], tokens[math.random(#tokens)] }
      local token = pair[1] .. pair[2]
      if #token < 40 and not seen[token] then
        seen[token], drawn[#drawn + 1], tokens[#tokens + 1] = true, pair, token
      end
    end
    local others = {}
    for i, pair in ipairs(drawn) do others[i] = pair end
    for i = #others, 2, -1 do
      local j = math.random(i)
      others[i], others[j] = others[j], others[i]
    end
    local vocab = lib.vocab(drawn)
    for _, merges in ipairs { drawn, others } do
      local tok = open(lib.folder { ["vocab.json"] = vocab, ["merges.txt"] = lib.merges_text(merges) })
      for n = 1, 124 do
        n = n > 120 and 4000 + 97 * (n - 120) ^ 2 or n            -- longer words are encoded in pieces of 2,048 bytes
        local word = {}
        for i = 1, n do word[i] = ("abc"):sub(math.random(3), -1):sub(1, 1) end
        word = table.concat(word)
        assert.same(lib.bpe(word, merges, vocab), tok:encode(word))
        at = at + 1
      end
    end
    assert.equal(249, at)
  end)

  it("takes time in proportion to the length of a word", function()
    local tok = gpt2()
    local function seconds(n)
      local best = math.huge
      for _ = 1, 5 do
        local t = os.clock()
        local _, count = tok:encode_buffer(("a"):rep(n))
        best = math.min(best, os.clock() - t)
        assert.equal(n / 8, count)
      end
      return best
    end
    local short, long = seconds(2 ^ 15), seconds(2 ^ 19)
    -- 16 times as long on an idle machine; quadratic time would be 256 times as long
    assert.truthy(long < 16 * 8 * short, ("%g s, 16 times as long %g s"):format(short, long))
  end)

  it("returns the positions of tokens, in bytes and whole characters", function()
    local tok = gpt2()
    local text = "the cat\195\169<|endoftext|>\255the"
    local offsets = tok(text, { offsets = true }).offsets:tolist()[1]
    local parts = {}
    for i, range in ipairs(offsets) do parts[i] = text:sub(range[1] + 1, range[2]) end
    assert.same({ "the", " cat", "\195\169", "\195\169", "<|endoftext|>", "\255", "\255", "\255", "the" }, parts)
  end)
end)

describe("BERT's tokenizer", function()
  it("normalises text, and splits words into pieces", function()
    local tok = bert()
    assert.same({ 2, ID.un, ID["##aff"], ID["##able"], ID["!"], 3 }, tok:encode "UNaffable!")
    assert.same({ 2, ID.cafe, ID[","], 1, ID["\228\184\173"], 3 }, tok:encode "Caf\195\169, x\228\184\173")
    assert.same({ 2, ID.hello, 3 }, tok:encode "he\0llo\r")
    assert.same({ 2, ID.a, ID.hello, 3 }, tok:encode("a hello"))
    assert.same({ 2, 1, 3 }, tok:encode(("ab"):rep(51)))                -- more than 100 characters
    assert.same({ 2, ID["[MASK]"], ID.b, 3 }, tok:encode "[MASK]b")
    assert.equal("2 12 3", tok:encode_line "a")
    assert.same({ ID.a }, tok:encode("a", { add_special_tokens = false }))
  end)

  it("keeps capitals and accents if its files say so", function()
    local tok = bert { do_lower_case = false }
    assert.same({ 2, 1, ID.hello, 1, 3 }, tok:encode "Hello hello caf\195\169")
    tok = bert { strip_accents = false }
    assert.same({ 2, ID.hello, 1, 3 }, tok:encode "Hello caf\195\169")
  end)

  it("joins tokens again", function()
    local tok = bert()
    assert.equal("[CLS] unaffable, a! [SEP]", tok:decode(tok:encode "unaffable, a!"))
    assert.equal("unaffable", tok:decode(tok:encode "UNaffable", { skip_special_tokens = true }))
    local words = { ["vocab.txt"] = table.concat(WORDS, "\n") .. "\n'\ns\nt\n" }
    local text = "a's b't !"
    assert.equal("a ' s b ' t!", bert({}, words):decode(bert({}, words):encode(text), { skip_special_tokens = true }))
    local added = {}
    for i, token in ipairs { "...", ".net", "##x", "a . b", "Foo" } do
      added[tostring(#WORDS + i - 1)] = { content = token, normalized = true }
    end
    tok = bert { added_tokens_decoder = added }
    -- The expected texts are those that the Python package tokenizers decodes.
    local ids = tok:encode("a ... b .net a . b FOO", { add_special_tokens = false })
    assert.equal("a... b.net a. b foo", tok:decode(ids))
    assert.equal("ax", tok:decode { ID.a, #WORDS + 2 })
    tok = bert({ clean_up_tokenization_spaces = true }, words)
    assert.equal("a's b't!", tok:decode(tok:encode(text), { skip_special_tokens = true }))
  end)

  it("makes batches of pairs, truncated and padded", function()
    local tok = bert()
    local batch = tok({ "a b", "a" }, { text_pair = { "hello", "b b b" }, padding = "max_length", max_length = 7,
      truncation = true, offsets = true })
    assert.same({ { 2, ID.a, ID.b, 3, ID.hello, 3, 0 }, { 2, ID.a, 3, ID.b, ID.b, ID.b, 3 } }, batch.input_ids:tolist())
    assert.same({ { 0, 0, 0, 0, 1, 1, 0 }, { 0, 0, 0, 1, 1, 1, 1 } }, batch.token_type_ids:tolist())
    assert.same({ { 1, 1, 1, 1, 1, 1, 0 }, { 1, 1, 1, 1, 1, 1, 1 } }, batch.attention_mask:tolist())
    assert.same({ 2, 3 }, batch.offsets:tolist()[1][3])
    -- A text without tokens has only special ones.
    local empty = bert()({ "", " " }, { offsets = true })
    assert.same({ { 2, 3 }, { 2, 3 } }, empty.input_ids:tolist())
    assert.same({ { { 0, 0 }, { 0, 0 } }, { { 0, 0 }, { 0, 0 } } }, empty.offsets:tolist())
    assert.same({ { 2, ID.a, 3, ID.b, ID.a, 3 } },
      tok("a b a b", { text_pair = "b a b a", truncation = true, max_length = 6 }).input_ids:tolist())
    tok.truncation_side = "left"
    assert.same({ { 2, ID.hello, ID["!"], 3 } }, tok("a hello!", { truncation = true,
      max_length = 4 }).input_ids:tolist())
    assert.equal(8, tok("a", { padding = true, pad_to_multiple_of = 8 }).input_ids:shape()[2])
    assert.is_nil(tok("a", { token_type_ids = false }).token_type_ids)
  end)
end)

describe("an option of a tokenizer", function()
  it("is supported or refused", function()
    local tok = gpt2()
    fails(function() tok({ "the", "the the the" }) end, "text 1 has 1 tokens, another has 3", "padding = true")
    fails(function() tok({ "the", "the cat" }, { padding = true }) end, "no pad_token", "tokenizer.eos_token")
    fails(function() tok("the", { truncation = true }) end, "truncation needs max_length")
    fails(function() tok("the", { truncation = "only_frist", max_length = 3 }) end, "did you mean 'only_first'?")
    fails(function() tok({ "a" }, { text_pair = { "a", "b" } }) end, "1 texts, but 2 in text_pair")
    fails(function() tok({}) end, "the list is empty")
    fails(function() tok({ 3 }) end, "text 1 is", "string")
    fails(function() tok:encode(3) end, "the text is", "string")
    fails(function() tok:decode { 266 } end, "there is no token 266")
    fails(function() tok:decode { -1 } end, "no token -1")
    fails(function() bert()("a", { truncation = true, max_length = 1 }) end, "2 special tokens")
    tok.pad_token = tok.eos_token
    fails(function() tok("the cat the", { truncation = "only_second", max_length = 2 }) end, "there is no text_pair")
    assert.same({ { THE } }, tok("the", { truncation = "only_second", max_length = 2 }).input_ids:tolist())
    local odd = { truncation = true, max_length = 3, padding = true, pad_to_multiple_of = 2 }
    fails(function() tok("the cat", odd) end, "truncation to 3 tokens and pad_to_multiple_of = 2")
    -- the second text's type is 1 unless the files define another
    assert.same({ { 0, 1, 1 } }, tok("the", { text_pair = "the cat", token_type_ids = true }).token_type_ids:tolist())
  end)
end)

describe("bench/tokenize.lua", function()
  it("reads lines of any bytes", function()
    local path = folder(lib.gpt2(MERGES))
    check_lib.write(path .. "/text", "a\0b\n\n\0\0\nthe")
    local p = assert(io.popen(("'%s' '%s/bench/tokenize.lua' '%s' <'%s/text' 2>&1"):format(paths.exe, paths.root, path,
      path)))
    assert.equal(("97 0 98\n\n0 0\n%d\n"):format(THE), p:read "*a")
    p:close()
  end)
end)

describe("a vocabulary that cannot spell some characters", function()
  local function once(path, code, place)
    return ("%s: the vocabulary cannot spell %s, which occurs in %s; the ids leave such characters out, and this is "
      .. "said once\n"):format(path, code, place)
  end
  local function total(path, counts, first)
    return ("%s: %s left out (first: %s)\n"):format(path, counts, first)
  end
  -- a BPE over characters that knows a, b and ab, and has no unknown token
  local function characters(fields)
    local model = { type = "BPE", vocab = { a = 0, b = 1, ab = 2 }, merges = { "a b" } }
    for key, value in pairs(fields or {}) do model[key] = value end
    local decoders = { { type = "Replace", pattern = { String = "\u{2581}" }, content = " " },
      { type = "ByteFallback" }, { type = "Fuse" } }
    return folder(lib.folder { ["tokenizer.json"] = json.encode { model = model,
      decoder = { type = "Sequence", decoders = decoders } } })
  end

  it("gets one note, for the first text with such a character", function()
    local vocab = lib.vocab {}
    vocab[lib.letters()[0x1d]], vocab[lib.letters()[0xc3]], vocab[lib.letters()[0xff]] = nil, nil, nil
    local path, tok = folder(lib.folder { ["vocab.json"] = vocab, ["merges.txt"] = "#version: 0.2\n" }), nil
    local function made() tok = ps.tokenizer.from_pretrained(path) end
    assert.equal("", check_lib.printed(made))
    local function said(text) return check_lib.printed(tok.encode, tok, text) end
    assert.equal("", said "\255")
    assert.equal(once(path .. "/vocab.json", "U+00E9", "a text"), said "caf\195\169")
    assert.equal("", said "caf\195\169")
    made()
    assert.equal(once(path .. "/vocab.json", "U+001D", "a text"), said "a\29")
  end)

  it("keeps the ids of the package tokenizers, for words of any length", function()
    local path = characters()
    local tok = ps.tokenizer.from_pretrained(path)
    assert.equal(once(path .. "/tokenizer.json", "U+4E2D", "a text"), check_lib.printed(function()
      assert.same({ 2, 0, 2 }, tok:encode "ab\228\184\173axab")
    end))
    local unknown = ps.tokenizer.from_pretrained(characters { unk_token = "a" })
    assert.equal("", check_lib.printed(function() assert.same({ 1, 0 }, unknown:encode "bx") end))
  end)

  it("counts them in data, and says so once at the end", function()
    local path = characters()
    local tok = ps.tokenizer.from_pretrained(path)
    local name, file = path .. "/tokenizer.json", path .. "/text.txt"
    local function said(text, options)
      check_lib.write(file, text)
      local ids = {}
      local out = check_lib.printed(tok.encode_file, tok, file, function(list, n)
        for i = 0, n - 1 do ids[#ids + 1] = list[i] end
      end, options)
      return out, #ids
    end
    assert.same({ "", 2 }, { said "abab" })
    local spell = "cannot be spelled by this vocabulary and %s"
    -- each word counts each time, in the cache of words or not, whatever its length
    for _, n in ipairs { 1, 20, 5000 } do
      local text = ("ab"):rep(n) .. "xyz" .. ("ab"):rep(n) .. "\195\169"
      local first = ("U+0078 in %s, byte %d"):format(file, 2 * n + 1)
      assert.same({ total(name, "4 characters at 2 places " .. spell:format "were", first), 2 * n }, { said(text) })
    end
    local first = ("U+00E9 in %s, byte 2"):format(file)
    assert.same({ total(name, "1 character at 1 place " .. spell:format "was", first), 1 }, { said "a\195\169" })
    local lines = {}
    for i = 1, 30000 do lines[i] = ('{"text": "%s"}\n'):format(i % 1000 == 7 and "ab\\u00e9x" or "abab") end
    for _, how in ipairs { { threads = 1 }, { threads = 3 }, { threads = 2, block = 1000 } } do
      how.field = "text"
      first = ("U+00E9 in %s:7"):format(file)
      assert.same({ total(name, "60 characters at 30 places " .. spell:format "were", first), 59970 },
        { said(table.concat(lines), how) })
    end
    local shard = path .. "/shard.bin"
    assert.equal(total(name, "2 characters at 2 places " .. spell:format "were", "U+0078 in a text"),
      check_lib.printed(ps.data.encode_text, "axaxa", shard, tok))
    assert.equal(3, ps.data.tokens(shard):count())
  end)
end)

describe("a tokenizer's folder", function()
  it("is saved unchanged, except for settings of the script", function()
    local tok = gpt2 { ["tokenizer_config.json"] = { model_max_length = 64, eos_token = "<|endoftext|>",
      extra_list = {}, chat = { a = 1 } }, ["generation_config.json"] = { eos_token_id = 1 } }
    local from, to = folders[#folders], folder(os.tmpname())
    os.remove(to)
    tok:save_pretrained(to)
    for _, name in ipairs { "vocab.json", "merges.txt", "tokenizer_config.json" } do
      assert.equal(check_lib.read(from .. "/" .. name), check_lib.read(to .. "/" .. name))
    end
    assert.is_nil(io.open(to .. "/generation_config.json"))
    tok.pad_token, tok.padding_side, tok.model_max_length = tok.eos_token, "left", 9
    tok:save_pretrained(to)
    local config = json.decode(check_lib.read(to .. "/tokenizer_config.json"))
    assert.same({ model_max_length = 9, eos_token = "<|endoftext|>", pad_token = "<|endoftext|>",
      padding_side = "left", chat = { a = 1 } }, config)
    local again = ps.tokenizer.from_pretrained(to)
    assert.same({ END, "left", 9 }, { again.pad_token_id, again.padding_side, again.model_max_length })
    assert.same(tok:encode "the cat the", again:encode "the cat the")
    tok.pad_token = nil
    tok:save_pretrained(to)
    assert.is_nil(ps.tokenizer.from_pretrained(to).pad_token)
    fails(function() tok:save_pretrained "/nowhere/at/all" end, "/nowhere/at/all")
    fails(function() tok:save_pretrained() end, "save_pretrained: the folder")
  end)

  it("is found by name in Hugging Face's cache", function()
    local home = folder(lib.folder {})
    local repo = home .. "/hub/models--some--words"
    os.execute(("mkdir -p %s/refs %s/snapshots"):format(repo, repo))
    check_lib.write(repo .. "/refs/main", "c0ffee")
    os.execute(("cp -r '%s' %s/snapshots/c0ffee"):format(folder(lib.gpt2(MERGES)), repo))
    local said = check_lib.run("HF_HUB_CACHE= HF_HOME=" .. home, [[
      print(table.concat(require("ps").tokenizer.from_pretrained("some/words"):encode "the cat", " "))
      print(pcall(require("ps").tokenizer.from_pretrained, "no/words"))]])
    assert.truthy(said:find(THE .. " " .. S_CAT, 1, true), said)
    assert.truthy(said:find("hf download no/words", 1, true), said)
  end)
end)

describe("invalid tokenizer files", function()
  local function refused(files, ...)
    local path = folder(lib.folder(files))
    fails(function() ps.tokenizer.from_pretrained(path) end, ...)
  end
  local vocab, merges = lib.vocab(MERGES), lib.merges_text(MERGES)
  local function json_of(parts)
    local whole = { model = { type = "BPE", vocab = vocab, merges = { "t h", { "th", "e" } } },
      pre_tokenizer = { type = "ByteLevel", add_prefix_space = false } }
    for key, value in pairs(parts or {}) do whole[key] = value end
    return { ["tokenizer.json"] = whole }
  end

  it("are named, with the fault", function()
    fails(function() ps.tokenizer.from_pretrained "/nowhere/at/all" end, "there is no folder or file /nowhere/at/all")
    refused({}, "neither tokenizer.json", "vocab.txt")
    refused({ ["vocab.json"] = '{"a":', ["merges.txt"] = "" }, "vocab.json", "byte 5")
    refused({ ["vocab.json"] = '{"a":0,"a":1}', ["merges.txt"] = "" }, "vocab.json", "'a' is there twice")
    refused({ ["vocab.json"] = '{"a":0,"b":0}', ["merges.txt"] = "" }, "'a' and 'b' have the same id, 0")
    refused({ ["vocab.json"] = '{"a":-1}', ["merges.txt"] = "" }, "'a' has id -1")
    refused({ ["vocab.json"] = '{"a":99999999}', ["merges.txt"] = "" }, "'a' has id 99999999")
    refused({ ["vocab.json"] = '{"a":1.5}', ["merges.txt"] = "" }, "whole number")
    refused({ ["vocab.json"] = '{"\\ud800":1}', ["merges.txt"] = "" }, "surrogate")
    refused({ ["vocab.json"] = '{"a\255":1}', ["merges.txt"] = "" }, "not UTF-8")
    refused({ ["vocab.json"] = '{}', ["merges.txt"] = "" }, "no tokens")
    refused({ ["vocab.json"] = vocab, ["merges.txt"] = "t h\nth\n" }, "merges.txt", "line 2 is 'th'")
    refused({ ["vocab.json"] = vocab, ["merges.txt"] = "t x\n" }, "merge 1 joins 't' and 'x'", "no token 'tx'")
    refused({ ["vocab.txt"] = "[UNK]\n" }, "cls_token is '[CLS]', which is not in the vocabulary")
    refused({ ["vocab.txt"] = "[CLS]\n[SEP]\n" }, "unk_token is '[UNK]'")
    refused({ ["vocab.json"] = vocab, ["merges.txt"] = merges, ["tokenizer_config.json"] = { pad_token = "<none>" } },
      "pad_token is '<none>'")
    refused({ ["vocab.json"] = vocab, ["merges.txt"] = merges,
      ["tokenizer_config.json"] = { tokenizer_class = "T5Tokenizer" } },
      "tokenizer_class = \"T5Tokenizer\"")
    refused({ ["tokenizer.json"] = "[]" }, "tokenizer.json", "'{' expected")
    refused({ ["tokenizer.json"] = ("["):rep(100000) }, "tokenizer.json")
    refused({ ["tokenizer.json"] = '{"a":' .. ("["):rep(100000) }, "deeper than 512")
  end)

  it("mean the same with a byte order mark", function()
    local mark = "\239\187\191"
    local function marked(files)
      for name, text in pairs(files) do files[name] = mark .. (type(text) == "table" and json.encode(text) or text) end
      return open(lib.folder(files))
    end
    local words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n"
    local tok = marked { ["vocab.txt"] = words, ["tokenizer_config.json"] = { do_lower_case = true } }
    assert.same({ 0, 5 }, { tok.pad_token_id, tok:encode("THE", { add_special_tokens = false })[1] })
    assert.same({ 257 }, marked(json_of()):encode "the")
    assert.same({ 257 }, marked({ ["vocab.json"] = vocab, ["merges.txt"] = merges }):encode "the")
  end)

  it("of words may have a line twice, with the number of the last one", function()
    local tok = open(lib.folder { ["vocab.txt"] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n\n\n" })
    assert.same({ 7, 6 }, tok:encode("a b", { add_special_tokens = false }))
    assert.same({ 10, "a" }, { tok.vocab_size, tok:id_to_token(7) })
    assert.equal("a b", tok:decode { 7, 6 })
  end)

  it("are refused by the field that is not supported", function()
    assert.same({ 257 }, open(lib.folder(json_of())):encode "the")
    refused(json_of { model = { type = "Unigram", vocab = { { "a", -1 } } } }, 'model.type = "Unigram"')
    refused(json_of { model = { type = "BPE", vocab = vocab, merges = {}, dropout = 0.1 } }, "model.dropout = 0.1")
    refused(json_of { model = { type = "BPE", vocab = vocab, merges = {}, byte_fallback = true } },
      "model.byte_fallback = true")
    refused(json_of { model = { type = "BPE", vocab = vocab, merges = {}, strange = 1 } }, "model.strange = 1")
    refused(json_of { normalizer = { type = "NFKC" } }, 'normalizer.type = "NFKC"')
    refused(json_of { normalizer = { type = "Replace", pattern = { Regex = "a" }, content = "" } }, "pattern.Regex")
    refused(json_of { pre_tokenizer = { type = "Metaspace", replacement = "_" } }, 'pre_tokenizer.replacement = "_"')
    refused(json_of { pre_tokenizer = { type = "Metaspace", replacement = "\u{2581}" } }, "decoder = null: tokens that")
    refused(json_of { pre_tokenizer = json.null, decoder = { type = "ByteLevel" } }, 'decoder.type = "ByteLevel"')
    refused(json_of { added_tokens = { { id = 266, content = "x y", single_word = true } } }, "single_word")
    refused(json_of { added_tokens = { { id = 3, content = "the" } } }, "'the' has id 3", "with id 257")
    refused(json_of { added_tokens = { { id = 3, content = "new" } } }, "have the same id, 3")
    refused(json_of { decoder = { type = "Metaspace" } }, 'decoder.type = "Metaspace"')
    local bytes, blanks, words = { type = "ByteLevel", use_regex = false, add_prefix_space = false }, {
      type = "Metaspace", replacement = "\u{2581}" }, { type = "BertPreTokenizer" }
    local cut = { type = "Split", pattern = { String = "a" }, behavior = "Isolated", invert = false }
    for _, list in ipairs { { bytes, bytes }, { bytes, cut }, { words, bytes }, { cut, blanks }, { cut, words },
      { { type = "Sequence", pretokenizers = { cut, bytes } } } } do
      refused(json_of { pre_tokenizer = { type = "Sequence", pretokenizers = list } },
        "it is not supported at this position")
    end
    refused(json_of { pre_tokenizer = words }, "BertPreTokenizer is not supported with BPE")
    refused(json_of { pre_tokenizer = { type = "Metaspace", replacement = "\u{2581}", prepend_scheme = "first",
      add_prefix_space = false } }, "add_prefix_space = false", 'prepend_scheme is "first"')
    refused(json_of { pre_tokenizer = { type = "Split", pattern = {}, behavior = "Isolated" } }, "a Regex or a String")
    refused(json_of { post_processor = { type = "TemplateProcessing",
      single = { { SpecialToken = { id = "[X]" } } } } },
      "post_processor.single", "[X]")
  end)

  it("may spell characters, or bytes of characters without a token, as in Llama 2", function()
    local words = { ["<unk>"] = 0, ["\u{2581}"] = 259, a = 260, b = 261, ["\u{2581}a"] = 262, ["\u{2581}ab"] = 263 }
    for byte = 0, 255 do words[("<0x%02X>"):format(byte)] = 1 + byte end
    words["<s>"] = 257
    local blank, decoders = "\u{2581}", {
      { type = "Replace", pattern = { String = "\u{2581}" }, content = " " }, { type = "ByteFallback" },
      { type = "Fuse" }, { type = "Strip", content = " ", start = 1, stop = 0 } }
    local function llama(changes)
      local whole = { normalizer = { type = "Sequence", normalizers = { { type = "Prepend", prepend = blank },
          { type = "Replace", pattern = { String = " " }, content = blank } } }, pre_tokenizer = json.null,
        model = { type = "BPE", vocab = words, merges = { blank .. " a", blank .. "a b" }, unk_token = "<unk>",
          byte_fallback = true, fuse_unk = true },
        added_tokens = { { id = 257, content = "<s>", special = true, normalized = false } },
        decoder = { type = "Sequence", decoders = decoders } }
      for key, value in pairs(changes or {}) do whole[key] = value end
      return open(lib.folder(json_of(whole)))
    end
    local tok = llama()
    assert.same({ 263, 262, 1 + 0xc3, 1 + 0xa9, 259, 259, 261 }, tok:encode "ab a\u{e9}  b")
    assert.same({ 259, 263 }, tok:encode " ab")
    -- transformers' class has its own steps: a blank at the beginning replaces the blank that would be added.
    local NAME = '{"tokenizer_class":"LlamaTokenizer"'
    for settings, want in pairs {
      ['}'] = { { 263 }, { 259, 263 }, { 263, 257, 260 }, "ab", " ab" },
      [',"legacy":true}'] = { { 263 }, { 259, 263 }, { 263, 257, 262 }, "ab", " ab" },
      [',"add_prefix_space":false}'] = { { 263 }, { 259, 263 }, { 260, 261, 257, 260 },
        " ab", "  ab" },
    } do
      local path = llama().source
      check_lib.write(path .. "/tokenizer_config.json", NAME .. settings)
      local own = ps.tokenizer.from_pretrained(path)
      assert.same(want, { own:encode " ab", own:encode "  ab", own:encode "ab<s>a", own:decode(own:encode " ab"),
        own:decode(own:encode "  ab") }, settings)
    end
    assert.same({ 263, 257, 262 }, tok:encode "ab<s>a")
    assert.equal("ab a\u{e9}  b", tok:decode(tok:encode "ab a\u{e9}  b"))
    assert.equal("ab\u{fffd}\u{fffd}a", tok:decode { 263, 1 + 0xc3, 1 + 0xc3, 260 })
    tok = llama { normalizer = json.null, pre_tokenizer = { type = "Metaspace", replacement = blank,
      prepend_scheme = "first", split = false } }
    assert.same({ 263, 257, 260 }, tok:encode "ab<s>a")
    assert.same({ 262, 259, 261 }, tok:encode " a b")
    for _, changes in ipairs { {}, { normalizer = json.null, pre_tokenizer = { type = "Metaspace", replacement = blank,
      prepend_scheme = "always", split = false } } } do
      local path = llama(changes).source
      check_lib.write(path .. "/tokenizer_config.json", '{"tokenizer_class":"LlamaTokenizer","add_prefix_space":false}')
      tok = ps.tokenizer.from_pretrained(path)
      assert.same({ 260, 261, 262 }, tok:encode "ab a")
      assert.equal(" ab", tok:decode(tok:encode " ab"))
    end
    -- Byte tokens are decoded even if the model does not produce them. A character that spells the unknown token is not
    -- unknown.
    local model = { type = "BPE", vocab = words, merges = {}, unk_token = "b", byte_fallback = false, fuse_unk = true }
    tok = llama { model = model }
    assert.equal("A", tok:decode { 1 + 0x41 })
    assert.same({ 259, 261, 261, 261, 260 }, tok:encode "bb\u{4e2d}\u{4e2d}a")
    tok = llama()
    -- A text is one word. A long text has the concatenated ids of short texts.
    local ids, want = tok:encode(("ab "):rep(5000)), {}
    for i = 1, 5000 do want[i] = 263 end
    want[5001] = 259
    assert.same(want, ids)
  end)

  it("may be ranks of tokens, in which any two tokens merge that together are a token", function()
    local function file(text, name)
      return lib.folder { [name or "qwen.tiktoken"] = text } .. "/" .. (name or "qwen.tiktoken")
    end
    -- a, b, c, ab, bc, abc, and the bytes of U+00E9. "abc" is a token by itself, and bc precedes ab.
    local ranks = "YQ== 0\nYg== 1\nYw== 2\nYmM= 3\nYWI= 4\nYWJj 5\nww== 6\nqQ== 7\nw6k= 8\n"
    local tok = open(file(ranks))
    assert.same({ 5, 0 }, tok:encode "abca")
    assert.same({ 8, 4, 4 }, tok:encode "\u{e9}abab")
    assert.same({ 5, 151644, 3 }, tok:encode "abc<|im_start|>bc")
    assert.equal("abc\u{e9}", tok:decode { 5, 8 })
    local by_letters = ps.tokenizer.from_pretrained(file(ranks, "other.tiktoken"), { pattern = "." })
    assert.same({ 0, 1, 2 }, by_letters:encode "abc")
    local given = { encoding = "gpt2", special_tokens = { x = 9 } }
    assert.same({ 4, 9 }, ps.tokenizer.from_pretrained(file(ranks, "x.model"), given):encode "abx")
    fails(function() open(file(ranks, "other.tiktoken")) end, "encoding", "cl100k_base, gpt2, llama3, o200k_base")
    fails(function() open(file("YQ=\n")) end, "qwen.tiktoken: line 1 is no token in base64 with its rank")
    fails(function() open(file("YQ== 0\nYQ== 1\n")) end, "is there twice")
    fails(function() open(file("")) end, "qwen.tiktoken: 0 bytes without a token; the file is empty")
    fails(function() ps.tokenizer.from_pretrained(file(ranks), { encoding = "gpt5" }) end, "gpt2")
  end)

  -- transformers' tokenizer classes use these settings instead of those in tokenizer.json.
  it("follow tokenizer_config.json instead if it names the class", function()
    local function by(config, parts)
      local files = json_of(parts)
      files["tokenizer_config.json"] = config
      return open(lib.folder(files))
    end
    local space = { tokenizer_class = "GPT2TokenizerFast", add_prefix_space = true }
    assert.same(by(space):encode " the", by(space):encode "the")
    assert.are_not.same(by(space):encode "the", by({ add_prefix_space = true }):encode "the")
    local pieces = {}
    for i, word in ipairs(WORDS) do pieces[word] = i - 1 end
    local function cased(config)
      config.tokenizer_class = "BertTokenizer"
      return by(config, { model = { type = "WordPiece", vocab = pieces, unk_token = "[UNK]" }, pre_tokenizer = {
        type = "BertPreTokenizer" }, normalizer = { type = "BertNormalizer", clean_text = true, lowercase = true,
        handle_chinese_chars = true, strip_accents = json.null } }):encode "Cafe caf\195\169 a\228\184\173"
    end
    assert.same({ ID.cafe, ID.cafe, ID.a, ID["\228\184\173"] }, cased {})
    assert.same({ 1, 1, ID.a, ID["\228\184\173"] }, cased { do_lower_case = false })
    assert.same({ ID.cafe, 1, ID.a, ID["\228\184\173"] }, cased { strip_accents = false })
    assert.same({ ID.cafe, ID.cafe, 1 }, cased { tokenize_chinese_chars = false })
    assert.equal("left", by({ tokenizer_class = "LlamaTokenizer" }).padding_side)
    assert.equal("right", by({ tokenizer_class = "LlamaTokenizer", padding_side = "right" }).padding_side)
    local tok = by({}, { padding = { direction = "Left", pad_token = "!" }, truncation = { direction = "Left" } })
    assert.same({ "left", "left", 33 }, { tok.padding_side, tok.truncation_side, tok.pad_token_id })
  end)

  it("use the tokens of tokenizer_config.json in addition to tokenizer.json's, like transformers", function()
    local function by(config, added)
      local files = json_of { added_tokens = added }
      files["tokenizer_config.json"] = config
      return open(lib.folder(files))
    end
    local plain, fast = by({}):encode "<|endoftext|>", "PreTrainedTokenizerFast"
    assert.truthy(#plain > 1)
    local text = "the<|endoftext|> the"
    for _, config in ipairs { { eos_token = "<|endoftext|>" }, { tokenizer_class = fast, pad_token = "<|endoftext|>" },
      { additional_special_tokens = { "<|endoftext|>" } }, { extra_special_tokens = { image = "<|endoftext|>" } },
      { tokenizer_class = "GPT2Tokenizer" },
      { added_tokens_decoder = { ["265"] = { content = "<|endoftext|>", special = true } } } } do
      local tok = by(config)
      assert.same({ 257, END, 32, 257 }, tok:encode(text))
      assert.equal("the the", tok:decode(tok:encode(text), { skip_special_tokens = true }))
    end
    local tok = by({ eos_token = { content = "the", lstrip = true } })
    assert.same({ 257, 257 }, tok:encode "the  the")
    assert.equal("", tok:decode(tok:encode "the  the", { skip_special_tokens = true }))
    -- A token that is already added keeps its blanks, and a new token gets the next id.
    tok = by({ eos_token = { content = "<x>", lstrip = true }, extra_special_tokens = { "<y>" } },
      { { id = 266, content = "<x>" } })
    assert.same({ 32, 266, 267 }, tok:encode " <x><y>")
    assert.equal(" ", tok:decode(tok:encode " <x><y>", { skip_special_tokens = true }))
    -- added_tokens_decoder takes precedence over tokenizer.json
    tok = by({ added_tokens_decoder = { ["266"] = { content = "<x>", rstrip = true } } },
      { { id = 266, content = "<x>" } })
    assert.same({ 266, 257 }, tok:encode "<x>  the")
  end)

  it("may add tokens that begin with the blanks that the previous token swallows", function()
    local tok = open(lib.folder(json_of { added_tokens = { { id = 267, content = "<x>", rstrip = true },
      { id = 268, content = " <y>" } } }))
    assert.same({ 267, 268, 257 }, tok:encode "<x> <y>the")
  end)

  it("may compose characters first", function()
    local tok = open(lib.folder(json_of { normalizer = { type = "NFC" } }))
    for _, pair in ipairs { { "e\u{301}x", "\u{e9}x" }, { "\u{1100}\u{1161}\u{11a8}", "\u{ac01}" },
      { "\u{2126}", "\u{3a9}" }, { "a\u{323}\u{307}", "\u{1ea1}\u{307}" }, { "\u{958}", "\u{915}\u{93c}" } } do
      assert.same({ pair[2]:byte(1, -1) }, tok:encode(pair[1]))
    end
    -- One character becomes two, both at its position (as in the package tokenizers).
    local offsets = tok(" \u{f73}", { offsets = true }).offsets:tolist()[1]
    assert.same({ { 0, 1 }, { 1, 4 }, { 1, 4 }, { 1, 4 }, { 1, 4 }, { 1, 4 }, { 1, 4 } }, offsets)
    -- U+0FA7 becomes two characters of three bytes, and the following mark keeps its own position.
    offsets = tok("\u{fa7}\u{301}", { offsets = true }).offsets:tolist()[1]
    assert.same({ { 0, 3 }, { 0, 3 }, { 0, 3 }, { 0, 3 }, { 0, 3 }, { 0, 3 }, { 3, 5 }, { 3, 5 } }, offsets)
  end)

  it("may hold a hostile pattern, which ends with an error", function()
    local function split(pattern)
      return json_of { pre_tokenizer = { type = "Sequence", pretokenizers = {
        { type = "Split", pattern = { Regex = pattern }, behavior = "Isolated", invert = false },
        { type = "ByteLevel", add_prefix_space = false, use_regex = false } } } }
    end
    refused(split "(", "tokenizer.json", "the pattern '('")
    local tok = open(lib.folder(split "(a+)+$"))
    fails(function() tok:encode(("a"):rep(60) .. "b") end, "the tokenizer's pattern fails at byte 0", "limit")
    assert.same({ THE }, tok:encode "the")
    tok = open(lib.folder(split "x*"))
    assert.same({ 97, 98 }, tok:encode "ab")
  end)

  it("have patterns of Oniguruma, which have the same meaning here or are refused", function()
    local small = lib.vocab { { "b", "\196\138" } }                 -- b and a line end
    local function split(pattern)
      return { ["tokenizer.json"] = { model = { type = "BPE", vocab = small, merges = { "b \196\138" } },
        pre_tokenizer = { type = "Sequence", pretokenizers = {
          { type = "Split", pattern = { Regex = pattern }, behavior = "Isolated", invert = false },
          { type = "ByteLevel", add_prefix_space = false, use_regex = false } } } } }
    end
    for pattern, ids in pairs { ["[^\n]+$"] = { 97, 98, 10, 98 }, ["^b|x"] = { 97, 256, 98 },
      ["[b$^]+"] = { 97, 98, 10, 98 },
      ["\\$|[[:alpha:]]"] = { 97, 98, 10, 98 }, ["[\\[b]"] = { 97, 98, 10, 98 }, ["[]b]"] = { 97, 98, 10, 98 } } do
      assert.same(ids, open(lib.folder(split(pattern))):encode "ab\nb")
    end
    for pattern, what in pairs { ["\\w+"] = "\\w", ["[\\w]"] = "\\w", ["\\bx"] = "\\b", ["[a-z&&[^b]]"] = "&&",
      ["[a[b]]"] = "[ within [ ]", ["\\p{N}{1,3}+"] = "{1,3}+", ["a{,2}"] = "{,2}", ["(?m:.)"] = "(?m",
      ["a{2}?"] = "{2}?",
      ["\\h"] = "\\h", ["\\X"] = "\\X", ["a\\Kb"] = "\\K", ["\\Qa\\E"] = "\\Q" } do
      refused(split(pattern), "pre_tokenizer.pattern.Regex", ("'%s' has another meaning in PCRE2"):format(what))
    end
    local ranks = lib.folder { ["x.tiktoken"] = "YQ== 0\nYg== 1\nCg== 2\nYgo= 3\nYWI= 4\nCgo= 5\n" } .. "/x.tiktoken"
    local function by(pattern)
      return ps.tokenizer.from_pretrained(ranks, { pattern = pattern, special_tokens = {} })
    end
    assert.same({ 4, 5, 1 }, by("\\n+|[ab]+$|[ab]+"):encode "ab\n\nb")
    assert.same({ 0, 3 }, by("b\n$|b$|a"):encode "ab\n")      -- as in Rust, "$" matches only at the end of the text
    fails(function() by "[a&&b]" end, "pattern", "'&&' has another meaning in PCRE2")
    lib.remove(ranks:match "^(.*)/")
  end)
end)
