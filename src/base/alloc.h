/* SPDX-License-Identifier: BSD-3-Clause
 * All small allocations of the engine use these functions, so that tests can make the Nth request fail. Arenas of
 * tensor bytes use the same counter of requests. Callers report a failure with ps_fail_nomem. */
#ifndef PS_BASE_ALLOC_H
#define PS_BASE_ALLOC_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void *ps_alloc(size_t nbytes);                  /* returns memory with undefined contents, or NULL on failure */
void *ps_alloc0(size_t nbytes);                 /* returns memory filled with zeros, or NULL on failure */
void *ps_realloc(void *p, size_t nbytes);       /* returns NULL on failure; p then stays valid */
void ps_free(void *p);
char *ps_strdup(const char *s);
/* Returns true if a test requires this allocation to fail. */
bool ps_alloc_should_fail(void);
/* ps_test.h declares ps_test_fail_alloc(nth, count), which sets the failures. */
#endif
