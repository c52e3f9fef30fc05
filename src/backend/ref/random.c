/* SPDX-License-Identifier: BSD-3-Clause
 * Random numbers, dropout and sampling. Philox computes the random number of an element from the element's own counter.
 * Hence results depend only on the seed and the element's position. Except for rounding, they do not depend on the
 * type. */
#include <stdlib.h>
#include "ref.h"

/* If rounding raises a number to `high`, the number is replaced by `low`. Hence the range never includes `high`, in any
 * type. */
int ref_uniform_(ps_call *call)
{
    const ps_attrs_uniform_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    for (int64_t i = 0; i < x->numel; i++) {
        double u = ps_unit_f32(ps_philox4x32(a->seed, a->offset + (uint64_t)i, 0).v[0]);
        ref_store(x, i, a->low + (a->high - a->low) * u);
        if (ref_load(x, i) >= a->high) ref_store(x, i, a->low);
    }
    return 0;
}

int ref_normal_(ps_call *call)
{
    const ps_attrs_normal_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    for (int64_t i = 0; i < x->numel; i++) {
        ps_philox draw = ps_philox4x32(a->seed, a->offset + (uint64_t)i, 0);
        float u1 = 1 - ps_unit_f32(draw.v[0]);                      /* in (0, 1] */
        float r = sqrtf(-2 * logf(u1));
        float z = r * cosf(6.28318530717958647692f * ps_unit_f32(draw.v[1]));
        ref_store(x, i, (float)a->mean + (float)a->std * z);
    }
    return 0;
}

/* Computes low + floor(r * (high - low) / 2^64). r consists of the first two random words of the counter. The first
 * word is the lower half of r. */
int ref_randint_(ps_call *call)
{
    const ps_attrs_randint_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    if (a->high <= a->low)
        return ps_fail(PS_EINVAL, "the range [%" PRId64 ", %" PRId64 ") is empty", a->low, a->high);
    uint64_t range = (uint64_t)a->high - (uint64_t)a->low;
    for (int64_t i = 0; i < x->numel; i++) {
        ps_philox draw = ps_philox4x32(a->seed, a->offset + (uint64_t)i, 0);
        uint64_t r = (uint64_t)draw.v[1] << 32 | draw.v[0];
        uint64_t k = (uint64_t)((unsigned __int128)r * range >> 64);
        ref_store_int(x, i, (int64_t)((uint64_t)a->low + k));
    }
    return 0;
}

/* Returns 48 random bits for element i. n is the total number of elements. */
static uint64_t fine(uint64_t seed, uint64_t offset, int64_t i, int64_t n)
{
    uint64_t upper = ps_philox4x32(seed, offset + (uint64_t)i, 0).v[0] >> 8;
    return upper << 24 | ps_philox4x32(seed, offset + (uint64_t)n + (uint64_t)i, 0).v[0] >> 8;
}

struct keyed { uint64_t key; int64_t place; };
static int by_key(const void *p, const void *q)
{
    const struct keyed *a = p, *b = q;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->place < b->place ? -1 : 1;
}

int ref_randperm_(ps_call *call)
{
    const ps_attrs_randperm_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    struct keyed *all = call->scratch(call, (size_t)(x->numel + 1) * sizeof *all);
    if (!all) return PS_ENOMEM;
    for (int64_t i = 0; i < x->numel; i++) all[i] = (struct keyed){ fine(a->seed, a->offset, i, x->numel), i };
    qsort(all, (size_t)x->numel, sizeof *all, by_key);
    for (int64_t i = 0; i < x->numel; i++) ref_store_int(x, i, all[i].place);
    return 0;
}

int ref_bernoulli(ps_call *call)
{
    const ps_attrs_bernoulli *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    for (int64_t i = 0; a->p == -1 && i < x->numel; i++) {
        double p = ref_load(x, i);
        if (!(p >= 0 && p <= 1)) return ps_fail(PS_EINVAL, "a probability is %g; it must be in [0, 1]", p);
    }
    for (int64_t i = 0; i < x->numel; i++) {
        double p = a->p == -1 ? ref_load(x, i) : a->p;
        ref_store(y, i, (double)fine(a->seed, a->offset, i, x->numel) * 0x1p-48 < p);
    }
    return 0;
}

int ref_dropout(ps_call *call)
{
    const ps_attrs_dropout *a = call->attrs;
    const ps_view *x = &call->in[0], *rows = &call->in[1], *y = &call->out[0];
    /* number of elements per row; 0 if x is a single range of elements of the whole tensor */
    int64_t width = ps_has(rows) && x->numel ? x->numel / rows->numel : 0;
    if (width) PS_TRY(ref_check_index(rows, INT64_MAX / width));
    for (int64_t i = 0; i < x->numel; i++) {
        int64_t g = width ? ref_load_int(rows, i / width) * width + i % width : a->first + i;
        int64_t s = g / a->per_sample, e = g % a->per_sample;
        bool dropped = ref_dropped(a->seed, a->step, a->op, a->sample + (uint64_t)s, (uint64_t)e, a->p);
        ref_store(y, i, dropped ? 0 : ref_load(x, i) / (1 - a->p));
    }
    return 0;
}

/* -- sampling a token ------------------------------------------------------------------------------------------- */
struct candidate { double logit; int64_t token; };

/* Orders candidates by descending logit. Candidates with equal logits are ordered by token. */
static int by_logit(const void *pa, const void *pb)
{
    const struct candidate *a = pa, *b = pb;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

static int check_logits(const ps_view *logits, int64_t rows, int64_t V)
{
    for (int64_t r = 0; r < rows; r++) {
        double top = -INFINITY;
        for (int64_t j = 0; j < V; j++) {
            double x = ref_load(logits, r * V + j);
            if (isnan(x)) return ps_fail(PS_ERANGE, "logit %" PRId64 " of row %" PRId64 " is NaN", j, r);
            top = x > top ? x : top;
        }
        if (!isfinite(top)) return ps_fail(PS_ERANGE, "the largest logit of row %" PRId64 " is %g", r, top);
    }
    return 0;
}

/* Picks one of the candidates c [n], which are sorted in descending order. The caller has already limited n to top_k.
 * The function considers the shortest prefix of the candidates whose mass reaches top_p. From this prefix, it excludes
 * each candidate whose weight is less than min_p times the weight of the first candidate. u in [0, 1) selects one of
 * the remaining candidates. */
static int64_t pick(const struct candidate *c, int64_t n, const ps_attrs_sample *a, double u)
{
    double total = 0, mass = 0, sum = 0;
    int64_t used = 0, j = 0;
#define WEIGHT(i) exp((c[i].logit - c[0].logit) / a->temperature)       /* the weight of the first candidate is 1 */
    for (int64_t i = 0; i < n; i++) total += WEIGHT(i);
    while (used < n && (used == 0 || mass < a->top_p * total)) mass += WEIGHT(used), used++;
    if (WEIGHT(used - 1) < a->min_p) {
        for (mass = 0, used = 0; WEIGHT(used) >= a->min_p; used++) mass += WEIGHT(used);
    }
    for (; j < used - 1; j++) {
        sum += WEIGHT(j);
        if (u * mass < sum) break;
    }
#undef WEIGHT
    return c[j].token;
}

int ref_sample(ps_call *call)
{
    const ps_attrs_sample *a = call->attrs;
    const ps_view *logits = &call->in[0], *index = &call->out[0];
    int64_t V = ref_last(logits), rows = index->numel;
    if (!(a->temperature >= 0)) return ps_fail(PS_EINVAL, "temperature is %g; it must not be negative", a->temperature);
    if (V < 1 && rows > 0) return ps_fail(PS_EINVAL, "there are no logits to sample from");
    PS_TRY(check_logits(logits, rows, V));
    struct candidate *c = call->scratch(call, (size_t)(V + 1) * sizeof *c);
    if (!c) return PS_ENOMEM;
    int64_t n = a->top_k > 0 && a->top_k < V ? a->top_k : V;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < V; j++) c[j] = (struct candidate){ ref_load(logits, r * V + j), j };
        qsort(c, (size_t)V, sizeof *c, by_logit);
        double u = ps_unit_f32(ps_philox4x32(a->seed, a->offset + (uint64_t)r, 0).v[0]);
        ref_store_int(index, r, a->temperature == 0 ? c[0].token : pick(c, n, a, u));
    }
    return 0;
}
