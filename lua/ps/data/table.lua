-- SPDX-License-Identifier: BSD-3-Clause
-- Tables of examples: files of JSON lines, JSON lists, text, or lists of a script, read by row. A table is a small
-- cdata, so that # counts its rows; a view of another one computes its rows when they are asked for. Files stay on the
-- disk: only the place of every 64th row is in memory.
local native = require "ps.core.ffi"
local convert = require "ps.chat.convert"
local json = require "ps.chat.json"
local values = require "ps.chat.values"
local utf8 = require "ps.core.utf8"
local caller = require "ps.core.caller"
local lists = require "ps.core.lists"
local permutation = require "ps.data.permutation"
local bit = require "bit"
local cjson = require "cjson"
local ffi = require "ffi"
local glob = require "posix.glob"
local lfs = require "lfs"
local error = caller.error
local C, check = native.C, native.check

local tables = {}

ffi.cdef "typedef struct ps_data_table { int32_t id; } ps_data_table;"

-- The rows of a table: { n =, get = function(i) gives row i from 1, text = function(i) gives its JSON or nil,
-- place = function(i) gives its file and line for errors, name = }. shared: rows are the script's own tables.
local nodes, last = {}, 0

---@class ps.DataTable
local Table = {}

local new                                                  -- a table of a node; below

local function node_of(self) return nodes[self.id] or error "the table is closed" end

-- -- sources --------------------------------------------------------------------------------------------------------
-- The value of a JSON text, which must be an object.
local function decoded(text, place)
  if not utf8.valid(text) then error(place .. ": not valid UTF-8") end
  local ok, row = pcall(cjson.decode, text)
  if not ok then error(("%s: not JSON: %s"):format(place, tostring(row))) end
  if not text:find "^%s*{" then
    error(("%s: each row must be a JSON object; this one is %s"):format(place, text:sub(1, 40)))
  end
  return row
end

-- Row i for a function of the script: with the order of its JSON's keys, and never a table of the script's own.
local function for_script(node, i)
  local source = node.text and node.text(i)
  if source then
    local ok, row = pcall(json.decode, source)
    if ok and getmetatable(row) == values.Dict then return convert.plain(row) end
  end
  local row = node.get(i)                                  -- raises the error of a bad row
  return node.shared and convert.copied(row) or row
end

-- The place of a file's index in the cache folder; nil: there is none.
local function cached_index(path)
  local home, base = os.getenv "HOME", os.getenv "XDG_CACHE_HOME"
  home = base and base ~= "" and base or home and home .. "/.cache"
  if not home then return nil end
  local folder = home .. "/psluajit/lines"
  local made = ""
  for part in folder:gmatch "[^/]+" do
    made = made .. "/" .. part
    lfs.mkdir(made)
  end
  local full = path:sub(1, 1) == "/" and path or lfs.currentdir() .. "/" .. path
  return ("%s/%s.rows"):format(folder, bit.tohex(tonumber(C.ps_xxh3(full, #full) % 2 ^ 32)))
end

local INDEXED = 16 * 1024 * 1024                           -- bytes of a file from which on it gets an index

-- Whether a file is an index, or is not there: a file of the script's own is never replaced.
local function may_write(index)
  local file = io.open(index, "rb")
  if not file then return true end
  local magic = file:read(7)
  file:close()
  return magic == "PSLINES"
end

-- A file by line, with the index next to the file, or in the cache folder if that cannot be written.
local function open_lines(path)
  local out, index = ffi.new("ps_lines *[1]"), path .. ".rows"
  local elsewhere = lfs.attributes(index, "mode") ~= "file" and cached_index(path)
  local use = elsewhere and lfs.attributes(elsewhere, "mode") == "file" and elsewhere or index
  check(C.ps_lines_open(path, use, out))
  local lines = ffi.gc(out[0], C.ps_lines_close)
  if lfs.attributes(path, "size") < INDEXED then return lines end
  if C.ps_lines_scanned(lines) == 0 then return lines end
  if may_write(index) and C.ps_lines_save(lines, index) >= 0 then return lines end
  elsewhere = elsewhere or cached_index(path)
  if elsewhere then C.ps_lines_save(lines, elsewhere) end
  return lines
end

local function of_lines(path, kind)
  local lines = open_lines(path)
  local text, nbytes, number = ffi.new("const char *[1]"), ffi.new("int64_t[1]"), ffi.new("int64_t[1]")
  local function line(i)
    check(C.ps_lines_read(lines, i - 1, text, nbytes, number))
    return ffi.string(text[0], nbytes[0]), ("%s:%.0f"):format(path, tonumber(number[0]))
  end
  local node = { n = tonumber(C.ps_lines_count(lines)), name = path }
  function node.place(i) return select(2, line(i)) end
  if kind == "text" then
    function node.get(i) return { text = (line(i)) } end
    return node
  end
  function node.text(i) return (line(i)) end
  function node.get(i)
    return decoded(line(i))
  end
  return node
end

local function of_list(list, name)
  local node = { n = #list, name = name, shared = true }
  function node.get(i) return list[i] end
  function node.place(i) return ("%s[%d]"):format(name, i) end
  return node
end

local function whole_file(path)
  local file, why = io.open(path, "rb")
  if not file then error("ps.data.table: " .. why) end
  local text = file:read "*a"
  file:close()
  return text
end

-- One past the end of the JSON value that begins at a byte; nil: it has no end.
local function value_end(text, at)
  local depth = 0
  repeat
    local c = text:sub(at, at)
    if c == '"' then
      at = at + 1
      while true do
        at = text:find('["\\]', at)
        if not at then return nil end
        if text:byte(at) == 34 then break end
        at = at + 2
      end
      at = at + 1
    elseif c == "{" or c == "[" then depth, at = depth + 1, at + 1
    elseif c == "}" or c == "]" then depth, at = depth - 1, at + 1
    else
      at = text:find('[%[%]{},"%s]', at)                   -- a number or a word
    end
    if depth > 0 and at then at = text:find('[%[%]{}"]', at) end
    if not at then return nil end
  until depth <= 0
  return at
end

-- A file of one list: where each of its items begins and ends. An item is decoded when it is read.
local function of_json(path)
  local text = require("ps.core.bom")(whole_file(path))
  local function bad(at, why)
    local _, lines = text:sub(1, at - 1):gsub("\n", "")
    error(("%s:%d: not a JSON list of objects: %s"):format(path, lines + 1, why))
  end
  local at, from, upto = text:match "^%s*%[%s*()", {}, {}
  if not at then error(path .. ": a list of objects expected; a file of one object per line ends in .jsonl") end
  local more = text:sub(at, at) ~= "]"
  while more do
    local stop = not text:find("^[%],}]", at) and value_end(text, at)
    if not stop or stop == at then bad(at, "a value has no end, or is missing") end
    from[#from + 1], upto[#upto + 1] = at, stop - 1
    local c, after = text:match("^%s*([,%]])%s*()", stop)
    if not c then bad(stop, "',' or ']' expected") end
    more, at = c == ",", after
  end
  if text:find("^%s*%]%s*%S", at) or #from > 0 and text:find("^%S", at) then bad(at, "more text follows the list") end
  local node = { n = #from, name = path }
  function node.text(i) return text:sub(from[i], upto[i]) end
  function node.place(i) return ("%s[%d]"):format(path, i) end
  function node.get(i) return decoded(node.text(i), node.place(i)) end
  return node
end

local KINDS = { jsonl = "lines", ndjson = "lines", json = "json", txt = "text" }
local UNREAD = { gz = "unpack it with gunzip", zst = "unpack it with zstd -d", csv = "write it as JSON lines",
  tsv = "write it as JSON lines", parquet = "write it as JSON lines", arrow = "write it as JSON lines" }

local function of_file(path, options)
  local ending = path:match "%.([^./]*)$"
  local kind = KINDS[ending or ""]
  if not kind then
    local hint = UNREAD[ending or ""]
    error(("%s: not a kind of file that ps.data.table reads (.jsonl, .ndjson, .json, .txt)%s"):format(path,
      hint and "; " .. hint or ""))
  end
  if kind == "json" then return of_json(path) end
  if kind == "text" and options.text == "file" then return of_list({ { text = whole_file(path) } }, path) end
  return of_lines(path, kind)
end

-- Several tables one after the other.
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

-- The files of a path: itself, those of a folder that have a known ending, or those that fit a pattern.
local function files_of(path)
  local mode = lfs.attributes(path, "mode")
  if mode == "directory" then
    local files = {}
    for name in lfs.dir(path) do
      if KINDS[name:match "%.([^.]*)$" or ""] then files[#files + 1] = path .. "/" .. name end
    end
    table.sort(files)
    if #files == 0 then error(path .. ": the folder has no .jsonl, .ndjson, .json or .txt file") end
    return files
  end
  if mode then return { path } end
  if path:find "[*?%[]" then
    local files = glob.glob(path) or {}
    if #files == 0 then error(path .. ": no file fits this pattern") end
    table.sort(files)
    return files
  end
  return error(path .. ": there is no such file or folder")
end

-- Leaves out the rows that cannot be read, and prints how many.
local function without_bad(node)
  local kept, bad, first = {}, 0, nil
  for i = 1, node.n do
    local ok, problem = pcall(node.get, i)
    if ok and node.text then
      ok, problem = pcall(json.decode, node.text(i))       -- which also sees a key that occurs twice
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
  io.stderr:write(("%s: skipped %d of %d rows; the first: %s\n"):format(node.name, bad, node.n, first))
  return { n = #kept, name = node.name, get = function(i) return node.get(kept[i]) end,
    text = node.text and function(i) return node.text(kept[i]) end, place = function(i) return node.place(kept[i]) end }
end

local OPTIONS = { on_error = "string", text = "string" }

--- A table of examples. A row is a Lua table. `#t` counts rows, `t[i]` is row i from 1, and ipairs goes through them.
--- The first opening of a file reads it once. A file of 16 MiB or more then gets an index, FILE.rows next to it or in
--- the cache folder, with which the next opening is immediate.
---@param source string|table|fun(i: integer): table? a path (.jsonl, .ndjson, .json, .txt), a folder of such files, a
---  pattern with * or ?; a list of paths or of rows; or a function that gives row i, and nil after the last one
---@param options? {on_error?: "skip"|"raise", text?: "line"|"file"} on_error: leave out rows that are not JSON, and
---  print how many; text: whether a line or a file of .txt is a row {text =}, default "line"
---@return ps.DataTable
function tables.open(source, options)
  options = caller.options(options, "ps.data.table", OPTIONS)
  caller.one_of(options.on_error or "raise", { skip = true, raise = true }, "ps.data.table: on_error")
  caller.one_of(options.text or "line", { line = true, file = true }, "ps.data.table: text")
  if type(source) == "function" then
    local list = {}
    repeat
      local row = source(#list + 1)
      if row ~= nil then caller.typed(row, "table", ("ps.data.table: row %d of the function"):format(#list + 1)) end
      list[#list + 1] = row
    until row == nil
    return new(of_list(list, "rows of a function"))
  end
  if type(source) == "table" and type(source[1]) ~= "string" then
    for i, row in ipairs(source) do caller.typed(row, "table", ("ps.data.table: row %d"):format(i)) end
    return new(of_list(source, "rows"))
  end
  local parts = {}
  for _, path in ipairs(type(source) == "table" and source or { source }) do
    caller.typed(path, "string", "ps.data.table: a path")
    for _, file in ipairs(files_of(path)) do
      local node = of_file(file, options)
      parts[#parts + 1] = options.on_error == "skip" and without_bad(node) or node
    end
  end
  return new(#parts == 1 and parts[1] or joined(parts, ("%d files"):format(#parts)))
end

-- -- views ----------------------------------------------------------------------------------------------------------
-- A view whose row i is row at(i) of another table.
local function view(node, n, at)
  return new { n = n, name = node.name, shared = node.shared, get = function(i) return node.get(at(i)) end,
    text = node.text and function(i) return node.text(at(i)) end, place = function(i) return node.place(at(i)) end }
end

--- A table whose rows are fn(row, i) of this one's. fn runs when a row is read, and may change its row. The order of
--- keys of JSON, 1.0 and {} stay as they are in the parts of rows that fn does not make anew.
---@param fn fun(row: table, i: integer): table
---@return ps.DataTable
function Table:map(fn)
  caller.callable(fn, "table:map")
  local node = node_of(self)
  return new { n = node.n, name = node.name, place = node.place, get = function(i)
    local row = fn(for_script(node, i), i)
    if type(row) ~= "table" then error(("table:map: the function gave a %s for row %d"):format(type(row), i)) end
    return row
  end }
end

--- A table of the rows for which fn(row, i) is true. It reads all rows once.
---@param fn fun(row: table, i: integer): any
---@return ps.DataTable
function Table:filter(fn)
  caller.callable(fn, "table:filter")
  local node, kept = node_of(self), {}
  for i = 1, node.n do
    local row = node.get(i)
    if fn(node.shared and convert.copied(row) or row, i) then kept[#kept + 1] = i end
  end
  return view(node, #kept, function(i) return kept[i] end)
end

--- A table of the same rows in another order, which depends on the seed alone. It is computed: no list is in memory.
---@param seed integer
---@return ps.DataTable
function Table:shuffle(seed)
  caller.seed(seed, "table:shuffle: the seed")
  local node = node_of(self)
  return view(node, node.n, permutation.new(node.n, seed))
end

--- The first n rows, or all if there are fewer.
---@param n integer
---@return ps.DataTable
function Table:take(n)
  local node = node_of(self)
  return view(node, math.min(caller.whole(n, "table:take: the count", 0), node.n), function(i) return i end)
end

--- The rows after the first n.
---@param n integer
---@return ps.DataTable
function Table:skip(n)
  local node = node_of(self)
  n = math.min(caller.whole(n, "table:skip: the count", 0), node.n)
  return view(node, node.n - n, function(i) return i + n end)
end

--- Two tables: the first rows, as a share of all, and the rest.
---@param share number in (0, 1)
---@return ps.DataTable first
---@return ps.DataTable rest
function Table:split(share)
  caller.typed(share, "number", "table:split: the share")
  if not (share > 0 and share < 1) then error(("table:split: a share of %s; it lies between 0 and 1"):format(share)) end
  local n = math.floor(node_of(self).n * share + 0.5)
  return self:take(n), self:skip(n)
end

--- This table's rows, then those of others.
---@param ... ps.DataTable
---@return ps.DataTable
function Table:concat(...)
  local parts = { node_of(self) }
  for i = 1, select("#", ...) do
    local other = select(i, ...)
    if not tables.is(other) then error(("table:concat: argument %d is a %s, not a table of examples"):format(i,
      type(other))) end
    parts[i + 1] = node_of(other)
  end
  return new(joined(parts, parts[1].name))
end

--- The rows of a list of numbers.
---@param numbers integer[] from 1
---@return ps.DataTable
function Table:select(numbers)
  local node, kept = node_of(self), {}
  for k, i in ipairs(caller.list(numbers, "table:select: the numbers")) do
    caller.whole(i, "table:select: a number", 1)
    if i > node.n then error(("table:select: row %d; the table has %d"):format(i, node.n)) end
    kept[k] = i
  end
  return view(node, #kept, function(i) return kept[i] end)
end

local function checked(node, i)
  if type(i) ~= "number" or i % 1 ~= 0 or i < 1 or i > node.n then
    error(("there is no row %s; the table has %d, from 1"):format(tostring(i), node.n))
  end
  return i
end

--- Row i as JSON, with the keys in the order of its file. nil: the row is not from a file of JSON lines as it is.
---@param i integer from 1
---@return string?
function Table:json(i)
  local node = node_of(self)
  checked(node, i)
  return node.text and node.text(i)
end

--- The file and line of row i, for messages.
---@param i integer from 1
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
  __newindex = function() error "a table of examples cannot be written to: map gives a table of other rows" end,
  __tostring = function(self) return ("Table(%s, %d rows)"):format(node_of(self).name, node_of(self).n) end,
  __gc = function(self) nodes[self.id] = nil end,
})

--- Whether a value is a table of examples.
---@param value any
---@return boolean
function tables.is(value) return ffi.istype(handle, value) end

function new(node)
  last = last + 1
  nodes[last] = node
  return handle(last)
end

-- ipairs and pairs over a table: 1, first row; 2, second row; and so on.
lists.of_cdata(handle, function(self)
  local node = node_of(self)
  return function(_, i)
    if i < node.n then return i + 1, node.get(i + 1) end
  end, self, 0
end)

return tables
