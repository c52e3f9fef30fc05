-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of several processes: runs a script as ranks of one group, and returns the output of each.
local paths = require "ps.paths"
local lfs = require "lfs"
local ps = require "ps"

local lib = {}

--- Creates a new folder for a spec. Call `remove` at the end.
---@return string folder
function lib.folder()
  local folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
  return folder
end

---@param folder string
function lib.remove(folder) os.execute(("rm -r '%s'"):format(folder)) end

--- Returns the environment in which the device cuda and NCCL are emulated (spec/emulate), or nil if this build has no
--- such plug-in.
---@return string?
function lib.emulated()
  local build = paths.exe:match("^(.*)/[^/]*$")
  local plugin, libraries = build .. "/libps_cuda_emulated.so", build .. "/emulated"
  if not (lfs.attributes(plugin, "mode") and lfs.attributes(libraries .. "/libnccl.so.2", "mode")) then return end
  return ("LD_LIBRARY_PATH='%s' PS_CUDA_PLUGIN='%s'"):format(libraries, plugin)
end

--- The reason for skipping a spec. Use it as `if lib.no_gloo() then return pending(lib.no_gloo()) end`.
lib.NO_EMULATED = "this build has no emulated plug-in (another processor, a sanitizer, or no C++ compiler)"
local NO_GLOO = "needs a build with Gloo (libgloo-dev)"

--- Returns the reason why there are no emulated GPUs, or nil if there are.
---@return string?
function lib.no_emulated() return not lib.emulated() and lib.NO_EMULATED or nil end

--- Returns the reason why there cannot be several processes, or nil if this build has Gloo.
---@return string?
function lib.no_gloo()
  return select(2, pcall(ps.dist.gloo, "nowhere", 0, 1, 1)).name == "EUNSUP" and NO_GLOO or nil
end

--- Runs a script as `size` ranks, which meet at file://FOLDER/rendezvous. Returns each rank's output and exit code.
---@param folder string
---@param size integer
---@param script string
---@param settings? string environment variables of all ranks
---@return table<integer, {text: string, code: integer}> indexed by rank, from 0
function lib.run(folder, size, script, settings)
  local name = folder .. "/script.lua"
  local f = assert(io.open(name, "wb"))
  f:write(script)
  f:close()
  os.remove(folder .. "/rendezvous")
  local pipes, out = {}, {}
  for rank = 0, size - 1 do
    local command = ("RANK=%d LOCAL_RANK=%d WORLD_SIZE=%d LOCAL_WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "
      .. "OMP_NUM_THREADS=1 %s timeout 600 '%s' %s 2>&1; echo \"|$?\""):format(rank, rank, size, size, settings or "",
      paths.exe, name)
    pipes[rank] = assert(io.popen(command))
  end
  for rank = 0, size - 1 do
    local text, code = pipes[rank]:read("*a"):match("^(.*)|(%d+)\n$")
    pipes[rank]:close()
    out[rank] = { text = text, code = tonumber(code) }
  end
  return out
end

--- Returns the beginning of the ranks' scripts, which defines ps, nn, group, rank, size and folder.
---@param folder string
---@return string
function lib.begin(folder)
  return ([[
    local ps = require "ps"
    local nn = ps.nn
    local folder = %q
    local group = ps.init_distributed { seed = 3, quiet = true, rendezvous = "file://" .. folder .. "/rendezvous" }
    local rank, size = ps.rank(), ps.world_size()
  ]]):format(folder)
end

--- Code that follows `begin`. It runs steps of a language model on batches of six rows, of which each rank uses its own
--- rows, and prints the rank's tensors.
lib.TRAINING = [[
  -- The first `step` targets of a row are ignored, so that ranks have different numbers of targets.
  local function batch(step)
    local x = ps.randint(0, 256, { 6, 16 }, { dtype = "int32" })
    local y = ps.randint(0, 256, { 6, 16 }, { dtype = "int32" })
    for i = 0, step do y[{ 0, i }] = -100 end
    local from, to = math.floor(rank * 6 / size), math.floor((rank + 1) * 6 / size)
    return x:narrow(0, from, to - from), y:narrow(0, from, to - from)
  end
  local function train(model, optimizer, step, micros)
    optimizer:zero_grad()
    for _ = 1, micros do
      model:backward(model(batch(step)))
      optimizer:step()
    end
  end
  -- Returns "name sum sum-of-squares" for every tensor on this rank, sorted by name.
  local function sums(model)
    local lines = {}
    for name, t in pairs(model:state_dict()) do
      local t64 = t:to("fp64")
      lines[#lines + 1] = ("%s %.17g %.17g"):format(name, t64:sum():item(), (t64 * t64):sum():item())
    end
    table.sort(lines)
    return lines
  end
]]

--- Code that follows `begin`. It returns, as text, the losses of optimizer steps on rows of random tokens, which differ
--- between ranks.
lib.LOSSES = [[
  local function losses(model, optimizer, steps, vocab, shape)
    local seen = {}
    for step = 1, steps do
      ps.manual_seed(9 + rank + 2 * step)
      local x = ps.randint(0, vocab, shape, { dtype = "int32" })
      local loss = model(x, x)
      seen[#seen + 1] = ("%.17g"):format(loss:item())
      model:backward(loss)
      optimizer:step()
    end
    return table.concat(seen, " ")
  end
]]

--- Runs a script after `begin` as `size` ranks of one group. Fails unless every rank reaches its end.
---@param folder string
---@param size integer
---@param script string
---@param settings? string environment variables of all ranks
---@return table<integer, {text: string, code: integer}> indexed by rank, from 0
function lib.check(folder, size, script, settings)
  local all = lib.run(folder, size, lib.begin(folder) .. script .. '\nprint "done"', settings)
  local said, ok = {}, true
  for rank = 0, size - 1 do
    local text = all[rank].text
    said[rank + 1] = ("rank %d (exit code %d):\n%s"):format(rank, all[rank].code, text)
    ok = ok and all[rank].code == 0 and text:find("done", 1, true) ~= nil
  end
  if not ok then error(table.concat(said, "\n"), 2) end
  return all
end

return lib
