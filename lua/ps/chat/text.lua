-- SPDX-License-Identifier: BSD-3-Clause
-- The strings of a chat template. They record where each byte comes from. A string is one of two kinds. A plain Lua
-- string contains only bytes that the template wrote. A ps.chat.Text is a string that is divided into segments. Each
-- segment has a mark, which says, for example, from which message the segment was copied. All functions in this file
-- accept both kinds, and return a plain string if no byte has a mark. Positions count bytes, unless the description of
-- a function says code points.
local text = {}

-- Limits that keep a template from using all memory:
--   text.LARGEST  the size of a string in bytes
--   LISTED        the size in bytes of a string from which a list of its code points is made
--   PARTS         the number of parts into which a string is split
text.LARGEST = 64 * 1024 * 1024
local LISTED, PARTS = 16 * 1024 * 1024, 1000000

local function too_much(what, n, most)
  error({ chat_template = ("%s: %d; the limit is %d"):format(what, n, most) }, 0)
end

-- STEPS limits the work of a rendering. The work is counted in steps: one step for each statement, each iteration of a
-- loop, each call, each item of a list that is read or compared, and each BYTES bytes of a string. The counter is a
-- global variable of this module, because only one rendering runs at a time.
local STEPS, BYTES = 20e6, 32
local steps = -math.huge                                   -- steps are not limited outside of a rendering

--- Calls fn(...) as a rendering: its work is counted and limited.
---@param fn fun(...): any
---@param ... any
---@return boolean ok
---@return any result
function text.counted(fn, ...)
  steps = 0
  local ok, result = pcall(fn, ...)
  steps = -math.huge
  return ok, result
end

--- Adds n steps to the work of the current rendering. If the work exceeds STEPS, raises an error of the template.
---@param n number
function text.work(n)
  steps = steps + n
  if steps > STEPS then
    error({ chat_template = ("the template needs more than %d steps"):format(STEPS) }, 0)
  end
end
local work = text.work

--- Counts the work of reading a value: one step, plus one step for each item of a list or dict, or for each BYTES bytes
--- of a string.
---@param value any
function text.charge(value)
  local n = 0
  if text.is(value) then n = #text.flat(value) / BYTES
  elseif type(value) == "table" then n = value.keys and #value.keys or #value end
  work(1 + n)
end

---@class ps.chat.Text
---@field s string the bytes of the string
---@field to integer[] position of each segment's last byte
---@field mark table[]|false[] mark of each segment, which says where the segment comes from; false if the template
--- wrote the segment
---@field safe? boolean true if the filter `safe` created the string. As in Jinja, a string that is appended to a safe
--- string is escaped for HTML, unless the appended string is safe too.
local Text = {}
Text.__index = Text

-- The characters for which Python's str.isspace returns true, in UTF-8.
local SPACES = {}
for c in (" \t\n\v\f\r\28\29\30\31\194\133\194\160\225\154\128\226\128\168\226\128\169\226\128\175"
    .. "\226\129\159\227\128\128"):gmatch "[%z\1-\127\194-\244][\128-\191]*" do SPACES[c] = true end
for last = 128, 138 do SPACES["\226\128" .. string.char(last)] = true end

--- Returns whether a value is a Lua string or a ps.chat.Text.
---@param value any
---@return boolean
function text.is(value) return type(value) == "string" or getmetatable(value) == Text end

--- Returns the bytes of a string without the marks.
---@param value string|ps.chat.Text
---@return string
function text.flat(value) return type(value) == "string" and value or value.s end

--- Returns a string in which all bytes have the given mark.
---@param s string
---@param mark table
---@return string|ps.chat.Text
function text.marked(s, mark)
  if s == "" then return s end
  return setmetatable({ s = s, to = { #s }, mark = { mark } }, Text)
end

--- Returns a copy of a mark with one additional field.
---@param mark table|false
---@param field string
---@param value any
---@return table
function text.mark(mark, field, value)
  local new = { [field] = value }
  for key, v in pairs(mark or {}) do if key ~= field then new[key] = v end end
  return new
end

--- Converts a string to Markup, Jinja's type for strings that must not be escaped for HTML.
---@param value string|ps.chat.Text
---@return ps.chat.Text
function text.markup(value)
  if type(value) ~= "string" then
    return setmetatable({ s = value.s, to = value.to, mark = value.mark, safe = true }, Text)
  end
  local some = value ~= ""
  return setmetatable({ s = value, to = some and { #value } or {}, mark = some and { false } or {}, safe = true }, Text)
end

--- Returns whether a value is Jinja's Markup.
---@param value any
---@return boolean
function text.is_markup(value) return getmetatable(value) == Text and value.safe == true end

local ENTITIES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&#34;", ["'"] = "&#39;" }

--- Escapes the five special characters of HTML. Returns Markup unchanged.
---@param value string|ps.chat.Text
---@return string|ps.chat.Text
function text.escaped(value)
  if text.is_markup(value) then return value end
  return text.map(value, function(s) return (s:gsub("[&<>\"']", ENTITIES)) end)
end

--- Calls fn(first, last, mark) for each segment of a string. `first` and `last` are the positions of the segment's
--- first and last byte.
---@param value string|ps.chat.Text
---@param fn fun(first: integer, last: integer, mark: table|false)
function text.each(value, fn)
  if type(value) == "string" then
    if value ~= "" then fn(1, #value, false) end
    return
  end
  local first = 1
  for i, last in ipairs(value.to) do
    fn(first, last, value.mark[i])
    first = last + 1
  end
end

--- Concatenates the strings of a list.
---@param pieces (string|ps.chat.Text)[]
---@return string|ps.chat.Text
function text.concat(pieces)
  local flat, any, nbytes = {}, false, 0
  for i, piece in ipairs(pieces) do
    flat[i] = text.flat(piece)
    any = any or type(piece) ~= "string"
    nbytes = nbytes + #flat[i]
  end
  if nbytes > text.LARGEST then too_much("bytes of a string", nbytes, text.LARGEST) end
  work(#pieces + nbytes / BYTES)
  local s = table.concat(flat)
  if not any then return s end
  local to, marks, at = {}, {}, 0
  for _, piece in ipairs(pieces) do
    text.each(piece, function(first, last, mark)
      at = at + last - first + 1
      if marks[#marks] == mark and #marks > 0 then to[#to] = at else to[#to + 1], marks[#marks + 1] = at, mark end
    end)
  end
  return setmetatable({ s = s, to = to, mark = marks }, Text)
end

--- Repeats a string n times.
---@param value string|ps.chat.Text
---@param n integer
---@return string|ps.chat.Text
function text.rep(value, n)
  if type(value) == "string" then return value:rep(n) end
  local pieces = {}
  for i = 1, n do pieces[i] = value end
  return text.concat(pieces)
end

--- Returns a copy of a string with other marks. The new mark of each segment is change(old mark).
---@param value string|ps.chat.Text
---@param change fun(mark: table|false): table|false
---@return string|ps.chat.Text
function text.remark(value, change)
  local to, marks, any = {}, {}, false
  text.each(value, function(_, last, mark)
    to[#to + 1], marks[#marks + 1] = last, change(mark)
    any = any or marks[#marks]
  end)
  if not any then return text.flat(value) end
  return setmetatable({ s = text.flat(value), to = to, mark = marks }, Text)
end

--- Returns bytes `first` to `last` of a string.
---@param value string|ps.chat.Text
---@param first integer
---@param last integer
---@return string|ps.chat.Text
function text.sub(value, first, last)
  if type(value) == "string" then return value:sub(first, last) end
  first, last = math.max(first, 1), math.min(last, #value.s)
  if first == 1 and last == #value.s then return value end
  local s = value.s:sub(first, last)
  if s == "" then return "" end
  local to, marks, any = {}, {}, false
  work(#value.to)
  text.each(value, function(from, till, mark)
    if from <= last and till >= first then
      to[#to + 1], marks[#marks + 1] = math.min(till, last) - first + 1, mark
      any = any or mark
    end
  end)
  if not any then return s end
  return setmetatable({ s = s, to = to, mark = marks }, Text)
end

--- Applies a function to the bytes of each segment, and joins the results. The function is called once per segment, so
--- its result must not depend on the bytes of other segments.
---@param value string|ps.chat.Text
---@param fn fun(s: string): string
---@return string|ps.chat.Text
function text.map(value, fn)
  work(#text.flat(value) / 16)
  if type(value) == "string" then return fn(value) end
  local pieces = {}
  text.each(value, function(first, last, mark)
    local s = fn(value.s:sub(first, last))
    pieces[#pieces + 1] = mark and text.marked(s, mark) or s
  end)
  return text.concat(pieces)
end

--- Returns a list of the positions at which the code points of a string begin. The last item of the list is #s + 1.
---@param s string valid UTF-8
---@return integer[]
function text.points(s)
  if #s > LISTED then too_much("bytes of a string whose characters are listed", #s, LISTED) end
  work(#s)
  local at = {}
  for i in s:gmatch "()[^\128-\191]" do at[#at + 1] = i end
  at[#at + 1] = #s + 1
  return at
end

--- Returns the number of code points in a string.
---@param value string|ps.chat.Text
---@return integer
function text.length(value)
  local s = text.flat(value)
  work(#s / BYTES)
  if not s:find "[\128-\255]" then return #s end
  local _, n = s:gsub("[^\128-\191]", "")
  return n
end

--- Returns the code points first, first + step, first + 2 * step and so on, up to but not including `last`. Code points
--- are counted from 0. `step` must not be 0.
---@param value string|ps.chat.Text
---@param first integer
---@param last integer
---@param step integer
---@return string|ps.chat.Text
function text.slice(value, first, last, step)
  if step == 1 and not text.flat(value):find "[\128-\255]" then return text.sub(value, first + 1, last) end
  local at = text.points(text.flat(value))
  if step == 1 then
    if last <= first then return "" end
    return text.sub(value, at[first + 1], at[last + 1] - 1)
  end
  local pieces = {}
  for i = first, last + (step > 0 and -1 or 1), step do
    pieces[#pieces + 1] = text.sub(value, at[i + 1], at[i + 2] - 1)
  end
  return text.concat(pieces)
end

-- Returns the set of code points that `strip` removes: the code points of `chars`, or spaces if `chars` is nil.
local function set_of(chars)
  if not chars then return SPACES end
  local set = {}
  for c in chars:gmatch "[^\128-\191][\128-\191]*" do set[c] = true end
  return set
end

--- Removes the code points of a set from the ends of a string, like Python's str.strip.
---@param value string|ps.chat.Text
---@param chars? string the code points of the set (default: Python's spaces)
---@param left boolean
---@param right boolean
---@return string|ps.chat.Text
function text.strip(value, chars, left, right)
  local s, set = text.flat(value), set_of(chars)
  local first, last = 1, #s
  while left and first <= last do
    local c = s:match("^[^\128-\191][\128-\191]*", first)
    if not c or not set[c] then break end
    first = first + #c
  end
  while right and last >= first do
    local from = last
    while from > first and s:find("^[\128-\191]", from) do from = from - 1 end
    if not set[s:sub(from, last)] then break end
    last = from - 1
  end
  return text.sub(value, first, last)
end

--- Returns whether a code point is a space by the rules of Python's str.isspace.
---@param c string the code point in UTF-8
---@return boolean
function text.is_space(c) return SPACES[c] == true end

--- Splits a string at separators, like str.split and str.rsplit of Python.
---@param value string|ps.chat.Text
---@param separator? string the separator; if it is nil, runs of spaces separate the parts, and empty parts are omitted
---@param limit integer maximum number of splits, or -1 for no limit
---@param from_right? boolean true: if there are more separators than `limit`, splits at the last of them (str.rsplit)
---@return (string|ps.chat.Text)[]
function text.split(value, separator, limit, from_right)
  local s, cuts = text.flat(value), {}                     -- cuts: {first byte, last byte} of each separator
  if separator then
    local at = 1
    while true do
      local first, last = s:find(separator, at, true)
      if not first then break end
      cuts[#cuts + 1], at = { first, last }, last + 1
      if #cuts > PARTS then too_much("parts of a split string", #cuts, PARTS) end
    end
    if from_right and limit >= 0 then                      -- separators may overlap: search again, from the right
      cuts = {}
      local till = #s
      while #cuts < limit do
        local first
        for i = till - #separator + 1, 1, -1 do
          if s:sub(i, i + #separator - 1) == separator then first = i; break end
        end
        if not first then break end
        table.insert(cuts, 1, { first, first + #separator - 1 })
        till = first - 1
      end
    end
  else
    value = text.strip(value, nil, true, true)
    s = text.flat(value)
    if s == "" then return {} end
    local start
    for at, c in s:gmatch "()([^\128-\191][\128-\191]*)" do
      if SPACES[c] then start = start or at
      elseif start then
        cuts[#cuts + 1], start = { start, at - 1 }, nil
        if #cuts > PARTS then too_much("parts of a split string", #cuts, PARTS) end
      end
    end
  end
  local n = limit < 0 and #cuts or math.min(limit, #cuts)
  work(#s / 16 + #cuts)
  local parts, from = {}, 1
  for i = from_right and #cuts - n + 1 or 1, from_right and #cuts or n do
    parts[#parts + 1] = text.sub(value, from, cuts[i][1] - 1)
    from = cuts[i][2] + 1
  end
  parts[#parts + 1] = text.sub(value, from, #s)
  return parts
end

--- Replaces every occurrence of `old` by `new`, like Python's str.replace.
---@param value string|ps.chat.Text
---@param old string
---@param new string|ps.chat.Text
---@param limit integer maximum number of replacements, or -1 for no limit
---@return string|ps.chat.Text
function text.replace(value, old, new, limit)
  local s, pieces, done = text.flat(value), {}, 0
  if old == "" then  -- an empty `old` matches before each code point and at the end
    local at = text.points(s)
    for i = 1, #at do
      if limit < 0 or done < limit then pieces[#pieces + 1], done = new, done + 1 end
      if i < #at then pieces[#pieces + 1] = text.sub(value, at[i], at[i + 1] - 1) end
    end
    return text.concat(pieces)
  end
  local at = 1
  while limit < 0 or done < limit do
    local first, last = s:find(old, at, true)
    if not first then break end
    pieces[#pieces + 1] = text.sub(value, at, first - 1)
    pieces[#pieces + 1] = new
    at, done = last + 1, done + 1
    work(1)
  end
  if done == 0 then return value end
  pieces[#pieces + 1] = text.sub(value, at, #s)
  return text.concat(pieces)
end

--- Joins a list of strings with a separator.
---@param pieces (string|ps.chat.Text)[]
---@param separator string|ps.chat.Text
---@return string|ps.chat.Text
function text.join(pieces, separator)
  local all = {}
  for i, piece in ipairs(pieces) do
    if i > 1 then all[#all + 1] = separator end
    all[#all + 1] = piece
  end
  return text.concat(all)
end

return text
