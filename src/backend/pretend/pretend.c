/* SPDX-License-Identifier: BSD-3-Clause
 * Backends for simulated devices. With simulated devices, a script can run its whole first step as if it were on a
 * machine of any size (tools/plan.lua). For each call, dispatch asks the backend for the size of the workspace and
 * computes nothing. Only ops on values in host memory that the script has written itself are computed. Copies end at
 * once and move nothing.
 *
 * The regions of a simulated host are address space whose pages are not touched. A script can still write values to a
 * tensor in such a region (a batch, a list of numbers). The regions of other simulated devices are addresses that
 * cannot be accessed. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include "backend/backend.h"
#include "backend/cuda_rules.h"
#include "base/alloc.h"
#include "base/error.h"

typedef struct pretend_backend {
    ps_backend base;
    ps_backend *real;              /* the backend that computes workspace sizes, unless `card` is a known GPU */
    ps_cuda_card card;             /* properties of a known GPU; sm_count is 0 for other devices */
    int64_t nbytes;                /* size of the simulated device's memory in bytes */
    uintptr_t next;                /* address of the next region (not used for a simulated host) */
} pretend_backend;

/* No process can map memory at these addresses. The addresses of `meta` are in another range. */
static const uintptr_t first_address = (uintptr_t)3 << (sizeof(uintptr_t) == 8 ? 60 : 28);

static int region_new(ps_backend *be, size_t nbytes, void **out)
{
    pretend_backend *p = (pretend_backend *)be;
    const size_t page = 4096;
    size_t room = SIZE_MAX - (size_t)p->next;
    if (nbytes > room - 2 * page)
        return ps_fail(PS_ENOMEM, "no addresses are left for %zu bytes on %s", nbytes, be->name);
    *out = (void *)p->next;
    p->next += (nbytes / page + 1) * page;
    return 0;
}

static void region_free(ps_backend *be, void *p, size_t nbytes) {}
static void region_discard(ps_backend *be, void *p, size_t nbytes) {}
static int region_commit(ps_backend *be, void *p, size_t nbytes) { return 0; }
static int64_t bytes_available(ps_backend *be) { return ((pretend_backend *)be)->nbytes; }
static int64_t bytes_held(ps_backend *be, int64_t reserved) { return 0; }      /* bytes_available counts all bytes */
static int copy_in(ps_backend *be, void *dst, const void *host_src, size_t nbytes) { return 0; }
static int copy_out(ps_backend *be, void *host_dst, const void *src, size_t nbytes) { return 0; }
static int clear(ps_backend *be, void *dst, size_t nbytes) { return 0; }

static int copy_start(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                      ps_copy **out)
{
    static char ended;
    *out = (ps_copy *)&ended;
    return 0;
}

static int copy_wait(ps_backend *be, ps_copy *copy, bool block) { return 1; }

static int compute_nothing(ps_call *call) { return ps_fail(PS_ESTATE, "a simulated device has no kernels"); }

static int64_t scratch_nbytes(ps_backend *be, const ps_call *call)
{
    const pretend_backend *p = (const pretend_backend *)be;
    if (p->card.sm_count > 0) return ps_cuda_rules_scratch(&p->card, call);
    ps_backend *real = p->real;
    return real->scratch_nbytes ? real->scratch_nbytes(real, call) : 0;
}

static void close_pretend(ps_backend *be)
{
    pretend_backend *p = (pretend_backend *)be;
    if (p->real->close) p->real->close(p->real);
    ps_free(p);
}

/* Allocates a region without huge pages. A script writes a few small tensors at scattered addresses, and each of these
 * tensors would use a huge page. */
static int host_region_new(ps_backend *be, size_t nbytes, void **out)
{
    PS_TRY(ps_host_region_new(be, nbytes, out));
    madvise(*out, nbytes, MADV_NOHUGEPAGE);          /* this is only a hint */
    return 0;
}

static void as_host(ps_backend *be)
{
    be->region_new = host_region_new;
    be->region_free = ps_host_region_free;
    be->region_discard = ps_host_region_discard;
}

/* Sets the functions of a simulated device other than the host. If `real` has region_discard, then the simulated device
 * has it, too, unless it is a GPU. Plans rely on this. */
static void as_device(ps_backend *be, const ps_backend *real, bool gpu)
{
    be->region_new = region_new;
    be->region_free = region_free;
    if (real->region_discard && !gpu) be->region_discard = region_discard;
    if (real->region_reserve) be->region_reserve = region_new;
    if (real->region_commit) be->region_commit = region_commit;
    be->copy_in = copy_in;
    be->copy_out = copy_out;
    be->copy_start = copy_start;
    be->copy_wait = copy_wait;
    be->clear = clear;
}

int ps_backend_pretend(ps_backend *real, const char *name, int64_t nbytes, const ps_machine *machine,
                       ps_backend **out)
{
    pretend_backend *p = ps_alloc0(sizeof *p);
    if (!p) return ps_fail_nomem(sizeof *p);
    ps_backend *be = &p->base;
    bool gpu = strcmp(name, "cuda") == 0;
    p->real = real;
    p->nbytes = nbytes ? nbytes : real->bytes_available(real);
    if (machine) p->card = (ps_cuda_card){ .sm_count = (int)machine->device_sms, .memory = machine->device_total };
    p->next = first_address;
    be->name = name;
    be->pretends = true;
    be->is_host = real->is_host && !gpu;
    be->fast_bf16 = real->fast_bf16 || gpu;
    be->fuses = real->fuses || gpu;
    be->page_nbytes = real->page_nbytes;
    snprintf(be->describe, sizeof be->describe, "not here, %.1f GiB, as %.200s", (double)p->nbytes / 0x1p30,
             real->describe);
    if (be->is_host) as_host(be);
    else as_device(be, real, gpu);
    be->bytes_available = bytes_available;
    be->bytes_held = bytes_held;
    be->scratch_nbytes = scratch_nbytes;
    be->host_carries = true;
    for (int op = 0; op < PS_OP_COUNT; op++) be->kernel[op] = be->is_host ? real->kernel[op] : compute_nothing;
    if (be->is_host) be->fallback = real->fallback;
    be->close = close_pretend;
    *out = be;
    return 0;
}
