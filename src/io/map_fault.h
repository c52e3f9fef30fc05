/* SPDX-License-Identifier: BSD-3-Clause
 * Handles SIGBUS. The kernel sends this signal when a page of a map cannot be read, because the file was truncated or
 * its disk failed. The handler prints the file's path, and then the signal ends the program. */
#ifndef PS_IO_MAP_FAULT_H
#define PS_IO_MAP_FAULT_H
#include <stdint.h>

/* Installs the handler. The message begins with `name`, which must never be freed. Only main calls this function, and
 * only once. */
void ps_map_fault_install(const char *name);

/* Record that a map was made, or that it was removed. The table has room for a limited number of maps. If it is
 * full, a new map is not recorded, and a message about this map contains no path. */
void ps_map_fault_add(const void *pages, int64_t nbytes, const char *path);
void ps_map_fault_remove(const void *pages);
#endif
