/* SPDX-License-Identifier: BSD-3-Clause
 * For tests of the cpu's kernels. A kernel that is called dry (ps_call.dry) must neither read nor write, and must
 * request the same scratch memory as when it runs. A test's own scratch() calls scratch_taken. */
#ifndef CPU_SCRATCH_H
#define CPU_SCRATCH_H
#include <stdio.h>
#include "backend/cpu/cpu.h"

static int64_t scratch_bytes;

/* Records an allocation. As in the allocator, sizes are rounded up to multiples of 64 bytes. */
static void scratch_taken(size_t nbytes) { scratch_bytes += (int64_t)(nbytes + 63) / 64 * 64; }

static void *scratch_counted(ps_call *call, size_t nbytes)
{
    (void)call;
    scratch_taken(nbytes);
    return (void *)(uintptr_t)4096;
}

/* Runs a cpu kernel. Returns whether it used more or less scratch memory than its dry call requested. */
static bool scratch_differs(ps_kernel kernel, ps_call *call, int *rc)
{
    ps_call dry = *call;
    dry.dry = true, dry.scratch = scratch_counted;
    scratch_bytes = 0;
    if (ps_cpu_asks(call->op)) kernel(&dry);
    int64_t said = scratch_bytes;
    scratch_bytes = 0;
    *rc = kernel(call);
    if (*rc != 0 || said == scratch_bytes) return false;
    printf("op %d: %lld bytes of scratch memory foretold, %lld taken\n", call->op, (long long)said,
           (long long)scratch_bytes);
    return true;
}
#endif
