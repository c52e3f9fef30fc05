/* SPDX-License-Identifier: BSD-3-Clause
 * SIGBUS: the kernel sends it when a page of a map cannot be read, because the file was truncated or its disk failed.
 * The program prints which file it was, and the signal ends it. */
#ifndef PS_IO_MAP_FAULT_H
#define PS_IO_MAP_FAULT_H
#include <stdint.h>

/* Installs the handler. name: printed before the message; it must outlive the process. Called once, by main. */
void ps_map_fault_install(const char *name);

/* A map begins to exist, and ceases to. If many maps exist, the message about a later one has no path. */
void ps_map_fault_add(const void *pages, int64_t nbytes, const char *path);
void ps_map_fault_remove(const void *pages);
#endif
