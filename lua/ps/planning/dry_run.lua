-- SPDX-License-Identifier: BSD-3-Clause
-- Performs one dry run of a script, in a process that runs nothing else. The script runs to the end of its first
-- optimizer:step() on a simulated machine (ps_machine_pretend). The engine executes the same code and makes the same
-- decisions as in a real run, but ops only allocate memory and do not compute, and chunks move without contents.
-- Therefore the peaks of the tiers are the same as in a real first step. A dry run can change the script's budgets, the
-- rows of its batches and the blocks of its model. It makes these changes through the engine's hooks
-- (ps/core/hooks.lua).
local hooks = require "ps.core.hooks"
local known = require "ps.planning.known"
local outside = require "ps.planning.outside"

local dry_run = {}

local MUCH = 2 ^ 50

-- Replaces settings of the script's configuration by the settings in the request.
local function change_settings(request, seen)
  local budgets = request.budgets or {}
  hooks.on("settings", function(cfg)
    if request.recompute then cfg.recompute = true end
    if cfg.memory.kind == "plain" then return end
    if request.disk then cfg.memory.disk = { path = "/", limit = MUCH } end
    for tier, nbytes in pairs(budgets) do
      if tier == "disk" then
        cfg.memory.disk = cfg.memory.disk or { path = "/" }
        cfg.memory.disk.limit = nbytes
      else cfg.memory[tier] = nbytes end
    end
    seen.budgets = { device = cfg.memory.device, host = cfg.memory.host }
  end)
end

-- Makes Lua's garbage collector run at fixed points of the step. Otherwise the collector would run at different times
-- in different runs, and the peaks would differ by the size of small tensors that the collector has not freed yet.
local function collect_by_count()
  hooks.on("action", function(action, begins) require("ps.core.collector").pace_script(action, begins) end)
end

-- Records for each tier the phase of the run in which the tier's peak rose for the last time. The result is a table
-- from the tier's name to the phase.
local function watch_peaks()
  local C, look = require "ps.core.declared", require "ps.memory.chunks"
  local PARTS = { [C.PS_ACT_FORWARD] = "forward of micro-batch %d", [C.PS_ACT_BACKWARD] = "backward of micro-batch %d",
    [C.PS_ACT_INPUT] = "backward of micro-batch %d", [C.PS_ACT_WEIGHT] = "weight gradients of micro-batch %d",
    [C.PS_ACT_REDUCE] = "reduction of gradients", [C.PS_ACT_NORM] = "norm", [C.PS_ACT_UPDATE] = "update" }
  local when, highest, begun = {}, {}, false
  local function note(part)
    for _, tier in ipairs(look.tiers() or {}) do
      if tier.peak > (highest[tier.name] or 0) then highest[tier.name], when[tier.name] = tier.peak, part end
    end
  end
  hooks.on("action", function(action, begins)
    if begins then
      note(begun and "between forward and backward" or "making the model")
      begun = true
    else note(PARTS[action.kind]:format(action.micro + 1)) end
  end)
  return when, note
end

-- Counts the rows of the script's micro-batches. If `rows` is given, changes each micro-batch to have `rows` rows.
local function watch_rows(seen, rows)
  local batch = require "ps.data.batch"
  hooks.on("batch", function(engine, given)
    if not seen.rows then
      local ok, n = pcall(batch.rows, engine.module, given)
      seen.rows = ok and n or nil
    end
    return rows and batch.resized(engine.module, given, rows)
  end)
end

-- Returns the longest ModuleList inside a module, or nil if the module contains no ModuleList.
local function longest_list(module)
  local longest
  for _, m in module:named_modules() do
    if m.class_name == "ModuleList" and m:size() > (longest and longest:size() or 0) then longest = m end
  end
  return longest
end

-- Counts the blocks of the script's model: the items of its longest ModuleList. If `blocks` is given, appends blocks to
-- each model that is made from now on, until the model has `blocks` blocks.
local function watch_blocks(seen, blocks)
  hooks.on("model", function(model_func)
    return function()
      local module = model_func()
      local list = longest_list(module)
      seen.blocks = list and list:size() or nil
      while blocks and list:size() < blocks do
        local more = longest_list(model_func())
        for _, block in more:each() do
          if list:size() < blocks then list:append(block) end
        end
        require("ps.core.collector").after_making()
      end
      return module
    end
  end)
end

-- Counts the operations and bytes of the ops in the first step, but not of the ops in the engine's own dry run. Returns
-- a function that must be called after the step. This function returns a list with the name, flops and bytes of each
-- op.
local function watch_ops()
  local profiler, counting = require "ps.profile.profiler", false
  hooks.on("action", function()
    if counting then return end
    counting = true
    profiler.start { events = 16 }
  end)
  return function()
    if not counting then return nil end
    local ops = {}
    for i, op in ipairs(profiler.stop()) do ops[i] = { name = op.name, flops = op.flops, bytes = op.bytes } end
    table.sort(ops, function(a, b) return a.name < b.name end)
    return ops
  end
end

-- -- results ----------------------------------------------------------------------------------------------------------
-- Returns the number of parameters that each rank along dp owns, or nil if parameters are not sharded.
local function owned(engine)
  if engine.zero_stage == 0 then return nil end
  local list = {}
  for rank = 1, engine.ranks.dp:size() do list[rank] = 0 end
  for _, row in ipairs(engine.built.layout.chunks) do list[row.owner + 1] = list[row.owner + 1] + row.numel end
  return list
end

-- Returns the index along dp, counted from 0, of the rank that owns the most parameters.
local function owner(list)
  local most = 1
  for rank, numel in ipairs(list or {}) do if numel > list[most] then most = rank end end
  return most - 1
end

local function tp_of(engine) return engine.tensor_parallel and engine.tensor_parallel.group:size() or 1 end

-- Returns a description of the model's cut into stages, with the costs of each virtual stage for one of the script's
-- micro-batches. Returns nil if the model is not cut.
---@return ps.planning.Pipeline?
local function cut_of(engine)
  local pipe, stages = engine.driver.pipe, engine.stages
  if not pipe then return nil end
  local counted, cfg, vstages, sent = pipe.counts[pipe.first_key], engine.cfg.pipeline, {}, 0
  for v = 0, pipe.n - 1 do
    local first, last = stages.first[v + 1], stages.first[v + 2] - 1
    local row = { stage = stages.ranks[v + 1], parts = last - first + 1, forward = 0, input = 0, weight = 0, numel = 0,
      held = stages:cost(v).activations, up = 0, down = 0 }
    for i = first, last do
      for _, key in ipairs { "forward", "input", "weight", "numel" } do row[key] = row[key] + counted[i][key] end
    end
    for _, t in ipairs(v < pipe.n - 1 and counted[last].carry or {}) do
      row.up = row.up + t.nbytes
      if t.needs_grad then row.down = row.down + t.nbytes end
    end
    vstages[v + 1] = row
  end
  for v = 1, pipe.n - 1 do                                 -- the link between virtual stages v - 1 and v
    local below, above = vstages[v], vstages[v + 1]
    if below.stage ~= above.stage then
      if below.stage == pipe.rank then sent = sent + below.up end
      if above.stage == pipe.rank then sent = sent + below.down end
    end
  end
  local micros = require("ps.engine.step").count(engine)
  return { stages = pipe.size, stage = pipe.rank, schedule = cfg.schedule, virtual_stages = pipe.n / pipe.size,
    micro_batches = micros, performed = pipe.performed, vstages = vstages, sent = sent * micros }
end

-- If another rank along dp owns more parameters than this rank of a pipeline, ends the run before its first step. The
-- result then contains the index of the rank that owns the most parameters, and the facts that hold for all ranks.
local function seek_owner(give, seen)
  local off
  off = hooks.on("action", function()
    off()
    local engine = require("ps.engine.setup").current()
    local other = engine and engine.driver.in_loops and owner(owned(engine))
    if not other or other == engine.ranks.dp:rank() then return end
    give { fits = true, owner = other, ended = true, cut = cut_of(engine), tp = tp_of(engine),
      known = known.of(engine), notes = seen.notes }
  end)
end

-- Counts the bytes that this rank sends along dp and tp from the first action of a step on. The bytes are counted by
-- ps_group_bytes_sent, which also counts bytes that would be sent to simulated ranks. Returns a function that must be
-- called after the step. This function returns the bytes by axis, and the bytes along tp that are sent in pieces during
-- products.
local function watch_sent()
  local C, mesh, before, in_pieces = require "ps.core.declared", require "ps.dist.mesh", {}, 0
  local function sent(axis)
    local group = mesh.group(axis)
    return group and group:bytes_sent()
  end
  hooks.on("action", function(action, begins)
    if not begins or action.kind ~= C.PS_ACT_FORWARD or action.micro > 0 or action.vstage > 0 then return end
    for _, axis in ipairs { "dp", "tp" } do before[axis] = sent(axis) end   -- the engine's own dry run also sets these
                                                                            -- values; the real step sets them again
    in_pieces = before.tp and mesh.group("tp"):bytes_in_pieces() or 0
  end)
  return function(cut)
    local axes = { pp = cut and cut.sent }
    for axis, nbytes in pairs(before) do axes[axis] = sent(axis) - nbytes end
    return axes, before.tp and mesh.group("tp"):bytes_in_pieces() - in_pieces or 0
  end
end

local function of_engine(engine, seen, when, tiers, sent)
  local built, forecast, links = engine.built, engine.plan.forecast or nil, {}
  for i, tier in ipairs(tiers) do
    tier.when = when[tier.name]
    -- In the first step, some chunks do not exist yet. In later steps, all chunks exist. The forecast of the last tier
    -- includes space for all chunks. This space is allocated when chunks are evicted to the tier.
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
  local cut = cut_of(engine)
  local axes, in_pieces = sent(cut)
  local layers, adam_split = engine.tensor_parallel, engine.plan.adam_split
  local pieces = in_pieces > 0 and layers.beside and { count = layers.pieces, nbytes = in_pieces } or nil
  return { fits = true, tiers = tiers, links = links, parameters = built.numel, state_bytes = built.state_bytes,
    chunk_size = built.layout.chunk_size, device = engine.device_name, precision = engine.precision,
    planned = forecast ~= nil, micro_batches = engine.accumulate, resident = forecast and forecast.resident or 0,
    rows = seen.rows, blocks = seen.blocks, owned = owned(engine), stage = engine.zero_stage,
    gathered = forecast and forecast.gathered or 0, world = engine.ranks and engine.ranks.dp:size() or 1,
    recompute = engine.cfg.recompute or false, adam_split = adam_split and adam_split.share or nil,
    cut = cut, owner = owner(owned(engine)), axes = axes, pieces = pieces, tp = tp_of(engine), known = known.of(engine),
    model_parameters = cut and engine.module:num_parameters() or nil, notes = seen.notes }
end

-- Returns the result of a run whose model is not in chunks: the peak size of memory on each device.
local function of_devices(engine, seen)
  local devices, views, plain, device = require "ps.core.devices", require "ps.memory.views", {}, "cpu"
  for _, d in ipairs(devices.all()) do
    local info = views.memory(d.name)
    if info.peak > 0 and d.name ~= "meta" then plain[d.name] = info.peak end
  end
  if engine then device = engine.device_name end
  return { fits = true, plain = plain, device = device, rows = seen.rows, blocks = seen.blocks }
end

-- Converts an error of the script to a table. The message in the table contains the line of the script.
local function explained(problem)
  local caller = require "ps.core.caller"
  local _ = package.loaded.ps and package.loaded.ps.pretty   -- sets caller.shown for caller.described
  local has_text = type(problem) == "string" or (debug.getmetatable(problem) or {}).__tostring ~= nil
  local text = caller.at(has_text and tostring(problem) or caller.described(problem))
  local place = caller.place(problem)
  -- A long traceback lacks its middle, which may have all frames of the script.
  if place and place:find("/tools/plan.lua:", 1, true) then place = nil end
  if place and text:sub(1, #place) ~= place then text = ("%s: %s"):format(place, text)
  elseif type(problem) == "table" or not text:match "^[^\n:]+:%d+: " then
    text = select(2, pcall(caller.error, text))
  end
  local out = { message = text }
  if type(problem) == "table" then
    for _, key in ipairs { "name", "sub", "tier", "wanted", "left" } do out[key] = problem[key] end
  end
  return out
end

local REHEARSED, ROUNDS = 1e12, 8          -- limits of all rounds: 10^12 operations (a few seconds), and 8 rounds
local STEADY = 2 ^ 18                      -- the rounds end when the process grows by less than 2^18 bytes in a round

-- Returns the size in bytes of the memory that a real process uses in addition to tensors, but this process does not.
-- It consists of the memory that oneDNN keeps after matrix products, and of pages of files that the parent process has
-- touched and this process has not.
--
-- To measure the memory of oneDNN, this function computes products in rounds, until the process stops growing. One
-- round is not enough, because the heap is fragmented, and a buffer may not fit into a gap at once. Returns nil if the
-- products would need too much time or memory, or if the system does not report the pages of a process. The second
-- result is the elapsed time in seconds.
local function kept_by_products(C, pages_before)
  local pages, operations = require "ps.planning.pages", require("ffi").new "double[1]"
  local seconds = require("ps.core.process").now
  local since, began, left = seconds(), pages.resident(), REHEARSED
  local now = began
  if not began then return nil end
  for round = 1, ROUNDS do
    local done = C.ps_products_rehearse(left, operations)
    if done <= 0 then break end
    local before = now
    left, now = left - operations[0], pages.resident()
    if round > 1 and now - before < STEADY then break end
  end
  local missing = left < REHEARSED and pages.missing(pages_before)
  return missing and now - began + missing or nil, seconds() - since
end

-- -- the run ----------------------------------------------------------------------------------------------------------
-- Sets the environment variables that a launcher sets to pass the rank to a process.
local function set_rank(request)
  local setenv = require("posix.stdlib").setenv
  if not request.ranks then return end
  local here = request.ranks_a_machine or request.ranks
  for name, value in pairs { RANK = request.rank, WORLD_SIZE = request.ranks, LOCAL_RANK = request.rank % here,
    LOCAL_WORLD_SIZE = here, MASTER_ADDR = "127.0.0.1", MASTER_PORT = 29500 } do
    setenv(name, tostring(value))
  end
end

-- Replaces the engine's errors about ranks by errors that say how to plan several ranks: the script must call
-- ps.init_distributed().
local function watch_joining(request)
  hooks.on("ranks_wanted", function(ranks)
    return ("plan this number of ranks, or a multiple, with --ranks %d and a script that calls ps.init_distributed() "
      .. "before ps.initialize"):format(ranks)
  end)
  hooks.on("unjoined", function(what)
    return request.ranks and ("this plan has %d processes, but the script does not call ps.init_distributed() before "
      .. "%s: call it, or plan one process with %s"):format(request.ranks, what, request.alone)
  end)
end

-- Records the text that the script writes to io.stderr, because this text may explain why the script ended. Returns a
-- function that returns ": " followed by the text, or "" if the script has written no text.
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

--- Performs a dry run of a script in this process, and ends the process.
---@param request ps.planning.Request
---@param give fun(result: ps.planning.Result)
function dry_run.perform(request, give)
  set_rank(request)
  local C = require "ps.core.declared"
  local machine = require("ffi").new("ps_machine", request.machine)
  if C.ps_machine_pretend(machine) < 0 then error("the machine's memory is not a number of bytes", 0) end
  outside.close()
  local seen = { notes = {} }
  hooks.on("plan_note", function(text) table.insert(seen.notes, text) end)
  require("ps.engine.plan.rates").suppose(request.rates)
  change_settings(request, seen)
  watch_joining(request)
  known.tell(request.known)
  watch_rows(seen, request.rows)
  if request.seeks_owner then seek_owner(give, seen) end
  collect_by_count()
  local when, note = watch_peaks()
  watch_blocks(seen, request.blocks)
  local ops, sent = watch_ops(), watch_sent()
  local setup = require "ps.engine.setup"
  hooks.on("step", function()
    note "update"
    local engine = setup.current()
    local tiers = require("ps.memory.chunks").tiers()
    local result = tiers and of_engine(engine, seen, when, tiers, sent) or of_devices(engine, seen)
    result.ops, result.rss = ops(), require("ps.core.process").peak_rss()
    if request.pages and tiers and result.device ~= "cuda" then
      result.kept, result.kept_s = kept_by_products(C, request.pages)
    end
    give(result)
  end)
  local caller, said = require "ps.core.caller", keep_errors()
  os.exit = function(code)                                                        -- luacheck: ignore 122
    caller.error(("the script called os.exit(%s) before the end of its first optimizer:step()%s"):format(
      tostring(code), said()))
  end
  -- The table `arg` is changed and not replaced, because argparse keeps a reference to it.
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

return dry_run
