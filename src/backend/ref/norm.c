/* SPDX-License-Identifier: BSD-3-Clause
 * Layer norm and RMS norm over the last dimension C, forward and backward. dx and the input `add` can share memory.
 * This is possible because an element of dx depends on only one element of `add`, which is read just before the element
 * of dx is written. */
#include "ref.h"

int ref_layer_norm(ps_call *call)
{
    const ps_attrs_layer_norm *a = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2];
    const ps_view *y = &call->out[0], *mean_out = &call->out[1], *rstd_out = &call->out[2];
    int64_t C = ref_last(x), rows = C > 0 ? x->numel / C : 0;
    for (int64_t r = 0; r < rows; r++) {
        long double sum = 0;
        for (int64_t c = 0; c < C; c++) sum += ref_load(x, r * C + c);
        double mean = (double)(sum / C), variance = 0;
        for (int64_t c = 0; c < C; c++) {
            double d = ref_load(x, r * C + c) - mean;
            variance += d * d;
        }
        double rstd = 1 / sqrt(variance / (double)C + a->eps);
        for (int64_t c = 0; c < C; c++) {
            double v = (ref_load(x, r * C + c) - mean) * rstd;
            if (ps_has(w)) v *= ref_load(w, c);
            if (ps_has(b)) v += ref_load(b, c);
            ref_store(y, r * C + c, v);
        }
        if (ps_has(mean_out)) ref_store(mean_out, r, mean);
        if (ps_has(rstd_out)) ref_store(rstd_out, r, rstd);
    }
    return 0;
}

/* With n = (x - mean) * rstd and g = dy * w, computes
 *   dx = rstd * (g - mean(g) - n * mean(g * n)) + add,
 *   dw = sum over rows of dy * n, db = sum over rows of dy. */
int ref_layer_norm_backward(ps_call *call)
{
    const ps_attrs_layer_norm_backward *a = call->attrs;
    const ps_view *dy = &call->in[0], *x = &call->in[1], *w = &call->in[2], *add = &call->in[5], *dx = &call->out[0];
    int64_t C = ref_last(x), rows = C > 0 ? x->numel / C : 0;
    double *g, *n, *dw, *db;                        /* all are [C] */
    PS_TRY(ref_scratch(call, C, &g));
    PS_TRY(ref_scratch(call, C, &n));
    PS_TRY(ref_scratch(call, C, &dw));
    PS_TRY(ref_scratch(call, C, &db));
    for (int64_t r = 0; r < rows; r++) {
        double mean = ref_load(&call->in[3], r), rstd = ref_load(&call->in[4], r), mean_g = 0, mean_gn = 0;
        for (int64_t c = 0; c < C; c++) {
            double dy_c = ref_load(dy, r * C + c);
            n[c] = (ref_load(x, r * C + c) - mean) * rstd;
            g[c] = ps_has(w) ? dy_c * ref_load(w, c) : dy_c;
            mean_g += g[c] / (double)C;
            mean_gn += g[c] * n[c] / (double)C;
            dw[c] += dy_c * n[c];
            db[c] += dy_c;
        }
        for (int64_t c = 0; ps_has(dx) && c < C; c++) {
            double v = rstd * (g[c] - mean_g - n[c] * mean_gn);
            if (ps_has(add)) v += ref_load(add, r * C + c);
            ref_store(dx, r * C + c, v);
        }
    }
    if (a->want_w) {
        ref_put(&call->out[1], dw, false);
        ref_put(&call->out[2], db, false);
    }
    return 0;
}

int ref_rms_norm(ps_call *call)
{
    const ps_attrs_rms_norm *a = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *y = &call->out[0], *rstd_out = &call->out[1];
    int64_t C = ref_last(x), rows = C > 0 ? x->numel / C : 0;
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t c = 0; c < C; c++) squares += ref_load(x, r * C + c) * ref_load(x, r * C + c);
        double rstd = 1 / sqrt(squares / (double)C + a->eps);
        for (int64_t c = 0; c < C; c++)
            ref_store(y, r * C + c, ref_load(x, r * C + c) * rstd * (ps_has(w) ? ref_load(w, c) : 1));
        if (ps_has(rstd_out)) ref_store(rstd_out, r, rstd);
    }
    return 0;
}

/* With n = x * rstd and g = dy * w, computes
 *   dx = rstd * (g - n * mean(g * n)) + add, dw = sum over rows of dy * n. */
int ref_rms_norm_backward(ps_call *call)
{
    const ps_attrs_rms_norm_backward *a = call->attrs;
    const ps_view *dy = &call->in[0], *x = &call->in[1], *w = &call->in[2], *add = &call->in[4], *dx = &call->out[0];
    int64_t C = ref_last(x), rows = C > 0 ? x->numel / C : 0;
    double *g, *n, *dw;                             /* all are [C] */
    PS_TRY(ref_scratch(call, C, &g));
    PS_TRY(ref_scratch(call, C, &n));
    PS_TRY(ref_scratch(call, C, &dw));
    for (int64_t r = 0; r < rows; r++) {
        double rstd = ref_load(&call->in[3], r), mean_gn = 0;
        for (int64_t c = 0; c < C; c++) {
            double dy_c = ref_load(dy, r * C + c);
            n[c] = ref_load(x, r * C + c) * rstd;
            g[c] = ps_has(w) ? dy_c * ref_load(w, c) : dy_c;
            mean_gn += g[c] * n[c] / (double)C;
            dw[c] += dy_c * n[c];
        }
        for (int64_t c = 0; ps_has(dx) && c < C; c++) {
            double v = rstd * (g[c] - n[c] * mean_gn);
            if (ps_has(add)) v += ref_load(add, r * C + c);
            ref_store(dx, r * C + c, v);
        }
    }
    if (a->want_w) ref_put(&call->out[1], dw, false);
    return 0;
}
