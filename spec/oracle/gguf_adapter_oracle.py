# SPDX-License-Identifier: BSD-3-Clause
"""Adapters in GGUF files: psluajit compared with llama.cpp's converter.

PEFT writes adapters with random options for small folders of Llama, Qwen 2 and Qwen 3. convert_lora_to_gguf.py
(tools/oracle.sh unpacks it) and psluajit each write a GGUF file of the adapter. The metadata and the bytes of all
tensors must be equal. psluajit then writes a folder from the converter's file, whose tensors must be those that PEFT
wrote.
"""
import contextlib
import io
import json
import logging
import os
import runpy
import sys

HOME = os.path.dirname(os.path.dirname(sys.executable))
CONVERTER = os.environ.get("PS_GGUF_CONVERTER") or os.path.join(HOME, "converter")
sys.path.insert(0, os.path.join(CONVERTER, "gguf-py"))

import gguf
import peft
import torch
import transformers
from safetensors.torch import load_file

import runs

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
         "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
         "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}


def draw(rng, index):
    heads = rng.choice([2, 4])
    fields = {"vocab_size": 64, "hidden_size": 8 * heads, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": heads, "num_key_value_heads": rng.choice([1, heads // 2, heads]), "head_dim": 8,
              "max_position_embeddings": 32, "tie_word_embeddings": rng.random() < 0.5}
    targets = rng.sample(LAYERS, rng.randint(1, len(LAYERS)))
    if not fields["tie_word_embeddings"]:
        targets += rng.sample(["embed_tokens", "lm_head"], rng.randint(0, 2))
    return {"kind": rng.choice(list(KINDS)), "fields": fields,
            "options": {"r": rng.randint(1, 5), "lora_alpha": rng.choice([1, 3, 8, 16]), "target_modules": targets}}


def convert(case):
    """Runs llama.cpp's converter in this process."""
    said = io.StringIO()
    arguments, sys.argv = sys.argv, ["convert_lora_to_gguf.py", "--base", case["model"], "--outfile", case["theirs"],
                                     case["adapter"]]
    sys.path.insert(0, CONVERTER)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path(os.path.join(CONVERTER, "convert_lora_to_gguf.py"), run_name="__main__")
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
    finally:
        sys.argv = arguments
        sys.path.remove(CONVERTER)
        logging.getLogger().handlers.clear()


def make(case):
    torch.manual_seed(case["seed"] % 2**31)
    config, model = KINDS[case["kind"]]
    model = model(config(**case["fields"])).eval()
    model.save_pretrained(case["model"])
    model = peft.get_peft_model(model, peft.LoraConfig(**case["options"]))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    case["adapter"] = os.path.join(case["out"], "adapter")
    model.save_pretrained(case["adapter"], save_embedding_layers=False)
    os.remove(os.path.join(case["adapter"], "README.md"))  # the converter copies its tags into the metadata
    case["theirs"], case["ours"] = (os.path.join(case["out"], name + ".gguf") for name in ("theirs", "ours"))
    case["back"] = os.path.join(case["out"], "back")
    convert(case)


def read(path):
    reader = gguf.GGUFReader(path)
    meta = {k: f.contents() for k, f in reader.fields.items() if not k.startswith(("GGUF.", "psluajit."))}
    meta.pop("general.name", None)  # the converter uses the folder's name, and psluajit the file's name
    return meta, {t.name: (t.tensor_type, list(t.shape), t.data.tobytes()) for t in reader.tensors}


def judge(case):
    if os.path.exists(case["ours"] + ".error"):
        return [open(case["ours"] + ".error").read()]
    off, (meta, tensors), (their_meta, theirs) = [], read(case["ours"]), read(case["theirs"])
    if meta != their_meta:
        off.append("metadata: %s here, %s in the converter's file" % (meta, their_meta))
    for name in sorted(set(tensors) | set(theirs)):
        if tensors.get(name) != theirs.get(name):
            off.append("tensor %s" % name)
    wrote = load_file(os.path.join(case["adapter"], "adapter_model.safetensors"))
    back = load_file(os.path.join(case["back"], "adapter_model.safetensors"))
    for name in sorted(set(wrote) | set(back)):
        if name not in wrote or name not in back or not torch.equal(wrote[name], back[name]):
            off.append("folder: %s" % name)
    fields = json.load(open(os.path.join(case["back"], "adapter_config.json")))
    if (fields["r"], fields["lora_alpha"]) != (case["options"]["r"], case["options"]["lora_alpha"]):
        off.append("folder: r %s, lora_alpha %s" % (fields["r"], fields["lora_alpha"]))
    return off


def main():
    runs.quiet_transformers()
    run = runs.Run("gguf_adapter", cases=24)
    cases = list(run.cases(draw))
    for case in cases:
        make(case)
    path = os.path.join(run.folder, "job.json")
    with open(path, "w") as f:
        json.dump(cases, f)
    run.psluajit("gguf_adapter_cases.lua", path)
    for case in cases:
        run.judged_case(case, judge(case))
    run.end()


main()
