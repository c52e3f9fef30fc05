/* SPDX-License-Identifier: BSD-3-Clause
 * This file enforces the order of the actions in a training step: forward, backward, reduce, norm, update. A step has a
 * table of its actions (struct ps_step in base/step.h). Only this file changes the table. A script gets an error if it
 * requests an action that is not due. If an engine is open, the step also records which chunks its actions use
 * (trace.c). A model without chunks has no engine. */
#include <string.h>
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "engine/engine.h"

static const char *const names[PS_ACT_COUNT] = { "nothing", "forward", "backward", "backward of inputs",
                                                 "backward of weights", "reduce", "norm", "update" };

enum { MAX_VSTAGES = 1 << 16 };

/* For each kind of action, the call in a script that requests the action. Errors contain this text. */
static const char *const calls[PS_ACT_COUNT] = {
    "", " (model(...) with gradients; use ps.no_grad for an evaluation)", " (model:backward)", "",
    "", "", " (optimizer:step())", " (optimizer:step())" };

/* -- life --------------------------------------------------------------------------------------------------------- */
int ps_step_new(ps_ctx *ctx, ps_step **out)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    ps_step *s = ps_alloc0(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    s->refs = 1;
    s->ctx = ctx;
    ctx->refs++;
    *out = s;
    return 0;
}

void ps_step_free(ps_step *s)
{
    if (!s || --s->refs > 0) return;
    ps_ctx_release(s->ctx);
    ps_free(s->actions);
    ps_free(s->first_walk);
    ps_free(s->stages);
    ps_free(s);
}

const ps_step_state *ps_step_look(const ps_step *s) { return &s->is; }

void step_join(ps_engine *e, ps_step *s)
{
    s->engine = e;
    s->refs++;
    e->step = e->ctx->step = s;
}

static void to_idle(ps_step *s)
{
    s->is = (ps_step_state){ .open = 0 };
    s->at = -1;
    s->pass++;
}

void step_leave(ps_engine *e)
{
    ps_step *s = (ps_step *)(uintptr_t)e->step;            /* the step is const in all other files */
    ps_dry_end(e->ctx);
    e->ctx->step = &ps_step_idle;
    s->dry = NULL;
    s->engine = NULL;
    to_idle(s);
}

void step_give_back(const ps_step *step) { ps_step_free((ps_step *)(uintptr_t)step); }

/* -- the table ---------------------------------------------------------------------------------------------------- */
static ps_action due(const ps_step *s)
{
    return s->cursor < s->n_actions ? s->actions[s->cursor] : (ps_action){ PS_ACT_NONE, 0, 0 };
}

static bool adds(const ps_action *a) { return a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_WEIGHT; }
static bool walks(const ps_action *a) { return a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT; }

static int check_table(const ps_step_config *c, int32_t *n_vstages, int32_t *n_micro, bool *measures)
{
    *n_vstages = *n_micro = 0;
    *measures = false;
    for (int32_t i = 0; i < c->n_actions; i++) {
        const ps_action *a = &c->actions[i];
        if (a->kind <= PS_ACT_NONE || a->kind >= PS_ACT_COUNT || a->vstage < 0 || a->vstage >= MAX_VSTAGES ||
            a->micro < 0 || a->micro >= c->n_actions)
            return ps_fail(PS_EINVAL, "action %d of the step has kind %d, virtual stage %d and micro-batch %d; one of "
                           "these is out of range", i, a->kind, a->vstage, a->micro);
        if (a->vstage >= *n_vstages) *n_vstages = a->vstage + 1;
        if ((walks(a) || adds(a)) && *measures)
            return ps_fail(PS_EINVAL, "action %d of the step is a backward after the norm of the gradients; a norm "
                           "must follow all backwards", i);
        if (adds(a)) ++*n_micro;
        if (a->kind == PS_ACT_NORM) *measures = true;
    }
    return *n_micro > 0 ? 0 : ps_fail(PS_EINVAL, "a step of %d actions has no backward; it needs at least one",
                                      c->n_actions);
}

static int out_of_order(const ps_step_config *c, int32_t at)
{
    const ps_action *a = &c->actions[at];
    return ps_fail(PS_EINVAL, "action %d of the step adds the gradients of micro-batch %d, virtual stage %d, out of "
                   "turn: weight gradients that are put off are added in the order of their backwards, and before "
                   "others", at, a->micro, a->vstage);
}

/* Checks that each virtual stage runs its WEIGHT actions in the order of its INPUT actions, and runs no BACKWARD action
 * between an INPUT action and its WEIGHT action. Otherwise the order in which gradients are added would depend on the
 * table. Sets *ahead to true in two cases:
 *   - The table has INPUT actions, which defer weight gradients.
 *   - A forward of a virtual stage begins before the backward of the preceding forward of the same virtual stage. */
static int check_order(ps_step *s, const ps_step_config *c, bool *ahead)
{
    *ahead = false;
    for (int32_t i = 0; i < c->n_actions; i++) {
        const ps_action *a = &c->actions[i];
        step_vstage *v = &s->stages[a->vstage];
        if (a->kind == PS_ACT_INPUT) v->put_off++, *ahead = true;
        if (a->kind == PS_ACT_FORWARD && ++v->in_flight > 1) *ahead = true;
        if (a->kind == PS_ACT_BACKWARD) v->in_flight--;
        if (a->kind == PS_ACT_BACKWARD && v->put_off > 0) return out_of_order(c, i);
        if (a->kind != PS_ACT_WEIGHT) continue;
        if (v->put_off-- == 0) return out_of_order(c, i);
        while (c->actions[v->next].kind != PS_ACT_INPUT || c->actions[v->next].vstage != a->vstage) v->next++;
        if (c->actions[v->next++].micro != a->micro) return out_of_order(c, i);
    }
    for (int32_t i = 0; i < c->n_actions; i++)
        if (s->stages[c->actions[i].vstage].put_off > 0)
            return ps_fail(PS_EINVAL, "the step defers weight gradients of virtual stage %d and never computes them",
                           c->actions[i].vstage);
    return 0;
}

static int take_table(ps_step *s, const ps_step_config *c)
{
    int32_t n_vstages, n_micro;
    bool measures, ahead;
    PS_TRY(check_table(c, &n_vstages, &n_micro, &measures));
    PS_TRY(ps_grow(s->stages, s->stages_capacity, n_vstages));
    memset(s->stages, 0, sizeof *s->stages * (size_t)n_vstages);
    PS_TRY(check_order(s, c, &ahead));
    PS_TRY(ps_grow(s->actions, s->capacity, c->n_actions));
    PS_TRY(ps_grow(s->first_walk, s->first_walk_capacity, c->n_actions));
    memcpy(s->actions, c->actions, sizeof *s->actions * (size_t)c->n_actions);
    for (int32_t v = 0; v < n_vstages; v++) s->stages[v].last = c->n_actions;
    for (int32_t m = 0; m < c->n_actions; m++) s->first_walk[m] = -1;
    for (int32_t i = 0; i < c->n_actions; i++) {
        const ps_action *a = &s->actions[i];
        if (adds(a)) s->stages[a->vstage].last = i;
        if (walks(a) && s->first_walk[a->micro] < 0) s->first_walk[a->micro] = i;
    }
    s->n_actions = c->n_actions;
    s->n_vstages = n_vstages;
    s->measures = measures;
    s->ahead = ahead;
    s->cursor = s->collected = 0;
    s->is = (ps_step_state){ .open = 1, .due = s->actions[0], .n_micro = n_micro };
    s->how = (ps_action_how){ .scale = 1 };
    return 0;
}

/* -- begin and end ------------------------------------------------------------------------------------------------ */
static int dry_begin(ps_step *s)
{
    ps_engine *e = s->engine;
    ps_ctx *ctx = s->ctx;
    if (!e) return ps_fail(PS_ESTATE, "a dry run needs a model whose parameters are in chunks");
    for (int32_t i = 0; i < e->n_params; i++)
        if (e->params[i].param->grad_)
            return ps_fail(PS_ESTATE, "a dry run cannot begin while there are gradients; call optimizer:zero_grad()");
    if (e->zero) e->zero->table->forget(e->zero);
    PS_TRY(ps_dry_begin(ctx));
    s->dry = ctx->dry.mem;
    for (int d = 0; d < ctx->n_devices; d++) ctx->dry.mem->table->trim(ctx->dry.mem, d, true);
    return 0;
}

static void dry_end(ps_step *s)
{
    if (s->dry) ps_dry_end(s->ctx);
    s->dry = NULL;
}

/* Notifies the chunk manager and ZeRO that an action begins, or that the step ends. */
static void pass_began(ps_step *s)
{
    ps_engine *e = s->engine;
    if (!e) return;
    ps_chunks_pass(e->chunks);
    if (e->zero) e->zero->table->pass(e->zero);
}

int ps_step_begin(ps_step *s, const ps_step_config *c)
{
    if (s->ctx->engine.suspended.on) return ps_fail_suspended("another step");
    if (s->is.open) return ps_fail(PS_ESTATE, "a step is already under way");
    if (s->engine && s->ctx->engine.open != s->engine) return ps_fail(PS_ESTATE, "the step's engine was closed");
    if (c->dry) PS_TRY(dry_begin(s));
    int rc = take_table(s, c);
    s->at = -1;
    s->pass++;
    s->first_op = s->ctx->rng.op;
    s->noted = c->trace != PS_TRACE_NONE;
    if (rc == 0 && s->engine && s->noted) rc = trace_begin(s->engine, c->trace);
    if (rc == 0) {
        ps_record_step_begin(c->dry, c->trace != PS_TRACE_UNKNOWN);
        return 0;
    }
    dry_end(s);
    to_idle(s);
    return rc;
}

static void end_now(ps_step *s)
{
    dry_end(s);
    ps_record_action((ps_action){ .kind = PS_ACT_NONE });
    ps_record_step_end();
    to_idle(s);
    pass_began(s);
}

static void action_over(ps_step *s)
{
    s->is.now.kind = PS_ACT_NONE;
    if (s->engine) ties_turn(s->engine, -1);
    ps_record_action(s->is.now);
}

static int give_up(ps_step *s)
{
    bool open = s->is.open, dry = s->dry != NULL;
    int rc = 0;
    ps_walk_reset(s->ctx);
    action_over(s);
    if (s->engine && !dry) rc = engine_drop_grads(s->engine);
    if (!open) return rc;
    if (s->engine && s->noted) trace_end(s->engine, NULL);
    if (s->noted && !dry) s->ctx->rng.op = s->first_op;
    end_now(s);
    return rc;
}

int ps_step_end(ps_step *s, int32_t *trace)
{
    int rc = 0;
    if (s->ctx->engine.suspended.on) return ps_fail_suspended("the end of its step");
    if (!trace) return give_up(s);
    *trace = -1;
    if (!s->is.open) return ps_fail(PS_ESTATE, "no step is under way, so none can end");
    if (s->is.now.kind != PS_ACT_NONE || s->cursor < s->n_actions)
        return ps_fail(PS_ESTATE, "the step cannot end before its %s",
                       names[s->is.now.kind != PS_ACT_NONE ? s->is.now.kind : due(s).kind]);
    if (s->engine && s->noted) rc = trace_end(s->engine, trace);
    end_now(s);
    return rc;
}

/* -- actions ------------------------------------------------------------------------------------------------------ */
static int refuse(const ps_step *s, int kind)
{
    static const char more[] = "; for several backwards in a step write gradient_accumulation_steps into the "
                               "configuration";
    ps_action a = due(s);
    if (a.kind == PS_ACT_NONE)
        return ps_fail(PS_ESTATE, "the step expects its end, but got %s%s", names[kind], calls[kind]);
    if (a.kind > PS_ACT_WEIGHT)
        return ps_fail(PS_ESTATE, "the step expects its %s%s, but got %s%s%s", names[a.kind], calls[a.kind],
                       names[kind], calls[kind], kind == PS_ACT_FORWARD ? more : "");
    return ps_fail(PS_ESTATE, "the step expects the %s of micro-batch %d%s, but got %s%s", names[a.kind], a.micro + 1,
                   calls[a.kind], names[kind], calls[kind]);
}

static int add_norm(ps_step *s)
{
    PS_TRY(ps_grow(s->actions, s->capacity, s->n_actions + 1));
    memmove(s->actions + s->cursor + 1, s->actions + s->cursor,
            sizeof *s->actions * (size_t)(s->n_actions - s->cursor));
    s->actions[s->cursor] = (ps_action){ .kind = PS_ACT_NORM };
    s->n_actions++;
    s->is.due = due(s);
    return 0;
}

/* Returns true if a norm can be inserted into the table. An update must be due, the table must have no norm, no update
 * must have begun (an update frees gradients), and the step must not be a dry run. */
static bool takes_norm(const ps_step *s)
{
    return due(s).kind == PS_ACT_UPDATE && s->actions[s->cursor - 1].kind != PS_ACT_NORM && !s->is.updating && !s->dry;
}

/* Sets *at to the index of the requested action in the table. A script may request the action that is due. If a
 * backward is due, the script may repeat the forward of this backward. If a forward is due, the script may skip it and
 * request its backward. */
static int place_of(const ps_step *s, int kind, int32_t *at)
{
    ps_action a = due(s);
    *at = s->cursor;
    if (a.kind == kind) return 0;
    if (kind == PS_ACT_FORWARD && walks(&a))
        for (int32_t i = s->cursor; i-- > 0;) {
            const ps_action *f = &s->actions[i];
            if (f->kind != PS_ACT_FORWARD || f->vstage != a.vstage || f->micro != a.micro) continue;
            *at = i;
            return 0;
        }
    if (kind == PS_ACT_BACKWARD && a.kind == PS_ACT_FORWARD && s->cursor + 1 < s->n_actions) {
        const ps_action *b = &s->actions[s->cursor + 1];
        *at = s->cursor + 1;
        if (b->kind == PS_ACT_BACKWARD && b->vstage == a.vstage && b->micro == a.micro) return 0;
    }
    return refuse(s, kind);
}

static int check_how(const ps_step *s, int32_t at, const ps_action_how *how)
{
    const ps_action *a = &s->actions[at];
    if (how->overlap && s->measures)
        return ps_fail(PS_EINVAL, "the norm is known only after backward, so updates cannot overlap backward in this "
                       "step");
    if (how->overlap && (!adds(a) || s->stages[a->vstage].last != at))
        return ps_fail(PS_EINVAL, "only the last backward of a virtual stage can update parameters");
    if (how->overlap && s->n_vstages > 1 && s->engine && s->engine->zero && s->engine->zero->ranks > 1)
        return ps_fail(PS_EINVAL, "updates cannot overlap backward if several ranks train the %d virtual stages of "
                       "this rank", s->n_vstages);
    if (how->overlap && s->engine && ties_any(s->engine))
        return ps_fail(PS_EINVAL, "updates cannot overlap backward where parameters of other virtual stages are tied");
    if (how->slot && s->stages[a->vstage].last != at)
        return ps_fail(PS_EINVAL, "gradients can replace parameters only in the last backward of a virtual stage, but "
                       "this backward is of micro-batch %d", a->micro);
    if (s->engine && how->groups && how->n_groups != s->engine->n_groups)
        return ps_fail(PS_ERANGE, "%d groups of settings were passed, but the optimizer has %d groups", how->n_groups,
                       s->engine->n_groups);
    return 0;
}

/* Returns how full the first tier is: 2 if less than an eighth of its budget is free, 1 if less than half is free, and
 * 0 otherwise. */
static int crowded(const ps_step *s)
{
    ps_tier_info tier;
    if (!s->engine || s->dry) return 0;
    ps_tier_get(s->engine->chunks, 0, &tier);
    if (tier.budget == 0 || tier.free >= tier.budget / 2) return 0;
    return tier.free < tier.budget / 8 ? 2 : 1;
}

/* Returns 1 if Lua's garbage collector should run now. Only the collector frees small tensors, and it cannot run during
 * a walk. A plan reserves memory for the small tensors of PS_UNCOLLECTED micro-batches. Therefore, if the first tier is
 * at least half full, the collector runs once per PS_UNCOLLECTED micro-batches. If the first tier is nearly full, the
 * collector runs at every call, because kernels may need workspace that a dry run did not detect. A simulated machine
 * needs no such workspace. */
int ps_step_collects(ps_step *s)
{
    int level = crowded(s);
    if (level == 0) return 0;
    if ((level == 1 || s->ctx->devices[s->engine->host]->pretends) && s->is.micro < s->collected + PS_UNCOLLECTED)
        return 0;
    s->collected = s->is.micro;
    return 1;
}

int ps_step_next(ps_step *s, int kind, const ps_action_how *how)
{
    static const ps_action_how none = { .scale = 1 };
    int32_t at;
    if (s->ctx->engine.suspended.on) return ps_fail_suspended("an action of its step");
    if (kind <= PS_ACT_NONE || kind >= PS_ACT_COUNT) return ps_fail(PS_EINVAL, "there is no action %d", kind);
    if (!s->is.open) return ps_fail(PS_ESTATE, "%s was called, but no step is under way", names[kind]);
    if (s->is.now.kind != PS_ACT_NONE)
        return ps_fail(PS_ESTATE, "%s was called within the step's %s", names[kind], names[s->is.now.kind]);
    if (kind == PS_ACT_NORM && takes_norm(s)) PS_TRY(add_norm(s));
    PS_TRY(place_of(s, kind, &at));
    if (!how) how = &none;
    PS_TRY(check_how(s, at, how));
    if (s->engine && (kind == PS_ACT_NORM || kind == PS_ACT_UPDATE)) {
        PS_TRY(ties_sum(s->engine));
        PS_TRY(partial_sum(s->engine));
    }
    const ps_update_group *groups = how->groups;
    if (s->engine && groups) engine_set_groups(s->engine, groups);
    if (kind != PS_ACT_REDUCE) s->how = *how;             /* a reduction keeps the settings of its backward */
    s->how.groups = NULL;
    s->is.now = s->actions[at];
    if (s->engine && (walks(&s->is.now) || adds(&s->is.now))) ties_turn(s->engine, s->is.now.vstage);
    ps_record_action(s->is.now);
    if (kind == PS_ACT_FORWARD) {
        s->forward_op = s->ctx->rng.op, s->forward_offset = s->ctx->rng.offset;
        if (how->numbered) s->ctx->rng.op = how->first_op, s->ctx->rng.sample = how->sample;
    }
    if (how->overlap || kind == PS_ACT_UPDATE) s->is.updating = 1;
    if (at == s->at) return 0;
    s->at = at;
    s->pass++;
    if (kind != PS_ACT_REDUCE) pass_began(s);             /* a reduction reads no values */
    return 0;
}

/* Returns true if a later reduction in the table completes the sums that the current action has added to. */
static bool reduction_follows(const ps_step *s)
{
    for (int32_t i = s->at + 1; i < s->n_actions; i++) {
        const ps_action *a = &s->actions[i];
        if (a->vstage != s->is.now.vstage) continue;
        if (adds(a)) return false;
        if (a->kind == PS_ACT_REDUCE) return true;
    }
    return false;
}

int ps_step_done(ps_step *s)
{
    int kind = s->is.now.kind;
    ps_engine *e = s->engine;
    bool added = adds(&s->is.now);
    if (kind == PS_ACT_NONE) return ps_fail(PS_ESTATE, "no action of the step is under way");
    if (e && added) PS_TRY(engine_backward_done(e));
    if (e && (kind == PS_ACT_REDUCE || (added && !reduction_follows(s)))) PS_TRY(engine_gradients_whole(e));
    if (added) s->is.micro++;
    /* Add the weight of a micro-batch only once. */
    if (s->first_walk[s->is.now.micro] == s->at) s->is.weight += s->how.weight;
    action_over(s);
    if (s->at >= s->cursor) s->cursor = s->at + 1;
    s->is.due = due(s);
    return 0;
}

void step_suspend(ps_engine *e, bool on) { ((ps_step *)(uintptr_t)e->step)->suspended = on; }

void ps_step_abandon(ps_step *s)
{
    if (s->is.now.kind == PS_ACT_FORWARD) s->ctx->rng.op = s->forward_op, s->ctx->rng.offset = s->forward_offset;
    action_over(s);
}
