-- SPDX-License-Identifier: BSD-3-Clause
-- Compares state that must be equal on all ranks.
--
-- Before the first step, ranks compare the model's parameters and all settings on which a value or an order depends.
-- The settings of budgets and of printed output may differ. Each rank writes the compared values as text. The ranks
-- first compare hashes of these texts. If the hashes differ, the ranks exchange the texts. Every rank then raises the
-- same error, which names the first difference.
--
-- Every compare_ranks_every steps, ranks compare their state. The comparison finds a flipped bit, or code that differs
-- between ranks, which might otherwise be noticed only weeks later. The ranks compare hashes of the step counts, the
-- optimizer's settings, the loss scale, the random numbers and the buffers. They also compare the fp32 values of
-- parameters that have copies. Along dp, all parameters have copies in stage 0. Along tp, the parameters that are not
-- cut have copies. State that only one rank owns has no copy with which it could be compared.
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local optim_groups = require "ps.optim.groups"
local saved_groups = require "ps.optim.saved_groups"
local agree = require "ps.dist.agree"
local mesh = require "ps.dist.mesh"
local shard = require "ps.tensor.shard"
local ffi, C = native.ffi, native.C

local replicas = {}

local hash_out = ffi.new("uint64_t[1]")

-- -- before the first step -------------------------------------------------------------------------------------------
local SETTINGS = { "precision", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping",
  "grad_accum_dtype", "optimizer", "scheduler", "fp16", "seed", "device", "chunk_size", "overlap_optimizer",
  "compare_ranks_every", "recompute", "bf16", "pipeline", "tensor_parallel" }

-- Appends "name<TAB>value" for every element of a table and of its nested tables, or for a value that is not a table,
-- with keys in sorted order.
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
  local lines = { ("the chunk size\t%d"):format(engine.built.layout.chunk_size) }
  for i, row in ipairs(engine.built.list) do
    local desc = shard.of(row.param)
    lines[i + 1] = ("parameter %d\t%s %s [%s]%s"):format(i, row.name, row.param:dtype(),
      table.concat(row.param:shape(), ","),
      desc and (", cut along dimension %d in %d blocks"):format(desc.dim, desc.blocks)
      or shard.is_partial(row.param) and ", with different rows on each rank" or "")
  end
  -- The printed form has the options of modules that have no parameters of their own, such as the rate of a dropout.
  local number = 0
  for line in tostring(engine.module):gmatch "[^\n]+" do
    number = number + 1
    lines[#lines + 1] = ("line %d of the printed model\t%s"):format(number, (line:gsub("^%s+", "")))
  end
  return lines
end

-- Returns lines that describe how this rank cuts a model into stages. Each rank describes the whole model, which was
-- created without data.
local function cut_lines(module, stages)
  local lines = {}
  for name, param in module:named_parameters() do
    lines[#lines + 1] = ("parameter %s\t[%s]%s"):format(name, table.concat(param:shape(), ","),
      param:needs_grad() and "" or " frozen")
  end
  for i, cost in ipairs(stages.costs) do
    lines[#lines + 1] = ("operations of part %d\t%.17g in %s"):format(i, cost.forward, cost.name)
  end
  flatten(lines, "first parts of virtual stages", stages.first)
  return lines
end

local function setting_lines(engine, group)
  local lines = { "zero_optimization.stage\t" .. engine.zero_stage,
    "zero_optimization.reshard_after_forward\t" .. engine.cfg.zero_optimization.reshard_after_forward,
    "init_distributed's backend\t" .. (group.devices.never and "gloo" or group.devices.must and "nccl" or "absent") }
  for _, key in ipairs(SETTINGS) do flatten(lines, key, engine.cfg[key]) end
  return lines
end

local function group_lines(engine)
  local lines = {}
  for i, group in ipairs(engine.optimizer.groups) do
    for _, key in ipairs(optim_groups.settings(group)) do
      flatten(lines, ("parameter group %d: %s"):format(i, key), group[key])
    end
  end
  return lines
end

local function difference(theirs, first, rank, zeroth)
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
      if name and zero and name ~= zero then return ("it has %s, rank %d has %s"):format(name, zeroth, zero) end
      return ("%s is %s on rank %d, %s on rank %d"):format(name or zero, value or "absent", rank,
        expected or "absent", zeroth)
    end
  end
  return "the texts differ, but no named line does"
end

local function compare(group, what, lines)
  local other, theirs, first = agree.differs(group, table.concat(lines, "\n"))
  if not other then return end
  local rank, zeroth = group:world_rank(other), group:world_rank(0)
  error(("rank %d has a different %s from rank %d: %s; every rank must make the same model and read the same "
    .. "configuration"):format(rank, what, zeroth, difference(theirs, first, rank, zeroth)), 0)
end

--- Compares settings before the model is created. If a setting differs on one rank, all ranks raise an error. All ranks
--- must call this function.
---@param group ps.Group of all ranks
---@param engine ps.Engine
function replicas.configuration(group, engine) compare(group, "configuration", setting_lines(engine, group)) end

--- Compares parameters and parameter groups after the model has been created. If they differ between ranks, all ranks
--- raise an error.
---@param group ps.Group of the ranks that train the same parameters
---@param engine ps.Engine
function replicas.model(group, engine)
  compare(group, "model", model_lines(engine))
  compare(group, "configuration", group_lines(engine))
end

--- Compares how the ranks cut a model into stages.
---@param group ps.Group of all ranks
---@param module ps.nn.Module
---@param stages ps.engine.Stages
function replicas.compare_cut(group, module, stages) compare(group, "model", cut_lines(module, stages)) end

-- -- every step -----------------------------------------------------------------------------------------------------
--- Returns the optimizer's settings as text, with one line for each setting of each group.
---@param engine ps.Engine
---@return string
function replicas.rates(engine) return table.concat(group_lines(engine), "\n") end

--- Raises an error about ranks whose optimizers have different settings. All ranks must call this function.
---@param group ps.Group of all ranks
---@param engine ps.Engine
---@param rank integer counted from 1, the first rank whose settings differ from the settings of the first rank in its
---  line of the axis dp
function replicas.differ(group, engine, rank)
  local said, first = agree.texts(group, replicas.rates(engine)), mesh.line_of("dp", rank - 1)
  for zeroth = 0, rank - 1 do
    if mesh.line_of("dp", zeroth) == first then
      error(("the ranks' optimizers differ: %s; set the same rates and step the schedules on all ranks"):format(
        difference(said[rank], said[zeroth + 1], rank - 1, zeroth)), 0)
    end
  end
end

-- -- every few steps -------------------------------------------------------------------------------------------------
--- The name, in errors, of the values that settings() returns.
replicas.OF_SETTINGS = "step count, learning rate or other setting of the optimizer, loss scale or random numbers"

--- Returns a text with the values on which the next steps depend and that must be equal on all ranks. The seed is not
--- included, because each stage may have its own seed.
---@param engine ps.Engine
---@return string
function replicas.settings(engine)
  local optimizer = engine.optimizer
  local parts = { engine.steps, optimizer.steps, tostring(random.state().step),
    ("%.17g"):format(optimizer.max_norm or 0) }
  if optimizer.scaler then parts[#parts + 1] = ("%.17g"):format(optimizer.scaler.scale) end
  for _, group in ipairs(optimizer.groups) do
    local keys = optim_groups.settings(group)
    local text = saved_groups.to_text(group, keys)
    for _, key in ipairs(keys) do parts[#parts + 1] = tostring(text[key]) end
  end
  return table.concat(parts, " ")
end

-- Returns the part of this rank's random-number state that must be equal on all ranks, as text for errors.
local function random_text()
  local rng = random.state()
  return (("seed %s, step %s"):format(tostring(rng.seed), tostring(rng.step)):gsub("ULL", ""))
end

-- Returns a pair {name, hash} for each state that is compared, in the same order on all ranks of the axis. The first
-- pair is for the random numbers. Along dp, parameters are not compared if ranks share state, because there is only one
-- copy. Along tp, each rank has a copy of the parameters that are not cut.
local function hashes(engine, axis)
  local list = { { "random numbers", agree.text_hash(random_text()) },
    { replicas.OF_SETTINGS, agree.text_hash(replicas.settings(engine)) } }
  local function add(name, tensor)
    native.check(C.ps_tensor_hash(tensor, hash_out))
    list[#list + 1] = { name, agree.hash_number(hash_out[0]) }
  end
  for name, tensor in engine.module:named_buffers() do
    if tensor.device_ == engine.host then add("buffer " .. name, tensor) end
  end
  for _, row in ipairs(engine.built.list) do
    local copied = axis == "dp" and engine.zero_stage == 0 or axis == "tp" and not shard.of(row.param)
    if copied and row.values ~= nil then add("parameter " .. row.name, row.values)
    elseif copied and row.remainder then
      add("parameter " .. row.name, row.place ~= nil and row.place or row.param)
      add("remainders of " .. row.name, row.master)
    end
  end
  return list
end

-- Returns the ranks whose value differs from the most common value. If no value is more common than rank 0's value,
-- returns the ranks that differ from rank 0.
local function odd_ones(column)
  local counts, common = {}, column[1]
  for _, value in ipairs(column) do counts[value] = (counts[value] or 0) + 1 end
  for _, value in ipairs(column) do if counts[value] > counts[common] then common = value end end
  local odd = {}
  for rank, value in ipairs(column) do if value ~= common then odd[#odd + 1] = rank - 1 end end
  return odd
end

-- Returns the text of an error about ranks whose random numbers differ. `odd` contains the ranks that differ from the
-- most common state. All ranks of the group must call this function.
local function random_differ(engine, group, odd)
  local said, is_odd, usual = agree.texts(group, random_text()), {}, 0
  for _, rank in ipairs(odd) do is_odd[rank] = true end
  while is_odd[usual] do usual = usual + 1 end
  return ("the ranks' random numbers differ after step %d: rank %d has %s, but rank %d has %s: call ps.manual_seed "
    .. "with the same seed on all ranks, and again after a rank has drawn with a seed of its own; dropout differs "
    .. "between the ranks' rows in any case"):format(engine.steps, group:world_rank(odd[1]), said[odd[1] + 1],
      group:world_rank(usual), said[usual + 1])
end

-- Returns the text of an error if ranks differ along an axis, or nil if no ranks differ.
local function difference_along(engine, axis)
  local group = engine.ranks[axis]
  if not group or group:size() == 1 then return nil end
  local list, mine = hashes(engine, axis), {}
  for i, entry in ipairs(list) do mine[i] = entry[2] end
  local rows = agree.numbers(group, mine)
  for i, entry in ipairs(list) do
    local column = {}
    for rank, row in ipairs(rows) do column[rank] = row[i] end
    local odd = odd_ones(column)
    if #odd > 0 and i == 1 then return random_differ(engine, group, odd) end
    for k, rank in ipairs(odd) do odd[k] = group:world_rank(rank) end
    if #odd > 0 then
      return ("the ranks' states differ after step %d: %s of rank %s has different bits from the other ranks: a faulty "
        .. "machine, or a script that does different things on the ranks; continue from an earlier checkpoint"):format(
          engine.steps,
        entry[1], table.concat(odd, ", "))
    end
  end
end

--- Compares the states of the ranks between steps, along each axis on which ranks have copies. If states differ, all
--- ranks raise an error that names the state and the ranks. All ranks must call this function.
---@param engine ps.Engine
function replicas.compare(engine)
  local ranks = engine.ranks
  local along_dp, along_tp = difference_along(engine, "dp"), difference_along(engine, "tp")
  local problem = along_dp or along_tp
  local function tell() if problem then error(problem, 0) end end
  if ranks.world:size() == ranks.dp:size() then return tell() end
  agree.run(ranks.world, tell)                      -- other groups of ranks may have found no difference
end

return replicas
