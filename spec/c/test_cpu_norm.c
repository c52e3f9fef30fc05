/* SPDX-License-Identifier: BSD-3-Clause
 * The vector kernels of norm.c, loss.c, table.c and optim.c: every instruction set that this machine has, on one and
 * two threads, gives the same bits, and these agree with the reference backend's scalar double arithmetic. Sizes are
 * odd on purpose: tails, rows shorter than a vector, single elements, more rows than a block of partial sums. */
#include <math.h>
#include "backend/backend.h"
#include "backend/cpu/cpu.h"
#include "base/half.h"
#include "check.h"
#include "cpu_scratch.h"

#define FAMILIES(isa) \
    void ps_cpu_fill_norm_##isa(ps_kernel *k); \
    void ps_cpu_fill_dropout_##isa(ps_kernel *k); \
    void ps_cpu_fill_loss_##isa(ps_kernel *k); \
    void ps_cpu_fill_table_##isa(ps_kernel *k); \
    void ps_cpu_fill_optim_##isa(ps_kernel *k); \
    static void fill_##isa(ps_kernel *k) \
    { \
        ps_cpu_fill_norm_##isa(k); \
        ps_cpu_fill_dropout_##isa(k); \
        ps_cpu_fill_loss_##isa(k); \
        ps_cpu_fill_table_##isa(k); \
        ps_cpu_fill_optim_##isa(k); \
    }
FAMILIES(sse2)
#if defined(__x86_64__)
FAMILIES(avx2)
FAMILIES(avx512)
#endif

static ps_kernel kernels[3][PS_OP_COUNT];
static ps_cpu_loss_row_fn loss_rows[3];
static int isas;
static ps_backend *ref;

static void open_all(void)
{
    fill_sse2(kernels[isas]);
    loss_rows[isas++] = ps_cpu_loss_row_sse2;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        fill_avx2(kernels[isas]);
        loss_rows[isas++] = ps_cpu_loss_row_avx2;
    }
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        fill_avx512(kernels[isas]);
        loss_rows[isas++] = ps_cpu_loss_row_avx512;
    }
#endif
    OK(ps_backend_ref_open(&ref));
}

/* -- memory: all from one pool that a case empties at its end ---------------------------------------------------- */
static char *pool;
static size_t used;
enum { POOL = 256 << 20 };

static void *take(size_t nbytes)
{
    void *p = pool + used;
    used += (nbytes + 127) / 64 * 64;                /* at least 64 bytes apart */
    if (used > POOL) exit(2);
    return p;
}
static void *scratch(ps_call *call, size_t nbytes)
{
    scratch_taken(nbytes);
    return take(nbytes);
}

static uint64_t state;
static float noise(void)                             /* Returns a number in [-2, 2), in steps that bf16 cannot
                                                      * represent. */
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) * 0x1p-30f;
}
static const ps_view none = { .ndim = -1 };

/* Creates a tensor with two dimensions, or one if cols is 0. The data is only aligned to an element. */
static ps_view make(int dtype, int64_t rows, int64_t cols)
{
    int64_t numel = rows * (cols ? cols : 1), size = ps_dtype_bytes(dtype);
    ps_view v = { .dtype = dtype, .ndim = cols ? 2 : 1, .numel = numel, .shape = { rows, cols },
                  .stride = { cols ? cols : 1, 1 } };
    v.data = (char *)take((size_t)((numel + 1) * size)) + size;
    memset((char *)v.data - size, 0, (size_t)((numel + 1) * size));
    return v;
}
static double get(const ps_view *v, int64_t i)
{
    switch (v->dtype) {
    case PS_F32: return ((float *)v->data)[i];
    case PS_F64: return ((double *)v->data)[i];
    case PS_BF16: return ps_bf16_to_f32(((uint16_t *)v->data)[i]);
    default: return ps_f16_to_f32(((uint16_t *)v->data)[i]);
    }
}
static void put(const ps_view *v, int64_t i, float x)
{
    if (v->dtype == PS_F32) ((float *)v->data)[i] = x;
    else if (v->dtype == PS_BF16) ((uint16_t *)v->data)[i] = ps_f32_to_bf16(x);
    else ((uint16_t *)v->data)[i] = ps_f32_to_f16(x);
}
static ps_view random_view(int dtype, int64_t rows, int64_t cols, float scale, float shift)
{
    ps_view v = make(dtype, rows, cols);
    for (int64_t i = 0; i < v.numel; i++) put(&v, i, noise() * scale + shift);
    return v;
}
static ps_view indices(int dtype, int64_t n, int64_t limit)
{
    ps_view v = make(dtype, n, 0);
    for (int64_t i = 0; i < n; i++) {
        int64_t k = (int64_t)((noise() + 2) * 0.25f * (float)limit) % limit;
        if (i % 3 == 0) k = k % (limit < 5 ? limit : 5);       /* some rows occur often */
        if (dtype == PS_I32) ((int32_t *)v.data)[i] = (int32_t)k;
        else ((int64_t *)v.data)[i] = k;
    }
    return v;
}
static size_t bytes_of(const ps_view *v) { return (size_t)(v->numel * ps_dtype_bytes(v->dtype)); }

/* -- running a case ---------------------------------------------------------------------------------------------- */
struct runs {
    int op, n_in, n_out, n_changed;
    ps_view *in, *out;
    ps_view *changed[PS_MAX_IN];                     /* the tensors that the kernel writes: outputs and in-place
                                                      * inputs */
    const void *attrs;
};
static int call_kernel(const struct runs *t, ps_kernel k)
{
    ps_call call = { .op = t->op, .n_in = t->n_in, .n_out = t->n_out, .in = t->in, .out = t->out, .attrs = t->attrs,
                     .scratch = scratch };
    int rc;
    if (k == ref->kernel[t->op]) return k(&call);
    CHECK(!scratch_differs(k, &call, &rc));
    return rc;
}
/* Adds an operand that the kernel writes. */
static void writes(struct runs *t, ps_view *v)
{
    if (v->ndim >= 0) t->changed[t->n_changed++] = v;
}
static int same_bits(const ps_view *v, const void *wanted) { return memcmp(v->data, wanted, bytes_of(v)) == 0; }

/* Returns the largest difference of `v` from `w` per element. The unit is the element's size plus the largest
 * element's size times `floor`, and at least fp16's smallest normal number. */
static double distance(const ps_view *v, const ps_view *w, double floor)
{
    double most = 0, top = 0, least = w->dtype == PS_F16 ? 0x1p-14 : 1e-30;
    for (int64_t i = 0; i < w->numel; i++)
        if (fabs(get(w, i)) > top && isfinite(get(w, i))) top = fabs(get(w, i));
    for (int64_t i = 0; i < w->numel; i++) {
        double a = get(v, i), b = get(w, i), d = fabs(a - b) / (fabs(b) + floor * top + least);
        if (isnan(a) && isnan(b)) continue;
        if (a == b) continue;
        if (!(d <= most)) most = isnan(d) ? INFINITY : d;
    }
    return most;
}
/* Runs every instruction set on 1 and 2 threads, and the reference. With `exact`, results must have the reference's
 * bits. */
static void compare(struct runs *t, int exact, int line)
{
    void *before[PS_MAX_IN], *first[PS_MAX_IN];
    char what[100];
    for (int c = 0; c < t->n_changed; c++) {
        before[c] = take(bytes_of(t->changed[c]));
        first[c] = take(bytes_of(t->changed[c]));
        memcpy(before[c], t->changed[c]->data, bytes_of(t->changed[c]));
    }
    size_t mark = used;
    for (int run = 0; run < 2 * isas; run++, used = mark) {
        ps_set_threads(1 + run % 2);
        for (int c = 0; c < t->n_changed; c++) memcpy(t->changed[c]->data, before[c], bytes_of(t->changed[c]));
        check(call_kernel(t, kernels[run / 2][t->op]) == 0, line, "a kernel runs", ps_error_message());
        for (int c = 0; c < t->n_changed; c++) {
            snprintf(what, sizeof what, "op %d: set %d on %d threads gives other bits in operand %d", t->op, run / 2,
                     1 + run % 2, c);
            if (run == 0) memcpy(first[c], t->changed[c]->data, bytes_of(t->changed[c]));
            else check(same_bits(t->changed[c], first[c]), line, what, NULL);
        }
    }
    for (int c = 0; c < t->n_changed; c++) memcpy(t->changed[c]->data, before[c], bytes_of(t->changed[c]));
    check(call_kernel(t, ref->kernel[t->op]) == 0, line, "the reference runs", ps_error_message());
    for (int c = 0; c < t->n_changed; c++) {
        ps_view mine = *t->changed[c];
        mine.data = first[c];
        /* One step of the type, since a sum's last bits can determine the rounding. */
        double unit = mine.dtype == PS_BF16 ? 0x1p-7 : mine.dtype == PS_F16 ? 0x1p-10 : 2e-5;
        double far = exact ? !same_bits(t->changed[c], first[c]) : distance(&mine, t->changed[c], 1e-2);
        snprintf(what, sizeof what, "op %d, operand %d of type %d is %g from the reference", t->op, c, mine.dtype, far);
        check(far <= (exact ? 0 : unit), line, what, NULL);
    }
}
#define COMPARE(t, exact) compare((t), (exact), __LINE__)

/* -- norms ------------------------------------------------------------------------------------------------------- */
static void test_norm(int rms, int dtype, int wtype, int64_t rows, int64_t C)
{
    used = 0;
    struct ps_attrs_layer_norm la = { .eps = 1e-5 };
    struct ps_attrs_rms_norm ra = { .eps = 1e-6 };
    struct ps_attrs_layer_norm_backward lb = { .want_w = 1 };
    ps_view x = random_view(dtype, rows, C, 1.0f, 0.5f), w = wtype < 0 ? none : random_view(wtype, C, 0, 0.5f, 1.0f);
    ps_view b = wtype < 0 ? none : random_view(wtype, C, 0, 0.5f, 0.0f), y = make(dtype, rows, C);
    ps_view mean = make(PS_F32, rows, 0), rstd = make(PS_F32, rows, 0);
    ps_view lin[] = { x, w, b }, lout[] = { y, mean, rstd }, rin[] = { x, w }, rout[] = { y, rstd };
    struct runs t = { .op = rms ? PS_OP_rms_norm : PS_OP_layer_norm, .n_in = rms ? 2 : 3, .n_out = rms ? 2 : 3,
                      .in = rms ? rin : lin, .out = rms ? rout : lout, .attrs = rms ? (void *)&ra : &la };
    writes(&t, &y);
    writes(&t, &rstd);
    if (!rms) writes(&t, &mean);
    COMPARE(&t, 0);
    for (int form = 0; form < 3; form++) {           /* 0: all operands; 1: add is given, in dx's memory; 2: without
                                                      * dw or without dx */
        ps_view dy = random_view(dtype, rows, C, 1.0f, 0.1f), dx = make(dtype, rows, C);
        ps_view dw = make(wtype < 0 ? dtype : wtype, C, 0), db = make(dw.dtype, C, 0), add = none;
        if (form == 1) add = dx = random_view(dtype, rows, C, 1.0f, 0.0f);
        lb.want_w = form != 2;
        if (form == 2 && rms) dx = none, lb.want_w = 1;
        ps_view bin[] = { dy, x, w, mean, rstd, add }, bout[] = { dx, dw, db };
        ps_view brin[] = { dy, x, w, rstd, add };
        struct runs u = { .op = rms ? PS_OP_rms_norm_backward : PS_OP_layer_norm_backward, .n_in = rms ? 5 : 6,
                          .n_out = rms ? 2 : 3, .in = rms ? brin : bin, .out = bout, .attrs = &lb };
        writes(&u, &dx);
        writes(&u, &dw);
        if (!rms) writes(&u, &db);
        COMPARE(&u, 0);
    }
}
static void test_norms(void)
{
    static const int64_t size[][2] = { { 1, 1 }, { 3, 7 }, { 5, 16 }, { 4, 33 }, { 65, 64 }, { 130, 100 }, { 300, 257 },
                                       { 64, 768 } };
    for (size_t s = 0; s < sizeof size / sizeof *size; s++)
        for (int dtype = PS_F32; dtype <= PS_F16; dtype++)
            for (int rms = 0; rms < 2; rms++) {
                if (rms && size[s][1] == 1) continue;    /* its dx is a difference of equal numbers, which is only a
                                                          * rounding error */
                test_norm(rms, dtype, dtype, size[s][0], size[s][1]);
                test_norm(rms, dtype, s % 2 ? PS_F32 : -1, size[s][0], size[s][1]);
            }
    /* A NaN must not leave its row. */
    used = 0;
    ps_view x = random_view(PS_BF16, 3, 40, 1.0f, 0.0f), y = make(PS_BF16, 3, 40);
    put(&x, 45, NAN);
    struct ps_attrs_layer_norm a = { .eps = 1e-5 };
    ps_view in[] = { x, none, none }, out[] = { y, make(PS_F32, 3, 0), make(PS_F32, 3, 0) };
    struct runs t = { .op = PS_OP_layer_norm, .n_in = 3, .n_out = 3, .in = in, .out = out, .attrs = &a };
    writes(&t, &y);
    COMPARE(&t, 0);
    CHECK(isfinite(get(&y, 39)) && isnan(get(&y, 40)) && isnan(get(&y, 79)) && isfinite(get(&y, 80)));
}
/* Returns n row indices in random order. */
static ps_view row_numbers(int64_t n)
{
    ps_view v = make(PS_I64, n, 0);
    for (int64_t i = 0; i < n; i++) ((int64_t *)v.data)[i] = (i * 7 + 3) % (2 * n);
    return v;
}
static void test_dropout(void)
{
    static const int64_t size[][2] = { { 1, 1 }, { 3, 67 }, { 2, 9000 }, { 70, 100 } };
    for (size_t s = 0; s < sizeof size / sizeof *size; s++)
        for (int dtype = PS_F32; dtype <= PS_F16; dtype++)
            for (int p = 0; p <= 5; p++) {
                used = 0;
                int64_t rows = size[s][0], C = size[s][1];
                ps_view x = random_view(dtype, rows, C, 1.0f, 0.0f), y = make(dtype, rows, C);
                struct ps_attrs_dropout a = { .p = p * 0.25, .seed = 0x123456789abcdefu, .step = 77, .sample = 1000,
                                              .op = 5, .per_sample = C };
                if (p == 3) a.first = 5 * C + C / 3, a.per_sample = 2 * C + 1;   /* a part of a larger tensor */
                ps_view in[] = { x, none };
                if (p == 5) a.p = 0.5, a.per_sample = 3 * C, in[1] = row_numbers(rows);
                struct runs t = { .op = PS_OP_dropout, .n_in = 2, .n_out = 1, .in = in, .out = &y, .attrs = &a };
                writes(&t, &y);
                /* p of 0 and 1/2 are powers of two, without rounding; p of 1 is the sign of zeros */
                COMPARE(&t, (p % 2 == 0 && p < 4) || p == 5);
            }
}

/* -- losses ------------------------------------------------------------------------------------------------------ */
static void test_softmax(int dtype, int64_t rows, int64_t V)
{
    used = 0;
    static const int forward[] = { PS_OP_softmax, PS_OP_log_softmax };
    static const int back[] = { PS_OP_softmax_backward, PS_OP_log_softmax_backward };
    ps_view x = random_view(dtype, rows, V, 4.0f, 3.0f);
    if (V > 20) put(&x, 3, -INFINITY), put(&x, V - 1, -200.0f);
    for (int k = 0; k < 2; k++) {
        ps_view y = make(dtype, rows, V), dy = random_view(dtype, rows, V, 1.0f, 0.0f), dx = make(dtype, rows, V);
        struct runs t = { .op = forward[k], .n_in = 1, .n_out = 1, .in = &x, .out = &y, .attrs = "" };
        writes(&t, &y);
        COMPARE(&t, 0);
        ps_view in[] = { y, dy };
        struct runs u = { .op = back[k], .n_in = 2, .n_out = 1, .in = in, .out = &dx, .attrs = "" };
        writes(&u, &dx);
        COMPARE(&u, 0);
    }
}
static void test_cross_entropy(int dtype, int64_t rows, int64_t V, int reduction)
{
    used = 0;
    ps_view x = random_view(dtype, rows, V, 4.0f, -3.0f), target = indices(reduction ? PS_I64 : PS_I32, rows, V);
    struct ps_attrs_cross_entropy a = { .ignore_index = -100, .reduction = reduction };
    if (rows > 2) {
        if (target.dtype == PS_I32) ((int32_t *)target.data)[1] = -100;
        else ((int64_t *)target.data)[1] = -100;
    }
    ps_view loss = make(PS_F32, reduction ? 1 : rows, 0), lse = make(PS_F32, rows, 0), dx = make(dtype, rows, V);
    ps_view in[] = { x, target }, out[] = { loss, lse };
    struct runs t = { .op = PS_OP_cross_entropy, .n_in = 2, .n_out = 2, .in = in, .out = out, .attrs = &a };
    writes(&t, &loss);
    writes(&t, &lse);
    COMPARE(&t, 0);
    ps_view dloss = random_view(PS_F32, reduction ? 1 : rows, 0, 1.0f, 0.0f), bin[] = { x, target, lse, dloss };
    struct ps_attrs_cross_entropy_backward b = { .ignore_index = -100, .reduction = reduction };
    struct runs u = { .op = PS_OP_cross_entropy_backward, .n_in = 4, .n_out = 1, .in = bin, .out = &dx, .attrs = &b };
    writes(&u, &dx);
    COMPARE(&u, 0);
}
/* Compares the gradient of one row with double arithmetic. `shape` selects a difficult kind of row. */
static void test_loss_row(int dtype, int64_t V, int shape)
{
    used = 0;
    ps_view x = random_view(dtype, V, 0, 3.0f, 0.0f), g = make(dtype, V, 0), first = make(dtype, V, 0);
    for (int64_t i = 0; i < V; i++) {
        if (shape == 1) put(&x, i, -150.0f + 300.0f * (float)i / (float)V);    /* the maximum grows along the whole
                                                                                * row */
        if (shape == 2 && i < V - 1) put(&x, i, -INFINITY);                    /* whole blocks have no mass */
        if (shape == 3) put(&x, i, (float)get(&x, i) - 1000.0f);
        if (shape > 3) put(&x, i, (float)(i * 7919 % 5));                      /* several elements are the largest */
    }
    int64_t target = shape == 2 ? V - 1 : V / 3, best = 0, last = 0;
    for (int64_t i = 1; i < V; i++) {
        if (get(&x, i) > get(&x, best)) best = last = i;
        else if (get(&x, i) == get(&x, best)) last = i;
    }
    if (shape > 3) target = shape == 4 ? best : last;
    double top = -INFINITY, sum = 0, worst = 0;
    float loss0 = 0, scale = 0.5f;
    for (int64_t i = 0; i < V; i++) top = fmax(top, get(&x, i));
    for (int64_t i = 0; i < V; i++) sum += exp(get(&x, i) - top);
    for (int k = 0; k < isas; k++) {
        memcpy(g.data, x.data, bytes_of(&x));
        bool hit = best != target, hit_again = best != target;
        float quiet = loss_rows[k](g.data, dtype, V, target, scale, 0, &hit);
        CHECK(memcmp(g.data, x.data, bytes_of(&x)) == 0);
        float loss = loss_rows[k](g.data, dtype, V, target, scale, 1, &hit_again);
        CHECK(hit == (best == target) && hit_again == hit);
        if (k == 0) loss0 = loss, memcpy(first.data, g.data, bytes_of(&g));
        CHECK(loss == loss0 && loss == quiet && same_bits(&g, first.data));
    }
    double wanted = top + log(sum) - get(&x, target);
    CHECK(fabs(loss0 - wanted) <= 1e-6 * (1 + fabs(wanted)));
    double unit = dtype == PS_BF16 ? 0x1p-8 : dtype == PS_F16 ? 0x1p-10 : 4e-6;
    for (int64_t i = 0; i < V; i++) {
        double want = (exp(get(&x, i) - top) / sum - (i == target)) * scale;
        worst = fmax(worst, fabs(get(&g, i) - want) / (fabs(want) + 1e-5 / (double)V + (dtype == PS_F16 ? 6e-5 : 0)));
    }
    char what[80];
    snprintf(what, sizeof what, "gradient of %d, V %d, shape %d is %g off", dtype, (int)V, shape, worst);
    check(worst <= unit, __LINE__, what, NULL);
}
static void test_losses(void)
{
    static const int64_t size[][2] = { { 1, 1 }, { 9, 5 }, { 40, 64 }, { 33, 1000 }, { 5, 5000 }, { 2, 70001 } };
    for (size_t s = 0; s < sizeof size / sizeof *size; s++)
        for (int dtype = PS_F32; dtype <= PS_F16; dtype++) {
            test_softmax(dtype, size[s][0], size[s][1]);
            for (int reduction = size[s][1] > 10000; reduction < (size[s][1] > 10000 ? 2 : 3); reduction++)
                test_cross_entropy(dtype, size[s][0], size[s][1], reduction);
            for (int shape = 0; shape < 6; shape++) test_loss_row(dtype, size[s][1], shape);
            test_loss_row(dtype, 50257, 0);
            test_loss_row(dtype, 50257, 1);
        }
    for (int dtype = PS_F32; dtype <= PS_F16; dtype++)
        for (int k = 0; k < isas; k++) {             /* an ignored row, and a NaN of either sign */
            used = 0;
            bool hit = true;
            ps_view x = random_view(dtype, 5000, 0, 1.0f, 0.0f);
            CHECK(loss_rows[k](x.data, dtype, x.numel, -1, 1.0f, 1, &hit) == 0 && !hit);
            CHECK(get(&x, 0) == 0 && get(&x, 4999) == 0);
            x = random_view(dtype, 5000, 0, 1.0f, 0.0f);
            put(&x, 4321, k % 2 ? NAN : -NAN);
            put(&x, 7, 100.0f);
            CHECK(isnan(loss_rows[k](x.data, dtype, x.numel, 7, 1.0f, 1, &hit)) && !hit);
            CHECK(isnan(get(&x, 0)) && isnan(get(&x, 4999)));
        }
    used = 0;
    ps_view x = random_view(PS_F32, 3, 10, 1.0f, 0.0f), target = indices(PS_I64, 3, 10), loss = make(PS_F32, 1, 0);
    ((int64_t *)target.data)[2] = 10;
    ps_view in[] = { x, target }, out[] = { loss, none };
    struct ps_attrs_cross_entropy a = { .ignore_index = -100, .reduction = 1 };
    struct runs t = { .op = PS_OP_cross_entropy, .n_in = 2, .n_out = 2, .in = in, .out = out, .attrs = &a };
    FAILS(call_kernel(&t, kernels[0][t.op]), PS_ERANGE, "target 10 at position 2");
    in[0].dtype = PS_F64;
    CHECK(call_kernel(&t, kernels[0][t.op]) == PS_EUNSUP);
}

/* -- tables ------------------------------------------------------------------------------------------------------ */
static void test_embedding(int dtype, int dw_dtype, int64_t rows, int64_t C, int64_t n)
{
    used = 0;
    ps_view w = random_view(dtype, rows, C, 1.0f, 0.0f), index = indices(n % 2 ? PS_I32 : PS_I64, n, rows);
    ps_view y = make(dtype, n, C), dy = random_view(dtype, n, C, 1.0f, 0.0f);
    ps_view in[] = { w, index }, bin[] = { index, dy };
    struct runs t = { .op = PS_OP_embedding, .n_in = 2, .n_out = 1, .in = in, .out = &y,
                      .attrs = &(struct ps_attrs_embedding){ .padding_idx = -1 } };
    writes(&t, &y);
    COMPARE(&t, 1);
    for (int k = 0; k < 4; k++) {
        ps_view dw = random_view(dw_dtype, rows, C, 1.0f, 0.0f);
        struct ps_attrs_embedding_backward a = { .rows = rows, .accumulate = k & 1, .dtype = dw_dtype,
                                                 .padding_idx = k < 2 ? -1 : rows / 2 };
        struct runs u = { .op = PS_OP_embedding_backward, .n_in = 2, .n_out = 1, .in = bin, .out = &dw, .attrs = &a };
        writes(&u, &dw);
        COMPARE(&u, 0);
    }
    if (n == 0) return;
    memset(y.data, 1, bytes_of(&y));
    if (index.dtype == PS_I32) ((int32_t *)index.data)[n - 1] = -1;
    else ((int64_t *)index.data)[n - 1] = rows;
    FAILS(call_kernel(&t, kernels[isas - 1][t.op]), PS_ERANGE, "is outside [0, ");
    CHECK(((uint8_t *)y.data)[0] == 1);
}
static void test_gather(int dim)
{
    used = 0;
    ps_view x = random_view(PS_F32, 37, 21, 1.0f, 0.0f), y, src;
    ps_view index = indices(PS_I64, dim ? 37 * 8 : 50 * 21, dim ? 21 : 37);
    index.ndim = 2;
    index.shape[0] = dim ? 37 : 50, index.shape[1] = dim ? 8 : 21;
    index.stride[0] = index.shape[1], index.stride[1] = 1;
    struct ps_attrs_gather a = { .dim = dim };
    struct ps_attrs_scatter_add b = { .dim = dim };
    y = make(PS_F32, index.shape[0], index.shape[1]);
    ps_view in[] = { x, index };
    struct runs t = { .op = PS_OP_gather, .n_in = 2, .n_out = 1, .in = in, .out = &y, .attrs = &a };
    writes(&t, &y);
    COMPARE(&t, 1);
    src = random_view(PS_F32, index.shape[0], index.shape[1], 1.0f, 0.0f);
    ps_view sum = make(PS_F32, 37, 21), sin[] = { x, index, src };
    struct runs u = { .op = PS_OP_scatter_add, .n_in = 3, .n_out = 1, .in = sin, .out = &sum, .attrs = &b };
    writes(&u, &sum);
    COMPARE(&u, 0);
}
static void test_tables(void)
{
    for (int dtype = PS_F32; dtype <= PS_F16; dtype++) {
        test_embedding(dtype, dtype, 11, 7, 0);
        test_embedding(dtype, PS_F32, 11, 7, 5);
        test_embedding(dtype, dtype, 5000, 97, 300);
        test_embedding(dtype, PS_BF16, 3000, 600, 201);
    }
    test_gather(0);
    test_gather(1);
}

/* -- optimizers -------------------------------------------------------------------------------------------------- */
/* A list of tensors of odd sizes. kind 0: fp32 parameters that are their own masters. kind 1: separate masters. kind
 * 2: the gradient is in the parameter's memory. */
static void test_optimizer(int adam, int dtype, int grad_dtype, int kind, int variant)
{
    static const int64_t size[] = { 1, 15, 17, 4096, 4097, 20001, 300 };
    enum { TENSORS = sizeof size / sizeof *size };
    used = 0;
    ps_view in[5 * TENSORS];
    int each = adam ? 5 : 4;
    struct ps_attrs_adam_ a = { .adamw = variant & 1, .lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8,
                                .weight_decay = variant & 2 ? 0.1 : 0, .grad_scale = 0.37, .bias1 = 1 - 0.9 * 0.9,
                                .bias2 = 1 - 0.95 * 0.95 };
    struct ps_attrs_sgd_ s = { .lr = 0.1, .momentum = variant & 1 ? 0.9 : 0, .weight_decay = variant & 2 ? 0.1 : 0,
                               .dampening = 0.1, .nesterov = variant >> 2, .first = kind == 1, .grad_scale = 0.5 };
    for (int i = 0; i < TENSORS; i++) {
        ps_view *g = in + i * each;
        g[1] = random_view(PS_F32, size[i], 0, 1.0f, 0.0f);
        g[0] = kind == 0 ? g[1] : random_view(dtype, size[i], 0, 1.0f, 0.0f);
        g[2] = kind == 2 ? g[0] : random_view(grad_dtype, size[i], 0, 0.1f, 0.0f);
        g[3] = random_view(PS_F32, size[i], 0, 0.1f, 0.0f);
        if (adam) g[4] = random_view(PS_F32, size[i], 0, 0.001f, 0.002f);
        else if (!(variant & 1)) g[3] = g[1];
        if (size[i] > 3000) {                        /* denormals and NaN are kept */
            put(&g[2], 5, 1e-40f), put(&g[3], 5, 1e-42f), put(&g[2], 7, NAN);
            if (adam) put(&g[4], 5, 1e-43f);
        }
    }
    struct runs t = { .op = adam ? PS_OP_adam_ : PS_OP_sgd_, .n_in = each * TENSORS, .n_out = 1, .in = in, .out = in,
                      .attrs = adam ? (void *)&a : &s };
    for (int i = 0; i < TENSORS; i++)
        for (int k = 0; k < each; k++)
            if (k != 2) writes(&t, &in[i * each + k]);
    COMPARE(&t, 1);
}
static void test_sq_norms(void)
{
    used = 0;
    ps_view in[6], y = make(PS_F64, 6, 0);
    static const int64_t size[] = { 1, 33, 4096, 50001, 100, 0 };
    for (int i = 0; i < 6; i++) in[i] = random_view(i % 3, size[i], 0, 1.0f, 0.0f);
    put(&in[1], 32, 1e25f);                          /* in bf16; its square exceeds fp32's range */
    put(&in[4], 99, -INFINITY);
    struct runs t = { .op = PS_OP_sq_norms, .n_in = 6, .n_out = 1, .in = in, .out = &y, .attrs = "" };
    writes(&t, &y);
    COMPARE(&t, 0);
}
/* Gradients are stored in any type, and in place. sq must have the bits that sq_norms computes from the stored
 * values. */
static void test_grad_store(void)
{
    static const int64_t size[] = { 0, 1, 33, 4096, 4097, 50001 };
    struct ps_attrs_grad_store a = { 0 };
    for (int n = 0; n < 6; n++)
        for (int from = PS_F32; from <= PS_F16; from++)
            for (int to = PS_F32; to <= PS_F16 + 1; to++) {            /* the last iteration stores into src itself */
                used = 0;
                ps_view src = random_view(from, size[n], 0, 1.0f, 0.0f), sq = make(PS_F64, 1, 0);
                ps_view dst = to > PS_F16 ? src : make(to, size[n], 0), out[] = { dst, sq }, later = make(PS_F64, 1, 0);
                if (n == 3) put(&src, 77, 1e-41f), put(&src, 4000, 70000.0f);      /* exceeds fp16's range and
                                                                                    * becomes infinite */
                if (n == 4) put(&src, 4096, NAN);
                struct runs t = { .op = PS_OP_grad_store, .n_in = 1, .n_out = 2, .in = &src, .out = out, .attrs = &a };
                writes(&t, &out[0]);
                writes(&t, &out[1]);
                COMPARE(&t, 0);
                struct runs s = { .op = PS_OP_sq_norms, .n_in = 1, .n_out = 1, .in = &dst, .out = &later, .attrs = "" };
                for (int i = 0; i < isas; i++) {
                    CHECK(call_kernel(&t, kernels[i][t.op]) == 0 && call_kernel(&s, kernels[isas - 1][s.op]) == 0);
                    CHECK(same_bits(&sq, later.data));
                }
                CHECK(call_kernel(&t, ref->kernel[t.op]) == 0 && call_kernel(&s, ref->kernel[s.op]) == 0);
                CHECK(same_bits(&sq, later.data));
                CHECK(n != 4 || isnan(get(&sq, 0)));
                if (n == 3 && dst.dtype == PS_F16) CHECK(isinf(get(&sq, 0)));
            }
    used = 0;
    ps_view src = random_view(PS_F32, 40, 0, 1.0f, 0.0f), half = src, sq = make(PS_F64, 1, 0), out[] = { half, sq };
    out[0].dtype = PS_BF16;
    struct runs t = { .op = PS_OP_grad_store, .n_in = 1, .n_out = 2, .in = &src, .out = out, .attrs = &a };
    for (int i = 0; i < isas; i++) CHECK(call_kernel(&t, kernels[i][t.op]) == PS_EUNSUP);
    FAILS(call_kernel(&t, ref->kernel[t.op]), PS_EINVAL, "overlaps src");
    out[0] = make(PS_F64, 40, 0);
    FAILS(call_kernel(&t, ref->kernel[t.op]), PS_EINVAL, "fp64 can only be stored as fp64");
    out[0] = make(PS_F32, 40, 0);
    out[1] = make(PS_F32, 1, 0);
    FAILS(call_kernel(&t, ref->kernel[t.op]), PS_EINVAL, "sq must be fp64");
}
static void test_optimizers(void)
{
    for (int variant = 0; variant < 4; variant++)
        for (int adam = 0; adam < 2; adam++) {
            test_optimizer(adam, PS_F32, PS_F32, 0, variant);
            for (int dtype = PS_F32; dtype <= PS_F16; dtype++)
                for (int grad = PS_F32; grad <= PS_F16; grad++) test_optimizer(adam, dtype, grad, 1, variant);
            test_optimizer(adam, PS_BF16, PS_BF16, 2, variant);
            test_optimizer(adam, PS_F16, PS_F16, 2, variant);
        }
    test_optimizer(0, PS_BF16, PS_BF16, 1, 5);
    test_optimizer(0, PS_BF16, PS_F32, 0, 7);
    test_sq_norms();
    test_grad_store();
}

int main(void)
{
    pool = aligned_alloc(64, POOL);
    if (!pool) return 2;
    open_all();
    test_norms();
    test_dropout();
    test_losses();
    test_tables();
    test_optimizers();
    free(pool);
    return end_checks();
}
