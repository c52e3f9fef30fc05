-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/pipe_cases.lua CASES.json OUT.json: tables of pipelines for pipe_oracle.py. A case is the
-- options of pipe_table.table, or {text = a table}. Of each: the table's text, its makespan with F = I = W = 1, what
-- ranks hold.
local cjson = require "cjson"
local pipe_table = require "ps.parallel.pipeline.table"

local f = assert(io.open(arg[1]))
local cases = cjson.decode(f:read "*a")
f:close()
for i, case in ipairs(cases) do
  local ok, result = pcall(function()
    local t = case.text and pipe_table.read(case.text) or pipe_table.table(case)
    local held = {}
    for rank = 0, t.stages - 1 do held[rank + 1] = t:held(rank) end
    return { text = t:text(), makespan = t:simulate().makespan, held = held }
  end)
  cases[i] = ok and result or { error = tostring(result) }
end
f = assert(io.open(arg[2], "w"))
f:write(cjson.encode(cases))
f:close()
