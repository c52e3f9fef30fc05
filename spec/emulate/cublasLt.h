/* SPDX-License-Identifier: BSD-3-Clause
 * A stand-in for <cublasLt.h> beside the one for the CUDA runtime: the calls that src/backend/cuda/gemm.cu makes, by
 * the library's documentation, with a plain triple loop behind them. It refuses what the documentation refuses, as far
 * as that matters here: leading dimensions, mixtures of types. */
#ifndef PS_EMULATE_CUBLASLT_H
#define PS_EMULATE_CUBLASLT_H
#include "cuda_runtime.h"
#include "base/half.h"

typedef enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 }
    cublasStatus_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum { CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 14 } cudaDataType_t;
typedef enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70 } cublasComputeType_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_GELU = 32,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128, CUBLASLT_EPILOGUE_GELU_BIAS = 32 | 4,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4, CUBLASLT_EPILOGUE_DGELU = 64 | 128,
    CUBLASLT_EPILOGUE_DGELU_BGRAD = 64 | 128 | 16, CUBLASLT_EPILOGUE_BGRADA = 256, CUBLASLT_EPILOGUE_BGRADB = 512
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
    cudaDataType_t bias_type;
};
typedef ps_emu_desc *cublasLtMatmulDesc_t;
struct ps_emu_layout { cudaDataType_t type; int64_t rows, cols, ld, step; int32_t batch; };
typedef ps_emu_layout *cublasLtMatrixLayout_t;
typedef struct ps_emu_pref *cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t { int nothing; };
struct cublasLtMatmulHeuristicResult_t { cublasLtMatmulAlgo_t algo; };

static inline const char *cublasLtGetStatusString(cublasStatus_t s) { return s == 0 ? "success" : "an error"; }
static inline size_t cublasLtGetVersion(void) { return 0; }
static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
    *h = (cublasLtHandle_t)h;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t, cudaDataType_t)
{
    *d = (cublasLtMatmulDesc_t)calloc(1, sizeof **d);
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
    memcpy(to, p, n);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows,
                                                        uint64_t cols, int64_t ld)
{
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
    memcpy(what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? (void *)&l->batch : (void *)&l->step, p, n);
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    *p = NULL;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
/* Problems of 7, 23, 39 ... rows are refused here, so that tests see both the library's path and the plain one; sums
 * beside a GELU's gradient where there are 40, 104, 168 ... columns, too. */
static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d,
    cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t y,
    cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *found, int *n)
{
    bool fits = a->ld >= a->rows && b->ld >= b->rows && c->ld >= c->rows && y->ld >= y->rows && a->type == b->type &&
                c->type == y->type && a->batch == y->batch && b->batch == y->batch &&
                (y->type == a->type || (y->type == CUDA_R_32F && a->type != CUDA_R_64F)) &&
                (d->turn_a ? a->cols : a->rows) == y->rows && (d->turn_b ? b->rows : b->cols) == y->cols &&
                (d->turn_a ? a->rows : a->cols) == (d->turn_b ? b->cols : b->rows);
    bool aux = d->epilogue & 128, vector = d->epilogue & (4 | 16 | 256 | 512);
    if (aux && (!d->aux || (uintptr_t)d->aux % 16 != 0 || d->aux_ld < y->rows || d->aux_ld % 8 != 0)) fits = false;
    if (vector && (!d->bias || d->bias_type != y->type)) fits = false;
    if (d->epilogue > CUBLASLT_EPILOGUE_BIAS && y->batch != 1) fits = false;
    if (!fits) return CUBLAS_STATUS_INVALID_VALUE;
    found->algo.nothing = 0;
    *n = y->rows % 16 != 7 && !(d->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD && y->cols % 64 == 40);
    return CUBLAS_STATUS_SUCCESS;
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
/* The GELU (by tanh) or its derivative that the epilogue asks for. */
static inline double ps_emu_gelu(const ps_emu_desc *d, cudaDataType_t type, int64_t at, double s)
{
    bool slope = d->epilogue & 64;
    if (!slope && !(d->epilogue & CUBLASLT_EPILOGUE_GELU)) return s;
    double x = slope ? ps_emu_get(d->aux, type, at) : s, c = 0.79788456080286535588;
    double t = tanh(c * (x + 0.044715 * x * x * x));
    if (slope) return s * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x));
    if (d->epilogue & 128) ps_emu_put(d->aux, type, at, s);
    return 0.5 * x * (1 + t);
}
/* A product in its stream: everything but the matrices themselves is as it was when it was asked for. */
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
    cublasLtMatrixLayout_t c, void *py, cublasLtMatrixLayout_t y, const cublasLtMatmulAlgo_t *, void *workspace,
    size_t workspace_nbytes, cudaStream_t stream)
{
    bool wide = a->type == CUDA_R_64F;
    double al = wide ? *(const double *)alpha : *(const float *)alpha;
    double be = wide ? *(const double *)beta : *(const float *)beta;
    if (ps_emu_listed("cublasLtMatmul\t%lld x %lld x %lld\t%d -> %d\tepilogue %d\tbeta %g\tturned %d%d",
                      (long long)y->rows, (long long)y->cols, (long long)(d->turn_a ? a->rows : a->cols), (int)a->type,
                      (int)y->type, (int)d->epilogue, be, (int)d->turn_a, (int)d->turn_b))
        return CUBLAS_STATUS_SUCCESS;
    ps_emu_product p = { *d, al, be, pa, pb, pc, py, *a, *b, *c, *y };
    ps_emu_add(stream, [p, workspace, workspace_nbytes] {
        memset(workspace, 0xff, workspace_nbytes < 256 ? workspace_nbytes : 256);     /* it is this product's now */
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
                if (d->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD)
                    ps_emu_put(d->bias, d->bias_type, i, s + (j > 0 ? ps_emu_get(d->bias, d->bias_type, i) : 0));
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
