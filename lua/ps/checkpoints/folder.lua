-- SPDX-License-Identifier: BSD-3-Clause
-- Manages a folder of checkpoints: names, the file `latest`, the order in which checkpoints are tried, and their
-- removal. The folder contains:
--   step-00000012.safetensors    a whole checkpoint that one process wrote, or
--   step-00000012/               a checkpoint of several processes: a file of each rank, and index.json
--   latest                       two lines: the name of the newest complete checkpoint, and the number of its run
-- While a checkpoint is being written, or after a crash, the folder also contains step-00000012.tmp-* and similar
-- names. Only one run at a time writes into a folder. Only the process that commits (rank 0) creates and removes files
-- in it.
--
-- Some file systems, such as NFS, cannot exchange two names. On such a file system, a second save of a step renames the
-- older folder to step-00000012.tmp-*-aside for a moment (ps_file_swap_folder). After a crash at that time, the older
-- folder still has this temporary name. It then counts as a checkpoint until another folder gets the name of the step.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local lfs = require "lfs"
local errno = require "posix.errno"
local C = native.C

local folder = {}

--- Creates a folder and missing parents, and syncs them to disk.
---@param path string
function folder.make(path)
  if caller.typed(path, "string", "make_folder: the path") == "" then caller.error("make_folder: the path is empty") end
  local at = path:sub(1, 1) == "/" and "/" or "./"
  for part in path:gmatch("[^/]+") do
    local above = at
    at = at .. part .. "/"
    if lfs.attributes(at, "mode") ~= "directory" then
      local ok, why = lfs.mkdir(at)
      if not ok and lfs.attributes(at, "mode") ~= "directory" then
        error(("cannot create the folder %s: %s"):format(at, why), 0)
      end
      native.check(C.ps_file_fsync_dir(above))
    end
  end
end

--- Removes a folder and the files in it, or a file.
---@param path string
function folder.remove(path)
  if lfs.symlinkattributes(path, "mode") == "directory" then
    for name in lfs.dir(path) do
      if name ~= "." and name ~= ".." then os.remove(path .. "/" .. name) end
    end
    lfs.rmdir(path)
  else
    os.remove(path)
  end
end

---@param step integer
---@param sharded boolean
---@return string
function folder.name(step, sharded) return ("step-%08d%s"):format(step, sharded and "" or ".safetensors") end

-- Returns the step of a checkpoint's name, or nil.
local function step_of(name)
  return tonumber(name:match("^step%-(%d+)$") or name:match("^step%-(%d+)%.safetensors$"))
end

-- Returns the step of a checkpoint that a crash left under the name ...-aside, or nil for any other name.
local function step_aside(path, name)
  local proper, step = name:match("^(step%-(%d+))%.tmp%-%x+%-aside$")
  if proper and not lfs.attributes(path .. "/" .. proper, "mode") then return tonumber(step) end
end

-- Returns whether a file or folder with this name was left by a crash.
local function is_leftover(name)
  return name:match("^step%-%d+%.tmp%-") or name:match("^step%-%d+%.safetensors%.tmp%-") or name:match("^latest%.tmp%-")
end

-- Returns the checkpoints in a folder as a list of {name, step}, newest first.
local function list(path)
  local all = {}
  if lfs.attributes(path, "mode") ~= "directory" then return all end
  for name in lfs.dir(path) do
    local step = step_of(name) or step_aside(path, name)
    if step then all[#all + 1] = { name = name, step = step } end
  end
  table.sort(all, function(a, b)
    if a.step ~= b.step then return a.step > b.step end
    return a.name > b.name
  end)
  return all
end

--- Returns the names of all checkpoints in a folder, newest first. Incomplete checkpoints are included.
---@param path string
---@return string[]
function folder.names(path)
  local names = list(path)
  for i, entry in ipairs(names) do names[i] = entry.name end
  return names
end

-- Returns the lines of `latest`, or nil if there is no such file. Raises an error if the file exists but cannot be
-- read. If a run regarded such a file as missing, the run would begin again.
local function read_latest(path)
  local file, why, code = io.open(path .. "/latest", "rb")
  if not file and (code == errno.ENOENT or code == errno.ENOTDIR) then return nil end
  local name, run
  if file then
    name, why = file:read("*l")
    run = file:read("*l")
    file:close()
  end
  if not name and why then
    error(("cannot tell which checkpoint of %s is the newest: %s"):format(path, file and path .. "/latest: " .. why
      or why), 0)
  end
  return name or "", run and run:match("^%x+$")
end

--- Writes the file `latest`. `name` is the newest complete checkpoint.
---@param path string
---@param name string
---@param run string
function folder.set_latest(path, name, run)
  local text = ("%s\n%s\n"):format(name, run)
  native.check(C.ps_file_write_atomic(path .. "/latest", text, #text))
end

--- Returns the checkpoints to try, in this order: the latest checkpoint, then earlier checkpoints. Checkpoints of later
--- steps are not returned, because they belong to another run. If the file `latest` is missing, the list is empty.
--- There are two cases in which all checkpoints are returned and `problem` describes the damage: `latest` is damaged,
--- or `latest` names a checkpoint that does not exist and there is no earlier checkpoint.
---@param path string
---@return string[] names
---@return string? problem
---@return string? run of the latest checkpoint, if the file contains it
function folder.candidates(path)
  local latest, run = read_latest(path)
  local all, names, problem = list(path), {}, nil
  if not latest then return names end
  local newest = step_of(latest)
  if not newest then
    problem = ("%s/latest does not name a checkpoint"):format(path)
  elseif all[1] and all[#all].step > newest then
    problem, newest = ("%s/latest names %s, which does not exist, and there is no earlier checkpoint"):format(path,
      latest), nil
  else
    names[1] = latest
  end
  for _, entry in ipairs(all) do
    if not newest or entry.name ~= latest and entry.step <= newest then names[#names + 1] = entry.name end
  end
  return names, problem, newest and run
end

--- Removes old checkpoints. Called when checkpoint `name` of step `step` is complete. Keeps this checkpoint and the
--- newest earlier checkpoints, `keep` checkpoints in total. Removes older checkpoints, a checkpoint of the same step in
--- the other form, and leftovers of crashes. Keeps checkpoints of later steps, because they belong to another run.
---@param path string
---@param step integer
---@param keep integer
---@param name string
function folder.prune(path, step, keep, name)
  local left = {}
  for found in lfs.dir(path) do if is_leftover(found) then left[#left + 1] = found end end
  for _, found in ipairs(left) do folder.remove(path .. "/" .. found) end
  local kept = 1
  for _, entry in ipairs(list(path)) do
    local goes = entry.step == step and entry.name ~= name
    if entry.step < step then
      kept = kept + 1
      goes = kept > keep
    end
    if goes then
      local at, aside = path .. "/" .. entry.name, ("%s/%s.tmp-old"):format(path, folder.name(entry.step, true))
      if lfs.attributes(at, "mode") == "directory" and os.rename(at, aside) then at = aside end
      folder.remove(at)                                    -- a partly removed folder must not look like a checkpoint
    end
  end
end

return folder
