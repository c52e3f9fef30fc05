-- SPDX-License-Identifier: BSD-3-Clause
-- A server for programs that use OpenAI's API (docs/serve.md):
--   psluajit tools/serve.lua DIR|FILE.gguf          prints the server's address and the token that requests need
-- The server answers GET /v1/models, POST /v1/completions and POST /v1/chat/completions. The server can also stream
-- answers. It processes requests one at a time. If a client disconnects, the server stops processing the client's
-- request. Ctrl-C ends the server.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local folder = require "ps.pretrained.folder"
local serve = require "ps.serve"

local parser = argparse("psluajit serve", "Serves a model to programs that speak OpenAI's API.")
parser:argument("model", "a Hugging Face folder with a causal model and its tokenizer, a name in its cache, or a "
  .. "GGUF file")
command_line.whole(parser:option("--port", "default: one that is free", "0"):show_default(false), 0, 65535)
parser:option("--host", "the address to listen on", "127.0.0.1")
parser:mutex(
  parser:option("--token", "the bearer token that requests need (default: a random one, which is printed)"),
  parser:flag("--no-token", "requests need no token; only with an address of this machine"))
parser:option("--name", "the model's name in the API (default: the last part of MODEL, without .gguf)")
parser:option("--dtype", "type of the weights (default: that of the files)", "auto"):show_default(false)
parser:flag("--keep-quantized", "weights of a GGUF file, or of a folder in NF4, stay packed")
parser:flag("--int8-activations", "with --keep-quantized: round activations to 8 bits when generating, which is faster")
parser:option("--kv-cache", "type of the cached keys and values: bf16 or q8_0 (default: that of the weights)")
  :choices { "bf16", "q8_0" }
parser:option("--adapter", "a folder or GGUF file with an adapter for the model")
parser:flag("--other-base", "load the adapter even if it was trained on other weights")
local args = command_line.parse(parser)
if args.other_base and not args.adapter then parser:error "--other-base needs --adapter" end

local function main()
  local path = folder.find(args.model)
  local tok = ps.tokenizer.from_pretrained(path)
  local model = ps.from_pretrained(path, { dtype = args.dtype, mmap = "auto", quiet = true,
    keep_quantized = args.keep_quantized, int8_activations = args.int8_activations })
  if args.adapter then ps.lora.load(model, args.adapter, { trainable = false, other_base = args.other_base }) end
  if not model.generate then error(("%s is not a model that continues text"):format(model.class_name), 0) end
  local name = args.name or args.model:gsub("/+$", ""):match "[^/]*$":gsub("%.gguf$", "")
  serve.run(model, tok, { name = name, host = args.host, port = args.port, token = args.token,
    no_token = args.no_token, kv_cache = args.kv_cache, told = function(address, token)
      print(("%s: %s/v1%s"):format(name, address, token and "  token " .. token or ""))
      io.stdout:flush()
    end })
end

command_line.try("serve", main)
