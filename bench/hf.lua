-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/hf.lua DIR [--train N] [--unpad] [--mmap] [--adapter ADIR | --lora R ...]: runs the model of a Hugging
-- Face folder in evaluation mode (no dropout), in fp32. `architectures` in config.json names the class of the model.
-- The inputs are the tensors of DIR/inputs.safetensors (input_ids, labels, start_positions, end_positions,
-- token_type_ids, position_ids, attention_mask), and have the same meaning as in transformers. DIR may also be a GGUF
-- file. In this case the other files are in the same folder as the GGUF file.
-- The outputs are written to DIR/outputs.safetensors. Depending on the model's head, the outputs are `logits`, or
-- start_logits and end_logits. If the model has no head, the outputs are last_hidden_state and pooler_output. If there
-- are labels, `loss` and the gradients grad.NAME are also written. The gradients have the names and shapes of the
-- tensors in the folder's files.
--   --unpad           the model has unpad = true
--   --mmap            weights stay in the folder's files if possible
--   --train N         runs N steps of AdamW (lr 1e-3, eps 1e-4, no decay) on the same batch. Also writes `losses` [N],
--                     and DIR/trained, a folder that can be loaded.
--   --adapter ADIR    uses the adapter in ADIR, a folder in PEFT's format
--   --lora R [--rslora] [--dora] [--alpha A] [--targets LIST]
--                     uses a new adapter (dropout 0). Its tensors are read from the tensors lora.NAME of
--                     inputs.safetensors, where NAME is PEFT's name. Tensors of the adapter that are not in this file
--                     are initialized from the seed. LIST contains names that are separated by commas. Its default is
--                     all-linear.
-- With an adapter, only the adapter is trained, the gradients grad.NAME are the adapter's gradients, and --train writes
-- DIR/adapter, a folder in PEFT's format.
-- If the folder or the batch is not supported, the exit status is 2, and stderr begins with a line of this form:
--   refused: FIELD = VALUE: why
local ps = require "ps"
local settings = require "ps.pretrained.settings"

local LABELS = { labels = true, start_positions = true, end_positions = true }

-- Returns the tensors of the batch in the file, and the tensors of the adapter by PEFT's names.
local function inputs_of(path)
  local file, batch, lora = ps.safetensors.open(path), {}, {}
  for _, name in ipairs(file:names()) do
    local tensor = name:match "^lora%.(.*)$"
    if tensor then lora[tensor] = file:tensor(name) else batch[name] = file:tensor(name) end
  end
  return batch, lora
end

-- Returns the batch with or without its labels.
local function part(batch, labels)
  local chosen = {}
  for name, t in pairs(batch) do if labels or not LABELS[name] then chosen[name] = t end end
  return chosen
end

local function has_labels(batch)
  return batch.labels ~= nil or batch.start_positions ~= nil and batch.end_positions ~= nil
end

local function gradients(model, out, adapted)
  local grads = {}
  if adapted then
    for name, p in pairs(ps.lora.tensors(model)) do out["grad." .. name] = p:grad() end
    return
  end
  for name, p in model:named_parameters() do grads[name] = p:grad() end
  for name, own in pairs(model.loaded.names) do
    if grads[own] ~= nil then out["grad." .. name] = grads[own] end
  end
end

local function train(model, batch, n)
  local optimizer, losses = ps.optim.AdamW(model, { lr = 1e-3, eps = 1e-4, weight_decay = 0 }), {}
  for i = 1, n do
    optimizer:zero_grad()
    local loss = model(batch).loss
    losses[i] = loss:item()
    loss:backward()
    optimizer:step()
  end
  return ps.tensor(losses, "fp32")
end

local function check_names(model, batch)
  for name in pairs(batch) do
    if not model.inputs[name] then
      settings.refuse(model.class_name, "inputs", name, model.class_name .. " does not take it")
    end
  end
end

-- Adds the adapter that the options describe to the model. Returns true if there is an adapter.
local function adapt(model, args, given)
  if args.adapter and args.lora then error("--adapter and --lora exclude each other", 0) end
  if args.adapter then ps.lora.load(model, args.adapter) end
  if not args.lora then return args.adapter ~= nil end
  local list = {}
  for name in (args.targets or ""):gmatch "[^,]+" do list[#list + 1] = name end
  ps.lora.wrap(model, { r = args.lora, alpha = args.alpha, use_rslora = args.rslora, use_dora = args.dora,
    targets = #list > 0 and args.targets ~= "all-linear" and list or "all-linear", modules_to_save = {} })
  ps.lora.set_tensors(model, given)
  return true
end

local function run(args)
  local folder, steps = args.folder, args.train
  local home = folder:match "%.gguf$" and (folder:match "^(.*)/[^/]*$" or ".") or folder
  local model = ps.from_pretrained(folder, { dtype = "fp32", quiet = true, unpad = args.unpad,
    mmap = args.mmap and "auto" })
  model:eval()
  local batch, given = inputs_of(home .. "/inputs.safetensors")
  local adapted, out = adapt(model, args, given), {}
  check_names(model, batch)
  for name, t in pairs(ps.no_grad(model, part(batch, false))) do out[name] = t end
  if has_labels(batch) then
    local loss = model(batch).loss
    loss:backward()
    out.loss = loss:detach():clone()
    gradients(model, out, adapted)
  end
  for name, t in pairs(out) do out[name] = t:detach():contiguous():keep() end
  if steps then
    if not has_labels(batch) then error("--train needs labels in inputs.safetensors", 0) end
    out.losses = train(model, batch, steps)
    model:save_pretrained(home .. (adapted and "/adapter" or "/trained"))
  end
  ps.safetensors.save(home .. "/outputs.safetensors", out)
end

local parser = require "argparse" ("bench/hf.lua", "Runs a Hugging Face folder on its inputs.safetensors.")
parser:argument "folder"
require("ps.core.command_line").whole(parser:option("--train", "steps of AdamW"), 1)
parser:flag("--unpad", "leave padding out of the computation")
parser:flag("--mmap", "weights stay in the files if possible")
parser:option("--adapter", "a folder with a PEFT adapter")
require("ps.core.command_line").whole(parser:option("--lora", "a new adapter of this rank"), 1)
require("ps.core.command_line").number(parser:option("--alpha", "alpha of the new adapter"), 0)
parser:option("--targets", "names of layers, separated by commas; default all-linear")
parser:flag("--rslora", "the new adapter's scale is alpha / sqrt(R)")
parser:flag("--dora", "the new adapter has DoRA's magnitudes")
local args = require("ps.core.command_line").parse(parser)
local ok, problem = pcall(run, args)
if not ok then
  local refused = type(problem) == "table" and problem.refused
  io.stderr:write(refused and "refused: " .. refused or tostring(problem), "\n")
  os.exit(refused and 2 or 1)
end
