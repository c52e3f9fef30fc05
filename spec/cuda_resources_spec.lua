-- SPDX-License-Identifier: BSD-3-Clause
-- What the kernels of the real plug-in take of a multiprocessor, as ptxas told the build (cmake/cuda_compile.cmake) for
-- sm_80 and sm_90: without a GPU nothing else shows it. Kernels that a training step spends its time in have everything
-- in registers, and all have as few registers and as little shared memory as a launch takes. Skipped without nvcc.
local lfs = require "lfs"
local paths = require "ps.paths"

local FOLDER = paths.exe:match("^(.*)/[^/]*$") .. "/cuda"

-- Kernels with stack frames: those that hold the ops of one element that are chosen at run time (of which pow, sin and
-- cos need local memory), sampling (a histogram of 16 sums), and some in fp64. Anything else must not.
local MAY_HAVE_FRAMES = { "flat_kernelI.*Lin1E", "any_kernelI", "sample_kernelI", "Id[Ed]", "IdLb" }
-- Launches have up to 256 threads (device.h: THREADS), but for kernels that tell ptxas how many (KERNEL_UP_TO): it has
-- them take no more registers then.
local REGISTERS, THREADS, STATIC = 65536, 256, 48 * 1024
-- Four registers that some version of ptxas trades for one more block on a multiprocessor are no harm.
local FRAME = 16

--- All kernels: {name (mangled), arch, registers, stack, spills, shared}.
local function kernels()
  local all = {}
  for file in lfs.dir(FOLDER) do
    if file:find("%.resources$") then
      local now
      for line in io.lines(FOLDER .. "/" .. file) do
        local name, arch = line:match("Compiling entry function '([^']+)' for '([^']+)'")
        if name then
          now = { file = file, name = name, arch = arch, shared = 0, spills = 0, stack = 0 }
          all[#all + 1] = now
        end
        local stack, stores, loads = line:match("(%d+) bytes stack frame, (%d+) bytes spill stores, (%d+) bytes spill")
        if stack and now and not now.registers then
          now.stack, now.spills = tonumber(stack), tonumber(stores) + tonumber(loads)
        end
        local registers = line:match("Used (%d+) registers")
        if registers then
          now.registers, now.shared = tonumber(registers), tonumber(line:match("(%d+) bytes smem")) or 0
        end
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

describe("machine code of the kernels of the device cuda", function()
  it("keeps to registers, fits a multiprocessor and is there for sm_80 and sm_90", function()
    if lfs.attributes(FOLDER .. "/norm.cu.o.resources", "mode") ~= "file" then
      return pending("this build has no plug-in libps_cuda.so")
    end
    local all, seen, wrong = kernels(), { sm_80 = 0, sm_90 = 0 }, {}
    for _, k in ipairs(all) do
      seen[k.arch] = (seen[k.arch] or 0) + 1
      local where = ("%s for %s: "):format(k.name, k.arch)
      if not k.registers then
        wrong[#wrong + 1] = where .. "ptxas said nothing of it"
      else
        if k.stack > FRAME and not may_have_a_frame(k.name) then
          wrong[#wrong + 1] = ("%sa stack frame of %d bytes, %d of spills"):format(where, k.stack, k.spills)
        end
        if k.registers * THREADS > REGISTERS then wrong[#wrong + 1] = where .. k.registers .. " registers" end
        if k.shared > STATIC then wrong[#wrong + 1] = where .. k.shared .. " bytes of shared memory" end
      end
    end
    assert.equal("", table.concat(wrong, "\n"))
    assert.truthy(seen.sm_80 > 100 and seen.sm_90 >= seen.sm_80, ("%d and %d kernels"):format(seen.sm_80, seen.sm_90))
  end)
end)
