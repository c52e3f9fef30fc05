-- SPDX-License-Identifier: BSD-3-Clause
-- Compares optimizers that have small states with AdamW, by their held-out losses. Trains the model of
-- examples/train_char.lua with each optimizer and several seeds.
--   psluajit bench/quality.lua TEXT [--iters 2000] [--seeds 3]
-- The last line is one JSON object. For each optimizer, the object contains the losses of all seeds, the mean loss, and
-- the mean loss minus AdamW's mean loss.
local cjson = require "cjson"
local argparse = require "argparse"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local OPTIMIZERS = { "AdamW", "AdamW8bit", "AdamWBF16" }

local parser = argparse("bench/quality.lua", "Compares the held-out loss of optimizers.")
parser:argument("data", "text file to train on")
whole(parser:option("--iters", "steps of each run", "2000"), 1)
whole(parser:option("--seeds", "number of runs with each optimizer", "3"), 1)
local args = command_line.parse(parser)

local found = { iters = args.iters }
for _, name in ipairs(OPTIMIZERS) do found[name] = { losses = {}, mean = 0 } end
for seed = 1, args.seeds do
  for _, name in ipairs(OPTIMIZERS) do
    local command = "%s %s/examples/train_char.lua --data %s --iters %d --seed %d --optimizer %s --json"
    local result = process.last_json(command:format(process.quote(paths.exe), process.quote(paths.root),
      process.quote(args.data), args.iters, seed, name))
    if not result then
      error(("bench/quality.lua: %s, seed %d: the run ended without a line of JSON"):format(name, seed), 0)
    end
    found[name].losses[seed] = result.val_loss
    found[name].mean = found[name].mean + result.val_loss / args.seeds
    print(("%-10s seed %d: %.4f"):format(name, seed, result.val_loss))
  end
end
for _, name in ipairs(OPTIMIZERS) do found[name].over_adamw = found[name].mean - found.AdamW.mean end
print(cjson.encode(found))
