# SPDX-License-Identifier: BSD-3-Clause
"""Tokenizers: ids, offsets and texts of psluajit compared with the packages tokenizers and tiktoken.

Small tokenizers are trained on text with many scripts: the pipelines of GPT-2 and RoBERTa, the patterns of Llama 3
and Qwen, and BERT with and without lower-casing. Each is written in a form that psluajit reads (tokenizer.json, or
vocab.json and merges.txt, or vocab.txt), and gets every code point of Unicode, random strings, random bytes and lines
of this tree. If GPT-2's own files are next to the tree (or in PS_SHARED), their ids are also compared with
tiktoken's. Finally, src/data/tok_unicode.h must be the output of unicode_table.py.
"""
import base64
import glob
import json
import os
import random
import subprocess
import sys
import unicodedata

import tiktoken
import transformers
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import runs

ROOT = os.path.dirname(os.path.dirname(runs.HERE))
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
WHOLE = ["gpt2 json", "bert"]              # these get all code points, and the others a twentieth of them
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


# -- texts -----------------------------------------------------------------------------------------------------------
def drawn_string(rng, alphabet):
    kind = rng.random()
    n = rng.choice([0, 1, 2, 3, 5, 8, 13, 21, 40, 80])
    if kind < 0.3:
        return "".join(rng.choices(alphabet, k=n))
    if kind < 0.5:
        return "".join(rng.choice(alphabet) * rng.choice([1, 1, 2, 3, 7]) for _ in range(n))
    if kind < 0.7:                                            # any code points
        return "".join(chr(rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x800), rng.randrange(0xD800),
                                       rng.randrange(0xE000, 0x110000)])) for _ in range(n))
    if kind < 0.85:
        return "".join(rng.choice("aAbB  \t\n\r.,'!0123\u00e9\u0301\u4e2d\u3000") for _ in range(n))
    return rng.choice(alphabet) * rng.choice([33, 64, 100, 300])


def code_points():
    """Returns all code points, alone and adjacent."""
    for first in range(0, 0x110000, 64):
        cs = [chr(c) for c in range(first, first + 64) if not 0xD800 <= c < 0xE000]
        if cs:
            yield " ".join(cs)
            yield "".join(cs)


def lines_of_tree():
    for path in sorted(glob.glob(os.path.join(ROOT, "docs", "*.md"))
                       + glob.glob(os.path.join(ROOT, "src", "data", "*.c"))):
        with open(path, encoding="utf-8", newline="") as f:
            yield from f.read().split("\n")


def corpus():
    scripts = ["the quick brown fox jumps over the lazy dog 1234567890 ", "it's we'll they've I'm he'd don't ",
               "\u0430\u0431\u0432\u0433 \u0441\u043b\u043e\u0432\u043e ", "\u4e2d\u6587\u5b57 \u65e5\u672c\u8a9e ",
               "\u00e9t\u00e9 na\u00efve caf\u00e9 ",
               "\U0001f600\U0001f680 ", "\uac00\ub098\ub2e4 ", "  \n\n\t ", "x = y + 1; // comment\n",
               "\u0661\u0662\u0663 \u2167 ", "HTML <b> &amp; "]
    return scripts * 20 + list(lines_of_tree())[:3000]


# -- tokenizers ------------------------------------------------------------------------------------------------------
def bpe(pre, seed, ignore_merges=False, post=None):
    tok = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=1500 + seed % 500, show_progress=False,
                                                          special_tokens=[
        "<|endoftext|>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if post:
        tok.post_processor = post
    return tok


def llama2(seed, scheme):
    """Characters, or bytes <0xXX> for characters without a token. Blanks become U+2581, with a normalizer or with
    Metaspace."""
    tok = Tokenizer(models.BPE(byte_fallback=scheme != "never", fuse_unk=True, unk_token="<unk>"))
    if scheme == "normalizer":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme.split(",")[0], split="words" in scheme)
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
                                    + ([] if scheme == "never" else [decoders.Strip(" ", 1, 0)]))
    learner = Tokenizer(models.BPE())           # learned from words, since whole texts would be its words
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=900 + seed % 300, show_progress=False,
                                                              limit_alphabet=70))
    learnt = json.loads(learner.to_str())["model"]
    whole = json.loads(tok.to_str())
    first = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)]
    whole["model"]["vocab"] = {t: i for i, t in enumerate(first)} | {t: i + len(first) for t,
                                                                     i in learnt["vocab"].items()}
    whole["model"]["merges"] = learnt["merges"]
    tok = Tokenizer.from_str(json.dumps(whole))
    tok.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tok.add_tokens([AddedToken("fox"), AddedToken("dog", normalized=False)])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1",
                                                       special_tokens=[("<s>", 1)])
    return tok


def wordpiece(lower, seed, **normalizer):
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=lower, **normalizer)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    tok.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=1200 + seed % 300, show_progress=False,
                                                                special_tokens=[
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    cls, sep = tok.token_to_id("[CLS]"), tok.token_to_id("[SEP]")
    tok.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                                                       special_tokens=[("[CLS]", cls), ("[SEP]", sep)])
    return tok


def byte_level(space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=space)


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def shuffled(tok, rng):
    """Returns the same tokenizer with its merges in another order, so that a merge can use the result of a later
    one."""
    whole = json.loads(tok.to_str())
    rng.shuffle(whole["model"]["merges"])
    return Tokenizer.from_str(json.dumps(whole))


def made(seed):
    """Yields name, tokenizer and form of its files. A form that is a dict is a tokenizer_config.json next to
    tokenizer.json."""
    rng = random.Random(seed)
    gpt2 = bpe(byte_level(), seed)
    yield "gpt2", gpt2, "vocab"
    yield "gpt2 json", gpt2, "json"
    yield "gpt2, merges in any order", shuffled(gpt2, rng), "json"
    spaced = bpe(byte_level(True), seed, post=processors.ByteLevel(trim_offsets=True))
    spaced.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<|end|>", rstrip=True),
                               AddedToken(" <x>")])
    spaced.add_tokens([AddedToken("foxes"), AddedToken("<|"), AddedToken("<|endof")])
    yield "prefix space, added tokens", spaced, "json"
    roberta = bpe(byte_level(), seed)
    roberta.post_processor = processors.RobertaProcessing(("</s>", roberta.token_to_id("</s>")),
                                                          ("<s>", roberta.token_to_id("<s>")),
                                                          trim_offsets=True, add_prefix_space=False)
    yield "roberta", roberta, "json"
    yield "llama3", bpe(split(LLAMA3), seed, ignore_merges=True), "json"
    yield "qwen2", bpe(split(QWEN2), seed), "json"
    composed = bpe(split(QWEN2), seed)
    composed.normalizer = normalizers.NFC()
    composed.add_tokens([AddedToken("caf\u0065\u0301", normalized=True)])
    yield "qwen2, nfc", composed, "json"
    for scheme in ("normalizer", "always", "first", "never", "first, words"):
        yield "llama2, " + scheme, llama2(seed, scheme), "json"
    space = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    yield "llama2, no blank in front by its configuration", llama2(seed, "first"), space
    yield "gpt2, a blank in front by its configuration", gpt2, {"tokenizer_class": "GPT2Tokenizer",
                                                                "add_prefix_space": True}
    more = bpe(byte_level(), seed)                   # tokens that are special only in the configuration
    more.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("foxes")])
    token = {"content": "the", "special": False, "lstrip": True, "rstrip": False, "normalized": False,
             "single_word": False}
    word = min(t for t in more.get_vocab() if t.isascii() and t.isalpha() and len(t) > 3 and t != "foxes")
    yield "tokens of the configuration", more, {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": token | {"content": word, "__type": "AddedToken"},
        "added_tokens_decoder": {str(more.token_to_id("the")): token}, "additional_special_tokens": ["12", "<|end|>"]}
    odd = llama2(seed, "never")                      # a character that is also the unknown token
    whole = json.loads(odd.to_str())
    whole["model"] |= {"unk_token": "a", "fuse_unk": True}
    yield "llama2, an unknown token of a letter", Tokenizer.from_str(json.dumps(whole)), "json"
    words = wordpiece(True, seed)
    words.add_tokens([AddedToken(t) for t in ("...", ".net", "a . b", "##x", "THE", "'LL", " do not", "?!")])
    yield "bert, added tokens of punctuation", words, "json"
    for setting, value in (("do_lower_case", False), ("strip_accents", False), ("tokenize_chinese_chars", False)):
        yield "bert, %s by its configuration" % setting, wordpiece(True, seed), {"tokenizer_class": "BertTokenizer",
                                                                                 setting: value}
    yield "bert", wordpiece(True, seed), "words"
    yield "bert json", wordpiece(True, seed), "json"
    yield "bert cased", wordpiece(False, seed), "json"
    yield "bert small letters with accents", wordpiece(True, seed, strip_accents=False), "json"
    yield "bert without Chinese", wordpiece(False, seed, handle_chinese_chars=False, clean_text=False,
                                            strip_accents=True), "json"


def write(tok, form, folder):
    os.makedirs(folder)
    if isinstance(form, dict):
        tok.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump(form, f)
    elif form == "json":
        tok.save(os.path.join(folder, "tokenizer.json"))
    elif form == "vocab":
        tok.model.save(folder)                       # which does not say which tokens are special
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump({"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {
                str(i): {"content": t.content, "special": t.special, "normalized": t.normalized, "lstrip": t.lstrip,
                         "rstrip": t.rstrip,
                         "single_word": t.single_word} for i, t in tok.get_added_tokens_decoder().items()}}, f)
    else:
        with open(os.path.join(folder, "vocab.txt"), "w", encoding="utf-8", newline="") as f:
            vocab = tok.get_vocab()
            f.write("".join(word + "\n" for word in sorted(vocab, key=vocab.get)))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump({"tokenizer_class": "BertTokenizer", "do_lower_case": True}, f)


# -- judging ---------------------------------------------------------------------------------------------------------
def ours(run, folder, name, texts):
    """Returns [ids, offsets, text] for each text, which is given as bytes."""
    given, got = os.path.join(run.folder, name + ".in"), os.path.join(run.folder, name + ".out")
    with open(given, "wb") as f:
        for text in texts:
            f.write(b"%d\n" % len(text) + text)
    run.psluajit("tokens_cases.lua", folder, given, got)
    with open(got, "rb") as f:
        for _ in texts:
            ids, offsets = f.readline().decode(), f.readline().decode()
            back = f.read(int(f.readline()))
            if ids.startswith("error"):
                yield ids, [], back
            else:
                yield [int(x) for x in ids.split()], [int(x) for x in offsets.split()], back


def byte_offsets(text, pairs):
    at = [0]
    for c in text:
        at.append(at[-1] + len(c.encode()))
    return [at[x] for pair in pairs for x in pair]


def reordered(text):
    """Returns whether decomposition reorders marks. In this case, tokenizers reports other origins for the word than
    for its characters."""
    marks = [unicodedata.combining(x) for c in text for x in unicodedata.normalize("NFD", c)]
    return any(0 < b < a for a, b in zip(marks, marks[1:]))


def judge_decoded(run, name, index, tok, folder):
    """Compares the texts of ids in any order, with and without special tokens."""
    rng, off = run.random(index), 0
    rows = [[rng.randrange(tok.get_vocab_size()) for _ in range(rng.randrange(1, 9))] for _ in range(300)]
    given, got = os.path.join(run.folder, "%d.ids" % index), os.path.join(run.folder, "%d.texts" % index)
    with open(given, "w") as f:
        json.dump(rows, f)
    run.psluajit("tokens_cases.lua", folder, given, got, "decode")
    with open(got, encoding="utf-8") as f:
        for ids, texts in zip(rows, json.load(f)):
            # tokenizers decodes an added token's letters as GPT-2's byte letters; psluajit keeps them as text
            if "ByteLevel" in str(tok.decoder) and any(not t.content.isascii() for i,
                                                       t in tok.get_added_tokens_decoder().items() if i in ids):
                continue
            want = [tok.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
            if want != texts and off < 5:
                print("  %s: decoded %s: %r, not %r" % (name, ids, texts, want))
            off += want != texts
    return off


def judge(run, name, index, tok, folder, texts, offsets):
    off = 0
    raw = [t if isinstance(t, bytes) else t.encode() for t in texts]
    for text, (ids, places, back) in zip(raw, ours(run, folder, str(index), raw)):
        given = text.decode("utf-8", errors="replace")
        # tokenizers composes with tables of an older Unicode, which lack the order of some marks
        if name.endswith("nfc") and tok.normalizer.normalize_str(given) != unicodedata.normalize("NFC", given):
            continue
        want = tok.encode(given)
        wrong = []
        if want.ids != ids:
            wrong.append("ids %s, not %s" % (ids, want.ids))
        elif given.encode() == text and offsets and not reordered(given) and byte_offsets(given,
                                                                                          want.offsets) != places:
            wrong.append("offsets %s, not %s" % (places, byte_offsets(given, want.offsets)))
        elif tok.decode(ids, skip_special_tokens=False).encode() != back:
            wrong.append("decoded %r, not %r" % (back, tok.decode(ids, skip_special_tokens=False)))
        if wrong and off < 5:
            print("  %s: %r" % (name, text[:300]))
            print("\n".join("    " + w[:600] for w in wrong), flush=True)
        off += bool(wrong)
    return off


def judge_ranks(run, index, gpt2, texts):
    """Compares a file of ranks, made from a trained tokenizer's vocabulary. Every pair of tokens whose concatenation
    is a token can merge."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    of_letter, more = {}, 256
    for byte in printable + [b for b in range(256) if b not in printable]:
        of_letter[chr(byte) if byte in printable else chr(more)] = byte
        more += byte not in printable
    assert set(letters) == set(of_letter)
    tokens = sorted(((i, t) for t, i in gpt2.get_vocab().items() if set(t) <= set(of_letter)
                     and t not in ("<|endoftext|>", "<s>", "</s>")),
                    key=lambda x: (len(x[1]) > 1, x[0]))
    ranks = {bytes(of_letter[c] for c in t): rank for rank, (_, t) in enumerate(tokens)}
    folder = os.path.join(run.folder, "ranks")
    os.makedirs(folder)
    path = os.path.join(folder, "qwen.tiktoken")
    with open(path, "wb") as f:
        for token, rank in ranks.items():
            f.write(base64.b64encode(token) + b" %d\n" % rank)
    theirs = tiktoken.Encoding("ranks", pat_str=QWEN2, mergeable_ranks=ranks, special_tokens={
        "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645})
    off = 0
    raw = [t if isinstance(t, bytes) else t.encode() for t in texts]
    for text, (ids, _, back) in zip(raw, ours(run, path, str(index), raw)):
        given = text.decode("utf-8", errors="replace")
        want = theirs.encode(given, allowed_special="all")
        if want != ids or theirs.decode(ids).encode() != back:
            off += 1
            print("  ranks: %r: %s, not %s" % (given[:200], ids[:40], want[:40]), flush=True)
    return off


def judge_tiktoken(run, index, folder, texts):
    ranks = data_gym_to_mergeable_bpe_ranks(os.path.join(folder, "vocab.bpe"), os.path.join(folder, "encoder.json"))
    tik = tiktoken.Encoding("gpt2", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    off = 0
    raw = [t if isinstance(t, bytes) else t.encode() for t in texts]
    for text, (ids, _, back) in zip(raw, ours(run, folder, str(index), raw)):
        given = text.decode("utf-8", errors="replace")
        want = tik.encode(given, allowed_special="all")
        if want != ids or back != given.encode():
            off += 1
            if off < 5:
                print("  tiktoken: %r\n    ids %s, not %s; decoded %r" % (text[:300], ids, want, back[:300]),
                      flush=True)
    return off


def main():
    run = runs.Run("tokens", cases=600)                      # random strings for each tokenizer
    count = len(run.indices)
    rng = run.random(0)
    letters = "".join(chr(c) for c in list(range(32, 127)) + [0xE9, 0xDF, 0x130, 0x131, 0x3C3, 0x430, 0x4E2D, 0xAC00,
                                                              0x301, 0x1F600])
    alphabet = list(letters) + ["the", " the", "'s", "'LL", "\u017f", "<|endoftext|>", "<mask>", " <mask> ", "foxes",
                                "[CLS]", "[MASK]", "\r\n",
                                "<|end|> <x>", "<|end|>", "...", ".net", "a . b", "THE", " do not", "?!", " lazy", "12"]
    everything = list(code_points())
    drawn = [drawn_string(rng, alphabet) for _ in range(count)] + list(lines_of_tree())[rng.randrange(20)::20]
    drawn += [rng.randbytes(rng.randrange(60)) for _ in range(count // 5)]
    index = 0
    for name, tok, form in made(run.seed):
        folder = os.path.join(run.folder, "tok%d" % index)
        write(tok, form, folder)
        if isinstance(form, dict):                       # transformers' class builds another pipeline
            tok = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
        texts = drawn + (everything if name in WHOLE else everything[rng.randrange(40)::40])
        # In psluajit, the blanks that an added token includes belong to it. tokenizers removes some of them.
        places = form != "vocab" and name not in ("prefix space, added tokens", "tokens of the configuration")
        off = judge(run, name, index, tok, folder, texts, offsets=places) + judge_decoded(run, name, index, tok, folder)
        run.judged(index, ["%d texts of %d" % (off, len(texts))] if off else [], name)
        index += 1
    gpt2 = next(tok for name, tok, _ in made(run.seed) if name == "gpt2")
    off = judge_ranks(run, index, gpt2, drawn + everything[rng.randrange(40)::40])
    run.judged(index, ["%d texts" % off] if off else [], "ranks")
    index += 1
    shared = os.path.join(os.environ.get("PS_SHARED", os.path.join(ROOT, "..", "shared")), "data")
    if os.path.exists(os.path.join(shared, "gpt2", "vocab.bpe")):
        with open(os.path.join(shared, "tinyshakespeare.txt"), encoding="utf-8") as f:
            more = f.read().split("\n")
        off = judge_tiktoken(run, index, os.path.join(shared, "gpt2"), drawn + everything + more + ["\n".join(more)])
        run.judged(index, ["%d texts" % off] if off else [], "tiktoken")
    table = subprocess.run([sys.executable, os.path.join(runs.HERE, "unicode_table.py")], capture_output=True,
                           text=True, check=True).stdout
    with open(os.path.join(ROOT, "src", "data", "tok_unicode.h"), encoding="ascii") as f:
        run.judged(index + 1, [] if f.read() == table else ["it is not what unicode_table.py prints"],
                   "src/data/tok_unicode.h")
    run.end()


main()
