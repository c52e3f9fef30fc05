/* SPDX-License-Identifier: BSD-3-Clause
 * Examples as token ids. encode.c adds them, and rows.c reads them. */
#ifndef PS_DATA_EXAMPLES_H
#define PS_DATA_EXAMPLES_H
#include <stdatomic.h>
#include "base/error.h"
#include "io/file.h"
#include "ps.h"

enum { EXAMPLE_IGNORED = -100 };        /* the label that marks a token as not trained */
#define EXAMPLE_UNTRAINED 0x80000000u   /* the flag that marks a token as not trained, in a 4-byte record */

typedef struct example_wide { int32_t id, label; float weight; } example_wide;

struct ps_examples {
    _Atomic int more;                   /* number of owners minus one */
    bool wide, finished;
    int64_t count, room, tokens;
    int64_t *starts;                    /* [room + 1] number of tokens before each example */
    float *weights;                     /* [room] weight of each example */
    const uint8_t *records;             /* the tokens' records, of type uint32_t or example_wide */
    /* Scattered examples (scatter.c) use the fields from `at` to `pool_nbytes`. Their `starts` and `records` are NULL.
     * at: [count] each example's records, or NULL if the example has not been put yet. */
    const uint8_t **at;
    int64_t *lengths;                   /* [count] number of tokens of each example */
    uint8_t **pools;                    /* [n_pools] memory of the records; a pool never moves */
    int32_t n_pools, pools_capacity;
    int64_t in_pool, pool_nbytes;       /* number of used bytes in the last pool, and the pool's size in bytes */
    uint8_t *memory;                    /* [memory_room] the records, if there is no file */
    int64_t memory_room;
    uint8_t *block;                     /* [BLOCK] the records that are not yet in the file or in `memory` */
    int64_t in_block, stored;           /* size in bytes of the records in `block`, and of all earlier records */
    uint64_t hash, key[2];              /* hash: hash of the complete blocks */
    ps_tempfile file;
    ps_map map;
};

/* Adds an owner. Each owner must call ps_examples_free or ps_rows_free once. */
void examples_retain(ps_examples *e);
void rows_retain(ps_rows *r);
int64_t rows_count(const ps_rows *r);
bool rows_complete(const ps_rows *r);
int rows_check(const ps_rows *r);       /* Returns PS_EIO if the examples' file was truncated. */
void rows_info(const ps_rows *r, ps_rows_info *out);

static inline int64_t record_nbytes(const ps_examples *e) { return e->wide ? (int64_t)sizeof(example_wide) : 4; }

/* Returns the number of tokens of example i. */
static inline int64_t example_length(const ps_examples *e, int64_t i)
{
    return e->at ? e->lengths[i] : e->starts[i + 1] - e->starts[i];
}
/* Returns the records of example i's tokens. */
static inline const uint8_t *example_records(const ps_examples *e, int64_t i)
{
    return e->at ? e->at[i] : e->records + e->starts[i] * record_nbytes(e);
}

/* Return the id, the label or the weight in record k. */
static inline int32_t example_id(const ps_examples *e, const uint8_t *records, int64_t k)
{
    if (e->wide) return ((const example_wide *)(const void *)records)[k].id;
    return (int32_t)(((const uint32_t *)(const void *)records)[k] & ~EXAMPLE_UNTRAINED);
}
static inline int32_t example_label(const ps_examples *e, const uint8_t *records, int64_t k)
{
    if (e->wide) return ((const example_wide *)(const void *)records)[k].label;
    uint32_t record = ((const uint32_t *)(const void *)records)[k];
    return record & EXAMPLE_UNTRAINED ? EXAMPLE_IGNORED : (int32_t)record;
}
static inline float example_token_weight(const ps_examples *e, const uint8_t *records, int64_t k)
{
    return e->wide ? ((const example_wide *)(const void *)records)[k].weight : 1.0f;
}

/* Writes the record of token i to `to`. Returns PS_ERANGE or PS_EINVAL in the same cases as ps_examples_add. */
int example_record(const ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t i,
                   uint8_t *to);
void scatter_free(ps_examples *e);
#endif
