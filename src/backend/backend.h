/* SPDX-License-Identifier: BSD-3-Clause
 * The interface of a device backend: raw pointers, sizes, strides. A backend never sees a tensor, a storage, the
 * tape or Lua. A new backend needs a folder, a line in registry.c and a CMake option.
 *
 * Order of work. A device has one compute stream. Kernels, copy_in, copy_out and clear run on it in the order of the
 * calls, so the next call can reuse memory that a call no longer needs, without waiting. A host device runs each call
 * before the call returns. Other devices can run calls later, and the caller waits in copy_out and copy_wait. A copy
 * of copy_start begins after the earlier work of the compute stream and after the copy `after`. For messages to other
 * ranks, `mark` and `after` of wire.h state the order. */
#ifndef PS_BACKEND_H
#define PS_BACKEND_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "backend/wire.h"
#include "base/dtype.h"

typedef struct ps_backend ps_backend;
typedef struct ps_copy ps_copy;       /* a running copy */

/* An operand. Absent optional operands have ndim -1. `data` is the address of element (0, ..., 0). Strides count
 * elements. */
typedef struct ps_view {
    void *data;
    int32_t dtype, ndim;
    int64_t numel;
    int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS];
} ps_view;
static inline bool ps_has(const ps_view *v) { return v->ndim >= 0; }

/* One call of a kernel. The op's infer rule has already checked shapes and types. Inputs of ops without the flag
 * STRIDED are contiguous, and so is every output that dispatch allocated. Absent optional inputs and outputs, and
 * outputs that the caller does not need (such as an unneeded gradient), have ndim -1 and keep their positions. */
typedef struct ps_call {
    int op, n_in, n_out;
    const ps_view *in;
    ps_view *out;
    const void *attrs;                /* struct ps_attrs_<op>, never NULL */
    /* Allocates memory for the duration of the call, 64-byte aligned, from the device's arena. Dispatch frees it.
     * Returns NULL after setting the error message; the kernel then returns PS_ENOMEM. Not thread-safe: call it
     * before parallel code. */
    void *(*scratch)(struct ps_call *call, size_t nbytes);
    void *owner;
    bool dry;                         /* set by scratch_nbytes of a backend whose kernels support it: the kernel
                                       * allocates its workspace and computes nothing */
} ps_call;

typedef int (*ps_kernel)(ps_call *call);

struct ps_backend {
    const char *name;
    bool is_host;                     /* the CPU can read the device's pointers */
    bool no_data;                     /* true on meta: its memory has addresses, but cannot be read or written */
    bool pretends;                    /* The device is simulated. Dispatch asks it for workspace and runs no kernel.
                                       * The device's only real values are those that a script wrote itself, and
                                       * those that the host computed from them. */
    bool fast_bf16;                   /* the device multiplies bf16 faster than fp32 */
    bool fuses;                       /* fused ops (mlp) are faster than the ops that they combine */
    char describe[256];
    /* Allocate and free the regions that arenas divide. Neither is called once memory use is steady. region_new can
     * return address space that takes memory only when it is touched. */
    int (*region_new)(ps_backend *be, size_t nbytes, void **out);
    void (*region_free)(ps_backend *be, void *p, size_t nbytes);
    /* (optional, for memory that touching does not allocate) region_reserve returns addresses without memory.
     * region_commit allocates memory for the whole pages of a range that have none. region_free frees addresses and
     * memory. */
    int (*region_reserve)(ps_backend *be, size_t nbytes, void **out);
    int (*region_commit)(ps_backend *be, void *p, size_t nbytes);
    /* (optional) Tells the system that the contents of whole pages are no longer needed. The system can use their
     * memory until the pages are touched or committed again. */
    void (*region_discard)(ps_backend *be, void *p, size_t nbytes);
    size_t page_nbytes;               /* page size for these functions, a power of two; 0 means 4096 */
    /* (optional) Moves memory between regions without a page fault or a copy: `nbytes` bytes from `from`, whose
     * addresses are free afterwards, to `to`, which has no memory yet. All three are multiples of PS_MOVE_NBYTES.
     * Returns the number of bytes that were moved, beginning with the first; fewer if the system refuses. PS_ENOMEM:
     * `to` has lost addresses, and cannot be used or freed any more. */
    int64_t (*region_move)(ps_backend *be, void *to, void *from, size_t nbytes);
    /* Returns the bytes that the system can still provide, INT64_MAX if unknown. A request for more is rejected,
     * before the system would kill the process. */
    int64_t (*bytes_available)(ps_backend *be);
    /* (optional; NULL means memmove) Copy between host memory and the device. The caller can reuse the host's bytes
     * when the call returns. If the device's memory is host memory, source and destination may overlap. */
    int (*copy_in)(ps_backend *be, void *dst, const void *host_src, size_t nbytes);
    int (*copy_out)(ps_backend *be, void *host_dst, const void *src, size_t nbytes);
    /* (optional, for host backends only) Loads nbytes bytes into dst through `read`, starting at offset `at`. If it
     * is NULL, the caller calls `read` once. */
    int (*load)(ps_backend *be, void *dst, ps_reader read, const void *from, int64_t at, size_t nbytes);
    int (*clear)(ps_backend *be, void *dst, size_t nbytes);   /* (optional) writes zeros; if it is NULL, copy_in is
                                                               * used */
    /* (optional; required if !is_host) Copies between host and device memory that run while the caller continues.
     * Copies in the same direction run in the order of the calls. copy_start begins a copy, which waits until
     * `after`, a copy in the other direction or NULL, has ended. copy_wait returns 1 if the copy has ended, 0 if it
     * is still running, or an error. Both buffers must stay valid until it has returned 1 or an error; it has then
     * freed the copy. If `after` fails, this copy fails too, and the bytes that it wrote must not be read. */
    int (*copy_start)(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                      ps_copy **out);
    int (*copy_wait)(ps_backend *be, ps_copy *copy, bool block);
    /* (optional; NULL if work has ended when its call returns) Measures by the device's clock when kernels ran, for
     * the event record. `what` describes the work that is queued between time_begin and time_end. run:
     * ps_record_run; the first call of a run may wait for the device. time_read writes the next ended work to `out`,
     * with its times by ps_record_clock, and returns 1. It returns 0 if no work has ended, or with `wait` if no work
     * is left. After an error the work is dropped. */
    int (*time_begin)(ps_backend *be, int32_t run);
    int (*time_end)(ps_backend *be, const ps_record_event *what);
    int (*time_read)(ps_backend *be, bool wait, ps_record_event *out);
    bool times;                       /* set by the code that starts copies, to have copies timed as well */
    int64_t copied_ns[2];             /* begin and end of the copy that copy_wait last ended, 0 if unknown */
    /* A kernel for each op. If a kernel is NULL, or returns PS_EUNSUP (before it changes any memory), dispatch runs
     * the kernel of `fallback` (host backends only). */
    ps_kernel kernel[PS_OP_COUNT];
    ps_backend *fallback;             /* (optional) */
    /* (optional) Returns the approximate bytes of workspace for a call's kernel. Does not read the operands' bytes. */
    int64_t (*scratch_nbytes)(ps_backend *be, const ps_call *call);
    void (*close)(ps_backend *be);    /* (optional) */
    /* (optional) Sends bytes of this device to devices of other processes. */
    const ps_wire_table *wire;
    bool host_carries;                /* alternative to `wire`: the processor can read this device's bytes, so they
                                       * are sent like host memory */
};

/* registry.c: opens the backends that every machine has. `out` has room for `max` backends. Returns their number, or
 * an error. */
int ps_backends_open(ps_backend **out, int max);
/* Opens a backend that only some machines have. Returns PS_EUNSUP if no backend has this name, or if something is
 * missing that the backend's error names. */
int ps_backend_open_named(const char *name, ps_backend **out);
void ps_backends_local_rank(int number);         /* implements ps_local_rank_set of ps.h */
/* Devices that are opened later belong to this simulated machine, or to the real one if `machine` is NULL. */
void ps_backends_pretend(const ps_machine *machine);
void ps_backends_close(ps_backend **all, int n);

/* Constructors of the backends. A backend is valid until its `close` is called. */
int ps_backend_ref_open(ps_backend **out);
int ps_backend_cpu_open(ps_backend *ref, ps_backend **out);
int ps_backend_meta_open(ps_backend **out);
int ps_backend_sim_open(ps_backend *ref, const ps_backend *cpu, ps_backend **out);   /* uses the kernels of cpu */
/* Makes a simulated device called `name`, with the abilities and workspace sizes of `real`. The device owns `real`,
 * unless this function fails. nbytes: size of its memory; 0 stands for the free memory of `real`. machine: the machine
 * that has its GPU, or NULL. */
int ps_backend_pretend(ps_backend *real, const char *name, int64_t nbytes, const ps_machine *machine,
                       ps_backend **out);

/* cuda_load.c: opens the backend of the plug-in libps_cuda.so on the card that `local_rank` selects, or the
 * environment if it is -1. The error says whether the driver, the device, the library or memory is missing. */
int ps_backend_cuda_open(int local_rank, ps_backend **out);

/* sim.c: changes the settings of sim. A size or rate of 0, or a negative latency, keeps the present setting. Running
 * copies keep their times. Returns PS_ESTATE if more memory is in use than the new size. */
int ps_sim_configure(ps_backend *be, int64_t memory_nbytes, double h2d_bytes_per_s, double d2h_bytes_per_s,
                     double latency_s);

/* host.c: regions of host memory, for ref, cpu and sim. A region of at least PS_MOVE_NBYTES begins at a multiple. */
enum { PS_MOVE_NBYTES = 2 << 20 };
int ps_host_region_new(ps_backend *be, size_t nbytes, void **out);
void ps_host_region_free(ps_backend *be, void *p, size_t nbytes);
void ps_host_region_discard(ps_backend *be, void *p, size_t nbytes);
int64_t ps_host_region_move(ps_backend *be, void *to, void *from, size_t nbytes);
int64_t ps_host_bytes_available(ps_backend *be);
const char *ps_host_limited_by(void);   /* Returns a phrase for the limit that the system is nearest to, such as "of
                                         * its address space (ulimit -v)". */
/* For a backend that pins host memory: sets the function that is called before bytes of a region lose their memory.
 * There is at most one; NULL removes it. */
void ps_host_region_watch(void (*goes)(void *p, size_t nbytes));
#endif
