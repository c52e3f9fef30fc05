-- SPDX-License-Identifier: BSD-3-Clause
-- Checks a raw configuration against the schema, for unknown keys, wrong types and refused keys. Also resolves "auto",
-- and adds defaults. The result has every section and every default. Other files (batch_sizes.lua, memory.lua, ...)
-- then check the relations between keys.
local nearest = require "ps.core.nearest"
local json = require "ps.config.json"
local types = require "ps.core.types"

local check = {}

---@class ps.config.State state while a configuration is read
---@field name string the name of the source in errors
---@field later boolean whether to accept keys that only a later version will honour
---@field auto table<string, any> values that replace "auto", by full path or last name
---@field given table<string, boolean> paths whose value was written, or was given in place of "auto"
---@field defaulted string[] paths whose "auto" was replaced by the default
---@field spelt table<string, string> the alias under which a path was written, by path
---@field ignored table[] {words =, paths = {...}} ignored paths by reason, in the order in which they were found
---@field notes string[] texts for the user
local State = {}
State.__index = State

--- Returns a path in the spelling that the configuration uses.
---@param path string
---@return string
function State:shown(path)
  local at = path
  while at do
    if self.spelt[at] then return self.spelt[at] .. path:sub(#at + 1) end
    at = at:match("^(.*)%.[^.]*$")
  end
  return path
end

---@param format string
function State:fail(format, ...)
  local where = self.name == "config" and "config: " or "config " .. self.name .. ": "
  error(where .. format:format(...), 0)
end

---@param format string
function State:note(format, ...) self.notes[#self.notes + 1] = format:format(...) end

---@param path string
---@param words string the reason why the path has no effect here
function State:ignore(path, words)
  for _, group in ipairs(self.ignored) do
    if group.words == words then
      group.paths[#group.paths + 1] = self:shown(path)
      return
    end
  end
  self.ignored[#self.ignored + 1] = { words = words, paths = { self:shown(path) } }
end

--- Returns a value as text for an error.
---@param value any
---@return string
function check.show(value)
  if type(value) == "string" then return ("%q"):format(#value > 60 and value:sub(1, 57) .. "..." or value) end
  if value == json.null then return "null" end
  if type(value) == "number" then return ("%.14g"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  if #value == 0 then return next(value) == nil and "an empty table" or "a table" end
  local items = {}
  for i = 1, math.min(#value, 4) do items[i] = type(value[i]) == "table" and "a table" or check.show(value[i]) end
  return "a list (" .. table.concat(items, ", ") .. (#value > 4 and ", ..." or "") .. ")"
end

--- Describes a value that is not of the given type, such as "is -1; expected a number of at least 0". Returns nil if
--- the value is of the type.
---@param value any
---@param type_of ps.config.Type
---@return string?
function check.problem(value, type_of)
  if not type_of.take(value) then return ("is %s; expected %s"):format(check.show(value), type_of.text) end
end

--- Describes the first setting that is out of range, such as "lr is -1; expected a number of at least 0". Returns nil
--- if no setting is out of range.
---@param settings table
---@param types_of table<string, ps.config.Type>
---@return string?
function check.out_of_range(settings, types_of)
  for name, type_of in pairs(types_of) do
    local problem = settings[name] ~= nil and check.problem(settings[name], type_of)
    if problem then return name .. " " .. problem end
  end
end

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b)
    if type(a) == type(b) and type(a) ~= "table" and type(a) ~= "boolean" then return a < b end
    return type(a) < type(b)
  end)
  return keys
end

-- Returns all names that a section accepts.
local function names_in(node)
  local names = {}
  for _, row in ipairs(node.rows) do names[#names + 1] = row.key end
  for _, sub in ipairs(node.subs) do names[#names + 1] = sub.name end
  return names
end

-- Returns the root of the schema. The schema is large and is needed only while a configuration is read. Lua's collector
-- may therefore free the schema after that.
local SCHEMA = { "ps.config.schema", "ps.config.schema_deepspeed", "ps.config.schema_mesh" }
local kept = setmetatable({}, { __mode = "v" })
local function schema_root()
  local root = kept.root
  if not root then
    root = require(SCHEMA[1]).root
    kept.root = root
    for _, name in ipairs(SCHEMA) do package.loaded[name] = nil end
  end
  return root
end

-- Calls visit(section's path, name) once for every key of the schema.
local function each_name(node, visit)
  for _, name in ipairs(names_in(node)) do visit(node.path, name) end
  for _, sub in ipairs(node.subs) do each_name(sub.node, visit) end
  for _, variant in pairs(node.variants or {}) do each_name(variant, visit) end
end

-- Returns the paths of the sections that contain a name, sorted. With `near`, returns the full paths of similar names
-- instead.
local function elsewhere(name, near)
  local found, seen = {}, {}
  each_name(schema_root(), function(path, other)
    local hit = near and path .. (path ~= "" and "." or "") .. other or path
    local fits = other == name
    if near then fits = nearest.find(name, { other }) ~= nil end
    if fits and not seen[hit] then
      seen[hit] = true
      found[#found + 1] = { text = hit ~= "" and hit or "the top level", far = nearest.distance(name, other) }
    end
  end)
  table.sort(found, function(a, b)
    if a.far ~= b.far then return a.far < b.far end
    return a.text < b.text
  end)
  return found
end

local function unknown(state, node, path, key)
  if type(key) ~= "string" then state:fail("%s is not a key; the keys of a section are names", state:shown(path)) end
  local shown, others = state:shown(path), {}
  for name, sibling in pairs(node.siblings or {}) do
    if sibling.row[key] then others[#others + 1] = name end
  end
  if others[1] then
    table.sort(others)
    state:fail("unknown key %s: %s does not have it; it is for %s", shown, node.of, table.concat(others, " and "))
  end
  local places = elsewhere(key)
  if places[1] then
    local list = {}
    for i = 1, math.min(#places, 4) do list[i] = places[i].text end
    state:fail("unknown key %s: '%s' belongs in %s%s", shown, key, table.concat(list, " or "),
      #places > 4 and " or others" or "")
  end
  local near = nearest.find(key, names_in(node))
  if near then state:fail("unknown key %s; did you mean '%s'?", shown, near) end
  local hit = elsewhere(key, true)[1]
  state:fail("unknown key %s%s", shown, hit and ("; did you mean %s?"):format(hit.text)
    or "; docs/config.md lists the keys")
end

-- Raises an error if a name in `auto` is not a key.
local function check_auto(state)
  local known, names = {}, {}
  each_name(schema_root(), function(path, name)
    known[(path ~= "" and path .. "." or "") .. name], known[name] = true, true
    names[#names + 1] = name
  end)
  for name in pairs(state.auto) do
    if not known[name] then
      local near = type(name) == "string" and nearest.find(name, names)
      state:fail("auto has %s, which is not a key%s", check.show(name),
        near and ("; did you mean '%s'?"):format(near) or "")
    end
  end
end

--- Returns whether the value "auto" of a path was replaced by the default.
---@param path string
---@return boolean
function State:was_auto(path)
  for _, one in ipairs(self.defaulted) do if one == path then return true end end
  return false
end

-- Returns the value that replaces "auto". Returns nil if the default replaces it.
local function resolve_auto(state, row)
  local value = state.auto[row.path]
  if value == nil then value = state.auto[row.key] end
  if value == nil and row.status == "ignored" then
    state:ignore(row.path, row.words)
  elseif value == nil then
    state.defaulted[#state.defaulted + 1] = row.path
  end
  return value
end

local function copy(value)
  if type(value) ~= "table" then return value end
  local out = {}
  for key, item in pairs(value) do out[key] = copy(item) end
  return out
end

local function refuse(state, row, value)
  local reason
  if row.check then reason = row.check(value) elseif value ~= row.default then reason = row.words end
  if reason == nil then return end
  local later = row.status == "later" and "not in this version" or "refused"
  if row.status == "later" and state.later then return end
  state:fail("%s is %s; %s: %s", state:shown(row.path), check.show(value), later, row.words)
end

-- Returns the checked value of a key.
local function take_row(state, row, value)
  if value == json.null then value = nil end
  if value == "auto" and not row.type.auto then value = resolve_auto(state, row) end
  if value == nil then
    if row.required then
      state:fail("%s is needed%s", state:shown(row.path), state.defaulted[#state.defaulted] == row.path
        and ('; it is "auto": give its value, as in ps.initialize { auto = { %s = ... } }'):format(row.key)
        or ": " .. row.words)
    end
    return copy(row.default)
  end
  local ok, taken = row.type.take(value)
  if not ok then state:fail("%s %s", state:shown(row.path), check.problem(value, row.type)) end
  local least = row.status ~= "ignored" and row.type.least
  if least and math.abs(taken) > types.MOST then
    state:fail("%s is %s; expected a whole number from %s to %.0f (2^53 - 1)", state:shown(row.path), check.show(value),
      least < 0 and ("%.0f"):format(-types.MOST) or ("%.0f"):format(least), types.MOST)
  end
  state.given[row.path] = true
  if row.status == "refused" or row.status == "later" then
    refuse(state, row, taken)
  elseif row.check then
    local reason = row.check(taken)
    if reason then state:fail("%s is %s; %s", state:shown(row.path), check.show(value), reason) end
  end
  if row.status == "ignored" then state:ignore(row.path, row.words) end
  return taken
end

local take_section

local function take_sub(state, sub, value, parent)
  local node = sub.node
  if value == json.null or value == "auto" then value = nil end
  if value ~= nil then
    local shown = state:shown(node.path)
    if type(value) ~= "table" or #value > 0 then
      state:fail("%s is %s; expected a table of settings", shown, check.show(value))
    end
    if node.refused then state:fail("%s is given; refused: %s", shown, node.refused) end
    state.given[node.path] = true
  elseif node.optional then
    return nil
  end
  if node.variants then
    for name, variant in pairs(node.variants) do
      if name:lower() == parent.type:lower() then node = variant end
    end
  end
  return take_section(state, node, value or {})
end

function take_section(state, node, given)
  for _, key in ipairs(sorted_keys(given)) do
    if not node.row[key] and not node.sub[key] then
      unknown(state, node, (node.path ~= "" and node.path .. "." or "") .. tostring(key), key)
    end
  end
  local out = {}
  for _, row in ipairs(node.rows) do
    if row.status ~= "alias" and not row.section then out[row.key] = take_row(state, row, given[row.key]) end
  end
  for _, sub in ipairs(node.subs) do out[sub.name] = take_sub(state, sub, given[sub.name], out) end
  return out
end

-- Returns the table that contains the last name of a path, and the last name. If `make` is true, creates missing tables
-- along the path.
local function holder(raw, path, make)
  local at, last = raw, path:match("[^.]+$")
  for name in path:sub(1, #path - #last):gmatch("[^.]+") do
    if at[name] == nil and make then at[name] = {} end
    at = at[name]
    if type(at) ~= "table" then return nil end
  end
  return at, last
end

-- Moves the values of aliases to their keys. Raises an error if an alias and its key have different values.
local function move_aliases(state, raw, node)
  for _, row in ipairs(node.rows) do
    local from, key = holder(raw, row.path)
    local value = row.status == "alias" and from and from[key]
    if value == json.null or value == "auto" then value = nil end
    if value then
      local problem = check.problem(value, row.type)
      if problem then state:fail("%s %s", row.path, problem) end
      if row.as then value = row.as(value) end
    end
    if value then
      local target, name = holder(raw, row.words, true)
      if not target then state:fail("%s is given, but the parent of %s is not a table", row.path, row.words) end
      if target[name] ~= nil and target[name] ~= json.null and target[name] ~= value then
        state:fail("%s and %s are both given%s; they mean the same, keep one", state:shown(row.words), row.path,
          type(value) == "table" and "" or (" (%s and %s)"):format(check.show(target[name]), check.show(value)))
      end
      target[name], state.spelt[row.words] = value, row.path
    end
    if row.status == "alias" and from then from[key] = nil end
  end
  for _, sub in ipairs(node.subs) do move_aliases(state, raw, sub.node) end
end

local function same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  for key, value in pairs(a) do if b[key] ~= value then return false end end
  return #a == #b
end

-- Adds values that a script has set outside the configuration. `asked` maps a path to { value, place }. Raises an error
-- if the configuration has a different value at this path.
local function add_asked(state, raw, asked)
  for path, given in pairs(asked) do
    local target, name = holder(raw, path, true)
    if not target then state:fail("%s is given, but the parent of %s is not a table", given[2], path) end
    local had = target[name]
    if had ~= nil and had ~= json.null and had ~= "auto" and not same(had, given[1]) then
      state:fail("%s is %s and %s is %s; they mean the same, keep one", state:shown(path), check.show(had), given[2],
        check.show(given[1]))
    end
    if had == nil then state.spelt[path] = given[2] end
    target[name] = given[1]
  end
end

-- Paths that later checks add to a checked table.
local DERIVED = { precision = true, counts_micro_batches = true, rate_given = true, optimizer_given = true,
  grad_accum_dtype = true, ["fp16.dynamic"] = true,
  ["fp16.initial_scale"] = true, ["zero_optimization.offload_optimizer.stays"] = true }

--- Converts a checked table back to a raw configuration. The result has the keys whose paths are in `given`, and the
--- keys whose values differ from their defaults.
---@param cfg table
---@param given table<string, boolean> paths
---@return table raw
function check.written(cfg, given)
  local function section(node, values, kind)
    for name, variant in pairs(node.variants or {}) do if name == kind then node = variant end end
    local out = {}
    for key, value in pairs(values) do
      local path = (node.path ~= "" and node.path .. "." or "") .. tostring(key)
      local row, sub = node.row[key], nil
      for _, under in ipairs(node.subs) do if under.name == key then sub = under.node end end
      if sub and type(value) == "table" then
        out[key] = section(sub, value, values.type)
        if next(out[key]) == nil and not given[path] then out[key] = nil end
      elseif not DERIVED[path] and (not row or given[path] or not same(value, row.default)) then
        out[key] = copy(value)
      end
    end
    return out
  end
  return section(schema_root(), cfg)
end

--- Checks a raw table against the schema. Modifies the table.
---@param raw table
---@param name string
---@param auto? table<string, any>
---@param asked? table<string, any[]> path -> { value, place } for values that were set outside the configuration
---@param later? boolean
---@return table cfg
---@return ps.config.State state
function check.run(raw, name, auto, asked, later)
  local state = setmetatable({ name = name, auto = auto or {}, later = later or false, given = {}, defaulted = {},
    spelt = {}, ignored = {}, notes = {} }, State)
  if #raw > 0 then state:fail("a list was given; expected a table of settings") end
  check_auto(state)
  move_aliases(state, raw, schema_root())
  add_asked(state, raw, asked or {})
  local memory = raw.memory
  if memory ~= nil and memory ~= json.null and type(memory) ~= "table" then
    if memory ~= "plain" and memory ~= "chunk" and memory ~= "auto" then
      state:fail('memory is %s; expected "plain", "chunk" or a table of budgets such as { host = "16GiB" }',
        check.show(memory))
    end
    raw.memory = memory ~= "auto" and { kind = memory } or nil
  end
  return take_section(state, schema_root(), raw), state
end

return check
