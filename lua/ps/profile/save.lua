-- SPDX-License-Identifier: BSD-3-Clause
-- Converts the record of events to the text of a file, for ps.profiler.save (docs/profiling.md describes the file).
local native = require "ps.core.ffi"
local clock = require "ps.profile.clock"
local dist = require "ps.dist"
local encode = require "ps.core.encode"
local events = require "ps.core.events"
local kinds = require "ps.core.kinds"
local chunks = require "ps.memory.chunks"
local ffi, C = native.ffi, native.C

local VERSION = 1
-- The streams of events. The stream "script" has one track. Events of any other stream may overlap, so the stream is
-- divided into tracks: as many as it has simultaneous events.
local STREAMS = { "script", "copies up", "copies down", "disk reads", "disk writes", "collectives",
  "kernels" }
local TRACKS = 1000            -- the tracks of stream s have the numbers s * TRACKS, s * TRACKS + 1 and so on

local function text(value)
  return '"' .. value:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
end

-- Returns the index of an event's stream, counted from 0. The event must have a duration.
local function stream_of(e)
  if e.kind == C.PS_REC_COPY then return 1 + e.name end
  if e.kind == C.PS_REC_DISK then return 3 + e.name end
  if (e.kind == C.PS_REC_OP or e.kind == C.PS_REC_PART) and e.on == 1 then return 6 end
  return e.kind == C.PS_REC_COLLECTIVE and 5 or 0
end

local Writer = {}
Writer.__index = Writer

-- Returns the names of the tiers on which a chunk has memory.
function Writer:places(on)
  local names = {}
  for t, tier in ipairs(self.tiers) do
    if bit.band(on, bit.lshift(1, t - 1)) ~= 0 then names[#names + 1] = text(tier.name) end
  end
  return "[" .. table.concat(names, ",") .. "]"
end

function Writer:tier(t) return self.tiers[t + 1] and self.tiers[t + 1].name or "tier " .. t end

-- Returns the field `module` of an event's arguments as JSON text. Returns "" if the event is outside modules, or if
-- Lua has already collected the module.
function Writer:in_module(e)
  local module = self.modules[e.module]
  return module and ',"module":' .. text(module.path) or ""
end

local function device_of(e) return text(native.device_name[e.from] or tostring(e.from)) end

-- A table of functions by kind of events. A function returns the name of an event, and the fields of its arguments as
-- JSON text.
local TELLS = {
  [C.PS_REC_OP] = function(w, e)
    return native.op_info[e.name].name, (',"bytes":%d,"flops":%d%s,"device":%s%s'):format(tonumber(e.bytes),
      tonumber(e.flops), e.flops > 0 and ',"dtype":' .. text(native.dtype_name[e.to]) or "", device_of(e),
        w:in_module(e))
  end,
  [C.PS_REC_PART] = function(w, e)
    return native.op_info[e.name].name, (',"rows":%d,"dtype":%s,"device":%s%s'):format(e.id,
      text(native.dtype_name[e.to]),
      device_of(e), w:in_module(e))
  end,
  [C.PS_REC_MODULE] = function(w, e)
    local module = w.modules[e.module]
    if not module then return "module " .. e.module, "" end
    return module.path == "" and module.class or ("%s (%s)"):format(module.path, module.class),
      ',"path":' .. text(module.path)
  end,
  [C.PS_REC_STEP] = function(_, e) return "step " .. e.step, (',"first":%s'):format(e.name == 1) end,
  [C.PS_REC_ACTION] = function(_, e)
    return events.actions[e.name], (',"micro":%d,"stage":%d'):format(e.id + 1, e.to)
  end,
  [C.PS_REC_COPY] = function(w, e)
    return e.name == 0 and "fetch" or "evict", (',"chunk":%d,"bytes":%d,"from":%s,"to":%s'):format(e.id,
      tonumber(e.bytes), text(w:tier(e.from)), text(w:tier(e.to)))
  end,
  [C.PS_REC_DISK] = function(_, e)
    return e.name == 0 and "read" or "write", (',"bytes":%d'):format(tonumber(e.bytes))
  end,
  [C.PS_REC_COLLECTIVE] = function(_, e)
    return ffi.string(C.ps_record_call_name(e.name)), (',"bytes":%d,"group":%d,"ranks":%d'):format(
      tonumber(e.bytes), e.id, e.on)
  end,
  [C.PS_REC_WAIT] = function(w, e)
    return events.waits[e.name], (e.id >= 0 and (',"chunk":%d'):format(e.id) or "") .. w:in_module(e)
  end,
  [C.PS_REC_CHUNK] = function(w, e)
    return events.chunks[e.name], (',"chunk":%d,"kind":%s,"bytes":%d,"tier":%s%s,"on":%s'):format(e.id,
      text(kinds.name[e.of]), tonumber(e.bytes), text(w:tier(e.to)),
      e.name == C.PS_CHUNK_MOVE and ',"from":' .. text(w:tier(e.from)) or "", w:places(e.on))
  end,
}

local function micros(ns) return ("%.3f"):format(tonumber(ns) / 1000) end

-- Converts a time of this rank's clock to microseconds since time 0 of the file.
function Writer:at(ns) return micros(ns + self.offset - self.zero) end

-- Writes a counter event: the number of bytes in use on a tier or a device. All arguments of a counter must be numbers.
function Writer:counter(e)
  local tier = e.kind == C.PS_REC_TIER
  local name = tier and self:tier(e.to) or native.device_name[e.to] or tostring(e.to)
  self:line(('{"name":%s,"cat":"memory","ph":"C","ts":%s,"pid":%d,"tid":0,"args":{"chunks":%d,"other":%d}}'):format(
    text(name), self:at(e.begin_ns), self.rank, tonumber(e.bytes), tonumber(e.flops)))
end

-- Returns the number of the first track of an event's stream that is free when the event begins.
function Writer:track(e)
  local stream = stream_of(e)
  if stream == 0 then return 0 end
  local free = self.free[stream] or {}
  self.free[stream] = free
  local track = 1
  while free[track] and free[track] > e.begin_ns do track = track + 1 end
  free[track] = e.end_ns
  return stream * TRACKS + track - 1
end

function Writer:event(e)
  if e.kind == C.PS_REC_TIER or e.kind == C.PS_REC_DEVICE then return self:counter(e) end
  local name, more = TELLS[e.kind](self, e)
  local phase = events.actions[e.action]
  local args = ('{"step":%d%s%s}'):format(e.step, phase and ',"phase":"' .. phase .. '"' or "", more)
  local how = e.kind == C.PS_REC_CHUNK and '"i","s":"t"'
    or ('"X","dur":%s'):format(micros(e.end_ns - e.begin_ns))
  self:line(('{"name":%s,"cat":"%s","ph":%s,"ts":%s,"pid":%d,"tid":%d,"args":%s}'):format(text(name),
    events.kinds[e.kind], how, self:at(e.begin_ns), self.rank, self:track(e), args))
end

function Writer:line(json) self.lines[#self.lines + 1] = json end

function Writer:name_tracks()
  local function meta(tid, what, name)
    self:line(('{"name":"%s","ph":"M","pid":%d,"tid":%d,"args":{"name":%s}}'):format(what, self.rank, tid, text(name)))
  end
  meta(0, "process_name", "rank " .. self.rank)
  meta(0, "thread_name", STREAMS[1])
  for stream, tracks in pairs(self.free) do
    for track in ipairs(tracks) do
      meta(stream * TRACKS + track - 1, "thread_name", STREAMS[stream + 1] .. (track > 1 and " " .. track or ""))
    end
  end
end

-- Returns an int64_t as a decimal text.
local function whole(ns) return (tostring(ns):gsub("LL$", "")) end

-- Returns a list as JSON. encode() is not used for the whole list, because it would write an empty list as an object.
local function json_list(list)
  local parts = {}
  for i, value in ipairs(list) do parts[i] = encode(value) end
  return "[" .. table.concat(parts, ",") .. "]"
end

local function chunks_json()
  local parts = {}
  for i, chunk in ipairs(chunks.chunks()) do
    parts[i] = ('{"id":%d,"kind":%s,"index":%d,"nbytes":%d,"tensors":%s}'):format(chunk.id, text(chunk.kind),
      chunk.index, chunk.nbytes, json_list(chunk.tensors))
  end
  return "[" .. table.concat(parts, ",") .. "]"
end

--- Returns the record as the text of a file. Time 0 of the file is the time of the first event. However, if there are
--- several ranks and `group` is nil, it is the zero of the machine's clock, so that the files of all ranks of a machine
--- have the same time 0.
---@param group? ps.Group the ranks whose clocks are aligned; all of them must call this function. If group is nil, the
---  clocks are not aligned
---@return string
return function(group)
  local list, n, order, dropped = events.read()
  local first = n > 0 and list[order[1]].begin_ns or nil
  local offset, wrong, zero = 0LL, dist.rank() == 0 and 0LL or nil, dist.world_size() == 1 and first or 0LL
  if group then offset, wrong, zero = clock.align(group, first) end
  local w = setmetatable({ tiers = chunks.tiers() or {}, modules = require("ps.nn.calls")(), lines = {}, free = {},
    rank = dist.rank(), offset = offset, zero = zero }, Writer)
  local tiers, steps = {}, {}
  for i, tier in ipairs(w.tiers) do tiers[i] = { name = tier.name, budget = tier.budget } end
  for _, at in ipairs(order) do
    local e = list[at]
    w:event(e)
    if e.kind == C.PS_REC_STEP then
      steps[#steps + 1] = { step = e.step, first = e.name == 1, begin = tonumber(w:at(e.begin_ns)),
        ["end"] = tonumber(w:at(e.end_ns)) }
    end
  end
  w:name_tracks()
  local about = ('{"version":%d,"rank":%d,"ranks":%d,"clock_offset_ns":%s,"clock_error_ns":%s,"events":%d,'
    .. '"dropped":%d,"tiers":%s,"chunks":%s,"steps":%s}'):format(VERSION, w.rank, dist.world_size(), whole(offset),
    wrong and whole(wrong) or "null", n, dropped, json_list(tiers), chunks_json(), json_list(steps))
  return ('{"displayTimeUnit":"ms","psluajit":%s,"traceEvents":[\n%s\n]}\n'):format(about,
    table.concat(w.lines, ",\n"))
end
