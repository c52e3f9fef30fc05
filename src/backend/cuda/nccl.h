/* SPDX-License-Identifier: BSD-3-Clause
 * Declarations of nccl.cpp and of its kernel in add_up.cu. nccl.cpp moves bytes between the GPUs of several
 * processes. */
#ifndef PS_CUDA_NCCL_H
#define PS_CUDA_NCCL_H
#include "backend/cuda/cuda.h"

enum { PS_CUDA_MOST_RANKS = 256 };

/* Queues a sum over ranks: to[i] = the sum of at[r][i] over r < n, for i < numel. `to` can be one of the at[r]. */
int ps_cuda_add_up(cudaStream_t stream, int dtype, int n, char *const *at, int64_t numel, void *to);
extern const ps_wire_table ps_cuda_nccl;
#endif
