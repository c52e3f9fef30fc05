# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/train.lua --family llama --model llama-110m`: a training step of transformers' LlamaForCausalLM
on the processor, compiled by PyTorch, with its fused AdamW. The last line of the output is JSON with step_s (the
median of the steps after the second) and tokens_per_s.

    llama_torch.py --dtype bf16 --batch 4 --seq 256 --steps 6 [--threads N]
"""
import argparse
import json
import time

import torch
import transformers

p = argparse.ArgumentParser()
p.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=256)
p.add_argument("--steps", type=int, default=6)
p.add_argument("--threads", type=int)
p.add_argument("--no-compile", dest="compile", action="store_false")
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
torch.manual_seed(0)
dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float32
config = transformers.LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                  num_attention_heads=12, max_position_embeddings=1024, rms_norm_eps=1e-5,
                                  tie_word_embeddings=True)
model = transformers.LlamaForCausalLM(config).to(dtype).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
run = torch.compile(model) if a.compile else model
x = torch.randint(0, 32000, (a.batch, a.seq))
times = []
for _ in range(a.steps):
    began = time.time()
    optimizer.zero_grad(set_to_none=True)
    loss = run(input_ids=x, labels=x).loss
    loss.backward()
    optimizer.step()
    times.append(time.time() - began)
    print("step %.3f s, loss %.4f" % (times[-1], float(loss.detach())), flush=True)
step = sorted(times[2:])[len(times[2:]) // 2]
print(json.dumps({"what": "train", "model": "llama-110m", "peer": "torch " + torch.__version__, "dtype": a.dtype,
                  "step_s": step,
                  "tokens_per_s": a.batch * a.seq / step}))
