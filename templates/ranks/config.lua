-- Settings of train.lua. They must be the same on all ranks.
return {
  seed = 1,
  steps = 60,
  batch = 4,                             -- texts per step on each rank
  seq = 64,                              -- bytes per text
  model = { vocab_size = 256, n_positions = 64, n_layer = 2, n_head = 4, n_embd = 64 },
  -- A DeepSpeed configuration: docs/config.md lists its keys.
  engine = {
    optimizer = { type = "AdamW", params = { lr = 3e-3, weight_decay = 0.1 } },
    zero_optimization = { stage = 3 },
    gradient_clipping = 1,
  },
}
