#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Finds the largest GPT-2-like model for which PyTorch finishes a training step within this machine's memory.

    largest_torch.py [--autocast] [--width 2048] [--seq 128] [--from 8] [--step 2]

Layers are added until a step no longer fits. Each size runs in a separate process, whose address space is limited to
the machine's free memory, so that it fails with an error instead of being killed. PyTorch uses as little memory as
possible: recompute per block, fused or single-tensor AdamW, and gradients that are freed after their use, if the
version supports this. The last line of the output is one JSON object.
"""
import argparse
import json
import resource
import subprocess
import sys


def one_step(layers, width, seq, autocast):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            heads = width // 64
            q, k, v = (t.view(1, seq, heads, 64).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(width, 2))
            scores = (q @ k.transpose(-2, -1)) / 8 + torch.full((seq, seq), float("-inf")).triu(1)
            x = x + self.proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(1, seq, width))
            return x + self.down(F.gelu(self.up(self.ln_2(x))))

    torch.manual_seed(0)
    wte, blocks, norm = nn.Embedding(50257, width), [Block() for _ in range(layers)], nn.LayerNorm(width)
    params = [p for m in [wte, norm] + blocks for p in m.parameters()]
    try:
        optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    except (RuntimeError, TypeError):
        optimizer = torch.optim.AdamW(params, lr=1e-4)
    tokens = torch.randint(0, 50257, (1, seq))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        x = wte(tokens)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = F.linear(norm(x), wte.weight)
    loss = F.cross_entropy(logits.float().view(-1, 50257), tokens.view(-1))
    loss.backward()
    optimizer.step()
    print(json.dumps({"loss": loss.item(), "parameters": sum(p.numel() for p in params),
                      "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def available_bytes():
    for line in open("/proc/meminfo"):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--from", dest="first", type=int, default=8)
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--only", type=int, help="number of layers: run only this size, in this process")
    args = parser.parse_args()
    if args.only:
        one_step(args.only, args.width, args.seq, args.autocast)
        return
    best = None
    layers = args.first
    while True:
        limit = available_bytes() + (2 << 30)       # libraries map more memory than they use
        command = [sys.executable, __file__, "--only", str(layers), "--width", str(args.width), "--seq", str(args.seq)]
        child = subprocess.run(command + (["--autocast"] if args.autocast else []), capture_output=True, text=True,
                               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        if child.returncode != 0:
            print("%d layers: %s" % (layers, (child.stderr.strip().splitlines() or ["killed"])[-1][:150]))
            break
        best = json.loads(child.stdout.strip().splitlines()[-1])
        print("%d layers: %.2f B parameters, peak %.0f MiB" % (layers, best["parameters"] / 1e9, best["peak_rss_mib"]))
        layers += args.step
    import torch
    print(json.dumps({"peer": "torch " + torch.__version__, "autocast": args.autocast, "largest": best}))


if __name__ == "__main__":
    main()
