-- SPDX-License-Identifier: BSD-3-Clause
-- A model's settings under Hugging Face's names. The settings are the fields of a config.json, and the rules of the
-- model's family check each field. If a field changes the model's results, it must be supported. Otherwise the error
-- "gpt2: refused: FIELD = VALUE: why" names the field. Fields that do not change the results, such as names and
-- settings of generation and caches, are kept and written again.
local caller = require "ps.core.caller"
local encode = require "ps.core.encode"
local json = require "cjson"
local refuse = require "ps.core.refusal"
local functional = require "ps.tensor.functional"
local F = functional
local error = caller.error

---@class ps.pretrained.Rules
---@field model_type string
---@field defaults table<string, any> all settings, with the default values for scripts
---@field file_defaults? table<string, any> the default values for a config.json that differ from `defaults`
---@field optional? table<string, string> settings that may be absent, and their kinds ("whole", "number", "string")
---@field assumed_ids? table<string, integer> setting -> the token id that transformers assumes if config.json lacks it
---@field nullable? table<string, boolean> settings whose value may be null, which means none; null is stored as false
---@field sizes string[] settings that are whole numbers of at least 1
---@field shares string[] settings that are fractions in [0, 1)
---@field positive? string[] settings that are numbers of at least 0
---@field aliases? table<string, string> maps another name of a setting to the setting
---@field fixed? table<string, any[]> fields with only one supported value: { value, meaning of other values }
---@field absent? table<string, string> field that must be absent or empty -> the field's meaning
---@field activation string name of the setting that selects the activation
---@field width string name of a setting; its value must be a multiple of the number of heads
---@field heads string name of the setting with the number of heads
---@field layers string name of the setting with the number of layers
---@field any_pad? boolean whether pad_token_id may be outside the vocabulary
---@field check? fun(full: table) raises errors for settings that contradict each other
---@field change? fun(given: table, changes: table): table returns the fields to set in `given` for a script's
--- `changes`, and removes other names of the same settings from `given`
---@field layer string a pattern for the body's parameter names that captures the layer's index
---@field measures table[] settings that can be read from the shapes of the body's weights: { setting, parameter name,
--- dimension of the parameter (counted from 1), default = the value if the setting is absent }

---@class ps.pretrained.Settings
---@field rules ps.pretrained.Rules
local Settings = {}
Settings.__index = Settings

local settings = {}

-- Fields that must be absent or empty in every family.
local ABSENT = { quantization_config = "quantized weights", auto_map = "the model's own code",
  compression_config = "compressed weights", pruned_heads = "attention without some of its heads",
  adapters = "a model with adapters", per_layer_config = "a model whose layers have individual settings" }

-- Fields whose value null means false in transformers. If such a field is absent, its value is true.
local TRUTHS = { is_causal = true, token_classification_bias = true }

local PROBLEMS = { regression = true, single_label_classification = true, multi_label_classification = true }

-- Maps Hugging Face's names of activations to values. A string is the form of gelu that F.gelu must compute. All other
-- values are functions.
local ACTIVATIONS = {
  gelu = "none", gelu_python = "none", gelu_new = "tanh", gelu_pytorch_tanh = "tanh", gelu_python_tanh = "tanh",
  gelu_fast = "tanh", gelu_accurate = "tanh",              -- their constants for sqrt(2 / pi) agree to 11 digits
  relu = F.relu, silu = F.silu, swish = F.silu, tanh = F.tanh, sigmoid = F.sigmoid,
  linear = function(x) return x end,
  quick_gelu = function(x) return x * F.sigmoid(x * 1.702) end,
}

--- Returns the activation with a given name. If it is a form of gelu, returns the form for F.gelu. For other
--- activations, returns nil and a function.
---@param name string
---@return ("none"|"tanh")? gelu
---@return (fun(x: ps.Tensor): ps.Tensor)? other
function settings.activation(name)
  local found = ACTIVATIONS[name]
  if type(found) == "string" then return found end
  return nil, found
end

--- Returns a function that multiplies an activation's result by `up`, as gated MLPs do. If psluajit has an op that
--- computes both the activation and the product, the function uses this op.
---@param name string
---@return fun(gate: ps.Tensor, up: ps.Tensor): ps.Tensor
function settings.gated(name)
  local gelu, other = settings.activation(name)
  if gelu then return function(gate, up) return F.geglu(gate, up, gelu) end end
  if other == ACTIVATIONS.silu then return F.swiglu end
  return function(gate, up) return other(gate) * up end
end

--- Returns a reason for an error message: a list of the supported values.
---@param values table<string, any> by their names
---@return string
function settings.supported(values)
  return "the supported values are " .. table.concat(caller.sorted_names(values), ", ")
end

local function shown(value)
  if value == json.null then return "null" end
  return type(value) == "table" and "{...}" or tostring(value)
end

--- Raises an error for a field that is not supported. The error is a ps.Error whose field `refused` is
--- "FIELD = VALUE: why".
---@param who string the family, or the file with the field
---@param field string
---@param value any
---@param why string
function settings.refuse(who, field, value, why)
  refuse(who, ("%s = %s: %s"):format(field, shown(value), why))
end

local function wrong(self, key, value, text, ...)
  error(("%s: %s = %s: %s"):format(self.rules.model_type, key, shown(value), text:format(...)))
end

local function is_empty(value) return value == nil or type(value) == "table" and next(value) == nil end

local function check_types(self, given)
  local rules, who = self.rules, self.rules.model_type
  local function says_none(key) return rules.nullable and rules.nullable[key] and given[key] == false end
  for key, default in pairs(rules.defaults) do
    if not says_none(key) then caller.typed(given[key], type(default), who .. ": " .. key) end
  end
  for key, kind in pairs(rules.optional or {}) do
    local value = given[key]
    if says_none(key) then value = nil end
    if value ~= nil and kind == "whole" then caller.whole(value, who .. ": " .. key)
    elseif value ~= nil then caller.typed(value, kind, who .. ": " .. key) end
  end
end

local function check_values(self, given)
  local rules, who = self.rules, self.rules.model_type
  for _, key in ipairs(rules.sizes) do
    local size = given[key]
    if size ~= nil and size ~= false and caller.whole(size, who .. ": " .. key) < 1 then
      wrong(self, key, size, "it must be 1 or more")
    end
  end
  if given.head_dim == nil and given[rules.width] % given[rules.heads] ~= 0 then
    error(("%s: %s = %d does not divide %s = %d"):format(who, rules.heads, given[rules.heads], rules.width,
      given[rules.width]))
  end
  for _, key in ipairs(rules.shares) do
    local share = given[key]
    if share ~= nil and not (share >= 0 and share < 1) then wrong(self, key, share, "it must be in [0, 1)") end
  end
  for _, key in ipairs(rules.positive or {}) do
    local value = given[key]
    if not (value >= 0 and value < math.huge) then wrong(self, key, value, "it must be 0 or more") end
  end
  -- A negative pad_token_id is not an id. It selects a row of the token embedding, counted from the last row.
  local pad, V = given.pad_token_id, given.vocab_size
  if pad and not rules.any_pad and not (pad >= -V and pad < V) then
    wrong(self, "pad_token_id", pad, "the vocabulary has %d tokens", V)
  end
end

local function check_supported(self, given)
  local rules, who = self.rules, self.rules.model_type
  if not ACTIVATIONS[given[rules.activation]] then
    settings.refuse(who, rules.activation, given[rules.activation], settings.supported(ACTIVATIONS))
  end
  for key, fixed in pairs(rules.fixed or {}) do
    if given[key] ~= nil and given[key] ~= fixed[1] then
      settings.refuse(who, key, given[key], ("%s is not supported, only %s"):format(fixed[2], tostring(fixed[1])))
    end
  end
  for _, list in ipairs { ABSENT, rules.absent or {} } do
    for key, what in pairs(list) do
      if not is_empty(given[key]) and given[key] ~= false then
        settings.refuse(who, key, given[key], what .. " is not supported")
      end
    end
  end
  if given.problem_type ~= nil and not PROBLEMS[given.problem_type] then
    settings.refuse(who, "problem_type", given.problem_type, settings.supported(PROBLEMS))
  end
end

local function count(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n
end

-- Returns id2label with string keys, as in JSON. `map` can also be a list, or a table with keys from 0.
local function by_strings(map)
  if type(map) ~= "table" or type(next(map)) ~= "number" then return map end
  local first, named = map[0] ~= nil and 0 or 1, {}
  for i, label in pairs(map) do named[tostring(i - first)] = label end
  return named
end

-- Sets num_labels if it is not given: to the number of labels in id2label, or to 2 if there is no id2label. Raises an
-- error if num_labels differs from the number of labels in id2label.
local function count_labels(self, given)
  local map = by_strings(given.id2label)
  given.id2label = map
  if map ~= nil then caller.typed(map, "table", self.rules.model_type .. ": id2label") end
  if map ~= nil and next(map) == nil then map, given.id2label = nil, nil end
  for id in pairs(map or {}) do
    if type(id) ~= "string" or not id:match("^%d+$") then
      wrong(self, "id2label", map, "'%s' is not a label's number", tostring(id))
    end
  end
  if given.num_labels == nil then
    given.num_labels = map and count(map) or 2
  elseif caller.whole(given.num_labels, self.rules.model_type .. ": num_labels") < 1 then
    wrong(self, "num_labels", given.num_labels, "it must be 1 or more")
  elseif map and count(map) ~= given.num_labels then
    wrong(self, "num_labels", given.num_labels, "id2label has %d", count(map))
  end
  if given.problem_type == "single_label_classification" and given.num_labels == 1 then
    wrong(self, "problem_type", given.problem_type, "num_labels is 1, so there is only one class; one number "
      .. "is regression")
  end
end

--- Returns all settings of a model. Aliases are replaced with the names of settings, and missing settings get their
--- defaults. If a setting is not supported, raises an error that names the setting.
---@param given table
---@return table complete
function Settings:complete(given)
  if self.made[given] then return given end
  local rules, all = self.rules, {}
  for key, value in pairs(given) do if not (rules.aliases and rules.aliases[key]) then all[key] = value end end
  for alias, key in pairs(rules.aliases or {}) do
    local value = given[alias]
    if value ~= nil and given[key] ~= nil and given[key] ~= value then
      error(("%s: %s = %s, but %s = %s: they are two names of one setting"):format(rules.model_type, alias,
        tostring(value), key, tostring(given[key])))
    end
    if value ~= nil then all[key] = value end
  end
  for key, default in pairs(rules.defaults) do if all[key] == nil then all[key] = default end end
  check_types(self, all)
  check_values(self, all)
  check_supported(self, all)
  if rules.check then rules.check(all) end
  count_labels(self, all)
  self.made[all] = true
  return all
end

--- Reads a config.json as Hugging Face does. A null value counts as an absent key. For some settings, null instead
--- turns the setting off.
---@param fields table the decoded file
---@param changes? table<string, any> a script's settings (see Settings:change)
---@return table
function Settings:from_file(fields, changes)
  local rules, given = self.rules, {}
  for key, value in pairs(fields) do
    if rules.nullable and rules.nullable[key] and value == json.null then given[key] = false
    elseif TRUTHS[key] and value == json.null then given[key] = false
    -- An empty table was either a list or an object in the file. Lua cannot distinguish them, so the field is omitted.
    elseif type(value) ~= "userdata" and not (type(value) == "table" and next(value) == nil) then given[key] = value end
  end
  for key, default in pairs(rules.file_defaults or {}) do if given[key] == nil then given[key] = default end end
  return self:change(given, changes or {})
end

--- Overrides the settings of a file or a preset with a script's settings. Aliases are replaced with the names of
--- settings. If a script's num_labels differs from the number of labels in the file's id2label, the labels become
--- LABEL_0, LABEL_1 and so on.
---@param given table
---@param changes table<string, any>
---@return table given
function Settings:change(given, changes)
  local rules = self.rules
  if rules.change then changes = rules.change(given, changes) end
  for name, value in pairs(changes) do
    for alias, of in pairs(rules.aliases or {}) do if of == name then given[alias] = nil end end
    given[name] = value
  end
  if changes.id2label and not changes.label2id then given.label2id = nil end
  if changes.num_labels and not changes.id2label and type(given.id2label) == "table"
    and count(given.id2label) ~= changes.num_labels then
    given.id2label, given.label2id = nil, nil
  end
  return given
end

--- Returns the text of a config.json with a model's settings and the dtype of its weights.
---@param full table
---@param architecture string
---@param dtype string Hugging Face's name of the dtype, for example "float32"
---@return string
function Settings:to_file(full, architecture, dtype)
  local fields = { model_type = self.rules.model_type, architectures = { architecture } }
  for key, value in pairs(full) do fields[key] = value end
  fields.architectures = { architecture }
  for key in pairs(self.rules.nullable or {}) do if fields[key] == false then fields[key] = json.null end end
  if not fields.id2label and fields.num_labels ~= 2 then
    fields.id2label, fields.label2id = {}, {}
    for i = 0, fields.num_labels - 1 do
      fields.id2label[tostring(i)], fields.label2id["LABEL_" .. i] = "LABEL_" .. i, i
    end
  end
  if fields.id2label and not fields.label2id then
    fields.label2id = {}
    for id, label in pairs(fields.id2label) do fields.label2id[label] = tonumber(id) end
  end
  -- Writes null, because transformers would otherwise assume an id that the vocabulary does not have.
  for key, id in pairs(self.rules.assumed_ids or {}) do
    if fields[key] == nil and fields.vocab_size <= id then fields[key] = json.null end
  end
  fields.num_labels = nil                                  -- Hugging Face derives this number from id2label
  fields.dtype, fields.torch_dtype = dtype, dtype          -- torch_dtype is for transformers before 4.56
  local text = encode(fields, "config.json")
  for _, key in ipairs(self.rules.positive or {}) do       -- transformers 5 requires 1.0 instead of 1
    text = text:gsub(('("%s":%%d+)([,}])'):format(key), "%1.0%2")
  end
  return text
end

--- Returns the kinds of the settings that a script can set, for caller.options.
---@return table<string, string>
function Settings:kinds()
  local kinds = { num_labels = "whole", problem_type = "string", id2label = "table", label2id = "table" }
  for key, default in pairs(self.rules.defaults) do kinds[key] = type(default) end
  for key, kind in pairs(self.rules.optional or {}) do kinds[key] = kind end
  for key in pairs(self.rules.nullable or {}) do kinds[key] = kinds[key] .. "|boolean" end
  return kinds
end

---@param rules ps.pretrained.Rules
---@return ps.pretrained.Settings
function settings.new(rules)
  return setmetatable({ rules = rules, made = setmetatable({}, { __mode = "k" }) }, Settings)
end

return settings
