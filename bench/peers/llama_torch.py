# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/train.lua --family llama --model llama-110m`, or of `bench/train.lua` with --family gpt2: a
training step of transformers' LlamaForCausalLM or GPT2LMHeadModel on the processor, compiled by PyTorch, with its
fused AdamW. The last line of the output is JSON with step_s and cpu_s (the medians of the steps after the second, and
of their processor seconds), tokens_per_s and peak_rss_mib.

    llama_torch.py --family llama --dtype bf16 --batch 4 --seq 256 --steps 6 [--threads N]

--model llama-3.2-1b: the shape of Llama 3.2 1B. --autocast: weights and averages in fp32, products in bf16.
--recompute: gradient checkpointing. --muon: PyTorch's Muon for the matrices inside the blocks.
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
p.add_argument("--model", default="llama-110m", choices=["llama-110m", "llama-3.2-1b"])
p.add_argument("--autocast", action="store_true")
p.add_argument("--recompute", action="store_true")
p.add_argument("--muon", action="store_true")
p.add_argument("--no-compile", dest="compile", action="store_false")
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
torch.manual_seed(0)
dtype = torch.bfloat16 if a.dtype == "bf16" and not a.autocast else torch.float32
llama = transformers.LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                 num_attention_heads=12, max_position_embeddings=1024, rms_norm_eps=1e-5,
                                 tie_word_embeddings=True)
if a.model == "llama-3.2-1b":
    llama = transformers.LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                     num_attention_heads=32, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5,
                                     max_position_embeddings=131072, tie_word_embeddings=True)
if a.family == "llama":
    torch.set_default_dtype(dtype)                           # so that no weights exist in another type
    name, model = a.model, transformers.LlamaForCausalLM(llama)
    torch.set_default_dtype(torch.float32)
else:
    name, no_dropout = "gpt2", transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(no_dropout)
model = model.to(dtype).train()
if a.recompute:
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
rest, optimizers = list(model.parameters()), []
if a.muon:                                                   # matrices inside the blocks; their update is compiled
    inner = [w for n, w in model.named_parameters() if w.dim() == 2 and (".h." in n or ".layers." in n)]
    ids = {id(w) for w in inner}
    rest = [w for w in rest if id(w) not in ids]
    optimizers.append(torch.optim.Muon(inner, lr=3e-4))
optimizers.append(torch.optim.AdamW(rest, lr=3e-4, fused=True))
updates = [torch.compile(o.step) if a.compile and isinstance(o, torch.optim.Muon) else o.step for o in optimizers]
run = torch.compile(model) if a.compile else model
x = torch.randint(0, model.config.vocab_size, (a.batch, a.seq))
times, seconds = [], []
for _ in range(a.steps):
    began, clock = time.time(), time.process_time()
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=a.autocast):
        loss = run(input_ids=x, labels=x).loss
    loss.backward()
    for update in updates:
        update()
    times.append(time.time() - began)
    seconds.append(time.process_time() - clock)
    print("step %.3f s, loss %.4f" % (times[-1], float(loss.detach())), flush=True)
step = sorted(times[2:])[len(times[2:]) // 2]
cpu = sorted(seconds[2:])[len(seconds[2:]) // 2]
print(json.dumps({"what": "train", "model": name, "peer": "torch " + torch.__version__, "dtype": a.dtype,
                  "step_s": step, "cpu_s": cpu,
                  "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "tokens_per_s": a.batch * a.seq / step}))
