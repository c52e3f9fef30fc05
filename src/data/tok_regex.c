/* SPDX-License-Identifier: BSD-3-Clause
 * The regular expressions that split text into words. They are implemented with PCRE2, which only this file uses.
 * Matching has limits, so that a hostile pattern causes an error. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/tok.h"
#include "data/tok_unicode.h"
#include "base/alloc.h"
#include "base/text.h"
#include <pcre2.h>
#include <string.h>

enum { STEPS = 10000000, DEPTH = 1000000, HEAP_KIB = 65536, STACK_BYTES = 1 << 20 };

struct tok_regex { pcre2_code *code; bool compiled; };     /* compiled: true if `code` has machine code */
struct tok_matcher { pcre2_match_data *data; pcre2_match_context *context; pcre2_jit_stack *stack; };

int tok_regex_new(const char *pattern, size_t n, tok_regex **out)
{
    char shown[TOK_SHOWN];
    int code;
    PCRE2_SIZE at;
    tok_regex *r = ps_alloc0(sizeof *r);
    if (!r) return ps_fail_nomem(sizeof *r);
    r->code = pcre2_compile((PCRE2_SPTR)pattern, n, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    if (!r->code) {
        PCRE2_UCHAR why[160];
        ps_free(r);
        pcre2_get_error_message(code, why, sizeof why);
        return ps_fail(code == PCRE2_ERROR_NOMEMORY ? PS_ENOMEM : PS_EFORMAT, "the pattern '%s': character %zu: %s",
                       tok_shown((const uint8_t *)pattern, n, shown), (size_t)at, (char *)why);
    }
    r->compiled = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0;     /* if false, PCRE2 interprets the pattern */
    *out = r;
    return 0;
}

void tok_regex_free(tok_regex *r)
{
    if (!r) return;
    pcre2_code_free(r->code);
    ps_free(r);
}

int tok_matcher_new(tok_matcher **out)
{
    tok_matcher *m = ps_alloc0(sizeof *m);
    if (!m) return ps_fail_nomem(sizeof *m);
    m->data = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    m->stack = pcre2_jit_stack_create(32 * 1024, STACK_BYTES, NULL);
    if (!m->data || !m->context) {
        tok_matcher_free(m);
        return ps_fail_nomem(STACK_BYTES);
    }
    pcre2_set_match_limit(m->context, STEPS);
    pcre2_set_depth_limit(m->context, DEPTH);
    pcre2_set_heap_limit(m->context, HEAP_KIB);
    if (m->stack) pcre2_jit_stack_assign(m->context, NULL, m->stack);
    *out = m;
    return 0;
}

void tok_matcher_free(tok_matcher *m)
{
    if (!m) return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    ps_free(m);
}

static int failed(int rc, size_t from)
{
    PCRE2_UCHAR why[160];
    if (rc == PCRE2_ERROR_NOMEMORY) return ps_fail_nomem(HEAP_KIB * 1024);
    pcre2_get_error_message(rc, why, sizeof why);
    return ps_fail(PS_ERANGE, "the tokenizer's pattern fails at byte %zu of the text: %s (a match can have at most %d "
                   "steps)", from, (char *)why, STEPS);
}

int tok_regex_find(const tok_regex *r, tok_matcher *m, const uint8_t *s, size_t n, size_t from, size_t *begin,
    size_t *end)
{
    int rc = r->compiled ? pcre2_jit_match(r->code, s, n, from, PCRE2_NO_UTF_CHECK, m->data, m->context)
                         : pcre2_match(r->code, s, n, from, PCRE2_NO_UTF_CHECK, m->data, m->context);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) return failed(rc, from);
    const PCRE2_SIZE *place = pcre2_get_ovector_pointer(m->data);
    if (place[0] > place[1] || place[0] < from)      /* \K in a look-around can cause this */
        return ps_fail(PS_EFORMAT, "the tokenizer's pattern has a match that ends before it begins, at byte %zu of the "
                       "text", from);
    *begin = place[0], *end = place[1];
    return 1;
}

/* -- code points that PCRE2's tables do not have ------------------------------------------------------------------ */
static uint32_t stand_in_of(uint32_t c)
{
    size_t low = 0, high = sizeof tok_stand_ins / sizeof *tok_stand_ins;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (c > tok_stand_ins[mid].last) low = mid + 1;
        else high = mid;
    }
    bool has = low < sizeof tok_stand_ins / sizeof *tok_stand_ins && c >= tok_stand_ins[low].first;
    return has ? tok_stand_ins[low].value : c;
}

int tok_stand_in(const uint8_t *s, size_t n, tok_bytes *copy, const uint8_t **out)
{
    bool copied = false;
    *out = s;
    for (size_t i = 0; i < n;) {
        if (s[i] < 0xe0) {                              /* every code point in the table has at least three bytes */
            i++;
            continue;
        }
        int len = ps_utf8(s + i, n - i);
        uint32_t c = tok_code_point(s + i, len), other = stand_in_of(c);
        if (other != c) {
            if (!copied) {
                copy->n = 0;
                PS_TRY(tok_bytes_add(copy, s, n));
                copied = true;
            }
            tok_utf8_put(other, copy->at + i);
        }
        i += (size_t)len;
    }
    if (copied) *out = copy->at;
    return 0;
}
