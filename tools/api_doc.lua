-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/api_doc.lua [--check | --site FOLDER | --definitions FILE]: writes docs/api.md from the running
-- program. The tool visits all functions of the public tables. It reads a function's text, parameters and results from
-- the annotations above the function. If the build generated the function from an op in ops.def, the text is in the
-- op's row. Every public function must have a text, a @param for each parameter, and a @return if it returns a value.
-- If a function lacks one of these, the tool prints the function, and exits with 1 at the end.
--   --check           writes nothing, and also exits with 1 if docs/api.md is out of date
--   --site            writes the reference of the site (tools/site.lua) into a folder. Each section becomes a page,
--                     which also contains the errors of each function and a link to its source.
--   --definitions     writes a file for editors (tools/definitions.lua)
local ps = require "ps"
local paths = require "ps.paths"
local annotations = require "ps.prompt.annotations"
local exact = require "ps.core.exact"
local definitions_of = require "tools.site.definitions"
local site_entry = require "tools.site.entry"
local wrap = require "ps.core.wrap"
local write_file = require "ps.core.write_file"
local jit_util, vmdef, bit = require "jit.util", require "jit.vmdef", require "bit"

local path = paths.root .. "/docs/api.md"
local definitions = arg[1] == "--definitions" and (arg[2] or error("--definitions needs a file", 0))
local site = arg[1] == "--site" and (arg[2] or error("--site needs a folder", 0))
local LINE = 120

-- Internal functions. docs/api.md does not list them.
local INTERNAL = {}
for name in ([[C ffi ctx check retry raise Error give_room op_info own dtype_code device_index device_name scope_begin
    scope_end collect collect_all functional F ops ps.nn.Module ps.Tensor.held
    along_last scalar_like dim_index scalar]]):gmatch("%S+") do INTERNAL[name] = true end

-- Bytecodes that return values from a function: RET, RET1, RETM and tail calls. RET0 is not in the list, because it
-- returns no value.
local GIVES = { RET = true, RET1 = true, RETM = true, CALLT = true, CALLMT = true }

local function gives_value(fn)
  fn = exact.inner(fn)
  local pc = 1
  while true do
    local instruction = jit_util.funcbc(fn, pc)
    if not instruction then return false end
    local op = bit.band(instruction, 0xff) * 6
    if GIVES[vmdef.bcnames:sub(op + 1, op + 6):match "^%S+"] then return true end
    pc = pc + 1
  end
end

-- -- writing ----------------------------------------------------------------------------------------------------------
local out = {}
local function put(text, ...) out[#out + 1] = select("#", ...) > 0 and text:format(...) or text end

-- Appends an item of a list, with line breaks. If the item has a text, the text begins on a new line.
local function put_item(indent, head, text)
  wrap(out, head, LINE - 2, indent .. "  ", indent .. "- ")
  if text == "" then return end
  out[#out] = out[#out] .. "  "
  wrap(out, text, LINE, indent .. "  ")
end

local op_docs = {}
for _, info in pairs(ps.op_info) do op_docs[info.name] = info.doc end

local function sorted(t, keep)
  local names = {}
  for name, value in pairs(t) do
    if type(name) == "string" and not name:match("^_") and keep(name, value) then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

local complaints = {}                  -- for example "t:sum: its parameter dims has no @param"

local function complain(call, text, ...) complaints[#complaints + 1] = call .. ": " .. text:format(...) end

-- Reports what is missing in the annotations of a function.
local function check_described(call, about, names, text, gives)
  if text == "" then complain(call, "it has no text") end
  local known, there = {}, {}
  for _, param in ipairs(about.params) do
    known[param.name:gsub("%?$", "")] = true
    if param.type == "" then complain(call, "its @param %s has no type", param.name) end
  end
  for _, name in ipairs(names) do
    there[name] = true
    if not known[name] then complain(call, "its parameter %s has no @param", name) end
  end
  for name in pairs(known) do
    if not there[name] and name ~= "self" then complain(call, "its @param %s names no parameter", name) end
  end
  if gives and #about.returns == 0 then complain(call, "it returns a value and has no @return") end
end

local named = {}                       -- the classes of tables that occur in the types of parameters and results
-- Classes whose fields are internal to psluajit.
local CLOSED = { ["ps.Engine"] = true, ["ps.Config"] = true, ["ps.nn.Region"] = true, ["ps.Rates"] = true }

local function note_classes(list)
  for _, entry in ipairs(list) do
    annotations.classes_in(entry.type, function(class)
      if named[class.name] or CLOSED[class.name] then return end
      named[class.name] = class
      note_classes(class.fields)
    end)
  end
end

-- Writes one function. `call` is the prefix of a call ("ps.nn." or "t:"). If `method` is set, the first parameter is
-- omitted. If scripts call the function to create a module, `made` is the class of this module.
local function put_function(call, name, fn, method, made)
  local about, names = annotations.described(fn), annotations.parameter_names(fn)
  if method then
    if about.params[1] and about.params[1].name == names[1] then table.remove(about.params, 1) end
    table.remove(names, 1)
  end
  local optional, text = {}, about.text
  for _, param in ipairs(about.params) do
    if param.name:match("%?$") then optional[param.name:sub(1, -2)] = true end
  end
  if text == "" then text = annotations.TEXTS[call .. name] or op_docs[name] and op_docs[name] .. "." or "" end
  check_described(call .. name, about, names, text, name ~= "init" and gives_value(fn))
  note_classes(about.params)
  note_classes(about.returns)
  for i, n in ipairs(names) do names[i] = optional[n] and n .. "?" or n end
  if definitions then return definitions_of.put(call, name, names, about, text, made) end
  if site then return site_entry.put(out, annotations.callable(call, name), fn, names, about, text) end
  local returns = {}
  for i, entry in ipairs(about.returns) do
    returns[i] = "`" .. entry.type .. "`" .. (entry.about ~= "" and " " .. entry.about or "")
  end
  returns = #returns > 0 and " -> " .. table.concat(returns, ", ") or ""
  put_item("", ("**`%s(%s)`**%s"):format(annotations.callable(call, name), table.concat(names, ", "), returns), text)
  for _, param in ipairs(about.params) do
    if param.name ~= "self" and param.type ~= "" then
      put_item("  ", ("`%s`: `%s` %s"):format(param.name, param.type, param.about), "")
    end
  end
end

local function put_functions(call, t, method, names)
  for _, name in ipairs(names or sorted(t, function(key, value)
    return type(value) == "function" and (method or not INTERNAL[key])
  end)) do
    put_function(call, name, t[name], method)
  end
  put ""
end

local function is_class(value) return type(value) == "table" and rawget(value, "instance") ~= nil end

local function put_class(prefix, name, class)
  local init = rawget(class, "init")
  put("### `%s%s`\n", prefix, name)
  if init then put_function(prefix, name, init, true, "ps." .. prefix .. name) end
  for _, key in ipairs(sorted(class, function(key, value)
    return type(value) == "function" and key ~= "init" and key ~= "extra_repr" and key ~= "new"
  end)) do
    put_function("module:", key, class[key], true)
  end
  put ""
end

local function section(title, text)
  put("## %s\n", title)
  definitions_of.section(title)
  if not text then return end
  wrap(out, text, LINE, "")
  put ""
end

-- Objects that functions return. In each row, `call` is the prefix of the object's methods, and `make` creates such an
-- object.
local OBJECTS = {
  tokenizer = { call = "tokenizer:", make = function() return ps.tokenizer.bytes() end },
  progress = { call = "display:", make = function() return ps.progress.new { total = 1, quiet = true } end },
}

-- Writes the methods of tokens and loaders. To get these objects, the function writes a file and opens it.
local function put_loader()
  local shard = os.tmpname()
  ps.data.write_tokens(shard, { 1, 2, 3, 4, 5 })
  local tokens = ps.data.tokens(shard)
  put_functions("tokens:", getmetatable(tokens).__index, true)
  put_functions("loader:", getmetatable(ps.data.loader { shards = tokens, batch = 1, seq = 2 }).__index, true)
  os.remove(shard)
end

-- Writes the methods of open tensor files: the files that ps.safetensors.open and ps.safetensors.writer return, and the
-- .pt file that ps.load returns with `lazy`.
local function put_files()
  local path_ = os.tmpname()
  local one, entry = ps.zeros { 1 }, { name = "a", dtype = "fp32", shape = { 1 } }
  ps.safetensors.save(path_, { a = one })
  local file = ps.safetensors.open(path_)
  put_functions("file:", getmetatable(file).__index, true)
  file:close()
  local writer = ps.safetensors.writer(path_, { entry })
  put_functions("writer:", getmetatable(writer).__index, true)
  writer:close()
  os.remove(path_)
  path_ = path_ .. ".pt"
  ps.save({ a = one }, path_)
  file = ps.load(path_, { lazy = true })
  put("Of a `.pt` file, which `ps.load(path, { lazy = true })` opens:\n")
  put_functions("file:", getmetatable(file).__index, true)
  file:close()
  os.remove(path_)
end

local function put_ops()
  section("Ops", "`ps.ops` has the rows of `src/ops.def`, on which all functions above are built: inputs, then " ..
    "attributes, "
    .. "by position. Scripts rarely need them.")
  put "| op | what it computes | gradient |"
  put "|---|---|---|"
  local rows = {}
  for _, info in pairs(ps.op_info) do rows[#rows + 1] = info end
  table.sort(rows, function(a, b) return a.name < b.name end)
  for _, info in ipairs(rows) do
    put("| `%s(%s)` | %s | %s |", info.name, info.ins:gsub("%s+", ", "), (info.doc:gsub("|", "\\|")),
      info.grad == "none" and "none" or "yes")
  end
  put ""
end

-- Writes the fields of the tables that functions accept and return.
local function put_classes()
  section("Fields", "Tables that the parameters and results above name by their class. A field with `?` may be absent.")
  local names = {}
  for name, class in pairs(named) do if class.fields[1] then names[#names + 1] = name end end
  table.sort(names)
  for _, name in ipairs(names) do
    local class = named[name]
    put("### `%s`\n", name)
    if class.text ~= "" then
      wrap(out, class.text, LINE, "")
      put ""
    end
    for _, field in ipairs(class.fields) do
      put_item("", ("`%s`: `%s` %s"):format(field.name, field.type, field.about), "")
    end
    put ""
  end
end

local function put_bmt()
  local bmt = require "ps.bmt"
  section("ps.bmt", "BMTrain's API for scripts: `docs/bmtrain.md`.")
  put_functions("bmt.", bmt)
  for _, name in ipairs(sorted(bmt, function(_, value) return is_class(value) end)) do
    put_class("bmt.", name, bmt[name])
  end
  for _, name in ipairs { "inspect", "lr_scheduler", "optim", "utils" } do
    put_functions("bmt." .. name .. ".", bmt[name])
  end
  put_functions("manager:", bmt.optim.Manager, true)
  put_functions("scheduler:", bmt.lr_scheduler.Scheduler, true)
  put_class("bmt.loss.", "FusedCrossEntropy", bmt.loss.FusedCrossEntropy)
end

local function write()
  put "# The Lua API"
  put ""
  put [[
Written by `psluajit tools/api_doc.lua` from the sources' annotations; do not edit. A parameter with `?` may be left
out. Dimensions and indices of tensors count from 0, a shape is a table such as `{ 2, 3 }`, a type is one of `fp32`,
`bf16`, `fp16`, `fp64`, `int32`, `int64`, `uint8`, `bool`. How models are written: `docs/models.md`; what lives how
long: `docs/tensors.md`; configuration keys: `docs/config.md`.]]
  put ""
  section "ps"
  local methods = require("ps.tensor").methods()
  local function shared_with(key)
    return methods[key] and key ~= "device" and key ~= "backward" and key ~= "where"
  end
  local own = annotations.own()
  for _, name in ipairs(sorted(getmetatable(ps).all(), function(key, value)
    return type(value) == "function" and not INTERNAL[key]
  end)) do
    if not shared_with(name) then put_function("ps.", name, own[name] or ps[name]) end
  end
  put ""
  local shared = {}
  for _, name in ipairs(sorted(methods, function(key)
    return shared_with(key) and type(rawget(ps, key)) == "function"
  end)) do
    shared[#shared + 1] = "`" .. name .. "`"
  end
  local bare = {}
  for i, name in ipairs(shared) do bare[i] = name:match "`(.-)`" end
  definitions_of.shared(bare)
  wrap(out, ("These methods of tensors are functions of `ps`, too, as `ps.exp(x)`: %s."):format(table.concat(shared,
    ", ")), LINE, "")
  put ""
  section("Tensors", "`t` is a tensor. `+ - * / ^`, unary minus, `#t` and `t[i]`, `t[{ i, ps.all, { 0, 2 } }]` work as "
    .. "in PyTorch, with index tensors, masks and `ps.newaxis` in a key, too; `==` compares identity, `t:eq(u)` "
    .. "values.")
  put_functions("t:", methods, true)
  section("ps.functional (F)", "Stateless functions over tensors.")
  put_functions("F.", ps.F)
  section("ps.nn", "Calling a class makes a module; calling a module runs it.")
  put_class("nn.", "Module", ps.nn.Module)
  for _, name in ipairs(sorted(ps.nn, function(key, value) return is_class(value) and key ~= "Module" end)) do
    put_class("nn.", name, ps.nn[name])
  end
  put "### Functions\n"
  put_functions("nn.", ps.nn)
  put_functions("nn.init.", ps.nn.init)
  section "ps.optim"
  put_functions("optim.", ps.optim)
  local p = ps.nn.Parameter(ps.zeros { 1 })
  local opt = ps.optim.SGD({ p }, { lr = 1 })
  put_functions("optimizer:", select(2, getmetatable(opt).__names(opt)), true)
  put_functions("scaler:", getmetatable(ps.optim.GradScaler()).__index, true)
  section "ps.sched"
  put_functions("sched.", ps.sched)
  put_functions("schedule:", getmetatable(ps.sched.constant { optimizer = opt, max_lr = 1 }).__index, true)
  for _, name in ipairs { "data", "tokenizer", "train", "evaluate", "checkpoints", "safetensors", "profiler",
    "progress", "inspect", "autograd" } do
    section("ps." .. name)
    put_functions(name .. ".", ps[name])
    local object = OBJECTS[name]
    if object then put_functions(object.call, getmetatable(object.make()).__index, true) end
    if name == "inspect" then put_functions("inspector:", ps.inspect.Inspector, true) end
    if name == "autograd" then
      put_functions("ctx:", require("ps.autograd.function").Context, true)
      local handle = ps.zeros({ 1 }, { requires_grad = true }):register_hook(print)
      put_functions("handle:", getmetatable(handle).__index, true)
    end
    if name == "data" then put_loader() end
    if name == "safetensors" then put_files() end
    if name == "tokenizer" then put_functions("tok:", require("ps.tokenizer.text").Tokenizer, true) end
  end
  section("Groups of ranks", "`ps.init_distributed` returns a group. All ranks make the same calls in the same order.")
  put_functions("group:", getmetatable(ps.dist.self()).__index, true)
  put("`ps.mesh { pp = 2 }` is `mesh.cut`, and returns the mesh.\n")
  for _, name in ipairs { "cut", "group", "rank", "size" } do put_function("mesh.", name, ps.mesh[name]) end
  section("The engine", "`ps.initialize` returns a model and an optimizer. The model has the names below. Every "
    .. "other name is read from the module, `model.module`, and written to it; a method of the module that returns the "
    .. "module returns the model.")
  local Engine = require("ps.engine").Engine
  put_functions("model:", Engine, true, Engine.PUBLIC)
  put_functions("optimizer:", require("ps.engine.state.optimizer").methods, true, { "step", "zero_grad", "set_lr",
    "state_dict", "load_state_dict" })
  section("Models of ps.from_pretrained", "Methods of these models, in addition to those of every module. A model that "
    .. "ps.initialize made from such a model has them, too.")
  put_functions("model:", annotations.pretrained(), true)
  put_bmt()
  put_ops()
  put_classes()
  return table.concat(out, "\n"):gsub("\n\n\n+", "\n\n"):gsub("%s+$", "\n")
end

local new = write()
if definitions then
  assert(write_file(definitions, definitions_of.text(named)))
  os.exit(#complaints == 0 and 0 or 1)
end
if site then
  site_entry.pages(new, site)
  os.exit(#complaints == 0 and 0 or 1)
end
local f = io.open(path, "rb")
local old = f and f:read("*a") or ""
if f then f:close() end
for _, complaint in ipairs(complaints) do print(complaint) end
if old == new then os.exit(#complaints == 0 and 0 or 1) end
if arg[1] == "--check" then
  print "docs/api.md is out of date; run psluajit tools/api_doc.lua"
  os.exit(1)
end
assert(write_file(path, new))
print("wrote " .. path)
os.exit(#complaints == 0 and 0 or 1)
