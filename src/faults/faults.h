/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares faults that happen by a plan. The program psluajit_faults is psluajit with the object files of
 * this folder. They define the functions of the C library for files, sockets, memory, clocks, sleeps and locks.
 * Therefore every such call of the engine, of LuaJIT and of Gloo reaches these functions. psluajit has none of these
 * object files, so its calls reach the C library directly.
 *
 * Each of these functions is a door. A door counts the call, and compares it with the plan in PS_FAULT_PLAN. The plan
 * is a list of events, separated by blanks. An event has the form RANK:DOOR@NTH=ACTION or RANK:DOOR@NTH+COUNT=ACTION.
 * NTH counts from 0. RANK is a number, or * for all ranks. DOOR/CLASS in place of DOOR counts only calls for one
 * class of files. The classes are save (tensors of a checkpoint), index (index.json of a checkpoint), latest, folder
 * (opened or synced), chunk (the disk tier), log (of monitors) and other. plan.c has the names of the actions, and
 * docs/reliability.md describes them. A file counts only if it is below PS_FAULT_FOLDER. A socket counts only if it
 * is of an internet family. Each event that happens is written as a line to the file PS_FAULT_LOG. */
#ifndef PS_FAULTS_H
#define PS_FAULTS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The kinds of calls, in the order of `doors` in plan.c. DOOR_ANY counts all calls except those of clock, lock and
 * alloc. */
enum faults_door {
    DOOR_ANY, DOOR_OPEN, DOOR_READ, DOOR_WRITE, DOOR_SYNC, DOOR_RENAME, DOOR_SPACE, DOOR_REMOVE, DOOR_MKDIR, DOOR_MAP,
    DOOR_CONNECT, DOOR_ACCEPT, DOOR_SEND, DOOR_RECV, DOOR_ALLOC, DOOR_CLOCK, DOOR_SLEEP, DOOR_LOCK, DOOR_WAIT,
    DOOR_END,                   /* called once, when the process exits */
    N_DOORS
};
/* The actions of events. plan.c performs ACT_DELAY and the actions after it, before the call. The door itself
 * performs all other actions. */
enum faults_action {
    ACT_NONE, ACT_ERRNO, ACT_FULL, ACT_INTERRUPT, ACT_SHORT, ACT_FLIP, ACT_RESET, ACT_HALF_OPEN, ACT_DRIP, ACT_JUMP,
    ACT_SPURIOUS, ACT_REORDER, ACT_CUT, ACT_LAG, ACT_DELAY, ACT_KILL, ACT_STOP, ACT_SIGNAL, ACT_POWER, ACT_POWER_ALL
};
typedef struct faults_hit {
    int action;                 /* ACT_NONE means that the call proceeds */
    /* err: the errno that the call returns. It depends on the action.
     *   ACT_ERRNO       any errno
     *   ACT_FULL        ENOSPC or EDQUOT, only for calls that need space
     *   ACT_INTERRUPT   EINTR, which only some calls can return */
    int err;
    double arg;                 /* the number after the action in the plan, or 0 */
} faults_hit;

/* Counts a call of `door`, and returns the action that the plan has for this call.
 * what: a path for the log, or NULL
 * can: set of the actions that this call can perform, one bit per action. Events with other actions stay in the
 * plan. */
faults_hit faults_pass(int door, unsigned can, const char *what);
#define CAN(action) (1u << (action))
enum { CAN_WAIT = 1u << ACT_DELAY | 1u << ACT_KILL | 1u << ACT_STOP | 1u << ACT_SIGNAL | 1u << ACT_POWER
                  | 1u << ACT_POWER_ALL };

/* Replaces the plan, and counts calls and events from 0 again. Used by scripts that make every call fail in turn. No
 * other thread may be in a door. */
void faults_arm(const char *plan);
int64_t faults_happened(void);                  /* number of events since faults_arm */
/* Returns the number of calls that DOOR_ANY has counted since faults_arm. */
int64_t faults_calls(void);

/* -- descriptors (files.c) ---------------------------------------------------------------------------------------- */
enum faults_class { FD_OTHER, FD_FILE, FD_NAMELESS, FD_FOLDER, FD_SOCKET };
int faults_class_of(int fd);
void faults_set_class(int fd, int class, const char *path);
const char *faults_path_of(int fd);             /* path of a descriptor, or "" if unknown */
/* These functions send and receive on a socket. `read` and `write` also use them if the descriptor is a socket. */
ssize_t faults_socket_send(int fd, const void *bytes, size_t nbytes, int flags);
ssize_t faults_socket_recv(int fd, void *bytes, size_t nbytes, int flags);
/* Flips one bit of the bytes. `which` is the index of the bit, modulo the number of bits. */
void faults_flip(void *bytes, size_t nbytes, double which);

/* -- loss of power (lost.c) --------------------------------------------------------------------------------------- */
/* These functions record changes, so that a loss of power can undo them. Each function must be called before the
 * change. Paths are absolute. */
void lost_write(int fd, int64_t offset, int64_t nbytes);
void lost_resize(int fd);
void lost_truncate(const char *path);           /* records a change of all bytes of a file */
/* Records that the bytes of a file, or the names in a folder, have been synced. */
void lost_sync(int fd);
/* Called after an fsync that has failed. Loses bytes of the file as a loss of power would do. The next fsync
 * succeeds, as on Linux. */
void lost_failed_sync(int fd, uint64_t seed);
void lost_create(const char *path);
void lost_rename(const char *from, const char *to, bool exchange);
void lost_remove(const char *path, bool folder);
void lost_mkdir(const char *path);
void lost_undone(void);                         /* records that the latest change of names failed */
/* Undoes a random choice of the changes that were not synced, and kills the process. The seed determines the choice. */
_Noreturn void lost_power(uint64_t seed);
/* Returns true if the plan has an event that loses bytes. Changes are recorded only in this case. */
bool faults_want_power(void);

/* -- system calls that do not use a door -------------------------------------------------------------------------- */
void faults_nap(double seconds);
void faults_lock(void);                         /* takes this folder's only lock, which is not recursive */
void faults_unlock(void);
/* Returns the C library's version of a function. `version` may be NULL. */
void *faults_next(const char *name, const char *version);
/* Writes a line to the log. The line has the rank, the seconds of the monotonic clock, and the text. */
void faults_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#endif
