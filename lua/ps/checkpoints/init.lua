-- SPDX-License-Identifier: BSD-3-Clause
-- Checkpoints contain everything that a run needs to continue bit for bit, on any number of ranks. Each byte has a
-- checksum.
--
-- A single process writes ONE safetensors file, atomically:
--   tensors    the model's tensors by name, and "optimizer.<parameter>.<state>"
--   metadata   "format" = "pt" (required by Hugging Face's readers) and "psluajit". "psluajit" is JSON with the step,
--              the optimizer's settings, the schedule, the loss scale, the data position, the random numbers and the
--              caller's `extra`
-- Several processes write a folder together (checkpoints/rank_files.lua). Each process writes the tensors that it owns.
-- If all processes hold all tensors, each process writes the tensors that are assigned to it. The folder gets its name
-- when all files are on disk.
--
-- In a folder of checkpoints, each checkpoint has the number of its run. Rank 0 draws the number for all processes at
-- the first save, or reads it from the checkpoint that the run loads. A single file has the number as "psluajit_run" in
-- its metadata, and a folder of several processes has it in its index. A file that is saved or merged outside a folder
-- of checkpoints has no run number, so its bytes depend only on the state.
--
-- With an engine (ps.initialize), the tensors are the fp32 values. They are written and read one at a time. The
-- engine's schedule and loss scale are included. A checkpoint can be loaded with any budget, policy, chunk size and
-- device. It can also be loaded into plain memory, and by ps.optim.
--
-- With `async`, the state is copied, and a thread writes the copy (checkpoints/background.lua). Rank 0 checks that the
-- other ranks' files in the folder are complete, and then commits the checkpoint. Rank 0 commits between two steps, in
-- ps.checkpoints.wait(), in the next save, or when the script ends.
local native = require "ps.core.ffi"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local entropy = require "ps.core.entropy"
local agree = require "ps.dist.agree"
local background = require "ps.checkpoints.background"
local sharded = require "ps.nn.sharded"
local encode = require "ps.core.encode"
local folder = require "ps.checkpoints.folder"
local rectangles = require "ps.core.rectangles"
local resolved = require "ps.core.resolved"
local replaced = require "ps.core.replaced"
local mesh = require "ps.dist.mesh"
local random_state = require "ps.dist.random_state"
local restore = require "ps.checkpoints.restore"
local safetensors = require "ps.io.safetensors"
local hooks = require "ps.core.hooks"
local scope = require "ps.core.scope"
local rank_files = require "ps.checkpoints.rank_files"
local writable = require "ps.core.writable"
local lfs = require "lfs"
local time = require "posix.time"
local error = caller.error

local checkpoint = { make_folder = folder.make }

local PREFIX = "optimizer."
local EXIT_S, FAILED_S = 10, 1  -- seconds to wait for other ranks' files when a script ends, or fails
local pending, unlisten  -- the running save, and a function that ends the subscription to steps
local run                                                  -- id of this process's run; set by its first save or load

local function is_file_path(path) return path:match("%.safetensors$") ~= nil end

-- The keys of the argument of save and load. A key in PARTS is for an object with a state. A key in OPTIONS is for an
-- option. Both calls accept all keys.
local PARTS = { "model", "optimizer", "sched", "loader", "scaler" }
local OPTIONS = { step = "whole", extra = "any", keep = "whole", async = "boolean", quiet = "boolean",
  shards = "boolean", verify = "boolean", fallback = "boolean", tensors = "table" }
for _, part in ipairs(PARTS) do OPTIONS[part] = "table" end

local function check_parts(call, path, parts)
  local function refuse(text, ...) caller.error(("ps.checkpoints." .. call .. ": " .. text):format(...)) end
  if type(path) ~= "string" or path == "" then
    refuse("the path is %s; it must be the path of a folder or of a .safetensors "
      .. "file", path == "" and "empty" or type(path))
  end
  local model, method = type(parts) == "table" and rawget(parts, "model"), call == "save" and "state_dict"
    or "load_state_dict"
  if type(model) ~= "table" or not model[method] then
    refuse("the argument after the path must be a table of parts, { model = model, optimizer = optimizer, ... }; " ..
      "its model is a "
      .. "%s", type(model or nil))
  end
  caller.options(parts, "ps.checkpoints." .. call, OPTIONS)
  for _, part in ipairs(PARTS) do
    if parts[part] and not parts[part][method] then refuse("%s is a table without %s", part, method) end
  end
  for name, tensor in pairs(parts.tensors or {}) do
    if type(name) ~= "string" or not scope.is_tensor(tensor) then
      refuse("tensors.%s is a %s; every value of tensors must be a tensor", tostring(name), type(tensor))
    end
  end
  if parts.step and parts.step < 0 then refuse("step is %d; it must be at least 0", parts.step) end
  local ok, why = pcall(encode, parts.extra, "extra")
  if parts.extra ~= nil and not ok then refuse("extra has a value that JSON cannot hold: %s", tostring(why)) end
end

---@class ps.CheckpointParts
---@field model ps.nn.Module|ps.Engine
---@field optimizer? ps.Optimizer|ps.EngineOptimizer
---@field sched? ps.Schedule (default: the engine's schedule)
---@field loader? ps.Loader
---@field scaler? ps.LossScaler (default: the engine's loss scale)
---@field step? integer (default: the optimizer's number of steps)
---@field extra? table any value that JSON can represent
---@field tensors? table<string, ps.Tensor> further tensors of the script, such as an exponential moving average. These
---  tensors must be equal on all ranks. Rank 0 saves the tensors. load writes the saved values into the given tensors
---@field keep? integer number of newest checkpoints to keep in a folder (default 2)
---@field async? boolean whether save returns as soon as the state is copied to host memory
---@field quiet? boolean if true, no message about the memory that async needs is printed
---@field shards? boolean if true, a single process writes a folder, too
---@field verify? boolean if false, load does not compare checksums
---@field fallback? boolean if false, load raises an error for a damaged checkpoint even if there is an earlier one

-- Returns the schedule and the loss scale. Uses the objects in `parts`, or the engine's objects if `parts` has none.
local function parts_of(parts)
  local model, optimizer = parts.model, parts.optimizer
  local engine = optimizer ~= nil and handle.of(model)
  return { optimizer = optimizer, loader = parts.loader, sched = parts.sched or engine and engine.scheduler or nil,
    scaler = parts.scaler or engine and optimizer.scaler or nil }
end

-- -- the saved state ------------------------------------------------------------------------------------------------
-- Returns the base model of a model with adapters (ps.lora). The frozen values of the base model are not saved. Returns
-- nil if all values are saved.
local function base_of(model)
  local adapters = restore.adapters_of(model)
  return adapters and adapters:frozen_base()
end

-- Returns the state on this rank as two tables: tensors by name, and everything else. Masters that have no tensor are
-- returned as ps.LaterTensor.
local function gather(parts, step, base)
  local with, tensors = parts_of(parts), {}
  local state = { version = 2, step = step, rng = random_state.get(), extra = parts.extra }
  local adapters = restore.adapters_of(parts.model)
  if adapters then state.adapters, state.merged_adapter = adapters:scales(), adapters.merged end
  if base then state.base = { path = base.path, fingerprint = base.fingerprint }
  else state.source = restore.source_of(parts.model) end
  local engine = handle.of(parts.model)
  for name, tensor in pairs(engine and engine:values_later() or parts.model:state_dict { tied = false }) do
    if not (base and base.names[name]) then tensors[name] = tensor end
  end
  local own = {}
  for name, tensor in pairs(parts.tensors or {}) do own[restore.SCRIPT .. name] = tensor end
  if parts.optimizer then
    local saved = parts.optimizer:state_dict(parts.model)
    for name, tensor in pairs(saved.tensors) do tensors[PREFIX .. name] = tensor end
    state.optimizer = saved.values
  end
  for _, part in ipairs { "sched", "loader", "scaler" } do
    if with[part] then state[part] = with[part]:state_dict() end
  end
  return tensors, state, own
end

-- Returns whether each parameter has only one owner. If so, state_dict returns only the parameters that this rank owns.
local function are_owned(model)
  local engine = handle.of(model)
  local built = engine and engine.built
  for _, list in ipairs { built and built.list or {}, built and built.frozen or {} } do
    for _, row in ipairs(list) do if row.owner ~= nil then return true end end
  end
  return false
end

-- Returns the names of all parameters if no rank holds the whole model. Returns nil if each rank holds the whole model.
local function names_of(model, base)
  local engine, names = handle.of(model), {}
  local stages = engine and engine.stages
  if not (stages or are_owned(model) or sharded.of(model)) then return nil end
  for name in handle.module(model):named_parameters() do
    if not (base and base.names[name]) then names[#names + 1] = name end
  end
  return names
end

-- Returns the name of the parameter to which a tensor of a checkpoint belongs.
local function parameter_of(name)
  if name:sub(1, #PREFIX) ~= PREFIX then return name end
  return name:sub(#PREFIX + 1):match("^(.*)%.[^.]+$")
end

-- Returns this rank's shard of a tensor without padding. Returns nil if the shard has only padding. The shard of a
-- ps.LaterTensor is a ps.LaterTensor, too.
local function own_values(tensor, at)
  if scope.is_tensor(tensor) then return sharded.own(tensor, at) end
  local shape = sharded.own_shape(at)
  return shape and { shape = shape, dtype = tensor.dtype, make = function()
    return sharded.own(tensor.make(), at)
  end } or nil
end

-- Removes all tensors that this rank along tp does not save. The rank saves its pieces of cut tensors, without padding.
-- Rank 0 also saves the tensors that are whole on all ranks. Returns the offsets of the pieces for the file's metadata,
-- or nil if no tensor is cut.
local function keep_pieces(tensors, model)
  local cuts, pieces = sharded.of(model), {}
  if not cuts then return nil end
  local _, any = next(cuts)
  for name, tensor in pairs(tensors) do
    local at = cuts[parameter_of(name)]
    if at then
      tensors[name] = own_values(tensor, at)
      pieces[name] = tensors[name] and { shape = at.shape, parts = at.pieces } or nil
    elseif any.index > 0 then
      tensors[name] = nil
    end
  end
  return pieces
end

local function nbytes_of(tensor)
  if scope.is_tensor(tensor) then return tensor:nbytes() end
  return rectangles.numel(tensor.shape) * tonumber(native.C.ps_dtype_size(native.dtype_code(tensor.dtype)))
end

-- Returns this rank's share of the tensors, and the names that all shares together must contain. Ranks that hold the
-- same tensors get disjoint shares. If several stages have the same embedding, one of them saves it.
local function share(job, tensors, model)
  local engine = handle.of(model)
  local stages = engine and engine.stages
  if stages then
    for name in pairs(tensors) do if not stages:saves(parameter_of(name)) then tensors[name] = nil end end
  end
  job.pieces = keep_pieces(tensors, model)
  if are_owned(model) then return tensors, job.names end
  local mine, expected, nbytes = {}, {}, {}
  for name, tensor in pairs(tensors) do
    nbytes[name], expected[#expected + 1] = nbytes_of(tensor), name
  end
  local alike = job.group
  if stages or job.pieces then alike = mesh.group "dp" end
  local dealt, rank = rank_files.deal(nbytes, alike and alike:size() or 1), alike and alike:rank() or 0
  for name, tensor in pairs(tensors) do if dealt[name] == rank then mine[name] = tensor end end
  return mine, job.names or expected
end

-- -- a save ---------------------------------------------------------------------------------------------------------
-- Returns the job of a save, which describes the files to write and the ranks that write them. If `form` is "file",
-- rank 0 writes one file. If `form` is "shards", all ranks write into a folder.
local function new_job(path, parts, base)
  local group = mesh.group "world"
  local step = parts.step or parts.optimizer and parts.optimizer.steps or 0
  local job = { group = group, rank = group and group:rank() or 0, size = group and group:size() or 1, step = step,
    keep = math.max(1, parts.keep or 2), base = base, names = group and names_of(parts.model, base) or nil,
    async = parts.async and background.possible() }
  job.form = (is_file_path(path) or not (group or parts.shards)) and "file" or "shards"
  if is_file_path(path) then
    if job.names then
      error(("%s: every rank holds only its part of this model, so a checkpoint must be a folder: pass a path without "
        .. ".safetensors (tools/merge.lua makes one file of it)"):format(path))
    end
    job.final = path
  else
    job.folder = path:gsub("(.)/+$", "%1")
    job.name = folder.name(step, job.form == "shards")
    job.final = job.folder .. "/" .. job.name
  end
  return job
end

-- Rank 0 creates the folders and draws the id of this save. After this call, all ranks know the id of the save, the id
-- of the run, and the paths of their files.
local function prepare(job)
  agree.same(job.group, "checkpoint.save", { { "step", tostring(job.step) }, { "path", job.final },
    { "option async", tostring(job.async or false) } })
  local numbers = agree.first(job.group, function()
    local number = entropy.hex(8)
    if job.folder then folder.make(job.folder) end
    if job.form == "shards" then
      job.temp = ("%s.tmp-%s"):format(job.final, number)
      folder.make(job.temp)
    end
    return number .. " " .. (run or entropy.hex(8))
  end)
  job.save, run = numbers:match("^(%x+) (%x+)$")
  job.run, job.file = run, job.final
  if job.form == "shards" then
    job.temp = ("%s.tmp-%s"):format(job.final, job.save)
    job.file = job.temp .. "/" .. rank_files.file_name(job.rank, job.size)
  end
end

local function write(job, parts)
  if job.form == "file" and job.rank > 0 then return end
  local tensors, state, own = gather(parts, job.step, job.base)
  local metadata
  if job.form == "shards" then
    local updates = state.optimizer and state.optimizer.t
    local expected
    tensors, expected = share(job, tensors, parts.model)
    job.expected = copied(expected)
    for name, tensor in pairs(own) do
      job.expected[#job.expected + 1] = name
      if job.rank == 0 then tensors[name] = tensor end
    end
    if state.optimizer then state.optimizer.t = nil end
    for name in pairs(job.pieces or {}) do if not tensors[name] then job.pieces[name] = nil end end
    metadata = rank_files.metadata { save = job.save, step = job.step, rank = job.rank, world_size = job.size,
      rng = state.rng, updates = updates, pieces = job.pieces and next(job.pieces) and job.pieces or nil }
    job.state = encode(state)
  else
    for name, tensor in pairs(own) do tensors[name] = tensor end
    metadata = { format = "pt", psluajit = encode(state), psluajit_run = job.folder and job.run or nil }
  end
  if job.async then
    background.start(job.file, tensors, metadata, job.rank > 0 or parts.quiet or parts.model.quiet)
    job.writes = true
  else
    safetensors.save(job.file, tensors, metadata, { checksums = true })
  end
end

-- Makes the checkpoint valid. Rank 0 calls this function when all files exist.
local function commit(job)
  if job.form == "shards" then
    rank_files.write_index(job.temp, { save = job.save, run = job.run, step = job.step, world_size = job.size,
      mesh = restore.mesh_sizes() }, job.state, job.expected)
    if native.check(native.C.ps_file_swap_folder(job.temp, job.final)) == 1 then folder.remove(job.temp) end
  end
  if job.folder then
    folder.set_latest(job.folder, job.name, job.run)
  end
  job.committed = true
  if job.folder then folder.prune(job.folder, job.step, job.keep, job.name) end
end

-- Removes the leftovers of a failed save.
local function clean(job)
  if job.temp and job.rank == 0 and not job.committed then folder.remove(job.temp) end
end

-- -- in the background ----------------------------------------------------------------------------------------------
-- Waits until the thread has written this rank's file.
local function end_writing(job)
  if not job.writes then return end
  job.writes = false
  job.seconds = background.wait()
end

local function ready(job) return job.form == "file" or rank_files.all_there(job.temp, job.size) end

-- Checks the running save between two steps. Rank 0 commits when all files are complete. `wait` reports problems.
local function between_steps()
  local job = pending
  if not job or job.rank > 0 or job.committed or job.problem or background.busy() then return end
  local ok, problem = pcall(function()
    end_writing(job)
    if ready(job) then commit(job) end
  end)
  if not ok then job.problem = problem end
end

local function take_pending()
  local job = pending
  if unlisten then unlisten() end
  pending, unlisten = nil, nil
  return job
end

-- Waits together with the other ranks, and commits. job.unsure is true if this rank has not received the other ranks'
-- results. In this case, this rank does not know whether rank 0 has committed.
local function finish(job)
  local function heard() job.unsure = false end
  job.unsure = job.rank > 0
  agree.run(job.group, function()
    end_writing(job)
    if job.problem then error(job.problem, 0) end
  end, heard)
  job.unsure = job.rank > 0
  agree.run(job.group, function() if job.rank == 0 and not job.committed then commit(job) end end, heard)
end

-- Finishes the save without messages from the other ranks, by checking whether their files are complete. Called if the
-- other ranks cannot be reached. All ranks began to write at the same time, so the other ranks need about as long as
-- this rank. A rank that died never completes its file, so the wait has a limit.
local function finish_alone(job, patience)
  end_writing(job)
  if job.problem then error(job.problem, 0) end
  if job.rank > 0 or job.committed then return end
  local limit = (patience or EXIT_S) + 3 * (job.seconds or 0)
  local until_s = native.C.ps_now() + limit
  while not ready(job) do
    if native.C.ps_now() > until_s then
        error(("after %.0f s not all files of the %d ranks exist"):format(limit, job.size), 0)
    end
    time.nanosleep { tv_sec = 0, tv_nsec = 2e7 }
  end
  commit(job)
end

local function finished(job, how, patience)
  local ok, problem = pcall(how, job, patience)
  if ok then return job.final, job.seconds end
  -- If the job was committed, the checkpoint is complete, and only the removal of older checkpoints failed.
  if job.committed then error(problem, 0) end
  clean(job)
  local text = "the checkpoint %s, which was being written in the background, was not saved: %s"
  if job.unsure then
    text = "it is unknown whether the checkpoint %s, which was being written in the background, is complete"
      .. (job.folder and " (the file latest tells): %s" or " (loading it tells): %s")
  end
  error(text:format(job.final, tostring(problem)), 0)
end

--- Waits for a running save with `async`, commits it and raises its error. All ranks must call wait.
---@return string? path of the checkpoint; nil if no save was running
---@return number? seconds that the thread took
function checkpoint.wait()
  local job = take_pending()
  if not job then return nil end
  return finished(job, job.group and not job.group.c and finish_alone or finish)
end

--- Completes a running save when the script ends. The program psluajit calls this function.
---@param failed boolean whether the script ends with an error
---@return string? problem
function checkpoint.at_exit(failed)
  local job = take_pending()
  if not job then return nil end
  local ok, problem = pcall(finished, job, finish_alone, failed and FAILED_S or EXIT_S)
  return not ok and tostring(problem) or nil
end

-- -- the calls ------------------------------------------------------------------------------------------------------
--- Writes a checkpoint. Earlier checkpoints are kept until the new checkpoint is complete. All ranks must call save. An
--- error on one rank is raised on all ranks. With async = true, save returns when the state has been copied to host
--- memory. The checkpoint is then complete some steps later, or after checkpoints.wait().
---@param path string a folder, or the path of a .safetensors file. Only rank 0 writes such a file
---@param parts ps.CheckpointParts
---@return string path of the checkpoint
function checkpoint.save(path, parts)
  local base
  agree.run(mesh.group "world", function()
    check_parts("save", path, parts)
    base = base_of(parts.model)
  end)
  local engine = handle.of(parts.model)
  if engine and engine.micro > 0 and not engine.torn then
    error("a checkpoint is taken between steps: save after optimizer:step(), or call optimizer:zero_grad() first")
  end
  checkpoint.wait()
  if engine and not engine.torn then engine:train_thawed() end
  if not parts.async then background.release() end
  local job = new_job(path, parts, base)
  local ok, problem = pcall(function()
    prepare(job)
    agree.run(job.group, function() write(job, parts) end)
    if not job.async then agree.run(job.group, function() if job.rank == 0 then commit(job) end end) end
  end)
  if not ok then
    pcall(end_writing, job)                                -- an error of end_writing must not hide the first error
    clean(job)
    error(problem, 0)
  end
  if job.async then pending, unlisten = job, hooks.on("step", between_steps) end
  return job.final
end

--- Returns the path of the checkpoint at a path. This is the path itself if it is a checkpoint, or else the newest
--- checkpoint of the folder. Returns nil if the folder has no checkpoint.
---@param path string
---@return string?
---@return string? why the reason why there is no checkpoint
function checkpoint.find(path)
  caller.typed(path, "string", "ps.checkpoints.find: the path")
  local found = restore.candidates(path)[1]
  if found then return found end
  return nil, restore.why_none(path)
end

local NEW_RUN = { force = "boolean", resume = "boolean" }

--- Checks that a script may start a new run in a folder. Raises an error if the folder cannot be made, or if no file
--- can be written into it. Also raises an error if the folder has a checkpoint or a saved model (config.json,
--- adapter_config.json). This error names the script's options for this case. Writes nothing.
---@param path string
---@param options? {force?: boolean, resume?: boolean} force: raise no error about an earlier run. The next model that
---  is written to the folder then also replaces the tokenizer and settings of a saved model. resume: the script
---  has an option --resume
---@return string? earlier path of the earlier run's checkpoint or model, which the new run will replace
function checkpoint.new_run(path, options)
  caller.typed(path, "string", "ps.checkpoints.new_run: the path")
  options = caller.options(options, "ps.checkpoints.new_run", NEW_RUN)
  local problem = writable.folder(path)
  if problem then error(problem .. "; name another folder with --out", 0) end
  local at = path:find("..", 1, true) and resolved(path) or path         -- "model/new/.." is the model's folder
  local run_of, model = restore.candidates(at)[1], nil
  for _, name in ipairs { "config.json", "adapter_config.json" } do
    if lfs.attributes(at .. "/" .. name) then model = at .. "/" .. name end
  end
  if (run_of or model) and not options.force then
    error(("%s has a %s, at %s: %s--force %s in its place, another --out keeps both"):format(path,
      run_of and "run" or "model", run_of or model, run_of and options.resume and "--resume continues it, " or "",
      run_of and "starts a new one" or "writes the new one"), 0)
  end
  if model then replaced.later(at) end
  return run_of or model
end

--- Returns a checkpoint's step and `extra`, but not its tensors. If the path is a folder of checkpoints, uses the
--- newest checkpoint that can be read.
---@param path string a folder of checkpoints, a checkpoint's own folder, or a .safetensors file
---@return {step: integer, extra?: table, file: string}
function checkpoint.info(path)
  return restore.info(caller.typed(path, "string", "ps.checkpoints.info: the path"))
end

--- Restores the given parts and the random numbers, on any number of ranks. Raises an error if the checkpoint lacks a
--- part. If the newest checkpoint of a folder is damaged or incomplete, load prints a message and uses the previous
--- checkpoint of the same run. All ranks must call load. An error on one rank is raised on all ranks.
---@param path string a folder of checkpoints, a checkpoint's own folder, or a .safetensors file. In a folder of
---  checkpoints, load uses the newest checkpoint
---@param parts ps.CheckpointParts
---@return {step: integer, extra?: table, file: string, skipped: {file: string, problem: string}[]}
function checkpoint.load(path, parts)
  agree.run(mesh.group "world", function() check_parts("load", path, parts) end)
  checkpoint.wait()
  local from, its_run = restore.load(path, parts, parts_of(parts))
  run = its_run  -- nil for an older checkpoint without a run; save then draws an id
  return from
end

return checkpoint
