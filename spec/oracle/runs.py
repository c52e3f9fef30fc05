# SPDX-License-Identifier: BSD-3-Clause
"""Code that is shared by parts of the oracle whose cases are whole runs of a script: options, drawing, running
psluajit, counting.

Such a part draws its cases, writes them to a folder, runs them all in one psluajit with a script of this folder, and
judges the results. Parts whose cases are single calls use oracle.py instead.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT_S = 900
PLACE = ("index", "out", "model", "data", "seed")


def quiet_transformers():
    """Limits PyTorch to one thread, since small cases do not gain from more, and silences transformers' notes and
    progress bars."""
    import torch
    import transformers
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def distance(a, b):
    """The Euclidean norm of the difference of two tensors of any float types."""
    return float((a.double() - b.double()).norm())


class Run:
    """One run of a part. folder: the folder for its files, which is removed at the end unless --keep names it."""

    def __init__(self, name, cases):
        parser = argparse.ArgumentParser(description="Compares psluajit with PyTorch on drawn cases: " + name)
        parser.add_argument("--psluajit", default="build/psluajit")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--cases", type=int, default=cases)
        parser.add_argument("--only", help="SEED:INDEX, one case again")
        parser.add_argument("--keep", help="a new folder for the files of the run, which then stay")
        given = parser.parse_args()
        self.name, self.program, self.seed, self.kept = name, os.path.abspath(given.psluajit), given.seed, given.keep
        self.indices = range(given.cases)
        if given.only:
            self.seed, index = map(int, given.only.split(":"))
            self.indices = [index]
        if self.kept:
            os.makedirs(self.kept)
        self.folder = os.path.abspath(self.kept or tempfile.mkdtemp(prefix="oracle-"))
        self.count = self.off = 0

    def random(self, index):
        """The random numbers of one case. The same seed, part and index give the same case, independent of other
        cases."""
        return random.Random("%d:%s:%d" % (self.seed, self.name, index))

    def cases(self, draw):
        """Yields the cases that draw(rng, index) returns, with the keys of PLACE: the case's index, its own empty
        folder `out`, paths in it for a model's folder and for data (which do not exist yet), and a seed for PyTorch."""
        for index in self.indices:
            rng = self.random(index)
            out = os.path.join(self.folder, str(index))
            shutil.rmtree(out, ignore_errors=True)
            os.makedirs(out)
            case = draw(rng, index)
            yield case | {"index": index, "out": out, "model": os.path.join(out, "model"),
                          "data": os.path.join(out, "data.safetensors"), "seed": rng.getrandbits(62)}

    def psluajit(self, script, *arguments):
        """Runs a script of this folder. The script catches errors in single cases. If the script itself fails, no
        case counts."""
        env = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="")
        subprocess.run([self.program, os.path.join(HERE, script), *arguments], check=True, env=env, timeout=LIMIT_S)

    def ranks(self, script, count, *arguments):
        """Runs a script on `count` ranks. If it fails, the cases that it did not reach are wrong."""
        env = dict(os.environ, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        root = os.path.dirname(os.path.dirname(HERE))
        subprocess.run([self.program, os.path.join(root, "tools", "launch.lua"), "--nproc-per-node", str(count),
                        os.path.join(HERE, script), *arguments], check=False, env=env, timeout=LIMIT_S)

    def judged_case(self, case, off):
        """Counts a case of `cases`. If it is wrong, prints its random choices."""
        self.judged(case["index"], off, json.dumps({k: v for k, v in case.items() if k not in PLACE}))

    def judged(self, index, off, told):
        """Counts a case. off: a line for each error of the case. told: a description of the case in one line."""
        self.count += 1
        if off:
            self.off += 1
            print("off: %s %d: %s" % (self.name, index, told))
            for line in off[:8]:
                print("     " + str(line)[:500])
            print("     again: %s --only %d:%d" % (os.path.relpath(sys.argv[0]), self.seed, index), flush=True)

    def end(self):
        """Prints the result and exits, with status 1 if a case is wrong."""
        if not self.kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        print("oracle %s: %d cases, %d off" % (self.name, self.count, self.off))
        sys.exit(1 if self.off else 0)
