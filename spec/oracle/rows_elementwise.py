# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: elementwise functions of one input, of two inputs that are broadcast, of numbers, and in
place."""
import math

import torch
import torch.nn.functional as F

import differences

from oracle import FLOATS, INTS, Case, Input, Row, lua

SPECIAL = 0.2                    # fraction of inputs that contain NaN, infinities, zeros of both signs, denormals


def unary(name, fn, low=None, high=None, exact=False, ints=True, grad=True, call=None, ops=None, slope=None):
    """y = x:name() for floats with gradients. low, high: the usual range. slope(y): dy / dx if it is computed from
    y."""
    def draw(d):
        dtype = d.choice(*INTS) if ints and d.chance(0.15) else d.dtype()
        bounded = low is not None and d.chance(0.6)
        x = d.input(d.shape(), dtype, grad and d.chance(0.8),
                    *(low, high) if bounded and dtype in FLOATS else (None, None),
                    special=SPECIAL)
        return Case(call or "x[1]:%s()" % name, lambda x, m: m.saved(fn, slope, x[0]) if slope else fn(x[0]),
                    [x], exact={"out0"} if exact else False, device=d.choice("cpu", "cpu", "cpu", "ref"))
    return Row(name, draw, ops or name)


def same_bits(a, b):
    """For half and other types, PyTorch keeps a single number in fp32. Here both operands have the common type."""
    return a == b or not {a, b} & {"bf16", "fp16"}


def shapes_of_two(d):
    """Returns two shapes that broadcast to one."""
    shape = d.shape()
    a, b = list(shape), list(shape)
    for i in range(len(shape)):
        if d.chance(0.15):
            d.choice(a, b)[i] = 1
    cut = d.int(0, len(shape)) if d.chance(0.3) else 0
    return (a[cut:], b) if d.chance(0.5) else (a, b[cut:])


def binary(name, fn, exact=False, ints=True, grad=True, apart=False, first=None, second=None):
    """y = x:name(z) for all pairs of types. apart: no integer is 0. first, second: ranges."""
    def draw(d):
        names = FLOATS + INTS if ints else FLOATS
        if d.chance(0.5):
            a = b = d.dtype()
        else:
            a, b = d.choice(*names), d.choice(*names)
        sa, sb = shapes_of_two(d)

        def one(shape, dtype, bounds):
            low, high = bounds or (None, None)
            if dtype in INTS:
                low, high = (1, 9) if apart and dtype != "bool" else (None, None)
            return d.input(shape, dtype, grad and d.chance(0.8), low, high, special=0 if bounds else SPECIAL)
        fn_ = differences.reference(name, fn)
        case = Case("x[1]:%s(x[2])" % name, lambda x, m: fn_(x[0], x[1]), [one(sa, a, first), one(sb, b, second)],
                    exact={"out0"} if exact and same_bits(a, b) else False, device=d.choice("cpu", "cpu", "cpu", "ref"))
        case.types = a, b
        return case
    return Row(name, draw, name, weight=3)


def number(d):
    """Converts a number. Lua has one kind of number, so whole numbers become PyTorch's int."""
    if d.chance(0.4):
        return d.choice(0, 1, -1, 2, 3, 7, -5, 100, 255, 256, 300, 1000, 100000, 2 ** 31, -2 ** 33)
    return d.choice(0.5, -0.25, 1.5, 0.1, -3.7, 1e-3, 1e-8, d.uniform(-10, 10), d.uniform(-10, 10))


def beside(x, value):
    """Returns the number as a PyTorch tensor that does not widen x. A whole number that does not fit into an integer
    type becomes int64."""
    if x.dtype.is_floating_point:
        return torch.tensor(value, dtype=x.dtype)
    if isinstance(value, float):
        return torch.tensor(value)
    if x.dtype == torch.bool:
        return torch.tensor(bool(value) if value in (0, 1) else value)
    holds = torch.iinfo(x.dtype).min <= value <= torch.iinfo(x.dtype).max
    return torch.tensor(value, dtype=x.dtype if holds else torch.int64)


def picked(fn, x, value):
    """Computes maximum or minimum, in int64 if the number does not fit into the integer type."""
    return fn(x.long() if value.dtype == torch.int64 and not x.dtype.is_floating_point else x, value)


def with_number(name, code, fn, exact=True, types=FLOATS + INTS, numbers=number, ops=None, grad=True):
    """y = f(x, a number). `code` has %s for the number."""
    def draw(d):
        dtype = d.dtype() if d.chance(0.6) else d.choice(*types)
        value = numbers(d)
        x = d.input(d.shape(), dtype, grad and d.chance(0.7), special=SPECIAL)
        half = dtype in ("bf16", "fp16")                          # PyTorch rounds some numbers to the type first
        fn_ = differences.reference(name, fn)
        return Case(code % lua(value), lambda x, m: fn_(x[0], value), [x],
                    exact={"out0"} if exact and not half else False)
    return Row(name, draw, ops or ())


def exact_gelu(x, how):
    """Computes GELU in float64 without the cancellation in 1 + erf(x) or 1 + tanh(x)."""
    if how == "tanh":
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
        y = torch.where(x > 0, x - x * torch.sigmoid(-2 * u), x * torch.sigmoid(2 * u))
        return torch.where(torch.isinf(x), torch.nan, y)
    return torch.where(torch.isinf(x) & (x < 0), torch.nan, 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5)))


def gelu_backward(d):
    dtype, tanh, shape = d.dtype(), d.int(0, 1), d.shape()
    x, dy = d.input(shape, dtype, low=-6, high=6), d.input(shape, dtype)
    how = "tanh" if tanh else "none"

    def run(x, m):
        if not m.exact:
            return torch.ops.aten.gelu_backward(x[1], x[0], approximate=how)
        with torch.enable_grad():
            at = x[0] if x[0].requires_grad else x[0].detach().requires_grad_()
            return torch.autograd.grad(exact_gelu(at, how).sum(), at, create_graph=True)[0] * x[1]
    return Case("ps.ops.gelu_backward(x[1], x[2], %d)" % tanh, run, [x, dy])


def silu_backward(d):
    dtype, shape = d.dtype(), d.shape()

    def run(x, m):
        if not m.exact:
            return torch.ops.aten.silu_backward(x[1], x[0])
        s = torch.sigmoid(x[0])                                  # PyTorch's own function has no derivative
        return x[1] * s * (1 + x[0] * (1 - s))
    return Case("ps.ops.silu_backward(x[1], x[2])", run, [d.input(shape, dtype, low=-12, high=12),
                                                          d.input(shape, dtype)])


def gated(x, up, how, exact):
    act = F.silu if how == "silu" else (lambda t: exact_gelu(t, how)) if exact else (lambda t: F.gelu(t,
                                                                                                      approximate=how))
    return act(x) * up


def act_mul(d):
    dtype, shape, how = d.dtype(), d.shape(), d.choice("silu", "none", "tanh")
    x, up = d.input(shape, dtype, True, low=-12, high=12), d.input(shape, dtype, True)

    def run(x, m):                                               # one rounding to a half type
        wide = [t if t.dtype == torch.float64 else t.float() for t in x]
        return gated(*wide, how, m.exact).to(x[0].dtype)
    code = "ps.F.swiglu(x[1], x[2])" if how == "silu" else "ps.F.geglu(x[1], x[2], %s)" % lua(how)
    return Case(code, run, [x, up])


def act_mul_backward(d):
    dtype, shape, act = d.dtype("fp32", "bf16", "fp16"), d.shape(), d.int(0, 2)
    how = ("silu", "none", "tanh")[act]
    x, up, dy = d.input(shape, dtype, low=-12, high=12), d.input(shape, dtype), d.input(shape, dtype)

    def run(x, m):
        with torch.enable_grad():
            wide = torch.float64 if m.exact else torch.float32
            leaves = [t.detach().to(wide).requires_grad_() for t in x[:2]]
            grads = torch.autograd.grad(gated(*leaves, how, m.exact), leaves, x[2].to(wide))
        return [g.to(x[0].dtype) for g in grads]
    return Case("ps.ops.act_mul_backward(x[1], x[2], x[3], %d)" % act, run, [x, up, dy])


def gelu(d):
    dtype, how = d.dtype(), d.choice("none", "tanh")
    x = d.input(d.shape(), dtype, True, *d.choice((-6, 6), (None, None), (-30, 30)), special=SPECIAL)
    code = d.choice("x[1]:gelu(%s)" % lua(how), "ps.F.gelu(x[1], %s)" % lua(how))
    return Case(code, lambda x, m: exact_gelu(x[0], how) if m.exact else F.gelu(x[0], approximate=how), [x])


def where(d):
    shape = d.shape()
    a, b = d.dtype(), d.dtype()
    if d.chance(0.5):
        b = a
    elif d.chance(0.5):
        a, b = d.choice(*FLOATS + INTS), d.choice(*FLOATS + INTS)
    sa, sb = shapes_of_two(d)
    shape = list(torch.broadcast_shapes(sa, sb))
    for i in range(len(shape)):
        if d.chance(0.2):
            shape[i] = 1
    return Case("ps.where(x[1], x[2], x[3])", lambda x, m: torch.where(x[0], x[1], x[2]),
                [d.input(shape, "bool"), d.input(sa, a, True, special=SPECIAL), d.input(sb, b, True, special=SPECIAL)],
                exact={"out0"})


def where_number(d):
    dtype, shape, value = d.dtype() if d.chance(0.6) else d.choice(*FLOATS + INTS), d.shape(), number(d)
    value = differences.fitting(dtype, value)
    x = d.input(shape, dtype, True)
    if d.chance(0.5):
        return Case("ps.where(x[1], x[2], %s)" % lua(value), lambda x, m: torch.where(x[0], x[1], value),
                    [d.input(shape, "bool"), x], exact={"out0"})
    return Case("ps.where(x[1], %s, x[2])" % lua(value), lambda x, m: torch.where(x[0], value, x[1]),
                [d.input(shape, "bool"), x], exact={"out0"})


def clamp(d):
    dtype = d.choice("int32", "int64", "uint8") if d.chance(0.2) else d.dtype()
    low, high = sorted((d.choice(d.uniform(-3, 3), float(d.int(-2, 2))),
                        d.choice(d.uniform(-3, 3), float(d.int(-2, 2)))))
    if dtype in INTS:
        low, high = math.floor(low), math.floor(high)
        if dtype == "uint8":
            low, high = abs(low), abs(low) + abs(high)
    low, high = (None, high) if d.chance(0.2) else (low, None) if d.chance(0.2) else (low, high)
    x = d.input(d.shape(), dtype, True, special=SPECIAL)
    return Case("x[1]:clamp(%s, %s)" % (lua(low), lua(high)), lambda x, m: torch.clamp(x[0], low, high), [x],
                exact={"out0"})


def affine(d):
    alpha, beta = number(d), number(d)

    def run(x, m):
        x = x[0]
        wide = x if x.dtype == torch.float64 else x.float()           # one rounding to a half type
        return (wide * alpha + beta).to(x.dtype)
    return Case("ps.ops.affine(x[1], %s, %s)" % (lua(alpha), lua(beta)), run, [d.input(d.shape(), d.dtype(), True)])


def exponents(d):
    return d.choice(0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, 2.5, d.uniform(-3, 3))


def in_place(code, fn, exact=True, types=FLOATS, numbers=number):
    """Lua that writes into a view x, from y or a number (%s). fn(x, y, number) does the same. The whole base tensor
    is compared."""
    def draw(d):
        shape = d.shape()
        a = d.dtype() if d.chance(0.5) else d.choice(*types)
        if types == FLOATS and d.chance(0.1) and "%s" not in code:
            a = d.choice("int32", "int64", "uint8")
        b = a if types == FLOATS and a in INTS or d.chance(0.6) else d.choice(*types)
        value = numbers(d)
        target = d.input(shape, a, expand=False)
        other = d.input(shape if d.chance(0.7) else shape[d.int(0, len(shape)):], b, special=SPECIAL)
        view = target.view or (lambda t: t)

        def run(x, m):
            base = x[0].clone()
            fn(view(base), x[1], value)
            return base
        text = "local base, y = x[1], x[2] x = base x = %s %s return base" % (
            target.lua or "x", code % lua(value) if "%s" in code else code)
        half = "%s" in code and a in ("bf16", "fp16")
        return Case(text, run, [Input(target.base), other], exact=exact and not half and same_bits(a, b))
    return draw


ROWS = [
    unary("exp", torch.exp, -10, 10, slope=lambda y: y), unary("log", torch.log, 0.01, 50),
    unary("sqrt", torch.sqrt, 0, 50, slope=lambda y: 0.5 / y),
    unary("rsqrt", torch.rsqrt, 0.01, 50, slope=lambda y: -0.5 * y ** 3),
    unary("reciprocal", torch.reciprocal, 0.1, 5, slope=lambda y: -y * y), unary("abs", torch.abs, exact=True),
    unary("sign", torch.sign, exact=True), unary("floor", torch.floor, -5, 5, exact=True),
    unary("ceil", torch.ceil, -5, 5, exact=True), unary("round", torch.round, -5, 5, exact=True),
    unary("sin", torch.sin, -20, 20), unary("cos", torch.cos, -20, 20), unary("erf", torch.erf, -4, 4),
    unary("tanh", torch.tanh, -4, 4, slope=lambda y: 1 - y * y),
    unary("sigmoid", torch.sigmoid, -12, 12, slope=lambda y: y * (1 - y)), unary("relu", torch.relu, exact=True),
    unary("silu", F.silu, -12, 12, ints=False), Row("gelu", gelu, "gelu", 2),
    Row("gelu_backward", gelu_backward, "gelu_backward"),
    Row("silu_backward", silu_backward, "silu_backward"), Row("act_mul", act_mul, "act_mul", 2),
    Row("act_mul_backward", act_mul_backward, "act_mul_backward"),
    unary("isfinite", torch.isfinite, exact=True, grad=False),
    unary("logical_not", torch.logical_not, exact=True, grad=False),
    unary("neg", torch.neg, exact=True, call="-x[1]", ops=["affine"]),
    unary("square", torch.square, exact=True, call="x[1]:square()", ops=["mul"]),
    binary("add", torch.add, exact=True), binary("sub", torch.sub, exact=True), binary("mul", torch.mul, exact=True),
    binary("div", torch.div, exact=True, apart=True), binary("pow", torch.pow, apart=True, first=(0.1, 4),
                                                             second=(-3, 3)),
    binary("maximum", torch.maximum, exact=True), binary("minimum", torch.minimum, exact=True),
    Row("where", where, "where", 2), Row("where with a number", where_number),
    Row("clamp", clamp, "clamp", 2), Row("affine", affine, "affine"),
]
for each in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"):
    ROWS.append(binary(each, getattr(torch, each), exact=True, grad=False))
for each in ("eq", "ne", "lt", "le", "gt", "ge"):
    ROWS.append(with_number(each + " with a number", "x[1]:%s(%%s)" % each, getattr(torch, each), grad=False))
for each in ("maximum", "minimum"):
    ROWS.append(with_number(each + " with a number", "x[1]:%s(%%s)" % each,
                            lambda x, v, f=getattr(torch, each): picked(f, x, beside(x, v))))
ROWS += [
    with_number("x + a", "x[1] + %s", lambda x, a: x + a), with_number("a + x", "%s + x[1]", lambda x, a: a + x),
    with_number("x - a", "x[1] - %s", lambda x, a: x - a), with_number("a - x", "%s - x[1]", lambda x, a: a - x),
    with_number("x * a", "x[1] * %s", lambda x, a: x * a), with_number("a * x", "%s * x[1]", lambda x, a: a * x),
    with_number("x / a", "x[1] / %s", lambda x, a: x / a), with_number("a / x", "%s / x[1]", lambda x,
                                                                       a: torch.div(beside(x, a), x)),
    with_number("x ^ a", "x[1] ^ %s", lambda x, a: x ** a, exact=False, types=FLOATS, numbers=exponents,
                ops=["pow_scalar"]),
    with_number("a ^ x", "ps.pow(%s, x[1])", lambda x, a: torch.pow(beside(x, a), x), exact=False,
                numbers=lambda d: d.choice(0, 1, 2, 0.5, 3.7, 10)),
    Row("copy_", in_place("x:copy_(y)", lambda a, b, v: a.copy_(b if a.dtype.is_floating_point
                                                                else differences.cast(b, a.dtype)),
                                                                types=FLOATS + INTS), "copy_", 2),
    Row("fill_", in_place("x:fill_(%s)", lambda a, b, v: a.fill_(v)), "fill_"),
    Row("zero_", in_place("x:zero_()", lambda a, b, v: a.zero_())),
    Row("add_", in_place("x:add_(y)", lambda a, b, v: a.add_(b)), "axpy_"),
    Row("add_ with a factor", in_place("x:add_(y, %s)", lambda a, b, v: a.add_(b, alpha=v), exact=False), "axpy_"),
    Row("add_ a number", in_place("x:add_(%s)", lambda a, b, v: a.add_(v)), "axpy_"),
    Row("sub_", in_place("x:sub_(y)", lambda a, b, v: a.sub_(b)), "axpy_"),
    Row("mul_ a number", in_place("x:mul_(%s)", lambda a, b, v: a.mul_(v)), "scale_"),
    Row("mul_", in_place("x:mul_(y)", lambda a, b, v: a.mul_(b))),
    Row("div_", in_place("x:div_(y)", lambda a, b, v: a.div_(b))),
    Row("div_ a number", in_place("x:div_(%s)", lambda a, b, v: a.div_(v), numbers=lambda d: number(d) or 3)),
]
