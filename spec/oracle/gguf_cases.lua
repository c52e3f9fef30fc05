-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/gguf_cases.lua JOB.json: reads what gguf_oracle.py wrote. A case has `file` and `out`: the
-- metadata goes to out .. ".json", each value as text, and the tensors to out .. ".safetensors". A case with `texts`
-- has its tokenizer's ids of each text in out .. ".json". What fails is written to out .. ".error".
local ps = require "ps"
local gguf = require "ps.io.gguf"
local json = require "cjson"

local function write(path, text)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
end

-- A value as text: strings in hexadecimal digits, so that any bytes pass.
local function shown(value)
  if type(value) == "string" then return (value:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) end
  if type(value) == "number" then return ("%.17g"):format(value) end
  return (tostring(value):gsub("U?LL$", ""))
end

local function read(case)
  local file, meta, tensors = gguf.open(case.file), {}, {}
  for i, key in ipairs(file:keys()) do
    local value, kind, is_array = file:meta(key)
    local list = {}
    for k, one in ipairs(is_array and value or { value }) do list[k] = shown(one) end
    meta[i] = { key = key, kind = kind, array = is_array, n = #list, text = table.concat(list, " ") }
  end
  write(case.out .. ".json", json.encode { version = "x", meta = meta })
  for _, name in ipairs(file:names()) do tensors[name] = file:tensor(name) end
  ps.safetensors.save(case.out .. ".safetensors", tensors)
end

local function encode(case)
  local tok, all = ps.tokenizer.from_pretrained(case.file), {}
  for i, text in ipairs(case.texts) do
    local ids = tok:encode(text, { add_special_tokens = false, split_special_tokens = true })
    all[i] = table.concat(ids, " ")
  end
  write(case.out .. ".json", json.encode(all))
end

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read("*a"))
f:close()
for _, case in ipairs(job) do
  local ok, problem = pcall(case.texts and encode or read, case)
  if not ok then write(case.out .. ".error", tostring(problem)) end
end
