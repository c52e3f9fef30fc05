/* SPDX-License-Identifier: BSD-3-Clause
 * Code that optim.cu, update.cu and whole.cu share: lists of tensors for one launch, masters, and arithmetic. The
 * compiler cannot fuse this arithmetic, so updates are bit-identical to the updates of the cpu backend. */
#ifndef PS_CUDA_OPTIM_H
#define PS_CUDA_OPTIM_H
#include "backend/cuda/device.h"

enum { UNIT = 4 * THREADS, MOST_STATES = 4, MOST_ITEMS = PS_MAX_IN / 3 };

/* One tensor of a list. The pointers of absent states are NULL. */
struct item {
    void *param, *master, *grad, *state[MOST_STATES];
    int64_t numel, first_unit;
    int param_type, grad_type, master_type;          /* master_type is PS_U8 if the master is stored as remainders */
    bool aligned;                                    /* whether all operands are aligned to 16 bytes */
};
struct work {
    int n;
    int64_t units;
    item it[MOST_ITEMS];
};

/* Collects the tensors of a call. The inputs are groups of `each` tensors: param, master, grad and states. `unit` is
 * the number of elements per unit. */
static inline work collect(const ps_call *call, int each, int64_t unit)
{
    work w;
    w.n = 0;
    w.units = 0;
    for (int i = 0; i + each <= call->n_in; i += each) {
        const ps_view *g = call->in + i;
        if (g[0].numel == 0) continue;
        item it = { g[0].data, g[1].data, g[2].data, { NULL, NULL, NULL, NULL },
                    g[0].numel, w.units, g[0].dtype, g[2].dtype, g[1].dtype, true };
        for (int k = 3; k < each; k++) it.state[k - 3] = g[k].data;
        for (int k = 0; k < each; k++) it.aligned = it.aligned && aligned16(g[k].data);
        w.units += ps_cu_div_up(it.numel, unit);
        w.it[w.n++] = it;
    }
    return w;
}

/* Returns the item to which a unit belongs. */
DEV const item &item_of(const work &w, int64_t unit)
{
    int i = 0;
    while (i + 1 < w.n && unit >= w.it[i + 1].first_unit) i++;
    return w.it[i];
}

static inline unsigned unit_blocks(int64_t units)
{
    int64_t most = (int64_t)ps_cu->card.sm_count * 32;
    return (unsigned)(units < most ? units : most);
}

/* -- arithmetic that is rounded after each operation --------------------------------------------------------------- */
template <class A> struct exact;
template <> struct exact<float> {
    DEV float add(float a, float b) { return __fadd_rn(a, b); }
    DEV float mul(float a, float b) { return __fmul_rn(a, b); }
    DEV float div(float a, float b) { return __fdiv_rn(a, b); }
    DEV float root(float a) { return __fsqrt_rn(a); }
    DEV float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
};
template <> struct exact<double> {
    DEV double add(double a, double b) { return __dadd_rn(a, b); }
    DEV double mul(double a, double b) { return __dmul_rn(a, b); }
    DEV double div(double a, double b) { return __ddiv_rn(a, b); }
    DEV double root(double a) { return __dsqrt_rn(a); }
    DEV double fma_(double a, double b, double c) { return __fma_rn(a, b, c); }
};

/* -- masters: fp32, fp64, or the lower halves of fp32 values whose upper halves are the bf16 parameter (half.h) ---- */
DEV float remainder_join(uint16_t w, uint16_t lo) { return __uint_as_float(ps_remainder_join(w, lo)); }
DEV uint16_t remainder_split(float p, uint16_t *lo) { return ps_remainder_split(__float_as_uint(p), lo); }
/* Reads a remainder. Remainders are stored in uint8 tensors, so the address can be odd. */
DEV uint16_t low_at(const void *low, int64_t i)
{
    const uint8_t *b = (const uint8_t *)low + 2 * i;
    return (uint16_t)(b[0] | b[1] << 8);
}
DEV void put_low(void *low, int64_t i, uint16_t lo)
{
    uint8_t *b = (uint8_t *)low + 2 * i;
    b[0] = (uint8_t)lo, b[1] = (uint8_t)(lo >> 8);
}

template <class A> DEV A master_get(const item &it, int64_t i)
{
    if (it.master_type == PS_U8) return (A)remainder_join(((const uint16_t *)it.param)[i], low_at(it.master, i));
    return access<A>::load(it.master, it.master_type, i);
}
/* Writes the master and the parameter. */
template <class A> DEV void master_put(const item &it, int64_t i, A p)
{
    if (it.master_type == PS_U8) {
        uint16_t lo;
        ((uint16_t *)it.param)[i] = remainder_split((float)p, &lo);
        put_low(it.master, i, lo);
        return;
    }
    access<A>::store(it.master, it.master_type, i, p);
    access<A>::store(it.param, it.param_type, i, p);
}

/* Load and store four adjacent elements of aligned operands. masters<P> is for fp32 masters and parameters of type P.
 * masters<remainders> is for masters that are stored as remainders. */
struct remainders;
template <class P> struct masters {
    DEV void get(const item &it, int64_t i, float *p)
    {
        unpack(*(const float4 *)((const float *)it.master + i), 0.0f, p);
    }
    DEV void put(const item &it, int64_t i, const float *p)
    {
        *(float4 *)((float *)it.master + i) = pack_four(p, 0.0f);
        if (it.param != it.master) *(typename four<P>::raw *)((P *)it.param + i) = pack_four(p, P());
    }
};
template <> struct masters<remainders> {
    DEV void get(const item &it, int64_t i, float *p)
    {
        uint2 w = *(const uint2 *)((const uint16_t *)it.param + i);
        uint2 lo = *(const uint2 *)((const uint16_t *)it.master + i);
        p[0] = remainder_join((uint16_t)w.x, (uint16_t)lo.x);
        p[1] = remainder_join((uint16_t)(w.x >> 16), (uint16_t)(lo.x >> 16));
        p[2] = remainder_join((uint16_t)w.y, (uint16_t)lo.y);
        p[3] = remainder_join((uint16_t)(w.y >> 16), (uint16_t)(lo.y >> 16));
    }
    DEV void put(const item &it, int64_t i, const float *p)
    {
        uint16_t w[4], lo[4];
#pragma unroll
        for (int k = 0; k < 4; k++) w[k] = remainder_split(p[k], &lo[k]);
        *(uint2 *)((uint16_t *)it.param + i) = uint2{ w[0] | (uint32_t)w[1] << 16, w[2] | (uint32_t)w[3] << 16 };
        *(uint2 *)((uint16_t *)it.master + i) = uint2{ lo[0] | (uint32_t)lo[1] << 16, lo[2] | (uint32_t)lo[3] << 16 };
    }
};
#endif
