/* SPDX-License-Identifier: BSD-3-Clause
 * The `ref` kernels, called directly, against values worked out by hand, naive loops and finite differences in fp64;
 * host and meta regions. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "backend/backend.h"
#include "base/alloc.h"
#include "base/half.h"
#include "base/philox.h"
#include "ref_check.h"

static ps_backend *ref;
static int same(const double *a, const double *b, int64_t n, double tolerance)
{
    for (int64_t i = 0; i < n; i++) {
        if (isnan(a[i]) && isnan(b[i])) continue;
        if (a[i] == b[i]) continue;
        if (!(fabs(a[i] - b[i]) <= tolerance * (1 + fabs(b[i])))) {
            printf("  element %lld: got %.17g, want %.17g\n", (long long)i, a[i], b[i]);
            return 0;
        }
    }
    return 1;
}
#define CHECK_SAME(got, want, n, tolerance) check_at(__LINE__, same((got), (want), (n), (tolerance)), #got)

/* -- calling a kernel ------------------------------------------------------------------------------------------- */
#define SHAPE(...) (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ }
static const ps_view absent = { .ndim = -1 };

static ps_view view(int dtype, void *data, int ndim, const int64_t *shape)
{
    ps_view v = { .data = data, .dtype = dtype, .ndim = ndim, .numel = 1 };
    for (int d = ndim - 1; d >= 0; d--) {
        v.shape[d] = shape[d];
        v.stride[d] = v.numel;
        v.numel *= shape[d];
    }
    return v;
}
#define F64(x, ...) view(PS_F64, (x), SHAPE(__VA_ARGS__))
#define F32(x, ...) view(PS_F32, (x), SHAPE(__VA_ARGS__))
#define BF16(x, ...) view(PS_BF16, (x), SHAPE(__VA_ARGS__))
#define F16(x, ...) view(PS_F16, (x), SHAPE(__VA_ARGS__))
#define I32(x, ...) view(PS_I32, (x), SHAPE(__VA_ARGS__))
#define I64(x, ...) view(PS_I64, (x), SHAPE(__VA_ARGS__))
#define U8(x, ...) view(PS_U8, (x), SHAPE(__VA_ARGS__))
#define BOOL(x, ...) view(PS_BOOL, (x), SHAPE(__VA_ARGS__))
static ps_view scalar(int dtype, void *data) { return view(dtype, data, 0, NULL); }
static ps_view swapped(ps_view v, int a, int b)
{
    int64_t size = v.shape[a], stride = v.stride[a];
    v.shape[a] = v.shape[b], v.stride[a] = v.stride[b];
    v.shape[b] = size, v.stride[b] = stride;
    return v;
}

static void *pool[64];
static int pool_used;
static void *scratch(ps_call *call, size_t nbytes)
{
    return pool_used < 64 ? pool[pool_used++] = malloc(nbytes) : NULL;
}

static int run(int op, const void *attrs, int n_in, const ps_view *in, int n_out, ps_view *out)
{
    ps_call call = { .op = op, .n_in = n_in, .n_out = n_out, .in = in, .out = out, .attrs = attrs, .scratch = scratch };
    int rc = ref->kernel[op](&call);
    while (pool_used > 0) free(pool[--pool_used]);
    return rc;
}
#define IN(...) (int)(sizeof((ps_view[]){ __VA_ARGS__ }) / sizeof(ps_view)), (ps_view[]){ __VA_ARGS__ }
#define OUT IN
static const int32_t none[64];

/* Fills x with smooth numbers that are neither round nor repeated. */
static void fill(double *x, int64_t n, double seed)
{
    for (int64_t i = 0; i < n; i++) x[i] = sin(seed + 1.7 * (double)i) + 0.3 * cos(5 * seed + 0.37 * (double)(i * i));
}

/* Computes the gradient of `f` with respect to x [n] by central differences. */
static void differences(double (*f)(void), double *x, int64_t n, double *out)
{
    const double h = 1e-6;
    for (int64_t i = 0; i < n; i++) {
        double at = x[i];
        x[i] = at + h;
        double up = f();
        x[i] = at - h;
        double down = f();
        x[i] = at;
        out[i] = (up - down) / (2 * h);
    }
}

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* -- copies and elementwise ------------------------------------------------------------------------------------- */
static void test_copies(void)
{
    int64_t big[2] = { INT64_MAX - 1, INT64_MIN + 1 }, out64[2];
    CHECK(run(PS_OP_contiguous, none, IN(I64(big, 2)), OUT(I64(out64, 2))) == 0);
    CHECK(out64[0] == big[0] && out64[1] == big[1]);

    double floats[5] = { 1e20, -1e20, NAN, -2.9, 300.5 };
    int32_t i32[5];
    uint8_t u8[5], truth[5];
    CHECK(run(PS_OP_cast, none, IN(F64(floats, 5)), OUT(I32(i32, 5))) == 0);
    CHECK(i32[0] == INT32_MAX && i32[1] == INT32_MIN && i32[2] == 0 && i32[3] == -2 && i32[4] == 300);
    CHECK(run(PS_OP_cast, none, IN(F64(floats, 5)), OUT(U8(u8, 5))) == 0);
    CHECK(u8[0] == 255 && u8[1] == 0 && u8[2] == 0 && u8[3] == 0 && u8[4] == 255);
    CHECK(run(PS_OP_cast, none, IN(F64(floats, 5)), OUT(BOOL(truth, 5))) == 0);
    CHECK(truth[0] == 1 && truth[2] == 1);

    int32_t grid[6] = { 0, 1, 2, 3, 4, 5 }, turned[6], row[3] = { 7, 8, 9 };
    ps_view t = swapped(I32(grid, 2, 3), 0, 1);
    CHECK(run(PS_OP_contiguous, none, IN(t), OUT(I32(turned, 3, 2))) == 0);
    CHECK(turned[0] == 0 && turned[1] == 3 && turned[2] == 1 && turned[5] == 5);
    ps_view dst = I32(grid, 2, 3);
    CHECK(run(PS_OP_copy_, none, IN(dst, I32(row, 3)), OUT(dst)) == 0);
    CHECK(grid[0] == 7 && grid[3] == 7 && grid[5] == 9);

    ps_attrs_arange_ arange = { .start = 9007199254740992.0, .step = 1 };
    CHECK(run(PS_OP_arange_, &arange, IN(I64(out64, 2)), OUT(absent)) == 0);
    CHECK(out64[1] == 9007199254740993);
}

static void test_binary(void)
{
    double column[2] = { 10, 20 }, row[3] = { 1, 2, 3 }, y[6];
    const double sums[6] = { 11, 12, 13, 21, 22, 23 };
    CHECK(run(PS_OP_add, none, IN(F64(column, 2, 1), F64(row, 3)), OUT(F64(y, 2, 3))) == 0);
    CHECK_SAME(y, sums, 6, 0);

    int64_t a[2] = { INT64_MAX, 9007199254740993 }, b[2] = { 1, 9007199254740992 }, z[2];
    uint8_t truth[3];
    ps_view av = I64(a, 2), bv = I64(b, 2), zv = I64(z, 2);
    CHECK(run(PS_OP_add, none, IN(av, bv), OUT(zv)) == 0 && z[0] == INT64_MIN);
    CHECK(run(PS_OP_sub, none, IN(av, bv), OUT(zv)) == 0 && z[1] == 1);
    CHECK(run(PS_OP_eq, none, IN(av, bv), OUT(BOOL(truth, 2))) == 0 && truth[1] == 0);

    double p[3] = { NAN, 1, 2 }, q[3] = { 1, NAN, 3 };
    const double larger[3] = { NAN, NAN, 3 }, chosen[3] = { 1, 1, 3 };
    ps_view pv = F64(p, 3), qv = F64(q, 3), yv = F64(y, 3);
    CHECK(run(PS_OP_maximum, none, IN(pv, qv), OUT(yv)) == 0);
    CHECK_SAME(y, larger, 3, 0);
    CHECK(run(PS_OP_lt, none, IN(pv, qv), OUT(BOOL(truth, 3))) == 0);
    CHECK(truth[0] == 0 && truth[1] == 0 && truth[2] == 1);
    uint8_t cond[3] = { 0, 1, 0 };
    CHECK(run(PS_OP_where, none, IN(BOOL(cond, 3), pv, qv), OUT(yv)) == 0);
    CHECK_SAME(y, chosen, 3, 0);
}

enum { UN = 7 };
static double u_x[UN], u_y[UN], u_dy[UN];
static int u_op, u_tanh;
static double unary_loss(void)
{
    ps_attrs_gelu a = { .tanh = u_tanh };
    run(u_op, &a, IN(F64(u_x, UN)), OUT(F64(u_y, UN)));
    return dot(u_y, u_dy, UN);
}

/* of_output: the backward uses the forward's output instead of its input. */
static void check_unary(int line, int op, int backward, int tanh_form, int of_output)
{
    double dx[UN], want[UN];
    ps_attrs_gelu_backward a = { .tanh = tanh_form };
    u_op = op, u_tanh = tanh_form;
    fill(u_x, UN, 0.4);
    fill(u_dy, UN, 1.9);
    differences(unary_loss, u_x, UN, want);
    unary_loss();
    int rc = run(backward, &a, IN(F64(of_output ? u_y : u_x, UN), F64(u_dy, UN)), OUT(F64(dx, UN)));
    check_at(line, rc == 0, "backward runs");
    check_at(line, same(dx, want, UN, 1e-8), "backward equals finite differences");
}

static void test_unary(void)
{
    double x[4] = { 2.5, -1.5, NAN, 0.5 }, y[4];
    const double rounded[4] = { 2, -2, NAN, 0 }, relu[4] = { 2.5, 0, NAN, 0.5 }, clamped[4] = { 1, -1, NAN, 0.5 };
    ps_view xv = F64(x, 4), yv = F64(y, 4);
    ps_attrs_clamp clamp = { .low = -1, .high = 1 };
    CHECK(run(PS_OP_round, none, IN(xv), OUT(yv)) == 0);
    CHECK_SAME(y, rounded, 4, 0);
    CHECK(run(PS_OP_relu, none, IN(xv), OUT(yv)) == 0);
    CHECK_SAME(y, relu, 4, 0);
    CHECK(run(PS_OP_clamp, &clamp, IN(xv), OUT(yv)) == 0);
    CHECK_SAME(y, clamped, 4, 0);
    check_unary(__LINE__, PS_OP_gelu, PS_OP_gelu_backward, 0, 0);
    check_unary(__LINE__, PS_OP_gelu, PS_OP_gelu_backward, 1, 0);
    check_unary(__LINE__, PS_OP_silu, PS_OP_silu_backward, 0, 0);
    check_unary(__LINE__, PS_OP_softmax, PS_OP_softmax_backward, 0, 1);
    check_unary(__LINE__, PS_OP_log_softmax, PS_OP_log_softmax_backward, 0, 1);
    double logits[3] = { 1000, 1001, 1002 }, s[3];
    const double want[3] = { 0.09003057317038046, 0.24472847105479764, 0.6652409557748219 };
    CHECK(run(PS_OP_softmax, none, IN(F64(logits, 3)), OUT(F64(s, 3))) == 0);
    CHECK_SAME(s, want, 3, 1e-14);
}

/* -- reductions ------------------------------------------------------------------------------------------------- */
static void test_reduce(void)
{
    double x[6] = { 1, 5, 3, 4, 2, 6 }, y[3] = { 100, 100, 100 }, all;
    const double columns[3] = { 105, 107, 109 }, mean[2] = { 3, 4 };
    ps_view xv = F64(x, 2, 3);
    ps_attrs_sum sum = { .dims = 1, .accumulate = 1 };
    CHECK(run(PS_OP_sum, &sum, IN(xv), OUT(F64(y, 3))) == 0);
    CHECK_SAME(y, columns, 3, 0);
    ps_attrs_mean over_last = { .dims = 2, .keepdim = 1 };
    CHECK(run(PS_OP_mean, &over_last, IN(xv), OUT(F64(y, 2, 1))) == 0);
    CHECK_SAME(y, mean, 2, 0);
    ps_attrs_amax over_all = { .dims = 0 };
    CHECK(run(PS_OP_amax, &over_all, IN(swapped(xv, 0, 1)), OUT(scalar(PS_F64, &all))) == 0 && all == 6);
    CHECK(run(PS_OP_amin, &over_all, IN(xv), OUT(scalar(PS_F64, &all))) == 0 && all == 1);

    int64_t at[3];
    ps_attrs_argmax first = { .dim = 0 };
    CHECK(run(PS_OP_argmax, &first, IN(xv), OUT(I64(at, 3))) == 0);
    CHECK(at[0] == 1 && at[1] == 0 && at[2] == 1);
    x[4] = NAN;
    CHECK(run(PS_OP_argmin, &first, IN(xv), OUT(I64(at, 3))) == 0 && at[1] == 1);
    CHECK(run(PS_OP_amin, &over_all, IN(xv), OUT(scalar(PS_F64, &all))) == 0 && isnan(all));
    x[4] = 2;

    ps_attrs_cumsum back = { .dim = -1, .reverse = 1 };
    double c[6];
    const double running[6] = { 9, 8, 3, 12, 8, 6 };
    CHECK(run(PS_OP_cumsum, &back, IN(xv), OUT(F64(c, 2, 3))) == 0);
    CHECK_SAME(c, running, 6, 0);
    ps_attrs_topk two = { .k = 2 };
    double values[4];
    int64_t places[4];
    const double best[4] = { 5, 3, 6, 4 };
    CHECK(run(PS_OP_topk, &two, IN(xv), OUT(F64(values, 2, 2), I64(places, 2, 2))) == 0);
    CHECK_SAME(values, best, 4, 0);
    CHECK(places[0] == 1 && places[1] == 2 && places[2] == 2 && places[3] == 0);

    uint8_t bytes[3] = { 200, 200, 200 };
    int64_t total;
    ps_attrs_sum plain = { .dims = 0 };
    CHECK(run(PS_OP_sum, &plain, IN(U8(bytes, 3)), OUT(scalar(PS_I64, &total))) == 0 && total == 600);
    double norms[2];
    CHECK(run(PS_OP_sq_norms, none, IN(xv, U8(bytes, 3)), OUT(F64(norms, 2))) == 0);
    CHECK(norms[0] == 91 && norms[1] == 120000);
}

/* -- matrix products -------------------------------------------------------------------------------------------- */
static void test_matmul(void)
{
    double a[6] = { 1, 2, 3, 4, 5, 6 }, b[12], y[16], want[16];
    fill(b, 12, 0.2);
    /* [2, 1, 3], a shared batch of 2 x 3, times the transpose of [2, 2, 3] */
    ps_view av = F64(a, 2, 3), bv = swapped(F64(b, 2, 2, 3), 1, 2);
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++) {
                y[n * 4 + i * 2 + j] = 10;
                want[n * 4 + i * 2 + j] = 10 + dot(&a[i * 3], &b[n * 6 + j * 3], 3);
            }
    ps_attrs_matmul add = { .accumulate = 1 };
    CHECK(run(PS_OP_matmul, &add, IN(av, bv), OUT(F64(y, 2, 2, 2))) == 0);
    CHECK_SAME(y, want, 8, 1e-15);

    double w[6] = { 1, 2, 3, 4, 5, 6 }, x[4] = { 1, -1, 2, 0 }, bias[3] = { 10, 20, 30 };
    double residual[6] = { 0, 0, 0, 100, 100, 100 };
    const double plain[6] = { 7, 17, 27, 112, 124, 136 };          /* w as [2, 3] */
    const double turned[6] = { 9, 19, 29, 112, 126, 140 };         /* w as [3, 2], transposed */
    ps_view xv = F64(x, 2, 2), bias_v = F64(bias, 3);
    ps_view res = F64(residual, 2, 3), yv = F64(y, 2, 3);
    ps_attrs_linear io = { .out_in = 0 }, oi = { .out_in = 1 };
    CHECK(run(PS_OP_linear, &io, IN(xv, F64(w, 2, 3), bias_v, res), OUT(yv)) == 0);
    CHECK_SAME(y, plain, 6, 0);
    CHECK(run(PS_OP_linear, &oi, IN(xv, F64(w, 3, 2), bias_v, res), OUT(yv)) == 0);
    CHECK_SAME(y, turned, 6, 0);
    CHECK(run(PS_OP_linear, &oi, IN(xv, F64(w, 3, 2), absent, absent), OUT(yv)) == 0);
    CHECK(y[0] == -1);
}

/* -- losses ----------------------------------------------------------------------------------------------------- */
enum { ROWS = 3, VOCAB = 5, WIDTH = 4 };
static double ce_x[ROWS * VOCAB], ce_loss, ce_lse[ROWS];
static int32_t ce_target[ROWS] = { 4, -100, 0 };
static double ce_mean(void)
{
    ps_attrs_cross_entropy a = { .ignore_index = -100, .reduction = 1 };
    run(PS_OP_cross_entropy, &a, IN(F64(ce_x, ROWS, VOCAB), I32(ce_target, ROWS)),
        OUT(scalar(PS_F64, &ce_loss), F64(ce_lse, ROWS)));
    return ce_loss;
}

static void test_cross_entropy(void)
{
    double want_dx[ROWS * VOCAB], dx[ROWS * VOCAB], dloss = 1, lse[ROWS], want = 0;
    ps_attrs_cross_entropy_backward a = { .ignore_index = -100, .reduction = 1 };
    ps_view x = F64(ce_x, ROWS, VOCAB), target = I32(ce_target, ROWS);
    fill(ce_x, ROWS * VOCAB, 0.9);
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int v = 0; v < VOCAB; v++) sum += exp(ce_x[r * VOCAB + v]);
        lse[r] = log(sum);
        if (r != 1) want += (lse[r] - ce_x[r * VOCAB + ce_target[r]]) / 2;
    }
    ce_mean();
    CHECK_SAME(&ce_loss, &want, 1, 1e-14);
    CHECK_SAME(ce_lse, lse, ROWS, 1e-14);
    differences(ce_mean, ce_x, ROWS * VOCAB, want_dx);
    CHECK(run(PS_OP_cross_entropy_backward, &a, IN(x, target, F64(ce_lse, ROWS), scalar(PS_F64, &dloss)),
              OUT(F64(dx, ROWS, VOCAB))) == 0);
    CHECK_SAME(dx, want_dx, ROWS * VOCAB, 1e-8);

    int32_t ignored[ROWS] = { -100, -100, -100 }, wrong[ROWS] = { 0, 1, VOCAB };
    ps_attrs_cross_entropy mean = { .ignore_index = -100, .reduction = 1 };
    ps_view outs[2] = { scalar(PS_F64, &ce_loss), F64(ce_lse, ROWS) };
    CHECK(run(PS_OP_cross_entropy, &mean, IN(x, I32(ignored, ROWS)), 2, outs) == 0 && ce_loss == 0);
    CHECK(run(PS_OP_cross_entropy_backward, &a, IN(x, I32(ignored, ROWS), outs[1], scalar(PS_F64, &dloss)),
              OUT(F64(dx, ROWS, VOCAB))) == 0 && dx[0] == 0 && dx[14] == 0);
    ce_loss = 42;
    CHECK(run(PS_OP_cross_entropy, &mean, IN(x, I32(wrong, ROWS)), 2, outs) == PS_ERANGE && ce_loss == 42);
    CHECK(strstr(ps_error_message(), "target 5 at position 2") != NULL);
}

static double lm_x[ROWS * WIDTH], lm_w[VOCAB * WIDTH];
static double lm_mean(void)
{
    ps_attrs_matmul plain = { .accumulate = 0 };
    run(PS_OP_matmul, &plain, IN(F64(lm_x, ROWS, WIDTH),
                                 swapped(F64(lm_w, VOCAB, WIDTH), 0, 1)), OUT(F64(ce_x, ROWS, VOCAB)));
    return ce_mean();
}

static void test_lm_loss(void)
{
    double loss, dx[ROWS * WIDTH], dw[VOCAB * WIDTH], want_dx[ROWS * WIDTH], want_dw[VOCAB * WIDTH];
    fill(lm_x, ROWS * WIDTH, 0.1);
    fill(lm_w, VOCAB * WIDTH, 2.3);
    ps_attrs_lm_loss a = { .ignore_index = -100, .reduction = 1, .want_grad = 3, .dloss = 1 };
    const ps_view in[4] = { F64(lm_x, ROWS, WIDTH), F64(lm_w, VOCAB, WIDTH),
                            I32(ce_target, ROWS), absent };
    CHECK(run(PS_OP_lm_loss, &a, 4, in, OUT(scalar(PS_F64, &loss), F64(dx, ROWS, WIDTH),
                                            F64(dw, VOCAB, WIDTH), absent)) == 0);
    double want = lm_mean();
    CHECK_SAME(&loss, &want, 1, 1e-14);
    differences(lm_mean, lm_x, ROWS * WIDTH, want_dx);
    differences(lm_mean, lm_w, VOCAB * WIDTH, want_dw);
    CHECK_SAME(dx, want_dx, ROWS * WIDTH, 1e-8);
    CHECK_SAME(dw, want_dw, VOCAB * WIDTH, 1e-8);
    CHECK(run(PS_OP_lm_loss, &a, 4, in, OUT(scalar(PS_F64, &loss), absent, absent, absent)) == 0);
    CHECK_SAME(&loss, &want, 1, 1e-14);
}

/* -- tables ----------------------------------------------------------------------------------------------------- */
static void test_tables(void)
{
    float w[6] = { 1, 2, 3, 4, 5, 6 }, y[6] = { 0 }, dw[6] = { 1, 1, 1, 1, 1, 1 }, dy[6] = { 1, 2, 3, 4, 5, 6 };
    int64_t index[3] = { 2, 0, 2 }, bad[3] = { 0, 3, 1 };
    ps_view iv = I64(index, 3), yv = F32(y, 3, 2), wv = F32(w, 3, 2);
    CHECK(run(PS_OP_embedding, none, IN(wv, I64(bad, 3)), OUT(yv)) == PS_ERANGE && y[0] == 0);
    CHECK(strstr(ps_error_message(), "index 3 at position 1 is outside [0, 3)") != NULL);
    CHECK(run(PS_OP_embedding, none, IN(wv, iv), OUT(yv)) == 0 && y[0] == 5 && y[3] == 2 && y[5] == 6);
    ps_attrs_embedding_backward back = { .rows = 3, .accumulate = 1, .padding_idx = -1 };
    CHECK(run(PS_OP_embedding_backward, &back, IN(iv, F32(dy, 3, 2)), OUT(F32(dw, 3, 2))) == 0);
    CHECK(dw[0] == 4 && dw[1] == 5 && dw[2] == 1 && dw[3] == 1 && dw[4] == 7 && dw[5] == 9);
    back.padding_idx = 2;                                    /* the row of padding stays unchanged */
    CHECK(run(PS_OP_embedding_backward, &back, IN(iv, F32(dy, 3, 2)), OUT(F32(dw, 3, 2))) == 0);
    CHECK(dw[0] == 7 && dw[1] == 9 && dw[4] == 7 && dw[5] == 9);
    back.accumulate = 0;
    CHECK(run(PS_OP_embedding_backward, &back, IN(iv, F32(dy, 3, 2)), OUT(F32(dw, 3, 2))) == 0);
    CHECK(dw[0] == 3 && dw[1] == 4 && dw[4] == 0 && dw[5] == 0);

    double x[6] = { 0, 1, 2, 3, 4, 5 }, g[2], s[6];
    int32_t pick[2] = { 2, 0 };
    const double got[2] = { 2, 3 }, added[6] = { 0, 1, 4, 6, 4, 5 };
    ps_attrs_gather along = { .dim = 1 };
    ps_view xv = F64(x, 2, 3), pv = I32(pick, 2, 1), gv = F64(g, 2, 1);
    CHECK(run(PS_OP_gather, &along, IN(xv, pv), OUT(gv)) == 0);
    CHECK_SAME(g, got, 2, 0);
    CHECK(run(PS_OP_scatter_add, &along, IN(xv, pv, gv), OUT(F64(s, 2, 3))) == 0);
    CHECK_SAME(s, added, 6, 0);

    double joined[10];
    const double want[10] = { 0, 1, 2, 0, 3, 3, 4, 5, 1, 4 };
    ps_view turned = swapped(xv, 0, 1);             /* [3, 2]; its first two rows are a [2, 2] */
    turned.shape[0] = 2, turned.numel = 4;
    CHECK(run(PS_OP_concat, &along, IN(xv, turned), OUT(F64(joined, 2, 5))) == 0);
    CHECK_SAME(joined, want, 10, 0);
}

/* -- normalisation ---------------------------------------------------------------------------------------------- */
enum { NR = 3, NC = 5 };
static double n_x[NR * NC], n_w[NC], n_b[NC], n_y[NR * NC], n_dy[NR * NC], n_mean[NR], n_rstd[NR];
static double layer_norm_loss(void)
{
    ps_attrs_layer_norm a = { .eps = 1e-3 };
    run(PS_OP_layer_norm, &a, IN(F64(n_x, NR, NC), F64(n_w, NC), F64(n_b, NC)),
        OUT(F64(n_y, NR, NC), F64(n_mean, NR), F64(n_rstd, NR)));
    return dot(n_y, n_dy, NR * NC);
}
static double rms_norm_loss(void)
{
    ps_attrs_rms_norm a = { .eps = 1e-3 };
    run(PS_OP_rms_norm, &a, IN(F64(n_x, NR, NC), F64(n_w, NC)), OUT(F64(n_y, NR, NC), F64(n_rstd, NR)));
    return dot(n_y, n_dy, NR * NC);
}

static void test_norms(void)
{
    double want_dx[NR * NC], want_dw[NC], want_db[NC], dx[NR * NC], dw[NC], db[NC];
    fill(n_x, NR * NC, 0.6);
    fill(n_dy, NR * NC, 1.1);
    fill(n_w, NC, 2.2);
    fill(n_b, NC, 3.3);
    ps_view x = F64(n_x, NR, NC), dy = F64(n_dy, NR, NC), w = F64(n_w, NC);
    ps_view mean = F64(n_mean, NR), rstd = F64(n_rstd, NR);
    ps_view dxv = F64(dx, NR, NC), dwv = F64(dw, NC), dbv = F64(db, NC);

    differences(layer_norm_loss, n_x, NR * NC, want_dx);
    differences(layer_norm_loss, n_w, NC, want_dw);
    differences(layer_norm_loss, n_b, NC, want_db);
    layer_norm_loss();
    ps_attrs_layer_norm_backward a = { .want_w = 1 };
    for (int i = 0; i < NR * NC; i++) dx[i] = i, want_dx[i] += i;        /* dx uses the memory of `add` */
    CHECK(run(PS_OP_layer_norm_backward, &a, IN(dy, x, w, mean, rstd, dxv), OUT(dxv, dwv, dbv)) == 0);
    CHECK_SAME(dx, want_dx, NR * NC, 1e-8);
    CHECK_SAME(dw, want_dw, NC, 1e-8);
    CHECK_SAME(db, want_db, NC, 1e-8);

    differences(rms_norm_loss, n_x, NR * NC, want_dx);
    differences(rms_norm_loss, n_w, NC, want_dw);
    rms_norm_loss();
    ps_attrs_rms_norm_backward b = { .want_w = 1 };
    CHECK(run(PS_OP_rms_norm_backward, &b, IN(dy, x, w, rstd, absent), OUT(dxv, dwv)) == 0);
    CHECK_SAME(dx, want_dx, NR * NC, 1e-8);
    CHECK_SAME(dw, want_dw, NC, 1e-8);

    ps_attrs_layer_norm plain = { .eps = 0 };
    double pair[2] = { 1, 3 }, out[2];
    const double unit[2] = { -1, 1 };
    CHECK(run(PS_OP_layer_norm, &plain, IN(F64(pair, 1, 2), absent, absent),
              OUT(F64(out, 1, 2), absent, absent)) == 0);
    CHECK_SAME(out, unit, 2, 0);
}

/* -- attention -------------------------------------------------------------------------------------------------- */
enum { AB = 2, AH = 2, AT = 3, AS = 4, AD = 3 };
static double a_q[AB * AT * AH * AD], a_k[AB * AH * AS * AD], a_v[AB * AH * AS * AD], a_y[AB * AT * AH * AD];
static double a_dy[AB * AT * AH * AD], a_lse[AB * AH * AT];
static uint8_t a_mask[AB * AS] = { 1, 1, 0, 1, 0, 1, 1, 1 };     /* in sample 1, query 0 sees keys 1..3 without the
                                                                  * causal limit */
static ps_attrs_attention a_attrs = { .scale = 0.7, .causal = 1, .p = 0.3, .seed = 5, .step = 2, .sample = 9, .op = 3 };

/* Views [B, T, H, D] in memory as [B, H, T, D]. */
static ps_view heads_view(double *x) { return swapped(F64(x, AB, AT, AH, AD), 1, 2); }
static ps_view keys_view(double *x) { return F64(x, AB, AH, AS, AD); }
static ps_view mask_view(void) { return BOOL(a_mask, AB, AS); }

static double attention_loss(void)
{
    run(PS_OP_attention, &a_attrs, IN(heads_view(a_q), keys_view(a_k), keys_view(a_v), mask_view()),
        OUT(heads_view(a_y), F64(a_lse, AB, AH, AT)));
    return dot(a_y, a_dy, AB * AT * AH * AD);
}

/* Computes attention from the formula, element by element. */
static void naive_attention(double *y, double *lse)
{
    for (int b = 0; b < AB; b++)
        for (int h = 0; h < AH; h++)
            for (int i = 0; i < AT; i++) {
                double e[AS], sum = 0;
                const double *q = &a_q[((b * AT + i) * AH + h) * AD];
                double *out = &y[((b * AT + i) * AH + h) * AD];
                for (int j = 0; j < AS; j++) {
                    int sees = a_mask[b * AS + j] && (!a_attrs.causal || j <= i + AS - AT);
                    e[j] = sees ? exp(a_attrs.scale * dot(q, &a_k[((b * AH + h) * AS + j) * AD], AD)) : 0;
                    sum += e[j];
                }
                lse[(b * AH + h) * AT + i] = log(sum);
                for (int d = 0; d < AD; d++) out[d] = 0;
                for (int j = 0; j < AS; j++) {
                    uint64_t n = (uint64_t)((h * AT + i) * AS + j);
                    ps_philox r = ps_philox4x32(a_attrs.seed, (a_attrs.sample + (uint64_t)b) << 32 | n / 4,
                                                a_attrs.step << 32 | a_attrs.op);
                    if (a_attrs.p > 0 && ps_unit_f32(r.v[n % 4]) < (float)a_attrs.p) continue;
                    for (int d = 0; d < AD; d++)
                        out[d] += e[j] / sum / (1 - a_attrs.p) * a_v[((b * AH + h) * AS + j) * AD + d];
                }
            }
}

static void test_attention(void)
{
    double y[AB * AT * AH * AD], lse[AB * AH * AT];
    double dq[AB * AT * AH * AD], dk[AB * AH * AS * AD], dv[AB * AH * AS * AD], want[AB * AH * AS * AD];
    fill(a_q, AB * AT * AH * AD, 0.3);
    fill(a_k, AB * AH * AS * AD, 1.3);
    fill(a_v, AB * AH * AS * AD, 2.3);
    fill(a_dy, AB * AT * AH * AD, 3.3);
    for (int round = 0; round < 3; round++) {
        a_attrs.causal = round != 0;
        a_attrs.p = round == 2 ? 0.3 : 0;
        attention_loss();
        naive_attention(y, lse);
        CHECK_SAME(a_y, y, AB * AT * AH * AD, 1e-13);
        CHECK_SAME(a_lse, lse, AB * AH * AT, 1e-13);
        CHECK(run(PS_OP_attention_backward, &a_attrs,
                  IN(heads_view(a_dy), heads_view(a_q), keys_view(a_k), keys_view(a_v), mask_view(), heads_view(a_y),
                     F64(a_lse, AB, AH, AT)), OUT(heads_view(dq), keys_view(dk), keys_view(dv))) == 0);
        differences(attention_loss, a_q, AB * AT * AH * AD, want);
        CHECK_SAME(dq, want, AB * AT * AH * AD, 1e-8);
        differences(attention_loss, a_k, AB * AH * AS * AD, want);
        CHECK_SAME(dk, want, AB * AH * AS * AD, 1e-8);
        differences(attention_loss, a_v, AB * AH * AS * AD, want);
        CHECK_SAME(dv, want, AB * AH * AS * AD, 1e-8);
    }
    memset(a_mask, 0, AS);                                       /* sample 0 sees nothing */
    a_v[0] = NAN;
    attention_loss();
    CHECK(a_y[0] == 0 && a_lse[0] == -INFINITY);
    a_v[0] = 0;
}

/* Compares the packed op with the plain op on views of the same memory. */
static void test_attention_packed(void)
{
    enum { C = AH * AD, N = AB * AT * C };
    double qkv[3 * N], y[N], dy[N], y2[N], lse[AB * AH * AT], dqkv[3 * N], dqkv2[3 * N];
    fill(qkv, 3 * N, 0.8);
    fill(dy, N, 1.8);
    ps_attrs_attention_packed packed = { .heads = AH, .causal = 1, .p = 0.2, .seed = 1, .step = 7, .op = 4 };
    ps_attrs_attention plain = { .scale = 1 / sqrt(AD), .causal = 1, .p = 0.2, .seed = 1, .step = 7, .op = 4 };
    ps_view all = F64(qkv, AB, AT, 3 * C), part[3], grad[3], lv = F64(lse, AB, AH, AT);
    for (int n = 0; n < 3; n++) {
        part[n] = F64(qkv + n * C, AB, AH, AT, AD);
        part[n].stride[0] = AT * 3 * C, part[n].stride[1] = AD, part[n].stride[2] = 3 * C;
        grad[n] = part[n];
        grad[n].data = dqkv2 + n * C;
    }
    ps_view yv = F64(y, AB, AT, C), dyv = F64(dy, AB, AT, C);
    CHECK(run(PS_OP_attention_packed, &packed, IN(all, absent), OUT(yv, lv)) == 0);
    CHECK(run(PS_OP_attention, &plain, IN(part[0], part[1], part[2], absent), OUT(heads_view(y2), lv)) == 0);
    CHECK_SAME(y, y2, N, 1e-15);
    CHECK(run(PS_OP_attention_packed_backward, &packed, IN(dyv, all, absent, yv, lv),
              OUT(F64(dqkv, AB, AT, 3 * C))) == 0);
    ps_view in[7] = { heads_view(dy), part[0], part[1], part[2], absent, heads_view(y2), lv };
    CHECK(run(PS_OP_attention_backward, &plain, 7, in, 3, grad) == 0);
    CHECK_SAME(dqkv, dqkv2, 3 * N, 1e-15);
}

/* -- optimizers ------------------------------------------------------------------------------------------------- */
/* Computes textbook Adam in double for one parameter and `steps` steps with gradient cos(step). */
static double textbook_adam(double p, int steps, int adamw, double lr, double wd)
{
    double m = 0, v = 0;
    for (int t = 1; t <= steps; t++) {
        double g = cos(t);
        if (adamw) p -= lr * wd * p;
        else g += wd * p;
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        p -= lr * (m / (1 - pow(0.9, t))) / (sqrt(v / (1 - pow(0.999, t))) + 1e-8);
    }
    return p;
}

static void test_adam(void)
{
    for (int adamw = 0; adamw < 2; adamw++) {
        float p[1] = { 1.5f }, grad[1], m[1] = { 0 }, v[1] = { 0 }, m2[1] = { 0 }, v2[1] = { 0 }, master[1] = { 1.5f };
        double pd[1] = { 1.5 }, gd[1], md[1] = { 0 }, vd[1] = { 0 };
        uint16_t low[1] = { ps_f32_to_bf16(1.5f) };
        ps_view pv = F32(p, 1), pdv = F64(pd, 1);
        for (int t = 1; t <= 20; t++) {
            ps_attrs_adam_ a = { .adamw = adamw, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
                                 .weight_decay = 0.1, .grad_scale = 0.5, .bias1 = 1 - pow(0.9, t),
                                 .bias2 = 1 - pow(0.999, t) };
            gd[0] = 2 * cos(t);
            grad[0] = (float)gd[0];
            ps_view g = F32(grad, 1);
            CHECK(run(PS_OP_adam_, &a, IN(pv, pv, g, F32(m, 1), F32(v, 1),
                                          BF16(low, 1), F32(master, 1), g,
                                          F32(m2, 1), F32(v2, 1),
                                          pdv, pdv, F64(gd, 1), F64(md, 1),
                                          F64(vd, 1)), OUT(pv)) == 0);
        }
        double want = textbook_adam(1.5, 20, adamw, 0.01, 0.1), got = p[0];
        CHECK_SAME(pd, &want, 1, 1e-12);
        CHECK_SAME(&got, &want, 1, 1e-6);
        CHECK(master[0] == p[0] && low[0] == ps_f32_to_bf16(master[0]));
    }
}

static void test_sgd(void)
{
    double p[1] = { 1 }, buf[1] = { 0 }, grad[1] = { 0.5 };
    ps_view pv = F64(p, 1), gv = F64(grad, 1), bv = F64(buf, 1);
    ps_attrs_sgd_ a = { .lr = 0.1, .momentum = 0.9, .weight_decay = 0.2, .nesterov = 1, .first = 1, .grad_scale = 2 };
    double want = 1, b = 0;
    for (int t = 0; t < 3; t++) {
        double g = 1 + 0.2 * want;
        b = t == 0 ? g : 0.9 * b + g;
        want -= 0.1 * (g + 0.9 * b);
        a.first = t == 0;
        CHECK(run(PS_OP_sgd_, &a, IN(pv, pv, gv, bv), OUT(pv)) == 0);
    }
    CHECK_SAME(p, &want, 1, 1e-14);
    ps_attrs_sgd_ plain = { .lr = 0.1, .grad_scale = 1 };
    want = p[0] - 0.05;
    CHECK(run(PS_OP_sgd_, &plain, IN(pv, pv, gv, pv), OUT(pv)) == 0);
    CHECK_SAME(p, &want, 1, 1e-14);
}

/* -- random ----------------------------------------------------------------------------------------------------- */
enum { MANY = 40000 };

static void test_dropout(void)
{
    static float x[MANY], y[MANY], z[MANY];
    for (int i = 0; i < MANY; i++) x[i] = 1;
    ps_attrs_dropout a = { .p = 0.25, .seed = 11, .step = 3, .sample = 6, .op = 2, .per_sample = MANY / 4 };
    ps_view xv = F32(x, 4, MANY / 4), yv = F32(y, 4, MANY / 4);
    CHECK(run(PS_OP_dropout, &a, IN(xv, absent), OUT(yv)) == 0);
    int dropped = 0, others = 0;
    for (int i = 0; i < MANY; i++) {
        dropped += y[i] == 0;
        others += y[i] != 0 && y[i] != (float)(1 / 0.75);
    }
    CHECK(abs(dropped - MANY / 4) < 5 * 87);                      /* 5 standard deviations */
    CHECK(others == 0);
    a.sample = 8;                                                 /* samples 2 and 3 of the batch alone */
    ps_view half = F32(x, 2, MANY / 4);
    CHECK(run(PS_OP_dropout, &a, IN(half, absent), OUT(F32(z, 2, MANY / 4))) == 0);
    CHECK(memcmp(z, y + MANY / 2, MANY / 2 * sizeof *z) == 0);
    a.sample = 6, a.first = MANY / 4 + 30;                        /* parts of samples 1 and 2 as flat rows */
    CHECK(run(PS_OP_dropout, &a, IN(F32(x, 1, MANY / 4), absent), OUT(F32(z, 1, MANY / 4))) == 0);
    CHECK(memcmp(z, y + a.first, MANY / 4 * sizeof *z) == 0);
    int64_t rows[] = { 1, 3, 0 };                                 /* half of each of these samples */
    a.first = 0;
    ps_view some = F32(x, 3, MANY / 8), of = F32(z, 3, MANY / 8), numbers = I64(rows, 3);
    CHECK(run(PS_OP_dropout, &a, IN(some, numbers), OUT(of)) == 0);
    for (int k = 0; k < 3; k++)
        CHECK(memcmp(z + k * (MANY / 8), y + rows[k] * (MANY / 8), MANY / 8 * sizeof *z) == 0);
    rows[1] = -1;
    CHECK(run(PS_OP_dropout, &a, IN(some, numbers), OUT(of)) == PS_ERANGE);
    ps_philox r = ps_philox4x32(11, 7ull << 32 | 1, 3ull << 32 | 2);   /* sample 1, element 6 */
    CHECK((ps_unit_f32(r.v[2]) < 0.25f) == (y[MANY / 4 + 6] == 0));
}

static void test_random(void)
{
    static double x[MANY];
    static uint16_t h[MANY];
    static int32_t k[MANY];
    ps_view xv = F64(x, MANY);
    double mean = 0, square = 0;
    ps_attrs_normal_ normal = { .mean = 1, .std = 2, .seed = 4, .offset = 100 };
    CHECK(run(PS_OP_normal_, &normal, IN(xv), OUT(xv)) == 0);
    for (int i = 0; i < MANY; i++) mean += x[i] / MANY;
    for (int i = 0; i < MANY; i++) square += (x[i] - mean) * (x[i] - mean) / MANY;
    CHECK(fabs(mean - 1) < 0.05 && fabs(square - 4) < 0.15);
    double later = x[7];
    normal.offset = 107;
    CHECK(run(PS_OP_normal_, &normal, IN(F64(x, 1)), OUT(xv)) == 0 && x[0] == later);

    ps_attrs_uniform_ uniform = { .low = 1, .high = 2, .seed = 4 };
    CHECK(run(PS_OP_uniform_, &uniform, IN(BF16(h, MANY)), OUT(xv)) == 0);
    int outside = 0, count[5] = { 0 };
    for (int i = 0; i < MANY; i++) outside += !(ps_bf16_to_f32(h[i]) >= 1 && ps_bf16_to_f32(h[i]) < 2);
    CHECK(outside == 0);
    ps_attrs_randint_ randint = { .low = -2, .high = 3, .seed = 8 };
    CHECK(run(PS_OP_randint_, &randint, IN(I32(k, MANY)), OUT(xv)) == 0);
    for (int i = 0; i < MANY; i++) {
        if (k[i] >= -2 && k[i] < 3) count[k[i] + 2]++;
        else outside++;
    }
    CHECK(outside == 0);
    for (int i = 0; i < 5; i++) CHECK(abs(count[i] - MANY / 5) < 400);
}

static void test_sample(void)
{
    enum { N = 3000 };
    static double logits[N * 4];
    static int64_t got[N];
    for (int i = 0; i < N; i++) {
        logits[i * 4] = logits[i * 4 + 2] = log(0.1);
        logits[i * 4 + 1] = log(0.5);
        logits[i * 4 + 3] = log(0.3);
    }
    ps_view x = F64(logits, N, 4), out = I64(got, N);
    ps_attrs_sample a = { .temperature = 1, .top_p = 1, .seed = 3 };
    int count[4] = { 0 };
    CHECK(run(PS_OP_sample, &a, IN(x), OUT(out)) == 0);
    for (int i = 0; i < N; i++) count[got[i]]++;
    CHECK(abs(count[0] - 300) < 90 && abs(count[1] - 1500) < 140);
    CHECK(abs(count[2] - 300) < 90 && abs(count[3] - 900) < 130);
    a.top_p = 0.7;
    memset(count, 0, sizeof count);
    CHECK(run(PS_OP_sample, &a, IN(x), OUT(out)) == 0);
    for (int i = 0; i < N; i++) count[got[i]]++;
    CHECK(count[0] == 0 && count[2] == 0 && abs(count[1] - 1875) < 140);
    a.top_p = 1, a.top_k = 1;
    CHECK(run(PS_OP_sample, &a, IN(x), OUT(out)) == 0 && got[0] == 1 && got[N - 1] == 1);
    a.top_k = 0, a.temperature = 0;
    CHECK(run(PS_OP_sample, &a, IN(x), OUT(out)) == 0 && got[5] == 1);
    logits[4 * (N - 1)] = NAN;
    got[0] = 77;
    CHECK(run(PS_OP_sample, &a, IN(x), OUT(out)) == PS_ERANGE && got[0] == 77);
}

/* -- 16-bit operands go through the same kernels ---------------------------------------------------------------- */
static void test_types(void)
{
    uint16_t a[2] = { ps_f32_to_bf16(1.5f), ps_f32_to_bf16(-2) }, y[2];
    uint16_t b[2] = { ps_f32_to_bf16(0.25f), ps_f32_to_bf16(4) };
    CHECK(run(PS_OP_mul, none, IN(BF16(a, 2), BF16(b, 2)), OUT(BF16(y, 2))) == 0);
    CHECK(ps_bf16_to_f32(y[0]) == 0.375f && ps_bf16_to_f32(y[1]) == -8);
    float wide[2];
    CHECK(run(PS_OP_cast, none, IN(BF16(y, 2)), OUT(F32(wide, 2))) == 0 && wide[1] == -8);
    CHECK(run(PS_OP_cast, none, IN(F32(wide, 2)), OUT(F16(y, 2))) == 0);
    CHECK(ps_f16_to_f32(y[0]) == 0.375f);
}

/* -- regions ---------------------------------------------------------------------------------------------------- */
static void test_regions(void)
{
    ps_backend *meta;
    void *p = NULL, *q = NULL;
    size_t sizes[4] = { 1, 4096, (size_t)3 << 20, ((size_t)5 << 20) + 123 };
    for (int i = 0; i < 4; i++) {
        CHECK(ref->region_new(ref, sizes[i], &p) == 0 && p && (uintptr_t)p % 64 == 0);
        CHECK(sizes[i] < (size_t)2 << 20 || (uintptr_t)p % ((size_t)2 << 20) == 0);
        memset(p, 1, sizes[i]);
        ref->region_free(ref, p, sizes[i]);
    }
    ps_test_fail_alloc(0, 1);
    CHECK(ref->region_new(ref, 4096, &p) == PS_ENOMEM && strstr(ps_error_message(), "4096") != NULL);
    ps_test_fail_alloc(-1, 0);
    CHECK(ref->region_new(ref, SIZE_MAX / 4, &p) == PS_ENOMEM);
    int64_t left = ref->bytes_available(ref);
    CHECK(left > 1 << 20 && left < INT64_MAX);

    CHECK(ps_backend_meta_open(&meta) == 0);
    CHECK(meta->no_data && meta->bytes_available(meta) == INT64_MAX);
    CHECK(meta->region_new(meta, (size_t)1 << 40, &p) == 0 && meta->region_new(meta, 1, &q) == 0);
    CHECK(p && (char *)q >= (char *)p + ((size_t)1 << 40));
    meta->region_free(meta, p, (size_t)1 << 40);
    meta->close(meta);
}

static void test_table_is_full(void)
{
    int missing = 0;
    for (int op = 0; op < PS_OP_COUNT; op++) missing += !ref->kernel[op];
    CHECK(missing == 19);                   /* views (reshape, permute, slice, expand), to_device, and the ops of
                                             * ranks */
    CHECK(!ref->kernel[PS_OP_reshape] && !ref->kernel[PS_OP_permute]);
    CHECK(!ref->kernel[PS_OP_slice] && !ref->kernel[PS_OP_expand] && !ref->kernel[PS_OP_to_device]);
    CHECK(!ref->kernel[PS_OP_all_reduce] && !ref->kernel[PS_OP_all_gather]);
    CHECK(!ref->kernel[PS_OP_reduce_scatter] && !ref->kernel[PS_OP_broadcast]);
}

int main(void)
{
    if (ps_backend_ref_open(&ref) < 0) return 1;
    test_table_is_full();
    test_copies();
    test_binary();
    test_unary();
    test_reduce();
    test_matmul();
    test_cross_entropy();
    test_lm_loss();
    test_tables();
    test_norms();
    test_attention();
    test_attention_packed();
    test_adam();
    test_sgd();
    test_dropout();
    test_random();
    test_sample();
    test_types();
    test_regions();
    ref->close(ref);
    return report();
}
