-- SPDX-License-Identifier: BSD-3-Clause
-- The language of pages and comments, as far as it can be counted: words that read like a translation, comments
-- that begin with a noun clause, and the length of a page's sentences.
local paths = require "ps.paths"

-- Generated pages, whose text comes from comments and lists.
local GENERATED = { ["docs/api.md"] = true }
local FOLDERS = "bench examples lua models spec src tools"

local WORDS = 35

-- Lua patterns for lower-case text in which each blank is a single space, with better words for each.
local PHRASES = {
  { "%f[%a]behind%f[%A]", "'after' for time; a place is allowed in PLACES" },
  { "%f[%a]beside%f[%A]", "'next to' or 'in addition to'; a place is allowed in PLACES" },
  { "%f[%a]so many%f[%A]", "say how many" },
  { "%f[%a]is told%f[%A]", "'gets', 'reads' or 'receives'" },
  { "%f[%a]goes on%f[%A]", "'continues'" },
  { "%f[%a]lets go%f[%A]", "'frees' or 'releases'" },
  { "%f[%a]nothing but%f[%A]", "'only'" },
  { "%f[%a]no %a+ but%f[%A]", "'only'" },
}

-- Rates are "per second", "per parameter", "per step". These words before "a second" make it a rate.
local RATED = { "bytes", "byte", "times", "seconds", "milliseconds", "microseconds", "s", "ms", "kib", "mib", "gib",
  "kb", "mb", "gb", "tokens", "rows", "samples", "flops", "flop", "operations", "numbers", "parameters", "messages",
  "copies", "micro-batches", "once", "twice", "steps", "hour" }
local RATES = { "a second", "a parameter", "a step", "a token", "a row" }

-- Allowed cases, in which a phrase is correct. A test finds cases that no file contains any more.
local PLACES = {}

local BEGINNINGS = { "What ", "Who ", "Of " }

---@param path string
---@return string[] lines
local function lines_of(path)
  local lines = {}
  for line in io.lines(paths.root .. "/" .. path) do lines[#lines + 1] = line end
  return lines
end

--- Returns the paragraphs of a page without its listings: their text on one line, with code as one word, and their
--- first line's number.
---@return { text: string, line: integer, table: boolean }[] paragraphs
local function paragraphs(path)
  local out, open, fence, blank = {}, nil, false, true
  for number, line in ipairs(lines_of(path)) do
    if line:find "^%s*```" then
      fence, open = not fence, nil
    elseif fence or line:find "^%s*$" or line:find "^#" or blank and line:find "^    " then
      open = nil
    elseif line:find "^%s*|" then
      out[#out + 1] = { text = line, line = number, table = true }
      open = nil
    else
      if line:find "^%s*[-*] " or line:find "^%s*%d+%. " then open = nil end
      if not open then
        open = { text = "", line = number, table = false }
        out[#out + 1] = open
      end
      open.text = open.text .. line:gsub("^%s*[-*] ", ""):gsub("^%s+", "") .. " "
    end
    blank = line:find "^%s*$" ~= nil or blank and line:find "^    " ~= nil
  end
  for _, p in ipairs(out) do
    p.text = p.text:gsub("`[^`]*`", "CODE"):gsub("%[([^%]]*)%]%(([^%)]*)%)", "%1"):gsub("%*%*", ""):gsub("%s+", " ")
  end
  return out
end

--- Returns the comments of a Lua or C file. Adjacent lines form one text.
---@return { text: string, line: integer }[] comments
local function comments(path)
  local out, open = {}, nil
  local lua = path:find "%.lua$" ~= nil
  local inside = false                                        -- inside a C comment that has not ended
  for number, line in ipairs(lines_of(path)) do
    local text, whole
    if lua then
      text = line:match "^%s*%-%-+%s*(.*)"
      whole = text ~= nil
      text = text or line:match "%s%-%- (.*)"
    elseif inside then
      text, whole = line:gsub("^%s*%*?%s*", ""), true
    else
      text = line:match "^%s*/[/*]+<?%s*(.*)"
      whole = text ~= nil
      text = text or line:match "%s/[/*]+<?%s+(.*)"
    end
    if not lua and text then
      inside = (inside or line:find("/*", 1, true) ~= nil) and not line:find("*/", 1, true)
      text = text:gsub("%s*%*/.*", "")
    end
    if not text then
      open = nil
    elseif open and whole and not text:find "^@" then
      open.text = open.text .. " " .. text
    else
      open = { text = text, line = number }
      out[#out + 1] = open
      if not whole then open = nil end
    end
  end
  for _, c in ipairs(out) do c.text = c.text:gsub("`[^`]*`", "CODE"):gsub("%s+", " ") end
  return out
end

local met = {}                                                -- allowed cases that occur in a file

--- Returns the phrases in a text that match PHRASES and RATES, outside the allowed cases.
---@return string[] complaints
local function phrases_of(text)
  local found = {}
  for _, allowed in ipairs(PLACES) do
    local from, to = text:find(allowed, 1, true)
    while from do
      met[allowed] = true
      text = text:sub(1, from - 1) .. "CODE" .. text:sub(to + 1)
      from, to = text:find(allowed, from + 4, true)
    end
  end
  text = text:lower()
  for _, phrase in ipairs(PHRASES) do
    local hit = text:match(phrase[1])
    if hit then found[#found + 1] = ("'%s': %s"):format(hit, phrase[2]) end
  end
  for _, rate in ipairs(RATES) do
    for word in text:gmatch("([%a-]+) " .. rate .. "%f[^%w-]") do
      for _, unit in ipairs(RATED) do
        if word == unit then found[#found + 1] = ("'%s %s': 'per %s'"):format(word, rate, rate:sub(3)) end
      end
    end
  end
  return found
end

--- Returns sentences of more than WORDS words. A dash or a sign alone is not a word.
---@return string[] complaints
local function long_sentences(text)
  local found = {}
  for sentence in (text:gsub("([.!?][\"')]*) ", "%1\n") .. "\n"):gmatch "([^\n]+)\n" do
    local n = 0
    for word in sentence:gmatch "%S+" do n = n + (word:find "%w" and 1 or 0) end
    if n > WORDS then found[#found + 1] = ("%d words: %s ..."):format(n, sentence:sub(1, 60)) end
  end
  return found
end

-- Returns the lines that a shell command prints in the root of the tree.
local function printed(command)
  local list = {}
  local p = assert(io.popen(("cd '%s' && %s | sort"):format(paths.root, command)))
  for path in p:lines() do list[#list + 1] = path end
  p:close()
  return list
end

local function files()
  return printed(("find %s -name '*.lua' -o -name '*.[ch]' -o -name '*.cu' -o -name '*.cpp'"):format(FOLDERS))
end

local function pages()
  local list = {}
  for _, path in ipairs(printed("ls *.md docs/*.md && find examples spec tools -name '*.md'")) do
    if not GENERATED[path] then list[#list + 1] = path end
  end
  assert(#list > 40, #list)
  return list
end

describe("the language of", function()
  local found = {}
  local function complain(path, line, list)
    for _, reason in ipairs(list) do found[#found + 1] = ("%s:%d: %s"):format(path, line, reason) end
  end
  before_each(function() found = {} end)

  it("pages is English, in sentences of at most 35 words", function()
    for _, path in ipairs(pages()) do
      for _, p in ipairs(paragraphs(path)) do
        complain(path, p.line, phrases_of(p.text))
        if not p.table then complain(path, p.line, long_sentences(p.text)) end
      end
    end
    assert.same({}, found)
  end)

  it("comments is English, and they begin with their subject", function()
    for _, path in ipairs(files()) do
      for _, c in ipairs(comments(path)) do
        complain(path, c.line, phrases_of(c.text))
        for _, word in ipairs(BEGINNINGS) do
          if c.text:sub(1, #word) == word then complain(path, c.line, { ("begins with '%s'"):format(word) }) end
        end
      end
    end
    assert.same({}, found)
  end)

  it("allowed cases is in a page or a comment", function()
    for _, allowed in ipairs(PLACES) do
      if not met[allowed] then found[#found + 1] = allowed end
    end
    assert.same({}, found)
  end)
end)

describe("the check of language", function()
  it("finds words, rates and long sentences, and lets true cases pass", function()
    assert.same({ "'behind': " .. PHRASES[1][2] }, phrases_of "It is made behind the call.")
    assert.same({ "'bytes a parameter': 'per parameter'" }, phrases_of "14 bytes a parameter")
    assert.same({}, phrases_of "14 bytes per parameter in a step; a parameter has a second gradient")
    assert.equal(1, #long_sentences(("word "):rep(36) .. "."))
    assert.same({}, long_sentences(("word "):rep(35) .. ". Another one."))
  end)
end)
