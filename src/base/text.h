/* SPDX-License-Identifier: BSD-3-Clause
 * Makes untrusted text (from files or from peers), which may contain terminal escapes, safe to print. */
#ifndef PS_BASE_TEXT_H
#define PS_BASE_TEXT_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns the length in bytes of the UTF-8 character at s [n], or 0 if n is 0 or the bytes are not valid UTF-8. */
int ps_utf8(const uint8_t *s, size_t n);
/* Returns the length of the byte order mark at s, which is 3, or 0 if there is none. */
static inline size_t ps_bom(const uint8_t *s, int64_t n) { return n >= 3 && !memcmp(s, "\xef\xbb\xbf", 3) ? 3 : 0; }
/* Copies `from` to `to` [room]. Control characters and bytes that are not valid UTF-8 become '?'. A text that is too
 * long is truncated and ends with "...". room is at least 8. `from` and `to` may be equal. Returns `to`. */
const char *ps_text_shown(const char *from, char *to, size_t room);
#endif
