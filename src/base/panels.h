/* SPDX-License-Identifier: BSD-3-Clause
 * The loss of logits [N, V] is computed in panels of rows. This file computes the sizes of the panels, for a
 * processor (cpu/lm_loss.c) and for ranks that each have a part of the vocabulary (tensor_parallel/loss.c). The sizes
 * depend only on shapes. */
#ifndef PS_BASE_PANELS_H
#define PS_BASE_PANELS_H
#include <stdint.h>

/* Returns the number of rows in a panel. The last panel can have fewer rows. V is the number of words, at least 1. */
static inline int64_t ps_panel_rows(int64_t N, int64_t V)
{
    enum { NUMEL = 16 << 20, LEAST = 128, MOST = 1024 };       /* NUMEL: maximum number of logits in a panel (32 MiB
                                                                * in bf16). LEAST: minimum number of rows. MOST:
                                                                * maximum number of rows. */
    int64_t rows = NUMEL / V;
    rows = rows < LEAST ? LEAST : rows > MOST ? MOST : rows;
    if (rows >= N) return N;
    int64_t panels = (N + rows - 1) / rows;                    /* the panels have nearly equal sizes */
    rows = ((N + panels - 1) / panels + 15) / 16 * 16;
    return rows < N ? rows : N;
}
#endif
