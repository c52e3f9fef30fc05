# SPDX-License-Identifier: BSD-3-Clause
"""The golden values in spec/golden compared with PyTorch, which computes them again."""
import argparse
import json

import make_golden

parser = argparse.ArgumentParser(description=__doc__)
for option in ("--psluajit", "--seed", "--cases"):           # options of other parts; this part draws nothing
    parser.add_argument(option)
parser.parse_args()
off = 0
for name, settings in make_golden.SETS.items():
    with open(make_golden.path_of(name)) as file:
        place = make_golden.far(json.load(file), json.loads(make_golden.text_of(make_golden.train(settings))))
    if place:
        off += 1
        print("spec/golden/%s.json is not what make_golden.py writes: %s" % (name, place))
print("oracle golden: %d cases, %d off" % (len(make_golden.SETS), off))
raise SystemExit(1 if off else 0)
