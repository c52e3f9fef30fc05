-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/dist.lua [collectives | latency | watch | checkpoint | zero | merge] [--ranks N] [--mib N]
--   [--rounds N] [--folder PATH]
-- Starts processes on this machine and prints one JSON line. If no section is named, all sections run, and the main
-- figures of each section are printed. This takes some minutes, 6 GB of memory, and 8 GB of disk space in --folder. The
-- sections are:
--   collectives   an all-gather and an all-reduce of 64 MiB. The engine's calls, which include checks between ranks,
--                 alternate with Gloo's own calls in the same processes. Prints the median seconds over the rounds, and
--                 the engine's rate divided by Gloo's rate.
--   latency       the seconds of an all-reduce of 4 KiB. The engine's calls and Gloo's own calls alternate. Both calls
--                 are made 1000 * --rounds times. Prints the engine's median divided by Gloo's median, and the same
--                 ratio of the 99th percentiles.
--   watch         the last rank or rank 0 is stopped or killed while the other ranks are in an all-reduce. There are at
--                 least 3 ranks. With the default heartbeat, prints the seconds until all other ranks have received an
--                 error. Also prints whether all errors name the right rank.
--   checkpoint    the time that training waits for a save, and the rate of writing (dist_checkpoint.lua)
--   zero          the savings and costs of sharding; this section has options of its own (dist_zero.lua)
--   merge         the memory that merging shards needs (dist_merge.lua)
local ps = require "ps"
local paths = require "ps.paths"

if arg[1] == "zero" or arg[1] == "merge" then
  local section = table.remove(arg, 1)
  return dofile(("%s/bench/dist_%s.lua"):format(paths.root, section))
end

-- Runs each section in a separate process. Prints the main figures of all sections, under the names that the sections
-- use.
local FIGURES = {
  { "collectives --rounds 31", "all_gather_over_gloo", "all_reduce_over_gloo" },
  { "latency", "small_all_reduce_over_gloo", "small_all_reduce_p99_over_gloo" },
  { "watch", "sigkill_last_rank_s", "sigkill_rank_0_s", "sigstop_last_rank_s", "sigstop_rank_0_s", "all_name_it" },
  { "checkpoint", "stall_percent", "write_over_disk" },
  { "zero --model gpt2-medium --ranks 4", "sent_over_theory", "state_share", "peak_share" },
  { "merge", "peak_mib" },
}

local function all_sections(folder)
  local cjson, process_lib = require "cjson", require "bench.process_lib"
  local fields = {}
  for _, row in ipairs(FIGURES) do
    local section = row[1]:match "^%a+"
    local place = (section == "checkpoint" or section == "merge") and (" --folder '%s'"):format(folder) or ""
    local figures = process_lib.last_json(("'%s' '%s/bench/dist.lua' %s%s"):format(paths.exe, paths.root, row[1],
      place))
    if not figures then
      io.stderr:write(("bench/dist.lua: section %s printed no figures; its output says why\n"):format(section))
      os.exit(1)
    end
    for i = 2, #row do
      fields[#fields + 1] = ("\"%s_%s\": %s"):format(section, row[i], cjson.encode(figures[row[i]]))
    end
  end
  print("{\"bench\": \"dist\", " .. table.concat(fields, ", ") .. "}")
end

if not arg[1] or arg[1] == "--folder" then return all_sections(arg[2] or "/tmp") end

local options = { ranks = 2, mib = 64, rounds = 9, folder = "/tmp" }
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
local sections = { collectives = true, latency = true, watch = true, checkpoint = true }
if not sections[section] then
  io.stderr:write(("bench/dist.lua: no section '%s'; see the head of the file\n"):format(section))
  os.exit(1)
end

--- Starts the ranks, and waits until they have ended. After the other ranks have ended, kills the rank `stopped`,
--- because it does not end by itself.
---@param more string additional options for the ranks
---@param stopped? integer the rank that is stopped
---@return boolean ok true if each rank exited with 0 or was stopped
local function run_ranks(meeting, more, stopped)
  local lines = {}
  for rank = 0, options.ranks - 1 do
    lines[#lines + 1] = ("timeout -k 1 300 '%s' '%s' %s --rank %d --ranks %d --meeting '%s' %s & %s=\"$%s $!\""):format(
      paths.exe, arg[0], section, rank, options.ranks, meeting, more, rank == stopped and "last" or "pids",
      rank == stopped and "last" or "pids")
  end
  lines[#lines + 1] = "status=0; for p in $pids; do wait $p || status=1; done"
  if stopped then lines[#lines + 1] = ("kill -9 $(cat '%s.pid') 2>/dev/null; wait"):format(meeting) end
  lines[#lines + 1] = "exit $status"
  return os.execute(table.concat(lines, "\n")) == 0
end

local function read_once(path)
  local f = assert(io.open(path, "r"))
  local text = f:read "*a"
  f:close()
  os.remove(path)
  return text
end

local function write(path, text)
  local f = assert(io.open(path, "w"))
  f:write(text)
  f:close()
end

--- Sends `signal` to rank `victim`. Returns the seconds until the last of the other ranks received its error. Also
--- returns true if all errors named the victim.
local function time_watch(victim, signal)
  local meeting = os.tmpname()
  os.remove(meeting)
  local ok = run_ranks(meeting, ("--victim %d --signal %s"):format(victim, signal), victim)
  local began, last = tonumber(read_once(meeting .. ".begin")), 0
  for rank = 0, options.ranks - 1 do
    if rank ~= victim then
      local at, message = read_once(meeting .. "." .. rank):match("^(%S+) (.*)$")
      last = math.max(last, tonumber(at) - began)
      ok = ok and message == tostring(victim)
    end
  end
  os.remove(meeting .. ".pid")
  os.remove(meeting)
  return last, ok
end

if not options.rank and section == "watch" then
  options.ranks = math.max(options.ranks, 3)
  local parts, right = {}, true
  for _, signal in ipairs { "SIGKILL", "SIGSTOP" } do
    for name, victim in pairs { rank_0 = 0, last_rank = options.ranks - 1 } do
      local seconds, ok = time_watch(victim, signal)
      right = right and ok
      parts[#parts + 1] = ("\"%s_%s_s\": %.3f"):format(signal:lower(), name, seconds)
    end
  end
  table.sort(parts)
  print(("{\"bench\": \"dist\", \"section\": \"watch\", \"ranks\": %d, %s, \"all_name_it\": %s}"):format(
    options.ranks, table.concat(parts, ", "), tostring(right)))
  os.exit(right and 0 or 1)
elseif not options.rank then
  local meeting = os.tmpname()
  os.remove(meeting)
  local ok = run_ranks(meeting, ("--mib %d --rounds %d --folder '%s'"):format(options.mib, options.rounds,
    options.folder))
  os.remove(meeting)
  os.exit(ok and 0 or 1)
end

local group = ps.init_distributed { rank = options.rank, world_size = options.ranks, local_rank = options.rank,
  rendezvous = "file://" .. options.meeting, backend = "gloo", timeout = 60, quiet = true }

if section == "watch" then
  local unistd, signal = require "posix.unistd", require "posix.signal"
  local t = ps.ones { 2 ^ 18 }
  for _ = 1, 10 do group:all_reduce(t) end
  if options.rank == options.victim then
    os.execute "sleep 1.3"                   -- after this time, the other ranks are waiting and have received
                                             -- heartbeats from this rank
    write(options.meeting .. ".pid", unistd.getpid())
    write(options.meeting .. ".begin", ("%.6f"):format(ps.now()))
    signal.kill(unistd.getpid(), signal[options.signal])
  end
  local ok, err = pcall(group.all_reduce, group, t)
  write(options.meeting .. "." .. options.rank, ("%.6f %s"):format(ps.now(), ok and "no error" or tostring(err.rank)))
  group:close()
  return
end

if section == "latency" then
  local C, sum, raw_in, raw_sum, ours, gloo = ps.C, ps.zeros { 1024 }, ps.zeros { 1024 }, ps.zeros { 1024 }, {}, {}
  for i = -100, 1000 * options.rounds do           -- the first calls are a warm-up
    local began = ps.now()
    ps.check(C.ps_group_all_reduce(group.c, sum, C.PS_REDUCE_SUM))
    local middle = ps.now()
    ps.check(C.ps_group_raw(group.c, 1, raw_sum, raw_in))
    if i > 0 then ours[i], gloo[i] = middle - began, ps.now() - middle end
  end
  table.sort(ours)
  table.sort(gloo)
  local function at(list, share) return list[math.ceil(#list * share)] end
  if options.rank == 0 then
    print(("{\"bench\": \"dist\", \"section\": \"latency\", \"ranks\": %d, \"bytes\": 4096, \"all_reduce_us\": %.1f, "
      .. "\"gloo_all_reduce_us\": %.1f, \"small_all_reduce_over_gloo\": %.3f, \"small_all_reduce_p99_over_gloo\": "
      .. "%.3f}"):format(options.ranks, at(ours, 0.5) * 1e6, at(gloo, 0.5) * 1e6, at(ours, 0.5) / at(gloo, 0.5),
      at(ours, 0.99) / at(gloo, 0.99)))
  end
  group:close()
  return
end

if section == "checkpoint" then
  dofile((arg[0]:match("^(.*/)") or "./") .. "dist_checkpoint.lua")(group, options)
  group:close()
  return
end

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
for round = 0, options.rounds do             -- round 0 is a warm-up
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
