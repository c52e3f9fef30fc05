-- SPDX-License-Identifier: BSD-3-Clause
-- A profile written by hand (docs/profiling.md), for the specs of pictures: two steps, the first without a plan, four
-- chunks on device, host and disk, and a peak of the device at one known moment.
local json = require "cjson"

local lib = {}

local MIB = 2 ^ 20

--- The device's peak after the first step and over all steps, in bytes and microseconds.
lib.PEAK = { nbytes = 96 * MIB, ts = 1400.5 }
lib.FIRST_PEAK = { nbytes = 128 * MIB, ts = 250 }

--- Returns the profile as a table.
---@return table
function lib.made()
  local events = {}
  local function add(cat, ph, name, ts, args, dur)
    events[#events + 1] = { cat = cat, ph = ph, name = name, ts = ts, dur = dur, pid = 0, tid = 0, args = args }
  end
  local function memory(ts, chunks, other)
    add("memory", "C", "device", ts, { chunks = chunks * MIB, other = other * MIB })
  end
  local function at(ts, chunk, what, on) add("chunk", "i", what, ts, { chunk = chunk, tier = on[1], on = on }) end
  for id = 0, 3 do at(0, id, "allocate", { id == 3 and "disk" or "host" }) end
  memory(0, 0, 0)
  add("memory", "C", "host", 0, { chunks = 48 * MIB, other = 0 })
  for step = 1, 2 do
    local begin = (step - 1) * 1000
    add("step", "X", "step " .. step, begin, { step = step, first = step == 1 }, 990)
    add("action", "X", "forward", begin, { step = step, micro = 1, stage = 0 }, 300)
    at(begin + 100, 0, "move", { "device", "host" })
    memory(begin + 100, 16, 8)
    add("op", "X", "linear", begin + 150, { step = step, phase = "forward" }, 20)
    if step == 1 then memory(250, 16, 112) end
    if step == 1 then memory(260, 16, 8) end
    add("action", "X", "backward", begin + 300, { step = step, micro = 1, stage = 0 }, 400)
    if step == 2 then memory(1400.5, 32, 64) end
    at(begin + 500, 1, "move", { "device", "host" })
    memory(begin + 500, 32, 16)
    at(begin + 600, 0, "release", { "host" })
    memory(begin + 600, 16, 16)
    add("action", "X", "update", begin + 700, { step = step, stage = 0 }, 290)
    at(begin + 800, 3, "move", { "host", "disk" })
    at(begin + 900, 1, "release", { "host" })
    memory(begin + 900, 0, 4)
  end
  local kinds = { "param", "param", "exp_avg", "exp_avg_sq" }
  local chunks = {}
  for id = 0, 3 do
    chunks[id + 1] = { id = id, kind = kinds[id + 1], index = id == 1 and 1 or 0, nbytes = 16 * MIB,
      tensors = { ("h.%d.weight"):format(id), "</script><b>" } }
  end
  return { displayTimeUnit = "ms", traceEvents = events, psluajit = { version = 1, rank = 0, ranks = 1,
    clock_offset_ns = 0, clock_error_ns = 0, capacity = 1000, events = #events, dropped = 0,
    tiers = { { name = "device", budget = 100 * MIB }, { name = "host", budget = 0 }, { name = "disk", budget = 0 } },
    chunks = chunks, steps = { { step = 1, first = true, begin = 0, ["end"] = 990 },
      { step = 2, first = false, begin = 1000, ["end"] = 1990 } } } }
end

--- Writes a profile.
---@param path string
---@param profile? table the profile (default: the profile of lib.made)
function lib.write(path, profile)
  local f = assert(io.open(path, "wb"))
  f:write(json.encode(profile or lib.made()))
  f:close()
end

return lib
