-- SPDX-License-Identifier: BSD-3-Clause
-- Definitions for editors: the public functions, without bodies, in the form that LuaLS and EmmyLua read.
-- tools/api_doc.lua calls entry.put for each function, and entry.text at the end.
local annotations = require "ps.prompt.annotations"
local wrap = require "ps.core.wrap"

local entry = {}

local LINE = 120

-- Maps a prefix in docs/api.md to the class of the objects that the prefix stands for. Two prefixes occur in several
-- sections, so the classes of these two prefixes also depend on the section (see `class_of`).
local CLASSES = { ["ps."] = "ps", ["t:"] = "ps.Tensor", ["F."] = "ps.functional", ["module:"] = "ps.nn.Module",
  ["scaler:"] = "ps.LossScaler", ["schedule:"] = "ps.Schedule", ["tokens:"] = "ps.Tokens", ["loader:"] = "ps.Loader",
  ["tokenizer:"] = "ps.Tokenizer", ["tok:"] = "ps.TextTokenizer", ["display:"] = "ps.Progress",
  ["inspector:"] = "ps.inspect.Inspector", ["ctx:"] = "ps.autograd.Context", ["handle:"] = "ps.HookHandle",
  ["writer:"] = "ps.SafeTensorsWriter", ["group:"] = "ps.Group", ["manager:"] = "ps.bmt.OptimManager",
  ["scheduler:"] = "ps.bmt.Scheduler" }
-- Classes that inherit the methods of another class.
local PARENTS = { ["ps.TextTokenizer"] = "ps.Tokenizer", ["ps.pretrained.Model"] = "ps.nn.Module",
  ["ps.Engine"] = "ps.nn.Module", ["ps.EngineOptimizer"] = "ps.Optimizer" }

local OPERATORS = { "add", "sub", "mul", "div", "pow" }

local functions, order, seen, made = {}, {}, {}, {}
local section, shared = "", {}

--- Sets the section of docs/api.md to which the next functions belong.
---@param title string
function entry.section(title) section = title end

-- Returns the class for a prefix such as "nn." or "optimizer:". Also returns true if the functions with this prefix are
-- methods.
local function class_of(prefix)
  if prefix == "optimizer:" then
    return section == "The engine" and "ps.EngineOptimizer" or "ps.Optimizer", true
  elseif prefix == "model:" then return section == "The engine" and "ps.Engine" or "ps.pretrained.Model", true
  elseif prefix == "file:" then
    return "ps.SafeTensors", true                          -- in the second section with this prefix, the class is
                                                           -- ps.TorchFile; see entry.put
  elseif CLASSES[prefix] then return CLASSES[prefix], prefix:find ":$" ~= nil end
  return "ps." .. prefix:gsub("%.$", ""), false
end

local KEYWORDS = { ["end"] = true, ["in"] = true, ["function"] = true, ["repeat"] = true, ["not"] = true }

-- Returns a tag, such as @param, on one line. If `rest` has a type and a text, "#" separates them.
local function tag(name, rest)
  return ("---@%s %s"):format(name, (rest:gsub("%s+", " "):gsub("[ #]+$", "")))
end

--- Records the methods of tensors that are also functions of `ps`.
---@param names string[]
function entry.shared(names) shared = names end

--- Records a function.
---@param prefix string for example "t:" or "ps.nn."
---@param name string
---@param names string[] the names of the function's parameters
---@param about Described
---@param text string
---@param class? string the class of the objects that the function creates
function entry.put(prefix, name, names, about, text, class)
  local owner, method = class_of(prefix)
  local key = owner .. (method and ":" or ".") .. name
  if seen[key] and owner == "ps.SafeTensors" then
    owner, key = "ps.TorchFile", "ps.TorchFile:" .. name
  end
  if seen[key] or KEYWORDS[name] then return end
  seen[key] = true
  local lines = {}
  wrap(lines, text, LINE, "--- ", "--- ")
  for _, param in ipairs(about.params) do
    if param.name ~= "self" and param.type ~= "" then
      lines[#lines + 1] = tag("param", ("%s %s %s"):format(param.name, param.type, param.about))
    end
  end
  if class then
    lines[#lines + 1] = tag("return", class)
    made[#made + 1] = class
  end
  for _, result in ipairs(about.returns) do
    lines[#lines + 1] = tag("return", ("%s # %s"):format(result.type, result.about))
  end
  local bare = {}
  for i, n in ipairs(names) do bare[i] = n:gsub("%?$", "") end
  if not functions[owner] then
    functions[owner] = {}
    order[#order + 1] = owner
  end
  lines[#lines + 1] = ("function %s%s%s(%s) end"):format("%s", method and ":" or ".", name, table.concat(bare, ", "))
  table.insert(functions[owner], lines)
end

local function fields_of(class)
  local lines = {}
  for _, field in ipairs(class.fields) do
    lines[#lines + 1] = tag("field", ("%s %s %s"):format(field.name, field.type, field.about))
  end
  return lines
end

-- Returns the name of the variable for a class. For example, the variable for "ps.nn.init" is ps_nn_init.
local function variable_of(class) return (class:gsub("%.", "_")) end

--- Returns the text of the whole file.
---@param named table<string, DescribedClass> the classes that types name, and their fields
---@return string
function entry.text(named)
  local out = { "---@meta", "-- Written by `psluajit definitions`; do not edit.", "" }
  local function put(line, ...) out[#out + 1] = select("#", ...) > 0 and line:format(...) or line end
  local done = {}
  local function put_class(class, fields)
    if done[class] then return end
    done[class] = true
    put("---@class %s%s", class, PARENTS[class] and ": " .. PARENTS[class] or "")
    for _, line in ipairs(fields or {}) do put(line) end
  end
  local function fields_by_name(class) return named[class] and fields_of(named[class]) or {} end
  -- A table of functions is a field of another table. For example, ps.nn is a field of ps, and ps.nn.init is a field of
  -- ps.nn. ps.bmt is an exception, because scripts require it separately.
  local tables = {}
  for _, class in ipairs(order) do
    local owner, field = class:match "^(.*)%.([%l_]+)$"
    if owner and class ~= "ps.bmt" then
      tables[owner] = tables[owner] or {}
      table.insert(tables[owner], ("---@field %s %s"):format(field, class))
    end
  end
  table.insert(tables.ps, "---@field F ps.functional")
  for _, class in ipairs(order) do
    local fields = fields_by_name(class)
    for _, line in ipairs(tables[class] or {}) do fields[#fields + 1] = line end
    if class == "ps" then
      for _, name in ipairs(shared) do
        fields[#fields + 1] = ("---@field %s fun(t: ps.Tensor, ...: any): ps.Tensor"):format(name)
      end
    end
    put_class(class, fields)
    if class == "ps.mesh" then put "---@overload fun(sizes: table): ps.mesh" end
    if class == "ps.Tensor" then
      for _, name in ipairs(OPERATORS) do put("---@operator %s(ps.Tensor|number): ps.Tensor", name) end
      put "---@operator unm: ps.Tensor"
      put "---@field [any] ps.Tensor"
    elseif class == "ps.nn.Module" then put "---@overload fun(...): any" put "---@field [any] any"
    elseif class == "ps.pretrained.Model" or class == "ps.Engine" then put "---@overload fun(...): any" end
    put("local %s = {}", variable_of(class))
    put ""
    for _, lines in ipairs(functions[class]) do
      for i, line in ipairs(lines) do put(i == #lines and line:gsub("%%s", variable_of(class), 1) or line) end
      put ""
    end
  end
  local rest = {}
  for name in pairs(named) do if not done[name] then rest[#rest + 1] = name end end
  table.sort(rest)
  for _, name in ipairs(rest) do
    put_class(name, fields_by_name(name))
    put ""
  end
  for _, name in ipairs(made) do
    if not done[name] then
      done[name] = true
      put("---@class %s: ps.nn.Module", name)
      put ""
    end
  end
  -- Some classes, such as ps.Config, have fields that are internal to psluajit. Only the name of such a class is
  -- written.
  local bare = {}
  for _, line in ipairs(out) do
    for name in (line:match "^%-%-%-@[prf]%l+ (.*)$" or ""):gmatch "%f[%w_]ps%.[%w_.]*%u[%w_]*" do
      if not done[name] and annotations.class(name) then
        done[name] = true
        bare[#bare + 1] = name
      end
    end
  end
  table.sort(bare)
  for _, name in ipairs(bare) do put("---@class %s\n", name) end
  put "return ps"
  return table.concat(out, "\n") .. "\n"
end

return entry
