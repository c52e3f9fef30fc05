-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/dist.lua [collectives] [--ranks N] [--mib N] [--rounds N]
-- Starts N processes on this machine (2) and prints one JSON line from rank 0. `collectives`: seconds of an all-gather
-- and an all-reduce of 64 MiB through the engine, checks between ranks included, and of Gloo's own in the same
-- processes, in turn; medians of the rounds; and the engine's rate over Gloo's.
local ps = require "ps"
local paths = require "ps.paths"

local options = { ranks = 2, mib = 64, rounds = 9 }
local section = "collectives"
do
  local i = 1
  while arg[i] do
    local name = arg[i]:match("^%-%-(%w+)$")
    if name then
      options[name] = tonumber(arg[i + 1]) or arg[i + 1]
      i = i + 2
    else
      section = arg[i]
      i = i + 1
    end
  end
end
if section ~= "collectives" then
  io.stderr:write(("bench/dist.lua: no section '%s'; there is collectives\n"):format(section))
  os.exit(1)
end

if not options.rank then                     -- the parent: starts the ranks, which end by themselves
  local meeting, commands = os.tmpname(), {}
  os.remove(meeting)
  for rank = 0, options.ranks - 1 do
    commands[#commands + 1] = ("timeout 300 '%s' '%s' %s --rank %d --ranks %d --mib %d --rounds %d --meeting '%s' & "
      .. "pids=\"$pids $!\""):format(paths.exe, arg[0], section, rank, options.ranks, options.mib, options.rounds,
      meeting)
  end
  local failed = os.execute(table.concat(commands, "\n")
    .. "\nstatus=0; for p in $pids; do wait $p || status=1; done; exit $status")
  os.remove(meeting)
  os.exit(failed == 0 and 0 or 1)
end

local group = ps.init_distributed { rank = options.rank, world_size = options.ranks, local_rank = options.rank,
  rendezvous = "file://" .. options.meeting, backend = "gloo", timeout = 60, quiet = true }
local count = options.mib * 2 ^ 20 / 4
local share = math.floor(count / options.ranks)
local part, whole, sum = ps.ones { share }, ps.zeros { share * options.ranks }, ps.ones { count }
local raw_in, raw_sum = ps.ones { count }, ps.zeros { count }

local function timed(fn)
  group:barrier()
  local start = ps.now()
  fn()
  group:barrier()
  return ps.now() - start
end

local cases = {
  { "all_gather", function() group:all_gather(whole, part) end },
  { "gloo_all_gather", function() ps.check(ps.C.ps_group_raw(group.c, 0, whole, part)) end },
  { "all_reduce", function() group:all_reduce(sum) end },
  { "gloo_all_reduce", function() ps.check(ps.C.ps_group_raw(group.c, 1, raw_sum, raw_in)) end },
}
local seconds = {}
for round = 0, options.rounds do             -- the first is not counted
  for i, case in ipairs(cases) do
    seconds[i] = seconds[i] or {}
    seconds[i][round] = timed(case[2])
  end
end

if options.rank == 0 then
  local median, parts = {}, {}
  for i, case in ipairs(cases) do
    seconds[i][0] = nil
    table.sort(seconds[i])
    median[case[1]] = seconds[i][math.floor((options.rounds + 1) / 2)]
    parts[#parts + 1] = ("\"%s_s\": %.6f"):format(case[1], median[case[1]])
  end
  print(("{\"bench\": \"dist\", \"section\": \"collectives\", \"ranks\": %d, \"bytes\": %d, %s, "
    .. "\"all_gather_over_gloo\": %.3f, \"all_reduce_over_gloo\": %.3f}"):format(options.ranks, count * 4,
    table.concat(parts, ", "), median.gloo_all_gather / median.all_gather, median.gloo_all_reduce / median.all_reduce))
end
group:close()
