/* SPDX-License-Identifier: BSD-3-Clause
 * The last error of each thread. Each thread has one buffer of fixed size, so that reporting an error needs no
 * memory. */
#include "base/error.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NO_DETAIL { PS_SUB_NONE, -1, -1, -1, -1, -1, -1, -1, 0 }

static __thread ps_error_kept last = { .detail = NO_DETAIL };
static __thread const char *running;      /* name of the op that is running */

static const struct { int code; const char *name; } names[] = {
#define PS_ERROR(name, code, text) { code, #name },
#define PS_SUBERROR(name, text)
#include "base/errors.def"
#undef PS_ERROR
#undef PS_SUBERROR
};
static const struct { int sub; const char *name; } sub_names[] = {
#define PS_ERROR(name, code, text)
#define PS_SUBERROR(name, text) { PS_SUB_##name, #name },
#include "base/errors.def"
#undef PS_ERROR
#undef PS_SUBERROR
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
    last.op = running;
    last.detail = (ps_error_detail)NO_DETAIL;
    return code;
}

int ps_error_set_sub(int sub)
{
    last.detail.sub = sub;
    return last.code;
}

int ps_error_set_room(int sub, int tier, int64_t wanted, int64_t left)
{
    last.detail.sub = sub;
    last.detail.tier = tier;
    last.detail.wanted = wanted;
    last.detail.left = left;
    return last.code;
}

int ps_error_set_rank(int rank)
{
    last.detail.rank = rank;
    return last.code;
}

int ps_error_set_stripes(int rank, int stripe, int other_rank, int other_stripe)
{
    last.detail.sub = PS_SUB_STRIPES;
    last.detail.rank = rank, last.detail.stripe = stripe;
    last.detail.other_rank = other_rank, last.detail.other_stripe = other_stripe;
    return last.code;
}

int ps_error_set_final(void)
{
    last.detail.final = 1;
    return last.code;
}

int ps_error_set_detail(const ps_error_detail *detail)
{
    last.detail = *detail;
    return last.code;
}

void ps_error_keep(ps_error_kept *out) { *out = last; }

int ps_error_again(const ps_error_kept *error)
{
    last = *error;
    return last.code;
}

void ps_error_set_op(const char *name) { running = name; }
const char *ps_error_running(void) { return running; }

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
const char *ps_error_op(void) { return last.op; }
const ps_error_detail *ps_error_get_detail(void) { return &last.detail; }

const char *ps_error_name(int code)
{
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) return names[i].name;
    return "unknown";
}

const char *ps_error_sub_name(int sub)
{
    for (size_t i = 0; i < sizeof sub_names / sizeof *sub_names; i++)
        if (sub_names[i].sub == sub) return sub_names[i].name;
    return NULL;
}
