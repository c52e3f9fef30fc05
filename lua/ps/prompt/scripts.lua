-- SPDX-License-Identifier: BSD-3-Clause
-- Finds psluajit's own scripts by name. Prints the lists of `psluajit tools` and `psluajit examples`. For a misspelt
-- name, finds the script or module with the most similar name.
local lfs = require "lfs"
local nearest = require "ps.core.nearest"
local paths = require "ps.paths"

local scripts = {}

-- Tools that work only on psluajit's own sources.
local OWN = {}
for name in ("api_doc check_layers config_doc faults man path_doc pictures pytorch_doc site"):gmatch "%S+" do
  OWN[name] = true
end

local LISTS = { tools = true, examples = true }            -- these scripts only list the scripts of a folder

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  return text
end

-- Returns the first sentence of a text. The sentence ends with a full stop or a colon before a capital letter. "et al."
-- does not end a sentence.
local function sentence(text)
  local from = 1
  while true do
    local at = text:find("%.%s+%u", from) or text:find "[%.:]?%s*$"
    if not text:sub(1, at):find "et al%.$" then return text:sub(1, at - 1) .. "." end
    from = at + 1
  end
end

-- Returns one line that describes a script. This is the script's argparse description. If there is none, it is the
-- first sentence of the script's first comment.
local function about(text)
  local described, at = text:match 'argparse"?%s*%(%s*"[^"]*",%s*"([^"]*)"()'
  if described then
    while true do                                          -- the text may consist of several literals joined by ..
      local more, next_at = text:match('^%s*%.%.%s*"([^"]*)"()', at)
      if not more then return sentence(described) end
      described, at = described .. more, next_at
    end
  end
  local lines = {}
  for line in text:gmatch "([^\n]*)\n" do
    local comment = line:match "^%-%-%s?(.*)$"
    if not comment then
      if lines[1] then break end
    elseif comment:find "^%s" and lines[1] then break     -- the command line of the script
    elseif not comment:find "^SPDX" then lines[#lines + 1] = comment end
  end
  return (sentence(table.concat(lines, " ")):gsub("%s+", " "))
end

--- Returns the scripts in a folder of psluajit's tree, sorted by name. Files that are loaded only by other scripts are
--- omitted.
---@param folder "tools"|"examples"
---@return {name: string, about: string, own: boolean}[] `own` is true for scripts that work only on psluajit's own
--- sources.
function scripts.list(folder)
  local list, root = {}, paths.root .. "/" .. folder
  for file in lfs.dir(root) do
    local name = file:match "^([%w_]+)%.lua$"
    local text = name and not LISTS[name] and read(root .. "/" .. file)
    if text and not text:find("\nreturn [%w_]+%s*$") then
      list[#list + 1] = { name = name, about = about(text), own = folder == "tools" and OWN[name] or false }
    end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

--- Prints the scripts of a folder. Each script has one line.
---@param folder "tools"|"examples"
function scripts.print(folder)
  local list, width = {}, 0
  for _, script in ipairs(scripts.list(folder)) do
    if not script.own then
      list[#list + 1] = script
      width = math.max(width, #script.name)
    end
  end
  for _, script in ipairs(list) do print(("%-" .. width .. "s  %s"):format(script.name, script.about)) end
  print(("\nTo run one: psluajit NAME [options]; psluajit NAME --help lists its options. The files are in %s."):format(
    paths.root .. "/" .. folder))
end

local MOST = 4                                             -- largest number of names that are suggested
local LEAST = 3                                            -- names with fewer letters are not searched as a word

-- Returns the names that have `word` at the beginning or after an underscore. For example, train_gpt2 matches "train"
-- and "gpt2".
local function with_word(word, names)
  local found = {}
  for _, name in ipairs(names) do
    if ("_" .. name):find("_" .. word, 1, true) then found[#found + 1] = name end
  end
  return found
end

-- Options of the program that users often mistake for scripts.
local OPTIONS = { help = "--help", version = "--version" }

--- Returns the end of the error message for a script that does not exist. The message suggests psluajit's scripts and
--- Lua files in the same folder whose names contain the given name. If there are none, it suggests the most similar
--- name. The message also says how to list the scripts.
---@param name string
---@return string
function scripts.instead(name)
  local folder, file = name:match "^(.*/)([^/]*)$"
  local words, bare = {}, (file or name):gsub("%.lua$", "")
  if not folder then
    for of in pairs(LISTS) do
      words[#words + 1] = of
      for _, script in ipairs(scripts.list(of)) do words[#words + 1] = script.name end
    end
  end
  local ok, each, state = pcall(lfs.dir, folder or ".")
  if ok then
    for entry in each, state do words[#words + 1] = entry:match "^(.+)%.lua$" end
  end
  table.sort(words)
  local meant = #bare >= LEAST and with_word(bare:lower(), words) or {}
  if #meant == 0 or #meant > MOST then meant = { nearest.find(bare, words) } end
  if #meant == 0 then                                      -- a word of the name may be misspelt, such as "tarin"
    local parts = {}
    for _, word in ipairs(words) do
      for part in word:gmatch "[^_]+" do parts[#parts + 1] = part end
    end
    local part = nearest.find(bare, parts)
    meant = part and nearest.distance(bare, part) == 1 and with_word(part, words) or {}
    if #meant > MOST then meant = {} end
  end
  local ending = (folder or name:find "%.lua$") and ".lua" or ""
  for i, word in ipairs(meant) do meant[i] = (folder or "") .. word .. ending end
  if #meant == 0 then meant = { OPTIONS[bare:lower()] } end
  local last = table.remove(meant)
  local hint = last and ("\n  did you mean %s?"):format(#meant > 0 and table.concat(meant, ", ") .. " or " .. last
    or last) or ""
  return hint .. (folder and "" or "\n  psluajit examples and psluajit tools list psluajit's scripts")
end

--- Returns the end of the error message for a module that `require` does not find. It suggests the most similar name in
--- the module's folder. Without such a name, the result is an empty text.
---@param name string such as "models.gtp2"
---@return string
function scripts.instead_of_module(name)
  local folder, bare = name:match "^(.*%.)([^%.]*)$"
  local words, seen = {}, {}
  for before in package.path:gmatch "([^;?]*)%?%.lua" do
    local ok, each, state = pcall(lfs.dir, before .. (folder or ""):gsub("%.", "/"))
    for entry in ok and each or function() end, state do
      local word = entry:match "^(.+)%.lua$" or entry:match "^[%w_]+$"
      if word and not seen[word] then words[#words + 1], seen[word] = word, true end
    end
  end
  table.sort(words)
  local near = nearest.find(bare or name, words)
  return near and ("\n\tdid you mean '%s%s'?"):format(folder or "", near) or ""
end

local function is_file(path)
  local mode = lfs.attributes(path, "mode")
  return mode ~= nil and mode ~= "directory"
end

--- Finds a script as `psluajit NAME` does (src/main.c). Tries the name itself, then psluajit's folders examples and
--- tools, and then psluajit's root folder. In these folders, a name without a folder or an extension means NAME.lua.
---@param name string
---@return string? path
---@return string? why the error message, if there is no such file
function scripts.find(name)
  if is_file(name) then return name end
  local places = {}
  if paths.root and not name:match "^[/.]" then
    for _, folder in ipairs { "/examples/", "/tools/", "/" } do
      local path = paths.root .. folder .. name .. (name:find "[./]" and "" or ".lua")
      if is_file(path) then return path end
      places[#places + 1] = ",\n  and " .. path
    end
    table.insert(places, 1, ("\n  looked for %s in the current folder"):format(name))
  end
  local mode, why = lfs.attributes(name, "mode")
  return nil, ("cannot open %s: %s%s%s"):format(name, mode and "Is a directory" or why:gsub("^.*: ", ""),
    table.concat(places), scripts.instead(name))
end

return scripts
