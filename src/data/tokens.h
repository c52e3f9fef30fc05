/* SPDX-License-Identifier: BSD-3-Clause
 * Token shards as the loader and the fuzz target see them. A shard never changes after it was opened, and its
 * references are counted atomically. So several loaders on several threads may share it. Only src/data and the fuzz
 * target include this header. */
#ifndef PS_IO_TOKENS_H
#define PS_IO_TOKENS_H
#include "io/file.h"
#include <stdatomic.h>

struct ps_tokens {
    ps_map map;
    const uint8_t *data;    /* `count` tokens of `width` bytes, little-endian, possibly unaligned */
    int64_t count;
    int width;              /* 1, 2 or 4 */
    atomic_int refs;
};

void tokens_retain(ps_tokens *s);
/* Like ps_tokens_open, for bytes in memory, which must outlive the result. */
int tokens_open_memory(const char *path, const void *bytes, int64_t nbytes, int width, ps_tokens **out);
/* Copies tokens [first, first + n), which must exist, to dst. Returns PS_ERANGE if a token is >= vocab or, if vocab
 * is 0, does not fit into int32. The message contains the file, position, token and vocabulary. */
int tokens_copy(const ps_tokens *s, int64_t first, int64_t n, int64_t vocab, int32_t *dst);
#endif
