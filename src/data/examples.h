/* SPDX-License-Identifier: BSD-3-Clause
 * Examples as token ids, as encode.c appends them and rows.c reads them. */
#ifndef PS_DATA_EXAMPLES_H
#define PS_DATA_EXAMPLES_H
#include <stdatomic.h>
#include "base/error.h"
#include "io/file.h"
#include "ps.h"

enum { EXAMPLE_IGNORED = -100 };        /* label of a token that is not trained */
#define EXAMPLE_UNTRAINED 0x80000000u   /* flag in a narrow record: the token is not trained */

typedef struct example_wide { int32_t id, label; float weight; } example_wide;

struct ps_examples {
    _Atomic int more;                   /* number of owners in addition to the first */
    bool wide, finished;
    int64_t count, room, tokens;
    int64_t *starts;                    /* [room + 1] number of tokens before each example */
    float *weights;                     /* [room] weights of examples */
    const uint8_t *records;             /* records of tokens: uint32_t, or example_wide */
    uint8_t *memory;                    /* [memory_room] records, if there is no file */
    int64_t memory_room;
    uint8_t *block;                     /* [BLOCK] records that are not yet in the file or in `memory` */
    int64_t in_block, stored;           /* bytes */
    uint64_t hash, key[2];              /* hash: hash of the complete blocks */
    ps_tempfile file;
    ps_map map;
};

/* Adds an owner. Each owner calls ps_examples_free or ps_rows_free. */
void examples_retain(ps_examples *e);
void rows_retain(ps_rows *r);
int64_t rows_count(const ps_rows *r);
void rows_info(const ps_rows *r, ps_rows_info *out);

/* Returns the id of token `at`, counted through all examples. */
static inline int32_t example_id(const ps_examples *e, int64_t at)
{
    if (e->wide) return ((const example_wide *)e->records)[at].id;
    return (int32_t)(((const uint32_t *)e->records)[at] & ~EXAMPLE_UNTRAINED);
}
static inline int32_t example_label(const ps_examples *e, int64_t at)
{
    if (e->wide) return ((const example_wide *)e->records)[at].label;
    uint32_t record = ((const uint32_t *)e->records)[at];
    return record & EXAMPLE_UNTRAINED ? EXAMPLE_IGNORED : (int32_t)record;
}
static inline float example_token_weight(const ps_examples *e, int64_t at)
{
    return e->wide ? ((const example_wide *)e->records)[at].weight : 1.0f;
}
#endif
