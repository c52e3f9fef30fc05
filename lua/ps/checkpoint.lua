-- SPDX-License-Identifier: BSD-3-Clause
-- Checkpoints: everything a run needs to go on bit for bit, in ONE safetensors file written atomically.
--   tensors    the model's by name; "optimizer.<parameter>.<state>" beside them
--   metadata   "format" = "pt" (so that Hugging Face's readers take it) and "psluajit": JSON with the step, optimizer
--              settings, schedule, loss scale, data position, random numbers and the caller's `extra`
-- With an engine (ps.initialize) the tensors are the fp32 values, written and read one at a time; its schedule and loss
-- scale go along. Such a file fits every budget, policy, chunk size and device, plain memory and ps.optim.
-- A folder holds step-NNNNNNNN.safetensors files and `latest`, the name of the newest complete one.
local ps = require "ps"
local json = require("cjson").new()
local lfs = require "lfs"
local safetensors = require "ps.safetensors"

local checkpoint = {}

local PREFIX = "optimizer."

-- JSON with sorted keys, so that equal states give equal bytes.
local function encode(value)
  if type(value) ~= "table" or #value > 0 then
    if type(value) ~= "table" then return json.encode(value) end
    local items = {}
    for i, item in ipairs(value) do items[i] = encode(item) end
    return "[" .. table.concat(items, ",") .. "]"
  end
  local keys, fields = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do fields[i] = json.encode(tostring(key)) .. ":" .. encode(value[key]) end
  return "{" .. table.concat(fields, ",") .. "}"
end

local function is_file_path(path) return path:match("%.safetensors$") ~= nil end

local function step_file(step) return ("step-%08d.safetensors"):format(step) end

--- Makes a folder and those above it.
---@param path string
function checkpoint.make_folder(path)
  local at = path:sub(1, 1) == "/" and "/" or ""
  for part in path:gmatch("[^/]+") do
    at = at .. part .. "/"
    if lfs.attributes(at, "mode") ~= "directory" then
      local ok, why = lfs.mkdir(at)
      if not ok and lfs.attributes(at, "mode") ~= "directory" then
        error(("cannot make the folder %s: %s"):format(at, why), 2)
      end
    end
  end
end

-- The generator's numbers as text: they are 64 bits wide, JSON's are not.
local function rng_state()
  local rng, state = ps.rng(), {}
  for _, key in ipairs { "seed", "offset", "step", "sample", "op" } do
    state[key] = (tostring(rng[key]):gsub("ULL$", ""))
  end
  return state
end

local function u64(text)
  local value = 0ULL
  for digit in text:gmatch("%d") do value = value * 10 + tonumber(digit) end
  return value
end

local function restore_rng(state)
  local rng = ps.rng()
  for key, text in pairs(state) do rng[key] = u64(text) end
end

-- Removes step files older than `step` so that `keep` of this run stay. Later ones belong to another run: left alone.
local function prune(folder, step, keep)
  local older = {}
  for name in lfs.dir(folder) do
    local number = tonumber(name:match("^step%-(%d+)%.safetensors$"))
    if number and number < step then older[#older + 1] = number end
  end
  table.sort(older, function(a, b) return a > b end)
  for i = keep, #older do os.remove(folder .. "/" .. step_file(older[i])) end
end

---@class ps.CheckpointParts
---@field model ps.nn.Module|ps.Engine
---@field optimizer? ps.Optimizer|ps.EngineOptimizer
---@field sched? ps.Schedule default: the engine's
---@field loader? ps.Loader
---@field scaler? ps.GradScaler|ps.LossScaler default: the engine's
---@field step? integer default: the optimizer's
---@field extra? table anything JSON can hold
---@field keep? integer in a folder: how many of the newest files stay (default 2)

-- The schedule and the loss scale: those given, or the engine's.
local function parts_of(parts)
  local model, optimizer = parts.model, parts.optimizer
  local own = model.is_engine and optimizer ~= nil
  return { optimizer = optimizer, loader = parts.loader, sched = parts.sched or own and model.scheduler or nil,
    scaler = parts.scaler or own and optimizer.scaler or nil }
end

--- Writes a checkpoint. What was saved before is untouched until the new file is complete. With several processes all
--- call it, rank 0 writes what all hold, and all go on when the file is complete.
---@param path string a .safetensors file, or a folder
---@param parts ps.CheckpointParts
---@return string file the file written
function checkpoint.save(path, parts)
  if parts.model.is_engine and parts.model.micro > 0 then
    error("a checkpoint is of the state between steps: save after optimizer:step(), or call optimizer:zero_grad()", 2)
  end
  local step = parts.step or parts.optimizer and parts.optimizer.steps or 0
  local group = ps.current_group()
  if group and group:rank() > 0 then
    group:barrier()
    return is_file_path(path) and path or path:gsub("/+$", "") .. "/" .. step_file(step)
  end
  local with = parts_of(parts)
  local tensors, state = {}, { version = 1, step = step, rng = rng_state(), extra = parts.extra }
  for name, tensor in pairs(parts.model:state_dict()) do tensors[name] = tensor end
  if parts.optimizer then
    local saved = parts.optimizer:state_dict(parts.model)
    for name, tensor in pairs(saved.tensors) do tensors[PREFIX .. name] = tensor end
    state.optimizer = saved.values
  end
  for _, part in ipairs { "sched", "loader", "scaler" } do
    if with[part] then state[part] = with[part]:state_dict() end
  end
  local file, folder = path, nil
  if not is_file_path(path) then
    folder = path:gsub("/+$", "")
    checkpoint.make_folder(folder)
    file = folder .. "/" .. step_file(step)
  end
  safetensors.save(file, tensors, { format = "pt", psluajit = encode(state) })
  if folder then
    local name = step_file(step) .. "\n"
    ps.check(ps.C.ps_file_write_atomic(folder .. "/latest", name, #name))
    prune(folder, step, math.max(1, parts.keep or 2))
  end
  if group then group:barrier() end
  return file
end

--- The file a path means: itself, or the newest of a folder; nil when the folder has none.
---@param path string
---@return string?
function checkpoint.find(path)
  if is_file_path(path) then return path end
  local latest = io.open(path .. "/latest", "rb")
  if not latest then return nil end
  local name = latest:read("*l")
  latest:close()
  return name and path .. "/" .. name
end

-- The optimizer's tensors of a file, by name: read when they are indexed, or one at a time by read_into. A file without
-- masters (an engine's) has them as the model's tensors.
local function optimizer_tensors(file)
  local view = {}
  function view.has(_, name) return file:has(PREFIX .. name) end
  function view.shape(_, name) return file:shape(PREFIX .. name) end
  function view.read_into(_, name, tensor) file:read_into(PREFIX .. name, tensor) end
  return setmetatable(view, { __index = function(_, name)
    if file:has(PREFIX .. name) then return file:tensor(PREFIX .. name) end
    local parameter = name:match("^(.*)%.master$")
    if parameter and file:has(parameter) and file:dtype(parameter) == "fp32" then return file:tensor(parameter) end
  end })
end

-- What Module:load_state_dict needs, showing it the model's tensors only. For an engine, whose parameters have their
-- masters from the start, a master in the file goes before the rounded parameter.
local function model_view(file, for_engine)
  local function source(name)
    local master = PREFIX .. name .. ".master"
    return for_engine and file:has(master) and master or name
  end
  local view = { shape = function(_, name) return file:shape(source(name)) end,
    check = function(_, name) file:check(source(name)) end }
  function view.names()
    local names = {}
    for _, name in ipairs(file:names()) do
      if name:sub(1, #PREFIX) ~= PREFIX then names[#names + 1] = name end
    end
    return names
  end
  function view.read_into(_, name, tensor) file:read_into(source(name), tensor) end
  return view
end

--- Restores what the given parts are, and the random numbers. Parts the file lacks are an error.
---@param path string a .safetensors file, or a folder (its latest)
---@param parts ps.CheckpointParts
---@return {step: integer, extra?: table, file: string}
function checkpoint.load(path, parts)
  local name = checkpoint.find(path)
  if not name then error(("%s holds no checkpoint (no file `latest`)"):format(path), 2) end
  local file = safetensors.open(name)
  local text = file.metadata.psluajit
  if not text then error(name .. ": not a checkpoint of psluajit (load_state_dict reads plain weights)", 2) end
  local ok, state = pcall(json.decode, text)
  if not ok or type(state) ~= "table" or state.version ~= 1 then
    error(name .. ": the state in this checkpoint is not readable", 2)
  end
  local with = parts_of(parts)
  if not parts.scaler and not state.scaler then with.scaler = nil end  -- another type till now: the scale starts anew
  for _, part in ipairs { "optimizer", "sched", "loader", "scaler" } do
    if with[part] and not state[part] then error(("%s: this checkpoint has no %s"):format(name, part), 2) end
  end
  local weights = model_view(file, parts.model.is_engine)
  parts.model:load_state_dict(weights, { check_only = true })
  if with.loader then with.loader:load_state_dict(state.loader) end
  if with.scaler then with.scaler:load_state_dict(state.scaler) end
  if with.optimizer then
    with.optimizer:load_state_dict({ tensors = optimizer_tensors(file), values = state.optimizer }, parts.model)
  end
  if with.sched then with.sched:load_state_dict(state.sched) end       -- after the optimizer, whose rate it sets
  parts.model:load_state_dict(weights)
  restore_rng(state.rng)
  file:close()
  return { step = state.step, extra = state.extra, file = name }
end

return checkpoint
