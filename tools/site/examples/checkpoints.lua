-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local folder = os.tmpname()
os.remove(folder)
local model = ps.nn.Linear(2, 2)
local optimizer = ps.optim.AdamW(model, { lr = 1e-3 })
ps.checkpoints.save(folder, { model = model, optimizer = optimizer, step = 7 })
local state = ps.checkpoints.load(folder, { model = model, optimizer = optimizer })
assert(state.step == 7)
os.execute(("rm -r '%s'"):format(folder))
