/* SPDX-License-Identifier: BSD-3-Clause
 * Layers that ranks (here threads) have parts of: gradients of which every rank has an addend, pieces of parameters,
 * and whole ones, in a mesh dp x tp. All gradients are small integers, so that sums are exact in any order: norms equal
 * a formula, and values those of one process with the whole model and all rows, bit for bit. */
#include "check.h"
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
#include "tensor/tensor.h"

#ifndef PS_HAVE_GLOO
int main(void) { return 0; }
#else
enum { N = 40, MICROS = 2, STEPS = 3, MOST = 4, VSTAGES = 2, MOST_TP = 2 };
enum { WHOLE, SPLIT, PARTIAL, EXTRA, KINDS };             /* EXTRA is another partial one, which gets no gradient in
                                                           * step 1 */
enum { LEAVES = VSTAGES * (KINDS + MOST_TP - 1) };        /* in one process, each piece of SPLIT is a leaf */

typedef struct result {
    double norm[STEPS];
    double values[VSTAGES][KINDS][MOST_TP][N];            /* indexed by piece; whole parameters are piece 0 */
} result;

/* With `slots`, gradients use the parameters' memory. With `shared`, both virtual stages use the first PARTIAL. */
typedef struct layout { int dp, tp, stage, dtype; bool slots, overlap, shared; } layout;

typedef struct process {
    int rank, dp_rank, tp_rank, n, n_leaves, lacks;       /* lacks: the tp rank that has no gradient for EXTRA, or -1 */
    layout of;
    const ps_action *table;
    ps_ctx *ctx;
    ps_step *step;
    ps_group *world, *dp, *tp;
    struct leaf { int vstage, kind, piece; ps_tensor *w, *own[4]; } leaf[LEAVES];
    char rendezvous[64], why[300];
    int bad, failed;
    result r;
} process;

/* Checks a condition in a thread. The joining thread reports the first failure. */
static bool well(process *p, bool ok, int line)
{
    if (!ok && p->bad++ == 0)
        snprintf(p->why, sizeof p->why, "rank %d, line %d: %.220s", p->rank, line, ps_error_message());
    return ok;
}
#define WELL(call) well(p, (call) >= 0, __LINE__)

static bool is_alone(const process *p) { return p->of.dp * p->of.tp == 1; }

static ps_tensor *tensor_of(process *p, int dtype, const double *values)
{
    static const int64_t numel = N;
    ps_tensor *t = NULL;
    WELL(ps_tensor_new(p->ctx, dtype, 0, 1, &numel, &t));
    WELL(ps_tensor_write_f64(t, 0, N, values));
    WELL(ps_tensor_keep(t));
    return t;
}

/* -- the gradients: integers --------------------------------------------------------------------------------------- */
/* Returns element i of the gradient that one micro-batch of dp rank d adds on tp rank `part`. */
static double gradient(int vstage, int kind, int piece, int d, int micro, int part, int i)
{
    int seed = 31 * vstage + 17 * kind + 7 * d + 3 * micro;
    if (kind == WHOLE) return (i * 5 + seed) % 9 - 4;
    if (kind == SPLIT) return (i * 7 + seed + 11 * piece) % 7 - 3;
    return (i * 3 + seed + 13 * part) % 11 - 5;
}

/* Returns a linear loss: the sum of w g over the leaves. */
static ps_tensor *loss_of(process *p, int vstage, int micro, int step)
{
    static const int32_t none;
    ps_tensor *sum = NULL;
    int parts = is_alone(p) ? MOST_TP : 1, batches = is_alone(p) ? 2 : 1;
    for (int k = 0; k < p->n_leaves; k++) {
        const struct leaf *l = &p->leaf[k];
        bool shared = p->of.shared && l->kind == PARTIAL && l->vstage == 0;
        if ((l->vstage != vstage && !shared) || (l->kind == EXTRA && (step == 1 || p->lacks == p->tp_rank))) continue;
        double g[N] = { 0 };
        for (int i = 0; i < N; i++)
            for (int b = 0; b < batches; b++)
                for (int part = 0; part < (l->kind >= PARTIAL ? parts : 1); part++)
                    g[i] += gradient(vstage, l->kind, l->piece, is_alone(p) ? b : p->dp_rank, micro,
                                     is_alone(p) ? part : p->tp_rank, i);
        ps_tensor *x = tensor_of(p, p->of.dtype, g), *in[] = { l->w, x }, *y[PS_MAX_OUT] = { NULL };
        WELL(ps_apply(p->ctx, PS_OP_mul, 2, in, &none, sizeof none, y));
        ps_attrs_sum all = { 0 };
        ps_tensor *one[PS_MAX_OUT] = { NULL }, *both[PS_MAX_OUT] = { NULL };
        WELL(ps_apply(p->ctx, PS_OP_sum, 1, y, &all, sizeof all, one));
        ps_tensor_release(x);
        ps_tensor_release(y[0]);
        if (!sum) {
            sum = one[0];
            continue;
        }
        WELL(ps_apply(p->ctx, PS_OP_add, 2, (ps_tensor *[]){ sum, one[0] }, &none, sizeof none, both));
        ps_tensor_release(sum);
        ps_tensor_release(one[0]);
        sum = both[0];
    }
    return sum;
}

/* Returns the squared norm of a step's gradients by these formulas. */
static double norm_of(const layout *of, int step, int micros, int vstages)
{
    double sum = 0;
    for (int v = 0; v < vstages; v++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int piece = 0; piece < (kind == SPLIT ? of->tp : 1); piece++)
                for (int i = 0; i < N; i++) {
                    double g = 0;
                    for (int d = 0; d < of->dp; d++)
                        for (int m = 0; m < micros; m++)
                            for (int part = 0; part < (kind >= PARTIAL ? of->tp : 1); part++)
                                g += gradient(v, kind, piece, d, m, part, i);
                    if (kind == EXTRA && step == 1) g = 0;
                    sum += g * g;
                }
    return sum;
}

/* -- parameters, one per unit
 * ---------------------------------------------------------------------------------------- */
static int32_t chunk_of(process *p, int kind, int i, int dtype, bool here)
{
    int32_t chunk = -1;
    if (here) WELL(ps_engine_chunk_new(p->ctx, kind, 0, i, dtype, 4096, &chunk));
    return chunk;
}

static int32_t part_of(process *p, int owner, int stripe, int dtype, int32_t chunk, bool reads)
{
    int32_t part = -1;
    ps_part_config c = { .owner = owner, .dtype = dtype, .chunk = chunk, .stripe = stripe, .reads = reads,
                         .keeps = p->of.stage < 3, .nbytes = 4096 };
    WELL(ps_engine_part(p->ctx, &c, &part));
    return part;
}

static int owner_of(const process *p, int i) { return i % p->of.dp; }
static int stripe_of(const process *p, int i)             /* Returns the stripe of a parameter. Each stripe belongs
                                                           * to one virtual stage, and stripes are numbered in order. */
{
    int a_stage = p->n_leaves / VSTAGES;
    return i / a_stage * a_stage + i % a_stage / p->of.dp;
}

/* Describes a parameter. `parts` are the parts of its values and of its gradients. */
static ps_param param_of(process *p, int i, int32_t *parts)
{
    static const int kinds_of_tp[KINDS] = { PS_TP_WHOLE, PS_TP_SPLIT, PS_TP_PARTIAL, PS_TP_PARTIAL };
    struct leaf *l = &p->leaf[i];
    const layout *of = &p->of;
    double first[N];
    bool mine = of->stage == 0 || owner_of(p, i) == p->dp_rank, shared = !is_alone(p);
    for (int k = 0; k < N; k++) first[k] = (double)((k * 29 + 5 * l->kind + 3 * l->piece + l->vstage) % 17) / 16;
    l->w = tensor_of(p, of->dtype, first);
    ps_param r = { .unit = i, .vstage = l->vstage, .number = i, .tp = shared ? kinds_of_tp[l->kind] : PS_TP_WHOLE };
    int32_t values = chunk_of(p, PS_KIND_PARAM, i, of->dtype, mine || of->stage < 3), sums = -1;
    parts[1] = -1;
    if (!of->slots) sums = chunk_of(p, PS_KIND_GRAD, i, PS_F32, mine || of->stage < 2);
    if (shared) {
        parts[0] = part_of(p, owner_of(p, i), stripe_of(p, i), of->dtype, values, of->stage > 0);
        if (!of->slots)
            parts[1] = part_of(p, owner_of(p, i), p->n_leaves + stripe_of(p, i), PS_F32, sums, false);
        WELL(ps_engine_part_adopt(p->ctx, l->w, parts[0], 0, "w"));
    } else {
        WELL(ps_engine_adopt(p->ctx, l->w, values, 0, "w"));
    }
    r.param = l->w;
    WELL(ps_tensor_require_grad(r.param, 1));
    if (mine) {
        const int kinds[] = { PS_KIND_PARAM_FP32, ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq") };
        r.n_states = 2;
        ps_tensor **const to[] = { &r.master, &r.state[0], &r.state[1] };
        for (int k = of->dtype == PS_F32; k < 3; k++)
            WELL(ps_engine_tensor_new(p->ctx, r.param, PS_F32, 0, chunk_of(p, kinds[k], i, PS_F32, true), 0, NULL,
                                      to[k]));
        if (of->dtype == PS_F32) r.master = r.param;
        else WELL(ps_tensor_write_f64(r.master, 0, N, first));
    }
    if (!of->slots && sums >= 0) WELL(ps_engine_tensor_new(p->ctx, r.param, PS_F32, 0, sums, 0, NULL, &r.grad));
    else if (!of->slots) WELL(ps_engine_part_tensor(p->ctx, r.param, PS_F32, 0, parts[1], 0, NULL, &r.grad));
    ps_tensor *const all[] = { r.master != r.param ? r.master : NULL, r.state[0], r.state[1], r.grad };
    memcpy(l->own, all, sizeof all);
    return r;
}

static void act(process *p, const ps_action *a, int step, ps_tensor *(*loss)[2 * MICROS], bool last)
{
    ps_update_group group = { .scale = 1, .op = PS_OP_adam_, .n_states = 2, .n_needed = 2 };
    ps_attrs_adam_ settings = { .adamw = 1, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-4,
                                .weight_decay = 0.1 };
    memcpy(group.attrs, &settings, sizeof settings);
    bool walk = a->kind == PS_ACT_BACKWARD;
    ps_action_how how = { .weight = 1, .scale = 0.5, .groups = &group, .n_groups = 1,
                          .slot = walk && last && p->of.slots, .overlap = walk && last && p->of.overlap };
    ps_tensor **root = &loss[a->vstage][a->micro];
    int64_t segment;
    if (!WELL(ps_step_next(p->step, a->kind, &how))) return;
    if (a->kind == PS_ACT_FORWARD) *root = loss_of(p, a->vstage, a->micro, step);
    if (walk) {
        WELL(ps_backward_begin_n(p->ctx, 1, root, NULL, &segment));
        ps_tensor_release(*root);
    }
    if (a->kind == PS_ACT_NORM) WELL(ps_engine_sq_norm(p->ctx, &p->r.norm[step]));
    if (a->kind == PS_ACT_UPDATE) WELL(ps_engine_update(p->ctx));
    int rc = ps_step_done(p->step);
    if (p->lacks < 0 || rc == 0) WELL(rc);
    else p->failed = rc;
}

static bool is_last(const process *p, int k)              /* Returns whether this is the last backward of its virtual
                                                           * stage. */
{
    for (int j = k + 1; j < p->n; j++)
        if (p->table[j].kind == PS_ACT_BACKWARD && p->table[j].vstage == p->table[k].vstage) return false;
    return true;
}

static void make_leaves(process *p)
{
    for (int v = 0; v < VSTAGES; v++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int piece = 0; piece < (kind == SPLIT && is_alone(p) ? MOST_TP : 1); piece++)
                p->leaf[p->n_leaves++] = (struct leaf){ .vstage = v, .kind = kind,
                                                        .piece = kind == SPLIT && !is_alone(p) ? p->tp_rank : piece };
}

static void read_values(process *p)
{
    static const int32_t none;
    for (int i = 0; i < p->n_leaves; i++) {
        struct leaf *l = &p->leaf[i];
        ps_tensor *read[PS_MAX_OUT] = { NULL };            /* reading by an op gathers */
        if (!is_alone(p)) WELL(ps_engine_forget(p->ctx));
        ps_set_grad_enabled(p->ctx, 0);
        WELL(ps_apply(p->ctx, PS_OP_add, 2, (ps_tensor *[]){ l->w, l->w }, &none, sizeof none, read));
        ps_set_grad_enabled(p->ctx, 1);
        WELL(ps_tensor_read_f64(read[0], 0, N, p->r.values[l->vstage][l->kind][l->piece]));
        ps_tensor_release(read[0]);
    }
}

static void train(process *p)
{
    ps_chunk_config config = { .prefetch = 1 };
    ps_param list[LEAVES];
    int32_t parts[LEAVES][2], trace = PS_TRACE_UNKNOWN;
    WELL(ps_policy_find("plan", &config.policy));
    WELL(ps_step_new(p->ctx, &p->step));
    WELL(ps_engine_open(p->ctx, p->step, &config, NULL));
    if (!is_alone(p)) WELL(ps_engine_shard(p->ctx, p->dp, p->of.stage, 0));
    if (!is_alone(p)) WELL(ps_engine_tensor_parallel(p->ctx, p->tp));
    make_leaves(p);
    for (int i = 0; i < p->n_leaves; i++) list[i] = param_of(p, i, parts[i]);
    WELL(ps_engine_params(p->ctx, p->n_leaves, list, p->n_leaves, 1));
    int32_t numbers[2 * LEAVES], n = 0;
    memset(numbers, -1, sizeof numbers);
    for (int i = 0; i < p->n_leaves && !is_alone(p); i++) {
        if (numbers[stripe_of(p, i)] < 0) numbers[stripe_of(p, i)] = n++;
        WELL(ps_engine_unit_parts(p->ctx, i, numbers[stripe_of(p, i)], parts[i][0], parts[i][1]));
    }
    for (int s = 0; s < STEPS && !p->bad && !p->failed; s++) {
        ps_tensor *loss[VSTAGES][2 * MICROS];
        ps_step_config c = { .actions = p->table, .n_actions = p->n, .trace = trace };
        WELL(ps_step_begin(p->step, &c));
        for (int k = 0; k < p->n && !p->bad && !p->failed; k++) act(p, &p->table[k], s, loss, is_last(p, k));
        if (p->failed) snprintf(p->why, sizeof p->why, "%.250s", ps_error_message());
        WELL(ps_step_end(p->step, p->failed ? NULL : &trace));
    }
    if (!p->failed) read_values(p);
    for (int i = 0; i < p->n_leaves; i++) {
        ps_tensor_release(p->leaf[i].w);
        for (int k = 0; k < 4; k++) if (p->leaf[i].own[k]) ps_tensor_release(p->leaf[i].own[k]);
    }
    ps_engine_close(p->ctx);
    ps_step_free(p->step);
}

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;   /* contexts are opened one at a time */

static void make_groups(process *p)
{
    int32_t dp[MOST], tp[MOST];
    ps_meeting m = { .rendezvous = p->rendezvous, .rank = p->rank, .size = p->of.dp * p->of.tp, .timeout_s = 20,
                     .heartbeat_s = 5 };
    if (!WELL(ps_group_gloo(p->ctx, &m, &p->world))) return;
    for (int d = 0; d < p->of.dp; d++) dp[d] = d * p->of.tp + p->tp_rank;
    for (int t = 0; t < p->of.tp; t++) tp[t] = p->dp_rank * p->of.tp + t;
    WELL(ps_group_split(p->world, p->of.dp, dp, "dp", &p->dp));
    WELL(ps_group_split(p->world, p->of.tp, tp, "tp", &p->tp));
}

static void *rank_main(void *arg)
{
    process *p = arg;
    pthread_mutex_lock(&opening);
    WELL(ps_ctx_new(&p->ctx));
    pthread_mutex_unlock(&opening);
    if (!is_alone(p)) make_groups(p);
    if (!p->bad) train(p);
    ps_group_close(p->dp);
    ps_group_close(p->tp);
    ps_group_close(p->world);
    pthread_mutex_lock(&opening);
    ps_ctx_free(p->ctx);
    pthread_mutex_unlock(&opening);
    return NULL;
}

static int run_ranks(layout of, int n, const ps_action *table, int lacks, process *all)
{
    pthread_t threads[MOST];
    char path[] = "/tmp/ps_test_tp_XXXXXX";
    int size = of.dp * of.tp;
    close(mkstemp(path));
    for (int r = 0; r < size; r++) {
        all[r] = (process){ .rank = r, .dp_rank = r / of.tp, .tp_rank = r % of.tp, .of = of, .n = n, .table = table,
                            .lacks = lacks };
        snprintf(all[r].rendezvous, sizeof all[r].rendezvous, "file://%s", path);
        pthread_create(&threads[r], NULL, rank_main, &all[r]);
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
        if (all[r].bad) printf("  dp %d, tp %d, stage %d: %s\n", of.dp, of.tp, of.stage, all[r].why);
        CHECK(all[r].bad == 0);
    }
    unlink(path);
    return size;
}

/* Joins the pieces of the ranks with dp rank 0. The other ranks have the same pieces. */
static result run_all(layout of, int n, const ps_action *table)
{
    process all[MOST];
    int size = run_ranks(of, n, table, -1, all);
    result whole = all[0].r;
    for (int r = 0; r < size; r++) {
        CHECK(!memcmp(all[r].r.norm, whole.norm, sizeof whole.norm));
        for (int v = 0; v < VSTAGES; v++)
            for (int kind = 0; kind < KINDS; kind++) {
                int piece = kind == SPLIT ? all[r].tp_rank : 0;
                double *mine = all[r].r.values[v][kind][piece], *place = whole.values[v][kind][piece];
                if (size > 1 && kind == SPLIT && all[r].dp_rank == 0) memcpy(place, mine, N * sizeof *mine);
                CHECK(!memcmp(mine, place, N * sizeof *mine));
            }
    }
    return whole;
}

#define F(v, m) { PS_ACT_FORWARD, v, m }
#define B(v, m) { PS_ACT_BACKWARD, v, m }
#define R(v) { PS_ACT_REDUCE, v, 0 }
#define OF(list) (int)(sizeof list / sizeof *list), list
#define UPDATE { PS_ACT_UPDATE, 0, 0 }
#define END { PS_ACT_NORM, 0, 0 }, UPDATE

static const ps_action plain[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), F(0, 1), F(1, 1), B(1, 1), B(0, 1), END },
    reduced[] = { F(0, 0), F(0, 1), F(1, 0), B(1, 0), F(1, 1), B(1, 1), R(1), B(0, 0), B(0, 1), R(0), END },
    once[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), END },
    without_norm[] = { F(0, 0), F(1, 0), B(1, 0), B(0, 0), UPDATE };

static bool same(const result *a, const result *b) { return !memcmp(a, b, sizeof *a); }

static void test_layouts(void)
{
    static const layout layouts[] = { { .dp = 1, .tp = 2 }, { .dp = 2, .tp = 1 }, { .dp = 2, .tp = 2 },
                                      { .dp = 2, .tp = 2, .stage = 1 }, { .dp = 2, .tp = 2, .stage = 2 },
                                      { .dp = 2, .tp = 2, .stage = 3 } };
    result alone = run_all((layout){ .dp = 1, .tp = 1, .dtype = PS_F32 }, OF(plain));
    for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
        layout of = layouts[k];
        of.dtype = PS_F32;
        result r = run_all(of, OF(plain)), again = run_all(of, OF(reduced));
        for (int s = 0; s < STEPS; s++) CHECK(r.norm[s] == norm_of(&of, s, MICROS, VSTAGES));
        CHECK(same(&r, &again));
        if (of.dp == 2 && of.tp == 2) CHECK(same(&r, &alone));
    }
}

/* Tests half-precision types, gradients stored in the parameters' memory, and a parameter that waits for another
 * virtual stage. */
static void test_places(void)
{
    for (int how = 0; how < 4; how++) {
        layout of = { .dp = 1, .tp = 1, .dtype = how < 3 ? PS_BF16 : PS_F32, .slots = how == 1, .shared = how >= 2 };
        bool micros = !of.slots;
        int n = micros ? (int)(sizeof plain / sizeof *plain) : (int)(sizeof once / sizeof *once);
        result alone = run_all(of, n, micros ? plain : once);
        of.dp = of.tp = 2;
        for (of.stage = 0; of.stage <= 3; of.stage++) {
            result r = run_all(of, n, micros ? plain : once);
            if (!CHECK(same(&r, &alone))) printf("  case %d, stage %d\n", how, of.stage);
            if (!of.shared) CHECK(r.norm[1] == norm_of(&of, 1, micros ? MICROS : 1, VSTAGES));
        }
    }
}

/* Updates in backward wait for the sums. */
static void test_overlap(void)
{
    for (int slots = 0; slots < 2; slots++) {
        layout of = { .dp = 1, .tp = 2, .dtype = slots ? PS_BF16 : PS_F32, .slots = slots };
        result behind = run_all(of, OF(without_norm)), within;
        of.overlap = true;
        within = run_all(of, OF(without_norm));
        CHECK(same(&within, &behind));
    }
}

/* If only some ranks have a gradient, the error on all ranks contains the parameter's name. */
static void test_one_lacks(void)
{
    process all[MOST];
    for (int lacks = 0; lacks < 2; lacks++) {
        int n = run_ranks((layout){ .dp = 1, .tp = 2, .dtype = PS_F32 }, OF(plain), lacks, all);
        for (int r = 0; r < n; r++) {
            CHECK(all[r].failed == PS_EINVAL);
            if (!CHECK(strstr(all[r].why, "1 of the 2 tensor-parallel ranks have a gradient of parameter 3") != NULL))
                printf("  %s\n", all[r].why);
        }
    }
}

static void test_refusals(void)
{
    process p = { .of = { .dp = 1, .tp = 1, .dtype = PS_F32 }, .lacks = -1 };
    ps_chunk_config config = { .prefetch = 1 };
    ps_group *self = NULL;
    int32_t parts[2];
    OK(ps_ctx_new(&p.ctx));
    OK(ps_group_self(p.ctx, &self));
    FAILS(ps_engine_tensor_parallel(p.ctx, self), PS_ESTATE, "no engine");
    OK(ps_step_new(p.ctx, &p.step));
    OK(ps_engine_open(p.ctx, p.step, &config, NULL));
    make_leaves(&p);
    ps_param one = param_of(&p, 0, parts);
    one.tp = PS_TP_PARTIAL;
    FAILS(ps_engine_params(p.ctx, 1, &one, 1, 1), PS_EINVAL, "no such ranks");
    OK(ps_engine_tensor_parallel(p.ctx, self));
    FAILS(ps_engine_tensor_parallel(p.ctx, self), PS_ESTATE, "once");
    one.tp = PS_TP_PARTIAL + 1;
    FAILS(ps_engine_params(p.ctx, 1, &one, 1, 1), PS_EINVAL, "kind 3");
    one.tp = PS_TP_SPLIT;
    OK(ps_engine_params(p.ctx, 1, &one, 1, 1));
    ps_tensor_release(p.leaf[0].w);
    for (int k = 0; k < 4; k++) if (p.leaf[0].own[k]) ps_tensor_release(p.leaf[0].own[k]);
    ps_engine_close(p.ctx);
    ps_step_free(p.step);
    ps_group_close(self);
    ps_ctx_free(p.ctx);
}

int main(void)
{
    ps_kind_state("exp_avg"), ps_kind_state("exp_avg_sq");             /* before there are other threads */
    test_layouts();
    test_places();
    test_overlap();
    test_one_lacks();
    test_refusals();
    return end_checks();
}
#endif
