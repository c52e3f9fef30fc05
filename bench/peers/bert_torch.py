# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/bert.lua --peer`: transformers' BertForSequenceClassification of the same size on the same batches, with
PyTorch's fused AdamW. It answers commands of its input, each by a line "@" and JSON: `step I` (seconds), until `quit`.

    bert_torch.py BATCHES.json --dtype bf16 [--threads N] [--compile]
"""
import argparse
import json
import sys
import time

import torch
import transformers

p = argparse.ArgumentParser()
p.add_argument("batches")
p.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
p.add_argument("--threads", type=int)
p.add_argument("--compile", action="store_true")
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
torch.manual_seed(0)
with open(a.batches) as f:
    batches = json.load(f)


def answer(**value):
    print("@" + json.dumps(value), flush=True)


model = transformers.BertForSequenceClassification(transformers.BertConfig()).train()
model.to(torch.bfloat16 if a.dtype == "bf16" else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
run = torch.compile(model, dynamic=True) if a.compile else model
answer(ready=True)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    batch = batches[int(line.split()[1])]
    began = time.time()
    optimizer.zero_grad(set_to_none=True)
    loss = run(**{k: torch.tensor(batch[k]) for k in ("input_ids", "attention_mask", "labels")}).loss
    loss.backward()
    optimizer.step()
    float(loss.detach())
    answer(seconds=time.time() - began)
