/* SPDX-License-Identifier: BSD-3-Clause
 * This file handles parameters that several virtual stages share. An example is an embedding that is also the weight of
 * the head. Each use of such a parameter is in one virtual stage and has its own sum. The gradient of a shared
 * parameter is computed as follows:
 *   1. The backwards of a virtual stage add to the sum of its use, in the order of micro-batches.
 *   2. After all backwards, the sums of this rank are added in the order of virtual stages.
 *   3. The results of all ranks with a copy are added in rank order. The total is the final gradient.
 *   4. The final gradient is summed over the ranks that train the same parameters. */
#include "base/error.h"
#include "engine/engine.h"

bool ties_any(const ps_engine *e)
{
    for (int32_t i = 0; i < e->n_params; i++) if (e->params[i].waits) return true;
    return false;
}

static param_rec *first_use_of(ps_engine *e, const param_rec *r)
{
    for (param_rec *f = e->params; f < r; f++)
        if (f->number == r->number && f->tie != PS_TIE_USE) return f;
    return NULL;
}

/* Makes grad_ of the tensor point to the gradient of use r. Before that, saves the pointer in grad_ to `sum` of the use
 * that it belongs to (t->managed). */
static void see_as(param_rec *r)
{
    ps_tensor *t = r->param;
    param_rec *was = t->managed;
    if (was == r) return;
    was->sum = t->grad_;
    t->grad_ = r->sum;
    r->sum = NULL;
    t->managed = r;
}

void ties_turn(ps_engine *e, int32_t vstage)
{
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        if (!r->first_use) continue;
        if (r->vstage == vstage) see_as(r);
        else if (r->param->managed == r) see_as(r->first_use);
    }
}

int ties_find(ps_engine *e)
{
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        if (r->tie == PS_TIE_NONE) continue;
        r->waits = true;
        if (r->tie == PS_TIE_COPY) {
            if (e->pipe_ranks && e->pipe_ranks->table->has_copies(e->pipe_ranks)) continue;
            return ps_fail(PS_EINVAL, "parameter %d is a copy, but no group of ranks with copies was set", i);
        }
        r->first_use = first_use_of(e, r);
        if (!r->first_use || r->first_use->param != r->param || !r->first_use->place)
            return ps_fail(PS_EINVAL, "parameter %d is another use of number %d, but no earlier parameter is the same "
                           "tensor and has a tensor for its gradient", i, r->number);
        r->first_use->waits = true;
    }
    return 0;
}

static int add_use(ps_engine *e, param_rec *use)
{
    ps_tensor *to = use->param, *in[2] = { use->first_use->place, use->sum }, *all[PS_MAX_OUT] = { NULL };
    ps_attrs_axpy_ add = { .alpha = 1 };
    ps_attrs_copy_ copy = { 0 };
    bool there = to->grad_ != NULL;
    if (there) in[0] = to->grad_;
    PS_TRY(engine_run(e->ctx, there ? PS_OP_axpy_ : PS_OP_copy_, there ? (const void *)&add : &copy, 2, in, all));
    if (all[0]) ps_tensor_release(all[0]);
    if (!there) PS_TRY(ps_tensor_set_grad(to, use->first_use->place));
    ps_tensor_release(use->sum);
    use->sum = NULL;
    int32_t chunk = ps_storage_chunk(e->chunks, use->place->storage);
    return chunk >= 0 ? ps_chunk_end(e->chunks, chunk) : 0;      /* the chunk contains only this gradient */
}

/* Sums a gradient over all ranks that have a copy of the parameter. A rank that has no gradient adds zeros. */
static int add_copies(ps_engine *e, const param_rec *r)
{
    if (!r->param->grad_) {
        PS_TRY(engine_fill_zero(e, r->place));
        PS_TRY(ps_tensor_set_grad(r->param, r->place));
    }
    return e->pipe_ranks->table->sum_copies(e->pipe_ranks, r->param->grad_);
}

int ties_sum(ps_engine *e)
{
    int rc = 0;
    if (!ties_any(e)) return 0;
    for (int32_t i = 0; i < e->n_params; i++)
        if (e->params[i].sum) PS_TRY(add_use(e, &e->params[i]));
    for (int32_t i = 0; i < e->n_params; i++)
        if (e->params[i].tie == PS_TIE_COPY && !e->params[i].final) PS_TRY(add_copies(e, &e->params[i]));
    e->summing_ties = true;
    for (int32_t i = 0; rc == 0 && i < e->n_params; i++)
        if (e->params[i].waits && !e->params[i].first_use) rc = engine_make_final(e, &e->params[i]);
    e->summing_ties = false;
    return rc < 0 || !e->zero ? rc : e->zero->table->all_final(e->zero);
}
