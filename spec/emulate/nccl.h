/* SPDX-License-Identifier: BSD-3-Clause
 * A stand-in for <nccl.h> with what src/backend/cuda/nccl.cpp uses; nccl.cpp in the same folder implements it. */
#ifndef PS_EMULATE_NCCL_H
#define PS_EMULATE_NCCL_H
#include "cuda_runtime.h"

typedef struct ncclComm *ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef enum { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
               ncclInvalidUsage, ncclRemoteError, ncclInProgress } ncclResult_t;
typedef enum { ncclUint8 = 1, ncclFloat32 = 7 } ncclDataType_t;
typedef enum { ncclSum } ncclRedOp_t;
typedef struct { size_t size; int blocking; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER { sizeof(ncclConfig_t), 1 }
#endif
