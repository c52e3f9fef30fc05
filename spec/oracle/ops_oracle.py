# SPDX-License-Identifier: BSD-3-Clause
"""Every row of ops.def, and the tensor methods that use them, compared with PyTorch."""
import os
import re
import sys

import torch

import differences
import rows_composed
import rows_counts
import rows_elementwise
import rows_images
import rows_index
import rows_losses
import rows_packed
import rows_products
import rows_random
import rows_reduce
import rows_small
import rows_views
from oracle import HERE, main

ROWS = rows_elementwise.ROWS + rows_views.ROWS + rows_reduce.ROWS + rows_products.ROWS + rows_random.ROWS \
    + rows_losses.ROWS + rows_composed.ROWS + rows_images.ROWS + rows_index.ROWS + rows_small.ROWS \
    + rows_packed.ROWS + rows_counts.ROWS


def uncovered():
    """Returns the rows of ops.def that have neither cases nor a reason."""
    with open(os.path.join(HERE, "..", "..", "src", "ops.def")) as f:
        names = re.findall(r"^OP\((\w+),", f.read(), re.M)
    covered = {op for row in ROWS for op in row.ops} | set(differences.NOT_COMPARED)
    unknown = sorted(covered - set(names))
    if unknown:
        sys.exit("oracle ops: not in ops.def: " + ", ".join(unknown))
    return [name for name in names if name not in covered]


def unknown_names():
    """Returns the names in docs/pytorch.md that do not exist in torch."""
    with open(os.path.join(HERE, "..", "..", "docs", "pytorch.md")) as f:
        rows = [line.split("|") for line in f if line.startswith("| `")]
    names = [re.findall("`([^`]+)`", row[2] if len(row) == 6 else row[1]) for row in rows]

    def known(name):
        found = torch
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is not None
    return [n for some in names for n in some if not known(n)]


if __name__ == "__main__":
    if unknown_names():
        sys.exit("oracle ops: docs/pytorch.md has names that torch has not: %s" % ", ".join(unknown_names()))
    missing = uncovered()
    if missing:
        sys.exit("oracle ops: ops.def has rows without cases: %s" % ", ".join(missing))
    main("ops", ROWS, 5000)
