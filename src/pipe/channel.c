/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the executor's channel (pipe_channel) between processes, with the messages of src/p2p/p2p.c. */
#include "base/alloc.h"
#include "base/error.h"
#include "p2p/p2p.h"
#include "pipe/exec.h"

typedef struct p2p_channel {
    pipe_channel channel;
    ps_p2p *p2p;
} p2p_channel;

static const int lanes[PIPE_LANES] = { PS_P2P_UP, PS_P2P_DOWN, PS_P2P_LOSS };

static ps_p2p *p2p_of(pipe_channel *w) { return ((p2p_channel *)w)->p2p; }

static ps_p2p_tag tag_of(const pipe_tag *t)
{
    return (ps_p2p_tag){ .kind = t->kind, .part = t->part, .vstage = t->vstage, .micro = t->micro };
}

static int channel_send(pipe_channel *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t,
                     void **out)
{
    ps_p2p_tag said = tag_of(tag);
    ps_p2p_note with = { .when = note->when,
                          .value = { note->loss, note->weight, note->hits, note->targets } };
    ps_p2p_request *request;
    PS_TRY(ps_p2p_send(p2p_of(w), peer, lanes[lane], &said, &with, t, &request));
    *out = request;
    return 0;
}

static int channel_recv(pipe_channel *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out)
{
    ps_p2p_tag wanted = tag_of(tag);
    ps_p2p_request *request;
    PS_TRY(ps_p2p_recv(p2p_of(w), peer, lanes[lane], &wanted, t, &request));
    *out = request;
    return 0;
}

static int channel_wait(pipe_channel *w, void *request, pipe_note *note)
{
    ps_p2p_note came;
    PS_TRY(ps_p2p_wait(request, &came));
    if (note) *note = (pipe_note){ .when = came.when, .loss = came.value[0], .weight = came.value[1],
                                   .hits = came.value[2], .targets = came.value[3] };
    return 0;
}

static bool channel_test(pipe_channel *w, void *request) { return ps_p2p_test(request) != 0; }

static bool channel_carries(pipe_channel *w, int device) { return ps_p2p_carries(p2p_of(w), device); }

static int channel_settle(pipe_channel *w, bool all)
{
    return all ? ps_p2p_settle(p2p_of(w)) : ps_p2p_check(p2p_of(w));
}

static void channel_at(pipe_channel *w, const pipe_tag *tag)
{
    ps_p2p_tag now = tag ? tag_of(tag) : (ps_p2p_tag){ .kind = 0 };
    ps_p2p_at(p2p_of(w), tag ? &now : NULL);
}

static void channel_abort(pipe_channel *w, const char *why) { ps_p2p_abort(p2p_of(w), why); }

static void channel_close(pipe_channel *w)
{
    ps_p2p_close(p2p_of(w));
    ps_free(w);
}

static const pipe_channel_table table = { .send = channel_send, .recv = channel_recv, .wait = channel_wait,
                                          .test = channel_test, .carries = channel_carries,
                                          .settle = channel_settle, .at = channel_at, .abort = channel_abort,
                                          .close = channel_close };

int ps_pipe_open(ps_ctx *ctx, const ps_pipe_table *t, ps_group *group, ps_pipe **out)
{
    int size = ps_group_size(group), stages = ps_pipe_table_spec(t)->stages;
    if (size != stages)
        return ps_fail(PS_EINVAL, "the table has %d ranks, and the group has %d", stages, size);
    p2p_channel *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->channel.table = &table;
    int rc = ps_p2p_open(group, &w->p2p);
    if (rc < 0) return ps_free(w), rc;
    rc = pipe_open(ctx, t, ps_group_rank(group), &w->channel, out);
    if (rc < 0) channel_close(&w->channel);
    return rc;
}
