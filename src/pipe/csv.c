/* SPDX-License-Identifier: BSD-3-Clause
 * This file reads and writes tables as text in the format of PyTorch's torch.distributed.pipelining. Each line is the
 * row of a rank, and each cell is an action, such as "2F0", the forward of virtual stage 2 for micro-batch 0. In
 * PyTorch, an empty cell is an idle tick. This file skips empty cells, because our actions begin when everything that
 * they need is available. */
#include <stdio.h>
#include <string.h>
#include "base/grow.h"
#include "base/text.h"
#include "pipe/pipe.h"

static const struct { int kind; const char *text; } kinds[] = {
    { PS_ACT_FORWARD, "F" }, { PS_ACT_BACKWARD, "B" }, { PS_ACT_INPUT, "I" }, { PS_ACT_WEIGHT, "W" },
    { PS_ACT_SEND_F, "SEND_F" }, { PS_ACT_RECV_F, "RECV_F" }, { PS_ACT_SEND_B, "SEND_B" }, { PS_ACT_RECV_B, "RECV_B" },
    { PS_ACT_REDUCE, "REDUCE_GRAD" }, { PS_ACT_YIELD, "YIELD" },
};

const char *pipe_kind_text(int kind)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].kind == kind) return kinds[i].text;
    return NULL;
}

const char *pipe_action_text(const ps_action *a, char *out)
{
    const char *kind = pipe_kind_text(a->kind);
    if (!kind) snprintf(out, PIPE_TEXT, "of kind %d", a->kind);
    else if (a->kind == PS_ACT_YIELD) snprintf(out, PIPE_TEXT, "%s%d", kind, a->micro);
    else if (a->kind == PS_ACT_REDUCE) snprintf(out, PIPE_TEXT, "%d%s", a->vstage, kind);
    else snprintf(out, PIPE_TEXT, "%d%s%d", a->vstage, kind, a->micro);
    return out;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */
typedef struct reader {
    const char *at, *end, *name;
    int32_t line, cell;
    pipe_row *rows;                         /* [n] */
    int32_t n, capacity, n_vstages, n_micro;
    bool has_back;
} reader;

static int refuse(const reader *r, const char *from, const char *to, const char *why)
{
    char text[48], shown[48];
    size_t n = (size_t)(to - from) < sizeof text - 1 ? (size_t)(to - from) : sizeof text - 1;
    memcpy(text, from, n);
    text[n] = 0;
    return ps_fail(PS_EFORMAT, "%s, line %d, cell %d: '%s' %s", r->name, r->line, r->cell,
                   ps_text_shown(text, shown, sizeof shown), why);
}

/* Reads an integer that must be smaller than `limit`. The integer cannot overflow, because `limit` is at most 2^20. */
static bool take_number(const char **at, const char *end, int32_t limit, int32_t *out)
{
    int32_t value = 0;
    const char *from = *at;
    for (; *at < end && **at >= '0' && **at <= '9'; ++*at) {
        value = value * 10 + (**at - '0');
        if (value >= limit) return false;
    }
    *out = value;
    return *at > from;
}

static int read_action(reader *r, const char *from, const char *to)
{
    static const char letters[] = "FBIW";
    static const int of_letter[] = { PS_ACT_FORWARD, PS_ACT_BACKWARD, PS_ACT_INPUT, PS_ACT_WEIGHT };
    const char *at = from, *letter;
    int32_t vstage, micro;
    if (!take_number(&at, to, PIPE_MOST_VSTAGES, &vstage) || at == to || !(letter = memchr(letters, *at, 4)))
        return refuse(r, from, to, "must be F, B, I or W with the numbers of a virtual stage and a micro-batch, such "
                                   "as 2F0; transfers and reductions are derived from these");
    at++;
    if (!take_number(&at, to, PIPE_MOST_PAIRS, &micro) || at != to)
        return refuse(r, from, to, "must end with the number of a micro-batch, such as 2F0");
    int kind = of_letter[letter - letters];
    if (vstage >= r->n_vstages) r->n_vstages = vstage + 1;
    if (micro >= r->n_micro) r->n_micro = micro + 1;
    r->has_back = r->has_back || kind != PS_ACT_FORWARD;
    if (r->rows[r->n - 1].n >= 3 * PIPE_MOST_PAIRS) return refuse(r, from, to, "is one action too many");
    return pipe_push(&r->rows[r->n - 1], kind, vstage, micro);
}

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

static int read_line(reader *r, const char *end)
{
    if (r->n >= PIPE_MOST_VSTAGES) return refuse(r, r->at, r->at, "begins one rank too many");
    PS_TRY(ps_grow(r->rows, r->capacity, r->n + 1));
    r->rows[r->n++] = (pipe_row){ .n = 0 };
    for (r->cell = 1; r->at <= end; r->cell++) {
        const char *to = r->at < end ? memchr(r->at, ',', (size_t)(end - r->at)) : NULL, *from = r->at;
        if (!to) to = end;
        r->at = to + 1;
        while (from < to && is_blank(*from)) from++;
        while (to > from && is_blank(to[-1])) to--;
        if (to > from) PS_TRY(read_action(r, from, to));
    }
    return 0;
}

static int read_rows(reader *r)
{
    while (r->at < r->end) {
        const char *end = memchr(r->at, '\n', (size_t)(r->end - r->at));
        r->line++;
        PS_TRY(read_line(r, end ? end : r->end));
    }
    if (r->n_micro) return 0;
    return ps_fail(PS_EFORMAT, "%s: there is no action", r->name);
}

static int make(reader *r, ps_pipe_table **out)
{
    ps_pipe_spec spec = { .schedule = PS_PIPE_CUSTOM, .stages = r->n, .virtual_stages = 1, .micro_batches = r->n_micro,
                          .forward_only = !r->has_back };
    ps_pipe_table *t;
    PS_TRY(pipe_new(&spec, r->n_vstages, &t));
    memcpy(t->rows, r->rows, (size_t)r->n * sizeof *t->rows);
    /* The table now owns the actions. Clear r->rows, so that the reader does not free the actions. */
    memset(r->rows, 0, (size_t)r->n * sizeof *r->rows);
    int rc = pipe_seal(t);
    if (rc < 0) return ps_error_prefix("%s: ", r->name), ps_pipe_table_free(t), rc;
    for (int32_t v = 0; v < t->spec.vstages; v++)
        if (t->local_of[v] >= t->spec.virtual_stages) t->spec.virtual_stages = t->local_of[v] + 1;
    *out = t;
    return 0;
}

int ps_pipe_table_read(const char *text, int64_t nbytes, const char *name, ps_pipe_table **out)
{
    reader r = { .at = text, .end = text + nbytes, .name = name };
    int rc = read_rows(&r);
    if (rc == 0) rc = make(&r, out);
    for (int32_t i = 0; i < r.n; i++) ps_free(r.rows[i].actions);
    ps_free(r.rows);
    return rc;
}

/* -- writing ------------------------------------------------------------------------------------------------------- */
typedef struct writer { char *out; int64_t n, room; } writer;

static void put(writer *w, char c)
{
    if (w->n < w->room) w->out[w->n] = c;
    w->n++;
}

int64_t ps_pipe_table_write(const ps_pipe_table *t, int plain, char *out, int64_t room)
{
    char text[PIPE_TEXT];
    writer w = { out, 0, room };
    for (int rank = 0; rank < t->spec.stages; rank++) {
        bool begun = false;
        for (int32_t at = 0; at < t->rows[rank].n; at++) {
            const ps_action *a = &t->rows[rank].actions[at];
            if (plain && !pipe_is_compute(a->kind)) continue;
            if (begun) put(&w, ',');
            for (const char *c = pipe_action_text(a, text); *c; c++) put(&w, *c);
            begun = true;
        }
        put(&w, '\n');
    }
    put(&w, 0);
    if (w.n > room && room > 0) out[room - 1] = 0;
    return w.n;
}
