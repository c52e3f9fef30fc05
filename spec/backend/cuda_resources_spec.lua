-- SPDX-License-Identifier: BSD-3-Clause
-- Stack frames and spills of the kernels of the real plug-in, as ptxas reported them to the build
-- (cmake/cuda_compile.cmake): the kernels in which a training step spends its time keep everything in registers. Each
-- kernel is compiled for both sm_80 and sm_90; warpgroup products (attention_hopper.cu) only for sm_90a. Skipped if
-- there is no nvcc. tools/prove_cuda/cubins.py compares registers, shared memory and constants of the plug-in with
-- each card's limits.
local lfs = require "lfs"
local paths = require "ps.paths"

local FOLDER = paths.exe:match("^(.*)/[^/]*$") .. "/cuda"

-- The only kernels that can have stack frames: kernels with elementwise ops that are selected at run time (pow, sin and
-- cos need local memory), sampling (a histogram of 16 sums), and some fp64 kernels.
local MAY_HAVE_FRAMES = { "flat_kernelI.*Lin1E", "any_kernelI", "sample_kernelI", "Id[Ed]", "IdLb" }
-- Some ptxas versions spill four registers to fit one more block on a multiprocessor, which is harmless.
local FRAME = 16

--- Returns all kernels as {file, name (mangled), arch, registers, stack, spills}.
local function kernels()
  local all = {}
  for file in lfs.dir(FOLDER) do
    if file:find("%.resources$") then
      local now
      for line in io.lines(FOLDER .. "/" .. file) do
        local name, arch = line:match("Compiling entry function '([^']+)' for '([^']+)'")
        if name then
          now = { file = file, name = name, arch = arch, spills = 0, stack = 0 }
          all[#all + 1] = now
        end
        local stack, stores, loads = line:match("(%d+) bytes stack frame, (%d+) bytes spill stores, (%d+) bytes spill")
        if stack and now and not now.registers then
          now.stack, now.spills = tonumber(stack), tonumber(stores) + tonumber(loads)
        end
        local registers = line:match("Used (%d+) registers")
        if registers then now.registers = tonumber(registers) end
      end
    end
  end
  return all
end

local function may_have_a_frame(name)
  for _, pattern in ipairs(MAY_HAVE_FRAMES) do
    if name:find(pattern) then return true end
  end
  return false
end

--- Returns the architectures of each kernel: "FILE NAME" -> "sm_80 sm_90".
local function architectures(all)
  local of = {}
  for _, k in ipairs(all) do
    local key = k.file .. " " .. k.name
    of[key] = of[key] or {}
    table.insert(of[key], k.arch)
  end
  for key, list in pairs(of) do
    table.sort(list)
    of[key] = table.concat(list, " ")
  end
  return of
end

describe("machine code of the kernels of the device cuda", function()
  it("stays in registers and exists for sm_80 and sm_90", function()
    if lfs.attributes(FOLDER .. "/norm.cu.o.resources", "mode") ~= "file" then
      return pending("this build has no plug-in libps_cuda.so")
    end
    local all, wrong = kernels(), {}
    for _, k in ipairs(all) do
      local where = ("%s for %s: "):format(k.name, k.arch)
      if not k.registers then
        wrong[#wrong + 1] = where .. "ptxas said nothing of it"
      else
        if k.stack > FRAME and not may_have_a_frame(k.name) then
          wrong[#wrong + 1] = ("%sa stack frame of %d bytes, %d of spills"):format(where, k.stack, k.spills)
        end
      end
    end
    assert.equal("", table.concat(wrong, "\n"))
    local both, hopper = 0, 0
    for key, list in pairs(architectures(all)) do
      local only = key:find("^attention_hopper")
      assert.equal(only and "sm_90a" or "sm_80 sm_90", list, key)
      if only then hopper = hopper + 1 else both = both + 1 end
    end
    assert.truthy(both > 100 and hopper > 0, ("%d and %d kernels"):format(both, hopper))
  end)
end)
