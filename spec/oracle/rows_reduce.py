# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: reductions, running sums, largest values, norms."""
import math

import torch

from oracle import FLOATS, INTS, TYPES, Case, Row, lua

SPECIAL = 0.1


def some_dims(d, n):
    """Draws nil, a number or a list."""
    if n == 0 or d.chance(0.25):
        return None
    if d.chance(0.5):
        return d.int(-n, n - 1)
    dims = d.rng.sample(range(n), d.int(1, n))
    return [i - n if d.chance(0.3) else i for i in dims]


def reduction(name, fn, exact=False, types=FLOATS + INTS, empty=True, special=SPECIAL):
    def draw(d):
        while True:
            shape = d.shape()
            if empty or 0 not in shape:
                break
        dtype = d.dtype() if d.chance(0.7) else d.choice(*types)
        dims, keep = some_dims(d, len(shape)), d.chance(0.4)
        text = "x[1]:%s(%s%s)" % (name, lua(dims), ", true" if keep else "")
        if dims is None:
            keep = keep and len(shape) > 0
            dims = list(range(len(shape)))
        x = d.input(shape, dtype, True, special=special)
        return Case(text, lambda x, m: fn(x[0], dims, keep), [x], exact={"out0"} if exact else False,
                    device=d.choice("cpu", "cpu", "cpu", "ref"))
    return Row(name, draw, name, 3)


def torch_sum(x, dims, keep):
    return x.sum(dim=dims, keepdim=keep) if dims != [] else x.sum()


def torch_mean(x, dims, keep):
    return x.mean(dim=dims, keepdim=keep) if dims != [] else x.mean()


def torch_amax(x, dims, keep):
    return x.amax(dim=dims, keepdim=keep)


def torch_amin(x, dims, keep):
    return x.amin(dim=dims, keepdim=keep)


def spread(name, fn):
    """var and std."""
    def draw(d):
        shape = d.shape(0, 3)
        dims = some_dims(d, len(shape))
        unbiased, keep = d.choice(None, True, False), d.chance(0.4)
        text = "x[1]:%s(%s, %s, %s)" % (name, lua(dims), lua(unbiased), lua(keep))
        if dims is None:
            keep = keep and len(shape) > 0
        correction = 0 if unbiased is False else 1

        def run(x, m):
            if not m.exact:
                return fn(x[0], dim=dims, correction=correction, keepdim=keep)
            over = list(range(x[0].dim())) if dims is None else dims
            squares = (x[0] - x[0].mean(over, True)).square()            # PyTorch's running mean is off by some ulp
            total = squares.sum(over, keep)
            n = squares.numel() // max(1, total.numel()) - correction
            y = total / n if n >= 0 else total * math.nan
            return y if fn is torch.var else torch.where(y > 0, torch.where(y > 0, y, 1.0).sqrt(), y)
        return Case(text, run, [d.input(shape, d.dtype(), d.chance(0.6))])   # without a gradient, var is one op
    return Row(name, draw, "var", 2)


def chosen(d, name, fn):
    """argmax and argmin, which return the first of equal elements."""
    shape = [n or 3 for n in d.shape()]
    x = d.input(shape, d.dtype() if d.chance(0.6) else d.choice("int32", "int64", "uint8"), special=SPECIAL)
    if not shape or d.chance(0.3):
        return Case("x[1]:%s()" % name, lambda x, m: fn(x[0]), [x], exact=True)
    dim, keep = d.int(-len(shape), len(shape) - 1), d.chance(0.4)
    return Case("x[1]:%s(%d, %s)" % (name, dim, lua(keep)), lambda x, m: fn(x[0], dim, keep), [x], exact=True)


def both(d, name, fn):
    """max and min with a dimension: values and indices."""
    shape = [n or 3 for n in d.shape(1, 4)]
    dim, keep = d.int(-len(shape), len(shape) - 1), d.chance(0.4)
    ranks = torch.argsort(torch.rand(shape, generator=d.gen), dim)  # no ties: PyTorch's gradient goes to one index
    x = ranks.to(d.values([1], d.dtype()).dtype) - shape[dim] // 2
    return Case("x[1]:%s(%d, %s)" % (name, dim, lua(keep)), lambda x, m: list(fn(x[0], dim, keep)), [d.laid_out(
        x, True, expand=False)], exact=True)


def cumsum(d):
    shape = d.shape(1, 4)
    dim, dtype = d.int(-len(shape), len(shape) - 1), d.dtype() if d.chance(0.7) else d.choice(*INTS)
    if d.chance(0.7):
        return Case("x[1]:cumsum(%d)" % dim, lambda x, m: x[0].cumsum(dim),
                    [d.input(shape, dtype, True, special=SPECIAL)])
    if dtype in INTS:
        dtype = "fp32"
    return Case("ps.ops.cumsum(x[1], %d, 1)" % dim, lambda x, m: x[0].flip(dim).cumsum(dim).flip(dim),
                [d.input(shape, dtype, True)])


def topk(d):
    shape = [n or 3 for n in d.shape(1, 3)]
    k, dtype = d.int(1, shape[-1]), d.dtype()
    x = d.values(shape, dtype)
    ranks = torch.argsort(torch.rand(shape, generator=d.gen), -1)          # without ties, whose order is unspecified
    x = ranks.to(x.dtype) + (0 if dtype in ("bf16", "fp16") else x.sign() / 4)
    return Case("x[1]:topk(%d)" % k, lambda x, m: list(x[0].topk(k)), [d.laid_out(x, True, expand=False)], exact=True)


def norm(d):
    x = d.input(d.shape(), d.dtype(), True, *d.choice((None, None), (None, None), (-300, 300), (0, 0)))
    return Case("x[1]:norm()", lambda x, m: torch.linalg.vector_norm(x[0]), [x])


def any_all(d):
    name = d.choice("any", "all")
    return Case("x[1]:%s()" % name, lambda x, m: getattr(x[0], name)().bool(),
                [d.input(d.shape(), d.choice(*FLOATS + INTS), special=SPECIAL)], exact=True)


def sq_norms(d):
    inputs = [d.input(d.shape(0, 3), d.dtype(), special=SPECIAL) for _ in range(d.int(1, 5))]
    return Case("ps.ops.sq_norms(x)", lambda x, m: torch.stack([t.double().square().sum() for t in x]), inputs,
                slack=additions(inputs))


def global_norm(d):
    inputs = [d.input(d.shape(0, 3), d.dtype()) for _ in range(d.int(1, 5))]
    return Case('require("ps.optim").global_norm(x)',
                lambda x, m: torch.sqrt(sum(t.double().square().sum() for t in x)), inputs, slack=additions(inputs))


def additions(inputs):
    """Returns the relative distance that is allowed for sums of squares. They are summed in 16 lanes of fp64, in
    which each addition can round in the same direction."""
    return 2.0 ** -53 * sum((i.view(i.base) if i.view else i.base).numel() for i in inputs) / 16


def grad_store(d):
    a = d.dtype("fp32", "bf16", "fp16", "fp64")
    b = "fp64" if a == "fp64" else d.dtype("fp32", "bf16", "fp16")
    codes = list(TYPES)

    def run(x, m):
        y = x[0].to(TYPES[b])
        square = y.double().square().sum().reshape(1)
        return [y.double() if m.exact else y, square]
    inputs = [d.input(d.shape(0, 3), a, special=SPECIAL)]
    return Case("ps.ops.grad_store(x[1], %d)" % codes.index(b), run, inputs, exact={"out0"}, slack=additions(inputs))


class FromRow(torch.autograd.Function):
    """softmax or log_softmax, whose gradient is computed from the rounded result. `moved` moves the result by the
    rounding."""

    @staticmethod
    def forward(ctx, x, fn, dim, moved):
        y = fn(x, dim)
        ctx.save_for_backward(moved(y))
        ctx.log, ctx.dim = fn is torch.log_softmax, dim
        # The logarithm of a sum that is a rounded number, also in PyTorch.
        return y + moved(torch.ones_like(y.narrow(dim, 0, min(1, y.shape[dim])))) - 1 if ctx.log else y

    @staticmethod
    def backward(ctx, dy):
        y, = ctx.saved_tensors
        if ctx.log:
            return dy - y.exp() * dy.sum(ctx.dim, True), None, None, None
        return y * (dy - (y * dy).sum(ctx.dim, True)), None, None, None


def softmax_like(name, fn):
    def draw(d):
        shape = d.shape(1, 4)
        dim = d.choice(None, d.int(-len(shape), len(shape) - 1))
        x = d.input(shape, d.dtype(), True, *d.choice((None, None), (-8, 8), (-50, 50)))
        if d.chance(0.1) and x.base.numel():
            x.base.reshape(-1)[d.int(0, x.base.numel() - 1)] = -math.inf
        text = d.choice("x[1]:%s(%s)", "ps.F.%s(x[1], %s)")
        if "F." in text and dim is None:
            text = text.replace(", %s", "%s")
        at = -1 if dim is None else dim
        return Case(text % (name, "" if dim is None else lua(dim)),
                    lambda x, m: FromRow.apply(x[0], fn, at, m.move_rounded) if m.move_rounded else fn(x[0], at), [x],
                    device=d.choice("cpu", "cpu", "ref"))
    return Row(name, draw, name, 3)


def softmax_backward(d):
    shape, dtype, log = d.shape(1, 3), d.dtype(), d.chance(0.5)
    x = d.values(shape, dtype)
    y = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)

    def run(x, m):
        if not m.exact:
            op = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
            return op(x[1], x[0], -1, x[0].dtype)
        y, dy = x[0].double(), x[1].double()
        dx = dy - y.exp() * dy.sum(-1, True) if log else y * (dy - (y * dy).sum(-1, True))
        return dx.to(x[0].dtype)
    return Case("ps.ops.%s_backward(x[1], x[2])" % ("log_softmax" if log else "softmax"), run,
                [d.laid_out(y, expand=False), d.input(shape, dtype)])


ROWS = [
    reduction("sum", torch_sum), reduction("mean", torch_mean, types=FLOATS),
    reduction("amax", torch_amax, exact=True, empty=False), reduction("amin", torch_amin, exact=True, empty=False),
    Row("argmax", lambda d: chosen(d, "argmax", torch.argmax), "argmax"),
    Row("argmin", lambda d: chosen(d, "argmin", torch.argmin), "argmin"),
    Row("max", lambda d: both(d, "max", torch.max)), Row("min", lambda d: both(d, "min", torch.min)),
    spread("var", torch.var), spread("std", torch.std), Row("norm", norm), Row("any, all", any_all),
    Row("cumsum", cumsum, "cumsum", 2), Row("topk", topk, "topk", 2),
    Row("sq_norms", sq_norms, "sq_norms"), Row("global_norm", global_norm), Row("grad_store", grad_store, "grad_store"),
    softmax_like("softmax", torch.softmax), softmax_like("log_softmax", torch.log_softmax),
    Row("softmax_backward", softmax_backward, "softmax_backward log_softmax_backward", 2),
]
for each in ROWS:
    each.mixes = True
