/* SPDX-License-Identifier: BSD-3-Clause
 * The operands of all attention kernels. attention_flash.cu has kernels on tensor cores for bf16 and fp16 values.
 * attention_hopper.cu has faster kernels for some bf16 and fp16 operands on devices of compute capability 9.0.
 * attention_plain.cu has kernels for every type and size. */
#ifndef PS_CUDA_ATTENTION_H
#define PS_CUDA_ATTENTION_H
#include "backend/cuda/device.h"

/* A tensor [B, H, rows, D] whose dimension D is contiguous. If the tensor is absent, p is NULL. b, h and row are the
 * strides of the first three dimensions, in elements. */
struct heads {
    void *p;
    int64_t b, h, row;
    bool aligned;                                    /* whether each row begins at a multiple of 16 bytes and can be
                                                      * read 16 bytes at a time */
};
struct attention {
    heads q, k, v, y, dy, dq, dk, dv;                /* q, y, dy and dq are [B, H, T, D]; k, v, dk and dv are [B, H /
                                                      * group, S, D] */
    int32_t group;                                   /* number of query heads that share one head of keys and values */
    bool ungrouped;                                  /* whether dk and dv are [B, H, S, D] and hold a separate result
                                                      * for each query head */
    const uint8_t *mask;                             /* [B, S] or NULL */
    int64_t mask_b, mask_j;
    /* The range of keys that each query sees in packed rows: query i sees keys begin[i] to end[i] - 1. Both arrays are
     * [B, T], or NULL if there are no segments. Neither array ever decreases. At the positions of a run of padding,
     * `begin` holds the end of the run and `end` holds its beginning, so the queries of the run see no keys. */
    const int32_t *begin, *end;
    const void *bias;                                /* a mask of 4 dimensions with bools or floats; or NULL */
    int32_t bias_type;
    int64_t bias_b, bias_h, bias_i;                  /* the strides of bias, 0 along a repeated dimension; the stride of
                                                      * the last dimension (keys) is 1 */
    int64_t window;                                  /* maximum number of keys that a query sees, 0 for no limit */
    int32_t sure;                                    /* for backward without a mask: the result of sure_before(), which
                                                      * is the same for all samples */
    const int32_t *sure_of;                          /* for backward with a mask: the result of sure_before() for each
                                                      * sample, [B]; otherwise NULL */
    void *lse;                                       /* [B, H, T] log-sum-exp in fp32 (fp64 for fp64 operands), or
                                                      * NULL */
    int64_t lse_b, lse_h;                            /* strides of lse; the stride of T is 1 */
    void *delta;                                     /* [B, H, T] dot products of dy and y, in the type of lse */
    int64_t B, H, T, S, D;
    float scale, p, keep;                            /* p: dropout probability; keep: 1 / (1 - p) */
    double scale_d, keep_d;
    bool causal;
    uint64_t seed, step, sample;
    uint32_t op;
    int32_t first_head;                              /* index of this rank's first head, if the heads are split over
                                                      * ranks */
};

/* Returns whether the attention has neither a window nor a mask of 4 dimensions. The kernels on tensor cores support
 * neither feature. */
static inline bool is_plain(const attention *t) { return !t->bias && t->window == 0; }

DEV bool same_segment(const attention &t, int64_t b, int64_t i, int64_t j)
{
    return !t.begin || (j >= t.begin[b * t.T + i] && j < t.end[b * t.T + i]);
}

DEV bool visible(const attention &t, int64_t b, int64_t i, int64_t j)
{
    int64_t last = i + t.S - t.T;
    if (j >= t.S || (t.causal && j > last) || (t.window > 0 && j <= last - t.window)) return false;
    return (!t.mask || t.mask[b * t.mask_b + j * t.mask_j] != 0) && same_segment(t, b, i, j);
}

/* Returns the number of queries at the beginning of a sample that see at most one key. `second` is the position of the
 * second key that the mask does not hide. If a query sees one key, the key's weight is 1 for any score, so the gradient
 * of the score must be exactly 0. Otherwise Adam would turn the rounding error of dy.v - delta into an update. */
static __host__ __device__ inline int32_t sure_before(const attention &t, int64_t second)
{
    int64_t n = t.causal ? second - (t.S - t.T) : 0;
    return (int32_t)(second >= t.S || n > t.T ? t.T : n > 0 ? n : 0);
}
DEV int sure_queries(const attention &t, int64_t b) { return t.sure_of ? t.sure_of[b] : t.sure; }
/* Returns whether query i sees at most one key. Its segment consists of the positions begin to end - 1. */
DEV bool is_single(const attention &t, int i, int begin, int end)
{
    return (t.causal && i <= begin) || end - begin <= 1;
}

/* Returns the position in lse of the value for query 0 of a head. */
DEV int64_t lse_at(const attention &t, int64_t b, int64_t h) { return b * t.lse_b + h * t.lse_h; }

/* Four random numbers that decide which of four consecutive elements are dropped. One call of Philox computes all four
 * numbers. block: the index of the first element, divided by 4. */
struct draws { uint64_t block; ps_philox r; };
DEV draws no_draws(void)
{
    draws d;
    d.block = ~(uint64_t)0;
    return d;
}
DEV bool dropped(const attention &t, draws *d, int64_t b, int64_t h, int64_t i, int64_t j)
{
    int64_t begin = 0, T = t.T, S = t.S;
    if (t.begin) {                                   /* a segment counts as a separate sample */
        if (i >= t.T) return false;                  /* a tile can have more queries than the tensor */
        begin = t.begin[b * t.T + i];
        T = S = t.end[b * t.T + i] - begin;
    }
    uint64_t e = (uint64_t)(((t.first_head + h) * T + i - begin) * S + j - begin);
    if (e / 4 != d->block) {                         /* callers pass the same d for all keys of a query */
        uint64_t sample = t.sample + (uint64_t)b + ps_segment_sample(begin);
        d->block = e / 4;
        d->r = ps_philox4x32(t.seed, sample << 32 | (uint32_t)(e / 4), t.step << 32 | t.op);
    }
    uint32_t word = e & 2 ? (e & 1 ? d->r.v[3] : d->r.v[2]) : e & 1 ? d->r.v[1] : d->r.v[0];
    return ps_unit_f32(word) < t.p;
}

/* If these functions do not support the operands, they launch no kernel and return PS_EUNSUP. */
int ps_cuda_flash_forward(const attention *t, int dtype);
int ps_cuda_flash_backward(const attention *t, int dtype);
int ps_cuda_hopper_forward(const attention *t, int dtype);
int ps_cuda_hopper_backward(const attention *t, int dtype);
#endif
