# SPDX-License-Identifier: BSD-3-Clause
"""Folders of BERT, RoBERTa, GPT-2, Llama, Mistral, Qwen2 and Qwen3 with each of their heads, from transformers to
bench/hf.lua and back.

transformers creates a small model with odd sizes and random values of config.json's fields, and writes its folder
(whole, in shards or as .bin, in fp32 or half types, with older names or other models' heads). bench/hf.lua reads the
folder and a batch. The batch has padding on the left, on the right or inside, or of whole rows, or a mask of 4
dimensions. Logits, loss, gradients and losses of some steps are compared with float64. Then transformers loads the
trained folder, and a folder that was written again without training. It must find every key, and in the second folder
every bit must be equal.

A case is wrong if |ours - float64| is above 1e-5 (|float64| + 1e-3 of the model's largest gradient) and above twice
the error of transformers in fp32. Gradients that are 0 except for rounding, such as those of the keys' biases, are
noise in both.

Half of the models keep their weights in the files (mmap). Half of the encoders with a mask skip padding (unpad =
true), and their outputs are compared at the positions that count.

A random fraction of folders has unsupported features. psluajit must reject them with an error that contains the name
of the field, and with exit status 2.
"""
import json
import os
import subprocess

import torch
import transformers
from safetensors.torch import load_file, save_file

import runs
from runs import distance

HEADS = ["MaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model"]
CLASSES = [("bert", "Bert" + ("For" if h == "MaskedLM" else "") + h) for h in HEADS] \
    + [("roberta", "Roberta" + ("For" if h == "MaskedLM" else "") + h) for h in HEADS] \
    + [("gpt2", n) for n in ("GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification",
                             "GPT2Model")] \
    + [(b.lower(), b + n) for b in ("Llama", "Mistral", "Qwen2", "Qwen3")
       for n in ("ForCausalLM", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model")]
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh", "quick_gelu", "gelu_fast"]
# field -> values, the first of which is usual. There are fields of a family, and fields that no family supports.
ENCODER = {"hidden_act": ACTIVATIONS, "layer_norm_eps": [1e-12, 1e-5, 1.0], "type_vocab_size": [2, 3],
           "tie_word_embeddings": [True, False],
           "classifier_dropout": [None, 0.3], "hidden_dropout_prob": [0.1, 0.0], "intermediate_size": [40, 23],
           "chunk_size_feed_forward": [0, 1]}
DECODER = {"activation_function": ["gelu_new"] + ACTIVATIONS, "layer_norm_epsilon": [1e-5, 1e-3, 1.0],
           "tie_word_embeddings": [True, False],
           "scale_attn_weights": [True, False], "scale_attn_by_inverse_layer_idx": [False, True], "n_inner": [None, 23],
           "reorder_and_upcast_attn": [False, True]}
# The first is a family's value if the file has none. old: the names in files before transformers 5.
ROPES = [{"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 500.0},
         {"rope_type": "linear", "factor": 3.0},
         {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 300.0},
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 20},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9},
         {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 30, "beta_fast": 6.0,
          "beta_slow": 2.0, "truncate": False},
         {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "truncate": None},
         {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.7},
         {"rope_type": "yarn", "factor": 5.0, "mscale": 0.7, "mscale_all_dim": 1.3}]
LLAMA = {"hidden_act": ["silu"] + ACTIVATIONS, "rms_norm_eps": [1e-6, 1e-3, 1.0], "tie_word_embeddings": [False, True],
         "intermediate_size": [40, 23],
         "num_key_value_heads": [None, 1], "head_dim": [None, 6], "rope": ROPES, "attention_dropout": [0.0, 0.3],
         "classifier_dropout": [None, 0.3],
         "token_classification_bias": [True, False, None]}
OWN = {"llama": {"attention_bias": [False, True], "mlp_bias": [False, True], "pretraining_tp": [1, 2]},
       "mistral": {"sliding_window": [4096, None, 1, 3]},
       "qwen2": {"layer_types": [None, "drawn"], "use_sliding_window": [False, True], "max_window_layers": [28, 0, 1]},
       "qwen3": {"layer_types": [None, "drawn"], "use_sliding_window": [False, True], "max_window_layers": [28, 0, 1],
                 "attention_bias": [False, True]}}
REFUSED = {"encoder": [{"is_decoder": True}, {"position_embedding_type": "relative_key"}, {"hidden_act": "mish"},
                       {"quantization_config": {"bits": 4}}, {"auto_map": {"AutoModel": "x.Y"}},
                       {"model_type": "mamba"},
                       {"architectures": ["BertForNextSentencePrediction"]}, {"is_causal": True},
                       {"per_layer_config": {"0": {"layer_norm_eps": 0.1}}}],
           "llama": [{"rope_type": "longrope"}, {"partial_rotary_factor": 0.5}, {"hidden_act": "mish"},
                     {"quantization_config": {"bits": 4}},
                     {"architectures": ["LlamaForQuestionAnswering"]}, {"per_layer_config": {"0": {"head_dim": 4}}},
                     {"is_causal": False}],
           "decoder": [{"is_causal": False}, {"per_layer_config": {"0": {"layer_norm_epsilon": 0.1}}},
                       {"add_cross_attention": True}, {"activation_function": "mish"},
                       {"architectures": ["GPT2DoubleHeadsModel"]}]}
STEPS = 20
IGNORED = -100


def draw_case(rng, index):
    family, name = CLASSES[index % len(CLASSES)]
    heads = rng.randint(1, 3)
    # at least 4, since the layer norm of two numbers is 1 and -1 for any input, and its gradient is only rounding
    width, layers, positions = heads * rng.choice([4, 5, 8]), rng.randint(1, 3), rng.randint(12, 25)
    table = DECODER if family == "gpt2" else LLAMA | OWN[family] if family in LLAMAS else ENCODER
    fields = {key: rng.choice(values[1:]) for key, values in table.items()
              if rng.random() < (0.4 if key in ("rope", "use_sliding_window") else 0.25)}
    if family in LLAMAS:
        heads, width = heads * 2, heads * 2 * rng.choice([4, 6, 8])
        if family == "qwen3":                        # dynamic divides by the number of columns minus 2
            fields.setdefault("head_dim", rng.choice([4, 6, 10]))
        if fields.get("num_key_value_heads"):
            fields["num_key_value_heads"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        if fields.get("use_sliding_window"):
            fields["sliding_window"] = rng.choice([1, 2, 4, 4096])
            if "layer_types" in fields:
                fields["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        elif "layer_types" in fields:
            fields["layer_types"] = ["full_attention"] * layers
    labels = rng.choice([1, 2, 2, 3]) if "Sequence" in name else rng.choice([2, 3]) if "Token" in name else 2
    case = {"family": family, "class": name, "fields": fields, "num_labels": labels, "vocab": rng.randint(20, 70),
            "width": width,
            "heads": heads, "layers": layers, "positions": positions, "rows": rng.randint(1, 4),
            "length": rng.randint(1, 11),
            "pad": rng.choice([0, 1, 5, -1]), "use_cache": rng.random() < 0.8,
            "file": rng.choice(["whole", "whole", "shards", "bin", "old names"]),
            "dtype": rng.choice(["float32", "float32", "bfloat16", "float16"]),
            "mask": rng.random() < 0.8 and rng.choice(["ends", "ends", "holes", "a row"]),
            "types": rng.random() < 0.5, "places": rng.random() < 0.3, "problem": None, "refused": None}
    if rng.random() < 0.15:
        case["length"], case["positions"] = rng.randint(30, 140), 150
    if family in LLAMAS:
        case["types"], case["old_fields"] = False, rng.random() < 0.4
        case["mask"] = rng.choice([case["mask"]] * 3 + ["square", "added"])
    if "Sequence" in name:
        case["problem"] = rng.choice([None, None, "regression", "multi_label_classification"])
    if rng.random() < 0.12:
        case["refused"] = rng.choice(REFUSED["decoder" if family == "gpt2" else "llama" if family in LLAMAS
                                             else "encoder"])
    case["unpad"] = family in ("bert", "roberta") and "Question" not in name and case["mask"] and rng.random() < 0.5
    case["mmap"] = rng.random() < 0.5
    return case


def config_of(case):
    common = {"vocab_size": case["vocab"], "num_labels": case["num_labels"], "problem_type": case["problem"],
              "pad_token_id": case["pad"],
              "use_cache": case["use_cache"], "initializer_range": 0.2, "bos_token_id": 2, "eos_token_id": 3}
    if case["family"] == "gpt2":
        return transformers.GPT2Config(n_embd=case["width"], n_layer=case["layers"], n_head=case["heads"],
                                       n_positions=case["positions"],
                                       **common, **case["fields"])
    if case["family"] in LLAMAS:
        fields = dict(case["fields"])
        if "rope" in fields:
            fields["rope_parameters"] = dict(fields.pop("rope"))
        make = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig,
                "qwen2": transformers.Qwen2Config,
                "qwen3": transformers.Qwen3Config}[case["family"]]
        sizes = {"hidden_size": case["width"], "num_hidden_layers": case["layers"],
                 "num_attention_heads": case["heads"],
                 "max_position_embeddings": case["positions"], "intermediate_size": 40}
        if case["family"] != "llama" and "num_key_value_heads" not in fields:
            fields["num_key_value_heads"] = case["heads"]
        return make(**common, **(sizes | fields))
    sizes = {"hidden_size": case["width"], "num_hidden_layers": case["layers"], "num_attention_heads": case["heads"],
             "max_position_embeddings": case["positions"] + 6, "intermediate_size": 40}
    make = transformers.BertConfig if case["family"] == "bert" else transformers.RobertaConfig
    return make(**common, **(sizes | case["fields"]))


def write_folder(case, folder):
    """Writes the folder and the batch next to it, and returns the batch in transformers' form."""
    torch.manual_seed(case["seed"])
    model = getattr(transformers, case["class"])(config_of(case))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.to(getattr(torch, case["dtype"]))
    model.save_pretrained(folder, **({"max_shard_size": "4KB"} if case["file"] == "shards" else {}))
    path = os.path.join(folder, "model.safetensors")
    if case["file"] == "bin":
        torch.save(load_file(path), os.path.join(folder, "pytorch_model.bin"))
        os.remove(path)
    if case["file"] == "old names":                # gamma and beta, position ids, another model's head
        tensors = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
                   for n, t in load_file(path).items()}
        prefix = "" if case["class"].endswith("Model") and case["family"] != "gpt2" else "bert."
        if case["family"] == "bert":
            tensors[prefix + "embeddings.position_ids"] = torch.arange(case["positions"] + 6)[None]
            tensors["cls.seq_relationship.weight"] = torch.zeros(2, case["width"])
        save_file(tensors, path, {"format": "pt"})
    name = os.path.join(folder, "config.json")
    with open(name) as f:
        text = json.load(f)
    if case["family"].startswith("qwen") and case["seed"] % 2 and text["num_key_value_heads"] == case["heads"]:
        text["num_key_value_heads"] = None
    rope = text.get("rope_parameters")
    if case.get("old_fields"):                     # as versions before 5 wrote them
        text["torch_dtype"] = text.pop("dtype", "float32")
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta", 10000.0)
        if rope["rope_type"] != "default":
            text["rope_scaling"] = rope | ({"type": rope.pop("rope_type")} if case["seed"] % 2 else {})
            rope = text["rope_scaling"]
    refused = dict(case["refused"] or {})
    if "rope_type" in refused:
        text["rope_scaling"] = {"rope_type": refused.pop("rope_type"), "factor": 2.0}
    with open(name, "w") as f:
        json.dump(text | refused, f)
    batch = draw_batch(case)
    save_file({k: (v.int() if k == "input_ids" else v).contiguous() for k, v in batch.items()},
              os.path.join(folder, "inputs.safetensors"))


def draw_batch(case):
    shape = (case["rows"], case["length"])
    ids = torch.randint(0, case["vocab"], shape)
    mask = torch.ones(shape, dtype=torch.int64)
    for row in range(case["rows"]):
        n = int(torch.randint(0, case["length"], ()))
        if n > 0:
            part = slice(0, n) if torch.rand(()) < 0.5 else slice(case["length"] - n, case["length"])
            ids[row, part] = max(case["pad"], 0)       # below 0 it is no id, and a row from the end has no gradient
            mask[row, part] = 0
    batch = {"input_ids": ids}
    if case["mask"] == "holes":
        mask = (torch.rand(shape) < 0.7).long()
    elif case["mask"] == "a row":                      # a row without positions that count
        mask[0] = 0
    elif case["mask"]:
        square = (shape[0], case["heads"] if case["seed"] % 2 else 1, shape[1], shape[1])
        sees = (torch.rand(square) < 0.6) | torch.eye(shape[1]).bool()
        if case["mask"] == "square":
            mask = sees
        elif case["mask"] == "added":
            mask = torch.where(sees, torch.randn(square), -torch.inf)
    if case["mask"]:
        batch["attention_mask"] = mask
    if case["types"]:
        top = case["vocab"] if case["family"] == "gpt2" else case["fields"].get("type_vocab_size", 2)
        batch["token_type_ids"] = torch.randint(0, top, shape)
    if case["places"]:
        batch["position_ids"] = torch.randint(0, case["positions"], shape)
        if not case["mask"] and not case["use_cache"]:     # transformers then sees several sequences
            first = torch.randint(0, case["positions"] - case["length"] + 1, (case["rows"], 1))
            batch["position_ids"] = first + torch.arange(case["length"])
    name, rows, k = case["class"], case["rows"], case["num_labels"]
    if "Sequence" in name:
        regression = case["problem"] == "regression" or case["problem"] is None and k == 1
        several = case["problem"] == "multi_label_classification" or regression and k > 1
        batch["labels"] = torch.randint(0, 2 if several else max(k, 3) if regression else k,
                                        (rows, k) if several else (rows,))
    elif "Token" in name or "LM" in name:
        batch["labels"] = torch.randint(0, k if "Token" in name else case["vocab"], shape)
        batch["labels"][torch.rand(shape) < 0.3] = IGNORED
        batch["labels"][0, -1] = 0
        batch["labels"] = batch["labels"] if case["length"] > 1 or "Token" in name or "Masked" in name else None
    elif "Question" in name:
        batch["start_positions"] = torch.randint(0, case["length"], (rows,))
        batch["end_positions"] = torch.randint(0, case["length"] + 3, (rows,))
        batch["end_positions"][0] = 0
    return {n: t for n, t in batch.items() if t is not None}


def as_theirs(case, batch, dtype):
    batch = {n: t.to(dtype) if t.is_floating_point() else t if t.dtype == torch.bool else t.long() for n,
             t in batch.items()}
    kinds = case["problem"] or ("regression" if case["num_labels"] == 1 else None)
    if "labels" in batch and "Sequence" in case["class"] and kinds in ("regression", "multi_label_classification"):
        batch["labels"] = batch["labels"].to(dtype)
    return batch


def reference(case, dtype):
    model = getattr(transformers, case["class"]).from_pretrained(case["model"], dtype=torch.float32).eval().to(dtype)
    batch = as_theirs(case, load_file(os.path.join(case["model"], "inputs.safetensors")), dtype)
    if dtype == torch.float64 and case["family"] == "gpt2":
        for block in model.transformer.h if hasattr(model, "transformer") else model.h:    # it insists on fp32
            block.attn.reorder_and_upcast_attn = False
    got = model(**batch)
    out = {k: got[k].detach() for k in ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
           if k in got and got[k] is not None}
    if got.get("loss") is None:
        return out
    out["loss"] = got.loss.detach()
    got.loss.backward()
    out |= {"grad." + n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch).loss
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
    out["losses"] = torch.stack(losses)
    return out


def counted(outputs, mask):
    """Returns the outputs with zeros at the positions that unpad = true skips: those that are hidden as keys, except
    the first."""
    seen = mask.bool().clone()
    seen[:, 0] = True
    return {n: t * seen[..., None] if n == "last_hidden_state" or n == "logits" and t.dim() == 3 else t for n,
            t in outputs.items()}


def compare(ours, theirs, truth):
    off = [n + ": not there" for n in truth if n not in ours] + [n + ": not transformers'" for n in ours
                                                                 if n not in truth]
    gradients = [n for n in truth if n.startswith("grad.")]
    largest = max([float(truth[n].norm()) for n in gradients], default=0)
    # for a gradient that is 0 except for rounding, the model's average error per element
    typical = (sum(distance(theirs[n], truth[n]) ** 2 for n in gradients) / max(1,
                                                                                sum(truth[n].numel()
                                                                                    for n in gradients))) ** 0.5
    for n in truth:
        if n not in ours:
            continue
        if tuple(ours[n].shape) != tuple(truth[n].shape):
            off.append(f"{n}: shape {tuple(ours[n].shape)}, not {tuple(truth[n].shape)}")
            continue
        size, least = float(truth[n].norm()), 0
        if n.startswith("grad."):
            size, least = size + 1e-3 * largest, typical * truth[n].numel() ** 0.5
        bound = max(1e-5 * size, 3 * max(distance(theirs[n], truth[n]), least)) + 2.0 ** -22
        got = distance(ours[n], truth[n])
        if not got <= bound:
            off.append(f"{n}: {got:.3g} from float64, transformers {distance(theirs[n], truth[n]):.3g}, "
                       f"norm {size:.3g}")
    return off


def weights_of(folder):
    names = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors") and n.startswith("model"))
    if not names:
        return torch.load(os.path.join(folder, "pytorch_model.bin"))
    out = {}
    for name in names:
        out |= load_file(os.path.join(folder, name))
    return out


def loads(case, folder):
    _, info = getattr(transformers, case["class"]).from_pretrained(folder, output_loading_info=True)
    info = {k: v for k, v in info.items() if v}
    return [f"transformers reads {os.path.basename(folder)} with {info}"] if info else []


def judge(run, case):
    batch = load_file(os.path.join(case["model"], "inputs.safetensors"))
    labelled = any(n in batch for n in ("labels", "start_positions"))
    lines = ([os.path.join(runs.HERE, "../../bench/hf.lua"), case["model"]]
             + (["--train", str(STEPS)] if labelled else []) + ["--unpad"] * case["unpad"] + ["--mmap"] * case["mmap"])
    env = dict(os.environ, OMP_WAIT_POLICY="passive", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([run.program, *lines], env=env, timeout=runs.LIMIT_S, capture_output=True, text=True)
    if case["refused"]:
        field = next(iter(case["refused"]))
        right = done.returncode == 2 and done.stderr.startswith("refused: " + field + " = ")
        return [] if right else [f"status {done.returncode}, not refused by {field}: {done.stderr}"]
    if done.returncode != 0:
        return [f"status {done.returncode}: {done.stderr}"]
    theirs, truth = reference(case, torch.float32), reference(case, torch.float64)
    ours = load_file(os.path.join(case["model"], "outputs.safetensors"))       # by names in the file
    ours = {n.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): t
            for n, t in ours.items()}
    if case["unpad"]:
        ours, theirs, truth = (counted(o, batch["attention_mask"]) for o in (ours, theirs, truth))
    off = compare(ours, theirs, truth)
    text = ('require("ps").from_pretrained(%s, { dtype = "auto", quiet = true })'
            ':save_pretrained(%s, { max_shard_size = %d })')
    back = os.path.join(case["out"], "back")
    again = subprocess.run([run.program, "-e", text % (json.dumps(case["model"]), json.dumps(back), 6000)], env=env,
                           timeout=runs.LIMIT_S, capture_output=True, text=True)
    if again.returncode != 0:
        return off + ["written again: " + again.stderr]
    off += loads(case, back)
    a, b = (getattr(transformers, case["class"]).from_pretrained(f).state_dict() for f in (case["model"], back))
    off += [n + ": other bits in the folder that was written again" for n in a
            if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
    if labelled:
        off += loads(case, os.path.join(case["model"], "trained"))
    return off


def main():
    run = runs.Run("models", cases=42)
    runs.quiet_transformers()
    for case in run.cases(draw_case):
        write_folder(case, case["model"])
        run.judged_case(case, judge(run, case))
    run.end()


if __name__ == "__main__":
    main()
