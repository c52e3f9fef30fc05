/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the emulator's own files. The sources for which it emulates a device only include cuda_runtime.h. */
#ifndef PS_EMULATE_H
#define PS_EMULATE_H
#include "cuda_runtime.h"
#include <mutex>

/* A call of the runtime. Only one call runs at a time, over all threads. The thread that forces the work of streams
 * performs it. */
struct ps_emu_entry {
    std::unique_lock<std::mutex> lock;
    ps_emu_entry(void);
    ~ps_emu_entry();
    void wait_all(void);                       /* waits until no stream has work left */
};

/* Returns the result of a call: e, which the thread's cudaGetLastError also returns, or the device's error after the
 * device failed. */
cudaError_t ps_emu_say(cudaError_t e);
/* Makes the device fail, so that no queued work is performed any more. */
void ps_emu_fail(cudaError_t e);
/* Failures that a test requests (ps_emu_fail_calls): of the device, at any call of the runtime; of memory, at calls
 * that allocate device memory or pin host memory; of cuBLASLt. ps_emu_fails returns whether this call must fail. */
enum { PS_EMU_FAIL_DEVICE, PS_EMU_FAIL_MEMORY, PS_EMU_FAIL_LIBRARY, PS_EMU_FAILURES };
bool ps_emu_fails(int kind);
/* Reports an action that no program may perform. The process ends with this text. */
void ps_emu_wrong(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));
/* Returns a whole number from the environment. */
int64_t ps_emu_number(const char *name, int64_t otherwise);
bool ps_emu_chance(unsigned one_of);           /* returns false if streams are not mixed */

/* Counts of what a step should not do. waits: waits for a stream, the device, or an event that had not been waited
 * for. pageable: copies between the device and host memory that is not pinned, which make the host wait or are
 * staged. allocations: allocations of device memory and pinned memory, and calls that pin host memory. frees: the
 * reverse of allocations. copies: all copies between device and host. nbytes: the bytes of these copies. */
struct ps_emu_counts { int64_t waits, pageable, allocations, frees, copies, nbytes; };
extern ps_emu_counts ps_emu_count;

/* -- memory.cpp ---------------------------------------------------------------------------------------------------- */
enum { PS_EMU_PAGEABLE, PS_EMU_PINNED, PS_EMU_PARTLY };
int ps_emu_is_pinned(const void *p, size_t n);
bool ps_emu_on_device(const void *p, size_t n);      /* returns whether a range is inside allocated memory */
/* Marks host memory that a queued copy uses. It must neither be freed nor unpinned until the copy is complete. */
void ps_emu_host_begins(const void *p, size_t n);
void ps_emu_host_ends(const void *p, size_t n);
bool ps_emu_host_in_use(const void *p, size_t n);
/* Device memory can be accessed only while work of streams is in progress, or always if work is performed
 * immediately. */
void ps_emu_show_memory(bool shown);
extern thread_local const char *ps_emu_doing;        /* the stream work that this thread performs, or NULL */

/* -- fibres.cpp ---------------------------------------------------------------------------------------------------- */
int ps_emu_thread_index(void);                 /* index of the running thread in its block */
bool ps_emu_early(void);                       /* whether asynchronous work happens immediately in this block */

/* -- wgmma.cpp ----------------------------------------------------------------------------------------------------- */
void ps_emu_wgmma_begin(int n_threads, size_t shared_nbytes);        /* begins a block */
void ps_emu_wgmma_end(void);
void ps_emu_copied(int thread, void *dst, int nbytes);   /* reports that an asynchronous copy was waited for */
#endif
