-- SPDX-License-Identifier: BSD-3-Clause
return {
  text = "NVIDIA V100 (32 GB)",
  source = "rates by NVIDIA's data sheets; memory as drivers report it; host, links, network, disk and Adam there are "
    .. "assumed",
  memory_alone = "the kernels need compute capability 8.0, which this GPU lacks",
  gpu = { nbytes = 32510 * 2 ^ 20, sms = 80, flops = { fp16 = 125e12, fp32 = 15.7e12 },
    bandwidth = 900e9, between = 150e9 },
  taken = {
    { what = "the CUDA context", nbytes = 400 * 2 ^ 20, source = "assumed: drivers take 300 to 600 MiB" },
    { what = "cuBLASLt's work space", nbytes = 32 * 2 ^ 20, source = "src/backend/cuda/gemm.cu" },
    { what = "reserved for the driver", nbytes = 64 * 2 ^ 20, source = "src/backend/cuda/backend.cpp" },
    { what = "buffers for sums over ranks", nbytes = 64 * 2 ^ 20, ranks = true, source = "src/comm/comm.c" },
    { what = "NCCL's buffers", nbytes = 200 * 2 ^ 20, ranks = true, source = "assumed" },
  },
  host = { nbytes = 240e9 },
  links = { up = 14e9, down = 14e9 },
  network = 12.5e9,                                        -- one InfiniBand adapter with 100 Gbit/s per GPU
  disk = { read = 6e9, write = 3e9 },
  adam = { host = 2e9, device = 32.1e9 },                     -- 28 bytes per parameter
  efficiency = { compute = { 0.3, 0.6 }, memory = { 0.6, 0.9 },
    links = { 0.6, 0.9 }, between = { 0.5, 0.85 }, disk = { 0.5, 0.9 } },
}
