# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: packed weights, compared with the package gguf (NF4 with the paper's formula)."""
import math

import gguf
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as T

from oracle import Case, Row

# ggml's packed types with the offsets of a block's fp16 scales, and NF4, which is psluajit's type 256.
PACKED = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
          T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [], "NF4": []}


def nf4_numbers():
    """Returns the 16 numbers of NF4 by the paper's formula (Dettmers et al. 2023), with the fp32 roundings of
    bitsandbytes. They are quantiles of the normal distribution at equal steps from 0.9677083, eight above zero and
    seven below, divided by the largest."""
    up, down = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n)[:-1].double()).float() for n in (9, 8))
    numbers = torch.cat([up, torch.zeros(1), -down]).sort().values
    return numbers / numbers.abs().max()


def unpacked(raw, kind):
    """Returns the numbers in uint8 [..., bytes] as fp32."""
    if kind != "NF4":
        return torch.from_numpy(gguf.quants.dequantize(raw.contiguous().numpy(), kind))
    blocks = raw.reshape(-1, 36)
    most, q = blocks[:, :4].contiguous().view(torch.float32), blocks[:, 4:].long()
    return (nf4_numbers()[torch.stack([q >> 4, q & 15], 2).reshape(-1, 64)] * most).reshape(*raw.shape[:-1], -1)


def packed_rows(d, rows):
    """Draws a type, and rows of random blocks of it with small scales."""
    kind = d.choice(*PACKED)
    block, nbytes = (64, 36) if kind == "NF4" else gguf.GGML_QUANT_SIZES[kind]
    count = d.int(1, 3)
    raw = torch.randint(0, 256, [rows, count, nbytes], generator=d.gen, dtype=torch.uint8)
    for at in PACKED[kind]:
        raw[:, :, at + 1] = d.choice(0x20, 0x24, 0xa4)
    if kind == T.MXFP4:
        raw[:, :, 0] = 122
    if kind == "NF4":
        raw[:, :, 2], raw[:, :, 3] = 0x80, 0x3e
    return kind, 256 if kind == "NF4" else kind.value, block * count, raw.reshape(rows, -1)


def unpack(d):
    kind, number, _, raw = packed_rows(d, d.int(1, 5))
    dtype = d.choice("fp32", "bf16", "fp16")
    code = {"fp32": 0, "bf16": 1, "fp16": 2}[dtype]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return Case("ps.ops.unpack(x[1], nil, %d, %d)" % (number, code), lambda x, _: unpacked(x[0], kind).to(types[dtype]),
                [d.laid_out(raw, expand=False)], device=d.choice("cpu", "cpu", "ref"))


def pack(d):
    dtype = d.choice("fp32", "fp32", "bf16", "fp16")

    def run(x, _):
        return torch.from_numpy(gguf.quants.quantize(x[0].float().contiguous().numpy(), T.Q8_0))
    return Case("ps.ops.pack(x[1], 8)", run, [d.input(d.shape(0, 2) + [32 * d.int(1, 4)], dtype)],
                device=d.choice("cpu", "cpu", "ref"))


# Types for which int8 rounds up to 4 rows of activations to 8 bits.
INT8 = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]


def rounded(x):
    """x with each part of 32 elements rounded to 255 values, as ggml's Q8_0 but with an fp32 scale. The gradient is
    that of x itself."""
    parts = x.detach().float().reshape(-1, 32)
    most = parts.abs().amax(1, keepdim=True)
    q = (parts * (127 / most)).round().double()
    values = torch.where(most > 0, q * (most / 127).double(), torch.zeros_like(q))
    return x + (values.reshape(x.shape).to(x.dtype) - x.detach())


def linear_packed(d):
    dtype, o = d.choice("fp32", "fp32", "fp64"), d.int(1, 70)
    kind, number, i, raw = packed_rows(d, o)
    lead, back = d.shape(0, 2), d.chance(0.3)
    bias, residual, int8 = not back and d.chance(0.5), not back and d.chance(0.3), not back and d.chance(0.4)
    rows = math.prod(lead)
    inputs = [d.input(lead + [o if back else i], dtype, True), d.laid_out(raw, expand=False),
              d.input([o], dtype, True) if bias else None, d.input(lead + [o], dtype, True) if residual else None]

    def run(x, m):
        w = unpacked(x[1], kind).to(x[0].dtype)
        y = F.linear(rounded(x[0]) if int8 and rows <= 4 and kind in INT8 else x[0], w.t() if back else w, x[2])
        return y if x[3] is None else y + x[3]
    return Case("ps.ops.linear_packed(x[1], x[2], x[3], x[4], nil, %d, %d, %d)" % (number, back, int8), run, inputs,
                device=d.choice("cpu", "cpu", "ref"))


ROWS = [Row("unpack", unpack, "unpack"), Row("pack", pack, "pack"),
        Row("linear_packed", linear_packed, "linear_packed", 2, True)]
