/* SPDX-License-Identifier: BSD-3-Clause
 * Random numbers and dropout: each element's number comes from Philox at its own counter, the same as on every other
 * device. */
#include "backend/cuda/device.h"

/* A number that rounds up to `high` becomes `low`, so that the range stays half-open in every type. */
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

/* low + floor(r * (high - low) / 2^64), r the first two words. */
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

/* x, y [samples, n]: a thread takes the four elements of one counter. */
template <class T>
static __global__ void dropout_kernel(T *y, const T *x, int64_t samples, int64_t n, ps_attrs_dropout a, double keep)
{
    typedef typename type_info<T>::acc A;
    int64_t fours = (n + 3) / 4;
    float p = (float)a.p;
    A scale = (A)keep;
    for (int64_t i = FIRST_ELEMENT; i < samples * fours; i += ALL_THREADS) {
        int64_t s = i / fours, e = i - s * fours, at = s * n + e * 4;
        ps_philox r = ps_philox4x32(a.seed, (a.sample + (uint64_t)s) << 32 | (uint64_t)e, a.step << 32 | a.op);
        int count = n - e * 4 < 4 ? (int)(n - e * 4) : 4;
        for (int k = 0; k < count; k++)
            y[at + k] = ps_unit_f32(r.v[k]) < p ? down<T>((A)0) : down<T>(up(x[at + k]) * scale);
    }
}

template <class T> static int run_dropout(const ps_view *x, const ps_view *y, const ps_attrs_dropout *a)
{
    int64_t samples = x->ndim > 0 ? x->shape[0] : 1, n = x->numel / samples;
    auto kernel = dropout_kernel<T>;
    PS_LAUNCH(kernel, blocks_for(samples * ps_cu_div_up(n, 4)), THREADS, 0, ps_cu->compute, (T *)y->data,
              (const T *)x->data, samples, n, *a, 1 / (1 - a->p));
    return 0;
}

static int dropout(ps_call *call)
{
    const ps_view *x = &call->in[0];
    if (x->numel == 0) return 0;
    return BY_FLOAT(x->dtype, run_dropout, x, &call->out[0], (const ps_attrs_dropout *)call->attrs);
}

void ps_cuda_fill_random(ps_kernel *k)
{
    k[PS_OP_uniform_] = uniform_;
    k[PS_OP_normal_] = normal_;
    k[PS_OP_randint_] = randint_;
    k[PS_OP_dropout] = dropout;
}
