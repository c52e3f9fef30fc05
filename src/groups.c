/* SPDX-License-Identifier: BSD-3-Clause
 * Makes groups of ranks (ps.h). This file connects three layers that do not know each other:
 *   the transport, which carries the bytes;
 *   the group, which belongs to a context;
 *   the ops that exchange data between ranks. These ops call the group after the group has been made. */
#include "base/error.h"
#include "tensor/tensor.h"
#include "tensor_parallel/ops.h"

static int make(ps_ctx *ctx, ps_comm *comm, ps_group **out)
{
    PS_TRY(group_new(ctx, comm, out));
    ctx->ranks.perform = group_op;
    return 0;
}

int ps_group_self(ps_ctx *ctx, ps_group **out)
{
    ps_comm *comm;
    PS_TRY(ps_comm_self(&comm));
    return make(ctx, comm, out);
}

int ps_group_pretend(ps_ctx *ctx, int rank, int size, ps_group **out)
{
    if (size < 1 || rank < 0 || rank >= size)
        return ps_fail(PS_EINVAL, "there is no rank %d in a world of %d ranks; ranks are numbered from 0", rank, size);
    ps_comm *comm;
    PS_TRY(ps_comm_pretend(rank, size, &comm));
    return make(ctx, comm, out);
}

int ps_group_gloo(ps_ctx *ctx, const ps_meeting *m, ps_group **out)
{
    if (m->size < 1 || m->rank < 0 || m->rank >= m->size)
        return ps_fail(PS_EINVAL, "there is no rank %d in a world of %d ranks; ranks are numbered from 0", m->rank,
                       m->size);
    if (!(m->timeout_s >= 0.01 && m->timeout_s <= 1e6))
        return ps_fail(PS_EINVAL, "a time-out of %g s; it must be 0.01 to 1e6", m->timeout_s);
    if (!(m->heartbeat_s >= 0.1 && m->heartbeat_s <= 1e6))
        return ps_fail(PS_EINVAL, "a heartbeat of %g s; it must be 0.1 to 1e6", m->heartbeat_s);
    ps_comm *comm;
    PS_TRY(ps_comm_gloo(m, &comm));
    return make(ctx, comm, out);
}
