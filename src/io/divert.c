/* SPDX-License-Identifier: BSD-3-Clause
 * Diverts the files that a script writes during a dry run (tools/plan.lua). A dry run must not change the user's files.
 * But a script may read a file that it wrote earlier, such as a shard of tokens. Therefore the script's files are
 * written to a separate folder and read from that folder. The name of a diverted file is the hash of its path. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "io/file.h"

static char *diverted_to;                   /* folder of the diverted files, or NULL if files are not diverted */
static size_t length_of_it;

int ps_file_divert(const char *folder)
{
    char *copy = NULL;
    if (folder && (!*folder || strlen(folder) > PATH_MAX - 64))
        return ps_fail(PS_EINVAL, "ps_file_divert: the path of the folder has %zu bytes; it must have 1 to %d",
                       strlen(folder), PATH_MAX - 64);
    if (folder && !(copy = ps_strdup(folder))) return ps_fail_nomem(strlen(folder) + 1);
    ps_free(diverted_to);
    diverted_to = copy;
    length_of_it = copy ? strlen(copy) : 0;
    return 0;
}

/* Returns true if the file `path` must not be diverted, because it is a device, a file of the system, or a file in the
 * folder of diverted files. */
static bool stays(const char *path)
{
    return strncmp(path, "/dev/", 5) == 0 || strncmp(path, "/proc/", 6) == 0 ||
           (strncmp(path, diverted_to, length_of_it) == 0 && path[length_of_it] == '/');
}

/* Writes the absolute form of `path` to `out`, without empty components and without ".". This way, the
 * paths "a/b" and "./a//b" have the same form. Returns false if the path is too long. */
static bool whole_path(const char *path, char out[PATH_MAX])
{
    size_t n = 0;
    out[0] = 0;
    if (path[0] != '/') {
        if (!getcwd(out, PATH_MAX)) return false;
        n = strlen(out);
        if (n == 1) n = 0;                  /* the current folder is "/" */
    }
    while (*path) {
        size_t part = strcspn(path, "/");
        bool counts = part > 1 || (part == 1 && path[0] != '.');
        if (counts && n + part + 2 > PATH_MAX) return false;
        if (counts) {
            out[n] = '/';
            memcpy(out + n + 1, path, part);
            n += part + 1;
        }
        path += part + (path[part] == '/');
    }
    out[n] = 0;
    return true;
}

int ps_file_diverted(const char *path, int writes, char *out, int64_t room)
{
    char whole[PATH_MAX];
    PS_NEED(path);
    PS_NEED(out);
    if (!diverted_to || stays(path) || !whole_path(path, whole)) return 0;
    int n = snprintf(out, (size_t)room, "%s/%016llx", diverted_to,
                     (unsigned long long)ps_xxh3(whole, (int64_t)strlen(whole)));
    if (n < 0 || n >= room)
        return ps_fail(PS_ERANGE, "ps_file_diverted: a buffer of %lld bytes is too small for a path of %d",
                       (long long)room, n);
    return writes || access(out, F_OK) == 0;
}

bool ps_files_are_diverted(void) { return diverted_to != NULL; }
