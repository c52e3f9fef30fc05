/* SPDX-License-Identifier: BSD-3-Clause
 * All small allocations of the engine go through these functions, so that tests can make the Nth request fail.
 * Arenas of tensor bytes use the same counter. Callers report failure with ps_fail_nomem. */
#ifndef PS_BASE_ALLOC_H
#define PS_BASE_ALLOC_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void *ps_alloc(size_t nbytes);                  /* memory with undefined contents, or NULL on failure */
void *ps_alloc0(size_t nbytes);                 /* zeroed */
void *ps_realloc(void *p, size_t nbytes);       /* returns NULL on failure; p then stays valid */
void ps_free(void *p);
char *ps_strdup(const char *s);
/* Returns true if a test wants this allocation to fail. */
bool ps_alloc_should_fail(void);
/* Declared in ps_test.h: ps_test_fail_alloc(nth, count). */
#endif
