/* SPDX-License-Identifier: BSD-3-Clause
 * The engine's steps: dry runs that tell a step's uses before it runs, traces of what really happened, plans from
 * either; chunks and tensors in them for scripts; and what scripts look at. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "engine/engine.h"

/* -- chunks and tensors in them ----------------------------------------------------------------------------------- */
int ps_engine_chunk_new(ps_ctx *ctx, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *chunk)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (kind < 0 || kind >= PS_KIND_COUNT) return ps_fail(PS_EINVAL, "no such kind of chunk: %d", kind);
    return ps_chunk_new(e->chunks, kind, group, index, dtype, nbytes, chunk);
}

int engine_check_whole(const ps_tensor *t)
{
    PS_TRY(ps_tensor_check_alive(t));
    if (t->offset != 0 || !ps_tensor_is_contiguous(t) || ps_tensor_nbytes(t) != t->storage->nbytes)
        return ps_fail(PS_EINVAL, "only a contiguous tensor that covers its whole storage can go into a chunk");
    return 0;
}

int ps_engine_adopt(ps_ctx *ctx, ps_tensor *t, int32_t chunk, int64_t offset, const char *name)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(engine_check_whole(t));
    PS_TRY(ps_chunk_adopt(e->chunks, t->storage, chunk, offset, name));
    ps_scope_adopt(ctx, t->storage);
    return 0;
}

int engine_check_device(const ps_engine *e, int device)
{
    if (device == e->device || device == e->host) return 0;
    return ps_fail(PS_EINVAL, "device %d is not the engine's", device);
}

int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes)
{
    if (dtype < 0 || dtype >= PS_DTYPE_COUNT) return ps_fail(PS_EINVAL, "no such type: %d", dtype);
    PS_TRY(engine_check_device(e, device));
    *meta = ps_meta_like(like);
    meta->dtype = dtype;
    *nbytes = like->numel_ * ps_dtype_bytes(dtype);
    return 0;
}

int ps_engine_tensor_new(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t chunk, int64_t offset,
                         const char *name, ps_tensor **out)
{
    ps_engine *e = NULL;
    ps_meta meta;
    int64_t nbytes;
    ps_storage *s;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(engine_meta_like(e, like, dtype, device, &meta, &nbytes));
    PS_TRY(ps_chunk_storage_new(e->chunks, chunk, offset, nbytes, name, &s));
    int rc = ps_tensor_over(ctx, s, &meta, device, out);
    if (rc < 0) ps_chunk_storage_undo(e->chunks, s);         /* the caller may try again */
    return rc;
}

int ps_engine_tensor_at(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(ps_tensor_check_alive(t));
    if ((device != e->device && device != e->host) || !engine_holds(e, t->storage))
        return ps_fail(PS_EINVAL, "only tensors in chunks can be seen from another device of the engine");
    ps_tensor *view;
    PS_TRY(ps_tensor_detach(t, &view));
    view->device_ = device;
    *out = view;
    return 0;
}

/* -- traces ------------------------------------------------------------------------------------------------------- */
static bool same_gathers(const ps_gathers *a, const ps_gathers *b)
{
    return a->n == b->n && (a->n == 0 || !memcmp(a->list, b->list, sizeof *a->list * (size_t)a->n));
}

static bool same_trace(const ps_trace *a, const ps_trace *b)
{
    return a->n_uses == b->n_uses && a->n_moments == b->n_moments &&
           (a->n_uses == 0 || !memcmp(a->uses, b->uses, sizeof *a->uses * (size_t)a->n_uses));
}

static trace_rec *find_trace(ps_engine *e, int32_t id)
{
    for (int32_t i = 0; i < PS_ENGINE_TRACES; i++)
        if (e->traces[i].used_at > 0 && e->traces[i].id == id) return &e->traces[i];
    return NULL;
}

static int get_trace(ps_engine *e, int32_t id, trace_rec **out)
{
    *out = find_trace(e, id);
    return *out ? 0 : ps_fail(PS_ERANGE, "there is no trace %d", id);
}

static int keep_gathers(ps_gathers *to, const ps_gathers *from)
{
    PS_TRY(ps_grow(to->list, to->capacity, from->n));
    if (from->n > 0) memcpy(to->list, from->list, sizeof *to->list * (size_t)from->n);
    to->n = from->n;
    return 0;
}

/* Keeps copies of `trace` and `gathers`: in place of `in`, or, when that is NULL, of the one that was used longest ago.
 */
static int keep_trace(ps_engine *e, const ps_trace *trace, const ps_gathers *gathers, trace_rec *in, int32_t *out)
{
    trace_rec *r = in;
    if (!r) {
        r = &e->traces[0];
        for (int32_t i = 1; i < PS_ENGINE_TRACES; i++) if (e->traces[i].used_at < r->used_at) r = &e->traces[i];
    }
    ps_trace *to = &r->trace;
    PS_TRY(ps_grow(to->uses, to->capacity, trace->n_uses));
    if (trace->spare) PS_TRY(ps_grow(to->spare, to->spare_capacity, trace->n_moments * PS_TIERS));
    PS_TRY(keep_gathers(&r->gathers, gathers));
    if (trace->n_uses > 0)
        memcpy(to->spare, trace->spare, sizeof *to->spare * (size_t)trace->n_moments * PS_TIERS);
    if (trace->n_uses > 0) memcpy(to->uses, trace->uses, sizeof *to->uses * (size_t)trace->n_uses);
    to->n_uses = trace->n_uses;
    to->n_moments = trace->n_moments;
    memcpy(to->other_peak, trace->other_peak, sizeof to->other_peak);
    memcpy(to->other_base, trace->other_base, sizeof to->other_base);
    r->used_at = ++e->clock;
    if (!in) r->id = e->next_id++;
    *out = r->id;
    return 0;
}

void engine_stage(ps_engine *e, int stage)
{
    if (e->step.kind == stage) return;
    e->step.kind = stage;
    e->step.pass++;
    ps_chunks_pass(e->chunks);
    if (e->zero) e->zero->table->pass(e->zero);
}

static void begin_noting(ps_engine *e, const trace_rec *like)
{
    e->step.open = true;
    e->step.pass++;
    if (e->zero) e->zero->table->step_begin(e->zero, like ? &like->gathers : NULL);
    ps_chunks_trace_begin(e->chunks);
}

static const ps_gathers no_gathers;

static const ps_gathers *gathers_end(ps_engine *e) { return e->zero ? e->zero->table->step_end(e->zero) : &no_gathers; }

int ps_engine_dry_begin(ps_ctx *ctx, int32_t like)
{
    ps_engine *e = NULL;
    trace_rec *r = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (like >= 0) PS_TRY(get_trace(e, like, &r));
    if (r) r->used_at = ++e->clock;                          /* so many dry runs like one do not push that one out */
    if (e->step.open) return ps_fail(PS_ESTATE, "a dry run cannot begin inside a step");
    for (int32_t i = 0; i < e->n_params; i++)
        if (e->params[i].param->grad_)
            return ps_fail(PS_ESTATE, "a dry run cannot begin while there are gradients; call optimizer:zero_grad()");
    if (e->zero) e->zero->table->forget(e->zero);
    PS_TRY(ps_dry_begin(ctx));
    e->step.dry = ctx->dry_mem;
    for (int d = 0; d < ctx->n_devices; d++) ctx->dry_mem->table->trim(ctx->dry_mem, d, true);
    begin_noting(e, r);
    return 0;
}

/* What no dry run knows: holes between tensors. Backends say what their kernels take for themselves. */
static int64_t slack(int64_t budget) { return budget > 0 && budget < (64 << 20) ? budget / 512 : 128 << 10; }

/* Bytes of tensors besides chunks on a memory tier, as of now. */
static int64_t others_now(ps_engine *e, const ps_tier_info *tier)
{
    ps_memory_info real;
    ps_mem *plain = e->ctx->plain;
    plain->table->info(plain, tier->device, &real);
    return real.used;
}

/* What a dry run says of the bytes besides chunks: its own peak, on top of what lies there for good. */
static void dry_peaks(ps_engine *e, ps_trace *trace)
{
    ps_ctx *ctx = e->ctx;
    int n = ps_tier_count(e->chunks);
    for (int t = 0; t < n; t++) {
        ps_tier_info tier;
        ps_tier_get(e->chunks, t, &tier);
        if (tier.device < 0) continue;
        int64_t dry = ctx->dry_mem->table->held(ctx->dry_mem, tier.device);
        trace->other_base[t] = others_now(e, &tier);
        trace->other_peak[t] = trace->other_base[t] + dry + dry / 256 + slack(tier.budget);
    }
}

int ps_engine_dry_end(ps_ctx *ctx, int keep, int32_t *id)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (!e->step.dry) return ps_fail(PS_ESTATE, "no dry run is under way");
    engine_reset(e);
    const ps_gathers *gathers = gathers_end(e);
    if (e->zero) e->zero->table->forget(e->zero);
    ps_trace trace = *ps_chunks_trace_end(e->chunks);
    ps_dry_end(ctx);
    e->step.dry = NULL;
    e->step.open = false;
    engine_stage(e, PS_STAGE_NONE);
    if (!keep) return 0;
    dry_peaks(e, &trace);
    return keep_trace(e, &trace, gathers, NULL, id);
}

int ps_engine_leftover(ps_ctx *ctx, int32_t id, int adopt, int64_t *nbytes)
{
    ps_engine *e = NULL;
    trace_rec *r = NULL;
    *nbytes = 0;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(get_trace(e, id, &r));
    int n = ps_tier_count(e->chunks);
    for (int t = 0; t < n; t++) {
        ps_tier_info tier;
        ps_tier_get(e->chunks, t, &tier);
        if (tier.budget == 0 || tier.device < 0) continue;
        int64_t more = others_now(e, &tier) - r->trace.other_base[t];
        if (more <= slack(tier.budget) / 2 && more >= -slack(tier.budget)) continue;
        if (more > *nbytes) *nbytes = more;
        if (!adopt && more > 0) continue;
        r->trace.other_base[t] += more;
        r->trace.other_peak[t] += more;
    }
    return 0;
}

int ps_engine_step_begin(ps_ctx *ctx, int32_t id)
{
    ps_engine *e = NULL;
    trace_rec *r = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (e->step.open) return ps_fail(PS_ESTATE, "a step is under way");
    if (id >= 0) PS_TRY(get_trace(e, id, &r));
    begin_noting(e, r);
    int rc = r ? ps_chunks_step_begin(e->chunks, &r->trace) : 0;
    if (rc < 0) {
        ps_chunks_trace_end(e->chunks);
        gathers_end(e);
        e->step.open = false;
        return rc;
    }
    if (r) r->used_at = ++e->clock;
    e->step_trace = id;
    return 0;
}

/* Peaks that were really seen count for the next plan, but do not forbid it: the step has just run. */
static void count_what_was_seen(ps_engine *e, ps_trace *trace, const ps_trace *seen)
{
    int64_t expected[PS_TIERS];
    bool more = false;
    memcpy(expected, trace->other_peak, sizeof expected);
    for (int t = 0; t < PS_TIERS; t++) {
        if (seen->other_peak[t] <= expected[t]) continue;
        trace->other_peak[t] = seen->other_peak[t];
        more = true;
    }
    ps_step_forecast forecast;
    if (more && ps_chunks_predict(e->chunks, trace, &forecast) < 0)
        memcpy(trace->other_peak, expected, sizeof expected);
}

int ps_engine_step_end(ps_ctx *ctx, int32_t *id)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (id) *id = -1;
    if (!e->step.open) return 0;
    e->step.open = false;
    ps_chunks_step_end(e->chunks);
    engine_stage(e, PS_STAGE_NONE);
    const ps_gathers *gathers = gathers_end(e);
    const ps_trace *now = ps_chunks_trace_end(e->chunks);
    trace_rec *was = e->step_trace >= 0 ? find_trace(e, e->step_trace) : NULL;
    e->step_trace = -1;
    if (now->n_uses == 0 || !id) return 0;
    if (was && same_trace(now, &was->trace) && same_gathers(gathers, &was->gathers)) {
        count_what_was_seen(e, &was->trace, now);
        *id = was->id;
        return 0;
    }
    keep_trace(e, now, gathers, was, id);                 /* without memory for it the next step has no plan, no more */
    return 0;
}

int ps_engine_forecast(ps_ctx *ctx, int32_t id, ps_step_forecast *out)
{
    ps_engine *e = NULL;
    trace_rec *r = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(get_trace(e, id, &r));
    return ps_chunks_predict(e->chunks, &r->trace, out);
}

int ps_engine_trace_get(ps_ctx *ctx, int32_t id, ps_trace_info *out, int32_t room, ps_use *uses)
{
    ps_engine *e = NULL;
    trace_rec *r = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(get_trace(e, id, &r));
    const ps_trace *trace = &r->trace;
    *out = (ps_trace_info){ .n_uses = trace->n_uses, .n_moments = trace->n_moments };
    memcpy(out->other, trace->other_peak, sizeof out->other);
    int32_t n = room < trace->n_uses ? room : trace->n_uses;
    if (n > 0) memcpy(uses, trace->uses, sizeof *uses * (size_t)n);
    return 0;
}

void ps_engine_stage(ps_ctx *ctx, int stage)
{
    if (ctx->engine && stage >= PS_STAGE_NONE && stage <= PS_STAGE_ADAM) engine_stage(ctx->engine, stage);
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

/* -- looking ------------------------------------------------------------------------------------------------------ */
int ps_engine_chunk_count(ps_ctx *ctx) { return ctx->engine ? ps_chunk_count(ctx->engine->chunks) : 0; }

int ps_engine_chunk_get(ps_ctx *ctx, int chunk, ps_chunk_info *out)
{
    if (chunk < 0 || chunk >= ps_engine_chunk_count(ctx)) return ps_fail(PS_ERANGE, "there is no chunk %d", chunk);
    ps_chunk_get(ctx->engine->chunks, chunk, out);
    return 0;
}

const char *ps_engine_chunk_tensor(ps_ctx *ctx, int chunk, int i)
{
    if (chunk < 0 || chunk >= ps_engine_chunk_count(ctx) || i < 0) return "";
    return ps_chunk_tensor_name(ctx->engine->chunks, chunk, i);
}

int ps_engine_tensor_chunk(ps_ctx *ctx, const ps_tensor *t)
{
    const ps_engine *e = ctx->engine;
    if (!e) return -1;
    return e->zero ? e->zero->table->chunk(e->zero, t->storage) : ps_storage_chunk(e->chunks, t->storage);
}

int ps_engine_holds(ps_ctx *ctx, const ps_tensor *t)
{
    return ctx->engine && engine_holds(ctx->engine, t->storage);
}

int ps_engine_tier_count(ps_ctx *ctx) { return ctx->engine ? ps_tier_count(ctx->engine->chunks) : 0; }

int ps_engine_tier_get(ps_ctx *ctx, int tier, ps_tier_info *out)
{
    if (tier < 0 || tier >= ps_engine_tier_count(ctx)) return ps_fail(PS_ERANGE, "there is no tier %d", tier);
    ps_tier_get(ctx->engine->chunks, tier, out);
    return 0;
}
