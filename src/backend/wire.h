/* SPDX-License-Identifier: BSD-3-Clause
 * How a backend moves bytes between its memory and that of other processes' devices (NCCL): one exchange, a sum and a
 * copy, each begun and then polled. transport/wired.c makes a communicator of it, with the waiting, the time-outs and
 * the checks; transport/line.c sends messages between two ranks with it. Only one thread uses a wire at a time, which
 * need not be the one that runs kernels; that one calls `mark` and the functions that say so. */
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
    /* Loads the library. PS_EUNSUP: it cannot be loaded; the message has the reason. */
    int (*load)(struct ps_backend *be);
    /* Writes a name of the device that is unique on the machine, [PS_WIRE_NAME_NBYTES], padded with 0. */
    int (*device_name)(struct ps_backend *be, char *name);
    int most_ranks;
    int (*new_id)(struct ps_backend *be, char *id);   /* [PS_WIRE_ID_NBYTES]; one rank makes the id, and all ranks
                                                       * pass it to `open` */
    /* Begins to connect. If id is NULL, makes a world of one, which needs no library. */
    int (*open)(struct ps_backend *be, const char *id, int rank, int size, ps_wire **out);
    /* Returns 1 if open, or the last begin, has progressed so far that the next one may begin, 0 if not yet, or an
     * error. */
    int (*ready)(ps_wire *w);
    /* Makes a mark after the work queued on the device so far. Called by the thread that queues it. The mark is
     * valid until PS_WIRE_MARKS more were made; afterwards it can stand for a later one. */
    int (*mark)(ps_wire *w);          /* returns the mark, >= 0, or an error */
    /* Makes work that is begun on the wire from now on run after all work before the mark. */
    int (*after)(ps_wire *w, int mark);
    /* Like ps_comm_table.begin. Lanes count from 0, and exchanges run in the order of the calls. An exchange runs
     * after the sums and copies that were begun before it. */
    int (*begin)(ps_wire *w, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* Makes sums and copies that are begun from now on run after the lane's last exchange, which must be ready. */
    int (*follow)(ps_wire *w, int lane);
    /* Begins to[i] = sum of at[r][i] over r < n, in this order, in fp32 (fp64 for fp64), rounded once. `to` can be
     * one of at[r]. The sum waits only for exchanges given to `follow`. */
    int (*sum)(ps_wire *w, int dtype, int n, char *const *at, int64_t numel, char *to);
    int (*copy)(ps_wire *w, void *to, const void *from, int64_t nbytes);
    /* Returns 1 if the last exchange of a lane, or (PS_WIRE_LOCAL) the last sum or copy, has ended, 0 if not, or an
     * error. */
    int (*ended)(ps_wire *w, int lane);
    /* Events are points in the device's work. They order it without a waiting thread. An event that was never set
     * counts as passed. */
    int (*event_new)(struct ps_backend *be, ps_wire_event **out);
    void (*event_free)(ps_wire_event *e);
    /* Called by the thread that runs kernels. event_now sets the event after all work queued on the device so far.
     * event_follow orders all work that is queued on the device later after the event. */
    int (*event_now)(struct ps_backend *be, ps_wire_event *e);
    int (*event_follow)(struct ps_backend *be, ps_wire_event *e);
    int (*event_before)(ps_wire *w, ps_wire_event *e);       /* makes exchanges that begin from now on run after the
                                                              * event */
    /* Sets the event after all exchanges (the last one must be ready) and all sums and copies. */
    int (*event_end)(ps_wire *w, ps_wire_event *e);
    int (*event_over)(ps_wire_event *e);                     /* returns 1 if the event has passed, 0 if not, or an
                                                              * error; any thread may call it */
    int (*memory)(ps_wire *w, int64_t nbytes, void **out);
    void (*memory_free)(ps_wire *w, void *p);
    /* Ends everything under way, including sums and copies, as far as this rank can; afterwards nothing uses the
     * callers' memory. Only events, memory_free and close may follow. All of these wait for other ranks for at most
     * some seconds. */
    void (*abort)(ps_wire *w);
    void (*close)(ps_wire *w);
    /* lose is called before an abort after which kernels continue without bytes that they expect: the next read of
     * the device's memory fails with this error, of code PS_E*. Only the first one is kept. lost returns that error,
     * of any wire, or 0. told: the caller has reported it to the script, so it is not reported again. Any thread may
     * call them. */
    void (*lose)(struct ps_backend *be, int code, const char *why);
    int (*lost)(struct ps_backend *be, bool told);
    /* For benchmarks: begins the library's own all-gather or all-reduce of fp32. count: elements of `in`. Ends like
     * an exchange of lane 0. */
    int (*raw)(ps_wire *w, bool all_reduce, float *out, const float *in, int64_t count);
} ps_wire_table;
#endif
