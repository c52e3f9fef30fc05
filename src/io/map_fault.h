/* SPDX-License-Identifier: BSD-3-Clause
 * Handles SIGBUS, which the kernel sends when a page of a map cannot be read: the file was truncated, or its disk
 * failed. The program prints the file's path, and ends by the signal. */
#ifndef PS_IO_MAP_FAULT_H
#define PS_IO_MAP_FAULT_H
#include <stdint.h>

/* Installs the handler. `name` is printed before the message and must outlive the process. Only main calls this
 * function, once. */
void ps_map_fault_install(const char *name);

/* These functions record that a map was made, and that it was removed. If many maps exist, the message about a later
 * map has no path. */
void ps_map_fault_add(const void *pages, int64_t nbytes, const char *path);
void ps_map_fault_remove(const void *pages);
#endif
