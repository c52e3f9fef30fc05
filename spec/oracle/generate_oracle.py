# SPDX-License-Identifier: BSD-3-Clause
"""Ids that psluajit's generate gives against transformers': greedy and by beams, with and without penalties, n-grams that may not
come again, ends, and prompts of several lengths.

transformers makes a small model and its folder; the settings are options of the call or lie in generation_config.json. Prompts of
several lengths are padded left for transformers. With n-grams each prompt runs alone there, since transformers counts padding.

Ids are equal up to the first step where the scores of the two best tokens of transformers differ by less than 1e-4. A beam search
has no such step: it may differ where transformers' own ids change with the weights' last bits.
"""
import json
import os
import shutil

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import runs

CLOSE = 1e-4
NEARBY = 8


def draw_case(rng):
    heads = rng.randint(1, 3)
    # from 32 on: the longest prompt, what is drawn, and candidates of beams, where no id may come twice
    vocab, beams, n = rng.randint(32, 60), rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 14)
    case = {"sizes": dict(vocab_size=vocab, n_positions=40, n_layer=rng.randint(1, 3), n_head=heads, n_embd=heads * 8),
            "prompts": [[rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 3))], "n": n,
            "in_file": rng.random() < 0.4, "host": None}
    options = {"do_sample": False, "num_beams": beams, "eos_token_id": rng.choice([None, rng.randrange(vocab), [1, vocab - 1]])}
    if rng.random() < 0.4:
        options["repetition_penalty"] = rng.choice([1.3, 0.7, 2.0])
    if rng.random() < 0.4:
        options["no_repeat_ngram_size"] = rng.choice([1, 2, 3])
    if rng.random() < 0.3:
        options["min_new_tokens"] = rng.randint(1, n)
    if beams > 1:
        options |= {"length_penalty": rng.choice([1.0, 1.0, 0.0, 2.0, -0.5]), "early_stopping": rng.choice([False, False, True, "never"]),
                    "num_return_sequences": rng.randint(1, beams)}
    if rng.random() < 0.25:
        case["host"] = 300 * 1024
    return case | {"options": options}


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def generate(model, case, prompts):
    """Lists of ids as generate of psluajit gives them, and by row the steps at which the two best scores are apart (None: all)."""
    options = {k: v for k, v in case["options"].items() if v is not None}
    ids, mask = padded(prompts)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=case["n"], pad_token_id=0, return_dict_in_generate=True,
                         output_scores=True, **options)
    eos = options.get("eos_token_id", [])
    eos = eos if isinstance(eos, list) else [eos]
    copies = options.get("num_return_sequences", 1)
    rows, sure = [], []
    for r, row in enumerate(got.sequences.tolist()):
        start = row[:ids.shape[1]]
        prompt = prompts[r // copies]
        new = row[len(start):]
        ends = [i for i, t in enumerate(new) if t in eos]
        new = new[:ends[0] + 1] if ends else new
        rows.append(prompt + new)
        steps = None
        if options["num_beams"] == 1:
            for i in range(len(new)):
                best = got.scores[i][r].topk(2).values
                if float(best[0] - best[1]) < CLOSE:
                    steps = i
                    break
        sure.append(steps)
    return rows, sure


def reference(model, case):
    if len(case["prompts"]) == 1 or not case["options"].get("no_repeat_ngram_size"):
        return generate(model, case, case["prompts"])
    rows, sure = [], []
    for prompt in case["prompts"]:
        a, b = generate(model, case, [prompt])
        rows += a
        sure += b
    return rows, sure


def changes(model, case, rows):
    """Whether transformers' ids change with weights that differ by a few units of their last bits."""
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    changed = False
    for k in range(NEARBY):
        torch.manual_seed(k)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(weights[n] * (1 + 4e-7 * torch.randn_like(p)))
        changed = changed or reference(model, case)[0] != rows
    model.load_state_dict(weights)
    return changed


def judge(case, model):
    with open(case["out"]) as f:
        ours = json.load(f)
    if isinstance(ours, dict):
        return [ours.get("error", "nothing came")[:500]]
    rows, sure = reference(model, case)
    if len(ours) != len(rows):
        return [f"{len(ours)} sequences, not {len(rows)}"]
    copies, off = case["options"].get("num_return_sequences", 1), []
    for r, (a, b) in enumerate(zip(ours, rows)):
        end = None if sure[r] is None else len(case["prompts"][r // copies]) + sure[r]
        if a[:end] != b[:end]:
            off.append(f"row {r}: {a}, transformers {b}")
    if off and case["options"]["num_beams"] > 1 and changes(model, case, rows):
        return []
    return off


def main():
    run = runs.Run("generate", cases=40)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cases, models = [], []
    for index in run.indices:
        rng = run.random(index)
        case = draw_case(rng) | {"index": index, "model": os.path.join(run.folder, str(index), "model")}
        case["out"], case["disk"] = (os.path.join(run.folder, str(index), name) for name in ("out.json", "disk"))
        shutil.rmtree(case["model"], ignore_errors=True)
        os.makedirs(case["disk"])
        torch.manual_seed(rng.getrandbits(62))
        model = GPT2LMHeadModel(GPT2Config(**case["sizes"], initializer_range=0.35, bos_token_id=0, eos_token_id=None)).eval()
        model.generation_config.eos_token_id = None
        model.save_pretrained(case["model"])
        path = os.path.join(case["model"], "generation_config.json")
        options = {k: v for k, v in case["options"].items() if v is not None}
        with open(path, "w") as f:
            json.dump(options if case["in_file"] else {}, f)
        cases.append(case)
        models.append(model)
    job = os.path.join(run.folder, "job.json")
    with open(job, "w") as f:
        json.dump([case | {"options": {} if case["in_file"] else case["options"]} for case in cases], f)
    run.psluajit("generate_cases.lua", job)
    for case, model in zip(cases, models):
        told = {k: v for k, v in case.items() if k not in ("model", "out", "disk", "index")}
        run.judged(case["index"], judge(case, model), json.dumps(told))
    run.end()


if __name__ == "__main__":
    main()
