/* SPDX-License-Identifier: BSD-3-Clause
 * This file sums values for the engine over the tensor-parallel ranks. Each of these ranks has a shard of the same
 * layers. The values are added in rank order. */
#include "base/alloc.h"
#include "base/error.h"
#include "collectives/collectives.h"
#include "engine/zero_table.h"

typedef struct of_layers {
    ps_tp base;
    ps_group *group;
    const ps_ctx *ctx;
} of_layers;

static ps_group *group_of(const ps_tp *base) { return ((const of_layers *)base)->group; }

static void close(ps_tp *base)
{
    ps_group_close(group_of(base));
    ps_free((of_layers *)base);
}

static int sum(ps_tp *base, double *values, int32_t n)
{
    int64_t nbytes = n * (int64_t)sizeof *values;
    if (((of_layers *)base)->ctx->step->dry)
        return group_note(group_of(base), OP_ALL_REDUCE, ON_HOST, PS_F64, nbytes, PS_REDUCE_SUM);
    return group_all_reduce(group_of(base), ON_HOST, PS_F64, (char *)values, nbytes, 0);
}

static int sum_tensor(ps_tp *base, ps_tensor *t, int rc)
{
    if (!t->ctx->step->dry) return group_all_reduce_tensor(group_of(base), t, PS_REDUCE_SUM, rc);
    if (rc < 0) return rc;
    return group_note(group_of(base), OP_ALL_REDUCE, t->ctx->devices[t->device_]->is_host ? ON_HOST : ON_DEVICE,
                      t->dtype_, ps_tensor_nbytes(t), PS_REDUCE_SUM);
}

static const ps_tp_table table = { .close = close, .sum = sum, .sum_tensor = sum_tensor };

int ps_engine_tensor_parallel(ps_ctx *ctx, ps_group *tp)
{
    engine_base base;
    PS_TRY(engine_base_get(ctx, &base));
    of_layers *t = ps_alloc0(sizeof *t);
    if (!t) return ps_fail_nomem(sizeof *t);
    *t = (of_layers){ { &table, ps_group_rank(tp), ps_group_size(tp) }, tp, ctx };
    int rc = engine_tp_set(base.e, &t->base);
    if (rc < 0) {
        ps_free(t);
        return rc;
    }
    group_retain(tp);
    return 0;
}

int ps_engine_plan_calls(ps_ctx *ctx, int32_t trace, ps_group *group, uint64_t *hash)
{
    engine_base base;
    *hash = 0;
    PS_TRY(engine_base_get(ctx, &base));
    group_plan_prepare(group, engine_calls(base.e, trace));
    *hash = group_plan_hash(group);
    return 0;
}
