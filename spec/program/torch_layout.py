# SPDX-License-Identifier: BSD-3-Clause
"""Trains a model of examples/*.lua in PyTorch from the weights and batches in a file (--trace). Prints the losses of
its steps, and with a second file writes the weights after the last step. As in examples/layout.lua, a step's batch is
split into two micro-batches, whose mean loss is trained. With "sgd" the learning rate is 1024, so that the change of
a weight in one step is its gradient times 1024. The arguments are TRACE KIND [OUT], and again after each "then".
"""
import sys

import torch
from safetensors.torch import load_file, save_file

CUTS = 2


def train(model, lr, trace, kind, out=None):
    trace = load_file(trace)
    model.load_state_dict({name: t for name, t in trace.items() if not name[0].isdigit()})
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1024)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    step = 1
    while True:
        batch = {name.split(".", 1)[1]: t for name, t in trace.items() if name.startswith("%d." % step)}
        if not batch:
            break
        optimizer.zero_grad()
        total = 0.0
        parts = {name: t.chunk(CUTS) for name, t in batch.items()}
        for i in range(CUTS):
            loss = model(**{name: t[i] for name, t in parts.items()}) / CUTS
            loss.backward()
            total += loss.item()
        optimizer.step()
        print("step %d  loss %.9f" % (step, total))
        step += 1
    if out:
        save_file({name: t.contiguous() for name, t in model.state_dict().items()}, out)


def run(model, lr):
    """model(**batch) returns the loss for a micro-batch of named tensors."""
    for args in " ".join(sys.argv[1:]).split(" then "):
        train(model, lr, *args.split())
