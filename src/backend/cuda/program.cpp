/* SPDX-License-Identifier: BSD-3-Clause
 * The functions of base/ that the plug-in calls. Each function here calls the function of the same name in the program
 * that opened the plug-in. */
#include <stdarg.h>
#include <stdio.h>
#include "backend/cuda/cuda.h"

const ps_cuda_program *ps_cuda_host;

void *ps_alloc(size_t nbytes) { return ps_cuda_host->alloc(nbytes); }
void *ps_alloc0(size_t nbytes) { return ps_cuda_host->alloc0(nbytes); }
void ps_free(void *p) { ps_cuda_host->free(p); }
bool ps_alloc_should_fail(void) { return ps_cuda_host->alloc_should_fail(); }
void ps_host_region_watch(void (*goes)(void *p, size_t nbytes)) { ps_cuda_host->host_region_watch(goes); }

int ps_fail_at(int code, const char *file, int line, const char *fmt, ...)
{
    char message[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    return ps_cuda_host->fail(code, file, line, message);
}
