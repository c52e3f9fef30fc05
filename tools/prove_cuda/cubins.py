# SPDX-License-Identifier: BSD-3-Clause
"""Facts about the machine code in libps_cuda.so, which NVIDIA's cuobjdump reads: the images in the library, and the
resources that each kernel needs on the cards on which it can run.
"""
import os
import re
import subprocess

from table import dynamic_shared

KIB = 1024
# registers of a multiprocessor; threads of a launch without a bound (device.h)
REGISTERS, THREADS = 65536, 256
# largest number of parameter bytes in a launch, and the constants below them
CONSTANT = 4096
# For each card, the shared memory that one block can have, and the images that the card runs.
CARDS = [("A100 (8.0)", 163 * KIB, "sm_80"), ("RTX 30 and 40 (8.6, 8.9)", 99 * KIB, "sm_80"),
         ("H100, H200 (9.0)", 227 * KIB, "sm_90"), ("H100, H200 (9.0)", 227 * KIB, "sm_90a"),
         ("Blackwell (12.0), from PTX", 99 * KIB, "sm_90")]
# bytes of a block's shared memory that sm_90 reserves
SYSTEM = 1024
# ce_kept_kernel requests all of the card's shared memory except 2 KiB, which it needs for its sums.
KEPT = 2 * KIB
# Kernels that can use the stack: ops that are selected at run time (pow, sin, cos), sampling, and some fp64 kernels.
MAY_HAVE_STACK = re.compile(r"flat_kernel<\w+, -1>|any_kernel<|sample_kernel<|<double|, double>")
STACK = 16


class Cubins:
    """kernels: {arch: {name: dict(registers, stack, shared, constant, threads)}}; images, ptx: {arch: number}."""

    def __init__(self, cuobjdump, plugin):
        self.cuobjdump, self.plugin = cuobjdump, plugin
        self.images, self.ptx, self.kernels = {}, {}, {}
        for arch, kind in re.findall(r"\.(sm_\w+)\.(cubin|ptx)\n", self.run("-lelf", "-lptx")):
            table = self.images if kind == "cubin" else self.ptx
            table[arch] = table.get(arch, 0) + 1
        self.usage()
        self.bounds()

    def run(self, *options):
        env = dict(os.environ, PATH=os.path.dirname(self.cuobjdump) + ":" + os.environ["PATH"])   # for nvdisasm
        return subprocess.run(["nice", self.cuobjdump, *options, self.plugin], env=env, capture_output=True, text=True,
                              check=True).stdout

    def usage(self):
        text = self.run("-res-usage")
        names = sorted(set(re.findall(r" Function (\w+):", text)))
        readable = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
        self.names = {mangled: re.sub(r"\(.*", "", name).removeprefix("void ")
                      for mangled, name in zip(names, readable.stdout.splitlines())}
        arch = name = None
        for line in text.split("\n"):
            if match := re.match(r"arch = (\w+)", line):
                arch = match.group(1)
            elif match := re.match(r" Function (\w+):", line):
                name = match.group(1)
            elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+).* CONSTANT\[0\]:(\d+)", line):
                registers, stack, shared, local, constant = map(int, match.groups())
                shared -= SYSTEM if arch.startswith("sm_9") else 0
                self.kernels.setdefault(arch, {})[name] = dict(registers=registers, stack=stack + local, shared=shared,
                                                               constant=constant, threads=None)

    def bounds(self):
        """Reads the launch bounds: EIATTR_MAX_THREADS in each kernel's .nv.info."""
        with subprocess.Popen(["nice", self.cuobjdump, "-elf", self.plugin], stdout=subprocess.PIPE,
                              text=True) as dump:
            arch = name = None
            wanted = False
            for line in dump.stdout:
                if line.startswith("arch = "):
                    arch = line.split()[2]
                elif line.startswith(".nv.info."):
                    name = line.strip()[len(".nv.info."):]
                elif "EIATTR_MAX_THREADS" in line:
                    wanted = True
                elif wanted and "Value:" in line:
                    x, y, z = (int(n, 16) for n in line.split()[1:4])
                    self.kernels[arch][name]["threads"], wanted = x * y * z, False

    def products(self, arch):
        """Counts the instructions of warpgroup products in the images of an architecture."""
        now, found = None, 0
        for line in self.run("-sass", "-arch", arch).split("\n"):
            if line.startswith("arch = "):
                now = line.split()[2]
            elif now == arch and "HGMMA" in line:
                found += 1
        return found

    def complaints(self, sources):
        """Returns the violations. sources: the names of the .cu files."""
        wrong, n = [], len(sources) - 1              # attention_hopper is compiled only for sm_90a
        for arch, want in (("sm_80", n), ("sm_90", n), ("sm_90a", 1)):
            if self.images.get(arch) != want:
                wrong.append(f"{self.images.get(arch, 0)} images for {arch}; expected {want}")
        if self.ptx != {"sm_90": n}:
            wrong.append(f"PTX for {self.ptx}; expected {n} files of compute_90")
        a, b = set(self.kernels.get("sm_80", ())), set(self.kernels.get("sm_90", ()))
        wrong += [f"{self.names[name]} exists for only one of sm_80 and sm_90" for name in sorted(a ^ b)]
        for arch, kernels in sorted(self.kernels.items()):
            for name, k in sorted(kernels.items()):
                wrong += self.of_kernel(arch, self.names[name], k)
        return wrong

    def of_kernel(self, arch, name, k):
        where, threads = f"{name} for {arch}: ", k["threads"] or THREADS
        registers = -(-k["registers"] // 8) * 8
        dynamic = dynamic_shared("attention_hopper" if arch == "sm_90a" else "", name)
        if registers * threads > REGISTERS:
            yield f"{where}{k['registers']} registers for {threads} threads"
        if k["shared"] > 48 * KIB:
            yield f"{where}{k['shared']} bytes of static shared memory; the limit is {48 * KIB}"
        if name.startswith("ce_kept_kernel") and k["shared"] > KEPT:
            yield f"{where}{k['shared']} bytes of static shared memory; the launch leaves only {KEPT}"
        for card, limit, image in CARDS:
            if image == arch and k["shared"] + dynamic > limit:
                yield f"{where}{k['shared']} + {dynamic} bytes of shared memory; {card} has {limit}"
        if k["constant"] > CONSTANT:
            yield f"{where}{k['constant']} bytes of constants; the limit is {CONSTANT}"
        if k["stack"] > STACK and not MAY_HAVE_STACK.search(name):
            yield f"{where}a stack of {k['stack']} bytes"

    def said(self):
        """Returns the facts in a few lines."""
        all_ = [(self.names[name], k) for kernels in self.kernels.values() for name, k in kernels.items()]
        free = max(k["registers"] for _, k in all_ if not k["threads"])
        return [
            "images: " + ", ".join(f"{n} {arch}" for arch, n in sorted(self.images.items())) +
            "; PTX: " + ", ".join(f"{n} {arch}" for arch, n in sorted(self.ptx.items())),
            "kernels: " + ", ".join(f"{len(kernels)} {arch}" for arch, kernels in sorted(self.kernels.items())),
            f"registers: up to {free} without a launch bound, {max(k['registers'] for _, k in all_)} with one",
            f"static shared memory: up to {max(k['shared'] for _, k in all_)} bytes, constants up to "
            f"{max(k['constant'] for _, k in all_)}, stacks: {sum(k['stack'] > 0 for _, k in all_)}, up to "
            f"{max(k['stack'] for _, k in all_)} bytes",
        ]
