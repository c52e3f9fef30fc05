/* SPDX-License-Identifier: BSD-3-Clause */
#include "base/text.h"
#include <stdbool.h>
#include <string.h>

int ps_utf8(const uint8_t *s, size_t n)
{
    if (!n) return 0;
    if (s[0] < 0x80) return 1;
    int len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || n < (size_t)len) return 0;
    for (int i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (s[0] == 0xe0 && s[1] < 0xa0) return 0;      /* overlong encoding */
    if (s[0] == 0xed && s[1] > 0x9f) return 0;      /* surrogate */
    if (s[0] == 0xf0 && s[1] < 0x90) return 0;      /* overlong encoding */
    if (s[0] == 0xf4 && s[1] > 0x8f) return 0;      /* greater than U+10FFFF */
    return len;
}

/* Returns true for a control character. The control characters are C0, DEL and C1 (U+0080 to U+009F). Terminals treat
 * U+009B, which is in C1, as the begin of an escape sequence. */
static bool is_control(const uint8_t *s) { return s[0] < 0x20 || s[0] == 0x7f || (s[0] == 0xc2 && s[1] < 0xa0); }

const char *ps_text_shown(const char *from, char *to, size_t room)
{
    size_t n = 0, left = strlen(from);
    while (left && n < room - 8) {
        int len = ps_utf8((const uint8_t *)from, left);
        bool bad = len == 0 || is_control((const uint8_t *)from);
        if (len == 0) len = 1;
        if (bad) to[n++] = '?';
        else memmove(to + n, from, (size_t)len), n += (size_t)len;
        from += len, left -= (size_t)len;
    }
    memcpy(to + n, "...", 4);
    if (!left) to[n] = 0;
    return to;
}
