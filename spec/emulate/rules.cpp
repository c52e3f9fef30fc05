/* SPDX-License-Identifier: BSD-3-Clause
 * The rules of work space, which the emulated plug-in compares with the requests of its kernels (backend.cpp). */
#include "../../src/backend/cuda_rules.c"
