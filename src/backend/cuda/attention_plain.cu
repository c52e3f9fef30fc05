/* SPDX-License-Identifier: BSD-3-Clause
 * The attention ops, and kernels for every float type and size. In forward and for dq, a block computes one query and
 * iterates over tiles of keys. For dk and dv, a block computes one key and iterates over tiles of queries. The softmax
 * is computed online (Milakov and Gimelshein 2018). No buffer has size T x S, and no atomics are used. bf16 and fp16
 * values are computed by attention_flash.cu if it supports the operands.
 *
 * In backward, let m be the dropout factor. Then:
 *   w = exp(scale * q.k - lse)
 *   delta = dy.y
 *   ds = scale * w * (m * dy.v - delta)
 *   dq = ds k, dk = ds^T q, dv = (w * m)^T dy */
#include "backend/cuda/attention.h"

enum { TILE = 128, PER_THREAD = 8, MOST_D = TILE * PER_THREAD };

DEV int64_t head_at(const heads &v, int64_t b, int64_t h, int64_t i) { return b * v.b + h * v.h + i * v.row; }

template <class T, class A> DEV A dot(const T *x, const T *y, int64_t n)
{
    A s = 0;
    for (int64_t d = 0; d < n; d++) s += up(x[d]) * up(y[d]);
    return s;
}

/* Returns the number that the mask of 4 dimensions adds to a score. A value of -1e30 or less hides the key. */
template <class A> DEV A bias_of(const attention &t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    if (!t.bias) return 0;
    int64_t at = b * t.bias_b + h * t.bias_h + i * t.bias_i + j;
    if (t.bias_type == PS_BOOL) return ((const uint8_t *)t.bias)[at] ? (A)0 : -(A)INFINITY;
    A x = access<A>::load(t.bias, t.bias_type, at);
    return x <= (A)-1e30 ? -(A)INFINITY : x;
}

/* -- forward ------------------------------------------------------------------------------------------------------- */
/* Computes the query blockIdx.x of head blockIdx.y and sample blockIdx.z. Thread x computes the columns x, x + TILE, x
 * + 2 * TILE, ... of D. */
template <class T> static __global__ void forward_kernel(const __grid_constant__ attention t)
{
    typedef typename type_info<T>::acc A;
    __shared__ A weight[TILE];
    int64_t i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, end = t.S;
    const T *q = (const T *)t.q.p + head_at(t.q, b, h, i);
    int64_t g = h / t.group;
    A top = -INFINITY, sum = 0, o[PER_THREAD], scale = (A)t.scale_d;
    draws drawn = no_draws();
    for (int k = 0; k < PER_THREAD; k++) o[k] = 0;
    if (t.causal) end = min(end, i + t.S - t.T + 1);
    if (t.begin) end = min(end, (int64_t)t.end[b * t.T + i]);
    for (int64_t first = t.begin ? t.begin[b * t.T + i] / TILE * TILE : 0; first < end; first += TILE) {
        int64_t j = first + threadIdx.x;
        bool seen = visible(t, b, i, j);
        A s = seen ? bias_of<A>(t, b, h, i, j) : -(A)INFINITY;
        seen = s != -(A)INFINITY;
        if (seen) s += scale * dot<T, A>(q, (const T *)t.k.p + head_at(t.k, b, g, j), t.D);
        A new_top = block_max(s);
        new_top = new_top > top ? new_top : top;
        if (new_top == -(A)INFINITY) continue;       /* no key up to here is visible, so all threads of the block
                                                      * skip */
        A w = seen ? exp(s - new_top) : (A)0, shrink = top == -(A)INFINITY ? (A)0 : exp(top - new_top);
        sum = sum * shrink + block_sum(w);
        top = new_top;
        if (t.p > 0 && seen) w = dropped(t, &drawn, b, h, i, j) ? (A)0 : w * (A)t.keep_d;
        weight[threadIdx.x] = w;
        __syncthreads();
        int n = (int)min((int64_t)TILE, t.S - first);
        for (int k = 0; k < PER_THREAD; k++) {
            int64_t d = threadIdx.x + k * TILE;
            if (d >= t.D) break;
            A part = 0;
            for (int c = 0; c < n; c++)              /* skips hidden keys, whose v can be NaN or infinite */
                if (weight[c] != 0) part += weight[c] * up(((const T *)t.v.p)[head_at(t.v, b, g, first + c) + d]);
            o[k] = o[k] * shrink + part;
        }
        __syncthreads();
    }
    T *y = (T *)t.y.p + head_at(t.y, b, h, i);
    for (int k = 0; k < PER_THREAD; k++) {
        int64_t d = threadIdx.x + k * TILE;
        if (d < t.D) y[d] = down<T>(sum == 0 ? (A)0 : o[k] / sum);
    }
    if (threadIdx.x == 0 && t.lse) ((A *)t.lse)[lse_at(t, b, h) + i] = top + log(sum);
}

/* -- backward ------------------------------------------------------------------------------------------------------ */
/* Computes delta. Each row is computed by `lanes` threads of a warp; `lanes` is a power of two. If rows are aligned,
 * the threads read 16 bytes at a time. */
template <class T> static __global__ void delta_kernel(const __grid_constant__ attention t, int lanes)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    int64_t i = (int64_t)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes, h = blockIdx.y, b = blockIdx.z;
    int lane = threadIdx.x % lanes;
    const T *dy = (const T *)t.dy.p + head_at(t.dy, b, h, i), *y = (const T *)t.y.p + head_at(t.y, b, h, i);
    A s = 0;
    if (i < t.T && t.dy.aligned && t.y.aligned) {
        for (int64_t d = lane * W; d < t.D; d += lanes * W) {
            pack<T> x = load_pack(dy + d), z = load_pack(y + d);
#pragma unroll
            for (int k = 0; k < W; k++) s += up(x.v[k]) * up(z.v[k]);
        }
    } else if (i < t.T) {
        for (int64_t d = lane; d < t.D; d += lanes) s += up(dy[d]) * up(y[d]);
    }
    for (int m = lanes / 2; m > 0; m >>= 1) s += __shfl_xor_sync(0xffffffffu, s, m);
    if (lane == 0 && i < t.T) ((A *)t.delta)[(b * t.H + h) * t.T + i] = s;
}

/* Sets sure_of[b] to the result of sure_before() for sample b. Each block finds the second key of one sample that the
 * mask does not hide. */
static __global__ void sure_kernel(const __grid_constant__ attention t, int32_t *sure_of)
{
    int64_t b = blockIdx.x, last = -1;
    for (int round = 0; round < 2 && last < t.S; round++) {
        int64_t j = last + 1 + threadIdx.x;
        while (j < t.S && t.mask[b * t.mask_b + j * t.mask_j] == 0) j += THREADS;
        last = (int64_t)-block_max(-(double)min(j, t.S));
    }
    if (threadIdx.x == 0) sure_of[b] = sure_before(t, last);
}

/* Finds the bounds of the segments. Each block processes one sample. A run is a sequence of equal ids [T]. Each thread
 * has a section of the positions and finds where the first and the last run in the section begin. If a run extends into
 * other sections, the thread uses the results of the threads that have these sections. */
static __global__ void segments_kernel(const int32_t *id, int64_t id_b, int64_t id_step, int32_t *begin, int32_t *end,
                                       int64_t T)
{
    __shared__ int last_of[THREADS], first_of[THREADS];
    int64_t b = blockIdx.x;
    int n = (int)((T + THREADS - 1) / THREADS), from = (int)min((int64_t)threadIdx.x * n, T);
    int to = (int)min((int64_t)from + n, T), last = -1, first = (int)T;
    const int32_t *own = id + b * id_b;
    for (int i = from; i < to; i++) {
        if (i > 0 && own[i * id_step] == own[(i - 1) * id_step]) continue;
        last = i;
        first = min(first, i);
    }
    last_of[threadIdx.x] = last, first_of[threadIdx.x] = first;
    __syncthreads();
    int before = 0, after = (int)T;
    for (int k = (int)threadIdx.x - 1; k >= 0 && before == 0; k--) before = max(last_of[k], 0);
    for (int k = (int)threadIdx.x + 1; k < THREADS && after == (int)T; k++) after = first_of[k];
    for (int i = from; i < to; i++) {
        if (i == 0 || own[i * id_step] != own[(i - 1) * id_step]) before = i;
        (own[i * id_step] ? begin : end)[b * T + i] = before;
    }
    for (int i = to - 1; i >= from; i--) {
        (own[i * id_step] ? end : begin)[b * T + i] = after;
        if (i == 0 || own[i * id_step] != own[(i - 1) * id_step]) after = i;
    }
}

/* Computes ds and the weight after dropout for query i and key j. */
template <class T, class A>
DEV void pair(const attention &t, int64_t b, int64_t h, int64_t i, int64_t j, A *w_out, A *ds_out)
{
    int64_t row = (b * t.H + h) * t.T + i;
    *w_out = *ds_out = 0;
    if (i >= t.T || !visible(t, b, i, j)) return;
    A bias = bias_of<A>(t, b, h, i, j);
    if (bias == -(A)INFINITY) return;
    draws drawn = no_draws();
    int64_t g = h / t.group;
    const T *q = (const T *)t.q.p + head_at(t.q, b, h, i), *k = (const T *)t.k.p + head_at(t.k, b, g, j);
    const T *dy = (const T *)t.dy.p + head_at(t.dy, b, h, i), *v = (const T *)t.v.p + head_at(t.v, b, g, j);
    A w = exp((A)t.scale_d * dot<T, A>(q, k, t.D) + bias - ((const A *)t.lse)[lse_at(t, b, h) + i]), m = 1;
    if (t.p > 0) m = dropped(t, &drawn, b, h, i, j) ? (A)0 : (A)t.keep_d;
    *w_out = w * m;
    if (i < sure_queries(t, b)) return;
    if (t.begin && is_single(t, (int)i, t.begin[b * t.T + i], t.end[b * t.T + i])) return;
    *ds_out = w * (m * dot<T, A>(dy, v, t.D) - ((const A *)t.delta)[row]) * (A)t.scale_d;
}

template <class T> static __global__ void dq_kernel(const __grid_constant__ attention t)
{
    typedef typename type_info<T>::acc A;
    __shared__ A ds[TILE];
    int64_t i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, end = t.S;
    A sum[PER_THREAD], w;
    for (int k = 0; k < PER_THREAD; k++) sum[k] = 0;
    if (t.causal) end = min(end, i + t.S - t.T + 1);
    if (t.begin) end = min(end, (int64_t)t.end[b * t.T + i]);
    for (int64_t first = t.begin ? t.begin[b * t.T + i] / TILE * TILE : 0; first < end; first += TILE) {
        A own;
        pair<T, A>(t, b, h, i, first + threadIdx.x, &w, &own);
        __syncthreads();
        ds[threadIdx.x] = own;
        __syncthreads();
        int n = (int)min((int64_t)TILE, t.S - first);
        for (int k = 0; k < PER_THREAD; k++) {
            int64_t d = threadIdx.x + k * TILE;
            if (d >= t.D) break;
            for (int c = 0; c < n; c++)
                if (ds[c] != 0) sum[k] += ds[c] * up(((const T *)t.k.p)[head_at(t.k, b, h / t.group, first + c) + d]);
        }
    }
    T *dq = (T *)t.dq.p + head_at(t.dq, b, h, i);
    for (int k = 0; k < PER_THREAD; k++) {
        int64_t d = threadIdx.x + k * TILE;
        if (d < t.D) dq[d] = down<T>(sum[k]);
    }
}

template <class T> static __global__ void dkv_kernel(const __grid_constant__ attention t)
{
    typedef typename type_info<T>::acc A;
    __shared__ A ds[TILE], w[TILE];
    int64_t j = blockIdx.x, h = blockIdx.y, b = blockIdx.z, begin = 0, end = t.T;
    A dk[PER_THREAD], dv[PER_THREAD];
    for (int k = 0; k < PER_THREAD; k++) dk[k] = dv[k] = 0;
    if (t.causal && j > t.S - t.T) begin = j - (t.S - t.T);          /* first query that sees key j */
    if (t.begin) begin = max(begin, (int64_t)t.begin[b * t.T + j]), end = t.end[b * t.T + j];
    for (int64_t first = begin; first < end; first += TILE) {
        A own_w, own_ds;
        pair<T, A>(t, b, h, first + threadIdx.x, j, &own_w, &own_ds);
        __syncthreads();
        w[threadIdx.x] = own_w;
        ds[threadIdx.x] = own_ds;
        __syncthreads();
        int n = (int)min((int64_t)TILE, t.T - first);
        for (int k = 0; k < PER_THREAD; k++) {
            int64_t d = threadIdx.x + k * TILE;
            if (d >= t.D) break;
            for (int c = 0; c < n; c++) {
                dv[k] += w[c] * up(((const T *)t.dy.p)[head_at(t.dy, b, h, first + c) + d]);
                dk[k] += ds[c] * up(((const T *)t.q.p)[head_at(t.q, b, h, first + c) + d]);
            }
        }
    }
    for (int k = 0; k < PER_THREAD; k++) {
        int64_t d = threadIdx.x + k * TILE;
        if (d >= t.D) break;
        if (t.dk.p) ((T *)t.dk.p)[head_at(t.dk, b, h, j) + d] = down<T>(dk[k]);
        if (t.dv.p) ((T *)t.dv.p)[head_at(t.dv, b, h, j) + d] = down<T>(dv[k]);
    }
}

/* Sums a contiguous src [B, H, S, D] over the query heads that share keys, in the order of the heads. The result is dst
 * [B, H / group, S, D]. */
template <class T> static __global__ void sum_heads_kernel(const __grid_constant__ attention t, heads dst, const T *src)
{
    int64_t G = t.H / t.group, n = t.B * G * t.S * t.D;
    for (int64_t e = FIRST_ELEMENT; e < n; e += ALL_THREADS) {
        int64_t d = e % t.D, j = e / t.D % t.S, g = e / t.D / t.S % G, b = e / t.D / t.S / G;
        const T *from = src + ((b * t.H + g * t.group) * t.S + j) * t.D + d;
        typename type_info<T>::acc sum = 0;
        for (int64_t h = 0; h < t.group; h++) sum += up(from[h * t.S * t.D]);
        ((T *)dst.p)[head_at(dst, b, g, j) + d] = down<T>(sum);
    }
}
template <class T> static int sum_heads(const attention *t, heads dst, const void *src)
{
    auto kernel = sum_heads_kernel<T>;
    if (!dst.p) return 0;
    PS_LAUNCH(kernel, blocks_for(t->B * (t->H / t->group) * t->S * t->D), THREADS, 0, ps_cu->compute, *t, dst,
              (const T *)src);
    return ps_cuda_launched();
}

template <class T> static int plain_forward(const attention *t)
{
    auto kernel = forward_kernel<T>;
    PS_LAUNCH(kernel, dim3((unsigned)t->T, (unsigned)t->H, (unsigned)t->B), TILE, 0, ps_cu->compute, *t);
    return ps_cuda_launched();
}

template <class T> static int run_delta(const attention *t)
{
    auto kernel = delta_kernel<T>;
    int lanes = 32;
    while (lanes > 1 && (lanes / 2) * pack<T>::n >= t->D) lanes /= 2;
    PS_LAUNCH(kernel, dim3((unsigned)ps_cu_div_up(t->T, THREADS / lanes), (unsigned)t->H, (unsigned)t->B), THREADS, 0,
              ps_cu->compute, *t, lanes);
    return ps_cuda_launched();
}

template <class T> static int plain_backward(const attention *t)
{
    auto dq = dq_kernel<T>;
    auto dkv = dkv_kernel<T>;
    if (t->dq.p) PS_LAUNCH(dq, dim3((unsigned)t->T, (unsigned)t->H, (unsigned)t->B), TILE, 0, ps_cu->compute, *t);
    if (t->dk.p || t->dv.p)
        PS_LAUNCH(dkv, dim3((unsigned)t->S, (unsigned)t->H, (unsigned)t->B), TILE, 0, ps_cu->compute, *t);
    return ps_cuda_launched();
}

/* -- the ops ------------------------------------------------------------------------------------------------------- */
static heads heads_of(const ps_view *v)
{
    heads x = { NULL, 0, 0, 0, false };
    if (!ps_has(v)) return x;
    x.p = v->data;
    x.b = v->stride[0], x.h = v->stride[1], x.row = v->stride[2];
    x.aligned = aligned16(v->data) && ((x.b | x.h | x.row) & 7) == 0 && v->shape[3] % 8 == 0;
    return x;
}

/* A contiguous x [B, T, parts * C] contains `parts` tensors. Returns tensor number `part` as [B, n_heads, T, C /
 * n_heads]. */
static heads packed_part(const ps_view *x, int parts, int part, int64_t n_heads)
{
    int64_t T = x->shape[1], width = x->shape[2], C = width / parts, D = C / n_heads;
    heads v = { NULL, T * width, D, width, false };
    v.p = (char *)x->data + part * C * ps_dtype_bytes(x->dtype);
    v.aligned = aligned16(v.p) && ((v.b | v.h | v.row) & 7) == 0 && D % 8 == 0;
    return v;
}

template <class At> static void set_attributes(attention *t, const At *a)
{
    t->scale_d = a->scale;
    t->causal = a->causal != 0;
    t->p = (float)a->p;
    t->keep_d = a->p > 0 ? 1 / (1 - a->p) : 1;
    t->keep = (float)t->keep_d;
    t->seed = a->seed, t->step = a->step, t->sample = a->sample, t->op = a->op, t->first_head = a->first_head;
}

/* Sets the fields of t for the mask or for the segments. The sizes in t must already be set. */
static int set_mask(ps_call *call, attention *t, const ps_view *mask)
{
    if (!ps_has(mask)) return 0;
    if (mask->ndim == 2 && mask->dtype == PS_I32) {
        if (t->T >= INT32_MAX / 2)
            return ps_fail(PS_EUNSUP, "cannot use segments of %lld positions on cuda: there must be fewer than 2^30 - "
                           "1", (long long)t->T);
        int32_t *bounds = (int32_t *)call->scratch(call, (size_t)ps_cu_segments_nbytes(t->B, t->T));
        if (!bounds) return PS_ENOMEM;
        t->begin = bounds, t->end = bounds + t->B * t->T;
        if (t->B * t->T == 0) return 0;
        PS_LAUNCH(segments_kernel, dim3((unsigned)t->B), THREADS, 0, ps_cu->compute, (const int32_t *)mask->data,
                  mask->stride[0], mask->stride[1], bounds, bounds + t->B * t->T, t->T);
        return ps_cuda_launched();
    }
    if (mask->ndim == 4) {
        t->bias = mask->data, t->bias_type = mask->dtype;
        t->bias_b = mask->shape[0] == 1 ? 0 : mask->stride[0];
        t->bias_h = mask->shape[1] == 1 ? 0 : mask->stride[1];
        t->bias_i = mask->shape[2] == 1 ? 0 : mask->stride[2];
        return 0;
    }
    t->mask = (const uint8_t *)mask->data;
    t->mask_b = mask->stride[0], t->mask_j = mask->stride[1];
    return 0;
}

static void set_group(attention *t, int64_t key_heads)
{
    t->group = key_heads > 0 && t->H > 0 ? (int32_t)(t->H / key_heads) : 1;
}

static void set_lse(attention *t, const ps_view *lse)
{
    if (!ps_has(lse)) return;
    t->lse = lse->data;
    t->lse_b = lse->stride[0], t->lse_h = lse->stride[1];
}

static int check_sizes(attention *t)
{
    t->scale = (float)t->scale_d;
    if (t->window >= t->S) t->window = 0;            /* a window of S keys or more hides no key */
    if (t->D > MOST_D || t->H > 65535 || t->B > 65535)
        return ps_fail(PS_EUNSUP, "cannot compute attention of %lld heads of size %lld, %lld samples on cuda: at most "
                       "65535 heads, size %d and 65535 samples are supported", (long long)t->H, (long long)t->D,
                       (long long)t->B, MOST_D);
    return 0;
}

static int run_forward(attention *t, int dtype)
{
    PS_TRY(check_sizes(t));
    if (t->B * t->H * t->T == 0) return 0;
    int rc = ps_cuda_flash_forward(t, dtype);
    return rc == PS_EUNSUP ? BY_FLOAT(dtype, plain_forward, t) : rc;
}

static int run_backward(ps_call *call, attention *t, int dtype);

/* Computes dk and dv of each query head in workspace, and then sums dk and dv over the heads that share keys.
 * FlashAttention-2 does the same. */
static int run_grouped_backward(ps_call *call, attention *t, int dtype)
{
    attention each = *t;
    heads *to[2] = { &each.dk, &each.dv };
    bool wanted[2] = { t->dk.p != NULL, t->dv.p != NULL };
    for (int i = 0; i < 2; i++) {
        if (!wanted[i]) continue;
        heads x = { NULL, t->H * t->S * t->D, t->S * t->D, t->D, t->D % 8 == 0 };
        x.p = call->scratch(call, (size_t)ps_cu_each_head_nbytes(t->B * t->H * t->S * t->D, dtype));
        if (!x.p) return PS_ENOMEM;
        *to[i] = x;
    }
    each.ungrouped = true;
    PS_TRY(run_backward(call, &each, dtype));
    if (t->S == 0) return 0;
    PS_TRY(BY_FLOAT(dtype, sum_heads, t, t->dk, (const void *)each.dk.p));
    return BY_FLOAT(dtype, sum_heads, t, t->dv, (const void *)each.dv.p);
}

static int run_backward(ps_call *call, attention *t, int dtype)
{
    PS_TRY(check_sizes(t));
    if (t->B * t->H == 0) return 0;
    if (t->group > 1 && !t->ungrouped) return run_grouped_backward(call, t, dtype);
    t->delta = call->scratch(call, (size_t)ps_cu_delta_nbytes(t->B * t->H * t->T, dtype));
    if (!t->delta) return PS_ENOMEM;
    t->sure = t->window == 1 ? (int32_t)t->T : sure_before(*t, t->S > 1 ? 1 : t->S);
    if (t->mask) {
        int32_t *sure_of = (int32_t *)call->scratch(call, (size_t)t->B * sizeof *sure_of);
        if (!sure_of) return PS_ENOMEM;
        PS_LAUNCH(sure_kernel, dim3((unsigned)t->B), THREADS, 0, ps_cu->compute, *t, sure_of);
        PS_TRY(ps_cuda_launched());
        t->sure_of = sure_of;
    }
    if (t->T > 0) PS_TRY(BY_FLOAT(dtype, run_delta, t));
    int rc = t->T > 0 && t->S > 0 ? ps_cuda_flash_backward(t, dtype) : PS_EUNSUP;
    if (rc != PS_EUNSUP) return rc;
    if (t->T == 0) t->dq.p = NULL;
    if (t->S == 0) t->dk.p = t->dv.p = NULL;
    return BY_FLOAT(dtype, plain_backward, t);
}

static int attention_op(ps_call *call)
{
    const ps_view *q = &call->in[0], *k = &call->in[1], *lse = &call->out[1];
    attention t;
    if (k->dtype != q->dtype) return PS_EUNSUP;
    memset(&t, 0, sizeof t);
    t.q = heads_of(q), t.k = heads_of(k), t.v = heads_of(&call->in[2]), t.y = heads_of(&call->out[0]);
    set_attributes(&t, (const ps_attrs_attention *)call->attrs);
    t.window = ((const ps_attrs_attention *)call->attrs)->window;
    t.B = q->shape[0], t.H = q->shape[1], t.T = q->shape[2], t.D = q->shape[3], t.S = k->shape[2];
    PS_TRY(set_mask(call, &t, &call->in[3]));
    set_group(&t, k->shape[1]);
    set_lse(&t, lse);
    return run_forward(&t, q->dtype);
}

static int attention_backward_op(ps_call *call)
{
    const ps_view *q = &call->in[1], *k = &call->in[2];
    attention t;
    memset(&t, 0, sizeof t);
    t.dy = heads_of(&call->in[0]), t.q = heads_of(q), t.k = heads_of(k), t.v = heads_of(&call->in[3]);
    t.y = heads_of(&call->in[5]);
    t.dq = heads_of(&call->out[0]), t.dk = heads_of(&call->out[1]), t.dv = heads_of(&call->out[2]);
    set_attributes(&t, (const ps_attrs_attention_backward *)call->attrs);
    t.window = ((const ps_attrs_attention_backward *)call->attrs)->window;
    t.B = q->shape[0], t.H = q->shape[1], t.T = q->shape[2], t.D = q->shape[3], t.S = k->shape[2];
    PS_TRY(set_mask(call, &t, &call->in[4]));
    set_group(&t, k->shape[1]);
    set_lse(&t, &call->in[6]);
    return run_backward(call, &t, q->dtype);
}

static void set_packed(attention *t, const ps_view *qkv, int64_t n_heads)
{
    t->q = packed_part(qkv, 3, 0, n_heads), t->k = packed_part(qkv, 3, 1, n_heads);
    t->v = packed_part(qkv, 3, 2, n_heads);
    t->group = 1;
    t->B = qkv->shape[0], t->H = n_heads, t->T = t->S = qkv->shape[1], t->D = qkv->shape[2] / 3 / n_heads;
    if (t->scale_d == 0) t->scale_d = 1 / sqrt((double)t->D);
}

static int attention_packed_op(ps_call *call)
{
    const ps_attrs_attention_packed *a = (const ps_attrs_attention_packed *)call->attrs;
    const ps_view *qkv = &call->in[0], *lse = &call->out[1];
    attention t;
    memset(&t, 0, sizeof t);
    set_attributes(&t, a);
    set_packed(&t, qkv, a->heads);
    PS_TRY(set_mask(call, &t, &call->in[1]));
    t.y = packed_part(&call->out[0], 1, 0, a->heads);
    set_lse(&t, lse);
    return run_forward(&t, qkv->dtype);
}

static int attention_packed_backward_op(ps_call *call)
{
    const ps_attrs_attention_packed_backward *a = (const ps_attrs_attention_packed_backward *)call->attrs;
    const ps_view *qkv = &call->in[1], *dqkv = &call->out[0];
    attention t;
    memset(&t, 0, sizeof t);
    set_attributes(&t, a);
    set_packed(&t, qkv, a->heads);
    PS_TRY(set_mask(call, &t, &call->in[2]));
    t.dy = packed_part(&call->in[0], 1, 0, a->heads), t.y = packed_part(&call->in[3], 1, 0, a->heads);
    t.dq = packed_part(dqkv, 3, 0, a->heads), t.dk = packed_part(dqkv, 3, 1, a->heads);
    t.dv = packed_part(dqkv, 3, 2, a->heads);
    set_lse(&t, &call->in[4]);
    return run_backward(call, &t, qkv->dtype);
}

void ps_cuda_fill_attention(ps_kernel *k)
{
    k[PS_OP_attention] = attention_op;
    k[PS_OP_attention_backward] = attention_backward_op;
    k[PS_OP_attention_packed] = attention_packed_op;
    k[PS_OP_attention_packed_backward] = attention_packed_backward_op;
}
