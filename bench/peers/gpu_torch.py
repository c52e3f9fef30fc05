#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch at its best on the card that bench/gpu_check.sh measures: one JSON object a line.

    gpu_torch.py matmul | attention [--small]
    gpu_torch.py train --model gpt2 --batch 16 --seq 1024 [--no-compile] [--offload]

Training is bf16 parameters with fp32 masters by autocast, SDPA, torch.compile and fused AdamW. --offload keeps
parameters, gradients and optimizer state in host memory by FSDP2's CPU offload in a world of one."""
import argparse
import json
import os
import resource
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

PRESETS = {"tiny": (2, 2, 32), "gpt2": (12, 12, 768), "gpt2-xl": (48, 25, 1600)}


def seconds(n, fn, device):
    def wait():
        if device == "cuda":
            torch.cuda.synchronize()
    fn()
    wait()
    best = float("inf")
    for _ in range(3):
        t = time.perf_counter()
        for _ in range(n):
            fn()
        wait()
        best = min(best, (time.perf_counter() - t) / n)
    return best


def matmul(a):
    for n in [64] if a.small else [2048, 4096, 8192]:
        x, y = (torch.randn(n, n, device=a.device, dtype=torch.bfloat16) for _ in range(2))
        s = seconds(20, lambda: x @ y, a.device)
        print(json.dumps(dict(what="matmul", peer="torch " + torch.__version__, n=n, tflops=2 * n ** 3 / s / 1e12)))


def attention(a):
    for head in (64, 128):
        B, H, T = (1, 1, 70) if a.small else (4, 2048 // head, 2048)
        q, k, v = (torch.randn(B, H, T, head, device=a.device, dtype=torch.bfloat16, requires_grad=True)
                   for _ in range(3))
        flops = 4 * B * H * T * T * head / 2

        def forward():
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        dy = torch.randn_like(q)

        def both():
            q.grad = k.grad = v.grad = None
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(dy)
        f, b = seconds(10, forward, a.device), seconds(10, both, a.device)
        print(json.dumps(dict(what="attention", peer="torch " + torch.__version__, head=head, seq=T, forward_ms=f * 1e3,
                              both_ms=b * 1e3, forward_tflops=flops / f / 1e12, both_tflops=3.5 * flops / b / 1e12)))


class Block(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.qkv, self.proj = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for t in self.qkv(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab, seq, layers, heads, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, c), nn.Embedding(seq, c)
        self.h = nn.ModuleList(Block(c, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(c)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, idx, target):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.reshape(-1))


def offloaded(model):
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    how = dict(offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for block in model.h:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


def train(a):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    layers, heads, c = PRESETS[a.model]
    with torch.device(a.device):                           # made where that is quick
        model = GPT2(50257, a.seq, a.layers or layers, a.heads or heads, a.width or c)
    count = sum(p.numel() for p in model.parameters())
    if a.offload:
        model = offloaded(model.to("cpu"))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model = model.to(a.device)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=a.device == "cuda")
    f = torch.compile(model) if a.compile and not a.offload else model
    x, y = (torch.randint(0, 50257, (a.batch, a.seq), device=a.device) for _ in range(2))
    times, losses = [], []
    for _ in range(a.steps):
        t = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast(a.device, dtype=torch.bfloat16):
            loss = f(x, y)
        loss.backward()
        opt.step()
        losses.append(float(loss))
        times.append(time.perf_counter() - t)
    s = sorted(times[2:])[len(times[2:]) // 2]
    peak = torch.cuda.max_memory_allocated() / 2 ** 20 if a.device == "cuda" else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(dict(what="offload" if a.offload else "train", peer="torch " + torch.__version__, model=a.model,
                          layers=a.layers, batch=a.batch, seq=a.seq, compile=a.compile, step_s=s,
                          tokens_per_s=a.batch * a.seq / s, peak_mib=peak, losses=losses, parameters=count,
                          host_bytes_a_parameter=host / count)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("part", choices=["matmul", "attention", "train"])
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true")
    p.add_argument("--model", default="gpt2", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int)
    p.add_argument("--width", type=int)
    p.add_argument("--heads", type=int)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--no-compile", dest="compile", action="store_false")
    p.add_argument("--offload", action="store_true")
    a = p.parse_args()
    dict(matmul=matmul, attention=attention, train=train)[a.part](a)


main()
