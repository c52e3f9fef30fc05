/* SPDX-License-Identifier: BSD-3-Clause
 * Token shards, as the loader and the fuzz target use them. A shard does not change after it was opened, and its owners
 * are counted atomically. So several loaders on several threads may share a shard. Only src/data and the fuzz target
 * include this header. */
#ifndef PS_IO_TOKENS_H
#define PS_IO_TOKENS_H
#include "io/file.h"
#include <stdatomic.h>

struct ps_tokens {
    ps_map map;
    const uint8_t *data;    /* `count` tokens of `width` bytes each, little-endian, possibly unaligned */
    int64_t count;
    int width;              /* 1, 2 or 4 */
    atomic_int refs;
};

void tokens_retain(ps_tokens *s);
/* Like ps_tokens_open, but reads bytes in memory. The bytes must not be freed before the result is closed. */
int tokens_open_memory(const char *path, const void *bytes, int64_t nbytes, int width, ps_tokens **out);
/* Copies tokens [first, first + n) to dst. The tokens must exist. Returns PS_ERANGE if a token is >= vocab. If vocab is
 * 0, returns PS_ERANGE if a token does not fit into int32. The error message contains the file, the position, the token
 * and the vocabulary. */
int tokens_copy(const ps_tokens *s, int64_t first, int64_t n, int64_t vocab, int32_t *dst);
#endif
