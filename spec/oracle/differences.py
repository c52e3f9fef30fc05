# SPDX-License-Identifier: BSD-3-Clause
"""Where psluajit differs from PyTorch on purpose: every one, by name, with its reason. Nothing else may be off."""

# Rows of ops.def that the part `ops` does not compare, and why.
NOT_COMPARED = {}


def whole(case, kind, key, ours, theirs):
    """The name of the rule that lets an output differ as a whole (missing, another type), or None."""
    return None


def elements(case, kind, key, ours, theirs, exact, off):
    """[(name of a rule, mask of elements that it lets differ)]."""
    return []
