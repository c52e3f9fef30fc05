/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the ops column_linear, row_linear and column_linear_grad. They are tensor-parallel products that
 * exchange rows with other ranks before or after the multiplication. The rows of a rank are sent in pieces. Each piece
 * has its own lane, and this thread multiplies while the pieces are being sent (Wang et al. 2023, "Overlap
 * Communication with Dependent Computation via Decomposition in Large Deep Learning Models"). In a gather, this thread
 * multiplies its own rows first, and then each piece of the other ranks when it arrives. In a reduction, this thread
 * multiplies the rows of the other ranks first, piece by piece, and then its own rows.
 *
 * Sums over ranks are in rank order, as in collective.c. The number of pieces changes only the order in which each
 * product adds its terms. column_linear has several products with the same rows. column_linear_grad adds their addends
 * to dx from the last product to the first, as the tape does for separate ops.
 *
 * If there is only one piece, or if a library of the device sends the rows, a collective runs before or after the whole
 * product. Memory is allocated before the ranks compare their calls, because only the allocation may fail on one rank
 * and succeed on another rank. */
#include "base/error.h"
#include "tensor/tensor.h"
#include "tensor_parallel/ops.h"
#include "tensor_parallel/rows.h"

typedef ps_attrs_row_linear with_product;       /* the attributes of all three ops begin with these fields */

typedef struct work {
    ps_group *g;
    place at;
    ps_call *call;
    const with_product *attrs;
    int rank, size, failed;                     /* failed: error of this rank before it allocates memory, or 0 */
    int32_t pieces;                             /* number of pieces of each rank's rows; 1: rows are not divided */
    /* n: number of rows of each rank
     * each: number of rows of each piece; the last piece can be smaller */
    int64_t n, each;
    /* moving: [PS_COMM_LANES] exchanges in progress, for the event record */
    group_call *moving;
} work;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* -- rows ---------------------------------------------------------------------------------------------------------- */
/* Allocates `rows` rows that have as many features as v. The memory is freed when the op ends. */
static int rows_new(work *w, const ps_view *v, int64_t rows, ps_view *out)
{
    *out = rows_of(v, 0, rows);
    if (w->failed < 0) return w->failed;
    size_t nbytes = (size_t)(rows * row_nbytes(v));
    out->data = w->call->scratch(w->call, nbytes ? nbytes : 1);
    return out->data ? 0 : PS_ENOMEM;           /* scratch has recorded the error */
}

/* first_of() returns the index of the first row of piece k within the n rows of a rank. rows_in() returns the number of
 * rows of piece k. */
static int64_t first_of(const work *w, int64_t k) { return least(k * w->each, w->n); }
static int64_t rows_in(const work *w, int64_t k) { return first_of(w, k + 1) - first_of(w, k); }

/* Returns the address and size of piece k of rank r's rows in v [size * n, features]. */
static ps_comm_part piece_of(const work *w, const ps_view *v, int r, int64_t k)
{
    int64_t row = row_nbytes(v);
    return (ps_comm_part){ (char *)v->data + (r * w->n + first_of(w, k)) * row, rows_in(w, k) * row };
}

/* -- products ------------------------------------------------------------------------------------------------------ */
/* Computes rows [first, first + rows) of y = linear(x, weight, b). If `dry` is set, only allocates the workspace of the
 * kernel. */
static int multiply(const work *w, const ps_view *x, const ps_view *weight, const ps_view *b, int out_in,
                    const ps_view *y, int64_t first, int64_t rows, bool dry)
{
    if (rows == 0) return 0;
    ps_view in[4] = { rows_of(x, first, rows), *weight, *b, absent }, out = rows_of(y, first, rows);
    ps_attrs_linear attrs = { .out_in = out_in };
    ps_call part = { .op = PS_OP_linear, .n_in = 4, .n_out = 1, .in = in, .out = &out, .attrs = &attrs, .dry = dry };
    return ps_call_part(w->call, &part);
}

/* Each of these functions returns a tensor of product i. The first three are for column_linear: weight, bias and
 * output. The last two are for column_linear_grad: dy and weight. */
static const ps_view *weight_of(const work *w, int i) { return &w->call->in[1 + 2 * i]; }
static const ps_view *bias_of(const work *w, int i) { return &w->call->in[2 + 2 * i]; }
static const ps_view *output_of(const work *w, int i) { return &w->call->out[i ? 1 + i : 0]; }
static const ps_view *dy_of(const work *w, int i) { return &w->call->in[i ? 2 + 2 * i : 0]; }
static const ps_view *dy_weight_of(const work *w, int i) { return &w->call->in[i ? 3 + 2 * i : 1]; }

/* For each weight that needs a gradient, computes dw from x [N, I] and dy [N, O]. Also computes db if it is wanted. */
static int multiply_weights(const work *w, const ps_view *x, bool dry)
{
    const ps_attrs_column_linear_grad *at = w->call->attrs;
    for (int i = 0; i < PS_MAX_COLUMNS; i++) {
        if (!(at->want_w >> i & 1)) continue;
        const ps_view *dy = dy_of(w, i);
        ps_attrs_linear_grad both = { .out_in = at->out_in, .accumulate = at->accumulate >> i & 1,
                                      .add_b = at->add_b >> i & 1 };
        ps_attrs_matmul one = { .accumulate = both.accumulate };
        ps_view left = at->out_in ? turned(dy) : turned(x), in[2] = { *x, *dy };
        ps_call part = { .op = PS_OP_linear_grad, .n_in = 2, .n_out = 2, .in = in, .out = &w->call->out[1 + 2 * i],
                         .attrs = &both, .dry = dry };
        if (!(at->want_b >> i & 1)) {
            in[1] = at->out_in ? *x : *dy;
            in[0] = left;
            part.op = PS_OP_matmul, part.n_out = 1, part.attrs = &one;
        }
        PS_TRY(ps_call_part(w->call, &part));
    }
    return 0;
}

/* Computes rows [first, first + rows) of all outputs of column_linear from the inputs x [rows, I] of these rows. */
static int multiply_columns(const work *w, const ps_view *x, int64_t first, int64_t rows, bool dry)
{
    for (int i = 0; i < PS_MAX_COLUMNS; i++) {
        if (!ps_has(output_of(w, i))) continue;
        ps_view y = rows_of(output_of(w, i), first, rows);
        PS_TRY(multiply(w, x, weight_of(w, i), bias_of(w, i), w->attrs->out_in, &y, 0, rows, dry));
    }
    return 0;
}

/* Adds the first `rows` rows of `more` to the same rows of `sum`. */
static int add_rows(const work *w, const ps_view *sum, const ps_view *more, int64_t rows)
{
    if (rows == 0) return 0;
    ps_view out = rows_of(sum, 0, rows), in[2] = { out, rows_of(more, 0, rows) };
    ps_attrs_add none = { 0 };
    ps_call part = { .op = PS_OP_add, .n_in = 2, .n_out = 1, .in = in, .out = &out, .attrs = &none };
    return ps_call_part(w->call, &part);
}

/* Computes rows [first, first + rows) of this rank's addend to dx and writes them to the same rows of `all` [size * n,
 * I]. more: memory for `rows` rows, which is used if there are several products. */
static int multiply_inputs(const work *w, int64_t first, int64_t rows, const ps_view *all, const ps_view *more,
                           bool dry)
{
    ps_view sum = rows_of(all, first, rows);
    bool begun = false;
    for (int i = PS_MAX_COLUMNS - 1; i >= 0; i--) {
        if (!ps_has(dy_of(w, i))) continue;
        ps_view dy = rows_of(dy_of(w, i), first, rows);
        PS_TRY(multiply(w, &dy, dy_weight_of(w, i), &absent, !w->attrs->out_in, begun ? more : &sum, 0, rows, dry));
        if (begun && !dry) PS_TRY(add_rows(w, &sum, more, rows));
        begun = true;
    }
    return 0;
}

/* Returns the first row of piece k of the rank that is i positions after this rank. */
static int64_t others_first(const work *w, int i, int64_t k) { return (w->rank + i) % w->size * w->n + first_of(w, k); }

/* Lists in `rows` how many rows a product can have, and returns the length of the list. Kernels need workspace for each
 * entry. With one piece, the only entry is the row count of all ranks together. Otherwise rows[0] is the row count of
 * this rank, and rows[1] is the row count of the first piece, which is the largest piece. */
static int tried_rows(const work *w, int64_t rows[2])
{
    rows[0] = w->pieces == 1 ? w->size * w->n : w->n;
    rows[1] = rows_in(w, 0);
    return w->pieces == 1 ? 1 : 2;
}

/* -- exchanges ----------------------------------------------------------------------------------------------------- */
/* Begins to send g->send and to receive g->recv, the pieces k of the ranks' rows of v. Until move_end, the event record
 * shows the exchange as a call of `op`, one of OP_*. */
static int move_begin(const work *w, int op, int lane, const ps_view *v, int64_t k)
{
    w->moving[lane] = (group_call){ op, group_call_begin(), w->size * rows_in(w, k) * row_nbytes(v) };
    return group_move_begin(w->g, w->at, lane);
}

static int move_end(const work *w, int lane)
{
    int rc = group_move_end(w->g, w->at, lane);
    group_call_end(w->g, &w->moving[lane]);
    return rc;
}

/* Begins to gather piece k of the rows of all ranks. Sends piece k of own [n, features] to the other ranks. Receives
 * the pieces of the other ranks into all [size * n, features]. */
static int gather_begin(const work *w, int lane, int64_t k, const ps_view *own, const ps_view *all)
{
    ps_group *g = w->g;
    group_clear_parts(g);
    int64_t row = row_nbytes(own), nbytes = rows_in(w, k) * row;
    for (int r = 0; r < w->size; r++) {
        if (r == w->rank) continue;
        g->send[r] = (ps_comm_part){ (char *)own->data + first_of(w, k) * row, nbytes };
        g->recv[r] = piece_of(w, all, r, k);
    }
    return move_begin(w, OP_COLUMN, lane, own, k);
}

/* Returns rank r's addend to piece k of this rank's rows. The addend of this rank is in `all` [size * n, features]. The
 * addends of the other ranks are in `addends` [(size - 1) * n, features]. */
static ps_comm_part addend(const work *w, const ps_view *all, const ps_view *addends, int r, int64_t k)
{
    if (r == w->rank) return piece_of(w, all, r, k);
    return piece_of(w, addends, r - (r > w->rank), k);
}

/* Begins to exchange the addends to piece k of each rank's rows. Sends to each other rank the addend to that rank's
 * rows, from `all`. Receives the addends of the other ranks to the rows of this rank. */
static int reduce_begin(const work *w, int64_t k, const ps_view *all, const ps_view *addends)
{
    ps_group *g = w->g;
    group_clear_parts(g);
    for (int r = 0; r < w->size; r++) {
        if (r == w->rank) continue;
        g->send[r] = piece_of(w, all, r, k);
        g->recv[r] = addend(w, all, addends, r, k);
    }
    return move_begin(w, w->call->op == PS_OP_row_linear ? OP_ROW : OP_COLUMN_GRAD, PS_COMM_PIECE + (int)k, all, k);
}

/* Sums the addends of all ranks to the rows of this rank, and writes the sums to out [n, features]. Sums each piece
 * when the addends to the piece have arrived. */
static int reduce_end(const work *w, const ps_view *all, const ps_view *addends, const ps_view *out)
{
    ps_group *g = w->g;
    for (int64_t k = 0; k < w->pieces; k++) {
        PS_TRY(move_end(w, PS_COMM_PIECE + (int)k));
        for (int r = 0; r < w->size; r++) g->addends[r] = addend(w, all, addends, r, k).address;
        PS_TRY(group_add_up(g, w->at, PS_REDUCE_SUM, out->dtype, rows_in(w, k) * out->shape[1],
                            (char *)out->data + first_of(w, k) * row_nbytes(out)));
    }
    return 0;
}

/* Performs a dry call, which sends no bytes. Records that the call gathers x of each rank and sums `adds`. In the dry
 * run of a step, one record stands for all pieces. rc: 0, or the error that this rank got when it allocated memory. */
static int without_bytes(const work *w, int op, const ps_view *x, const ps_view *adds, int rc)
{
    const ps_view *some = adds ? adds : x;
    if (rc < 0) return rc;
    if (w->pieces > 1 && w->g->ctx->step->dry)
        return group_without_bytes(w->g, op, w->at, w->call->in[0].dtype, nbytes_of(some), w->pieces);
    if (x) PS_TRY(group_without_bytes(w->g, OP_ALL_GATHER, w->at, x->dtype, nbytes_of(x), 0));
    return adds ? group_without_bytes(w->g, OP_REDUCE_SCATTER, w->at, adds->dtype, nbytes_of(adds), 0) : 0;
}

/* Ends a call on which the ranks have agreed. rc: result of this rank's exchanges and products. If rc is an error, this
 * rank closes its connections. Otherwise the other ranks would wait for the remaining exchanges. Closing the
 * connections makes the call fail on the other ranks, too. */
static int ended(const work *w, int op, int rc)
{
    ps_comm *comm = w->g->at[w->at].comm;
    if (rc < 0) comm->table->hang_up(comm);
    w->g->recorded.began_ns = 0;                /* record no call, because its exchanges were recorded */
    return group_moved(w->g, op, w->at, rc);
}

/* -- column_linear: x [n, I], w, b?, ... -> y [size * n, O], full? [size * n, I], ... ------------------------------ */
static int column_pieces(const work *w, const ps_view *full)
{
    const ps_view *x = &w->call->in[0];
    for (int64_t k = 0; k < w->pieces; k++) PS_TRY(gather_begin(w, PS_COMM_PIECE + (int)k, k, x, full));
    if (ps_has(&w->call->out[1]))
        PS_TRY(group_copy(w->g, w->at, rows_of(full, w->rank * w->n, w->n).data, x->data, nbytes_of(x)));
    PS_TRY(multiply_columns(w, x, w->rank * w->n, w->n, false));
    for (int64_t k = 0; k < w->pieces; k++) {
        PS_TRY(move_end(w, PS_COMM_PIECE + (int)k));
        for (int i = 1; i < w->size; i++) {
            int64_t first = others_first(w, i, k);
            ps_view part = rows_of(full, first, rows_in(w, k));
            PS_TRY(multiply_columns(w, &part, first, rows_in(w, k), false));
        }
    }
    return 0;
}

static int column(work *w)
{
    const ps_view *x = &w->call->in[0];
    ps_view full = w->call->out[1];
    int64_t rows[2];
    int rc = ps_has(&full) ? w->failed : rows_new(w, x, w->size * w->n, &full), tries = tried_rows(w, rows);
    for (int i = 0; rc == 0 && i < tries; i++) rc = multiply_columns(w, &full, 0, rows[i], true);
    if (w->call->dry) return without_bytes(w, OP_COLUMN, x, NULL, rc);
    if (w->pieces > 1) {
        PS_TRY(group_agree_bytes(w->g, OP_COLUMN, w->at, x->dtype, nbytes_of(x), w->pieces, rc));
        return ended(w, OP_COLUMN, column_pieces(w, &full));
    }
    PS_TRY(group_all_gather(w->g, w->at, x->dtype, x->data, nbytes_of(x), full.data, rc));
    return multiply_columns(w, &full, 0, w->size * w->n, false);
}

/* -- row_linear: x [size * n, I] or [..., I], w -> y [n, O] -------------------------------------------------------- */
static int row_pieces(const work *w, const ps_view *x, const ps_view *all, const ps_view *addends)
{
    const ps_view *weight = &w->call->in[1];
    int out_in = w->attrs->out_in;
    for (int64_t k = 0; k < w->pieces; k++) {
        for (int i = 1; i < w->size; i++)
            PS_TRY(multiply(w, x, weight, &absent, out_in, all, others_first(w, i, k), rows_in(w, k), false));
        PS_TRY(reduce_begin(w, k, all, addends));
    }
    PS_TRY(multiply(w, x, weight, &absent, out_in, all, w->rank * w->n, w->n, false));
    return reduce_end(w, all, addends, &w->call->out[0]);
}

/* Returns a view of a contiguous tensor x [..., I] with the shape [rows, I]. */
static ps_view as_rows(const ps_view *x, int64_t rows)
{
    int64_t features = x->shape[x->ndim - 1];
    ps_view v = *x;
    v.ndim = 2;
    v.shape[0] = rows, v.shape[1] = features;
    v.stride[0] = features, v.stride[1] = 1;
    return v;
}

static int row(work *w)
{
    const ps_view *in = w->call->in, *y = &w->call->out[0], flat = as_rows(&in[0], w->size * w->n), *x = &flat;
    int out_in = w->attrs->out_in;
    ps_view all, addends = absent;
    int64_t rows[2];
    int rc = rows_new(w, y, w->size * w->n, &all), tries = tried_rows(w, rows);
    if (rc == 0 && w->pieces > 1) rc = rows_new(w, y, (w->size - 1) * w->n, &addends);
    for (int i = 0; rc == 0 && i < tries; i++) rc = multiply(w, x, &in[1], &absent, out_in, &all, 0, rows[i], true);
    if (w->call->dry) return without_bytes(w, OP_ROW, NULL, &all, rc);
    if (w->pieces > 1) {
        PS_TRY(group_agree_bytes(w->g, OP_ROW, w->at, y->dtype, nbytes_of(&all), w->pieces, rc));
        return ended(w, OP_ROW, row_pieces(w, x, &all, &addends));
    }
    if (rc == 0) rc = multiply(w, x, &in[1], &absent, out_in, &all, 0, x->shape[0], false);
    if (rc == 0) rc = group_after_now(w->g, w->at);
    return group_reduce_scatter(w->g, w->at, y->dtype, all.data, nbytes_of(&all), y->data, rc);
}

/* -- column_linear_grad: dy [size * n, O], w, x? [n, I], full? [size * n, I], ... -> dx [n, I], dw, db?, ... ------- */
static bool gathers_x(const work *w)
{
    return ((const ps_attrs_column_linear_grad *)w->call->attrs)->want_w && !ps_has(&w->call->in[3]);
}

/* Computes dx and dw. Gathers x while the products for dx are computed, and exchanges the addends to dx while the
 * products for dw are computed. */
static int grad_pieces(const work *w, const ps_view *full, const ps_view *all, const ps_view *more,
                       const ps_view *addends)
{
    const ps_view *x = &w->call->in[2];
    work whole = *w;
    whole.pieces = 1, whole.each = w->n;
    if (gathers_x(w)) {
        PS_TRY(gather_begin(&whole, PS_COMM_DATA, 0, x, full));
        PS_TRY(group_copy(w->g, w->at, rows_of(full, w->rank * w->n, w->n).data, x->data, nbytes_of(x)));
    }
    for (int64_t k = 0; k < w->pieces; k++) {
        for (int i = 1; i < w->size; i++)
            PS_TRY(multiply_inputs(w, others_first(w, i, k), rows_in(w, k), all, more, false));
        PS_TRY(reduce_begin(w, k, all, addends));
    }
    PS_TRY(multiply_inputs(w, w->rank * w->n, w->n, all, more, false));
    if (gathers_x(w)) PS_TRY(move_end(w, PS_COMM_DATA));
    PS_TRY(multiply_weights(w, full, false));
    return reduce_end(w, all, addends, &w->call->out[0]);
}

static int column_grad(work *w)
{
    const ps_view *x = &w->call->in[2], *dx = &w->call->out[0];
    bool gathers = gathers_x(w), several = ps_has(dy_of(w, 1)) || ps_has(dy_of(w, 2));
    ps_view full = w->call->in[3], all, more = absent, addends = absent;
    int64_t rows[2];
    int rc = rows_new(w, dx, w->size * w->n, &all), tries = tried_rows(w, rows);
    if (rc == 0 && gathers) rc = rows_new(w, x, w->size * w->n, &full);
    if (rc == 0 && several) rc = rows_new(w, dx, rows[0], &more);
    if (rc == 0 && w->pieces > 1) rc = rows_new(w, dx, (w->size - 1) * w->n, &addends);
    for (int i = 0; rc == 0 && i < tries; i++) rc = multiply_inputs(w, 0, rows[i], &all, &more, true);
    if (rc == 0) rc = multiply_weights(w, &full, true);
    if (w->call->dry) return without_bytes(w, OP_COLUMN_GRAD, gathers ? x : NULL, &all, rc);
    if (w->pieces > 1) {
        PS_TRY(group_agree_bytes(w->g, OP_COLUMN_GRAD, w->at, dx->dtype, nbytes_of(&all), w->pieces, rc));
        return ended(w, OP_COLUMN_GRAD, grad_pieces(w, &full, &all, &more, &addends));
    }
    if (gathers) {
        PS_TRY(group_all_gather(w->g, w->at, x->dtype, x->data, nbytes_of(x), full.data, rc));
        rc = 0;
    }
    if (rc == 0) rc = multiply_inputs(w, 0, w->size * w->n, &all, &more, false);
    if (rc == 0) rc = group_after_now(w->g, w->at);
    PS_TRY(group_reduce_scatter(w->g, w->at, dx->dtype, all.data, nbytes_of(&all), dx->data, rc));
    return multiply_weights(w, &full, false);
}

/* -- entry point --------------------------------------------------------------------------------------------------- */
static int carry_out(work *w)
{
    switch (w->call->op) {
    case PS_OP_column_linear: return column(w);
    case PS_OP_row_linear: return row(w);
    case PS_OP_column_linear_grad: return column_grad(w);
    default: return ps_fail(PS_EUNSUP, "this op is not a product of several ranks");
    }
}

int group_linear(ps_group *g, place at, bool carried, ps_call *call)
{
    const with_product *attrs = call->attrs;
    group_call moving[PS_COMM_LANES];
    work w = { .g = g, .at = at, .call = call, .attrs = attrs, .rank = attrs->rank, .size = attrs->size, .pieces = 1,
               .moving = moving };
    const ps_view *some = call->op == PS_OP_column_linear ? &call->in[0] : &call->out[0];        /* [n, ..] */
    w.n = w.each = some->shape[0];
    bool pieces = carried && w.size > 1 && attrs->pieces > 1 && w.n > 1 && some->numel > 0 && call->in[0].numel > 0 &&
                  call->out[0].numel > 0;
    if (pieces && (call->dry || !g->comm->pretends)) {
        w.each = (w.n + attrs->pieces - 1) / attrs->pieces;
        w.pieces = (int32_t)((w.n + w.each - 1) / w.each);
    }
    int64_t sent = g->bytes_sent;
    w.failed = call->dry ? 0 : group_after_now(g, at);
    int rc = carry_out(&w);
    if (rc == 0 && pieces) g->bytes_in_pieces += g->bytes_sent - sent;
    return rc;
}
