-- SPDX-License-Identifier: BSD-3-Clause
-- Lets several processes train one model. Before the ranks begin to use a model, a plan or a step, they check that it
-- is the same on all ranks. Each process has its own rows of each batch. The gradients of all ranks are summed. Each
-- rank's gradient is weighted by its number of targets, so a step has the same result as in one process with all rows.
-- src/zero/shard.h defines the state that each rank owns, and src/zero/reduce.c exchanges gradients.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local agree = require "ps.dist.agree"
local batch = require "ps.data.batch"
local nn_module = require "ps.nn.module"
local data = require "ps.data"
local dist = require "ps.dist"
local mesh = require "ps.dist.mesh"
local random_state = require "ps.dist.random_state"
local replicas = require "ps.engine.ranks.replicas"
local scope = require "ps.core.scope"
local shard = require "ps.tensor.shard"
local step = require "ps.engine.step"
local trained = require "ps.engine.step.trained"
local zero = require "ps.engine.ranks.zero"
local ffi, C = native.ffi, native.C

local data_parallel = {}

---@class ps.engine.Ranks
---@field world ps.Group all ranks; used to compare the ranks and to report failures
---@field dp ps.Group the ranks that train the same parameters (ps/dist/mesh.lua). The gradients and losses of these
---  ranks are summed. If all other ranks have other layers, the group contains only this rank
---@field tp? ps.Group the ranks that share the same layers
---@field noted string[] if `tp` is set: hashes of the micro-batches and weights of the losses since the last step began
---@field shards ps.engine.Sharding
local Ranks = {}
Ranks.__index = Ranks

-- Connects the devices of the ranks along these axes directly, if all ranks can connect their devices. Otherwise bytes
-- are sent through host memory, or an error is raised if init_distributed has forbidden this.
local function connect(engine, groups)
  local noted = false
  for _, group in ipairs(groups) do
    if engine.device == engine.host or group.devices.never then return end
    local ok, problem = pcall(group.connect, group, engine.device_name)
    if not ok then
      if type(problem) ~= "table" or problem.name ~= "EUNSUP" or group.devices.must then error(problem, 0) end
      if not noted then
        engine:note(("messages between ranks are copied from %s through host memory: %s"):format(engine.device_name,
          problem.msg))
      end
      noted = true
    end
  end
end

--- Checks that the ranks have read the same configuration, and sets up the sharing of the engine's chunks. Called only
--- if there are several ranks.
---@param engine ps.Engine
---@return ps.engine.Ranks
function data_parallel.new(engine)
  local self = setmetatable({ engine = engine, world = mesh.group "world", dp = mesh.group "dp" or dist.self(),
    tp = mesh.group "tp", noted = {} }, Ranks)
  replicas.configuration(self.world, engine)
  local groups = { self.dp }
  for _, axis in ipairs { "tp", "pp" } do groups[#groups + 1] = mesh.group(axis) end
  connect(engine, groups)
  random_state.share(self.world)                   -- makes all ranks create the same model
  local reshard = engine.cfg.zero_optimization.reshard_after_forward
  -- if true, ranks exchange data once per step, and not for each micro-batch
  local cut = engine.cfg.pipeline.stages > 1
  if self.tp then
    native.check(C.ps_engine_tensor_parallel(native.ctx, self.tp.c))
  end
  self.shards = zero.new(self.dp, engine.zero_stage, reshard == "never" or reshard == "auto" and cut,
    cut and reshard ~= "always")
  return self
end

-- Raises an error if the ranks' loaders read different data, or read the same data in a different order. No other check
-- would find this difference.
---@param records table<string, number>[] the records of all ranks; `data` is the hash of the data that the rank's
---  loader reads, or 0 if the rank has no loader
function Ranks:compare_data(records)
  local alike = true
  for _, record in ipairs(records) do
    if record.data == 0 then return end            -- this rank's batches come from another source
    alike = alike and record.data == records[1].data
  end
  self.data_compared = true
  if alike then return end
  local said = agree.texts(self.world, data.read_by(self.world))
  for rank, text in ipairs(said) do
    if text ~= said[1] then
      error(("the ranks' loaders read different data: on rank %d %s; on rank 0 %s; use the same files, order and "
        .. "sizes on all ranks, and rank = 0, world_size = 1 for a loader that not all ranks use"):format(
          rank - 1, text, said[1]), 0)
    end
  end
end

-- Returns the rank that has the first layers of the model replica to which `rank` belongs. If several ranks share these
-- layers, returns the first of these ranks.
local function first_of_copy(rank)
  local tp, dp = mesh.size "tp", mesh.size "dp"
  return math.floor(rank / tp) % dp * tp
end

-- Returns true if two ranks have the same layers, or parts of the same layers.
local function same_stage(a, b)
  local ranks = mesh.size "tp" * mesh.size "dp"
  return math.floor(a / ranks) == math.floor(b / ranks)
end

-- Fields of a rank's record that must be equal on all ranks of one model replica that share layers. A field with
-- `stages` must also be equal on all stages. Other fields may differ between stages if the model's own forward runs the
-- stages. In that case, each stage may have its own rows, seed and frozen parameters.
local GOES_ON = "continues with another " .. replicas.OF_SETTINGS .. ", or other frozen parameters, than"
local ALIKE = { { field = "batch", what = "has a different batch, or different weights of losses, from" },
  { field = "settings", what = GOES_ON, stages = true }, { field = "own", what = GOES_ON } }

-- Raises an error if ranks of one model replica have different rows, or would continue with different settings.
-- `records` contains the records of all ranks. `same_rows` is true if all stages of the model have the same rows.
local function compare_parts(records, same_rows)
  for i, record in ipairs(records) do
    for _, alike in ipairs(ALIKE) do
      local first = (same_rows or alike.stages) and first_of_copy(i - 1) or mesh.line_of("tp", i - 1)
      if record[alike.field] ~= records[first + 1][alike.field] then
        error(("rank %d %s rank %d, but both have parts of one model: run the same script on the same rows, "
          .. "with the same seed"):format(i - 1, alike.what, first), 0)
      end
    end
  end
end

-- Returns a hash of the rows of a micro-batch, or 0 if the micro-batch has no rows.
local function rows_number(given)
  local said = {}
  for i = 1, given.n do batch.add_hashes(said, given[i]) end
  return said[1] and agree.text_hash(table.concat(said, " ")) or 0
end

-- Prints a note if ranks have the same rows, although each rank should have its own part of a batch. Called once, after
-- the first micro-batch.
local function compare_rows(self, records)
  self.rows_compared = true
  local seen = {}
  for rank, record in ipairs(records) do
    local line = mesh.line_of("dp", rank - 1)
    local key = line .. " " .. record.rows
    if record.rows ~= 0 and seen[key] and self.world:rank() == 0 then
      self.engine:note(("ranks %d and %d train on the same rows, so the second one contributes nothing: give each "
        .. "data-parallel rank its own rows, as the loaders of ps.data do, or by ps.rank() and ps.world_size()"
        ):format(seen[key] - 1, rank - 1))
      return
    end
    seen[key] = rank
  end
end

-- Raises an error if ranks that train the same parameters have different optimizer settings. With different settings,
-- each rank would update its parameters in another way.
local function compare_rates(self, records)
  local first = {}
  for rank, record in ipairs(records) do
    local line = mesh.line_of("dp", rank - 1)
    first[line] = first[line] or record.rates
    if record.rates ~= first[line] then return replicas.differ(self.world, self.engine, rank) end
  end
end

--- Records a micro-batch of a training step. When the next step begins, it is compared with the micro-batches of the
--- other ranks that have parts of the same layers.
---@param given any[]
function Ranks:note_batch(given)
  if not self.rows_compared and not self.engine.driver.in_loops then self.rows = rows_number(given) end
  if not self.tp then return end
  self.noted[#self.noted + 1] = batch.signature(given)
  for i = 1, given.n do batch.add_hashes(self.noted, given[i]) end
end

--- Records the weight of a loss. The weight is compared at the same time as the micro-batches. Ranks that have parts of
--- the same layers sum their gradients, so they must use the same weight for a loss.
---@param weight number
function Ranks:note_weight(weight)
  if self.tp then self.noted[#self.noted + 1] = ("%.17g"):format(weight) end
end

-- Returns a hash of the recorded micro-batches and loss weights. The hash must be equal on all ranks of one model
-- replica.
local function batch_number(self)
  local text, rows = table.concat(self.noted, " "), self.engine.driver:fingerprint()
  return agree.text_hash(rows and ("%.17g %s"):format(rows, text) or text)
end

-- -- agreement by plan -----------------------------------------------------------------------------------------------
local PLANNED = { "tp", "dp" }                     -- axes along which a dry run records the calls of a step

-- The fields of a rank's record before a step:
--   failed     1 if the step could not begin
--   gathers    the number of gathers that begin before their chunks are needed
--   short      1 if there was no room, but there may be room for smaller chunks
--   share      the maximum size of smaller chunks, as a fraction of the present size
--   data       the hash of the data that the loader reads, or 0 if there is no loader or the data has already been
--              compared
--   batch      the hash of the micro-batches and of the weights of losses
--   settings   the hash of the settings that must be equal on all stages
--   own        the hash of the seed and of the parameters that train
--   tp, dp     the hash of the planned calls along this axis, or 0 if no calls are known
--   rows       the hash of the first micro-batch's rows, or 0 if the rows have already been compared
--   ops        the hash of the forward's ops in a dry run, or 0 if the ops are unknown or have already been compared
--   shapes     the hash of the shapes of this step
--   rates      the hash of the optimizer's settings, which must be equal on the ranks that train the same parameters
--   thawed     the hash of the names of the parameters that were thawed since the last step, or 0 if there are none
local RECORD = { "failed", "gathers", "short", "share", "data", "batch", "settings", "own", "tp", "dp", "rows",
  "ops", "shapes", "rates", "thawed" }
local hash_out, text_out = ffi.new "uint64_t[1]", ffi.new "char[200]"
local ops_out, n_out = ffi.new "const uint16_t *[1]", ffi.new "int32_t[1]"

-- Returns a hash of the calls between ranks that the dry run of this step has recorded for an axis, or 0 if there are
-- no such calls.
local function calls_number(self, axis)
  local group = self[axis]
  if not group or group:size() == 1 then return 0 end
  native.check(C.ps_engine_plan_calls(native.ctx, step.trace(self.engine) or C.PS_TRACE_UNKNOWN, group.c, hash_out))
  return agree.hash_number(hash_out[0])
end

-- Returns the calls that this rank has planned for an axis, one call per line.
local function calls_text(group)
  local lines = {}
  for i = 0, C.ps_group_plan_calls(group.c) - 1 do
    native.check(C.ps_group_plan_call(group.c, i, text_out, 200))
    lines[i + 1] = ffi.string(text_out)
  end
  return table.concat(lines, "\n")
end

-- Raises an error about ranks that have planned different calls. All ranks must call this function. All ranks find the
-- same first difference.
local function plans_differ(self, axis, first, other)
  local group = self[axis]
  local said = agree.texts(self.world, group and group:size() > 1 and calls_text(group) or "")
  local a, b = said[first]:gmatch "[^\n]+", said[other]:gmatch "[^\n]+"
  local one, two, n = a(), b(), 1
  while one == two and one ~= nil do one, two, n = a(), b(), n + 1 end
  error(("the ranks of %s plan different calls: the first difference is call %d of the step: rank %d plans %s, rank %d "
    .. "%s; run the same script with the same model on all of them"):format(axis, n, first - 1, one or "no "
    .. "further call",
    other - 1, two or "no further call"), 0)
end

-- Begins the plans of this rank's groups. A group follows a plan only if all its ranks have planned calls. If the
-- planned calls of its ranks differ, raises an error.
local function begin_plans(self, records)
  for _, axis in ipairs(PLANNED) do
    local first_of, agreed = {}, {}
    for rank, record in ipairs(records) do
      local line = mesh.line_of(axis, rank - 1)
      first_of[line] = first_of[line] or rank
      if agreed[line] == nil then agreed[line] = true end
      if record[axis] == 0 then agreed[line] = false end
    end
    for rank, record in ipairs(records) do
      local line = mesh.line_of(axis, rank - 1)
      local first = first_of[line]
      if agreed[line] and record[axis] ~= records[first][axis] then plans_differ(self, axis, first, rank) end
    end
    local group = self[axis]
    if group and group:size() > 1 then
      C.ps_group_plan_begin(group.c, agreed[mesh.line_of(axis, self.world:rank())] and 1 or 0)
    end
  end
end

-- Returns the ops of the forward in this step's dry run as an array, and the length of the array. If there was no dry
-- run, the length is 0.
local function forward_ops(self)
  native.check(C.ps_engine_forward_ops(native.ctx, step.trace(self.engine) or C.PS_TRACE_UNKNOWN, ops_out, n_out))
  return ops_out[0], n_out[0]
end

-- Adds hashes of the forward's ops and of the step's shapes to a record.
local function note_ops(self, record, key)
  local list, n = forward_ops(self)
  if n == 0 then return end
  record.ops, record.shapes = agree.hash_number(C.ps_xxh3(list, 2 * n)), agree.text_hash(key)
end

local function ops_text(self)
  local names, list, n = {}, forward_ops(self)
  for i = 0, n - 1 do names[i + 1] = native.op_info[list[i]].name end
  return table.concat(names, "\n")
end

-- Prints a note once if ranks that train the same parameters run different ops for batches of the same shapes. The
-- forward then depends on the rank. This is not an error, because a rank may compute something only to print it. All
-- ranks must call this function. All ranks find the same first difference.
local function compare_ops(self, records)
  local seen, first, other = {}, nil, nil
  for rank, record in ipairs(records) do
    if record.ops ~= 0 then
      local key = ("%d %.17g"):format(mesh.line_of("dp", rank - 1), record.shapes)
      seen[key] = seen[key] or rank
      if records[seen[key]].ops ~= record.ops then
        first, other = seen[key], rank
        break
      end
    end
  end
  if not first then return end
  self.ops_compared = true
  local said = agree.texts(self.world, ops_text(self))
  if self.world:rank() > 0 then return end
  local a, b = said[first]:gmatch "[^\n]+", said[other]:gmatch "[^\n]+"
  local one, two, n = a(), b(), 1
  while one == two and one ~= nil do one, two, n = a(), b(), n + 1 end
  self.engine:note(("the forward of rank %d runs other ops than that of rank %d for a batch of the same shapes: op %d "
    .. "is %s on rank %d and %s on rank %d. Gradients are summed over the ranks as if all had run the same forward; if "
    .. "this is not intended, remove what depends on the rank from forward"):format(other - 1, first - 1, n,
      two or "missing", other - 1, one or "missing", first - 1))
end

-- Raises an error on all ranks if ranks that train the same parameters have thawed different parameters. If the model's
-- own forward runs its stages, the thawed parameters may differ between stages. `values` contains the hashes of all
-- ranks, and `names` is this rank's list of names.
local function compare_thawed(self, values, names)
  local own, first = self.engine.stages and not self.engine.driver.in_loops, {}
  for rank, value in ipairs(values) do
    local line = own and mesh.line_of("dp", rank - 1) or 0
    first[line] = first[line] or rank
    if value ~= values[first[line]] then
      local said, list = agree.texts(self.world, names or ""), {}
      for k, at in ipairs { rank, first[line] } do
        list[k] = ("rank %d thawed %s"):format(at - 1, said[at] == "" and "no parameter" or said[at]:gsub("\n", ", "))
      end
      error(("%s: freeze and thaw the same parameters on all ranks"):format(table.concat(list, ", but ")), 0)
    end
  end
end

--- Checks that all ranks have thawed the same parameters. If prepare() raises an error on one rank, all ranks raise an
--- error. All ranks must call this function.
---@param prepare fun(): string? returns the names of the parameters
function Ranks:agree_on_thawed(prepare)
  local ok, result = pcall(prepare)
  local said, values = agree.texts(self.world, ok and "+" .. (result or "") or "-" .. tostring(result)), {}
  if not ok then error(result, 0) end
  for i, text in ipairs(said) do
    if text:sub(1, 1) == "-" then error(("rank %d cannot thaw parameters: %s"):format(i - 1, text:sub(2)), 0) end
    values[i] = text
  end
  compare_thawed(self, values, result)
end

-- Returns this rank's record. `ok` is true if the step has begun. `part` is the fraction of an op's chunks for which
-- there was room. If this rank first needs a new layout, `thawed` contains the names of the thawed parameters.
local function record_of(self, ok, part, limit, key, thawed)
  local engine, mine = self.engine, { failed = (ok or part) and 0 or 1, short = part and 1 or 0,
    share = part or ok and not thawed and limit() or 1, gathers = 0 }
  if thawed then
    mine.thawed = agree.text_hash(thawed)
    return mine
  end
  local reads = not self.data_compared and data.read_by(self.world)
  if reads then mine.data = agree.text_hash(reads) end
  if not ok then return mine end
  mine.gathers = C.ps_engine_gathers(native.ctx)
  if self.dp:size() > 1 and not self.ops_compared then note_ops(self, mine, key) end
  if self.dp:size() > 1 then mine.rates = agree.text_hash(replicas.rates(engine)) end
  for _, axis in ipairs(PLANNED) do mine[axis] = calls_number(self, axis) end
  if not self.rows_compared and self.dp:size() > 1 then
    mine.rows = engine.driver:fingerprint() or self.rows
  end
  if engine.stages or self.tp then
    mine.batch, mine.settings = batch_number(self), agree.text_hash(replicas.settings(engine))
    mine.own = agree.text_hash(("%s %s"):format(tostring(random.state().seed), trained.text(engine.module)))
  end
  return mine
end

--- Begins a step by calling `fn`. There are three cases other than success:
---   - fn fails on a rank: All ranks raise an error that names this rank and the cause.
---   - fn fails, but share(problem) is a number on all failed ranks: No error is raised. begin_step returns the minimum
---     of these numbers and of the other ranks' limits. The caller abandons the step.
---   - fn returns names of thawed parameters on any rank: The step has not begun, and all ranks first get a new layout.
--- Gathers begin before their chunks are needed only if all ranks expect the same gathers.
---@param fn fun(): string? names of the thawed parameters, if this rank needs a new layout
---@param share fun(problem: any): number? returns the fraction of an op's chunks for which there was room, or nil if
---  smaller chunks do not help
---@param limit fun(): number returns the maximum size of smaller chunks on this rank, as a fraction of the present size
---@param key string the shapes of the step
---@return number?
---@return boolean? thaws true if a rank needs a new layout because parameters were thawed
function Ranks:begin_step(fn, share, limit, key)
  local ok, problem = pcall(fn)
  local part = not ok and share(problem) or nil
  local mine = record_of(self, ok, part, limit, key, ok and problem)
  local records, failed, same, short, least = agree.gather(self.world, RECORD, mine), false, true, false, 1
  local thaws, thawed = false, {}
  for i, record in ipairs(records) do
    failed, short = failed or record.failed > 0, short or record.short > 0
    least = math.min(least, record.share)
    thawed[i], thaws = record.thawed, thaws or record.thawed ~= 0
  end
  if not failed and thaws then
    compare_thawed(self, thawed, ok and problem)
    return nil, true
  end
  -- The step will begin again, and these notes are compared then.
  if not failed and short then return least end
  self.noted = {}
  for rank, record in ipairs(records) do
    same = same and (record.gathers == mine.gathers or not same_stage(rank - 1, self.world:rank()))
  end
  if not failed and not short then
    if self.engine.stages or self.tp then compare_parts(records, self.engine.driver.in_loops) end
    if not self.data_compared then self:compare_data(records) end
    compare_rates(self, records)
    if not same then C.ps_engine_gathers_drop(native.ctx) end
    begin_plans(self, records)
    if not self.rows_compared then compare_rows(self, records) end
    if not self.ops_compared then compare_ops(self, records) end
    return
  end
  local said = agree.texts(self.world, ok and "" or tostring(problem))
  if not ok then error(problem, 0) end
  for i, text in ipairs(said) do
    if text ~= "" then error(("rank %d cannot begin the step: %s"):format(i - 1, text), 0) end
  end
end

--- Sets the index of the sample from which dropout draws, if the index is 0. The index is 0 if no loader numbers the
--- samples of all ranks. In this case, the index is set to (rank) * 2^20. The samples of two ranks then have different
--- indices if each rank has at most 2^20 rows. An index has 32 bits.
function Ranks:number_samples()
  local rng = random.state()
  if rng.sample == 0 then rng.sample = self.dp:rank() * 2 ^ 20 end
end

--- Returns the minimum of a number over the ranks that train the same layers. The plans and layouts of these ranks must
--- be equal.
---@param value integer
---@return integer
function Ranks:least(value)
  value = agree.least(self.dp, value)
  return self.tp and agree.least(self.tp, value) or value
end

--- Returns the sums of numbers over all ranks that train the same parameters with other rows of the batch.
---@param ... number
---@return number ... one sum for each argument
function Ranks:sum(...)
  local t = create.tensor({ ... }, { dtype = "fp64" })
  self.dp:all_reduce(t)
  return unpack(t:tolist())
end

-- Broadcasts a parameter's values from the group's first rank.
local function share_values(group, row)
  group:broadcast(row.place ~= nil and row.place or row.param, 0)
  if not rawequal(row.master, row.param) then group:broadcast(row.master, 0) end
end

--- Checks that the ranks have created the same model. Then, in each group of ranks that have the same values, the first
--- rank broadcasts these values. Along dp, the values of all parameters are broadcast if each rank has the whole model
--- (stage 0). Along tp, the values of all parameters that are not cut are broadcast.
function Ranks:begin()
  local engine, tp = self.engine, self.tp
  replicas.model(self.dp, engine)
  if tp then replicas.model(tp, engine) end
  if engine.zero_stage > 0 and not tp then return end
  engine.masters:sync()
  for _, row in ipairs(engine.built.list) do
    if engine.zero_stage == 0 then share_values(self.dp, row) end
    if tp and row.master ~= nil and not shard.of(row.param) then share_values(tp, row) end
  end
  engine.masters:note()
  if engine.zero_stage > 0 then native.check(C.ps_engine_forget(native.ctx)) end
end

local function some(names)
  return table.concat(names, ", ", 1, math.min(#names, 8)) .. (#names > 8 and ", ..." or "")
end

-- Returns the names of the parameters whose values or gradients are in a stripe of chunks.
local function names_of(built, stripe)
  local names, inside = {}, {}
  for _, row in ipairs(built.layout.chunks) do
    for _, at in ipairs(row.tensors) do inside[at.index] = row.stripe == stripe or row.grad_stripe == stripe end
  end
  for _, list in ipairs { built.list, built.frozen } do
    for _, row in ipairs(list) do if inside[row.index] then names[#names + 1] = row.name end end
  end
  return names
end

--- Completes an error about ranks that use different parameters, or that have gradients of different parameters. Adds
--- the names of the parameters in the stripes that the error names. In backward, also adds the names of the parameters
--- without a gradient on this rank.
---@param problem any
---@param backward? boolean
function Ranks:explain(problem, backward)
  if type(problem) ~= "table" or problem.sub ~= "STRIPES" and problem.sub ~= "ADDENDS" then return end
  local more, seen = { "every rank must use the same parameters in a step" }, {}
  for _, number in ipairs { problem.stripe, problem.other_stripe } do
    local names = names_of(self.engine.built, number)
    if not seen[number] and #names > 0 then more[#more + 1] = ("stripe %d holds %s"):format(number, some(names)) end
    seen[number] = true
  end
  if backward then
    local missing = {}
    for i, row in ipairs(self.engine.built.list) do
      local updated = C.ps_engine_param_updated(native.ctx, i - 1) == 1
      if scope.grad_of(row.param) == nil and not updated then missing[#missing + 1] = row.name end
    end
    more[#more + 1] = ("parameters without a gradient on rank %d: %s"):format(
      self.world:rank(), #missing > 0 and some(missing)
      or "none (all other gradients are reduced)")
  end
  problem.msg = problem.msg .. "; " .. table.concat(more, "; ")
end

--- Removes the tensors that this rank does not own from a state_dict. The buffers are removed on all ranks except rank
--- 0.
---@param state table<string, ps.Tensor>
function Ranks:keep_own(state)
  local rows, mine = {}, self.dp:rank()
  for _, list in ipairs { self.engine.built.list, self.engine.built.frozen } do
    for _, row in ipairs(list) do rows[nn_module.address(row.param)] = row end
  end
  for name, tensor in pairs(state) do
    local row = rows[nn_module.address(tensor)]
    if row and row.place ~= nil then state[name] = row.place      -- stored under each tied name
    elseif row or mine > 0 then state[name] = nil end
  end
end

return data_parallel
