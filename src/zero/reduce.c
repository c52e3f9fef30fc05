/* SPDX-License-Identifier: BSD-3-Clause
 * Gradients of several ranks: when all of a stripe are final they are added up over the ranks, beside the rest of
 * backward; what another rank owns is forgotten then. One stripe is under way while the next becomes final. */
#include "engine/engine.h"
#include <string.h>
#include "base/error.h"

/* Micro-batches add up at the owner: others keep no gradients between them. */
bool reduces_every_time(const ps_engine *e)
{
    return e->shard && e->zero_stage >= 2 && e->n_params > 0 && e->params[0].place;
}

int reduce_before_slot(ps_engine *e, param_rec *r)
{
    return e->zero_stage > 0 ? ps_shard_grads(e->shard, e->units[r->unit].param_part) : 0;
}

static bool in_place_of_values(const unit_rec *u) { return u->grad_part < 0; }

static int fill_zero(ps_engine *e, ps_tensor *t)
{
    ps_attrs_fill_ zero = { 0 };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    int enabled = ps_set_grad_enabled(e->ctx, 0);
    int rc = ps_apply_all(e->ctx, PS_OP_fill_, 1, &t, &zero, all);
    ps_set_grad_enabled(e->ctx, enabled);
    if (all[0]) ps_tensor_release(all[0]);
    return rc;
}

/* FNV-1a of which parameters have gradients; none: whether any has. */
static uint64_t who_has(const ps_engine *e, int32_t stripe, bool *none)
{
    uint64_t h = 14695981039346656037u;
    *none = true;
    for (int32_t u = 0; u < e->n_units; u++) {
        if (e->units[u].stripe != stripe) continue;
        for (int32_t i = e->first[u]; i < e->first[u + 1]; i++) {
            param_rec *r = &e->params[e->order[i]];
            bool has = r->had = r->had || r->param->grad_;   /* in an earlier micro-batch, too: its owner has the sum */
            h = (h ^ (uint64_t)(has ? 2 : 1)) * 1099511628211u;
            if (has) *none = false;
        }
    }
    return h;
}

/* The sums of a stripe are there. */
static int reduced(ps_engine *e, int32_t stripe)
{
    for (int32_t u = 0; u < e->n_units; u++) {
        const unit_rec *unit = &e->units[u];
        bool mine = false;
        if (unit->stripe != stripe) continue;
        for (int32_t i = e->first[u]; i < e->first[u + 1]; i++) {
            param_rec *r = &e->params[e->order[i]];
            if (!r->owned) {                              /* taken, as on its owner, until values are back, */
                if (!r->param->grad_) engine_set_taken(r, false);   /* but where the owner has its value again */
                PS_TRY(ps_tensor_set_grad(r->param, NULL));
                continue;
            }
            mine = true;
            if (!r->param->grad_ && r->slot && in_place_of_values(unit)) PS_TRY(engine_restore(e, r));
            if (r->param->grad_ && e->mode.last && e->mode.squares) PS_TRY(engine_store(e, r, false, true));
        }
        if (mine && e->mode.last) PS_TRY(engine_unit_ready(e, u));
    }
    return 0;
}

/* Ends reductions, oldest first, until `keep` are left. */
static int end_oldest(ps_engine *e, int32_t keep)
{
    while (e->n_reducing > keep) {
        int32_t stripe = e->reducing[0], part = e->stripes[stripe].part;
        memmove(e->reducing, e->reducing + 1, sizeof *e->reducing * (size_t)--e->n_reducing);
        e->stripes[stripe].part = -1;
        PS_TRY(ps_shard_reduce_end(e->shard, part));
        PS_TRY(reduced(e, stripe));
    }
    return 0;
}

static int begin(ps_engine *e, int32_t stripe)
{
    bool none, every_time = reduces_every_time(e);
    uint64_t check = who_has(e, stripe, &none);
    int32_t part = -1;
    if (none) return 0;
    for (int32_t u = 0; u < e->n_units; u++) {
        const unit_rec *unit = &e->units[u];
        if (unit->stripe != stripe) continue;
        part = in_place_of_values(unit) ? unit->param_part : unit->grad_part;
        if (in_place_of_values(unit) && e->zero_stage > 0) PS_TRY(ps_shard_grads(e->shard, part));
        for (int32_t i = e->first[u]; i < e->first[u + 1]; i++) {
            param_rec *r = &e->params[e->order[i]];
            if (r->param->grad_) continue;
            if (every_time && !r->owned) PS_TRY(fill_zero(e, r->place));
            if (r->slot && in_place_of_values(unit)) engine_set_taken(r, true);   /* values, which are summed, too */
        }
    }
    PS_TRY(ps_shard_reduce_begin(e->shard, part, e->zero_stage == 0, check));
    e->stripes[stripe].part = part;
    e->reducing[e->n_reducing++] = stripe;
    return 0;
}

int reduce_unit_final(ps_engine *e, int32_t unit)
{
    int32_t stripe = e->units[unit].stripe;
    stripe_rec *s = &e->stripes[stripe];
    if (++s->n_final < s->n) return 0;
    PS_TRY(begin(e, stripe));
    return end_oldest(e, 1);
}

int reduce_end(ps_engine *e) { return end_oldest(e, 0); }

int reduce_squares(ps_engine *e)
{
    if (e->zero_stage == 0 || e->ctx->dry) return 0;         /* all have all */
    for (int32_t i = 0; i < e->n_params; i++) e->squares[i] = e->params[i].owned ? e->params[i].square : 0;
    int64_t nbytes = e->n_params * (int64_t)sizeof *e->squares;
    PS_TRY(group_all_reduce(ps_shard_group(e->shard), ON_HOST, PS_F64, (char *)e->squares, nbytes, 0));
    for (int32_t i = 0; i < e->n_params; i++) e->params[i].square = e->squares[i];
    return 0;
}

void reduce_forget(ps_engine *e)
{
    e->n_reducing = 0;
    for (int32_t i = 0; i < e->n_stripes; i++) e->stripes[i].part = -1;
    ps_shard_forget(e->shard);
}
