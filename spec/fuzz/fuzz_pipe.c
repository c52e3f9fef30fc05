/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of tables of pipelines and of layouts. The input's first byte selects one: 0 to 127 a table in CSV
 * form, else a layout, with the number of virtual stages in its low bits. A table that was read is simulated, lowered
 * and written, and the written table must be the same. */
#include "base/alloc.h"
#include "ps.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static void must(int condition)
{
    if (!condition) abort();
}

static char *text_of(const ps_pipe_table *t, int64_t *n)
{
    *n = ps_pipe_table_write(t, 1, NULL, 0);
    char *text = malloc((size_t)*n);
    if (text) must(ps_pipe_table_write(t, 1, text, *n) == *n && strlen(text) + 1 == (size_t)*n);
    return text;
}

static void read_table(const char *text, size_t size)
{
    ps_pipe_table *t = NULL, *u = NULL;
    ps_pipe_times times;
    int64_t n, again;
    int rc = ps_pipe_table_read(text, (int64_t)size, "input", &t);
    must(rc == 0 || (!t && ps_error_message()[0]));
    if (rc < 0) return;
    must(ps_pipe_simulate(t, NULL, NULL, &times, NULL, NULL) == 0 && times.makespan > 0 && times.bubble >= 0);
    must(ps_pipe_table_lower(t) == 0);
    char *first = text_of(t, &n), *second = NULL;
    if (first) {
        must(ps_pipe_table_read(first, n - 1, "again", &u) == 0);
        second = text_of(u, &again);
        must(!second || (n == again && !strcmp(first, second)));
    }
    free(first);
    free(second);
    ps_pipe_table_free(t);
    ps_pipe_table_free(u);
}

static void read_layout(char *text, int vstages)
{
    static const char kinds[] = "EttttttL";
    int32_t counts[64] = { 0 }, sum = 0;
    int rc = ps_pipe_layout(text, kinds, vstages, counts);
    if (rc < 0) return must(ps_error_message()[0]);
    for (int v = 0; v < vstages; v++) must(counts[v] > 0), sum += counts[v];
    must(sum == (int32_t)strlen(kinds));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (!size) return 0;
    char *text = calloc(1, size);               /* without the first byte, and with a final 0 */
    if (!text) return 0;
    memcpy(text, input + 1, size - 1);
    if (input[0] < 128) read_table(text, size - 1);
    else read_layout(text, 1 + (input[0] & 15));
    free(text);
    return 0;
}
