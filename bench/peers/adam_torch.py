# SPDX-License-Identifier: BSD-3-Clause
"""Measures AdamW on the CPU in PyTorch (fused and foreach) and DeepSpeed (CPUAdam), for bench/adam.lua.

    OMP_NUM_THREADS=2 python3 bench/peers/adam_torch.py --params 50000000 --passes 15

The tensors, types and settings are those of bench/adam.lua. All types are fp32, except that deepspeed_bf16 has bf16
parameters and gradients with fp32 state. Prints the median seconds per step as one line of JSON. A peer that is not
installed or does not build is skipped, and a separate line contains the reason.
"""
import argparse
import json
import os
import statistics
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--params", type=int, default=50_000_000)
parser.add_argument("--tensors", type=int, default=12)
parser.add_argument("--passes", type=int, default=15)
args = parser.parse_args()
threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))
torch.set_num_threads(threads)


def parameters(dtype):
    left, out = args.params, []
    for i in range(1, args.tensors + 1):
        n = left if i == args.tensors else int(args.params / args.tensors * (0.63 if i % 2 == 0 else 1.37))
        left -= n
        p = torch.nn.Parameter(torch.randn(n).to(dtype))
        p.grad = torch.randn(n).to(dtype)
        out.append(p)
    return out


def seconds_a_step(optimizer):
    times = []
    for _ in range(args.passes + 2):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def deepspeed_adam(dtype):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    settings = {"lr": 1e-4, "weight_decay": 0.01, "adamw_mode": True}
    return DeepSpeedCPUAdam(parameters(dtype), **settings)


def torch_adam(**how):
    return torch.optim.AdamW(parameters(torch.float32), lr=1e-4, weight_decay=0.01, **how)


result = {"torch_version": torch.__version__}
for name, make in [
    ("torch_fused", lambda: torch_adam(fused=True)),
    ("torch_foreach", lambda: torch_adam(foreach=True)),
    ("deepspeed", lambda: deepspeed_adam(torch.float32)),
    ("deepspeed_bf16", lambda: deepspeed_adam(torch.bfloat16)),
]:
    try:
        result[name + "_gparams_per_s"] = args.params / seconds_a_step(make()) / 1e9
    except Exception as error:  # the other peers are measured in any case
        print(f"{name}: left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
print(json.dumps(result))
