/* SPDX-License-Identifier: BSD-3-Clause
 * One error per thread: code, message, file:line of where it was first known, and the op that was running.
 * Every function of the engine returns 0 or a negative PS_E* code (ps.h); the message is left here, once. */
#ifndef PS_BASE_ERROR_H
#define PS_BASE_ERROR_H
#include "ps.h"

/* Records the error and returns `code`, so that a caller can write `return ps_fail(PS_EINVAL, "...", ...)`. */
#define ps_fail(code, ...) ps_fail_at((code), __FILE__, __LINE__, __VA_ARGS__)
int ps_fail_at(int code, const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Out of memory for `nbytes` of engine bookkeeping (not tensor bytes, whose message names the tier). */
#define ps_fail_nomem(nbytes) ps_fail(PS_ENOMEM, "no memory for %zu bytes of bookkeeping", (size_t)(nbytes))
/* Names the op in errors raised until it is set again; NULL for none. `name` must outlive its use. */
void ps_error_set_op(const char *name);
/* Puts text in front of the message of the last error ("loading FILE: "), keeping code and place. */
void ps_error_prefix(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Propagates a failure. */
#define PS_TRY(expr) do { int rc_ = (expr); if (rc_ < 0) return rc_; } while (0)
#endif
