/* SPDX-License-Identifier: BSD-3-Clause
 * Text that others wrote (files, peers), made fit to be shown: it may hold anything, escapes of a terminal included. */
#ifndef PS_BASE_TEXT_H
#define PS_BASE_TEXT_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The length in bytes of the UTF-8 character at s, of n bytes at most; 0: none, or no UTF-8. */
int ps_utf8(const uint8_t *s, size_t n);
/* The bytes of a byte order mark at s, which may have none: 3 or 0. */
static inline size_t ps_bom(const uint8_t *s, int64_t n) { return n >= 3 && !memcmp(s, "\xef\xbb\xbf", 3) ? 3 : 0; }
/* Copies `from` to `to` [room], control characters and bytes that are no UTF-8 as '?', cut with "..." where it is long.
 * room: 8 at least; the two may be the same. Returns `to`. */
const char *ps_text_shown(const char *from, char *to, size_t room);
#endif
