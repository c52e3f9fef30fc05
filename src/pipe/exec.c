/* SPDX-License-Identifier: BSD-3-Clause
 * The executor: performs one rank's row of a table. It owns the tensors that are sent between virtual stages. Each
 * (virtual stage, micro-batch) pair has a slot for them, from its forward to its backward. Tensors in slots are held,
 * so that no scope of the script drops their bytes. Forwards and yields are events that the caller handles. The
 * executor performs transfers, backwards, weight gradients and reductions by itself, the last three as actions of the
 * row's step. A walk that reaches a recompute segment stops there, and continues after the event in which the caller
 * runs the segment again. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "pipe/exec.h"
#include "tensor/replay.h"
#include "tensor/tensor.h"

typedef struct bundle { int32_t n; ps_tensor *t[PS_PIPE_CARRY]; } bundle;

typedef struct slot {
    bundle in;                      /* the tensors that the forward received. They are a boundary if gradients are sent
                                     * back */
    bundle in_grad;                 /* gradients of `in`, from the end of the backward until they are sent */
    bundle out;                     /* the tensors that the forward returned, or the loss */
    bundle out_grad;                /* gradients of `out`, from their arrival to the backward */
    ps_tensor *root;                /* held: the walk of the last virtual stage begins from this tensor; NULL: from the
                                     * loss */
    bool bounded;                   /* `in` is a boundary */
    bool sent;                      /* `out` was sent to another rank. The slot no longer holds it, so its bytes stay
                                     * only while the channel or the tape holds them */
} slot;

/* The tensors that a virtual stage passes to the next one in a micro-batch. */
typedef struct expected {
    int32_t n;
    ps_pipe_tensor *carry;          /* [n] */
} expected;

typedef struct incoming {           /* a receive that is under way */
    ps_tensor *t;                   /* NULL: a message without a tensor */
    void *request;
} incoming;

struct ps_pipe {
    ps_guest guest;
    ps_ctx *ctx;
    const ps_pipe_table *t;
    pipe_channel *channel;
    int rank, host;                 /* host: the device for messages whose own device the channel cannot send from */
    int32_t n_local;
    slot *slots;                    /* [n_local x micro_batches] the slots of this rank's virtual stages */
    expected *expected;             /* [vstages x micro_batches] the expected tensors */
    pipe_note *losses;              /* [micro_batches] losses that arrived, or were computed here. The numbers of
                                     * ps_pipe_weigh and ps_pipe_score arrive with them */
    double *weights;                /* [micro_batches] weights from ps_pipe_mark */
    void **loss_requests;           /* [micro_batches] receives of losses that are under way, or NULL */
    void **sends;                   /* [n_sends] sends that are under way */
    int32_t n_sends, sends_capacity;
    incoming *posted;               /* [n_posted] receives of the next actions, in the order of the row. Those before
                                     * `first_posted` are done */
    int32_t n_posted, posted_capacity, first_posted;
    bool open, dry, tells;
    int32_t first_again, end_again; /* in dry rows these micro-batches repeat the micro-batch before them */
    bool differed;                  /* the last dry row found that they cannot repeat it */
    ps_step *step;                  /* the step of the row's actions; NULL: the caller performs all actions */
    ps_action_how last;             /* settings of the last BACKWARD or WEIGHT of each virtual stage */
    ps_update_group *groups;        /* [last.n_groups] or NULL */
    int32_t groups_capacity;
    int32_t event;                  /* kind of the event that was returned and is not done yet; NONE: there is no such
                                     * event */
    bool told;                      /* the due action must be returned as an event before it is performed */
    bool stopped;                   /* the walk of the due action stopped at a segment */
    bool broken;                    /* the step failed */
    double seconds;                 /* seconds that the step's actions took here since the last event */
    int32_t cursor;                 /* index of the action that is due or under way */
    int32_t ahead;                  /* receives before this index have been posted */
    bool has_clock;                 /* the virtual clock is on */
    ps_pipe_cost *costs;            /* [vstages] */
    ps_pipe_link link;
    double clock, *free[PIPE_DIRECTIONS];       /* [vstages] by link: the time when its last message has left */
    ps_pipe_span *spans;            /* one for each action of the row */
};

static const pipe_row *row_of(const ps_pipe *x) { return &x->t->rows[x->rank]; }
static const ps_action *due(const ps_pipe *x) { return &row_of(x)->actions[x->cursor]; }
static slot *slot_of(const ps_pipe *x, int32_t vstage, int32_t micro)
{
    return &x->slots[(int64_t)x->t->local_of[vstage] * x->t->spec.micro_batches + micro];
}
static expected *expected_of(const ps_pipe *x, int32_t vstage, int32_t micro)
{
    return &x->expected[pipe_pair(x->t, vstage, micro)];
}

/* -- dry rows ------------------------------------------------------------------------------------------------------ */
/* The parts of a micro-batch's path through a virtual stage (tensor/replay.h). */
enum { SPAN_POST_F, SPAN_RECV_F, SPAN_FORWARD, SPAN_SEND_F, SPAN_POST_B, SPAN_RECV_B, SPAN_BACKWARD, SPAN_SEND_B,
       SPAN_WEIGHT, SPANS };

static int part_of(int kind)
{
    switch (kind) {
    case PS_ACT_RECV_F: return SPAN_RECV_F;
    case PS_ACT_FORWARD: return SPAN_FORWARD;
    case PS_ACT_SEND_F: return SPAN_SEND_F;
    case PS_ACT_RECV_B: return SPAN_RECV_B;
    case PS_ACT_SEND_B: return SPAN_SEND_B;
    case PS_ACT_WEIGHT: return SPAN_WEIGHT;
    default: return SPAN_BACKWARD;
    }
}

static bool noting(const ps_pipe *x) { return x->dry && x->step; }

/* True if the micro-batch repeats an earlier one. */
static bool is_again(const ps_pipe *x, const ps_action *a)
{
    return noting(x) && a->micro >= x->first_again && a->micro < x->end_again && a->kind != PS_ACT_YIELD &&
           a->kind != PS_ACT_REDUCE;
}

static int32_t number_of(const ps_pipe *x, const ps_action *a, int span)
{
    return x->t->local_of[a->vstage] * SPANS + span;
}

static void enter(ps_pipe *x, const ps_action *a, int span)
{
    if (noting(x)) ps_replay_enter(x->ctx, number_of(x, a, span), a->micro);
}

static int leave(ps_pipe *x)
{
    int rc = noting(x) ? ps_replay_leave(x->ctx) : 0;
    if (rc < 0) x->differed = ps_replay_differs(x->ctx);
    return rc;
}

static int again(ps_pipe *x, const ps_action *a, int span)
{
    int rc = ps_replay_span(x->ctx, number_of(x, a, span), a->micro);
    if (rc < 0) x->differed = ps_replay_differs(x->ctx);
    return rc;
}

int ps_pipe_repeat(ps_pipe *x, int first, int end)
{
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is already under way");
    if (first != end && (first < PS_PIPE_PERFORMED || end < first || end >= x->t->spec.micro_batches))
        return ps_fail(PS_EINVAL, "micro-batches %d to %d of %d cannot repeat earlier ones: the first %d "
                       "and the last must be performed", first, end - 1, x->t->spec.micro_batches, PS_PIPE_PERFORMED);
    x->first_again = first, x->end_again = end;
    x->differed = false;
    return 0;
}

int ps_pipe_differed(const ps_pipe *x) { return x->differed; }
void ps_pipe_collected(ps_pipe *x) { ps_replay_collected(x->ctx); }

/* -- bundles ------------------------------------------------------------------------------------------------------- */
static void let_one_go(ps_tensor *t)
{
    if (t) ps_tensor_unhold(t);
}

static void let_go(bundle *b)
{
    for (int32_t i = 0; i < b->n; i++) ps_tensor_unhold(b->t[i]);
    b->n = 0;
}

static void let_out_go(slot *s)
{
    for (int32_t i = 0; s->sent && i < s->out.n; i++) ps_tensor_release(s->out.t[i]);
    if (s->sent) s->out.n = 0;
    s->sent = false;
    let_go(&s->out);
}

/* Backward begins at `out`, but reads none of its bytes. They are freed after the send, unless the tape needs them.
 * Otherwise a schedule with many micro-batches in flight would hold each activation between virtual stages twice. */
static void let_bytes_go(slot *s)
{
    for (int32_t i = 0; i < s->out.n; i++) {
        ps_tensor *t = s->out.t[i];
        ps_tensor_retain(t);
        if (!t->storage->bytes.kept) ps_storage_drop(t->storage);
        ps_tensor_unhold(t);
    }
    s->sent = true;
}

static void let_slot_go(slot *s)
{
    let_go(&s->in);
    let_go(&s->in_grad);
    let_out_go(s);
    let_go(&s->out_grad);
    let_one_go(s->root);
    s->root = NULL;
    s->bounded = false;
}

/* Adds a tensor to a bundle. Takes over the caller's reference, even on failure. */
static int put(bundle *b, ps_tensor *t)
{
    int rc = ps_tensor_check_alive(t);
    if (rc == 0) b->t[b->n++] = ps_tensor_hold(t);
    ps_tensor_release(t);
    return rc;
}

/* -- life ---------------------------------------------------------------------------------------------------------- */
static int find_host(const ps_ctx *ctx)
{
    for (int d = 0; d < ctx->n_devices; d++) if (ctx->devices[d]->is_host) return d;
    return 0;
}

static void end_messages(ps_pipe *x, const char *why)
{
    ps_pipe_abort(x, why);
    if (x->channel) x->channel->table->close(x->channel);
    x->channel = NULL;
}

static void context_ends(ps_guest *g) { end_messages((ps_pipe *)g, "the context was closed in the middle of a step"); }

void ps_pipe_close(ps_pipe *x)
{
    if (!x) return;
    end_messages(x, "the pipeline was closed in the middle of a step");
    ps_guest_leave(&x->guest);
    int64_t pairs = (int64_t)x->t->spec.vstages * x->t->spec.micro_batches;
    for (int64_t i = 0; x->expected && i < pairs; i++) ps_free(x->expected[i].carry);
    for (int d = 0; d < PIPE_DIRECTIONS; d++) ps_free(x->free[d]);
    ps_free(x->slots);
    ps_free(x->expected);
    ps_free(x->losses);
    ps_free(x->weights);
    ps_free(x->loss_requests);
    ps_free(x->sends);
    ps_free(x->posted);
    ps_free(x->costs);
    ps_free(x->spans);
    ps_free(x->groups);
    ps_pipe_table_free((ps_pipe_table *)(uintptr_t)x->t);
    ps_ctx_release(x->ctx);
    ps_free(x);
}

int pipe_open(ps_ctx *ctx, const ps_pipe_table *t, int rank, pipe_channel *channel, ps_pipe **out)
{
    if (!t->lowered) return ps_fail(PS_ESTATE, "the table has no transfers yet (ps_pipe_table_lower)");
    if (rank < 0 || rank >= t->spec.stages)
        return ps_fail(PS_EINVAL, "rank %d is not in a table of %d ranks", rank, t->spec.stages);
    ps_pipe *x = ps_alloc0(sizeof *x);
    if (!x) return ps_fail_nomem(sizeof *x);
    size_t m = (size_t)t->spec.micro_batches, v = (size_t)t->spec.vstages;
    x->ctx = ctx;
    ctx->refs++;
    x->t = t;
    ((ps_pipe_table *)(uintptr_t)t)->refs++;                /* the table's maker may free it before the executor ends */
    x->rank = rank;
    x->host = find_host(ctx);
    for (size_t s = 0; s < v; s++) x->n_local += t->rank_of[s] == rank;
    x->slots = ps_alloc0((size_t)x->n_local * m * sizeof *x->slots);
    x->expected = ps_alloc0(v * m * sizeof *x->expected);
    x->losses = ps_alloc0(m * sizeof *x->losses);
    x->weights = ps_alloc0(m * sizeof *x->weights);
    x->loss_requests = ps_alloc0(m * sizeof *x->loss_requests);
    x->costs = ps_alloc0(v * sizeof *x->costs);
    x->spans = ps_alloc0((size_t)row_of(x)->n * sizeof *x->spans);
    for (int d = 0; d < PIPE_DIRECTIONS; d++) x->free[d] = ps_alloc0(v * sizeof *x->free[d]);
    if (!x->slots || !x->expected || !x->losses || !x->weights || !x->loss_requests || !x->costs ||
        !x->spans || !x->free[PIPE_UP] || !x->free[PIPE_DOWN]) {
        size_t nbytes = (size_t)x->n_local * m * sizeof *x->slots;
        ps_pipe_close(x);
        return ps_fail_nomem(nbytes);
    }
    x->channel = channel;
    x->guest.close = context_ends;
    ps_guest_come(ctx, &x->guest);
    *out = x;
    return 0;
}

int ps_pipe_expect(ps_pipe *x, int vstage, int micro, int n, const ps_pipe_tensor *carry)
{
    ps_pipe_tensor *copy = NULL;
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is already under way");
    if (vstage < 0 || vstage >= x->t->spec.vstages || micro < 0 || micro >= x->t->spec.micro_batches)
        return ps_fail(PS_ERANGE, "there is no virtual stage %d, micro-batch %d in a table of %d and %d", vstage, micro,
                       x->t->spec.vstages, x->t->spec.micro_batches);
    if (n < 0 || n > PS_PIPE_CARRY)
        return ps_fail(PS_EINVAL, "virtual stage %d passes %d tensors to the next one; at most %d are "
                                  "allowed", vstage, n,
                       PS_PIPE_CARRY);
    if (n > 0 && !(copy = ps_alloc((size_t)n * sizeof *copy))) return ps_fail_nomem((size_t)n * sizeof *copy);
    if (n > 0) memcpy(copy, carry, (size_t)n * sizeof *copy);
    expected *e = expected_of(x, vstage, micro);
    ps_free(e->carry);
    *e = (expected){ n, copy };
    return 0;
}

/* -- the virtual clock --------------------------------------------------------------------------------------------- */
int ps_pipe_clock(ps_pipe *x, const ps_pipe_cost *costs, const ps_pipe_link *link)
{
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is under way");
    PS_TRY(pipe_check_numbers("virtual stage", costs, x->t->spec.vstages, link));
    x->has_clock = costs != NULL;
    x->link = link ? *link : (ps_pipe_link){ .depth = 0 };
    if (costs) memcpy(x->costs, costs, (size_t)x->t->spec.vstages * sizeof *costs);
    return 0;
}

int ps_pipe_measured(const ps_pipe *x, ps_pipe_rank_times *out, const ps_pipe_span **spans)
{
    if (!x->has_clock) return ps_fail(PS_ESTATE, "the pipeline has no virtual clock");
    *out = (ps_pipe_rank_times){ .first = -1 };
    for (int32_t at = 0; at < row_of(x)->n; at++) {
        const ps_pipe_span *s = &x->spans[at];
        if (!pipe_is_compute(row_of(x)->actions[at].kind) && s->end == s->begin) continue;
        if (out->first < 0) out->first = s->begin;
        out->last = s->end;
        out->busy += s->end - s->begin;
    }
    *spans = x->spans;
    return 0;
}

/* The time, by the virtual clock, at which a message arrives if it is sent now. */
static double arrival(ps_pipe *x, int direction, int32_t from, int32_t to)
{
    double *free = &x->free[direction][pipe_link(x->t, from, to)];
    double begin = x->clock > *free ? x->clock : *free;
    int64_t nbytes = x->costs[from < to ? from : to].nbytes;
    *free = begin + (x->link.rate > 0 ? (double)nbytes / x->link.rate : 0);
    return *free + x->link.latency;
}

/* -- messages ------------------------------------------------------------------------------------------------------ */
static bool goes_up(const ps_action *a) { return a->kind == PS_ACT_SEND_F || a->kind == PS_ACT_RECV_F; }
static bool is_receive(const ps_action *a) { return a->kind == PS_ACT_RECV_F || a->kind == PS_ACT_RECV_B; }

static int32_t other_end(const ps_action *a)
{
    return a->kind == PS_ACT_SEND_F || a->kind == PS_ACT_RECV_B ? a->vstage + 1 : a->vstage - 1;
}

/* The tensors of a transfer, as a set of numbers, `carried`. In forward these are all tensors that one virtual stage
 * passes to the next. In backward they are those that get gradients. */
static int32_t carried_of(const ps_pipe *x, const ps_action *a, int32_t carried[PS_PIPE_CARRY], const expected **of)
{
    int32_t n = 0, other = other_end(a), giver = other < a->vstage ? other : a->vstage;
    *of = expected_of(x, giver, a->micro);
    for (int32_t i = 0; i < (*of)->n; i++) if (goes_up(a) || (*of)->carry[i].grad) carried[n++] = i;
    return n;
}

/* Both ends identify a message by the forward or the backward that made it. */
static pipe_tag tag_of(const ps_action *a, int32_t part)
{
    return (pipe_tag){ goes_up(a) ? 'F' : 'B', (int16_t)part, is_receive(a) ? other_end(a) : a->vstage, a->micro };
}

static int to_device(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out)
{
    ps_attrs_to_device attrs = { .device = device };
    ps_tensor *made[PS_MAX_OUT] = { NULL };
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = ps_apply(ctx, PS_OP_to_device, 1, &t, &attrs, sizeof attrs, made);
    ps_set_grad_enabled(ctx, enabled);
    if (rc == 0) *out = made[0];
    return rc;
}

/* The device from which, or to which, a message with a tensor on `device` is transferred. */
static int meeting_place(const ps_pipe *x, int device)
{
    const pipe_channel_table *w = x->channel->table;
    return w->carries && w->carries(x->channel, device) ? device : x->host;
}

/* Checks whether messages between devices have failed; all: waits until they have arrived. */
static int settle(ps_pipe *x, bool all)
{
    if (x->dry || !x->channel->table->settle) return 0;
    int64_t began = ps_record_begin();
    int rc = x->channel->table->settle(x->channel, all);
    if (all) ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_MESSAGE, .begin_ns = began,
                                              .id = -1 });
    return rc;
}

/* Begins a receive. Makes its tensor now, so that there is memory when the bytes arrive. `what` is NULL if the message
 * has no tensor. */
static int post(ps_pipe *x, int peer, int lane, const pipe_tag *tag, const ps_pipe_tensor *what)
{
    incoming in = { NULL, NULL };
    int rc = 0;
    PS_TRY(ps_grow(x->posted, x->posted_capacity, x->n_posted + 1));
    if (what) {
        int device = x->dry ? what->device : meeting_place(x, what->device);
        ps_tensor *made;
        PS_TRY(ps_tensor_new(x->ctx, what->dtype, device, what->ndim, what->shape, &made));
        ps_replay_scripted(made->storage, noting(x) && lane == PIPE_LANE_UP);     /* scripts cannot see gradients */
        in.t = ps_tensor_hold(made);
        ps_tensor_release(made);
    }
    if (rc == 0 && !x->dry) rc = x->channel->table->recv(x->channel, peer, lane, tag, in.t, &in.request);
    if (rc < 0) return let_one_go(in.t), rc;
    x->posted[x->n_posted++] = in;
    return 0;
}

static int post_action(ps_pipe *x, const ps_action *a)
{
    int32_t carried[PS_PIPE_CARRY];
    const expected *of;
    int32_t n = carried_of(x, a, carried, &of);
    int peer = x->t->rank_of[other_end(a)], lane = goes_up(a) ? PIPE_LANE_UP : PIPE_LANE_DOWN;
    for (int32_t i = 0; i < (n ? n : 1); i++) {
        pipe_tag tag = tag_of(a, n ? carried[i] : -1);
        PS_TRY(post(x, peer, lane, &tag, n ? &of->carry[carried[i]] : NULL));
    }
    return 0;
}

/* Posts the receives before `end`, in the row's order. */
static int post_before(ps_pipe *x, int32_t end)
{
    for (; x->ahead < end; x->ahead++) {
        const ps_action *a = &row_of(x)->actions[x->ahead];
        if (!is_receive(a)) continue;
        int span = a->kind == PS_ACT_RECV_F ? SPAN_POST_F : SPAN_POST_B;
        if (is_again(x, a)) {
            PS_TRY(again(x, a, span));
            continue;
        }
        enter(x, a, span);
        PS_TRY(post_action(x, a));
        PS_TRY(leave(x));
    }
    return 0;
}

/* The index of the next computing action (pipe_is_compute) after the action that is due. */
static int32_t next_work(const ps_pipe *x)
{
    int32_t at = x->cursor + 1;
    while (at < row_of(x)->n && !pipe_is_compute(row_of(x)->actions[at].kind)) at++;
    return at;
}

/* Waits until a message has been received or sent. */
static int wait_for(ps_pipe *x, void *request, pipe_note *note)
{
    int64_t began = ps_record_begin();
    int rc = x->channel->table->wait(x->channel, request, note);
    ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_MESSAGE, .begin_ns = began, .id = -1 });
    return rc;
}

/* Waits for the receive that was posted first, and adds its tensor to `to`, on `device`. */
static int take_one(ps_pipe *x, int device, bundle *to)
{
    incoming in = x->posted[x->first_posted++];
    pipe_note note = { 0 };
    if (x->first_posted == x->n_posted) x->first_posted = x->n_posted = 0;
    int rc = x->dry ? 0 : wait_for(x, in.request, &note);
    if (rc == 0 && note.when > x->clock) x->clock = note.when;
    if (rc == 0 && in.t) {
        ps_tensor *there = NULL;
        if (in.t->device_ != device) rc = to_device(x->ctx, in.t, device, &there);
        else ps_tensor_retain(there = in.t);
        if (rc == 0) rc = put(to, there);
    }
    let_one_go(in.t);
    return rc;
}

static int receive(ps_pipe *x, const ps_action *a)
{
    int32_t carried[PS_PIPE_CARRY];
    const expected *of;
    int32_t n = carried_of(x, a, carried, &of);
    slot *s = slot_of(x, a->vstage, a->micro);
    PS_TRY(post_before(x, x->cursor + 1));
    if (is_again(x, a)) return again(x, a, part_of(a->kind));
    enter(x, a, part_of(a->kind));
    for (int32_t i = 0; i < (n ? n : 1); i++)
        PS_TRY(take_one(x, n ? of->carry[carried[i]].device : x->host,
                        a->kind == PS_ACT_RECV_F ? &s->in : &s->out_grad));
    return leave(x);
}

/* Begins a send. Waits here for earlier sends that have already finished. The others are waited for at the end of the
 * step at the latest. */
static int begin_send(ps_pipe *x, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t)
{
    const pipe_channel_table *w = x->channel->table;
    int32_t n = 0;
    int rc = 0;
    for (int32_t i = 0; i < x->n_sends; i++) {
        if (rc < 0 || !w->test(x->channel, x->sends[i])) x->sends[n++] = x->sends[i];
        else rc = wait_for(x, x->sends[i], NULL);
    }
    x->n_sends = n;
    PS_TRY(rc);
    PS_TRY(ps_grow(x->sends, x->sends_capacity, n + 1));
    PS_TRY(w->send(x->channel, peer, lane, tag, note, t, &x->sends[n]));
    x->n_sends++;
    return 0;
}

static int send(ps_pipe *x, const ps_action *a)
{
    int32_t carried[PS_PIPE_CARRY], to = other_end(a);
    const expected *of;
    int32_t n = carried_of(x, a, carried, &of);
    int peer = x->t->rank_of[to], lane = goes_up(a) ? PIPE_LANE_UP : PIPE_LANE_DOWN, rc = 0;
    slot *s = slot_of(x, a->vstage, a->micro);
    bundle *from = goes_up(a) ? &s->out : &s->in_grad;
    pipe_note note = { .when = arrival(x, goes_up(a) ? PIPE_UP : PIPE_DOWN, a->vstage, to) };
    for (int32_t i = 0; rc == 0 && !x->dry && i < (n ? n : 1); i++) {
        pipe_tag tag = tag_of(a, n ? carried[i] : -1);
        ps_tensor *t = n ? from->t[i] : NULL, *moved = NULL;
        int place = t ? meeting_place(x, t->device_) : x->host;
        if (t && t->device_ != place) rc = to_device(x->ctx, t, place, &moved);
        if (rc == 0) rc = begin_send(x, peer, lane, &tag, &note, moved ? moved : t);
        ps_tensor_release(moved);
    }
    PS_TRY(rc);
    if (is_again(x, a)) return again(x, a, part_of(a->kind));
    enter(x, a, part_of(a->kind));
    if (goes_up(a)) let_bytes_go(s);                         /* the channel holds the bytes until they are sent */
    else let_go(from);
    return leave(x);
}

/* -- losses -------------------------------------------------------------------------------------------------------- */
static pipe_tag loss_tag(const ps_pipe *x, int32_t micro)
{
    return (pipe_tag){ 'L', -1, x->t->spec.vstages - 1, micro };
}

/* The rank that computes the losses. */
static int loser(const ps_pipe *x) { return x->t->rank_of[x->t->spec.vstages - 1]; }

/* Posts the receives of all losses at the beginning of the step, in the order in which the losses are computed. */
static int post_losses(ps_pipe *x)
{
    const pipe_row *row = &x->t->rows[loser(x)];
    for (int32_t at = 0; at < row->n && loser(x) != x->rank && !x->dry; at++) {
        const ps_action *a = &row->actions[at];
        if (a->kind != PS_ACT_FORWARD || a->vstage != x->t->spec.vstages - 1) continue;
        pipe_tag tag = loss_tag(x, a->micro);
        PS_TRY(x->channel->table->recv(x->channel, loser(x), PIPE_LANE_LOSS, &tag, NULL, &x->loss_requests[a->micro]));
    }
    return 0;
}

static int give_loss(ps_pipe *x, int32_t micro, const bundle *out)
{
    if (x->dry || !out->n || !ps_tensor_has_data(out->t[0])) return x->losses[micro].loss = 0, 0;
    if (out->t[0]->numel_ != 1)
        return ps_fail(PS_EINVAL, "the loss of micro-batch %d has %lld elements; it must have one", micro,
                       (long long)out->t[0]->numel_);
    ps_tensor *moved = NULL;
    int rc = out->t[0]->device_ != x->host ? to_device(x->ctx, out->t[0], x->host, &moved) : 0;
    if (rc == 0) rc = ps_tensor_read_f64(moved ? moved : out->t[0], 0, 1, &x->losses[micro].loss);
    ps_tensor_release(moved);
    return rc < 0 ? rc : settle(x, false);
}

static int send_loss(ps_pipe *x, int32_t micro)
{
    pipe_tag tag = loss_tag(x, micro);
    for (int peer = 0; peer < x->t->spec.stages && !x->dry; peer++)
        if (peer != x->rank) PS_TRY(begin_send(x, peer, PIPE_LANE_LOSS, &tag, &x->losses[micro], NULL));
    return 0;
}

static int take_loss(ps_pipe *x, int32_t micro)
{
    void *request = x->loss_requests[micro];
    if (!request) return 0;
    x->loss_requests[micro] = NULL;
    return wait_for(x, request, &x->losses[micro]);
}

/* -- events -------------------------------------------------------------------------------------------------------- */
static const ps_action_how plain_how = { .scale = 1 };

int ps_pipe_begin(ps_pipe *x, ps_step *step, int dry, int tells)
{
    if (x->ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is under way");
    x->open = true;
    x->dry = dry;
    x->tells = tells;
    x->step = step;
    x->last = plain_how;
    x->event = PS_ACT_NONE;
    x->told = x->stopped = x->broken = false;
    x->cursor = x->ahead = 0;
    x->clock = 0;
    for (int d = 0; d < PIPE_DIRECTIONS; d++) memset(x->free[d], 0, (size_t)x->t->spec.vstages * sizeof *x->free[d]);
    for (int32_t i = 0; i < x->t->spec.micro_batches; i++) x->losses[i] = (pipe_note){ .weight = -1 };
    memset(x->weights, 0, (size_t)x->t->spec.micro_batches * sizeof *x->weights);
    int rc = noting(x) ? ps_replay_begin(x->ctx, x->t->spec.micro_batches, x->n_local * SPANS, x->first_again,
                                         x->end_again) : 0;
    if (rc == 0) rc = post_losses(x);
    x->broken = rc < 0;
    return rc;
}

int ps_pipe_settings(ps_pipe *x, const ps_action_how *how)
{
    if (!x->open) return ps_fail(PS_ESTATE, "no step of the pipeline is under way");
    if (how->groups) {
        PS_TRY(ps_grow(x->groups, x->groups_capacity, how->n_groups));
        memcpy(x->groups, how->groups, (size_t)how->n_groups * sizeof *x->groups);
    }
    x->last = *how;
    if (how->groups) x->last.groups = x->groups;
    return 0;
}

static int check_micro(const ps_pipe *x, int micro)
{
    if (!x->open) return ps_fail(PS_ESTATE, "no step of the pipeline is under way");
    if (micro >= 0 && micro < x->t->spec.micro_batches) return 0;
    return ps_fail(PS_ERANGE, "there is no micro-batch %d in a table of %d", micro, x->t->spec.micro_batches);
}

int ps_pipe_mark(ps_pipe *x, int micro, ps_tensor *root, double weight)
{
    int32_t last = x->t->spec.vstages - 1;
    PS_TRY(check_micro(x, micro));
    if (root && x->t->rank_of[last] != x->rank)
        return ps_fail(PS_EINVAL, "a backward begins from a loss on rank %d, which has the last virtual stage; this is "
                       "rank %d", x->t->rank_of[last], x->rank);
    if (root) {
        slot *s = slot_of(x, last, micro);
        PS_TRY(ps_tensor_check_alive(root));
        let_one_go(s->root);
        s->root = ps_tensor_hold(root);
    }
    x->weights[micro] = weight;
    return 0;
}

int ps_pipe_weigh(ps_pipe *x, int micro, double weight)
{
    PS_TRY(check_micro(x, micro));
    x->losses[micro].weight = weight;
    return 0;
}

int ps_pipe_score(ps_pipe *x, int micro, double hits, double targets)
{
    PS_TRY(check_micro(x, micro));
    x->losses[micro].hits = hits, x->losses[micro].targets = targets;
    return 0;
}

/* Makes a boundary of the received tensors. The tape records from this boundary on. Does nothing if no gradient of them
 * is sent back. */
static int bound(ps_pipe *x, const ps_action *a)
{
    slot *s = slot_of(x, a->vstage, a->micro);
    const expected *e = a->vstage > 0 ? expected_of(x, a->vstage - 1, a->micro) : NULL;
    ps_tensor *made[PS_PIPE_CARRY];
    bool grads = false;
    for (int32_t i = 0; e && i < e->n; i++) grads = grads || e->carry[i].grad;
    if (x->t->spec.forward_only || !grads || s->bounded) return 0;
    PS_TRY(ps_boundary(x->ctx, s->in.n, s->in.t, made));
    for (int32_t i = 0; i < s->in.n; i++) {
        ps_tensor_unhold(s->in.t[i]);
        s->in.t[i] = ps_tensor_hold(made[i]);
        ps_tensor_release(made[i]);
    }
    s->bounded = true;
    return 0;
}

/* Notifies the watch that this rank begins an action. */
static void tell(ps_pipe *x, const ps_action *a)
{
    pipe_tag tag = { *pipe_kind_text(a->kind), -1, a->vstage, a->micro };
    if (!x->dry) x->channel->table->at(x->channel, &tag);
}

/* Returns an event of this kind, with the virtual stage and micro-batch of the due action. */
static ps_pipe_event hand_out(ps_pipe *x, int32_t kind)
{
    const ps_action *a = due(x);
    x->event = kind;
    return (ps_pipe_event){ .kind = kind, .vstage = a->vstage, .local = x->t->local_of[a->vstage], .micro = a->micro };
}

/* Begins an action that the caller performs. */
static int begin_event(ps_pipe *x, const ps_action *a, ps_pipe_event *out)
{
    ps_pipe_event e = hand_out(x, a->kind);
    if (a->kind == PS_ACT_YIELD) {
        PS_TRY(take_loss(x, a->micro));
        const pipe_note *note = &x->losses[a->micro];
        e.loss = note->loss, e.weight = note->weight, e.hits = note->hits, e.targets = note->targets;
    }
    tell(x, a);
    e.again = is_again(x, a);
    if (a->kind == PS_ACT_FORWARD && !e.again) {
        slot *s = slot_of(x, a->vstage, a->micro);
        PS_TRY(bound(x, a));
        e.n = s->in.n;
        e.in = s->in.t;
    }
    if (pipe_is_compute(a->kind)) PS_TRY(post_before(x, next_work(x)));
    if (pipe_is_compute(a->kind) && !e.again) enter(x, a, part_of(a->kind));
    *out = e;
    return 0;
}

static int finish(ps_pipe *x, ps_pipe_event *out)
{
    while (x->n_sends > 0) PS_TRY(wait_for(x, x->sends[--x->n_sends], NULL));
    PS_TRY(settle(x, true));                                 /* an update must not use messages that did not arrive */
    for (int32_t i = 0; i < x->n_local * x->t->spec.micro_batches; i++) let_slot_go(&x->slots[i]);
    if (!x->dry) x->channel->table->at(x->channel, NULL);
    x->open = false;
    x->step = NULL;
    *out = (ps_pipe_event){ .kind = PS_ACT_NONE };
    return 0;
}

/* Ends the action under way. */
static void go_past(ps_pipe *x, const ps_action *a)
{
    double begin = x->clock;
    if (x->has_clock) x->clock += pipe_cost_of(x->costs, a);
    x->spans[x->cursor] = (ps_pipe_span){ begin, x->clock };
    x->cursor++;
    x->told = false;
}

static int check_due(const ps_pipe *x, const ps_action *a)
{
    const ps_action *now = &ps_step_look(x->step)->due;
    if (now->kind == a->kind && now->vstage == x->t->local_of[a->vstage] && now->micro == a->micro) return 0;
    return ps_fail(PS_ESTATE, "the pipeline's row has %s of virtual stage %d, micro-batch %d, but the step expects "
                   "another action", pipe_kind_text(a->kind), a->vstage, a->micro);
}

static bool goes_back(int kind) { return kind == PS_ACT_BACKWARD || kind == PS_ACT_INPUT; }

/* True if gradients arrive at the virtual stage or begin in it. Before the first virtual stage that has something to
 * train, no gradients do. */
static bool gets_gradients(const ps_pipe *x, const ps_action *a)
{
    if (a->vstage == x->t->spec.vstages - 1) return true;
    const expected *e = expected_of(x, a->vstage, a->micro);
    for (int32_t i = 0; i < e->n; i++) if (e->carry[i].grad) return true;
    return false;
}

/* Walks backward from the outputs of a virtual stage, with the gradients that were received. 1: the walk stopped at a
 * segment. */
static int walk(ps_pipe *x, const ps_action *a, int64_t *segment)
{
    ps_tensor *roots[PS_PIPE_CARRY];
    int32_t n = 0;
    slot *s = slot_of(x, a->vstage, a->micro);
    if (!gets_gradients(x, a)) return 0;
    if (a->vstage == x->t->spec.vstages - 1) {
        ps_tensor *root = s->root ? s->root : s->out.n ? s->out.t[0] : NULL;
        if (!root) return ps_fail(PS_EINVAL, "the last virtual stage has no loss for its backward");
        return ps_backward_begin_n(x->ctx, 1, &root, NULL, segment);
    }
    const expected *e = expected_of(x, a->vstage, a->micro);
    for (int32_t i = 0; i < e->n; i++) if (e->carry[i].grad) roots[n++] = s->out.t[i];
    int rc = ps_backward_begin_n(x->ctx, n, roots, s->out_grad.t, NULL);
    let_go(&s->out_grad);                                   /* only the walk holds the gradients now, so it may add to
                                                             * them in place */
    return rc < 0 ? rc : ps_backward_next(x->ctx, segment);
}

/* Replaces a gradient that is a view, such as a part of a concatenation's, by a copy whose bytes can be sent. */
static int make_contiguous(ps_ctx *ctx, ps_tensor **t)
{
    static const ps_attrs_contiguous none;
    ps_tensor *made[PS_MAX_OUT] = { NULL };
    if (ps_tensor_is_contiguous(*t)) return 0;
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = ps_apply(ctx, PS_OP_contiguous, 1, t, &none, sizeof none, made);
    ps_set_grad_enabled(ctx, enabled);
    if (rc < 0) return rc;
    ps_tensor_release(*t);
    *t = made[0];
    return 0;
}

/* Takes the gradients of `in` from the boundary and frees the rest of the slot. If the previous virtual stage is on
 * this rank, it gets the gradients here. */
static int back_done(ps_pipe *x, const ps_action *a)
{
    slot *s = slot_of(x, a->vstage, a->micro);
    const expected *e = a->vstage > 0 ? expected_of(x, a->vstage - 1, a->micro) : NULL;
    ps_tensor *grads[PS_PIPE_CARRY];
    bundle taken = { .n = 0 };
    int rc = 0;
    if (s->bounded) {
        PS_TRY(ps_boundary_take(x->ctx, s->in.n, s->in.t, grads));
        for (int32_t i = 0; i < s->in.n; i++) {
            if (rc == 0 && e->carry[i].grad && grads[i]) rc = make_contiguous(x->ctx, &grads[i]);
            if (rc == 0 && e->carry[i].grad && grads[i]) rc = put(&taken, grads[i]);
            else if (rc == 0 && e->carry[i].grad)
                rc = ps_fail(PS_EINVAL, "no gradient was computed for tensor %d that virtual stage %d received "
                                        "for micro-batch %d",
                             i, a->vstage, a->micro);
            else ps_tensor_release(grads[i]);
        }
    }
    let_slot_go(s);
    s->in_grad = taken;
    if (rc < 0 || a->vstage == 0 || pipe_link(x->t, a->vstage, a->vstage - 1) >= 0) return rc;
    slot_of(x, a->vstage - 1, a->micro)->out_grad = taken;
    s->in_grad.n = 0;
    return 0;
}

static int begin_action(ps_pipe *x, const ps_action *a)
{
    bool sums = a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_WEIGHT;
    ps_action_how how = sums && a->micro == x->t->spec.micro_batches - 1 ? x->last : plain_how;
    how.weight = x->weights[a->micro];
    tell(x, a);
    if (pipe_is_compute(a->kind)) PS_TRY(post_before(x, next_work(x)));
    return ps_step_next(x->step, a->kind, &how);
}

/* Repeats the effects of another micro-batch for the step's action under way. After an error that action is still under
 * way. */
static int do_again(ps_pipe *x, const ps_action *a)
{
    PS_TRY(again(x, a, part_of(a->kind)));
    return ps_step_done(x->step);
}

static int forward_again(ps_pipe *x, const ps_action *a)
{
    PS_TRY(check_due(x, a));
    PS_TRY(ps_step_next(x->step, a->kind, &plain_how));
    return do_again(x, a);
}

/* Performs an action of the step. 1: the walk of the action stopped for the caller, and continues here later. After an
 * error the step's action is still under way, as after an error of ps_step_done. */
static int perform(ps_pipe *x, const ps_action *a, int64_t *segment)
{
    int rc = 0;
    bool notes = a->kind != PS_ACT_REDUCE;
    if (!x->stopped) {
        PS_TRY(begin_action(x, a));
        if (is_again(x, a)) return do_again(x, a);
        if (notes) enter(x, a, part_of(a->kind));
    }
    if (goes_back(a->kind)) rc = x->stopped ? ps_backward_next(x->ctx, segment) : walk(x, a, segment);
    else if (a->kind == PS_ACT_WEIGHT && gets_gradients(x, a))
        rc = x->stopped ? ps_backward_next(x->ctx, segment) : ps_backward_weights(x->ctx, segment);
    x->stopped = rc > 0;
    if (rc != 0) return rc;
    PS_TRY(ps_step_done(x->step));
    if (goes_back(a->kind)) PS_TRY(back_done(x, a));
    return notes ? leave(x) : 0;
}

/* True if the action is one of the step's actions that the executor performs. */
static bool is_own(const ps_pipe *x, int kind)
{
    return x->step && (goes_back(kind) || kind == PS_ACT_WEIGHT || kind == PS_ACT_REDUCE);
}

/* True if Lua has work to do before the action is performed. The action is then an event. */
static bool is_told(ps_pipe *x, const ps_action *a, int32_t *collect)
{
    if (x->told || x->stopped) return false;
    *collect = a->kind != PS_ACT_REDUCE && ps_step_collects(x->step);
    return *collect || x->tells;
}

/* Begins an action of the step. 1: returns an event, either an action for which Lua has work or the node at which the
 * action's walk stopped. */
static int go_through(ps_pipe *x, const ps_action *a, ps_pipe_event *out)
{
    int32_t collect = 0;
    int64_t segment = 0;
    if (!x->stopped) PS_TRY(check_due(x, a));
    if (is_told(x, a, &collect)) {
        *out = hand_out(x, a->kind);
        out->collect = collect;
        return 1;
    }
    double began = ps_now();
    int rc = perform(x, a, &segment);
    x->seconds += ps_now() - began;
    if (rc == 0) go_past(x, a);
    if (rc <= 0) return rc;
    *out = hand_out(x, PS_ACT_SEGMENT);
    out->segment = segment;
    return 1;
}

static int go_on(ps_pipe *x, ps_pipe_event *out)
{
    while (x->cursor < row_of(x)->n) {
        const ps_action *a = due(x);
        int rc;
        x->spans[x->cursor] = (ps_pipe_span){ x->clock, x->clock };
        if (a->kind >= PS_ACT_SEND_F && a->kind <= PS_ACT_RECV_B) {
            rc = is_receive(a) ? receive(x, a) : send(x, a);
            x->cursor++;
        } else if (!is_own(x, a->kind)) {
            return begin_event(x, a, out);
        } else if ((rc = go_through(x, a, out)) > 0) {
            return 0;
        }
        PS_TRY(rc);
    }
    return finish(x, out);
}

int ps_pipe_next(ps_pipe *x, ps_pipe_event *out)
{
    if (!x->open) return ps_fail(PS_ESTATE, "no step of the pipeline is under way");
    if (x->broken) return ps_fail(PS_ESTATE, "the step of the pipeline failed; it can only be abandoned");
    if (x->event != PS_ACT_NONE) return ps_fail(PS_ESTATE, "the pipeline's action under way is not done");
    int32_t from = x->cursor;
    x->seconds = 0;
    int rc = go_on(x, out);
    x->broken = rc < 0;
    if (rc < 0) return rc;
    out->before = &row_of(x)->actions[from];
    out->n_before = x->cursor - from;
    out->seconds = x->seconds;
    return 0;
}

/* -- the end of an event ------------------------------------------------------------------------------------------- */
static int check_given(const ps_action *a, const expected *e, int n, ps_tensor *const *out)
{
    if (n != e->n)
        return ps_fail(PS_EINVAL, "virtual stage %d returned %d tensors for micro-batch %d; expected %d", a->vstage, n,
                       a->micro, e->n);
    for (int i = 0; i < n; i++) {
        const ps_pipe_tensor *k = &e->carry[i];
        bool same = out[i] && out[i]->dtype_ == k->dtype && out[i]->ndim == k->ndim && out[i]->device_ == k->device;
        for (int d = 0; same && d < k->ndim; d++) same = out[i]->shape_[d] == k->shape[d];
        if (!same)
            return ps_fail(PS_EINVAL, "tensor %d that virtual stage %d returned for micro-batch %d has another dtype, "
                           "device or shape than is expected", i, a->vstage, a->micro);
        if (!ps_tensor_is_contiguous(out[i]))
            return ps_fail(PS_EINVAL, "tensor %d that virtual stage %d returned for micro-batch %d is not "
                                      "contiguous", i,
                           a->vstage, a->micro);
    }
    return 0;
}

/* Passes `out` to the next virtual stage, which is on this rank: passes the same tensors, detached from the tape. */
static int hand_on(ps_pipe *x, const ps_action *a, const bundle *out)
{
    bundle *to = &slot_of(x, a->vstage + 1, a->micro)->in;
    for (int32_t i = 0; i < out->n; i++) {
        ps_tensor *t;
        PS_TRY(ps_tensor_detach(out->t[i], &t));
        PS_TRY(put(to, t));
    }
    return 0;
}

static int forward_done(ps_pipe *x, const ps_action *a, int n, ps_tensor *const *out)
{
    slot *s = slot_of(x, a->vstage, a->micro);
    bool last = a->vstage == x->t->spec.vstages - 1;
    if (n < 0 || n > PS_PIPE_CARRY) return ps_fail(PS_EINVAL, "a virtual stage returned %d tensors; at most %d are "
                                                              "allowed", n, PS_PIPE_CARRY);
    if (!last) PS_TRY(check_given(a, expected_of(x, a->vstage, a->micro), n, out));
    for (int i = 0; i < n; i++) {
        ps_tensor_retain(out[i]);
        PS_TRY(put(&s->out, out[i]));
    }
    if (last) PS_TRY(give_loss(x, a->micro, &s->out));
    else if (pipe_link(x->t, a->vstage, a->vstage + 1) < 0) PS_TRY(hand_on(x, a, &s->out));
    if (x->t->spec.forward_only) let_go(&s->in);
    return last ? send_loss(x, a->micro) : 0;
}

static int event_done(ps_pipe *x, int n, ps_tensor *const *out)
{
    const ps_action *a = due(x);
    int32_t kind = x->event;
    bool repeats = kind == PS_ACT_FORWARD && is_again(x, a);
    if ((kind != PS_ACT_FORWARD || repeats) && n != 0)
        return ps_fail(PS_EINVAL, "%d tensors were passed, but only a forward that is performed returns tensors", n);
    if (repeats) PS_TRY(forward_again(x, a));
    else if (kind == PS_ACT_FORWARD) PS_TRY(forward_done(x, a, n, out));
    x->event = PS_ACT_NONE;
    if (kind == PS_ACT_SEGMENT) return 0;
    if (is_own(x, kind)) return x->told = true, 0;
    if (goes_back(kind)) PS_TRY(back_done(x, a));
    if (kind == PS_ACT_FORWARD && !repeats) PS_TRY(leave(x));
    go_past(x, a);
    return 0;
}

int ps_pipe_done(ps_pipe *x, int n, ps_tensor *const *out)
{
    if (!x->open || x->event == PS_ACT_NONE) return ps_fail(PS_ESTATE, "no action of the pipeline is under way");
    if (x->broken) return ps_fail(PS_ESTATE, "the step of the pipeline failed; it can only be abandoned");
    int rc = event_done(x, n, out);
    x->broken = rc < 0;
    return rc;
}

void ps_pipe_abort(ps_pipe *x, const char *why)
{
    if (!x->open) return;
    if (x->stopped) ps_backward_end(x->ctx);
    const pipe_channel_table *w = x->channel->table;
    if (why && !x->dry) w->abort(x->channel, why);
    for (; x->n_sends > 0; x->n_sends--) w->wait(x->channel, x->sends[x->n_sends - 1], NULL);
    for (; x->first_posted < x->n_posted; x->first_posted++) {
        if (!x->dry) w->wait(x->channel, x->posted[x->first_posted].request, NULL);
        let_one_go(x->posted[x->first_posted].t);
    }
    x->first_posted = x->n_posted = 0;
    for (int32_t i = 0; i < x->t->spec.micro_batches; i++) {
        if (x->loss_requests[i]) w->wait(x->channel, x->loss_requests[i], NULL);
        x->loss_requests[i] = NULL;
    }
    for (int32_t i = 0; i < x->n_local * x->t->spec.micro_batches; i++) let_slot_go(&x->slots[i]);
    x->open = false;
    x->step = NULL;
}
