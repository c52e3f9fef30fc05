-- SPDX-License-Identifier: BSD-3-Clause
-- Draws from a seed the settings of a job and the faults in each life of the job. Also contains the table of faults,
-- which says how a life may end after each fault. The same seed draws the same plan on every machine.
local C = require("ps.core.ffi").C

local draw = {}

---@class ps.faults.Event
---@field kind string         the name of a row of KINDS
---@field life integer        1 or 2; the last life of a run has no faults
---@field rank integer
---@field text? string        the event's text in PS_FAULT_PLAN, or nil if run.lua causes the fault (late, twice)
---@field seconds? number     how many seconds a rank starts late

---@class ps.faults.Plan
---@field seed integer
---@field job table           the settings for tools/faults/job.lua
---@field begins "new"|"saved" "saved" if life 1 continues from a checkpoint of a run without faults
---@field off string[]        the kinds of faults that this seed switched off
---@field events ps.faults.Event[]
---@field lives integer       number of lives with faults

-- Numbers of calls in a life without faults, by rank. A key such as `write/save` names a door and a class of files
-- (src/faults/faults.h).
---@alias ps.faults.Calls table<integer, table<string, integer>>

---@class ps.faults.Profile
---@field new ps.faults.Calls     calls in a life that begins without a checkpoint
---@field saved ps.faults.Calls   calls in a life that continues from a checkpoint

-- Returns a random generator: Lehmer's generator with Park and Miller's later multiplier. The generator is small, and
-- no other code shares its state. The generators of successive seeds begin in unrelated states.
local function random(text)
  local state = tonumber(C.ps_xxh3(text, #text) % 2147483646) + 1
  local function next_number()
    state = state * 48271 % 2147483647
    return state / 2147483647
  end
  for _ = 1, 8 do next_number() end
  local r = { next = next_number }
  function r.int(low, high) return low + math.floor(next_number() * (high - low + 1)) end
  function r.pick(list) return list[r.int(1, #list)] end
  function r.chance(p) return next_number() < p end
  --- Returns a number from 0 to `most`. The logarithm of the number plus 1 is uniformly distributed, so that the first
  --- few calls are hit as often as the many later calls.
  function r.early(most) return math.floor(math.exp(next_number() * math.log(most + 1))) - 1 end
  return r
end

-- Lower bounds for the number of calls through doors that are not file doors. Every life makes at least as many calls.
-- The profile's numbers are exact only for file calls. The numbers of socket and thread calls differ between runs, so
-- plans use these bounds instead of the profile's numbers (most_calls).
local CALLS = { send = 250, recv = 450, alloc = 1600, clock = 3, ["end"] = 1 }

-- Patterns of the words that follow a lost rank's number in an error. The rank's place can be between the number and
-- the words, in brackets.
draw.LOST = { "[^\n]- died:", "[^\n]- failed", "[^\n]- gave up:", "[^\n]- is silent for", "[^\n]- did not ",
  "[^\n]- hung up", "[^\n]- ended", "[^\n]- left", "[^\n]- broke in ", "[^\n]- do not arrive", "[^\n]- has not come",
  " sent nothing within", " took nothing within", "[^\n]- does not answer", "[^\n]- could not connect to",
  " closed the connection", " could not take part", ": cannot ", " running, and does it" }
local LOST_RANK = {}
for i, verb in ipairs(draw.LOST) do LOST_RANK[i] = "rank %d+" .. verb end

-- The texts of errno values in messages.
local WORDS = { EIO = "Input/output error", ENOSPC = "No space left on device", EDQUOT = "Disk quota exceeded",
  EMFILE = "Too many open files", EACCES = "Permission denied", EROFS = "Read%-only file system" }

-- The weight with which each class of file calls is drawn. The weight does not depend on the number of calls of the
-- class. Classes that are not listed have weight 0, because their number of calls differs between runs. An example is
-- the class of opening `other` files.
local WEIGHTS = { ["read/save"] = 4, ["write/save"] = 4, ["read/chunk"] = 4, ["write/chunk"] = 4, ["map/save"] = 3,
  ["sync/save"] = 2, ["sync/folder"] = 3, ["sync/latest"] = 4, ["sync/index"] = 1, ["rename/save"] = 3,
  ["rename/latest"] = 3, ["rename/index"] = 1, ["write/latest"] = 3, ["write/index"] = 1, ["read/latest"] = 2,
  ["read/index"] = 2, ["read/log"] = 1, ["write/log"] = 1, ["open/save"] = 2, ["open/index"] = 1, ["open/latest"] = 1,
  ["open/folder"] = 1, ["open/log"] = 1, ["space/save"] = 2, ["space/index"] = 1, ["space/latest"] = 1,
  ["space/chunk"] = 1, ["remove/save"] = 1, ["remove/index"] = 1, ["mkdir/save"] = 1, ["sync/log"] = 1 }
local NAMES = {}
for name in pairs(WEIGHTS) do NAMES[#NAMES + 1] = name end
table.sort(NAMES)

-- Rounds a number of calls down to two significant bits, because the number of read-ahead calls of the disk tier varies
-- by a few calls between runs.
local function rounded(n)
  local unit = 1
  while n >= 4 * unit do unit = unit * 2 end
  return math.floor(n / unit) * unit
end

-- Returns the approximate number of calls that a life makes at a door that is not a file door. The number is computed
-- from the settings and from the exact numbers of file calls, so it is the same in every run.
local function most_calls(door, where)
  local job, calls, many = where.job, where.calls, where.job.ranks > 1
  if door == "clock" and not job.config.csv_monitor then return 0 end
  if door == "connect" then return 2 end
  if door == "accept" then return where.rank == 0 and 4 or 0 end
  if CALLS[door] then return CALLS[door] end
  local chunks = rounded(calls["read/chunk"] or 0) + rounded(calls["write/chunk"] or 0)
  local threads = (job.disk_threads or 0) > 0
  if door == "lock" then return 2000 + (many and 3000 or 0) + chunks * (threads and 15 or 40) end
  local waits = (many and 10 or 4) + math.floor(chunks * (threads and 1.3 or 0.5))
  if door == "wait" then return waits end
  local files = 0
  for _, name in ipairs(NAMES) do files = files + (name:find "/chunk" and 0 or calls[name] or 0) end
  return files + chunks + waits + (many and CALLS.send + CALLS.recv or 0)
end

-- Returns the classes of files that match `pattern` and for which the life makes a call at one of `doors`.
local function classes_of(calls, doors, pattern)
  local list, sum = {}, 0
  for _, name in ipairs(NAMES) do
    local door, class = name:match "^(%l+)/(%l+)$"
    local n = calls[name] or 0
    if class == "chunk" then n = rounded(n) end
    if n > 0 and doors[door] and (not pattern or class:find(pattern)) then
      sum = sum + WEIGHTS[name]
      list[#list + 1] = { name = name, n = n, upto = sum }
    end
  end
  return list, sum
end

-- Draws a call number below n: any of the numbers, one of the first numbers, or one of the last numbers.
local function call_of(r, n)
  local how = r.next()
  if how < 0.6 then return r.int(0, n - 1) end
  local early = math.min(r.early(n), n - 1)
  return how < 0.8 and early or n - 1 - early
end

local function set(list)
  local all = {}
  for _, name in ipairs(list) do all[name] = true end
  return all
end

local function contains(list, name)
  for _, other in ipairs(list) do if other == name then return true end end
  return false
end

local FILE_DOORS = set { "open", "read", "write", "sync", "rename", "space", "remove", "mkdir", "map" }

local function text_of(door, nth, count, action)
  return { text = ("%s@%d%s=%s"):format(door, nth, count and count > 1 and "+" .. count or "", action) }
end

-- Returns an event of PS_FAULT_PLAN at a random call that the life makes at one of `doors`, a list of names. Returns
-- nil if the life makes no such call. `where` is { r, job, rank, calls }, where `calls` are the numbers of calls of the
-- rank. A file door stands for all its classes of files, and each class has its own weight. Other doors have weight 4.
local function at(where, doors, action, count, pattern)
  local r, others, files = where.r, {}, {}
  for _, door in ipairs(doors) do
    if FILE_DOORS[door] then files[door] = true
    elseif where.job.ranks > 1 or not (door == "send" or door == "recv") then others[#others + 1] = door end
  end
  local list, sum = classes_of(where.calls, files, pattern)
  for _, door in ipairs(others) do
    local n = most_calls(door, where)
    if n > 0 then
      sum = sum + 4
      list[#list + 1] = { name = door, n = n, upto = sum }
    end
  end
  if sum == 0 then return nil end
  local which = r.next() * sum
  for _, class in ipairs(list) do
    if which < class.upto or class == list[#list] then
      return text_of(class.name, call_of(r, class.n), count, action)
    end
  end
end

-- Returns an event like at(), but draws the door first. A door that is listed twice is drawn twice as often.
local function at_one(where, doors, action, count)
  return at(where, { where.r.pick(doors) }, action, count) or at(where, doors, action, count)
end

local FILE = { "read", "write", "sync", "rename", "open", "space", "mkdir", "remove", "map" }
-- ENDS: the doors at which a process is ended, with the number of times that each door is listed as its weight. POWER:
-- the doors at which power is lost. Here fsync, rename and the door `end` are listed more often. The call of `end` is
-- after the process has ended. If power is lost at `end`, everything that the process reported must be true.
local ENDS = { "any", "any", "any", "write", "sync", "rename", "open", "mkdir", "remove", "read", "map" }
local POWER = { "end", "end", "sync", "sync", "rename" }
for _, door in ipairs(ENDS) do POWER[#POWER + 1] = door end
-- The calls that make a checkpoint the newest checkpoint, and the first call after these calls. Between two of these
-- calls, the folder is valid only if the calls have the right order.
local COMMITS = { "write/latest", "sync/latest", "sync/latest", "rename/latest", "rename/save", "rename/save",
  "sync/folder", "sync/folder", "rename/index", "remove/save" }

-- Returns an event that ends the process. A large share of such events happens while a checkpoint is being committed.
local function at_end(where, doors, action)
  local r, made = where.r, {}
  for _, name in ipairs(COMMITS) do if (where.calls[name] or 0) > 0 then made[#made + 1] = name end end
  if #made == 0 or not r.chance(0.5) then return at_one(where, doors, action) end
  local name = r.pick(made)
  return text_of(name, call_of(r, where.calls[name]), nil, action)
end

local function at_power(where, action)
  return at_end(where, POWER, ("%s:%d"):format(action, where.r.int(1, 1e6)))
end

local LINKS = { "send", "recv" }

-- Returns an event at a call that moves bytes. Half of such events are at reads.
local function at_move(where, action, count)
  local others = where.job.ranks > 1 and { "write", "send", "recv" } or { "write" }
  return at(where, { where.r.chance(0.5) and "read" or where.r.pick(others) }, action, count)
end

-- The table of faults. A row has these fields:
--   golden      A life with this fault must end like a life without faults. If golden is not set, the life may also end
--               with an error that names the cause. The error of the rank that had the fault must contain a text that
--               matches one of `causes`. The other ranks must name this rank or repeat its error.
--   dies        signals that may end the rank that had the fault
--   says        the text that the rank prints before it ends by such a signal
--   everywhere  all ranks have the fault
--   ranks       the fault needs several ranks
--   unreadable  the life may skip a checkpoint that it could not read
--   link        the error must also name the operation that the rank was performing
--   weight      how much more often this fault is drawn than a fault without a weight
--   make        make({ r, job, calls }) draws an event, or returns nil if the life makes no call that the fault needs
local KINDS = {
  { "eintr", golden = true, weight = 2, make = function(w) return at_move(w, "EINTR", w.r.int(1, 3)) end },
  { "short", golden = true, weight = 2, make = function(w) return at_move(w, "short", w.r.int(1, 20)) end },
  { "slow", golden = true, make = function(w)
    return at(w, { "any", "read", "write", "sync", "send", "recv", "lock" }, ("delay:%.2f"):format(w.r.next() * 0.4))
  end },
  { "slow_disk", golden = true, make = function(w)
    return at(w, { "read", "write", "sync" }, ("delay:%.4f"):format(w.r.next() * 0.02), w.r.int(10, 40))
  end },
  { "slow_rank", golden = true, make = function(w)
    return at(w, { "any" }, ("delay:%.4f"):format(w.r.next() * 0.005), w.r.int(50, 300))
  end },
  { "reorder", golden = true, make = function(w) return at(w, { "read", "write" }, "reorder", 100, "chunk") end },
  { "drip", golden = true, ranks = true, make = function(w) return at(w, LINKS, "drip") end },
  { "spurious", golden = true, make = function(w) return at(w, { "wait" }, "spurious", w.r.int(1, 50)) end },
  { "hand_over", golden = true, make = function(w)
    return at(w, { "lock", "wait" }, ("delay:%.4f"):format(w.r.next() * 0.01), w.r.int(1, 30))
  end },
  -- Delays a thread at 200 consecutive locks. This fault finds lost wake-ups.
  { "late_thread", golden = true, make = function(w)
    return at(w, { "lock", "wait", "wait" }, ("lag:%.4f"):format(0.0002 + w.r.next() * 0.004))
  end },
  { "jump", golden = true, make = function(w)
    return at(w, { "clock" }, "jump:" .. w.r.pick { -86400, -5, 5, 86400 })
  end },
  { "late", golden = true, ranks = true, make = function(w) return { seconds = 0.2 + w.r.next() } end },
  { "stop", golden = true, make = function(w)
    return at(w, { "any" }, ("stop:%.2f"):format(0.1 + w.r.next() * 0.9))
  end },
  { "frozen", ranks = true, make = function(w) return at(w, { "any" }, "stop:9") end,
    causes = LOST_RANK, link = true },
  { "quiet_signal", golden = true, make = function(w)
    return at(w, { "any" }, "signal:" .. w.r.pick { 17, 23, 28 })
  end },
  { "eio", weight = 2, make = function(w)
    return at(w, FILE, "EIO:" .. w.r.int(1, 1e6), w.r.pick { 1, 1, 2, 1000000 })
  end, unreadable = true, causes = { WORDS.EIO } },
  { "failed_sync", weight = 2, make = function(w)
    return at(w, { "sync" }, "EIO:" .. w.r.int(1, 1e6), w.r.pick { 1, 1, 2, 1000000 })
  end, causes = { WORDS.EIO } },
  { "full", make = function(w)
    return at(w, { "write", "space", "open", "mkdir" }, w.r.pick { "ENOSPC", "EDQUOT" }, w.r.pick { 1, 1, 5, 1000000 })
  end, causes = { WORDS.ENOSPC, WORDS.EDQUOT } },
  { "refused", make = function(w)
    return at_one(w, { "open", "open", "mkdir", "rename" }, w.r.pick { "EMFILE", "EACCES", "EROFS" },
      w.r.pick { 1, 1, 4 })
  end, unreadable = true, causes = { WORDS.EMFILE, WORDS.EACCES, WORDS.EROFS } },
  { "memory", make = function(w) return at(w, { "alloc" }, "ENOMEM", w.r.pick { 1, 2, 3, 1000000 }) end,
    unreadable = true,
    causes = { "no memory for [%d.]+ %a+", "no memory for a request", "not enough memory", "Cannot allocate memory",
      "memory limit" } },
  { "flip", weight = 3, make = function(w)
    local action = ("flip:%d"):format(w.r.int(0, 2 ^ 24))
    return w.r.chance(0.5) and at(w, { "read" }, action, nil, "^chunk$") or at(w, { "read", "map" }, action)
  end, unreadable = true, causes = { "damaged", "checksum is", "belongs? to another", "not a safetensors file",
    "truncated", "header has", "cannot be read" } },
  { "cut", dies = { [7] = true }, says = "cannot read [^\n]+ from about byte %d+ of its map on", make = function(w)
    return at(w, { "map" }, "cut:" .. w.r.int(0, 9))
  end },
  { "reset", ranks = true, make = function(w) return at(w, LINKS, "reset") end,
    causes = LOST_RANK, link = true },
  { "half_open", ranks = true, make = function(w) return at(w, { "send" }, "half_open") end,
    causes = LOST_RANK, link = true },
  { "unreachable", ranks = true, make = function(w)
    local door = w.r.pick { "connect", "accept" }
    return at(w, { door }, door == "connect" and "ECONNREFUSED" or "ECONNABORTED", w.r.int(1, 3))
  end, causes = LOST_RANK, link = true },
  { "kill", dies = { [9] = true }, weight = 3, make = function(w) return at_end(w, ENDS, "kill") end },
  { "signal", dies = { [1] = true, [2] = true, [15] = true }, make = function(w)
    return at_end(w, ENDS, "signal:" .. w.r.pick { 1, 2, 15 })
  end, causes = { "interrupted", "signal" } },
  { "power", dies = { [9] = true }, weight = 5, make = function(w) return at_power(w, "power") end },
  { "power_all", ranks = true, everywhere = true, dies = { [9] = true }, weight = 2,
    make = function(w) return at_power(w, "power_all") end },
  { "twice", ranks = true, make = function() return {} end,
    causes = { "two processes say that they are rank %d+", unpack(LOST_RANK) } },
}
for _, kind in ipairs(KINDS) do
  kind.name = kind[1]
  KINDS[kind.name] = kind
end
draw.KINDS = KINDS

-- -- the job ----------------------------------------------------------------------------------------------------------
local FAMILIES = { "gpt2", "llama", "qwen2", "qwen3", "mistral" }

local function mesh(r, ranks, config, job)
  if ranks == 1 then return end
  local form = r.pick { "data", "data", "pipeline", "tensor" }
  if ranks % 2 == 1 then form = "data" end
  if form == "data" then
    config.zero_optimization = { stage = r.int(0, 3) }
  elseif form == "pipeline" then
    config.pipeline = { stages = 2, schedule = r.pick { "gpipe", "1f1b" } }
    job.accumulate = 2
  else
    config.tensor_parallel = { size = 2 }
  end
end

local SHARE = 8                                            -- number of consecutive seeds that have the same job

--- Returns the job of a seed.
---@param seed integer
---@param options {ranks: integer, steps: integer}
---@return table
function draw.job(seed, options)
  local number = math.floor((seed - 1) / SHARE)
  local r, scheduled = random(("job %d"):format(number)), random(("schedule %d"):format(number)).chance(0.5)
  local ranks = r.chance(0.35) and 1 or r.int(1, options.ranks)
  local config = { optimizer = { type = r.pick { "AdamW", "AdamW", "Adam", "SGD" }, params = { lr = 1e-3 } } }
  local steps = r.int(math.min(3, options.steps), options.steps)
  local job = { ranks = ranks, family = r.pick(FAMILIES), steps = steps, keep = r.int(1, 3), rows = 4,
    every = r.int(1, math.min(3, math.ceil(steps / 2))),     -- a checkpoint falls into the first half of the steps
    accumulate = r.pick { 1, 1, 2 }, async = r.chance(0.5), shards = r.chance(0.5), config = config }
  mesh(r, ranks, config, job)
  if job.accumulate > 1 then config.gradient_accumulation_steps = job.accumulate end
  if r.chance(0.3) then config.bf16 = { enabled = true } end
  if r.chance(0.4) then
    config.csv_monitor, config.train_micro_batch_size_per_gpu = { enabled = true }, job.rows / job.accumulate
  end
  local memory = r.pick { "chunk", "plain", "disk", "disk" }
  if memory == "plain" and ranks == 1 then config.memory = "plain" end
  if memory == "disk" then
    config.memory = { host = r.pick { "580KiB", "700KiB" }, disk = { limit = "4MiB", checksums = true } }
    config.chunk_size = r.pick { 2048, 4096 }
    config.eviction = r.pick { "plan", "lru" }
    job.disk_threads = r.pick { 0, 1, 1, 2 }               -- 0 means io_uring
  end
  if scheduled then
    config.scheduler = { type = "WarmupLR", params = { warmup_max_lr = 1e-3, warmup_num_steps = 20 } }
  end
  return job
end

-- -- the faults -------------------------------------------------------------------------------------------------------
local ON = 0.6                                             -- fraction of the kinds that a seed enables (swarm testing)

local TIER_FAILS = 0.4        -- if the job has a disk tier, the fraction of the seeds that add an error of the disk
                              -- tier

-- Draws an error of the disk tier. Returns the kind of the error, and the event. Without this function such errors
-- would be rare, because most classes of files belong to checkpoints.
local function tier_error(where)
  local r = where.r
  local kind, count = r.pick { "eio", "full" }, r.pick { 1, 1, 2, 1000000 }
  if kind == "eio" then return kind, at(where, { "read", "write" }, "EIO:" .. r.int(1, 1e6), count, "^chunk$") end
  return kind, at(where, { "write" }, r.pick { "ENOSPC", "EDQUOT" }, count, "^chunk$")
end

--- Draws the plan of a seed.
---@param seed integer
---@param job table the result of draw.job
---@param profile ps.faults.Profile
---@return ps.faults.Plan
function draw.plan(seed, job, profile)
  local r = random(("plan %d"):format(seed))             -- the operator .. would round seeds of 1e14 and more
  local plan = { seed = seed, job = job, off = {}, events = {}, lives = r.pick { 1, 1, 2 },
    begins = r.pick { "new", "saved" } }
  local on, soft, late = {}, {}, false
  for _, kind in ipairs(KINDS) do
    if not r.chance(ON) then plan.off[#plan.off + 1] = kind.name
    elseif not kind.ranks or job.ranks > 1 then
      local list = kind.golden and soft or on
      late = late or kind == KINDS.late_thread
      for _ = 1, kind.weight or 1 do list[#list + 1] = kind end
    end
  end
  local function add(life, kind)
    local rank = r.int(0, job.ranks - 1)
    local event = kind.make { r = r, job = job, rank = rank,
      calls = profile[life > 1 and "saved" or plan.begins][rank] }
    if not event then return false end
    event.kind, event.life, event.rank = kind.name, life, rank
    plan.events[#plan.events + 1] = event
    return true
  end
  for life = 1, plan.lives do
    for _ = 1, #soft > 0 and r.int(1, 4) or 0 do add(life, r.pick(soft)) end
    -- Threads of the disk tier wait for each other at every chunk.
    if late and (job.disk_threads or 0) > 0 then add(life, KINDS.late_thread) end
    -- The earlier lives have at least one fault: if a life completed the job, no steps would be left for the next life.
    local left, tries = #on > 0 and r.pick(life < plan.lives and { 1, 1, 2 } or { 0, 0, 1, 1, 1, 2, 3 }) or 0, 0
    while left > 0 and tries < 10 do                      -- a life might make no call that a kind needs
      if add(life, r.pick(on)) then left = left - 1 end
      tries = tries + 1
    end
  end
  -- A separate generator, so that the events above are the same with and without this event.
  local own = random(("tier %d"):format(seed))
  local life, rank = own.int(1, plan.lives), own.int(0, job.ranks - 1)
  local kind, event = tier_error { r = own, job = job, calls = profile[life > 1 and "saved" or plan.begins][rank] }
  if event and own.chance(TIER_FAILS) and not contains(plan.off, kind) then
    event.kind, event.life, event.rank = kind, life, rank
    plan.events[#plan.events + 1] = event
  end
  return plan
end

--- Returns the text of PS_FAULT_PLAN for a life.
---@param plan ps.faults.Plan
---@param life integer
---@return string
function draw.text(plan, life)
  local words = {}
  for _, event in ipairs(plan.events) do
    if event.life == life and event.text then words[#words + 1] = event.rank .. ":" .. event.text end
  end
  return table.concat(words, " ")
end

--- Returns the settings that determine the results of a job. Budgets, tiers and checkpoints do not change the results,
--- so jobs that differ only in budgets, tiers or checkpoints share a golden run. The chunk size is one of the returned
--- settings, because it changes the order of sums in ZeRO stages 2 and 3 with accumulation.
---@param job table
---@return string key
---@return table the settings of the golden run
function draw.golden(job)
  local config = {}
  for name, value in pairs(job.config) do config[name] = value end
  local zero, pipeline = config.zero_optimization, config.pipeline
  if not zero then config.chunk_size = nil end
  config.memory, config.eviction, config.csv_monitor = nil, nil, nil
  local golden = { ranks = job.ranks, family = job.family, steps = job.steps, every = job.steps + 1, keep = 1,
    rows = job.rows, accumulate = job.accumulate, async = false, shards = false, config = config }
  return table.concat({ job.ranks, job.family, job.steps, job.accumulate, config.optimizer.type,
    (config.bf16 and "bf16" or "fp32") .. (config.scheduler and " schedule" or ""),
    zero and ("zero%d:%s"):format(zero.stage, config.chunk_size or "") or "", pipeline and pipeline.schedule or "",
    config.tensor_parallel and "tp" or "" }, " "), golden
end

--- Describes a job in one line.
---@param job table
---@return string
function draw.describe(job)
  local config = job.config
  local memory = type(config.memory) == "table" and "disk tier" or config.memory or "chunks"
  local words = { select(1, draw.golden(job)):gsub(" +", " "), memory .. (config.csv_monitor and ", monitor" or ""),
    ("%ssave every %d"):format(job.async and "async " or "", job.every) }
  return table.concat(words, ", ")
end

draw.NO_EVENTS = "no faults"

--- Describes the events in one line.
---@param plan ps.faults.Plan
---@return string
function draw.events(plan)
  local words = {}
  for i, event in ipairs(plan.events) do
    words[i] = ("%d/%d:%s"):format(event.life, event.rank, event.text or event.kind)
  end
  return #words > 0 and table.concat(words, " ") or draw.NO_EVENTS
end

-- Maps the name of an action to the kind of fault. If the name is an errno, the kind is a kind that can cause this
-- errno.
local OF_ACTION = { EINTR = "eintr", short = "short", delay = "slow", drip = "drip", spurious = "spurious",
  reorder = "reorder", lag = "late_thread",
  jump = "jump", stop = "stop", ENOSPC = "full", EDQUOT = "full", EMFILE = "refused", EACCES = "refused",
  EROFS = "refused", ENOMEM = "memory", EIO = "eio", flip = "flip", reset = "reset", half_open = "half_open",
  ECONNREFUSED = "unreachable", ECONNABORTED = "unreachable", kill = "kill", signal = "signal", power = "power",
  power_all = "power_all", cut = "cut" }

--- Returns the kind of an event that a user wrote, or nil if no kind fits.
---@param text string
---@return string?
function draw.kind_of(text)
  if text == "late" or text == "twice" then return text end
  local action, number = text:match "^[%l/]+@[%d+]+=([%w_]+):?(%d*)"
  if action == "stop" and tonumber(number) > 3 then return "frozen" end
  if action == "signal" and not KINDS.signal.dies[tonumber(number)] then return "quiet_signal" end
  return OF_ACTION[action or ""]
end

return draw
