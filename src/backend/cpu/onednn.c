/* SPDX-License-Identifier: BSD-3-Clause
 * Matrix products by oneDNN. The file supports the C APIs of oneDNN 2.x and 3.x. Only the section "two APIs" depends on
 * the version.
 *
 * A key describes a product: its sizes, strides, types, options and number of threads. For each key, this file creates
 * a primitive and memory objects once and keeps them in a bounded table. Later calls only set pointers.
 *
 * The call's workspace serves as oneDNN's scratchpad. oneDNN's "gemm" implementations allocate more memory: in each
 * call they allocate buffers for packed matrices (some MiB per thread) from the C library's heap. oneDNN has no option
 * to provide these buffers. The heap keeps the buffers' pages after the call. ps_products_rehearse measures these pages
 * for the plan.
 *
 * If the machine has no fast instructions for an operand's type (bf16, fp16), or if oneDNN rejects a mixture of types,
 * the operands are converted to fp32 in panels of bounded size. The result is rounded once.
 *
 * One lock guards the table and the memory objects, so that contexts of different threads can compute products at the
 * same time. */
#include "backend/cpu/gemm.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/half.h"
#include <dnnl.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    CACHE_SLOTS = 2048, CACHE_MAX = 1024,           /* CACHE_SLOTS: size of a hash table with open addressing;
                                                     * CACHE_MAX: its maximum number of entries, half of its slots */
    PANEL_M = 1024, PANEL_N = 1024, PANEL_K = 2048, /* sizes of the fp32 panels; all panels together take 20 MiB */
    DEPTH = 512,                                    /* if a sum is computed in parts, the number of terms in each
                                                     * part */
    SHARED = 2048,                                  /* oneDNN splits a sum with at least this number of terms over
                                                     * threads */
    SCRATCH_MAX = 64 << 20,                         /* implementations that need more bytes of scratch memory are
                                                     * skipped */
    GEMM_SCRATCH_MAX = 24 << 20                     /* the same limit for "gemm" implementations; it is lower, because
                                                     * they are only slightly faster */
};

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static int open_count;                               /* number of contexts that use the engine */
static bool native[PS_DTYPE_COUNT];
static char description[160] = "oneDNN not opened";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int fail_dnnl(dnnl_status_t status, const char *what)
{
    if (status == dnnl_out_of_memory) return ps_fail(PS_ENOMEM, "oneDNN: no memory while %s", what);
    return ps_fail(PS_EBACKEND, "oneDNN: %s failed with status %d", what, (int)status);
}

static dnnl_data_type_t type_of(int dtype)
{
    return dtype == PS_F32 ? dnnl_f32 : dtype == PS_BF16 ? dnnl_bf16 : dnnl_f16;
}

/* -- two APIs ------------------------------------------------------------------------------------------------------ */
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t shape_desc;              /* a handle that must be destroyed */
typedef const_dnnl_memory_desc_t shape_ref;
static shape_ref ref_of(const shape_desc *d) { return *d; }
static dnnl_status_t desc_new(shape_desc *d, int ndim, const dnnl_dim_t *dims, dnnl_data_type_t type,
                              const dnnl_dim_t *strides)
{
    return dnnl_memory_desc_create_with_strides(d, ndim, dims, type, strides);
}
static void desc_free(shape_desc *d) { if (*d) dnnl_memory_desc_destroy(*d); }
static dnnl_status_t add_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
}
static dnnl_status_t matmul_first(dnnl_primitive_desc_t *pd, const shape_desc *a, const shape_desc *b,
                                  const shape_desc *bias, const shape_desc *dst, const_dnnl_primitive_attr_t attr)
{
    return dnnl_matmul_primitive_desc_create(pd, engine, *a, *b, bias ? *bias : NULL, *dst, attr);
}
static dnnl_status_t matmul_next(dnnl_primitive_desc_t pd) { return dnnl_primitive_desc_next_impl(pd); }
#else
typedef dnnl_memory_desc_t shape_desc;              /* a plain struct */
typedef const dnnl_memory_desc_t *shape_ref;
static shape_ref ref_of(const shape_desc *d) { return d; }
static dnnl_status_t desc_new(shape_desc *d, int ndim, const dnnl_dim_t *dims, dnnl_data_type_t type,
                              const dnnl_dim_t *strides)
{
    return dnnl_memory_desc_init_by_strides(d, ndim, dims, type, strides);
}
static void desc_free(shape_desc *d) { (void)d; }
static dnnl_status_t add_sum(dnnl_post_ops_t ops) { return dnnl_post_ops_append_sum(ops, 1.0f); }
#endif

/* An iterator over oneDNN's implementations, in oneDNN's order of preference. */
typedef struct impl_walk {
#if DNNL_VERSION_MAJOR < 3
    dnnl_matmul_desc_t op;                           /* must exist as long as the iterator, which reads it */
    dnnl_primitive_desc_iterator_t it;
#endif
    dnnl_primitive_desc_t pd;                        /* the current implementation; it belongs to the walk until the
                                                      * caller takes it */
} impl_walk;

#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t walk_begin(impl_walk *w, const shape_desc *a, const shape_desc *b, const shape_desc *bias,
                                const shape_desc *dst, const_dnnl_primitive_attr_t attr)
{
    w->pd = NULL;
    return matmul_first(&w->pd, a, b, bias, dst, attr);
}
static bool walk_next(impl_walk *w) { return matmul_next(w->pd) == dnnl_success; }
static void walk_end(impl_walk *w) { if (w->pd) dnnl_primitive_desc_destroy(w->pd); }
#else
static dnnl_status_t walk_begin(impl_walk *w, const shape_desc *a, const shape_desc *b, const shape_desc *bias,
                                const shape_desc *dst, const_dnnl_primitive_attr_t attr)
{
    memset(w, 0, sizeof *w);
    dnnl_status_t st = dnnl_matmul_desc_init(&w->op, a, b, bias, dst);
    if (st == dnnl_success) st = dnnl_primitive_desc_iterator_create(&w->it, &w->op, attr, engine, NULL);
    if (st != dnnl_success) return st;
    w->pd = dnnl_primitive_desc_iterator_fetch(w->it);
    return w->pd ? dnnl_success : dnnl_out_of_memory;
}
static bool walk_next(impl_walk *w)
{
    if (dnnl_primitive_desc_iterator_next(w->it) != dnnl_success) return false;
    dnnl_primitive_desc_t pd = dnnl_primitive_desc_iterator_fetch(w->it);
    if (!pd) return false;
    dnnl_primitive_desc_destroy(w->pd);
    w->pd = pd;
    return true;
}
static void walk_end(impl_walk *w)
{
    if (w->pd) dnnl_primitive_desc_destroy(w->pd);
    if (w->it) dnnl_primitive_desc_iterator_destroy(w->it);
}
#endif

/* -- the table of primitives --------------------------------------------------------------------------------------- */
typedef struct key {                                 /* has no padding, because keys are compared and hashed as words */
    int64_t m, n, k, batch, step_a, step_b, step_dst, ld_a, ld_b, ld_dst;
    int32_t trans_a, trans_b, type_a, type_b, type_dst, type_bias;    /* type_bias is -1 if there is no bias */
    int32_t residual, accumulate, threads, pad;
} key;

typedef struct entry {
    key key;
    bool supported;                                  /* if false, the product is computed in panels, or the products of
                                                      * the batch are computed one by one */
    int order;                                       /* number of entries that were created before this one */
    size_t scratch_nbytes;
    dnnl_primitive_t prim;
    dnnl_memory_t a, b, dst, bias, residual, scratch;
} entry;

static entry *table[CACHE_SLOTS];
static int table_count;
static bool table_was_full;                          /* true if entries were dropped because the table was full */

static uint64_t key_hash(const key *k)
{
    uint64_t h = 0x9E3779B97F4A7C15u, word[sizeof *k / 8];
    memcpy(word, k, sizeof *k);
    for (size_t i = 0; i < sizeof *k / 8; i++) h = (h ^ word[i]) * 0xff51afd7ed558ccdu, h ^= h >> 32;
    return h;
}

static void entry_free(entry *e)
{
    if (e->prim) dnnl_primitive_destroy(e->prim);
    dnnl_memory_t all[] = { e->a, e->b, e->dst, e->bias, e->residual, e->scratch };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]) dnnl_memory_destroy(all[i]);
    ps_free(e);
}

static void table_clear(void)
{
    for (int i = 0; i < CACHE_SLOTS; i++) {
        if (table[i]) entry_free(table[i]);
        table[i] = NULL;
    }
    table_count = 0;
}

typedef struct descs { shape_desc a, b, dst, bias; } descs;

static void descs_free(descs *d)
{
    desc_free(&d->a);
    desc_free(&d->b);
    desc_free(&d->dst);
    desc_free(&d->bias);
}

/* Describes the operands. If the batch is 1, an operand has the shape [rows, cols]. Otherwise it has the shape [batch,
 * rows, cols], or [1, rows, cols] if all products use the same matrix. */
static dnnl_status_t descs_new(const key *k, descs *d)
{
    memset(d, 0, sizeof *d);
    int skip = k->batch == 1, nd = 3 - skip;
    dnnl_dims_t da = { k->step_a ? k->batch : 1, k->m, k->k }, db = { k->step_b ? k->batch : 1, k->k, k->n };
    dnnl_dims_t dd = { k->batch, k->m, k->n }, dbias = { 1, 1, k->n }, sbias = { k->n, k->n, 1 };
    dnnl_dims_t sa = { k->step_a ? k->step_a : k->m * k->k, k->trans_a ? 1 : k->ld_a, k->trans_a ? k->ld_a : 1 };
    dnnl_dims_t sb = { k->step_b ? k->step_b : k->k * k->n, k->trans_b ? 1 : k->ld_b, k->trans_b ? k->ld_b : 1 };
    dnnl_dims_t sd = { k->step_dst, k->ld_dst, 1 };
    dnnl_status_t st = desc_new(&d->a, nd, da + skip, type_of(k->type_a), sa + skip);
    if (st == dnnl_success) st = desc_new(&d->b, nd, db + skip, type_of(k->type_b), sb + skip);
    if (st == dnnl_success) st = desc_new(&d->dst, nd, dd + skip, type_of(k->type_dst), sd + skip);
    if (st == dnnl_success && k->type_bias >= 0)
        st = desc_new(&d->bias, nd, dbias + skip, type_of(k->type_bias), sbias + skip);
    return st;
}

static dnnl_status_t attr_new(const key *k, const descs *d, dnnl_primitive_attr_t *out)
{
    dnnl_post_ops_t ops = NULL;
    dnnl_status_t st = dnnl_primitive_attr_create(out);
    if (st != dnnl_success) return st;
    st = dnnl_post_ops_create(&ops);
    if (st == dnnl_success && k->accumulate) st = add_sum(ops);
    if (st == dnnl_success && k->residual) st = dnnl_post_ops_append_binary(ops, dnnl_binary_add, ref_of(&d->dst));
    if (st == dnnl_success) st = dnnl_primitive_attr_set_post_ops(*out, ops);
    if (st == dnnl_success) st = dnnl_primitive_attr_set_scratchpad_mode(*out, dnnl_scratchpad_mode_user);
    if (ops) dnnl_post_ops_destroy(ops);
    return st;
}

static size_t scratch_of(dnnl_primitive_desc_t pd)
{
    return dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0));
}

/* Returns true if oneDNN may use all instructions of a set. In oneDNN's bit masks, a newer set includes the bits of all
 * older sets. */
static bool has_isa(int set) { return ((int)dnnl_get_effective_cpu_isa() & set) == set; }

/* Returns true if the processor is a Sapphire Rapids or one of its successors. The function checks for avx512fp16,
 * which all these processors have. It does not check for AMX, because virtual machines can hide AMX. */
static bool is_rapids(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") && __builtin_cpu_supports("avx512fp16") && has_isa(dnnl_cpu_isa_avx512_core);
#else
    return false;
#endif
}

/* Returns true if the result is so large that "gemm" packs both operands, even if it runs on several threads. */
static bool packs_all(const key *k) { return 1.0 / (double)k->m + 1.0 / (double)k->n < 0.00196; }

/* Returns true if "gemm" sums a product with a transposed b in the same order for every number of threads. The order
 * depends on packing. "gemm" divides sums of packed operands into equal blocks of at most BLOCK terms, and other sums
 * into blocks of BLOCK terms. With one thread, "gemm" packs operands that it would read directly with several threads.
 * It packs the operands for every number of threads only if the result is large and a stride is a multiple of EVEN.
 * Source: nocopy_checker_avx512 in gemm_driver.cpp. */
static bool has_one_order(const key *k)
{
    enum { BLOCK = 384, EVEN = 256 };
    bool even = k->ld_a % EVEN == 0 || k->ld_b % EVEN == 0 || k->ld_dst % EVEN == 0;
    return k->k <= BLOCK || k->k % BLOCK == 0 || (packs_all(k) && even);
}

/* Returns true if a "gemm" implementation is faster than the "brgemm" implementation that oneDNN prefers.
 *   On Zen 4, "gemm" is faster for three kinds of products if b is not transposed: fp32 products without a bias (up to
 *   13 %, LM head), fp32 products with a residual (4 %), and large bf16 weight gradients with more columns than rows (5
 *   %).
 *   On Sapphire Rapids and its successors, "gemm" is faster for two kinds of fp32 products: products with a wide result
 *   and a transposed b (5 to 14 %), and products whose sums have at least 512 terms, even with a bias (7 %; twice the
 *   speed for GPT-2's [1024, 768] x [768, 3072]). "gemm" is slower in two exceptions. The first is a transposed b of
 *   LONG terms that "gemm" reads directly (6 % slower at [1024, 3072] x [768, 3072]^T). The second is NARROW weight
 *   gradients with MANY elements and SHORT sums (2 to 8 % slower in panels of the LM head).
 *   For small results of long sums, the function keeps oneDNN's choice. Both implementations split such sums over
 *   threads, and "gemm" splits more of them. */
static bool prefers_gemm(const key *k)
{
    enum { LONG = 3072, SHORT = 512, MANY = 1 << 20, NARROW = 1024 };
    bool large = k->m * k->n * k->k > 1 << 28, plain = k->type_bias < 0 && !k->residual;
    if (k->batch > 1) return false;
    if (k->k > 16 * (k->m < k->n ? k->m : k->n) && k->m * k->n <= 1 << 17) return false;
    bool rapids = k->type_a == PS_F32 && is_rapids();
    bool read_well = k->k < LONG || packs_all(k);
    if (k->trans_b) return rapids && !k->residual && k->m >= 64 && k->n >= 512 && read_well && has_one_order(k);
    bool thin = k->k <= SHORT && k->n < NARROW && k->m * k->n >= MANY;
    if (rapids && k->trans_a && thin) return false;
    if (rapids && k->k >= 512) return true;
    if (k->type_a == PS_F32) return plain || (k->residual && large);
    return plain && large && k->trans_a && k->n > k->m;
}

/* Returns true if "brgemm" would split the sums of this product over threads. The bits of the result would then depend
 * on the number of threads. "brgemm" splits sums of at least SHARED terms if `a` is transposed. It splits bf16 sums
 * only if the number of terms is also a power of two. */
static bool shares_sums(const key *k)
{
    if (!k->trans_a || k->batch > 1 || k->k < SHARED || !has_isa(dnnl_cpu_isa_avx512_core)) return false;
    return (k->type_a == PS_F32 || (k->k & (k->k - 1)) == 0) && !prefers_gemm(k);
}

/* Returns true if the machine has multiply instructions for this type. On AVX-512 machines without bf16 instructions,
 * oneDNN emulates bf16. The emulation has a third of the speed of fp32 panels. */
static bool has_instructions(int dtype)
{
#if defined(__x86_64__)
    if (dtype == PS_BF16) return has_isa(dnnl_cpu_isa_avx512_core_bf16);
#if DNNL_VERSION_MAJOR >= 3
    if (dtype == PS_F16) return has_isa(dnnl_cpu_isa_avx512_core_fp16);
#endif
#endif
    return true;                                             /* if the instructions are missing, oneDNN rejects the
                                                              * product */
}

/* Returns true if fp32 panels are faster than bf16 instructions. On Sapphire Rapids, bf16 products are fast only with
 * AMX. The AVX-512 bf16 instruction reaches 0.6 of the fp32 rate (2048^3 on one thread: bf16 83 GFLOP/s, fp32 143
 * GFLOP/s, panels 135 GFLOP/s). If a product is smaller than the sizes in this function, the conversion takes more time
 * than it saves. */
static bool prefers_panels(const key *k)
{
    bool slow = k->type_a == PS_BF16 && is_rapids() && !has_isa(dnnl_cpu_isa_avx512_core_amx);
    return slow && k->m >= 64 && k->n >= 128 && k->k >= 128;
}

/* Returns true if a product of bf16 or fp16 values must use panels, because oneDNN would split the product's sums over
 * threads. For large products oneDNN splits the rows and columns of the result instead of the sums. For bf16 products
 * with AMX the function returns false, because these products are three to four times as fast as panels. With AMX, the
 * size of oneDNN's blocks of terms depends on the number of threads even if no sum is split. */
static bool half_shares(const key *k)
{
    if (k->type_a == PS_BF16 && has_isa(dnnl_cpu_isa_avx512_core_amx)) return false;
    return k->type_a != PS_F32 && k->m * k->n <= 1 << 18 && shares_sums(k);
}

/* Moves the walk to the implementation to use. Returns false if all of oneDNN's implementations for the product are
 * reference loops or need too much scratch memory. */
static bool choose(impl_walk *w, const key *k, descs *d, dnnl_primitive_attr_t attr, dnnl_status_t *st)
{
    const shape_desc *bias = k->type_bias >= 0 ? &d->bias : NULL;
    for (int want_gemm = prefers_gemm(k); want_gemm >= 0; want_gemm--) {
        *st = walk_begin(w, &d->a, &d->b, bias, &d->dst, attr);
        if (*st != dnnl_success) return false;
        do {
            const char *name = "";
            dnnl_primitive_desc_query(w->pd, dnnl_query_impl_info_str, 0, &name);
            size_t limit = want_gemm ? GEMM_SCRATCH_MAX : SCRATCH_MAX;
            if (strncmp(name, "ref", 3) == 0 || scratch_of(w->pd) > limit) continue;
            if (!want_gemm || strncmp(name, "gemm", 4) == 0) return true;
        } while (walk_next(w));
        walk_end(w);
    }
    memset(w, 0, sizeof *w);
    *st = dnnl_unimplemented;
    return false;
}

static dnnl_status_t entry_fill(entry *e)
{
    const key *k = &e->key;
    descs d;
    dnnl_primitive_attr_t attr = NULL;
    impl_walk w;
    memset(&w, 0, sizeof w);
    bool ours = has_instructions(k->type_a) && has_instructions(k->type_b) && !prefers_panels(k) && !half_shares(k);
    dnnl_status_t st = descs_new(k, &d);
    if (!ours) st = dnnl_unimplemented;
    if (st == dnnl_success) st = attr_new(k, &d, &attr);
    if (st == dnnl_success && choose(&w, k, &d, attr, &st)) {
        st = dnnl_primitive_create(&e->prim, w.pd);
        shape_ref sp = dnnl_primitive_desc_query_md(w.pd, dnnl_query_scratchpad_md, 0);
        e->scratch_nbytes = dnnl_memory_desc_get_size(sp);
        if (st == dnnl_success) st = dnnl_memory_create(&e->scratch, sp, engine, DNNL_MEMORY_NONE);
        if (st == dnnl_success) st = dnnl_memory_create(&e->a, ref_of(&d.a), engine, DNNL_MEMORY_NONE);
        if (st == dnnl_success) st = dnnl_memory_create(&e->b, ref_of(&d.b), engine, DNNL_MEMORY_NONE);
        if (st == dnnl_success) st = dnnl_memory_create(&e->dst, ref_of(&d.dst), engine, DNNL_MEMORY_NONE);
        if (st == dnnl_success && k->type_bias >= 0)
            st = dnnl_memory_create(&e->bias, ref_of(&d.bias), engine, DNNL_MEMORY_NONE);
        if (st == dnnl_success && k->residual)
            st = dnnl_memory_create(&e->residual, ref_of(&d.dst), engine, DNNL_MEMORY_NONE);
        e->supported = st == dnnl_success;
    }
    walk_end(&w);
    if (attr) dnnl_primitive_attr_destroy(attr);
    descs_free(&d);
    return st == dnnl_unimplemented || st == dnnl_invalid_arguments ? dnnl_success : st;
}

/* Finds or creates the entry of a key. The entry is valid until the next call of this function. The caller holds the
 * lock. */
static int entry_get(const key *k, entry **out)
{
    uint64_t slot = key_hash(k) % CACHE_SLOTS;
    for (; table[slot]; slot = (slot + 1) % CACHE_SLOTS)
        if (memcmp(&table[slot]->key, k, sizeof *k) == 0) {
            *out = table[slot];
            return 0;
        }
    if (table_count >= CACHE_MAX) {
        table_clear();
        table_was_full = true;
        slot = key_hash(k) % CACHE_SLOTS;
    }
    entry *e = ps_alloc0(sizeof *e);
    if (!e) return ps_fail_nomem(sizeof *e);
    e->key = *k;
    dnnl_status_t st = entry_fill(e);
    if (st != dnnl_success) {
        entry_free(e);
        return fail_dnnl(st, "preparing a matrix product");
    }
    table[slot] = e;
    e->order = table_count++;
    *out = e;
    return 0;
}

/* -- running ------------------------------------------------------------------------------------------------------- */
static int grow(ps_gemm_space *space, void **p, size_t *have, size_t want)
{
    if (want <= *have) return 0;
    *p = space->call->scratch(space->call, want);
    *have = *p ? want : 0;
    return *p ? 0 : PS_ENOMEM;                       /* scratch() has recorded the error */
}

/* Returns true if the matrix has several columns, and adjacent elements of a row are not adjacent in memory. */
static int is_transposed(const ps_mat *m) { return m->cols > 1 && m->stride_col != 1; }

/* Returns the leading dimension of a matrix. stride_row is 1 if `transposed` is set, otherwise stride_col is 1. If the
 * other dimension has size 1, its stride has no meaning, and the function returns the leading dimension of a dense
 * matrix. */
static int64_t leading(const ps_mat *m, int transposed)
{
    int64_t outer = transposed ? m->cols : m->rows, inner = transposed ? m->rows : m->cols;
    int64_t ld = transposed ? m->stride_col : m->stride_row;
    return outer == 1 || ld < inner ? inner : ld;
}

static void key_of(const ps_gemm *g, key *k)
{
    memset(k, 0, sizeof *k);
    k->m = g->a.rows, k->k = g->a.cols, k->n = g->b.cols;
    k->batch = g->batch;
    if (g->batch > 1) k->step_a = g->step_a, k->step_b = g->step_b, k->step_dst = g->step_dst;
    k->trans_a = is_transposed(&g->a), k->trans_b = is_transposed(&g->b);
    k->ld_a = leading(&g->a, k->trans_a), k->ld_b = leading(&g->b, k->trans_b), k->ld_dst = leading(&g->dst, 0);
    k->type_a = g->a.dtype, k->type_b = g->b.dtype, k->type_dst = g->dst.dtype;
    k->type_bias = g->bias ? g->bias_dtype : -1;
    k->residual = g->residual != NULL;
    k->accumulate = g->accumulate != 0;
    k->threads = omp_get_max_threads();
}

/* Returns the number of terms in each part of the product's sums: all terms, DEPTH or SHARED / 2. The result does not
 * depend on the number of threads. Hence the bits of the product do not depend on the number of threads either. Sums
 * are divided into several parts in two cases.
 * In the first case, `a` is tall and transposed, and its columns are at least a page apart. If the result is narrow,
 * oneDNN reads these columns directly, and a long sum does not fit the caches. With parts, fp32 weight gradients of
 * 1024 x 256 over 2048 rows are computed 1.4 times as fast.
 * In the second case, oneDNN would split the sums over threads. On two threads, a product in parts takes 0.85 to 0.98
 * times as long as a product without parts if the result is at least 128 x 128, and up to 1.9 times as long if the
 * result has 1,000 elements. */
static int64_t depth_of(const ps_gemm *g)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols;
    bool fp32 = g->a.dtype == PS_F32 && g->b.dtype == PS_F32 && g->dst.dtype == PS_F32;
    bool narrow = N < 768 || M * N < 1 << 20, plain = !g->bias && !g->residual;
    if (!fp32) return K;
    if (plain && is_transposed(&g->a) && M >= 1024 && narrow && K >= 2 * DEPTH) return DEPTH;
    key k;
    key_of(g, &k);
    return shares_sums(&k) ? SHARED / 2 : K;
}

/* Runs the primitive of an entry. The caller holds the lock. bias and residual are ignored if the entry's key has
 * none. */
static int execute(entry *e, const void *a, const void *b, void *dst, const void *bias, const void *residual,
                   void *work)
{
    dnnl_memory_set_data_handle(e->a, (void *)(uintptr_t)a);
    dnnl_memory_set_data_handle(e->b, (void *)(uintptr_t)b);
    dnnl_memory_set_data_handle(e->dst, dst);
    dnnl_memory_set_data_handle(e->scratch, work);
    dnnl_exec_arg_t arg[6] = { { DNNL_ARG_SRC, e->a }, { DNNL_ARG_WEIGHTS, e->b }, { DNNL_ARG_DST, e->dst },
                               { DNNL_ARG_SCRATCHPAD, e->scratch } };
    int n = 4;
    if (e->bias) {
        dnnl_memory_set_data_handle(e->bias, (void *)(uintptr_t)bias);
        arg[n++] = (dnnl_exec_arg_t){ DNNL_ARG_BIAS, e->bias };
    }
    if (e->residual) {
        int where = DNNL_ARG_ATTR_MULTIPLE_POST_OP(e->key.accumulate ? 1 : 0) | DNNL_ARG_SRC_1;
        dnnl_memory_set_data_handle(e->residual, (void *)(uintptr_t)residual);
        arg[n++] = (dnnl_exec_arg_t){ where, e->residual };
    }
    dnnl_status_t st = dnnl_primitive_execute(e->prim, stream, n, arg);
    if (st == dnnl_success) st = dnnl_stream_wait(stream);
    return st == dnnl_success ? 0 : fail_dnnl(st, "a matrix product");
}

/* Runs the product by one primitive. Returns 1 if the primitive ran, 0 if oneDNN does not support the product, or an
 * error. */
static int run_direct(ps_gemm_space *space, const ps_gemm *g)
{
    key k;
    entry *e;
    key_of(g, &k);
    pthread_mutex_lock(&lock);
    int rc = entry_get(&k, &e);
    if (rc == 0 && e->supported) rc = grow(space, &space->work, &space->work_nbytes, e->scratch_nbytes);
    if (rc < 0 || !e->supported) {
        pthread_mutex_unlock(&lock);
        return rc;
    }
    if (space->call->dry) {
        pthread_mutex_unlock(&lock);
        return 1;
    }
    rc = execute(e, g->a.data, g->b.data, g->dst.data, g->bias, g->residual, space->work);
    pthread_mutex_unlock(&lock);
    return rc < 0 ? rc : 1;
}

static const void *at(const void *p, int64_t i, int dtype) { return (const char *)p + i * ps_dtype_bytes(dtype); }
static void *moved(const ps_mat *m, int64_t elements) { return (void *)(uintptr_t)at(m->data, elements, m->dtype); }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Like run_direct(), but each part of a sum has only depth_of() terms. */
static int run_deep(ps_gemm_space *space, const ps_gemm *g)
{
    int64_t K = g->a.cols, depth = depth_of(g);
    int rc = 1;
    for (int64_t k = 0; k < K && rc > 0; k += depth) {
        ps_gemm part = *g;
        part.a.data = moved(&g->a, k * g->a.stride_col);
        part.b.data = moved(&g->b, k * g->b.stride_row);
        part.a.cols = part.b.rows = least(depth, K - k);
        part.accumulate = g->accumulate || k > 0;
        if (k > 0) part.bias = part.residual = NULL;
        rc = run_direct(space, &part);
        if (rc == 0 && k > 0) rc = ps_fail(PS_EBACKEND, "oneDNN offers no fp32 matrix product for this shape");
    }
    return rc;
}

/* -- conversion of rows -------------------------------------------------------------------------------------------- */
#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) static int64_t f16_load_f16c(float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    return i;
}
__attribute__((target("avx,f16c"))) static int64_t f16_store_f16c(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
static bool has_f16c(void) { return __builtin_cpu_supports("avx2"); }   /* every AVX2 machine also has F16C */
#else
static int64_t f16_load_f16c(float *dst, const uint16_t *src, int64_t n) { return 0; }
static int64_t f16_store_f16c(uint16_t *dst, const float *src, int64_t n) { return 0; }
static bool has_f16c(void) { return false; }
#endif

void ps_cpu_row_load(float *dst, const void *src, int64_t n, int dtype)
{
    const uint16_t *h = src;
    if (dtype == PS_F32) {
        memcpy(dst, src, (size_t)n * 4);
    } else if (dtype == PS_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dst[i] = ps_bf16_to_f32(h[i]);
    } else {
        int64_t i = has_f16c() ? f16_load_f16c(dst, h, n) : 0;
        for (; i < n; i++) dst[i] = ps_f16_to_f32(h[i]);
    }
}

void ps_cpu_row_store(void *dst, const float *src, int64_t n, int dtype)
{
    uint16_t *h = dst;
    if (dtype == PS_F32) {
        memcpy(dst, src, (size_t)n * 4);
    } else if (dtype == PS_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) h[i] = ps_f32_to_bf16(src[i]);
    } else {
        int64_t i = has_f16c() ? f16_store_f16c(h, src, n) : 0;
        for (; i < n; i++) h[i] = ps_f32_to_f16(src[i]);
    }
}

/* Writes c + bias + residual to the block of dst that begins at (i0, j0). If `accumulate` is set, also adds the old
 * values of dst. c is fp32 [rows, cols] with the leading dimension ldc. If c is NULL, it counts as a matrix of
 * zeros. */
static void finish(const ps_gemm *g, const float *c, int64_t ldc, int64_t i0, int64_t rows, int64_t j0, int64_t cols)
{
#pragma omp parallel for schedule(static) if (rows * cols > PS_PAR_MIN)
    for (int64_t i = 0; i < rows; i++) {
        float sum[PANEL_N], more[PANEL_N];
        char *dst = (char *)g->dst.data + ((i0 + i) * g->dst.stride_row + j0) * ps_dtype_bytes(g->dst.dtype);
        const void *extra[3] = { g->bias ? at(g->bias, j0, g->bias_dtype) : NULL, g->accumulate ? dst : NULL,
            g->residual ? at(g->residual, (i0 + i) * g->ld_residual + j0, g->dst.dtype) : NULL };
        if (c) memcpy(sum, c + i * ldc, (size_t)cols * 4);
        else memset(sum, 0, (size_t)cols * 4);
        for (int t = 0; t < 3; t++) {
            if (!extra[t]) continue;
            ps_cpu_row_load(more, extra[t], cols, t == 0 ? g->bias_dtype : g->dst.dtype);
#pragma omp simd
            for (int64_t j = 0; j < cols; j++) sum[j] += more[j];
        }
        ps_cpu_row_store(dst, sum, cols, g->dst.dtype);
    }
}

/* Returns the block of m that begins at (i0, j0), in fp32. If m is fp32, the result points to m's own memory. Otherwise
 * the result is a dense copy in `panel`, and is transposed if m is transposed. */
static ps_mat panel_of(const ps_mat *m, int64_t i0, int64_t rows, int64_t j0, int64_t cols, float *panel, int fresh)
{
    const char *p = at(m->data, i0 * m->stride_row + j0 * m->stride_col, m->dtype);
    if (m->dtype == PS_F32) return (ps_mat){ (void *)(uintptr_t)p, PS_F32, rows, cols, m->stride_row, m->stride_col };
    int t = is_transposed(m);
    int64_t outer = t ? cols : rows, inner = t ? rows : cols, ld = t ? m->stride_col : m->stride_row;
    if (fresh) {
#pragma omp parallel for schedule(static) if (outer * inner > PS_PAR_MIN)
        for (int64_t i = 0; i < outer; i++)
            ps_cpu_row_load(panel + i * inner, at(p, i * ld, m->dtype), inner, m->dtype);
    }
    return (ps_mat){ panel, PS_F32, rows, cols, t ? 1 : inner, t ? inner : 1 };
}

/* Computes one product in fp32 panels. The sum over all K terms is computed in fp32 and rounded once at the end. */
static int run_panels(ps_gemm_space *space, const ps_gemm *g)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols;
    int64_t mb = least(M, PANEL_M), nb = least(N, PANEL_N), kb = least(K, PANEL_K);
    int64_t na = g->a.dtype == PS_F32 ? 0 : (mb * kb + 15) / 16 * 16;
    int64_t nbp = g->b.dtype == PS_F32 ? 0 : (kb * nb + 15) / 16 * 16;
    PS_TRY(grow(space, &space->panels, &space->panels_nbytes, (size_t)(na + nbp + mb * nb) * 4));
    float *pa = space->panels, *pb = pa + na, *pc = pb + nbp;
    bool dry = space->call->dry;
    int64_t held_m = -1, held_k = -1;                /* row and column of `a` at which the block in pa begins */
    for (int64_t n0 = 0; n0 < N; n0 += nb)
        for (int64_t m0 = 0; m0 < M; m0 += mb) {
            int64_t rows = least(mb, M - m0), cols = least(nb, N - n0);
            for (int64_t k0 = 0; k0 < K; k0 += kb) {
                int64_t depth = least(kb, K - k0);
                ps_gemm part = { .batch = 1, .accumulate = k0 > 0 };
                part.a = panel_of(&g->a, m0, rows, k0, depth, pa,
                                  !dry && (m0 != held_m || k0 != held_k));
                part.b = panel_of(&g->b, k0, depth, n0, cols, pb, !dry);
                part.dst = (ps_mat){ pc, PS_F32, rows, cols, cols, 1 };
                held_m = m0, held_k = k0;
                int rc = run_deep(space, &part);
                if (rc == 0) rc = ps_fail(PS_EBACKEND, "oneDNN offers no fp32 matrix product for this shape");
                if (rc < 0) return rc;
            }
            if (!dry) finish(g, pc, cols, m0, rows, n0, cols);
        }
    return 0;
}

/* -- few rows ------------------------------------------------------------------------------------------------------ */
/* Returns true if the product has few rows and a large matrix, or only one element. A product with few rows spends most
 * of its time on reading the matrix, and oneDNN reaches only half of the memory bandwidth for it. A product with one
 * element is too small for oneDNN. */
static bool has_few_rows(const ps_gemm *g)
{
    int64_t line = g->b.stride_col == 1 ? g->b.cols : g->b.rows;
    bool in_lines = g->b.stride_col == 1 || g->b.stride_row == 1;
    bool is_dot = g->a.rows == 1 && g->b.cols == 1 && g->b.stride_row == 1;
    return is_dot || (g->a.rows <= PS_FEW_ROWS && in_lines && line >= 64 && g->b.rows * g->b.cols >= 1 << 16);
}

/* Describes a product with one column, such as the product of a matrix and a vector, as a product with one row: dst^T =
 * b^T a^T. Returns the product unchanged if it has several columns, or if it has several rows and a bias or a
 * residual. */
static ps_gemm one_column(const ps_gemm *g)
{
    ps_gemm t = *g;
    if (g->b.cols != 1) return t;
    if (g->a.rows > 1 && (g->bias || g->residual || g->dst.stride_row != 1)) return t;
    if (g->a.rows > 1) {
        t.a = (ps_mat){ g->b.data, g->b.dtype, 1, g->b.rows, g->b.stride_col, g->b.stride_row };
        t.b = (ps_mat){ g->a.data, g->a.dtype, g->a.cols, g->a.rows, g->a.stride_col, g->a.stride_row };
        t.dst = (ps_mat){ g->dst.data, g->dst.dtype, 1, g->dst.rows, g->dst.rows, 1 };
    } else if (g->b.stride_row == 1) {
        t.b.stride_col = g->b.rows;
    }
    return t;
}

/* Computes a product for which has_few_rows() returns true. The workspace contains a copy of x, the partial sums and
 * the sums. finish() writes the sums to dst. */
static int run_few_rows(ps_gemm_space *space, const ps_gemm *g)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols;
    int64_t parts = g->b.stride_col == 1 ? (K + PS_FEW_DEPTH - 1) / PS_FEW_DEPTH : 0;
    bool is_dense = M == 1 && g->a.dtype == PS_F32 && g->a.stride_col == 1;          /* x needs no copy */
    int64_t nx = is_dense ? 0 : (M * K + 15) / 16 * 16, nc = (M * N + 15) / 16 * 16;
    PS_TRY(grow(space, &space->panels, &space->panels_nbytes, (size_t)(nx + nc + parts * M * N) * 4));
    if (space->call->dry) return 0;
    float *x = space->panels, *c = x + nx, *part = c + nc;
    if (is_dense) x = g->a.data;
    for (int64_t i = 0; !is_dense && i < M; i++) {
        const ps_mat *a = &g->a;
        if (a->stride_col == 1) ps_cpu_row_load(x + i * K, moved(a, i * a->stride_row), K, a->dtype);
        else for (int64_t k = 0; k < K; k++)
            ps_cpu_row_load(x + i * K + k, moved(a, i * a->stride_row + k * a->stride_col), 1, a->dtype);
    }
    ps_cpu_few_rows(g, x, part, c);
    for (int64_t j = 0; j < N; j += PANEL_N) finish(g, c + j, N, 0, M, j, least(PANEL_N, N - j));
    return 0;
}

int ps_cpu_gemm_run(ps_gemm_space *space, const ps_gemm *g)
{
    int64_t M = g->a.rows, K = g->a.cols, N = g->b.cols;
    if (M == 0 || N == 0 || g->batch == 0) return 0;
    if (g->batch > 1) {
        int rc = K > 0 ? run_direct(space, g) : 0;
        for (int64_t i = 0; rc == 0 && i < g->batch; i++) {
            ps_gemm one = *g;
            one.batch = 1;
            one.a.data = moved(&g->a, i * g->step_a);
            one.b.data = moved(&g->b, i * g->step_b);
            one.dst.data = moved(&g->dst, i * g->step_dst);
            rc = ps_cpu_gemm_run(space, &one);
        }
        return rc < 0 ? rc : 0;
    }
    if (K == 0) {
        for (int64_t j = 0; !space->call->dry && j < N; j += PANEL_N)
            finish(g, NULL, 0, 0, M, j, least(PANEL_N, N - j));
        return 0;
    }
    ps_gemm few = one_column(g);
    if (has_few_rows(&few)) return run_few_rows(space, &few);
    ps_gemm other = *g;
    if (g->residual && M > 1 && g->ld_residual != g->dst.stride_row && !g->accumulate) {
        /* oneDNN adds a residual only if it has the layout of dst. This residual has another layout, so it is copied to
         * dst, and the product is added to dst. */
        for (int64_t i = 0; !space->call->dry && i < M; i++)
            memcpy(moved(&g->dst, i * g->dst.stride_row), at(g->residual, i * g->ld_residual, g->dst.dtype),
                   (size_t)(N * ps_dtype_bytes(g->dst.dtype)));
        other.residual = NULL;
        other.accumulate = 1;
    }
    bool odd_residual = other.residual && M > 1 && other.ld_residual != other.dst.stride_row;
    int rc = odd_residual ? 0 : run_deep(space, &other);
    if (rc == 0) rc = run_panels(space, &other);
    return rc < 0 ? rc : 0;
}

int ps_cpu_gemm(ps_call *call, const ps_mat *a, const ps_mat *b, const ps_mat *dst, const void *bias, int bias_dtype,
                const void *residual, int64_t ld_residual, int accumulate)
{
    ps_gemm_space space = { .call = call };
    ps_gemm g = { .a = *a, .b = *b, .dst = *dst, .bias = bias, .bias_dtype = bias_dtype, .residual = residual,
                  .ld_residual = ld_residual, .accumulate = accumulate, .batch = 1 };
    return ps_cpu_gemm_run(&space, &g);
}

/* -- rehearsal ----------------------------------------------------------------------------------------------------- */
static size_t nbytes_of(dnnl_memory_t m)
{
    shape_ref md = NULL;
    return m && dnnl_memory_get_memory_desc(m, &md) == dnnl_success ? dnnl_memory_desc_get_size(md) : 0;
}

enum { REHEARSED_NBYTES = 128 << 20 };       /* the largest size in bytes of a rehearsed product; it is small, because
                                              * several plans can run at the same time */

static size_t written_by(const entry *e) { return (nbytes_of(e->dst) + 4095) / 4096 * 4096 + e->scratch_nbytes; }

/* Runs the product once, so that the heap allocates the product's buffers. The inputs are pages that were never
 * written, all of which the system maps to one page of zeros. At the end, the function unmaps the memory of the
 * result. */
static int rehearse(entry *e)
{
    size_t sizes[] = { nbytes_of(e->a), nbytes_of(e->b), nbytes_of(e->bias), nbytes_of(e->residual) }, zeros = 4096;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) zeros = sizes[i] > zeros ? sizes[i] : zeros;
    zeros = (zeros + 4095) / 4096 * 4096;
    size_t out = written_by(e) - e->scratch_nbytes, all = zeros + out + e->scratch_nbytes;
    char *p = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return ps_fail_nomem(all);
    madvise(p, all, MADV_NOHUGEPAGE);
    int rc = execute(e, p, p, p + zeros, p, p, p + zeros + out);
    munmap(p, all);
    return rc;
}

int ps_products_rehearse(double most, double *operations)
{
    entry *by_order[CACHE_MAX] = { NULL };
    size_t largest = 0;
    int rc = 0;
    *operations = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CACHE_SLOTS; i++) {
        if (!table[i] || !table[i]->supported || table[i]->key.threads != omp_get_max_threads()) continue;
        const key *k = &table[i]->key;
        *operations += 2.0 * (double)k->m * (double)k->n * (double)k->k * (double)k->batch;
        size_t nbytes = written_by(table[i]);
        largest = nbytes > largest ? nbytes : largest;
        by_order[table[i]->order] = table[i];
    }
    bool few = !table_was_full && *operations <= most && largest <= REHEARSED_NBYTES;
    for (int i = 0; few && rc == 0 && i < CACHE_MAX; i++)
        if (by_order[i]) rc = rehearse(by_order[i]);
    pthread_mutex_unlock(&lock);
    return rc < 0 ? rc : few;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */
bool ps_cpu_gemm_native(int dtype) { return native[dtype]; }
const char *ps_cpu_gemm_describe(void) { return description; }

static const char *isa_name(void)
{
    static const struct { int bits; const char *name; } known[] = {
        { dnnl_cpu_isa_avx512_core_amx, "AVX-512 AMX" },
        { dnnl_cpu_isa_avx512_core_bf16, "AVX-512 bf16" }, { dnnl_cpu_isa_avx512_core, "AVX-512" },
        { dnnl_cpu_isa_avx2, "AVX2" }, { dnnl_cpu_isa_avx, "AVX" }, { dnnl_cpu_isa_sse41, "SSE4.1" } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (has_isa(known[i].bits)) return known[i].name;
    return "generic";
}

static void shut(void)
{
    table_clear();
    if (stream) dnnl_stream_destroy(stream);
    if (engine) dnnl_engine_destroy(engine);
    stream = NULL;
    engine = NULL;
}

/* Creates the engine. For each type, tests whether the engine supports a product of typical size. */
static int start(void)
{
    dnnl_status_t st = dnnl_engine_create(&engine, dnnl_cpu, 0);
    if (st == dnnl_success) st = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);
    if (st != dnnl_success) return fail_dnnl(st, "opening the CPU engine");
    for (int dtype = PS_F32; dtype <= PS_F16; dtype++) {
        key k = { .m = 256, .n = 256, .k = 256, .batch = 1, .ld_a = 256, .ld_b = 256, .ld_dst = 256, .type_a = dtype,
                  .type_b = dtype, .type_dst = dtype, .type_bias = -1, .threads = omp_get_max_threads() };
        entry *e;
        PS_TRY(entry_get(&k, &e));
        native[dtype] = e->supported;
    }
    const dnnl_version_t *v = dnnl_version();
    snprintf(description, sizeof description, "oneDNN %d.%d.%d (%s; bf16 %s, fp16 %s)", v->major, v->minor, v->patch,
             isa_name(), native[PS_BF16] ? "native" : "as fp32", native[PS_F16] ? "native" : "as fp32");
    return 0;
}

int ps_cpu_gemm_open(void)
{
    pthread_mutex_lock(&lock);
    int rc = open_count > 0 ? 0 : start();
    if (rc < 0) shut();
    else open_count++;
    pthread_mutex_unlock(&lock);
    return rc;
}

void ps_cpu_gemm_close(void)
{
    pthread_mutex_lock(&lock);
    if (open_count > 0 && --open_count == 0) shut();
    pthread_mutex_unlock(&lock);
}
