/* SPDX-License-Identifier: BSD-3-Clause
 * Copies bytes from the caller's memory or a file to tensors, and back. Large copies use all compute threads. Loaded
 * weights are written to new memory, which the system clears page by page at the first access. Several threads clear
 * memory faster than one thread. */
#include "backend/cpu/cpu.h"
#include <stdatomic.h>
#include <string.h>
#include "base/error.h"

enum { PIECE = 2 << 20 };             /* size of a huge page, which the system clears as a whole */

/* Reads large data in pieces, on all threads. After an error, the function skips the remaining pieces. */
int ps_cpu_load(ps_backend *be, void *dst, ps_reader read, const void *from, int64_t at, size_t nbytes)
{
    int64_t pieces = (int64_t)(nbytes / PIECE);
    if (pieces < 2) return read(from, at, dst, (int64_t)nbytes);
    size_t head = (size_t)(-(uintptr_t)dst % PIECE);         /* number of bytes before the first huge-page boundary,
                                                              * where piece 1 begins */
    ps_error_kept error = { .code = 0 };
    atomic_bool failed = false;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i <= pieces; i++) {
        size_t begin = i == 0 ? 0 : head + (size_t)(i - 1) * PIECE;
        size_t end = i == pieces ? nbytes : head + (size_t)i * PIECE;
        if (end > nbytes) end = nbytes;
        if (begin >= end || atomic_load(&failed)) continue;
        int rc = read(from, at + (int64_t)begin, (char *)dst + begin, (int64_t)(end - begin));
        if (rc < 0 && !atomic_exchange(&failed, true)) ps_error_keep(&error);
    }
    return failed ? ps_error_again(&error) : 0;
}

static int read_memory(const void *from, int64_t at, void *dst, int64_t nbytes)
{
    memcpy(dst, (const char *)from + at, (size_t)nbytes);
    return 0;
}

/* If source and destination overlap, copies on one thread, because one of several threads could overwrite bytes that
 * another thread has not read yet. They can overlap if a tensor borrows memory and the data to copy are in the same
 * memory. */
int ps_cpu_copy(ps_backend *be, void *dst, const void *src, size_t nbytes)
{
    uintptr_t to = (uintptr_t)dst, from = (uintptr_t)src;
    if (to < from + nbytes && from < to + nbytes) {
        memmove(dst, src, nbytes);
        return 0;
    }
    return ps_cpu_load(be, dst, read_memory, src, 0, nbytes);
}
