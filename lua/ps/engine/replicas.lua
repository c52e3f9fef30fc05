-- SPDX-License-Identifier: BSD-3-Clause
-- What every rank holds alike must stay alike: a bit that flips in one rank's memory, or code that differs, otherwise
-- shows weeks later, if at all. Every so many steps (compare_ranks_every) the ranks compare a hash of it: step counts,
-- learning rates, the loss scale, the random numbers, buffers, and, where each has all of them (stage 0), the fp32
-- values of the parameters. What one rank owns has nobody to be compared with.
local ps = require "ps"
local talk = require "ps.dist.agree"
local ffi, C = ps.ffi, ps.C

local replicas = {}

local hash_out = ffi.new("uint64_t[1]")

-- Numbers that decide the next steps, and that no rank has apart.
local function settings_text(engine)
  local optimizer, rng = engine.optimizer, ps.rng()
  local parts = { engine.steps, optimizer.steps, tostring(rng.seed), tostring(rng.step) }
  if optimizer.scaler then parts[#parts + 1] = ("%.17g"):format(optimizer.scaler.scale) end
  for _, group in ipairs(optimizer.groups) do parts[#parts + 1] = ("%.17g"):format(group.lr) end
  return table.concat(parts, " ")
end

-- {name, hash} of each thing that is compared, in the same order on all ranks.
local function hashes(engine)
  local list = { { "step count, learning rate, loss scale or random numbers", talk.text_hash(settings_text(engine)) } }
  local function add(name, tensor)
    ps.check(C.ps_tensor_hash(tensor, hash_out))
    list[#list + 1] = { name, talk.hash_number(hash_out[0]) }
  end
  for name, tensor in engine.module:named_buffers() do
    if tensor.device_ == engine.host then add("buffer " .. name, tensor) end
  end
  if engine.zero_stage == 0 then
    for _, row in ipairs(engine.built.list) do add("parameter " .. row.name, row.values) end
  end
  return list
end

-- The ranks whose number is not that of most of them (of rank 0, where there is no most).
local function odd_ones(column)
  local counts, common = {}, column[1]
  for _, value in ipairs(column) do counts[value] = (counts[value] or 0) + 1 end
  for _, value in ipairs(column) do if counts[value] > counts[common] then common = value end end
  local odd = {}
  for rank, value in ipairs(column) do if value ~= common then odd[#odd + 1] = rank - 1 end end
  return odd
end

--- Compares; an error on all ranks where they differ, which names what and whom. Between steps, on all ranks.
---@param engine ps.Engine
function replicas.compare(engine)
  local group = engine.ranks.group
  local list, mine = hashes(engine), {}
  for i, entry in ipairs(list) do mine[i] = entry[2] end
  local all = ps.empty({ group:size(), #mine }, { dtype = "fp64" })
  group:all_gather(all, ps.tensor(mine, { dtype = "fp64" }))
  local rows = all:tolist()
  for i, entry in ipairs(list) do
    local column = {}
    for rank, row in ipairs(rows) do column[rank] = row[i] end
    local odd = odd_ones(column)
    if #odd > 0 then
      error(("the ranks have drifted apart by step %d: %s of rank %s: other bits than the rest has; a faulty machine, "
        .. "or a script that does not do the same on all ranks; go on from a checkpoint of before"):format(engine.steps,
        entry[1], table.concat(odd, ", ")), 0)
    end
  end
end

return replicas
