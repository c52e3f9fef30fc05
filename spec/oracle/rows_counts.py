# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the parts `ops` and `modules`: counts, order statistics and search (lua/ps/tensor/counts.lua), shapes and
methods in place (lua/ps/tensor/shapes.lua), and small layers that consist of other ops."""
import math

import torch
import torch.nn.functional as F

from oracle import FLOATS, INTS, Case, Row, lua
from rows_losses import tolerance
from rows_views import any_dim

ALL = FLOATS + INTS


# -- counts ----------------------------------------------------------------------------------------------------------
def bincount(d):
    n, least = d.int(1, 40), d.choice(0, 3, 30)
    x = torch.randint(0, 20, (n,), generator=d.gen)
    if d.chance(0.5):
        w = d.input([n], d.choice("fp32", "fp64"))
        return Case("x[1]:bincount { minlength = %d, weights = x[2] }" % least,
                    lambda x, m: torch.bincount(x[0], x[1], least), [d.laid_out(x, expand=False), w], slack=1e-6)
    return Case("x[1]:bincount { minlength = %d }" % least, lambda x, m: torch.bincount(x[0], minlength=least),
                [d.laid_out(x)], exact=True)


def count_nonzero(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dim = any_dim(d, shape)
    return Case("x[1]:count_nonzero(%d)" % dim, lambda x, m: torch.count_nonzero(x[0], dim),
                [d.input(shape, d.choice(*ALL))], exact=True)


def any_of(d):
    shape, name, keep = [n or 2 for n in d.shape(1, 3)], d.choice("any", "all"), d.chance(0.5)
    dim = any_dim(d, shape)
    return Case("x[1]:%s(%d, %s)" % (name, dim, lua(keep)), lambda x, m: getattr(x[0], name)(dim, keep).bool(),
                [d.input(shape, d.choice(*ALL), special=0.3)], exact=True)


def unique(d):
    x = d.input(d.shape(1, 3), d.choice("fp32", "fp64", "int64", "int32"))
    return Case("x[1]:unique { return_inverse = true, return_counts = true }",
                lambda x, m: list(torch.unique(x[0], return_inverse=True, return_counts=True)), [x], exact=True)


def distinct(d, shape, dtype):
    """Numbers that all differ, so that medians have one index."""
    return d.laid_out((torch.randperm(math.prod(shape), generator=d.gen).reshape(shape) - 3).to(dtype), True, 0.6,
                      False)


def median(d):
    shape, dtype = [n or 2 for n in d.shape(1, 3, 3000)], d.choice(torch.float32, torch.float64)
    if d.chance(0.3):
        return Case("x[1]:median()", lambda x, m: x[0].median(), [d.input(shape, d.dtype("fp32", "fp64"), True)],
                    slack=1e-6)
    dim, keep = any_dim(d, shape), d.chance(0.5)
    return Case("x[1]:median(%d, %s)" % (dim, lua(keep)), lambda x, m: list(x[0].median(dim, keep)),
                [distinct(d, shape, dtype)], exact=True)


def quantile(d):
    shape, dtype = [n or 2 for n in d.shape(1, 3, 2000)], d.dtype("fp32", "fp64")
    how = d.choice("linear", "linear", "lower", "higher", "nearest", "midpoint")
    q = d.choice(0.25, 0.5, [0.0, 0.125, 1.0], [0.75])
    dim, keep = d.choice(None, any_dim(d, shape)), d.chance(0.5)

    def run(x, m):
        return torch.quantile(x[0], torch.tensor(q, dtype=x[0].dtype), dim, keep, interpolation=how)
    return Case("x[1]:quantile(%s, { dim = %s, keepdim = %s, interpolation = %s })" % (lua(q), lua(dim), lua(keep),
                                                                                      lua(how)),
                run, [distinct(d, shape, torch.float32 if dtype == "fp32" else torch.float64)], slack=2e-5)


def search(d):
    dtype, right, rows = d.choice("fp32", "fp64", "int64", "int32"), d.chance(0.5), d.choice([], [], [3])
    dtype = d.choice(dtype, "bf16", "uint8") if d.chance(0.2) else dtype
    seq, shape = d.values(rows + [d.int(0, 40)], dtype, special=0.3), rows + [d.int(1, 30)] if rows else d.shape(0, 2)
    values = d.values(shape, dtype, special=0.3)
    if dtype == "int64" and d.chance(0.5):                  # numbers that fp64 cannot tell apart, up to the largest
        base = d.choice(2 ** 62 + 5, 2 ** 63 - 41, -2 ** 63 + 20, 2 ** 53)
        seq, values = seq + base, values + base
    seq, values = seq.sort(-1).values, d.laid_out(values)
    if rows or d.chance(0.5):
        return Case("x[1]:searchsorted(x[2], { right = %s })" % lua(right),
                    lambda x, m: torch.searchsorted(x[0].contiguous(), x[1].contiguous(), right=right),
                    [d.laid_out(seq, plain=1), values], exact=True)
    return Case("x[2]:bucketize(x[1], { right = %s })" % lua(right),
                lambda x, m: torch.bucketize(x[1].contiguous(), x[0].contiguous(), right=right),
                [d.laid_out(seq, plain=1), values], exact=True)


def nan_to_num(d):
    args = d.choice((), (1.5,), (0.0, 3.0, -4.0))
    return Case("x[1]:nan_to_num(%s)" % ", ".join(map(lua, args)), lambda x, m: torch.nan_to_num(x[0], *args),
                [d.input(d.shape(), d.choice(*ALL), special=0.8) if d.chance(0.7)
                 else d.input(d.shape(), d.dtype("fp32", "fp64"), True)], exact={"out0"})


# -- shapes ----------------------------------------------------------------------------------------------------------
def unfold(d):
    shape = [n or 3 for n in d.shape(1, 3, 500)]
    dim = any_dim(d, shape)
    size, step = d.int(1, shape[dim]), d.int(1, 4)
    return Case("x[1]:unfold(%d, %d, %d)" % (dim, size, step), lambda x, m: x[0].unfold(dim, size, step),
                [d.input(shape, d.choice(*FLOATS), True)], exact={"out0"})


def movedim(d):
    shape = [n or 2 for n in d.shape(2, 4)]
    a, b = any_dim(d, shape), any_dim(d, shape)
    if d.chance(0.5) and len(shape) > 2:
        text, fn = "x[1]:movedim({ 0, -1 }, { 1, 0 })", lambda t: t.movedim((0, -1), (1, 0))
    else:
        text, fn = "x[1]:movedim(%d, %d)" % (a, b), lambda t: t.movedim(a, b)
    return Case(text, lambda x, m: fn(x[0]), [d.input(shape, d.choice(*ALL), True)], exact={"out0"})


def diagonal(d):
    shape, k = [n or 2 for n in d.shape(2, 4, 3000)], d.int(-4, 4)
    a = d.int(0, len(shape) - 1)
    b = d.choice(*[i - len(shape) for i in range(len(shape)) if i != a])
    return Case("x[1]:diagonal(%d, %d, %d)" % (k, a, b), lambda x, m: torch.diagonal(x[0], k, a, b),
                [d.input(shape, d.choice(*FLOATS), True)], exact={"out0"})


def triangle(d):
    name, rows, columns, k = d.choice("tril_indices", "triu_indices"), d.int(0, 7), d.int(0, 7), d.int(-4, 4)
    return Case("ps.%s(%d, %d, %d)" % (name, rows, columns, k), lambda x, m: getattr(torch, name)(rows, columns, k),
                exact=True)


def meshgrid(d):
    how, sizes = d.choice("ij", "xy"), [d.int(1, 5) for _ in range(d.int(1, 3))]
    dtype = d.choice(*ALL)
    return Case("ps.meshgrid(x, { indexing = %s })" % lua(how), lambda x, m: list(torch.meshgrid(*x, indexing=how)),
                [d.input([n], dtype, True) for n in sizes], exact={"out0", "out1", "out2"})


# -- arithmetic ------------------------------------------------------------------------------------------------------
def fused(d):
    shape, dtype, value = d.shape(0, 3), d.dtype("fp32", "fp64"), d.choice(1, 0.5, -2)
    name = d.choice("addcmul", "addcdiv")
    return Case("x[1]:%s(x[2], x[3], { value = %s })" % (name, lua(value)),
                lambda x, m: getattr(torch, name)(x[0], x[1], x[2], value=value),
                [d.input(shape, dtype, True), d.input(shape, dtype, True), d.input(shape, dtype, True, 0.5, 2)],
                slack=1e-6)


def product(d):
    n, k, o, dtype = d.int(1, 9), d.int(1, 9), d.int(1, 9), d.dtype("fp32", "fp64")
    name = d.choice("addmm", "baddbmm", "mv", "dot")
    shapes = {"addmm": ([o], [n, k], [k, o]), "baddbmm": ([2, n, o], [2, n, k], [2, k, o]), "mv": ([n, k], [k]),
              "dot": ([k], [k])}[name]
    inputs = [d.input(s, dtype, True) for s in shapes]
    if len(shapes) == 2:
        return Case("x[1]:%s(x[2])" % name, lambda x, m: getattr(torch, name)(*x), inputs)
    alpha, beta = d.choice(1, 0.5), d.choice(1, 2)
    return Case("x[1]:%s(x[2], x[3], { alpha = %s, beta = %s })" % (name, lua(alpha), lua(beta)),
                lambda x, m: getattr(torch, name)(*x, alpha=alpha, beta=beta), inputs, slack=1e-6)


def diff(d):
    shape = [n or 3 for n in d.shape(1, 3)]
    dim, n = any_dim(d, shape), d.int(0, 3)
    return Case("x[1]:diff(%d, %d)" % (n, dim), lambda x, m: torch.diff(x[0], n, dim),
                [d.input(shape, d.dtype("fp32", "fp64"), True)], slack=1e-6)


def floor_divide(d):
    shape, dtype = d.shape(0, 3), d.choice("fp32", "int64", "int32")
    low, high = d.choice((1, 9), (-9, -1))
    return Case("x[1]:floor_divide(x[2])", lambda x, m: torch.floor_divide(x[0], x[1]),
                [d.input(shape, dtype, low=-50, high=50), d.input(shape, dtype, low=low, high=high)], exact=True)


def logarithm(d):
    name, dtype = d.choice("log2", "log10"), d.dtype("fp32", "fp64")
    return Case("x[1]:%s()" % name, lambda x, m: getattr(torch, name)(x[0]), [d.input(d.shape(), dtype, True, 0.1, 9)],
                slack=1e-6 if dtype == "fp32" else 1e-14)


def two(d):
    """torch.max and torch.min of two tensors."""
    name, shape, dtype = d.choice("max", "min"), d.shape(0, 3), d.dtype("fp32", "fp64")
    return Case("ps.%s(x[1], x[2])" % name, lambda x, m: getattr(torch, name)(x[0], x[1]),
                [d.input(shape, dtype, True), d.input(shape, dtype, True)], exact={"out0"})


def in_place(d):
    shape, dtype = d.shape(1, 2), d.dtype("fp32", "fp64")
    text, fn = d.choice(("lerp_(x[2], 0.25)", lambda a, b: a.lerp_(b, 0.25)), ("clamp_(-1, 0.5)",
        lambda a, b: a.clamp_(-1, 0.5)), ("addcmul_(x[2], x[2], 0.5)", lambda a, b: a.addcmul_(b, b, value=0.5)),
        ("exp_()", lambda a, b: a.exp_()), ("neg_()", lambda a, b: a.neg_()), ("relu_()", lambda a, b: a.relu_()),
        ("pow_(2)", lambda a, b: a.pow_(2)))
    return Case("local y = x[1]:clone() local z = y:%s return y, z" % text,
                lambda x, m: [fn(x[0].clone(), x[1])] * 2, [d.input(shape, dtype), d.input(shape, dtype)], slack=1e-6)


# -- activations and layers ------------------------------------------------------------------------------------------
def one_by_one(fn, a, b):
    """Applies fn to each pair of elements. PyTorch's loop over vectors of elements returns NaN if a quotient is larger
    than the type's largest number; its code for one element is exact."""
    if a.numel() == 0:
        return fn(a, b)
    pairs = zip(a.reshape(-1).split(1), b.reshape(-1).split(1))
    return torch.cat([fn(x, y) for x, y in pairs]).reshape(a.shape)


def large_divisions(d):
    """Integers that fp64 cannot hold, and all multiples and special values of floats."""
    name, shape = d.choice("remainder", "fmod", "floor_divide"), d.shape(0, 2, 300)
    if d.chance(0.5):
        dtype = d.choice("fp32", "fp64")
        a, b = d.input(shape, dtype, special=0.5), d.input(shape, dtype, special=0.5)
        whole = [x.view(x.base) if x.view else x.base for x in (a, b)]
        inputs = [d.laid_out(torch.round(x) if d.chance(0.6) else x) for x in whole]
        return Case("x[1]:%s(x[2])" % name, lambda x, m: one_by_one(getattr(torch, name), x[0], x[1]), inputs,
                    exact=name != "floor_divide" or dtype == "fp64", slack=1e-6)
    bits = d.choice(53, 54, 60, 62)
    a = torch.randint(-2 ** bits, 2 ** bits, shape, generator=d.gen)
    if d.chance(0.3):
        number = d.choice(3, 2 ** 31, 2 ** 33, 2 ** 53 + 2, 2 ** 60) * d.choice(1, -1)
        return Case("x[1]:%s(%d)" % (name, number), lambda x, m: getattr(torch, name)(x[0], number), [d.laid_out(a)],
                    exact=True)
    b = torch.randint(1, d.choice(9, 2 ** 30, 2 ** bits), shape, generator=d.gen) * d.choice(1, -1)
    return Case("x[1]:%s(x[2])" % name, lambda x, m: getattr(torch, name)(x[0], x[1]), [d.laid_out(a), d.laid_out(b)],
                exact=True)


def prelu(d):
    shape, dtype = [n or 1 for n in d.shape(2, 4, 3000)], d.dtype("fp32", "fp64")
    w = d.input([d.choice(1, shape[1])], dtype, True, plain=1)
    return Case("ps.F.prelu(x[1], x[2])", lambda x, m: F.prelu(x[0], x[1]), [d.input(shape, dtype, True), w],
                **tolerance(dtype))


def activation(d):
    dtype, shape = d.dtype("fp32", "fp64"), [n or 2 for n in d.shape(2, 3, 2000)]
    text, fn = d.choice(("celu(x[1], 0.5)", lambda x: F.celu(x, 0.5)),
                        ("softmin(x[1], 1)", lambda x: F.softmin(x, 1)))
    return Case("ps.F." + text, lambda x, m: fn(x[0]), [d.input(shape, dtype, True, -6, 6)], **tolerance(dtype))


def pixel_shuffle(d):
    n, c, h, w, r = d.int(1, 3), d.int(1, 3), d.int(1, 4), d.int(1, 4), d.int(1, 3)
    return Case(d.choice("ps.F.pixel_shuffle(x[1], %d)", "ps.nn.PixelShuffle(%d)(x[1])") % r,
                lambda x, m: F.pixel_shuffle(x[0], r), [d.input([n, c * r * r, h, w], d.choice(*FLOATS), True)],
                exact={"out0"})                      # gradients of expanded inputs are sums


def bags_by_hand(index, w, offsets, mode, padding, factors):
    """embedding_bag as a sum of rows, whose gradient can be differentiated again, as the judge of sums does."""
    ends = None if offsets is None else list(offsets[1:]) + [len(index)]
    bags = list(zip(index, factors if factors is not None else [None] * len(index))) if offsets is None else [
        (index[i:j], None if factors is None else factors[i:j]) for i, j in zip(offsets, ends)]
    results = []
    for some, share in bags:
        kept = some if padding is None else some[some != padding]
        rows = w[kept] if share is None else w[kept] * share[:, None]
        if len(kept) == 0:
            results.append(w.sum() * 0 + torch.zeros(w.shape[1], dtype=w.dtype))
        else:
            results.append({"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](0))
    return torch.stack(results)


def embedding_bag(d):
    """PyTorch's function gives the values, and a sum of rows the gradients."""
    rows, width, n, bags, dtype = d.int(2, 20), d.int(1, 9), d.int(1, 30), d.int(1, 8), d.dtype("fp32", "fp64")
    mode, padding = d.choice("sum", "mean", "max"), d.choice(None, None, 0)
    w = d.input([rows, width], dtype, True, plain=1)
    if d.chance(0.4):
        index, offsets, extra = torch.randint(0, rows, (bags, d.int(1, 5)), generator=d.gen), None, []
    else:
        index = torch.randint(0, rows, (n,), generator=d.gen)
        starts = torch.randint(0, n + 1, (bags - 1,), generator=d.gen).sort().values
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), starts])
        extra = [d.laid_out(offsets, plain=1)]
    weighted = mode == "sum" and padding is None and d.chance(0.5)
    factors = [d.input(list(index.shape), dtype, True, plain=1)] if weighted else []
    options = {"mode": mode, "padding_idx": padding}
    text = ", ".join("%s = %s" % (k, lua(v)) for k, v in options.items() if v is not None)
    text += ", per_sample_weights = x[%d]" % (3 + len(extra)) if weighted else ""

    def run(x, m):
        share = x[-1] if weighted else None
        with torch.no_grad():
            plain = F.embedding_bag(x[0], x[1], offsets, per_sample_weights=share, **options)
        return [bags_by_hand(x[0], x[1], offsets, mode, padding, share), plain]
    return Case("local y = ps.F.embedding_bag(x[1], x[2], %s, { %s }) return y, y:detach()" % (
        "x[3]" if extra else "nil", text), run, [d.laid_out(index, plain=1), w] + extra + factors, **tolerance(dtype))


ROWS = [Row("bincount", bincount), Row("count_nonzero", count_nonzero), Row("any, all of a dimension", any_of),
        Row("unique", unique), Row("median", median, "median"), Row("quantile", quantile),
        Row("searchsorted", search, "searchsorted"),
        Row("nan_to_num", nan_to_num, "nan_to_num"), Row("unfold", unfold, "unfold unfold_backward"),
        Row("movedim", movedim), Row("diagonal", diagonal),
        Row("tril_indices", triangle), Row("meshgrid", meshgrid), Row("addcmul", fused),
        Row("addmm, mv, dot", product, mixes=True), Row("diff", diff),
        Row("floor_divide", floor_divide, "floor_divide"),
        Row("large integers", large_divisions, "remainder fmod floor_divide"),
        Row("log2, log10", logarithm), Row("max, min of two", two), Row("methods in place", in_place),
        Row("prelu", prelu, "prelu", mixes=True), Row("celu, softmin", activation, mixes=True),
        Row("pixel_shuffle", pixel_shuffle), Row("embedding_bag", embedding_bag, mixes=True)]


# -- modules ---------------------------------------------------------------------------------------------------------
COVERED = {"PReLU", "CELU", "Softmin", "PixelShuffle", "InstanceNorm1d", "InstanceNorm2d", "EmbeddingBag", "Dropout1d",
           "Dropout2d"}


def module_activation(d):
    dtype, shape = d.dtype("fp32", "fp64"), [d.int(1, 4), d.int(1, 4), d.int(1, 9)]
    text, fn = d.choice(("CELU(0.5)", torch.nn.CELU(0.5)), ("Softmin(-1)", torch.nn.Softmin(-1)),
                        ("PReLU(%d)" % shape[1], lambda x: F.prelu(x, torch.full((shape[1],), 0.25, dtype=x.dtype))))
    if text.startswith("PReLU"):
        text = "PReLU(%d, { dtype = %s })" % (shape[1], lua(dtype))
    return Case("ps.nn.%s(x[1])" % text, lambda x, m: fn(x[0]), [d.input(shape, dtype, True, -5, 5)],
                **tolerance(dtype))


def instance_norm(d):
    dtype, two_d, affine, c = d.dtype("fp32", "fp64"), d.chance(0.5), d.chance(0.5), d.int(1, 5)
    shape = [d.int(1, 3), c] + ([d.int(2, 5), d.int(2, 5)] if two_d else [d.int(2, 9)])
    inputs = [d.input(shape, dtype, True, -2, 3)]
    code = "local m = ps.nn.InstanceNorm%dd(%d, { affine = %s, dtype = %s })" % (1 + two_d, c, lua(affine), lua(dtype))
    if affine:
        inputs += [d.input([c], dtype, True, plain=1), d.input([c], dtype, True, plain=1)]
        code += ' m:param("weight", x[2]) m:param("bias", x[3])'
    return Case(code + " return m(x[1])", lambda x, m: F.instance_norm(x[0], None, None, *x[1:]), inputs)


def bag_module(d):
    dtype, rows, width = d.dtype("fp32", "fp64"), d.int(2, 9), d.int(1, 5)
    index = torch.randint(0, rows, (d.int(1, 4), d.int(1, 4)), generator=d.gen)
    code = 'local m = ps.nn.EmbeddingBag(%d, %d, { dtype = %s }) m:param("weight", x[2])' % (rows, width, lua(dtype))
    return Case(code + " return m(x[1])", lambda x, m: F.embedding_bag(x[0], x[1]), [d.laid_out(index, plain=1),
        d.input([rows, width], dtype, True, plain=1)], **tolerance(dtype))


def channel_dropout(d):
    """In evaluation the input; in training each channel is 0 or twice the input."""
    two_d, shape = d.chance(0.5), [d.int(1, 3), d.int(1, 6), d.int(1, 4)]
    shape += [d.int(1, 4)] if two_d else []
    code = "local m = ps.nn.Dropout%dd(0.5) local y = m(x[1]) local some = y:ne(0):reshape(%d, -1) " % (
        1 + two_d, shape[0] * shape[1])
    code += "local one = some:any(1):eq(some:all(1)):all() m:eval() return m(x[1]), one, "
    code += "y:eq(0):logical_or(y:eq(x[1] * 2)):all()"
    x = d.laid_out(torch.rand(shape, generator=d.gen) + 0.5, plain=1)
    return Case(code, lambda x, m: [x[0], torch.tensor(True), torch.tensor(True)], [x], exact=True)


MODULES = [Row("PReLU, CELU", module_activation, mixes=True), Row("InstanceNorm", instance_norm, mixes=True),
           Row("EmbeddingBag", bag_module), Row("Dropout1d, Dropout2d", channel_dropout)]
