-- SPDX-License-Identifier: BSD-3-Clause
-- What the annotations above a function say of it. tools/api_doc.lua makes docs/api.md of them, and ps.help shows them.
local annotations = {}

-- Functions that one closure makes, so that none of them has a text of its own in the sources.
annotations.TEXTS = { ["ps.zeros"] = "All elements 0.", ["ps.ones"] = "All elements 1.",
  ["ps.randn"] = "Normally distributed, mean 0 and deviation 1.", ["ps.rand"] = "Uniform in [0, 1).",
  ["t:half"] = "The same as t:to(\"fp16\").", ["t:bfloat16"] = "The same as t:to(\"bf16\").",
  ["t:float"] = "The same as t:to(\"fp32\").", ["t:double"] = "The same as t:to(\"fp64\").",
  ["t:int"] = "The same as t:to(\"int32\").", ["t:long"] = "The same as t:to(\"int64\").",
  ["nn.Module"] = "The class that nn.class derives from." }

-- -- reading annotations ----------------------------------------------------------------------------------------------
local sources = {}

local function lines_of(file)
  if not sources[file] then
    local lines = {}
    for line in io.lines(file) do lines[#lines + 1] = line end
    sources[file] = lines
  end
  return sources[file]
end

---@class Described
---@field text string
---@field params {name: string, type: string, about: string}[]
---@field returns {type: string, about: string}[]

-- "integer[] a shape" -> "integer[]", "a shape". A blank ends a type unless it is inside brackets or follows ":", ","
-- or "|".
local function split_type(text)
  local depth, at = 0, 1
  while at <= #text do
    local c = text:sub(at, at)
    if c:find "[%(%[{<]" then depth = depth + 1
    elseif c:find "[%)%]}>]" then depth = depth - 1
    elseif c == " " and depth == 0 and not text:sub(1, at - 1):find "[:,|]$" then break end
    at = at + 1
  end
  return text:sub(1, at - 1), text:sub(at + 1)
end

--- Reads the annotations above a function. A line without a tag goes on with the annotation before it.
---@param fn function
---@return Described
function annotations.described(fn)
  local info = debug.getinfo(fn, "S")
  local result = { text = {}, params = {}, returns = {} }
  if info.what == "C" then return { text = "", params = {}, returns = {} } end
  local lines = lines_of(info.source:sub(2))
  local first = info.linedefined
  while first > 1 and lines[first - 1]:match("^%s*%-%-%-") do first = first - 1 end
  local last
  for at = first, info.linedefined - 1 do
    local line = lines[at]:match("^%s*%-%-%-%s?(.*)$")
    local tag, rest = line:match("^@(%w+)%s*(.*)$")
    if tag == "param" then
      local name, kind = rest:match("^(%S+)%s*(.*)$")
      last = { name = name or "", type = kind or "" }
      table.insert(result.params, last)
    elseif tag == "return" then
      last = { type = rest }
      table.insert(result.returns, last)
    elseif tag then last = nil
    elseif last then last.type = last.type .. " " .. line:match("^%s*(.*)$")
    else table.insert(result.text, line) end
  end
  result.text = table.concat(result.text, " ")
  for _, list in ipairs { result.params, result.returns } do
    for _, entry in ipairs(list) do entry.type, entry.about = split_type(entry.type) end
  end
  return result
end

--- The names of a function's parameters.
---@param fn function
---@return string[]
function annotations.parameter_names(fn)
  local names = {}
  local info = debug.getinfo(fn, "u")
  for i = 1, info.nparams do names[i] = debug.getlocal(fn, i) end
  if info.isvararg then names[#names + 1] = "..." end
  return names
end

--- Functions of `ps` that only lead on to another file, by name: the functions that they lead to.
---@return table<string, function>
function annotations.own()
  local ps = require "ps"
  local own = {}
  for _, name in ipairs { "init_distributed", "rank", "world_size", "local_rank", "print_rank", "synchronize",
    "any_rank" } do own[name] = ps.dist[name] end
  for _, name in ipairs { "save", "load" } do own[name] = ps.serialize[name] end
  own.initialize = require("ps.engine").initialize
  for _, name in ipairs { "set_detect_anomaly", "detect_anomaly" } do own[name] = require("ps.anomaly")[name] end
  own.help = require("ps.help").help
  own.deferred, own.materialize = require("ps.deferred").make, require("ps.deferred").materialize
  own.initialize_engine = own.initialize
  return own
end

return annotations
