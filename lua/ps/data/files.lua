-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the files of which tables of examples are made: JSON lines, JSON lists, SQuAD's JSON, CSV, TSV and text. Any
-- file may be compressed by gzip. A file of lines (JSON lines or text) is not read into memory. Only the position of
-- every 64th row is kept in memory.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local csv = require "ps.data.csv"
local unpacked = require "ps.data.unpacked"
local utf8 = require "ps.core.utf8"
local cjson = require "cjson"
local ffi = require "ffi"
local glob = require "posix.glob"
local lfs = require "lfs"
local read_file = require "ps.core.read_file"
local error = caller.error
local C, check = native.C, native.check

local files = {}

---@class ps.data.Node rows of a file or of a list
---@field n integer
---@field name string
---@field get fun(i: integer): table returns row i, counted from 1
---@field place fun(i: integer): string returns the file and line of row i, for errors
---@field text? fun(i: integer): string returns the JSON text of row i
---@field key? fun(): string? returns a text that identifies the contents of the rows, for caches
---@field shared? boolean true if the rows are the script's own tables

-- Decodes a JSON text. Raises an error if the text is not a JSON object.
local function decoded(text, place)
  if not utf8.valid(text) then error(place .. ": not valid UTF-8") end
  local ok, row = pcall(cjson.decode, text)
  if not ok then error(("%s: not JSON: %s"):format(place, tostring(row))) end
  if not text:find "^%s*{" then
    error(("%s: each row must be a JSON object; this one is %s"):format(place, text:sub(1, 40)))
  end
  return row
end

-- Raises an error if a file is not valid UTF-8. The error contains the first line that is not valid.
local function check_utf8(text, path)
  if utf8.valid(text) then return end
  local number = 0
  for line in text:gmatch "[^\n]*\n?" do
    number = number + 1
    if not utf8.valid(line) then break end
  end
  error(("%s:%d: not valid UTF-8"):format(path, number))
end

local INDEXED = 16 * 1024 * 1024                           -- an index is written for files of at least 16 MiB

-- Returns whether an index may be written to the path `index`: the file does not exist, or it is an older index. This
-- check ensures that a file of the user is never replaced.
local function may_write(index)
  local file = io.open(index, "rb")
  if not file then return true end
  local magic = file:read(7)
  file:close()
  return magic == "PSLINES"
end

-- Opens a file of lines. The index of the file is in the same folder as the file, or in the cache folder if the file's
-- folder is not writable.
local function open_lines(path)
  local out, index = ffi.new("ps_lines *[1]"), path .. ".rows"
  local elsewhere = lfs.attributes(index, "mode") ~= "file" and unpacked.place("lines", path, ".rows")
  local use = elsewhere and lfs.attributes(elsewhere, "mode") == "file" and elsewhere or index
  check(C.ps_lines_open(path, use, out))
  local lines = ffi.gc(out[0], C.ps_lines_close)
  if lfs.attributes(path, "size") < INDEXED then return lines end
  if C.ps_lines_scanned(lines) == 0 then return lines end
  if may_write(index) and C.ps_lines_save(lines, index) >= 0 then return lines end
  elsewhere = elsewhere or unpacked.place("lines", path, ".rows")
  if elsewhere then C.ps_lines_save(lines, elsewhere) end
  return lines
end

local function of_lines(path, kind, name)
  local lines = open_lines(path)
  local text, nbytes, number = ffi.new("const char *[1]"), ffi.new("int64_t[1]"), ffi.new("int64_t[1]")
  local function line(i)
    check(C.ps_lines_read(lines, i - 1, text, nbytes, number))
    return ffi.string(text[0], nbytes[0]), ("%s:%.0f"):format(name, tonumber(number[0]))
  end
  local node = { n = tonumber(C.ps_lines_count(lines)), name = name }
  function node.place(i) return select(2, line(i)) end
  function node.hash()
    local hash = ffi.new "uint64_t[1]"
    check(C.ps_lines_hash(lines, hash))
    return hash[0]
  end
  if kind == "text" then
    function node.get(i)
      local one, place = line(i)
      if not utf8.valid(one) then error(place .. ": not valid UTF-8") end
      return { text = one }
    end
    return node
  end
  function node.text(i) return (line(i)) end
  function node.get(i)
    return decoded(line(i))
  end
  return node
end

--- Returns a node whose rows are the items of a list.
---@param list table[]
---@param name string name of the list, for errors
---@return ps.data.Node
function files.list(list, name)
  local node = { n = #list, name = name, shared = true }
  function node.get(i) return list[i] end
  function node.place(i) return ("%s[%d]"):format(name, i) end
  return node
end

local function whole_file(path)
  local text, why = read_file(path)
  if not text then error("ps.data.table: " .. why) end
  return text
end

-- Returns an iterator over `value`, a list in a SQuAD file. Raises an error if `value` is not a list of objects.
local function objects(value, where)
  if type(value) ~= "table" or #value == 0 and next(value) ~= nil then error(where .. " must be a list of objects") end
  for i, one in ipairs(value) do
    if type(one) ~= "table" then error(("%s[%d] must be an object"):format(where, i)) end
  end
  return ipairs(value)
end

-- Opens a SQuAD file. The file is one JSON object, which contains articles. An article contains paragraphs, and a
-- paragraph contains questions. Each question becomes a row.
local function of_squad(text, path)
  check_utf8(text, path)
  local ok, all = pcall(cjson.decode, text)
  if not ok then error(("%s: not JSON: %s"):format(path, tostring(all))) end
  local list = type(all) == "table" and all.data
  if type(list) ~= "table" or type(list[1]) ~= "table" or not list[1].paragraphs then
    error(path .. ": the file must contain a list of objects, or SQuAD's object with data and paragraphs; a file of "
      .. "one object per line ends in .jsonl")
  end
  local rows = {}
  for a, article in objects(list, path .. ": data") do
    local at_article = ("%s: data[%d].paragraphs"):format(path, a)
    for p, paragraph in objects(article.paragraphs, at_article) do
      local at_paragraph = ("%s[%d].qas"):format(at_article, p)
      for q, one in objects(paragraph.qas, at_paragraph) do
        local where = ("%s[%d]"):format(at_paragraph, q)
        if type(one.question) ~= "string" or type(paragraph.context) ~= "string" then
          error(where .. ": the row must have a question and its paragraph's context")
        end
        local texts, starts = {}, {}
        for k, answer in objects(one.answers == nil and {} or one.answers, where .. ".answers") do
          if type(answer.text) ~= "string" then error(where .. ": an answer has no text") end
          texts[k], starts[k] = answer.text, answer.answer_start
        end
        rows[#rows + 1] = { id = one.id, title = article.title, context = paragraph.context, question = one.question,
          answers = { text = texts, answer_start = starts } }
      end
    end
  end
  return files.list(rows, path)
end

-- Returns the position after the JSON value that begins at byte `at`. Returns nil if the value has no end.
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
      at = text:find('[%[%]{},"%s]', at)                   -- skip a number or one of the words true, false and null
    end
    if depth > 0 and at then at = text:find('[%[%]{}"]', at) end
    if not at then return nil end
  until depth <= 0
  return at
end

-- Opens a JSON file that contains one list. Stores the positions of the list's items. An item is decoded when its row
-- is read.
local function of_json(text, path)
  local function bad(at, why)
    local _, lines = text:sub(1, at - 1):gsub("\n", "")
    error(("%s:%d: not a JSON list of objects: %s"):format(path, lines + 1, why))
  end
  local at, from, upto = text:match "^%s*%[%s*()", {}, {}
  if not at then return of_squad(text, path) end
  local more = text:sub(at, at) ~= "]"
  while more do
    local stop = not text:find("^[%],}]", at) and value_end(text, at)
    if not stop or stop == at then bad(at, "a value is missing or not closed") end
    from[#from + 1], upto[#upto + 1] = at, stop - 1
    local c, after = text:match("^%s*([,%]])%s*()", stop)
    if not c then bad(stop, "expected ',' or ']'") end
    more, at = c == ",", after
  end
  if text:find("^%s*%]%s*%S", at) or #from > 0 and text:find("^%S", at) then bad(at, "more text follows the list") end
  local node = { n = #from, name = path }
  function node.text(i) return text:sub(from[i], upto[i]) end
  function node.place(i) return ("%s[%d]"):format(path, i) end
  function node.get(i) return decoded(node.text(i), node.place(i)) end
  return node
end

local KINDS = { jsonl = "lines", ndjson = "lines", json = "json", txt = "text", csv = "csv", tsv = "tsv" }
local READ = ".jsonl, .ndjson, .json, .txt, .csv, .tsv, each also with .gz"
local UNREAD = { zst = "unpack it with zstd -d", zip = "unpack it with unzip", parquet = "write it as JSON lines",
  arrow = "write it as JSON lines" }

-- Returns the kind of a file by its extension, or nil if the extension is not supported.
local function kind_of(path) return KINDS[path:gsub("%.gz$", ""):match "%.([^./]*)$" or ""] end

local function opened(path, given)
  local kind = kind_of(path)
  if not kind then
    local hint = UNREAD[path:match "%.([^./]*)$" or ""]
    error(("%s: ps.data.table does not read this kind of file; it reads %s%s"):format(path, READ,
      hint and "; " .. hint or ""))
  end
  local source = path:find "%.gz$" and unpacked.gzip(path) or path
  if kind == "lines" or kind == "text" and given.text ~= "file" then return of_lines(source, kind, path) end
  local text = require("ps.core.bom")(whole_file(source))
  local hash = C.ps_xxh3(text, #text)
  local node
  if kind == "json" then node = of_json(text, path)
  elseif kind == "text" then
    check_utf8(text, path)
    node = files.list({ { text = text } }, path)
  else
    check_utf8(text, path)
    node = csv(path, text, kind == "csv" and "," or "\t")
  end
  function node.hash() return hash end
  return node
end

--- Opens a file. Returns a node with the rows of the file.
---@param path string
---@param options {text?: string}
---@return ps.data.Node
function files.open(path, options)
  local node = opened(path, options)
  -- The key contains the hash of the file's bytes and not the path, because the file at this path may have been
  -- replaced since it was opened.
  function node.key()
    return ("%s %s %s"):format(kind_of(path), options.text or "line", bit.tohex(node.hash()))
  end
  return node
end

--- Returns a list of the files that a path stands for. If the path is a folder, the list contains all files in the
--- folder that have a supported extension. If the path is a pattern, the list contains all files that match the
--- pattern. Otherwise the list contains only the path.
---@param path string
---@return string[]
function files.find(path)
  local mode = lfs.attributes(path, "mode")
  if mode == "directory" then
    local found = {}
    for name in lfs.dir(path) do
      if kind_of(name) then found[#found + 1] = path .. "/" .. name end
    end
    table.sort(found)
    if #found == 0 then error(path .. ": the folder has no file of a kind that is read ("
      .. READ .. ")") end
    return found
  end
  if mode then return { path } end
  if path:find "[*?%[]" then
    local found = glob.glob(path) or {}
    if #found == 0 then error(path .. ": no file matches this pattern") end
    table.sort(found)
    return found
  end
  return error(path .. ": there is no such file or folder")
end

return files
