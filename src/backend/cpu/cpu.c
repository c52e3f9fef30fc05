/* SPDX-License-Identifier: BSD-3-Clause
 * Opens the cpu backend. This file chooses the instruction set and fills the kernel table. Ops without a kernel here
 * run on ref. PS_CPU_ISA=sse2|avx2|avx512 selects a set lower than the machine's best set. The vector kernels compute
 * the same bits with every set. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/packed.h"
#include "base/alloc.h"
#include "base/error.h"

ps_cpu_loss_row_fn ps_cpu_loss_row;
ps_cpu_few_rows_fn ps_cpu_few_rows;
ps_cpu_packed_dots_fn ps_cpu_packed_dots;
ps_cpu_unpack_fn ps_cpu_unpack;
ps_cpu_int8_dots_fn ps_cpu_int8_dots;
ps_cpu_round_int8_fn ps_cpu_round_int8;

/* -- instruction sets ---------------------------------------------------------------------------------------------- */
typedef struct isa {
    const char *name;
    int vector_nbytes;
    void (*fill)(ps_kernel *k);
    ps_cpu_loss_row_fn loss_row;
    ps_cpu_few_rows_fn few_rows;
    ps_cpu_packed_dots_fn packed_dots;
    ps_cpu_unpack_fn unpack;
    ps_cpu_int8_dots_fn int8_dots;
    ps_cpu_round_int8_fn round_int8;
} isa;

#define ISA(set) \
    PS_CPU_FAMILIES(DECLARE_##set) \
    static void fill_##set(ps_kernel *k) { PS_CPU_FAMILIES(FILL_##set) }
#define DECLARE_sse2(family) void ps_cpu_fill_##family##_sse2(ps_kernel *k);
#define FILL_sse2(family) ps_cpu_fill_##family##_sse2(k);
#define DECLARE_avx2(family) void ps_cpu_fill_##family##_avx2(ps_kernel *k);
#define FILL_avx2(family) ps_cpu_fill_##family##_avx2(k);
#define DECLARE_avx512(family) void ps_cpu_fill_##family##_avx512(ps_kernel *k);
#define FILL_avx512(family) ps_cpu_fill_##family##_avx512(k);

/* The instruction sets, from lowest to highest. "sse2" runs on every machine. */
ISA(sse2)
#if defined(__x86_64__) && !defined(PS_ONLY_SSE2)
ISA(avx2)
ISA(avx512)
static const isa sets[] = {
    { "sse2", 16, fill_sse2, ps_cpu_loss_row_sse2, ps_cpu_few_rows_sse2,
      ps_cpu_packed_dots_sse2, ps_cpu_unpack_sse2, ps_cpu_int8_dots_sse2, ps_cpu_round_int8_sse2 },
    { "avx2", 32, fill_avx2, ps_cpu_loss_row_avx2, ps_cpu_few_rows_avx2,
      ps_cpu_packed_dots_avx2, ps_cpu_unpack_avx2, ps_cpu_int8_dots_avx2, ps_cpu_round_int8_avx2 },
    { "avx512", 64, fill_avx512, ps_cpu_loss_row_avx512, ps_cpu_few_rows_avx512,
      ps_cpu_packed_dots_avx512, ps_cpu_unpack_avx512, ps_cpu_int8_dots_avx512, ps_cpu_round_int8_avx512 },
};

/* Returns the index of the best set that the machine supports. The function checks that the processor has all
 * instructions that the compiler may use with -march=x86-64-v3 and v4, and that the operating system saves the
 * registers of these sets. It looks up f16c, movbe and lzcnt in cpuid, because some compilers have no names for these
 * features. */
static int best_set(void)
{
    unsigned a, b, c, d, ext;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &a, &b, &c, &d) || !__get_cpuid(0x80000001u, &a, &b, &ext, &d)) return 0;
    bool f16c = c & (1u << 29), movbe = c & (1u << 22), lzcnt = ext & (1u << 5);
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
          && __builtin_cpu_supports("bmi2") && f16c && movbe && lzcnt)) return 0;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd")
          && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) return 1;
    return 2;
}
#else
static const isa sets[] = { { "sse2", 16, fill_sse2, ps_cpu_loss_row_sse2, ps_cpu_few_rows_sse2,
      ps_cpu_packed_dots_sse2, ps_cpu_unpack_sse2, ps_cpu_int8_dots_sse2, ps_cpu_round_int8_sse2 } };
static int best_set(void) { return 0; }
#endif

/* Sets *out to the instruction set that the environment variable names. If the variable is not set, sets *out to the
 * best set of this machine. */
static int choose_set(const char *variable, const isa **out)
{
    const char *want = getenv(variable);
    int best = best_set(), count = (int)(sizeof sets / sizeof *sets);
    *out = &sets[best];
    if (!want || !*want || strcmp(want, "best") == 0) return PS_OK;
    for (int i = 0; i < count; i++) {
        if (strcmp(want, sets[i].name) != 0) continue;
        if (i > best)
            return ps_fail(PS_EUNSUP, "%s is %s, but this machine supports at most %s", variable, want,
                           sets[best].name);
        *out = &sets[i];
        return PS_OK;
    }
    return ps_fail(PS_EINVAL, "%s is '%s'; it must be sse2, avx2, avx512 or best; this machine has %s", variable,
                   want, sets[best].name);
}

static void fill_kernels(const isa *set, ps_kernel *kernel)
{
    set->fill(kernel);
    kernel[PS_OP_matmul] = ps_cpu_matmul;
    kernel[PS_OP_linear] = ps_cpu_linear;
    kernel[PS_OP_unpack] = ps_cpu_unpack_op;
    kernel[PS_OP_pack] = ps_cpu_pack_op;
    kernel[PS_OP_linear_packed] = ps_cpu_linear_packed;
    kernel[PS_OP_lm_loss] = ps_cpu_lm_loss;
    kernel[PS_OP_linear_grad] = ps_cpu_linear_grad;
    kernel[PS_OP_mlp] = ps_cpu_mlp;
    kernel[PS_OP_sample] = ps_cpu_sample;
    kernel[PS_OP_adafactor_] = ps_cpu_adafactor;
    kernel[PS_OP_lamb_] = ps_cpu_lamb;
    kernel[PS_OP_linear_gelu_backward] = ps_cpu_linear_gelu_backward;
    kernel[PS_OP_conv] = ps_cpu_conv;
    kernel[PS_OP_conv_transpose] = ps_cpu_conv_transpose;
    kernel[PS_OP_conv_weight] = ps_cpu_conv_weight;
}

int ps_cpu_kernels(const char *variable, ps_kernel *kernel)
{
    const isa *set;
    PS_TRY(choose_set(variable, &set));
    fill_kernels(set, kernel);
    return 0;
}

int ps_cpu_vector_nbytes(int *nbytes)
{
    const isa *set;
    PS_TRY(choose_set("PS_CPU_ISA", &set));
    *nbytes = set->vector_nbytes;
    return 0;
}

bool ps_cpu_has_set(const char *name)
{
    for (int i = 0; i <= best_set(); i++)
        if (strcmp(sets[i].name, name) == 0) return true;
    return false;
}

/* -- scratch memory, for dry runs --------------------------------------------------------------------------------- */
/* Returns true if the op's kernel uses workspace. Such a kernel supports ps_call.dry. */
bool ps_cpu_asks(int op)
{
    switch (op) {
    case PS_OP_matmul: case PS_OP_linear: case PS_OP_linear_packed: case PS_OP_linear_grad: case PS_OP_lm_loss:
    case PS_OP_mlp: case PS_OP_linear_gelu_backward: case PS_OP_cross_entropy: case PS_OP_sum: case PS_OP_mean:
    case PS_OP_amax: case PS_OP_amin: case PS_OP_argmax: case PS_OP_argmin: case PS_OP_topk: case PS_OP_prod:
    case PS_OP_cumprod_backward: case PS_OP_median: case PS_OP_cdist: case PS_OP_cdist_backward: case PS_OP_randperm_:
    case PS_OP_embedding_backward:
    case PS_OP_sq_norms: case PS_OP_grad_store: case PS_OP_attention: case PS_OP_attention_backward:
    case PS_OP_attention_packed: case PS_OP_attention_packed_backward: case PS_OP_layer_norm:
    case PS_OP_layer_norm_backward: case PS_OP_rms_norm: case PS_OP_rms_norm_backward: case PS_OP_sample:
    case PS_OP_conv: case PS_OP_conv_transpose: case PS_OP_conv_weight: case PS_OP_channel_norm:
    case PS_OP_channel_norm_backward: case PS_OP_resample: case PS_OP_max_pool_backward:
    case PS_OP_muon_: case PS_OP_adafactor_: case PS_OP_lamb_: return true;
    default: return false;
    }
}

static void *count(ps_call *call, size_t nbytes)
{
    *(int64_t *)call->owner += (int64_t)(nbytes + 63) / 64 * 64;
    return (void *)(uintptr_t)4096;                          /* never accessed */
}

/* Returns the total size in bytes of all allocations that the kernel makes. The sizes are added, because dispatch frees
 * the allocations only after the kernel has returned. */
static int64_t scratch_nbytes(ps_backend *be, const ps_call *call)
{
    int64_t asked = 0;
    ps_call c = *call;
    if (!ps_cpu_asks(c.op) || !be->kernel[c.op]) return 0;
    c.scratch = count, c.owner = &asked, c.dry = true;
    return be->kernel[c.op](&c) < 0 ? 0 : asked;
}

/* -- the backend --------------------------------------------------------------------------------------------------- */
static void close_cpu(ps_backend *be)
{
    ps_cpu_conv_close();
    ps_cpu_gemm_close();
    ps_free(be);
}

int ps_backend_cpu_open(ps_backend *ref, ps_backend **out)
{
    const isa *set;
    PS_TRY(choose_set("PS_CPU_ISA", &set));
    ps_backend *be = ps_alloc0(sizeof *be);
    if (!be) return ps_fail_nomem(sizeof *be);
    int rc = ps_cpu_gemm_open();
    if (rc < 0) {
        ps_free(be);
        return rc;
    }
    be->name = "cpu";
    be->is_host = true;
    be->fast_bf16 = ps_cpu_gemm_native(PS_BF16);
    snprintf(be->describe, sizeof be->describe, "%s, %d thread%s, %s", set->name, ps_threads(),
             ps_threads() == 1 ? "" : "s", ps_cpu_gemm_describe());
    be->region_new = ps_host_region_new;
    be->region_free = ps_host_region_free;
    be->region_discard = ps_host_region_discard;
    be->region_move = ps_host_region_move;
    be->bytes_available = ps_host_bytes_available;
    be->bytes_held = ps_host_bytes_held;
    be->copy_in = be->copy_out = ps_cpu_copy;
    be->load = ps_cpu_load;
    fill_kernels(set, be->kernel);
    ps_cpu_loss_row = set->loss_row;
    ps_cpu_few_rows = set->few_rows;
    ps_cpu_packed_dots = set->packed_dots;
    ps_cpu_unpack = set->unpack;
    ps_cpu_int8_dots = set->int8_dots;
    ps_cpu_round_int8 = set->round_int8;
    be->fallback = ref;
    ps_cpu_chain_open(be->kernel, ref->kernel);
    be->scratch_nbytes = scratch_nbytes;
    be->close = close_cpu;
    *out = be;
    return PS_OK;
}
