# SPDX-License-Identifier: BSD-3-Clause
"""The peer of bench/llama_cpp.lua: llama.cpp (spec/oracle/llama.py, PS_LLAMA) reads a prompt and continues it greedily,
with its default settings: a cache of fp16, and flash attention if it selects that. It reads commands from its input
until `quit`, and answers each with a line of "@" and JSON. `generate` returns the seconds of the prompt and of the
tokens after the first, the processor's seconds of both, and the ids.

    generate_llama.py FILE --ids PROMPT --tokens 64 --threads 2
"""
import argparse
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "spec", "oracle"))
import llama

p = argparse.ArgumentParser()
p.add_argument("file")
p.add_argument("--ids", required=True, help="a file with the ids of the prompt")
p.add_argument("--tokens", type=int, required=True)
p.add_argument("--threads", type=int, required=True)
a = p.parse_args()
ids = [int(word) for word in open(a.ids).read().split()]
model = llama.Model(a.file, context=len(ids) + a.tokens, threads=a.threads, plain=False)


def answer(**value):
    print("@" + json.dumps(value), flush=True)


answer(ready=True)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    times, new, first = [], list(ids), 0
    out = []
    model.clear()
    times.append((time.perf_counter(), time.process_time()))
    while len(out) < a.tokens:
        model.decode(new, first)
        first += len(new)
        out.append(int(model.last_logits().argmax()))
        new = out[-1:]
        if len(out) == 1:
            times.append((time.perf_counter(), time.process_time()))
    times.append((time.perf_counter(), time.process_time()))
    (t0, c0), (t1, c1), (t2, c2) = times
    answer(prompt_s=t1 - t0, prompt_cpu_s=c1 - c0, decode_s=t2 - t1, decode_cpu_s=c2 - c1, ids=out)
