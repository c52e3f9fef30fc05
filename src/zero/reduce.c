/* SPDX-License-Identifier: BSD-3-Clause
 * This file sums gradients over the ranks (ZeRO). When all gradients of a stripe are final, the reduction of the stripe
 * begins, and backward continues with the gradients of the next stripe. When the reduction is complete, this rank drops
 * the gradients that other ranks own. After a reduction has begun, this rank waits for the preceding reduction. */
#include "zero/zero.h"
#include <string.h>
#include "base/error.h"
#include "collectives/collectives.h"

static bool in_place_of_values(const unit_parts *u) { return u->grad_part < 0; }

int reduce_before_slot(ps_zero *base, int32_t unit)
{
    zero *z = (zero *)base;
    return base->stage > 0 ? ps_shard_grads(z->shard, z->units[unit].param_part) : 0;
}

/* Returns a hash of the list of parameters of the stripe that have had a gradient in this step. Sets *none to true if
 * no parameter of the stripe has had a gradient. */
static uint64_t who_has(zero *z, int32_t stripe, bool *none)
{
    uint64_t h = 0;
    *none = true;
    for (int32_t u = 0; u < z->n_units; u++) {
        int has;
        if (z->units[u].stripe != stripe) continue;
        for (int32_t i = 0; (has = engine_unit_had_grad(z->e, u, i)) >= 0; i++) {
            h = ps_xxh3((uint64_t[]){ h, (uint64_t)has }, 2 * sizeof h);
            if (has) *none = false;
        }
    }
    return h;
}

/* Completes reductions, oldest first, until at most `keep` reductions are in progress. */
static int end_oldest(zero *z, int32_t keep)
{
    while (z->n_reducing > keep) {
        int32_t stripe = z->reducing[0], part = z->stripes[stripe].part;
        memmove(z->reducing, z->reducing + 1, sizeof *z->reducing * (size_t)--z->n_reducing);
        z->stripes[stripe].part = -1;
        PS_TRY(ps_shard_reduce_end(z->shard, part));
        for (int32_t u = 0; u < z->n_units; u++)
            if (z->units[u].stripe == stripe) PS_TRY(engine_unit_reduced(z->e, u));
    }
    return 0;
}

static int begin(zero *z, int32_t stripe)
{
    bool none;
    uint64_t check = who_has(z, stripe, &none);
    int32_t part = -1;
    if (none) return 0;
    for (int32_t u = 0; u < z->n_units; u++) {
        const unit_parts *unit = &z->units[u];
        if (unit->stripe != stripe) continue;
        part = in_place_of_values(unit) ? unit->param_part : unit->grad_part;
        if (in_place_of_values(unit)) PS_TRY(reduce_before_slot(&z->base, u));
        PS_TRY(engine_unit_reduces(z->e, u));
    }
    PS_TRY(ps_shard_reduce_begin(z->shard, part, z->base.stage == 0, check));
    z->stripes[stripe].part = part;
    z->reducing[z->n_reducing++] = stripe;
    return 0;
}

int reduce_unit_final(ps_zero *base, int32_t unit)
{
    zero *z = (zero *)base;
    int32_t stripe = z->units[unit].stripe;
    stripe_units *s = &z->stripes[stripe];
    if (++s->n_final < s->n) return 0;
    PS_TRY(begin(z, stripe));
    return end_oldest(z, 1);
}

int reduce_all_final(ps_zero *z) { return end_oldest((zero *)z, 0); }

void reduce_unit_not_final(ps_zero *base, int32_t unit)
{
    zero *z = (zero *)base;
    if (z->n_stripes > 0) z->stripes[z->units[unit].stripe].n_final = 0;
}

int reduce_sum_owned(ps_zero *base, double *values, int32_t n)
{
    zero *z = (zero *)base;
    if (base->stage == 0) return 0;
    return group_all_reduce(ps_shard_group(z->shard), ON_HOST, PS_F64, (char *)values, n * (int64_t)sizeof *values, 0);
}

void reduce_forget(ps_zero *base)
{
    zero *z = (zero *)base;
    z->n_reducing = 0;
    for (int32_t i = 0; i < z->n_stripes; i++) z->stripes[i].part = -1;
    ps_shard_forget(z->shard);
}
