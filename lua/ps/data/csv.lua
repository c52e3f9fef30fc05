-- SPDX-License-Identifier: BSD-3-Clause
-- Reads files whose values are separated by commas (RFC 4180) or tabs. The first row contains the names of the fields.
-- A value may be enclosed in double quotes. A quoted value may contain separators and line ends, and two double quotes
-- in it represent one double quote. All values are read as texts.
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local error = caller.error
local place_array = array "double"

-- Finds the end of the record that begins at byte `at`. Returns the position of the record's last byte and the position
-- of the next record's first byte.
local function record_end(text, at, separator)
  local special = '[\n"]'
  local from = at
  while true do
    local stop = text:find(special, from)
    if not stop then return #text, #text + 1 end
    if text:byte(stop) == 10 then return stop - 1, stop + 1 end
    local before = text:sub(stop - 1, stop - 1)
    if stop == at or before == separator then              -- a quote at the start of a value begins a quoted value
      local close = stop
      repeat
        close = text:find('"', close + 1, true)
        if not close then return nil, stop end
        local doubled = text:byte(close + 1) == 34
        if doubled then close = close + 1 end
      until not doubled
      from = close + 1
    else
      from = stop + 1                                      -- a quote in an unquoted value is an ordinary character
    end
  end
end

-- Returns the values of a record.
local function values_of(record, separator)
  local list, at = {}, 1
  while true do
    local value, after
    if record:byte(at) == 34 then
      local close = at
      repeat
        close = record:find('"', close + 1, true)
        local doubled = record:byte(close + 1) == 34
        if doubled then close = close + 1 end
      until not doubled
      local rest = record:find(separator, close + 1, true) or #record + 1
      value = record:sub(at + 1, close - 1):gsub('""', '"') .. record:sub(close + 1, rest - 1)
      after = rest
    else
      after = record:find(separator, at, true) or #record + 1
      value = record:sub(at, after - 1)
    end
    list[#list + 1] = value
    if after > #record then return list end
    at = after + 1
    if at > #record then
      list[#list + 1] = ""
      return list
    end
  end
end

-- Returns an array with three numbers per record (its first byte, its last byte and its line number), and the number of
-- records. Empty records are omitted.
local function scan(path, text, separator)
  local room, n, places = 1024, 0, place_array(3 * 1024)
  local at, line = 1, 1
  while at <= #text do
    local last, after = record_end(text, at, separator)
    if not last then
      local _, lines = text:sub(at, after):gsub("\n", "")
      error(("%s:%d: the closing quote of a value is missing"):format(path, line + lines))
    end
    local stop = text:byte(last) == 13 and last - 1 or last
    if stop >= at then
      if n == room then
        local more = place_array(6 * room)
        require("ffi").copy(more, places, 24 * room)
        room, places = 2 * room, more
      end
      places[3 * n], places[3 * n + 1], places[3 * n + 2] = at, stop, line
      n = n + 1
    end
    local _, lines = text:sub(at, after - 1):gsub("\n", "")
    at, line = after, line + lines
  end
  return places, n
end

--- Returns the rows of a file as a ps.data.Node (see files.lua).
---@param path string path of the file, for errors
---@param text string contents of the file, which must be valid UTF-8
---@param separator string "," or "\t"
---@return {n: integer, name: string, get: fun(i: integer): table, place: fun(i: integer): string}
return function(path, text, separator)
  local places, n = scan(path, text, separator)
  if n == 0 then error(path .. ": the file is empty; its first row must have the names of its fields") end
  local function record(k) return values_of(text:sub(places[3 * k], places[3 * k + 1]), separator) end
  local names, known = record(0), {}
  for k, name in ipairs(names) do
    if name == "" or known[name] then
      error(("%s:1: field %d %s"):format(path, k, name == "" and "has no name"
        or "has the same name as another field, " .. name))
    end
    known[name] = true
  end
  local node = { n = n - 1, name = path }
  function node.place(i) return ("%s:%.0f"):format(path, places[3 * i + 2]) end
  function node.get(i)
    local list, row = record(i), {}
    if #list ~= #names then
      error(("%s: the row has %d values, but the first row names %d fields"):format(node.place(i), #list, #names))
    end
    for k, name in ipairs(names) do row[name] = list[k] end
    return row
  end
  return node
end
