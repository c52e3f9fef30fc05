# SPDX-License-Identifier: BSD-3-Clause
"""Every row of ops.def, and the methods of tensors over them, against PyTorch."""
import os
import re
import sys

import differences
import rows_composed
import rows_elementwise
import rows_losses
import rows_products
import rows_random
import rows_reduce
import rows_views
from oracle import HERE, main

ROWS = rows_elementwise.ROWS + rows_views.ROWS + rows_reduce.ROWS + rows_products.ROWS + rows_random.ROWS \
    + rows_losses.ROWS + rows_composed.ROWS


def uncovered():
    """Rows of ops.def that have neither cases nor a reason."""
    with open(os.path.join(HERE, "..", "..", "src", "ops.def")) as f:
        names = re.findall(r"^OP\((\w+),", f.read(), re.M)
    covered = {op for row in ROWS for op in row.ops} | set(differences.NOT_COMPARED)
    unknown = sorted(covered - set(names))
    if unknown:
        sys.exit("oracle ops: not in ops.def: " + ", ".join(unknown))
    return [name for name in names if name not in covered]


if __name__ == "__main__":
    missing = uncovered()
    if missing:
        sys.exit("oracle ops: ops.def has rows without cases: %s" % ", ".join(missing))
    main("ops", ROWS, 5000)
