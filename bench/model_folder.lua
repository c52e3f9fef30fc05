-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a folder with a model for measurements. The model can be too large for memory, because all layers have the
-- same random weights. The weights are bf16, or NF4 of bitsandbytes with double quantization.
--   psluajit bench/model_folder.lua --shape 8b --type nf4 --out DIR [--layers N]
-- The shapes 1.2b, 8b and 32b are the shapes of Llama 3.2 1B, of Llama 3.1 8B and of Qwen 2.5 32B (without biases).
-- Embeddings and head are bf16.
local argparse = require "argparse"
local cjson = require "cjson"
local command_line = require "ps.core.command_line"

local SHAPES = {
  ["1.2b"] = { hidden_size = 2048, intermediate_size = 8192, num_hidden_layers = 16, num_attention_heads = 32,
    num_key_value_heads = 8, vocab_size = 128256 },
  ["8b"] = { hidden_size = 4096, intermediate_size = 14336, num_hidden_layers = 32, num_attention_heads = 32,
    num_key_value_heads = 8, vocab_size = 128256 },
  ["32b"] = { hidden_size = 5120, intermediate_size = 27648, num_hidden_layers = 64, num_attention_heads = 40,
    num_key_value_heads = 8, vocab_size = 152064 },
}
local parser = argparse("bench/model_folder.lua", "Writes a folder with a model whose layers are all alike.")
parser:option("--shape", "shape of the model", "8b"):choices { "1.2b", "8b", "32b" }
parser:option("--type", "type of the layers' weights", "nf4"):choices { "bf16", "nf4" }
parser:option("--out", "the folder"):count(1)
command_line.whole(parser:option("--layers", "number of layers, instead of the shape's"), 1)
local args = command_line.parse(parser)

local ps = require "ps"
local lfs = require "lfs"
local shape, single = SHAPES[args.shape], args.out .. "/single"
local layers = args.layers or shape.num_hidden_layers
lfs.mkdir(args.out)
ps.manual_seed(0)
shape.num_hidden_layers, shape.max_position_embeddings = 1, 2048
local model = require("models.llama").new("tiny", { dtype = "bf16", head_dim = shape.hidden_size
  / shape.num_attention_heads, tie_word_embeddings = false, hidden_size = shape.hidden_size,
  intermediate_size = shape.intermediate_size, num_hidden_layers = 1, vocab_size = shape.vocab_size,
  num_attention_heads = shape.num_attention_heads, num_key_value_heads = shape.num_key_value_heads,
  max_position_embeddings = 2048 })
if args.type == "nf4" then ps.quantize(model, { double_quant = true }) end
model:save_pretrained(single)
model = nil -- luacheck: ignore 311
ps.collect()

local tensors = {}
for name, tensor in pairs(ps.load(single .. "/model.safetensors", { mmap = true })) do
  if name:find("layers.0.", 1, true) then
    for i = 0, layers - 1 do                               -- each layer has its own entry, because a tensor that
                                                           -- several layers share would be tied
      local own = name:gsub("layers%.0%.", ("layers.%d."):format(i))
      tensors[own] = { shape = tensor:shape(), dtype = tensor:dtype(), make = function() return tensor end }
    end
  else
    tensors[name] = tensor
  end
end
ps.safetensors.save(args.out .. "/model.safetensors", tensors, { format = "pt" })
local file = assert(io.open(single .. "/config.json"))
local config = cjson.decode(file:read "*a")
file:close()
config.num_hidden_layers = layers
file = assert(io.open(args.out .. "/config.json", "w"))
file:write(cjson.encode(config))
assert(file:close())
os.remove(single .. "/model.safetensors")
os.remove(single .. "/config.json")
lfs.rmdir(single)
local nbytes = lfs.attributes(args.out .. "/model.safetensors", "size")
print(("%s: %d layers, %.2f GB"):format(args.out, layers, nbytes / 1e9))
