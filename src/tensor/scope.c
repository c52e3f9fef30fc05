/* SPDX-License-Identifier: BSD-3-Clause
 * The scope stack. At its end, a scope drops the bytes of the storages that were made in the scope. A storage is in the
 * list of one scope. After it was dropped, it is in no list. Kept storages move to the root scope, which never ends.
 * When the caller ends a scope, it can name storages that move to the parent scope instead. Small storages are made in
 * the root scope. Bytes that the tape holds stay in the root scope until the tape releases them.
 *
 * If only a dead header in Lua refers to a storage, its bytes wait for Lua's collector. The context counts the bytes of
 * all storages that have contents outside chunks. After a collection, the count is the number of bytes that are in use.
 * The next collection is due when the count has grown by a quarter of this number. */
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

static void unlink(ps_storage *s)
{
    if (!s->scope.of) return;
    if (s->scope.next) s->scope.next->scope.prev = s->scope.prev;
    if (s->scope.prev) s->scope.prev->scope.next = s->scope.next;
    else s->scope.of->first = s->scope.next;
    s->scope.of = NULL;
}

enum { HEADERS_NBYTES = 512 };           /* approximate size in bytes of a storage, its tensor and Lua's object for
                                          * the tensor */

void ps_scope_uncount(ps_storage *s)
{
    if (s->scope.count) *s->scope.count -= s->nbytes + HEADERS_NBYTES;
    s->scope.count = NULL;
}

void ps_scope_unlink(ps_storage *s)
{
    unlink(s);
    ps_scope_uncount(s);
}

void ps_scope_adopt(ps_ctx *ctx, ps_storage *s)
{
    unlink(s);
    link_to(&ctx->scope.root, s);
    s->bytes.dropped = false;            /* a scope may have dropped the storage while the tape held its bytes */
}

void ps_scope_add(ps_ctx *ctx, ps_storage *s)
{
    bool small = s->nbytes < PS_SCOPE_MIN_NBYTES, takes = !ctx->devices[s->device]->no_data && !ctx->step->dry;
    ps_scope *outer = &ctx->scope.root;
    if (ctx->engine.suspended.on)                   /* tensors that are made while the script is paused do not outlive
                                                     * the pause */
        for (outer = ctx->scope.now; outer->id != ctx->engine.suspended.scope;) outer = outer->parent;
    link_to(small ? outer : ctx->scope.now, s);
    if (!takes) return;
    s->scope.count = &ctx->scope.nbytes;
    ctx->scope.nbytes += s->nbytes + HEADERS_NBYTES;
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
        unlink(s);
        if (!s->bytes.kept) ps_storage_drop(s);
        ps_storage_leave(ctx, s);
        if (s->block) link_to(&ctx->scope.root, s);        /* the storage is kept, or the tape still holds it */
        else ps_scope_uncount(s);
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
                unlink(s);
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
    if (ctx->scope.nbytes < ctx->scope.collect_at || ctx->closed) return 0;
    ctx->scope.collect_at = INT64_MAX;
    return 1;
}

int64_t ps_collect_waiting(const ps_ctx *ctx) { return ctx->scope.nbytes - ctx->scope.left; }

/* Sets when the next collection is due. `used` falls by at most an eighth per collection. The reason: collections
 * happen at different points of a training step, and the number of bytes at the point with most tensors should
 * determine when the next collection is due. */
void ps_collected(ps_ctx *ctx, int64_t least)
{
    int64_t left = ctx->scope.nbytes, used = ctx->scope.used - ctx->scope.used / 8;
    if (used < left) used = left;
    ctx->scope.left = left;
    ctx->scope.used = used;
    ctx->scope.collect_at = used + (used / 4 > least ? used / 4 : least);
}
