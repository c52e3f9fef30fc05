/* SPDX-License-Identifier: BSD-3-Clause
 * The table of backends. Backends that every machine has are opened at startup. Their order in the table determines the
 * device indices. The other backends are opened when a script first uses them. `ref` is opened before all others,
 * because other backends use its kernels as a fallback. Only the context calls this file. */
#include <stdio.h>
#include <string.h>
#include "backend/backend.h"
#include "base/error.h"

/* all: the backends that are already open, in the order of the table. */
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

/* The index of this process among the processes on its machine. It selects one of several cards. If it is -1,
 * environment variables select the card. */
static int local_rank = -1;

/* The simulated machine. If `pretends` is set, the simulated machine's devices are opened instead of the real machine's
 * devices. */
static ps_machine machine;
static bool pretends;

/* Opens a simulated GPU. */
static int open_pretended_cuda(ps_backend **out)
{
    ps_backend *ref, *cpu;
    if (!machine.device_nbytes) return ps_fail_sub(PS_EUNSUP, PS_SUB_NO_DEVICE, "this machine has no GPU");
    PS_TRY(ps_backend_ref_open(&ref));
    int rc = ps_backend_cpu_open(ref, &cpu);
    if (rc == 0 && (rc = ps_backend_pretend(cpu, "cuda", machine.device_nbytes, &machine, out)) < 0) cpu->close(cpu);
    return rc;
}

static int open_cuda(ps_backend *ref, ps_backend **all, ps_backend **out)
{
    if (pretends) return open_pretended_cuda(out);
    return ps_backend_cuda_open(local_rank, out);
}

static const struct row {
    const char *name;
    int (*open)(ps_backend *ref, ps_backend **all, ps_backend **out);
    /* NULL if all machines have the backend; the backend is then opened at startup. Otherwise a phrase that describes
     * the machines which have it; the backend is then opened at its first use. */
    const char *where;
    const char *numbered;         /* error text if a script asks for a numbered device such as "NAME:0"; or NULL */
} rows[] = {
    { .name = "cpu", .open = open_cpu },
    { .name = "ref", .open = take_ref },
    { .name = "meta", .open = open_meta },
    { .name = "sim", .open = open_sim },
    { .name = "cuda", .open = open_cuda, .where = "with a GPU",
      .numbered = "a process has one GPU, which is called cuda; CUDA_VISIBLE_DEVICES says which, and ranks take one "
                  "each" },
};
enum { ROWS = sizeof rows / sizeof rows[0] };

/* Opens the devices of a simulated machine. Each simulated device owns a real backend. */
static int open_pretended(ps_backend *ref, ps_backend **out, int max)
{
    ps_backend *real[ROWS] = { NULL };
    int n = 0, rc = 0;
    for (int i = 0; i < ROWS && rc == 0; i++) {
        if (rows[i].where) continue;
        rc = n < max ? rows[i].open(ref, real, &real[n]) : ps_fail(PS_EINVAL, "the list of backends is too short: it "
                                                                   "has room for only %d", max);
        if (rc == 0) n++;
    }
    if (rc < 0) {
        ps_backends_close(real, n);
        return rc;
    }
    for (int i = 0; i < n; i++) {
        out[i] = real[i];
        if (rc < 0 || real[i]->no_data) continue;
        rc = ps_backend_pretend(real[i], real[i]->name, real[i]->is_host ? machine.host_nbytes : 0, NULL, &out[i]);
    }
    if (rc < 0) ps_backends_close(out, n);
    return rc < 0 ? rc : n;
}

int ps_backends_open(ps_backend **out, int max)
{
    int n = 0, rc = 0;
    bool ref_listed = false;
    ps_backend *ref;
    PS_TRY(ps_backend_ref_open(&ref));
    if (pretends) return open_pretended(ref, out, max);
    for (int i = 0; i < ROWS; i++) {
        if (rows[i].where) continue;
        rc = n < max ? rows[i].open(ref, out, &out[n])
                     : ps_fail(PS_EINVAL, "the list of backends is too short: it has room for only %d, and %s is one "
                               "more", max, rows[i].name);
        if (rc < 0) break;
        ref_listed = ref_listed || out[n] == ref;
        n++;
    }
    if (rc < 0) {
        ps_backends_close(out, n);
        if (!ref_listed) ref->close(ref);
        return rc;
    }
    return n;
}

/* Writes a list such as "cpu, ref, meta, sim and, with a GPU, cuda". */
static void list_names(char *text, size_t size)
{
    size_t used = 0;
    for (int i = 0; i < ROWS && used < size; i++)
        used += (size_t)(rows[i].where
                         ? snprintf(text + used, size - used, " and, %s, %s", rows[i].where, rows[i].name)
                         : snprintf(text + used, size - used, "%s%s", i ? ", " : "", rows[i].name));
}

int ps_backend_open_named(const char *name, ps_backend **out)
{
    char names[256];
    for (int i = 0; i < ROWS; i++) {
        size_t n = strlen(rows[i].name);
        if (rows[i].where && !strcmp(name, rows[i].name)) return rows[i].open(NULL, NULL, out);
        if (rows[i].numbered && !strncmp(name, rows[i].name, n) && name[n] == ':')
            return ps_fail(PS_EUNSUP, "no device called '%s': %s", name, rows[i].numbered);
    }
    list_names(names, sizeof names);
    return ps_fail(PS_EUNSUP, "no device called '%s'; the devices are %s", name, names);
}

void ps_backends_local_rank(int number) { local_rank = number; }

void ps_backends_pretend(const ps_machine *m)
{
    pretends = m != NULL;
    if (m) machine = *m;
}

/* The order in which backends are closed does not matter, because closing a backend does not use the other backends. */
void ps_backends_close(ps_backend **all, int n)
{
    for (int i = 0; i < n; i++)
        if (all[i]->close) all[i]->close(all[i]);
}
