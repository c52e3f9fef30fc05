-- SPDX-License-Identifier: BSD-3-Clause
-- help(x) at the prompt, ps.help elsewhere: the annotations of a function, an op, a class or a module, parsed from the
-- sources by the same code that makes docs/api.md.
local annotations = require "ps.prompt.annotations"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local nearest = require "ps.core.nearest"
local scope = require "ps.core.scope"
local wrap_to = require "ps.core.wrap"

local help = {}

local ps                                             -- the table that scripts know as `ps`

--- Sets the table that scripts know as `ps`, which help describes.
---@param facade table
---@return table help
function help.of(facade)
  ps = facade
  return help
end

local WIDTH = 100
local TABLES = { "functional", "nn", "optim", "sched", "data", "tokenizer", "train", "evaluate", "checkpoints",
  "safetensors", "profiler", "progress", "inspect" }
local PREFIX = { functional = "F.", nn = "nn." }

-- Returns all functions with the ways to call them: {name, call ("F.gelu"), fn, method}. Several functions can have the
-- same name.
local function all_functions()
  local list, own = {}, annotations.own()
  local function add(prefix, t, method)
    for name, value in pairs(t) do
      if type(value) == "function" and type(name) == "string" and not name:find "^_" then
        list[#list + 1] = { name = name, call = annotations.callable(prefix, name),
          fn = prefix == "ps." and own[name] or value, given = value, method = method }
      end
    end
  end
  add("t:", require("ps.tensor").methods(), true)
  for _, key in ipairs(TABLES) do add(PREFIX[key] or key .. ".", ps[key]) end
  add("nn.init.", ps.nn.init)
  add("model:", require("ps.engine").Engine.methods, true)
  for name, fn in pairs(annotations.pretrained()) do add("model:", { [name] = fn }, true) end
  local methods, others = require("ps.tensor").methods(), {}
  for name, value in pairs(getmetatable(ps).all()) do
    if not methods[name] or name == "device" or name == "backward" or name == "where" then others[name] = value end
  end
  add("ps.", others)
  for _, entry in ipairs(list) do                     -- ps.exp is the same function as t:exp
    if entry.method and methods[entry.name] and others[entry.name] == nil then entry.also = rawget(ps, entry.name) end
  end
  add("ps.ops.", ps.ops)
  table.sort(list, function(a, b) return a.call < b.call end)
  return list
end

local function wrap(lines, text, indent) wrap_to(lines, text, WIDTH, indent) end

local function op_text(name)
  for _, info in pairs(native.op_info) do
    if info.name == name then return info.doc .. "." end
  end
  return ""
end

-- Appends the fields of a table's class to the lines.
local function put_fields(lines, class)
  wrap(lines, class.name .. (class.text ~= "" and ": " .. class.text or ""), "")
  for _, field in ipairs(class.fields) do
    wrap(lines, ("%s: %s %s"):format(field.name, field.type, field.about), "    ")
  end
end

-- Returns the annotations of a function, or an empty table if its source cannot be read, as for a loaded string.
local function about_of(fn)
  local ok, about = pcall(annotations.described, fn)
  return ok and about or { text = "", params = {}, returns = {} }
end

-- Formats an entry of all_functions.
local function text_of(entry)
  local text = about_of(entry.fn).text
  if text == "" then text = annotations.TEXTS[entry.call] or op_text(entry.name) end
  return text
end

local function put_function(lines, entry)
  local about, names = about_of(entry.fn), annotations.parameter_names(entry.fn)
  if entry.method then
    if about.params[1] and about.params[1].name == names[1] then table.remove(about.params, 1) end
    table.remove(names, 1)
  end
  local optional = {}
  for _, param in ipairs(about.params) do optional[param.name:gsub("%?$", "")] = param.name:match "%?$" end
  for i, name in ipairs(names) do names[i] = name .. (optional[name] or "") end
  local returns = {}
  for i, entry_ in ipairs(about.returns) do returns[i] = entry_.type end
  wrap(lines, ("%s(%s)%s"):format(entry.call, table.concat(names, ", "),
    #returns > 0 and " -> " .. table.concat(returns, ", ") or ""), "")
  local text = text_of(entry)
  wrap(lines, text ~= "" and text or "(It has no description.)", "  ")
  for _, param in ipairs(about.params) do
    if param.name ~= "self" and param.type ~= "" then
      wrap(lines, ("%s: %s %s"):format(param.name, param.type, param.about), "    ")
    end
  end
  for _, entry_ in ipairs(about.returns) do
    if entry_.about ~= "" then wrap(lines, ("gives %s %s"):format(entry_.type, entry_.about), "    ") end
  end
end

local function sorted_functions(t)
  local names = {}
  for name, value in pairs(t) do
    if type(name) == "string" and type(value) == "function" and not name:find "^_" then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

local function put_class(lines, class)
  local init = class.init
  put_function(lines, { name = "init", call = class.class_name, fn = init, method = true })
  local own = {}
  for _, name in ipairs(sorted_functions(class)) do
    if name ~= "init" and name ~= "new" and name ~= "extra_repr" then own[#own + 1] = "module:" .. name end
  end
  if #own > 0 then wrap(lines, "its own: " .. table.concat(own, ", "), "  ") end
  wrap(lines, 'as every module: help(ps.nn.Module)', "  ")
end

-- Appends a table's functions, each with the first sentence of its description.
local function put_table(lines, t)
  local entries = {}                                  -- a function of ps can be an alias of a function in another table
  for _, entry in ipairs(all_functions()) do
    for _, fn in pairs { entry.fn, entry.given, entry.also } do
      if not entries[fn] or entry.name == entry.call:match "%.([%w_]+)$" then entries[fn] = entry end
    end
  end
  for _, name in ipairs(sorted_functions(t)) do
    local text = text_of(entries[t[name]] or { fn = t[name], name = name, call = name })
    local first = text:match "^(.-%.)%s" or text
    local line = ("  %-18s %s"):format(name, first)
    lines[#lines + 1] = #line > WIDTH and line:sub(1, WIDTH - 3) .. "..." or line
  end
  if #lines == 0 then lines[1] = "a table without functions" end
end

local function of_name(lines, text)
  local all, names, known = all_functions(), {}, {}
  for _, entry in ipairs(all) do
    if entry.call == text or entry.name == text or "ps." .. entry.call == text then put_function(lines, entry) end
    if not known[entry.name] then known[entry.name], names[#names + 1] = true, entry.name end
  end
  local fields = annotations.class(text) or annotations.class("ps." .. text)
  if #lines == 0 and fields and fields.fields[1] then put_fields(lines, fields) end
  local class = rawget(ps.nn, text:match "^nn%.(.*)$" or text)
  if #lines == 0 and type(class) == "table" and rawget(class, "instance") then put_class(lines, class) end
  if #lines > 0 then return end
  local near = nearest.find(text, names)
  caller.error(("help: there is nothing with the name '%s'%s"):format(text, near and ("; did you mean "
    .. "'%s'?"):format(near) or ""))
end

--- Returns the description of a value as text.
---@param x any a function, a class, a module, a tensor, a table of functions, or a name: "gelu", "F.gelu"
---@return string
function help.text(x)
  local lines = {}
  if type(x) == "function" then x = require("ps.nn.handle").original(x) end
  if type(x) == "string" then of_name(lines, x)
  elseif type(x) == "function" then
    local told = {}                                        -- a function can have several names
    for _, entry in ipairs(all_functions()) do
      if x == entry.fn or x == entry.given or x == entry.also then
        if told[entry.fn] then lines[#lines + 1] = ("%s is the same as %s"):format(entry.call, told[entry.fn])
        else put_function(lines, entry) end
        told[entry.fn] = told[entry.fn] or entry.call
      end
    end
    if #lines == 0 then put_function(lines, { name = "", call = "function", fn = x }) end
  elseif scope.is_tensor(x) then
    wrap(lines, ("a tensor, %s [%s] on %s, with the methods"):format(x:dtype(), table.concat(x:shape(), ", "),
      x:device()), "")
    wrap(lines, table.concat(sorted_functions(require("ps.tensor").methods()), ", "), "  ")
  elseif type(x) == "table" and rawget(x, "instance") and x.class_name then put_class(lines, x)
  elseif require("ps.nn.module").is_module(x) then
    put_class(lines, (select(2, getmetatable(x).__names(x))))
  elseif require("ps.nn.handle").of(x) then
    lines[1] = "a model from ps.initialize; its methods in addition to those of its module:"
    put_table(lines, require("ps.engine").Engine.methods)
  elseif type(x) == "table" then put_table(lines, x)
  else lines[1] = "a " .. type(x) .. ": " .. tostring(x) end
  return table.concat(lines, "\n")
end

--- Prints the description of a function, an op, a class, a module, a tensor or a table of functions from the
--- annotations in the sources. At the prompt, this function is `help`.
---@param x any a value, or a name such as "gelu", "F.gelu", "t:sum" or "Linear"; nil prints an overview
function help.help(x)
  if x == nil then
    print "help(f), help(ps.nn.Linear), help(model), help \"gelu\": describe a function, a class, a module or a name.\n"
    print "help(ps), help(ps.F), help(ps.nn), help(ps.optim), help(ps.inspect), ...: list their contents."
    return
  end
  print(help.text(x))
end

return help
