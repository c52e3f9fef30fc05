-- SPDX-License-Identifier: BSD-3-Clause
-- Loads models of other libraries by folder or by name. ps.from_pretrained reads the field model_type of config.json
-- and finds the family with this model_type. It then makes a model of the class that config.json or the option `task`
-- selects. A family is a file models/MODEL_TYPE.lua that calls pretrained.family.
local bitsandbytes = require "ps.pretrained.bitsandbytes"
local create = require "ps.tensor.create"
local dist = require "ps.dist"
local dtypes = require "ps.core.dtype"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local folder = require "ps.pretrained.folder"
local gguf = require "ps.pretrained.gguf"
local hooks = require "ps.core.hooks"
local serialize = require "ps.io.serialize"
local settings = require "ps.pretrained.settings"
local weights = require "ps.pretrained.weights"
local files_of = require "ps.pretrained.files"
local lfs = require "lfs"
local nn_packed = require "ps.nn.packed"
local origin = require "ps.nn.origin"
local packed = require "ps.pretrained.packed"
local paths = require "ps.paths"
local error = caller.error

local pretrained = {}

---@class ps.pretrained.Family
---@field model_type string
---@field settings ps.pretrained.Settings
---@field presets table<string, table> preset name -> settings
---@field classes table<string, table> maps a name in config.json's architectures to a class
---@field tasks table<string, string> task -> class name
---@field default? string the class name to use if config.json names no class
---@field unpads? boolean whether the family's models support unpad = true (ps/pretrained/unpad.lua)

local families = {}                                        -- by model_type

local WHERE = { dtype = "string", device = "string", recompute = "boolean" }
local LOADING = { task = "string", revision = "string", quiet = "boolean", ignore_mismatched_sizes = "boolean",
  mmap = "boolean|string", keep_quantized = "boolean", int8_activations = "boolean" }

-- Raises an error if a model's weights cannot have a dtype. auto: text about the value "auto", if it is accepted.
local function check_dtype(dtype, call, auto)
  if dtype == nil or auto and dtype == "auto" or dtypes.of_weights[dtype] then return end
  error(("%s: dtype is '%s', but weights are %s%s"):format(call, dtype, dtypes.weights, auto or ""))
end

-- -- families -------------------------------------------------------------------------------------------------------
-- Splits a script's options into settings and other options. An alias is replaced with the setting's name. A shorthand
-- sets several settings: with the shorthands { dropout = { "embd_pdrop", ... } }, `dropout` sets embd_pdrop and the
-- other settings in its list.
local function spread(family, given)
  local config, rest, aliases = {}, {}, family.settings.rules.aliases or {}
  for key, value in pairs(given) do
    local name = aliases[key] or key
    if name ~= key and given[name] ~= nil and given[name] ~= value then
      error(("%s: %s = %s, but %s = %s: they are two names of one setting"):format(family.model_type, key,
        tostring(value), name, tostring(given[name])))
    end
    if not family.shorthands[key] then (family.kinds[name] and config or rest)[name] = value end
  end
  for short, names in pairs(family.shorthands) do
    for _, name in ipairs(given[short] ~= nil and names or {}) do
      if config[name] == nil then config[name] = given[short] end
    end
  end
  return config, rest
end

--- Registers a family, and returns it. The family has two functions:
---   family.new(preset, options)              returns a model with newly initialized weights
---   family.from_pretrained(name, options)    see ps.from_pretrained; the folder must have the family's model_type
---@param family table required fields: model_type, settings, classes, tasks; optional: default, presets, shorthands
---@return ps.pretrained.Family
function pretrained.family(family)
  local who = family.model_type
  family.presets, family.shorthands = family.presets or {}, family.shorthands or {}
  family.kinds = family.settings:kinds()
  local options_of, loading_of = {}, {}                    -- the options that `new` and `from_pretrained` allow
  for name in pairs(family.shorthands) do options_of[name], loading_of[name] = "number", "number" end
  for _, list in ipairs { family.kinds, WHERE } do
    for key, kind in pairs(list) do options_of[key], loading_of[key] = kind, kind end
  end
  for alias, key in pairs(family.settings.rules.aliases or {}) do loading_of[alias] = family.kinds[key] end
  for key, kind in pairs(LOADING) do loading_of[key] = kind end
  options_of.task = "string"
  if family.unpads then options_of.unpad, loading_of.unpad = "boolean", "boolean" end
  family.options_of_loading = loading_of

  --- Returns a model from a preset's name, or from a table of config.json's fields. `options` can contain task, dtype,
  --- device, recompute and settings. These settings override the preset's settings. If the family supports unpad, the
  --- option unpad = true makes the model skip the computation of padding.
  function family.new(preset, options)
    local base = type(preset) == "table" and preset or family.presets[preset]
    if not base then
      error(("%s: there is no preset '%s' (the presets are %s)"):format(who, tostring(preset),
        table.concat(caller.sorted_names(family.presets), ", ")))
    end
    local config = {}
    for key, value in pairs(caller.options(base, who .. ".new", family.kinds)) do config[key] = value end
    local changes, rest = spread(family, caller.options(options, who .. ".new", options_of))
    family.settings:change(config, changes)
    check_dtype(rest.dtype, who .. ".new")
    local class = pretrained.class_of(family, rest.task, nil, who .. ".new")
    return class(config, { dtype = rest.dtype, device = rest.device, recompute = rest.recompute, unpad = rest.unpad })
  end

  function family.from_pretrained(name, options)
    return pretrained.load(name, options, family)
  end
  for name, class in pairs(family.classes) do
    class.family = family
    assert(class.class_name == name, "call a class by its own name")
  end
  families[who] = family
  return family
end

-- Returns the names of all families: the registered families, and the families that have a file in
-- psluajit's models folder.
local function known_families()
  local names = {}
  for name in pairs(families) do names[name] = true end
  local path = (paths.root or "") .. "/models"
  if lfs.attributes(path, "mode") == "directory" then
    for file in lfs.dir(path) do
      local name = file:match("^(%w+)%.lua$")
      if name then names[name] = true end
    end
  end
  return table.concat(caller.sorted_names(names), ", ")
end

--- Returns the family of a model_type. If the family is not registered, loads models/MODEL_TYPE.lua,
--- which registers it.
---@param model_type any
---@param where string the file that contains the model_type
---@return ps.pretrained.Family
function pretrained.find(model_type, where)
  if families[model_type] then return families[model_type] end
  if type(model_type) == "string" and model_type:match("^%l[%w_%-]*$") then
    local module = "models." .. model_type:gsub("-", "_")
    if package.searchpath(module, package.path) then require(module) end
    if families[model_type] then return families[model_type] end
  end
  return settings.refuse(where, "model_type", model_type == nil and "none" or model_type,
    "the supported values are " .. known_families())
end

--- Returns the class for a task. Without a task, returns the first class in the field `architectures` of config.json.
--- If the field is absent or empty, returns the family's default class.
---@param family ps.pretrained.Family
---@param task? string
---@param architectures any
---@param where string
---@return table class
function pretrained.class_of(family, task, architectures, where)
  if task ~= nil then
    return family.classes[caller.one_of(task, family.tasks, where .. ": task")]
  end
  local named = type(architectures) == "table" and architectures[1] or nil
  if architectures ~= nil and type(named) ~= "string" then
    settings.refuse(where, "architectures", named or architectures, "it is a list of names of classes")
  end
  local name = named or family.default
  if not name then error(("%s has no architectures; choose a task (%s)"):format(where,
    table.concat(caller.sorted_names(family.tasks), ", "))) end
  if not family.classes[name] then
    settings.refuse(where, "architectures", name, ("the supported values are %s; task chooses one (%s)"):format(
      table.concat(caller.sorted_names(family.classes), ", "), table.concat(caller.sorted_names(family.tasks), ", ")))
  end
  return family.classes[name]
end

-- -- loading --------------------------------------------------------------------------------------------------------
local DTYPES = { float32 = "fp32", bfloat16 = "bf16", float16 = "fp16", float64 = "fp64" }

-- Returns the dtype in a config.json under two names: Hugging Face's name and the engine's name.
local function said_dtype(fields)
  local word = type(fields.dtype) == "string" and fields.dtype or fields.torch_dtype
  return word, type(word) == "string" and DTYPES[word:match("^torch%.(.*)$") or word] or nil
end

local told = {}                                            -- files for which tell_dtype has printed a note

-- Prints a note if the dtype in config.json differs from the model's dtype. The dtype in config.json is informational.
-- Values of any dtype are converted to the dtype of the parameters.
local function tell_dtype(fields, model, from)
  local word, dtype = said_dtype(fields)
  local made = model:parameters()[1]:dtype()
  if not dtype or dtype == made or told[from] or dist.rank() > 0 then return end
  told[from] = true
  io.stderr:write(("psluajit: %s: dtype %s is ignored: parameters are made in %s, unless "
    .. "from_pretrained(folder, { dtype = \"%s\" }) or an engine's configuration sets another dtype\n"):format(
      from, word,
    made, dtype))
end

local WIDTHS = { bf16 = 2, fp16 = 2, fp32 = 4, fp64 = 8 }

-- Returns a dtype that can represent all values of two dtypes.
local function wider(a, b)
  if a == b or not WIDTHS[b] then return a end
  if a and WIDTHS[a] == WIDTHS[b] then return "fp32" end
  return a and WIDTHS[a] > WIDTHS[b] and a or b
end

-- Compares the sizes in a config.json with the weights in its folder, before a model of these sizes is allocated.
-- Raises an error if a size differs. Returns a dtype that can represent all of the body's weights.
local function check_sizes(family, class, config, files, from)
  local rules, names, shapes, widest = family.settings.rules, {}, {}, nil
  local state = files:state()
  local list = state.names()
  table.sort(list)                                         -- sorted, so that an error always names the same tensor
  for _, name in ipairs(list) do
    local bare = name:match("^" .. class.base .. "%.(.*)$") or name
    names[bare] = name
    local dtype, other = state:dtype(name)
    if class.body[bare:match("^[^.]+")] then
      if not dtype then
        settings.refuse(from, "dtype", other, ("the files have %s of that type, which is not supported"):format(name))
      end
      widest = wider(widest, dtype)
    end
  end
  for _, row in ipairs(rules.measures) do
    if names[row[2]] then shapes[row[2]] = state:shape(names[row[2]]) end
  end
  local layers, seen = 0, {}
  for name in pairs(names) do
    local layer = name:match(rules.layer)
    if layer and not seen[layer] then seen[layer], layers = true, layers + 1 end
  end
  if config[rules.layers] > layers then
    error(("%s: %s is %.0f, but the files have weights of %d layers"):format(from, rules.layers, config[rules.layers],
      layers))
  end
  for _, row in ipairs(rules.measures) do
    local key, name, at = unpack(row)
    local shape, size = shapes[name], config[key] or row.default(config)
    if shape and shape[at] ~= size then
      error(("%s: %s is %.0f, but %s in the files is [%s]"):format(from, key, size, names[name],
        table.concat(shape, ", ")))
    end
  end
  return widest or "fp32"
end

-- Returns whether a script sets a smaller number of layers than the file. In this case, the file contains tensors that
-- the model does not have.
local function asks_for_fewer(family, config, fields)
  local key = family.settings.rules.layers
  for alias, name in pairs(family.settings.rules.aliases or {}) do
    if name == key and fields[key] == nil then fields = { [key] = fields[alias] } end
  end
  return type(fields[key]) == "number" and config[key] ~= nil and config[key] < fields[key]
end

-- Returns the reason why the weights of a model on a device cannot stay in their files. Returns nil if the weights can
-- stay there.
local function not_mapped(list, device)
  if device ~= "cpu" and device ~= "meta" then             -- for device meta, ps.materialize fills in the values later
    return ("weights can stay in files only for device cpu, but the model is for %s"):format(device)
  end
  for _, path in ipairs(list) do
    if not gguf.is(path) and serialize.format(path) ~= "safetensors" then
      return path .. " is neither a safetensors nor a GGUF file"
    end
  end
end

local function refuse_mmap(why) error("from_pretrained: mmap = true: " .. why) end

-- Returns whether the weights stay in the files. `wanted` is the option mmap. If it is true but the weights cannot stay
-- in the files, raises an error.
local function maps(wanted, list, device)
  if wanted == nil or wanted == false then return false end
  if wanted ~= true and wanted ~= "auto" then
    error(("from_pretrained: mmap must be true, false or \"auto\", not '%s'"):format(wanted))
  end
  local why = not_mapped(list, device)
  if why and wanted == true then refuse_mmap(why) end
  return not why
end

-- Raises an error for mmap = true if no tensor in the files has the model's dtype, because all tensors would then be
-- converted in memory.
local function check_mapped(files, dtype)
  local state, other = files:state(), nil
  for _, name in ipairs(state.names()) do
    local its = state:dtype(name)
    if its == dtype then return end
    other = other or its and ("%s is %s"):format(name, its)
  end
  refuse_mmap(("the files have no weights in %s (%s); remove dtype"):format(dtype, other or "none"))
end

local FROM_CONFIG = { task = "string", revision = "string" }
for key, kind in pairs(WHERE) do FROM_CONFIG[key] = kind end

--- Returns a model with newly initialized weights from the fields of a config.json. The model is in training mode.
---@param source string|table a folder, a name in Hugging Face's cache, or the decoded fields
---@param options? {task?: string, dtype?: string, device?: string, recompute?: boolean, revision?: string}
---@return ps.pretrained.Model
function pretrained.from_config(source, options)
  local given = caller.options(options, "from_config", FROM_CONFIG)
  check_dtype(given.dtype, "from_config", ", or \"auto\" for the dtype in config.json")
  local path, where, fields = nil, "the fields", source
  if type(source) ~= "table" then
    path = folder.find(source, given.revision)
    where, fields = folder.where(path), folder.config(path)
  end
  fields = bitsandbytes.split(fields, where)
  local family = pretrained.find(fields.model_type, where)
  local config = family.settings:complete(family.settings:from_file(fields, {}))
  local class = pretrained.class_of(family, given.task, config.architectures, where)
  local dtype = given.dtype ~= "auto" and given.dtype or select(2, said_dtype(fields))
  local model = class(config, { dtype = dtype, device = given.device, recompute = given.recompute })
  if path then rawset(model, "source", path) end
  return model
end

--- Implements ps.from_pretrained. If `family` is given, the model must belong to this family.
---@param name string
---@param options? table
---@param family? ps.pretrained.Family
---@return ps.pretrained.Model
function pretrained.load(name, options, family)
  if options ~= nil then caller.typed(options, "table", "from_pretrained: the options") end
  local path = folder.find(name, options and options.revision)
  local where = folder.where(path)
  local fields, quantization = bitsandbytes.split(folder.config(path), where)
  if not family then family = pretrained.find(fields.model_type, where) end
  local changes, rest = spread(family, caller.options(options, "from_pretrained", family.options_of_loading))
  check_dtype(rest.dtype, "from_pretrained", ", or \"auto\" for the dtype of the files")
  local config = family.settings:from_file(fields, changes)
  config = family.settings:complete(config)
  local class = pretrained.class_of(family, rest.task, config.architectures, where)
  local list = folder.files(path)
  if rest.keep_quantized and not (gguf.is(path) or quantization) then
    error(("from_pretrained: keep_quantized is for GGUF files and for folders with weights in NF4 of bitsandbytes, and "
      .. "%s is a folder without quantization_config"):format(path))
  end
  if rest.int8_activations and not rest.keep_quantized then
    error("from_pretrained: int8_activations needs packed weights; set keep_quantized = true, too")
  end
  local files = files_of.open(list, maps(rest.mmap, list, rest.device or create.empty({ 0 }):device()))
  local ok, model = pcall(function()
    if quantization then bitsandbytes.check(files.quantized, quantization, where) end
    local dtype, widest = rest.dtype, check_sizes(family, class, config, files, where)
    if dtype == "auto" then dtype = select(2, said_dtype(fields)) or widest end
    if rest.mmap == true then
      dtype = dtype or widest
      check_mapped(files, dtype)
    end
    local how = { ignore_mismatched_sizes = rest.ignore_mismatched_sizes,
      shorter = asks_for_fewer(family, changes, fields) }
    local function make(device)
      local made = class(config, { dtype = dtype, device = device, recompute = rest.recompute, unpad = rest.unpad })
      rawset(made, "source", path)
      rawset(made, "quiet", rest.quiet)
      if not dtype then tell_dtype(fields, made, where) end
      if rest.keep_quantized and packed.prepare(made, files, device) == 0 then
        error(("from_pretrained: keep_quantized: no weight of a layer is quantised in %s; remove the option"):format(
          path))
      end
      if rest.int8_activations and nn_packed.int8(made) == 0 then
        error(("from_pretrained: int8_activations has no effect: no layer of %s has a type from Q4_0 to Q8_0, Q4_K, "
          .. "Q5_K or Q6_K; remove the option"):format(path))
      end
      weights.load(made, files, how)
      return made:eval()
    end
    if native.recorder or hooks.heard "parameter" and not (files.mmap or rest.keep_quantized) then
      return make(rest.device)
    end
    -- Only tensors that the files lack are initialized with random numbers. The numbers are the same as in a model that
    -- initializes all its tensors.
    local deferred = require "ps.nn.deferred"
    return deferred.materialize(deferred.make(make), { device = rest.device })
  end)
  files:close()
  if not ok then error(model, 0) end
  origin.note(model, list)
  return model
end

return pretrained
