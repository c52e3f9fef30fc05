/* SPDX-License-Identifier: BSD-3-Clause
 * Rotary position embedding. A pair consists of an element in the first half of a row and the corresponding element in
 * the second half. If all columns are rotated and rows are aligned, a thread reads 16 bytes of each half and rotates
 * the pairs in them. Otherwise a thread rotates one pair, or copies two columns that are not rotated. */
#include "backend/cuda/device.h"

struct rope_call {
    const void *x, *cos, *sin;
    void *y;
    int64_t B, H, T, D, half;
    int64_t x_b, x_h, x_t, y_b, y_h, y_t, c_b, c_t, s_b, s_t;
    int inverse;
};

template <class T> static __global__ void rope_kernel(const __grid_constant__ rope_call p)
{
    typedef typename type_info<T>::acc A;
    int64_t pairs = (p.D + 1) / 2, n = p.B * p.T * p.H * pairs;
    for (int64_t e = FIRST_ELEMENT; e < n; e += ALL_THREADS) {
        int64_t d = e % pairs, h = e / pairs % p.H, t = e / pairs / p.H % p.T, b = e / pairs / p.H / p.T;
        const T *x = (const T *)p.x + b * p.x_b + h * p.x_h + t * p.x_t;
        T *y = (T *)p.y + b * p.y_b + h * p.y_h + t * p.y_t;
        if (d < p.half) {
            A c = ((const A *)p.cos)[b * p.c_b + t * p.c_t + d], s = ((const A *)p.sin)[b * p.s_b + t * p.s_t + d];
            A first = up(x[d]), second = up(x[d + p.half]);
            if (p.inverse) s = -s;
            y[d] = down<T>(first * c - second * s);
            y[d + p.half] = down<T>(second * c + first * s);
        } else {
            int64_t at = 2 * d;                      /* columns at or after 2 * half are copied, two per thread */
            y[at] = x[at];
            if (at + 1 < p.D) y[at + 1] = x[at + 1];
        }
    }
}

/* A thread processes 16 bytes in each half of a row. All sizes are below 2^32, so 32-bit divisions suffice. */
template <class T> static __global__ void rope_packs_kernel(const __grid_constant__ rope_call p)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n, V = pack<A>::n;
    uint32_t H = (uint32_t)p.H, times = (uint32_t)p.T, packs = (uint32_t)p.half / W;
    uint32_t n = (uint32_t)p.B * times * H * packs;
    A turn = p.inverse ? (A)-1 : (A)1;
    for (uint32_t e = blockIdx.x * blockDim.x + threadIdx.x; e < n; e += gridDim.x * blockDim.x) {
        uint32_t row = e / packs, d = (e - row * packs) * W, th = row / H, h = row - th * H;
        uint32_t b = th / times, t = th - b * times;
        const T *x = (const T *)p.x + b * p.x_b + h * p.x_h + t * p.x_t + d;
        T *y = (T *)p.y + b * p.y_b + h * p.y_h + t * p.y_t + d;
        const A *cos = (const A *)p.cos + b * p.c_b + t * p.c_t + d;
        const A *sin = (const A *)p.sin + b * p.s_b + t * p.s_t + d;
        pack<T> first = load_pack(x), second = load_pack(x + p.half), out_first, out_second;
#pragma unroll
        for (int k = 0; k < W; k += V) {
            pack<A> c = load_pack(cos + k), s = load_pack(sin + k);
#pragma unroll
            for (int i = 0; i < V; i++) {
                A u = up(first.v[k + i]), v = up(second.v[k + i]), w = turn * s.v[i];
                out_first.v[k + i] = down<T>(u * c.v[i] - v * w);
                out_second.v[k + i] = down<T>(v * c.v[i] + u * w);
            }
        }
        store_pack(y, out_first);
        store_pack(y + p.half, out_second);
    }
}

/* Returns whether all rows of x, y, cos and sin begin at multiples of 16 bytes, and whether the halves of a row consist
 * of whole packs. */
template <class T> static bool in_packs(const rope_call *p)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n, V = pack<A>::n;
    int64_t wide[] = { p->x_b, p->x_h, p->x_t, p->y_b, p->y_h, p->y_t, p->half };
    int64_t narrow[] = { p->c_b, p->c_t, p->s_b, p->s_t };
    for (int64_t step : wide)
        if (step % W != 0) return false;
    for (int64_t step : narrow)
        if (step % V != 0) return false;
    return p->D == 2 * p->half && p->B * p->T * p->H * (p->half / W) < INT32_MAX && aligned16(p->x) &&
           aligned16(p->y) && aligned16(p->cos) && aligned16(p->sin);
}

template <class T> static int run_rope(ps_call *call)
{
    const ps_view *x = &call->in[0], *cos = &call->in[1], *sin = &call->in[2], *y = &call->out[0];
    rope_call p = { x->data, cos->data, sin->data, y->data, x->shape[0], x->shape[1], x->shape[2], x->shape[3],
                    cos->shape[2], x->stride[0], x->stride[1], x->stride[2], y->stride[0], y->stride[1], y->stride[2],
                    cos->shape[0] > 1 ? cos->stride[0] : 0, cos->stride[1], cos->shape[0] > 1 ? sin->stride[0] : 0,
                    sin->stride[1], ((const ps_attrs_rope *)call->attrs)->inverse };
    auto kernel = rope_kernel<T>;
    if (x->numel == 0) return 0;
    if (in_packs<T>(&p)) {
        kernel = rope_packs_kernel<T>;
        PS_LAUNCH(kernel, blocks_for(p.B * p.T * p.H * (p.half / pack<T>::n)), THREADS, 0, ps_cu->compute, p);
        return ps_cuda_launched();
    }
    PS_LAUNCH(kernel, blocks_for(p.B * p.T * p.H * ((p.D + 1) / 2)), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int rope(ps_call *call) { return BY_FLOAT(call->in[0].dtype, run_rope, call); }

void ps_cuda_fill_rope(ps_kernel *k) { k[PS_OP_rope] = rope; }
