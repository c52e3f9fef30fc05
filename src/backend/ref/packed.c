/* SPDX-License-Identifier: BSD-3-Clause
 * Packed weights. Blocks are unpacked one by one (base/blocks.c). The products are computed by three nested loops. */
#include <math.h>
#include "ref.h"
#include "base/blocks.h"

/* Unpacks w, which must be contiguous. */
static int unpack(ps_call *call, const ps_view *w, const ps_view *scales, const ps_blocks *b, double **out)
{
    const uint8_t *s = w->data;
    float block[PS_BLOCKS_MOST];
    int64_t n = w->numel / b->bytes;
    PS_TRY(ref_scratch(call, n * b->block, out));
    for (int64_t i = 0; i < n; i++) {
        if (b->unpack) b->unpack(s + i * b->bytes, block);
        else ps_unpack_nf4_double(s + i * b->bytes, scales->data, i, block);
        for (int k = 0; k < b->block; k++) (*out)[i * b->block + k] = block[k];
    }
    return 0;
}

int ref_unpack(ps_call *call)
{
    const ps_attrs_unpack *attrs = call->attrs;
    double *y;
    PS_TRY(unpack(call, &call->in[0], &call->in[1], ps_blocks_of(attrs->type), &y));
    ref_put(&call->out[0], y, false);
    return 0;
}

int ref_pack(ps_call *call)
{
    const ps_view *x = &call->in[0];
    const ps_blocks *b = ps_blocks_of(PS_Q8_0);
    double *all;
    PS_TRY(ref_dense(call, x, &all));
    for (int64_t i = 0; i < x->numel / b->block; i++) {
        float values[PS_BLOCKS_MOST];
        for (int k = 0; k < b->block; k++) values[k] = (float)all[i * b->block + k];
        ps_pack_q8_0(values, (uint8_t *)call->out[0].data + i * b->bytes);
    }
    return 0;
}

/* Rounds x to 8 bits as described in base/blocks.h. */
static void round_int8(double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += PS_INT8_PART) {
        float largest = 0, odd = 0;                      /* odd: becomes NaN if an element is not finite */
        for (int k = 0; k < PS_INT8_PART; k++) {
            largest = fmaxf(largest, fabsf((float)x[i + k]));
            odd += (float)x[i + k] * 0;
        }
        float d = largest / 127, by = largest < 1e-36f ? 0 : 127 / largest;
        for (int k = 0; k < PS_INT8_PART; k++)
            x[i + k] = isnan(odd) ? odd : by > 0 ? (double)rintf((float)x[i + k] * by) * d : 0;
    }
}

int ref_linear_packed(ps_call *call)
{
    const ps_attrs_linear_packed *attrs = call->attrs;
    const ps_blocks *blocks = ps_blocks_of(attrs->type);
    const ps_view *w_view = &call->in[1], *out = &call->out[0];
    int64_t O = w_view->shape[0], I = w_view->shape[1] / blocks->bytes * blocks->block;
    int64_t in = attrs->back ? O : I, rows = ref_last(out) > 0 ? out->numel / ref_last(out) : 0;
    double *x, *w, *b, *residual, *y;
    PS_TRY(ref_dense(call, &call->in[0], &x));
    PS_TRY(ref_dense(call, &call->in[2], &b));
    PS_TRY(ref_dense(call, &call->in[3], &residual));
    PS_TRY(unpack(call, w_view, &call->in[4], blocks, &w));
    PS_TRY(ref_scratch(call, out->numel, &y));
    if (attrs->int8 && !attrs->back && rows <= PS_PACKED_ROWS && ps_blocks_int8(attrs->type)) round_int8(x, rows * I);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < O; o++)
            for (int64_t k = 0; k < I; k++) {
                if (attrs->back) y[i * I + k] += x[i * in + o] * w[o * I + k];
                else y[i * O + o] += x[i * in + k] * w[o * I + k];
            }
    for (int64_t i = 0; b && i < out->numel; i++) y[i] += b[i % O];
    for (int64_t i = 0; residual && i < out->numel; i++) y[i] += residual[i];
    ref_put(out, y, false);
    return 0;
}
