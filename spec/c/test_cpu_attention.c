/* SPDX-License-Identifier: BSD-3-Clause
 * The cpu backend's attention kernels, called directly: every instruction set this machine has, against the definition
 * written out in double precision; the same bits for each set and thread count; nothing written outside the outputs. */
#include "backend/cpu/cpu.h"
#include "base/half.h"
#include "base/philox.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "cpu_scratch.h"

void ps_cpu_fill_attention_sse2(ps_kernel *k);
void ps_cpu_fill_attention_avx2(ps_kernel *k);
void ps_cpu_fill_attention_avx512(ps_kernel *k);

static int passed, failed;
static void check(bool ok, const char *what, const char *name)
{
    if (ok) passed++;
    else failed++;
    if (!ok) printf("FAILED: %s: %s\n", name, what);
}

/* -- random numbers, arrays --------------------------------------------------------------------------------------- */
static uint64_t state = 1;
static double uniform(void)                          /* in [-1, 1) */
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-52 - 1;
}
static double get(const ps_view *x, int64_t at)
{
    if (x->dtype == PS_F32) return ((float *)x->data)[at];
    if (x->dtype == PS_BF16) return ps_bf16_to_f32(((uint16_t *)x->data)[at]);
    return ps_f16_to_f32(((uint16_t *)x->data)[at]);
}
static void put(const ps_view *x, int64_t at, double value)
{
    if (x->dtype == PS_F32) ((float *)x->data)[at] = (float)value;
    else if (x->dtype == PS_BF16) ((uint16_t *)x->data)[at] = ps_f32_to_bf16((float)value);
    else ((uint16_t *)x->data)[at] = ps_f32_to_f16((float)value);
}
static int64_t place(const ps_view *x, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return b * x->stride[0] + h * x->stride[1] + i * x->stride[2] + d * x->stride[3];
}
enum { MARGIN = 64, CANARY = 0x5a };
/* A tensor [B, H, T, D] whose rows are `gap` elements further apart than necessary. With `across` the layout is [B,
 * T, H, D]. Initially all bytes are canaries. */
static size_t bytes_of(const ps_view *x)
{
    return (size_t)(x->stride[7] * ps_dtype_bytes(x->dtype)) + 2 * MARGIN;
}
static ps_view view4(int dtype, int64_t B, int64_t H, int64_t T, int64_t D, int64_t gap, bool across)
{
    ps_view x = { .dtype = dtype, .ndim = 4, .numel = B * H * T * D, .shape = { B, H, T, D } };
    int64_t row = D + gap;
    x.stride[0] = H * T * row, x.stride[1] = across ? row : T * row, x.stride[2] = across ? H * row : row;
    x.stride[3] = 1, x.stride[7] = B * H * T * row;         /* stride[7] is the number of elements in memory, only
                                                             * for this test */
    x.data = malloc(bytes_of(&x));
    memset(x.data, CANARY, bytes_of(&x));
    x.data = (char *)x.data + MARGIN;
    return x;
}
static void view_free(ps_view *x) { free((char *)x->data - MARGIN); }
static void randomize(const ps_view *x, double size)
{
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t i = 0; i < x->shape[2]; i++)
                for (int64_t d = 0; d < x->shape[3]; d++) put(x, place(x, b, h, i, d), uniform() * size);
}
/* Checks that every byte that is not an element of x is unchanged. */
static bool canaries_alive(const ps_view *x)
{
    size_t n = bytes_of(x), size = (size_t)ps_dtype_bytes(x->dtype);
    char *used = calloc(n, 1), *bytes = (char *)x->data - MARGIN;
    bool ok = true;
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t i = 0; i < x->shape[2]; i++)
                memset(used + MARGIN + (size_t)place(x, b, h, i, 0) * size, 1, (size_t)x->shape[3] * size);
    for (size_t i = 0; i < n; i++) ok = ok && (used[i] || bytes[i] == CANARY);
    free(used);
    return ok;
}

/* -- a case ------------------------------------------------------------------------------------------------------- */
typedef struct shape {
    int64_t B, H, T, S, D;
    int dtype, causal, mask;                          /* mask 1 hides some keys, and mask 2 hides all keys of sample
                                                       * 0 */
    double p, scale;
} shape;
typedef struct arrays {
    ps_view q, k, v, mask, y, lse, dy, dq, dk, dv;
    double *y_want, *lse_want, *dq_want, *dk_want, *dv_want;
} arrays;
enum { SEED = 77, STEP = 5, SAMPLE = 3, OP = 9 };

static double kept(const shape *s, int64_t b, int64_t h, int64_t i, int64_t j)
{
    uint64_t e = (uint64_t)((h * s->T + i) * s->S + j);
    ps_philox r = ps_philox4x32(SEED, (uint64_t)(SAMPLE + b) << 32 | e / 4, (uint64_t)STEP << 32 | OP);
    return ps_unit_f32(r.v[e % 4]) < s->p ? 0 : 1 / (1 - s->p);
}
/* Computes one query by the definition: weights before (w) and after (g) dropout. Returns lse. */
static double weigh(const shape *s, const arrays *a, int64_t b, int64_t h, int64_t i, double *w, double *g)
{
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < s->S; j++) {
        bool seen = !(s->causal && j > i + s->S - s->T);
        if (ps_has(&a->mask)) seen = seen && ((uint8_t *)a->mask.data)[b * s->S + j];
        w[j] = seen ? 0 : -INFINITY;
        for (int64_t d = 0; seen && d < s->D; d++)
            w[j] += s->scale * get(&a->q, place(&a->q, b, h, i, d)) * get(&a->k, place(&a->k, b, h, j, d));
        top = fmax(top, w[j]);
    }
    for (int64_t j = 0; j < s->S; j++) sum += w[j] = top == -INFINITY ? 0 : exp(w[j] - top);
    for (int64_t j = 0; j < s->S; j++) {
        w[j] = sum > 0 ? w[j] / sum : 0;
        g[j] = s->p > 0 ? w[j] * kept(s, b, h, i, j) : w[j];
    }
    return top + log(sum);
}
static void expect_forward(const shape *s, arrays *a)
{
    double *w = calloc((size_t)(2 * s->S + 1), sizeof *w), *g = w + s->S;
    for (int64_t r = 0; r < s->B * s->H * s->T; r++) {
        int64_t b = r / s->T / s->H, h = r / s->T % s->H, i = r % s->T;
        a->lse_want[r] = weigh(s, a, b, h, i, w, g);
        for (int64_t d = 0; d < s->D; d++) {
            double y = 0;
            for (int64_t j = 0; j < s->S; j++) y += g[j] * get(&a->v, place(&a->v, b, h, j, d));
            a->y_want[r * s->D + d] = y;
        }
    }
    free(w);
}
/* Computes gradients with the chain rule. y is rounded as in the kernel. */
static void expect_backward(const shape *s, arrays *a)
{
    double *w = calloc((size_t)(2 * s->S + 1), sizeof *w), *g = w + s->S;
    for (int64_t r = 0; r < s->B * s->H * s->T; r++) {
        int64_t bh = r / s->T, b = bh / s->H, h = bh % s->H, i = r % s->T;
        double delta = 0;
        weigh(s, a, b, h, i, w, g);
        for (int64_t d = 0; d < s->D; d++)
            delta += get(&a->dy, place(&a->dy, b, h, i, d)) * get(&a->y, place(&a->y, b, h, i, d));
        for (int64_t j = 0; j < s->S; j++) {
            double dp = 0;
            for (int64_t d = 0; d < s->D; d++) {
                double dy = get(&a->dy, place(&a->dy, b, h, i, d));
                dp += dy * get(&a->v, place(&a->v, b, h, j, d));
                a->dv_want[(bh * s->S + j) * s->D + d] += g[j] * dy;
            }
            if (s->p > 0) dp *= kept(s, b, h, i, j);
            double ds = w[j] * (dp - delta) * s->scale;
            for (int64_t d = 0; d < s->D; d++) {
                a->dq_want[r * s->D + d] += ds * get(&a->k, place(&a->k, b, h, j, d));
                a->dk_want[(bh * s->S + j) * s->D + d] += ds * get(&a->q, place(&a->q, b, h, i, d));
            }
        }
    }
    free(w);
}

static arrays arrays_new(const shape *s)
{
    arrays a = { .mask = { .ndim = -1 } };
    a.q = view4(s->dtype, s->B, s->H, s->T, s->D, 3, true), a.k = view4(s->dtype, s->B, s->H, s->S, s->D, 0, false);
    a.v = view4(s->dtype, s->B, s->H, s->S, s->D, 5, true), a.dy = view4(s->dtype, s->B, s->H, s->T, s->D, 1, false);
    a.y = view4(s->dtype, s->B, s->H, s->T, s->D, 0, true), a.lse = view4(PS_F32, s->B, s->H, s->T, 1, 0, false);
    a.lse.ndim = 3;
    a.dq = view4(s->dtype, s->B, s->H, s->T, s->D, 0, false), a.dk = view4(s->dtype, s->B, s->H, s->S, s->D, 2, false);
    a.dv = view4(s->dtype, s->B, s->H, s->S, s->D, 0, true);
    randomize(&a.q, 2), randomize(&a.k, 2), randomize(&a.v, 1), randomize(&a.dy, 1);
    if (s->mask) {
        a.mask = (ps_view){ .dtype = PS_BOOL, .ndim = 2, .shape = { s->B, s->S }, .stride = { s->S, 1 } };
        a.mask.data = malloc((size_t)(s->B * s->S));
        for (int64_t i = 0; i < s->B * s->S; i++)
            ((uint8_t *)a.mask.data)[i] = uniform() > -0.4 && !(s->mask == 2 && i < s->S);
    }
    size_t queries = (size_t)(s->B * s->H * s->T), keys = (size_t)(s->B * s->H * s->S), D = (size_t)s->D;
    a.y_want = calloc(queries * D, sizeof(double)), a.lse_want = calloc(queries, sizeof(double));
    a.dq_want = calloc(queries * D, sizeof(double)), a.dk_want = calloc(keys * D, sizeof(double));
    a.dv_want = calloc(keys * D, sizeof(double));
    return a;
}
static void arrays_free(arrays *a)
{
    ps_view *all[] = { &a->q, &a->k, &a->v, &a->y, &a->lse, &a->dy, &a->dq, &a->dk, &a->dv };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) view_free(all[i]);
    if (ps_has(&a->mask)) free(a->mask.data);
    free(a->y_want), free(a->lse_want), free(a->dq_want), free(a->dk_want), free(a->dv_want);
}

/* -- calls -------------------------------------------------------------------------------------------------------- */
static void *memory;
static void *scratch(ps_call *call, size_t nbytes)
{
    if (call->owner) return NULL;                     /* a test in which no memory is available */
    scratch_taken(nbytes);
    free(memory);
    memory = aligned_alloc(64, (nbytes + 63) / 64 * 64);
    if (memory) memset(memory, 0xff, nbytes);         /* NaN, so that a read before a write is detected */
    return memory;
}
static int call_op(const ps_kernel *k, int op, int n_in, const ps_view *in, int n_out, ps_view *out, const void *attrs)
{
    ps_call call = { .op = op, .n_in = n_in, .n_out = n_out, .in = in, .out = out, .attrs = attrs, .scratch = scratch };
    int rc;
    if (scratch_differs(k[op], &call, &rc)) failed++;
    return rc;
}
static int forward(const ps_kernel *k, const shape *s, arrays *a)
{
    ps_attrs_attention at = { .scale = s->scale, .causal = s->causal, .p = s->p, .seed = SEED, .step = STEP,
                              .sample = SAMPLE, .op = OP };
    ps_view in[] = { a->q, a->k, a->v, a->mask }, out[] = { a->y, a->lse };
    return call_op(k, PS_OP_attention, 4, in, 2, out, &at);
}
static int backward(const ps_kernel *k, const shape *s, arrays *a)
{
    ps_attrs_attention_backward at = { .scale = s->scale, .causal = s->causal, .p = s->p, .seed = SEED, .step = STEP,
                                       .sample = SAMPLE, .op = OP };
    ps_view in[] = { a->dy, a->q, a->k, a->v, a->mask, a->y, a->lse }, out[] = { a->dq, a->dk, a->dv };
    return call_op(k, PS_OP_attention_backward, 7, in, 3, out, &at);
}

/* -- checks ------------------------------------------------------------------------------------------------------- */
/* Returns the largest difference from `want` (elements in [B, H, T, D] order), relative to the largest value, or to
 * 0.05 if that is larger. */
static double error_of(const ps_view *x, const double *want)
{
    double worst = 0, size = 0.05;
    int64_t n = 0;
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t i = 0; i < x->shape[2]; i++)
                for (int64_t d = 0; d < x->shape[3]; d++, n++) {
                    double got = get(x, place(x, b, h, i, d));
                    if (isinf(want[n]) && got == want[n]) continue;
                    double e = fabs(got - want[n]);
                    if (!(e <= worst)) worst = e;      /* keeps a NaN */
                    size = fmax(size, fabs(want[n]));
                }
    return worst / size;
}
static void check_close(const char *name, const char *what, const ps_view *x, const double *want, double tolerance)
{
    double e = error_of(x, want);
    char text[128];
    snprintf(text, sizeof text, "%s differs by %.3g", what, e);
    check(e <= tolerance, text, name);
    check(canaries_alive(x), "bytes around an output changed", what);
}
static ps_view *output(arrays *a, int i)
{
    ps_view *all[] = { &a->y, &a->lse, &a->dq, &a->dk, &a->dv };
    return all[i];
}
typedef struct isa { const char *name; void (*fill)(ps_kernel *); bool have; } isa;
static isa sets[3];

static void test_case(const shape *s)
{
    char name[160];
    snprintf(name, sizeof name, "B%d H%d T%d S%d D%d %s%s mask %d p %g", (int)s->B, (int)s->H, (int)s->T, (int)s->S,
             (int)s->D, s->dtype == PS_F32 ? "fp32" : s->dtype == PS_BF16 ? "bf16" : "fp16",
             s->causal ? " causal" : "", s->mask, s->p);
    double tolerance = s->dtype == PS_F32 ? 4e-6 : s->dtype == PS_BF16 ? 4.5e-3 : 6e-4;
    void *first[5] = { NULL };
    arrays a = arrays_new(s);
    for (int i = 0; i < 3; i++) {
        ps_kernel k[PS_OP_COUNT] = { NULL };
        if (!sets[i].have) continue;
        sets[i].fill(k);
        for (int threads = 1; threads <= 3; threads++) {
            ps_set_threads(threads);
            check(forward(k, s, &a) == 0 && backward(k, s, &a) == 0, "the call failed", name);
            for (int o = 0; o < 5; o++) {
                ps_view *x = output(&a, o);
                size_t n = bytes_of(x);
                char *bytes = (char *)x->data - MARGIN;
                if (!first[o]) memcpy(first[o] = malloc(n), bytes, n);
                check(!memcmp(first[o], bytes, n), "bits depend on instruction set or threads", name);
                if (i == 0 && threads == 1) continue;
                memset(bytes, CANARY, n);
            }
            if (i > 0 || threads > 1) continue;
            expect_forward(s, &a);
            check_close(name, "y", &a.y, a.y_want, tolerance);
            check_close(name, "lse", &a.lse, a.lse_want, 2e-6);
            expect_backward(s, &a);
            check_close(name, "dq", &a.dq, a.dq_want, tolerance);
            check_close(name, "dk", &a.dk, a.dk_want, tolerance);
            check_close(name, "dv", &a.dv, a.dv_want, tolerance);
        }
    }
    for (int o = 0; o < 5; o++) free(first[o]);
    arrays_free(&a);
}

/* The packed ops must compute the same as the other ops on views of qkv. Outputs that are not requested are omitted. */
static void test_packed(const ps_kernel *k)
{
    enum { B = 2, T = 70, H = 3, D = 24, C = H * D };
    ps_view qkv = view4(PS_BF16, 1, B, T, 3 * C, 0, false), y = view4(PS_BF16, 1, B, T, C, 0, false);
    ps_view lse = view4(PS_F32, B, H, T, 1, 0, false), dy = view4(PS_BF16, 1, B, T, C, 0, false);
    ps_view dqkv = view4(PS_BF16, 1, B, T, 3 * C, 0, false), none = { .ndim = -1 };
    randomize(&qkv, 1), randomize(&dy, 1);
    shape s = { B, H, T, T, D, PS_BF16, 1, 0, 0.25, 1 / sqrt((double)D) };
    arrays a = arrays_new(&s);
    for (int64_t n = 0; n < B * H * T * D; n++) {
        int64_t d = n % D, i = n / D % T, h = n / D / T % H, b = n / D / T / H, at = (b * T + i) * C + h * D + d;
        put(&a.q, place(&a.q, b, h, i, d), get(&qkv, (b * T + i) * 3 * C + h * D + d));
        put(&a.k, place(&a.k, b, h, i, d), get(&qkv, (b * T + i) * 3 * C + C + h * D + d));
        put(&a.v, place(&a.v, b, h, i, d), get(&qkv, (b * T + i) * 3 * C + 2 * C + h * D + d));
        put(&a.dy, place(&a.dy, b, h, i, d), get(&dy, at));
    }
    forward(k, &s, &a);
    backward(k, &s, &a);
    ps_view *three[] = { &qkv, &y, &dy, &dqkv };
    for (int i = 0; i < 4; i++) {
        ps_view *x = three[i];
        x->ndim = 3;
        for (int d = 0; d < 3; d++) x->shape[d] = x->shape[d + 1], x->stride[d] = x->stride[d + 1];
    }
    ps_attrs_attention_packed at = { .heads = H, .causal = 1, .p = 0.25, .seed = SEED, .step = STEP, .sample = SAMPLE,
                                     .op = OP };
    ps_attrs_attention_packed_backward bt = { .heads = H, .causal = 1, .p = 0.25, .seed = SEED, .step = STEP,
                                              .sample = SAMPLE, .op = OP };
    ps_view in[] = { qkv, none }, out[] = { y, lse }, in_b[] = { dy, qkv, none, y, lse }, out_b[] = { dqkv };
    check(call_op(k, PS_OP_attention_packed, 2, in, 2, out, &at) == 0, "forward failed", "packed");
    check(call_op(k, PS_OP_attention_packed_backward, 5, in_b, 1, out_b, &bt) == 0, "backward failed", "packed");
    bool same = !memcmp(lse.data, a.lse.data, B * H * T * sizeof(float));
    for (int64_t n = 0; n < B * H * T * D; n++) {
        int64_t d = n % D, i = n / D % T, h = n / D / T % H, b = n / D / T / H, at3 = (b * T + i) * 3 * C + h * D + d;
        same = same && get(&y, (b * T + i) * C + h * D + d) == get(&a.y, place(&a.y, b, h, i, d));
        same = same && get(&dqkv, at3) == get(&a.dq, place(&a.dq, b, h, i, d));
        same = same && get(&dqkv, at3 + C) == get(&a.dk, place(&a.dk, b, h, i, d));
        same = same && get(&dqkv, at3 + 2 * C) == get(&a.dv, place(&a.dv, b, h, i, d));
    }
    check(same, "differs from attention on views", "packed");

    size_t n = bytes_of(&a.dv);
    char *full = malloc(n), *bytes = (char *)a.dv.data - MARGIN;
    memcpy(full, bytes, n);
    memset(bytes, CANARY, n);
    ps_view dq = a.dq, dk = a.dk;
    a.dq.ndim = a.dk.ndim = -1;
    check(backward(k, &s, &a) == 0 && !memcmp(full, bytes, n), "dv alone differs", "absent outputs");
    a.dq = dq, a.dk = dk;
    free(full);
    arrays_free(&a);
    view_free(&qkv), view_free(&y), view_free(&lse), view_free(&dy), view_free(&dqkv);
}

static bool same_rows(const ps_view *x, int64_t i, const ps_view *y, int64_t j)
{
    size_t size = (size_t)ps_dtype_bytes(x->dtype);
    bool same = true;
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t d = 0; d < x->shape[3]; d++)
                same = same && !memcmp((char *)x->data + (size_t)place(x, b, h, i, d) * size,
                                       (char *)y->data + (size_t)place(y, b, h, j, d) * size, size);
    return same;
}

/* A single query is computed with another method. It must have the same bits as the last of two queries. */
static void test_one_query(const ps_kernel *k, const char *set)
{
    static const int64_t lengths[] = { 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 72, 128, 200 };
    static const int64_t widths[] = { 1, 8, 16, 40, 64, 72, 80, 128 };
    char name[160];
    for (int n = 0; n < 14 * 8 * 3; n++) {
        shape two = { 2, 3, 2, lengths[n % 14], widths[n / 14 % 8], n / 112, n % 5 > 0, 0, 0, n % 7 ? 0.3 : -40 };
        arrays a = arrays_new(&two), one = a;
        snprintf(name, sizeof name, "%s, S %d D %d, type %d", set, (int)two.S, (int)two.D, two.dtype);
        if (n % 11 == 3) put(&a.k, place(&a.k, 1, 2, two.S - 1, 0), NAN);
        if (n % 11 == 5) put(&a.k, place(&a.k, 1, 2, two.S / 2, 0), INFINITY);
        shape single = two;
        single.T = one.q.shape[2] = 1;
        one.q.data = (char *)one.q.data + one.q.stride[2] * ps_dtype_bytes(one.q.dtype);
        one.y = view4(two.dtype, two.B, two.H, 1, two.D, n % 3, n % 2);
        one.lse = view4(PS_F32, two.B, two.H, 1, 1, 0, false);
        ps_set_threads(1 + n % 3);
        check(forward(k, &two, &a) == 0 && forward(k, &single, &one) == 0, "the call failed", name);
        check(same_rows(&a.y, 1, &one.y, 0), "y of one query has other bits", name);
        check(same_rows(&a.lse, 1, &one.lse, 0), "lse of one query has other bits", name);
        check(canaries_alive(&one.y) && canaries_alive(&one.lse), "bytes around an output changed", name);
        view_free(&one.y), view_free(&one.lse);
        arrays_free(&a);
    }
}

static void test_refusals(const ps_kernel *k)
{
    shape s = { 1, 1, 4, 4, 8, PS_F32, 0, 0, 0, 1 };
    arrays a = arrays_new(&s);
    ps_attrs_attention at = { .scale = 1 };
    ps_view in[] = { a.q, a.k, a.v, a.mask }, out[] = { a.y, a.lse };
    in[1].dtype = PS_F64;
    check(call_op(k, PS_OP_attention, 4, in, 2, out, &at) == PS_EUNSUP, "fp64 is not refused", "types");
    in[1].dtype = PS_F32, in[1].stride[3] = 2;
    check(call_op(k, PS_OP_attention, 4, in, 2, out, &at) == PS_EUNSUP, "strided D is not refused", "strides");
    in[1].stride[3] = 1;
    ps_call call = { .in = in, .out = out, .attrs = &at, .scratch = scratch, .owner = &s };
    check(k[PS_OP_attention](&call) == PS_ENOMEM, "no memory is not reported", "memory");
    /* a NaN must reach only values that depend on it */
    put(&a.q, place(&a.q, 0, 0, 1, 2), NAN);
    check(call_op(k, PS_OP_attention, 4, in, 2, out, &at) == 0, "the call failed", "NaN");
    check(isnan(get(&a.y, place(&a.y, 0, 0, 1, 0))) && isnan(get(&a.lse, 1)), "a NaN is lost", "NaN");
    check(!isnan(get(&a.y, place(&a.y, 0, 0, 2, 0))) && !isnan(get(&a.lse, 2)), "a NaN spreads", "NaN");
    arrays_free(&a);
}

int main(void)
{
    sets[0] = (isa){ "sse2", ps_cpu_fill_attention_sse2, true };
    sets[1] = (isa){ "avx2", ps_cpu_fill_attention_avx2,
                     __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") };
    sets[2] = (isa){ "avx512", ps_cpu_fill_attention_avx512,
                     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") };
    static const shape fixed[] = {
        { 1, 1, 1, 1, 1, PS_F32, 1, 0, 0, 1 },          { 2, 3, 64, 64, 32, PS_F32, 1, 0, 0, 0.17 },
        { 1, 2, 256, 256, 64, PS_BF16, 1, 0, 0, 0.125 }, { 1, 1, 130, 130, 65, PS_F32, 1, 1, 0.1, 0.1 },
        { 2, 1, 7, 33, 8, PS_F16, 1, 0, 0, 0.3 },       { 1, 2, 33, 7, 33, PS_F32, 1, 0, 0, 0.3 },
        { 2, 1, 65, 130, 130, PS_BF16, 0, 2, 0.5, 0.1 }, { 1, 1, 1, 200, 80, PS_F32, 1, 0, 0, 0.1 },
        { 1, 1, 70, 70, 256, PS_F32, 1, 0, 0, -0.06 },  { 1, 1, 150, 20, 16, PS_F32, 1, 1, 0.2, 0.25 },
        { 1, 1, 20, 150, 16, PS_F32, 1, 0, 0, 3 },      { 1, 1, 9, 9, 16, PS_F32, 0, 0, 0, 0 },
        { 2, 1, 5, 0, 8, PS_F32, 0, 0, 0, 1 },          { 1, 1, 40, 40, 16, PS_F32, 1, 0, 1, 0.25 },
    };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) test_case(&fixed[i]);
    static const int64_t lengths[] = { 1, 7, 16, 33, 64, 65, 100, 130 }, widths[] = { 8, 16, 24, 33, 48, 64, 100, 128 };
    for (int n = 0; n < 40; n++) {
        int64_t pick[8];
        for (int i = 0; i < 8; i++) pick[i] = (int64_t)((uniform() + 1) * 4) & 7;
        int64_t T = lengths[pick[2]], S = pick[3] < 4 ? T : lengths[pick[3]];
        shape s = { 1 + pick[0] % 2, 1 + pick[1] % 2, T, S, widths[pick[4]], (int)(pick[5] % 3), pick[6] > 2,
                    (int)(pick[7] % 3), pick[5] > 4 ? 0.1 : 0, 0 };
        s.scale = 1 / sqrt((double)s.D);
        test_case(&s);
    }
    for (int i = 0; i < 3; i++) {
        ps_kernel k[PS_OP_COUNT] = { NULL };
        if (!sets[i].have) continue;
        sets[i].fill(k);
        test_packed(k);
        test_one_query(k, sets[i].name);
        test_refusals(k);
    }
    free(memory);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
