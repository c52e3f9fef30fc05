-- SPDX-License-Identifier: BSD-3-Clause
-- Chunks and tiers of the open engine as plain lists, for ps.chunks() and ps.memory().
local E = require "ps.ffi"
local kinds = require "ps.engine.layout.kinds"
local ffi, C = E.ffi, E.C

local look = {}

local STATES = { [0] = "FREE", "COMPUTE", "HOLD", "HOLD_AFTER_FWD", "HOLD_AFTER_BWD" }

--- The tiers, fastest first; nil when no engine is open.
---@return ps.view.Tier[]?
function look.tiers()
  local count = C.ps_engine_tier_count(E.ctx)
  if count == 0 then return nil end
  local info, list = ffi.new("ps_tier_info"), {}
  for t = 0, count - 1 do
    E.check(C.ps_engine_tier_get(E.ctx, t, info))
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

--- All chunks.
---@return ps.view.Chunk[]
function look.chunks()
  local info, list, tiers = ffi.new("ps_chunk_info"), {}, look.tiers() or {}
  for id = 0, C.ps_engine_chunk_count(E.ctx) - 1 do
    E.check(C.ps_engine_chunk_get(E.ctx, id, info))
    if info.nbytes > 0 then
      local row = { id = id, kind = kinds.name[info.kind], group = info.group, index = info.index,
        nbytes = tonumber(info.nbytes), used_nbytes = tonumber(info.used_nbytes), state = STATES[info.state],
        pins = info.pins, tiers = {}, tensors = {}, last_use = known(info.last_use), next_use = known(info.next_use) }
      for t, tier in ipairs(tiers) do
        if bit.band(info.valid, bit.lshift(1, t - 1)) ~= 0 then row.tiers[tier.name] = true end
      end
      for i = 0, info.n_tensors - 1 do row.tensors[i + 1] = ffi.string(C.ps_engine_chunk_tensor(E.ctx, id, i)) end
      list[#list + 1] = row
    end
  end
  return list
end

return look
