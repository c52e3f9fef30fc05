/* SPDX-License-Identifier: BSD-3-Clause
 * The interface between psluajit and its plug-in libps_cuda.so. It consists of the function that opens the backend, and
 * of the functions of the program that the plug-in calls. The program and the plug-in each compute a text from their
 * build settings. If the two texts differ, the plug-in is not used. */
#ifndef PS_CUDA_PLUGIN_H
#define PS_CUDA_PLUGIN_H
#include <stdio.h>
#include "backend/backend.h"
#include "ps_cdef.h"

/* The functions of the program that the plug-in calls. The plug-in cannot call other functions of the program. `fail`
 * must stay the first field, because a plug-in of another build uses it to report the mismatch. */
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

/* The function that the plug-in exports. It opens the backend on the device with the index local_rank modulo the
 * machine's number of devices. If local_rank is -1, environment variables select the device. */
typedef int (*ps_cuda_plugin_open_fn)(const char *layout, const ps_cuda_program *program, int local_rank,
                                      ps_backend **out);
#endif
