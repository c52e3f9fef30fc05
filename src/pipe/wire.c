/* SPDX-License-Identifier: BSD-3-Clause
 * The executor's wire between processes, by the messages of src/p2p/p2p.c. */
#include "base/alloc.h"
#include "base/error.h"
#include "p2p/p2p.h"
#include "pipe/exec.h"

typedef struct p2p_wire {
    pipe_wire wire;
    ps_p2p *p2p;
} p2p_wire;

static const int lanes[PIPE_LANES] = { PS_P2P_UP, PS_P2P_DOWN, PS_P2P_LOSS };

static ps_p2p *p2p_of(pipe_wire *w) { return ((p2p_wire *)w)->p2p; }

static ps_p2p_tag tag_of(const pipe_tag *t)
{
    return (ps_p2p_tag){ .kind = t->kind, .part = t->part, .vstage = t->vstage, .micro = t->micro };
}

static int wire_send(pipe_wire *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t,
                     void **out)
{
    ps_p2p_tag said = tag_of(tag);
    ps_p2p_note with = { .when = note->when, .value = { note->loss, note->weight } };
    ps_p2p_request *request;
    PS_TRY(ps_p2p_send(p2p_of(w), peer, lanes[lane], &said, &with, t, &request));
    *out = request;
    return 0;
}

static int wire_recv(pipe_wire *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out)
{
    ps_p2p_tag wanted = tag_of(tag);
    ps_p2p_request *request;
    PS_TRY(ps_p2p_recv(p2p_of(w), peer, lanes[lane], &wanted, t, &request));
    *out = request;
    return 0;
}

static int wire_wait(pipe_wire *w, void *request, pipe_note *note)
{
    ps_p2p_note came;
    PS_TRY(ps_p2p_wait(request, &came));
    if (note) *note = (pipe_note){ .when = came.when, .loss = came.value[0], .weight = came.value[1] };
    return 0;
}

static bool wire_test(pipe_wire *w, void *request) { return ps_p2p_test(request) != 0; }

static bool wire_carries(pipe_wire *w, int device) { return ps_p2p_carries(p2p_of(w), device); }

static int wire_settle(pipe_wire *w, bool all) { return all ? ps_p2p_settle(p2p_of(w)) : ps_p2p_check(p2p_of(w)); }

static void wire_at(pipe_wire *w, const pipe_tag *tag)
{
    ps_p2p_tag now = tag ? tag_of(tag) : (ps_p2p_tag){ .kind = 0 };
    ps_p2p_at(p2p_of(w), tag ? &now : NULL);
}

static void wire_abort(pipe_wire *w, const char *why) { ps_p2p_abort(p2p_of(w), why); }

static void wire_close(pipe_wire *w)
{
    ps_p2p_close(p2p_of(w));
    ps_free(w);
}

static const pipe_wire_table table = { .send = wire_send, .recv = wire_recv, .wait = wire_wait, .test = wire_test,
                                       .carries = wire_carries, .settle = wire_settle,
                                       .at = wire_at, .abort = wire_abort, .close = wire_close };

int ps_pipe_open(ps_ctx *ctx, const ps_pipe_table *t, ps_group *group, ps_pipe **out)
{
    int size = ps_group_size(group), stages = ps_pipe_table_spec(t)->stages;
    if (size != stages)
        return ps_fail(PS_EINVAL, "a table of %d ranks, and the group has %d", stages, size);
    p2p_wire *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->wire.table = &table;
    int rc = ps_p2p_open(group, &w->p2p);
    if (rc < 0) return ps_free(w), rc;
    rc = pipe_open(ctx, t, ps_group_rank(group), &w->wire, out);
    if (rc < 0) wire_close(&w->wire);
    return rc;
}
