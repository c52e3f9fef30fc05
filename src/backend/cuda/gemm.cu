/* SPDX-License-Identifier: BSD-3-Clause
 * Matrix products. cuBLASLt computes a product if it supports the types and strides. Otherwise a plain tiled kernel in
 * this file computes it. The algorithm that cuBLASLt chooses for a product is stored for later steps.
 *
 * If cuBLASLt splits a sum, it must add the parts in fp32 and in a fixed order. Algorithms that reduce in place, or
 * that round the parts to the output's type, are excluded. */
#include <cublasLt.h>
#include <stdlib.h>
#include "backend/cuda/device.h"

/* -- the plain kernel: any types, any strides ---------------------------------------------------------------------- */
enum { TILE = 16 };

/* A block computes TILE x TILE elements of dst. */
template <class A> static __global__ void plain_kernel(const __grid_constant__ ps_cu_gemm g)
{
    __shared__ A sa[TILE][TILE + 1], sb[TILE][TILE + 1];
    int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    int64_t M = g.a.rows, N = g.b.cols, K = g.a.cols, columns = (N + TILE - 1) / TILE;
    int64_t i = blockIdx.x / columns * TILE + ty, j = blockIdx.x % columns * TILE + tx;
    for (int64_t n = blockIdx.y; n < g.batch; n += gridDim.y) {
        A sum = 0;
        for (int64_t k = 0; k < K; k += TILE) {
            A va = 0, vb = 0;
            if (i < M && k + tx < K)
                va = access<A>::load(g.a.data, g.a.dtype,
                                     n * g.step_a + i * g.a.stride_row + (k + tx) * g.a.stride_col);
            if (k + ty < K && j < N)
                vb = access<A>::load(g.b.data, g.b.dtype,
                                     n * g.step_b + (k + ty) * g.b.stride_row + j * g.b.stride_col);
            sa[ty][tx] = va;
            sb[ty][tx] = vb;
            __syncthreads();
            for (int t = 0; t < TILE; t++) sum += sa[ty][t] * sb[t][tx];
            __syncthreads();
        }
        if (i >= M || j >= N) continue;
        int64_t at = n * g.step_dst + i * g.dst.stride_row + j * g.dst.stride_col;
        if (g.bias) sum += access<A>::load(g.bias, g.bias_dtype, j);
        if (g.residual) sum += access<A>::load(g.residual, g.dst.dtype, i * g.ld_residual + j);
        if (g.accumulate) sum += access<A>::load(g.dst.data, g.dst.dtype, at);
        access<A>::store(g.dst.data, g.dst.dtype, at, sum);
    }
}

static int run_plain(const ps_cu_gemm *g)
{
    int64_t tiles = ps_cu_div_up(g->a.rows, TILE) * ps_cu_div_up(g->b.cols, TILE), most = 65535;
    if (tiles > INT32_MAX)
        return ps_fail(PS_EUNSUP, "cuBLASLt does not support a matrix product of %lld x %lld with these types or "
                       "strides", (long long)g->a.rows, (long long)g->b.cols);
    dim3 grid((unsigned)tiles, (unsigned)(g->batch < most ? g->batch : most));
    bool wide = g->a.dtype == PS_F64 || g->b.dtype == PS_F64;
    auto kernel = wide ? plain_kernel<double> : plain_kernel<float>;
    PS_LAUNCH(kernel, grid, TILE * TILE, 0, ps_cu->compute, *g);
    return ps_cuda_launched();
}

/* -- cuBLASLt ------------------------------------------------------------------------------------------------------ */
static const size_t workspace_nbytes = (size_t)32 << 20;
static cublasLtHandle_t lt;
static void *workspace;

/* A product in the form that cuBLASLt expects. cuBLASLt's matrices are column-major, so we request y^T = b^T a^T
 * instead of y = a b. cuBLASLt's A is our b, its B is our a, and its m is our number of columns. The key contains every
 * property that can change the choice of the algorithm. Keys are compared byte by byte. */
struct lt_key {
    int64_t m, n, k, lda, ldb, ldc, ldd, batch, step_a, step_b, step_d;
    int32_t type_a, type_b, type_d, turn_a, turn_b, epilogue, beta;
    int32_t align_a, align_b, align_c, align_d, align_vector, align_pre;
};
struct lt_entry {
    lt_key key;
    bool used, none;                                 /* none: cuBLASLt has no algorithm for this product */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulAlgo_t algo;
};
enum { ENTRIES = 1024 };
static lt_entry *entries;                            /* hash table with open addressing; it is cleared when three
                                                      * quarters of its entries are in use */
static int n_entries;

static int lt_check(cublasStatus_t s, const char *what)
{
    if (s == CUBLAS_STATUS_SUCCESS) return 0;
    return ps_cuda_broke("cuBLASLt gave %s in %.100s", cublasLtGetStatusString(s), what);
}
#define LT_TRY(call) PS_TRY(lt_check((call), #call))

static cudaDataType_t data_type(int dtype)
{
    return dtype == PS_F32 ? CUDA_R_32F : dtype == PS_BF16 ? CUDA_R_16BF : dtype == PS_F16 ? CUDA_R_16F : CUDA_R_64F;
}

/* Returns the alignment of an address in bytes, at most 16. The limit of 16 has a reason: a whole tensor starts at a
 * multiple of 256 bytes, but a slice may not. If the key contained alignments above 16, the product of a slice could
 * use another algorithm than the product of a copy of the slice. The two results could then differ in the last bits. */
static int alignment(const void *p)
{
    uintptr_t low = (uintptr_t)p & -(uintptr_t)p;    /* lowest set bit */
    return low == 0 || low > 16 ? 16 : (int)low;
}

static void entry_free(lt_entry *e)
{
    if (e->desc) cublasLtMatmulDescDestroy(e->desc);
    if (e->a) cublasLtMatrixLayoutDestroy(e->a);
    if (e->b) cublasLtMatrixLayoutDestroy(e->b);
    if (e->c) cublasLtMatrixLayoutDestroy(e->c);
    if (e->d) cublasLtMatrixLayoutDestroy(e->d);
    memset(e, 0, sizeof *e);
}

static int layout(cublasLtMatrixLayout_t *out, int dtype, int64_t rows, int64_t cols, int64_t ld, int64_t batch,
                  int64_t step)
{
    int32_t count = (int32_t)batch;
    LT_TRY(cublasLtMatrixLayoutCreate(out, data_type(dtype), (uint64_t)rows, (uint64_t)cols, ld));
    if (batch == 1) return 0;
    LT_TRY(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    LT_TRY(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step));
    return 0;
}

/* Returns the cuBLASLt epilogue that computes the extra output. cuBLASLt sees our rows as columns, so our b is its A
 * and our a is its B. */
static cublasLtEpilogue_t epilogue_of(const ps_cu_gemm *g)
{
    switch (g->also) {
    case PS_CU_GELU:
        if (g->pre) return g->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        return g->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case PS_CU_SUM_A: return CUBLASLT_EPILOGUE_BGRADB;
    case PS_CU_SUM_B: return CUBLASLT_EPILOGUE_BGRADA;
    default: return g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }
}

/* Sets the addresses of the bias (or sums) and of `pre` in the description of the product. They must be set before
 * cuBLASLt chooses an algorithm, because it checks their alignment. */
static int set_pointers(const lt_entry *e, const ps_cu_gemm *g)
{
    const void *vector = g->bias ? g->bias : g->sums;
    if (vector)
        LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector));
    if (g->pre)
        LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->pre,
                                              sizeof g->pre));
    return 0;
}

static int describe(lt_entry *e, const ps_cu_gemm *g)
{
    const lt_key *k = &e->key;
    bool wide = k->type_a == PS_F64;
    cublasOperation_t turn_a = k->turn_a ? CUBLAS_OP_T : CUBLAS_OP_N, turn_b = k->turn_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k->epilogue;
    cudaDataType_t type = data_type(k->type_d);
    LT_TRY(cublasLtMatmulDescCreate(&e->desc, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                    wide ? CUDA_R_64F : CUDA_R_32F));
    LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_TRANSA, &turn_a, sizeof turn_a));
    LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_TRANSB, &turn_b, sizeof turn_b));
    LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (g->bias || g->sums)
        LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
    if (g->pre)
        LT_TRY(cublasLtMatmulDescSetAttribute(e->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &k->m, sizeof k->m));
    PS_TRY(set_pointers(e, g));
    PS_TRY(layout(&e->a, k->type_a, k->turn_a ? k->k : k->m, k->turn_a ? k->m : k->k, k->lda, k->batch, k->step_a));
    PS_TRY(layout(&e->b, k->type_b, k->turn_b ? k->n : k->k, k->turn_b ? k->k : k->n, k->ldb, k->batch, k->step_b));
    PS_TRY(layout(&e->c, k->type_d, k->m, k->n, k->ldc, k->batch, k->step_d));
    return layout(&e->d, k->type_d, k->m, k->n, k->ldd, k->batch, k->step_d);
}

/* Asks cuBLASLt for its best algorithm. Sets e->none if cuBLASLt has no algorithm. */
static int choose(lt_entry *e)
{
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    size_t room = workspace_nbytes;
    const struct { cublasLtMatmulPreferenceAttributes_t what; int32_t nbytes; } aligned[] = {
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, e->key.align_a },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, e->key.align_b },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, e->key.align_c },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, e->key.align_d },
    };
    LT_TRY(cublasLtMatmulPreferenceCreate(&pref));
    cublasStatus_t s = cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room,
                                                            sizeof room);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                                 sizeof reductions);
    for (int i = 0; s == CUBLAS_STATUS_SUCCESS && i < 4; i++) {
        uint32_t nbytes = (uint32_t)aligned[i].nbytes;
        s = cublasLtMatmulPreferenceSetAttribute(pref, aligned[i].what, &nbytes, sizeof nbytes);
    }
    if (s == CUBLAS_STATUS_SUCCESS) {
        s = cublasLtMatmulAlgoGetHeuristic(lt, e->desc, e->a, e->b, e->c, e->d, pref, 1, &found, &n);
        if (s == CUBLAS_STATUS_NOT_SUPPORTED || (s == CUBLAS_STATUS_SUCCESS && n == 0) ||
            s == CUBLAS_STATUS_INVALID_VALUE) {
            e->none = true;
            s = CUBLAS_STATUS_SUCCESS;
        } else if (s == CUBLAS_STATUS_SUCCESS) {
            e->algo = found.algo;
        }
    }
    cublasLtMatmulPreferenceDestroy(pref);
    return lt_check(s, "choosing an algorithm");
}

static uint64_t hash_of(const lt_key *key)
{
    const unsigned char *p = (const unsigned char *)key;
    uint64_t h = 1469598103934665603ull;
    for (size_t i = 0; i < sizeof *key; i++) h = (h ^ p[i]) * 1099511628211ull;
    return h ^ h >> 32;
}

static int find(const lt_key *key, const ps_cu_gemm *g, lt_entry **out)
{
    if (n_entries >= ENTRIES * 3 / 4) {
        for (int i = 0; i < ENTRIES; i++)
            if (entries[i].used) entry_free(&entries[i]);
        n_entries = 0;
    }
    size_t at = hash_of(key) % ENTRIES;
    while (entries[at].used && memcmp(&entries[at].key, key, sizeof *key) != 0) at = (at + 1) % ENTRIES;
    lt_entry *e = &entries[at];
    *out = e;
    if (e->used) return 0;
    e->key = *key;
    int rc = describe(e, g);
    if (rc == 0) rc = choose(e);
    if (rc < 0) {
        entry_free(e);
        return rc;
    }
    e->used = true;
    n_entries++;
    return 0;
}

/* Returns whether the matrix has a stride of 1 and lines that do not overlap. Corrects the strides of dimensions of
 * size 1. */
static bool is_plain(ps_cu_mat *m)
{
    if (m->rows == 1 && m->cols == 1) m->stride_row = m->stride_col = 1;
    else if (m->cols == 1 && m->stride_row >= 1) m->stride_col = 1;
    else if (m->rows == 1 && m->stride_col >= 1) m->stride_row = m->stride_col == 1 ? m->cols : 1;
    return (m->stride_col == 1 && m->stride_row >= m->cols) || (m->stride_row == 1 && m->stride_col >= m->rows);
}

/* Describes the product for cuBLASLt. Returns false if cuBLASLt does not support the product. */
static bool make_key(ps_cu_gemm *g, lt_key *k)
{
    bool half = g->a.dtype == PS_BF16 || g->a.dtype == PS_F16;
    if (g->a.dtype != g->b.dtype || !ps_dtype_is_float(g->a.dtype)) return false;
    if (!is_plain(&g->a) || !is_plain(&g->b)) return false;
    if (g->dst.dtype != g->a.dtype && !(half && g->dst.dtype == PS_F32)) return false;
    if (g->dst.rows == 1) g->dst.stride_row = g->dst.cols;
    if (g->dst.stride_col != 1 && g->dst.cols != 1) return false;
    if (g->dst.stride_row < g->dst.cols) return false;
    memset(k, 0, sizeof *k);
    k->m = g->b.cols, k->n = g->a.rows, k->k = g->a.cols;
    k->turn_a = g->b.stride_col != 1, k->turn_b = g->a.stride_col != 1;
    k->lda = k->turn_a ? g->b.stride_col : g->b.stride_row, k->ldb = k->turn_b ? g->a.stride_col : g->a.stride_row;
    k->ldd = g->dst.stride_row, k->ldc = g->residual ? g->ld_residual : k->ldd;
    if (g->residual && k->n == 1) k->ldc = k->m;
    k->batch = g->batch, k->step_a = g->step_b, k->step_b = g->step_a, k->step_d = g->step_dst;
    k->type_a = g->b.dtype, k->type_b = g->a.dtype, k->type_d = g->dst.dtype;
    k->epilogue = epilogue_of(g), k->beta = g->accumulate || g->residual;
    k->align_a = alignment(g->b.data), k->align_b = alignment(g->a.data), k->align_d = alignment(g->dst.data);
    k->align_c = g->residual ? alignment(g->residual) : k->align_d;
    if (k->ldc < k->m || k->batch > INT32_MAX) return false;
    return true;
}

/* Runs the product. If cuBLASLt rejects the algorithm that it has chosen, the function sets e->none and computes
 * nothing. */
static int run_lt(const ps_cu_gemm *g, lt_entry *e)
{
    const void *c = g->residual ? g->residual : g->dst.data;
    float one_f = 1, beta_f = e->key.beta ? 1.0f : 0.0f;
    double one_d = 1, beta_d = e->key.beta ? 1.0 : 0.0;
    bool wide = e->key.type_a == PS_F64;
    PS_TRY(set_pointers(e, g));
    cublasStatus_t s = cublasLtMatmul(lt, e->desc, wide ? (const void *)&one_d : &one_f, g->b.data, e->a, g->a.data,
                                      e->b, wide ? (const void *)&beta_d : &beta_f, c, e->c, g->dst.data, e->d,
                                      &e->algo, workspace, workspace_nbytes, ps_cu->compute);
    e->none = s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE;
    return e->none ? 0 : lt_check(s, "cublasLtMatmul");
}

static int convert_bias(ps_call *call, ps_cu_gemm *g)
{
    if (!g->bias || ps_cu_takes_bias(g->bias, g->bias_dtype, g->dst.dtype)) return 0;
    ps_view from = { (void *)(uintptr_t)g->bias, g->bias_dtype, 1, g->b.cols, { g->b.cols }, { 1 } }, to = from;
    to.dtype = g->dst.dtype;
    to.data = call->scratch(call, (size_t)(g->b.cols * ps_dtype_bytes(to.dtype)));
    if (!to.data) return PS_ENOMEM;
    PS_TRY(ps_cuda_copy(&to, &from));
    g->bias = to.data;
    g->bias_dtype = to.dtype;
    return 0;
}

/* Finds the stored algorithm for the product, or asks cuBLASLt to choose one. */
static int look_up(lt_key *key, const ps_cu_gemm *g, lt_entry **out)
{
    if (g->bias || g->sums) key->align_vector = alignment(g->bias ? g->bias : g->sums);
    if (g->pre) key->align_pre = alignment(g->pre);
    return find(key, g, out);
}

int ps_cuda_gemm(ps_call *call, const ps_cu_gemm *given)
{
    ps_cu_gemm g = *given;
    lt_key key;
    lt_entry *e;
    g.also = 0;
    g.pre = g.sums = NULL;
    if (g.a.rows == 0 || g.b.cols == 0 || g.batch == 0) return 0;
    if (g.a.cols == 0 || !make_key(&g, &key)) return run_plain(&g);
    PS_TRY(convert_bias(call, &g));
    if (ps_cu->dry) return 0;
    PS_TRY(look_up(&key, &g, &e));
    if (!e->none) PS_TRY(run_lt(&g, e));
    return e->none ? run_plain(&g) : 0;
}

int ps_cuda_gemm_fused(ps_call *call, const ps_cu_gemm *given, bool *done)
{
    ps_cu_gemm g = *given;
    lt_key key;
    lt_entry *e;
    *done = false;
    if (ps_cu->dry) return 0;                        /* the unfused product needs the same amount of workspace */
    if (g.a.rows == 0 || g.b.cols == 0 || g.a.cols == 0 || g.batch != 1 || !make_key(&g, &key)) return 0;
    if (g.pre && (key.m % 8 != 0 || !aligned16(g.pre))) return 0;
    if (g.sums && !aligned16(g.sums)) return 0;
    PS_TRY(convert_bias(call, &g));
    PS_TRY(look_up(&key, &g, &e));
    if (e->none) return 0;
    PS_TRY(run_lt(&g, e));
    *done = !e->none;
    return 0;
}

int ps_cuda_gemm_open(void)
{
    entries = (lt_entry *)ps_alloc0(sizeof *entries * ENTRIES);
    if (!entries) return ps_fail_nomem(sizeof *entries * ENTRIES);
    cublasStatus_t s = cublasLtCreate(&lt);
    if (s != CUBLAS_STATUS_SUCCESS) {
        lt = NULL;
        return ps_fail(PS_EBACKEND, "no library: cuBLASLt cannot be started: %s", cublasLtGetStatusString(s));
    }
    CU_TRY(cudaMalloc(&workspace, workspace_nbytes));
    return 0;
}

void ps_cuda_gemm_close(void)
{
    for (int i = 0; entries && i < ENTRIES; i++)
        if (entries[i].used) entry_free(&entries[i]);
    ps_free(entries);
    entries = NULL;
    n_entries = 0;
    if (workspace) cudaFree(workspace);
    workspace = NULL;
    if (lt) cublasLtDestroy(lt);
    lt = NULL;
}

const char *ps_cuda_gemm_describe(void)
{
    static char text[64];
    size_t v = cublasLtGetVersion();
    snprintf(text, sizeof text, "cuBLASLt %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
    return text;
}
