/* SPDX-License-Identifier: BSD-3-Clause
 * A stand-in for <cublasLt.h>, in addition to the one for the CUDA runtime. It implements the calls that
 * src/backend/cuda/gemm.cu makes, as the library's documentation describes them, by a plain triple loop. It refuses
 * what the documentation refuses: sizes of attributes, mixtures of types, leading dimensions and alignment of
 * epilogues' operands, reductions whose order is not fixed; and a product whose pointers are less aligned, or whose
 * matrices are others, than its algorithm was chosen for. */
#ifndef PS_EMULATE_CUBLASLT_H
#define PS_EMULATE_CUBLASLT_H
#include "cuda_runtime.h"
#include "base/half.h"

bool ps_emu_library_fails(void);               /* returns whether a test requested a failure (emulate.h) */

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_ALLOC_FAILED = 3, CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum { CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 14 } cudaDataType_t;
typedef enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70 } cublasComputeType_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_GELU = 32,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128, CUBLASLT_EPILOGUE_GELU_BIAS = 32 | 4,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
    CUBLASLT_EPILOGUE_BGRADA = 256, CUBLASLT_EPILOGUE_BGRADB = 512
} cublasLtEpilogue_t;
typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4, CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26
} cublasLtMatmulDescAttributes_t;
typedef enum { CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6 }
    cublasLtMatrixLayoutAttribute_t;
typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;
enum { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4 };

typedef struct ps_emu_lt *cublasLtHandle_t;
struct ps_emu_desc {
    cublasOperation_t turn_a, turn_b;
    cublasLtEpilogue_t epilogue;
    void *bias, *aux;
    int64_t aux_ld;
    cudaDataType_t bias_type, scale;
    cublasComputeType_t compute;
};
typedef ps_emu_desc *cublasLtMatmulDesc_t;
struct ps_emu_layout { cudaDataType_t type; int64_t rows, cols, ld, step; int32_t batch; };
typedef ps_emu_layout *cublasLtMatrixLayout_t;
struct ps_emu_pref { uint64_t room; uint32_t reductions, align[4]; };
typedef ps_emu_pref *cublasLtMatmulPreference_t;
/* The properties for which an algorithm was chosen. */
struct cublasLtMatmulAlgo_t { ps_emu_desc desc; ps_emu_layout layout[4]; ps_emu_pref pref; };
struct cublasLtMatmulHeuristicResult_t { cublasLtMatmulAlgo_t algo; };

static inline const char *cublasLtGetStatusString(cublasStatus_t s) { return s == 0 ? "success" : "an error"; }
static inline size_t cublasLtGetVersion(void) { return 0; }
static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
    if (ps_emu_library_fails()) return CUBLAS_STATUS_ALLOC_FAILED;
    *h = (cublasLtHandle_t)h;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                                      cudaDataType_t scale)
{
    if (ps_emu_library_fails()) return CUBLAS_STATUS_ALLOC_FAILED;
    *d = (cublasLtMatmulDesc_t)calloc(1, sizeof **d);
    (*d)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    (*d)->compute = compute;
    (*d)->scale = scale;
    (*d)->bias_type = (cudaDataType_t)-1;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    free(d);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
    cublasLtMatmulDescAttributes_t what, const void *p, size_t n)
{
    void *to = what == CUBLASLT_MATMUL_DESC_TRANSA ? (void *)&d->turn_a
        : what == CUBLASLT_MATMUL_DESC_TRANSB ? (void *)&d->turn_b
        : what == CUBLASLT_MATMUL_DESC_EPILOGUE ? (void *)&d->epilogue
        : what == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER ? (void *)&d->aux
        : what == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD ? (void *)&d->aux_ld
        : what == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? (void *)&d->bias : (void *)&d->bias_type;
    bool long_one = what == CUBLASLT_MATMUL_DESC_BIAS_POINTER || what == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER ||
                    what == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD;
    if (n != (long_one ? 8 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, p, n);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows,
                                                        uint64_t cols, int64_t ld)
{
    if (ps_emu_library_fails()) return CUBLAS_STATUS_ALLOC_FAILED;
    *l = (cublasLtMatrixLayout_t)calloc(1, sizeof **l);
    **l = ps_emu_layout{ type, (int64_t)rows, (int64_t)cols, ld, 0, 1 };
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    free(l);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
    cublasLtMatrixLayoutAttribute_t what, const void *p, size_t n)
{
    if (n != (what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? 4 : 8)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? (void *)&l->batch : (void *)&l->step, p, n);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    if (ps_emu_library_fails()) return CUBLAS_STATUS_ALLOC_FAILED;
    *p = (cublasLtMatmulPreference_t)calloc(1, sizeof **p);
    **p = ps_emu_pref{ 0, 7, { 256, 256, 256, 256 } };
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
    cublasLtMatmulPreferenceAttributes_t what, const void *p, size_t n)
{
    void *to = what == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? (void *)&pref->room
        : what == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK ? (void *)&pref->reductions
        : (void *)&pref->align[what - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES];
    if (n != (what == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, p, n);
    return CUBLAS_STATUS_SUCCESS;
}
static inline int ps_emu_bytes(cudaDataType_t t) { return t == CUDA_R_64F ? 8 : t == CUDA_R_32F ? 4 : 2; }
/* Checks D's type for the type of A and B, and for the types of scale and computation. */
static inline bool ps_emu_types(const ps_emu_desc *d, cudaDataType_t a, cudaDataType_t y)
{
    if (a == CUDA_R_64F) return y == a && d->compute == CUBLAS_COMPUTE_64F && d->scale == CUDA_R_64F;
    return (y == a || y == CUDA_R_32F) && d->compute == CUBLAS_COMPUTE_32F && d->scale == CUDA_R_32F;
}
/* Checks the operands of an epilogue. Only their addresses are checked. */
static inline bool ps_emu_epilogue(const ps_emu_desc *d, const ps_emu_layout *y)
{
    bool aux = d->epilogue & 128, vector = d->epilogue & (4 | 16 | 256 | 512);
    if (aux && (!d->aux || (uintptr_t)d->aux % 16 != 0 || d->aux_ld < y->rows || d->aux_ld % 8 != 0)) return false;
    if (vector && (!d->bias || (uintptr_t)d->bias % 16 != 0)) return false;
    if (vector && d->bias_type != y->type && (int)d->bias_type != -1) return false;
    if (d->epilogue > CUBLASLT_EPILOGUE_BIAS && (y->batch != 1 || y->type == CUDA_R_64F)) return false;
    return true;
}
/* Rejects problems of 7, 23, 39 ... rows, so that tests use both the library's path and the plain one. */
static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d,
    cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t y,
    cublasLtMatmulPreference_t pref, int, cublasLtMatmulHeuristicResult_t *found, int *n)
{
    bool fits = a->ld >= a->rows && b->ld >= b->rows && c->ld >= c->rows && y->ld >= y->rows && a->type == b->type &&
                c->type == y->type && c->rows == y->rows && c->cols == y->cols && a->batch == y->batch &&
                b->batch == y->batch && c->batch == y->batch && ps_emu_types(d, a->type, y->type) &&
                (d->turn_a ? a->cols : a->rows) == y->rows && (d->turn_b ? b->rows : b->cols) == y->cols &&
                (d->turn_a ? a->rows : a->cols) == (d->turn_b ? b->cols : b->rows);
    if (ps_emu_library_fails()) return CUBLAS_STATUS_ALLOC_FAILED;
    if (!fits || !ps_emu_epilogue(d, y) || pref->room < (32u << 20)) return CUBLAS_STATUS_INVALID_VALUE;
    if (pref->reductions & ~2u) return CUBLAS_STATUS_INVALID_VALUE;     /* sums in another order, or sums of rounded
                                                                         * parts */
    for (uint32_t align : pref->align)
        if (align == 0 || (align & (align - 1)) != 0 || align > 256) return CUBLAS_STATUS_INVALID_VALUE;
    found->algo = cublasLtMatmulAlgo_t{ *d, { *a, *b, *c, *y }, *pref };
    *n = y->rows % 16 != 7;
    return CUBLAS_STATUS_SUCCESS;
}
/* Returns whether the product is the one for which its algorithm was chosen. */
static inline bool ps_emu_chosen(const cublasLtMatmulAlgo_t *algo, const ps_emu_desc *d, const ps_emu_layout *const *l,
                                 const void *const *p)
{
    ps_emu_desc now = *d;
    for (int i = 0; i < 4; i++)
        if (memcmp(l[i], &algo->layout[i], sizeof *l[i]) != 0 || (uintptr_t)p[i] % algo->pref.align[i] != 0 ||
            (uintptr_t)p[i] % (uintptr_t)ps_emu_bytes(l[i]->type) != 0)
            return false;
    now.bias = algo->desc.bias, now.aux = algo->desc.aux;
    return memcmp(&now, &algo->desc, sizeof now) == 0 && ps_emu_epilogue(d, l[3]);
}
static inline double ps_emu_get(const void *p, cudaDataType_t t, int64_t i)
{
    if (t == CUDA_R_64F) return ((const double *)p)[i];
    if (t == CUDA_R_32F) return ((const float *)p)[i];
    return t == CUDA_R_16F ? ps_f16_to_f32(((const uint16_t *)p)[i]) : ps_bf16_to_f32(((const uint16_t *)p)[i]);
}
static inline void ps_emu_put(void *p, cudaDataType_t t, int64_t i, double x)
{
    if (t == CUDA_R_64F) ((double *)p)[i] = x;
    else if (t == CUDA_R_32F) ((float *)p)[i] = (float)x;
    else ((uint16_t *)p)[i] = t == CUDA_R_16F ? ps_f32_to_f16((float)x) : ps_f32_to_bf16((float)x);
}
/* Computes the GELU (with tanh) that the epilogue requests. */
static inline double ps_emu_gelu(const ps_emu_desc *d, cudaDataType_t type, int64_t at, double s)
{
    if (!(d->epilogue & CUBLASLT_EPILOGUE_GELU)) return s;
    if (d->epilogue & 128) ps_emu_put(d->aux, type, at, s);
    return 0.5 * s * (1 + tanh(0.79788456080286535588 * (s + 0.044715 * s * s * s)));
}
/* A product in its stream. Everything except the matrices themselves has the state at the time of the request. */
struct ps_emu_product {
    ps_emu_desc desc;
    double alpha, beta;
    const void *pa, *pb, *pc;
    void *py;
    ps_emu_layout a, b, c, y;
    void run(void) const;
};
static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void *alpha, const void *pa,
    cublasLtMatrixLayout_t a, const void *pb, cublasLtMatrixLayout_t b, const void *beta, const void *pc,
    cublasLtMatrixLayout_t c, void *py, cublasLtMatrixLayout_t y, const cublasLtMatmulAlgo_t *algo, void *workspace,
    size_t workspace_nbytes, cudaStream_t stream)
{
    const ps_emu_layout *layouts[4] = { a, b, c, y };
    const void *pointers[4] = { pa, pb, pc, py };
    if (ps_emu_library_fails()) return CUBLAS_STATUS_ALLOC_FAILED;
    if (!ps_emu_chosen(algo, d, layouts, pointers) || workspace_nbytes < algo->pref.room ||
        (uintptr_t)workspace % 256 != 0 || (pc == py && c->ld != y->ld))
        return CUBLAS_STATUS_INVALID_VALUE;
    bool wide = a->type == CUDA_R_64F;
    double al = wide ? *(const double *)alpha : *(const float *)alpha;
    double be = wide ? *(const double *)beta : *(const float *)beta;
    if (ps_emu_listed("cublasLtMatmul\t%lld x %lld x %lld\t%d -> %d\tepilogue %d\tbeta %g\tturned %d%d",
                      (long long)y->rows, (long long)y->cols, (long long)(d->turn_a ? a->rows : a->cols), (int)a->type,
                      (int)y->type, (int)d->epilogue, be, (int)d->turn_a, (int)d->turn_b))
        return CUBLAS_STATUS_SUCCESS;
    ps_emu_product p = { *d, al, be, pa, pb, pc, py, *a, *b, *c, *y };
    ps_emu_add(stream, [p, workspace, workspace_nbytes] {
        memset(workspace, 0xff, workspace_nbytes < 256 ? workspace_nbytes : 256);     /* this product owns the
                                                                                       * workspace now */
        p.run();
    });
    return CUBLAS_STATUS_SUCCESS;
}
inline void ps_emu_product::run(void) const
{
    const ps_emu_desc *d = &desc;
    int64_t K = d->turn_a ? a.rows : a.cols;
    for (int64_t n = 0; n < y.batch; n++)
        for (int64_t j = 0; j < y.cols; j++)
            for (int64_t i = 0; i < y.rows; i++) {
                double s = 0;
                for (int64_t k = 0; k < K; k++)
                    s += ps_emu_get(pa, a.type, n * a.step + (d->turn_a ? k + i * a.ld : i + k * a.ld)) *
                         ps_emu_get(pb, b.type, n * b.step + (d->turn_b ? j + k * b.ld : k + j * b.ld));
                s *= alpha;
                if (beta != 0) s += beta * ps_emu_get(pc, c.type, n * c.step + i + j * c.ld);
                if (d->epilogue & CUBLASLT_EPILOGUE_BIAS) s += ps_emu_get(d->bias, d->bias_type, i);
                s = ps_emu_gelu(d, y.type, i + j * d->aux_ld, s);
                ps_emu_put(py, y.type, n * y.step + i + j * y.ld, s);
            }
    if (d->epilogue != CUBLASLT_EPILOGUE_BGRADA && d->epilogue != CUBLASLT_EPILOGUE_BGRADB) return;
    bool of_a = d->epilogue == CUBLASLT_EPILOGUE_BGRADA;
    for (int64_t i = 0; i < (of_a ? y.rows : y.cols); i++) {
        double s = 0;
        for (int64_t k = 0; k < K; k++)
            s += of_a ? ps_emu_get(pa, a.type, d->turn_a ? k + i * a.ld : i + k * a.ld)
                : ps_emu_get(pb, b.type, d->turn_b ? i + k * b.ld : k + i * b.ld);
        ps_emu_put(d->bias, d->bias_type, i, s);
    }
}
#endif
