-- SPDX-License-Identifier: BSD-3-Clause
-- The memory that a process has taken from the machine (ps_memory_held). A budget that is a share of the memory is a
-- share of the free bytes and of these bytes. A region of the host has memory only where something was written.
local check_lib = require "spec.check_lib"

local SCRIPT = [[
  local ps, ffi = require "ps", require "ffi"
  local function anonymous()                                        -- bytes, as the system counts them
    return tonumber(io.open("/proc/self/status"):read("*a"):match "RssAnon:%%s*(%%d+)") * 1024
  end
  local function numbers(when)
    local device = 0
    while ffi.string(ps.C.ps_device_name(ps.ctx, device)) ~= "%s" do device = device + 1 end
    print(when, tonumber(ps.C.ps_memory_held(ps.ctx, device)), ps.memory("%s").reserved, anonymous())
  end
  %s
]]

-- Runs a script that calls numbers(when). Returns {held, reserved, anonymous} in bytes for each `when`.
local function run(device, script)
  local text = check_lib.run("OMP_NUM_THREADS=1", SCRIPT:format(device, device, script))
  local found = {}
  for when, held, reserved, anonymous in text:gmatch "(%w+)\t(%d+)\t(%d+)\t(%d+)" do
    found[when] = { tonumber(held), tonumber(reserved), tonumber(anonymous) }
  end
  return found, text
end

describe("the memory that a process holds", function()
  it("is none before the first tensor, and then what was written of the host's regions", function()
    local found, text = run("cpu", [[
      numbers "first"
      local small = ps.ones { 1000 }
      numbers "small"
      local large = ps.ones { 2 ^ 24 }
      numbers "large"
      large = nil
      ps.collect()
      numbers "freed"
    ]])
    assert(found.first and found.freed, text)
    assert.equal(0, found.first[1])
    assert(found.small[2] >= 2 ^ 28 and found.small[1] < 2 ^ 27, text)
    assert(found.small[1] <= found.small[3], text)
    assert(found.large[1] >= 2 ^ 26 and found.large[1] <= found.large[3], text)
    assert(found.freed[1] >= 2 ^ 26, text)                                  -- the region keeps the memory
  end)

  it("is whole regions if the address space is limited", function()
    local found, text = run("cpu", [[
      ffi.cdef "int setrlimit(int, const uint64_t *);"
      local pages = tonumber(io.open("/proc/self/statm"):read("*l"):match "%d+")
      local limit = pages * 4096 + 2 ^ 30
      ffi.C.setrlimit(9, ffi.new("uint64_t[2]", limit, limit))
      local small = ps.ones { 1000 }
      numbers "small"
    ]])
    assert(found.small and found.small[2] > 0, text)
    assert.equal(found.small[2], found.small[1])
  end)

  it("is whole regions on a device", function()
    local found, text = run("sim", [[
      local small = ps.ones({ 1000 }, { device = "sim" })
      numbers "small"
    ]])
    assert(found.small and found.small[2] > 0, text)
    assert.equal(found.small[2], found.small[1])
  end)

  it("is nothing for a device that does not exist", function()
    local ps = require "ps"
    assert.equal(-1, tonumber(ps.C.ps_memory_held(ps.ctx, 99)))
  end)
end)
