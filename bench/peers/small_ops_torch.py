# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's side of bench/small_ops.lua. Reads the calls from a JSON file. Prints the processor seconds of each call
on one thread as one line of JSON."""
import json
import math
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
SIZES = (16, 1024, 65536)


def square(n):
    return math.isqrt(int(n))


def rows(n):
    return math.ceil(n / 16)


def ints(shape, below):
    return torch.randint(0, below, shape)


KINDS = {
    "v": lambda n: torch.randn(n), "u": lambda n: torch.rand(n) + 0.5, "p": lambda n: torch.rand(n) * 0.8 + 0.1,
    "i": lambda n: ints((n,), 99), "b": lambda n: torch.randn(n) > 0, "m": lambda n: torch.randn(square(n), square(n)),
    "mu": lambda n: torch.rand(square(n), square(n)) + 0.5, "c": lambda n: torch.randn(square(n), 1),
    "w": lambda n: torch.randn(square(n)), "r": lambda n: torch.randn(rows(n), 16),
    "k": lambda n: ints((rows(n),), rows(n)),
    "kk": lambda n: ints((rows(n),), rows(n)).unsqueeze(1).expand(rows(n), 16),
    "perm": lambda n: torch.randperm(rows(n)),
    "h": lambda n: ints((rows(n),), 16), "g": lambda n: ints((square(n), square(n)), square(n)),
    "j": lambda n: ints((square(n),), square(n)), "bag": lambda n: ints((rows(n), 4), rows(n)),
    "img": lambda n: torch.randn(1, 4, square(n / 4), square(n / 4)), "f": lambda n: torch.randn(4, 4, 3, 3),
    "f1": lambda n: torch.randn(4, 4, 3), "c4": lambda n: torch.randn(4), "sig": lambda n: torch.randn(1, 4, n // 4),
    "sg": lambda n: torch.randn(square(n)).sign(),
    "a": lambda n: torch.randn(1, 2, rows(n), 8), "one": lambda n: torch.randn(1),
    "four": lambda n: torch.randn(4, n // 4), "d16": lambda n: torch.randn(square(n), 16),
}


def call_of(row, n):
    scope, wanted, grads = {"torch": torch, "F": F}, row["grads"].split(","), []
    for item in row["inputs"].split(","):
        name, kind = item.split("=")
        scope[name] = KINDS[kind](n)
        if name in wanted:
            scope[name].requires_grad_(True)
            grads.append(scope[name])
    forward = eval("lambda: " + row["call"], scope)
    if not grads:
        return forward

    def both():
        y = forward()
        (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()
        for p in grads:
            p.grad = None
    return both


def seconds_of(call):
    def run(n):
        began = time.process_time()
        for _ in range(n):
            call()
        return time.process_time() - began
    n, warm = 1, 0.0
    for _ in range(100):
        warm += run(1)
        if warm > 10e-3:
            break
    while run(n) < 1e-3 and n < 1e5:
        n *= 2
    return min(run(n) / n for _ in range(5))


with open(sys.argv[1]) as file:
    calls = json.load(file)
found = {}
for row in calls:
    for n in SIZES:
        try:
            found["%s|%d" % (row["name"], n)] = seconds_of(call_of(row, n))
        except Exception as error:
            sys.exit("%s, %d elements: %s" % (row["name"], n, error))
print(json.dumps(found))
