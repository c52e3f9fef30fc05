/* SPDX-License-Identifier: BSD-3-Clause
 * Errors of the engine. A function that can fail returns 0 or a negative PS_E* code (ps.h). Each thread stores its
 * last error, which consists of the message, a detail, the file:line that raised the error, and the op that was
 * running. */
#ifndef PS_BASE_ERROR_H
#define PS_BASE_ERROR_H
#include "ps.h"

/* Records the error and returns `code`, so that a caller can write `return ps_fail(PS_EINVAL, "...", ...)`. */
#define ps_fail(code, ...) ps_fail_at((code), __FILE__, __LINE__, __VA_ARGS__)
int ps_fail_at(int code, const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Like ps_fail, with details for programs (ps_error_detail). `sub` is one of PS_SUB_*, or PS_SUB_NONE. */
#define ps_fail_sub(code, sub, ...) (ps_fail(code, __VA_ARGS__), ps_error_set_sub(sub))
/* Fails because only `left` bytes are free, although `wanted` bytes are needed. tier is -1 if the memory belongs to
 * no tier. */
#define ps_fail_room(code, sub, tier, wanted, left, ...) \
    (ps_fail(code, __VA_ARGS__), ps_error_set_room(sub, tier, wanted, left))
/* Fails with an error that rank `rank` caused. */
#define ps_fail_rank(code, rank, ...) (ps_fail(code, __VA_ARGS__), ps_error_set_rank(rank))
/* Each of these functions sets details of the thread's last error, and returns the code of that error. */
int ps_error_set_sub(int sub);
int ps_error_set_room(int sub, int tier, int64_t wanted, int64_t left);
int ps_error_set_rank(int rank);
int ps_error_set_stripes(int rank, int stripe, int other_rank, int other_stripe);
int ps_error_set_final(void);
int ps_error_set_detail(const ps_error_detail *detail);     /* sets all details of an error that is raised again */
/* An error with all its details. It can be raised again later or on another thread. */
typedef struct ps_error_kept {
    int code;                     /* code of the error; 0 if there is no error */
    char message[1024], where[128];
    const char *op;               /* name of the op that was running, or NULL */
    ps_error_detail detail;
} ps_error_kept;
void ps_error_keep(ps_error_kept *out);             /* copies this thread's last error */
int ps_error_again(const ps_error_kept *error);     /* makes `error` this thread's last error and returns its code */
/* Fails because there is no memory for `nbytes` bytes of the engine's bookkeeping. Errors about tensor bytes name
 * their tier instead. */
#define ps_fail_nomem(nbytes) ps_fail(PS_ENOMEM, "no memory for %zu bytes of bookkeeping", (size_t)(nbytes))
/* Sets the op that later errors name, or no op if `name` is NULL. The caller must keep `name` valid while it is set. */
void ps_error_set_op(const char *name);
const char *ps_error_running(void);                 /* returns the op that later errors name, or NULL */
/* Puts a text, such as "loading FILE: ", before the message of the last error. The error's code and source line do
 * not change. */
void ps_error_prefix(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Returns from the calling function if `expr` fails. */
#define PS_TRY(expr) do { int rc_ = (expr); if (rc_ < 0) return rc_; } while (0)
#endif
