/* SPDX-License-Identifier: BSD-3-Clause
 * Softmax along the last dimension, cross entropy, and the language-model head fused with its loss. Backward computes
 * the log-sum-exp again in double, because the saved log-sum-exp may be rounded to fp32. Targets are checked before any
 * output is written. */
#include "ref.h"

/* The terms of the softmax of a row x [n]: softmax = exp(x - top) / sum, and log-sum-exp = top + log(sum). sum is NaN
 * if an element is NaN or +infinity, or if all elements are -infinity. */
struct sum_exp { double top, sum; };

static struct sum_exp sum_exp(const double *x, int64_t n)
{
    struct sum_exp s = { -INFINITY, 0 };
    for (int64_t j = 0; j < n; j++) s.top = x[j] > s.top ? x[j] : s.top;
    for (int64_t j = 0; j < n; j++) s.sum += exp(x[j] - s.top);
    return s;
}

static double soft(struct sum_exp s, double x) { return exp(x - s.top) / s.sum; }
static double log_soft(struct sum_exp s, double x) { return x - s.top - log(s.sum); }

/* Returns true if x[t] is the first of the largest elements of x [n]. s contains the softmax terms of x. If t is
 * negative, the target is on another rank, and the result is false. */
static bool is_hit(const double *x, struct sum_exp s, int64_t t)
{
    if (t < 0 || isnan(s.sum) || isinf(s.top) || x[t] != s.top) return false;
    for (int64_t j = 0; j < t; j++) if (x[j] == s.top) return false;
    return true;
}

/* If `want` is set, writes to `out` the number of hits, followed by the number of rows that are not ignored. */
static void put_hits(const ps_view *out, int want, int64_t hits, int64_t counted)
{
    if (!want || !ps_has(out)) return;
    ref_store_int(out, 0, hits);
    ref_store_int(out, 1, counted);
}

static void read_row(const ps_view *x, int64_t r, int64_t n, double *row)
{
    for (int64_t j = 0; j < n; j++) row[j] = ref_load(x, r * n + j);
}

static int softmax(ps_call *call, bool logarithm)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int64_t n = ref_last(x), rows = n > 0 ? x->numel / n : 0;
    double *row;
    PS_TRY(ref_scratch(call, n, &row));
    for (int64_t r = 0; r < rows; r++) {
        read_row(x, r, n, row);
        struct sum_exp s = sum_exp(row, n);
        for (int64_t j = 0; j < n; j++) ref_store(y, r * n + j, logarithm ? log_soft(s, row[j]) : soft(s, row[j]));
    }
    return 0;
}

int ref_softmax(ps_call *call) { return softmax(call, false); }
int ref_log_softmax(ps_call *call) { return softmax(call, true); }

int ref_softmax_backward(ps_call *call)
{
    const ps_view *y = &call->in[0], *dy = &call->in[1], *dx = &call->out[0];
    int64_t n = ref_last(y), rows = n > 0 ? y->numel / n : 0;
    for (int64_t r = 0; r < rows; r++) {
        double dot = 0;
        for (int64_t i = r * n; i < (r + 1) * n; i++) dot += ref_load(y, i) * ref_load(dy, i);
        for (int64_t i = r * n; i < (r + 1) * n; i++) ref_store(dx, i, ref_load(y, i) * (ref_load(dy, i) - dot));
    }
    return 0;
}

int ref_log_softmax_backward(ps_call *call)
{
    const ps_view *y = &call->in[0], *dy = &call->in[1], *dx = &call->out[0];
    int64_t n = ref_last(y), rows = n > 0 ? y->numel / n : 0;
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t i = r * n; i < (r + 1) * n; i++) sum += ref_load(dy, i);
        for (int64_t i = r * n; i < (r + 1) * n; i++) ref_store(dx, i, ref_load(dy, i) - exp(ref_load(y, i)) * sum);
    }
    return 0;
}

/* -- cross entropy ---------------------------------------------------------------------------------------------- */
enum { REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM };

/* Returns the mean of the losses. If there are no losses, the mean is 0, so that a batch without targets adds nothing.
 * In this case PyTorch's mean is NaN, and PyTorch's gradients are 0, like ours. */
static double mean(double total, int64_t counted) { return counted > 0 ? total / (double)counted : 0; }

/* Checks that every target is in [0, V) or is ignored. Sets *counted to the number of targets that are not ignored. */
static int check_targets(const ps_view *target, int64_t V, int64_t ignore, int64_t *counted)
{
    *counted = 0;
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ref_load_int(target, r);
        if (t == ignore) continue;
        if (t < 0 || t >= V)
            return ps_fail(PS_ERANGE, "target %" PRId64 " at position %" PRId64 " is outside [0, %" PRId64
                           ") and is not ignore_index %" PRId64, t, r, V, ignore);
        ++*counted;
    }
    return 0;
}

int ref_cross_entropy(ps_call *call)
{
    const ps_attrs_cross_entropy *a = call->attrs;
    const ps_view *logits = &call->in[0], *target = &call->in[1], *loss = &call->out[0], *lse_out = &call->out[1];
    int64_t V = ref_last(logits), rows = target->numel, counted, hits = 0;
    double *row;
    long double total = 0;
    PS_TRY(check_targets(target, V, a->ignore_index, &counted));
    PS_TRY(ref_scratch(call, V, &row));
    for (int64_t r = 0; r < rows; r++) {
        int64_t t = ref_load_int(target, r);
        read_row(logits, r, V, row);
        struct sum_exp s = sum_exp(row, V);
        double loss_r = t == a->ignore_index ? 0 : -log_soft(s, row[t]);
        total += loss_r;
        if (t != a->ignore_index) hits += is_hit(row, s, t);
        if (ps_has(lse_out)) ref_store(lse_out, r, s.top + log(s.sum));
        if (a->reduction == REDUCTION_NONE) ref_store(loss, r, loss_r);
    }
    if (a->reduction == REDUCTION_MEAN) ref_store(loss, 0, mean((double)total, counted));
    if (a->reduction == REDUCTION_SUM) ref_store(loss, 0, (double)total);
    put_hits(&call->out[2], a->want_hits, hits, counted);
    return 0;
}

int ref_cross_entropy_backward(ps_call *call)
{
    const ps_attrs_cross_entropy_backward *a = call->attrs;
    const ps_view *logits = &call->in[0], *target = &call->in[1], *dloss = &call->in[3], *dx = &call->out[0];
    int64_t V = ref_last(logits), counted;
    double *row;
    PS_TRY(check_targets(target, V, a->ignore_index, &counted));
    PS_TRY(ref_scratch(call, V, &row));
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ref_load_int(target, r);
        if (t == a->ignore_index) {
            for (int64_t j = 0; j < V; j++) ref_store(dx, r * V + j, 0);
            continue;
        }
        read_row(logits, r, V, row);
        struct sum_exp s = sum_exp(row, V);
        double scale = ref_load(dloss, a->reduction == REDUCTION_NONE ? r : 0);
        if (a->reduction == REDUCTION_MEAN) scale /= (double)counted;
        for (int64_t j = 0; j < V; j++) ref_store(dx, r * V + j, (soft(s, row[j]) - (j == t)) * scale);
    }
    return 0;
}

static double weight_of(const ps_view *weight, int64_t t) { return ps_has(weight) ? ref_load(weight, t) : 1; }

/* Checks the targets. Sets *divisor to the sum of the weights of all targets that are not ignored. */
static int sum_weights(const ps_view *target, const ps_view *weight, int64_t V, int64_t ignore, double *divisor)
{
    int64_t counted;
    PS_TRY(check_targets(target, V, ignore, &counted));
    *divisor = 0;
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ref_load_int(target, r);
        if (t != ignore) *divisor += weight_of(weight, t);
    }
    return 0;
}

int ref_nll_loss(ps_call *call)
{
    const ps_attrs_nll_loss *a = call->attrs;
    const ps_view *logp = &call->in[0], *target = &call->in[1], *weight = &call->in[2], *loss = &call->out[0];
    int64_t V = ref_last(logp);
    long double total = 0;
    double divisor;
    PS_TRY(sum_weights(target, weight, V, a->ignore_index, &divisor));
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ref_load_int(target, r);
        double loss_r = t == a->ignore_index ? 0 : -ref_load(logp, r * V + t) * weight_of(weight, t);
        total += loss_r;
        if (a->reduction == REDUCTION_NONE) ref_store(loss, r, loss_r);
    }
    if (a->reduction == REDUCTION_MEAN) ref_store(loss, 0, (double)total / (divisor == 0 ? 1 : divisor));
    if (a->reduction == REDUCTION_SUM) ref_store(loss, 0, (double)total);
    return 0;
}

int ref_nll_loss_backward(ps_call *call)
{
    const ps_attrs_nll_loss_backward *a = call->attrs;
    const ps_view *target = &call->in[0], *dloss = &call->in[1], *weight = &call->in[2], *dlogp = &call->out[0];
    int64_t V = a->classes;
    double divisor;
    PS_TRY(sum_weights(target, weight, V, a->ignore_index, &divisor));
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ref_load_int(target, r);
        double slope = ref_load(dloss, a->reduction == REDUCTION_NONE ? r : 0);
        if (a->reduction == REDUCTION_MEAN) slope /= divisor == 0 ? 1 : divisor;
        for (int64_t j = 0; j < V; j++) ref_store(dlogp, r * V + j, 0);
        if (t != a->ignore_index) ref_store(dlogp, r * V + t, -slope * weight_of(weight, t));
    }
    return 0;
}

/* Processes one row x_r at a time. Computes the logits w * x_r, replaces the logits by their gradient, and adds the
 * row's terms to dx and dw. */
int ref_lm_loss(ps_call *call)
{
    const ps_attrs_lm_loss *a = call->attrs;
    const ps_view *target = &call->in[2];
    int64_t C = ref_last(&call->in[0]), V = call->in[1].shape[0], counted, hits = 0;
    bool want_dx = (a->want_grad & 1) && ps_has(&call->out[1]), want_dw = (a->want_grad & 2) && ps_has(&call->out[2]);
    bool want_db = (a->want_grad & 4) && ps_has(&call->out[3]);
    const ps_view *bias = &call->in[3];
    double *x, *w, *row, *dx = NULL, *dw = NULL, *db = NULL;      /* x and dx are [rows, C]; w and dw are [V, C]; row
                                                                   * and db are [V] */
    PS_TRY(check_targets(target, V, a->ignore_index, &counted));
    PS_TRY(ref_dense(call, &call->in[0], &x));
    PS_TRY(ref_dense(call, &call->in[1], &w));
    PS_TRY(ref_scratch(call, V, &row));
    if (want_dx) PS_TRY(ref_scratch(call, call->in[0].numel, &dx));
    if (want_dw) PS_TRY(ref_scratch(call, V * C, &dw));
    if (want_db) PS_TRY(ref_scratch(call, V, &db));
    long double total = 0;
    double scale = a->reduction == REDUCTION_MEAN ? a->dloss / (double)counted : a->dloss;
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ref_load_int(target, r);
        if (t == a->ignore_index) continue;
        for (int64_t v = 0; v < V; v++) {
            row[v] = ps_has(bias) ? ref_load(bias, v) : 0;
            for (int64_t c = 0; c < C; c++) row[v] += w[v * C + c] * x[r * C + c];
        }
        struct sum_exp s = sum_exp(row, V);
        total -= log_soft(s, row[t]);
        hits += is_hit(row, s, t);
        if (!want_dx && !want_dw && !want_db) continue;
        for (int64_t v = 0; v < V; v++) {
            double g = (soft(s, row[v]) - (v == t)) * scale;
            for (int64_t c = 0; want_dx && c < C; c++) dx[r * C + c] += g * w[v * C + c];
            for (int64_t c = 0; want_dw && c < C; c++) dw[v * C + c] += g * x[r * C + c];
            if (want_db) db[v] += g;
        }
    }
    ref_store(&call->out[0], 0, a->reduction == REDUCTION_MEAN ? mean((double)total, counted) : (double)total);
    if (want_dx) ref_put(&call->out[1], dx, false);
    if (want_dw) ref_put(&call->out[2], dw, false);
    if (want_db) ref_put(&call->out[3], db, false);
    put_hits(&call->out[4], a->want_hits, hits, counted);
    return 0;
}

/* -- a vocabulary that ranks share: a rank has the logits of `words` words, starting at word `first` --------------- */
/* Returns the column of the target of row r, or -1 if the target is not one of this rank's words. */
static int64_t column_of(const ps_view *target, int64_t r, int64_t first, int64_t words)
{
    int64_t t = ref_load_int(target, r) - first;
    return t >= 0 && t < words ? t : -1;
}

int ref_logit_stats(ps_call *call)
{
    const ps_attrs_logit_stats *a = call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[1], *mass = &call->in[2], *stats = &call->out[0];
    int64_t N = x->shape[0], V = x->shape[1];
    double *row;
    PS_TRY(ref_scratch(call, V, &row));
    for (int64_t r = 0; r < N; r++) {
        int64_t t = column_of(target, r, a->first, a->words);
        read_row(x, r, V, row);
        struct sum_exp s = sum_exp(row, a->words);
        double dot = 0;
        for (int64_t v = 0; ps_has(mass) && v < a->words; v++) dot += ref_load(mass, v) * row[v];
        ref_store(stats, r, s.top);
        ref_store(stats, N + r, is_hit(row, s, t) ? -s.sum : s.sum);
        ref_store(stats, 2 * N + r, t >= 0 ? row[t] : 0);
        if (ps_has(mass)) ref_store(stats, 3 * N + r, dot);
    }
    return 0;
}

/* Combines the stats [t, kinds, N] of all t ranks for row r. Returns the terms of the softmax over all words. *target
 * is the sum of the third statistic over the ranks, and *dot is the sum of the fourth. *hit is true if the target's
 * logit is the first of the largest logits. */
static struct sum_exp of_all(const ps_view *stats, int64_t r, double *target, double *dot, bool *hit)
{
    int64_t kinds = stats->shape[1], N = stats->shape[2];
    struct sum_exp s = { -INFINITY, 0 };
    bool first = true;                                       /* true if no earlier rank has the largest logit */
    *target = *dot = 0;
    *hit = false;
    for (int64_t i = 0; i < stats->shape[0]; i++) {
        double top = ref_load(stats, i * kinds * N + r);
        s.top = top > s.top ? top : s.top;
    }
    for (int64_t i = 0; i < stats->shape[0]; i++) {
        int64_t at = i * kinds * N + r;
        double sum = ref_load(stats, at + N), top = ref_load(stats, at);
        s.sum += fabs(sum) * exp(top - s.top);
        if (top == s.top) {
            if (first) *hit = sum < 0;
            first = false;
        }
        *target += ref_load(stats, at + 2 * N);
        if (kinds == 4) *dot += ref_load(stats, at + 3 * N);
    }
    if (isnan(s.sum)) *hit = false;
    return s;
}

int ref_logit_loss(ps_call *call)
{
    const ps_attrs_logit_loss *a = call->attrs;
    const ps_view *x = &call->in[0], *share = &call->in[3], *mass = &call->in[4];
    const ps_view *loss = &call->out[0], *dx = &call->out[1], *hits = &call->out[2];
    int64_t N = x->shape[0], V = x->shape[1], next = share->stride[0];
    double *row, target, dot;
    PS_TRY(ref_scratch(call, V, &row));
    for (int64_t r = 0; r < N; r++) {
        double all = ref_load(share, r), one = ref_load(share, next + r), some = ref_load(share, 2 * next + r);
        bool counts = all != 0 || one != 0 || some != 0, hit;
        struct sum_exp s = of_all(&call->in[2], r, &target, &dot, &hit);
        if (a->want_hits && ps_has(hits)) {
            ref_store_int(hits, r, counts && hit);
            ref_store_int(hits, N + r, counts);
        }
        ref_store(loss, r, counts ? all * (s.top + log(s.sum)) - one * target - some * dot : 0);
        if (!ps_has(dx)) continue;
        int64_t t = column_of(&call->in[1], r, a->first, a->words);
        read_row(x, r, V, row);
        for (int64_t v = 0; v < V; v++) {
            double g = all * soft(s, row[v]) - (v == t ? one : 0) - (ps_has(mass) ? some * ref_load(mass, v) : 0);
            ref_store(dx, r * V + v, counts && v < a->words ? a->dloss * g : 0);
        }
    }
    return 0;
}
