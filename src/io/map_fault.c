/* SPDX-License-Identifier: BSD-3-Clause
 * The handler of SIGBUS (map_fault.h) prints the path of the mapped file whose page cannot be read. The handler calls
 * only write() and sigaction(), and reads the table of maps without a lock. Reading without a lock is safe, because no
 * thread removes a map while another thread reads the map's bytes. */
#define _GNU_SOURCE
#include "io/map_fault.h"
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

enum { MOST_MAPS = 256, MOST_PATH = 240 };

/* The table of maps. An entry is in use if `pages` is not 0. `nbytes` and `path` are set if `named` is true. */
static struct {
    _Atomic uintptr_t pages;    /* address of the map, or 0 if the entry is free */
    _Atomic int64_t nbytes;
    atomic_bool named;
    char path[MOST_PATH];       /* the path, or the end of a path that is too long */
} maps[MOST_MAPS];
static const char *program;

void ps_map_fault_add(const void *pages, int64_t nbytes, const char *path)
{
    size_t n = strlen(path);
    for (int i = 0; i < MOST_MAPS; i++) {
        uintptr_t none = 0;
        if (atomic_load_explicit(&maps[i].pages, memory_order_relaxed)) continue;
        if (!atomic_compare_exchange_strong(&maps[i].pages, &none, (uintptr_t)pages)) continue;
        atomic_store(&maps[i].nbytes, nbytes);
        strcpy(maps[i].path, n < MOST_PATH ? path : path + n - MOST_PATH + 1);
        atomic_store(&maps[i].named, true);
        return;
    }
}

void ps_map_fault_remove(const void *pages)
{
    for (int i = 0; i < MOST_MAPS; i++) {
        if (atomic_load_explicit(&maps[i].pages, memory_order_relaxed) != (uintptr_t)pages) continue;
        atomic_store(&maps[i].named, false);
        atomic_store(&maps[i].pages, 0);
        return;
    }
}

/* -- the handler --------------------------------------------------------------------------------------------------- */
typedef struct text { char bytes[1024]; size_t n; } text;

static void add(text *t, const char *s)
{
    while (*s && t->n < sizeof t->bytes) t->bytes[t->n++] = *s++;
}

static void add_number(text *t, uint64_t n)
{
    char digits[24];
    int i = sizeof digits;
    digits[--i] = 0;
    do digits[--i] = (char)('0' + n % 10); while (n /= 10);
    add(t, digits + i);
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    text t = { .n = 0 };
    uintptr_t at = (uintptr_t)info->si_addr;
    bool found = false;
    (void)context;
    if (program) add(&t, program), add(&t, ": ");
    for (int i = 0; i < MOST_MAPS && !found; i++) {
        uintptr_t begin = atomic_load(&maps[i].pages);
        if (!begin || at < begin || at >= begin + (uint64_t)atomic_load(&maps[i].nbytes)) continue;
        if (!(found = atomic_load(&maps[i].named))) continue;
        add(&t, "cannot read "), add(&t, maps[i].path), add(&t, " from about byte ");
        add_number(&t, at - begin);
        add(&t, " of its map on: the file was truncated while it was in use, or its disk failed. The process ends "
                "(SIGBUS)");
    }
    if (!found)
        add(&t, "a page of memory cannot be read or written (SIGBUS): a file that is mapped was truncated, its disk "
                "failed, or /dev/shm is full");
    add(&t, "\n");
    if (t.n == sizeof t.bytes) t.bytes[t.n - 1] = '\n';
    (void)!write(STDERR_FILENO, t.bytes, t.n);
    /* SA_RESETHAND has removed the handler. So the access that raised SIGBUS raises it again after the return, and the
     * process ends. If another process sent the signal (si_code <= 0), no access repeats it, so raise() repeats it. */
    if (info->si_code <= 0) raise(sig);
}

void ps_map_fault_install(const char *name)
{
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_RESETHAND };
    program = name;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
