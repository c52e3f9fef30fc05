-- SPDX-License-Identifier: BSD-3-Clause
-- Runs commands one after another in several rounds. The last line of each command's output must be JSON. Prints the
-- medians of each command, and their ratios to the medians of the first command. The last line is one JSON object with
-- the medians and the ratios, which bench/record.lua can record.
--   psluajit bench/side_by_side.lua --key tokens_per_s --rounds 3 \
--     'psluajit bench/train.lua' 'OMP_NUM_THREADS=2 python3 peer.py bench'
-- A ratio above 1 means that the first command is better. For rates (.._per_s), higher figures are better. For keys
-- that end in _s or _mib, lower figures are better.
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole, number = command_line.whole, command_line.number

local parser = argparse("bench/side_by_side.lua", "Prints medians of several commands side by side.")
parser:option("--key", "figure to compare"):args "*"
whole(parser:option("--rounds", "number of runs of each command", "3"), 1)
number(parser:option("--timeout", "the most seconds of a command", "300"), 0)
parser:argument("commands", "shell commands"):args "+"
local args = command_line.parse(parser)

local function run(command)
  local p = assert(io.popen(("timeout %d sh -c '%s' 2>/dev/null"):format(args.timeout, command:gsub("'", [['\'']]))))
  local last
  for line in p:lines() do if line:match("^{.*}$") then last = line end end
  p:close()
  return last and cjson.decode(last)
end

local figures = {}
for i in ipairs(args.commands) do figures[i] = {} end
for _ = 1, args.rounds do
  for i, command in ipairs(args.commands) do
    local result = run(command)
    for _, key in ipairs(args.key) do
      figures[i][key] = figures[i][key] or {}
      if result and result[key] then table.insert(figures[i][key], result[key]) end
    end
  end
end

local function median(list)
  table.sort(list)
  return list[math.floor((#list + 1) / 2)]
end

local found = {}
for _, key in ipairs(args.key) do
  local first = median(figures[1][key])
  local higher_is_better = key:match("per_s$") or not (key:match("_s$") or key:match("_mib$"))
  for i, command in ipairs(args.commands) do
    local value = median(figures[i][key])
    local ratio = value and first and (higher_is_better and first / value or value / first)
    found[i] = found[i] or { command = command, rounds = args.rounds }
    found[i][key], found[i]["first_is_better_" .. key] = value, ratio
    print(("%-14s %12s  first is %s  %s"):format(key, value and ("%.4g"):format(value) or "no result",
      ratio and ("%.2fx"):format(ratio) or "-", command))
  end
end
print(cjson.encode(found))
