-- SPDX-License-Identifier: BSD-3-Clause
-- ps.lora: small trained adapters for a frozen model (LoRA, rsLoRA, DoRA). Adapters are stored in PEFT's file format.
--
--   local model = ps.lora.wrap(ps.from_pretrained(folder), { r = 16, alpha = 32, targets = "all-linear" })
--   ...                                                    -- train it like any model: only the adapter changes
--   model:save_pretrained(out)                             -- adapter_config.json, adapter_model.safetensors
--   local model = ps.lora.load(ps.from_pretrained(folder), out)
local caller = require "ps.core.caller"
local handle = require "ps.nn.handle"
local nn_module = require "ps.nn.module"
local adapters = require "ps.lora.adapters"
local config = require "ps.lora.config"
local files = require "ps.lora.files"
local lfs = require "lfs"
local error = caller.error

local lora = {}

local OPTIONS = { r = "whole", alpha = "number", dropout = "number", targets = "string|table", use_rslora = "boolean",
  use_dora = "boolean", modules_to_save = "table", rank_pattern = "table", alpha_pattern = "table", name = "string",
  bias = "string", exclude_modules = "string|table", layers_to_transform = "whole|table",
  layers_pattern = "string|table", init = "boolean|string", ensure_weight_tying = "boolean", task_type = "string" }
local BIASES = { none = true, all = true, lora_only = true }
local HEADS = { SEQ_CLS = { "classifier", "score" }, TOKEN_CLS = { "classifier", "score" },
  QUESTION_ANS = { "qa_outputs" } }
local TASKS = { causal_lm = "CAUSAL_LM", sequence_classification = "SEQ_CLS", token_classification = "TOKEN_CLS",
  question_answering = "QUESTION_ANS", base = "FEATURE_EXTRACTION" }

--- Returns PEFT's task_type for a model's class, or nil if there is none.
---@param model ps.nn.Module
---@return string?
function lora.task_of(model)
  local family = model.family
  for task, class in pairs(family and family.tasks or {}) do
    if class == model.class_name and TASKS[task] then return TASKS[task] end
  end
end

-- Returns the names of the heads that an adapter for this task trains in full.
local function heads_of(model, task)
  local list = {}
  for _, name in ipairs(HEADS[task] or {}) do
    if nn_module.is_module(model[name]) then list[#list + 1] = name end
  end
  return #list > 0 and list or nil
end

-- Returns whether a value is a valid alpha of an adapter.
local function usable(alpha)
  return type(alpha) == "number" and alpha == alpha and alpha ~= 0 and math.abs(alpha) < math.huge
end

local function check_numbers(spec)
  if spec.r < 1 then
    error(("lora: r = %.14g; the rank of an adapter must be a whole number of at least 1, such as 16"):format(spec.r))
  end
  if not (spec.dropout >= 0 and spec.dropout < 1) then
    error(("lora: dropout = %.14g; it must be in [0, 1)"):format(spec.dropout))
  end
  if not usable(spec.alpha) then
    error(("lora: alpha = %.14g; the scale alpha / r of an adapter must be a finite number other than 0"):format(
      spec.alpha))
  end
  for pattern, r in pairs(spec.rank_pattern or {}) do
    if type(r) ~= "number" or r < 1 or r % 1 ~= 0 then
      error(("lora: rank_pattern['%s'] = %s; a rank must be a whole number of at least 1"):format(tostring(pattern),
        tostring(r)))
    end
  end
  for pattern, alpha in pairs(spec.alpha_pattern or {}) do
    if not usable(alpha) then
      error(("lora: alpha_pattern['%s'] = %s; it must be a finite number other than 0"):format(tostring(pattern),
        tostring(alpha)))
    end
  end
end

local function check_name(name)
  if not name:find "^[%w%-][%w_%-]*$" or name == "training" or nn_module.Module[name] ~= nil then
    error(("lora: '%s' cannot be the name of an adapter; use letters, digits, _ and -, no _ at the beginning, and not "
      .. "the name of a module's field"):format(name))
  end
  return name
end

--- Adds an adapter to a model and freezes all other parameters. Each selected layer then computes W x + scale B A x,
--- where A [r, in] and B [out, r] are trained. The scale is alpha / r, or alpha / sqrt(r) with use_rslora. With
--- use_dora, each row of W + scale B A also has a trained magnitude. A is random and B is zero, so the model's outputs
--- do not change until the first update. If the model has half precision, its adapters are fp32. The model gets the
--- methods set_adapter, active_adapter, disable_adapter, merge_adapter, unmerge_adapter and unload_adapter. Its
--- save_pretrained then writes only the adapter.
---@param model ps.nn.Module
---@param options? {r?: integer, alpha?: number, dropout?: number, targets?: string|string[], use_rslora?: boolean,
--- use_dora?: boolean, modules_to_save?: string[], rank_pattern?: table<string, integer>, alpha_pattern?: table<string,
--- number>, name?: string, bias?: "none"|"all"|"lora_only", exclude_modules?: string|string[], layers_to_transform?:
--- integer|integer[], layers_pattern?: string|string[], init?: boolean|"gaussian", ensure_weight_tying?: boolean,
--- task_type?: string} r: the rank (default 8). alpha: the numerator of the scale (default 8). targets: the layers that
--- get an adapter. It is one of three things: "all-linear" (default), which selects all linear layers except the head;
--- a list of names or of their last components; or a regular expression that must match whole names. modules_to_save:
--- modules that are trained in full (default: a classifier's head). rank_pattern, alpha_pattern: r and alpha for the
--- layers whose names match regular expressions. name: the adapter's name (default "default"). bias: selects the biases
--- that are trained. init: if false, B is also random. ensure_weight_tying: allows a tied embedding in modules_to_save.
---@return ps.nn.Module model
function lora.wrap(model, options)
  if handle.of(model) then
    error "lora.wrap: ps.initialize made this model; wrap the module before, in model_func"
  end
  if not nn_module.is_module(model) then error(("lora.wrap takes a module, not a %s"):format(type(model))) end
  local given = caller.options(options, "lora.wrap", OPTIONS)
  local spec = {}
  for key, value in pairs(given) do spec[key] = value end
  spec.rank_given = given.r ~= nil
  spec.r, spec.dropout, spec.targets = given.r or 8, given.dropout or 0, given.targets or "all-linear"
  spec.alpha, spec.bias, spec.name = given.alpha or 8, given.bias or "none", nil
  spec.use_rslora, spec.use_dora = given.use_rslora or false, given.use_dora or false
  if spec.init == nil then spec.init = true end
  if type(spec.init) == "string" then caller.one_of(spec.init, { gaussian = true }, "lora.wrap: init") end
  caller.one_of(spec.bias, BIASES, "lora.wrap: bias")
  if type(spec.targets) == "table" and #spec.targets == 0 then error "lora.wrap: targets is an empty list" end
  check_numbers(spec)
  spec.task_type = given.task_type or lora.task_of(model)
  if spec.modules_to_save == nil then spec.modules_to_save = heads_of(model, spec.task_type) end
  spec.base = rawget(model, "source")
  local name = check_name(given.name or "default")
  adapters.undone_on_error(model, name, adapters.add, model, name, spec)
  return model
end

--- Loads an adapter that PEFT or psluajit wrote, and activates it. Raises an error if an option is not supported, if
--- the adapter was trained with other base weights, or if a tensor is missing, unexpected or has a wrong shape. These
--- errors are raised before any value is read. They do not change the model's adapters, the active adapter, or which
--- parameters require a gradient.
---@param model ps.nn.Module the base model
---@param folder string a folder with adapter_config.json, or an adapter's GGUF file
---@param options? {name?: string, trainable?: boolean, other_base?: boolean, dropout?: number} name: the adapter's name
--- (default "default"). trainable: whether the adapter is trained (default true). other_base: whether an adapter for
--- other base weights is accepted. dropout: overrides the value in the file.
---@return ps.nn.Module model
function lora.load(model, folder, options)
  if handle.of(model) then
    error "lora.load: ps.initialize made this model; load the adapter before, in model_func"
  end
  if options and options.name then check_name(options.name) end
  return files.load(model, folder, options)
end

--- Loads an adapter's folder and the base model that the folder names. Implements ps.from_pretrained for such a folder.
---@param folder string
---@param options? table options of ps.from_pretrained for the base model
---@return ps.nn.Module model
function lora.from_pretrained(folder, options)
  local base = config.base_of(folder)
  if lfs.attributes(base, "mode") == nil and lfs.attributes(folder .. "/" .. base, "mode") then
    base = folder .. "/" .. base
  end
  local model = require("ps.pretrained").load(base, options)
  files.load(model, folder)
  return model:train(model.training)
end

--- Writes an adapter of a model as a folder that PEFT can read. model:save_pretrained(folder) does the same for the
--- active adapter.
---@param model ps.nn.Module|ps.Engine
---@param folder string
---@param name? string the adapter (default: the active adapter)
function lora.save(model, folder, name) files.save(model, folder, name) end

--- Returns the tensors of the active adapter. The keys are PEFT's names in adapter_model.safetensors.
---@param model ps.nn.Module
---@param name? string the name of another adapter
---@return table<string, ps.Tensor>
function lora.tensors(model, name)
  local list, own = {}, adapters.own(handle.module(model), "lora.tensors")
  name = name or own.active or own.merged
  for path, tensor in own:tensors(name) do list[files.PREFIX .. path] = tensor end
  return list
end

--- Copies values into tensors of the active adapter. The keys are PEFT's names. Magnitudes of DoRA that are not in
--- `state` become the norms of the new weights. Raises an error if the adapter has no tensor with one of the names.
---@param model ps.nn.Module
---@param state table<string, ps.Tensor>
---@return ps.nn.Module model
function lora.set_tensors(model, state)
  caller.typed(state, "table", "lora.set_tensors: the tensors by name")
  files.set(model, state)
  return model
end

--- Merges an adapter into a base model and writes the result to a folder, one tensor at a time.
---@param base string the folder or GGUF file of the base model
---@param adapter string the folder or GGUF file of the adapter
---@param out string the folder to write
---@param options? {max_shard_size?: integer|string, other_base?: boolean, task?: string} task: selects the model's
--- class, if it is not the class in config.json
function lora.merge_folder(base, adapter, out, options)
  require("ps.lora.merge_folder").folder(base, adapter, out, options)
end

--- Returns whether a model has adapters.
---@param model ps.nn.Module|ps.Engine
---@return boolean
function lora.has(model) return adapters.of(handle.module(model)) ~= nil end

return lora
