/* SPDX-License-Identifier: BSD-3-Clause
 * Writes log messages to stderr. Each message has a level. PS_LOG=error|warn|info|debug sets the lowest level that is
 * shown. The default is warn. */
#ifndef PS_BASE_LOG_H
#define PS_BASE_LOG_H
enum ps_log_level { PS_LOG_ERROR, PS_LOG_WARN, PS_LOG_INFO, PS_LOG_DEBUG };
void ps_log(enum ps_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#endif
