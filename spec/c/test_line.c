/* SPDX-License-Identifier: BSD-3-Clause
 * Messages between devices (transport/line.h) under p2p/p2p.h, over the wire of wire_check.h. device_ranks_spec has
 * those of an emulated NCCL between processes. */
#define _GNU_SOURCE
#include "wire_check.h"
#include "comm/group.h"
#include "p2p/p2p.h"
#include <signal.h>

#ifdef PS_HAVE_GLOO
enum { N = WIRE_N, MICROS = 6 };
/* -- ranks --------------------------------------------------------------------------------------------------------- */

/* Returns the message lines between the ranks' devices, as after ps_group_connect. p2p.c only needs to know that the
 * host does not send them. */
static ps_p2p *lines_of(struct member *m, ps_ctx *ctx, ps_group *g, int *device)
{
    static ps_comm carrier;
    ps_p2p *p = NULL;
    if (!wired_sim(m, ctx, device)) return NULL;
    g->device = *device;
    g->at[ON_DEVICE].comm = &carrier;
    expect(m, ps_p2p_open(g, &p) == 0 && ps_p2p_carries(p, *device), "open");
    g->device = -1;
    g->at[ON_DEVICE].comm = NULL;
    return p;
}

/* Writes like a kernel that runs after everything for which the device waits. */
static bool write_to(ps_tensor *t, double value)
{
    return device_wait(t->ctx->devices[t->device_]) == 0 && touch(t, true, value);
}

static bool holds(ps_tensor *t, double value)
{
    return device_wait(t->ctx->devices[t->device_]) == 0 && touch(t, false, value);
}

static int post(ps_p2p *p, bool out, int peer, int lane, int micro, ps_tensor *t, ps_p2p_request **q)
{
    ps_p2p_tag tag = { .kind = lane == PS_P2P_UP ? 'F' : 'I', .micro = micro };
    return out ? ps_p2p_send(p, peer, lane, &tag, NULL, t, q) : ps_p2p_recv(p, peer, lane, &tag, t, q);
}

/* A pipeline in which all ranks send first, in both directions. Afterwards, a rank overwrites the memory that it
 * sent, and reads what it received. */
static int both_ways(struct member *m, ps_ctx *ctx, ps_group *g)
{
    int device, rank = m->rank, last = m->size - 1;
    ps_p2p *p = lines_of(m, ctx, g, &device);
    if (!p) return 0;
    for (int turn = 0; turn < 2 && !m->bad; turn++) {        /* the second turn reuses events and requests of the
                                                              * first */
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
                expect(m, write_to(out[down][i], 0), "a tensor that was sent");
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

/* Waits for a message that cannot arrive completely. The wait can succeed, since it only orders the device's work.
 * ps_p2p_check then returns the error. Afterwards, the memory belongs to its owner: this thread writes to it, and
 * ThreadSanitizer checks that. */
static int wait_in_vain(struct member *m, ps_p2p_request *q, ps_tensor *t, const char *word)
{
    int rc = ps_p2p_wait(q, NULL);
    expect(m, rc == 0 || strstr(ps_error_message(), word), word);
    expect(m, write_to(t, 0), "a tensor after a failure");
    ps_tensor_release(t);
    return rc;
}

/* Rank 0 sends to rank 1 and receives from it. Rank 1 runs `fate`. */
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
    if (wait_in_vain(m, q[1], in, word) == 0)
        expect(m, ps_p2p_settle(p) < 0 && strstr(ps_error_message(), "recv F of micro-batch 0, stage 0 of "),
               "the receive failed, and is named");
    expect(m, ps_group_barrier(g) < 0 && strstr(ps_error_message(), word), "the group ended");
    ps_p2p_close(p);
    return 0;
}

/* Gives up during two messages that never move. */
static void gives_up(ps_p2p *p)
{
    bool both;
    pthread_mutex_lock(&lock);
    for (;;) {
        both = n_hubs == 2;
        for (int i = 0; i < n_hubs; i++) both = both && hubs[i].given[0] > 0 && hubs[i].given[1] > 0;
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

/* Rank 1 receives nothing. */
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
