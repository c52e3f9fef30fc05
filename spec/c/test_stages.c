/* SPDX-License-Identifier: BSD-3-Clause
 * A model cut into stages, from C: boundaries between stages give the bits of the whole model, and so does a backward
 * whose weight gradients come later. */
#include "check.h"
#include <string.h>
#include "tensor/tensor.h"

enum { ROWS = 24, C = 32, BLOCKS = 4 };

static ps_ctx *ctx;
static int32_t dtype;

/* Returns numbers with many significant bits, so that every rounding is visible. */
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

/* Computes x + linear(norm(x)), in which the norm's kernel accumulates the gradient of x. */
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

/* Computes the gradients of all parameters with stages of `size` blocks. */
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
    /* Without gradients there is no node, so a boundary in an evaluation is only a header. */
    int enabled = ps_set_grad_enabled(ctx, 0);
    OK(ps_boundary(ctx, 1, &a, out));
    CHECK(!out[0]->node);
    ps_set_grad_enabled(ctx, enabled);
    ps_tensor_release(out[0]);
    /* An input that is not read has no gradient. */
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

/* -- backward in two parts ---------------------------------------------------------------------------------------- */
enum { WIDE = 256, VOCAB = 300, MICROS = 3, LEAVES = 12 };

typedef struct net {
    ps_tensor *leaf[LEAVES];
} net;
enum { TABLE, GAIN, SHIFT, WEIGHT, BIAS, W1, B1, W2, B2, TWICE, GAIN2, PLAIN };

static ps_step *step;
static net model;

static void make_net(void)
{
    static const int64_t table[] = { VOCAB, WIDE }, square[] = { WIDE, WIDE }, up[] = { WIDE, 2 * WIDE },
                         down[] = { 2 * WIDE, WIDE }, row[] = { WIDE }, row2[] = { 2 * WIDE };
    const int64_t *const shape[LEAVES] = { table, row, row, square, row, up, row2, down, row, square, row, square };
    for (int i = 0; i < LEAVES; i++) {
        bool matrix = i == TABLE || i == WEIGHT || i == W1 || i == W2 || i == TWICE || i == PLAIN;
        model.leaf[i] = parameter(100 + i, matrix ? 2 : 1, shape[i], matrix ? 0.06 : 0.5);
    }
}

static ps_tensor *indices(int seed)
{
    const int64_t rows[] = { (int64_t)PS_CHEAP_MIN_NBYTES / WIDE / ps_dtype_bytes(dtype) };   /* norms are cheap */
    ps_tensor *t = NULL, *out[PS_MAX_OUT] = { NULL };
    ps_attrs_randint_ attrs = { .high = VOCAB, .seed = (uint64_t)seed };
    OK(ps_tensor_new(ctx, PS_I64, 0, 1, rows, &t));
    OK(ps_apply(ctx, PS_OP_randint_, 1, &t, &attrs, sizeof attrs, out));
    ps_tensor_release(out[0]);
    return t;
}

static ps_tensor *then(ps_tensor *spent, ps_tensor *y)
{
    ps_tensor_release(spent);
    return y;
}

static ps_tensor *norm_of(ps_tensor *x, int gain, int shift)
{
    ps_attrs_layer_norm norm = { .eps = 1e-5 };
    return run(PS_OP_layer_norm, &norm, sizeof norm, 3,
               (ps_tensor *[]){ x, model.leaf[gain], shift < 0 ? NULL : model.leaf[shift] });
}

/* Computes x + linear(norm(x)), a cheap tensor that the product keeps, and then the same with an mlp. */
static ps_tensor *body_of(ps_tensor *x)
{
    ps_attrs_linear linear = { .out_in = 0 };
    ps_attrs_mlp mlp = { .out_in = 0 };
    ps_tensor **p = model.leaf, *h = norm_of(x, GAIN, SHIFT);
    ps_tensor *y = then(h, run(PS_OP_linear, &linear, sizeof linear, 4, (ps_tensor *[]){ h, p[WEIGHT], p[BIAS], x }));
    h = norm_of(y, GAIN2, -1);
    return then(y, then(h, run(PS_OP_mlp, &mlp, sizeof mlp, 6, (ps_tensor *[]){ h, p[W1], p[B1], p[W2], p[B2], y })));
}

/* Computes (x w) w; x w', where w' is computed from w alone, between products with w itself; and a residual of a
 * product's input. */
static ps_tensor *products_of(ps_tensor *x)
{
    static const ps_attrs_matmul none;
    static const ps_attrs_linear plain;
    static const int32_t nothing;
    ps_attrs_affine third = { .alpha = 0.25, .beta = -0.0 };
    ps_tensor **p = model.leaf, *y = run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ x, p[TWICE] });
    y = then(y, run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ y, p[TWICE] }));
    ps_tensor *first = run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ x, p[PLAIN] });
    ps_tensor *made = run(PS_OP_affine, &third, sizeof third, 1, &p[PLAIN]);
    ps_tensor *z = then(first, run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ first, made }));
    ps_tensor *again = run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ z, p[PLAIN] });
    z = then(z, then(again, run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ again, made })));
    ps_tensor_release(made);
    y = then(y, then(z, run(PS_OP_add, &nothing, sizeof nothing, 2, (ps_tensor *[]){ y, z })));
    y = then(y, run(PS_OP_mul, &nothing, sizeof nothing, 2, (ps_tensor *[]){ y, p[GAIN2] }));
    z = run(PS_OP_matmul, &none, sizeof none, 2, (ps_tensor *[]){ y, p[TWICE] });
    return then(y, then(z, run(PS_OP_linear, &plain, sizeof plain, 4, (ps_tensor *[]){ z, p[WEIGHT], NULL, y })));
}

typedef struct segment { int64_t id; ps_tensor *in; } segment;
typedef struct part { ps_tensor *in, *out, *received, *target; segment again; } part;
static part parts[2][MICROS];
static bool recomputes;

static ps_tensor *recomputed(part *s, ps_tensor *x)
{
    if (!recomputes) return body_of(x);
    int enabled = ps_set_grad_enabled(ctx, 0);
    ps_segment_begin(ctx);
    ps_tensor *y = body_of(x);
    ps_set_grad_enabled(ctx, enabled);
    OK(ps_segment_new(ctx, 1, &x, 1, &y, &s->again.id));
    s->again.in = x;
    ps_tensor_retain(x);
    return y;
}

/* Virtual stage 0 has the embedding's rows and the body. Virtual stage 1 has the products, and the loss with the
 * embedding as its head. */
static void forward(int v, int micro)
{
    part *s = &parts[v][micro];
    if (v == 0) {
        ps_attrs_embedding rows = { .padding_idx = -1 };
        ps_tensor *index = indices(7 + micro);
        ps_tensor *x = run(PS_OP_embedding, &rows, sizeof rows, 2, (ps_tensor *[]){ model.leaf[TABLE], index });
        ps_tensor_release(index);
        s->out = then(x, recomputed(s, x));
        return;
    }
    ps_attrs_lm_loss loss = { .ignore_index = -100, .reduction = 1 };
    ps_tensor *received, *target = indices(70 + micro);
    OK(ps_tensor_detach(parts[0][micro].out, &received));
    OK(ps_boundary(ctx, 1, &received, &s->in));
    ps_tensor_release(received);
    ps_tensor *y = products_of(s->in), *h = norm_of(y, GAIN, -1);
    s->out = run(PS_OP_lm_loss, &loss, sizeof loss, 4, (ps_tensor *[]){ h, model.leaf[TABLE], target, NULL });
    ps_tensor_release(y), ps_tensor_release(h), ps_tensor_release(target);
}

static void backward(int v, int micro)
{
    part *s = &parts[v][micro];
    int64_t id = 0;
    int rc = ps_backward_begin_n(ctx, 1, &s->out, v == 0 ? &s->received : NULL, NULL);
    OK(rc);
    if (v == 0) ps_tensor_release(s->received);
    while (rc == 0 && (rc = ps_backward_next(ctx, &id)) == 1) {
        CHECK(id == s->again.id);
        int enabled = ps_set_grad_enabled(ctx, 1);
        ps_tensor *y = body_of(s->again.in);
        ps_set_grad_enabled(ctx, enabled);
        rc = ps_backward_splice(ctx, 1, &y);
        ps_tensor_release(y);
    }
    OK(rc);
    if (v == 0 && s->again.in) ps_tensor_release(s->again.in);
    s->again.in = NULL;
    ps_tensor_release(s->out);
    if (v == 0) return;
    OK(ps_boundary_take(ctx, 1, &s->in, &parts[0][micro].received));
    ps_tensor_release(s->in);
}

static void act(const ps_action *a)
{
    ps_action_how how = { .weight = 1, .scale = 1 };
    OK(ps_step_next(step, a->kind, &how));
    if (a->kind == PS_ACT_FORWARD) forward(a->vstage, a->micro);
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) backward(a->vstage, a->micro);
    if (a->kind == PS_ACT_WEIGHT) OK(ps_backward_weights(ctx, NULL));
    OK(ps_step_done(step));
}

static float sums[3][LEAVES][2 * WIDE * VOCAB];

static void perform(int n, const ps_action *table, float (*out)[2 * WIDE * VOCAB])
{
    int32_t trace;
    ps_step_config c = { .actions = table, .n_actions = n, .trace = PS_TRACE_UNKNOWN };
    OK(ps_step_begin(step, &c));
    for (int i = 0; i < n; i++) act(&table[i]);
    OK(ps_step_end(step, &trace));
    for (int i = 0; i < LEAVES; i++) {
        ps_tensor *grad = ps_tensor_get_grad(model.leaf[i]);
        if (!CHECK(grad && grad->dtype_ == PS_F32)) continue;
        OK(ps_tensor_read(grad, out[i], ps_tensor_nbytes(grad)));
        OK(ps_tensor_set_grad(model.leaf[i], NULL));
    }
}

#define F(v, m) { PS_ACT_FORWARD, v, m }
#define B(v, m) { PS_ACT_BACKWARD, v, m }
#define I(v, m) { PS_ACT_INPUT, v, m }
#define W(v, m) { PS_ACT_WEIGHT, v, m }
#define END { PS_ACT_UPDATE, 0, 0 }
#define COUNT(table) (int)(sizeof table / sizeof *table)

/* Both virtual stages use the leaf TABLE and two gains. All of these tables add to their gradients in the same
 * order. */
static const ps_action whole_steps[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), F(0, 1), F(1, 1), B(1, 1), B(0, 1),
                                         F(0, 2), F(1, 2), B(1, 2), B(0, 2), END },
    at_once[] = { F(0, 0), F(1, 0), I(1, 0), W(1, 0), I(0, 0), W(0, 0), F(0, 1), F(1, 1), I(1, 1), W(1, 1), I(0, 1),
                  W(0, 1), F(0, 2), F(1, 2), I(1, 2), W(1, 2), I(0, 2), W(0, 2), END },
    much_later[] = { F(0, 0), F(0, 1), F(1, 0), I(1, 0), I(0, 0), F(1, 1), I(1, 1), F(0, 2), I(0, 1), F(1, 2), I(1, 2),
                     W(1, 0), W(0, 0), I(0, 2), W(1, 1), W(0, 1), W(1, 2), W(0, 2), END };

static void test_two_parts(int type, bool again)
{
    ps_chunk_config config = { .prefetch = 1 };
    dtype = type;
    recomputes = again;
    OK(ps_policy_find("plan", &config.policy));
    OK(ps_step_new(ctx, &step));
    OK(ps_engine_open(ctx, step, &config, NULL));
    make_net();
    memset(sums, 0, sizeof sums);
    perform(COUNT(whole_steps), whole_steps, sums[0]);
    perform(COUNT(at_once), at_once, sums[1]);
    perform(COUNT(much_later), much_later, sums[2]);
    for (int i = 0; i < LEAVES; i++) {
        CHECK(sums[0][i][1] != 0);
        for (int k = 1; k < 3; k++)
            if (!CHECK(!memcmp(sums[0][i], sums[k][i], sizeof sums[0][i]))) printf("  leaf %d, table %d\n", i, k);
    }
    for (int i = 0; i < LEAVES; i++) ps_tensor_release(model.leaf[i]);
    ps_engine_close(ctx);
    ps_step_free(step);
}

int main(void)
{
    OK(ps_ctx_new(&ctx));
    test_cuts(PS_F32);
    test_cuts(PS_BF16);
    test_boundary_refusals();
    test_two_parts(PS_F32, false);
    test_two_parts(PS_BF16, false);
    test_two_parts(PS_BF16, true);
    ps_memory_info info;
    OK(ps_memory_get(ctx, 0, &info));
    CHECK(info.used == 0);
    ps_ctx_free(ctx);
    return end_checks();
}
