/* SPDX-License-Identifier: BSD-3-Clause
 * Sizes of the panels of rows in which the loss of logits [N, V] is computed: on a processor (cpu/lm_loss.c), and by
 * ranks with parts of the vocabulary (tensor_parallel/loss.c). They depend on shapes only. */
#ifndef PS_BASE_PANELS_H
#define PS_BASE_PANELS_H
#include <stdint.h>

/* Returns the number of rows in a panel; the last can have fewer. V: number of words, at least 1. */
static inline int64_t ps_panel_rows(int64_t N, int64_t V)
{
    enum { NUMEL = 16 << 20, LEAST = 128, MOST = 1024 };       /* maximum number of logits in a panel (bf16: 32 MiB);
                                                                * minimum and maximum number of rows */
    int64_t rows = NUMEL / V;
    rows = rows < LEAST ? LEAST : rows > MOST ? MOST : rows;
    if (rows >= N) return N;
    int64_t panels = (N + rows - 1) / rows;                    /* panels of nearly equal size */
    rows = ((N + panels - 1) / panels + 15) / 16 * 16;
    return rows < N ? rows : N;
}
#endif
