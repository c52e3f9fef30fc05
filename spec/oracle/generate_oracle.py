# SPDX-License-Identifier: BSD-3-Clause
"""Ids from psluajit's generate compared with those of transformers: greedy and with beams, with and without
penalties, n-grams that must not be repeated, end tokens, and prompts of several lengths.

transformers creates a small model of GPT-2's or Llama's kind and its folder. The settings are options of the call or
are in generation_config.json. For transformers, prompts of several lengths are padded on the left. With n-grams,
transformers gets each prompt separately, since it counts padding.

Ids must be equal up to the first step at which the scores of transformers' two best tokens differ by less than 1e-4.
A beam search has no such step, so its ids can differ if transformers' own ids change with the last bits of the
weights.
"""
import json
import os

import torch
import transformers

import runs

CLOSE = 1e-4
NEARBY = 8


# model_type -> its configuration class and its language model class
FAMILIES = {name.lower(): (getattr(transformers, name + "Config"), getattr(transformers, model)) for name, model in [
    ("GPT2", "GPT2LMHeadModel")] + [(n, n + "ForCausalLM") for n in ("Llama", "Mistral", "Qwen2", "Qwen3")]}
ROPES = [{"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "factor": 3.0},
         {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 300.0},
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 20},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}]


def draw_sizes(rng, family, vocab):
    heads, layers = rng.randint(1, 3), rng.randint(1, 3)
    if family == "gpt2":
        return dict(vocab_size=vocab, n_positions=40, n_layer=layers, n_head=heads, n_embd=heads * 8)
    groups = rng.choice([1, 2])                      # heads can share their keys and values
    # a model continues past its last position
    sizes = dict(vocab_size=vocab, max_position_embeddings=rng.choice([40, 12, 5]), num_hidden_layers=layers,
                 num_attention_heads=heads * groups,
                 num_key_value_heads=heads, hidden_size=heads * groups * 8, intermediate_size=rng.randint(20, 40),
                 head_dim=rng.choice([6, 8]),
                 tie_word_embeddings=rng.random() < 0.5)
    if rng.random() < 0.5:
        sizes["rope_parameters"] = dict(rng.choice(ROPES))
    if family != "llama":
        sizes["sliding_window"] = rng.choice([None, 2, 5])
    if family.startswith("qwen") and sizes["sliding_window"]:
        sizes |= {"use_sliding_window": True, "max_window_layers": rng.randint(0, layers)}
    return sizes


def draw_case(rng, _):
    # at least 32: the longest prompt, the drawn ids, and the candidates of beams, in which no id can occur twice
    vocab, beams, n = rng.randint(32, 60), rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 14)
    family = rng.choice(["gpt2"] + list(FAMILIES))
    case = {"family": family, "sizes": draw_sizes(rng, family, vocab),
            "prompts": [[rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 3))],
            "n": n,
            "in_file": rng.random() < 0.4, "host": None}
    options = {"do_sample": False, "num_beams": beams, "eos_token_id": rng.choice([None, rng.randrange(vocab),
                                                                                   [1, vocab - 1]])}
    if rng.random() < 0.4:
        options["repetition_penalty"] = rng.choice([1.3, 0.7, 2.0])
    if rng.random() < 0.4:
        options["no_repeat_ngram_size"] = rng.choice([1, 2, 3])
    if rng.random() < 0.3:
        options["min_new_tokens"] = rng.randint(1, n)
    if beams > 1:
        options |= {"length_penalty": rng.choice([1.0, 1.0, 0.0, 2.0, -0.5]),
                    "early_stopping": rng.choice([False, False, True, "never"]),
                    "num_return_sequences": rng.randint(1, beams)}
    if "no_repeat_ngram_size" in options and case["sizes"].get("rope_parameters", {}).get("rope_type") == "dynamic":
        case["prompts"] = case["prompts"][:1]        # more prompts change the length that RoPE uses
    if rng.random() < 0.25:
        case["host"] = 300 * 1024
    return case | {"options": options}


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def generate(model, case, prompts):
    """Returns lists of ids in the form of psluajit's generate, and for each row the steps at which the two best
    scores differ clearly (None: all)."""
    options = {k: v for k, v in case["options"].items() if v is not None}
    ids, mask = padded(prompts)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=case["n"], pad_token_id=0,
                         return_dict_in_generate=True,
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
    """Returns whether transformers' ids change if the weights change by a few units in the last place."""
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
    with open(case["ids"]) as f:
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


def make_folder(case):
    """Writes the case's folder, and returns its model."""
    torch.manual_seed(case["seed"])
    config, model = FAMILIES[case["family"]]
    model = model(config(**case["sizes"], initializer_range=0.35, bos_token_id=0, eos_token_id=None)).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(case["model"])
    options = {k: v for k, v in case["options"].items() if v is not None}
    old = case["in_file"] and case["seed"] % 3 == 0         # in config.json, as before generation_config.json existed
    path = os.path.join(case["model"], "config.json" if old else "generation_config.json")
    with open(os.path.join(case["model"], "config.json")) as f:
        fields = json.load(f) if old else {}
    with open(path, "w") as f:
        json.dump(fields | options if case["in_file"] else {}, f)
    if old:
        os.remove(os.path.join(case["model"], "generation_config.json"))
    return model


def main():
    run = runs.Run("generate", cases=40)
    runs.quiet_transformers()
    cases = [case | {"disk": os.path.join(case["out"], "disk"), "ids": os.path.join(case["out"], "ids.json")}
             for case in run.cases(draw_case)]
    models = [make_folder(case) for case in cases]
    for case in cases:
        os.makedirs(case["disk"])
    job = os.path.join(run.folder, "job.json")
    with open(job, "w") as f:
        json.dump([case | {"options": {} if case["in_file"] else case["options"]} for case in cases], f)
    run.psluajit("generate_cases.lua", job)
    for case, model in zip(cases, models):
        run.judged_case(case, judge(case, model))
    run.end()


if __name__ == "__main__":
    main()
