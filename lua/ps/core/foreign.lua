-- SPDX-License-Identifier: BSD-3-Clause
-- Helps scripts that are ported from PyTorch, DeepSpeed, Hugging Face and PatrickStar. A name that psluajit lacks is a
-- stand-in: calling it, or reading a field of it, is an error that names the psluajit call to use, or a workaround.
-- Other unknown names of ps, ps.F and ps.nn are errors that name the nearest known name, and other unknown names of
-- objects are nil. A name that a script's own module defines has that definition.
local caller = require "ps.core.caller"
local nearest = require "ps.core.nearest"

local foreign = {}

local NAMES                                                -- the table of foreign_names.lua, once loaded
local function names_of(place)
  NAMES = NAMES or require "ps.core.foreign_names"
  return NAMES[place]
end

-- Form of a name in errors, by place. Names of a public table ps.X have the form "ps.X.%s".
local WHOLE = setmetatable({ ps = "ps.%s", nn = "nn.%s", optimizer = "optimizer:%s", t = "t:%s",
  scaler = "scaler:%s", module = "module:%s", model = "model:%s", schedule = "schedule.%s", loader = "loader:%s" },
  { __index = function(_, place) return "ps." .. place .. ".%s" end })

local made = {}                                     -- stand-ins, keyed by place and name

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

--- Returns the stand-in for a name that other libraries have, or nil for an unknown name.
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

--- Returns the text about a name that other libraries have as ": write ...", or nil for an unknown name.
---@param place string a key of foreign_names.lua
---@param name string
---@return string?
function foreign.advice(place, name)
  local text = names_of(place)[name]
  return text and ": " .. text
end

-- Tables to whose names errors can refer, with the functions has(name) and names(), and the order in which they are
-- searched for a name that another table lacks.
local homes, ORDER = {}, { "ps", "F", "t", "nn", "optim", "sched" }

local function form_of(place) return place == "nn" and "ps.nn.%s" or WHOLE[place] end

--- Registers a table of names, so that an error about a missing name can suggest one of them.
---@param place string "t", "ps", or X for a table ps.X
---@param has fun(name: string): boolean
---@param names fun(): string[]
function foreign.home(place, has, names) homes[place] = { has = has, names = names } end

-- tables of torch_names.lua that apply to a place
local LISTS = { ps = { "ops" }, t = { "ops" }, F = { "F", "ops" }, nn = { "nn" } }

--- Returns the text about a name that PyTorch has and psluajit lacks, or nil for other names.
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

--- Returns the end of an error about a missing name: "; write t:view(...)", or how to compute a function of PyTorch, or
--- the nearest name, or an empty text.
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
--- known one.
---@param place string "ps", or X for a table ps.X
---@param name any
---@return table?
function foreign.known(place, name)
  local found = foreign.find(place, name)
  if found or type(name) ~= "string" then return found end
  caller.error(("%s does not exist%s"):format(WHOLE[place]:format(name), foreign.instead(place, name)))
end

--- Sets a metatable that returns the stand-ins of a place for a table's missing names.
---@param t table without a metatable
---@param place string
---@return table t
function foreign.stand(t, place)
  return setmetatable(t, { __index = function(_, name) return foreign.find(place, name) end })
end

--- Makes a missing name of a public table ps.X an error, as foreign.known. psluajit's own files read names that may be
--- missing by rawget. Returns values that are not tables unchanged.
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

--- Returns whether there are names for a place.
---@param place string
---@return boolean
function foreign.is_place(place) return names_of(place) ~= nil and place ~= "formulas" end

--- Returns the names of a place. A spec uses it.
---@param place string
---@return table<string, string> names what to write instead, by name
function foreign.names(place) return names_of(place) end

return foreign
