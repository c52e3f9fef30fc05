/* SPDX-License-Identifier: BSD-3-Clause
 * Muon (Jordan et al. 2024). ref/update.c has the formula. Matrix products are those of gemm.h. The other passes
 * process tiles of TILE x TILE elements, so that transposed matrices are read and written in whole rows. Sums are
 * computed in double, and their order depends neither on the number of threads nor on the instruction set. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/simd/optim_list.h"
#include "backend/cpu/gemm.h"
#include "base/update.h"

enum {
    WIDTH = 64,                       /* number of columns of a symmetric product that are computed together; both
                                       * halves of the diagonal block of this size are computed */
    TILE = 32,
};

/* The state of Muon's iteration X' = (a I + b A + c A A) X with A = X X^T. The iteration is computed in this form:
 *     X' = q (X + P X),  E = A - s I,  P = ((b + 2 c s) E + c E E) / q,  q = a + b s + c s s.
 * The shift s reduces rounding errors. In the last iterations A is near I. Then b A and c A A nearly cancel, which
 * would amplify the rounding errors of the products. If s I is near A, E is small, and so are its rounding errors.
 * Operands of half types have no shift (s = 0). In the first iterations A is small, and rounding A - s I to a half type
 * would remove most of the digits of A.
 * The stored matrix x is X divided by `scale`. `scale` is the product of the values of q in all iterations so far.
 * Hence the last product of an iteration adds x without a factor. */
typedef struct matrices {
    ps_call *call;
    ps_gemm_space *space;
    int type;                         /* type of the operands of the products */
    int64_t R, C;                     /* sizes of X, with R <= C */
    void *x, *y, *gram, *poly;        /* x and y are [R, C]; gram and poly are [R, R] */
    float *sums;                      /* [R, C] in fp32; shares the memory of y if y is fp32 */
    double shift, q, scale;
} matrices;

/* The shift s for fp32 operands. For random matrices, the rounding errors are smallest if the shift is between 0.6 and
 * 0.7. */
static const double SHIFT = 0.65;

/* Calls body(..., T), where T is a constant for the type of the operands of the products. */
#define BY_TYPE(m, body, ...) \
    do { \
        if ((m)->type == PS_F32) body(__VA_ARGS__, PS_F32); \
        else body(__VA_ARGS__, PS_BF16); \
    } while (0)

/* -- tiles --------------------------------------------------------------------------------------------------------- */
static int64_t upto_tile(int64_t n) { return n < TILE ? n : TILE; }

/* Read and write n adjacent elements, n <= TILE. The other elements of a row that is read become 0. */
SIMD void row_get(float *row, const void *from, int64_t i, int64_t n, int type)
{
    if (n == TILE) {
        _Pragma("GCC unroll 8")
        for (int c = 0; c < TILE; c += VL) vf_store(row + c, vf_get(from, i + c, type));
        return;
    }
    for (int64_t c = 0; c < TILE; c++) row[c] = c < n ? ps_get_one(from, i + c, type) : 0;
}
SIMD void row_put(void *to, int64_t i, const float *row, int64_t n, int type)
{
    if (n == TILE) {
        _Pragma("GCC unroll 8")
        for (int c = 0; c < TILE; c += VL) vf_put(to, i + c, type, vf_load(row + c));
        return;
    }
    for (int64_t c = 0; c < n; c++) ps_put_one(to, i + c, type, row[c]);
}
static void transpose(float to[TILE][TILE], float from[TILE][TILE])
{
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) to[i][j] = from[j][i];
}

/* -- products ------------------------------------------------------------------------------------------------------ */
static void *at(const matrices *m, void *p, int64_t i) { return ps_at(p, i, m->type); }

/* Computes a block of dst [R, R] = a a^T. The block has rows i0 to i0 + rows and columns j0 to j0 + cols. If `a` is not
 * m->x, `a` is symmetric, and the function computes a * a, which is the same. K is the number of columns of `a`. */
static int block(matrices *m, float *dst, void *a, int64_t K, int64_t i0, int64_t rows, int64_t j0, int64_t cols)
{
    bool is_x = a == m->x;
    ps_gemm g = { .batch = 1 };
    g.a = (ps_mat){ at(m, a, i0 * K), m->type, rows, K, K, 1 };
    g.b = is_x ? (ps_mat){ at(m, a, j0 * K), m->type, K, cols, 1, K }
               : (ps_mat){ at(m, a, j0), m->type, K, cols, K, 1 };
    g.dst = (ps_mat){ dst + i0 * m->R + j0, PS_F32, rows, cols, m->R, 1 };
    return ps_cpu_gemm_run(m->space, &g);
}
/* Computes the lower half of dst [R, R] = a a^T, and the upper halves of the diagonal blocks. */
static int lower(matrices *m, float *dst, void *a, int64_t K)
{
    int64_t R = m->R;
    for (int64_t j = 0; j < R; j += WIDTH)
        PS_TRY(block(m, dst, a, K, j, R - j, j, R - j < WIDTH ? R - j : WIDTH));
    return 0;
}

/* Computes a tile of the function `mirror`, and the transposed tile. */
SIMD void mirror_tile(const matrices *m, void *dst, const float *sum, float alpha, const void *add, float beta,
                      float diagonal, int64_t i0, int64_t j0, int type)
{
    float tile[TILE][TILE], transposed[TILE][TILE], row[TILE];
    int64_t R = m->R, rows = upto_tile(R - i0), cols = upto_tile(R - j0);
    if (rows < TILE) memset(tile, 0, sizeof tile);
    for (int64_t i = 0; i < rows; i++) {
        int64_t from = (i0 + i) * R + j0;
        row_get(tile[i], sum, from, cols, PS_F32);
        if (add) row_get(row, add, from, cols, type);
        for (int j = 0; j < TILE; j += VL) {
            vf x = vf_set(alpha) * vf_load(tile[i] + j);
            if (add) x += vf_set(beta) * vf_load(row + j);
            vf_store(tile[i] + j, x);
        }
    }
    for (int64_t i = 0; i0 == j0 && i < rows; i++) {
        tile[i][i] += diagonal;
        for (int64_t j = i + 1; j < cols; j++) tile[i][j] = tile[j][i];
    }
    for (int64_t i = 0; i < rows; i++) row_put(dst, (i0 + i) * R + j0, tile[i], cols, type);
    if (i0 == j0) return;
    transpose(transposed, tile);
    for (int64_t j = 0; j < cols; j++) row_put(dst, (j0 + j) * R + i0, transposed[j], rows, type);
}
/* Computes the symmetric matrix dst [R, R] = alpha * sum + beta * add + diagonal * I. Reads only the lower half of
 * `sum`. dst may be the same matrix as `sum`. */
static void mirror(const matrices *m, void *dst, const float *sum, float alpha, const void *add, float beta,
                   float diagonal)
{
    int64_t R = m->R;
    if (m->call->dry) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i0 = 0; i0 < R; i0 += TILE)
        for (int64_t j0 = 0; j0 <= i0; j0 += TILE)
            BY_TYPE(m, mirror_tile, m, dst, sum, alpha, add, beta, diagonal, i0, j0);
}

/* Computes n elements of x = factor * from, beginning at element i. */
SIMD void scaled(void *x, const void *from, float factor, int64_t i, int64_t n, int from_type, int type)
{
    float row[TILE];
    row_get(row, from, i, n, from_type);
    for (int c = 0; c < TILE; c += VL) vf_store(row + c, vf_load(row + c) * vf_set(factor));
    row_put(x, i, row, n, type);
}
/* Computes x = factor * from. */
static void scale_into_x(matrices *m, const void *from, float factor, int from_type)
{
    int64_t n = m->R * m->C;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i += TILE) {
        if (from_type == PS_F32) BY_TYPE(m, scaled, m->x, from, factor, i, upto_tile(n - i), PS_F32);
        else scaled(m->x, from, factor, i, upto_tile(n - i), PS_BF16, PS_BF16);
    }
}

static int iterate(matrices *m, const ps_attrs_muon_ *a)
{
    int64_t R = m->R, C = m->C;
    bool wide = m->type == PS_F32;
    float *square = wide ? m->gram : m->sums;
    /* keeps x in the range of its type */
    if (!m->call->dry && (m->scale >= 1e6 || m->scale <= 1e-6)) {
        scale_into_x(m, m->x, (float)m->scale, m->type);
        m->scale = 1;
    }
    PS_TRY(lower(m, square, m->x, C));
    mirror(m, m->gram, square, (float)(m->scale * m->scale), NULL, 0, (float)-m->shift);
    square = wide ? m->poly : m->sums;
    PS_TRY(lower(m, square, m->gram, R));
    mirror(m, m->poly, square, (float)(a->c / m->q), m->gram, (float)((a->b + 2 * a->c * m->shift) / m->q), 0);
    ps_gemm g = { .batch = 1, .residual = m->x, .ld_residual = C };
    g.a = (ps_mat){ m->poly, m->type, R, R, R, 1 };
    g.b = (ps_mat){ m->x, m->type, R, C, C, 1 };
    g.dst = (ps_mat){ m->y, m->type, R, C, C, 1 };
    PS_TRY(ps_cpu_gemm_run(m->space, &g));
    m->scale *= m->q;
    void *swap = m->x;
    m->x = m->y, m->y = swap;
    return 0;
}

/* -- the update ---------------------------------------------------------------------------------------------------- */
/* A parameter [rows, cols]. If `turned` is set, X contains the transposed parameter, so that R <= C. */
typedef struct matrix {
    struct item it;
    int64_t rows, cols;
    bool turned;
} matrix;

/* Updates the momentum of n <= TILE rows of the parameter, beginning at row `first`. Writes the update of these rows to
 * u, a matrix [R, C], and the sum of squares of each row's update to by_row. */
SIMD void begin_rows(const ps_attrs_muon_ *a, const matrix *p, float *u, double *by_row, int64_t first, int64_t n,
                     int grad_type)
{
    float take = (float)(1 - a->momentum), momentum = (float)a->momentum, scale = (float)a->grad_scale;
    float *buf = p->it.state[0], tile[TILE][TILE], transposed[TILE][TILE], grad[TILE];
    double sums[TILE][TILE] = { { 0 } };                         /* for each row, a sum for each column of the tiles */
    if (n < TILE) memset(tile, 0, sizeof tile);
    for (int64_t c0 = 0; c0 < p->cols; c0 += TILE) {
        int64_t width = upto_tile(p->cols - c0);
        for (int64_t k = 0; k < n; k++) {
            int64_t i = (first + k) * p->cols + c0;
            float *x = tile[k];
            row_get(x, buf, i, width, PS_F32);
            row_get(grad, p->it.grad, i, width, grad_type);
            for (int c = 0; c < TILE; c += VL) {
                vf g = vf_load(grad + c) * scale, b = vf_load(x + c);
                b = b + take * (g - b);
                vf_store(grad + c, b);
                vf_store(x + c, a->nesterov ? g + momentum * (b - g) : b);
            }
            row_put(buf, i, grad, width, PS_F32);
            for (int c = 0; c < TILE; c++) sums[k][c] += (double)x[c] * x[c];
            if (!p->turned) row_put(u, i, x, width, PS_F32);
        }
        if (!p->turned) continue;
        transpose(transposed, tile);
        for (int64_t c = 0; c < width; c++) row_put(u, (c0 + c) * p->rows + first, transposed[c], n, PS_F32);
    }
    for (int64_t k = 0; k < n; k++) {
        double sum = 0;
        for (int c = 0; c < TILE; c++) sum += sums[k][c];
        by_row[first + k] = sum;
    }
}
static void begin(matrices *m, const ps_attrs_muon_ *a, const matrix *p, float *u, double *by_row)
{
    int64_t n = m->R * m->C;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t first = 0; first < p->rows; first += TILE)
        PS_BY_VEC(p->it.grad_dtype, begin_rows, a, p, u, by_row, first, upto_tile(p->rows - first));
    double sum = 0;
    for (int64_t i = 0; i < p->rows; i++) sum += by_row[i];
    double norm = sqrt(sum);
    scale_into_x(m, u, (float)(1 / (norm > a->eps ? norm : a->eps)), PS_F32);
}

/* Multiplies `width` <= TILE elements of the master by `keep`, beginning at element i, and then subtracts rate * x. */
SIMD void step_row(const struct item *it, int64_t i, const float *x, int64_t width, float keep, float rate, int form)
{
    static const int none[2] = { 0, 0 };
    struct tail t;
    int64_t c = 0;
    for (; c + VL <= width; c += VL)
        master_put(it, i + c, master_get(it, i + c, form) * keep - rate * vf_load(x + c), form);
    if (c == width) return;
    tail_get(&t, it, i + c, (int)(width - c), none);
    master_put(&t.it, 0, master_get(&t.it, 0, form) * keep - rate * vf_load(x + c), form);
    tail_put(&t, it, i + c, (int)(width - c), none);
}
/* Updates n <= TILE rows of the parameter, beginning at row `first`. */
SIMD void end_rows(const matrices *m, const matrix *p, float keep, float rate, int64_t first, int64_t n, int form,
                   int type)
{
    float tile[TILE][TILE], transposed[TILE][TILE];
    for (int64_t c0 = 0; c0 < p->cols; c0 += TILE) {
        int64_t width = upto_tile(p->cols - c0);
        for (int64_t c = 0; p->turned && c < TILE; c++) {
            if (c < width) row_get(transposed[c], m->x, (c0 + c) * p->rows + first, n, type);
            else memset(transposed[c], 0, sizeof transposed[c]);
        }
        if (p->turned) transpose(tile, transposed);
        for (int64_t k = 0; k < n; k++) {
            int64_t i = (first + k) * p->cols + c0;
            if (!p->turned) row_get(tile[k], m->x, i, width, type);
            step_row(&p->it, i, tile[k], width, keep, rate, form);
        }
    }
}
static void end_some_rows(const matrices *m, const matrix *p, float keep, float rate, int64_t first)
{
    int64_t n = upto_tile(p->rows - first);
    if (p->it.low) BY_TYPE(m, end_rows, m, p, keep, rate, first, n, PS_REMAINDER);
    else if (p->it.param_dtype == PS_F32) end_rows(m, p, keep, rate, first, n, PS_F32, PS_F32);
    else if (p->it.param_dtype == PS_BF16) BY_TYPE(m, end_rows, m, p, keep, rate, first, n, PS_BF16);
    else end_rows(m, p, keep, rate, first, n, PS_F16, PS_F32);
}

/* The pieces of the workspace. All matrices of a call use the same workspace, one after another. */
enum { BY_ROW, X, Y, GRAM, POLY, SUMS, PIECES };
typedef struct workspace {
    size_t nbytes[PIECES];
    void *piece[PIECES];
    ps_gemm_space space;
} workspace;

static matrix matrix_of(const ps_call *call, const struct work *w, int i)
{
    const int64_t *shape = call->in[4 * i].shape;
    return (matrix){ .it = w->item[i], .rows = shape[0], .cols = shape[1], .turned = shape[0] > shape[1] };
}
static int type_of(const matrix *p)
{
    return p->it.param_dtype == PS_BF16 && ps_cpu_gemm_native(PS_BF16) ? PS_BF16 : PS_F32;
}
/* Increases the sizes of the pieces to the sizes that a parameter needs. */
static void make_room(workspace *ws, const matrix *p)
{
    int64_t R = p->turned ? p->cols : p->rows, C = p->turned ? p->rows : p->cols;
    size_t all = (size_t)(R * C), square = (size_t)(R * R), size = type_of(p) == PS_F32 ? 4 : 2;
    size_t nbytes[PIECES] = { [BY_ROW] = (size_t)p->rows * sizeof(double), [X] = all * size, [Y] = all * size,
                             [GRAM] = square * size, [POLY] = square * size, [SUMS] = size == 4 ? 0 : all * 4 };
    for (int k = 0; k < PIECES; k++) if (nbytes[k] > ws->nbytes[k]) ws->nbytes[k] = nbytes[k];
}
static matrices matrices_of(ps_call *call, workspace *ws, const matrix *p)
{
    const struct ps_attrs_muon_ *a = call->attrs;
    matrices m = { .call = call, .space = &ws->space, .type = type_of(p), .R = p->turned ? p->cols : p->rows,
                   .C = p->turned ? p->rows : p->cols, .x = ws->piece[X], .y = ws->piece[Y], .gram = ws->piece[GRAM],
                   .poly = ws->piece[POLY], .scale = 1 };
    m.sums = m.type == PS_F32 ? m.y : ws->piece[SUMS];
    m.shift = m.type == PS_F32 ? SHIFT : 0;
    m.q = a->a + a->b * m.shift + a->c * m.shift * m.shift;
    if (m.q == 0) m.shift = 0, m.q = a->a;
    return m;
}

static int update(ps_call *call, workspace *ws, const matrix *p)
{
    const struct ps_attrs_muon_ *a = call->attrs;
    matrices m = matrices_of(call, ws, p);
    begin(&m, a, p, m.sums, ws->piece[BY_ROW]);
    for (int k = 0; k < a->steps; k++) PS_TRY(iterate(&m, a));
    float rate = (float)(a->lr * ps_muon_ratio(a->adjust, p->rows, p->cols) * m.scale);
    float keep = (float)(1 - a->lr * a->weight_decay);
#pragma omp parallel for schedule(static) if (p->it.numel > PS_PAR_MIN)
    for (int64_t first = 0; first < p->rows; first += TILE) end_some_rows(&m, p, keep, rate, first);
    return 0;
}

/* Allocates the workspace of all matrices, including that of their products, before the first parameter changes. If
 * memory is short, the call therefore fails without any change, and can be repeated. */
static int take_workspace(ps_call *call, workspace *ws, const struct work *w)
{
    const struct ps_attrs_muon_ *a = call->attrs;
    for (int i = 0; i < w->n; i++) {
        matrix p = matrix_of(call, w, i);
        make_room(ws, &p);
    }
    for (int k = 0; k < PIECES; k++) {
        if (ws->nbytes[k] == 0) continue;
        ws->piece[k] = call->scratch(call, ws->nbytes[k]);
        if (!ws->piece[k]) return PS_ENOMEM;
    }
    ps_call dry = *call;
    dry.dry = true;
    ws->space.call = &dry;
    for (int i = 0; i < w->n && a->steps > 0; i++) {
        matrix p = matrix_of(call, w, i);
        if (p.it.numel == 0) continue;
        matrices m = matrices_of(&dry, ws, &p);
        if (m.q == 0) return ps_fail(PS_EINVAL, "muon_: a = 0 in the iteration's coefficients");
        PS_TRY(iterate(&m, a));
    }
    ws->space.call = call;
    return 0;
}

static int muon(ps_call *call)
{
    struct work w;
    workspace ws = { .space = { .call = call } };
    if (!collect_alike(call, 4, PS_F32, &w)) return PS_EUNSUP;
    PS_TRY(take_workspace(call, &ws, &w));
    for (int i = 0; i < w.n && !call->dry; i++) {
        matrix p = matrix_of(call, &w, i);
        if (p.it.numel > 0) PS_TRY(update(call, &ws, &p));
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_muon)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_muon)(ps_kernel *k) { k[PS_OP_muon_] = muon; }
