/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares faults that happen by a plan. The program psluajit_faults consists of psluajit and the object
 * files of this folder. The object files define the functions of the C library for files, sockets, memory, clocks,
 * sleeps and locks. Therefore calls of these functions by the engine, LuaJIT and Gloo reach the object files. psluajit
 * itself does not contain the object files, so its calls reach the C library directly.
 *
 * Each of these functions is a door. A door counts its calls, and compares each call with the plan in PS_FAULT_PLAN.
 * The plan is a list of events, separated by blanks. An event has the form RANK:DOOR@NTH=ACTION or
 * RANK:DOOR@NTH+COUNT=ACTION.
 *   RANK     number of a rank, or * for all ranks
 *   DOOR     name of a door; DOOR/CLASS counts only calls for one class of files
 *   NTH      index of the first call that is affected, counted from 0
 *   COUNT    number of calls that are affected
 *   ACTION   name of an action (plan.c); docs/reliability.md describes the actions
 * The classes are save (tensors of a checkpoint), index (index.json of a checkpoint), latest, folder (opened or
 * synced), chunk (the disk tier), log (of monitors) and other. A file counts only if it is below PS_FAULT_FOLDER. A
 * socket counts only if it is of an internet family. Each event that happens is written as a line to the file
 * PS_FAULT_LOG. */
#ifndef PS_FAULTS_H
#define PS_FAULTS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The kinds of calls, in the order of `doors` in plan.c. DOOR_ANY counts the calls of all doors, except DOOR_CLOCK,
 * DOOR_LOCK and DOOR_ALLOC. */
enum faults_door {
    DOOR_ANY, DOOR_OPEN, DOOR_READ, DOOR_WRITE, DOOR_SYNC, DOOR_RENAME, DOOR_SPACE, DOOR_REMOVE, DOOR_MKDIR, DOOR_MAP,
    DOOR_CONNECT, DOOR_ACCEPT, DOOR_SEND, DOOR_RECV, DOOR_ALLOC, DOOR_CLOCK, DOOR_SLEEP, DOOR_LOCK, DOOR_WAIT,
    DOOR_END,                   /* called once, when the process exits */
    N_DOORS
};
/* The actions of events. plan.c performs ACT_DELAY and the actions that follow ACT_DELAY here, before the call. The
 * door itself performs the other actions. */
enum faults_action {
    ACT_NONE, ACT_ERRNO, ACT_FULL, ACT_INTERRUPT, ACT_SHORT, ACT_FLIP, ACT_RESET, ACT_HALF_OPEN, ACT_DRIP, ACT_JUMP,
    ACT_SPURIOUS, ACT_REORDER, ACT_CUT, ACT_LAG, ACT_DELAY, ACT_KILL, ACT_STOP, ACT_SIGNAL, ACT_POWER, ACT_POWER_ALL
};
typedef struct faults_hit {
    int action;                 /* ACT_NONE means that the call is made as usual */
    /* err: the errno with which the call fails. It depends on the action.
     *   ACT_ERRNO       any errno
     *   ACT_FULL        ENOSPC or EDQUOT; used only for calls that need space
     *   ACT_INTERRUPT   EINTR; used only for calls that can return EINTR */
    int err;
    double arg;                 /* the number after the action in the plan, or 0 */
} faults_hit;

/* Counts a call of `door`, and returns the action that the plan contains for this call.
 * what: a path for the log, or NULL
 * can: set of the actions that this call can perform, one bit per action; events with other actions stay in the plan */
faults_hit faults_pass(int door, unsigned can, const char *what);
#define CAN(action) (1u << (action))
enum { CAN_WAIT = 1u << ACT_DELAY | 1u << ACT_KILL | 1u << ACT_STOP | 1u << ACT_SIGNAL | 1u << ACT_POWER
                  | 1u << ACT_POWER_ALL };

/* Replaces the plan, and sets the counts of calls and events to 0. Used by scripts that make every call fail in turn.
 * No other thread may be in a door. */
void faults_arm(const char *plan);
int64_t faults_happened(void);                  /* returns the number of events that have happened since faults_arm */
/* Returns the number of calls that DOOR_ANY has counted since faults_arm. */
int64_t faults_calls(void);

/* -- descriptors (files.c) ---------------------------------------------------------------------------------------- */
enum faults_class { FD_OTHER, FD_FILE, FD_NAMELESS, FD_FOLDER, FD_SOCKET };
int faults_class_of(int fd);
void faults_set_class(int fd, int class, const char *path);
/* Returns the path of a descriptor, or "" if the path is not known. */
const char *faults_path_of(int fd);
/* These functions send and receive on a socket, with the faults that the plan has for sockets. `read` and `write` also
 * call these functions if the descriptor is a socket. */
ssize_t faults_socket_send(int fd, const void *bytes, size_t nbytes, int flags);
ssize_t faults_socket_recv(int fd, void *bytes, size_t nbytes, int flags);
/* Flips one bit of the bytes. The index of the bit is `which`, modulo the number of bits. */
void faults_flip(void *bytes, size_t nbytes, double which);

/* -- loss of power (lost.c) --------------------------------------------------------------------------------------- */
/* These functions record changes, so that a loss of power can undo the changes. Each function must be called before its
 * change is made. Paths are absolute. */
void lost_write(int fd, int64_t offset, int64_t nbytes);
void lost_resize(int fd);
void lost_truncate(const char *path);           /* records a change of all bytes of a file */
/* Records that the bytes of a file, or the names in a folder, have been synced to the disk. */
void lost_sync(int fd);
/* Called after an fsync that has failed. Loses bytes of the file in the same way as a loss of power. The next fsync
 * succeeds, as it does on Linux. */
void lost_failed_sync(int fd, uint64_t seed);
void lost_create(const char *path);
void lost_rename(const char *from, const char *to, bool exchange);
void lost_remove(const char *path, bool folder);
void lost_mkdir(const char *path);
void lost_undone(void);                         /* records that the latest change of names has failed */
/* Chooses some of the changes that were not synced, undoes the chosen changes, and kills the process. `seed` determines
 * the choice. */
_Noreturn void lost_power(uint64_t seed);
/* Returns true if the plan contains an event that loses bytes. If it does not, changes are not recorded. */
bool faults_want_power(void);

/* -- system calls that do not use a door -------------------------------------------------------------------------- */
void faults_nap(double seconds);
/* Takes the lock of this folder. The folder has only this lock, which is not recursive. */
void faults_lock(void);
void faults_unlock(void);
/* Returns the function `name` of the C library. `version` is the version of its symbol, or NULL. */
void *faults_next(const char *name, const char *version);
/* Writes a line to the log. The line contains the rank, the time of the monotonic clock in seconds, and the text. */
void faults_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#endif
