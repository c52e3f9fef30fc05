# SPDX-License-Identifier: BSD-3-Clause
"""Whole training runs of the engine compared with PyTorch and transformers.

A case has a small GPT-2 from transformers, batches with masked labels, and a random configuration: type,
accumulation, the loop (written by hand, or model:micro_batches with the step's whole batch), optimizer, clipping,
loss scale, memory, changes of the learning rate, parameters that are frozen at first and thawed at some step,
parameters that are frozen from some step on, a stop and a resume. The engine trains it, a PyTorch loop trains it
in the same types, and the same loop trains it in float64, which counts as the exact result.

The loop computes the mean over all targets of a step (those that are not -100), as docs/memory.md promises for
micro-batches. A parameter tensor is wrong if its distance from float64 (2-norm) is more than twice PyTorch's
distance. If PyTorch's distance for that tensor is below PyTorch's average over the model, the average is used
instead, since sums in another order round differently. Optimizer averages are judged in the same way, and losses and
norms by the largest distance in the run.

PyTorch's distance in one run is partly luck. If this rule finds an error, PyTorch runs NEARBY more times, from
weights that differ by one rounding of the computation's type, and its largest distance is used. A correct run that
rounds differently is within that distance, and a run that computes something else is not.
"""
import copy
import functools
import json
import math
import os

import torch
import transformers
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import runs

IGNORED = -100
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # half a unit in the last place of 1
HALF_MAX = 65504.0
# Enough runs that an additional run is hardly ever twice as far away as the farthest of them.
NEARBY = 12


# -- drawing ---------------------------------------------------------------------------------------------------------
def draw_memory(rng, numel, folder):
    """Draws where the state is stored. The bits must not depend on it, so any choice is correct."""
    kind = rng.choice(["plain", "chunks", "budget", "disk", "sim"])
    if kind == "plain":
        return {"memory": "plain"}
    config = {"chunk_size": rng.choice([1024, 2048, 8192]), "eviction": rng.choice(["plan", "belady", "lru", "fifo"])}
    state = 18 * numel
    if kind == "budget":
        config["memory"] = {"host": int(1.2 * state) + 96 * 1024}
    elif kind == "disk":
        config["memory"] = {"host": int(rng.choice([0.3, 0.6]) * state) + 96 * 1024,
                            "disk": {"path": folder, "limit": 3 * state + 2**20}}
    elif kind == "sim":
        config["device"] = "sim"
        config["memory"] = {"device": int(rng.choice([0.5, 2]) * state) + 96 * 1024}
    return config


def draw_scale(rng):
    """Draws the fp16 section: a fixed loss scale, or a dynamic one that overflows and grows during the run."""
    block = {"enabled": True}
    if rng.random() < 0.4:
        block["loss_scale"] = 2.0 ** rng.randint(0, 10)
    else:
        block.update(loss_scale=0, initial_scale_power=rng.randint(6, 22), loss_scale_window=rng.randint(1, 5),
                     hysteresis=rng.randint(1, 2))
    return block


def draw_optimizer(rng):
    kind, params = rng.choice(["Adam", "AdamW", "SGD"]), {"weight_decay": rng.choice([0, 0.01, 0.1])}
    if kind == "SGD":
        params.update(lr=rng.choice([1e-2, 1e-1]), momentum=rng.choice([0, 0.5, 0.9]))
        if params["momentum"]:
            params.update(rng.choice([{}, {"nesterov": True}, {"dampening": 0.3}]))
    else:
        params.update(lr=rng.choice([1e-3, 3e-3, 1e-2]), betas=rng.choice([[0.9, 0.999], [0.8, 0.95]]),
                      eps=rng.choice([1e-4, 1e-3]))
    return {"type": kind, "params": params}


def averages(entry):
    """Returns the tensors that an optimizer stores for a parameter, by PyTorch's names."""
    return {key: value for key, value in entry.items() if key != "step" and torch.is_tensor(value)}


def draw_case(rng):
    heads = rng.randint(1, 3)
    case = {"type": rng.choice(["fp32", "fp32", "fp32", "bf16", "fp16"]), "accumulate": rng.choice([1, 1, 2, 3, 4]),
            "steps": rng.choice([6, 10, 20]), "groups": rng.random() < 0.4, "rates": {}}
    case["gpt2"] = dict(vocab_size=rng.randint(11, 61), n_positions=rng.randint(8, 16), n_layer=rng.randint(1, 2),
                        n_head=heads,
                        n_embd=heads * rng.choice([4, 8, 12]), layer_norm_epsilon=rng.choice([1e-5, 1e-6]),
                        activation_function=rng.choice(["gelu_new", "gelu"]), initializer_range=0.1)
    case["rows"], case["positions"] = rng.randint(1, 3), rng.randint(2, case["gpt2"]["n_positions"])
    case["mask"] = rng.choice(["none", "some", "prompts", "whole micro-batches", "a whole step"])
    config = {"optimizer": draw_optimizer(rng), "plan_print": False,
              "gradient_accumulation_steps": case["accumulate"], "device": "cpu"}
    if rng.random() < 0.5:
        config["gradient_clipping"] = rng.choice([0.05, 0.5, 5.0])
    if case["type"] == "bf16":
        config["bf16"] = {"enabled": True}
    elif case["type"] == "fp16":
        config["fp16"] = draw_scale(rng)
    for _ in range(rng.choice([0, 0, 1, 2])):
        case["rates"][str(rng.randint(2, case["steps"]))] = rng.choice([1e-4, 2e-3])
    case["config"] = config
    case["way"] = rng.choice(["straight", "straight", "ours, ours", "torch, ours", "ours, torch"])
    if case["way"] != "straight" and case["type"] == "fp16":
        case["way"] = "ours, ours"                     # PyTorch's file cannot store the loss scale
    if case["way"] != "straight":
        case["resume_at"] = rng.randint(1, case["steps"] - 1)
    case["loop"] = rng.choice(["hand", "micro_batches"])
    return case


def draw_batches(rng, case):
    """Draws x and y, int32 [rows, positions], for each (step, micro-batch). y has the target of each position, or
    -100."""
    batches, rows, T, V = {}, case["rows"], case["positions"], case["gpt2"]["vocab_size"]
    empty_step = rng.randint(1, case["steps"])
    for step in range(1, case["steps"] + 1):
        for micro in range(1, case["accumulate"] + 1):
            x = torch.tensor([[rng.randrange(V) for _ in range(T)] for _ in range(rows)], dtype=torch.int32)
            y = torch.tensor([[rng.randrange(V) for _ in range(T)] for _ in range(rows)], dtype=torch.int32)
            if case["mask"] == "some":
                y[torch.tensor([[rng.random() < 0.4 for _ in range(T)] for _ in range(rows)])] = IGNORED
            elif case["mask"] == "prompts":
                for r in range(rows):
                    y[r, : rng.randint(0, T)] = IGNORED
            elif (case["mask"] == "whole micro-batches" and case["accumulate"] > 1
                  and micro == 1 + step % case["accumulate"]):
                y[:] = IGNORED
            elif case["mask"] == "a whole step" and step == empty_step:
                y[:] = IGNORED
            batches[step, micro] = (x, y)
    return batches


# -- the loop of PyTorch -----------------------------------------------------------------------------------------------
class Scaler:
    """DeepSpeed's FP16_Optimizer._update_scale, written from its description. The scale is halved after `hysteresis`
    overflows, and doubled after each window of good steps."""

    def __init__(self, block):
        self.dynamic = not block.get("loss_scale")
        self.scale = 2.0 ** block["initial_scale_power"] if self.dynamic else block["loss_scale"]
        self.window, self.hysteresis = block.get("loss_scale_window", 1000), block.get("hysteresis", 2)
        self.left, self.step, self.overflowed_at = self.hysteresis, 0, -1

    def update(self, overflow):
        if not self.dynamic:
            return
        if overflow:
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2, 1.0)
            self.overflowed_at = self.step
        else:
            good = self.step - self.overflowed_at - 1
            if good > 0 and good % self.window == 0:
                self.scale, self.left = self.scale * 2, self.hysteresis
        self.step += 1


@functools.lru_cache(maxsize=1)
def loaded(path):
    """Returns a case's model. Each loop copies it, since reading it takes as long as several steps."""
    return GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)


class Loop:
    """compute: the type of parameters, activations and gradients. master: the type of the values that the optimizer
    updates."""

    def __init__(self, case, compute, master):
        self.case, self.compute, self.master = case, compute, master
        self.model = copy.deepcopy(loaded(case["model"]))
        initial = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.model.to(compute).eval()
        self.params = dict(self.model.named_parameters())
        self.names = list(self.params)
        if case["groups"]:
            self.names = ([n for n in self.names if n.endswith("bias")]
                          + [n for n in self.names if not n.endswith("bias")])
        self.masters = {n: initial[n].to(master).requires_grad_() for n in self.names}
        config = case["config"]
        given = config["optimizer"]["params"]
        make = getattr(torch.optim, config["optimizer"]["type"])
        groups = [{"params": [self.masters[n] for n in self.names]}]
        if case["groups"]:
            groups = [{"params": [self.masters[n] for n in self.names if n.endswith("bias")], "weight_decay": 0.0},
                      {"params": [self.masters[n] for n in self.names if not n.endswith("bias")]}]
        self.optimizer = make(groups, foreach=False, **given)
        self.scaler = Scaler(config["fp16"]) if "fp16" in config else None
        self.losses, self.norms, self.skipped, self.largest = [], [], [], []
        self.train(case.get("thaw", {}).get("names", []), False)

    def train(self, names, on):
        """Freezes or thaws parameters. The master of a thawed parameter begins with the parameter's value."""
        for n in names:
            self.params[n].requires_grad_(on)
            with torch.no_grad():
                if on and self.compute != torch.float64:
                    self.masters[n].copy_(self.params[n])

    def step(self, number, batches, skip=None):
        """skip: whether the engine skipped this step. The float64 loop needs it, since nothing overflows in float64."""
        case = self.case
        if str(number) in case["rates"]:
            for group in self.optimizer.param_groups:
                group["lr"] = case["rates"][str(number)]
        for key, on in (("thaw", True), ("freeze", False)):
            if case.get(key, {}).get("step") == number:
                self.train(case[key]["names"], on)
        pieces = [batches[number, m] for m in range(1, case["accumulate"] + 1)]
        total = sum(int((y != IGNORED).sum()) for _, y in pieces)
        scale = self.scaler.scale if self.scaler and self.compute != torch.float64 else 1.0
        sums = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        for x, y in pieces:
            count = int((y != IGNORED).sum())
            logits = self.model(x.long()).logits
            wide = logits if self.compute == torch.float64 else logits.float()
            loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), y.long().flatten(), ignore_index=IGNORED,
                                                     reduction="sum")
            self.losses.append(float(loss.detach()) / count if count else None)
            if count == 0:
                continue
            self.model.zero_grad(set_to_none=True)
            (loss * (scale / total)).backward()
            for n, p in self.params.items():
                if p.requires_grad:
                    sums[n] += p.grad.to(self.master)
        if total == 0:  # without targets, the step is skipped, and the loss scale does not change
            self.largest.append(0.0)
            self.skipped.append(True)
            self.norms.append(None)
            return
        self.largest.append(max(float(g.abs().max()) for g in sums.values()))
        overflow = not all(bool(torch.isfinite(g).all()) for g in sums.values())
        if self.compute != torch.float64:
            skip = overflow and (self.scaler is not None)
            if self.scaler:
                self.scaler.update(skip)
        self.skipped.append(skip)
        norm = math.sqrt(sum(float((g.double() / scale).square().sum()) for g in sums.values()))
        self.norms.append(norm)
        if skip:
            return
        factor = 1 / scale
        clip = case["config"].get("gradient_clipping")
        if clip:
            factor *= min(1.0, clip / (norm + 1e-6))
        for n, m in self.masters.items():
            m.grad = sums[n] * factor if self.params[n].requires_grad else None
        self.optimizer.step()
        self.publish()

    def publish(self):
        with torch.no_grad():
            for n, p in self.params.items():
                p.copy_(self.masters[n])

    def perturb(self, seed):
        """Changes every weight by one rounding of the computation's type."""
        gen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for m in self.masters.values():
                m.mul_(1 + EPS[self.compute] * (2 * torch.randint(0, 2, m.shape, generator=gen) - 1))
        self.publish()

    def save(self, path):
        model = {n: m.detach().clone() for n, m in self.masters.items()}
        torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path):
        saved = torch.load(path, weights_only=False)
        with torch.no_grad():
            for n, m in self.masters.items():
                m.copy_(saved["model"][n])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.publish()

    def state(self):
        out = {n: m.detach() for n, m in self.masters.items()}
        for n, m in self.masters.items():
            for key, value in averages(self.optimizer.state.get(m, {})).items():
                out[f"{n} {key}"] = value
        return out


# -- judging ---------------------------------------------------------------------------------------------------------
def trained_state(case):
    saved = torch.load(os.path.join(case["out"], "trained.pt"), weights_only=False)
    names = case["names"]
    out = {n: saved["model"][n] for n in names}
    for i, n in enumerate(names):
        for key, value in averages(saved["optimizer"]["state"].get(i, {})).items():
            out[f"{n} {key}"] = value
    return out


def judge_inspected(case, inspected):
    """Returns the errors in ps.inspect's mean, std, min and max of the parameters that the engine saved."""
    off = []
    saved = torch.load(os.path.join(case["out"], "trained.pt"), weights_only=False)["model"]
    for name in case["names"]:
        t = saved[name].double()
        want = [float(x) for x in (t.mean(), t.std(), t.min(), t.max())]
        got = [float(x) for x in inspected.get(name, [])]
        spread = 1e-12 * float(t.abs().max())
        if len(got) != 4 or any(not abs(g - w) <= spread for g, w in zip(got[:2], want[:2])) or got[2:] != want[2:]:
            off.append(f"ps.inspect of {name}: mean, std, min, max are {got}, PyTorch's {want}")
    return off


def kinds(state):
    """Returns names by kind, separately for parameters and the optimizer's averages."""
    of = {}
    for n in state:
        of.setdefault(n.partition(" ")[2], []).append(n)
    return list(of.values())


def judge_state(ours, theirs, truth):
    """Returns the errors in the engine's tensors, one line each. theirs: the states of PyTorch's runs."""
    off = []
    for names in kinds(truth):
        distance = {n: max(float((t[n].double() - truth[n]).norm()) for t in theirs) for n in names}
        numel = sum(truth[n].numel() for n in names)
        typical = math.sqrt(sum(d * d for d in distance.values()) / numel)
        for n in names:
            if n not in ours or tuple(ours[n].shape) != tuple(truth[n].shape):
                off.append(f"{n}: {tuple(ours[n].shape) if n in ours else 'missing'}, not {tuple(truth[n].shape)}")
                continue
            got = float((ours[n].double() - truth[n]).norm())
            bound = 2 * max(distance[n], typical * math.sqrt(truth[n].numel())) + 2.0**-24 * float(truth[n].norm())
            if not got <= bound:
                off.append(f"{n}: {got:.3g} from float64, PyTorch {distance[n]:.3g}, bound {bound:.3g}")
    return off


def judge_numbers(what, ours, theirs, truth):
    """Judges losses or norms one by one. None means that there is no number (a micro-batch without targets)."""
    if len(ours) != len(truth):
        return [f"{len(ours)} {what}s, not {len(truth)}"]
    off = []
    worst = max((abs(t - s) for run in theirs for t, s in zip(run, truth) if s is not None and math.isfinite(t)),
                default=0.0)
    for i, (got, want) in enumerate(zip(ours, truth)):
        if (want is not None and math.isfinite(theirs[0][i])
                and not abs(float(got) - want) <= 2 * worst + 2.0**-23 * abs(want)):
            off.append(f"{what} {i + 1}: {float(got):.9g}, float64 {want:.9g}, PyTorch at most {worst:.3g} off")
    return off


def kept(numbers, skipped):
    """Selects, from one number per step, the numbers of the steps that were not skipped."""
    return [n for n, skip in zip(numbers, skipped) if not skip]


def judge(case, batches, trained=trained_state):
    """Returns the errors of a case, one line each. trained: a function that returns the engine's tensors."""
    with open(os.path.join(case["out"], "result.json")) as f:
        result = json.load(f)
    if "error" in result:
        return [result["error"]]
    if trained is trained_state and (off := judge_inspected(case, result["inspected"])):
        return off
    first = case["resume_at"] + 1 if case["way"] == "torch, ours" else 1
    last = case["resume_at"] if case["way"] == "ours, torch" else case["steps"]

    def loop(compute, master, seed=None, skipped=None):
        made = Loop(case, compute, master)
        if case["way"] == "torch, ours":
            made.load(case["started"])
        if seed is not None:
            made.perturb(seed)
        for step in range(first, case["steps"] + 1):
            made.step(step, batches, skip=skipped[step - first] if skipped else None)
        return made

    theirs = loop(TYPES[case["type"]], torch.float32)
    # Both decide with gradients that round differently. Near the largest half number their decisions can differ, and
    # then the runs diverge.
    for i, (a, b) in enumerate(zip(result["skipped"], theirs.skipped)):
        total = sum(int((batches[first + i, m][1] != IGNORED).sum()) for m in range(1, case["accumulate"] + 1))
        if a != b and total > 0:
            largest = theirs.largest[i]
            if not math.isfinite(largest) or HALF_MAX / 8 < largest:
                case["note"] = f"decided otherwise about step {first + i}, whose largest gradient is {largest:.3g}"
                return []
            return [f"step {first + i}: skipped = {a}, PyTorch {b}, largest gradient {largest:.3g}"]
    truth = loop(torch.float64, torch.float64, skipped=theirs.skipped)
    if case["way"] == "ours, torch":                     # PyTorch continues from the state that the engine saved
        follower = Loop(case, TYPES[case["type"]], torch.float32)
        follower.load(os.path.join(case["out"], "trained.pt"))
        for step in range(last + 1, case["steps"] + 1):
            follower.step(step, batches)
        ours = follower.state()
    else:
        ours = trained(case)
    n_losses, n_norms = len(result["losses"]), len(result["norms"])

    def look(runs_of):
        off = judge_numbers("loss", result["losses"], [r.losses[:n_losses] for r in runs_of], truth.losses[:n_losses])
        if case["config"].get("gradient_clipping"):
            off += judge_numbers("norm", kept(result["norms"], theirs.skipped),
                                 [kept(r.norms[:n_norms], theirs.skipped) for r in runs_of],
                                 kept(truth.norms[:n_norms], theirs.skipped))
        return off + judge_state(ours, [r.state() for r in runs_of], truth.state())

    off = look([theirs])
    if off:
        near = [loop(TYPES[case["type"]], torch.float32, seed) for seed in range(NEARBY)]
        off = look([theirs] + [r for r in near if r.skipped == theirs.skipped])
    return off


# -- running ---------------------------------------------------------------------------------------------------------
def make_model(rng, case):
    """Writes the case's model, and returns it; case["names"] becomes its parameters in the optimizer's order."""
    torch.manual_seed(rng.getrandbits(62))
    model = GPT2LMHeadModel(GPT2Config(**case["gpt2"], embd_pdrop=0, attn_pdrop=0, resid_pdrop=0))
    with torch.no_grad():
        for n, p in model.named_parameters():            # biases and scales that are not all 0 and 1
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(case["model"])
    case["names"] = [n for n, _ in model.named_parameters()]
    if case["groups"]:
        case["names"] = ([n for n in case["names"] if n.endswith("bias")]
                         + [n for n in case["names"] if not n.endswith("bias")])
    return model


def draw_freezing(rng, case):
    """Draws parameters that are frozen until a step, and parameters that are frozen from a later step on."""
    names = list(case["names"])
    rng.shuffle(names)
    at = rng.randint(2, case["steps"])
    case["thaw"] = {"step": at, "names": names[: rng.randint(1, len(names) - 1)]}
    case["freeze"] = {"step": rng.randint(at + 1, case["steps"] + 1), "names": names[: -rng.randint(1, len(names) - 1)]}


def prepare(run, index):
    rng, folder = run.random(index), run.folder
    case = draw_case(rng)
    case["index"], case["out"] = index, os.path.join(folder, str(index))
    case["model"], case["data"] = os.path.join(case["out"], "model"), os.path.join(case["out"], "data.safetensors")
    os.makedirs(case["out"])
    numel = sum(p.numel() for p in make_model(rng, case).parameters())
    batches = draw_batches(rng, case)
    if case["way"] in ("straight", "ours, ours") and rng.random() < 0.5:
        draw_freezing(rng, case)
    save_file({f"{k}.{s}.{m}": t for (s, m), xy in batches.items() for k, t in zip("xy", xy)}, case["data"])
    memory = draw_memory(rng, numel, folder)
    case["config"].update(memory)
    if case["way"] == "ours, ours":
        case["second"] = "ours"
        case["second_config"] = {k: v for k, v in case["config"].items()
                                 if k not in ("memory", "chunk_size", "eviction", "device")}
        case["second_config"].update({"device": "cpu"} | draw_memory(rng, numel, folder))
    if case["way"] == "torch, ours":
        case["first"], case["started"] = "torch", os.path.join(case["out"], "started.pt")
        loop = Loop(case, TYPES[case["type"]], torch.float32)
        for step in range(1, case["resume_at"] + 1):
            loop.step(step, batches)
        loop.save(case["started"])
    return case, batches


def told(case):
    config = {k: v for k, v in case["config"].items() if k != "plan_print"}
    keys = ("type", "way", "mask", "accumulate", "loop", "steps", "rows", "positions", "groups", "resume_at", "rates",
            "thaw", "freeze", "gpt2")
    return json.dumps({k: case[k] for k in keys if k in case} | {"config": config})


def main():
    run = runs.Run("engine", cases=40)
    runs.quiet_transformers()
    drawn = [prepare(run, i) for i in run.indices]
    job = os.path.join(run.folder, "job.json")
    with open(job, "w") as f:
        json.dump([case for case, _ in drawn], f)
    run.psluajit("engine_cases.lua", job)
    for case, batches in drawn:
        off = judge(case, batches)
        run.judged(case["index"], off, told(case))
        if "note" in case:
            print(f"engine {case['index']}: {case['note']}")
    run.end()


if __name__ == "__main__":
    main()
