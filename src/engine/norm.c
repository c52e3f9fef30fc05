/* SPDX-License-Identifier: BSD-3-Clause
 * This file computes the norm of all gradients. It first sums the squares of each parameter's gradient. It then adds
 * these sums in the order of the parameters in the model (ps_param.number). This order does not depend on ranks or
 * virtual stages. Therefore the norm is the same, bit for bit, if the model is cut into virtual stages. */
#include <string.h>
#include "base/error.h"
#include "engine/engine.h"

/* Reads all sums of squares that are on a device. Uses one copy for all of them, so that the host waits for the device
 * only once. */
static int read_squares(ps_engine *e)
{
    for (int which = 0; which < 2; which++) {
        bool any = false;
        for (int32_t i = 0; i < e->n_params; i++) any = any || e->params[i].unread == 1 + which;
        if (!any) continue;
        /* A simulated machine has no data. Its sums are zeros. */
        if (ps_tensor_has_data(e->sums[which]))
            PS_TRY(ps_tensor_read(e->sums[which], e->squares, e->n_params * (int64_t)sizeof *e->squares));
        for (int32_t i = 0; i < e->n_params; i++) {
            param_rec *r = &e->params[i];
            if (r->unread != 1 + which) continue;
            r->square = e->squares[i];
            r->unread = 0;
        }
    }
    return 0;
}

/* Sends the sum of squares of each parameter from the parameter's owner to all ranks. */
static int share_squares(ps_engine *e)
{
    if (!e->zero || e->step->dry) return 0;
    for (int32_t i = 0; i < e->n_params; i++) e->squares[i] = e->params[i].owned ? e->params[i].square : 0;
    PS_TRY(e->zero->table->sum_owned(e->zero, e->squares, e->n_params));
    for (int32_t i = 0; i < e->n_params; i++) e->params[i].square = e->squares[i];
    return 0;
}

/* For each split parameter, adds the sums of squares of its shards on the tensor-parallel ranks. For any other
 * parameter, all ranks get the sum of rank 0. */
static int add_pieces(ps_engine *e)
{
    if (!e->tp) return 0;
    /* In a dry run, the table's sum() only records the call. */
    if (e->step->dry) return e->tp->table->sum(e->tp, e->squares, e->n_params);
    for (int32_t i = 0; i < e->n_params; i++)
        e->squares[i] = e->params[i].tp == PS_TP_SPLIT || e->tp->rank == 0 ? e->params[i].square : 0;
    PS_TRY(e->tp->table->sum(e->tp, e->squares, e->n_params));
    for (int32_t i = 0; i < e->n_params; i++) e->params[i].square = e->squares[i];
    return 0;
}

/* Fills by_number with the sums of squares of the parameters of all stages. A shared parameter is counted once. */
static int of_all_stages(ps_engine *e)
{
    memset(e->by_number, 0, sizeof *e->by_number * (size_t)e->n_numbers);
    for (int32_t i = 0; i < e->n_params; i++) {
        const param_rec *r = &e->params[i];
        bool counts = r->tie == PS_TIE_NONE || (r->tie == PS_TIE_COPY && e->pipe_ranks->table->counts(e->pipe_ranks));
        if (counts) e->by_number[r->number] = r->square;
    }
    return e->pipe_ranks && !e->step->dry ? e->pipe_ranks->table->sum(e->pipe_ranks, e->by_number, e->n_numbers) : 0;
}

/* Returns true if the squares of the gradient must be summed now. This is the case if backward has not summed the
 * squares, or if a script has written to the gradient after backward summed them. */
static bool needs_squares(const param_rec *r)
{
    return r->param->grad_ && (!r->squared || r->version != r->param->grad_->storage->version);
}

int ps_engine_sq_norm(ps_ctx *ctx, double *out)
{
    ps_engine *e = NULL;
    double sum = 0;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(engine_within(e, PS_ACT_NORM, "the norm of gradients"));
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        if (r->first_use) continue;
        if (needs_squares(r)) PS_TRY(engine_store(e, r, false, true));
        if (!r->param->grad_) r->square = 0, r->unread = 0;
    }
    PS_TRY(read_squares(e));
    PS_TRY(share_squares(e));
    PS_TRY(add_pieces(e));
    PS_TRY(of_all_stages(e));
    for (int32_t i = 0; i < e->n_numbers; i++) sum += e->by_number[i];
    *out = ps_lua_number(sum);
    return 0;
}

int ps_engine_sq_norm_of(ps_ctx *ctx, int32_t first, int32_t n, double *out)
{
    ps_engine *e = NULL;
    double sum = 0;
    PS_TRY(engine_get(ctx, &e));
    if (first < 0 || n < 0 || first > e->n_numbers - n)
        return ps_fail(PS_ERANGE, "there are no parameters %d to %d in a model of %d parameters", first, first + n - 1,
                       e->n_numbers);
    for (int32_t i = first; i < first + n; i++) sum += e->by_number[i];
    *out = ps_lua_number(sum);
    return 0;
}
