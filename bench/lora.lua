-- SPDX-License-Identifier: BSD-3-Clause
-- Measures how fast an adapter (LoRA) of a frozen Llama in bf16 is trained, with recompute:
--   PS_TORCH_PYTHON=PYTHON psluajit bench/lora.lua [--model 0.35b|1.2b|gpt2-xl] [--rounds N] [--peer [--compile]]
--   --peer              PEFT trains the same shape alternately, with gradient checkpointing (bench/peers/lora_peft.py).
--                       The Python needs torch, transformers and peft.
--   --peer-dtype fp32   the frozen weights of the peer are fp32. On processors without AVX-512, PyTorch computes fp32
--                       faster than bf16, and a step in bf16 takes minutes.
--   --peer-adapter      the type of PEFT's adapters; PEFT's default is fp32, which psluajit also uses
--   --folder DIR        uses the frozen model of a folder instead of a shape. The weights can also be NF4. NF4 weights
--                       stay packed in both programs, and the Python also needs bitsandbytes for them.
--   --targets LIST      only these layers have adapters, such as q_proj,v_proj
--   --quantize TYPE [--double-quant]   a second model of the same shape, whose weights are packed by ps.quantize
--                                      (QLoRA), trains alternately with the first model. The last line then also
--                                      contains packed_cpu_s, and packed_over_bf16, the second model's processor
--                                      seconds divided by the first model's.
-- The last line is one JSON object. It contains tokens_per_s and cpu_s (medians of the rate and of the processor
-- seconds of a step) and peak_rss_mib. With --peer, it also contains peer_tokens_per_s, peer_cpu_s, peer_peak_rss_mib,
-- speed_ratio (a ratio of processor seconds) and memory_ratio. Weights are random. Processor seconds allow a fair
-- comparison even if other programs run.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local SHAPES = {
  ["0.35b"] = { hidden_size = 1024, intermediate_size = 2816, num_hidden_layers = 24, num_attention_heads = 16,
    num_key_value_heads = 16, vocab_size = 32000, max_position_embeddings = 2048, tie_word_embeddings = true },
  ["1.2b"] = { hidden_size = 2048, intermediate_size = 8192, num_hidden_layers = 16, num_attention_heads = 32,
    num_key_value_heads = 8, vocab_size = 128256, max_position_embeddings = 2048, tie_word_embeddings = true },
}

local parser = argparse("bench/lora.lua", "Measures the training of an adapter.")
parser:option("--model", "shape of the frozen model", "0.35b"):choices { "0.35b", "1.2b", "gpt2-xl" }
parser:option("--folder", "a folder with the frozen model, instead of a shape")
parser:option("--targets", "names of the layers with adapters, with commas between them (default: all linear layers)")
whole(parser:option("--lora", "rank of the adapter", "16"), 1)
whole(parser:option("--batch", "rows", "1"), 1)
whole(parser:option("--seq", "positions", "512"), 2)
whole(parser:option("--rounds", "steps that count", "3"), 1)
parser:flag("--peer", "run PEFT alternately with psluajit")
parser:flag("--compile", "compile the peer's model")
parser:option("--peer-dtype", "the type of PEFT's frozen weights", "bf16"):choices { "bf16", "fp32" }
parser:option("--peer-adapter", "the type of PEFT's adapters", "fp32"):choices { "fp32", "bf16" }
parser:option("--quantize", "also train over weights packed as this type: nf4, q8_0, q4_0, ...")
parser:flag("--double-quant", "with --quantize nf4: the scales have 8 bits")
parser:flag("--profile", "print the time of the kernels by op")
local args = command_line.parse(parser)
if args.folder and args.quantize then parser:error "--quantize is for a shape, not for --folder" end
local targets
for name in (args.targets or ""):gmatch "[^,]+" do
  targets = targets or {}
  targets[#targets + 1] = name
end

local function start_peer(shape)
  local words = { os.getenv "PS_TORCH_PYTHON" or "python3", paths.root .. "/bench/peers/lora_peft.py",
    cjson.encode(shape), "--rank", args.lora, "--batch", args.batch, "--seq", args.seq, "--threads", ps.threads(),
    "--adapter", args.peer_adapter, "--dtype", args.peer_dtype }
  if args.compile then words[#words + 1] = "--compile" end
  if args.targets then words[#words + 1], words[#words + 2] = "--targets", args.targets end
  local peer = process.start(words)
  peer:answer()
  return peer
end

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

ps.manual_seed(0)
local shape = not args.folder and SHAPES[args.model] or nil
local function make()
  if args.folder then
    local file = assert(io.open(args.folder .. "/config.json"))
    local config = cjson.decode(file:read "*a")
    file:close()
    return ps.from_pretrained(args.folder, { dtype = "bf16", recompute = true, quiet = true,
      keep_quantized = config.quantization_config ~= nil or nil })
  end
  if not shape then return require("models.gpt2").new(args.model, { dtype = "bf16", recompute = true, dropout = 0 }) end
  return require("models.llama").new("tiny", { dtype = "bf16", recompute = true,
    hidden_size = shape.hidden_size, intermediate_size = shape.intermediate_size, head_dim = 64,
    num_hidden_layers = shape.num_hidden_layers, num_attention_heads = shape.num_attention_heads,
    num_key_value_heads = shape.num_key_value_heads, vocab_size = shape.vocab_size,
    max_position_embeddings = shape.max_position_embeddings, tie_word_embeddings = true })
end
-- Adds an adapter to a model, and makes an optimizer for it.
local function adapted(model)
  ps.lora.wrap(model, { r = args.lora, alpha = 2 * args.lora, targets = targets })
  return model:train(), ps.optim.AdamW(model, { lr = 1e-4 })
end
local model, optimizer = adapted(make())
local small, small_optimizer
if args.quantize then
  small, small_optimizer = adapted(ps.quantize(make(), { type = args.quantize,
    double_quant = args.double_quant or nil }))
end
local ids = ps.randint(0, model.config.vocab_size, { args.batch, args.seq }, { dtype = "int32" })
local peer = args.peer and start_peer(shape or args.folder and { folder = args.folder } or { gpt2 = args.model })

local function step(of, its_optimizer)
  local began, clock = ps.now(), os.clock()
  local loss = of({ input_ids = ids, labels = ids }).loss
  loss:backward()
  its_optimizer:step()
  its_optimizer:zero_grad()
  local value = loss:item()
  return { seconds = ps.now() - began, cpu = os.clock() - clock, loss = value }
end

local ours, theirs, packed = { seconds = {}, cpu = {} }, { seconds = {}, cpu = {} }, { seconds = {}, cpu = {} }
local function put(list, answer)
  for key, values in pairs(list) do values[#values + 1] = answer[key] end
end
for _ = 1, 2 do                                            -- a warm-up, in which both programs create plans and kernels
  step(model, optimizer)
  if small then step(small, small_optimizer) end
  if peer then peer:ask "step" end
end
if args.profile then ps.profiler.start() end
for round = 1, args.rounds do
  local first = round % 2 == 0 and peer and peer:ask "step"  -- in every second round, the peer runs first
  local own = step(model, optimizer)
  put(ours, own)
  if small then put(packed, step(small, small_optimizer)) end
  if peer then put(theirs, first or peer:ask "step") end
  print(("round %d: %.2f s, %.2f s of processor time, loss %.4f%s"):format(round, own.seconds, own.cpu, own.loss,
    peer and ("; PEFT %.2f s, %.2f s"):format(theirs.seconds[round], theirs.cpu[round]) or ""))
end
if args.profile then ps.profiler.report() end
local tokens = args.batch * args.seq
local out = { model = not args.folder and args.model or nil, folder = args.folder, targets = targets,
  parameters = model:num_parameters(), lora = args.lora, batch = args.batch,
  seq = args.seq, tokens_per_s = tokens / median(ours.seconds), cpu_s = median(ours.cpu),
  peak_rss_mib = ps.peak_rss() / 2 ^ 20 }
if peer then
  out.peer_tokens_per_s, out.peer_cpu_s = tokens / median(theirs.seconds), median(theirs.cpu)
  out.peer_peak_rss_mib = peer:ask("memory").peak_rss_mib
  out.speed_ratio, out.memory_ratio = out.peer_cpu_s / out.cpu_s, out.peak_rss_mib / out.peer_peak_rss_mib
  peer:close()
end
if small then
  out.quantize, out.double_quant = args.quantize, args.double_quant
  out.packed_cpu_s = median(packed.cpu)
  out.packed_over_bf16 = out.packed_cpu_s / out.cpu_s
end
print(cjson.encode(out))
