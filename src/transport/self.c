/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements communicators of a single process, which send no bytes. One kind of communicator is a world of
 * one rank. The other kind is used in a dry run of a script, where all other ranks are simulated. In a build without
 * Gloo, this file also defines ps_comm_gloo, which returns an error. */
#include "base/alloc.h"
#include "base/error.h"
#include "transport/transport.h"
#include <stdio.h>
#include <string.h>

static int self_begin(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv) { return 0; }
static int self_finish(ps_comm *comm, int lane) { return 0; }
static void self_hang_up(ps_comm *comm) { }
static void self_close(ps_comm *comm) { ps_free(comm); }
static int self_cut(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out)
{
    PS_TRY(ps_comm_self(out));
    snprintf((*out)->axis, sizeof (*out)->axis, "%s", axis);
    return 0;
}

static const ps_comm_table self_table = { .name = "self", .begin = self_begin, .finish = self_finish,
                                         .hang_up = self_hang_up, .close = self_close, .cut = self_cut };

int ps_comm_self(ps_comm **out)
{
    ps_comm *comm = ps_alloc(sizeof *comm);
    if (!comm) return ps_fail_nomem(sizeof *comm);
    *comm = (ps_comm){ .table = &self_table, .size = 1, .timeout_s = 600 };
    *out = comm;
    return 0;
}

/* Copies the bytes that this rank sends to each simulated rank into the memory for the bytes from that rank. This is
 * correct because all ranks make the same calls. */
static int pretend_begin(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank && recv[r].nbytes > 0) memcpy(recv[r].address, send[r].address, (size_t)recv[r].nbytes);
    return 0;
}

static int pretend_new(int rank, int size, ps_comm **out);

static int pretend_cut(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out)
{
    int rank = 0;
    while (rank < n && ranks[rank] != comm->rank) rank++;
    PS_TRY(pretend_new(rank, n, out));
    int32_t *world = (int32_t *)(*out + 1);
    for (int r = 0; r < n; r++) world[r] = ps_comm_world(comm, ranks[r]);
    (*out)->ranks = world;
    snprintf((*out)->axis, sizeof (*out)->axis, "%s", axis);
    return 0;
}

static const ps_comm_table pretend_table = { .name = "nobody", .begin = pretend_begin, .finish = self_finish,
                                            .hang_up = self_hang_up, .close = self_close, .cut = pretend_cut };

/* Makes a communicator whose other ranks are simulated. The world ranks of a subgroup are stored after the struct. */
static int pretend_new(int rank, int size, ps_comm **out)
{
    size_t nbytes = sizeof(ps_comm) + (size_t)size * sizeof(int32_t);
    ps_comm *comm = ps_alloc(nbytes);
    if (!comm) return ps_fail_nomem(nbytes);
    *comm = (ps_comm){ .table = &pretend_table, .rank = rank, .size = size, .timeout_s = 600, .pretends = true };
    *out = comm;
    return 0;
}

int ps_comm_pretend(int rank, int size, ps_comm **out) { return pretend_new(rank, size, out); }

#ifndef PS_HAVE_GLOO
int ps_comm_gloo(const ps_meeting *meeting, ps_comm **out)
{
    return ps_fail(PS_EUNSUP, "this build has no Gloo, so it supports only one process; install libgloo-dev "
                              "(`make setup`), "
                   "configure again with -DPS_GLOO=ON and rebuild");
}
#endif
