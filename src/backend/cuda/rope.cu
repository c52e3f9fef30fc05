/* SPDX-License-Identifier: BSD-3-Clause
 * Rotary position embedding. A thread turns one pair, or copies a pair of those columns that stay. */
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
            int64_t at = 2 * d;                      /* columns 2 half .. D, two a thread */
            y[at] = x[at];
            if (at + 1 < p.D) y[at + 1] = x[at + 1];
        }
    }
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
    PS_LAUNCH(kernel, blocks_for(p.B * p.T * p.H * ((p.D + 1) / 2)), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int rope(ps_call *call) { return BY_FLOAT(call->in[0].dtype, run_rope, call); }

void ps_cuda_fill_rope(ps_kernel *k) { k[PS_OP_rope] = rope; }
