-- SPDX-License-Identifier: BSD-3-Clause
-- The completions that TAB offers at the prompt: keywords and globals, fields after a dot, and methods after a colon.
-- Values are looked up through fields and __index. Functions are never called, even if the line contains calls.
local complete = {}

local keywords = {}
for w in ([[and break do else elseif end false for function goto if in local nil not or repeat return then true
    until while]]):gmatch("%a+") do keywords[#keywords + 1] = w end

--- Returns the table of methods of a value whose metatable is not visible to Lua, such as a value of an FFI type.
--- Returns nil if there is none. Replace this function to support other types.
---@param value any
---@return table|nil
function complete.methods_of(value)
  local ok, tensor = pcall(require, "ps.tensor")           -- the prompt also works without the engine
  if ok and require("ps.tensor.pretty").is_tensor(value) then return tensor.methods() end
  return nil
end

---@param t any
---@param key any
---@return any
local function get(t, key)
  local ok, value = pcall(function() return t[key] end)
  if ok then return value end
  return nil
end

---@param v any
---@return boolean
local function callable(v)
  if type(v) == "function" or type(v) == "cdata" then return type(v) == "function" end
  local mt = debug.getmetatable(v)
  return type(mt) == "table" and rawget(mt, "__call") ~= nil
end

--- Returns every name that can follow `value` and a dot, with its value. After a colon, returns only methods. If the
--- value's __index is a function, its metatable may have a function __names(value). __names returns a table of fields,
--- and a second value whose names also belong to the result. A value with __names has no methods of its own.
---@param value any
---@param methods_only boolean
---@return table<string, any>
local function names_of(value, methods_only)
  local found, seen, source = {}, {}, value
  local function add(t)
    for k, v in next, t do
      local fits = not methods_only or type(v) == "function"
      if fits and type(k) == "string" and k:match("^[%a_][%w_]*$") and found[k] == nil then
        found[k] = v
      end
    end
  end
  while source ~= nil and not seen[source] do
    seen[source] = true
    local mt = type(source) ~= "cdata" and debug.getmetatable(source)
    local names = type(mt) == "table" and rawget(mt, "__names")
    if type(source) == "table" and not (names and methods_only) then add(source) end
    local methods = complete.methods_of(source)
    if type(methods) == "table" then add(methods) end
    if names then
      local fields
      fields, source = names(source)
      add(fields)
    else
      source = type(mt) == "table" and rawget(mt, "__index") or nil
    end
    if type(source) == "function" then source = nil end
  end
  return found
end

--- Returns the value of the chain at the end of `text`. A chain consists of names and constant indices, such as
--- "a.b[1].c". Returns nil if there is no chain, or if a name in it has no value.
---@param text string
---@param root table the table that contains the first name
---@return any
local function resolve(text, root)
  local keys = {}
  repeat
    local before, key = text:match("^(.-)([%a_][%w_]*)$")
    local name = key ~= nil
    if not name then
      before, key = text:match("^(.-)%[(%-?%d+)%]$")
      key = tonumber(key)
      if key == nil then before, key = text:match("^(.-)%[[\"']([^\"'%]]*)[\"']%]$") end
      if key == nil then return nil end
    end
    table.insert(keys, 1, key)
    local dot = name and before:sub(-1) == "." and before:sub(-2) ~= ".."
    text = dot and before:sub(1, -2) or before
  until name and not dot
  if text:find("[:%w]$") then return nil end
  local value = root
  for _, key in ipairs(keys) do
    if value == nil then return nil end
    value = get(value, key)
  end
  return value
end

--- Returns the sorted names that complete the end of `text`, and the part of `text` that these names replace.
---@param text string the text before the cursor
---@param environment? table the environment of statements (default: the globals)
---@return string[] names The name of a function ends in "(".
---@return string prefix
function complete.candidates(text, environment)
  local root = environment or _G
  local path, separator, prefix = text:match("^(.*)([%.:])([%w_]*)$")
  local found
  if path and path:find("[%w_%]]$") then
    local value = resolve(path, root)
    if value == nil then return {}, prefix end
    found = names_of(value, separator == ":")
  else
    prefix = text:match("[%a_][%w_]*$") or ""
    if text:sub(1, #text - #prefix):find("[%w%.:]$") then return {}, prefix end
    found = names_of(root, false)
    for _, w in ipairs(keywords) do
      if found[w] == nil then found[w] = false end
    end
  end
  local names = {}
  for name, value in pairs(found) do
    if name:sub(1, #prefix) == prefix and (prefix ~= "" or name:sub(1, 1) ~= "_") then
      names[#names + 1] = callable(value) and name .. "(" or name
    end
  end
  table.sort(names)
  return names, prefix
end

--- Formats names in columns. Names are sorted from top to bottom.
---@param names string[]
---@param width integer
---@return string
local function columns(names, width)
  local widest = 0
  for _, n in ipairs(names) do widest = math.max(widest, #n) end
  local across = math.max(1, math.floor(width / (widest + 2)))
  local down = math.ceil(#names / across)
  local lines = {}
  for row = 1, down do
    local cells = {}
    for i = row, #names, down do cells[#cells + 1] = names[i] .. (" "):rep(widest + 2 - #names[i]) end
    lines[row] = (table.concat(cells):gsub("%s+$", ""))
  end
  return table.concat(lines, "\n")
end

--- Returns the text that the line editor inserts at the cursor. If there are several completions, also returns the list
--- that the line editor shows.
---@param text string
---@param width integer
---@param environment? table the environment of statements (default: the globals)
---@return string insert, string|nil listing
function complete.tab(text, width, environment)
  local names, prefix = complete.candidates(text, environment)
  if #names == 0 then return "", nil end
  local common = names[1]
  for _, n in ipairs(names) do
    local i = 1
    while i <= #common and common:byte(i) == n:byte(i) do i = i + 1 end
    common = common:sub(1, i - 1)
  end
  local insert = common:sub(#prefix + 1)
  if insert == "" and #names > 1 then return "", columns(names, width) end
  return insert, nil
end

return complete
