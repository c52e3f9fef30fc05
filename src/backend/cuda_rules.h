/* SPDX-License-Identifier: BSD-3-Clause
 * Computes the workspace that the cuda kernels need on a card. The card can be simulated (cuda/rules.h). */
#ifndef PS_CUDA_RULES_SCRATCH_H
#define PS_CUDA_RULES_SCRATCH_H
#include "backend/cuda/rules.h"

#ifdef __cplusplus
extern "C"
#endif
/* Returns the number of bytes that the kernel of a call allocates. Each allocation is rounded up to a multiple of 64
 * bytes. The function reads only the types, shapes, strides and address alignments of the operands. */
int64_t ps_cuda_rules_scratch(const ps_cuda_card *card, const ps_call *call);
#endif
