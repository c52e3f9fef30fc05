-- SPDX-License-Identifier: BSD-3-Clause
-- Draws pictures of a profile (ps.profiler.save), like PatrickStar's tool of the same name (docs/monitoring.md):
--   psluajit tools/profile_visualizer.lua profile.json --fig_type memory --memory_type GPU --rm_warmup --out memory.svg
--   psluajit tools/profile_visualizer.lua profile.json --fig_type access --out access.png
--   psluajit tools/profile_visualizer.lua profile.json --html --out profile.html
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local draw = require "ps.profile.draw"
local page = require "ps.profile.page"
local read = require "ps.profile.read"

local parser = argparse("psluajit profile_visualizer", "Draws a profile of ps.profiler.save.")
parser:argument("profile", "the file")
parser:option("--fig_type", "memory (of a tier, over time; the default) or access (the place of each chunk)")
parser:option("--memory_type", "the tier: GPU, CPU or DISK; default: the fastest one in the profile")
parser:option("--rm_warmup", "leave out the first steps, which had no plan"):args "?"
parser:flag("--html", "write one page with both figures for a browser; it needs no network")
parser:option("--out", "file to write: .svg or .png, with --html .html")
local args = command_line.parse(parser)

-- Returns the value of the flag --rm_warmup, which can have a value, as in PatrickStar's --rm_warmup=True, or no value.
local function flag(given)
  if given == nil then return false end
  local word = (type(given) == "table" and given[1] or "true"):lower()
  if word ~= "true" and word ~= "false" then error(("--rm_warmup %s: it must be True or False"):format(word), 0) end
  return word == "true"
end

local function one_of(name, given, ...)
  for _, word in ipairs { ... } do if given == word then return given end end
  error(("--%s %s: it takes %s"):format(name, given, table.concat({ ... }, ", ")), 0)
end

local function out_path(default, ...)
  if not args.out then return (args.profile:gsub("%.json$", "")) .. default end
  for _, ending in ipairs { ... } do if args.out:sub(-#ending) == ending then return args.out end end
  error(("--out %s: its name ends in %s"):format(args.out, table.concat({ ... }, " or ")), 0)
end

local function main()
  local warmup = flag(args.rm_warmup)
  local fig = one_of("fig_type", args.fig_type or "memory", "memory", "access")
  local kind = args.memory_type and one_of("memory_type", args.memory_type:upper(), "GPU", "CPU", "DISK")
  if args.html and args.fig_type then error("--html draws both figures: remove --fig_type", 0) end
  if fig == "access" and kind then error("--memory_type does not apply to --fig_type access: remove one of them", 0) end
  local path = args.html and out_path(".html", ".html") or out_path("_" .. fig .. ".svg", ".svg", ".png")
  local profile = read.file(args.profile)
  if warmup then read.drop_warmup(profile) end
  if args.html then page.write(profile, path, kind and read.tier(profile, kind).name)
  elseif fig == "access" then draw.access(profile, path)
  else draw.memory(profile, read.tier(profile, kind), path) end
  if profile.dropped > 0 then
    print(("%d older events were overwritten, so the record begins after them"):format(profile.dropped))
  end
  print("wrote " .. path)
end

command_line.try("profile_visualizer.lua", main)
