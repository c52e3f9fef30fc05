/* SPDX-License-Identifier: BSD-3-Clause
 * 64-bit XXH3, computed with the widest vectors of this processor. The engine uses this hash for all contents, and no
 * other hash. */
#include <xxh_x86dispatch.h>
#include "ps.h"

uint64_t ps_xxh3(const void *data, int64_t nbytes) { return XXH3_64bits(data, nbytes > 0 ? (size_t)nbytes : 0); }
