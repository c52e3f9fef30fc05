/* SPDX-License-Identifier: BSD-3-Clause
 * A parameter of two virtual stages: its bits, and those of the norm, are the same under every table of a step, and
 * whether one process runs both virtual stages or each has a rank (here a thread) with a copy. */
#include "check.h"
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
#include "tensor/tensor.h"

enum { N = 96, MICROS = 3, STEPS = 3, PARAMS = 3, RANKS = 2 };
enum { TABLE, HEAD, WEIGHT };      /* HEAD is the use of TABLE in virtual stage 1 */

typedef struct result { double norm[STEPS], table[N], weight[N]; } result;

typedef struct process {
    int rank, size;                /* size 1: both virtual stages */
    bool shared;                   /* whether TABLE is one leaf with one sum for all its uses */
    ps_ctx *ctx;
    ps_step *step;
    ps_group *group;
    ps_tensor *leaf[PARAMS], *own[PARAMS][4];
    ps_tensor *link[2][MICROS];    /* links of one process: activations up, gradients down */
    ps_tensor *out[2][MICROS], *in[MICROS];
    int n;
    const ps_action *table;
    char rendezvous[64], why[200];
    int bad;
    result r;
} process;

/* Checks a condition in a thread. The joining thread reports the first failure. */
static bool well(process *p, bool ok, int line)
{
    if (!ok && p->bad++ == 0)
        snprintf(p->why, sizeof p->why, "rank %d, line %d: %.120s", p->rank, line, ps_error_message());
    return ok;
}
#define WELL(call) well(p, (call) >= 0, __LINE__)
#define TRUE(cond) well(p, (cond), __LINE__)

static ps_tensor *drawn(process *p, int seed)
{
    static const int64_t numel = N;
    double values[N];
    ps_tensor *t = NULL;
    WELL(ps_tensor_new(p->ctx, PS_F32, 0, 1, &numel, &t));
    for (int i = 0; i < N; i++) values[i] = (double)((i * 7919 + seed * 104729) % 10007 - 5003) / 4999;
    WELL(ps_tensor_write_f64(t, 0, N, values));
    WELL(ps_tensor_keep(t));
    return t;
}

static ps_tensor *op2(process *p, int op, ps_tensor *a, ps_tensor *b)
{
    static const int32_t none;
    ps_tensor *in[] = { a, b }, *out[PS_MAX_OUT] = { NULL };
    WELL(ps_apply(p->ctx, op, 2, in, &none, sizeof none, out));
    return out[0];
}

/* -- between virtual stages ---------------------------------------------------------------------------------------- */
static void pass_on(process *p, int up, int micro, ps_tensor *t)
{
    if (p->size == 1) ps_tensor_retain(p->link[up][micro] = t);
    else WELL(ps_group_send(p->group, t, !p->rank));
}

static ps_tensor *receive(process *p, int up, int micro)
{
    static const int64_t numel = N;
    ps_tensor *t = NULL;
    if (p->size == 1) {
        WELL(ps_tensor_detach(p->link[up][micro], &t));
        ps_tensor_release(p->link[up][micro]);
        return t;
    }
    WELL(ps_tensor_new(p->ctx, PS_F32, 0, 1, &numel, &t));
    WELL(ps_group_recv(p->group, t, !p->rank));
    return t;
}

/* -- actions ------------------------------------------------------------------------------------------------------- */
static void forward(process *p, int v, int micro)
{
    ps_tensor *x = drawn(p, 11 + 2 * micro + v);
    if (v == 0) {
        p->out[0][micro] = op2(p, PS_OP_mul, p->leaf[TABLE], x);
        ps_tensor_release(x);
        pass_on(p, 1, micro, p->out[0][micro]);
        return;
    }
    ps_tensor *got = receive(p, 1, micro), *loss[PS_MAX_OUT] = { NULL };
    ps_attrs_sum all = { 0 };
    WELL(ps_boundary(p->ctx, 1, &got, &p->in[micro]));
    ps_tensor *z = op2(p, PS_OP_mul, p->in[micro], p->leaf[WEIGHT]), *h = op2(p, PS_OP_mul, p->leaf[HEAD], x),
              *u = op2(p, PS_OP_add, z, h), *square = op2(p, PS_OP_mul, u, u);
    WELL(ps_apply(p->ctx, PS_OP_sum, 1, &square, &all, sizeof all, loss));
    p->out[1][micro] = loss[0];
    ps_tensor *temps[] = { x, got, z, h, u, square };
    for (int i = 0; i < 6; i++) ps_tensor_release(temps[i]);
}

static void backward(process *p, int v, int micro)
{
    ps_tensor *gradient = v == 0 ? receive(p, 0, micro) : NULL;
    int64_t segment;
    WELL(ps_backward_begin_n(p->ctx, 1, &p->out[v][micro], &gradient, NULL));
    if (gradient) ps_tensor_release(gradient);
    WELL(ps_backward_next(p->ctx, &segment));
    ps_tensor_release(p->out[v][micro]);
    if (v == 0) return;
    WELL(ps_boundary_take(p->ctx, 1, &p->in[micro], &gradient));
    ps_tensor_release(p->in[micro]);
    pass_on(p, 0, micro, gradient);
    ps_tensor_release(gradient);
}

static void act(process *p, const ps_action *a, double *norm)
{
    ps_update_group group = { .scale = 1, .op = PS_OP_adam_, .n_states = 2, .n_needed = 2 };
    ps_attrs_adam_ settings = { .adamw = 1, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
                                .weight_decay = 0.1 };
    memcpy(group.attrs, &settings, sizeof settings);
    ps_action_how how = { .weight = 1, .scale = 0.5, .groups = &group, .n_groups = 1 };
    if (!WELL(ps_step_next(p->step, a->kind, &how))) return;
    if (a->kind == PS_ACT_FORWARD) forward(p, a->vstage, a->micro);
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) backward(p, a->vstage, a->micro);
    if (a->kind == PS_ACT_WEIGHT) WELL(ps_backward_weights(p->ctx, NULL));
    if (a->kind == PS_ACT_NORM) WELL(ps_engine_sq_norm(p->ctx, norm));
    if (a->kind == PS_ACT_UPDATE) WELL(ps_engine_update(p->ctx));
    WELL(ps_step_done(p->step));
}

/* -- parameters ---------------------------------------------------------------------------------------------------- */
static ps_param param_of(process *p, int which, int unit, int vstage, int number, int tie)
{
    const int kinds[] = { ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq"), PS_KIND_GRAD };
    ps_param r = { .param = p->leaf[which], .unit = unit, .vstage = vstage, .number = number, .tie = tie,
                   .n_states = tie == PS_TIE_USE ? 0 : 2 };
    ps_tensor **const to[] = { &r.state[0], &r.state[1], &r.grad };
    int32_t chunk;
    WELL(ps_tensor_require_grad(r.param, 1));
    if (tie != PS_TIE_USE) {
        WELL(ps_engine_chunk_new(p->ctx, PS_KIND_PARAM, 0, which, PS_F32, 4096, &chunk));
        WELL(ps_engine_adopt(p->ctx, r.param, chunk, 0, "p"));
        r.master = r.param;
    }
    for (int i = tie == PS_TIE_USE ? 2 : 0; i < 3; i++) {
        WELL(ps_engine_chunk_new(p->ctx, kinds[i], 0, which, PS_F32, 4096, &chunk));
        WELL(ps_engine_tensor_new(p->ctx, r.param, PS_F32, 0, chunk, 0, NULL, to[i]));
        p->own[which][i] = *to[i];
    }
    return r;
}

/* Creates this process's parameters, sorted by virtual stage and index. Returns their number. */
static int make_params(process *p, ps_param *list)
{
    int n = 0;
    if (p->shared) {
        p->leaf[TABLE] = drawn(p, 1), p->leaf[WEIGHT] = drawn(p, 2);
        ps_tensor_retain(p->leaf[HEAD] = p->leaf[TABLE]);
        list[n++] = param_of(p, TABLE, 0, 0, 0, PS_TIE_NONE);
        list[n++] = param_of(p, WEIGHT, 1, 1, 1, PS_TIE_NONE);
    } else if (p->size == 1) {
        p->leaf[TABLE] = drawn(p, 1), p->leaf[WEIGHT] = drawn(p, 2);
        ps_tensor_retain(p->leaf[HEAD] = p->leaf[TABLE]);
        list[n++] = param_of(p, TABLE, 0, 0, 0, PS_TIE_NONE);
        list[n++] = param_of(p, WEIGHT, 1, 1, 1, PS_TIE_NONE);
        list[n++] = param_of(p, HEAD, 0, 1, 0, PS_TIE_USE);
    } else if (p->rank == 0) {
        p->leaf[TABLE] = drawn(p, 1);
        list[n++] = param_of(p, TABLE, 0, 0, 0, PS_TIE_COPY);
    } else {
        p->leaf[HEAD] = drawn(p, 1), p->leaf[WEIGHT] = drawn(p, 2);
        list[n++] = param_of(p, HEAD, 0, 1, 0, PS_TIE_COPY);
        list[n++] = param_of(p, WEIGHT, 1, 1, 1, PS_TIE_NONE);
    }
    return n;
}

static void train(process *p)
{
    ps_chunk_config config = { .prefetch = 1 };
    ps_param list[PARAMS];
    WELL(ps_policy_find("plan", &config.policy));
    WELL(ps_step_new(p->ctx, &p->step));
    WELL(ps_engine_open(p->ctx, p->step, &config, NULL));
    if (p->group) WELL(ps_engine_stages(p->ctx, p->group, p->group, 2));
    int n = make_params(p, list), units = p->size == 1 ? 2 : n;
    WELL(ps_engine_params(p->ctx, n, list, units, 1));
    int32_t trace = PS_TRACE_UNKNOWN;
    for (int i = 0; i < STEPS && !p->bad; i++) {
        ps_step_config c = { .actions = p->table, .n_actions = p->n, .trace = trace };
        WELL(ps_step_begin(p->step, &c));
        for (int k = 0; k < p->n && !p->bad; k++) act(p, &p->table[k], &p->r.norm[i]);
        WELL(ps_step_end(p->step, &trace));
    }
    ps_tensor *table = p->leaf[p->rank == 0 ? TABLE : HEAD];
    WELL(ps_tensor_read_f64(table, 0, N, p->r.table));
    if (p->leaf[WEIGHT]) WELL(ps_tensor_read_f64(p->leaf[WEIGHT], 0, N, p->r.weight));
    for (int i = 0; i < PARAMS; i++) {
        for (int k = 0; k < 4; k++) if (p->own[i][k]) ps_tensor_release(p->own[i][k]);
        if (p->leaf[i]) ps_tensor_release(p->leaf[i]);
    }
    ps_engine_close(p->ctx);
    ps_step_free(p->step);
}

#define F(v, m) { PS_ACT_FORWARD, v, m }
#define B(v, m) { PS_ACT_BACKWARD, v, m }
#define I(v, m) { PS_ACT_INPUT, v, m }
#define W(v, m) { PS_ACT_WEIGHT, v, m }
#define END { PS_ACT_NORM, 0, 0 }, { PS_ACT_UPDATE, 0, 0 }
#define OF(list) (int)(sizeof list / sizeof *list), list

static process alone(int n, const ps_action *table, bool shared)
{
    process p = { .size = 1, .n = n, .table = table, .shared = shared };
    OK(ps_ctx_new(&p.ctx));
    train(&p);
    ps_memory_info info;
    OK(ps_memory_get(p.ctx, 0, &info));
    CHECK(info.used == 0);
    ps_ctx_free(p.ctx);
    if (p.bad) printf("  %s\n", p.why);
    CHECK(p.bad == 0);
    return p;
}

static bool same(const result *a, const result *b) { return !memcmp(a, b, sizeof *a); }

static result test_tables(void)
{
    static const ps_action plain[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), F(0, 1), F(1, 1), B(1, 1), B(0, 1), F(0, 2),
                                       F(1, 2), B(1, 2), B(0, 2), END },
        apart[] = { F(0, 0), F(0, 1), F(0, 2), F(1, 0), F(1, 1), F(1, 2), B(1, 0), B(1, 1), B(1, 2), B(0, 0), B(0, 1),
                    B(0, 2), END },
        later[] = { F(0, 0), F(1, 0), I(1, 0), I(0, 0), F(0, 1), F(1, 1), I(1, 1), I(0, 1), W(0, 0), W(0, 1), F(0, 2),
                    F(1, 2), I(1, 2), B(0, 2), W(1, 0), W(1, 1), W(1, 2), END };
    result first = alone(OF(plain), false).r, second = alone(OF(apart), false).r, third = alone(OF(later), false).r,
           shared = alone(OF(later), true).r;
    CHECK(first.norm[0] > 0 && first.table[0] != 0);
    CHECK(same(&first, &second));
    CHECK(same(&first, &third));
    for (int i = 0; i < STEPS; i++) CHECK(fabs(shared.norm[i] - first.norm[i]) <= 1e-6 * first.norm[i]);
    for (int i = 0; i < N; i++) CHECK(fabs(shared.table[i] - first.table[i]) <= 1e-5);
    return first;
}

/* Checks the first step's sum of squares, computed from the initial values with the gradient's formula. */
static void test_formula(const result *r)
{
    process whole = { .size = 1 }, *p = &whole;
    double t[N], w[N], x[N], y[N], gt[N] = { 0 }, gw[N] = { 0 }, sum = 0;
    OK(ps_ctx_new(&p->ctx));
    ps_tensor *a = drawn(p, 1), *b = drawn(p, 2);
    OK(ps_tensor_read_f64(a, 0, N, t)), OK(ps_tensor_read_f64(b, 0, N, w));
    ps_tensor_release(a), ps_tensor_release(b);
    for (int micro = 0; micro < MICROS; micro++) {
        a = drawn(p, 11 + 2 * micro), b = drawn(p, 12 + 2 * micro);
        OK(ps_tensor_read_f64(a, 0, N, x)), OK(ps_tensor_read_f64(b, 0, N, y));
        ps_tensor_release(a), ps_tensor_release(b);
        for (int i = 0; i < N; i++) {                     /* for the loss sum of (t x w + t y)^2 */
            double u = t[i] * x[i] * w[i] + t[i] * y[i];
            gt[i] += 2 * u * (x[i] * w[i] + y[i]);
            gw[i] += 2 * u * t[i] * x[i];
        }
    }
    for (int i = 0; i < N; i++) sum += gt[i] * gt[i] + gw[i] * gw[i];
    CHECK(sum > 0 && r->norm[0] > sum * (1 - 1e-6) && r->norm[0] < sum * (1 + 1e-6));
    ps_ctx_free(p->ctx);
}

#ifdef PS_HAVE_GLOO
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;   /* contexts are opened one at a time */

static void *rank_main(void *arg)
{
    process *p = arg;
    pthread_mutex_lock(&opening);
    WELL(ps_ctx_new(&p->ctx));
    pthread_mutex_unlock(&opening);
    ps_meeting m = { .rendezvous = p->rendezvous, .rank = p->rank, .size = RANKS, .timeout_s = 20, .heartbeat_s = 5 };
    if (WELL(ps_group_gloo(p->ctx, &m, &p->group))) train(p);
    ps_group_close(p->group);
    pthread_mutex_lock(&opening);
    ps_ctx_free(p->ctx);
    pthread_mutex_unlock(&opening);
    return NULL;
}

static void test_ranks(const result *one)
{
    static const ps_action tables[RANKS][2 * MICROS + 2] = {
        { F(0, 0), F(0, 1), F(0, 2), B(0, 0), B(0, 1), B(0, 2), END },
        { F(1, 0), F(1, 1), F(1, 2), B(1, 0), B(1, 1), B(1, 2), END },
    };
    process all[RANKS];
    pthread_t threads[RANKS];
    char path[] = "/tmp/ps_test_ties_XXXXXX";
    close(mkstemp(path));
    for (int r = 0; r < RANKS; r++) {
        all[r] = (process){ .rank = r, .size = RANKS, .n = 2 * MICROS + 2, .table = tables[r] };
        snprintf(all[r].rendezvous, sizeof all[r].rendezvous, "file://%s", path);
        pthread_create(&threads[r], NULL, rank_main, &all[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        if (all[r].bad) printf("  %s\n", all[r].why);
        CHECK(all[r].bad == 0);
        CHECK(!memcmp(all[r].r.norm, one->norm, sizeof one->norm));
        CHECK(!memcmp(all[r].r.table, one->table, sizeof one->table));
    }
    CHECK(!memcmp(all[1].r.weight, one->weight, sizeof one->weight));
    unlink(path);
}
#endif

static void test_refusals(void)
{
    process whole = { .size = 1 }, *p = &whole;
    ps_chunk_config config = { .prefetch = 1 };
    ps_param list[PARAMS], other[PARAMS];
    ps_group *self;
    OK(ps_ctx_new(&p->ctx));
    FAILS(ps_engine_stages(p->ctx, NULL, NULL, 1), PS_ESTATE, "no engine");
    OK(ps_policy_find("plan", &config.policy));
    OK(ps_step_new(p->ctx, &p->step));
    OK(ps_engine_open(p->ctx, p->step, &config, NULL));
    int n = make_params(p, list);
    memcpy(other, list, sizeof other);
    other[0].tie = PS_TIE_COPY;
    FAILS(ps_engine_params(p->ctx, n, other, 2, 1), PS_EINVAL, "no group of ranks");
    memcpy(other, list, sizeof other);
    other[2].number = 7;
    FAILS(ps_engine_params(p->ctx, n, other, 2, 1), PS_EINVAL, "another use of number 7");
    memcpy(other, list, sizeof other);
    other[2].grad = NULL;
    FAILS(ps_engine_params(p->ctx, n, other, 2, 1), PS_EINVAL, "no tensor for its gradient");
    memcpy(other, list, sizeof other);
    other[1] = list[2], other[2] = list[1];
    FAILS(ps_engine_params(p->ctx, n, other, 2, 1), PS_EINVAL, "before all other uses");
    memcpy(other, list, sizeof other);
    OK(ps_tensor_detach(list[0].param, &other[2].param));         /* the same bytes, with separate gradients */
    FAILS(ps_engine_params(p->ctx, n, other, 2, 1), PS_EINVAL, "is the same tensor");
    ps_tensor_release(other[2].param);
    OK(ps_group_self(p->ctx, &self));
    FAILS(ps_engine_stages(p->ctx, self, NULL, 0), PS_EINVAL, "0 parameters");
    OK(ps_engine_stages(p->ctx, self, NULL, 1));
    FAILS(ps_engine_stages(p->ctx, self, NULL, 1), PS_ESTATE, "once");
    ps_group_close(self);
    FAILS(ps_engine_params(p->ctx, n, list, 2, 1), PS_EINVAL, "number 1 of 1");
    for (int i = 0; i < PARAMS; i++) {
        for (int k = 0; k < 4; k++) if (p->own[i][k]) ps_tensor_release(p->own[i][k]);
        ps_tensor_release(p->leaf[i]);
    }
    ps_engine_close(p->ctx);
    ps_step_free(p->step);
    ps_ctx_free(p->ctx);
    CHECK(p->bad == 0);
}

int main(void)
{
    ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq");             /* before there are other threads */
    result one = test_tables();
    test_formula(&one);
    test_refusals();
#ifdef PS_HAVE_GLOO
    test_ranks(&one);
#endif
    return end_checks();
}
