/* SPDX-License-Identifier: BSD-3-Clause
 * matmul, linear and lm_loss of the cpu backend against ref's, over types, strides, broadcasts, odd and empty sizes;
 * the same bits for 1 and 2 threads; targets out of range; few rows: no byte after the end of their matrix is read. Run
 * it with DNNL_MAX_CPU_ISA=AVX2 for the fp32 panels. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "backend/cpu/cpu.h"
#include "base/half.h"
#include "cpu_scratch.h"
#include "ref_check.h"

static ps_backend *ref, *cpu;

/* -- calls, their memory and random operands ----------------------------------------------------------------------- */
static void *held[4096];
static int held_count;
static void *hold(size_t nbytes)
{
    if (held_count == 4096) exit(3);
    void *p = aligned_alloc(64, (nbytes + 127) / 64 * 64);
    if (!p) exit(3);
    memset(p, 0x7f, nbytes);                                 /* NaN in bf16 and in fp32, so that unwritten elements
                                                              * are detected */
    return held[held_count++] = p;
}
static void drop(void) { while (held_count > 0) free(held[--held_count]); }
static void *scratch(ps_call *call, size_t nbytes)
{
    scratch_taken(nbytes);
    return hold(nbytes);
}

static uint32_t seed = 1;
static float noise(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed * 0x1p-31f;
}

static double get(const ps_view *v, int64_t i)
{
    if (v->dtype == PS_F32) return ((float *)v->data)[i];
    uint16_t h = ((uint16_t *)v->data)[i];
    return v->dtype == PS_BF16 ? ps_bf16_to_f32(h) : ps_f16_to_f32(h);
}
static void put(const ps_view *v, int64_t i, float x)
{
    if (v->dtype == PS_F32) ((float *)v->data)[i] = x;
    else ((uint16_t *)v->data)[i] = v->dtype == PS_BF16 ? ps_f32_to_bf16(x) : ps_f32_to_f16(x);
}

/* Creates a contiguous tensor of random numbers. ndim -1 means that it is absent. */
static ps_view make(int dtype, int ndim, const int64_t *shape)
{
    ps_view v = { .dtype = dtype, .ndim = ndim, .numel = 1 };
    for (int d = ndim - 1; d >= 0; d--) {
        v.shape[d] = shape[d];
        v.stride[d] = v.numel;
        v.numel *= shape[d];
    }
    v.data = hold((size_t)(v.numel * ps_dtype_bytes(dtype)) + 64);
    for (int64_t i = 0; i < v.numel; i++) put(&v, i, noise());
    return v;
}
#define MAKE(dtype, ...) make(dtype, sizeof((int64_t[]){ __VA_ARGS__ }) / 8, (int64_t[]){ __VA_ARGS__ })
static const ps_view absent = { .ndim = -1 };

static ps_view swapped(ps_view v, int a, int b)
{
    int64_t n = v.shape[a], s = v.stride[a];
    v.shape[a] = v.shape[b], v.stride[a] = v.stride[b];
    v.shape[b] = n, v.stride[b] = s;
    return v;
}
static ps_view halved(ps_view v, int dim)                    /* Keeps every other element along dim. */
{
    v.numel = v.numel / v.shape[dim] * (v.shape[dim] / 2);
    v.shape[dim] /= 2;
    v.stride[dim] *= 2;
    return v;
}
static ps_view clone(const ps_view *v)
{
    ps_view c = make(v->dtype, v->ndim, v->shape);
    memcpy(c.data, v->data, (size_t)(v->numel * ps_dtype_bytes(v->dtype)));
    return c;
}

static int run(ps_backend *be, int op, const ps_view *in, int n_in, ps_view *out, int n_out, const void *attrs)
{
    ps_call call = { .op = op, .n_in = n_in, .n_out = n_out, .in = in, .out = out, .attrs = attrs, .scratch = scratch };
    if (be != cpu) return be->kernel[op](&call);
    int rc;
    int64_t said = be->scratch_nbytes(be, &call);
    CHECK(!scratch_differs(be->kernel[op], &call, &rc));
    CHECK(rc != 0 || said == scratch_bytes);
    return rc;
}

/* Returns the largest difference divided by the allowed rounding error, which depends on the number of products in a
 * sum, `terms`, and on the result's type. */
static double error(const ps_view *want, const ps_view *got, double terms)
{
    double eps = got->dtype == PS_F32 ? 0x1p-24 : got->dtype == PS_BF16 ? 0x1p-8 : 0x1p-11, worst = 0, size = 0;
    for (int64_t i = 0; i < want->numel; i++) size = fmax(size, fabs(get(want, i)));
    for (int64_t i = 0; i < want->numel; i++) {
        double d = fabs(get(want, i) - get(got, i));
        worst = fmax(worst, isnan(d) ? INFINITY : d);
    }
    return worst / (size * (2 * eps + (sqrt(terms) + 4) * 0x1p-23) + 1e-30);
}

/* -- the ops ------------------------------------------------------------------------------------------------------- */
static void try_matmul(int line, ps_view a, ps_view b, int ndim, const int64_t *shape, int accumulate)
{
    ps_view in[2] = { a, b }, want = make(a.dtype, ndim, shape), got = clone(&want);
    struct ps_attrs_matmul attrs = { .accumulate = accumulate };
    int rc = run(ref, PS_OP_matmul, in, 2, &want, 1, &attrs);
    check_at(line, rc == 0, "matmul on ref");
    rc = run(cpu, PS_OP_matmul, in, 2, &got, 1, &attrs);
    check_at(line, rc == 0, "matmul on cpu");
    double e = error(&want, &got, (double)a.shape[a.ndim - 1]);
    if (e > 1) printf("matmul, type %d, accumulate %d: error %g\n", a.dtype, accumulate, e);
    check_at(line, e <= 1, "matmul agrees");
    drop();
}
#define MATMUL(a, b, acc, ...) \
    try_matmul(__LINE__, a, b, sizeof((int64_t[]){ __VA_ARGS__ }) / 8, (int64_t[]){ __VA_ARGS__ }, acc)

static void test_matmul(int t)
{
    MATMUL(MAKE(t, 5, 7), MAKE(t, 7, 3), 0, 5, 3);
    MATMUL(MAKE(t, 130, 70), MAKE(t, 70, 33), 1, 130, 33);
    MATMUL(MAKE(t, 1, 64), MAKE(t, 64, 40), 0, 1, 40);
    MATMUL(MAKE(t, 40, 64), MAKE(t, 64, 1), 0, 40, 1);
    MATMUL(MAKE(t, 40, 1), MAKE(t, 1, 9), 1, 40, 9);
    MATMUL(MAKE(t, 1, 1), MAKE(t, 1, 1), 0, 1, 1);
    MATMUL(MAKE(t, 4, 0), MAKE(t, 0, 3), 0, 4, 3);
    MATMUL(MAKE(t, 2, 4, 0), MAKE(t, 2, 0, 3), 1, 2, 4, 3);
    MATMUL(MAKE(t, 0, 4), MAKE(t, 4, 3), 0, 0, 3);
    MATMUL(swapped(MAKE(t, 60, 44), 0, 1), MAKE(t, 60, 20), 1, 44, 20);              /* a weight's gradient */
    MATMUL(MAKE(t, 44, 60), swapped(MAKE(t, 20, 60), 0, 1), 0, 44, 20);
    MATMUL(swapped(MAKE(t, 60, 44), 0, 1), swapped(MAKE(t, 20, 60), 0, 1), 0, 44, 20);
    MATMUL(halved(MAKE(t, 44, 60), 0), MAKE(t, 60, 20), 0, 22, 20);                  /* strided rows */
    MATMUL(halved(MAKE(t, 44, 60), 1), MAKE(t, 30, 20), 0, 44, 20);                  /* no unit stride, so it is
                                                                                      * copied */
    MATMUL(swapped(MAKE(t, 1, 30), 0, 1), halved(MAKE(t, 2, 50), 0), 0, 30, 50);
    MATMUL(MAKE(t, 6, 20, 30), MAKE(t, 6, 30, 10), 0, 6, 20, 10);
    MATMUL(MAKE(t, 6, 20, 30), swapped(MAKE(t, 6, 10, 30), 1, 2), 1, 6, 20, 10);
    MATMUL(MAKE(t, 6, 20, 30), MAKE(t, 30, 10), 0, 6, 20, 10);                       /* broadcasts */
    MATMUL(MAKE(t, 20, 30), MAKE(t, 6, 30, 10), 0, 6, 20, 10);
    MATMUL(MAKE(t, 3, 1, 20, 30), MAKE(t, 4, 30, 10), 1, 3, 4, 20, 10);
    MATMUL(swapped(MAKE(t, 3, 20, 4, 30), 1, 2), swapped(MAKE(t, 3, 30, 4, 10), 1, 2), 0, 3, 4, 20, 10);
    MATMUL(swapped(MAKE(t, 3, 20, 4, 32), 1, 2), swapped(swapped(MAKE(t, 3, 10, 4, 32), 1, 2), 2, 3), 0, 3, 4, 20, 10);
    MATMUL(MAKE(t, 300, 2500), MAKE(t, 2500, 1100), 0, 300, 1100);                   /* several panels */
}

static void try_linear(int line, ps_view x, ps_view w, ps_view b, ps_view r, int out_in)
{
    ps_view in[4] = { x, w, b, r };
    int64_t shape[PS_MAX_DIMS];
    memcpy(shape, x.shape, sizeof shape);
    shape[x.ndim - 1] = w.shape[out_in ? 0 : 1];
    ps_view want = make(x.dtype, x.ndim, shape), got = clone(&want);
    struct ps_attrs_linear attrs = { .out_in = out_in };
    int rc = run(ref, PS_OP_linear, in, 4, &want, 1, &attrs);
    check_at(line, rc == 0, "linear on ref");
    rc = run(cpu, PS_OP_linear, in, 4, &got, 1, &attrs);
    check_at(line, rc == 0, "linear on cpu");
    double e = error(&want, &got, (double)x.shape[x.ndim - 1]);
    if (e > 1) printf("linear, type %d: error %g\n", x.dtype, e);
    check_at(line, e <= 1, "linear agrees");
    drop();
}
#define LINEAR(...) try_linear(__LINE__, __VA_ARGS__)

static void test_linear(int t)
{
    LINEAR(MAKE(t, 17, 24), MAKE(t, 24, 40), absent, absent, 0);
    LINEAR(MAKE(t, 3, 17, 24), MAKE(t, 24, 40), MAKE(t, 40), absent, 0);
    LINEAR(MAKE(t, 3, 17, 24), MAKE(t, 40, 24), MAKE(t, 40), MAKE(t, 3, 17, 40), 1);
    LINEAR(MAKE(t, 17, 24), MAKE(t, 24, 40), MAKE(PS_F32, 40), absent, 0);           /* a bias with another dtype */
    LINEAR(MAKE(t, 17, 24), MAKE(t, 24, 40), MAKE(PS_BF16, 40), MAKE(t, 17, 40), 0);
    LINEAR(MAKE(t, 24), MAKE(t, 24, 40), MAKE(t, 40), absent, 0);                    /* one row */
    LINEAR(MAKE(t, 9, 24), MAKE(t, 24, 1), MAKE(t, 1), MAKE(t, 9, 1), 0);
    LINEAR(MAKE(t, 5, 0), MAKE(t, 0, 8), MAKE(t, 8), MAKE(t, 5, 8), 0);              /* sums without terms */
    LINEAR(MAKE(t, 0, 5), MAKE(t, 5, 8), MAKE(t, 8), absent, 0);
    LINEAR(swapped(MAKE(t, 4, 3, 24), 0, 1), MAKE(t, 24, 40), MAKE(t, 40), absent, 0);
    LINEAR(swapped(MAKE(t, 24, 17), 0, 1), MAKE(t, 24, 40), absent, absent, 0);
    LINEAR(halved(MAKE(t, 17, 48), 1), swapped(MAKE(t, 40, 24), 0, 1), halved(MAKE(t, 80), 0), absent, 0);
    LINEAR(MAKE(t, 17, 24), MAKE(t, 24, 40), MAKE(t, 40), halved(MAKE(t, 34, 40), 0), 0);   /* strided residual */
    LINEAR(MAKE(t, 17, 24), MAKE(t, 24, 40), MAKE(t, 40), swapped(MAKE(t, 40, 17), 0, 1), 0);
    LINEAR(MAKE(t, 1100, 70), MAKE(t, 70, 1200), MAKE(t, 1200), MAKE(t, 1100, 1200), 0);
    LINEAR(MAKE(t, 520, 1030), MAKE(t, 1030, 530), MAKE(t, 530), MAKE(t, 520, 530), 0);     /* large */
}

static ps_view targets(int64_t n, int64_t vocab, int64_t ignored)
{
    ps_view v = { .dtype = PS_I64, .ndim = 1, .numel = n, .shape = { n }, .stride = { 1 } };
    int64_t *id = v.data = hold((size_t)n * 8);
    for (int64_t i = 0; i < n; i++) id[i] = i % ignored == ignored - 1 ? -100 : i * 7 % vocab;
    return v;
}

/* want_grad is the op's attribute. Bit 3 adds a bias. */
static void try_lm_loss(int t, int64_t N, int64_t V, int64_t C, int want_grad, int reduction)
{
    ps_view in[4] = { MAKE(t, N, C), MAKE(t, V, C), targets(N, V, 5), MAKE(t, V) };
    ps_view want[4], got[4];
    if (!(want_grad & 8)) in[3].ndim = -1;
    int64_t none = 0;
    want[0] = make(PS_F32, 0, &none), want[1] = MAKE(t, N, C), want[2] = MAKE(t, V, C), want[3] = MAKE(t, V);
    for (int i = 0; i < 4; i++) got[i] = clone(&want[i]);
    for (int i = 1; i < 4; i++)
        if (!(want_grad >> (i - 1) & 1)) want[i].ndim = got[i].ndim = -1;
    struct ps_attrs_lm_loss attrs = { .ignore_index = -100, .reduction = reduction, .want_grad = want_grad & 7 };
    attrs.dloss = 1;
    CHECK(run(ref, PS_OP_lm_loss, in, 4, want, 4, &attrs) == 0);
    CHECK(run(cpu, PS_OP_lm_loss, in, 4, got, 4, &attrs) == 0);
    double tol = t == PS_F32 ? 2e-6 : 4e-3, a = get(&want[0], 0), b = get(&got[0], 0);
    if (fabs(a - b) > tol * fabs(a)) printf("lm_loss type %d: %g, wanted %g\n", t, b, a);
    CHECK(fabs(a - b) <= tol * fabs(a));
    for (int i = 1; i < 4; i++) {
        if (want[i].ndim < 0) continue;
        double d2 = 0, w2 = 0;
        for (int64_t j = 0; j < want[i].numel; j++) {
            double w = get(&want[i], j), d = get(&got[i], j) - w;
            d2 += d * d, w2 += w * w;
        }
        double e = sqrt(d2 / w2);
        double most = t == PS_F32 ? 1e-5 : 3e-2;             /* logits and their gradient are rounded to bf16 */
        if (!(e <= most)) printf("lm_loss type %d: gradient %d is off by %g\n", t, i, e);
        CHECK(e <= most);
    }
    drop();
}

static void test_lm_loss(int t)
{
    try_lm_loss(t, 37, 50, 24, 3, 1);
    try_lm_loss(t, 37, 50, 24, 1, 2);
    try_lm_loss(t, 37, 50, 24, 2, 1);
    try_lm_loss(t, 1, 3, 1, 3, 1);
    try_lm_loss(t, 20, 50, 24, 0, 1);
    try_lm_loss(t, 37, 50, 24, 15, 1);                       /* a bias and its gradient */
    try_lm_loss(t, 37, 50, 24, 12, 2);
    try_lm_loss(t, 20, 50, 24, 8, 1);
    try_lm_loss(t, 1050, 3000, 8, 15, 1);
    try_lm_loss(t, 1050, 300, 8, 3, 1);                      /* two panels */
    try_lm_loss(t, 30, 5003, 8, 3, 1);                       /* dw is computed in parts */
}

/* -- other properties ---------------------------------------------------------------------------------------------- */
static void test_bad_targets(void)
{
    ps_view in[4] = { MAKE(PS_F32, 4, 8), MAKE(PS_F32, 10, 8), targets(4, 10, 9), { .ndim = -1 } };
    int64_t none = 0;
    ps_view out[4] = { make(PS_F32, 0, &none), MAKE(PS_F32, 4, 8), MAKE(PS_F32, 10, 8), { .ndim = -1 } };
    ps_view before = clone(&out[1]);
    struct ps_attrs_lm_loss attrs = { .ignore_index = -100, .reduction = 1, .want_grad = 3, .dloss = 1 };
    ((int64_t *)in[2].data)[2] = 10;
    CHECK(run(cpu, PS_OP_lm_loss, in, 4, out, 4, &attrs) == PS_ERANGE);
    ((int64_t *)in[2].data)[2] = -1;
    CHECK(run(cpu, PS_OP_lm_loss, in, 4, out, 4, &attrs) == PS_ERANGE);
    CHECK(memcmp(before.data, out[1].data, 4 * 8 * 4) == 0);
    for (int i = 0; i < 4; i++) ((int64_t *)in[2].data)[i] = -100;
    CHECK(run(cpu, PS_OP_lm_loss, in, 4, out, 4, &attrs) == 0);          /* all targets are ignored, so there is no
                                                                          * loss and no gradient */
    CHECK(get(&out[0], 0) == 0 && get(&out[1], 3) == 0 && get(&out[2], 3) == 0);
    drop();
}

static void test_threads(int t, int64_t m, int64_t k, int64_t n, int trans_a, int trans_b)
{
    ps_view a = MAKE(t, m, k), b = MAKE(t, k, n), y[2] = { MAKE(t, m, n), MAKE(t, m, n) };
    if (trans_a) a = swapped(MAKE(t, k, m), 0, 1);
    if (trans_b) b = swapped(MAKE(t, n, k), 0, 1);
    ps_view in[2] = { a, b };
    struct ps_attrs_matmul attrs = { 0 };
    int was = ps_threads();
    for (int i = 0; i < 2; i++) {
        ps_set_threads(i + 1);
        CHECK(run(cpu, PS_OP_matmul, in, 2, &y[i], 1, &attrs) == 0);
    }
    ps_set_threads(was);
    int same = memcmp(y[0].data, y[1].data, (size_t)(y[0].numel * ps_dtype_bytes(t))) == 0;
    if (!same) printf("bits differ: type %d [%d, %d, %d]%s%s\n", t, (int)m, (int)k, (int)n, trans_a ? " a^T" : "",
                      trans_b ? " b^T" : "");
    CHECK(same);
    drop();
}

/* Copies the numbers to memory that ends at a page boundary, before a page that cannot be read. *all is the region
 * to unmap. */
static ps_view at_end_of_page(const ps_view *v, void **all, size_t *all_nbytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), nbytes = (size_t)(v->numel * ps_dtype_bytes(v->dtype));
    size_t whole = (nbytes + page - 1) / page * page;
    char *p = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + whole, page, PROT_NONE)) exit(3);
    *all = p, *all_nbytes = whole + page;
    ps_view c = *v;
    c.data = memcpy(p + whole - nbytes, v->data, nbytes);
    return c;
}

/* Products of one to four rows with a matrix [K, N] or, with out_in, [N, K]. Four rows must equal ref's result.
 * Fewer rows must have the bits of the first of four rows, for any number of threads. */
static void test_few_rows(int t, int64_t K, int64_t N, int out_in)
{
    ps_view x = MAKE(t, 4, K), w = out_in ? MAKE(t, N, K) : MAKE(t, K, N), four = MAKE(t, 4, N), want = clone(&four);
    struct ps_attrs_linear attrs = { .out_in = out_in };
    ps_view in[4] = { x, w, absent, absent };
    void *all;
    size_t all_nbytes;
    CHECK(run(ref, PS_OP_linear, in, 4, &want, 1, &attrs) == 0);
    in[1] = at_end_of_page(&w, &all, &all_nbytes);
    CHECK(run(cpu, PS_OP_linear, in, 4, &four, 1, &attrs) == 0);
    CHECK(error(&want, &four, (double)K) <= 1);
    int was = ps_threads(), same = 1;
    for (int64_t rows = 1; rows <= 4; rows++)
        for (int threads = 1; threads <= 2; threads++) {
            ps_view y = MAKE(t, rows, N);
            in[0].shape[0] = rows, in[0].numel = rows * K;
            ps_set_threads(threads);
            CHECK(run(cpu, PS_OP_linear, in, 4, &y, 1, &attrs) == 0);
            same = same && memcmp(y.data, four.data, (size_t)(y.numel * ps_dtype_bytes(t))) == 0;
        }
    ps_set_threads(was);
    if (!same) printf("few rows: bits differ: type %d, K %d, N %d, out_in %d\n", t, (int)K, (int)N, out_in);
    CHECK(same);
    munmap(all, all_nbytes);
    drop();
}

/* Sums in parts (onednn.c: depth_of). The last part is short, and existing values are added once. */
static void test_long_sums(void)
{
    int64_t shape[2] = { 1030, 24 };
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        ps_view x = MAKE(PS_F32, 1100, 1030), dy = MAKE(PS_F32, 1100, 24);
        try_matmul(__LINE__, swapped(x, 0, 1), dy, 2, shape, accumulate);
    }
    test_threads(PS_F32, 1030, 1100, 72, 1, 0);
}

int main(void)
{
    if (ps_backend_ref_open(&ref) < 0 || ps_backend_cpu_open(ref, &cpu) < 0) {
        printf("%s\n", ps_error_message());
        return 1;
    }
    printf("%s\n", ps_cpu_gemm_describe());
    static const int types[] = { PS_F32, PS_BF16, PS_F16 };
    for (int i = 0; i < 3; i++) {
        test_matmul(types[i]);
        test_linear(types[i]);
        test_lm_loss(types[i]);
        for (int form = 0; form < 3; form++) {
            test_threads(types[i], 256, 192, 320, form == 1, form == 2);
            test_threads(types[i], 512, 768, 128, form == 1, form == 2);
        }
        for (int out_in = 0; out_in < 2; out_in++) {         /* pieces and vectors that are full, and some that are
                                                              * not */
            test_few_rows(types[i], 128, 512, out_in);
            test_few_rows(types[i], 67, 1003, out_in);
            test_few_rows(types[i], 71, 4099, out_in);
        }
    }
    test_long_sums();
    test_bad_targets();
    ps_view f64[2] = { { .dtype = PS_F64, .ndim = 2, .numel = 1, .shape = { 1, 1 }, .stride = { 1, 1 } } };
    f64[1] = f64[0];
    struct ps_attrs_matmul attrs = { 0 };
    CHECK(run(cpu, PS_OP_matmul, f64, 2, &f64[1], 1, &attrs) == PS_EUNSUP);
    cpu->close(cpu);
    return report();
}
