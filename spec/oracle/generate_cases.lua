-- SPDX-License-Identifier: BSD-3-Clause
-- Runs what generate_oracle.py drew: psluajit generate_cases.lua JOB.json. Each case is a folder, prompts, a number of
-- tokens and options; what the folder's model gives is written to IDS, a JSON list of lists or an object with `error`.
local ps = require "ps"
local cjson = require "cjson"

local file = assert(io.open(arg[1], "rb"))
local cases = cjson.decode(file:read("*a"))
file:close()

local function run(case)
  local function make() return ps.from_pretrained(case.model, { dtype = "fp32", quiet = true }) end
  local model = make()
  if case.host then                                        -- most chunks are on the disk
    model = ps.initialize { model_func = make, quiet = true, config = { chunk_size = 1024,
      memory = { host = case.host, disk = { path = case.disk, limit = 2 ^ 26 } },
      optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
  end
  local ok, rows = pcall(model.generate, model, case.prompts, case.n, case.options)
  if case.host then model:close() end
  if not ok then error(rows, 0) end
  return rows
end

for _, case in ipairs(cases) do
  for _, t in ipairs { case, case.options } do
    for key, value in pairs(t) do if value == cjson.null then t[key] = nil end end
  end
  local ok, result = xpcall(run, debug.traceback, case)
  local out = assert(io.open(case.ids, "wb"))
  out:write(cjson.encode(ok and result or { error = tostring(result) }))
  out:close()
end
