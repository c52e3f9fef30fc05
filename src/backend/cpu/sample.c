/* SPDX-License-Identifier: BSD-3-Clause
 * The op sample on the cpu. It returns the same tokens as ref. It is faster than ref for three reasons: it sorts only
 * the candidates that the options allow, it uses a radix sort, and it computes each weight once. */
#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include "backend/cpu/cpu.h"
#include "base/error.h"
#include "base/half.h"
#include "base/philox.h"

typedef struct candidate { uint32_t key; int32_t token; } candidate;

enum { DIGIT = 11, DIGITS = 1 << DIGIT };             /* DIGIT: number of bits of the key by which one pass sorts */

/* Returns a key that decreases as the logit increases. A stable sort by increasing key puts the largest logit first.
 * Tokens with equal logits keep their order. */
static uint32_t key_of(float x)
{
    x += 0.0f;                                        /* -0 counts as 0 */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return ~(bits ^ (bits >> 31 ? ~0u : 1u << 31));
}

static float logit_of(uint32_t key)
{
    uint32_t bits = ~key;
    bits ^= bits >> 31 ? 1u << 31 : ~0u;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static float load(const ps_view *x, int64_t i)
{
    if (x->dtype == PS_F32) return ((const float *)x->data)[i];
    uint16_t h = ((const uint16_t *)x->data)[i];
    return x->dtype == PS_BF16 ? ps_bf16_to_f32(h) : ps_f16_to_f32(h);
}

/* Sorts c [n] by increasing key. other [n] is scratch memory. */
static void sort(candidate *c, candidate *other, int64_t n)
{
    int64_t place[DIGITS];
    candidate *from = c, *to = other;
    for (int shift = 0; shift < 32; shift += DIGIT) {
        memset(place, 0, sizeof place);
        for (int64_t i = 0; i < n; i++) place[from[i].key >> shift & (DIGITS - 1)]++;
        int64_t sum = 0;
        for (int d = 0; d < DIGITS; d++) {
            int64_t count = place[d];
            place[d] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) to[place[from[i].key >> shift & (DIGITS - 1)]++] = from[i];
        candidate *swap = from;
        from = to, to = swap;
    }
    if (from != c) memcpy(c, from, (size_t)n * sizeof *c);
}

/* Fills c with candidates of a row, in token order. The candidates include the tokens with the `most` largest logits,
 * and can include more tokens. Returns the number of candidates. */
static int64_t collect(const ps_view *x, int64_t first, int64_t V, int64_t most, candidate *c)
{
    int64_t count[DIGITS] = { 0 }, sum = 0, n = 0;
    uint32_t last = DIGITS - 1;                       /* largest leading digit of the keys in c */
    enum { SHIFT = 32 - DIGIT };
    if (most < V) {
        for (int64_t j = 0; j < V; j++) count[key_of(load(x, first + j)) >> SHIFT]++;
        for (last = 0; (sum += count[last]) < most;) last++;
    }
    for (int64_t j = 0; j < V; j++) {
        uint32_t key = key_of(load(x, first + j));
        if (key >> SHIFT <= last) c[n++] = (candidate){ key, (int32_t)j };
    }
    return n;
}

/* Draws a token like pick() in ref/random.c. c [n] is sorted. w [n] is scratch memory. */
static int64_t pick(const candidate *c, double *w, int64_t n, const ps_attrs_sample *a, double u)
{
    double total = 0, mass = 0, sum = 0, top = logit_of(c[0].key);
    int64_t used = 0, j = 0;
    for (int64_t i = 0; i < n; i++) total += w[i] = exp((logit_of(c[i].key) - top) / a->temperature);
    while (used < n && (used == 0 || mass < a->top_p * total)) mass += w[used++];
    if (w[used - 1] < a->min_p) {
        for (mass = 0, used = 0; w[used] >= a->min_p; used++) mass += w[used];
    }
    for (; j < used - 1; j++) {
        sum += w[j];
        if (u * mass < sum) break;
    }
    return c[j].token;
}

/* For each row, writes the token with the largest logit to `index`. Returns an error if a logit is NaN or the largest
 * logit is infinite. */
static int largest(const ps_view *x, int64_t rows, int64_t V, int64_t *index)
{
    for (int64_t r = 0; r < rows; r++) {
        float top = -INFINITY;
        index[r] = 0;
        for (int64_t j = 0; j < V; j++) {
            float v = load(x, r * V + j);
            if (v != v) return ps_fail(PS_ERANGE, "logit %" PRId64 " of row %" PRId64 " is NaN", j, r);
            if (v > top) top = v, index[r] = j;
        }
        if (!isfinite(top)) return ps_fail(PS_ERANGE, "the largest logit of row %" PRId64 " is %g", r, (double)top);
    }
    return 0;
}

int ps_cpu_sample(ps_call *call)
{
    const ps_attrs_sample *a = call->attrs;
    const ps_view *x = &call->in[0], *index = &call->out[0];
    if (x->dtype != PS_F32 && x->dtype != PS_BF16 && x->dtype != PS_F16) return PS_EUNSUP;
    int64_t rows = index->numel, V = rows ? x->numel / rows : 0, *out = index->data;
    if (rows == 0) return 0;
    if (V > INT32_MAX) return PS_EUNSUP;
    int threads = a->temperature == 0 ? 0 : rows < omp_get_max_threads() ? (int)rows : omp_get_max_threads();
    size_t each = (size_t)V * (2 * sizeof(candidate) + sizeof(double));
    char *scratch = threads ? call->scratch(call, (size_t)threads * each) : NULL;
    if (threads && !scratch) return PS_ENOMEM;
    if (call->dry) return 0;
    PS_TRY(largest(x, rows, V, out));
    if (!threads) return 0;
    int64_t most = a->top_k > 0 && a->top_k < V ? a->top_k : V;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        double *w = (double *)(scratch + (size_t)omp_get_thread_num() * each);
        candidate *c = (candidate *)(w + V), *other = c + V;
        int64_t n = collect(x, r * V, V, most, c);
        sort(c, other, n);
        double u = ps_unit_f32(ps_philox4x32(a->seed, a->offset + (uint64_t)r, 0).v[0]);
        out[r] = pick(c, w, most < n ? most : n, a, u);
    }
    return 0;
}
