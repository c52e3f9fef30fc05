# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/train.lua --family llama --model llama-110m`, or of `bench/train.lua` with --family gpt2: a
training step of transformers' LlamaForCausalLM or GPT2LMHeadModel on the processor, compiled by PyTorch, with its
fused AdamW. The last line of the output is JSON with step_s and cpu_s (the medians of the steps after the second, and
of their processor seconds), tokens_per_s and peak_rss_mib.

    llama_torch.py --family llama --dtype bf16 --batch 4 --seq 256 --steps 6 [--threads N]
"""
import argparse
import json
import resource
import time

import torch
import transformers

p = argparse.ArgumentParser()
p.add_argument("--family", default="llama", choices=["llama", "gpt2"])
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
llama = transformers.LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                 num_attention_heads=12, max_position_embeddings=1024, rms_norm_eps=1e-5,
                                 tie_word_embeddings=True)
if a.family == "llama":
    name, model = "llama-110m", transformers.LlamaForCausalLM(llama)
else:
    name, no_dropout = "gpt2", transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(no_dropout)
model = model.to(dtype).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
run = torch.compile(model) if a.compile else model
x = torch.randint(0, model.config.vocab_size, (a.batch, a.seq))
times, seconds = [], []
for _ in range(a.steps):
    began, clock = time.time(), time.process_time()
    optimizer.zero_grad(set_to_none=True)
    loss = run(input_ids=x, labels=x).loss
    loss.backward()
    optimizer.step()
    times.append(time.time() - began)
    seconds.append(time.process_time() - clock)
    print("step %.3f s, loss %.4f" % (times[-1], float(loss.detach())), flush=True)
step = sorted(times[2:])[len(times[2:]) // 2]
cpu = sorted(seconds[2:])[len(seconds[2:]) // 2]
print(json.dumps({"what": "train", "model": name, "peer": "torch " + torch.__version__, "dtype": a.dtype,
                  "step_s": step, "cpu_s": cpu,
                  "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "tokens_per_s": a.batch * a.seq / step}))
