/* SPDX-License-Identifier: BSD-3-Clause
 * This file contains the entry points of ZeRO: the table that the engine calls, and the functions of ps.h that scripts
 * call to shard chunks over ranks. */
#include "zero/zero.h"
#include "base/alloc.h"
#include "base/error.h"

static zero *of(const ps_zero *z) { return (zero *)z; }
static ps_shard *shard_of(const ps_zero *z) { return of(z)->shard; }

/* -- the table ----------------------------------------------------------------------------------------------------- */
static bool holds(const ps_zero *z, const ps_storage *s) { return ps_shard_has(shard_of(z), s); }
static int32_t chunk_of(const ps_zero *z, const ps_storage *s) { return ps_shard_chunk(shard_of(z), s); }
static void alone(ps_zero *z, bool on) { ps_shard_alone(shard_of(z), on); }
static double waited(const ps_zero *z) { return ps_shard_waited(shard_of(z)); }
static int64_t comes(const ps_zero *z, int32_t stripe) { return ps_shard_comes(shard_of(z), stripe); }
static void op_begins(ps_zero *z) { ps_shard_tick(shard_of(z)); }
static void op_failed(ps_zero *z) { ps_shard_failed(shard_of(z)); }
static void pass(ps_zero *z) { ps_shard_pass(shard_of(z)); }
static void step_begin(ps_zero *z, const ps_gathers *expected) { ps_shard_step_begin(shard_of(z), expected); }
static const ps_gathers *step_end(ps_zero *z) { return ps_shard_step_end(shard_of(z)); }

static int units(ps_zero *base, int32_t n)
{
    zero *z = of(base);
    ps_free(z->units);
    ps_free(z->stripes);
    ps_free(z->reducing);
    z->units = NULL, z->stripes = NULL, z->reducing = NULL;
    z->n_units = z->n_stripes = z->n_reducing = 0;
    if (n == 0) return 0;
    z->units = ps_alloc0(sizeof *z->units * (size_t)n);
    z->stripes = ps_alloc0(sizeof *z->stripes * (size_t)n);
    z->reducing = ps_alloc0(sizeof *z->reducing * (size_t)n);
    if (!z->units || !z->stripes || !z->reducing) {
        units(base, 0);
        return ps_fail_nomem(sizeof *z->units * (size_t)n);
    }
    z->n_units = n;
    return 0;
}

static void close(ps_zero *z)
{
    units(z, 0);
    ps_shard_close(shard_of(z));
    ps_free(of(z));
}

static const ps_zero_table table = {
    .close = close, .holds = holds, .chunk = chunk_of, .alone = alone, .waited = waited, .comes = comes,
    .op_begins = op_begins, .op_failed = op_failed, .pass = pass, .step_begin = step_begin,
    .step_end = step_end, .units = units, .before_slot = reduce_before_slot, .unit_final = reduce_unit_final,
    .all_final = reduce_all_final, .unit_not_final = reduce_unit_not_final, .sum_owned = reduce_sum_owned,
    .forget = reduce_forget,
};

/* -- parts, which are chunks distributed over ranks ---------------------------------------------------------------- */
int ps_engine_shard(ps_ctx *ctx, ps_group *group, int stage, int once)
{
    engine_base base;
    PS_TRY(engine_base_get(ctx, &base));
    if (stage < 0 || stage > 3) return ps_fail(PS_EINVAL, "there is no ZeRO stage %d; stages are 0 to 3", stage);
    if (base.zero || ps_chunk_count(base.chunks) > 0)
        return ps_fail(PS_ESTATE, "the chunks of an engine can be shared only once, before the first chunk is made");
    zero *z = ps_alloc0(sizeof *z);
    if (!z) return ps_fail_nomem(sizeof *z);
    int rc = ps_shard_new(base.chunks, base.step, ctx->devices, base.device, base.host, group, &z->shard);
    if (rc < 0) {
        ps_free(z);
        return rc;
    }
    z->base = (ps_zero){ &table, stage, ps_group_size(group), once != 0 };
    z->e = base.e;
    engine_zero_set(base.e, &z->base);
    return 0;
}

static int zero_get(ps_ctx *ctx, engine_base *base)
{
    PS_TRY(engine_base_get(ctx, base));
    return base->zero ? 0 : ps_fail(PS_ESTATE, "this engine has only one rank");
}

int ps_engine_part(ps_ctx *ctx, const ps_part_config *config, int32_t *part)
{
    engine_base base;
    PS_TRY(zero_get(ctx, &base));
    return ps_shard_part(shard_of(base.zero), config, part);
}

int ps_engine_part_drop(ps_ctx *ctx, int32_t part)
{
    engine_base base;
    PS_TRY(zero_get(ctx, &base));
    return ps_shard_part_drop(shard_of(base.zero), part);
}

int ps_engine_part_adopt(ps_ctx *ctx, ps_tensor *t, int32_t part, int64_t offset, const char *name)
{
    engine_base base;
    PS_TRY(zero_get(ctx, &base));
    PS_TRY(engine_check_whole(t));
    PS_TRY(ps_shard_adopt(shard_of(base.zero), t->storage, part, offset, name, !(t->flags & PS_T_REQUIRES_GRAD)));
    ps_scope_adopt(ctx, t->storage);
    ps_scope_uncount(t->storage);
    return 0;
}

int ps_engine_part_tensor(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t part, int64_t offset,
                          const char *name, ps_tensor **out)
{
    engine_base base;
    ps_meta meta;
    int64_t nbytes;
    ps_storage *s;
    PS_TRY(zero_get(ctx, &base));
    PS_TRY(engine_meta_like(base.e, like, dtype, device, &meta, &nbytes));
    PS_TRY(ps_shard_storage_new(shard_of(base.zero), part, offset, nbytes, name, &s));
    int rc = ps_tensor_over(ctx, s, &meta, device, out);
    if (rc < 0) ps_shard_storage_undo(shard_of(base.zero), s);       /* so that the caller can try again */
    return rc;
}

int ps_engine_unit_parts(ps_ctx *ctx, int unit, int32_t stripe, int32_t param_part, int32_t grad_part)
{
    engine_base base;
    PS_TRY(zero_get(ctx, &base));
    zero *z = of(base.zero);
    if (unit < 0 || unit >= z->n_units || stripe < 0 || stripe >= z->n_units || stripe > z->n_stripes)
        return ps_fail(PS_ERANGE, "there is no unit %d or no stripe %d: the engine has %d units and %d stripes", unit,
                       stripe, z->n_units, z->n_stripes);
    int32_t vstage = engine_unit_vstage(z->e, unit);
    if (stripe < z->n_stripes && z->stripes[stripe].vstage != vstage)
        return ps_fail(PS_EINVAL, "stripe %d has units of virtual stages %d and %d, whose gradients are final at "
                                  "different times", stripe, z->stripes[stripe].vstage, vstage);
    z->units[unit] = (unit_parts){ stripe, param_part, grad_part };
    if (stripe == z->n_stripes) z->stripes[z->n_stripes++] = (stripe_units){ .part = -1, .vstage = vstage };
    z->stripes[stripe].n++;
    return 0;
}

int ps_engine_own(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out)
{
    engine_base base;
    *out = NULL;
    PS_TRY(engine_base_get(ctx, &base));
    PS_TRY(ps_tensor_check_alive(t));
    PS_TRY(engine_check_device(base.e, device));
    ps_storage *s = base.zero ? ps_shard_own(shard_of(base.zero), t->storage) : t->storage;
    if (!s) return 0;
    ps_meta m = ps_tensor_meta(t);
    PS_TRY(ps_tensor_over(ctx, s, &m, device, out));
    s->refs++;
    return 0;
}

double ps_engine_gathers(ps_ctx *ctx)
{
    engine_base base;
    return engine_base_get(ctx, &base) == 0 && base.zero ? ps_shard_expects(shard_of(base.zero)) : 0;
}

void ps_engine_gathers_drop(ps_ctx *ctx)
{
    engine_base base;
    if (engine_base_get(ctx, &base) == 0 && base.zero) ps_shard_expect_none(shard_of(base.zero));
}

int ps_engine_forget(ps_ctx *ctx)
{
    engine_base base;
    PS_TRY(engine_base_get(ctx, &base));
    if (base.zero) ps_shard_forget(shard_of(base.zero));
    return 0;
}
