# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/finetune_losses.lua`: transformers' model and PyTorch's AdamW on the same batches.

    finetune_torch.py MODEL JOB.json

JOB.json has lr, and steps with input_ids, labels and attention_mask. The last line of the output is JSON with losses
and seconds.
"""
import json
import os
import sys
import time

import torch
import transformers

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
with open(sys.argv[2]) as f:
    job = json.load(f)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
losses, began = [], time.monotonic()
for step in job["steps"]:
    loss = model(**{name: torch.tensor(values) for name, values in step.items()}).loss
    loss.backward()
    losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps({"losses": losses, "seconds": time.monotonic() - began}))
