# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/dpo_losses.lua`: TRL's DPOTrainer with PEFT on the same rows, starting from the same adapter.

    dpo_trl.py MODEL ADAPTER ROWS.jsonl JOB.json

JOB.json has steps, batch, lr, beta and loss_type. The Python environment needs torch, transformers, peft, trl and
datasets. The last line of the output is JSON with the loss of each step, pairs (the ids of each row: prompt, chosen,
rejected) and seconds.
"""
import json
import os
import sys
import tempfile
import time

import torch
import transformers
from datasets import load_dataset
from peft import PeftModel
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
transformers.logging.set_verbosity_error()
model_dir, adapter, rows, job_path = sys.argv[1:5]
with open(job_path) as f:
    job = json.load(f)
losses = []


class Trainer(DPOTrainer):
    """Records the loss of each step, which the log rounds, and keeps the order of the file."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *args, **kwargs):
        out = super().compute_loss(*args, **kwargs)
        losses.append(float((out[0] if isinstance(out, tuple) else out).detach()))
        return out


tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
with tempfile.TemporaryDirectory() as out_dir:
    config = DPOConfig(
        output_dir=out_dir, per_device_train_batch_size=job["batch"], max_steps=job["steps"], learning_rate=job["lr"],
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0, beta=job["beta"],
        loss_type=[job["loss_type"]], optim="adamw_torch", adam_epsilon=1e-8, use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=None, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, seed=1)
    dataset = load_dataset("json", data_files=rows, split="train", cache_dir=out_dir)
    trainer = Trainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer)
    pairs = [[row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]] for row in trainer.train_dataset]
    began = time.monotonic()
    trainer.train()
    print(json.dumps({"losses": losses, "pairs": pairs, "seconds": time.monotonic() - began}))
