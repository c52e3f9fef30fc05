# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's side of bench/small_ops.lua. Prints the seconds of each call on one thread as one line of JSON."""
import argparse
import json
import math
import time

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--only")
args = parser.parse_args()
torch.set_num_threads(1)
SIZES = (16, 1024, 65536)


def square(n):
    return math.isqrt(n)


def ints(n, below):
    return torch.randint(0, below, (n,))


def pair(n):
    return torch.randn(n), torch.randn(n)


def matrix(n):
    return torch.randn(square(n), square(n))


def of_rows(n):
    m = math.ceil(n / 16)
    return torch.zeros(m, 16), ints(m, m), torch.randn(m, 16)


def backward(p, fn):
    def call():
        fn().backward()
        p.grad = None
    return call


def assign(n):
    a, i, b = of_rows(n)

    def call():
        a[i] = b
    return call


def cases(n):
    a, b = pair(n)
    i64, j64 = ints(n, 99), ints(n, 99)
    x, y, column, row = matrix(n), matrix(n), torch.randn(square(n), 1), torch.randn(square(n))
    zeros, i, rows = of_rows(n)
    m = math.ceil(n / 16)
    spread, at = i.unsqueeze(1).expand(m, 16), torch.randint(0, square(n), (square(n), square(n)))
    hot, one, mask, u = ints(m, 16), torch.randn(1), a > 0, torch.rand(n)
    r, c = ints(square(n), square(n)), ints(square(n), square(n))
    p, q = torch.randn(m, 16, requires_grad=True), torch.randn(n, requires_grad=True)
    return {
        "add": lambda: a + b, "add a number": lambda: a + 1.5, "add int64": lambda: i64 + j64,
        "mul a column": lambda: x * column,
        "add a row": lambda: x + row, "relu": lambda: F.relu(a), "softplus": lambda: F.softplus(a),
        "sum": lambda: a.sum(),
        "norm": lambda: torch.linalg.vector_norm(a), "item": lambda: one.item(), "one_hot": lambda: F.one_hot(hot, 16),
        "flip": lambda: x.flip(1), "roll": lambda: x.roll(1, 0), "tril": lambda: x.tril(),
        "cat, last dimension": lambda: torch.cat([x, y], -1), "gather": lambda: x.gather(1, at),
        "scatter_add of rows": lambda: zeros.scatter_add(0, spread, rows),
        "index_add": lambda: zeros.index_add(0, i, rows),
        "x[i]": lambda: rows[i], "x[i, j]": lambda: x[r, c], "x[i] = v": assign(n), "x[mask]": lambda: a[mask],
        "nonzero": lambda: mask.nonzero(), "sort": lambda: a.sort(), "dropout": lambda: F.dropout(a, 0.1),
        "prod": lambda: u.prod(),
        "x[i], backward": backward(p, lambda: p[i].sum()), "softplus, backward": backward(q,
                                                                                          lambda: F.softplus(q).sum()),
    }


def seconds_of(call):
    def run(n):
        began = time.perf_counter()
        for _ in range(n):
            call()
        return time.perf_counter() - began
    n = 1
    while run(n) < 2e-3 and n < 1e5:
        n *= 2
    return min(run(n) / n for _ in range(5))


found = {}
for n in SIZES:
    for name, call in cases(n).items():
        if not args.only or args.only in name:
            found["%s|%d" % (name, n)] = seconds_of(call)
print(json.dumps(found))
