/* SPDX-License-Identifier: BSD-3-Clause
 * Functions that scripts call to query chunks, tiers, and the time that ops have waited for copies. */
#include "base/error.h"
#include "engine/engine.h"

int ps_engine_chunk_count(ps_ctx *ctx) { return ctx->engine.open ? ps_chunk_count(ctx->engine.open->chunks) : 0; }

int ps_engine_chunk_get(ps_ctx *ctx, int chunk, ps_chunk_info *out)
{
    if (chunk < 0 || chunk >= ps_engine_chunk_count(ctx)) return ps_fail(PS_ERANGE, "there is no chunk %d", chunk);
    ps_chunk_get(ctx->engine.open->chunks, chunk, out);
    return 0;
}

const char *ps_engine_chunk_tensor(ps_ctx *ctx, int chunk, int i)
{
    if (chunk < 0 || chunk >= ps_engine_chunk_count(ctx) || i < 0) return "";
    return ps_chunk_tensor_name(ctx->engine.open->chunks, chunk, i);
}

int ps_engine_tensor_chunk(ps_ctx *ctx, const ps_tensor *t)
{
    const ps_engine *e = ctx->engine.open;
    if (!e) return -1;
    return e->zero ? e->zero->table->chunk(e->zero, t->storage) : ps_storage_chunk(e->chunks, t->storage);
}

int ps_engine_holds(ps_ctx *ctx, const ps_tensor *t)
{
    return ctx->engine.open && engine_holds(ctx->engine.open, t->storage);
}

int ps_engine_tier_count(ps_ctx *ctx) { return ctx->engine.open ? ps_tier_count(ctx->engine.open->chunks) : 0; }

int ps_engine_tier_get(ps_ctx *ctx, int tier, ps_tier_info *out)
{
    if (tier < 0 || tier >= ps_engine_tier_count(ctx)) return ps_fail(PS_ERANGE, "there is no tier %d", tier);
    ps_tier_get(ctx->engine.open->chunks, tier, out);
    return 0;
}

int ps_engine_settle(ps_ctx *ctx)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    return ps_chunks_settle(e->chunks);
}

int ps_engine_stats_get(ps_ctx *ctx, ps_engine_stats *out)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    ps_chunks_stats(e->chunks, out);
    out->ranks_wait_s = e->zero ? e->zero->table->waited(e->zero) : 0;
    return 0;
}

int ps_engine_disk_probe(ps_ctx *ctx, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    ps_disk *disk = ps_chunks_disk(e->chunks);
    if (!disk) return ps_fail(PS_ESTATE, "the engine has no disk tier");
    PS_TRY(ps_chunks_settle(e->chunks));
    return ps_disk_probe(disk, nbytes, read_bytes_per_s, write_bytes_per_s);
}
