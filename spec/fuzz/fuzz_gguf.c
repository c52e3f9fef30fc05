/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the GGUF reader. The input is a file. If the file opens, the guarantees of ps_gguf are checked:
 * names and keys are found again, values and the bytes of tensors lie in the file, and values are read without a
 * fault. */
#include "io/gguf.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

enum { VALUES = 1 << 12, MANY = 64 };
static volatile uint8_t sink;   /* bytes are read only so that the sanitizer checks them */

static void must(int condition)
{
    if (!condition) abort();
}

static void read_meta(const ps_gguf *g)
{
    for (int i = 0; i < ps_gguf_meta_count(g); i++) {
        ps_gguf_value v;
        must(ps_gguf_meta_find(g, ps_gguf_meta_key(g, i)) == i);
        must(ps_gguf_meta_get(g, i, -1, &v) == 0 && v.n >= 0);
        for (int64_t k = 0, n = v.n; k < n && k < MANY; k++) {
            must(ps_gguf_meta_get(g, i, k, &v) == 0);
            for (int64_t b = 0; v.text && b < v.whole; b++) sink = (uint8_t)v.text[b];
        }
        must(ps_gguf_meta_get(g, i, v.n, &v) == PS_ERANGE);
    }
}

static void read_tensors(ps_gguf *g, const uint8_t *file, size_t size)
{
    static double out[VALUES];
    for (int i = 0; i < ps_gguf_count(g); i++) {
        ps_gguf_entry e;
        int64_t zeros[8] = { 0 }, numel = 1;
        must(ps_gguf_find(g, ps_gguf_name(g, i)) == i);
        must(ps_gguf_get(g, i, &e) == 0 && e.ndim <= GGUF_MAX_DIMS && ps_gguf_type_name(e.type) != NULL);
        must(e.at >= 0 && e.nbytes >= 0 && (size_t)(e.at + e.nbytes) <= size);
        for (int64_t b = 0; b < e.nbytes; b++) sink = file[e.at + b];
        for (int d = 0; d < e.ndim; d++) must(!__builtin_mul_overflow(numel, e.shape[d], &numel));
        for (int way = 0; way < 3; way++) {
            if (ps_gguf_layout(g, i, way == 1 ? 2 : 0, way == 2) < 0) continue;
            must(ps_gguf_get(g, i, &e) == 0);
            int64_t n = numel < VALUES ? numel : VALUES;
            int rc = ps_gguf_copy(g, i, zeros, e.shape, numel - n, out, n);
            must(e.dtype < 0 ? rc == PS_EUNSUP : rc == 0);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    uint8_t *file = malloc(size ? size : 1);            /* separate memory, so that a read past the end is detected */
    if (!file) return 0;
    if (size) memcpy(file, input, size);
    ps_gguf *g = NULL;
    int rc = gguf_open_memory("input", file, (int64_t)size, &g);
    if (rc < 0) must(!g && ps_error_message()[0]);
    else {
        read_meta(g);
        read_tensors(g, file, size);
    }
    ps_gguf_close(g);
    free(file);
    return 0;
}
