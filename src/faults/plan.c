/* SPDX-License-Identifier: BSD-3-Clause
 * The plan (faults.h): its text, the counters of doors, and the actions that do not depend on the call. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_EVENTS = 64 };
typedef struct event {
    int door, action, err;
    int64_t nth, count;
    double arg;
} event;

static event events[MOST_EVENTS];
static int n_events;
static bool ready, wants_power;
static unsigned watched;                        /* doors that have an event, as a bit set */
static _Atomic int64_t calls[N_DOORS], n_happened;
static atomic_flag taken = ATOMIC_FLAG_INIT;
static int rank, log_fd = -1;

static const char *const doors[N_DOORS] = { "any", "open", "read", "write", "sync", "rename", "space", "remove",
    "mkdir", "map", "connect", "accept", "send", "recv", "alloc", "clock", "sleep", "lock", "wait" };
static const struct { const char *name; int action; } actions[] = {
    { "short", ACT_SHORT }, { "flip", ACT_FLIP }, { "reset", ACT_RESET },
    { "half_open", ACT_HALF_OPEN }, { "drip", ACT_DRIP }, { "jump", ACT_JUMP }, { "spurious", ACT_SPURIOUS },
    { "delay", ACT_DELAY }, { "kill", ACT_KILL }, { "stop", ACT_STOP }, { "signal", ACT_SIGNAL },
    { "power", ACT_POWER } };
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
    int err = errno, n = snprintf(line, sizeof line, "%d ", rank);
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

static int named(const char *name, const char *const *list, int n)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(name, list[i])) return i;
    return -1;
}

/* Sets the event's action from a text such as "EIO" or "delay:0.5". */
static bool set_action(event *e, char *text)
{
    char *colon = strchr(text, ':');
    if (colon) *colon = 0, e->arg = strtod(colon + 1, NULL);
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (!strcmp(text, actions[i].name)) e->action = actions[i].action;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(text, errors[i].name)) {
            e->err = errors[i].err;
            e->action = e->err == EINTR ? ACT_INTERRUPT : ACT_ERRNO;
        }
    return e->action != ACT_NONE;
}

/* Adds an event if it is for this rank. */
static void add(const char *text)
{
    char who[16], door[16], what[48];
    long long nth, count = 1;
    if (n_events == MOST_EVENTS) refuse("too many events");
    if (sscanf(text, "%15[0-9*]:%15[a-z]@%lld+%lld=%47s", who, door, &nth, &count, what) != 5 &&
        (count = 1, sscanf(text, "%15[0-9*]:%15[a-z]@%lld=%47s", who, door, &nth, what) != 4)) refuse(text);
    event e = { .door = named(door, doors, N_DOORS), .nth = nth, .count = count };
    if (e.door < 0 || nth < 0 || count < 1 || !set_action(&e, what)) refuse(text);
    if (who[0] != '*' && atoi(who) != rank) return;
    watched |= 1u << e.door;
    wants_power |= e.action == ACT_POWER;
    events[n_events++] = e;
}

void faults_arm(const char *plan)
{
    char *copy = strdup(plan ? plan : ""), *rest = copy;
    ready = false;
    n_events = 0, watched = 0;
    atomic_store(&n_happened, 0);
    for (int i = 0; i < N_DOORS; i++) atomic_store(&calls[i], 0);
    for (char *word; copy && (word = strsep(&rest, " \n")) != NULL;)
        if (*word) add(word);
    free(copy);
    ready = true;
}

int64_t faults_happened(void) { return atomic_load(&n_happened); }
int64_t faults_calls(void) { return atomic_load(&calls[DOOR_ANY]); }

__attribute__((constructor)) static void begin(void)
{
    const char *name = getenv("PS_FAULT_LOG"), *number = getenv("RANK");
    rank = number ? atoi(number) : 0;
    if (name) log_fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    faults_arm(getenv("PS_FAULT_PLAN"));
}

/* The numbers of calls, from which plans are drawn. */
__attribute__((destructor)) static void end(void)
{
    char line[512];
    size_t n = 0;
    for (int i = 0; i < N_DOORS; i++)
        n += (size_t)snprintf(line + n, sizeof line - n, " %s=%lld", doors[i], (long long)atomic_load(&calls[i]));
    faults_note("calls%s", line);
}

bool faults_want_power(void) { return wants_power; }

static const char *action_name(const event *e)
{
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (actions[i].action == e->action) return actions[i].name;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].err == e->err) return errors[i].name;
    return "?";
}

/* Performs an action that does not depend on the call. */
static void perform(const event *e)
{
    if (e->action == ACT_DELAY) faults_nap(e->arg);
    else if (e->action == ACT_KILL) syscall(SYS_kill, getpid(), SIGKILL);
    else if (e->action == ACT_STOP) syscall(SYS_kill, getpid(), SIGSTOP);
    else if (e->action == ACT_SIGNAL) syscall(SYS_kill, getpid(), (int)e->arg);
    else if (e->action == ACT_POWER) lost_power((uint64_t)e->arg);
}

static faults_hit look(int door, int of, unsigned can, const char *what)
{
    faults_hit hit = { ACT_NONE, 0, 0 };
    int64_t n = atomic_fetch_add_explicit(&calls[door], 1, memory_order_relaxed);
    if (!(watched & 1u << door)) return hit;
    for (int i = 0; i < n_events; i++) {
        const event *e = &events[i];
        if (e->door != door || n < e->nth || n >= e->nth + e->count || !(can & CAN(e->action))) continue;
        atomic_fetch_add(&n_happened, 1);
        faults_note("event %s@%lld=%s:%g %s %s", doors[door], (long long)n, action_name(e), e->arg, doors[of],
                    what ? what : "");
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
    if (door != DOOR_CLOCK && door != DOOR_LOCK && door != DOOR_ALLOC) first = look(DOOR_ANY, door, can, what);
    faults_hit hit = look(door, door, can, what);
    return hit.action ? hit : first;
}
