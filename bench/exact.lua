-- SPDX-License-Identifier: BSD-3-Clause
-- Compares a model folder with transformers, on lines of text in fp32:
--   psluajit bench/exact.lua FOLDER --text README.md --lines 16
-- The folder's tokenizer encodes non-empty lines, which are truncated to 64 tokens and padded. The body of the model
-- computes hidden states. The loss is the product of the hidden states and a fixed random tensor, and backward computes
-- its gradients. bench/peers/exact_torch.py encodes the same lines and computes the same values in fp32 and in float64.
-- It runs with the Python of PS_TORCH_PYTHON or python3. The last line is one JSON object. The difference of a tensor
-- is divided by the tensor's largest value in float64. A figure is the largest such difference of all tensors:
--   hidden_error, gradient_error               difference between psluajit and float64
--   torch_hidden_error, torch_gradient_error   difference between transformers in fp32 and float64
--   hidden_difference, gradient_difference     difference between psluajit and transformers in fp32
--   key_bias_error                             error of the gradients of key biases. These gradients are exactly zero
--                                              in theory, so the error is divided by the gradient of the query bias of
--                                              the same layer.
--   lines_with_other_ids                       number of lines that the two tokenizers encode differently
local argparse = require "argparse"
local cjson = require "cjson"
local ps = require "ps"
local command_line = require "ps.core.command_line"
local quoted = require("bench.process_lib").quote

local LONGEST = 64

local function run(args)
  local file = io.open(args.text, "rb") or error("cannot open " .. args.text, 0)
  local tokenizer = ps.tokenizer.from_pretrained(args.folder)
  local lines, ids, mask, width = {}, {}, {}, 0
  for line in file:lines() do
    if #lines < args.lines and line:find "%w" then
      lines[#lines + 1], ids[#lines + 1] = line, tokenizer:encode(line)
      width = math.max(width, math.min(#ids[#ids], LONGEST))
    end
  end
  file:close()
  if #lines == 0 then error(args.text .. " has no line with letters", 0) end
  local encoded = {}
  for i, row in ipairs(ids) do
    local cut, seen = {}, {}
    for at = 1, width do cut[at], seen[at] = row[at] or 0, row[at] and 1 or 0 end
    encoded[i], ids[i], mask[i] = row, cut, seen
  end

  ps.manual_seed(1)
  local model = ps.from_pretrained(args.folder, { task = "base", dtype = "fp32", quiet = true })
  local batch = { input_ids = ps.tensor(ids, "int32"), attention_mask = ps.tensor(mask, "int32") }
  local hidden = model(batch).last_hidden_state
  local seen = batch.attention_mask:to("fp32"):unsqueeze(2)
  local direction = (ps.randn(hidden:shape()) * seen):contiguous()
  local out = { input_ids = batch.input_ids, attention_mask = batch.attention_mask, direction = direction,
    last_hidden_state = hidden:detach():contiguous() }
  local loss = (hidden * direction):sum() / seen:sum():item()
  loss:backward()
  local gradients = {}
  for name, p in model:named_parameters() do gradients[name] = p:grad() end
  for name, own in pairs(model.loaded.names) do
    if gradients[own] then out["grad." .. name] = gradients[own] end
  end

  local path = os.tmpname()
  ps.safetensors.save(path, out)
  local ids_path = os.tmpname()
  local list = assert(io.open(ids_path, "wb"))
  list:write(cjson.encode { lines = lines, ids = encoded })
  assert(list:close())
  local here = require("ps.paths").root .. "/bench/peers/exact_torch.py"
  local code = os.execute(("%s %s %s %s %s"):format(quoted(os.getenv "PS_TORCH_PYTHON" or "python3"), quoted(here),
    quoted(args.folder), quoted(path), quoted(ids_path)))
  os.remove(path)
  os.remove(ids_path)
  if code ~= 0 then error("the peer failed; PS_TORCH_PYTHON names a Python with torch and transformers", 0) end
end

local parser = argparse("bench/exact.lua", "Compares a model folder with transformers.")
parser:argument "folder"
parser:option("--text", "a text file", "README.md")
command_line.whole(parser:option("--lines", "number of lines", "16"), 1)
local args = command_line.parse(parser)
command_line.try("bench/exact.lua", run, args)
