/* SPDX-License-Identifier: BSD-3-Clause
 * Pins host memory when it is copied for the first time. All pages that the copy touches are pinned, unless they are
 * pinned already. Pinned ranges never overlap. Two blocks of an arena can share the page at which one ends and the
 * other begins, so a pinned range can end within a block, and a copy may use several ranges. Copies of unpinned memory
 * reach only a fraction of the link's rate.
 *
 * Budgets limit the number of pinned bytes. In addition, this file pins at most seven eighths of the machine's memory.
 *
 * Before host.c returns pages to the system, it calls a function of this file, which unpins the pages
 * (ps_host_region_watch). Otherwise the device would read pages that the process no longer owns. */
#include <unistd.h>
#include "backend/cuda/cuda.h"

struct range {
    range *next;
    uintptr_t begin, end;
};
static range *ranges;                          /* sorted by address */
static int64_t pinned;
/* set when the system refuses to pin more memory; cleared when a range is unpinned */
static bool full;

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
        full = false;
        ps_free(r);
    }
}

static void host_memory_goes(void *p, size_t nbytes) { let_go((uintptr_t)p, (uintptr_t)p + nbytes); }

/* Pins [begin, end) and inserts the range before *at. The range must not overlap other ranges. */
static bool add(range **at, uintptr_t begin, uintptr_t end)
{
    int64_t most = (int64_t)sysconf(_SC_PHYS_PAGES) / 8 * 7 * (int64_t)sysconf(_SC_PAGESIZE);
    range *r = pinned + (int64_t)(end - begin) <= most ? (range *)ps_alloc(sizeof *r) : NULL;
    if (!r) return false;
    if (cudaHostRegister((void *)begin, end - begin, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError();
        ps_free(r);
        return false;
    }
    r->next = *at;
    r->begin = begin;
    r->end = end;
    *at = r;
    pinned += (int64_t)(end - begin);
    ps_host_region_watch(host_memory_goes);
    return true;
}

void ps_cuda_pin_host(const void *p, size_t nbytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)p / page * page;
    uintptr_t end = ((uintptr_t)p + nbytes + page - 1) / page * page;
    range **at = &ranges;
    while (!full && from < end) {
        while (*at && (*at)->end <= from) at = &(*at)->next;
        const range *r = *at;
        uintptr_t gap_end = r && r->begin < end ? r->begin : end;
        if (from < gap_end && !add(at, from, gap_end)) full = true;
        else from = r && r->begin < end ? r->end : end;
    }
}

size_t ps_cuda_pinned_run(const void *p, size_t nbytes)
{
    uintptr_t begin = (uintptr_t)p, end = begin + nbytes;
    for (const range *r = ranges; r && r->begin < end; r = r->next) {
        if (r->end <= begin) continue;
        uintptr_t change = r->begin <= begin ? r->end : r->begin;
        return change < end ? change - begin : nbytes;
    }
    return nbytes;
}

void ps_cuda_unpin_all(void)
{
    let_go(0, UINTPTR_MAX);
    ps_host_region_watch(NULL);
}
