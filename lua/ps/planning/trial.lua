-- SPDX-License-Identifier: BSD-3-Clause
-- One dry run of a script: the script runs to the end of its first optimizer:step() on a machine that is not here
-- (ps_machine_pretend), with the engine's own code and decisions, in a process of its own. Ops allocate and compute
-- nothing, chunks move without bytes, and the high-water marks of the tiers are those of a real first step. What a
-- trial changes (budgets, rows of a batch, blocks of the model) it changes here and nowhere in the engine.
local child = require "ps.planning.child"
local outside = require "ps.planning.outside"

local trial = {}

---@class ps.planning.Request
---@field script string path
---@field args string[] of the script
---@field machine {host_nbytes: integer, device_nbytes: integer} 0: this machine's; no GPU
---@field rates? table speeds of the machine (ps.Rates), by KEYS
---@field budgets? table<string, integer> bytes by tier ("device", "host", "disk"), instead of the configuration's
---@field rank? integer this rank of `ranks`, of which no other is here; nil: one process
---@field ranks? integer
---@field alone? string the option that plans one process instead
---@field kinds? integer[] the ranks that are run, one after the other
---@field ranks_a_machine? integer
---@field recompute? boolean true: blocks of the model are computed again in backward
---@field disk? boolean true: there is a disk tier, with room for all
---@field rows? integer rows of each micro-batch, instead of the script's
---@field blocks? integer elements of the model's longest list of modules, instead of the script's
---@field quiet? boolean notes of the engine go nowhere

---@class ps.planning.Result
---@field fits boolean
---@field error? {message: string, name?: string, sub?: string, tier?: string, wanted?: number, left?: number}
---@field tiers? {name: string, budget: number, peak: number, other: number, when: string}[]
---@field links? {upper: string, lower: string, up: number, down: number}[] bytes a step, once steps repeat
---@field parameters? number
---@field state_bytes? number of all chunks
---@field chunk_size? number elements
---@field budgets? table<string, number> of a run that failed: bytes by tier
---@field rows? number of a micro-batch
---@field blocks? number
---@field ops? {name: string, flops: number, bytes: number}[] what the step's ops cost
---@field rss? number bytes of the dry run's process, at most
---@field plain? table<string, number> without an engine: peak bytes by device

-- -- in the process of the run ----------------------------------------------------------------------------------------
local MUCH = 2 ^ 50

-- Settings of a trial instead of the configuration's.
local function change_settings(request, seen)
  local budgets = request.budgets or {}
  local config = require "ps.config"
  local read = config.read
  config.read = function(...)
    local cfg, notes = read(...)
    if request.recompute then cfg.recompute = true end
    if cfg.memory.kind == "plain" then return cfg, notes end
    if request.disk then cfg.memory.disk = { path = "/", limit = MUCH } end
    for tier, nbytes in pairs(budgets) do
      if tier == "disk" then
        cfg.memory.disk = cfg.memory.disk or { path = "/" }
        cfg.memory.disk.limit = nbytes
      else cfg.memory[tier] = nbytes end
    end
    seen.budgets = { device = cfg.memory.device, host = cfg.memory.host }
    return cfg, notes
  end
end

-- The parts of a run in which a tier's peak may rise, by functions of engine/step.lua.
local PARTS = { forward = "forward", turn = "forward", pipe_turn = "forward and backward", backward = "backward",
  update = "update" }

-- Notes in which part of the run each tier's peak rose last: {name -> part}.
local function watch_peaks()
  local step, look = require "ps.engine.step", require "ps.engine.inspect"
  local when, highest, turn = {}, {}, { forward = 0, backward = 0 }
  local function note(part)
    for _, tier in ipairs(look.tiers() or {}) do
      if tier.peak > (highest[tier.name] or 0) then highest[tier.name], when[tier.name] = tier.peak, part end
    end
  end
  local function noted(part, ...)
    note(part)
    return ...
  end
  for name, part in pairs(PARTS) do
    local real = step[name]
    step[name] = function(...)
      note(name == "forward" and turn.forward == 0 and "making the model" or "between forward and backward")
      if turn[part] then turn[part] = turn[part] + 1 end
      return noted(turn[part] and ("%s of micro-batch %d"):format(part, turn[part]) or part, real(...))
    end
  end
  return when, note
end

-- The rows of the script's micro-batches; in a trial with other rows, batches get these.
local function watch_rows(seen, rows)
  local step, batch, samples = require "ps.engine.step", require "ps.batch", require "ps.engine.samples"
  local function resized(engine, given)
    if not seen.rows then
      local ok, n = pcall(batch.rows, engine.module, given)
      seen.rows = ok and n or nil
    end
    if not rows then return given end
    return batch.resized(engine.module, given, rows)
  end
  if rows then samples.check = function() end end
  local forward, turn = step.forward, step.turn
  step.forward = function(engine, ...)
    local given = resized(engine, batch.spread(...))
    return forward(engine, unpack(given, 1, given.n))
  end
  step.turn = function(engine, loop, given) return turn(engine, loop, resized(engine, given)) end
end

-- The module's longest list of modules.
local function longest_list(module)
  local longest
  for _, m in module:named_modules() do
    if m.class_name == "ModuleList" and m:size() > (longest and longest:size() or 0) then longest = m end
  end
  return longest
end

-- Counts the blocks of the script's model; in a trial with more, further models give theirs.
local function watch_blocks(seen, blocks)
  local setup = require "ps.engine.setup"
  local make = setup.make_module
  setup.make_module = function(engine, request)
    local func = request.model_func
    if not func then return make(engine, request) end
    request.model_func = function()
      local module = func()
      local list = longest_list(module)
      seen.blocks = list and list:size() or nil
      while blocks and list:size() < blocks do
        local more = longest_list(func())
        for _, block in more:each() do
          if list:size() < blocks then list:append(block) end
        end
        collectgarbage()
      end
      return module
    end
    return make(engine, request)
  end
end

-- Counts operations and bytes of the first step's ops: a list as ps.profiler.stop gives it, once the step has ended.
local function watch_ops(seen)
  local step, profiler = require "ps.engine.step", require "ps.profiler"
  for _, name in ipairs { "forward", "turn", "enter_pipe" } do
    local real = step[name]
    step[name] = function(...)
      if not seen.counting then
        seen.counting = true
        profiler.start { events = 16 }
      end
      return real(...)
    end
  end
  return function()
    if not seen.counting then return nil end
    local ops = {}
    for i, op in ipairs(profiler.stop()) do ops[i] = { name = op.name, flops = op.flops, bytes = op.bytes } end
    table.sort(ops, function(a, b) return a.name < b.name end)
    return ops
  end
end

-- Parameters that each rank owns; nil where ranks share nothing out.
local function owned(engine)
  if engine.zero_stage == 0 then return nil end
  local list = {}
  for rank = 1, engine.ranks.dp:size() do list[rank] = 0 end
  for _, row in ipairs(engine.built.layout.chunks) do list[row.owner + 1] = list[row.owner + 1] + row.numel end
  return list
end

local function of_engine(engine, seen, when, tiers)
  local built, forecast, links = engine.built, engine.forecast or nil, {}
  for i, tier in ipairs(tiers) do
    tier.when = when[tier.name]
    -- Later steps have all chunks, as the first has not. Of the last tier the forecast is the room for all of them,
    -- which is taken where chunks come down.
    local steady, last = forecast and forecast.tiers[i], i == #tiers and i > 1
    local rests = last and (forecast and forecast.evicted[i - 1] or 0) == 0
    if steady and steady.peak > tier.peak and not rests then
      tier.peak, tier.when = steady.peak, (tier.when or "backward") .. ", in later steps"
    end
    local below = tiers[i + 1]
    if below then
      links[i] = { upper = tier.name, lower = below.name, up = forecast and forecast.fetched[i] or 0,
        down = forecast and forecast.evicted[i] or 0 }
    end
  end
  return { fits = true, tiers = tiers, links = links, parameters = built.numel, state_bytes = built.state_bytes,
    chunk_size = built.layout.chunk_size, device = engine.device_name, precision = engine.precision,
    planned = forecast ~= nil, micro_batches = engine.accumulate, resident = forecast and forecast.resident or 0,
    rows = seen.rows, blocks = seen.blocks, owned = owned(engine), stage = engine.zero_stage,
    gathered = forecast and forecast.gathered or 0, world = engine.ranks and engine.ranks.dp:size() or 1,
    recompute = engine.cfg.recompute or false, adam_split = engine.adam_split and engine.adam_split.share or nil }
end

-- Without an engine in chunks: what plain memory held at most.
local function of_devices(engine, seen)
  local ps, plain, device = require "ps", {}, "cpu"
  for _, d in ipairs(ps.devices()) do
    local info = ps.memory(d.name)
    if info.peak > 0 and d.name ~= "meta" then plain[d.name] = info.peak end
  end
  if engine then device = engine.device_name end
  return { fits = true, plain = plain, device = device, rows = seen.rows, blocks = seen.blocks }
end

-- The error of a script as a table, with the script's line.
local function explained(problem)
  local caller = require "ps.caller"
  local text = caller.at(tostring(problem))
  if type(problem) == "table" or not text:match "^[^\n:]+:%d+: " then
    text = select(2, pcall(caller.error, text))
  end
  local out = { message = text }
  if type(problem) == "table" then
    for _, key in ipairs { "name", "sub", "tier", "wanted", "left" } do out[key] = problem[key] end
  end
  return out
end

-- The variables by which a launcher tells a process its rank.
local function set_rank(request)
  local setenv = require("posix.stdlib").setenv
  if not request.ranks then return end
  local here = request.ranks_a_machine or request.ranks
  for name, value in pairs { RANK = request.rank, WORLD_SIZE = request.ranks, LOCAL_RANK = request.rank % here,
    LOCAL_WORLD_SIZE = here, MASTER_ADDR = "127.0.0.1", MASTER_PORT = 29500 } do
    setenv(name, tostring(value))
  end
end

-- A plan of several ranks is of a script that joins them: says so in the words of a plan.
local function watch_joining(request)
  local mesh = require "ps.mesh"
  local check = mesh.check_joined
  mesh.check_joined = function(what)
    if not request.ranks or pcall(check, what) then return end
    error(("this plan is of %d processes, and the script does not call ps.init_distributed() before %s: call it, or "
      .. "plan one process with %s"):format(request.ranks, what, request.alone), 0)
  end
end

-- Keeps what the script writes to io.stderr, which tells why it ends; gives a function that has it, after ": ".
local function keep_errors()
  local real, text = io.stderr, ""
  local methods = { write = function(self, ...)
    for _, part in ipairs { ... } do text = text .. part end
    real:write(...)
    return self
  end }
  io.stderr = setmetatable({}, { __index = function(_, name)                      -- luacheck: ignore 122
    return methods[name] or function(_, ...) return real[name](real, ...) end
  end })
  return function() return text == "" and "" or ": " .. text:gsub("%s+$", "") end
end

local function in_child(request, give)
  set_rank(request)
  local C = require "ps.declared"
  local machine = require("ffi").new("ps_machine", request.machine)
  if C.ps_machine_pretend(machine) < 0 then error("the machine's memory is no number of bytes", 0) end
  outside.close()
  local hooks, seen = require "ps.hooks", {}
  require "ps"
  outside.close_ps()
  require("ps.rates").suppose(request.rates)
  change_settings(request, seen)
  watch_joining(request)
  watch_rows(seen, request.rows)
  local when, note = watch_peaks()
  watch_blocks(seen, request.blocks)
  local ops = watch_ops(seen)
  local setup = require "ps.engine.setup"
  hooks.on("step", function()
    note "update"
    local engine = setup.current()
    local tiers = require("ps.engine.inspect").tiers()
    local result = tiers and of_engine(engine, seen, when, tiers) or of_devices(engine, seen)
    result.ops, result.rss = ops(), require("ps").peak_rss()
    give(result)
  end)
  local caller, said = require "ps.caller", keep_errors()
  os.exit = function(code)                                                        -- luacheck: ignore 122
    caller.error(("the script called os.exit(%s) before the end of its first optimizer:step()%s"):format(
      tostring(code), said()))
  end
  -- The same table, since argparse keeps the one that it found.
  for i = -9, math.max(#arg, #request.args) do arg[i] = request.args[i] end       -- luacheck: ignore 122
  arg[0] = request.script                                                         -- luacheck: ignore 122
  local chunk, why = loadfile(request.script)
  if not chunk then give { fits = false, error = { message = why } } end
  local ok, problem = xpcall(chunk, explained, unpack(request.args))
  if ok then
    problem = { message = request.script .. " ended without a call of optimizer:step()" }
  end
  give { fits = false, error = problem, rows = seen.rows, blocks = seen.blocks, budgets = seen.budgets }
end

--- Begins a dry run; trial.finish gives its result.
---@param request ps.planning.Request
---@return table running
function trial.begin(request)
  return child.begin(function(give) in_child(request, give) end, request.quiet or false)
end

--- Waits for a dry run.
---@param running table
---@return ps.planning.Result
function trial.finish(running)
  local result = child.finish(running)
  result.fits = result.fits or false
  return result
end

local function of_rank(request, rank)
  local one = {}
  for key, value in pairs(request) do one[key] = value end
  one.rank = request.ranks and rank or nil
  return one
end

-- One result for several ranks: of each tier the highest peak.
local function joined(all)
  local first = all[1]
  for _, result in ipairs(all) do if not result.fits then return result end end
  for i, tier in ipairs(first.tiers or {}) do
    for _, result in ipairs(all) do
      local other = result.tiers[i]
      if other.peak > tier.peak then tier.peak, tier.when = other.peak, other.when end
    end
  end
  return first
end

--- Runs a script dry; with `ranks`, once for each rank of `kinds` (rank 0 alone where it is absent), of which all must
--- fit.
---@param request ps.planning.Request
---@return ps.planning.Result
function trial.run(request)
  local all = {}
  for i, rank in ipairs(request.kinds or { 0 }) do
    all[i] = trial.finish(trial.begin(of_rank(request, rank)))
    if not all[i].fits then return all[i] end
  end
  return joined(all)
end

--- The ranks that stand for all: the first, and of each number of parameters that ranks own the first one.
---@param result ps.planning.Result of rank 0
---@return integer[]
function trial.kinds(result)
  local list, seen = {}, {}
  for rank, numel in ipairs(result.owned or { 0 }) do
    if not seen[numel] then
      seen[numel] = true
      list[#list + 1] = rank - 1
    end
  end
  return list
end

--- Whether a run failed for want of memory: then other budgets, rows or blocks may do.
---@param result ps.planning.Result
---@return boolean
function trial.is_short(result)
  local e = result.error
  return e ~= nil and (e.name == "ENOMEM" or e.name == "ENOSPC")
end

return trial
