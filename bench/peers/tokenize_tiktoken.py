# SPDX-License-Identifier: BSD-3-Clause
"""Prints the number of GPT-2 tokens in a text, counted with tiktoken, which is loaded from the files in DIR.

    tokenize_tiktoken.py DIR < text
"""
import os
import sys

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks


def first(*names):
    return next(p for p in (os.path.join(sys.argv[1], n) for n in names) if os.path.exists(p))


ranks = data_gym_to_mergeable_bpe_ranks(first("merges.txt", "vocab.bpe"), first("vocab.json", "encoder.json"))
gpt2 = tiktoken.Encoding("gpt2", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}, pat_str=(
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""))
print(len(gpt2.encode_ordinary(sys.stdin.buffer.read().decode("utf-8", errors="replace"))))
