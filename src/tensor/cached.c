/* SPDX-License-Identifier: BSD-3-Clause
 * Attention with caches of the preceding keys and values, for a model that continues a text token by token. Cached
 * attention is not an op. This file makes the views that one step needs, and runs the ops copy_, rope and attention on
 * them, as a script could. It exists for speed: for one token of a small model, a script's calls of these ops would
 * take longer than the matrix products. */
#include "tensor/tensor.h"
#include <math.h>
#include "base/blocks.h"
#include "base/error.h"

enum { OWNED = 20 };                      /* enough tensors for every kind of call */

/* One call of ps_attention_cached(). B: number of samples. T: number of positions. D: number of columns per head. */
typedef struct cached {
    ps_ctx *ctx;
    const ps_cached_attention *how;
    ps_tensor *q, *k, *v, *keys, *values, *cos, *sin, *mask;          /* operands as the caller passed them */
    int64_t B, T, D;
    ps_tensor *owned[OWNED];                  /* references that are released at the end of the call */
    int n_owned;
    const ps_blocks *q8;                      /* Q8_0 */
} cached;

static ps_tensor *own(cached *c, ps_tensor *t) { return c->owned[c->n_owned++] = t; }

/* Runs an op with one output. Sets *out to the output (lent). */
static int run(cached *c, int op, int n_in, ps_tensor *const *in, const void *attrs, int64_t nbytes, ps_tensor **out)
{
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_apply(c->ctx, op, n_in, in, attrs, nbytes, all));
    *out = own(c, all[0]);
    return 0;
}

/* Sets *out (lent) to a view [B, count, T, D] of `count` heads of x, starting at head `first`. x is contiguous [B, T,
 * all * D]. */
static int heads_of(cached *c, ps_tensor *x, int64_t first, int64_t count, int64_t all, ps_tensor **out)
{
    int64_t row = all * c->D;
    ps_meta m = { .dtype = x->dtype_, .ndim = 4, .shape = { c->B, count, c->T, c->D },
                  .stride = { c->T * row, c->D, row, 1 }, .offset = x->offset + first * c->D };
    PS_TRY(ps_tensor_view(x, &m, out));
    own(c, *out);
    return 0;
}

/* Sets *out (lent) to a view of a part of a cache: `count` heads, starting at head `first`, and n positions, starting
 * at position `from`. */
static int part_of(cached *c, ps_tensor *cache, int64_t first, int64_t count, int64_t from, int64_t n, ps_tensor **out)
{
    ps_meta m = ps_tensor_meta(cache);
    m.offset += first * m.stride[1] + from * m.stride[2];
    m.shape[1] = count;
    m.shape[2] = n;
    PS_TRY(ps_tensor_view(cache, &m, out));
    own(c, *out);
    return 0;
}

/* Returns true if a cache has rows of Q8_0 blocks. */
static bool is_packed(const ps_tensor *cache) { return cache->dtype_ == PS_U8; }

/* Writes the tensor `what` [B, n, T, D] to a cache, after the cache's first `at` positions. Converts the values to the
 * type of the cache. */
static int append(cached *c, ps_tensor *cache, ps_tensor *what)
{
    ps_attrs_copy_ none = { 0 };
    ps_attrs_pack q8 = { .type = PS_Q8_0 };
    ps_tensor *to, *same;
    if (is_packed(cache)) PS_TRY(run(c, PS_OP_pack, 1, &what, &q8, sizeof q8, &what));
    PS_TRY(part_of(c, cache, 0, cache->shape_[1], c->how->at, c->T, &to));
    return run(c, PS_OP_copy_, 2, (ps_tensor *[]){ to, what }, &none, sizeof none, &same);
}

static int turn(cached *c, ps_tensor **x)
{
    ps_attrs_rope attrs = { .inverse = 0 };
    return c->cos ? run(c, PS_OP_rope, 3, (ps_tensor *[]){ *x, c->cos, c->sin }, &attrs, sizeof attrs, x) : 0;
}

/* Checks that *x is [B, T, ...] with `all` heads of D columns per position. Makes *x contiguous. */
static int rows_of(cached *c, ps_tensor **x, int64_t all)
{
    ps_attrs_contiguous none = { 0 };
    ps_tensor *t = *x;
    char text[160];
    if (t->ndim < 3 || t->shape_[0] != c->B || t->shape_[1] != c->T || t->numel_ != c->B * c->T * all * c->D)
        return ps_fail(PS_EINVAL, "attention with caches: expected %lld rows of %lld positions with %lld heads of size "
                       "%lld, not %s", (long long)c->B, (long long)c->T, (long long)all, (long long)c->D,
                       ps_shape_text(t->ndim, t->shape_, text, sizeof text));
    if (ps_tensor_is_contiguous(t)) return 0;
    return run(c, PS_OP_contiguous, 1, &t, &none, sizeof none, x);
}

static int check_cache(const cached *c, const ps_tensor *cache, int64_t heads)
{
    char text[160];
    int64_t width = is_packed(cache) ? c->D / c->q8->block * c->q8->bytes : c->D;
    if (cache->ndim == 4 && cache->shape_[0] == c->B && cache->shape_[1] == heads && cache->shape_[3] == width &&
        c->how->at >= 0 && c->how->at <= cache->shape_[2] - c->T) return 0;
    return ps_fail(PS_EINVAL, "attention with caches: a cache is %s; it must be [%lld, %lld, %lld or more, %lld]",
                   ps_shape_text(cache->ndim, cache->shape_, text, sizeof text), (long long)c->B, (long long)heads,
                   (long long)(c->how->at + c->T), (long long)width);
}

static int check(cached *c)
{
    const ps_cached_attention *how = c->how;
    ps_tensor *all[] = { c->q, c->k, c->v, c->keys, c->values, c->mask };
    if (!c->q || !c->keys || !c->k != !c->v || !c->k != !c->values || !c->cos != !c->sin || (c->cos && !c->k))
        return ps_fail(PS_EINVAL, "attention with caches: pass q, k, v and two caches, with or without cos and sin, or "
                       "pass qkv and one cache");
    if (how->heads < 1 || how->groups < 1 || c->q->ndim < 3 || c->q->numel_ == 0 || c->keys->ndim != 4)
        return ps_fail(PS_EINVAL, "attention with caches: %lld heads, %lld of keys; both, and all sizes, must be 1 or "
                       "more", (long long)how->heads, (long long)how->groups);
    if (c->mask && c->mask->ndim != 2)
        return ps_fail(PS_EINVAL, "attention with caches: the mask has %d dimensions; it must be bool [%lld, %lld]",
                       c->mask->ndim, (long long)c->q->shape_[0], (long long)(how->at + c->q->shape_[1]));
    for (int i = 0; i < 6; i++)
        if (all[i] && ps_tape_needs(c->ctx, 1, &all[i]))
            return ps_fail(PS_EINVAL, "attention with caches has no gradient; call it inside ps.no_grad()");
    c->B = c->q->shape_[0], c->T = c->q->shape_[1], c->D = c->keys->shape_[3];
    if (is_packed(c->keys)) c->D = c->D / c->q8->bytes * c->q8->block;
    PS_TRY(check_cache(c, c->keys, c->values ? how->groups : 2 * how->groups));
    return c->values ? check_cache(c, c->values, how->groups) : 0;
}

/* Writes keys and values to the caches. Sets *q [B, H, T, D] to the queries for attention. */
static int write_caches(cached *c, ps_tensor **q)
{
    int64_t H = c->how->heads, G = c->how->groups;
    ps_tensor *rows = c->q, *k = c->k, *v = c->v;
    if (!c->k) {
        PS_TRY(rows_of(c, &rows, H + 2 * G));
        PS_TRY(heads_of(c, rows, 0, H, H + 2 * G, q));
        PS_TRY(heads_of(c, rows, H, 2 * G, H + 2 * G, &k));
        return append(c, c->keys, k);
    }
    PS_TRY(rows_of(c, &rows, H));
    PS_TRY(rows_of(c, &k, G));
    PS_TRY(rows_of(c, &v, G));
    PS_TRY(heads_of(c, rows, 0, H, H, q));
    PS_TRY(heads_of(c, k, 0, G, G, &k));
    PS_TRY(heads_of(c, v, 0, G, G, &v));
    PS_TRY(turn(c, q));
    PS_TRY(turn(c, &k));
    PS_TRY(append(c, c->keys, k));
    return append(c, c->values, v);
}

static int attend(cached *c, ps_tensor **out)
{
    int64_t G = c->how->groups, seen = c->how->at + c->T;
    ps_attrs_attention attrs = { .scale = c->how->scale, .causal = 1, .window = c->how->window };
    ps_tensor *q, *k, *v, *y;
    PS_TRY(write_caches(c, &q));
    PS_TRY(part_of(c, c->keys, 0, G, 0, seen, &k));
    PS_TRY(part_of(c, c->values ? c->values : c->keys, c->values ? 0 : G, G, 0, seen, &v));
    if (attrs.scale == 0) attrs.scale = 1 / sqrt((double)c->D);
    PS_TRY(run(c, PS_OP_attention, 4, (ps_tensor *[]){ q, k, v, c->mask }, &attrs, sizeof attrs, &y));
    ps_meta m = { .dtype = y->dtype_, .ndim = 3, .shape = { c->B, c->T, c->how->heads * c->D } };
    ps_meta_set_contiguous(&m);                              /* attention stores its output as [B, T, H, D] */
    m.offset = y->offset;
    return ps_tensor_view(y, &m, out);
}

int ps_attention_cached(ps_ctx *ctx, const ps_cached_attention *how, ps_tensor *q, ps_tensor *k, ps_tensor *v,
                        ps_tensor *keys, ps_tensor *values, ps_tensor *cos, ps_tensor *sin, ps_tensor *mask,
                        ps_tensor **out)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    cached c = { .ctx = ctx, .how = how, .q = q, .k = k, .v = v, .keys = keys, .values = values, .cos = cos,
                 .sin = sin, .mask = mask, .q8 = ps_blocks_of(PS_Q8_0) };
    int rc = check(&c);
    if (rc == 0) rc = attend(&c, out);
    while (c.n_owned > 0) ps_tensor_release(c.owned[--c.n_owned]);
    return rc;
}
