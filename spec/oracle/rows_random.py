# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: numbers drawn with Philox counters, sampling, updates in place, the group of one
process."""
import math

import numpy as np
import torch

import philox
from oracle import TYPES, Case, Input, Row, lua

STREAM = np.uint64


def counters(first, count):
    with np.errstate(over="ignore"):
        return STREAM(first) + np.arange(count, dtype=STREAM)


def place(d, dtype, shape=None):
    """A tensor that the op overwrites."""
    return Input(d.values(d.shape() if shape is None else shape, dtype))


def uniform(d):
    dtype, low = d.dtype(), d.choice(0, -1, 0.25, d.uniform(-5, 5))
    high, seed, offset = low + d.choice(1, 3, 0.5), d.int(0, 2 ** 53), d.choice(0, 7, 2 ** 33, d.int(0, 2 ** 50))
    x = place(d, dtype)

    def run(x, m):
        u = torch.from_numpy(philox.unit(philox.draw(seed, counters(offset, x[0].numel()), 0)[:, 0]))
        y = (low + (high - low) * u).reshape(x[0].shape)
        if m.exact:
            rounded = y.to(TYPES[dtype]).double()
            return torch.where(rounded >= high, low, y)
        y = y.to(x[0].dtype)
        return torch.where(y >= high, torch.tensor(low, dtype=y.dtype), y)            # keeps the range half-open
    return Case("ps.ops.uniform_(x[1], %s, %s, %d, %d)" % (lua(low), lua(high), seed, offset), run, [x],
                device=d.choice("cpu", "ref"))


def normal(d):
    dtype, mean, std = d.dtype(), d.choice(0, 1, -3.5), d.choice(1, 0.02, 3)
    seed, offset = d.int(0, 2 ** 53), d.choice(0, 7, 2 ** 33)
    x = place(d, dtype)

    def run(x, m):
        words = philox.draw(seed, counters(offset, x[0].numel()), 0)
        z = np.sqrt(-2 * np.log(1 - philox.unit(words[:, 0]))) * np.cos(2 * math.pi * philox.unit(words[:, 1]))
        z = torch.from_numpy(z)
        if not m.exact:
            z = z.float()                                            # the numbers are fp32 for every type
            return (mean + std * z).to(x[0].dtype).reshape(x[0].shape)
        return (mean + std * z).reshape(x[0].shape)
    case = Case("ps.ops.normal_(x[1], %s, %s, %d, %d)" % (lua(mean), lua(std), seed, offset), run, [x],
                device=d.choice("cpu", "ref"))
    # The radius is below 6, and the angle, up to 2 pi, is an fp32 number and product.
    case.absolute = 6 * 2.0 ** -21 * std
    return case


def randint(d):
    dtype, low = d.choice("int32", "int64"), d.int(-1000, 1000)
    high, seed, offset = low + d.choice(1, 2, 7, 1000, 2 ** 20), d.int(0, 2 ** 53), d.choice(0, 2 ** 33)
    x = place(d, dtype)

    def run(x, m):
        words = philox.draw(seed, counters(offset, x[0].numel()), 0)
        k = [(((int(b) << 32) | int(a)) * (high - low) >> 64) + low for a, b in words[:, :2]]
        return torch.tensor(k, dtype=x[0].dtype).reshape(x[0].shape)
    return Case("ps.ops.randint_(x[1], %d, %d, %d, %d)" % (low, high, seed, offset), run, [x], exact=True)


def fine(seed, offset, n):
    """n numbers of 48 random bits in [0, 1)."""
    upper, lower = (philox.unit(philox.draw(seed, counters(first, n), 0)[:, 0]) for first in (offset, offset + n))
    return torch.from_numpy(np.asarray(upper, dtype=np.float64) + np.asarray(lower, dtype=np.float64) * 2.0 ** -24)


def randperm(d):
    n, seed, offset = d.int(1, 3000), d.int(0, 2 ** 53), d.choice(0, 2 ** 33)
    return Case("ps.ops.randperm_(x[1], %d, %d)" % (seed, offset),
                lambda x, m: fine(seed, offset, n).argsort(stable=True), [place(d, "int64", (n,))],
                device=d.choice("cpu", "ref"), exact=True)


def bernoulli(d):
    p, seed, offset = d.choice(-1, 0, 0.3, 1), d.int(0, 2 ** 53), d.choice(0, 2 ** 33)
    x = d.input(d.shape(), d.dtype(), low=0, high=1)

    def run(x, m):
        u = fine(seed, offset, x[0].numel()).reshape(x[0].shape)
        return (u < (x[0].double() if p == -1 else p)).to(x[0].dtype)
    return Case("ps.ops.bernoulli(x[1], %s, %d, %d)" % (lua(p), seed, offset), run, [x],
                device=d.choice("cpu", "ref"), exact=True)


def dropout(d):
    dtype, p = d.dtype(), d.choice(0.1, 0.3, 0.5, 0.9)
    seed, step, sample, op = d.int(0, 2 ** 50), d.int(0, 1000), d.int(0, 1000), d.int(0, 50)
    first, per_sample = (d.int(0, 100), d.int(1, 60)) if d.chance(0.4) else (0, 0)      # a part of a larger tensor
    shape, numbers = d.shape(1, 3), None
    if d.chance(0.3):                                                                   # some of its rows
        width = int(np.prod(shape[1:], dtype=int)) or 1
        first, per_sample = 0, width * d.int(1, 5)
        numbers = [d.int(0, 30) for _ in range(shape[0])]
    x, device = d.input(shape, dtype, True), d.choice("cpu", "ref")

    def drawn(n, count):                                      # Draws the first `count` elements of samples of n.
        words = []
        for s in range(-(-count // n)):
            groups = np.arange(-(-n // 4), dtype=STREAM)
            low = groups | STREAM((sample + s) & 0xFFFFFFFF) << STREAM(32)
            words.append(philox.draw(seed, low, (step << 32) | op).reshape(-1)[:n])
        return np.concatenate(words)[:count] if words else np.zeros(0, STREAM)

    def run(x, m):
        numel = x[0].numel()
        n = per_sample or (x[0][0].numel() if x[0].shape[0] else 0) or 1
        if numbers is None:
            whole = drawn(n, first + numel)[first:]
        else:
            width = numel // max(len(numbers), 1)
            whole = drawn(n, (max(numbers, default=0) + 1) * width)
            whole = np.concatenate([whole[k * width:(k + 1) * width] for k in numbers] or [whole[:0]])
        u = torch.from_numpy(philox.unit(whole)).reshape(x[0].shape)
        return torch.where(u < float(np.float32(p)), torch.zeros((), dtype=x[0].dtype), x[0] / (1 - p))
    rows = "nil" if numbers is None else 'ps.tensor(%s, { dtype = "%s", device = "%s" })' % (
        lua(numbers), d.choice("int32", "int64"), device)
    return Case("ps.ops.dropout(x[1], %s, %s, %d, %d, %d, %d, %d, %d)" % (rows, lua(p), seed, step, sample, op, first,
                                                                          per_sample), run, [x], device=device)


def arange_in_place(d):
    dtype = d.dtype("fp32", "fp64", "int32", "int64")
    start, step = (d.int(-9, 9), d.choice(1, -2, 7)) if "int" in dtype else (d.choice(0, -1.5), d.choice(1, 0.25, -0.5))
    x = place(d, dtype)
    return Case("ps.ops.arange_(x[1], %s, %s)" % (lua(start), lua(step)), lambda x, m: (
        start + step * torch.arange(x[0].numel(), dtype=torch.float64)).to(x[0].dtype).reshape(x[0].shape),
        [x], exact=True)


def arange(d):
    start, stop, step = d.int(-9, 9), d.int(-9, 30), d.choice(1, 2, 3, -1, -2)
    if (stop - start) * step < 0:
        start, stop = stop, start
    if d.chance(0.3):
        dtype = d.choice("fp32", "int32", "fp64")
        return Case("ps.arange(%d, %d, %d, { dtype = %s })" % (start, stop, step, lua(dtype)),
                    lambda x, m: torch.arange(start, stop, step, dtype=m.dtype(dtype)), exact=True)
    if d.chance(0.3):
        half = d.choice(0.5, 0.25)
        return Case("ps.arange(%d, %d, %s)" % (0, abs(stop), lua(half)),
                    lambda x, m: torch.arange(0, abs(stop), half, dtype=m.dtype("fp32")), exact=True)
    return Case("ps.arange(%d, %d, %d)" % (start, stop, step), lambda x, m: torch.arange(start, stop, step), exact=True)


def filled(d):
    shape, dtype, value = d.shape(), d.choice(*TYPES), d.choice(0, 1)
    call = d.choice("ps.full(%s, %d, { dtype = %s })", "ps.%s(%s, { dtype = %s })")
    if call.startswith("ps.full"):
        text = call % (lua(shape), value, lua(dtype))
    else:
        text = call % ("ones" if value else "zeros", lua(shape), lua(dtype))
    return Case(text, lambda x, m: torch.full(shape, value, dtype=m.dtype(dtype)), exact=True)


def like(d):
    name = d.choice("zeros_like", "ones_like")
    return Case("ps.%s(x[1])" % name, lambda x, m: getattr(torch, name)(x[0]),
                [d.input(d.shape(), d.choice(*TYPES))], exact=True)


def scale_by(d):
    dtype, alpha = d.dtype(), d.choice(1, -0.3, 2)
    by = d.values(d.choice([], [1]), dtype if d.chance(0.5) else "fp32" if dtype != "fp64" else "fp64")
    return Case("ps.ops.scale_by_(x[1], x[2], %s)" % lua(alpha), lambda x, m: (
        x[0].double() * (alpha * x[1].double().reshape(()))).to(x[0].dtype), [place(d, dtype), Input(by)])


def sample(d):
    dtype, classes, rows = d.dtype("fp32", "bf16", "fp64"), d.int(1, 40), d.shape(0, 2)
    temperature, top_p, top_k = d.choice(0, 1, 0.7, 2), d.choice(1, 1, 0.9, 0.3), d.choice(0, 0, 1, 5, 100)
    min_p = d.choice(0, 0, 0.3, 0.05)
    seed, offset = d.int(0, 2 ** 50), d.choice(0, 9, 2 ** 33)
    x = d.input(rows + [classes], dtype, low=-5, high=5)

    def run(x, m):
        flat = x[0].double().reshape(-1, classes)
        order = torch.sort(flat, descending=True, stable=True)
        u = philox.unit(philox.draw(seed, counters(offset, flat.shape[0]), 0)[:, 0])
        picked = []
        for r in range(flat.shape[0]):
            if temperature == 0:
                picked.append(int(order.indices[r, 0]))
                continue
            n = min(top_k, classes) if top_k else classes
            mass = torch.softmax(order.values[r, :n] / temperature, 0).cumsum(0)
            used = min(n, 1 + int((mass < top_p).sum()))
            below = order.values[r, :used] / temperature - order.values[r, 0] / temperature
            likelier = below >= math.log(min_p or 1e-300)
            used = int(likelier.sum())
            picked.append(int(order.indices[r, min(used - 1, int((mass[:used] <= u[r] * mass[used - 1]).sum()))]))
        return torch.tensor(picked, dtype=torch.int64).reshape(rows)
    attrs = (lua(temperature), lua(top_p), top_k, seed, offset, lua(min_p))
    return Case("ps.ops.sample(x[1], %s, %s, %d, %d, %d, %s)" % attrs, run,
                [x], exact=True)


def adam(d):
    """Compares one call of the fused update with torch.optim's formula in float64."""
    dtype, shape, adamw = d.dtype("fp32", "bf16", "fp16"), d.shape(0, 2), d.int(0, 1)
    t, lr, b1, b2 = d.int(1, 50), d.choice(1e-3, 0.1), d.choice(0.9, 0.5), d.choice(0.999, 0.95)
    eps, wd, scale = d.choice(1e-8, 1e-6), d.choice(0, 0.1), d.choice(1, 0.5, 1 / 3)
    master = d.values(shape, "fp32")
    inputs = [Input(master.to(TYPES[dtype])), Input(master), d.input(shape, dtype, plain=1),
              Input(d.values(shape, "fp32", -1, 1)), Input(d.values(shape, "fp32", 0, 1))]
    list_ = "{ x[1], x[1], x[3], x[4], x[5] }" if dtype == "fp32" else "x"
    text = "local list = %s ps.ops.adam_(list, %d, %s) return list[1], list[2], list[4], list[5]" % (
        list_, adamw, ", ".join(map(lua, (lr, b1, b2, eps, wd, scale, 1 - b1 ** t, 1 - b2 ** t))))

    def run(x, m):
        p, g, mom, v = (z.double() for z in (x[1], x[2], x[3], x[4]))
        g = g * scale
        if adamw:
            p = p - lr * wd * p
        else:
            g = g + wd * p
        mom, v = b1 * mom + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        step = lr / (1 - b1 ** t) * mom / ((v / (1 - b2 ** t)).sqrt() + eps)
        p = p - (m.change(step) if m.exact and m.change else step)  # lr, betas and eps are rounded to fp32, too
        if m.exact:
            return [p, p, mom, v]
        p = p.float()
        return [p.to(x[0].dtype), p, mom.float(), v.float()]
    return Case(text, run, inputs)


def sgd(d):
    dtype, shape = d.dtype("fp32", "bf16", "fp16"), d.shape(0, 2)
    lr, momentum, wd = d.choice(0.1, 1e-3), d.choice(0.9, 0.5), d.choice(0, 0.1)
    nesterov = d.int(0, 1)
    dampening = 0 if nesterov else d.choice(0, 0.1)
    first, scale = d.int(0, 1), d.choice(1, 0.5)
    master = d.values(shape, "fp32")
    inputs = [Input(master.to(TYPES[dtype])), Input(master), d.input(shape, dtype, plain=1),
              Input(d.values(shape, "fp32"))]
    list_ = "{ x[1], x[1], x[3], x[4] }" if dtype == "fp32" else "x"
    text = "local list = %s ps.ops.sgd_(list, %s) return list[1], list[2], list[4]" % (
        list_, ", ".join(map(lua, (lr, momentum, wd, dampening, nesterov, first, scale))))

    def run(x, m):
        p, g, buf = (z.double() for z in (x[1], x[2], x[3]))
        g = g * scale + wd * p
        buf = g if first else momentum * buf + (1 - dampening) * g
        p = p - lr * (g + momentum * buf if nesterov else buf)
        if m.exact:
            return [p, p, buf]
        p = p.float()
        return [p.to(x[0].dtype), p, buf.float()]
    return Case(text, run, inputs)


def update(op, d, states, attrs, formula, shape=None, tail=0):
    """An optimizer's update of param (which is its own master), grad and states, compared with a formula in float64."""
    shape = shape or d.shape(1, 2)
    inputs = [Input(d.values(shape, "fp32")), Input(d.values(shape, "fp32", -1, 1))] + states(shape)
    names = ", ".join("x[%d]" % (i + 3) for i in range(len(inputs) - 2))
    stand_in = ", x[1]" * tail
    text = "local list = { x[1], x[1], x[2], %s%s } ps.ops.%s(list, %s) return x[1], %s" % (
        names, stand_in, op, ", ".join(map(lua, attrs)), names)

    def run(x, m):
        out = formula(*(z.double() for z in x), m)
        return out if m.exact else [z.float() for z in out]
    return Case(text, run, inputs)


def lion(d):
    t, lr, b1, b2 = d.int(1, 9), d.choice(1e-3, 0.1), d.choice(0.9, 0.5), d.choice(0.99, 0.95)
    wd, scale = d.choice(0, 0.1), d.choice(1, 0.5)

    def formula(p, g, mean, m):
        g = g * scale
        u = (b1 * mean + (1 - b1) * g).sign()
        return [p * (1 - lr * wd) - (m.change(lr * u) if m.exact and m.change else lr * u), b2 * mean + (1 - b2) * g]
    return update("lion_", d, lambda s: [Input(d.values(s, "fp32", -1, 1))], (scale, t, lr, b1, b2, wd), formula)


def schedule_free(d):
    t, lr, b1, b2, wd = d.int(1, 3), d.choice(1e-3, 0.1), d.choice(0.9, 0.5), d.choice(0.99, 0.5), d.choice(0, 0.1)
    scale, average, bias2, eps = d.choice(1, 0.5), d.choice(0.2, 0.9, 1), d.choice(0.1, 1), d.choice(1e-8, 1e-3)

    def formula(p, g, z, square, m):
        g, z = g * scale, p if t == 1 else z
        square = b2 * square + (1 - b2) * g * g
        u = g / ((square / bias2).sqrt() + eps) + wd * p
        change = m.change if m.exact and m.change else lambda x: x   # constants are rounded to fp32
        return [p + change(average * (z - p)) - change(lr * (1 - b1 * (1 - average)) * u), z - change(lr * u), square]
    return update("adam_schedule_free_", d, lambda s: [Input(d.values(s, "fp32", -1, 1)),
                                                       Input(d.values(s, "fp32", 0, 1))],
                  (scale, t, lr, b1, b2, eps, wd, average, bias2), formula)


def master_lerp(d):
    shape, weight = d.shape(1, 2), d.choice(0.1, -1 / 9, 0.7, -1)
    text = "ps.ops.master_lerp_({ x[1], x[1], x[2] }, %s) return x[1]" % lua(weight)

    def run(x, m):
        out = x[0].double().lerp(x[1].double(), weight)
        return out if m.exact else out.float()
    return Case(text, run, [Input(d.values(shape, "fp32", -1, 1)), Input(d.values(shape, "fp32", -1, 1))])


def lion8bit(d):
    """Lion with an average in 8 bits that begins at 0: the parameter, and the scales of the new average."""
    n, lr, b1, wd = d.int(1, 600), d.choice(1e-3, 0.1), d.choice(0.9, 0.5), d.choice(0, 0.1)
    blocks = (n + 255) // 256
    text = ("local codes, scale = ps.zeros({ %d }, { dtype = 'uint8' }), ps.zeros { %d } "
            "ps.ops.lion8bit_({ x[1], x[1], x[2], codes, scale }, %s) return x[1], scale") % (
                n, blocks, ", ".join(map(lua, (1, 1, lr, b1, 0.75, wd))))

    def run(x, m):
        p, g = x[0].double(), x[1].double()
        scale = torch.stack([(0.25 * g[i:i + 256]).abs().max() for i in range(0, n, 256)])
        step = lr * g.sign()
        p = p * (1 - lr * wd) - (m.change(step) if m.exact and m.change else step)
        return [p, scale] if m.exact else [p.float(), scale.float()]
    return Case(text, run, [Input(d.values([n], "fp32")), Input(d.values([n], "fp32", -1, 1))])


def rmsprop(d):
    lr, alpha, eps, wd = d.choice(1e-3, 0.1), d.choice(0.99, 0.5), d.choice(1e-8, 1e-3), d.choice(0, 0.1)
    momentum, scale = d.choice(0, 0.9, 0.5), d.choice(1, 0.5)

    def formula(p, g, square, buf, m):
        g = g * scale + wd * p
        square = alpha * square + (1 - alpha) * g * g
        u = g / (square.sqrt() + eps)
        buf = momentum * buf + u if momentum else buf
        step = lr * (buf if momentum else u)
        return [p - (m.change(step) if m.exact and m.change else step), square, buf]
    return update("rmsprop_", d, lambda s: [Input(d.values(s, "fp32", 0, 1)), Input(d.values(s, "fp32", -1, 1))],
                  (scale, 1, lr, alpha, eps, wd, momentum), formula)


def lamb(d):
    t, lr, b1, b2, wd = d.int(1, 9), d.choice(1e-3, 0.1), d.choice(0.9, 0.5), d.choice(0.99, 0.95), d.choice(0, 0.1)
    eps, averaging, always, clip = 1e-6, d.int(0, 1), d.int(0, 1), d.int(0, 1)

    def formula(p, g, mean, square, m):
        mean, square = b1 * mean + ((1 - b1) if averaging else 1) * g, b2 * square + (1 - b2) * g * g
        u = mean / (1 - b1 ** t) / (square.sqrt() / math.sqrt(1 - b2 ** t) + eps) + wd * p
        ratio = p.norm() / u.norm() if (wd or always) and p.norm() > 0 and u.norm() > 0 else torch.ones(()).double()
        step = lr * (ratio.clamp(max=1) if clip else ratio) * u
        return [p - (m.change(step) if m.exact and m.change else step), mean, square]
    return update("lamb_", d, lambda s: [Input(d.values(s, "fp32", -1, 1)), Input(d.values(s, "fp32", 0, 1))],
                  (1, t, lr, b1, b2, eps, wd, averaging, 1, always, clip), formula)


def muon(d):
    lr, momentum, wd = d.choice(1e-3, 0.1), d.choice(0.95, 0.5), d.choice(0, 0.1)
    nesterov, adjust = d.int(0, 1), d.int(0, 2)
    rows, cols = d.int(1, 40), d.int(1, 40)

    def formula(p, g, buf, m):
        buf = buf + (1 - momentum) * (g - buf)
        x = g + momentum * (buf - g) if nesterov else buf
        x = x.T if rows > cols else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        x = x.T if rows > cols else x
        ratio = [math.sqrt(max(1, rows / cols)), 0.2 * math.sqrt(max(rows, cols)), math.sqrt(rows / cols)][adjust]
        step = lr * ratio * x
        return [p * (1 - lr * wd) - (m.change(step) if m.exact and m.change else step), buf]
    return update("muon_", d, lambda s: [Input(d.values(s, "fp32", -1, 1))],
                  (1, 1, lr, momentum, wd, 1e-7, 3.4445, -4.775, 2.0315, nesterov, 5, adjust), formula, [rows, cols])


def adafactor(d):
    t, lr, wd, eps1, eps2 = d.int(1, 9), d.choice(1e-3, 0.1), d.choice(0, 0.1), 1e-7, 1e-3
    shape = [n or 2 for n in d.shape(1, 3)]                       # the formula's means over no elements are NaN
    matrix = len(shape) > 1
    take = t ** -0.8

    def formula(p, g, *rest):
        m, states = rest[-1], list(rest[:-1])
        if matrix:
            states = [states[0] + take * ((g * g).mean(-1, keepdim=True) - states[0]),
                      states[1] + take * ((g * g).mean(-2, keepdim=True) - states[1])]
            var = states[0] @ states[1] / states[0].mean(-2, keepdim=True).clamp(min=eps1)
        else:
            states = [states[0] + take * (g * g - states[0])]
            var = states[0]
        u = g * var.clamp(min=eps1 * eps1).rsqrt()
        alpha = max(eps2, p.square().mean().sqrt().item()) * min(lr, t ** -0.5)
        step = alpha / max(1.0, u.square().mean().sqrt().item()) * u
        return [p * (1 - lr * wd) - (m.change(step) if m.exact and m.change else step)] + states

    def states(s):
        if not matrix:
            return [Input(d.values(s, "fp32", 0.1, 1))]
        return [Input(d.values(s[:-1] + [1], "fp32", 0.1, 1)), Input(d.values(s[:-2] + [1, s[-1]], "fp32", 0.1, 1))]
    return update("adafactor_", d, states, (1, t, lr, -0.8, eps1, eps2, 1, wd), formula, shape, 0 if matrix else 1)


def small_adam(d):
    """The first update of AdamW with averages in 8 bits, and any update with averages in bf16. Only the parameter's
    value is compared, since it is computed before the averages are rounded."""
    eight, n, lr, b1, b2 = d.int(0, 1), d.int(1, 600), d.choice(1e-3, 0.1), d.choice(0.9, 0.5), d.choice(0.99, 0.95)
    t, wd, eps = 1 if eight else d.int(1, 9), d.choice(0, 0.1), 1e-8
    inputs = [Input(d.values([n], "fp32")), Input(d.values([n], "fp32", -1, 1))]
    attrs = ", ".join(map(lua, (1, t, lr, b1, b2, eps, wd)))
    if eight:
        blocks = (n + 255) // 256
        states = ", ".join(["ps.zeros({ %d }, { dtype = 'uint8' }), ps.zeros { %d }" % (n, blocks)] * 2)
    else:
        inputs += [Input(d.values([n], "bf16", -1, 1)), Input(d.values([n], "bf16", 0, 1))]
        states = "x[3], x[4]"
    name = "adam8bit_" if eight else "adam_bf16_"
    text = "ps.ops.%s({ x[1], x[1], x[2], %s }, %s) return x[1]" % (name, states, attrs)

    def run(x, m):
        p, g = x[0].double(), x[1].double()
        mean, square = (x[2].double(), x[3].double()) if len(x) > 2 else (torch.zeros_like(p), torch.zeros_like(p))
        mean, square = b1 * mean + (1 - b1) * g, b2 * square + (1 - b2) * g * g
        step = lr / (1 - b1 ** t) * mean / ((square / (1 - b2 ** t)).sqrt() + eps)
        p = p - lr * wd * p - (m.change(step) if m.exact and m.change else step)
        return p if m.exact else p.float()
    return Case(text, run, inputs)


def halves(d):
    """An fp32 tensor that is split into a weight and its remainder, and joined again."""
    n = d.int(0, 100)
    text = ("local w, low = ps.empty({ %d }, { dtype = 'bf16' }), ps.zeros({ %d }, { dtype = 'uint8' }) "
            "ps.ops.remainder_split_ { w, low, x[1] } return ps.ops.remainder_join(w, low), w" % (n, 2 * n))

    def run(x, m):
        bits = x[0].float().view(torch.int32).to(torch.int64) & 0xffffffff
        upper = ((bits + 0x8000) >> 16 << 16) & 0xffffffff
        signed = torch.where(upper >= 2 ** 31, upper - 2 ** 32, upper).to(torch.int32)
        return [x[0].clone(), signed.view(torch.float32).to(torch.bfloat16)]
    return Case(text, run, [Input(d.values([n], "fp32"))], exact=True)


ALONE = ("all_reduce all_gather reduce_scatter broadcast copy_to_tp reduce_from_tp scatter_to_tp gather_from_tp "
         "all_gather_again counted_once")


def alone(d):
    """The ops of several ranks in a group of one process. They return their input, and so does the gradient."""
    name = d.choice(*ALONE.split())
    text = ("local group = require('ps').dist.self() "
            "return ps.ops.%s(x[1], ps.C.ps_group_number(group.c), 1, 0, 0)" % name)
    return Case(text, lambda x, m: x[0].clone(), [d.input(d.shape(1, 3), d.dtype(), True)], exact={"out0"})


ROWS = [
    Row("uniform_", uniform, "uniform_"), Row("normal_", normal, "normal_"), Row("randint_", randint, "randint_"),
    Row("randperm_", randperm, "randperm_"), Row("bernoulli", bernoulli, "bernoulli"),
    Row("dropout", dropout, "dropout", 2), Row("arange_", arange_in_place, "arange_"), Row("arange", arange),
    Row("full, zeros, ones", filled), Row("zeros_like, ones_like", like), Row("scale_by_", scale_by, "scale_by_"),
    Row("sample", sample, "sample"), Row("adam_", adam, "adam_", 2), Row("sgd_", sgd, "sgd_", 2),
    Row("lion_", lion, "lion_"),
    Row("lion8bit_", lion8bit, "lion8bit_"), Row("lamb_", lamb, "lamb_"), Row("muon_", muon, "muon_"),
    Row("adam_schedule_free_", schedule_free, "adam_schedule_free_"),
    Row("master_lerp_", master_lerp, "master_lerp_"),
    Row("rmsprop_", rmsprop, "rmsprop_"),
    Row("adafactor_", adafactor, "adafactor_"),
    Row("adam8bit_, adam_bf16_", small_adam, "adam8bit_ adam_bf16_"),
    Row("remainders", halves, "remainder_split_ remainder_join"),
    Row("a group of one", alone, ALONE),
]
