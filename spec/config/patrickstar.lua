-- SPDX-License-Identifier: BSD-3-Clause
-- The settings of PatrickStar's README as a Lua table, with a client section that has only a tracer.
return {
  optimizer = {
    type = "Adam",
    params = { lr = 0.001, betas = { 0.9, 0.999 }, eps = 1e-6, weight_decay = 0, use_hybrid_adam = true },
  },
  fp16 = {
    enabled = true, loss_scale = 0, initial_scale_power = 2 ^ 3, loss_scale_window = 1000, hysteresis = 2,
    min_loss_scale = 1,
  },
  default_chunk_size = 64 * 1024 * 1024,
  release_after_init = true,
  use_cpu_embedding = false,
  client = {
    mem_tracer = {
      use_async_mem_monitor = true, warmup_gpu_chunk_mem_ratio = 0.1, overall_gpu_mem_ratio = 0.9,
      overall_cpu_mem_ratio = 0.9, margin_use_ratio = 0.8, use_fake_dist = false, with_static_partition = false,
    },
  },
}
