/* SPDX-License-Identifier: BSD-3-Clause
 * The interface between psluajit and its plug-in libps_cuda.so. It has the function that opens the backend, and the
 * functions of the program that the plug-in calls. The program and the plug-in each compute a text from their build
 * settings. If the texts differ, the two builds are different and refuse each other. */
#ifndef PS_CUDA_PLUGIN_H
#define PS_CUDA_PLUGIN_H
#include <stdio.h>
#include "backend/backend.h"
#include "ps_cdef.h"

/* The functions of the program that the plug-in calls. It can call no others. `fail` must stay the first field, because
 * a plug-in of another build uses it to report the mismatch. */
typedef struct ps_cuda_program {
    int (*fail)(int code, const char *file, int line, const char *message);    /* like ps_fail_at */
    void *(*alloc)(size_t nbytes);                                              /* like the function in base/alloc.h */
    void *(*alloc0)(size_t nbytes);
    void (*free)(void *p);
    bool (*alloc_should_fail)(void);
    void (*host_region_watch)(void (*goes)(void *p, size_t nbytes));            /* like ps_host_region_watch */
    int64_t (*clock)(void);                                                     /* like ps_record_clock */
} ps_cuda_program;

static inline void ps_cuda_layout(char *out, size_t size)
{
    snprintf(out, size, "%s %zu %zu %zu %zu", ps_cdef_hash, sizeof ps_cdef_text, sizeof(ps_backend), sizeof(ps_call),
             sizeof(ps_cuda_program));
}

/* The function that the plug-in exports. It selects the device local_rank modulo the number of the machine's devices.
 * If local_rank is -1, the environment selects the device. */
typedef int (*ps_cuda_plugin_open_fn)(const char *layout, const ps_cuda_program *program, int local_rank,
                                      ps_backend **out);
#endif
