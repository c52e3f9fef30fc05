/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the plan (faults.h). It contains the text of the plan, the counters of the doors, and the
 * actions that are performed in the same way for every call. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include "base/thread.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_EVENTS = 64 };
/* The classes of files and folders. class_of() derives the class from the path. An event can count only the calls of
 * one class. */
enum class { C_ALL, C_SAVE, C_INDEX, C_LATEST, C_FOLDER, C_CHUNK, C_LOG, C_OTHER, N_CLASSES };
static const char *const classes[N_CLASSES] = { "", "save", "index", "latest", "folder", "chunk", "log", "other" };
typedef struct event {
    int door, class, action, err;
    int64_t nth, count;
    double arg;
} event;

static event events[MOST_EVENTS];
static int n_events;
static bool ready, wants_power;
static unsigned watched;                        /* set of the doors that events watch, one bit per door */
/* calls: number of calls for each door and class; C_ALL counts the calls of all classes
 * n_happened: number of events that have happened */
static _Atomic int64_t calls[N_DOORS][N_CLASSES], n_happened;
static atomic_flag taken = ATOMIC_FLAG_INIT;
static int rank, log_fd = -1;

static const char *const doors[N_DOORS] = { "any", "open", "read", "write", "sync", "rename", "space", "remove",
    "mkdir", "map", "connect", "accept", "send", "recv", "alloc", "clock", "sleep", "lock", "wait", "end" };
static const struct { const char *name; int action; } actions[] = {
    { "short", ACT_SHORT }, { "flip", ACT_FLIP }, { "reset", ACT_RESET },
    { "half_open", ACT_HALF_OPEN }, { "drip", ACT_DRIP }, { "jump", ACT_JUMP }, { "spurious", ACT_SPURIOUS },
    { "delay", ACT_DELAY }, { "kill", ACT_KILL }, { "stop", ACT_STOP }, { "signal", ACT_SIGNAL },
    { "power", ACT_POWER }, { "power_all", ACT_POWER_ALL }, { "reorder", ACT_REORDER }, { "cut", ACT_CUT },
    { "lag", ACT_LAG } };
static const struct { const char *name; int err; } errors[] = {
    { "EIO", EIO }, { "ENOSPC", ENOSPC }, { "EDQUOT", EDQUOT }, { "EINTR", EINTR }, { "EMFILE", EMFILE },
    { "EACCES", EACCES }, { "EROFS", EROFS }, { "ENOMEM", ENOMEM }, { "ECONNREFUSED", ECONNREFUSED },
    { "ECONNABORTED", ECONNABORTED } };

void faults_nap(double seconds)
{
    struct timespec t = { .tv_sec = (time_t)seconds };
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    while (syscall(SYS_nanosleep, &t, &t) < 0 && errno == EINTR) { }
}

void faults_lock(void) { while (atomic_flag_test_and_set(&taken)) sched_yield(); }
void faults_unlock(void) { atomic_flag_clear(&taken); }

void *faults_next(const char *name, const char *version)
{
    void *p = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return p ? p : dlsym(RTLD_NEXT, name);
}

void faults_note(const char *fmt, ...)
{
    char line[1024];
    if (log_fd < 0) return;
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    int err = errno, n = snprintf(line, sizeof line, "%d %.3f ", rank, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    va_list ap;
    va_start(ap, fmt);
    n += vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    va_end(ap);
    if (n > (int)sizeof line - 2) n = (int)sizeof line - 2;
    line[n++] = '\n';
    syscall(SYS_write, log_fd, line, (size_t)n);
    errno = err;
}

static _Noreturn void refuse(const char *text)
{
    fprintf(stderr, "PS_FAULT_PLAN has '%s'; an event is RANK:DOOR@NTH=ACTION (src/faults/faults.h)\n", text);
    _exit(2);
}

/* Returns the class of a path. The path of a checkpoint's file contains /run/. The path of the disk tier's file
 * contains a '(', because the file has no name. */
static int class_of(int door, const char *what)
{
    struct stat st;
    const char *run = what ? strstr(what, "/run/") : NULL;
    if (!what) return C_ALL;
    if ((door == DOOR_SYNC || door == DOOR_OPEN) && stat(what, &st) == 0 && S_ISDIR(st.st_mode)) return C_FOLDER;
    if (!run) return strchr(what, '(') ? C_CHUNK : strstr(what, "/monitor/") ? C_LOG : C_OTHER;
    if (!strncmp(run, "/run/latest", 11)) return C_LATEST;
    return strstr(run, "/index.json") ? C_INDEX : C_SAVE;
}

static int named(const char *name, const char *const *list, int n)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(name, list[i])) return i;
    return -1;
}

/* Sets the action, errno and number of an event from a text such as "EIO" or "delay:0.5". */
static bool set_action(event *e, char *text)
{
    char *colon = strchr(text, ':');
    if (colon) *colon = 0, e->arg = strtod(colon + 1, NULL);
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (!strcmp(text, actions[i].name)) e->action = actions[i].action;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(text, errors[i].name)) {
            e->err = errors[i].err;
            bool full = e->err == ENOSPC || e->err == EDQUOT;
            e->action = e->err == EINTR ? ACT_INTERRUPT : full ? ACT_FULL : ACT_ERRNO;
        }
    return e->action != ACT_NONE;
}

/* Parses an event, and adds it to the plan if it is for this rank. */
static void add(const char *text)
{
    char who[16], door[32], what[48];
    long long nth, count = 1;
    if (n_events == MOST_EVENTS) refuse("too many events");
    if (sscanf(text, "%15[0-9*]:%31[a-z/]@%lld+%lld=%47s", who, door, &nth, &count, what) != 5 &&
        (count = 1, sscanf(text, "%15[0-9*]:%31[a-z/]@%lld=%47s", who, door, &nth, what) != 4)) refuse(text);
    char *slash = strchr(door, '/');
    if (slash) *slash = 0;
    event e = { .door = named(door, doors, N_DOORS), .class = slash ? named(slash + 1, classes, N_CLASSES) : C_ALL,
        .nth = nth, .count = count };
    if (e.door < 0 || e.class < 0 || nth < 0 || count < 1 || !set_action(&e, what)) refuse(text);
    /* An event power_all cuts the power of all ranks, even if it is for another rank. */
    wants_power |= e.action == ACT_POWER_ALL;
    if (who[0] != '*' && atoi(who) != rank) return;
    wants_power |= e.action == ACT_POWER || ((e.action == ACT_ERRNO || e.action == ACT_FULL) && e.door == DOOR_SYNC);
    watched |= 1u << e.door;
    events[n_events++] = e;
}

void faults_arm(const char *plan)
{
    char *copy = strdup(plan ? plan : ""), *rest = copy;
    ready = false;
    n_events = 0, watched = 0, wants_power = false;
    atomic_store(&n_happened, 0);
    for (int i = 0; i < N_DOORS; i++)
        for (int k = 0; k < N_CLASSES; k++) atomic_store(&calls[i][k], 0);
    for (char *word; copy && (word = strsep(&rest, " \n")) != NULL;)
        if (*word) add(word);
    free(copy);
    ready = true;
}

int64_t faults_happened(void) { return atomic_load(&n_happened); }
int64_t faults_calls(void) { return atomic_load(&calls[DOOR_ANY][C_ALL]); }

bool faults_want_power(void) { return wants_power; }

static const char *action_name(const event *e)
{
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (actions[i].action == e->action) return actions[i].name;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].err == e->err) return errors[i].name;
    return "?";
}

/* -- loss of power of all ranks ------------------------------------------------------------------------------------ */
/* all_power: a seed in a file that all processes map. In each process, a thread sleeps until the seed is not 0. */
static _Atomic uint32_t *all_power;

static void *wait_for_power(void *arg)
{
    while (!atomic_load(all_power)) syscall(SYS_futex, all_power, FUTEX_WAIT, 0, NULL, NULL, 0);
    lost_power(atomic_load(all_power) + (uint64_t)rank);
}

static void lose_all(uint64_t seed)
{
    atomic_store(all_power, (uint32_t)seed);
    syscall(SYS_futex, all_power, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    lost_power(seed + (uint64_t)rank);
}

static void watch_power(const char *plan)
{
    char name[PATH_MAX];
    const char *log = getenv("PS_FAULT_LOG");
    pthread_t thread;
    if (!plan || !strstr(plan, "=power_all")) return;
    snprintf(name, sizeof name, "%s.power", log ? log : "");
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (!log || fd < 0 || syscall(SYS_ftruncate, fd, 4096) < 0) refuse("power_all, without PS_FAULT_LOG");
    void *p = (void *)syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) refuse("power_all, without memory");
    syscall(SYS_close, fd);
    all_power = p;
    if (ps_thread_start(&thread, wait_for_power, NULL)) refuse("power_all, without a thread");
    pthread_detach(thread);
}

__attribute__((constructor)) static void begin(void)
{
    const char *name = getenv("PS_FAULT_LOG"), *number = getenv("RANK");
    rank = number ? atoi(number) : 0;
    if (name) log_fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    faults_arm(getenv("PS_FAULT_PLAN"));
    watch_power(getenv("PS_FAULT_PLAN"));
}

/* Performs an action that is the same for every call. */
static void perform(const event *e)
{
    if (e->action == ACT_DELAY) faults_nap(e->arg);
    else if (e->action == ACT_KILL) syscall(SYS_kill, getpid(), SIGKILL);
    else if (e->action == ACT_STOP) syscall(SYS_kill, getpid(), SIGSTOP);
    else if (e->action == ACT_SIGNAL) syscall(SYS_kill, getpid(), (int)e->arg);
    else if (e->action == ACT_POWER) lost_power((uint64_t)e->arg);
    else if (e->action == ACT_POWER_ALL) lose_all((uint64_t)e->arg);
}

static faults_hit look(int door, int of, int class, unsigned can, const char *what)
{
    faults_hit hit = { ACT_NONE, 0, 0 };
    int64_t all = atomic_fetch_add_explicit(&calls[door][C_ALL], 1, memory_order_relaxed), n;
    int64_t some = class ? atomic_fetch_add_explicit(&calls[door][class], 1, memory_order_relaxed) : 0;
    if (!(watched & 1u << door)) return hit;
    for (int i = 0; i < n_events; i++) {
        const event *e = &events[i];
        if (e->door != door || (e->class && e->class != class) || !(can & CAN(e->action))) continue;
        n = e->class ? some : all;
        if (n < e->nth || n >= e->nth + e->count) continue;
        atomic_fetch_add(&n_happened, 1);
        faults_note("event %s%s%s@%lld=%s:%g %s %s", doors[door], e->class ? "/" : "", classes[e->class], (long long)n,
                    action_name(e), e->arg, doors[of], what ? what : "");
        if (CAN(e->action) & CAN_WAIT) perform(e);
        else hit = (faults_hit){ e->action, e->err, e->arg };
    }
    return hit;
}

faults_hit faults_pass(int door, unsigned can, const char *what)
{
    if (!ready) return (faults_hit){ ACT_NONE, 0, 0 };
    faults_hit first = { ACT_NONE, 0, 0 };
    can |= CAN_WAIT;
    if (door != DOOR_CLOCK && door != DOOR_LOCK && door != DOOR_ALLOC) first = look(DOOR_ANY, door, C_ALL, can, what);
    faults_hit hit = look(door, door, class_of(door, what), can, what);
    return hit.action ? hit : first;
}

/* Logs how often each door was called. Tests choose their plans from these numbers. */
__attribute__((destructor)) static void end(void)
{
    char line[2048];
    size_t n = 0;
    look(DOOR_END, DOOR_END, C_ALL, CAN_WAIT, NULL);
    for (int i = 0; i < N_DOORS; i++)
        for (int k = 0; k < N_CLASSES; k++) {
            long long count = atomic_load(&calls[i][k]);
            if (k && !count) continue;
            n += (size_t)snprintf(line + n, sizeof line - n, " %s%s%s=%lld", doors[i], k ? "/" : "", classes[k], count);
        }
    faults_note("calls%s", line);
}
