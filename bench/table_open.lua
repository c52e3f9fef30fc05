-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/table_open.lua [--mib N] [--folder FOLDER]: writes a file of N MiB of JSON lines. Compares the time to
-- open the file as a table, without and with its index, with the time of `wc -l`, which reads the file once. Then reads
-- random rows. The table and wc are measured alternately. Both are measured with the file in the page cache (warm), and
-- with the file not in the page cache (cold, after POSIX_FADV_DONTNEED). Opening should take at most 1.2 times as long
-- as wc, and reading a row should take at most 1 ms. Times are from the fastest round. The last line is one JSON
-- object: warm and cold (each with wc_s, open_s and the ratio over_wc), with_index_s, row_ms, rows and mib.
local ps = require "ps"
local cjson = require "cjson"
local line = require "ps.core.command_line"

local parser = require "argparse" ("bench/table_open.lua", "Measures the opening of a large file of JSON lines.")
line.whole(parser:option("--mib", "size of the file", "2048"), 1)
line.whole(parser:option("--rounds", "measurements of each kind", "3"), 1)
parser:option("--folder", "where the file is written", os.getenv "TMPDIR" or "/tmp")
local args = line.parse(parser)

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

local function shell(command) assert(os.execute(command) == 0, command) end

-- Writes the file to the disk and removes it from the page cache.
local function evict() shell(("dd if='%s' iflag=nocache count=0 status=none && sync '%s'"):format(path, path)) end

local rows
local function wc() shell(("wc -l '%s' >/dev/null"):format(path)) end
local function open()
  os.remove(path .. ".rows")
  rows = ps.data.table(path)
end
local function timed(fn, cold)
  if cold then evict() end
  local from = now()
  fn()
  return now() - from
end

local result = { mib = args.mib }
for _, cold in ipairs { false, true } do
  local best = { math.huge, math.huge }
  for _ = 1, args.rounds do
    for i, fn in ipairs { wc, open } do best[i] = math.min(best[i], timed(fn, cold)) end
  end
  print(("%s: wc -l %.3f s; opening %.3f s, %.2f times"):format(cold and "cold" or "warm", best[1], best[2],
    best[2] / best[1]))
  result[cold and "cold" or "warm"] = { wc_s = best[1], open_s = best[2], over_wc = best[2] / best[1] }
end
local again = timed(function() rows = ps.data.table(path) end)
math.randomseed(1)
local from = now()
for _ = 1, 1000 do assert(rows[math.random(#rows)].messages) end
local row = (now() - from) / 1000
print(("%d rows of %d MiB: opening with the index %.4f s; a random row %.3f ms"):format(#rows, args.mib, again,
  1000 * row))
result.rows, result.with_index_s, result.row_ms = #rows, again, 1000 * row
print(cjson.encode(result))
os.remove(path)
os.remove(path .. ".rows")
