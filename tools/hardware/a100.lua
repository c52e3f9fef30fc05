-- SPDX-License-Identifier: BSD-3-Clause
return {
  source = "rates by NVIDIA's data sheets; memory as drivers report it; host, links, network, disk and Adam there are "
    .. "assumed",
  gpu = { sms = 108, flops = { bf16 = 312e12, fp16 = 312e12, fp32 = 19.5e12 }, between = 300e9 },
  taken = {
    { what = "the CUDA context", nbytes = 450 * 2 ^ 20, source = "assumed: drivers take 300 to 600 MiB" },
    { what = "cuBLASLt's work space", nbytes = 32 * 2 ^ 20, source = "src/backend/cuda/gemm.cu" },
    { what = "reserved for the driver", nbytes = 64 * 2 ^ 20, source = "src/backend/cuda/backend.cpp" },
    { what = "buffers for sums over ranks", nbytes = 64 * 2 ^ 20, ranks = true, source = "src/comm/comm.c" },
    { what = "NCCL's buffers", nbytes = 200 * 2 ^ 20, ranks = true, source = "assumed" },
  },
  host = { nbytes = 1e12 },
  links = { up = 26e9, down = 26e9 },
  network = 25e9,                                          -- one InfiniBand adapter with 200 Gbit/s per GPU
  disk = { read = 6e9, write = 3e9 },
  efficiency = { compute = { 0.3, 0.6 }, memory = { 0.6, 0.9 },
    links = { 0.6, 0.9 }, between = { 0.5, 0.85 }, disk = { 0.5, 0.9 } },
  variants = {
    ["a100-40"] = { text = "NVIDIA A100 (40 GB)", gpu = { nbytes = 40536 * 2 ^ 20, bandwidth = 1555e9 },
      adam = { host = 4e9, device = 55.5e9 } },            -- 28 bytes per parameter
    ["a100-80"] = { text = "NVIDIA A100 (80 GB)", gpu = { nbytes = 81050 * 2 ^ 20, bandwidth = 2039e9 },
      adam = { host = 4e9, device = 72.8e9 } },
  },
}
