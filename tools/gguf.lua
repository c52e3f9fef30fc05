-- SPDX-License-Identifier: BSD-3-Clause
-- GGUF files, the format of llama.cpp (docs/gguf.md):
--   psluajit tools/gguf.lua info FILE [--json]                          its metadata and tensors
--   psluajit tools/gguf.lua convert DIR|FILE --out FILE --type q8_0     a Hugging Face folder or a file to a file
--   psluajit tools/gguf.lua convert FILE --out DIR                      a file to a Hugging Face folder
--   psluajit tools/gguf.lua convert DIR|FILE --adapter DIR|FILE --out FILE   a model with an adapter in its weights
--   psluajit tools/gguf.lua convert ADAPTER --base DIR|FILE --out FILE|DIR   an adapter: PEFT's folder or a file
--   psluajit tools/gguf.lua convert ... --out FILE --verify             then verify, and store the result in the file
--   psluajit tools/gguf.lua quantize FILE --out FILE --type q4_k_m      a file with other types
--   psluajit tools/gguf.lua verify FILE --against DIR|FILE [--text FILE] [--json]
-- `verify` runs both models over a text and compares their distributions of the next token. The exit code is 1 if a
-- command failed, and 2 if a file does not pass the comparison.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local gguf = require "ps.io.gguf"
local json = require("cjson").new()
local lfs = require "lfs"
local merge = require "ps.lora.merge_folder"
local readable = require "ps.core.readable"
local writable = require "ps.core.writable"
local verify = require "ps.pretrained.gguf_verify"

local SHOWN = 8                                            -- maximum number of array values that `info` prints
local TYPES = "f32, f16, bf16, q8_0, q6_k, q4_k_m or q4_0"

local parser = argparse("psluajit gguf", "Reads, writes and compares GGUF files, the format of llama.cpp.")
parser:command_target "command"
local info = parser:command("info", "Prints a file's metadata and tensors.")
info:argument("file", "a GGUF file")
info:flag("--json", "as JSON")
for name, text in pairs { convert = "Writes a model in another format or type.",
  quantize = "Writes a file with other types." } do
  local command = parser:command(name, text)
  command:argument("model", "a Hugging Face folder, a name in its cache, or a GGUF file")
  command:option("--adapter", "the folder or file of an adapter that is merged into the model")
  command:option("--base", "if MODEL is an adapter: the folder or file of its base model")
  command:flag("--other-base", "take the adapter although it was trained on other weights")
  command:option("--out", "the file to write, NAME.gguf, or a folder"):count(1)
  local kind = command:option("--type", "type of most tensors: " .. TYPES)
  if name == "quantize" then kind:count(1) end
  command:option("--name", "the model's name in the file")
  command:option("--pre", "llama.cpp's name of the rule by which the tokenizer cuts texts")
  command:flag("--force", "replace a model or an adapter in the folder --out; a file is always replaced")
  command:flag("--verify", "compare the file with the model, and store the result in its metadata")
end
local compared = parser:command("verify", "Compares a file with the model that it was made from.")
compared:argument("file", "a GGUF file")
compared:option("--against", "the folder or file of the model"):count(1)
compared:option("--text", "a file with the text to run over; default: a text of 350 words")
compared:flag("--json", "as JSON")
local args = command_line.parse(parser)

local function shown(value)
  if type(value) == "string" then
    local text = #value > 60 and value:sub(1, 57) .. "..." or value
    return (("%q"):format(text):gsub("\\\n", "\\n"))
  end
  return (tostring(value):gsub("U?LL$", ""))
end

-- Converts a number to a value that JSON can represent.
local function plain(value)
  if type(value) == "cdata" then return (tostring(value):gsub("U?LL$", "")) end
  if type(value) == "number" and (value ~= value or math.abs(value) == math.huge) then return tostring(value) end
  return value
end

local function run_info()
  local file = gguf.open(args.file)
  local metadata, tensors = {}, {}
  for i, key in ipairs(file:keys()) do
    local value, kind, is_array = file:meta(key)
    if is_array then for k, one in ipairs(value) do value[k] = plain(one) end end
    metadata[i] = { key = key, type = is_array and "array" or kind, of = is_array and kind or nil,
      value = is_array and value or plain(value) }
  end
  for i, name in ipairs(file:names()) do
    tensors[i] = { name = name, type = file:type(name), shape = file:shape(name), nbytes = file:nbytes(name) }
  end
  if args.json then
    print(json.encode { file = args.file, metadata = metadata, tensors = tensors })
    return
  end
  for _, one in ipairs(metadata) do
    local text
    if one.type == "array" then
      local list = {}
      for k = 1, math.min(SHOWN, #one.value) do list[k] = shown(one.value[k]) end
      text = ("[%d] %s%s"):format(#one.value, table.concat(list, ", "), #one.value > SHOWN and ", ..." or "")
    else text = shown(one.value)
    end
    print(("%-44s %s"):format(one.key, text))
  end
  for _, one in ipairs(tensors) do
    print(("%-44s %-6s [%s]"):format(one.name, one.type, table.concat(one.shape, ", ")))
  end
end

local function read_text(path)
  if not path then return verify.TEXT end
  local file, why = io.open(path, "rb")
  if not file then error("--text: " .. why, 0) end
  local text = file:read "*a"
  file:close()
  return text
end

local function certificate(path, against, text)
  local file = gguf.open(path)
  local limits = verify.limits(file)
  file:close()
  local tok = ps.tokenizer.from_pretrained(against)
  local own = ps.tokenizer.from_pretrained(path)
  local ids, others = tok:encode(text), own:encode(text)
  local result = verify.compare(ps.from_pretrained(path, { quiet = true }), ps.from_pretrained(against,
    { quiet = true }), ids, limits)
  result.same_ids = #ids == #others
  for i, id in ipairs(ids) do result.same_ids = result.same_ids and id == others[i] end
  result.pass = result.pass and result.same_ids
  return result
end

local function print_certificate(c)
  print(("tokens                %d"):format(c.tokens))
  print(("mean KL divergence    %.3g (at most %g)"):format(c.mean_kl, c.limit_kl))
  print(("largest               %.3g"):format(c.max_kl))
  print(("same likeliest token  %.4f (at least %g)"):format(c.top1, c.limit_top1))
  print(("perplexity            %.4f, of the reference %.4f"):format(c.perplexity, c.reference_perplexity))
  print(("same ids of the text  %s"):format(c.same_ids and "yes" or "no"))
  print(c.pass and "pass" or "FAIL")
end

local function run_verify()
  local c = certificate(args.file, args.against, read_text(args.text))
  if args.json then print(json.encode(c)) else print_certificate(c) end
  if not c.pass then os.exit(2) end
end

local function run_convert()
  args.out = args.out:gsub("(.)/+$", "%1")
  if not gguf.is_path(args.out) then
    if args.verify then error("--verify needs a file to write, --out NAME.gguf", 0) end
    if args.type then error("--type needs a file to write, --out NAME.gguf", 0) end
  end
  local is_file = gguf.is_path(args.out)
  local problem = writable[is_file and "file" or "folder"](args.out)
  if problem then error("--out: " .. problem, 0) end
  if not is_file then ps.checkpoints.new_run(args.out, { force = args.force }) end
  if args.verify and args.adapter then
    error("--verify compares with the model without the adapter; merge the adapter first (tools/merge_adapter.lua)", 0)
  end
  if args.verify then ps.tokenizer.from_pretrained(args.model) end   -- raises an error before the file is written
  merge.convert(args.model, args.out, { type = args.type, name = args.name, pre = args.pre, certified = args.verify,
    adapter = args.adapter, base = args.base, other_base = args.other_base })
  print(("wrote %s%s"):format(args.out, is_file
    and (" (%s)"):format(readable.bytes(lfs.attributes(args.out, "size"))) or ""))
  if not args.verify then return end
  local c = certificate(args.out, args.model, verify.TEXT)
  verify.note(args.out, c)
  print_certificate(c)
  if not c.pass then os.exit(2) end
end

local RUN = { info = run_info, verify = run_verify, convert = run_convert, quantize = run_convert }
command_line.try("gguf", RUN[args.command])
