-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/hardware/probe.lua [--device cuda] > tools/hardware/NAME.lua: measures this machine and prints its
-- table for plans (planning/hardware.lua). Give a folder with --disk, and its disk is measured, too.
local ps = require "ps"
local argparse = require "argparse"
local speeds = require "ps.speeds"
local C = ps.C

local NBYTES = 2 ^ 27          -- of the file
local SIZES = { side = 2048, nbytes = 2 ^ 27, dtypes = { "bf16", "fp16", "fp32" } }

local parser = argparse("tools/hardware/probe.lua", "Measures this machine for plans.")
parser:option("--device", "cpu, or a GPU's: cuda", "cpu")
parser:option("--disk", "a folder, whose disk is measured with a file of 128 MiB")
local args = parser:parse()

-- Bytes a second of a file that is written through to the disk, and read again.
local function disk(folder)
  local fcntl, unistd = require "posix.fcntl", require "posix.unistd"
  local path = folder .. "/psluajit_probe"
  local block = ("x"):rep(2 ^ 20)
  local fd = assert(fcntl.open(path, fcntl.O_RDWR + fcntl.O_CREAT + fcntl.O_TRUNC, 384))
  local began = C.ps_now()
  for _ = 1, NBYTES / #block do assert(unistd.write(fd, block)) end
  unistd.fsync(fd)
  local wrote = C.ps_now() - began
  began = C.ps_now()
  unistd.lseek(fd, 0, unistd.SEEK_SET)
  for _ = 1, NBYTES / #block do assert(unistd.read(fd, #block)) end
  local read = C.ps_now() - began
  unistd.close(fd)
  os.remove(path)
  return NBYTES / read, NBYTES / wrote
end

local function list(flops)
  local parts = {}
  for _, dtype in ipairs(SIZES.dtypes) do
    if flops[dtype] then parts[#parts + 1] = ("%s = %.4g"):format(dtype, flops[dtype]) end
  end
  return table.concat(parts, ", ")
end

local gpu = args.device ~= "cpu"
local rates = ps.device_rates(gpu and args.device or "sim")
local host = speeds.of("cpu", SIZES)
local read, write
if args.disk then read, write = disk(args.disk) end
print "-- SPDX-License-Identifier: BSD-3-Clause"
print "return {"
print(('  text = %q,'):format(ps.device(args.device).description))
print(('  source = "measured by tools/hardware/probe.lua%s",'):format(args.disk
  and ", the disk's reads by way of the page cache" or "; the disk was not measured"))
print "  measured = true,"
if gpu then
  local device = speeds.of(args.device, SIZES)
  print(("  gpu = { nbytes = %d, flops = { %s },\n    bandwidth = %.4g, between = %.4g },"):format(
    ps.memory_available(args.device), list(device.flops), device.bandwidth, rates.up))
end
print(("  host = { nbytes = %d, flops = { %s },\n    bandwidth = %.4g },"):format(ps.memory_available "cpu",
  list(host.flops), host.bandwidth))
print(("  links = { up = %.4g, down = %.4g },"):format(rates.up, rates.down))
if read then print(("  disk = { read = %.4g, write = %.4g },"):format(read, write)) end
print(("  adam = { host = %.4g, device = %.4g },"):format(rates.host_adam, rates.device_adam))
print "  efficiency = { compute = { 0.5, 1 }, memory = { 0.5, 1 }, links = { 0.8, 1 }, between = { 0.8, 1 },"
print "    disk = { 0.8, 1 } },"
print "}"
