/* SPDX-License-Identifier: BSD-3-Clause
 * Counts checks and prints those that fail. Each test program includes it once. */
#ifndef PS_SPEC_REF_CHECK_H
#define PS_SPEC_REF_CHECK_H
#include <stdio.h>
#include "base/error.h"
#include "ps_test.h"

static int checks, failures;

static void check_at(int line, int ok, const char *what)
{
    checks++;
    if (ok) return;
    failures++;
    printf("line %d: %s (last error: %s)\n", line, what, ps_error_message() ? ps_error_message() : "none");
}
#define CHECK(ok) check_at(__LINE__, (ok) != 0, #ok)

/* Prints the counts and returns the exit status, for the end of main. */
static int report(void)
{
    printf("%d checks, %d failed\n", checks, failures);
    return failures > 0;
}
#endif
