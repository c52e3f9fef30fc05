/* SPDX-License-Identifier: BSD-3-Clause
 * Formulas that the updates of optimizers need on all backends: 8-bit codes of states, and rates that depend on a
 * parameter's shape or values. */
#ifndef PS_BASE_UPDATE_H
#define PS_BASE_UPDATE_H
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/half.h"

enum { PS_STATE_BLOCK = 256 };        /* number of elements that have one common scale */
enum { PS_LAMB_UNIT = 4096 };         /* number of elements whose squares LAMB sums at a time */

/* -- 8-bit codes of states --------------------------------------------------------------------------------------- */
/* 8-bit codes for numbers in [-1, 1]. They use the dynamic map of bitsandbytes and torchao (Dettmers et al. 2022,
 * "8-bit Optimizers via Block-wise Quantization"). The map is a list of 256 values in ascending order. The code of a
 * value is the value's index in the list. A number that is not in the list has the code of the nearest value. The map
 * contains 0, 1 and seven decades. Decade i divides [0.1, 1] into 2^i equal intervals, or into 2^(i + 1) intervals if
 * there are no signs. The values of the decade are the midpoints of the intervals, times 10^(i - 6). If there are
 * signs, the map also contains the negative of each of these values.
 *
 * Both conversions are computed, so that vector code needs no table of 256 values. In the formulas, `number` is code
 * - 127 with signs, and code without signs. Within a decade, a value is a linear function of its number. The decade
 * is found from q, which is 2 * number with signs and number + 1 without signs. The index of the decade is (exponent
 * field of q) % 8. The values differ from torchao's values by at most 5 units in the last place. The arrays have 16
 * elements because a vector has up to 16 lanes. The second half of each array is equal to the first half. */
typedef struct ps_codes {
    float slope[16], base[16];        /* value = slope * q + base. The sign of base is the sign of q. */
    float bound[16];                  /* range j + 1 of magnitudes begins at bound[j] */
    float rate[16], shift[16];        /* number = first + min(whole part of (rate * magnitude + shift), limit) */
    float limit[16];
    int32_t first[16];
} ps_codes;
/* The upper 16 bits of a magnitude's bit pattern are a nearly linear function of the magnitude's logarithm. The index
 * of the magnitude's range is therefore max(bits - LEAST, 0) * SPREAD / 2^16, or this index plus 1. */
enum { PS_CODES_LEAST = 0x34e0, PS_CODES_SPREAD = 154 };

static inline void ps_codes_make(ps_codes *c, bool has_sign)
{
    static const double power[7] = { 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1 };
    double last = 0;                  /* largest value of the previous decade */
    for (int i = 0; i < 7; i++) {
        int parts = (has_sign ? 1 : 2) << i, first = has_sign ? parts : parts - 1, q = has_sign ? 2 * first : first + 1;
        double width = power[i] * 0.9 / parts, least = power[i] * 0.1 + width / 2;
        c->slope[i] = (float)(has_sign ? width / 2 : width);
        c->base[i] = (float)(least - (double)c->slope[i] * q);
        if (i > 0) c->bound[i - 1] = (float)((last + least) / 2);
        c->rate[i] = (float)(1 / width), c->shift[i] = (float)(-power[i] * 0.1 / width);
        c->first[i] = first, c->limit[i] = (float)(parts - 1);
        last = power[i] - width / 2;
        if (i > 0) continue;
        c->first[0] = 0, c->limit[0] = (float)parts;           /* 0 belongs to the lowest decade. The numbers of this
                                                                * decade are 0 and 1 with signs, and 0, 1 and 2
                                                                * without signs. The midpoints between the values of
                                                                * this decade are on a line. */
        if (has_sign) c->slope[0] = (float)(least / 2), c->base[0] = 0;
        c->rate[0] = has_sign ? (float)(2 / least) : (float)(1 / (least / 2 + width / 2));
        c->shift[0] = has_sign ? 0 : (float)(1 - (double)c->rate[0] * (least / 2));
    }
    c->bound[6] = (float)((last + 1) / 2), c->bound[7] = INFINITY;
    c->rate[7] = c->shift[7] = c->limit[7] = 0, c->first[7] = has_sign ? 128 : 255;
    /* The value 1 has q = 256. Without signs, the value 0 has q = 1, which has the same index of the decade. */
    c->slope[7] = has_sign ? 1.0f / 256 : 1.0f / 255, c->base[7] = has_sign ? 0 : -1.0f / 255;
    for (int i = 0; i < 8; i++) {
        c->slope[i + 8] = c->slope[i], c->base[i + 8] = c->base[i], c->bound[i + 8] = c->bound[i];
        c->rate[i + 8] = c->rate[i], c->shift[i + 8] = c->shift[i], c->limit[i + 8] = c->limit[i];
        c->first[i + 8] = c->first[i];
    }
}

/* Returns the value of a code. */
PS_BOTH float ps_codes_value(const ps_codes *c, int code, bool has_sign)
{
    float q = (float)(has_sign ? 2 * (code - 127) : code + 1);
    int j = (int)(ps_f32_bits(q) >> 23 & 7);
    return fmaf(c->slope[j], q, has_sign && q < 0 ? -c->base[j] : c->base[j]);
}

/* Returns the code of the value nearest to x. x must be greater than -1 - 2^-22 and less than 1 + 2^-22. Without
 * signs, x must also be at least 0. With signs, the smallest value is -0.993, because -1 has no code. */
PS_BOTH int ps_codes_nearest(const ps_codes *c, float x, bool has_sign)
{
    float magnitude = fabsf(x);
    int32_t high = (int32_t)(ps_f32_bits(magnitude) >> 16) - PS_CODES_LEAST;
    int j = (int)((high > 0 ? (uint32_t)high : 0) * PS_CODES_SPREAD >> 16);
    j += magnitude >= c->bound[j];
    float k = fmaf(magnitude, c->rate[j], c->shift[j]);
    int number = c->first[j] + (int32_t)(k < c->limit[j] ? k : c->limit[j]);
    if (!has_sign) return number;
    number = x < 0 ? 127 - number : 127 + number;
    return number < 0 ? 0 : number;
}

/* Returns the factor by which the elements of a block are multiplied before they are quantised. `most` is the largest
 * magnitude in the block. It must be finite. */
PS_BOTH float ps_codes_factor(float most)
{
    float factor = most > 0 ? 1 / most : 0;
    return factor < FLT_MAX ? factor : FLT_MAX;              /* 1 / most overflows for subnormal numbers */
}

/* Returns the factor of Muon's step for a matrix of this shape. `adjust` is the attribute of the op muon_. */
static inline double ps_muon_ratio(int adjust, int64_t rows, int64_t cols)
{
    double ratio = (double)rows / (double)cols, most = (double)(rows > cols ? rows : cols);
    if (adjust == 1) return 0.2 * sqrt(most);
    return sqrt(adjust == 0 && ratio < 1 ? 1 : ratio);
}

/* Returns the step size of Adafactor. `rms` is the root mean square of the parameter. If `hugging_face` is true, the
 * rule of Hugging Face's transformers applies. This rule depends on the three last parameters, and uses lr only if
 * relative_step is false. If `hugging_face` is false, PyTorch's rule applies. If `rms` is NaN, eps2 is used in its
 * place, as in both. */
PS_BOTH double ps_adafactor_rate(int64_t step, double lr, double eps2, double rms, bool hugging_face,
                                 bool scale_parameter, bool relative_step, bool warmup_init)
{
    double t = (double)step, scale = rms > eps2 ? rms : eps2, root = 1 / sqrt(t);
    if (!hugging_face) return scale * (lr < root ? lr : root);
    if (relative_step) {
        double most = warmup_init ? 1e-6 * t : 1e-2;
        lr = most < root ? most : root;
    }
    return lr * (scale_parameter ? scale : 1);
}

/* Returns the average of Adafactor after an update: (1 - take) * old + take * mean. PyTorch's rule is torch.lerp, which
 * returns NaN if `mean` is infinite and take >= 0.5, or if `old` is infinite and take < 0.5. */
static inline double ps_adafactor_average(double old, double mean, double take, bool hugging_face)
{
    if (hugging_face) return (1 - take) * old + take * mean;
    return take < 0.5 ? old + take * (mean - old) : mean - (1 - take) * (mean - old);
}

/* Returns the number by which Adafactor divides an update whose root mean square is `rms` times the threshold. It is at
 * least 1. If `rms` is NaN, Hugging Face's rule returns NaN, and PyTorch's rule returns 1. */
PS_BOTH double ps_adafactor_divisor(double rms, bool hugging_face)
{
    if (hugging_face) return rms < 1 ? 1 : rms;
    return rms > 1 ? rms : 1;
}
#endif
