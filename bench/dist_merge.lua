-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/dist.lua merge [--parameters 1.56e9] [--ranks 4] [--folder /tmp]
-- Writes the shards of an invented model in bf16, and merges them with tools/merge.lua in another process. Prints the
-- peak memory of this process, and the seconds that it took. Then removes the shards and the merged file. The shards
-- together have 2 bytes per parameter, like the merged file.
local ps = require "ps"
local paths = require "ps.paths"
local lfs = require "lfs"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/dist.lua merge", "Measures the memory of merging shards.")
whole(parser:option("--parameters", "of the model", "1.56e9"), 1)
whole(parser:option("--ranks", "shards", "4"), 1)
parser:option("--folder", "where to write", "/tmp")
local args = command_line.parse(parser)

local ROW = 1600  -- width of the tensors, as in GPT-2 XL, whose largest tensor is the embedding with 80 M elements
local folder = ("%s/psluajit-bench-merge"):format(args.folder)
lfs.mkdir(folder)
-- All blocks have the same values, but the file stores each block separately.
local function write_shard(rank, rows)
  local state, i, block = {}, 0, ps.zeros({ 6400, ROW }, { dtype = "bf16" })
  if rank == 0 then
    state["wte.weight"] = ps.zeros({ 50257, ROW }, { dtype = "bf16" })
    rows = rows - 50257
  end
  while rows > 0 do
    local n = math.min(rows, 6400)
    state[("h.%d.r%d"):format(i, rank)] = block:narrow(0, 0, n):clone()
    rows, i = rows - n, i + 1
  end
  ps.save(state, ("%s/checkpoint-%d.pt"):format(folder, rank))
end

for rank = 0, args.ranks - 1 do
  write_shard(rank, math.floor(args.parameters / args.ranks / ROW))
  for _ = 1, 2 do collectgarbage() end
end

local report = folder .. "/status"
local began = ps.now()
local script = ("arg = { [0] = \"merge.lua\", \"--pattern=%s/checkpoint-*.pt\", \"--num=%d\" } "
  .. "dofile \"%s/tools/merge.lua\" local f = io.open(\"/proc/self/status\") local t = f:read \"*a\" f:close() "
  .. "f = io.open(\"%s\", \"w\") f:write(t) f:close()"):format(folder, args.ranks, paths.root, report)
local ok = os.execute(("'%s' -e '%s' 1>&2"):format(paths.exe, script))
local seconds, peak = ps.now() - began, nil
local f = io.open(report)
if f then
  peak = tonumber(f:read("*a"):match("VmHWM:%s*(%d+)"))
  f:close()
end
for name in lfs.dir(folder) do if name:sub(1, 1) ~= "." then os.remove(folder .. "/" .. name) end end
lfs.rmdir(folder)
if ok ~= 0 or not peak then
  io.stderr:write("bench/dist.lua merge: merging failed; its output says why\n")
  os.exit(1)
end
print(("{\"bench\": \"dist\", \"section\": \"merge\", \"parameters\": %.4g, \"ranks\": %d, \"peak_mib\": %.1f, "
  .. "\"seconds\": %.1f}"):format(args.parameters, args.ranks, peak / 1024, seconds))
