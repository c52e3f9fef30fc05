-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/file_cases.lua JOB.json: reads each file of files_oracle.py's job ({from, to = {paths}}) and
-- writes its contents under the other names. An error is written as text to a file with the first of these names and
-- the suffix .error.
local ps = require "ps"
local json = require "cjson"

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read("*a"))
f:close()
for _, case in ipairs(job) do
  local ok, problem = pcall(function()
    local value = ps.load(case.from)
    for _, to in ipairs(case.to) do ps.save(value, to) end
  end)
  if not ok then
    local out = assert(io.open(case.to[1] .. ".error", "wb"))
    out:write(tostring(problem))
    out:close()
  end
end
