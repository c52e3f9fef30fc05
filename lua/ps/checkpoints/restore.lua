-- SPDX-License-Identifier: BSD-3-Clause
-- Reads checkpoints for ps.checkpoints: opens a checkpoint of either form, compares checksums, and loads the state into
-- the given parts. Each rank compares a share of the checksums. If a checkpoint is damaged, an earlier checkpoint is
-- used.
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local dist = require "ps.dist"
local handle = require "ps.nn.handle"
local json = require("cjson").new()
local agree = require "ps.dist.agree"
local folder = require "ps.checkpoints.folder"
local lfs = require "lfs"
local mesh = require "ps.dist.mesh"
local native = require "ps.core.ffi"
local random_state = require "ps.dist.random_state"
local safetensors = require "ps.io.safetensors"
local rank_files = require "ps.checkpoints.rank_files"
local rectangles = require "ps.core.rectangles"
local resolved = require "ps.core.resolved"
local scope = require "ps.core.scope"

local restore = {}

local PREFIX = "optimizer."
-- Prefix of the names of tensors that belong to the script itself. No parameter has such a name.
local SCRIPT = "script:"
restore.SCRIPT = SCRIPT

-- -- opening --------------------------------------------------------------------------------------------------------
---@class ps.checkpoints.Opened
---@field path string
---@field tensors ps.SafeTensors|ps.checkpoints.RankFiles
---@field state table
---@field run? string
---@field rng table[] random numbers of each rank that saved the checkpoint
---@field mesh? table<string, integer> number of ranks along each axis, if a folder's index has it
---@field elsewhere? fun(name: string): boolean? returns whether the base model's folder contains a value. The function
--- `check` sets this field

local function open_file(path, options)
  local file = safetensors.open(path, options)
  local text = file.metadata.psluajit
  local ok, state = pcall(json.decode, text or "")
  if not ok or type(state) ~= "table" or state.version ~= 1 and state.version ~= 2 then
    file:close()
    if not text then
      error(path .. ": this is not a checkpoint of psluajit (load_state_dict reads files of weights)", 0)
    end
    error(path .. ": the state in this checkpoint cannot be read", 0)
  end
  return { path = path, tensors = file, state = state, run = file.metadata.psluajit_run, rng = { state.rng } }
end

--- Opens the folder of a checkpoint of several processes.
---@param path string
---@param options? {verify?: boolean}
---@return ps.checkpoints.Opened
function restore.open_folder(path, options)
  local tensors, index = rank_files.open(path, options)
  local state = index.state
  if state.optimizer then state.optimizer.t = index.updates end
  return { path = path, tensors = tensors, state = state, run = index.run, rng = index.rng, mesh = index.mesh }
end

-- Opens a checkpoint of either form.
local function open_at(path, options)
  return (lfs.attributes(path, "mode") == "directory" and restore.open_folder or open_file)(path, options)
end

-- Returns the run of a checkpoint. Returns "" if an older version saved it without a run. Returns nil if the checkpoint
-- cannot be read.
local function run_of(path)
  local ok, holder = pcall(function()
    if lfs.attributes(path, "mode") == "directory" then return rank_files.index(path) end
    local opened = open_file(path)
    opened.tensors:close()
    return opened
  end)
  if ok then return holder.run or "" end
  if caller.is_interrupt(holder) then error(holder, 0) end
end

-- Compares this rank's share of the tensors with their checksums.
local function verify(opened, group)
  local rank, size = group and group:rank() or 0, group and group:size() or 1
  local tensors, nbytes = opened.tensors, {}
  for _, name in ipairs(tensors:names()) do nbytes[name] = tensors:nbytes(name) end
  local rank_of = rank_files.deal(nbytes, size)
  for _, name in ipairs(tensors:names()) do
    if rank_of[name] == rank and not tensors:verify(name) and opened.state.version > 1 then
      error(("%s: it has no checksums, so another program wrote this file; load it with verify = false"):format(
        opened.path), 0)
    end
  end
end

-- Opens one checkpoint and compares its checksums, on all ranks. Returns the checkpoint, or nil and the problem. A
-- problem of one rank is returned on all ranks. Lack of memory and Ctrl-C are raised as errors, because they do not
-- mean that the checkpoint is damaged. If `run` is given, the checkpoint must belong to this run.
local function open(path, group, options, run)
  local opened, undamaged
  local ok, problem = pcall(agree.run, group, function()
    local fine, why = pcall(function()
      opened = open_at(path, options)
      if run and (opened.run or "") ~= run then
        error(path .. " belongs to another run; pass its own path to load it", 0)
      end
      if options.verify then verify(opened, group) end
    end)
    undamaged = not fine and (type(why) == "table" and why.name == "ENOMEM" or caller.is_interrupt(why))
    if not fine then error(why, 0) end
  end)
  if ok then return opened end
  if opened then opened.tensors:close() end
  for _, text in ipairs(agree.texts(group, undamaged and "undamaged" or "")) do
    if text ~= "" then error(problem, 0) end
  end
  return nil, problem
end

--- Returns the checkpoints at a path, in the order in which they are tried. They are the path itself, or the
--- checkpoints in the folder.
---@param path string
---@return string[] paths
---@return string? problem
---@return string? run of the newest checkpoint, or nil if the checkpoint must be opened to find it
function restore.candidates(path)
  path = path:gsub("(.)/+$", "%1")
  local name = path:match("[^/]*$")
  if name:match("%.safetensors$") or name:match("^step%-%d+$") then return { path } end
  local names, problem, run = folder.candidates(path)
  for i, found in ipairs(names) do names[i] = path .. "/" .. found end
  return names, problem, run
end

-- Returns rank 0's list of candidates on all ranks, and the run of the first candidate. All used candidates must belong
-- to this run. The run is unknown only in one case: the first candidate cannot be read, and `latest` is damaged or was
-- written by hand or by an older version.
local function agreed_candidates(path, group)
  local problem
  local text = agree.first(group, function()
    local names, why, run = restore.candidates(path)
    problem = why
    if not run and #names > 1 then run = run_of(names[1]) end
    table.insert(names, 1, run and "run " .. run or "unknown")
    return table.concat(names, "\n")
  end)
  local first, rest = text:match("^([^\n]*)\n?(.*)$")
  local names = {}
  for name in rest:gmatch("[^\n]+") do names[#names + 1] = name end
  return names, problem, first:match("^run (.*)$")
end

local function say(text)
  if dist.rank() == 0 then io.stderr:write("psluajit: ", text, "\n") end
end

--- Returns the reason why a path has no candidates, as text. For example, a folder may have checkpoints but no file
--- `latest`.
---@param path string
---@return string
function restore.why_none(path)
  local there, mode = folder.names(path), lfs.attributes(path, "mode")
  if not mode then return path .. " holds no checkpoint: there is no such folder" end
  if mode ~= "directory" then
    return ("%s holds no checkpoint: it is a %s, neither a folder nor a .safetensors file"):format(path, mode)
  end
  if #there == 0 then return path .. " holds no checkpoint (no file `latest`)" end
  return ("%s has no file `latest`, which names the newest complete checkpoint, so none is used; there %s %s%s: "
    .. "pass a checkpoint's own path, or write its name into %s/latest"):format(path, #there == 1 and "is" or "are",
    there[1], #there > 1 and (" and %d more"):format(#there - 1) or "", path)
end

-- Returns the first checkpoint that can be used. Also returns the checkpoints that were skipped, with the reasons.
local function open_first(path, parts, group)
  local names, problem, run = agreed_candidates(path, group)
  if #names == 0 then error(restore.why_none(path), 0) end
  local options, skipped = { verify = parts.verify ~= false }, {}
  for i, name in ipairs(names) do
    local opened, why = open(name, group, options, i > 1 and run or nil)
    if opened then
      if problem then say(problem) end
      if #skipped > 0 or problem then say("continuing from the checkpoint " .. name) end
      return opened, skipped
    end
    skipped[#skipped + 1] = { file = name, problem = tostring(why) }
    if #names == 1 or parts.fallback == false then error(why, 0) end
    if problem then say(problem) end
    problem = nil
    say(("the checkpoint %s cannot be used: %s"):format(name, tostring(why)))
    if i == #names then break end
  end
  local lines = {}
  for i, entry in ipairs(skipped) do lines[i] = entry.problem end
  error(("%s holds no checkpoint that can be used:\n%s"):format(path, table.concat(lines, "\n")), 0)
end

-- -- loading ----------------------------------------------------------------------------------------------------------
-- Returns the optimizer's tensors of a file, by name. A tensor is read when a script indexes the result with its name,
-- or by read_into(). A file that an engine wrote has no masters, so the masters are read from the model's tensors.
local function optimizer_tensors(file)
  local view = { whole = true }
  function view.has(_, name) return file:has(PREFIX .. name) end
  function view.shape(_, name) return file:shape(PREFIX .. name) end
  function view.read_into(_, name, tensor) file:read_into(PREFIX .. name, tensor) end
  function view.read_part(_, name, tensor, offset) file:read_part(PREFIX .. name, tensor, offset) end
  return setmetatable(view, { __index = function(_, name)
    if file:has(PREFIX .. name) then return file:tensor(PREFIX .. name) end
    local parameter = name:match("^(.*)%.master$")
    if parameter and file:has(parameter) and file:dtype(parameter) == "fp32" then return file:tensor(parameter) end
  end })
end

-- Reads the values at which a schedule-free optimizer evaluates the model. The file contains the values for training.
-- `text` describes how to move the values for training (ps.optim.average). `read` fills a tensor with a tensor of the
-- file that has the same shape.
local function read_average(file, name, text, tensor, read)
  local state, weight = text:match "^(%S+) (%S+)$"
  local toward = PREFIX .. name .. "." .. state
  local function values(of)
    local out = create.empty(tensor:shape(), { dtype = file:dtype(toward) })
    read(of, out)
    return out
  end
  local value, stop = values(name), values(toward)
  scope.no_grad(function()
    native.ops.master_lerp_({ value, value, stop }, tonumber(weight))
    tensor:copy_(value)
  end)
end

-- Returns the model's tensors of a file, with the methods that Module:load_state_dict calls. The parameters of an
-- engine have masters from the beginning. For an engine, a master in the file is therefore read instead of the rounded
-- parameter. `averages` is set if the model is loaded without its optimizer. It maps a parameter's name to the text
-- that read_average() expects.
local function model_view(file, for_engine, averages)
  local function source(name)
    local master = PREFIX .. name .. ".master"
    return (for_engine or averages and averages[name]) and file:has(master) and master or name
  end
  local function average_of(name)
    local text = averages and averages[name]
    return text and file:has(PREFIX .. name .. "." .. text:match "^%S+") and text
  end
  local view = { whole = true, shape = function(_, name) return file:shape(source(name)) end,
    check = function(_, name) file:check(source(name)) end }
  function view.names()
    local names = {}
    for _, name in ipairs(file:names()) do
      if name:sub(1, #PREFIX) ~= PREFIX and name:sub(1, #SCRIPT) ~= SCRIPT then names[#names + 1] = name end
    end
    return names
  end
  function view.read_into(_, name, tensor)
    local text = average_of(name)
    if not text then return file:read_into(source(name), tensor) end
    read_average(file, name, text, tensor, function(of, into)
      file:read_into(of == name and source(name) or of, into)
    end)
  end
  function view.read_part(_, name, tensor, offset)
    local text = average_of(name)
    if not text then return file:read_part(source(name), tensor, offset) end
    read_average(file, name, text, tensor, function(of, into)
      file:read_part(of == name and source(name) or of, into, offset)
    end)
  end
  return view
end

--- Returns the number of ranks along each axis.
---@return table<string, integer>
function restore.mesh_sizes()
  local sizes = {}
  for _, axis in ipairs { "dp", "pp", "tp" } do
    local group = mesh.group(axis)
    sizes[axis] = group and group:size() or 1
  end
  return sizes
end

-- Returns whether the mesh of ranks is the same as when the checkpoint was saved. If a checkpoint has no mesh, its
-- ranks were only along dp.
local function same_mesh(opened, group)
  local sizes = restore.mesh_sizes()
  local was = opened.mesh or { dp = #opened.rng, pp = 1, tp = 1 }
  for axis, size in pairs(sizes) do if was[axis] ~= size then return false end end
  return #opened.rng == (group and group:size() or 1)
end

-- Returns the random numbers with which this rank continues. If the mesh is the same as when the checkpoint was saved,
-- each rank gets the random numbers that it saved. Otherwise all ranks get the random numbers of rank 0.
local function own_rng(opened, group)
  local all = opened.rng
  if same_mesh(opened, group) then return all[(group and group:rank() or 0) + 1] end
  for i = 2, #all do
    for _, key in ipairs { "seed", "offset", "step" } do
      if all[i][key] ~= all[1][key] then
        say(("%s was saved by %d ranks with different random numbers (%s); all continue with those of rank 0"):format(
          opened.path, #all, key))
        return all[1]
      end
    end
  end
  return all[1]
end

--- Returns the adapters of a model (ps.lora), or nil.
---@param model ps.nn.Module|ps.Engine
---@return ps.lora.Adapters?
function restore.adapters_of(model) return rawget(handle.module(model), "adapters_") end

-- Returns a function that tells whether the base model's folder contains a value. Returns nil if the checkpoint
-- contains all values. A checkpoint of a model with adapters (ps.lora) may contain only the trained values. The other
-- values are in a folder, and the model must have been loaded from this folder.
local function of_base(opened, model)
  local saved = opened.state.base
  if not saved then return nil end
  local adapters = restore.adapters_of(model)
  local has = adapters and adapters:frozen_base()
  if not has then
    error(("%s has only the trained values of a model whose other weights are those of %s; load that model and wrap it "
      .. "(ps.lora.wrap) before"):format(opened.path, saved.path), 0)
  end
  if has.fingerprint ~= saved.fingerprint then
    error(("%s was saved over the weights of %s (fingerprint %s), but the model has those of %s (%s)"):format(
      opened.path, saved.path, saved.fingerprint, has.path, has.fingerprint), 0)
  end
  return function(name) return has.names[name] end
end

local function check(opened, parts, with)
  local state = opened.state
  local adapters = restore.adapters_of(parts.model)
  local different = adapters and state.adapters and adapters:difference(state.adapters)
  if different then
    error(("%s: %s: wrap the model (ps.lora.wrap) with the options of the saved run"):format(opened.path, different), 0)
  end
  local merged = adapters and adapters.merged
  if adapters and state.adapters and state.merged_adapter ~= merged then
    error(("%s was saved while %s, but in this model %s: call model:%s before it is loaded"):format(opened.path,
      state.merged_adapter and ("the adapter '%s' was merged"):format(state.merged_adapter) or "no adapter was merged",
      merged and ("the adapter '%s' is merged"):format(merged) or "none is merged",
      state.merged_adapter and "merge_adapter()" or "unmerge_adapter()"), 0)
  end
  -- The checkpoint was saved without a loss scale. The engine's loss scale keeps its initial value.
  if not parts.scaler and not state.scaler then with.scaler = nil end
  if with.sched and not state.sched and not with.sched.continue_at then
    error(("%s: this checkpoint has no schedule, and the given sched has no method continue_at(count)"):format(
      opened.path), 0)
  end
  for _, part in ipairs { "optimizer", "loader", "scaler" } do
    if with[part] and not state[part] then error(("%s: this checkpoint has no %s"):format(opened.path, part), 0) end
  end
  for name, tensor in pairs(parts.tensors or {}) do
    local there = opened.tensors:has(SCRIPT .. name) and opened.tensors:shape(SCRIPT .. name)
    if not there then error(("%s: this checkpoint has no tensor '%s' of the script"):format(opened.path, name), 0) end
    if not rectangles.same(there, tensor:shape()) then
      error(("%s: tensor '%s' is [%s] in the checkpoint, but [%s] in the script"):format(opened.path, name,
        rectangles.text(there), rectangles.text(tensor:shape())), 0)
    end
  end
  opened.elsewhere = of_base(opened, parts.model)
  parts.model:load_state_dict(model_view(opened.tensors, handle.of(parts.model) ~= nil), { check_only = true,
    elsewhere = opened.elsewhere })
end

-- Loads the state of a schedule. A checkpoint without a schedule has the rates of its optimizer. The schedule then
-- begins at the number of the optimizer's steps.
local function load_schedule(opened, sched)
  local state = opened.state
  if state.sched then return sched:load_state_dict(state.sched) end
  local count = sched.began or state.optimizer and state.optimizer.steps or state.step
  sched:continue_at(count)
  say(("%s was saved without a schedule: %s begins at its step %d%s"):format(opened.path, sched.name
    and "sched." .. sched.name or "the given sched", count, sched.lr and (", with the rate %.6g"):format(sched:lr())
    or ""))
end

local function apply(opened, parts, with, group)
  local state, tensors = opened.state, opened.tensors
  if with.loader then with.loader:load_state_dict(state.loader) end
  if with.scaler then with.scaler:load_state_dict(state.scaler) end
  if with.optimizer then
    with.optimizer:load_state_dict({ tensors = optimizer_tensors(tensors), values = state.optimizer }, parts.model)
  end
  -- The schedule is loaded after the optimizer, because the schedule sets the optimizer's learning rate.
  if with.sched then load_schedule(opened, with.sched) end
  local averages = not with.optimizer and state.optimizer and state.optimizer.averages or nil
  parts.model:load_state_dict(model_view(tensors, handle.of(parts.model) ~= nil, averages),
    { elsewhere = opened.elsewhere })
  for name, tensor in pairs(parts.tensors or {}) do tensors:read_into(SCRIPT .. name, tensor) end
  random_state.set(own_rng(opened, group))
end

--- Returns the absolute path of the folder or file from which a model was loaded, or nil if there is none.
---@param model ps.nn.Module|ps.Engine
---@return string?
function restore.source_of(model)
  local source = rawget(handle.module(model), "source")
  return source and resolved(source)
end

-- Prints a note if the script loaded a different model than the run that saved the checkpoint. A different model is not
-- an error, because all weights come from the checkpoint, and the same model may have been moved.
local function say_source(opened, model)
  local was, is = opened.state.source, restore.source_of(model)
  if not (was and is) or was == is then return end
  say(("%s continues the model that was loaded from %s, but this script loaded %s, whose weights are not used: all "
    .. "weights are those of the checkpoint"):format(opened.path, was, is))
end

-- State that a continued run needs, and the effect if a script does not load the state.
local LEFT_OUT = { { "sched", "learning rates continue without it" }, { "loader", "its batches begin anew" } }

-- Prints a note for each part whose state is in the checkpoint, if a script continues training but did not pass the
-- part.
local function say_left_out(opened, parts, with)
  if not parts.optimizer then return end
  for _, part in ipairs(LEFT_OUT) do
    local name, effect = part[1], part[2]
    if opened.state[name] and not with[name] then
      say(("%s has the state of a %s, which checkpoints.load was not given, so %s: pass %s = %s next to the optimizer")
        :format(opened.path, name == "sched" and "schedule" or name, effect, name, name))
    end
  end
end

--- Returns the result of checkpoint.info. Skips checkpoints that cannot be opened, like restore.load, but prints no
--- message.
---@param path string
---@return {step: integer, extra?: table, file: string}
function restore.info(path)
  local names, problem = restore.candidates(path), nil
  for _, name in ipairs(names) do
    local ok, opened = pcall(open_at, name)
    if ok then
      opened.tensors:close()
      return { step = opened.state.step, extra = opened.state.extra, file = name }
    end
    if caller.is_interrupt(opened) then error(opened, 0) end
    problem = problem or opened
  end
  error(problem or restore.why_none(path), 0)
end

-- For each optimizer into which a checkpoint was loaded: the checkpoint's step, and the optimizer's number of updates
-- at that time.
local loaded = setmetatable({}, { __mode = "k" })

--- Returns the step of the checkpoint that was loaded into an optimizer. Only the first call after the load returns the
--- step. Returns nil if the optimizer has made updates since the load, because the step is then unknown.
---@param optimizer ps.Optimizer|ps.EngineOptimizer
---@return integer?
function restore.continued(optimizer)
  local from = loaded[optimizer]
  loaded[optimizer] = nil
  return from and from.updates == optimizer.steps and from.step or nil
end

--- Loads a checkpoint, like checkpoint.load. `with` has the parts to restore in addition to the model.
---@param path string
---@param parts ps.CheckpointParts
---@param with table
---@return {step: integer, extra?: table, file: string, skipped: {file: string, problem: string}[]}
---@return string? run
function restore.load(path, parts, with)
  local group = mesh.group "world"
  local opened, skipped = open_first(path, parts, group)
  local ok, problem = pcall(function()
    agree.run(group, function() check(opened, parts, with) end)
    agree.run(group, function() apply(opened, parts, with, group) end)
  end)
  opened.tensors:close()
  if not ok then error(problem, 0) end
  say_source(opened, parts.model)
  say_left_out(opened, parts, with)
  local state = opened.state
  if parts.optimizer then loaded[parts.optimizer] = { step = state.step, updates = parts.optimizer.steps } end
  return { step = state.step, extra = state.extra, file = opened.path, skipped = skipped }, opened.run
end

return restore
