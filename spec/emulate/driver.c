/* SPDX-License-Identifier: BSD-3-Clause
 * A stand-in for libcuda.so.1. The environment determines its answers: PS_EMULATE_INIT is the result of cuInit (0: it
 * works), PS_EMULATE_DEVICES the number of devices (1), PS_EMULATE_VERSION the driver's version (13000). */
#include <stdlib.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *out);
int cuDeviceGetCount(int *out);
int cuGetErrorName(int code, const char **out);

static int number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) { return flags == 0 ? number("PS_EMULATE_INIT", 0) : 1; }

int cuDriverGetVersion(int *out)
{
    *out = number("PS_EMULATE_VERSION", 13000);
    return 0;
}

int cuDeviceGetCount(int *out)
{
    *out = number("PS_EMULATE_DEVICES", 1);
    return 0;
}

int cuGetErrorName(int code, const char **out)
{
    *out = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
