/* SPDX-License-Identifier: BSD-3-Clause
 * Between psluajit and its plug-in libps_cuda.so: one function that opens the backend, and a text that both halves
 * print of what they were built from, so that halves of different builds refuse each other. */
#ifndef PS_CUDA_PLUGIN_H
#define PS_CUDA_PLUGIN_H
#include <stdio.h>
#include "backend/backend.h"
#include "ps_cdef.h"

static inline void ps_cuda_layout(char *out, size_t size)
{
    snprintf(out, size, "%s %zu %zu %zu", ps_cdef_hash, sizeof ps_cdef_text, sizeof(ps_backend), sizeof(ps_call));
}

/* Exported by the plug-in. local_rank: which of the machine's devices, in turns; -1: by the environment. */
typedef int (*ps_cuda_plugin_open_fn)(const char *layout, int local_rank, ps_backend **out);
#endif
