-- SPDX-License-Identifier: BSD-3-Clause
return {
  source = "rates by NVIDIA's data sheets; memory as drivers report it; host, links, network, disk and Adam there are "
    .. "assumed",
  gpu = { sms = 132, flops = { bf16 = 989.4e12, fp16 = 989.4e12, fp32 = 66.9e12 }, between = 450e9 },
  taken = {
    { what = "the CUDA context", nbytes = 550 * 2 ^ 20, source = "assumed: drivers take 300 to 600 MiB" },
    { what = "cuBLASLt's work space", nbytes = 32 * 2 ^ 20, source = "src/backend/cuda/gemm.cu" },
    { what = "reserved for the driver", nbytes = 64 * 2 ^ 20, source = "src/backend/cuda/backend.cpp" },
    { what = "buffers for sums over ranks", nbytes = 64 * 2 ^ 20, ranks = true, source = "src/comm/comm.c" },
    { what = "NCCL's buffers", nbytes = 200 * 2 ^ 20, ranks = true, source = "assumed" },
  },
  host = { nbytes = 2e12 },
  links = { up = 55e9, down = 55e9 },
  network = 50e9,                                          -- one InfiniBand adapter with 400 Gbit/s per GPU
  disk = { read = 6e9, write = 3e9 },
  efficiency = { compute = { 0.3, 0.6 }, memory = { 0.6, 0.9 },
    links = { 0.6, 0.9 }, between = { 0.5, 0.85 }, disk = { 0.5, 0.9 } },
  variants = {
    h100 = { text = "NVIDIA H100 (80 GB)", gpu = { nbytes = 81089 * 2 ^ 20, bandwidth = 3350e9 },
      adam = { host = 6e9, device = 120e9 } },             -- 28 bytes per parameter
    h200 = { text = "NVIDIA H200 (141 GB)", gpu = { nbytes = 143156 * 2 ^ 20, bandwidth = 4800e9 },
      adam = { host = 6e9, device = 171e9 } },
  },
}
