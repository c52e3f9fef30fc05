# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/lora.lua --peer`: PEFT's LoRA over a frozen model of transformers in bf16, with gradient
checkpointing and PyTorch's fused AdamW. It answers commands of its input, each by a line "@" and JSON, until `quit`:
`step` (seconds, cpu: processor seconds, loss) and `memory` (peak_rss_mib).

    lora_peft.py SHAPE --rank R --batch N --seq N [--threads N] [--dtype bf16|fp32] [--adapter fp32|bf16]
        [--targets NAMES] [--compile]

SHAPE: the JSON of a LlamaConfig, {"gpt2": "gpt2-xl"}, or {"folder": DIR}; weights in NF4 of a folder stay packed
(bitsandbytes).
"""
import argparse
import json
import resource
import sys
import time

import peft
import torch
import transformers

p = argparse.ArgumentParser()
p.add_argument("shape")
p.add_argument("--rank", type=int, default=16)
p.add_argument("--batch", type=int, default=1)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--threads", type=int)
p.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
p.add_argument("--adapter", default="fp32", choices=["fp32", "bf16"])
p.add_argument("--targets", default="all-linear")
p.add_argument("--compile", action="store_true")
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
torch.manual_seed(0)
shape = json.loads(a.shape)
if a.dtype == "bf16":
    torch.set_default_dtype(torch.bfloat16)                  # weights are made in bf16, so that none exist in fp32
if "folder" in shape:
    torch.set_default_dtype(torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(shape["folder"], dtype=torch.bfloat16, device_map="cpu")
elif "gpt2" in shape:
    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config)
else:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
torch.set_default_dtype(torch.float32)
model.config.use_cache = False
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = peft.get_peft_model(
    model, peft.LoraConfig(r=a.rank, lora_alpha=2 * a.rank, task_type="CAUSAL_LM",
                           target_modules=a.targets if a.targets == "all-linear" else a.targets.split(",")),
    autocast_adapter_dtype=a.adapter == "fp32").train()
optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-4, fused=True)
run = torch.compile(model) if a.compile else model
x = torch.randint(0, model.config.vocab_size, (a.batch, a.seq))


def answer(**value):
    print("@" + json.dumps(value), flush=True)


def step():
    began, clock = time.monotonic(), time.process_time()
    loss = run(input_ids=x, labels=x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = float(loss.detach())
    answer(seconds=time.monotonic() - began, cpu=time.process_time() - clock, loss=value)


answer()
for line in sys.stdin:
    command = line.strip()
    if command == "quit":
        break
    if command == "step":
        step()
    else:
        answer(peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
