-- SPDX-License-Identifier: BSD-3-Clause
-- Parses the annotations above functions. tools/api_doc.lua writes the annotations to docs/api.md, and ps.help prints
-- the annotations.
local lfs = require "lfs"
local paths = require "ps.paths"
local exact = require "ps.core.exact"

local annotations = {}

-- Descriptions of functions that have no annotations in the sources, because one closure creates several of them.
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

-- Splits a text such as "integer[] a shape" into the type "integer[]" and the rest, "a shape". A blank ends the type,
-- unless the blank is inside brackets or follows ":", "," or "|".
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

--- Reads the annotations above a function. A line without a tag continues the previous annotation.
---@param fn function
---@return Described
function annotations.described(fn)
  fn = exact.inner(fn)
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

-- -- classes ----------------------------------------------------------------------------------------------------------
---@class DescribedClass
---@field name string
---@field parent string?
---@field text string
---@field fields {name: string, type: string, about: string}[] the fields that are not private

-- Reads the class whose annotations begin at line `at`, and adds it to `all`.
local function read_class(all, lines, at)
  local name, rest = lines[at]:match "^%-%-%-@class%s+([%w_.]+)(.*)$"
  local parent, text = rest:match "^:%s*([%w_.]+)(.*)$"
  local class, last = { name = name, parent = parent, text = (text or rest):match "^%s*(.-)%s*$", fields = {} }, nil
  local first = at                                         -- the description can precede the tag
  while first > 1 and lines[first - 1]:match "^%-%-%-" and not lines[first - 1]:match "^%-%-%-%s*@" do
    first = first - 1
  end
  for i = at - 1, first, -1 do class.text = lines[i]:match "^%-%-%-%s?(.*)$" .. " " .. class.text end
  for i = at + 1, #lines do
    local line = lines[i]:match "^%-%-%-%s?(.*)$"
    if not line then break end
    local tag, more = line:match "^@(%w+)%s+(.*)$"
    if tag == "field" then
      local key, kind = more:match "^(%S+)%s+(.*)$"
      last = key ~= "private" and { name = key, type = kind } or {}
      if last.name then table.insert(class.fields, last) end
    elseif tag then break
    elseif last and last.type then last.type = last.type .. " " .. line:match "^%s*(.*)$" end
  end
  for _, field in ipairs(class.fields) do field.type, field.about = split_type(field.type) end
  all[name] = class
end

local classes

local function read_folder(folder)
  for name in lfs.dir(folder) do
    local path = folder .. "/" .. name
    if name:match "%.lua$" then
      local lines = lines_of(path)
      for at, line in ipairs(lines) do
        if line:match "^%-%-%-@class ps%." then read_class(classes, lines, at) end
      end
    elseif not name:match "^%." and lfs.attributes(path, "mode") == "directory" then read_folder(path) end
  end
end

--- Returns the annotations of a class of tables, such as the options of a call or its result.
---@param name string for example "ps.TrainOptions"
---@return DescribedClass?
function annotations.class(name)
  if not classes then
    classes = {}
    read_folder(paths.root .. "/lua/ps")
  end
  return classes[name]
end

--- Calls fn with each class that a type contains.
---@param type string for example "ps.Loader|ps.Tokens[]"
---@param fn fun(class: DescribedClass)
function annotations.classes_in(type, fn)
  for name in type:gmatch "ps%.[%w_.]+" do
    local class = annotations.class(name)
    if class then fn(class) end
  end
end

--- Returns how a script calls a function in a table. The result is, for example, profiler.save, but profiler["end"],
--- because `end` is a Lua keyword.
---@param prefix string for example "profiler."
---@param name string
---@return string
function annotations.callable(prefix, name)
  if loadstring(("return t.%s"):format(name)) then return prefix .. name end
  return ('%s["%s"]'):format(prefix:gsub("[.:]$", ""), name)
end

--- Returns the names of a function's parameters.
---@param fn function
---@return string[]
function annotations.parameter_names(fn)
  fn = exact.inner(fn)
  local names = {}
  local info = debug.getinfo(fn, "u")
  for i = 1, info.nparams do names[i] = debug.getlocal(fn, i) end
  if info.isvararg then names[#names + 1] = "..." end
  -- `extra` is a placeholder of ops, which reject this argument.
  if names[#names] == "extra" then names[#names] = nil end
  return names
end

--- Returns the methods that models from ps.from_pretrained have, but other modules do not.
---@return table<string, function>
function annotations.pretrained()
  local methods, model = {}, require("ps.pretrained.model")
  for name, fn in pairs(model) do
    if type(fn) == "function" and not name:find "^_" and name ~= "begin" and name ~= "new" and name ~= "init" then
      methods[name] = fn
    end
  end
  methods.generate = require "ps.pretrained.generate"
  return methods
end

--- Returns the functions of `ps` that only call a function in another file. Maps each name to the called function.
---@return table<string, function>
function annotations.own()
  local dist = require "ps.dist"
  local serialize = require "ps.io.serialize"
  local own = {}
  for _, name in ipairs { "init_distributed", "rank", "world_size", "local_rank", "print_rank", "synchronize",
    "any_rank" } do own[name] = dist[name] end
  for _, name in ipairs { "save", "load" } do own[name] = serialize[name] end
  own.initialize = require("ps.engine").initialize
  for _, name in ipairs { "set_detect_anomaly",
    "detect_anomaly" } do own[name] = require("ps.inspect.anomaly")[name] end
  for _, name in ipairs { "memory", "chunks" } do own[name] = require("ps.memory.views")[name] end
  own.help = require("ps.prompt.help").help
  own.deferred, own.materialize = require("ps.nn.deferred").make, require("ps.nn.deferred").materialize
  own.initialize_engine = own.initialize
  return own
end

return annotations
