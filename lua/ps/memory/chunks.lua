-- SPDX-License-Identifier: BSD-3-Clause
-- Returns the chunks, tiers and traces of the open engine as plain lists, for ps.chunks(), ps.memory() and ps.trace().
local native = require "ps.core.ffi"
local kinds = require "ps.core.kinds"
local array = require "ps.core.array"
local ffi, C = native.ffi, native.C

local use_array = array "ps_use"

local look = {}

local ACTIONS = { [C.PS_ACT_NONE] = "-", [C.PS_ACT_FORWARD] = "forward", [C.PS_ACT_BACKWARD] = "backward",
  [C.PS_ACT_INPUT] = "input", [C.PS_ACT_WEIGHT] = "weight", [C.PS_ACT_REDUCE] = "reduce", [C.PS_ACT_NORM] = "norm",
  [C.PS_ACT_UPDATE] = "update" }
local STATES = { [0] = "FREE", "COMPUTE", "HOLD", "HOLD_AFTER_FWD", "HOLD_AFTER_BWD" }

--- Returns the tiers, fastest first, or nil if no engine is open.
---@return ps.view.Tier[]?
function look.tiers()
  local count = C.ps_engine_tier_count(native.ctx)
  if count == 0 then return nil end
  local info, list = ffi.new("ps_tier_info"), {}
  for t = 0, count - 1 do
    native.check(C.ps_engine_tier_get(native.ctx, t, info))
    local row = { name = ffi.string(info.name) }
    for _, key in ipairs { "budget", "chunks", "other", "free", "peak", "bytes_up", "bytes_down" } do
      row[key] = tonumber(info[key])
    end
    list[t + 1] = row
  end
  return list
end

local function known(moment)
  moment = tonumber(moment)
  if moment >= 0 then return moment end
end

--- Returns all chunks of this rank.
---@return ps.view.Chunk[] list the chunks. The field `open` of the list is true if an engine with chunks is open. Even
---  then, the list may be empty, because other ranks may own all chunks
function look.chunks()
  local info, list, tiers = ffi.new("ps_chunk_info"), {}, look.tiers()
  list.open, tiers = tiers ~= nil, tiers or {}
  for id = 0, C.ps_engine_chunk_count(native.ctx) - 1 do
    native.check(C.ps_engine_chunk_get(native.ctx, id, info))
    if info.nbytes > 0 then
      local row = { id = id, kind = kinds.name[info.kind], group = info.group, index = info.index,
        nbytes = tonumber(info.nbytes), used_nbytes = tonumber(info.used_nbytes), state = STATES[info.state],
        pins = info.pins, tiers = {}, tensors = {}, last_use = known(info.last_use), next_use = known(info.next_use) }
      for t, tier in ipairs(tiers) do
        if bit.band(info.valid, bit.lshift(1, t - 1)) ~= 0 then row.tiers[tier.name] = true end
      end
      for i = 0, info.n_tensors - 1 do row.tensors[i + 1] = ffi.string(C.ps_engine_chunk_tensor(native.ctx, id, i)) end
      list[#list + 1] = row
    end
  end
  return list
end

--- Returns the trace of a step: a list of its moments, each with the chunks that the moment uses.
---@param id integer id of the trace
---@return ps.view.Moment[]? moments nil if newer traces have replaced this trace
---@return table<string, integer>? other peak size in bytes of the memory outside chunks, by tier
function look.trace(id)
  local info, tiers, chunks, moments, other = ffi.new("ps_trace_info"), look.tiers(), {}, {}, {}
  local rc = C.ps_engine_trace_get(native.ctx, id, info, 0, nil)
  if rc == C.PS_ERANGE then return nil end
  native.check(rc)
  local uses = use_array(info.n_uses)
  native.check(C.ps_engine_trace_get(native.ctx, id, info, info.n_uses, uses))
  for _, chunk in ipairs(look.chunks()) do chunks[chunk.id] = chunk end
  for m = 0, info.n_moments - 1 do moments[m + 1] = { moment = m, action = "-", nbytes = 0, uses = {} } end
  for i = 0, info.n_uses - 1 do
    local use = uses[i]
    local at, chunk = moments[use.moment + 1], chunks[use.chunk]
    at.action, at.nbytes = ACTIONS[use.action], at.nbytes + chunk.nbytes
    at.uses[#at.uses + 1] = { chunk = use.chunk, kind = chunk.kind, nbytes = chunk.nbytes,
      tier = tiers[use.tier + 1].name, write = use.write ~= 0, ends = use.ends ~= 0 }
  end
  for t, tier in ipairs(tiers) do
    if tier.name ~= "disk" then other[tier.name] = tonumber(info.other[t - 1]) end
  end
  return moments, other
end

return look
