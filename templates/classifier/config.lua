-- Settings of train.lua and classify.lua.
return {
  seed = 1,
  epochs = 30,
  batch = 8,
  letters = 48,                          -- of a text; longer texts are cut
  buckets = 512,                         -- rows of the embedding: pairs of letters are hashed into them
  width = 32,
  engine = {
    optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0.01 } },
  },
}
