/* SPDX-License-Identifier: BSD-3-Clause
 * The number of compute threads: the size of the OpenMP pool that kernels and oneDNN share. A build with
 * ThreadSanitizer computes on one thread. ThreadSanitizer does not know libgomp's barriers, so it would report a data
 * race in every parallel loop. */
#include "backend/cpu/threads.h"
#include <omp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>
#include "ps.h"

#ifdef __SANITIZE_THREAD__
void ps_set_threads(int n) { omp_set_num_threads(1); }
static void __attribute__((constructor)) begin(void) { ps_set_threads(1); }
#else
void ps_set_threads(int n) { omp_set_num_threads(n > 0 ? n : 1); }
#endif
int ps_threads(void) { return omp_get_max_threads(); }

/* Returns the largest number of threads that a user may set. More threads would only share processors. They would also
 * be a risk, because libgomp ends the process if it cannot create a thread. */
int ps_threads_most(void)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return processors > 16 ? (int)processors * 4 : 64;
}

/* The time for which a waiting thread spins before it sleeps.
 * It must not be long. libgomp's default of 300,000 spins takes several milliseconds. If programs share a processor,
 * the spinning thread keeps the processor from the thread that it waits for. Steps then take many times as long as on
 * one thread.
 * It must not be much shorter than the time that it takes to wake a thread either. The parallel regions of a small
 * model are a few microseconds apart, and a virtual machine needs tens of microseconds to wake a thread. If a thread
 * slept between two regions, two threads would be as slow as one thread.
 * When tokens are generated, up to 100 us of Lua run between two ops. With a wait of 150 us, a token takes 0.9 times as
 * long as with a wait of 50 us. Waits longer than 150 us do not help further.
 * The duration of a spin is measured, because a spin takes a few nanoseconds on some processors and fifty nanoseconds
 * on others. */
#define SPIN_S 150e-6
enum { MEASURED_TURNS = 256, TRIES = 5, LEAST_TURNS = 100, MOST_TURNS = 100000 };

static int turns(void)
{
    double least = 1;
    for (int i = 0; i < TRIES; i++) {
        double began = ps_now();
        for (volatile int turn = 0; turn < MEASURED_TURNS; turn++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        double took = ps_now() - began;
        if (took < least) least = took;
    }
    double n = SPIN_S * MEASURED_TURNS / (least > 0 ? least : 1e-9);
    return n < LEAST_TURNS ? LEAST_TURNS : n > MOST_TURNS ? MOST_TURNS : (int)n;
}

/* Returns the first number of a comma-separated list, or 0 if the text is not a list of positive numbers. OpenMP uses
 * lists for nested regions. */
static unsigned long long first_number(const char *list)
{
    unsigned long long first = 0;
    for (const char *at = list;; at++) {
        char *end;
        at += strspn(at, " \t");
        unsigned long long n = *at >= '0' && *at <= '9' ? strtoull(at, &end, 10) : 0;
        if (n == 0) return 0;
        if (first == 0) first = n;
        at = end + strspn(end, " \t");
        if (*at == 0) return first;
        if (*at != ',') return 0;
    }
}

/* With this setting, glibc does not keep small freed blocks for the thread that freed them. Kept blocks prevent
 * adjacent free blocks from merging. oneDNN's buffers for a product would then not fit into any free block, and the
 * process would allocate more memory than it uses at any time. */
#define TUNABLES "GLIBC_TUNABLES"
#define NO_CACHE "glibc.malloc.tcache_count=0"

/* Makes glibc keep no freed blocks for the threads of this process. Returns true if the process must restart, because
 * glibc reads the setting only at the start. Once the setting applies, the function removes it from the environment, so
 * that programs started by the process do not inherit it. */
static bool without_caches(void)
{
    const char *had = getenv(TUNABLES);
    char now[1024];
    if (getauxval(AT_SECURE)) return false;         /* glibc unsets the variable for a setuid program */
    if (!had || !strstr(had, "glibc.malloc.tcache_count=")) {
        int n = snprintf(now, sizeof now, "%s%s" NO_CACHE, had ? had : "", had && *had ? ":" : "");
        return n < (int)sizeof now && setenv(TUNABLES, now, 1) == 0;
    }
    size_t others = strlen(had) - (sizeof NO_CACHE - 1);
    if (strlen(had) < sizeof NO_CACHE - 1 || strcmp(had + others, NO_CACHE) != 0) return false;
    if (others == 0) unsetenv(TUNABLES);
    else if (others < sizeof now && had[others - 1] == ':') {
        snprintf(now, sizeof now, "%.*s", (int)others - 1, had);
        setenv(TUNABLES, now, 1);
    }
    return false;
}

void ps_threads_start(char **argv)
{
    const char *wanted = getenv("OMP_NUM_THREADS");
    char most[16], spins[16];
    unsigned long long n = wanted ? first_number(wanted) : 0;
    bool again = false;
    if (wanted && n == 0) {
        fprintf(stderr, "psluajit: OMP_NUM_THREADS is '%s', not a number of threads; it is ignored\n", wanted);
        again = unsetenv("OMP_NUM_THREADS") == 0;               /* if it stayed set, libgomp would print the same
                                                                 * warning again */
    }
    if (n > (unsigned long long)ps_threads_most()) {
        fprintf(stderr, "psluajit: OMP_NUM_THREADS is %s; %d threads are the most on this machine's %ld processors\n",
                wanted, ps_threads_most(), sysconf(_SC_NPROCESSORS_ONLN));
        snprintf(most, sizeof most, "%d", ps_threads_most());
        again = setenv("OMP_NUM_THREADS", most, 1) == 0;
    }
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT")) {
        snprintf(spins, sizeof spins, "%d", turns());
        again = setenv("GOMP_SPINCOUNT", spins, 1) == 0 || again;
    }
    again = without_caches() || again;
    if (again) execv("/proc/self/exe", argv);       /* execv returns only if it fails; libgomp keeps its own settings in
                                                     * this case */
}
