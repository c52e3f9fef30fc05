/* SPDX-License-Identifier: BSD-3-Clause
 * A trace is the list of the chunks that a step uses, in the order of use. Dry runs and real steps record traces. The
 * engine keeps each trace under an id, and plans the next similar step from the trace. */
#include <string.h>
#include "base/error.h"
#include "base/grow.h"
#include "engine/engine.h"

static bool same_gathers(const ps_gathers *a, const ps_gathers *b)
{
    return a->n == b->n && (a->n == 0 || !memcmp(a->list, b->list, sizeof *a->list * (size_t)a->n));
}

static bool same_trace(const ps_trace *a, const ps_trace *b)
{
    return a->n_uses == b->n_uses && a->n_moments == b->n_moments &&
           (a->n_uses == 0 || !memcmp(a->uses, b->uses, sizeof *a->uses * (size_t)a->n_uses));
}

static trace_rec *find_trace(const ps_engine *e, int32_t id)
{
    for (int32_t i = 0; i < PS_ENGINE_TRACES; i++)
        if (e->traces[i].used_at > 0 && e->traces[i].id == id) return (trace_rec *)(uintptr_t)&e->traces[i];
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

static int keep_calls(ps_rank_calls *to, const ps_rank_calls *from)
{
    PS_TRY(ps_grow(to->list, to->capacity, from->n));
    if (from->n > 0) memcpy(to->list, from->list, sizeof *to->list * (size_t)from->n);
    to->n = from->n;
    return 0;
}

/* Stores the forward ops of the last dry run in r. If there is not enough memory, stores no ops. */
static void keep_ops(trace_rec *r, const ps_ctx *ctx)
{
    int32_t n = ctx->dry.n_ops;
    if (n <= 0 || !ps_try_grow(r->ops, r->ops_capacity, n)) return;
    memcpy(r->ops, ctx->dry.ops, sizeof *r->ops * (size_t)n);
    r->n_ops = n;
}

/* Copies `trace` and `gathers` to record `in`, or to the least recently used record if `in` is NULL. Sets *out to the
 * id of the record. */
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
    if (!in) r->calls.n = r->n_ops = 0;
    if (!in) r->id = e->next_id++;
    *out = r->id;
    return 0;
}

static const ps_gathers no_gathers;

static const ps_gathers *gathers_end(ps_engine *e) { return e->zero ? e->zero->table->step_end(e->zero) : &no_gathers; }

int trace_begin(ps_engine *e, int32_t id)
{
    trace_rec *r = NULL;
    if (id >= 0) PS_TRY(get_trace(e, id, &r));
    if (e->zero) e->zero->table->step_begin(e->zero, r ? &r->gathers : NULL);
    ps_chunks_trace_begin(e->chunks);
    int rc = r && !e->step->dry ? ps_chunks_step_begin(e->chunks, &r->trace) : 0;
    if (rc < 0) {
        ps_chunks_trace_end(e->chunks);
        gathers_end(e);
        return rc;
    }
    if (r) r->used_at = ++e->clock;                  /* mark as used, so that dry runs do not replace r first */
    e->step_trace = id;
    return 0;
}

/* Returns the number of bytes to reserve on a tier for memory that a dry run cannot predict: holes between tensors, and
 * workspace that the backend does not report (ps_backend.scratch_nbytes). */
static int64_t slack(int64_t budget) { return budget > 0 && budget < (64 << 20) ? budget / 512 : 128 << 10; }

/* Returns the current size in bytes of all tensors outside chunks on a tier. */
static int64_t others_now(ps_engine *e, const ps_tier_info *tier)
{
    ps_memory_info real;
    ps_mem *plain = e->ctx->mem.plain;
    plain->table->info(plain, tier->device, &real);
    return real.used;
}

/* Predicts the peak size in bytes of the tensors outside chunks on each tier. The prediction is the sum of three sizes:
 * the current size of these tensors, their peak in the dry run, and a reserve. */
static void dry_peaks(ps_engine *e, ps_trace *trace)
{
    ps_ctx *ctx = e->ctx;
    int n = ps_tier_count(e->chunks);
    for (int t = 0; t < n; t++) {
        ps_tier_info tier;
        ps_tier_get(e->chunks, t, &tier);
        if (tier.device < 0) continue;
        int64_t dry = ctx->dry.mem->table->held(ctx->dry.mem, tier.device);
        trace->other_base[t] = others_now(e, &tier);
        trace->other_peak[t] = trace->other_base[t] + dry + dry / 256 + slack(tier.budget);
    }
}

/* Compares the peaks of `trace` with the peaks `seen` in the step that has just run. If a peak of `seen` is higher,
 * stores it in `trace`, so that the next plan leaves room for it. If no plan fits with the higher peaks, restores the
 * old peaks. */
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

static int keep_dry(ps_engine *e, int32_t *id)
{
    engine_reset(e);
    const ps_gathers *gathers = gathers_end(e);
    if (e->zero) e->zero->table->forget(e->zero);
    ps_trace trace = *ps_chunks_trace_end(e->chunks);
    e->step_trace = PS_TRACE_UNKNOWN;
    if (!id) return 0;
    dry_peaks(e, &trace);
    PS_TRY(keep_trace(e, &trace, gathers, NULL, id));
    trace_rec *r = find_trace(e, *id);
    keep_ops(r, e->ctx);
    return keep_calls(&r->calls, &e->ctx->dry.calls);
}

int ps_engine_forward_ops(ps_ctx *ctx, int32_t trace, const uint16_t **ops, int32_t *n)
{
    engine_base base;
    *ops = NULL;
    *n = 0;
    PS_TRY(engine_base_get(ctx, &base));
    const trace_rec *r = find_trace(base.e, trace);
    if (!r) return 0;
    *ops = r->ops;
    *n = r->n_ops;
    return 0;
}

const ps_rank_calls *engine_calls(const ps_engine *e, int32_t trace)
{
    const trace_rec *r = find_trace(e, trace);
    return r ? &r->calls : NULL;
}

int trace_end(ps_engine *e, int32_t *id)
{
    if (id) *id = -1;
    if (e->step->dry) return keep_dry(e, id);
    ps_chunks_step_end(e->chunks);
    const ps_gathers *gathers = gathers_end(e);
    const ps_trace *now = ps_chunks_trace_end(e->chunks);
    trace_rec *was = e->step_trace >= 0 ? find_trace(e, e->step_trace) : NULL;
    e->step_trace = PS_TRACE_UNKNOWN;
    if (now->n_uses == 0 || !id) return 0;
    if (was && same_trace(now, &was->trace) && same_gathers(gathers, &was->gathers)) {
        count_what_was_seen(e, &was->trace, now);
        *id = was->id;
        return 0;
    }
    /* If keep_trace() fails, the next step has no plan. */
    keep_trace(e, now, gathers, was, id);
    return 0;
}

void trace_free(ps_engine *e)
{
    for (int i = 0; i < PS_ENGINE_TRACES; i++) {
        ps_free(e->traces[i].trace.uses);
        ps_free(e->traces[i].trace.spare);
        ps_free(e->traces[i].gathers.list);
        ps_free(e->traces[i].calls.list);
        ps_free(e->traces[i].ops);
    }
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

int ps_engine_forecast(ps_ctx *ctx, int32_t id, ps_step_forecast *out)
{
    ps_engine *e = NULL;
    trace_rec *r = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(get_trace(e, id, &r));
    PS_TRY(ps_chunks_predict(e->chunks, &r->trace, out));
    out->gathers = r->gathers.n;
    out->gathered = 0;
    for (int32_t i = 0; i < r->gathers.n; i++)
        out->gathered += e->zero->table->comes(e->zero, r->gathers.list[i].stripe);
    return 0;
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
