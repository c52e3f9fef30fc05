-- SPDX-License-Identifier: BSD-3-Clause
-- Converts PEFT's adapter_config.json to the settings of ps.lora, and back. A field that changes the results of an
-- adapter is either supported, or an error names it.
local encode = require "ps.core.encode"
local json = require "cjson"
local folder = require "ps.pretrained.folder"
local settings = require "ps.pretrained.settings"
local caller = require "ps.core.caller"
local error = caller.error

local config = {}

config.FILE = "adapter_config.json"

-- Fields that do not change the results of an adapter, or that only describe its initialization.
local INFORMATION = { peft_type = true, auto_mapping = true, peft_version = true, base_model_name_or_path = true,
  revision = true, task_type = true, inference_mode = true, megatron_core = true, runtime_config = true,
  qalora_group_size = true, fan_in_fan_out = true, modules_to_tie = true }
-- The supported fields, with their types and their names in ps.lora.
local APPLIED = { r = "number", lora_alpha = "number", lora_dropout = "number", target_modules = "string|table",
  use_rslora = "boolean", use_dora = "boolean", bias = "string", init_lora_weights = "any",
  modules_to_save = "table", exclude_modules = "string|table", layers_to_transform = "number|table",
  layers_pattern = "string|table", rank_pattern = "table", alpha_pattern = "table", ensure_weight_tying = "boolean" }
-- Values of init_lora_weights that leave the base model's weights unchanged.
local INITS = { gaussian = true, eva = true, orthogonal = true }

-- Tasks for which PEFT trains the head in full.
local HEADED = { SEQ_CLS = true, TOKEN_CLS = true, QUESTION_ANS = true }

local function given(value)
  return value ~= nil and value ~= json.null and value ~= false and not (type(value) == "table" and next(value) == nil)
end

local function shown(value) return type(value) == "table" and encode(value) or tostring(value) end

local function check_type(path, key, value)
  local kinds = APPLIED[key]
  if kinds == "any" then return end
  for kind in kinds:gmatch "%a+" do if type(value) == kind then return end end
  settings.refuse(path, key, shown(value), "it must be a " .. kinds:gsub("|", " or a "))
end

--- Returns the settings in a folder's adapter_config.json.
---@param path string the folder
---@return ps.lora.Spec spec
---@return table fields all fields of the file
function config.read(path)
  local file = path .. "/" .. config.FILE
  local fields = folder.read_json(file)
  if fields.peft_type ~= "LORA" then
    settings.refuse(file, "peft_type", tostring(fields.peft_type), "only LORA (with rsLoRA and DoRA) is supported")
  end
  for key, value in pairs(fields) do
    if given(value) then
      if APPLIED[key] then check_type(file, key, value)
      elseif not INFORMATION[key] then settings.refuse(file, key, shown(value), "it is not supported") end
    end
  end
  local function of(key) if given(fields[key]) then return fields[key] end end
  local init = fields.init_lora_weights
  if type(init) == "string" and not INITS[init] then
    settings.refuse(file, "init_lora_weights", init, "it changes the base model's weights; write the adapter with "
      .. "PEFT's path_initial_model_for_weight_conversion, which converts it to plain LoRA")
  end
  if not of "target_modules" then
    settings.refuse(file, "target_modules", "null", "it must name the adapted layers")
  end
  local r = fields.r
  if type(r) ~= "number" or r < 1 or r % 1 ~= 0 then
    settings.refuse(file, "r", shown(r), "the rank must be a whole number of at least 1")
  end
  return { r = r, alpha = of "lora_alpha" or 8, dropout = of "lora_dropout" or 0, targets = fields.target_modules,
    use_rslora = of "use_rslora" or false, use_dora = of "use_dora" or false, bias = of "bias" or "none",
    init = true, modules_to_save = of "modules_to_save", exclude_modules = of "exclude_modules",
    layers_to_transform = of "layers_to_transform", layers_pattern = of "layers_pattern",
    rank_pattern = of "rank_pattern", alpha_pattern = of "alpha_pattern", task_type = of "task_type",
    ensure_weight_tying = of "ensure_weight_tying", base = of "base_model_name_or_path", from_file = true }, fields
end

-- Returns the last components of the names in `names`, without duplicates. If these components would also select other
-- modules, returns `names`.
local function short_names(model, names)
  local wanted, last, list = {}, {}, {}
  for _, name in ipairs(names) do
    wanted[name] = true
    local part = name:match "[^.]+$"
    if not last[part] then last[part], list[#list + 1] = true, part end
  end
  for name in model:named_modules() do
    if last[name:match "[^.]*$"] and not wanted[name] then return names end
  end
  table.sort(list)
  return list
end

--- Returns the text of adapter_config.json for an adapter.
---@param adapters ps.lora.Adapters
---@param name string
---@return string
function config.text(adapters, name)
  local spec, names, transposed = adapters.specs[name], {}, false
  for _, entry in ipairs(adapters.layers) do
    if entry.module.lora_.adapters[name] then
      names[#names + 1] = entry.name
      transposed = transposed or entry.kind.out_in == 0 and not entry.kind.table
    end
  end
  local targets = spec.targets
  if spec.whole_names or type(targets) == "string" and targets:lower() == "all-linear" then
    targets = short_names(adapters.model, names)
  end
  local null = json.null
  local whole, task = spec.modules_to_save, spec.task_type
  if whole and #whole == 0 then whole = nil end
  if HEADED[task] and not whole then task = nil end        -- for this task, PEFT would train the whole head
  local fields = { peft_type = "LORA", task_type = task or null, auto_mapping = null, revision = null,
    base_model_name_or_path = spec.base or null, inference_mode = true, r = spec.r, lora_alpha = spec.alpha,
    lora_dropout = spec.dropout, target_modules = targets, exclude_modules = spec.exclude_modules or null,
    use_rslora = spec.use_rslora, use_dora = spec.use_dora, bias = spec.bias, fan_in_fan_out = transposed,
    modules_to_save = whole or null, layers_to_transform = spec.layers_to_transform or null,
    layers_pattern = spec.layers_pattern or null, rank_pattern = spec.rank_pattern or {},
    alpha_pattern = spec.alpha_pattern or {}, lora_bias = false,
    ensure_weight_tying = spec.ensure_weight_tying or false, init_lora_weights = spec.init }
  return encode(fields, config.FILE)
end

--- Returns the folder of the base model. An adapter's adapter_config.json names this folder.
---@param path string
---@return string
function config.base_of(path)
  local spec = config.read(path)
  if not spec.base then
    error(("%s/%s names no base model (base_model_name_or_path); load the base model, then ps.lora.load(model, folder)")
      :format(path, config.FILE))
  end
  return spec.base
end

return config
