-- SPDX-License-Identifier: BSD-3-Clause
-- Keeps an embedding matrix in host memory although a device computes (use_cpu_embedding). This is possible only if
-- lookups are the only ops that use the matrix. A lookup copies the indices to the host. It copies the rows that it
-- finds to the device. In backward, it copies the gradients of these rows to the host. The results are the same as
-- without this setting.
--
-- A dry run shows whether another op uses the matrix, for example the op of a tied head or a slice of positions. That
-- op fails, because its other inputs are on the device. The bytes that a dry run copies and the measured rates
-- (ps/engine/plan/rates.lua) show whether the step becomes shorter. With several ranks, a matrix moves to the host only
-- if all ranks choose to move it.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local collector = require "ps.core.collector"
local hooks = require "ps.core.hooks"
local Embedding = require "ps.nn.embedding".Embedding
local C = native.C

local embed = {}

local GAIN = 0.98  -- a matrix moves to the host if the step then takes less than this fraction of its previous time

---@class ps.engine.Table
---@field name string
---@field module ps.nn.Embedding
---@field param ps.Tensor
---@field nbytes integer
---@field crossed integer size in bytes of the rows that the lookups of one step copy to the device; set by a dry run

--- Returns true if a parameter is used only as the weight of one embedding.
---@param entry {places: table[]}
---@return boolean
function embed.is_table(entry)
  local owner, key = entry.places[1][1], entry.places[1][2]
  return #entry.places == 1 and key == "weight" and owner.forward == Embedding.forward
end

---@param tables ps.engine.Table[]
---@param entry {name: string, places: table[]}
---@param param ps.Tensor
function embed.add(tables, entry, param)
  tables[#tables + 1] = { name = entry.name, module = entry.places[1][1], param = param, nbytes = param:nbytes() }
end

--- Returns true if the engine's embedding matrices may move to the host. Prints a note if use_cpu_embedding is set but
--- has no effect.
---@param fields {cfg: ps.Config, device: integer, host: integer} fields of the engine
---@param note fun(text: string)
---@return boolean
function embed.wanted(fields, note)
  local want = fields.cfg.use_cpu_embedding
  if want == true and fields.device == fields.host then
    note("use_cpu_embedding has no effect: all ops already run on the cpu")
  elseif want == true and fields.cfg.memory.kind == "plain" then
    note("use_cpu_embedding has no effect: with memory = \"plain\", parameters are never moved")
  else
    return want ~= false and fields.device ~= fields.host
  end
  return false
end

local function put(engine, tables, on_host)
  for _, t in ipairs(tables) do
    native.check(C.ps_engine_set_device(native.ctx, t.param, on_host[t] and engine.host or engine.device))
  end
end

local function set_of(list)
  local set = {}
  for _, t in ipairs(list) do set[t] = true end
  return set
end

-- Returns the predicted time of a step in seconds if the embedding matrices in `list` are on the host. The prediction
-- is the time of the step's copies and updates (hybrid.lua), plus the time of the copies that lookups make. All other
-- work waits during the copies of lookups. The computations of forward and backward are not included.
local function cost(engine, tables, list, split)
  put(engine, tables, set_of(list))
  local ok, best = pcall(split)
  if not ok and type(best) == "table" and best.name == "ENOMEM" then return math.huge end
  if not ok then error(best, 0) end
  local seconds, r = best.seconds, engine.adam_rates
  for _, t in ipairs(list) do seconds = seconds + t.crossed / r.up + t.crossed / r.down end
  return seconds
end

-- Chooses the embedding matrices whose move to the host makes the step shorter. Tries one matrix of `works` after the
-- other.
local function paying(engine, tables, works, split)
  local chosen = {}
  local least = #works > 0 and cost(engine, tables, chosen, split)
  for _, t in ipairs(works) do
    chosen[#chosen + 1] = t
    local seconds = t.crossed > 0 and cost(engine, tables, chosen, split) or math.huge
    if seconds < GAIN * least then least = seconds else chosen[#chosen] = nil end
  end
  return chosen
end

-- Uses dry runs to find the embedding matrices that can be on the host. Returns these matrices, and a boolean that is
-- true if dry runs are impossible.
local function possible(engine, tables, dry_run)
  local works, blind = {}, false
  local function tries(list)
    local crossed = {}                                        -- by module, the number of copied bytes
    put(engine, tables, set_of(list))
    local off = hooks.on("lookup", function(module, nbytes) crossed[module] = (crossed[module] or 0) + nbytes end)
    local ok, id = pcall(dry_run)
    off()
    if not ok and caller.is_interrupt(id) then error(id, 0) end
    if not ok then collector.after_failure() end
    for _, t in ipairs(ok and list or {}) do t.crossed = crossed[t.module] or 0 end
    blind = blind or ok and id == nil
    return ok and id ~= nil
  end
  if #tables > 0 and tries(tables) then
    works = tables
  elseif #tables > 1 and not blind then
    for _, t in ipairs(tables) do if tries { t } then works[#works + 1] = t end end
  end
  return works, blind
end

-- Returns the embedding matrices that all ranks chose. A rank that failed still takes part in this exchange, because
-- the other ranks would wait for the rank. It chooses no matrix, and raises its error later.
local function agreed(engine, tables, ok, chosen)
  local set, all = set_of(ok and chosen or {}), {}
  for _, t in ipairs(tables) do if engine.ranks:least(set[t] and 1 or 0) == 1 then all[#all + 1] = t end end
  return all
end

--- Uses dry runs of the first step to decide which embedding matrices are on the host.
---@param engine ps.Engine
---@param dry_run fun(): integer? returns nil if the step cannot be run dry
---@param split fun(): ps.engine.Split? returns the best split of the updates between the devices, while the matrices
---  are on their current devices
---@return table<ps.engine.Table, boolean> on_host
function embed.choose(engine, dry_run, split)
  local tables, told, blind = engine.built.tables, engine.cfg.use_cpu_embedding == true, false
  local ok, chosen = pcall(function()
    local works
    works, blind = possible(engine, tables, dry_run)
    if not told then return paying(engine, tables, works, split) end
    local list = {}
    for _, t in ipairs(works) do if t.crossed > 0 then list[#list + 1] = t end end
    return list
  end)
  if engine.ranks then
    local all = agreed(engine, tables, ok, chosen)
    chosen = ok and all or chosen
  end
  if not ok then error(chosen, 0) end
  local on_host = set_of(chosen)
  put(engine, tables, on_host)
  if not told then return on_host end
  if #tables == 0 then engine:note("use_cpu_embedding has no effect: the model has no nn.Embedding, or other modules "
    .. "use its weight, too") end
  if blind then engine:note("use_cpu_embedding: the uses of embeddings are unknown before the first step, since the "
    .. "model reads values of tensors, which a dry run does not have") end
  for _, t in ipairs(blind and {} or tables) do
    if not on_host[t] then
      engine:note(("use_cpu_embedding: %s stays on the device: ops other than lookups use it (such as a tied "
        .. "head), or no op uses it"):format(t.name))
    end
  end
  return on_host
end

return embed
