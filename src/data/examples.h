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
    const uint8_t **at;                 /* [count] of scattered examples (scatter.c): the records of each, or NULL if
                                         * it is not there yet; `starts` and `records` are then NULL */
    int64_t *lengths;                   /* [count] of scattered examples: tokens of each */
    uint8_t **pools;                    /* [n_pools] of scattered examples: memory of records, which never moves */
    int32_t n_pools, pools_capacity;
    int64_t in_pool, pool_nbytes;       /* used bytes and size of the last pool */
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
bool rows_complete(const ps_rows *r);
int rows_check(const ps_rows *r);       /* PS_EIO: the file of the rows' examples was truncated */
void rows_info(const ps_rows *r, ps_rows_info *out);

static inline int64_t record_nbytes(const ps_examples *e) { return e->wide ? (int64_t)sizeof(example_wide) : 4; }

/* Returns the number of tokens of example i. */
static inline int64_t example_length(const ps_examples *e, int64_t i)
{
    return e->at ? e->lengths[i] : e->starts[i + 1] - e->starts[i];
}
/* Returns the records of example i. */
static inline const uint8_t *example_records(const ps_examples *e, int64_t i)
{
    return e->at ? e->at[i] : e->records + e->starts[i] * record_nbytes(e);
}

/* Each returns a part of record k. */
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

/* Writes the record of one token to `to`. PS_ERANGE, PS_EINVAL: as ps_examples_add. */
int example_record(const ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t i,
                   uint8_t *to);
void scatter_free(ps_examples *e);
#endif
