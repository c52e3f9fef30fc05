/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the token shard reader. The input's first byte has the requested width (bits 0-1) and whether
 * the first twelve bytes of the rest become a whole header of 1,024 bytes (bit 2), which keeps inputs short. */
#include "data/tokens.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static void must(int condition)
{
    if (!condition) abort();
}

static void read_all(ps_tokens *s)
{
    int64_t n = ps_tokens_count(s);
    int32_t *ids = malloc((size_t)n * 4 + 1);
    if (!ids) return;
    must(n >= 0 && ps_tokens_read(s, 0, n + 1, ids) == PS_ERANGE && ps_tokens_read(s, n, 0, NULL) == 0);
    int rc = ps_tokens_read(s, 0, n, ids);
    must(rc == 0 || rc == PS_ERANGE);
    for (int64_t i = 0; i < n && rc == 0; i++) must(ids[i] >= 0);
    rc = tokens_copy(s, 0, n, 1000, ids);
    for (int64_t i = 0; i < n && rc == 0; i++) must(ids[i] < 1000);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    static const int widths[4] = { 0, 1, 2, 4 };
    if (!size) return 0;
    size_t n = size - 1, head = input[0] & 4 && n >= 12 ? 12 : 0, gap = head ? 1024 - 12 : 0;
    uint8_t *file = calloc(1, n + gap ? n + gap : 1);
    if (!file) return 0;
    memcpy(file, input + 1, head);
    memcpy(file + head + gap, input + 1 + head, n - head);
    ps_tokens *s = NULL;
    int rc = tokens_open_memory("input", file, (int64_t)(n + gap), widths[input[0] & 3], &s);
    if (rc < 0) must(!s && ps_error_message()[0]);
    else read_all(s);
    ps_tokens_close(s);
    free(file);
    return 0;
}
