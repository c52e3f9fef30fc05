-- Settings of train.lua and sample.lua.
local steps = 300

return {
  seed = 1,
  steps = steps,
  batch = 8,                             -- texts per step
  seq = 64,                              -- bytes per text
  model = { vocab_size = 256, n_positions = 64, n_layer = 2, n_head = 4, n_embd = 64 },
  -- A DeepSpeed configuration: docs/config.md lists its keys. memory = { host = "2GiB", disk = { path = "/var/tmp" } }
  -- trains within a budget.
  engine = {
    optimizer = { type = "AdamW", params = { lr = 3e-3, weight_decay = 0.1 } },
    scheduler = { type = "warmup_cosine", params = { max_lr = 3e-3, min_lr = 3e-4, warmup = 20, total = steps } },
    gradient_clipping = 1,
  },
}
