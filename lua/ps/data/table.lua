-- SPDX-License-Identifier: BSD-3-Clause
-- Tables of examples. The rows of a table are in files (files.lua) or in a list of the script, and are read one by one.
-- A table is a small cdata, because LuaJIT supports the operator # for cdata, so that #t is the number of rows. A view
-- is a table that computes each of its rows from a row of another table when the row is read.
local convert = require "ps.chat.convert"
local json = require "ps.chat.json"
local values = require "ps.chat.values"
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local files = require "ps.data.files"
local lists = require "ps.core.lists"
local note = require "ps.data.note"
local permutation = require "ps.data.permutation"
local scope = require "ps.core.scope"
local bit = require "bit"
local ffi = require "ffi"
local error = caller.error
local C = native.C

local tables = {}

ffi.cdef "typedef struct ps_data_table { int32_t id; } ps_data_table;"

-- The nodes of tables. Each table has a node, which reads its rows (ps.data.Node in files.lua).
local nodes, last = {}, 0

---@class ps.DataTable
local Table = {}

local new                                                  -- creates a table for a node; defined below

local function node_of(self) return nodes[self.id] or error "the table is closed" end

-- -- sources --------------------------------------------------------------------------------------------------------
-- Returns a copy of row i that a function of the script may change. If the row is JSON, the order of its keys is kept
-- (see ps.chat.convert).
local function for_script(node, i)
  local source = node.text and node.text(i)
  if source then
    local ok, row = pcall(json.decode, source)
    if ok and getmetatable(row) == values.Dict then return convert.plain(row) end
    local repeated = not ok and type(row) == "table" and row.repeated
    if repeated then error(("%s: not JSON: %s"):format(node.place(i), row.in_line or row.json)) end
  end
  local row = node.get(i)                                  -- raises an error if the row is not valid
  return node.shared and convert.copied(row) or row
end

-- Returns a node that has all rows of the first node, then all rows of the second node, and so on.
local function joined(parts, name)
  local starts, n = {}, 0
  for i, part in ipairs(parts) do starts[i], n = n, n + part.n end
  local function find(i)
    local low, high = 1, #parts
    while low < high do
      local middle = math.ceil((low + high) / 2)
      if starts[middle] < i then low = middle else high = middle - 1 end
    end
    return parts[low], i - starts[low]
  end
  local node = { n = n, name = name }
  for _, part in ipairs(parts) do node.shared = node.shared or part.shared end
  function node.key()
    local keys = {}
    for i, part in ipairs(parts) do
      keys[i] = part.key and part.key()
      if not keys[i] then return nil end
    end
    return table.concat(keys, " + ")
  end
  function node.get(i)
    local part, at = find(i)
    return part.get(at)
  end
  function node.text(i)
    local part, at = find(i)
    return part.text and part.text(at)
  end
  function node.place(i)
    local part, at = find(i)
    return part.place(at)
  end
  return node
end

-- Returns a node that has all rows of `node` except the rows that cannot be read. Prints the number of omitted rows.
local function without_bad(node)
  local kept, bad, first = {}, 0, nil
  for i = 1, node.n do
    local ok, problem = pcall(node.get, i)
    if ok and node.text then
      ok, problem = pcall(json.decode, node.text(i))       -- this parser also finds keys that occur twice
      if not ok then
        problem = ("%s: not JSON: %s"):format(node.place(i), type(problem) == "table" and problem.json
          or tostring(problem))
      end
    end
    if ok then kept[#kept + 1] = i
    else
      bad, first = bad + 1, first or tostring(problem)
    end
  end
  if bad == 0 then return node end
  note(("%s: skipped %d of %d rows; the first: %s\n"):format(node.name, bad, node.n, first))
  return { n = #kept, name = node.name, get = function(i) return node.get(kept[i]) end,
    text = node.text and function(i) return node.text(kept[i]) end, place = function(i) return node.place(kept[i]) end }
end

local OPTIONS = { on_error = "string", text = "string" }

--- Returns a table of examples. Each row is a Lua table. `#t` is the number of rows, `t[i]` is row i, counted from 1,
--- and ipairs iterates over the rows. The first call for a file reads the whole file. If the file has 16 MiB or more,
--- the first call also writes an index. Later calls read the index and not the whole file. The index is FILE.rows in
--- the same folder, or a file in the cache folder.
---@param source string|table|fun(i: integer): table? a path (.jsonl, .ndjson, .json, .txt, .csv, .tsv, each also with
--- .gz), a folder of such files, or a pattern with * or ?; or a list of paths; or a list of rows; or a function that
--- returns row i, and nil if i is greater than the number of rows
---@param options? {on_error?: "skip"|"raise", text?: "line"|"file"} on_error: "skip" omits the rows that are not JSON
--- and prints their number; "raise" (default) raises an error. text: for .txt, whether each line becomes a row {text =}
--- ("line", the default), or the whole file becomes one row ("file").
---@return ps.DataTable
function tables.open(source, options)
  options = caller.options(options, "ps.data.table", OPTIONS)
  if source == nil then error "ps.data.table: the source is nil; pass a path, a list or a function" end
  caller.one_of(options.on_error or "raise", { skip = true, raise = true }, "ps.data.table: on_error")
  caller.one_of(options.text or "line", { line = true, file = true }, "ps.data.table: text")
  if type(source) == "function" then
    local list = {}
    repeat
      local row = source(#list + 1)
      if row ~= nil then caller.typed(row, "table", ("ps.data.table: row %d of the function"):format(#list + 1)) end
      list[#list + 1] = row
    until row == nil
    return new(files.list(list, "rows of a function"))
  end
  if type(source) == "table" and source[1] == nil and next(source) ~= nil then
    error "ps.data.table: the list of rows has no first row; a table of one row is { row }"
  end
  if type(source) == "table" and type(source[1]) ~= "string" then
    for i, row in ipairs(source) do caller.typed(row, "table", ("ps.data.table: row %d"):format(i)) end
    return new(files.list(source, "rows"))
  end
  local parts = {}
  for _, path in ipairs(type(source) == "table" and source or { source }) do
    caller.typed(path, "string", "ps.data.table: a path")
    for _, file in ipairs(files.find(path)) do
      local node = files.open(file, options)
      parts[#parts + 1] = options.on_error == "skip" and without_bad(node) or node
    end
  end
  return new(#parts == 1 and parts[1] or joined(parts, ("%d files"):format(#parts)))
end

-- -- views ----------------------------------------------------------------------------------------------------------
-- Returns the node of a table for the method `what`, which makes a view. Raises an error if the table is a mixture,
-- because mixtures do not support views.
local function whole(self, what)
  local node = node_of(self)
  if node.mix then
    error(("table:%s cannot be called on a mixture; call it on the tables before they are mixed"):format(what))
  end
  return node
end

-- Returns a view of the table that `node` belongs to. The view has n rows. Its row i is row at(i) of the table. `what`
-- is a text that describes the view in cache keys, or nil if the view cannot have a cache key.
local function view(node, n, at, what)
  local key = node.key and what and function()
    local own = node.key()
    return own and own .. " " .. what
  end
  return new { n = n, name = node.name, shared = node.shared, key = key or nil,
    get = function(i) return node.get(at(i)) end, text = node.text and function(i) return node.text(at(i)) end,
    place = function(i) return node.place(at(i)) end }
end

-- Returns the result of fn(...), where fn is a function of the script that processes row i. If fn raises a text as an
-- error, the file and line of the row are added to the text.
local function of_script(what, node, i, fn, ...)
  local ok, result = xpcall(fn, scope.trace, ...)
  if ok then return result end
  if type(result) == "string" then result = ("table:%s: %s: %s"):format(what, node.place(i), result) end
  return error(result, 0)
end

--- Returns a table whose row i is fn(row, i), where `row` is row i of this table. fn is called when the row is read. fn
--- may change `row` and return it. The parts of a JSON row that fn does not change keep the properties of their JSON
--- text: the order of keys, 1.0 as a float, and {} as an object.
---@param fn fun(row: table, i: integer): table
---@return ps.DataTable
function Table:map(fn)
  caller.callable(fn, "table:map")
  local node = whole(self, "map")
  return new { n = node.n, name = node.name, place = node.place, get = function(i)
    local row = of_script("map", node, i, fn, for_script(node, i), i)
    if type(row) ~= "table" then
      error(("table:map: %s: the function returned a %s for row %d; it must return a row"):format(node.place(i),
        type(row), i))
    end
    return row
  end }
end

--- Returns a table that contains each row if fn(row, i) returns true for the row. Reads all rows once.
---@param fn fun(row: table, i: integer): any
---@return ps.DataTable
function Table:filter(fn)
  caller.callable(fn, "table:filter")
  local node, kept = whole(self, "filter"), {}
  for i = 1, node.n do
    local row = node.get(i)
    if of_script("filter", node, i, fn, node.shared and convert.copied(row) or row, i) then kept[#kept + 1] = i end
  end
  return view(node, #kept, function(i) return kept[i] end)
end

--- Returns a table of the same rows in random order. The order depends only on the number of rows and the seed. It is
--- computed row by row when rows are read, so no list of indices is needed.
---@param seed integer
---@return ps.DataTable
function Table:shuffle(seed)
  caller.seed(seed, "table:shuffle: the seed")
  local node = whole(self, "shuffle")
  return view(node, node.n, permutation.new(node.n, seed), ("shuffle %s"):format(tostring(seed)))
end

--- Returns a table of the first n rows. If the table has fewer than n rows, returns a table of all rows.
---@param n integer
---@return ps.DataTable
function Table:take(n)
  local node = whole(self, "take")
  n = math.min(caller.whole(n, "table:take: the count", 0), node.n)
  return view(node, n, function(i) return i end, ("take %d"):format(n))
end

--- Returns a table of all rows except the first n.
---@param n integer
---@return ps.DataTable
function Table:skip(n)
  local node = whole(self, "skip")
  n = math.min(caller.whole(n, "table:skip: the count", 0), node.n)
  return view(node, node.n - n, function(i) return i + n end, ("skip %d"):format(n))
end

--- Divides the table into two tables. `first` contains the given fraction of the rows, from the beginning of the table.
--- `rest` contains all other rows.
---@param share number fraction of the rows, in (0, 1)
---@return ps.DataTable first
---@return ps.DataTable rest
function Table:split(share)
  caller.typed(share, "number", "table:split: the share")
  if not (share > 0 and share < 1) then error(("table:split: the share %s is not between 0 and 1"):format(share)) end
  local n = math.floor(node_of(self).n * share + 0.5)
  return self:take(n), self:skip(n)
end

--- Returns a table with the rows of this table, followed by the rows of other tables.
---@param ... ps.DataTable
---@return ps.DataTable
function Table:concat(...)
  local parts = { whole(self, "concat") }
  for i = 1, select("#", ...) do
    local other = select(i, ...)
    if not tables.is(other) then error(("table:concat: argument %d is a %s, not a table of examples"):format(i,
      type(other))) end
    parts[i + 1] = whole(other, "concat")
  end
  return new(joined(parts, parts[1].name))
end

--- Returns a table of the rows with the given indices.
---@param numbers integer[] indices of the rows, counted from 1
---@return ps.DataTable
function Table:select(numbers)
  local node, kept = whole(self, "select"), {}
  for k, i in ipairs(caller.list(numbers, "table:select: the numbers")) do
    caller.whole(i, "table:select: a number", 1)
    if i > node.n then
      error(("table:select: there is no row %d; the table has %s"):format(i, caller.counted(node.n, "row")))
    end
    kept[k] = i
  end
  local listed = table.concat(kept, ",")
  return view(node, #kept, function(i) return kept[i] end, "select " .. bit.tohex(C.ps_xxh3(listed, #listed)))
end

--- Returns a text that identifies the contents of the rows, for caches. It depends on the contents of the files and on
--- the views. Returns nil if a part of the table cannot be identified, such as a Lua function.
---@return string?
function Table:key()
  local node = node_of(self)
  return node.key and node.key()
end

-- Returns the tables of a mixture with their weights, or nil if this table is not a mixture.
function Table:mixture() return node_of(self).mix end

local function checked(node, i)
  if type(i) ~= "number" or i % 1 ~= 0 or i < 1 or i > node.n then
    error(("there is no row %s; the table has rows 1 to %d"):format(tostring(i), node.n))
  end
  return i
end

--- Returns the JSON text of row i, as it is in the file. Returns nil if the row is not from a JSON file, or if it was
--- changed by `map`.
---@param i integer number of the row, counted from 1
---@return string?
function Table:json(i)
  local node = node_of(self)
  checked(node, i)
  return node.text and node.text(i)
end

--- Returns the file and line of row i, for error messages.
---@param i integer number of the row, counted from 1
---@return string
function Table:place(i)
  local node = node_of(self)
  return node.place(checked(node, i))
end

local handle = ffi.metatype("ps_data_table", {
  __len = function(self) return node_of(self).n end,
  __index = function(self, key)
    if type(key) == "number" then
      local node = node_of(self)
      return node.get(checked(node, key))
    end
    return Table[key] or error(("a table of examples has no method '%s'"):format(tostring(key)))
  end,
  __newindex = function()
    error "a table of examples cannot be changed: its method map returns a table with other rows"
  end,
  __tostring = function(self)
    return ("Table(%s, %s)"):format(node_of(self).name, caller.counted(node_of(self).n, "row"))
  end,
  __gc = function(self) nodes[self.id] = nil end,
})

local MOST_REPEATS = 1000

-- Raises an error if an epoch of a mixture with exhausted = "repeat" would have very many more rows than all tables
-- together. Such an epoch ends when every table has ended at least once.
local function check_repeats(mix)
  local rows, all, longest, slowest = 0, 0, 0, 1
  for i, n in ipairs(mix.counts) do
    rows, all = rows + n, all + mix.weights[i]
    if n / mix.weights[i] > longest then longest, slowest = n / mix.weights[i], i end
  end
  if longest * all <= MOST_REPEATS * rows then return end
  error(("ps.data.mix: with exhausted = 'repeat' an epoch would have about %.3g rows, over %d times the %d rows of the "
    .. "tables, since entry %d has the weight %.3g of %.3g: raise this weight, or pass exhausted = 'leave' or 'stop'")
    :format(longest * all, MOST_REPEATS, rows, slowest, mix.weights[slowest], all))
end

--- Returns a mixture of tables. When a loader reads the next row of a mixture, the weights determine from which table
--- it reads the row. Therefore the tables have the same proportions in all parts of an epoch. Each table is shuffled
--- separately. If a script reads a mixture by index, the rows of the first table come first, then the rows of the
--- second table, and so on.
---@param parts {[1]: ps.DataTable, [2]: number}[] the tables with their weights; a weight is above 0
---@param options? {exhausted?: "leave"|"repeat"|"stop"} says what the loader does when a table has no more rows.
--- "leave" (default): the epoch continues with the other tables, so each row is read once per epoch. "repeat": the
--- table starts again, until every table has ended at least once. "stop": the epoch ends.
---@return ps.DataTable
function tables.mix(parts, options)
  options = caller.options(options, "ps.data.mix", { exhausted = "string" })
  local exhausted = options.exhausted or "leave"
  caller.one_of(exhausted, { leave = true, ["repeat"] = true, stop = true }, "ps.data.mix: exhausted")
  local list, mix, shown = {}, { counts = {}, weights = {}, exhausted = exhausted }, {}
  for i, part in ipairs(caller.list(parts, "ps.data.mix: the tables")) do
    local rows, weight = caller.typed(part, "table", ("ps.data.mix: entry %d"):format(i))[1], part[2]
    if not tables.is(rows) then
      error(("ps.data.mix: entry %d has a %s, not a table of examples; write { ps.data.table(path), weight }"):format(i,
        type(rows)))
    end
    if type(weight) ~= "number" or not (weight > 0 and weight < math.huge) then
      error(("ps.data.mix: entry %d has the weight %s; it must be a number above 0"):format(i, tostring(weight)))
    end
    if #rows == 0 then error(("ps.data.mix: entry %d has no rows"):format(i)) end
    list[i], mix.counts[i], mix.weights[i] = node_of(rows), #rows, weight
    if list[i].mix then error(("ps.data.mix: entry %d is itself a mixture; list its tables here instead"):format(i)) end
    shown[i] = ("%d x %.17g"):format(#rows, weight)
  end
  if #list == 0 then error "ps.data.mix: the list has no tables" end
  if exhausted == "repeat" then check_repeats(mix) end
  local node = joined(list, ("mixture of %d tables"):format(#list))
  mix.name = table.concat(shown, ", ") .. ", " .. exhausted
  node.mix = mix
  return new(node)
end

--- Returns whether a value is a table of examples.
---@param value any
---@return boolean
function tables.is(value) return ffi.istype(handle, value) end

function new(node)
  last = last + 1
  nodes[last] = node
  return handle(last)
end

-- Makes ipairs(t) and pairs(t) iterate over the rows of a table t. They return i and t[i] for i = 1, 2, ... #t.
lists.of_cdata(handle, function(self)
  local node = node_of(self)
  return function(_, i)
    if i < node.n then return i + 1, node.get(i + 1) end
  end, self, 0
end)

return tables
