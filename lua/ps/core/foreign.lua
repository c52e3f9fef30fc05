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

-- form of a name in errors, by place
local WHOLE = { F = "ps.F.%s",
  ps = "ps.%s", nn = "nn.%s", optim = "ps.optim.%s", sched = "ps.sched.%s", optimizer = "optimizer:%s",
  scaler = "scaler:%s", module = "module:%s", model = "model:%s", loader = "loader:%s" }

local made = {}                                     -- stand-ins, keyed by place and name

local function stand_in(place, name, text)
  local whole = WHOLE[place]:format(name)
  local function refuse() caller.error(("%s does not exist here: %s"):format(whole, text)) end
  return setmetatable({}, { __call = refuse, __index = refuse, __newindex = refuse, __names = function() return {} end,
    __tostring = function() return ("%s (does not exist here: %s)"):format(whole, text) end })
end

--- Returns the stand-in for a name that other libraries have, or nil for an unknown name.
---@param place string a key of foreign_names.lua
---@param name any
---@return table?
function foreign.find(place, name)
  local text = names_of(place)[name]
  if not text then return nil end
  local key = place .. ":" .. name
  if not made[key] then made[key] = stand_in(place, name, text) end
  return made[key]
end

-- Tables to whose names errors can refer: each table's form of a name, and the functions has(name) and names().
local HOMES = { ps = "ps.%s", F = "ps.F.%s", nn = "ps.nn.%s", t = "t:%s" }
local homes = {}

--- Registers a table of names, so that an error about a missing name can suggest one of them.
---@param place "ps"|"F"|"nn"|"t"
---@param has fun(name: string): boolean
---@param names fun(): string[]
function foreign.home(place, has, names) homes[place] = { has = has, names = names } end

--- Returns the end of an error about a missing name: "; write t:view(...)", or the nearest name, or an empty text.
---@param place "ps"|"F"|"nn"|"t" the table that lacks the name
---@param name string
---@return string
function foreign.instead(place, name)
  for _, other in ipairs { "ps", "F", "t", "nn" } do
    local home = other ~= place and homes[other]
    if home and home.has(name) then return ("; write %s(...)"):format(HOMES[other]:format(name)) end
  end
  local near = homes[place] and nearest.find(name, homes[place].names())
  return near and ("; did you mean %s?"):format(HOMES[place]:format(near)) or ""
end

--- Returns the stand-in for a name that other libraries have. Any other unknown name is an error that names the nearest
--- known one.
---@param place "ps"|"F"|"nn"
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

--- Returns whether there are names for a place.
---@param place string
---@return boolean
function foreign.is_place(place) return WHOLE[place] ~= nil end

--- Returns the names of a place. A spec uses it.
---@param place string
---@return table<string, string> names what to write instead, by name
function foreign.names(place) return names_of(place) end

return foreign
