-- SPDX-License-Identifier: BSD-3-Clause
-- Plants each defect of planted.lua in a copy of the source, builds psluajit_faults there, and runs seeds of
-- tools/faults.lua until one is WRONG. Prints a line per defect: the seed that was WRONG, the number of seeds that ran,
-- and the reason of the seed's WRONG.
--   psluajit spec/faults/plant.lua [--seeds 1:400] [--jobs 2] [--patience 1] [--only WORD] [--folder DIR]
-- The copy stays in --folder, so that the next run builds little. The exit status is 1 if a defect was not found.
local argparse = require "argparse"
local lfs = require "lfs"
local command_line = require "ps.core.command_line"
local paths = require "ps.paths"

local parser = argparse("spec/faults/plant.lua", "Plants defects in a copy of the source, and counts the seeds of "
  .. "tools/faults.lua that find each.")
parser:option("--seeds", "A:B: the seeds that are tried", "1:400")
command_line.whole(parser:option("--jobs", "jobs that run at once", "2"), 1, 64)
command_line.number(parser:option("--patience", "as of tools/faults.lua", "1"), 1, 1000)
parser:option("--only", "defects whose names have this text")
parser:option("--folder", "the copy of the source", "/tmp/psluajit-planted")
local options = command_line.parse(parser)
local folder = options.folder

local function shell(text, ...)
  local command = text:format(...)
  local p = assert(io.popen(command .. ' 2>&1; echo "|$?"'))
  local out, code = p:read("*a"):match "^(.*)|(%d+)\n$"
  p:close()
  return out, tonumber(code)
end

local function must(...)
  local out, code = shell(...)
  if code ~= 0 then
    io.stderr:write(out)
    os.exit(2)
  end
end

local function read(path)
  local f = assert(io.open(path, "rb"))
  local text = f:read "*a"
  f:close()
  return text
end

local function write(path, text)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  assert(f:close())
end

-- Replaces the text `from`, which must occur once.
local function replaced(text, change, path)
  local at, last = text:find(change.from, 1, true)
  if not at or text:find(change.from, last, true) then
    io.stderr:write(("%s does not have this text once:\n%s\n"):format(path, change.from))
    os.exit(2)
  end
  return text:sub(1, at - 1) .. change.to .. text:sub(last + 1)
end

-- Builds the copy with a defect. The function that it returns removes the defect.
local function plant(row)
  local saved = {}
  for _, change in ipairs { row, row.also } do
    local path = change.file or row.file
    local text = read(folder .. "/" .. path)
    saved[path] = saved[path] or text
    write(folder .. "/" .. path, replaced(text, change, path))
  end
  must("cd '%s' && cmake --build build -j 2 --target psluajit_faults", folder)
  return function() for path, text in pairs(saved) do write(folder .. "/" .. path, text) end end
end

lfs.mkdir(folder)
for _, name in ipairs { "src", "lua", "models", "tools", "cmake", "spec", "CMakeLists.txt" } do
  must("rm -rf '%s/%s' && cp -a '%s/%s' '%s/%s'", folder, name, paths.root, name, folder, name)
end
-- cp -a keeps the times of files, so objects of a defect that an earlier run planted would seem up to date.
local defects = dofile(paths.root .. "/spec/faults/planted.lua")
for _, row in ipairs(defects) do
  for _, change in ipairs { row, row.also } do must("touch '%s/%s'", folder, change.file or row.file) end
end
must("cd '%s' && cmake -S . -B build -G Ninja -DPS_CUDA=OFF -DPS_FAULTS=ON && "
  .. "cmake --build build -j 2 --target program", folder)

local missed = 0
for _, row in ipairs(defects) do
  if not options.only or row.name:find(options.only, 1, true) then
    local remove = plant(row)
    local out, code = shell("cd '%s' && build/psluajit tools/faults.lua --seeds %s --jobs %d --patience %g --stop-at 1",
      folder, options.seeds, options.jobs, options.patience)
    remove()
    local seeds, first, why = 0, nil, nil
    for line in out:gmatch "[^\n]+" do
      if line:match "^%d+  " then seeds = seeds + 1 end
      if not why then first, why = line:match "^(%d+)  .*%d+ happened  WRONG: (.*)$" end
    end
    if code == 1 and why then print(("seed %3s, %3d seeds: %s: %s"):format(first, seeds, row.name, why))
    else
      missed = missed + 1
      print(("missed by %d seeds: %s%s"):format(seeds, row.name, code > 1 and "\n" .. out or ""))
    end
    io.stdout:flush()
  end
end
os.exit(missed > 0 and 1 or 0)
