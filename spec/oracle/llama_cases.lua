-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/llama_cases.lua JOB.json: does what llama_oracle.py asks for, a list of tasks. A task has `task`
-- (the name of a function below), and `out`. A failure is written to out .. ".error".
local ps = require "ps"
local json = require "cjson"
local floats = require "ps.core.array" "float"
local merge = require "ps.lora.merge_folder"
local native = require "ps.core.ffi"

local tasks = {}

local function write(path, text)
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
end

local function load(case)
  local model = ps.from_pretrained(case.model, { quiet = true, keep_quantized = case.keep_quantized })
  return case.adapter and ps.lora.load(model, case.adapter) or model
end

-- Writes a folder or file as a GGUF file.
function tasks.write(case) merge.convert(case.model, case.out, { type = case.type }) end

-- Writes an adapter with random weights, as a GGUF file.
function tasks.adapter(case)
  ps.manual_seed(case.seed)
  local model = ps.lora.wrap(load(case), { r = case.r, alpha = case.alpha, targets = case.targets })
  ps.no_grad(function()
    for _, p in model:named_parameters() do if p:needs_grad() then p:copy_(ps.randn(p:shape()) * case.scale) end end
  end)
  model:save_gguf(case.out, { adapter = true })
end

-- Writes the logits of the last positions of each row of ids, as fp32 numbers one after another.
function tasks.logits(case)
  local model = load(case)
  local f = assert(io.open(case.out, "wb"))
  for _, ids in ipairs(case.rows) do
    ps.scope(ps.no_grad, function()
      local logits = model({ input_ids = ps.tensor({ ids }, { dtype = "int32" }) }).logits
      local t = logits:narrow(1, #ids - case.last, case.last):to("fp32"):contiguous()
      local data = floats(t:numel())
      native.check(native.C.ps_tensor_read(t, data, t:nbytes()))
      f:write(native.ffi.string(data, t:nbytes()))
    end)
  end
  f:close()
end

-- Writes the ids that continue each row greedily.
function tasks.greedy(case)
  local rows, model = {}, load(case)
  for i, ids in ipairs(case.rows) do
    local all = model:generate({ ids }, case.count, { do_sample = false, eos_token_id = {} })[1]
    rows[i] = { unpack(all, #ids + 1) }
  end
  write(case.out, json.encode(rows))
end

-- Writes the ids of texts, and of conversations as text.
function tasks.texts(case)
  local tok, all, chats = ps.tokenizer.from_pretrained(case.model), {}, {}
  for i, text in ipairs(case.texts) do all[i] = tok:encode(text, { add_special_tokens = false }) end
  for i, chat in ipairs(case.chats) do
    chats[i] = tok:apply_chat_template(chat, { tokenize = false, add_generation_prompt = true })
  end
  write(case.out, json.encode { ids = all, chats = chats })
end

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read("*a"))
f:close()
for _, case in ipairs(job) do
  local ok, problem = xpcall(tasks[case.task], debug.traceback, case)
  if not ok then write(case.out .. ".error", tostring(problem)) end
end
