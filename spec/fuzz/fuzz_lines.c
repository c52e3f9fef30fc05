/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the reader of text files by line. The rows of the input are compared with those of a plain loop,
 * with and without an index. A second copy of the index has one byte changed, by the input's first two bytes: it is
 * ignored, or gives the same rows. */
#include "ps.h"
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static void must(int condition)
{
    if (!condition) abort();
}

static void write_file(const char *path, const uint8_t *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    must(file && fwrite(bytes, 1, n, file) == n);
    must(fclose(file) == 0);
}

static bool is_blank(const uint8_t *line, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r') return false;
    return true;
}

/* Compares the rows of an open file with the lines in its bytes. */
static void compare(ps_lines *l, const uint8_t *bytes, size_t n)
{
    size_t at = n >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    int64_t row = 0, line = 1;
    const char *text;
    int64_t nbytes, number;
    while (at < n) {
        const uint8_t *newline = memchr(bytes + at, '\n', n - at);
        size_t end = newline ? (size_t)(newline - bytes) : n, length = end - at;
        if (!is_blank(bytes + at, length)) {
            if (bytes[end - 1] == '\r') length--;
            must(ps_lines_read(l, row++, &text, &nbytes, &number) == 0);
            must(number == line && nbytes == (int64_t)length && memcmp(text, bytes + at, length) == 0);
        }
        at = end + 1;
        line++;
    }
    must(ps_lines_count(l) == row && ps_lines_read(l, row, &text, &nbytes, &number) == PS_ERANGE);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size < 2) return 0;
    size_t change = input[0] | (size_t)input[1] << 8;
    char path[64], index[64];
    snprintf(path, sizeof path, "/tmp/fuzz_lines.%d", (int)getpid());
    snprintf(index, sizeof index, "/tmp/fuzz_lines.%d.rows", (int)getpid());
    input += 2, size -= 2;
    write_file(path, input, size);
    ps_lines *l = NULL;
    must(ps_lines_open(path, "", &l) == 0 && ps_lines_scanned(l));
    compare(l, input, size);
    must(ps_lines_save(l, index) == 0);
    ps_lines_close(l);
    must(ps_lines_open(path, index, &l) == 0 && !ps_lines_scanned(l));
    compare(l, input, size);
    ps_lines_close(l);
    FILE *file = fopen(index, "r+b");
    must(file && fseek(file, 0, SEEK_END) == 0);
    long n = ftell(file), place = (long)(change % (size_t)n);
    must(fseek(file, place, SEEK_SET) == 0);
    int byte = fgetc(file);
    must(fseek(file, place, SEEK_SET) == 0 && fputc(byte ^ (1 << (change & 7)), file) != EOF && fclose(file) == 0);
    must(ps_lines_open(path, index, &l) == 0);
    compare(l, input, size);
    ps_lines_close(l);
    unlink(path);
    unlink(index);
    return 0;
}
