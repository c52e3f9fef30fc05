/* SPDX-License-Identifier: BSD-3-Clause
 * The scope stack. A storage is in the list of exactly one scope. After it was dropped, it is in no list. Small
 * storages are made in the root scope, which never ends. Ending a scope drops the bytes of its storages. Kept storages
 * move to the root instead, and those that the caller names move to the parent. Bytes that the tape holds stay in the
 * root until the tape releases them. */
#include "tensor/tensor.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"

int ps_fail_suspended(const char *what)
{
    return ps_fail(PS_ESTATE, "the script is paused: %s must wait until it resumes (continue)", what);
}

static void link_to(ps_scope *scope, ps_storage *s)
{
    s->scope.of = scope;
    s->scope.prev = NULL;
    s->scope.next = scope->first;
    if (scope->first) scope->first->scope.prev = s;
    scope->first = s;
}

void ps_scope_unlink(ps_storage *s)
{
    if (!s->scope.of) return;
    if (s->scope.unscoped) {                 /* it was freed by itself, or it stays: it does not need a collection */
        int64_t left = s->scope.of->unscoped_nbytes - s->nbytes;
        s->scope.of->unscoped_nbytes = left > 0 ? left : 0;
        s->scope.unscoped = false;
    }
    if (s->scope.next) s->scope.next->scope.prev = s->scope.prev;
    if (s->scope.prev) s->scope.prev->scope.next = s->scope.next;
    else s->scope.of->first = s->scope.next;
    s->scope.of = NULL;
}

void ps_scope_adopt(ps_ctx *ctx, ps_storage *s)
{
    ps_scope_unlink(s);
    link_to(&ctx->scope.root, s);
    s->bytes.dropped = false;            /* a scope may have dropped it while the tape held its bytes */
}

void ps_scope_add(ps_ctx *ctx, ps_storage *s)
{
    bool small = s->nbytes < PS_SCOPE_MIN_NBYTES, takes = !ctx->devices[s->device]->no_data && !ctx->step->dry;
    ps_scope *outer = &ctx->scope.root;
    if (ctx->engine.suspended.on)                   /* tensors that are made in a pause do not outlive the pause */
        for (outer = ctx->scope.now; outer->id != ctx->engine.suspended.scope;) outer = outer->parent;
    link_to(small ? outer : ctx->scope.now, s);
    if (!takes || s->scope.of != &ctx->scope.root) return;
    s->scope.unscoped = true;
    ctx->scope.root.unscoped_nbytes += s->nbytes + 512;        /* 512: bytes of headers */
}

int ps_scope_begin(ps_ctx *ctx, int64_t *id)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    ps_scope *scope = ps_alloc0(sizeof *scope);
    if (!scope) return ps_fail_nomem(sizeof *scope);
    scope->parent = ctx->scope.now;
    scope->id = ctx->scope.next_id++;
    scope->modules = ps_module_depth();
    ctx->scope.now = scope;
    *id = scope->id;
    return 0;
}

static void end_innermost(ps_ctx *ctx)
{
    ps_scope *scope = ctx->scope.now;
    while (scope->first) {
        ps_storage *s = scope->first;
        ps_scope_unlink(s);
        if (!s->bytes.kept) ps_storage_drop(s);
        ps_storage_leave(ctx, s);
        if (s->block) link_to(&ctx->scope.root, s);        /* kept, or still held by the tape */
    }
    ctx->scope.now = scope->parent;
    ps_free(scope);
}

int ps_scope_end(ps_ctx *ctx, int64_t id, int n_keep, ps_tensor *const *keep)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    ps_scope *scope = ctx->scope.now;
    while (scope && scope->id != id) scope = scope->parent;
    if (!scope || scope == &ctx->scope.root) return ps_fail(PS_ESTATE, "scope %lld is not open", (long long)id);
    if (ctx->engine.suspended.on && id <= ctx->engine.suspended.scope) return ps_fail_suspended("the end of its scope");
    for (int i = 0; i < n_keep; i++) {
        ps_storage *s = keep[i]->storage;
        for (ps_scope *x = ctx->scope.now; x != scope->parent; x = x->parent)
            if (s->scope.of == x) {
                ps_scope_unlink(s);
                link_to(scope->parent, s);
            }
    }
    if (ctx->offload.on) ps_away_round(ctx->offload.away);
    int modules = scope->modules;
    while (ctx->scope.now != scope) end_innermost(ctx);
    end_innermost(ctx);
    ps_module_leave(modules);
    return 0;
}

int64_t ps_scope_depth(ps_ctx *ctx)
{
    int64_t depth = 0;
    for (ps_scope *x = ctx->scope.now; x && x != &ctx->scope.root; x = x->parent) depth++;
    return depth;
}

int ps_collect_due(ps_ctx *ctx)
{
    if (ctx->scope.root.unscoped_nbytes < ctx->scope.collect_at || ctx->closed) return 0;
    ctx->scope.root.unscoped_nbytes = 0;
    ps_memory_info info;
    ctx->mem.now->table->info(ctx->mem.now, 0, &info);
    int64_t half = info.used / 2, least = 256 << 20;      /* in bytes: for fewer bytes a collection would not pay off */
    ctx->scope.collect_at = half > least ? half : least;
    return 1;
}
