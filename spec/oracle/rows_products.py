# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: matrix products, losses, normalization, attention, and the gradient rules that scripts can
call."""
import math

import torch
import torch.nn.functional as F

from oracle import Case, Row, lua
from rows_elementwise import exact_gelu

TANH = "tanh"


def size(d):
    return d.choice(1, 2, 3, 4, 5, 7, 8, 16, 17, 33) if not d.chance(0.03) else 0


def matmul(d):
    dtype, m, k, n = d.dtype(), size(d), size(d), size(d)
    lead = [d.int(1, 4) for _ in range(d.int(0, 2))]
    a, b = lead + [m, k], lead + [k, n]
    if d.chance(0.3):
        b = b[len(lead):]
    elif d.chance(0.3):
        a = a[len(lead):]
    elif lead and d.chance(0.3):
        d.choice(a, b)[d.int(0, len(lead) - 1)] = 1
    if d.chance(0.15):
        a = [k]
    if d.chance(0.15):
        b = [k]
    return Case("x[1]:matmul(x[2])", lambda x, _: torch.matmul(x[0], x[1]),
                [d.input(a, dtype, d.chance(0.8)), d.input(b, dtype, d.chance(0.8))],
                device=d.choice("cpu", "cpu", "cpu", "ref"))


def linear(d):
    dtype, i, o, out_in = d.dtype(), size(d) or 3, size(d) or 3, d.chance(0.6)
    lead = d.shape(0, 2)
    bias, residual = d.chance(0.6), d.chance(0.3)
    inputs = [d.input(lead + [i], dtype, True), d.input([o, i] if out_in else [i, o], dtype, True),
              d.input([o], dtype, True) if bias else None, d.input(lead + [o], dtype, True) if residual else None]

    def run(x, m):
        w = x[1] if out_in else x[1].t()
        wide = [t if t is None or t.dtype == torch.float64 else t.float() for t in (x[0], w, x[2], x[3])]
        y = F.linear(wide[0], wide[1], wide[2])  # one rounding to a half type, including the residual's sum
        return (y if x[3] is None else y + wide[3]).to(x[0].dtype)
    text = "ps.F.linear(x[1], x[2], x[3], { out_in = %s, residual = x[4] })" % lua(out_in)
    return Case(text, run, inputs, device=d.choice("cpu", "cpu", "cpu", "ref"))


def mlp(d):
    dtype, c, h, o, out_in = d.dtype(), d.int(1, 17), d.int(1, 33), d.int(1, 17), d.chance(0.5)
    lead = d.shape(0, 2)

    def w(a, b):
        return d.input([b, a] if out_in else [a, b], dtype, True, low=-1, high=1)
    inputs = [d.input(lead + [c], dtype, True), w(c, h), d.input([h], dtype, True) if d.chance(0.7) else None, w(h, o),
              d.input([o], dtype, True) if d.chance(0.7) else None,
              d.input(lead + [o], dtype, True) if d.chance(0.3) else None]

    def run(x, m):
        x0, w1, b1, w2, b2, r = x
        if not out_in:
            w1, w2 = w1.t(), w2.t()
        h = F.linear(x0, w1, b1)
        y = F.linear(exact_gelu(h, TANH) if m.exact else F.gelu(h, approximate=TANH), w2, b2)
        return y if r is None else y + r
    return Case("ps.F.mlp(x[1], x[2], x[3], x[4], x[5], { out_in = %s, residual = x[6] })" % lua(out_in), run, inputs)


def linear_grad(d):
    dtype, n, i, o, out_in = d.dtype(), size(d), size(d) or 2, size(d) or 2, d.chance(0.5)

    def run(x, m):
        a, dy = x[0].double(), x[1].double()
        dw = dy.t() @ a if out_in else a.t() @ dy
        return [dw.to(x[0].dtype), dy.sum(0).to(x[0].dtype)]
    return Case("ps.ops.linear_grad(x[1], x[2], %d)" % out_in, run, [d.input([n, i], dtype), d.input([n, o], dtype)])


def linear_gelu_backward(d):
    dtype, n, h, o, out_in, want = d.dtype(), size(d), size(d) or 2, size(d) or 2, d.chance(0.5), d.chance(0.5)

    def run(x, m):
        dy, w, pre = x
        back = dy.double() @ (w.double() if out_in else w.double().t())
        s = pre.double().requires_grad_()
        with torch.enable_grad():
            g, = torch.autograd.grad(exact_gelu(s, TANH), s, torch.ones_like(s), create_graph=True)
        dpre = back * (g if m.exact else g.detach())
        rounded = dpre.to(pre.dtype)
        return [rounded] + ([rounded.double().sum(0).to(pre.dtype)] if want else [])
    return Case("ps.ops.linear_gelu_backward(x[1], x[2], x[3], %d, %d)" % (out_in, want) if want else
                "(ps.ops.linear_gelu_backward(x[1], x[2], x[3], %d, 0))" % out_in, run,
                [d.input([n, o], dtype), d.input([o, h] if out_in else [h, o], dtype), d.input([n, h], dtype)])


def indices_of(d, shape, rows):
    return d.input(shape, d.choice("int32", "int64"), low=0, high=rows - 1, expand=False)


REDUCTIONS = ("none", "mean", "sum")


def targets(d, shape, classes, ignore):
    t = torch.randint(0, classes, shape, generator=d.gen)
    share = d.choice(0.0, 0.0, 0.3, 0.9)
    t = torch.where(torch.rand(shape, generator=d.gen) < share, torch.full_like(t, ignore), t)
    if d.chance(0.5) and ignore >= -100:
        t = t.int()
    return d.laid_out(t, expand=False)


class Rows(torch.autograd.Function):
    """Cross entropy of rows x [N, V] with targets [N] or -1. Backward uses the saved logarithms of the sums, moved
    by their rounding (differences.SAVED_SUMS)."""

    @staticmethod
    def forward(ctx, x, t, moved):
        lse = torch.logsumexp(x, -1, keepdim=True)
        ctx.save_for_backward(x, t, moved(lse))
        lse = lse + moved(torch.ones_like(lse)) - 1                    # the sum is a rounded number, also in PyTorch
        return torch.where(t < 0, 0.0, (lse - x.gather(-1, t.clamp(0).unsqueeze(-1))).squeeze(-1))

    @staticmethod
    def backward(ctx, dy):
        x, t, lse = ctx.saved_tensors
        hot = F.one_hot(t.clamp(0), x.shape[-1])
        return torch.where((t < 0).unsqueeze(-1), 0.0, (torch.exp(x - lse) - hot) * dy.unsqueeze(-1)), None, None


def loss(x, t, ignore, reduction, moved=None):
    """PyTorch's loss of logits [..., V]. The sum and the mean are computed from fp32 rows, as in psluajit."""
    flat, at = x.reshape(-1, x.shape[-1]), t.reshape(-1).long()
    if moved:
        rows = Rows.apply(flat, torch.where(at == ignore, -1, at), moved)
    else:
        rows = F.cross_entropy(flat, at, ignore_index=ignore, reduction="none")
    if reduction == "none":
        return rows.reshape(t.shape)
    return rows.sum() / ((t != ignore).sum() if reduction == "mean" else 1)


def cross_entropy(d):
    dtype, lead, classes = d.dtype(), d.shape(0, 2), d.int(1, 40)
    ignore, reduction = d.choice(-100, -100, -1, 1), d.choice(*REDUCTIONS)
    x = d.input(lead + [classes], dtype, True, *d.choice((None, None), (-8, 8), (-60, 60)))

    def run(x, m):
        wide = x[0] if x[0].dtype == torch.float64 else x[0].float()               # losses are fp32
        return loss(wide, x[1], ignore, reduction, m.exact and m.change)
    text = "ps.F.cross_entropy(x[1], x[2], { ignore_index = %d, reduction = %s })" % (ignore, lua(reduction))
    return Case(text, run, [x, targets(d, lead, classes, ignore)], device=d.choice("cpu", "cpu", "ref"))


def cross_entropy_backward(d):
    dtype, lead, classes = d.dtype("fp32", "bf16", "fp16"), d.shape(0, 2), d.int(1, 40)
    ignore, reduction = -100, d.int(0, 2)
    x, t = d.values(lead + [classes], dtype), targets(d, lead, classes, ignore)
    lse = torch.logsumexp(x.double(), -1).float()
    dloss = d.values(lead if reduction == 0 else [], "fp32")

    def run(x, m):
        p = torch.exp(x[0].double() - x[2].double().unsqueeze(-1))
        valid = (x[1] != ignore)
        hot = F.one_hot(torch.where(valid, x[1].long(), 0), classes).double()
        scale = x[3].double() / (valid.sum() if reduction == 1 else 1)
        scale = scale.unsqueeze(-1) if reduction == 0 else scale
        return torch.where(valid.unsqueeze(-1), (p - hot) * scale, 0.0).to(x[0].dtype)
    return Case("ps.ops.cross_entropy_backward(x[1], x[2], x[3], x[4], %d, %d)" % (ignore, reduction), run,
                [d.laid_out(x, expand=False), t, d.laid_out(lse, expand=False), d.laid_out(dloss, expand=False)])


def lm_loss(d):
    dtype, lead, c, classes = d.dtype("fp32", "bf16", "fp16"), d.shape(0, 2), d.int(1, 33), d.int(1, 60)
    ignore, reduction = d.choice(-100, -1, 1), d.choice("mean", "sum")
    # The classes are not equal, since the rounding of all probabilities would then be equal and add up.
    inputs = [d.input(lead + [c], dtype, True), d.input([classes, c], dtype, True, expand=False),
              targets(d, lead, classes, ignore)]
    biased = d.chance(0.4)
    if biased:
        inputs.append(d.input([classes], dtype, True, expand=False))

    def run(x, m):
        logits = F.linear(x[0], x[1], x[3] if biased else None)
        y = loss(logits if m.exact else logits.float(), x[2], ignore, reduction, m.exact and m.change)
        return y if m.exact else y.float()
    bias = ", bias = x[4]" if biased else ""
    text = "ps.F.lm_loss(x[1], x[2], x[3], { ignore_index = %d, reduction = %s%s })" % (ignore, lua(reduction), bias)
    return Case(text, run, inputs)


def layer_norm(d):
    dtype, lead, c = d.dtype(), d.shape(0, 3), d.size() or 3
    eps = d.choice(1e-5, 1e-5, 1e-12, 1e-3)
    w = d.input([c], dtype, True) if d.chance(0.7) else None
    b = d.input([c], dtype, True) if w and d.chance(0.7) else None
    x = d.input(lead + [c], dtype, True, *d.choice((None, None), (None, None), (99, 101)))

    def run(x, m):
        if not m.exact or c == 1:
            return F.layer_norm(x[0], (c,), x[1], x[2], eps)
        apart = x[0] - x[0].mean(-1, True)  # PyTorch's moments of float64 are off by many units in the last place
        y = apart * torch.rsqrt(apart.square().mean(-1, True) + eps)
        y = y if x[1] is None else y * x[1]
        return y if x[2] is None else y + x[2]
    return Case("ps.F.layer_norm(x[1], x[2], x[3], %s)" % lua(eps), run, [x, w, b],
                device=d.choice("cpu", "cpu", "ref"))


def rms_norm(d):
    dtype, lead, c = d.dtype(), d.shape(0, 3), d.size() or 3
    eps = d.choice(1e-6, 1e-5, 1e-3)
    w = d.input([c], dtype, True) if d.chance(0.7) else None

    def run(x, m):
        wide = x[0] if x[0].dtype == torch.float64 else x[0].float()        # one rounding to a half type
        y = wide * m.saved(torch.rsqrt, lambda r: -0.5 * r ** 3, wide.square().mean(-1, True) + eps)
        return (y if x[1] is None else y * x[1]).to(x[0].dtype)
    return Case("ps.F.rms_norm(x[1], x[2], %s)" % lua(eps), run, [d.input(lead + [c], dtype, True), w],
                device=d.choice("cpu", "cpu", "ref"))


def norm_backward(d):
    """layer_norm_backward and rms_norm_backward, which scripts can call."""
    dtype, lead, c, centred = d.dtype("fp32", "bf16", "fp16"), d.shape(0, 2), d.size() or 3, d.chance(0.5)
    x, dy = d.values(lead + [c], dtype), d.values(lead + [c], dtype)
    with_w, with_add = d.chance(0.6), d.chance(0.4)
    mean = x.double().mean(-1)
    rstd = torch.rsqrt((x.double() - (mean.unsqueeze(-1) if centred else 0)).square().mean(-1) + 1e-5)
    inputs = [d.laid_out(dy, expand=False), d.laid_out(x, expand=False), d.input([c], dtype) if with_w else None]
    inputs += [d.laid_out(mean.float(), expand=False)] if centred else []
    inputs += [d.laid_out(rstd.float(), expand=False), d.input(lead + [c], dtype) if with_add else None]

    def run(x, m):
        dy, v, w = x[0].double(), x[1].double(), x[2]
        mu, r = (x[3].double(), x[4].double()) if centred else (0, x[3].double())
        add = x[-1]
        hat = (v - (mu.unsqueeze(-1) if centred else 0)) * r.unsqueeze(-1)
        g = dy if w is None else dy * w.double()
        dx = g - hat * (g * hat).mean(-1, True) - (g.mean(-1, True) if centred else 0)
        dx = dx * r.unsqueeze(-1)
        dx = (dx if add is None else dx + add.double()).to(x[0].dtype)
        if w is None:
            return [dx]
        dw, db = (dy * hat).reshape(-1, c).sum(0), dy.reshape(-1, c).sum(0)
        return [dx] + [t.to(x[0].dtype) for t in ((dw, db) if centred else (dw,))]
    name = "layer_norm_backward" if centred else "rms_norm_backward"
    call = "ps.ops.%s(%s, %d)" % (name, ", ".join("x[%d]" % (i + 1) for i in range(len(inputs))), with_w)
    return Case(call if with_w else "(%s)" % call, run, inputs)


class Attention(torch.autograd.Function):
    """softmax(scale q k^T + bias) v over the visible keys. A query that sees no key returns 0. Backward uses the
    rounded y and the logarithms of the sums, and the difference of two rounded products (Dao et al., FlashAttention,
    2022). `moved`, if it is given, moves them by their rounding."""

    @staticmethod
    def forward(ctx, q, k, v, seen, scale, moved, bias):
        s = q @ k.transpose(-1, -2) * scale + bias
        seen = seen.expand(s.shape)
        some = seen.any(-1, keepdim=True)
        lse = torch.logsumexp(torch.where(some, torch.where(seen, s, -math.inf), 0.0), -1, keepdim=True)
        y = torch.where(seen, torch.exp(s - lse), 0.0) @ v
        ctx.save_for_backward(q, k, v, seen, bias, *((moved[0](y), moved[1](lse)) if moved else (y, lse)))
        ctx.scale, ctx.moved = scale, moved[1] if moved else (lambda t: t)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, seen, bias, y, lse = ctx.saved_tensors
        p = torch.where(seen, torch.exp(q @ k.transpose(-1, -2) * ctx.scale + bias - lse), 0.0)
        ds = p * (ctx.moved(dy @ v.transpose(-1, -2)) - ctx.moved((dy * y).sum(-1, True))) * ctx.scale
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy, None, None, None, None


def visible(T, S, causal, mask, window=0):
    """Returns bool [B or 1, H or 1, T, S], which is true for the keys that a query sees."""
    seen = torch.ones(1, 1, T, S, dtype=torch.bool)
    if causal:
        last, key = torch.arange(T).reshape(T, 1) + (S - T), torch.arange(S).reshape(1, S)
        seen = seen & (key <= last) & (key > last - (window or S + T))
    if mask is None:
        return seen
    if mask.ndim == 2:
        return seen & mask[:, None, None, :]
    return seen & (mask if mask.dtype == torch.bool else mask > -1e30)


def attend(q, k, v, mask, causal, scale, mode, window=0):
    """Computes attention with the formula in the reference, and otherwise with PyTorch's own op (whose is_causal
    aligns differently, so it gets a mask)."""
    T, S, shared = q.shape[-2], k.shape[-2], q.shape[1] // k.shape[1]
    seen = visible(T, S, causal, mask, window)
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    added = mask is not None and mask.dtype != torch.bool
    bias = torch.where(seen, mask.to(q.dtype), 0.0) if added else torch.zeros((), dtype=q.dtype)
    if mode.exact:
        return Attention.apply(q, k, v, seen, scale, mode.move_rounded and (mode.move_rounded, mode.change), bias)
    if mask is None and not causal:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    both = torch.where(seen, bias, -math.inf) if added else seen
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=both.expand(q.shape[0], -1, T, S), scale=scale)
    return torch.where(seen.any(-1, keepdim=True), y, torch.zeros((), dtype=y.dtype))


def attention(d):
    dtype, b, h, t, s, width = d.dtype(), d.int(1, 3), d.int(1, 3), d.int(1, 12), d.int(1, 12), d.choice(1, 2, 3, 4, 8,
                                                                                                         16, 17)
    if d.chance(0.2):
        t, s = d.int(1, 70), d.int(1, 70)
    causal, masked = d.chance(0.5), d.chance(0.4)
    scale, shared = d.choice(None, None, 0.3, 1.0), d.choice(1, 1, 2, 3)
    window = d.int(1, s + 3) if causal and d.chance(0.5) else None
    q = d.input([b, h * shared, t, width], dtype, True)
    # The keys are not equal, since the rounding of all weights would then be equal and add up.
    k, v = (d.input([b, h, s, width], dtype, True, expand=False) for _ in "kv")
    mask = None
    if masked and d.chance(0.5):
        mask = d.input([b, s], "bool")
    elif masked:
        shape = [d.choice(1, b), d.choice(1, h * shared), d.choice(1, t), s]
        mask = d.input(shape, d.choice("bool", dtype, "fp64" if dtype == "fp64" else "fp32"))
    keys = "key_" if mask is not None and mask.base.dim() == 2 else ""
    options = "causal = %s, scale = %s, window = %s, %smask = x[4]" % (lua(causal), lua(scale), lua(window), keys)
    text = "ps.F.attention(x[1], x[2], x[3], { %s })" % options

    def run(x, m):
        return attend(*x, causal, scale or 1 / math.sqrt(width), m, window)
    return Case(text, run, [q, k, v, mask], device=d.choice("cpu", "cpu", "cpu", "ref"))


def attention_packed(d):
    dtype, b, t, heads, width = d.dtype(), d.int(1, 3), d.int(1, 12), d.int(1, 3), d.choice(1, 2, 4, 8, 16)
    if d.chance(0.2):
        t = d.int(1, 70)
    causal, masked = d.chance(0.6), d.chance(0.3)
    qkv = d.input([b, t, 3 * heads * width], dtype, True)
    mask = d.input([b, t], "bool") if masked else None

    def run(x, m):
        q, k, v = x[0].reshape(b, t, 3, heads, width).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, x[1], causal, 1 / math.sqrt(width), m)
        return y.transpose(1, 2).reshape(b, t, heads * width)
    return Case("ps.F.attention_packed(x[1], %d, { causal = %s, mask = x[2] })" % (heads, lua(causal)), run,
                [qkv, mask])


def attention_backward(d):
    """attention_backward and attention_packed_backward, which scripts can call."""
    dtype, b, h, t, width = d.dtype("fp32", "bf16", "fp16"), d.int(1, 2), d.int(1, 3), d.int(1, 12), d.choice(2, 4, 8)
    causal, packed = d.chance(0.5), d.chance(0.5)
    s = t if packed else d.int(1, 12)
    scale = 1 / math.sqrt(width)
    q, k, v = d.values([b, h, t, width], dtype), d.values([b, h, s, width], dtype), d.values([b, h, s, width], dtype)
    dy = d.values([b, h, t, width], dtype)
    scores = (q.double() @ k.double().transpose(-1, -2)) * scale
    if causal:
        scores = torch.where(torch.arange(s).reshape(1, s) <= torch.arange(t).reshape(t, 1) + (s - t), scores,
                             -math.inf)
    lse = torch.logsumexp(scores, -1).float()
    y = Attention.apply(q.double(), k.double(), v.double(), visible(t, s, causal, None), scale, None,
                        torch.zeros(())).to(q.dtype)

    def run(x, m):
        if packed:
            g, qkv = x[0].double().reshape(b, t, h, width).transpose(1, 2), x[1].double()
            a, k_, v_ = qkv.reshape(b, t, 3, h, width).permute(2, 0, 3, 1, 4)
            y_ = x[2].double().reshape(b, t, h, width).transpose(1, 2)
        else:
            g, a, k_, v_, y_ = (z.double() for z in x[:5])
        p = torch.exp((a @ k_.transpose(-1, -2)) * scale - x[-1].double().unsqueeze(-1))
        p = torch.where(visible(t, s, causal, None), p, 0.0)
        dp = g @ v_.transpose(-1, -2)
        ds = p * (dp - (g * y_).sum(-1, True)) * scale
        grads = ds @ k_, ds.transpose(-1, -2) @ a, p.transpose(-1, -2) @ g
        if packed:
            joined = torch.stack(grads).permute(1, 3, 0, 2, 4).reshape(b, t, 3 * h * width)
            return joined.to(x[1].dtype)
        return [z.to(x[1].dtype) for z in grads]
    if packed:
        qkv = torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).reshape(b, t, 3 * h * width)
        rows = [z.transpose(1, 2).reshape(b, t, h * width) for z in (dy, y)]
        return Case("ps.ops.attention_packed_backward(x[1], x[2], nil, x[3], x[4], %d, %d, 0)" % (h, causal), run,
                    [d.laid_out(z.contiguous(), expand=False) for z in (rows[0], qkv, rows[1], lse)])
    inputs = [d.laid_out(z.contiguous(), expand=False) for z in (dy, q, k, v, y, lse)]
    return Case("ps.ops.attention_backward(x[1], x[2], x[3], x[4], nil, x[5], x[6], %s, %d)" % (lua(scale), causal),
                run, inputs)


def rope(d):
    """Rotary embedding with real angles, and with any numbers in place of cosines and sines."""
    dtype, b, h, t, width = d.dtype(), d.int(1, 3), d.int(1, 3), d.int(1, 12), d.choice(2, 3, 4, 8, 17, 64)
    half, inverse = d.choice(width // 2, width // 2, d.int(0, width // 2)), d.chance(0.3)
    x, wide = d.input([b, h, t, width], dtype, True), "fp64" if dtype == "fp64" else "fp32"
    cos, sin = (d.input([rows, t, half], wide) for rows in [d.choice(1, b)] * 2)

    def run(x, m):
        v = x[0] if x[0].dtype == torch.float64 else x[0].float()           # one rounding to a half type
        c, s = x[1].to(v.dtype)[:, None], x[2].to(v.dtype)[:, None] * (-1 if inverse else 1)
        first, second, rest = v[..., :half], v[..., half:2 * half], v[..., 2 * half:]
        return torch.cat((first * c - second * s, second * c + first * s, rest), -1).to(x[0].dtype)
    code = "ps.ops.rope(x[1], x[2], x[3], 1)" if inverse else "ps.F.rope(x[1], x[2], x[3])"
    return Case(code, run, [x, cos, sin], device=d.choice("cpu", "cpu", "ref"))


# The products of several ranks, in the group of this process, which lives as long as the process.
GROUP = ("local g = package.loaded.alone or require('ps').dist.self() package.loaded.alone = g "
         "local n = ps.C.ps_group_number(g.c) return ")


def of_ranks(d):
    dtype, n, i, o, out_in, column = d.dtype(), d.int(1, 9), size(d) or 3, size(d) or 3, d.chance(0.6), d.chance(0.5)
    inputs = [d.input([n, i], dtype, True), d.input([o, i] if out_in else [i, o], dtype, True),
              d.input([o], dtype, True) if column and d.chance(0.6) else None]

    def run(x, m):
        wide = [t if t is None or t.dtype == torch.float64 else t.float() for t in x]
        return F.linear(wide[0], wide[1] if out_in else wide[1].t(), wide[2]).to(x[0].dtype)
    how = "n, 1, 0, 0, %d, %d" % (out_in, d.int(1, 8))
    if not column:
        return Case(GROUP + "ps.ops.row_linear(x[1], x[2], %s)" % how, run, inputs)
    several = d.int(1, 3)                                             # weights of the same rows
    for _ in range(1, several):
        k = size(d) or 1
        inputs += [d.input([k, i] if out_in else [i, k], dtype, True),
                   d.input([k], dtype, True) if d.chance(0.5) else None]

    def run_all(x, m):
        y = [run([x[0], x[1 + 2 * k], x[2 + 2 * k]], m) for k in range(several)]
        return y if several > 1 else y[0]
    given = ", ".join("x[%d]" % k if k <= len(inputs) else "nil" for k in range(1, 8))
    names = ", ".join("abc"[:several])                                # the others are nil
    text = "(function(%s) return %s end)(ps.ops.column_linear(%s, %s, %d))" % (names, names, given, how, d.int(0, 1))
    return Case(GROUP + text, run_all, inputs)


def vocabulary(d):
    """Draws a rank's shard of the vocabulary and the logits of all other tokens: targets, the rows' coefficients and
    the probability mass of the tokens."""
    n, words, padding = d.int(1, 9), d.int(1, 40), d.int(0, 3)
    first, behind, dtype = d.int(0, 9), d.int(0, 9), d.dtype("fp32", "bf16", "fp16", "fp64")
    wide = "fp64" if dtype == "fp64" else "fp32"
    return n, words, words + padding, first, first + words + behind, dtype, wide


def logit_stats(d):
    n, words, columns, first, total, dtype, wide = vocabulary(d)
    x, t = d.input([n, columns], dtype, False, -8, 8, expand=False), targets(d, [n], total, -100)
    mass = d.input([columns], wide, False, 0, 1, expand=False) if d.chance(0.5) else None

    def run(x, m):
        own, at = x[0].to(x[0].dtype if x[0].dtype == torch.float64 else torch.float32)[:, :words], x[1].long() - first
        here = (at >= 0) & (at < words)
        top = own.max(-1).values
        hit = here & (own.argmax(-1) == at)
        rows = [top, torch.exp(own - top[:, None]).sum(-1) * torch.where(hit, -1, 1),
                torch.where(here, own.gather(1, at.clamp(0, words - 1)[:, None])[:, 0], 0)]
        return torch.stack(rows + ([] if x[2] is None else [(own * x[2][:words]).sum(-1)]))
    return Case("ps.ops.logit_stats(x[1], x[2], x[3], %d, %d)" % (first, words), run, [x, t, mass])


def parallel_lm_loss(d):
    """A group of one rank, which has the whole vocabulary. The last columns of w can be padding."""
    n, words, c, dtype = d.int(1, 9), d.int(1, 60), d.int(1, 33), d.dtype("fp32", "bf16", "fp16")
    inputs = [d.input([n, c], dtype, True, expand=False), d.input([words, c], dtype, True, expand=False),
              targets(d, [n], words, -100), d.input([3, n], "fp32", False, 0.1, 1, expand=False),
              d.input([words], dtype, True, expand=False) if d.chance(0.5) else None,
              d.input([words], "fp32", False, 0, 1, expand=False) if d.chance(0.5) else None]

    def run(x, m):
        logits = F.linear(x[0], x[1], x[4])
        logits = logits if m.exact else logits.float()
        at = x[2].long()
        target = torch.where(at >= 0, logits.gather(1, at.clamp(0)[:, None])[:, 0], 0)
        rows = x[3][0] * torch.logsumexp(logits, -1) - x[3][1] * target
        if x[5] is not None:
            rows = rows - x[3][2] * (logits * x[5]).sum(-1)
        return rows.sum()
    return Case(GROUP + "(ps.ops.parallel_lm_loss(x[1], x[2], x[3], x[4], x[5], x[6], n, 1, 0, 0, %d, 0, %d))"
                % (d.int(0, 1), words), run, inputs)


def column_linear_grad(d):
    dtype, n, i, out_in, several = d.dtype(), d.int(1, 9), size(d) or 2, d.chance(0.5), d.int(1, 3)
    want = [d.choice("", "w", "wb") for _ in range(several)]
    at = [0] + [2 + 2 * k for k in range(1, several)]                 # positions of each dy among the inputs
    inputs = [None] * (4 + 2 * (several - 1))
    for k in range(several):
        o = size(d) or 2
        weight = d.input([o, i] if out_in else [i, o], dtype)
        inputs[at[k]], inputs[at[k] + 1] = d.input([n, o], dtype), weight
    if any(want):
        inputs[2 + d.int(0, 1)] = d.input([n, i], dtype)              # x or full, which are the same on one rank

    def run(x, m):
        wide = [None if t is None else t.double() for t in x]
        a = wide[2] if wide[2] is not None else wide[3]
        all_ = [sum(wide[p] @ (wide[p + 1] if out_in else wide[p + 1].t()) for p in at)]
        for k, p in enumerate(at):
            if "w" in want[k]:
                all_.append(wide[p].t() @ a if out_in else a.t() @ wide[p])
            if "b" in want[k]:
                all_.append(wide[p].sum(0))
        return [t.to(x[0].dtype) for t in all_] if any(want) else all_[0].to(x[0].dtype)
    bits = [sum((name in w) << k for k, w in enumerate(want)) for name in "wb"]
    given = ", ".join("x[%d]" % k if k <= len(inputs) else "nil" for k in range(1, 9))
    call = "ps.ops.column_linear_grad(%s, n, 1, 0, 0, %d, %d, %d, %d)" % (given, out_in, d.int(1, 8), bits[0], bits[1])
    names = [name for k, w in enumerate(want) for name in (["w%d" % k] if "w" in w else [])
             + (["b%d" % k] if "b" in w else [])]
    heads = ", ".join(["dx"] + ["%s%d" % (c, k) for k in range(3) for c in "wb"])      # those that nobody wants are nil
    call = "(function(%s) return %s end)(%s)" % (heads, ", ".join(["dx"] + names), call)
    return Case(GROUP + call, run, inputs)


ROWS = [
    Row("products of several ranks", of_ranks, "column_linear row_linear", 2),
    Row("column_linear_grad", column_linear_grad, "column_linear_grad"),
    Row("logit_stats", logit_stats, "logit_stats"), Row("parallel_lm_loss", parallel_lm_loss,
                                                        "parallel_lm_loss logit_loss", 2),
    Row("matmul", matmul, "matmul", 5), Row("linear", linear, "linear", 4), Row("mlp", mlp, "mlp", 2),
    Row("linear_grad", linear_grad, "linear_grad"), Row("linear_gelu_backward", linear_gelu_backward,
                                                        "linear_gelu_backward"),
    Row("cross_entropy", cross_entropy, "cross_entropy", 3), Row("lm_loss", lm_loss, "lm_loss", 2),
    Row("cross_entropy_backward", cross_entropy_backward, "cross_entropy_backward"),
    Row("layer_norm", layer_norm, "layer_norm", 3), Row("rms_norm", rms_norm, "rms_norm", 3),
    Row("norm backward", norm_backward, "layer_norm_backward rms_norm_backward", 2),
    Row("attention", attention, "attention", 4), Row("attention_packed", attention_packed, "attention_packed", 2),
    Row("rope", rope, "rope", 2), Row("attention backward", attention_backward,
                                      "attention_backward attention_packed_backward", 2),
]
for each in ROWS:
    each.mixes = True
