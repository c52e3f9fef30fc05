# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `modules`: attention with separate keys, encoder and decoder layers, norms over several
dimensions, modules for losses and activations, and modules that contain others.
"""
import math

import torch
import torch.nn.functional as F

from oracle import Case, Row, lua
from rows_losses import REDUCTIONS, tolerance

COVERED = set("""
    MultiheadAttention TransformerEncoderLayer TransformerDecoderLayer TransformerEncoder TransformerDecoder Identity
    ModuleDict ParameterDict ParameterList CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss HuberLoss BCELoss
    BCEWithLogitsLoss KLDivLoss CosineSimilarity Sigmoid SELU ReLU6 Mish LogSigmoid Hardsigmoid Hardswish Softsign
    LeakyReLU ELU Softplus Hardtanh Softmax LogSoftmax GLU Flatten Unflatten HingeEmbeddingLoss MarginRankingLoss
    CosineEmbeddingLoss TripletMarginLoss GaussianNLLLoss""".split())


def with_parameters(d, module, code, dtype, inputs):
    """Returns Lua that creates a module and sets its parameters to PyTorch's, which become inputs, and a function
    that calls PyTorch's module with them."""
    names = [name for name, _ in module.named_parameters()]
    lines, first = [code], len(inputs)
    for i, (name, p) in enumerate(module.named_parameters()):
        inputs.append(d.input(list(p.shape), dtype, True, low=-0.7, high=0.7, plain=1))
        path = name.split(".")
        at = "".join("[%s]" % p if p.isdigit() else "." + p for p in path[:-1])
        lines.append("m%s:param(%s, x[%d])" % (at, lua(path[-1]), first + i + 1))

    def call(x, m, *args, **kwargs):
        module.train()
        params = dict(zip(names, x[first:first + len(names)]))
        return torch.func.functional_call(module, params, args, kwargs)
    return " ".join(lines), call


def bool_mask(d, shape):
    """Draws a mask, in which true hides a key. At least one key of each row is visible."""
    mask = torch.rand(shape, generator=d.gen) < 0.3
    mask[..., 0] = False
    return d.laid_out(mask, False, 0.7, False)


def options(pairs):
    return "{ %s }" % ", ".join("%s = %s" % p for p in pairs)


def attention(d):
    dtype, heads, each = d.dtype("fp32", "fp64"), d.int(1, 3), d.choice(2, 4)
    E, B, T, S, first = heads * each, d.int(1, 3), d.int(1, 6), d.int(1, 7), d.chance(0.5)
    kdim, vdim = (E, E) if d.chance(0.5) else (d.int(1, 7), d.int(1, 7))
    bias = d.chance(0.7)
    module = torch.nn.MultiheadAttention(E, heads, bias=bias, kdim=kdim, vdim=vdim, batch_first=first)

    def shaped(n, width):
        return [B, n, width] if first else [n, B, width]
    inputs = [d.input(shaped(T, E), dtype, True), d.input(shaped(S, kdim), dtype, True), d.input(shaped(S, vdim),
                                                                                                 dtype, True)]
    made = "local m = ps.nn.MultiheadAttention(%d, %d, %s)" % (E, heads, options(
        [("bias", lua(bias)), ("kdim", kdim), ("vdim", vdim), ("batch_first", lua(first)), ("dtype", lua(dtype))]))
    code, call = with_parameters(d, module, made, dtype, inputs)
    given, kwargs = [], {}

    def mask(name, shape, floats):
        inputs.append(d.input(shape, dtype, True) if floats else bool_mask(d, shape))
        at = len(inputs)
        given.append((name, "x[%d]" % at))
        kwargs[name] = at - 1
    floats = d.chance(0.5)
    if d.chance(0.6):
        mask("attn_mask", d.choice([T, S], [B * heads, T, S]), floats)
    if d.chance(0.5):
        mask("key_padding_mask", [B, S], floats)
    weights, average = d.chance(0.6), d.chance(0.5)
    given.append(("need_weights", lua(weights)))
    if not average:
        given.append(("average_attn_weights", "false"))

    def run(x, m):
        masks = {name: x[at] for name, at in kwargs.items()}
        out = call(x, m, x[0], x[1], x[2], need_weights=weights, average_attn_weights=average, **masks)
        return list(out) if weights else [out[0]]
    return Case(code + " return m(x[1], x[2], x[3], %s)" % options(given), run, inputs, **tolerance(dtype))


def drawn_layer(d):
    dtype, heads, each = d.dtype("fp32", "fp64"), d.int(1, 2), d.choice(2, 4)
    E, hidden = heads * each, d.int(1, 9)
    first, norm_first, act, bias = d.chance(0.5), d.chance(0.5), d.choice("relu", "gelu"), d.chance(0.8)
    made = options([("dim_feedforward", hidden), ("dropout", 0), ("activation", lua(act)), ("batch_first", lua(first)),
                    ("norm_first", lua(norm_first)), ("bias", lua(bias)), ("dtype", lua(dtype))])
    theirs = {"dim_feedforward": hidden, "dropout": 0.0, "activation": act, "batch_first": first,
              "norm_first": norm_first,
              "bias": bias}
    return dtype, heads, E, first, made, theirs


def encoder(d):
    dtype, heads, E, first, made, theirs = drawn_layer(d)
    B, T, n, norm = d.int(1, 3), d.int(1, 5), d.int(0, 2), d.chance(0.5)
    module = torch.nn.TransformerEncoderLayer(E, heads, **theirs)
    code = "ps.nn.TransformerEncoderLayer(%d, %d, %s)" % (E, heads, made)
    mask_name = "src_mask"
    if n > 0:
        module = torch.nn.TransformerEncoder(module, n, torch.nn.LayerNorm(E) if norm else None,
                                             enable_nested_tensor=False)
        code = "ps.nn.TransformerEncoder(%s, %d%s)" % (code, n,
            ", { norm = ps.nn.LayerNorm(%d, { dtype = %s }) }" % (E, lua(dtype))
                                                      if norm else "")
        mask_name = "mask"
    inputs = [d.input([B, T, E] if first else [T, B, E], dtype, True)]
    code, call = with_parameters(d, module, "local m = " + code, dtype, inputs)
    given, kwargs = [], {}
    for name, shape in ((mask_name, [T, T]), ("src_key_padding_mask", [B, T])):
        if d.chance(0.4):
            inputs.append(bool_mask(d, shape))
            given.append((name, "x[%d]" % len(inputs)))
            kwargs[name] = len(inputs) - 1

    def run(x, m):
        return call(x, m, x[0], **{name: x[at] for name, at in kwargs.items()})
    return Case(code + " return m(x[1], %s)" % options(given), run, inputs, slack=1e-4 if dtype == "fp32" else 1e-11,
                absolute=1e-4 if dtype == "fp32" else 1e-11)       # norms of norms, whose slopes amplify errors


def decoder(d):
    dtype, heads, E, first, made, theirs = drawn_layer(d)
    B, T, S, n = d.int(1, 3), d.int(1, 5), d.int(1, 5), d.int(0, 2)
    module = torch.nn.TransformerDecoderLayer(E, heads, **theirs)
    code = "ps.nn.TransformerDecoderLayer(%d, %d, %s)" % (E, heads, made)
    if n > 0:
        module = torch.nn.TransformerDecoder(module, n)
        code = "ps.nn.TransformerDecoder(%s, %d)" % (code, n)
    inputs = [d.input([B, T, E] if first else [T, B, E], dtype, True), d.input([B, S, E] if first else [S, B, E],
                                                                               dtype, True)]
    code, call = with_parameters(d, module, "local m = " + code, dtype, inputs)
    given, kwargs = [], {}
    for name, shape in (("tgt_mask", [T, T]), ("memory_mask", [T, S]), ("tgt_key_padding_mask", [B, T]),
                        ("memory_key_padding_mask", [B, S])):
        if d.chance(0.3):
            inputs.append(bool_mask(d, shape))
            given.append((name, "x[%d]" % len(inputs)))
            kwargs[name] = len(inputs) - 1

    def run(x, m):
        return call(x, m, x[0], x[1], **{name: x[at] for name, at in kwargs.items()})
    return Case(code + " return m(x[1], x[2], %s)" % options(given), run, inputs,
                slack=1e-4 if dtype == "fp32" else 1e-11,
                absolute=1e-4 if dtype == "fp32" else 1e-11)


def layer_norm(d):
    shape, dtype = [n or 2 for n in d.shape(1, 4, 2000)], d.dtype("fp32", "fp64")
    dims, affine = d.int(1, len(shape)), d.choice("none", "weight", "both")
    last = shape[-dims:]
    if math.prod(last) < 2:
        shape[-1] = last[-1] = 3
    inputs = [d.input(shape, dtype, True)]
    code = "local m = ps.nn.LayerNorm(%s, %s)" % (lua(last if dims > 1 or d.chance(0.5) else last[0]), options(
        [("elementwise_affine", lua(affine != "none")), ("bias", lua(affine == "both")), ("dtype", lua(dtype))]))
    for name in {"none": (), "weight": ("weight",), "both": ("weight", "bias")}[affine]:
        inputs.append(d.input(last, dtype, True, plain=1))
        code += " m:param(%s, x[%d])" % (lua(name), len(inputs))
    return Case(code + " return m(x[1])", lambda x, m: F.layer_norm(x[0], last, *x[1:]), inputs, **tolerance(dtype))


# -- modules of functions ---------------------------------------------------------------------------------------------
ACTIVATIONS = [("Sigmoid()", torch.nn.Sigmoid()), ("SELU()", torch.nn.SELU()), ("ReLU6()", torch.nn.ReLU6()),
               ("Mish()", torch.nn.Mish()),
               ("LogSigmoid()", torch.nn.LogSigmoid()), ("Hardsigmoid()", lambda x: (F.hardtanh(x, -3, 3) + 3) / 6),
               ("Hardswish()", torch.nn.Hardswish()),
               ("Softsign()", torch.nn.Softsign()), ("LeakyReLU(0.2)", torch.nn.LeakyReLU(0.2)), ("LeakyReLU()",
                                                                                                  torch.nn.LeakyReLU()),
               ("ELU(0.5)", torch.nn.ELU(0.5)), ("Softplus(2, 5)", torch.nn.Softplus(2, 5)), ("Hardtanh(-2, 1)",
                                                                                              torch.nn.Hardtanh(-2, 1)),
               ("Softmax(0)", torch.nn.Softmax(0)), ("LogSoftmax(-1)", torch.nn.LogSoftmax(-1)), ("Identity(3)",
                                                                                                  torch.nn.Identity()),
               ("Flatten()", torch.nn.Flatten()), ("Flatten(0, 1)", torch.nn.Flatten(0, 1))]


def activation(d):
    text, fn = d.choice(*ACTIVATIONS)
    dtype, shape = d.dtype("fp32", "fp64"), [n or 2 for n in d.shape(2, 3)]
    return Case("ps.nn.%s(x[1])" % text, lambda x, m: fn(x[0]) * 1, [d.input(shape, dtype, True, -6, 6)],
                **tolerance(dtype))


def loss(d):
    dtype, reduction = d.dtype("fp32", "fp64"), d.choice(*REDUCTIONS)
    name, given = d.choice(("MSELoss", {}), ("L1Loss", {}), ("SmoothL1Loss", {"beta": 0.5}), ("HuberLoss",
        {"delta": 2.0}), ("BCELoss", {}),
                           ("BCEWithLogitsLoss", {}), ("KLDivLoss", {"log_target": True}), ("CrossEntropyLoss",
                                                                                            {"label_smoothing": 0.1}),
                           ("CrossEntropyLoss", {"ignore_index": 1}), ("NLLLoss", {}))
    n, classes = d.int(2, 9), d.int(2, 7)
    text = options([("reduction", lua(reduction))] + [(k, lua(v)) for k, v in given.items()])
    module = getattr(torch.nn, name)(reduction=reduction, **given)
    if name in ("CrossEntropyLoss", "NLLLoss"):
        target = torch.randint(0, classes, (n,), generator=d.gen)
        target[0] = 0
        inputs = [d.input([n, classes], dtype, True, -4, 0), d.laid_out(target, expand=False)]
        return Case("ps.nn.%s(%s)(x[1], x[2])" % (name, text), lambda x, m: module(x[0], x[1].long()), inputs,
                    **tolerance(dtype))
    low, high = (0.05, 0.95) if name == "BCELoss" else (-3, -0.1)
    inputs = [d.input([n, classes], dtype, True, low, high), d.input([n, classes], dtype, False, 0.1, 0.9)]
    return Case("ps.nn.%s(%s)(x[1], x[2])" % (name, text), lambda x, m: module(x[0], x[1]), inputs, **tolerance(dtype))


def loss_of_three(d):
    """Losses of three tensors, and HingeEmbeddingLoss, with targets of 1 and -1."""
    dtype, reduction, n, k = d.dtype("fp32", "fp64"), d.choice(*REDUCTIONS), d.int(2, 9), d.int(2, 7)
    name, given = d.choice(("MarginRankingLoss", {"margin": 0.5}), ("CosineEmbeddingLoss", {"margin": 0.2}),
                           ("TripletMarginLoss", {"swap": True}),
                           ("HingeEmbeddingLoss", {"margin": 2.0}), ("GaussianNLLLoss", {"full": True}))
    text = options([("reduction", lua(reduction))] + [(k, lua(v)) for k, v in given.items()])
    module = getattr(torch.nn, name)(reduction=reduction, **given)
    shape = [n] if name == "CosineEmbeddingLoss" else [n, k]
    signs = torch.randint(0, 2, shape, generator=d.gen).to(torch.float32 if dtype == "fp32" else torch.float64) * 2 - 1
    last = d.input([n, k], dtype, True, 0.3, 3) if name in ("TripletMarginLoss",
                                                            "GaussianNLLLoss") else d.laid_out(signs)
    inputs = [d.input([n, k], dtype, True, 0.1, 3)] + ([] if name == "HingeEmbeddingLoss" else [d.input([n, k], dtype,
                                                                                                    True)]) + [last]
    args = ", ".join("x[%d]" % (i + 1) for i in range(len(inputs)))
    return Case("ps.nn.%s(%s)(%s)" % (name, text, args), lambda x, m: module(*x), inputs, **tolerance(dtype))


def cosine(d):
    dtype, shape = d.dtype("fp32", "fp64"), [n or 2 for n in d.shape(2, 3, 500)]
    return Case("ps.nn.CosineSimilarity(-1)(x[1], x[2])", lambda x, m: F.cosine_similarity(x[0], x[1], -1),
                [d.input(shape, dtype, True, 0.1, 2), d.input(shape, dtype, True, 0.1, 2)], **tolerance(dtype))


def holders(d):
    dtype, n = d.dtype("fp32", "fp64"), d.int(1, 9)
    inputs = [d.input([2, n], dtype, True), d.input([n], dtype, True, plain=1), d.input([n], dtype, True, plain=1)]
    code = d.choice("local p = ps.nn.ParameterList { x[2], x[3] } return p[0] * x[1] + p[-1]",
                    "local p = ps.nn.ParameterDict { a = x[2], b = x[3] } return p.a * x[1] + p:get 'b'",
                    "local m = ps.nn.ModuleDict { act = ps.nn.Identity() } return m.act(x[2] * x[1] + x[3])")
    return Case(code, lambda x, m: x[1] * x[0] + x[2], inputs, **tolerance(dtype))


ROWS = [Row("MultiheadAttention", attention, weight=3, mixes=True),
        Row("TransformerEncoder", encoder, weight=2, mixes=True),
        Row("TransformerDecoder", decoder, weight=2, mixes=True),
        Row("LayerNorm of dimensions", layer_norm, mixes=True),
        Row("activation modules", activation, weight=2, mixes=True),
        Row("loss modules", loss, weight=2, mixes=True),
        Row("loss modules of three", loss_of_three, mixes=True),
        Row("CosineSimilarity", cosine, mixes=True),
        Row("modules that hold others", holders, mixes=True)]
