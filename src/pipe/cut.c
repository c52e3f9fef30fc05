/* SPDX-License-Identifier: BSD-3-Clause
 * This file cuts a model into virtual stages so that the simulated time of its schedule is short. Three things
 * influence this time: the time of the longest virtual stage, the times of the first and last virtual stages (if they
 * are shorter, the bubble is smaller), and the time of all virtual stages of a rank together.
 *
 * The method is iterated local search (Lourenco et al. 2003). A search step moves one part from one virtual stage to
 * another, which shifts all cuts between these two stages by one part. The search tries all steps and makes the best
 * step, until no step improves the split. Then it shifts some cuts at random, and continues from the new split. The
 * random numbers are the same in every call. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/philox.h"
#include "pipe/pipe.h"

enum { MOST_TRIED = 20000, LEAST_TRIED = 500, ACTIONS_TRIED = 20000000, ROUNDS = 40 };

typedef struct score {
    double makespan;
    /* unevenness: sum of the squares of the stages' times; of two splits with equal makespans, the split with the lower
     * unevenness is better */
    double unevenness;
} score;

typedef struct search {
    pipe_course course;
    const ps_pipe_cost *parts;      /* [n] */
    int32_t n, vstages, tried, most;
    const ps_pipe_link *link;
    ps_pipe_cost *costs;            /* [vstages] costs of the split that is being tried */
    /* begin: [vstages + 1] the split that is being tried: the index of the first part of each virtual stage, and in the
     * last element the number of parts */
    int32_t *begin;
    /* here: [vstages + 1] the split that is being improved
     * best: [vstages + 1] the best split so far */
    int32_t *here, *best;
} search;

static double whole(const ps_pipe_cost *k) { return k->forward + k->input + k->weight; }
static bool is_less(score a, score b)
{
    return a.makespan < b.makespan || (a.makespan == b.makespan && a.unevenness < b.unevenness);
}

static int try_cut(search *s, score *out)
{
    ps_pipe_times times;
    *out = (score){ 0, 0 };
    for (int32_t v = 0; v < s->vstages; v++) {
        ps_pipe_cost sum = { .forward = 0 };
        for (int32_t i = s->begin[v]; i < s->begin[v + 1]; i++) {
            const ps_pipe_cost *k = &s->parts[i];
            sum.forward += k->forward;
            sum.input += k->input;
            sum.weight += k->weight;
            sum.reduce += k->reduce;
            sum.nbytes = k->nbytes;
        }
        s->costs[v] = sum;
        out->unevenness += whole(&sum) * whole(&sum);
    }
    s->tried++;
    PS_TRY(pipe_course_run(&s->course, s->costs, s->link, &times, NULL, NULL));
    out->makespan = times.makespan;
    return 0;
}

/* -- initial splits ------------------------------------------------------------------------------------------------ */
static void cut_equally(search *s)
{
    int32_t size = s->n / s->vstages, larger = s->n % s->vstages;
    for (int32_t v = 0; v <= s->vstages; v++) s->begin[v] = v * size + (v < larger ? v : larger);
}

/* Splits the model so that no virtual stage takes longer than `most`. Each virtual stage gets as many parts as fit,
 * except that at least one part is left for each later virtual stage. A part that takes longer than `most` becomes a
 * virtual stage of its own. Returns false if parts are left after the last virtual stage. */
static bool cut_within(search *s, double most)
{
    int32_t at = 0;
    for (int32_t v = 0; v < s->vstages; v++) {
        double sum = 0;
        s->begin[v] = at;
        do sum += whole(&s->parts[at++]);
        while (at < s->n - (s->vstages - 1 - v) && sum + whole(&s->parts[at]) <= most);
    }
    s->begin[s->vstages] = at;
    return at == s->n;
}

/* Finds a split whose longest virtual stage is nearly as short as possible. */
static void cut_evenly(search *s)
{
    double low = 0, high = 0;
    for (int32_t i = 0; i < s->n; i++) {
        high += whole(&s->parts[i]);
        if (whole(&s->parts[i]) > low) low = whole(&s->parts[i]);
    }
    for (int i = 0; i < 40; i++) {
        double middle = (low + high) / 2;
        *(cut_within(s, middle) ? &high : &low) = middle;
    }
    if (!cut_within(s, high)) cut_equally(s);
}

/* -- search steps -------------------------------------------------------------------------------------------------- */
static size_t cut_nbytes(const search *s) { return ((size_t)s->vstages + 1) * sizeof *s->begin; }

/* Adds `by`, which is 1 or -1, to begin[from] to begin[to]. Returns false if a virtual stage would become empty. */
static bool shift(const search *s, int32_t *begin, int32_t from, int32_t to, int32_t by)
{
    if (by < 0 ? begin[from] - 1 <= begin[from - 1] : begin[to] + 1 >= begin[to + 1]) return false;
    for (int32_t v = from; v <= to; v++) begin[v] += by;
    return true;
}

/* Improves the split `here`. Tries all steps and makes the best step, until no step improves the score. The caller sets
 * *at to the score of `here`, and the function updates it. */
static int descend(search *s, score *at)
{
    for (bool moved = true; moved && s->tried < s->most;) {
        int32_t best_from = 0, best_to = 0, best_by = 0;
        moved = false;
        for (int32_t from = 1; from < s->vstages; from++)
            for (int32_t to = from; to < s->vstages; to++)
                for (int32_t by = -1; by <= 1; by += 2) {
                    score found;
                    if (s->tried >= s->most) continue;
                    memcpy(s->begin, s->here, cut_nbytes(s));
                    if (!shift(s, s->begin, from, to, by)) continue;
                    PS_TRY(try_cut(s, &found));
                    if (is_less(found, *at)) *at = found, best_from = from, best_to = to, best_by = by, moved = true;
                }
        if (moved) shift(s, s->here, best_from, best_to, best_by);
    }
    return 0;
}

/* Makes random steps in the split `here`. An odd round makes 3 or 5 steps, to search near the best split. An even round
 * makes many steps. */
static void disturb(search *s, uint32_t round)
{
    uint32_t n = round % 2 ? 2 + round % 4 : 4 * (uint32_t)s->vstages;
    for (uint32_t i = 0; i < n; i++) {
        ps_philox drawn = ps_philox4x32(0, round, i);
        int32_t one = 1 + (int32_t)(drawn.v[0] % (uint32_t)(s->vstages - 1));
        int32_t other = 1 + (int32_t)(drawn.v[1] % (uint32_t)(s->vstages - 1));
        shift(s, s->here, one < other ? one : other, one < other ? other : one, drawn.v[2] & 1 ? 1 : -1);
    }
}

/* Finds the best split by several calls of descend(). The first call starts from the even split (cut_evenly). The
 * second call starts from the best of two splits: the result of the first call, and the equal split (cut_equally). Each
 * later call starts from the best split so far, after random steps. */
static int look(search *s, ps_pipe_cut_times *out)
{
    score best, found;
    cut_equally(s);
    PS_TRY(try_cut(s, &best));
    out->equal = best.makespan;
    memcpy(s->best, s->begin, cut_nbytes(s));
    for (uint32_t round = 0; round < ROUNDS && s->tried < s->most && s->vstages > 1; round++) {
        if (round == 0) cut_evenly(s);
        memcpy(s->here, round == 0 ? s->begin : s->best, cut_nbytes(s));
        if (round > 1) disturb(s, round);
        memcpy(s->begin, s->here, cut_nbytes(s));
        PS_TRY(try_cut(s, &found));
        PS_TRY(descend(s, &found));
        if (!is_less(found, best)) continue;
        best = found;
        memcpy(s->best, s->here, cut_nbytes(s));
    }
    out->makespan = best.makespan;
    return 0;
}

/* -- the lower bound ----------------------------------------------------------------------------------------------- */
/* Sets out->bound to a lower bound for the makespan of every split. The bound is the largest of these times:
 *   - The time of all work of all parts, divided by the number of stages.
 *   - For each part: the time of the forwards of all earlier parts for one micro-batch, plus the time of all work of
 *     this part for all micro-batches. If the time of a part is the largest, sets out->bound_part to the part's index.
 *     Otherwise sets it to -1. */
static void find_bound(const ps_pipe_table *t, const ps_pipe_cost *parts, int32_t n, ps_pipe_cut_times *out)
{
    bool back = !t->spec.forward_only;
    double before = 0, sum = 0, m = t->spec.micro_batches;
    out->bound_part = -1;
    for (int32_t i = 0; i < n; i++) sum += m * (back ? whole(&parts[i]) : parts[i].forward);
    out->bound = sum / t->spec.stages;
    for (int32_t i = 0; i < n; i++) {
        double bound = before + m * (back ? whole(&parts[i]) : parts[i].forward);
        if (bound > out->bound) out->bound = bound, out->bound_part = i;
        before += parts[i].forward;
    }
}

int ps_pipe_cut(const ps_pipe_table *t, const ps_pipe_cost *parts, int32_t n, const ps_pipe_link *link, int32_t *counts,
                ps_pipe_cut_times *out)
{
    search s = { .parts = parts, .n = n, .vstages = t->spec.vstages, .link = link };
    ps_pipe_cut_times times = { .makespan = 0 };
    int64_t actions = 3 * (int64_t)t->spec.vstages * t->spec.micro_batches, most = ACTIONS_TRIED / actions;
    if (n < s.vstages)
        return ps_fail(PS_EINVAL, "a model of %d parts cannot be cut into %d virtual stages (%d stages of up to %d): "
                       "set fewer stages", n, s.vstages, t->spec.stages, t->spec.virtual_stages);
    PS_TRY(pipe_check_numbers("part", parts, n, link));
    s.most = most > MOST_TRIED ? MOST_TRIED : most < LEAST_TRIED ? LEAST_TRIED : (int32_t)most;
    PS_TRY(pipe_course_new(t, &s.course));
    s.costs = ps_alloc((size_t)s.vstages * sizeof *s.costs);
    s.begin = ps_alloc(3 * cut_nbytes(&s));
    int rc = s.costs && s.begin ? 0 : ps_fail_nomem((size_t)s.vstages * sizeof *s.costs + 3 * cut_nbytes(&s));
    if (rc == 0) {
        s.here = s.begin + s.vstages + 1;
        s.best = s.here + s.vstages + 1;
        rc = look(&s, &times);
    }
    if (rc == 0) {
        for (int32_t v = 0; v < s.vstages; v++) counts[v] = s.best[v + 1] - s.best[v];
        times.tried = s.tried;
        find_bound(t, parts, n, &times);
        *out = times;
    }
    pipe_course_free(&s.course);
    ps_free(s.costs);
    ps_free(s.begin);
    return rc;
}
