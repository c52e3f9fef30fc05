# SPDX-License-Identifier: BSD-3-Clause
"""Random graphs with custom functions and hooks: ps.autograd compared with torch.autograd.

A graph is a list of steps over values of one shape. A step is an op, a function with a backward in Lua
(autograd_cases.lua) and in Python (below), or a hook of a value. Parts of a graph can be recomputed in backward. Row
`grad` computes gradients of leaves and of intermediate values with ps.autograd.grad. Row `kept` sums two gradients of
one graph, which the first call keeps. Row `modules` has hooks of a module.
"""
import torch

from oracle import Case, Row, main

PRELUDE = 'local A = dofile((arg[0]:match("^(.*)/") or ".") .. "/autograd_cases.lua") '


# -- PyTorch's functions ---------------------------------------------------------------------------------------------
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, c, y):
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        ctx.c = c
        return x * s * c + y

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        return dy * ctx.c * (s + x * s * (1 - s)), None, dy


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, da, db):
        x, y = ctx.saved_tensors
        return da * y + db, da * x + db


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        r = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1)
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        return r * (dy - y * (dy * y).mean(-1, keepdim=True))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.need = ctx.needs_input_grad
        return x * 0.5 + y

    @staticmethod
    def backward(ctx, dy):
        return dy * 0.5 if ctx.need[0] else None, dy * 0.25 if ctx.need[1] else None


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        plain = x * 3
        ctx.mark_non_differentiable(plain)
        return x * 2, plain

    @staticmethod
    def backward(ctx, dy, zero):
        return dy * 2 + zero


HOOKS = {"scale": lambda g: g * 1.5, "shift": lambda g: g + 0.25, "cut": lambda g: g.clamp(-0.5, 0.5),
         "look": lambda g: None}

# name: (inputs, outputs, Lua, Python); {a} and {b} are the inputs
STEPS = {
    "add": (2, 1, "{a} + {b}", lambda a, b: a + b),
    "mul": (2, 1, "{a} * {b}", lambda a, b: a * b),
    "tanh": (1, 1, "{a}:tanh()", torch.tanh),
    "sum": (1, 1, "{a} + {a}:sum(-1, true) * 0.1", lambda a: a + a.sum(-1, keepdim=True) * 0.1),
    "gate": (2, 1, "A.Gate({a}, 0.75, {b})", lambda a, b: Gate.apply(a, 0.75, b)),
    "two": (2, 2, "A.Two({a}, {b})", Two.apply),
    "norm": (1, 1, "A.Norm({a})", Norm.apply),
    "straight": (1, 1, "A.Straight({a})", Straight.apply),
    "half": (2, 1, "A.Half({a}, {b})", Half.apply),
    "marked": (1, 2, "A.Marked({a})", Marked.apply),
}


def hooked(x, name):
    if x.requires_grad:
        x.register_hook(lambda g: None if g is None else HOOKS[name](g))     # None: grad() wants it, and none came
    return x


# -- graphs ----------------------------------------------------------------------------------------------------------
class Graph:
    """Random steps over values v1, v2, ... The first values are the inputs."""

    def __init__(self, d, grads):
        self.inputs, self.n, self.lines, self.steps = len(grads), len(grads), [], []
        self.needs = dict(enumerate(grads, 1))               # values that depend on a leaf with gradient
        for _ in range(d.int(2, 12)):
            self.add(d)
        picks = sorted({self.n} | {d.int(self.inputs + 1, self.n) for _ in range(2)})
        self.outputs = picks

    def add(self, d):
        if self.n > self.inputs and d.chance(0.35):
            name, at = d.choice(*HOOKS), d.int(1, self.n)
            self.lines.append('v[%d] = A.hook(v[%d], "%s")' % (at, at, name))
            self.steps.append((None, name, at))
            return
        name = d.choice(*STEPS)
        n_in, n_out, text, _ = STEPS[name]
        at = [d.int(max(1, self.n - 4), self.n) for _ in range(n_in)]
        made = list(range(self.n + 1, self.n + 1 + n_out))
        self.n += n_out
        for i in made:
            self.needs[i] = any(self.needs[k] for k in at) and not (name == "marked" and i == made[1])
        call = text.format(**{key: "v[%d]" % i for key, i in zip("ab", at)})
        if d.chance(0.2) and self.needs[made[0]] and name != "marked":  # the same values, computed again in backward
            args = ", ".join("v[%d]" % i for i in at)
            inner = text.format(**{key: key for key in "ab"})
            call = "ps.recompute(function(%s) return %s end, %s)" % (", ".join("ab"[:n_in]), inner, args)
        self.lines.append("%s = %s" % (", ".join("v[%d]" % i for i in made), call))
        self.steps.append((name, made, at))

    def lua(self):
        return PRELUDE + "local v = { %s } " % ", ".join("x[%d]" % (i + 1)
                                                         for i in range(self.inputs)) + " ".join(self.lines) + " "

    def run(self, x):
        v = dict(enumerate(x, 1))
        for name, made, at in self.steps:
            if name is None:
                hooked(v[at], made)
                continue
            out = STEPS[name][3](*[v[i] for i in at])
            for i, o in zip(made, out if isinstance(out, tuple) else (out,)):
                v[i] = o
        return v


def drawn(d):
    dtype, n = d.dtype("fp32", "fp32", "fp64"), d.int(1, 3)
    shape = [n or 1 for n in d.shape(1, 3, 300)]
    grads = [True] + [d.chance(0.7) for _ in range(n - 1)]
    graph = Graph(d, grads)
    # A leaf with hooks has only one view, since run_cases.lua takes views of leaves, and PyTorch's hooks also belong to
    # the view.
    return graph, [d.input(shape, dtype, g, low=-2, high=2) for g in grads], dtype


# A graph is a chain of roundings, which later steps propagate.
SLACK = {"fp32": 4e-6, "fp64": 1e-14}


def case(text, fn, inputs, dtype):
    return Case(text, fn, inputs, slack=SLACK[dtype], absolute=SLACK[dtype])


def of_graph(d):
    graph, inputs, dtype = drawn(d)
    text = graph.lua() + "return " + ", ".join("v[%d]" % i for i in graph.outputs)

    def fn(x, m):
        v = graph.run(x)
        return [v[i] for i in graph.outputs]
    return case(text, fn, inputs, dtype)


LOSS = ("local loss = 0 for _, i in ipairs { %s } do "
        "if v[i]:needs_grad() then loss = (v[i] * v[i]):sum() + loss end end ")


def loss_of(graph, v):
    return sum(((v[i] * v[i]).sum() for i in graph.outputs if v[i].requires_grad), 0)


def of_grad(d, calls=1):
    """Gradients with respect to the first input and to intermediate values, as outputs. Intermediate values have no
    hooks: psluajit returns the gradient after the hooks, and PyTorch does so only if the walk ends at the value."""
    graph, inputs, dtype = drawn(d)
    hooked_ = {at for name, _, at in graph.steps if name is None}
    wanted = sorted({1} | {i for i in (d.int(1, graph.n) for _ in range(2)) if i not in hooked_})
    want = "{ %s }" % ", ".join(map(str, wanted))
    text = graph.lua() + LOSS % ", ".join(map(str, graph.outputs)) + """
      local to = {}
      for _, i in ipairs %s do if v[i]:needs_grad() then to[#to + 1] = v[i] end end
      if not ps.is_tensor(loss) then return 0 end
      local all
      for call = 1, %d do
        local found = { ps.autograd.grad(loss, to, { allow_unused = true, retain_graph = call < %d }) }
        all = all or {}
        for i = 1, #to do all[i] = (found[i] or ps.zeros_like(to[i])) + (all[i] or 0) end
      end
      return unpack(all)""" % (want, calls, calls)

    def fn(x, m):
        v = graph.run(x)
        to = [v[i] for i in wanted if v[i].requires_grad]
        loss = loss_of(graph, v)
        if not torch.is_tensor(loss):
            return 0
        total = [torch.zeros_like(t) for t in to]
        for c in range(calls):
            found = torch.autograd.grad(loss, to, allow_unused=True, retain_graph=True, create_graph=False)
            total = [s + (f if f is not None else 0) for s, f in zip(total, found)]
        return total
    return case(text, fn, inputs, dtype)


def of_modules(d):
    """A linear layer whose hooks change its input, its output and the gradient of its input."""
    dtype, rows, n_in, n_out = d.dtype("fp32", "fp64"), d.int(1, 6), d.int(1, 8), d.int(1, 8)
    kinds = {k: d.chance(0.6) for k in ("before", "after", "back")}
    scale = d.uniform(0.5, 2)
    text = """local layer = ps.nn.Linear(%d, %d, { dtype = "%s" })
      layer.weight, layer.bias = ps.nn.Parameter(x[2]:clone():detach()), ps.nn.Parameter(x[3]:clone():detach())
      """ % (n_in, n_out, dtype)
    if kinds["before"]:
        text += "layer:register_forward_pre_hook(function(_, args) return { args[1] * %r } end) " % scale
    if kinds["after"]:
        text += "layer:register_forward_hook(function(_, args, out) return out * 2 + args[1]:sum(-1, true) end) "
    if kinds["back"]:
        text += "layer:register_full_backward_hook(function(_, into, out) return { into[1] * out[1]:sum() } end) "
    text += "return layer(x[1])"

    def fn(x, m):
        layer = torch.nn.Linear(n_in, n_out, dtype=m.dtype(dtype))
        with torch.no_grad():
            layer.weight.copy_(x[1])
            layer.bias.copy_(x[2])
        if kinds["before"]:
            layer.register_forward_pre_hook(lambda mod, args: (args[0] * scale,))
        if kinds["after"]:
            layer.register_forward_hook(lambda mod, args, out: out * 2 + args[0].sum(-1, keepdim=True))
        if kinds["back"]:
            layer.register_full_backward_hook(lambda mod, into, out: (into[0] * out[0].sum(),))
        return layer(x[0])
    return case(text, fn, [d.input([rows, n_in], dtype, True, low=-2, high=2),
                           d.input([n_out, n_in], dtype, low=-1, high=1),
                           d.input([n_out], dtype, low=-1, high=1)], dtype)


ROWS = [Row("graph", of_graph, weight=4, mixes=True), Row("grad", of_grad, weight=2, mixes=True),
        Row("kept", lambda d: of_grad(d, calls=2), mixes=True), Row("modules", of_modules, mixes=True)]

if __name__ == "__main__":
    main("autograd", ROWS, 1000)
