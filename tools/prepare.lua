-- SPDX-License-Identifier: BSD-3-Clause
-- Converts text and JSON lines to token shards (llm.c's .bin) on all cores:
--   psluajit tools/prepare.lua --tokenizer DIR --out data/train corpus.txt more.jsonl
-- This command writes data/train_000000.bin and so on. A text file is one document. In a .jsonl, .ndjson or .json file,
-- each line is an object whose field `text` (or the field that --field names) is a document. Each document is preceded
-- by the end-of-text token (--mark). Special tokens in documents are encoded as text. The shards do not depend on
-- --threads. An existing shard is replaced when the new shard is complete. A file that is not valid UTF-8 is an error,
-- unless --lossy is set.
local ps = require "ps"
local argparse = require "argparse"
local ffi = require "ffi"
local lfs = require "lfs"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local C, check = ps.C, ps.check

local parser = argparse("psluajit prepare", "Converts text and JSON lines to token shards.")
parser:argument("files", "text files, or JSON lines (.jsonl, .ndjson, .json)"):args "+"
parser:option("--tokenizer", "a Hugging Face folder, or one of its tokenizer files"):count(1)
parser:option("--out", "prefix of the shards' names: OUT_000000.bin ..."):count(1)
parser:option("--field", "the field of a line's object that has the document", "text")
parser:option("--mark",
  "the token before each document, or none (default: the tokenizer's eos_token, else its sep_token)")
whole(parser:option("--shard-tokens", "tokens in a shard", "100000000"), 1)
whole(parser:option("--threads", "number of threads (default: that of the kernels)"), 1)
parser:flag("--lossy", "replace bytes that are not valid UTF-8 by U+FFFD (default: they are an error)")
parser:flag("--json", "print one JSON object as the last line")
local args = command_line.parse(parser)

local function mark_of(tok)
  if args.mark == "none" then return -1 end
  local name = args.mark or tok.eos_token or tok.sep_token
  if not name then
    error(("%s has neither eos_token nor sep_token to mark the beginning of documents: pass --mark TOKEN, or "
      .. "--mark none for documents without a mark"):format(args.tokenizer), 0)
  end
  return tok:token_to_id(name) or error(("the tokenizer has no token '%s' (--mark)"):format(name), 0)
end

local function name_of(shard) return ("%s_%06d.bin"):format(args.out, shard) end

-- Returns a writer for a sequence of shards.
local function writer(width)
  local self = { shards = 0, tokens = 0, room = 0 }
  function self.close()
    if not self.handle then return end
    local handle = self.handle
    self.handle = nil
    check(C.ps_tokw_commit(handle))
    C.ps_tokw_free(ffi.gc(handle, nil))
  end
  function self.append(ids, n)
    local at = 0
    while at < n do
      if self.room == 0 then
        self.close()
        local out = ffi.new("ps_tokw *[1]")
        check(C.ps_tokw_new(name_of(self.shards), width, out))
        self.handle = ffi.gc(out[0], C.ps_tokw_free)
        self.shards, self.room = self.shards + 1, args.shard_tokens
      end
      local now = math.min(n - at, self.room)
      check(C.ps_tokw_append(self.handle, ids + at, now))
      at, self.room, self.tokens = at + now, self.room - now, self.tokens + now
    end
  end
  return self
end

-- Warns about shards that an older run left in the folder, with higher numbers than the shards of this run. A program
-- that reads all OUT_*.bin files would also read these shards.
local function tell_older(count)
  local last = count
  while lfs.attributes(name_of(last), "mode") do last = last + 1 end
  if last == count then return end
  io.stderr:write(("prepare: %s%s of an older run: remove %s, unless all files of that name are to be read\n"):format(
    name_of(count), last - count > 1 and " to " .. name_of(last - 1) .. " are" or " is",
    last - count > 1 and "them" or "it"))
end

local function run()
  local began = ps.now()
  if args.shard_tokens >= 2 ^ 31 then error("--shard-tokens: a shard has fewer than 2^31 tokens", 0) end
  local tok = ps.tokenizer.from_pretrained(args.tokenizer)
  local mark, bytes = mark_of(tok), 0
  local shards = writer(tok.vocab_size > 65536 and 4 or 2)
  local one = ffi.new("int32_t[1]", mark)
  local ok, problem = pcall(function()
    for _, path in ipairs(args.files) do
      local lines = path:match("%.jsonl$") or path:match("%.ndjson$") or path:match("%.json$")
      if not lines and mark >= 0 then shards.append(one, 1) end
      bytes = bytes + tok:encode_file(path, shards.append, { field = lines and args.field or nil, mark = lines and mark,
        threads = args.threads or ps.threads(), lossy = args.lossy })
    end
    shards.close()
  end)
  if not ok then
    tell_older(shards.handle and shards.shards - 1 or shards.shards)    -- the last shard is not complete
    error(problem, 0)
  end
  local seconds = ps.now() - began
  if args.json then
    print(require("cjson").encode { tokens = shards.tokens, shards = shards.shards, bytes = bytes, seconds = seconds })
  else
    local n = shards.shards
    print(("%d tokens of %d bytes in %d shard%s, %.1f s (%.1f MB/s)%s%s"):format(shards.tokens, bytes, n,
      n == 1 and "" or "s", seconds, bytes / 1e6 / seconds, n > 0 and ": " .. name_of(0) or "",
      n > 1 and " to " .. name_of(n - 1) or ""))
  end
  tell_older(shards.shards)
end

command_line.try("prepare", run)
