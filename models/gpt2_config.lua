-- SPDX-License-Identifier: BSD-3-Clause
-- GPT-2's settings by Hugging Face's names: what a config.json may say, checked. Whatever changes the model's numbers
-- is done or refused by name; other fields (names, labels, generation, caches) are kept and written again. What Hugging
-- Face's GPT-2 reads is from its configuration_gpt2.py and modeling_gpt2.py as of transformers 5.23.
local caller = require "ps.caller"
local F = require("ps").functional
local error = caller.error

local config = {}

--- Settings that a model has, with what they are when they are left out (dropout: see from_file).
config.DEFAULTS = {
  vocab_size = 50257, n_positions = 1024, n_layer = 12, n_head = 12, n_embd = 768, layer_norm_epsilon = 1e-5,
  embd_pdrop = 0, attn_pdrop = 0, resid_pdrop = 0, activation_function = "gelu_new", initializer_range = 0.02,
  tie_word_embeddings = true, scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false,
  reorder_and_upcast_attn = false,                         -- an order of operations of theirs; no other maths
}

local SIZES = { "vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "n_inner" }
local DROPOUTS = { "embd_pdrop", "attn_pdrop", "resid_pdrop" }

-- Names that GPT2Config takes for others.
local ALIASES = { num_attention_heads = "n_head", hidden_size = "n_embd", num_hidden_layers = "n_layer",
  max_position_embeddings = "n_positions" }

-- Fields that only have this value here, and why.
local FIXED = {
  model_type = { "gpt2", "another model" }, add_cross_attention = { false, "attention to an encoder" },
  is_encoder_decoder = { false, "a model with an encoder" },
}
-- Fields that must say nothing.
local ABSENT = { quantization_config = "quantized weights", auto_map = "code of the model's own",
  pruned_heads = "attention without some of its heads" }

-- Hugging Face's activations: gelu's form (F.gelu), or a function.
local ACTIVATIONS = {
  gelu = "none", gelu_python = "none", gelu_new = "tanh", gelu_pytorch_tanh = "tanh", gelu_python_tanh = "tanh",
  gelu_fast = "tanh", gelu_accurate = "tanh",              -- their constants for sqrt(2 / pi) agree to 11 digits
  relu = F.relu, silu = F.silu, swish = F.silu, tanh = F.tanh, sigmoid = F.sigmoid,
  linear = function(x) return x end,
  quick_gelu = function(x) return x * F.sigmoid(x * 1.702) end,
}

--- The activation of a name: a form of F.gelu and nil, or nil and a function.
---@param name string
---@return ("none"|"tanh")? gelu
---@return (fun(x: ps.Tensor): ps.Tensor)? other
function config.activation(name)
  local found = ACTIVATIONS[name]
  if type(found) == "string" then return found end
  return nil, found
end

local function names_of(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

local function refuse(key, value, text, ...)
  if type(value) == "table" then value = "{...}" end
  error(("gpt2: %s = %s: %s"):format(key, tostring(value), text:format(...)))
end

local function is_empty(value) return value == nil or type(value) == "table" and next(value) == nil end

local function check(settings)
  for key, default in pairs(config.DEFAULTS) do caller.typed(settings[key], type(default), "gpt2: " .. key) end
  for _, key in ipairs(SIZES) do
    local size = settings[key]
    if size ~= nil and caller.whole(size, "gpt2: " .. key) < 1 then refuse(key, size, "it must be 1 or more") end
  end
  if settings.n_embd % settings.n_head ~= 0 then
    error(("gpt2: n_head = %d does not divide n_embd = %d"):format(settings.n_head, settings.n_embd))
  end
  for _, key in ipairs(DROPOUTS) do
    if not (settings[key] >= 0 and settings[key] < 1) then refuse(key, settings[key], "it must be in [0, 1)") end
  end
  for _, key in ipairs { "layer_norm_epsilon", "initializer_range" } do
    local value = settings[key]
    if not (value >= 0 and value < math.huge) then refuse(key, value, "it must be 0 or more") end
  end
  if not ACTIVATIONS[settings.activation_function] then
    refuse("activation_function", settings.activation_function, "there are %s", names_of(ACTIVATIONS))
  end
  for key, fixed in pairs(FIXED) do
    if settings[key] ~= nil and settings[key] ~= fixed[1] then
      refuse(key, settings[key], "%s is not supported, only %s", fixed[2], tostring(fixed[1]))
    end
  end
  for key, what in pairs(ABSENT) do
    if not is_empty(settings[key]) and settings[key] ~= false then
      refuse(key, settings[key], "%s is not supported", what)
    end
  end
end

--- All settings of a model: those given, under their own names, and the defaults of others. What is not supported is an
--- error that names it.
---@param given table
---@return table settings
function config.complete(given)
  local settings = {}
  for key, value in pairs(given) do if not ALIASES[key] then settings[key] = value end end
  for alias, key in pairs(ALIASES) do
    local value = given[alias]
    if value ~= nil and given[key] ~= nil and given[key] ~= value then
      error(("gpt2: %s = %s, but %s = %s: they are two names of one setting"):format(alias, tostring(value), key,
        tostring(given[key])))
    end
    if value ~= nil then settings[key] = value end
  end
  for key, default in pairs(config.DEFAULTS) do if settings[key] == nil then settings[key] = default end end
  check(settings)
  return settings
end

--- What a config.json says, as Hugging Face reads it: null is as if left out, and dropout that is left out is 0.1.
---@param fields table the decoded file
---@return table
function config.from_file(fields)
  local given = {}
  for key, value in pairs(fields) do
    -- An empty table was a list or an object, which Lua cannot tell when it is written again.
    if type(value) ~= "userdata" and not (type(value) == "table" and next(value) == nil) then given[key] = value end
  end
  for _, key in ipairs(DROPOUTS) do if given[key] == nil then given[key] = 0.1 end end
  return given
end

--- The fields to write: those of a model, with the type of its weights.
---@param settings table
---@param dtype string Hugging Face's name of it: "float32"
---@return table
function config.to_file(settings, dtype)
  local fields = { model_type = "gpt2", architectures = { "GPT2LMHeadModel" } }
  for key, value in pairs(settings) do fields[key] = value end
  fields.dtype, fields.torch_dtype = dtype, dtype          -- the second is for versions before 4.56
  return fields
end

return config
