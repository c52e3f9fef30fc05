/* SPDX-License-Identifier: BSD-3-Clause
 * malloc with a counter of requests (alloc.h). The counter is atomic because the threads of loaders allocate too. */
#include "base/alloc.h"
#include "base/grow.h"
#include "ps_test.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* until_failure counts down to the first failure. Allocations fail while until_failure is at most 0 and greater than
 * -failures. */
static atomic_llong until_failure = -1, failures;

bool ps_alloc_should_fail(void)
{
    long long most = atomic_load_explicit(&failures, memory_order_relaxed);
    if (atomic_load_explicit(&until_failure, memory_order_relaxed) <= -most) return false;
    long long n = atomic_fetch_sub(&until_failure, 1);
    return n <= 0 && n > -most;
}

void ps_test_fail_alloc(int64_t nth, int64_t count)
{
    atomic_store(&failures, 0);
    atomic_store(&until_failure, nth < 0 ? -1 : nth);
    atomic_store(&failures, nth < 0 || count < 0 ? 0 : count);
}
int64_t ps_test_fail_alloc_left(void) { return atomic_load(&until_failure); }

void *ps_alloc(size_t nbytes) { return ps_alloc_should_fail() ? NULL : malloc(nbytes ? nbytes : 1); }
void *ps_alloc0(size_t nbytes) { return ps_alloc_should_fail() ? NULL : calloc(1, nbytes ? nbytes : 1); }
void *ps_realloc(void *p, size_t nbytes) { return ps_alloc_should_fail() ? NULL : realloc(p, nbytes ? nbytes : 1); }
void ps_free(void *p) { free(p); }

void *ps_alloc_grown(void *array, size_t size, int64_t *capacity, int64_t wanted, int64_t most)
{
    enum { LEAST = 16 };
    int64_t n = *capacity > most / 2 ? most : *capacity * 2;
    size_t nbytes;
    if (n < LEAST) n = LEAST;
    if (n < wanted) n = wanted;
    if (n > most || __builtin_mul_overflow((size_t)n, size, &nbytes)) return NULL;
    void *p = ps_realloc(array, nbytes);
    if (p) *capacity = n;
    return p;
}

char *ps_strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = ps_alloc(n);
    return p ? memcpy(p, s, n) : NULL;
}
