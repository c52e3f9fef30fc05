# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: views, copies, types, indices. All results except sums of gradients are exact."""
import torch

import differences

from oracle import FLOATS, INTS, TYPES, Case, Row, lua

ALL = FLOATS + INTS


def numbers(x):
    return ", ".join(map(str, x))


def of_shape(call, fn, least=0, most=4, ops=(), weight=1, empty=True):
    """call(d, shape) returns (Lua text for x[1], function of a tensor), or None if the shape is not suitable."""
    def draw(d):
        while True:
            shape = d.shape(least, most)
            if not empty and 0 in shape:
                continue
            made = call(d, shape)
            if made:
                break
        text, f = made
        x = d.input(shape, d.choice(*ALL), True, special=0.2)
        return Case(text, lambda x, m: f(x[0]), [x], exact={"out0", "out1", "out2"},
                    device=d.choice("cpu", "cpu", "ref"))
    return Row(fn, draw, ops, weight)


def any_dim(d, shape, extra=0):
    n = len(shape) + extra
    return d.int(-n, n - 1)


def factors(d, numel):
    """Returns a shape with that many elements."""
    if numel == 0:
        shape = d.shape(1, 4)
        shape[d.int(0, len(shape) - 1)] = 0
        return shape
    shape = []
    while numel > 1 and len(shape) < 5:
        f = d.choice(*[i for i in range(1, numel + 1) if numel % i == 0][:12])
        shape.append(f)
        numel //= f
    shape.append(numel)
    d.rng.shuffle(shape)
    return shape


def reshape(d, shape):
    new = factors(d, torch.Size(shape).numel())
    if d.chance(0.3) and 0 not in new and new:
        new[d.int(0, len(new) - 1)] = -1
    text = d.choice("x[1]:reshape(%s)" % numbers(new), "x[1]:reshape(%s)" % lua(new)) if new else "x[1]:reshape({})"
    return text, lambda x: x.reshape(new)


def permute(d, shape):
    axes = list(range(len(shape)))
    d.rng.shuffle(axes)
    axes = [a - len(shape) if d.chance(0.3) else a for a in axes]
    return "x[1]:permute(%s)" % lua(axes), lambda x: x.permute(axes)


def transpose(d, shape):
    a, b = any_dim(d, shape), any_dim(d, shape)
    return "x[1]:transpose(%d, %d)" % (a, b), lambda x: x.transpose(a, b)


def expand(d, shape):
    base, target = [1 if d.chance(0.4) else n for n in shape], list(shape)
    more = [d.int(1, 3) for _ in range(d.int(0, 2))]
    for i, n in enumerate(base):
        if n == shape[i] and n != 1 and d.chance(0.3):
            target[i] = -1
    target = more + target
    if any(b == 1 and n == 0 for b, n in zip(base, shape)):
        return None
    ones = tuple(slice(0, 1) if b == 1 else slice(None) for b in base)
    cut = "".join(":narrow(%d, 0, 1)" % i for i, b in enumerate(base) if b == 1 and shape[i] != 1)
    return "x[1]%s:expand(%s)" % (cut, lua(target)), lambda x: x[ones].expand(target)


def slice_(d, shape):
    dim = any_dim(d, shape)
    n = shape[dim]
    start, stop, step = d.choice(None, d.int(-n - 2, n + 2)), d.choice(None, d.int(-n - 2, n + 2)), d.choice(None, 1,
                                                                                                             2, 3)
    index = [slice(None)] * len(shape)
    index[dim] = slice(start, stop, step)
    return "x[1]:slice(%s, %s, %s, %s)" % (dim, lua(start), lua(stop), lua(step)), lambda x: x[tuple(index)]


def narrow(d, shape):
    dim = any_dim(d, shape)
    start = d.int(0, shape[dim])
    length = d.int(0, shape[dim] - start)
    return "x[1]:narrow(%d, %d, %d)" % (dim, start, length), lambda x: x.narrow(dim, start, length)


def select(d, shape):
    dim = any_dim(d, shape)
    if shape[dim] == 0:
        return None
    i = d.int(-shape[dim], shape[dim] - 1)
    return "x[1]:select(%d, %d)" % (dim, i), lambda x: x.select(dim, i)


def split(d, shape):
    dim = any_dim(d, shape)
    n = shape[dim]
    if n == 0:
        return None
    if d.chance(0.5):
        size = max(1, -(-n // d.int(1, 3)))
        if -(-n // size) > 3:
            return None
        return "x[1]:split(%d, %d)" % (size, dim), lambda x: x.split(size, dim)
    cuts = sorted(d.int(0, n) for _ in range(d.int(0, 2)))
    sizes = [b - a for a, b in zip([0] + cuts, cuts + [n])]
    return "x[1]:split(%s, %d)" % (lua(sizes), dim), lambda x: x.split(sizes, dim)


def chunk(d, shape):
    dim = any_dim(d, shape)
    count = d.int(1, 3)
    if shape[dim] == 0:
        return None
    return "x[1]:chunk(%d, %d)" % (count, dim), lambda x: x.chunk(count, dim)


def flatten(d, shape):
    if not shape:
        return "x[1]:flatten()", lambda x: x.flatten()
    a, b = sorted((d.int(0, len(shape) - 1), d.int(0, len(shape) - 1)))
    return "x[1]:flatten(%d, %d)" % (a, b), lambda x: x.flatten(a, b)


def unsqueeze(d, shape):
    dim = any_dim(d, shape, 1)
    return "x[1]:unsqueeze(%d)" % dim, lambda x: x.unsqueeze(dim)


def squeeze(d, shape):
    if d.chance(0.5) or not shape:
        return "x[1]:squeeze()", lambda x: x.squeeze()
    dim = any_dim(d, shape)
    return "x[1]:squeeze(%d)" % dim, lambda x: x.squeeze(dim)


def index(d, shape):
    """t[i], t[{ i, { start, stop, step }, {} }]."""
    if not shape:
        return None
    if d.chance(0.3):
        if shape[0] == 0:
            return None
        i = d.int(-shape[0], shape[0] - 1)
        return "x[1][%d]" % i, lambda x: x[i]
    parts, keys = [], []
    for n in shape[:d.int(1, len(shape))]:
        if n > 0 and d.chance(0.4):
            i = d.int(-n, n - 1)
            parts.append(str(i))
            keys.append(i)
        elif d.chance(0.5):
            parts.append("{}")
            keys.append(slice(None))
        else:
            a, b, s = d.int(-n, n), d.int(-n, n), d.choice(1, 2)
            parts.append("{ %d, %d, %d }" % (a, b, s))
            keys.append(slice(a, b, s))
    return "x[1][{ %s }]" % ", ".join(parts), lambda x: x[tuple(keys)]


def to_device(d, shape):
    where = d.choice("ref", "sim")
    return 'x[1]:to("%s"):to("cpu")' % where, lambda x: x.clone()


def cast(d):
    a, b = d.choice(*ALL), d.choice(*ALL)
    x = d.input(d.shape(), a, True, *((-300, 300) if d.chance(0.3) and a in FLOATS else (None, None)),
                special=0 if b in INTS and b != "bool" else 0.2)
    return Case('x[1]:to("%s")' % b, lambda x, m: differences.cast(x[0], TYPES[b]) if b in INTS else m.to(x[0], b), [x],
                exact={"out0"})


def cat(d):
    count, dim, shape = d.int(1, 4), None, d.shape(1, 4)
    dim = any_dim(d, shape)
    a = d.choice(*ALL)
    inputs = []
    for _ in range(count):
        one = list(shape)
        one[dim] = d.size()
        inputs.append(d.input(one, a if d.chance(0.7) else d.choice(*ALL), True))
    return Case("ps.cat(x, %d)" % dim, lambda x, m: torch.cat(x, dim), inputs, exact={"out0"})


def stack(d):
    count, shape = d.int(1, 4), d.shape(0, 3)
    dim, a = any_dim(d, shape, 1), d.choice(*ALL)
    return Case("ps.stack(x, %d)" % dim, lambda x, m: torch.stack(x, dim),
                [d.input(shape, a, True) for _ in range(count)],
                exact={"out0"})


def indices(d, shape, rows):
    return d.input(shape, d.choice("int32", "int64"), low=0, high=rows - 1)


def index_select(d):
    shape = [n or 3 for n in d.shape(1, 4)]
    dim = any_dim(d, shape)
    at = indices(d, [d.int(0, 9)], shape[dim])
    return Case("x[1]:index_select(%d, x[2])" % dim, lambda x, m: x[0].index_select(dim, x[1]),
                [d.input(shape, d.choice(*ALL), True), at], exact={"out0"})


def index_tensor(d):
    shape = [n or 3 for n in d.shape(1, 3)]
    at = indices(d, d.shape(0, 2), shape[0])
    return Case("x[1][x[2]]", lambda x, m: x[0][x[1].long()], [d.input(shape, d.choice(*ALL), True), at],
                exact={"out0"})


def masked_select(d):
    shape = d.shape()
    return Case(d.choice("x[1]:masked_select(x[2])", "x[1][x[2]]"), lambda x, m: x[0][x[1]].reshape(-1),
                [d.input(shape, d.choice(*ALL), True), d.input(shape, "bool")], exact={"out0"})


def nonzero(d):
    return Case("x[1]:nonzero()", lambda x, m: x[0].nonzero(), [d.input(d.shape(), d.choice(*ALL), special=0.2)],
                exact=True)


def masked_fill(d):
    shape, dtype = d.shape(), d.choice(*ALL)
    value = d.int(0, 1) if dtype in INTS else d.choice(0, 1, -3, 0.5, 1e4, float("-inf"), float("nan"))
    mask = [1 if d.chance(0.2) else n for n in shape]
    return Case("x[1]:masked_fill(x[2], %s)" % lua(value), lambda x, m: x[0].masked_fill(x[1], value),
                [d.input(shape, dtype, True), d.input(mask, "bool")], exact={"out0"})


def gather(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dim = any_dim(d, shape)
    at = [d.int(0, n) for n in shape]
    at[dim] = d.int(0, 9)
    return Case("x[1]:gather(%d, x[2])" % dim, lambda x, m: x[0].gather(dim, x[1].long()),
                [d.input(shape, d.choice(*ALL), True), indices(d, at, shape[dim])], exact={"out0"})


def scatter_add(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dim, dtype = any_dim(d, shape), d.choice(*ALL)
    at = [d.int(0, n) for n in shape]
    at[dim] = d.int(0, 9)
    return Case("x[1]:scatter_add(%d, x[2], x[3])" % dim, lambda x, m: x[0].scatter_add(dim, x[1].long(), x[2]),
                [d.input(shape, dtype, True), indices(d, at, shape[dim]), d.input(at, dtype, True)])


def embedding(d):
    rows, width = d.int(1, 9), d.size()
    at = d.shape(0, 3)
    padding = d.int(0, rows - 1) if d.chance(0.3) else None
    text = d.choice("ps.F.embedding(x[2], x[1])", "ps.ops.embedding(x[1], x[2])")
    if padding is not None:
        text = "ps.F.embedding(x[2], x[1], { padding_idx = %d })" % padding
    return Case(text, lambda x, m: torch.nn.functional.embedding(x[1], x[0], padding_idx=padding),
                [d.input([rows, width], d.dtype(), True), indices(d, at, rows)], exact={"out0"})


def embedding_backward(d):
    rows, width, dtype = d.int(1, 9), d.size(), d.dtype()
    at, out = d.shape(0, 3), d.dtype()
    if (dtype == "fp64") != (out == "fp64"):
        out = dtype
    code = list(TYPES).index(out)
    padding = d.int(-1, rows - 1)

    def run(x, m):
        if not m.exact and x[1].numel() > 0:
            dw = torch.ops.aten.embedding_dense_backward(x[1].to(TYPES["fp64" if dtype == "fp64" else "fp32"]),
                                                         x[0].long(),
                                                         rows, padding, False)
            return dw.to(TYPES[out])
        dw = torch.zeros(rows, width, dtype=torch.float64)
        dw = dw.index_add(0, x[0].reshape(-1).long(), x[1].double().reshape(-1,
                                                                            width) * (x[0].reshape(-1, 1) != padding))
        return dw if m.exact else dw.to(TYPES[out])
    return Case("ps.ops.embedding_backward(x[1], x[2], %d, 0, %d, %d)" % (rows, code, padding), run,
                [indices(d, at, rows), d.input(at + [width], dtype)])


def assign(d):
    shape = [n or 2 for n in d.shape(1, 3)]
    dtype = d.choice(*ALL)
    dim = d.int(0, len(shape) - 1)
    i = d.int(0, shape[dim] - 1)
    keys = ["{}"] * dim + [str(i)]
    at = (slice(None),) * dim + (i,)
    x = d.input(shape, dtype, plain=1)
    if d.chance(0.5):
        value = d.int(0, 1)

        def run(x, m):
            y = x[0].clone()
            y[at] = value
            return y
        return Case("x[1][{ %s }] = %d return x[1]" % (", ".join(keys), value), run, [x], exact=True)
    part = shape[:dim] + shape[dim + 1:]

    def run_tensor(x, m):
        y = x[0].clone()
        y[at] = x[1]
        return y
    return Case("x[1][{ %s }] = x[2] return x[1]" % ", ".join(keys), run_tensor, [x, d.input(part, dtype)], exact=True)


ROWS = [
    of_shape(reshape, "reshape", ops="reshape"), of_shape(permute, "permute", ops="permute"),
    of_shape(transpose, "transpose", 1), of_shape(expand, "expand", ops="expand", weight=2),
    of_shape(slice_, "slice", 1, ops="slice"), of_shape(narrow, "narrow", 1), of_shape(select, "select", 1),
    of_shape(split, "split", 1), of_shape(chunk, "chunk", 1), of_shape(flatten, "flatten"),
    of_shape(unsqueeze, "unsqueeze"), of_shape(squeeze, "squeeze"), of_shape(index, "index", 1, weight=2),
    of_shape(lambda d, s: ("x[1]:t()", lambda x: x.t()), "t", 0, 2),
    of_shape(lambda d, s: ("x[1]:clone()", lambda x: x.clone()), "clone", ops="contiguous"),
    of_shape(lambda d, s: ("x[1]:contiguous()", lambda x: x.contiguous()), "contiguous"),
    of_shape(to_device, "to_device", ops="to_device"),
    Row("cast", cast, "cast", 3), Row("cat", cat, "concat", 2), Row("stack", stack),
    Row("index_select", index_select), Row("index by a tensor", index_tensor), Row("masked_select", masked_select),
    Row("nonzero", nonzero), Row("masked_fill", masked_fill), Row("gather", gather, "gather"),
    Row("scatter_add", scatter_add, "scatter_add"), Row("embedding", embedding, "embedding"),
    Row("embedding_backward", embedding_backward, "embedding_backward"), Row("assign", assign),
]
