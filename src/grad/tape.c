/* SPDX-License-Identifier: BSD-3-Clause
 * The tape. A node remembers one op: its attributes, the tensors that its gradient rule will read, and for each input
 * an edge to the node that made it, or to the leaf that it is. The backward walk takes nodes by falling sequence
 * number, so that every consumer has passed before its producer and sums are added in one fixed order. A node's saved
 * tensors go as soon as it has passed.
 *
 * Cheap outputs (layer norm, GELU) are not kept: their consumer saves the producer, which computes them again when
 * asked.
 *
 * A recompute segment is a node without an op: the walk stops there, the caller runs its function again, and
 * ps_backward_splice gives the waiting gradients to the new outputs. The new nodes have the highest numbers, so the
 * walk goes on through them exactly as it would have without the segment.
 *
 * A boundary is a node without an op, too. Its outputs are the tensors that a stage of a pipeline received, and it has
 * no inputs. The sums of gradients of its outputs stay in the node until ps_boundary_take, which gives them out to be
 * sent to the stage before. */
#include <stdarg.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "grad/tape.h"

/* -- nodes --------------------------------------------------------------------------------------------------------- */
static const char *name_of(const ps_node *node)
{
    if (node->op >= 0) return ps_op(node->op)->name;
    return node->op == SEGMENT ? "a recompute segment" : node->op == BOUNDARY ? "the boundary of a stage" : "a sum";
}

static int passed_already(const ps_node *node)
{
    return ps_fail(PS_ESTATE, "backward ran through %s a second time; compute the loss again", name_of(node));
}

bool ps_tape_wants(const ps_tensor *t)
{
    return t && (t->node || (t->flags & PS_T_REQUIRES_GRAD)) && ps_dtype_is_float(t->dtype_);
}

uint32_t ps_tape_needs(const ps_ctx *ctx, int n_in, ps_tensor *const *in)
{
    if (!ctx->grad_enabled) return 0;
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

/* A producer has a lower number than its consumers. So nodes below all of `from` lead to none of them, and a search by
 * falling number looks at each node once. */
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

/* -- what a walk waits for ----------------------------------------------------------------------------------------- */
/* A parameter's gradient is whole, and its bytes are read no more, once all nodes have passed that have an edge to it,
 * saved it or, as segments, read it. Only nodes that the walk can reach count. Other recorded nodes live until Lua's
 * collector frees them, which comes at another time on each rank, and all ranks must see the same. */
static void wait_for(ps_walk *w, ps_storage *s, int by, bool adds)
{
    if (!s->watched) return;
    if (adds) w->managed = true;
    if (s->walk != w->id) s->walk = w->id, s->waits = 0;
    s->waits += by;
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

void tape_count_from(ps_walk *w, ps_node *node)
{
    ps_node *stack = NULL;
    push_uncounted(w, node, &stack);
    while ((node = stack)) {
        stack = node->next_free;
        count_node(w, node, 1);
        for (int i = 0; i < node->n_in; i++) push_uncounted(w, node->edges[i].node, &stack);
    }
}

void tape_count_listed(ps_walk *w, ps_node *node)
{
    node->walk = w->id;
    count_node(w, node, 1);
    for (int i = 0; i < node->n_in; i++)
        if (tape_is_later(&node->edges[i])) tape_count_from(w, node->edges[i].node);
}

/* To be called once the node has passed, or never will, and before it lets go of saved tensors. */
void tape_uncount(ps_node *node)
{
    ps_walk *w = node->ctx->walk;
    if (w && node->walk == w->id) count_node(w, node, -1);
    node->walk = 0;
}

/* Tells the engine that a parameter's gradient is whole, once the walk has passed all nodes with that parameter. The
 * engine finds those of which no node tells when the backward is over (engine_backward_done). */
int tape_leaf_final(ps_ctx *ctx, ps_tensor *leaf)
{
    const ps_storage *s = leaf->storage;
    if (!leaf->managed || (s->walk == ctx->walk->id && s->waits > 0)) return 0;
    return ctx->hooks->grad_final(ctx, leaf);
}

static void release_reads(ps_storage **list, int n)
{
    for (int i = 0; i < n; i++) ps_storage_release(list[i]);
}

void tape_is_now(ps_tensor *t)
{
    if (!t || !(t->flags & PS_T_LATER)) return;
    t->flags &= ~PS_T_LATER;
    t->storage->later--;
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

/* Room for the number of one more segment, taken when the segment is made, so that reap cannot fail. */
static int reap_reserve(ps_ctx *ctx)
{
    PS_TRY(ps_grow(ctx->reaped.ids, ctx->reaped.capacity, ctx->reaped.n + ctx->reaped.live + 1));
    ctx->reaped.live++;
    return 0;
}

static void reap(ps_ctx *ctx, int64_t segment)
{
    ctx->reaped.live--;
    ctx->reaped.ids[ctx->reaped.n++] = segment;
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

/* Of a node at which a walk failed, or which such a walk had still to pass: no other may pass it. What it leads to goes
 * now, and the caller hears that a segment's function is not needed. Neither can wait until the node goes, since that
 * function may hold, by way of its model, an output that holds the node: a circle that no collector sees. */
static void give_up(ps_node *node)
{
    node->passed = true;
    if (node->listed) return;                                /* weights_of reads its edges */
    if (node->op == SEGMENT && node->segment >= 0) {
        reap(node->ctx, node->segment);
        node->segment = -1;
    }
    release_edges(node);
}

/* Freed one after another rather than by recursion: chains of nodes are as long as a program runs. */
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
        release_reads(node->reads, node->n_reads);
        ps_free(node->reads);
        if (node->holder) ps_tensor_release(node->holder);
        release_edges(node);
        ps_ctx *ctx = node->ctx;
        if (node->op == SEGMENT && node->segment >= 0 && !ctx->closed) reap(ctx, node->segment);
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
    node->seq = ctx->next_seq++;
    ctx->refs++;
    return node;
}

static void add_edge(ps_node *node, int i, ps_tensor *t)
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

/* A tensor that its producer can compute again, since nobody has written into it, and large enough to be worth it. */
static bool is_cheap(const ps_tensor *t)
{
    return t->node && !t->ctx->keep_cheap && t->node->op >= 0 && t->node_out == 0 &&
           (ps_op(t->node->op)->flags & PS_OPF_CHEAP) && !t->node->passed && t->storage->version == 0 &&
           t->numel_ * ps_dtype_bytes(t->dtype_) >= PS_CHEAP_MIN_NBYTES && ps_tensor_is_contiguous(t);
}

int ps_tape_record(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int n_out, ps_tensor **out)
{
    const ps_opinfo *row = ps_op(op);
    ps_node *node = tape_node_new(ctx, op, n_in, n_out, row->attrs_nbytes);
    if (!node) return PS_ENOMEM;
    memcpy(node->attrs.bytes, attrs, (size_t)row->attrs_nbytes);
    uint64_t keeps = row->saved_in | (ps_step_runs_ahead(ctx->step) ? row->ahead_in : 0);
    node->side = true;
    node->place = ctx->anomaly.place;
    for (int i = 0; i < n_in; i++) {
        add_edge(node, i, in[i]);
        if (in[i] && !tape_is_later(&node->edges[i])) node->side = false;
        if (!in[i] || !(keeps >> i & 1)) continue;
        if (is_cheap(in[i])) {
            node->saved_in[i].cheap = in[i]->node;
            in[i]->node->refs++;
        } else {
            node->saved_in[i] = (saved){ .t = ps_tensor_hold(in[i]), .version = in[i]->storage->version };
        }
    }
    for (int i = 0; i < n_out; i++) {
        if (!out[i] || !(row->saved_out >> i & 1)) continue;
        ps_tensor *copy; /* another header, or node and tensor would hold each other */
        int rc = ps_tensor_detach(out[i], &copy);
        if (rc < 0) {
            ps_node_release(node);
            return rc;
        }
        ps_storage_hold(copy->storage);
        node->saved_out[i] = (saved){ .t = copy, .version = copy->storage->version };
    }
    for (int i = 0; i < n_out; i++)
        if (out[i] && ps_dtype_is_float(out[i]->dtype_) && !(row->hidden_out >> i & 1)) {
            out[i]->node = node;
            out[i]->node_out = i;
            node->refs++;
        }
    ps_node_release(node);
    return 0;
}

void ps_segment_begin(ps_ctx *ctx)
{
    ctx->reads.n = 0;
    ctx->reads.failed = false;
    ctx->reads.on = true;
}

void ps_segment_cancel(ps_ctx *ctx)
{
    release_reads(ctx->reads.list, ctx->reads.n);
    ctx->reads.n = 0;
    ctx->reads.on = false;
}

void ps_reads_add(ps_ctx *ctx, ps_storage *s)
{
    ps_reads *r = &ctx->reads;
    if (!ps_try_grow(r->list, r->capacity, r->n + 1)) {
        r->failed = true;                                /* ps_segment_new says so */
        return;
    }
    s->refs++;
    r->list[r->n++] = s;
}

/* The reads noted since ps_segment_begin become the node's. */
static int take_reads(ps_ctx *ctx, ps_node *node)
{
    ps_reads *r = &ctx->reads;
    r->on = false;
    if (r->failed) return ps_fail_nomem(sizeof *r->list * 2 * (size_t)r->capacity);
    if (r->n == 0) return 0;
    node->reads = ps_alloc(sizeof *r->list * (size_t)r->n);
    if (!node->reads) return ps_fail_nomem(sizeof *r->list * (size_t)r->n);
    memcpy(node->reads, r->list, sizeof *r->list * (size_t)r->n);
    node->n_reads = r->n;
    r->n = 0;
    return 0;
}

int ps_segment_new(ps_ctx *ctx, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out, int64_t *segment)
{
    if (n_in < 0 || n_out < 1) return ps_fail(PS_EINVAL, "a recompute segment needs an output");
    for (int i = 0; i < n_out; i++) {
        bool fresh =
            out[i] && !out[i]->node && !(out[i]->flags & PS_T_REQUIRES_GRAD) && ps_dtype_is_float(out[i]->dtype_);
        for (int k = 0; fresh && k < n_in; k++) fresh = out[i] != in[k];
        for (int k = 0; fresh && k < i; k++) fresh = out[i] != out[k];
        if (!fresh)
            return ps_fail(PS_EINVAL,
                           "output %d of a recompute segment must be a float tensor computed in it, given once", i);
    }
    PS_TRY(reap_reserve(ctx));
    ps_node *node = tape_node_new(ctx, SEGMENT, n_in, n_out, 0);
    if (!node) {
        ctx->reaped.live--;
        return PS_ENOMEM;
    }
    int rc = take_reads(ctx, node);
    if (rc < 0) {
        ctx->reaped.live--;
        node->op = PS_OP_COUNT;                          /* its number was never given out */
        ps_node_release(node);
        ps_segment_cancel(ctx);
        return rc;
    }
    node->segment = node->seq;
    for (int i = 0; i < n_in; i++) {
        add_edge(node, i, in[i]);
        if (in[i]) node->saved_in[i] = (saved){ .t = ps_tensor_hold(in[i]), .version = in[i]->storage->version };
    }
    for (int i = 0; i < n_out; i++) {
        out[i]->node = node;
        out[i]->node_out = i;
        node->refs++;
    }
    *segment = node->segment;
    if (ctx->offload) ps_away_round(ctx->away);
    for (int i = 0; i < n_in; i++) if (in[i]) ps_storage_leave(ctx, in[i]->storage);
    rc = node->n_reads > 0;
    ps_node_release(node);
    return rc;
}

int64_t ps_segment_reap(ps_ctx *ctx) { return ctx->reaped.n > 0 ? ctx->reaped.ids[--ctx->reaped.n] : -1; }

/* -- boundaries ---------------------------------------------------------------------------------------------------- */
int ps_boundary(ps_ctx *ctx, int n, ps_tensor *const *in, ps_tensor **out)
{
    int made = 0, rc = 0;
    ps_node *node = NULL;
    if (n < 1 || n > PS_MAX_ROOTS)
        return ps_fail(PS_EINVAL, "a boundary of %d tensors; it takes 1 to %d", n, PS_MAX_ROOTS);
    for (int i = 0; i < n; i++) {
        PS_TRY(ps_tensor_check_alive(in[i]));
        if (in[i]->node || (in[i]->flags & PS_T_REQUIRES_GRAD))
            return ps_fail(PS_EINVAL, "tensor %d of a boundary has a history already, or is a parameter", i);
    }
    if (ctx->grad_enabled && !(node = tape_node_new(ctx, BOUNDARY, 0, n, 0))) return PS_ENOMEM;
    while (rc == 0 && made < n) {
        rc = ps_tensor_detach(in[made], &out[made]);
        if (rc == 0) made++;
    }
    for (int i = 0; i < made; i++) {
        if (rc < 0) {
            ps_tensor_release(out[i]);
            out[i] = NULL;
        } else if (node && ps_dtype_is_float(out[i]->dtype_)) {
            out[i]->node = node;
            out[i]->node_out = i;
            node->refs++;
        }
    }
    if (node) ps_node_release(node);
    return rc;
}

int ps_boundary_take(ps_ctx *ctx, int n, ps_tensor *const *out, ps_tensor **gradients)
{
    if (ctx->walk && ctx->walk->active)
        return ps_fail(PS_ESTATE, "gradients of a boundary are taken when the backward walk is over");
    for (int i = 0; i < n; i++)
        if (out[i]->node && out[i]->node->op != BOUNDARY)
            return ps_fail(PS_EINVAL, "tensor %d is no output of a boundary", i);
    for (int i = 0; i < n; i++) {
        ps_tensor **slot = out[i]->node ? &out[i]->node->dout[out[i]->node_out] : NULL;
        gradients[i] = slot ? *slot : NULL;
        if (!gradients[i]) continue;
        *slot = NULL;
        ps_scope_adopt(ctx, gradients[i]->storage);       /* it lives as long as its header: no scope drops it */
        ps_storage_unhold(gradients[i]->storage);
    }
    return 0;
}

/* -- calls of gradient rules --------------------------------------------------------------------------------------- */
bool ps_grad_wants_ever(const ps_grad *g, int i) { return g->node->edges[i].node || g->node->edges[i].leaf; }

bool ps_grad_wants(const ps_grad *g, int i)
{
    bool weights = tape_is_later(&g->node->edges[i]);
    return ps_grad_wants_ever(g, i) && (g->phase == PS_GRAD_WHOLE || weights == (g->phase == PS_GRAD_WEIGHTS));
}

int ps_grad_keep(ps_grad *g, ps_tensor *t)
{
    if (g->phase == PS_GRAD_INPUTS && !g->node->kept) g->node->kept = ps_tensor_hold(t);
    return 0;
}

ps_tensor *ps_grad_kept(const ps_grad *g) { return g->node->kept; }

const ps_meta *ps_grad_in_meta(const ps_grad *g, int i) { return &g->node->in_meta[i]; }

static int check_version(const ps_node *node, const saved *s)
{
    if (!s->t || s->t->storage->version == s->version) return 0;
    char text[160];
    return ps_fail(PS_ESTALE, "backward of %s needs a tensor of shape %s that was changed in place after it was used",
                   name_of(node), ps_shape_text(s->t->ndim, s->t->shape_, text, sizeof text));
}

static int saved_get(ps_node *node, int i, ps_tensor **out);

static int compute_again(ps_node *node)
{
    if (node->again) return 0;
    if (node->passed && node->later == 0) return passed_already(node);
    ps_tensor *in[PS_MAX_IN], *out[PS_MAX_OUT] = { NULL };
    for (int i = 0; i < node->n_in; i++) PS_TRY(saved_get(node, i, &in[i]));
    PS_TRY(ps_apply_all(node->ctx, node->op, node->n_in, in, node->attrs.bytes, out));
    for (int i = 1; i < node->n_out; i++) if (out[i]) ps_tensor_release(out[i]);
    ps_storage_hold(out[0]->storage);
    node->again = out[0];
    return 0;
}

static int saved_get(ps_node *node, int i, ps_tensor **out)
{
    saved *s = &node->saved_in[i];
    if (s->cheap) {
        PS_TRY(compute_again(s->cheap));
        *out = s->cheap->again;
        return 0;
    }
    PS_TRY(check_version(node, s));
    *out = s->t;
    return 0;
}

int ps_grad_in(ps_grad *g, int i, ps_tensor **out) { return saved_get(g->node, i, out); }

int ps_grad_out(ps_grad *g, int i, ps_tensor **out)
{
    PS_TRY(check_version(g->node, &g->node->saved_out[i]));
    *out = g->node->saved_out[i].t;
    return 0;
}

static int leaf_dtype(const ps_tensor *leaf) { return leaf->flags & PS_T_GRAD_F32 ? PS_F32 : leaf->dtype_; }

/* The leaf that is input i is another input, too. */
static bool comes_twice(const ps_grad *g, int i)
{
    for (int k = 0; k < g->n_in; k++)
        if (k != i && g->node->edges[k].leaf == g->node->edges[i].leaf) return true;
    return false;
}

/* This header alone owns the bytes, PS_T_LATER aside: an undivided backward would write sums into them. */
static bool is_alone(const ps_tensor *t)
{
    const ps_storage *s = t->storage;
    return t->refs == 1 && s->refs - s->later == 1 && !s->kept && ps_tensor_is_contiguous(t);
}

static void replace(ps_tensor **held, ps_tensor *by)
{
    ps_tensor_hold(by);
    ps_tensor_unhold(*held);
    *held = by;
}

/* *there: the gradient so far of a node's output. It moves to a copy where weight gradients that were put off will read
 * its bytes, so that more can be added to it. */
static int spare_later(ps_grad *g, ps_tensor **there)
{
    static const ps_attrs_contiguous none;
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    if (!*there || (*there)->storage->later == 0 || !is_alone(*there)) return 0;
    PS_TRY(ps_apply_all(g->ctx, PS_OP_contiguous, 1, there, &none, all));
    replace(there, all[0]);
    ps_tensor_release(all[0]);
    return 0;
}

/* A tensor for a gradient that is put off, in fp32 at least: no fewer bits than the sum to which it will be added. */
static int dest_for_later(ps_grad *g, int i, ps_tensor **out)
{
    ps_meta m = *ps_grad_in_meta(g, i);
    if (ps_dtype_bytes(m.dtype) < 4) m.dtype = PS_F32;
    int k = 0;
    while (!g->dout[k]) k++;                    /* at least one came */
    return ps_grad_new(g, g->dout[k]->device_, &m, out);
}

int ps_grad_dest(ps_grad *g, int i, ps_tensor **out, int32_t *accumulate)
{
    const edge *e = &g->node->edges[i];
    *out = NULL;
    *accumulate = 0;
    if (g->puts_off && tape_is_later(e)) return dest_for_later(g, i, out);
    if (e->node) PS_TRY(spare_later(g, &e->node->dout[e->out]));
    ps_tensor *there = e->leaf ? e->leaf->grad_ : e->node ? e->node->dout[e->out] : NULL, *place = NULL;
    if (there && (e->leaf ? ps_tensor_is_contiguous(there) : ps_tensor_exclusive(there))) {
        *out = there;
        *accumulate = 1;
    }
    if (there || !e->leaf) return 0;
    if (e->leaf->managed) PS_TRY(g->ctx->hooks->grad_place(g->ctx, e->leaf, &place));
    if (place && !comes_twice(g, i)) {
        *out = place;
        return 0;
    }
    /* The gradients of a leaf that comes twice are added when they are delivered, in the type of their sum. */
    ps_meta m = ps_tensor_meta(e->leaf);
    m.dtype = place ? place->dtype_ : leaf_dtype(e->leaf);
    return m.dtype == e->leaf->dtype_ ? 0 : ps_grad_new(g, e->leaf->device_, &m, out);
}

void ps_grad_give(ps_grad *g, int i, ps_tensor *t)
{
    ps_tensor_retain(t);
    if (g->din[i]) ps_tensor_release(g->din[i]);
    g->din[i] = t;
}

int ps_run_list(ps_grad *g, int op, const void *attrs, ps_tensor **out, int n_in, ps_tensor *const *in)
{
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    int n_out = ps_op(op)->n_out;
    if (g->n_temps + n_out > (int)(sizeof g->temps / sizeof *g->temps))
        return ps_fail(PS_ESTATE, "a gradient rule makes too many temporaries");
    for (int i = 0; i < n_out; i++) all[i] = out[i];
    PS_TRY(ps_apply_all(g->ctx, op, n_in, in, attrs, all));
    for (int i = 0; i < n_out; i++) {
        if (all[i] && all[i] != out[i]) g->temps[g->n_temps++] = all[i];
        out[i] = all[i];
    }
    return 0;
}

int ps_run(ps_grad *g, int op, const void *attrs, ps_tensor **out, int n_in, ...)
{
    ps_tensor *in[8];
    va_list ap;
    va_start(ap, n_in);
    for (int i = 0; i < n_in && i < 8; i++) in[i] = va_arg(ap, ps_tensor *);
    va_end(ap);
    return ps_run_list(g, op, attrs, out, n_in, in);
}

int ps_grad_new(ps_grad *g, int device, const ps_meta *meta, ps_tensor **out)
{
    if (g->n_temps == (int)(sizeof g->temps / sizeof *g->temps))
        return ps_fail(PS_ESTATE, "a gradient rule makes too many temporaries");
    ps_meta m = *meta;
    m.permuted = false;
    PS_TRY(ps_tensor_new_meta(g->ctx, device, &m, out));
    g->temps[g->n_temps++] = *out;
    return 0;
}

ps_tensor *ps_grad_pending(ps_grad *g, int i, ps_tensor **out)
{
    const edge *e = &g->node->edges[i];
    ps_tensor *there = e->node ? e->node->dout[e->out] : NULL;
    bool ours = there && is_alone(there);
    *out = ours && there->storage->later == 0 ? there : NULL;
    return ours ? there : NULL;
}

void ps_grad_replace(ps_grad *g, int i, ps_tensor *sum)
{
    const edge *e = &g->node->edges[i];
    if (e->node->dout[e->out] != sum) replace(&e->node->dout[e->out], sum);
}

/* -- the walk ------------------------------------------------------------------------------------------------------ */
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

ps_node *tape_dequeue(ps_walk *w)
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

/* The functions below take over `grad`, a held reference, even where they fail. Its scope may have ended. */
static int add_to_leaf(ps_ctx *ctx, ps_tensor *leaf, ps_tensor *grad)
{
    int rc = 0;
    ps_tensor *made = NULL, *place = NULL;
    if (ctx->step->dry && !leaf->managed) {              /* a script's own leaf gets nothing of a dry run */
        ps_tensor_unhold(grad);
        return 0;
    }
    if (leaf->managed && !leaf->grad_)
        rc = ctx->hooks->grad_place(ctx, leaf, &place);
    if (rc == 0 && place) {
        ps_attrs_copy_ none = { 0 };
        if (grad != place) rc = run_one(ctx, PS_OP_copy_, &none, 2, place, grad, &made);
        if (rc == 0) rc = ps_tensor_set_grad(leaf, place);
    } else if (rc == 0 && leaf->grad_) {
        ps_attrs_axpy_ attrs = { .alpha = 1 };
        rc = run_one(ctx, PS_OP_axpy_, &attrs, 2, leaf->grad_, grad, &made);
    } else if (rc == 0) {
        ps_attrs_contiguous none = { 0 };
        if (grad->dtype_ != leaf_dtype(leaf)) rc = cast_to(ctx, grad, leaf_dtype(leaf), &made);
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
    int rc = enqueue(w, node);
    if (rc == 0 && node->passed) rc = passed_already(node);
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
        int rc = ps_fail(PS_ESTATE, "the gradient rule of %s gave shape %s for input %d of shape %s",
                         name_of(node),
                         ps_shape_text(grad->ndim, grad->shape_, x, sizeof x), i,
                         ps_shape_text(want->ndim, want->shape, y, sizeof y));
        ps_tensor_unhold(grad);
        return rc;
    }
    if (e->leaf) return add_to_leaf(ctx, e->leaf, grad);
    if (grad->dtype_ != want->dtype) {
        ps_tensor *cast;
        int rc = cast_to(ctx, grad, want->dtype, &cast);
        ps_tensor_unhold(grad);
        if (rc < 0) return rc;
        ps_storage_hold(cast->storage);
        grad = cast;
    }
    return add_to_node(ctx, w, e->node, e->out, grad);
}

/* Which gradients of a node the walk puts off. */
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

/* Tells of the leaves of a node that passed. In an INPUT the engine learns which virtual stages use a leaf, no more. */
static int leaves_final(ps_ctx *ctx, const ps_node *node)
{
    for (int i = 0; i < node->n_in; i++) if (node->edges[i].leaf) PS_TRY(tape_leaf_final(ctx, node->edges[i].leaf));
    return 0;
}

/* Anomaly mode: ops that run from here on compute the gradient of a node's op. NULL: they do not. */
void tape_watch(ps_ctx *ctx, const ps_node *node)
{
    ctx->anomaly.in_backward = node != NULL;
    if (node) ctx->anomaly.of = node->op, ctx->anomaly.of_place = node->place, ctx->anomaly.of_module = node->module;
}

/* The holder of an output gets a copy, since rules may add to the gradient itself. */
static int give_holder(ps_ctx *ctx, ps_node *node)
{
    ps_tensor *grad = node->dout[node->holder_out], *copy = NULL;
    ps_attrs_contiguous none = { 0 };
    if (!grad || ctx->step->dry) return 0;
    PS_TRY(run_one(ctx, PS_OP_contiguous, &none, 1, grad, NULL, &copy));
    int rc = ps_tensor_set_grad(node->holder, copy);
    ps_tensor_release(copy);
    return rc;
}

/* Runs one node's rule and hands its results to the inputs' makers. */
int tape_pass(ps_ctx *ctx, ps_walk *w, ps_node *node)
{
    if (node->passed) return passed_already(node);
    if (node->holder) PS_TRY(give_holder(ctx, node));
    parts later = put_off(w, node);
    if (later == ALL_LATER) {
        node->passed = true;
        tape_uncount(node);
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
    node->passed = true;
    for (int i = 0; i < node->n_in; i++) if (din[i]) ps_storage_hold(din[i]->storage);
    while (g.n_temps > 0) ps_tensor_release(g.temps[--g.n_temps]);
    tape_uncount(node);
    if (rc == 0 && later == SOME_LATER) {
        rc = weights_put_off(w, node, split, din);
    } else {                                         /* before delivery, which looks whether a gradient is shared */
        for (int i = 0; i < node->n_out; i++) tape_let_go(&node->dout[i]);
        weights_settle(node);
    }
    for (int i = 0; i < node->n_in; i++) {
        if (!din[i]) continue;
        if (rc == 0 && ps_grad_wants_ever(&g, i)) rc = tape_deliver(ctx, w, node, i, din[i]);
        else ps_tensor_unhold(din[i]);
    }
    tape_watch(ctx, NULL);
    if (rc == 0) rc = leaves_final(ctx, node);
    if (rc < 0) ps_error_prefix("in backward: ");
    return rc;
}

static int seed_gradient(ps_ctx *ctx, ps_tensor *loss, ps_tensor *gradient, ps_tensor **out)
{
    char x[160], y[160];
    if (gradient) {
        if (!ps_same_shape(loss, gradient))
            return ps_fail(PS_EINVAL, "backward: the gradient has shape %s, the tensor %s",
                           ps_shape_text(gradient->ndim, gradient->shape_, x, sizeof x),
                           ps_shape_text(loss->ndim, loss->shape_, y, sizeof y));
        if (gradient->dtype_ != loss->dtype_) return cast_to(ctx, gradient, loss->dtype_, out);
        return ps_tensor_detach(gradient, out);
    }
    if (loss->numel_ != 1)
        return ps_fail(PS_EINVAL,
                       "backward from a tensor of shape %s needs a gradient of that shape; only a single value "
                       "can go without",
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

/* Gives the gradient (held) of `to` to its maker, or to `to` itself, a leaf. seq: the number the walk has come to. */
static int give_to(ps_ctx *ctx, ps_walk *w, ps_tensor *to, ps_tensor *grad, int64_t seq)
{
    if (w->put_off >= 0 && (!to->node || to->node->side)) return weights_relay(w, to, grad, seq);
    return to->node ? add_to_node(ctx, w, to->node, to->node_out, grad) : add_to_leaf(ctx, to, grad);
}

/* Gives the seeds, held references, to the makers of the roots. After a failure the rest is released. */
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
    ps_walk *w = ctx->walk;
    ps_tensor *seeds[PS_MAX_ROOTS];
    int rc = 0, made = 0;
    while (rc == 0 && made < n) {
        rc = seed_gradient(ctx, roots[made], gradients ? gradients[made] : NULL, &seeds[made]);
        if (rc == 0) ps_storage_hold(seeds[made++]->storage);
    }
    w->put_off = -1;
    if (rc == 0 && ctx->step->is.now.kind == PS_ACT_INPUT) rc = weights_open(ctx, w);
    if (rc == 0) {
        w->active = true;
        w->id = ctx->next_seq++;
        w->managed = false;
        for (int i = 0; i < n; i++) {                     /* counts all nodes before the first gradient goes */
            w->managed = w->managed || roots[i]->managed;
            tape_count_from(w, roots[i]->node);
        }
        if (w->managed && ctx->hooks) rc = ctx->hooks->walk_begin(ctx);
        if (ctx->away) ps_away_backward(ctx->away, true);
    }
    if (rc == 0) return plant(ctx, w, n, roots, seeds);
    for (int i = 0; i < made; i++) ps_tensor_unhold(seeds[i]);
    return rc;
}

int ps_backward_begin_n(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int64_t *segment)
{
    if (n < 1 || n > PS_MAX_ROOTS)
        return ps_fail(PS_EINVAL, "backward from %d tensors; it takes 1 to %d", n, PS_MAX_ROOTS);
    for (int i = 0; i < n; i++) {
        if (!roots[i]) return ps_fail(PS_EINVAL, "backward from nothing: it takes a tensor");
        if (!gradients || !gradients[i]) PS_TRY(ps_tensor_check_alive(roots[i]));     /* else its shape will do */
        if (!ps_tape_wants(roots[i]))
            return ps_fail(PS_EINVAL, "backward from a tensor that depends on nothing that requires a gradient (what "
                                      "is computed within ps.no_grad requires none)");
    }
    if (ctx->suspended.on) return ps_fail_suspended("backward");
    if (ctx->walk && ctx->walk->active) return ps_fail(PS_ESTATE, "a backward walk is under way");
    if (!ctx->walk && !(ctx->walk = ps_alloc0(sizeof *ctx->walk))) return ps_fail_nomem(sizeof *ctx->walk);
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = begin_walk(ctx, n, roots, gradients);
    ps_set_grad_enabled(ctx, enabled);
    if (rc < 0) ps_backward_end(ctx);
    return rc < 0 || !segment ? rc : ps_backward_next(ctx, segment);
}

int ps_backward_next(ps_ctx *ctx, int64_t *segment)
{
    ps_walk *w = ctx->walk;
    if (!w || !w->active) return ps_fail(PS_ESTATE, "no backward walk is under way");
    if (w->stopped) return ps_fail(PS_ESTATE, "the recompute segment that the walk stopped at was not run again");
    int enabled = ps_set_grad_enabled(ctx, 0), rc = 0;
    while (rc == 0 && w->n > 0) {
        ps_node *node = tape_dequeue(w);
        if (node->op == SEGMENT && node->passed) {
            rc = passed_already(node);
        } else if (node->op == BOUNDARY) {
            node->passed = true;                          /* its gradients wait to be taken */
        } else if (node->op == SEGMENT) {
            for (int i = 0; rc == 0 && i < node->n_in; i++) rc = check_version(node, &node->saved_in[i]);
            if (rc == 0) {
                w->stopped = node;
                *segment = node->segment;
                rc = 1;
                continue;
            }
        } else {
            rc = tape_pass(ctx, w, node);
        }
        if (rc < 0) give_up(node);
        ps_node_release(node);
    }
    ps_set_grad_enabled(ctx, enabled);
    if (rc <= 0) ps_backward_end(ctx);
    return rc;
}

int ps_backward_splice(ps_ctx *ctx, int n, ps_tensor *const *out)
{
    ps_walk *w = ctx->walk;
    ps_node *node = w ? w->stopped : NULL;
    if (!node) return ps_fail(PS_ESTATE, "the walk is not stopped at a recompute segment");
    if (n != node->n_out)
        return ps_fail(PS_EINVAL, "the segment gave %d tensors first, %d when run again", node->n_out, n);
    int enabled = ps_set_grad_enabled(ctx, 0), rc = node->holder ? give_holder(ctx, node) : 0;
    for (int i = 0; rc == 0 && i < n; i++) {
        ps_tensor *grad = node->dout[i];
        if (!grad || !ps_tape_wants(out[i])) continue;
        if (!ps_same_shape(grad, out[i])) {
            rc = ps_fail(PS_EINVAL, "output %d of a recompute segment changed its shape when it was run again", i);
            break;
        }
        node->dout[i] = NULL;
        tape_count_from(w, out[i]->node);
        rc = give_to(ctx, w, out[i], grad, node->seq);
    }
    ps_set_grad_enabled(ctx, enabled);
    node->passed = true;
    tape_uncount(node);
    tape_release_all(node);
    release_reads(node->reads, node->n_reads);
    node->n_reads = 0;
    w->stopped = NULL;
    if (rc < 0) give_up(node);
    ps_node_release(node);
    return rc;
}

/* Of a node that a walk had still to pass when it failed. */
static void drop(ps_node *node)
{
    tape_uncount(node);
    tape_release_all(node);
    give_up(node);
    ps_node_release(node);
}

void ps_backward_end(ps_ctx *ctx)
{
    ps_walk *w = ctx->walk;
    if (!w || !w->active) return;
    while (w->n > 0) drop(tape_dequeue(w));
    if (w->stopped) drop(w->stopped);
    w->stopped = NULL;
    w->active = false;
    if (ctx->away) ps_away_backward(ctx->away, false);
}

void ps_walk_reset(ps_ctx *ctx)
{
    ps_backward_end(ctx);
    if (ctx->walk) weights_drop(ctx->walk);
}

void ps_walk_end(ps_ctx *ctx)
{
    ps_walk *w = ctx->walk;
    ps_walk_reset(ctx);
    for (int32_t i = 0; w && i < w->n_lists; i++) ps_free(w->lists[i].nodes);
    if (w) {
        ps_free(w->lists);
        ps_free(w->heap);
    }
    ps_free(w);
    ctx->walk = NULL;
}

/* -- leaves -------------------------------------------------------------------------------------------------------- */
int ps_grad_enabled(ps_ctx *ctx) { return ctx->grad_enabled; }

int ps_set_keep_cheap(ps_ctx *ctx, int on)
{
    int was = ctx->keep_cheap;
    ctx->keep_cheap = on != 0;
    return was;
}

int ps_set_grad_enabled(ps_ctx *ctx, int enabled)
{
    int was = ctx->grad_enabled;
    ctx->grad_enabled = enabled != 0;
    return was;
}

int ps_tensor_require_grad(ps_tensor *t, int on)
{
    if (on && !ps_dtype_is_float(t->dtype_))
        return ps_fail(PS_EINVAL, "only float tensors can require gradients, this one is %s", ps_dtype_name(t->dtype_));
    if (t->node) return ps_fail(PS_EINVAL, "this tensor was computed from others; detach() it first");
    t->flags = on ? t->flags | PS_T_REQUIRES_GRAD : t->flags & ~PS_T_REQUIRES_GRAD;
    if (on) t->storage->trained = true;
    return 0;
}

ps_tensor *ps_tensor_get_grad(ps_tensor *t) { return t->grad_; }

int ps_tensor_keep_grad(ps_tensor *t, ps_tensor *holder)
{
    if (!t->node || (t->node->op < 0 && t->node->op != SEGMENT))
        return ps_fail(PS_EINVAL, "no op computed this tensor with gradients on: there is no gradient to keep");
    if (holder->node || holder->dtype_ != t->dtype_ || !ps_same_shape(t, holder) || holder->device_ != t->device_)
        return ps_fail(PS_EINVAL, "the holder of a gradient must be a tensor without history, of the same shape, type "
                       "and device");
    if (t->node->holder && t->node->holder_out != t->node_out)
        return ps_fail(PS_EINVAL, "the gradient of another output of this op is kept already");
    ps_tensor_retain(holder);
    if (t->node->holder) ps_tensor_release(t->node->holder);
    t->node->holder = holder;
    t->node->holder_out = t->node_out;
    return 0;
}

int ps_tensor_set_grad(ps_tensor *t, ps_tensor *grad)
{
    if (grad == t->grad_) return 0;
    if (t->ctx->suspended.on) return ps_fail_suspended("to set a gradient");
    if (grad) {
        if (!ps_same_shape(t, grad) || !ps_dtype_is_float(grad->dtype_) || grad->device_ != t->device_)
            return ps_fail(PS_EINVAL, "a gradient must be a float tensor of its tensor's shape, on its device");
        PS_TRY(ps_tensor_check_alive(grad));
        ps_scope_adopt(t->ctx, grad->storage);
        ps_tensor_retain(grad);
    }
    if (t->grad_) ps_tensor_release(t->grad_);
    t->grad_ = grad;
    return 0;
}
