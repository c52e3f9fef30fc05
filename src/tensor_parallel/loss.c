/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the op parallel_lm_loss. The op computes the cross entropy of the logits x * w^T + bias. Each
 * rank computes only the logits of its own words (Shoeybi et al. 2019, "Megatron-LM", section 3). As in lm_loss, the
 * rows are processed in panels, and the gradients of a panel are computed while its logits exist. Therefore the op
 * computes only three products, and allocates memory only for the logits of one panel.
 *
 * For each panel, the ranks exchange three or four numbers per row (logit_stats). If x has only the rows of this
 * rank, the rows of all ranks are gathered once before the panels, and dx is summed over the ranks after the panels.
 * Backward exchanges nothing.
 *
 * The panels (base/panels.h) depend only on shapes, which are the same on all ranks. dw is rounded to its type once per
 * panel. If only this rank fails, it passes the error to its next collective. All ranks then return this error from the
 * collective. */
#include "base/error.h"
#include "base/panels.h"
#include "tensor/tensor.h"
#include "tensor_parallel/ops.h"
#include "tensor_parallel/rows.h"

typedef struct head {
    ps_group *g;
    place at;
    ps_call *call;
    const ps_attrs_parallel_lm_loss *attrs;
    /* x, dx: inputs and their gradients for all rows [N, C]; dx can be absent */
    ps_view x, dx;
    int wide;                                   /* dtype of the losses and of the exchanged values */
    /* rows: number of rows per panel
     * kinds: number of exchanged values per row */
    int64_t N, V, C, rows, kinds;
    /* first: index of the first word of this rank
     * words: number of words of this rank; the remaining V - words columns of the logits are padding */
    int64_t first, words;
    /* Shapes: logits [rows, V], mine [kinds, rows], all [size, kinds, rows], losses [N]. */
    void *logits, *mine, *all, *losses;
    void *hits;                                 /* int32 [2, rows], or NULL if hits are not wanted */
} head;

/* -- views --------------------------------------------------------------------------------------------------------- */
static ps_view vector(void *data, int dtype, int64_t n)
{
    return (ps_view){ .data = data, .dtype = dtype, .ndim = 1, .numel = n, .shape = { n }, .stride = { 1 } };
}

static ps_view matrix(void *data, int dtype, int64_t rows, int64_t columns)
{
    return (ps_view){ .data = data, .dtype = dtype, .ndim = 2, .numel = rows * columns, .shape = { rows, columns },
                      .stride = { columns, 1 } };
}

static char *place_in(const ps_view *v, int64_t i) { return (char *)v->data + i * ps_dtype_bytes(v->dtype); }

static void *room(const head *h, int64_t n, int dtype)
{
    int64_t nbytes = n * ps_dtype_bytes(dtype);
    return h->call->scratch(h->call, (size_t)(nbytes > 0 ? nbytes : 1));
}

/* -- products and losses of one panel ------------------------------------------------------------------------------ */
static int run(const head *h, bool dry, int op, const void *attrs, int n_in, const ps_view *in, int n_out, ps_view *out)
{
    ps_call part = { .op = op, .n_in = n_in, .n_out = n_out, .in = in, .out = out, .attrs = attrs, .dry = dry };
    return ps_call_part(h->call, &part);
}

static ps_view logits_of(const head *h, int64_t n) { return matrix(h->logits, h->x.dtype, n, h->V); }

static ps_view targets_of(const head *h, int64_t first, int64_t n)
{
    const ps_view *target = &h->call->in[2];
    return vector(place_in(target, first), target->dtype, n);
}

/* Computes the logits of n rows, starting at row `first`. From these logits, computes the values that this rank sends
 * to the other ranks. */
static int tell(const head *h, int64_t first, int64_t n, bool dry)
{
    const ps_view *in = h->call->in;
    ps_attrs_linear product = { .out_in = 1 };
    ps_attrs_logit_stats attrs = { .first = h->first, .words = h->words };
    ps_view logits = logits_of(h, n), mine = matrix(h->mine, h->wide, h->kinds, n);
    ps_view multiplied[4] = { rows_of(&h->x, first, n), in[1], in[4], absent };
    ps_view told[3] = { logits, targets_of(h, first, n), in[5] };
    PS_TRY(run(h, dry, PS_OP_linear, &product, 4, multiplied, 1, &logits));
    return run(h, dry, PS_OP_logit_stats, &attrs, 3, told, 1, &mine);
}

/* Adds the gradients of a panel: dlogits^T * x to dw, and the sum of the rows of dlogits to db. If `add` is not set (in
 * the first panel), overwrites dw and db instead. */
static int add_weights(const head *h, const ps_view *dlogits, const ps_view *x, bool add, bool dry)
{
    ps_view *dw = &h->call->out[2], *db = &h->call->out[3];
    ps_attrs_matmul product = { .accumulate = add };
    ps_attrs_sum sum = { .dims = 1, .accumulate = add };
    if (ps_has(dw)) {
        ps_view in[2] = { turned(dlogits), *x };
        PS_TRY(run(h, dry, PS_OP_matmul, &product, 2, in, 1, dw));
    }
    return ps_has(db) ? run(h, dry, PS_OP_sum, &sum, 1, dlogits, 1, db) : 0;
}

/* Adds the hits of a panel to the hits that the op returns. If `add` is not set, overwrites them instead. */
static int add_hits(const head *h, const ps_view *hits, bool add, bool dry)
{
    ps_attrs_sum sum = { .dims = 2, .accumulate = add };
    return h->hits ? run(h, dry, PS_OP_sum, &sum, 1, hits, 1, &h->call->out[4]) : 0;
}

/* Computes the losses of n rows, starting at row `first`, from the values of all ranks. Adds the gradients of these
 * rows to dx, dw and db. */
static int lose(const head *h, int64_t first, int64_t n, bool dry)
{
    const ps_view *in = h->call->in, *share = &in[3];
    bool grads = h->attrs->want_grad != 0;
    ps_attrs_linear product = { .out_in = 0 };
    ps_attrs_logit_loss attrs = { .first = h->first, .words = h->words, .want_grad = grads, .dloss = h->attrs->dloss,
                                .want_hits = h->hits != NULL };
    ps_view logits = logits_of(h, n), losses = vector(h->losses, h->wide, h->N);
    ps_view hits = h->hits ? matrix(h->hits, PS_I32, 2, n) : absent;
    ps_view out[3] = { vector(place_in(&losses, first), h->wide, n), grads ? logits : absent, hits };
    ps_view all = { .data = h->all, .dtype = h->wide, .ndim = 3, .numel = h->attrs->size * h->kinds * n,
                    .shape = { h->attrs->size, h->kinds, n }, .stride = { h->kinds * n, n, 1 } };
    ps_view own = matrix(place_in(share, first), share->dtype, 3, n), x = rows_of(&h->x, first, n);
    own.stride[0] = h->N;
    ps_view from[5] = { logits, targets_of(h, first, n), all, own, in[5] };
    PS_TRY(run(h, dry, PS_OP_logit_loss, &attrs, 5, from, 3, out));
    PS_TRY(add_hits(h, &hits, first > 0, dry));
    if (ps_has(&h->dx)) {
        ps_view dx = rows_of(&h->dx, first, n), multiplied[4] = { logits, in[1], absent, absent };
        PS_TRY(run(h, dry, PS_OP_linear, &product, 4, multiplied, 1, &dx));
    }
    return add_weights(h, &logits, &x, first > 0, dry);
}

/* Sums the losses of all rows. If there are no rows, sets dw, db and the hits to 0. */
static int finish(const head *h, bool dry)
{
    ps_attrs_sum sum = { .dims = 1 };
    ps_attrs_fill_ zero = { .value = 0 };
    ps_view losses = vector(h->losses, h->wide, h->N), *out = h->call->out;
    for (int i = 2; h->N == 0 && i < 5; i++)
        if (ps_has(&out[i])) PS_TRY(run(h, dry, PS_OP_fill_, &zero, 1, &out[i], 1, &out[i]));
    return run(h, dry, PS_OP_sum, &sum, 1, &losses, 1, &out[0]);
}

/* -- the op -------------------------------------------------------------------------------------------------------- */
static int64_t in_panel(const head *h, int64_t first) { return h->N - first < h->rows ? h->N - first : h->rows; }

/* Allocates the memory of this call, and the workspace of its largest products. */
static int take_room(head *h)
{
    const ps_view *x = &h->call->in[0], *dx = &h->call->out[1];
    bool parted = h->attrs->parted;
    h->x = matrix(parted ? room(h, h->N * h->C, x->dtype) : x->data, x->dtype, h->N, h->C);
    if (ps_has(dx)) h->dx = matrix(parted ? room(h, h->N * h->C, dx->dtype) : dx->data, dx->dtype, h->N, h->C);
    h->logits = room(h, h->rows * h->V, x->dtype);
    h->mine = room(h, h->kinds * h->rows, h->wide);
    h->all = room(h, h->attrs->size * h->kinds * h->rows, h->wide);
    h->losses = room(h, h->N, h->wide);
    bool hits = h->attrs->want_hits && ps_has(&h->call->out[4]);
    if (hits) h->hits = room(h, 2 * h->rows, PS_I32);
    bool there = h->logits && h->mine && h->all && h->losses && (h->hits || !hits);
    if (parted) there = there && h->x.data && (h->dx.data || !ps_has(dx));
    if (!there) return PS_ENOMEM;               /* scratch has recorded the error */
    if (h->N > 0) {
        PS_TRY(tell(h, 0, h->rows, true));
        PS_TRY(lose(h, 0, h->rows, true));
    }
    return finish(h, true);
}

static int without_bytes(const head *h)
{
    const ps_view *x = &h->call->in[0];
    if (h->attrs->parted) PS_TRY(group_without_bytes(h->g, OP_ALL_GATHER, h->at, x->dtype, nbytes_of(x), 0));
    for (int64_t first = 0; first < h->N; first += h->rows) {
        int64_t nbytes = h->kinds * in_panel(h, first) * ps_dtype_bytes(h->wide);
        PS_TRY(group_without_bytes(h->g, OP_ALL_GATHER, h->at, h->wide, nbytes, 0));
    }
    if (!ps_has(&h->dx)) return 0;
    return group_without_bytes(h->g, h->attrs->parted ? OP_REDUCE_SCATTER : OP_ALL_REDUCE, h->at, h->dx.dtype,
                               nbytes_of(&h->dx), 0);
}

/* Computes all panels, and then sums dx over the ranks. rc: 0, or the error that this rank got when it allocated
 * memory. */
static int panels(const head *h, int rc)
{
    ps_group *g = h->g;
    for (int64_t first = 0; first < h->N; first += h->rows) {
        int64_t n = in_panel(h, first);
        if (rc == 0) rc = tell(h, first, n, false);
        if (rc == 0) rc = group_after_now(g, h->at);
        PS_TRY(group_all_gather(g, h->at, h->wide, h->mine, h->kinds * n * ps_dtype_bytes(h->wide), h->all, rc));
        rc = lose(h, first, n, false);
    }
    if (rc == 0) rc = finish(h, false);
    if (rc == 0) rc = group_after_now(g, h->at);
    if (!ps_has(&h->dx)) return rc;
    if (!h->attrs->parted)
        return group_all_reduce(g, h->at, h->dx.dtype, h->dx.data, nbytes_of(&h->dx), rc);
    return group_reduce_scatter(g, h->at, h->dx.dtype, h->dx.data, nbytes_of(&h->dx), h->call->out[1].data, rc);
}

int group_lm_loss(ps_group *g, place at, ps_call *call)
{
    const ps_attrs_parallel_lm_loss *attrs = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1];
    head h = { .g = g, .at = at, .call = call, .attrs = attrs, .wide = call->out[0].dtype, .N = call->in[2].numel,
               .V = w->shape[0], .C = w->shape[1], .kinds = ps_has(&call->in[5]) ? 4 : 3, .dx = absent };
    h.rows = ps_panel_rows(h.N, h.V);
    h.first = attrs->rank * h.V;
    h.words = attrs->words - h.first < h.V ? attrs->words - h.first : h.V;
    if (h.words < 0) h.words = 0;
    int rc = take_room(&h);
    if (call->dry) return rc < 0 ? rc : without_bytes(&h);
    if (attrs->parted) {
        if (rc == 0) rc = group_after_now(g, at);
        PS_TRY(group_all_gather(g, at, x->dtype, x->data, nbytes_of(x), h.x.data, rc));
        rc = 0;
    }
    return panels(&h, rc);
}
