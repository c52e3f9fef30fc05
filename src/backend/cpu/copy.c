/* SPDX-License-Identifier: BSD-3-Clause
 * Copies of the caller's bytes to tensors and back, on all compute threads where they are many: a file of weights is
 * read into memory that is touched for the first time, and the system clears that page by page. */
#include "backend/cpu/cpu.h"
#include <string.h>

enum { PIECE = 2 << 20 };             /* a huge page: what the system clears at once */

int ps_cpu_copy(ps_backend *be, void *dst, const void *src, size_t nbytes)
{
    int64_t pieces = (int64_t)(nbytes / PIECE);
    if (pieces < 2) {
        memcpy(dst, src, nbytes);
        return 0;
    }
    size_t head = (size_t)(-(uintptr_t)dst % PIECE);         /* pieces begin where huge pages do */
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i <= pieces; i++) {
        size_t from = i == 0 ? 0 : head + (size_t)(i - 1) * PIECE;
        size_t to = i == pieces ? nbytes : head + (size_t)i * PIECE;
        if (to > nbytes) to = nbytes;
        if (from < to) memcpy((char *)dst + from, (const char *)src + from, to - from);
    }
    return 0;
}
