# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: small functions that are composed of others (lua/ps/tensor/small.lua, like.lua,
activations.lua)."""
import math

import torch
import torch.nn.functional as F

from oracle import FLOATS, INTS, TYPES, Case, Row, lua
from rows_losses import REDUCTIONS, tolerance
from rows_reduce import some_dims
from rows_views import any_dim

ALL = FLOATS + INTS


def wide(x):
    """Converts as psluajit does: half types are computed in fp32, and integers in int64."""
    if not x.dtype.is_floating_point:
        return x.long()
    return x if x.dtype == torch.float64 else x.float()


def prod(d):
    shape = [n if n < 12 else 5 for n in d.shape(0, 3)]
    dtype = d.choice("fp32", "fp64", "bf16", "fp16", "int64", "int32", "bool")
    if dtype in INTS:
        shape = [min(n, 4) for n in shape]
    dims, keep = some_dims(d, len(shape)), d.chance(0.4)

    def run(x, m):
        y = wide(x[0])
        if dims is None:
            y = y.prod().reshape([1] * len(shape)) if keep else y.prod()
        else:
            for i in sorted([i % len(shape) for i in (dims if isinstance(dims, list) else [dims])], reverse=True):
                y = y.prod(i, keepdim=keep)
        return y.to(x[0].dtype) if x[0].dtype.is_floating_point else y
    x = d.input(shape, dtype, True, *((0.5, 1.5) if d.chance(0.7) and dtype in FLOATS else (0, 3)))
    return Case("x[1]:prod(%s, %s)" % (lua(dims), lua(keep)), run, [x], slack=1e-5 if dtype == "fp32" else 1e-13)


def cumprod(d):
    shape = [n or 1 for n in d.shape(1, 3)]
    dim, dtype = any_dim(d, shape), d.choice("fp32", "fp64", "bf16", "int64", "int32")

    def run(x, m):
        y = wide(x[0]).cumprod(dim)
        return y.to(x[0].dtype) if x[0].dtype.is_floating_point else y
    x = d.input(shape, dtype, True, *((0.9, 1.1) if dtype in FLOATS else (0, 2)))
    return Case("x[1]:cumprod(%d)" % dim, run, [x], slack=2e-5 if dtype == "fp32" else 1e-12)


def lerp(d):
    shape, dtype = d.shape(0, 3), d.dtype("fp32", "fp64")
    inputs = [d.input(shape, dtype, True), d.input(shape[d.int(0, len(shape)):], dtype, True)]
    if d.chance(0.5):
        w = d.choice(0, 1, 0.25, 0.5, -0.5, 0.75, 2)
        return Case("x[1]:lerp(x[2], %s)" % lua(w), lambda x, m: torch.lerp(x[0], x[1].expand(x[0].shape), w), inputs)
    inputs.append(d.input(shape, dtype, True, 0, 1))
    return Case("x[1]:lerp(x[2], x[3])", lambda x, m: torch.lerp(x[0], x[1].expand(x[0].shape), x[2]), inputs)


def argsort(d):
    shape = [n or 2 for n in d.shape(1, 3, 3000)]
    dim, down = any_dim(d, shape), d.chance(0.5)
    x = torch.randperm(math.prod(shape), generator=d.gen).reshape(shape).to(TYPES[d.choice("fp32", "fp64", "int64")])
    return Case("x[1]:argsort(%d, %s)" % (dim, lua(down)), lambda x, m: torch.argsort(x[0], dim, down), [d.laid_out(x,
                                                                                                    False, 0.6, False)],
                exact=True)


def close(d):
    """Returns the result as 0 and 1, since a boolean is not a tensor."""
    shape, dtype = d.shape(0, 3, 200), d.choice("fp32", "fp64", "int64")
    x = d.input(shape, dtype, special=0.4)
    near = d.laid_out((x.view(x.base)
                       if x.view else x.base).clone() * (1 if d.chance(0.5) or dtype == "int64" else 1 + 1e-5))
    rtol, atol, nan = d.choice(1e-5, 1e-4, 0.0), d.choice(1e-8, 0.0, 1.0), d.chance(0.5)
    args = "%s, %s, %s" % (lua(rtol), lua(atol), lua(nan))
    text = "local y = x[1]:isclose(x[2], %s) assert(x[1]:allclose(x[2], %s) == y:all():item()) return y" % (args, args)
    return Case(text, lambda x, m: torch.isclose(x[0].double(), x[1].double(), rtol, atol, nan), [x, near], exact=True)


def predicate(name):
    def draw(d):
        return Case("x[1]:%s()" % name, lambda x, m: getattr(torch, name)(x[0]), [d.input(d.shape(), d.choice(*ALL),
                                                                                          special=0.5)],
                    exact=True)
    return draw


def equal(d):
    shape, dtype = d.shape(0, 3, 300), d.choice(*ALL)
    a = d.input(shape, dtype, special=0.3)
    same = (a.view(a.base) if a.view else a.base).clone()
    if d.chance(0.5) and same.numel():
        same.reshape(-1)[d.int(0, same.numel() - 1)] += 1
    return Case("ps.tensor(x[1]:equal(x[2]))", lambda x, m: torch.tensor(torch.equal(x[0], x[1])), [a,
        d.laid_out(same)], exact=True)


def unbind(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dim = any_dim(d, shape)
    if shape[dim] > 8:
        shape[dim] = 8
    x = d.input(shape, d.choice(*ALL), True)
    return Case("x[1]:unbind(%d)" % dim, lambda x, m: list(torch.unbind(x[0], dim)), [x],
                exact={"out%d" % i for i in range(8)})


def diag(d):
    shape, k = d.choice([d.int(0, 9)], [d.int(0, 9), d.int(0, 9)]), d.int(-10, 10)
    if len(shape) == 2 and not -shape[0] < k < shape[1]:
        k = 0
    return Case("x[1]:diag(%d)" % k, lambda x, m: torch.diag(x[0], k), [d.input(shape, d.choice(*ALL), True)],
                exact={"out0"})


def outer(d):
    dtype = d.dtype("fp32", "fp64")
    return Case("x[1]:outer(x[2])", lambda x, m: torch.outer(x[0], x[1]), [d.input([d.int(0, 40)], dtype, True),
                                                                           d.input([d.int(0, 40)], dtype, True)])


def like(d):
    shape, dtype, value = d.shape(), d.choice(*TYPES), d.int(0, 1)
    name = d.choice("zeros", "ones", "full")
    text = "ps.full_like(x[1], %d)" % value if name == "full" else "ps.%s_like(x[1])" % name
    return Case(text, lambda x, m: torch.full_like(x[0], {"zeros": 0, "ones": 1, "full": value}[name]), [d.input(shape,
                                                                                                    dtype)], exact=True)


# -- activations and losses ------------------------------------------------------------------------------------------
def activation(text, fn, slack=None, low=-6, high=6):
    """slack: the function is a chain of roundings to its type, where PyTorch has one kernel."""
    def draw(d):
        dtype = d.dtype("fp32", "fp32", "fp64", "bf16") if slack is None else d.dtype("fp32", "fp64")
        given = dict(tolerance(dtype)) if slack else {}
        return Case("ps.F.%s" % text, lambda x, m: fn(x[0]), [d.input(d.shape(), dtype, True, low, high)], **given)
    return draw


def near_zero(name, low):
    def draw(d):
        bounds = d.choice((low, 9), (-1e-4, 1e-4))
        x = d.input(d.shape(), d.dtype(), True, *bounds)
        return Case("x[1]:%s()" % name, lambda x, m: getattr(torch, name)(x[0]), [x])
    return draw


def softplus(d):
    beta, threshold = d.choice(1, 0.5, 2), d.choice(20, 1, 5)
    return Case("ps.F.softplus(x[1], %s, %s)" % (lua(beta), lua(threshold)), lambda x, m: F.softplus(x[0], beta,
                                                                                                    threshold),
                [d.input(d.shape(), d.dtype("fp32", "fp64", "bf16"), True, -30, 30)], slack=1e-6)


def normalize(d):
    shape, dtype, p = [n or 1 for n in d.shape(2, 3, 2000)], d.dtype("fp32", "fp64"), d.choice(2, 1, 3)
    dim = any_dim(d, shape)
    # The gradient is a difference of terms of the size of 1 / norm, and the least norm is 0.1.
    given = tolerance(dtype)
    given["absolute"] *= 10
    return Case("ps.F.normalize(x[1], %d, %d)" % (p, dim), lambda x, m: F.normalize(x[0], p, dim),
                [d.input(shape, dtype, True, 0.1, 2)], **given)


def cosine(d):
    shape, dtype = [n or 1 for n in d.shape(2, 3, 2000)], d.dtype("fp32", "fp64")
    dim, other = any_dim(d, shape), [1 if d.chance(0.1) else n for n in shape]
    return Case("ps.F.cosine_similarity(x[1], x[2], %d)" % dim, lambda x, m: F.cosine_similarity(x[0], x[1], dim),
                [d.input(shape, dtype, True, 0.1, 2), d.input(other, dtype, True, 0.1, 2)], **tolerance(dtype))


def rounded_loss(name, option, fn):
    def draw(d):
        dtype, reduction, size = d.dtype("fp32", "fp64"), d.choice(*REDUCTIONS), d.choice(1.0, 0.5, 2.0)
        shape = [n or 1 for n in d.shape(1, 3, 400)]
        return Case("ps.F.%s(x[1], x[2], { reduction = %s, %s = %s })" % (name, lua(reduction), option, lua(size)),
                    lambda x, m: fn(x[0], x[1], reduction=reduction, **{option: size}),
                    [d.input(shape, dtype, True), d.input(shape, dtype, d.chance(0.5))], **tolerance(dtype))
    return draw


def glu(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dim, dtype = any_dim(d, shape), d.dtype("fp32", "fp64")
    shape[dim] += shape[dim] % 2
    return Case("ps.F.glu(x[1], %d)" % dim, lambda x, m: F.glu(x[0], dim), [d.input(shape, dtype, True, -5, 5)],
                **tolerance(dtype))


def rest(name):
    """Float dividends are never multiples of the divisor, for which a rounding would determine the quotient."""
    def draw(d):
        shape, dtype = d.shape(0, 3, 300), d.choice("fp32", "fp64", "int64", "int32")
        number = d.chance(0.4)
        if dtype in INTS:
            a = torch.randint(-1000, 1000, shape, generator=d.gen).to(TYPES[dtype])
            b = torch.randint(1, 30, shape, generator=d.gen).to(TYPES[dtype]) * d.choice(1, -1)
            n = d.choice(7, -3)
        else:
            a = ((torch.randint(-500, 500, shape, generator=d.gen) + 0.5) / 8).to(TYPES[dtype])
            b = ((torch.randint(1, 30, shape, generator=d.gen)) / 8 * d.choice(1, -1)).to(TYPES[dtype])
            n = d.choice(0.75, -2.5)
        fn = getattr(torch, name)
        if number:
            return Case("x[1]:%s(%s)" % (name, lua(n)), lambda x, m: fn(x[0], n), [d.laid_out(a, dtype not in INTS)],
                        slack=1e-6)
        return Case("x[1]:%s(x[2])" % name, lambda x, m: fn(x[0], x[1]), [d.laid_out(a, dtype not in INTS),
                                                                          d.laid_out(b)], slack=1e-6)
    return draw


def trunc(d):
    return Case("x[1]:trunc()", lambda x, m: torch.trunc(x[0]), [d.input(d.shape(), d.choice("fp32", "fp64", "bf16",
        "int64"), False, -50, 50)], exact=True)


def unflatten(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dim, k = any_dim(d, shape), d.choice(1, 2, 3)
    shape[dim] = shape[dim] % 7 * k + k
    sizes = d.choice([k, -1], [-1, k], [k, shape[dim] // k], [1, k, -1])
    return Case("x[1]:unflatten(%d, %s)" % (dim, lua(sizes)), lambda x, m: x[0].unflatten(dim, sizes), [d.input(shape,
        d.choice(*ALL), True)], exact={"out0"})


def repeat_interleave(d):
    shape = [min(n or 1, 9) for n in d.shape(1, 3)]
    dim, dtype = d.choice(None, any_dim(d, shape)), d.dtype("fp32", "fp64")
    x = d.input(shape, dtype, True)
    if d.chance(0.5):
        n = d.int(0, 4)
        return Case("x[1]:repeat_interleave(%d, %s)" % (n, lua(dim)), lambda x, m: torch.repeat_interleave(x[0], n,
            dim), [x], slack=1e-6)
    counts = torch.randint(0, 4, (shape[dim] if dim is not None else math.prod(shape),), generator=d.gen)
    return Case("x[1]:repeat_interleave(x[2], %s)" % lua(dim), lambda x, m: torch.repeat_interleave(x[0], x[1], dim),
                [x, d.laid_out(counts, expand=False)], slack=1e-6)


def cdist(d):
    n, m, k, dtype, p = d.int(1, 9), d.int(1, 9), d.int(1, 12), d.dtype("fp32", "fp64"), d.choice(1, 2, 2, 3)
    lead = d.choice([], [2])
    return Case("ps.cdist(x[1], x[2], %d)" % p, lambda x, _: torch.cdist(x[0], x[1], p, "donot_use_mm_for_euclid_dist"),
                [d.input(lead + [n, k], dtype, True), d.input(lead + [m, k], dtype, True)], **tolerance(dtype))


ROWS = [
    Row("remainder", rest("remainder"), "remainder"), Row("fmod", rest("fmod"), "fmod"), Row("trunc", trunc, "trunc"),
    Row("unflatten", unflatten),
    Row("repeat_interleave", repeat_interleave), Row("cdist", cdist, "cdist cdist_backward", mixes=True),
    Row("prod", prod, "prod", 2, mixes=True), Row("cumprod", cumprod, "cumprod cumprod_backward", 2, mixes=True),
    Row("lerp", lerp, "lerp"),
    Row("argsort", argsort),
    Row("isclose", close), Row("isnan", predicate("isnan")), Row("isinf", predicate("isinf")), Row("equal", equal),
    Row("unbind", unbind), Row("diag", diag), Row("outer", outer, mixes=True), Row("full_like", like),
    Row("log1p", near_zero("log1p", -0.99), "log1p"), Row("expm1", near_zero("expm1", -20), "expm1"),
    Row("softplus", softplus, "softplus"), Row("leaky_relu", activation("leaky_relu(x[1], 0.2)",
                                                                        lambda x: F.leaky_relu(x, 0.2)), "leaky_relu"),
    Row("elu", activation("elu(x[1], 0.7)", lambda x: F.elu(x, 0.7)), "elu"),
    Row("selu", activation("selu(x[1])", F.selu, True)), Row("hardtanh", activation("hardtanh(x[1], -2, 3)",
                                                                                    lambda x: F.hardtanh(x, -2, 3))),
    Row("relu6", activation("relu6(x[1])", F.relu6)), Row("mish", activation("mish(x[1])", F.mish, True), "mish slope"),
    Row("logsigmoid", activation("logsigmoid(x[1])", F.logsigmoid, True), "logsigmoid slope"),
    Row("hardsigmoid", activation("hardsigmoid(x[1])", lambda x: (F.hardtanh(x, -3, 3) + 3) / 6, True),
                               "hardsigmoid slope"),
        Row("hardswish", activation("hardswish(x[1])", F.hardswish, True), "hardswish slope"),
    Row("softsign", activation("softsign(x[1])", F.softsign, True)), Row("glu", glu), Row("normalize", normalize,
                                                                                          mixes=True),
    Row("cosine_similarity", cosine, mixes=True), Row("smooth_l1_loss", rounded_loss("smooth_l1_loss", "beta",
                                                                                     F.smooth_l1_loss), "huber slope"),
    Row("huber_loss", rounded_loss("huber_loss", "delta", F.huber_loss), "huber slope"),
]
