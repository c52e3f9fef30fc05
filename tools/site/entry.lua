-- SPDX-License-Identifier: BSD-3-Clause
-- Entries of the site's API reference. The entry of a function consists of its signature, types, results and errors,
-- and a link to its source. tools/api_doc.lua calls entry.put for each function. At the end, it calls entry.pages with
-- the whole text.
local exact = require "ps.core.exact"
local lfs = require "lfs"
local paths = require "ps.paths"
local wrap = require "ps.core.wrap"
local write_file = require "ps.core.write_file"

local entry = {}

local LINE = 120
local RAISING = { "%f[%w_]error%(", "%f[%w_]fail%(", "%f[%w_]refuse%(", "%f[%w_]raise%(", "%f[%w_]assert%(" }
local LEAST = 12                                           -- literals with fewer bytes are regarded as names and not as
                                                           -- messages

local files = {}                                           -- the lines of each file, by path
local linked = {}                                          -- true for each path to which an entry links

local function lines_of(path)
  if not files[path] then
    local lines = {}
    for line in io.lines(path) do lines[#lines + 1] = line end
    files[path] = lines
  end
  return files[path]
end

-- `text` contains the arguments of a call, "(...)". Returns the error message in the arguments, which consists of
-- literals that are joined by `..`. If there is no message, returns nil.
local function words_of(text)
  local _, to, words = text:find '^[^"\n]-"([^"\n]*)"'
  if not to then return nil end
  while true do
    local _, finish, more = text:find('^%s*%.%.%s*"([^"\n]*)"', to + 1)
    if not finish then break end
    words, to = words .. more, finish
  end
  return words
end

--- Returns the messages of the errors that a function raises. "..." stands for the variable parts of a message.
---@param source string the Lua text of the function
---@return string[]
function entry.errors(source)
  local found, places, seen = {}, {}, {}
  for _, pattern in ipairs(RAISING) do
    local from = 1
    while true do
      local _, last = source:find(pattern, from)
      if not last then break end
      places[#places + 1] = last
      from = last + 1
    end
  end
  table.sort(places)
  for _, at in ipairs(places) do
    local words = words_of(source:match("^%b()", at) or "")
    if words then
      words = words:gsub("%%%%", "\1"):gsub("%%[%d.-]*%a", "..."):gsub("\1", "%%"):gsub("\\n", " ")
      words = words:gsub("\\(.)", "%1"):gsub("^%.%.%.: ", "")
      if #words >= LEAST and words:find " " and not seen[words] then
        seen[words] = true
        found[#found + 1] = words
      end
    end
  end
  return found
end

-- Returns the location and the text of a function's definition. Returns nil if the build generated the function from a
-- row of src/ops.def.
local function written(fn)
  local info = debug.getinfo(exact.inner(fn), "S")
  local path = info.source:match "^@(.*)$"
  local short = path and path:sub(1, #paths.root + 1) == paths.root .. "/" and path:sub(#paths.root + 2)
  if not short or short:find "^build" or not lfs.attributes(path) then return nil end
  local lines = lines_of(path)
  return short, info.linedefined, table.concat(lines, "\n", info.linedefined, math.min(info.lastlinedefined, #lines))
end

--- Appends the entry of a function to a page.
---@param out string[]
---@param call string for example "ps.arange"
---@param fn function
---@param names string[] the names of the function's parameters; a name such as "stop?" marks an optional parameter
---@param about Described
---@param text string
function entry.put(out, call, fn, names, about, text)
  local path, line, source = written(fn)
  path = path or "src/ops.def"
  linked[path] = true
  out[#out + 1] = ("\n````{lua-function} %s(%s)\n"):format(call, table.concat(names, ", "))
  wrap(out, text, LINE, "")
  out[#out + 1] = ""
  for _, param in ipairs(about.params) do
    if param.name ~= "self" and param.type ~= "" then
      wrap(out, ("`%s`: `%s` %s"):format(param.name, param.type, param.about), LINE, "  ", "- ")
    end
  end
  for _, result in ipairs(about.returns) do
    wrap(out, ("returns `%s` %s"):format(result.type, result.about), LINE, "  ", "- ")
  end
  for _, words in ipairs(source and entry.errors(source) or {}) do
    wrap(out, ("error: %s"):format(words:gsub("[<>*_\\%[%]]", "\\%0")), LINE, "  ", "- ")
  end
  out[#out + 1] = ("\n<a class=\"source\" href=\"../../source/%s.html%s\">%s</a>\n````"):format(path,
    line and "#L" .. line or "", path)
end

--- Returns the name of a page: "ps.nn" becomes nn, and "Groups of ranks" becomes groups_of_ranks.
---@param title string the title of a section in docs/api.md
---@return string
function entry.page_name(title)
  local name = title:match "^ps%.(%w+)" or title
  return (name:lower():gsub("[^%w]+", "_"))
end

local function write(path, text) assert(write_file(path, text)) end

--- Splits the reference into pages, one per section. Writes the pages into the folder `folder`/api, and a list of the
--- pages into `folder`/api.md. If the file tools/site/examples/NAME.lua exists, page NAME begins with this example.
---@param text string
---@param folder string a folder such as "site/docs", which contains api.md and gets a folder api
function entry.pages(text, folder)
  lfs.mkdir(folder .. "/api")
  local head, rest = text:match "^(.-\n)(## .*)$"
  local toc = {}
  local at = 1
  while at do
    local next_at = rest:find("\n## ", at, true)
    local section = rest:sub(at, next_at or #rest)
    at = next_at and next_at + 1
    local title, body = section:match "^## ([^\n]+)\n(.*)$"
    local name = entry.page_name(title)
    body = body:gsub("\n### ", "\n## ")
    local example = io.open(paths.root .. "/tools/site/examples/" .. name .. ".lua", "rb")
    local shown = ""
    if example then
      shown = example:read "*a":gsub("^%-%- SPDX[^\n]*\n", "")
      example:close()
      shown = "\n```lua\n" .. shown .. "```\n"
    end
    write(("%s/api/%s.md"):format(folder, name), ("# %s\n%s%s"):format(title, shown, body))
    toc[#toc + 1] = "api/" .. name
  end
  write(folder .. "/api.md",
    ("%s\n```{toctree}\n%s\n```\n"):format(head:gsub("; do not edit", ""), table.concat(toc, "\n")))
  local list = {}
  for path in pairs(linked) do list[#list + 1] = path end
  table.sort(list)
  write(folder .. "/api/sources.txt", table.concat(list, "\n") .. "\n")
end

return entry
