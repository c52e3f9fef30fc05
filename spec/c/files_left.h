/* SPDX-License-Identifier: BSD-3-Clause
 * A process that may open few more files, as under a low ulimit -n. */
#ifndef PS_SPEC_FILES_LEFT_H
#define PS_SPEC_FILES_LEFT_H
#include <sys/resource.h>
#include <unistd.h>

/* Limits the number of files: 0 allows no more files, 1 allows one more, and -1 restores the original limit. */
static inline void files_left(int n)
{
    static struct rlimit first;
    if (!first.rlim_cur) getrlimit(RLIMIT_NOFILE, &first);
    struct rlimit now = first;
    setrlimit(RLIMIT_NOFILE, &first);
    if (n < 0) return;
    int lowest = dup(0);                   /* all lower descriptors are in use */
    close(lowest);
    now.rlim_cur = (rlim_t)(lowest + n);
    setrlimit(RLIMIT_NOFILE, &now);
}
#endif
