/* SPDX-License-Identifier: BSD-3-Clause
 * Functions that move bytes between this backend's memory and the memory of devices in other processes (NCCL). There
 * are three kinds of work: exchanges, sums and copies. One call begins the work, and other calls poll for its end.
 * transport/wired.c implements a communicator with these functions, and adds waiting, time-outs and checks.
 * transport/line.c sends messages with these functions.
 *
 * Only one thread at a time may use a wire. That thread need not be the thread that runs kernels. But `mark`, event_now
 * and event_follow must be called by the thread that runs kernels. */
#ifndef PS_WIRE_H
#define PS_WIRE_H
#include <stdbool.h>
#include <stdint.h>

struct ps_backend;
typedef struct ps_wire ps_wire;
typedef struct ps_wire_event ps_wire_event;
typedef struct ps_comm_part { void *address; int64_t nbytes; } ps_comm_part;

enum { PS_WIRE_ID_NBYTES = 128, PS_WIRE_LANES = 2, PS_WIRE_LOCAL = PS_WIRE_LANES, PS_WIRE_MARKS = 16,
       PS_WIRE_NAME_NBYTES = 96 };

typedef struct ps_wire_table {
    const char *name;
    /* Loads the library. Returns PS_EUNSUP if the library cannot be loaded. The error's text contains the reason. */
    int (*load)(struct ps_backend *be);
    /* Writes a device name that is unique on the machine to name [PS_WIRE_NAME_NBYTES], and fills the rest with
     * zeros. */
    int (*device_name)(struct ps_backend *be, char *name);
    int most_ranks;
    int (*new_id)(struct ps_backend *be, char *id);   /* sets id [PS_WIRE_ID_NBYTES]; one rank makes an id, and all
                                                       * ranks pass it to `open` */
    /* Begins to connect. If id is NULL, makes a world of one rank, which needs no library. */
    int (*open)(struct ps_backend *be, const char *id, int rank, int size, ps_wire **out);
    /* Returns 1 if the next exchange can begin, 0 if not, or an error. The next exchange can begin after `open` and the
     * previous exchange have progressed far enough. */
    int (*ready)(ps_wire *w);
    /* Marks the end of the work that is currently queued on the device. The thread that queues the work must call this
     * function. A mark is valid until PS_WIRE_MARKS more marks have been made. After that, its number can belong to a
     * newer mark. */
    int (*mark)(ps_wire *w);          /* returns the mark, >= 0, or an error */
    /* Orders work after a mark: work that begins later on the wire runs after all work before the mark. */
    int (*after)(ps_wire *w, int mark);
    /* Like ps_comm_table.begin. Lanes are counted from 0. Exchanges run in the order of the calls, and after all sums
     * and copies that were begun earlier. */
    int (*begin)(ps_wire *w, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* Orders sums and copies after an exchange: sums and copies that begin after this call run after the lane's last
     * exchange. `ready` must have returned 1 since that exchange began. */
    int (*follow)(ps_wire *w, int lane);
    /* Begins to compute to[i] = the sum of at[r][i] over r < n. The terms are added in ascending order of r, in fp32
     * (fp64 for fp64 values), and the sum is rounded once. `to` can be one of the at[r]. The sum waits only for
     * exchanges that were passed to `follow`. */
    int (*sum)(ps_wire *w, int dtype, int n, char *const *at, int64_t numel, char *to);
    int (*copy)(ps_wire *w, void *to, const void *from, int64_t nbytes);
    /* Returns 1 if the last exchange of the lane has ended, 0 if not, or an error. For the lane PS_WIRE_LOCAL, returns
     * whether the last sum or copy has ended. */
    int (*ended)(ps_wire *w, int lane);
    /* Events are points in the device's work. They order work without making a thread wait. An event that was never set
     * counts as passed. */
    int (*event_new)(struct ps_backend *be, ps_wire_event **out);
    void (*event_free)(ps_wire_event *e);
    /* event_now sets the event after all work that is currently queued on the device. event_follow makes all work that
     * is queued later run after the event. The thread that runs kernels must call both functions. */
    int (*event_now)(struct ps_backend *be, ps_wire_event *e);
    int (*event_follow)(struct ps_backend *be, ps_wire_event *e);
    int (*event_before)(ps_wire *w, ps_wire_event *e);       /* makes exchanges that begin later run after the event */
    /* Sets the event after all exchanges, sums and copies. `ready` must have returned 1 since the last exchange
     * began. */
    int (*event_end)(ps_wire *w, ps_wire_event *e);
    int (*event_over)(ps_wire_event *e);                     /* returns 1 if the event has passed, 0 if not, or an
                                                              * error; any thread may call it */
    int (*memory)(ps_wire *w, int64_t nbytes, void **out);
    void (*memory_free)(ps_wire *w, void *p);
    /* abort ends all running work, including sums and copies, as far as this rank can. After abort, no work uses the
     * callers' memory, and only the event functions, memory_free and close may be called. abort and close wait for
     * other ranks for at most a few seconds. */
    void (*abort)(ps_wire *w);
    void (*close)(ps_wire *w);
    /* lose records an error with a code PS_E*. It is called before an abort if kernels will continue without bytes that
     * they expect. The next read of the device's memory fails with this error. Only the first error is kept. lost
     * returns the recorded error, whichever wire has recorded it, or 0. told: the caller has reported the error to the
     * script, so lost clears the error. Any thread can call both functions. */
    void (*lose)(struct ps_backend *be, int code, const char *why);
    int (*lost)(struct ps_backend *be, bool told);
    /* For benchmarks: begins the library's own all-gather or all-reduce of fp32 values. count: number of elements of
     * `in`. `ended` reports the end for lane 0, as for an exchange. */
    int (*raw)(ps_wire *w, bool all_reduce, float *out, const float *in, int64_t count);
} ps_wire_table;
#endif
