/* SPDX-License-Identifier: BSD-3-Clause
 * This file pauses a script while its user works at a prompt. Ops at the prompt must not affect the script. Therefore
 * this file saves the state that the script's next op depends on, and restores this state when the script resumes.
 * Other layers check ctx->engine.suspended.on to distinguish ops of the prompt from ops of the script. The chunk
 * manager checks `suspended` in the step instead. */
#include "base/error.h"
#include "base/record.h"
#include "engine/engine.h"

int ps_is_suspended(const ps_ctx *ctx) { return ctx->engine.suspended.on; }

int ps_suspend(ps_ctx *ctx, int64_t *scope)
{
    ps_engine *e = ctx->engine.open;
    if (ctx->engine.suspended.on) return ps_fail(PS_ESTATE, "the script is already paused");
    if (e && e->zero && e->zero->ranks > 1)
        return ps_fail(PS_ESTATE, "a script of %d ranks cannot be paused, because the other ranks would wait",
                       e->zero->ranks);
    if (ctx->dry.real) return 1;
    PS_TRY(ps_scope_begin(ctx, scope));
    if (e) ps_chunks_suspend(e->chunks);
    if (e) step_suspend(e, true);
    ctx->engine.suspended.on = true;
    ctx->engine.suspended.scope = *scope;
    ctx->engine.suspended.rng = ctx->rng;
    ctx->engine.suspended.grad = ps_set_grad_enabled(ctx, 0);
    ctx->engine.suspended.offload = ps_set_offload(ctx, 0) == 1;
    ctx->engine.suspended.reads = ps_reads_set(ctx, false);
    ps_record_pause(true);
    return 0;
}

int ps_resume(ps_ctx *ctx, int n_keep, ps_tensor *const *keep)
{
    ps_engine *e = ctx->engine.open;
    if (!ctx->engine.suspended.on) return ps_fail(PS_ESTATE, "the script is not paused");
    ctx->engine.suspended.on = false;
    int rc = ps_scope_end(ctx, ctx->engine.suspended.scope, n_keep, keep);
    ps_set_offload(ctx, ctx->engine.suspended.offload);
    ps_reads_set(ctx, ctx->engine.suspended.reads);
    ps_set_grad_enabled(ctx, ctx->engine.suspended.grad);
    ctx->rng = ctx->engine.suspended.rng;
    ps_record_pause(false);
    if (!e) return rc;
    step_suspend(e, false);
    int moved = ps_chunks_resume(e->chunks);
    return moved < 0 ? moved : rc;
}
