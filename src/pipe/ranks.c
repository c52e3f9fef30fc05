/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the functions of a pipeline that the engine calls. They add the values of all stages for norms,
 * and sum the gradients of parameters that have copies on several stages. */
#include "base/alloc.h"
#include "base/error.h"
#include "collectives/collectives.h"
#include "engine/zero_table.h"

typedef struct stages {
    ps_pipe_ranks base;
    ps_group *all, *copies;       /* copies is NULL if this rank has no copies */
} stages;

static void close(ps_pipe_ranks *base)
{
    stages *s = (stages *)base;
    ps_group_close(s->all);
    ps_group_close(s->copies);
    ps_free(s);
}

static int sum(ps_pipe_ranks *base, double *values, int32_t n)
{
    int64_t nbytes = n * (int64_t)sizeof *values;
    return group_all_reduce(((stages *)base)->all, ON_HOST, PS_F64, (char *)values, nbytes, 0);
}

static bool has_copies(const ps_pipe_ranks *base) { return ((const stages *)base)->copies != NULL; }

/* Moves t to the host, sums it over the copies on all ranks, and moves the sum back. The sum is computed on the host,
 * because the copies of a tensor can be on different devices. For example, one stage looks up the rows of an embedding
 * on the host, and another stage multiplies by the embedding on a device. */
static int sum_on_host(ps_group *copies, ps_tensor *t, int host)
{
    ps_tensor *there = NULL, *back = NULL, *out[PS_MAX_OUT] = { NULL };
    ps_attrs_copy_ copy = { 0 };
    int rc = ps_tensor_to_device(t, host, &there);
    if (rc == 0) rc = ps_group_all_reduce(copies, there, PS_REDUCE_SUM);
    if (rc == 0) rc = ps_tensor_to_device(there, t->device_, &back);
    if (rc == 0) rc = ps_apply(t->ctx, PS_OP_copy_, 2, (ps_tensor *[]){ t, back }, &copy, sizeof copy, out);
    ps_tensor_release(out[0]);
    ps_tensor_release(there);
    ps_tensor_release(back);
    return rc;
}

static int sum_copies(ps_pipe_ranks *base, ps_tensor *t)
{
    if (t->ctx->step->dry) {                      /* a dry run has no bytes to send and only records the pin */
        void *address;
        PS_TRY(ps_storage_pin(t->storage, t->device_, PS_READ | PS_WRITE, &address));
        ps_storage_unpin(t->storage, t->device_);
        return 0;
    }
    ps_ctx *ctx = t->ctx;
    ps_group *copies = ((stages *)base)->copies;
    int host = 0;
    while (host < ctx->n_devices - 1 && !ctx->devices[host]->is_host) host++;
    return t->device_ == host ? ps_group_all_reduce(copies, t, PS_REDUCE_SUM) : sum_on_host(copies, t, host);
}

static bool counts(const ps_pipe_ranks *base) { return ps_group_rank(((const stages *)base)->copies) == 0; }

static const ps_pipe_ranks_table table = { .close = close, .sum = sum, .has_copies = has_copies,
                                           .sum_copies = sum_copies,
                                       .counts = counts };

int ps_engine_stages(ps_ctx *ctx, ps_group *all, ps_group *copies, int32_t n_numbers)
{
    engine_base base;
    PS_TRY(engine_base_get(ctx, &base));
    if (n_numbers < 1) return ps_fail(PS_EINVAL, "a model cannot have %d parameters", n_numbers);
    stages *s = ps_alloc0(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    *s = (stages){ { &table }, all, copies };
    int rc = engine_stages_set(base.e, &s->base, n_numbers);
    if (rc < 0) {
        ps_free(s);
        return rc;
    }
    group_retain(all);
    if (copies) group_retain(copies);
    return 0;
}
