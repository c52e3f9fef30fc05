/* SPDX-License-Identifier: BSD-3-Clause
 * The `meta` backend: shapes and bytes, but no data, so that a model of any size can be built and counted. Its
 * kernels do nothing. Its regions are addresses at which no process can map memory, so a read through one faults. */
#include <stdio.h>
#include "backend/backend.h"
#include "base/alloc.h"
#include "base/error.h"

struct meta_backend {
    ps_backend base;
    uintptr_t next;                /* address of the next region */
};

static const uintptr_t first_address = (uintptr_t)1 << (sizeof(uintptr_t) == 8 ? 60 : 30);

static int region_new(ps_backend *be, size_t nbytes, void **out)
{
    struct meta_backend *meta = (struct meta_backend *)be;
    const size_t page = 4096;
    size_t room = SIZE_MAX - (size_t)meta->next;
    if (nbytes > room - 2 * page) return ps_fail(PS_ENOMEM, "device meta has no addresses left for %zu bytes", nbytes);
    *out = (void *)meta->next;
    meta->next += (nbytes / page + 1) * page;
    return 0;
}

static void region_free(ps_backend *be, void *p, size_t nbytes)
{
}

static int64_t bytes_available(ps_backend *be)
{
    return INT64_MAX;
}

static int do_nothing(ps_call *call)
{
    return 0;
}

static void close_meta(ps_backend *be)
{
    ps_free(be);
}

int ps_backend_meta_open(ps_backend **out)
{
    struct meta_backend *meta = ps_alloc0(sizeof *meta);
    if (!meta) return ps_fail_nomem(sizeof *meta);
    meta->next = first_address;
    ps_backend *be = &meta->base;
    be->name = "meta";
    be->no_data = true;
    snprintf(be->describe, sizeof be->describe, "shapes only, no data");
    be->region_new = region_new;
    be->region_free = region_free;
    be->bytes_available = bytes_available;
    be->close = close_meta;
    for (int op = 0; op < PS_OP_COUNT; op++) be->kernel[op] = do_nothing;
    *out = be;
    return 0;
}
