/* SPDX-License-Identifier: BSD-3-Clause
 * Tests of text files by line: rows and their numbers, indexes, files that change. Prints what failed and returns
 * non-zero. */
#define _GNU_SOURCE
#include "io_check.h"

static bool row_is(ps_lines *l, int64_t i, const char *want, int64_t line)
{
    const char *text;
    int64_t nbytes, number;
    if (!OK(ps_lines_read(l, i, &text, &nbytes, &number))) return false;
    return nbytes == (int64_t)strlen(want) && memcmp(text, want, (size_t)nbytes) == 0 && number == line;
}

static void test_rows(void)
{
    const char *path = in_folder("t.jsonl");
    const char text[] = "\xef\xbb\xbf" "a\r\n\n\r\nbb\n\nccc";
    ps_lines *l = NULL;
    write_file(path, text, sizeof text - 1);
    if (OK(ps_lines_open(path, "", &l))) {
        CHECK(ps_lines_count(l) == 3 && ps_lines_scanned(l) == 1);
        CHECK(row_is(l, 0, "a", 1) && row_is(l, 2, "ccc", 6) && row_is(l, 1, "bb", 4));
        const char *p;
        int64_t n, number;
        FAILS(ps_lines_read(l, 3, &p, &n, &number), PS_ERANGE, "there is no row 3; the file has 3");
        FAILS(ps_lines_read(l, -1, &p, &n, &number), PS_ERANGE, "there is no row -1");
        uint64_t opened = 0, there = 1;
        CHECK(OK(ps_lines_hash(l, &opened)) && OK(ps_file_hash(path, &there)) && opened == there);
        write_file(path, "other\n", 6);
        FAILS(ps_lines_read(l, 0, &p, &n, &number), PS_EIO, "t.jsonl");
        FAILS(ps_lines_hash(l, &opened), PS_EIO, "t.jsonl");
        ps_lines_close(l);
    }
    write_file(path, "\n\r\n\n", 4);
    if (OK(ps_lines_open(path, "", &l))) {
        CHECK(ps_lines_count(l) == 0);
        ps_lines_close(l);
    }
    write_file(path, "", 0);
    if (OK(ps_lines_open(path, "", &l))) {
        CHECK(ps_lines_count(l) == 0);
        ps_lines_close(l);
    }
    unlink(path);
    FAILS(ps_lines_open(path, "", &l), PS_EIO, "cannot open");
    FAILS(ps_lines_open(folder, "", &l), PS_EIO, "a folder");
}

/* Returns the length of line i in a random file. A line is empty, short, or longer than one read. */
static int64_t length_of(int i) { return i % 7 == 0 ? 0 : i % 1000 == 1 ? 1500000 : i % 97; }

static void test_long(void)
{
    enum { LINES = 3000 };
    const char *path = in_folder("l.jsonl"), *index = in_folder("l.rows");
    FILE *f = fopen(path, "wb");
    for (int i = 0; i < LINES; i++) {
        for (int64_t k = 0; k < length_of(i); k++) fputc('a' + i % 26, f);
        if (i < LINES - 1) fputc('\n', f);
    }
    fclose(f);
    for (int pass = 0; pass < 2; pass++) {
        ps_lines *l = NULL;
        if (!OK(ps_lines_open(path, index, &l))) return;
        CHECK(ps_lines_scanned(l) == (pass == 0));
        int64_t row = 0;
        for (int i = 0; i < LINES; i++) {
            if (!length_of(i)) continue;
            const char *text;
            int64_t nbytes, number;
            if (row % 5 == 0 || length_of(i) > 1000) {
                OK(ps_lines_read(l, row, &text, &nbytes, &number));
                CHECK(nbytes == length_of(i) && number == i + 1);
                CHECK(text[0] == 'a' + i % 26 && text[nbytes - 1] == text[0]);
            }
            row++;
        }
        CHECK(ps_lines_count(l) == row);
        if (pass == 0) OK(ps_lines_save(l, index));
        FAILS(ps_lines_save(l, in_folder("none/x.rows")), PS_EIO, "none");
        ps_lines_close(l);
    }
    /* An index with a changed byte is not used. The byte is in one of its marks, or in the number of rows in its
     * header. */
    for (long at = 70; at >= 24; at -= 46) {
        ps_lines *l = NULL;
        f = fopen(index, "r+b");
        fseek(f, at, SEEK_SET);
        int byte = fgetc(f);
        fseek(f, at, SEEK_SET);
        fputc(byte ^ 1, f);
        fclose(f);
        if (OK(ps_lines_open(path, index, &l))) {
            CHECK(ps_lines_scanned(l) == 1);
            OK(ps_lines_save(l, index));
            ps_lines_close(l);
        }
    }
    unlink(path);
    unlink(index);
}

/* An index whose checksum is correct and whose marks are not: they descend, are outside of the text, or have wrong line
 * numbers. */
static void test_wrong_marks(void)
{
    enum { ROWS = 3000, HEAD = 56, PAIRS = 512 };
    const char *path = in_folder("w.jsonl"), *index = in_folder("w.rows");
    FILE *f = fopen(path, "wb");
    for (int i = 0; i < ROWS; i++) fprintf(f, "%d\n", i);
    fclose(f);
    static const struct { int pair, which; int64_t value; } cases[] = {
        { 1, 0, (int64_t)1 << 40 }, { 1, 0, 0 }, { 1, 0, -5 }, { 0, 0, -1 }, { 1, 1, 1 }, { 0, 1, 0 },
    };
    for (size_t c = 0; c <= sizeof cases / sizeof *cases; c++) {
        int64_t all[(HEAD + 16 * PAIRS) / 8];
        ps_lines *l = NULL;
        if (!OK(ps_lines_open(path, "", &l)) || !OK(ps_lines_save(l, index))) return;
        ps_lines_close(l);
        f = fopen(index, "rb");
        size_t n = fread(all, 1, sizeof all, f);
        fclose(f);
        CHECK(n > HEAD + 32 && n < sizeof all);
        if (c > 0) all[HEAD / 8 + 2 * cases[c - 1].pair + cases[c - 1].which] = cases[c - 1].value;
        uint64_t both[2] = { ps_xxh3(all, HEAD - 8), ps_xxh3(all + HEAD / 8, (int64_t)n - HEAD) };
        CHECK(c > 0 || (uint64_t)all[HEAD / 8 - 1] == ps_xxh3(both, sizeof both));
        all[HEAD / 8 - 1] = (int64_t)ps_xxh3(both, sizeof both);
        write_file(index, all, n);
        if (!OK(ps_lines_open(path, index, &l))) return;
        CHECK(ps_lines_scanned(l) == (c > 0));
        CHECK(row_is(l, ROWS - 1, "2999", ROWS));
        ps_lines_close(l);
    }
    unlink(path);
    unlink(index);
}

static const char *tried, *tried_index;
static int work(void)
{
    ps_lines *l = NULL;
    int rc = ps_lines_open(tried, tried_index, &l);
    const char *text;
    int64_t nbytes, number;
    if (rc >= 0) rc = ps_lines_read(l, 70, &text, &nbytes, &number);
    ps_lines_close(l);
    return rc;
}

static void test_allocations(void)
{
    char text[400];
    memset(text, 'x', sizeof text);
    for (size_t i = 1; i < sizeof text; i += 2) text[i] = '\n';
    tried = in_folder("a.jsonl");
    tried_index = in_folder("a.rows");
    write_file(tried, text, sizeof text);
    fail_allocations("scan", work);
    ps_lines *l = NULL;
    if (OK(ps_lines_open(tried, "", &l))) {
        OK(ps_lines_save(l, tried_index));
        ps_lines_close(l);
    }
    fail_allocations("by index", work);
    unlink(tried);
    unlink(tried_index);
}

int main(void)
{
    begin_tests();
    test_rows();
    test_long();
    test_wrong_marks();
    test_allocations();
    return end_tests();
}
