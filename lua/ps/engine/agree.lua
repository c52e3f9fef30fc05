-- SPDX-License-Identifier: BSD-3-Clause
-- What has to be the same on all ranks before the first step: the model's parameters, and every setting that decides a
-- value or an order (budgets and prints may differ). Ranks compare a number of the whole text; only where those differ
-- do the texts travel, so that every rank ends with the same error, which names the first difference.
local ps = require "ps"
local talk = require "ps.dist.agree"

local agree = {}

local SETTINGS = { "precision", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping",
  "grad_accum_dtype", "optimizer", "scheduler", "fp16", "seed", "device", "chunk_size", "overlap_optimizer",
  "compare_ranks_every", "recompute", "bf16" }
local OF_GROUPS = { "lr", "betas", "eps", "weight_decay" }

-- Appends "name<TAB>value" for every leaf of a value, keys in order.
local function flatten(lines, name, value)
  if type(value) ~= "table" then
    lines[#lines + 1] = ("%s\t%s"):format(name, type(value) == "number" and ("%.17g"):format(value) or tostring(value))
    return
  end
  local keys = {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for _, key in ipairs(keys) do
    flatten(lines, type(key) == "number" and ("%s[%d]"):format(name, key) or name .. "." .. key, value[key])
  end
end

local function model_lines(engine)
  local lines = { ("the chunks' size\t%d"):format(engine.built.layout.chunk_size) }
  for i, row in ipairs(engine.built.list) do
    lines[i + 1] = ("parameter %d\t%s %s [%s]"):format(i, row.name, row.param:dtype(),
      table.concat(row.param:shape(), ","))
  end
  return lines
end

local function setting_lines(engine, group)
  local lines = { "zero_optimization.stage\t" .. engine.zero_stage,
    "init_distributed's backend\t" .. (group.devices.never and "gloo" or group.devices.must and "nccl" or "absent") }
  for _, key in ipairs(SETTINGS) do flatten(lines, key, engine.cfg[key]) end
  return lines
end

local function group_lines(engine)
  local lines = {}
  for i, group in ipairs(engine.optimizer.groups) do
    for _, key in ipairs(OF_GROUPS) do flatten(lines, ("parameter group %d: %s"):format(i, key), group[key]) end
  end
  return lines
end

local function difference(theirs, first, rank)
  local function lines(text)
    local list = {}
    for line in (text .. "\n"):gmatch("(.-)\n") do list[#list + 1] = line end
    return list
  end
  local a, b = lines(theirs), lines(first)
  for i = 1, math.max(#a, #b) do
    if a[i] ~= b[i] then
      local name, value = (a[i] or ""):match("^(.-)\t(.*)$")
      local zero, expected = (b[i] or ""):match("^(.-)\t(.*)$")
      if name and zero and name ~= zero then return ("it has %s, rank 0 has %s"):format(name, zero) end
      return ("%s is %s on rank %d, %s on rank 0"):format(name or zero, value or "absent", rank, expected or "absent")
    end
  end
  return "in nothing that has a name"
end

local function compare(group, what, lines)
  local own = table.concat(lines, "\n")
  local all = group:all_gather(ps.empty({ group:size(), 2 }, { dtype = "int64" }),
    ps.tensor({ talk.text_hash(own), #own }, { dtype = "int64" })):tolist()
  for r = 2, group:size() do
    if all[r][1] ~= all[1][1] or all[r][2] ~= all[1][2] then
      local texts = talk.texts(group, own)
      error(("rank %d has another %s than rank 0: %s; every rank must make the same model and read the same "
        .. "configuration"):format(r - 1, what, difference(texts[r], texts[1], r - 1)), 0)
    end
  end
end

--- Before the model is made. All ranks call it; an error on all where one has other settings.
---@param group ps.Group
---@param engine ps.Engine
function agree.configuration(group, engine) compare(group, "configuration", setting_lines(engine, group)) end

--- When the model is made, likewise.
---@param group ps.Group
---@param engine ps.Engine
function agree.model(group, engine)
  compare(group, "model", model_lines(engine))
  compare(group, "configuration", group_lines(engine))
end

return agree
