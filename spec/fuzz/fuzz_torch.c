/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the reader of PyTorch's .pt files. The input's first byte chooses: even: the rest is a whole
 * file; odd: the rest is data.pkl in an archive that is made around it, with storages "0" (64 bytes) and "1" (empty)
 * and no checksums, so that the fuzzer reaches the pickle. If the file opens, the guarantees of ps_pt are checked. */
#include "io/torch_pt.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

enum { LARGEST_COPY = 1 << 20 };
static volatile uint8_t sink;   /* bytes are read only so that the sanitizer checks them */

static void must(int condition)
{
    if (!condition) abort();
}

static void hold_tensor(ps_pt *pt, int value)
{
    ps_pt_tensor t;
    must(ps_pt_tensor_get(pt, value, &t) == 0 && t.ndim >= 0 && t.ndim <= PS_MAX_DIMS && t.numel >= 0 && t.type);
    for (int64_t b = 0; b < t.storage_nbytes; b++) sink = ((const uint8_t *)t.data)[b];
    ps_pt_verify(pt, value);
    if (t.nbytes > LARGEST_COPY) return;
    uint8_t *copy = malloc((size_t)t.nbytes + 1);
    int64_t half = t.numel / 2, each = t.numel ? t.nbytes / t.numel : 0;
    must(copy && (ps_pt_copy(pt, &t, 0, copy, half) == 0) == (t.dtype >= 0));
    must((ps_pt_copy(pt, &t, half, copy + half * each, t.numel - half) == 0) == (t.dtype >= 0));
    for (int64_t b = 0; b < t.nbytes && t.dtype >= 0; b++) sink = copy[b];
    free(copy);
    ps_pt_drop(pt, value);
}

static void hold_value(ps_pt *pt, uint8_t *seen, int value, int depth)
{
    ps_pt_value v;
    must(value >= 0 && value < pt->pickle.count && depth <= PK_MAX_DEPTH && ps_pt_get(pt, value, &v) == 0);
    if (seen[value]) return;
    seen[value] = 1;
    must(v.kind >= PS_PT_NONE && v.kind <= PS_PT_TENSOR && v.count >= 0);
    if (v.kind == PS_PT_DICT) must(v.count % 2 == 0);
    if (v.kind == PS_PT_STRING || v.kind == PS_PT_BYTES || v.kind == PS_PT_NAME)
        for (int64_t b = 0; b < v.integer; b++) sink = (uint8_t)v.text[b];
    if (v.kind == PS_PT_TENSOR) hold_tensor(pt, value);
    for (int i = 0; i < v.count; i++) hold_value(pt, seen, ps_pt_item(pt, value, i), depth + 1);
    must(ps_pt_item(pt, value, v.count) < 0);
}

static size_t put(uint8_t *to, uint64_t v, int nbytes)
{
    for (int i = 0; i < nbytes; i++) to[i] = i < 8 ? (uint8_t)(v >> (8 * i)) : 0;
    return (size_t)nbytes;
}

/* Writes an entry's header (place < 0), or its line in the directory. */
static size_t put_entry(uint8_t *to, const char *name, size_t nbytes, int64_t place)
{
    size_t n = put(to, place < 0 ? 0x04034b50 : 0x02014b50, 4);
    n += put(to + n, 0, place < 0 ? 14 : 16);
    n += put(to + n, nbytes, 4);
    n += put(to + n, nbytes, 4);
    n += put(to + n, strlen(name), 2);
    n += put(to + n, 0, place < 0 ? 2 : 12);
    if (place >= 0) n += put(to + n, (uint64_t)place, 4);
    memcpy(to + n, name, strlen(name));
    return n + strlen(name);
}

static uint8_t *wrap(const uint8_t *pickle, size_t n, size_t *nbytes)
{
    static const char *const names[] = { "a/data.pkl", "a/data/0", "a/data/1" };
    const size_t sizes[] = { n, 64, 0 };
    size_t at = 0, places[3], begin;
    uint8_t *file = calloc(1, n + 1024);
    must(file != NULL);
    for (int i = 0; i < 3; i++) {
        places[i] = at;
        at += put_entry(file + at, names[i], sizes[i], -1);
        if (i == 0 && n) memcpy(file + at, pickle, n);
        at += sizes[i];
    }
    begin = at;
    for (int i = 0; i < 3; i++) at += put_entry(file + at, names[i], sizes[i], (int64_t)places[i]);
    size_t directory = at - begin;
    at += put(file + at, 0x06054b50, 4);
    at += put(file + at, 0, 4);
    at += put(file + at, 3, 2);
    at += put(file + at, 3, 2);
    at += put(file + at, directory, 4);
    at += put(file + at, begin, 4);
    at += put(file + at, 0, 2);
    *nbytes = at;
    return file;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (!size) return 0;
    size_t n = size - 1;
    uint8_t *file = input[0] % 2 ? wrap(input + 1, size - 1, &n) : malloc(n + 1);
    must(file != NULL);
    if (input[0] % 2 == 0) memcpy(file, input + 1, n);
    uint8_t *exact = realloc(file, n ? n : 1);              /* so that a read past the end is detected */
    ps_pt *pt = NULL;
    int rc = pt_open_memory("input", exact, (int64_t)n, &pt);
    if (rc < 0) must(!pt && ps_error_message()[0]);
    else {
        uint8_t *seen = calloc(1, (size_t)pt->pickle.count);
        must(seen != NULL);
        hold_value(pt, seen, ps_pt_root(pt), 0);
        free(seen);
    }
    ps_pt_close(pt);
    free(exact);
    return 0;
}
