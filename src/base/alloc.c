/* SPDX-License-Identifier: BSD-3-Clause
 * malloc behind a counter (see alloc.h). The counter is atomic because loader threads allocate too. */
#include "base/alloc.h"
#include "ps.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static atomic_llong requests_until_failure = -1;   /* -1: never; 0: the next request fails */

bool ps_alloc_should_fail(void)
{
    long long n = atomic_load_explicit(&requests_until_failure, memory_order_relaxed);
    if (n < 0) return false;
    return atomic_fetch_sub(&requests_until_failure, 1) == 0;
}

void ps_test_fail_alloc(int64_t nth) { atomic_store(&requests_until_failure, nth); }
int64_t ps_test_fail_alloc_left(void) { return atomic_load(&requests_until_failure); }

void *ps_alloc(size_t nbytes) { return ps_alloc_should_fail() ? NULL : malloc(nbytes ? nbytes : 1); }
void *ps_alloc0(size_t nbytes) { return ps_alloc_should_fail() ? NULL : calloc(1, nbytes ? nbytes : 1); }
void *ps_realloc(void *p, size_t nbytes) { return ps_alloc_should_fail() ? NULL : realloc(p, nbytes ? nbytes : 1); }
void ps_free(void *p) { free(p); }

char *ps_strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = ps_alloc(n);
    return p ? memcpy(p, s, n) : NULL;
}
