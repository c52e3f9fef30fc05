-- SPDX-License-Identifier: BSD-3-Clause
-- Data-parallel training: every rank holds the whole model and takes its own rows of each batch. Before the update the
-- gradients of all ranks are added, each weighed by its targets, so that a step is that of one process with all rows.
local ps = require "ps"

local ranks = {}

---@class ps.engine.Ranks
---@field group ps.Group
local Ranks = {}
Ranks.__index = Ranks

-- A number that texts hardly share: a polynomial of their bytes modulo a prime, exact in a double.
local function text_number(text)
  local h = 0
  for i = 1, #text do h = (h * 257 + text:byte(i)) % 17592186044399 end
  return h
end

-- What has to be the same on all ranks, as text.
local function described(engine)
  local parts = {}
  for _, row in ipairs(engine.built.list) do
    parts[#parts + 1] = ("%s %s [%s]"):format(row.name, row.param:dtype(), table.concat(row.param:shape(), ","))
  end
  local config = {}
  for _, key in ipairs { "precision", "accumulate", "gradient_clipping" } do
    config[#config + 1] = tostring(engine[key] or engine.cfg[key])
  end
  return table.concat(parts, ";"), table.concat(config, " ")
end

local function agree(self, what, text)
  local mine = ps.tensor({ text_number(text) }, { dtype = "int64" })
  local all = ps.empty({ self.group:size() }, { dtype = "int64" })
  self.group:all_gather(all, mine)
  for rank = 1, self.group:size() - 1 do
    if all[rank]:item() ~= all[0]:item() then
      error(("rank %d has another %s than rank 0; every rank must make the same model and read the same configuration"
        ):format(rank, what), 0)
    end
  end
end

--- Checks that the ranks agree on model and configuration, and gives all of them rank 0's values.
---@param engine ps.Engine
---@param group ps.Group
---@return ps.engine.Ranks
function ranks.new(engine, group)
  local self = setmetatable({ engine = engine, group = group }, Ranks)
  local model, config = described(engine)
  agree(self, "model", model)
  agree(self, "configuration", config)
  engine.masters:sync()
  for _, row in ipairs(engine.built.list) do
    group:broadcast(row.param, 0)
    if not rawequal(row.master, row.param) then group:broadcast(row.master, 0) end
  end
  engine.masters:note()
  return self
end

-- Who has which gradient, and the sum of the weights: one small exchange before the large ones.
local function exchange_counts(self)
  local list, counts = self.engine.built.list, {}
  for i, row in ipairs(list) do counts[i] = row.param:grad() ~= nil and 1 or 0 end
  counts[#list + 1] = self.engine.weight_sum
  local all = ps.empty({ self.group:size(), #counts }, { dtype = "fp64" })
  self.group:all_gather(all, ps.tensor(counts, { dtype = "fp64" }))
  return all:sum(0):tolist()
end

--- Adds the gradients of all ranks, in the order of ranks. The engine's weight_sum is that of all ranks afterwards.
function Ranks:reduce()
  local engine, size = self.engine, self.group:size()
  local counts = exchange_counts(self)
  local list = engine.built.list
  for i, row in ipairs(list) do
    local have = counts[i]
    if have ~= 0 and have ~= size then
      error(("parameter %s has a gradient on %d of %d ranks; every rank must use the same parameters in a step"):format(
        row.name, have, size), 0)
    end
  end
  engine.weight_sum = counts[#list + 1]
  for i, row in ipairs(list) do
    if counts[i] == size then self.group:all_reduce(row.param:grad()) end
  end
end

return ranks
