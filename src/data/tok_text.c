/* SPDX-License-Identifier: BSD-3-Clause
 * Functions for text in the tokenizers: buffers that grow, texts that record the origin of each byte, and UTF-8. */
#include "data/tok.h"
#include "base/alloc.h"
#include "base/text.h"
#include <string.h>

static int more(void **at, size_t n, size_t *room, size_t further, size_t size)
{
    if (further <= *room - n) return 0;
    size_t want = *room ? *room * 2 : 64;
    while (want - n < further) want *= 2;
    void *p = want > SIZE_MAX / size ? NULL : ps_realloc(*at, want * size);
    if (!p) return ps_fail_nomem(want * size);
    *at = p, *room = want;
    return 0;
}

int tok_bytes_more(tok_bytes *b, size_t further)
{
    void *at = b->at;
    int rc = more(&at, b->n, &b->room, further, 1);
    b->at = at;
    return rc;
}

int tok_ints_more(tok_ints *b, size_t further)
{
    void *at = b->at;
    int rc = more(&at, b->n, &b->room, further, sizeof *b->at);
    b->at = at;
    return rc;
}

int tok_bytes_add(tok_bytes *b, const void *from, size_t n)
{
    PS_TRY(tok_bytes_more(b, n));
    if (n) memcpy(b->at + b->n, from, n);
    b->n += n;
    return 0;
}

int tok_ints_add(tok_ints *b, int32_t value)
{
    if (b->n == b->room) PS_TRY(tok_ints_more(b, 1));
    b->at[b->n++] = value;
    return 0;
}

void tok_bytes_free(tok_bytes *b)
{
    ps_free(b->at);
    *b = (tok_bytes){ 0 };
}

void tok_ints_free(tok_ints *b)
{
    ps_free(b->at);
    *b = (tok_ints){ 0 };
}

const char *tok_shown(const uint8_t *s, size_t n, char out[TOK_SHOWN])
{
    char whole[TOK_SHOWN * 2];
    n = n < sizeof whole - 1 ? n : sizeof whole - 1;
    if (n) memcpy(whole, s, n);
    for (size_t i = 0; i < n; i++) if (!whole[i]) whole[i] = '?';
    whole[n] = 0;
    return ps_text_shown(whole, out, TOK_SHOWN);
}

/* -- UTF-8 ------------------------------------------------------------------------------------------------------- */
uint32_t tok_code_point(const uint8_t *s, int len)
{
    if (len == 1) return s[0];
    uint32_t c = s[0] & (0x7fu >> len);
    for (int i = 1; i < len; i++) c = c << 6 | (s[i] & 0x3f);
    return c;
}

int tok_utf8_put(uint32_t c, uint8_t out[4])
{
    if (c < 0x80) return out[0] = (uint8_t)c, 1;
    int len = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = len - 1; i > 0; i--, c >>= 6) out[i] = (uint8_t)(0x80 | (c & 0x3f));
    out[0] = (uint8_t)(c | (0xf00u >> len));
    return len;
}

static size_t ascii_run(const uint8_t *s, size_t n)
{
    size_t i = 0;
    uint64_t eight;
    for (; i + 8 <= n; i += 8) {
        memcpy(&eight, s + i, 8);
        if (eight & 0x8080808080808080u) break;
    }
    while (i < n && s[i] < 0x80) i++;
    return i;
}

bool tok_utf8_valid(const uint8_t *s, size_t n)
{
    for (size_t i = ascii_run(s, n); i < n; i += ascii_run(s + i, n - i)) {
        int len = ps_utf8(s + i, n - i);
        if (!len) return false;
        i += (size_t)len;
    }
    return true;
}

size_t tok_utf8_bad(const uint8_t *s, size_t n)
{
    int len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || n < 2) return 1;
    uint8_t low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80,
        high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    if (s[1] < low || s[1] > high) return 1;
    size_t i = 2;
    while (i < n && i < (size_t)len && (s[i] & 0xc0) == 0x80) i++;
    return i;
}

/* -- texts ------------------------------------------------------------------------------------------------------- */
int tok_text_add(tok_text *t, const void *bytes, size_t n, int32_t begin, int32_t end)
{
    PS_TRY(tok_bytes_add(&t->s, bytes, n));
    if (!t->mapped) return 0;
    PS_TRY(tok_ints_more(&t->begin, n));
    PS_TRY(tok_ints_more(&t->end, n));
    for (size_t i = 0; i < n; i++) t->begin.at[t->begin.n++] = begin, t->end.at[t->end.n++] = end;
    return 0;
}

void tok_text_clear(tok_text *t, bool mapped)
{
    t->s.n = t->begin.n = t->end.n = 0;
    t->mapped = mapped;
}

void tok_text_free(tok_text *t)
{
    tok_bytes_free(&t->s);
    tok_ints_free(&t->begin);
    tok_ints_free(&t->end);
}

tok_span tok_slice(tok_span t, size_t from, size_t to)
{
    return (tok_span){ t.s + from, to - from, t.begin ? t.begin + from : NULL, t.end ? t.end + from : NULL,
                       t.first + (int32_t)from };
}
