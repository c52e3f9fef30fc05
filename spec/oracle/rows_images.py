# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: convolution, pooling, padding, interpolation, norms over channels."""
import math

import torch
import torch.nn.functional as F

from oracle import Case, Row, lua


def wide(t):
    """Converts half types to fp32, so that results are rounded once."""
    return t if t is None or t.dtype == torch.float64 else t.float()


def spaces(d):
    return d.choice(1, 2, 2, 2)


def numbers(d, n, low, high):
    """Returns a number, or a list with one number for each of n dimensions, and the list."""
    value = d.int(low, high)
    if n == 1 or d.chance(0.5):
        return value, [value] * n
    values = [d.int(low, high) for _ in range(n)]
    return values, values


def device(d):
    return d.choice("cpu", "cpu", "cpu", "ref")


def conv(d):
    dtype, n, groups = d.dtype(), spaces(d), d.choice(1, 1, 1, 2, 3)
    batch, c, o = d.int(1, 4), groups * d.choice(1, 2, 3, 5, 8, 16), groups * d.choice(1, 2, 3, 7, 8, 16)
    if d.chance(0.15):
        groups, o = c, c * d.int(1, 2)
    k, ks = numbers(d, n, 1, 4)
    dilation, ds = numbers(d, n, 1, 3)
    stride, ss = numbers(d, n, 1, 3)
    padding, ps = numbers(d, n, 0, 3)
    if d.chance(0.25):
        padding, ps, stride, ss = d.choice("same", "valid"), [0] * n, 1, [1] * n
    size = [max((ks[i] - 1) * ds[i] + 1 - 2 * ps[i], 1) + d.choice(0, 1, 2, 3, 5, 9) for i in range(n)]
    x = d.input(([batch] if d.chance(0.9) else []) + [c] + size, dtype, True)
    w = d.input([o, c // groups] + ks, dtype, True, low=-1, high=1)
    b = d.input([o], dtype, True) if d.chance(0.6) else None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    fn = F.conv1d if n == 1 else F.conv2d

    def run(x, m):
        y = fn(wide(x[0]), wide(x[1]), wide(x[2]), ss, padding if isinstance(padding, str) else ps, ds, groups)
        return y.to(x[0].dtype)
    return Case("ps.F.conv%dd(x[1], x[2], x[3], %s)" % (n, lua(options)), run, [x, w, b], device=device(d))


def conv_transpose(d):
    dtype, n, groups = d.dtype(), spaces(d), d.choice(1, 1, 2, 3)
    batch, c, o = d.int(1, 4), groups * d.choice(1, 2, 3, 8), groups * d.choice(1, 2, 3, 8)
    k, ks = numbers(d, n, 1, 4)
    dilation, ds = numbers(d, n, 1, 2)
    stride, ss = numbers(d, n, 1, 3)
    size = [d.choice(1, 2, 3, 5, 8) for _ in range(n)]
    more = [d.int(0, ss[i] - 1) for i in range(n)]
    ps = [d.int(0, 2) for _ in range(n)]
    for i in range(n):
        while (size[i] - 1) * ss[i] + (ks[i] - 1) * ds[i] + 1 - 2 * ps[i] + more[i] < 1 or \
                (size[i] - 1) * ss[i] + (ks[i] - 1) * ds[i] + 1 - 2 * ps[i] < 1:
            ps[i] -= 1
    x = d.input(([batch] if d.chance(0.9) else []) + [c] + size, dtype, True)
    w = d.input([c, o // groups] + ks, dtype, True, low=-1, high=1)
    b = d.input([o], dtype, True) if d.chance(0.6) else None
    options = {"stride": stride, "padding": ps, "output_padding": more, "dilation": dilation, "groups": groups}
    fn = F.conv_transpose1d if n == 1 else F.conv_transpose2d

    def run(x, m):
        y = fn(wide(x[0]), wide(x[1]), wide(x[2]), ss, ps, more, groups, ds)
        return y.to(x[0].dtype)
    return Case("ps.F.conv_transpose%dd(x[1], x[2], x[3], %s)" % (n, lua(options)), run, [x, w, b], device=device(d))


def windows(d, n):
    """Draws kernel, stride, padding, dilation and the size of an input that has room for them."""
    k, ks = numbers(d, n, 1, 4)
    stride, ss = numbers(d, n, 1, 3)
    dilation, ds = numbers(d, n, 1, 2)
    ps = [d.int(0, ks[i] // 2) for i in range(n)]
    least = [max((ks[i] - 1) * ds[i] + 1 - 2 * ps[i], ds[i]) for i in range(n)]  # no window consists of padding only
    size = [least[i] + d.choice(0, 1, 2, 3, 5, 9) for i in range(n)]
    return k, ks, stride, ss, dilation, ds, ps, size


def images(d, n, size, dtype, special=0.0):
    lead = [d.int(1, 3)] if d.chance(0.85) else []
    return d.input(lead + [d.int(1, 5)] + size, dtype, True, special=special)


def max_pool(d):
    dtype, n = d.dtype(), spaces(d)
    k, ks, stride, ss, dilation, ds, ps, size = windows(d, n)
    options = {"stride": stride, "padding": ps, "dilation": dilation, "ceil_mode": d.chance(0.3)}
    indices = d.chance(0.5)
    if indices:
        options["return_indices"] = True
    fn = F.max_pool1d if n == 1 else F.max_pool2d

    def run(x, m):
        y = fn(x[0], ks, ss, ps, ds, options["ceil_mode"], indices)
        return list(y) if indices else y
    return Case("ps.F.max_pool%dd(x[1], %s, %s)" % (n, lua(k), lua(options)), run, [images(d, n, size, dtype, 0.1)],
                exact={"out0", "out1"}, device=device(d))


def avg_pool(d):
    dtype, n = d.dtype(), spaces(d)
    k, ks, stride, ss, _, _, ps, _ = windows(d, n)
    size = [max(ks[i] - 2 * ps[i], 1) + d.choice(0, 1, 2, 3, 5, 9) for i in range(n)]
    options = {"stride": stride, "padding": ps, "ceil_mode": d.chance(0.3), "count_include_pad": d.chance(0.5)}
    more = {}
    if n == 2 and d.chance(0.2):
        more["divisor_override"] = d.int(1, 7)
    fn = F.avg_pool1d if n == 1 else F.avg_pool2d

    def run(x, m):
        y = fn(wide(x[0]), ks, ss, ps, options["ceil_mode"], options["count_include_pad"], *more.values())
        return y.to(x[0].dtype)
    return Case("ps.F.avg_pool%dd(x[1], %s, %s)" % (n, lua(k), lua({**options, **more})), run,
                [images(d, n, size, dtype)],
                device=device(d))


def adaptive(d):
    dtype, n, largest = d.dtype(), spaces(d), d.chance(0.4)
    size, out = [d.choice(1, 2, 3, 5, 8, 17) for _ in range(n)], [d.choice(1, 2, 3, 5, 7) for _ in range(n)]
    name = "adaptive_%s_pool%dd" % ("max" if largest else "avg", n)

    def run(x, m):
        return getattr(F, name)(x[0] if largest else wide(x[0]), out).to(x[0].dtype)
    return Case("ps.F.%s(x[1], %s)" % (name, lua(out if n > 1 else out[0])), run, [images(d, n, size, dtype)],
                exact={"out0"} if largest else False, device=device(d))


def pad(d):
    mode = d.choice("constant", "constant", "reflect", "replicate", "circular")
    if mode == "constant":
        shape = [s or 1 for s in d.shape(1, 4)]
        amounts = [d.int(-1 if shape[-1 - i // 2] > 2 else 0, 3) for i in range(2 * d.int(1, len(shape)))]
        value = d.choice(0, 1.5, -3)
        return Case("ps.F.pad(x[1], %s, \"constant\", %s)" % (lua(amounts), lua(value)),
                    lambda x, m: F.pad(x[0], amounts, value=value), [d.input(shape, d.dtype(), True, expand=False)],
                    exact={"out0", "grad0"}, device=device(d))
    n = spaces(d)
    size = [d.choice(2, 3, 5, 8, 17) for _ in range(n)]
    most = {"reflect": -1, "circular": 0, "replicate": 2}[mode]
    amounts = [d.int(0, size[n - 1 - i // 2] + most) for i in range(2 * n)]

    def run(x, m):
        return F.pad(x[0], amounts, mode)
    return Case("ps.F.pad(x[1], %s, %s)" % (lua(amounts), lua(mode)), run,
                [d.input([d.int(1, 3), d.int(1, 4)] + size, d.dtype("fp32", "fp32", "fp64"), True)], exact={"out0"},
                device=device(d))


def interpolate(d):
    n, dtype = spaces(d), d.dtype()
    size = [d.choice(1, 2, 3, 5, 8, 17) for _ in range(n)]
    mode = d.choice("nearest", "nearest-exact", "linear", "linear", "area")
    mode = "bilinear" if mode == "linear" and n == 2 else mode
    options = {"mode": mode}
    if d.chance(0.5):
        options["size"] = [d.choice(1, 2, 3, 6, 9, 12) for _ in range(n)]
    else:
        options["scale_factor"] = [d.choice(1.0, 2.0, 3.0, 0.5, 1.5, 2.4) for _ in range(n)]
        for i in range(n):
            while math.floor(size[i] * options["scale_factor"][i]) < 1:
                options["scale_factor"][i] *= 2
        if d.chance(0.3):
            options["recompute_scale_factor"] = True
    if "linear" in mode and d.chance(0.6):
        options["align_corners"] = d.chance(0.6)

    def run(x, m):
        if mode.startswith("nearest") and m.exact:              # PyTorch computes positions in the input's type
            return F.interpolate(x[0].float(),
                                 **options).to(x[0].dtype) if not x[0].requires_grad else Nearest.apply(x[0], options)
        return F.interpolate(wide(x[0]), **options).to(x[0].dtype)
    if mode.startswith("nearest") and dtype == "fp64":
        dtype = "fp32"
    return Case("ps.F.interpolate(x[1], %s)" % lua(options), run,
                [d.input([d.int(1, 3), d.int(1, 4)] + size, dtype, True)], device=device(d))


class Nearest(torch.autograd.Function):
    """Interpolates float64 at the positions that float32 computes."""

    @staticmethod
    def forward(ctx, x, options):
        places = torch.arange(math.prod(x.shape[2:]), dtype=torch.float32).reshape([1, 1] + list(x.shape[2:]))
        index = F.interpolate(places, **options).long()
        ctx.shape = x.shape
        y = x.flatten(2).gather(2, index.flatten(2).expand(x.shape[0], x.shape[1], -1))
        ctx.save_for_backward(index)
        return y.reshape(list(x.shape[:2]) + list(index.shape[2:]))

    @staticmethod
    def backward(ctx, dy):
        index, = ctx.saved_tensors
        shape = ctx.shape
        dx = torch.zeros(shape[0], shape[1], math.prod(shape[2:]), dtype=dy.dtype)
        dx = dx.scatter_add(2, index.flatten(2).expand(shape[0], shape[1], -1), dy.flatten(2))
        return dx.reshape(shape), None


def channels(d):
    shape = [d.int(2, 5), d.choice(1, 2, 4, 6, 8)] + [d.choice(1, 2, 3, 5, 17) for _ in range(d.int(0, 3))]
    dtype, affine = d.dtype(), d.chance(0.7)
    w, b = (d.input([shape[1]], dtype, True), d.input([shape[1]], dtype, True)) if affine else (None, None)
    return shape, d.input(shape, dtype, True), w, b, d.choice(1e-5, 1e-3)


def normalised(x, dims, w, b, eps):
    """Normalizes in float64, in which PyTorch's moments are off by many units in the last place."""
    apart = x - x.mean(dims, True)
    y = apart * torch.rsqrt(apart.square().mean(dims, True) + eps)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return y if w is None else y * w.reshape(shape) + b.reshape(shape)


def batch_norm(d):
    shape, x, w, b, eps = channels(d)
    momentum, training = d.choice(0.1, 0.3, 1.0), d.chance(0.7)
    dtype = "fp64" if x.base.dtype == torch.float64 else "fp32"
    mean = d.input([shape[1]], dtype, low=-1, high=1, plain=1.0)
    var = d.input([shape[1]], dtype, low=0.5, high=2, plain=1.0)
    options = {"training": training, "momentum": momentum, "eps": eps}

    def run(x, m):
        if training and m.exact:
            dims = [0] + list(range(2, len(shape)))
            count = math.prod(shape) / shape[1]
            with torch.no_grad():
                v = x[0].var(dims, correction=0) * count / (count - 1)
                moved = [x[3] * (1 - momentum) + x[0].mean(dims) * momentum, x[4] * (1 - momentum) + v * momentum]
            return [normalised(x[0], dims, x[1], x[2], eps)] + moved
        mean, var = x[3].clone(), x[4].clone()
        # contiguous: PyTorch 2.15's gradients are wrong if y and its gradient have unlike strides.
        y = F.batch_norm(wide(x[0]).contiguous(), mean, var, wide(x[1]), wide(x[2]), training, momentum, eps)
        return [y.to(x[0].dtype), mean, var]
    text = "local y = ps.F.batch_norm(x[1], x[4], x[5], x[2], x[3], %s) return y, x[4], x[5]" % lua(options)
    return Case(text, run, [x, w, b, mean, var], device=device(d))


def group_norm(d):
    shape, x, w, b, eps = channels(d)
    groups = d.choice(*[g for g in range(1, shape[1] + 1) if shape[1] % g == 0])

    def run(x, m):
        if not m.exact:
            return F.group_norm(wide(x[0]), groups, wide(x[1]), wide(x[2]), eps).to(x[0].dtype)
        parts = x[0].reshape(shape[0], groups, -1)
        y = normalised(parts, [2], None, None, eps).reshape(shape)
        by = [1, -1] + [1] * (len(shape) - 2)
        return y if x[1] is None else y * x[1].reshape(by) + x[2].reshape(by)
    return Case("ps.F.group_norm(x[1], %d, x[2], x[3], %s)" % (groups, lua(eps)), run, [x, w, b], device=device(d))


ROWS = [
    Row("conv", conv, "conv conv_weight conv_transpose", 5), Row("conv_transpose", conv_transpose, "conv_transpose", 3),
    Row("max_pool", max_pool, "max_pool max_pool_backward", 2), Row("avg_pool", avg_pool, "resample", 2),
    Row("adaptive pool", adaptive, "resample max_pool", 2), Row("pad", pad, "pad resample", 2),
    Row("interpolate", interpolate, "resample", 2),
    Row("batch_norm", batch_norm, "channel_norm channel_norm_backward", 3),
    Row("group_norm", group_norm, "channel_norm channel_norm_backward", 3),
]
for each in ROWS:
    each.mixes = each.name not in ("max_pool", "pad")
