# SPDX-License-Identifier: BSD-3-Clause
"""Rows with several sequences: bench/packed.lua compared with transformers, for folders of each family with the
random fields of models_oracle.py.

transformers computes the same sequences as a batch with padding: the loss of each position, and the gradients of
their sum. transformers' causal models also compute the packed rows, with position_ids that restart, without a cache
and a mask, and bench/hf.lua must return the same logits.
"""
import os
import subprocess

import torch
import transformers
from safetensors.torch import load_file, save_file

import models_oracle
import runs

CLASSES = [c for c in sorted(set(models_oracle.CLASSES)) if "LM" in c[1]]
LOSS, GRADIENT = 2e-6, 1e-5              # relative to the largest loss (at least 1), and to the largest gradient
# Gradients below this fraction of the largest gradient are rounding errors of exact zeros, as those of key biases are.
NOTHING = 1e-6


def draw_case(rng, index):
    family, name = CLASSES[index % len(CLASSES)]
    case = models_oracle.draw_case(rng, models_oracle.CLASSES.index((family, name)))
    rows, length = rng.randint(1, 3), rng.choice([5, 11, 40, 90, 150])
    lengths = []
    for _ in range(rows):
        row, rest = [], length
        while rest > 0:
            n = min(rest, rng.choice([1, 2, 7, 30, 100]))
            row.append(-n if rng.random() < 0.15 else n)
            rest -= n
        lengths.append(row)
    longest = max(abs(n) for row in lengths for n in row)
    # Rotary angles of the kind "dynamic" depend on the longest row of a call, which is not the longest row of a packed
    # call.
    if case["fields"].get("rope", {}).get("rope_type") == "dynamic":
        del case["fields"]["rope"]
    return case | {"lengths": lengths, "positions": longest + 3, "dtype": "float32", "mask": False, "refused": None,
                   "file": "whole", "use_cache": False, "length": 5, "rows": 1, "places": False, "types": False}


def batch_of(case):
    g = torch.Generator().manual_seed(case["seed"] % 2**31)
    rows = [[i + 1 if n > 0 else 0 for i, n in enumerate(row) for _ in range(abs(n))] for row in case["lengths"]]
    segments = torch.tensor(rows, dtype=torch.int32)
    low = case["vocab"] - 1 if case["pad"] == 0 else 6
    ids = torch.randint(6, max(low, case["vocab"]), segments.shape, generator=g, dtype=torch.int32)
    ids[segments == 0] = max(case["pad"], 0)
    return ids, segments


def sequences(case):
    for r, row in enumerate(case["lengths"]):
        at = 0
        for n in row:
            if n > 0:
                yield r, at, n
            at += abs(n)


def reference(case, ids, dtype):
    model = getattr(transformers, case["class"]).from_pretrained(case["model"], dtype=torch.float32).eval().to(dtype)
    if dtype == torch.float64 and case["family"] == "gpt2":
        for block in model.transformer.h:
            block.attn.reorder_and_upcast_attn = False
    where = list(sequences(case))
    longest = max((n for _, _, n in where), default=1)
    padded = torch.full((len(where), longest), max(case["pad"], 0))
    mask = torch.zeros(len(where), longest, dtype=torch.long)
    for i, (r, at, n) in enumerate(where):
        padded[i, :n], mask[i, :n] = ids[r, at:at + n].long(), 1
    losses = torch.zeros(ids.shape, dtype=dtype)
    if not where:
        return losses, {}, model
    logits = model(input_ids=padded, attention_mask=mask).logits
    total = 0
    for i, (r, at, n) in enumerate(where):
        if n > 1:
            own = torch.nn.functional.cross_entropy(logits[i, :n - 1], padded[i, 1:n], reduction="none")
            losses[r, at:at + n - 1] = own.detach()
            total = total + own.sum()
    if torch.is_tensor(total):
        total.backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


def by_places(run, case, ids, segments, env):
    """Returns the logits of rows with restarted positions, from hf.lua and from transformers."""
    places = torch.zeros(ids.shape, dtype=torch.int32)
    for r, at, n in sequences(case):
        places[r, at:at + n] = torch.arange(n, dtype=torch.int32)
    places[:, 0] = 0
    save_file({"input_ids": ids, "position_ids": places}, os.path.join(case["model"], "inputs.safetensors"))
    done = subprocess.run([run.program, os.path.join(runs.HERE, "../../bench/hf.lua"), case["model"]], env=env,
                          timeout=runs.LIMIT_S, capture_output=True, text=True)
    if done.returncode != 0:
        return [f"hf.lua: status {done.returncode}: {done.stderr}"]
    ours = load_file(os.path.join(case["model"], "outputs.safetensors"))["logits"]
    model = getattr(transformers, case["class"]).from_pretrained(case["model"], dtype=torch.float32).eval()
    theirs = model(input_ids=ids.long(), position_ids=places.long(), use_cache=False).logits.detach()
    off = float((ours - theirs).abs().max() / max(1, float(theirs.abs().max())))
    return [] if off <= 2e-5 else [f"logits of position_ids that begin again are {off} off"]


def judge(run, case):
    ids, segments = batch_of(case)
    path = os.path.join(case["out"], "rows.safetensors")
    save_file({"input_ids": ids, "segment_ids": segments}, path)
    env = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="")
    program = [run.program, os.path.join(runs.HERE, "../../bench/packed.lua"), case["model"], path]
    done = subprocess.run(program, env=env, timeout=runs.LIMIT_S, capture_output=True, text=True)
    if done.returncode != 0:
        return [f"status {done.returncode}: {done.stderr}"]
    ours = load_file(path.replace(".safetensors", ".out.safetensors"))
    (losses, grads, _), (near, near_grads, _) = reference(case, ids, torch.float64), reference(case, ids, torch.float32)
    off = []
    # Twice the error of PyTorch's own fp32, if that is larger.
    error = float((ours["losses"] - losses).abs().max())
    if error > max(LOSS * max(1, float(losses.abs().max())), 2 * float((near - losses).abs().max())):
        off.append(f"losses are {error} off, of {float(losses.abs().max())}")
    top = max((float(g.abs().max()) for g in grads.values()), default=0)
    for name, want in grads.items():
        got = ours.get("grad." + name)
        if got is None:
            off.append(name + ": no gradient")
            continue
        error, most = float((got - want).abs().max()), float(want.abs().max())
        if error > max(GRADIENT * most, NOTHING * top, 2 * float((near_grads[name] - want).abs().max())):
            off.append(f"the gradient of {name} is {error} off, of {most}")
    if "Causal" in case["class"] or case["family"] == "gpt2":
        off += by_places(run, case, ids, segments, env)
    return off


def main():
    run = runs.Run("packed", cases=24)
    runs.quiet_transformers()
    for case in run.cases(draw_case):
        models_oracle.write_folder(case, case["model"])
        run.judged_case(case, judge(run, case))
    run.end()


if __name__ == "__main__":
    main()
