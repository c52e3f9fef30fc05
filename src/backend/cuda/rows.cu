/* SPDX-License-Identifier: BSD-3-Clause
 * Softmax along the last dimension and cross entropy: a block for each row, which it passes over a few times (the row
 * stays in cache), in fp32, or fp64 for fp64. Losses are added up in fp64 in row order, in one block. */
#include "backend/cuda/device.h"

/* softmax of the row is exp(x - top) / sum, its log-sum-exp top + log(sum). */
template <class T, class A> DEV void sum_exp(const T *x, int64_t n, A *top_out, A *sum_out)
{
    A top = -INFINITY, sum = 0;
    each(x, n, [&](int64_t, A v) { top = v > top ? v : top; });
    top = block_max(top);
    each(x, n, [&](int64_t, A v) { sum += exp(v - top); });
    *top_out = top;
    *sum_out = block_sum(sum);
}

/* -- softmax ------------------------------------------------------------------------------------------------------- */
template <class T>
KERNEL_UP_TO(1024, 1) softmax_kernel(T *y, const T *x, int64_t rows, int64_t n, bool logarithm)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A top, sum;
        sum_exp(x + r * n, n, &top, &sum);
        A log_sum = log(sum), inverse = 1 / sum;
        map_row(y + r * n, x + r * n, n, [&](int64_t, A v) {
            return logarithm ? v - top - log_sum : exp(v - top) * inverse;
        });
    }
}

template <class T> static int run_softmax(const ps_view *x, const ps_view *y, bool logarithm)
{
    int64_t n = ps_cu_last(x), rows = x->numel / n;
    auto kernel = softmax_kernel<T>;
    PS_LAUNCH(kernel, row_blocks(rows), threads_for(n), 0, ps_cu->compute, (T *)y->data, (const T *)x->data, rows, n,
              logarithm);
    return 0;
}

static int softmax(ps_call *call)
{
    const ps_view *x = &call->in[0];
    if (x->numel == 0) return 0;
    return BY_FLOAT(x->dtype, run_softmax, x, &call->out[0], call->op == PS_OP_log_softmax);
}

template <class T>
KERNEL_UP_TO(1024, 1) softmax_backward_kernel(T *dx, const T *y, const T *dy, int64_t rows, int64_t n, bool logarithm)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *y_r = y + r * n, *dy_r = dy + r * n;
        A sum = 0;
        each(y_r, n, [&](int64_t j, A v) { sum += logarithm ? up(dy_r[j]) : v * up(dy_r[j]); });
        sum = block_sum(sum);
        map_row(dx + r * n, y_r, n, [&](int64_t j, A v) {
            A g = up(dy_r[j]);
            return logarithm ? g - exp(v) * sum : v * (g - sum);
        });
    }
}

template <class T> static int run_softmax_backward(ps_call *call)
{
    const ps_view *y = &call->in[0];
    int64_t n = ps_cu_last(y), rows = y->numel / n;
    auto kernel = softmax_backward_kernel<T>;
    PS_LAUNCH(kernel, row_blocks(rows), threads_for(n), 0, ps_cu->compute, (T *)call->out[0].data, (const T *)y->data,
              (const T *)call->in[1].data, rows, n, call->op == PS_OP_log_softmax_backward);
    return 0;
}

static int softmax_backward(ps_call *call)
{
    if (call->in[0].numel == 0) return 0;
    return BY_FLOAT(call->in[0].dtype, run_softmax_backward, call);
}

/* -- targets ------------------------------------------------------------------------------------------------------- */
KERNEL_UP_TO(1024, 1) count_kernel(trap_to t, int op, const void *target, int dtype, int64_t n, int64_t V,
                                    int64_t ignore, long long *out)
{
    long long count = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        int64_t k = load_i(target, dtype, i);
        if (k == ignore) continue;
        if (k < 0 || k >= V) trap(t, TRAP_TARGET, op, k, i, V, ignore);
        count++;
    }
    count = block_sum(count);
    if (threadIdx.x == 0) *out = count;
}

int ps_cuda_count_targets(int op, const ps_view *target, int64_t V, int64_t ignore, long long *count)
{
    PS_LAUNCH(count_kernel, 1, 1024, 0, ps_cu->compute, traps(), op, target->data, target->dtype, target->numel, V,
              ignore, count);
    return ps_cuda_launched();
}

/* -- cross entropy ------------------------------------------------------------------------------------------------- */
/* A target outside [0, V) has trapped in count_kernel; here it is read as one to ignore. */
template <class T, class G> KERNEL_UP_TO(1024, 1) ce_kernel(ps_cu_ce c)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        int64_t at = c.first + r, t = load_i(c.target, c.target_dtype, at), V = c.V;
        const T *x = (const T *)c.logits + r * c.ld;
        G *g = c.grad ? (G *)c.grad + r * c.ld : NULL;
        A top, sum;
        bool ignored = t == c.ignore || t < 0 || t >= V;
        sum_exp(x, V, &top, &sum);
        A x_t = ignored ? (A)0 : up(x[t]), log_sum = log(sum);
        if (threadIdx.x == 0) {
            if (c.loss) ((A *)c.loss)[at] = ignored ? (A)0 : -(x_t - top - log_sum);
            if (c.lse) ((A *)c.lse)[at] = top + log_sum;
        }
        if (!g) continue;
        A scale = (A)c.scale;
        if (c.dloss) scale *= (A)load_d(c.dloss, c.dloss_dtype, c.dloss_per_row ? at : 0);
        if (c.count) scale /= (A)*c.count;
        A inverse = 1 / sum;
        __syncthreads();                             /* g may be x: everyone has read x[t] */
        map_row(g, x, V, [&](int64_t j, A v) {
            A p = exp(v - top) * inverse;
            return ignored ? (A)0 : (p - (A)(j == t)) * scale;
        });
    }
}

template <class T> static int run_ce(const ps_cu_ce *c)
{
    auto kernel = ce_kernel<T, T>;
    PS_LAUNCH(kernel, row_blocks(c->rows), threads_for(c->V), 0, ps_cu->compute, *c);
    return ps_cuda_launched();
}

int ps_cuda_ce_rows(const ps_cu_ce *c)
{
    if (c->rows == 0) return 0;
    if (!c->grad || c->grad_dtype == c->dtype) return BY_FLOAT(c->dtype, run_ce, c);
    if (c->dtype != PS_F32) return ps_fail(PS_EUNSUP, "a gradient of another type than its logits");
    auto kernel = c->grad_dtype == PS_BF16 ? ce_kernel<float, bf16> : ce_kernel<float, f16>;
    PS_LAUNCH(kernel, row_blocks(c->rows), threads_for(c->V), 0, ps_cu->compute, *c);
    return ps_cuda_launched();
}

template <class A>
KERNEL_UP_TO(1024, 1) total_kernel(const A *loss, int64_t n, const long long *count, void *out, int out_dtype)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += (double)loss[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) store_d(out, out_dtype, 0, count ? sum / (double)*count : sum);    /* 0 / 0: NaN */
}

int ps_cuda_loss_total(const void *loss, int dtype, int64_t n, const long long *count, const ps_view *out)
{
    if (dtype == PS_F64)
        PS_LAUNCH(total_kernel<double>, 1, 1024, 0, ps_cu->compute, (const double *)loss, n, count, out->data,
                  out->dtype);
    else
        PS_LAUNCH(total_kernel<float>, 1, 1024, 0, ps_cu->compute, (const float *)loss, n, count, out->data,
                  out->dtype);
    return ps_cuda_launched();
}

enum { REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM };

static int cross_entropy(ps_call *call)
{
    const ps_attrs_cross_entropy *a = (const ps_attrs_cross_entropy *)call->attrs;
    const ps_view *logits = &call->in[0], *target = &call->in[1], *loss = &call->out[0], *lse = &call->out[1];
    int64_t V = ps_cu_last(logits), rows = target->numel;
    int acc = logits->dtype == PS_F64 ? PS_F64 : PS_F32;
    long long *count = (long long *)call->scratch(call, sizeof *count);
    void *each_loss = loss->data;
    if (!count) return PS_ENOMEM;
    if (a->reduction != REDUCTION_NONE) {
        each_loss = call->scratch(call, (size_t)((rows + 1) * ps_dtype_bytes(acc)));
        if (!each_loss) return PS_ENOMEM;
    }
    PS_TRY(ps_cuda_count_targets(call->op, target, V, a->ignore_index, count));
    ps_cu_ce c;
    memset(&c, 0, sizeof c);
    c.logits = logits->data, c.dtype = logits->dtype, c.rows = rows, c.V = c.ld = V;
    c.target = target->data, c.target_dtype = target->dtype, c.ignore = a->ignore_index;
    c.loss = each_loss;
    c.lse = ps_has(lse) ? lse->data : NULL;
    PS_TRY(ps_cuda_ce_rows(&c));
    if (a->reduction == REDUCTION_NONE) return 0;
    return ps_cuda_loss_total(each_loss, acc, rows, a->reduction == REDUCTION_MEAN ? count : NULL, loss);
}

static int cross_entropy_backward(ps_call *call)
{
    const ps_attrs_cross_entropy_backward *a = (const ps_attrs_cross_entropy_backward *)call->attrs;
    const ps_view *logits = &call->in[0], *target = &call->in[1], *dloss = &call->in[3], *dx = &call->out[0];
    long long *count = (long long *)call->scratch(call, sizeof *count);
    if (!count) return PS_ENOMEM;
    PS_TRY(ps_cuda_count_targets(call->op, target, ps_cu_last(logits), a->ignore_index, count));
    ps_cu_ce c;
    memset(&c, 0, sizeof c);
    c.logits = logits->data, c.dtype = logits->dtype, c.rows = target->numel;
    c.V = c.ld = ps_cu_last(logits);
    c.target = target->data, c.target_dtype = target->dtype, c.ignore = a->ignore_index;
    c.grad = dx->data, c.grad_dtype = dx->dtype, c.scale = 1;
    c.count = a->reduction == REDUCTION_MEAN ? count : NULL;
    c.dloss = dloss->data, c.dloss_dtype = dloss->dtype, c.dloss_per_row = a->reduction == REDUCTION_NONE;
    return ps_cuda_ce_rows(&c);
}

void ps_cuda_fill_rows(ps_kernel *k)
{
    k[PS_OP_softmax] = softmax;
    k[PS_OP_log_softmax] = softmax;
    k[PS_OP_softmax_backward] = softmax_backward;
    k[PS_OP_log_softmax_backward] = softmax_backward;
    k[PS_OP_cross_entropy] = cross_entropy;
    k[PS_OP_cross_entropy_backward] = cross_entropy_backward;
}
