-- SPDX-License-Identifier: BSD-3-Clause
-- Runs the steps of a model that is cut into stages, on one rank. The table of the schedule has a row for each rank.
-- The row is the order in which the rank's virtual stages run forward and backward. C performs the row
-- (src/pipe/exec.c). This includes the transfers, the delayed weight gradients and the reductions. Between the actions
-- of C, this file runs the code of the model. engine/pipeline/driver.lua performs the forwards as actions of the step.
local create = require "ps.tensor.create"
local environment = require "ps.core.environment"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local hooks = require "ps.core.hooks"
local loss_weight = require "ps.core.loss_weight"
local agree = require "ps.dist.agree"
local array = require "ps.core.array"
local batch = require "ps.data.batch"
local caller = require "ps.core.caller"
local collector = require "ps.core.collector"
local count = require "ps.engine.pipeline.count"
local mesh = require "ps.dist.mesh"
local own_loss = require "ps.engine.step.own_loss"
local parts = require "ps.nn.parts"
local replicas = require "ps.engine.ranks.replicas"
local pipe_table = require "ps.parallel.pipeline.table"
local trained = require "ps.engine.step.trained"
local ffi, C = native.ffi, native.C

local pipe = {}

---@class ps.engine.Pipe
---@field engine ps.Engine
---@field group ps.Group the ranks of the stages, in the order of the model
---@field stages ps.engine.Stages describes how the model is cut
---@field n integer number of virtual stages of the whole model
---@field rank integer index of this process among the stages
---@field size integer
---@field rows table<string, ps.engine.PipeRow> the rows that have been made so far; the key is the number of
---  micro-batches and the purpose
---@field row ps.engine.PipeRow|false the current row
---@field how ffi.cdata* settings of the current forward
---@field event ffi.cdata* the current ps_pipe_event
---@field n_out integer number of tensors that the current forward has put into `carried`
---@field counts table<string, ps.engine.PartCost[]> costs of the parts, by the signature of a micro-batch
---@field micros ps.engine.PipeMicro[]|false micro-batches of the current loop, by index from 0
---@field first_key? string PipeMicro.key of the first micro-batch of the current loop, or of the last loop
---@field trains string text that says which parameters of the whole model trained when the current loop began
--- (trained.text)
---@field seed ffi.cdata*|number seed of random numbers when the current loop began
---@field count integer number of micro-batches of the current loop
---@field tells boolean true if listeners are called before and after each action of the current step
---@field performed? integer number of micro-batches that the last dry run performed; for the remaining micro-batches,
---  the dry run repeated the effects of the performed micro-batches
---@field marked integer number of micro-batches for which the script has called backward
---@field total number sum of the loss weights of the marked micro-batches
local Pipe = {}
Pipe.__index = Pipe

---@class ps.engine.PipeRow
---@field c ffi.cdata* ps_pipe, the executor
---@field table ps.pipe.Table the table with transfers
---@field actions table[] {kind, index of the virtual stage among the virtual stages of this rank, micro-batch}
---@field keys table<integer, string> by micro-batch, the PipeMicro.key whose carries C expects
---@field whole boolean true if a dry run must perform each micro-batch, because micro-batches have different effects

---@class ps.engine.PipeMicro
---@field key string signature of the micro-batch
---@field given any[] the model's arguments
---@field args any[] the model's arguments on the device
---@field batch table|nil the batch that the parts read, or nil if batch_of makes it from `args`
---@field number integer index of the micro-batch in the loop, from 0
---@field sample integer index of the micro-batch's first sample
---@field op integer index of the micro-batch's first dropout
---@field targets ps.Targets|false
---@field loss number|nil the loss of the micro-batch, which is set at its yield
---@field out table|nil output of the last virtual stage; on the rank of the last virtual stage, set until the script
---  calls backward

local MICROS_A_STAGE = 4  -- number of micro-batches per stage that the cut assumes if the configuration sets no number
local ROOM = C.PS_PIPE_CARRY
-- kinds of actions that a step counts, by their names in tables
local IN_STEP = { F = C.PS_ACT_FORWARD, B = C.PS_ACT_BACKWARD, I = C.PS_ACT_INPUT, W = C.PS_ACT_WEIGHT,
  REDUCE = C.PS_ACT_REDUCE }
-- kinds of actions that C performs
local OWN = { [C.PS_ACT_BACKWARD] = true, [C.PS_ACT_INPUT] = true, [C.PS_ACT_WEIGHT] = true, [C.PS_ACT_REDUCE] = true }
local times = ffi.new("ps_pipe_times")
local pipe_out = ffi.new("ps_pipe *[1]")
local pointer_array, shape_array = array "ps_tensor *", array "ps_pipe_tensor"
local carried, expected = pointer_array(ROOM), shape_array(ROOM)

-- Returns the table of a schedule. The table contains no transfers yet.
local function new_table(cut, size, micros, forward_only)
  return pipe_table.table { schedule = cut.schedule, stages = size, virtual_stages = cut.virtual_stages,
    micro_batches = micros, forward_only = forward_only }
end

--- Returns the pipeline that a configuration describes.
---@param cfg ps.Config
---@param group ps.Group the ranks of the stages
---@return ps.engine.Pipeline
function pipe.request(cfg, group)
  local how = cfg.pipeline.partition
  local micros = cfg.counts_micro_batches and cfg.gradient_accumulation_steps or MICROS_A_STAGE * group:size()
  return { rank = group:rank(), partition = how, table = pipe_table.table { schedule = cfg.pipeline.schedule,
    stages = group:size(), virtual_stages = cfg.pipeline.virtual_stages, micro_batches = micros } }
end

--- Checks that all ranks cut the same model in the same way. Then registers two sets of ranks with the engine: the
--- ranks of the other stages, whose gradients count in a norm, and the ranks that have copies of tied parameters. All
--- ranks must call this function before parameters are registered.
---@param module ps.nn.Module
---@param stages ps.engine.Stages
---@param built ps.engine.Built
function pipe.join(module, stages, built)
  replicas.compare_cut(mesh.group "world", module, stages)
  local group, copies, among = mesh.group "pp", stages:copies(), nil
  if copies then
    local ranks = { group:rank() }
    for _, rank in ipairs(copies) do if rank == ranks[1] then ranks = copies end end
    local part = group:split(ranks, "tied")
    among = #ranks > 1 and part or nil
  end
  -- Frozen parameters are included, because they may be thawed later.
  local numbers = #built.list + #built.elsewhere + #built.untrained
  native.check(C.ps_engine_stages(native.ctx, group.c, among and among.c, numbers))
end

--- Creates the pipeline of an engine.
---@param engine ps.Engine
---@param stages ps.engine.Stages
---@param group ps.Group
---@return ps.engine.Pipe
function pipe.new(engine, stages, group)
  return setmetatable({ engine = engine, stages = stages, n = #stages.ranks, rank = group:rank(), size = group:size(),
    group = group, rows = {}, row = false, counts = {}, trains = "", seed = 0, event = ffi.new("ps_pipe_event"),
    n_out = 0, micros = false, count = 0, tells = false, marked = 0, total = 0, how = ffi.new("ps_action_how") }, Pipe)
end

--- Closes the executors of all rows.
function Pipe:close()
  for _, row in pairs(self.rows) do C.ps_pipe_close(ffi.gc(row.c, nil)) end
  self.rows, self.row, self.micros = {}, false, false
end

-- -- before a step ----------------------------------------------------------------------------------------------------
-- Returns this rank's row of actions for a step of `micros` micro-batches, with its executor. The first call for a
-- number of micro-batches creates the row. All ranks must make this call together.
local function row_of(self, micros, forward_only)
  local key = micros .. (forward_only and " forward" or "")
  local found = self.rows[key]
  if found then return found end
  found = { table = new_table(self.engine.cfg.pipeline, self.size, micros, forward_only), actions = {}, keys = {},
    whole = environment.get "PS_DRY_RUN" == "whole" }
  if micros < self.size and not forward_only then
    native.check(C.ps_pipe_simulate(found.table.c, nil, nil, times, nil, nil))
    self.engine:note(("pipeline: with %d micro-batches in %d stages the ranks are idle for %.0f %% of the time; "
      .. "raise gradient_accumulation_steps, the number of micro-batches"):format(
        micros, self.size, 100 * times.bubble))
  end
  found.table:lower()
  for _, action in ipairs(found.table:row(self.rank)) do
    local kind, _, index = IN_STEP[action.kind], found.table:place(action.vstage)
    if kind then found.actions[#found.actions + 1] = { kind, index, action.micro } end
  end
  native.check(C.ps_pipe_open(native.ctx, found.table.c, self.group.c, pipe_out))
  found.c = ffi.gc(pipe_out[0], C.ps_pipe_close)
  self.rows[key] = found
  return found
end

-- Returns true if a micro-batch is a step of generate with cached keys and values.
local function cached(micro) return micro.batch ~= nil and micro.batch.caches ~= nil end

local NO_EXAMPLE = "pipeline: the model was cut by parameter counts, since it was made before a batch was known: "
  .. "ps.initialize { example = BATCH, ... } cuts it by counted operations, and finds heads with a tied embedding"

-- Counts the costs of a model that was cut into stages before a batch was known.
local function recount(self, args)
  local engine = self.engine
  if mesh.group("world"):rank() == 0 then engine:note(NO_EXAMPLE) end
  hooks.tell("plan_note", NO_EXAMPLE)
  self.stages:recount(engine.module, args, engine.precision)
end

-- Returns the costs of the model's parts for micro-batches that have the shapes of `micro`. The costs include the
-- tensors that each part passes to the next part.
local function counted(self, micro)
  local costs = self.counts[micro.key]
  if not costs then
    local args = self.engine.own_loss and own_loss.inputs(micro.args) or micro.args
    if self.stages:is_uncounted() then recount(self, args) end
    costs = hooks.ask("part_costs", micro.key)
      or count.parts(self.engine.module, args, self.engine.precision, true, cached(micro))
    self.stages:check_uses(costs)
    self.counts[micro.key] = costs
  end
  return costs
end

-- Tells C which tensors each virtual stage passes to the next virtual stage in a micro-batch.
local function expect(self, row, micro)
  if row.keys[micro.number] == micro.key then return end
  local costs = counted(self, micro)
  for v = 0, self.n - 2 do
    local part = costs[self.stages.first[v + 2] - 1]
    if #part.carry > ROOM then
      error(("part %s returns %d tensors; a stage can pass on at most %d"):format(part.name, #part.carry, ROOM), 0)
    end
    for i, t in ipairs(part.carry) do
      local e = expected[i - 1]
      e.dtype, e.device, e.ndim, e.grad = native.dtype_code(t.dtype), self.engine.device, #t.shape,
        t.needs_grad and 1 or 0
      for d, size in ipairs(t.shape) do e.shape[d - 1] = size end
    end
    native.check(C.ps_pipe_expect(row.c, v, micro.number, #part.carry, expected))
  end
  row.keys[micro.number] = micro.key
end

--- Returns this rank's actions in a step of `micros` micro-batches: forwards, backwards and reductions.
---@param micros integer
---@return table[] actions {kind, index of the virtual stage among the virtual stages of this rank, micro-batch}
function Pipe:actions(micros)
  local list = {}
  for i, action in ipairs(row_of(self, micros, false).actions) do list[i] = action end
  return list
end

--- Stores the micro-batches of a loop. Also stores which parameters train, because the gradients that stages send back
--- depend on this.
---@param micros ps.engine.PipeMicro[] micro-batches by index from 0, and their number `n`
function Pipe:load(micros)
  self.micros, self.count, self.marked, self.total = micros, micros.n, 0, 0
  self.trains, self.seed, self.training = trained.text(self.engine.module), random.state().seed,
    self.engine.module.training
  for i = 0, micros.n - 1 do
    micros[i].key = (cached(micros[i]) and "cached " or "") .. (self.training and "" or "eval ") .. self.trains
      .. batch.signature(micros[i].args)
  end
  self.first_key = micros[0].key
end

--- Raises an error if a setting has changed since an earlier iteration of the loop. The stages have already begun later
--- micro-batches, so the results would depend on the schedule.
function Pipe:check_unchanged()
  local function refuse(what)
    caller.error(what .. " within a loop over micro-batches of a pipeline, whose stages have run ahead to other "
      .. "micro-batches: do it before or after the loop")
  end
  if not scope.grad_enabled() then refuse "gradients were switched off" end
  if self.engine.module.training ~= self.training then
    refuse(("the model was set to %s mode"):format(self.training and "evaluation" or "training"))
  end
  if random.state().seed ~= self.seed then refuse "ps.manual_seed was called" end
  local trains = trained.text(self.engine.module)
  if trains == self.trains then return end
  local at = 1
  while trains:byte(at) == self.trains:byte(at) do at = at + 1 end
  local names = {}
  for name in self.engine.module:named_parameters() do names[#names + 1] = name end
  refuse(("parameter %s was %s"):format(names[at] or "?", trains:sub(at, at) == "0" and "frozen" or "thawed"))
end

--- Returns a hash of the micro-batches. The hash must be equal on all stages of one model replica.
---@return number
function Pipe:fingerprint()
  local said = {}
  for i = 0, self.count - 1 do
    said[#said + 1] = batch.signature(self.micros[i].args)
    for k = 1, self.micros[i].given.n do batch.add_hashes(said, self.micros[i].given[k]) end
  end
  return agree.text_hash(table.concat(said, " "))
end

--- Checks that all ranks begin the same action. If they began different actions, they would wait for each other
--- forever. All ranks must call this function.
---@param what string
---@param rows? boolean true if the micro-batches of all ranks must be equal, too
function Pipe:compare_begin(what, rows)
  local texts = agree.texts(self.group, what .. "\n" .. (rows and self:fingerprint() or ""))
  for stage, text in ipairs(texts) do
    if text ~= texts[1] then
      local first, other = texts[1]:match "^[^\n]*", text:match "^[^\n]*"
      local ranks = ("rank %d"):format(self.group:world_rank(stage - 1))
      if first == other then
        error(("%s has a different batch from rank %d in %s: all ranks of a pipeline must run the same script on the "
          .. "same rows"):format(ranks, self.group:world_rank(0), first), 0)
      end
      error(("%s begins %s, but rank %d begins %s: both have stages of one model, and all ranks of a pipeline must run "
        .. "the same script"):format(ranks, other, self.group:world_rank(0), first), 0)
    end
  end
end

-- Returns a range of micro-batches that a dry run does not perform. For these micro-batches, the dry run repeats the
-- effects of performed micro-batches (ps_pipe_repeat). The results are the index of the first micro-batch in the range
-- and the index after the last. The first PS_PIPE_PERFORMED micro-batches and the last micro-batch of the loop are
-- always performed. The second to the second-last micro-batch must all have the same shapes. If they do not,
-- both results are 0.
local function repeated(self, row)
  local last = self.count - 1
  if row.whole or last <= C.PS_PIPE_PERFORMED then return 0, 0 end
  for i = 2, last - 1 do if self.micros[i].key ~= self.micros[1].key then return 0, 0 end end
  return C.PS_PIPE_PERFORMED, last
end

--- Begins the row of a step, of a dry run or of an evaluation.
---@param step ffi.cdata*|nil the current ps_step, or nil for a row that has only forwards
---@param dry? boolean
function Pipe:begin(step, dry)
  local row = row_of(self, self.count, step == nil)
  for i = 0, self.count - 1 do expect(self, row, self.micros[i]) end
  if dry then
    local first, stop = repeated(self, row)
    native.check(C.ps_pipe_repeat(row.c, first, stop))
    self.performed = self.count - (stop - first)
  end
  self.tells = step ~= nil and hooks.heard "action"
  native.check(C.ps_pipe_begin(row.c, step, dry and 1 or 0, self.tells and 1 or 0))
  self.row = row
end

--- Passes the settings of the last backward of each virtual stage to C. If weight gradients are separate, the settings
--- are for the last weight gradients of each virtual stage instead. Must be called before C reaches the first of these
--- actions.
---@param how ffi.cdata* ps_action_how
function Pipe:set_last(how) native.check(C.ps_pipe_settings(self.row.c, how)) end

--- Drops the row of a failed dry run, but keeps the micro-batches for another dry run.
---@return boolean again true if the dry run failed because micro-batches had different effects. The next dry run must
---  then perform every micro-batch
function Pipe:drop_dry()
  local row = self.row
  if not row then return false end
  C.ps_pipe_abort(row.c, nil)
  self.row = false
  local differed = C.ps_pipe_differed(row.c) ~= 0
  row.whole = row.whole or differed
  return differed
end

--- Returns true if the next forward is not run. Instead, done() repeats the effects of another micro-batch's forward.
---@return boolean
function Pipe:is_again() return self.event.again ~= 0 end

--- Tells C that Lua's garbage collector has run during a dry run.
function Pipe:collected() C.ps_pipe_collected(self.row.c) end

--- Abandons the row. On other ranks, calls fail with the reason `why`.
---@param why any
function Pipe:abandon(why)
  if self.row then C.ps_pipe_abort(self.row.c, tostring(why)) end
  self.row, self.micros = false, false
end

-- Stores the loss, the weight and the hits of a micro-batch. The ops of the last virtual stage have counted them. The
-- number `places` is not sent between ranks, because all ranks have the same batch.
local function take_loss(micro, event)
  micro.loss = event.loss
  micro.score = event.targets > 0 and { hits = event.hits, targets = event.targets } or false
  if event.weight < 0 then return end
  local places = micro.targets and micro.targets.places or event.weight
  micro.targets = { count = event.weight, places = math.max(places, event.weight) }
end

--- Performs C's actions up to the next event that Lua must handle. Forwards, recompute segments and yields are events.
--- A backward, weight gradients or a reduction is an event only if Lua must do something before the action (see
--- collects() and tell()). Returns nil if the row has ended.
---@return integer? kind
---@return integer vstage virtual stage of the model
---@return integer micro the micro-batch, from 0
function Pipe:next()
  local event = self.event
  local rc = C.ps_pipe_next(self.row.c, event)
  if rc == C.PS_ENOMEM then collector.after_failure() end
  native.check(rc)
  self.n_out = 0
  if event.kind == C.PS_ACT_YIELD then take_loss(self.micros[event.micro], event) end
  if event.kind ~= C.PS_ACT_NONE then return event.kind, event.vstage, event.micro end
  self.row = false
end

--- Returns true if Lua should collect garbage before the current event.
---@return boolean
function Pipe:collects() return self.event.collect ~= 0 end

--- Returns the id of the segment, function or hook at which the backward walk of the current event stopped.
---@return integer id
function Pipe:segment() return tonumber(self.event.segment) end

--- Notifies listeners that the actions which C performed before the current event have ended, and that C's next action
--- begins. Listeners get the indices of virtual stages in the whole model.
---@return number seconds time that the ended actions took
function Pipe:tell()
  local event = self.event
  if self.tells then
    for i = 0, event.n_before - 1 do
      if OWN[event.before[i].kind] then hooks.tell("action", event.before[i], false) end
    end
    if OWN[event.kind] then hooks.tell("action", event, true) end
  end
  return event.seconds
end

--- Tells C that the action has ended, and passes the tensors to C that the action has returned.
function Pipe:done()
  native.check(C.ps_pipe_done(self.row.c, self.n_out, carried))
  self.given = nil
end

--- Drops the output of the last virtual stage in a dry run. In a real step, the script keeps this output until it calls
--- backward.
---@param number integer micro-batch, from 0
function Pipe:drop_output(number) self.micros[number].out = nil end

--- Performs a row that has only forwards, up to its next yield.
---@return integer? micro the micro-batch of the yield, from 0, or nil if the row has ended
function Pipe:look()
  while true do
    local kind, v, micro = self:next()
    if kind == nil then return nil end
    if kind == C.PS_ACT_FORWARD then self:forward(v, micro) end
    self:done()
    if kind == C.PS_ACT_YIELD then return micro end
  end
end

-- -- the model's code -------------------------------------------------------------------------------------------------
-- Returns the tensors that the current virtual stage received, by name.
local function come_in(self, names)
  local carry = {}
  for i = 1, self.event.n do
    local t = self.event["in"][i - 1]
    C.ps_tensor_retain(t)
    carry[names[i].name] = native.own(t)
  end
  return carry
end

-- Copies the tensors of a list into C's array.
local function give(self, list)
  self.n_out = math.min(#list, ROOM)
  for i = 1, self.n_out do carried[i - 1] = list[i] end
end

-- Returns a tensor's name, dtype and sizes as text.
local function line_of(name, dtype, shape) return ("%s %s %s"):format(name, dtype, table.concat(shape, " ")) end

-- Passes the outputs of a virtual stage to C. They must match the outputs that were counted without data, because the
-- next stage waits for outputs with the counted shapes.
local function go_out(self, v, carry, names)
  local list = {}
  for i, t in ipairs(names) do
    local given = type(carry) == "table" and carry[t.name]
    if not scope.is_tensor(given) then
      error(("the parts of virtual stage %d returned no tensor '%s'"):format(v, t.name), 0)
    end
    local said, counted_as = line_of(t.name, given:dtype(), given:shape()), line_of(t.name, t.dtype, t.shape)
    if said ~= counted_as then
      error(("the parts of virtual stage %d returned %s, but %s when they were counted without data"):format(
        v, said, counted_as), 0)
    end
    list[i] = given:contiguous()                             -- the bytes of a view cannot be sent
  end
  give(self, list)
  self.given = list                                          -- keeps the headers of the tensors alive until done()
end

-- Keeps the output of the last virtual stage for the script. Passes the loss to C, which sends the loss to all ranks.
local function finish(self, micro, carry)
  if micro.batch then                                        -- a step of generate has no loss
    micro.out = carry
    self.given = { create.zeros({}, { dtype = "fp32" }) }
    return give(self, self.given)
  end
  local own = self.engine.own_loss
  local out = own and own_loss.of(own, carry, micro.args) or batch.output(carry)
  local loss = batch.loss(out)
  if loss == nil or loss:numel() ~= 1 then
    error("the last part of the model returned no loss of one element, which a loop over the micro-batches of a "
      .. "pipeline sends to all ranks: every batch needs targets (labels, or y of (x, y)), also in ps.no_grad; use "
      .. "model:generate for ids without targets", 0)
  end
  micro.out = out
  local noted = not (micro.targets and micro.targets.explicit) and loss_weight.of(loss)
  if noted then native.check(C.ps_pipe_weigh(self.row.c, micro.number, noted.count)) end
  local hits, targets = loss_weight.score(loss)
  if hits then native.check(C.ps_pipe_score(self.row.c, micro.number, hits, targets)) end
  local list = { loss }
  for _, t in ipairs(batch.tensors(out)) do if not rawequal(t, loss) then list[#list + 1] = t end end
  give(self, list)
end

--- Returns the settings for a virtual stage's forward. The counters of random numbers (dropouts and samples) have the
--- values that they would have if one process ran all virtual stages in order.
---@param v integer
---@param number integer
---@return ffi.cdata* how
function Pipe:how_forward(v, number)
  local micro, how = self.micros[number], self.how
  how.numbered, how.sample = 1, micro.sample
  how.first_op = micro.op + self.counts[micro.key][self.stages.first[v + 1]].first_dropout
  return how
end

--- Runs the forward of a virtual stage.
---@param v integer from 0
---@param number integer micro-batch, from 0
function Pipe:forward(v, number)
  local stages, micro = self.stages, self.micros[number]
  local costs, first, last = self.counts[micro.key], stages.first[v + 1], stages.first[v + 2] - 1
  local carry = v > 0 and come_in(self, costs[first - 1].carry) or {}
  local args = self.engine.own_loss and own_loss.inputs(micro.args) or micro.args
  local given = micro.batch or parts.batch(self.engine.module, args)
  local region = rawget(self.engine.module, "parallel_region")
  if region then region:restore(costs[first].region) end
  if v == self.n - 1 and micro.given then loss_weight.begin(micro.given, micro.args) end
  local out = scope.scope(parts.run, stages.parts, first, last, carry, given)
  if v == self.n - 1 then finish(self, micro, out) else go_out(self, v, out, costs[last].carry) end
end

-- Returns a tensor for a loss that another rank has computed. In training, this tensor requires a gradient, as the real
-- loss does. If the script computes a loss from this tensor, that loss can be assigned to this micro-batch.
local function loss_here(micro)
  -- a dry run has no loss
  local loss = devices.computes and create.tensor(micro.loss) or create.empty({}, { dtype = "fp32" })
  return loss:requires_grad(scope.grad_enabled())
end

-- Returns a text that describes the output of the last virtual stage. In a dry run, ranks that do not run the last
-- virtual stage need this text, because nothing is sent.
local function said_of(self, micro)
  local costs, lines = counted(self, micro), {}
  for _, t in ipairs(costs[#costs].out) do
    if t.name ~= "loss" then lines[#lines + 1] = line_of(t.name, t.dtype, t.shape) end
  end
  return table.concat(lines, "\n")
end

-- Sends all tensors in the last virtual stage's output to all ranks. Tensors in nested tables are not sent. All ranks
-- must call this function.
local function gathered(self, micro)
  local names, root, lines = {}, self.stages.ranks[self.n], {}
  for name, t in pairs(micro.out or {}) do
    if type(name) == "string" and name ~= "loss" and scope.is_tensor(t) then names[#names + 1] = name end
  end
  table.sort(names)
  for i, name in ipairs(names) do
    local t = micro.out[name]
    lines[i] = line_of(name, t:dtype(), t:shape())
  end
  local said, out = agree.texts(self.group, table.concat(lines, "\n"))[root + 1], { loss = loss_here(micro) }
  if not devices.computes and not micro.out then said = said_of(self, micro) end
  for line in said:gmatch "[^\n]+" do
    local name, dtype, sizes = line:match "^(%S+) (%S+) ?(.*)$"
    local shape = {}
    for size in sizes:gmatch "%d+" do shape[#shape + 1] = tonumber(size) end
    local t = micro.out and micro.out[name]:detach():contiguous()
      or create.empty(shape, { dtype = dtype, device = self.engine.device_name })
    out[name] = self.group:broadcast(t, root)
  end
  return micro.out or batch.turning(out)
end

--- Returns the output of a micro-batch for the script. The loss of the micro-batch must have arrived.
---@param number integer
---@param gather? boolean if true, all ranks get the tensors of the last virtual stage, and all ranks must call this
---  function
---@return table out
function Pipe:output(number, gather)
  local micro = self.micros[number]
  if gather then return gathered(self, micro) end
  return micro.out or batch.partial { loss = loss_here(micro) }
end

--- Records that the script has called backward for the next micro-batch. From now on, C keeps the loss.
---@param root ps.Tensor the tensor at which the backward walk begins, on the rank of the last virtual stage
---@param weight number
---@param factor number factor by which the gradients of the walk differ from the gradients of the micro-batch's own
---  loss
function Pipe:mark(root, weight, factor)
  local micro = self.micros[self.marked]
  micro.factor = factor
  native.check(C.ps_pipe_mark(self.row.c, self.marked, micro.out and root or nil, weight))
  micro.out = nil
  self.marked, self.total = self.marked + 1, self.total + weight
end

--- Compares the stages' sums of loss weights after the last backward of a loop. Raises an error if the sums differ. All
--- ranks must call this function.
---@param total number sum of this rank's weights
function Pipe:check_weights(total)
  local all = create.empty({ self.size }, { dtype = "fp64" })
  self.group:all_gather(all, create.tensor({ total }, { dtype = "fp64" }))
  for stage, other in ipairs(all:tolist()) do
    if other ~= total then
      error(("the stages of a pipeline weight the step's losses differently: the sum is %.17g on stage %d and "
        .. "%.17g on stage "
        .. "%d; pass the same weight to model:backward on all ranks"):format(total, self.rank, other, stage - 1), 0)
    end
  end
end

return pipe
