/* SPDX-License-Identifier: BSD-3-Clause
 * Rotary position embedding. It is computed in one pass over x. The rows are processed in the order in which they are
 * in memory. */
#define PS_ANY_LANES
#include "backend/cpu/simd/loop.h"

/* Rotates the pairs of elements (d, d + half) of a row of D elements. The angle of pair d has the cosine c[d] and the
 * sine sign * s[d]. */
SIMD void turn_row(int dtype, const char *x, char *y, const float *c, const float *s, float sign, int64_t half,
                   int64_t D)
{
    int64_t size = dtype == PS_F32 ? 4 : 2;
    vf by = vf_set(sign);
    for (int64_t d = 0; d < half; d += VL) {
        int n = half - d < VL ? (int)(half - d) : VL;
        vf first = vf_get_n(x, d, dtype, n, 0), second = vf_get_n(x, d + half, dtype, n, 0);
        vf cos = vf_get_n(c, d, PS_F32, n, 0), sin = vf_get_n(s, d, PS_F32, n, 0) * by;
        vf_put_n(y, d, dtype, n, vf_fma(first, cos, -(second * sin)));
        vf_put_n(y, d + half, dtype, n, vf_fma(second, cos, first * sin));
    }
    if (2 * half < D) memcpy(y + 2 * half * size, x + 2 * half * size, (size_t)((D - 2 * half) * size));
}

static int rope(ps_call *call)
{
    const ps_view *x = &call->in[0], *cos = &call->in[1], *sin = &call->in[2], *y = &call->out[0];
    int64_t H = x->shape[1], T = x->shape[2], D = x->shape[3], half = cos->shape[2], size = ps_dtype_bytes(x->dtype);
    float sign = ((const ps_attrs_rope *)call->attrs)->inverse ? -1.0f : 1.0f;
    if (!is_lane_type(x->dtype) || cos->dtype != PS_F32 || sin->dtype != PS_F32 || (D > 1 && x->stride[3] != 1) ||
        (D > 1 && y->stride[3] != 1) || (half > 1 && (cos->stride[2] != 1 || sin->stride[2] != 1)))
        return PS_EUNSUP;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < x->shape[0] * T; i++) {
        int64_t b = i / T, t = i % T, of = cos->shape[0] > 1 ? b : 0;
        const float *c = (const float *)cos->data + of * cos->stride[0] + t * cos->stride[1];
        const float *s = (const float *)sin->data + of * sin->stride[0] + t * sin->stride[1];
        for (int64_t h = 0; h < H; h++) {
            const char *from = (const char *)x->data + (b * x->stride[0] + h * x->stride[1] + t * x->stride[2]) * size;
            char *to = (char *)y->data + (b * y->stride[0] + h * y->stride[1] + t * y->stride[2]) * size;
            if (x->dtype == PS_F32) turn_row(PS_F32, from, to, c, s, sign, half, D);
            else if (x->dtype == PS_BF16) turn_row(PS_BF16, from, to, c, s, sign, half, D);
            else turn_row(PS_F16, from, to, c, s, sign, half, D);
        }
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_rope)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_rope)(ps_kernel *k) { k[PS_OP_rope] = rope; }
