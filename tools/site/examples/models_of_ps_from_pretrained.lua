-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local folder = os.tmpname()
os.remove(folder)
require("models.gpt2").new("tiny", { dropout = 0 }):save_pretrained(folder)
local model = ps.from_pretrained(folder)
local ids = model:generate({ 1, 2, 3 }, { max_new_tokens = 4, do_sample = false })
assert(#ids >= 4)
os.execute(("rm -r '%s'"):format(folder))
