# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's side of bench/conv.lua. Each line of the input requests a step, and the answer is a line with "@" and the
step's seconds as JSON.
"""
import argparse
import json
import os
import sys
import time

import torch

parser = argparse.ArgumentParser()
for name in ("batch", "channels", "size", "kernel"):
    parser.add_argument("--" + name, type=int, required=True)
args = parser.parse_args()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
n, c, s, k = args.batch, args.channels, args.size, args.kernel
x = torch.randn(n, c, s, s, requires_grad=True)
w, b = torch.randn(c, c, k, k, requires_grad=True), torch.randn(c, requires_grad=True)
dy = None
for line in sys.stdin:
    if line.strip() == "quit":
        break
    begin = time.perf_counter()
    y = torch.nn.functional.conv2d(x, w, b, padding=k // 2)
    dy = torch.randn_like(y) if dy is None else dy
    middle = time.perf_counter()
    y.backward(dy)
    x.grad = w.grad = b.grad = None
    print("@" + json.dumps({"forward_s": middle - begin, "step_s": time.perf_counter() - begin}), flush=True)
