/* SPDX-License-Identifier: BSD-3-Clause
 * Messages between devices (comm/line.h) under comm/p2p.h. Ranks are threads of this process, their device is sim, and
 * a wire of this file's own moves its bytes in a thread, so that ThreadSanitizer sees who touches memory when. What an
 * emulated NCCL does between processes is in device_ranks_spec. */
#define _GNU_SOURCE
#include "ranks_check.h"
#include "backend/backend.h"
#include "comm/group.h"
#include "comm/p2p.h"
#include "tensor/tensor.h"
#include <signal.h>

#ifdef PS_HAVE_GLOO
/* -- the wire ------------------------------------------------------------------------------------------------------ */

enum { DUCTS = 32, DUE = 64 };

/* What connects two ranks: message i of the sender (end 0) goes to place i of the receiver (end 1). */
typedef struct duct {
    char id[PS_WIRE_ID_NBYTES];
    bool open[2], gone[2];
    ps_comm_part due[2][DUE];
    int64_t n[2], over;
    pthread_t mover;
} duct;
struct ps_wire { duct *d; int end, asked; };
struct ps_wire_event { duct *d; int end; int64_t number; };      /* over when so many messages are; d NULL: over */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;         /* of all ducts, also while bytes move */
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static duct ducts[DUCTS];
static int n_ducts, numbers_given;
static int64_t break_at, stall_at;         /* the message of each duct that fails, or never moves; 0: none */

static bool ends_soon(const duct *d) { return d->gone[0] || d->gone[1]; }

static void *move(void *arg)
{
    duct *d = arg;
    pthread_mutex_lock(&lock);
    while (!ends_soon(d)) {
        bool due = d->n[0] > d->over && d->n[1] > d->over;
        if (!due || d->over + 1 == break_at || d->over + 1 == stall_at) {
            pthread_cond_wait(&moved, &lock);
            continue;
        }
        const ps_comm_part *from = &d->due[0][d->over % DUE], *to = &d->due[1][d->over % DUE];
        memcpy(to->address, from->address, (size_t)from->nbytes);
        d->over++;
        pthread_cond_broadcast(&moved);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static int wire_new_id(ps_backend *be, char *id)
{
    pthread_mutex_lock(&lock);
    memset(id, 0, PS_WIRE_ID_NBYTES);
    snprintf(id, PS_WIRE_ID_NBYTES, "duct %d", ++numbers_given);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int wire_open(ps_backend *be, const char *id, int rank, int size, ps_wire **out)
{
    duct *d = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_ducts; i++) if (!memcmp(ducts[i].id, id, sizeof d->id)) d = &ducts[i];
    if (!d && n_ducts < DUCTS) memcpy((d = &ducts[n_ducts++])->id, id, sizeof d->id);
    if (d) {
        d->open[rank] = true;
        if (d->open[!rank]) pthread_create(&d->mover, NULL, move, d);
        *out = ps_alloc0(sizeof **out);
        **out = (ps_wire){ .d = d, .end = rank };
    }
    pthread_mutex_unlock(&lock);
    return d ? 0 : ps_fail(PS_ENOMEM, "no more ducts");
}

/* The second time that it is asked, as a library that does not block. */
static int wire_ready(ps_wire *w)
{
    pthread_mutex_lock(&lock);
    bool ready = w->d->open[!w->end] && ++w->asked > 1;
    pthread_mutex_unlock(&lock);
    return ready;
}

static int wire_begin(ps_wire *w, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    pthread_mutex_lock(&lock);
    w->d->due[w->end][w->d->n[w->end]++ % DUE] = w->end == 0 ? send[1] : recv[0];
    w->asked = 0;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int wire_ended(ps_wire *w, int lane)
{
    const duct *d = w->d;
    pthread_mutex_lock(&lock);
    bool broken = d->over + 1 == break_at && d->n[0] > d->over && d->n[1] > d->over, over = d->over >= d->n[w->end];
    pthread_mutex_unlock(&lock);
    return broken ? ps_fail(PS_EIO, "a link is down") : over;
}

static int wire_event_new(ps_backend *be, ps_wire_event **out)
{
    *out = ps_alloc0(sizeof **out);
    return *out ? 0 : ps_fail_nomem(sizeof **out);
}

static void wire_event_free(ps_wire_event *e) { ps_free(e); }

static void event_set(ps_wire_event *e, duct *d, int end)
{
    pthread_mutex_lock(&lock);
    *e = (ps_wire_event){ d, end, d ? d->n[end] : 0 };
    pthread_mutex_unlock(&lock);
}

/* Kernels of sim have ended when they return. */
static int wire_event_now(ps_backend *be, ps_wire_event *e) { return event_set(e, NULL, 0), 0; }
static int wire_event_before(ps_wire *w, ps_wire_event *e) { return 0; }
static int wire_event_end(ps_wire *w, ps_wire_event *e) { return event_set(e, w->d, w->end), 0; }
static bool is_over(const ps_wire_event *e) { return !e->d || e->d->over >= e->number || e->d->gone[e->end]; }

static int wire_event_over(ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    bool over = is_over(e);
    pthread_mutex_unlock(&lock);
    return over;
}

/* A GPU would wait. Here the thread is the device. */
static int wire_event_follow(ps_backend *be, ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    while (!is_over(e)) pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void wire_abort(ps_wire *w, int code, const char *why)
{
    pthread_mutex_lock(&lock);
    w->d->gone[w->end] = true;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static void wire_close(ps_wire *w)
{
    wire_abort(w, 0, NULL);
    ps_free(w);
}

static const ps_wire_table wire = {
    .name = "ducts", .most_ranks = MOST, .new_id = wire_new_id, .open = wire_open, .ready = wire_ready,
    .begin = wire_begin, .ended = wire_ended, .event_new = wire_event_new, .event_free = wire_event_free,
    .event_now = wire_event_now, .event_follow = wire_event_follow, .event_before = wire_event_before,
    .event_end = wire_event_end, .event_over = wire_event_over, .abort = wire_abort, .close = wire_close
};

/* -- ranks --------------------------------------------------------------------------------------------------------- */

enum { N = 30000, MICROS = 6 };

/* Messages between the ranks' devices, as after ps_group_connect, of which p2p.c wants to know no more than that there
 * is another carrier than the host's. */
static ps_p2p *lines_of(struct member *m, ps_ctx *ctx, ps_group *g, int *device)
{
    static ps_comm carrier;
    ps_p2p *p = NULL;
    if (!expect(m, ps_device_find(ctx, "sim", device) == 0, "sim")) return NULL;
    ctx->devices[*device]->wire = &wire;
    g->device = *device;
    g->at[ON_DEVICE].comm = &carrier;
    expect(m, ps_p2p_open(g, &p) == 0 && ps_p2p_carries(p, *device), "open");
    g->device = -1;
    g->at[ON_DEVICE].comm = NULL;
    return p;
}

/* Writes value, value + 1, ... + 6, value, ... to a tensor on sim, whose memory the processor can touch, or sees
 * whether that is in it. */
static bool touch(ps_tensor *t, bool writes, double value)
{
    void *bytes = NULL;
    if (ps_storage_pin(t->storage, t->device_, writes ? PS_WRITE : PS_READ, &bytes) < 0) return false;
    float *x = bytes;
    for (int i = 0; writes && i < N; i++) x[i] = (float)value + (float)(i % 7);
    bool same = x[0] == (float)value && x[N - 1] == (float)value + (float)((N - 1) % 7);
    ps_storage_unpin(t->storage, t->device_);
    return same;
}

static bool holds(ps_tensor *t, double value) { return touch(t, false, value); }

static ps_tensor *filled(ps_ctx *ctx, int device, double value)
{
    ps_tensor *t = NULL;
    int64_t shape[1] = { N };
    if (!OK(ps_tensor_new(ctx, PS_F32, device, 1, shape, &t)) || !CHECK(touch(t, true, value))) exit(1);
    return t;
}

static int post(ps_p2p *p, bool out, int peer, int lane, int micro, ps_tensor *t, ps_p2p_request **q)
{
    ps_p2p_tag tag = { .kind = lane == PS_P2P_UP ? 'F' : 'I', .micro = micro };
    return out ? ps_p2p_send(p, peer, lane, &tag, NULL, t, q) : ps_p2p_recv(p, peer, lane, &tag, t, q);
}

/* A pipeline in which all send first, both ways; what a rank sends it then writes to, and reads what it received. */
static int both_ways(struct member *m, ps_ctx *ctx, ps_group *g)
{
    int device, rank = m->rank, last = m->size - 1;
    ps_p2p *p = lines_of(m, ctx, g, &device);
    if (!p) return 0;
    for (int turn = 0; turn < 2 && !m->bad; turn++) {        /* the second has events and requests of the first */
        ps_tensor *out[2][MICROS] = { { NULL } }, *in = filled(ctx, device, -1);
        ps_p2p_request *sent[2][MICROS], *q;
        for (int i = 0; i < MICROS; i++)
            for (int down = 0; down < 2; down++) {
                if (rank == (down ? 0 : last)) continue;
                out[down][i] = filled(ctx, device, 100 * rank + 10 * down + i);
                expect(m, post(p, true, down ? rank - 1 : rank + 1, down ? PS_P2P_DOWN : PS_P2P_UP, i, out[down][i],
                               &sent[down][i]) == 0, "send");
            }
        for (int i = 0; i < MICROS && !m->bad; i++)
            for (int down = 0; down < 2; down++) {
                if (rank == (down ? last : 0)) continue;
                int from = down ? rank + 1 : rank - 1;
                expect(m, post(p, false, from, down ? PS_P2P_DOWN : PS_P2P_UP, i, in, &q) == 0, "recv");
                expect(m, ps_p2p_wait(q, NULL) == 0 && holds(in, 100 * from + 10 * down + i), "what came");
            }
        for (int i = 0; i < MICROS; i++)
            for (int down = 0; down < 2; down++) {
                if (!out[down][i]) continue;
                expect(m, ps_p2p_wait(sent[down][i], NULL) == 0, "sent");
                expect(m, touch(out[down][i], true, 0), "a tensor that was sent");
                ps_tensor_release(out[down][i]);
            }
        ps_tensor_release(in);
        expect(m, ps_p2p_check(p) == 0 && ps_p2p_settle(p) == 0, "all lines are still");
    }
    expect(m, ps_p2p_bytes_sent(p) == (int64_t)2 * MICROS * N * 4 * ((rank < last) + (rank > 0)), "bytes");
    expect(m, ps_group_barrier(g) == 0, "collectives beside");
    ps_p2p_close(p);
    return 0;
}

/* Waits for a message that cannot come whole. The wait may succeed, as it orders the device's work alone; ps_p2p_check
 * has the error then. Behind it the memory is its owner's: this thread writes to it, and ThreadSanitizer looks on. */
static int wait_in_vain(struct member *m, ps_p2p_request *q, ps_tensor *t, const char *word)
{
    int rc = ps_p2p_wait(q, NULL);
    expect(m, rc == 0 || strstr(ps_error_message(), word), word);
    expect(m, touch(t, true, 0), "a tensor after a failure");
    ps_tensor_release(t);
    return rc;
}

/* Rank 0 sends to rank 1 and receives from it; rank 1 does `fate` of its own. */
static int two_way(struct member *m, ps_ctx *ctx, ps_group *g, const char *word, void (*fate)(ps_p2p *))
{
    int device;
    ps_p2p *p = lines_of(m, ctx, g, &device);
    ps_p2p_request *q[2];
    if (!p) return 0;
    ps_tensor *out = filled(ctx, device, m->rank), *in = filled(ctx, device, 9);
    expect(m, post(p, true, !m->rank, PS_P2P_UP, 0, out, &q[0]) == 0, "send");
    expect(m, post(p, false, !m->rank, PS_P2P_UP, 0, in, &q[1]) == 0, "recv");
    if (m->rank == 1 && fate) fate(p);
    wait_in_vain(m, q[0], out, word);
    if (wait_in_vain(m, q[1], in, word) == 0) expect(m, ps_p2p_settle(p) < 0, "the receive failed");
    expect(m, ps_group_barrier(g) < 0 && strstr(ps_error_message(), word), "the group ended");
    ps_p2p_close(p);
    return 0;
}

/* In the middle of two messages that never move. */
static void gives_up(ps_p2p *p)
{
    bool both;
    pthread_mutex_lock(&lock);
    for (;;) {
        both = n_ducts == 2;
        for (int i = 0; i < n_ducts; i++) both = both && ducts[i].n[0] > 0 && ducts[i].n[1] > 0;
        if (both) break;
        pthread_cond_wait(&moved, &lock);
    }
    pthread_mutex_unlock(&lock);
    ps_p2p_abort(p, "rank 1 has had enough");
}

static int one_gives_up(struct member *m, ps_ctx *ctx, ps_group *g)
{
    return two_way(m, ctx, g, "had enough", gives_up);
}
static int broken(struct member *m, ps_ctx *ctx, ps_group *g) { return two_way(m, ctx, g, "rank ", NULL); }

/* Rank 1 takes nothing. */
static int late(struct member *m, ps_ctx *ctx, ps_group *g)
{
    int device;
    ps_p2p *p = lines_of(m, ctx, g, &device);
    ps_p2p_request *q;
    if (!p) return 0;
    if (m->rank == 0) {
        ps_tensor *t = filled(ctx, device, 1);
        expect(m, post(p, true, 1, PS_P2P_UP, 0, t, &q) == 0, "send");
        expect(m, wait_in_vain(m, q, t, "rank ") < 0, "a message that nobody takes");
    } else {
        usleep((useconds_t)(m->timeout_s * 1.5e6));
    }
    ps_p2p_close(p);
    return 0;
}

static void with_wires(int size, double timeout_s, int64_t breaks, int64_t stalls,
                       int (*run)(struct member *, ps_ctx *, ps_group *))
{
    n_ducts = 0;
    memset(ducts, 0, sizeof ducts);
    break_at = breaks, stall_at = stalls;
    with_group_for(size, timeout_s, 5, run);
    for (int i = 0; i < n_ducts; i++)
        if (ducts[i].open[0] && ducts[i].open[1]) pthread_join(ducts[i].mover, NULL);
}
#endif

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
#ifdef PS_HAVE_GLOO
    with_wires(3, 20, 0, 0, both_ways);
    with_wires(2, 20, 0, 1, one_gives_up);
    with_wires(2, 20, 1, 0, broken);
    with_wires(2, 0.5, 0, 0, late);
#endif
    return end_checks();
}
