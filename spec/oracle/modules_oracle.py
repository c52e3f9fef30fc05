# SPDX-License-Identifier: BSD-3-Clause
"""Every module of ps.nn compared with torch.nn (Conv1D with that of transformers): outputs and gradients of inputs
and parameters. Also the initializers of nn.init, whose numbers are Philox's.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

import philox
import rows_counts
import rows_layers
from oracle import Case, Row, lua, main
from rows_elementwise import exact_gelu
from rows_products import attend, indices_of

# Classes of ps.nn that are covered, by row. `main` fails if ps.nn has others. The classes in the last two lines are
# covered by tensor_oracle.py, and ParallelCrossEntropy by parallel_layers_spec.lua with the formula.
COVERED = {"Linear", "Conv1D", "Embedding", "LayerNorm", "RMSNorm", "ReLU", "SiLU", "Tanh", "GELU", "Dropout",
           "Sequential",
           "ModuleList", "MLP", "MultiheadSelfAttention", "Module", "LMHead",
           "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "ParallelLMHead",
           "ParallelCrossEntropy", "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "MaxPool1d", "MaxPool2d",
           "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
           "Upsample", "Flatten", "BatchNorm1d", "BatchNorm2d", "SyncBatchNorm", "GroupNorm"} | rows_layers.COVERED \
    | rows_counts.COVERED


def put(module, *params):
    """Returns Lua that sets the parameters of `module`, from pairs of a path and the index of an input."""
    calls = []
    for path, i in params:
        *owners, name = path.split(".")
        owner = "".join("[%s]" % p if p.isdigit() else ".%s" % p for p in owners)
        calls.append("m%s:param(%s, x[%d])" % (owner, lua(name), i))
    return "local m = %s %s" % (module, " ".join(calls))


def gelu(x, how, m):
    return exact_gelu(x, how) if m.exact else F.gelu(x, approximate=how)


def linear(d):
    dtype, i, o, bias = d.dtype(), d.int(1, 33), d.int(1, 33), d.chance(0.7)
    x = d.input(d.shape(0, 2) + [i], dtype, True)
    inputs = [x, d.input([o, i], dtype, True)] + ([d.input([o], dtype, True)] if bias else [])
    code = put("ps.nn.Linear(%d, %d, { bias = %s, dtype = %s })" % (i, o, lua(bias), lua(dtype)), ("weight", 2),
               *([("bias", 3)] if bias else []))

    def run(x, m):
        module = torch.nn.Linear(i, o, bias)
        return torch.func.functional_call(module, dict(zip(("weight", "bias"), x[1:])), x[0])
    return Case(code + " return m(x[1])", run, inputs)


def lm_head(d):
    """Logits with a separate weight or with an embedding's weight."""
    dtype, width, words, tied = d.dtype(), d.int(1, 33), d.int(1, 33), d.chance(0.5)
    inputs = [d.input(d.shape(0, 2) + [width], dtype, True), d.input([words, width], dtype, True)]
    own = "ps.nn.LMHead(%d, %d, { dtype = %s })" % (width, words, lua(dtype))
    if tied:
        code = put("ps.nn.Embedding(%d, %d, { dtype = %s })" % (words, width, lua(dtype)), ("weight", 2))
        code += " local head = ps.nn.LMHead(%d, %d, { tied = m }) return head(x[1])" % (width, words)
    else:
        code = put(own, ("weight", 2)) + " return m(x[1])"
    return Case(code, lambda x, m: F.linear(x[0], x[1]), inputs)


def conv1d(d):
    dtype, i, o = d.dtype("fp32", "bf16", "fp64"), d.int(1, 33), d.int(1, 33)
    inputs = [d.input(d.shape(1, 2) + [i], dtype, True), d.input([i, o], dtype, True), d.input([o], dtype, True)]
    code = put("ps.nn.Conv1D(%d, %d, { dtype = %s })" % (i, o, lua(dtype)), ("weight", 2), ("bias", 3))

    def run(x, m):
        return torch.func.functional_call(Conv1D(o, i), {"weight": x[1], "bias": x[2]}, x[0])
    return Case(code + " return m(x[1])", run, inputs)


def embedding(d):
    dtype, rows, width = d.dtype(), d.int(1, 20), d.int(1, 33)
    inputs = [indices_of(d, d.shape(0, 3), rows), d.input([rows, width], dtype, True)]
    code = put("ps.nn.Embedding(%d, %d, { dtype = %s })" % (rows, width, lua(dtype)), ("weight", 2))

    def run(x, m):
        return torch.func.functional_call(torch.nn.Embedding(rows, width), {"weight": x[1]}, x[0])
    return Case(code + " return m(x[1])", run, inputs, exact={"out0"})


def layer_norm(d):
    dtype, width, eps, bias = d.dtype(), d.int(2, 65), d.choice(1e-5, 1e-6, 1e-3), d.chance(0.7)
    inputs = [d.input(d.shape(0, 3) + [width], dtype, True), d.input([width], dtype, True)]
    inputs += [d.input([width], dtype, True)] if bias else []
    code = put("ps.nn.LayerNorm(%d, { eps = %s, bias = %s, dtype = %s })" % (width, lua(eps), lua(bias), lua(dtype)),
               ("weight", 2), *([("bias", 3)] if bias else []))

    def run(x, m):
        module = torch.nn.LayerNorm(width, eps, bias=bias)
        return torch.func.functional_call(module, dict(zip(("weight", "bias"), x[1:])), x[0])
    return Case(code + " return m(x[1])", run, inputs)


def rms_norm(d):
    dtype, width, eps = d.dtype("fp32", "fp64"), d.int(2, 65), d.choice(1e-5, 1e-6, 1e-3)
    inputs = [d.input(d.shape(0, 3) + [width], dtype, True), d.input([width], dtype, True)]
    code = put("ps.nn.RMSNorm(%d, { eps = %s, dtype = %s })" % (width, lua(eps), lua(dtype)), ("weight", 2))

    def run(x, m):
        return torch.func.functional_call(torch.nn.RMSNorm(width, eps), {"weight": x[1]}, x[0])
    return Case(code + " return m(x[1])", run, inputs)


def activation(d):
    name = d.choice("ReLU", "SiLU", "Tanh", "GELU", "GELU tanh")
    x = d.input(d.shape(), d.dtype(), True)
    if name.startswith("GELU"):
        how = "tanh" if "tanh" in name else "none"
        return Case("ps.nn.GELU(%s)(x[1])" % lua(how), lambda x, m: gelu(x[0], how, m), [x])
    if name == "Tanh":
        return Case("ps.nn.Tanh()(x[1])", lambda x, m: m.saved(torch.tanh, lambda y: 1 - y * y, x[0]), [x])
    return Case("ps.nn.%s()(x[1])" % name, lambda x, m: getattr(torch.nn, name)()(x[0]), [x])


def dropout(d):
    """Dropped elements are determined by a counter, as documented. In evaluation none are dropped."""
    p, seed, training = d.choice(0.0, 0.1, 0.5), d.int(0, 2 ** 40), d.chance(0.6)
    x = d.input(d.shape(1, 3), d.dtype(), True)

    def run(x, m):
        if not training or p == 0:
            return x[0] * 1
        n = x[0][0].numel() if x[0].shape[0] else 0
        words = [philox.draw(seed, np.arange(-(-n // 4), dtype=np.uint64) | np.uint64(s) << np.uint64(32),
                             0).reshape(-1)[:n]
                 for s in range(x[0].shape[0])]
        u = torch.from_numpy(philox.unit(np.concatenate(words) if words else np.zeros(0,
                                                                                      np.uint64))).reshape(x[0].shape)
        return torch.where(u < float(np.float32(p)), torch.zeros((), dtype=x[0].dtype), x[0] / (1 - p))
    code = "ps.manual_seed(%d) local m = ps.nn.Dropout(%s) m:%s() return m(x[1])" % (seed, lua(p),
                                                                                   "train" if training else "eval")
    return Case(code, run, [x])


def stack(d):
    """Sequential or ModuleList of Linear, LayerNorm and GELU."""
    dtype, sizes = d.dtype("fp32", "fp64"), [d.int(2, 17) for _ in range(d.int(2, 4))]
    how = d.choice("none", "tanh")
    x = d.input(d.shape(0, 1) + [sizes[0]], dtype, True)
    inputs, parts, params, at = [x], [], [], 0
    for a, b in zip(sizes, sizes[1:]):
        parts += ["ps.nn.Linear(%d, %d, { dtype = %s })" % (a, b, lua(dtype)), "ps.nn.GELU(%s)" % lua(how),
                  "ps.nn.LayerNorm(%d, { dtype = %s })" % (b, lua(dtype))]
        for k, (name, shape) in enumerate((("weight", [b, a]), ("bias", [b]), ("weight", [b]), ("bias", [b]))):
            inputs.append(d.input(shape, dtype, True, low=-1, high=1))
            params.append(("%d.%s" % (at + (2 if k > 1 else 0), name), len(inputs)))
        at += 3
    listed = d.chance(0.4)
    made = "ps.nn.ModuleList { %s }" % ", ".join(parts) if listed else "ps.nn.Sequential(%s)" % ", ".join(parts)
    call = "local y = x[1] for i, part in m:each() do y = part(y) end return y" if listed else "return m(x[1])"

    def run(x, m):
        y, rest = x[0], list(x[1:])
        while rest:
            w, b, g, c = rest[:4]
            y, rest = F.layer_norm(gelu(F.linear(y, w, b), how, m), (w.shape[0],), g, c), rest[4:]
        return y
    return Case(put(made, *params) + " " + call, run, inputs)


def convolution(d):
    """Conv1d, Conv2d and their transposes, with every padding mode."""
    dtype, n, groups, transposed = d.dtype(), d.int(1, 2), d.choice(1, 1, 2), d.chance(0.4)
    c, o, bias = groups * d.int(1, 4), groups * d.int(1, 4), d.chance(0.7)
    k, stride, dilation = [d.int(1, 3) for _ in range(n)], [d.int(1, 2) for _ in range(n)], [d.int(1,
                                                                                                   2) for _ in range(n)]
    size = [d.int(5, 9) for _ in range(n)]
    options = {"stride": stride, "dilation": dilation, "groups": groups, "bias": bias}
    if transposed:
        options["padding"] = [d.int(0, 1) for _ in range(n)]
        options["output_padding"] = [d.int(0, s - 1) for s in stride]
        name, shape = "ConvTranspose%dd" % n, [c, o // groups] + k
    else:
        options["padding"] = d.choice([d.int(0, 2) for _ in range(n)], "same", "valid")
        options["padding_mode"] = d.choice("zeros", "zeros", "reflect", "replicate", "circular")
        if options["padding"] == "same":
            options["stride"] = [1] * n
        name, shape = "Conv%dd" % n, [o, c // groups] + k
    inputs = [d.input([d.int(1, 3), c] + size, dtype, True), d.input(shape, dtype, True)]
    inputs += [d.input([o], dtype, True)] if bias else []
    code = put("ps.nn.%s(%d, %d, %s, %s)" % (name, c, o, lua(k), lua(dict(options, dtype=dtype))), ("weight", 2),
               *([("bias", 3)] if bias else []))

    def run(x, m):
        module = getattr(torch.nn, name)(c, o, k, **options)
        wide = [t if t.dtype == torch.float64 else t.float() for t in x]             # one rounding to a half type
        return torch.func.functional_call(module, dict(zip(("weight", "bias"), wide[1:])), wide[0]).to(x[0].dtype)
    return Case(code + " return m(x[1])", run, inputs)


def without_parameters(d):
    """Pooling, Upsample and Flatten with their constructors."""
    n, k = d.int(1, 2), d.int(1, 3)
    size = [d.int(4, 9) for _ in range(n)]
    shape = [d.int(1, 3), d.int(1, 4)] + size
    pools = {"stride": d.int(1, 3), "padding": d.int(0, k // 2), "ceil_mode": d.chance(0.4)}
    out = [d.int(1, 6) for _ in range(n)]
    kind = d.choice("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Upsample", "Flatten", "Unflatten")
    name = kind if kind in ("Upsample", "Flatten", "Unflatten") else "%s%dd" % (kind, n)
    if kind == "Upsample":
        given = {"mode": d.choice("nearest", "linear" if n == 1 else "bilinear")}
        given.update({"size": out} if d.chance(0.5) else {"scale_factor": d.choice(2, 1.5)})
        code, make = lua(given), lambda: torch.nn.Upsample(**given)
    elif kind == "Flatten":
        first, last = d.int(0, 1), d.choice(-1, 1)
        code, make = "%d, %d" % (first, last), lambda: torch.nn.Flatten(first, last)
    elif kind == "Unflatten":
        code, make = "1, { -1, %d }" % shape[1], lambda: torch.nn.Unflatten(1, (-1, shape[1]))
    elif kind.startswith("Adaptive"):
        code, make = lua(out if n == 2 else out[0]), lambda: getattr(torch.nn, name)(out if n == 2 else out[0])
    else:
        code, make = "%d, %s" % (k, lua(pools)), lambda: getattr(torch.nn, name)(k, **pools)
    return Case("local y = ps.nn.%s(%s)(x[1]) return y" % (name, code), lambda x, m: make()(x[0]), [d.input(shape,
        d.dtype("fp32", "fp64"), True)])


def channel_norm(d):
    """Batch norms over a few batches with their running statistics, then in evaluation, and group norm."""
    dtype, c = d.dtype("fp32", "fp64"), d.choice(2, 4, 6)
    kind = d.choice("BatchNorm1d", "BatchNorm2d", "SyncBatchNorm", "GroupNorm")
    space = {"BatchNorm1d": d.choice([], [5]), "BatchNorm2d": [3, 4]}.get(kind, d.choice([7], [3, 4]))
    batches = d.int(1, 3)
    inputs = [d.input([d.int(2, 4), c] + space, dtype, True, low=-2, high=3) for _ in range(batches)]
    inputs += [d.input([c], dtype, True), d.input([c], dtype, True)]
    params = (("weight", batches + 1), ("bias", batches + 2))
    if kind == "GroupNorm":
        groups = d.choice(1, 2, c)
        code = put("ps.nn.GroupNorm(%d, %d, { dtype = %s })" % (groups, c, lua(dtype)), *params)
        return Case(code + " return m(x[1])", lambda x, m: F.group_norm(x[0], groups, x[batches], x[batches + 1]),
                    inputs)
    momentum, eps = d.choice(0.1, 0.7, False), d.choice(1e-5, 1e-2)
    code = put("ps.nn.%s(%d, %s)" % (kind, c, lua({"momentum": momentum, "eps": eps, "dtype": dtype})), *params)
    code += " local y for i = 1, %d do y = m(x[i]) end m:eval() " % batches
    code += "return y, m(x[1]), m.running_mean, m.running_var, "
    code += "m.num_batches_tracked:double()"

    def run(x, m):
        module = getattr(torch.nn, kind if kind != "SyncBatchNorm" else "BatchNorm2d")(c, eps=eps,
                                                                                       momentum=momentum or None)
        module = module.to(x[0].dtype)
        state = {"weight": x[batches], "bias": x[batches + 1]}
        one = [t.reshape(list(t.shape) + [1] * (4 - t.dim())) if kind == "SyncBatchNorm" else t for t in x[:batches]]
        ys = [torch.func.functional_call(module, state, t) for t in one]
        module.eval()
        last = torch.func.functional_call(module, state, one[0])
        tracked = module.num_batches_tracked.double()
        return [ys[-1].reshape(x[batches - 1].shape), last.reshape(x[0].shape), module.running_mean,
                module.running_var, tracked]
    return Case(code, run, inputs)


def mlp(d):
    dtype, width, hidden, how = d.dtype("fp32", "fp64"), d.int(1, 17), d.int(1, 33), d.choice("none", "tanh")
    residual = d.chance(0.4)
    lead = d.shape(0, 2)
    inputs = [d.input(lead + [width], dtype, True), d.input([hidden, width], dtype, True, low=-1, high=1),
              d.input([hidden], dtype, True), d.input([width, hidden], dtype, True, low=-1, high=1),
              d.input([width], dtype, True)] + ([d.input(lead + [width], dtype, True)] if residual else [])
    code = put("ps.nn.MLP(%d, %d, { activation = ps.nn.GELU(%s), dtype = %s })" % (width, hidden, lua(how), lua(dtype)),
               ("up.weight", 2), ("up.bias", 3), ("down.weight", 4), ("down.bias", 5))

    def run(x, m):
        y = F.linear(gelu(F.linear(x[0], x[1], x[2]), how, m), x[3], x[4])
        return y + x[5] if residual else y
    return Case(code + " return m(x[1]%s)" % (", x[6]" if residual else ""), run, inputs)


def self_attention(d):
    dtype, heads, each = d.dtype("fp32", "fp64"), d.int(1, 3), d.choice(2, 4, 8)
    width, b, t, causal = heads * each, d.int(1, 3), d.int(1, 10), d.chance(0.6)
    masked, residual = d.chance(0.3), d.chance(0.3)
    inputs = [d.input([b, t, width], dtype, True), d.input([3 * width, width], dtype, True, low=-1, high=1),
              d.input([3 * width], dtype, True), d.input([width, width], dtype, True, low=-1, high=1),
              d.input([width], dtype, True), d.input([b, t], "bool") if masked else None,
              d.input([b, t, width], dtype, True) if residual else None]
    module = "ps.nn.MultiheadSelfAttention(%d, %d, { causal = %s, dtype = %s })" % (
        width, heads, lua(causal), lua(dtype))
    code = put(module, ("qkv.weight", 2), ("qkv.bias", 3), ("proj.weight", 4), ("proj.bias", 5))

    def run(x, m):
        q, k, v = F.linear(x[0], x[1], x[2]).reshape(b, t, 3, heads, each).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, x[5], causal, 1 / math.sqrt(each), m).transpose(1, 2).reshape(b, t, width)
        y = F.linear(y, x[3], x[4])
        return y + x[6] if residual else y
    return Case(code + " return m(x[1], { mask = x[6], residual = x[7] })", run, inputs)


def initialisation(d):
    """Checks the bounds and deviations of torch.nn.init. The numbers are Philox's from the beginning of the stream."""
    name, seed = d.choice("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "uniform_",
                          "normal_",
                          "constant_"), d.int(0, 2 ** 50)
    shape = [d.int(1, 20), d.int(1, 20)] + [d.int(1, 3) for _ in range(d.int(0, 2))]
    a = d.choice(0.5, 1.0, math.sqrt(5))
    fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(torch.empty(shape))
    he = torch.nn.init.calculate_gain("leaky_relu", a) / math.sqrt(fan_in)
    glorot = a * math.sqrt(2.0 / (fan_in + fan_out))
    scale = {"kaiming_uniform_": math.sqrt(3) * he, "kaiming_normal_": he, "xavier_uniform_": math.sqrt(3) * glorot,
             "xavier_normal_": glorot, "uniform_": a, "normal_": a, "constant_": a}[name]
    args = {"uniform_": "%s, %s" % (lua(-a), lua(a)), "normal_": "0, " + lua(a)}.get(name, lua(a))

    def run(x, m):
        numel = math.prod(shape)
        words = philox.draw(seed, np.arange(numel, dtype=np.uint64), 0)
        if name == "constant_":
            y = torch.full((numel,), a, dtype=torch.float64)
        elif "uniform" in name:
            y = torch.from_numpy(-scale + 2 * scale * philox.unit(words[:, 0]))
        else:
            y = scale * torch.from_numpy(np.sqrt(-2 * np.log(1 - philox.unit(words[:, 0]))) * np.cos(
                2 * math.pi * philox.unit(words[:, 1])))
        return y.reshape(shape).to(m.dtype("fp32"))
    case = Case("ps.manual_seed(%d) return ps.nn.init.%s(ps.empty(%s), %s)" % (seed, name, lua(shape), args), run)
    # as in row normal_; for a sum of two
    case.absolute = 6 * 2.0 ** -21 * scale if "normal" in name else 2.0 ** -23 * scale
    return case


ROWS = [Row("Linear", linear, weight=2), Row("LMHead", lm_head), Row("Conv1D", conv1d), Row("Embedding", embedding),
        Row("LayerNorm", layer_norm), Row("RMSNorm", rms_norm), Row("activations", activation, weight=2),
        Row("Dropout", dropout), Row("containers", stack),
        Row("convolutions", convolution, weight=3),
        Row("pooling", without_parameters, weight=2), Row("norms over channels", channel_norm, weight=3), Row("MLP",
            mlp), Row("MultiheadSelfAttention", self_attention, weight=2), Row("nn.init", initialisation, weight=2)]
OWN = rows_layers.ROWS + rows_counts.MODULES
for each in ROWS:
    each.mixes = each.name not in ("activations", "Dropout", "nn.init")


def classes():
    """Checks that all classes of ps.nn are covered. The first case requests their names."""
    def draw(d):
        code = ("local lacks = {} local known = %s for name, value in pairs(ps.nn) do "
                "if type(value) == 'table' and rawget(value, 'class_name') and not known[name] "
                "then lacks[#lacks + 1] = name end end "
                "if #lacks > 0 then error('no cases for ' .. table.concat(lacks, ', '), 0) end return 0") % (
                    "{ %s }" % ", ".join("%s = true" % name for name in sorted(COVERED)))
        return Case(code, lambda x, m: 0.0, exact=True)
    return Row("classes of ps.nn", draw)


if __name__ == "__main__":
    main("modules", ROWS + OWN + [classes()], 900)
