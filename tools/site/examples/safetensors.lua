-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local path = os.tmpname()
ps.safetensors.save(path, { weight = ps.ones { 2, 3 } })
local file = ps.safetensors.open(path)
assert(file:tensor("weight"):sum():item() == 6)
file:close()
os.remove(path)
