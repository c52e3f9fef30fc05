-- SPDX-License-Identifier: BSD-3-Clause
-- Reports the memory and the time of a training script's first step (docs/planning.md). The memory is not allocated,
-- and nothing is computed.
--   psluajit tools/plan.lua train.lua --steps 100
--   psluajit --dry-run --hardware h200x8 --host 2TB train.lua --steps 100
-- The script runs to the end of its first optimizer:step(). The exit code is 0 if the step fits, 1 if the script fails
-- for a reason other than memory, and 2 if the step does not fit.
local argparse = require "argparse"
local cjson = require "cjson"
local command_line = require "ps.core.command_line"
local hardware = require "ps.planning.hardware"
local planning = require "ps.planning"
local report = require "ps.planning.report"
local scripts = require "ps.prompt.scripts"
local types = require "ps.core.types"

local DOES_NOT_FIT = 2

-- Splits the arguments. Options of this tool precede the script. All arguments after the script belong to the script.
local function split(words)
  local takes = { ["--hardware"] = true, ["--host"] = true, ["--ranks"] = true, ["--find"] = true,
    ["--limit"] = true }
  local own, i = {}, 1
  while words[i] and words[i]:sub(1, 1) == "-" do
    own[#own + 1] = words[i]
    if takes[words[i]] then
      i = i + 1
      own[#own + 1] = words[i]
    end
    i = i + 1
  end
  return own, words[i], { unpack(words, i + 1) }
end

local function bytes(text)
  local ok, value = types.bytes.take(tonumber(text) or text)
  if ok then return value end
  return nil, ("--host %s: it takes %s"):format(text, types.bytes.text)
end

local function arguments()
  local parser = argparse("psluajit plan", "Reports the memory and time of a training script's first step.")
  parser:usage "Usage: psluajit plan [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]..."
  parser:flag("--json", "print one JSON object instead of a table")
  parser:option("--hardware", "a machine other than this one: " .. table.concat(hardware.names(), ", ")
    .. ", and NAMExN with N GPUs")
  parser:option("--host", "its host memory, as 512GiB; default: the table's"):convert(bytes)
  command_line.whole(parser:option("--ranks", "number of processes; default: one per GPU"), 1, 4096)
  parser:option("--find", "the aim of further dry runs: budget, batch, model, all or nothing", "all")
    :choices { "budget", "batch", "model", "all", "nothing" }
  command_line.number(parser:option("--limit", "seconds within which further dry runs may begin; 0: no limit", "60"), 0)
  local own, script, args = split(arg)
  local options = command_line.parse(parser, own)
  if not script then parser:error "no script was given; its path follows the options" end
  options.script, options.args = script, args
  return options
end

local function fail(message)
  io.stderr:write("plan: ", message, "\n")
  os.exit(1)
end

local options = arguments()
local script, why = scripts.find(options.script)
if not script then fail(why) end
local ok, plan = pcall(planning.plan, { script = script, args = options.args, find = options.find,
  hardware = options.hardware, host = options.host, ranks = options.ranks, limit = options.limit, quiet = true })
if not ok then fail(tostring(plan)) end
if options.json then print(cjson.encode(plan)) else print(table.concat(report.lines(plan), "\n")) end
os.exit(plan.fits and 0 or DOES_NOT_FIT)
