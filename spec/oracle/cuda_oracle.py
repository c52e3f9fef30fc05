#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Repeats a sample of the proofs about the cuda kernels without a GPU (tools/prove_cuda/prove.py, docs/cuda.md).

The cases are fixed, since proofs do not depend on the seed. Without nvcc, all cases are skipped, which is an error
with CI=true.
"""
import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../tools/prove_cuda"))
import prove  # noqa: E402  pylint: disable=wrong-import-position


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--psluajit", required=True)
    parser.add_argument("--seed")
    parser.add_argument("--cases")
    args = parser.parse_args()
    run = prove.check(os.path.dirname(os.path.abspath(args.psluajit)), quick=True)
    print(f"oracle cuda: {run.cases} cases, {run.off} off")
    sys.exit(run.off > 0)


main()
