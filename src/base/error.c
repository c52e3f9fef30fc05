/* SPDX-License-Identifier: BSD-3-Clause
 * The thread's last error. Owns one fixed buffer per thread, so that reporting can never fail for memory. */
#include "base/error.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static __thread struct {
    int code;
    char message[1024];
    char where[128];
    const char *op;         /* op running now */
    const char *failed_op;  /* op that was running when the error was recorded */
} last;

static const struct { int code; const char *name; } names[] = {
#define PS_ERROR(name, code, text) { code, #name },
#include "base/errors.def"
#undef PS_ERROR
};

int ps_fail_at(int code, const char *file, int line, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(last.message, sizeof last.message, fmt, ap);
    va_end(ap);
    const char *src = strstr(file, "src/");
    snprintf(last.where, sizeof last.where, "%s:%d", src ? src : file, line);
    last.code = code;
    last.failed_op = last.op;
    return code;
}

void ps_error_set_op(const char *name) { last.op = name; }

void ps_error_prefix(const char *fmt, ...)
{
    char text[sizeof last.message];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n < 0) return;
    if ((size_t)n < sizeof text) snprintf(text + n, sizeof text - (size_t)n, "%s", last.message);
    memcpy(last.message, text, sizeof text);
}

const char *ps_error_message(void) { return last.message; }
const char *ps_error_where(void) { return last.where; }
const char *ps_error_op(void) { return last.failed_op; }

const char *ps_error_name(int code)
{
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) return names[i].name;
    return "unknown";
}
