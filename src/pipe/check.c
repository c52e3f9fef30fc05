/* SPDX-License-Identifier: BSD-3-Clause
 * This file allocates the memory of a table, checks the table, and seals it. A sealed table has these guarantees:
 *   - Every action occurs once, after the actions of its row that it needs.
 *   - Gradients are summed in the order of micro-batches.
 *   - Ranks cannot deadlock. */
#include <string.h>
#include "base/grow.h"
#include "pipe/pipe.h"

/* -- memory -------------------------------------------------------------------------------------------------------- */
static int32_t *numbers(int64_t n)
{
    int32_t *a = ps_alloc((size_t)n * sizeof *a);
    if (a) memset(a, 0xff, (size_t)n * sizeof *a);          /* set all numbers to -1 */
    return a;
}

int pipe_new(const ps_pipe_spec *s, int64_t n_vstages, ps_pipe_table **out)
{
    if (s->stages < 1 || s->virtual_stages < 1 || s->micro_batches < 1)
        return ps_fail(PS_EINVAL, "a pipeline cannot have %d stages, %d virtual stages per rank and %d micro-batches; "
                       "each must be 1 or more", s->stages, s->virtual_stages, s->micro_batches);
    if (n_vstages > PIPE_MOST_VSTAGES || n_vstages * s->micro_batches > PIPE_MOST_PAIRS)
        return ps_fail(PS_EINVAL, "a pipeline of %lld virtual stages and %d micro-batches is too large; at most %d "
                                  "virtual stages are allowed, and their product with the micro-batches may be %d",
                       (long long)n_vstages, s->micro_batches, PIPE_MOST_VSTAGES,
                       PIPE_MOST_PAIRS);
    int64_t pairs = n_vstages * s->micro_batches;
    ps_pipe_table *t = ps_alloc0(sizeof *t);
    if (!t) return ps_fail_nomem(sizeof *t);
    t->refs = 1;
    t->spec = *s;
    t->spec.vstages = (int32_t)n_vstages;
    t->rows = ps_alloc0((size_t)s->stages * sizeof *t->rows);
    t->rank_of = numbers(n_vstages);
    t->local_of = numbers(n_vstages);
    t->link_of = numbers(n_vstages);
    t->link_base = numbers(n_vstages);
    t->places = (pipe_place *)numbers(pairs * (int64_t)(sizeof *t->places / sizeof(int32_t)));
    bool has_all = t->rows && t->rank_of && t->local_of && t->link_of && t->link_base && t->places;
    for (int d = 0; d < PIPE_DIRECTIONS; d++) {
        t->turn[d] = numbers(pairs);
        t->order[d] = numbers(pairs);
        has_all = has_all && t->turn[d] && t->order[d];
    }
    if (!has_all) return ps_pipe_table_free(t), ps_fail_nomem((size_t)pairs * (7 * sizeof(int32_t)));
    *out = t;
    return 0;
}

void ps_pipe_table_free(ps_pipe_table *t)
{
    if (!t || --t->refs > 0) return;
    for (int r = 0; t->rows && r < t->spec.stages; r++) ps_free(t->rows[r].actions);
    for (int d = 0; d < PIPE_DIRECTIONS; d++) ps_free(t->turn[d]), ps_free(t->order[d]);
    ps_free(t->rows);
    ps_free(t->rank_of);
    ps_free(t->local_of);
    ps_free(t->link_of);
    ps_free(t->link_base);
    ps_free(t->places);
    ps_free(t);
}

int pipe_push(pipe_row *row, int kind, int32_t vstage, int32_t micro)
{
    PS_TRY(ps_grow(row->actions, row->capacity, row->n + 1));
    row->actions[row->n++] = (ps_action){ kind, vstage, micro };
    return 0;
}

/* -- each action must occur once, after the actions that it needs -------------------------------------------------- */
static int note_once(const ps_pipe_table *t, int32_t *place, int32_t at, int rank)
{
    char text[PIPE_TEXT];
    if (*place < 0) return *place = at, 0;
    return ps_fail(PS_EINVAL, "action %d of rank %d is %s, which is in the table twice", at, rank,
                   pipe_action_text(&t->rows[rank].actions[at], text));
}

static int note(ps_pipe_table *t, int rank, int32_t at)
{
    const ps_action *a = &t->rows[rank].actions[at];
    char text[PIPE_TEXT];
    pipe_action_text(a, text);
    if (!pipe_is_compute(a->kind) || a->vstage < 0 || a->vstage >= t->spec.vstages || a->micro < 0 ||
        a->micro >= t->spec.micro_batches || (t->spec.forward_only && a->kind != PS_ACT_FORWARD))
        return ps_fail(PS_EINVAL, "action %d of rank %d is %s, which is not in a table of %d virtual stages and %d "
                                  "micro-batches%s",
                       at, rank, text, t->spec.vstages, t->spec.micro_batches,
                       t->spec.forward_only ? " without backward" : "");
    if (t->rank_of[a->vstage] < 0) t->rank_of[a->vstage] = rank;
    if (t->rank_of[a->vstage] != rank)
        return ps_fail(PS_EINVAL, "action %d of rank %d is %s, but rank %d also has actions of this virtual stage", at,
                       rank, text, t->rank_of[a->vstage]);
    pipe_place *p = &t->places[pipe_pair(t, a->vstage, a->micro)];
    if (a->kind == PS_ACT_FORWARD) return note_once(t, &p->forward, at, rank);
    if ((a->kind == PS_ACT_WEIGHT ? p->back : p->forward) < 0)
        return ps_fail(PS_EINVAL, "action %d of rank %d is %s, which comes before its %s", at, rank, text,
                       a->kind == PS_ACT_WEIGHT ? "I" : "F");
    if (a->kind != PS_ACT_WEIGHT) PS_TRY(note_once(t, &p->back, at, rank));
    return a->kind == PS_ACT_INPUT ? 0 : note_once(t, &p->weight, at, rank);
}

static int find_missing(const ps_pipe_table *t)
{
    for (int32_t v = 0; v < t->spec.vstages; v++)
        for (int32_t i = 0; i < t->spec.micro_batches; i++) {
            const pipe_place *p = &t->places[pipe_pair(t, v, i)];
            bool wants_back = !t->spec.forward_only;
            if (p->forward < 0 || (wants_back && p->weight < 0))
                return ps_fail(PS_EINVAL, "the table lacks the %s of virtual stage %d, micro-batch %d",
                               p->forward < 0 ? "forward" : p->back < 0 ? "backward" : "W of the backward", v, i);
        }
    return 0;
}

/* Checks that each virtual stage sums gradients in the order of micro-batches. Also checks that each rank runs its
 * first backward of micro-batch i before its first backward of micro-batch i + 1, because the loop of the script
 * receives the micro-batches in this order. */
static int check_order(const ps_pipe_table *t)
{
    for (int32_t v = 0; v < t->spec.vstages; v++)
        for (int32_t i = 1; i < t->spec.micro_batches; i++) {
            const pipe_place *p = &t->places[pipe_pair(t, v, i)];
            if (p->weight < p[-1].weight)
                return ps_fail(PS_EINVAL, "virtual stage %d adds the gradients of micro-batch %d before those of %d: "
                                          "sums would have another order than without a pipeline", v, i, i - 1);
        }
    for (int rank = 0; rank < t->spec.stages; rank++) {
        int32_t next = 0;
        for (int32_t at = 0; at < t->rows[rank].n; at++) {
            const ps_action *a = &t->rows[rank].actions[at];
            if (a->kind != PS_ACT_BACKWARD && a->kind != PS_ACT_INPUT) continue;
            if (a->micro > next)
                return ps_fail(PS_EINVAL, "rank %d runs the backward of micro-batch %d before that of %d",
                               rank, a->micro,
                               next);
            next += a->micro == next;
        }
    }
    return 0;
}

/* -- links --------------------------------------------------------------------------------------------------------- */
static void name_links(ps_pipe_table *t)
{
    int32_t base = 0;
    for (int32_t v = 0; v + 1 < t->spec.vstages; v++) {
        if (t->rank_of[v] == t->rank_of[v + 1]) continue;
        for (int32_t w = 0; w <= v && t->link_of[v] < 0; w++)
            if (t->rank_of[w] == t->rank_of[v] && t->rank_of[w + 1] == t->rank_of[v + 1]) t->link_of[v] = w;
    }
    for (int32_t l = 0; l + 1 < t->spec.vstages; l++) {
        if (t->link_of[l] != l) continue;
        t->link_base[l] = base;
        for (int32_t v = l; v + 1 < t->spec.vstages; v++) base += t->link_of[v] == l ? t->spec.micro_batches : 0;
    }
}

/* Numbers the messages of each link. A link sends messages in the order in which the sender's row makes them. */
static int order_messages(ps_pipe_table *t)
{
    int32_t *n[PIPE_DIRECTIONS] = { ps_alloc0((size_t)t->spec.vstages * sizeof(int32_t)),
                                    ps_alloc0((size_t)t->spec.vstages * sizeof(int32_t)) };
    bool has = n[PIPE_UP] && n[PIPE_DOWN];
    for (int rank = 0; has && rank < t->spec.stages; rank++)
        for (int32_t at = 0; at < t->rows[rank].n; at++) {
            const ps_action *a = &t->rows[rank].actions[at];
            int d;
            int32_t to, link = pipe_gives(t, a, &d, &to) ? pipe_link(t, a->vstage, to) : -1;
            if (link < 0) continue;
            int32_t message = pipe_pair(t, a->vstage, a->micro);
            t->turn[d][message] = n[d][link]++;
            t->order[d][t->link_base[link] + t->turn[d][message]] = message;
        }
    ps_free(n[PIPE_UP]);
    ps_free(n[PIPE_DOWN]);
    return has ? 0 : ps_fail_nomem((size_t)t->spec.vstages * sizeof(int32_t));
}

int pipe_seal(ps_pipe_table *t)
{
    ps_pipe_times times;
    pipe_course course;
    for (int rank = 0; rank < t->spec.stages; rank++) {
        if (!t->rows[rank].n) return ps_fail(PS_EINVAL, "the table has no action for rank %d", rank);
        for (int32_t at = 0; at < t->rows[rank].n; at++) PS_TRY(note(t, rank, at));
    }
    PS_TRY(find_missing(t));
    if (!t->spec.forward_only) PS_TRY(check_order(t));
    for (int32_t v = 0; v < t->spec.vstages; v++)
        for (int32_t w = t->local_of[v] = 0; w < v; w++) t->local_of[v] += t->rank_of[w] == t->rank_of[v];
    name_links(t);
    PS_TRY(order_messages(t));
    PS_TRY(pipe_course_new(t, &course));
    int rc = pipe_course_run(&course, NULL, NULL, &times, NULL, NULL);
    pipe_course_free(&course);
    return rc;
}

/* -- queries ------------------------------------------------------------------------------------------------------- */
const ps_pipe_spec *ps_pipe_table_spec(const ps_pipe_table *t) { return &t->spec; }

static int check_rank(const ps_pipe_table *t, int rank)
{
    if (rank >= 0 && rank < t->spec.stages) return 0;
    return ps_fail(PS_ERANGE, "there is no rank %d in a table of %d ranks", rank, t->spec.stages);
}

int ps_pipe_table_row(const ps_pipe_table *t, int rank, const ps_action **row, int32_t *n)
{
    PS_TRY(check_rank(t, rank));
    *row = t->rows[rank].actions;
    *n = t->rows[rank].n;
    return 0;
}

int ps_pipe_table_place(const ps_pipe_table *t, int vstage, int32_t *rank, int32_t *local)
{
    if (vstage < 0 || vstage >= t->spec.vstages)
        return ps_fail(PS_ERANGE, "there is no virtual stage %d in a table of %d", vstage, t->spec.vstages);
    *rank = t->rank_of[vstage];
    *local = t->local_of[vstage];
    return 0;
}

int ps_pipe_table_held(const ps_pipe_table *t, int rank, ps_pipe_held *out)
{
    int32_t in_flight = 0, waiting = 0;
    PS_TRY(check_rank(t, rank));
    *out = (ps_pipe_held){ 0, 0 };
    for (int32_t at = 0; at < t->rows[rank].n; at++) {
        const ps_action *a = &t->rows[rank].actions[at];
        in_flight += a->kind == PS_ACT_FORWARD;
        if (in_flight > out->in_flight) out->in_flight = in_flight;
        in_flight -= pipe_ends_flight(t, a);
        waiting += a->kind == PS_ACT_INPUT;
        if (waiting > out->waiting) out->waiting = waiting;
        waiting -= a->kind == PS_ACT_WEIGHT;
    }
    return 0;
}
