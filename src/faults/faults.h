/* SPDX-License-Identifier: BSD-3-Clause
 * Faults by plan. The program psluajit_faults is psluajit with the objects of this folder. They define the C library's
 * functions for files, sockets, memory, clocks, sleeps and locks, so that every call of the engine, of LuaJIT and of
 * Gloo comes here. psluajit has none of these objects: its calls go to the C library directly.
 *
 * Each such function is a door. The door counts the call and compares it with the plan (PS_FAULT_PLAN): a list of
 * events RANK:DOOR@NTH=ACTION, or RANK:DOOR@NTH+COUNT=ACTION, separated by blanks. NTH counts from 0. RANK is a number,
 * or * for all ranks. DOOR/CLASS instead of DOOR counts calls for one class of files: save (a checkpoint's tensors),
 * index (its index.json), latest, folder (opened or synced), chunk (the disk tier), log (of monitors) or other.
 * plan.c has the names of actions, and docs/reliability.md says what they do. Files count only if
 * they are below PS_FAULT_FOLDER, and sockets only if they are of the internet's families. Each event that happens is a
 * line of the file PS_FAULT_LOG. */
#ifndef PS_FAULTS_H
#define PS_FAULTS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Kinds of calls, in the order of `doors` in plan.c. `any` counts all calls except those of clock, lock and alloc. */
enum faults_door {
    DOOR_ANY, DOOR_OPEN, DOOR_READ, DOOR_WRITE, DOOR_SYNC, DOOR_RENAME, DOOR_SPACE, DOOR_REMOVE, DOOR_MKDIR, DOOR_MAP,
    DOOR_CONNECT, DOOR_ACCEPT, DOOR_SEND, DOOR_RECV, DOOR_ALLOC, DOOR_CLOCK, DOOR_SLEEP, DOOR_LOCK, DOOR_WAIT,
    DOOR_END,                   /* called once, when the process exits */
    N_DOORS
};
/* Actions of events. Actions from ACT_DELAY on are performed by plan.c, before the call. The door itself performs
 * the others. */
enum faults_action {
    ACT_NONE, ACT_ERRNO, ACT_FULL, ACT_INTERRUPT, ACT_SHORT, ACT_FLIP, ACT_RESET, ACT_HALF_OPEN, ACT_DRIP, ACT_JUMP,
    ACT_SPURIOUS, ACT_REORDER, ACT_CUT, ACT_LAG, ACT_DELAY, ACT_KILL, ACT_STOP, ACT_SIGNAL, ACT_POWER, ACT_POWER_ALL
};
typedef struct faults_hit {
    int action;                 /* ACT_NONE lets the call proceed */
    int err;                    /* errno that the call returns. ACT_ERRNO: any. ACT_FULL: ENOSPC or EDQUOT, only for
                                 * calls that need space. ACT_INTERRUPT: EINTR, which only some calls can return. */
    double arg;                 /* number that follows the action in the plan, or 0 */
} faults_hit;

/* Counts a call of `door`, and returns the action that the plan has for this call. what: a path for the log, or
 * NULL. can: bit set of the actions that this call can perform. Events with other actions stay in the plan. */
faults_hit faults_pass(int door, unsigned can, const char *what);
#define CAN(action) (1u << (action))
enum { CAN_WAIT = 1u << ACT_DELAY | 1u << ACT_KILL | 1u << ACT_STOP | 1u << ACT_SIGNAL | 1u << ACT_POWER
                  | 1u << ACT_POWER_ALL };

/* Replaces the plan, and counts calls and events from 0 again. For scripts that make every call fail in turn. No
 * other thread may be in a door. */
void faults_arm(const char *plan);
int64_t faults_happened(void);                  /* number of events since faults_arm */
int64_t faults_calls(void);                     /* number of calls that `any` has counted since faults_arm */

/* -- descriptors (files.c) ---------------------------------------------------------------------------------------- */
enum faults_class { FD_OTHER, FD_FILE, FD_NAMELESS, FD_FOLDER, FD_SOCKET };
int faults_class_of(int fd);
void faults_set_class(int fd, int class, const char *path);
const char *faults_path_of(int fd);             /* path of a descriptor, "" if unknown */
/* Send and receive on a socket. read and write use them, too, if the descriptor is a socket. */
ssize_t faults_socket_send(int fd, const void *bytes, size_t nbytes, int flags);
ssize_t faults_socket_recv(int fd, void *bytes, size_t nbytes, int flags);
/* Flips bit `which` (modulo the number of bits) of the bytes. */
void faults_flip(void *bytes, size_t nbytes, double which);

/* -- loss of power (lost.c) --------------------------------------------------------------------------------------- */
/* Record changes, so that a loss of power can undo them. Each function is called before its change. Paths are
 * absolute. */
void lost_write(int fd, int64_t offset, int64_t nbytes);
void lost_resize(int fd);
void lost_truncate(const char *path);           /* records a change of all bytes of a file */
void lost_sync(int fd);                         /* records that a file's bytes, or the names in a folder, have been
                                                 * synced */
void lost_failed_sync(int fd, uint64_t seed);   /* after a failed fsync: loses the file's bytes as a power failure
                                                 * would; the next fsync succeeds, as on Linux */
void lost_create(const char *path);
void lost_rename(const char *from, const char *to, bool exchange);
void lost_remove(const char *path, bool folder);
void lost_mkdir(const char *path);
void lost_undone(void);                         /* records that the latest change of names failed */
/* Undoes a random choice of the changes that were not synced, and kills the process. The seed determines the choice. */
_Noreturn void lost_power(uint64_t seed);
bool faults_want_power(void);                   /* returns true if the plan has an event that loses bytes; only then
                                                 * changes are recorded */

/* -- system calls that pass no door ------------------------------------------------------------------------------- */
void faults_nap(double seconds);
void faults_lock(void);                         /* takes this folder's only lock, which is not recursive */
void faults_unlock(void);
void *faults_next(const char *name, const char *version);       /* returns the C library's version of a function;
                                                                 * version may be NULL */
void faults_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));      /* writes a line to the log: the
                                                                                    * rank, the monotonic clock's
                                                                                    * seconds, the text */
#endif
