# SPDX-License-Identifier: BSD-3-Clause
"""Whole steps of pipelines of two and three processes, compared with PyTorch and transformers in one process.

engine_oracle.py draws a case (a small GPT-2, masked labels, types, loss scales, clipping, learning rates). The model
is split into stages, with a schedule, virtual stages, m micro-batches (which need not divide the number of rows), and
a tied or an untied head. Each step's batch is given as a whole. Labels are masked so unevenly that the micro-batches'
numbers of targets are very different, and some are zero. Losses, norms, parameters and averages are judged as in
engine_oracle.py. The loss must be the same on all ranks.
"""
import glob
import json
import os

import torch
from safetensors.torch import load_file, save_file

import engine_oracle as engine
import runs

SCHEDULES = {"gpipe": [1], "1f1b": [1], "interleaved": [1, 2], "looped_bfs": [1, 2], "zb_h1": [1], "zb_v": [2]}
RANKS = (2, 3)
NAMES = sorted(SCHEDULES)


def draw_case(rng, index):
    case = engine.draw_case(rng)
    for key in ("resume_at", "loop"):
        case.pop(key, None)
    # Selects each pair of a schedule and a number of ranks, one after another.
    schedule, ranks = NAMES[index % len(NAMES)], RANKS[(index + index // len(NAMES)) % len(RANKS)]
    virtual = rng.choice(SCHEDULES[schedule])
    case.update(way="straight", steps=3, ranks=ranks, rates={"2": 2e-3} if rng.random() < 0.5 else {})
    case["gpt2"].update(n_layer=ranks * virtual + rng.randint(0, 1), tie_word_embeddings=rng.random() < 0.5)
    case["accumulate"] = rng.randint(2, 5)
    case["rows"] = rng.randint(case["accumulate"], 2 * case["accumulate"] + 1)
    case["config"]["gradient_accumulation_steps"] = case["accumulate"]
    case["config"]["pipeline"] = {"stages": ranks, "schedule": schedule, "virtual_stages": virtual}
    case["config"]["chunk_size"] = rng.choice([1024, 8192])
    return case


def draw_batches(rng, case):
    """Draws x and y, int32 [rows, positions], for each step and for each of its micro-batches. The first
    micro-batches have one row more."""
    whole, cut, V, T, m = {}, {}, case["gpt2"]["vocab_size"], case["positions"], case["accumulate"]
    empty_step = rng.randint(1, case["steps"])
    for step in range(1, case["steps"] + 1):
        sizes = [case["rows"] // m + (i < case["rows"] % m) for i in range(m)]
        pieces = []
        for micro, rows in enumerate(sizes, 1):
            x, y = (torch.tensor([[rng.randrange(V) for _ in range(T)] for _ in range(rows)], dtype=torch.int32)
                    for _ in "xy")
            share = {"none": 0.0, "some": 0.4, "prompts": rng.random()}.get(case["mask"], 0.0)
            y[torch.tensor([[rng.random() < share for _ in range(T)] for _ in range(rows)])] = engine.IGNORED
            if (case["mask"] == "whole micro-batches" and micro == 1 + step % m
                    or case["mask"] == "a whole step" and step == empty_step):
                y[:] = engine.IGNORED
            pieces.append((x, y))
            cut[step, micro] = (x, y)
        whole[step] = [torch.cat(list(t)) for t in zip(*pieces)]
    return whole, cut


def trained_state(case):
    """Returns the parameters and averages in a checkpoint, to which each rank has written its own tensors."""
    out = {}
    for path in glob.glob(os.path.join(case["out"], "checkpoints", "step-*", "rank-*.safetensors")):
        for name, tensor in load_file(path).items():
            moment = name.startswith("optimizer.")
            out[" ".join(name[len("optimizer."):].rsplit(".", 1)) if moment else name] = tensor
    return out


def judge(case, batches):
    results = []
    for rank in range(case["ranks"]):
        path = os.path.join(case["out"], "result-%d.json" % rank)
        if not os.path.exists(path):
            return ["rank %d did not come to it" % rank]
        with open(path, encoding="utf-8") as f:
            results.append(json.load(f))
        if results[rank] != results[0]:
            return ["rank %d says %s, rank 0 %s" % (rank, results[rank], results[0])]
    os.replace(os.path.join(case["out"], "result-0.json"), os.path.join(case["out"], "result.json"))
    return engine.judge(case, batches, trained_state)


def prepare(run, index):
    rng = run.random(index)
    case = draw_case(rng, index)
    case["index"], case["out"] = index, os.path.join(run.folder, str(index))
    case["model"], case["data"] = os.path.join(case["out"], "model"), os.path.join(case["out"], "data.safetensors")
    os.makedirs(case["out"])
    engine.make_model(rng, case)
    whole, cut = draw_batches(rng, case)
    save_file({f"{k}.{s}": t for s, xy in whole.items() for k, t in zip("xy", xy)}, case["data"])
    return case, cut


def main():
    run = runs.Run("stages", cases=8)
    runs.quiet_transformers()
    drawn = [prepare(run, index) for index in run.indices]
    for ranks in RANKS:
        job = os.path.join(run.folder, "job-%d.json" % ranks)
        with open(job, "w", encoding="ascii") as f:
            json.dump([case for case, _ in drawn if case["ranks"] == ranks], f)
        run.ranks("stages_cases.lua", ranks, job)
    for case, batches in drawn:
        run.judged(case["index"], judge(case, batches), engine.told(case))
    run.end()


if __name__ == "__main__":
    main()
