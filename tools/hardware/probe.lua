-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/hardware/probe.lua [--device cuda] > tools/hardware/NAME.lua: measures this machine and prints its
-- table for plans (planning/hardware.lua). With --disk FOLDER, the tool also measures the disk of that folder.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local speeds = require "ps.profile.speeds"
local C = ps.C

local DISK_NBYTES = 2 ^ 29      -- number of bytes that are written and read to measure the disk
local SIZES = { side = 2048, nbytes = 2 ^ 27, dtypes = { "bf16", "fp16", "fp32" } }

local parser = argparse("psluajit hardware/probe.lua", "Measures this machine for plans.")
parser:option("--device", "cpu, or cuda for a GPU", "cpu")
parser:option("--disk", "a folder whose disk is measured with a file of 1 GiB")
local args = command_line.parse(parser)

-- Returns the rates in bytes per second at which the disk tier reads and writes files in a folder. If the file system
-- allows it, the disk tier bypasses the page cache.
local function disk(folder)
  local model = ps.initialize { quiet = true, model_func = function() return ps.nn.Linear(1, 1) end,
    config = { device = "cpu", plan_print = false, memory = { disk = { path = folder, limit = 2 * DISK_NBYTES } } } }
  local rates = ps.ffi.new("double[2]")
  ps.check(C.ps_engine_disk_probe(ps.ctx, DISK_NBYTES, rates, rates + 1))
  model:close()
  return rates[0], rates[1]
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
print(('  source = "measured by tools/hardware/probe.lua%s",'):format(
  args.disk and "" or "; the disk was not measured"))
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
