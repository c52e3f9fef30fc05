/* SPDX-License-Identifier: BSD-3-Clause
 * Scattered examples: examples that the script's thread puts by number, in any order. The records of an example never
 * move. So other threads (rows.c, batches.c) can read an example while the script's thread puts other examples. */
#include "base/alloc.h"
#include "base/grow.h"
#include "data/examples.h"

enum { POOL = 1 << 20 };                /* size of a pool in bytes; an example that is larger gets its own pool */

int ps_examples_scattered(int64_t count, int wide, ps_examples **out)
{
    PS_NEED(out);
    if (count < 0 || count > INT32_MAX)
        return ps_fail(PS_EUNSUP, "there are %lld examples; at most 2^31 - 1 are supported", (long long)count);
    ps_examples *e = ps_alloc0(sizeof *e);
    if (!e) return ps_fail_nomem(sizeof *e);
    e->wide = wide != 0, e->count = count;
    e->file = PS_TEMPFILE_NONE;
    e->map.fd = -1;
    e->at = ps_alloc0((size_t)(count + 1) * sizeof *e->at);
    e->lengths = ps_alloc((size_t)(count + 1) * sizeof *e->lengths);
    e->weights = ps_alloc((size_t)(count + 1) * sizeof *e->weights);
    if (!e->at || !e->lengths || !e->weights) {
        ps_examples_free(e);
        return ps_fail_nomem((size_t)(count + 1) * (sizeof *e->at + sizeof *e->lengths + sizeof *e->weights));
    }
    *out = e;
    return 0;
}

/* Reserves nbytes bytes for records in the last pool, or in a new pool if the last pool has less room. Sets *out to the
 * first of these bytes. */
static int reserve(ps_examples *e, int64_t nbytes, uint8_t **out)
{
    if (e->n_pools == 0 || e->in_pool + nbytes > e->pool_nbytes) {
        int64_t size = nbytes > POOL ? nbytes : POOL;
        PS_TRY(ps_grow(e->pools, e->pools_capacity, e->n_pools + 1));
        uint8_t *pool = ps_alloc((size_t)size);
        if (!pool) return ps_fail_nomem((size_t)size);
        e->pools[e->n_pools++] = pool;
        e->in_pool = 0, e->pool_nbytes = size;
    }
    *out = e->pools[e->n_pools - 1] + e->in_pool;
    e->in_pool += nbytes;
    return 0;
}

int ps_examples_put(ps_examples *e, int64_t i, const int32_t *ids, const int32_t *labels, const float *weights,
                    int64_t n, double weight)
{
    PS_NEED(e);
    PS_NEED(ids || n == 0);
    if (!e->at) {
        if (i != e->count)
            return ps_fail(PS_EINVAL, "example %lld cannot be put: these examples are appended, and example %lld is "
                           "the next one", (long long)i, (long long)e->count);
        return ps_examples_add(e, ids, labels, weights, n, weight);
    }
    if (i < 0 || i >= e->count || e->at[i])
        return ps_fail(PS_EINVAL, "example %lld of %lld cannot be put: %s", (long long)i, (long long)e->count,
                       i >= 0 && i < e->count ? "it is there already" : "there is no such example");
    if (!e->wide && weights) return ps_fail(PS_EINVAL, "token weights need wide examples (ps_examples_scattered)");
    uint8_t *records = NULL;
    PS_TRY(reserve(e, n * record_nbytes(e), &records));
    for (int64_t k = 0; k < n; k++) PS_TRY(example_record(e, ids, labels, weights, k, records + k * record_nbytes(e)));
    e->lengths[i] = n;
    e->weights[i] = (float)weight;
    e->tokens += n;
    e->at[i] = records;
    return 0;
}

void scatter_free(ps_examples *e)
{
    for (int32_t i = 0; i < e->n_pools; i++) ps_free(e->pools[i]);
    ps_free(e->pools);
    ps_free(e->at);
    ps_free(e->lengths);
}
