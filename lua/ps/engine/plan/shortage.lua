-- SPDX-License-Identifier: BSD-3-Clause
-- Completes the error of a model that does not fit into memory. The original error names the tensor for which there was
-- no room. This file adds the size of the whole model in bytes, and the budgets. If budgets are too small, it also adds
-- the keys of the configuration that should be changed.
local chunks = require "ps.memory.chunks"
local readable = require "ps.core.readable"

local shortage = {}

local KEY = { device = "memory.device", host = "memory.host", disk = "memory.disk.limit" }

--- Returns two results: the number of bytes that this process needs per trained parameter, and the number per frozen
--- parameter. If ranks share the state, the results are averages over the ranks.
---@param options {precision: string, grads: boolean, grad_dtype: string, state_bytes: number} of build.place
---@param stage integer zero_optimization.stage
---@param size integer number of processes
function shortage.bytes_each(options, stage, size)
  local half = options.precision ~= "fp32"
  local param, grad = half and 2 or 4, 0
  if options.grads then grad = half and options.grad_dtype ~= "fp32" and 2 or 4 end
  local function share(bytes, from) return stage >= from and bytes / size or bytes end
  local kept = share(param, 3)
  return kept + share(grad, 2) + share(options.state_bytes - param - grad, 1), kept
end

-- Returns the budgets as text ("memory.host 20.0 MiB and memory.disk.limit 1.0 GiB"), and their sum in bytes.
local function budgets()
  local texts, sum = {}, 0
  for i, tier in ipairs(chunks.tiers()) do
    texts[i] = KEY[tier.name] .. " " .. (tier.budget > 0 and readable.bytes(tier.budget) or "has no limit")
    sum = sum + (tier.budget > 0 and tier.budget or math.huge)
  end
  return table.concat(texts, " and "), sum
end

-- Returns a text that says which keys of the configuration should be changed if budgets are too small.
local function advice(options, shared)
  local tiers, keys, has = chunks.tiers(), {}, {}
  for i, tier in ipairs(tiers) do
    keys[i], has[tier.name] = KEY[tier.name], true
  end
  local text = "raise " .. table.concat(keys, " or ")
  if not has.disk then text = text .. ", set memory.disk = { path = FOLDER }" end
  if options.precision == "fp32" then text = text .. ", train in bf16" end
  if shared then text = text .. ", share the state among processes (zero_optimization.stage = 3)" end
  return text .. ", or use a smaller model"
end

--- If an error says that there is no room for the model, adds the size of the whole model in bytes to its text. Returns
--- any other error unchanged.
---@param problem any
---@param counted? {numel: integer, trained: integer, blocks: integer} if the model can be counted: its number of
---  parameters, of trained parameters, and of bytes of packed weights
---@param options table the options of build.place
---@param stage integer zero_optimization.stage
---@param size integer number of processes
---@return any
function shortage.explain(problem, counted, options, stage, size)
  local lack = type(problem) == "table" and (problem.name == "ENOMEM" or problem.name == "ENOSPC")
  if not (lack and counted and chunks.tiers()) then return problem end
  local each, frozen = shortage.bytes_each(options, stage, size)
  local state = counted.trained * each + (counted.numel - counted.trained) * frozen + counted.blocks
  local text, sum = budgets()
  local whole = ("%s of state (%.0f parameters, %.4g bytes per trained one%s)"):format(readable.bytes(state),
    counted.numel, each, stage > 0 and (" on each of %d processes"):format(size) or "")
  local said, holders = problem.msg:match "^([^\n]*)(.*)$"  -- the list names the largest tensors
  if state > sum then
    problem.msg = ("the model does not fit: it has %s, but the budgets hold %s: %s; %s. It failed at: %s"):format(
      whole, readable.bytes(sum), text, advice(options, size > 1 and stage < 3), problem.msg)
  else
    problem.msg = ("%s. The model has %s; the budgets: %s%s"):format(said, whole, text, holders)
  end
  return problem
end

return shortage
