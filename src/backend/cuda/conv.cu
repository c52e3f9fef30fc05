/* SPDX-License-Identifier: BSD-3-Clause
 * Convolution, its transpose, and the gradient of its weight. The kernels do not use tensor cores. For the gradient of
 * the weight, each block computes one element. For the other results, each thread computes one element. The order of
 * every sum is fixed. */
#include "backend/cuda/device.h"
#include "backend/image.h"

struct conv_call {
    ps_conv_shape s;
    const void *x, *w, *y, *bias;                    /* the operands of conv */
    void *out, *out_b;
    int bias_dtype, dw_dtype, db_dtype, accumulate, add_b;
};

template <class A> DEV A bias_of(const conv_call &p, int64_t channel)
{
    return p.bias ? access<A>::load(p.bias, p.bias_dtype, channel) : (A)0;
}

template <class T> static __global__ void conv_kernel(const __grid_constant__ conv_call p)
{
    typedef typename type_info<T>::acc A;
    const ps_conv_shape &s = p.s;
    int64_t in_group = s.c / s.groups, out_group = s.o / s.groups, n = s.n * s.o * s.out[0] * s.out[1];
    for (int64_t e = FIRST_ELEMENT; e < n; e += ALL_THREADS) {
        int64_t j = e % s.out[1], i = e / s.out[1] % s.out[0], o = e / (s.out[0] * s.out[1]) % s.o;
        int64_t first = (e / (s.o * s.out[0] * s.out[1]) * s.c + o / out_group * in_group) * s.in[0];
        const T *w = (const T *)p.w + o * in_group * s.k[0] * s.k[1];
        A sum = 0;
        for (int64_t c = 0; c < in_group; c++)
            for (int64_t u = 0; u < s.k[0]; u++)
                for (int64_t v = 0; v < s.k[1]; v++, w++) {
                    int64_t a = i * s.stride[0] + u * s.dilation[0] - s.before[0];
                    int64_t b = j * s.stride[1] + v * s.dilation[1] - s.before[1];
                    if (a < 0 || b < 0 || a >= s.in[0] || b >= s.in[1]) continue;
                    sum += up(*w) * up(((const T *)p.x)[(first + c * s.in[0] + a) * s.in[1] + b]);
                }
        ((T *)p.out)[e] = down<T>(sum + bias_of<A>(p, o));
    }
}

/* Returns the position along dimension d of the output to which element `at` of x contributes through element `k` of
 * the kernel. Returns -1 if there is no such output. */
DEV int64_t met(const ps_conv_shape &s, int d, int64_t at, int64_t k)
{
    int64_t i = at + s.before[d] - k * s.dilation[d];
    if (i < 0 || i % s.stride[d] != 0 || i / s.stride[d] >= s.out[d]) return -1;
    return i / s.stride[d];
}

template <class T> static __global__ void conv_transpose_kernel(const __grid_constant__ conv_call p)
{
    typedef typename type_info<T>::acc A;
    const ps_conv_shape &s = p.s;
    int64_t in_group = s.c / s.groups, out_group = s.o / s.groups, n = s.n * s.c * s.in[0] * s.in[1];
    for (int64_t e = FIRST_ELEMENT; e < n; e += ALL_THREADS) {
        int64_t b = e % s.in[1], a = e / s.in[1] % s.in[0], c = e / (s.in[0] * s.in[1]) % s.c;
        int64_t sample = e / (s.c * s.in[0] * s.in[1]), first = c / in_group * out_group;
        A sum = 0;
        for (int64_t o = first; o < first + out_group; o++)
            for (int64_t u = 0; u < s.k[0]; u++)
                for (int64_t v = 0; v < s.k[1]; v++) {
                    int64_t i = met(s, 0, a, u), j = met(s, 1, b, v);
                    if (i < 0 || j < 0) continue;
                    const T *w = (const T *)p.w + ((o * in_group + c % in_group) * s.k[0] + u) * s.k[1] + v;
                    sum += up(*w) * up(((const T *)p.y)[((sample * s.o + o) * s.out[0] + i) * s.out[1] + j]);
                }
        ((T *)p.out)[e] = down<T>(sum + bias_of<A>(p, c));
    }
}

/* Computes dw and then db. Each block computes one element. */
template <class T> static __global__ void conv_weight_kernel(const __grid_constant__ conv_call p)
{
    typedef typename type_info<T>::acc A;
    const ps_conv_shape &s = p.s;
    int64_t in_group = s.c / s.groups, out_group = s.o / s.groups, each = in_group * s.k[0] * s.k[1];
    int64_t places = s.out[0] * s.out[1], all = s.o * each + (p.out_b ? s.o : 0);
    for (int64_t e = blockIdx.x; e < all; e += gridDim.x) {
        bool is_bias = e >= s.o * each;
        int64_t o = is_bias ? e - s.o * each : e / each, v = e % s.k[1], u = e / s.k[1] % s.k[0];
        int64_t c = o / out_group * in_group + e / (s.k[0] * s.k[1]) % in_group;
        A sum = 0;
        for (int64_t t = threadIdx.x; t < s.n * places; t += blockDim.x) {
            int64_t sample = t / places, j = t % s.out[1], i = t % places / s.out[1];
            A dy = up(((const T *)p.y)[(sample * s.o + o) * places + t % places]);
            int64_t a = i * s.stride[0] + u * s.dilation[0] - s.before[0];
            int64_t b = j * s.stride[1] + v * s.dilation[1] - s.before[1];
            if (is_bias) sum += dy;
            else if (a >= 0 && b >= 0 && a < s.in[0] && b < s.in[1])
                sum += dy * up(((const T *)p.x)[((sample * s.c + c) * s.in[0] + a) * s.in[1] + b]);
        }
        sum = block_sum(sum);
        if (threadIdx.x != 0) continue;
        if (is_bias) access<A>::store(p.out_b, p.db_dtype, o,
                                      p.add_b ? access<A>::load(p.out_b, p.db_dtype, o) + sum : sum);
        else access<A>::store(p.out, p.dw_dtype, e,
                              p.accumulate ? access<A>::load(p.out, p.dw_dtype, e) + sum : sum);
    }
}

template <class T> static int run_conv(const conv_call &p, int64_t numel, bool transposed)
{
    auto kernel = transposed ? conv_transpose_kernel<T> : conv_kernel<T>;
    if (numel == 0) return 0;
    PS_LAUNCH(kernel, blocks_for(numel), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static conv_call call_of(const ps_call *call, const ps_view *x, const ps_view *w, const ps_view *y)
{
    conv_call p;
    memset(&p, 0, sizeof p);
    p.s = ps_conv_shape_of((const ps_attrs_conv *)call->attrs, x, w, y);
    p.x = x->data, p.w = w->data, p.y = y->data;
    return p;
}

static int conv_by(ps_call *call, bool transposed)
{
    const ps_view *in = &call->in[0], *w = &call->in[1], *b = &call->in[2], *out = &call->out[0];
    conv_call p = call_of(call, transposed ? out : in, w, transposed ? in : out);
    p.out = out->data;
    if (ps_has(b)) p.bias = b->data, p.bias_dtype = b->dtype;
    return BY_FLOAT(in->dtype, run_conv, p, out->numel, transposed);
}

static int conv(ps_call *call) { return conv_by(call, false); }
static int conv_transpose(ps_call *call) { return conv_by(call, true); }

template <class T> static int run_weight(const conv_call &p, int64_t numel)
{
    auto kernel = conv_weight_kernel<T>;
    if (numel == 0) return 0;
    PS_LAUNCH(kernel, row_blocks(numel), 128, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int conv_weight(ps_call *call)
{
    const ps_attrs_conv_weight *a = (const ps_attrs_conv_weight *)call->attrs;
    const ps_view *x = &call->in[0], *dy = &call->in[1], *dw = &call->out[0], *db = &call->out[1];
    conv_call p = call_of(call, x, dw, dy);
    p.out = dw->data, p.dw_dtype = dw->dtype, p.accumulate = a->accumulate;
    if (ps_has(db)) p.out_b = db->data, p.db_dtype = db->dtype, p.add_b = a->add_b;
    return BY_FLOAT(x->dtype, run_weight, p, dw->numel + (ps_has(db) ? db->numel : 0));
}

void ps_cuda_fill_conv(ps_kernel *k)
{
    k[PS_OP_conv] = conv;
    k[PS_OP_conv_transpose] = conv_transpose;
    k[PS_OP_conv_weight] = conv_weight;
}
