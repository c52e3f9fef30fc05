/* SPDX-License-Identifier: BSD-3-Clause
 * The executor of pipelines, with threads as ranks and a channel in memory: every schedule gives the gradients of the
 * uncut model bit for bit, and the simulator's times by the virtual clock; also messages that are late or wrong. Each
 * rank has an engine and a step; the executor performs backwards, weight gradients and reductions by itself. */
#include <pthread.h>
#include "check.h"
#include "pipe/exec.h"
#include "tensor/tensor.h"

enum { RANKS = 8, N = 32, MICROS = 16, VSTAGES = 16, MESSAGES = 256, ROW = 4096 };

/* -- a channel in memory ------------------------------------------------------------------------------------------- */
typedef struct message {
    pipe_tag tag;
    pipe_note note;
    int64_t numel;                  /* -1 if there is no tensor */
    double values[N];
} message;

typedef struct office {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    message *sent[RANKS][RANKS][PIPE_LANES];            /* [MESSAGES] */
    int n_sent[RANKS][RANKS][PIPE_LANES], n_posted[RANKS][RANKS][PIPE_LANES];
    int at_yield[MICROS], ranks;
    pipe_tag came[RANKS][ROW];                          /* [n_came] the actions that each rank has reached */
    int n_came[RANKS];
    bool failed;
    char why[200];
    double late;                    /* delay that is added to the arrival of the first message from rank 0 */
} office;
static office o;

typedef struct channel { pipe_channel base; int rank; } channel;
typedef struct request { bool sends; int peer, lane, turn; pipe_tag tag; ps_tensor *t; } request;

static int failed_now(void) { return ps_fail(PS_EIO, "another rank failed: %s", o.why); }

static int box_send(pipe_channel *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t,
                    void **out)
{
    int rank = ((channel *)w)->rank, rc = 0;
    pthread_mutex_lock(&o.lock);
    message **box = &o.sent[rank][peer][lane];
    int turn = o.n_sent[rank][peer][lane]++;
    if (!*box) *box = calloc(MESSAGES, sizeof **box);
    message *m = &(*box)[turn];
    *m = (message){ .tag = *tag, .note = *note, .numel = t ? t->numel_ : -1 };
    if (rank == 0 && turn == 0) m->note.when += o.late;
    if (t) rc = ps_tensor_read_f64(t, 0, t->numel_, m->values);
    if (o.failed) rc = failed_now();
    pthread_cond_broadcast(&o.moved);
    pthread_mutex_unlock(&o.lock);
    request *r = rc == 0 ? calloc(1, sizeof *r) : NULL;
    if (r) r->sends = true, *out = r;
    return rc;
}

static int box_recv(pipe_channel *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out)
{
    request *r = calloc(1, sizeof *r);
    pthread_mutex_lock(&o.lock);
    *r = (request){ .peer = peer, .lane = lane, .tag = *tag, .t = t,
                    .turn = o.n_posted[peer][((channel *)w)->rank][lane]++ };
    pthread_mutex_unlock(&o.lock);
    *out = r;
    return 0;
}

static int box_wait(pipe_channel *w, void *waits, pipe_note *note)
{
    request r = *(request *)waits;
    int rank = ((channel *)w)->rank, rc = 0;
    message m = { .numel = -1 };
    free(waits);
    if (r.sends) return 0;
    if (r.t) CHECK(ps_tensor_alive(r.t));                /* bytes can still arrive in it */
    pthread_mutex_lock(&o.lock);
    while (!o.failed && o.n_sent[r.peer][rank][r.lane] <= r.turn) pthread_cond_wait(&o.moved, &o.lock);
    if (o.n_sent[r.peer][rank][r.lane] > r.turn) m = o.sent[r.peer][rank][r.lane][r.turn];
    else rc = failed_now();
    pthread_mutex_unlock(&o.lock);
    if (rc < 0) return rc;
    if (m.tag.kind != r.tag.kind || m.tag.vstage != r.tag.vstage || m.tag.micro != r.tag.micro ||
        m.tag.part != r.tag.part || m.numel != (r.t ? r.t->numel_ : -1))
        return ps_fail(PS_EINVAL, "%c of virtual stage %d, micro-batch %d came instead of %c of %d, %d", m.tag.kind,
                       m.tag.vstage, m.tag.micro, r.tag.kind, r.tag.vstage, r.tag.micro);
    if (note) *note = m.note;
    return r.t ? ps_tensor_write_f64(r.t, 0, m.numel, m.values) : 0;
}

static bool box_test(pipe_channel *w, void *waits) { return ((request *)waits)->sends; }
static void box_at(pipe_channel *w, const pipe_tag *tag)
{
    int rank = ((channel *)w)->rank;
    if (tag && CHECK(o.n_came[rank] < ROW)) o.came[rank][o.n_came[rank]++] = *tag;
}

static void box_abort(pipe_channel *w, const char *why)
{
    pthread_mutex_lock(&o.lock);
    if (!o.failed) snprintf(o.why, sizeof o.why, "%s", why);
    o.failed = true;
    pthread_cond_broadcast(&o.moved);
    pthread_mutex_unlock(&o.lock);
}
static void box_close(pipe_channel *w) { free(w); }
static const pipe_channel_table box = { .send = box_send, .recv = box_recv, .wait = box_wait, .test = box_test,
                                     .at = box_at, .abort = box_abort, .close = box_close };

static void open_office(int ranks)
{
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < RANKS; b++)
            for (int lane = 0; lane < PIPE_LANES; lane++) free(o.sent[a][b][lane]);
    memset(&o, 0, sizeof o);
    pthread_mutex_init(&o.lock, NULL);
    pthread_cond_init(&o.moved, NULL);
    o.ranks = ranks;
}

/* Makes all ranks wait for each other in the body of the script's loop. */
static void meet(int micro)
{
    pthread_mutex_lock(&o.lock);
    o.at_yield[micro]++;
    pthread_cond_broadcast(&o.moved);
    while (!o.failed && o.at_yield[micro] < o.ranks) pthread_cond_wait(&o.moved, &o.lock);
    pthread_mutex_unlock(&o.lock);
}

/* -- a model: virtual stage v multiplies by a weight of its own; the loss is the sum of squares -------------------- */
static ps_tensor *drawn(ps_ctx *ctx, int seed)
{
    int64_t numel = N;
    double values[N];
    ps_tensor *t = NULL;
    OK(ps_tensor_new(ctx, PS_F32, 0, 1, &numel, &t));
    for (int i = 0; i < N; i++) values[i] = 1 + (double)((i * 37 + seed * 101) % 64 - 31) / 300;
    OK(ps_tensor_write_f64(t, 0, N, values));
    OK(ps_tensor_keep(t));
    return t;
}

static ps_tensor *op(ps_ctx *ctx, int which, int n, ps_tensor *a, ps_tensor *b)
{
    ps_attrs_sum attrs = { 0 };
    ps_tensor *in[] = { a, b }, *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, which, n, in, &attrs, which == PS_OP_sum ? (int64_t)sizeof attrs : 4, out));
    return out[0];
}

static ps_tensor *forward(ps_ctx *ctx, ps_tensor *w, ps_tensor *x, bool last)
{
    ps_tensor *y = op(ctx, PS_OP_mul, 2, x, w);
    if (!last) return y;
    ps_tensor *z = op(ctx, PS_OP_mul, 2, y, y), *loss = op(ctx, PS_OP_sum, 1, z, NULL);
    ps_tensor_release(y), ps_tensor_release(z);
    return loss;
}

static ps_tensor *weight(ps_ctx *ctx, int v)
{
    ps_tensor *w = drawn(ctx, v);
    OK(ps_tensor_require_grad(w, 1));
    return w;
}

/* Computes the gradients and losses of the undivided model with a plain loop. */
static void run_whole(int vstages, int micros, float (*grads)[N], double *losses)
{
    ps_ctx *ctx;
    ps_tensor *w[VSTAGES];
    if (!OK(ps_ctx_new(&ctx))) return;
    for (int v = 0; v < vstages; v++) w[v] = weight(ctx, v);
    for (int i = 0; i < micros; i++) {
        int64_t segment;
        ps_tensor *x = drawn(ctx, 1000 + i);
        for (int v = 0; v < vstages; v++) {
            ps_tensor *y = forward(ctx, w[v], x, v == vstages - 1);
            ps_tensor_release(x);
            x = y;
        }
        OK(ps_tensor_read_f64(x, 0, 1, &losses[i]));
        CHECK(ps_backward_begin_n(ctx, 1, &x, NULL, &segment) == 0);
        ps_tensor_release(x);
    }
    for (int v = 0; v < vstages; v++) {
        OK(ps_tensor_read(ps_tensor_get_grad(w[v]), grads[v], sizeof grads[v]));
        ps_tensor_release(w[v]);
    }
    ps_ctx_free(ctx);
}

/* -- the step of a rank -------------------------------------------------------------------------------------------- */
static bool is_of_step(const ps_action *a) { return a->kind < PS_ACT_COUNT; }

static int step_open(ps_ctx *ctx, ps_step **step)
{
    ps_chunk_config config = { .prefetch = 1 };
    PS_TRY(ps_policy_find("plan", &config.policy));
    PS_TRY(ps_step_new(ctx, step));
    return ps_engine_open(ctx, *step, &config, NULL);
}

/* Begins a step with the actions of a row. With `swaps`, the row's first WEIGHT and the following FORWARD are
 * exchanged. */
static int step_begin(ps_step *step, const ps_pipe_table *t, int rank, bool swaps)
{
    static _Thread_local ps_action list[ROW];
    const pipe_row *row = &t->rows[rank];
    ps_step_config c = { .actions = list, .trace = PS_TRACE_UNKNOWN };
    for (int32_t i = 0; i < row->n; i++) {
        ps_action a = row->actions[i];
        if (!is_of_step(&a)) continue;
        a.vstage = t->local_of[a.vstage];
        list[c.n_actions++] = a;
        if (!swaps || c.n_actions < 2 || a.kind != PS_ACT_FORWARD || list[c.n_actions - 2].kind != PS_ACT_WEIGHT)
            continue;
        list[c.n_actions - 1] = list[c.n_actions - 2];
        list[c.n_actions - 2] = a;
        swaps = false;
    }
    return ps_step_begin(step, &c);
}

static int step_next(ps_step *step, const ps_pipe_event *e)
{
    return step && e->kind == PS_ACT_FORWARD ? ps_step_next(step, e->kind, &(ps_action_how){ .scale = 1 }) : 0;
}

static int step_done(ps_step *step, const ps_pipe_event *e)
{
    return step && e->kind == PS_ACT_FORWARD ? ps_step_done(step) : 0;
}

static int step_end(ps_step *step)
{
    int32_t trace;
    return step ? ps_step_end(step, &trace) : 0;
}

static void step_close(ps_ctx *ctx, ps_step *step)
{
    if (!step) return;
    if (ps_step_look(step)->open) OK(ps_step_end(step, NULL));
    ps_engine_close(ctx);
    ps_step_free(step);
}

/* -- a rank -------------------------------------------------------------------------------------------------------- */
typedef struct rank {
    const ps_pipe_table *t;
    const char *text;                       /* text of the table, or NULL for a schedule's table */
    const ps_pipe_cost *costs;
    const ps_pipe_link *link;
    int number, steps, rc, fails_at;        /* fails_at: index of the event that fails, or -1 */
    bool dry, small, swaps;                 /* small: the rank expects other shapes; swaps: see step_begin */
    bool again, tells;                      /* again: forwards are checkpointed segments; tells: see ps_pipe_begin */
    int n_segments, n_told;
    char error[600];
    float (*grads)[N];
    double losses[MICROS];
    ps_pipe_span *spans;
    ps_pipe_rank_times times;
} rank;

/* Runs a forward that keeps nothing for its backward, which runs the forward again. */
static ps_tensor *segment(ps_ctx *ctx, ps_tensor *w, ps_tensor *in, bool last)
{
    int64_t id;
    ps_segment_begin(ctx);
    ps_set_grad_enabled(ctx, 0);
    ps_tensor *out = forward(ctx, w, in, last);
    ps_set_grad_enabled(ctx, 1);
    OK(ps_segment_new(ctx, 1, &in, 1, &out, &id));
    return out;
}

/* Returns the number of the row's actions that the executor performs by itself and that have one of two kinds. */
static int count_own(const rank *r, int one, int other)
{
    int n = 0;
    const pipe_row *row = &r->t->rows[r->number];
    for (int32_t i = 0; i < row->n; i++) n += row->actions[i].kind == one || row->actions[i].kind == other;
    return n;
}

/* Checks the numbers of a loss. Odd micro-batches have a weight, and those whose index is a multiple of 3 have hits.
 * All ranks get these numbers. For other micro-batches they get -1 and 0 of 0, even if the previous step had numbers
 * for them. */
static int tell_numbers(ps_pipe *x, int32_t micro)
{
    if (micro % 2) PS_TRY(ps_pipe_weigh(x, micro, 10 + micro));
    return micro % 3 ? 0 : ps_pipe_score(x, micro, 1 + micro, 1e15 + micro);
}

static void check_numbers(const ps_pipe_event *e)
{
    bool scored = e->micro % 3 == 0;
    CHECK(e->weight == (e->micro % 2 ? 10 + e->micro : -1));
    CHECK(e->hits == (scored ? 1 + e->micro : 0) && e->targets == (scored ? 1e15 + e->micro : 0));
}

static int perform(rank *r, ps_ctx *ctx, ps_pipe *x, ps_step *step, const ps_pipe_table *t, ps_tensor **w)
{
    int last = r->t->spec.vstages - 1, events = 0;
    int32_t seen = 0;                       /* number of the row's actions before the current one */
    ps_tensor *given = NULL;                /* the output of the forward before this event */
    ps_tensor *ins[VSTAGES][MICROS] = { { NULL } };             /* inputs of segments, until the segments have run
                                                                 * again */
    if (step) PS_TRY(step_begin(step, t, r->number, r->swaps));
    PS_TRY(ps_pipe_begin(x, step, r->dry, r->tells));
    for (;;) {
        ps_pipe_event e;
        ps_tensor *out = NULL, *in;
        int next = ps_pipe_next(x, &e);
        if (next == 0 && given) CHECK(!ps_tensor_alive(given));      /* its bytes have been sent */
        ps_tensor_release(given);
        given = NULL;
        PS_TRY(next);
        for (int32_t i = 0; i < e.n_before; i++)
            CHECK(!memcmp(&e.before[i], &t->rows[r->number].actions[seen++], sizeof *e.before));
        const ps_action *due = &t->rows[r->number].actions[seen];
        if (e.kind == PS_ACT_NONE) return CHECK(seen == t->rows[r->number].n), step_end(step);
        if (e.kind == PS_ACT_FORWARD || e.kind == PS_ACT_YIELD) seen++;
        CHECK(e.vstage == due->vstage && e.micro == due->micro && (e.kind == due->kind || e.kind == PS_ACT_SEGMENT));
        if (events++ == r->fails_at) return ps_fail(PS_ERANGE, "rank %d had enough", r->number);
        PS_TRY(step_next(step, &e));
        if (e.kind == PS_ACT_FORWARD) {
            CHECK(e.n == (e.vstage > 0) && e.local == r->t->local_of[e.vstage]);
            in = e.vstage ? e.in[0] : drawn(ctx, 1000 + e.micro);
            out = (r->again ? segment : forward)(ctx, w[e.vstage], in, e.vstage == last);
            if (r->again) ps_tensor_retain(ins[e.vstage][e.micro] = in);
            if (!e.vstage) ps_tensor_release(in);
            if (e.vstage == last && !r->dry) PS_TRY(tell_numbers(x, e.micro));
        } else if (e.kind == PS_ACT_SEGMENT) {
            CHECK(due->kind == PS_ACT_BACKWARD || due->kind == PS_ACT_INPUT);
            ps_tensor *y = forward(ctx, w[e.vstage], ins[e.vstage][e.micro], e.vstage == last);
            OK(ps_backward_splice(ctx, 1, &y));
            ps_tensor_release(y), ps_tensor_release(ins[e.vstage][e.micro]);
            r->n_segments++;
        } else if (e.kind != PS_ACT_YIELD) {
            CHECK(r->tells && due == &t->rows[r->number].actions[seen]);
            r->n_told++;
        } else {
            r->losses[e.micro] = e.loss;
            if (!r->dry) check_numbers(&e);
            if (step) PS_TRY(ps_pipe_mark(x, e.micro, NULL, 1));
            meet(e.micro);
        }
        int rc = step_done(step, &e);
        if (rc == 0) rc = ps_pipe_done(x, out ? 1 : 0, &out);
        if (rc == 0 && out && e.vstage < last && pipe_link(r->t, e.vstage, e.vstage + 1) >= 0) given = out;
        else ps_tensor_release(out);
        PS_TRY(rc);
    }
}

static ps_pipe_table *make(int schedule, int p, int v, int m, int forward_only)
{
    ps_pipe_spec spec = { .schedule = schedule, .stages = p, .virtual_stages = v, .micro_batches = m,
                          .forward_only = forward_only };
    ps_pipe_table *t = NULL;
    if (OK(ps_pipe_table_new(&spec, &t))) OK(ps_pipe_table_lower(t));
    return t;
}

static ps_pipe_table *read_table(const char *text)
{
    ps_pipe_table *t = NULL;
    if (OK(ps_pipe_table_read(text, (int64_t)strlen(text), "the test's", &t))) OK(ps_pipe_table_lower(t));
    return t;
}

static pthread_mutex_t contexts = PTHREAD_MUTEX_INITIALIZER;       /* a process opens its backends one at a time */

static void *run_rank(void *arg)
{
    rank *r = arg;
    ps_ctx *ctx;
    ps_pipe *x = NULL;
    ps_step *step = NULL;
    ps_tensor *w[VSTAGES] = { NULL };
    channel *mine = calloc(1, sizeof *mine);
    pthread_mutex_lock(&contexts);
    int rc = ps_ctx_new(&ctx);
    if (rc == 0 && !r->t->spec.forward_only) rc = step_open(ctx, &step);
    pthread_mutex_unlock(&contexts);
    if (!OK(rc)) return NULL;
    *mine = (channel){ { &box }, r->number };
    const ps_pipe_spec *as = &r->t->spec;
    ps_pipe_table *own = r->text ? read_table(r->text) : make(as->schedule, as->stages, as->virtual_stages,
                                                              as->micro_batches, as->forward_only);
    if (!OK(pipe_open(ctx, own, r->number, &mine->base, &x))) return NULL;
    for (int v = 0; v < r->t->spec.vstages; v++) {
        ps_pipe_tensor carry = { .dtype = PS_F32, .ndim = 1, .grad = 1, .shape = { r->small ? N / 2 : N } };
        for (int i = 0; i < r->t->spec.micro_batches; i++)
            OK(ps_pipe_expect(x, v, i, v < r->t->spec.vstages - 1, &carry));
        if (r->t->rank_of[v] == r->number) w[v] = weight(ctx, v);
    }
    if (r->costs) OK(ps_pipe_clock(x, r->costs, r->link));
    r->rc = perform(r, ctx, x, step, own, w);
    if (r->rc < 0) {
        snprintf(r->error, sizeof r->error, "%s", ps_error_message());
        ps_pipe_abort(x, ps_error_message());
    }
    const ps_pipe_span *spans;
    if (r->rc == 0 && r->costs && OK(ps_pipe_measured(x, &r->times, &spans)))
        memcpy(r->spans, spans, (size_t)r->t->rows[r->number].n * sizeof *spans);
    for (int v = 0; v < r->t->spec.vstages; v++) {
        if (w[v] && r->rc == 0 && !r->t->spec.forward_only && ps_tensor_get_grad(w[v]))
            OK(ps_tensor_read(ps_tensor_get_grad(w[v]), r->grads[v], sizeof r->grads[v]));
        ps_tensor_release(w[v]);
    }
    ps_pipe_close(x);
    ps_pipe_table_free(own);
    pthread_mutex_lock(&contexts);
    step_close(ctx, step);
    ps_ctx_free(ctx);
    pthread_mutex_unlock(&contexts);
    return NULL;
}

static rank ranks[RANKS];

static void run_ranks(int n)
{
    pthread_t threads[RANKS];
    for (int i = 0; i < n; i++) pthread_create(&threads[i], NULL, run_rank, &ranks[i]);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
}

static float grads[VSTAGES][N], whole_grads[VSTAGES][N];
static ps_pipe_span spans[RANKS][ROW], simulated[RANKS][ROW], *simulated_of[RANKS];

static void prepare(const ps_pipe_table *t, const ps_pipe_cost *costs, const ps_pipe_link *link)
{
    open_office(t->spec.stages);
    memset(grads, 0, sizeof grads);
    for (int i = 0; i < t->spec.stages; i++) {
        ranks[i] = (rank){ .t = t, .costs = costs, .link = link, .number = i, .fails_at = -1, .grads = grads,
                           .spans = spans[i] };
        simulated_of[i] = simulated[i];
    }
}

/* Checks that a rank reached its row's actions in order. */
static void check_came(const ps_pipe_table *t, int of)
{
    int n = 0;
    for (int32_t i = 0; i < t->rows[of].n; i++) {
        const ps_action *a = &t->rows[of].actions[i];
        const pipe_tag *tag = &o.came[of][n];
        if (!is_of_step(a) && a->kind != PS_ACT_YIELD) continue;
        if (!CHECK(n < o.n_came[of])) return;
        CHECK(tag->kind == *pipe_kind_text(a->kind) && tag->vstage == a->vstage && tag->micro == a->micro);
        n++;
    }
    CHECK(n == o.n_came[of]);
}

/* Every schedule, timed by a clock with and without links, and with segments that run again and actions that are
 * reported to the script. */
static void test_schedules(void)
{
    static const struct { int schedule, p, v, m; } of[] = {
        { PS_PIPE_GPIPE, 4, 1, 8 }, { PS_PIPE_1F1B, 4, 1, 8 }, { PS_PIPE_1F1B, 3, 1, 2 }, { PS_PIPE_1F1B, 1, 1, 3 },
        { PS_PIPE_INTERLEAVED, 4, 2, 8 }, { PS_PIPE_INTERLEAVED, 2, 3, 5 }, { PS_PIPE_INTERLEAVED, 1, 4, 3 },
        { PS_PIPE_LOOPED_BFS, 4, 2, 8 }, { PS_PIPE_LOOPED_BFS, 3, 2, 2 }, { PS_PIPE_ZB_H1, 4, 1, 8 },
        { PS_PIPE_ZB_H1, 8, 1, 8 }, { PS_PIPE_ZB_V, 4, 2, 8 }, { PS_PIPE_ZB_V, 2, 2, 1 }, { PS_PIPE_ZB_V, 8, 2, 8 } };
    for (size_t k = 0; k < sizeof of / sizeof *of; k++)
        for (int way = 0; way < 3; way++) {
            int links = way == 1;
            ps_pipe_table *t = make(of[k].schedule, of[k].p, of[k].v, of[k].m, 0);
            ps_pipe_cost costs[VSTAGES];
            ps_pipe_link link = { .latency = links ? 3 : 0, .rate = links ? 2 : 0 };
            ps_pipe_times times = { 0, 0 };
            double losses[MICROS], last = 0;
            for (int v = 0; v < t->spec.vstages; v++)
                costs[v] = (ps_pipe_cost){ .forward = 1 + links * v % 5, .input = 1 + links * v % 3, .weight = 1,
                                           .nbytes = 1 + v };
            prepare(t, costs, &link);
            for (int i = 0; i < of[k].p; i++) ranks[i].again = ranks[i].tells = way == 2;
            run_whole(t->spec.vstages, of[k].m, whole_grads, losses);
            run_ranks(of[k].p);
            OK(ps_pipe_simulate(t, costs, &link, &times, NULL, simulated_of));
            for (int i = 0; i < of[k].p; i++) {
                int walks = count_own(&ranks[i], PS_ACT_BACKWARD, PS_ACT_INPUT);
                CHECK(ranks[i].rc == 0);
                CHECK(ranks[i].n_segments == (way == 2 ? walks : 0));
                CHECK(ranks[i].n_told == (way == 2 ? walks + count_own(&ranks[i], PS_ACT_WEIGHT, PS_ACT_REDUCE) : 0));
                CHECK(!memcmp(ranks[i].losses, losses, sizeof *losses * (size_t)of[k].m));
                CHECK(!memcmp(spans[i], simulated[i], sizeof **spans * (size_t)t->rows[i].n));
                check_came(t, i);
                if (ranks[i].times.last > last) last = ranks[i].times.last;
            }
            CHECK(last == times.makespan);
            CHECK(!memcmp(grads, whole_grads, sizeof **grads * N * (size_t)t->spec.vstages));
            ps_pipe_table_free(t);
        }
}

/* An evaluation, and a step in which nothing is sent. */
static void test_without_backward(void)
{
    for (int schedule = 0; schedule < PS_PIPE_SCHEDULES; schedule++) {
        bool many = schedule == PS_PIPE_INTERLEAVED || schedule == PS_PIPE_LOOPED_BFS || schedule == PS_PIPE_ZB_V;
        ps_pipe_table *t = make(schedule, 3, many ? 2 : 1, 6, 1);
        double losses[MICROS];
        prepare(t, NULL, NULL);
        run_whole(t->spec.vstages, 6, whole_grads, losses);
        run_ranks(3);
        for (int i = 0; i < 3; i++) {
            CHECK(ranks[i].rc == 0);
            CHECK(!memcmp(ranks[i].losses, losses, sizeof *losses * 6));
        }
        ps_pipe_table_free(t);
        t = make(schedule, 3, many ? 2 : 1, 6, 0);
        prepare(t, NULL, NULL);
        o.ranks = 1;
        ranks[1].dry = true;
        run_rank(&ranks[1]);
        CHECK(ranks[1].rc == 0 && ranks[1].losses[5] == 0);
        ps_pipe_table_free(t);
    }
}

/* If one rank makes a mistake, all ranks get the error. */
static void test_faults(void)
{
    ps_pipe_table *t = make(PS_PIPE_1F1B, 4, 1, 8, 0), *other = make(PS_PIPE_GPIPE, 4, 1, 8, 0);
    for (int who = 0; who < 4; who++)
        for (int at = 0; at < 16; at += 3) {               /* events of its 8 forwards and 8 yields */
            prepare(t, NULL, NULL);
            ranks[who].fails_at = at;
            run_ranks(4);
            for (int i = 0; i < 4; i++) {
                CHECK(ranks[i].rc == (i == who ? PS_ERANGE : PS_EIO) || ranks[i].rc == 0);
                if (ranks[i].rc < 0) CHECK(strstr(ranks[i].error, "had enough") != NULL);
            }
            CHECK(ranks[who].rc == PS_ERANGE);
        }
    ps_pipe_table *apart = make(PS_PIPE_ZB_H1, 4, 1, 8, 0);
    prepare(apart, NULL, NULL);
    ranks[3].swaps = true;                          /* its executor reaches weight gradients that are not due */
    run_ranks(4);
    CHECK(ranks[3].rc == PS_ESTATE);
    for (int i = 0; i < 4; i++)
        CHECK(ranks[i].rc < 0 && strstr(ranks[i].error, "the pipeline's row has W of virtual stage 3, micro-batch 0, "
                                                        "but the step expects another action"));
    ps_pipe_table_free(apart);
    prepare(t, NULL, NULL);
    ranks[2].t = other;                             /* rank 2's messages have the order of its own table */
    ranks[2].small = true;
    run_ranks(4);
    bool named = false;
    for (int i = 0; i < 4; i++) CHECK(ranks[i].rc < 0), named = named || strstr(ranks[i].error, "came instead of");
    CHECK(named);
    ps_pipe_cost costs[4];
    for (int v = 0; v < 4; v++) costs[v] = (ps_pipe_cost){ .forward = 1, .input = 1, .weight = 1 };
    double last[2] = { 0, 0 };
    for (int late = 0; late < 2; late++) {          /* a message that is two ticks late */
        prepare(t, costs, NULL);
        o.late = 2 * late;
        run_ranks(4);
        for (int i = 0; i < 4; i++) if (ranks[i].times.last > last[late]) last[late] = ranks[i].times.last;
    }
    CHECK(last[0] == 33 && last[1] == 35);
    ps_pipe_table_free(t);
    ps_pipe_table_free(other);
}

/* Two actions of one rank are exchanged. The clock shows the order in which the executor performed them. */
static void test_swapped(void)
{
    static const char *const texts[] = { "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
                                         "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,1B1,1F2,1B2\n" };
    ps_pipe_cost costs[2];
    for (int v = 0; v < 2; v++) costs[v] = (ps_pipe_cost){ .forward = 1, .input = 1, .weight = 1 };
    for (int k = 0; k < 2; k++) {
        ps_pipe_table *t = read_table(texts[k]);
        ps_pipe_times times = { 0, 0 };
        double last = 0;
        prepare(t, costs, NULL);
        for (int i = 0; i < 2; i++) ranks[i].text = texts[k];
        run_ranks(2);
        for (int i = 0; i < 2; i++) if (ranks[i].times.last > last) last = ranks[i].times.last;
        OK(ps_pipe_simulate(t, costs, NULL, &times, NULL, NULL));
        CHECK(last == 12 + k && times.makespan == last);
        ps_pipe_table_free(t);
    }
}

/* Calls in the wrong order, and tensors that are not the expected ones. */
static void test_misuse(void)
{
    ps_ctx *ctx;
    ps_pipe *x = NULL;
    ps_pipe_event e;
    ps_pipe_spec spec = { .schedule = PS_PIPE_INTERLEAVED, .stages = 1, .virtual_stages = 2, .micro_batches = 1 };
    ps_pipe_table *t = NULL;
    ps_pipe_tensor carry = { .dtype = PS_F32, .ndim = 1, .grad = 1, .shape = { N } };
    ps_pipe_rank_times times;
    const ps_pipe_span *spans_;
    if (!OK(ps_ctx_new(&ctx)) || !OK(ps_pipe_table_new(&spec, &t))) return;
    channel *mine = calloc(1, sizeof *mine);
    *mine = (channel){ { &box }, 0 };
    FAILS(pipe_open(ctx, t, 0, &mine->base, &x), PS_ESTATE, "no transfers");
    OK(ps_pipe_table_lower(t));
    FAILS(pipe_open(ctx, t, 1, &mine->base, &x), PS_EINVAL, "rank 1");
    OK(pipe_open(ctx, t, 0, &mine->base, &x));
    ps_step *step = NULL;
    OK(step_open(ctx, &step));
    FAILS(ps_pipe_next(x, &e), PS_ESTATE, "no step");
    FAILS(ps_pipe_settings(x, &(ps_action_how){ .scale = 1 }), PS_ESTATE, "no step");
    FAILS(ps_pipe_done(x, 0, NULL), PS_ESTATE, "no action");
    FAILS(ps_pipe_mark(x, 0, NULL, 1), PS_ESTATE, "no step");
    FAILS(ps_pipe_weigh(x, 0, 1), PS_ESTATE, "no step");
    FAILS(ps_pipe_score(x, 0, 1, 1), PS_ESTATE, "no step");
    FAILS(ps_pipe_expect(x, 2, 0, 1, &carry), PS_ERANGE, "virtual stage 2");
    FAILS(ps_pipe_expect(x, 0, 0, PS_PIPE_CARRY + 1, &carry), PS_EINVAL, "at most 16");
    FAILS(ps_pipe_measured(x, &times, &spans_), PS_ESTATE, "no virtual clock");
    FAILS(ps_pipe_repeat(x, 1, 3), PS_EINVAL, "the first 3 and the last must be performed");
    FAILS(ps_pipe_repeat(x, 3, 1 << 20), PS_EINVAL, "the first 3 and the last must be performed");
    OK(ps_pipe_repeat(x, 0, 0));
    CHECK(!ps_pipe_differed(x));
    OK(ps_pipe_expect(x, 0, 0, 1, &carry));
    ps_tensor *w = weight(ctx, 0), *given = drawn(ctx, 1), *small = NULL;
    int64_t half = N / 2;
    OK(ps_tensor_new(ctx, PS_F32, 0, 1, &half, &small));
    for (int round = 0; round < 3; round++) {
        OK(ps_pipe_begin(x, step, 0, 0));
        FAILS(ps_pipe_begin(x, step, 0, 0), PS_ESTATE, "under way");
        FAILS(ps_pipe_mark(x, 1, NULL, 1), PS_ERANGE, "no micro-batch 1 in a table of 1");
        FAILS(ps_pipe_mark(x, -1, NULL, 1), PS_ERANGE, "no micro-batch -1");
        FAILS(ps_pipe_weigh(x, 1, 1), PS_ERANGE, "no micro-batch 1 in a table of 1");
        FAILS(ps_pipe_score(x, -1, 1, 1), PS_ERANGE, "no micro-batch -1");
        FAILS(ps_pipe_expect(x, 0, 0, 1, &carry), PS_ESTATE, "under way");
        FAILS(ps_pipe_repeat(x, 0, 0), PS_ESTATE, "under way");
        OK(ps_pipe_next(x, &e));
        FAILS(ps_pipe_next(x, &e), PS_ESTATE, "not done");
        if (round == 0) FAILS(ps_pipe_done(x, 0, NULL), PS_EINVAL, "virtual stage 0 returned 0 tensors");
        if (round == 1) FAILS(ps_pipe_done(x, 1, &small), PS_EINVAL, "another dtype, device or shape");
        if (round < 2) FAILS(ps_pipe_next(x, &e), PS_ESTATE, "failed");
        else {
            OK(ps_pipe_done(x, 1, &given));
            OK(ps_pipe_next(x, &e));
            FAILS(ps_pipe_done(x, 1, &given), PS_EINVAL, "has 32 elements; it must have one");
        }
        ps_pipe_abort(x, NULL);
    }
    ps_tensor_release(w), ps_tensor_release(given), ps_tensor_release(small);
    ps_pipe_close(x);
    step_close(ctx, step);
    ps_pipe_table_free(t);
    ps_ctx_free(ctx);
}

/* The context ends during a step, as it does when a script fails. The step ends before its tensors' bytes are freed. */
static void test_context_ends(void)
{
    ps_ctx *ctx;
    ps_pipe *x = NULL;
    ps_pipe_event e;
    ps_pipe_table *t = make(PS_PIPE_1F1B, 2, 1, 3, 0);
    ps_pipe_tensor carry = { .dtype = PS_F32, .ndim = 1, .grad = 1, .shape = { N } };
    channel *mine = calloc(1, sizeof *mine);
    open_office(2);
    *mine = (channel){ { &box }, 0 };
    if (!OK(ps_ctx_new(&ctx)) || !OK(pipe_open(ctx, t, 0, &mine->base, &x))) return;
    for (int i = 0; i < 3; i++) OK(ps_pipe_expect(x, 0, i, 1, &carry));
    ps_step *step = NULL;
    OK(step_open(ctx, &step));
    OK(ps_pipe_begin(x, step, 0, 0));
    for (int i = 0; i < 2; i++) {
        ps_tensor *given = drawn(ctx, i);
        OK(ps_pipe_next(x, &e));
        CHECK(e.kind == PS_ACT_FORWARD);
        FAILS(ps_pipe_mark(x, 0, given, 1), PS_EINVAL, "rank 1, which has the last virtual stage; this is rank 0");
        if (i == 0) OK(ps_pipe_done(x, 1, &given));
        ps_tensor_release(given);
    }
    CHECK(o.n_posted[1][0][PIPE_LANE_DOWN] == 1 && !o.failed);
    ps_ctx_free(ctx);
    CHECK(o.failed && strstr(o.why, "context was closed"));
    FAILS(ps_pipe_next(x, &e), PS_ESTATE, "no step");
    FAILS(ps_pipe_begin(x, step, 0, 0), PS_ESTATE, "context is closed");
    ps_pipe_close(x);
    ps_step_free(step);
    ps_pipe_table_free(t);
}

/* Runs a step with several virtual stages on one rank. Any failure is reported as the step's error. */
static int quiet_step(ps_ctx *ctx, ps_pipe *x, const ps_pipe_table *t, ps_step *step, ps_tensor **w, ps_tensor **batch)
{
    int last = t->spec.vstages - 1;
    PS_TRY(step_begin(step, t, 0, false));
    PS_TRY(ps_pipe_begin(x, step, 0, 0));
    for (;;) {
        ps_pipe_event e;
        ps_attrs_sum attrs = { 0 };
        ps_tensor *y[PS_MAX_OUT] = { NULL }, *loss[PS_MAX_OUT] = { NULL };
        int rc = ps_pipe_next(x, &e);
        if (rc < 0) return rc;
        if (e.kind == PS_ACT_NONE) return step_end(step);
        rc = step_next(step, &e);
        if (rc == 0 && e.kind == PS_ACT_YIELD) rc = ps_pipe_mark(x, e.micro, NULL, 1);
        if (rc == 0 && e.kind == PS_ACT_FORWARD) {
            ps_tensor *in[] = { e.vstage ? e.in[0] : batch[e.micro], w[e.vstage] };
            rc = ps_apply(ctx, PS_OP_mul, 2, in, &attrs, 4, y);
            if (rc == 0 && e.vstage == last) rc = ps_apply(ctx, PS_OP_sum, 1, y, &attrs, sizeof attrs, loss);
        }
        if (rc == 0) rc = step_done(step, &e);
        if (rc == 0) rc = ps_pipe_done(x, y[0] ? 1 : 0, loss[0] ? loss : y);
        ps_tensor_release(y[0]), ps_tensor_release(loss[0]);
        PS_TRY(rc);
    }
}

/* Every allocation fails once, one per run, beginning with the open. An abandoned step does not affect the next
 * step. */
static void test_without_memory(int schedule, int V)
{
    enum { MOST = 3, M = 2 };
    ps_pipe_table *t = make(schedule, 1, V, M, 0);
    float first[MOST][N], again[MOST][N];
    int n_failed = 0;
    bool fails = true;
    for (int nth = -1; fails && nth < 2000; nth++) {
        ps_ctx *ctx;
        ps_pipe *x = NULL;
        ps_step *step = NULL;
        ps_tensor *w[MOST], *batch[M];
        channel *mine = calloc(1, sizeof *mine);
        open_office(1);
        *mine = (channel){ { &box }, 0 };
        if (!OK(ps_ctx_new(&ctx)) || !OK(step_open(ctx, &step))) return;
        for (int v = 0; v < V; v++) w[v] = weight(ctx, v);
        for (int i = 0; i < M; i++) batch[i] = drawn(ctx, 1000 + i);
        ps_test_fail_alloc(nth, 1);
        int rc = pipe_open(ctx, t, 0, &mine->base, &x);
        if (rc < 0) free(mine);
        for (int k = 0; rc == 0 && k < (V - 1) * M; k++) {
            ps_pipe_tensor carry = { .dtype = PS_F32, .ndim = 1, .grad = 1, .shape = { N } };
            rc = ps_pipe_expect(x, k / M, k % M, 1, &carry);
        }
        if (rc == 0) rc = quiet_step(ctx, x, t, step, w, batch);
        fails = nth < 0 || ps_test_fail_alloc_left() < 0;
        ps_test_fail_alloc(-1, 0);
        n_failed += rc < 0;
        CHECK(rc == 0 || rc == PS_ENOMEM);
        if (rc < 0 && x) {
            ps_backward_end(ctx);
            ps_pipe_abort(x, NULL);
            OK(ps_step_end(step, NULL));
            for (int k = 0; k < (V - 1) * M; k++) {
                ps_pipe_tensor carry = { .dtype = PS_F32, .ndim = 1, .grad = 1, .shape = { N } };
                OK(ps_pipe_expect(x, k / M, k % M, 1, &carry));
            }
            for (int v = 0; v < V; v++) OK(ps_tensor_set_grad(w[v], NULL));
            OK(quiet_step(ctx, x, t, step, w, batch));
        }
        for (int v = 0; v < V && x; v++)
            OK(ps_tensor_read(ps_tensor_get_grad(w[v]), nth < 0 ? first[v] : again[v], sizeof first[v]));
        if (nth >= 0 && x) CHECK(!memcmp(first, again, sizeof first));
        ps_pipe_close(x);
        for (int v = 0; v < V; v++) ps_tensor_release(w[v]);
        for (int i = 0; i < M; i++) ps_tensor_release(batch[i]);
        step_close(ctx, step);
        ps_ctx_free(ctx);
    }
    CHECK(!fails && n_failed > 40);
    ps_pipe_table_free(t);
}

int main(void)
{
    test_schedules();
    test_without_backward();
    test_faults();
    test_swapped();
    test_misuse();
    test_context_ends();
    test_without_memory(PS_PIPE_INTERLEAVED, 3);
    test_without_memory(PS_PIPE_ZB_V, 2);
    return end_checks();
}
