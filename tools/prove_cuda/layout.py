# SPDX-License-Identifier: BSD-3-Clause
"""Layouts of the structs that kernels take by value, read from the sources, and their bytes as typed fields.

C rules of x86-64, which are also those of nvcc. The caller compares sizes with the PTX, so a struct that this file
misreads is an error.
"""
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "src/backend/cuda")
SCALARS = {
    "int64_t": ("u64", 8), "uint64_t": ("u64", 8), "long long": ("u64", 8), "size_t": ("u64", 8),
    "int": ("u32", 4), "int32_t": ("u32", 4), "uint32_t": ("u32", 4), "unsigned": ("u32", 4),
    "float": ("f32", 4), "double": ("f64", 8), "bool": ("u8", 1), "uint8_t": ("u8", 1),
}


class Struct(dict):
    """A value of a struct that a kernel takes: Struct("heads", p="q", row=64). Omitted fields are zero."""

    def __init__(self, name, n=1, **fields):
        super().__init__(fields)
        self.name, self.n = name, n


def read(path):
    with open(path, encoding="utf-8") as file:
        return re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read(), flags=re.S)


class Layouts:
    """The structs that `source` (a file of src/backend/cuda) includes; generated: the folder of ps_gen.h."""

    def __init__(self, source, generated):
        files = [os.path.join(ROOT, "src/ps.h"), os.path.join(generated, "ps_gen.h")]
        headers = sorted(name for name in os.listdir(FOLDER) if name.endswith(".h"))
        files += [os.path.join(ROOT, "src/backend/image.h"), os.path.join(ROOT, "src/base/update.h")]
        files += [os.path.join(FOLDER, name) for name in headers + [source]]
        text = "\n".join(read(path) for path in files)
        self.constants = {}
        for body in re.findall(r"\benum\s*\w*\s*\{([^{}]*)\}", text):
            self.enum(body)
        self.bodies = {}
        # the source is read last, so that its own structs take precedence
        for match in re.finditer(r"\bstruct\s+(\w+)\s*\{", text):
            self.bodies[match.group(1)] = self.body(text, match.end())

    def enum(self, body):
        value = -1
        for item in body.split(","):
            parts = re.split(r"[= ]+", item.strip(), maxsplit=1)
            value += 1
            if len(parts) > 1 and parts[1]:
                try:
                    value = self.number(parts[1])
                except (ValueError, KeyError, SyntaxError):
                    continue                         # sizes of templates or with sizeof, which no array has
            if parts[0]:
                self.constants.setdefault(parts[0], value)

    def number(self, expression, n=1):
        """Returns the value of a constant expression such as PS_MAX_IN / 4."""
        known = re.sub(r"[A-Za-z_]\w*", lambda m: str(n if m.group(0) == "N" else self.constants[m.group(0)]),
                       expression)
        if not re.fullmatch(r"[-\d\s*/+()]+", known):
            raise ValueError(expression)
        return int(eval(known.replace("/", "//")))  # only digits and operators remain

    @staticmethod
    def body(text, at):
        depth, begin = 1, at
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        body, old = text[begin:at - 1], None
        while old != body:                           # removes functions and enums inside the struct
            old, body = body, re.sub(r"[^;{}]*\{[^{}]*\}", "", body)
        return body

    def fields(self, name, n=1):
        """Returns [(field, type or Struct name, dims, offset)], the size and the alignment of a struct."""
        fields, offset, align = [], 0, 1
        for statement in self.bodies[name].split(";"):
            statement = re.sub(r"\b(const|struct|typename)\b", " ", " ".join(statement.split())).strip()
            if not statement or "(" in statement:
                continue
            match = re.match(r"(long long|[A-Za-z_]\w*)(?:<(\d+)>)?\s*(.*)$", statement)
            kind, inner, rest = match.group(1), int(match.group(2) or 1), match.group(3)
            for declarator in rest.split(","):
                stars, field, dims = re.match(r"\s*([*\s]*)(\w+)((?:\[[^]]*\])*)\s*$", declarator).groups()
                shape = [self.number(d, n) for d in re.findall(r"\[([^]]*)\]", dims)]
                if "*" in stars:
                    one, unit, own = "pointer", 8, 8
                elif kind in SCALARS:
                    one, unit = SCALARS[kind]
                    own = unit
                else:
                    _, unit, own = self.fields(kind, inner)
                    one = (kind, inner)
                offset = -(-offset // own) * own
                fields.append((field, one, shape, offset, unit))
                for d in shape:
                    unit *= d
                offset, align = offset + unit, max(align, own)
        return fields, -(-offset // align) * align, align

    def entries(self, value, offset=0):
        """Returns [(offset, type, value)] for a Struct. A pointer's value is the name of an object, or None."""
        fields, _, _ = self.fields(value.name, value.n)
        unknown = set(value) - {field[0] for field in fields}
        if unknown:
            raise ValueError(f"struct {value.name} has no {', '.join(sorted(unknown))}")
        found = []
        for field, kind, shape, at, unit in fields:
            found += self.spread(value.get(field), kind, shape, offset + at, unit)
        return found

    def spread(self, value, kind, shape, at, unit):
        if shape:
            step = unit
            for d in shape[1:]:
                step *= d
            value, found = list(value or []), []
            for i in range(shape[0]):
                found += self.spread(value[i] if i < len(value) else None, kind, shape[1:], at + i * step, unit)
            return found
        if isinstance(kind, tuple):
            return self.entries(value if isinstance(value, Struct) else Struct(kind[0], kind[1], **(value or {})), at)
        return [(at, kind, value)]

    def size(self, value):
        return self.fields(value.name, value.n)[1]
