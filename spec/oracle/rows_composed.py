# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the part `ops`: methods and functions that are composed of other ops (lua/ps/tensor/composed.lua)."""
import math

import torch

from oracle import TYPES, Case, Row, lua
from rows_reduce import some_dims
from rows_views import any_dim, of_shape


def flip(d, shape):
    dims = d.rng.sample(range(len(shape)), d.int(1, len(shape)))
    dims = [i - len(shape) if d.chance(0.3) else i for i in dims]
    return "x[1]:flip(%s)" % lua(dims), lambda x: x.flip(dims)


def roll(d, shape):
    if d.chance(0.3):
        shift = d.int(-7, 7)
        return "x[1]:roll(%d)" % shift, lambda x: x.roll(shift)
    dims = d.rng.sample(range(len(shape)), d.int(1, len(shape)))
    shifts = [d.int(-7, 7) for _ in dims]
    return "x[1]:roll(%s, %s)" % (lua(shifts), lua(dims)), lambda x: x.roll(shifts, dims)


def tile(d, shape):
    times = [d.int(0 if d.chance(0.1) else 1, 3) for _ in range(len(shape) + d.int(0, 2))]
    if not times or math.prod(times) * math.prod(shape) > 20000 or len(times) + sum(n != 1 for n in times) > 8:
        return None
    return "x[1]:tile(%s)" % lua(times), lambda x: x.repeat(*times)


def triangle(name):
    def call(d, shape):
        k = d.int(-4, 4)
        return "x[1]:%s(%s)" % (name, "" if k == 0 else k), lambda x: getattr(x, name)(k)
    return call


def sort(d):
    """Sorts different numbers, since PyTorch does not define the order of equal ones."""
    shape = [n or 2 for n in d.shape(1, 3, 3000)]
    dtype, dim, down = d.choice("fp32", "fp64", "int64", "int32"), any_dim(d, shape), d.chance(0.5)
    x = torch.randperm(math.prod(shape), generator=d.gen).reshape(shape).to(TYPES[dtype])
    return Case("x[1]:sort(%d, %s)" % (dim, lua(down)), lambda x, m: list(torch.sort(x[0], dim, down)),
                [d.laid_out(x, True, 0.6, False)], exact={"out0", "out1", "grad1"})


def eye(d):
    n, m, dtype = d.int(0, 9), d.choice(None, d.int(0, 9)), d.choice(*TYPES)
    text = "ps.eye(%d, %s{ dtype = %s })" % (n, "" if m is None else "%d, " % m, lua(dtype))
    return Case(text, lambda x, mode: torch.eye(n, n if m is None else m).to(mode.dtype(dtype)), exact=True)


def linspace(d):
    first, last, steps, dtype = d.choice(0, -1, 2.5), d.choice(1, -3, 1e3), d.int(0, 300), d.choice("fp32", "fp64")
    return Case("ps.linspace(%s, %s, %d, { dtype = %s })" % (lua(first), lua(last), steps, lua(dtype)),
                lambda x, m: torch.linspace(first, last, steps, dtype=m.dtype(dtype)),
                # PyTorch's own rounding in fp64
                absolute=4e-16 * max(abs(first), abs(last)) if dtype == "fp64" else 0.0)


def one_hot(d):
    shape, classes = [n or 1 for n in d.shape(0, 3, 500)], d.int(1, 12)
    index = torch.randint(0, classes, shape, generator=d.gen, dtype=d.choice(torch.int32, torch.int64))
    given = d.chance(0.6)
    return Case("ps.one_hot(x[1]%s)" % (", %d" % classes if given else ""),
                lambda x, m: torch.nn.functional.one_hot(x[0].long(), classes if given else -1),
                [d.laid_out(index, False, 0.6, False)],
                exact=True)


def logsumexp(d):
    shape = [n or 1 for n in d.shape(1, 4)]
    dims, keep = some_dims(d, len(shape)), d.chance(0.4)
    dims = -1 if dims is None else dims

    def run(x, m):
        wide = x[0] if x[0].dtype == torch.float64 else x[0].float()
        return torch.logsumexp(wide, dims, keep).to(x[0].dtype)
    dtype = d.dtype()
    return Case("x[1]:logsumexp(%s, %s)" % (lua(dims), lua(keep)), run, [d.input(shape, dtype, True, low=-30, high=30)],
                slack=4e-15 if dtype == "fp64" else 0.0)  # PyTorch's own rounding in fp64 is the reference


def norm(d):
    shape = [n or 1 for n in d.shape(1, 3)]
    dims, keep = some_dims(d, len(shape)), d.chance(0.4)
    p, text = d.choice((2, "2"), (2, "nil"), (1, "1"), (3, "3"), (0, "0"), (0.5, "0.5"), (-1, "-1"),
                       (math.inf, "math.huge"),
                       (-math.inf, "-math.huge"))

    def run(x, m):
        wide = x[0] if x[0].dtype == torch.float64 else x[0].float()
        return torch.linalg.vector_norm(wide, p, dims, keep).to(x[0].dtype)
    keep = keep and dims is not None
    return Case("x[1]:norm(%s, %s, %s)" % (text, lua(dims), lua(keep)), run,
                [d.input(shape, d.dtype("fp32", "fp32", "fp64", "bf16"), p not in (0, 3), low=0.5, high=2)])


def einsum(d):
    text, ranks = d.choice(("ij,jk->ik", 2), ("ij,jk", 2), ("bij,bjk->bik", 2), ("bhid,bhjd->bhij", 2), ("i,j->ij", 2),
                           ("ij->ji", 1),
                           ("ij->", 1), ("ijk->j", 1), ("ij,ij->", 2), ("ij,ij->j", 2), ("i,i", 2), ("ab,bc,cd->ad", 3),
                           ("ij,kl->k", 2), ("bi,bj,b->ij", 3), ("ijk,jl->lik", 2))
    sizes = {c: d.int(1, 7) for c in text if c.isalpha()}
    dtype = d.dtype("fp32", "fp64")
    inputs = [d.input([sizes[c] for c in part], dtype, True) for part in text.split("->")[0].split(",")]
    assert len(inputs) == ranks
    return Case("ps.einsum(%s, unpack(x))" % lua(text), lambda x, m: torch.einsum(text, *x), inputs)


FORMULAS = ("absolute arcsinh arctanh cosh deg2rad divide erfc exp2 fix fliplr flipud frac hstack hypot logaddexp "
            "logit mT msort nansum rad2deg sgn sinh tan trace vstack xlogy").split()


def formula(d):
    """What errors say to write for functions that psluajit lacks (lua/ps/core/foreign_names.lua)."""
    name = d.choice(*FORMULAS)
    function = {"mT": lambda x: x.mT, "hstack": lambda x, y: torch.hstack([x, y]),
                "vstack": lambda x, y: torch.vstack([x, y]), "msort": torch.msort}.get(name, getattr(torch, name, None))
    two = name in ("divide", "hstack", "hypot", "logaddexp", "vstack", "xlogy")
    shape = [d.int(1, 6), d.int(1, 6)]
    inputs = [d.input(shape, "fp64", False, low=0.1, high=0.9) for _ in range(2 if two else 1)]
    return Case('setfenv(loadstring("return " .. require("ps.core.foreign_names").formulas.%s), { x = x[1], y = x[2], '
                "ps = ps, F = ps.F, math = math })()" % name, lambda x, m: function(*x), inputs, slack=2.0 ** -40)


ROWS = [
    of_shape(flip, "flip", 1, ops="flip"), of_shape(roll, "roll", 1), of_shape(tile, "tile", 1, 3),
    of_shape(triangle("tril"), "tril", 2, ops="triangle"),
    of_shape(triangle("triu"), "triu", 2), Row("sort", sort), Row("eye", eye), Row("linspace", linspace),
    Row("one_hot", one_hot),
    Row("logsumexp", logsumexp, "", 2), Row("norm by dimension", norm, "", 2), Row("einsum", einsum, "", 2),
    Row("formulas of lacking functions", formula),
]
