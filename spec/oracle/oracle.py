# SPDX-License-Identifier: BSD-3-Clause
"""Code that the parts of the oracle (spec/oracle/*_oracle.py) share: drawing cases, running psluajit, judging
results.

A part has rows; a row draws cases. A case is a piece of Lua and a PyTorch function that should compute the same
results from the same inputs. `main` draws the cases, runs the Lua of several hundred of them in one psluajit
(run_cases.lua), computes outputs and gradients with PyTorch in the same types and again in float64, and judges. See
README.md in this folder.
"""
import argparse
import copy
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

import torch
from safetensors.torch import load_file, save_file

import differences

HERE = os.path.dirname(os.path.abspath(__file__))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
         "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool}
NAMES = {dtype: name for name, dtype in TYPES.items()}
FLOATS = ("fp32", "bf16", "fp16", "fp64")
INTS = ("int32", "int64", "uint8", "bool")
# bits of the significand, exponents of the smallest normal number and of the largest
FORMAT = {torch.float32: (24, -126, 127), torch.bfloat16: (8, -126, 127), torch.float16: (11, -14, 15),
          torch.float64: (53, -1022, 1023)}


# -- cases -----------------------------------------------------------------------------------------------------------
class Mode:
    """How PyTorch computes: in the case's types, or (exact) with every float as float64."""

    def __init__(self, exact, change=None, dtype=None):
        """change: a function that changes float64 numbers by the last bit of the computation's type. dtype: the type
        to which results are rounded that are saved for the gradient."""
        self.exact, self.change, self.dtype_saved = exact, change, dtype

    @property
    def move_rounded(self):
        """Returns the change by which rounding alters a result that is saved for the gradient, or None."""
        if not (self.exact and self.change):
            return None
        return lambda y: self.change(y, 2.0 ** -FORMAT[self.dtype_saved][0]) if self.dtype_saved else self.change(y)

    def dtype(self, name):
        """Returns the dtype with that name. In the reference every float type is float64."""
        return torch.float64 if self.exact and name in FLOATS else TYPES[name]

    def to(self, x, name):
        return x.to(self.dtype(name))

    def saved(self, fn, slope, x):
        """Returns fn(x), whose gradient is slope(fn(x)). The gradient reads the rounded result, so this result is
        changed like an input."""
        return FromResult.apply(x, fn, slope, self.move_rounded) if self.move_rounded else fn(x)


class FromResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fn, slope, moved):
        y = fn(x)
        ctx.save_for_backward(moved(y))
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.slope(ctx.saved_tensors[0]), None, None, None


class Input:
    """A tensor with its layout in the file, and the view of it that the case uses (the Lua text of `x`, and a
    PyTorch function)."""

    def __init__(self, base, grad=False, lua="", view=None):
        self.base, self.grad, self.lua, self.view = base, grad and base.dtype.is_floating_point, lua, view

    def __str__(self):
        return "%s %s%s" % (NAMES[self.base.dtype], list(self.base.shape), " as " + self.lua if self.lua else "")


class Case:
    """lua: the body of a function of (ps, x, e); x[1] is the first input. fn(x, mode): PyTorch's results, one or a list
    of tensors and numbers. exact: results equal PyTorch's in the same type, bit for bit (comparisons, copies,
    operations that IEEE 754 rounds): a set of names like {"out0", "grad1"}, or True. slack, absolute: additional
    relative and absolute distances that are allowed. Each use of them gives a reason."""

    def __init__(self, lua, fn, inputs=(), exact=False, slack=0.0, absolute=0.0, device="cpu", note=""):
        self.lua, self.fn, self.inputs, self.exact = lua, fn, list(inputs), exact
        self.slack, self.absolute, self.device, self.note = slack, absolute, device, note
        self.row = self.index = self.ups = None
        self.mixes = False

    def __str__(self):
        return "%s#%d: %s  [%s]%s%s" % (self.row, self.index, self.lua, "; ".join(map(str, self.inputs)),
                                       " on " + self.device if self.device != "cpu" else "",
                                       " " + self.note if self.note else "")


class Row:
    """A name, a function draw(d) that creates a Case from a Draw, the rows of ops.def that it covers, and its weight
    among the rows. mixes: elements of a result are sums over many elements of the inputs (see bound_of)."""

    def __init__(self, name, draw, ops=(), weight=1.0, mixes=False):
        self.name, self.draw, self.ops, self.weight = name, draw, ops.split() if isinstance(ops, str) else ops, weight
        self.mixes = mixes


# -- drawing ---------------------------------------------------------------------------------------------------------
class Draw:
    """The random choices for one case. The same seed, part and index always produce the same case, independently of
    other cases."""

    def __init__(self, seed, part, index, attempt=0):
        self.rng = random.Random("%d:%s:%d:%d" % (seed, part, index, attempt))
        self.gen = torch.Generator().manual_seed(self.rng.getrandbits(60))

    def chance(self, p):
        return self.rng.random() < p

    def choice(self, *options):
        return self.rng.choice(options)

    def int(self, low, high):
        """Returns a whole number in [low, high]."""
        return self.rng.randint(low, high)

    def uniform(self, low, high):
        return self.rng.uniform(low, high)

    def dtype(self, *names):
        """The name of a type: a float type unless other types are given."""
        return self.rng.choice(names or ("fp32", "fp32", "fp32", "bf16", "fp16", "fp64"))

    def size(self):
        """Returns a size, which is mostly small, sometimes larger than a vector, and sometimes 0."""
        r = self.rng.random()
        if r < 0.04:
            return 0
        return self.rng.choice((1, 1, 2, 3, 4, 5, 7)) if r < 0.8 else self.rng.choice((8, 15, 16, 17, 33, 65))

    def shape(self, least=0, most=4, numel=20000):
        while True:
            shape = [self.size() for _ in range(self.rng.randint(least, most))]
            if math.prod(shape) <= numel:
                return shape

    def values(self, shape, dtype="fp32", low=None, high=None, special=0.0):
        """Returns numbers of a type. Without bounds, they are normally distributed with a random scale, or a few
        different whole numbers (so that some are equal). special: the fraction of cases with NaN, infinities, zeros
        of both signs, denormals and the largest numbers."""
        torch_type = TYPES[dtype]
        if dtype == "bool":
            return torch.rand(shape, generator=self.gen) < self.rng.choice((0.0, 0.3, 0.5, 0.9))
        if dtype in INTS:
            least = 0 if dtype == "uint8" else -20
            top = 250 if dtype == "uint8" else 20
            least, top = least if low is None else int(low), top if high is None else int(high)
            return torch.randint(least, top + 1, shape, generator=self.gen).to(torch_type)
        if low is not None:
            x = torch.rand(shape, generator=self.gen, dtype=torch.float64) * (high - low) + low
        elif self.chance(0.25):
            x = torch.randint(-3, 4, shape, generator=self.gen).double()
        else:
            x = torch.randn(shape, generator=self.gen, dtype=torch.float64) * self.rng.choice((1, 1, 1, 0.1, 5))
        x = x.to(torch_type)
        if special and self.chance(special) and x.numel() > 0:
            info = torch.finfo(torch_type)
            odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, info.tiny / 4, -info.tiny / 2, info.max, info.tiny, 1.0]
            flat = x.reshape(-1)
            for _ in range(self.rng.randint(1, max(1, min(6, x.numel())))):
                flat[self.rng.randrange(x.numel())] = self.rng.choice(odd)
            x = flat.reshape(x.shape)
        return x

    def laid_out(self, x, grad=False, plain=0.55, expand=True):
        """Returns an Input whose view has x's shape: contiguous, transposed, a slice, or with strides of 0 (which
        needs other values)."""
        n = x.dim()
        if n == 0 or self.chance(plain):
            return Input(x, grad)
        how = self.rng.choice(("permute", "slice", "offset") + (("expand",) if expand else ()))
        if how == "permute":
            axes = list(range(n))
            self.rng.shuffle(axes)
            back = [axes.index(i) for i in range(n)]
            return Input(x.permute(axes).contiguous(), grad, "x:permute(%s)" % ", ".join(map(str, back)),
                         lambda t: t.permute(back))
        dim = self.rng.randrange(n)
        if how == "expand":
            dims = [d for d in range(n) if x.shape[d] > 0 and self.chance(0.6)] or [dim]
            if any(x.shape[d] == 0 for d in dims):
                return Input(x, grad)
            base = x
            for d in dims:
                base = base.narrow(d, 0, 1)
            shape = list(x.shape)
            return Input(base.contiguous(), grad, "x:expand(%s)" % ", ".join(map(str, shape)),
                         lambda t: t.expand(shape))
        size = x.shape[dim]
        step = 1 if how == "offset" else self.rng.choice((2, 3))
        before, after = self.rng.randint(0, 3), self.rng.randint(0, 2)
        wide = list(x.shape)
        wide[dim] = before + size * step + after
        base = torch.zeros(wide, dtype=x.dtype)
        index = [slice(None)] * n
        index[dim] = slice(before, before + size * step, step)
        index = tuple(index)
        base[index] = x
        return Input(base, grad, "x:slice(%d, %d, %d, %d)" % (dim, before, before + size * step, step),
                     lambda t: t[index])

    def input(self, shape, dtype="fp32", grad=False, low=None, high=None, special=0.0, plain=0.55, expand=True):
        return self.laid_out(self.values(shape, dtype, low, high, special), grad, plain, expand)


def lua(value):
    """Returns a Lua literal for a number, string, list or dictionary. Floats keep every bit."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if value != value:
            return "(0/0)"
        if math.isinf(value):
            return "math.huge" if value > 0 else "-math.huge"
        return "%.17g" % value
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{ %s }" % ", ".join("%s = %s" % (k, lua(v)) for k, v in value.items())
    return "{ %s }" % ", ".join(lua(v) for v in value)


# -- PyTorch's side --------------------------------------------------------------------------------------------------
class Result:
    """Outputs and gradients (indexed by input; None if there is no gradient), in float64 or the case's types."""

    def __init__(self, outs, grads, sources=()):
        self.outs, self.grads, self.sources = outs, grads, sources


def compute(case, draw=None, exact=False, change=None, graph=False):
    """Runs the case in PyTorch. The first run draws the gradients of the outputs. change(x) alters float inputs.
    graph: keeps outputs and gradients connected to all float inputs and gradients of outputs (`sources`)."""
    floats = [i.base.dtype for i in case.inputs if i is not None and i.base.dtype.is_floating_point]
    mode, leaves, xs = Mode(exact, change, floats[0] if len(set(floats)) == 1 else None), [], []
    change = change or (lambda x: x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    try:
        for given in case.inputs:
            if given is None:
                leaves.append(None)
                xs.append(None)
                continue
            base = given.base
            if base.dtype.is_floating_point:
                base = change(base.double() if exact else base)
            leaf = base.detach().clone()
            if given.view and case.mixes:                              # the view is the leaf (see bound_of)
                leaf = given.view(leaf).clone()
            leaf.requires_grad_(given.grad or graph and base.dtype.is_floating_point)
            leaves.append(leaf)
            xs.append(given.view(leaf) if given.view and not case.mixes else leaf)
        outs = case.fn(xs, mode)
        outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
        outs = [torch.tensor(o, dtype=torch.float64) if isinstance(o, (int, float)) else o for o in outs]
        if case.ups is None:
            case.ups = [draw.values(list(o.shape), NAMES[o.dtype]) if o is not None and o.requires_grad else None
                        for o in outs]
        pairs = [(o, change(u.double() if exact else u)) for o, u in zip(outs, case.ups) if u is not None]
        wrt = [i for i, given in enumerate(case.inputs) if given is not None and given.grad]
        grads = {i: None for i in wrt}
        if pairs and wrt:
            ups = [u.detach().to(o.dtype).requires_grad_(graph) for o, u in pairs]
            given = torch.autograd.grad([o for o, _ in pairs], [leaves[i] for i in wrt], ups, allow_unused=True,
                                        create_graph=graph)
            grads = dict(zip(wrt, given))
        else:
            ups = []
        if graph:
            return Result(outs, grads, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad] + ups)
        return Result([o.detach() if o is not None else None for o in outs], grads)
    finally:
        torch.set_default_dtype(before)


# -- the judge -------------------------------------------------------------------------------------------------------
CONDITIONED = 256          # number of elements of a tensor whose condition is computed
NEARBY = 4                 # number of neighbouring inputs for which PyTorch's own distance is measured
UNLUCKY, AGAIN = 4, 8      # see Part.unlucky
MOVED = 8                  # number of times that inputs are changed in their last bit
WIDEST = 8.0               # largest factor by which PyTorch's worst element widens the bounds of others (see bound_of)


def ulp(value, dtype):
    """Returns the distance between neighbouring numbers of a type at |value| (float64)."""
    bits, least, most = FORMAT[dtype]
    _, exponent = torch.frexp(value.abs())
    exponent = torch.clamp(torch.where(torch.isfinite(value) & (value != 0), exponent - 1, least), least, most)
    return torch.ldexp(torch.ones_like(value), exponent - bits + 1)


def rounding(dtype):
    """Returns the relative size of the last bit of the computation whose result has this type. Half types are
    computed in fp32."""
    return 2.0 ** (-52 if dtype == torch.float64 else -23)


def last_bit(x, gen):
    """Moves every finite float except 0 to a random one of its two neighbours."""
    if not x.dtype.is_floating_point:
        return x
    up = torch.rand(x.shape, generator=gen) < 0.5
    moved = torch.nextafter(x, torch.where(up, math.inf, -math.inf).to(x.dtype))
    return torch.where(torch.isfinite(x) & (x != 0) & torch.isfinite(moved), moved, x)


class Second:
    """A second judgement of a case, which is made only if the plain rule finds an error. It uses PyTorch's distance,
    and the exact result, for inputs that differ in their last bit."""

    def __init__(self, case):
        self.case, self.near, self.moved = case, {}, {}

    def get(self, kind, key, dtype):
        """Returns lists of PyTorch's distances for neighbouring inputs, and of float64 results for inputs changed by
        the last bit of the computation."""
        gen = torch.Generator().manual_seed(self.case.index)
        wide = dtype == torch.float64

        def neighbour(x):
            return last_bit(x.float() if wide and x.dtype == torch.float64 else x, gen)

        def moved(x, by=rounding(dtype)):
            sign = torch.where(torch.rand(x.shape, generator=gen) < 0.5, 1.0, -1.0).double()
            return x * (1 + by * sign)

        if wide not in self.near:
            self.near[wide] = []
            for _ in range(NEARBY):
                state = gen.get_state()
                low = compute(self.case, change=neighbour)
                gen.set_state(state)                               # draws the same neighbours
                self.near[wide].append((low, self.exact_at(neighbour)))
        if dtype not in self.moved:
            self.moved[dtype] = [compute(self.case, exact=True, change=moved) for _ in range(MOVED)]

        def pick(result):
            return (result.outs[key] if kind == "out" else result.grads.get(key)).double()
        factor = 2.0 ** -29 if wide else 1.0               # float64 cannot be compared with itself (see bound_of)
        return ([(pick(a) - pick(b)).abs() * factor for a, b in self.near[wide]],
                [pick(m) for m in self.moved[dtype]])

    def condition(self, kind, key, mask, dtype):
        """Returns the largest first-order change of the masked elements if inputs change in their last bit, which is
        the sum of |derivative x input| times that bit. It is computed for the first CONDITIONED elements, and is 0
        elsewhere."""
        case = self.case
        found = torch.zeros(mask.shape, dtype=torch.float64)
        try:
            result = compute(case, exact=True, graph=True)
        except RuntimeError:                                     # no second derivative
            return found
        target = result.outs[key] if kind == "out" else result.grads.get(key)
        if not target.requires_grad:
            return found
        for at in mask.reshape(-1).nonzero().reshape(-1)[:CONDITIONED].tolist():
            slopes = torch.autograd.grad(target.reshape(-1)[at], result.sources, retain_graph=True, allow_unused=True)
            total = sum(float((s * x).detach().abs().sum()) for s, x in zip(slopes, result.sources) if s is not None)
            found.view(-1)[at] = total * rounding(dtype) if math.isfinite(total) else 0.0
        return found

    def exact_at(self, neighbour):
        """Returns the float64 result for the inputs that `neighbour` computes from those in the case's types."""
        case = self.case
        given, ups = case.inputs, case.ups
        case.inputs = [None if i is None else
                       Input(neighbour(i.base) if i.base.dtype.is_floating_point else i.base, i.grad, i.lua, i.view)
                       for i in given]
        case.ups = [None if u is None else neighbour(u) for u in ups]
        try:
            return compute(case, exact=True)
        finally:
            case.inputs, case.ups = given, ups


def bound_of(theirs, exact, dtype, near, moved, mixes):
    """The distance from float64 that an element may have.

    The plain rule is 2 x PyTorch's distance + 1 ulp. But PyTorch's distance at one element is partly luck: it is 0 if
    its roundings happen to cancel, and a sum in another order then looks wrong. So the rule is widened, always without
    looking at psluajit's numbers:
    - PyTorch's distance at an element is the largest for a few inputs that differ in their last bit. For float64 there
      is nothing more exact to compare with, so the distance of float32 is used, times 2^-29.
    - PyTorch's largest distance in the whole tensor, measured in units of each element's scale, applies to each
      element, since one algorithm computes them all. The factor is at most WIDEST, so that one element for which
      PyTorch is bad does not excuse the others. The scale of an element is half an ulp, plus the change of the exact
      result if inputs change at random by the last bit of the computation (2^-23; for float64 2^-52).
    - In a product, a reduction, a softmax or a loss (a row that `mixes`) all elements are sums over the same terms.
      There PyTorch's distance is its largest absolute distance in the tensor. Such rows compare gradients of the views,
      not of the tensors below the views: adding up gradients that cancel would say nothing about the op.
    - A result that is exact for inputs which differ from the given ones only in the last bit is as good as any
      algorithm promises. `condition` computes this for the elements that fail the first two rules.
    """
    unit = ulp(exact, dtype)
    spread = torch.zeros_like(exact)
    for m in moved:
        spread = torch.maximum(spread, torch.nan_to_num((m - exact).abs(), 0.0, 0.0, 0.0))
    scale = spread + unit / 2
    own = torch.zeros_like(exact)
    for distance in near + [(theirs - exact).abs()]:
        own = torch.maximum(own, torch.nan_to_num(distance, 0.0, 0.0, 0.0))
    if mixes and exact.numel():
        own = torch.full_like(own, float(own.max()))
    worst = float((own / scale).max()) if exact.numel() else 0.0
    return unit + 2 * torch.maximum(own, scale * min(max(1.0, worst), WIDEST))


class Off:
    """The error of an output or a gradient of a case. rounding: whether the distance is too large by at most the
    factor UNLUCKY."""

    def __init__(self, what, text, rounding=False):
        self.what, self.text, self.rounding = what, text, rounding

    def __str__(self):
        return "%s: %s" % (self.what, self.text)


def describe(tensor):
    return "nil" if tensor is None else "%s %s" % (NAMES.get(tensor.dtype, tensor.dtype), list(tensor.shape))


def judge(case, kind, key, ours, theirs, exact, second, used):
    """Returns an Off, or None if the result is correct. used: counts the intended differences that applied, by name."""
    what = "%s%d" % (kind, key)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        rule = differences.whole(case, kind, key, ours, theirs)
        if rule is None:
            return Off(what, "%s, PyTorch has %s" % (describe(ours), describe(theirs)))
        used[rule] = used.get(rule, 0) + 1
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return None
        theirs = theirs.to(ours.dtype)
    dtype = ours.dtype
    o, t, r = ours.double(), theirs.double(), exact.double()
    # A gradient is computed from the results. If they have fewer bits, so does the gradient.
    arithmetic = min([dtype] + [out.dtype for out in case.result.outs if kind == "grad"
                                and out.dtype.is_floating_point],
                     key=lambda t: FORMAT[t][0] if t.is_floating_point else 99)
    if not dtype.is_floating_point:
        off = ours != theirs
        bound = torch.zeros_like(o)
    else:
        same = (o == t) & (torch.signbit(o) == torch.signbit(t)) | torch.isnan(o) & torch.isnan(t)
        rounded = r.to(dtype).double()  # a correctly rounded result is right, whatever PyTorch's result is
        same_as_rounded = (o == rounded) & (torch.signbit(o) == torch.signbit(rounded))
        finite = torch.isfinite(o) & torch.isfinite(t) & torch.isfinite(r)
        zeros = (o == 0) & (t == 0) & (torch.signbit(o) != torch.signbit(t)) & ~same_as_rounded
        if case.exact is True or case.exact and what in case.exact:
            off, bound = ~same & ~same_as_rounded, torch.zeros_like(o)
        else:
            bound = ulp(r, arithmetic) + 2 * (t - r).abs() + case.slack * r.abs() + case.absolute
            far = finite & ((o - r).abs() > bound)
            if far.any():
                near, moved = second.get(kind, key, arithmetic)
                bound = torch.maximum(bound, bound_of(t, r, arithmetic, near, moved, case.mixes))
                far = finite & ((o - r).abs() > bound)
                if far.any():
                    bound = torch.maximum(bound, ulp(r, arithmetic) + 2 * second.condition(kind, key, far, arithmetic))
                    far = finite & ((o - r).abs() > bound)
            off = far | ~finite & ~same & ~same_as_rounded | zeros
    if off.any():
        for rule, mask in differences.elements(case, kind, key, ours, theirs, exact, off):
            if (off & mask).any():
                used[rule] = used.get(rule, 0) + 1
                off = off & ~mask
    if not off.any():
        return None
    distance = torch.where(off, torch.nan_to_num((o - r).abs() / torch.where(bound > 0, bound, torch.ones_like(bound)),
                                                 math.inf, math.inf, math.inf), torch.full_like(o, -1.0))
    at, rounding = int(distance.reshape(-1).argmax()), float(distance.max()) <= UNLUCKY
    o, t, r, bound = (v.reshape(-1)[at].item() for v in (o, t, r, bound))
    return Off(what,
               "%d of %d elements of %s are off; element %d is %.9g, PyTorch's %.9g, in float64 %.17g: distance %.3g, "
               "PyTorch's %.3g, allowed %.3g" % (int(off.sum()), off.numel(), describe(ours), at, o, t, r, abs(o - r),
                                                abs(t - r), bound), rounding)


# -- running psluajit ------------------------------------------------------------------------------------------------
ISAS = [{}, {}, {}, {"PS_CPU_ISA": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"},
        {"PS_CPU_ISA": "sse2", "DNNL_MAX_CPU_ISA": "SSE41"}]


def start(psluajit, folder, cases, isa, threads):
    """Writes the cases to a folder and starts psluajit on them."""
    tensors, listed = {"none": torch.zeros((), dtype=torch.uint8)}, []
    for case in cases:
        name = str(case.index)
        names, views, wrt = [], [], []
        for i, given in enumerate(case.inputs):
            names.append("" if given is None else "%s.in.%d" % (name, i))
            views.append("" if given is None or not given.lua else given.lua)
            if given is not None:
                tensors[names[-1]] = given.base.contiguous().clone()
                if given.grad:
                    wrt.append(i)
        for k, up in enumerate(case.ups):
            if up is not None:
                tensors["%s.up.%d" % (name, k)] = up.contiguous().clone()
        listed.append({"id": name, "code": case.lua if " return " in case.lua else "return " + case.lua,
                       "inputs": names,
                       "views": views, "wrt": wrt, "device": case.device, "single": len(case.ups) == 1,
                       "leaves": "views" if case.mixes else "bases"})
    save_file(tensors, os.path.join(folder, "in.safetensors"))
    with open(os.path.join(folder, "cases.json"), "w") as f:
        json.dump(listed, f)
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="", **isa)
    log = open(os.path.join(folder, "log"), "wb")
    return subprocess.Popen([psluajit, os.path.join(HERE, "run_cases.lua"), folder], env=env, stdout=log, stderr=log)


def finish(process, folder):
    """Returns (results by id, tensors), or the text of the error."""
    try:
        code = process.wait(600)
    except subprocess.TimeoutExpired:
        process.kill()
        code = "no end within 600 s"
    if code != 0:
        with open(os.path.join(folder, "log"), errors="replace") as f:
            return "psluajit ended with %s: %s" % (code, f.read()[-600:])
    with open(os.path.join(folder, "out.json")) as f:
        return json.load(f), load_file(os.path.join(folder, "out.safetensors"))


class Part:
    """One run of a part: its options, counts and output."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        self.count = self.off = self.looked_twice = self.refused = 0
        self.used, self.rows = {}, {}

    def say(self, case, text):
        self.off += 1
        self.rows[case.row] = self.rows.get(case.row, 0) + 1
        if self.rows[case.row] <= self.options.show:
            print("off: %s %s\n     %s\n     again: %s --only %d:%d" % (self.name, case, text,
                  os.path.relpath(sys.argv[0]), self.options.seed, case.index), flush=True)

    def judge(self, case, exact, results, tensors):
        self.count += 1
        name = str(case.index)
        result = results[name]
        if "error" in result:
            return self.say(case, "an error: " + result["error"])
        outs, grads = case.result.outs, case.result.grads
        if result["outputs"] != len(outs):
            return self.say(case, "%d outputs, PyTorch has %d" % (result["outputs"], len(outs)))
        found = self.look(case, exact, tensors)
        if found and not (all(f.rounding for f in found) and self.unlucky(case)):
            self.say(case, "\n     ".join(map(str, found)))

    def look(self, case, exact, tensors):
        """Returns the errors in the case's outputs and gradients."""
        name, second, found = str(case.index), Second(case), []
        for k, theirs in enumerate(case.result.outs):
            found.append(judge(case, "out", k, tensors.get("%s.out.%d" % (name, k)), theirs, exact.outs[k], second,
                               self.used))
        for i, theirs in case.result.grads.items():
            found.append(judge(case, "grad", i, tensors.get("%s.grad.%d" % (name, i)), theirs, exact.grads[i], second,
                               self.used))
        self.looked_twice += bool(second.near)
        return [f for f in found if f is not None]

    def unlucky(self, case):
        """Returns whether a result that is too far away is within the bound for most inputs that differ in their
        last bit. By chance, such a result occurs in one of thousands of cases. A wrong or imprecise computation also
        fails for the neighbouring inputs. This applies only to distances of at most UNLUCKY times the bound. A
        larger distance is an error immediately, and so are NaN, wrong signs and wrong types."""
        gen, again = torch.Generator().manual_seed(case.index + 1), []
        for k in range(AGAIN):
            other = copy.copy(case)
            other.index = k
            other.inputs = [None if i is None else Input(last_bit(i.base, gen), i.grad, i.lua, i.view)
                            for i in case.inputs]
            other.ups = [None if u is None else last_bit(u, gen) for u in case.ups]
            other.result = compute(other)
            again.append(other)
        folder = tempfile.mkdtemp(prefix="oracle-")
        try:
            answer = finish(start(self.options.psluajit, folder, again, *self.environment), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(answer, str) or any("error" in r for r in answer[0].values()):
            return False
        wrong = sum(bool(self.look(other, compute(other, exact=True), answer[1])) for other in again)
        print("oracle %s: %d is off by a rounding, and so are %d of %d cases near by" % (
            self.name, case.index, wrong, AGAIN))
        return 2 * wrong <= AGAIN

    def draw(self, row, index):
        """Returns the case with that index. If PyTorch rejects a case (such as bool - bool), another one is drawn."""
        for attempt in range(30):
            draw = Draw(self.options.seed, self.name, index, attempt)
            try:
                case = row.draw(draw)
                case.row, case.index, case.mixes = row.name, index, row.mixes
                case.result = compute(case, draw)
                return case
            except Exception as problem:
                if not isinstance(problem, RuntimeError) or attempt == 29:
                    raise ValueError("oracle %s: drawing %s, --only %d:%d" % (self.name, row.name, self.options.seed,
                                                                             index)) from problem
                self.refused += 1
        return None

    def batch(self, cases, isa, threads):
        """Runs cases together. If psluajit crashes, runs each case separately."""
        folder, self.environment = tempfile.mkdtemp(prefix="oracle-"), (isa, threads)
        try:
            process = start(self.options.psluajit, folder, cases, isa, threads)
            exacts = [compute(case, exact=True) for case in cases]
            answer = finish(process, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(answer, str):
            if len(cases) == 1:
                self.count += 1
                return self.say(cases[0], answer)
            for case in cases:
                self.batch([case], isa, threads)
            return None
        for case, exact in zip(cases, exacts):
            case.note = (case.note + " " + ",".join(isa.values()) + " threads=%d" % threads).strip()
            self.judge(case, exact, *answer)


def main(name, rows, cases):
    """Runs a part: its rows one after another (by weight), with `cases` cases in total unless --cases gives another
    number. Exits with status 1 if any case is wrong."""
    parser = argparse.ArgumentParser(description="Compares psluajit with PyTorch on drawn cases: " + name)
    parser.add_argument("--psluajit", default="build/psluajit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--only", help="SEED:INDEX, one case again")
    parser.add_argument("--row", help="only rows whose name contains this; --cases counts their cases")
    parser.add_argument("--show", type=int, default=5, help="how many cases of a row are printed")
    parser.add_argument("--batch", type=int, default=250)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.time()
    order = []                                               # each row as often as its weight, at least once per round
    for row in rows:
        order += [row] * max(1, round(row.weight))
    random.Random(0).shuffle(order)
    indices = range(options.cases)
    if options.row:
        chosen = [at for at, row in enumerate(order) if options.row in row.name]
        if not chosen:
            sys.exit("oracle %s: no row's name contains %s" % (name, options.row))
        indices = [i // len(chosen) * len(order) + chosen[i % len(chosen)] for i in range(options.cases)]
    if options.only:
        options.seed, index = map(int, options.only.split(":"))
        indices = [index]
    part, waiting = Part(name, options), []
    for index in indices:
        row = order[index % len(order)]
        case = part.draw(row, index)
        if options.only:
            print(case)
        waiting.append(case)
        if len(waiting) == options.batch:
            part.batch(waiting, *environment(options.seed, index // options.batch))
            waiting = []
    if waiting:
        part.batch(waiting, *environment(options.seed, index // options.batch))
    for rule, count in sorted(part.used.items()):
        print("oracle %s: %d times: %s" % (name, count, rule))
    print("oracle %s: %.0f s, %d cases looked at twice, %d that PyTorch refuses drawn again" % (
        name, time.time() - started, part.looked_twice, part.refused))
    print("oracle %s: %d cases, %d off" % (name, part.count, part.off))
    sys.exit(1 if part.off else 0)


def environment(seed, batch):
    """Returns the instruction set and the number of threads for a batch of cases."""
    rng = random.Random("%d:%d" % (seed, batch))
    return rng.choice(ISAS), rng.choice((1, 2))
