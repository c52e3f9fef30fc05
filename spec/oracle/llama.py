# SPDX-License-Identifier: BSD-3-Clause
"""llama.cpp's own library, called through the ctypes declarations of PyPI's llama-cpp-python.

The folder PS_LLAMA, which `tools/oracle.sh llama` makes, contains bin/ (libllama.so), python/ (the declarations) and
smollm2.gguf.
"""
import ctypes
import os
import sys

import numpy as np

FOLDER = os.environ.get("PS_LLAMA", "")
if not os.path.exists(os.path.join(FOLDER, "bin", "libllama.so")):
    raise SystemExit("PS_LLAMA = '%s' has no bin/libllama.so; `tools/oracle.sh llama` makes such a folder" % FOLDER)
os.environ["LLAMA_CPP_LIB_PATH"] = os.path.join(FOLDER, "bin")
sys.path.insert(0, os.path.join(FOLDER, "python"))
from llama_cpp import llama_cpp as c

SMOLLM2 = os.path.join(FOLDER, "smollm2.gguf")
WARNING = 3
F32 = 0                                                         # ggml's number of the type
said = []                                                       # the last warnings and errors of llama.cpp


@c.llama_log_callback
def _log(level, text, _):
    if level >= WARNING:
        said.append(text.decode(errors="replace").strip())
        del said[:-20]


c.llama_log_set(_log, None)
c.llama_backend_init()


def _need(value, what):
    if not value:
        raise RuntimeError("llama.cpp cannot %s: %s" % (what, "; ".join(said[-5:])))
    return value


FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q6_k": 18, "bf16": 32}


def quantize(path, out, kind):
    """Writes a file with other types, as the program llama-quantize does. Packed tensors are unpacked first."""
    options = c.llama_model_quantize_default_params()
    options.nthread, options.ftype, options.allow_requantize = 1, FILE_TYPES[kind], True
    if c.llama_model_quantize(path.encode(), out.encode(), options) != 0:
        raise RuntimeError("llama.cpp cannot quantize %s: %s" % (path, "; ".join(said[-5:])))
    return out


class Model:
    """A GGUF file in llama.cpp. plain: the cache of keys and values is fp32, and attention is computed without the
    flash kernels, which round to 16 bits. Otherwise both are llama.cpp's defaults."""

    def __init__(self, path, context=1024, threads=1, plain=True):
        options = c.llama_model_default_params()
        options.use_mmap = True
        self.model = _need(c.llama_model_load_from_file(path.encode(), options), "load " + path)
        self.vocabulary = c.llama_model_get_vocab(self.model)
        self.width = c.llama_vocab_n_tokens(self.vocabulary)
        options = c.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = context
        options.n_threads = options.n_threads_batch = threads
        if plain:
            options.type_k = options.type_v = F32
            options.flash_attn_type = 0
        self.context = _need(c.llama_init_from_model(self.model, options), "make a context for " + path)
        self.batch = c.llama_batch_init(context, 0, 1)
        self.adapter = None

    def close(self):
        c.llama_batch_free(self.batch)
        c.llama_free(self.context)
        c.llama_model_free(self.model)

    def decode(self, ids, first, all_logits=False):
        """Runs ids at the positions from `first` on, after those in the cache."""
        for i, token in enumerate(ids):
            self.batch.token[i], self.batch.pos[i] = token, first + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = all_logits or i == len(ids) - 1
        self.batch.n_tokens = len(ids)
        status = c.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError("llama_decode returned %d: %s" % (status, "; ".join(said[-5:])))

    def clear(self):
        c.llama_memory_clear(c.llama_get_memory(self.context), True)

    def logits(self, ids, last):
        """The logits [last, vocabulary] of the last positions of a row of ids."""
        self.clear()
        self.decode(ids, 0, True)
        rows = np.ctypeslib.as_array(c.llama_get_logits(self.context), (len(ids), self.width))
        return rows[len(ids) - last:].copy()

    def last_logits(self):
        """The logits of the last position. The next call overwrites them."""
        return np.ctypeslib.as_array(c.llama_get_logits_ith(self.context, -1), (self.width,))

    def greedy(self, ids, count):
        """Continues ids with the likeliest tokens, one at a time with the cache. Returns them and their leads over the
        second likeliest."""
        self.clear()
        out, leads, new = [], [], list(ids)      # new: the ids that are not in the cache
        for _ in range(count):
            self.decode(new, len(ids) + len(out) - len(new))
            row = self.last_logits()
            best = np.argpartition(row, -2)[-2:]
            best = best[np.argsort(row[best])]
            out.append(int(best[1]))
            leads.append(float(row[best[1]] - row[best[0]]))
            new = out[-1:]
        return out, leads

    def adapt(self, path, scale=1.0):
        """Applies a GGUF adapter."""
        adapter = _need(c.llama_adapter_lora_init(self.model, path.encode()), "load the adapter " + path)
        self.adapter = (c.llama_adapter_lora_p_ctypes * 1)(adapter)
        if c.llama_set_adapters_lora(self.context, self.adapter, 1, (ctypes.c_float * 1)(scale)) != 0:
            raise RuntimeError("llama.cpp cannot apply the adapter %s: %s" % (path, "; ".join(said[-5:])))

    def encode(self, text, special=True):
        """The ids of a text, in which names of special tokens become these tokens, without tokens around it."""
        data = text.encode()
        ids = (c.llama_token * (len(data) + 8))()
        count = c.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), False, special)
        if count < 0:
            raise RuntimeError("llama_tokenize returned %d" % count)
        return list(ids[:count])

    def chat(self, messages):
        """A conversation rendered by the file's template, with the beginning of an answer. llama.cpp recognises the
        template, and formats by its own code."""
        template = _need(c.llama_model_chat_template(self.model, None), "find a chat template")
        list_type = c.llama_chat_message * len(messages)
        chat = list_type(*[c.llama_chat_message(m["role"].encode(), m["content"].encode()) for m in messages])
        text = ctypes.create_string_buffer(1 << 16)
        count = c.llama_chat_apply_template(template, chat, len(messages), True, text, len(text))
        if not 0 <= count <= len(text):
            raise RuntimeError("llama_chat_apply_template returned %d" % count)
        return text.raw[:count].decode()
