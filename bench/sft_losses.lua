-- SPDX-License-Identifier: BSD-3-Clause
-- Fine-tunes an adapter (LoRA) on conversations. Compares the ids, the labels and the loss of each step with the ids,
-- labels and loss of TRL's SFTTrainer with PEFT:
--   PS_TORCH_PYTHON=PYTHON psluajit bench/sft_losses.lua MODEL [--tiny] [--steps 20]
-- MODEL is a folder with a tokenizer that has ChatML's tokens, such as SmolLM2's. With --tiny, a small Llama with
-- random weights replaces the weights of MODEL. Both programs begin with the same new adapter and read the same file of
-- conversations. Both programs render the conversations with the same template and train only the tokens in the
-- template's generation blocks. They use AdamW without decay, a constant rate, fp32 and no dropout. The Python needs
-- trl, peft and datasets. The last line is one JSON object:
--   steps, first_loss, last_loss
--   largest                    largest relative difference between the losses of a step
--   at                         the step with the largest difference
--   rows_equal                 number of rows whose ids and labels are equal
--   rows, seconds, peer_seconds
-- The exit status is 1 if `largest` is above --within or rows differ.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local command_line = require "ps.core.command_line"
local paths = require "ps.paths"
local losses_lib = require "bench.losses_lib"
local process = require "bench.process_lib"
local lfs = require "lfs"
local whole, number = command_line.whole, command_line.number

local parser = argparse("bench/sft_losses.lua", "Compares the losses of fine-tuning an adapter with TRL's.")
parser:argument("model", "a Hugging Face folder whose tokenizer has ChatML's tokens")
parser:flag("--tiny", "a small Llama with random weights")
whole(parser:option("--steps", "steps", "20"), 1)
whole(parser:option("--batch", "conversations of a step", "2"), 1)
whole(parser:option("--lora", "rank of the adapter", "8"), 1)
number(parser:option("--lr", "learning rate", "1e-3"), 0)
number(parser:option("--within", "relative difference that is allowed", "1e-4"), 0)
local args = command_line.parse(parser)

local TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
  .. "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
  .. "{% endgeneration %}{{ '\\n' }}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
  .. "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

local WORDS = {}
for word in ("the a red green blue old new small large house tree river stone bird cat dog runs sleeps sings under "
  .. "over near and but quickly slowly today often never seven three"):gmatch "%S+" do WORDS[#WORDS + 1] = word end

-- Returns a sentence of n words. The words depend on i, the index of the sentence.
local function sentence(i, n)
  local words = {}
  for k = 1, n do words[k] = WORDS[(i * 31 + k * k * 7 + k * i) % #WORDS + 1] end
  return table.concat(words, " ") .. "."
end

-- Returns conversations of one to three turns. Some of them have a system message.
local function conversations(n)
  local rows = {}
  for i = 1, n do
    local messages = {}
    if i % 3 == 0 then messages[1] = { role = "system", content = sentence(i + 500, 3) } end
    for turn = 1, 1 + i % 3 do
      messages[#messages + 1] = { role = "user", content = sentence(i * 7 + turn, 2 + i % 6) }
      messages[#messages + 1] = { role = "assistant", content = sentence(i * 11 + turn, 3 + (i + turn) % 9) }
    end
    rows[i] = { messages = messages }
  end
  return rows
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- Creates a folder with the files of the model and the template. With --tiny, the folder contains random weights
-- instead of the model's weights.
local function make_base(folder)
  lfs.mkdir(folder)
  local own = args.tiny and "^tokenizer" or "."
  local from = assert(lfs.attributes(args.model, "mode") == "directory" and args.model, args.model .. " is no folder")
  if from:sub(1, 1) ~= "/" then from = lfs.currentdir() .. "/" .. from end
  for name in lfs.dir(from) do
    if lfs.attributes(from .. "/" .. name, "mode") == "file" and name:find(own) and name ~= "chat_template.jinja" then
      assert(lfs.link(from .. "/" .. name, folder .. "/" .. name, true))
    end
  end
  write(folder .. "/chat_template.jinja", TEMPLATE)
  if not args.tiny then return end
  ps.manual_seed(2)
  local tok = ps.tokenizer.from_pretrained(folder)
  require("models.llama").new("tiny", { vocab_size = tok.vocab_size, hidden_size = 64, intermediate_size = 160,
    num_hidden_layers = 3, pad_token_id = tok.pad_token_id or tok.eos_token_id or 0 }):save_pretrained(folder)
end

-- Trains with psluajit, starting with the adapter in the folder `adapter`. Returns the losses and the rows {ids,
-- labels}.
local function trained(base, adapter, path)
  local model = ps.lora.load(ps.from_pretrained(base, { dtype = "fp32", quiet = true }), adapter):train()
  local loader = ps.data.loader { table = ps.data.table(path), tokenizer = ps.tokenizer.from_pretrained(base),
    batch = args.batch, seq = 512, shuffle = false, cache = false }
  local rows = {}
  local losses = losses_lib.train(model, args.steps, args.lr, function()
    local batch = loader:next()
    local ids, labels, mask = batch.input_ids:tolist(), batch.labels:tolist(), batch.attention_mask:tolist()
    for r, row in ipairs(ids) do
      local n = 0
      for k = 1, #row do n = n + mask[r][k] end
      rows[#rows + 1] = { { unpack(row, 1, n) }, { unpack(labels[r], 1, n) } }
    end
    return model(batch).loss
  end)
  return losses, rows
end

local function same(a, b) return table.concat(a, " ") == table.concat(b, " ") end

local function main()
  local folder = os.tmpname()
  os.remove(folder)
  lfs.mkdir(folder)
  local base, adapter, path = folder .. "/base", folder .. "/adapter", folder .. "/rows.jsonl"
  make_base(base)
  local lines = {}
  for i, row in ipairs(conversations(args.steps * args.batch)) do lines[i] = cjson.encode(row) .. "\n" end
  write(path, table.concat(lines))
  write(folder .. "/job.json", cjson.encode { steps = args.steps, batch = args.batch, lr = args.lr })
  ps.manual_seed(1)
  ps.lora.wrap(ps.from_pretrained(base, { dtype = "fp32", quiet = true }), { r = args.lora, alpha = 2 * args.lora })
    :save_pretrained(adapter)
  local began = ps.now()
  local losses, rows = trained(base, adapter, path)
  local seconds = ps.now() - began
  local other = process.last_json(("'%s' '%s/bench/peers/sft_trl.py' '%s' '%s' '%s' '%s/job.json'"):format(
    os.getenv "PS_TORCH_PYTHON" or "python3", paths.root, base, adapter, path, folder))
  os.execute(("rm -r '%s'"):format(folder))
  if not other then error("bench/peers/sft_trl.py gave no result", 0) end
  local largest, at = losses_lib.largest(losses, other.losses)
  local equal = 0
  for i, row in ipairs(rows) do
    local theirs = other.rows[i]
    if same(row[1], theirs[1]) and same(row[2], theirs[2]) then equal = equal + 1 end
  end
  print(cjson.encode { steps = #losses, first_loss = losses[1], last_loss = losses[#losses], largest = largest, at = at,
    rows_equal = equal, rows = #rows, seconds = seconds, peer_seconds = other.seconds })
  if largest > args.within or largest ~= largest or equal < #rows then os.exit(1, true) end
end

command_line.try("sft_losses", main)
