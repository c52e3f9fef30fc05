-- SPDX-License-Identifier: BSD-3-Clause
-- Merges an adapter of PEFT or psluajit into its base model, and writes the merged model to a folder. The merge needs
-- memory for two copies of the largest adapted tensor (lua/ps/lora/merge_folder.lua).
--   psluajit tools/merge_adapter.lua BASE ADAPTER --out DIR [--force]
-- The exit code is 1 if the tool fails.
local ps = require "ps"
local line = require "ps.core.command_line"

local parser = require "argparse" ("psluajit merge_adapter", "Merges an adapter into its base model.")
parser:argument("base", "the folder of the base model, or its name in Hugging Face's cache")
parser:argument("adapter", "the folder with adapter_config.json")
parser:option("--out", "the folder to write"):count(1)
parser:option("--max-shard-size", "largest size of a file, such as 5GB")
parser:option("--task", "the model's class, if config.json names another one: causal_lm, sequence_classification, ...")
parser:flag("--other-base", "merge even if the adapter was trained on other weights")
parser:flag("--force", "replace a model or an adapter in --out")
local args = line.parse(parser)
line.try("merge_adapter.lua", ps.checkpoints.new_run, args.out, { force = args.force })
line.try("merge_adapter.lua", ps.lora.merge_folder, args.base, args.adapter, args.out,
  { max_shard_size = args.max_shard_size, other_base = args.other_base, task = args.task })
print(("wrote %s"):format(args.out))
