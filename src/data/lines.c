/* SPDX-License-Identifier: BSD-3-Clause
 * Reads the rows of a text file of any size by their numbers. A row is a line that is not blank. Opening a file reads
 * the whole file once and records where every 64th row begins. These marks can be saved in a second file. If that file
 * exists, opening the text file again reads only the marks. Rows are read with read calls and not through a map.
 * Therefore the text file uses no memory, and a truncated or changed file causes an error and not a signal. */
#include "base/alloc.h"
#include "io/file.h"
#include "ps.h"
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

enum { EACH = 64, BLOCK = 1 << 20, STEP = 1 << 14 };
static const char MAGIC[8] = "PSLINES3";

typedef struct mark {
    int64_t at;             /* offset in the file of the row's first byte */
    int64_t number;         /* the row's line number; the first line is 1, and blank lines are counted */
} mark;

typedef struct head {       /* The head of a file of marks, in little-endian byte order. All supported machines are
                             * little-endian. */
    char magic[8];
    int64_t nbytes, written, changed, count, nmarks;
    uint64_t sum;           /* checksum of the fields above and of the marks (sum_of) */
} head;

/* Returns the XXH3 checksum of a file of marks. It covers the marks and all fields of the head except `sum`. */
static uint64_t sum_of(const head *h, const mark *marks)
{
    uint64_t both[2] = { ps_xxh3(h, offsetof(head, sum)), ps_xxh3(marks, h->nmarks * (int64_t)sizeof *marks) };
    return ps_xxh3(both, sizeof both);
}

struct ps_lines {
    ps_map map;
    int64_t count, nmarks, room;
    mark *marks;            /* [room] the marks of rows 0, EACH, 2 * EACH, ... */
    char *row;              /* [row_room] buffer that contains the last row that was read, and some bytes around it */
    int64_t row_room;
    bool scanned;           /* true if the marks were made by reading the text file */
};

static int note(ps_lines *l, int64_t at, int64_t number)
{
    if (l->count++ % EACH) return 0;
    if (l->nmarks == l->room) {
        int64_t room = l->room ? 2 * l->room : 64;
        mark *marks = ps_realloc(l->marks, (size_t)room * sizeof *marks);
        if (!marks) return ps_fail_nomem((size_t)room * sizeof *marks);
        l->marks = marks;
        l->room = room;
    }
    l->marks[l->nmarks++] = (mark){ at, number };
    return 0;
}

/* Returns whether a line, without its newline, contains only spaces, tabs and carriage returns. */
static bool is_blank(const char *line, int64_t nbytes)
{
    int64_t i = 0;
    while (i < nbytes && (line[i] == ' ' || line[i] == '\t' || line[i] == '\r')) i++;
    return i == nbytes;
}

/* Returns the offset of the first byte of the text. A byte order mark before the text is skipped. */
static int64_t text_begin(const ps_lines *l)
{
    char bom[3];
    if (l->map.nbytes < 3 || ps_map_read(&l->map, 0, bom, 3) < 0) return 0;
    return memcmp(bom, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

static int unchanged(const ps_lines *l)
{
    PS_TRY(ps_map_check(&l->map));
    if (ps_map_unchanged(&l->map) >= 0) return 0;
    return ps_fail(PS_EIO, "%s was written to while it is open as a table: open it again, and replace such a file "
                   "instead of writing to it", l->map.path);
}

static int scan(ps_lines *l)
{
    char *block = ps_alloc(BLOCK);
    if (!block) return ps_fail_nomem(BLOCK);
    int64_t begin = text_begin(l), number = 1;      /* offset of the current line's first byte, and the line's number */
    bool blank = true;                              /* true if all earlier bytes of the current line are blank */
    int rc = 0;
    for (int64_t at = begin; at < l->map.nbytes && rc >= 0; at += BLOCK) {
        int64_t n = l->map.nbytes - at < BLOCK ? l->map.nbytes - at : BLOCK;
        rc = ps_map_read(&l->map, at, block, n);
        const char *p = block, *end = block + n;
        while (rc >= 0 && p < end) {
            const char *newline = memchr(p, '\n', (size_t)(end - p));
            if (!newline) break;
            if (!blank || !is_blank(p, newline - p)) rc = note(l, begin, number);
            blank = true;
            number++;
            p = newline + 1;
            begin = at + (p - block);
        }
        blank = blank && is_blank(p, end - p);
    }
    if (rc >= 0 && !blank) rc = note(l, begin, number);     /* the last line has no newline */
    ps_free(block);
    l->scanned = true;
    return rc;
}

/* Returns true if the marks are ascending places in the text file. A checksum does not prove this: a program can write
 * any numbers with a correct checksum. */
static bool marks_are_valid(const head *h, const mark *marks)
{
    for (int64_t i = 0; i < h->nmarks; i++) {
        mark before = i > 0 ? marks[i - 1] : (mark){ -1, 0 };
        if (marks[i].at <= before.at || marks[i].at >= h->nbytes || marks[i].number <= before.number) return false;
    }
    return true;
}

/* Reads the marks from the file `index`. Returns 1 if the marks belong to this text file. Otherwise stores no marks and
 * returns 0, so that the caller scans the text file. Returns PS_ENOMEM if memory for the marks cannot be allocated. */
static int read_marks(ps_lines *l, const char *index)
{
    ps_map map;
    int rc = ps_map_open(&map, index);
    if (rc < 0) return rc == PS_ENOMEM ? rc : 0;
    head h = { 0 };
    bool good = map.nbytes >= (int64_t)sizeof h && ps_map_read(&map, 0, &h, sizeof h) >= 0
        && memcmp(h.magic, MAGIC, sizeof MAGIC) == 0 && h.nbytes == l->map.nbytes && h.written == l->map.written
        && h.changed == l->map.changed && h.count >= 0 && h.count <= h.nbytes && h.nmarks == (h.count + EACH - 1) / EACH
        && map.nbytes == (int64_t)sizeof h + h.nmarks * (int64_t)sizeof(mark);
    if (good && h.nmarks) {
        l->marks = ps_alloc((size_t)h.nmarks * sizeof(mark));
        if (!l->marks) rc = ps_fail_nomem((size_t)h.nmarks * sizeof(mark));
        good = rc >= 0 && ps_map_read(&map, sizeof h, l->marks, h.nmarks * (int64_t)sizeof(mark)) >= 0
            && sum_of(&h, l->marks) == h.sum && marks_are_valid(&h, l->marks);
    } else if (good) {
        good = sum_of(&h, NULL) == h.sum;
    }
    if (good) {
        l->count = h.count;
        l->nmarks = l->room = h.nmarks;
    } else {
        ps_free(l->marks);
        l->marks = NULL;
    }
    ps_map_close(&map);
    return rc < 0 ? rc : good;
}

int ps_lines_open(const char *path, const char *index, ps_lines **out)
{
    PS_NEED(path);
    PS_NEED(index);
    PS_NEED(out);
    ps_lines *l = ps_alloc0(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    int rc = ps_map_open(&l->map, path);
    if (rc >= 0) rc = index[0] ? read_marks(l, index) : 0;
    if (rc == 0) rc = scan(l);
    if (rc >= 0) rc = unchanged(l);
    if (rc < 0) ps_lines_close(l);
    else *out = l;
    return rc < 0 ? rc : 0;
}

int ps_lines_scanned(const ps_lines *l) { return l->scanned; }
int64_t ps_lines_count(const ps_lines *l) { return l->count; }

int ps_lines_hash(const ps_lines *l, uint64_t *out)
{
    PS_NEED(l);
    PS_NEED(out);
    PS_TRY(ps_map_hash(&l->map, out));
    return unchanged(l);
}

int ps_lines_save(const ps_lines *l, const char *index)
{
    PS_NEED(l);
    PS_NEED(index);
    int64_t nbytes = l->nmarks * (int64_t)sizeof(mark);
    head h = { .nbytes = l->map.nbytes, .written = l->map.written,
               .changed = l->map.changed, .count = l->count, .nmarks = l->nmarks };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.sum = sum_of(&h, l->marks);
    ps_tempfile file = PS_TEMPFILE_NONE;
    int rc = ps_tempfile_open(&file, index);
    if (rc >= 0) rc = ps_tempfile_reserve(&file, (int64_t)sizeof h + nbytes);
    if (rc >= 0) rc = ps_tempfile_write(&file, 0, &h, sizeof h);
    if (rc >= 0 && nbytes) rc = ps_tempfile_write(&file, sizeof h, l->marks, nbytes);
    if (rc >= 0) rc = ps_tempfile_commit(&file);
    ps_tempfile_close(&file);
    return rc;
}

/* Makes room for n bytes in the row's buffer. */
static int make_room(ps_lines *l, int64_t n)
{
    if (n <= l->row_room) return 0;
    int64_t room = l->row_room ? l->row_room : STEP;
    while (room < n) room *= 2;
    char *row = ps_realloc(l->row, (size_t)room);
    if (!row) return ps_fail_nomem((size_t)room);
    l->row = row;
    l->row_room = room;
    return 0;
}

int ps_lines_read(ps_lines *l, int64_t i, const char **text, int64_t *nbytes, int64_t *number)
{
    PS_NEED(l);
    PS_NEED(text && nbytes && number);
    if (i < 0 || i >= l->count)
        return ps_fail(PS_ERANGE, "%s: there is no row %lld; the file has %lld", l->map.path, (long long)i,
                       (long long)l->count);
    PS_TRY(unchanged(l));
    mark from = l->marks[i / EACH];
    int64_t wanted = i % EACH, at = from.at, line = from.number;
    /* held: number of bytes in l->row. The first of these bytes is at offset `at` of the file.
     * begin: index in l->row at which the current line begins. */
    int64_t held = 0, begin = 0;
    for (int64_t looked = 0;;) {
        char *newline = held > looked ? memchr(l->row + looked, '\n', (size_t)(held - looked)) : NULL;
        bool at_end = at + held == l->map.nbytes;
        if (!newline && !at_end) {
            if (begin) {                            /* move the line to the start of the buffer */
                memmove(l->row, l->row + begin, (size_t)(held - begin));
                at += begin;
                held -= begin;
                begin = 0;
            }
            looked = held;
            int64_t n = held < STEP ? STEP : held;  /* long lines are read with larger and larger reads */
            if (n > l->map.nbytes - at - held) n = l->map.nbytes - at - held;
            PS_TRY(make_room(l, held + n));
            PS_TRY(ps_map_read(&l->map, at + held, l->row + held, n));
            held += n;
            continue;
        }
        int64_t end = newline ? newline - l->row : held;
        if (!is_blank(l->row + begin, end - begin)) {
            if (wanted-- == 0) {
                if (end > begin && l->row[end - 1] == '\r') end--;
                *text = l->row + begin;
                *nbytes = end - begin;
                *number = line;
                return 0;
            }
        }
        if (!newline)
            return ps_fail(PS_EFORMAT, "%s: the file has fewer rows than its index says", l->map.path);
        line++;
        begin = looked = end + 1;
    }
}

void ps_lines_close(ps_lines *l)
{
    if (!l) return;
    ps_map_close(&l->map);
    ps_free(l->marks);
    ps_free(l->row);
    ps_free(l);
}
