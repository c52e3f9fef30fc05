# SPDX-License-Identifier: BSD-3-Clause
"""ps.evaluate compared with lm-eval on the same small models: log-probabilities of texts in windows, perplexities per
word and per byte, sums of log-probabilities of choices, and the selected choices. Exact match and F1 of answers are
compared with SQuAD's measures.

Each case draws a model like GPT-2 or Llama, a tokenizer that can add a token before texts, texts of up to several
windows, and questions. The selected choices can differ if lm-eval's two largest numbers differ by less than 1e-4 of
their size.
"""
import collections
import json
import logging
import math
import os
import re
import string

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import runs

logging.disable(logging.WARNING)
os.environ["HF_HUB_OFFLINE"] = "1"
from lm_eval.api.instance import Instance                    # noqa: E402
from lm_eval.models.huggingface import HFLM                  # noqa: E402

CLOSE = 1e-4
WORDS = ("the a cat sat on mat dog ran over hill and then it was gone; who knows? 42 3.14 caf\u00e9 na\u00efve "
         "\u4f60\u597d Paris, France. red blue green The An answer's end").split()


def drawn_text(rng, most):
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", "  ", "\n", "\t", "\u3000", ""])
                   for _ in range(rng.randint(1, most)))


def tokenizer(rng):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator([" ".join(WORDS)] * 20, trainers.BpeTrainer(
        vocab_size=rng.randint(300, 400), show_progress=False, special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if rng.random() < 0.5:
        tok.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tok.token_to_id("<s>"))])
    named = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if rng.random() < 0.7 else {})
    return PreTrainedTokenizerFast(tokenizer_object=tok, **named)


def drawn_model(rng, tok, positions):
    heads, layers = rng.randint(1, 3), rng.randint(1, 2)
    if rng.random() < 0.5:
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=len(tok), n_positions=positions, n_embd=heads * 8, n_head=heads, n_layer=layers))
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tok), max_position_embeddings=positions, hidden_size=heads * 8, num_attention_heads=heads,
        num_hidden_layers=layers, intermediate_size=24, initializer_range=0.1))


def normalized(s):
    """Normalizes as SQuAD's script does: lower case, no punctuation, no articles, single spaces."""
    s = "".join(c for c in s.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", s).split()


def measures(answer, references):
    def f1(a, b):
        common = sum((collections.Counter(a) & collections.Counter(b)).values())
        return float(a == b) if not a or not b else 2 * common / (len(a) + len(b))
    words = normalized(answer)
    return max(float(words == normalized(r)) for r in references), max(f1(words, normalized(r)) for r in references)


def draw(run, index):
    rng = run.random(index)
    torch.manual_seed(rng.randrange(2 ** 31))
    tok, positions = tokenizer(rng), rng.choice([16, 33, 64])
    model = drawn_model(rng, tok, positions)
    folder = os.path.join(run.folder, "model%d" % index)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    questions = []
    for _ in range(rng.randint(1, 5)):
        n = rng.randint(2, 4)
        questions.append({"query": rng.choice(["", "Q: ", drawn_text(rng, 6), drawn_text(rng, 30)]),
                          "choices": [drawn_text(rng, 3).strip() or "x" for _ in range(n)], "gold": rng.randrange(n)})
    case = {"folder": folder, "max_length": rng.choice([positions, positions // 2]), "batch": rng.randint(1, 5),
            "texts": [{"text": drawn_text(rng, 60)} for _ in range(rng.randint(1, 4))], "questions": questions,
            "answers": [[drawn_text(rng, 4), [drawn_text(rng, 4) for _ in range(rng.randint(1, 3))]] for _ in range(5)]}
    case["answers"].append(["The cat, sat!", ["cat sat"]])
    lm = HFLM(pretrained=model.eval(), tokenizer=tok, max_length=case["max_length"], batch_size=2, device="cpu")
    return case, lm


def perplexity(lm, texts, result):
    requests = [Instance(request_type="loglikelihood_rolling", doc=row, arguments=(row["text"],), idx=0)
                for row in texts]
    total = sum(lm.loglikelihood_rolling(requests, disable_tqdm=True))
    words = sum(len(re.split(r"\s+", row["text"])) for row in texts)
    nbytes = sum(len(row["text"].encode()) for row in texts)
    want = {"loglikelihood": total, "word_perplexity": math.exp(-total / words),
            "byte_perplexity": math.exp(-total / nbytes), "words": words, "bytes": nbytes}
    return ["%s: lm-eval %r, ours %r" % (name, x, result[name]) for name, x in want.items()
            if abs(x - result[name]) > CLOSE * abs(x)]


def choices(lm, questions, result):
    requests = [Instance(request_type="loglikelihood", doc=q, arguments=(q["query"], " " + c), idx=0)
                for q in questions for c in q["choices"]]
    try:
        sums, off, hits = iter(lm.loglikelihood(requests, disable_tqdm=True)), [], [0, 0]
    except AssertionError:  # a choice is longer than a window; lm-eval's error says no more
        return [] if "a choice has" in result.get("error", "") else ["a choice is too long; ours %r" % result]
    if "error" in result:
        return [result["error"]]
    for q, sample in zip(questions, result["samples"]):
        of = numpy.array([next(sums)[0] for _ in q["choices"]])
        off += ["sum: lm-eval %r, ours %r: %r" % (x, y, q) for x, y in zip(of, sample["loglikelihoods"])
                if abs(x - y) > CLOSE * abs(x)]
        per_character = of / numpy.array([float(len(c)) for c in q["choices"]])
        for k, (name, x) in enumerate((("choice", of), ("choice_norm", per_character))):
            best = numpy.sort(x)[::-1]
            if sample[name] != int(numpy.argmax(x)) and best[0] - best[1] > CLOSE * abs(best[0]):
                off.append("%s: lm-eval %d, ours %d: %r" % (name, numpy.argmax(x), sample[name], q))
            hits[k] += sample[name] == q["gold"]
    if max(abs(result["acc"] - hits[0] / len(questions)), abs(result["acc_norm"] - hits[1] / len(questions))) > 1e-12:
        off.append("acc %r, acc_norm %r" % (result["acc"], result["acc_norm"]))
    return off


def main():
    run = runs.Run("evaluate", 12)
    runs.quiet_transformers()
    drawn = [(index, *draw(run, index)) for index in run.indices]
    given, results = os.path.join(run.folder, "cases.json"), os.path.join(run.folder, "results.json")
    with open(given, "w") as f:
        json.dump([case for _, case, _ in drawn], f)
    run.psluajit("evaluate_cases.lua", given, results)
    with open(results) as f:
        results = json.load(f)
    for (index, case, lm), result in zip(drawn, results):
        if "error" in result:
            off = [result["error"]]
        else:
            off = perplexity(lm, case["texts"], result["perplexity"])
            off += choices(lm, case["questions"], result["choices"])
            for pair, ours in zip(case["answers"], result["metrics"]):
                if any(abs(x - y) > 1e-12 for x, y in zip(measures(*pair), ours)):
                    off.append("%r: want %r, ours %r" % (pair, measures(*pair), ours))
        run.judged(index, off, "%s, windows of %d" % (type(lm.model).__name__, case["max_length"]))
    run.end()


main()
