/* SPDX-License-Identifier: BSD-3-Clause
 * This file sends messages between the executors of ranks. In forward, the tensors of a micro-batch are sent up to the
 * next virtual stage. In backward, the gradients of these tensors are sent down to the previous virtual stage. The
 * losses are sent to all ranks. The receives of an action are posted before the action is due. */
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "pipe/exec_state.h"
#include "tensor/replay.h"

/* -- bundles ------------------------------------------------------------------------------------------------------- */
void pipe_let_one_go(ps_tensor *t)
{
    if (t) ps_tensor_unhold(t);
}

void pipe_let_go(bundle *b)
{
    for (int32_t i = 0; i < b->n; i++) ps_tensor_unhold(b->t[i]);
    b->n = 0;
}

static void let_out_go(slot *s)
{
    for (int32_t i = 0; s->sent && i < s->out.n; i++) ps_tensor_release(s->out.t[i]);
    if (s->sent) s->out.n = 0;
    s->sent = false;
    pipe_let_go(&s->out);
}

/* Called after the send of `out`. Frees the bytes of `out`, unless the tape needs the bytes. Backward begins at `out`,
 * but does not read its bytes. If the bytes were not freed, each activation between virtual stages would exist on two
 * ranks. */
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

void pipe_let_slot_go(slot *s)
{
    pipe_let_go(&s->in);
    pipe_let_go(&s->in_grad);
    let_out_go(s);
    pipe_let_go(&s->out_grad);
    pipe_let_one_go(s->root);
    s->root = NULL;
    s->bounded = false;
}

/* Adds t to a bundle. Releases the caller's reference to t, even if the function fails. */
int pipe_put(bundle *b, ps_tensor *t)
{
    int rc = ps_tensor_check_alive(t);
    if (rc == 0) b->t[b->n++] = ps_tensor_hold(t);
    ps_tensor_release(t);
    return rc;
}

/* Returns the arrival time, by the virtual clock, of a message that is sent now. */
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

static int32_t other_end(const ps_action *a)
{
    return a->kind == PS_ACT_SEND_F || a->kind == PS_ACT_RECV_B ? a->vstage + 1 : a->vstage - 1;
}

/* Fills `carried` with the indices of the tensors that a transfer sends, and returns their number. A forward transfer
 * sends all tensors that one virtual stage passes to the next virtual stage. A backward transfer sends only the
 * gradients of those tensors that need a gradient. */
static int32_t carried_of(const ps_pipe *x, const ps_action *a, int32_t carried[PS_PIPE_CARRY], const expected **of)
{
    int32_t n = 0, other = other_end(a), giver = other < a->vstage ? other : a->vstage;
    *of = expected_of(x, giver, a->micro);
    for (int32_t i = 0; i < (*of)->n; i++) if (goes_up(a) || (*of)->carry[i].grad) carried[n++] = i;
    return n;
}

/* Returns the tag of a message. The tag names the forward or backward that made the message. The sender and the
 * receiver compute the same tag. */
static pipe_tag tag_of(const ps_action *a, int32_t part)
{
    return (pipe_tag){ goes_up(a) ? 'F' : 'B', (int16_t)part, pipe_is_receive(a) ? other_end(a) : a->vstage, a->micro };
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

/* Returns the device that sends and receives the bytes of a tensor on `device`: `device` itself, or the host. */
static int meeting_place(const ps_pipe *x, int device)
{
    const pipe_channel_table *w = x->channel->table;
    return w->carries && w->carries(x->channel, device) ? device : x->host;
}

/* Returns an error if a message between devices has failed. If `all` is set, first waits until all messages between
 * devices have arrived. */
int pipe_settle(ps_pipe *x, bool all)
{
    if (x->dry || !x->channel->table->settle) return 0;
    int64_t began = ps_record_begin();
    int rc = x->channel->table->settle(x->channel, all);
    if (all) ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_MESSAGE, .begin_ns = began,
                                              .id = -1 });
    return rc;
}

/* Begins a receive. The tensor is allocated now, because its bytes can arrive at any time. what: description of the
 * tensor, or NULL if the message has no tensor. */
static int post(ps_pipe *x, int peer, int lane, const pipe_tag *tag, const ps_pipe_tensor *what)
{
    incoming in = { NULL, NULL };
    int rc = 0;
    PS_TRY(ps_grow(x->posted, x->posted_capacity, x->n_posted + 1));
    if (what) {
        int device = x->dry ? what->device : meeting_place(x, what->device);
        ps_tensor *made;
        PS_TRY(ps_tensor_new(x->ctx, what->dtype, device, what->ndim, what->shape, &made));
        /* Scripts can see a received tensor only if it is an input of a forward. */
        ps_replay_scripted(made->storage, pipe_noting(x) && lane == PIPE_LANE_UP);
        in.t = ps_tensor_hold(made);
        ps_tensor_release(made);
    }
    if (rc == 0 && !x->dry) rc = x->channel->table->recv(x->channel, peer, lane, tag, in.t, &in.request);
    if (rc < 0) return pipe_let_one_go(in.t), rc;
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

/* Posts the receives of all actions before index `end`, in the order of the row. */
int pipe_post_before(ps_pipe *x, int32_t end)
{
    for (; x->ahead < end; x->ahead++) {
        const ps_action *a = &row_of(x)->actions[x->ahead];
        if (!pipe_is_receive(a)) continue;
        int span = a->kind == PS_ACT_RECV_F ? SPAN_POST_F : SPAN_POST_B;
        if (pipe_is_again(x, a)) {
            PS_TRY(pipe_again(x, a, span));
            continue;
        }
        pipe_enter(x, a, span);
        PS_TRY(post_action(x, a));
        PS_TRY(pipe_leave(x));
    }
    return 0;
}

/* Returns the index of the first action after the due action for which pipe_is_compute() is true. */
int32_t pipe_next_work(const ps_pipe *x)
{
    int32_t at = x->cursor + 1;
    while (at < row_of(x)->n && !pipe_is_compute(row_of(x)->actions[at].kind)) at++;
    return at;
}

/* Waits until the message of `request` has been sent or received. */
int pipe_wait_for(ps_pipe *x, void *request, pipe_note *note)
{
    int64_t began = ps_record_begin();
    int rc = x->channel->table->wait(x->channel, request, note);
    ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_MESSAGE, .begin_ns = began, .id = -1 });
    return rc;
}

/* Waits for the oldest posted receive, moves its tensor to `device`, and adds it to `to`. */
static int take_one(ps_pipe *x, int device, bundle *to)
{
    incoming in = x->posted[x->first_posted++];
    pipe_note note = { 0 };
    if (x->first_posted == x->n_posted) x->first_posted = x->n_posted = 0;
    int rc = x->dry ? 0 : pipe_wait_for(x, in.request, &note);
    if (rc == 0 && note.when > x->clock) x->clock = note.when;
    if (rc == 0 && in.t) {
        ps_tensor *there = NULL;
        if (in.t->device_ != device) rc = to_device(x->ctx, in.t, device, &there);
        else ps_tensor_retain(there = in.t);
        if (rc == 0) rc = pipe_put(to, there);
    }
    pipe_let_one_go(in.t);
    return rc;
}

int pipe_receive(ps_pipe *x, const ps_action *a)
{
    int32_t carried[PS_PIPE_CARRY];
    const expected *of;
    int32_t n = carried_of(x, a, carried, &of);
    slot *s = slot_of(x, a->vstage, a->micro);
    PS_TRY(pipe_post_before(x, x->cursor + 1));
    if (pipe_is_again(x, a)) return pipe_again(x, a, pipe_part_of(a->kind));
    pipe_enter(x, a, pipe_part_of(a->kind));
    for (int32_t i = 0; i < (n ? n : 1); i++)
        PS_TRY(take_one(x, n ? of->carry[carried[i]].device : x->host,
                        a->kind == PS_ACT_RECV_F ? &s->in : &s->out_grad));
    return pipe_leave(x);
}

/* Begins a send. First frees the earlier sends that have ended. The end of the step waits for the other sends. */
static int begin_send(ps_pipe *x, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t)
{
    const pipe_channel_table *w = x->channel->table;
    int32_t n = 0;
    int rc = 0;
    for (int32_t i = 0; i < x->n_sends; i++) {
        if (rc < 0 || !w->test(x->channel, x->sends[i])) x->sends[n++] = x->sends[i];
        else rc = pipe_wait_for(x, x->sends[i], NULL);
    }
    x->n_sends = n;
    PS_TRY(rc);
    PS_TRY(ps_grow(x->sends, x->sends_capacity, n + 1));
    PS_TRY(w->send(x->channel, peer, lane, tag, note, t, &x->sends[n]));
    x->n_sends++;
    return 0;
}

int pipe_send(ps_pipe *x, const ps_action *a)
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
    if (pipe_is_again(x, a)) return pipe_again(x, a, pipe_part_of(a->kind));
    pipe_enter(x, a, pipe_part_of(a->kind));
    if (goes_up(a)) let_bytes_go(s);                         /* the channel holds the bytes until the send ends */
    else pipe_let_go(from);
    return pipe_leave(x);
}

/* -- losses -------------------------------------------------------------------------------------------------------- */
static pipe_tag loss_tag(const ps_pipe *x, int32_t micro)
{
    return (pipe_tag){ 'L', -1, x->t->spec.vstages - 1, micro };
}

/* Returns the rank of the last virtual stage, which computes the losses. */
static int loser(const ps_pipe *x) { return x->t->rank_of[x->t->spec.vstages - 1]; }

/* Posts the receives of all losses, in the order in which the losses are computed. Called when the step begins. */
int pipe_post_losses(ps_pipe *x)
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

int pipe_give_loss(ps_pipe *x, int32_t micro, const bundle *out)
{
    if (x->dry || !out->n || !ps_tensor_has_data(out->t[0])) return x->losses[micro].loss = 0, 0;
    if (out->t[0]->numel_ != 1)
        return ps_fail(PS_EINVAL, "the loss of micro-batch %d has %lld elements; it must have one", micro,
                       (long long)out->t[0]->numel_);
    ps_tensor *moved = NULL;
    int rc = out->t[0]->device_ != x->host ? to_device(x->ctx, out->t[0], x->host, &moved) : 0;
    if (rc == 0) rc = ps_tensor_read_f64(moved ? moved : out->t[0], 0, 1, &x->losses[micro].loss);
    ps_tensor_release(moved);
    return rc < 0 ? rc : pipe_settle(x, false);
}

int pipe_send_loss(ps_pipe *x, int32_t micro)
{
    pipe_tag tag = loss_tag(x, micro);
    for (int peer = 0; peer < x->t->spec.stages && !x->dry; peer++)
        if (peer != x->rank) PS_TRY(begin_send(x, peer, PIPE_LANE_LOSS, &tag, &x->losses[micro], NULL));
    return 0;
}

int pipe_take_loss(ps_pipe *x, int32_t micro)
{
    void *request = x->loss_requests[micro];
    if (!request) return 0;
    x->loss_requests[micro] = NULL;
    return pipe_wait_for(x, request, &x->losses[micro]);
}
