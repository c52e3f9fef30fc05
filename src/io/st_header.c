/* SPDX-License-Identifier: BSD-3-Clause
 * Parses the header of a safetensors file and checks its contents. The parser accepts only the subset of JSON that the
 * format allows. The input is treated as hostile. The grammar has three levels. Each level is a loop, and the parser is
 * not recursive.
 *   header   = { (name : tensor | "__metadata__" : ({ (string : string)* } | null))* }
 *   tensor   = { "dtype" : string, "shape" : [ints], "data_offsets" : [int, int] }
 * The three entries of a tensor may have any order, and each entry must occur exactly once. */
#define _GNU_SOURCE
#include "io/safetensors.h"
#include "base/alloc.h"
#include "base/grow.h"
#include "base/text.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct parser {
    ps_st *st;
    const uint8_t *at, *end;    /* end: the end of the header */
    char *text;                 /* next free position in st->text */
    const char *tensor;         /* name of the tensor that is being read, for error messages */
    bool has_meta;
} parser;

/* -- helpers shared with the writer ------------------------------------------------------------------------------ */
const char *st_shown(const char *name, char out[ST_NAME_SHOWN]) { return ps_text_shown(name, out, ST_NAME_SHOWN); }

int64_t st_numel(int ndim, const int64_t *shape)
{
    int64_t n = 1, any_zero = 0;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] == 0) any_zero = 1;
        else if (__builtin_mul_overflow(n, shape[d], &n)) return -1;
    }
    return any_zero ? 0 : n;
}

/* -- errors ------------------------------------------------------------------------------------------------------ */
/* Raises an error. The message contains the file's path, the current position in the file and the text of `fmt`. If a
 * tensor is being read, the message also contains the tensor's name. */
static int bad(const parser *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int bad(const parser *p, const char *fmt, ...)
{
    char what[512], name[ST_NAME_SHOWN];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    long long place = p->at - p->st->map.bytes;
    if (p->tensor)
        return ps_fail(PS_EFORMAT, "%s: tensor '%s' (header, byte %lld of the file): %s", p->st->map.path,
                       st_shown(p->tensor, name), place, what);
    return ps_fail(PS_EFORMAT, "%s: header, byte %lld of the file: %s", p->st->map.path, place, what);
}

/* Raises an error about a whole tensor or a whole file. The message contains no position in the header. */
static int bad_file(const ps_st *st, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int bad_file(const ps_st *st, const char *fmt, ...)
{
    char what[700];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return ps_fail(PS_EFORMAT, "%s: %s", st->map.path, what);
}

/* -- tokens of the grammar --------------------------------------------------------------------------------------- */
static void skip_space(parser *p)
{
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r')) p->at++;
}

/* Returns a text for error messages that shows the next character. */
static const char *next_shown(const parser *p, char out[16])
{
    if (p->at >= p->end) return "the end of the header";
    if (*p->at > 0x20 && *p->at < 0x7f) snprintf(out, 16, "'%c'", *p->at);
    else snprintf(out, 16, "byte 0x%02x", *p->at);
    return out;
}

static bool accept(parser *p, char c)
{
    skip_space(p);
    if (p->at >= p->end || *p->at != (uint8_t)c) return false;
    p->at++;
    return true;
}

static int expect(parser *p, char c)
{
    char next[16];
    if (accept(p, c)) return 0;
    return bad(p, "'%c' expected, %s found", c, next_shown(p, next));
}

/* Reads the separator after an item of a list or object. Returns 1 if another item follows, and 0 if the separator is
 * `close`. */
static int more(parser *p, char close)
{
    char next[16];
    if (accept(p, ',')) return 1;
    if (accept(p, close)) return 0;
    return bad(p, "',' or '%c' expected, %s found", close, next_shown(p, next));
}

static int hex4(parser *p, uint32_t *out)
{
    uint32_t v = 0;
    if (p->end - p->at < 4) return bad(p, "\\u is not followed by four hexadecimal digits");
    for (int i = 0; i < 4; i++, p->at++) {
        uint8_t c = *p->at;
        bool digit = c >= '0' && c <= '9', letter = (c | 32) >= 'a' && (c | 32) <= 'f';
        if (!digit && !letter) return bad(p, "\\u is not followed by four hexadecimal digits");
        v = v * 16 + (uint32_t)(digit ? c - '0' : (c | 32) - 'a' + 10);
    }
    *out = v;
    return 0;
}

/* Reads one \u escape, or two \u escapes that form a surrogate pair. Writes the character as UTF-8. */
static int unicode_escape(parser *p)
{
    uint32_t c, low;
    PS_TRY(hex4(p, &c));
    if (c == 0) return bad(p, "a string contains a zero character (\\u0000)");
    if (c >= 0xd800 && c < 0xe000) {
        bool pair = c < 0xdc00 && p->end - p->at >= 2 && p->at[0] == '\\' && p->at[1] == 'u';
        if (!pair) return bad(p, "\\u%04x is only half of a surrogate pair", (unsigned)c);
        p->at += 2;
        PS_TRY(hex4(p, &low));
        if (low < 0xdc00 || low > 0xdfff) return bad(p, "\\u%04x is only half of a surrogate pair", (unsigned)c);
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    if (c < 0x80) *p->text++ = (char)c;
    else if (c < 0x800) *p->text++ = (char)(0xc0 | c >> 6), *p->text++ = (char)(0x80 | (c & 63));
    else if (c < 0x10000) {
        *p->text++ = (char)(0xe0 | c >> 12), *p->text++ = (char)(0x80 | (c >> 6 & 63));
        *p->text++ = (char)(0x80 | (c & 63));
    } else {
        *p->text++ = (char)(0xf0 | c >> 18), *p->text++ = (char)(0x80 | (c >> 12 & 63));
        *p->text++ = (char)(0x80 | (c >> 6 & 63)), *p->text++ = (char)(0x80 | (c & 63));
    }
    return 0;
}

/* Reads a string and writes the decoded text to st->text, with a final 0. The text always fits. A decoded text is not
 * longer than the string in the header, and the final 0 is shorter than the string's two quotes. */
static int string(parser *p, const char **out)
{
    static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    PS_TRY(expect(p, '"'));
    char *start = p->text;
    for (;;) {
        if (p->at >= p->end) return bad(p, "the header ends inside a string");
        uint8_t c = *p->at;
        if (c == '"') break;
        if (c < 0x20) return bad(p, "a string contains control character 0x%02x", c);
        if (c != '\\') {
            int len = ps_utf8(p->at, (size_t)(p->end - p->at));
            if (!len) return bad(p, "a string is not UTF-8 (byte 0x%02x)", c);
            memcpy(p->text, p->at, (size_t)len);
            p->text += len, p->at += len;
            continue;
        }
        if (++p->at >= p->end) return bad(p, "the header ends inside a string");
        const char *escape = *p->at ? strchr(plain, *p->at) : NULL;
        if (escape) *p->text++ = meant[escape - plain], p->at++;
        else if (*p->at == 'u') {
            p->at++;
            PS_TRY(unicode_escape(p));
        } else return bad(p, "a string contains an unknown escape");
    }
    p->at++;
    *p->text++ = 0;
    *out = start;
    return 0;
}

static int integer(parser *p, int64_t *out)
{
    char next[16];
    int64_t v = 0;
    skip_space(p);
    if (p->at >= p->end || *p->at < '0' || *p->at > '9')
        return bad(p, "expected a whole number of at least 0, found %s", next_shown(p, next));
    if (*p->at == '0' && p->end - p->at > 1 && p->at[1] >= '0' && p->at[1] <= '9')
        return bad(p, "a number has a leading zero");
    for (; p->at < p->end && *p->at >= '0' && *p->at <= '9'; p->at++)
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, *p->at - '0', &v))
            return bad(p, "a number does not fit in 63 bits");
    *out = v;
    return 0;
}

/* -- tensors ----------------------------------------------------------------------------------------------------- */
static int shape(parser *p, st_tensor *t)
{
    PS_TRY(expect(p, '['));
    if (accept(p, ']')) return 0;
    int again;
    do {
        if (t->ndim == PS_MAX_DIMS) return bad(p, "there are more than %d dimensions", PS_MAX_DIMS);
        PS_TRY(integer(p, &t->shape[t->ndim]));
        t->ndim++;
        PS_TRY(again = more(p, ']'));
    } while (again);
    return 0;
}

static int offsets(parser *p, st_tensor *t)
{
    PS_TRY(expect(p, '['));
    PS_TRY(integer(p, &t->begin));
    PS_TRY(expect(p, ','));
    PS_TRY(integer(p, &t->end));
    return expect(p, ']');
}

/* Reads the three entries of a tensor, in any order. Each entry must occur exactly once. */
static int tensor_fields(parser *p, st_tensor *t)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    int seen = 0, again;
    char shown[ST_NAME_SHOWN];
    const char *key, *text;
    PS_TRY(expect(p, '{'));
    do {
        char *mark = p->text;
        PS_TRY(string(p, &key));
        int field = !strcmp(key, "dtype") ? DTYPE : !strcmp(key, "shape") ? SHAPE
                  : !strcmp(key, "data_offsets") ? OFFSETS : 0;
        if (!field) return bad(p, "unknown entry '%s'", st_shown(key, shown));
        if (seen & field) return bad(p, "entry '%s' occurs twice", key);
        seen |= field;
        PS_TRY(expect(p, ':'));
        if (field == DTYPE) {
            PS_TRY(string(p, &text));
            if (!(t->type = st_type_by_text(text))) return bad(p, "unknown dtype '%s'", st_shown(text, shown));
        } else PS_TRY(field == SHAPE ? shape(p, t) : offsets(p, t));
        p->text = mark;
        PS_TRY(again = more(p, '}'));
    } while (again);
    if (seen != (DTYPE | SHAPE | OFFSETS))
        return bad(p, "entry '%s' is missing", !(seen & DTYPE) ? "dtype" : !(seen & SHAPE) ? "shape" : "data_offsets");
    return 0;
}

/* Checks that a tensor's dtype, shape and byte range agree, and that the range is inside the data. */
static int check_tensor(const parser *p, const st_tensor *t)
{
    int64_t nbits, held, there = p->st->data_nbytes, numel = st_numel(t->ndim, t->shape);
    if (numel < 0 || __builtin_mul_overflow(numel, t->type->bits, &nbits))
        return bad(p, "the shape is too large: its size does not fit in 63 bits");
    if (nbits % 8) return bad(p, "%lld elements of %s do not fill whole bytes", (long long)numel, t->type->text);
    if (t->begin > t->end)
        return bad(p, "data_offsets [%lld, %lld) end before they begin", (long long)t->begin, (long long)t->end);
    held = t->end - t->begin;
    if (held != nbits / 8)
        return bad(p, "%lld elements of %s need %lld bytes, data_offsets [%lld, %lld) hold %lld", (long long)numel,
                   t->type->text, (long long)(nbits / 8), (long long)t->begin, (long long)t->end, (long long)held);
    if (t->end > there)
        return bad(p, "data_offsets [%lld, %lld) reach past the end of the file, which has %lld bytes of data "
                   "(truncated?)", (long long)t->begin, (long long)t->end, (long long)there);
    return 0;
}

static int tensor(parser *p, const char *name)
{
    ps_st *st = p->st;
    st_tensor t = { .name = name };
    p->tensor = name;
    PS_TRY(tensor_fields(p, &t));
    PS_TRY(check_tensor(p, &t));
    p->tensor = NULL;
    PS_TRY(ps_grow(st->tensors, st->tensors_room, st->count + 1));
    st->tensors[st->count++] = t;
    return 0;
}

static int metadata(parser *p)
{
    ps_st *st = p->st;
    if (p->has_meta) return bad(p, "'__metadata__' occurs twice");
    p->has_meta = true;
    skip_space(p);
    /* Like the reference implementation, treat null as a missing entry. */
    if (p->end - p->at >= 4 && !memcmp(p->at, "null", 4)) {
        p->at += 4;
        return 0;
    }
    PS_TRY(expect(p, '{'));
    if (accept(p, '}')) return 0;
    int again;
    do {
        st_meta m;
        char next[16];
        PS_TRY(string(p, &m.key));
        PS_TRY(expect(p, ':'));
        skip_space(p);
        if (p->at >= p->end || *p->at != '"')
            return bad(p, "__metadata__ can have only strings, found %s", next_shown(p, next));
        PS_TRY(string(p, &m.value));
        PS_TRY(ps_grow(st->meta, st->meta_room, st->meta_count + 1));
        st->meta[st->meta_count++] = m;
        PS_TRY(again = more(p, '}'));
    } while (again);
    return 0;
}

/* -- the whole --------------------------------------------------------------------------------------------------- */
static int order_by_place(const void *a, const void *b)
{
    const st_tensor *s = a, *t = b;
    if (s->begin != t->begin) return s->begin < t->begin ? -1 : 1;
    if (s->end != t->end) return s->end < t->end ? -1 : 1;      /* an empty tensor is before the tensor at its offset */
    return strcmp(s->name, t->name);
}

static int order_by_name(const void *a, const void *b)
{
    return strcmp((*(const st_tensor *const *)a)->name, (*(const st_tensor *const *)b)->name);
}

static int order_by_key(const void *a, const void *b)
{
    return strcmp(((const st_meta *)a)->key, ((const st_meta *)b)->key);
}

/* Sorts all tensors and checks them together. The names must differ. The byte ranges must cover the data from the first
 * to the last byte, without gaps and overlaps. */
static int check_all(ps_st *st)
{
    char shown[ST_NAME_SHOWN], other[ST_NAME_SHOWN];
    if (st->meta_count) qsort(st->meta, (size_t)st->meta_count, sizeof *st->meta, order_by_key);
    for (int i = 1; i < st->meta_count; i++)
        if (!strcmp(st->meta[i - 1].key, st->meta[i].key))
            return bad_file(st, "key '%s' occurs twice in __metadata__", st_shown(st->meta[i].key, shown));
    if (st->count) qsort(st->tensors, (size_t)st->count, sizeof *st->tensors, order_by_place);
    if (!(st->by_name = ps_alloc((size_t)st->count * sizeof *st->by_name)))
        return ps_fail_nomem((size_t)st->count * sizeof *st->by_name);
    for (int i = 0; i < st->count; i++) st->by_name[i] = &st->tensors[i];
    if (st->count) qsort(st->by_name, (size_t)st->count, sizeof *st->by_name, order_by_name);
    for (int i = 1; i < st->count; i++)
        if (!strcmp(st->by_name[i - 1]->name, st->by_name[i]->name))
            return bad_file(st, "tensor '%s' occurs twice in the header", st_shown(st->by_name[i]->name, shown));
    int64_t covered = 0;
    for (int i = 0; i < st->count; i++) {
        const st_tensor *t = &st->tensors[i];
        if (t->begin != covered)
            return bad_file(st, "tensor '%s' begins at byte %lld of the data, %s%s%s at byte %lld: %s of %lld bytes",
                            st_shown(t->name, shown), (long long)t->begin, i ? "the one before ('" : "the data begins",
                            i ? st_shown(t[-1].name, other) : "", i ? "') ends" : "", (long long)covered,
                            t->begin > covered ? "a hole" : "an overlap", llabs((long long)(t->begin - covered)));
        covered = t->end;
    }
    if (covered != st->data_nbytes)
        return bad_file(st, "the tensors end at byte %lld of the data, which has %lld bytes: the last %lld bytes "
                        "belong to no tensor", (long long)covered, (long long)st->data_nbytes,
                        (long long)(st->data_nbytes - covered));
    return 0;
}

static int entries(parser *p)
{
    int again;
    if (p->at >= p->end || *p->at != '{') return bad(p, "the header must begin with '{'");
    p->at++;
    if (accept(p, '}')) return 0;
    do {
        const char *name;
        PS_TRY(string(p, &name));
        PS_TRY(expect(p, ':'));
        PS_TRY(!strcmp(name, "__metadata__") ? metadata(p) : tensor(p, name));
        PS_TRY(again = more(p, '}'));
    } while (again);
    return 0;
}

int st_parse(ps_st *st)
{
    const uint8_t *bytes = st->map.bytes;
    int64_t there = st->map.nbytes;
    if (there < 10)
        return bad_file(st, "truncated: %lld bytes are too few for a safetensors file (8 for the header's length, then "
                        "the header)", (long long)there);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
    if (length > ST_MAX_HEADER)
        return bad_file(st, "not a safetensors file: it announces a header of %llu bytes, but at most %d are allowed",
                        (unsigned long long)length, ST_MAX_HEADER);
    if ((int64_t)length > there - 8)
        return bad_file(st, "truncated: a header of %llu bytes is announced, %lld bytes follow",
                        (unsigned long long)length, (long long)(there - 8));
    if (length < 2) return bad_file(st, "the header has %llu bytes, '{}' is the least", (unsigned long long)length);
    st->data = bytes + 8 + length;
    st->data_nbytes = there - 8 - (int64_t)length;
    PS_TRY(st_check_header(st));
    if (!(st->text = ps_alloc((size_t)length))) return ps_fail_nomem(length);
    parser p = { .st = st, .at = bytes + 8, .end = bytes + 8 + length, .text = st->text };
    PS_TRY(entries(&p));
    skip_space(&p);
    if (p.at < p.end) return bad(&p, "only spaces may follow the header's last '}'");
    return check_all(st);
}
