/* SPDX-License-Identifier: BSD-3-Clause
 * Pins host memory at its first copy. Only whole pages that copies use are pinned, from a size on that is worth it, and
 * never more than half of the machine's memory. Pages that host.c gives back are let go first: its hook tells of them,
 * else the device would go on reading pages that the process no longer has. */
#include <unistd.h>
#include "backend/cuda/cuda.h"

struct range {
    range *next;
    uintptr_t begin, end;
};
static range *ranges;
static int64_t pinned;
static const size_t least_nbytes = (size_t)1 << 20;

static void let_go(uintptr_t begin, uintptr_t end)
{
    for (range **at = &ranges; *at;) {
        range *r = *at;
        if (r->begin >= end || r->end <= begin) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        if (!ps_cu->broken) {
            cudaDeviceSynchronize();
            cudaHostUnregister((void *)r->begin);
            cudaGetLastError();
        }
        pinned -= (int64_t)(r->end - r->begin);
        ps_free(r);
    }
}

static void host_memory_goes(void *p, size_t nbytes) { let_go((uintptr_t)p, (uintptr_t)p + nbytes); }

void ps_cuda_pin_host(const void *p, size_t nbytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)p;
    uintptr_t end = (begin + nbytes + page - 1) / page * page;     /* regions are whole pages */
    if (nbytes < least_nbytes || begin % page != 0) return;
    for (const range *r = ranges; r; r = r->next)
        if (begin < r->end && r->begin < end) return;          /* it is, or a part is and stays as it is */
    int64_t most = (int64_t)sysconf(_SC_PHYS_PAGES) / 2 * (int64_t)page;
    if (pinned + (int64_t)(end - begin) > most) return;
    range *r = (range *)ps_alloc(sizeof *r);
    if (!r) return;
    if (cudaHostRegister((void *)begin, end - begin, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError();
        ps_free(r);
        return;
    }
    r->next = ranges;
    r->begin = begin;
    r->end = end;
    ranges = r;
    pinned += (int64_t)(end - begin);
    ps_host_region_goes = host_memory_goes;
}

void ps_cuda_unpin_all(void)
{
    let_go(0, UINTPTR_MAX);
    ps_host_region_goes = NULL;
}
