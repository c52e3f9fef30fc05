# SPDX-License-Identifier: BSD-3-Clause
"""Pipeline tables compared with those of torch.distributed.pipelining, whose stages are mocks, rank by rank.

psluajit also reads each of PyTorch's tables as a table that a script defines, and PyTorch reads each cell that
psluajit writes.
"""
import json
import os
from unittest.mock import MagicMock

from torch.distributed.pipelining import schedules

import runs

CLASSES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
           "looped_bfs": "ScheduleLoopedBFS", "zb_h1": "ScheduleInterleavedZeroBubble", "zb_v": "ScheduleZBVZeroBubble"}

# Intended differences.
BACKWARD_ORDER = """looped_bfs runs backwards from the first micro-batch to the last, as all schedules of psluajit do,
so that sums of gradients have the same order as without a pipeline. PyTorch's runs from the last to the first."""
LAST_RANK = """PyTorch's 1F1B prints a table for its last rank whose forwards begin with micro-batch 1 and end with one
too many. Its runtime does not use this table. The comparison uses the intended row: F0 B0 F1 B1 ..."""


def draw(rng):
    name = rng.choice(sorted(CLASSES))
    p, m, v = rng.randrange(2, 9), rng.randrange(1, 33), 1
    if name == "interleaved" or name == "looped_bfs":
        v = rng.randrange(1, 5)
    if name == "zb_v":
        v = 2
    if name == "1f1b":                                       # PyTorch has no table for fewer micro-batches
        m = max(m, p)
    if name in ("interleaved", "zb_h1"):                     # its rounds must divide the micro-batches
        while m % max(1, m // p):
            m -= 1
    return {"schedule": name, "stages": p, "virtual_stages": v, "micro_batches": m}


def stage(index, case):
    n = case["stages"] * case["virtual_stages"]
    mock = MagicMock(stage_index=index, num_stages=n, group_size=case["stages"], group_rank=0, is_first=index == 0,
                     is_last=index == n - 1,
                     stage_index_to_group_rank={k: k % case["stages"] for k in range(n)}, has_backward=False)
    return mock


def theirs(case):
    """Returns PyTorch's table as a list of cells for each rank."""
    made = [stage(k * case["stages"], case) for k in range(case["virtual_stages"])]
    made_of = getattr(schedules, CLASSES[case["schedule"]])
    many = issubclass(made_of, schedules.PipelineScheduleMulti)
    schedule = made_of(made if many else made[0], case["micro_batches"], loss_fn=lambda a, b: 0)
    order = schedule.pipeline_order if many else schedule._get_pipeline_order()
    return [[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in sorted(order)]


def as_here(case, rows):
    """Returns PyTorch's table with the intended differences applied."""
    last, m = case["stages"] - 1, case["micro_batches"]
    if case["schedule"] == "1f1b":
        rows[last] = [cell for i in range(m) for cell in ("%dF%d" % (last, i), "%dB%d" % (last, i))]
    if case["schedule"] == "looped_bfs":
        for row in rows:
            for i, cell in enumerate(row):
                if "B" in cell:
                    vstage, micro = cell.split("B")
                    row[i] = "%sB%d" % (vstage, m - 1 - int(micro))
    return rows


def main():
    run = runs.Run("pipe", 150)
    cases = [draw(run.random(index)) for index in run.indices]
    tables = [as_here(case, theirs(case)) for case in cases]
    texts = [{"text": "\n".join(",".join(row) for row in rows) + "\n"} for rows in tables]
    given, out = os.path.join(run.folder, "cases.json"), os.path.join(run.folder, "out.json")
    with open(given, "w", encoding="ascii") as f:
        json.dump(cases + texts, f)
    run.psluajit("pipe_cases.lua", given, out)
    with open(out, encoding="ascii") as f:
        ours = json.load(f)
    for k, index in enumerate(run.indices):
        mine, read, off = ours[k], ours[len(cases) + k], []
        if "error" in mine or "error" in read:
            off.append(mine.get("error") or read.get("error"))
        else:
            rows = [line.split(",") for line in mine["text"].rstrip("\n").split("\n")]
            off += ["rank %d: %s, PyTorch %s" % (r, ",".join(a), ",".join(b)) for r,
                    (a, b) in enumerate(zip(rows, tables[k])) if a != b]
            if len(rows) != len(tables[k]):
                off.append("%d ranks, PyTorch %d" % (len(rows), len(tables[k])))
            if read != mine:
                off.append("PyTorch's table, read: %s" % read)
            off += ["PyTorch reads %s as %s" % (cell, schedules._Action.from_str(cell)) for row in rows for cell in row
                    if str(schedules._Action.from_str(cell)) != cell]
        run.judged(index, off, json.dumps(cases[k]))
    run.end()


main()
