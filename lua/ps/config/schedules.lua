-- SPDX-License-Identifier: BSD-3-Clause
-- The names of the schedules that a configuration can select (scheduler.type): the schedules of DeepSpeed and Hugging
-- Face, two schedules of PyTorch, and the schedules of ps.sched.
return { "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "linear", "cosine",
  "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr",
  "cosine_warmup_with_min_lr", "warmup_stable_decay", "reduce_lr_on_plateau", "OneCycleLR", "LambdaLR",
  "warmup_cosine", "warmup_linear", "constant" }
