/* SPDX-License-Identifier: BSD-3-Clause
 * This file adds other actions between the forwards and backwards of a row: transfers, reductions and yields. A message
 * is sent as soon as it is made. A message is received immediately before the action that needs it, or earlier if a
 * later message of the same link is needed. The gradients of a virtual stage are reduced after its last backward.
 *
 * YIELD i is the point at which the loop of the script receives micro-batch i. The body of the loop may make all ranks
 * wait for each other. Therefore each rank must be able to reach its YIELD i while the other ranks wait at YIELD i.
 * YIELD i is the latest such point before the rank's first backward of micro-batch i. To place YIELD i, each row is cut
 * before this backward. Then the cuts are moved towards the beginning of the rows until no action before a cut needs an
 * action after a cut. If a rank's YIELD i were later, the rank could wait for an action that another rank performs only
 * after its own YIELD i. Actions after YIELD i wait only for messages that are made after the loss of micro-batch i.
 * Therefore waiting for this loss at YIELD i costs no time. */
#include <string.h>
#include "base/grow.h"
#include "pipe/pipe.h"

typedef struct lowering {
    ps_pipe_table *t;
    /* cut: [stages] position at which each row is cut for the yield that is being placed */
    int32_t *cut;
    int32_t *safe;                  /* [stages] the cuts of the previous yield */
    /* yields: [stages x micro_batches] index of the action that follows each yield */
    int32_t *yields;
    /* spans: [stages] for an evaluation, the simulated times of each row if every forward takes a time of 1 */
    ps_pipe_span **spans;
    /* n_taken: [n_vstages] for each link, the number of its messages that have a receive in the rows written so far */
    int32_t *n_taken[PIPE_DIRECTIONS];
} lowering;

/* -- yields -------------------------------------------------------------------------------------------------------- */
static bool is_back(const ps_action *a) { return a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT; }

/* Returns the latest position of the yield of `micro` in the row of `rank`, without regard to the other ranks. In
 * training, this is the position of the rank's first backward of `micro`. In an evaluation, the rank of the last
 * virtual stage yields as soon as the output exists. Any other rank yields so early that it is at most 2 * stages
 * micro-batches ahead. */
static int32_t alone(const lowering *w, int rank, int32_t micro)
{
    const ps_pipe_table *t = w->t;
    const pipe_row *row = &t->rows[rank];
    int32_t at = w->safe[rank], last = t->spec.vstages - 1, ahead = micro + t->spec.stages;
    if (!t->spec.forward_only) {
        while (at < row->n && !(is_back(&row->actions[at]) && row->actions[at].micro >= micro)) at++;
        return at;
    }
    if (rank == t->rank_of[last]) return t->places[pipe_pair(t, last, micro)].forward + 1;
    if (ahead >= t->spec.micro_batches) return row->n;
    double end = w->spans[t->rank_of[last]][t->places[pipe_pair(t, last, ahead)].forward].end;
    while (at < row->n && w->spans[rank][at].begin < end) at++;
    return at;
}

/* Returns true if the action needs no message, or if the sender makes the message before the cut of its row. */
static bool is_inside(const lowering *w, const ps_action *a)
{
    const ps_pipe_table *t = w->t;
    int d;
    int32_t from;
    if (!pipe_takes(t, a, &d, &from)) return true;
    const pipe_place *place = &t->places[pipe_pair(t, from, a->micro)];
    return (d == PIPE_UP ? place->forward : place->back) < w->cut[t->rank_of[from]];
}

static void place_yield(lowering *w, int32_t micro)
{
    const ps_pipe_table *t = w->t;
    bool changed = true;
    for (int rank = 0; rank < t->spec.stages; rank++) w->cut[rank] = alone(w, rank, micro);
    while (changed) {
        changed = false;
        for (int rank = 0; rank < t->spec.stages; rank++)
            for (int32_t at = w->safe[rank]; at < w->cut[rank]; at++)
                if (!is_inside(w, &t->rows[rank].actions[at])) w->cut[rank] = at, changed = true;
    }
    for (int rank = 0; rank < t->spec.stages; rank++) {
        w->yields[(int64_t)rank * t->spec.micro_batches + micro] = w->cut[rank];
        w->safe[rank] = w->cut[rank];
    }
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */
static int push_takes(lowering *w, pipe_row *row, const ps_action *a)
{
    const ps_pipe_table *t = w->t;
    int d;
    int32_t from;
    if (!pipe_takes(t, a, &d, &from)) return 0;
    int32_t link = pipe_link(t, a->vstage, from), turn = t->turn[d][pipe_pair(t, from, a->micro)];
    for (; link >= 0 && w->n_taken[d][link] <= turn; w->n_taken[d][link]++) {
        int32_t message = t->order[d][t->link_base[link] + w->n_taken[d][link]];
        int32_t sender = message / t->spec.micro_batches, micro = message % t->spec.micro_batches;
        PS_TRY(pipe_push(row, d == PIPE_UP ? PS_ACT_RECV_F : PS_ACT_RECV_B, sender + (d == PIPE_UP ? 1 : -1), micro));
    }
    return 0;
}

static int push_gives(lowering *w, pipe_row *row, const ps_action *a)
{
    int d;
    int32_t to;
    if (!pipe_gives(w->t, a, &d, &to) || pipe_link(w->t, a->vstage, to) < 0) return 0;
    return pipe_push(row, d == PIPE_UP ? PS_ACT_SEND_F : PS_ACT_SEND_B, a->vstage, a->micro);
}

static bool is_last_sum(const ps_pipe_table *t, const ps_action *a)
{
    return (a->kind == PS_ACT_WEIGHT || a->kind == PS_ACT_BACKWARD) && a->micro == t->spec.micro_batches - 1;
}

static int lower_row(lowering *w, int rank, pipe_row *row)
{
    const ps_pipe_table *t = w->t;
    const int32_t *yields = &w->yields[(int64_t)rank * t->spec.micro_batches];
    int32_t micro = 0;
    for (int32_t at = 0; at <= t->rows[rank].n; at++) {
        for (; micro < t->spec.micro_batches && yields[micro] == at; micro++)
            PS_TRY(pipe_push(row, PS_ACT_YIELD, 0, micro));
        if (at == t->rows[rank].n) break;
        const ps_action *a = &t->rows[rank].actions[at];
        PS_TRY(push_takes(w, row, a));
        PS_TRY(pipe_push(row, a->kind, a->vstage, a->micro));
        PS_TRY(push_gives(w, row, a));
        if (is_last_sum(t, a)) PS_TRY(pipe_push(row, PS_ACT_REDUCE, a->vstage, 0));
    }
    return 0;
}

static int lower(lowering *w, pipe_row *rows)
{
    ps_pipe_table *t = w->t;
    ps_pipe_times times;
    if (t->spec.forward_only) PS_TRY(ps_pipe_simulate(t, NULL, NULL, &times, NULL, w->spans));
    for (int32_t i = 0; i < t->spec.micro_batches; i++) place_yield(w, i);
    for (int rank = 0; rank < t->spec.stages; rank++) PS_TRY(lower_row(w, rank, &rows[rank]));
    return 0;
}

static int32_t *zeros(int64_t n) { return ps_alloc0((size_t)n * sizeof(int32_t)); }

int ps_pipe_table_lower(ps_pipe_table *t)
{
    int64_t p = t->spec.stages, v = t->spec.vstages, m = t->spec.micro_batches;
    if (t->lowered) return ps_fail(PS_ESTATE, "the table already has its transfers");
    lowering w = { .t = t, .cut = zeros(p), .safe = zeros(p), .yields = zeros(p * m), .n_taken = { zeros(v), zeros(v) },
                   .spans = ps_alloc0((size_t)p * sizeof *w.spans) };
    pipe_row *rows = ps_alloc0((size_t)p * sizeof *rows);
    bool has = rows && w.cut && w.safe && w.yields && w.spans && w.n_taken[PIPE_UP] && w.n_taken[PIPE_DOWN];
    for (int rank = 0; has && t->spec.forward_only && rank < p; rank++)
        has = (w.spans[rank] = ps_alloc((size_t)t->rows[rank].n * sizeof **w.spans)) != NULL;
    int rc = has ? lower(&w, rows) : ps_fail_nomem((size_t)(p * m) * sizeof(int32_t));
    for (int rank = 0; rows && rank < p; rank++) {
        pipe_row *kept = &t->rows[rank], other = rows[rank];
        if (rc == 0) rows[rank] = *kept, *kept = other;
        ps_free(rows[rank].actions);
    }
    for (int rank = 0; w.spans && rank < p; rank++) ps_free(w.spans[rank]);
    t->lowered = rc == 0;
    ps_free(rows);
    ps_free(w.spans);
    ps_free(w.cut);
    ps_free(w.safe);
    ps_free(w.yields);
    ps_free(w.n_taken[PIPE_UP]);
    ps_free(w.n_taken[PIPE_DOWN]);
    return rc;
}
