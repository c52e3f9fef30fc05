# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: reading and writing by index tensors, masks and numbers (lua/ps/tensor/index.lua,
scatter.lua)."""
import math

import torch

import differences

from oracle import FLOATS, INTS, TYPES, Case, Row, lua
from rows_views import any_dim, indices

ALL = FLOATS + INTS


def drawn_key(d, shape, inputs, unique=False):
    """Draws a key for a tensor of that shape. Returns its Lua text and PyTorch's key as a function of the inputs,
    and appends to inputs. unique: no element occurs twice."""
    sizes = d.choice([], [d.int(1, 4)], [2, d.int(1, 3)], [0] if not unique and d.chance(0.2) else [d.int(1, 5)])
    texts, makers, i = [], [], 0
    spread = not unique
    while i < len(shape) and (i == 0 or d.chance(0.8)):
        n = shape[i]
        kind = d.choice("number", "slice", "index", "index", "index", "mask", "new", "all")
        if kind == "new" and len(texts) < 6 and len(shape) < 5:
            texts.append("ps.newaxis")
            makers.append(lambda x: None)
            continue
        if kind == "index" or kind == "new":
            own = [1 if s > 1 and spread and d.chance(0.2) else s for s in sizes][d.int(0, len(sizes)) if spread
                                                                                  else 0:]
            if unique:
                own = [min(n, sizes[-1] if sizes else 1)]
                if any("x[" in t for t in texts):            # a second index would need the size of the first
                    own = [1]
                flat = torch.randperm(n, generator=d.gen)[:own[0]]
            else:
                flat = torch.randint(0, n, own, generator=d.gen)
            flat = torch.where(torch.rand(flat.shape, generator=d.gen) < 0.3, flat - n, flat)
            inputs.append(d.laid_out(flat.to(d.choice(torch.int32, torch.int64)), False, 0.7, False))
            at = len(inputs)
            texts.append("x[%d]" % at)
            makers.append(lambda x, at=at: x[at - 1].long())
        elif kind == "mask":
            if any("x[" in t for t in texts):                # its number of true elements would have to match
                continue
            count = d.choice(1, sizes[-1] if sizes and sizes[-1] <= n and sizes[-1] else 1)
            mask = torch.zeros(n, dtype=torch.bool)
            mask[torch.randperm(n, generator=d.gen)[:count]] = True
            inputs.append(d.laid_out(mask, False, 0.7, False))
            at, sizes, spread = len(inputs), [count], spread
            texts.append("x[%d]" % at)
            makers.append(lambda x, at=at: x[at - 1])
        elif kind == "number":
            k = d.int(-n, n - 1)
            texts.append(str(k))
            makers.append(lambda x, k=k: k)
        elif kind == "slice":
            a, b, s = d.int(-n, n), d.int(-n, n), d.choice(1, 2)
            texts.append("{ %d, %d, %d }" % (a, b, s))
            makers.append(lambda x, a=a, b=b, s=s: slice(a, b, s))
        else:
            texts.append("ps.all")
            makers.append(lambda x: slice(None))
        i += 1
    return "{ %s }" % ", ".join(texts), lambda x: tuple(m(x) for m in makers)


def fitting(d, unique, value, dtype_choice):
    """Draws a shape, a key and a value for it until PyTorch accepts them."""
    while True:
        shape = [n or 2 for n in d.shape(1, 4, 3000)]
        inputs = [None]
        text, key = drawn_key(d, shape, inputs, unique)
        x = torch.zeros(shape)
        try:
            got = x[key([None] + [i.view(i.base) if i.view else i.base for i in inputs[1:]])]
        except (IndexError, RuntimeError):
            continue
        return shape, text, key, inputs, list(got.shape), d.choice(*dtype_choice)


def read(d):
    shape, text, key, inputs, _, dtype = fitting(d, False, False, ALL)
    inputs[0] = d.input(shape, dtype, True, special=0.2)
    return Case("x[1][%s]" % text, lambda x, m: x[0][key(x)], inputs, exact={"out0"})


def value_for(d, shape, dtype, inputs, grad):
    """Draws a number or a tensor that broadcasts to a shape. Returns its Lua text and its function."""
    if d.chance(0.3):
        n = d.int(0, 1)
        return str(n), lambda x: n
    own = [1 if d.chance(0.15) else n for n in shape][d.int(0, len(shape)) if d.chance(0.3) else 0:]
    inputs.append(d.input(own, dtype, grad))
    at = len(inputs)
    return "x[%d]" % at, lambda x: x[at - 1]


def assign(d):
    shape, text, key, inputs, part, dtype = fitting(d, True, True, ALL)
    inputs[0] = d.input(shape, dtype, expand=False)
    value_text, value = value_for(d, part, d.choice(dtype, "fp32") if dtype != "bool" else dtype, inputs, False)

    def run(x, m):
        y = x[0].clone()
        v = value(x)
        to_whole = torch.is_tensor(v) and not y.dtype.is_floating_point
        y[key(x)] = differences.cast(v, y.dtype) if to_whole else v
        return y
    return Case("local t = x[1]%s t[%s] = %s return t" % (d.choice("", ":clone()"), text, value_text), run, inputs,
                exact=True)


def index_put(d):
    accumulate = d.chance(0.4)
    shape, text, key, inputs, part, dtype = fitting(d, not accumulate, True, FLOATS if accumulate else ALL)
    inputs[0] = d.input(shape, dtype, True)
    value_text, value = value_for(d, part, dtype, inputs, True)

    def run(x, m):
        y = x[0].clone()
        v = value(x)
        v = v if torch.is_tensor(v) else torch.tensor(v, dtype=y.dtype)
        if not accumulate:
            y[key(x)] = v
            return y
        numbers = torch.arange(y.numel()).reshape(y.shape)[key(x)]
        return y.reshape(-1).index_add(0, numbers.reshape(-1), v.expand(numbers.shape).reshape(-1)).reshape(y.shape)
    text = "x[1]:index_put(%s, %s%s)" % (text, value_text, ", true" if accumulate else "")
    return Case(text, run, inputs, exact=False if accumulate else {"out0"})


def flat_index(d):
    shape = [d.int(1, 9) for _ in range(d.int(1, 4))]
    sizes = d.shape(0, 3, 500)
    inputs = [indices(d, [1 if d.chance(0.2) else s for s in sizes][d.int(0, len(sizes)):], n) for n in shape]

    def run(x, m):
        at = torch.broadcast_tensors(*[i.long() for i in x])
        y = torch.zeros_like(at[0])
        for i, n in zip(at, shape):
            y = y * n + torch.where(i < 0, i + n, i)
        return y
    return Case("ps.ops.flat_index(x, %s, %s)" % (lua(shape), lua(list(range(len(shape))))), run, inputs, exact=True)


def along(d, unique):
    """Draws a tensor's shape, a dimension, and an index with as many dimensions. unique: no element occurs twice."""
    shape = [n or 2 for n in d.shape(1, 3)]
    dim = any_dim(d, shape)
    at = [d.int(0, n) for n in shape]
    if not unique:
        at[dim] = d.int(0, 9)
        return shape, dim, indices(d, at, shape[dim])
    at[dim] = d.int(0, shape[dim])
    order = torch.argsort(torch.rand(at[:dim % len(at)] + [shape[dim]] + at[dim % len(at) + 1:], generator=d.gen), dim)
    return shape, dim, d.laid_out(order.narrow(dim, 0, at[dim]).contiguous(), False, 0.6, False)


def source(d, index, dtype, inputs):
    own = list((index.view(index.base) if index.view else index.base).shape)
    inputs.append(d.input([n + (d.int(0, 2) if d.chance(0.2) else 0) for n in own], dtype, True))
    return own


def scatter(d):
    shape, dim, index = along(d, True)
    dtype = d.choice(*ALL)
    inputs = [d.input(shape, dtype, True), index]
    if d.chance(0.3):
        value = d.int(0, 1)
        return Case("x[1]:scatter(%d, x[2], %d)" % (dim, value), lambda x, m: x[0].scatter(dim, x[1].long(), value),
                    inputs,
                    exact={"out0"})
    own = source(d, index, dtype, inputs)
    if own != list(inputs[2].base.shape) and inputs[2].grad:
        inputs[2].grad = False                               # PyTorch has no gradient for a larger source
    in_place = d.chance(0.3)
    if in_place:
        for i in (0, 2):
            inputs[i].grad = False
        if inputs[0].view:
            inputs[0] = d.input(shape, dtype, plain=1)
    text = "x[1]:%s(%d, x[2], x[3])" % ("scatter_" if in_place else "scatter", dim)
    return Case(text, lambda x, m: x[0].scatter(dim, x[1].long(), x[2]), inputs, exact={"out0"})


def scatter_backward(d):
    shape, dim, index = along(d, True)
    return Case("ps.ops.scatter_backward(x[1], x[2], %d)" % dim,
                lambda x, m: [x[0].scatter(dim, x[1].long(), 0), x[0].gather(dim, x[1].long())],
                [d.input(shape, d.dtype()), index if list(index.base.shape) else index], exact=True)


def scatter_reduce(d):
    shape, dim, index = along(d, False)
    reduce, own = d.choice("sum", "mean", "amax", "amin", "prod"), d.chance(0.6)
    dtype = d.dtype() if reduce in ("mean", "prod") or not own else d.choice("fp32", "fp64", "bf16", "int32", "int64")
    inputs = [d.input(shape, dtype, reduce != "prod"), index]
    source(d, index, dtype, inputs)
    inputs[2].grad = inputs[0].grad
    text = "x[1]:scatter_reduce(%d, x[2], x[3], %s%s)" % (dim, lua(reduce), "" if own else ", false")

    def run(x, m):
        at, src = x[1].long(), x[2][tuple(slice(0, n) for n in x[1].shape)]
        if not own and reduce in ("amax", "amin"):
            # PyTorch gives an element of x that does not count a share of the gradient if it equals the result, and
            # then drops this share. With infinity in its place, there is no such tie.
            first = -math.inf if reduce == "amax" else math.inf
            return x[0].scatter(dim, at, first).scatter_reduce(dim, at, src, reduce)
        return x[0].scatter_reduce(dim, at, src, reduce, include_self=own)
    return Case(text, run, inputs, exact={"out0"} if reduce in ("amax", "amin") else False)


def index_add(d):
    shape = [n or 2 for n in d.shape(1, 4)]
    dim, n, dtype = any_dim(d, shape), d.int(0, 9), d.choice("fp32", "fp32", "fp64", "int64", "int32")
    alpha = d.choice(1, 1, 2, -1)
    src = list(shape)
    src[dim] = n
    return Case("x[1]:index_add(%d, x[2], x[3]%s)" % (dim, "" if alpha == 1 else ", %d" % alpha),
                lambda x, m: x[0].index_add(dim, x[1].long(), x[2], alpha=alpha),
                [d.input(shape, dtype, True), indices(d, [n], shape[dim]), d.input(src, dtype, True)])


def index_copy(d):
    shape = [n or 2 for n in d.shape(1, 4)]
    dim, dtype = any_dim(d, shape), d.choice(*ALL)
    at = torch.randperm(shape[dim], generator=d.gen)[:d.int(0, shape[dim])]
    at = d.laid_out(at.to(d.choice(torch.int32, torch.int64)), False, 0.6, False)
    inputs = [d.input(shape, dtype, True), at]
    if d.chance(0.3):
        value = d.int(0, 1)
        return Case("x[1]:index_fill(%d, x[2], %d)" % (dim, value), lambda x,
                    m: x[0].index_fill(dim, x[1].long(), value), inputs,
                    exact={"out0"})
    src = list(shape)
    src[dim] = len(at.view(at.base) if at.view else at.base)
    inputs.append(d.input(src, dtype, True))
    return Case("x[1]:index_copy(%d, x[2], x[3])" % dim, lambda x, m: x[0].index_copy(dim, x[1].long(), x[2]), inputs,
                exact={"out0"})


def masked_scatter(d):
    shape, dtype = [n or 1 for n in d.shape(1, 3)], d.choice(*ALL)
    mask = [1 if d.chance(0.2) else n for n in shape]
    size = [torch.Size(shape).numel() + d.int(0, 3)]
    return Case("x[1]:masked_scatter(x[2], x[3])", lambda x, m: x[0].masked_scatter(x[1], x[2]),
                [d.input(shape, dtype, True), d.input(mask, "bool"), d.input(size, dtype, True, expand=False)],
                exact={"out0"})


def masked_fill(d):
    shape, dtype = d.shape(), d.dtype()
    return Case("x[1]:masked_fill(x[2], x[3])", lambda x, m: x[0].masked_fill(x[1], x[2]),
                [d.input(shape, dtype, True), d.input(shape, "bool"), d.input([], dtype, True)], exact={"out0"})


ROWS = [
    Row("index by a key", read, "", 4), Row("assign by a key", assign, "", 4), Row("index_put", index_put, "", 4),
    Row("flat_index", flat_index, "flat_index"), Row("scatter", scatter, "scatter scatter_", 2),
    Row("scatter_backward", scatter_backward, "scatter_backward"),
    Row("scatter_reduce", scatter_reduce, "scatter_reduce", 2), Row("index_add", index_add),
    Row("index_copy", index_copy),
    Row("masked_scatter", masked_scatter, "masked_scatter"), Row("masked_fill by a tensor", masked_fill),
]
