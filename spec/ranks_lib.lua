-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of several processes: runs a script as ranks of one world, and gives what each said.
local paths = require "ps.paths"
local lfs = require "lfs"
local ps = require "ps"

local lib = {}

--- A folder of its own for a spec; call `remove` when done.
---@return string folder
function lib.folder()
  local folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
  return folder
end

---@param folder string
function lib.remove(folder) os.execute(("rm -r '%s'"):format(folder)) end

--- Environment in which device cuda is emulated (spec/emulate), NCCL, too; nil where this build has no such plug-in.
---@return string?
function lib.emulated()
  local build = paths.exe:match("^(.*)/[^/]*$")
  local plugin, libraries = build .. "/libps_cuda_emulated.so", build .. "/emulated"
  if not (lfs.attributes(plugin, "mode") and lfs.attributes(libraries .. "/libnccl.so.2", "mode")) then return end
  return ("LD_LIBRARY_PATH='%s' PS_CUDA_PLUGIN='%s'"):format(libraries, plugin)
end

--- Gloo is in this build.
---@return boolean
function lib.has_gloo() return select(2, pcall(ps.dist.gloo, "nowhere", 0, 1, 1)).name ~= "EUNSUP" end

--- Runs a script as `size` ranks at once, which meet at file://FOLDER/rendezvous; gives what each said, and its exit
--- code.
---@param folder string
---@param size integer
---@param script string
---@param settings? string environment of all of them
---@return table<integer, {text: string, code: integer}> by rank, from 0
function lib.run(folder, size, script, settings)
  local name = folder .. "/script.lua"
  local f = assert(io.open(name, "wb"))
  f:write(script)
  f:close()
  os.remove(folder .. "/rendezvous")
  local pipes, out = {}, {}
  for rank = 0, size - 1 do
    local command = ("RANK=%d LOCAL_RANK=%d WORLD_SIZE=%d LOCAL_WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "
      .. "OMP_NUM_THREADS=1 %s timeout 60 '%s' %s 2>&1; echo \"|$?\""):format(rank, rank, size, size, settings or "",
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

--- Runs a script as `size` ranks of one group, which finds ps, nn, group, rank, size and folder at hand; fails unless
--- every rank comes to its end.
---@param folder string
---@param size integer
---@param script string
---@param settings? string environment of all of them
---@return table<integer, {text: string, code: integer}> by rank, from 0
function lib.check(folder, size, script, settings)
  local all = lib.run(folder, size, ([[
    local ps = require "ps"
    local nn = ps.nn
    local folder = %q
    local group = ps.init_distributed { seed = 3, quiet = true, rendezvous = "file://" .. folder .. "/rendezvous" }
    local rank, size = ps.rank(), ps.world_size()
  ]]):format(folder) .. script .. '\nprint "done"', settings)
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
