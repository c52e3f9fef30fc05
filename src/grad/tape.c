/* SPDX-License-Identifier: BSD-3-Clause
 * The tape: the record of the ops that a backward must differentiate. This file makes nodes, frees them, and counts the
 * nodes that a walk must still pass.
 *
 * A node records one op. It contains the op's attributes, the tensors that the gradient rule will read, and an edge for
 * each input. The edge points to the node that made the input, or to the input itself if the input is a leaf. The walk
 * (walk.c) visits nodes by descending sequence number. So consumers are visited before producers, and gradients are
 * always added in the same order. After a visit, the walk releases the node's saved tensors.
 *
 * Cheap outputs (layer norm, GELU) are not kept. A consumer of a cheap output saves the producer's node, which computes
 * the output again (rule.c). Some kinds of nodes have no op: see segment.c, call.c and hook.c. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "grad/tape.h"

/* -- nodes --------------------------------------------------------------------------------------------------------- */
const char *tape_name(const ps_node *node)
{
    if (node->op >= 0) return ps_op(node->op)->name;
    if (node->op == CALL) return node->attrs.bytes;
    return node->op == SEGMENT ? "a recompute segment" : node->op == BOUNDARY ? "the boundary of a stage" : "a sum";
}

int tape_passed_already(const ps_node *node)
{
    return ps_fail(PS_ESTATE, "backward ran through %s a second time; compute the loss again, or pass retain_graph = "
                   "true to the first backward", tape_name(node));
}

bool ps_tape_wants(const ps_tensor *t)
{
    return t && (t->node || (t->flags & PS_T_REQUIRES_GRAD)) && ps_dtype_is_float(t->dtype_);
}

uint32_t ps_tape_needs(const ps_ctx *ctx, int n_in, ps_tensor *const *in)
{
    if (!ctx->tape.grad_enabled) return 0;
    uint32_t needs = 0;
    for (int i = 0; i < n_in; i++)
        if (ps_tape_wants(in[i])) needs |= 1u << (i < 31 ? i : 31);
    return needs;
}

/* -- history ------------------------------------------------------------------------------------------------------- */
static bool makes_one(const ps_node *node, int n, ps_tensor *const *of)
{
    for (int i = 0; i < n; i++) {
        if (of[i]->node == node) return true;
        for (int k = 0; k < node->n_in; k++) if (node->edges[k].leaf == of[i]) return true;
    }
    return false;
}

/* A producer has a lower number than its consumers. If nodes are searched by descending number, each node is therefore
 * visited once, and nodes with numbers below the lowest number in `from` can be skipped. */
int ps_tensor_made_from(const ps_tensor *t, int n, ps_tensor *const *from)
{
    int64_t lowest = INT64_MAX;
    for (int i = 0; i < n; i++) {
        if (from[i] == t) return 1;
        int64_t seq = from[i]->node ? from[i]->node->seq : from[i]->flags & PS_T_REQUIRES_GRAD ? 0 : INT64_MAX;
        if (seq < lowest) lowest = seq;
    }
    const ps_node **ahead = NULL, *node = t->node;
    int32_t count = 0, capacity = 0;
    int rc = 0;
    while (rc == 0 && node) {
        if (makes_one(node, n, from)) rc = 1;
        for (int i = 0; rc == 0 && i < node->n_in; i++) {
            const ps_node *producer = node->edges[i].node;
            bool known = !producer || producer->seq < lowest;
            for (int32_t k = 0; k < count && !known; k++) known = ahead[k] == producer;
            if (!known && (rc = ps_grow(ahead, capacity, count + 1)) == 0) ahead[count++] = producer;
        }
        int32_t next = 0;
        for (int32_t k = 1; k < count; k++) if (ahead[k]->seq > ahead[next]->seq) next = k;
        node = count > 0 ? ahead[next] : NULL;
        if (count > 0) ahead[next] = ahead[--count];
    }
    ps_free(ahead);
    return rc;
}

int64_t ps_tensor_op_number(const ps_tensor *t) { return t->node ? t->node->seq : -1; }

static bool mark_found(const ps_node *node, int n, const int64_t *ops, int8_t *found)
{
    bool any = false;
    for (int i = 0; i < n; i++)
        if (ops[i] == node->seq) found[i] = 1, any = true;
    return any;
}

/* Searches like ps_tensor_made_from(). Sets found[i] for every op ops[i] that is found. */
int ps_tensor_made_by(const ps_tensor *t, int n, const int64_t *ops, int8_t *found)
{
    int64_t lowest = INT64_MAX;
    for (int i = 0; i < n; i++) {
        found[i] = 0;
        if (ops[i] < lowest) lowest = ops[i];
    }
    const ps_node **ahead = NULL, *node = t->node;
    int32_t count = 0, capacity = 0;
    int rc = 0;
    while (rc == 0 && node) {
        bool ends = mark_found(node, n, ops, found);
        for (int i = 0; rc == 0 && !ends && i < node->n_in; i++) {
            const ps_node *producer = node->edges[i].node;
            bool known = !producer || producer->seq < lowest;
            for (int32_t k = 0; k < count && !known; k++) known = ahead[k] == producer;
            if (!known && (rc = ps_grow(ahead, capacity, count + 1)) == 0) ahead[count++] = producer;
        }
        int32_t next = 0;
        for (int32_t k = 1; k < count; k++) if (ahead[k]->seq > ahead[next]->seq) next = k;
        node = count > 0 ? ahead[next] : NULL;
        if (count > 0) ahead[next] = ahead[--count];
    }
    ps_free(ahead);
    return rc;
}

/* -- the nodes that a walk must still pass ------------------------------------------------------------------------- */
/* Adds `by` to the number of nodes for which a storage waits. A parameter's storage waits for all nodes that have an
 * edge to the parameter, nodes that have saved it, and segments that have read it. After the walk has passed all these
 * nodes, the parameter's gradient is complete, and its bytes are no longer read. Only nodes that the walk can reach are
 * counted. Other nodes exist until Lua's collector frees them, at different times on different ranks. */
static void wait_for(ps_walk *w, ps_storage *s, int by, bool adds)
{
    if (!s->engine.watched) return;
    if (adds) w->managed = true;
    if (s->tape.walk != w->id) s->tape.walk = w->id, s->tape.waits = 0;
    s->tape.waits += by;
}

static void count_node(ps_walk *w, const ps_node *node, int by)
{
    for (int i = 0; i < node->n_in; i++) {
        if (node->edges[i].leaf) wait_for(w, node->edges[i].leaf->storage, by, true);
        if (node->saved_in[i].t) wait_for(w, node->saved_in[i].t->storage, by, false);
    }
    for (int i = 0; i < node->n_out; i++)
        if (node->saved_out[i].t) wait_for(w, node->saved_out[i].t->storage, by, false);
    for (int i = 0; i < node->n_reads; i++) wait_for(w, node->reads[i], by, true);
}

static void push_uncounted(const ps_walk *w, ps_node *node, ps_node **stack)
{
    if (!node || node->passed || node->walk == w->id) return;
    node->walk = w->id;
    node->next_free = *stack;
    *stack = node;
}

static void push_to(const ps_walk *w, const edge *e, ps_node **stack)
{
    int out;
    push_uncounted(w, tape_sum_node(e, &out), stack);
}

void tape_count_from(ps_walk *w, ps_node *node)
{
    ps_node *stack = NULL;
    push_uncounted(w, node, &stack);
    while ((node = stack)) {
        stack = node->next_free;
        count_node(w, node, 1);
        for (int i = 0; i < node->n_in; i++) push_to(w, &node->edges[i], &stack);
    }
}

void tape_count_listed(ps_walk *w, ps_node *node)
{
    node->walk = w->id;
    count_node(w, node, 1);
    for (int i = 0, out; i < node->n_in; i++)
        if (tape_is_later(&node->edges[i])) tape_count_from(w, tape_sum_node(&node->edges[i], &out));
}

/* Called before the node releases its saved tensors. The walk has passed the node, or it will never pass the node. */
void tape_uncount(ps_node *node)
{
    ps_walk *w = node->ctx->tape.walk;
    if (w && node->walk == w->id) count_node(w, node, -1);
    node->walk = 0;
}

/* Reports the gradient of a parameter to the engine if the gradient is complete, that is, if the walk has passed all
 * nodes that use the parameter. When the backward ends, the engine finds the parameters that were not reported
 * (engine_backward_done). */
int tape_leaf_final(ps_ctx *ctx, ps_tensor *leaf)
{
    const ps_storage *s = leaf->storage;
    if (!leaf->managed || (s->tape.walk == ctx->tape.walk->id && s->tape.waits > 0)) return 0;
    return ctx->engine.hooks->grad_final(ctx, leaf);
}

void tape_is_now(ps_tensor *t)
{
    if (!t || !(t->flags & PS_T_LATER)) return;
    t->flags &= ~PS_T_LATER;
    t->storage->tape.later--;
}

void tape_let_go(ps_tensor **t)
{
    tape_is_now(*t);
    ps_tensor_unhold(*t);
    *t = NULL;
}

void tape_release_saved(ps_node *node)
{
    for (int i = 0; i < node->n_in; i++) {
        ps_node *cheap = node->saved_in[i].cheap;
        tape_let_go(&node->saved_in[i].t);
        node->saved_in[i].cheap = NULL;
        if (!cheap) continue;
        if (node->claims) weights_unclaim(cheap);
        ps_node_release(cheap);
    }
    node->claims = false;
    for (int i = 0; i < node->n_out; i++) tape_let_go(&node->saved_out[i].t);
    tape_let_go(&node->again);
    tape_let_go(&node->kept);
}

void tape_release_all(ps_node *node)
{
    for (int i = 0; i < node->n_out; i++) tape_let_go(&node->dout[i]);
    for (int i = 0; i < node->n_in; i++) tape_let_go(&node->din[i]);
    tape_release_saved(node);
}

static void release_edges(ps_node *node)
{
    for (int i = 0; i < node->n_in; i++) {
        edge e = node->edges[i];
        node->edges[i] = (edge){ .node = NULL };
        if (e.node) ps_node_release(e.node);
        if (e.leaf) ps_tensor_release(e.leaf);
    }
}

/* Ends a node that a failed walk has not passed. No other walk may pass the node. Releases the node's edges and, for a
 * segment, reports that its function is no longer needed. This must be done before the node is freed: the model to
 * which the function belongs may hold an output, and the output holds the node. No collector finds such a cycle. */
void tape_give_up(ps_node *node)
{
    hooks_end(node);
    if (node->op == LEAF) {
        leaf_let_go(node);
        return;
    }
    node->passed = true;
    if (node->listed) return;                                /* weights_of still reads the edges of a listed node */
    if (tape_is_callers(node) && node->segment >= 0) {
        segment_reap(node->ctx, node->segment);
        node->segment = -1;
    }
    release_edges(node);
}

/* Frees a node. If other nodes lose their last reference, they are freed one after another in a loop. Recursion could
 * be too deep, because chains of nodes can be very long. */
void ps_node_release(ps_node *node)
{
    static __thread ps_node *pending;
    static __thread bool busy;
    if (--node->refs > 0) return;
    node->next_free = pending;
    pending = node;
    if (busy) return;
    busy = true;
    while (pending) {
        node = pending;
        pending = node->next_free;
        tape_uncount(node);
        tape_release_all(node);
        tape_release_reads(node->reads, node->n_reads);
        ps_free(node->reads);
        if (node->holder) ps_tensor_release(node->holder);
        release_edges(node);
        ps_ctx *ctx = node->ctx;
        if (tape_is_callers(node) && node->segment >= 0 && !ctx->closed) segment_reap(ctx, node->segment);
        if (node->hooks && !ctx->closed) segment_reap(ctx, node->hooks);
        ps_free(node);
        ps_ctx_release(ctx);
    }
    busy = false;
}

ps_node *tape_node_new(ps_ctx *ctx, int op, int n_in, int n_out, int attrs_nbytes)
{
    size_t attrs = offsetof(ps_node, attrs) + (size_t)attrs_nbytes;
    attrs = (attrs + 15) & ~(size_t)15;
    size_t in = sizeof(edge) + sizeof(saved) + sizeof(ps_meta) + sizeof(ps_tensor *);
    size_t out = sizeof(saved) + sizeof(ps_tensor *);
    size_t nbytes = attrs + in * (size_t)n_in + out * (size_t)n_out;
    ps_node *node = ps_alloc0(nbytes);
    if (!node) {
        ps_fail_nomem(nbytes);
        return NULL;
    }
    char *p = (char *)node + attrs;
    node->in_meta = (ps_meta *)p, p += sizeof(ps_meta) * (size_t)n_in;
    node->edges = (edge *)p, p += sizeof(edge) * (size_t)n_in;
    node->saved_in = (saved *)p, p += sizeof(saved) * (size_t)n_in;
    node->saved_out = (saved *)p, p += sizeof(saved) * (size_t)n_out;
    node->dout = (ps_tensor **)p, p += sizeof(ps_tensor *) * (size_t)n_out;
    node->din = (ps_tensor **)p;
    node->refs = 1;
    node->ctx = ctx;
    node->op = op;
    node->module = ps_module_now();
    node->n_in = n_in;
    node->n_out = n_out;
    node->seq = ctx->tape.next_seq++;
    ctx->refs++;
    return node;
}

void tape_add_edge(ps_node *node, int i, ps_tensor *t)
{
    if (!t) {
        node->in_meta[i].ndim = -1;
        return;
    }
    node->in_meta[i] = ps_tensor_meta(t);
    if (!ps_tape_wants(t)) return;
    if (t->node) {
        node->edges[i] = (edge){ .node = t->node, .out = t->node_out };
        t->node->refs++;
    } else {
        node->edges[i].leaf = t;
        ps_tensor_retain(t);
    }
}

/* A chain of cheap ops is computed again by recursion, and all outputs of the chain exist at the same time. Hence every
 * CHAIN_MOST outputs, one output of a chain is kept. */
enum { CHAIN_MOST = 16 };

/* Returns true if the tensor's producer can compute the tensor again, the tensor is large enough for this to be useful,
 * and no op has written to the tensor. */
static bool is_cheap(const ps_tensor *t)
{
    return t->node && !t->ctx->tape.keep_cheap && t->node->op >= 0 && t->node_out == 0 &&
           t->node->cheap_depth < CHAIN_MOST &&
           (ps_op(t->node->op)->flags & PS_OPF_CHEAP) && !t->node->passed && t->storage->version == 0 &&
           t->numel_ * ps_dtype_bytes(t->dtype_) >= PS_CHEAP_MIN_NBYTES && ps_tensor_is_contiguous(t);
}

/* Returns true if a node's rule reads input i. Some inputs are read only for the gradient of another input. For
 * example, an activation is not read if the weight is frozen. This function must be called after tape_add_edge() was
 * called for all inputs. */
static bool reads_input(const ps_node *node, const ps_opinfo *row, uint64_t keeps, int i)
{
    if (!(keeps >> i & 1)) return false;
    int other = i < 8 ? row->saved_for[i] : -1;
    return other < 0 || node->edges[other].node || node->edges[other].leaf;
}

int ps_tape_prepare(ps_ctx *ctx, int op, int n_in, const void *attrs, int n_out, ps_tensor **out, ps_node **made)
{
    const ps_opinfo *row = ps_op(op);
    ps_node *node = tape_node_new(ctx, op, n_in, n_out, row->attrs_nbytes);
    if (!node) return PS_ENOMEM;
    memcpy(node->attrs.bytes, attrs, (size_t)row->attrs_nbytes);
    for (int i = 0; i < n_out; i++) {
        if (!out[i] || !(row->saved_out >> i & 1)) continue;
        ps_tensor *copy; /* otherwise the node and the tensor would hold each other */
        int rc = ps_tensor_detach(out[i], &copy);
        if (rc < 0) {
            ps_node_release(node);
            return rc;
        }
        ps_storage_hold(copy->storage);
        node->saved_out[i].t = copy;
    }
    *made = node;
    return 0;
}

void ps_tape_record(ps_node *node, ps_tensor *const *in, ps_tensor **out)
{
    ps_ctx *ctx = node->ctx;
    const ps_opinfo *row = ps_op(node->op);
    uint64_t keeps = row->saved_in | (ps_step_runs_ahead(ctx->step) ? row->ahead_in : 0);
    node->side = true;
    node->place = ctx->anomaly.place;
    for (int i = 0; i < node->n_in; i++) {
        tape_add_edge(node, i, in[i]);
        if (in[i] && !tape_is_later(&node->edges[i])) node->side = false;
    }
    for (int i = 0; i < node->n_in; i++) {
        if (!in[i] || !reads_input(node, row, keeps, i)) continue;
        if (is_cheap(in[i])) {
            node->saved_in[i].cheap = in[i]->node;
            in[i]->node->refs++;
            if (node->cheap_depth <= in[i]->node->cheap_depth) node->cheap_depth = in[i]->node->cheap_depth + 1;
        } else {
            node->saved_in[i] = (saved){ .t = ps_tensor_hold(in[i]), .version = in[i]->storage->version };
        }
    }
    for (int i = 0; i < node->n_out; i++)
        if (node->saved_out[i].t) node->saved_out[i].version = node->saved_out[i].t->storage->version;
    for (int i = 0; i < node->n_out; i++)
        if (out[i] && ps_dtype_is_float(out[i]->dtype_) && !(row->hidden_out >> i & 1)) {
            out[i]->node = node;
            out[i]->node_out = i;
            node->refs++;
        }
    ps_node_release(node);
}

/* -- leaves -------------------------------------------------------------------------------------------------------- */
int ps_grad_enabled(ps_ctx *ctx) { return ctx->tape.grad_enabled; }

int ps_set_keep_cheap(ps_ctx *ctx, int on)
{
    int was = ctx->tape.keep_cheap;
    ctx->tape.keep_cheap = on != 0;
    return was;
}

int ps_set_grad_enabled(ps_ctx *ctx, int enabled)
{
    int was = ctx->tape.grad_enabled;
    ctx->tape.grad_enabled = enabled != 0;
    return was;
}

int ps_tensor_require_grad(ps_tensor *t, int on)
{
    if (on && !ps_dtype_is_float(t->dtype_))
        return ps_fail(PS_EINVAL, "only float tensors can require gradients, but this tensor is %s",
                       ps_dtype_name(t->dtype_));
    if (t->node) return ps_fail(PS_EINVAL, "this tensor was computed from others, so it cannot require gradients "
                                "itself; detach() it first");
    t->flags = on ? t->flags | PS_T_REQUIRES_GRAD : t->flags & ~PS_T_REQUIRES_GRAD;
    if (on) t->storage->tape.trained = true;
    return 0;
}

ps_tensor *ps_tensor_get_grad(ps_tensor *t) { return t->grad_; }

int ps_tensor_keep_grad(ps_tensor *t, ps_tensor *holder)
{
    if (!t->node || (t->node->op < 0 && !tape_is_callers(t->node)))
        return ps_fail(PS_EINVAL, "no op computed this tensor with gradients on, so there is no gradient to keep");
    if (holder->node || holder->dtype_ != t->dtype_ || !ps_same_shape(t, holder) || holder->device_ != t->device_)
        return ps_fail(PS_EINVAL, "the holder of a gradient must be a tensor without history, of the same shape, type "
                       "and device");
    if (t->node->holder && t->node->holder_out != t->node_out)
        return ps_fail(PS_EINVAL, "the gradient of another output of this op is already kept");
    ps_tensor_retain(holder);
    if (t->node->holder) ps_tensor_release(t->node->holder);
    t->node->holder = holder;
    t->node->holder_out = t->node_out;
    return 0;
}

int ps_tensor_set_grad(ps_tensor *t, ps_tensor *grad)
{
    if (grad == t->grad_) return 0;
    if (t->ctx->engine.suspended.on) return ps_fail_suspended("to set a gradient");
    if (grad) {
        if (!ps_same_shape(t, grad) || !ps_dtype_is_float(grad->dtype_) || grad->device_ != t->device_)
            return ps_fail(PS_EINVAL, "a gradient must be a float tensor of its tensor's shape, on its tensor's "
                           "device");
        PS_TRY(ps_tensor_check_alive(grad));
        ps_scope_adopt(t->ctx, grad->storage);
        ps_tensor_retain(grad);
    }
    if (t->grad_) ps_tensor_release(t->grad_);
    t->grad_ = grad;
    return 0;
}
