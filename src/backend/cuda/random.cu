/* SPDX-License-Identifier: BSD-3-Clause
 * Random numbers, dropout and sampling. Each element has a counter. Philox computes the element's random number from
 * the counter. All devices compute the same numbers. */
#include "backend/cuda/device.h"

/* Draws numbers from [low, high). If a number is rounded up to `high` in the tensor's type, it is replaced by `low`. */
static __global__ void uniform_kernel(void *p, int dtype, int64_t n, ps_attrs_uniform_ a)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        double u = ps_unit_f32(ps_philox4x32(a.seed, a.offset + (uint64_t)i, 0).v[0]);
        store_d(p, dtype, i, __dadd_rn(a.low, __dmul_rn(__dadd_rn(a.high, -a.low), u)));
        if (load_d(p, dtype, i) >= a.high) store_d(p, dtype, i, a.low);
    }
}

static __global__ void normal_kernel(void *p, int dtype, int64_t n, ps_attrs_normal_ a)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        ps_philox draw = ps_philox4x32(a.seed, a.offset + (uint64_t)i, 0);
        float u1 = 1 - ps_unit_f32(draw.v[0]);                      /* (0, 1] */
        float r = sqrtf(-2 * logf(u1)), z = r * cosf(6.28318530717958647692f * ps_unit_f32(draw.v[1]));
        store_d(p, dtype, i, (double)__fadd_rn((float)a.mean, __fmul_rn((float)a.std, z)));
    }
}

/* Computes low + floor(r * (high - low) / 2^64), where r is the first two words that Philox computes for the element's
 * counter. */
static __global__ void randint_kernel(void *p, int dtype, int64_t n, ps_attrs_randint_ a)
{
    uint64_t range = (uint64_t)a.high - (uint64_t)a.low;
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        ps_philox draw = ps_philox4x32(a.seed, a.offset + (uint64_t)i, 0);
        uint64_t r = (uint64_t)draw.v[1] << 32 | draw.v[0];
        store_i(p, dtype, i, (int64_t)((uint64_t)a.low + __umul64hi(r, range)));
    }
}

static int uniform_(ps_call *call)
{
    const ps_view *x = &call->in[0];
    if (x->numel == 0) return 0;
    PS_LAUNCH(uniform_kernel, blocks_for(x->numel), THREADS, 0, ps_cu->compute, x->data, x->dtype, x->numel,
              *(const ps_attrs_uniform_ *)call->attrs);
    return 0;
}

static int normal_(ps_call *call)
{
    const ps_view *x = &call->in[0];
    if (x->numel == 0) return 0;
    PS_LAUNCH(normal_kernel, blocks_for(x->numel), THREADS, 0, ps_cu->compute, x->data, x->dtype, x->numel,
              *(const ps_attrs_normal_ *)call->attrs);
    return 0;
}

static int randint_(ps_call *call)
{
    const ps_attrs_randint_ *a = (const ps_attrs_randint_ *)call->attrs;
    const ps_view *x = &call->in[0];
    if (a->high <= a->low)
        return ps_fail(PS_EINVAL, "the range [%lld, %lld) is empty", (long long)a->low, (long long)a->high);
    if (x->numel == 0) return 0;
    PS_LAUNCH(randint_kernel, blocks_for(x->numel), THREADS, 0, ps_cu->compute, x->data, x->dtype, x->numel, *a);
    return 0;
}

/* Four elements of a sample share a counter. Returns the index of the counter of element g. A sample has n elements.
 * Counters and elements are counted over all samples. */
static __host__ __device__ inline int64_t four_of(int64_t g, int64_t n) { return g / n * ((n + 3) / 4) + g % n / 4; }

/* Applies dropout to the elements from `first` to `last`. A sample has n elements. A thread processes the four elements
 * of one counter. If `whole` is set, the thread loads and stores four elements at once. */
template <class T>
static __global__ void dropout_kernel(T *y, const T *x, int64_t first, int64_t last, int64_t n, ps_attrs_dropout a,
                                      double keep, bool whole)
{
    typedef typename type_info<T>::acc A;
    int64_t fours = (n + 3) / 4, begin = four_of(first, n), end = four_of(last - 1, n) + 1;
    float p = (float)a.p;
    A scale = (A)keep;
    for (int64_t i = begin + FIRST_ELEMENT; i < end; i += ALL_THREADS) {
        int64_t s = i / fours, e = i - s * fours, g = s * n + e * 4, at = g - first;
        ps_philox r = ps_philox4x32(a.seed, (a.sample + (uint64_t)s) << 32 | (uint64_t)e, a.step << 32 | a.op);
        struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) line { T v[4]; };
        if (whole) {
            line v = *(const line *)(x + at);
#pragma unroll
            for (int k = 0; k < 4; k++) v.v[k] = ps_unit_f32(r.v[k]) < p ? down<T>((A)0) : down<T>(up(v.v[k]) * scale);
            *(line *)(y + at) = v;
            continue;
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (e * 4 + k < n && g + k >= first && g + k < last)
                y[at + k] = ps_unit_f32(r.v[k]) < p ? down<T>((A)0) : down<T>(up(x[at + k]) * scale);
    }
}

/* Applies dropout to x, which contains some rows of a larger tensor. `rows` contains the index of each row in the
 * larger tensor. A row is `width` elements of one sample, and a sample has n elements. A thread processes the elements
 * of a row that share one counter. */
template <class T>
static __global__ void dropout_rows_kernel(trap_to t, T *y, const T *x, const void *rows, int dtype, int64_t count,
                                           int64_t width, int64_t n, ps_attrs_dropout a, double keep)
{
    typedef typename type_info<T>::acc A;
    int64_t fours = (width + 2) / 4 + 1;                            /* maximum number of counters per row */
    float p = (float)a.p;
    A scale = (A)keep;
    for (int64_t i = FIRST_ELEMENT; i < count * fours; i += ALL_THREADS) {
        int64_t r = i / fours, row = load_i(rows, dtype, r), limit = INT64_MAX / width;
        if (row < 0 || row >= limit) {
            if (i % fours == 0) trap(t, TRAP_INDEX, PS_OP_dropout, row, r, limit, 0);
            continue;
        }
        int64_t g = row * width, s = g / n, begin = g % n, e = begin / 4 + i % fours;
        ps_philox draw = ps_philox4x32(a.seed, (a.sample + (uint64_t)s) << 32 | (uint64_t)e, a.step << 32 | a.op);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int64_t c = e * 4 + k - begin, at = r * width + c;
            if (c >= 0 && c < width)
                y[at] = ps_unit_f32(draw.v[k]) < p ? down<T>((A)0) : down<T>(up(x[at]) * scale);
        }
    }
}

template <class T>
static int run_dropout_rows(const ps_view *x, const ps_view *rows, const ps_view *y, const ps_attrs_dropout *a)
{
    int64_t width = x->numel / rows->numel;
    auto kernel = dropout_rows_kernel<T>;
    PS_LAUNCH(kernel, blocks_for(rows->numel * ((width + 2) / 4 + 1)), THREADS, 0, ps_cu->compute, traps(),
              (T *)y->data, (const T *)x->data, rows->data, rows->dtype, rows->numel, width, a->per_sample, *a,
              1 / (1 - a->p));
    return 0;
}

template <class T> static int run_dropout(const ps_view *x, const ps_view *y, const ps_attrs_dropout *a)
{
    int64_t n = a->per_sample, last = a->first + x->numel;
    bool whole = n % 4 == 0 && a->first % 4 == 0 && x->numel % 4 == 0 && aligned16(x->data) && aligned16(y->data);
    auto kernel = dropout_kernel<T>;
    PS_LAUNCH(kernel, blocks_for(four_of(last - 1, n) - four_of(a->first, n) + 1), THREADS, 0, ps_cu->compute,
              (T *)y->data, (const T *)x->data, a->first, last, n, *a, 1 / (1 - a->p), whole);
    return 0;
}

static int dropout(ps_call *call)
{
    const ps_view *x = &call->in[0], *rows = &call->in[1];
    const ps_attrs_dropout *a = (const ps_attrs_dropout *)call->attrs;
    if (x->numel == 0) return 0;
    if (ps_has(rows)) return BY_FLOAT(x->dtype, run_dropout_rows, x, rows, &call->out[0], a);
    return BY_FLOAT(x->dtype, run_dropout, x, &call->out[0], a);
}

/* -- sampling a token ---------------------------------------------------------------------------------------------- */
/* Maps each candidate to a key. All keys differ. The descending order of the keys is the order of the candidates: by
 * descending logit, and among equal logits by ascending token. The high bits of a key are the logit, changed so that it
 * can be compared as an integer. The low bits are computed from the token. */
template <class A> struct logit_order;
template <> struct logit_order<float> {
    typedef uint64_t key;
    enum { bits = 32 };
    DEV uint32_t of(float x)
    {
        uint32_t u = __float_as_uint(x + 0.0f);                     /* -0 becomes 0 */
        return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
    }
};
template <> struct logit_order<double> {
    typedef unsigned __int128 key;
    enum { bits = 64 };
    DEV uint64_t of(double x)
    {
        union { double d; uint64_t u; } v;
        v.d = x + 0.0;
        return v.u ^ (v.u >> 63 ? ~(uint64_t)0 : (uint64_t)1 << 63);
    }
};

template <class T> struct logits_row {
    typedef typename type_info<T>::acc A;
    typedef typename logit_order<A>::key K;
    const T *x;
    int64_t n;
    int token_bits;                                                 /* a multiple of 4 */
    double top, temperature, least_weight;
    __device__ K key(int64_t j) const
    {
        return (K)logit_order<A>::of(up(x[j])) << token_bits | (K)(((uint64_t)1 << token_bits) - 1 - (uint64_t)j);
    }
    __device__ int64_t token(K key) const
    {
        uint64_t mask = ((uint64_t)1 << token_bits) - 1;
        return (int64_t)(mask - ((uint64_t)key & mask));
    }
    __device__ double weight(int64_t j) const
    {
        double w = exp(((double)up(x[j]) - top) / temperature);
        return w < least_weight ? 0 : w;
    }
};

/* Returns the sum of the weights of the candidates whose keys are at least `least`. A weight below least_weight counts
 * as 0. */
template <class T> DEV double weight_of(const logits_row<T> &r, typename logits_row<T>::K least)
{
    double sum = 0;
    for (int64_t j = threadIdx.x; j < r.n; j += blockDim.x)
        if (r.key(j) >= least) sum += r.weight(j);
    return block_sum(sum);
}

/* Finds the shortest prefix of the candidates whose total weight reaches `target`, or exceeds it if `past` is set. With
 * COUNT, each candidate has the weight 1. Returns the smallest key of the prefix. If rounding makes the total weight of
 * all candidates smaller than `target`, returns the smallest key of all candidates. Each pass finds four bits of the
 * key, from the sums of weights for the sixteen values of these bits. */
template <bool COUNT, class T>
DEV typename logits_row<T>::K choose_key(const logits_row<T> &r, typename logits_row<T>::K least, double target,
                                         bool past)
{
    typedef typename logits_row<T>::K K;
    __shared__ int seen[16];
    K found = 0;
    double before = 0;                                              /* total weight of the keys above the range that
                                                                     * contains the result */
    for (int shift = logit_order<typename logits_row<T>::A>::bits + r.token_bits - 4; shift >= 0; shift -= 4) {
        double sums[16];
        for (int b = 0; b < 16; b++) sums[b] = 0;
        __syncthreads();
        if (threadIdx.x < 16) seen[threadIdx.x] = 0;
        __syncthreads();
        for (int64_t j = threadIdx.x; j < r.n; j += blockDim.x) {
            K key = r.key(j);
            if (key < least || key >> shift >> 4 != found) continue;
            int digit = (int)(key >> shift) & 15;
            double w = COUNT ? 1 : r.weight(j);
            if (w == 0 && r.least_weight > 0) continue;
#pragma unroll
            for (int b = 0; b < 16; b++) sums[b] += b == digit ? w : 0;
            seen[digit] = 1;
        }
        int chosen = 0;
        double sum = before;
        bool there = false;
#pragma unroll
        for (int b = 15; b >= 0; b--) {
            double more = block_sum(sums[b]);
            if (there || !seen[b]) continue;
            chosen = b;
            before = sum;
            sum += more;
            there = past ? sum > target : sum >= target;
        }
        found = found << 4 | (K)chosen;
    }
    return found;
}

template <class T>
KERNEL_UP_TO(1024, 1) sample_kernel(trap_to t, int64_t *index, const T *logits, int64_t rows, int64_t n, int token_bits,
                                    ps_attrs_sample a)
{
    typedef typename logits_row<T>::K K;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        logits_row<T> r = { logits + row * n, n, token_bits, -INFINITY, a.temperature, 0 };
        double top = -INFINITY;
        for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
            double v = (double)up(r.x[j]);
            if (v != v) trap(t, TRAP_NAN, PS_OP_sample, j, row, 0, 0);
            top = v > top ? v : top;
        }
        r.top = block_max(top);
        K least = 0;
        if (r.top - r.top != 0) {                                   /* the largest logit is infinite */
            if (threadIdx.x == 0) trap(t, TRAP_INFINITE, PS_OP_sample, r.top > 0 ? 1 : -1, row, 0, 0);
            if (threadIdx.x == 0) index[row] = 0;
            continue;
        }
        if (a.temperature == 0) {
            least = choose_key<true>(r, 0, 1, false);
        } else {
            double u = ps_unit_f32(ps_philox4x32(a.seed, a.offset + (uint64_t)row, 0).v[0]);
            if (a.top_k > 0 && a.top_k < n) least = choose_key<true>(r, 0, a.top_k, false);
            if (a.top_p < 1) least = choose_key<false>(r, least, a.top_p * weight_of(r, least), false);
            r.least_weight = a.min_p;
            least = choose_key<false>(r, least, u * weight_of(r, least), true);
        }
        if (threadIdx.x == 0) index[row] = r.token(least);
    }
}

template <class T> static int run_sample(ps_call *call, int token_bits)
{
    const ps_view *x = &call->in[0], *index = &call->out[0];
    int64_t n = ps_cu_last(x);
    auto kernel = sample_kernel<T>;
    PS_LAUNCH(kernel, row_blocks(index->numel), threads_for(n), 0, ps_cu->compute, traps(), (int64_t *)index->data,
              (const T *)x->data, index->numel, n, token_bits, *(const ps_attrs_sample *)call->attrs);
    return 0;
}

static int sample(ps_call *call)
{
    const ps_view *x = &call->in[0];
    int64_t n = ps_cu_last(x);
    int token_bits = 4;
    if (n > INT32_MAX) return ps_fail(PS_EUNSUP, "cannot sample from rows of %lld logits on cuda: at most 2^31 - 1 are "
                                      "supported", (long long)n);
    if (call->out[0].numel == 0) return 0;
    while (n > (int64_t)1 << token_bits) token_bits += 4;
    return BY_FLOAT(x->dtype, run_sample, call, token_bits);
}

void ps_cuda_fill_random(ps_kernel *k)
{
    k[PS_OP_uniform_] = uniform_;
    k[PS_OP_normal_] = normal_;
    k[PS_OP_randint_] = randint_;
    k[PS_OP_dropout] = dropout;
    k[PS_OP_sample] = sample;
}
