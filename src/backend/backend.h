/* SPDX-License-Identifier: BSD-3-Clause
 * The interface of a device backend. The interface passes raw pointers, sizes and strides: a backend never sees a
 * tensor, a storage, the tape or Lua. A new backend needs a folder that ENGINE_SOURCES of CMakeLists.txt lists, and a
 * line in registry.c.
 *
 * Order of work: a device has one compute stream. Kernels, copy_in, copy_out and clear run on this stream in the order
 * of the calls. Memory that one call used can therefore be reused by the next call without waiting. On a host device,
 * the work is done when the call returns. Other devices can do the work later, and the caller waits for it in copy_out
 * and copy_wait.
 *
 * copy_start begins a copy outside the compute stream. The copy runs after the earlier work of the compute stream, and
 * after the copy `after`. For messages to other ranks, `mark` and `after` of wire.h define the order. */
#ifndef PS_BACKEND_H
#define PS_BACKEND_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "backend/wire.h"
#include "base/dtype.h"

typedef struct ps_backend ps_backend;
typedef struct ps_copy ps_copy;       /* a running copy */

/* An operand of a kernel. For an absent optional operand, ndim is -1. `data` is the address of element (0, ..., 0).
 * Strides count elements. */
typedef struct ps_view {
    void *data;
    int32_t dtype, ndim;
    int64_t numel;
    int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS];
} ps_view;
static inline bool ps_has(const ps_view *v) { return v->ndim >= 0; }

/* One call of a kernel. The op's infer rule has already checked shapes and types. Inputs are contiguous, unless the op
 * has the flag STRIDED. Outputs that dispatch allocated are always contiguous. An optional input or output that is
 * absent keeps its position and has ndim -1. So has an output that the caller does not need (such as an unneeded
 * gradient). */
typedef struct ps_call {
    int op, n_in, n_out;
    const ps_view *in;
    ps_view *out;
    const void *attrs;                /* struct ps_attrs_<op>, never NULL */
    /* Allocates memory from the device's arena for the duration of the call, aligned to 64 bytes. Dispatch frees the
     * memory. If there is not enough memory, scratch sets the error message and returns NULL, and the kernel then
     * returns PS_ENOMEM. scratch is not thread-safe, so a kernel calls it before its parallel code. */
    void *(*scratch)(struct ps_call *call, size_t nbytes);
    void *owner;
    /* If set, the kernel allocates its workspace and computes nothing. scratch_nbytes of some backends sets it. */
    bool dry;
} ps_call;

typedef int (*ps_kernel)(ps_call *call);

struct ps_backend {
    const char *name;
    bool is_host;                     /* whether the CPU can read the device's pointers */
    bool no_data;                     /* true for meta: its memory has addresses, but cannot be read or written */
    /* Whether the device is simulated. Dispatch asks a simulated device for the size of the workspace, and runs no
     * kernel. Only values that a script wrote itself, and values that the host computed from such values, are real. */
    bool pretends;
    bool fast_bf16;                   /* whether the device multiplies bf16 values faster than fp32 values */
    bool fuses;                       /* whether fused ops (mlp) are faster than the ops that they replace */
    char describe[256];
    /* Allocate and free the regions that arenas divide. When a script's memory use no longer changes from step to step,
     * neither function is called any more. region_new can return addresses whose pages use no memory until they are
     * touched. */
    int (*region_new)(ps_backend *be, size_t nbytes, void **out);
    void (*region_free)(ps_backend *be, void *p, size_t nbytes);
    /* (optional; for devices whose memory is not allocated when it is touched) region_reserve returns addresses without
     * memory. region_commit allocates memory for all whole pages of a range that have no memory yet. region_free frees
     * both the addresses and the memory. */
    int (*region_reserve)(ps_backend *be, size_t nbytes, void **out);
    int (*region_commit)(ps_backend *be, void *p, size_t nbytes);
    /* (optional) Tells the system that the contents of whole pages are no longer needed. The system can use the memory
     * of these pages for other purposes until they are touched or committed again. */
    void (*region_discard)(ps_backend *be, void *p, size_t nbytes);
    size_t page_nbytes;               /* page size in bytes for the region functions, a power of two; 0 means 4096 */
    /* (optional) Moves `nbytes` bytes of memory between regions without a page fault or a copy. After the move, the
     * addresses at `from` have no memory. The addresses at `to` must have no memory before the move. `to`, `from` and
     * nbytes must be multiples of PS_MOVE_NBYTES. Returns the number of bytes that were moved, from the beginning of
     * the range. The number is smaller than nbytes if the system refuses to move more. Returns PS_ENOMEM if addresses
     * at `to` were lost; `to` can then not be used or freed any more. */
    int64_t (*region_move)(ps_backend *be, void *to, void *from, size_t nbytes);
    /* Returns the number of bytes that the system can still provide, or INT64_MAX if the number is unknown. The caller
     * rejects requests for more bytes, because the system would otherwise kill the process. */
    int64_t (*bytes_available)(ps_backend *be);
    /* (optional; NULL means all of them) Returns how many of `reserved` bytes, the size of all regions of this process,
     * bytes_available no longer counts. A system that provides memory when a byte is first written counts only written
     * bytes. */
    int64_t (*bytes_held)(ps_backend *be, int64_t reserved);
    /* (optional; NULL means memmove) Copy between host memory and the device. The caller can reuse the host memory when
     * the call returns. If the device's memory is host memory, source and destination may overlap. */
    int (*copy_in)(ps_backend *be, void *dst, const void *host_src, size_t nbytes);
    int (*copy_out)(ps_backend *be, void *host_dst, const void *src, size_t nbytes);
    /* (optional; for host backends only) Loads nbytes bytes from offset `at` of the source `from` into dst, by one or
     * more calls of `read`. If `load` is NULL, the caller calls `read` once for all bytes. */
    int (*load)(ps_backend *be, void *dst, ps_reader read, const void *from, int64_t at, size_t nbytes);
    int (*clear)(ps_backend *be, void *dst, size_t nbytes);   /* (optional) writes zeros; if it is NULL, copy_in is
                                                               * used instead */
    /* (optional; required if !is_host) Copies between host and device memory that run while the caller continues.
     * Copies in the same direction run in the order of the calls.
     *
     * copy_start begins a copy. `after` is NULL or a copy in the other direction. The new copy runs after the copy
     * `after` has ended. If `after` fails, the new copy fails, too, and the bytes that it wrote must not be read.
     * copy_wait returns 1 if the copy has ended, 0 if it is still running, or an error. dst and src must stay valid
     * until copy_wait has returned 1 or an error. copy_wait then also frees the copy. */
    int (*copy_start)(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                      ps_copy **out);
    int (*copy_wait)(ps_backend *be, ps_copy *copy, bool block);
    /* (optional; NULL if the work of a call is done when the call returns) Measure by the device's clock when kernels
     * ran, for the event record. time_begin and time_end are called before and after work is queued. `what` describes
     * this work. run: the value of ps_record_run(). The first call of time_begin for a run may wait for the device.
     *
     * If the next work has ended, time_read writes its description and its times by ps_record_clock() to `out`, and
     * returns 1. Otherwise it returns 0. If `wait` is set, time_read waits until the next work has ended, and returns 0
     * only if no work is left. After an error, the remaining work is dropped. */
    int (*time_begin)(ps_backend *be, int32_t run);
    int (*time_end)(ps_backend *be, const ps_record_event *what);
    int (*time_read)(ps_backend *be, bool wait, ps_record_event *out);
    bool times;                       /* whether copies are also timed; set by the code that starts copies */
    int64_t copied_ns[2];             /* begin and end of the copy for which copy_wait last returned 1; 0 if unknown */
    /* One kernel per op. A host backend can have another backend as its `fallback`. If a kernel is NULL or returns
     * PS_EUNSUP, dispatch runs the fallback's kernel instead. A kernel that returns PS_EUNSUP must not have changed any
     * memory. */
    ps_kernel kernel[PS_OP_COUNT];
    ps_backend *fallback;             /* (optional) */
    /* (optional) Returns the approximate size in bytes of the workspace that a call's kernel needs. The function does
     * not read the operands' contents. */
    int64_t (*scratch_nbytes)(ps_backend *be, const ps_call *call);
    void (*close)(ps_backend *be);    /* (optional) */
    /* (optional) Functions that send contents of this device's memory to devices of other processes. */
    const ps_wire_table *wire;
    /* An alternative to `wire`. If set, the processor can read this device's memory, and its contents are sent like
     * host memory. */
    bool host_carries;
};

/* registry.c: opens the backends that every machine has, and writes them to `out`, which has space for `max` backends.
 * Returns the number of backends or an error. */
int ps_backends_open(ps_backend **out, int max);
/* Opens a backend that only some machines have. Returns PS_EUNSUP if no backend has this name, or if the machine lacks
 * something that the backend needs. The error's text names the missing part. */
int ps_backend_open_named(const char *name, ps_backend **out);
void ps_backends_local_rank(int number);         /* implements ps_local_rank_set of ps.h */
/* Devices that are opened after this call belong to the simulated machine `machine`, or to the real machine if
 * `machine` is NULL. */
void ps_backends_pretend(const ps_machine *machine);
void ps_backends_close(ps_backend **all, int n);

/* Constructors of the backends. Each backend is valid until its `close` is called. */
int ps_backend_ref_open(ps_backend **out);
int ps_backend_cpu_open(ps_backend *ref, ps_backend **out);
int ps_backend_meta_open(ps_backend **out);
int ps_backend_sim_open(ps_backend *ref, const ps_backend *cpu, ps_backend **out);   /* uses the kernels of cpu */
/* Makes a simulated device called `name`. The simulated device has the abilities and workspace sizes of the device
 * `real`. It owns `real` unless this function fails. nbytes: size of the simulated memory in bytes; 0 means the size of
 * the free memory of `real`. machine: for a GPU, the simulated machine to which the GPU belongs; otherwise NULL. */
int ps_backend_pretend(ps_backend *real, const char *name, int64_t nbytes, const ps_machine *machine,
                       ps_backend **out);

/* cuda_load.c: opens the backend of the plug-in libps_cuda.so. `local_rank` selects the card; if it is -1, environment
 * variables select the card. The error's text says whether the driver, the device, the library or memory is missing. */
int ps_backend_cuda_open(int local_rank, ps_backend **out);

/* sim.c: changes the settings of sim. A size or rate of 0, or a negative latency, keeps the current setting. Copies
 * that are running keep their times. Returns PS_ESTATE if the memory in use is larger than the new size. */
int ps_sim_configure(ps_backend *be, int64_t memory_nbytes, double h2d_bytes_per_s, double d2h_bytes_per_s,
                     double latency_s);

/* host.c: regions of host memory, which ref, cpu and sim use. A region of at least PS_MOVE_NBYTES bytes begins at a
 * multiple of PS_MOVE_NBYTES. */
enum { PS_MOVE_NBYTES = 2 << 20 };
int ps_host_region_new(ps_backend *be, size_t nbytes, void **out);
void ps_host_region_free(ps_backend *be, void *p, size_t nbytes);
void ps_host_region_discard(ps_backend *be, void *p, size_t nbytes);
int64_t ps_host_region_move(ps_backend *be, void *to, void *from, size_t nbytes);
int64_t ps_host_bytes_available(ps_backend *be);
int64_t ps_host_bytes_held(ps_backend *be, int64_t reserved);
/* Returns a phrase that names the limit of host memory that would be reached first, such as "of its address space
 * (ulimit -v)". */
const char *ps_host_limited_by(void);
/* Sets the function that is called before a part of a region loses its memory. A backend that pins host memory uses
 * this function to unpin the memory. There is at most one function. NULL removes the function. */
void ps_host_region_watch(void (*goes)(void *p, size_t nbytes));
#endif
