/* SPDX-License-Identifier: BSD-3-Clause
 * Converts fp32 values to bf16 and fp16 and back, by integer arithmetic. bf16 and fp16 values are stored as uint16_t.
 * The conversions round to nearest, ties to even. NaN stays NaN. A value too large for fp16 becomes infinity.
 * Subnormals are kept. The vector kernels produce the same bits. */
#ifndef PS_BASE_HALF_H
#define PS_BASE_HALF_H
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Qualifiers of functions for the host. If CUDA's compiler reads this file, the functions are compiled for the device
 * too. The functions are inline, so that the host and all kernels compute the same bits. */
#ifdef __CUDACC__
#define PS_BOTH static __host__ __device__ inline
#else
#define PS_BOTH static inline
#endif

PS_BOTH uint32_t ps_f32_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
PS_BOTH float ps_bits_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

PS_BOTH float ps_bf16_to_f32(uint16_t h) { return ps_bits_f32((uint32_t)h << 16); }
PS_BOTH uint16_t ps_f32_to_bf16(float f)
{
    uint32_t u = ps_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);  /* a NaN becomes a quiet NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

PS_BOTH float ps_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;
    if (exp == 31) return ps_bits_f32(sign | 0x7f800000u | (man << 13) | (man ? 0x400000u : 0));
    if (exp == 0) {                                       /* zero or subnormal: value = man * 2^-24 */
        float v = (float)man * 0x1p-24f;
        return ps_bits_f32(ps_f32_bits(v) | sign);
    }
    return ps_bits_f32(sign | ((exp + 112) << 23) | (man << 13));
}
PS_BOTH uint16_t ps_f32_to_f16(float f)
{
    uint32_t u = ps_f32_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | ((a >> 13) & 0x3ff));  /* NaN */
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);                      /* rounds to infinity */
    if (a < 0x38800000u) {                                /* subnormal: the addition of 0.5 rounds to a multiple of
                                                           * 2^-24 */
        float v = ps_bits_f32(a) + 0.5f;
        return (uint16_t)(sign | (ps_f32_bits(v) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a + 0xc8000fffu + ((a >> 13) & 1)) >> 13));
}

/* Splits an fp32 value M into a bf16 weight W and a remainder lo. W is M rounded to nearest, ties away from zero. lo
 * is the lower 16 bits of M. The value is restored by M = ((W - (lo >> 15)) << 16) | lo, also for ties. All NaNs
 * become the same NaN. */
PS_BOTH uint16_t ps_remainder_split(uint32_t m, uint16_t *lo)
{
    bool nan = (m & 0x7fffffffu) > 0x7f800000u;
    *lo = nan ? 0 : (uint16_t)m;
    return nan ? 0x7fc0 : (uint16_t)((m + 0x8000u) >> 16);
}
PS_BOTH uint32_t ps_remainder_join(uint16_t w, uint16_t lo)
{
    return (uint32_t)(uint16_t)(w - (lo >> 15)) << 16 | lo;
}
#endif
