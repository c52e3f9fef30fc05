/* SPDX-License-Identifier: BSD-3-Clause
 * This file sums the gradients of PS_TP_PARTIAL parameters over the tensor-parallel ranks. Such parameters are biases
 * and the weights of norms. Each rank applies them only to its own rows, so it has only an addend of their gradient.
 *
 * Once per step, each rank copies its addends to one fp32 tensor, the ranks exchange and sum these tensors, and each
 * rank copies the sums back. Therefore a gradient of a half type is rounded only once, and all ranks get identical
 * bits. The exchange runs after the last micro-batch, and before the norm and the update. If gradients wait for other
 * virtual stages (ties.c), the exchange runs after these virtual stages. */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/engine.h"

enum { ALIGNED = 16 };            /* each addend begins at a multiple of this number of elements */

bool partial_waits(const param_rec *r) { return r->tp == PS_TP_PARTIAL && !r->summed; }

static bool takes_part(const param_rec *r) { return r->tp == PS_TP_PARTIAL && r->owned && r->unit >= 0; }

static int64_t aligned(int64_t numel) { return (numel + ALIGNED - 1) / ALIGNED * ALIGNED; }

static int part_of_sums(const ps_engine *e, ps_meta meta, int64_t at, ps_tensor **out)
{
    meta.dtype = PS_F32;
    ps_meta_set_contiguous(&meta);
    meta.offset = at;
    return ps_tensor_view(e->partial.sums, &meta, out);
}

int partial_make(ps_engine *e)
{
    partial_rec *p = &e->partial;
    int64_t numel = 0, at;
    for (int32_t i = 0; i < e->n_params; i++) {
        if (!takes_part(&e->params[i])) continue;
        p->n++;
        numel += aligned(e->params[i].param->numel_);
    }
    if (p->n == 0) return 0;
    at = aligned(p->n);
    numel += at;
    size_t nbytes = sizeof *p->values * (size_t)p->n;
    if (!(p->values = ps_alloc0(nbytes))) return ps_fail_nomem(nbytes);
    PS_TRY(ps_tensor_new(e->ctx, PS_F32, e->device, 1, &numel, &p->sums));
    PS_TRY(ps_tensor_keep(p->sums));
    PS_TRY(part_of_sums(e, (ps_meta){ .ndim = 1, .shape = { p->n } }, 0, &p->marks));
    if (ps_tensor_has_data(p->sums)) PS_TRY(engine_fill_zero(e, p->sums));
    for (int32_t i = 0; i < e->n_params; i++) {
        if (!takes_part(&e->params[i])) continue;
        PS_TRY(part_of_sums(e, ps_tensor_meta(e->params[i].param), at, &e->params[i].addend));
        at += aligned(e->params[i].param->numel_);
    }
    return 0;
}

void partial_free(ps_engine *e)
{
    if (e->partial.marks) ps_tensor_release(e->partial.marks);
    if (e->partial.sums) ps_tensor_release(e->partial.sums);
    ps_free(e->partial.values);
    e->partial = (partial_rec){ .n = 0 };
}

/* Copies a gradient from `from` to `to`. The tensors may be on different devices, because ps_engine_set_device can
 * place a gradient on the host while ops run on a device. */
static int copy(ps_engine *e, ps_tensor *to, ps_tensor *from)
{
    ps_tensor *moved = NULL, *all[PS_MAX_OUT] = { NULL };
    ps_attrs_copy_ none = { 0 };
    if (from->device_ != to->device_) PS_TRY(ps_tensor_to_device(from, to->device_, &moved));
    int rc = engine_run(e->ctx, PS_OP_copy_, &none, 2, (ps_tensor *[]){ to, moved ? moved : from }, all);
    if (all[0]) ps_tensor_release(all[0]);
    if (moved) ps_tensor_release(moved);
    return rc;
}

static int fill(ps_engine *e)
{
    int32_t k = 0;
    for (int32_t i = 0; i < e->n_params; i++) {
        const param_rec *r = &e->params[i];
        if (!takes_part(r)) continue;
        bool here = r->param->grad_ != NULL;
        PS_TRY(here ? copy(e, r->addend, r->param->grad_) : engine_fill_zero(e, r->addend));
        e->partial.values[k++] = here ? 1 : 0;
    }
    if (e->step->dry) return 0;
    return ps_tensor_write(e->partial.marks, e->partial.values, k * (int64_t)sizeof *e->partial.values);
}

/* Checks for each parameter that all ranks have a gradient or that no rank has a gradient. If this is not true of
 * several parameters, all ranks report the first of these parameters. */
static int check_marks(ps_engine *e)
{
    int32_t k = 0;
    if (!ps_tensor_has_data(e->partial.sums)) return 0;    /* simulated ranks have no marks */
    PS_TRY(ps_tensor_read(e->partial.marks, e->partial.values, e->partial.n * (int64_t)sizeof *e->partial.values));
    for (int32_t i = 0; i < e->n_params; i++) {
        if (!takes_part(&e->params[i])) continue;
        int ranks = (int)e->partial.values[k++];
        if (ranks != 0 && ranks != e->tp->ranks)
            return ps_fail_sub(PS_EINVAL, PS_SUB_ADDENDS, "%d of the %d tensor-parallel ranks have a gradient of "
                                                          "parameter %d; either all or none must have one: all ranks "
                                                          "must run the same model on the same rows", ranks,
                               e->tp->ranks, e->params[i].number);
    }
    return 0;
}

static int exchange(ps_engine *e)
{
    int rc = fill(e);
    PS_TRY(e->tp->table->sum_tensor(e->tp, e->partial.sums, rc));
    return e->step->dry ? 0 : check_marks(e);
}

int partial_sum(ps_engine *e)
{
    if (e->partial.n == 0) return 0;
    if (!e->partial.exchanged) PS_TRY(exchange(e));       /* a call after an error must not repeat the exchange */
    e->partial.exchanged = true;
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        if (!takes_part(r) || r->summed) continue;
        if (r->param->grad_) PS_TRY(copy(e, r->param->grad_, r->addend));
        r->summed = true;
    }
    for (int32_t unit = 0; unit < e->n_units; unit++) {
        bool waited = false;
        for (int32_t i = e->first[unit]; i < e->first[unit + 1]; i++)
            waited = waited || takes_part(&e->params[e->order[i]]);
        if (waited) PS_TRY(engine_unit_ready(e, unit));
    }
    return 0;
}
