/* SPDX-License-Identifier: BSD-3-Clause
 * Makes text safe to print. A text from a file or from a peer may contain terminal escapes. */
#ifndef PS_BASE_TEXT_H
#define PS_BASE_TEXT_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns the length in bytes of the UTF-8 character at s [n], or 0 if n is 0 or the bytes are not valid UTF-8. */
int ps_utf8(const uint8_t *s, size_t n);
/* Returns 3, the length of a byte order mark, if s begins with a byte order mark. Otherwise returns 0. */
static inline size_t ps_bom(const uint8_t *s, int64_t n) { return n >= 3 && !memcmp(s, "\xef\xbb\xbf", 3) ? 3 : 0; }
/* Copies the text `from` to `to` [room], and returns `to`. Control characters and bytes that are not valid UTF-8
 * become '?'. A text that is too long is truncated, and then ends with "...". room must be at least 8. `from` and
 * `to` may be equal. */
const char *ps_text_shown(const char *from, char *to, size_t room);
#endif
