/* SPDX-License-Identifier: BSD-3-Clause
 * ZeRO under several virtual stages: ranks (here threads) that train the same parameters, of two virtual stages. Every
 * stage of ZeRO and every table of a step gives the same bits, and one process with all micro-batches gives the same
 * numbers up to the order of sums. */
#include "check.h"
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
#include "tensor/tensor.h"

#ifndef PS_HAVE_GLOO
int main(void) { return 0; }
#else
enum { N = 96, MICROS = 2, STEPS = 3, RANKS = 2, VSTAGES = 2, PARAMS = VSTAGES * RANKS };

typedef struct result { double norm[STEPS], w[PARAMS][N]; } result;

typedef struct process {
    int rank, size, stage, n;      /* with size 1: all micro-batches, without ZeRO */
    bool once;                     /* whether gradients are reduced once per step */
    const ps_action *table;
    ps_ctx *ctx;
    ps_step *step;
    ps_group *group;
    ps_tensor *w[PARAMS], *own[PARAMS][3];
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

/* Returns the loss of virtual stage v: the sum of (a x + b)^2, where x depends on the rank and the micro-batch. */
static ps_tensor *loss_of(process *p, int v, int micro)
{
    int batch = p->size == 1 ? micro : p->rank * MICROS + micro;
    ps_tensor **w = &p->w[v * RANKS], *x = drawn(p, 20 + 2 * batch + v), *y = op2(p, PS_OP_mul, w[0], x),
              *z = op2(p, PS_OP_add, y, w[1]), *square = op2(p, PS_OP_mul, z, z), *out[PS_MAX_OUT] = { NULL };
    ps_attrs_sum all = { 0 };
    WELL(ps_apply(p->ctx, PS_OP_sum, 1, &square, &all, sizeof all, out));
    ps_tensor *temps[] = { x, y, z, square };
    for (int i = 0; i < 4; i++) ps_tensor_release(temps[i]);
    return out[0];
}

static void act(process *p, const ps_action *a, ps_tensor *(*loss)[RANKS * MICROS], double *norm)
{
    ps_update_group group = { .scale = 1, .op = PS_OP_adam_, .n_states = 2, .n_needed = 2 };
    ps_attrs_adam_ settings = { .adamw = 1, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-4,
                                .weight_decay = 0.1 };
    memcpy(group.attrs, &settings, sizeof settings);
    ps_action_how how = { .weight = 1, .scale = 0.5, .groups = &group, .n_groups = 1 };
    ps_tensor **root = &loss[a->vstage][a->micro];
    int64_t segment;
    if (!WELL(ps_step_next(p->step, a->kind, &how))) return;
    if (a->kind == PS_ACT_FORWARD) *root = loss_of(p, a->vstage, a->micro);
    if (a->kind == PS_ACT_WEIGHT) WELL(ps_backward_weights(p->ctx, NULL));
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) {
        WELL(ps_backward_begin_n(p->ctx, 1, root, NULL, &segment));
        ps_tensor_release(*root);
    }
    if (a->kind == PS_ACT_NORM) WELL(ps_engine_sq_norm(p->ctx, norm));
    if (a->kind == PS_ACT_UPDATE) WELL(ps_engine_update(p->ctx));
    WELL(ps_step_done(p->step));
}

/* -- parameters, one per unit
 * ---------------------------------------------------------------------------------------- */
static int32_t chunk_of(process *p, int kind, int i, bool here)
{
    int32_t chunk = -1;
    if (here) WELL(ps_engine_chunk_new(p->ctx, kind, 0, i, PS_F32, 4096, &chunk));
    return chunk;
}

static int32_t part_of(process *p, int i, int stripe, int32_t chunk, bool reads)
{
    int32_t part = -1;
    ps_part_config c = { .owner = i % RANKS, .dtype = PS_F32, .chunk = chunk, .stripe = stripe, .reads = reads,
                         .keeps = p->stage < 3, .nbytes = 4096 };
    WELL(ps_engine_part(p->ctx, &c, &part));
    return part;
}

/* Describes a parameter. `parts` are the parts of its values and of its gradients. */
static ps_param param_of(process *p, int i, int32_t *parts)
{
    int v = i / RANKS;
    bool shared = p->size > 1, mine = !shared || p->stage == 0 || i % RANKS == p->rank;
    ps_param r = { .unit = i, .vstage = v, .number = i };
    p->w[i] = drawn(p, i);
    int32_t values = chunk_of(p, PS_KIND_PARAM, i, mine || p->stage < 3);
    int32_t sums = chunk_of(p, PS_KIND_GRAD, i, mine || p->stage < 2);
    if (shared) {
        parts[0] = part_of(p, i, v, values, p->stage > 0), parts[1] = part_of(p, i, VSTAGES + v, sums, false);
        WELL(ps_engine_part_adopt(p->ctx, p->w[i], parts[0], 0, "w"));
    } else {
        WELL(ps_engine_adopt(p->ctx, p->w[i], values, 0, "w"));
    }
    r.param = p->w[i];
    WELL(ps_tensor_require_grad(r.param, 1));
    if (mine) {
        const int kinds[] = { ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq") };
        ps_tensor **const to[] = { &r.state[0], &r.state[1] };
        r.master = r.param, r.n_states = 2;
        for (int k = 0; k < 2; k++)
            WELL(ps_engine_tensor_new(p->ctx, r.param, PS_F32, 0, chunk_of(p, kinds[k], i, true), 0, NULL, to[k]));
    }
    if (sums >= 0) WELL(ps_engine_tensor_new(p->ctx, r.param, PS_F32, 0, sums, 0, NULL, &r.grad));
    else WELL(ps_engine_part_tensor(p->ctx, r.param, PS_F32, 0, parts[1], 0, NULL, &r.grad));
    ps_tensor *const all[] = { r.state[0], r.state[1], r.grad };
    memcpy(p->own[i], all, sizeof all);
    return r;
}

static void train(process *p)
{
    ps_chunk_config config = { .prefetch = 1 };
    ps_param list[PARAMS];
    int32_t parts[PARAMS][2], trace = PS_TRACE_UNKNOWN;
    WELL(ps_policy_find("plan", &config.policy));
    WELL(ps_step_new(p->ctx, &p->step));
    WELL(ps_engine_open(p->ctx, p->step, &config, NULL));
    if (p->size > 1) WELL(ps_engine_shard(p->ctx, p->group, p->stage, p->once));
    for (int i = 0; i < PARAMS; i++) list[i] = param_of(p, i, parts[i]);
    WELL(ps_engine_params(p->ctx, PARAMS, list, PARAMS, 1));
    for (int i = 0; i < PARAMS && p->size > 1; i++)
        WELL(ps_engine_unit_parts(p->ctx, i, i / RANKS, parts[i][0], parts[i][1]));
    for (int s = 0; s < STEPS && !p->bad; s++) {
        ps_tensor *loss[VSTAGES][RANKS * MICROS];
        ps_step_config c = { .actions = p->table, .n_actions = p->n, .trace = trace };
        WELL(ps_step_begin(p->step, &c));
        for (int k = 0; k < p->n && !p->bad; k++) act(p, &p->table[k], loss, &p->r.norm[s]);
        WELL(ps_step_end(p->step, &trace));
    }
    for (int i = 0; i < PARAMS; i++) {
        ps_tensor *read = NULL;                           /* reading by an op gathers */
        if (p->size > 1) WELL(ps_engine_forget(p->ctx));
        ps_set_grad_enabled(p->ctx, 0);
        read = op2(p, PS_OP_add, p->w[i], p->w[i]);
        ps_set_grad_enabled(p->ctx, 1);
        WELL(ps_tensor_read_f64(read, 0, N, p->r.w[i]));
        ps_tensor_release(read);
        ps_tensor *all[] = { p->w[i], p->own[i][0], p->own[i][1], p->own[i][2] };
        for (int k = 0; k < 4; k++) if (all[k]) ps_tensor_release(all[k]);
    }
    ps_engine_close(p->ctx);
    ps_step_free(p->step);
}

#define F(v, m) { PS_ACT_FORWARD, v, m }
#define B(v, m) { PS_ACT_BACKWARD, v, m }
#define I(v, m) { PS_ACT_INPUT, v, m }
#define W(v, m) { PS_ACT_WEIGHT, v, m }
#define R(v) { PS_ACT_REDUCE, v, 0 }
#define END { PS_ACT_NORM, 0, 0 }, { PS_ACT_UPDATE, 0, 0 }
#define OF(list) (int)(sizeof list / sizeof *list), list

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;   /* contexts are opened one at a time */

static void *rank_main(void *arg)
{
    process *p = arg;
    pthread_mutex_lock(&opening);
    WELL(ps_ctx_new(&p->ctx));
    pthread_mutex_unlock(&opening);
    ps_meeting m = { .rendezvous = p->rendezvous, .rank = p->rank, .size = RANKS, .timeout_s = 20, .heartbeat_s = 5 };
    if (p->size == 1 || WELL(ps_group_gloo(p->ctx, &m, &p->group))) train(p);
    ps_group_close(p->group);
    pthread_mutex_lock(&opening);
    ps_ctx_free(p->ctx);
    pthread_mutex_unlock(&opening);
    return NULL;
}

static result run_all(int size, int stage, bool once, int n, const ps_action *table)
{
    process all[RANKS];
    pthread_t threads[RANKS];
    char path[] = "/tmp/ps_test_zero_XXXXXX";
    close(mkstemp(path));
    for (int r = 0; r < size; r++) {
        all[r] = (process){ .rank = r, .size = size, .stage = stage, .once = once, .n = n, .table = table };
        snprintf(all[r].rendezvous, sizeof all[r].rendezvous, "file://%s", path);
        pthread_create(&threads[r], NULL, rank_main, &all[r]);
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
        if (all[r].bad) printf("  stage %d: %s\n", stage, all[r].why);
        CHECK(all[r].bad == 0);
        CHECK(!memcmp(&all[r].r, &all[0].r, sizeof all[0].r));
    }
    unlink(path);
    return all[0].r;
}

int main(void)
{
    ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq");             /* before there are other threads */
    static const ps_action plain[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), F(0, 1), F(1, 1), B(1, 1), B(0, 1), END },
        ahead[] = { F(0, 0), F(0, 1), F(1, 0), B(1, 0), F(1, 1), B(1, 1), R(1), B(0, 0), B(0, 1), R(0), END },
        crossed[] = { F(1, 0), F(0, 0), B(0, 0), R(0), F(0, 1), B(0, 1), F(1, 1), B(1, 0), R(0), R(1), B(1, 1), R(1),
                      END },
        later[] = { F(0, 0), F(1, 0), I(1, 0), F(0, 1), I(0, 0), F(1, 1), I(1, 1), W(0, 0), W(1, 0), I(0, 1), W(1, 1),
                    W(0, 1), R(1), R(0), END },
        one[] = { F(0, 0), B(0, 0), F(1, 0), B(1, 0), F(0, 1), B(0, 1), F(1, 1), B(1, 1), F(0, 2), B(0, 2), F(1, 2),
                  B(1, 2), F(0, 3), B(0, 3), F(1, 3), B(1, 3), END };
    result alone = run_all(1, 0, false, OF(one)), first = run_all(RANKS, 0, false, OF(plain));
    for (int s = 0; s < STEPS; s++) CHECK(fabs(first.norm[s] - alone.norm[s]) <= 1e-6 * alone.norm[s]);
    for (int i = 0; i < PARAMS; i++)
        for (int k = 0; k < N; k++) CHECK(fabs(first.w[i][k] - alone.w[i][k]) <= 1e-5);
    for (int stage = 0; stage <= 3; stage++) {
        static const struct { int n; const ps_action *table; } tables[] = { { OF(plain) }, { OF(ahead) },
                                                                           { OF(crossed) }, { OF(later) } };
        /* Stages 2 and 3 sum micro-batches at the owner, so the sums over ranks come first. With `once`, they do
         * not. */
        result of_stage = stage < 2 ? first : run_all(RANKS, stage, false, OF(plain));
        CHECK(fabs(of_stage.norm[2] - first.norm[2]) <= 1e-6 * first.norm[2]);
        for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) {
            result r = run_all(RANKS, stage, false, tables[t].n, tables[t].table);
            if (!CHECK(!memcmp(&r, &of_stage, sizeof r))) printf("  stage %d, table %zu\n", stage, t);
            if (stage < 2) continue;
            r = run_all(RANKS, stage, true, tables[t].n, tables[t].table);
            if (!CHECK(!memcmp(&r, &first, sizeof r))) printf("  stage %d, once, table %zu\n", stage, t);
        }
    }
    return end_checks();
}
#endif
