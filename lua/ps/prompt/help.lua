-- SPDX-License-Identifier: BSD-3-Clause
-- Implements help(x) at the prompt and ps.help. Both functions print the annotations of a function, an op, a class or a
-- module. annotations.lua parses the annotations for this file and for docs/api.md.
local annotations = require "ps.prompt.annotations"
local caller = require "ps.core.caller"
local foreign = require "ps.core.foreign"
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
  "safetensors", "profiler", "progress", "inspect", "autograd", "chat", "lora", "preference", "dist", "mesh" }
local PREFIX = { functional = "F.", nn = "nn." }

-- The tables of `ps`. Each has a line that describes its contents.
local SPACES = {
  functional = "functions of tensors without state, also called ps.F",
  nn = "modules, and functions for their parameters", ["nn.init"] = "initial values of parameters",
  optim = "optimizers", sched = "schedules of learning rates", data = "token files, tables of examples and loaders",
  tokenizer = "tokenizers", train = "a training loop", evaluate = "metrics of generated answers",
  checkpoints = "complete states of training runs",
  safetensors = "safetensors files", profiler = "records where time and memory go", progress = "progress displays",
  inspect = "statistics of parameters and activations", autograd = "gradients of functions that a script defines",
  chat = "chat templates", lora = "adapters", preference = "preference training", dist = "groups of ranks",
  mesh = "divides the ranks: ps.mesh { pp = 2 }", ops = "the ops on which all functions are built",
  comms_logger = "statistics of the communication between ranks",
}
local ALIAS = { F = "functional", ["nn.functional"] = "functional", comm = "comms_logger" }

-- Values of `ps` that are not functions or tables of functions.
local VALUES = {
  all = "selects every element of a dimension, in t[{ ps.all, 0 }]", newaxis = "adds a dimension of size 1, in "
    .. "t[{ ps.newaxis, 0 }]", version = "the version of psluajit",
  computes = "whether ops compute their results; false in a run that only plans",
}

-- Returns all functions, and how to call them: {name, call ("F.gelu"), fn, method}. Several functions can have the same
-- name.
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
  add("module:", ps.nn.Module, true)
  add("tokenizer:", getmetatable(ps.tokenizer.bytes()).__index, true)
  add("model:", require("ps.engine").Engine.methods, true)
  for name, fn in pairs(annotations.pretrained()) do add("model:", { [name] = fn }, true) end
  local methods, others = require("ps.tensor").methods(), {}
  for name, value in pairs(getmetatable(ps).all()) do
    if not methods[name] or name == "device" or name == "backward" or name == "where" then others[name] = value end
  end
  add("ps.", others)
  for _, entry in ipairs(list) do                     -- for example, ps.exp is the function t:exp
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

-- Appends a description of a class of tables and its fields to the lines.
local function put_fields(lines, class)
  wrap(lines, class.name .. (class.text ~= "" and ": " .. class.text or ""), "")
  for _, field in ipairs(class.fields) do
    wrap(lines, ("%s: %s %s"):format(field.name, field.type, field.about), "    ")
  end
end

-- Returns the annotations of a function. Returns empty annotations if the function's source cannot be read, for example
-- because it is a loaded string.
local function about_of(fn)
  local ok, about = pcall(annotations.described, fn)
  return ok and about or { text = "", params = {}, returns = {} }
end

-- Returns the text for an entry of all_functions.
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

local function is_class(value)
  return type(value) == "table" and (rawget(value, "instance") ~= nil or value == ps.nn.Module)
end

-- Returns the entry of the function that a class wraps, such as F.relu for nn.ReLU. Returns nil if the class does not
-- name a function in its field _like.
local function wrapped_by(class)
  local like = rawget(class, "_like")
  local of = like and rawget(ps.F, like) and "F." or "t:"
  local fn = like and (rawget(ps.F, like) or require("ps.tensor").methods()[like])
  return fn and { name = like, call = of .. like, fn = fn, method = of == "t:" }
end

-- Appends how to call a class, what modules of the class compute, and which fields they have.
local function put_class(lines, class)
  local takes, entry = rawget(class, "_takes"), wrapped_by(class)
  if takes then
    local names = {}
    for i, argument in ipairs(takes) do names[i] = argument:match "^[%w_]+%??" end
    wrap(lines, ("%s(%s)"):format(class.class_name, table.concat(names, ", ")), "")
    wrap(lines, ("Creates a module that calls %s."):format(entry.call), "  ")
    for _, argument in ipairs(takes) do wrap(lines, argument, "    ") end
  elseif class == ps.nn.Module then wrap(lines, "nn.Module: " .. annotations.TEXTS["nn.Module"], "")
  else put_function(lines, { name = "init", call = class.class_name, fn = class.init, method = true }) end
  if class ~= ps.nn.Module and class.forward ~= ps.nn.Module.forward then
    put_function(lines, { name = "forward", call = "module", fn = class.forward, method = true })
  end
  if entry then put_function(lines, entry) end
  local fields = annotations.class("ps.nn." .. class.class_name)
  if fields and fields.fields[1] and class ~= ps.nn.Module then
    wrap(lines, "fields of the module:", "  ")
    for _, field in ipairs(fields.fields) do
      wrap(lines, ("%s: %s %s"):format(field.name, field.type, field.about), "    ")
    end
  end
  local own = {}
  for _, name in ipairs(sorted_functions(class)) do
    if name ~= "init" and name ~= "new" and name ~= "extra_repr" and (name ~= "forward" or class == ps.nn.Module) then
      own[#own + 1] = "module:" .. name
    end
  end
  if #own > 0 then wrap(lines, "its own: " .. table.concat(own, ", "), "  ") end
  if class ~= ps.nn.Module then wrap(lines, 'as every module: help "nn.Module"', "  ") end
end

-- Returns the first sentence of a text. "et al." does not end a sentence.
local function sentence(text)
  local at = 0
  repeat
    at = text:find("%.%s+%u", at + 1)
  until not at or not text:sub(1, at):find "et al%.$"
  return at and text:sub(1, at) or text
end

local function put_line(lines, name, text)
  local first = sentence(text)
  local line = ("  %-18s %s"):format(name, first)
  lines[#lines + 1] = #line > WIDTH and line:sub(1, WIDTH - 3) .. "..." or line
end

-- Returns the description of a class of modules.
local function class_text(class)
  local entry = wrapped_by(class)
  if entry then return ("A module that calls %s. "):format(entry.call) end
  return about_of(class.init).text
end

-- Appends a line for each function, class and table that a table contains. The line has the name and the first sentence
-- of the description.
local function put_table(lines, t)
  local first = #lines
  local entries = {}                                  -- a function of ps can be one of another table
  for _, entry in ipairs(all_functions()) do
    for _, fn in pairs { entry.fn, entry.given, entry.also } do
      if not entries[fn] or entry.name == entry.call:match "%.([%w_]+)$" then entries[fn] = entry end
    end
  end
  for _, name in ipairs(sorted_functions(t)) do
    put_line(lines, name, text_of(entries[t[name]] or { fn = t[name], name = name, call = name }))
  end
  local others, prefix = {}, t == ps and "" or t == ps.nn and "nn." or nil
  for name, value in pairs(t) do if is_class(value) then others[name] = class_text(value) end end
  for name, text in pairs(prefix and SPACES or {}) do
    local inner = name:sub(1, #prefix) == prefix and name:sub(#prefix + 1)
    if inner and not inner:find(".", 1, true) then others[inner] = ('%s: help "%s"'):format(text, name) end
  end
  for _, name in ipairs(caller.sorted_names(others)) do put_line(lines, name, others[name]) end
  if #lines == first then lines[first + 1] = "  a table without functions" end
end

-- Returns the value that a name such as "nn.Linear", "ps.optim" or "nn.Linear:forward" refers to, or nil.
local function value_of(text)
  local path = text:gsub("^ps%.", ""):gsub(":", ".")
  path = ALIAS[path] or path:gsub("^F%.", "functional."):gsub("^nn%.functional%.", "functional.")
  if path == "ps" then return ps end
  local value = ps
  for part in path:gmatch "[^.]+" do
    local ok, inner = pcall(function() return value[part] end)
    if type(value) ~= "table" or not ok then return nil end
    value = inner
  end
  return value, path
end

-- If a name belongs to another library and psluajit does not have it, returns a text about the name.
-- Otherwise returns nil.
local function foreign_text(text)
  local prefix, name = text:match "^(.-)[.:]?([^.:]+)$"
  prefix = prefix and ALIAS[prefix] == "functional" and "F" or prefix
  for _, place in ipairs { prefix, "ps", "F", "nn", "t", "optim", "sched", "module", "model", "optimizer", "loader" } do
    local found = name and foreign.is_place(place) and foreign.find(place, name)
    if found then return tostring(found) end
  end
  for _, place in ipairs { "F", "nn" } do
    local lacks = name and foreign.lacks(place, name)
    if lacks then return text .. ": " .. lacks end
  end
end

-- Appends the description of the value that a name refers to. Does nothing if there is no such value.
local function put_value(lines, text)
  local value, path = value_of(text)
  local about = path and VALUES[path]
  if about then wrap(lines, ("ps.%s: %s"):format(path, about), "")
  elseif type(value) == "function" then
    local prefix = path:match "^(.*)%.[^.]*$" or ""
    local class = is_class((value_of(prefix)))
    local name = path:match "[^.]+$"
    put_function(lines, { name = name, call = (class and "module:" or prefix .. ".") .. name,
      fn = annotations.own()[path] or value, method = class })
  elseif is_class(value) then put_class(lines, value)
  elseif value == ps or path and SPACES[path] then
    wrap(lines, value == ps and "ps: psluajit's functions and tables" or ("ps.%s: %s"):format(path, SPACES[path]), "")
    put_table(lines, value)
  end
end

-- Returns the known name that is most similar to a name, or nil. If the name has a dot or a colon, it is compared with
-- whole paths first. Otherwise it is compared with names without a path.
local function nearest_name(text, all)
  local names, known = {}, {}
  local bare = text:gsub("^ps%.", "")
  local function add(name)
    if not known[name] then known[name], names[#names + 1] = true, name end
  end
  for _, entry in ipairs(all) do add(bare:find "[.:]" and entry.call:gsub("^ps%.", "") or entry.name) end
  for _, name in ipairs(caller.sorted_names(SPACES)) do add(name) end
  for _, name in ipairs(caller.sorted_names(ps.nn)) do
    if is_class(ps.nn[name]) then add(bare:find "[.:]" and "nn." .. name or name) end
  end
  local last = bare:match "[.:]([^.:]+)$"
  return nearest.find(bare, names) or last and nearest_name(last, all)
end

local function of_name(lines, text)
  local all = all_functions()
  local bare = text:gsub("^torch%.", ""):gsub("^ps%.", "")
  for _, entry in ipairs(all) do
    local call = entry.call:gsub("^ps%.", "")
    if call == bare or entry.name == bare then put_function(lines, entry) end
  end
  if #lines > 0 then return end
  put_value(lines, bare)
  local class = rawget(ps.nn, bare)
  if #lines == 0 and is_class(class) then put_class(lines, class) end
  local fields = #lines == 0 and (annotations.class(text) or annotations.class("ps." .. bare))
  if fields and fields.fields[1] then put_fields(lines, fields) end
  if #lines > 0 then return end
  local other = foreign_text(bare)
  if other then return wrap(lines, other, "") end
  local near = nearest_name(text, all)
  caller.error(("help: there is nothing with the name '%s'%s"):format(text, near and ("; did you mean "
    .. "'%s'?"):format(near) or '; help "ps" lists the tables and functions'))
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
  elseif is_class(x) then put_class(lines, x)
  elseif require("ps.nn.module").is_module(x) then
    put_class(lines, (select(2, getmetatable(x).__names(x))))
  elseif require("ps.nn.handle").of(x) then
    lines[1] = "a model from ps.initialize; its methods in addition to those of its module:"
    put_table(lines, require("ps.engine").Engine.methods)
  elseif type(x) == "table" then put_table(lines, x)
  else lines[1] = "a " .. type(x) .. ": " .. tostring(x) end
  return table.concat(lines, "\n")
end

--- Prints the description of a function, an op, a class, a module, a tensor or a table of functions. The description is
--- read from the annotations in the sources. At the prompt, this function is `help`.
---@param x any a value, or a name such as "gelu", "F.gelu", "t:sum" or "Linear"; nil prints an overview
function help.help(x)
  if x == nil then
    print "help(f), help(ps.nn.Linear), help(model), help \"gelu\": describe a function, a class, a module or a name.\n"
    print "help \"ps\", help \"F\", help \"nn\", help \"optim\", help \"inspect\", ...: list their contents."
    return
  end
  print(help.text(x))
end

return help
