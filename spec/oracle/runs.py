# SPDX-License-Identifier: BSD-3-Clause
"""What parts of the oracle share whose cases are whole runs of a script: options, drawing, running psluajit, counting.

Such a part draws its cases, writes them into a folder, has one psluajit run them all by a script beside it, and judges what
it wrote. Parts whose cases are single calls share oracle.py instead.
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
    """PyTorch on one thread, since small cases gain nothing by more, and transformers without notes and progress bars."""
    import torch
    import transformers
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def distance(a, b):
    """The Euclidean norm of the difference of two tensors of any float types."""
    return float((a.double() - b.double()).norm())


class Run:
    """One run of a part. folder: for its files; it goes in the end, unless --keep names it."""

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
        """The random numbers of one case: the same seed, part and index draw the same case, whatever others do."""
        return random.Random("%d:%s:%d" % (self.seed, self.name, index))

    def cases(self, draw):
        """The cases that draw(rng, index) gives, in turn, each with the keys of PLACE: its index, its own empty folder `out`, paths
        there for a model's folder and for data, which nobody has made yet, and a seed for PyTorch's numbers."""
        for index in self.indices:
            rng = self.random(index)
            out = os.path.join(self.folder, str(index))
            shutil.rmtree(out, ignore_errors=True)
            os.makedirs(out)
            case = draw(rng, index)
            yield case | {"index": index, "out": out, "model": os.path.join(out, "model"),
                          "data": os.path.join(out, "data.safetensors"), "seed": rng.getrandbits(62)}

    def psluajit(self, script, *arguments):
        """Runs a script beside this file. It catches what cases raise; if it ends otherwise, no case of it counts."""
        env = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="")
        subprocess.run([self.program, os.path.join(HERE, script), *arguments], check=True, env=env, timeout=LIMIT_S)

    def ranks(self, script, count, *arguments):
        """Runs a script as `count` ranks. Where it ends with an error, the cases that it did not come to are off."""
        env = dict(os.environ, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        root = os.path.dirname(os.path.dirname(HERE))
        subprocess.run([self.program, os.path.join(root, "tools", "launch.lua"), "--nproc-per-node", str(count),
                        os.path.join(HERE, script), *arguments], check=False, env=env, timeout=LIMIT_S)

    def judged_case(self, case, off):
        """Counts a case of `cases`; where it is off, what was drawn for it is shown."""
        self.judged(case["index"], off, json.dumps({k: v for k, v in case.items() if k not in PLACE}))

    def judged(self, index, off, told):
        """Counts a case. off: a line for each thing that is wrong with it; told: the case, in a line."""
        self.count += 1
        if off:
            self.off += 1
            print("off: %s %d: %s" % (self.name, index, told))
            for line in off[:8]:
                print("     " + str(line)[:500])
            print("     again: %s --only %d:%d" % (os.path.relpath(sys.argv[0]), self.seed, index), flush=True)

    def end(self):
        """Says how it went and exits, with 1 where a case is off."""
        if not self.kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        print("oracle %s: %d cases, %d off" % (self.name, self.count, self.off))
        sys.exit(1 if self.off else 0)
