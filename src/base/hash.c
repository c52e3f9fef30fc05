/* SPDX-License-Identifier: BSD-3-Clause
 * The only hash of contents: XXH3 with 64 bits, in the widest vectors of this processor. */
#include <xxh_x86dispatch.h>
#include "ps.h"

uint64_t ps_xxh3(const void *data, int64_t nbytes) { return XXH3_64bits(data, nbytes > 0 ? (size_t)nbytes : 0); }
