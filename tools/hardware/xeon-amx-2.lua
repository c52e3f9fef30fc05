-- SPDX-License-Identifier: BSD-3-Clause
-- Two cores of a Xeon with AVX-512 and AMX (bf16), as cloud providers rent them out. The device `sim` of this
-- machine copies by memcpy.
return {
  text = "2 cores of a Xeon with AMX",
  source = "measured by tools/hardware/probe.lua on a quiet machine, the disk on another day (the median of three)",
  measured = true,
  host = { nbytes = 24e9, flops = { bf16 = 1.204e12, fp16 = 2.511e11, fp32 = 2.61e11 },
    bandwidth = 2.69e10 },
  links = { up = 5.67e9, down = 4.56e9 },
  disk = { read = 2e9, write = 2.68e9 },
  adam = { host = 1.412e9, device = 3.044e9 },
  efficiency = { compute = { 0.5, 1 }, memory = { 0.5, 1 }, links = { 0.8, 1 }, between = { 0.8, 1 },
    disk = { 0.8, 1 } },
}
