/* SPDX-License-Identifier: BSD-3-Clause
 * Numbers that the updates of optimizers share on all backends: the values of 8-bit codes, and rates that follow from a
 * parameter's shape or values. */
#ifndef PS_BASE_UPDATE_H
#define PS_BASE_UPDATE_H
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum { PS_STATE_BLOCK = 256 };        /* elements that share a scale */

/* Computes the 256 values of an 8-bit code in ascending order: the dynamic map of bitsandbytes and torchao. There
 * are seven decades. Decade i, from the smallest on, has the means of 2^i equal intervals of [0.1, 1] (2^(i + 1)
 * without signs), times 10^(i - 6). With signs, it also has their negatives. 0 and 1 are added. */
static inline void ps_state_map(float *map, bool with_sign)
{
    static const float power[7] = { 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f };
    int n = 0, zero = with_sign ? 127 : 0;
    map[zero] = 0, map[255] = 1;
    for (int i = 0; i < 7; i++) {
        int parts = (with_sign ? 1 : 2) << i;
        float step = (1.0f - 0.1f) / (float)parts;
        for (int k = 0; k < parts; k++) {
            float low = k < (parts + 1) / 2 ? 0.1f + step * (float)k : 1.0f - step * (float)(parts - k);
            float high = k + 1 < (parts + 1) / 2 ? 0.1f + step * (float)(k + 1) : 1.0f - step * (float)(parts - k - 1);
            float value = power[i] * ((low + high) / 2.0f);
            n++;
            map[zero + n] = value;
            if (with_sign) map[zero - n] = -value;
        }
    }
}

/* Returns the midpoint between the values of `code` and `code` + 1. From this number on, `code` + 1 is used. */
static inline float ps_state_midpoint(const float *map, int code) { return (map[code] + map[code + 1]) * 0.5f; }

/* Returns the factor of Muon's step for a matrix of this shape. adjust: the attribute of muon_. */
static inline double ps_muon_ratio(int adjust, int64_t rows, int64_t cols)
{
    double ratio = (double)rows / (double)cols, most = (double)(rows > cols ? rows : cols);
    if (adjust == 1) return 0.2 * sqrt(most);
    return sqrt(adjust == 0 && ratio < 1 ? 1 : ratio);
}

/* Returns Adafactor's step size. rms: of the parameter. hugging_face: use the rule of transformers, which has the
 * three switches and uses lr only without relative_step; otherwise PyTorch's rule. */
static inline double ps_adafactor_rate(int64_t step, double lr, double eps2, double rms, bool hugging_face,
                                       bool scale_parameter, bool relative_step, bool warmup_init)
{
    double t = (double)step, scale = eps2 > rms ? eps2 : rms, root = 1 / sqrt(t);
    if (!hugging_face) return scale * (lr < root ? lr : root);
    if (relative_step) {
        double most = warmup_init ? 1e-6 * t : 1e-2;
        lr = most < root ? most : root;
    }
    return lr * (scale_parameter ? scale : 1);
}
#endif
