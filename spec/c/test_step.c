/* SPDX-License-Identifier: BSD-3-Clause
 * A step's table from C. Forwards and backwards of several micro-batches and virtual stages give the same bits in other
 * orders, and calls that do not fit are refused. */
#include "check.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "tensor/tensor.h"

enum { N = 64, PARAMS = 2, STEPS = 3, MICROS = 2 };

static ps_ctx *ctx;
static ps_step *step;
static ps_tensor *w[PARAMS];

static ps_tensor *drawn(int seed, bool bf16)
{
    int64_t numel = N;
    double values[N];
    ps_tensor *t = NULL;
    OK(ps_tensor_new(ctx, bf16 ? PS_BF16 : PS_F32, 0, 1, &numel, &t));
    for (int i = 0; i < N; i++) values[i] = (double)((i * 37 + seed * 101) % 64 - 31) / 32;
    OK(ps_tensor_write_f64(t, 0, N, values));
    OK(ps_tensor_keep(t));
    return t;
}

static ps_tensor *op2(int op, ps_tensor *a, ps_tensor *b)
{
    static const int32_t none;
    ps_tensor *in[] = { a, b }, *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, op, 2, in, &none, sizeof none, out));
    return out[0];
}

/* Returns the loss of virtual stage v for a micro-batch, which is the sum of (w x)^2. */
static ps_tensor *loss_of(int v, int micro)
{
    ps_tensor *x = drawn(7 + 2 * micro + v, w[v]->dtype_ == PS_BF16), *y = op2(PS_OP_mul, w[v], x),
              *z = op2(PS_OP_mul, y, y), *out[PS_MAX_OUT] = { NULL };
    ps_attrs_sum attrs = { 0 };
    OK(ps_apply(ctx, PS_OP_sum, 1, &z, &attrs, sizeof attrs, out));
    ps_tensor_release(x), ps_tensor_release(y), ps_tensor_release(z);
    return out[0];
}

static ps_param state_of(int v, bool bf16)
{
    ps_param p = { .param = w[v], .unit = v, .vstage = v, .number = v, .n_states = 2 };
    struct { int kind, dtype; ps_tensor **to; } rest[] = { { ps_kind_state("exp_avg"), PS_F32, &p.state[0] },
        { ps_kind_state("exp_avg_sq"), PS_F32, &p.state[1] }, { PS_KIND_PARAM_FP32, PS_F32, &p.master },
        { PS_KIND_GRAD, PS_F32, &p.grad } };
    int32_t chunk;
    OK(ps_engine_chunk_new(ctx, PS_KIND_PARAM, 0, v, w[v]->dtype_, 4096, &chunk));
    OK(ps_engine_adopt(ctx, w[v], chunk, 0, "w"));
    OK(ps_tensor_require_grad(w[v], 1));
    for (int i = 0; i < 4; i++) {
        if (i == 2 && !bf16) {
            ps_tensor_retain(p.master = w[v]);
            continue;
        }
        OK(ps_engine_chunk_new(ctx, rest[i].kind, 0, v, rest[i].dtype, 4096, &chunk));
        OK(ps_engine_tensor_new(ctx, w[v], rest[i].dtype, 0, chunk, 0, NULL, rest[i].to));
    }
    if (bf16) {
        static const int32_t none;
        ps_tensor *in[] = { p.master, w[v] }, *out[PS_MAX_OUT] = { NULL };
        int enabled = ps_set_grad_enabled(ctx, 0);
        OK(ps_apply(ctx, PS_OP_copy_, 2, in, &none, sizeof none, out));
        ps_set_grad_enabled(ctx, enabled);
        ps_tensor_release(out[0]);
    }
    return p;
}

static void perform(const ps_action *a, ps_tensor *(*loss)[MICROS], double *norm)
{
    ps_update_group group = { .scale = 1, .op = PS_OP_adam_, .n_states = 2, .n_needed = 2 };
    ps_attrs_adam_ settings = { .adamw = 1, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
                                .weight_decay = 0.1 };
    memcpy(group.attrs, &settings, sizeof settings);
    ps_action_how how = { .weight = 1, .scale = 0.5, .groups = &group, .n_groups = 1 };
    ps_tensor **root = &loss[a->vstage][a->micro];
    int64_t segment;
    OK(ps_step_next(step, a->kind, &how));
    if (a->kind == PS_ACT_FORWARD) *root = loss_of(a->vstage, a->micro);
    if (a->kind == PS_ACT_WEIGHT) OK(ps_backward_weights(ctx, NULL));
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) {
        OK(ps_backward_begin_n(ctx, 1, root, NULL, &segment));
        ps_tensor_release(*root);
    }
    if (a->kind == PS_ACT_NORM) OK(ps_engine_sq_norm(ctx, norm));
    if (a->kind == PS_ACT_UPDATE) OK(ps_engine_update(ctx));
    OK(ps_step_done(step));
}

typedef struct result { double norm[STEPS], w[PARAMS][N]; } result;

static result train(int n, const ps_action *table, bool bf16)
{
    ps_chunk_config config = { .prefetch = 1 };
    ps_param params[PARAMS];
    result r;
    OK(ps_policy_find("plan", &config.policy));
    OK(ps_step_new(ctx, &step));
    OK(ps_engine_open(ctx, step, &config, NULL));
    for (int v = 0; v < PARAMS; v++) w[v] = drawn(v, bf16), params[v] = state_of(v, bf16);
    OK(ps_engine_params(ctx, PARAMS, params, PARAMS, 1));
    int32_t trace = PS_TRACE_UNKNOWN;
    for (int i = 0; i < STEPS; i++) {
        ps_tensor *loss[PARAMS][MICROS];
        ps_step_config c = { .actions = table, .n_actions = n, .trace = trace };
        OK(ps_step_begin(step, &c));
        for (int k = 0; k < n; k++) perform(&table[k], loss, &r.norm[i]);
        CHECK(ps_step_look(step)->weight == MICROS);          /* for any number of virtual stages */
        OK(ps_step_end(step, &trace));
        CHECK(trace >= 0);
    }
    for (int v = 0; v < PARAMS; v++) {
        OK(ps_tensor_read_f64(w[v], 0, N, r.w[v]));
        ps_tensor *all[] = { w[v], params[v].master, params[v].state[0], params[v].state[1], params[v].grad };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) if (all[k]) ps_tensor_release(all[k]);
    }
    ps_engine_close(ctx);
    ps_step_free(step);
    return r;
}

#define F(v, m) { PS_ACT_FORWARD, v, m }
#define B(v, m) { PS_ACT_BACKWARD, v, m }
#define I(v, m) { PS_ACT_INPUT, v, m }
#define W(v, m) { PS_ACT_WEIGHT, v, m }
#define R(v) { PS_ACT_REDUCE, v, 0 }
#define END { PS_ACT_NORM, 0, 0 }, { PS_ACT_UPDATE, 0, 0 }

static void test_orders(bool bf16)
{
    static const ps_action plain[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), F(0, 1), F(1, 1), B(1, 1), B(0, 1), END },
        forwards_first[] = { F(0, 0), F(0, 1), F(1, 0), F(1, 1), B(1, 0), B(1, 1), B(0, 0), B(0, 1), END },
        one_ahead[] = { F(0, 0), F(1, 0), F(0, 1), B(1, 0), F(1, 1), B(1, 1), B(0, 0), B(0, 1), END },
        apart[] = { F(0, 0), F(0, 1), B(0, 0), B(0, 1), F(1, 0), B(1, 0), F(1, 1), B(1, 1), END },
        later[] = { F(0, 0), F(1, 0), I(1, 0), F(0, 1), I(0, 0), F(1, 1), I(1, 1), W(1, 0), W(0, 0), I(0, 1), W(1, 1),
                    R(1), W(0, 1), R(0), END },
        mixed[] = { F(0, 0), F(1, 0), I(1, 0), W(1, 0), F(0, 1), B(0, 0), F(1, 1), I(1, 1), I(0, 1), W(0, 1), W(1, 1),
                    END };
    enum { COUNT = sizeof plain / sizeof *plain };
    static const struct { const ps_action *table; int n; } others[] = {
        { forwards_first, COUNT }, { one_ahead, COUNT }, { apart, COUNT }, { later, sizeof later / sizeof *later },
        { mixed, sizeof mixed / sizeof *mixed }
    };
    result first = train(COUNT, plain, bf16);
    CHECK(first.norm[0] > 0 && memcmp(first.w[0], first.w[1], sizeof first.w[0]));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        result r = train(others[i].n, others[i].table, bf16);
        CHECK(!memcmp(r.norm, first.norm, sizeof r.norm) && !memcmp(r.w, first.w, sizeof r.w));
    }
}

/* Two roots in one walk have the same gradients as two walks. */
static void test_roots(void)
{
    double grads[2][PARAMS][N];
    int64_t segment;
    for (int v = 0; v < PARAMS; v++) {
        w[v] = drawn(v, false);
        OK(ps_tensor_require_grad(w[v], 1));
    }
    for (int at_once = 0; at_once < 2; at_once++) {
        ps_tensor *roots[PARAMS] = { loss_of(0, 0), loss_of(1, 0) };
        if (at_once) OK(ps_backward_begin_n(ctx, PARAMS, roots, NULL, &segment));
        for (int v = 0; v < PARAMS; v++) {
            if (!at_once) OK(ps_backward_begin_n(ctx, 1, &roots[v], NULL, &segment));
            OK(ps_tensor_read_f64(ps_tensor_get_grad(w[v]), 0, N, grads[at_once][v]));
            OK(ps_tensor_set_grad(w[v], NULL));
        }
        FAILS(ps_backward_begin_n(ctx, PARAMS, roots, NULL, &segment), PS_ESTATE, "second time");
        for (int v = 0; v < PARAMS; v++) {
            OK(ps_tensor_set_grad(w[v], NULL));
            ps_tensor_release(roots[v]);
        }
    }
    CHECK(!memcmp(grads[0], grads[1], sizeof grads[0]));
    FAILS(ps_backward_begin_n(ctx, 0, NULL, NULL, &segment), PS_EINVAL, "0 tensors");
    FAILS(ps_backward_begin_n(ctx, 1, (ps_tensor *[]){ NULL }, NULL, &segment), PS_EINVAL, "a tensor to begin");
    for (int v = 0; v < PARAMS; v++) ps_tensor_release(w[v]);
}

static void refused(int n, const ps_action *table, const char *word)
{
    ps_step_config c = { .actions = table, .n_actions = n, .trace = PS_TRACE_UNKNOWN };
    FAILS(ps_step_begin(step, &c), PS_EINVAL, word);
    CHECK(!ps_step_look(step)->open);
}

/* Tables whose sums would depend on their order, and actions that do not fit their tables. */
static void test_tables(void)
{
#define REFUSED(word, ...) refused((int)(sizeof (ps_action[]){ __VA_ARGS__ } / sizeof(ps_action)), \
                                   (ps_action[]){ __VA_ARGS__ }, word)
    REFUSED("never computes", F(0, 0), B(0, 0), F(0, 1), I(0, 1), END);
    REFUSED("out of turn", F(0, 0), W(0, 0), I(0, 0), END);
    REFUSED("out of turn", F(0, 0), F(0, 1), I(0, 0), I(0, 1), W(0, 1), W(0, 0), END);
    REFUSED("out of turn", F(0, 0), F(0, 1), I(0, 0), B(0, 1), W(0, 0), END);
    REFUSED("after the norm", F(0, 0), I(0, 0), END, W(0, 0));
    REFUSED("has no backward", F(0, 0), END);
    REFUSED("micro-batch 4", F(0, 4), B(0, 4), END);
    static const ps_action table[] = { F(0, 0), F(1, 0), I(1, 0), W(1, 0), B(0, 0), { PS_ACT_UPDATE, 0, 0 } };
    ps_step_config c = { .actions = table, .n_actions = 6, .trace = PS_TRACE_UNKNOWN };
    ps_rng *rng = ps_rng_get(ctx);
    rng->op = 5, rng->sample = 6;
    OK(ps_step_begin(step, &c));
    FAILS(ps_backward_weights(ctx, NULL), PS_ESTATE, "not a backward of weights");
    OK(ps_step_next(step, PS_ACT_FORWARD, &(ps_action_how){ .numbered = 1, .first_op = 40, .sample = 1000 }));
    CHECK(rng->op == 40 && rng->sample == 1000);
    ps_step_abandon(step);
    CHECK(rng->op == 5);
    OK(ps_step_next(step, PS_ACT_FORWARD, &(ps_action_how){ .numbered = 1, .first_op = 40, .sample = 1000 }));
    OK(ps_step_done(step));
    OK(ps_step_next(step, PS_ACT_FORWARD, NULL));
    CHECK(rng->op == 40 && rng->sample == 1000);
    ps_tensor *loss = loss_of(1, 0);
    int64_t segment;
    OK(ps_step_done(step));
    FAILS(ps_step_next(step, PS_ACT_WEIGHT, NULL), PS_ESTATE, "expects the backward of inputs of micro-batch 1");
    FAILS(ps_step_next(step, PS_ACT_INPUT, &(ps_action_how){ .overlap = 1 }), PS_EINVAL, "of a virtual stage");
    OK(ps_step_next(step, PS_ACT_INPUT, &(ps_action_how){ .weight = 3 }));
    OK(ps_backward_begin_n(ctx, 1, &loss, NULL, &segment));
    CHECK(!ps_tensor_get_grad(w[1]));
    ps_tensor *second = loss_of(1, 0);
    FAILS(ps_backward_begin_n(ctx, 1, &second, NULL, &segment), PS_ESTATE, "second time");
    ps_tensor_release(second);
    ps_tensor_release(loss);
    OK(ps_step_done(step));
    CHECK(ps_step_look(step)->weight == 3 && ps_step_look(step)->micro == 0);
    OK(ps_step_next(step, PS_ACT_WEIGHT, NULL));
    OK(ps_backward_weights(ctx, NULL));
    CHECK(ps_tensor_get_grad(w[1]) != NULL);
    FAILS(ps_backward_weights(ctx, NULL), PS_ESTATE, "were deferred");
    OK(ps_step_done(step));
    OK(ps_step_end(step, NULL));
    c.actions = (const ps_action[]){ F(0, 0), B(0, 0), F(0, 1), B(0, 1), { PS_ACT_UPDATE, 0, 0 } }, c.n_actions = 5;
    OK(ps_step_begin(step, &c));
    FAILS(ps_step_next(step, PS_ACT_BACKWARD, &(ps_action_how){ .slot = 1 }), PS_EINVAL, "last backward");
    OK(ps_step_end(step, NULL));
    rng->op = 0, rng->sample = 0;
}

/* Returns the processor seconds for a step of n micro-batches, without their computation. */
static double seconds_of(int n)
{
    ps_action *table = malloc(sizeof *table * (size_t)n * 2);
    ps_step_config c = { .actions = table, .n_actions = 2 * n, .trace = PS_TRACE_NONE };
    ps_step *bare = NULL;
    for (int i = 0; i < n; i++) table[2 * i] = (ps_action)F(0, i), table[2 * i + 1] = (ps_action)B(0, i);
    OK(ps_step_new(ctx, &bare));
    double began = thread_now();
    int rc = ps_step_begin(bare, &c);
    for (int i = 0; i < 2 * n && rc == 0; i++) {
        rc = ps_step_next(bare, table[i].kind, &(ps_action_how){ .scale = 1, .weight = 2 });
        if (rc == 0) rc = ps_step_done(bare);
    }
    double seconds = thread_now() - began;
    OK(rc);
    CHECK(ps_step_look(bare)->micro == n && ps_step_look(bare)->weight == 2.0 * n);
    OK(ps_step_end(bare, NULL));
    ps_step_free(bare);
    free(table);
    return seconds;
}

/* Sixteen times as many micro-batches take about sixteen times as long. They would take 256 times as long if each
 * micro-batch visited all others. */
static void test_many(void)
{
    double few = seconds_of(4000), many = seconds_of(64000);
    for (int i = 0; i < 5; i++) {
        double again = seconds_of(4000);
        if (again > few) few = again;                          /* short times can be below the clock's resolution */
    }
    CHECK(many < 64 * few);
}

/* Deferred work is dropped with the step. */
static void test_given_up(void)
{
    static const ps_action table[] = { F(0, 0), I(0, 0), W(0, 0), { PS_ACT_UPDATE, 0, 0 } };
    ps_step_config c = { .actions = table, .n_actions = 4, .trace = PS_TRACE_UNKNOWN };
    for (int i = 0; i < 2; i++) {
        int64_t segment;
        OK(ps_step_begin(step, &c));
        OK(ps_step_next(step, PS_ACT_FORWARD, NULL));
        ps_tensor *loss = loss_of(0, 0);
        OK(ps_step_done(step));
        OK(ps_step_next(step, PS_ACT_INPUT, NULL));
        OK(ps_backward_begin_n(ctx, 1, &loss, NULL, &segment));
        OK(ps_step_done(step));
        ps_tensor_release(loss);
        OK(ps_step_end(step, NULL));
        CHECK(!ps_tensor_get_grad(w[0]));
    }
}

static void test_refusals(void)
{
    ps_chunk_config config = { .prefetch = 1 };
    ps_step *other = NULL;
    OK(ps_policy_find("plan", &config.policy));
    OK(ps_step_new(ctx, &step));
    OK(ps_step_new(ctx, &other));
    OK(ps_engine_open(ctx, step, &config, NULL));
    w[0] = drawn(0, false), w[1] = drawn(1, false);
    ps_param p[PARAMS] = { state_of(0, false), state_of(1, false) }, turned[PARAMS] = { p[1], p[0] };
    FAILS(ps_engine_params(ctx, PARAMS, turned, PARAMS, 1), PS_EINVAL, "after a later one");
    ps_param joined[PARAMS] = { p[0], p[1] };
    joined[1].unit = 0;
    FAILS(ps_engine_params(ctx, PARAMS, joined, PARAMS, 1), PS_EINVAL, "virtual stages 0 and 1");
    OK(ps_engine_params(ctx, PARAMS, p, PARAMS, 1));
    test_tables();
    test_given_up();
    static const ps_action table[] = { F(0, 0), B(0, 0), END };
    ps_step_config c = { .actions = table, .n_actions = 4, .trace = 77 };
    FAILS(ps_step_begin(step, &c), PS_ERANGE, "no trace 77");
    CHECK(!ps_step_look(step)->open);
    c.trace = PS_TRACE_UNKNOWN, c.dry = 1;
    FAILS(ps_step_begin(other, &c), PS_ESTATE, "in chunks");
    OK(ps_step_begin(step, &c));
    FAILS(ps_step_begin(step, &c), PS_ESTATE, "under way");
    ps_engine_close(ctx);                                     /* during a dry run */
    CHECK(!ps_step_look(step)->open && ps_step_look(step)->due.kind == PS_ACT_NONE);
    FAILS(ps_step_next(step, PS_ACT_FORWARD, NULL), PS_ESTATE, "no step is under way");
    for (int v = 0; v < PARAMS; v++) {
        ps_tensor *all[] = { w[v], p[v].master, p[v].state[0], p[v].state[1], p[v].grad };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) if (all[k]) ps_tensor_release(all[k]);
    }
    ps_step_free(other);
    ps_step_free(step);
}

int main(void)
{
    ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq");             /* before there are other threads */
    OK(ps_ctx_new(&ctx));
    test_orders(false);
    test_orders(true);
    test_roots();
    test_many();
    test_refusals();
    ps_memory_info info;
    OK(ps_memory_get(ctx, 0, &info));
    CHECK(info.used == 0);
    ps_ctx_free(ctx);
    return end_checks();
}
