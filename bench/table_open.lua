-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/table_open.lua [--mib N] [--folder FOLDER]: writes a file of JSON lines of N MiB and compares opening
-- it as a table, without and with its index, with `wc -l`, which reads the file once; then reads random rows. Opening
-- should take at most 1.2 times as long as wc, and a row 1 ms.
local ps = require "ps"
local line = require "ps.core.command_line"

local parser = require "argparse" ("bench/table_open.lua", "Measures the opening of a large file of JSON lines.")
line.whole(parser:option("--mib", "size of the file", "2048"), 1)
parser:option("--folder", "where the file is written", os.getenv "TMPDIR" or "/tmp")
local args = parser:parse()

local now = ps.now

local path = ("%s/table-open-%d.jsonl"):format(args.folder, os.time())
local f = assert(io.open(path, "wb"))
local block = {}
for i = 1, 2000 do
  block[i] = ('{"messages":[{"role":"user","content":"%s"},{"role":"assistant","content":"%s"}]}\n'):format(
    ("question "):rep(1 + i * 37 % 40), ("answer "):rep(1 + i * 53 % 90))
end
local text = table.concat(block)
for _ = 1, math.ceil(args.mib * 2 ^ 20 / #text) do assert(f:write(text)) end
f:close()

local function timed(fn)
  local best = math.huge
  for _ = 1, 3 do
    local from = now()
    fn()
    best = math.min(best, now() - from)
  end
  return best
end

local wc = timed(function() assert(os.execute(("wc -l '%s' >/dev/null"):format(path)) == 0) end)
local rows
local first = timed(function()
  os.remove(path .. ".rows")
  rows = ps.data.table(path)
end)
local again = timed(function() rows = ps.data.table(path) end)
math.randomseed(1)
local from = now()
for _ = 1, 1000 do assert(rows[math.random(#rows)].messages) end
local row = (now() - from) / 1000
print(("%d rows of %d MiB: wc -l %.3f s; opening %.3f s (%.2f times), with the index %.4f s; a random row %.3f ms")
  :format(#rows, args.mib, wc, first, first / wc, again, 1000 * row))
os.remove(path)
os.remove(path .. ".rows")
