/* SPDX-License-Identifier: BSD-3-Clause
 * A model cut into stages, from C: boundaries between stages give the bits of the whole model. */
#include "check.h"
#include <string.h>
#include "tensor/tensor.h"

enum { ROWS = 24, C = 32, BLOCKS = 4 };

static ps_ctx *ctx;
static int32_t dtype;

/* Numbers of many bits, so that every rounding shows. */
static ps_tensor *drawn(int seed, int ndim, const int64_t *shape, double scale)
{
    ps_tensor *t = NULL, *wide = NULL, *out[PS_MAX_OUT] = { NULL };
    ps_attrs_normal_ normal = { .std = scale, .seed = (uint64_t)seed };
    ps_attrs_cast cast = { .dtype = dtype };
    OK(ps_tensor_new(ctx, PS_F32, 0, ndim, shape, &wide));
    OK(ps_apply(ctx, PS_OP_normal_, 1, &wide, &normal, sizeof normal, out));
    ps_tensor_release(out[0]);
    out[0] = NULL;
    OK(ps_apply(ctx, PS_OP_cast, 1, &wide, &cast, sizeof cast, out));
    ps_tensor_release(wide);
    t = out[0];
    OK(ps_tensor_keep(t));
    return t;
}

static ps_tensor *run(int op, const void *attrs, int nbytes, int n, ps_tensor *const *in)
{
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, op, n, in, attrs, nbytes, out));
    return out[0];
}

typedef struct block { ps_tensor *gain, *shift, *w, *b; } block;
static block blocks[BLOCKS];
static ps_tensor *x0;

static ps_tensor *parameter(int seed, int ndim, const int64_t *shape, double scale)
{
    ps_tensor *t = drawn(seed, ndim, shape, scale);
    OK(ps_tensor_require_grad(t, 1));
    t->flags |= PS_T_GRAD_F32;
    return t;
}

static void make_model(void)
{
    static const int64_t rows[] = { ROWS, C }, square[] = { C, C }, row[] = { C };
    x0 = drawn(1, 2, rows, 1);
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i].gain = parameter(10 * i + 2, 1, row, 1);
        blocks[i].shift = parameter(10 * i + 3, 1, row, 0.1);
        blocks[i].w = parameter(10 * i + 4, 2, square, 0.2);
        blocks[i].b = parameter(10 * i + 5, 1, row, 0.1);
    }
}

static ps_tensor **parameter_at(int i)
{
    block *b = &blocks[i / 4];
    ps_tensor **const all[] = { &b->gain, &b->shift, &b->w, &b->b };
    return all[i % 4];
}

static void free_model(void)
{
    for (int i = 0; i < 4 * BLOCKS; i++) ps_tensor_release(*parameter_at(i));
    ps_tensor_release(x0);
}

/* x + linear(norm(x)): the gradient of x is added up inside the norm's kernel. */
static ps_tensor *through(const block *b, ps_tensor *x)
{
    ps_attrs_layer_norm norm = { .eps = 1e-5 };
    ps_attrs_linear linear = { .out_in = 0 };
    ps_tensor *h = run(PS_OP_layer_norm, &norm, sizeof norm, 3, (ps_tensor *[]){ x, b->gain, b->shift });
    ps_tensor *y = run(PS_OP_linear, &linear, sizeof linear, 4, (ps_tensor *[]){ h, b->w, b->b, x });
    ps_tensor_release(h);
    return y;
}

static ps_tensor *loss_of(ps_tensor *y)
{
    static const int32_t none;
    ps_attrs_sum all = { 0 };
    ps_tensor *square = run(PS_OP_mul, &none, sizeof none, 2, (ps_tensor *[]){ y, y });
    ps_tensor *loss = run(PS_OP_sum, &all, sizeof all, 1, &square);
    ps_tensor_release(square);
    return loss;
}

/* The gradients of all parameters; stages of `size` blocks each. */
static void gradients(int size, float (*out)[C * C])
{
    enum { MOST = BLOCKS };
    ps_tensor *in[MOST] = { NULL }, *last[MOST] = { NULL }, *x = x0;
    int n = BLOCKS / size;
    int64_t segment;
    ps_tensor_retain(x);
    for (int s = 0; s < n; s++) {
        if (s > 0) {
            ps_tensor *received = NULL;
            OK(ps_tensor_detach(x, &received));
            ps_tensor_release(x);
            OK(ps_boundary(ctx, 1, &received, &in[s]));
            ps_tensor_release(received);
            ps_tensor_retain(x = in[s]);
        }
        for (int i = s * size; i < (s + 1) * size; i++) {
            ps_tensor *y = through(&blocks[i], x);
            ps_tensor_release(x);
            x = y;
        }
        last[s] = x;
        ps_tensor_retain(x);
    }
    ps_tensor_release(last[n - 1]);
    last[n - 1] = loss_of(x);
    ps_tensor_release(x);
    ps_tensor *gradient = NULL;
    for (int s = n - 1; s >= 0; s--) {
        OK(ps_backward_begin_n(ctx, 1, &last[s], &gradient, NULL));
        if (gradient) ps_tensor_release(gradient);
        gradient = NULL;
        CHECK(ps_backward_next(ctx, &segment) == 0);
        ps_tensor_release(last[s]);
        if (s == 0) break;
        OK(ps_boundary_take(ctx, 1, &in[s], &gradient));
        CHECK(gradient && ps_tensor_exclusive(gradient));
        ps_tensor *again;
        OK(ps_boundary_take(ctx, 1, &in[s], &again));
        CHECK(!again);
        ps_tensor_release(in[s]);
    }
    for (int i = 0; i < 4 * BLOCKS; i++) {
        ps_tensor *p = *parameter_at(i), *grad = ps_tensor_get_grad(p);
        CHECK(grad && grad->dtype_ == PS_F32);
        OK(ps_tensor_read(grad, out[i], ps_tensor_nbytes(grad)));
        OK(ps_tensor_set_grad(p, NULL));
    }
}

static void test_cuts(int type)
{
    static float whole[4 * BLOCKS][C * C], cut[4 * BLOCKS][C * C];
    dtype = type;
    make_model();
    memset(whole, 0, sizeof whole);
    gradients(BLOCKS, whole);
    CHECK(whole[0][0] != 0);
    for (int size = 1; size < BLOCKS; size *= 2) {
        memset(cut, 0, sizeof cut);
        gradients(size, cut);
        CHECK(!memcmp(cut, whole, sizeof cut));
    }
    free_model();
}

static void test_boundary_refusals(void)
{
    static const int64_t row[] = { C };
    ps_tensor *a, *out[2] = { NULL, NULL }, *got[2];
    int64_t segment;
    dtype = PS_F32;
    a = drawn(1, 1, row, 1);
    FAILS(ps_boundary(ctx, 0, &a, out), PS_EINVAL, "0 tensors");
    OK(ps_tensor_require_grad(a, 1));
    FAILS(ps_boundary(ctx, 1, &a, out), PS_EINVAL, "history");
    OK(ps_tensor_require_grad(a, 0));
    /* No gradients, no node: a boundary of an evaluation is a header. */
    int enabled = ps_set_grad_enabled(ctx, 0);
    OK(ps_boundary(ctx, 1, &a, out));
    CHECK(!out[0]->node);
    ps_set_grad_enabled(ctx, enabled);
    ps_tensor_release(out[0]);
    /* An input that nothing reads has no gradient. */
    OK(ps_boundary(ctx, 2, (ps_tensor *[]){ a, a }, out));
    ps_tensor *loss = loss_of(out[0]);
    OK(ps_backward_begin_n(ctx, 1, &loss, NULL, NULL));
    FAILS(ps_boundary_take(ctx, 2, out, got), PS_ESTATE, "walk");
    CHECK(ps_backward_next(ctx, &segment) == 0);
    OK(ps_boundary_take(ctx, 2, out, got));
    CHECK(got[0] && !got[1]);
    ps_tensor_release(got[0]);
    ps_tensor_release(loss);
    loss = loss_of(out[1]);
    FAILS(ps_backward_begin_n(ctx, 1, &loss, NULL, &segment), PS_ESTATE, "boundary of a stage a second time");
    ps_tensor_release(loss);
    ps_tensor_release(out[0]), ps_tensor_release(out[1]);
    ps_tensor_release(a);
}

int main(void)
{
    OK(ps_ctx_new(&ctx));
    test_cuts(PS_F32);
    test_cuts(PS_BF16);
    test_boundary_refusals();
    ps_memory_info info;
    OK(ps_memory_get(ctx, 0, &info));
    CHECK(info.used == 0);
    ps_ctx_free(ctx);
    return end_checks();
}
