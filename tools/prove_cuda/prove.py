#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Proves properties of the cuda kernels without a GPU: sentryward checks barriers, convergence and races in nvcc's
PTX, and cuobjdump reads facts of the machine code (docs/cuda.md, "Proved without a card").

    make prove-cuda                                            the whole table (table.py), an hour on one core
    python=$(tools/oracle.sh python)
    $python tools/prove_cuda/prove.py [--build BUILD] [--only PATTERN] [--quick] [--no-plants] [--keep FOLDER]
    $python tools/prove_cuda/prove.py --docs                   writes the table of docs/cuda.md

--only: only rows whose text matches the pattern. --quick: the sample that `make test-oracle` uses. --keep: the folder
for the input and the report of the last row. Exit code 1: something differs from the table.
"""
import argparse
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

import ptx
from cubins import Cubins
from layout import FOLDER, ROOT, Layouts, Struct
from table import NO_PLANTS, PLANTS, PROVED, REFUSED, ROWS, UNDECIDED

DOCS = os.path.join(ROOT, "docs/cuda.md")
BEGIN, END = "<!-- tools/prove_cuda/prove.py --docs writes this -->\n", "<!-- to here -->\n"
MEGABYTES = 6000                                     # memory limit of the prover

BITS = {"u8": 1, "s8": 1, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f32": 4, "f64": 8}
RED = "red"


def operations(generated):
    with open(os.path.join(generated, "ps_gen.h"), encoding="utf-8") as file:
        text = file.read()
    body = text[text.index("PS_OP_reshape"):]
    names = [name.strip().removeprefix("PS_OP_") for name in body[:body.index("}")].split(",")]
    return {name.split("=")[0].strip(): i for i, name in enumerate(names) if name}


def cached(build, name):
    """Returns a value that CMake found, or None."""
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as file:
        match = re.search(rf"^{name}:\w+=(.*)$", file.read(), re.M)
    return None if not match or match.group(1).endswith("NOTFOUND") else match.group(1)


class Files:
    """The PTX of the sources, cached by the contents of each source and its headers."""

    def __init__(self, build):
        self.nvcc, self.build, self.generated = cached(build, "NVCC"), build, os.path.join(build, "gen")
        self.include = cached(build, "CUBLASLT_INCLUDE")
        self.known, self.layouts, self.ops = {}, {}, operations(self.generated)
        self.version = subprocess.run([self.nvcc, "--version"], capture_output=True, check=True).stdout

    def path(self, source):
        said = hashlib.sha256(self.version)
        headers = [os.path.join(FOLDER, name) for name in sorted(os.listdir(FOLDER)) if name.endswith(".h")]
        headers += [os.path.join(ROOT, "src/backend/image.h"), os.path.join(self.generated, "ps_gen.h")]
        headers += [os.path.join(ROOT, "src/base", name) for name in ("blocks.h", "half.h", "philox.h", "update.h")]
        for path in headers + [os.path.join(FOLDER, source + ".cu")]:
            with open(path, "rb") as file:
                said.update(file.read())
        folder = os.path.join(self.build, "cuda_ptx")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{source}-{said.hexdigest()[:12]}.ptx")

    def module(self, source):
        if source not in self.known:
            path = self.path(source)
            arch = "compute_90a" if source == "attention_hopper" else "compute_80"
            if not os.path.exists(path):
                subprocess.run(["nice", self.nvcc, "-std=c++17", "-O3", f"-I{ROOT}/src", f"-I{self.generated}",
                                f"-I{self.include}", "-gencode", f"arch={arch},code={arch}", "-ptx",
                                f"{FOLDER}/{source}.cu", "-o", path + ".part"], check=True)
                os.rename(path + ".part", path)
            with open(path, encoding="utf-8") as file:
                self.known[source] = ptx.Module(file.read())
            self.layouts[source] = Layouts(source + ".cu", self.generated)
        return self.known[source]

    def kernel(self, row):
        module = self.module(row.source)
        name = row.kernel
        for op in ("gelu_backward", "gelu", "add", "scale_", "act_mul"):
            name = name.replace(f", {op}>", f", {self.ops[op]}>")
        if name not in module.kernels:
            raise SystemExit(f"{row.source}.cu has no kernel {name}")
        return module.kernels[name]

    def config(self, row, kernel):
        """Returns the prover's configuration, and the offsets of pointers."""
        layouts, declarations, arguments, arrays, pointers = self.layouts[row.source], [], [], [], set()
        if len(row.args) != len(kernel.params):
            raise SystemExit(f"{row}: {len(row.args)} parameters, the kernel has {len(kernel.params)}")
        for i, (value, (kind, size)) in enumerate(zip(row.args, kernel.params)):
            if isinstance(value, Struct):
                if layouts.size(value) != size:
                    raise SystemExit(f"{row}: struct {value.name} has {layouts.size(value)} bytes, in PTX {size}")
                entries = layouts.entries(value)
            else:
                if value in self.ops and kind == "u32":
                    value = self.ops[value]
                is_pointer = value is None or isinstance(value, str)
                entries = [(0, "pointer" if is_pointer else kind.replace("s", "u"), value)]
            for offset, type_, v in entries:
                place = {"parameter": i, "offset": offset}
                if type_ == "pointer":
                    pointers.add((i, offset))
                    if v is None:
                        arguments.append({**place, "type": "pointer", "value": None})
                    else:
                        declarations.append({**place, "type": "pointer", "space": "global", "object": v})
                        if v in row.values:
                            unit, numbers = row.values[v]
                            arrays.append({**place, "element_type": unit, "shapes": [[n] for n in numbers]})
                else:
                    v = v or 0
                    v = float(v) if type_[0] == "f" else v % (1 << 8 * BITS[type_])
                    arguments.append({**place, "type": type_, "value": v})
        config = {"schema": "spverify.kernel-input/v1", "entry": kernel.name,
                  "launch": {"grid_dim": list(row.grid), "block_dim": [row.block, 1, 1],
                             "dynamic_shared_bytes": row.shared},
                  "declarations": declarations, "arguments": arguments}
        if arrays:
            config["shape_arrays"] = arrays
        if row.branches:
            config["assumptions"] = {"representative_branches": True}
        return config, pointers


def judge(result):
    """Reads a report. Returns the outcome and, if the kernel is not proved, the reason."""
    checks, said = result.get("checks", {}), result.get("result")
    if said == "race_free" and checks.get("memory") == "passed" and checks.get("synchronization") == "passed":
        return PROVED, f"{result['counts']['memory_accesses']} accesses"
    reasons = [d.get("message") or d.get("code") or str(d) for d in result.get("diagnostics", [])]
    reason = (reasons or [result.get("message") or result.get("reason") or ""])[0]
    if said in ("potential_race", "not_wellsynced", "invalid_lifecycle"):
        return RED, f"{said}: {reason}"
    if said in ("timeout", "memory_budget_exceeded", "analysis_budget_exceeded", "allocation_failed"):
        return UNDECIDED, said
    if said == "unsupported":
        return (UNDECIDED if checks.get("synchronization") == "passed" else REFUSED), reason
    return "error", f"{said}: {reason}"


def run_prover(prover, text, said, megabytes, seconds):
    """Returns the prover's report and its processor seconds. The limit is in processor time, so that other programs do
    not change it."""
    def limit():
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([prover, "--ptx", text, "--config", said, "--sync-threads", "1",
                                    "--wellsync-timeout-seconds", "100000", "--max-steps-per-thread", "1000000",
                                    "--rss-limit-mib", str(megabytes)],
                                   stdout=out, stderr=subprocess.DEVNULL, preexec_fn=limit)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        try:
            result = json.load(out)
        except ValueError:
            over = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
            result = {"result": "timeout" if over else "tool_failure", "message": f"exit code {process.returncode}"}
    return result, usage.ru_utime + usage.ru_stime


def prove(files, row, kernel, prover, megabytes, keep=None):
    """Returns the outcome, the reason, and the processor seconds."""
    config, pointers = files.config(row, kernel)
    with tempfile.TemporaryDirectory() as folder:
        folder = keep or folder
        text, said = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "input.json")
        with open(text, "w", encoding="utf-8") as file:
            file.write(kernel.rewritten(pointers))
        with open(said, "w", encoding="utf-8") as file:
            json.dump(config, file)
        result, seconds = run_prover(prover, text, said, megabytes, row.seconds)
        if keep:
            with open(os.path.join(keep, "output.json"), "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
    return (*judge(result), seconds)


# -- checks ----------------------------------------------------------------------------------------------------------
def family(kernel):
    return kernel.split("<")[0]


def sources():
    return sorted(name[:-3] for name in os.listdir(FOLDER) if name.endswith(".cu"))


def gaps(files):
    """Lists kernels without a row, by family of templates, and files with barriers but too few planted errors."""
    wrong = []
    for source in sources():
        module, rows = files.module(source), [row for row in ROWS if row.source == source]
        there = {family(row.kernel) for row in rows}
        wrong += [f"{source}.cu: no row has kernel {name}" for name in
                  sorted({family(kernel) for kernel in module.kernels} - there)]
        waits = any(kernel.sync_lines() for kernel in module.kernels.values())
        if waits and source not in NO_PLANTS and sum(len(row.plants) for row in rows if row.quick) < 2:
            wrong.append(f"{source}.cu has barriers, but the sample removes fewer than two of them")
    return wrong


def block():
    """Returns the tables for docs/cuda.md."""
    lines, kernels = ["| file | kernel | proved for |", "|---|---|---|"], {}
    for row in ROWS:
        if row.outcome == PROVED:
            kernels.setdefault((row.source, row.kernel), []).append(row.shape + (" *" if row.branches else ""))
    lines += [f"| {source}.cu | {kernel.replace(' >', '>')} | {'; '.join(shapes)} |"
              for (source, kernel), shapes in kernels.items()]
    lines += ["", "Not proved:", "", "| file | kernel | operands | outcome | why |", "|---|---|---|---|---|"]
    lines += [f"| {row.source}.cu | {row.kernel.replace(' >', '>')} | {row.shape} | {row.outcome} | {row.why} |"
              for row in ROWS if row.outcome != PROVED]
    return "\n" + "\n".join(lines) + "\n\n"


def docs(write):
    """Returns whether docs/cuda.md has the tables. Writes them there if requested."""
    with open(DOCS, encoding="utf-8") as file:
        text = file.read()
    at, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if write:
        with open(DOCS, "w", encoding="utf-8") as file:
            file.write(text[:at] + block() + text[end:])
    return text[at:end] == block()


class Run:
    """Counts cases and failed cases."""

    def __init__(self):
        self.cases, self.off = 0, 0

    def case(self, good, text):
        self.cases += 1
        self.off += not good
        print(("   " if good else "off: ") + text, flush=True)

    def complaints(self, wrong, text):
        self.case(not wrong, text)
        for line in wrong:
            print("     " + line)

    def missing(self, what):
        """Reports a part that this machine cannot run as skipped, which counts as failed with CI=true."""
        self.case(os.environ.get("CI") != "true", f"skipped: {what}")


def prove_row(run, files, row, prover, quick, plants, keep):
    kernel = files.kernel(row)
    if not quick or row.quick != PLANTS:
        outcome, why, seconds = prove(files, row, kernel, prover, MEGABYTES, keep)
        said = "" if outcome == row.outcome else f", but the table says {row.outcome}"
        run.case(outcome == row.outcome, f"{outcome} ({seconds:.1f} s): {row}{said}; {why[:240]}")
    if not plants:
        return
    wanted = [(n, RED) for n in (row.plants[:2] if quick else row.plants)]
    wanted += [] if quick else [(n, PROVED) for n in row.redundant]
    for n, want in wanted:
        mutant, gone = kernel.without(n)
        outcome, _, seconds = prove(files, row, mutant, prover, MEGABYTES)
        run.case(outcome == want, f"{outcome} ({seconds:.1f} s): {row}; without {n} ({' '.join(gone.split())}), "
                                   f"{want} is expected")


def prove_table(run, files, prover, quick=False, only="", plants=True, keep=None):
    if not only:
        run.complaints(gaps(files), "each kernel has a row, each file with barriers planted errors")
        run.case(docs(False), "docs/cuda.md has the table" + ("" if docs(False) else "; prove.py --docs writes it"))
    for row in ROWS:
        if re.search(only, str(row)) and (row.quick or not quick):
            prove_row(run, files, row, prover, quick, plants, keep)


def find_cuobjdump(nvcc):
    """Finds NVIDIA's cuobjdump: next to nvcc, or in a package of the Python environment that runs this program."""
    places = [os.path.dirname(os.path.realpath(nvcc)), "/usr/local/cuda/bin"]
    places += [os.path.join(path, "nvidia/cu13/bin") for path in sys.path]
    return next((p for p in (os.path.join(place, "cuobjdump") for place in places) if os.access(p, os.X_OK)), None)


def read_cubins(run, files, whole):
    plugin, tool = os.path.join(files.build, "libps_cuda.so"), find_cuobjdump(files.nvcc)
    if not os.path.exists(plugin):
        return run.missing(f"there is no {plugin}; make build-all makes it")
    if not tool:
        return run.missing("there is no cuobjdump")
    cubins = Cubins(tool, plugin)
    print("   " + "\n   ".join(cubins.said()))
    run.complaints(cubins.complaints(sources()), "images and the resources of their kernels")
    if whole:
        found = {arch: cubins.products(arch) for arch in ("sm_80", "sm_90", "sm_90a")}
        run.case(found["sm_90a"] > 0 and not found["sm_80"] and not found["sm_90"],
                 f"warpgroup products (HGMMA): {found}; only sm_90a has any")


def find_prover():
    try:
        from sentryward._paths import native_binary
    except ImportError:
        return None
    return str(native_binary("sentryward-ptx", "SENTRYWARD_PTX_NATIVE"))


def check(build, quick=False, only="", plants=True, keep=None):
    """Runs all parts, and returns the Run."""
    run, prover = Run(), find_prover()
    if not cached(build, "NVCC") or not cached(build, "CUBLASLT_INCLUDE"):
        run.missing("nvcc or cuBLASLt was not found when the build was configured")
    elif not prover:
        run.missing("this python has no sentryward; tools/oracle.sh python prints one that has")
    else:
        files = Files(build)
        prove_table(run, files, prover, quick, only, plants, keep)
        if not only:
            read_cubins(run, files, not quick)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-plants", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    if args.docs:
        docs(True)
        return
    began = time.monotonic()
    run = check(os.path.abspath(args.build), args.quick, args.only, not args.no_plants, args.keep)
    print(f"{run.cases} cases, {run.off} off, {time.monotonic() - began:.0f} s")
    sys.exit(run.off > 0)


if __name__ == "__main__":
    main()
