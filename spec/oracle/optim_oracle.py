# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers, schedules and loss scalers over about 20 steps, compared with torch.optim, torch.optim.lr_scheduler,
torch.amp and the formulas of DeepSpeed's schedules, which docs/config.md lists.
"""
import importlib.util
import math
from pathlib import Path

import torch

from oracle import TYPES, Case, Input, Row, lua, main


# -- optimizers --------------------------------------------------------------------------------------------------------
def settings(d, kind):
    """Returns the options in Lua's form and in PyTorch's form."""
    lr, decay = d.choice(1e-3, 0.1, 3e-4), d.choice(0, 0, 0.1, 0.01)
    if kind == "SGD":
        momentum = d.choice(0, 0.9, 0.5)
        nesterov = momentum > 0 and d.chance(0.4)
        dampening = 0 if nesterov or momentum == 0 else d.choice(0, 0.1, 0.9)
        ours = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay}
        return ours, dict(ours)
    if kind == "RMSprop":
        ours = {"lr": lr, "momentum": d.choice(0, 0.9, 0.5), "alpha": d.choice(0.99, 0.5), "eps": d.choice(1e-8, 1e-6),
                "weight_decay": decay}
        return ours, dict(ours)
    betas, eps = [d.choice(0.9, 0.5), d.choice(0.999, 0.95)], d.choice(1e-8, 1e-6)
    ours = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    return ours, dict(ours, betas=tuple(betas))


def optimizer(d):
    """Steps with given gradients, some of which are missing; a state that is saved and loaded by state_dict;
    clipping; a learning rate that changes."""
    kind = d.choice("Adam", "AdamW", "SGD", "RMSprop")
    dtype, steps = d.dtype("fp32", "fp32", "bf16", "fp16", "fp64"), d.int(1, 20)
    ours, theirs = settings(d, kind)
    count = d.int(1, 4)
    shapes = [d.shape(0, 2, 200) for _ in range(count)]
    params = [Input(d.values(s, dtype, -2, 2)) for s in shapes]
    grads = [Input(d.values([steps] + s, dtype, -1, 1)) for s in shapes]
    missing = {(i, s) for i in range(count) for s in range(steps) if d.chance(0.05)}
    reload_at = d.int(0, steps - 1) if d.chance(0.6) else -1
    rate_at, rate = (d.int(0, steps - 1), d.choice(1e-2, 1e-4)) if d.chance(0.3) else (-1, 0)
    max_norm = d.choice(None, None, 0.1, 1.0, 100.0)
    scale = d.choice(None, None, 0.5, 1 / 3)
    cut = d.int(1, count - 1) if count > 1 and d.chance(0.5) else 0
    second = {"lr": d.choice(1e-2, 1e-3), "weight_decay": d.choice(0, 0.3)}
    names = ["x[%d]" % (i + 1) for i in range(count)]
    groups = "{ %s }" % ", ".join(names)
    if cut:
        groups = "{ { params = { %s } }, { params = { %s }, lr = %s, weight_decay = %s } }" % (
            ", ".join(names[:cut]), ", ".join(names[cut:]), lua(second["lr"]), lua(second["weight_decay"]))
    make = "ps.optim.%s(%s, %s)" % (kind, groups, lua(ours))
    code = ["local opt, missing = %s, { %s }" % (make, ", ".join('["%d.%d"] = true' % m for m in sorted(missing))),
            "for s = 0, %d do" % (steps - 1), "for i = 1, %d do" % count,
            "local grad = not missing[(i - 1) .. '.' .. s] and x[i + %d][s]:clone() or nil" % count,
            "x[i]:requires_grad(true) x[i]:set_grad(grad) end",
            "if s == %d then opt:set_lr(%s) end" % (rate_at, lua(rate)),
            "opt:step(%s)" % lua({k: v for k, v in (("max_norm", max_norm), ("grad_scale", scale)) if v is not None}),
            "if s == %d then local state = opt:state_dict() opt = %s opt:load_state_dict(state) end" % (
                reload_at, make),
            "end return %s" % ", ".join(names)]

    def run(x, m):
        # Half types have fp32 masters, which PyTorch leaves to the script.
        wide = m.dtype("fp64" if dtype == "fp64" else "fp32")
        ps = [torch.nn.Parameter(p.detach().to(wide).clone()) for p in x[:count]]
        groups = [{"params": ps[:cut or count]}] + ([{"params": ps[cut:], **second}] if cut else [])
        opt = getattr(torch.optim, kind)(groups, **theirs)
        for s in range(steps):
            for i, p in enumerate(ps):
                p.grad = None if (i, s) in missing else x[count + i][s].detach().to(wide).clone() * (scale or 1)
            if s == rate_at:
                for g, factor in zip(opt.param_groups, (1, second["lr"] / ours["lr"])):
                    g["lr"] = rate * factor
            if max_norm and any(p.grad is not None for p in ps):
                torch.nn.utils.clip_grad_norm_(ps, max_norm)
            opt.step()
        return [p.detach().to(m.dtype(dtype)) for p in ps]
    return Case(" ".join(code), run, params + grads)


def schedule_free(d):
    """AdamWScheduleFree of the package schedulefree over several steps: states that are saved by name, or converted to
    the package's form and back; evaluation in the middle; gradients that are missing; two groups."""
    dtype, steps = d.dtype("fp32", "fp32", "bf16"), d.int(1, 20)
    ours = {"lr": d.choice(2.5e-3, 0.1), "betas": [d.choice(0.9, 0.5, 0.98), d.choice(0.999, 0.95)],
            "eps": d.choice(1e-8, 1e-6), "weight_decay": d.choice(0, 0, 0.1), "warmup_steps": d.choice(0, 3, 30),
            "r": d.choice(0, 0, 1, 0.5), "weight_lr_power": d.choice(2, 2, 0, 1)}
    theirs = ours | {"betas": tuple(ours["betas"]), "foreach": d.chance(0.5)}
    shapes = [d.shape(0, 2, 200) for _ in range(d.int(1, 4))]
    params = [Input(d.values(s, dtype, -2, 2)) for s in shapes]
    grads = [Input(d.values([steps] + s, dtype, -1, 1)) for s in shapes]
    count, rate_at, half = len(shapes), d.int(0, steps - 1) if d.chance(0.3) else -1, dtype != "fp32"
    # A step without any gradient is skipped here; the package counts it.
    missing = {(i, s) for i in range(1, count) for s in range(steps) if d.chance(0.1)}
    by_name = half or d.chance(0.5)                                              # PyTorch's form has no masters
    reload_at, eval_at = d.int(0, steps - 1), d.int(0, steps - 1) if d.chance(0.5) else -1
    cut = d.int(1, count - 1) if count > 1 and d.chance(0.5) else 0
    names = ["x[%d]" % (i + 1) for i in range(count)]
    groups = "{ { params = { %s } }, { params = { %s }, lr = 0.01, weight_decay = 0.3 } }" % (
        ", ".join(names[:cut]), ", ".join(names[cut:])) if cut else "{ %s }" % ", ".join(names)
    make = "ps.optim.AdamWScheduleFree(%s, %s)" % (groups, lua(ours))
    code = ["local opt, missing = %s, { %s }" % (make, ", ".join('["%d.%d"] = true' % m for m in sorted(missing))),
            "for s = 0, %d do for i = 1, %d do" % (steps - 1, count),
            "local grad = not missing[(i - 1) .. '.' .. s] and x[i + %d][s]:clone() or nil" % count,
            "x[i]:requires_grad(true) x[i]:set_grad(grad) end",
            "if s == %d then for _, group in ipairs(opt.groups) do group.lr = 0.02 end end" % rate_at,
            "opt:step()",
            "if s == %d then opt:eval() assert(not pcall(opt.step, opt)) opt:train() end" % eval_at,
            "if s == %d then local state = opt:%s() opt = %s opt:load_state_dict(state) end end" % (
                reload_at, "state_dict" if by_name else "torch_state_dict", make),
            "local y = {} for i = 1, %d do y[i] = x[i]:detach():clone() end opt:eval()" % count,
            "for i = 1, %d do y[#y + 1] = x[i]:detach() end return unpack(y)" % count]

    def run(x, m):
        from schedulefree import AdamWScheduleFree
        ps = [torch.nn.Parameter(p.detach().to(m.dtype("fp32")).clone()) for p in x[:count]]
        groups = [{"params": ps[:cut or count]}] + ([{"params": ps[cut:], "lr": 0.01, "weight_decay": 0.3}]
                                                    if cut else [])
        opt = AdamWScheduleFree(groups, **theirs)
        opt.train()
        for s in range(steps):
            for i, p in enumerate(ps):
                p.grad = None if (i, s) in missing else x[count + i][s].detach().to(m.dtype("fp32")).clone()
            for g in opt.param_groups if s == rate_at else ():
                g["lr"] = 0.02
            opt.step()
            if s == eval_at:
                opt.eval()
                opt.train()
        y = [p.detach().clone().to(m.dtype(dtype)) for p in ps]
        opt.eval()
        return y + [p.detach().to(m.dtype(dtype)) for p in ps]
    return Case(" ".join(code), run, params + grads)


def adafactor(d):
    """PyTorch's and transformers' Adafactor over several steps, with a state that is converted to PyTorch's form and
    back."""
    kind, dtype, steps = d.choice("Adafactor", "HuggingFaceAdafactor"), d.dtype("fp32", "fp32", "bf16"), d.int(1, 12)
    shapes = [d.shape(0, 3, 200) for _ in range(d.int(1, 3))]
    shapes = [s if math.prod(s) else [3] for s in shapes]
    ours = {"lr": d.choice(1e-3, 1e-2, 0.1), "weight_decay": d.choice(0, 0, 0.1),
            "eps1": d.choice(1e-30, 1e-7), "eps2": 1e-3}
    theirs = {"lr": ours["lr"], "weight_decay": ours["weight_decay"]}
    if kind == "Adafactor":
        ours |= {"beta2_decay": d.choice(-0.8, -0.5), "d": d.choice(1.0, 2.0)}
        theirs |= {"beta2_decay": ours["beta2_decay"], "d": ours["d"],
                   "eps": (ours["eps1"], ours["eps2"]), "foreach": False}
    else:
        ours |= {"decay_rate": d.choice(-0.8, -0.5), "clip_threshold": d.choice(1.0, 2.0),
                 "scale_parameter": d.chance(0.5)}
        if d.chance(0.4):
            ours |= {"relative_step": True, "warmup_init": d.chance(0.5)}
            theirs["lr"] = None
        theirs |= {"decay_rate": ours["decay_rate"], "clip_threshold": ours["clip_threshold"],
                   "eps": (ours["eps1"], ours["eps2"]), "scale_parameter": ours["scale_parameter"],
                   "relative_step": ours.get("relative_step", False), "warmup_init": ours.get("warmup_init", False)}
    params = [Input(d.values(s, dtype, -2, 2)) for s in shapes]
    values = [d.values([steps] + s, dtype, -1, 1) for s in shapes]
    count, reload_at = len(shapes), d.int(0, steps - 1) if dtype == "fp32" else -1     # PyTorch's form has no masters
    if d.chance(0.15):                                     # an infinite gradient, or NaN, spreads as in the references
        values[0][d.int(0, steps - 1)].reshape(-1)[0] = d.choice(math.inf, -math.inf, math.nan)
    grads = [Input(v) for v in values]
    names = ", ".join("x[%d]" % (i + 1) for i in range(count))
    make = "ps.optim.%s({ %s }, %s)" % (kind, names, lua(ours))
    code = ("for i = 1, %d do x[i]:requires_grad(true) end local opt = %s for s = 0, %d do for i = 1, %d do "
            "x[i]:set_grad(x[i + %d][s]:clone()) end opt:step() if s == %d then local state = opt:torch_state_dict() "
            "local eps = state.param_groups[1].eps assert(eps[1] == %s and eps[2] == %s "
            "and not state.param_groups[1].eps1) "
            "opt = %s opt:load_state_dict(state) end end return %s") % (
                count, make, steps - 1, count, count, reload_at, lua(ours["eps1"]), lua(ours["eps2"]), make, names)

    def run(x, m):
        from transformers.optimization import Adafactor
        wide = m.dtype("fp32")
        ps = [torch.nn.Parameter(p.detach().to(wide).clone()) for p in x[:count]]
        opt = (torch.optim.Adafactor if kind == "Adafactor" else Adafactor)(ps, **theirs)
        for s in range(steps):
            for i, p in enumerate(ps):
                p.grad = x[count + i][s].detach().to(wide).clone()
            opt.step()
        return [p.detach().to(m.dtype(dtype)) for p in ps]
    return Case(code, run, params + grads)


def torchao():
    """Returns torchao's functions of 8-bit states, without the rest of the package, which takes seconds to load."""
    path = Path(importlib.util.find_spec("torchao").origin).parent / "optim" / "quant_utils.py"
    spec = importlib.util.spec_from_file_location("quant_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes(d):
    """The 8-bit codes and scales of AdamW8bit's averages. With betas of 0 the averages are the gradient and its square.
    Numbers are drawn between two values of the map, not closer to their midpoint than 1e-4 of the interval."""
    quant, signed, n = torchao(), d.chance(0.5), d.int(1, 700)
    table = torch.tensor(quant.create_dynamic_map(signed))
    blocks = (n + 255) // 256
    low = torch.tensor([d.int(0, 254) for _ in range(n)])
    part = torch.tensor([d.choice(0.0, 0.3, 0.4999, 0.5001, 0.8) for _ in range(n)], dtype=torch.float64)
    numbers = table.double()[low] * (1 - part) + table.double()[low + 1] * part
    numbers[::256] = d.choice(1.0, -1.0) if signed else 1.0         # the largest of each block
    scales = torch.tensor([d.choice(1e-11, 1e-6, 0.3, 1.0, 7e4) for _ in range(blocks)], dtype=torch.float64)
    values = (numbers * scales.repeat_interleave(256)[:n]).float()
    text = ("local p, byte = ps.zeros { %d }, { dtype = 'uint8' } "
            "local m, of_m = ps.zeros({ %d }, byte), ps.zeros { %d } "
            "local v, of_v = ps.zeros({ %d }, byte), ps.zeros { %d } "
            "ps.ops.adam8bit_({ p, p, x[1], m, of_m, v, of_v }, 1, 1, 0, 0, 0, 1e-8, 0) return %s") % (
                n, n, blocks, n, blocks, "m, of_m" if signed else "v, of_v")

    def run(x, m):
        given = x[0].detach().float()
        whole = torch.zeros(256 * blocks)
        whole[:n] = given if signed else given.square()
        scaled, scale = quant.scale_tensor(whole, 256)
        return [quant.quantize_8bit_with_qmap(scaled, table)[:n], scale]
    return Case(text, run, [Input(values if signed else values.sqrt())], exact=True)


def code_values(d):
    """The values of 8-bit codes. With betas of 1 the averages stay, so the scale of a block with one code that is not
    that of 0 becomes the magnitude of this code's value."""
    signed, blocks = d.chance(0.5), d.int(1, 9)
    table = torch.tensor(torchao().create_dynamic_map(signed))
    of_block = torch.tensor([d.int(0, 255) for _ in range(blocks)])
    given = torch.full((blocks, 256), 127 if signed else 0)
    given[:, d.int(0, 255)] = of_block
    scales = d.values([blocks], "fp32", 0.5, 2)
    n = 256 * blocks
    text = ("local p, m, of_m = ps.zeros { %d }, ps.zeros({ %d }, { dtype = 'uint8' }), ps.zeros { %d } "
            "ps.ops.adam8bit_({ p, p, p, %s }, 1, 1, 0, 1, 1, 1e-8, 0) return x[2]") % (
                n, n, blocks, "x[1], x[2], m, of_m" if signed else "m, of_m, x[1], x[2]")
    # The map is computed by other operations: 5 units in the last place.
    inputs = [Input(given.flatten().to(torch.uint8)), Input(scales)]
    return Case(text, lambda x, m: table[of_block].abs() * x[1], inputs, slack=6 * 2.0 ** -24)


def clip(d):
    count, dtype, most = d.int(1, 4), d.dtype("fp32", "bf16", "fp16", "fp64"), d.choice(0.1, 1.0, 50.0)
    params = [Input(d.values(d.shape(0, 2, 100), dtype)) for _ in range(count)]
    names = ", ".join("x[%d]" % (i + 1) for i in range(count))
    code = ("for _, p in ipairs(x) do p:requires_grad(true) p:set_grad(p:clone()) end "
            "ps.nn.clip_grad_norm({ %s }, %s) return %s") % (names, lua(most), names.replace("]", "]:grad()"))

    def run(x, m):
        ps = [torch.nn.Parameter(p.detach().clone()) for p in x]
        for p in ps:
            p.grad = p.detach().clone()
        if m.exact or dtype == "fp64":
            torch.nn.utils.clip_grad_norm_(ps, most)
        else:                                                       # the norm is fp32 for every type
            norm = torch.sqrt(sum(p.grad.double().square().sum() for p in ps))
            for p in ps:
                p.grad.mul_(min(1.0, most / (float(norm) + 1e-6)))
        return [p.grad for p in ps]
    return Case(code, run, params)


def grad_scaler(d):
    """Scaled gradients, some of them infinite, compared with torch.amp.GradScaler."""
    steps, kind = d.int(3, 20), d.choice("Adam", "SGD")
    shape = d.shape(0, 2, 60)
    init, growth, backoff, interval = 2.0 ** d.int(2, 12), d.choice(2.0, 4.0), d.choice(0.5, 0.25), d.int(1, 5)
    grads = d.values([steps] + shape, "fp32", -1, 1)
    bad = [grads[0].numel() > 0 and d.chance(0.25) for _ in range(steps)]
    for s in range(steps):
        if bad[s]:
            grads[s].reshape(-1)[d.int(0, grads[s].numel() - 1)] = d.choice(math.inf, -math.inf, math.nan)
    code = ("local p = x[1]:requires_grad(true) local opt = ps.optim.%s({ p }, { lr = 0.1 }) local scales = {} "
            "local scaler = ps.optim.GradScaler { scale = %s, growth = %s, backoff = %s, interval = %d } "
            "for s = 0, %d do p:set_grad(scaler:scale_loss(x[2][s])) opt:step { scaler = scaler } "
            "if s == %d then local state = scaler:state_dict() "
            "scaler = ps.optim.GradScaler { growth = %s, backoff = %s, interval = %d } "
            "scaler:load_state_dict(state) end "
            "scales[s + 1] = scaler.scale end return p, ps.tensor(scales, { dtype = 'fp64' })") % (
                kind, lua(init), lua(growth), lua(backoff), interval, steps - 1, d.int(0, steps), lua(growth),
                lua(backoff), interval)

    def run(x, m):
        p = torch.nn.Parameter(x[0].detach().clone())
        opt = getattr(torch.optim, kind)([p], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff,
                                      growth_interval=interval)
        scales = []
        for s in range(steps):
            p.grad = scaler.scale(x[1][s].detach())
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        return [p.detach(), torch.tensor(scales, dtype=torch.float64)]
    return Case(code, run, [Input(d.values(shape, "fp32")), Input(grads)], exact={"out1"})


def loss_scaler(d):
    """DeepSpeed's DynamicLossScaler.update_scale (0.19, deepspeed/runtime/fp16/loss_scaler.py), step by step."""
    steps, window, hysteresis = d.int(5, 40), d.int(1, 6), d.int(1, 3)
    consecutive, power, least = d.chance(0.4), d.int(4, 16), 2.0 ** d.int(-2, 2)
    bad = [d.chance(0.25) for _ in range(steps)]
    code = ("local scaler = require('ps.optim.loss_scaler').new { initial_scale_power = %d, loss_scale_window = %d, "
            "hysteresis = %d, consecutive_hysteresis = %s, min_loss_scale = %s, "
            "raise_error_at_min_scale = false } local scales = {} "
            "for i, bad in ipairs(%s) do scaler:update(bad) scales[i] = scaler.scale end "
            "return ps.tensor(scales, { dtype = 'fp64' })") % (
                power, window, hysteresis, lua(consecutive), lua(least), lua(bad))

    def run(x, m):
        scale, left, last, out = 2.0 ** power, hysteresis, -1, []
        for i, overflow in enumerate(bad):
            if overflow:
                if hysteresis == 1 or left == 1:
                    scale = max(scale / 2, least)
                else:
                    left -= 1
                last = i
            else:
                if consecutive:
                    left = hysteresis
                stable = i - last - 1
                if stable > 0 and stable % window == 0:
                    left = left if consecutive else hysteresis
                    scale *= 2
            out.append(scale)
        return torch.tensor(out, dtype=torch.float64)
    return Case(code, run, exact=True)


# -- schedules ---------------------------------------------------------------------------------------------------------
# Rates are doubles from formulas of a few operations, of which the cosine is the least exact.
ROUNDING = 2.0 ** -48


def rates(d, name, options, count, fn, momentum=None, own=None):
    """Returns the optimizer's rate before each of `count` steps (and its first beta). fn(i) is the rate of step i."""
    start = own or d.choice(1e-3, 0.1)
    made = "ps.optim.Adam({ ps.ones({ 1 }):requires_grad(true) }, { lr = %s })" % lua(start)
    reload_at = d.int(0, count - 1)
    new = "ps.sched.%s(with(%s))" % (name, lua(options))
    code = ("local opt = %s local function with(t) t.optimizer = opt return t end "
            "local s = %s local rates, betas = {}, {} "
            "for i = 1, %d do rates[i], betas[i] = opt.groups[1].lr, opt.groups[1].betas[1] s:step() "
            "if i == %d then local state = s:state_dict() s = %s s:load_state_dict(state) end end "
            "return ps.tensor(rates, { dtype = 'fp64' })%s") % (
                made, new, count, reload_at, new, ", ps.tensor(betas, { dtype = 'fp64' })" if momentum else "")

    def run(x, m):
        out = [torch.tensor([fn(i) for i in range(count)], dtype=torch.float64)]
        return out + ([torch.tensor([momentum(i) for i in range(count)], dtype=torch.float64)] if momentum else [])
    case = Case(code, run, slack=ROUNDING)
    case.absolute = ROUNDING * max(abs(v) for v in [start] + [v for v in options.values() if isinstance(v, float)])
    return case


def of_torch(make, high, count):
    """Returns the rates of a schedule of torch.optim.lr_scheduler."""
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=high)
    schedule, out = make(opt), []
    for _ in range(count):
        out.append(opt.param_groups[0]["lr"])
        opt.step()
        schedule.step()
    return out


def plain(d):
    """warmup_cosine, warmup_linear and constant: a linear warmup, then PyTorch's CosineAnnealingLR or PolynomialLR."""
    name = d.choice("warmup_cosine", "warmup_linear", "constant")
    high, low, warmup, after = d.choice(1e-3, 0.1, 3e-4), d.choice(0.0, 1e-5, 1e-4), d.choice(0, 0, 1, 5), d.int(1, 30)
    options = {"max_lr": high, "warmup": warmup}
    if name != "constant":
        options.update(min_lr=low, total=warmup + after)
    if name == "warmup_cosine":
        tail = of_torch(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, after, low), high, after + 1)
    elif name == "warmup_linear":
        tail = of_torch(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, low / high, after) if low else
                        torch.optim.lr_scheduler.PolynomialLR(o, after, 1.0), high, after + 1)
    else:
        tail = of_torch(lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0), high, after + 1)
    case = rates(d, name, options, warmup + after + 1,
                 lambda i: high * (i + 1) / warmup if i < warmup else tail[i - warmup])
    case.slack = 2.0 ** -40                              # PyTorch multiplies from step to step
    return case


def warm(i, steps, kind):
    """Computes DeepSpeed's WarmupLR._get_gamma at last_batch_iteration = i."""
    steps = max(2, steps)
    if i >= steps:
        return 1.0
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def deepspeed_warmup(d):
    kind, steps, low, high = d.choice("log", "linear"), d.int(1, 12), d.choice(0.0, 1e-5), d.choice(1e-3, 0.01)
    options = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": steps, "warmup_type": kind}
    if d.chance(0.5):
        return rates(d, "WarmupLR", options, 20,
                     lambda i: low if i == 0 else low + (high - low) * warm(i - 1, steps, kind))
    total = max(2, steps) + d.int(1, 10)
    options["total_num_steps"] = total

    def rate(i):
        i -= 1
        if i < 0:
            return low
        share = warm(i, steps, kind) if i < max(2, steps) else max(0.0, (total - i) / max(1.0, total - max(2, steps)))
        return low + (high - low) * share
    return rates(d, "WarmupDecayLR", options, 25, rate)


def deepspeed_cosine(d):
    kind, steps, first, last = d.choice("log", "linear"), d.int(2, 8), d.choice(0.0, 0.1), d.choice(1e-4, 0.05)
    total, own = steps + d.int(1, 12), d.choice(1e-3, 0.1)

    def rate(i):
        i -= 1
        if i < 0:
            return 0.0
        if i < steps:
            return own * (first + (1 - first) * warm(i, steps, kind))
        ratio = (1 + math.cos(math.pi * (i - steps + 1) / (total - steps))) / 2
        return own * max(0.0, last + (1 - last) * ratio)
    return rates(d, "WarmupCosineLR", {"total_num_steps": total, "warmup_min_ratio": first, "warmup_num_steps": steps,
                                       "cos_min_ratio": last, "warmup_type": kind}, total + 1, rate, own=own)


def deepspeed_cycle(d):
    low, high, up, down = d.choice(1e-5, 1e-3), d.choice(0.01, 0.1), d.int(1, 8), d.int(1, 8)
    slow, fast, decay, interval = d.choice(0.8, 0.85), d.choice(0.9, 0.95), d.choice(0.0, 0.5), d.choice(0, 1, 3)
    momentum_decay = d.choice(0.0, 0.1)
    total = up + down

    def height(i):
        x = i / total - math.floor(i / total)
        share = up / total
        return x / share if x <= share else (x - 1) / (share - 1)

    def slowed(i, by):
        return 1 + by * (i - total) / interval if interval else 1.0
    options = {"cycle_min_lr": low, "cycle_max_lr": high, "cycle_first_step_size": up, "cycle_second_step_size": down,
               "decay_lr_rate": decay, "decay_step_size": interval, "cycle_min_mom": slow, "cycle_max_mom": fast,
               "decay_mom_rate": momentum_decay}
    return rates(d, "OneCycle", options, total + 8,
                 lambda i: low + (high - low) * height(i) if i < total else low / slowed(i, decay),
                 lambda i: slow if i == 0 else fast - (fast - slow) * height(i) if i < total else
                 fast * slowed(i, momentum_decay))


def deepspeed_range(d):
    low, size, growth, stairs = d.choice(1e-4, 1e-3), d.int(1, 9), d.choice(0.5, 1.0, 5.0), d.chance(0.5)
    options = {"lr_range_test_min_lr": low, "lr_range_test_step_size": size, "lr_range_test_step_rate": growth,
               "lr_range_test_staircase": stairs}
    return rates(d, "LRRangeTest", options, 30,
                 lambda i: low * (1 + growth * (math.floor(i / size) if stairs else i / size)))


def of_names(d):
    """PyTorch's schedules under their own names, over two groups with different rates. One resumes from a state."""
    gamma, size, low, count = d.choice(0.1, 0.5, 0.97), d.int(1, 7), d.choice(0.0, 1e-4), d.int(1, 25)
    marks = sorted(d.int(1, 12) for _ in range(d.int(1, 3)))
    name, text, make = d.choice(
        ("StepLR", "step_size = %d, gamma = %s" % (size, lua(gamma)),
         lambda o: torch.optim.lr_scheduler.StepLR(o, size, gamma)),
        ("MultiStepLR", "milestones = %s, gamma = %s" % (lua(marks), lua(gamma)),
         lambda o: torch.optim.lr_scheduler.MultiStepLR(o, marks, gamma)),
        ("ExponentialLR", "gamma = %s" % lua(gamma), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma)),
        ("CosineAnnealingLR", "T_max = %d, eta_min = %s" % (size + 3, lua(low)),
         lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, size + 3, low)),
        ("LambdaLR", "lr_lambda = function(n) return 1 / (n + 1) end",
         lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1))),
        ("LambdaLR", "lr_lambda = { function(n) return n / 8 end, function(n) return 2 end }",
         lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda n: n / 8, lambda n: 2])))
    rates_of, reload_at = (d.choice(0.1, 1e-3), d.choice(0.02, 3.0)), d.int(1, count)
    code = ("local function p() return ps.ones({ 1 }):requires_grad(true) end "
            "local opt = ps.optim.SGD({ { params = { p() }, lr = %s }, { params = { p() }, lr = %s } }, { lr = 1 }) "
            "local function new() return ps.sched.%s { optimizer = opt, %s } end local s, a, b = new(), {}, {} "
            "for i = 1, %d do a[i], b[i] = unpack(s:get_last_lr()) s:step() "
            "if i == %d then local state = s:state_dict() s = new() s:load_state_dict(state) end end "
            "return ps.tensor({ a, b }, { dtype = 'fp64' })") % (
                lua(rates_of[0]), lua(rates_of[1]), name, text, count, reload_at)

    def run(x, m):
        opt = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": r} for r in rates_of], lr=1.0)
        schedule, out = make(opt), []
        for _ in range(count):
            out.append([g["lr"] for g in opt.param_groups])
            opt.step()
            schedule.step()
        return torch.tensor(out, dtype=torch.float64).T.contiguous()
    case = Case(code, run, slack=2.0 ** -44)                   # PyTorch multiplies the last rate, step by step
    case.absolute = 2.0 ** -44 * max(rates_of)
    return case


ROWS = [Row("optimizer", optimizer, weight=6), Row("clip_grad_norm", clip), Row("GradScaler", grad_scaler, weight=2),
        Row("loss scaler", loss_scaler, weight=2), Row("schedules", plain, weight=2),
        Row("PyTorch's schedules", of_names, weight=2),
        Row("WarmupLR, WarmupDecayLR", deepspeed_warmup, weight=2), Row("WarmupCosineLR", deepspeed_cosine),
        Row("OneCycle", deepspeed_cycle), Row("LRRangeTest", deepspeed_range), Row("Adafactor", adafactor, weight=2),
        Row("8-bit codes", codes), Row("8-bit values", code_values),
        Row("AdamWScheduleFree", schedule_free, weight=2)]

if __name__ == "__main__":
    assert set(TYPES) >= {"fp32", "bf16", "fp16", "fp64"}
    main("optim", ROWS, 600)
