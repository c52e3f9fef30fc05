/* SPDX-License-Identifier: BSD-3-Clause
 * Information about the process for the script: time, memory, interrupts and the terminal. The signal handler is safe
 * at every point of the program, because it only counts signals. On the second signal it also restores the signal's
 * default action. */
#define _GNU_SOURCE
#include "base/error.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

double ps_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Reads the peak from /proc. getrusage would also count the memory of the program that ran in this process before
 * exec, such as a shell or another interpreter. */
int64_t ps_rss_peak(void)
{
    char text[4096];
    int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        text[n > 0 ? n : 0] = 0;
        const char *line = strstr(text, "VmHWM:");
        if (line) return strtoll(line + 6, NULL, 10) * 1024;
    }
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (int64_t)usage.ru_maxrss * 1024 : 0;
}

/* -- interrupts -------------------------------------------------------------------------------------------------- */
static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
enum { N_SIGNALS = sizeof signals / sizeof *signals };
static struct sigaction before[N_SIGNALS];
static bool installed;
static atomic_int count;                    /* number of signals; lock-free, so that a signal handler can change it */

static void on_signal(int sig)
{
    /* A terminal that disconnects sends several SIGHUPs. They count as one interrupt, so they do not end the process
     * by themselves. */
    if (sig == SIGHUP && atomic_load(&count) > 0) return;
    if (atomic_fetch_add(&count, 1) == 0) return;
    struct sigaction fallback = { .sa_handler = SIG_DFL };
    sigaction(sig, &fallback, NULL);
    raise(sig);                             /* the signal is blocked now; it ends the process when the handler
                                             * returns */
}

int ps_interrupts_install(void)
{
    if (installed) return 0;
    atomic_store(&count, 0);
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < N_SIGNALS; i++) {
        if (sigaction(signals[i], NULL, &before[i]) < 0)
            return ps_fail(PS_EINVAL, "cannot read the handler of signal %d: %s", signals[i], strerror(errno));
        /* A shell lets background jobs ignore Ctrl-C, and nohup lets its program ignore SIGHUP. Keep these settings. */
        if (before[i].sa_handler != SIG_IGN) sigaction(signals[i], &action, NULL);
    }
    installed = true;
    return 0;
}

void ps_interrupts_remove(void)
{
    if (!installed) return;
    for (int i = 0; i < N_SIGNALS; i++) sigaction(signals[i], &before[i], NULL);
    installed = false;
}

int ps_interrupts(void) { return atomic_load(&count); }

/* -- the terminal ------------------------------------------------------------------------------------------------ */
int ps_is_terminal(int fd) { return isatty(fd) == 1; }

int ps_terminal_columns(int fd)
{
    struct winsize size;
    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
}
