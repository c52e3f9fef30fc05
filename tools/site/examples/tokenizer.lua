-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local tok = ps.tokenizer.bytes()
local ids = tok:encode "chunk"
assert(#ids == 5 and tok:decode(ids) == "chunk")
