/* SPDX-License-Identifier: BSD-3-Clause
 * The backward walk. The walk visits the nodes of the tape by descending number and runs their gradient rules. A rule
 * computes the gradients of a node's inputs. They are summed in the nodes that made these inputs.
 *
 * The walk stops at nodes for which its caller has work to do, and returns a number that identifies the work. Such
 * nodes are recompute segments (ps_backward_splice), functions of the script (ps_call_done) and nodes with hooks
 * (ps_hooks_done). ps_backward_next() continues the walk. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "grad/tape.h"

/* -- the queue ----------------------------------------------------------------------------------------------------- */
static int enqueue(ps_walk *w, ps_node *node)
{
    if (node->queued) return 0;
    PS_TRY(ps_grow(w->heap, w->capacity, w->n + 1));
    node->queued = true;
    node->refs++;
    int i = w->n++;
    for (; i > 0 && w->heap[(i - 1) / 2]->seq < node->seq; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = node;
    return 0;
}

static ps_node *dequeue(ps_walk *w)
{
    ps_node *top = w->heap[0], *last = w->heap[--w->n];
    int i = 0;
    for (int child; (child = 2 * i + 1) < w->n; i = child) {
        if (child + 1 < w->n && w->heap[child + 1]->seq > w->heap[child]->seq) child++;
        if (w->heap[child]->seq <= last->seq) break;
        w->heap[i] = w->heap[child];
    }
    if (w->n > 0) w->heap[i] = last;
    top->queued = false;
    return top;
}

static int run_one(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *a, ps_tensor *b, ps_tensor **out)
{
    ps_tensor *in[2] = { a, b }, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_apply_all(ctx, op, n, in, attrs, all));
    *out = all[0];
    return 0;
}

static int cast_to(ps_ctx *ctx, ps_tensor *t, int dtype, ps_tensor **out)
{
    ps_attrs_cast attrs = { .dtype = dtype };
    return run_one(ctx, PS_OP_cast, &attrs, 1, t, NULL, out);
}

/* The next functions own `grad`, which is a held reference, even if they fail. The scope of `grad` may have ended. */
/* Used only in walks that have targets. */
static int add_to_target(ps_ctx *ctx, target *to, ps_tensor *grad)
{
    ps_attrs_add none = { 0 };
    ps_tensor *sum = NULL;
    int dtype = to ? to->t->dtype_ : grad->dtype_;
    int rc = grad->dtype_ != dtype ? cast_to(ctx, grad, dtype, &sum) : 0;
    if (sum) {
        ps_storage_hold(sum->storage);
        ps_tensor_unhold(grad);
        grad = sum;
        sum = NULL;
    }
    if (rc == 0 && to && to->sum) {
        rc = run_one(ctx, PS_OP_add, &none, 2, to->sum, grad, &sum);
        if (rc == 0) ps_storage_hold(sum->storage);
        ps_tensor_unhold(rc == 0 ? to->sum : NULL);
    } else if (rc == 0 && to) {
        sum = ps_tensor_hold(grad);
    }
    if (rc == 0 && to) to->sum = sum;
    ps_tensor_unhold(grad);
    return rc;
}

int tape_add_to_leaf(ps_ctx *ctx, ps_tensor *leaf, ps_tensor *grad)
{
    int rc = 0;
    ps_tensor *made = NULL, *place = NULL;
    if (ctx->tape.walk->seeks) return add_to_target(ctx, targets_leaf(ctx->tape.walk, leaf), grad);
    if (ctx->step->dry && !leaf->managed) {              /* a leaf of the script gets no gradient in a dry run */
        ps_tensor_unhold(grad);
        return 0;
    }
    if (leaf->managed && !leaf->grad_)
        rc = ctx->engine.hooks->grad_place(ctx, leaf, &place);
    if (rc == 0 && place) {
        ps_attrs_copy_ none = { 0 };
        if (grad != place) rc = run_one(ctx, PS_OP_copy_, &none, 2, place, grad, &made);
        if (rc == 0) rc = ps_tensor_set_grad(leaf, place);
    } else if (rc == 0 && leaf->grad_) {
        ps_attrs_axpy_ attrs = { .alpha = 1 };
        rc = run_one(ctx, PS_OP_axpy_, &attrs, 2, leaf->grad_, grad, &made);
    } else if (rc == 0) {
        ps_attrs_contiguous none = { 0 };
        if (grad->dtype_ != tape_leaf_dtype(leaf)) rc = cast_to(ctx, grad, tape_leaf_dtype(leaf), &made);
        else if (!ps_tensor_exclusive(grad)) rc = run_one(ctx, PS_OP_contiguous, &none, 1, grad, NULL, &made);
        else ps_tensor_retain(made = grad);
        if (rc == 0) rc = ps_tensor_set_grad(leaf, made);
    }
    if (made) ps_tensor_release(made);
    ps_tensor_unhold(grad);
    return rc;
}

static int add_to_node(ps_ctx *ctx, ps_walk *w, ps_node *node, int out, ps_tensor *grad)
{
    ps_tensor **slot = &node->dout[out];
    bool waits = node->queued;
    int rc = enqueue(w, node);
    if (rc == 0 && node->op == LEAF && !waits) ps_tensor_retain(node->edges[0].leaf);
    if (rc == 0 && node->passed) rc = tape_passed_already(node);
    if (rc < 0) {
        ps_tensor_unhold(grad);
        return rc;
    }
    if (!*slot) {
        *slot = grad;
        return 0;
    }
    ps_tensor *sum = NULL;
    if (ps_tensor_exclusive(*slot)) {
        ps_attrs_axpy_ attrs = { .alpha = 1 };
        rc = run_one(ctx, PS_OP_axpy_, &attrs, 2, *slot, grad, &sum);
        if (sum) ps_tensor_release(sum);
    } else {
        ps_attrs_add none = { 0 };
        rc = run_one(ctx, PS_OP_add, &none, 2, *slot, grad, &sum);
        if (rc == 0) {
            ps_tensor_unhold(*slot);
            ps_storage_hold(sum->storage);
            *slot = sum;
        }
    }
    ps_tensor_unhold(grad);
    return rc;
}

int tape_deliver(ps_ctx *ctx, ps_walk *w, ps_node *node, int i, ps_tensor *grad)
{
    edge *e = &node->edges[i];
    const ps_meta *want = &node->in_meta[i];
    bool fits = grad->ndim == want->ndim && !memcmp(grad->shape_, want->shape, sizeof(int64_t) * (size_t)want->ndim);
    if (!fits) {
        char x[160], y[160];
        int rc = ps_fail(PS_ESTATE, "the gradient rule of %s returned shape %s for input %d of shape %s",
                         tape_name(node), ps_shape_text(grad->ndim, grad->shape_, x, sizeof x), i,
                         ps_shape_text(want->ndim, want->shape, y, sizeof y));
        ps_tensor_unhold(grad);
        return rc;
    }
    int out;
    ps_node *sum = tape_sum_node(e, &out);
    if (!sum) return tape_add_to_leaf(ctx, e->leaf, grad);
    int dtype = e->leaf ? sum->in_meta[0].dtype : want->dtype;
    if (grad->dtype_ != dtype) {
        ps_tensor *cast;
        int rc = cast_to(ctx, grad, dtype, &cast);
        ps_tensor_unhold(grad);
        if (rc < 0) return rc;
        ps_storage_hold(cast->storage);
        grad = cast;
    }
    return add_to_node(ctx, w, sum, out, grad);
}

/* Whether the walk defers none, some or all of the gradients of a node. */
typedef enum parts { NONE_LATER, SOME_LATER, ALL_LATER } parts;

static parts put_off(const ps_walk *w, const ps_node *node)
{
    int now = 0, later = 0;
    for (int i = 0; w->put_off >= 0 && i < node->n_in; i++) {
        const edge *e = &node->edges[i];
        if (tape_is_later(e)) later++;
        else if (e->node) now++;
    }
    return later == 0 ? NONE_LATER : now > 0 ? SOME_LATER : ALL_LATER;
}

bool tape_puts_off(const ps_walk *w, const ps_node *node) { return put_off(w, node) != NONE_LATER; }

/* Reports to the engine that the walk has passed a node with leaves. During an INPUT action, the engine only records
 * which virtual stages use these leaves. */
static int leaves_final(ps_ctx *ctx, const ps_node *node)
{
    if (ctx->tape.walk->seeks) return 0;
    for (int i = 0; i < node->n_in; i++) if (node->edges[i].leaf) PS_TRY(tape_leaf_final(ctx, node->edges[i].leaf));
    return 0;
}

/* Tells anomaly mode that the gradient of the node's op is computed next. If `node` is NULL, no gradient is computed
 * next. */
void tape_watch(ps_ctx *ctx, const ps_node *node)
{
    if (node) ps_anomaly_in_backward(ctx, node->op, node->place, node->module);
    else ps_anomaly_in_backward(ctx, -1, 0, 0);
}

/* Copies the gradient of an output to its holder. A copy is necessary, because rules may add to the original. */
int tape_give_holder(ps_ctx *ctx, ps_node *node)
{
    ps_tensor *grad = node->dout[node->holder_out], *copy = NULL;
    ps_attrs_contiguous none = { 0 };
    if (!grad || ctx->step->dry) return 0;
    PS_TRY(run_one(ctx, PS_OP_contiguous, &none, 1, grad, NULL, &copy));
    int rc = ps_tensor_set_grad(node->holder, copy);
    ps_tensor_release(copy);
    return rc;
}

int tape_hand_on(ps_ctx *ctx, ps_walk *w, ps_node *node, ps_tensor **din, bool later, bool split)
{
    int rc = 0;
    node->passed = !w->keeps;
    tape_uncount(node);
    if (node->passed) hooks_end(node);
    if (later) {
        rc = weights_put_off(w, node, split, din);
    } else {                                         /* must be done before delivery, because delivery checks whether a
                                                      * gradient has several owners */
        for (int i = 0; i < node->n_out; i++) tape_let_go(&node->dout[i]);
        if (w->keeps) tape_let_go(&node->again);
        else weights_release(node);
    }
    for (int i = 0; i < node->n_in; i++) {
        const edge *e = &node->edges[i];
        if (!din[i]) continue;
        if (rc == 0 && (e->node || e->leaf) && targets_want(w, e)) rc = tape_deliver(ctx, w, node, i, din[i]);
        else ps_tensor_unhold(din[i]);
    }
    tape_watch(ctx, NULL);
    if (rc == 0) rc = leaves_final(ctx, node);
    if (rc < 0) ps_error_prefix("in backward: ");
    return rc;
}

/* Runs the rule of one node. Passes the results to the nodes that made the inputs. */
static int tape_pass(ps_ctx *ctx, ps_walk *w, ps_node *node)
{
    if (node->holder) PS_TRY(tape_give_holder(ctx, node));
    parts later = put_off(w, node);
    if (later == ALL_LATER) {
        node->passed = true;
        tape_uncount(node);
        hooks_end(node);
        int rc = weights_put_off(w, node, false, NULL);
        return rc < 0 ? rc : leaves_final(ctx, node);
    }
    ps_tensor *din[PS_MAX_IN] = { NULL };
    bool split = later == SOME_LATER && ps_op(node->op)->flags & PS_OPF_SPLIT;
    ps_grad g = { .ctx = ctx, .node = node, .attrs = node->attrs.bytes, .n_in = node->n_in, .n_out = node->n_out,
                  .phase = split ? PS_GRAD_INPUTS : PS_GRAD_WHOLE, .puts_off = later == SOME_LATER,
                  .dout = node->dout, .din = din };
    int32_t module = ps_record_module(node->module);
    tape_watch(ctx, node);
    atomic_store_explicit(&ps_record_at.backward, 1, memory_order_relaxed);
    int rc = ps_op(node->op)->grad(&g);
    atomic_store_explicit(&ps_record_at.backward, 0, memory_order_relaxed);
    ps_record_module(module);
    for (int i = 0; i < node->n_in; i++) if (din[i]) ps_storage_hold(din[i]->storage);
    while (g.n_temps > 0) ps_tensor_release(g.temps[--g.n_temps]);
    if (rc == 0) return tape_hand_on(ctx, w, node, din, later == SOME_LATER, split);
    node->passed = true;
    tape_uncount(node);
    tape_release_all(node);
    for (int i = 0; i < node->n_in; i++) ps_tensor_unhold(din[i]);
    tape_watch(ctx, NULL);
    ps_error_prefix("in backward: ");
    return rc;
}

/* -- visits -------------------------------------------------------------------------------------------------------- */
int tape_stop(ps_walk *w, ps_node *node, int64_t number, int64_t *stopped)
{
    w->stopped = node;
    *stopped = number;
    return 1;
}

bool tape_is_due(const ps_walk *w, int64_t seq) { return w->hooks_ran || (w->n > 0 && w->heap[0]->seq > seq); }

/* Ends the walk at a node that leads to no target. Another walk can still pass the node. */
static int leave_out(ps_node *node)
{
    tape_uncount(node);
    for (int i = 0; i < node->n_out; i++) tape_let_go(&node->dout[i]);
    return 0;
}

static int visit(ps_ctx *ctx, ps_walk *w, ps_node *node, bool hooks_ran, int64_t *stopped)
{
    if (node->passed) return tape_passed_already(node);
    if (node->hooks && !hooks_ran) {
        w->at_hooks = true;
        return tape_stop(w, node, node->hooks, stopped);
    }
    if (node->op == LEAF) return leaf_pass(ctx, w, node);
    if (w->seeks) {
        PS_TRY(targets_take(w, node));
        if (!node->leads) return leave_out(node);
    }
    if (node->op == SEGMENT)
        for (int i = 0; i < node->n_in; i++) PS_TRY(tape_check_version(node, &node->saved_in[i]));
    if (node->op == CALL) atomic_store_explicit(&ps_record_at.backward, 1, memory_order_relaxed);
    if (tape_is_callers(node)) return tape_stop(w, node, node->segment, stopped);
    if (node->op != BOUNDARY) return tape_pass(ctx, w, node);
    node->passed = true;                              /* the gradients of a boundary stay in the node until
                                                       * ps_boundary_take() returns them */
    hooks_end(node);
    return 0;
}

int tape_visit(ps_ctx *ctx, ps_walk *w, int64_t *stopped)
{
    bool hooks_ran = w->hooks_ran;
    ps_node *node = hooks_ran ? w->stopped : dequeue(w);
    if (hooks_ran) {
        w->stopped = NULL;
        w->at_hooks = w->hooks_ran = false;
    }
    int rc = visit(ctx, w, node, hooks_ran, stopped);
    if (rc < 0) tape_give_up(node);
    if (rc <= 0) ps_node_release(node);
    return rc;
}

static int seed_gradient(ps_ctx *ctx, ps_tensor *loss, ps_tensor *gradient, ps_tensor **out)
{
    char x[160], y[160];
    if (gradient) {
        if (!ps_same_shape(loss, gradient))
            return ps_fail(PS_EINVAL, "backward: the gradient has shape %s, but the tensor has shape %s",
                           ps_shape_text(gradient->ndim, gradient->shape_, x, sizeof x),
                           ps_shape_text(loss->ndim, loss->shape_, y, sizeof y));
        if (gradient->dtype_ != loss->dtype_) return cast_to(ctx, gradient, loss->dtype_, out);
        return ps_tensor_detach(gradient, out);
    }
    if (loss->numel_ != 1)
        return ps_fail(PS_EINVAL,
                       "backward from a tensor of shape %s needs a gradient of that shape; only for a single value "
                       "can it be omitted",
                       ps_shape_text(loss->ndim, loss->shape_, x, sizeof x));
    ps_meta m = ps_tensor_meta(loss);
    m.permuted = false;
    PS_TRY(ps_tensor_new_meta(ctx, loss->device_, &m, out));
    ps_attrs_fill_ attrs = { .value = 1 };
    ps_tensor *same;
    int rc = run_one(ctx, PS_OP_fill_, &attrs, 1, *out, NULL, &same);
    ps_tensor_release(*out);
    if (rc < 0) *out = NULL;
    return rc;
}

/* Passes grad (held), the gradient of `to`, to the node that made `to`, or to `to` itself if it is a leaf. `seq` is the
 * number of the node that the walk has reached. */
static int give_to(ps_ctx *ctx, ps_walk *w, ps_tensor *to, ps_tensor *grad, int64_t seq)
{
    if (w->put_off >= 0 && (!to->node || to->node->side)) return weights_relay(w, to, grad, seq);
    int out;
    edge e = to->node ? (edge){ .node = to->node, .out = to->node_out } : (edge){ .leaf = to };
    ps_node *sum = tape_sum_node(&e, &out);
    return sum ? add_to_node(ctx, w, sum, out, grad) : tape_add_to_leaf(ctx, to, grad);
}

/* Passes each seed (a held reference) to the node of its root. After a failure, the remaining seeds are released. */
static int plant(ps_ctx *ctx, ps_walk *w, int n, ps_tensor *const *roots, ps_tensor *const *seeds)
{
    int rc = 0;
    for (int i = 0; i < n; i++) {
        if (rc < 0) ps_tensor_unhold(seeds[i]);
        else rc = give_to(ctx, w, roots[i], seeds[i], INT64_MAX);
    }
    return rc;
}

static int begin_walk(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients)
{
    ps_walk *w = ctx->tape.walk;
    ps_tensor *seeds[PS_MAX_ROOTS];
    int rc = 0, made = 0;
    while (rc == 0 && made < n) {
        rc = seed_gradient(ctx, roots[made], gradients ? gradients[made] : NULL, &seeds[made]);
        if (rc == 0) ps_storage_hold(seeds[made++]->storage);
    }
    w->put_off = w->processed = -1;
    if (rc == 0 && ctx->step->is.now.kind == PS_ACT_INPUT) rc = weights_open(ctx, w);
    if (rc == 0) {
        w->active = true;
        w->id = ctx->tape.next_seq++;
        w->managed = false;
        for (int i = 0; i < w->n_targets && w->seeks; i++)
            if (w->targets[i].t->node) w->targets[i].t->node->target = w->id;
        for (int i = 0; i < n; i++) {                     /* all nodes are counted before the first gradient is passed
                                                           * on */
            w->managed = w->managed || roots[i]->managed;
            tape_count_from(w, roots[i]->node ? roots[i]->node : roots[i]->hook);
            if (rc == 0 && w->seeks) rc = targets_mark(w, roots[i]->node);
        }
        if (rc == 0 && w->managed && ctx->engine.hooks && !w->seeks) rc = ctx->engine.hooks->walk_begin(ctx);
        if (ctx->offload.away) ps_away_backward(ctx->offload.away, true);
    }
    if (rc == 0) return plant(ctx, w, n, roots, seeds);
    for (int i = 0; i < made; i++) ps_tensor_unhold(seeds[i]);
    return rc;
}

int ps_backward_begin_n(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int64_t *segment)
{
    if (n < 1 || n > PS_MAX_ROOTS)
        return ps_fail(PS_EINVAL, "backward cannot begin from %d tensors; pass 1 to %d", n, PS_MAX_ROOTS);
    for (int i = 0; i < n; i++) {
        if (!roots[i]) return ps_fail(PS_EINVAL, "backward needs a tensor to begin from");
        if (!gradients || !gradients[i]) PS_TRY(ps_tensor_check_alive(roots[i]));     /* if a gradient is given, only
                                                                                       * the root's shape is needed */
        if (!ps_tape_wants(roots[i]))
            return ps_fail(PS_EINVAL, "backward from a tensor that depends on nothing that requires a gradient "
                           "(tensors computed within ps.no_grad require none)");
    }
    if (ctx->engine.suspended.on) return ps_fail_suspended("backward");
    if (ctx->tape.walk && ctx->tape.walk->active) return ps_fail_walking();
    if (!ctx->tape.walk && !(ctx->tape.walk = ps_alloc0(sizeof *ctx->tape.walk)))
        return ps_fail_nomem(sizeof *ctx->tape.walk);
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = begin_walk(ctx, n, roots, gradients);
    ps_set_grad_enabled(ctx, enabled);
    if (rc < 0) ps_backward_end(ctx);
    return rc < 0 || !segment ? rc : ps_backward_next(ctx, segment);
}

int ps_backward_next(ps_ctx *ctx, int64_t *segment)
{
    ps_walk *w = ctx->tape.walk;
    if (!w || !w->active) return ps_fail(PS_ESTATE, "no backward walk is under way");
    if (w->stopped && !w->hooks_ran)
        return ps_fail(PS_ESTATE, w->at_hooks || w->stopped->op != SEGMENT ?
                       "the walk stopped at a function of the script, which has not run" :
                       "the recompute segment that the walk stopped at was not run again");
    if (w->processed >= 0) return weights_go_on(ctx, w, segment);
    int enabled = ps_set_grad_enabled(ctx, 0), rc = 0;
    while (rc == 0 && tape_is_due(w, INT64_MIN)) rc = tape_visit(ctx, w, segment);
    ps_set_grad_enabled(ctx, enabled);
    if (rc == 0) targets_close(w);
    if (rc <= 0) ps_backward_end(ctx);
    return rc;
}

int ps_backward_splice(ps_ctx *ctx, int n, ps_tensor *const *out)
{
    ps_walk *w = ctx->tape.walk;
    ps_node *node = w ? w->stopped : NULL;
    if (!node || node->op != SEGMENT || w->at_hooks)
        return ps_fail(PS_ESTATE, "the walk is not stopped at a recompute segment");
    if (n != node->n_out)
        return ps_fail(PS_EINVAL, "the segment returned %d tensors first, but %d when it was run again", node->n_out,
                       n);
    int enabled = ps_set_grad_enabled(ctx, 0), rc = node->holder ? tape_give_holder(ctx, node) : 0;
    for (int i = 0; rc == 0 && w->seeks && i < n; i++) rc = targets_mark(w, out[i]->node);
    for (int i = 0; rc == 0 && i < n; i++) {
        ps_tensor *grad = node->dout[i];
        if (!grad || !ps_tape_wants(out[i])) continue;
        if (!ps_same_shape(grad, out[i])) {
            rc = ps_fail(PS_EINVAL, "output %d of a recompute segment changed its shape when it was run again", i);
            break;
        }
        edge e = out[i]->node ? (edge){ .node = out[i]->node } : (edge){ .leaf = out[i] };
        if (!targets_want(w, &e)) continue;
        node->dout[i] = NULL;
        tape_count_from(w, out[i]->node ? out[i]->node : out[i]->hook);
        rc = give_to(ctx, w, out[i], grad, node->seq);
    }
    ps_set_grad_enabled(ctx, enabled);
    node->passed = !w->keeps;
    tape_uncount(node);
    for (int i = 0; i < node->n_out; i++) tape_let_go(&node->dout[i]);
    if (node->passed) {
        hooks_end(node);
        tape_release_all(node);
        tape_release_reads(node->reads, node->n_reads);
        node->n_reads = 0;
    }
    w->stopped = NULL;
    if (rc < 0) tape_give_up(node);
    ps_node_release(node);
    return rc;
}

/* Called for each node that a failed walk has not passed. */
static void drop(ps_node *node)
{
    tape_uncount(node);
    tape_release_all(node);
    tape_give_up(node);
    ps_node_release(node);
}

void ps_backward_end(ps_ctx *ctx)
{
    ps_walk *w = ctx->tape.walk;
    if (!w || !w->active) return;
    while (w->n > 0) drop(dequeue(w));
    if (w->stopped) drop(w->stopped);
    atomic_store_explicit(&ps_record_at.backward, 0, memory_order_relaxed);
    w->stopped = NULL;
    w->at_hooks = w->hooks_ran = w->keeps = false;
    if (w->seeks) targets_drop(w);
    weights_close(w);
    w->active = false;
    if (ctx->offload.away) ps_away_backward(ctx->offload.away, false);
}

void ps_walk_reset(ps_ctx *ctx)
{
    ps_backward_end(ctx);
    if (ctx->tape.walk) weights_drop(ctx->tape.walk);
}

void ps_walk_end(ps_ctx *ctx)
{
    ps_walk *w = ctx->tape.walk;
    ps_walk_reset(ctx);
    for (int32_t i = 0; w && i < w->n_lists; i++) ps_free(w->lists[i].nodes);
    if (w) {
        targets_drop(w);
        ps_free(w->targets);
        ps_free(w->lists);
        ps_free(w->heap);
    }
    ps_free(w);
    ctx->tape.walk = NULL;
}
