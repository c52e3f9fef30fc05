# SPDX-License-Identifier: BSD-3-Clause
"""GGUF files: psluajit compared with the package gguf and llama.cpp's own vocabularies.

The package writes random metadata of every type, and tensors of every type that psluajit reads. Their blocks are
random bytes, so some scales are infinite, NaN, denormal or negative. The metadata, and the values of the package's
dequantize, must be equal bit for bit (a NaN equals any NaN). psluajit must reject a type that it lacks with an error
that contains the type's name. The random values that psluajit writes must have the bytes of the package's quantize.

The vocabularies come with texts and their ids from the source package of PyPI's llama-cpp-python (tools/oracle.sh
unpacks them). For each, psluajit must return these ids, or reject the tokenizer by name as listed in REFUSED.
"""
import glob
import json
import os
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T, GGUFValueType as V
from safetensors.numpy import save_file

import runs

HOME = os.path.dirname(os.path.dirname(sys.executable))
VOCABULARIES = os.environ.get("PS_GGUF_VOCABULARIES") or os.path.join(HOME, "vocabularies")
# Vocabularies that are errors, and the text that each error contains.
REFUSED = {"aquila": "tokenizer.ggml.pre = default", "gpt-neox": "tokenizer.ggml.pre = default",
           "deepseek-llm": "tokenizer.ggml.pre = deepseek-llm", "gemma-4": "tokenizer.ggml.model = gemma4",
           "nomic-bert-moe": "tokenizer.ggml.model = t5"}
END = "\n__ggml_vocab_test__\n"
PLAIN = {T.F32: np.float32, T.F16: np.float16, T.F64: np.float64, T.I32: np.int32, T.I64: np.int64}
BLOCKS = [T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K,
          T.IQ4_NL, T.IQ4_XS, T.MXFP4]
# Types for which the package produces the bytes of ggml's quantizers. spec/io/gguf_spec.lua tests the other types.
WRITTEN = [T.F32, T.F16, T.BF16, T.Q8_0]
LACKED = [T.IQ2_XXS, T.IQ3_S, T.TQ1_0, T.IQ1_M]
TEXTS = ["", "a", "ключ", "two\nlines", "\U0001F600", "<|im_end|>", "x" * 300]
INTEGERS = {V.UINT8: (0, 2**8 - 1), V.INT8: (-2**7, 2**7 - 1), V.UINT16: (0, 2**16 - 1), V.INT16: (-2**15, 2**15 - 1),
            V.UINT32: (0, 2**32 - 1), V.INT32: (-2**31, 2**31 - 1),
            V.UINT64: (0, 2**64 - 1), V.INT64: (-2**63, 2**63 - 1)}
NAMES = {V.UINT8: "uint8", V.INT8: "int8", V.UINT16: "uint16", V.INT16: "int16", V.UINT32: "uint32", V.INT32: "int32",
         V.UINT64: "uint64", V.INT64: "int64", V.FLOAT32: "float32", V.FLOAT64: "float64",
         V.BOOL: "bool", V.STRING: "string"}


def drawn_value(rng, kind):
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        return rng.choice([low, high, rng.randint(low, high), rng.randint(0, min(high, 9))])
    if kind == V.BOOL:
        return rng.random() < 0.5
    if kind == V.STRING:
        return rng.choice(TEXTS)
    value = rng.choice([0.0, -1.5, rng.gauss(0, 1), rng.gauss(0, 1) * 1e30])
    return float(np.float32(value)) if kind == V.FLOAT32 else value


def shown(kind, value):
    if kind == V.STRING:
        return value.encode().hex()
    if kind == V.BOOL:
        return "true" if value else "false"
    if kind in INTEGERS and abs(value) > 2**53:
        return str(value)
    return "%.17g" % value


def write(rng, path, numpy_rng):
    """Writes a random file. Returns the metadata that psluajit should report, and the values of the tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    if rng.random() < 0.5:
        writer.add_custom_alignment(rng.choice([32, 64, 256]))
    meta, values = [], {}
    for i in range(rng.randrange(0, 12)):
        kind, key = rng.choice(list(NAMES)), "drawn.%d" % i
        if rng.random() < 0.4:
            many = [drawn_value(rng, kind) for _ in range(rng.randrange(1, 9))]
            writer.add_key_value(key, many, V.ARRAY, kind)
            meta.append([key, NAMES[kind], True, len(many), " ".join(shown(kind, one) for one in many)])
        else:
            one = drawn_value(rng, kind)
            writer.add_key_value(key, one, kind)
            meta.append([key, NAMES[kind], False, 1, shown(kind, one)])
    for i in range(rng.randrange(1, 8)):
        kind, name = rng.choice(list(PLAIN) + BLOCKS * 3), "t%d" % i
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape = [rng.randint(1, 4) for _ in range(rng.randrange(0, 3))] + [block * rng.randint(1, 3)]
        data = numpy_rng.integers(0, 256, shape[:-1] + [shape[-1] // block * nbytes], dtype=np.uint8)
        if kind in PLAIN:
            values[name] = data.view(PLAIN[kind]).reshape(shape)
            writer.add_tensor(name, values[name])
        else:
            with np.errstate(all="ignore"):
                values[name] = gguf.quants.dequantize(data, kind).reshape(shape)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meta, values


def same(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f":
        return bool((a == b).all())
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    return bool(((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))).all())


def judge(case, meta, values):
    off = []
    if os.path.exists(case["out"] + ".error"):
        return [open(case["out"] + ".error").read()]
    got = [one for one in json.load(open(case["out"] + ".json"))["meta"] if one["key"].startswith("drawn.")]
    got = [[one["key"], one["kind"], one["array"], one["n"], one["text"]] for one in got]
    for a, b in zip(meta, got):
        if a != b:
            off.append("metadata: %s here, %s in the package" % (b, a))
    if len(meta) != len(got):
        off.append("%d entries here, %d in the package" % (len(got), len(meta)))
    tensors = load_bits(case["out"] + ".safetensors")
    for name, value in values.items():
        found = tensors[name]
        if value.dtype == np.float32 and found.dtype == np.uint16:      # BF16 stays BF16 in psluajit
            found = (found.astype(np.uint32) << 16).view(np.float32)
        if not same(found.reshape(value.shape), value):
            off.append("tensor %s: %s" % (name, value.shape))
    return off


def load_bits(path):
    """Returns the tensors of a safetensors file, with bfloat16 as bits, since numpy has no type for it."""
    raw = open(path, "rb").read()
    n = int.from_bytes(raw[:8], "little")
    types = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I64": np.int64,
             "BF16": np.uint16}
    out = {}
    for name, one in json.loads(raw[8:8 + n]).items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            out[name] = np.frombuffer(raw[8 + n + begin:8 + n + end], types[one["dtype"]]).reshape(one["shape"])
    return out


def drawn(run):
    job, want = [], {}
    for index in run.indices:
        rng = run.random(index)
        case = {"file": os.path.join(run.folder, "%d.gguf" % index), "out": os.path.join(run.folder, str(index))}
        want[index] = (case, *write(rng, case["file"], np.random.default_rng(rng.getrandbits(62))))
        job.append(case)
    return job, want


def to_write(run):
    """Returns random values, including zeros and tiny values, that psluajit writes in each type of WRITTEN."""
    job = []
    for index in run.indices[:40]:
        rng = run.random(index + 1000000)
        numpy_rng, types, tensors, meta = np.random.default_rng(rng.getrandbits(62)), {}, {}, []
        for i, kind in enumerate(WRITTEN):
            shape = [rng.randint(1, 4), 32 * rng.randint(1, 5)]
            values = (numpy_rng.standard_normal(shape) * 10.0 ** rng.randint(-6, 3)).astype(np.float32)
            values[0] *= rng.choice([0, 1, 1, 1e-30])
            values[-1] = np.abs(values[-1]) if rng.random() < 0.3 else values[-1]
            types["t%d" % i], tensors["t%d" % i] = kind.name, values
        for i in range(rng.randrange(0, 6)):
            kind = rng.choice([V.UINT8, V.INT16, V.UINT32, V.INT32, V.BOOL, V.STRING, V.FLOAT32])
            meta.append({"key": "drawn.%d" % i, "kind": NAMES[kind], "value": drawn_value(rng, kind)})
        path = os.path.join(run.folder, "write-%d" % index)
        save_file(tensors, path + ".safetensors")
        job.append({"file": path + ".gguf", "out": path, "tensors": path + ".safetensors", "types": types,
                    "meta": meta})
    return job


def judge_written(case):
    if os.path.exists(case["out"] + ".error"):
        return [open(case["out"] + ".error").read()]
    off, reader, tensors = [], gguf.GGUFReader(case["file"]), load_bits(case["tensors"])
    for one in case["meta"]:
        found = reader.fields[one["key"]].contents()
        if found != one["value"]:
            off.append("metadata: %r here, %r drawn" % (found, one["value"]))
    for one in reader.tensors:
        kind = T[case["types"][one.name]]
        want = gguf.quants.quantize(tensors[one.name], kind)
        if one.tensor_type != kind or one.data.tobytes() != want.tobytes():
            off.append("tensor %s, %s: other bytes than the package's" % (one.name, kind.name))
    return off


def refused_types(run):
    job = []
    for kind in LACKED:
        case = {"file": os.path.join(run.folder, kind.name + ".gguf"), "out": os.path.join(run.folder, kind.name)}
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        writer = gguf.GGUFWriter(case["file"], "llama")
        writer.add_tensor("t", np.zeros([1, nbytes], np.uint8), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        job.append(case)
    return job


def vocabularies(run):
    job = []
    for path in sorted(glob.glob(os.path.join(VOCABULARIES, "ggml-vocab-*.gguf"))):
        name = os.path.basename(path)[len("ggml-vocab-"):-len(".gguf")]
        texts, ids = ["x"], None
        if os.path.exists(path + ".inp"):
            texts = open(path + ".inp", encoding="utf-8", newline="").read().split(END)
            ids = [line.strip() for line in open(path + ".out").read().splitlines()]
        job.append({"file": path, "out": os.path.join(run.folder, "vocabulary-" + name), "texts": texts, "ids": ids,
                    "name": name})
    if not job:
        raise SystemExit("there are no vocabularies in " + VOCABULARIES)
    return job


def judge_vocabulary(case):
    error = case["out"] + ".error"
    if case["name"] in REFUSED:
        said = open(error).read() if os.path.exists(error) else "no error"
        wanted = REFUSED[case["name"]]
        return [] if wanted in said else ["it should be refused (%s): %s" % (wanted, said)]
    if os.path.exists(error):
        return [open(error).read()]
    got = json.load(open(case["out"] + ".json"))
    rows = zip(case["texts"], got, case["ids"] or got)
    return ["%r: %s here, %s in llama.cpp" % (text, a, b) for text, a, b in rows if a != b]


def main():
    run = runs.Run("gguf", cases=150)
    job, want = drawn(run)
    lacked, words, written = refused_types(run), vocabularies(run), to_write(run)
    path = os.path.join(run.folder, "job.json")
    with open(path, "w") as f:
        json.dump(job + lacked + words + written, f)
    run.psluajit("gguf_cases.lua", path)
    for index, (case, meta, values) in want.items():
        run.judged(index, judge(case, meta, values), "%d entries, tensors %s" % (len(meta), list(values)))
    for case in lacked:
        name, error = os.path.basename(case["out"]), case["out"] + ".error"
        said = open(error).read() if os.path.exists(error) else "no error"
        run.judged(0, [] if name in said and "not supported" in said else [said], "type " + name)
    for case in written:
        run.judged(0, judge_written(case), "written: %s" % case["types"])
    for case in words:
        run.judged(0, judge_vocabulary(case), "vocabulary " + case["name"])
    run.end()


main()
