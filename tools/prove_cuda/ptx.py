# SPDX-License-Identifier: BSD-3-Clause
"""nvcc's PTX as text: its kernels, and the rewrites that the prover needs (docs/cuda.md lists them)."""
import re
import subprocess

SYNC = re.compile(r"\s(bar\.sync|bar\.warp\.sync|cp\.async\.wait_group|cp\.async\.commit_group)\b")


class Module:
    """The PTX of one file: .kernels by readable name, each a Kernel."""

    def __init__(self, text):
        # the declared part, and the remaining text
        text = re.sub(r"(?m)^(?:\.visible |\.weak )?\.func [^{;]*;\n", "", text)
        parts = re.split(r"(?m)^(?=(?:\.visible |\.weak )?\.entry |(?:\.visible |\.weak )?\.func )", text)
        self.head = parts[0]
        names = [re.search(r"\.entry (\w+)\(", part) for part in parts[1:]]
        mangled = [match.group(1) for match in names if match]
        readable = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True,
                                  check=True).stdout.splitlines()
        readable = [re.sub(r"\(.*", "", name).removeprefix("void ") for name in readable]
        self.kernels = {}
        functions = [part for part, match in zip(parts[1:], names) if not match]
        for part, name, short in zip([p for p, m in zip(parts[1:], names) if m], mangled, readable):
            self.kernels[short] = Kernel(self.head + "".join(functions), part, name)


class Kernel:
    def __init__(self, head, body, name):
        self.head, self.body, self.name = head, body, name
        declared = re.search(r"\.entry \w+\((.*?)\)\n", body, re.S).group(1)
        self.params = []                             # (scalar type, bytes)
        for line in declared.split(",\n"):
            line = line.strip()
            if not line:
                continue
            array = re.search(r"\.b8 \w+\[(\d+)\]", line)
            scalar = re.search(r"\.param \.(\w+)", line)
            self.params.append(("struct", int(array.group(1))) if array else
                               (scalar.group(1), int(re.sub(r"\D", "", scalar.group(1))) // 8))

    def sync_lines(self):
        """Returns the lines with a synchronization instruction, in order."""
        return [i for i, line in enumerate(self.body.split("\n")) if SYNC.search("\t" + line)]

    def without(self, n):
        """Returns the same kernel without its n-th synchronization instruction, and that instruction."""
        lines = self.body.split("\n")
        at = self.sync_lines()[n]
        gone, lines[at] = lines[at].strip(), ""
        return Kernel(self.head, "\n".join(lines), self.name), gone

    def rewritten(self, pointers):
        """Returns the text for the prover. pointers: the set of {(parameter, offset)} that are pointers."""
        return self.head + Rewrite(self, pointers).text


class Rewrite:
    def __init__(self, kernel, pointers):
        self.kernel, self.pointers, self.count = kernel, pointers, 0
        lines = kernel.body.split("\n")
        self.defs = {}
        for line in lines:
            match = re.match(r"\s*(?:@!?%p\d+ )?([\w.:]+)\s+(%\w+), ?(.*);", line)
            if match:
                self.defs.setdefault(match.group(2), []).append((match.group(1), match.group(3)))
        out = []
        for line in lines:
            out += self.line(line)
            if line == "{" and self.count == 0:
                out.append("@REGISTERS@")
        self.text = "\n".join(out).replace("@REGISTERS@", f"\t.reg .b32 %pw<{self.count + 1}>;\n"
                                                          f"\t.reg .b64 %pd<{self.count + 1}>;", 1)

    def fresh(self, bits):
        self.count += 1
        return f"%{'pw' if bits == 32 else 'pd'}{self.count}"

    def line(self, line):
        match = re.match(r"\tbfi\.b(32|64)\s+(%\w+), (%?\w+), (%?\w+), (\d+), (\d+);", line)
        if match:
            return self.insert_bits(*match.groups())
        match = re.match(r"\tand\.b64\s+(%rd\d+), (%rd\d+), (15|7|3);", line)
        if match:
            return self.mask(line, *match.groups())
        match = re.match(r"\tand\.b16\s+(%rs\d+), (%rs\d+), (15|7|3);", line)
        if match and self.is_low_byte(match.group(2)):
            return [f"\tmov.u16 \t{match.group(1)}, 0;"]
        match = re.match(r"\tatom\.(?:global\.)?cas\.b32\s+(%r\d+), \[(%rd\d+)\], (\S+), (\S+);", line)
        if match:                                    # belongs to a trap, which another thread has already triggered
            return [f"\tmov.u32 \t{match.group(1)}, 1;"]
        match = re.match(r"\tld\.param\.[us]8\s+(%rs\d+), \[(%rd\d+)[+\d-]*\];", line)
        if match and self.only_masked(match.group(1)):
            return [f"\tmov.u16 \t{match.group(1)}, 0;"]
        return [line]

    def insert_bits(self, bits, to, a, b, first, count):
        bits, first, count = int(bits), int(first), int(count)
        if count + first > bits:
            raise ValueError("bfi beyond its register")
        field = (1 << count) - 1
        part, moved, rest = self.fresh(bits), self.fresh(bits), self.fresh(bits)
        keep = ((1 << bits) - 1) ^ (field << first)
        keep -= (1 << bits) if keep >> (bits - 1) else 0
        return [f"\tand.b{bits} \t{part}, {a}, {field};", f"\tshl.b{bits} \t{moved}, {part}, {first};",
                f"\tand.b{bits} \t{rest}, {b}, {keep};", f"\tor.b{bits} \t{to}, {rest}, {moved};"]

    def only_masked(self, register):
        uses = re.findall(r"\n\t(\S+)\s+%\w+, " + re.escape(register) + r", (\d+);", self.kernel.body)
        total = len(re.findall(re.escape(register) + r"\b", self.kernel.body))
        return len(uses) == total - 1 and all(use[0].startswith("and.b") and use[1] in ("15", "7") for use in uses)

    def is_low_byte(self, register):
        defs = self.defs.get(register, [])
        return len(defs) == 1 and defs[0][0].startswith("cvt.u16.u64") and self.is_pointer(defs[0][1])

    def is_pointer(self, register):
        return self.offsets(register) == []

    def offsets(self, register):
        """Returns the sum that has been added to a pointer parameter, or None if the register is not such a pointer."""
        defs = self.defs.get(register, [])
        if len(defs) != 1:
            return None
        op, args = defs[0]
        if op == "ld.param.u64":
            return [] if self.is_pointer_param(args) else None
        if op.startswith("cvta") or op == "mov.u64" or op == "mov.b64":
            return self.offsets(args)
        if op in ("add.s64", "add.u64"):
            a, b = [x.strip() for x in args.split(",")]
            for base, other in ((a, b), (b, a)):
                if base.startswith("%") and (found := self.offsets(base)) is not None:
                    return found + [other]
        return None

    def is_pointer_param(self, address):
        match = re.fullmatch(r"\[(?:\w+_param_(\d+)|(%rd\d+))(?:\+(-?\d+))?\]", address.strip())
        if not match:
            return False
        # an item of a list, selected at run time; it is masked, so it is a pointer
        if match.group(2):
            return True
        return (int(match.group(1)), int(match.group(3) or 0)) in self.pointers

    def mask(self, line, to, register, bits):
        found = self.masked(register, bits)
        return [line] if found is None else found[0] + [f"\tmov.u64 \t{to}, {found[1]};"]

    def masked(self, register, bits):
        """Returns the lines that compute `register & bits` for a pointer or for pointers or-ed together, and the
        register or number with the result.

        (pointer + offset) & 15 is offset & 15, since objects begin at multiples of 16.
        """
        defs = self.defs.get(register, [])
        if len(defs) == 1 and defs[0][0] == "or.b64":
            parts = [self.masked(part.strip(), bits) for part in defs[0][1].split(",")]
            if None in parts:
                return None
            (one, a), (two, b) = parts
            both = self.fresh(64)
            return one + two + [f"\tmov.u64 \t{both}, {a};", f"\tor.b64 \t{both}, {both}, {b};"], both
        added = self.offsets(register)
        if added is None:
            return None
        total = self.fresh(64)
        out = [f"\tmov.u64 \t{total}, 0;"]
        out += [f"\tadd.s64 \t{total}, {total}, {more};" for more in added]
        return out + [f"\tand.b64 \t{total}, {total}, {bits};"], total
