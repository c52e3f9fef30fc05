# SPDX-License-Identifier: BSD-3-Clause
"""GPT-2 folders with random configurations, from transformers to psluajit and back.

transformers creates a model and writes its folder (whole or in shards, safetensors or .bin, fp32 or half types, with
or without the prefix of names). Random fields of config.json differ from their defaults. psluajit reads the folder:
logits, loss and gradients are compared with those of transformers in float32 and float64. Then psluajit writes the
folder again, and transformers must find every key in it and compute the same logits, bit for bit.

A configuration can be rejected, but the error must contain the name of a changed field, and it must not be one of
SUPPORTED.
"""
import json
import os

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import runs
from runs import distance

# field -> its values; the first value is GPT-2's own
FIELDS = {
    "activation_function": ["gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "silu", "tanh", "quick_gelu"],
    "layer_norm_epsilon": [1e-5, 1e-6, 1e-3],
    "n_inner": [None, 20, 64],
    "tie_word_embeddings": [True, False],
    "scale_attn_weights": [True, False],
    "scale_attn_by_inverse_layer_idx": [False, True],
    "reorder_and_upcast_attn": [False, True],
    "resid_pdrop": [0.0, 0.1],
    "attn_pdrop": [0.0, 0.1],
    "embd_pdrop": [0.0, 0.1],
    "initializer_range": [0.2, 0.05],
    "add_cross_attention": [False, True],
    "use_cache": [True, False],
}
SUPPORTED = {"layer_norm_epsilon", "n_inner", "tie_word_embeddings", "resid_pdrop", "attn_pdrop", "embd_pdrop",
             "initializer_range",
             "use_cache", "reorder_and_upcast_attn"}
SUPPORTED_ACTIVATIONS = {"gelu_new", "gelu", "gelu_pytorch_tanh"}
ALIASES = {"n_head": "num_attention_heads", "n_embd": "hidden_size", "n_layer": "num_hidden_layers",
           "n_positions": "max_position_embeddings"}


def draw_case(rng, _):
    heads = rng.randint(1, 4)
    sizes = dict(vocab_size=rng.randint(5, 70), n_positions=rng.randint(2, 20), n_layer=rng.randint(1, 3), n_head=heads,
                 n_embd=heads * rng.choice([2, 4, 5, 8, 16]))
    fields = {name: rng.choice(values[1:]) for name, values in FIELDS.items() if rng.random() < 0.15}
    fields.setdefault("initializer_range", 0.2)
    return {"sizes": sizes, "fields": fields, "rows": rng.randint(1, 3),
            "positions": rng.randint(1, sizes["n_positions"]),
            "file": rng.choice(["whole", "whole", "shards", "bare names", "old buffers"]),
            "dtype": rng.choice(["float32", "float32", "bfloat16", "float16"]), "recompute": rng.random() < 0.2,
            "alias": rng.choice([None, None, None] + list(ALIASES)), "unknown": rng.random() < 0.2}


def write_folder(case, folder):
    config = GPT2Config(**case["sizes"], **{"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} | case["fields"],
                        bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.to(getattr(torch, case["dtype"]))
    model.save_pretrained(folder, **({"max_shard_size": "4KB"} if case["file"] == "shards" else {}))
    path = os.path.join(folder, "model.safetensors")
    if case["file"] == "bare names" and case["fields"].get("tie_word_embeddings", True):
        tensors = load_file(path)
        save_file({n.removeprefix("transformer."): t for n, t in tensors.items()}, path, {"format": "pt"})
    elif case["file"] == "old buffers":
        tensors, T = load_file(path), case["sizes"]["n_positions"]
        for i in range(case["sizes"]["n_layer"]):
            tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(T, T, dtype=torch.uint8).tril().reshape(1, 1, T, T)
            tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(tensors, path, {"format": "pt"})
    name = os.path.join(folder, "config.json")
    with open(name) as f:
        text = json.load(f)
    if case["alias"]:
        text[ALIASES[case["alias"]]] = text.pop(case["alias"])
    if case["unknown"]:
        text["a_note_of_somebody"] = {"x": [1, None]}
    with open(name, "w") as f:
        json.dump(text, f)


NEARBY = 16


def reference(folder, data, dtype, nearby=0):
    """Returns transformers' logits, loss and gradients. nearby: seeds a change of the weights in their last bit."""
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    if nearby:
        gen = torch.Generator().manual_seed(nearby)
        with torch.no_grad():
            for p in model.parameters():
                up = torch.where(torch.rand(p.shape, generator=gen) < 0.5, torch.inf, -torch.inf)
                p.copy_(torch.where(p == 0, p, torch.nextafter(p, up)))
    model = model.to(dtype)
    if dtype == torch.float64:
        for block in model.transformer.h:            # it insists on fp32; in exact arithmetic the result is the same
            block.attn.reorder_and_upcast_attn = False
    x, y = data["x"].long(), data["y"].long()
    logits = model(x).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
    loss.backward()
    out = {"logits": logits.detach(), "loss": loss.detach()}
    for n, p in model.named_parameters():
        if p.grad is not None:
            out["grad." + n] = p.grad
    return out


def judge(case):
    refused = os.path.join(case["out"], "out.error")
    if os.path.exists(refused):
        with open(refused) as f:
            text = f.read()
        drawn = {name for name in case["fields"] if name not in SUPPORTED}
        if case["fields"].get("activation_function") in SUPPORTED_ACTIVATIONS:
            drawn.discard("activation_function")
        return [] if any(name in text for name in drawn) else ["refused: " + text]
    data = load_file(case["data"])
    ours = load_file(os.path.join(case["out"], "out.safetensors"))
    theirs, truth = reference(case["model"], data, torch.float32), reference(case["model"], data, torch.float64)
    off = [f"{n}: not there" for n in truth if n not in ours] + [f"{n}: not in transformers' model" for n in ours
                                                                 if n not in truth]
    gradients = [n for n in truth if n.startswith("grad.")]
    # A gradient can be 0 except for rounding, as that of the keys' bias is. Then the model's average per element
    # counts.
    typical = (sum(distance(theirs[n], truth[n]) ** 2 for n in gradients) / sum(truth[n].numel()
                                                                                for n in gradients)) ** 0.5
    second = []  # where the plain rule finds a deviation, PyTorch's distances nearby count, as in oracle.py

    def near_by(n):
        if not second:
            for k in range(1, NEARBY + 1):
                a, b = (reference(case["model"], data, t, k) for t in (torch.float32, torch.float64))
                second.append({m: distance(a[m], b[m]) for m in truth})
        return max(found[n] for found in second)
    for n in truth:
        if n not in ours:
            continue
        if tuple(ours[n].shape) != tuple(truth[n].shape):
            off.append(f"{n}: shape {tuple(ours[n].shape)}, not {tuple(truth[n].shape)}")
            continue
        least = typical * truth[n].numel() ** 0.5 if n.startswith("grad.") else 0
        bound = 2 * max(distance(theirs[n], truth[n]), least) + 2.0**-23 * float(truth[n].norm())
        got = distance(ours[n], truth[n])
        if not got <= bound:
            bound += 2 * max(0, near_by(n) - max(distance(theirs[n], truth[n]), least))
        if not got <= bound:
            off.append(f"{n}: {got:.3g} from float64, PyTorch {distance(theirs[n], truth[n]):.3g}, "
                       f"norm {float(truth[n].norm()):.3g}")
    back = os.path.join(case["out"], "back")
    again, info = GPT2LMHeadModel.from_pretrained(back, attn_implementation="eager", output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        off.append(f"transformers reads the folder that was written with {info}")
    elif again.dtype != torch.float32:
        off.append(f"the folder that was written is loaded as {again.dtype}; the weights in it are fp32")
    elif not torch.equal(again.eval()(data["x"].long()).logits, theirs["logits"]):
        off.append("the folder that was written gives other logits")
    return off


def main():
    run = runs.Run("gpt2", cases=100)
    runs.quiet_transformers()
    cases = []
    for case in run.cases(draw_case):
        torch.manual_seed(case["seed"])
        write_folder(case, case["model"])
        shape = (case["rows"], case["positions"])
        x, y = (torch.randint(0, case["sizes"]["vocab_size"], shape, dtype=torch.int32) for _ in "xy")
        y[torch.rand(shape) < 0.2] = -100
        y[0, 0] = 0
        save_file({"x": x, "y": y}, case["data"])
        cases.append(case)
    path = os.path.join(run.folder, "job.json")
    with open(path, "w") as f:
        json.dump(cases, f)
    run.psluajit("gpt2_cases.lua", path)
    for case in cases:
        run.judged_case(case, judge(case))
    run.end()


if __name__ == "__main__":
    main()
