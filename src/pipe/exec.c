/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the executor, which performs one rank's row of a table. The executor returns each forward and
 * each yield to the caller as an event, and the caller performs it. The executor itself performs transfers, backwards,
 * weight gradients and reductions. Backwards, weight gradients and reductions are also actions of the row's step. If a
 * walk reaches a recompute segment, the executor returns an event, the caller runs the segment again, and the walk
 * continues after this event.
 *
 * The executor owns the tensors that are sent between virtual stages. Each (virtual stage, micro-batch) pair has a slot
 * for these tensors, from its forward to its backward. Tensors in slots are held, so that no scope of the script drops
 * them. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "pipe/exec_state.h"
#include "tensor/replay.h"
#include "tensor/tensor.h"

/* -- creation and end ---------------------------------------------------------------------------------------------- */
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
    ((ps_pipe_table *)(uintptr_t)t)->refs++;                /* the caller may free the table before x */
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
        return ps_fail(PS_ERANGE, "there is no virtual stage %d or micro-batch %d in a table of %d and %d", vstage,
                       micro, x->t->spec.vstages, x->t->spec.micro_batches);
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
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is already under way");
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

/* -- events -------------------------------------------------------------------------------------------------------- */
static const ps_action_how plain_how = { .scale = 1 };

int ps_pipe_begin(ps_pipe *x, ps_step *step, int dry, int tells)
{
    if (x->ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is already under way");
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
    int rc = pipe_noting(x) ? ps_replay_begin(x->ctx, x->t->spec.micro_batches, x->n_local * SPANS, x->first_again,
                                         x->end_again) : 0;
    if (rc == 0) rc = pipe_post_losses(x);
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
        return ps_fail(PS_EINVAL, "a backward must begin from a loss on rank %d, which has the last virtual stage; "
                       "this is rank %d", x->t->rank_of[last], x->rank);
    if (root) {
        slot *s = slot_of(x, last, micro);
        PS_TRY(ps_tensor_check_alive(root));
        pipe_let_one_go(s->root);
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

/* Makes the received tensors a boundary, where the tape begins to record. Does nothing if the sender needs no gradient
 * of a received tensor. */
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

/* Notifies the watch of the action that this rank begins. */
static void tell(ps_pipe *x, const ps_action *a)
{
    pipe_tag tag = { *pipe_kind_text(a->kind), -1, a->vstage, a->micro };
    if (!x->dry) x->channel->table->at(x->channel, &tag);
}

/* Returns an event of the kind `kind` for the virtual stage and micro-batch of the due action. */
static ps_pipe_event hand_out(ps_pipe *x, int32_t kind)
{
    const ps_action *a = due(x);
    x->event = kind;
    return (ps_pipe_event){ .kind = kind, .vstage = a->vstage, .local = x->t->local_of[a->vstage], .micro = a->micro };
}

/* Begins an action that the caller performs, and returns its event in *out. */
static int begin_event(ps_pipe *x, const ps_action *a, ps_pipe_event *out)
{
    ps_pipe_event e = hand_out(x, a->kind);
    if (a->kind == PS_ACT_YIELD) {
        PS_TRY(pipe_take_loss(x, a->micro));
        const pipe_note *note = &x->losses[a->micro];
        e.loss = note->loss, e.weight = note->weight, e.hits = note->hits, e.targets = note->targets;
    }
    tell(x, a);
    e.again = pipe_is_again(x, a);
    if (a->kind == PS_ACT_FORWARD && !e.again) {
        slot *s = slot_of(x, a->vstage, a->micro);
        PS_TRY(bound(x, a));
        e.n = s->in.n;
        e.in = s->in.t;
    }
    if (pipe_is_compute(a->kind)) PS_TRY(pipe_post_before(x, pipe_next_work(x)));
    if (pipe_is_compute(a->kind) && !e.again) pipe_enter(x, a, pipe_part_of(a->kind));
    *out = e;
    return 0;
}

static int finish(ps_pipe *x, ps_pipe_event *out)
{
    while (x->n_sends > 0) PS_TRY(pipe_wait_for(x, x->sends[--x->n_sends], NULL));
    /* Wait for received bytes that are still in transit, because the update must not begin before they arrive. */
    PS_TRY(pipe_settle(x, true));
    for (int32_t i = 0; i < x->n_local * x->t->spec.micro_batches; i++) pipe_let_slot_go(&x->slots[i]);
    if (!x->dry) x->channel->table->at(x->channel, NULL);
    x->open = false;
    x->step = NULL;
    *out = (ps_pipe_event){ .kind = PS_ACT_NONE };
    return 0;
}

/* Records the simulated times of the action that has ended, and moves the cursor to the next action. */
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

/* Returns true if the virtual stage receives gradients or computes the loss. A virtual stage receives no gradients if
 * neither this virtual stage nor an earlier virtual stage has trainable parameters. */
static bool gets_gradients(const ps_pipe *x, const ps_action *a)
{
    if (a->vstage == x->t->spec.vstages - 1) return true;
    const expected *e = expected_of(x, a->vstage, a->micro);
    for (int32_t i = 0; i < e->n; i++) if (e->carry[i].grad) return true;
    return false;
}

/* Begins the walk of a virtual stage at its loss, or at its outputs with the received gradients. Returns 1 if the walk
 * has stopped at a segment. */
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
    pipe_let_go(&s->out_grad);                               /* only the walk holds gradients now; it adds in place */
    return rc < 0 ? rc : ps_backward_next(x->ctx, segment);
}

/* Replaces the gradient *t by a contiguous copy if it is not contiguous, because only contiguous tensors can be sent.
 * An example is a slice of the gradient of a concatenation. */
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

/* Called after a backward. Takes the gradients of `in` from the boundary, and frees all other tensors in the slot. If
 * the previous virtual stage is on this rank, moves the gradients to its slot. */
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
            if (rc == 0 && e->carry[i].grad && grads[i]) rc = pipe_put(&taken, grads[i]);
            else if (rc == 0 && e->carry[i].grad)
                rc = ps_fail(PS_EINVAL, "no gradient was computed for tensor %d that virtual stage %d received "
                                        "for micro-batch %d",
                             i, a->vstage, a->micro);
            else ps_tensor_release(grads[i]);
        }
    }
    pipe_let_slot_go(s);
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
    if (pipe_is_compute(a->kind)) PS_TRY(pipe_post_before(x, pipe_next_work(x)));
    return ps_step_next(x->step, a->kind, &how);
}

/* Completes the current action of the step. Instead of computing, repeats the effects that were recorded for an earlier
 * micro-batch. After an error, the action is still in progress. */
static int do_again(ps_pipe *x, const ps_action *a)
{
    PS_TRY(pipe_again(x, a, pipe_part_of(a->kind)));
    return ps_step_done(x->step);
}

static int forward_again(ps_pipe *x, const ps_action *a)
{
    PS_TRY(check_due(x, a));
    PS_TRY(ps_step_next(x->step, a->kind, &plain_how));
    return do_again(x, a);
}

/* Performs an action of the step. If the action's walk has stopped at a segment, returns 1. The caller must then run
 * the segment again and call perform() again, which continues the action. After an error, the action is still in
 * progress, as after an error of ps_step_done. */
static int perform(ps_pipe *x, const ps_action *a, int64_t *segment)
{
    int rc = 0;
    bool notes = a->kind != PS_ACT_REDUCE;
    if (!x->stopped) {
        PS_TRY(begin_action(x, a));
        if (pipe_is_again(x, a)) return do_again(x, a);
        if (notes) pipe_enter(x, a, pipe_part_of(a->kind));
    }
    if (goes_back(a->kind)) rc = x->stopped ? ps_backward_next(x->ctx, segment) : walk(x, a, segment);
    else if (a->kind == PS_ACT_WEIGHT && gets_gradients(x, a))
        rc = x->stopped ? ps_backward_next(x->ctx, segment) : ps_backward_weights(x->ctx, segment);
    x->stopped = rc > 0;
    if (rc != 0) return rc;
    PS_TRY(ps_step_done(x->step));
    if (goes_back(a->kind)) PS_TRY(back_done(x, a));
    return notes ? pipe_leave(x) : 0;
}

/* Returns true if the executor itself performs actions of this kind, without an event. */
static bool is_own(const ps_pipe *x, int kind)
{
    return x->step && (goes_back(kind) || kind == PS_ACT_WEIGHT || kind == PS_ACT_REDUCE);
}

/* Returns true if Lua has work to do before the due action. In this case, the caller must first return the action as an
 * event. */
static bool is_told(ps_pipe *x, const ps_action *a, int32_t *collect)
{
    if (x->told || x->stopped) return false;
    *collect = a->kind != PS_ACT_REDUCE && ps_step_collects(x->step);
    return *collect || x->tells;
}

/* Begins or continues an action of the step. If Lua has work to do before the action, or if the action's walk has
 * stopped at a segment, stores an event in *out and returns 1. */
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
            rc = pipe_is_receive(a) ? pipe_receive(x, a) : pipe_send(x, a);
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
                           "device or shape than expected", i, a->vstage, a->micro);
        if (!ps_tensor_is_contiguous(out[i]))
            return ps_fail(PS_EINVAL, "tensor %d that virtual stage %d returned for micro-batch %d is not "
                                      "contiguous", i,
                           a->vstage, a->micro);
    }
    return 0;
}

/* Detaches the tensors of `out` from the tape, and passes them to the next virtual stage, which is on this rank. */
static int hand_on(ps_pipe *x, const ps_action *a, const bundle *out)
{
    bundle *to = &slot_of(x, a->vstage + 1, a->micro)->in;
    for (int32_t i = 0; i < out->n; i++) {
        ps_tensor *t;
        PS_TRY(ps_tensor_detach(out->t[i], &t));
        PS_TRY(pipe_put(to, t));
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
        PS_TRY(pipe_put(&s->out, out[i]));
    }
    if (last) PS_TRY(pipe_give_loss(x, a->micro, &s->out));
    else if (pipe_link(x->t, a->vstage, a->vstage + 1) < 0) PS_TRY(hand_on(x, a, &s->out));
    if (x->t->spec.forward_only) pipe_let_go(&s->in);
    return last ? pipe_send_loss(x, a->micro) : 0;
}

static int event_done(ps_pipe *x, int n, ps_tensor *const *out)
{
    const ps_action *a = due(x);
    int32_t kind = x->event;
    bool repeats = kind == PS_ACT_FORWARD && pipe_is_again(x, a);
    if ((kind != PS_ACT_FORWARD || repeats) && n != 0)
        return ps_fail(PS_EINVAL, "%d tensors were passed, but only a forward that is performed returns tensors", n);
    if (repeats) PS_TRY(forward_again(x, a));
    else if (kind == PS_ACT_FORWARD) PS_TRY(forward_done(x, a, n, out));
    x->event = PS_ACT_NONE;
    if (kind == PS_ACT_SEGMENT) return 0;
    if (is_own(x, kind)) return x->told = true, 0;
    if (goes_back(kind)) PS_TRY(back_done(x, a));
    if (kind == PS_ACT_FORWARD && !repeats) PS_TRY(pipe_leave(x));
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
        pipe_let_one_go(x->posted[x->first_posted].t);
    }
    x->first_posted = x->n_posted = 0;
    for (int32_t i = 0; i < x->t->spec.micro_batches; i++) {
        if (x->loss_requests[i]) w->wait(x->channel, x->loss_requests[i], NULL);
        x->loss_requests[i] = NULL;
    }
    for (int32_t i = 0; i < x->n_local * x->t->spec.micro_batches; i++) pipe_let_slot_go(&x->slots[i]);
    x->open = false;
    x->step = NULL;
}
