/* SPDX-License-Identifier: BSD-3-Clause
 * Products of a few rows with a large matrix. A model computes such products when it continues a text token by token.
 * Each weight is read only once, so memory limits the speed. The matrix is divided into pieces, and the pieces among
 * threads. If the terms of a sum are contiguous in b, one piece computes the whole sum. Otherwise each piece computes a
 * partial sum of a fixed number of terms. Hence sums depend neither on the number of threads nor on the other rows of
 * x. */
#include "backend/cpu/gemm.h"
#include "backend/cpu/simd.h"
#include "backend/cpu/simd/streams.h"

enum {
    DEPTH = PS_FEW_DEPTH,                            /* number of rows of b [K, N] in a piece; each piece computes its
                                                      * own partial sums */
    WIDTH = 4096,                                    /* number of columns in a piece; so small that the sums of all rows
                                                      * of x stay in the L1 cache */
    SUMS = 512,                                      /* number of partial sums that a thread computes at a time */
    LINES = 4                                        /* number of streams in a piece; each stream reads one quarter of
                                                      * the piece */
};

/* The order of reads. Memory is faster if a few streams read it than if one stream reads it. It is fastest if each
 * stream reads consecutive lines over several pages and is far from the other streams. Hence a piece of n lines is
 * divided into LINES quarters, and each quarter is read by one stream. Step t reads the lines t + i * quarter(n) for i
 * from 0 to lines_at(n, t) - 1. */
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t quarter(int64_t n) { return (n + LINES - 1) / LINES; }
static int64_t lines_at(int64_t n, int64_t t) { return (n - t + quarter(n) - 1) / quarter(n); }
/* Returns the distance from a line of step t to the next line of the same stream. After the last step, the next line is
 * in the next piece. */
static int64_t to_next(int64_t n, int64_t t) { return t + 1 < quarter(n) ? 1 : n - quarter(n) + 1; }

/* Prefetches bytes at p, in the next line of a stream. A line is too short for the processor to predict the next
 * line. */
SIMD void ahead(const char *p) { __builtin_prefetch(p, 0, 3); }

/* Runs body(.., T), where T is a constant for the type of g->b. The macro must be used inside a parallel region. The
 * compiler turns the region into a function, in which a constant from outside the region would be a variable. */
#define BY_TYPE(body, ...) \
    do { \
        if (g->b.dtype == PS_F32) body(__VA_ARGS__, 0); \
        else if (g->b.dtype == PS_BF16) body(__VA_ARGS__, 1); \
        else body(__VA_ARGS__, 2); \
    } while (0)

/* -- b [K, N], with N adjacent elements in each row ---------------------------------------------------------------- */
/* For each of M rows, adds by[m][0] * line 0 + by[m][1] * line 1 + ... to the sum of row m. The sum of row m has n
 * elements and begins at sum + m * apart. The `lines` lines begin at b, are ld bytes apart, and are added in this
 * order. Each weight is read and converted to fp32 only once for all M rows. `next` is the distance in bytes from a
 * line to the line that is prefetched. If it is 0, nothing is prefetched. */
SIMD void add_lines(float *sum, int64_t apart, float by[][LINES], const char *b, int64_t ld, int64_t next, int64_t n,
                    int lines, int M, int T)
{
#ifdef __AVX512F__
    enum { MOST = 2, SEVERAL = 2 };
#else
    enum { MOST = 2, SEVERAL = 1 };                  /* number of vectors of a line that are processed together: MOST
                                                      * for one row of x, and SEVERAL for several rows, whose sums use
                                                      * all registers */
#endif
    int of = M == 1 ? MOST : SEVERAL;                /* number of vectors of a line that are processed together */
    int64_t size = T == 0 ? 4 : 2, j = 0;
    vf x[PS_FEW_ROWS][LINES];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++) x[m][i] = vf_set(by[m][i]);
    for (; j + of * VL <= n; j += of * VL) {
        vf s[PS_FEW_ROWS][MOST], w[MOST];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < of; v++) s[m][v] = vf_load(sum + m * apart + j + v * VL);
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++) {
            const char *line = b + i * ld;
            if (next && j * size % 64 == 0)
                for (int64_t k = 0; k < of * VL * size; k += 64) ahead(line + next + j * size + k);
#pragma GCC unroll 2
            for (int v = 0; v < of; v++) w[v] = vf_get(line, j + v * VL, T);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int v = 0; v < of; v++) s[m][v] = vf_fma(x[m][i], w[v], s[m][v]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < of; v++) vf_store(sum + m * apart + j + v * VL, s[m][v]);
    }
    for (; j < n; j += VL) {
        int rest = n - j < VL ? (int)(n - j) : VL;
        for (int m = 0; m < M; m++) {
            vf s = vf_get_n(sum + m * apart, j, 0, rest, 0);
#pragma GCC unroll 4
            for (int i = 0; i < lines; i++) s = vf_fma(x[m][i], vf_get_n(b + i * ld, j, T, rest, 0), s);
            vf_put_n(sum + m * apart, j, 0, rest, s);
        }
    }
}

SIMD void piece_of_rows(const ps_gemm *g, const float *x, float *part, int64_t k0, int64_t j0, int64_t width, int T)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols, size = T == 0 ? 4 : 2, ld = g->b.stride_row * size;
    int64_t depth = least(DEPTH, K - k0), n = least(width, N - j0), apart = quarter(depth);
    float *sum = part + k0 / DEPTH * M * N + j0;
    for (int64_t m = 0; m < M; m++) memset(sum + m * N, 0, (size_t)n * 4);
    for (int64_t t = 0; t < apart; t++) {
        const char *b = (const char *)g->b.data + (k0 + t) * ld + j0 * size;
        int64_t lines = lines_at(depth, t), next = to_next(depth, t) * ld;
        float by[PS_FEW_ROWS][LINES];
        for (int64_t m = 0; m < M; m++)
            for (int64_t i = 0; i < lines; i++) by[m][i] = x[m * K + k0 + t + i * apart];
        if (lines < LINES) {
            for (int64_t m = 0; m < M; m++)
                for (int64_t i = 0; i < lines; i++)
                    add_lines(sum + m * N, 0, (float(*)[LINES])&by[m][i], b + i * apart * ld, 0, 0, n, 1, 1, T);
        } else if (M == 1) add_lines(sum, N, by, b, apart * ld, next, n, LINES, 1, T);
        else if (M == 2) add_lines(sum, N, by, b, apart * ld, next, n, LINES, 2, T);
        else if (M == 3) add_lines(sum, N, by, b, apart * ld, next, n, LINES, 3, T);
        else add_lines(sum, N, by, b, apart * ld, next, n, LINES, 4, T);
    }
}

/* Adds the partial sums of all pieces, in the order of the pieces, and stores the results in the n elements c[i], c[i +
 * 1], and so on. `stride` is the distance in elements between the partial sums of two pieces. */
SIMD void add_parts(float *c, const float *part, int64_t i, int64_t n, int64_t pieces, int64_t stride)
{
    for (int64_t j = i; j < i + n; j += VL) {
        int m = i + n - j < VL ? (int)(i + n - j) : VL;
        vf s = vf_get_n(part, j, 0, m, 0);
        for (int64_t p = 1; p < pieces; p++) s += vf_get_n(part + p * stride, j, 0, m, 0);
        vf_put_n(c, j, 0, m, s);
    }
}

static void by_rows(const ps_gemm *g, const float *x, float *part, float *c)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols, numel = M * N, width = WIDTH / (M < 3 ? M : 4);
    int64_t pieces = (K + DEPTH - 1) / DEPTH, blocks = (N + width - 1) / width;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pieces * blocks; i++)
            BY_TYPE(piece_of_rows, g, x, part, i / blocks * DEPTH, i % blocks * width, width);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < numel; i += SUMS) add_parts(c, part, i, least(SUMS, numel - i), pieces, numel);
    }
}

/* -- b [N, K], with K adjacent elements in each row (out_in) ------------------------------------------------------- */
/* Computes vf_hsum() of each of four vectors, with the same order of additions. */
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

/* Multiplies x [M, K] by LINES lines that begin at b and are ld bytes apart, and stores the products in out [M, LINES].
 * `next` is the distance in bytes from a line to the line that the same stream reads next. */
SIMD void dots(float *out, const float *x, const char *b, int64_t ld, int64_t next, int64_t K, int M, int T)
{
    int64_t size = T == 0 ? 4 : 2, k = 0;
    vf s[PS_FEW_ROWS][LINES], w[LINES];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < LINES; i++) s[m][i] = vf_zero();
    for (; k + VL <= K; k += VL) {
#pragma GCC unroll 4
        for (int i = 0; i < LINES; i++) {
            if (T == 0 || k % (2 * VL) == 0) ahead(b + i * ld + next + k * size);
            w[i] = vf_get(b + i * ld, k, T);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            vf by = vf_load(x + m * K + k);
#pragma GCC unroll 4
            for (int i = 0; i < LINES; i++) s[m][i] = vf_fma(by, w[i], s[m][i]);
        }
    }
    int rest = (int)(K - k);
    if (rest > 0) {
#pragma GCC unroll 4
        for (int i = 0; i < LINES; i++) w[i] = vf_get_n(b + i * ld, k, T, rest, 0);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            vf by = vf_get_n(x + m * K, k, 0, rest, 0);
#pragma GCC unroll 4
            for (int i = 0; i < LINES; i++) s[m][i] = vf_fma(by, w[i], s[m][i]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) hsum4(out + m * LINES, s[m][0], s[m][1], s[m][2], s[m][3]);
}

/* Like dots, for one row of x and one line of b. */
SIMD float dot(const float *x, const char *b, int64_t K, int T)
{
    vf s = vf_zero();
    for (int64_t k = 0; k < K; k += VL) {
        int m = K - k < VL ? (int)(K - k) : VL;
        s = vf_fma(vf_get_n(x, k, 0, m, 0), vf_get_n(b, k, T, m, 0), s);
    }
    return vf_hsum(s);
}

/* Computes the only element of a product [1, K] times [K, 1]. */
SIMD float only_dot(const float *x, const char *b, int64_t K, int T)
{
    enum { SUMS_OF_DOT = 8 };                        /* as many additions can be in progress at a time */
    vf s[SUMS_OF_DOT];
    int64_t k = 0, size = T == 0 ? 4 : 2;
    for (int i = 0; i < SUMS_OF_DOT; i++) s[i] = vf_zero();
    for (; k + SUMS_OF_DOT * VL <= K; k += SUMS_OF_DOT * VL)
#pragma GCC unroll 8
        for (int i = 0; i < SUMS_OF_DOT; i++)
            s[i] = vf_fma(vf_load(x + k + i * VL), vf_get(b, k + i * VL, T), s[i]);
    for (int w = SUMS_OF_DOT / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) s[i] += s[i + w];
    return vf_hsum(s[0]) + dot(x + k, b + k * size, K - k, T);
}

SIMD void piece_of_columns(const ps_gemm *g, const float *x, float *c, int64_t n0, int64_t most, int T)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols, ld = g->b.stride_col * (T == 0 ? 4 : 2);
    if (M == 1 && N == 1) {
        c[0] = only_dot(x, g->b.data, K, T);
        return;
    }
    int64_t count = least(most, N - n0), apart = quarter(count);
    for (int64_t t = 0; t < apart; t++) {
        const char *b = (const char *)g->b.data + (n0 + t) * ld;
        int64_t lines = lines_at(count, t), next = to_next(count, t) * ld;
        float out[PS_FEW_ROWS * LINES];
        if (lines < LINES) {
            for (int64_t m = 0; m < M; m++)
                for (int64_t i = 0; i < lines; i++) out[m * LINES + i] = dot(x + m * K, b + i * apart * ld, K, T);
        } else if (M == 1) dots(out, x, b, apart * ld, next, K, 1, T);
        else if (M == 2) dots(out, x, b, apart * ld, next, K, 2, T);
        else if (M == 3) dots(out, x, b, apart * ld, next, K, 3, T);
        else dots(out, x, b, apart * ld, next, K, 4, T);
        for (int64_t m = 0; m < M; m++)
            for (int64_t i = 0; i < lines; i++) c[m * N + n0 + t + i * apart] = out[m * LINES + i];
    }
}

/* Computes c if the columns of b are contiguous. Each thread computes one piece, so that the thread's streams are as
 * long as possible. */
static void by_columns(const ps_gemm *g, const float *x, float *c)
{
    int64_t step = ps_rows_of_thread(g->b.cols, LINES);
#pragma omp parallel for schedule(static)
    for (int64_t n0 = 0; n0 < g->b.cols; n0 += step) BY_TYPE(piece_of_columns, g, x, c, n0, step);
}

void PS_ISA_FN(ps_cpu_few_rows)(const ps_gemm *g, const float *x, float *part, float *c)
{
    if (g->b.stride_col == 1) by_rows(g, x, part, c);
    else by_columns(g, x, c);
}
