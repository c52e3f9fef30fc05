# SPDX-License-Identifier: BSD-3-Clause
"""Learning-rate schedules of two groups compared with transformers' get_scheduler and torch.optim.lr_scheduler.
DeepSpeed's schedules and PyTorch's older ones are in optim_oracle.py.
"""
import torch

from oracle import Row, Case, lua, main


def groups_case(d, text, steps, make, own, momentum=False, metrics=None, kind="SGD", slack=2.0 ** -40):
    """The rates (and the momentum) of two groups before each step of a schedule that is resumed from its state once.
    text: Lua that creates the schedule for `opt`. make: creates PyTorch's or transformers' schedule for an
    optimizer. metrics: values that its steps get."""
    reload_at = d.int(1, steps)
    first = d.choice(0.02, 3.0, 1.0) * own
    code = ("local function p() return ps.ones({ 1 }):requires_grad(true) end "
            "local opt = ps.optim.%s({ { params = { p() } }, { params = { p() }, lr = %s } }, { lr = %s%s }) "
            "local function new() return %s end local s, a, b, c = new(), {}, {}, {} local m = %s "
            "for i = 1, %d do a[i], b[i] = unpack(s:get_last_lr()) local g = opt.groups[2] "
            "c[i] = g.betas and g.betas[1] or g.momentum s:step(m[i]) "
            "if i == %d then local state = require('cjson').decode(require('cjson').encode(s:state_dict())) "
            "local held = { opt.groups[1].lr, opt.groups[2].lr } s = new() "
            "for k = 1, 2 do opt.groups[k].lr = held[k] end "
            "s:load_state_dict(state) end end return ps.tensor({ a, b%s }, { dtype = 'fp64' })") % (
                kind, lua(first), lua(own), ", momentum = 0.5" if kind == "SGD" else "", text, lua(metrics or []),
                steps, reload_at, ", c" if momentum else "")

    def run(x, m):
        ps = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        more = {"momentum": 0.5} if kind == "SGD" else {}
        opt = getattr(torch.optim, kind)([{"params": ps[:1]}, {"params": ps[1:], "lr": first}], lr=own, **more)
        schedule, out = make(opt), []
        for i in range(steps):
            g = opt.param_groups
            moves = [g[1]["betas"][0] if kind != "SGD" else g[1]["momentum"]] if momentum else []
            out.append([float(g[0]["lr"]), float(g[1]["lr"])] + moves)
            opt.step()
            if i + 1 < steps:
                schedule.step(*([metrics[i]] if metrics else []))
        return torch.tensor(out, dtype=torch.float64).T.contiguous()
    case = Case(code, run, slack=slack)
    case.absolute = slack * max(own, first)
    return case


def hugging_face(d):
    """The schedules of transformers' get_scheduler, over two groups."""
    from transformers import get_scheduler
    warmup, after, own = d.choice(0, 1, 5), d.int(1, 20), d.choice(0.1, 1e-3)
    total, least = warmup + after, d.choice({"min_lr": own * 0.1}, {"min_lr_rate": 0.2})
    name, more = d.choice(
        ("linear", {}), ("cosine", {}), ("cosine", {"num_cycles": d.choice(1.0, 1.5, 0.25)}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": d.int(1, 4)}), ("polynomial", {}),
        ("polynomial", {"lr_end": own * 0.01, "power": d.choice(0.5, 2.0, 3.0)}), ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}), ("inverse_sqrt", {"timescale": d.int(1, 30)}), ("cosine_with_min_lr", least),
        ("cosine_with_min_lr", dict(least, num_cycles=1.5)), ("cosine_warmup_with_min_lr", least),
        ("cosine_warmup_with_min_lr", dict(least, warmup_lr_rate=0.3)),
        ("warmup_stable_decay", {
            "num_decay_steps": d.int(0, after), "warmup_type": d.choice("linear", "cosine", "1-sqrt"),
            "decay_type": d.choice("linear", "cosine", "1-sqrt"), "min_lr_ratio": d.choice(0, 0.1)}))
    text = "ps.sched.get_scheduler('%s', opt, %d, %d, %s)" % (name, warmup, total, lua(more))
    return groups_case(d, text, total + 5, lambda o: get_scheduler(
        name, o, warmup, total, scheduler_specific_kwargs=dict(more)), own)


def of_cycle(d):
    """PyTorch's OneCycleLR, with the momentum of SGD and Adam."""
    kind, total, own = d.choice("SGD", "Adam", "AdamW"), d.int(4, 40), 0.1
    options = {"max_lr": d.choice(0.5, [0.1, 0.7]), "total_steps": total, "pct_start": d.choice(0.25, 0.3, 0.45),
               "anneal_strategy": d.choice("cos", "linear"), "cycle_momentum": d.chance(0.7),
               "div_factor": d.choice(25.0, 4.0), "final_div_factor": d.choice(1e4, 10.0),
               "three_phase": d.chance(0.4)}
    if d.chance(0.5):
        options |= {"base_momentum": 0.7, "max_momentum": 0.99}
    if options["pct_start"] * total == 1:                     # PyTorch divides by the phase's 0 steps
        options["total_steps"] = total = total + 1
    text = "ps.sched.OneCycleLR(opt, %s)" % lua(options)
    return groups_case(d, text, total, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, **options), own, True,
                       kind=kind)


def more_names(d):
    """PyTorch's other schedules that depend only on a step count, over two groups, and also chained."""
    sched, own, steps = torch.optim.lr_scheduler, d.choice(0.1, 1e-3), d.int(1, 30)
    size, low, factor = d.int(1, 9), d.choice(0.0, own * 0.01), d.choice(0.25, 0.5)
    mark = d.int(1, 12)
    text, make = d.choice(
        ("ps.sched.CosineAnnealingWarmRestarts(opt, %d, %d, %s)" % (size, mark % 3 + 1, lua(low)),
         lambda o: sched.CosineAnnealingWarmRestarts(o, size, mark % 3 + 1, low)),
        ("ps.sched.ConstantLR(opt, %s, %d)" % (lua(factor), size), lambda o: sched.ConstantLR(o, factor, size)),
        ("ps.sched.LinearLR(opt, %s, 1, %d)" % (lua(factor), size), lambda o: sched.LinearLR(o, factor, 1.0, size)),
        ("ps.sched.PolynomialLR(opt, %d, %s)" % (size, lua(4 * factor)),
         lambda o: sched.PolynomialLR(o, size, 4 * factor)),
        ("ps.sched.SequentialLR(opt, { ps.sched.LinearLR(opt, %s, 1, %d), ps.sched.CosineAnnealingLR(opt, %d) }, "
         "{ %d })" % (lua(factor), size, size + 20, mark),
         lambda o: sched.SequentialLR(o, [sched.LinearLR(o, factor, 1.0, size),
                                          sched.CosineAnnealingLR(o, size + 20)], [mark])))
    return groups_case(d, text, steps, make, own, slack=2.0 ** -36)     # PyTorch multiplies from step to step


def sequence(d):
    """PyTorch's SequentialLR over two to four schedules."""
    sched, own, steps = torch.optim.lr_scheduler, d.choice(0.1, 1e-3), d.int(1, 30)
    parts = []
    for _ in range(d.int(2, 4)):
        size, share = d.int(1, 9), d.choice(0.25, 0.5)
        parts.append(d.choice(
            ("StepLR(opt, %d, %s)" % (size, share), lambda o, n=size, f=share: sched.StepLR(o, n, f)),
            ("MultiStepLR(opt, { 0, %d }, 0.5)" % size, lambda o, n=size: sched.MultiStepLR(o, [0, n], 0.5)),
            ("ExponentialLR(opt, 0.9)", lambda o: sched.ExponentialLR(o, 0.9)),
            ("CosineAnnealingLR(opt, %d)" % size, lambda o, n=size: sched.CosineAnnealingLR(o, n)),
            ("CosineAnnealingWarmRestarts(opt, %d)" % size, lambda o, n=size: sched.CosineAnnealingWarmRestarts(o, n)),
            ("ConstantLR(opt, %s, %d)" % (share, size - 1), lambda o, n=size - 1, f=share: sched.ConstantLR(o, f, n)),
            ("LinearLR(opt, %s, 0.75, %d)" % (share, size), lambda o, n=size, f=share: sched.LinearLR(o, f, 0.75, n)),
            ("PolynomialLR(opt, %d, 2)" % (size + 5), lambda o, n=size: sched.PolynomialLR(o, n + 5, 2)),
            ("MultiplicativeLR(opt, function(n) return 1 - 1 / (n + %d) end)" % (size + 1),
             lambda o, n=size: sched.MultiplicativeLR(o, lambda k: 1 - 1 / (k + n + 1))),
            ("LambdaLR(opt, function(n) return 1 / (n + 1) end)", lambda o: sched.LambdaLR(o, lambda n: 1 / (n + 1)))))
    marks = sorted(d.int(0, 16) for _ in parts[1:])
    text = "ps.sched.SequentialLR(opt, { %s }, %s)" % (", ".join("ps.sched." + t for t, _ in parts), lua(marks))
    return groups_case(d, text, steps, lambda o: sched.SequentialLR(o, [make(o) for _, make in parts], marks), own,
                       slack=2.0 ** -36)


def plateau(d):
    """PyTorch's ReduceLROnPlateau, under its own name and under transformers' name."""
    steps, own = d.int(3, 60), d.choice(0.1, 1e-3)
    options = {"mode": d.choice("min", "max"), "factor": d.choice(0.1, 0.5, 0.9), "patience": d.int(0, 4),
               "threshold": d.choice(1e-4, 0.1, 0.0), "threshold_mode": d.choice("rel", "abs"), "cooldown": d.int(0, 3),
               "min_lr": d.choice(0.0, own * 0.2, [own * 0.1, own * 0.5]), "eps": d.choice(1e-8, own * 0.3)}
    metrics = [round(d.choice(1.0, -1.0) * (3 + d.int(-20, 20) / 8), 3) for _ in range(steps)]
    name = d.choice("ReduceLROnPlateau", "reduce_lr_on_plateau")
    return groups_case(d, "ps.sched.%s(opt, %s)" % (name, lua(options)), steps,
                       lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, **options), own, metrics=metrics)


def changed(d):
    """Several schedules over one optimizer of two groups, and rates that the script sets between steps. Some step in
    every step and others in some. The schedules are saved and loaded once."""
    sched, own, steps = torch.optim.lr_scheduler, d.choice(0.1, 1e-3), d.int(2, 30)
    first, reload_at = d.choice(0.02, 3.0, 1.0) * own, d.int(1, steps)
    size, low, share = d.int(1, 9), d.choice(0.0, own * 0.01), d.choice(0.25, 0.5)
    marks = sorted(d.int(1, 12) for _ in range(3))
    kinds = [
        ("StepLR(opt, %d, %s)" % (size, lua(share)), lambda o: sched.StepLR(o, size, share)),
        ("MultiStepLR(opt, %s, 0.5)" % lua(marks), lambda o: sched.MultiStepLR(o, marks, 0.5)),
        ("ExponentialLR(opt, 0.9)", lambda o: sched.ExponentialLR(o, 0.9)),
        ("CosineAnnealingLR(opt, %d, %s)" % (size, lua(low)), lambda o: sched.CosineAnnealingLR(o, size, low)),
        ("ConstantLR(opt, %s, %d)" % (lua(share), size), lambda o: sched.ConstantLR(o, share, size)),
        ("LinearLR(opt, %s, 0.75, %d)" % (lua(share), size), lambda o: sched.LinearLR(o, share, 0.75, size)),
        ("PolynomialLR(opt, %d, 2)" % (size + 5), lambda o: sched.PolynomialLR(o, size + 5, 2)),
        ("MultiplicativeLR(opt, function(n) return 1 - 1 / (n + 2) end)",
         lambda o: sched.MultiplicativeLR(o, lambda n: 1 - 1 / (n + 2))),
        ("LambdaLR(opt, function(n) return 1 / (n + 1) end)", lambda o: sched.LambdaLR(o, lambda n: 1 / (n + 1))),
        ("SequentialLR(opt, { ps.sched.ConstantLR(opt, 0.5, 3), ps.sched.ExponentialLR(opt, 0.9) }, { %d })" % size,
         lambda o: sched.SequentialLR(o, [sched.ConstantLR(o, 0.5, 3), sched.ExponentialLR(o, 0.9)], [size])),
    ]
    pick = [d.choice(*kinds) for _ in range(d.int(1, 3))]
    if d.chance(0.3) and len(pick) > 1 and not any(t.startswith("Seq") for t, _ in pick):
        inner = list(pick)
        pick = [("ChainedScheduler { %s }" % ", ".join("ps.sched." + t for t, _ in inner),
                 lambda o: sched.ChainedScheduler([make(o) for _, make in inner]))]
    by_hand = {d.int(1, steps): [own * d.choice(0.5, 2.0, 7.0), own * d.choice(0.3, 1.0)] for _ in range(d.int(0, 2))}
    value = d.chance(0.3)                                     # whether a ReduceLROnPlateau also steps
    every = d.int(1, 3)                                       # the last schedule's steps
    made = ["ps.sched." + t for t, _ in pick]
    hand = "{ %s }" % ", ".join("[%d] = %s" % (at, lua(rates)) for at, rates in by_hand.items())
    code = ("local function p() return ps.ones({ 1 }):requires_grad(true) end "
            "local opt = ps.optim.SGD({ { params = { p() } }, { params = { p() }, lr = %s } }, { lr = %s }) "
            "local hand, list, a, b, json = %s, { %s }, {}, {}, require 'cjson' "
            "local plateau = %s and ps.sched.ReduceLROnPlateau(opt, { factor = 0.5, patience = 1 }) "
            "for i = 1, %d do "
            "for k = 1, 2 do if hand[i] then opt.param_groups[k].lr = hand[i][k] end end "
            "a[i], b[i] = opt.groups[1].lr, opt.groups[2].lr "
            "for k, s in ipairs(list) do if k < #list or i %% %d == 0 then s:step() end end "
            "if plateau then plateau:step(1) end "
            "if i == %d then local states, held = {}, opt:state_dict() "
            "for k, s in ipairs(list) do states[k] = json.decode(json.encode(s:state_dict())) end "
            "for k, s in ipairs(list) do s:load_state_dict(states[k]) end "
            "opt:load_state_dict(held) end end "
            "return ps.tensor({ a, b }, { dtype = 'fp64' })") % (
                lua(first), lua(own), hand, ", ".join(made), "true" if value else "false", steps, every, reload_at)

    def run(x, m):
        ps = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        opt = torch.optim.SGD([{"params": ps[:1]}, {"params": ps[1:], "lr": first}], lr=own)
        schedules, out = [make(opt) for _, make in pick], []
        plateau = value and sched.ReduceLROnPlateau(opt, factor=0.5, patience=1)
        for i in range(1, steps + 1):
            for k in range(2):
                if i in by_hand:
                    opt.param_groups[k]["lr"] = by_hand[i][k]
            out.append([float(g["lr"]) for g in opt.param_groups])
            opt.step()
            for k, s in enumerate(schedules):
                if k < len(schedules) - 1 or i % every == 0:
                    s.step()
            if value:
                plateau.step(1)
        return torch.tensor(out, dtype=torch.float64).T.contiguous()
    case = Case(code, run, slack=2.0 ** -36)
    case.absolute = 2.0 ** -36 * max(own, first)
    return case


ROWS = [Row("several schedules and rates set by hand", changed, weight=4),
        Row("Hugging Face's schedules", hugging_face, weight=4), Row("OneCycleLR", of_cycle, weight=2),
        Row("SequentialLR", sequence, weight=2), Row("ReduceLROnPlateau", plateau, weight=2), Row("more of PyTorch's schedules", more_names, weight=2)]

if __name__ == "__main__":
    main("schedules", ROWS, 200)
