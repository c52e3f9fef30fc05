/* SPDX-License-Identifier: BSD-3-Clause
 * The operands of all attention kernels. attention_flash.cu has kernels for bf16 and fp16 on tensor cores,
 * attention_hopper.cu some of them for compute capability 9.0, and attention_plain.cu kernels for every type and
 * size. */
#ifndef PS_CUDA_ATTENTION_H
#define PS_CUDA_ATTENTION_H
#include "backend/cuda/device.h"

/* A tensor [B, H, rows, D] with contiguous D, or with p NULL if it is absent. Strides count elements. */
struct heads {
    void *p;
    int64_t b, h, row;
    bool aligned;                                    /* whether rows are aligned to 16 bytes and can be read 16 bytes
                                                      * at a time */
};
struct attention {
    heads q, k, v, y, dy, dq, dk, dv;                /* q, y, dy and dq are [B, H, T, D]; k, v, dk and dv are [B, H /
                                                      * group, S, D] */
    int32_t group;                                   /* number of heads that share keys and values */
    bool ungrouped;                                  /* whether dk and dv are [B, H, S, D], one for each query head */
    const uint8_t *mask;                             /* [B, S] or NULL */
    int64_t mask_b, mask_j;
    const int32_t *begin, *end;                      /* [B, T] with segments, otherwise NULL. Query i sees keys
                                                      * begin[i] to end[i] - 1. Neither array ever decreases. In a
                                                      * run of padding, begin is the run's end and end is its begin,
                                                      * so its queries see no keys. */
    const void *bias;                                /* mask of 4 dimensions, of bool or floats, or NULL */
    int32_t bias_type;
    int64_t bias_b, bias_h, bias_i;                  /* the mask's strides, 0 along a repeated dimension; the stride
                                                      * of keys is 1 */
    int64_t window;                                  /* maximum number of keys that a query sees, 0 for no limit */
    int32_t sure;                                    /* for backward, without a mask: sure_before of all samples */
    const int32_t *sure_of;                          /* [B] with a mask: sure_before of each sample; otherwise NULL */
    void *lse;                                       /* [B, H, T] log-sum-exp, fp32 (fp64 for fp64), or NULL */
    int64_t lse_b, lse_h;                            /* strides of lse; the stride of T is 1 */
    void *delta;                                     /* [B, H, T] dy . y, in the same type */
    int64_t B, H, T, S, D;
    float scale, p, keep;                            /* p: dropout probability; keep: 1 / (1 - p) */
    double scale_d, keep_d;
    bool causal;
    uint64_t seed, step, sample;
    uint32_t op;
    int32_t first_head;                              /* first head of this rank, if ranks share the heads */
};

/* Returns whether tensor cores support this attention: it has neither a window nor a mask of 4 dimensions. */
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

/* Returns how many queries at the beginning see at most one key. `second`: the second key that the mask shows. The
 * weight of a single key is 1 for any score, so the score's gradient must be exactly 0: Adam would turn the rounding
 * error of dy . v - delta into a step. */
static __host__ __device__ inline int32_t sure_before(const attention &t, int64_t second)
{
    int64_t n = t.causal ? second - (t.S - t.T) : 0;
    return (int32_t)(second >= t.S || n > t.T ? t.T : n > 0 ? n : 0);
}
DEV int sure_queries(const attention &t, int64_t b) { return t.sure_of ? t.sure_of[b] : t.sure; }
/* Returns whether query i of the segment begin .. end - 1 sees at most one key. */
DEV bool is_single(const attention &t, int i, int begin, int end)
{
    return (t.causal && i <= begin) || end - begin <= 1;
}

/* Returns the position in lse of a head's query 0. */
DEV int64_t lse_at(const attention &t, int64_t b, int64_t h) { return b * t.lse_b + h * t.lse_h; }

/* Random numbers for dropout of consecutive elements. A call of Philox makes four. */
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
        if (i >= t.T) return false;                  /* a tile can have more queries than exist */
        begin = t.begin[b * t.T + i];
        T = S = t.end[b * t.T + i] - begin;
    }
    uint64_t e = (uint64_t)(((t.first_head + h) * T + i - begin) * S + j - begin);
    if (e / 4 != d->block) {                         /* callers keep d for a query */
        uint64_t sample = t.sample + (uint64_t)b + ps_segment_sample(begin);
        d->block = e / 4;
        d->r = ps_philox4x32(t.seed, sample << 32 | (uint32_t)(e / 4), t.step << 32 | t.op);
    }
    uint32_t word = e & 2 ? (e & 1 ? d->r.v[3] : d->r.v[2]) : e & 1 ? d->r.v[1] : d->r.v[0];
    return ps_unit_f32(word) < t.p;
}

/* These functions return PS_EUNSUP before they launch a kernel if they do not support the operands. */
int ps_cuda_flash_forward(const attention *t, int dtype);
int ps_cuda_flash_backward(const attention *t, int dtype);
int ps_cuda_hopper_forward(const attention *t, int dtype);
int ps_cuda_hopper_backward(const attention *t, int dtype);
#endif
