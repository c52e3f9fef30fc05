-- SPDX-License-Identifier: BSD-3-Clause
-- Reads a profile (docs/profiling.md) for pictures. The result contains the memory use of each tier and the tier of
-- each chunk over time, and the phases of the steps. Times are in microseconds, as in the file.
local json = require("cjson").new()
local optimizers = require "ps.optimizers"
local read_file = require "ps.core.read_file"

json.decode_max_depth(100)

local read = {}

---@class ps.Profile
---@field path string
---@field rank integer
---@field ranks integer
---@field dropped integer number of events that were overwritten by newer events
---@field begin number time of the first event
---@field finish number time at which the last event ends
---@field tiers ps.profile.Tier[] tiers with events, fastest first
---@field steps {step: integer, first: boolean, begin: number, finish: number}[]
---@field bands {kind: "forward"|"backward"|"adam", begin: number, finish: number}[] sorted by time
---@field chunks ps.profile.Chunk[] sorted by kind, then by index

---@class ps.profile.Tier
---@field name string "device", "host" or "disk"; without chunks, the name of a device
---@field budget integer limit in bytes, or 0 if there is no limit
---@field times number[] times at which `held` or `other` changes
---@field held integer[] held[i] is the number of bytes of chunks from times[i] on
---@field other integer[] other[i] is the number of bytes of everything except chunks from times[i] on

---@class ps.profile.Chunk
---@field id integer
---@field kind string kind of the chunk. If `gone` is true, files of earlier versions do not contain the kind; `kind` is
---  then "gone"
---@field index integer index of the chunk among the chunks of its kind; if `gone` is true, the id of the chunk
---@field gone boolean true if the chunk did not exist any more when the profile was saved
---@field nbytes integer
---@field tensors string[]
---@field times number[] times at which `on` changes
---@field on (string|false)[] on[i] is the fastest tier on which the chunk has memory from times[i] on, or false if the
---  chunk has no memory

-- Returns the kinds of chunks in the order in which PatrickStar's figure shows them, from the bottom to the top:
-- FP16_PARAM, FP32_PARAM, VARIANCE, MOMENTUM.
local function kinds_in_order()
  local list, states = { "param", "param_fp32" }, optimizers.state_names()
  for i = #states, 1, -1 do list[#list + 1] = states[i] end
  list[#list + 1] = "grad"
  return list
end
local BANDS = { forward = "forward", backward = "backward", input = "backward", weight = "backward", update = "adam" }

local rank_of_kind = {}
for i, kind in ipairs(kinds_in_order()) do rank_of_kind[kind] = i end

-- Returns the JSON in the file as a table. Otherwise raises an error, which says that the file is not JSON, that it is
-- truncated, or that another program wrote it.
local function decoded(path)
  local text, why = read_file(path)
  if not text then error("cannot read " .. why, 0) end
  local ok, all = pcall(json.decode, text)
  if not ok then
    local what = tostring(all):match "^[^\n]*"
    -- For a truncated file, the parser reports an error at the end of the file, or at a truncated word or escape
    -- sequence, which begins at most a few characters before the end.
    local at_end = #text - (tonumber(what:match "character (%d+)") or 0) < 8 or what:find("end of string", 1, true)
    local cut = text == "" or text:find "^%s*{" and at_end
    error(("%s is not a profile: %s (%s)"):format(path, cut and "it is cut off after " .. #text .. " bytes"
      or "it is not JSON", what), 0)
  end
  if type(all) ~= "table" or type(all.psluajit) ~= "table" then
    error(path .. " is not a profile of psluajit: it has no object 'psluajit'. ps.profiler.save writes profiles", 0)
  end
  local version = all.psluajit.version
  if version ~= 1 then
    error(("%s is a profile of version %s; this program reads version 1"):format(path, tostring(version)), 0)
  end
  return all
end

-- Returns functions that check values in the file. Their errors contain the path of the file and the place of the
-- value.
local function checks(path)
  local function fail(what, value, wanted)
    error(("%s is damaged: %s is %s, not %s"):format(path, what, type(value) == "table" and "a table"
      or tostring(value), wanted), 0)
  end
  local check = {}
  function check.number(value, what)
    if type(value) ~= "number" or value ~= value or math.abs(value) == math.huge then fail(what, value, "a number") end
    return value
  end
  local function whole(value, what, wanted)
    if type(value) ~= "number" or value < 0 or value % 1 ~= 0 then fail(what, value, wanted) end
    return value
  end
  function check.nbytes(value, what) return whole(value, what, "a number of bytes") end
  function check.count(value, what) return whole(value, what, "a whole number from 0 on") end
  function check.text(value, what)
    if type(value) ~= "string" then fail(what, value, "a text") end
    return value
  end
  function check.list(value, what)
    if type(value) ~= "table" or next(value) ~= nil and value[1] == nil then fail(what, value, "a list") end
    return value
  end
  check.fail = fail
  return check
end

-- Sorts chunks by kind, then by index. Among the chunks of a kind, chunks with gone = true come last.
local function sort(chunks)
  local function rank(chunk) return rank_of_kind[chunk.kind] or math.huge end
  table.sort(chunks, function(a, b)
    local x, y = rank(a), rank(b)
    if x ~= y then return x < y end
    if a.gone ~= b.gone then return b.gone end
    return a.index < b.index
  end)
end

-- Returns the chunks that had memory on a tier at some time.
local function somewhere(chunks)
  local list = {}
  for _, chunk in ipairs(chunks) do
    for _, on in ipairs(chunk.on) do
      if on then
        list[#list + 1] = chunk
        break
      end
    end
  end
  return list
end

local function chunks_of(head, check)
  local list, by_id = {}, {}
  for i, given in ipairs(check.list(head.chunks or {}, "psluajit.chunks")) do
    local at = ("psluajit.chunks[%d]."):format(i)
    if type(given) ~= "table" then check.fail("psluajit.chunks[" .. i .. "]", given, "a table") end
    local chunk = { id = check.number(given.id, at .. "id"), kind = check.text(given.kind, at .. "kind"),
      index = check.number(given.index, at .. "index"), nbytes = check.nbytes(given.nbytes, at .. "nbytes"),
      gone = false, tensors = check.list(given.tensors or {}, at .. "tensors"), times = {}, on = {} }
    for k, name in ipairs(chunk.tensors) do check.text(name, ("%stensors[%d]"):format(at, k)) end
    list[i], by_id[chunk.id] = chunk, chunk
  end
  return list, by_id
end

-- Returns a list of tiers, and a function find(name) that returns the tier with a name. The list contains the tiers in
-- the file's head in their order. If the name is not in the list, find appends a tier, because a tier may occur only in
-- events.
local function tier_finder(head, check)
  local list, by_name = {}, {}
  local function find(name)
    if not by_name[name] then
      by_name[name] = { name = name, budget = 0, times = {}, held = {}, other = {} }
      list[#list + 1] = by_name[name]
    end
    return by_name[name]
  end
  for i, given in ipairs(check.list(head.tiers or {}, "psluajit.tiers")) do
    local at = ("psluajit.tiers[%d]."):format(i)
    if type(given) ~= "table" then check.fail("psluajit.tiers[" .. i .. "]", given, "a table") end
    find(check.text(given.name, at .. "name")).budget = check.nbytes(given.budget, at .. "budget")
  end
  return list, find
end

local function steps_of(head, check)
  local list = {}
  for i, given in ipairs(check.list(head.steps or {}, "psluajit.steps")) do
    local at = ("psluajit.steps[%d]."):format(i)
    if type(given) ~= "table" then check.fail("psluajit.steps[" .. i .. "]", given, "a table") end
    list[i] = { step = check.number(given.step, at .. "step"), first = given.first == true,
      begin = check.number(given.begin, at .. "begin"), finish = check.number(given["end"], at .. "end") }
  end
  return list
end

-- Returns a table of functions by category of events. Each function adds an event of its category to the profile:
-- fn(event, args, what, ts).
local function takers(self, find_tier, by_id, check)
  local take = {}
  function take.memory(event, args, what, ts)
    if event.ph ~= "C" or event.name == "meta" then return end      -- tensors on the device meta have no bytes
    local tier = find_tier(check.text(event.name, what .. ".name"))
    local held, other = check.nbytes(args.chunks, what .. ".args.chunks"),
      check.nbytes(args.other, what .. ".args.other")
    local n = #tier.times
    if tier.times[n] ~= ts then n = n + 1 end  -- if several changes have the same time, only the last change is kept
    tier.times[n], tier.held[n], tier.other[n] = ts, held, other
  end
  function take.action(event, _, what, ts)
    local kind = BANDS[event.name]
    if event.ph ~= "X" or not kind then return end
    local finish = ts + check.number(event.dur, what .. ".dur")
    local last = self.bands[#self.bands]
    if last and last.kind == kind and ts <= last.finish then
      last.finish = math.max(last.finish, finish)
    else
      self.bands[#self.bands + 1] = { kind = kind, begin = ts, finish = finish }
    end
  end
  function take.chunk(_, args, what, ts)
    local id = check.number(args.chunk, what .. ".args.chunk")
    local chunk = by_id[id]
    if not chunk then
      chunk = { id = id, kind = check.text(args.kind or "gone", what .. ".args.kind"), index = id, gone = true,
        nbytes = check.nbytes(args.bytes or 0, what .. ".args.bytes"), tensors = {}, times = {}, on = {} }
      self.chunks[#self.chunks + 1], by_id[id] = chunk, chunk
    end
    local n, on = #chunk.times, check.list(args.on or {}, what .. ".args.on")[1] or false
    if on then check.text(on, what .. ".args.on[1]") end
    if chunk.on[n] == on then return end
    if chunk.times[n] ~= ts then n = n + 1 end
    chunk.times[n], chunk.on[n] = ts, on
  end
  return take
end

--- Reads a profile. Raises an error if the file is not a profile, is truncated or damaged, or has another version.
---@param path string
---@return ps.Profile
function read.file(path)
  local all = decoded(path)
  local head, check = all.psluajit, checks(path)
  local function count(name, default) return check.count(head[name] or default, "psluajit." .. name) end
  local self = { path = path, rank = count("rank", 0), ranks = count("ranks", 1), dropped = count("dropped", 0),
    bands = {}, begin = math.huge, finish = -math.huge }
  local by_id, find
  self.chunks, by_id = chunks_of(head, check)
  self.tiers, find = tier_finder(head, check)
  self.steps = steps_of(head, check)
  local take, before = takers(self, find, by_id, check), -math.huge
  for i, event in ipairs(check.list(all.traceEvents, "traceEvents")) do
    local what = ("traceEvents[%d]"):format(i)
    if type(event) ~= "table" then check.fail(what, event, "an event") end
    if event.ph ~= "M" then
      local ts = check.number(event.ts, what .. ".ts")
      if ts < before then check.fail(what .. ".ts", ts, "after the event before it") end
      before = ts
      self.begin = math.min(self.begin, ts)
      self.finish = math.max(self.finish, ts + (event.ph == "X" and check.number(event.dur, what .. ".dur") or 0))
      local args = event.args or {}
      if type(args) ~= "table" then check.fail(what .. ".args", args, "a table") end
      if take[event.cat] then take[event.cat](event, args, what, ts) end
    end
  end
  self.chunks = somewhere(self.chunks)
  sort(self.chunks)
  if self.finish < self.begin then error(path .. " has no events: nothing ran between start and stop", 0) end
  local seen = {}
  for _, tier in ipairs(self.tiers) do if tier.times[1] then seen[#seen + 1] = tier end end
  self.tiers = seen
  return self
end

-- Removes all entries before the time `begin` from `times` and from the lists that belong to it, except the last such
-- entry: its values are valid at `begin`, so its time becomes `begin`.
local function drop_before(times, begin, ...)
  local first = 0
  while times[first + 1] and times[first + 1] <= begin do first = first + 1 end
  if first == 0 then return end
  local n = #times
  for _, list in ipairs { times, ... } do
    for i = 1, n do list[i] = list[i + first - 1] end
  end
  times[1] = begin
end

--- Removes the first steps, which have no plan, and all events before the first step that has a plan. Raises an error
--- if no step has a plan.
---@param self ps.Profile
function read.drop_warmup(self)
  local last
  for i, step in ipairs(self.steps) do
    if not step.first then break end
    last = i
  end
  if not last then return end
  if last == #self.steps then
    error(("%s: none of the %d steps has a plan, since first steps run without one; profile a later step, or omit "
      .. "--rm_warmup"):format(self.path, last), 0)
  end
  local begin = self.steps[last + 1].begin
  self.begin = begin
  for _, tier in ipairs(self.tiers) do drop_before(tier.times, begin, tier.held, tier.other) end
  for _, chunk in ipairs(self.chunks) do drop_before(chunk.times, begin, chunk.on) end
  self.chunks = somewhere(self.chunks)
  local steps, bands = {}, {}
  for i = last + 1, #self.steps do steps[#steps + 1] = self.steps[i] end
  for _, band in ipairs(self.bands) do if band.begin >= begin then bands[#bands + 1] = band end end
  self.steps, self.bands = steps, bands
end

--- Returns the tier that PatrickStar calls `name`. Without a name, returns the fastest tier. Raises an error if the
--- profile does not contain the tier.
---@param self ps.Profile
---@param name? string "GPU", "CPU" or "DISK"
---@return ps.profile.Tier
function read.tier(self, name)
  local names = {}
  for i, tier in ipairs(self.tiers) do
    local is = tier.name == "disk" and "DISK" or (tier.name == "host" or tier.name == "cpu") and "CPU" or "GPU"
    if not name or is == name then return tier end
    names[i] = ("%s (%s)"):format(is, tier.name)
  end
  if not names[1] then error(self.path .. " has no events of memory", 0) end
  error(("%s has no memory of type %s; it has %s"):format(self.path, name, table.concat(names, ", ")), 0)
end

--- Returns the largest memory use of a tier (chunks plus everything else), and the first time at which it occurs.
---@param tier ps.profile.Tier
---@return integer nbytes
---@return number time
function read.peak(tier)
  local most, at = -1, 0
  for i, time in ipairs(tier.times) do
    local total = tier.held[i] + tier.other[i]
    if total > most then most, at = total, time end
  end
  return most, at
end

return read
