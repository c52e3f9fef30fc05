-- SPDX-License-Identifier: BSD-3-Clause
-- Helps with scripts that are ported from PyTorch, DeepSpeed, Hugging Face and PatrickStar.
-- A name of these libraries that psluajit lacks has a stand-in. Calling the stand-in, or reading a field of it, is an
-- error. The error says which call of psluajit to use, or describes a workaround.
-- Any other unknown name of ps, ps.F and ps.nn is an error that names the nearest known name. Any other unknown name of
-- an object is nil. If a script's own module defines a name, the definition is used.
local caller = require "ps.core.caller"
local nearest = require "ps.core.nearest"

local foreign = {}

local NAMES                                                -- the table of foreign_names.lua; nil until it is loaded
local function names_of(place)
  NAMES = NAMES or require "ps.core.foreign_names"
  return NAMES[place]
end

-- The form of a name in errors, by place. A name in a public table ps.X has the form "ps.X.%s".
local WHOLE = setmetatable({ ps = "ps.%s", nn = "nn.%s", optimizer = "optimizer:%s", t = "t:%s",
  scaler = "scaler:%s", module = "module:%s", model = "model:%s", schedule = "schedule.%s", loader = "loader:%s" },
  { __index = function(_, place) return "ps." .. place .. ".%s" end })

local made = {}                                     -- the stand-ins that exist, by place and name

local function stand_in(place, name, text)
  local whole = WHOLE[place]:format(name)
  local function refuse() caller.error(("%s does not exist here: %s"):format(whole, text)) end
  local meta = { __names = function() return {} end,
    __tostring = function() return ("%s (does not exist here: %s)"):format(whole, text) end }
  for event in ("call index newindex add sub mul div mod pow unm concat lt le"):gmatch "%S+" do
    meta["__" .. event] = refuse
  end
  return setmetatable({}, meta)
end

--- Returns the stand-in for a name that other libraries have. Returns nil for an unknown name.
---@param place string a key of foreign_names.lua
---@param name any
---@return table?
function foreign.find(place, name)
  local names = names_of(place)
  local text = names and names[name]
  if not text then return nil end
  local key = place .. ":" .. name
  if not made[key] then made[key] = stand_in(place, name, text) end
  return made[key]
end

--- Returns the text ": write ..." about a name that other libraries have. Returns nil for an unknown name.
---@param place string a key of foreign_names.lua
---@param name string
---@return string?
function foreign.advice(place, name)
  local text = names_of(place)[name]
  return text and ": " .. text
end

-- Tables whose names errors can suggest. Each has the functions has(name) and names(). ORDER is the order in which they
-- are searched for a name that another table lacks.
local homes, ORDER = {}, { "ps", "F", "t", "nn", "optim", "sched" }

local function form_of(place) return place == "nn" and "ps.nn.%s" or WHOLE[place] end

--- Registers a table of names. An error about a missing name can then suggest a name of this table.
---@param place string "t", "ps", or X for a table ps.X
---@param has fun(name: string): boolean
---@param names fun(): string[]
function foreign.home(place, has, names) homes[place] = { has = has, names = names } end

-- The lists of torch_names.lua that apply to each place.
local LISTS = { ps = { "ops" }, t = { "ops" }, F = { "F", "ops" }, nn = { "nn" } }

--- Returns the text about a name that PyTorch has and psluajit lacks. Returns nil for other names.
---@param place string "ps", "t", "F" or "nn"
---@param name string
---@return string?
function foreign.lacks(place, name)
  for _, list in ipairs(LISTS[place] or {}) do
    if (" " .. require "ps.core.torch_names"[list] .. " "):find("%s" .. name:gsub("%p", "%%%0") .. "%s") then
      local formula = names_of "formulas"[name]
      return ("psluajit lacks this %s of PyTorch%s"):format(list == "nn" and "class" or "function",
        formula and ": write " .. formula or "")
    end
  end
end

--- Returns the end of an error about a missing name. If the name is a function of PyTorch that psluajit lacks, the end
--- says so and may contain a formula. If another table has the name, the end is a text such as "; write t:view(...)".
--- Otherwise it suggests the nearest name, or it is "".
---@param place string the table that lacks the name
---@param name string
---@return string
function foreign.instead(place, name)
  local lacks = foreign.lacks(place, name)
  if lacks then return "; " .. lacks end
  for _, other in ipairs(ORDER) do
    local home = other ~= place and homes[other]
    if home and home.has(name) then return ("; write %s(...)"):format(form_of(other):format(name)) end
  end
  local base = place == "t" and name:match "^(.+[^_])_$"
  if base and homes.t.has(base) then return ("; it has no form in place: write x = x:%s(...)"):format(base) end
  lacks = base and foreign.lacks(place, base)
  if lacks then return "; " .. lacks end
  local near = homes[place] and nearest.find(name, homes[place].names())
  return near and ("; did you mean %s?"):format(form_of(place):format(near)) or ""
end

--- Returns the stand-in for a name that other libraries have. Any other unknown name is an error that names the nearest
--- known name.
---@param place string "ps", or X for a table ps.X
---@param name any
---@return table?
function foreign.known(place, name)
  local found = foreign.find(place, name)
  if found or type(name) ~= "string" then return found end
  caller.error(("%s does not exist%s"):format(WHOLE[place]:format(name), foreign.instead(place, name)))
end

--- Sets a metatable for the table t. It returns the stand-ins of a place for names that t lacks.
---@param t table without a metatable
---@param place string
---@return table t
function foreign.stand(t, place)
  return setmetatable(t, { __index = function(_, name) return foreign.find(place, name) end })
end

--- Makes reading a missing name of a public table ps.X call foreign.known. psluajit's own files use rawget for names
--- that may be missing. A value that is not a table, or that already has an __index, is returned unchanged.
---@param t any
---@param place string X
---@return any t
function foreign.public(t, place)
  local meta = type(t) == "table" and (getmetatable(t) or {})
  if not meta or meta.__index then return t end
  meta.__index = function(_, name) return foreign.known(place, name) end
  if not homes[place] then
    foreign.home(place, function(name) return rawget(t, name) ~= nil end, function() return caller.sorted_names(t) end)
  end
  return setmetatable(t, meta)
end

--- Returns whether foreign_names.lua has names for a place.
---@param place string
---@return boolean
function foreign.is_place(place) return names_of(place) ~= nil and place ~= "formulas" end

--- Returns the names of a place, for a spec.
---@param place string
---@return table<string, string> names what to write instead, by name
function foreign.names(place) return names_of(place) end

return foreign
