/* SPDX-License-Identifier: BSD-3-Clause
 * The op lm_loss on the cpu. It computes logits = x w^T + bias, the cross entropy, and the gradients dx, dw and db. The
 * rows of x are processed in panels, so that only one panel of logits exists at a time. ps_cpu_loss_row replaces the
 * logits in place by their gradient.
 *
 * Rounding: If products of the type of x are computed in fp32 anyway, the logits and their gradients are fp32.
 * Otherwise they have the type of x. For each panel, dw is summed over the panel's rows in fp32 and rounded to the type
 * of dw. db is summed over all rows in fp32, in row order. The losses are added in double, in row order. The division
 * into panels depends only on the shapes (base/panels.h). */
#include "backend/cpu/gemm.h"
#include "base/error.h"
#include "base/panels.h"
#include <math.h>

enum {
    DB_COLUMNS = 1024,
    DW_ROWS = 2048              /* number of rows of dw that are computed at a time, so that they stay in the cache;
                                 * with 50,257 words, this is 20 % faster */
};

typedef struct problem {
    ps_call *call;
    ps_gemm_space space;
    const ps_view *x, *w, *target;
    const ps_view *dx, *dw, *db;                /* NULL if the caller does not want this gradient */
    const ps_view *bias;        /* [V], or NULL if there is no bias */
    int64_t N, V, C;            /* x is [N, C], w is [V, C], target is [N] */
    int64_t ignore;
    int type;                   /* type of the logits */
    void *logits;               /* [panel rows, V] */
    float *loss;                /* losses of the rows, [N] */
    int64_t hits;               /* number of rows whose target has the largest logit, with no earlier token of the same
                                 * logit */
    float *db_sum;              /* [V], allocated only if db is wanted */
} problem;

static int64_t target_at(const problem *p, int64_t i)
{
    return p->target->dtype == PS_I64 ? ((const int64_t *)p->target->data)[i] : ((const int32_t *)p->target->data)[i];
}

static void *at(const ps_view *v, int64_t i) { return (char *)v->data + i * ps_dtype_bytes(v->dtype); }

/* Counts the rows that are not ignored. Returns an error if another row has a target outside [0, V). */
static int count_targets(const problem *p, int64_t *count)
{
    *count = 0;
    for (int64_t i = 0; i < p->N; i++) {
        int64_t t = target_at(p, i);
        if (t == p->ignore) continue;
        if (t < 0 || t >= p->V)
            return ps_fail(PS_ERANGE, "target %lld of row %lld is outside the vocabulary [0, %lld)", (long long)t,
                           (long long)i, (long long)p->V);
        ++*count;
    }
    return 0;
}

/* Computes dlogits^T x over rows [first, first + rows) of x, and stores the product in dw or adds it to dw. */
static int add_dw(problem *p, int64_t first, int64_t rows)
{
    int64_t step = p->V < 2 * DW_ROWS ? p->V : DW_ROWS;
    for (int64_t v = 0; v < p->V; v += step) {
        int64_t n = p->V - v < step ? p->V - v : step;
        ps_gemm g = { .batch = 1, .accumulate = first > 0 };
        g.a = (ps_mat){ (char *)p->logits + v * ps_dtype_bytes(p->type), p->type, n, rows, 1, p->V };
        g.b = (ps_mat){ at(p->x, first * p->C), p->x->dtype, rows, p->C, p->C, 1 };
        g.dst = (ps_mat){ at(p->dw, v * p->C), p->dw->dtype, n, p->C, p->C, 1 };
        PS_TRY(ps_cpu_gemm_run(&p->space, &g));
    }
    return 0;
}

/* Adds the rows of a panel's dlogits to db_sum, in row order. The columns are divided among the threads. */
static void add_db(const problem *p, int64_t rows)
{
#pragma omp parallel for schedule(static) if (rows * p->V > PS_PAR_MIN)
    for (int64_t first = 0; first < p->V; first += DB_COLUMNS) {
        int64_t n = p->V - first < DB_COLUMNS ? p->V - first : DB_COLUMNS, size = ps_dtype_bytes(p->type);
        float row[DB_COLUMNS], *sum = p->db_sum + first;
        for (int64_t i = 0; i < rows; i++) {
            ps_cpu_row_load(row, (const char *)p->logits + (i * p->V + first) * size, n, p->type);
#pragma omp simd
            for (int64_t v = 0; v < n; v++) sum[v] += row[v];
        }
    }
}

static int run_panel(problem *p, int64_t first, int64_t rows, float scale)
{
    int want = p->dx || p->dw || p->db;
    int64_t size = ps_dtype_bytes(p->type);
    ps_mat logits = { p->logits, p->type, rows, p->V, p->V, 1 };
    ps_gemm forward = { .batch = 1, .dst = logits };
    forward.a = (ps_mat){ at(p->x, first * p->C), p->x->dtype, rows, p->C, p->C, 1 };
    forward.b = (ps_mat){ p->w->data, p->w->dtype, p->C, p->V, 1, p->C };
    if (p->bias) forward.bias = p->bias->data, forward.bias_dtype = p->bias->dtype;
    PS_TRY(ps_cpu_gemm_run(&p->space, &forward));
    int64_t made = p->call->dry ? 0 : rows, hits = 0;
#pragma omp parallel for schedule(static) reduction(+ : hits) if (rows * p->V > PS_PAR_MIN)
    for (int64_t i = 0; i < made; i++) {
        int64_t t = target_at(p, first + i);
        void *row = (char *)p->logits + i * p->V * size;
        bool hit;
        p->loss[first + i] = ps_cpu_loss_row(row, p->type, p->V, t == p->ignore ? -1 : t, scale, want, &hit);
        hits += hit;
    }
    p->hits += hits;
    if (p->db && made > 0) add_db(p, made);
    if (p->dx) {
        ps_gemm g = { .batch = 1, .a = logits };
        g.b = (ps_mat){ p->w->data, p->w->dtype, p->V, p->C, p->C, 1 };
        g.dst = (ps_mat){ at(p->dx, first * p->C), p->dx->dtype, rows, p->C, p->C, 1 };
        PS_TRY(ps_cpu_gemm_run(&p->space, &g));
    }
    return p->dw ? add_dw(p, first, rows) : 0;
}

int ps_cpu_lm_loss(ps_call *call)
{
    const struct ps_attrs_lm_loss *attrs = call->attrs;
    problem p = { .call = call, .space = { .call = call }, .x = &call->in[0], .w = &call->in[1], .target = &call->in[2],
                  .ignore = attrs->ignore_index };
    int dtype = p.x->dtype;
    if (dtype != PS_F32 && dtype != PS_BF16 && dtype != PS_F16) return PS_EUNSUP;
    if ((attrs->want_grad & 1) && ps_has(&call->out[1])) p.dx = &call->out[1];
    if ((attrs->want_grad & 2) && ps_has(&call->out[2])) p.dw = &call->out[2];
    if ((attrs->want_grad & 4) && ps_has(&call->out[3])) p.db = &call->out[3];
    if (ps_has(&call->in[3])) p.bias = &call->in[3];
    p.C = p.w->shape[1], p.V = p.w->shape[0], p.N = p.target->numel;
    if (p.C == 0 || p.V == 0 || p.N == 0) return PS_EUNSUP;
    int64_t count = 0;
    if (!call->dry) PS_TRY(count_targets(&p, &count));
    p.type = ps_cpu_gemm_native(dtype) ? dtype : PS_F32;
    int64_t rows = ps_panel_rows(p.N, p.V);
    p.loss = call->scratch(call, (size_t)p.N * sizeof *p.loss);
    p.logits = p.loss ? call->scratch(call, (size_t)(rows * p.V * ps_dtype_bytes(p.type))) : NULL;
    if (p.logits && p.db) p.db_sum = call->scratch(call, (size_t)p.V * sizeof *p.db_sum);
    if (!p.logits || (p.db && !p.db_sum)) return PS_ENOMEM;                         /* scratch() has recorded the
                                                                                     * error */
    for (int64_t v = 0; p.db && !call->dry && v < p.V; v++) p.db_sum[v] = 0;
    float scale = attrs->reduction == 1 ? (float)(attrs->dloss / (double)(count ? count : 1)) : (float)attrs->dloss;
    for (int64_t first = 0; first < p.N; first += rows)
        PS_TRY(run_panel(&p, first, p.N - first < rows ? p.N - first : rows, scale));
    if (call->dry) return 0;
    if (p.db) ps_cpu_row_store(p.db->data, p.db_sum, p.V, p.db->dtype);
    double sum = 0;
    for (int64_t i = 0; i < p.N; i++) sum += p.loss[i];
    bool mean = attrs->reduction == 1 && count > 0;          /* the mean over no rows is 0 */
    *(float *)call->out[0].data = (float)(mean ? sum / (double)count : sum);
    if (attrs->want_hits && ps_has(&call->out[4])) {
        int64_t *hits = call->out[4].data;
        hits[0] = p.hits, hits[1] = count;
    }
    return 0;
}
