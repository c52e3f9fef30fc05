/* SPDX-License-Identifier: BSD-3-Clause
 * This file trains parameters that are in chunks. It stores the gradients during backward. When gradients are complete,
 * it updates their parameters. The tape calls this file through ps_hooks, to ask where to write a gradient, and to
 * report that a gradient is complete. The plain optimizer computes the same parameters, bit for bit. */
#include "engine/engine.h"
#include <string.h>
#include "base/alloc.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/record.h"
#include "tensor/replay.h"

int engine_get(ps_ctx *ctx, ps_engine **out)
{
    if (!ctx->engine.open) return ps_fail(PS_ESTATE, "no engine is open; call ps.initialize first");
    *out = ctx->engine.open;
    return 0;
}

int engine_run(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *const *in, ps_tensor **all)
{
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = ps_apply_all(ctx, op, n, in, attrs, all);
    ps_set_grad_enabled(ctx, enabled);
    return rc;
}

/* -- gradients ---------------------------------------------------------------------------------------------------- */
bool engine_holds(const ps_engine *e, const ps_storage *s)
{
    return ps_storage_chunk(e->chunks, s) >= 0 || (e->zero && e->zero->table->holds(e->zero, s));
}

static void set_taken(param_rec *r, bool taken)
{
    r->in_slot = taken;
    r->param->storage->engine.taken = taken;
}

static int drop_grad(param_rec *r)
{
    if (r->sum) ps_tensor_release(r->sum);
    r->sum = NULL;
    return ps_tensor_set_grad(r->param, NULL);
}

static int walk_begin(ps_ctx *ctx)
{
    int kind = ctx->engine.open->step->is.now.kind;
    if (kind == PS_ACT_BACKWARD || kind == PS_ACT_INPUT || kind == PS_ACT_WEIGHT) return 0;
    return ps_fail(PS_ESTATE, "backward reaches parameters that ps.initialize manages: call model:backward(loss) "
                   "instead of loss:backward(): it handles micro-batches, the loss scale and other ranks");
}

static int grad_place(ps_ctx *ctx, ps_tensor *leaf, ps_tensor **out)
{
    const param_rec *r = leaf->managed;
    if (r->updated)
        return ps_fail(PS_ESTATE,
                       "a parameter got a gradient after its update: backward ran again before optimizer:step(); for "
                       "several backward calls per step set gradient_accumulation_steps, or set overlap_optimizer "
                       "= false");
    *out = r->place;
    return 0;
}

static int square_place(ps_engine *e, const param_rec *r, int which, ps_tensor **out)
{
    ps_meta m = { .dtype = PS_F64, .ndim = 1, .shape = { 1 }, .stride = { 1 }, .offset = r - e->params };
    return ps_tensor_view(e->sums[which], &m, out);
}

int engine_store(ps_engine *e, param_rec *r, bool slot, bool squares)
{
    ps_tensor *grad = r->param->grad_, *all[PS_MAX_OUT] = { slot ? r->slot : grad };
    ps_attrs_grad_store attrs = { .dtype = all[0]->dtype_ };
    int which = grad->device_ != e->device;
    if (squares) PS_TRY(square_place(e, r, which, &all[1]));
    int rc = engine_run(e->ctx, PS_OP_grad_store, &attrs, 1, &grad, all);
    if (all[1]) ps_tensor_release(all[1]);
    /* Mark the slot even if the op failed, because the op may have overwritten the value of the parameter. */
    if (slot) set_taken(r, true);
    PS_TRY(rc);
    r->square = 0;
    r->squared = squares;
    r->unread = squares && !e->step->dry ? 1 + which : 0;
    r->version = all[0]->storage->version;
    if (!slot) return 0;
    return ps_tensor_set_grad(r->param, r->slot);
}

static int update_unit(ps_engine *e, int32_t unit);

/* The maximum number of complete units that wait for their update while backward runs. While a unit waits, its
 * gradients are copied from the device. */
enum { LAG = 2 };

/* Updates the units in `pending`, starting with the oldest unit, until only `keep` units are left in `pending`. */
static int update_pending(ps_engine *e, int32_t keep)
{
    while (e->n_pending > keep) {
        int phase = ps_record_phase(PS_ACT_UPDATE);
        int rc = update_unit(e, e->pending[0]);
        ps_record_phase(phase);
        PS_TRY(rc);
        memmove(e->pending, e->pending + 1, sizeof *e->pending * (size_t)--e->n_pending);
    }
    return 0;
}

int engine_unit_ready(ps_engine *e, int32_t unit)
{
    if (!e->step->how.overlap) return 0;
    for (int32_t i = e->first[unit]; i < e->first[unit + 1]; i++)
        if (partial_waits(&e->params[e->order[i]])) return 0;
    e->pending[e->n_pending++] = unit;
    return update_pending(e, e->device == e->host ? 0 : LAG);
}

/* Returns true if gradients are summed over the ranks after every micro-batch. In this case only the owner of a
 * parameter keeps the sum. */
static bool reduces_every_time(const ps_engine *e)
{
    return e->zero && e->zero->stage >= 2 && !e->zero->once && e->n_params > 0 && e->params[0].place;
}

/* Returns true if engine_store should also sum the squares of a gradient. This is the case in the last backward of a
 * step that has a norm, because no later backward changes the gradients. */
static bool squares_now(const ps_engine *e) { return e->step->measures && ps_step_is_last(e->step); }

int engine_make_final(ps_engine *e, param_rec *r)
{
    if (r->final || r->updated || (r->waits && !e->summing_ties)) return 0;
    if (e->ctx->dry.replay && !e->summing_ties && !ps_step_is_last(e->step))
        ps_replay_spoil(e->ctx);                                 /* a replay cannot repeat the sum over the ranks */
    r->final = true;
    unit_rec *u = &e->units[r->unit];
    u->n_final++;
    bool slot = e->step->how.slot && r->slot && r->param->grad_ && !r->place;
    bool squares = squares_now(e) && !e->zero && !partial_waits(r);
    if (slot && e->zero) PS_TRY(e->zero->table->before_slot(e->zero, r->unit));
    if (r->param->grad_ && (squares || slot)) PS_TRY(engine_store(e, r, slot, squares));
    if (u->n_final < u->n) return 0;
    return e->zero ? e->zero->table->unit_final(e->zero, r->unit) : engine_unit_ready(e, r->unit);
}

static int grad_final(ps_ctx *ctx, ps_tensor *leaf)
{
    ps_engine *e = ctx->engine.open;
    param_rec *r = leaf->managed;
    if (r->vstage != e->step->is.now.vstage) r->waits = true;      /* another virtual stage also uses r */
    if (r->vstage != e->step->is.now.vstage || e->step->is.now.kind == PS_ACT_INPUT || !leaf->grad_) return 0;
    if (!ps_step_is_last(e->step) && !reduces_every_time(e)) return 0;
    return engine_make_final(e, r);
}

/* Marks the gradients of a virtual stage as not final. If vstage is -1, marks the gradients of all virtual stages. */
static void none_final(ps_engine *e, int32_t vstage)
{
    for (int32_t i = 0; i < e->n_params; i++)
        if (vstage < 0 || e->params[i].vstage == vstage) e->params[i].final = false;
    for (int32_t i = 0; i < e->n_units; i++) {
        if (vstage >= 0 && e->units[i].vstage != vstage) continue;
        e->units[i].n_final = 0;
        if (e->zero) e->zero->table->unit_not_final(e->zero, i);
    }
}

/* Called when the memory of the parameters contains values again instead of gradients. After this call, all ranks may
 * read and gather the parameters. */
static void values_back(ps_engine *e)
{
    for (int32_t i = 0; i < e->n_params; i++) if (!e->params[i].owned) set_taken(&e->params[i], false);
    e->zero->table->forget(e->zero);
}

int engine_backward_done(ps_engine *e)
{
    if (!ps_step_is_last(e->step) && !reduces_every_time(e)) return 0;
    for (int32_t i = 0; i < e->n_params; i++)
        if (e->params[i].vstage == e->step->is.now.vstage) PS_TRY(engine_make_final(e, &e->params[i]));
    return 0;
}

int engine_gradients_whole(ps_engine *e)
{
    bool last = ps_step_is_last(e->step);
    if (!last && !reduces_every_time(e)) return 0;
    if (e->zero) PS_TRY(e->zero->table->all_final(e->zero));
    if (!last) none_final(e, e->step->is.now.vstage);
    if (!ps_step_adds_later(e->step) && !ties_any(e)) PS_TRY(partial_sum(e));
    PS_TRY(update_pending(e, 0));
    if (e->zero && e->step->how.overlap) values_back(e);
    return 0;
}

int engine_within(const ps_engine *e, int kind, const char *what)
{
    return e->step->is.now.kind == kind ? 0 : ps_fail(PS_ESTATE, "%s is not due: the step has another action, or none",
                                                      what);
}

/* -- updates ------------------------------------------------------------------------------------------------------ */

/* Returns an error if the number of the parameter's optimizer states does not match the op of its group. Without this
 * check, a script could switch to settings that need other states. */
static int check_states(const ps_update_group *g, const param_rec *r)
{
    if (r->n_states >= g->n_needed && r->n_states <= g->n_states) return 0;
    return ps_fail(PS_EINVAL, "the update of group %d (op %d) needs %d to %d states per parameter, but a parameter has "
                   "%d", r->group, g->op, g->n_needed, g->n_states, r->n_states);
}

static int per_call(const ps_update_group *g) { return PS_MAX_IN / (3 + g->n_states); }

/* Updates n parameters of one group with one op. All n parameters must have the same `t` and the same `scale`. */
static int run_update(ps_engine *e, param_rec *const *list, int n, bool host)
{
    ps_tensor *in[PS_MAX_IN], *moved[PS_MAX_IN] = { NULL }, *all[PS_MAX_OUT] = { NULL };
    const ps_update_group *g = &e->groups[list[0]->group];
    int64_t t = list[0]->t + 1;
    double attrs[PS_UPDATE_ATTRS];
    int rc = 0, each = 3 + g->n_states;
    memcpy(attrs, g->attrs, sizeof attrs);
    PS_TRY(ps_update_attrs(g->op, attrs, t, e->step->how.scale * g->scale * list[0]->scale));
    for (int i = 0; i < n; i++) PS_TRY(check_states(g, list[i]));
    for (int i = 0; rc == 0 && i < n; i++) {
        param_rec *r = list[i];
        ps_tensor *grad = r->param->grad_;
        if (host && r->in_slot) grad = r->host_slot;
        else if (host && r->host_place && grad->storage == r->place->storage) grad = r->host_place;
        else if (host) rc = ps_tensor_to_device(grad, e->host, &moved[i]), grad = moved[i];
        ps_tensor **to = &in[each * i], *master = host ? r->host[1] : r->master;
        ps_tensor *const *states = host ? r->host + 2 : r->state;
        to[0] = host ? r->host[0] : r->param, to[1] = master, to[2] = grad;
        for (int k = 0; k < g->n_states; k++) to[3 + k] = k < r->n_states ? states[k] : master;
        r->param->storage->engine.taken = false;
    }
    if (e->zero) e->zero->table->alone(e->zero, true);
    if (rc == 0) rc = engine_run(e->ctx, g->op, attrs, each * n, in, all);
    if (e->zero) e->zero->table->alone(e->zero, false);
    if (all[0]) ps_tensor_release(all[0]);
    for (int i = 0; i < n; i++) {
        param_rec *r = list[i];
        if (moved[i]) ps_tensor_release(moved[i]);
        if (rc < 0) {
            r->param->storage->engine.taken = r->in_slot;
            continue;
        }
        r->updated = true;
        if (!e->step->dry) r->t = t;
        set_taken(r, false);
        drop_grad(r);
    }
    return rc;
}

/* Returns true if a parameter is updated on the host. This is the case if its unit is placed on the host, or if ops use
 * the parameter on the host. */
static bool updates_on_host(const ps_engine *e, const unit_rec *u, const param_rec *r)
{
    return r->host[0] && (!u->on_device || r->param->device_ == e->host);
}

/* Called after the update of a unit. If no gradients of the unit are left, discards the contents of its gradient chunk,
 * so that the chunk is not moved. */
static int gradients_end(ps_engine *e, int32_t unit)
{
    int32_t chunk = e->units[unit].grad_chunk;
    for (int32_t i = e->first[unit]; i < e->first[unit + 1]; i++)
        if (e->params[e->order[i]].param->grad_) return 0;
    return chunk >= 0 ? ps_chunk_end(e->chunks, chunk) : 0;
}

static int update_unit(ps_engine *e, int32_t unit)
{
    unit_rec *u = &e->units[unit];
    param_rec *list[PS_MAX_IN];
    int n = 0;
    bool on_host = false;
    if (u->updated) return 0;
    for (int32_t i = e->first[unit]; i < e->first[unit + 1]; i++) {
        param_rec *r = &e->params[e->order[i]];
        if (r->updated || !r->owned || !r->param->grad_) continue;
        bool host = updates_on_host(e, u, r);
        bool alike = n > 0 && r->group == list[0]->group && r->t == list[0]->t && r->scale == list[0]->scale;
        if (n > 0 && (!alike || host != on_host || n == per_call(&e->groups[r->group]))) {
            PS_TRY(run_update(e, list, n, on_host));
            n = 0;
        }
        on_host = host;
        list[n++] = r;
    }
    if (n > 0) PS_TRY(run_update(e, list, n, on_host));
    u->updated = true;
    return gradients_end(e, unit);
}

static void new_step(ps_engine *e)
{
    none_final(e, -1);
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        r->squared = r->updated = r->had = r->summed = false;
        r->unread = 0;
        r->scale = 1;
    }
    for (int32_t i = 0; i < e->n_units; i++) e->units[i].updated = false;
    e->n_pending = 0;
    e->partial.exchanged = false;
    if (e->zero) values_back(e);
}

int ps_engine_update(ps_ctx *ctx)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(engine_within(e, PS_ACT_UPDATE, "an update"));
    for (int32_t unit = 0; unit < e->n_units; unit++) PS_TRY(update_unit(e, unit));
    new_step(e);
    return 0;
}

/* Restores a parameter's value from its master. Before the call, the memory of the parameter contains the gradient or
 * undefined bytes. */
static int restore(ps_engine *e, param_rec *r)
{
    bool host = r->host[0] != NULL;
    ps_tensor *in[2] = { host ? r->host[0] : r->param, host ? r->host[1] : r->master }, *all[PS_MAX_OUT] = { NULL };
    ps_attrs_copy_ none = { 0 };
    r->param->storage->engine.taken = false;
    int rc = engine_run(e->ctx, PS_OP_copy_, &none, 2, in, all);
    if (all[0]) ps_tensor_release(all[0]);
    set_taken(r, rc < 0);
    return rc;
}

/* -- functions for ZeRO -------------------------------------------------------------------------------------------- */
int engine_base_get(ps_ctx *ctx, engine_base *out)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    *out = (engine_base){ e, e->step, e->chunks, e->zero, e->device, e->host };
    return 0;
}

void engine_zero_set(ps_engine *e, ps_zero *z) { e->zero = z; }

int engine_stages_set(ps_engine *e, ps_pipe_ranks *stages, int32_t n_numbers)
{
    if (e->pipe_ranks || e->n_params > 0)
        return ps_fail(PS_ESTATE, "the stages of an engine can be set only once, before parameters are added");
    e->pipe_ranks = stages;
    e->n_numbers = n_numbers;
    return 0;
}

int engine_tp_set(ps_engine *e, ps_tp *tp)
{
    if (e->tp || e->n_params > 0)
        return ps_fail(PS_ESTATE, "the tensor-parallel ranks of an engine can be set only once, before parameters are "
                       "added");
    e->tp = tp;
    return 0;
}

static param_rec *unit_param(ps_engine *e, int32_t unit, int32_t i)
{
    int32_t at = e->first[unit] + i;
    return at < e->first[unit + 1] ? &e->params[e->order[at]] : NULL;
}

int engine_unit_had_grad(ps_engine *e, int32_t unit, int32_t i)
{
    param_rec *r = unit_param(e, unit, i);
    return r ? (r->had = r->had || r->param->grad_) : -1;
}

int engine_fill_zero(ps_engine *e, ps_tensor *t)
{
    ps_attrs_fill_ zero = { 0 };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    int rc = engine_run(e->ctx, PS_OP_fill_, &zero, 1, &t, all);
    if (all[0]) ps_tensor_release(all[0]);
    return rc;
}

int32_t engine_unit_vstage(const ps_engine *e, int32_t unit) { return e->units[unit].vstage; }

int engine_unit_reduces(ps_engine *e, int32_t unit)
{
    param_rec *r;
    for (int32_t i = 0; (r = unit_param(e, unit, i)); i++) {
        if (r->param->grad_) continue;
        if (reduces_every_time(e) && !r->owned) PS_TRY(engine_fill_zero(e, r->place));
        if (r->slot && !r->place) set_taken(r, true);     /* the sum also overwrites this parameter's value */
    }
    return 0;
}

int engine_unit_reduced(ps_engine *e, int32_t unit)
{
    param_rec *r;
    bool mine = false;
    for (int32_t i = 0; (r = unit_param(e, unit, i)); i++) {
        /* Another rank owns this parameter. If the parameter has a gradient, its memory stays marked as taken until
         * values_back(). Otherwise the owner restores the value in this call. */
        if (!r->owned) {
            if (!r->param->grad_) set_taken(r, false);
            PS_TRY(drop_grad(r));
            continue;
        }
        mine = true;
        if (!r->param->grad_ && r->slot && !r->place) PS_TRY(restore(e, r));
        if (r->param->grad_ && squares_now(e) && !partial_waits(r)) PS_TRY(engine_store(e, r, false, true));
    }
    return mine && ps_step_is_last(e->step) ? engine_unit_ready(e, unit) : 0;
}

/* -- discarding gradients ----------------------------------------------------------------------------------------- */
int ps_engine_drop_grads(ps_ctx *ctx)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    return engine_drop_grads(e);
}

int engine_drop_grads(ps_engine *e)
{
    int result = 0;
    /* values_back() marks the parameters that other ranks own as restored. Their owners restore the values. */
    if (e->zero) values_back(e);
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        if (r->in_slot) {
            int rc = restore(e, r);
            if (rc < 0) {
                result = rc;                             /* continue with the next parameter */
                continue;
            }
        }
        drop_grad(r);
    }
    new_step(e);
    return result;
}

void engine_reset(ps_engine *e)
{
    if (e->zero) e->zero->table->forget(e->zero);
    for (int32_t i = 0; i < e->n_params; i++) {
        set_taken(&e->params[i], false);
        drop_grad(&e->params[i]);
    }
    new_step(e);
}

/* -- parameters --------------------------------------------------------------------------------------------------- */
static void release_params(ps_engine *e)
{
    for (int32_t i = 0; i < e->n_params; i++) {
        param_rec *r = &e->params[i];
        r->param->managed = NULL;
        r->param->storage->engine.watched = r->param->storage->engine.taken = false;
        drop_grad(r);
        ps_tensor *all[] = { r->param, r->master, r->place, r->slot, r->host_slot, r->host_place, r->addend };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) if (all[k]) ps_tensor_release(all[k]);
        for (int k = 0; k < PS_MAX_STATES; k++) if (r->state[k]) ps_tensor_release(r->state[k]);
        for (int k = 0; k < 2 + PS_MAX_STATES; k++) if (r->host[k]) ps_tensor_release(r->host[k]);
    }
    ps_free(e->params);
    ps_free(e->units);
    ps_free(e->pending);
    ps_free(e->order);
    ps_free(e->first);
    ps_free(e->groups);
    ps_free(e->squares);
    ps_free(e->by_number);
    if (e->zero) e->zero->table->units(e->zero, 0);
    partial_free(e);
    for (int i = 0; i < 2; i++) {
        if (e->sums[i]) ps_tensor_release(e->sums[i]);
        e->sums[i] = NULL;
    }
    e->params = NULL, e->units = NULL, e->pending = NULL, e->order = NULL, e->first = NULL, e->groups = NULL;
    e->squares = e->by_number = NULL;
    e->n_params = e->n_units = e->n_groups = 0;
}

static int slot_view(ps_tensor *t, ps_tensor **out)
{
    if (!t) return 0;
    PS_TRY(ps_tensor_detach(t, out));
    (*out)->flags |= PS_T_SLOT;
    return 0;
}

static int take_param(ps_engine *e, param_rec *r, const ps_param *p)
{
    *r = (param_rec){ .engine = e, .group = p->group, .unit = p->tie == PS_TIE_USE ? -1 : p->unit, .vstage = p->vstage,
                      .number = p->number, .tie = p->tie, .tp = p->tie == PS_TIE_USE ? PS_TP_WHOLE : p->tp };
    r->param = p->param, r->master = p->master, r->place = p->grad, r->n_states = p->n_states;
    for (int k = 0; k < 2 + r->n_states; k++) if ((r->host[k] = p->host[k])) ps_tensor_retain(p->host[k]);
    for (int k = 0; k < r->n_states; k++) ps_tensor_retain(r->state[k] = p->state[k]);
    ps_tensor *own[] = { r->param, r->master, r->place };
    for (int k = 0; k < 3; k++) if (own[k]) ps_tensor_retain(own[k]);
    r->owned = r->master != NULL;
    /* A PS_U8 master contains only the remainders of the values, so the update also needs the values. */
    bool apart = r->master && r->master->dtype_ == PS_U8;
    if (r->param->dtype_ != PS_F32 && p->tie != PS_TIE_USE && !apart) {
        PS_TRY(slot_view(r->param, &r->slot));
        PS_TRY(slot_view(r->host[0], &r->host_slot));
    }
    if (r->place && r->host[0]) {
        PS_TRY(ps_tensor_detach(r->place, &r->host_place));
        r->host_place->device_ = e->host;
    }
    return 0;
}

static int check_params(const ps_engine *e, int n, const ps_param *params, int n_units, int n_groups)
{
    for (int i = 0; i < n; i++) {
        const ps_param *p = &params[i];
        if (p->n_states < 0 || p->n_states > PS_MAX_STATES)
            return ps_fail(PS_EINVAL, "parameter %d has %d states; it must have 0 to %d", i, p->n_states,
                           PS_MAX_STATES);
        bool state = p->master, none = !p->master && p->n_states == 0;
        for (int k = 0; k < p->n_states; k++) state = state && p->state[k];
        bool use = p->tie == PS_TIE_USE, elsewhere = none && e->zero && e->zero->stage > 0;
        if (!p->param || !(use ? none : state || elsewhere))
            return ps_fail(PS_EINVAL, "parameter %d lacks its values or a state, or is another use of a tensor and has "
                           "states of its own", i);
        const ps_param *before = i > 0 ? &params[i - 1] : NULL;
        if (before && before->tie == PS_TIE_USE && !use)
            return ps_fail(PS_EINVAL, "parameter %d must come before all other uses of parameters", i);
        if (before && before->tie != p->tie && use) before = NULL;
        if (p->vstage < 0 || p->number < 0 ||
            (before && (p->vstage < before->vstage || (p->vstage == before->vstage && p->number <= before->number))))
            return ps_fail(PS_EINVAL, "parameter %d is number %d of virtual stage %d, after a later one", i,
                           p->number, p->vstage);
        if (e->pipe_ranks && p->number >= e->n_numbers)
            return ps_fail(PS_EINVAL, "parameter %d is number %d of %d in the model", i, p->number, e->n_numbers);
        if (p->tie < PS_TIE_NONE || p->tie > PS_TIE_COPY || (p->tie != PS_TIE_NONE && !p->grad))
            return ps_fail(PS_EINVAL, "parameter %d has tie %d%s", i, p->tie,
                           p->grad ? "" : ", but no tensor for its gradient");
        if (p->tp < PS_TP_WHOLE || p->tp > PS_TP_PARTIAL || (p->tp != PS_TP_WHOLE && !e->tp))
            return ps_fail(PS_EINVAL, "parameter %d is of kind %d of tensor parallelism%s", i, p->tp,
                           e->tp ? "" : ", and the engine has no such ranks");
        if (use) continue;
        if (p->unit < 0 || p->unit >= n_units || p->group < 0 || p->group >= n_groups)
            return ps_fail(PS_EINVAL, "parameter %d is in unit %d and group %d, but there are %d units and %d groups",
                           i, p->unit, p->group, n_units, n_groups);
        if (!engine_holds(e, p->param->storage))
            return ps_fail(PS_EINVAL, "parameter %d is not in a chunk", i);
    }
    return 0;
}

static int32_t grad_chunk_of(const ps_engine *e, const param_rec *r)
{
    if (!r->place) return -1;
    return e->zero ? e->zero->table->chunk(e->zero, r->place->storage) : ps_storage_chunk(e->chunks, r->place->storage);
}

static void find_grad_chunks(ps_engine *e)
{
    for (int32_t u = 0; u < e->n_units; u++) {
        int32_t chunk = e->first[u] < e->first[u + 1] ? grad_chunk_of(e, &e->params[e->order[e->first[u]]]) : -1;
        for (int32_t i = 0; chunk >= 0 && i < e->n_params; i++)
            if ((e->params[i].unit == u) != (grad_chunk_of(e, &e->params[i]) == chunk)) chunk = -1;
        e->units[u].grad_chunk = chunk;
    }
}

static int make_sums(ps_engine *e, int64_t n)
{
    if (n == 0) return 0;
    for (int i = 0; i < (e->device == e->host ? 1 : 2); i++) {
        PS_TRY(ps_tensor_new(e->ctx, PS_F64, i == 0 ? e->device : e->host, 1, &n, &e->sums[i]));
        PS_TRY(ps_tensor_keep(e->sums[i]));
    }
    return 0;
}

int ps_engine_params(ps_ctx *ctx, int n, const ps_param *params, int n_units, int n_groups)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(check_params(e, n, params, n_units, n_groups));
    release_params(e);
    e->params = ps_alloc0(sizeof *e->params * (size_t)(n + 1));
    e->units = ps_alloc0(sizeof *e->units * (size_t)(n_units + 1));
    e->pending = ps_alloc0(sizeof *e->pending * (size_t)(n_units + 1));
    e->order = ps_alloc0(sizeof *e->order * (size_t)(n + 1));
    e->first = ps_alloc0(sizeof *e->first * (size_t)(n_units + 2));
    e->groups = ps_alloc0(sizeof *e->groups * (size_t)(n_groups + 1));
    e->squares = ps_alloc0(sizeof *e->squares * (size_t)(n + 1));
    if (!e->pipe_ranks) e->n_numbers = 0;
    for (int i = 0; i < n && !e->pipe_ranks; i++)
        if (params[i].number >= e->n_numbers) e->n_numbers = params[i].number + 1;
    e->by_number = ps_alloc0(sizeof *e->by_number * (size_t)(e->n_numbers + 1));
    if (!e->params || !e->units || !e->pending || !e->order || !e->first || !e->groups || !e->squares ||
        !e->by_number) {
        release_params(e);
        return ps_fail_nomem(sizeof *e->params * (size_t)n);
    }
    int made = make_sums(e, n);
    if (made == 0 && e->zero) made = e->zero->table->units(e->zero, n_units);
    if (made < 0) {
        release_params(e);
        return made;
    }
    e->n_units = n_units;
    e->n_groups = n_groups;
    for (int i = 0; i < n; i++) {
        param_rec *r = &e->params[e->n_params++];
        int rc = take_param(e, r, &params[i]);
        if (rc < 0) {
            release_params(e);
            return rc;
        }
        if (r->unit < 0) continue;
        if (e->units[r->unit].n++ == 0) e->units[r->unit].vstage = r->vstage;
        e->first[r->unit + 1]++;
        if (e->units[r->unit].vstage == r->vstage) continue;
        int32_t unit = r->unit, vstage = r->vstage, other = e->units[r->unit].vstage;
        release_params(e);
        return ps_fail(PS_EINVAL, "unit %d has parameters of virtual stages %d and %d; a unit must be in one virtual "
                       "stage", unit, other, vstage);
    }
    for (int u = 0; u < n_units; u++) e->first[u + 1] += e->first[u];
    for (int i = 0; i < n; i++) {                     /* a counting sort by unit; new_step later sets n_final to 0 */
        int32_t u = e->params[i].unit;
        if (u >= 0) e->order[e->first[u] + e->units[u].n_final++] = i;
        if (e->params[i].tie != PS_TIE_USE) e->params[i].param->managed = &e->params[i];
        e->params[i].param->storage->engine.watched = true;
    }
    find_grad_chunks(e);
    new_step(e);
    int rc = ties_find(e);
    if (rc == 0) rc = partial_make(e);
    if (rc < 0) release_params(e);
    else ps_chunks_trim(e->chunks);                       /* no more chunks are added, so free unused memory */
    return rc;
}

void engine_set_groups(ps_engine *e, const ps_update_group *groups)
{
    if (e->n_groups > 0) memcpy(e->groups, groups, sizeof *groups * (size_t)e->n_groups);
}

int ps_engine_set_on_device(ps_ctx *ctx, int unit, int on_device)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (unit < 0 || unit >= e->n_units)
        return ps_fail(PS_ERANGE, "there is no unit %d: the engine has %d units", unit, e->n_units);
    e->units[unit].on_device = on_device != 0;
    return 0;
}

int ps_engine_set_device(ps_ctx *ctx, ps_tensor *t, int device)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (device != e->device && device != e->host)
        return ps_fail(PS_EINVAL, "device %d is not a device of the engine", device);
    if (!engine_holds(e, t->storage))
        return ps_fail(PS_EINVAL, "only tensors in chunks can be used on another device of the engine");
    if (t->grad_ || t->node)
        return ps_fail(PS_ESTATE, "a tensor that has a gradient or a history cannot change its device");
    t->device_ = device;
    for (int32_t i = 0; i < e->n_params; i++) {
        const param_rec *r = &e->params[i];
        if (r->param == t && r->slot) r->slot->device_ = device;
        if (r->param == t && r->place) r->place->device_ = device;
    }
    return 0;
}

static int param_get(ps_ctx *ctx, int i, param_rec **out)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (i < 0 || i >= e->n_params)
        return ps_fail(PS_ERANGE, "there is no parameter %d: the engine has %d parameters", i, e->n_params);
    *out = &e->params[i];
    return 0;
}

int64_t ps_engine_param_steps(ps_ctx *ctx, int param)
{
    param_rec *r = NULL;
    PS_TRY(param_get(ctx, param, &r));
    return r->t;
}

int ps_engine_set_param_steps(ps_ctx *ctx, int param, int64_t steps)
{
    param_rec *r = NULL;
    PS_TRY(param_get(ctx, param, &r));
    if (steps < 0) return ps_fail(PS_EINVAL, "the number of updates cannot be %lld; it must be 0 or more",
                                  (long long)steps);
    r->t = steps;
    return 0;
}

int ps_engine_param_updated(ps_ctx *ctx, int param)
{
    param_rec *r = NULL;
    PS_TRY(param_get(ctx, param, &r));
    return r->updated;
}

int ps_engine_param_scale(ps_ctx *ctx, int param, double scale)
{
    param_rec *r = NULL;
    PS_TRY(param_get(ctx, param, &r));
    r->scale = scale;
    return 0;
}

/* -- opening and closing ------------------------------------------------------------------------------------------ */
static void engine_free(ps_engine *e)
{
    ps_ctx *ctx = e->ctx;
    const ps_step *step = e->step;
    release_params(e);
    ctx->engine.open = NULL;
    ctx->engine.hooks = NULL;
    ps_ctx_set_mem(ctx, NULL);
    if (e->zero) e->zero->table->close(e->zero);
    if (e->pipe_ranks) e->pipe_ranks->table->close(e->pipe_ranks);
    if (e->tp) e->tp->table->close(e->tp);
    ps_chunks_close(e->chunks);
    trace_free(e);
    ps_free(e);
    step_give_back(step);                  /* last, because the calls above use the step */
}

void ps_engine_close(ps_ctx *ctx)
{
    if (!ctx->engine.open) return;
    ps_walk_reset(ctx);
    step_leave(ctx->engine.open);
    engine_free(ctx->engine.open);
}

static void op_begins(ps_ctx *ctx)
{
    const ps_engine *e = ctx->engine.open;
    if (e->zero) e->zero->table->op_begins(e->zero);
    else ps_chunks_tick(e->chunks);
}

static void op_failed(ps_ctx *ctx)
{
    const ps_engine *e = ctx->engine.open;
    if (e->zero) e->zero->table->op_failed(e->zero);
}

static const ps_hooks hooks = {
    .close = ps_engine_close, .op_begins = op_begins, .op_failed = op_failed, .walk_begin = walk_begin,
    .grad_place = grad_place, .grad_final = grad_final,
};

int ps_engine_is_open(ps_ctx *ctx) { return ctx->engine.open != NULL; }

int ps_engine_open(ps_ctx *ctx, ps_step *step, const ps_chunk_config *config, const char *disk_folder)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    if (ctx->engine.open) return ps_fail(PS_ESTATE, "another engine is open; close it with model:close() first");
    if (step->engine || step->is.open)
        return ps_fail(PS_ESTATE, "another engine uses this step, or the step has begun without an engine");
    if (config->budget[2] > 0 && !disk_folder)
        return ps_fail(PS_EINVAL, "a disk budget is set, but no folder for the disk tier; set memory.disk.path");
    ps_engine *e = ps_alloc0(sizeof *e);
    if (!e) return ps_fail_nomem(sizeof *e);
    int rc = ps_chunks_new(step, ctx->n_devices, ctx->devices, ctx->mem.plain, config, disk_folder, &e->chunks);
    if (rc < 0) {
        ps_free(e);
        return rc;
    }
    e->ctx = ctx;
    e->device = config->device;
    e->host = config->host;
    e->step_trace = PS_TRACE_UNKNOWN;
    ctx->engine.open = e;
    step_join(e, step);
    ctx->engine.hooks = &hooks;
    ps_ctx_set_mem(ctx, ps_chunks_mem(e->chunks));
    return 0;
}
