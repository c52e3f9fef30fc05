-- SPDX-License-Identifier: BSD-3-Clause
-- Compares the speed of GPT-2's tokenizer in psluajit with tiktoken. Each run is a new process that first reads the
-- tokenizer's files:
--   psluajit bench/tokenize_speed.lua DIR --text corpus.txt --rounds 5
-- DIR has vocab.json or encoder.json, and merges.txt or vocab.bpe. There are four texts of 1 MiB each: the text of
-- --text, random UTF-8, one repeated letter, and letters without blanks. In every round, one process runs for each text
-- and each program. The figures are the best of the rounds, in wall-clock seconds on one thread. The last line is one
-- JSON object:
--   NAME_s, NAME_tiktoken_s   seconds of psluajit and of tiktoken
--   NAME_ratio                tiktoken's seconds divided by psluajit's seconds
--   letter_rate, solid_rate   bytes per second of the text of one letter and of the text without blanks, divided by
--                             bytes per second of --text. The seconds for an empty text are first subtracted from all
--                             three times.
-- The peer is bench/peers/tokenize_tiktoken.py with the Python of PS_TORCH_PYTHON or python3. Its figures are absent if
-- tiktoken is not installed.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/tokenize_speed.lua", "Measures tokenizing from a cold process against tiktoken.")
parser:argument("tokenizer", "a folder with GPT-2's vocabulary and merges")
parser:option("--text", "prose or source code", "docs/memory.md")
whole(parser:option("--rounds", "rounds of all texts and programs in turn", "5"), 1)
parser:flag("--no-peers", "leave tiktoken out")
local args = command_line.parse(parser)

local MIB = 2 ^ 20

-- Returns a text of characters that have 1 to 4 bytes. All four sizes are equally frequent.
local function random_utf8()
  math.randomseed(1)
  local out, n = {}, 0
  local function tail() return string.char(math.random(0x80, 0xbf)) end
  while n < MIB do
    local c
    local kind = math.random(4)
    if kind == 1 then c = string.char(math.random(0x20, 0x7e))
    elseif kind == 2 then c = string.char(math.random(0xc2, 0xdf)) .. tail()
    elseif kind == 3 then c = string.char(math.random(0xe1, 0xec)) .. tail() .. tail()
    else c = string.char(0xf0, math.random(0x90, 0x9f)) .. tail() .. tail() end
    out[#out + 1], n = c, n + #c
  end
  return table.concat(out)
end

local function letters()
  math.randomseed(2)
  local out = {}
  for i = 1, MIB do out[i] = string.char(math.random(97, 122)) end
  return table.concat(out)
end

local file = assert(io.open(args.text, "rb"))
local TEXTS = { { "empty", "" }, { "text", file:read("*a") }, { "random", random_utf8() }, { "letter", ("a"):rep(MIB) },
  { "solid", letters() } }
file:close()

local python = os.getenv "PS_TORCH_PYTHON" or "python3"
local folder = (arg[0]:match("^(.*)/[^/]*$") or ".")
local PROGRAMS = { { "", ("'%s' '%s/tokenize.lua' '%s' --count"):format(paths.exe, folder, args.tokenizer) } }
if not args.no_peers and os.execute(("'%s' -c 'import tiktoken' 2>/dev/null"):format(python)) == 0 then
  PROGRAMS[2] = { "_tiktoken", ("'%s' '%s/peers/tokenize_tiktoken.py' '%s'"):format(python, folder, args.tokenizer) }
end

-- Returns the seconds that a process takes, and the number of tokens that it prints.
local function run(command, path)
  local began = ps.now()
  local p = assert(io.popen(("OMP_NUM_THREADS=1 %s < '%s'"):format(command, path)))
  local count = tonumber(p:read("*l"))
  p:close()
  return ps.now() - began, count or error("it failed: " .. command)
end

local path, best = os.tmpname(), {}
for _ = 1, args.rounds do
  for _, text in ipairs(TEXTS) do
    local out = assert(io.open(path, "wb"))
    out:write(text[2])
    out:close()
    local counts = {}
    for i, program in ipairs(PROGRAMS) do
      local name = text[1] .. program[1] .. "_s"
      local seconds, count = run(program[2], path)
      best[name], counts[i] = math.min(best[name] or math.huge, seconds), count
    end
    if counts[2] and counts[1] ~= counts[2] then error(("%s: %d tokens, tiktoken has %d"):format(text[1], counts[1],
      counts[2])) end
  end
end
os.remove(path)

local function rate(name, bytes) return bytes / (best[name .. "_s"] - best.empty_s) end
for _, text in ipairs(TEXTS) do
  local peer = best[text[1] .. "_tiktoken_s"]
  if peer then best[text[1] .. "_ratio"] = peer / best[text[1] .. "_s"] end
  print(("%-8s %8.3f s%s"):format(text[1], best[text[1] .. "_s"],
    peer and ("   tiktoken %.3f s, %.1f times"):format(peer,
    best[text[1] .. "_ratio"]) or ""))
end
local prose = rate("text", #TEXTS[2][2])
best.letter_rate, best.solid_rate = rate("letter", MIB) / prose, rate("solid", MIB) / prose
best.mb_per_s = prose / 1e6
print(cjson.encode(best))
