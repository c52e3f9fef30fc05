/* SPDX-License-Identifier: BSD-3-Clause
 * This file simulates a table to find the time that its step takes. The costs of the actions are given. Each rank
 * performs its row in order. An action begins when the rank is free and the message that the action needs has arrived.
 * A link sends its messages one by one, in the order in which they were made. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "pipe/pipe.h"

/* -- memory -------------------------------------------------------------------------------------------------------- */
int pipe_course_new(const ps_pipe_table *t, pipe_course *out)
{
    size_t p = (size_t)t->spec.stages, v = (size_t)t->spec.vstages, pairs = v * (size_t)t->spec.micro_batches;
    size_t doubles = p + PIPE_DIRECTIONS * (3 * pairs + v), ints = 2 * p + PIPE_DIRECTIONS * v;
    size_t nbytes = doubles * sizeof(double) + ints * sizeof(int32_t) + 2 * p * sizeof(bool);
    double *d = ps_alloc(nbytes);
    if (!d) return ps_fail_nomem(nbytes);
    *out = (pipe_course){ .t = t, .memory = d, .clock = d };
    d += p;
    for (int i = 0; i < PIPE_DIRECTIONS; i++) {
        out->whole[i] = d;
        out->arrival[i] = d + pairs;
        out->taken[i] = d + 2 * pairs;
        out->free[i] = d + 3 * pairs;
        d += 3 * pairs + v;
    }
    out->cursor = (int32_t *)d;
    out->queue = out->cursor + p;
    for (int i = 0; i < PIPE_DIRECTIONS; i++) out->n_taken[i] = out->queue + p + v * (size_t)i;
    out->sending = (bool *)(out->n_taken[PIPE_DIRECTIONS - 1] + v);
    out->queued = out->sending + p;
    return 0;
}

void pipe_course_free(pipe_course *c)
{
    ps_free(c->memory);
    c->memory = NULL;
}

static void reset(pipe_course *c)
{
    size_t p = (size_t)c->t->spec.stages, v = (size_t)c->t->spec.vstages, pairs = v * (size_t)c->t->spec.micro_batches;
    for (size_t r = 0; r < p; r++) c->clock[r] = 0, c->cursor[r] = 0, c->sending[r] = false;
    for (int d = 0; d < PIPE_DIRECTIONS; d++) {
        for (size_t i = 0; i < pairs; i++) c->whole[d][i] = c->arrival[d][i] = c->taken[d][i] = -1;
        for (size_t l = 0; l < v; l++) c->free[d][l] = 0, c->n_taken[d][l] = 0;
    }
}

/* -- one rank ------------------------------------------------------------------------------------------------------ */
typedef struct run {
    pipe_course *c;
    const ps_pipe_cost *costs;              /* NULL if each cost is 1 */
    ps_pipe_link link;
    /* first: index of the first entry of `queue`, a ring buffer. n: number of entries of `queue`. */
    int32_t first, n;
} run;

static void wake(run *u, int rank)
{
    pipe_course *c = u->c;
    if (c->queued[rank]) return;
    c->queued[rank] = true;
    c->queue[(u->first + u->n++) % c->t->spec.stages] = rank;
}

double pipe_cost_of(const ps_pipe_cost *costs, const ps_action *a)
{
    const ps_pipe_cost *k = costs ? &costs[a->vstage] : NULL;
    switch (a->kind) {
    case PS_ACT_FORWARD: return k ? k->forward : 1;
    case PS_ACT_INPUT: return k ? k->input : 1;
    case PS_ACT_WEIGHT: return k ? k->weight : 1;
    case PS_ACT_BACKWARD: return k ? k->input + k->weight : 2;
    case PS_ACT_REDUCE: return k ? k->reduce : 0;
    default: return 0;
    }
}

/* Receives the messages of the link, up to the message that this action needs. For each message, moves the rank's clock
 * forward to the arrival of the message. Returns false if the message that the action needs has not been sent. */
static bool take(run *u, int rank, const ps_action *a)
{
    pipe_course *c = u->c;
    const ps_pipe_table *t = c->t;
    int d;
    int32_t from;
    if (!pipe_takes(t, a, &d, &from)) return true;
    int32_t message = pipe_pair(t, from, a->micro), link = pipe_link(t, a->vstage, from);
    /* If link is -1, this rank makes the message itself. If the message has not been made yet, the action that makes it
     * is later in the row, so the rank waits for itself. */
    if (link < 0) return c->whole[d][message] >= 0;
    int32_t base = t->link_base[link], turn = t->turn[d][message];
    if (c->arrival[d][base + turn] < 0) return false;
    for (; c->n_taken[d][link] <= turn; c->n_taken[d][link]++) {
        double arrival = c->arrival[d][base + c->n_taken[d][link]];
        if (c->clock[rank] < arrival) c->clock[rank] = arrival;
        c->taken[d][base + c->n_taken[d][link]] = c->clock[rank];
    }
    if (u->link.depth > 0) wake(u, t->rank_of[from]);
    return true;
}

/* Sends the message that an action made. Returns false if the link is full, which means that `depth` messages of the
 * link were sent but not received. */
static bool give(run *u, int rank, const ps_action *a)
{
    pipe_course *c = u->c;
    const ps_pipe_table *t = c->t;
    int d;
    int32_t to;
    if (!pipe_gives(t, a, &d, &to)) return true;
    int32_t message = pipe_pair(t, a->vstage, a->micro), link = pipe_link(t, a->vstage, to);
    c->whole[d][message] = c->clock[rank];
    if (link < 0) return true;
    int32_t base = t->link_base[link], turn = t->turn[d][message], depth = u->link.depth;
    if (depth > 0 && turn >= depth) {
        double room = c->taken[d][base + turn - depth];
        if (room < 0) return false;
        if (c->clock[rank] < room) c->clock[rank] = room;
    }
    double begin = c->clock[rank] > c->free[d][link] ? c->clock[rank] : c->free[d][link];
    int64_t nbytes = u->costs ? u->costs[a->vstage < to ? a->vstage : to].nbytes : 0;
    c->free[d][link] = begin + (u->link.rate > 0 ? (double)nbytes / u->link.rate : 0);
    c->arrival[d][base + turn] = c->free[d][link] + u->link.latency;
    wake(u, t->rank_of[to]);
    return true;
}

/* Performs actions of a rank's row, until an action has to wait. */
static void perform(run *u, int rank, ps_pipe_rank_times *times, ps_pipe_span *spans)
{
    pipe_course *c = u->c;
    const pipe_row *row = &c->t->rows[rank];
    for (; c->cursor[rank] < row->n; c->cursor[rank]++) {
        const ps_action *a = &row->actions[c->cursor[rank]];
        if (!c->sending[rank]) {
            if (!take(u, rank, a)) return;
            double begin = c->clock[rank], cost = pipe_cost_of(u->costs, a);
            c->clock[rank] = begin + cost;
            if (spans) spans[c->cursor[rank]] = (ps_pipe_span){ begin, c->clock[rank] };
            if (times && (pipe_is_compute(a->kind) || cost > 0)) {
                if (times->first < 0) times->first = begin;
                times->last = c->clock[rank];
                times->busy += cost;
            }
        }
        c->sending[rank] = !give(u, rank, a);
        if (c->sending[rank]) return;
    }
}

/* -- ranks that wait in a cycle ------------------------------------------------------------------------------------ */
/* Returns the rank that `rank` waits for, and writes the reason to `why`. */
static int waits_for(const run *u, int rank, char *why, size_t room)
{
    const ps_pipe_table *t = u->c->t;
    const ps_action *a = &t->rows[rank].actions[u->c->cursor[rank]];
    int d;
    int32_t other = 0;
    char text[PIPE_TEXT], wanted[PIPE_TEXT];
    pipe_action_text(a, text);
    if (u->c->sending[rank]) {
        pipe_gives(t, a, &d, &other);
        snprintf(why, room, "rank %d with the message of %s waits for room on the link to rank %d", rank, text,
                 t->rank_of[other]);
    } else {
        pipe_takes(t, a, &d, &other);
        ps_action need = { a->kind, other, a->micro };
        const pipe_place *place = &t->places[pipe_pair(t, other, a->micro)];
        if (a->kind != PS_ACT_FORWARD) need.kind = place->back == place->weight ? PS_ACT_BACKWARD : PS_ACT_INPUT;
        snprintf(why, room, "rank %d with %s waits for %s of rank %d", rank, text, pipe_action_text(&need, wanted),
                 t->rank_of[other]);
    }
    return t->rank_of[other];
}

/* Returns the error for ranks that wait for each other in a cycle. The cycle is found as follows. If a rank has not
 * reached the end of its row, it waits for a rank that has not reached the end of its row, either. Therefore, going
 * from each rank to the rank that it waits for leads into a cycle. */
static int circle(const run *u, int rank)
{
    char text[600] = "", why[160];
    size_t n = 0;
    /* After this loop, `rank` is in the cycle. */
    for (int i = 0; i < u->c->t->spec.stages; i++) rank = waits_for(u, rank, why, sizeof why);
    int begin = rank;
    do {
        rank = waits_for(u, rank, why, sizeof why);
        int k = snprintf(text + n, sizeof text - n, "%s%s", n ? ", " : "", why);
        if (k < 0 || (size_t)k >= sizeof text - n - 4) {
            memcpy(text + sizeof text - 4, "...", 4);
            break;
        }
        n += (size_t)k;
    } while (rank != begin);
    return ps_fail(PS_EINVAL, "the table cannot be performed, because ranks wait for each other in a cycle: %s", text);
}

/* -- all ranks ----------------------------------------------------------------------------------------------------- */
static int64_t peak_of(const ps_pipe_table *t, int rank, const ps_pipe_cost *costs)
{
    int64_t held = 0, peak = 0;
    for (int32_t at = 0; costs && at < t->rows[rank].n; at++) {
        const ps_action *a = &t->rows[rank].actions[at];
        const ps_pipe_cost *k = &costs[a->vstage];
        if (a->kind == PS_ACT_FORWARD) held += k->held;
        if (held > peak) peak = held;
        if (pipe_ends_flight(t, a)) held -= k->held;
        if (a->kind == PS_ACT_INPUT) held += k->waiting;
        if (held > peak) peak = held;
        if (a->kind == PS_ACT_WEIGHT) held -= k->waiting;
    }
    return peak;
}

int pipe_course_run(pipe_course *c, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                    ps_pipe_rank_times *ranks, ps_pipe_span *const *spans)
{
    const ps_pipe_table *t = c->t;
    int32_t p = t->spec.stages;
    run u = { .c = c, .costs = costs, .link = link ? *link : (ps_pipe_link){ .depth = 0 } };
    ps_pipe_times sum = { 0, 0 };
    double busy = 0;
    reset(c);
    memset(c->queued, 0, (size_t)p * sizeof *c->queued);
    for (int rank = 0; rank < p; rank++) {
        if (ranks) ranks[rank] = (ps_pipe_rank_times){ .first = -1, .peak = peak_of(t, rank, costs) };
        wake(&u, rank);
    }
    while (u.n > 0) {
        int rank = c->queue[u.first];
        u.first = (u.first + 1) % p;
        u.n--;
        c->queued[rank] = false;
        perform(&u, rank, ranks ? &ranks[rank] : NULL, spans ? spans[rank] : NULL);
    }
    for (int rank = 0; rank < p; rank++) {
        if (c->cursor[rank] < t->rows[rank].n) return circle(&u, rank);
        if (c->clock[rank] > sum.makespan) sum.makespan = c->clock[rank];
        for (int32_t at = 0; at < t->rows[rank].n; at++) busy += pipe_cost_of(costs, &t->rows[rank].actions[at]);
    }
    sum.bubble = sum.makespan > 0 ? (sum.makespan * p - busy) / (sum.makespan * p) : 0;
    *out = sum;
    return 0;
}

int pipe_check_numbers(const char *what, const ps_pipe_cost *costs, int32_t n, const ps_pipe_link *link)
{
    for (int32_t v = 0; costs && v < n; v++) {
        const ps_pipe_cost *k = &costs[v];
        double least = fmin(fmin(k->forward, k->input), fmin(k->weight, k->reduce));
        if (!(least >= 0) || !isfinite(k->forward + k->input + k->weight + k->reduce) || k->nbytes < 0 || k->held < 0 ||
            k->waiting < 0)
            return ps_fail(PS_EINVAL, "a cost of %s %d is negative or not a number", what, v);
    }
    if (link && (!(link->latency >= 0) || !isfinite(link->latency) || !(link->rate >= 0) || link->depth < 0))
        return ps_fail(PS_EINVAL, "a link has latency %g, rate %g and depth %d; none of these may be "
                                  "negative", link->latency,
                       link->rate, link->depth);
    return 0;
}

int ps_pipe_simulate(const ps_pipe_table *t, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                     ps_pipe_rank_times *ranks, ps_pipe_span *const *spans)
{
    pipe_course course;
    PS_TRY(pipe_check_numbers("virtual stage", costs, t->spec.vstages, link));
    PS_TRY(pipe_course_new(t, &course));
    int rc = pipe_course_run(&course, costs, link, out, ranks, spans);
    pipe_course_free(&course);
    return rc;
}
