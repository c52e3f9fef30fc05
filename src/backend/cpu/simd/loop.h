/* SPDX-License-Identifier: BSD-3-Clause
 * The one iterator of the elementwise and reducing kernels. A loop walks up to four operands of one shape in row-major
 * order, in blocks: whatever their strides, a block function sees plain arrays of a multiple of 16 elements, which lie
 * in the operands themselves where those are contiguous and in small buffers otherwise. An element never depends on its
 * place in a block, so neither blocks nor threads show in the results. */
#ifndef PS_CPU_LOOP_H
#define PS_CPU_LOOP_H
#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

enum { LOOP_OPS = 4, LOOP_BLOCK = 1024, LOOP_FLAT_BLOCK = 8192 };

typedef struct loop_operand {
    char *data;
    int64_t size;                     /* bytes an element */
    int64_t stride[PS_MAX_DIMS];      /* in elements, over the loop's own dimensions */
    bool flat;                        /* the whole operand is one row-major array of the loop's shape */
} loop_operand;

/* Dimensions of size 1 are dropped, those that lie alike in every operand are merged: ndim is often 1 (never 0). */
typedef struct loop {
    int n, ndim;
    int64_t numel, shape[PS_MAX_DIMS];
    loop_operand op[LOOP_OPS];
} loop;

/* p[0]: where the results go, p[1..]: inputs; n is a positive multiple of 16. */
typedef void (*loop_fn)(void *const *p, int64_t n, const void *arg);

#define loop_init PS_ISA_FN(ps_loop_init)
#define loop_run PS_ISA_FN(ps_loop_run)
#define loop_copy PS_ISA_FN(ps_loop_copy)
#define loop_fill_copies PS_ISA_FN(ps_cpu_fill_copies)

/* `out` gives the shape; inputs are broadcast against it. */
void loop_init(loop *l, const ps_view *out, int n_in, const ps_view *const *in);
void loop_run(const loop *l, loop_fn fn, const void *arg);
/* dst = src, of one element size, broadcast. */
void loop_copy(const ps_view *dst, const ps_view *src);
/* elementwise_copy.c: enters copies, casts, fills and random numbers. */
void loop_fill_copies(ps_kernel *k);

SIMD bool view_flat(const ps_view *v)
{
    int64_t expect = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        if (v->shape[d] == 1) continue;
        if (v->stride[d] != expect) return false;
        expect *= v->shape[d];
    }
    return true;
}
SIMD bool is_lane_type(int dtype) { return dtype == PS_F32 || dtype == PS_BF16 || dtype == PS_F16; }

/* The larger and the smaller; a NaN on either side wins. */
SIMD vf vf_max_nan(vf a, vf b) { return vf_select(a != a, a, vf_max(a, b)); }
SIMD vf vf_min_nan(vf a, vf b) { return vf_select(a != a, a, vf_min(a, b)); }
#endif
