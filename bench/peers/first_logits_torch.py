# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/first_logits.lua --peer`: transformers loads a folder and runs one row of ids. The output is a
line of JSON with the first logits of the last id, and the process's peak memory in bytes.

    first_logits_torch.py DIR --ids 464 2068 [--dtype bf16] [--told 64] [--threads N]
"""
import argparse
import json

import torch
import transformers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
p = argparse.ArgumentParser()
p.add_argument("folder")
p.add_argument("--ids", type=int, nargs="+", required=True)
p.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
p.add_argument("--told", type=int, default=64)
p.add_argument("--threads", type=int)
a = p.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(a.folder, dtype=DTYPES[a.dtype]).eval()
with torch.no_grad():
    logits = model(torch.tensor([a.ids])).logits[0, -1, : a.told].float().tolist()
with open("/proc/self/status") as f:
    peak = next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
print(json.dumps({"logits": logits, "peak": peak}), flush=True)
