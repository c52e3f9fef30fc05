-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a small project as a starting point. The project is a copy of a folder of templates/, and runs without
-- changes. It also contains definitions for editors (tools/definitions.lua).
--   psluajit new text DIR
-- Each folder of templates/ is a kind of project. The README.md in the folder begins with "# TITLE" and a paragraph
-- that describes this kind. The README.md also contains the commands to run.
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local lfs = require "lfs"
local paths = require "ps.paths"
local write_file = require "ps.core.write_file"

local root = paths.root .. "/templates"

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

-- kinds: the names of the kinds in sorted order. about: the paragraph that describes each kind.
local kinds, about = {}, {}
for name in lfs.dir(root) do
  if name:match "^%w" then
    kinds[#kinds + 1] = name
    about[name] = read(root .. "/" .. name .. "/README.md"):match "^# [^\n]*\n\n(.-)\n\n":gsub("\n", " ")
  end
end
table.sort(kinds)

local lines = { "Kinds:" }
for _, kind in ipairs(kinds) do lines[#lines + 1] = ("  %-12s %s"):format(kind, about[kind]) end

local parser = argparse("psluajit new", "Writes a small project to start from.", table.concat(lines, "\n"))
parser:argument("kind", "What it trains: " .. table.concat(kinds, ", ") .. "."):choices(kinds)
parser:argument("dir", "The folder to make.")
local args = command_line.parse(parser)

local function fail(text, ...)
  io.stderr:write("new: ", text:format(...), "\n")
  os.exit(1)
end

local dir = args.dir:gsub("(.)/+$", "%1")
if lfs.attributes(dir, "mode") == "directory" then
  for entry in lfs.dir(dir) do
    if entry ~= "." and entry ~= ".." then fail("the folder %s is not empty; name another one", dir) end
  end
elseif lfs.attributes(dir) then fail("%s is a file; name another folder", dir)
else
  local ok, why = lfs.mkdir(dir)
  if not ok then fail("cannot make the folder %s: %s", dir, why) end
end

for entry in lfs.dir(root .. "/" .. args.kind) do
  if entry ~= "." and entry ~= ".." then
    local done, why = write_file(dir .. "/" .. entry, read(root .. "/" .. args.kind .. "/" .. entry))
    if not done then fail("cannot write %s", why) end
  end
end

local quiet = "'%s' '%s/tools/definitions.lua' '%s' >/dev/null"
if os.execute(quiet:format(paths.exe, paths.root, (dir:gsub("'", "'\\''")))) ~= 0 then
  fail("the project is written, but not its definitions for editors; run psluajit definitions there")
end

print(("wrote %s; README.md there says what each file is. To run it:\n\n    cd %s"):format(dir, dir))
local on_path = os.execute "command -v psluajit >/dev/null 2>&1" == 0
for rest in read(root .. "/" .. args.kind .. "/README.md"):gmatch "\n    psluajit( [^\n]*)" do
  print("    " .. (on_path and "psluajit" or paths.exe) .. rest)
end
