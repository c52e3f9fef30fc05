/* SPDX-License-Identifier: BSD-3-Clause
 * Loads the cuda backend. It looks for a driver, then for a device, and then for the plug-in libps_cuda.so. A machine
 * without a GPU thus fails without loading the plug-in, and each missing part has its own error.
 *
 * This file calls four functions of the driver and declares them itself, as the driver's ABI defines them, so CUDA's
 * headers are not needed. The plug-in is never unloaded, because its libraries do not support unloading. */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "backend/cuda_plugin.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"

enum { DRIVER_NEEDED = 12000 };      /* CUDA 12.0; a plug-in that was built with a newer toolkit checks the driver
                                      * itself */

typedef struct driver {
    int (*init)(unsigned flags);
    int (*version)(int *out);
    int (*count)(int *out);
    int (*name_of)(int code, const char **out);
} driver;

static const char plugin_name[] = "libps_cuda.so";

static int find_driver(driver *d)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!lib)
        return ps_fail_sub(PS_EUNSUP, PS_SUB_NO_DEVICE, "no device cuda: there is no NVIDIA driver on this machine "
                           "(%s)", dlerror());
    *(void **)&d->init = dlsym(lib, "cuInit");
    *(void **)&d->version = dlsym(lib, "cuDriverGetVersion");
    *(void **)&d->count = dlsym(lib, "cuDeviceGetCount");
    *(void **)&d->name_of = dlsym(lib, "cuGetErrorName");
    if (!d->init || !d->version || !d->count || !d->name_of)
        return ps_fail(PS_EUNSUP, "no device cuda: libcuda.so.1 is not an NVIDIA driver (it lacks cuInit or others)");
    return 0;
}

static const char *error_name(const driver *d, int code)
{
    const char *name = NULL;
    return d->name_of(code, &name) == 0 && name ? name : "an unknown error";
}

/* Checks that the driver works and reports at least one device. */
static int check_driver(void)
{
    enum { NO_DEVICE = 100 };
    driver d = { 0 };
    int n = 0, version = 0, rc;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    PS_TRY(find_driver(&d));
    rc = d.init(0);
    if (rc == 0) rc = d.count(&n);
    if (rc == NO_DEVICE || (rc == 0 && n == 0))
        return ps_fail_sub(PS_EUNSUP, PS_SUB_NO_DEVICE, "no device cuda: the NVIDIA driver shows no device%s%s%s",
                           visible ? " (CUDA_VISIBLE_DEVICES is '" : "", visible ? visible : "", visible ? "')" : "");
    if (rc != 0)
        return ps_fail(PS_EUNSUP, "no device cuda: the NVIDIA driver does not start: %s (%d)", error_name(&d, rc), rc);
    if (d.version(&version) != 0 || version < DRIVER_NEEDED)
        return ps_fail(PS_EUNSUP, "no device cuda: the NVIDIA driver is too old: it supports CUDA %d.%d, but %d.%d is "
                       "needed", version / 1000, version % 1000 / 10, DRIVER_NEEDED / 1000, DRIVER_NEEDED % 1000 / 10);
    return 0;
}

/* Finds the plug-in. The environment variable PS_CUDA_PLUGIN can name its file. If the variable is not set, the plug-in
 * is libps_cuda.so in the program's folder or, for an installed program, in ../lib/psluajit. */
static int plugin_path(char *path, size_t size)
{
    static const char *const places[] = { "", "../lib/psluajit/" };
    const char *given = getenv("PS_CUDA_PLUGIN");
    char exe[PATH_MAX], *slash;
    if (given && *given) {
        if (snprintf(path, size, "%s", given) >= (int)size) return ps_fail(PS_EINVAL, "PS_CUDA_PLUGIN is too long");
        if (access(path, R_OK) == 0) return 0;
        return ps_fail(PS_EUNSUP, "no device cuda: no library: PS_CUDA_PLUGIN is '%s': %s", given, strerror(errno));
    }
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    slash = strrchr(exe, '/');
    if (slash) slash[1] = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (snprintf(path, size, "%s%s%s", exe, places[i], plugin_name) < (int)size && access(path, R_OK) == 0)
            return 0;
    return ps_fail(PS_EUNSUP, "no device cuda: no library: %s is not in %s; install the package psluajit-cuda, or "
                   "build the plug-in with nvcc (cmake -DPS_CUDA=ON, or `make cuda`)", plugin_name, exe);
}

/* -- the plug-in -------------------------------------------------------------------------------------------------- */
static int fail(int code, const char *file, int line, const char *message)
{
    return ps_fail_at(code, file, line, "%s", message);
}

static const ps_cuda_program program = {
    .fail = fail, .alloc = ps_alloc, .alloc0 = ps_alloc0, .free = ps_free, .alloc_should_fail = ps_alloc_should_fail,
    .host_region_watch = ps_host_region_watch, .clock = ps_record_clock,
};

/* Reports a failed dlopen. The loader's message begins with the name of the file that cannot be loaded: either the
 * plug-in or a library that the plug-in needs. */
static int cannot_load(const char *path, const char *why)
{
    if (strncmp(why, path, strlen(path)) == 0) return ps_fail(PS_EUNSUP, "no device cuda: no library: %s", why);
    return ps_fail(PS_EUNSUP, "no device cuda: no library: %s; the plug-in %s needs it; install it, and add its folder "
                   "to LD_LIBRARY_PATH (docs/cuda.md)", why, path);
}

int ps_backend_cuda_open(int local_rank, ps_backend **out)
{
    char path[PATH_MAX], layout[128];
    PS_TRY(check_driver());
    PS_TRY(plugin_path(path, sizeof path));
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) return cannot_load(path, dlerror());
    ps_cuda_plugin_open_fn open_plugin;
    *(void **)&open_plugin = dlsym(lib, "ps_cuda_plugin_open");
    if (!open_plugin)
        return ps_fail(PS_EUNSUP, "no device cuda: no library: %s has no function ps_cuda_plugin_open", path);
    ps_cuda_layout(layout, sizeof layout);
    int rc = open_plugin(layout, &program, local_rank, out);
    if (rc < 0) ps_error_prefix("no device cuda: ");
    return rc;
}
