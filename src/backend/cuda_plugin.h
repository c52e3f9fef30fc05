/* SPDX-License-Identifier: BSD-3-Clause
 * The interface between psluajit and its plug-in libps_cuda.so: the function that opens the backend, and the
 * functions of the program that the plug-in calls. Both compute a text from their build settings, so that a program
 * and a plug-in of different builds refuse each other. */
#ifndef PS_CUDA_PLUGIN_H
#define PS_CUDA_PLUGIN_H
#include <stdio.h>
#include "backend/backend.h"
#include "ps_cdef.h"

/* The program's functions that the plug-in calls; it can call no others. `fail` must stay first, because a plug-in
 * of another build uses it to report the mismatch. */
typedef struct ps_cuda_program {
    int (*fail)(int code, const char *file, int line, const char *message);    /* as ps_fail_at */
    void *(*alloc)(size_t nbytes);                                              /* as in base/alloc.h */
    void *(*alloc0)(size_t nbytes);
    void (*free)(void *p);
    bool (*alloc_should_fail)(void);
    void (*host_region_watch)(void (*goes)(void *p, size_t nbytes));            /* as ps_host_region_watch */
    int64_t (*clock)(void);                                                     /* as ps_record_clock */
} ps_cuda_program;

static inline void ps_cuda_layout(char *out, size_t size)
{
    snprintf(out, size, "%s %zu %zu %zu %zu", ps_cdef_hash, sizeof ps_cdef_text, sizeof(ps_backend), sizeof(ps_call),
             sizeof(ps_cuda_program));
}

/* Exported by the plug-in. local_rank, modulo the number of the machine's devices, selects a device; if it is -1,
 * the environment does. */
typedef int (*ps_cuda_plugin_open_fn)(const char *layout, const ps_cuda_program *program, int local_rank,
                                      ps_backend **out);
#endif
