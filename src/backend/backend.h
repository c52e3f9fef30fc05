/* SPDX-License-Identifier: BSD-3-Clause
 * The interface of a device backend: raw pointers, sizes, strides. A backend never sees a tensor, a storage, the tape
 * or Lua. To add one: a folder, a line in registry.c, a CMake option.
 *
 * Order of work. A device has one compute stream: kernels, copy_in, copy_out and clear run on it in the order of the
 * calls, so memory that one of them has finished with may be reused by the next without waiting. A host device runs
 * each before its call returns. Another device may run them later; the caller waits in copy_out and copy_wait. Other
 * work states its order: a copy of copy_start begins after the earlier work of the compute stream and after the copy
 * `after`; for messages to other ranks, wire.h states the same by `mark` and `after`. */
#ifndef PS_BACKEND_H
#define PS_BACKEND_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "backend/wire.h"
#include "base/dtype.h"

typedef struct ps_backend ps_backend;
typedef struct ps_copy ps_copy;       /* a copy that is under way */

/* An operand. Absent optional inputs have ndim -1. Strides count elements; `data` points at element (0, ..., 0). */
typedef struct ps_view {
    void *data;
    int32_t dtype, ndim;
    int64_t numel;
    int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS];
} ps_view;
static inline bool ps_has(const ps_view *v) { return v->ndim >= 0; }

/* One call of a kernel. The op's infer rule has checked shapes and types. Inputs of ops without the flag STRIDED,
 * and every output that dispatch made, are contiguous. An output that is not wanted (a gradient that is not needed)
 * has ndim -1. Optional inputs and outputs keep their positions. */
typedef struct ps_call {
    int op, n_in, n_out;
    const ps_view *in;
    ps_view *out;
    const void *attrs;                /* struct ps_attrs_<op>, never NULL */
    /* Allocates memory for the duration of the call from the device's arena, 64-byte aligned. Returns NULL after
     * setting the error message; the kernel then returns PS_ENOMEM. Not thread-safe, so it must be called before
     * parallel code. Dispatch frees the memory. */
    void *(*scratch)(struct ps_call *call, size_t nbytes);
    void *owner;
    bool dry;                         /* for scratch_nbytes of a backend whose kernels support it: the kernel
                                       * allocates workspace and computes nothing */
} ps_call;

typedef int (*ps_kernel)(ps_call *call);

struct ps_backend {
    const char *name;
    bool is_host;                     /* the CPU can read the device's pointers */
    bool no_data;                     /* on meta: memory has only addresses, and nothing may be read or written */
    bool pretends;                    /* The device is simulated. Dispatch asks it for workspace and runs no kernel.
                                       * It has only values that a script wrote itself, or that were computed from
                                       * them on the host. */
    bool fast_bf16;                   /* the device multiplies bf16 faster than fp32 */
    bool fuses;                       /* ops that combine several ops (mlp) are faster than the single ops */
    char describe[256];
    /* Allocates and frees the regions that arenas divide. Not called once memory use is steady. `reserve` may return
     * address space that costs memory only when it is touched. */
    int (*region_new)(ps_backend *be, size_t nbytes, void **out);
    void (*region_free)(ps_backend *be, void *p, size_t nbytes);
    /* (optional, for memory that is not allocated by touching it) region_reserve returns addresses for a region
     * without memory. region_commit allocates memory for all whole pages in a range that have none. region_free
     * frees both. */
    int (*region_reserve)(ps_backend *be, size_t nbytes, void **out);
    int (*region_commit)(ps_backend *be, void *p, size_t nbytes);
    /* (optional) Tells the system that the contents of whole pages are no longer needed. It may use their memory
     * until they are touched, or committed, again. */
    void (*region_discard)(ps_backend *be, void *p, size_t nbytes);
    size_t page_nbytes;               /* size of these pages, a power of two; 0 means 4096 */
    /* Returns the bytes that the system can still provide, so that a request is rejected before the system kills the
     * process. INT64_MAX if unknown. */
    int64_t (*bytes_available)(ps_backend *be);
    /* (optional) Copies between host memory and the device; NULL means memmove. The caller can reuse the host's
     * bytes when the call returns. If the device's memory is host memory, source and destination may overlap. */
    int (*copy_in)(ps_backend *be, void *dst, const void *host_src, size_t nbytes);
    int (*copy_out)(ps_backend *be, void *host_dst, const void *src, size_t nbytes);
    /* (optional, for host backends only) Loads bytes from a reader, from `at` on, to dst. NULL: the reader is called
     * once. */
    int (*load)(ps_backend *be, void *dst, ps_reader read, const void *from, int64_t at, size_t nbytes);
    int (*clear)(ps_backend *be, void *dst, size_t nbytes);   /* (optional) writes zeros; if it is NULL, copy_in is
                                                               * used */
    /* (optional; required if !is_host) Copies that run while the caller continues. Copies in the same direction run
     * in the order of the calls. copy_start begins a copy between host and device memory after copy `after` of the
     * other direction (or NULL) has ended. Both buffers must stay valid until copy_wait has returned 1 (the copy has
     * ended) or an error; the copy is then freed. 0 means that it is under way. If `after` fails, this copy fails
     * too, and the bytes that it wrote must not be read. */
    int (*copy_start)(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                      ps_copy **out);
    int (*copy_wait)(ps_backend *be, ps_copy *copy, bool block);
    /* (optional; NULL if work has ended when its call returns) The times at which kernels ran, by the device's
     * clock, for the event record. time_begin: the work that is queued between this call and time_end is `what`.
     * run: ps_record_run; the first call of a run may wait for the device. time_read returns 1 with the next work
     * that has ended and its times by ps_record_clock. It returns 0 if none has ended or (wait) none is left. After
     * an error the work is dropped. */
    int (*time_begin)(ps_backend *be, int32_t run);
    int (*time_end)(ps_backend *be, const ps_record_event *what);
    int (*time_read)(ps_backend *be, bool wait, ps_record_event *out);
    bool times;                       /* set by the code that starts copies, so that these copies are timed, too */
    int64_t copied_ns[2];             /* begin and end of the copy that copy_wait ended last, 0 if unknown */
    /* A kernel for each op. If it is NULL, dispatch uses the kernel of `fallback` (host backends only). A kernel can
     * also return PS_EUNSUP before it changes any memory; the fallback then runs. */
    ps_kernel kernel[PS_OP_COUNT];
    ps_backend *fallback;             /* (optional) */
    /* (optional) Returns the approximate bytes of workspace that the kernel of a call would allocate. Does not read
     * the operands' bytes. */
    int64_t (*scratch_nbytes)(ps_backend *be, const ps_call *call);
    void (*close)(ps_backend *be);    /* (optional) */
    /* (optional) Sends bytes of this device to devices of other processes. */
    const ps_wire_table *wire;
    bool host_carries;                /* alternative to `wire`: the processor can read the bytes, so they are sent
                                       * like host memory */
};

/* registry.c: opens the backends that every machine has. `out` has room for `max` backends. Returns their number, or
 * an error. */
int ps_backends_open(ps_backend **out, int max);
/* Opens a backend that not every machine has. PS_EUNSUP: there is no backend with this name, or the backend's error
 * says what is missing. */
int ps_backend_open_named(const char *name, ps_backend **out);
void ps_backends_local_rank(int number);         /* implements ps_local_rank_set of ps.h */
/* Makes devices that are opened later those of this simulated machine, or of the real one if it is NULL. */
void ps_backends_pretend(const ps_machine *machine);
void ps_backends_close(ps_backend **all, int n);

/* Constructors of the backends. The backend owns `out` (static or on the heap) until it is closed. */
int ps_backend_ref_open(ps_backend **out);
int ps_backend_cpu_open(ps_backend *ref, ps_backend **out);
int ps_backend_meta_open(ps_backend **out);
int ps_backend_sim_open(ps_backend *ref, const ps_backend *cpu, ps_backend **out);   /* uses the kernels of cpu */
/* Makes a simulated device called `name`, with the abilities and the workspace of `real`, which it owns afterwards.
 * nbytes: size of its memory; 0: the free memory of `real`. machine (or NULL): the machine that has its GPU. On
 * failure the caller still owns `real`. */
int ps_backend_pretend(ps_backend *real, const char *name, int64_t nbytes, const ps_machine *machine,
                       ps_backend **out);

/* cuda_load.c: opens the backend of the plug-in libps_cuda.so on the card that `local_rank` selects (-1: by the
 * environment). The error says whether the driver, the device, the library or memory is missing. */
int ps_backend_cuda_open(int local_rank, ps_backend **out);

/* sim.c: changes the settings of sim. Copies that have already started keep their times. A size or rate of 0 and a
 * negative latency keep the present setting. PS_ESTATE: more memory is in use than the new size. */
int ps_sim_configure(ps_backend *be, int64_t memory_nbytes, double h2d_bytes_per_s, double d2h_bytes_per_s,
                     double latency_s);

/* host.c: region functions for host memory, shared by ref, cpu and sim. */
int ps_host_region_new(ps_backend *be, size_t nbytes, void **out);
void ps_host_region_free(ps_backend *be, void *p, size_t nbytes);
void ps_host_region_discard(ps_backend *be, void *p, size_t nbytes);
int64_t ps_host_bytes_available(ps_backend *be);
const char *ps_host_limited_by(void);   /* the limit that the system has reached: "of its address space (ulimit -v)"
                                         * ... */
/* For a backend that pins host memory: sets the function that is called before bytes of any region lose their
 * memory. There is only one such function; NULL means none. */
void ps_host_region_watch(void (*goes)(void *p, size_t nbytes));
#endif
