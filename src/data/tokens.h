/* SPDX-License-Identifier: BSD-3-Clause
 * Token shards, for the loader and the fuzz target. A shard does not change after it was opened, and the number of its
 * owners is atomic. So several loaders on several threads may share a shard. Only src/data and the fuzz target include
 * this header. */
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
/* Like ps_tokens_open, but reads `bytes` instead of a file. `bytes` must not be freed before the result is closed. */
int tokens_open_memory(const char *path, const void *bytes, int64_t nbytes, int width, ps_tokens **out);
/* Copies tokens [first, first + n) to dst. The tokens must exist. If vocab is greater than 0, returns PS_ERANGE if a
 * token is >= vocab. If vocab is 0, returns PS_ERANGE if a token does not fit into int32. The error message contains
 * the path of the file, the index of the token, the token and the size of the vocabulary. */
int tokens_copy(const ps_tokens *s, int64_t first, int64_t n, int64_t vocab, int32_t *dst);
#endif
