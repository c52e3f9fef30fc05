-- SPDX-License-Identifier: BSD-3-Clause
-- Suggests an option for a name that a program does not have. If a program of Hugging Face or llama.cpp has an option
-- of this name, the suggestion is the option with the same meaning. Otherwise it is the closest name.
local nearest = require "ps.core.nearest"

local option_names = {}

-- Names in other programs, and the options of psluajit's programs that mean the same. If the program has several
-- options of a list, the first is suggested.
local MEANINGS = {
  ["max-new-tokens"] = { "max-new" }, ["max-tokens"] = { "max-new" }, ["n-predict"] = { "max-new" },
  ["max-length"] = { "seq", "max-new" }, ["max-seq-length"] = { "seq" }, ["max-seq-len"] = { "seq" },
  ["block-size"] = { "seq" }, ["ctx-size"] = { "seq" }, prompt = { "start" }, ["system-prompt"] = { "system" },
  ["num-return-sequences"] = { "num-samples" }, temp = { "temperature" }, ["do-sample"] = { "temperature" },
  ["stop-strings"] = { "stop" }, ["batch-size"] = { "batch" },
  ["model-name-or-path"] = { "model" }, ["model-id"] = { "model" }, ["torch-dtype"] = { "dtype" },
  ["load-in-4bit"] = { "keep-quantized" }, ["peft-model"] = { "adapter" }, lora = { "adapter" },
  ["train-file"] = { "data" }, ["dataset-name"] = { "data" }, dataset = { "data" },
  ["validation-file"] = { "eval", "held-out" }, ["eval-file"] = { "eval", "held-out" }, eval = { "held-out" },
  ["held-out"] = { "eval" }, ["output-dir"] = { "out" }, output = { "out" }, ["overwrite-output-dir"] = { "force" },
  ["num-train-epochs"] = { "epochs" }, ["max-steps"] = { "steps" }, ["eval-steps"] = { "eval-every" },
  ["per-device-train-batch-size"] = { "batch" }, ["train-batch-size"] = { "batch" },
  ["gradient-accumulation-steps"] = { "accumulate" }, ["gradient-checkpointing"] = { "recompute" },
  ["learning-rate"] = { "lr" }, ["resume-from-checkpoint"] = { "resume" },
  ["lora-r"] = { "lora" }, ["lora-rank"] = { "lora" }, ["lora-alpha"] = { "alpha" }, ["use-dora"] = { "dora" },
}

--- Returns the option that the user of an unknown option probably meant, or nil.
---@param name string such as "--max_new_tokens"
---@param known string[] the program's options, such as "--max-new"
---@return string?
function option_names.meant(name, known)
  local plain, has, names = name:gsub("^%-+", ""):gsub("_", "-"):lower(), {}, {}
  for _, option in ipairs(known) do
    local long = option:match "^%-%-(.+)"
    if long then has[long], names[#names + 1] = true, long end
  end
  local meant = has[plain] and plain
  for _, meaning in ipairs(MEANINGS[plain] or {}) do meant = meant or has[meaning] and meaning end
  meant = meant or nearest.find(plain, names)
  return meant and "--" .. meant
end

return option_names
