-- SPDX-License-Identifier: BSD-3-Clause
-- Makes the result of ps.trace(): a list of the moments of a step. Scripts can index the list, and it prints as a table
-- of at most 100 columns.
local caller = require "ps.core.caller"
local readable = require "ps.core.readable"
local view = require "ps.memory.view"
local error = caller.error

local trace = {}

local WIDTH = 100
local MOST = 40                -- largest number of rows that are printed without all = true
local EDGE = 16                -- if a trace has more than MOST rows, this number of rows is printed at each end

---@class ps.view.Use one use of a chunk
---@field chunk integer id
---@field kind string
---@field nbytes integer size of the chunk in bytes
---@field tier string tier of the chunk during the op
---@field write boolean whether the op changes the chunk's bytes
---@field ends boolean whether the chunk's contents are not needed after this use

---@class ps.view.Moment
---@field moment integer index of the moment in the step, counted from 0
---@field action string "forward", "backward", "update", "reduce" or "norm"; "input" and "weight" are the halves of a
---  backward that is split
---@field nbytes integer total size in bytes of the chunks that the moment uses
---@field uses ps.view.Use[]

local EMPTY = "no trace: no step has been planned yet, or the model's forward reads values and its first step has " ..
  "not ended"

-- Returns a text for a list of uses, such as "param 0 1*, grad 7-". The ids of chunks are grouped by kind, in the order
-- of the uses. "*" marks a chunk that is written, and "-" marks a chunk whose contents are not needed after this use.
local function uses_text(uses)
  local kinds, ids = {}, {}
  for _, use in ipairs(uses) do
    if not ids[use.kind] then kinds[#kinds + 1], ids[use.kind] = use.kind, {} end
    table.insert(ids[use.kind], ("%d%s%s"):format(use.chunk, use.write and "*" or "", use.ends and "-" or ""))
  end
  for i, kind in ipairs(kinds) do kinds[i] = kind .. " " .. table.concat(ids[kind], " ") end
  return table.concat(kinds, ", ")
end

local function tiers_text(uses)
  local names, known = {}, {}
  for _, use in ipairs(uses) do
    if not known[use.tier] then known[use.tier], names[#names + 1] = true, use.tier end
  end
  return table.concat(names, "+")
end

-- Returns the rows of the printed table. A row combines consecutive moments that have the same action and the same
-- uses. It contains the indices of its first and last moment, and the data of the other columns.
local function rows_of(moments)
  local rows = {}
  for _, m in ipairs(moments) do
    local last, text, tiers = rows[#rows], uses_text(m.uses), tiers_text(m.uses)
    if last and last.last == m.moment - 1 and last.action == m.action and last.text == text and last.tiers == tiers then
      last.last = m.moment
    else
      rows[#rows + 1] = { first = m.moment, last = m.moment, action = m.action, tiers = tiers, nbytes = m.nbytes,
        text = text, uses = #m.uses }
    end
  end
  return rows
end

local COLUMNS = { { title = "moments" }, { title = "action", left = true }, { title = "tier", left = true },
  { title = "bytes" }, { title = "chunks", left = true } }

-- Returns the text of a row's chunks, shortened to at most `room` columns.
local function shorten(row, room)
  if #row.text <= room then return row.text end
  local tail = (" .. (%d)"):format(row.uses)
  return row.text:sub(1, room - #tail):match("^(.*) ") .. tail
end

local function cells(row)
  local moments = ("%d"):format(row.first)
  if row.last > row.first then moments = ("%s .. %d"):format(moments, row.last) end
  return { moments, row.action, row.tiers, readable.bytes(row.nbytes), row.text }
end

local function summary(self)
  local uses, chunks, known, most = 0, 0, {}, self[1]
  local marks = { write = false, ends = false }
  for _, m in ipairs(self) do
    if m.nbytes > most.nbytes then most = m end
    for _, use in ipairs(m.uses) do
      uses = uses + 1
      if not known[use.chunk] then known[use.chunk], chunks = true, chunks + 1 end
      marks.write, marks.ends = marks.write or use.write, marks.ends or use.ends
    end
  end
  local lines = { ("%d moment%s, %d use%s of %d chunk%s; at most %s of chunks at once, at moment %d"):format(#self,
    #self == 1 and "" or "s", uses, uses == 1 and "" or "s", chunks, chunks == 1 and "" or "s",
    readable.bytes(most.nbytes), most.moment) }
  local parts = {}
  for _, name in ipairs { "device", "host" } do
    if self.other[name] then parts[#parts + 1] = ("%s %s"):format(name, readable.bytes(self.other[name])) end
  end
  lines[2] = "outside chunks, at most: " .. table.concat(parts, ", ")
  local notes = {}
  if marks.write then notes[1] = "*: written" end
  if marks.ends then notes[#notes + 1] = "-: the chunk's contents end there" end
  lines[3] = notes[1] and table.concat(notes, "; ") or nil
  return lines
end

local function show(self)
  if #self == 0 then return self.filter and "no moments " .. self.filter or EMPTY end
  local rows, shown, texts = rows_of(self), {}, {}
  local edge = (self.all or #rows <= MOST) and #rows or EDGE
  for i, row in ipairs(rows) do
    if i <= edge or i > #rows - edge then shown[#shown + 1] = row end
  end
  local room, widths = WIDTH, {}
  for i, row in ipairs(shown) do
    texts[i] = cells(row)
    for c = 1, #COLUMNS - 1 do widths[c] = math.max(widths[c] or #COLUMNS[c].title, #texts[i][c]) end
  end
  for _, width in ipairs(widths) do room = room - width - 2 end
  for i, row in ipairs(shown) do texts[i][#COLUMNS] = shorten(row, room) end
  if edge < #rows then
    table.insert(texts, edge + 1, ('... %d more: ps.trace{all=true}; or fewer: {action="forward"}, or a chunk\'s id')
      :format(#rows - 2 * edge))
  end
  local lines = readable.lines(COLUMNS, texts)
  for _, line in ipairs(summary(self)) do lines[#lines + 1] = line end
  return table.concat(lines, "\n")
end

local Trace = { __tostring = show, prints_rows = true }

local OPTIONS = { all = "boolean", action = "string" }

-- Returns a set of chunk ids. `which` is the id of a chunk or the name of a tensor.
local function asked(chunks, which)
  local found = view.chunks(chunks, which, "ps.trace")
  local set = {}
  for _, chunk in ipairs(type(which) == "number" and { found } or found) do set[chunk.id] = true end
  return set
end

local function uses_one(moment, set)
  for _, use in ipairs(moment.uses) do
    if set[use.chunk] then return true end
  end
  return false
end

local function check_action(moments, action)
  local known, names = {}, {}
  for _, m in ipairs(moments) do
    if not known[m.action] then known[m.action], names[#names + 1] = true, m.action end
  end
  if #moments == 0 or known[action] then return end
  error(("ps.trace: the step has no action '%s' (it has %s)"):format(action, table.concat(names, ", ")))
end

--- Returns the moments that `options` selects, as a list that prints as a table.
---@param moments ps.view.Moment[]
---@param other table<string, integer> peak size in bytes of the memory outside chunks, by tier
---@param chunks ps.view.Chunk[]
---@param options? integer|string|{all?: boolean, action?: string} as in ps.trace
---@return ps.view.Moment[]
function trace.list(moments, other, chunks, options)
  local set, filter
  if type(options) == "number" or type(options) == "string" then
    set = asked(chunks, options)
    filter = (type(options) == "number" and "use chunk %s" or "use a chunk of %s"):format(tostring(options))
    options = nil
  end
  options = caller.options(options, "ps.trace", OPTIONS)
  if options.action then check_action(moments, options.action) end
  local list = { all = options.all or set ~= nil, other = other, filter = filter }
  for _, m in ipairs(moments) do
    if (not set or uses_one(m, set)) and (not options.action or m.action == options.action) then list[#list + 1] = m end
  end
  return setmetatable(list, Trace)
end

--- Implements ps.trace.
---@param id? integer id of the open engine's trace, or nil if no engine is open
---@param options? integer|string|{all?: boolean, action?: string}
---@return ps.view.Moment[]
function trace.trace(id, options)
  local open_chunks = require "ps.memory.chunks"
  local moments, other
  if id then moments, other = open_chunks.trace(id) end
  return trace.list(moments or {}, other or {}, id and open_chunks.chunks() or {}, options)
end

return trace
