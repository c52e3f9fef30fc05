-- SPDX-License-Identifier: BSD-3-Clause
-- A training script that uses BMTrain's names (docs/bmtrain.md). It trains a GPT on random tokens. The tokens of
-- data-parallel ranks differ.
--
--   psluajit bmtrain.lua
--   psluajit tools/launch.lua --nproc-per-node 2 examples/bmtrain.lua --zero-level 3 --save gpt.pt
--   psluajit tools/launch.lua --nproc-per-node 4 examples/bmtrain.lua --pipe-size 2 --tp-size 2
local ps = require "ps"
local bmt = require "ps.bmt"
local argparse = require "argparse"
local command_line = require "ps.command_line"
local whole = command_line.whole
local nn, F = ps.nn, ps.F

local parser = argparse("psluajit bmtrain.lua",
  "Trains a small GPT on random tokens, in a script that uses BMTrain's names.")
whole(parser:option("--iters", "Iterations.", "100"), 1)
whole(parser:option("--zero-level", "ZeRO stage.", "3"), 0, 3)
whole(parser:option("--tp-size", "Ranks that divide each layer; must divide the number of processes.", "1"), 1)
whole(parser:option("--pipe-size", "Pipeline stages, which divide the blocks; tp-size * pipe-size must divide the "
  .. "number "
  .. "of processes.", "1"), 1)
parser:option("--dtype", "Type of the parameters: fp32, bf16 or fp16.", "fp32"):choices { "fp32", "bf16", "fp16" }
command_line.file(parser:option("--save", "Write the weights to this file (.pt or .safetensors)."), ".pt",
  ".pth", ".bin", ".ckpt", ".safetensors")
local args = command_line.parse(parser)

-- Without sequence parallelism, every rank of a tensor-parallel group has all rows between the layers.
bmt.init_distributed { seed = 0, zero_level = args.zero_level, tp_size = args.tp_size, pipe_size = args.pipe_size,
  config = { tensor_parallel = { sequence_parallel = false } } }
local Column, Row = bmt.nn.ColumnParallelLinear, bmt.nn.RowParallelLinear

local Encoder = nn.class("Encoder", bmt.DistributedModule)
function Encoder:init(width, heads, inner, dtype)
  self.heads = heads / args.tp_size                               -- number of heads on this rank
  self.ln_attn = nn.LayerNorm(width, { dtype = dtype })
  self.ln_ff = nn.LayerNorm(width, { dtype = dtype })
  for _, name in ipairs { "q", "k", "v" } do self[name] = Column(width, width, { dtype = dtype }) end
  self.out = Row(width, width, { dtype = dtype })
  self.up, self.down = Column(width, inner, { dtype = dtype }), Row(inner, width, { dtype = dtype })
end
function Encoder:forward(hidden, mask)
  bmt.inspect.record_tensor(hidden, "hidden")
  local x, B, T = self.ln_attn(hidden), hidden:size(0), hidden:size(1)
  local function split(y) return y:reshape(B, T, self.heads, -1):permute(0, 2, 1, 3) end
  local y = F.attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), { causal = true, key_mask = mask })
  hidden = hidden + self.out(y:permute(0, 2, 1, 3):reshape(B, T, -1))
  return hidden + self.down(F.gelu(self.up(self.ln_ff(hidden))))
end

local GPT = nn.class("GPT", bmt.DistributedModule)
function GPT:init(o)
  local normal = bmt.ParameterInitializer(nn.init.normal_, 0, 0.02)
  self.word_emb = bmt.nn.VPEmbedding(o.vocabulary, o.width, { dtype = o.dtype, init_mean = 0, init_std = 0.02 })
  self.pos_emb = bmt.DistributedParameter(ps.empty({ o.positions, o.width }, { dtype = o.dtype }),
    { init_method = normal })
  local blocks = {}
  for i = 1, o.layers do blocks[i] = bmt.CheckpointBlock(Encoder(o.width, o.heads, 4 * o.width, o.dtype)) end
  self.transformers = (args.pipe_size > 1 and bmt.PipelineTransformerBlockList or bmt.TransformerBlockList)(blocks)
  self.layernorm = nn.LayerNorm(o.width, { dtype = o.dtype })
end
function GPT:forward(input, pos, mask)
  local hidden = self.word_emb(input) + F.embedding(pos, self.pos_emb)
  hidden = self.layernorm(self.transformers(hidden, mask, { batch_related = { 0 } }))
  return bmt.inspect.record_tensor(self.word_emb(hidden, true), "logits")         -- logits of this rank's tokens
end

local VOCABULARY, BATCH, LENGTH = 512, 4, 32
local model = GPT { vocabulary = VOCABULARY, width = 64, layers = 4, heads = 4, positions = LENGTH, dtype = args.dtype }
bmt.init_parameters(model)
bmt.synchronize()

-- Ranks that share layers draw the same tokens. Positions after the end of a sample are not targets.
ps.manual_seed(1234 + bmt.config.tp_zero_rank)
local sent = ps.randint(0, VOCABULARY, { BATCH, LENGTH + 1 }, { dtype = "int32" })
local pos = ps.arange(0, LENGTH, { dtype = "int32" }):unsqueeze(0):expand { BATCH, LENGTH }:contiguous()
local length = ps.randint(LENGTH / 2, LENGTH + 1, { BATCH, 1 }, { dtype = "int32" })
local input, mask = sent:narrow(1, 0, LENGTH):contiguous(), pos:lt(length)
local targets = ps.where(mask, sent:narrow(1, 1, LENGTH), -100)
ps.manual_seed(1234)                                              -- all ranks train with the same seed

local loss_func = bmt.loss.FusedCrossEntropy { ignore_index = -100, parallel = true }
local optimizer = bmt.optim.AdamOffloadOptimizer(model:parameters(), { weight_decay = 1e-2 })
local lr_scheduler = bmt.lr_scheduler.Noam(optimizer, { start_lr = 1e-2, warmup_iter = 40, end_iter = 1000 })
local optim_manager = bmt.optim.OptimManager { loss_scale = args.dtype == "fp16" and 2 ^ 16 or nil }
optim_manager:add_optimizer(optimizer, lr_scheduler)

local avg_time, avg_loss = bmt.utils.AverageRecorder(), bmt.utils.AverageRecorder()
for iteration = 1, args.iters do
  local began, global_loss = ps.now(), nil
  local inspector = bmt.inspect.inspect_tensor(function()
    local logits = model(input, pos, mask)
    local loss = loss_func(logits:reshape(BATCH * LENGTH, -1), targets:reshape(BATCH * LENGTH))
    global_loss = bmt.sum_loss(loss):item()
    optim_manager:zero_grad()
    optim_manager:backward(loss)
  end)
  if iteration % 100 == 0 then
    local summary, parameters = inspector:get_summary(), bmt.inspect.inspect_model(model, "*")
    bmt.print_rank(bmt.inspect.format_summary(summary))
    bmt.print_rank(bmt.inspect.format_summary(parameters))
  end
  local grad_norm = optim_manager:clip_grad_norm(optimizer.param_groups, 1)
  optim_manager:step()
  avg_time:record(ps.now() - began)
  avg_loss:record(global_loss)
  if iteration % 10 == 0 or iteration == args.iters then
    bmt.print_rank(("| Iter: %6d | loss: %.4f average_loss: %.4f | norm: %.4f | lr: %.4e scale: %10.4f | time: %.4f |")
      :format(iteration, global_loss, avg_loss.value, grad_norm, lr_scheduler.current_lr, optim_manager.loss_scale,
      avg_time.value))
  end
end
if args.save then bmt.save(model, args.save) end
bmt.close()
