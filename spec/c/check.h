/* SPDX-License-Identifier: BSD-3-Clause
 * Checks of the C tests: each prints what failed and counts. Each test program includes it once and ends with
 * `return end_checks();`. */
#ifndef PS_SPEC_CHECK_H
#define PS_SPEC_CHECK_H
#include "base/alloc.h"
#include "base/error.h"
#include "ps_test.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static _Atomic int passed, failed;          /* tests can call checks in threads */

#define CHECK(cond) check((cond), __LINE__, #cond, NULL)
#define OK(call) check((call) >= 0, __LINE__, #call, ps_error_message())
static inline int check(int ok, int line, const char *what, const char *why)
{
    if (ok) {
        passed++;
        return 1;
    }
    failed++;
    printf("line %d: %s%s%s\n", line, what, why ? ": " : "", why ? why : "");
    return 0;
}

/* Checks that `call` returns the error `code` and that its message contains `word`. */
#define FAILS(call, code, word) fails((call), (code), (word), __LINE__, #call)
static inline void fails(int rc, int code, const char *word, int line, const char *what)
{
    char text[1400];
    snprintf(text, sizeof text, "returned %d, wanted %d and '%s'; message: %s", rc, code, word, ps_error_message());
    check(rc == code && strstr(ps_error_message(), word), line, what, text);
}

/* Returns the seconds of processor time that this thread has used. Time that other programs use does not count. */
static inline double thread_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* PROMPT_S is a limit for calls that take milliseconds on an idle machine. If a test expects a call to end before
 * its time-out, the time-out is FAR_S, so that the two cannot be confused on a busy machine. */
enum { PROMPT_S = 100, FAR_S = 1000 };

/* Prints the counts. Returns the program's exit status. */
static inline int end_checks(void)
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
#endif
