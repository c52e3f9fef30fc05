-- SPDX-License-Identifier: BSD-3-Clause
-- Reads and checks JSON objects in a tokenizer's files. Errors contain the file, the field and the value.
local caller = require "ps.core.caller"
local json = require "cjson"
local lfs = require "lfs"
local read_file = require "ps.core.read_file"
local without_bom = require "ps.core.bom"
local error = caller.error

local object = {}

--- Decodes a text that contains a JSON object or list.
---@param text string
---@param path string path of the file that contains the text, for errors
---@return table
function object.decode(text, path)
  local ok, value = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then
    error(("%s: %s"):format(path, ok and "it does not contain a JSON object" or tostring(value)))
  end
  return value
end

--- Reads a file that contains a JSON object.
---@param path string
---@return table? value nil if the file does not exist
function object.of_file(path)
  if lfs.attributes(path, "mode") ~= "file" then return nil end
  local text, why = read_file(path)
  if not text then error("cannot read a tokenizer's file: " .. why) end
  return object.decode(without_bom(text), path)
end

--- Returns whether a field is absent or null.
---@param value any
---@return boolean
function object.is_null(value) return value == nil or value == json.null end

-- Returns a value as a short text for an error.
local function shown(value)
  if value == json.null then return "null" end
  local ok, text = pcall(json.encode, value)
  text = ok and text or tostring(value)
  return #text > 60 and text:sub(1, 57) .. "..." or text
end

--- Raises an error that contains a file, a field and the field's value.
---@param path string
---@param field string
---@param value any
---@param why string
function object.refuse(path, field, value, why)
  error(("%s: %s = %s: %s"):format(path, field, shown(value), why))
end

--- Returns the value of a field. Raises an error if the value is not a list or an object. However, if `may_lack` is
--- true and the field is absent or null, returns {}.
---@param path string
---@param field string
---@param value any
---@param may_lack? boolean true: the field may be missing
---@return table
function object.listed(path, field, value, may_lack)
  if may_lack and object.is_null(value) then return {} end
  if type(value) ~= "table" then object.refuse(path, field, value, "it must be a list or an object") end
  return value
end

--- Raises an error if an object has an unknown field or a value of the wrong type. null is always allowed.
---@param path string
---@param where string path of the object in the file
---@param node any
---@param known table<string, string|any[]> for each field: the Lua type of its value, "any", or a list of values
function object.fields(path, where, node, known)
  if type(node) ~= "table" then object.refuse(path, where, node, "it must be an object") end
  for name, value in pairs(node) do
    local want = known[name]
    local field = where .. "." .. tostring(name)
    if want == nil and name ~= "type" then object.refuse(path, field, value, "this is not supported") end
    if want and want ~= "any" and not object.is_null(value) then
      local kind = type(want) == "table" and "value" or want
      if kind == "value" then
        local fits = false
        for _, one in ipairs(want) do fits = fits or value == one end
        if not fits then object.refuse(path, field, value, "this is not supported") end
      elseif type(value) ~= kind then
        object.refuse(path, field, value, "a " .. kind .. " expected")
      end
    end
  end
end

return object
