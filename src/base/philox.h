/* SPDX-License-Identifier: BSD-3-Clause
 * Philox4x32-10, the counter-based generator of random numbers of Salmon et al., "Parallel random numbers: as easy as
 * 1, 2, 3" (SC 2011). Each element of each stream depends only on the key and the counter. It does not depend on the
 * order of computation or on the number of threads. */
#ifndef PS_BASE_PHILOX_H
#define PS_BASE_PHILOX_H
#include <stdint.h>
#include "base/half.h"

typedef struct ps_philox { uint32_t v[4]; } ps_philox;

/* Returns the sample number for the dropout of a segment in a packed row. The number is relative to the row's own
 * number, modulo 2^32. `begin` is the first position of the segment. The multiplier is 2^32 divided by the golden
 * ratio. The multiplier spreads the numbers, so that segments of nearby rows rarely have the same number.
 * lua/ps/tensor/functional.lua computes the same numbers. */
PS_BOTH uint64_t ps_segment_sample(int64_t begin) { return (uint64_t)begin * 0x9E3779B1u; }

PS_BOTH ps_philox ps_philox4x32(uint64_t key, uint64_t counter_lo, uint64_t counter_hi)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter_lo, c1 = (uint32_t)(counter_lo >> 32);
    uint32_t c2 = (uint32_t)counter_hi, c3 = (uint32_t)(counter_hi >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    ps_philox drawn = { { c0, c1, c2, c3 } };
    return drawn;
}

/* Converts 24 bits of a random number to a float in [0, 1). */
PS_BOTH float ps_unit_f32(uint32_t u) { return (float)(u >> 8) * 0x1p-24f; }
#endif
