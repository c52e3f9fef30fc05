-- SPDX-License-Identifier: BSD-3-Clause
-- Trains an adapter on preferences. Compares the ids and the loss of each step with TRL's DPOTrainer and PEFT:
--   PS_TORCH_PYTHON=PYTHON psluajit bench/dpo_losses.lua MODEL [--loss ipo] [--steps 50]
-- Both programs begin with the same new adapter, whose matrix B is zero, and read the same rows in the same order. A
-- row has a question of a user, a chosen answer and a rejected answer. The reference model is the model without its
-- adapter. B must be zero, because TRL would treat an adapter with another B as a part of the reference model. Training
-- uses AdamW without decay, a constant rate, fp32 and no dropout. The Python needs trl, peft and datasets. The last
-- line is one JSON object:
--   steps, first_loss, last_loss
--   largest                    largest relative difference between the losses of a step
--   at                         the step with the largest difference
--   ids_equal                  number of rows whose ids are equal
--   rows, seconds, peer_seconds
-- The exit status is 1 if `largest` is above --within or ids differ.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local command_line = require "ps.core.command_line"
local paths = require "ps.paths"
local losses_lib = require "bench.losses_lib"
local process = require "bench.process_lib"
local whole, number = command_line.whole, command_line.number

local parser = argparse("bench/dpo_losses.lua", "Compares the losses of preference training with TRL's.")
parser:argument("model", "a Hugging Face folder with a chat template")
parser:option("--loss", "sigmoid (DPO) or ipo", "sigmoid"):choices { "sigmoid", "ipo" }
whole(parser:option("--steps", "steps", "50"), 1)
whole(parser:option("--batch", "pairs of a step", "2"), 1)
whole(parser:option("--lora", "rank of the adapter", "8"), 1)
number(parser:option("--beta", "of the loss", "0.1"), 0)
number(parser:option("--lr", "learning rate", "1e-3"), 0)
number(parser:option("--within", "relative difference that is allowed", "1e-4"), 0)
local args = command_line.parse(parser)

local WORDS = {}
for word in ("the a red green blue old new small large house tree river stone bird cat dog runs sleeps sings under "
  .. "over near and but quickly slowly today often never seven three"):gmatch "%S+" do WORDS[#WORDS + 1] = word end

-- Returns a sentence of n words. The words depend on i, the index of the sentence.
local function sentence(i, n)
  local words = {}
  for k = 1, n do words[k] = WORDS[(i * 31 + k * k * 7 + k * i) % #WORDS + 1] end
  return table.concat(words, " ") .. "."
end

local function rows_of(n)
  local rows = {}
  for i = 1, n do
    rows[i] = { prompt = { { role = "user", content = "Say something, number " .. i } },
      chosen = { { role = "assistant", content = sentence(i, 4 + i % 5) } },
      rejected = { { role = "assistant", content = sentence(i + 1000, 3 + i % 7) } } }
  end
  return rows
end

-- Trains with psluajit, starting with the adapter in the folder `adapter`. Returns the losses.
local function trained(adapter, pairs_of, pad)
  local model = ps.lora.load(ps.from_pretrained(args.model, { dtype = "fp32", quiet = true }), adapter):train()
  ps.preference.wrap(model, { beta = args.beta, loss_type = args.loss })
  return losses_lib.train(model, args.steps, args.lr, function(step)
    local chosen = {}
    for k = 1, args.batch do chosen[k] = pairs_of[(step - 1) * args.batch + k] end
    return model(ps.preference.batch(chosen, { pad = pad })).loss
  end)
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function make_adapter(folder)
  ps.manual_seed(1)
  local model = ps.from_pretrained(args.model, { dtype = "fp32", quiet = true })
  ps.lora.wrap(model, { r = args.lora, alpha = 2 * args.lora }):save_pretrained(folder)
end

local function same(a, b) return table.concat(a, " ") == table.concat(b, " ") end

local function main()
  local tok = ps.tokenizer.from_pretrained(args.model)
  local rows, pairs_of, lines = rows_of(args.steps * args.batch), {}, {}
  for i, row in ipairs(rows) do pairs_of[i], lines[i] = ps.preference.encode(tok, row), cjson.encode(row) .. "\n" end
  local folder = os.tmpname()
  os.remove(folder)
  make_adapter(folder)
  write(folder .. "/rows.jsonl", table.concat(lines))
  write(folder .. "/job.json", cjson.encode { steps = args.steps, batch = args.batch, lr = args.lr, beta = args.beta,
    loss_type = args.loss })
  local began = ps.now()
  local losses = trained(folder, pairs_of, tok.pad_token_id or tok.eos_token_id or 0)
  local seconds = ps.now() - began
  local other = process.last_json(("'%s' '%s/bench/peers/dpo_trl.py' '%s' '%s' '%s/rows.jsonl' '%s/job.json'"):format(
    os.getenv "PS_TORCH_PYTHON" or "python3", paths.root, args.model, folder, folder, folder))
  os.execute(("rm -r '%s'"):format(folder))
  if not other then error("bench/peers/dpo_trl.py gave no result", 0) end
  local largest, at = losses_lib.largest(losses, other.losses)
  local equal = 0
  for i, pair in ipairs(pairs_of) do
    local theirs = other.pairs[i]
    if same(pair.prompt, theirs[1]) and same(pair.chosen, theirs[2]) and same(pair.rejected, theirs[3]) then
      equal = equal + 1
    end
  end
  print(cjson.encode { steps = #losses, first_loss = losses[1], last_loss = losses[#losses], largest = largest, at = at,
    ids_equal = equal, rows = #rows, seconds = seconds, peer_seconds = other.seconds })
  if largest > args.within or largest ~= largest or equal < #rows then os.exit(1, true) end
end

command_line.try("dpo_losses", main)
