# SPDX-License-Identifier: BSD-3-Clause
"""Writes spec/golden/NAME.json: GPT-2 trained for some steps by transformers and PyTorch in float64.

    $(tools/oracle.sh python) spec/oracle/make_golden.py

The files contain no weights: `draw` computes them, number by number, and bench/golden_lib.lua computes the same ones.
The files have the shape, the l2 norm and the first eight elements of each tensor, for the gradients of the first step
and for the parameters after the last step.
"""
import json
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")
SETS = {
    "gpt2_tiny": {"seed": 1, "sizes": {"vocab_size": 512, "n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": 64},
                  "steps": 10, "rows": 2},
    "gpt2_b8": {"seed": 2, "sizes": {"vocab_size": 256, "n_positions": 16, "n_layer": 2, "n_head": 4, "n_embd": 64},
                "steps": 8, "rows": 8},
}
OPTIMIZER = {"type": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
MODULUS = 2 ** 31 - 1


class Draw:
    """Park and Miller's generator (CACM 1988, with the multiplier 48271): x <- 48271 x mod 2^31 - 1. All its
    products are below 2^53, so a language whose only numbers are doubles computes the same sequence."""

    def __init__(self, seed):
        self.x = seed * 7919 % MODULUS
        for _ in range(10):
            self.next()

    def next(self):
        """Returns a number in (0, 1)."""
        self.x = self.x * 48271 % MODULUS
        return self.x / MODULUS


def weights(model, seed):
    """Fills the parameters in the order of their names with 1 + u / 10 for norm weights, u / 10 for biases and u / 8
    for all others, where u is in (-1, 1). Values are rounded to float32."""
    draw = Draw(seed)
    for name, p in sorted(model.named_parameters(), key=lambda entry: entry[0].encode()):
        scale, shift = (0.1, 0.0) if name.endswith(".bias") else (0.1, 1.0) if "ln_" in name else (0.125, 0.0)
        values = [shift + scale * (2 * draw.next() - 1) for _ in range(p.numel())]
        with torch.no_grad():
            p.copy_(torch.tensor(values, dtype=torch.float64).to(torch.float32).to(p.dtype).reshape(p.shape))


def described(tensors):
    out = {}
    for name, t in tensors:
        flat = t.detach().reshape(-1)
        out[name.removeprefix("transformer.")] = {"shape": list(t.shape), "l2": flat.norm().item(),
                                                  "first8": flat[:8].tolist()}
    return out


def train(spec):
    config = {**spec["sizes"], "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    model = GPT2LMHeadModel(GPT2Config(**config, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0,
                                       eos_token_id=0, attn_implementation="eager")).to(torch.float64)
    weights(model, spec["seed"])
    draw, (vocab, positions) = Draw(spec["seed"] + 1000), (config["vocab_size"], config["n_positions"])
    tokens = [[[int(draw.next() * vocab) for _ in range(positions + 1)] for _ in range(spec["rows"])]
              for _ in range(spec["steps"])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER["lr"], betas=OPTIMIZER["betas"],
                                  eps=OPTIMIZER["eps"],
                                  weight_decay=OPTIMIZER["weight_decay"])
    losses, grads = [], None
    for rows in tokens:
        batch = torch.tensor(rows)
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), batch[:, 1:].reshape(-1))
        loss.backward()
        grads = grads or described((name, p.grad) for name, p in model.named_parameters())
        losses.append(loss.item())
        optimizer.step()
    return {"config": config, "optimizer": OPTIMIZER, "seed": spec["seed"], "tokens": tokens, "losses": losses,
            "first_step_grads": grads, "final_params": described(model.named_parameters())}


def text_of(data):
    """Returns the text with one line per tensor and batch, and numbers with 12 digits."""
    def rounded(x):
        if isinstance(x, float):
            return float(f"{x:.12g}")
        if isinstance(x, list):
            return [rounded(y) for y in x]
        return {key: rounded(y) for key, y in x.items()} if isinstance(x, dict) else x

    def line(x):
        return json.dumps(rounded(x), separators=(",", ":"))

    parts = [f'"{key}":{line(data[key])}' for key in ("config", "optimizer", "seed", "losses")]
    parts.append('"tokens":[\n%s]' % ",\n".join(line(batch) for batch in data["tokens"]))
    for key in ("first_step_grads", "final_params"):
        parts.append('"%s":{\n%s}' % (key, ",\n".join(f'"{name}":{line(x)}' for name, x in data[key].items())))
    return "{" + ",\n".join(parts) + "}\n"


def far(a, b, where=""):
    """Returns the first position at which two trees of numbers differ by more than 1e-9 of the larger number, or
    None."""
    if isinstance(a, dict) or isinstance(a, list):
        if type(a) is not type(b) or len(a) != len(b) or (isinstance(a, dict) and a.keys() != b.keys()):
            return where
        pairs = ((key, a[key], b[key]) for key in a) if isinstance(a, dict) else zip(range(len(a)), a, b)
        return next((bad for key, x, y in pairs if (bad := far(x, y, f"{where}.{key}"))), None)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return None if abs(a - b) <= 1e-9 * max(abs(a), abs(b)) + 1e-15 else f"{where}: {a} and {b}"
    return None if a == b else where


def path_of(name):
    return os.path.join(FOLDER, name + ".json")


if __name__ == "__main__":
    for set_name, settings in SETS.items():
        with open(path_of(set_name), "w") as file:
            file.write(text_of(train(settings)))
