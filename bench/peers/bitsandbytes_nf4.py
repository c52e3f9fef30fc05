# SPDX-License-Identifier: BSD-3-Clause
"""Compares psluajit with bitsandbytes: folders that transformers quantized to NF4, without and with double
quantization, are read by both. Prints one line per folder: the number of weights, the number of values whose bits
differ (fp32 and bf16), and the largest difference of logits. Then psluajit quantizes and writes the same models, and
both read these folders. Fails if a value differs, or if logits differ by more than their sums' rounding does.

    python bench/peers/bitsandbytes_nf4.py [--program build/psluajit] [--model FOLDER]

--model also quantizes a model that exists. Needs torch, transformers, accelerate and bitsandbytes, on the CPU.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import bitsandbytes as bnb
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig

READ = """
local ps = require "ps"
local folder, out = arg[1], arg[2]
local ids = ps.load(out .. "/ids.safetensors").ids
for _, dtype in ipairs { "fp32", "bf16" } do
  local model = ps.from_pretrained(folder, { quiet = true, dtype = dtype })
  ps.save(model:state_dict(), ("%s/%s.safetensors"):format(out, dtype))
end
local logits = {}
for name, keep in pairs { plain = false, packed = true } do
  local model = ps.from_pretrained(folder, { quiet = true, dtype = "fp32", keep_quantized = keep })
  ps.no_grad(function() logits[name] = model({ input_ids = ids }).logits:keep() end)
end
ps.save(logits, out .. "/logits.safetensors")
"""

WRITE = """
local ps = require "ps"
local model = ps.from_pretrained(arg[1], { quiet = true, dtype = "fp32" })
ps.quantize(model, { type = "nf4", skip = { "layers.0.mlp.down_proj", "h.0.mlp.c_fc" } })
model:save_pretrained(arg[2])
"""

MODELS = {
    "llama": LlamaConfig(vocab_size=96, hidden_size=128, intermediate_size=320, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64),
    "gpt2": GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)}

# Sums have another order in the two programs. The largest difference that was measured is 3e-6 (SmolLM2-135M).
LOGITS = 1e-5

KINDS = {"single": "quantized by bitsandbytes", "double": "quantized by bitsandbytes twice",
         "written": "quantized by psluajit"}


def plain_products(model):
    """Makes a model multiply by dequantized weights. With AVX-512 BF16, bitsandbytes would repack the weights in the
    first forward, which rounds their scales to bf16."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model


def quantized(source, double, dtype):
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
                             bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, quantization_config=how, device_map="cpu")


def weights_of(model, dtype):
    """Yields the names and values of the quantized weights, as bitsandbytes computes them."""
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            state.dtype = dtype
            values = bnb.functional.dequantize_4bit(module.weight.data, state)
            yield name + ".weight", values.T if model.config.model_type == "gpt2" else values


def differing(want, got):
    """Returns the number of values whose bits differ."""
    view = torch.int32 if want.dtype == torch.float32 else torch.int16
    return int((want.contiguous().view(view) != got.contiguous().view(view)).sum())


def run(program, out, script, *arguments):
    with open(out + "/script.lua", "w") as file:
        file.write(script)
    subprocess.run([program, out + "/script.lua", *arguments], check=True)


def compare(program, label, source, kind):
    with tempfile.TemporaryDirectory() as out:
        if kind == "written":
            run(program, out, WRITE, source, out + "/model")
        else:
            quantized(source, kind == "double", torch.float32).save_pretrained(out + "/model")
        ids = torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(1)).to(torch.int32)
        save_file({"ids": ids}, out + "/ids.safetensors")
        run(program, out, READ, out + "/model", out)
        model = plain_products(AutoModelForCausalLM.from_pretrained(out + "/model", device_map="cpu",
                                                                    dtype=torch.float32))
        with torch.no_grad():
            want = model(input_ids=ids.long()).logits
        logits = load_file(out + "/logits.safetensors")
        count, wrong = 0, {}
        for word, dtype in ("fp32", torch.float32), ("bf16", torch.bfloat16):
            with safe_open(f"{out}/{word}.safetensors", "pt") as ours:
                found = [differing(value, ours.get_tensor(name)) for name, value in weights_of(model, dtype)]
            count, wrong[word] = len(found), sum(found)
        far = {name: float((logits[name] - want).abs().max() / want.abs().max()) for name in ("plain", "packed")}
        print(f"{label}, {KINDS[kind]}: {count} weights; values that differ: "
              f"{wrong['fp32']} fp32, {wrong['bf16']} bf16; logits differ by {far['plain']:.1e} of the largest, packed "
              f"{far['packed']:.1e}", flush=True)
        return count == 0 or any(wrong.values()) or max(far.values()) > LOGITS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/psluajit")
    parser.add_argument("--model")
    options = parser.parse_args()
    torch.manual_seed(0)
    failed = False
    with tempfile.TemporaryDirectory() as made:
        sources = {}
        for name, config in MODELS.items():
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{made}/{name}")
            sources[name] = f"{made}/{name}"
        if options.model:
            sources[os.path.basename(os.path.normpath(options.model))] = options.model
        for name, source in sources.items():
            for kind in KINDS:
                failed = compare(options.program, name, source, kind) or failed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
