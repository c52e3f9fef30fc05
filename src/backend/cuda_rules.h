/* SPDX-License-Identifier: BSD-3-Clause
 * Work space of cuda's kernels on a card that may be simulated (cuda/rules.h). */
#ifndef PS_CUDA_RULES_SCRATCH_H
#define PS_CUDA_RULES_SCRATCH_H
#include "backend/cuda/rules.h"

#ifdef __cplusplus
extern "C"
#endif
/* Bytes that the kernel of a call requests, each piece in multiples of 64. It reads only types, shapes, strides and the
 * alignment of addresses of the operands. */
int64_t ps_cuda_rules_scratch(const ps_cuda_card *card, const ps_call *call);
#endif
