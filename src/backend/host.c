/* SPDX-License-Identifier: BSD-3-Clause
 * Regions of host memory, and the amount of memory that is free. All backends that use the machine's memory share this
 * file. Regions are private anonymous mappings. A page of a region uses no memory until it is touched. Large regions
 * begin at a huge page. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#include "backend/backend.h"
#include "base/alloc.h"
#include "base/error.h"

static const size_t huge = PS_MOVE_NBYTES;

static void (*region_goes)(void *p, size_t nbytes);     /* the function that ps_host_region_watch() has set, or NULL */

void ps_host_region_watch(void (*goes)(void *p, size_t nbytes)) { region_goes = goes; }

/* Returns the number of bytes that are mapped for a region of nbytes bytes: a multiple of the page size, and at least
 * one page. Returns 0 on overflow. */
static size_t mapped_bytes(size_t nbytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (nbytes == 0) return page;
    if (nbytes > SIZE_MAX / 2) return 0;
    return (nbytes + page - 1) / page * page;
}

int ps_host_region_new(ps_backend *be, size_t nbytes, void **out)
{
    size_t size = mapped_bytes(nbytes), spare = size >= huge ? huge : 0;
    if (ps_alloc_should_fail())
        return ps_fail(PS_ENOMEM, "no memory for %zu bytes, because a test made this allocation fail", nbytes);
    if (size == 0) return ps_fail(PS_ENOMEM, "no address space has room for %zu bytes", nbytes);
    char *p = mmap(NULL, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return ps_fail(PS_ENOMEM, "the system refuses %zu bytes of memory: %s", nbytes, strerror(errno));
    if (spare) {                        /* unmaps the space before and after the aligned part */
        size_t head = (huge - (uintptr_t)p % huge) % huge;
        if (head > 0) munmap(p, head);
        if (spare - head > 0) munmap(p + head + size, spare - head);
        p += head;
        madvise(p, size, MADV_HUGEPAGE); /* this is only a hint: huge pages make access faster */
    }
    *out = p;
    return 0;
}

void ps_host_region_discard(ps_backend *be, void *p, size_t nbytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)p + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)p + nbytes) / page * page;
    if (end <= first) return;
    if (region_goes) region_goes((void *)first, end - first);
    madvise((void *)first, end - first, MADV_DONTNEED);
}

void ps_host_region_free(ps_backend *be, void *p, size_t nbytes)
{
    if (region_goes) region_goes(p, mapped_bytes(nbytes));
    munmap(p, mapped_bytes(nbytes));
}

/* Moves one huge page at a time, because one call of mremap can move only memory of a single mapping. After memory was
 * moved to a region, the region consists of several mappings.
 *
 * mremap first checks the system's limit on the number of mappings. If this check fails, nothing has changed. If mremap
 * fails after the check, it has already unmapped the addresses at `to`, so they are mapped again. */
int64_t ps_host_region_move(ps_backend *be, void *to, void *from, size_t nbytes)
{
    if (region_goes) region_goes(from, nbytes);
    for (size_t at = 0; at < nbytes; at += huge) {
        char *p = (char *)to + at;
        if (mremap((char *)from + at, huge, huge, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p) continue;
        void *again = mmap(p, huge, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (again != p && errno != EEXIST)
            return ps_fail(PS_ENOMEM, "the system refuses addresses for memory that moves: %s", strerror(errno));
        return (int64_t)at;
    }
    return (int64_t)nbytes;
}

/* -- how much memory is left --------------------------------------------------------------------------------------- */
/* Reads the beginning of a small file as text. Returns false if the file is empty or cannot be read. */
static bool read_text(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    size_t used = 0;
    ssize_t got;
    while (used < size - 1 && (got = read(fd, text + used, size - 1 - used)) > 0) used += (size_t)got;
    close(fd);
    text[used] = 0;
    return used > 0;
}

/* Finds the first line of `text` that begins with `key`, and returns the number after the key. Returns `otherwise` if
 * no line begins with `key`. */
static int64_t line_value(const char *text, const char *key, int64_t otherwise)
{
    size_t n = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, key, n) == 0) return strtoll(line + n, NULL, 10);
    }
    return otherwise;
}

static bool read_number(const char *dir, const char *name, int64_t *out)
{
    char path[PATH_MAX + 64], text[64], *end;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (!read_text(path, text, sizeof text)) return false;
    *out = strtoll(text, &end, 10);
    return end != text;                 /* "max" means no limit */
}

struct cgroup_names { const char *mount, *limit, *usage, *cache; };

/* Returns the number of bytes that the control group `path` still allows. A parent group can have a stricter limit, so
 * the function returns the minimum over the group and all its parents. File pages that were not used recently count as
 * free, because the kernel drops these pages before it refuses memory. Groups that cannot be read are skipped, because
 * a container sees only its own group. */
static int64_t cgroup_room(const struct cgroup_names *names, const char *path)
{
    char dir[PATH_MAX], file[PATH_MAX + 64], stat[8192];
    size_t root = strlen(names->mount);
    int64_t least = INT64_MAX, limit, usage;
    if (strstr(path, "/..")) path = "";
    int length = snprintf(dir, sizeof dir, "%s%s", names->mount, path);
    if (length < 0 || (size_t)length >= sizeof dir) dir[root] = 0;
    for (;;) {
        if (read_number(dir, names->limit, &limit) && read_number(dir, names->usage, &usage)) {
            snprintf(file, sizeof file, "%s/memory.stat", dir);
            if (read_text(file, stat, sizeof stat)) usage -= line_value(stat, names->cache, 0);
            if (usage < 0) usage = 0;             /* the difference can be negative, because usage and cache were read
                                                   * at different times */
            int64_t room = limit > usage ? limit - usage : 0;
            least = room < least ? room : least;
        }
        char *slash = strrchr(dir, '/');
        if (strlen(dir) <= root || !slash) return least;
        *slash = 0;
    }
}

/* Returns the number of bytes that the strictest of this process's control groups still allows. A line of
 * /proc/self/cgroup is "0::PATH" for version 2 of control groups, and "N:CONTROLLERS:PATH" for version 1. */
static int64_t cgroups_room(void)
{
    static const struct cgroup_names v2 = { "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file " };
    static const struct cgroup_names v1 = { "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                            "total_inactive_file " };
    char text[8192], *rest = NULL;
    int64_t least = INT64_MAX;
    if (!read_text("/proc/self/cgroup", text, sizeof text)) return least;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        controllers++;
        const struct cgroup_names *names = NULL;
        if (*controllers == 0) names = &v2;
        else if (strcmp(controllers, "memory") == 0) names = &v1;
        int64_t room = names ? cgroup_room(names, path) : INT64_MAX;
        least = room < least ? room : least;
    }
    return least;
}

/* Returns the number of bytes of address space that RLIMIT_AS still allows. */
static int64_t address_room(void)
{
    struct rlimit limit;
    char text[128];
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return INT64_MAX;
    if (!read_text("/proc/self/statm", text, sizeof text)) return INT64_MAX;
    int64_t used = strtoll(text, NULL, 10) * sysconf(_SC_PAGESIZE);
    return (int64_t)limit.rlim_cur > used ? (int64_t)limit.rlim_cur - used : 0;
}

static const char of_addresses[] = "of its address space (ulimit -v)";

/* Returns the number of bytes that the strictest limit still allows. Sets *by to a phrase that names this limit. */
static int64_t host_left(const char **by)
{
    char text[8192];
    int64_t least = INT64_MAX;
    *by = "on this machine";
    if (read_text("/proc/meminfo", text, sizeof text)) {
        int64_t kib = line_value(text, "MemAvailable:", -1);
        if (kib >= 0) least = kib * 1024;
    }
    int64_t groups = cgroups_room(), addresses = address_room();
    if (groups < least) least = groups, *by = "in its control group (cgroup)";
    if (addresses < least) least = addresses, *by = of_addresses;
    return least;
}

int64_t ps_host_bytes_available(ps_backend *be)
{
    const char *by;
    return host_left(&by);
}

/* Reads the anonymous memory of this process from a line such as "RssAnon:      1234 kB". */
static int64_t resident_nbytes(void)
{
    char text[4096];
    int64_t kib = read_text("/proc/self/status", text, sizeof text) ? line_value(text, "RssAnon:", -1) : -1;
    return kib >= 0 ? kib * 1024 : INT64_MAX;
}

/* If the limit of the address space is the strictest, all bytes count. */
int64_t ps_host_bytes_held(ps_backend *be, int64_t reserved)
{
    const char *by;
    host_left(&by);
    if (by == of_addresses) return reserved;
    int64_t resident = resident_nbytes();
    return resident < reserved ? resident : reserved;
}

const char *ps_host_limited_by(void)
{
    const char *by;
    host_left(&by);
    return by;
}
