-- SPDX-License-Identifier: BSD-3-Clause
-- Manages the named adapters of a model, of which at most one is active. A model with adapters has the methods below.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local origin = require "ps.nn.origin"
local registry = require "ps.nn.registry"
local layers = require "ps.lora.layers"
local saved = require "ps.lora.saved"
local targets = require "ps.lora.targets"
local error = caller.error

---@class ps.lora.Adapters the adapters of a model, which the model stores in its field `adapters_`
---@field model ps.nn.Module
---@field specs table<string, ps.lora.Spec> each adapter's settings, by the adapter's name
---@field active? string name of the active adapter
---@field merged? string name of the adapter that is merged into the weights
---@field layers {name: string, module: ps.nn.Module, kind: table}[] the layers that have an adapter
---@field saved {name: string, module: ps.nn.Module}[] the modules that adapters train in full
local Adapters = {}
Adapters.__index = Adapters

---@class ps.lora.Spec the settings of one adapter
---@field r integer
---@field alpha number
---@field dropout number
---@field targets string|string[]
---@field use_rslora boolean
---@field use_dora boolean
---@field bias "none"|"all"|"lora_only"
---@field init any
---@field modules_to_save? string[]
---@field exclude_modules? string|string[]
---@field layers_to_transform? integer|integer[]
---@field layers_pattern? string|string[]
---@field rank_pattern? table<string, integer>
---@field alpha_pattern? table<string, number>
---@field task_type? string
---@field base? string the folder of the base model
---@field from_file? boolean
---@field rank_given? boolean whether a script chose `r`, which must then fit the model
---@field whole_names? boolean whether `targets` lists the full names of all adapted layers

--- Returns the adapters of a model, or nil if it has none.
---@param model ps.nn.Module
---@return ps.lora.Adapters?
local function of(model) return rawget(model, "adapters_") end

--- Returns the adapters of a model. Raises an error if it has none.
---@param model ps.nn.Module
---@param call string the called function, for the error
---@return ps.lora.Adapters
local function own(model, call)
  return of(model) or error(("%s: the model has no adapter; ps.lora.wrap(model, { r = 16 }) adds one"):format(call))
end

--- Returns the rank and the scale of each adapter in each layer: adapter -> layer -> "rank scale". A checkpoint stores
--- this text, because its tensors do not contain the scale.
---@return table<string, table<string, string>>
function Adapters:scales()
  local all = {}
  for _, found in ipairs(self.layers) do
    for name, adapter in pairs(found.module.lora_.adapters) do
      all[name] = all[name] or {}
      all[name][found.name] = ("%d %.17g"):format(adapter.r, adapter.scale)
    end
  end
  return all
end

-- Describes a text "rank scale".
local function in_words(text)
  local rank, scale = text:match "^(%d+) (%S+)$"
  return ("rank %s and the scale %.6g"):format(rank, tonumber(scale))
end

--- Describes the first difference between saved adapters and these. Returns nil if there is none.
---@param before table<string, table<string, string>> result of scales()
---@return string?
function Adapters:difference(before)
  local now = self:scales()
  for _, name in ipairs(caller.sorted_names(before)) do
    for _, layer in ipairs(caller.sorted_names(now[name] and before[name] or {})) do
      local theirs, ours = before[name][layer], now[name][layer]
      if ours and theirs ~= ours then
        return ("it was saved with an adapter (%s) of %s, but the adapter of this model has %s (layer %s); the scale "
          .. "is alpha / r, or alpha / sqrt(r) with use_rslora"):format(name, in_words(theirs), in_words(ours), layer)
      end
    end
  end
end

-- Returns the modules whose names end with an entry of modules_to_save.
local function modules_to_save(model, spec)
  local list, seen = {}, {}
  for name, module in model:named_modules() do
    for _, wanted in ipairs(spec.modules_to_save or {}) do
      if name ~= "" and name:sub(-#wanted) == wanted then
        list[#list + 1], seen[wanted] = { name = name, module = module }, true
      end
    end
  end
  for _, wanted in ipairs(spec.modules_to_save or {}) do
    if not seen[wanted] and not spec.from_file then
      error(("lora: modules_to_save has '%s', but no module's name ends with it"):format(wanted))
    end
  end
  return list
end

-- Raises an error for an embedding in modules_to_save that is tied to the head. PEFT would train the embedding but not
-- the head.
local function check_tied(model, list, spec)
  local head = rawget(model, "tied_head")
  local tied = head and rawget(head, "tied")
  for _, entry in ipairs(tied and not spec.ensure_weight_tying and list or {}) do
    if entry.module == tied then
      error(("lora: modules_to_save has '%s', whose weight is also the head's; set ensure_weight_tying = true to train "
        .. "both, or make the model with tie_word_embeddings = false"):format(entry.name))
    end
  end
end

-- Raises an error if, for every adapted weight, the rank exceeds the weight's larger side. A or B alone would then have
-- more values than the weight. A rank between the two sides is accepted, because the weight may be a head with few
-- outputs. Only ranks that a script sets are checked, because the default must also work for small models.
local function check_rank(spec, found)
  local largest, name = 0, nil
  for _, entry in ipairs(found) do
    local side = math.max(layers.sizes(entry.module, entry.kind))
    if targets.pattern_value(spec.rank_pattern, entry.name, spec.r) <= side then return end
    if side > largest then largest, name = side, entry.name end
  end
  error(("lora: r = %.14g, but the largest side of the adapted weights is %d (%s), so the adapter would have more "
    .. "values than these weights; pass a smaller r, such as 16"):format(spec.r, largest, name))
end

-- Calls discard(module, name) for each entry. Returns the entries whose modules still have an adapter afterwards.
local function kept(entries, name, discard)
  local list = {}
  for _, entry in ipairs(entries) do
    if not discard(entry.module, name) then list[#list + 1] = entry end
  end
  return list
end

-- Removes an adapter, even if `add` failed before it was complete.
local function discard(self, name)
  self.layers, self.saved = kept(self.layers, name, layers.discard), kept(self.saved, name, saved.discard)
  self.specs[name] = nil
  if next(self.specs) == nil then
    for method in pairs(Adapters.methods) do rawset(self.model, method, nil) end
    rawset(self.model, "adapters_", nil)
  end
end

--- Calls fn(...), which adds an adapter. If fn fails, removes the adapter and undoes two changes: the previous adapter
--- becomes active again, and the same parameters as before require a gradient.
---@generic T
---@param model ps.nn.Module
---@param name string the adapter's name
---@param fn fun(...): T
---@param ... any
---@return T
local function undone_on_error(model, name, fn, ...)
  local before = of(model)
  if before and before.specs[name] then return fn(...) end              -- fn raises an error because the name is taken
  local active, trained = before and before.active, {}
  for _, p in ipairs(model:parameters()) do trained[p] = p:needs_grad() end
  local ok, result = pcall(fn, ...)
  if ok then return result end
  local self = of(model)
  if self then discard(self, name) end
  if before then before:activate(active) end
  for p, yes in pairs(trained) do
    if p:needs_grad() ~= yes then p:requires_grad(yes) end
  end
  return error(result, 0)
end

--- Adds an adapter to a model and activates it.
---@param model ps.nn.Module
---@param name string
---@param spec ps.lora.Spec
---@return ps.lora.Adapters
local function add(model, name, spec)
  local self = of(model)
  if self and self.specs[name] then
    error(("lora: the model has an adapter '%s'; give the new one another name"):format(name))
  end
  if self and self.merged then
    error(("lora: the adapter '%s' is merged; call model:unmerge_adapter() before another is added"):format(
      self.merged))
  end
  for other, has in pairs(self and self.specs or {}) do
    local biased = has.bias ~= "none" and other or spec.bias ~= "none" and name
    if biased then
      error(("lora: the adapter '%s' trains biases (bias = \"%s\"), which the model has only once, so that there can "
        .. "be no other adapter; set bias = \"none\" for all adapters"):format(biased,
        (biased == other and has or spec).bias))
    end
  end
  if self then self:activate(nil) end
  local found = targets.find(model, spec)
  if not spec.from_file then
    targets.check_patterns("rank_pattern", spec.rank_pattern, found)
    targets.check_patterns("alpha_pattern", spec.alpha_pattern, found)
  end
  if spec.rank_given then check_rank(spec, found) end
  local list = modules_to_save(model, spec)
  check_tied(model, list, spec)
  if not self then
    self = setmetatable({ model = model, specs = {}, layers = {}, saved = {} }, Adapters)
    rawset(model, "adapters_", self)
    for method, fn in pairs(Adapters.methods) do rawset(model, method, fn) end
    model:requires_grad_(false)
  end
  for _, entry in ipairs(found) do
    if not rawget(entry.module, "lora_") then self.layers[#self.layers + 1] = entry end
    layers.add(entry, name, { r = targets.pattern_value(spec.rank_pattern, entry.name, spec.r),
      alpha = targets.pattern_value(spec.alpha_pattern, entry.name, spec.alpha), dropout = spec.dropout,
      use_rslora = spec.use_rslora, use_dora = spec.use_dora, init = spec.init })
  end
  for _, entry in ipairs(list) do
    if not rawget(entry.module, "saved_") then self.saved[#self.saved + 1] = entry end
    saved.add(entry.module, name)
  end
  self.specs[name] = spec
  self:activate(name)
  self:train_only(name)
  return self
end

--- Activates an adapter. If `name` is nil, deactivates the active adapter.
---@param name? string
function Adapters:activate(name)
  for _, entry in ipairs(self.layers) do
    local state = entry.module.lora_
    state.active = state.adapters[name or false] and name or nil
  end
  for _, entry in ipairs(self.saved) do saved.activate(entry.module, name or false) end
  self.active = name
end

--- `for path, tensor in adapters:tensors(name)` iterates over the tensors of an adapter. `path` is the tensor's full
--- name in PEFT's file, without the prefix "base_model.model.".
---@param name string
---@return fun(): string?, ps.Tensor?
function Adapters:tensors(name)
  local spec, list = self.specs[name], {}
  local function put(path, tensor) list[#list + 1] = { path, tensor } end
  local wrapped, whole = {}, {}
  for _, entry in ipairs(self.layers) do
    local state = entry.module.lora_
    wrapped[entry.module] = true
    if state.adapters[name] then
      local A, B, magnitude = layers.tensors(entry.module, name)
      local kind = state.kind.table and "%s.lora_embedding_%s" or "%s.lora_%s.weight"
      put(kind:format(entry.name, "A"), A)
      put(kind:format(entry.name, "B"), B)
      if magnitude ~= nil then put(entry.name .. ".lora_magnitude_vector", magnitude) end
    end
  end
  for _, entry in ipairs(self.saved) do
    whole[#whole + 1] = entry.name .. "."
    if entry.module.saved_.names[name] then
      for inner, tensor in pairs(saved.tensors(entry.module, name)) do put(entry.name .. "." .. inner, tensor) end
    end
  end
  if spec.bias ~= "none" then
    registry.walk(self.model, function(path, value, kind, owner, key)
      if kind ~= "param" or key ~= "bias" then return end
      for _, prefix in ipairs(whole) do
        if path:sub(1, #prefix) == prefix then return end
      end
      if wrapped[owner] then put(path:gsub("bias$", "base_layer.bias"), value)
      elseif spec.bias == "all" then put(path, value) end
    end)
  end
  table.sort(list, function(a, b) return a[1] < b[1] end)
  local i = 0
  return function()
    i = i + 1
    if list[i] then return list[i][1], list[i][2] end
  end
end

--- Makes the tensors of one adapter require a gradient. The tensors of all other adapters then require no gradient. If
--- `name` is nil, the tensors of all adapters require no gradient. If an engine trains a parameter, the parameter
--- continues to require a gradient.
---@param name? string
function Adapters:train_only(name)
  for other in pairs(self.specs) do
    for _, tensor in self:tensors(other) do
      if not nn_module.updated_by(tensor) and tensor:needs_grad() then tensor:requires_grad(false) end
    end
  end
  for _, tensor in (name and self:tensors(name) or function() end) do
    if not tensor:needs_grad() then tensor:requires_grad(true) end
  end
end

--- Returns the name of a layer whose active adapter cannot be merged in place, because its weight is tied to a head.
--- Returns nil if there is no such layer.
---@return string?
function Adapters:tied_table()
  local head = rawget(self.model, "tied_head")
  local tied = head and rawget(head, "tied")
  for _, entry in ipairs(self.layers) do
    local state = entry.module.lora_
    local shared = entry.module == tied
      or state.kind.table and self.model.config and self.model.config.tie_word_embeddings
        and entry.name:find "word_embeddings$" ~= nil
    if shared and state.active then return entry.name end
  end
end

--- If tensor parallelism has cut a parameter, cuts the parameter's inactive values in the same way. These values belong
--- to inactive adapters or to the base model.
---@param path string the parameter's name in the model
---@param cut fun(holder: ps.nn.Module, key: string) replaces a parameter with this rank's part
function Adapters:cut_saved(path, cut)
  for _, entry in ipairs(self.saved) do saved.cut(entry, path, cut) end
end

--- Moves the inactive values of a module to the module that tensor parallelism has put in its place.
---@param old ps.nn.Module
---@param new ps.nn.Module
function Adapters:replaced(old, new)
  for _, entry in ipairs(self.saved) do
    if entry.module == old then saved.move(entry, new) end
  end
end

-- Raises an error if an adapter trains biases, because the function `call` needs the base model's biases, which the
-- model then no longer has.
local function check_biases(self, call, advice)
  for name, spec in pairs(self.specs) do
    if spec.bias ~= "none" then
      error(("%s: the adapter '%s' trains biases (bias = \"%s\"), and the model no longer has the base model's; %s")
        :format(call, name, spec.bias, advice))
    end
  end
end

-- -- methods of the model ---------------------------------------------------------------------------------------------
Adapters.methods = {}
local methods = Adapters.methods

--- Activates another adapter, and makes its tensors trainable.
---@param self ps.nn.Module
---@param name string
---@return ps.nn.Module self
function methods.set_adapter(self, name)
  local adapters = own(self, "set_adapter")
  if not adapters.specs[name] then
    error(("set_adapter: the model has no adapter '%s' (its adapters are %s)"):format(tostring(name),
      table.concat(caller.sorted_names(adapters.specs), ", ")))
  end
  if adapters.merged and adapters.merged ~= name then
    error(("set_adapter: the adapter '%s' is merged; call model:unmerge_adapter() first"):format(adapters.merged))
  end
  adapters:activate(name)
  adapters:train_only(name)
  return self
end

--- Returns the name of the active adapter, or nil if no adapter is active.
---@param self ps.nn.Module
---@return string?
function methods.active_adapter(self) return own(self, "active_adapter").active end

local function restore(adapters, name, ok, ...)
  adapters:activate(name)
  if not ok then error((...), 0) end
  return ...
end

--- Calls fn(...) while no adapter is active. The model then computes the results of the base model.
---@param self ps.nn.Module
---@param fn function
---@param ... any
---@return any ... fn's results
function methods.disable_adapter(self, fn, ...)
  local adapters = own(self, "disable_adapter")
  caller.callable(fn, "model:disable_adapter")
  if adapters.merged then
    error(("disable_adapter: the adapter '%s' is merged; call model:unmerge_adapter() first"):format(adapters.merged))
  end
  check_biases(adapters, "disable_adapter", "load the base model a second time, or set bias = \"none\"; for "
    .. "preferences call ps.preference.reference before ps.lora.wrap")
  local name = adapters.active
  adapters:activate(nil)
  return restore(adapters, name, pcall(fn, ...))
end

--- Adds the active adapter to the weights. A call of the model then costs as much as a call of the base model.
---@param self ps.nn.Module
---@return ps.nn.Module self
function methods.merge_adapter(self)
  local adapters = own(self, "merge_adapter")
  if adapters.merged then return self end
  local tied = adapters:tied_table()
  if tied then
    error(("merge_adapter: %s has an adapter, and its weight is also the head's, which the merge would also change; "
      .. "tools/merge_adapter.lua writes a folder whose head has a separate weight"):format(tied))
  end
  for _, entry in ipairs(adapters.layers) do  -- check all layers before a weight changes
    if entry.module.lora_.active then layers.check_mergeable(entry.module, "merge_adapter") end
  end
  adapters.unmerged = origin.state(self)
  for _, entry in ipairs(adapters.layers) do layers.merge(entry.module) end
  adapters.merged = adapters.active
  return self
end

--- Subtracts the merged adapter from the weights. After this, the weights are equal to the base model's weights, except
--- for rounding.
---@param self ps.nn.Module
---@return ps.nn.Module self
function methods.unmerge_adapter(self)
  local adapters = own(self, "unmerge_adapter")
  for _, entry in ipairs(adapters.layers) do layers.unmerge(entry.module) end
  if adapters.merged then origin.renew(self, adapters.unmerged) end
  adapters.merged, adapters.unmerged = nil, nil
  return self
end
methods.unmerge = methods.unmerge_adapter

--- Removes all adapters, so that only the base model remains. With `merge`, first adds the active adapter to the
--- weights.
---@param self ps.nn.Module
---@param options? {merge?: boolean}
---@return ps.nn.Module self
function methods.unload_adapter(self, options)
  local adapters = own(self, "unload_adapter")
  local merge = caller.options(options, "unload_adapter", { merge = "boolean" }).merge
  if not merge then
    check_biases(adapters, "unload_adapter", "load the base model again, or keep the adapter in the weights with "
      .. "{ merge = true }")
  end
  if merge then methods.merge_adapter(self) else methods.unmerge_adapter(self) end
  for _, entry in ipairs(adapters.layers) do layers.remove(entry.module) end
  for _, entry in ipairs(adapters.saved) do saved.remove(entry.module, merge) end
  for method in pairs(methods) do rawset(self, method, nil) end
  rawset(self, "adapters_", nil)
  return self
end

return { of = of, own = own, add = add, undone_on_error = undone_on_error, Adapters = Adapters }
