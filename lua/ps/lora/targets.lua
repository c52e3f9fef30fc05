-- SPDX-License-Identifier: BSD-3-Clause
-- Selects the modules of a model that get adapters, by PEFT's rules for names. The choice is "all-linear", a list of
-- names or of their last components, or a regular expression that must match whole names.
local caller = require "ps.core.caller"
local nearest = require "ps.core.nearest"
local regex = require "ps.lora.regex"
local error = caller.error

local targets = {}

-- Layer classes that can have an adapter. out_in is 1 if the weight is [out, in], and 0 if it is [in, out].
targets.KINDS = {
  Linear = { out_in = 1 }, Conv1D = { out_in = 0 }, LMHead = { out_in = 1, head = true },
  Embedding = { out_in = 0, table = true },
}

--- Returns whether a module's name is in a list, or ends with "." and a name from the list.
---@param name string
---@param list string[]
---@return boolean
function targets.ends_with(name, list)
  for _, part in ipairs(list) do
    if name == part or name:sub(-#part - 1) == "." .. part then return true end
  end
  return false
end

-- Returns a module's layer index for layers_to_transform. The index is the first number in the module's name. If
-- `patterns` has entries, the index is instead the first number that follows a name in `patterns`.
local function layer_of(name, patterns)
  if not patterns or #patterns == 0 then return tonumber((("." .. name):match("%.[^.]*%.(%d+)%."))) end
  for _, pattern in ipairs(patterns) do
    local fits = regex.compile("(.*\\.)?" .. pattern)
    local from = 1
    while true do
      local first, last, number = name:find("%.(%d+)%.", from)
      if not first then break end
      if fits(name:sub(1, first - 1)) then return tonumber(number) end
      from = last
    end
  end
end

local function list_of(value) return type(value) == "table" and value or { value } end

-- Returns a function that tells whether the name of a module is selected.
local function chooser(wanted)
  if type(wanted) == "string" then return regex.compile(wanted) end
  return function(name) return targets.ends_with(name, wanted) end
end

-- Returns whether "all-linear" includes a module. "all-linear" includes all linear layers except the head of a language
-- model. The head of a classifier is usually in modules_to_save. Modules in modules_to_save get no adapter.
local function is_inner_linear(model, name, module, kind)
  if kind.table or kind.head then return false end
  return name:match "[^.]+$" ~= "decoder" or module.outputs ~= (model.config and model.config.vocab_size)
end

-- Raises an error for names that match no module. The message lists the model's most similar names.
local function refuse_missing(wanted, candidates)
  local words, seen = {}, {}
  for _, name in ipairs(candidates) do
    for _, word in ipairs { name, name:match "[^.]+$" } do
      if not seen[word] then seen[word], words[#words + 1] = true, word end
    end
  end
  if type(wanted) == "string" then
    for _, name in ipairs(candidates) do
      if targets.ends_with(name, { wanted }) then
        error(("lora: targets = '%s' is a regular expression for whole names, and matches no layer; for the layers "
          .. "whose names end with it write { \"%s\" }"):format(wanted, wanted))
      end
    end
  end
  local hints, last = {}, {}
  for _, name in ipairs(list_of(wanted)) do
    local hint = nearest.find(name, words)
    if hint then hints[#hints + 1] = hint end
  end
  for _, word in ipairs(words) do if not word:find(".", 1, true) then last[#last + 1] = word end end
  table.sort(last)
  error(("lora: targets = %s match no layer of the model%s; layers that can have an adapter end with %s"):format(
    type(wanted) == "table" and "{ " .. table.concat(wanted, ", ") .. " }" or "'" .. wanted .. "'",
    #hints > 0 and " (did you mean " .. table.concat(hints, ", ") .. "?)" or "", table.concat(last, ", ")))
end

-- Raises an error for a module that is named explicitly but cannot have an adapter.
local function check_kind(name, module, wanted)
  if targets.KINDS[module.class_name] or type(wanted) == "string" then return end
  for _, one in ipairs(wanted) do
    if targets.ends_with(name, { one }) then
      error(("lora: targets name %s, which is a %s; adapters are for Linear, Conv1D, LMHead and Embedding"):format(name,
        module.class_name))
    end
  end
end

--- Returns the modules of a model that get an adapter, in the order of the model's modules.
---@param model ps.nn.Module
---@param spec ps.lora.Spec
---@return {name: string, module: ps.nn.Module, kind: table}[]
function targets.find(model, spec)
  local all = type(spec.targets) == "string" and spec.targets:lower() == "all-linear"
  local wanted = not all and chooser(spec.targets)
  local left_out = spec.exclude_modules and chooser(spec.exclude_modules)
  local numbers = spec.layers_to_transform and {}
  for _, n in ipairs(numbers and list_of(spec.layers_to_transform) or {}) do numbers[n] = true end
  local found, candidates, named = {}, {}, {}
  for name, module in model:named_modules() do
    local kind = targets.KINDS[module.class_name]
    local saved = false
    for _, save in ipairs(spec.modules_to_save or {}) do
      saved = saved or ("." .. name .. "."):find("." .. save .. ".", 1, true) ~= nil
    end
    if kind and name ~= "" then candidates[#candidates + 1] = name end
    local fits = name ~= "" and not saved and not (left_out and left_out(name))
    if fits and all then fits = kind ~= nil and is_inner_linear(model, name, module, kind)
    elseif fits then fits = wanted(name) end
    if fits and numbers then fits = numbers[layer_of(name, list_of(spec.layers_pattern or {})) or false] or false end
    if fits then
      if not kind then check_kind(name, module, spec.targets) end
      if kind then found[#found + 1] = { name = name, module = module, kind = kind } end
      if type(spec.targets) == "table" then
        for _, one in ipairs(spec.targets) do if targets.ends_with(name, { one }) then named[one] = true end end
      end
    end
  end
  if #found == 0 then refuse_missing(spec.targets, candidates) end
  if type(spec.targets) == "table" and not numbers and not spec.from_file then
    local missing = {}
    for _, one in ipairs(spec.targets) do if not named[one] then missing[#missing + 1] = one end end
    if #missing > 0 then refuse_missing(missing, candidates) end
  end
  return found
end

--- Returns a module's value in PEFT's rank_pattern or alpha_pattern. This is the value of the pattern that matches the
--- module's name, or `default` if no pattern matches. PEFT uses the first pattern that matches, but a Lua table has no
--- order. If two patterns with different values match the same name, raises an error.
---@param patterns? table<string, number>
---@param name string
---@param default number
---@return number
function targets.pattern_value(patterns, name, default)
  local keys, found = {}, nil
  for key in pairs(patterns or {}) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do
    if regex.compile("(.*\\.)?(" .. key .. ")")(name) then
      if found and patterns[found] ~= patterns[key] then
        error(("lora: the patterns '%s' = %.14g and '%s' = %.14g both fit %s; make one of them narrower"):format(found,
          patterns[found], key, patterns[key], name))
      end
      found = key
    end
  end
  return found and patterns[found] or default
end

--- Raises an error if a pattern of rank_pattern or alpha_pattern matches no layer that gets an adapter.
---@param what string the option's name
---@param patterns? table<string, number>
---@param found {name: string}[] the layers
function targets.check_patterns(what, patterns, found)
  for key in pairs(patterns or {}) do
    local fits, matches = regex.compile("(.*\\.)?(" .. key .. ")"), false
    for _, entry in ipairs(found) do matches = matches or fits(entry.name) end
    if not matches then
      error(("lora: %s['%s'] matches none of the %d layers that get an adapter, such as %s"):format(what, key, #found,
        found[1].name))
    end
  end
end

return targets
