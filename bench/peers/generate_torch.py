# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/generate.lua --peer`: transformers continues prompts with its cache, greedily or with beams. It
reads commands from its input until `quit`, and answers each with a line of "@" and JSON. `generate` returns seconds
and ids without padding. `read SECONDS` returns bytes_per_s of sums of 512 MiB, measured for about that long.

    generate_torch.py DIR --ids "1 2 3" [--ids ...] --max-new 20 [--num-beams N] [--dtype fp32] [--threads N]
"""
import argparse
import json
import sys
import time

import torch
import transformers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
p = argparse.ArgumentParser()
p.add_argument("folder")
p.add_argument("--ids", action="append", required=True)
p.add_argument("--max-new", type=int, default=20)
p.add_argument("--num-beams", type=int, default=1)
p.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
p.add_argument("--threads", type=int)
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)


def answer(**value):
    print("@" + json.dumps(value), flush=True)


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(a.folder, dtype=DTYPES[a.dtype]).eval()
rows = [[int(word) for word in line.split()] for line in a.ids]
width = max(map(len, rows))
ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
memory = torch.zeros(512 << 18)
ends = model.generation_config.eos_token_id
ends = ends if isinstance(ends, list) else [] if ends is None else [ends]


def without_padding(out, row):
    """Returns the prompt and its continuation, up to the first end token."""
    added = out[width:]
    stop = next((i + 1 for i, token in enumerate(added) if token in ends), len(added))
    return row + added[:stop]


answer(ready=True)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    began = time.time()
    if line.startswith("read"):
        limit, n = float(line.split()[1]), 0
        while n == 0 or time.time() - began < limit:
            float(memory.sum())
            n += 1
        answer(bytes_per_s=n * memory.nbytes / (time.time() - began))
        continue
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=a.max_new, num_beams=a.num_beams, do_sample=False,
                             pad_token_id=0).tolist()
    seconds = time.time() - began
    answer(seconds=seconds, ids=[without_padding(out[r], row) for r, row in enumerate(rows)])
