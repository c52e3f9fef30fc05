/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the messages of p2p.h. All headers use one slot. The payloads of each lane use a slot of their
 * own. For each neighbor, this rank has two threads. The listener receives headers and starts to receive payloads. The
 * sender waits until sends have ended. The bytes are moved by a thread of the transport library.
 *
 * Between devices, a line (line.h) sends the payload. The header then contains the id with which the devices connect.
 * Each time the receiver has begun a receive on a line, it sends a BEGUN header back to the sender. */
#include "p2p/p2p.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/thread.h"
#include "backend/backend.h"
#include "collectives/collectives.h"
#include "rendezvous/watch.h"
#include "tensor/tensor.h"
#include "transport/line.h"

enum { MAGIC = 0x31503250 /* "P2P1" */, HEADERS = PS_P2P_LANES /* the slot of headers */ };
static const double FOR_EVER = 1e8;
static const char *const lane_names[PS_P2P_LANES] = { "up", "down", "loss", "tied" };
_Static_assert((int)HEADERS < (int)PS_COMM_SLOTS, "slots");

/* The kinds of memory of a payload. A header with the kind BEGUN has no payload. It is a notice that the other end of a
 * line has begun one more receive. */
enum { HOST, DEVICE, BEGUN };

/* The header that precedes a payload. */
typedef struct wire {
    uint32_t magic;
    int32_t lane;
    /* seq: index of the message among all messages that this sender has sent to this receiver on this lane */
    uint64_t seq;
    int32_t kind, part, vstage, micro;
    int32_t dtype, n_dims;
    int64_t shape[PS_MAX_DIMS];
    ps_p2p_note note;
    int32_t place, reserved;               /* place: HOST, DEVICE or BEGUN */
    char id[PS_WIRE_ID_NBYTES];            /* for DEVICE, the id with which the line is opened */
} wire;
_Static_assert(sizeof(wire) == 152 + PS_WIRE_ID_NBYTES, "the header of a message has no padding");

enum { POSTED, ARRIVING, DONE, FAILED };

struct ps_p2p_request {
    /* next: next request in the list that contains this request (of a channel, of a neighbor, or of spare requests)
     * made: next request in the list of all requests */
    ps_p2p_request *next, *made;
    ps_p2p *p2p;
    bool used;                             /* the request has begun, and ps_p2p_wait has not ended it yet */
    /* state: guarded by the lock. The state of a send is POSTED or DONE. */
    int peer, lane, state;
    bool out;
    /* head: for a send, the sent header. For a receive, the expected header; its note is received later. */
    wire head;
    ps_tensor *t;                          /* the tensor, which is held and pinned, or NULL if there is none */
    void *bytes;
    int64_t nbytes, began_ns;              /* began_ns: see struct group_call */
    ps_comm_post *head_post, *body_post;
    /* line: the line that sends the payload if it is in device memory. A receive learns its line from the header. */
    ps_line *line;
    ps_line_message message;               /* the message of this request on the line */
};

typedef struct letter { struct letter *next; wire head; } letter;

typedef struct channel {
    uint64_t sent, heard;
    ps_p2p_request *first, *last;          /* receives that wait for their headers */
    /* in: headers that wait for a receive; empty if `first` is not NULL */
    letter *in, *in_last;
} channel;

typedef struct neighbour {
    ps_p2p *p2p;
    int rank;
    /* listens: the listener was started
     * delivers: the sender was started */
    bool listens, delivers;
    /* deaf: the listener has stopped using requests
     * mute: the sender has stopped using requests */
    bool deaf, mute;
    pthread_t listener, sender;
    ps_comm_post *waits;                   /* the listener's receive of the next header, or NULL */
    wire next;
    /* out: sends in progress. The sender waits for the first send of this list. */
    ps_p2p_request *out, *out_last;
    /* why: error that ended the listener
     * why_mute: error that ended the sender */
    ps_error_kept why, why_mute;
    channel lanes[PS_P2P_LANES];
    /* lines: [out][lane] A line is made for its first message. */
    ps_line *lines[2][PS_P2P_LANES];
} neighbour;

struct ps_p2p {
    ps_group *group;                       /* a separate group that has the same ranks as the caller's group */
    ps_comm *comm;
    /* The lock guards all fields that follow, except `spare`, `made` and `bytes_sent`. */
    pthread_mutex_t lock;
    /* news: signals that a request or a thread has changed
     * work: signals that a sender has messages */
    pthread_cond_t news, work;
    bool closing;
    ps_error_kept failed;                  /* first error that this rank has found */
    letter *spare_letters;
    neighbour *peers;                           /* [size] */
    ps_p2p_request *spare, *made;
    int64_t bytes_sent;
    ps_backend *be;                        /* backend whose memory is sent on lines, or NULL if there is none */
    int device;                            /* index of the device of this backend */
};

/* -- texts --------------------------------------------------------------------------------------------------------- */

enum { TEXT = 200, ACTION = PS_LINE_NAME };

/* Writes a text such as "F of micro-batch 3, stage 1". */
static void action_text(int kind, int vstage, int micro, char text[ACTION])
{
    char name = kind > ' ' && kind < 127 ? (char)kind : '?';
    if (kind == 'Y') snprintf(text, ACTION, "the loop's turn of micro-batch %d", micro);
    else if (micro < 0) snprintf(text, ACTION, "%c, stage %d", name, vstage);
    else snprintf(text, ACTION, "%c of micro-batch %d, stage %d", name, micro, vstage);
}

/* Writes a text such as "F of micro-batch 3, stage 1, part 2: fp32 [2, 8]". */
static void wire_text(const wire *h, char text[TEXT])
{
    char action[ACTION];
    action_text(h->kind, h->vstage, h->micro, action);
    int n = snprintf(text, TEXT, "%s", action);
    if (h->part) n += snprintf(text + n, TEXT - (size_t)n, ", part %d", h->part);
    if (h->dtype < 0) {
        snprintf(text + n, TEXT - (size_t)n, ", without a tensor");
        return;
    }
    n += snprintf(text + n, TEXT - (size_t)n, ": %s [", ps_dtype_name(h->dtype));
    for (int i = 0; i < h->n_dims && n < TEXT; i++)
        n += snprintf(text + n, TEXT - (size_t)n, "%s%lld", i ? ", " : "", (long long)h->shape[i]);
    if (n < TEXT) snprintf(text + n, TEXT - (size_t)n, "]%s", h->place == DEVICE ? " on device" : "");
}

static bool is_same(const wire *a, const wire *b)
{
    bool same = a->kind == b->kind && a->part == b->part && a->vstage == b->vstage && a->micro == b->micro &&
                a->dtype == b->dtype && a->n_dims == b->n_dims && a->seq == b->seq && a->place == b->place;
    for (int i = 0; same && i < a->n_dims; i++) same = a->shape[i] == b->shape[i];
    return same;
}

static void enter(ps_p2p_request *q)
{
    char text[ACTION + 8], action[ACTION];
    ps_p2p *p = q->p2p;
    action_text(q->head.kind, q->head.vstage, q->head.micro, action);
    snprintf(text, sizeof text, "%s %s", q->out ? "send" : "recv", action);
    ps_watch_enter(p->comm->watch, p->comm->place, text, PS_WATCH_NO_CALL, group_world(p->group, q->peer), false);
}

static void leave(ps_p2p *p) { ps_watch_leave(p->comm->watch, p->comm->place); }

/* -- failures ------------------------------------------------------------------------------------------------------ */

/* Ends the run. All ranks get the error that this thread has raised. */
static int give_up(ps_p2p *p, int rc)
{
    ps_error_kept why;
    ps_error_keep(&why);
    pthread_mutex_lock(&p->lock);
    if (!p->failed.code) p->failed = why;
    pthread_cond_broadcast(&p->news);
    pthread_mutex_unlock(&p->lock);
    p->comm->table->hang_up(p->comm);
    ps_error_again(&why);
    return rc;
}

/* Turns the failure of a call with a peer into the error of this rank. The watch adds the name of the rank that caused
 * the failure. rc is the error of this thread: PS_ETIME, PS_EIO, or a fault of this rank. If this rank has already
 * found an earlier error, returns the earlier error instead. */
static int blame(ps_p2p *p, int peer, int rc)
{
    ps_error_kept why;
    ps_error_keep(&why);
    pthread_mutex_lock(&p->lock);
    int first = p->failed.code ? ps_error_again(&p->failed) : 0;
    pthread_mutex_unlock(&p->lock);
    /* The thread that found this error may not have closed the connections yet. */
    if (first) p->comm->table->hang_up(p->comm);
    if (first) return first;
    if (rc != PS_ETIME && rc != PS_EIO) return rc == PS_ESTATE ? rc : give_up(p, rc);
    int world = group_world(p->group, peer), what = rc == PS_ETIME ? PS_WATCH_TIME_OUT : PS_WATCH_LOST;
    PS_TRY(ps_watch_complain(p->comm->watch, p->comm->place, what, world, p->comm->timeout_s, why.message));
    if (rc == PS_ETIME) ps_fail_rank(rc, world, "rank %d: %s", world, why.message);
    else ps_fail_rank(rc, world, "rank %d closed the connection: it ended or failed first, and its own output "
                                 "says why (%s)", world,
                      why.message);
    return give_up(p, rc);
}

/* Returns the error that woke a waiting thread. The error is a verdict, or the error of a communicator of these ranks
 * that has closed its connections. */
static int woken(ps_p2p *p)
{
    PS_TRY(ps_watch_verdict(p->comm->watch));
    return ps_watch_failed_before(p->comm->watch);
}

/* Waits until a message has been sent or received, at most `seconds`. */
static int end_of(ps_p2p *p, ps_comm_post *post, double seconds)
{
    if (!post) return 0;
    int ended = p->comm->table->wait(post, seconds > 0.001 ? seconds : 0.001);
    return ended == 1 ? 0 : ended < 0 ? ended : woken(p);
}

/* -- lines --------------------------------------------------------------------------------------------------------- */

/* Sends a notice to `peer` that this rank has begun a receive on the line. Called by the thread of the line. */
static int tell_begun(void *arg, int peer, int lane)
{
    ps_p2p *p = arg;
    ps_comm_post *post = NULL;
    wire said = { .magic = MAGIC, .lane = lane, .dtype = -1, .place = BEGUN };
    PS_TRY(p->comm->table->post(p->comm, HEADERS, peer, true, &said, sizeof said, &post));
    int rc = end_of(p, post, p->comm->timeout_s);
    p->comm->table->drop(post);
    return rc;
}

static int blame_line(void *arg, int peer, int rc) { return blame(arg, peer, rc); }

/* Finds the line of a lane. Makes the line if it does not exist. The caller must hold the lock. */
static int find_line(ps_p2p *p, int peer, int lane, bool out, const char *id, ps_line **found)
{
    ps_line **l = &p->peers[peer].lines[out][lane];
    const ps_line_owner owner = { .host = p->comm, .be = p->be, .lock = &p->lock, .news = &p->news,
                                  .failed = &p->failed, .arg = p, .tell = tell_begun, .blame = blame_line };
    if (!*l) PS_TRY(ps_line_open(&owner, id, peer, lane, out, l));
    *found = *l;
    return 0;
}

/* -- arriving headers; the caller holds the lock ------------------------------------------------------------------- */

/* Checks that the received header `got` is the header that the request expects, and begins to receive the payload. */
static int take(ps_p2p_request *q, const wire *got)
{
    ps_p2p *p = q->p2p;
    q->head.note = got->note;
    q->state = FAILED;
    if (!is_same(&q->head, got)) {
        char wanted[TEXT], came[TEXT];
        wire_text(&q->head, wanted);
        wire_text(got, came);
        return ps_fail_rank(PS_EINVAL, group_world(p->group, q->peer),
                            "rank %d expects %s from rank %d, which sent %s (lane %s): the ranks' schedules, batches "
                            "or models differ",
                            group_world(p->group, p->comm->rank), wanted, group_world(p->group, q->peer), came,
                            lane_names[q->lane]);
    }
    if (q->head.place == DEVICE) {
        PS_TRY(find_line(p, q->peer, q->lane, false, got->id, &q->line));
        ps_line_put(q->line, &q->message);
    } else if (q->nbytes > 0) {
        PS_TRY(p->comm->table->post(p->comm, q->lane, q->peer, false, q->bytes, q->nbytes, &q->body_post));
    }
    q->state = q->nbytes > 0 ? ARRIVING : DONE;
    return 0;
}

/* Matches the receives of a lane with its received headers. The first receive gets the first header, and so on. */
static int match(ps_p2p *p, channel *l)
{
    int rc = 0;
    while (rc == 0 && l->first && l->in) {
        ps_p2p_request *q = l->first;
        letter *got = l->in;
        l->first = q->next;
        l->in = got->next;
        q->head.seq = l->heard++;
        rc = take(q, &got->head);
        got->next = p->spare_letters;
        p->spare_letters = got;
    }
    pthread_cond_broadcast(&p->news);
    return rc;
}

static int arrive(neighbour *from, const wire *h)
{
    ps_p2p *p = from->p2p;
    bool ours = h->magic == MAGIC && h->lane >= 0 && h->lane < PS_P2P_LANES && h->n_dims >= 0 &&
                h->n_dims <= PS_MAX_DIMS && h->dtype < PS_DTYPE_COUNT && h->place >= HOST && h->place <= BEGUN;
    ps_line *told = ours && h->place == BEGUN ? from->lines[true][h->lane] : NULL;
    if (told) {
        ps_line_allow(told);
        return 0;
    }
    ours = ours && h->place != BEGUN;
    if (!ours)
        return ps_fail_rank(PS_EFORMAT, group_world(p->group, from->rank), "rank %d sent bytes that are not a message "
                            "of a pipeline", group_world(p->group, from->rank));
    ps_watch_came(p->comm->watch, p->comm->place);
    letter *got = p->spare_letters;
    if (got) p->spare_letters = got->next;
    else if (!(got = ps_alloc(sizeof *got))) return ps_fail_nomem(sizeof *got);
    *got = (letter){ .head = *h };
    channel *l = &from->lanes[h->lane];
    if (l->in) l->in_last->next = got;
    else l->in = got;
    l->in_last = got;
    return match(p, l);
}

/* The thread of the listener. It receives the headers of one peer. */
static void *listen(void *arg)
{
    neighbour *from = arg;
    ps_p2p *p = from->p2p;
    const ps_comm_table *table = p->comm->table;
    int rc = 0;
    pthread_mutex_lock(&p->lock);
    while (rc == 0 && !p->closing) {
        ps_comm_post *post = NULL;
        rc = table->post(p->comm, HEADERS, from->rank, false, &from->next, sizeof from->next, &post);
        if (rc < 0) break;
        from->waits = post;
        pthread_mutex_unlock(&p->lock);
        int ended = table->wait(post, FOR_EVER);
        pthread_mutex_lock(&p->lock);
        from->waits = NULL;
        table->drop(post);
        rc = ended == 1 ? 0 : ended < 0 ? ended : p->closing ? PS_ESTATE : woken(p);
        if (ended != 1) break;
        rc = arrive(from, &from->next);
    }
    ps_error_keep(&from->why);
    from->deaf = true;
    pthread_cond_broadcast(&p->news);
    pthread_mutex_unlock(&p->lock);
    /* Ends the run if the listener itself found the error. Other errors are reported by the call that failed. */
    if (rc < 0 && rc != PS_EIO && rc != PS_ETIME && rc != PS_ESTATE) give_up(p, rc);
    return NULL;
}

/* The thread of the sender. It waits until the sends to one peer have ended. */
static void *deliver(void *arg)
{
    neighbour *to = arg;
    ps_p2p *p = to->p2p;
    int rc = 0;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!to->out && !p->closing) pthread_cond_wait(&p->work, &p->lock);
        ps_p2p_request *q = to->out;
        if (!q) break;
        pthread_mutex_unlock(&p->lock);
        rc = end_of(p, q->head_post, FOR_EVER);
        if (rc == 0) rc = end_of(p, q->body_post, FOR_EVER);
        pthread_mutex_lock(&p->lock);
        if (rc < 0) break;
        to->out = q->next;
        q->state = DONE;
        pthread_cond_broadcast(&p->news);
    }
    if (rc < 0) ps_error_keep(&to->why_mute);
    to->out = NULL;
    to->mute = true;
    pthread_cond_broadcast(&p->news);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static int start(neighbour *with, bool *runs, pthread_t *thread, void *(*run)(void *))
{
    if (*runs) return 0;
    int failed = ps_thread_start(thread, run, with);
    if (failed)
        return ps_fail(PS_ENOMEM, "cannot start a thread for messages between this rank and rank %d: %s", with->rank,
                       strerror(failed));
    *runs = true;
    return 0;
}

static int start_listening(neighbour *from) { return start(from, &from->listens, &from->listener, listen); }

/* -- requests ------------------------------------------------------------------------------------------------------ */

static int check(const ps_p2p *p, int peer, int lane, const ps_tensor *t)
{
    if (peer < 0 || peer >= p->comm->size || peer == p->comm->rank)
        return ps_fail(PS_EINVAL, "rank %d cannot exchange messages with rank %d in a group of %d ranks", p->comm->rank,
                       peer, p->comm->size);
    if (lane < 0 || lane >= PS_P2P_LANES) return ps_fail(PS_EINVAL, "there is no lane %d", lane);
    if (!t) return 0;
    PS_TRY(ps_tensor_check_alive(t));
    const ps_backend *be = t->ctx->devices[t->device_];
    if ((!be->is_host && !ps_p2p_carries(p, t->device_)) || be->no_data)
        return ps_fail(PS_EUNSUP, "a message has a tensor on device %s, which is not connected", be->name);
    if (!ps_tensor_is_contiguous(t))
        return ps_fail(PS_EINVAL, "a message has a tensor that is not contiguous; send t:contiguous()");
    return 0;
}

static ps_p2p_request *request_take(ps_p2p *p)
{
    ps_p2p_request *q = p->spare;
    if (q) p->spare = q->next;
    else if ((q = ps_alloc(sizeof *q))) {
        q->made = p->made;
        p->made = q;
        q->message = (ps_line_message){ .ready = NULL };
    } else return NULL;
    ps_line_message kept = { .ready = q->message.ready, .end = q->message.end };
    *q = (ps_p2p_request){ .made = q->made, .p2p = p, .used = true, .message = kept };
    return q;
}

static void request_end(ps_p2p_request *q)
{
    ps_p2p *p = q->p2p;
    if (p->comm->table->drop) {
        p->comm->table->drop(q->head_post);
        p->comm->table->drop(q->body_post);
    }
    /* If the context is closed, its pins no longer exist. */
    if (q->bytes && !q->t->ctx->closed) ps_storage_unpin(q->t->storage, q->t->device_);
    if (q->t) ps_tensor_unhold(q->t);
    q->used = false;
    q->next = p->spare;
    p->spare = q;
}

static int request_new(ps_p2p *p, int peer, int lane, bool out, const ps_p2p_tag *tag, ps_tensor *t,
                       ps_p2p_request **made)
{
    PS_TRY(check(p, peer, lane, t));
    ps_p2p_request *q = request_take(p);
    if (!q) return ps_fail_nomem(sizeof *q);
    q->peer = peer, q->lane = lane, q->out = out;
    q->began_ns = group_call_begin();
    q->head = (wire){ .magic = MAGIC, .lane = lane, .kind = tag->kind, .part = tag->part, .vstage = tag->vstage,
                      .micro = tag->micro, .dtype = -1 };
    if (t) {
        q->head.dtype = t->dtype_;
        q->head.n_dims = t->ndim;
        memcpy(q->head.shape, t->shape_, (size_t)t->ndim * sizeof *t->shape_);
        q->t = ps_tensor_hold(t);
        q->nbytes = ps_tensor_nbytes(t);
    }
    if (q->nbytes > 0) {
        void *bytes;
        int rc = ps_storage_pin(t->storage, t->device_, out ? PS_READ : PS_WRITE, &bytes);
        if (rc < 0) {
            request_end(q);
            return rc;
        }
        q->bytes = (char *)bytes + t->offset * ps_dtype_bytes(t->dtype_);
        if (!out) t->storage->version++;
    }
    if (q->nbytes > 0 && p->be && t->device_ == p->device) {
        q->head.place = DEVICE;
        q->message.bytes = q->bytes, q->message.nbytes = q->nbytes;
        action_text(tag->kind, tag->vstage, tag->micro, q->message.name);
        int rc = p->comm->pretends ? 0 : ps_line_message_prepare(p->be, &q->message);
        if (rc < 0) {
            request_end(q);
            return rc;
        }
    }
    *made = q;
    return 0;
}

/* Adds a description of the message to the front of this thread's error. */
static void prefix_of(const ps_p2p *p, bool out, const char *action, int peer)
{
    ps_error_prefix("rank %d, %s %s of %s with rank %d: ", group_world(p->group, p->comm->rank), out ? "send" : "recv",
                    action, p->comm->axis, group_world(p->group, peer));
}

static void prefix(const ps_p2p_request *q)
{
    char action[ACTION];
    action_text(q->head.kind, q->head.vstage, q->head.micro, action);
    prefix_of(q->p2p, q->out, action, q->peer);
}

/* Ends a request whose message could not be started, and returns the error of the message. */
static int refused(ps_p2p_request *q, int rc)
{
    ps_p2p *p = q->p2p;
    enter(q);
    rc = blame(p, q->peer, rc);
    prefix(q);
    leave(p);
    request_end(q);
    return rc;
}

/* Begins a message with a simulated rank. The tensor is held until ps_p2p_wait, but no bytes are sent. */
static int pretended(ps_p2p_request *q, ps_p2p_request **out)
{
    q->state = DONE;
    if (q->out) q->p2p->bytes_sent += q->nbytes;
    *out = q;
    return 0;
}

/* Finds or makes the line for a send from a device, and writes the id of the line to the header. */
static int send_begin(ps_p2p_request *q)
{
    ps_p2p *p = q->p2p;
    char id[PS_WIRE_ID_NBYTES] = { 0 };
    if (!p->peers[q->peer].lines[true][q->lane]) PS_TRY(p->be->wire->new_id(p->be, id));
    PS_TRY(start_listening(&p->peers[q->peer]));              /* the listener receives the BEGUN notices of the line */
    pthread_mutex_lock(&p->lock);
    int rc = find_line(p, q->peer, q->lane, true, id, &q->line);
    if (rc == 0) memcpy(q->head.id, ps_line_id(q->line), sizeof q->head.id);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

int ps_p2p_send(ps_p2p *p, int peer, int lane, const ps_p2p_tag *tag, const ps_p2p_note *note, ps_tensor *t,
                ps_p2p_request **out)
{
    ps_p2p_request *q;
    PS_TRY(request_new(p, peer, lane, true, tag, t, &q));
    if (p->comm->pretends) return pretended(q, out);
    const ps_comm_table *table = p->comm->table;
    neighbour *to = &p->peers[peer];
    int rc = start(to, &to->delivers, &to->sender, deliver);
    if (rc < 0) {
        request_end(q);
        return rc;
    }
    if (q->head.place == DEVICE) rc = send_begin(q);
    if (rc < 0) return refused(q, rc);
    q->head.seq = to->lanes[lane].sent;
    if (note) q->head.note = *note;
    ps_watch_sent(p->comm->watch, p->comm->place);
    rc = table->post(p->comm, HEADERS, peer, true, &q->head, sizeof q->head, &q->head_post);
    if (rc == 0 && q->nbytes > 0 && q->head.place == HOST)
        rc = table->post(p->comm, lane, peer, true, q->bytes, q->nbytes, &q->body_post);
    /* An error here ends the run, because the header may have been sent without its payload. */
    if (rc < 0) return refused(q, rc);
    to->lanes[lane].sent++;
    p->bytes_sent += q->nbytes;
    pthread_mutex_lock(&p->lock);
    if (to->out) to->out_last->next = q;
    else to->out = q;
    to->out_last = q;
    if (q->line) ps_line_put(q->line, &q->message);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    *out = q;
    return 0;
}

int ps_p2p_recv(ps_p2p *p, int peer, int lane, const ps_p2p_tag *tag, ps_tensor *t, ps_p2p_request **out)
{
    ps_p2p_request *q;
    PS_TRY(request_new(p, peer, lane, false, tag, t, &q));
    if (p->comm->pretends) return pretended(q, out);
    channel *l = &p->peers[peer].lanes[lane];
    int rc = start_listening(&p->peers[peer]);
    if (rc < 0) {
        request_end(q);
        return rc;
    }
    q->state = POSTED;
    pthread_mutex_lock(&p->lock);
    if (l->first) l->last->next = q;
    else l->first = q;
    l->last = q;
    rc = match(p, l);
    pthread_mutex_unlock(&p->lock);
    if (rc < 0) return refused(q, rc);
    *out = q;
    return 0;
}

/* -- waiting ------------------------------------------------------------------------------------------------------- */

/* Waits until p->news is signaled, or until ps_now() reaches `until`. Returns false if that time has already passed.
 * The caller must hold the lock. */
static bool wait_for_news(ps_p2p *p, double until)
{
    double left = until - ps_now();
    if (left <= 0) return false;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    double end = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 + left;
    t.tv_sec = (time_t)end;
    t.tv_nsec = (long)((end - (double)t.tv_sec) * 1e9);
    pthread_cond_timedwait(&p->news, &p->lock, &t);
    return true;
}

/* Waits until come(arg) returns true. Fails if over(arg) returns an error, or if ps_now() reaches `until`. `heads`
 * means that the script of the peer has not sent the header yet. The caller must not hold the lock. */
static int until_come(ps_p2p *p, double until, bool (*come)(const void *), const ps_error_kept *(*over)(const void *),
                      const void *arg, bool heads)
{
    int rc = 0;
    pthread_mutex_lock(&p->lock);
    while (rc == 0 && !come(arg)) {
        const ps_error_kept *why = over(arg);
        if (heads) ps_watch_waits(p->comm->watch, p->comm->place, true);
        if (why) rc = ps_error_again(why);
        else if (!wait_for_news(p, until))
            rc = ps_fail(PS_ETIME, "no message was received or sent within %g s", p->comm->timeout_s);
    }
    ps_watch_waits(p->comm->watch, p->comm->place, false);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

static bool has_come(const void *request)
{
    const ps_p2p_request *q = request;
    if (q->line && !q->message.begun) return false;
    return q->state == ARRIVING || q->state == DONE;
}

typedef struct next_letter { const neighbour *from; int lane; } next_letter;

static bool has_letter(const void *next)
{
    const next_letter *n = next;
    return n->from->lanes[n->lane].in != NULL;
}

static const ps_error_kept *is_deaf(const void *next)
{
    const neighbour *from = ((const next_letter *)next)->from;
    return from->deaf ? &from->why : NULL;
}

/* Returns the error that stops a message, or NULL. A send from a device also fails if the listener for the peer has
 * ended, because this listener receives the BEGUN notices of the line. */
static const ps_error_kept *is_over(const void *request)
{
    const ps_p2p_request *q = request;
    const neighbour *with = &q->p2p->peers[q->peer];
    if (q->line && ps_line_failed(q->line)) return ps_line_failed(q->line);
    if (q->out && with->mute) return &with->why_mute;
    return (!q->out || q->line) && with->deaf ? &with->why : NULL;
}

static int wait_for(ps_p2p_request *q, double until)
{
    ps_p2p *p = q->p2p;
    PS_TRY(until_come(p, until, has_come, is_over, q, !q->out && !p->be));
    if (q->line) return p->be->wire->event_follow(p->be, q->message.end);
    return q->out ? 0 : end_of(p, q->body_post, until - ps_now());
}

/* Waits until no other thread uses the request. Called after a failure, which ends all messages. */
static void let_go(ps_p2p_request *q)
{
    ps_p2p *p = q->p2p;
    neighbour *with = &p->peers[q->peer];
    pthread_mutex_lock(&p->lock);
    for (;;) {
        /* These values are computed in each turn of the loop, because the listener can set q->line. */
        bool line_rests = !q->line || ps_line_rests(q->line);
        bool thread_rests = q->out ? q->state == DONE || with->mute : q->line || has_come(q) || with->deaf;
        if (line_rests && thread_rests) break;
        if (q->line) ps_line_stop(q->line);
        pthread_cond_wait(&p->news, &p->lock);
    }
    channel *l = &with->lanes[q->lane];
    ps_p2p_request *before = NULL;
    for (ps_p2p_request *r = l->first; r; before = r, r = r->next) {
        if (r != q) continue;
        if (before) before->next = q->next;
        else l->first = q->next;
        if (l->last == q) l->last = before;
        break;
    }
    pthread_mutex_unlock(&p->lock);
}

int ps_p2p_wait(ps_p2p_request *q, ps_p2p_note *note)
{
    ps_p2p *p = q->p2p;
    enter(q);
    if (!p->comm->pretends && !ps_p2p_test(q)) ps_watch_tell(p->comm->watch, p->comm->place);
    int rc = p->comm->pretends ? 0 : wait_for(q, ps_now() + p->comm->timeout_s);
    if (rc < 0) {
        rc = blame(p, q->peer, rc);
        prefix(q);
        let_go(q);
    }
    leave(p);
    group_call_end(p->group, &(group_call){ q->out ? OP_SEND : OP_RECV, q->began_ns, q->nbytes });
    if (note) *note = q->head.note;
    request_end(q);
    return rc;
}

int ps_p2p_test(ps_p2p_request *q)
{
    ps_p2p *p = q->p2p;
    pthread_mutex_lock(&p->lock);
    bool come = has_come(q), failed = is_over(q) != NULL;
    pthread_mutex_unlock(&p->lock);
    if (come && !failed && q->line && q->out) return p->be->wire->event_over(q->message.end) != 0;
    return come || failed;
}

bool ps_p2p_carries(const ps_p2p *p, int device) { return p->be && device == p->device; }

/* Returns a line on which this rank receives. Prefers a line that has failed. Otherwise returns a line whose bytes have
 * not all arrived, or NULL if there is no such line. *peer receives the rank at the other end of the line. The caller
 * must hold the lock. */
static const ps_line *busy_line(const ps_p2p *p, int *peer)
{
    const ps_line *busy = NULL;
    for (int r = 0; r < p->comm->size; r++)
        for (int lane = 0; lane < PS_P2P_LANES; lane++) {
            const ps_line *l = p->peers[r].lines[false][lane];
            bool failed = l && ps_line_failed(l);
            if (failed || (l && !busy && !ps_line_is_still(l))) busy = l, *peer = r;
            if (failed) return busy;
        }
    return busy;
}

/* Returns the error of a line that has failed, or 0. If `waits` is set, waits until all messages have arrived or a line
 * has failed. */
static int look_at_lines(ps_p2p *p, bool waits)
{
    double until = ps_now() + p->comm->timeout_s;
    char action[ACTION] = "";
    int rc = 0, peer = 0;
    pthread_mutex_lock(&p->lock);
    while (rc == 0) {
        const ps_line *busy = busy_line(p, &peer);
        const ps_error_kept *failed = busy ? ps_line_failed(busy) : NULL;
        if (busy) snprintf(action, sizeof action, "%s", ps_line_at(busy));
        if (failed) rc = ps_error_again(failed);
        if (!busy || !waits) break;
        if (!failed && !wait_for_news(p, until))
            rc = ps_fail(PS_ETIME, "messages between devices did not end within %g s", p->comm->timeout_s);
    }
    pthread_mutex_unlock(&p->lock);
    if (rc == 0) return 0;
    rc = blame(p, peer, rc);
    prefix_of(p, false, action, peer);
    return rc;
}

int ps_p2p_check(ps_p2p *p) { return p->be ? look_at_lines(p, false) : 0; }
int ps_p2p_settle(ps_p2p *p) { return p->be ? look_at_lines(p, true) : 0; }

int ps_p2p_next(ps_p2p *p, int peer, int lane, ps_p2p_header *out)
{
    PS_TRY(check(p, peer, lane, NULL));
    PS_TRY(start_listening(&p->peers[peer]));
    channel *l = &p->peers[peer].lanes[lane];
    char text[ACTION];
    snprintf(text, sizeof text, "recv (lane %s)", lane_names[lane]);
    ps_watch_enter(p->comm->watch, p->comm->place, text, PS_WATCH_NO_CALL, group_world(p->group, peer), false);
    const next_letter wanted = { &p->peers[peer], lane };
    int rc = until_come(p, ps_now() + p->comm->timeout_s, has_letter, is_deaf, &wanted, true);
    if (rc < 0) {
        rc = blame(p, peer, rc);
        snprintf(text, sizeof text, "of lane %s", lane_names[lane]);
        prefix_of(p, false, text, peer);
    }
    leave(p);
    if (rc < 0) return rc;
    pthread_mutex_lock(&p->lock);
    const wire *h = &l->in->head;
    *out = (ps_p2p_header){ .tag = { (char)h->kind, (int16_t)h->part, h->vstage, h->micro },
                            .note = h->note, .dtype = h->dtype, .n_dims = h->n_dims };
    memcpy(out->shape, h->shape, sizeof out->shape);
    pthread_mutex_unlock(&p->lock);
    return 0;
}

/* -- all messages -------------------------------------------------------------------------------------------------- */

void ps_p2p_at(ps_p2p *p, const ps_p2p_tag *tag)
{
    char text[ACTION];
    leave(p);
    if (tag) {
        action_text(tag->kind, tag->vstage, tag->micro, text);
        ps_watch_enter(p->comm->watch, p->comm->place, text, PS_WATCH_NO_CALL, -1, false);
    }
    ps_watch_tell(p->comm->watch, p->comm->place);
}

void ps_p2p_abort(ps_p2p *p, const char *text)
{
    ps_error_kept mine;
    ps_error_keep(&mine);
    ps_fail(PS_EIO, "%s", text);
    give_up(p, PS_EIO);
    ps_error_again(&mine);
}

int ps_p2p_rank(const ps_p2p *p) { return p->comm->rank; }
int ps_p2p_size(const ps_p2p *p) { return p->comm->size; }
int64_t ps_p2p_bytes_sent(const ps_p2p *p) { return p->bytes_sent; }

/* Makes a group of the same ranks. The new group has its own slots, and its own place in the watch. */
static int same_ranks(ps_group *group, ps_group **out)
{
    int n = ps_group_size(group);
    const char *axis = ps_group_axis(group);
    int32_t *ranks = ps_alloc((size_t)n * sizeof *ranks);
    if (!ranks) return ps_fail_nomem((size_t)n * sizeof *ranks);
    for (int r = 0; r < n; r++) ranks[r] = r;
    int rc = ps_group_split(group, n, ranks, axis[0] ? axis : "world", out);
    ps_free(ranks);
    return rc;
}

int ps_p2p_open(ps_group *group, ps_p2p **out)
{
    int size = ps_group_size(group);
    ps_group *own = NULL;
    ps_p2p *p = ps_alloc0(sizeof *p);
    neighbour *peers = ps_alloc0((size_t)size * sizeof *peers);
    int rc = same_ranks(group, &own);
    if (rc == 0 && !(p && peers)) rc = ps_fail_nomem(sizeof *p + (size_t)size * sizeof *peers);
    if (own) rc = group_agree_bytes(own, OP_SPLIT, ON_HOST, 0, 0, 0, rc);
    if (rc < 0) {
        ps_group_close(own);
        ps_free(p);
        ps_free(peers);
        return rc;
    }
    p->group = own;
    p->comm = own->comm;
    p->peers = peers;
    p->device = group->device;
    if (group->device >= 0 && group->at[ON_DEVICE].comm != group->comm && size > 1)
        p->be = group->ctx->devices[group->device];
    pthread_mutex_init(&p->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->news, &monotonic);
    pthread_cond_init(&p->work, NULL);
    pthread_condattr_destroy(&monotonic);
    for (int r = 0; r < size; r++) peers[r].p2p = p, peers[r].rank = r;
    *out = p;
    return 0;
}

static void letters_free(letter *first)
{
    while (first) {
        letter *next = first->next;
        ps_free(first);
        first = next;
    }
}

void ps_p2p_close(ps_p2p *p)
{
    if (!p) return;
    int size = p->comm->size;
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    for (int r = 0; r < size; r++) {
        const ps_p2p_request *q = p->peers[r].out;         /* a request that was never waited for */
        if (q) p->comm->table->wake(q->head_post);
        if (q && q->body_post) p->comm->table->wake(q->body_post);
        if (p->peers[r].waits) p->comm->table->wake(p->peers[r].waits);
    }
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int r = 0; r < size; r++) {
        if (p->peers[r].listens) pthread_join(p->peers[r].listener, NULL);
        if (p->peers[r].delivers) pthread_join(p->peers[r].sender, NULL);
        for (int l = 0; l < PS_P2P_LANES; l++) {
            letters_free(p->peers[r].lanes[l].in);
            ps_line_close(p->peers[r].lines[false][l]);
            ps_line_close(p->peers[r].lines[true][l]);
        }
    }
    letters_free(p->spare_letters);
    for (ps_p2p_request *q = p->made; q; q = q->made) if (q->used) request_end(q);
    while (p->made) {
        ps_p2p_request *q = p->made;
        p->made = q->made;
        if (p->be) ps_line_message_free(p->be, &q->message);
        ps_free(q);
    }
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->news);
    pthread_cond_destroy(&p->work);
    ps_group_close(p->group);
    ps_free(p->peers);
    ps_free(p);
}
