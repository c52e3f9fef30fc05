/* SPDX-License-Identifier: BSD-3-Clause
 * The public C API of psluajit. The text between the two cdef marks is, word for word, what Lua declares through the
 * FFI, so it contains only enums, opaque and plain structs and prototypes: no preprocessor, no inline, no struct by
 * value. For the same reason it is one file, and longer than files of code may be.
 *
 * Conventions. `_new` and `out` parameters give the caller a reference to release; `_get` lends. Sizes: `numel` counts
 * elements, `nbytes` counts bytes. Dimensions, tensors and ids count from 0; ranges are half-open. A context and its
 * tensors belong to one thread. Loaders and files may be used from any one thread at a time.
 *
 * Errors. A function that can fail returns 0 (or a number that is not negative) or a negative PS_E* code, and leaves a
 * message (ps_error_message). Outputs are untouched on failure. The comment of a function, or of the group of functions
 * to which it belongs, names its codes and their causes. Three codes have one cause everywhere, which is not repeated:
 * PS_EINVAL, an argument is NULL, of a wrong size, shape or type, or contradicts another one; PS_ENOMEM, there is no
 * memory for records, for a result or for work space; PS_ESTATE, the context is closed. A call that runs ops also
 * returns the errors of ps_apply. */
#ifndef PS_H
#define PS_H
#include <stddef.h>
#include <stdint.h>
#include "ps_gen.h" /* enums of errors and ops and the structs ps_attrs_<op>, generated from ops.def and errors.def */

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)    /* CMakeLists.txt hides all other symbols of the engine. */

/* @cdef */
enum { PS_MAX_DIMS = 8, PS_MAX_IN = 64, PS_MAX_OUT = 8, PS_MAX_ATTRS = 256,
       PS_MAX_PIECES = 8 /* maximum number of pieces in which an op exchanges rows while it multiplies them */,
       PS_MAX_COLUMNS = 3 /* maximum number of products of rows that are gathered once */ };
enum { PS_F32, PS_BF16, PS_F16, PS_F64, PS_I32, PS_I64, PS_U8, PS_BOOL, PS_DTYPE_COUNT };

typedef struct ps_ctx ps_ctx;
typedef struct ps_storage ps_storage;
typedef struct ps_node ps_node;

/* A tensor: a strided view of a storage. Scripts may read the fields dtype_ to stride_. Strides and offset count
 * elements. */
typedef struct ps_tensor {
  int32_t dtype_, ndim, device_, flags;   /* These names end in `_` because scripts have methods named dtype and
                                           * device. */
  int64_t numel_, offset;
  int64_t shape_[8];
  int64_t stride_[8];
  /* private */
  int32_t refs, node_out;
  ps_ctx *ctx;
  ps_storage *storage;
  ps_node *node;               /* node of the op that computed the tensor, if backward may pass that op */
  struct ps_tensor *grad_;     /* gradient, for leaves only */
  void *managed;               /* an engine's record of this parameter or NULL, for leaves only */
  ps_node *hook;               /* node where the leaf's gradients are summed before its hooks run; NULL for tensors
                                * that are not leaves with hooks */
} ps_tensor;
/* GRAD_F32: this leaf's gradients are summed in fp32. SLOT: the tensor is a gradient that is stored in its
 * parameter's place. LATER: the tensor is a gradient that will be read when deferred weight gradients are computed. */
enum { PS_T_REQUIRES_GRAD = 1, PS_T_GRAD_F32 = 2, PS_T_SLOT = 4, PS_T_LATER = 8 };

/* -- errors: the last one of this thread ------------------------------------------------------------------------- */
const char *ps_error_message(void);
const char *ps_error_where(void);        /* file:line in the engine's source where the error was raised */
const char *ps_error_op(void);           /* name of the op that was running, or NULL */
const char *ps_error_name(int code);     /* "EINVAL" ... */
const char *ps_error_sub_name(int sub);  /* name such as "OP_CHUNKS", or NULL for PS_SUB_NONE */
/* Numbers on which a program can act without parsing the message. A field is -1 if the error does not have this
 * number. */
typedef struct ps_error_detail {
  int32_t sub;                 /* PS_SUB_*: a finer code within the error's code */
  int32_t tier;                /* index of the tier without room (ps_engine_tier_get), -1 also for memory outside
                                * tiers */
  int32_t rank, stripe;        /* rank that caused the error, and its stripe of chunks */
  int32_t other_rank, other_stripe;       /* the other rank and its stripe, if two ranks do not match */
  int64_t wanted, left;        /* bytes wanted at once, and bytes left for them. `left` is negative if the tier's
                                * other contents alone exceed it. If `wanted` is -1, neither number is known. */
  int32_t final;               /* 1 if the group of ranks has ended with this error, so that no repetition of the call
                                * can succeed; otherwise 0 */
} ps_error_detail;
const ps_error_detail *ps_error_get_detail(void);   /* details of the last error, valid until this thread's next
                                                     * error */
const char *ps_version(void);
const char *ps_abi_hash(void);           /* hash of the text of these declarations, which the Lua half compares with
                                          * its own */

/* -- context ----------------------------------------------------------------------------------------------------- */
int ps_ctx_new(ps_ctx **out);           /* PS_ENOMEM */
void ps_ctx_free(ps_ctx *ctx);           /* Frees the context. Tensors that are still held become valid headers
                                          * without bytes. */
/* A simulated machine. host_nbytes is its free memory (0: the memory of this machine). device_nbytes is the memory
 * of its GPU, the device cuda (0: no GPU). device_total is the GPU's whole memory, including bytes that the engine
 * cannot use. device_sms is the number of its multiprocessors. device_total and device_sms determine the workspace
 * of kernels. If they are 0, kernels get the workspace of the processor's kernels. */
typedef struct ps_machine { int64_t host_nbytes, device_nbytes, device_total, device_sms; } ps_machine;
/* Makes all later contexts simulate the devices of `machine` without their memory: ops allocate but do not compute,
 * the disk tier has no file, and only values that a script writes exist. PS_EINVAL: `machine` is NULL or has a
 * negative size. */
int ps_machine_pretend(const ps_machine *machine);
int ps_machine_pretended(void);          /* 1 after ps_machine_pretend, else 0 */
int ps_device_count(ps_ctx *ctx);
const char *ps_device_name(ps_ctx *ctx, int device);                 /* "cpu", "ref", "meta" ... */
const char *ps_device_describe(ps_ctx *ctx, int device);             /* instruction set, threads and libraries that
                                                                      * the device uses */
/* Finds a device by name, and opens "cuda" at its first use. PS_EUNSUP: there is no such device, or it cannot be
 * opened. */
int ps_device_find(ps_ctx *ctx, const char *name, int *out);
/* The abilities of a device. is_host: the processor can read its memory. has_data: its tensors have contents (those
 * of meta have none). fast_bf16: it multiplies bf16 faster than fp32. fuses: an op that combines several ops runs
 * faster on it than the single ops. PS_EINVAL: there is no such device. */
typedef struct ps_device_info { uint8_t is_host, has_data, fast_bf16, fuses; } ps_device_info;
int ps_device_info_get(ps_ctx *ctx, int device, ps_device_info *out);
/* Sets this process's index on its machine. If the machine has several cards, the index selects the card when "cuda"
 * is opened. -1 means the index in a launcher's variables. */
void ps_local_rank_set(int local_rank);
/* Bytes of a device's memory: used by tensors, the peak of that use, reserved from the system, and the limit (0: no
 * limit). */
typedef struct ps_memory_info { int64_t used, peak, reserved, limit; } ps_memory_info;
int ps_memory_get(ps_ctx *ctx, int device, ps_memory_info *out);     /* PS_EINVAL: there is no such device */
int ps_memory_set_limit(ps_ctx *ctx, int device, int64_t nbytes);    /* PS_EINVAL: there is no such device, or nbytes
                                                                      * is negative */
void ps_memory_reset_peak(ps_ctx *ctx, int device);
/* Lists the largest tensors outside chunks in a device's memory, largest first. `when` selects the tensors that
 * exist NOW, those that existed at the PEAK of use (within 1/256 of it), or those that existed at the last FAILED
 * allocation. For the last, device -1 means the device that refused the allocation. Returns the number of tensors,
 * at most PS_HOLDERS. Sets *used to the bytes that were in use at that time. PS_EINVAL: there is no such device or
 * no such `when`. */
enum { PS_HOLDERS = 16 };
enum { PS_HOLD_NOW, PS_HOLD_PEAK, PS_HOLD_FAILED };
typedef struct ps_holder {
  int64_t nbytes;
  const char *op;              /* op that made the tensor; NULL if no op did, for example for ps.zeros */
  int32_t module;              /* module that was running (ps_module_enter); for an op of backward, the module of its
                                * forward op; 0 if none */
  int32_t line;                /* line from ps_tensor_note_line, 0 if none */
  uint8_t backward, scratch;   /* backward: a gradient rule made the tensor. scratch: the tensor is a kernel's
                                * workspace. */
  uint8_t pad[6];
} ps_holder;
int ps_memory_holders(ps_ctx *ctx, int device, int when, ps_holder *out, int64_t *used);
int64_t ps_memory_available(ps_ctx *ctx, int device);     /* bytes that can still be allocated, or -1 if there is no
                                                           * such device */
/* Returns whether Lua should collect garbage. Lua's collector frees the bytes of tensors that a script no longer
 * refers to and that no scope drops. A collection is due when tensors outside chunks have grown by a quarter since
 * the last one. The result is true only once until ps_collected is called. */
int ps_collect_due(ps_ctx *ctx);
/* Returns the bytes of tensors that were made since the last collection, minus the bytes of tensors that were freed
 * since then. The result can be negative. */
int64_t ps_collect_waiting(const ps_ctx *ctx);
/* Must be called after a collection. The next collection is due when tensors have grown by a quarter of the bytes in
 * use, and by `least` bytes or more. */
void ps_collected(ps_ctx *ctx, int64_t least);

/* -- tensors ----------------------------------------------------------------------------------------------------- */
int64_t ps_dtype_size(int dtype);        /* bytes per element */
const char *ps_dtype_name(int dtype);    /* "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "bool" */
/* Makes a tensor with undefined contents. PS_EINVAL: there is no such type or device, or the shape is out of range.
 * PS_ENOMEM: the message has the device, the bytes wanted and the bytes free. */
int ps_tensor_new(ps_ctx *ctx, int dtype, int device, int ndim, const int64_t *shape, ps_tensor **out);
void ps_tensor_retain(ps_tensor *t);
void ps_tensor_release(ps_tensor *t);
void ps_tensor_note_line(ps_tensor *t, int32_t line);       /* records the script line that made the tensor, as a
                                                             * number that the caller chooses */
void ps_tensor_drop(ps_tensor *t);         /* frees the tensor's bytes unless other tensors share them; its header
                                            * stays */
int ps_tensor_keep(ps_tensor *t);        /* lets the tensor outlive every scope until it is released. PS_ESTALE: its
                                          * bytes are gone */
int ps_tensor_alive(const ps_tensor *t); /* returns 0 if a scope has dropped the tensor's bytes */
/* Replaces the bytes, device and strides of t, and of everything that refers to t, by those of `from`. The bytes
 * that t had are freed. Used for a leaf that was made without data (device meta) and gets its values later.
 * PS_EINVAL: type or shape differ. PS_ESTALE: the bytes of `from` are gone. PS_ESTATE: an op computed t, t has a
 * gradient, or its bytes are in use. */
int ps_tensor_set_data(ps_tensor *t, ps_tensor *from);
int64_t ps_tensor_nbytes(const ps_tensor *t);        /* numel times element size */
int ps_tensor_is_contiguous(const ps_tensor *t);
uint32_t ps_tensor_version(const ps_tensor *t);      /* returns a number that increases with every write to the
                                                      * tensor's bytes */
/* Copies the whole contents, row-major, between host memory and a contiguous tensor. PS_EINVAL: nbytes is not
 * exactly the tensor's size. PS_ESTALE: the tensor's bytes are gone. PS_EUNSUP: the tensor is not contiguous, or is
 * on a device without contents. PS_EDRY: a read in a dry run. */
int ps_tensor_write(ps_tensor *t, const void *src, int64_t nbytes);
/* Reads nbytes bytes of a source, from offset `at` on, into dst. Several threads can call this function at the same
 * time. Returns 0 or an error code. */
typedef int (*ps_reader)(const void *from, int64_t at, void *dst, int64_t nbytes);
/* Like ps_tensor_write, but gets the bytes from a reader, which all compute threads call. Host memory is filled
 * without an extra copy. Also returns errors of the reader; the tensor then has a mixture of old and new contents. */
int ps_tensor_load(ps_tensor *t, ps_reader read, const void *from, int64_t at, int64_t nbytes);
/* Borrowed bytes. A tensor may use them as its own, and write to them. */
typedef struct ps_loan {
    void *bytes;
    int (*check)(void *lender);          /* called before each use: returns 0 if the bytes are unchanged, else an
                                          * error code */
    void (*end)(void *lender);           /* called when the bytes are no longer used */
    void *lender;
    /* Returns a descriptor of the file whose reads bypass the page cache, and the offset of the bytes in the file. The
     * lender closes it. Returns -1 if there is none. May be NULL. */
    int (*direct)(void *lender, int64_t *at);
} ps_loan;
/* Lends nbytes bytes of a source, from offset `at` on. Returns 0 or an error code. */
typedef int (*ps_lender)(void *from, int64_t at, int64_t nbytes, ps_loan *out);
/* Like ps_tensor_load, but the tensor uses the lender's bytes from now on, without a copy, and its previous bytes
 * are freed. The loan ends when the tensor is freed or when its bytes move into a chunk. PS_EUNSUP, without an
 * effect: the tensor is a view of part of a storage, or is not in host memory outside chunks, or its elements would
 * not be aligned to their size. PS_ESTATE: the tensor is in use. Also returns errors of the lender. */
int ps_tensor_borrow(ps_tensor *t, ps_lender lend, void *from, int64_t at, int64_t nbytes);
/* A range of a lender's bytes: `width` bytes of each block of a tensor. */
typedef struct ps_lent_range { void *from; int64_t at, width; } ps_lent_range;
enum { PS_BLOCK_WIDTH = 1 << 16 };
/* Like ps_tensor_borrow, for a uint8 tensor of blocks: each has the next ranges[0].width bytes from ranges[0].at on,
 * then the next ranges[1].width bytes from ranges[1].at on. Both are at most PS_BLOCK_WIDTH. If the tensor moves into a
 * chunk that reads its bytes from a file, both ranges are read. The first other use copies the bytes to memory.
 * PS_EINVAL: a width is not allowed, or blocks do not fill the tensor. Also returns errors of ps_tensor_borrow. */
int ps_tensor_borrow_blocks(ps_tensor *t, ps_lender lend, const ps_lent_range *ranges);
int ps_tensor_is_lent(const ps_tensor *t);    /* 1 if the bytes belong to a lender */
int ps_tensor_read(const ps_tensor *t, void *dst, int64_t nbytes);
/* Like ps_tensor_read, for contents that will be written to a file: after ps_machine_pretend, a tensor without
 * values yields zeros. Returns errors of ps_tensor_read. */
int ps_tensor_save(const ps_tensor *t, void *dst, int64_t nbytes);
/* Computes XXH3 of the bytes of a contiguous tensor in host memory, inside or outside chunks. PS_EUNSUP: the tensor
 * is not contiguous, or not in host memory. PS_ESTALE: its bytes are gone. */
int ps_tensor_hash(ps_tensor *t, uint64_t *out);
/* Statistics of a host tensor with any strides, all in fp64. PS_ESTALE: its bytes are gone. PS_EUNSUP: the processor
 * cannot read the device's memory. PS_EDRY: the tensor was made in a dry run. */
typedef struct ps_stats {
  int64_t numel;
  double mean;                 /* NaN if there are no elements */
  double squares;              /* sum of (x - mean)^2; PyTorch's variance is this sum divided by numel - 1 */
  double min, max;             /* NaN if there are no elements, or if an element is NaN */
} ps_stats;
int ps_tensor_stats(const ps_tensor *t, ps_stats *out);
/* Returns the address of a contiguous tensor's bytes in host memory outside chunks, valid as long as the tensor has
 * these bytes. PS_EUNSUP: any other tensor. PS_EDRY: the tensor was made in a dry run. */
int ps_tensor_address(ps_tensor *t, void **out);
/* Reads elements of a host tensor with any strides as doubles, from the flat (row-major) position `first` on, for
 * printing and item(). PS_ERANGE: the tensor has no such positions. PS_ESTALE: its bytes are gone. PS_EUNSUP: the
 * processor cannot read the device's memory. PS_EDRY: the tensor was made in a dry run. */
int ps_tensor_read_f64(const ps_tensor *t, int64_t first, int64_t numel, double *dst);
int ps_tensor_write_f64(ps_tensor *t, int64_t first, int64_t numel, const double *src);
/* Returns a copy of t on a device. If t is already there, returns t itself, retained. Returns errors of ps_apply. */
int ps_tensor_to_device(ps_tensor *t, int device, ps_tensor **out);
/* Returns the indices of the nonzero elements of a tensor on a host device, int64 [count, ndim]. PS_EUNSUP: another
 * device. PS_EDRY: a call in a dry run. PS_ESTALE: the tensor's bytes are gone. */
int ps_tensor_nonzero(ps_tensor *t, ps_tensor **out);

/* -- ops --------------------------------------------------------------------------------------------------------- */
/* Runs op `op` (PS_OP_*) on n_in inputs (NULL for an absent optional input). attrs is the op's struct ps_attrs_<op>.
 * `out` has PS_MAX_OUT entries. If an entry is not NULL on entry, the op writes into that tensor; only some ops
 * declare this. PS_EINVAL: inputs or attributes do not fit the op; the message has all shapes and types. PS_ESTALE:
 * the bytes of an input are gone, or it was made in a dry run. PS_ERANGE: an index or target is out of range.
 * PS_EUNSUP: there is no kernel for the device and types. PS_ENOMEM: the message has the device or tier, the bytes
 * wanted and the bytes free. PS_EBACKEND: the device failed. PS_EIO, PS_ENOSPC: a chunk could not be moved to or
 * from the disk. PS_ETIME, PS_EIO: errors of ranks (see groups). */
int ps_apply(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int64_t attrs_nbytes,
             ps_tensor **out);
/* Computes attention of T new positions after `at` positions whose keys and values are cached. Appends the T keys
 * and values to the caches and returns the result [B, T, H D], in which each position sees itself and all earlier
 * positions. Runs the ops copy_, rope and attention on views, and has no gradient.
 *   Separate inputs: q is [B, T, H D]; k and v are [B, T, G D] (or all three [B, T, H or G, D]); the caches keys
 *   and values are [B, G, S, D]; cos and sin are rope's, or both NULL.
 *   Fused input: q is [B, T, (H + 2 G) D], queries, then keys, then values; the cache keys is [B, 2 G, S, D], keys,
 *   then values; k, v, values, cos and sin are NULL.
 * The caches have the type of q, or bf16 or fp16 if q is not fp64, or uint8 [B, G, S, D / 32 * 34] with rows of
 * Q8_0. mask is bool [B, at + T], or NULL. PS_EINVAL: also if a gradient would be needed. Also returns errors of
 * ps_apply. */
typedef struct ps_cached_attention {
  int64_t heads, groups, at;   /* query heads H, key heads G, cached positions */
  int32_t window, pad;         /* window as in the op attention */
  double scale;                /* factor on scores; 0 means 1 / sqrt(D) */
} ps_cached_attention;
int ps_attention_cached(ps_ctx *ctx, const ps_cached_attention *how, ps_tensor *q, ps_tensor *k, ps_tensor *v,
                        ps_tensor *keys, ps_tensor *values, ps_tensor *cos, ps_tensor *sin, ps_tensor *mask,
                        ps_tensor **out);
/* The cost of an op. flops counts the multiplications and additions of matrix products and attention (for attention,
 * only of query-key pairs that see each other), and is 0 for other ops. bytes counts each byte that the op reads or
 * writes once. */
typedef struct ps_op_cost_info { int64_t flops, bytes; } ps_op_cost_info;
/* Computes the cost of an op with these operands, of which only types and shapes are read. attrs is as in ps_apply.
 * `out` has n_out entries, NULL for an absent output. PS_EINVAL: there is no such op, or it does not support these
 * operands. */
int ps_op_cost(int op, int n_in, ps_tensor *const *in, const void *attrs, int n_out, ps_tensor *const *out,
               ps_op_cost_info *cost);
/* Turns anomaly mode on or off. In this mode an op that makes a NaN or an infinity fails (PS_ERANGE,
 * PS_SUB_ANOMALY); tensor/anomaly.c has the rules. The outputs of each op are read, so training is several times
 * slower. Returns the previous setting; never fails. */
int ps_detect_anomaly(ps_ctx *ctx, int on);
void ps_anomaly_at(ps_ctx *ctx, int64_t place);     /* sets the caller's number for the place in the script that
                                                     * calls the following ops */
/* If `on` is 1, the next op scales the loss, and gradients can overflow. Infinities in backward are then ignored, until
 * a call with `on` 0, which must follow the step. */
void ps_anomaly_scaled(ps_ctx *ctx, int on);
typedef struct ps_anomaly_info {
  int64_t place;               /* place that called the op, or called the op whose gradient it computed; -1 if
                                * unknown */
  int32_t op;                  /* PS_OP_* of the op that made the NaN or infinity */
  int32_t of;                  /* PS_OP_* of the op whose gradient was computed, -1 outside backward */
  int32_t nan;                 /* 1 for a NaN, 0 for an infinity */
  int32_t module;              /* module that called the op (ps_module_enter), 0 if none */
} ps_anomaly_info;
void ps_anomaly_get(ps_ctx *ctx, ps_anomaly_info *out);     /* describes the last error of anomaly mode */
int ps_op_kernel_device(ps_ctx *ctx, int device, int op);  /* returns the device whose kernel runs the op on
                                                            * `device`, or -1 */

/* -- the record of events (docs/profiling.md) -----------------------------------------------------------------------
 * One ring buffer per process. Times are nanoseconds by the clock of ps_now. The fields of each kind of event:
 *   OP: name is the op, from the device, to its first input's type; on is 1 if the device's own clock measured it.
 *   PART: a product within an op of several ranks. Fields as for OP; id is its rows.
 *   MODULE: the time that a module ran.
 *   STEP: name is 1 if the step was the first, or had no plan.
 *   ACTION: name is PS_ACT_*, id the micro-batch, to the virtual stage.
 *   COPY: name is 0 for up and 1 for down, id the chunk, from and to the tiers.
 *   DISK: name is 0 for a read and 1 for a write.
 *   COLLECTIVE: name is an index for ps_record_call_name, id the group, on its number of ranks.
 *   WAIT: name is PS_WAIT_*, id the chunk or -1.
 *   CHUNK: name is PS_CHUNK_*, id the chunk, of its kind (PS_KIND_*), to the tier that changed, on a bit set of the
 *   tiers on which the chunk has memory.
 *   TIER: to is the tier, bytes are those of chunks.
 *   DEVICE: as TIER, for a device without chunks. */
enum { PS_REC_OP = 1, PS_REC_MODULE, PS_REC_STEP, PS_REC_ACTION, PS_REC_COPY, PS_REC_DISK, PS_REC_COLLECTIVE,
       PS_REC_WAIT, PS_REC_CHUNK, PS_REC_TIER, PS_REC_DEVICE, PS_REC_PART };
enum { PS_WAIT_COPY, PS_WAIT_COLLECTIVE, PS_WAIT_MESSAGE };
enum { PS_CHUNK_ALLOCATE, PS_CHUNK_MOVE, PS_CHUNK_RELEASE, PS_CHUNK_THERE };   /* THERE: existed when the record
                                                                                * began */
enum { PS_RECORD_MOST = 1 << 26 };       /* maximum number of events in a record, 64 bytes each */
typedef struct ps_record_event {
  int64_t begin_ns, end_ns;
  int64_t number;              /* sequence number from 1, in the order in which events end */
  int64_t bytes;
  int64_t flops;               /* FLOPs of an OP; for a TIER or DEVICE, bytes of tensors outside chunks */
  int32_t step, module;        /* 0: none */
  int32_t id, of;
  uint16_t name, on;
  uint8_t kind, action, from, to;
} ps_record_event;
typedef struct ps_record_total { int64_t calls, ns, bytes, flops; } ps_record_total;
/* Begins a record of the last `events` events, and drops an earlier record. PS_EINVAL: `events` is too large.
 * PS_ENOMEM. */
int ps_record_start(int64_t events);
void ps_record_stop(void);
int ps_record_is_on(void);
void ps_record_settle(ps_ctx *ctx);      /* waits for devices whose latest work is not in the record yet */
int64_t ps_record_count(int64_t *dropped);           /* number of events in the record; *dropped: events that were
                                                      * overwritten */
/* Reads event i, oldest first. Returns 1 if the event is just being overwritten. PS_ERANGE: there is no event i. */
int ps_record_get(int64_t i, ps_record_event *out);
int ps_record_op_total(int op, ps_record_total *out);    /* totals of all calls, including those overwritten.
                                                          * PS_EINVAL: there is no such op */
const char *ps_record_call_name(int name);           /* name of a COLLECTIVE's call, or NULL if there is no such
                                                      * index */
int64_t ps_record_clock(void);           /* returns the current time in nanoseconds, by the events' clock */
/* Counts the operations (ps_op_cost) of all ops that run while counting is on, except in dry runs. Counting needs no
 * record. `on` 1 begins a count, 0 ends one; counts can be nested. */
void ps_flops_count(int on);
int64_t ps_flops_counted(void);
/* Sums up the calls between ranks (the COLLECTIVE events of a record) by call, group and size. The sums need no
 * record, and exclude the calls that a record excludes. `names` is the bit set of the calls to count, by index of
 * ps_record_call_name; 0 stops counting. A call that begins counting drops earlier sums. If `verbose` is 1, each
 * call is printed when it ends. */
void ps_calls_count(uint32_t names, int verbose);
typedef struct ps_calls_total {
  int32_t name, group, ranks, pad;     /* group: index of the group, or -1 */
  int64_t nbytes;                      /* bytes of the whole tensor */
  int64_t calls, ns;
  char axis[16];                       /* name of the group, such as "tp", or "" for all ranks */
} ps_calls_total;
/* Returns sum i, from 0, in the order of the first calls. Returns 1 if there is no sum i. The call never fails. */
int ps_calls_total_get(int64_t i, ps_calls_total *out);
/* Returns the bytes that a call sends over each rank's link, per byte of the whole tensor. Multiplied by bytes per
 * second this is the "bus bandwidth" of NCCL's tests. With n ranks it is 2 (n - 1) / n for a sum that all ranks get,
 * (n - 1) / n for a gather and for a sum of which each rank gets a shard, and 1 for other calls. */
double ps_calls_bus(int name, int ranks);
/* These functions enter and leave a module, whose id is positive. ps_module_enter returns the depth, which
 * ps_module_leave needs, and never fails. Errors of memory contain the running module, even without a record. The
 * end of a scope leaves the modules that were entered in the scope. */
int ps_module_enter(int id);
void ps_module_leave(int depth);
int ps_module_now(void);                 /* 0: none */

/* -- scopes: at the end the bytes of tensors that were made inside and not kept are dropped ------------------------ */
int ps_scope_begin(ps_ctx *ctx, int64_t *id);               /* PS_ENOMEM */
/* Ends the scope and all scopes within it. The tensors `keep` survive into the outer scope. PS_ESTATE: the scope is
 * not open. */
int ps_scope_end(ps_ctx *ctx, int64_t id, int n_keep, ps_tensor *const *keep);
int64_t ps_scope_depth(ps_ctx *ctx);

/* -- gradients --------------------------------------------------------------------------------------------------- */
int ps_grad_enabled(ps_ctx *ctx);
/* Turns offloading of activations on or off. While it is on, tensors that backward will read are moved from a device
 * to host memory: inputs of recompute segments, and tensors that only the tape still holds at the end of a scope.
 * Returns the previous setting. PS_EUNSUP: there is no host device. */
int ps_set_offload(ps_ctx *ctx, int on);
int ps_set_grad_enabled(ps_ctx *ctx, int enabled);          /* returns the previous setting and never fails */
/* Turns keeping cheap outputs on or off. While it is on, outputs of CHEAP ops (norms, GELU, SwiGLU) are kept for
 * backward instead of recomputed. This costs memory, does not change bits, and saves 1 to 2 % of the time on a GPU.
 * Returns the previous setting; never fails. */
int ps_set_keep_cheap(ps_ctx *ctx, int on);
int ps_tensor_require_grad(ps_tensor *t, int on);           /* PS_EINVAL: the tensor is not a leaf, or not of a float
                                                             * type */
ps_tensor *ps_tensor_get_grad(ps_tensor *t);                /* the gradient, lent, or NULL */
/* Sets t's gradient, which is retained; NULL clears it. PS_EINVAL: `grad` is not a float tensor of t's shape on t's
 * device. PS_ESTALE: its bytes are gone. */
int ps_tensor_set_grad(ps_tensor *t, ps_tensor *grad);
/* Makes backward copy the gradient of t, which an op computed, to the gradient of `holder`, a tensor of t's shape
 * without history (ps_tensor_detach makes one). PS_EINVAL: no op computed t, or gradients were off; or shape, type
 * or device differ. PS_ENOMEM. */
int ps_tensor_keep_grad(ps_tensor *t, ps_tensor *holder);
int ps_tensor_detach(ps_tensor *t, ps_tensor **out);        /* returns a tensor with the same bytes and no history.
                                                             * PS_ENOMEM */
/* Returns 1 if t is one of n tensors, or if recorded ops made it from one of them, else 0. PS_ENOMEM. */
int ps_tensor_made_from(const ps_tensor *t, int n, ps_tensor *const *from);
/* Returns the sequence number of the op that made t; it increases with each recorded op. Returns -1 if no recorded
 * op made t. The number stays valid after t is freed. */
int64_t ps_tensor_op_number(const ps_tensor *t);
/* Sets found[i] to 1 if the op with sequence number ops[i] made t, or if recorded ops made t from that op's result;
 * else to 0. The search does not go past an op that it has found. PS_ENOMEM. */
int ps_tensor_made_by(const ps_tensor *t, int n, const int64_t *ops, int8_t *found);
/* Walks the tape backward from n roots at once. Each root has a gradient of its shape, or NULL if the root is a
 * single value. If `gradients` is NULL, no root has a gradient. The walk uses up the nodes that lead to the roots: a
 * second walk through them fails with PS_ESTATE.
 *   begin_n also starts walking unless `segment` is NULL; it then returns the result of next.
 *   next returns 0 if the walk has ended and 1 if it has stopped. *segment is then the id of what it stopped at: a
 *   recompute segment (ps_segment_new), which the caller runs again before it calls ps_backward_splice; a function of
 *   the script (ps_call_new), whose backward ends with ps_call_done; or hooks (ps_tensor_hook), which end with
 *   ps_hooks_done. The caller then calls next again.
 *   ps_backward_end abandons the walk under way, if there is one.
 * An error ends the walk. PS_EINVAL: a root depends on nothing that requires a gradient, or its gradient has another
 * shape. PS_ESTATE: a walk is already under way, or (next) none is. PS_ESTALE: a tensor that a gradient rule reads
 * was changed in place, or its bytes are gone. Gradient rules run ops: errors of ps_apply. */
enum { PS_MAX_ROOTS = 64 };
int ps_backward_begin_n(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int64_t *segment);
int ps_backward_next(ps_ctx *ctx, int64_t *segment);
/* Like ps_backward_begin_n, with two additions. If keep is 1, the nodes are not used up, and another walk can pass
 * them. If n_to > 0, the walk passes only nodes that lead to the tensors `to`, and no leaf gets a gradient. After
 * the walk, ps_backward_taken returns the gradients of `to`, one reference each, or NULL for a tensor that no
 * gradient reached. PS_EINVAL: a tensor of `to` requires no gradient, or occurs twice; or (taken) n differs from
 * n_to. PS_ESTATE: a walk is under way. PS_ENOMEM. */
int ps_backward_for(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int keep, int n_to,
                    ps_tensor *const *to, int64_t *segment);
int ps_backward_taken(ps_ctx *ctx, int n, ps_tensor **gradients);
/* Returns the gradient, lent, of output `out` of the node where the walk is stopped, unless the node is a segment.
 * *gradient is NULL if no gradient arrived. PS_ESTATE: the walk is not stopped. PS_ERANGE: there is no such output. */
int ps_stop_gradient(ps_ctx *ctx, int out, ps_tensor **gradient);
/* Records a function whose backward the caller computes. The tensors `out` were computed with gradients off and
 * become functions of `in`. An entry of `in` is NULL if that input is not a tensor; an entry of `out` is NULL if
 * that output gets no gradient. The tensors `saved` (NULL if there are none) are kept for backward and checked
 * against changes in place like other saved tensors. Call ps_segment_begin before the function runs, and
 * ps_segment_cancel if the function fails or needs no node. *id is the caller's id for the function. Returns 1 as
 * ps_segment_new does. PS_EINVAL: there is no input or output, or an output has a history, is not a float tensor, or
 * occurs twice. PS_ESTALE: the bytes of a saved tensor are gone. PS_ENOMEM. */
int ps_call_new(ps_ctx *ctx, const char *name, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out,
                int n_saved, ps_tensor *const *saved, int64_t *id);
/* Returns saved tensor i, lent, of the function where the walk is stopped. PS_ESTATE: the walk is not stopped at a
 * function. PS_ESTALE: the tensor was changed in place. PS_ERANGE: there is no saved tensor i. */
int ps_call_saved(ps_ctx *ctx, int i, ps_tensor **out);
/* Passes on the gradients of all inputs of the function, with NULL for an input without a gradient. Gradients of
 * inputs that require no gradient are ignored. `devices` contains the devices of the inputs. PS_EINVAL: n is not the
 * number of inputs that ps_call_new got, or a gradient has another shape, type or device; fp32 is allowed for a half
 * type. PS_ESTALE: the bytes of a gradient are gone. Also returns errors of ps_apply. */
int ps_call_done(ps_ctx *ctx, int n, ps_tensor *const *gradients, const int32_t *devices);
/* Makes the walk stop when the gradient of t is complete: before it passes the op that computed t or, if t is a
 * leaf, before it adds to t's gradient. *id is the id that the stopped walk returns, and *out is t's output index,
 * for the next two calls. An id is valid as long as the op's node or the leaf exists. Afterwards ps_segment_reap
 * returns the id. PS_EINVAL: t requires no gradient. PS_ESTATE: a walk has already passed the op. PS_ENOMEM. */
int ps_tensor_hook(ps_tensor *t, int64_t *id, int *out);
/* Replaces the gradient of output `out`. PS_ESTATE: the walk is not stopped at hooks. PS_EINVAL: the new gradient
 * has another shape, type or device. PS_ESTALE: its bytes are gone. PS_ERANGE: there is no such output. */
int ps_hook_replace(ps_ctx *ctx, int out, ps_tensor *gradient);
int ps_hooks_done(ps_ctx *ctx);          /* ends the stop at hooks. PS_ESTATE: the walk is not stopped at hooks */
/* Cuts the tape at the input of a pipeline stage. `out` gets n new headers of the tensors that the stage received,
 * and the tape records from these headers on. A walk that reaches the headers sums their gradients, as it does for
 * tensors that ops of this process made, and keeps the sums. ps_boundary_take returns the sums after the walk, one
 * reference each; a second call returns none. An entry is NULL if no gradient arrived (an integer tensor has none).
 * If gradients are off, nothing is recorded. A stage whose inputs need no gradient, because nothing before it is
 * trained, needs no boundary.
 *   To get the bits of the undivided model, received gradients must have no other owner while the walk runs: call
 *   ps_backward_begin_n with segment NULL, release the gradients, then call ps_backward_next.
 * PS_EINVAL: there are 0 tensors or more than PS_MAX_ROOTS, or a tensor has a history, or (take) belongs to no
 * boundary. PS_ESTATE: a walk is under way. PS_ESTALE: the bytes of a tensor are gone. PS_ENOMEM. */
int ps_boundary(ps_ctx *ctx, int n, ps_tensor *const *in, ps_tensor **out);
int ps_boundary_take(ps_ctx *ctx, int n, ps_tensor *const *out, ps_tensor **gradients);
/* Computes, within an action WEIGHT, the weight gradients that the walk of the same micro-batch and virtual stage
 * deferred during its action INPUT. Returns 1 if it stopped at hooks; the caller then continues with
 * ps_backward_next. Every parameter gets the additions of an undivided backward in the same order. The end of the
 * step drops the gradients that are still deferred. PS_ESTATE: no action WEIGHT is under way, no gradients were
 * deferred, or a walk is under way. PS_ESTALE: a tensor was changed in place meanwhile. Also returns errors of
 * ps_apply. */
int ps_backward_weights(ps_ctx *ctx, int64_t *stopped);
/* Passes the gradients of the stopped segment's outputs to the outputs of its second run. PS_EINVAL: n or a shape
 * differs from the first run. PS_ESTATE: the walk is not stopped at a segment. */
int ps_backward_splice(ps_ctx *ctx, int n, ps_tensor *const *out);
void ps_backward_end(ps_ctx *ctx);
/* Records a recompute segment (Chen et al. 2016): outputs that were computed without gradients become functions of
 * `in`, and backward computes them again. `segment` is the caller's id for it. The inputs are kept alive until the
 * walk has passed. Returns 1 if the function read parameters of an engine, so that it cannot run again once the
 * engine is closed. PS_EINVAL: there is no output, or an output already has a history. */
void ps_segment_begin(ps_ctx *ctx);      /* called before the function first runs: starts recording the parameters
                                          * that it reads */
int ps_segment_new(ps_ctx *ctx, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out, int64_t *segment);
void ps_segment_cancel(ps_ctx *ctx);     /* called instead of ps_segment_new if the function failed */
/* Returns the id of a segment that is no longer needed, whose function the caller can drop, or -1 if there is none. */
int64_t ps_segment_reap(ps_ctx *ctx);

/* -- random numbers: Philox (Salmon et al. 2011), keyed by seed ---------------------------------------------------- */
/* State of the random number generators. seed, step (the optimizer's), op (counts dropouts within a forward) and
 * sample (index of the batch's first sample) select dropout's random numbers. offset counts the numbers that
 * ps.randn and similar functions have drawn. */
typedef struct ps_rng { uint64_t seed, offset, step, sample; uint32_t op, pad; } ps_rng;
ps_rng *ps_rng_get(ps_ctx *ctx);         /* the state itself, which may be read and written; lent */

/* -- safetensors -------------------------------------------------------------------------------------------------- */
typedef struct ps_st ps_st;
typedef struct ps_st_entry {
    int32_t dtype, ndim;
    int64_t shape[8];
    int64_t at, nbytes;          /* at: position of the tensor's bytes, for ps_st_read */
} ps_st_entry; /* dtype is -1 for a type that this library does not support */
/* Maps the file and checks its whole header, and the header's checksum if there is one. PS_EIO: the file cannot be
 * read. PS_EFORMAT: the file is not a safetensors file, or is damaged. */
int ps_st_open(const char *path, ps_st **out);
void ps_st_close(ps_st *st);
int ps_st_count(const ps_st *st);
const char *ps_st_name(const ps_st *st, int i);
int ps_st_find(const ps_st *st, const char *name);          /* index of the tensor, or -1 */
int ps_st_get(const ps_st *st, int i, ps_st_entry *out);    /* describes tensor i. PS_ERANGE: there is no tensor i */
const char *ps_st_dtype_text(const ps_st *st, int i);       /* the type's name in the file, "F32" ... */
int ps_st_meta_count(const ps_st *st);
const char *ps_st_meta_key(const ps_st *st, int i);
const char *ps_st_meta_value(const ps_st *st, int i);
const void *ps_st_data(const ps_st *st, int i);             /* the tensor's bytes (nbytes of its entry), lent until
                                                             * close */
/* A ps_reader of an open file's data; `from` is the ps_st. It uses read calls, so the file occupies no memory, and a
 * truncation while the file is open is an error. PS_ERANGE: some of the bytes are outside the data. PS_EIO: they
 * cannot be read. */
int ps_st_read(const void *st, int64_t at, void *dst, int64_t nbytes);
/* Copies elements first to first + numel - 1 of a rectangle of tensor i, in row-major order. `offset` and `shape`
 * are the rectangle's start and size in each dimension of the tensor. PS_ERANGE: there is no tensor i, or part of
 * the range is outside it. PS_EUNSUP: the tensor's type is not supported. PS_EIO: the file was truncated. */
int ps_st_copy(const ps_st *st, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
               int64_t numel);
/* A ps_lender of an open file's data; `from` is the ps_st. Writes to the bytes change neither the file nor another
 * loan of the same bytes. The file stays open until the last loan ends, even after ps_st_close. PS_EIO, here and
 * whenever the bytes are used: the file was written to. PS_ERANGE: the bytes are outside the data. */
int ps_st_lend(void *st, int64_t at, int64_t nbytes, ps_loan *out);
void ps_st_drop(const ps_st *st, int i);                  /* frees the pages of tensor i's bytes in memory once they
                                                           * have been read */
/* Compares a tensor's bytes with their checksum. Returns 1 if they match and 0 if the file has no checksums.
 * PS_EFORMAT: the bytes are damaged. PS_EIO: the file was truncated. PS_ERANGE: there is no tensor i. */
int ps_st_verify(const ps_st *st, int i);
uint64_t ps_xxh3(const void *data, int64_t nbytes);         /* the 64-bit XXH3 that serves as checksum */
/* A writer: declare all tensors, begin, write each, commit. PS_ESTATE: a call out of this order. PS_EINVAL: a name
 * is a duplicate or not UTF-8, a size does not match the declaration, or the header is too large. PS_EIO: the file
 * cannot be written; the message has the bytes wanted and free. */
typedef struct ps_stw ps_stw;
int ps_stw_new(const char *path, ps_stw **out);
int ps_stw_checksums(ps_stw *w);                            /* before begin: adds checksums, which are computed while
                                                             * writing */
int ps_stw_meta(ps_stw *w, const char *key, const char *value);
int ps_stw_add(ps_stw *w, const char *name, int dtype, int ndim, const int64_t *shape);
int ps_stw_begin(ps_stw *w);                            /* reserves space for the whole file, so that a full disk
                                                         * fails here */
int ps_stw_write(ps_stw *w, const char *name, const void *data, int64_t nbytes);
int ps_stw_append(ps_stw *w, const char *name, const void *data, int64_t nbytes);   /* writes the next bytes of a
                                                                                     * tensor */
int64_t ps_stw_nbytes(const ps_stw *w);                     /* after begin: number of bytes of all tensors; before
                                                             * it: -1 */
int ps_stw_place(ps_stw *w, const char *name, int64_t *out);    /* returns the position of a tensor in the data */
int ps_stw_write_all(ps_stw *w, const void *data, int64_t nbytes);  /* writes all tensors at once, each from its
                                                                     * position in `data` */
int ps_stw_commit(ps_stw *w);                               /* fsyncs the file, renames it to path, and fsyncs the
                                                             * folder */
void ps_stw_free(ps_stw *w);                                /* frees the writer; without a commit, removes the
                                                             * temporary file */

/* -- GGUF, the files of llama.cpp ---------------------------------------------------------------------------------- */
typedef struct ps_gguf ps_gguf;
typedef struct ps_gguf_entry {
  int32_t type;                /* id of the type in files (ps_gguf_type_name) */
  int32_t dtype, ndim;         /* dtype of the values that are read, fp32 for blocks, -1 if the type is not supported */
  int64_t shape[8];            /* sizes from the outermost dimension on, as ps_gguf_layout sets them */
  int64_t at, nbytes;          /* at: position of the tensor's bytes, for ps_gguf_read */
  int32_t as_it_is;            /* 1 if the bytes are the values themselves, unpacked and in this order */
} ps_gguf_entry;
typedef struct ps_gguf_value { /* an entry of the metadata, or one value of an array */
  int32_t type, of;            /* ids in files, 0 to 12: uint8 int8 uint16 int16 uint32 int32 float32 bool string
                                * array uint64 int64 float64. `of` is the type of an array's values, else equal to
                                * `type`. */
                               /* array uint64 int64 float64; of: the type of an array's values, else the same */
  int64_t n;                   /* number of values of an array, else 1 */
  int64_t whole;               /* an integer (uint64 as its bits) or a truth value; for a string, its length */
  double number;               /* any number */
  const char *text;            /* a string without a final 0, lent until close */
} ps_gguf_value;
/* Maps the file and checks its whole header. Versions 2 and 3 are supported. PS_EIO: the file cannot be read.
 * PS_EFORMAT: it is not a GGUF file, or is damaged. */
int ps_gguf_open(const char *path, ps_gguf **out);
void ps_gguf_close(ps_gguf *g);
int ps_gguf_count(const ps_gguf *g);
const char *ps_gguf_name(const ps_gguf *g, int i);
int ps_gguf_find(const ps_gguf *g, const char *name);       /* index of the tensor, or -1 */
int ps_gguf_get(const ps_gguf *g, int i, ps_gguf_entry *out);           /* describes tensor i. PS_ERANGE: there is no
                                                                         * tensor i */
const char *ps_gguf_type_name(int type);                    /* name such as "Q4_0", or NULL if there is no such type */
int ps_gguf_meta_count(const ps_gguf *g);
const char *ps_gguf_meta_key(const ps_gguf *g, int i);
int ps_gguf_meta_find(const ps_gguf *g, const char *key);   /* index of the entry, or -1 */
/* Reads value k (from 0) of entry i. An entry that is not an array has only value 0. If k is -1, reads only the
 * types and n. PS_ERANGE: there is no such value. PS_EIO: the file was truncated. */
int ps_gguf_meta_get(const ps_gguf *g, int i, int64_t k, ps_gguf_value *out);
/* Sets how tensor i is read. If `heads` is not 0, it is the number of heads whose rows (elements of a vector)
 * llama.cpp stores in pairs for its rotary embedding. These rows are then read half a head apart, as in Hugging
 * Face's files. If `transposed` is 1, the two dimensions of a matrix are swapped. PS_EFORMAT: the tensor's shape
 * does not fit. PS_ERANGE: there is no tensor i. */
int ps_gguf_layout(ps_gguf *g, int i, int64_t heads, int transposed);
/* Copies elements first to first + numel - 1 of a rectangle of tensor i, in row-major order, as values of its
 * entry's dtype. `offset` and `shape` are the rectangle's start and size in each dimension. PS_ERANGE: there is no
 * tensor i, or part of the range is outside it. PS_EUNSUP: the tensor's type is not supported. PS_EIO: the file was
 * truncated. */
int ps_gguf_copy(const ps_gguf *g, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
                 int64_t numel);
/* ps_gguf_copy_packed copies bytes first to first + nbytes - 1 of the packed rows of matrix i. The rows are in the
 * order set by ps_gguf_layout, but not transposed. ps_gguf_rows returns the number of these rows, or 0 if tensor i
 * is not a matrix. ps_gguf_copy_packed returns errors of ps_gguf_copy. */
int ps_gguf_copy_packed(const ps_gguf *g, int i, int64_t first, void *dst, int64_t nbytes);
int64_t ps_gguf_rows(const ps_gguf *g, int i);
int ps_gguf_read(const void *g, int64_t at, void *dst, int64_t nbytes);     /* a ps_reader like ps_st_read */
int ps_gguf_lend(void *g, int64_t at, int64_t nbytes, ps_loan *out);        /* a ps_lender like ps_st_lend */
void ps_gguf_drop(const ps_gguf *g, int i);                 /* as ps_st_drop */

/* Packs values into blocks of a type. `type` is the id in GGUF files of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K or Q6_K,
 * or 256 for NF4. `out` gets the bytes of all blocks. PS_EUNSUP: another type. PS_EINVAL: numel is not a multiple of
 * the type's block size. PS_ERANGE: a value is not finite, or is above 65504. */
int ps_pack(int type, const float *values, int64_t numel, void *out);

/* A writer of version 3: declare all tensors in file order, begin, append values to each, commit. PS_ESTATE: a call
 * out of this order, or a tensor does not have all of its values. PS_EINVAL: a name is a duplicate, a shape is not a
 * multiple of the type's block size, or there are too many values. PS_EUNSUP: the type cannot be written, or the
 * values are not floats. PS_ERANGE: the type cannot hold a value. PS_EIO: the file cannot be written. */
typedef struct ps_ggufw ps_ggufw;
int ps_ggufw_new(const char *path, ps_ggufw **out);
/* Declares a tensor. type: "F32", "Q4_0", ... The shape begins with the outermost dimension. heads and transposed
 * are as in ps_gguf_layout, for values that are appended in the order of Hugging Face's files. Returns errors of
 * ps_ggufw_new. */
int ps_ggufw_add(ps_ggufw *w, const char *name, const char *type, int ndim, const int64_t *shape, int64_t heads,
                 int transposed);
/* Writes the header. `meta` contains the bytes of all metadata entries in the form that files have.
 * Returns errors of ps_ggufw_new. */
int ps_ggufw_begin(ps_ggufw *w, const void *meta, int64_t nbytes, int64_t entries);
/* Appends the next values of a tensor. Threads convert and write them, so an error of a value (the earliest one) or of
 * the disk may be returned by a later append, or by the commit. Returns errors of ps_ggufw_new. */
int ps_ggufw_append(ps_ggufw *w, const char *name, int dtype, const void *data, int64_t numel);
/* Fsyncs the file, renames it to path, and fsyncs the folder. Returns errors of ps_ggufw_new. */
int ps_ggufw_commit(ps_ggufw *w);
void ps_ggufw_free(ps_ggufw *w);                             /* frees the writer; without a commit, removes the
                                                              * temporary file */

/* A thread that writes a file while the script continues, one file at a time. PS_ESTATE: the thread is busy.
 * PS_ENOMEM: no thread can be started. */
typedef struct ps_saver ps_saver;
int ps_saver_new(ps_saver **out);
/* Writes `data` in the background to a writer after the writer's begin, and commits. The saver owns the writer from
 * now on, even if the call fails. The nbytes bytes of data must not change until ps_saver_wait. If their address is
 * a multiple of 4096, a copy is avoided. PS_ESTATE: the saver is busy. PS_ENOMEM: no thread can be started. */
int ps_saver_start(ps_saver *s, ps_stw *writer, const void *data, int64_t nbytes);
int ps_saver_busy(ps_saver *s);                             /* 1 while the thread writes, else 0 */
/* Waits until the file is written. Returns an error of ps_stw_write or ps_stw_commit for this file only once.
 * *seconds is the time that the last file took; `seconds` may be NULL. */
int ps_saver_wait(ps_saver *s, double *seconds);
void ps_saver_free(ps_saver *s);                            /* also waits */

/* Computes a hash of a file's bytes from the XXH3 of its blocks. PS_EIO: the file cannot be read. */
int ps_file_hash(const char *path, uint64_t *out);

/* -- text files by line -------------------------------------------------------------------------------------------- */
/* The rows of a text file, which are its non-empty lines. A byte order mark at the file's start and a carriage
 * return at a line's end do not belong to a row. Only one thread at a time may use a ps_lines. */
typedef struct ps_lines ps_lines;
/* Opens a file. `index` is a file written by ps_lines_save, or "" for none. If the index does not match the file's
 * size and time, the file is read once. PS_EIO: the file cannot be read, or changes during the call. */
int ps_lines_open(const char *path, const char *index, ps_lines **out);
int ps_lines_scanned(const ps_lines *l);                    /* 1 if the file was read because the index did not match */
int64_t ps_lines_count(const ps_lines *l);                  /* rows */
/* Like ps_file_hash, for the opened file, even if another file has its path by now. PS_EIO: the file was changed or
 * truncated after it was opened. */
int ps_lines_hash(const ps_lines *l, uint64_t *out);
/* Writes an index atomically. The index contains the position of every 64th row, and the file's size and time.
 * PS_EIO: the index cannot be written. */
int ps_lines_save(const ps_lines *l, const char *index);
/* Reads row i (from 0): returns the row's bytes, lent until the next call, and its line number (from 1). PS_ERANGE:
 * there is no row i. PS_EIO: the file was changed or truncated after it was opened. */
int ps_lines_read(ps_lines *l, int64_t i, const char **text, int64_t *nbytes, int64_t *number);
void ps_lines_close(ps_lines *l);

/* -- token shards and the loader ----------------------------------------------------------------------------------- */
typedef struct ps_tokens ps_tokens;
/* Maps a shard, which is llm.c's .bin with a header, or raw tokens of `width` bytes (2 or 4; 1 reads a text file as
 * bytes). If width is 0, the header must exist and has the width. PS_EIO: the file cannot be read. PS_EFORMAT: there
 * is no header, it has another version, or the size is not a whole number of tokens. */
int ps_tokens_open(const char *path, int width, ps_tokens **out);
void ps_tokens_close(ps_tokens *s);      /* loaders hold references of their own */
int64_t ps_tokens_count(const ps_tokens *s);
/* Reads n tokens, from token `first` on, into dst. PS_ERANGE: the file has no such tokens, or a token does not fit
 * into int32. PS_EIO: the file was truncated. */
int ps_tokens_read(const ps_tokens *s, int64_t first, int64_t n, int32_t *dst);
/* Writes an llm.c shard, width 2 or 4, through a temporary file. PS_EIO: the file cannot be written. PS_ERANGE: a
 * token does not fit into the width. PS_ESTATE: a call after commit, or after a failed write. */
typedef struct ps_tokw ps_tokw;
int ps_tokw_new(const char *path, int width, ps_tokw **out);
int ps_tokw_append(ps_tokw *w, const int32_t *ids, int64_t n);
int ps_tokw_append_bytes(ps_tokw *w, const void *bytes, int64_t n);   /* writes each byte as a token */
int ps_tokw_commit(ps_tokw *w);
void ps_tokw_free(ps_tokw *w);

typedef struct ps_loader ps_loader;
typedef struct ps_loader_config {
  int64_t batch, seq;        /* `batch` rows of `seq` tokens for this rank; each target is the token after its input */
  int64_t vocab;             /* A token >= vocab is an error, whose message contains file and position. If vocab is
                              * 0, tokens are not checked. */
  int64_t first, last;       /* half-open range of the concatenated tokens that is used; if last is 0, up to the end */
  uint64_t seed;
  int32_t shuffle;           /* 1 if each epoch visits every window once, in a random order and from a random offset */
  int32_t ahead;             /* batches that the background thread prepares in advance, >= 1 */
  int32_t rank, world_size;  /* The rank reads rows [rank, rank + 1) * batch of global batches of world_size * batch
                              * rows. 0 means 1. */
} ps_loader_config;
typedef struct ps_loader_position { int64_t epoch, batch; } ps_loader_position;  /* position of all ranks' next batch */
/* Makes a loader. PS_EINVAL: settings are out of range, or there are too few tokens for one batch. PS_ERANGE: the
 * range is outside the files. PS_ENOMEM: no memory for batches, or no thread. */
int ps_loader_new(int n, ps_tokens *const *shards, const ps_loader_config *config, ps_loader **out);
void ps_loader_free(ps_loader *l);
int64_t ps_loader_batches(const ps_loader *l);              /* number of full batches per epoch */
/* Returns 1 if there is a batch and 0 if the epoch has ended (the next call starts another epoch). PS_ERANGE: a
 * token >= vocab. PS_EIO: a file was truncated. */
int ps_loader_next(ps_loader *l, int32_t *x, int32_t *y);
int ps_loader_get_position(ps_loader *l, ps_loader_position *out);                /* PS_EINVAL: NULL */
int ps_loader_set_position(ps_loader *l, const ps_loader_position *position);     /* sets the next batch. PS_ERANGE:
                                                                                   * there is no such batch */

/* -- tokenizers: texts to token ids and back (lua/ps/tokenizer/init.lua) ----------------------------------------------
 * PS_ESTATE: a file or setting after ps_tok_ready, or a text before it. */
typedef struct ps_tok ps_tok;            /* a tokenizer, for one thread at a time */
typedef struct ps_tok_ids {              /* ids of a text, lent until the next call on the tokenizer */
  const int32_t *ids;
  const int32_t *offsets;                /* [n][2] half-open byte ranges in the text; NULL if not requested */
  int64_t n;
} ps_tok_ids;
int ps_tok_new(const char *model, ps_tok **out);             /* "bpe", "wordpiece" */
void ps_tok_free(ps_tok *t);
/* Reads a file of a tokenizer. The order of calls is: files, settings that the files do not define, ps_tok_ready,
 * texts. PS_EIO: the file cannot be read. PS_EFORMAT: it does not have this format. PS_EINVAL: an unknown format,
 * setting or value. PS_EUNSUP: a setting or pattern is not supported. Formats: "vocab.json" ({"token": id});
 * "vocab.txt" (a token per line, ids from 0); "merges.txt" (after its vocabulary); "tiktoken" (a token in base64 and
 * its rank per line; tokens are then spelled in GPT-2's letters); "tokenizer.json" (its model's vocabulary and
 * merges; ps_tok_rest lends the rest of its text). */
int ps_tok_read(ps_tok *t, const char *format, const char *path);
int ps_tok_rest(const ps_tok *t, const char **text, int64_t *nbytes);
/* Adds a token to a vocabulary without a file. After its tokens, add either merges of two tokens each, in order, or
 * a score per token. SentencePiece's BPE merges by score, highest first; it never makes a token with score NaN.
 * PS_EFORMAT: a token is not UTF-8, a token or id already exists, or a merge names a token that does not exist. */
int ps_tok_token(ps_tok *t, const char *token, int64_t nbytes, int64_t id);
int ps_tok_merge(ps_tok *t, const char *left, int64_t n_left, const char *right, int64_t n_right);
int ps_tok_scores(ps_tok *t, const float *scores, int64_t n);
int ps_tok_set(ps_tok *t, const char *name, int64_t value);  /* changes a setting in the list of src/data/tokenizer.c */
/* Adds a regular expression of PCRE2 that splits texts into words: its matches, and the text between them. Several
 * expressions are applied one after the other. PS_EFORMAT: the pattern is wrong. PS_EUNSUP: there are too many
 * patterns. */
int ps_tok_split(ps_tok *t, const char *pattern, int64_t nbytes);
/* Adds a step that changes a BPE tokenizer's text after it is split at added tokens and before it is split into
 * words. "nfc" normalizes; "prepend" puts `to` before a text that is not empty; "replace" replaces each `from` by
 * `to`. Texts that a step does not use are "". PS_EUNSUP: there are already 8 steps. PS_EINVAL: an unknown step, or
 * an empty text. PS_EFORMAT: a text is not UTF-8. PS_ESTATE: the tokenizer is ready. */
int ps_tok_normalize(ps_tok *t, const char *what, const char *from, const char *to);
enum { PS_TOK_SPECIAL = 1, PS_TOK_LSTRIP = 2, PS_TOK_RSTRIP = 4, PS_TOK_NORMALIZED = 8 };
/* Adds a token that is matched literally in texts, and adds it to the vocabulary if it is not there. PS_EFORMAT:
 * another token has the id, or the vocabulary has the token with another id. */
int ps_tok_add(ps_tok *t, const char *token, int64_t nbytes, int64_t id, int flags);
int ps_tok_ready(ps_tok *t);             /* completes the tokenizer. PS_EFORMAT: files or settings are missing */
int64_t ps_tok_count(const ps_tok *t);                       /* 1 + the largest id */
int32_t ps_tok_find(const ps_tok *t, const char *token, int64_t nbytes);    /* id of a token as files spell it, or -1
                                                                             * if there is no such token */
int ps_tok_name(const ps_tok *t, int64_t id, const char **token, int64_t *nbytes);   /* a token's text. PS_ERANGE: there
                                                                                      * is no such id */
/* Encodes a text. Malformed UTF-8 becomes U+FFFD. PLAIN treats special tokens in the text as plain text. PS_EINVAL:
 * the text is too long. PS_ERANGE: a pattern needs too many steps. */
enum { PS_TOK_OFFSETS = 1, PS_TOK_PLAIN = 2 };
int ps_tok_encode(ps_tok *t, const char *text, int64_t nbytes, int flags, ps_tok_ids *out);
/* Characters that a vocabulary cannot spell, since it has neither a token for them nor an unknown token. The ids leave
 * them out. */
typedef struct ps_tok_lost {
  int64_t characters;
  int64_t places;                        /* number of runs of such characters within a word */
  int64_t line;                          /* line of the first one in JSON lines, from 1; 0 in other texts */
  int64_t example;                       /* number of the first one's example, for an encoder */
  uint32_t first;                        /* the first one's code point */
} ps_tok_lost;
/* Copies to *out what ps_tok_encode and ps_tok_encode_block have left out since the last call. PS_EINVAL: NULL. */
int ps_tok_take_lost(ps_tok *t, ps_tok_lost *out);
/* Returns the text of ids, lent like ids. SKIP omits special tokens. BYTES returns the bytes unchanged; without it,
 * invalid UTF-8 becomes U+FFFD. PS_ERANGE: an id is not a token. */
enum { PS_TOK_SKIP = 1, PS_TOK_BYTES = 2 };
int ps_tok_decode(ps_tok *t, const int32_t *ids, int64_t n, int flags, const char **text, int64_t *nbytes);
int ps_tok_print(ps_tok *t, const int32_t *ids, int64_t n, const char **text, int64_t *nbytes);  /* in decimal */
typedef struct ps_tok_block {            /* progress in a file that is encoded in blocks */
  const char *path;                      /* for messages */
  const char *field;                     /* key of the string that is a JSON line's document, or NULL for plain text */
  int64_t line;                          /* lines before this block; the call adds the block's lines */
  int64_t used;                          /* set by the call: number of bytes that were used; the next block must
                                          * begin with the remaining bytes */
  int32_t mark;                          /* id that is put before each line's document, or -1 for none */
  int32_t threads, last, flags;          /* last: 1 for the last block. flags: as in ps_tok_encode. */
} ps_tok_block;
/* Encodes a block. PS_EFORMAT: a line is not a JSON object with that string; the message has file and line. Also
 * returns errors of ps_tok_encode. */
int ps_tok_encode_block(ps_tok *t, ps_tok_block *block, const char *text, int64_t nbytes, ps_tok_ids *out);

/* -- examples: tokenized rows of a table (lua/ps/data/examples.lua) --------------------------------------------------
 * For one thread at a time unless a comment says otherwise. Examples and tokens count from 0. */
typedef struct ps_examples ps_examples;
/* Begins a list of examples. `path` is the file that contains them once they are complete (ps_examples_finish);
 * memory then contains only their starts. If `path` is "", all examples stay in memory. `key` [2] identifies the
 * data from which the examples are made. `wide` is 1 if examples have labels or weights of their own (12 bytes per
 * token instead of 4). PS_EIO: the file cannot be created. */
int ps_examples_new(const char *path, const uint64_t *key, int wide, ps_examples **out);
/* Appends an example. `labels` [n] contains -100 for a token that is not trained. If it is NULL, the labels are the
 * ids. `weights` [n] contains one weight per token, or is NULL. PS_ENOSPC, PS_EIO: the file cannot be written.
 * PS_ERANGE: an id is negative. */
int ps_examples_add(ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t n,
                    double weight);
int ps_examples_finish(ps_examples *e);      /* ends the list; writes and maps the file */
/* Begins `count` scattered examples, which are put by number in any order and stay in memory. Rows that grow
 * (ps_rows_begin) read them meanwhile. PS_EUNSUP: there are too many. */
int ps_examples_scattered(int64_t count, int wide, ps_examples **out);
/* Puts example i of scattered examples, or appends it if it is the next one of others. Also returns errors of
 * ps_examples_add. PS_EINVAL: there is no such example, or it was put before. */
int ps_examples_put(ps_examples *e, int64_t i, const int32_t *ids, const int32_t *labels, const float *weights,
                    int64_t n, double weight);
/* Appends all scattered examples to e, in the order of their numbers. The result is as if ps_examples_add had appended
 * them. PS_ESTATE: one has not been put. PS_EINVAL: e is finished, or one is wide and the other is not. Also returns
 * errors of ps_examples_add. */
int ps_examples_gather(ps_examples *e, const ps_examples *scattered);
/* Maps a file of ps_examples_finish. PS_EIO: there is no such file. PS_EFORMAT: it is incomplete. PS_ESTATE: it has
 * another key. */
int ps_examples_open(const char *path, const uint64_t *key, ps_examples **out);
int64_t ps_examples_count(const ps_examples *e);
int64_t ps_examples_tokens(const ps_examples *e);
uint64_t ps_examples_hash(const ps_examples *e);             /* a hash of all ids, labels and weights */
/* Copies at most `room` ids and labels of example i; *n is the number of its tokens. PS_ERANGE: there is no such
 * example. */
int ps_examples_read(const ps_examples *e, int64_t i, int32_t *ids, int32_t *labels, int64_t room, int64_t *n);
void ps_examples_free(ps_examples *e);

/* Encodes texts to examples on several threads, in the order of the texts. The encoder is an owner of the tokenizer and
 * of the examples until ps_encoder_free. Others may encode and decode with the tokenizer, and read stored examples. */
typedef struct ps_encoder ps_encoder;
typedef struct ps_encoder_config {
  const int32_t *special;                /* [n_special] ascending ids that the text of a message never becomes */
  const int32_t *prefix, *suffix;        /* ids before and after a whole text */
  int64_t n_special, n_prefix, n_suffix;
  int32_t threads, flags;                /* flags: flags of ps_tok_encode, for whole texts */
  int32_t queue;                         /* most texts that are queued; 0: 32 per thread */
} ps_encoder_config;
typedef struct ps_encoder_text {
  const char *text;                      /* the text, which the call copies */
  int64_t nbytes;
  /* [n][2] half-open byte ranges, each list in order. message: text from messages, tools, documents and unknown
   * roles. role: text from roles that templates expect, which may lie inside a special token. trained: text that is
   * trained. */
  const int64_t *message, *role, *trained;
  int64_t n_message, n_role, n_trained;
  int32_t whole;                         /* 1 if all tokens of the text are trained, and the text is put between
                                          * prefix and suffix */
  int32_t need;                          /* 1: at least one token must be trained; 2: in addition, at least one token
                                          * must not be trained */
  double weight;
  int64_t number;                        /* number of the example (ps_examples_put) */
} ps_encoder_text;
/* Makes an encoder. PS_EINVAL: the number of threads is out of range. PS_ESTATE: the tokenizer is not ready.
 * PS_ENOMEM: no thread can be started. */
int ps_encoder_new(ps_tok *tok, ps_examples *examples, const ps_encoder_config *config, ps_encoder **out);
/* Queues a text. Waits for an earlier text if many are queued. PS_EINVAL: an earlier text has no tokens, or violates
 * `need`. Also returns errors of ps_tok_encode and ps_examples_add. Calls after an error return the error of the same
 * text. */
int ps_encoder_put(ps_encoder *c, const ps_encoder_text *text);
/* Stores the examples that are encoded, in order, without waiting. Returns the number of texts that are still queued,
 * or errors of ps_encoder_put. */
int64_t ps_encoder_drain(ps_encoder *c);
int ps_encoder_finish(ps_encoder *c);    /* waits for all texts; errors of ps_encoder_put */
int64_t ps_encoder_failed(const ps_encoder *c);              /* number of the example that failed, or -1 */
int ps_encoder_lost(const ps_encoder *c, ps_tok_lost *out);  /* characters that the stored examples leave out */
void ps_encoder_free(ps_encoder *c);

/* The rows of an epoch. They depend only on the examples and the settings, not on batches and ranks. */
typedef struct ps_rows ps_rows;
enum { PS_LONG_RIGHT, PS_LONG_LEFT, PS_LONG_DROP, PS_LONG_ERROR };   /* what happens to an example that is too long:
                                                                      * its right or left end is cut off, or it is
                                                                      * dropped, or an error is returned */
enum { PS_MIX_LEAVE, PS_MIX_REPEAT, PS_MIX_STOP };   /* what happens after an exhausted source: the epoch continues
                                                      * without it, the source begins again, or the epoch ends */
enum { PS_WEIGHTS_TOKEN, PS_WEIGHTS_EXAMPLE };       /* whether an example's weight is the weight of each target, or
                                                      * is divided among its targets */
typedef struct ps_rows_config {
  int64_t seq;                           /* most tokens in a row */
  int64_t window;                        /* number of successive examples that are packed or sorted together */
  int64_t epoch;
  uint64_t seed;
  const int64_t *counts;                 /* [n_sources] examples per source; the sources follow one another */
  const double *weights;                 /* [n_sources] positive weights */
  int32_t n_sources, exhausted;
  int32_t shuffle, packing, grouping, rule;
} ps_rows_config;
typedef struct ps_rows_info {
  int64_t rows, windows, examples, tokens;     /* examples: number of examples that rows contain */
  int64_t cut, dropped;                  /* examples that lost tokens; examples that were left out */
  int64_t failed;                        /* with PS_LONG_ERROR, the example that is too long, else -1 */
  int64_t taken, places;                 /* places of the order whose examples were read, and all places */
} ps_rows_info;
/* Makes the rows of an epoch. `info` is filled even if the call fails. PS_ERANGE: an example is too long
 * (PS_LONG_ERROR). PS_EINVAL: a setting is wrong. */
int ps_rows_new(ps_examples *e, const ps_rows_config *config, ps_rows_info *info, ps_rows **out);
/* Begins rows of scattered examples. They grow in place while examples are put, and become those that ps_rows_new makes
 * of the same examples. Batches read rows that are there (ps_batches_next). Also returns errors of ps_rows_new. */
int ps_rows_begin(ps_examples *scattered, const ps_rows_config *config, ps_rows **out);
int32_t ps_rows_order(const ps_rows *r, int64_t place);      /* the example at a place of the order of such rows, or a
                                                              * PS_E* code */
/* Adds the rows of those examples that follow one another in the order and are there. With packing or grouping, whole
 * windows are added. Errors as ps_rows_new. */
int ps_rows_grow(ps_rows *r, ps_rows_info *info);
int ps_rows_window(const ps_rows *r, int64_t row, int64_t *window, int64_t *within);   /* returns a row's window and
                                                                                        * its index there; `row` may
                                                                                        * be the number of rows */
int64_t ps_rows_first(const ps_rows *r, int64_t window);     /* the first row of a window */
int64_t ps_rows_longest(const ps_rows *r, int64_t first, int64_t n);   /* length of the longest row among `n` rows
                                                                        * from `first` on that exist */
int64_t ps_rows_examples(const ps_rows *r, int64_t row, int64_t *out, int64_t room);   /* their number */
typedef struct ps_rows_batch {
  int32_t *ids, *labels;                 /* [rows, length] each */
  int32_t *mask;                         /* 1 for tokens and 0 for padding; with packing, segment numbers from 1 */
  int32_t *positions;                    /* or NULL */
  float *weights;                        /* weights of labels, or NULL */
  int64_t rows, length;
  int64_t real;                          /* number of rows to read; rows after these, or after the last row, are
                                          * copies of row `filler` with weight 0 */
  int64_t filler;
  int32_t pad, by;                       /* pad: padding id; by: PS_WEIGHTS_* */
} ps_rows_batch;
int ps_rows_fill(const ps_rows *r, int64_t first, const ps_rows_batch *batch);
void ps_rows_free(ps_rows *r);

/* Batches of rows, epoch after epoch, which a thread makes in advance. The examples and rows that it uses stay alive as
 * long as the batches. */
typedef struct ps_batches ps_batches;
typedef struct ps_batches_config {
  int64_t batch;                         /* rows per rank */
  int64_t accumulate;                    /* batches of a step, which are padded to one length */
  int64_t multiple;                      /* lengths are multiples of this, unless seq is not */
  int32_t rank, world_size;
  int32_t ahead;                         /* batches made in advance, at least 1 */
  int32_t to_seq, drop_last, fills;      /* fills: 1 adds rows of weight 0 to a last batch that is not full */
  int32_t weights;                       /* 1 if batches have weights */
  int32_t pad, by;                       /* as in ps_rows_batch */
} ps_batches_config;
typedef struct ps_batch {                /* The arrays are [rows, length], as in ps_rows_batch. They are lent until the
                                          * next call of ps_batches_next or ps_batches_seek. */
  int64_t epoch, first;                  /* first: first row of this rank */
  int64_t next;                          /* first row of all ranks' next batch, or the number of rows */
  int64_t rows, length;
  const int32_t *ids, *labels, *mask, *positions;    /* positions is NULL without packing */
  const float *weights;                  /* NULL if there are none */
} ps_batch;
/* Makes batches. `first` contains the rows of the epoch in rows_config, at which batches begin. PS_EINVAL: a setting
 * is wrong. */
int ps_batches_new(ps_examples *e, const ps_rows_config *rows_config, const ps_batches_config *config, ps_rows *first,
                   ps_batches **out);
enum { PS_BATCHES_MORE = 2 };            /* a result of ps_batches_next, besides 0 and 1 */
/* Returns 1 with a batch, or 0 at the end of an epoch. After the end, the next epoch begins. Starts the thread.
 * Returns PS_BATCHES_MORE if the batch needs rows that are not there: grow the rows (ps_rows_grow), or, if they are
 * complete, pass the gathered examples to ps_batches_examples, and call again.
 * PS_EIO: the file of examples was truncated. Also returns errors of ps_rows_new for an epoch, and of ps_rows_fill;
 * the next call then tries again. */
int ps_batches_next(ps_batches *b, ps_batch *out);
/* Returns the rows of an epoch, which the caller frees. If the thread does not have them, this call makes them. info
 * is as in ps_rows_new. Returns errors of ps_rows_new. */
int ps_batches_rows(ps_batches *b, int64_t epoch, ps_rows_info *info, ps_rows **out);
/* Sets the row, counted over all ranks, at which the next batch begins. `rows` contains the rows of the epoch.
 * PS_ERANGE: there is no such row. */
int ps_batches_seek(ps_batches *b, int64_t epoch, ps_rows *rows, int64_t row);
/* Sets the examples of the next epochs, after epoch 0 began with scattered ones. PS_ESTATE: they are not finished. */
int ps_batches_examples(ps_batches *b, ps_examples *e);
void ps_batches_free(ps_batches *b);     /* ends the thread */

/* -- steps of training (base/step.h) ------------------------------------------------------------------------------
 * A step is a table of actions. ps_step_next begins the action that is due, and the caller ends it with ps_step_done
 * or ps_step_abandon. */
/* A BACKWARD can be divided (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). INPUT computes the gradients of a
 * virtual stage's inputs and defers those of its parameters. WEIGHT computes the deferred gradients. */
enum { PS_ACT_NONE, PS_ACT_FORWARD, PS_ACT_BACKWARD, PS_ACT_INPUT, PS_ACT_WEIGHT, PS_ACT_REDUCE, PS_ACT_NORM,
       PS_ACT_UPDATE, PS_ACT_COUNT };
/* vstage: index of a virtual stage. micro: index of a micro-batch, less than the number of actions. A reduction
 * completes the sums over ranks of all earlier backwards of its virtual stage. Without a reduction, each backward
 * completes its own sums. */
typedef struct ps_action { int32_t kind, vstage, micro; } ps_action;
/* Fields of a step that scripts can read at any time. */
typedef struct ps_step_state {
  ps_action now, due;          /* action under way, and next action of the table; kind PS_ACT_NONE if there is none */
  int32_t open;                /* 1 between the begin and the end of a step */
  int32_t micro, n_micro;      /* number of finished actions BACKWARD and WEIGHT, and their number in the table */
  int32_t updating;            /* 1 if an action that updates parameters has begun, so that the step can no longer be
                                * abandoned */
  double weight;               /* sum of the weights of all micro-batches whose backward has run */
} ps_step_state;
typedef struct ps_step ps_step;
int ps_step_new(ps_ctx *ctx, ps_step **out);   /* PS_ENOMEM */
void ps_step_free(ps_step *step);            /* Frees the step. An engine that was opened with it keeps it alive
                                              * until the engine is closed. */
const ps_step_state *ps_step_look(const ps_step *step);     /* lent until the step is freed */
enum { PS_TRACE_UNKNOWN = -1, PS_TRACE_NONE = -2 };
typedef struct ps_step_config {
  const ps_action *actions;    /* copied */
  int32_t n_actions;
  int32_t dry;                 /* 1 for a dry run, in which ops do not compute */
  int32_t trace;               /* Trace that the step is expected to repeat. _UNKNOWN means that there is none. _NONE
                                * means that there is none, and that the step's uses of chunks are not recorded. */
  int32_t pad;
} ps_step_config;
/* Begins a step. PS_ESTATE: a step is under way, or a dry run finds gradients. PS_EINVAL: the table has no backward,
 * has a norm before a backward or an INPUT without a later WEIGHT, or has the WEIGHTs of a virtual stage in another
 * order than its INPUTs, which would change sums. PS_ERANGE: the trace no longer exists. PS_ENOMEM: a tier has too
 * little room for the step. */
int ps_step_begin(ps_step *step, const ps_step_config *config);
enum { PS_MAX_STATES = 6, PS_UPDATE_ATTRS = 20 };
/* Optimizer settings of a group of parameters. */
typedef struct ps_update_group {
  double attrs[PS_UPDATE_ATTRS];   /* attributes of the group's op, struct ps_attrs_<op>, without those that
                                    * ps_update_attrs sets */
  double scale;                /* factor on this group's gradients, in addition to the action's factor */
  int32_t op;                  /* PS_OP_* of an update, whose inputs repeat param, master, grad, states */
  int32_t n_states;            /* number of state tensors per parameter in the op's inputs */
  int32_t n_needed;            /* number of leading state tensors that a parameter must have; the master replaces
                                * missing others */
  int32_t pad;
} ps_update_group;
/* Sets the attributes of an update's op that differ between updates: t, the index of the parameters' update from 1,
 * or values derived from it, and the factor on gradients. PS_EINVAL: the op is not an update. */
int ps_update_attrs(int op, void *attrs, int64_t t, double grad_scale);
/* Settings of an action. Fields that the action does not use are 0. */
typedef struct ps_action_how {
  double weight;               /* for BACKWARD or INPUT: weight of the micro-batch, counted once for all virtual
                                * stages */
  double scale;                /* for an update, or a backward that updates: factor on gradients */
  int32_t slot;                /* for a last backward: store final gradients in the place of their half-type
                                * parameters */
  int32_t overlap;             /* for a last backward: update each unit as soon as its gradients are final */
  const ps_update_group *groups; /* [n_groups] optimizer settings, which are copied; NULL means the settings of the
                                  * previous action */
  int32_t n_groups;
  int32_t numbered;            /* for a forward: 1 if its dropouts count from first_op and its rows from sample, so
                                * that masks are those of a single process that runs all virtual stages in order */
  uint64_t sample;
  uint32_t first_op, pad;
} ps_action_how;
/* Begins the action that is due, which must be of this kind. A forward may be repeated until its backward begins. A
 * backward may have no forward. If the step's table has no norm, one may precede the update. If `how` is NULL, all
 * settings are 0. PS_ESTATE: another action is due or under way, or no step is. PS_EINVAL: an update during a
 * backward that is not the last, or in a step that has a norm or several virtual stages; or `slot` for a backward
 * that is not the last of its virtual stage. */
int ps_step_next(ps_step *step, int kind, const ps_action_how *how);
/* Ends the action under way. For a backward, this completes its work: gradients become final, sums over ranks
 * arrive, units are updated. After an error the action is still under way. PS_ESTATE: no action is under way. Also
 * returns errors of ps_apply. */
int ps_step_done(ps_step *step);
/* Pauses the script at a prompt, possibly in the middle of a step. Computations until ps_resume do not belong to the
 * step: they are not recorded for backward, their uses of chunks are not recorded, the step's random numbers do not
 * advance, and their memory is not counted in the budgets. Until ps_resume, these calls fail with PS_ESTATE: actions
 * of a step, backward, setting gradients, and writes to parameters. If the pause is between two steps, the engine
 * allows the last three. *scope is a scope that ps_resume ends. Returns 1 if the script cannot be paused now because
 * a dry run is under way. PS_ESTATE: the script is already paused, or there are several ranks. PS_ENOMEM. */
int ps_suspend(ps_ctx *ctx, int64_t *scope);
/* Resumes the script. The tensors `keep` survive, as in ps_scope_end. PS_ESTATE: the script is not paused. Chunks
 * are moved until they fit the budgets again. Also returns errors of these moves; the script is resumed even then. */
int ps_resume(ps_ctx *ctx, int n_keep, ps_tensor *const *keep);
int ps_is_suspended(const ps_ctx *ctx);
/* Ends the action under way, if any, as failed. The action then counts as not begun. An abandoned forward uses up no
 * random numbers. */
void ps_step_abandon(ps_step *step);
/* Returns 1 if the caller should collect Lua's garbage before the next BACKWARD, INPUT or WEIGHT. This is so if less
 * than 1/8 of the first tier is free, or if less than half is free and the last collection was PS_UNCOLLECTED
 * micro-batches ago. Returns 0 otherwise. The call never fails. */
enum { PS_UNCOLLECTED = 16 };
int ps_step_collects(ps_step *step);
/* Ends the step. *trace is the trace of this step, which is the expected trace if the step repeated it, or -1 if
 * there is none. If `trace` is NULL, abandons the step: its gradients are dropped (if that fails, a later call drops
 * the others), and the next step uses the same dropout numbers. PS_ESTATE: actions are still due. */
int ps_step_end(ps_step *step, int32_t *trace);

/* -- pipelines: the tables of a step whose model is cut into stages (src/pipe, docs/pipeline.md) -------------------
 * `stages` ranks share a model that is split into virtual stages, which are numbered from 0 in the order of the
 * model. A table has a row of actions for each rank. ps_action.vstage is an index in the whole model. These kinds of
 * actions occur only in tables:
 *   SEND_F, RECV_F: sends this virtual stage's outputs to the next one's forward, or receives those of the previous
 *   one.
 *   SEND_B, RECV_B: the same for gradients, in the opposite direction.
 *   YIELD: the script's loop gets the micro-batch's loss. vstage is 0.
 *   SEGMENT: never in a table. It is an event of the executor (ps_pipe_event). */
enum { PS_ACT_SEND_F = 16, PS_ACT_RECV_F, PS_ACT_SEND_B, PS_ACT_RECV_B, PS_ACT_YIELD, PS_ACT_SEGMENT };
enum { PS_PIPE_GPIPE, PS_PIPE_1F1B, PS_PIPE_INTERLEAVED, PS_PIPE_LOOPED_BFS, PS_PIPE_ZB_H1, PS_PIPE_ZB_V,
  PS_PIPE_SCHEDULES, PS_PIPE_CUSTOM = PS_PIPE_SCHEDULES };
typedef struct ps_pipe_spec {
  int32_t schedule, stages;
  int32_t virtual_stages;      /* per rank */
  int32_t micro_batches;
  int32_t forward_only;        /* 1 for an evaluation without backward */
  int32_t vstages;             /* virtual stages of the whole model, set by ps_pipe_table_spec */
} ps_pipe_spec;
typedef struct ps_pipe_table ps_pipe_table;
const char *ps_pipe_schedule_name(int schedule);            /* "gpipe" ... "zb_v", "custom"; NULL if there is no such
                                                             * schedule */
int ps_pipe_schedule_find(const char *name, int *out);      /* finds a schedule by name. PS_EINVAL: there is no such
                                                             * schedule; the message contains all names */
/* Makes the table of a schedule, which has only forwards and backwards. Every table can be performed. PS_EINVAL: the
 * schedule has no table of these sizes; the message has the numbers. */
int ps_pipe_table_new(const ps_pipe_spec *spec, ps_pipe_table **out);
/* Reads a table in PyTorch's CSV form (docs/pipeline.md). `name` is the file's name, for messages. PS_EFORMAT: the
 * text is not such a table; the message contains line and cell. PS_EINVAL: the table cannot be performed, or the
 * order of its sums is not unique. */
int ps_pipe_table_read(const char *text, int64_t nbytes, const char *name, ps_pipe_table **out);
/* Writes the text of a table. Returns the number of bytes of the whole text, including a final 0. If `room` is less,
 * the text is truncated. If `plain` is 1, omits transfers and yields, for ps_pipe_table_read. */
int64_t ps_pipe_table_write(const ps_pipe_table *t, int plain, char *out, int64_t room);
void ps_pipe_table_free(ps_pipe_table *t);
/* Returns the table's sizes. For a table that was read, virtual_stages is the maximum over ranks. */
const ps_pipe_spec *ps_pipe_table_spec(const ps_pipe_table *t);
/* Returns the row of a rank, lent until the table is lowered. PS_ERANGE: there is no such rank. */
int ps_pipe_table_row(const ps_pipe_table *t, int rank, const ps_action **row, int32_t *n);
/* Returns the rank that runs a virtual stage, and the stage's index on that rank. PS_ERANGE: there is no such
 * virtual stage. */
int ps_pipe_table_place(const ps_pipe_table *t, int vstage, int32_t *rank, int32_t *local);
/* Inserts transfers, yields and reductions between the actions of all rows. PS_ESTATE: the table already has them. */
int ps_pipe_table_lower(ps_pipe_table *t);
/* The peak counts of a row, which do not depend on the costs of its actions. */
typedef struct ps_pipe_held {
  int32_t in_flight;           /* (virtual stage, micro-batch) pairs between their forward and their INPUT or
                                * BACKWARD */
  int32_t waiting;             /* pairs between their INPUT and their WEIGHT */
} ps_pipe_held;
int ps_pipe_table_held(const ps_pipe_table *t, int rank, ps_pipe_held *out);     /* returns peak counts. PS_ERANGE:
                                                                                  * there is no such rank */
/* The cost of a virtual stage for one micro-batch, in any unit of time. A BACKWARD costs input + weight. */
typedef struct ps_pipe_cost {
  double forward, input, weight;
  double reduce;               /* cost of its reduction, once per step, in a lowered table */
  int64_t nbytes;              /* bytes of its output, which is sent to the next virtual stage, and of the output's
                                * gradient, which is sent back */
  int64_t held, waiting;       /* bytes kept from forward to backward; bytes kept from INPUT to WEIGHT */
} ps_pipe_cost;
/* Links between ranks. Each pair of ranks has one link for forwards and one for gradients in each direction. */
typedef struct ps_pipe_link {
  double latency;              /* time from the departure of a message's last byte to its arrival */
  double rate;                 /* bytes per unit of time; 0: transfers take no time */
  int32_t depth, pad;          /* messages that a link can queue while the receiver is not ready, 0 for any number;
                                * if the queue is full, the sender waits */
} ps_pipe_link;
typedef struct ps_pipe_span { double begin, end; } ps_pipe_span;
typedef struct ps_pipe_times {
  double makespan;             /* time from 0 to the end of the last action on any rank */
  double bubble;               /* the fraction of stages x makespan in which ranks are idle */
} ps_pipe_times;
typedef struct ps_pipe_rank_times {
  double first, last;          /* start of the rank's first action and end of its last action */
  double busy;                 /* sum of the rank's actions */
  int64_t peak;                /* peak bytes, counted by ps_pipe_cost.held and .waiting */
} ps_pipe_rank_times;
/* Simulates a table with a cost for each virtual stage. If `costs` is NULL, forward, input and weight take 1 each.
 * If `link` is NULL, transfers take no time. `ranks` is [stages] or NULL. `spans` is [stages], and each entry is
 * NULL or [n] like its row. PS_EINVAL: a cost is negative or not a number, or ranks wait for each other in a cycle.
 * Only links of limited depth can cause a cycle, and the message shows it. */
int ps_pipe_simulate(const ps_pipe_table *t, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                     ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
/* Simulated times of a split of a model. A split is the number of consecutive parts (embedding, layers, head) in
 * each virtual stage. */
typedef struct ps_pipe_cut_times {
  double makespan;             /* makespan of the split that was found */
  double equal;                /* makespan with equal numbers of parts, the first virtual stages having one more if
                                * necessary */
  double bound;                /* lower bound of the makespan of every split into these virtual stages */
  int32_t bound_part;          /* part that determines the bound (its rank does little else), or -1 if all parts do */
  int32_t tried;               /* splits that were simulated */
} ps_pipe_cut_times;
/* Searches for the split with the least makespan (ps_pipe_simulate), given the costs of the parts [n]. The costs of
 * a virtual stage's parts are added up; its output is that of its last part. counts: [vstages], each at least 1. The
 * search moves single parts between virtual stages, and can miss the best split of a large model. PS_EINVAL: there
 * are fewer parts than virtual stages. Also returns errors of ps_pipe_simulate. */
int ps_pipe_cut(const ps_pipe_table *t, const ps_pipe_cost *parts, int32_t n, const ps_pipe_link *link, int32_t *counts,
                ps_pipe_cut_times *out);
/* Reads a split in Megatron's notation. "Et*3|(tt|)*29,m|L" has a letter for each part and a bar between virtual
 * stages. *n repeats a letter or a group in brackets; commas and blanks are ignored. `kinds` contains a letter for
 * each part of the model. PS_EINVAL: the text is not a layout, or does not split these parts into this number of
 * virtual stages; the message has the position. */
int ps_pipe_layout(const char *layout, const char *kinds, int32_t vstages, int32_t *counts);

/* -- chunks: parameters, gradients and optimizer state in chunks on several tiers (docs/memory.md) ---------------- */
/* Kinds of chunks. The kinds from PS_KIND_STATE on are optimizer states, which ps_kind_state assigns to names. */
enum { PS_KIND_PARAM, PS_KIND_PARAM_FP32, PS_KIND_GRAD, PS_KIND_STATE, PS_KIND_COUNT = 64 };
const char *ps_kind_name(int kind);      /* name of a kind of chunks, "param" ...; NULL if there is no such kind */
/* Returns the kind of chunks for the optimizer state with this name. An unknown name gets the next kind, which is
 * valid in this process only. PS_EINVAL: the name is empty or longer than 31 characters, or there are already
 * PS_KIND_COUNT kinds. */
int ps_kind_state(const char *name);
/* Spacing against false dependences. An update reads and writes the same position in chunks of all kinds at once. If
 * all these addresses had equal offsets within their pages, a processor would mistake a write to one for a read of
 * another and slow down. So tensors begin at a different multiple of PS_KIND_SHIFT bytes in chunks of each kind,
 * provided the chunks are large enough. */
enum { PS_KIND_SHIFT = 4864 };
typedef struct ps_chunk_config {
  int32_t device, host;        /* ids of the compute device and of host memory; equal if there is no device tier */
  int32_t policy;              /* ps_policy_find */
  int32_t prefetch;            /* 1 if copies are started before their chunks are used */
  int32_t stress;              /* for tests: 1 if chunks move at every pin, and the memory that they leave is
                                * overwritten */
  int32_t disk_threads;        /* 0 for io_uring, otherwise the number of plain threads */
  int32_t disk_checksums;      /* 1 if bytes read from the disk are compared with the bytes that were written */
  int32_t pad;
  int64_t budget[3];           /* bytes of device, host and disk. 0 means no limit for device and host, and no disk
                                * tier for disk */
  int64_t ahead[3];            /* bytes per tier that chunks may occupy because they were fetched before their use;
                                * 0: chosen automatically */
} ps_chunk_config;
typedef struct ps_chunk_info {
  int32_t kind, group, index, dtype;
  int32_t state, pins, n_tensors;
  int32_t valid;               /* bit set of the tiers (indices of ps_tier_info) that have a valid copy */
  int64_t nbytes, used_nbytes;
  int64_t last_use, next_use;  /* trace indices in this step; -1 if there is none or it is unknown */
} ps_chunk_info;
typedef struct ps_tier_info {
  char name[16];               /* "device", "host" or "disk": key in the configuration and name in messages */
  int32_t device, pad;         /* id of the device that has the memory; -1 for a file, which no op can read */
  int64_t budget, chunks, other, free, peak;   /* All in bytes. budget is 0 if there is no limit. peak counts chunks
                                                * and other tensors together. */
  int64_t bytes_up, bytes_down;                /* total bytes copied up from this tier, and down to it */
} ps_tier_info;
typedef struct ps_step_forecast {
  int32_t n_moments, n_uses;
  int64_t peak[3];             /* bytes per tier: chunks and other tensors */
  int64_t other[3];            /* bytes of other tensors per tier */
  int64_t fetched[2], evicted[2];   /* bytes per step that are fetched up to tier i, and evicted down from tier i */
  int64_t first_fetched[2], first_evicted[2];   /* fetched and evicted bytes of the next step, which starts from the
                                                 * chunks' current positions */
  /* The first op that has room only because other tensors use less than their peak at its trace index. wanted: bytes
   * of chunks that it needs at once on short_tier. left: bytes left for them there. wanted is 0 if there is no such
   * op. */
  int64_t wanted, left, short_tier;
  int64_t resident;            /* bytes of chunks that live only on tier 0, because the last tier has no room for
                                * them */
  int64_t gathers, gathered;   /* number of stripes that a step gathers from other ranks, and their bytes */
} ps_step_forecast;

/* -- the engine: trains parameters that live in chunks. One per context. ------------------------------------------
 * PS_ESTATE, for every function below: no engine is open. */
/* Opens the context's engine. `step` is used by this engine only. PS_ESTATE: an engine is already open, or another
 * engine uses the step. PS_EINVAL: budgets or devices are impossible. PS_EIO, PS_ENOSPC: the disk tier's file cannot
 * be made, or has too little space. PS_EUNSUP: a device cannot copy chunks. */
int ps_engine_open(ps_ctx *ctx, ps_step *step, const ps_chunk_config *config, const char *disk_folder);
void ps_engine_close(ps_ctx *ctx);       /* Closes the engine. Tensors in chunks lose their bytes. */
int ps_engine_is_open(ps_ctx *ctx);
/* Eviction policies are numbered from 0, by their rows in src/chunk/policy.c. */
int ps_policy_find(const char *name, int *out);      /* finds a policy by name. PS_EINVAL: there is no such policy;
                                                      * the message contains all names */
const char *ps_policy_name(int policy);  /* NULL if there is no such policy */
/* Makes a chunk; chunks are numbered from 0. PS_EINVAL: there is no such kind, or nbytes is not a multiple of 4096. */
int ps_engine_chunk_new(ps_ctx *ctx, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *chunk);
/* Moves the storage of a contiguous tensor, which the tensor must cover, to `offset` (bytes, a multiple of 256) in a
 * chunk. PS_EINVAL: the tensor or the position does not fit. PS_ESTALE: the tensor's bytes are gone. PS_ENOMEM,
 * PS_EIO, PS_ENOSPC: there is no room for the chunk, or the disk failed; the tensor then stays where it was. */
int ps_engine_adopt(ps_ctx *ctx, ps_tensor *t, int32_t chunk, int64_t offset, const char *name);
/* Makes a tensor of `like`'s shape in a chunk, filled with zeros. Its header is on device `device`. PS_EINVAL: the
 * device is not one of the engine's, or the position does not fit or is occupied. */
int ps_engine_tensor_new(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t chunk, int64_t offset,
                         const char *name, ps_tensor **out);
/* Like ps_engine_tensor_new, for a shape [ndim]. Returns errors of ps_engine_tensor_new. */
int ps_engine_tensor_shaped(ps_ctx *ctx, int ndim, const int64_t *shape, int dtype, int device, int32_t chunk,
                            int64_t offset, const char *name, ps_tensor **out);
/* Returns a tensor with the same bytes for use on another device of the engine. PS_EINVAL: there is no such device,
 * or the tensor is in no chunk. */
int ps_engine_tensor_at(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out);
/* -- sharding (ZeRO): the ranks of a group share the chunks -------------------------------------------------------
 *
 * ps_engine_shard is called before the first chunk is made. Stage 0: every rank has everything, and gradients are
 * summed. Stage 1: each optimizer state has one owner. Stage 2: each gradient has one owner, too. Stage 3: each
 * parameter has one owner, too. If `once` is 1, stages 2 and 3 reduce the gradients of several micro-batches once
 * per step, and every rank keeps its own sums until then. If it is 0, the gradients are reduced in each backward.
 * The engine holds a reference to the group. All ranks make the same calls. PS_ESTATE: there are already chunks.
 * PS_EINVAL: there is no such stage. */
typedef struct ps_group ps_group;
int ps_engine_shard(ps_ctx *ctx, ps_group *group, int stage, int once);
/* A part is the bytes of one chunk, as seen by all ranks. A stripe has at most one part per rank. Both are numbered
 * from 0. */
typedef struct ps_part_config {
  int32_t owner, dtype;        /* owner: a rank. dtype: the type in which the part's bytes are reduced. */
  int32_t chunk;               /* the part's chunk on this rank; -1 if it has none, and the bytes are temporarily on
                                * `device` */
  int32_t device, stripe;
  int32_t reads;               /* 1 for values, of which every rank uses the owner's; 0 for gradients */
  int32_t keeps;               /* 1 if the bytes stay until the end of the step once they have been read */
  int64_t nbytes;
} ps_part_config;
/* Makes a part. PS_EINVAL: a rank, stripe, chunk or size does not fit. PS_ESTATE: the chunks are not shared. */
int ps_engine_part(ps_ctx *ctx, const ps_part_config *config, int32_t *part);
/* Drops a part without tensors. A part with tensors is dropped with its last tensor. PS_EINVAL: there is no such
 * part. */
int ps_engine_part_drop(ps_ctx *ctx, int32_t part);
/* Like ps_engine_adopt and ps_engine_tensor_new, with a part instead of a chunk. Returns the errors of these
 * functions. If the tensor is already in a part, all ranks must call ps_engine_part_adopt. */
int ps_engine_part_adopt(ps_ctx *ctx, ps_tensor *t, int32_t part, int64_t offset, const char *name);
int ps_engine_part_tensor(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t part, int64_t offset,
                          const char *name, ps_tensor **out);
/* Returns a tensor over the bytes of t that only this rank uses. *out is NULL if another rank owns these bytes.
 * PS_EINVAL: t is in no chunk and in no part. */
int ps_engine_own(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out);
/* Returns a hash of the gathers that the step expects, or 0 if none are known. If the hashes of ranks differ, no
 * rank may gather ahead: all drop the expectation. */
double ps_engine_gathers(ps_ctx *ctx);
void ps_engine_gathers_drop(ps_ctx *ctx);
/* Must be called by all ranks after values were written without using the parts: the next read of each part gathers
 * it again. Returns errors of ps_apply, from exchanges under way. */
int ps_engine_forget(ps_ctx *ctx);
/* Sets the stages of a pipeline. The ranks of `stages` run the other virtual stages of this model, which has
 * n_numbers parameters (ps_param.number is below n_numbers). The norm then includes the parameters of all stages,
 * with the bits of a single process that has all parameters. `copies` contains the ranks that have the copies of
 * PS_TIE_COPY, including this one, or is NULL. All ranks call the function before ps_engine_params. The engine holds
 * references to the groups. PS_ESTATE: there are already parameters, or the function was called before. PS_EINVAL:
 * the model has no parameters. PS_ENOMEM. */
int ps_engine_stages(ps_ctx *ctx, ps_group *stages, ps_group *copies, int32_t n_numbers);
/* Sets the tensor-parallel group. Its ranks share the same layers. After the last backward of a step, one exchange
 * sums all gradients of PS_TP_PARTIAL over the ranks, in fp32 and in the order of ranks. The norm counts each
 * parameter once, in the order of ranks. All ranks of `tp` have the same parameters with the same owners, each in
 * the rank's own shapes, and call this function before ps_engine_params. The engine holds a reference to the group.
 * PS_ESTATE: there are already parameters, or the function was called before. PS_ENOMEM. */
int ps_engine_tensor_parallel(ps_ctx *ctx, ps_group *tp);
/* Plans the collectives of the step that begins. The plan contains the collectives of `group` that the dry run of a
 * trace recorded. *hash is a hash of the plan. It is 0 if the dry run recorded no collectives, there is no such
 * trace, or there is no memory for a plan. PS_ESTATE: no engine is open. */
int ps_engine_plan_calls(ps_ctx *ctx, int32_t trace, ps_group *group, uint64_t *hash);
/* Returns the ops (PS_OP_*) that ran in the forward of a trace's dry run, in order, without views. *n is 0 if there
 * is no such trace, or if no dry run made it. *ops is valid until the next dry run. PS_ESTATE: no engine is open. */
int ps_engine_forward_ops(ps_ctx *ctx, int32_t trace, const uint16_t **ops, int32_t *n);
/* Sets a unit's stripe, and the parts with its values and gradients. If grad_part is -1, gradients are stored in the
 * place of values. PS_ERANGE: there is no such unit. PS_EINVAL: the stripe has units of another virtual stage. */
int ps_engine_unit_parts(ps_ctx *ctx, int unit, int32_t stripe, int32_t param_part, int32_t grad_part);
typedef struct ps_param {
  ps_tensor *param, *master;           /* master: `param` itself or an fp32 tensor; NULL if another rank owns it */
  ps_tensor *state[PS_MAX_STATES];     /* the first n_states entries are optimizer states. All tensors are on the
                                        * compute device. */
  ps_tensor *host[2 + PS_MAX_STATES];  /* param, master and states for the host, NULL if the host is the compute
                                        * device */
  ps_tensor *grad;                     /* tensor for the gradient if it has a place of its own, else NULL */
  int32_t group, unit;                 /* group: the optimizer's group. unit: parameters whose states are in the same
                                        * chunks. */
  int32_t vstage, number;              /* vstage: virtual stage whose backwards add to the gradient. number: index of
                                        * the parameter in the model. */
  int32_t tie, tp;                     /* PS_TIE_*, PS_TP_* */
  int32_t n_states, pad;               /* 0 if another rank owns the states */
} ps_param;
/* A parameter that several virtual stages use has a sum of gradients for each use. When all backwards are over,
 * these sums are added in the order of the virtual stages, so that bits do not depend on the table.
 *   USE: another use, on this rank, of the parameter with the same number. `param` is the same tensor. `grad` holds the
 *   use's sum, and is the tensor's gradient while backwards of `vstage` run. A use has no master, states or unit, and
 *   follows all parameters.
 *   COPY: other ranks have a copy of the parameter. The sums of all copies are added in the order of the ranks of
 *   ps_engine_stages' `copies`, and the copies stay equal. */
enum { PS_TIE_NONE, PS_TIE_USE, PS_TIE_COPY };
/* What a backward computes for a parameter on one rank of tensor parallelism. WHOLE: every rank has the whole
 * parameter and computes its whole gradient, with the same bits. SPLIT: every rank has a shard of the parameter and
 * computes that shard's whole gradient. PARTIAL: every rank has the whole parameter and computes one addend of its
 * gradient. A PS_TIE_USE has the value of the parameter's first use. */
enum { PS_TP_WHOLE, PS_TP_SPLIT, PS_TP_PARTIAL };
/* Sets all trained parameters, in ascending order of (vstage, number), followed by their other uses in the same
 * order. Norms are summed by number. All parameters of a unit are in one virtual stage. Retains the tensors.
 * PS_EINVAL: the order is wrong; a unit is in two virtual stages; a tie lacks its first use, its ranks or a tensor
 * for its gradient; a shard lacks its tensor-parallel group; or a tensor is missing or does not fit. */
int ps_engine_params(ps_ctx *ctx, int n, const ps_param *params, int n_units, int n_groups);
/* Sets the device on which ops see a parameter and its gradient: the compute device, or the host. PS_EINVAL: another
 * device, or the tensor is in no chunk. PS_ESTATE: the tensor has a gradient or a history. */
int ps_engine_set_device(ps_ctx *ctx, ps_tensor *t, int device);
/* Sets where a unit is updated; 0 (the default) is the host. PS_ERANGE: there is no such unit. */
int ps_engine_set_on_device(ps_ctx *ctx, int unit, int on_device);
/* Computes, within the step's norm, the sum of squares of all gradients, which is infinite or NaN if a gradient is.
 * PS_ESTATE: the step's norm is not under way. Also returns errors of ps_apply, and of ranks. */
int ps_engine_sq_norm(ps_ctx *ctx, double *out);
/* Returns the sum of squares of the gradients of n parameters of the model, from number `first` on
 * (ps_param.number), on any rank. Called after the norm, in the same step. PS_ERANGE: the model has no such numbers. */
int ps_engine_sq_norm_of(ps_ctx *ctx, int32_t first, int32_t n, double *out);
/* Updates, within the step's update, all parameters that this step has not updated yet. Gradients are multiplied by
 * the action's scale and then dropped. PS_ESTATE: the step's update is not under way. Also returns errors of
 * ps_apply; a second call then updates the other parameters. */
int ps_engine_update(ps_ctx *ctx);
/* Drops all gradients. A parameter is restored from its master if a gradient was stored in its place.
 * Returns errors of ps_apply. */
int ps_engine_drop_grads(ps_ctx *ctx);
/* These functions read or set, for one parameter, the number of its updates, whether this step has already updated
 * it, and a factor on its gradient in this step's update, in addition to the group's factor. PS_ERANGE: there is no
 * such parameter. PS_EINVAL: `steps` is negative. */
int64_t ps_engine_param_steps(ps_ctx *ctx, int param);
int ps_engine_set_param_steps(ps_ctx *ctx, int param, int64_t steps);
int ps_engine_param_updated(ps_ctx *ctx, int param);
int ps_engine_param_scale(ps_ctx *ctx, int param, double scale);
/* Computes the bytes of other tensors that are on a tier now and were not there when trace `id` was made. They are
 * garbage, or tensors that stay. *nbytes is 0 if the plan's slack covers them. If `adopt` is 1, the next plan
 * includes them. PS_ERANGE: the trace no longer exists. */
int ps_engine_leftover(ps_ctx *ctx, int32_t id, int adopt, int64_t *nbytes);
/* Forecasts a step that repeats trace `id` by making its plan. PS_ERANGE: the trace no longer exists. PS_ENOMEM: the
 * step does not fit; ps_error_get_detail returns the tier and the bytes. */
int ps_engine_forecast(ps_ctx *ctx, int32_t id, ps_step_forecast *out);
/* One use of a chunk by a step: at trace index `moment` its bytes must be on `tier` (0 or 1). Trace indices number
 * the ops of a step that use chunks, from 0. Uses are sorted by trace index. Uses with the same index are needed at
 * once, and a chunk occurs at most once among them. write: the op changes the chunk. ends: the chunk's contents end
 * with this use, so its next use allocates memory and moves nothing. action: PS_ACT_* of the step's action that uses
 * the chunk. */
typedef struct ps_use {
  int32_t moment, chunk;
  int8_t tier, write, ends, action;
} ps_use;
/* Length of a trace, and peak bytes of other tensors on each tier. */
typedef struct ps_trace_info {
  int32_t n_uses, n_moments;
  int64_t other[3];
} ps_trace_info;
/* Returns trace `id` and its first `room` uses in order (room 0: no uses; `uses` may be NULL). PS_ERANGE: the trace
 * no longer exists. */
int ps_engine_trace_get(ps_ctx *ctx, int32_t id, ps_trace_info *out, int32_t room, ps_use *uses);
int ps_engine_settle(ps_ctx *ctx);       /* waits for copies under way. PS_EIO, PS_EBACKEND: a copy failed */
typedef struct ps_engine_stats {
  double wait_s;               /* seconds that ops have waited for copies since the engine was opened */
  int64_t waits;
  int64_t unplanned;           /* chunks that a pin fetched because no plan had fetched them */
  double ranks_wait_s;         /* seconds that steps have waited for other ranks */
} ps_engine_stats;
int ps_engine_stats_get(ps_ctx *ctx, ps_engine_stats *out);
/* Rates for plans. The call measures them with up to `nbytes` of memory on each side, which it frees afterwards. It
 * must not be made during a dry run or a step. PS_EINVAL: the devices are not an accelerator and host memory. Also
 * returns errors of ps_apply. */
typedef struct ps_rates {
  double host_adam, device_adam;   /* parameters per second (bf16 with fp32 state) that Adam updates; on the host
                                    * while copies run */
  double up, down;             /* bytes per second to the device and from it, with both directions in use */
  double at_once;              /* fraction of the device's time in Adam during which the host is free */
  double seconds;              /* duration of the measurement */
  int64_t numel;               /* number of parameters in a trial */
} ps_rates;
int ps_rates_measure(ps_ctx *ctx, int device, int host, int64_t nbytes, ps_rates *out);
/* Measures the sequential rates of the disk tier with `nbytes` in each direction. PS_ESTATE: there is no disk tier,
 * the run is a dry run, or copies are under way. PS_EIO, PS_ENOSPC: the disk failed, or has too little free space. */
int ps_engine_disk_probe(ps_ctx *ctx, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s);
/* These functions describe chunks and tiers, for display. PS_ERANGE: there is no such chunk or tier. */
int ps_engine_chunk_count(ps_ctx *ctx);
int ps_engine_chunk_get(ps_ctx *ctx, int chunk, ps_chunk_info *out);
const char *ps_engine_chunk_tensor(ps_ctx *ctx, int chunk, int i);
int ps_engine_tensor_chunk(ps_ctx *ctx, const ps_tensor *t);     /* the tensor's chunk on this rank, or -1 */
int ps_engine_holds(ps_ctx *ctx, const ps_tensor *t);            /* 1 if the tensor is in a chunk of this rank or
                                                                  * another one */
int ps_engine_tier_count(ps_ctx *ctx);
int ps_engine_tier_get(ps_ctx *ctx, int tier, ps_tier_info *out);

/* -- files --------------------------------------------------------------------------------------------------------- */
/* Writes a file atomically. PS_EIO: the system refused; the message has its reason and, if the disk is full, the
 * bytes wanted and free. */
int ps_file_write_atomic(const char *path, const void *data, int64_t nbytes);
int ps_file_fsync_dir(const char *path);
/* Finds the file that ps_file_write_atomic replaces or makes, and writes its path to out [room]. Follows links, even to
 * a file that does not exist, so that links stay. PS_EIO: there are more than 40 links, or the path and its final 0 do
 * not fit. Other faults are reported when the path is opened. */
int ps_file_target(const char *path, char *out, int64_t room);
/* Renames the folder `from` to `path`, atomically and durably. Returns 1 if a folder `path` existed; it is then
 * named `from`. Otherwise returns 0. PS_EIO as above. */
int ps_file_swap_folder(const char *from, const char *path);
/* Diverts files: from now on, files that this process writes through the functions of this header are stored in
 * `folder`, and are read from there under their own paths. The folders of these paths need not exist, and cannot be
 * renamed. Zeros take no space in such a file. `folder` NULL ends the diversion. PS_EINVAL: `folder` is "" or too
 * long. PS_ENOMEM. */
int ps_file_divert(const char *folder);
/* Returns 1 if a path is diverted: the file would be written (writes 1), or was written and would be read (writes
 * 0), at another path, which is stored in out [room]. Returns 0 if the path itself is used. PS_EINVAL: an argument
 * is NULL. PS_ERANGE: `room` is too small. */
int ps_file_diverted(const char *path, int writes, char *out, int64_t room);

/* -- the process ----------------------------------------------------------------------------------------------------
 */
double ps_now(void);                     /* seconds of a monotonic clock */
int64_t ps_rss_peak(void);               /* bytes */
/* Performs once, with zeros, each matrix product that the processor has computed with the current number of threads,
 * including the products of dry runs, in the order of their first use. Afterwards the process holds the memory that
 * oneDNN keeps for these products (code, heap buffers, pages of libraries). *operations is the number of operations
 * of all products. Returns 0 and performs none if this number is more than `most`, if a product writes more than 128
 * MiB, or if there were too many kinds to record; otherwise returns 1. PS_ENOMEM: there is no room for the operands.
 * PS_EBACKEND. */
int ps_products_rehearse(double most, double *operations);
/* Counts the first Ctrl-C, SIGTERM or SIGHUP instead of ending the process; the next Ctrl-C or SIGTERM ends it.
 * PS_EINVAL: the system refused. */
int ps_interrupts_install(void);
void ps_interrupts_remove(void);
int ps_interrupts(void);                 /* the number of counted signals */
int ps_is_terminal(int fd);
int ps_terminal_columns(int fd);         /* 80 if the width is unknown */
void ps_set_threads(int n);              /* compute threads, */
int ps_threads_most(void);               /* the largest allowed number of threads */
int ps_threads(void);
/* -- torch .pt --------------------------------------------------------------------------------------------------- */
/* A file of torch.save. Its values form a tree, in which a shared value is reached by several paths. Each value has
 * an id. PS_EIO: the file cannot be read, or was truncated. PS_EFORMAT: it is not a file of torch.save, uses a name
 * that is not allowed, or is damaged. PS_ERANGE: there is no such value or item. PS_EINVAL: the value is of another
 * kind. */
enum { PS_PT_NONE, PS_PT_BOOL, PS_PT_INT, PS_PT_FLOAT, PS_PT_STRING, PS_PT_BYTES, PS_PT_NAME, PS_PT_LIST, PS_PT_TUPLE,
       PS_PT_SET, PS_PT_DICT, PS_PT_TENSOR };
typedef struct ps_pt_value {
  int32_t kind, count;         /* kind: PS_PT_*. count: items of a container; a dict has its keys and values
                                * alternately. */
  int64_t integer;             /* value of BOOL or INT; for a text, its number of bytes */
  double number;               /* FLOAT */
  const char *text;            /* STRING, BYTES or NAME ("torch.float32"), lent, without a final 0 */
} ps_pt_value;
typedef struct ps_pt_tensor {
  int32_t dtype, ndim;         /* dtype is -1 for an unsupported type, whose name is in `type` */
  int64_t shape[8], stride[8], offset;               /* strides and offset in elements */
  int64_t numel, nbytes, storage_nbytes;             /* nbytes is numel times the element size */
  int32_t storage, pad;        /* id of the storage; tensors with equal ids share their bytes */
  const char *type;            /* "torch.float32" */
  const void *data;            /* bytes of the storage, lent until close; call ps_pt_ready before reading them */
} ps_pt_tensor;
typedef struct ps_pt ps_pt;
int ps_pt_open(const char *path, ps_pt **out);       /* maps the file and checks everything except the tensors'
                                                      * bytes; executes no code of the file */
void ps_pt_close(ps_pt *pt);
int ps_pt_root(const ps_pt *pt);                     /* id of the value that was saved */
int ps_pt_get(const ps_pt *pt, int value, ps_pt_value *out);
int ps_pt_item(const ps_pt *pt, int value, int i);   /* id of item i of a container */
int ps_pt_tensor_get(const ps_pt *pt, int value, ps_pt_tensor *out);
int ps_pt_ready(const ps_pt *pt);                    /* PS_EIO: the file was truncated while it was open */
int ps_pt_verify(ps_pt *pt, int value);              /* compares a tensor's storage with its checksum, only once;
                                                      * PS_EFORMAT: damaged */
/* Copies elements first to first + numel - 1, in row-major order, of a tensor from ps_pt_tensor_get, whose sizes the
 * caller may have reduced. PS_ERANGE: the tensor has no such elements. PS_EIO: the file was truncated. */
int ps_pt_copy(const ps_pt *pt, const ps_pt_tensor *tensor, int64_t first, void *dst, int64_t numel);
/* Returns the number of bytes of the text that ps_ptw_note added, and the text, lent until close, without a final 0.
 * Returns 0 if there is no text. PS_EFORMAT: the text is damaged. */
int64_t ps_pt_note(ps_pt *pt, const char **text);
void ps_pt_drop(const ps_pt *pt, int value);         /* frees the pages of a tensor whose bytes are not needed soon */
/* A writer: declare all values, begin, write each storage, commit. PS_ESTATE: a call out of this order. PS_EINVAL: a
 * value or size does not match the declaration. PS_EIO: the file cannot be written. */
typedef struct ps_ptw ps_ptw;
int ps_ptw_new(const char *path, ps_ptw **out);
int ps_ptw_storage(ps_ptw *w, int dtype, int64_t numel);      /* its number */
int ps_ptw_put(ps_ptw *w, const ps_pt_value *value);          /* Declares the next value. The items of a container
                                                               * follow it. Returns the id of a container, 0 for
                                                               * other values. */
int ps_ptw_again(ps_ptw *w, int container);                   /* declares the next value: a container that was
                                                               * declared completely before */
int ps_ptw_tensor(ps_ptw *w, const ps_pt_tensor *tensor);     /* declares a tensor, from the fields ndim, shape,
                                                               * stride, offset and storage */
int ps_ptw_note(ps_ptw *w, const char *text);        /* adds a text that PyTorch does not read */
int ps_ptw_begin(ps_ptw *w);                         /* reserves space for the whole file, so that a full disk fails
                                                      * here */
int ps_ptw_write(ps_ptw *w, int storage, const void *data, int64_t nbytes);   /* writes the next bytes of a storage */
int ps_ptw_commit(ps_ptw *w);
void ps_ptw_free(ps_ptw *w);                         /* frees the writer; without a commit, removes the temporary
                                                      * file */
/* -- groups of ranks: processes that train together (docs/distributed.md) ------------------------------------------ */
int ps_group_self(ps_ctx *ctx, ps_group **out);             /* makes a group of one rank. PS_ENOMEM */
/* Makes the group of rank `rank` of `size` with simulated other ranks, for dry runs (ps_machine_pretend). The other
 * ranks have the same values as this one. PS_EINVAL: there is no such rank in a world of this size. */
int ps_group_pretend(ps_ctx *ctx, int rank, int size, ps_group **out);
/* How the ranks of a group find each other. All ranks pass the same values except for `rank`. */
typedef struct ps_meeting {
  /* "tcp://host:port": rank 0 listens at this address only, while the group is made. "file:///path": rank 0 listens
   * on a free port and writes its address to the file. */
  const char *rendezvous;
  const char *run;             /* name that distinguishes this run from others, at most 128 bytes; NULL or "" for no
                                * name */
  /* Secret that only the ranks know. The ranks prove that they know it, and never send it. If it is NULL or "",
   * there is no secret, and a process that knows the run's name is accepted as a rank. If there is no secret and
   * ranks meet by a file, rank 0 makes a secret and writes it to the file, which only this user can read. */
  const char *secret;
  int32_t rank, size;
  int32_t machines, pad;       /* 1 if all ranks are on this machine, 2 if they are on several machines, 0 if unknown */
  double timeout_s;            /* longest time that making the group, and every call below, can wait */
  double heartbeat_s;          /* A rank that is silent for this long, or dies, is reported to all ranks by name, and
                                * their calls fail. */
} ps_meeting;
/* PS_EUNSUP: this build has no Gloo. PS_ETIME: not all ranks connected in time. PS_EIO: an address cannot be used,
 * or a connection broke. PS_EFORMAT: another program answers. PS_ESTATE: a process of another run, or with another
 * secret, answers, or the rank is taken. */
int ps_group_gloo(ps_ctx *ctx, const ps_meeting *meeting, ps_group **out);
int ps_host_is_loopback(const char *host);                  /* 1 if no other machine can reach this one by this
                                                             * address */
void ps_group_close(ps_group *group);
/* Notifies the other ranks of all groups that this process is about to end. `why` is its error message. The other
 * ranks get the first line of the message, and their calls then fail. If `why` is NULL, the process ends normally,
 * which is a fault only for ranks that wait for this one. */
void ps_groups_end(const char *why);
/* Waits for the bytes of all collectives of all groups. A collective on device memory returns before its bytes have
 * arrived, and later work on the memory is ordered after them. Returns the error of a collective that failed
 * meanwhile, unless another call has already returned it. */
int ps_groups_settle(void);
int ps_group_rank(const ps_group *group);
int ps_group_size(const ps_group *group);
int ps_group_number(const ps_group *group);                 /* value of the attribute `group` of ops, or -1 if there
                                                             * are too many groups */
int64_t ps_group_bytes_sent(const ps_group *group);         /* total bytes of tensors sent to other ranks, also
                                                             * counted for ps_group_pretend */
int64_t ps_group_bytes_in_pieces(const ps_group *group);    /* the part of these bytes that was sent while products
                                                             * ran */
/* These functions implement agreement by plan, for the calls of ps_engine_plan_calls. All ranks begin it together,
 * and pass `agreed` 1 if all have the same nonzero hash. Ranks then compare only the index of a planned call; other
 * calls are compared as usual. */
int32_t ps_group_plan_calls(const ps_group *group);
/* Writes planned call i, from 0, as text: "all_reduce (call 3, fp32, 64 bytes)". PS_ERANGE: there is no such call. */
int ps_group_plan_call(const ps_group *group, int32_t i, char *text, int64_t room);
void ps_group_plan_begin(ps_group *group, int agreed);
int64_t ps_group_planned(const ps_group *group);          /* total number of calls that all ranks made as planned */
/* Makes a group of some of `parent`'s ranks, over the same connections and under the same watch: a rank that fails
 * in one of the two groups fails in both. Like a collective, all ranks of the parent call it at the same time, each
 * with the list of the ranks of its own new group. `ranks` [n] contains ranks of the parent, in the order of the new
 * group. `axis` is the group's name in errors, with 1 to 15 letters, digits and "_". If no other call orders them,
 * both groups may be used at the same time. Either may be closed first. PS_EINVAL: the lists of two ranks do not
 * match (an error on all), or there are already 32 groups over these connections. PS_ENOMEM. Also returns errors of
 * the calls below. */
int ps_group_split(ps_group *parent, int n, const int32_t *ranks, const char *axis, ps_group **out);
const char *ps_group_axis(const ps_group *group);           /* name of the group; "" if it has all ranks */
int ps_group_world_rank(const ps_group *group, int rank);   /* the rank's index among all ranks; PS_EINVAL: there is
                                                             * no such rank */
/* Sets how device memory is sent to other ranks. If `never` is 1, it is sent through host memory. If `must` is 1, it
 * is sent from device to device; if this is impossible for any reason, even in a world of one, it is an error. If
 * both are 0, it is sent from device to device if all ranks can do so. Called before the first connection, with
 * equal values on all ranks. */
void ps_group_devices(ps_group *group, int never, int must);
/* Connects the ranks' devices, so that the calls below accept tensors on them. All ranks call it, or the first of
 * the calls below does. PS_EUNSUP: a rank cannot connect its device; the message has the reason, and the group
 * continues with host memory. PS_ESTATE: another device is already connected. Also returns errors of the calls
 * below. */
int ps_group_connect(ps_group *group, ps_ctx *ctx, int device);
const char *ps_group_carrier(const ps_group *group);        /* library that sends device memory, "nccl"; "" if there
                                                             * is none */
enum { PS_REDUCE_SUM, PS_REDUCE_MAX, PS_REDUCE_MIN };
/* Collectives on contiguous tensors of one device. Each call blocks until the work of this rank is finished. All
 * ranks make the same calls in the same order. Before bytes move, the ranks compare call, type, size and root. Sums
 * of floating-point types are computed in fp32 (in fp64 for fp64) in the order of ranks, and rounded once. Sums of
 * int32 and int64 wrap around. max and min return NaN if any rank has a NaN; like sums of integers, they work only
 * in host memory. PS_EINVAL: the ranks' calls differ (an error on all), or a tensor is not contiguous. PS_EUNSUP: a
 * sum of another type or in other memory, or a device without contents. PS_ESTALE: a tensor's bytes are gone.
 * PS_ETIME: a rank did not arrive in time. PS_EIO: a rank died or failed, or its connection broke; the message names
 * it. PS_ESTATE: the group failed before, or the device is not connected. */
int ps_group_all_reduce(ps_group *group, ps_tensor *t, int reduce);     /* PS_REDUCE_*, in place */
int ps_group_reduce_scatter(ps_group *group, ps_tensor *out, ps_tensor *in);     /* out: shard `rank` of the sum */
int ps_group_all_gather(ps_group *group, ps_tensor *out, ps_tensor *in);         /* out: the `in` of all ranks, in
                                                                                  * order */
int ps_group_broadcast(ps_group *group, ps_tensor *t, int root);
int ps_group_barrier(ps_group *group);
int ps_group_send(ps_group *group, ps_tensor *t, int peer);     /* the peer must call recv at the same time */
int ps_group_recv(ps_group *group, ps_tensor *t, int peer);

/* -- pipelines: the executor performs one rank's row of a lowered table (src/pipe/exec.c) -------------------------
 * The executor sends, receives and keeps the tensors between virtual stages, runs backwards, computes deferred
 * weight gradients and reduces gradients. Work that needs the model's code or the script becomes an event for the
 * caller:
 *     ps_pipe_expect for each virtual stage and micro-batch whose tensors have changed
 *     ps_step_begin, unless there is no step; ps_pipe_begin
 *     ps_pipe_next -> an event; its work; ps_pipe_done      until the event is the end (PS_ACT_NONE)
 * In a step, the work of a FORWARD begins with ps_step_next and ends with ps_step_done. The work of a YIELD is the
 * body of the script's loop, which calls ps_pipe_mark. A SEGMENT means that the walk of a BACKWARD, INPUT or WEIGHT
 * has stopped at a recompute segment, a function's backward or hooks (ps_backward_begin_n); its work is to run them.
 * Other actions of the step become events before they are performed in two cases: Lua's garbage should be collected
 * (ps_step_collects), or there is a listener (`tells` of ps_pipe_begin). An error ends the step: ps_pipe_abort
 * notifies the other ranks, whose calls fail with its text. Transfers overlap the work: a message is sent when its
 * action ends, and the messages that the next action needs are received meanwhile. */
typedef struct ps_pipe ps_pipe;
enum { PS_PIPE_CARRY = 16 };   /* most tensors that a virtual stage passes to the next one */
typedef struct ps_pipe_tensor {
  int32_t dtype, device, ndim;
  int32_t grad;                /* 1 if a gradient of the tensor is sent back */
  int64_t shape[8];
} ps_pipe_tensor;
typedef struct ps_pipe_event {
  int32_t kind;                /* FORWARD, YIELD or SEGMENT, or NONE at the end of the row. For BACKWARD, INPUT,
                                * WEIGHT and REDUCE, the executor performs the action next if there is a step;
                                * otherwise the caller does. */
  int32_t vstage, local;       /* index of the virtual stage in the model, and on this rank */
  int32_t micro;
  int32_t again;               /* for a FORWARD of a dry row: 1 if ps_pipe_done also performs it (ps_pipe_repeat) */
  int32_t n, n_before;
  int32_t collect, pad;        /* collect: 1 if Lua's garbage should be collected now */
  ps_tensor *const *in;        /* for a FORWARD: [n] outputs of the previous virtual stage, lent until ps_pipe_done */
  const ps_action *before;     /* [n_before] actions of the row that the executor performed since the previous event,
                                * lent as long as the table exists */
  int64_t segment;             /* for a SEGMENT: id of the segment, function or hooks at which the walk stopped */
  double seconds;              /* seconds of backwards, weight gradients and reductions since the previous event */
  double loss;                 /* for a YIELD: the micro-batch's loss */
  double weight;               /* for a YIELD: the weight from ps_pipe_weigh; -1 if the last virtual stage set none */
  double hits, targets;        /* for a YIELD: the counts from ps_pipe_score; both 0 if the last virtual stage set
                                * none */
} ps_pipe_event;
/* Opens the executor of this rank's row, whose index is the rank in the group. All ranks of the group call it with
 * equal tables. Table, group and context may be closed before the executor. PS_ESTATE: the table is not lowered.
 * PS_EINVAL: the group has another size. Also returns errors of ps_group_split. */
int ps_pipe_open(ps_ctx *ctx, const ps_pipe_table *table, ps_group *group, ps_pipe **out);
void ps_pipe_close(ps_pipe *x);
/* Sets which tensors a virtual stage will pass to the next one in a micro-batch; both ranks must set the same. `n`
 * is 0 to PS_PIPE_CARRY. If it is 0, a message without a tensor is sent. PS_ESTATE: a step is under way. PS_ERANGE:
 * there is no such virtual stage or micro-batch. */
int ps_pipe_expect(ps_pipe *x, int vstage, int micro, int n, const ps_pipe_tensor *carry);
/* Sets a virtual clock: an action takes the time of its cost [vstages], and a message takes the time of the link,
 * however long they really take. If `costs` is NULL, there is no clock (the initial state). PS_EINVAL: as in
 * ps_pipe_simulate. PS_ESTATE: a step is under way. */
int ps_pipe_clock(ps_pipe *x, const ps_pipe_cost *costs, const ps_pipe_link *link);
/* Returns the times of the last step by the virtual clock. `spans` (lent) contains a span for each action of the
 * row. PS_ESTATE: there is no clock. */
int ps_pipe_measured(const ps_pipe *x, ps_pipe_rank_times *out, const ps_pipe_span **spans);
/* Begins a step. `step` is the step under way, lent until the end. The step's table contains the row's forwards,
 * backwards and reductions in the same order, with virtual stages by their indices on this rank. If `step` is NULL,
 * there is no step, for example for a table of only forwards, and the caller performs all actions. If `dry` is 1,
 * messages are neither sent nor awaited, tensors have no contents, and losses are 0. If `tells` is 1, every action
 * of the step becomes an event before it is performed. PS_ESTATE: a step is already under way. */
int ps_pipe_begin(ps_pipe *x, ps_step *step, int dry, int tells);
/* Number of micro-batches at the beginning of a dry row that are performed. The first one makes gradients; the
 * following ones must have equal effects. The last micro-batch of the row is also performed, since it ends the sums
 * of gradients. */
enum { PS_PIPE_PERFORMED = 3 };
/* Makes the micro-batches [first, end) of later dry rows repeat the effects of micro-batch first - 1 on memory,
 * chunks and other ranks. The step's actions are performed, but only forwards become events, with `again` set, so
 * that the caller can collect garbage before them. Inputs have the shapes of the PS_PIPE_PERFORMED - 1 micro-batches
 * before them. These must have equal effects; otherwise the row fails with PS_ESTATE, and ps_pipe_differed returns
 * 1. If first == end, no micro-batch repeats another (the initial state). PS_ESTATE: a step is under way. PS_EINVAL:
 * the first PS_PIPE_PERFORMED micro-batches or the last one are in the range. */
int ps_pipe_repeat(ps_pipe *x, int first, int end);
int ps_pipe_differed(const ps_pipe *x);  /* 1 if the last dry row failed because micro-batches had different effects */
/* Reports that the caller's collector has run in a dry row, so that bytes that waited for it are freed. */
void ps_pipe_collected(ps_pipe *x);
/* Sets the settings (ps_step_next) of the last BACKWARD or WEIGHT of each virtual stage. They are copied. Must be
 * called before the first of these actions. The weight is that of ps_pipe_mark. Without this call the settings are
 * NULL. PS_ESTATE: no step is under way. PS_ENOMEM. */
int ps_pipe_settings(ps_pipe *x, const ps_action_how *how);
/* Sets the weight in the step (ps_action_how) of a micro-batch whose YIELD was returned. Without this call the
 * weight is 0. On the rank of the last virtual stage, `root` is the tensor that the script made of the loss. The
 * walk begins at this tensor, which is held until then. If `root` is NULL, the walk begins at the loss itself.
 * PS_ESTATE: no step is under way. PS_ERANGE: there is no such micro-batch. PS_EINVAL: another rank passes a root.
 * PS_ESTALE: the root's bytes are gone. */
int ps_pipe_mark(ps_pipe *x, int micro, ps_tensor *root, double weight);
/* Sets the weight of the loss that the current FORWARD made. Called before its ps_pipe_done. The ranks of other
 * stages get the weight with the loss. PS_ESTATE, PS_ERANGE: as for ps_pipe_mark. */
int ps_pipe_weigh(ps_pipe *x, int micro, double weight);
/* Like ps_pipe_weigh, sets how many targets of the FORWARD its largest logits hit, and the number of targets.
 * Returns errors of ps_pipe_weigh. */
int ps_pipe_score(ps_pipe *x, int micro, double hits, double targets);
/* Returns the event that is due, and may wait for messages. PS_EINVAL: a message differs from the table, or a tensor
 * that should have a gradient has none. PS_ETIME, PS_EIO: as for groups; the message names rank and action.
 * PS_ESTATE: no step is under way, the previous event has not ended, or the step's table is not that of the row.
 * Also returns errors of a walk (ps_backward_begin_n), of weight gradients (ps_backward_weights) and of
 * ps_step_done; after these the step's action is still under way. */
int ps_pipe_next(ps_pipe *x, ps_pipe_event *out);
/* Ends an event. For a FORWARD, out [n] contains the tensors for the next virtual stage, as in ps_pipe_expect. For
 * the last virtual stage it contains the loss, a single number, and other tensors that the caller wants to keep with
 * it. For other events n is 0. PS_EINVAL: the tensors are not the expected ones. Also returns errors of
 * ps_pipe_next. */
int ps_pipe_done(ps_pipe *x, int n, ps_tensor *const *out);
/* Ends the step after this rank failed, or abandons it. Nothing of the step is kept. `why` is a text for the other
 * ranks, whose calls then fail. If `why` is NULL, the other ranks are not notified, because they failed themselves
 * or there are none. */
void ps_pipe_abort(ps_pipe *x, const char *why);
/* @endcdef */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
