/* SPDX-License-Identifier: BSD-3-Clause
 * A reader for the JSON of vocabularies and of JSON lines. The reader scans a text once and keeps only the last string
 * that it read. If the caller asks for a number, the number must be an integer. If the caller skips a value, the reader
 * checks the value only as far as is necessary to find its end. */
#include "data/tok.h"
#include "base/text.h"
#include <string.h>

enum { DEPTH = 512 };               /* maximum nesting of skipped values */

int tok_json_bad(const tok_json *j, const char *what)
{
    return ps_fail(PS_EFORMAT, "%s: byte %lld: %s", j->path, (long long)(j->at - j->first), what);
}

static void blanks(tok_json *j)
{
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
}

bool tok_json_accept(tok_json *j, char c)
{
    blanks(j);
    if (j->at >= j->end || *j->at != (uint8_t)c) return false;
    j->at++;
    return true;
}

int tok_json_expect(tok_json *j, char c)
{
    char what[] = "'?' expected";
    if (tok_json_accept(j, c)) return 0;
    what[1] = c;
    return tok_json_bad(j, what);
}

/* Reads four hexadecimal digits. Returns -1 if the next four characters are not hexadecimal digits. */
static int hex4(tok_json *j)
{
    int v = 0;
    if (j->end - j->at < 4) return -1;
    for (int i = 0; i < 4; i++, j->at++) {
        int c = *j->at, low = c | 32;
        if (!(c >= '0' && c <= '9') && !(low >= 'a' && low <= 'f')) return -1;
        v = v * 16 + (c <= '9' ? c - '0' : low - 'a' + 10);
    }
    return v;
}

static int unicode_escape(tok_json *j)
{
    uint8_t out[4];
    int c = hex4(j);
    if (c < 0) return tok_json_bad(j, "\\u is not followed by four hexadecimal digits");
    if (c >= 0xd800 && c < 0xdc00) {
        int low = j->end - j->at >= 2 && j->at[0] == '\\' && j->at[1] == 'u' ? (j->at += 2, hex4(j)) : -1;
        if (low < 0xdc00 || low > 0xdfff) return tok_json_bad(j, "this \\u escape is only half of a surrogate pair");
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    } else if (c >= 0xdc00 && c < 0xe000) return tok_json_bad(j, "this \\u escape is only half of a surrogate pair");
    return tok_bytes_add(&j->text, out, (size_t)tok_utf8_put((uint32_t)c, out));
}

static int escape(tok_json *j)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (j->at >= j->end) return tok_json_bad(j, "the text ends inside a string");
    char c = (char)*j->at++;
    if (c == 'u') return unicode_escape(j);
    const char *found = c ? strchr(from, c) : NULL;
    if (!found) return tok_json_bad(j, "there is no such escape in JSON");
    return tok_bytes_add(&j->text, to + (found - from), 1);
}

int tok_json_string(tok_json *j)
{
    j->text.n = 0;
    PS_TRY(tok_json_expect(j, '"'));
    for (;;) {
        const uint8_t *run = j->at;
        while (j->at < j->end && *j->at >= 0x20 && *j->at < 0x80 && *j->at != '"' && *j->at != '\\') j->at++;
        if (j->at > run) PS_TRY(tok_bytes_add(&j->text, run, (size_t)(j->at - run)));
        if (j->at >= j->end) return tok_json_bad(j, "the text ends inside a string");
        if (*j->at == '"') return j->at++, 0;
        if (*j->at == '\\') {
            j->at++;
            PS_TRY(escape(j));
            continue;
        }
        int len = ps_utf8(j->at, (size_t)(j->end - j->at));
        if (!len || *j->at < 0x20)
            return tok_json_bad(j, len ? "a string contains a control character" : "the text is not UTF-8");
        PS_TRY(tok_bytes_add(&j->text, j->at, (size_t)len));
        j->at += len;
    }
}

int tok_json_whole(tok_json *j, int64_t *out)
{
    int64_t v = 0;
    blanks(j);
    bool minus = j->at < j->end && *j->at == '-';
    if (minus) j->at++;
    const uint8_t *digits = j->at;
    for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
        if (j->at - digits >= 15) return tok_json_bad(j, "a number has more than 15 digits");
        v = v * 10 + (*j->at - '0');
    }
    bool part = j->at < j->end && (*j->at == '.' || *j->at == 'e' || *j->at == 'E');
    if (j->at == digits || part) return tok_json_bad(j, "expected a whole number");
    *out = minus ? -v : v;
    return 0;
}

/* Skips a number, or true, false or null. */
static int skip_word(tok_json *j)
{
    const uint8_t *from = j->at;
    while (j->at < j->end && *j->at > 0x20 && !strchr(",:[]{}\"", *j->at)) j->at++;
    return j->at > from ? 0 : tok_json_bad(j, "expected a value");
}

int tok_json_skip(tok_json *j)
{
    char close[DEPTH];
    int depth = 0;
    do {                                    /* skip one value, or the beginning of a list or object */
        blanks(j);
        if (j->at >= j->end) return tok_json_bad(j, "the text ends inside a value");
        bool open = *j->at == '{' || *j->at == '[';
        if (open) {
            if (depth == DEPTH) return tok_json_bad(j, "values are nested deeper than 512 levels");
            close[depth++] = *j->at++ == '{' ? '}' : ']';
        } else if (*j->at == '"') PS_TRY(tok_json_string(j));
        else PS_TRY(skip_word(j));
        bool fresh = open;                  /* true if no item of this object or list was read yet */
        while (depth && tok_json_accept(j, close[depth - 1])) depth--, fresh = false;
        if (!depth) break;
        if (!fresh) PS_TRY(tok_json_expect(j, ','));
        if (close[depth - 1] == '}') {
            PS_TRY(tok_json_string(j));
            PS_TRY(tok_json_expect(j, ':'));
        }
    } while (depth);
    return 0;
}

int tok_json_end(tok_json *j)
{
    blanks(j);
    return j->at < j->end ? tok_json_bad(j, "more text follows the value") : 0;
}

int tok_json_key(tok_json *j, bool first)
{
    if (tok_json_accept(j, '}')) return 0;
    if (!first) PS_TRY(tok_json_expect(j, ','));
    PS_TRY(tok_json_string(j));
    PS_TRY(tok_json_expect(j, ':'));
    return 1;
}
