/* SPDX-License-Identifier: BSD-3-Clause */
#include "base/log.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const level_names[] = { "error", "warn", "info", "debug" };

static int threshold(void)
{
    static int level = -1;
    if (level >= 0) return level;
    int found = PS_LOG_WARN;
    const char *want = getenv("PS_LOG");
    for (int i = 0; want && i <= PS_LOG_DEBUG; i++)
        if (!strcmp(want, level_names[i])) found = i;
    return level = found;
}

void ps_log(enum ps_log_level level, const char *fmt, ...)
{
    if ((int)level > threshold()) return;
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "psluajit %s: %s\n", level_names[level], line);
}
