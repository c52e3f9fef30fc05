/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizers that are not in optim.cu, and masters that are stored as remainders. In these optimizers, the update of an
 * element depends only on the element itself, or on the block of 8-bit codes that contains it. The formulas and their
 * sources are in ref/update.c. As in optim.cu, the kernels perform the same operations in the same order as the cpu
 * backend, so results are bit-identical to its results. */
#include "backend/cuda/optim.h"
#include "base/update.h"

/* -- Lion ---------------------------------------------------------------------------------------------------------- */
struct lion_rule {
    double scale, keep, b1, b2, c1, c2, lr;
    template <class A> DEV void step(const lion_rule &h, const item &it, int64_t i)
    {
        typedef exact<A> e;
        A *m = (A *)it.state[0] + i, lr = (A)h.lr, old = *m;
        A p = e::mul(master_get<A>(it, i), (A)h.keep);
        A g = e::mul(access<A>::load(it.grad, it.grad_type, i), (A)h.scale);
        A u = e::fma_((A)h.b1, old, e::mul((A)h.c1, g));
        p = u > 0 ? e::add(p, -lr) : u < 0 ? e::add(p, lr) : u != u ? u : p;
        *m = e::fma_((A)h.b2, old, e::mul((A)h.c2, g));
        master_put(it, i, p);
    }
};

/* -- RMSprop ------------------------------------------------------------------------------------------------------- */
struct rmsprop_rule {
    double scale, wd, alpha, rest, eps, momentum, lr;
    template <class A> DEV void step(const rmsprop_rule &h, const item &it, int64_t i)
    {
        typedef exact<A> e;
        A p = master_get<A>(it, i), g = e::mul(access<A>::load(it.grad, it.grad_type, i), (A)h.scale);
        A *square = (A *)it.state[0] + i;
        if ((A)h.wd != 0) g = e::fma_((A)h.wd, p, g);
        A v = e::fma_((A)h.alpha, *square, e::mul(e::mul((A)h.rest, g), g));
        A u = e::div(g, e::add(e::root(v), (A)h.eps));
        *square = v;
        if ((A)h.momentum != 0) {
            A *buffer = (A *)it.state[1] + i;
            u = e::fma_((A)h.momentum, *buffer, u);
            *buffer = u;
        }
        master_put(it, i, e::fma_(-(A)h.lr, u, p));
    }
};

/* -- schedule-free AdamW (ref/optim.c) ----------------------------------------------------------------------------- */
struct schedule_free_rule {
    double scale, wd, b2, c2, inv, eps, lr, average, toward;
    bool first;
    template <class A> DEV void step(const schedule_free_rule &h, const item &it, int64_t i)
    {
        typedef exact<A> e;
        A p = master_get<A>(it, i), g = e::mul(access<A>::load(it.grad, it.grad_type, i), (A)h.scale);
        A *zs = (A *)it.state[0] + i, *vs = (A *)it.state[1] + i, z = h.first ? p : *zs;
        A v = e::fma_((A)h.b2, *vs, e::mul(e::mul((A)h.c2, g), g));
        A u = e::div(g, e::fma_(e::root(v), (A)h.inv, (A)h.eps));
        if ((A)h.wd != 0) u = e::fma_((A)h.wd, p, u);
        *zs = e::fma_(-(A)h.lr, u, z);
        *vs = v;
        master_put(it, i, e::fma_((A)h.toward, u, e::fma_((A)h.average, e::add(z, -p), p)));
    }
};
/* The inputs are param, master and end. collect() stores `end` as the gradient. */
struct lerp_rule {
    double weight;
    bool near_master;
    template <class A> DEV void step(const lerp_rule &h, const item &it, int64_t i)
    {
        A p = master_get<A>(it, i), end = access<A>::load(it.grad, it.grad_type, i);
        master_put(it, i, exact<A>::fma_((A)h.weight, exact<A>::add(end, -p), h.near_master ? p : end));
    }
};

/* Updates each element by a rule. If the master is fp64, the kernel computes in double. */
template <class Rule> KERNEL_UP_TO(THREADS) rule_kernel(Rule h, const __grid_constant__ work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        for (int k = 0; k < 4; k++) {
            int64_t i = (unit - it.first_unit) * UNIT + k * THREADS + threadIdx.x;
            if (i >= it.numel) break;
            if (it.master_type == PS_F64) Rule::template step<double>(h, it, i);
            else Rule::template step<float>(h, it, i);
        }
    }
}
template <class Rule> static int run_rule(ps_call *call, int each, const Rule &h)
{
    work w = collect(call, each, UNIT);
    if (w.units > 0) PS_LAUNCH(rule_kernel<Rule>, unit_blocks(w.units), THREADS, 0, ps_cu->compute, h, w);
    return 0;
}

static int lion_(ps_call *call)
{
    const ps_attrs_lion_ *a = (const ps_attrs_lion_ *)call->attrs;
    lion_rule h = { a->grad_scale, 1 - a->lr * a->weight_decay, a->beta1, a->beta2, 1 - a->beta1, 1 - a->beta2, a->lr };
    return run_rule(call, 4, h);
}
static int rmsprop_(ps_call *call)
{
    const ps_attrs_rmsprop_ *a = (const ps_attrs_rmsprop_ *)call->attrs;
    rmsprop_rule h = { a->grad_scale, a->weight_decay, a->alpha, 1 - a->alpha, a->eps, a->momentum, a->lr };
    return run_rule(call, 5, h);
}

static int adam_schedule_free_(ps_call *call)
{
    const ps_attrs_adam_schedule_free_ *a = (const ps_attrs_adam_schedule_free_ *)call->attrs;
    schedule_free_rule h = { a->grad_scale, a->weight_decay, a->beta2, 1 - a->beta2, 1 / sqrt(a->bias2), a->eps, a->lr,
                             a->average, a->lr * (a->beta1 * (1 - a->average) - 1), a->t == 1 };
    return run_rule(call, 5, h);
}
static int master_lerp_(ps_call *call)
{
    double weight = ((const ps_attrs_master_lerp_ *)call->attrs)->weight;
    bool near_master = fabs(weight) < 0.5;
    lerp_rule h = { near_master ? weight : weight - 1, near_master };
    return run_rule(call, 3, h);
}

/* -- AdamW with averages in bf16 ----------------------------------------------------------------------------------- */
struct adamw_constants { float scale, keep, b1, b2, c1, c2, inv, eps, step; uint64_t seed, t; };

template <class Attrs> static adamw_constants adamw_of(const Attrs *a, uint64_t seed)
{
    double bias1 = 1 - pow(a->beta1, (double)a->t), bias2 = 1 - pow(a->beta2, (double)a->t);
    adamw_constants h = { (float)a->grad_scale, (float)(1 - a->lr * a->weight_decay), (float)a->beta1, (float)a->beta2,
                          (float)(1 - a->beta1), (float)(1 - a->beta2), (float)(1 / sqrt(bias2)), (float)a->eps,
                          (float)(a->lr / bias1), seed, (uint64_t)a->t };
    return h;
}
DEV void adamw_step(const adamw_constants &h, float g, float *p, float *m, float *v)
{
    g = __fmul_rn(g, h.scale);
    *p = __fmul_rn(*p, h.keep);
    *m = __fmaf_rn(h.b1, *m, __fmul_rn(h.c1, g));
    *v = __fmaf_rn(h.b2, *v, __fmul_rn(__fmul_rn(h.c2, g), g));
    *p = __fmaf_rn(-h.step, __fdiv_rn(*m, __fmaf_rn(__fsqrt_rn(*v), h.inv, h.eps)), *p);
}
/* Rounds x to bf16, either up or down. The lower 16 bits of `random` decide the direction. */
DEV uint16_t round_random(float x, uint32_t random)
{
    uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) >= 0x7f800000u) return bf16_down(x);
    return (uint16_t)((u + (random & 0xffffu)) >> 16);
}

/* A thread updates four elements that share a Philox counter. The indices of the four elements are 16 apart
 * (ref/update.c). */
KERNEL_UP_TO(THREADS) adam_bf16_kernel(adamw_constants h, const __grid_constant__ work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        int64_t first = (unit - it.first_unit) * UNIT + threadIdx.x / 16 * 64 + threadIdx.x % 16;
        uint16_t *ms = (uint16_t *)it.state[0], *vs = (uint16_t *)it.state[1];
        ps_philox random = ps_philox4x32(h.seed, (uint64_t)(first / 64 * 16 + first % 16), h.t);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int64_t i = first + 16 * k;
            if (i >= it.numel) break;
            float p = master_get<float>(it, i), m = bf16_up(ms[i]), v = bf16_up(vs[i]);
            adamw_step(h, load_f(it.grad, it.grad_type, i), &p, &m, &v);
            ms[i] = round_random(m, random.v[k]);
            vs[i] = round_random(v, random.v[k] >> 16);
            master_put(it, i, p);
        }
    }
}
static int adam_bf16_(ps_call *call)
{
    const ps_attrs_adam_bf16_ *a = (const ps_attrs_adam_bf16_ *)call->attrs;
    work w = collect(call, 5, UNIT);
    adamw_constants h = adamw_of(a, a->seed);
    if (w.units > 0) PS_LAUNCH(adam_bf16_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, h, w);
    return 0;
}

/* -- AdamW with averages in 8 bits --------------------------------------------------------------------------------- */
/* The tables of the signed and of the unsigned 8-bit code. The optimizer states are the codes and the scales of
 * exp_avg, and the codes and the scales of exp_avg_sq. */
struct code_tables { ps_codes with_sign, plain; };

/* Quantises a block of elements with one warp. x [EACH] contains this lane's elements: every 32nd element of the block,
 * starting at element `lane`. x[k] is in the block if left > 32 * k. */
enum { EACH = PS_STATE_BLOCK / 32 };
template <bool SIGN> DEV void quantise(const ps_codes *c, const float *x, int64_t left, uint8_t *codes, float *scale)
{
    int most = 0;                                    /* the bit pattern of the largest magnitude, which can be a NaN */
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (32 * k < left) most = max(most, (int)(__float_as_uint(x[k]) & 0x7fffffffu));
    most = warp_all<op_max>(most);
    float largest = __uint_as_float((unsigned)most), factor = ps_codes_factor(largest);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (32 * k >= left) continue;
        codes[32 * k] = most < 0x7f800000 ? (uint8_t)ps_codes_nearest(c, __fmul_rn(x[k], factor), SIGN) : 0;
    }
    if (threadIdx.x % 32 == 0) *scale = largest;
}

/* Each warp updates a block of elements that share a scale. */
KERNEL_UP_TO(THREADS) adam8bit_kernel(adamw_constants h, const __grid_constant__ code_tables given,
                                      const __grid_constant__ work w)
{
    __shared__ code_tables tables;                   /* tables are in shared memory, because lanes read different
                                                      * entries at the same time */
    for (int i = threadIdx.x; i < (int)(sizeof tables / 4); i += blockDim.x)
        ((uint32_t *)&tables)[i] = ((const uint32_t *)&given)[i];
    __syncthreads();
    int lane = threadIdx.x % 32;
    for (int64_t unit = FIRST_ELEMENT / 32; unit < w.units; unit += ALL_THREADS / 32) {
        const item &it = item_of(w, unit);
        int64_t block = unit - it.first_unit, first = block * PS_STATE_BLOCK + lane, left = it.numel - first;
        uint8_t *m_codes = (uint8_t *)it.state[0] + first, *v_codes = (uint8_t *)it.state[2] + first;
        float *m_scale = (float *)it.state[1] + block, *v_scale = (float *)it.state[3] + block;
        float old_m = *m_scale, old_v = *v_scale, m[EACH], v[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            m[k] = v[k] = 0;
            if (32 * k >= left) continue;
            int64_t i = first + 32 * k;
            float p = master_get<float>(it, i);
            m[k] = __fmul_rn(ps_codes_value(&tables.with_sign, m_codes[32 * k], true), old_m);
            v[k] = __fmul_rn(ps_codes_value(&tables.plain, v_codes[32 * k], false), old_v);
            adamw_step(h, load_f(it.grad, it.grad_type, i), &p, &m[k], &v[k]);
            master_put(it, i, p);
        }
        __syncwarp();                                /* all lanes have read the scales */
        quantise<true>(&tables.with_sign, m, left, m_codes, m_scale);
        quantise<false>(&tables.plain, v, left, v_codes, v_scale);
    }
}
static int adam8bit_(ps_call *call)
{
    static code_tables tables;
    static bool made;
    if (!made) {
        ps_codes_make(&tables.with_sign, true), ps_codes_make(&tables.plain, false);
        made = true;
    }
    work w = collect(call, 7, PS_STATE_BLOCK);
    adamw_constants h = adamw_of((const ps_attrs_adam8bit_ *)call->attrs, 0);
    if (w.units > 0)
        PS_LAUNCH(adam8bit_kernel, unit_blocks(ps_cu_div_up(w.units, THREADS / 32)), THREADS, 0, ps_cu->compute, h,
                  tables, w);
    return 0;
}

/* -- remainders ---------------------------------------------------------------------------------------------------- */
/* The inputs are param, low and src. collect() stores `low` as the master and `src` as the gradient. */
static __global__ void remainder_split_kernel(const __grid_constant__ work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        for (int k = 0; k < 4; k++) {
            int64_t i = (unit - it.first_unit) * UNIT + k * THREADS + threadIdx.x;
            if (i >= it.numel) break;
            master_put(it, i, ((const float *)it.grad)[i]);
        }
    }
}
static int remainder_split_(ps_call *call)
{
    work w = collect(call, 3, UNIT);
    if (w.units > 0) PS_LAUNCH(remainder_split_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, w);
    return 0;
}

static __global__ void remainder_join_kernel(float *y, const uint16_t *w, const void *low, int64_t n)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) y[i] = remainder_join(w[i], low_at(low, i));
}
static int remainder_join_op(ps_call *call)
{
    const ps_view *w = &call->in[0];
    if (w->numel > 0)
        PS_LAUNCH(remainder_join_kernel, blocks_for(w->numel), THREADS, 0, ps_cu->compute, (float *)call->out[0].data,
                  (const uint16_t *)w->data, (const void *)call->in[1].data, w->numel);
    return 0;
}

void ps_cuda_fill_update(ps_kernel *k)
{
    k[PS_OP_lion_] = lion_;
    k[PS_OP_rmsprop_] = rmsprop_;
    k[PS_OP_adam_schedule_free_] = adam_schedule_free_;
    k[PS_OP_master_lerp_] = master_lerp_;
    k[PS_OP_adam_bf16_] = adam_bf16_;
    k[PS_OP_adam8bit_] = adam8bit_;
    k[PS_OP_remainder_split_] = remainder_split_;
    k[PS_OP_remainder_join] = remainder_join_op;
}
