-- SPDX-License-Identifier: BSD-3-Clause
-- Shared by specs of the device cuda: the available plug-in and driver, and programs that run with them.
-- PS_CUDA_REAL=1 selects the real plug-in on this machine's GPU instead of the emulated one, PS_FULL=1 all types.
local ffi = require "ffi"
local check = require "spec.check_lib"
local lfs = require "lfs"
local paths = require "ps.paths"

local BUILD = paths.exe:match("^(.*)/[^/]*$")
local DRIVER, PLUGIN = BUILD .. "/emulated", BUILD .. "/libps_cuda_emulated.so"
local REAL = os.getenv("PS_CUDA_REAL") == "1"
local lib = { BUILD = BUILD, DRIVER = DRIVER, PLUGIN = PLUGIN, REAL = REAL, FULL = os.getenv("PS_FULL") == "1",
  HAS_EMULATED = lfs.attributes(PLUGIN, "mode") == "file"
    and lfs.attributes(DRIVER .. "/libcuda.so.1", "mode") == "file",
  HAS_DRIVER = pcall(ffi.load, "libcuda.so.1") }

--- Names of ops without a cuda kernel: the updates of Muon and Lion8bit, which the engine runs on the host
--- (docs/optimizers.md), and ops whose functions use other ops on a GPU, such as t:prod() and t:median().
lib.HOST = {}
for name in ([[bernoulli cdist cdist_backward lion8bit_ masked_scatter median muon_ nll_loss nll_loss_backward prod
  randperm_ unfold unfold_backward var]]):gmatch "%S+" do lib.HOST[name] = true end

--- Runs a script (text) or a spec (a list of arguments) in a new psluajit process with the emulated driver. Returns the
--- output of both streams, and the exit code.
---@param what string|string[]
---@param env? table<string, string|boolean> the variables; false unsets a variable, and PATH_TO_DRIVER = false runs
--- without the driver
function lib.child(what, env)
  local vars = { LD_LIBRARY_PATH = DRIVER, PS_CUDA_PLUGIN = PLUGIN, OMP_WAIT_POLICY = "passive", LUA_INIT = false,
    CUDA_VISIBLE_DEVICES = false, PS_CUDA_SYNC = false }
  if REAL then vars.LD_LIBRARY_PATH, vars.PS_CUDA_PLUGIN, vars.CUDA_VISIBLE_DEVICES = nil, nil, nil end
  for key, value in pairs(env or {}) do vars[key] = value end
  local words, name = { "env" }, nil
  for key, value in pairs(vars) do
    if not value then words[#words + 1] = "-u " .. key end
  end
  for key, value in pairs(vars) do
    if value then words[#words + 1] = ("%s='%s'"):format(key, value) end
  end
  words[#words + 1] = ("timeout %d '%s'"):format(lib.FULL and 1500 or 900, paths.exe)
  if type(what) == "table" then
    words[#words + 1] = table.concat(what, " ")
  else
    name = os.tmpname()
    local f = assert(io.open(name, "wb"))
    f:write(("package.path = %q .. package.path\nlocal ps = require 'ps'\n"):format(paths.root .. "/?.lua;"), what)
    f:close()
    words[#words + 1] = name
  end
  local out, code = check.shell(("cd '%s' && %s"):format(paths.root, table.concat(words, " ")))
  if name then os.remove(name) end
  return out, code
end

--- Returns the reason why kernels cannot run here, or nil.
---@return string?
function lib.lacks_kernels()
  if REAL then return not lib.HAS_DRIVER and "there is no NVIDIA driver on this machine" or nil end
  if lib.HAS_EMULATED then return nil end
  return require("spec.ranks_lib").NO_EMULATED
end

--- For scripts: near(got, want, bound, what) compares the largest difference divided by the largest value, or by the
--- root mean square if by_rms is set. It collects failures. all_near(), at the end, raises the first twelve.
lib.NEAR = [[
  local wrong, count = {}, 0
  local function near(got, want, bound, what, by_rms)
    got, want = got:to("cpu"):double(), want:to("cpu"):double()
    local size = by_rms and want:square():mean():sqrt():item() or want:abs():max():item()
    local off = (got - want):abs():max():item() / (size + 1e-30)
    if off < bound then return end
    count = count + 1
    if count <= 12 then wrong[count] = ("%s is off by %g, more than %g"):format(what, off, bound) end
  end
  local function all_near()
    if count > 0 then error(("%d results are off:\n%s"):format(count, table.concat(wrong, "\n")), 0) end
  end
]]

return lib
