# SPDX-License-Identifier: BSD-3-Clause
"""The peer of `bench/exact.lua`: the body of transformers' model in fp32 and in float64 on the same ids, and the
gradients of the product of its hidden states with the same tensor. The last line of the output is JSON.

    exact_torch.py FOLDER TENSORS.safetensors LINES.json
"""
import json
import sys

import torch
import transformers
from safetensors.torch import load_file

folder, tensors, lines = sys.argv[1:]
ours = load_file(tensors)
with open(lines) as f:
    text = json.load(f)
mask, direction = ours["attention_mask"], ours["direction"]


def run(dtype):
    """Returns the hidden states of seen positions and the gradients by name."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()
    hidden = model(input_ids=ours["input_ids"].long(), attention_mask=mask.long()).last_hidden_state
    ((hidden * direction.to(dtype)).sum() / mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach()[mask.bool()], gradients


def of_file(name):
    """Returns the gradient of psluajit by transformers' name. Names of files may have the prefix of a head's model."""
    found = [t for own, t in ours.items() if own == "grad." + name or own.endswith("." + name)]
    if len(found) != 1:
        sys.exit(f"{len(found)} gradients for {name}")
    return found[0]


def distance(a, b, size=None):
    """Returns the largest difference over the largest value of b, or of another tensor."""
    return ((a.double() - b.double()).abs().max() / (b if size is None else size).double().abs().max()).item()


exact, exact_gradients = run(torch.float64)
near, near_gradients = run(torch.float32)
hidden = ours["last_hidden_state"][mask.bool()]
found = {"hidden_error": distance(hidden, exact), "torch_hidden_error": distance(near, exact),
         "hidden_difference": distance(hidden, near)}
keys = {"gradient_error": [], "torch_gradient_error": [], "gradient_difference": [], "key_bias_error": []}
for name, gradient in exact_gradients.items():
    own = of_file(name)
    if name.endswith("key.bias"):
        keys["key_bias_error"].append((distance(own, gradient, exact_gradients[name.replace("key", "query")]), name))
        continue
    if gradient.abs().max() == 0:
        sys.exit(name + " has no gradient")
    keys["gradient_error"].append((distance(own, gradient), name))
    keys["torch_gradient_error"].append((distance(near_gradients[name], gradient), name))
    keys["gradient_difference"].append((distance(own, near_gradients[name]), name))
for key, list_ in keys.items():
    if list_:
        found[key], found[key + "_of"] = max(list_)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
found["lines_with_other_ids"] = sum(tokenizer(line)["input_ids"] != ids
                                    for line, ids in zip(text["lines"], text["ids"]))
found["tensors"], found["lines"], found["tokens"] = len(exact_gradients), len(text["lines"]), int(mask.sum())
found["transformers"], found["torch"] = transformers.__version__, torch.__version__
print(json.dumps(found))
