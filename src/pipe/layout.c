/* SPDX-License-Identifier: BSD-3-Clause
 * This file parses a layout: text that describes how a model is cut into pipeline stages. The format is the same as in
 * Megatron-LM's option --pipeline-model-parallel-layout. */
#include <string.h>
#include "base/grow.h"
#include "base/text.h"
#include "pipe/pipe.h"

enum { MOST_LETTERS = 1 << 16, MOST_BRACKETS = 16 };

typedef struct reader {
    const char *text, *at;
    char *out;                      /* [n] letters and bars, with all repetitions expanded */
    int32_t n, capacity;
    /* open: [n_open] for each open bracket, the position in `out` where its contents begin */
    int32_t open[MOST_BRACKETS];
    int32_t n_open;
} reader;

static int refuse(const reader *r, const char *why)
{
    char shown[80];
    return ps_fail(PS_EINVAL, "layout '%s', character %d: %s", ps_text_shown(r->text, shown, sizeof shown),
                   (int)(r->at - r->text) + 1, why);
}

static int push(reader *r, const char *from, int32_t n)
{
    if (n > MOST_LETTERS - r->n) return refuse(r, "there are more than 65536 letters");
    PS_TRY(ps_grow(r->out, r->capacity, r->n + n));
    if (n) memcpy(r->out + r->n, from, (size_t)n);
    r->n += n;
    return 0;
}

/* Reads a repetition, such as "*3", after a letter, a bar or a bracket. The repeated characters are the characters of
 * `out` from position `from` to the end. For "*3", appends two copies of these characters to `out`. */
static int repeat(reader *r, int32_t from)
{
    int32_t times = 0, size = r->n - from;
    if (*r->at != '*') return 0;
    if (r->at[1] < '0' || r->at[1] > '9') return refuse(r, "a number must follow *");
    for (r->at++; *r->at >= '0' && *r->at <= '9'; r->at++) {
        times = times * 10 + (*r->at - '0');
        if (times > MOST_LETTERS) return refuse(r, "there are more than 65536 repeats");
    }
    if (times == 0) r->n = from;
    if (size == 0 || times < 2) return 0;
    if ((int64_t)size * times > MOST_LETTERS) return refuse(r, "there are more than 65536 letters");
    PS_TRY(ps_grow(r->out, r->capacity, from + (int64_t)size * times));
    for (; times > 1; times--) PS_TRY(push(r, r->out + from, size));
    return 0;
}

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

static int write_out(reader *r)
{
    while (*r->at) {
        char c = *r->at;
        int32_t from = r->n;
        if (c == '(') {
            if (r->n_open == MOST_BRACKETS) return refuse(r, "too many brackets are open");
            r->open[r->n_open++] = r->n;
        } else if (c == ')') {
            if (!r->n_open) return refuse(r, "it closes a bracket that is not open");
            from = r->open[--r->n_open];
        } else if (is_letter(c) || c == '|') PS_TRY(push(r, &c, 1));
        else if (c != ',' && c != ' ') return refuse(r, "expected a letter or one of | ( ) * ,");
        r->at++;
        if (c != '(' && c != ',' && c != ' ') PS_TRY(repeat(r, from));
    }
    return r->n_open ? refuse(r, "a bracket is not closed") : 0;
}

/* Checks the layout against the parts of the model. Writes the number of parts in each virtual stage to counts
 * [vstages], unless `counts` is NULL. */
static int count(const reader *r, const char *kinds, int32_t vstages, int32_t *counts)
{
    int32_t n_parts = (int32_t)strlen(kinds), bars = 0, part = 0, first = 0;
    char shown[80];
    ps_text_shown(r->text, shown, sizeof shown);
    for (int32_t i = 0; i < r->n; i++) bars += r->out[i] == '|';
    if (bars + 1 != vstages)
        return ps_fail(PS_EINVAL, "layout '%s' has %d virtual stages, the pipeline has %d", shown, bars + 1, vstages);
    if (r->n - bars != n_parts)
        return ps_fail(PS_EINVAL, "layout '%s' has %d parts, the model has %d", shown, r->n - bars, n_parts);
    for (int32_t i = 0, v = 0; i <= r->n; i++) {
        if (i < r->n && r->out[i] != '|') {
            if (r->out[i] != kinds[part])
                return ps_fail(PS_EINVAL, "layout '%s' has '%c' as part %d, in virtual stage %d, but the model has "
                               "'%c'", shown, r->out[i], part, v, kinds[part]);
            part++;
            continue;
        }
        if (part == first) return ps_fail(PS_EINVAL, "layout '%s' has no part in virtual stage %d", shown, v);
        if (counts) counts[v] = part - first;
        first = part;
        v++;
    }
    return 0;
}

int ps_pipe_layout(const char *layout, const char *kinds, int32_t vstages, int32_t *counts)
{
    reader r = { .text = layout, .at = layout };
    int rc = write_out(&r);
    if (rc == 0) rc = count(&r, kinds, vstages, NULL);
    if (rc == 0) rc = count(&r, kinds, vstages, counts);
    ps_free(r.out);
    return rc;
}
