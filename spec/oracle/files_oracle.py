# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's .pt files and safetensors, in both directions.

torch.save writes random values (nested containers, numbers, text, tensors of all types, views with strides, tied
tensors). A writer in this file writes safetensors with headers of any length and tensors in any order. psluajit loads
each file and saves it again. The values that torch.load and the safetensors library then read must be the original
ones, bit for bit. lua/ps/io/serialize.lua defines how values are converted: tuples become lists, 2.0 becomes 2, and
None becomes an absent key.
"""
import collections
import json
import math
import os
import string

import torch
from safetensors import safe_open
from safetensors.torch import save

import runs

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I32": torch.int32,
          "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}
WORDS = ["", "a", "weight", "h.0.attn", "ключ", "\"quoted\"", "back\\slash", "tab\t", "nul\u0001",
         "emoji \U0001F600", "-100", "1"]


# -- drawing ---------------------------------------------------------------------------------------------------------
def draw_shape(rng):
    return [rng.choice([0, 1, 1, 2, 3, 4, 5, 7]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 6]))]


def draw_dense(rng, shape, dtype=None):
    """Returns random bits, so that NaNs with payloads, infinities, denormals and both zeros occur."""
    dtype = dtype or rng.choice(list(DTYPES.values()))
    n = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(n)], dtype=torch.bool).reshape(shape)
    data = bytearray(rng.randbytes(n * dtype.itemsize))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).clone().reshape(shape)


def draw_tensor(rng):
    t = draw_dense(rng, draw_shape(rng))
    way = rng.choice(["dense", "dense", "permuted", "part", "expanded", "offset", "every second"])
    if way == "permuted" and t.dim() > 1:
        t = t.permute(rng.sample(range(t.dim()), t.dim()))
    elif way == "part" and t.dim() and t.shape[0] > 1:
        t = t[1:]
    elif way == "expanded" and t.dim() and t.shape[0]:
        t = t[:1].expand(rng.randint(0, 5), *t.shape[1:])
    elif way == "offset" and t.numel() > 2:
        t = t.reshape(-1)[2:]
    elif way == "every second" and t.dim():
        t = t[..., ::2]
    return t


def draw_number(rng):
    return rng.choice([rng.randint(-9, 9), rng.randint(-2**31, 2**31), rng.randint(-2**53, 2**53),
                       rng.randint(-2**63, 2**63 - 1),
                       2**53, 2**53 + 1, -2**53 - 1, 2**63 - 1, -2**63, 255, 256, 65535, 65536, rng.gauss(0, 1),
                       rng.gauss(0, 1) * 1e300,
                       5e-324, 0.1, 1e16, -0.5, math.inf, -math.inf, math.nan])


def draw_value(rng, depth, tensors):
    kind = rng.choice(["number", "number", "text", "bool", "tensor", "tensor", "tied"]
                      + ["list", "tuple", "dict", "ordered"] * (depth > 0))
    if kind == "number":
        return draw_number(rng)
    if kind == "text":
        return rng.choice(WORDS + ["".join(rng.choices(string.printable, k=rng.choice([3, 255, 256, 300])))])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "tied" and tensors:
        return rng.choice(tensors)
    if kind in ("tensor", "tied"):
        tensors.append(draw_tensor(rng))
        return tensors[-1]
    items = [draw_value(rng, depth - 1, tensors) for _ in range(rng.choice([0, 1, 2, 3, 5]))]
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    keys = [rng.choice([rng.choice(WORDS), "k%d" % i, rng.randint(-5, 20)]) for i in range(len(items))]
    pairs = list(zip(keys, items))
    return collections.OrderedDict(pairs) if kind == "ordered" else dict(pairs)


def write_safetensors(rng, path, tensors, metadata):
    """Writes a valid file with a header of random length. The format does not define the padding, and Hugging Face's
    writer pads to a multiple of 8."""
    order = list(tensors)
    rng.shuffle(order)
    header, data, at = {}, b"", 0
    for name in order:
        raw = bits(tensors[name])
        kind = next(k for k, v in DTYPES.items() if v == tensors[name].dtype)
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [at, at + len(raw)]}
        data, at = data + raw, at + len(raw)
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode()
    length = len(text) + rng.choice([0, 0, rng.randint(1, 300), -len(text) % 8, (0x80 - len(text)) % 256,
                                     (0x4B50 - len(text)) % 65536])
    with open(path, "wb") as f:
        f.write(length.to_bytes(8, "little") + text + b" " * (length - len(text)) + data)


# -- judging ---------------------------------------------------------------------------------------------------------
def bits(t):
    """Returns a tensor's bytes, row by row. (A dimension of size 1 can have any stride, which view() does not
    accept.)"""
    return bytes(torch.empty(t.numel(),
                             dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8).numpy()) if t.numel() else b""


def same_tensor(a, b):
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def crossed(value):
    """Returns the value after the conversions that serialize.lua defines. A whole float becomes an int, so its zero
    has no sign."""
    if isinstance(value, bool) or isinstance(value, (str, torch.Tensor)):
        return value
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 2**53:
        return int(value)
    if isinstance(value, (list, tuple)):
        return [crossed(v) for v in value]
    if isinstance(value, dict):
        return {k: crossed(v) for k, v in value.items()}
    return value


def difference(want, got, where="value"):
    if isinstance(want, torch.Tensor):
        return None if same_tensor(want, got) else f"{where}: {got!r}, not {want!r}"
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return f"{where}: {got!r}, not {want!r}"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(want, got))]
    elif isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            return f"{where}: {got!r}, not {want!r}"
        pairs = [(f"{where}[{k!r}]", want[k], got[k]) for k in want]
    else:
        same = type(want) is type(got) and (want == got or want != want and got != got)
        return None if same else f"{where}: {got!r}, not {want!r}"
    return next((d for d in (difference(a, b, w) for w, a, b in pairs) if d), None)


def tied(value, found):
    """Returns the positions that share a tensor."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            tied(v, found)
    elif isinstance(value, dict):
        for v in value.values():
            tied(v, found)
    return found


def judge_pt(value, path):
    got = torch.load(path, weights_only=False)
    off = [difference(crossed(value), crossed(got))]
    ours = tied(got, [])
    drawn = tied(value, [])
    if len(ours) == len(drawn):
        for i, a in enumerate(drawn):
            for j in range(i):
                if a is drawn[j] and a.numel() and ours[i].data_ptr() != ours[j].data_ptr():
                    off.append(f"tensors {j} and {i} were one and are no more")
    return [o for o in off if o]


def judge_safetensors(tensors, path):
    got = {}
    with safe_open(path, "pt") as f:
        for name in f.keys():
            got[name] = f.get_tensor(name)
    return [d for d in [difference(tensors, got)] if d]


def main():
    run = runs.Run("files", cases=1200)
    job, checks = [], []
    for index in run.indices:
        rng = run.random(index)
        base = os.path.join(run.folder, str(index))
        if rng.random() < 0.5:
            value = draw_value(rng, 4, [])
            source, to = base + ".pt", [base + ".out.pt"]
            torch.save(value, source, pickle_protocol=rng.choice([2, 2, 2, 3, 4, 5]))
            checks.append((index, [(judge_pt, value, to[0])], f".pt of {value!r}"[:500]))
        else:
            names = rng.sample([w for w in WORDS if w != ""] + ["p%d" % i for i in range(6)],
                               rng.choice([0, 1, 2, 4, 8]))
            tensors = {name: draw_dense(rng, draw_shape(rng)) for name in names}
            metadata = rng.choice([None, {}, {"format": "pt"}, {"note": "ü \" \\ \n"}])
            source, to = base + ".safetensors", [base + ".out.safetensors", base + ".out.pt"]
            if rng.random() < 0.3:
                with open(source, "wb") as f:
                    f.write(save(tensors, metadata or None))      # for no tensors and {} it writes invalid JSON
            else:
                write_safetensors(rng, source, tensors, metadata)
            checks.append((index, [(judge_safetensors, tensors, to[0]), (judge_pt, tensors, to[1])],
                           f"safetensors with { {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()} }"
                           [:500]))
        job.append({"from": source, "to": to})
    path = os.path.join(run.folder, "job.json")
    with open(path, "w") as f:
        json.dump(job, f)
    run.psluajit("file_cases.lua", path)
    for (index, tests, told), case in zip(checks, job):
        problem = case["to"][0] + ".error"
        if os.path.exists(problem):
            with open(problem, encoding="utf-8", errors="replace") as f:
                off = [f.read()]
        else:
            off = [line for judge, value, path in tests for line in judge(value, path)]
        run.judged(index, off, told)
    run.end()


if __name__ == "__main__":
    main()
