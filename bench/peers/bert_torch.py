# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/bert.lua --peer`: transformers' BertForSequenceClassification of the same size on the same
batches, with PyTorch's fused AdamW. It reads commands from its input until `quit`, and answers each with a line of
"@" and JSON. The command `step I` returns seconds.

    bert_torch.py BATCHES.json --dtype bf16|amp|fp32 [--threads N] [--compile] [--packed]

--dtype amp: weights and Adam's state are fp32, and autocast computes in bf16. --packed: a row contains several lines,
up to ROW tokens, and a mask [rows, 1, T, T] hides them from each other. PyTorch's attention without padding (flash
attention over concatenated sequences) has no kernel for the processor.
"""
import argparse
import contextlib
import json
import sys
import time

import torch
import transformers

ROW = 128

p = argparse.ArgumentParser()
p.add_argument("batches")
p.add_argument("--dtype", default="bf16", choices=["bf16", "amp", "fp32"])
p.add_argument("--threads", type=int)
p.add_argument("--compile", action="store_true")
p.add_argument("--packed", action="store_true")
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
torch.manual_seed(0)
with open(a.batches) as f:
    batches = json.load(f)


def answer(**value):
    print("@" + json.dumps(value), flush=True)


def fill(lengths, width):
    """Distributes lines over rows of up to `width` tokens. The longest line is first, and each line goes to the
    first row that has room. Returns rows of line numbers."""
    rows, left = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((r for r, room in enumerate(left) if room >= lengths[i]), None)
        if at is None:
            rows.append([])
            left.append(width)
            at = len(rows) - 1
        rows[at].append(i)
        left[at] -= lengths[i]
    return rows


def packed(batch):
    """Returns the batch with several lines per row. `first` has the position of each line's first token in [rows *
    T]."""
    rows = zip(batch["input_ids"], batch["attention_mask"])
    lines = [[x for x, seen in zip(ids, mask) if seen] for ids, mask in rows]
    lengths = [len(x) for x in lines]
    fewest = len(fill(lengths, ROW))
    T = next(t for t in range(max(lengths), ROW + 1) if len(fill(lengths, t)) <= fewest)
    rows = fill(lengths, T)
    ids, places, owner = (torch.zeros(len(rows), T, dtype=torch.long) for _ in range(3))
    first = torch.zeros(len(lines), dtype=torch.long)
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            n = lengths[i]
            ids[r, at:at + n] = torch.tensor(lines[i])
            places[r, at:at + n] = torch.arange(n)
            owner[r, at:at + n] = i + 1
            first[i] = r * T + at
            at += n
    mask = owner[:, None, :, None] == owner[:, None, None, :]
    return {"input_ids": ids, "position_ids": places, "attention_mask": mask,
            "first": first, "labels": torch.tensor(batch["labels"])}


def padded(batch):
    return {k: torch.tensor(batch[k]) for k in ("input_ids", "attention_mask", "labels")}


class Packed(torch.nn.Module):
    """BertForSequenceClassification whose forward accepts rows of several lines."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, input_ids, position_ids, attention_mask, first, labels):
        bert = self.of.bert
        x = bert(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask).last_hidden_state
        pooled = bert.pooler(x.reshape(-1, 1, x.shape[-1])[first])
        logits = self.of.classifier(self.of.dropout(pooled))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss)


model = transformers.BertForSequenceClassification(transformers.BertConfig()).train()
model.to(torch.bfloat16 if a.dtype == "bf16" else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
run = Packed(model) if a.packed else model
if a.compile:
    run = torch.compile(run, dynamic=True)
inputs = [packed(batch) if a.packed else padded(batch) for batch in batches]
answer(ready=True)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    batch = inputs[int(line.split()[1])]
    began = time.time()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16) if a.dtype == "amp" else contextlib.nullcontext():
        loss = run(**batch).loss
    loss.backward()
    optimizer.step()
    float(loss.detach())
    answer(seconds=time.time() - began)
