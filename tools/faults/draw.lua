-- SPDX-License-Identifier: BSD-3-Clause
-- What a seed draws: the settings of a job, the faults of each of its lives, and the table of what a fault may lead to.
-- The same seed draws the same plan on every machine.
local C = require("ps.core.ffi").C

local draw = {}

---@class ps.faults.Event
---@field kind string         a row of KINDS
---@field life integer        1 or 2; the last life of a run has no faults
---@field rank integer
---@field text? string        for PS_FAULT_PLAN; nil: the runner does it (late, twice)
---@field seconds? number     how long a stopped rank is stopped, or how late one starts

---@class ps.faults.Plan
---@field seed integer
---@field job table           settings of tools/faults/job.lua
---@field off string[]        kinds that this seed switched off
---@field events ps.faults.Event[]
---@field lives integer       lives with faults

-- Lehmer's generator with Park and Miller's later multiplier: small, and no other code shares its state. Seeds that
-- follow each other begin at states that have nothing in common.
local function random(seed)
  local text = tostring(seed)
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
  --- Returns a number from 0 to `most` whose logarithm is uniform, so that early calls are hit as often as late ones.
  function r.early(most) return math.floor(math.exp(next_number() * math.log(most + 1))) - 1 end
  return r
end

-- About how many calls of each door a life has: of one rank without a disk tier. An event after the last call does not
-- happen.
local CALLS = { any = 450, open = 30, read = 60, write = 160, sync = 18, rename = 10, space = 7, remove = 4, mkdir = 3,
  map = 6, connect = 3, accept = 6, send = 400, recv = 800, alloc = 5000, clock = 3, sleep = 4, lock = 8000, wait = 60 }

-- The words of errno in messages.
local WORDS = { EIO = "Input/output error", ENOSPC = "No space left on device", EDQUOT = "Disk quota exceeded",
  EMFILE = "Too many open files", EACCES = "Permission denied", EROFS = "Read%-only file system" }

-- Returns an event of PS_FAULT_PLAN. Doors of sockets are left out if there is one rank.
local function at(r, doors, action, count, job)
  local usable = {}
  for _, door in ipairs(doors) do
    if not (job and job.ranks == 1 and (door == "send" or door == "recv")) then usable[#usable + 1] = door end
  end
  local door = r.pick(usable)
  local most = CALLS[door]
  if door == "any" and job then most = job.ranks > 1 and 1200 or job.disk_threads and 800 or most end
  local nth = r.chance(0.5) and r.early(most) or r.int(0, most)
  return { text = ("%s@%d%s=%s"):format(door, nth, count and count > 1 and "+" .. count or "", action) }
end

local FILE = { "read", "write", "sync", "rename", "open", "space", "mkdir", "remove", "map" }
local MOVES, LINKS = { "read", "write", "send", "recv" }, { "send", "recv" }

-- The table. golden: a life with this fault ends as one without. Otherwise it may also end with an error that names the
-- cause: a text that fits one of `causes`, on the rank that had the fault. Other ranks name that rank, or repeat its
-- error. dies: signals by which the rank itself may end. ranks: needs several ranks. weight: how much
-- more often it is drawn than others. make(r, job) draws an event.
local KINDS = {
  { "eintr", golden = true, make = function(r, job) return at(r, MOVES, "EINTR", r.int(1, 3), job) end },
  { "short", golden = true, make = function(r, job) return at(r, MOVES, "short", r.int(1, 20), job) end },
  { "slow", golden = true, make = function(r, job)
    return at(r, { "any", "read", "write", "sync", "send", "recv", "lock" }, ("delay:%.2f"):format(r.next() * 0.4), 1,
      job)
  end },
  { "drip", golden = true, ranks = true, make = function(r) return at(r, LINKS, "drip") end },
  { "spurious", golden = true, make = function(r) return at(r, { "wait" }, "spurious", r.int(1, 50)) end },
  { "hand_over", golden = true, make = function(r)
    return at(r, { "lock", "wait" }, ("delay:%.4f"):format(r.next() * 0.01), r.int(1, 30))
  end },
  { "jump", golden = true, make = function(r)
    return at(r, { "clock" }, "jump:" .. r.pick { -86400, -5, 5, 86400 })
  end },
  { "late", golden = true, ranks = true, make = function(r) return { seconds = 0.2 + r.next() } end },
  { "stop", golden = true, make = function(r)
    local event = at(r, { "any" }, "stop")
    event.seconds = 0.1 + r.next() * 0.9
    return event
  end },
  { "quiet_signal", golden = true, make = function(r) return at(r, { "any" }, "signal:" .. r.pick { 17, 23, 28 }) end },
  { "eio", make = function(r) return at(r, FILE, "EIO", r.pick { 1, 1, 2, 1000000 }) end, causes = { WORDS.EIO } },
  { "full", make = function(r)
    return at(r, { "write", "space", "open", "mkdir" }, r.pick { "ENOSPC", "EDQUOT" }, r.pick { 1, 1, 5, 1000000 })
  end, causes = { WORDS.ENOSPC, WORDS.EDQUOT } },
  { "refused", make = function(r)
    return at(r, { "open", "open", "mkdir", "rename" }, r.pick { "EMFILE", "EACCES", "EROFS" }, r.pick { 1, 1, 4 })
  end, causes = { WORDS.EMFILE, WORDS.EACCES, WORDS.EROFS } },
  { "memory", make = function(r) return at(r, { "alloc" }, "ENOMEM", r.pick { 1, 2, 3, 1000000 }) end,
    causes = { "memory", "ENOMEM", "Cannot allocate" } },
  { "flip", make = function(r)
    return at(r, { "read", "map" }, ("flip:%d"):format(r.int(0, 2 ^ 24)))
  end, causes = { "damaged", "checksum", "does not belong", "not a safetensors file", "truncated", "header" } },
  { "reset", ranks = true, make = function(r) return at(r, LINKS, "reset") end,
    causes = { "rank %d+", "hung up", "connection", "[Cc]onnection reset" } },
  { "half_open", ranks = true, make = function(r) return at(r, { "send" }, "half_open") end,
    causes = { "rank %d+", "silent", "did not", "does not answer", "not come" } },
  { "unreachable", ranks = true, make = function(r)
    local door = r.pick { "connect", "accept" }
    return at(r, { door }, door == "connect" and "ECONNREFUSED" or "ECONNABORTED", r.int(1, 3))
  end, causes = { "rank %d+", "[Cc]onnection", "reached nobody", "did not come", "connect" } },
  { "kill", dies = { [9] = true }, weight = 2, make = function(r, job)
    return at(r, { "any" }, "kill", 1, job)
  end },
  { "signal", dies = { [1] = true, [2] = true, [15] = true }, make = function(r)
    return at(r, { "any" }, "signal:" .. r.pick { 1, 2, 15 })
  end, causes = { "interrupted", "signal" } },
  { "power", dies = { [9] = true }, weight = 4, make = function(r, job)
    return at(r, { "any" }, "power:" .. r.int(1, 1e6), 1, job)
  end },
  { "twice", ranks = true, make = function() return {} end,
    causes = { "two processes say", "rank %d+", "turned away", "ended while" } },
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

local function job_of(r, most_ranks, steps)
  local ranks = r.chance(0.5) and 1 or r.int(1, most_ranks)
  local config = { optimizer = { type = r.pick { "AdamW", "AdamW", "Adam", "SGD" }, params = { lr = 1e-3 } } }
  local job = { ranks = ranks, family = r.pick(FAMILIES), steps = steps, every = r.int(1, 3), keep = r.int(1, 3),
    rows = 4, accumulate = r.pick { 1, 1, 2 }, async = r.chance(0.5), shards = r.chance(0.5), config = config }
  mesh(r, ranks, config, job)
  if job.accumulate > 1 then config.gradient_accumulation_steps = job.accumulate end
  if r.chance(0.3) then config.bf16 = { enabled = true } end
  local memory = r.pick { "chunk", "plain", "disk", "disk" }
  if memory == "plain" and ranks == 1 then config.memory = "plain" end
  if memory == "disk" then
    config.memory = { host = r.pick { "520KiB", "700KiB" }, disk = { limit = "4MiB", checksums = true } }
    config.chunk_size = r.pick { 2048, 4096 }
    config.eviction = r.pick { "plan", "lru" }
    job.disk_threads = r.pick { 0, 2 }                     -- 0: io_uring
  end
  return job
end

-- -- the faults -------------------------------------------------------------------------------------------------------
local ON = 0.6                                             -- share of the kinds that a seed leaves on (swarm testing)

--- Returns the plan of a seed.
---@param seed integer
---@param options {ranks: integer, steps: integer}
---@return ps.faults.Plan
function draw.plan(seed, options)
  local r = random(seed)
  local job = job_of(r, options.ranks, options.steps)
  local plan = { seed = seed, job = job, off = {}, events = {}, lives = r.pick { 1, 1, 2 } }
  local on = {}
  for _, kind in ipairs(KINDS) do
    if not r.chance(ON) then plan.off[#plan.off + 1] = kind.name
    elseif not kind.ranks or job.ranks > 1 then
      for _ = 1, kind.weight or 1 do on[#on + 1] = kind end
    end
  end
  for life = 1, #on > 0 and plan.lives or 0 do
    for _ = 1, r.int(1, 4) do
      local kind = r.pick(on)
      local event = kind.make(r, job)
      event.kind, event.life, event.rank = kind.name, life, r.int(0, job.ranks - 1)
      plan.events[#plan.events + 1] = event
    end
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

--- Returns the settings on which a job's results depend. Budgets, tiers and checkpoints change no bits, so jobs that
--- differ in them only have one golden run. The size of chunks changes the order of sums in stages 2 and 3 of ZeRO with
--- accumulation.
---@param job table
---@return string key
---@return table settings of the golden run
function draw.golden(job)
  local config = {}
  for name, value in pairs(job.config) do config[name] = value end
  local zero, pipeline = config.zero_optimization, config.pipeline
  if not zero then config.chunk_size = nil end
  config.memory, config.eviction = nil, nil
  local golden = { ranks = job.ranks, family = job.family, steps = job.steps, every = job.steps + 1, keep = 1,
    rows = job.rows, accumulate = job.accumulate, async = false, shards = false, config = config }
  return table.concat({ job.ranks, job.family, job.steps, job.accumulate, config.optimizer.type,
    config.bf16 and "bf16" or "fp32",
    zero and ("zero%d:%s"):format(zero.stage, config.chunk_size or "") or "", pipeline and pipeline.schedule or "",
    config.tensor_parallel and "tp" or "" }, " "), golden
end

--- Returns a job in one line.
---@param job table
---@return string
function draw.describe(job)
  local config = job.config
  local memory = type(config.memory) == "table" and "disk tier" or config.memory or "chunks"
  local words = { select(1, draw.golden(job)):gsub(" +", " "), memory,
    ("%ssave every %d"):format(job.async and "async " or "", job.every) }
  return table.concat(words, ", ")
end

--- Returns the events in one line.
---@param plan ps.faults.Plan
---@return string
function draw.events(plan)
  local words = {}
  for i, event in ipairs(plan.events) do
    words[i] = ("%d/%d:%s"):format(event.life, event.rank, event.text or event.kind)
  end
  return #words > 0 and table.concat(words, " ") or "no faults"
end

-- The kinds of an action's name; actions with an errno are of the kind that allows it.
local OF_ACTION = { EINTR = "eintr", short = "short", delay = "slow", drip = "drip", spurious = "spurious",
  jump = "jump", stop = "stop", ENOSPC = "full", EDQUOT = "full", EMFILE = "refused", EACCES = "refused",
  EROFS = "refused", ENOMEM = "memory", EIO = "eio", flip = "flip", reset = "reset", half_open = "half_open",
  ECONNREFUSED = "unreachable", ECONNABORTED = "unreachable", kill = "kill", signal = "signal", power = "power" }

--- Returns the kind of an event that somebody wrote, or nil.
---@param text string
---@return string?
function draw.kind_of(text)
  if text == "late" or text == "twice" then return text end
  local action, number = text:match "^%l+@[%d+]+=([%w_]+):?(%d*)"
  if action == "signal" and not KINDS.signal.dies[tonumber(number)] then return "quiet_signal" end
  return OF_ACTION[action or ""]
end

return draw
