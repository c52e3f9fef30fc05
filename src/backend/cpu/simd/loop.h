/* SPDX-License-Identifier: BSD-3-Clause
 * The iterator of all elementwise and reducing kernels. A loop processes up to four operands of one shape in row-major
 * order, in blocks. The kernel provides a block function, which processes one plain array per operand. The number of
 * elements in an array is a multiple of 16. If an operand is contiguous, its array is a part of the operand. Otherwise
 * its array is a small buffer with copies of its elements. Hence the block function can ignore strides. The result for
 * an element does not depend on the element's position in a block. Hence results depend neither on the division into
 * blocks nor on threads. */
#ifndef PS_CPU_LOOP_H
#define PS_CPU_LOOP_H
#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

enum { LOOP_OPS = 4, LOOP_BLOCK = 1024, LOOP_FLAT_BLOCK = 8192 };

typedef struct loop_operand {
    char *data;
    int64_t size;                     /* size of an element in bytes */
    int64_t stride[PS_MAX_DIMS];      /* strides in elements, one for each dimension of the loop */
    bool flat;                        /* true if the whole operand is one row-major array of the loop's shape */
} loop_operand;

/* A loop over elements. Dimensions of size 1 are dropped. Dimensions are merged if the strides of all operands allow
 * it. Hence ndim is often 1. It is never 0. */
typedef struct loop {
    int n, ndim;
    int64_t numel, shape[PS_MAX_DIMS];
    loop_operand op[LOOP_OPS];
} loop;

/* Processes n elements, where n is a positive multiple of 16. p[0] points to the results. p[1] and the following
 * pointers point to the inputs. */
typedef void (*loop_fn)(void *const *p, int64_t n, const void *arg);

#define loop_init PS_ISA_FN(ps_loop_init)
#define loop_run PS_ISA_FN(ps_loop_run)
#define loop_copy PS_ISA_FN(ps_loop_copy)
#define loop_fill_copies PS_ISA_FN(ps_cpu_fill_copies)

/* Sets up a loop over the shape of `out`. The inputs are broadcast to this shape. */
void loop_init(loop *l, const ps_view *out, int n_in, const ps_view *const *in);
void loop_run(const loop *l, loop_fn fn, const void *arg);
/* Copies src to dst, and broadcasts src to the shape of dst. The elements of src and dst have the same size. */
void loop_copy(const ps_view *dst, const ps_view *src);
/* elementwise_copy.c: copies, casts, fills and random numbers */
void loop_fill_copies(ps_kernel *k);

SIMD bool is_lane_type(int dtype) { return dtype == PS_F32 || dtype == PS_BF16 || dtype == PS_F16; }

/* vf_max_nan returns the larger of two values, and vf_min_nan the smaller. Both return NaN if either value is NaN. */
SIMD vf vf_max_nan(vf a, vf b) { return vf_select(a != a, a, vf_max(a, b)); }
SIMD vf vf_min_nan(vf a, vf b) { return vf_select(a != a, a, vf_min(a, b)); }
#endif
