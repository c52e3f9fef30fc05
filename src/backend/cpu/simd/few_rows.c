/* SPDX-License-Identifier: BSD-3-Clause
 * Products of a few rows with a large matrix, as a model makes them that continues a text token by token: each weight
 * is read once and used once, so the speed is that of memory. Threads share out the matrix in pieces of fixed sizes, so
 * that sums are the same for any number of threads, and the same for a row alone and among others. */
#include <stdbool.h>
#include "backend/cpu/gemm.h"
#include "backend/cpu/simd.h"

enum {
    DEPTH = PS_FEW_DEPTH,                            /* rows of b [K, N] in a piece: one partial sum each */
    WIDTH = 4096,                                    /* columns in a piece, of all rows: their sums stay in L1 */
    SUMS = 512,                                      /* of the parts, that a thread makes at a time */
    OUTPUTS = 32,                                    /* rows of b [N, K] in a piece */
    LINES = 4                                        /* of which so many are read side by side */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Asks for bytes that are read with the next lines: lines are too short for what the machine foresees itself. */
SIMD void ahead(const char *p) { __builtin_prefetch(p, 0, 3); }

/* -- b [K, N], rows of N neighbours -------------------------------------------------------------------------------- */
/* sum [n] += x b of a line of b. One line after the other, the matrix is read as it lies in memory, which is faster
 * than several lines at a time, though their sums would stay in registers. next: bytes from there to the next line, 0:
 * it was asked for. */
SIMD void add_line(float *sum, float x, const char *b, int64_t next, int64_t n, int T)
{
    int64_t size = T == 0 ? 4 : 2, j = 0;
    vf by = vf_set(x);
    for (; j + VL <= n; j += VL) {
        if (next) ahead(b + next + j * size);
        vf_store(sum + j, vf_fma(by, vf_get(b, j, T), vf_load(sum + j)));
    }
    if (j == n) return;
    int rest = (int)(n - j);
    vf_put_n(sum, j, 0, rest, vf_fma(by, vf_get_n(b, j, T, rest, 0), vf_get_n(sum, j, 0, rest, 0)));
}

SIMD void piece_of_rows(const ps_gemm *g, const float *x, float *part, int64_t k0, int64_t j0, int64_t width, int T)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols, size = T == 0 ? 4 : 2, ld = g->b.stride_row * size;
    int64_t depth = least(DEPTH, K - k0), n = least(width, N - j0);
    float *sum = part + k0 / DEPTH * M * N + j0;
    for (int64_t m = 0; m < M; m++) memset(sum + m * N, 0, (size_t)n * 4);
    for (int64_t k = k0; k < k0 + depth; k++) {
        const char *b = (const char *)g->b.data + k * ld + j0 * size;
        for (int64_t m = 0; m < M; m++) add_line(sum + m * N, x[m * K + k], b, m == 0 ? ld : 0, n, T);
    }
}

/* c [i .. i + n) = the sum of the pieces' parts, in their order; stride: elements of a part. */
SIMD void add_parts(float *c, const float *part, int64_t i, int64_t n, int64_t pieces, int64_t stride)
{
    for (int64_t j = i; j < i + n; j += VL) {
        int m = i + n - j < VL ? (int)(i + n - j) : VL;
        vf s = vf_get_n(part, j, 0, m, 0);
        for (int64_t p = 1; p < pieces; p++) s += vf_get_n(part + p * stride, j, 0, m, 0);
        vf_put_n(c, j, 0, m, s);
    }
}

SIMD void by_rows(const ps_gemm *g, const float *x, float *part, float *c, int T)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols, numel = M * N, width = WIDTH / (M < 3 ? M : 4);
    int64_t pieces = (K + DEPTH - 1) / DEPTH, blocks = (N + width - 1) / width;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pieces * blocks; i++)
            piece_of_rows(g, x, part, i / blocks * DEPTH, i % blocks * width, width, T);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < numel; i += SUMS) add_parts(c, part, i, least(SUMS, numel - i), pieces, numel);
    }
}

/* -- b [N, K], rows of K neighbours (out_in) ----------------------------------------------------------------------- */
/* vf_hsum of four vectors, its order of sums. */
SIMD void hsum4(float *out, vf a, vf b, vf c, vf d)
{
#define HALVES(x, y) \
    (__builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) \
     + __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define QUARTERS(x, y) \
    (__builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) \
     + __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
    vf ab = HALVES(a, b), cd = HALVES(c, d), s = QUARTERS(ab, cd);
    s += __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    s += __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    for (int i = 0; i < LINES; i++) out[i] = s[4 * i];
#undef HALVES
#undef QUARTERS
}

/* c [M, N] from column n on: x [M, K] times LINES lines of b. */
SIMD void dots(float *c, const float *x, const char *b, int64_t ld, int64_t K, int64_t N, int M, int T)
{
    int64_t size = T == 0 ? 4 : 2, k = 0;
    vf s[PS_FEW_ROWS][LINES], w[LINES];
    for (int m = 0; m < M; m++)
        for (int i = 0; i < LINES; i++) s[m][i] = vf_zero();
    for (; k + VL <= K; k += VL) {
        for (int i = 0; i < LINES; i++) ahead(b + (LINES + i) * ld * size + k * size);
        for (int i = 0; i < LINES; i++) w[i] = vf_get(b + i * ld * size, k, T);
        for (int m = 0; m < M; m++)
            for (int i = 0; i < LINES; i++) s[m][i] = vf_fma(vf_load(x + m * K + k), w[i], s[m][i]);
    }
    int rest = (int)(K - k);
    if (rest > 0) {
        for (int i = 0; i < LINES; i++) w[i] = vf_get_n(b + i * ld * size, k, T, rest, 0);
        for (int m = 0; m < M; m++)
            for (int i = 0; i < LINES; i++) s[m][i] = vf_fma(vf_get_n(x + m * K, k, 0, rest, 0), w[i], s[m][i]);
    }
    for (int m = 0; m < M; m++) hsum4(c + m * N, s[m][0], s[m][1], s[m][2], s[m][3]);
}

/* The same with one line. */
SIMD float dot(const float *x, const char *b, int64_t K, int T)
{
    vf s = vf_zero();
    for (int64_t k = 0; k < K; k += VL) {
        int m = K - k < VL ? (int)(K - k) : VL;
        s = vf_fma(vf_get_n(x, k, 0, m, 0), vf_get_n(b, k, T, m, 0), s);
    }
    return vf_hsum(s);
}

SIMD void by_columns(const ps_gemm *g, const float *x, float *c, int T)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols, ld = g->b.stride_col, size = T == 0 ? 4 : 2;
#pragma omp parallel for schedule(static)
    for (int64_t n0 = 0; n0 < N; n0 += OUTPUTS)
        for (int64_t n = n0; n < least(n0 + OUTPUTS, N); n += LINES) {
            const char *b = (const char *)g->b.data + n * ld * size;
            if (n + LINES > N) {
                for (int64_t m = 0; m < M; m++)
                    for (int64_t i = n; i < N; i++) c[m * N + i] = dot(x + m * K, b + (i - n) * ld * size, K, T);
            } else if (M == 1) dots(c + n, x, b, ld, K, N, 1, T);
            else if (M == 2) dots(c + n, x, b, ld, K, N, 2, T);
            else if (M == 3) dots(c + n, x, b, ld, K, N, 3, T);
            else dots(c + n, x, b, ld, K, N, 4, T);
        }
}

#define BY_TYPE(body, ...) \
    do { \
        if (g->b.dtype == PS_F32) body(__VA_ARGS__, 0); \
        else if (g->b.dtype == PS_BF16) body(__VA_ARGS__, 1); \
        else body(__VA_ARGS__, 2); \
    } while (0)

void PS_ISA_FN(ps_cpu_few_rows)(const ps_gemm *g, const float *x, float *part, float *c)
{
    if (g->b.stride_col == 1) BY_TYPE(by_rows, g, x, part, c);
    else BY_TYPE(by_columns, g, x, c);
}
