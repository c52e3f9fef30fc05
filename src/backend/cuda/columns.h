/* SPDX-License-Identifier: BSD-3-Clause
 * Sums of a matrix's columns. reduce.cu uses these functions, and so do kernels that compute the matrix and its sums in
 * one pass. Sums are computed in fp64 in a fixed order: each group of threads sums its rows, then a block adds the sums
 * of its groups, and then combine_kernel adds the sums of the matrix's parts. */
#ifndef PS_CUDA_COLUMNS_H
#define PS_CUDA_COLUMNS_H
#include "backend/cuda/device.h"

enum { SUM, MAX, MIN };                              /* the kind of reduction */

/* The destination of a reduction. The rows that are reduced can be split into parts. If there is one part, the result
 * for column i is written to y. Otherwise the result of part s for column i is written to parts[s * kept + i]. */
struct target { void *parts, *y; int y_type, op; bool accumulate; double divide; };

DEV void finish(const target &t, int64_t i, double v)
{
    if (t.op == SUM) v = v / t.divide;
    store_d(t.y, t.y_type, i, t.accumulate ? load_d(t.y, t.y_type, i) + v : v);
}
DEV void finish(const target &t, int64_t i, int64_t v)
{
    if (t.accumulate) v = (int64_t)((uint64_t)load_i(t.y, t.y_type, i) + (uint64_t)v);
    store_i(t.y, t.y_type, i, v);
}
template <class A> DEV void deliver(const target &t, int64_t kept, int64_t i, int part, int parts, A v)
{
    if (parts > 1) ((A *)t.parts)[part * kept + i] = v;
    else finish(t, i, v);
}

/* A block has COLUMN_THREADS packs of columns and ROW_GROUPS groups of threads. The groups process the rows in turn,
 * AHEAD rows at a time. */
enum { COLUMN_THREADS = 128, ROW_GROUPS = 4 };

/* Sums a matrix [rows, kept] over its rows. The block sums its own packs of columns over part blockIdx.y of the rows.
 * f.load(i, j) reads the inputs of pack i of row j. f.finish(i, j, loaded) computes the pack<T> from those inputs. */
template <class T, int AHEAD, class F> DEV void sum_columns_of(const target &t, int64_t kept, int64_t rows, F f)
{
    const int W = pack<T>::n;
    __shared__ double shared[ROW_GROUPS][W][COLUMN_THREADS];
    int part = blockIdx.y, parts = gridDim.y;
    int group = threadIdx.x / COLUMN_THREADS, column = threadIdx.x % COLUMN_THREADS;
    int64_t step = (rows + parts - 1) / parts, end = min((part + 1) * step, rows);
    int64_t i = (int64_t)blockIdx.x * COLUMN_THREADS + column;
    bool there = i < kept / W;
    double v[W] = { 0 };
    for (int64_t j = part * step + group * AHEAD; there && j < end; j += ROW_GROUPS * AHEAD) {
        decltype(f.load(i, j)) ahead[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++)
            if (j + r < end) ahead[r] = f.load(i, j + r);
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            if (j + r >= end) continue;
            pack<T> one = f.finish(i, j + r, ahead[r]);
#pragma unroll
            for (int k = 0; k < W; k++) v[k] += (double)up(one.v[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < W; k++) shared[group][k][column] = v[k];
    __syncthreads();
    if (group > 0 || !there) return;
#pragma unroll
    for (int k = 0; k < W; k++) {
        for (int g = 1; g < ROW_GROUPS; g++) v[k] += shared[g][k][column];
        deliver(t, kept, i * W + k, part, parts, v[k]);
    }
}

/* Returns the grid for a kernel that calls sum_columns_of. Its blocks have COLUMN_THREADS * ROW_GROUPS threads. */
static inline dim3 column_blocks(int64_t packs, int64_t parts)
{
    return dim3((unsigned)ps_cu_div_up(packs, COLUMN_THREADS), (unsigned)parts);
}

/* Adds up the parts of fp64 sums (reduce.cu). */
int ps_cuda_combine_sums(const target *t, int64_t kept, int64_t parts);
#endif
