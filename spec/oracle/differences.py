# SPDX-License-Identifier: BSD-3-Clause
"""All intended differences between psluajit and PyTorch, by name and with their reasons. Any other difference is an
error."""
import math

import torch

# Rows of ops.def that the part `ops` does not compare, with the reasons.
NOT_COMPARED = {}

# Differences that a row's reference reproduces, by the name in the row.
SAVED_SUMS = """cross_entropy keeps one fp32 number per row for its gradient, the logarithm of the sum of exponentials,
as attention does. The probabilities are off by its rounding. PyTorch keeps all log-probabilities."""


# Rows of functions that are chains of ops in psluajit, and one op in PyTorch.
COMPOSED = ("mse_loss", "l1_loss", "binary_cross_entropy", "bce with logits", "kl_div", "nll_loss", "smooth_l1_loss",
            "huber_loss",
            "glu", "mish", "selu", "hardswish", "hardsigmoid", "softsign", "logsigmoid", "lerp", "normalize",
            "cosine_similarity")


def reference(name, fn):
    """fn(a, b) with psluajit's meaning. b is a tensor or, if the row's name says so, a number."""
    if "with a number" in name:
        def beyond(x, value):
            # PyTorch casts the number to the integer type, where its value changes: uint8 < 300 is false.
            return fn(x if x.dtype.is_floating_point else x.long(), value)
        return beyond if name[:2] in ("eq", "ne", "lt", "le", "gt", "ge") else fn
    if name in ("pow", "a ^ x"):
        def floats(a, b):
            # Powers of integers are fp32. PyTorch's overflow silently, and it rejects negative exponents.
            if not torch.result_type(a, b).is_floating_point:
                a = a.to(torch.get_default_dtype())
                b = b if isinstance(b, (int, float)) else b.to(torch.get_default_dtype())
            return fn(a, b)
        return floats
    return fn


def fitting(dtype, value):
    """Replaces a number that does not fit into the integer type with 1, since `where` rejects it (PyTorch converts
    it to another number)."""
    if dtype.startswith(("int", "uint")) and isinstance(value, int):
        info = torch.iinfo({"uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64}[dtype])
        return value if info.min <= value <= info.max else 1
    return value


def cast(x, dtype):
    """A cast to an integer type saturates and converts NaN to 0; in C, and thus in PyTorch, the result is undefined.
    A cast to bool returns x != 0."""
    if dtype == torch.bool or not x.dtype.is_floating_point:
        return x.to(dtype)
    info = torch.iinfo(dtype)
    x = torch.nan_to_num(x.double(), 0.0, math.inf, -math.inf)
    inside = x.clamp(-2.0 ** 63, 2.0 ** 63 - 1024).long()
    wide = torch.where(x >= 2.0 ** 63, info.max, torch.where(x < -2.0 ** 63, info.min, inside))
    return wide.clamp(info.min, info.max).to(dtype)


def seen(given):
    """Returns the values of an input in the form in which the case uses them."""
    return given.view(given.base) if given.view else given.base


def whole(case, kind, key, ours, theirs):
    """Returns the name of the rule that allows a whole output to differ (it is missing or has another type), or
    None."""
    return None


def elements(case, kind, key, ours, theirs, exact, off):
    """Returns [(name of a rule, mask of elements that can differ by this rule)]."""
    rules = []
    if not ours.dtype.is_floating_point:
        return rules

    def rule(name, mask):
        rules.append((name, mask.expand(ours.shape)))
    zeros = (ours == 0) & (theirs == 0)
    finite = torch.isfinite(ours)
    if case.mixes or kind == "grad" and any(i is not None and i.base.numel() != (i.view(i.base).numel() if i.view else
                                                                              i.base.numel()) for i in case.inputs):
        rule("the sign of a zero that a sum gives depends on where the sum starts", zeros)
    if case.row in COMPOSED and kind == "grad":
        rule("a function composed of other ops: a gradient that is 0 may have either sign", zeros)
    if case.row == "einsum":
        rule("einsum: a sum of zeros may have either sign", zeros)
    if case.row.startswith(("maximum", "minimum")):
        rule("maximum and minimum of zeros of both signs give either", zeros)
    if kind == "grad":
        rule("a gradient beyond its type's range, on the way or at the end, is infinite or NaN "
             "by the order of operations",
             ~torch.isfinite(exact.to(ours.dtype)) & ~finite)
    if case.row == "square" and kind == "grad":
        rule("the gradient of square is dy x + dy x, where PyTorch's 2 x overflows", finite & ~torch.isfinite(theirs))
    if case.row in ("cross_entropy", "lm_loss") and kind == "out" and ours.dim() == 0:
        rule("the mean loss of rows that are all ignored is 0: such a batch has weight 0 (NaN in PyTorch)",
             (ours == 0) & torch.isnan(theirs))
    if case.row == "batch_norm" and kind == "out" and key == 2 and torch.equal(exact, torch.zeros_like(exact)):
        x = seen(case.inputs[0]).double()
        most = x.abs().max() * x.numel() / ours.numel() * 2.0 ** -53       # rounding of a mean
        rule("the variance of equal elements is 0 but for the rounding of their mean in fp64 (PyTorch: 0)",
             (ours >= 0) & (ours.double() <= most ** 2))
    if case.row == "layer_norm" and kind == "grad" and seen(case.inputs[0]).shape[-1:] == (1,) and key < 2:
        rule("layer_norm over one element has gradient 0 (PyTorch: rounding errors, over sqrt(eps))", ours == 0)
    if case.row == "layer_norm" and kind == "grad":
        rule("layer_norm of equal elements of a half type with a tiny eps is finite (PyTorch: its 1 / std overflows)",
             finite & torch.isnan(theirs))
    if case.row in ("softmax", "cross_entropy", "lm_loss") and kind == "grad" or case.row == "softmax":
        rule("probabilities below 2^-126 are 0", (ours == 0) & (exact.abs() < 2.0 ** -120))
    if case.row == "x ^ a" and ours.dtype == torch.float32:
        given = case.inputs[0]
        x = seen(given).double().abs()
        if x.shape == ours.shape:
            rule("the exponent of x ^ a is rounded to fp32 on the cpu, which shows where x is tiny or huge",
                 (ours.double() - exact).abs() <= exact.abs() * (4 * 2.0 ** -24) * (1 + x.log().abs()))
    if case.row == "x ^ a":
        x = seen(case.inputs[0])
        rule("x ^ 0.5 of -inf and -0 is that of sqrt or of pow (in PyTorch, too, by the type)",
             torch.isneginf(x) | (x == 0) if x.shape == ours.shape else zeros)
    backward = ("gelu_backward", "silu_backward", "act_mul_backward")
    if case.row in ("silu", "gelu", "act_mul", "activations") or case.row in backward:
        rule("a value or a gradient of silu or gelu that vanishes may have either sign", zeros)
    if case.row in ("silu", "gelu"):
        rule("silu and gelu of -inf are 0, their limit (NaN in PyTorch), and so are their gradients", finite
             & torch.isnan(theirs))
    return rules
