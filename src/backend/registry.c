/* SPDX-License-Identifier: BSD-3-Clause
 * The list of backends: the order of the rows is the numbering of devices. `ref` is opened before all, because others
 * fall back on its kernels. Called by the context only. */
#include "backend/backend.h"
#include "base/error.h"

/* `all`: those opened so far, in order. */
static int open_cpu(ps_backend *ref, ps_backend **all, ps_backend **out)
{
    return ps_backend_cpu_open(ref, out);
}

static int take_ref(ps_backend *ref, ps_backend **all, ps_backend **out)
{
    *out = ref;
    return 0;
}

static int open_meta(ps_backend *ref, ps_backend **all, ps_backend **out)
{
    return ps_backend_meta_open(out);
}

static int open_sim(ps_backend *ref, ps_backend **all, ps_backend **out)
{
    return ps_backend_sim_open(ref, all[0], out);
}

static int (*const rows[])(ps_backend *ref, ps_backend **all, ps_backend **out) = {
    open_cpu,
    take_ref,
    open_meta,
    open_sim,
};

int ps_backends_open(ps_backend **out, int max)
{
    int count = (int)(sizeof rows / sizeof rows[0]), n = 0, rc = 0;
    bool ref_listed = false;
    ps_backend *ref;
    if (max < count) return ps_fail(PS_EINVAL, "there are %d backends, and room for %d", count, max);
    PS_TRY(ps_backend_ref_open(&ref));
    for (; n < count && rc == 0; n++) {
        rc = rows[n](ref, out, &out[n]);
        if (rc < 0) break;
        ref_listed = ref_listed || out[n] == ref;
    }
    if (rc < 0) {
        ps_backends_close(out, n);
        if (!ref_listed) ref->close(ref);
        return rc;
    }
    return n;
}

/* In the order of the list; closing one touches no other. */
void ps_backends_close(ps_backend **all, int n)
{
    for (int i = 0; i < n; i++)
        if (all[i]->close) all[i]->close(all[i]);
}
