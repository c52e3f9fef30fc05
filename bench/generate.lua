-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/generate.lua DIR --ids "1 2 3" --max-new 20 [--num-beams 3] [--json]: continues ids with the model of
-- a folder of Hugging Face's, greedily or by beams, and prints the ids of each sequence, prompt and continuation, and
-- tokens a second. --ids may come several times: prompts of any lengths. --json: one object with ids, tokens_per_s and
-- seconds. --rounds N: the fastest of N runs. Exit status 2, and a first line `refused: FIELD = VALUE: why` on stderr:
-- the folder is not supported.
local ps = require "ps"
local argparse = require "argparse"
local json = require "cjson"
local whole = require("ps.command_line").whole

local parser = argparse("bench/generate.lua", "Continues ids with the model of a folder.")
parser:argument("folder", "a folder of Hugging Face's with a causal model")
parser:option("--ids", "a prompt: ids with blanks between"):count "+"
whole(parser:option("--max-new", "tokens to add at most", "20"), 1)
whole(parser:option("--num-beams", "beams; 1: greedy", "1"), 1)
whole(parser:option("--rounds", "runs, of which the fastest counts", "1"), 1)
parser:option("--dtype", "type of the weights", "fp32")
parser:flag("--json", "one JSON object")
local args = parser:parse()

local function prompts()
  local rows = {}
  for i, line in ipairs(args.ids) do
    rows[i] = {}
    for word in line:gmatch("%S+") do
      rows[i][#rows[i] + 1] = tonumber(word) or error(("--ids: '%s' is no id"):format(word), 0)
    end
  end
  return rows
end

local function run()
  local rows, model = prompts(), ps.from_pretrained(args.folder, { dtype = args.dtype, quiet = true })
  local best, out, added = math.huge, nil, 0
  for _ = 1, args.rounds do
    local began = ps.now()
    out = model:generate(rows, args.max_new, { do_sample = false, num_beams = args.num_beams })
    best = math.min(best, ps.now() - began)
  end
  for r, row in ipairs(out) do added = added + #row - #rows[r] end
  if args.json then
    return print(json.encode { ids = out, seconds = best, tokens_per_s = added / best })
  end
  for _, row in ipairs(out) do print(table.concat(row, " ")) end
  print(("%d tokens in %.3f s, %.1f tokens/s"):format(added, best, added / best))
end

local ok, problem = pcall(run)
if not ok then
  local refused = type(problem) == "table" and problem.refused
  io.stderr:write(refused and "refused: " .. refused or tostring(problem), "\n")
  os.exit(refused and 2 or 1)
end
