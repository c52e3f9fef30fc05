/* SPDX-License-Identifier: BSD-3-Clause
 * Divides the rows of a matrix among threads, for products that read each row once. Each thread reads its rows as a few
 * long streams. */
#ifndef PS_CPU_SIMD_STREAMS_H
#define PS_CPU_SIMD_STREAMS_H
#include <omp.h>
#include <stdint.h>

/* Returns the number of rows for each thread. It is a multiple of `unit`. */
static inline int64_t ps_rows_of_thread(int64_t rows, int64_t unit)
{
    int64_t per = unit * omp_get_max_threads();
    return (rows + per - 1) / per * unit;
}
#endif
