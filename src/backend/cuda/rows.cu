/* SPDX-License-Identifier: BSD-3-Clause
 * Softmax over the last dimension and cross entropy, in fp32 (fp64 for fp64 operands). A block computes a row and reads
 * the row several times; most of these reads hit the cache. If rows are aligned and fit in a block's shared memory,
 * cross entropy reads each row only once. The losses are added in fp64 by one block, in the order of the rows. */
#include "backend/cuda/device.h"

/* Computes the maximum `top` and the sum of exponentials of a row. The row's softmax is exp(x - top) / sum, and its
 * log-sum-exp is top + log(sum). Unless `before` is NULL, *before is set to the largest of those of the first t
 * elements that this thread reads. */
template <class T, class A> DEV void sum_exp(const T *x, int64_t n, A *top_out, A *sum_out, int64_t t, A *before)
{
    A top = -INFINITY, sum = 0;
    if (before) *before = -INFINITY;
    each(x, n, [&](int64_t j, A v) {
        top = v > top ? v : top;
        if (before && j < t) *before = v > *before ? v : *before;
    });
    top = block_max(top);
    each(x, n, [&](int64_t, A v) { sum += exp(v - top); });
    *top_out = top;
    *sum_out = block_sum(sum);
}

/* Returns whether x_t is the largest element of its row, and the first of several equal ones. All threads of the block
 * must call the function with the same x_t, top and sum. `before` is the value that sum_exp() has set. */
template <class A> DEV bool is_hit(A x_t, A top, A sum, A before)
{
    if (x_t != top || sum != sum || top == -(A)INFINITY) return false;
    return block_max(before) < top;
}

/* -- softmax ------------------------------------------------------------------------------------------------------- */
template <class T>
KERNEL_UP_TO(1024, 1) softmax_kernel(T *y, const T *x, int64_t rows, int64_t n, bool logarithm)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A top, sum;
        sum_exp(x + r * n, n, &top, &sum, 0, (A *)NULL);
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
/* Returns whether the row with target t is ignored. It is ignored, too, if t is outside [0, V); count_kernel has
 * trapped for this target. */
DEV bool is_ignored(const ps_cu_ce &c, int64_t t) { return t == c.ignore || t < 0 || t >= c.V; }

/* Stores the loss and the log-sum-exp of the row with target [at]. If the row is ignored, x_t is 0. Only one thread per
 * row calls this function. */
template <class A> DEV void deliver(const ps_cu_ce &c, int64_t at, bool ignored, A x_t, A top, A sum, bool hit)
{
    if (hit) atomicAdd(c.hits, 1ull);
    A log_sum = log(sum);
    if (c.loss) ((A *)c.loss)[at] = ignored ? (A)0 : -(x_t - top - log_sum);
    if (c.lse) ((A *)c.lse)[at] = top + log_sum;
}

template <class A> DEV A grad_scale(const ps_cu_ce &c, int64_t at)
{
    A scale = (A)c.scale;
    if (c.dloss) scale *= (A)load_d(c.dloss, c.dloss_dtype, c.dloss_per_row ? at : 0);
    if (c.count) scale /= (A)*c.count;
    return scale;
}

template <class T, class G> KERNEL_UP_TO(1024, 1) ce_kernel(const __grid_constant__ ps_cu_ce c)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        int64_t at = c.first + r, t = load_i(c.target, c.target_dtype, at), V = c.V;
        const T *x = (const T *)c.logits + r * c.ld;
        G *g = c.grad ? (G *)c.grad + r * c.ld : NULL;
        A top, sum, before;
        bool ignored = is_ignored(c, t);
        A x_t = ignored ? (A)0 : up(x[t]);
        sum_exp(x, V, &top, &sum, t, &before);
        bool hit = c.hits && !ignored && is_hit(x_t, top, sum, before);
        if (threadIdx.x == 0) deliver(c, at, ignored, x_t, top, sum, hit);
        if (!g) continue;
        A scale = grad_scale<A>(c, at), inverse = 1 / sum;
        __syncthreads();                             /* all threads have read x[t], which g can overwrite */
        map_row(g, x, V, [&](int64_t j, A v) {
            A p = exp(v - top) * inverse;
            return ignored ? (A)0 : (p - (A)(j == t)) * scale;
        });
        for (int64_t j = V + threadIdx.x; j < c.wide; j += blockDim.x) g[j] = down<G>((A)0);
    }
}

/* Returns pack k of a row of n elements. Elements after the row's end are -infinity, which changes neither the maximum
 * nor the sum. */
template <class T> DEV uint4 pack_of_row(const T *x, int k, int n)
{
    const int W = pack<T>::n;
    union { uint4 raw; pack<T> v; } u;
    if ((k + 1) * W <= n) return *(const uint4 *)(x + (int64_t)k * W);
    typename type_info<T>::acc none = -INFINITY;
#pragma unroll
    for (int e = 0; e < W; e++) {
        u.v.v[e] = down<T>(none);
        if (k * W + e < n) u.v.v[e] = x[k * W + e];
    }
    return u.raw;
}

/* Like ce_kernel, for rows of whole packs. A block keeps the first `packs_kept` packs of its row in shared memory, and
 * reads the other packs again from the L2 cache. A thread reads the same packs both times, so no thread waits for
 * another. The largest value and the sum are updated once per AT_ONCE packs. `before` is the largest element that this
 * thread reads before the target. While the block computes the gradient of a row, it fetches its next row to the L2
 * cache. */
enum { KEPT_THREADS = 1024, AT_ONCE = 4, CACHE_LINE = 128 };
template <class T> DEV void fetch_row(const T *x, int64_t V)
{
    const char *from = (const char *)x;
    for (int64_t i = (int64_t)threadIdx.x * CACHE_LINE; i < V * (int64_t)sizeof(T); i += KEPT_THREADS * CACHE_LINE)
        prefetch_line(from + i);
}

template <class T, class G>
KERNEL_UP_TO(KEPT_THREADS, 1) ce_kept_kernel(const __grid_constant__ ps_cu_ce c, int packs_kept)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    struct alignas(W * sizeof(G) < 16 ? W * sizeof(G) : 16) line { G v[W]; };
    PS_DYNAMIC_SHARED(shared);
    uint4 *kept = (uint4 *)shared;
    int V = (int)c.V, packs = (V + W - 1) / W, wide = (int)(c.wide / W);
    for (int64_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        int64_t at = c.first + r, t = load_i(c.target, c.target_dtype, at);
        const T *x = (const T *)c.logits + r * c.ld;
        bool ignored = is_ignored(c, t);
        A x_t = ignored ? (A)0 : up(x[t]), top = -INFINITY, sum = 0, before = -INFINITY;
        int t_pack = ignored ? 0 : (int)(t / W), t_lane = ignored ? 0 : (int)(t % W);
        for (int i = threadIdx.x; i < packs; i += KEPT_THREADS * AT_ONCE) {
            uint4 v[AT_ONCE];
            A most = top;
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++) v[q] = pack_of_row(x, i + q * KEPT_THREADS, V);
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++) {
                if (i + q * KEPT_THREADS < packs_kept) kept[i + q * KEPT_THREADS] = v[q];
#pragma unroll
                for (int e = 0; e < W; e++) most = lane<T>(v[q], e) > most ? lane<T>(v[q], e) : most;
                if (i + q * KEPT_THREADS < t_pack) before = most;
                if (i + q * KEPT_THREADS != t_pack) continue;
#pragma unroll
                for (int e = 0; e < W; e++)
                    if (e < t_lane) before = lane<T>(v[q], e) > before ? lane<T>(v[q], e) : before;
            }
            A base = most == -(A)INFINITY ? (A)0 : most;            /* never -infinity, so that exp(x - base) is 0 if x
                                                                     * is -infinity, and NaN if x is NaN */
            sum *= quick_exp(top - base);
            top = most;
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++) {
#pragma unroll
                for (int e = 0; e < W; e++) sum += quick_exp(lane<T>(v[q], e) - base);
            }
        }
        if (r + gridDim.x < c.rows) fetch_row(x + gridDim.x * c.ld, c.V);
        A own = top;
        top = block_max(own);
        sum = block_sum(own == -(A)INFINITY && top > own ? sum : sum * quick_exp(own - top));
        bool hit = c.hits && !ignored && is_hit(x_t, top, sum, before);
        if (threadIdx.x == 0) deliver(c, at, ignored, x_t, top, sum, hit);
        if (!c.grad) continue;
        A scale = grad_scale<A>(c, at), factor = scale / sum;
        G *g = (G *)c.grad + r * c.ld;
        for (int i = threadIdx.x; i < wide; i += KEPT_THREADS) {
            line out;
            if (i < packs && !ignored) {
                uint4 v = i < packs_kept ? kept[i] : pack_of_row(x, i, V);
#pragma unroll
                for (int e = 0; e < W; e++) out.v[e] = down<G>(quick_exp(lane<T>(v, e) - top) * factor);
            } else {
#pragma unroll
                for (int e = 0; e < W; e++) out.v[e] = down<G>((A)0);
            }
            *(line *)(g + i * W) = out;
            if (i == (int)t / W && !ignored) g[t] = down<G>((quick_exp(x_t - top) / sum - 1) * scale);
        }
    }
}

/* Returns whether ce_kept_kernel supports the rows. Rows must be aligned, consist of whole packs, and have at least 256
 * logits. */
template <class T> static bool may_keep(const ps_cu_ce *c)
{
    const int W = pack<T>::n;
    return c->ld % W == 0 && c->wide % W == 0 && aligned16(c->logits) && (!c->grad || aligned16(c->grad)) &&
           c->wide >= c->V && c->V >= 256 && c->wide < INT32_MAX;
}

template <class T, class G> static int run_ce_as(const ps_cu_ce *c)
{
    if (!may_keep<T>(c)) {
        auto any = ce_kernel<T, G>;
        PS_LAUNCH(any, row_blocks(c->rows), threads_for(c->V), 0, ps_cu->compute, *c);
        return ps_cuda_launched();
    }
    static bool ready;                               /* the variable exists once for each instance of the template */
    auto kernel = ce_kept_kernel<T, G>;
    int64_t room = ps_cu->shared - 2048;             /* a block's sums also need shared memory */
    if (!ready && !ps_cu->dry) {
        CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room));
        ready = true;
    }
    int64_t packs = ps_cu_div_up(c->V, pack<T>::n), packs_kept = packs * 16 <= room ? packs : room / 16;
    int64_t nbytes = packs_kept * 16, two = 2 * (nbytes + 2048) <= ps_cu->shared ? 2 : 1;
    int64_t blocks = ps_cu->card.sm_count * two;     /* at most two blocks run on a multiprocessor at the same time
                                                      * (2048 threads) */
    PS_LAUNCH(kernel, (unsigned)(c->rows < blocks ? c->rows : blocks), KEPT_THREADS, (size_t)nbytes, ps_cu->compute,
              *c, (int)packs_kept);
    return ps_cuda_launched();
}
template <class T> static int run_ce(const ps_cu_ce *c) { return run_ce_as<T, T>(c); }

int ps_cuda_ce_rows(const ps_cu_ce *c)
{
    if (c->rows == 0) return 0;
    if (!c->grad || c->grad_dtype == c->dtype) return BY_FLOAT(c->dtype, run_ce, c);
    if (c->dtype != PS_F32) return ps_fail(PS_EUNSUP, "the gradient must have the type of the logits");
    return c->grad_dtype == PS_BF16 ? run_ce_as<float, bf16>(c) : run_ce_as<float, f16>(c);
}

template <class A>
KERNEL_UP_TO(1024, 1) total_kernel(const A *loss, int64_t n, const long long *count, void *out, int out_dtype)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += (double)loss[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) store_d(out, out_dtype, 0, count && *count > 0 ? sum / (double)*count : sum);    /* without
                                                                                                            * targets,
                                                                                                            * the sum is
                                                                                                            * 0 */
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

int ps_cuda_begin_hits(const ps_view *out, int want, const long long *count, unsigned long long **hits)
{
    *hits = NULL;
    if (!want || !ps_has(out)) return 0;
    *hits = (unsigned long long *)out->data;
    PS_TRY(ps_cuda_clear(out->data, sizeof **hits));
    return ps_cuda_move(*hits + 1, count, sizeof *count);
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
    c.logits = logits->data, c.dtype = logits->dtype, c.rows = rows, c.V = c.wide = c.ld = V;
    c.target = target->data, c.target_dtype = target->dtype, c.ignore = a->ignore_index;
    c.loss = each_loss;
    c.lse = ps_has(lse) ? lse->data : NULL;
    PS_TRY(ps_cuda_begin_hits(&call->out[2], a->want_hits, count, &c.hits));
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
    c.V = c.wide = c.ld = ps_cu_last(logits);
    c.target = target->data, c.target_dtype = target->dtype, c.ignore = a->ignore_index;
    c.grad = dx->data, c.grad_dtype = dx->dtype, c.scale = 1;
    c.count = a->reduction == REDUCTION_MEAN ? count : NULL;
    c.dloss = dloss->data, c.dloss_dtype = dloss->dtype, c.dloss_per_row = a->reduction == REDUCTION_NONE;
    return ps_cuda_ce_rows(&c);
}

/* -- a vocabulary that ranks share: this rank has the logits of `words` words, starting at word `first` ------------ */
struct some_words {
    const void *logits, *target, *mass;              /* [rows, V], [rows], [V] or NULL */
    int target_dtype, ranks, kinds;                  /* kinds: values per row of stats */
    int64_t rows, V, first, words, next;             /* next: row stride of `share` */
    void *stats;                                     /* [kinds, rows] to write, or [ranks, kinds, rows] of all ranks */
    const void *share;                               /* [3, rows] */
    double dloss;                                    /* factor of grad */
    void *loss, *grad;                               /* [rows]; [rows, V] or NULL */
    int32_t *hits;                                   /* [2, rows] or NULL */
};

template <class T> KERNEL_UP_TO(1024, 1) logit_stats_kernel(const __grid_constant__ some_words c)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        const T *x = (const T *)c.logits + r * c.V;
        const A *mass = (const A *)c.mass;
        int64_t t = load_i(c.target, c.target_dtype, r) - c.first;
        A top, sum, before, dot = 0, *stats = (A *)c.stats + r;
        bool here = t >= 0 && t < c.words;
        A x_t = here ? up(x[t]) : (A)0;
        sum_exp(x, c.words, &top, &sum, t, &before);
        bool hit = here && is_hit(x_t, top, sum, before);
        if (mass) {
            each(x, c.words, [&](int64_t j, A v) { dot += mass[j] * v; });
            dot = block_sum(dot);
        }
        if (threadIdx.x > 0) continue;
        stats[0] = top;
        stats[c.rows] = hit ? -sum : sum;
        stats[2 * c.rows] = x_t;
        if (mass) stats[3 * c.rows] = dot;
    }
}

template <class T> KERNEL_UP_TO(1024, 1) logit_loss_kernel(const __grid_constant__ some_words c)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
        const A *share = (const A *)c.share + r, *stats = (const A *)c.stats + r, *mass = (const A *)c.mass;
        A all = share[0], one = share[c.next], some = share[2 * c.next], top = -INFINITY, sum = 0, target = 0, dot = 0;
        bool counts = all != 0 || one != 0 || some != 0, first = true, hit = false;
        for (int i = 0; i < c.ranks; i++) {
            A v = stats[i * c.kinds * c.rows];
            top = v > top ? v : top;
        }
        for (int i = 0; i < c.ranks; i++) {
            const A *said = stats + i * c.kinds * c.rows;
            bool has = said[c.rows] < 0;                 /* whether the largest logit of rank i (the first of equal
                                                          * ones) is at the target */
            sum += (has ? -said[c.rows] : said[c.rows]) * exp(said[0] - top);
            if (said[0] == top && first) hit = has, first = false;
            target += said[2 * c.rows];
            if (c.kinds == 4) dot += said[3 * c.rows];
        }
        if (threadIdx.x == 0)
            ((A *)c.loss)[r] = counts ? all * (top + log(sum)) - one * target - some * dot : (A)0;
        if (threadIdx.x == 0 && c.hits) c.hits[r] = counts && hit && sum == sum, c.hits[c.rows + r] = counts;
        if (!c.grad) continue;
        int64_t t = load_i(c.target, c.target_dtype, r) - c.first;
        A factor = all * (A)c.dloss / sum;
        one *= (A)c.dloss, some *= (A)c.dloss;
        map_row((T *)c.grad + r * c.V, (const T *)c.logits + r * c.V, c.V, [&](int64_t j, A v) {
            if (!counts || j >= c.words) return (A)0;
            return exp(v - top) * factor - (j == t ? one : (A)0) - (mass ? some * mass[j] : (A)0);
        });
    }
}

template <class T> static int run_logit_stats(const some_words &c)
{
    auto kernel = logit_stats_kernel<T>;
    PS_LAUNCH(kernel, row_blocks(c.rows), threads_for(c.V), 0, ps_cu->compute, c);
    return ps_cuda_launched();
}

template <class T> static int run_logit_loss(const some_words &c)
{
    auto kernel = logit_loss_kernel<T>;
    PS_LAUNCH(kernel, row_blocks(c.rows), threads_for(c.V), 0, ps_cu->compute, c);
    return ps_cuda_launched();
}

static some_words words_of(const ps_view *x, const ps_view *target, const ps_view *mass)
{
    some_words c;
    memset(&c, 0, sizeof c);
    c.logits = x->data, c.target = target->data, c.mass = ps_has(mass) ? mass->data : NULL;
    c.target_dtype = target->dtype, c.kinds = ps_has(mass) ? 4 : 3;
    c.rows = x->shape[0], c.V = x->shape[1];
    return c;
}

static int logit_stats(ps_call *call)
{
    const ps_attrs_logit_stats *a = (const ps_attrs_logit_stats *)call->attrs;
    some_words c = words_of(&call->in[0], &call->in[1], &call->in[2]);
    c.first = a->first, c.words = a->words, c.stats = call->out[0].data;
    return c.rows == 0 ? 0 : BY_FLOAT(call->in[0].dtype, run_logit_stats, c);
}

static int logit_loss(ps_call *call)
{
    const ps_attrs_logit_loss *a = (const ps_attrs_logit_loss *)call->attrs;
    const ps_view *share = &call->in[3], *dx = &call->out[1];
    some_words c = words_of(&call->in[0], &call->in[1], &call->in[4]);
    c.first = a->first, c.words = a->words, c.ranks = (int)call->in[2].shape[0], c.stats = call->in[2].data;
    c.share = share->data, c.next = share->stride[0], c.loss = call->out[0].data;
    c.dloss = a->dloss, c.grad = ps_has(dx) ? dx->data : NULL;
    c.hits = a->want_hits && ps_has(&call->out[2]) ? (int32_t *)call->out[2].data : NULL;
    return c.rows == 0 ? 0 : BY_FLOAT(call->in[0].dtype, run_logit_loss, c);
}

void ps_cuda_fill_rows(ps_kernel *k)
{
    k[PS_OP_softmax] = softmax;
    k[PS_OP_log_softmax] = softmax;
    k[PS_OP_softmax_backward] = softmax_backward;
    k[PS_OP_log_softmax_backward] = softmax_backward;
    k[PS_OP_cross_entropy] = cross_entropy;
    k[PS_OP_cross_entropy_backward] = cross_entropy_backward;
    k[PS_OP_logit_stats] = logit_stats;
    k[PS_OP_logit_loss] = logit_loss;
}
