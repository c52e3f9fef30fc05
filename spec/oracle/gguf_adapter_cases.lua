-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/gguf_adapter_cases.lua JOB.json: makes a GGUF file of the folder of an adapter that
-- gguf_adapter_oracle.py wrote, and a folder of the converter's file. A failure is written to ours .. ".error".
local json = require "cjson"
local merge = require "ps.lora.merge_folder"

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read("*a"))
f:close()
for _, case in ipairs(job) do
  local ok, problem = pcall(function()
    merge.convert(case.adapter, case.ours, { base = case.model })
    merge.convert(case.theirs, case.back, { base = case.model })
  end)
  if not ok then
    local out = assert(io.open(case.ours .. ".error", "wb"))
    out:write(tostring(problem))
    out:close()
  end
end
