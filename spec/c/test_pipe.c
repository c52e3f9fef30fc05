/* SPDX-License-Identifier: BSD-3-Clause
 * Tables of pipelines. Each schedule is compared with its formula, by this file's own executor. Also tables that are
 * refused, and the simulator against results that were computed by hand, and against bounds that hold for all costs. */
#include <math.h>
#include "check.h"
#include "ps.h"

static uint64_t state = 0x9E3779B97F4A7C15u;
static unsigned rnd(unsigned n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 33) % n;
}

static ps_pipe_table *make(int schedule, int p, int v, int m, int forward_only)
{
    ps_pipe_spec spec = { .schedule = schedule, .stages = p, .virtual_stages = v, .micro_batches = m,
                          .forward_only = forward_only };
    ps_pipe_table *t = NULL;
    OK(ps_pipe_table_new(&spec, &t));
    return t;
}

/* -- an executor --------------------------------------------------------------------------------------------------- */
enum { RANKS = 8, STAGES = 32, MICROS = 64, WAITING = STAGES * MICROS };

typedef struct link { int32_t queue[WAITING], n, head; } link_;      /* the receiver's vstage * MICROS + micro */
typedef struct executor {
    link_ links[RANKS][RANKS][2];
    bool forward[STAGES][MICROS], back[STAGES][MICROS], weight[STAGES][MICROS], reduced[STAGES];
    bool has_input[STAGES][MICROS], has_grad[STAGES][MICROS];
    int32_t cursor[RANKS], yields[RANKS], weights[STAGES];
} executor;
static executor x;

static const char *broken;

static int rank_of(const ps_pipe_table *t, int vstage)
{
    int32_t rank = -1, local;
    if (ps_pipe_table_place(t, vstage, &rank, &local) < 0) broken = "a message to a virtual stage that is not there";
    return rank;
}

/* Performs one action. Returns false if it has to wait. */
static bool act(const ps_pipe_table *t, int rank, const ps_action *a, bool meets)
{
    const ps_pipe_spec *spec = ps_pipe_table_spec(t);
    int s = a->vstage, i = a->micro, last = spec->vstages - 1, m = spec->micro_batches;
    bool up = a->kind == PS_ACT_SEND_F || a->kind == PS_ACT_RECV_F;
    int other = s + (a->kind == PS_ACT_SEND_F || a->kind == PS_ACT_RECV_B ? 1 : -1);
    if (a->kind != PS_ACT_YIELD && rank_of(t, s) != rank) broken = "an action of another rank";
    switch (a->kind) {
    case PS_ACT_FORWARD:
        if (s > 0 && rank_of(t, s - 1) == rank) x.has_input[s][i] = x.forward[s - 1][i];
        if (x.forward[s][i] || (s > 0 && !x.has_input[s][i])) broken = "a forward twice, or without its input";
        return x.forward[s][i] = true;
    case PS_ACT_BACKWARD: case PS_ACT_INPUT:
        if (s < last && rank_of(t, s + 1) == rank) x.has_grad[s][i] = x.back[s + 1][i];
        if (!x.forward[s][i] || x.back[s][i] || (s < last && !x.has_grad[s][i])) broken = "a backward out of turn";
        if (x.yields[rank] <= i) broken = "a backward before the loop has the loss";
        x.back[s][i] = true;
        if (a->kind == PS_ACT_INPUT) return true;               /* falls through to do both */
        __attribute__((fallthrough));
    case PS_ACT_WEIGHT:
        if (!x.back[s][i] || x.weight[s][i] || x.weights[s]++ != i) broken = "a weight's gradient out of turn";
        return x.weight[s][i] = true;
    case PS_ACT_REDUCE:
        if (x.weights[s] != m || x.reduced[s]) broken = "a reduction before the gradients, or twice";
        return x.reduced[s] = true;
    case PS_ACT_SEND_F: case PS_ACT_SEND_B: {
        if (!(up ? x.forward : x.back)[s][i]) broken = "a message before it is made";
        link_ *l = &x.links[rank][rank_of(t, other)][up];
        l->queue[l->n++] = other * MICROS + i;
        return true;
    }
    case PS_ACT_RECV_F: case PS_ACT_RECV_B: {
        link_ *l = &x.links[rank_of(t, other)][rank][up];
        if (l->head == l->n) return false;
        if (l->queue[l->head++] != s * MICROS + i) broken = "the ends of a link have two orders";
        return (up ? x.has_input : x.has_grad)[s][i] = true;
    }
    case PS_ACT_YIELD:
        if (x.yields[rank] == i) x.yields[rank]++;              /* the rank waits at this action */
        else if (x.yields[rank] != i + 1) broken = "a yield out of turn";
        if (!x.forward[last][i]) return false;
        for (int r = 0; meets && r < ps_pipe_table_spec(t)->stages; r++)
            if (x.yields[r] <= i) return false;
        return true;
    default: broken = "an action of another kind"; return true;
    }
}

/* Performs all rows, each rank as far as possible, beginning with rank `begin`. If `meets` is true, ranks wait for
 * each other in the body of the script's loop. */
static void perform(const ps_pipe_table *t, int begin, bool meets)
{
    int p = ps_pipe_table_spec(t)->stages, m = ps_pipe_table_spec(t)->micro_batches, done = 0;
    memset(&x, 0, sizeof x);
    broken = NULL;
    for (bool moved = true; moved && !broken;) {
        moved = false;
        done = 0;
        for (int k = 0; k < p; k++) {
            int rank = (begin + k) % p;
            const ps_action *row;
            int32_t n;
            OK(ps_pipe_table_row(t, rank, &row, &n));
            while (!broken && x.cursor[rank] < n && act(t, rank, &row[x.cursor[rank]], meets))
                x.cursor[rank]++, moved = true;
            done += x.cursor[rank] == n;
        }
    }
    if (!broken && done < p) broken = meets ? "a wait in a circle, where a loop's body has a collective" : "a circle";
    for (int rank = 0; !broken && rank < p; rank++) if (x.yields[rank] != m) broken = "a loop without all losses";
    for (int s = 0; !broken && s < ps_pipe_table_spec(t)->vstages; s++)
        for (int i = 0; i < m; i++)
            if (!x.forward[s][i] || (!ps_pipe_table_spec(t)->forward_only && (!x.weight[s][i] || !x.reduced[s])))
                broken = "an action that is missing";
}

static int said;
static void sound(const ps_pipe_table *t, bool ok, const char *what, double value)
{
    const ps_pipe_spec *s = ps_pipe_table_spec(t);
    CHECK(ok);
    if (!ok && said++ < 20)
        printf("  %s, %d stages, %d virtual stages, %d micro-batches: %s (%g)\n", ps_pipe_schedule_name(s->schedule),
               s->stages, s->virtual_stages, s->micro_batches, what, value);
}

/* -- formulas ------------------------------------------------------------------------------------------------------ */
/* Returns the makespan if forward, input and weight actions take 1 each, or 0 if the sizes are outside of the
 * formula's domain. */
static double formula(int schedule, int p, int v, int m)
{
    switch (schedule) {
    case PS_PIPE_GPIPE: case PS_PIPE_1F1B: return 3 * (m + p - 1);
    case PS_PIPE_INTERLEAVED: return v == 1 || m % p == 0 ? 3 * (m * v + p - 1) : 0;
    case PS_PIPE_LOOPED_BFS: return v == 1 || m >= p ? 3 * (m * v + p - 1) : 0;
    case PS_PIPE_ZB_H1: return m >= 2 * p - 1 ? 3 * m + p - 1 : 0;
    case PS_PIPE_ZB_V: return m >= 2 * p ? 6 * m + p - 1 : 0;
    }
    return 0;
}

static int least(int a, int b) { return a < b ? a : b; }

static void held_within(const ps_pipe_table *t, int rank)
{
    const ps_pipe_spec *s = ps_pipe_table_spec(t);
    int p = s->stages, v = s->virtual_stages, m = s->micro_batches;
    ps_pipe_held h;
    OK(ps_pipe_table_held(t, rank, &h));
    switch (s->schedule) {
    case PS_PIPE_GPIPE: sound(t, h.in_flight == m, "in flight", h.in_flight); break;
    case PS_PIPE_1F1B: case PS_PIPE_ZB_H1: sound(t, h.in_flight == least(p - rank, m), "in flight", h.in_flight); break;
    case PS_PIPE_LOOPED_BFS: sound(t, h.in_flight == m * v, "in flight", h.in_flight); break;
    case PS_PIPE_INTERLEAVED:
        if (m % p == 0)
            sound(t, h.in_flight == least((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v), "in flight", h.in_flight);
        break;
    case PS_PIPE_ZB_V: sound(t, h.in_flight <= 2 * p, "in flight", h.in_flight); break;
    }
    if (s->schedule == PS_PIPE_ZB_H1) sound(t, h.waiting == least(rank + 1, m), "waiting", h.waiting);
    else if (s->schedule != PS_PIPE_ZB_V) sound(t, h.waiting == 0, "waiting", h.waiting);
}

static void holds(int schedule, int p, int v, int m)
{
    ps_pipe_times times = { 0, 0 };
    ps_pipe_rank_times ranks[RANKS];
    ps_pipe_table *t = make(schedule, p, v, m, 0);
    if (!t) return;
    OK(ps_pipe_simulate(t, NULL, NULL, &times, ranks, NULL));
    double wanted = formula(schedule, p, v, m), busy = 3.0 * v * m;
    if (wanted > 0) sound(t, times.makespan == wanted, "makespan", times.makespan);
    sound(t, times.makespan >= busy && times.makespan <= busy * p, "makespan", times.makespan);
    sound(t, times.bubble == (times.makespan - busy) / times.makespan, "bubble", times.bubble);
    for (int rank = 0; rank < p; rank++) {
        held_within(t, rank);
        sound(t, ranks[rank].busy == busy, "busy", ranks[rank].busy);
        if (schedule == PS_PIPE_ZB_V && wanted > 0)
            sound(t, ranks[rank].last - ranks[rank].first == busy, "idle", ranks[rank].last - ranks[rank].first - busy);
    }
    OK(ps_pipe_table_lower(t));
    FAILS(ps_pipe_table_lower(t), PS_ESTATE, "has its transfers");
    for (int begin = 0; begin < p; begin += p > 1 ? p - 1 : 1) {
        perform(t, begin, false);
        sound(t, !broken, broken, begin);
        perform(t, begin, true);
        sound(t, !broken, broken, begin);
    }
    ps_pipe_table_free(t);
    t = make(schedule, p, v, m, 1);
    OK(ps_pipe_table_lower(t));
    perform(t, 0, true);
    sound(t, !broken, broken, -1);
    ps_pipe_table_free(t);
}

static void test_schedules(void)
{
    for (int schedule = 0; schedule < PS_PIPE_SCHEDULES; schedule++)
        for (int p = 1; p <= 8; p++)
            for (int v = 1; v <= 4; v++) {
                bool takes = schedule == PS_PIPE_INTERLEAVED || schedule == PS_PIPE_LOOPED_BFS ||
                             v == (schedule == PS_PIPE_ZB_V ? 2 : 1);
                for (int m = 1; takes && m <= 32; m++) holds(schedule, p, v, m);
            }
}

/* -- courses ------------------------------------------------------------------------------------------------------- */
/* Computes the end of each action by relaxation, as longest paths through the table's graph. A message is an edge
 * that follows the previous message of its link. */
static double end[RANKS][3 * WAITING], forward_end[STAGES][MICROS], back_end[STAGES][MICROS], sent[STAGES][MICROS][2];

static double cost_of(const ps_pipe_cost *k, int kind)
{
    if (kind == PS_ACT_BACKWARD) return k->input + k->weight;
    return kind == PS_ACT_FORWARD ? k->forward : kind == PS_ACT_INPUT ? k->input : k->weight;
}

/* Returns the arrival time of the message for which the action waits. `out` is the time at which the message that
 * the action sends leaves. */
static double arrival(const ps_pipe_table *t, const ps_action *a, const ps_pipe_link *link)
{
    int s = a->vstage, i = a->micro, last = ps_pipe_table_spec(t)->vstages - 1, up = a->kind == PS_ACT_FORWARD;
    if (a->kind == PS_ACT_WEIGHT || (up ? s == 0 : s == last)) return 0;
    int from = up ? s - 1 : s + 1;
    if (rank_of(t, from) == rank_of(t, s)) return up ? forward_end[from][i] : back_end[from][i];
    return sent[from][i][up] + link->latency;
}

static double longest(const ps_pipe_table *t, const ps_pipe_cost *costs, const ps_pipe_link *link)
{
    int p = ps_pipe_table_spec(t)->stages, last = ps_pipe_table_spec(t)->vstages - 1;
    double longest_end = 0;
    memset(end, 0, sizeof end);
    memset(forward_end, 0, sizeof forward_end);
    memset(back_end, 0, sizeof back_end);
    memset(sent, 0, sizeof sent);
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < p; rank++) {
            const ps_action *row;
            int32_t n;
            double clock = 0, links[RANKS][2] = { { 0 } };
            OK(ps_pipe_table_row(t, rank, &row, &n));
            for (int32_t at = 0; at < n; at++) {
                const ps_action *a = &row[at];
                int s = a->vstage, up = a->kind == PS_ACT_FORWARD, to = up ? s + 1 : s - 1;
                double e = fmax(clock, arrival(t, a, link)) + cost_of(&costs[s], a->kind);
                moved = moved || e != end[rank][at];
                clock = end[rank][at] = e;
                longest_end = fmax(longest_end, e);
                if (a->kind == PS_ACT_WEIGHT) continue;
                *(up ? &forward_end[s][a->micro] : &back_end[s][a->micro]) = e;
                if (to < 0 || to > last || rank_of(t, to) == rank) continue;
                double *leaves = &links[rank_of(t, to)][up];
                double bytes = (double)costs[s < to ? s : to].nbytes;
                *leaves = sent[s][a->micro][up] = fmax(*leaves, e) + (link->rate > 0 ? bytes / link->rate : 0);
            }
        }
    }
    return longest_end;
}

static void test_random_costs(void)
{
    for (int draw = 0; draw < 10000; draw++) {
        int schedule = (int)rnd(PS_PIPE_SCHEDULES), p = 1 + (int)rnd(4), m = 1 + (int)rnd(8), v = 1;
        if (schedule == PS_PIPE_INTERLEAVED || schedule == PS_PIPE_LOOPED_BFS) v = 1 + (int)rnd(3);
        if (schedule == PS_PIPE_ZB_V) v = 2;
        ps_pipe_cost costs[STAGES] = { { 0 } };
        for (int s = 0; s < p * v; s++)
            costs[s] = (ps_pipe_cost){ .forward = rnd(100), .input = rnd(100), .weight = rnd(100),
                                       .nbytes = rnd(100) };
        ps_pipe_link link = { .latency = rnd(3) * rnd(50), .rate = rnd(3) };
        ps_pipe_times times = { -1, -1 }, narrow;
        ps_pipe_table *t = make(schedule, p, v, m, 0);
        if (OK(ps_pipe_simulate(t, costs, &link, &times, NULL, NULL)))
            sound(t, times.makespan == longest(t, costs, &link), "makespan", times.makespan);
        link.depth = 1 + (int)rnd(3);
        int rc = ps_pipe_simulate(t, costs, &link, &narrow, NULL, NULL);
        if (rc == 0) sound(t, narrow.makespan >= times.makespan, "makespan by narrow links", narrow.makespan);
        else FAILS(rc, PS_EINVAL, "wait for each other in a cycle: rank ");
        link.depth = m * v;
        OK(ps_pipe_simulate(t, costs, &link, &narrow, NULL, NULL));
        sound(t, narrow.makespan == times.makespan, "makespan by wide links", narrow.makespan);
        ps_pipe_table_free(t);
    }
}

/* Two stages and two micro-batches. 0F0 lasts until 2, and its message until 3, 5 and 6. 0F1 lasts until 4, and its
 * message until 7 and 8. */
static void test_by_hand(void)
{
    static const ps_pipe_cost costs[2] = { { .forward = 2, .input = 3, .weight = 1, .nbytes = 6, .held = 100 },
                                           { .forward = 1, .input = 1, .weight = 2, .held = 10, .waiting = 5 } };
    ps_pipe_link link = { .latency = 1, .rate = 2 };
    ps_pipe_span spans[2][6], *const lists[2] = { spans[0], spans[1] };
    ps_pipe_rank_times ranks[2];
    ps_pipe_times times;
    ps_pipe_table *t = make(PS_PIPE_ZB_H1, 2, 1, 2, 0);      /* F0 F1 I0 W0 I1 W1; F0 I0 F1 I1 W0 W1 */
    OK(ps_pipe_simulate(t, costs, &link, &times, ranks, lists));
    CHECK(spans[0][0].end == 2 && spans[0][1].end == 4);
    CHECK(spans[1][0].begin == 6 && spans[1][0].end == 7 && spans[1][1].end == 8);
    CHECK(spans[1][2].begin == 9 && spans[1][2].end == 10);   /* sent at 8, since the link was busy until 5 */
    CHECK(spans[0][2].begin == 12 && spans[0][2].end == 15 && spans[0][3].end == 16);
    CHECK(times.makespan == 20 && ranks[0].last == 20 && ranks[1].last == 15 && ranks[1].first == 6);
    CHECK(ranks[0].busy == 12 && ranks[1].busy == 8 && times.bubble == 0.5);
    CHECK(ranks[0].peak == 200 && ranks[1].peak == 15);
    ps_pipe_cost bad[2] = { costs[0], costs[1] };
    bad[1].weight = -1;
    FAILS(ps_pipe_simulate(t, bad, &link, &times, NULL, NULL), PS_EINVAL, "virtual stage 1");
    bad[1].weight = NAN;
    FAILS(ps_pipe_simulate(t, bad, &link, &times, NULL, NULL), PS_EINVAL, "virtual stage 1");
    link.rate = NAN;
    FAILS(ps_pipe_simulate(t, costs, &link, &times, NULL, NULL), PS_EINVAL, "rate nan");
    ps_pipe_table_free(t);
    t = make(PS_PIPE_LOOPED_BFS, 2, 2, 4, 0);                /* a rank that keeps one message delays the rank before
                                                              * it */
    link = (ps_pipe_link){ .depth = 1 };
    FAILS(ps_pipe_simulate(t, NULL, &link, &times, NULL, NULL), PS_EINVAL,
          "rank 0 with the message of 0F3 waits for room on the link to rank 1, rank 1 with the message of 1F1 "
          "waits for room");
    ps_pipe_table_free(t);
}

/* Checks the figures that papers report for p = 4 and m = 8. */
static void test_bubbles(void)
{
    static const struct { int schedule, v; double idle, makespan; } of[] = {
        { PS_PIPE_GPIPE, 1, 9, 33 }, { PS_PIPE_1F1B, 1, 9, 33 }, { PS_PIPE_INTERLEAVED, 2, 9, 57 },
        { PS_PIPE_LOOPED_BFS, 2, 9, 57 }, { PS_PIPE_ZB_H1, 1, 3, 27 }, { PS_PIPE_ZB_V, 2, 3, 51 } };
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        ps_pipe_times times;
        ps_pipe_table *t = make(of[i].schedule, 4, of[i].v, 8, 0);
        OK(ps_pipe_simulate(t, NULL, NULL, &times, NULL, NULL));
        sound(t, times.bubble == of[i].idle / of[i].makespan, "bubble", times.bubble);
        ps_pipe_table_free(t);
    }
}

/* -- tables as text ------------------------------------------------------------------------------------------------ */
static int read_text(const char *text, ps_pipe_table **out)
{
    return ps_pipe_table_read(text, (int64_t)strlen(text), "mine.csv", out);
}

static void test_text(void)
{
    static char first[1 << 16], again[1 << 16];
    for (int schedule = 0; schedule < PS_PIPE_SCHEDULES; schedule++) {
        bool many = schedule == PS_PIPE_INTERLEAVED || schedule == PS_PIPE_LOOPED_BFS || schedule == PS_PIPE_ZB_V;
        ps_pipe_table *t = make(schedule, 4, many ? 2 : 1, 8, 0), *u = NULL;
        int64_t n = ps_pipe_table_write(t, 1, first, sizeof first);
        CHECK(n == (int64_t)strlen(first) + 1 && ps_pipe_table_write(t, 1, NULL, 0) == n);
        if (OK(read_text(first, &u))) {
            CHECK(ps_pipe_table_write(u, 1, again, sizeof again) == n && !strcmp(first, again));
            CHECK(ps_pipe_table_spec(u)->schedule == PS_PIPE_CUSTOM && ps_pipe_table_spec(u)->stages == 4);
            CHECK(ps_pipe_table_spec(u)->virtual_stages == (many ? 2 : 1) && ps_pipe_table_spec(u)->micro_batches == 8);
            OK(ps_pipe_table_lower(u));
            CHECK(ps_pipe_table_write(u, 1, again, sizeof again) == n && !strcmp(first, again));
        }
        ps_pipe_table_free(u);
        ps_pipe_table_free(t);
    }
    ps_pipe_table *t = NULL;
    OK(read_text(" 0F0 ,,0F1, ,0B0,0B1\r\n,1F0,1B0,1F1,1B1", &t));
    OK(ps_pipe_table_lower(t));
    ps_pipe_table_write(t, 0, first, sizeof first);
    CHECK(!strcmp(first, "0F0,0SEND_F0,0F1,0SEND_F1,YIELD0,0RECV_B0,0B0,YIELD1,0RECV_B1,0B1,0REDUCE_GRAD\n"
                         "1RECV_F0,1F0,YIELD0,1B0,1SEND_B0,1RECV_F1,1F1,YIELD1,1B1,1SEND_B1,1REDUCE_GRAD\n"));
    CHECK(ps_pipe_table_write(t, 1, again, 8) == 33 && !strcmp(again, "0F0,0F1"));
    ps_pipe_table_free(t);
}

static void test_refusals(void)
{
    static const struct { int schedule, p, v, m; const char *word; } sizes[] = {
        { PS_PIPE_GPIPE, 0, 1, 1, "0 stages" }, { PS_PIPE_GPIPE, 1, 1, 0, "0 micro-batches" },
        { PS_PIPE_1F1B, 4, 2, 8, "1 virtual stage per rank, not 2" }, { PS_PIPE_ZB_V, 4, 1, 8, "2 virtual stages per" },
        { PS_PIPE_INTERLEAVED, 4, 0, 8, "0 virtual stages" }, { PS_PIPE_INTERLEAVED, 65536, 65536, 1, "4294967296" },
        { PS_PIPE_GPIPE, 1024, 1, 1 << 20, "1024 virtual stages and 1048576" }, { 17, 4, 1, 8, "schedule 17" } };
    static const struct { const char *text; int code; const char *word; } texts[] = {
        { "", PS_EFORMAT, "no action" }, { "0F0,0X0", PS_EFORMAT, "mine.csv, line 1, cell 2: '0X0'" },
        { "0F0\n1SEND_F0", PS_EFORMAT, "line 2, cell 1" }, { "0F99999999999", PS_EFORMAT, "must end with" },
        { "99999F0", PS_EFORMAT, "'99999F0'" }, { "0F0x", PS_EFORMAT, "'0F0x'" }, { "F0", PS_EFORMAT, "'F0'" },
        { "0F0,0B0,0B0", PS_EINVAL,
          "mine.csv: action 2 of rank 0 is 0B0, which is in the table twice" },
        { "0B0,0F0", PS_EINVAL, "0B0, which comes before its F" },
        { "0F0,0W0,0I0", PS_EINVAL, "0W0, which comes before its I" },
        { "0F0,0I0", PS_EINVAL, "lacks the W of the backward of virtual stage 0, micro-batch 0" },
        { "0F0,0B0,0F1", PS_EINVAL, "lacks the backward of virtual stage 0, micro-batch 1" },
        { "0F0,0B0,1B0\n1F0", PS_EINVAL, "1B0, which comes before its F" },
        { "0F0,0B0\n1F0,0F1,1B0", PS_EINVAL, "0F1, but rank 0 also has" }, { "0F0,0B0\n\n", PS_EINVAL, "for rank 1" },
        { "0F0,0F1,0B1,0B0", PS_EINVAL, "adds the gradients of micro-batch 1 before those of 0" },
        { "0F0,0F1,0I1,0I0,0W0,0W1", PS_EINVAL, "runs the backward of micro-batch 1 before that of 0" },
        { "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1", 0, NULL },
        { "1F0,0F0,1B0,0B0", PS_EINVAL, "rank 0 with 1F0 waits for 0F0 of rank 0" },
        { "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", PS_EINVAL,
          "0 with 0B0 waits for 1B0 of rank 1, rank 1 with 1F1 waits for 0F1" } };
    ps_pipe_table *t = NULL;
    int n;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ps_pipe_spec spec = { .schedule = sizes[i].schedule, .stages = sizes[i].p, .virtual_stages = sizes[i].v,
                              .micro_batches = sizes[i].m };
        FAILS(ps_pipe_table_new(&spec, &t), PS_EINVAL, sizes[i].word);
    }
    CHECK(!t);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (texts[i].code) FAILS(read_text(texts[i].text, &t), texts[i].code, texts[i].word);
        else if (OK(read_text(texts[i].text, &t))) ps_pipe_table_free(t);
    }
    FAILS(ps_pipe_schedule_find("dualpipe", &n), PS_EINVAL, "zb_v");
    for (int i = 0; i < PS_PIPE_SCHEDULES; i++)
        CHECK(ps_pipe_schedule_find(ps_pipe_schedule_name(i), &n) == 0 && n == i);
}

/* -- where a model is cut ------------------------------------------------------------------------------------------ */
/* Returns the smallest makespan of all assignments of the parts from `part` on to the virtual stages from v on. */
static double best_of_all(const ps_pipe_table *t, const ps_pipe_cost *parts, int n, int v, int part,
                          ps_pipe_cost *costs)
{
    int vstages = ps_pipe_table_spec(t)->vstages;
    double best = INFINITY;
    if (v == vstages) {
        ps_pipe_times times;
        OK(ps_pipe_simulate(t, costs, NULL, &times, NULL, NULL));
        return times.makespan;
    }
    costs[v] = (ps_pipe_cost){ .forward = 0 };
    for (int e = part; e < n - (vstages - 1 - v); e++) {
        costs[v].forward += parts[e].forward;
        costs[v].input += parts[e].input;
        costs[v].weight += parts[e].weight;
        if (v == vstages - 1 && e < n - 1) continue;
        best = fmin(best, best_of_all(t, parts, n, v + 1, e + 1, costs));
    }
    return best;
}

static void test_cut(void)
{
    enum { PARTS = 14 };
    double worst = 1;
    for (int schedule = 0; schedule < PS_PIPE_SCHEDULES; schedule++)
        for (int draw = 0; draw < 5; draw++) {
            bool many = schedule == PS_PIPE_INTERLEAVED || schedule == PS_PIPE_LOOPED_BFS || schedule == PS_PIPE_ZB_V;
            ps_pipe_table *t = make(schedule, many ? 4 : 8, many ? 2 : 1, 8, 0);
            ps_pipe_cost parts[PARTS], costs[8] = { { 0 } };
            int32_t counts[8], sum = 0;
            ps_pipe_cut_times cut = { 0 };
            bool random = draw > 1;             /* GPT-2's 12 layers and head, with and without its embeddings first */
            int n = draw == 1 ? PARTS - 1 : PARTS, layers = draw == 1 ? 12 : 13;
            for (int i = 0; i < n; i++) {
                double flops = i == layers ? 38597376 : draw == 0 && i == 0 ? 0 : 7077888;
                parts[i] = (ps_pipe_cost){ .forward = flops, .input = flops, .weight = flops };
                if (random) parts[i] = (ps_pipe_cost){ .forward = rnd(50), .input = rnd(50), .weight = rnd(50) };
            }
            OK(ps_pipe_cut(t, parts, n, NULL, counts, &cut));
            double best = best_of_all(t, parts, n, 0, 0, costs);
            worst = fmax(worst, cut.makespan / best);
            sound(t, cut.makespan <= 1.01 * best, "the cut over the best", cut.makespan / best);
            sound(t, cut.makespan <= cut.equal && cut.bound <= best, "the bound", cut.bound);
            sound(t, random || cut.bound_part == layers, "the part that sets the bound", cut.bound_part);
            for (int v = 0, at = 0; v < 8; v++) {
                costs[v] = (ps_pipe_cost){ .forward = 0 };
                for (int i = 0; i < counts[v]; i++, at++) {
                    costs[v].forward += parts[at].forward;
                    costs[v].input += parts[at].input;
                    costs[v].weight += parts[at].weight;
                }
                sum += counts[v];
                CHECK(counts[v] >= 1);
            }
            ps_pipe_times times = { -1, -1 };
            OK(ps_pipe_simulate(t, costs, NULL, &times, NULL, NULL));
            CHECK(sum == n && times.makespan == cut.makespan);
            if (!random)
                printf("%s: the cut's makespan over the best %.4f, equal numbers %.3f, the bound %.3f; %d tried\n",
                       ps_pipe_schedule_name(schedule), cut.makespan / best, cut.makespan / cut.equal,
                       cut.makespan / cut.bound, cut.tried);
            ps_pipe_table_free(t);
        }
    printf("the worst cut over the best one: %.4f\n", worst);
    ps_pipe_table *t = make(PS_PIPE_INTERLEAVED, 2, 3, 2, 0);
    ps_pipe_cost parts[6] = { { 0 } };
    ps_pipe_cut_times cut;
    int32_t counts[6];
    FAILS(ps_pipe_cut(t, parts, 5, NULL, counts, &cut), PS_EINVAL, "a model of 5 parts cannot be cut into 6 virtual");
    parts[4].input = -1;
    FAILS(ps_pipe_cut(t, parts, 6, NULL, counts, &cut), PS_EINVAL, "a cost of part 4");
    parts[4].input = 0;
    OK(ps_pipe_cut(t, parts, 6, NULL, counts, &cut));
    for (int v = 0; v < 6; v++) CHECK(counts[v] == 1);
    ps_pipe_table_free(t);
    t = make(PS_PIPE_GPIPE, 1, 1, 3, 0);
    OK(ps_pipe_cut(t, parts, 6, NULL, counts, &cut));
    CHECK(counts[0] == 6);
    ps_pipe_table_free(t);
}

static void test_layout(void)
{
    static const struct { const char *layout, *kinds; int n; const char *word; } wrong[] = {
        { "Et|tL", "EtttL", 2, "has 4 parts, the model has 5" }, { "Et|tL", "EttL", 3, "2 virtual stages, the" },
        { "Et||tL", "EttL", 3, "no part in virtual stage 1" }, { "Et|mL", "EttL", 2, "'m' as part 2, in virtual s" },
        { "Et*|tL", "EttL", 2, "character 3: a number must follow *" },
        { "(Et|tL", "EttL", 2, "a bracket is not closed" },
        { "Et|tL)", "EttL", 2, "character 6: it closes a bracket that" },
        { "Et;tL", "EttL", 2, "character 3: expected a letter" },
        { "t*70000", "t", 1, "more than 65536 repeats" }, { "((t*300)*300)", "t", 1, "more than 65536 letters" },
        { "((((((((((((((((((t", "t", 1, "too many brackets" }, { "", "t", 1, "has 0 parts" } };
    static const int32_t megatron[] = { 4, 2, 2, 1, 1 };
    int32_t counts[5];
    OK(ps_pipe_layout("Et*3|(tt|)*2,m|L", "EtttttttmL", 5, counts));
    CHECK(!memcmp(counts, megatron, sizeof megatron));
    OK(ps_pipe_layout("E(t|)*2 t*0 t L", "EtttL", 3, counts));
    CHECK(counts[0] == 2 && counts[1] == 1 && counts[2] == 2);
    OK(ps_pipe_layout("()*7 t*0 t", "t", 1, counts));
    CHECK(counts[0] == 1);
    OK(ps_pipe_layout("(t(t|)*2)*2 t", "tttttttttt" + 3, 5, counts));      /* tt|t|tt|t|t */
    CHECK(counts[0] == 2 && counts[1] == 1 && counts[2] == 2 && counts[3] == 1 && counts[4] == 1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        FAILS(ps_pipe_layout(wrong[i].layout, wrong[i].kinds, wrong[i].n, counts), PS_EINVAL, wrong[i].word);
}

/* -- without memory ------------------------------------------------------------------------------------------------ */
static int whole(int forward_only)
{
    static char text[1 << 14];
    ps_pipe_spec spec = { .schedule = PS_PIPE_INTERLEAVED, .stages = 3, .virtual_stages = 2, .micro_batches = 5,
                          .forward_only = forward_only };
    ps_pipe_table *t = NULL, *u = NULL;
    ps_pipe_times times;
    int rc = ps_pipe_table_new(&spec, &t);
    if (rc == 0) rc = ps_pipe_simulate(t, NULL, NULL, &times, NULL, NULL);
    ps_pipe_cost parts[7] = { { 0 } };
    ps_pipe_cut_times cut;
    int32_t counts[6];
    if (rc == 0) rc = ps_pipe_cut(t, parts, 7, NULL, counts, &cut);
    if (rc == 0) rc = ps_pipe_layout("(t|)*5 t*2", "ttttttt", 6, counts);
    if (rc == 0) rc = ps_pipe_table_lower(t);
    if (rc == 0) ps_pipe_table_write(t, 1, text, sizeof text);
    if (rc == 0) rc = read_text(text, &u);
    ps_pipe_table_free(t);
    ps_pipe_table_free(u);
    return rc;
}

static void test_without_memory(void)
{
    for (int forward_only = 0; forward_only < 2; forward_only++) {
        int64_t nth = 0;
        for (bool failed_one = true; failed_one; nth++) {
            ps_test_fail_alloc(nth, 1);
            int rc = whole(forward_only);
            failed_one = ps_test_fail_alloc_left() < 0;
            ps_test_fail_alloc(-1, 0);
            CHECK(rc == (failed_one ? PS_ENOMEM : 0));
        }
        CHECK(nth > 40);
    }
}

int main(void)
{
    test_schedules();
    test_bubbles();
    test_random_costs();
    test_by_hand();
    test_text();
    test_refusals();
    test_cut();
    test_layout();
    test_without_memory();
    return end_checks();
}
