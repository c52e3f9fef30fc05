-- SPDX-License-Identifier: BSD-3-Clause
-- Writes definitions of psluajit's functions. Editors with LuaLS or EmmyLua use the definitions to complete and check
-- calls. DIR is a folder of scripts. The tool writes the folder DIR/.psluajit. If DIR has no .luarc.json, the tool also
-- writes this file, which points to the folder.
--   psluajit definitions [DIR]
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local lfs = require "lfs"
local paths = require "ps.paths"
local write_file = require "ps.core.write_file"

local parser = argparse("psluajit definitions",
  "Writes .luarc.json and .psluajit/, by which editors complete and check scripts.")
parser:argument("dir", "The folder of the scripts.", ".")
local args = command_line.parse(parser)
local dir = args.dir:gsub("(.)/+$", "%1")

local function fail(text, ...)
  io.stderr:write("definitions: ", text:format(...), "\n")
  os.exit(1)
end

local function write(path, text)
  local done, why = write_file(path, text)
  if not done then fail("cannot write %s", why) end
end

local function make(path)
  if lfs.attributes(path, "mode") == "directory" then return end
  local ok, why = lfs.mkdir(path)
  if not ok then fail("cannot make the folder %s: %s", path, why) end
end

if lfs.attributes(dir, "mode") ~= "directory" then fail("there is no folder %s", dir) end
local library = dir .. "/.psluajit"
make(library)
make(library .. "/ps")
make(library .. "/models")

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end
if os.execute(("%s %s --definitions %s"):format(quoted(paths.exe), quoted(paths.root .. "/tools/api_doc.lua"),
  quoted(library .. "/ps.lua"))) ~= 0 then
  fail("tools/api_doc.lua did not write %s/ps.lua", library)
end
write(library .. "/ps/bmt.lua", "---@meta\n\n---@type ps.bmt\nlocal bmt\nreturn bmt\n")

-- A file of models/ returns a family of models. The loop writes a definition of the family's function `new`.
for name in lfs.dir(paths.root .. "/models") do
  local model = name:match "^([%w_]+)%.lua$"
  if model and not model:find "_config$" then
    write(library .. "/models/" .. name, ([[
---@meta

local %s = {}

--- Returns a model with random weights.
---@param preset string|table a preset's name, or a table with config.json's fields
---@param options? table
---@return ps.pretrained.Model
function %s.new(preset, options) end

return %s
]]):format(model, model, model))
  end
end

local settings = dir .. "/.luarc.json"
local present = io.open(settings, "rb")
if present then
  local points = present:read("*a"):find(".psluajit", 1, true)
  present:close()
  if points then return print("wrote " .. library) end
  print(("wrote %s; add it to workspace.library of %s, which was not changed"):format(library, settings))
  return
end
write(settings, [[
{
  "runtime.version": "LuaJIT",
  "workspace.library": [".psluajit"],
  "workspace.checkThirdParty": false
}
]])
print(("wrote %s and %s"):format(settings, library))
