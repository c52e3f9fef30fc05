/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the tests of src/io: checks that print failures, and a folder that is made at the start and must be empty
 * at the end. Each test program includes it once. */
#ifndef PS_SPEC_IO_CHECK_H
#define PS_SPEC_IO_CHECK_H
#include "check.h"
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    static char paths[4][512];
    static int turn;
    char *p = paths[turn++ % 4];
    snprintf(p, sizeof paths[0], "%s/%s", folder, name);
    return p;
}

static void write_file(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) {
        perror(path);
        exit(1);
    }
}

static int files_in_folder(void)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d)); ) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

/* Makes allocation 0, 1, 2, ... of `work` fail until `work` succeeds. Each failure must return PS_ENOMEM and leave
 * no file. */
static void fail_allocations(const char *name, int (*work)(void))
{
    for (int nth = 0; nth < 1000; nth++) {
        int files = files_in_folder();
        ps_test_fail_alloc(nth, 1);
        int rc = work();
        bool hit = ps_test_fail_alloc_left() < 0;
        ps_test_fail_alloc(-1, 0);
        if (!hit) {
            check(rc >= 0 && nth > 0, __LINE__, name, ps_error_message());
            return;
        }
        check(rc == PS_ENOMEM, __LINE__, name, ps_error_message());
        CHECK(files_in_folder() == files);
    }
}

/* Creates the folder under TMPDIR. */
static void begin_tests(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/psluajit-io.XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (mkdtemp(folder)) return;
    perror(folder);
    exit(1);
}

/* Removes the folder, which every test must leave empty. Returns the program's exit status. */
static int end_tests(void)
{
    CHECK(rmdir(folder) == 0);
    return end_checks();
}
#endif
