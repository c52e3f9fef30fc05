/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the safetensors reader. The input's first byte chooses: even: the rest is a whole file; odd: the
 * rest is a header, which gets the right length before it and (byte / 2) bytes of data after it, so that the fuzzer
 * gets past the length. If the file opens, the guarantees of ps_st are checked. */
#include "io/safetensors.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static volatile uint8_t sink;   /* bytes are read only so that the sanitizer checks them */

static void must(int condition)
{
    if (!condition) abort();
}

static void hold_to_promise(ps_st *st)
{
    int64_t covered = 0;
    for (int i = 0; i < ps_st_count(st); i++) {
        ps_st_entry e;
        must(ps_st_get(st, i, &e) == 0 && e.ndim <= PS_MAX_DIMS && e.nbytes >= 0);
        must(ps_st_find(st, ps_st_name(st, i)) == i);
        must(st_numel(e.ndim, e.shape) >= 0 && ps_st_dtype_text(st, i) != NULL);
        const uint8_t *data = ps_st_data(st, i);
        must(data == st->data + covered);
        for (int64_t b = 0; b < e.nbytes; b++) sink = data[b];
        covered += e.nbytes;
    }
    must(covered == st->data_nbytes);
    for (int i = 0; i < ps_st_meta_count(st); i++)
        must(i == 0 || strcmp(ps_st_meta_key(st, i - 1), ps_st_meta_key(st, i)) < 0), sink = *ps_st_meta_value(st, i);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (!size) return 0;
    size_t mode = input[0], n = size - 1, before = mode % 2 ? 8 : 0, behind = mode % 2 ? mode / 2 : 0;
    /* separate memory, so that a read past the end is detected */
    uint8_t *file = calloc(1, before + n + behind + 1);
    if (!file) return 0;
    for (size_t i = 0; i < before; i++) file[i] = (uint8_t)(n >> (8 * i));
    memcpy(file + before, input + 1, n);
    ps_st *st = NULL;
    uint8_t *exact = realloc(file, before + n + behind ? before + n + behind : 1);
    int rc = st_open_memory("input", exact, (int64_t)(before + n + behind), &st);
    if (rc < 0) must(!st && ps_error_message()[0]);
    else hold_to_promise(st);
    ps_st_close(st);
    free(exact);
    return 0;
}
