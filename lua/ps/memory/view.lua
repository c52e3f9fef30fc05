-- SPDX-License-Identifier: BSD-3-Clause
-- Makes the results of ps.chunks() and ps.memory(). The results are lists that scripts can index and that print as
-- tables of at most 100 columns. The functions in this file work on plain lists and do not depend on the engine. They
-- do not change the rows that they are given.
local caller = require "ps.core.caller"
local readable = require "ps.core.readable"
local nearest = require "ps.core.nearest"
local error = caller.error

local view = {}

local WIDTH = 100
local MOST = 40                -- largest number of rows that are printed without all = true
local EDGE = 16                -- if a list has more than MOST rows, this number of rows is printed at each end
local TIERS = { "device", "host", "disk" }
local LEAST_NAMES = 12         -- smallest width of the column "tensors", in characters

---@class ps.view.Chunk
---@field id integer
---@field kind string "param", "param_fp32", "grad", or a state of the optimizer
---@field index integer index of the chunk among the chunks of its kind
---@field nbytes integer
---@field used_nbytes integer
---@field tiers table<string, boolean> the tiers ("device", "host", "disk") that contain a valid copy of the chunk
---@field state string "FREE", "COMPUTE", "HOLD", "HOLD_AFTER_FWD" or "HOLD_AFTER_BWD"
---@field pins integer
---@field tensors string[] names of the tensors in the chunk
---@field last_use? integer moment of the current step at which the chunk was last used
---@field next_use? integer moment of the current step at which the chunk will be used next

---@class ps.view.Tier
---@field name string
---@field budget integer limit in bytes, or 0 if there is no limit
---@field chunks integer
---@field other integer
---@field free integer
---@field peak integer

-- Returns the longest common prefix of two names that ends with a dot. For "h.0.ln_1.weight" and "h.0.mlp.c_fc.bias",
-- this is "h.0.".
local function common_part(a, b)
  local part = a:match("^(.*%.)") or ""
  while b:sub(1, #part) ~= part do part = part:sub(1, -2):match("^(.*%.)") or "" end
  return part
end

-- Returns the common prefix (see common_part) of the names of all tensors in a list of chunks. Returns "" if there are
-- fewer than two names.
local function common_prefix(chunks)
  local prefix, count
  for _, chunk in ipairs(chunks) do
    for _, name in ipairs(chunk.tensors) do
      prefix, count = common_part(prefix or name, name), (count or 0) + 1
    end
  end
  return (count or 0) > 1 and prefix or ""
end

-- Returns a name, shortened to at most `width` columns. First omits components at the end of the name, and then
-- characters.
local function shorten(name, width)
  while #name > width do
    local shorter = name:match("^(.+)%.[^.]*$")
    if not shorter then return #name > width and name:sub(1, math.max(1, width - 1)) .. "~" or name end
    name = shorter
  end
  return name
end

-- Returns a text of at most `width` columns for a list of names. It contains the first name, the last name and their
-- number, such as "h.0.attn.c_attn.weight .. h.2.ln_1.bias (14)". If this text is too long, the last name is printed
-- without the prefix that it has in common with the first name, and both names are shortened: "h.0.ln_1 .. mlp (12)".
local function names_text(tensors, prefix, width)
  local function name(i) return tensors[i]:sub(#prefix + 1) end
  if #tensors == 0 then return "-" end
  if #tensors == 1 then return shorten(name(1), width) end
  local tail = (" (%d)"):format(#tensors)
  local first, last, room = name(1), name(#tensors), width - #tail - 4
  if #first + #last > room then
    local shared = common_part(first, last)
    last = last:sub(#shared + 1)
    local half = math.floor(room / 2)
    if #last <= half then first = shorten(first, room - #last)
    elseif #first <= half then last = shorten(last, room - #first)
    else first, last = shorten(first, half), shorten(last, half) end
  end
  return first .. " .. " .. last .. tail
end

-- -- chunks ---------------------------------------------------------------------------------------------------------

local function tiers_text(tiers)
  local names = {}
  for _, name in ipairs(TIERS) do
    if tiers[name] then names[#names + 1] = name end
  end
  return #names > 0 and table.concat(names, "+") or "-"
end

local function percent(part, whole) return ("%.1f%%"):format(whole > 0 and 100 * part / whole or 0) end

-- Returns a text that lists total sizes of chunks by key, such as "title: param 2.90 GiB, exp_avg 5.80 GiB". The text
-- may have several lines. The keys are in the order of the list `order`. If `order` is nil, they are in the order in
-- which they first occur. For each chunk, each(chunk, add) must call add(key) for every key whose sum includes the
-- chunk.
local function sums(title, chunks, order, each)
  local names, total = order or {}, {}
  for _, chunk in ipairs(chunks) do
    each(chunk, function(key)
      if not total[key] and not order then names[#names + 1] = key end
      total[key] = (total[key] or 0) + chunk.nbytes
    end)
  end
  local text, column = title .. ":", #title + 1
  for _, key in ipairs(names) do
    if total[key] then
      local part = (" %s %s"):format(key, readable.bytes(total[key]))
      if column > #title + 1 then text, column = text .. ",", column + 1 end
      if column + #part >= WIDTH then text, column = text .. "\n ", 1 end
      text, column = text .. part, column + #part
    end
  end
  return next(total) and text or text .. " none"
end

local function summary(chunks)
  local nbytes, used = 0, 0
  for _, chunk in ipairs(chunks) do nbytes, used = nbytes + chunk.nbytes, used + chunk.used_nbytes end
  return { ("%d chunk%s, %s, %s used"):format(#chunks, #chunks == 1 and "" or "s", readable.bytes(nbytes),
    percent(used, nbytes)), sums("by kind", chunks, nil, function(chunk, add) add(chunk.kind) end),
    sums("valid copies", chunks, TIERS, function(chunk, add)
      for name, valid in pairs(chunk.tiers) do
        if valid then add(name) end
      end
    end) }
end

local function moment(m) return m and ("%d"):format(m) or "-" end

local COLUMNS = {
  { title = "id", text = function(c) return ("%d"):format(c.id) end },
  { title = "kind", left = true, text = function(c) return c.kind end },
  { title = "size", text = function(c) return readable.bytes(c.nbytes) end },
  { title = "used", text = function(c) return percent(c.used_nbytes, c.nbytes) end },
  { title = "tier", left = true, text = function(c) return tiers_text(c.tiers) end },
  { title = "state", left = true, text = function(c)
    return (c.pins or 0) > 0 and ("%s x%d"):format(c.state, c.pins) or c.state
  end },
  { title = "last", text = function(c) return moment(c.last_use) end },
  { title = "next", text = function(c) return moment(c.next_use) end },
  { title = "tensors", left = true },                       -- this column is as wide as the other columns allow
}

local OWNS_NONE = "this rank owns no chunk; other ranks own all of them"

local function show_chunks(self)
  if #self == 0 then
    return "no chunks" .. (self.filter and " " .. self.filter or "") .. (self.owns_none and ": " .. OWNS_NONE or "")
  end
  local shown = {}
  local edge = (self.all or #self <= MOST) and #self or EDGE
  for i, chunk in ipairs(self) do
    if i <= edge or i > #self - edge then shown[#shown + 1] = chunk end
  end
  local rows, room = {}, WIDTH
  for at = 1, #COLUMNS - 1 do
    local column, width = COLUMNS[at], #COLUMNS[at].title
    for i, chunk in ipairs(shown) do
      rows[i] = rows[i] or {}
      rows[i][at] = column.text(chunk)
      width = math.max(width, #rows[i][at])
    end
    room = room - width - 2
  end
  local prefix = common_prefix(shown)
  for i, chunk in ipairs(shown) do
    rows[i][#COLUMNS] = names_text(chunk.tensors, prefix, math.max(room, LEAST_NAMES))
  end
  if edge < #self then
    table.insert(rows, edge + 1, ('... %d more: ps.chunks{all=true}; or fewer: {kind="param"}, {tier="host"}')
      :format(#self - 2 * edge))
  end
  local lines = readable.lines(COLUMNS, rows)
  for _, line in ipairs(summary(self)) do lines[#lines + 1] = line end
  local notes = {}
  if prefix ~= "" then notes[1] = ("names without their '%s'"):format(prefix) end
  for _, chunk in ipairs(shown) do
    if (chunk.pins or 0) > 0 then
      notes[#notes + 1] = "x1: pinned once"
      break
    end
  end
  if #notes > 0 then lines[#lines + 1] = table.concat(notes, "; ") end
  return table.concat(lines, "\n")
end

local Chunks = { __tostring = show_chunks, prints_rows = true }

local FILTER = { all = "boolean", kind = "string", tier = "string", state = "string" }

local function check_filter(chunks, options)
  if options.kind ~= nil and #chunks > 0 then
    local known, names = {}, {}
    for _, chunk in ipairs(chunks) do
      if not known[chunk.kind] then names[#names + 1] = chunk.kind end
      known[chunk.kind] = true
    end
    if not known[options.kind] then
      error(("ps.chunks: no chunk is of kind '%s' (there are %s)"):format(tostring(options.kind),
        table.concat(names, ", ")))
    end
  end
  local known = {}
  for _, name in ipairs(TIERS) do known[name] = true end
  if options.tier ~= nil and not known[options.tier] then
    error(("ps.chunks: no tier is called '%s' (there are %s)"):format(tostring(options.tier),
      table.concat(TIERS, ", ")))
  end
end

-- Returns the text that one chunk prints as. It contains the names of all tensors in the chunk.
local function show_chunk(self)
  local text = show_chunks(setmetatable({ self, all = true }, nil))
  local lines = { text:match "^[^\n]*\n[^\n]*" }
  for i, name in ipairs(self.tensors) do lines[i + 1] = "  " .. name end
  return table.concat(lines, "\n")
end

local Chunk = { __tostring = show_chunk, prints_rows = true }

-- Returns a text for the ids of chunks, such as "0 to 4, 20, 22 to 29". The chunks must be sorted by id.
local function ids_text(chunks)
  local parts, i = {}, 1
  while chunks[i] do
    local last = i
    while chunks[last + 1] and chunks[last + 1].id == chunks[last].id + 1 do last = last + 1 end
    parts[#parts + 1] = last > i and ("%d to %d"):format(chunks[i].id, chunks[last].id) or ("%d"):format(chunks[i].id)
    i = last + 1
  end
  return table.concat(parts, ", ")
end

local function one_chunk(chunks, id, who)
  for _, chunk in ipairs(chunks) do
    if chunk.id == id then
      local copy = {}
      for key, value in pairs(chunk) do copy[key] = value end
      return setmetatable(copy, Chunk)
    end
  end
  local why = chunks.open and ": " .. OWNS_NONE or ": no engine with chunks is open"
  if #chunks > 0 then why = (" (there are %d: %s)"):format(#chunks, ids_text(chunks)) end
  error(("%s: there is no chunk %g%s"):format(who, id, why))
end

-- Returns the chunks that contain a tensor with is(name) == true. Also returns the names of all such tensors.
local function chunks_with(chunks, is)
  local list, names, known = {}, {}, {}
  for _, chunk in ipairs(chunks) do
    local has = false
    for _, tensor in ipairs(chunk.tensors) do
      if is(tensor) then
        has = true
        if not known[tensor] then known[tensor], names[#names + 1] = true, tensor end
      end
    end
    if has then list[#list + 1] = chunk end
  end
  return list, names
end

-- Returns the chunks that contain a tensor of the given name. For a parameter, these are the chunks of its value, its
-- master, its optimizer states and its gradient. `name` may also be the end of a tensor's name, if only one name has
-- this end, or the name of a module.
local function holding(chunks, name, who)
  local function shown(list)
    list.all, list.filter = true, "with " .. name
    return setmetatable(list, Chunks)
  end
  local list = chunks_with(chunks, function(tensor) return tensor == name end)
  if #list > 0 then return shown(list) end
  local found, names = chunks_with(chunks, function(tensor) return tensor:sub(-#name - 1) == "." .. name end)
  if #names == 1 then return shown(found) end
  if #names > 1 then
    error(("%s: '%s' is the end of %d tensors' names, '%s', '%s'%s; give more of the name"):format(who, name, #names,
      names[1], names[2],
      #names > 2 and ", ..." or ""))
  end
  found = chunks_with(chunks, function(tensor) return ("." .. tensor):find("." .. name .. ".", 1, true) ~= nil end)
  if #found > 0 then return shown(found) end
  local prefix = common_prefix(chunks)
  names = select(2, chunks_with(chunks, function() return true end))
  for i = 1, #names do names[#names + 1] = names[i]:sub(#prefix + 1) end
  local near = nearest.find(name, names)
  error(("%s: no chunk holds a tensor called '%s'%s"):format(who, name,
    near and ("; did you mean '%s'?"):format(near) or #chunks == 0 and chunks.open and ": " .. OWNS_NONE or ""))
end

--- Returns the chunks as a list that prints as a table.
---@param chunks ps.view.Chunk[]
---@param options? integer|string|{all?: boolean, kind?: string, tier?: string, state?: string} an integer selects the
---  chunk with this id, and a string selects the chunks that contain the tensor with this name. kind: selects chunks of
---  this kind. tier: selects chunks with a valid copy on this tier. state: selects chunks in this state. all = true:
---  prints every row
---@param who? string name of the calling function, for errors (default "ps.chunks")
---@return ps.view.Chunk[]
function view.chunks(chunks, options, who)
  if type(options) == "number" then return one_chunk(chunks, options, who or "ps.chunks") end
  if type(options) == "string" then return holding(chunks, options, who or "ps.chunks") end
  options = caller.options(options, "ps.chunks", FILTER)
  check_filter(chunks, options)
  local list, words = { all = options.all or false, owns_none = #chunks == 0 and chunks.open or nil }, {}
  for _, key in ipairs { "kind", "tier", "state" } do
    if options[key] then words[#words + 1] = ("%s %s"):format(key, options[key]) end
  end
  if #words > 0 then list.filter = "with " .. table.concat(words, ", ") end
  for _, chunk in ipairs(chunks) do
    if (not options.kind or chunk.kind == options.kind) and (not options.tier or chunk.tiers[options.tier])
      and (not options.state or chunk.state == options.state) then
      list[#list + 1] = chunk
    end
  end
  return setmetatable(list, Chunks)
end

-- -- memory ---------------------------------------------------------------------------------------------------------

local function bar(part, whole, width)
  local filled = math.min(width, math.max(0, math.floor(width * part / whole + 0.5)))
  return "[" .. ("#"):rep(filled) .. ("."):rep(width - filled) .. "]"
end

local function show_memory(self)
  local lines = {}
  if self.tiers and #self.tiers > 0 then
    local rows = {}
    for i, tier in ipairs(self.tiers) do
      local limited = tier.budget > 0
      rows[i] = { tier.name, limited and readable.bytes(tier.budget) or "none", readable.bytes(tier.chunks),
        readable.bytes(tier.other), limited and readable.bytes(tier.free) or "-", readable.bytes(tier.peak),
        limited and bar(tier.chunks + tier.other, tier.budget, 20) or "" }
    end
    lines = readable.lines({ { title = "tier", left = true }, { title = "budget" }, { title = "chunks" },
      { title = "other" }, { title = "free" }, { title = "peak" }, { title = "", left = true } }, rows)
  end
  lines[#lines + 1] = ("%s: %s in use, %s at most, %s set aside, %s"):format(self.device or "memory",
    readable.bytes(self.used), readable.bytes(self.peak), readable.bytes(self.reserved),
    self.limit > 0 and "limit " .. readable.bytes(self.limit) or "no limit")
  return table.concat(lines, "\n")
end

local Memory = { __tostring = show_memory, prints_rows = true }

--- Returns a table of a device's memory and of the tiers of chunks. The result prints as a table.
---@param info {used: number, peak: number, reserved: number, limit: number, device?: string} used, peak, reserved and
---  limit are numbers of bytes; device: name of the device
---@param tiers? ps.view.Tier[]
---@return table the fields of `info`, and the field `tiers`, which is an empty list if there are no chunks
function view.memory(info, tiers)
  return setmetatable({ used = info.used, peak = info.peak, reserved = info.reserved, limit = info.limit,
    device = info.device, tiers = tiers or {} }, Memory)
end

return view
