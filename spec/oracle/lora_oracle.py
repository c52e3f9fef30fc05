# SPDX-License-Identifier: BSD-3-Clause
"""PEFT adapters for random models of every family and head, read and written by bench/hf.lua.

The folders and batches are those of models_oracle.py. PEFT creates an adapter with random options (LoRA, rsLoRA,
DoRA; ranks and alphas by patterns; linear layers, transposed layers, embeddings, heads; biases; fully trained heads)
and writes it. Half of the cases read that folder (--adapter), and the other half start from its tensors (--lora).
Logits, loss, gradients of the adapter's tensors and losses of 20 steps are compared with PEFT in float64. Then PEFT
reads the adapter that psluajit trained: it must accept every key, and its logits must equal psluajit's. A folder that
tools/merge_adapter.lua has merged must have the logits of PEFT's merge.

Some of the random adapters have unsupported features. psluajit must reject them with an error that contains the name
of the field, and with exit status 2.
"""
import json
import os
import subprocess
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

import models_oracle as models
import runs
from runs import distance

STEPS = 20
ENCODER = ["query", "key", "value", "intermediate.dense", "output.dense"]
LINEAR = {"gpt2": ["c_attn", "c_fc", "attn.c_proj", "mlp.c_proj"], "bert": ENCODER, "roberta": ENCODER}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TABLES = {"gpt2": ["wte", "wpe"], "bert": ["word_embeddings", "position_embeddings", "token_type_embeddings"],
          "roberta": ["word_embeddings", "position_embeddings"]}
REGEX = {"gpt2": r".*\.(c_attn|c_fc)", "bert": r".*encoder.*\.(query|value)", "roberta": r".*encoder.*\.(key|dense)"}
REFUSED = [{"peft_type": "IA3"}, {"lora_bias": True}, {"init_lora_weights": "pissa"}, {"r": 0}, {"use_qalora": True},
           {"target_parameters": ["x.weight"]}, {"trainable_token_indices": [1, 2]}, {"layer_replication": [[0, 1]]},
           {"megatron_config": {"a": 1}}]


def draw_case(rng, index):
    case = models.draw_case(rng, index)
    while case["refused"] or case["file"] == "old names":
        case = models.draw_case(rng, index)
    case |= {"dtype": "float32", "unpad": False, "mmap": rng.random() < 0.3}
    family, name = case["family"], case["class"]
    options = {"r": rng.randint(1, 5), "lora_alpha": rng.choice([1, 3, 8, 16]), "use_rslora": rng.random() < 0.3,
               "use_dora": rng.random() < 0.4, "lora_dropout": 0.0}
    linear = LINEAR.get(family, LLAMA)
    options["target_modules"] = rng.choice(["all-linear", rng.sample(linear, rng.randint(1, len(linear))), linear,
                                            REGEX.get(family, r".*\.(q_proj|v_proj|down_proj)")])
    if isinstance(options["target_modules"], list) and rng.random() < 0.4:
        options["target_modules"] = options["target_modules"] + rng.sample(TABLES.get(family, ["embed_tokens"]), 1)
    untied = "CausalLM" in name and case["fields"].get("tie_word_embeddings") is False
    if isinstance(options["target_modules"], list) and untied and rng.random() < 0.5:
        options["target_modules"] = options["target_modules"] + ["lm_head"]
    plain = index % 2 == 1                          # psluajit creates the adapter; otherwise it reads PEFT's
    if not plain:
        if rng.random() < 0.3:
            pattern = rng.choice(["query", "q_proj", "c_attn", r"layers\.0\..*", r"layer\.0\..*"])
            options["rank_pattern"] = {pattern: rng.randint(1, 6)}
        if rng.random() < 0.3:
            options["alpha_pattern"] = {rng.choice(["value", "v_proj", "c_fc"]): rng.randint(1, 9)}
        if rng.random() < 0.3:
            options["bias"] = rng.choice(["all", "lora_only"])
        if "Sequence" in name or "Token" in name or "Question" in name:
            if rng.random() < 0.6:
                options["task_type"] = "SEQ_CLS" if "Sequence" in name else "TOKEN_CLS" if "Token" in name \
                    else "QUESTION_ANS"
        if rng.random() < 0.15 and not name.endswith("Model"):      # PEFT finds no layer index without a prefix
            options["layers_to_transform"] = [0]
            if not isinstance(options["target_modules"], list):
                options["target_modules"] = linear
    elif not isinstance(options["target_modules"], list):
        options["target_modules"] = rng.choice(["all-linear", linear])
    bad = rng.choice(REFUSED) if not plain and rng.random() < 0.12 else None
    return case | {"options": options, "plain": plain, "bad": bad}


def base_of(case, dtype=torch.float32):
    return getattr(transformers, case["class"]).from_pretrained(case["model"], dtype=torch.float32).eval().to(dtype)


def noisy(model, seed):
    """Moves all trained values away from their initial values, so that B is not zero."""
    torch.manual_seed(seed % 2 ** 31)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


def write_adapter(case, folder):
    model = noisy(peft.get_peft_model(base_of(case), peft.LoraConfig(**case["options"])), case["seed"])
    model.save_pretrained(folder)
    return model


def reference(case, folder, dtype):
    model = peft.PeftModel.from_pretrained(base_of(case), folder, is_trainable=True).eval().to(dtype)
    batch = models.as_theirs(case, load_file(os.path.join(case["model"], "batch.safetensors")), dtype)
    if dtype == torch.float64 and case["family"] == "gpt2":
        body = model.get_base_model()
        for block in body.transformer.h if hasattr(body, "transformer") else body.h:       # PEFT requires fp32
            block.attn.reorder_and_upcast_attn = False
    got = model.get_base_model()(**batch)
    out = {k: got[k].detach() for k in ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
           if k in got and got[k] is not None}
    if got.get("loss") is None:
        return out
    out["loss"] = got.loss.detach()
    got.loss.backward()
    where = {}                                      # for a tensor with two names (a tied bias), the first name
    for n, t in sorted(peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()):
        if ".modules_to_save." not in n:            # with bias="all", PEFT lists a saved module's biases twice
            where.setdefault(t.data_ptr(), n)
    for n, p in model.named_parameters():
        if p.requires_grad and p.grad is not None:
            out["grad." + where[p.data_ptr()]] = p.grad.clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.get_base_model()(**batch).loss
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
    out["losses"] = torch.stack(losses)
    return out


def hf(run, case, *options):
    env = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="")
    lines = [os.path.join(runs.HERE, "../../bench/hf.lua"), case["model"], *options] + ["--mmap"] * case["mmap"]
    return subprocess.run([run.program, *lines], env=env, timeout=runs.LIMIT_S, capture_output=True, text=True)


def outputs(case):
    return load_file(os.path.join(case["model"], "outputs.safetensors"))


def change(folder, fields):
    path = os.path.join(folder, "adapter_config.json")
    with open(path) as f:
        text = json.load(f)
    with open(path, "w") as f:
        json.dump(text | fields, f)


def begin(case, folder):
    """Adds the adapter's tensors to the inputs in the form of --lora, and returns the options."""
    inputs = load_file(os.path.join(case["model"], "inputs.safetensors"))
    tensors = load_file(os.path.join(folder, "adapter_model.safetensors"))
    lora = {"lora." + n: t for n, t in tensors.items() if ".base_layer." not in n and ".lora_" in n}
    save_file(inputs | lora, os.path.join(case["model"], "inputs.safetensors"))
    o = case["options"]
    targets = o["target_modules"]
    return ["--lora", str(o["r"]), "--alpha", str(o["lora_alpha"])] + ["--rslora"] * o["use_rslora"] \
        + ["--dora"] * o["use_dora"] + ["--targets", targets if isinstance(targets, str) else ",".join(targets)]


def check_back(run, case):
    """Checks that PEFT reads the adapter that psluajit trained, and computes the same results."""
    folder = os.path.join(case["model"], "adapter")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base_of(case), folder).eval()
    off = [f"PEFT reads what psluajit wrote with {w.message}" for w in said
           if "missing" in str(w.message) or "unexpected" in str(w.message)]
    done = hf(run, case, "--adapter", folder)
    if done.returncode != 0:
        return off + ["with its own adapter: " + done.stderr]
    batch = models.as_theirs(case, load_file(os.path.join(case["model"], "batch.safetensors")), torch.float32)
    with torch.no_grad():
        got = model.get_base_model()(**batch)
    ours = outputs(case)
    for key in ("logits", "start_logits", "last_hidden_state"):
        if key in ours and distance(ours[key], got[key]) > 1e-5 * float(got[key].norm()) + 1e-6:
            off.append(f"{key} with the trained adapter: {distance(ours[key], got[key]):.3g} from PEFT's")
    return off


def check_merged(run, case, folder):
    out = os.path.join(case["out"], "merged")
    env = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="")
    tool = os.path.join(runs.HERE, "../../tools/merge_adapter.lua")
    done = subprocess.run([run.program, tool, case["model"], folder, "--out", out], env=env, timeout=runs.LIMIT_S,
                          capture_output=True, text=True)
    if done.returncode != 0:
        return ["merge_adapter: " + done.stderr]
    merged, info = getattr(transformers, case["class"]).from_pretrained(out, output_loading_info=True)
    off = [f"transformers reads the merged folder with {k} = {v}" for k, v in info.items() if v]
    theirs = peft.PeftModel.from_pretrained(base_of(case), folder).eval()
    batch = models.as_theirs(case, load_file(os.path.join(case["model"], "batch.safetensors")), torch.float32)
    with torch.no_grad():
        a, b = merged.eval()(**batch), theirs.get_base_model()(**batch)
    for key in ("logits", "start_logits", "last_hidden_state"):
        if key in a and distance(a[key], b[key]) > 2e-5 * float(b[key].norm()) + 1e-6:
            off.append(f"{key} of the merged folder: {distance(a[key], b[key]):.3g} from PEFT's")
    return off


def judge(run, case):
    folder = os.path.join(case["out"], "peft")
    write_adapter(case, folder)
    batch = load_file(os.path.join(case["model"], "inputs.safetensors"))
    save_file(batch, os.path.join(case["model"], "batch.safetensors"))
    labelled = any(n in batch for n in ("labels", "start_positions"))
    if case["bad"]:
        change(folder, case["bad"])
        done = hf(run, case, "--adapter", folder)
        field = next(iter(case["bad"]))
        right = done.returncode == 2 and done.stderr.startswith("refused: " + field + " = ")
        return [] if right else [f"status {done.returncode}, not refused by {field}: {done.stderr}"]
    options = begin(case, folder) if case["plain"] else ["--adapter", folder]
    done = hf(run, case, *options, *(["--train", str(STEPS)] if labelled else []))
    if done.returncode != 0:
        return [f"status {done.returncode}: {done.stderr}"]
    theirs, truth = reference(case, folder, torch.float32), reference(case, folder, torch.float64)
    ours = outputs(case)
    off = models.compare(ours, theirs, truth)
    return off + (check_back(run, case) if labelled else []) + check_merged(run, case, folder)


def main():
    run = runs.Run("lora", cases=46)
    runs.quiet_transformers()
    warnings.simplefilter("ignore")
    for case in run.cases(draw_case):
        models.write_folder(case, case["model"])
        run.judged_case(case, judge(run, case))
    run.end()


if __name__ == "__main__":
    main()
