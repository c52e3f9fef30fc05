# SPDX-License-Identifier: BSD-3-Clause
"""Losses that are composed of other ops (lua/ps/tensor/losses.lua), such as ps.F.mse_loss, class weights, and
smoothed labels."""
import torch
import torch.nn.functional as F

from oracle import Case, Row, lua

REDUCTIONS = ("none", "mean", "sum")
# each loss is a chain of roundings to its type, where PyTorch has one kernel
SLACK = {"fp32": 2e-6, "fp64": 1e-14}


def shape_of(d):
    return [n or 1 for n in d.shape(1, 3, 400)]


def chosen(d):
    return d.dtype("fp32", "fp32", "fp64"), d.choice(*REDUCTIONS)


def tolerance(dtype):
    return {"slack": SLACK[dtype], "absolute": SLACK[dtype]}


def of_differences(name, fn):
    def draw(d):
        (dtype, reduction), shape = chosen(d), shape_of(d)
        return Case('ps.F.%s(x[1], x[2], { reduction = "%s" })' % (name, reduction), lambda x, m: fn(x[0], x[1],
            reduction=reduction),
                    [d.input(shape, dtype, True), d.input(shape, dtype, d.chance(0.5))], **tolerance(dtype))
    return draw


def bce(d):
    (dtype, reduction), shape = chosen(d), shape_of(d)
    return Case('ps.F.binary_cross_entropy(x[1], x[2], { reduction = "%s" })' % reduction,
                lambda x, m: F.binary_cross_entropy(x[0], x[1], reduction=reduction),
                [d.input(shape, dtype, True, low=0.01, high=0.99), d.input(shape, dtype, False, low=0, high=1)],
                **tolerance(dtype))


def bce_with_logits(d):
    (dtype, reduction), shape = chosen(d), shape_of(d)
    inputs = [d.input(shape, dtype, True, low=-15, high=15), d.input(shape, dtype, False, low=0, high=1)]
    weighed = d.chance(0.4)
    if weighed:
        inputs.append(d.input(shape[-1:], dtype, False, low=0.2, high=3))
    text = 'ps.F.binary_cross_entropy_with_logits(x[1], x[2], { reduction = "%s"%s })'
    return Case(text % (reduction, ", pos_weight = x[3]" if weighed else ""),
                lambda x, m: F.binary_cross_entropy_with_logits(x[0], x[1], reduction=reduction,
                                                                pos_weight=x[2] if weighed else None),
                inputs, **tolerance(dtype))


def kl(d):
    dtype, reduction, shape, logs = d.dtype("fp32", "fp64"), d.choice(*REDUCTIONS,
                                                                      "batchmean"), shape_of(d), d.chance(0.5)
    bounds = {"low": -3, "high": 0} if logs else {"low": 0, "high": 1}
    return Case('ps.F.kl_div(x[1], x[2], { reduction = "%s", log_target = %s })' % (reduction, lua(logs)),
                lambda x, m: F.kl_div(x[0], x[1], reduction=reduction, log_target=logs),
                [d.input(shape, dtype, True, low=-4, high=0), d.input(shape, dtype, d.chance(0.5), **bounds)],
                **tolerance(dtype))


def of_classes(d):
    """Draws targets of which some, but not all, are ignored, since PyTorch's mean over no targets is NaN."""
    n, classes, ignore = d.int(1, 20), d.int(2, 12), d.choice(-100, -1, 1)
    t = torch.randint(0, classes, (n,), generator=d.gen)
    t = torch.where(torch.rand(n, generator=d.gen) < 0.3, torch.full_like(t, ignore), t)
    t[0] = 0
    return n, classes, ignore, t


def nll(d):
    (dtype, reduction), (n, classes, ignore, t) = chosen(d), of_classes(d)
    inputs = [d.input([n, classes], dtype, True, low=-5, high=0), d.laid_out(t, expand=False)]
    weighed = d.chance(0.5)
    if weighed:
        inputs.append(d.input([classes], dtype, False, low=0.1, high=2))
    text = 'ps.F.nll_loss(x[1], x[2], { reduction = "%s", ignore_index = %d%s })'
    return Case(text % (reduction, ignore, ", weight = x[3]" if weighed else ""),
                lambda x, m: F.nll_loss(x[0], x[1].long(), x[2] if weighed else None, reduction=reduction,
                                        ignore_index=ignore),
                inputs, **tolerance(dtype))


def smoothed(d):
    (dtype, reduction), (n, classes, ignore, t), c = chosen(d), of_classes(d), d.int(1, 9)
    head, smooth, weighed = d.chance(0.3) and reduction != "none", d.choice(0.1, 0.5, 1.0), d.chance(0.5)
    options = 'reduction = "%s", ignore_index = %d, label_smoothing = %s' % (reduction, ignore, lua(smooth))
    inputs = [d.input([n, c if head else classes], dtype, True), d.laid_out(t, expand=False)]
    inputs.append(d.input([classes], dtype, False, low=0.1, high=2) if weighed else None)
    options += ", weight = x[3]" if weighed else ""
    if head:
        inputs.append(d.input([classes, c], dtype, True, expand=False))

    def run(x, m):
        logits = F.linear(x[0], x[3]) if head else x[0]
        return F.cross_entropy(logits, x[1].long(), x[2], reduction=reduction, ignore_index=ignore,
                               label_smoothing=smooth)
    text = "ps.F.lm_loss(x[1], x[4], x[2], { %s })" if head else "ps.F.cross_entropy(x[1], x[2], { %s })"
    return Case(text % options, run, inputs, **tolerance(dtype))


def probabilities(d):
    """Draws class probabilities as targets, which need not add up to 1."""
    (dtype, reduction), n, classes = chosen(d), d.int(1, 20), d.int(1, 12)
    smooth, weighed = d.choice(0, 0, 0.1, 1.0), d.chance(0.5)
    inputs = [d.input([n, classes], dtype, True), d.input([n, classes], dtype, True, low=0, high=1)]
    inputs.append(d.input([classes], dtype, False, low=0.1, high=2) if weighed else None)
    text = 'ps.F.cross_entropy(x[1], x[2], { reduction = "%s", label_smoothing = %s%s })'
    return Case(text % (reduction, lua(smooth), ", weight = x[3]" if weighed else ""),
                lambda x, m: F.cross_entropy(x[0], x[1], x[2], reduction=reduction, label_smoothing=smooth),
                inputs, **tolerance(dtype))


def hits(d):
    """Counts the targets that are PyTorch's argmax of whole-number logits, several of which are the largest."""
    n, classes, ignore, t = of_classes(d)
    dtype, head, c = d.dtype("fp32", "bf16", "fp16", "fp64"), d.chance(0.4), d.int(1, 5)
    inputs = [d.input([n, c if head else classes], dtype, False, low=-2, high=2, expand=False), d.laid_out(t,
                                                                                                    expand=False)]
    inputs.append(d.input([classes, c], dtype, False, low=-2, high=2, expand=False) if head else None)

    def run(x, m):
        logits, t = x[0].double().round(), x[1].long()
        logits = logits @ x[2].double().round().T if head else logits
        counts = t != ignore
        return torch.stack([(counts & (logits.argmax(-1) == t)).sum(), counts.sum()])
    text = "ps.ops.lm_loss(x[1]:round(), x[3]:round(), x[2], nil, %d, 1, 0, 0, 1)" if head else \
        "ps.ops.cross_entropy(x[1]:round(), x[2], %d, 1, 1)"
    return Case("(select(2, %s))" % (text % ignore), run, inputs)


def of_vectors(d):
    return chosen(d), d.int(1, 20), d.int(1, 12)


def triplet(d):
    (dtype, reduction), n, k = of_vectors(d)
    margin, p, swap = d.choice(1.0, 0.3, 3.0), d.choice(2, 1), d.chance(0.5)
    text = 'ps.F.triplet_margin_loss(x[1], x[2], x[3], { reduction = "%s", margin = %s, p = %d, swap = %s })'
    return Case(text % (reduction, lua(margin), p, lua(swap)),
                lambda x, m: F.triplet_margin_loss(x[0], x[1], x[2], margin, p, swap=swap, reduction=reduction),
                [d.input([n, k], dtype, True) for _ in range(3)], **tolerance(dtype))


def signs_of(d, shape, dtype):
    return torch.randint(0, 2, shape, generator=d.gen).to({"fp32": torch.float32, "fp64": torch.float64}[dtype]) * 2 - 1


def ranking(d):
    (dtype, reduction), shape, margin = chosen(d), shape_of(d), d.choice(0.0, 0.5)
    return Case('ps.F.margin_ranking_loss(x[1], x[2], x[3], { reduction = "%s", margin = %s })' % (reduction,
                                                                                                   lua(margin)),
                lambda x, m: F.margin_ranking_loss(x[0], x[1], x[2], margin, reduction=reduction),
                [d.input(shape, dtype, True), d.input(shape, dtype, True), d.laid_out(signs_of(d, shape, dtype))],
                **tolerance(dtype))


def cosine_embedding(d):
    (dtype, reduction), n, k = of_vectors(d)
    margin = d.choice(0.0, 0.3)
    return Case('ps.F.cosine_embedding_loss(x[1], x[2], x[3], { reduction = "%s", margin = %s })' % (reduction,
                                                                                                    lua(margin)),
                lambda x, m: F.cosine_embedding_loss(x[0], x[1], x[2], margin, reduction=reduction),
                [d.input([n, k], dtype, True, low=0.1, high=3), d.input([n, k], dtype, True), d.laid_out(signs_of(d,
                    [n], dtype))], **tolerance(dtype))


def hinge(d):
    (dtype, reduction), shape, margin = chosen(d), shape_of(d), d.choice(1.0, 0.5)
    return Case('ps.F.hinge_embedding_loss(x[1], x[2], { reduction = "%s", margin = %s })' % (reduction, lua(margin)),
                lambda x, m: F.hinge_embedding_loss(x[0], x[1], margin, reduction=reduction),
                [d.input(shape, dtype, True), d.laid_out(signs_of(d, shape, dtype))], **tolerance(dtype))


def gaussian(d):
    (dtype, reduction), shape, full = chosen(d), shape_of(d), d.chance(0.5)
    var = d.choice(shape, shape[:-1], shape[:-1] + [1]) if shape else shape
    return Case('ps.F.gaussian_nll_loss(x[1], x[2], x[3], { reduction = "%s", full = %s })' % (reduction, lua(full)),
                lambda x, m: F.gaussian_nll_loss(x[0], x[1], x[2], full=full, reduction=reduction),
                [d.input(shape, dtype, True), d.input(shape, dtype, True), d.input(var, dtype, True, low=0.2,
                                                                                   high=3)], **tolerance(dtype))


def pairwise(d):
    (dtype, _), n, k = of_vectors(d)
    p, keep = d.choice(2, 1, 3), d.chance(0.5)
    return Case("ps.F.pairwise_distance(x[1], x[2], %d, nil, %s)" % (p, lua(keep)), lambda x,
                m: F.pairwise_distance(x[0], x[1], p, keepdim=keep),
                [d.input([n, k], dtype, True), d.input([n, k], dtype, True)], **tolerance(dtype))


ROWS = [
    Row("pairwise_distance", pairwise, mixes=True), Row("triplet_margin_loss", triplet, mixes=True),
        Row("margin_ranking_loss", ranking),
    Row("cosine_embedding_loss", cosine_embedding, mixes=True), Row("hinge_embedding_loss", hinge),
        Row("gaussian_nll_loss", gaussian, mixes=True),
    Row("mse_loss", of_differences("mse_loss", F.mse_loss)), Row("l1_loss", of_differences("l1_loss", F.l1_loss)),
    Row("binary_cross_entropy", bce), Row("bce with logits", bce_with_logits, "logit_entropy"),
    Row("kl_div", kl), Row("nll_loss", nll, "nll_loss nll_loss_backward"),
    Row("smoothed labels", smoothed, mixes=True),
    Row("class probabilities", probabilities, mixes=True), Row("hits", hits),
]
