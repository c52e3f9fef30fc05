/* SPDX-License-Identifier: BSD-3-Clause
 * Warpgroup products of compute capability 9.0 (wgmma.mma_async, PTX ISA "Asynchronous Warpgroup Level Matrix
 * Multiply-Accumulate Instructions"). Four warps together multiply 64 rows at once, with operands in shared memory.
 * Only files that are compiled exclusively for sm_90a include this header. On the emulator, spec/emulate/wgmma.cpp
 * implements the same calls.
 *
 * Operands of 16-bit elements are stored in shared memory as panels of 64 columns. Each panel begins at a multiple of
 * 1024 bytes. Row r of a panel is stored in the 128 bytes that start at 128 * r. A row has eight pieces of 16 bytes.
 * Piece p is at position p ^ (r & 7) of its row (the 128-byte swizzle).
 *
 * A product can use this layout in two ways. With a K-major operand, it sums over the operand's columns. The next step
 * of the sum is 16 columns (32 bytes) further. With an MN-major operand, it sums over the operand's rows. The next step
 * is 16 rows (2048 bytes) further.
 *
 * Rules for callers: a thread that writes shared memory calls async_fence() before the barrier that precedes the
 * products. A group of products begins after wgmma_fence() and ends with wgmma_commit(). Until wgmma_wait() has waited
 * for the group, nothing may access the group's accumulators, its operands A in registers, or its shared memory. The
 * caller calls hold() after wgmma_wait(), because the compiler could otherwise move uses of accumulators before the
 * wait. All threads of a warpgroup make the same calls. */
#ifndef PS_CUDA_WGMMA_H
#define PS_CUDA_WGMMA_H
#include "backend/cuda/device.h"

enum { PANEL_COLS = 64, PANEL_ROW = 128, PANEL_ALIGN = 1024 };

/* Returns the descriptor of the panel at `address` in the shared window. Bits 0..13 are the address, and bits 16..29
 * are the leading offset. Bits 32..45 are the stride offset, which is the distance between groups of 8 rows. These
 * three fields are in units of 16 bytes. Bits 62..63 are 1 for the 128-byte swizzle. For MN-major operands, the leading
 * offset is the distance between panels. For K-major operands, it is ignored and set to 1. */
DEV uint64_t panel_descriptor(uint32_t address, uint32_t leading_nbytes)
{
    return (uint64_t)(address >> 4) | (uint64_t)(leading_nbytes >> 4) << 16 |
           (uint64_t)(8 * PANEL_ROW >> 4) << 32 | (uint64_t)1 << 62;
}
DEV uint64_t descriptor_k_major(uint32_t address) { return panel_descriptor(address, 16); }
DEV uint64_t descriptor_mn_major(uint32_t address, uint32_t panel_nbytes)
{
    return panel_descriptor(address, panel_nbytes);
}
/* Returns a descriptor whose address is nbytes higher than the address of `descriptor`. The low word does not overflow,
 * because addresses have 18 bits. */
DEV uint64_t descriptor_at(uint64_t descriptor, uint32_t nbytes) { return descriptor + (nbytes >> 4); }

#ifdef PS_EMULATE_CUDA
DEV uint32_t shared_address(const void *p) { return ps_emu_shared_address(p); }
DEV void async_fence(void) { ps_emu_async_fence(); }
DEV void wgmma_fence(void) { ps_emu_wgmma_fence(); }
DEV void wgmma_commit(void) { ps_emu_wgmma_commit(); }
template <int BUT> DEV void wgmma_wait(void) { ps_emu_wgmma_wait(BUT); }
template <int COUNT> DEV void hold(float *) {}
template <class T, int N> DEV void wgmma_shared(float *d, uint64_t a, uint64_t b, bool add)
{
    ps_emu_wgmma(d, NULL, a, b, N, (int)type_info<T>::dtype == PS_BF16, 0, 0, add);
}
template <class T, int N> DEV void wgmma_registers(float *d, const uint32_t *a, uint64_t b, bool add)
{
    ps_emu_wgmma(d, a, 0, b, N, (int)type_info<T>::dtype == PS_BF16, 0, 1, add);
}
#else
DEV uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
/* Makes this thread's writes to shared memory visible to products. */
DEV void async_fence(void) { asm volatile("fence.proxy.async.shared::cta;\n" : : : "memory"); }
DEV void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;\n" : : : "memory"); }
DEV void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;\n" : : : "memory"); }
/* Waits until at most the last BUT groups are still running. */
template <int BUT> DEV void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" : : "n"(BUT) : "memory");
}
/* Tells the compiler that the registers d change here, so that the compiler does not move uses of d across this
 * point. */
template <int COUNT> DEV void hold(float *d)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i]) : : "memory");
}

#define REGISTERS_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define REGISTERS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63}"
#define OPERANDS_8(d, i) \
    "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), \
    "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7])
#define OPERANDS_32(d, i) OPERANDS_8(d, i), OPERANDS_8(d, (i) + 8), OPERANDS_8(d, (i) + 16), OPERANDS_8(d, (i) + 24)
#define OPERANDS_64(d, i) OPERANDS_32(d, i), OPERANDS_32(d, (i) + 32)

/* Compute d [64, N] = a b, or d += a b, by the instruction m64nNk16. With wgmma_shared, a [64, 16] and b [N, 16] are in
 * shared memory and both are K-major. With wgmma_registers, a [64, 16] is in four registers, in the layout of 16
 * columns of d, and b [16, N] is in shared memory and MN-major.
 *
 * If the predicate `add` is false, d is overwritten. In the instruction, the predicate is followed by the signs of a
 * and b, and then by one constant per operand in shared memory: 1 if the operand is MN-major. */
template <class T, int N> DEV void wgmma_shared(float *d, uint64_t a, uint64_t b, bool add);
template <class T, int N> DEV void wgmma_registers(float *d, const uint32_t *a, uint64_t b, bool add);
#define DEFINE_PRODUCTS(T, ptx, N, count, at0, at1, at2, at3, at4, at5)                                              \
    template <> __device__ __forceinline__ void wgmma_shared<T, N>(float *d, uint64_t a, uint64_t b, bool add)        \
    {                                                                                                                \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" at2 ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ptx "." ptx " " REGISTERS_##count             \
                     ", %" at0 ", %" at1 ", p, 1, 1, 0, 0;\n}\n"                                                     \
                     : OPERANDS_##count(d, 0) : "l"(a), "l"(b), "r"((int)add) : "memory");                           \
    }                                                                                                                \
    template <> __device__ __forceinline__ void wgmma_registers<T, N>(float *d, const uint32_t *a, uint64_t b,        \
                                                                      bool add)                                      \
    {                                                                                                                \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" at5 ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ptx "." ptx " " REGISTERS_##count             \
                     ", {%" at0 ", %" at1 ", %" at2 ", %" at3 "}, %" at4 ", p, 1, 1, 1;\n}\n"                        \
                     : OPERANDS_##count(d, 0)                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory");                \
    }
DEFINE_PRODUCTS(bf16, "bf16", 64, 32, "32", "33", "34", "35", "36", "37")
DEFINE_PRODUCTS(f16, "f16", 64, 32, "32", "33", "34", "35", "36", "37")
DEFINE_PRODUCTS(bf16, "bf16", 128, 64, "64", "65", "66", "67", "68", "69")
DEFINE_PRODUCTS(f16, "f16", 128, 64, "64", "65", "66", "67", "68", "69")
#endif
#endif
