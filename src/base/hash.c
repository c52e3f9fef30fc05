/* SPDX-License-Identifier: BSD-3-Clause
 * The hash of all contents: 64-bit XXH3, computed with the widest vectors of this processor. No other hash is used. */
#include <xxh_x86dispatch.h>
#include "ps.h"

uint64_t ps_xxh3(const void *data, int64_t nbytes) { return XXH3_64bits(data, nbytes > 0 ? (size_t)nbytes : 0); }
