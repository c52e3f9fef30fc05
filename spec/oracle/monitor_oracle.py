# SPDX-License-Identifier: BSD-3-Clause
"""Event files: TensorBoard reads the files that the monitor `tensorboard` wrote in small training runs, in its
folders.

Half of the runs resume from an earlier step in a separate event file. TensorBoard must drop the first file's events
from that step on. The CSV monitor also writes files, which must have the same numbers.
"""
import csv
import glob
import json
import logging
import os
import sys

import runs

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    sys.exit("oracle monitor: this python lacks the packages of requirements-models.txt")

logging.getLogger("tensorboard").setLevel(logging.ERROR)         # each event that it drops is a warning
TAGS = ["train_loss", "lr", "loss_scale"]
TIMES = ["elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step"]


def draw(run, index):
    rng = run.random(index)
    case = {"type": rng.choice(["fp32", "bf16", "fp16"]), "batch": rng.randrange(1, 5),
            "accumulate": rng.randrange(1, 4),
            "steps": rng.randrange(1, 9), "breakdown": rng.random() < 0.3, "lr": rng.choice([0.01, 1e-3, 3.3e-5]),
            "folder": run.folder, "job": "job%d" % index}
    if rng.random() < 0.5:
        case["resumed"] = rng.randrange(0, case["steps"])
    return case


def close(a, b):
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def wrong(case, ours):
    """Returns the differences from the expected values as a list of lines."""
    off = []
    begins = ours["again"][0][0] if ours["again"] else float("inf")
    expected = [row for row in ours["first"] if row[0] < begins] + list(ours["again"])
    events = EventAccumulator(os.path.join(case["folder"], case["job"])).Reload()
    tags = TAGS[:3 if case["type"] == "fp16" else 2] + (TIMES if case["breakdown"] else [])
    found = sorted(events.Tags()["scalars"])
    if found != sorted("Train/Samples/" + tag for tag in tags):
        off.append("tags: %s" % found)
    for column, tag in enumerate(tags):
        read = [(e.step, e.value) for e in events.Scalars("Train/Samples/"
                                                          + tag)] if "Train/Samples/" + tag in found else []
        if [x for x, _ in read] != [row[0] for row in expected]:
            off.append("%s: steps %s, expected %s" % (tag, [x for x, _ in read], [row[0] for row in expected]))
        elif tag in TAGS:
            off += ["%s at %d: %g, expected %g" % (tag, x, value, row[column + 1])
                    for (x, value), row in zip(read, expected) if not close(value, row[column + 1])]
        path = os.path.join(case["folder"], case["job"] + "_csv", "Train_Samples_%s.csv" % tag)
        with open(path, encoding="ascii", newline="") as f:
            rows = list(csv.reader(f))
        if rows[0] != ["step", tag] or [int(row[0]) for row in rows[1:]] != [r[0]
                                                                             for r in ours["first"]
                                                                             + list(ours["again"])]:
            off.append("%s: %s" % (path, rows))
        elif read and not close(float(rows[-1][1]), read[-1][1]):
            off.append("%s ends with %s, TensorBoard with %g" % (path, rows[-1], read[-1][1]))
    if len(glob.glob(os.path.join(case["folder"], case["job"], "events.out.tfevents.*"))) != 1 + bool(ours["again"]):
        off.append("the number of event files")
    return off


def main():
    run = runs.Run("monitor", 40)
    cases = [draw(run, index) for index in run.indices]
    given, out = os.path.join(run.folder, "cases.json"), os.path.join(run.folder, "out.json")
    with open(given, "w", encoding="ascii") as f:
        json.dump(cases, f)
    run.psluajit("monitor_cases.lua", given, out)
    with open(out, encoding="ascii") as f:
        ours = json.load(f)
    for index, case, mine in zip(run.indices, cases, ours):
        run.judged(index, [mine["error"]] if "error" in mine else wrong(case, mine), json.dumps(case))
    run.end()


main()
