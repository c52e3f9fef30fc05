-- SPDX-License-Identifier: BSD-3-Clause
-- Embeddings on the host (use_cpu_embedding): where a device computes, a table that is used by nothing but lookups can
-- stay in host memory. Indices go down, the rows found go up, their gradients come back down; values are the same.
-- Whether a table is used otherwise (a tied head, a slice of positions) nobody has to say: dry runs with it on the host
-- fail where an op finds it beside tensors of the device.
local ps = require "ps"
local Embedding = require "ps.nn.embedding".Embedding
local C = ps.C

local embed = {}

---@class ps.engine.Table
---@field name string
---@field module ps.nn.Embedding
---@field param ps.Tensor
---@field nbytes integer

--- A parameter that is an embedding's table and nothing else, by registration.
---@param entry {places: table[]}
---@return boolean
function embed.is_table(entry)
  local owner, key = entry.places[1][1], entry.places[1][2]
  return #entry.places == 1 and key == "weight" and owner.forward == Embedding.forward
end

---@param tables ps.engine.Table[]
function embed.add(tables, entry, param)
  tables[#tables + 1] = { name = entry.name, module = entry.places[1][1], param = param, nbytes = param:nbytes() }
end

--- Whether this engine has a use for the question at all; says so where it was told to do what it cannot.
---@param engine ps.Engine
---@return boolean
function embed.wanted(engine)
  local want = engine.cfg.use_cpu_embedding
  if want == true and engine.device == engine.host then
    engine:note("use_cpu_embedding: means nothing where the cpu computes")
  elseif want == true and engine.cfg.memory.kind == "plain" then
    engine:note("use_cpu_embedding: plain memory stays where it is made")
  else
    return want ~= false and engine.device ~= engine.host
  end
  return false
end

local function put(engine, tables, on_host)
  for _, t in ipairs(tables) do
    ps.check(C.ps_engine_set_device(ps.ctx, t.param, on_host[t] and engine.host or engine.device))
    rawset(t.module, "crossed", nil)
  end
end

local function set_of(list)
  local set = {}
  for _, t in ipairs(list) do set[t] = true end
  return set
end

--- Decides before the first step, by dry runs of it.
---@param engine ps.Engine
---@param dry_run fun(): integer? nil when the step cannot be run without values
function embed.settle(engine, dry_run)
  local tables, told = engine.built.tables, engine.cfg.use_cpu_embedding == true
  local works, chosen, blind = {}, {}, false
  local function tries(list)
    put(engine, tables, set_of(list))
    local ok, id = pcall(dry_run)
    if not ok then collectgarbage() end                       -- what it had recorded
    for _, t in ipairs(ok and list or {}) do t.crossed = t.module.crossed or 0 end
    blind = blind or ok and id == nil
    return ok and id ~= nil
  end
  if #tables > 0 and tries(tables) then
    works = tables
  elseif #tables > 1 and not blind then
    for _, t in ipairs(tables) do if tries { t } then works[#works + 1] = t end end
  end
  for _, t in ipairs(works) do
    if t.crossed > 0 and (told or t.nbytes > t.crossed) then chosen[#chosen + 1] = t end
  end
  engine.tables_on_host = set_of(chosen)
  put(engine, tables, engine.tables_on_host)
  if not told then return end
  if #tables == 0 then engine:note("use_cpu_embedding: the model has no nn.Embedding with a table of its own") end
  if blind then engine:note("use_cpu_embedding: what tables are used for cannot be told before a step has run") end
  for _, t in ipairs(blind and {} or tables) do
    if not engine.tables_on_host[t] then
      engine:note(("use_cpu_embedding: %s stays on the device: it is used by more than lookups (as a tied head, say), "
        .. "or by none"):format(t.name))
    end
  end
end

return embed
