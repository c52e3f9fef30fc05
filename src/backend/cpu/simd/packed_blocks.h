/* SPDX-License-Identifier: BSD-3-Clause
 * Constants and functions that packed.c and packed_int8.c share. */
#ifndef PS_CPU_PACKED_BLOCKS_H
#define PS_CPU_PACKED_BLOCKS_H
#include "backend/cpu/packed.h"
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/simd/streams.h"
#include "base/blocks.h"

enum {
    W = PARTS,                                       /* number of vectors that together have 16 lanes */
    LINES = 4,                                       /* number of streams; the streams read different rows of the matrix
                                                      * at the same time */
    OUTPUTS = 32                                     /* if x has several rows, the number of rows of the matrix in a
                                                      * piece */
};

/* Returns the number of rows of the matrix in a piece. If x has several rows, each piece is read several times, so
 * pieces are small. If x has one row, each thread has one piece, so that the thread's streams are as long as
 * possible. */
static inline int64_t rows_of_piece(const ps_packed_matrix *w, int64_t M)
{
    return M > 1 ? OUTPUTS : ps_rows_of_thread(w->rows, LINES);
}

/* Returns the fp16 number at s, which can be unaligned. */
static inline float half_at(const uint8_t *s)
{
    uint16_t h;
    memcpy(&h, s, 2);
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    return ps_f16_to_f32(h);
#endif
}

/* Returns the number of parts, of 32 values each, in a block of type T. T is a constant, so that loops over the parts
 * have constant offsets and shifts. */
SIMD int parts_of(int T)
{
    return T == PS_Q4_K || T == PS_Q5_K || T == PS_Q6_K ? 8 : T == PS_NF4 || T == PS_NF4_DOUBLE ? 2 : 1;
}

/* Cases of a switch that run body(.., T). There is one case for each type T for which ps_blocks_int8() returns true. */
#define PS_INT8_CASES(body, ...) \
    case PS_Q4_0: body(__VA_ARGS__, PS_Q4_0); break; \
    case PS_Q4_1: body(__VA_ARGS__, PS_Q4_1); break; \
    case PS_Q5_0: body(__VA_ARGS__, PS_Q5_0); break; \
    case PS_Q5_1: body(__VA_ARGS__, PS_Q5_1); break; \
    case PS_Q8_0: body(__VA_ARGS__, PS_Q8_0); break; \
    case PS_Q4_K: body(__VA_ARGS__, PS_Q4_K); break; \
    case PS_Q5_K: body(__VA_ARGS__, PS_Q5_K); break; \
    case PS_Q6_K: body(__VA_ARGS__, PS_Q6_K); break;
#endif
