-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/gguf_cases.lua JOB.json: reads what gguf_oracle.py wrote. A case has `file` and `out`: the
-- metadata goes to out .. ".json", each value as text, and the tensors to out .. ".safetensors". A case with `texts`
-- has its tokenizer's ids of each text in out .. ".json". A case with `types` is written to `file`. What fails is
-- written to out .. ".error".
local ps = require "ps"
local gguf = require "ps.io.gguf"
local json = require "cjson"
local floats = require "ps.core.array" "float"
local native = require "ps.core.ffi"
local writing = require "ps.io.gguf_write"

local function write(path, text)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
end

-- Converts a value to text. Strings become hexadecimal digits, so that any bytes are allowed.
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

-- Writes a safetensors file's fp32 tensors in other types, with random metadata.
local function convert(case)
  local tensors, list, entries = ps.load(case.tensors), {}, {}
  for name, kind in pairs(case.types) do
    list[#list + 1] = { name = name, type = kind, shape = tensors[name]:shape() }
  end
  for i, one in ipairs(case.meta) do entries[i] = { one.key, one.kind, one.value } end
  local writer = writing.open(case.file, entries, list)
  for _, one in ipairs(list) do
    local t = tensors[one.name]:contiguous()
    local data = floats(t:numel())
    native.check(native.C.ps_tensor_read(t, data, t:nbytes()))
    writer:append(one.name, "fp32", data, t:numel())
  end
  writer:commit()
  writer:close()
end

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read("*a"))
f:close()
for _, case in ipairs(job) do
  local ok, problem = pcall(case.types and convert or case.texts and encode or read, case)
  if not ok then write(case.out .. ".error", tostring(problem)) end
end
