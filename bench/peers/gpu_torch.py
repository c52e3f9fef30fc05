#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Measures PyTorch with its best settings on the card that bench/gpu_check.sh measures. Prints each figure as a line
of JSON as soon as it is known.

    gpu_torch.py matmul | attention | copies [--small]
    gpu_torch.py train --model gpt2 --batch 16 --seq 1024 [--no-compile] [--offload]

Training uses bf16 autocast with fp32 parameters, SDPA, fused AdamW, and a vocabulary that is a multiple of 64. First,
each block is compiled separately, which takes seconds. Then the whole model is compiled, which can take minutes.
Eager mode is used if neither worked. A batch that does not fit is halved. --offload keeps parameters, gradients and
optimizer state in host memory with FSDP2's CPU offload in a world of one.
"""
import argparse
import json
import os
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

PRESETS = {"tiny": (2, 2, 32), "gpt2": (12, 12, 768), "gpt2-xl": (48, 25, 1600)}
# layers, heads, key-value heads, width, inner width, vocabulary
LLAMAS = {"llama-tiny": (2, 4, 2, 32, 48, 256), "llama-110m": (12, 12, 12, 768, 2048, 32000),
          "llama-3.2-1b": (16, 32, 8, 2048, 8192, 128256)}


def tell(**figures):
    print(json.dumps(dict(figures, peer="torch " + torch.__version__)), flush=True)


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
        tell(what="matmul", n=n, tflops=2 * n ** 3 / s / 1e12)


def attention(a):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    ways = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]
    for head in (64, 128):
        for way, backend in ways if a.device == "cuda" else [("math", SDPBackend.MATH)]:
            try:
                with sdpa_kernel(backend):
                    attend(a, head, way)
            except RuntimeError as problem:                    # not available for this card or for these sizes
                print("%s, heads of %d: %s" % (way, head, str(problem).splitlines()[0]), file=sys.stderr)


def attend(a, head, way):
    B, H, T = (1, 1, 70) if a.small else (4, 2048 // head, 2048)
    q, k, v = (torch.randn(B, H, T, head, device=a.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    flops = 4 * B * H * T * T * head / 2

    def forward():
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    dy = torch.randn(B, T, H, head, device=a.device, dtype=torch.bfloat16).transpose(1, 2)

    def both():
        q.grad = k.grad = v.grad = None
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(dy)
    f, b = seconds(10, forward, a.device), seconds(10, both, a.device)
    tell(what="attention", kind=way, head=head, seq=T, forward_ms=f * 1e3, both_ms=b * 1e3,
         forward_tflops=flops / f / 1e12, both_tflops=3.5 * flops / b / 1e12)


def copies(a):
    """Measures the link with pinned memory, in each direction alone and in both at once."""
    n = 2 ** (20 if a.small or a.device != "cuda" else 30)
    pin = a.device == "cuda"
    up, down = (torch.ones(n, dtype=torch.uint8, pin_memory=pin) for _ in range(2))
    here, there = (torch.ones(n, dtype=torch.uint8, device=a.device) for _ in range(2))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if pin else None

    def both():
        with torch.cuda.stream(streams[0]):
            here.copy_(up, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            down.copy_(there, non_blocking=True)
    ways = [("to_device", lambda: here.copy_(up, non_blocking=True)),
            ("from_device", lambda: down.copy_(there, non_blocking=True))] + ([("both_at_once", both)] if pin else [])
    for way, fn in ways:
        tell(what="copy", way=way, pinned=pin, gb_per_s=n / seconds(8, fn, a.device) / 1e9)


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

    def head(self, x, target):
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.reshape(-1))

    def forward(self, idx, target):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.head(x, target)


class LlamaBlock(nn.Module):
    def __init__(self, c, heads, groups, inner):
        super().__init__()
        self.heads, self.groups, d = heads, groups, c // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(c, 1e-5), nn.RMSNorm(c, 1e-5)
        self.q, self.kv = nn.Linear(c, c, False), nn.Linear(c, 2 * groups * d, False)
        self.o, self.gate_up = nn.Linear(c, c, False), nn.Linear(c, 2 * inner, False)
        self.down = nn.Linear(inner, c, False)

    def turn(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        d, h = C // self.heads, self.norm_1(x)
        q = self.q(h).view(B, T, self.heads, d).transpose(1, 2)
        k, v = self.kv(h).view(B, T, 2 * self.groups, d).transpose(1, 2).chunk(2, 1)
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers, heads, groups, c, inner, vocab, seq):
        super().__init__()
        self.wte, self.norm = nn.Embedding(vocab, c), nn.RMSNorm(c, 1e-5)
        self.h = nn.ModuleList(LlamaBlock(c, heads, groups, inner) for _ in range(layers))
        d = c // heads
        angle = torch.outer(torch.arange(seq), 5e5 ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)
        self.register_buffer("cos", angle.cos().bfloat16())
        self.register_buffer("sin", angle.sin().bfloat16())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def head(self, x, target):
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.reshape(-1))

    def forward(self, idx, target):
        x = self.wte(idx)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        return self.head(x, target)


def offloaded(model):
    from torch.distributed import init_process_group, is_initialized
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    if not is_initialized():
        init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    how = dict(offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for block in model.h:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


def make(a, device):
    if a.model in LLAMAS:
        with torch.device(device):
            return Llama(*LLAMAS[a.model], a.seq)
    layers, heads, c = PRESETS[a.model]
    with torch.device(device):                             # initialization on the device is faster
        return GPT2(50304, a.seq, a.layers or layers, a.heads or heads, a.width or c)


def steps(a, model, how, batch):
    """Trains, and prints the time of a step. If steps are long, prints it after each step, since the run can be
    killed."""
    count = sum(p.numel() for p in model.parameters())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, **{"foreach" if "foreach" in how else "fused": True})
    f = torch.compile(model, dynamic=False) if how == "whole" else model
    if how == "blocks":
        for block in model.h:
            block.compile(dynamic=False)
        model.head = torch.compile(model.head, dynamic=False)
    x, y = (torch.randint(0, 256 if "tiny" in a.model else 32000 if "110m" in a.model else 50257, (batch, a.seq),
                          device=a.device) for _ in range(2))
    times, losses = [], []
    for step in range(a.steps):
        t = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast(a.device, dtype=torch.bfloat16):
            loss = f(x, y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - t)
        print("%s, step %d: loss %.5f, %.1f ms" % (how, step + 1, losses[-1], times[-1] * 1e3), flush=True)
        if step < 2 or not a.offload and step + 1 < a.steps:
            continue
        s = sorted(times[2:])[len(times[2:]) // 2]
        peak = torch.cuda.max_memory_allocated() / 2 ** 20 if a.device == "cuda" else 0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tell(what="offload" if a.offload else "train", model=a.model, layers=len(model.h), batch=batch, seq=a.seq,
             how=how, step_s=s, tokens_per_s=batch * a.seq / s, peak_mib=peak, losses=losses, parameters=count,
             host_bytes_a_parameter=host / count)


def attempt(a, how, batch):
    """Returns whether training worked. A batch that does not fit is halved."""
    while batch:
        torch.manual_seed(0)
        if a.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()
        try:
            steps(a, offloaded(make(a, a.device).to("cpu")) if a.offload else make(a, a.device), how, batch)
            return True
        except torch.OutOfMemoryError:
            print("%s: a batch of %d does not fit" % (how, batch), flush=True)
        except Exception as problem:                           # the other variants are tried in any case
            print("%s: %s: %s" % (how, type(problem).__name__, str(problem)[:2000]), flush=True)
            return False
        batch //= 2
    return False


def train(a):
    torch.set_float32_matmul_precision("high")
    if a.offload:
        sys.exit(0 if attempt(a, "offload", a.batch) or attempt(a, "offload, foreach", a.batch) else 1)
    worked = a.compile and [attempt(a, how, a.batch) for how in a.how.split(",")]
    if not (worked and any(worked)) and not attempt(a, "eager", a.batch):
        sys.exit(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("part", choices=["matmul", "attention", "copies", "train"])
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true")
    p.add_argument("--model", default="gpt2", choices=sorted(PRESETS) + sorted(LLAMAS))
    p.add_argument("--layers", type=int)
    p.add_argument("--width", type=int)
    p.add_argument("--heads", type=int)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--no-compile", dest="compile", action="store_false")
    p.add_argument("--how", default="blocks,whole", help="ways to compile, in this order: blocks, whole, eager")
    p.add_argument("--offload", action="store_true")
    a = p.parse_args()
    dict(matmul=matmul, attention=attention, copies=copies, train=train)[a.part](a)


main()
