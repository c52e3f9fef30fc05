# SPDX-License-Identifier: BSD-3-Clause
"""The names and the order of parameters, and optimizer states that are converted from PyTorch to psluajit and back.

transformers creates a small model of each class that psluajit has (models_oracle.py draws its fields). An optimizer
of PyTorch (Adam, AdamW, SGD and RMSprop with momentum, Adafactor, and Muon over the matrices only), the Adafactor of
transformers, or an optimizer of the package schedulefree, created from parameters or from named parameters, with one
group or two, runs some steps with random gradients. order_cases.lua reads the model's folder, loads the state into an
engine's optimizer and into one of ps.optim, and writes it again, by names and in PyTorch's form. The names of the parameters must be those of named_parameters, in its order. The state of
each name must have the bits of PyTorch's. A new optimizer of PyTorch, created with other settings, loads the file
that psluajit wrote. It must have the first optimizer's state and settings, and make the same next step.
"""
import json
import os

import schedulefree
import torch
import transformers
from safetensors.torch import load_file
from transformers.optimization import Adafactor

import models_oracle
import runs

CLASSES = sorted(set(models_oracle.CLASSES))
KINDS = {"Adam": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-6}, "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
         "SGD": {"lr": 1e-2, "momentum": 0.9}, "Adafactor": {"lr": 1e-2, "beta2_decay": -0.7, "weight_decay": 0.1},
         "HuggingFaceAdafactor": {"lr": 1e-2, "decay_rate": -0.7, "scale_parameter": True, "relative_step": False},
         "Muon": {"lr": 1e-2, "momentum": 0.9, "ns_steps": 4, "weight_decay": 0.2},
         "RMSprop": {"lr": 1e-2, "alpha": 0.9, "momentum": 0.5},
         "AdamWScheduleFree": {"lr": 1e-2, "betas": [0.8, 0.95], "warmup_steps": 2, "r": 1, "weight_decay": 0.1}}


CLASSES_OF = {"HuggingFaceAdafactor": Adafactor, "AdamWScheduleFree": schedulefree.AdamWScheduleFree}


def draw_case(rng, index):
    case = models_oracle.draw_case(rng, models_oracle.CLASSES.index(CLASSES[index % len(CLASSES)]))
    kind = rng.choice(list(KINDS))
    return case | {"kind": kind, "params": KINDS[kind], "named": rng.random() < 0.5,
                   "groups": kind != "Muon" and rng.random() < 0.5,
                   "steps": rng.randint(1, 3), "memory": rng.choice(["plain", "chunks"]), "pad": 1}


def optimizer_of(case, model, named, own=True):
    """Returns an optimizer of the case's kind for the model's parameters. With two groups, the biases are the first
    group. Muon has only the matrices. own: use the case's settings, else the defaults."""
    entries = [e for e in model.named_parameters() if case["kind"] != "Muon" or e[1].dim() == 2]
    lists = [entries]
    if case["groups"]:
        lists = [[e for e in entries if e[0].endswith("bias")], [e for e in entries if not e[0].endswith("bias")]]
    groups = [{"params": list_ if named else [p for _, p in list_]} for list_ in lists]
    kind = case["kind"]
    made = (CLASSES_OF.get(kind) or getattr(torch.optim, kind))(groups, **(case["params"] if own else {}))
    if hasattr(made, "train"):
        made.train()
    return made


def after_step(model, optimizer, seed):
    """Returns the parameters after another step with random gradients. The model keeps its own parameters."""
    torch.manual_seed(seed)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(before[n])
    return after


NOT_KEPT = {"step", "RMS"}                           # transformers computes RMS anew at each step


def state_by_name(model, optimizer):
    return {f"{n}.{key}": value.clone() for n, p in model.named_parameters()
            for key, value in optimizer.state.get(p, {}).items() if key not in NOT_KEPT and torch.is_tensor(value)}


def prepare(case):
    """Writes the model, PyTorch's state and the case. Returns the names, and the state by name."""
    torch.manual_seed(case["seed"])
    model = getattr(transformers, case["class"])(models_oracle.config_of(case))
    if case["groups"] and not any(n.endswith("bias") for n, _ in model.named_parameters()):
        case["groups"] = False
    model.save_pretrained(case["model"])
    optimizer = optimizer_of(case, model, case["named"])
    for _ in range(case["steps"]):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    torch.save(optimizer.state_dict(), os.path.join(case["out"], "torch.pt"))
    with open(os.path.join(case["out"], "case.json"), "w") as f:
        json.dump({key: case[key] for key in ("model", "kind", "params", "groups", "memory")}, f)
    return model, state_by_name(model, optimizer)


def compare(what, got, want):
    off = [f"{what}: {n} is missing" for n in want if n not in got]
    off += [f"{what}: {n} is not PyTorch's" for n in got if n not in want]
    return off + [f"{what}: {n} has other values" for n in want if n in got and not torch.equal(got[n], want[n])]


def judge(case, model, want):
    with open(os.path.join(case["out"], "result.json")) as f:
        result = json.load(f)
    if "error" in result:
        return [result["error"]]
    names = [n for n, _ in model.named_parameters()]
    off = [f"named_parameters: number {i} is {a}, of transformers {b}" for i, (a, b) in
           enumerate(zip(result["names"] + [None] * len(names), names)) if a != b]
    off += [f"{n}: no such parameter in transformers" for n in result["names"] if n not in names]
    # With the engine, and with ps.optim. An engine's Muon also has AdamW's groups, which no class of PyTorch loads.
    for prefix in ("", "plain_") if case["kind"] != "Muon" else ("plain_",):
        taken = load_file(os.path.join(case["out"], prefix + "by_name.safetensors"))
        off += compare(prefix + "taken over", taken, want)
        back = optimizer_of(case, model, not case["named"], own=False)
        back.load_state_dict(torch.load(os.path.join(case["out"], prefix + "ours.pt")))
        off += compare(prefix + "given back", state_by_name(model, back), want)
        got, first = after_step(model, back, case["seed"]), optimizer_of(case, model, case["named"])
        first.load_state_dict(torch.load(os.path.join(case["out"], "torch.pt")))
        off += compare(prefix + "the next step", got, after_step(model, first, case["seed"]))
        listed = [n for group in back.state_dict()["param_groups"] for n in group["param_names"]]
        order = [n for group in back.param_groups for p in group["params"]
                 for n, q in model.named_parameters() if p is q]
        if listed != order:
            off.append(prefix + "param_names that were given back are not those of the parameters")
    return off


def main():
    run = runs.Run("order", cases=2 * len(CLASSES))
    runs.quiet_transformers()
    cases = [(case, *prepare(case)) for case in run.cases(draw_case)]
    run.psluajit("order_cases.lua", *[case["out"] for case, _, _ in cases])
    for case, model, want in cases:
        run.judged_case(case, judge(case, model, want))
    run.end()


if __name__ == "__main__":
    main()
