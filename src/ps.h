/* SPDX-License-Identifier: BSD-3-Clause
 * The public C API of psluajit. The text between the two cdef marks is, word for word, what Lua declares through the
 * FFI, so it holds only enums, opaque and plain structs and prototypes: no preprocessor, no inline, no struct by value.
 * For the same reason it is one file, and longer than files of code may be.
 *
 * Conventions. `_new` and `out` parameters give the caller a reference to release; `_get` lends. Sizes: `numel` counts
 * elements, `nbytes` counts bytes. Dimensions, tensors and ids count from 0; ranges are half-open. A context and its
 * tensors belong to one thread. Loaders and files may be used from any one thread at a time.
 *
 * Errors. A function that can fail returns 0 (or a number that is not negative) or a negative PS_E* code, and leaves a
 * message (ps_error_message). Outputs are untouched on failure. The comment of a function, or of the group of functions
 * that it stands in, names its codes and their causes. Three codes have one cause everywhere, which is not repeated:
 * PS_EINVAL, an argument is NULL, of a wrong size, shape or type, or contradicts another one; PS_ENOMEM, there is no
 * memory for records, for a result or for work space; PS_ESTATE, the context is closed. A call that runs ops also
 * returns the errors of ps_apply. */
#ifndef PS_H
#define PS_H
#include <stddef.h>
#include <stdint.h>
#include "ps_gen.h" /* generated from ops.def and errors.def: enum of errors, enum of ops, struct ps_attrs_<op> */

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)    /* all other symbols of the engine are hidden (CMakeLists.txt) */

/* @cdef */
enum { PS_MAX_DIMS = 8, PS_MAX_IN = 64, PS_MAX_OUT = 8, PS_MAX_ATTRS = 256,
       PS_MAX_PIECES = 8 /* pieces in which rows are exchanged during a product */,
       PS_MAX_COLUMNS = 3 /* products of rows that are gathered once */ };
enum { PS_F32, PS_BF16, PS_F16, PS_F64, PS_I32, PS_I64, PS_U8, PS_BOOL, PS_DTYPE_COUNT };

typedef struct ps_ctx ps_ctx;
typedef struct ps_storage ps_storage;
typedef struct ps_node ps_node;

/* A tensor: a strided view of a storage. Scripts may read dtype_ .. stride_ (strides and offset in elements). */
typedef struct ps_tensor {
  int32_t dtype_, ndim, device_, flags;   /* the `_` is there because scripts have a method of that name */
  int64_t numel_, offset;
  int64_t shape_[8];
  int64_t stride_[8];
  /* private */
  int32_t refs, node_out;
  ps_ctx *ctx;
  ps_storage *storage;
  ps_node *node;               /* the op that computed it, if backward may pass that op */
  struct ps_tensor *grad_;     /* only of a leaf */
  void *managed;               /* only of a leaf: an engine's record of this parameter, or NULL */
  ps_node *hook;               /* only of a leaf with hooks: the node where its gradients are summed before the hooks
                                * run; else NULL */
} ps_tensor;
/* GRAD_F32: gradients of this leaf are summed in fp32. SLOT: a gradient in its parameter's place. LATER: a gradient
 * that will be read when weight gradients that were put off are computed. */
enum { PS_T_REQUIRES_GRAD = 1, PS_T_GRAD_F32 = 2, PS_T_SLOT = 4, PS_T_LATER = 8 };

/* -- errors: the last one of this thread ------------------------------------------------------------------------- */
const char *ps_error_message(void);
const char *ps_error_where(void);        /* file:line in the engine */
const char *ps_error_op(void);           /* the op that was running, or NULL */
const char *ps_error_name(int code);     /* "EINVAL" ... */
const char *ps_error_sub_name(int sub);  /* name such as "OP_CHUNKS"; NULL for PS_SUB_NONE */
/* Numbers that a program may act on without parsing the message. -1: the error has no such number. */
typedef struct ps_error_detail {
  int32_t sub;                 /* PS_SUB_*: which error of its code this is */
  int32_t tier;                /* number of the tier without room (ps_engine_tier_get); -1 also for other memory */
  int32_t rank, stripe;        /* the rank that caused it, and its stripe of chunks */
  int32_t other_rank, other_stripe;       /* if two ranks do not match: the other rank */
  int64_t wanted, left;        /* number of bytes wanted at once, and number of bytes left for them, which is negative
                                * if the other contents of the tier alone exceed it. wanted -1: neither is known */
} ps_error_detail;
const ps_error_detail *ps_error_get_detail(void);   /* message of the last error; valid until this thread's next
                                                     * error */
const char *ps_version(void);
const char *ps_abi_hash(void);           /* hash of this declaration text; the Lua half compares it */

/* -- context ----------------------------------------------------------------------------------------------------- */
int ps_ctx_new(ps_ctx **out);           /* PS_ENOMEM */
void ps_ctx_free(ps_ctx *ctx);           /* tensors that are still held stay valid headers without bytes */
/* A simulated machine. host_nbytes: its free memory; 0: as much as this machine's. device_nbytes: memory of the GPU,
 * the device cuda; 0: there is none. device_total: all bytes of the GPU, including those that the engine cannot use.
 * device_sms: its multiprocessors. device_total and device_sms determine the work space of kernels; if they are 0, it
 * is that of the processor's kernels. */
typedef struct ps_machine { int64_t host_nbytes, device_nbytes, device_total, device_sms; } ps_machine;
/* From now on, new contexts have that machine's devices, without their memory: ops allocate but do not compute, the
 * disk tier has no file, and only values that a script writes exist. PS_EINVAL: NULL, or below 0. */
int ps_machine_pretend(const ps_machine *machine);
int ps_machine_pretended(void);          /* 1 after ps_machine_pretend */
int ps_device_count(ps_ctx *ctx);
const char *ps_device_name(ps_ctx *ctx, int device);                 /* "cpu", "ref", "meta" */
const char *ps_device_describe(ps_ctx *ctx, int device);             /* instruction set, threads and libraries in use */
/* A device by name; "cuda" is opened at its first use. PS_EUNSUP: no such device, or it cannot be opened. */
int ps_device_find(ps_ctx *ctx, const char *name, int *out);
/* The abilities of a device. is_host: the processor can read its memory. has_data: its tensors have contents (tensors
 * of meta do not). fast_bf16: it multiplies bf16 faster than fp32. fuses: an op that combines several ops is faster
 * than these ops. PS_EINVAL: there is no such device. */
typedef struct ps_device_info { uint8_t is_host, has_data, fast_bf16, fuses; } ps_device_info;
int ps_device_info_get(ps_ctx *ctx, int device, ps_device_info *out);
/* This process's number on its machine, which selects one of several cards when "cuda" is opened. -1: the number in a
 * launcher's variables. */
void ps_local_rank_set(int local_rank);
/* Bytes of a device's memory: in use by tensors, the peak in use, reserved from the system, and the limit (0: none). */
typedef struct ps_memory_info { int64_t used, peak, reserved, limit; } ps_memory_info;
int ps_memory_get(ps_ctx *ctx, int device, ps_memory_info *out);     /* PS_EINVAL: no such device */
int ps_memory_set_limit(ps_ctx *ctx, int device, int64_t nbytes);    /* PS_EINVAL: no such device, or below 0 */
void ps_memory_reset_peak(ps_ctx *ctx, int device);
/* The largest tensors of a device's plain memory (without chunks): NOW; at the PEAK of use (within 1/256 of it); or
 * FAILED, when memory was last refused (device -1: on the device that refused). Largest first, at most PS_HOLDERS;
 * returns their number. *used: bytes in use then. PS_EINVAL: no such device or `when`. */
enum { PS_HOLDERS = 16 };
enum { PS_HOLD_NOW, PS_HOLD_PEAK, PS_HOLD_FAILED };
typedef struct ps_holder {
  int64_t nbytes;
  const char *op;              /* the op that made it; NULL: none, for example for ps.zeros */
  int32_t module;              /* the module under way then (ps_module_enter); for an op of backward, the module of its
                                * forward; 0: none */
  int32_t line;                /* line from ps_tensor_note_line; 0: none */
  uint8_t backward, scratch;   /* made by a gradient rule; used as work space of a kernel */
  uint8_t pad[6];
} ps_holder;
int ps_memory_holders(ps_ctx *ctx, int device, int when, ps_holder *out, int64_t *used);
int64_t ps_memory_available(ps_ctx *ctx, int device);     /* number of bytes that could still be allocated; -1: there is
                                                           * no such device */
/* Lua's collector frees the bytes of tensors that a script no longer refers to and that no scope drops. True if a
 * collection is due: since the last one, tensors outside chunks have grown by a quarter. It is true once per
 * collection. */
int ps_collect_due(ps_ctx *ctx);
/* Bytes of tensors that were made since the last collection and still exist, in use or not; below 0 if more were
 * freed. */
int64_t ps_collect_waiting(const ps_ctx *ctx);
/* Called after a collection. The next one is due after a quarter of the bytes in use, and after at least `least`. */
void ps_collected(ps_ctx *ctx, int64_t least);

/* -- tensors ----------------------------------------------------------------------------------------------------- */
int64_t ps_dtype_size(int dtype);        /* bytes per element */
const char *ps_dtype_name(int dtype);    /* "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "bool" */
/* Makes a tensor whose contents are not set. PS_EINVAL: no such type or device, or a shape that is out of range.
 * PS_ENOMEM names the device, the bytes wanted and the bytes free. */
int ps_tensor_new(ps_ctx *ctx, int dtype, int device, int ndim, const int64_t *shape, ps_tensor **out);
void ps_tensor_retain(ps_tensor *t);
void ps_tensor_release(ps_tensor *t);
void ps_tensor_note_line(ps_tensor *t, int32_t line);       /* the caller's number for the line of the script that made
                                                             * it */
void ps_tensor_drop(ps_tensor *t);         /* frees its bytes, unless other tensors share them; the header stays */
int ps_tensor_keep(ps_tensor *t);        /* outlives every scope until it is released. PS_ESTALE: its bytes are gone */
int ps_tensor_alive(const ps_tensor *t); /* 0 after a scope dropped its bytes */
/* From now on t, and everything that refers to it, has the bytes, device and strides of `from`; its own bytes are
 * freed. For a leaf that was made without data (device meta) and gets its values later. PS_EINVAL: another type or
 * shape. PS_ESTALE: the bytes of `from` are gone. PS_ESTATE: an op computed t, it has a gradient, or its bytes are in
 * use. */
int ps_tensor_set_data(ps_tensor *t, ps_tensor *from);
int64_t ps_tensor_nbytes(const ps_tensor *t);        /* numel times element size */
int ps_tensor_is_contiguous(const ps_tensor *t);
uint32_t ps_tensor_version(const ps_tensor *t);      /* increases with every write to its bytes */
/* Copies whole row-major contents between host memory and a contiguous tensor. PS_EINVAL: nbytes does not match
 * exactly. PS_ESTALE: the tensor's bytes are gone. PS_EUNSUP: not contiguous, or on a device without contents. PS_EDRY:
 * a read in a dry run. */
int ps_tensor_write(ps_tensor *t, const void *src, int64_t nbytes);
/* Reads bytes at .. at + nbytes of a source to dst. Several threads may call it at the same time. Returns 0 or an
 * error. */
typedef int (*ps_reader)(const void *from, int64_t at, void *dst, int64_t nbytes);
/* Like ps_tensor_write, but with bytes from a reader, on all compute threads; into host memory without an extra copy.
 * Also errors of the reader; the contents are then partly the old ones. */
int ps_tensor_load(ps_tensor *t, ps_reader read, const void *from, int64_t at, int64_t nbytes);
/* Lent bytes: a tensor may use them as its own, and write to them. */
typedef struct ps_loan {
    void *bytes;
    int (*check)(void *lender);          /* called before each use: 0 if the bytes are unchanged, else an error */
    void (*end)(void *lender);           /* the bytes are no longer used */
    void *lender;
} ps_loan;
/* Lends bytes at .. at + nbytes of a source. Returns 0 or an error. */
typedef int (*ps_lender)(void *from, int64_t at, int64_t nbytes, ps_loan *out);
/* Like ps_tensor_load, but from now on the tensor uses the lent bytes themselves, without a copy; its own are freed.
 * The loan ends with the tensor, or when its bytes move into a chunk. PS_EUNSUP, without an effect: the tensor is a
 * part of another, or not in plain host memory, or its elements would not be at multiples of their size. PS_ESTATE: it
 * is in use. Errors of the lender. */
int ps_tensor_borrow(ps_tensor *t, ps_lender lend, void *from, int64_t at, int64_t nbytes);
int ps_tensor_is_lent(const ps_tensor *t);    /* 1: its bytes are those of ps_tensor_borrow's lender */
int ps_tensor_read(const ps_tensor *t, void *dst, int64_t nbytes);
/* Like ps_tensor_read, for contents that are written to a file: after ps_machine_pretend, a tensor without values
 * yields zeros. Errors of ps_tensor_read. */
int ps_tensor_save(const ps_tensor *t, void *dst, int64_t nbytes);
/* Returns XXH3 of a contiguous tensor's bytes in host memory, in chunks or not. PS_EUNSUP: not contiguous, or not in
 * host memory. PS_ESTALE: its bytes are gone. */
int ps_tensor_hash(ps_tensor *t, uint64_t *out);
/* Statistics of a host tensor with any strides, all in fp64. PS_ESTALE: its bytes are gone. PS_EUNSUP: a device apart
 * from the host. PS_EDRY: a tensor of a dry run. */
typedef struct ps_stats {
  int64_t numel;
  double mean;                 /* NaN without elements */
  double squares;              /* sum of (x - mean)^2: PyTorch's variance is this divided by numel - 1 */
  double min, max;             /* NaN if there are no elements, or if an element is NaN */
} ps_stats;
int ps_tensor_stats(const ps_tensor *t, ps_stats *out);
/* The address of a contiguous tensor's bytes in plain host memory, valid as long as the tensor has them. PS_EUNSUP: any
 * other tensor. PS_EDRY: a tensor of a dry run. */
int ps_tensor_address(ps_tensor *t, void **out);
/* Elements as doubles, from flat (row-major) position `first` on, of a host tensor with any strides; for printing and
 * item(). PS_ERANGE: positions beyond the tensor. PS_ESTALE: its bytes are gone. PS_EUNSUP: a device apart from the
 * host. PS_EDRY: a tensor of a dry run. */
int ps_tensor_read_f64(const ps_tensor *t, int64_t first, int64_t numel, double *dst);
int ps_tensor_write_f64(ps_tensor *t, int64_t first, int64_t numel, const double *src);
/* Returns a copy on a device. If t is already there, returns t itself, retained. Errors of ps_apply. */
int ps_tensor_to_device(ps_tensor *t, int device, ps_tensor **out);
/* Indices of elements that are not zero: int64 [count, ndim]; host devices only. PS_EUNSUP: another device. PS_EDRY: in
 * a dry run. PS_ESTALE: its bytes are gone. */
int ps_tensor_nonzero(ps_tensor *t, ps_tensor **out);

/* -- ops --------------------------------------------------------------------------------------------------------- */
/* Runs op `op` (PS_OP_*) on n_in inputs (NULL for an absent optional one). attrs is the op's struct ps_attrs_<op>.
 * outputs has PS_MAX_OUT places. If a place is not NULL on entry, the op writes into that tensor (only ops that declare
 * this). PS_EINVAL: inputs or attributes do not fit the op; the message has all shapes and types. PS_ESTALE: bytes of
 * an input are gone, or it was made in a dry run. PS_ERANGE: an index or target is out of range. PS_EUNSUP: no kernel
 * for the device and types. PS_ENOMEM names the device or tier, the bytes wanted and the bytes free. PS_EBACKEND: the
 * device failed. PS_EIO, PS_ENOSPC: a chunk could not be moved to or from the disk. PS_ETIME, PS_EIO: errors of ranks
 * (see groups). */
int ps_apply(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int64_t attrs_nbytes,
             ps_tensor **out);
/* Attention of T positions that follow `at` positions whose keys and values are in caches. Appends the keys and values
 * of the T positions to the caches, and returns the result [B, T, H D], in which each position sees all up to itself.
 * Runs the ops copy_, rope and attention on views that it makes, and has no gradient. q [B, T, H D], k, v [B, T, G D]
 * (also [B, T, H or G, D]) with caches keys, values [B, G, S, D], and cos, sin of rope or neither; or q [B, T, (H + 2
 * G) D], queries, keys and values next to each other, with one cache keys [B, 2 G, S, D], keys then values, and k, v,
 * values, cos, sin NULL. mask bool [B, at + T], or NULL. PS_EINVAL: also if a gradient would be needed. Errors of
 * ps_apply. */
typedef struct ps_cached_attention {
  int64_t heads, groups, at;   /* H, G, at */
  int32_t window, pad;         /* as in attention */
  double scale;                /* 0: 1 / sqrt(D) */
} ps_cached_attention;
int ps_attention_cached(ps_ctx *ctx, const ps_cached_attention *how, ps_tensor *q, ps_tensor *k, ps_tensor *v,
                        ps_tensor *keys, ps_tensor *values, ps_tensor *cos, ps_tensor *sin, ps_tensor *mask,
                        ps_tensor **out);
/* The cost of an op. FLOPs: the multiplications and additions of matrix products and attention (in attention, for pairs
 * of query and key that see each other); 0 for other ops. bytes: those that it reads and writes, each counted once. */
typedef struct ps_op_cost_info { int64_t flops, bytes; } ps_op_cost_info;
/* The cost of an op with these operands, of which only types and shapes are read; attrs as in ps_apply. `out` has n_out
 * places, NULL for an absent one. PS_EINVAL: no such op, or operands that it does not support. */
int ps_op_cost(int op, int n_in, ps_tensor *const *in, const void *attrs, int n_out, ps_tensor *const *out,
               ps_op_cost_info *cost);
/* Anomaly mode: while it is on, an op that makes a NaN or an infinity fails (PS_ERANGE, PS_SUB_ANOMALY);
 * tensor/anomaly.c has the rules. Each op's outputs are read, so training is several times slower. Returns the previous
 * setting. */
int ps_detect_anomaly(ps_ctx *ctx, int on);
void ps_anomaly_at(ps_ctx *ctx, int64_t place);     /* the caller's number for the place that calls ops from now on */
/* 1: the next op scales the loss, whose backward may overflow: infinities in backward do not count until a call with 0,
 * which must follow the step. */
void ps_anomaly_scaled(ps_ctx *ctx, int on);
typedef struct ps_anomaly_info {
  int64_t place;               /* where the op, or the op whose gradient it computed, was called; -1: unknown */
  int32_t op;                  /* PS_OP_* of the op that made it */
  int32_t of;                  /* PS_OP_* of the op whose gradient was computed; -1: not in backward */
  int32_t nan;                 /* 1: a NaN; 0: an infinity */
  int32_t module;              /* number of the module that called it (ps_module_enter); 0: none */
} ps_anomaly_info;
void ps_anomaly_get(ps_ctx *ctx, ps_anomaly_info *out);     /* for the last such error */
int ps_op_kernel_device(ps_ctx *ctx, int device, int op);  /* the device whose kernel runs the op there, or -1 */

/* -- the record of events (docs/profiling.md) -----------------------------------------------------------------------
 * One ring for the process. Times are nanoseconds of the clock of ps_now. OP: name is the op, from the device, to the
 * type of its first input, on 1: by the device's own clock; PART: a product within an op of several ranks, fields as
 * for an OP, id its rows; MODULE: an interval of the module; STEP: name 1 if it is the first, or had no plan; ACTION:
 * name is PS_ACT_*, id the micro-batch, to the virtual stage; COPY: name 0 up, 1 down, id the chunk, from and to tiers;
 * DISK: name 0 read, 1 write; COLLECTIVE: name is a number for ps_record_call_name, id the group, on its number of
 * ranks; WAIT: name is PS_WAIT_*, id the chunk or -1; CHUNK: name is PS_CHUNK_*, id the chunk, of its kind (PS_KIND_*),
 * to the tier that changed, on a bit set of the tiers on which it has memory; TIER: to the tier, bytes those of chunks;
 * DEVICE: the same without chunks. */
enum { PS_REC_OP = 1, PS_REC_MODULE, PS_REC_STEP, PS_REC_ACTION, PS_REC_COPY, PS_REC_DISK, PS_REC_COLLECTIVE,
       PS_REC_WAIT, PS_REC_CHUNK, PS_REC_TIER, PS_REC_DEVICE, PS_REC_PART };
enum { PS_WAIT_COPY, PS_WAIT_COLLECTIVE, PS_WAIT_MESSAGE };
enum { PS_CHUNK_ALLOCATE, PS_CHUNK_MOVE, PS_CHUNK_RELEASE, PS_CHUNK_THERE };   /* THERE: at the begin of the record */
enum { PS_RECORD_MOST = 1 << 26 };       /* the most events that a record can hold, 64 bytes each */
typedef struct ps_record_event {
  int64_t begin_ns, end_ns;
  int64_t number;              /* number from 1, in the order of the events' ends */
  int64_t bytes;
  int64_t flops;               /* for an OP; for a TIER or DEVICE: bytes of other tensors */
  int32_t step, module;        /* 0: none */
  int32_t id, of;
  uint16_t name, on;
  uint8_t kind, action, from, to;
} ps_record_event;
typedef struct ps_record_total { int64_t calls, ns, bytes, flops; } ps_record_total;
/* Begins a record of the last `events` events, and drops an earlier one. PS_EINVAL: too many. PS_ENOMEM. */
int ps_record_start(int64_t events);
void ps_record_stop(void);
int ps_record_is_on(void);
void ps_record_settle(ps_ctx *ctx);      /* waits for devices whose work is not in the record yet */
int64_t ps_record_count(int64_t *dropped);           /* number of events; *dropped: those that were overwritten */
/* Event i, oldest first. 1: it is being overwritten. PS_ERANGE: there is no such event. */
int ps_record_get(int64_t i, ps_record_event *out);
int ps_record_op_total(int op, ps_record_total *out);    /* all calls, including overwritten ones. PS_EINVAL: no such
                                                          * op */
const char *ps_record_call_name(int name);           /* for a COLLECTIVE; NULL: there is no such number */
int64_t ps_record_clock(void);           /* the present time by the clock of the events, in nanoseconds */
/* Counts operations (ps_op_cost) of the ops that run while counting is on, except in dry runs. It needs no record. on
 * 1: begins; 0: ends one such begin. */
void ps_flops_count(int on);
int64_t ps_flops_counted(void);
/* Sums over the calls between ranks, which a record has as COLLECTIVE, by call, group and size. They need no record,
 * and exclude the calls that a record excludes. names: a bit set of the calls to count, by the numbers of
 * ps_record_call_name; 0 stops. A new begin drops earlier sums. verbose: each call is printed when it ends. */
void ps_calls_count(uint32_t names, int verbose);
typedef struct ps_calls_total {
  int32_t name, group, ranks, pad;     /* group: number of the group, or -1 */
  int64_t nbytes;                      /* bytes of the whole tensor */
  int64_t calls, ns;
  char axis[16];                       /* the group's name, such as "tp"; "": all ranks */
} ps_calls_total;
/* Returns sum i, from 0, in the order of first calls. 1: there is no such sum. There are no other errors. */
int ps_calls_total_get(int64_t i, ps_calls_total *out);
/* The bytes that a call sends over each rank's link, per byte of the whole tensor. The "bus bandwidth" of NCCL's tests
 * is bytes per second times this. With n ranks: 2 (n - 1) / n for sums that all ranks get, (n - 1) / n for gathers and
 * for sums of which each rank gets a part, else 1. */
double ps_calls_bus(int name, int ranks);
/* A call of a module, which has a number above 0. enter returns the depth, which leave needs. Errors of memory name the
 * module under way, even without a record. The end of a scope also leaves the modules that were entered in it. */
int ps_module_enter(int id);
void ps_module_leave(int depth);
int ps_module_now(void);                 /* 0: none */

/* -- scopes: at the end the bytes of tensors that were made inside and not kept are dropped ------------------------ */
int ps_scope_begin(ps_ctx *ctx, int64_t *id);               /* PS_ENOMEM */
/* Also ends inner scopes that are still open. `keep` survives into the outer scope. PS_ESTATE: the scope is not
 * open. */
int ps_scope_end(ps_ctx *ctx, int64_t id, int n_keep, ps_tensor *const *keep);
int64_t ps_scope_depth(ps_ctx *ctx);

/* -- gradients --------------------------------------------------------------------------------------------------- */
int ps_grad_enabled(ps_ctx *ctx);
/* While it is on, tensors of a device apart from the host that backward will read are kept in host memory: inputs of
 * recompute segments, and tensors that only the tape still holds at the end of a scope. Returns the previous setting.
 * PS_EUNSUP: no host device. */
int ps_set_offload(ps_ctx *ctx, int on);
int ps_set_grad_enabled(ps_ctx *ctx, int enabled);          /* returns the previous setting; never fails */
/* While it is on, outputs of CHEAP ops (norms, GELU, SwiGLU) are kept for backward instead of being recomputed: more
 * memory, the same bits, 1 to 2 % less time on a GPU. Returns the previous setting; never fails. */
int ps_set_keep_cheap(ps_ctx *ctx, int on);
int ps_tensor_require_grad(ps_tensor *t, int on);           /* PS_EINVAL: not a leaf, or not a float tensor */
ps_tensor *ps_tensor_get_grad(ps_tensor *t);                /* lent, or NULL */
/* Retains the gradient; NULL clears it. PS_EINVAL: not a float tensor of t's shape on t's device. PS_ESTALE: its bytes
 * are gone. */
int ps_tensor_set_grad(ps_tensor *t, ps_tensor *grad);
/* When backward passes t, which an op computed, it copies t's gradient to the gradient of `holder`, a tensor of t's
 * shape without history (ps_tensor_detach makes one). PS_EINVAL: no op computed t, or gradients were off; or shape,
 * type or device differ. PS_ENOMEM. */
int ps_tensor_keep_grad(ps_tensor *t, ps_tensor *holder);
int ps_tensor_detach(ps_tensor *t, ps_tensor **out);        /* same bytes, no history. PS_ENOMEM */
/* 1: t is one of n tensors, or recorded ops made it from one of them; else 0. PS_ENOMEM. */
int ps_tensor_made_from(const ps_tensor *t, int n, ps_tensor *const *from);
/* Returns the number of the op that made t, which increases with each recorded op. -1: no recorded op made t. The
 * number stays valid after t is freed. */
int64_t ps_tensor_op_number(const ps_tensor *t);
/* Sets found[i] to 1 if the op with number ops[i] made t, or recorded ops made t from its result, else to 0. The search
 * does not continue beyond an op that it found. PS_ENOMEM. */
int ps_tensor_made_by(const ps_tensor *t, int n, const int64_t *ops, int8_t *found);
/* A backward walk from n roots at once. Each root has a gradient of its shape, or NULL if the root is a single value;
 * gradients NULL: no root has one. The nodes that lead to the roots are used up: a second walk through them is
 * PS_ESTATE. begin_n also walks, unless segment is NULL, and returns the result of next. 0: the walk has ended. 1: it
 * stopped; *segment is the number of the reason: a recompute segment (ps_segment_new), which the caller runs again
 * before it calls ps_backward_splice; a function of the script (ps_call_new), whose backward ends with ps_call_done; or
 * hooks (ps_tensor_hook), which end with ps_hooks_done. The caller then calls next. An error ends the walk. PS_EINVAL:
 * a root depends on nothing that requires a gradient, or its gradient has another shape. PS_ESTATE: a walk is under
 * way, or none is. PS_ESTALE: a tensor that a gradient rule reads was changed in place, or its bytes are gone. Gradient
 * rules run ops: errors of ps_apply. ps_backward_end abandons the walk under way, if any. */
enum { PS_MAX_ROOTS = 64 };
int ps_backward_begin_n(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int64_t *segment);
int ps_backward_next(ps_ctx *ctx, int64_t *segment);
/* Like ps_backward_begin_n. keep: 1: the nodes are not used up, and another walk can pass them. n_to > 0: the walk
 * passes only nodes that lead to the tensors `to`, and no leaf gets a gradient. After the walk, ps_backward_taken
 * returns the gradients of `to`, one reference each; NULL: none arrived. PS_EINVAL: a tensor of `to` requires no
 * gradient, or occurs twice; taken: another n. PS_ESTATE: a walk is under way. PS_ENOMEM. */
int ps_backward_for(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int keep, int n_to,
                    ps_tensor *const *to, int64_t *segment);
int ps_backward_taken(ps_ctx *ctx, int n, ps_tensor **gradients);
/* While the walk is stopped at a node, unless it is a segment: the gradient of output `out`, lent; NULL: none arrived.
 * PS_ESTATE: the walk is not stopped. PS_ERANGE: no such output. */
int ps_stop_gradient(ps_ctx *ctx, int out, ps_tensor **gradient);
/* A function with a backward of the caller's. `out` were computed with gradients off and become functions of `in`; NULL
 * among `in`: no tensor; among `out`: no gradient comes to it. The tensors `saved` (NULL: none) are kept for the
 * backward, with the check of other saved tensors against changes in place. Call ps_segment_begin before the function
 * runs, and ps_segment_cancel if it fails or has no node. *id: the caller's number for it. Result 1: as of
 * ps_segment_new. PS_EINVAL: no input or output, or an output that has a history, is no float tensor, or comes twice.
 * PS_ESTALE: bytes of a saved tensor are gone. PS_ENOMEM. */
int ps_call_new(ps_ctx *ctx, const char *name, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out,
                int n_saved, ps_tensor *const *saved, int64_t *id);
/* While the walk is stopped at such a function (else PS_ESTATE): saved tensor i, lent. PS_ESTALE: it was changed in
 * place. PS_ERANGE: no such tensor. */
int ps_call_saved(ps_ctx *ctx, int i, ps_tensor **out);
/* The gradients of all its inputs; NULL: none. Those of inputs that require none are ignored. devices: those of the
 * inputs. PS_EINVAL: not the number of inputs of ps_call_new, or a gradient of another shape, type or device; fp32 is
 * allowed for a half type. PS_ESTALE: bytes of one are gone. Else errors of ps_apply. */
int ps_call_done(ps_ctx *ctx, int n, ps_tensor *const *gradients, const int32_t *devices);
/* Makes the walk stop, with the number *id, when the gradient of t is complete: before it passes the op that computed
 * t, or before it adds to the gradient of t, a leaf. out: the number of t for the next two calls. A number is valid as
 * long as the op's node, or the leaf; ps_segment_reap reports its end. PS_EINVAL: t requires no gradient. PS_ESTATE: a
 * walk has passed its op. PS_ENOMEM. */
int ps_tensor_hook(ps_tensor *t, int64_t *id, int *out);
/* Replaces the gradient of output `out`. PS_ESTATE: the walk is not stopped at hooks. PS_EINVAL: of another shape, type
 * or device. PS_ESTALE: its bytes are gone. PS_ERANGE: no such output. */
int ps_hook_replace(ps_ctx *ctx, int out, ps_tensor *gradient);
int ps_hooks_done(ps_ctx *ctx);          /* the hooks have run. PS_ESTATE: the walk is not stopped at hooks */
/* A cut of the model: `out` are n new headers of the tensors that a pipeline stage received, from which the tape
 * records. A walk that reaches them sums their gradients, as for tensors that ops of this process made, and keeps them.
 * take returns them after the walk, one reference each; a second take returns none. NULL: no gradient arrived (an
 * integer tensor has none). If gradients are off, nothing is recorded. A stage whose inputs need no gradient, because
 * nothing before it is trained, needs no boundary. For the bits of the uncut model, received gradients must also have
 * no other owner when the walk continues: call ps_backward_begin_n with segment NULL, release the gradients, then call
 * ps_backward_next. PS_EINVAL: 0 or more than PS_MAX_ROOTS tensors, one with a history, or in take one of no boundary.
 * PS_ESTATE: a walk is under way. PS_ESTALE: bytes of a tensor are gone. PS_ENOMEM. */
int ps_boundary(ps_ctx *ctx, int n, ps_tensor *const *in, ps_tensor **out);
int ps_boundary_take(ps_ctx *ctx, int n, ps_tensor *const *out, ps_tensor **gradients);
/* Within an action WEIGHT (else PS_ESTATE): computes the weight gradients that the walk of its micro-batch and virtual
 * stage put off, since its action was INPUT. 1: stopped at hooks, as in ps_backward_next, with which the caller
 * continues. Every parameter gets the additions of an undivided backward, in their order. The end of the step drops
 * whatever a walk has put off. PS_ESTATE: nothing was put off, or a walk is under way. PS_ESTALE: a tensor was changed
 * in place meanwhile. Else errors of ps_apply. */
int ps_backward_weights(ps_ctx *ctx, int64_t *stopped);
/* Passes the gradients of the stopped segment's outputs to the re-run's outputs. PS_EINVAL: n or a shape differs from
 * the first run. PS_ESTATE: the walk is not stopped at a segment. */
int ps_backward_splice(ps_ctx *ctx, int n, ps_tensor *const *out);
void ps_backward_end(ps_ctx *ctx);
/* A recompute segment (Chen et al. 2016): outputs computed without gradients become functions of `in` whose backward is
 * a re-run. `segment` is the caller's number for it. The inputs are kept alive until the walk has passed. PS_EINVAL: no
 * output, or an output that has a history already. Result 1: the function read parameters of an engine, so that it
 * cannot run again once that is closed. */
void ps_segment_begin(ps_ctx *ctx);      /* before its function first runs: notes the parameters that it reads */
int ps_segment_new(ps_ctx *ctx, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out, int64_t *segment);
void ps_segment_cancel(ps_ctx *ctx);     /* instead of ps_segment_new, if the function failed */
/* The number of a segment that is no longer needed, or -1: the caller can drop its function. */
int64_t ps_segment_reap(ps_ctx *ctx);

/* -- random numbers: Philox (Salmon et al. 2011), keyed by seed ---------------------------------------------------- */
/* seed; step (of the optimizer), op (counts dropouts in a forward) and sample (number of the batch's first sample)
 * select the random numbers of dropout; offset counts numbers drawn by ps.randn and similar functions. */
typedef struct ps_rng { uint64_t seed, offset, step, sample; uint32_t op, pad; } ps_rng;
ps_rng *ps_rng_get(ps_ctx *ctx);         /* lent; may be read and written */

/* -- safetensors -------------------------------------------------------------------------------------------------- */
typedef struct ps_st ps_st;
typedef struct ps_st_entry {
    int32_t dtype, ndim;
    int64_t shape[8];
    int64_t at, nbytes;          /* at: position of its bytes, for ps_st_read */
} ps_st_entry; /* dtype -1: a type that this library does not have */
/* Maps the file and checks all of its header, and the header's checksum if there is one. PS_EIO: the file cannot be
 * read. PS_EFORMAT: it is not a safetensors file, or damaged. */
int ps_st_open(const char *path, ps_st **out);
void ps_st_close(ps_st *st);
int ps_st_count(const ps_st *st);
const char *ps_st_name(const ps_st *st, int i);
int ps_st_find(const ps_st *st, const char *name);          /* index or -1 */
int ps_st_get(const ps_st *st, int i, ps_st_entry *out);    /* PS_ERANGE: there is no tensor i */
const char *ps_st_dtype_text(const ps_st *st, int i);       /* as written in the file: "F32" ... */
int ps_st_meta_count(const ps_st *st);
const char *ps_st_meta_key(const ps_st *st, int i);
const char *ps_st_meta_value(const ps_st *st, int i);
const void *ps_st_data(const ps_st *st, int i);             /* lent until close; entry's nbytes of it */
/* A ps_reader of an open file's data, whose `from` is a ps_st: it uses read calls, so that the file takes no memory,
 * and a truncation meanwhile is an error. PS_ERANGE: the bytes are not all in the data. PS_EIO: they cannot be read. */
int ps_st_read(const void *st, int64_t at, void *dst, int64_t nbytes);
/* Elements first .. first + numel - 1, row-major, of the rectangle `shape` of tensor i that begins at `offset`; both
 * have a number for each dimension of the tensor. PS_ERANGE: there is no tensor i, or the range is not all in it.
 * PS_EUNSUP: a type that we lack. PS_EIO: the file was truncated. */
int ps_st_copy(const ps_st *st, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
               int64_t numel);
/* A ps_lender of an open file's data, whose `from` is a ps_st. Writes to the bytes change neither the file nor another
 * loan of the same bytes. The file stays open until the last loan ends, even after ps_st_close. PS_EIO, here and at a
 * use of the bytes: the file was written to. PS_ERANGE: they are outside the data. */
int ps_st_lend(void *st, int64_t at, int64_t nbytes, ps_loan *out);
void ps_st_drop(const ps_st *st, int i);                  /* its bytes were read, so their pages need not stay in
                                                           * memory */
/* Compares a tensor's bytes with their checksum. 1: equal; 0: the file has no checksums. PS_EFORMAT: damaged. PS_EIO:
 * the file was truncated. PS_ERANGE: there is no tensor i. */
int ps_st_verify(const ps_st *st, int i);
uint64_t ps_xxh3(const void *data, int64_t nbytes);         /* the checksum: XXH3, 64 bits */
/* A writer: declare all tensors, begin, write each, commit. PS_ESTATE: a call out of this order. PS_EINVAL: a duplicate
 * name or one that is not UTF-8, a size that does not match the declaration, or a header that is too large. PS_EIO: the
 * file cannot be written; the message has the bytes wanted and free. */
typedef struct ps_stw ps_stw;
int ps_stw_new(const char *path, ps_stw **out);
int ps_stw_checksums(ps_stw *w);                            /* before begin: adds checksums, computed while writing */
int ps_stw_meta(ps_stw *w, const char *key, const char *value);
int ps_stw_add(ps_stw *w, const char *name, int dtype, int ndim, const int64_t *shape);
int ps_stw_begin(ps_stw *w);                            /* reserves the whole size, so that a full disk is found here */
int ps_stw_write(ps_stw *w, const char *name, const void *data, int64_t nbytes);
int ps_stw_append(ps_stw *w, const char *name, const void *data, int64_t nbytes);   /* the next bytes of a tensor */
int64_t ps_stw_nbytes(const ps_stw *w);                     /* after begin: the number of bytes of all tensors; else
                                                             * -1 */
int ps_stw_place(ps_stw *w, const char *name, int64_t *out);    /* position of a tensor in the data */
int ps_stw_write_all(ps_stw *w, const void *data, int64_t nbytes);  /* all tensors at once, each at its position */
int ps_stw_commit(ps_stw *w);                               /* fsync, rename over path, fsync the folder */
void ps_stw_free(ps_stw *w);                                /* without commit: removes the temporary file */

/* -- GGUF, the files of llama.cpp ---------------------------------------------------------------------------------- */
typedef struct ps_gguf ps_gguf;
typedef struct ps_gguf_entry {
  int32_t type;                /* its number in files (ps_gguf_type_name) */
  int32_t dtype, ndim;         /* dtype of the values that are read: fp32 for blocks; -1: a type that we lack */
  int64_t shape[8];            /* from the outermost dimension on, in the order of ps_gguf_layout */
  int64_t at, nbytes;          /* at: position of its bytes, for ps_gguf_read */
  int32_t as_it_is;            /* 1: its bytes are the values, without blocks and in this order */
} ps_gguf_entry;
typedef struct ps_gguf_value { /* an entry of the metadata, or a value of an array */
  int32_t type, of;            /* numbers in files, 0 to 12: uint8 int8 uint16 int16 uint32 int32 float32 bool string */
                               /* array uint64 int64 float64; of: the type of an array's values, else the same */
  int64_t n;                   /* values of an array, else 1 */
  int64_t whole;               /* whole numbers (uint64 as its bits), truth values; the length of a string */
  double number;               /* any number */
  const char *text;            /* a string, without a final 0; lent until close */
} ps_gguf_value;
/* Maps the file and checks all of its header: versions 2 and 3. PS_EIO: the file cannot be read. PS_EFORMAT: it is not
 * a GGUF file, or damaged. */
int ps_gguf_open(const char *path, ps_gguf **out);
void ps_gguf_close(ps_gguf *g);
int ps_gguf_count(const ps_gguf *g);
const char *ps_gguf_name(const ps_gguf *g, int i);
int ps_gguf_find(const ps_gguf *g, const char *name);       /* index or -1 */
int ps_gguf_get(const ps_gguf *g, int i, ps_gguf_entry *out);           /* PS_ERANGE: there is no tensor i */
const char *ps_gguf_type_name(int type);                    /* "Q4_0"; NULL: there is no such type */
int ps_gguf_meta_count(const ps_gguf *g);
const char *ps_gguf_meta_key(const ps_gguf *g, int i);
int ps_gguf_meta_find(const ps_gguf *g, const char *key);   /* index or -1 */
/* Value k, from 0 on, of an array, or 0 for an entry that is not an array; -1: only types and n. PS_ERANGE: there is no
 * such value. PS_EIO: the file was truncated. */
int ps_gguf_meta_get(const ps_gguf *g, int i, int64_t k, ps_gguf_value *out);
/* How tensor i is read. heads: 0, or the number of heads whose rows (elements of a vector) llama.cpp keeps in pairs for
 * its rotary embedding, and which are read half a head apart, as Hugging Face's files have them. transposed: the two
 * dimensions of a matrix are swapped. PS_EFORMAT: the tensor has another shape. PS_ERANGE: there is no tensor i. */
int ps_gguf_layout(ps_gguf *g, int i, int64_t heads, int transposed);
/* Elements first .. first + numel - 1, row-major, of the rectangle `shape` of tensor i that begins at `offset`, as
 * values of the entry's dtype. PS_ERANGE: there is no tensor i, or the range is not all in it. PS_EUNSUP: a type that
 * we lack. PS_EIO: the file was truncated. */
int ps_gguf_copy(const ps_gguf *g, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
                 int64_t numel);
/* Bytes first .. first + nbytes - 1 of the packed rows of matrix i, which are in the order of ps_gguf_layout, but not
 * transposed; and the number of these rows, 0 if i is no matrix. Errors of ps_gguf_copy. */
int ps_gguf_copy_packed(const ps_gguf *g, int i, int64_t first, void *dst, int64_t nbytes);
int64_t ps_gguf_rows(const ps_gguf *g, int i);
int ps_gguf_read(const void *g, int64_t at, void *dst, int64_t nbytes);     /* a ps_reader, as ps_st_read */
int ps_gguf_lend(void *g, int64_t at, int64_t nbytes, ps_loan *out);        /* a ps_lender, as ps_st_lend */
void ps_gguf_drop(const ps_gguf *g, int i);                 /* as ps_st_drop */

/* Packs values as blocks of a type: the number of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K or Q6_K in GGUF files, or 256 for
 * NF4. out: the bytes of all blocks. PS_EUNSUP: another type. PS_EINVAL: the type's blocks do not divide numel.
 * PS_ERANGE: a value that is not finite, or above 65504. */
int ps_pack(int type, const float *values, int64_t numel, void *out);

/* A writer of version 3: declare all tensors in file order, begin, append values to each, commit. PS_ESTATE: a call
 * out of this order, or a tensor without all of its values. PS_EINVAL: a duplicate name, a shape that the type's
 * blocks do not divide, or too many values. PS_EUNSUP: a type that cannot be written, or values that are not floats.
 * PS_ERANGE: a value that the type cannot hold. PS_EIO: the file cannot be written. */
typedef struct ps_ggufw ps_ggufw;
int ps_ggufw_new(const char *path, ps_ggufw **out);
/* Errors of ps_ggufw_new. type: "F32", "Q4_0", ... The shape begins with the outermost dimension. heads and transposed:
 * as in ps_gguf_layout, for values that are appended in the order of Hugging Face's files. */
int ps_ggufw_add(ps_ggufw *w, const char *name, const char *type, int ndim, const int64_t *shape, int64_t heads,
                 int transposed);
/* Writes the header; errors of ps_ggufw_new. meta: the bytes of all entries of the metadata, as in files. */
int ps_ggufw_begin(ps_ggufw *w, const void *meta, int64_t nbytes, int64_t entries);
/* The next values of a tensor; errors of ps_ggufw_new. */
int ps_ggufw_append(ps_ggufw *w, const char *name, int dtype, const void *data, int64_t numel);
/* fsync, rename over path, fsync of the folder; errors of ps_ggufw_new. */
int ps_ggufw_commit(ps_ggufw *w);
void ps_ggufw_free(ps_ggufw *w);                             /* without commit: removes the temporary file */

/* A thread that writes a file while the script continues. One file at a time. PS_ESTATE: it is at work. PS_ENOMEM: no
 * thread can be started. */
typedef struct ps_saver ps_saver;
int ps_saver_new(ps_saver **out);
/* Takes over the writer after its begin (also on failure), writes `data` to it and commits. The data, of nbytes, must
 * not change until ps_saver_wait; an address that is a multiple of 4096 saves a copy. PS_ESTATE: the saver is at work.
 * PS_ENOMEM: no thread can be started. */
int ps_saver_start(ps_saver *s, ps_stw *writer, const void *data, int64_t nbytes);
int ps_saver_busy(ps_saver *s);                             /* 1 while it writes */
/* Waits for the end. Returns the file's error, once: errors of ps_stw_write and ps_stw_commit. seconds: the time of the
 * last file, or NULL. */
int ps_saver_wait(ps_saver *s, double *seconds);
void ps_saver_free(ps_saver *s);                            /* also waits */

/* A hash of a file's bytes, by XXH3 of blocks. PS_EIO: it cannot be read. */
int ps_file_hash(const char *path, uint64_t *out);

/* -- text files by line -------------------------------------------------------------------------------------------- */
/* The rows of a text file: its non-empty lines. A byte order mark at the start and a carriage return at the end of a
 * line are not part of a row. For one thread at a time. */
typedef struct ps_lines ps_lines;
/* Opens a file. index: a file of ps_lines_save, or "" for none. If the index does not match the file's size and time,
 * the file is read once. PS_EIO: the file cannot be read, or changes during the call. */
int ps_lines_open(const char *path, const char *index, ps_lines **out);
int ps_lines_scanned(const ps_lines *l);                    /* 1: the file was read, since the index did not match */
int64_t ps_lines_count(const ps_lines *l);                  /* rows */
/* Writes an index: the position of every 64th row, and the file's size and time. Atomic. PS_EIO: the index cannot be
 * written. */
int ps_lines_save(const ps_lines *l, const char *index);
/* Reads row i, from 0: its bytes, lent until the next call, and the number of its line, from 1. PS_ERANGE: i is not the
 * number of a row. PS_EIO: the file was changed or truncated since it was opened. */
int ps_lines_read(ps_lines *l, int64_t i, const char **text, int64_t *nbytes, int64_t *number);
void ps_lines_close(ps_lines *l);

/* -- token shards and the loader ----------------------------------------------------------------------------------- */
typedef struct ps_tokens ps_tokens;
/* Maps a shard: llm.c's .bin (header), or raw tokens of `width` bytes (2 or 4; 1: a text file read as bytes). width 0:
 * from the header, which must exist. PS_EIO: the file cannot be read. PS_EFORMAT: no header, one of another version, or
 * a size that is not a number of tokens. */
int ps_tokens_open(const char *path, int width, ps_tokens **out);
void ps_tokens_close(ps_tokens *s);      /* loaders hold their own reference */
int64_t ps_tokens_count(const ps_tokens *s);
/* PS_ERANGE: tokens beyond the file, or one that does not fit into int32. PS_EIO: the file was truncated. */
int ps_tokens_read(const ps_tokens *s, int64_t first, int64_t n, int32_t *dst);
/* Writes an llm.c shard, width 2 or 4, through a temporary file. PS_EIO: the file cannot be written. PS_ERANGE: a token
 * that does not fit into the width. PS_ESTATE: after commit, or after a write that failed. */
typedef struct ps_tokw ps_tokw;
int ps_tokw_new(const char *path, int width, ps_tokw **out);
int ps_tokw_append(ps_tokw *w, const int32_t *ids, int64_t n);
int ps_tokw_append_bytes(ps_tokw *w, const void *bytes, int64_t n);   /* each byte is a token */
int ps_tokw_commit(ps_tokw *w);
void ps_tokw_free(ps_tokw *w);

typedef struct ps_loader ps_loader;
typedef struct ps_loader_config {
  int64_t batch, seq;        /* rows of seq tokens for this rank; the targets are the next token of each */
  int64_t vocab;             /* a token >= vocab is an error that names file and place; 0: tokens are not checked */
  int64_t first, last;       /* range of the concatenated tokens that is used, half-open; last 0: to the end */
  uint64_t seed;
  int32_t shuffle;           /* 1: each epoch visits every window once, in a random order that begins at a random
                              * place */
  int32_t ahead;             /* batches prepared ahead by the background thread, >= 1 */
  int32_t rank, world_size;  /* returns rows [rank, rank + 1) * batch of batches of world_size * batch; size 0: like
                              * 1 */
} ps_loader_config;
typedef struct ps_loader_position { int64_t epoch, batch; } ps_loader_position;  /* position of the next batch of all
                                                                                  * ranks */
/* PS_EINVAL: settings out of range, or too few tokens for one batch. PS_ERANGE: a range beyond the files. PS_ENOMEM: no
 * memory for batches, or no thread. */
int ps_loader_new(int n, ps_tokens *const *shards, const ps_loader_config *config, ps_loader **out);
void ps_loader_free(ps_loader *l);
int64_t ps_loader_batches(const ps_loader *l);              /* number of full batches per epoch */
/* 1: there is a batch; 0: the epoch ended (the next call starts another). PS_ERANGE: a token >= vocab. PS_EIO: a file
 * was truncated. */
int ps_loader_next(ps_loader *l, int32_t *x, int32_t *y);
int ps_loader_get_position(ps_loader *l, ps_loader_position *out);                /* PS_EINVAL: NULL */
int ps_loader_set_position(ps_loader *l, const ps_loader_position *position);     /* PS_ERANGE: no such batch */

/* -- tokenizers: texts to token ids and back (lua/ps/tokenizer/init.lua) ----------------------------------------------
 * PS_ESTATE: files and settings after ready, or texts before it. */
typedef struct ps_tok ps_tok;            /* for one thread at a time */
typedef struct ps_tok_ids {              /* lent, until the tokenizer's next call */
  const int32_t *ids;
  const int32_t *offsets;                /* [n][2] half-open ranges of bytes in the text; NULL if not requested */
  int64_t n;
} ps_tok_ids;
int ps_tok_new(const char *model, ps_tok **out);             /* "bpe", "wordpiece" */
void ps_tok_free(ps_tok *t);
/* First the files, then the settings that they do not define, then `ready`; afterwards texts. PS_EIO: a file cannot be
 * read. PS_EFORMAT: it is not such a file. PS_EINVAL: an unknown format, setting or value. PS_EUNSUP: a setting or
 * pattern that is not supported. format: "vocab.json" ({"token": id}), "vocab.txt" (a token per line, ids from 0),
 * "merges.txt" (after its vocabulary), "tiktoken" (a token in base64 and its rank on each line; tokens are then spelled
 * in GPT-2's letters), "tokenizer.json" (its model's vocabulary and merges; ps_tok_rest lends the text without
 * them). */
int ps_tok_read(ps_tok *t, const char *format, const char *path);
int ps_tok_rest(const ps_tok *t, const char **text, int64_t *nbytes);
/* A vocabulary without a file: its tokens, then either merges of two of them, in order, or a score for each token, by
 * which SentencePiece's BPE merges (highest first; NaN: never made). PS_EFORMAT: a token that is not UTF-8, a token or
 * an id that is there already, or a merge of what are not tokens. */
int ps_tok_token(ps_tok *t, const char *token, int64_t nbytes, int64_t id);
int ps_tok_merge(ps_tok *t, const char *left, int64_t n_left, const char *right, int64_t n_right);
int ps_tok_scores(ps_tok *t, const float *scores, int64_t n);
int ps_tok_set(ps_tok *t, const char *name, int64_t value);  /* a setting in the list of src/data/tokenizer.c */
/* A regular expression of PCRE2: its matches, and the text between them, are words. Several expressions cut one after
 * the other. PS_EFORMAT: the pattern is wrong. PS_EUNSUP: too many patterns. */
int ps_tok_split(ps_tok *t, const char *pattern, int64_t nbytes);
/* Adds a step that changes a text of a BPE, after it is cut at added tokens and before it is cut into words: "nfc";
 * "prepend": puts `to` before a text that is not empty; "replace": replaces each `from` by `to`. Texts that a kind does
 * not need are "". PS_EUNSUP: there are already 8. PS_EINVAL: another kind, or an empty text. PS_EFORMAT: a text is not
 * UTF-8. PS_ESTATE: the tokenizer is ready. */
int ps_tok_normalize(ps_tok *t, const char *what, const char *from, const char *to);
enum { PS_TOK_SPECIAL = 1, PS_TOK_LSTRIP = 2, PS_TOK_RSTRIP = 4, PS_TOK_NORMALIZED = 8 };
/* Adds a token that is matched in texts as it is. If the vocabulary does not have it, it is new. PS_EFORMAT: the id is
 * taken, or the vocabulary has the token with another id. */
int ps_tok_add(ps_tok *t, const char *token, int64_t nbytes, int64_t id, int flags);
int ps_tok_ready(ps_tok *t);             /* PS_EFORMAT: files or settings are missing */
int64_t ps_tok_count(const ps_tok *t);                       /* 1 + the largest id */
int64_t ps_tok_missing(const ps_tok *t);                     /* number of bytes that have no token and no unk token */
int32_t ps_tok_find(const ps_tok *t, const char *token, int64_t nbytes);    /* id of a token as spelled in files; -1:
                                                                             * there is none */
int ps_tok_name(const ps_tok *t, int64_t id, const char **token, int64_t *nbytes);   /* PS_ERANGE: there is none */
/* Malformed UTF-8 becomes U+FFFD. PLAIN: special tokens in the text are plain text. PS_EINVAL: a text that is too long.
 * PS_ERANGE: a pattern needs too many steps. */
enum { PS_TOK_OFFSETS = 1, PS_TOK_PLAIN = 2 };
int ps_tok_encode(ps_tok *t, const char *text, int64_t nbytes, int flags, ps_tok_ids *out);
/* The text of ids; SKIP: without special tokens; BYTES: unchanged, otherwise invalid UTF-8 becomes U+FFFD. Lent like
 * ids. PS_ERANGE: an id that is not a token. */
enum { PS_TOK_SKIP = 1, PS_TOK_BYTES = 2 };
int ps_tok_decode(ps_tok *t, const int32_t *ids, int64_t n, int flags, const char **text, int64_t *nbytes);
int ps_tok_print(ps_tok *t, const int32_t *ids, int64_t n, const char **text, int64_t *nbytes);  /* in decimal */
typedef struct ps_tok_block {            /* a file that is processed in blocks */
  const char *path;                      /* for messages */
  const char *field;                     /* JSON lines: the key of the string that is a line's document; NULL: plain
                                          * text */
  int64_t line;                          /* number of lines before this block; increased by its lines */
  int64_t used;                          /* out: number of bytes that were used; the rest must begin the next block */
  int32_t mark;                          /* id that precedes each line's document; -1: none */
  int32_t threads, last, flags;          /* last: 1: this is the last block. flags: as in ps_tok_encode */
} ps_tok_block;
/* PS_EFORMAT: a line that is not a JSON object with that string; the message has file and line. Else errors of
 * ps_tok_encode. */
int ps_tok_encode_block(ps_tok *t, ps_tok_block *block, const char *text, int64_t nbytes, ps_tok_ids *out);

/* -- examples: tokenized rows of a table (lua/ps/data/examples.lua) --------------------------------------------------
 * For one thread at a time, except where it says otherwise. Examples and tokens count from 0. */
typedef struct ps_examples ps_examples;
/* Begins a list of examples. path: the file that holds them once they are complete (ps_examples_finish), of which only
 * the starts are in memory; "": all are in memory. key: [2], names the data that they are made of. wide: 1: examples
 * have labels or weights of their own (12 bytes per token, not 4). PS_EIO: the file cannot be created. */
int ps_examples_new(const char *path, const uint64_t *key, int wide, ps_examples **out);
/* Appends an example. labels: [n], -100 for a token that is not trained; NULL: the ids. weights: [n] of tokens, or
 * NULL. PS_ENOSPC, PS_EIO: the file cannot be written. PS_ERANGE: an id below 0. */
int ps_examples_add(ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t n,
                    double weight);
int ps_examples_finish(ps_examples *e);      /* none is added any more; writes and maps the file */
/* Maps a file of ps_examples_finish. PS_EIO: there is none. PS_EFORMAT: it is not complete. PS_ESTATE: it has another
 * key. */
int ps_examples_open(const char *path, const uint64_t *key, ps_examples **out);
int64_t ps_examples_count(const ps_examples *e);
int64_t ps_examples_tokens(const ps_examples *e);
uint64_t ps_examples_hash(const ps_examples *e);             /* of all ids, labels and weights */
/* Copies at most `room` ids and labels of example i; *n is their number. PS_ERANGE: there is no such example. */
int ps_examples_read(const ps_examples *e, int64_t i, int32_t *ids, int32_t *labels, int64_t room, int64_t *n);
void ps_examples_free(ps_examples *e);

/* Encodes texts to examples by threads, in the order of the texts. The tokenizer and the examples must not be used by
 * others, or freed, before ps_encoder_free. */
typedef struct ps_encoder ps_encoder;
typedef struct ps_encoder_config {
  const int32_t *special;                /* [n_special] ascending ids that a message's text does not become */
  const int32_t *prefix, *suffix;        /* ids around a whole text */
  int64_t n_special, n_prefix, n_suffix;
  int32_t threads, flags;                /* flags: of ps_tok_encode, for whole texts */
} ps_encoder_config;
typedef struct ps_encoder_text {
  const char *text;                      /* copied by the call */
  int64_t nbytes;
  /* [n][2] half-open ranges of bytes, each in order: from messages, tools, documents and unknown roles; from roles that
   * templates expect, which may lie inside a special token; that are trained. */
  const int64_t *message, *role, *trained;
  int64_t n_message, n_role, n_trained;
  int32_t whole;                         /* 1: a text whose tokens are all trained, between prefix and suffix */
  int32_t need;                          /* 1: at least one token must be trained; 2: and at least one must not */
  double weight;
} ps_encoder_text;
/* PS_EINVAL: a number of threads out of range. PS_ESTATE: the tokenizer is not ready. PS_ENOMEM: no thread starts. */
int ps_encoder_new(ps_tok *tok, ps_examples *examples, const ps_encoder_config *config, ps_encoder **out);
/* Queues a text. Waits for an earlier one if there are many. PS_EINVAL: an earlier text has no tokens, or `need` does
 * not hold; also errors of ps_tok_encode and ps_examples_add. */
int ps_encoder_put(ps_encoder *c, const ps_encoder_text *text);
int ps_encoder_finish(ps_encoder *c);    /* waits for all texts; errors as of ps_encoder_put */
int64_t ps_encoder_failed(const ps_encoder *c);              /* the number of the text that failed, or -1 */
void ps_encoder_free(ps_encoder *c);

/* The rows of an epoch. They depend on the examples and the settings only, not on batches and ranks. */
typedef struct ps_rows ps_rows;
enum { PS_LONG_RIGHT, PS_LONG_LEFT, PS_LONG_DROP, PS_LONG_ERROR };   /* which end of a too long example is cut */
enum { PS_MIX_LEAVE, PS_MIX_REPEAT, PS_MIX_STOP };   /* an exhausted source is left out, begins again, ends the epoch */
enum { PS_WEIGHTS_TOKEN, PS_WEIGHTS_EXAMPLE };       /* an example's weight: of each target, or shared by its targets */
typedef struct ps_rows_config {
  int64_t seq;                           /* most tokens of a row */
  int64_t window;                        /* examples of the order that are packed or sorted together */
  int64_t epoch;
  uint64_t seed;
  const int64_t *counts;                 /* [n_sources] examples of each source, one source after the other */
  const double *weights;                 /* [n_sources] above 0 */
  int32_t n_sources, exhausted;
  int32_t shuffle, packing, grouping, rule;
} ps_rows_config;
typedef struct ps_rows_info {
  int64_t rows, windows, examples, tokens;     /* examples: that rows hold */
  int64_t cut, dropped;                  /* examples: that lost tokens; that were left out */
  int64_t failed;                        /* PS_LONG_ERROR: the example that is too long, else -1 */
} ps_rows_info;
/* info is also filled if the call fails. PS_ERANGE: an example is too long (PS_LONG_ERROR). PS_EINVAL: a setting. */
int ps_rows_new(ps_examples *e, const ps_rows_config *config, ps_rows_info *info, ps_rows **out);
int ps_rows_window(const ps_rows *r, int64_t row, int64_t *window, int64_t *within);   /* row may be their number */
int64_t ps_rows_first(const ps_rows *r, int64_t window);     /* the first row of a window */
int64_t ps_rows_longest(const ps_rows *r, int64_t first, int64_t n);   /* tokens of the longest of existing rows */
int64_t ps_rows_examples(const ps_rows *r, int64_t row, int64_t *out, int64_t room);   /* their number */
typedef struct ps_rows_batch {
  int32_t *ids, *labels;                 /* [rows, length] each */
  int32_t *mask;                         /* 1 for tokens, 0 for padding; with packing segments from 1 on */
  int32_t *positions;                    /* or NULL */
  float *weights;                        /* of labels, or NULL */
  int64_t rows, length;
  int64_t real;                          /* rows after these, or after the last one, are row `filler` of weight 0 */
  int64_t filler;
  int32_t pad, by;                       /* pad: id; by: PS_WEIGHTS_* */
} ps_rows_batch;
int ps_rows_fill(const ps_rows *r, int64_t first, const ps_rows_batch *batch);
void ps_rows_free(ps_rows *r);

/* Batches of rows, epoch after epoch, which a thread makes ahead of their use. The examples and rows that it uses live
 * as long as it does. */
typedef struct ps_batches ps_batches;
typedef struct ps_batches_config {
  int64_t batch;                         /* rows of each of the world_size ranks */
  int64_t accumulate;                    /* batches of a step, which are padded to one length */
  int64_t multiple;                      /* lengths are multiples of it, except if seq is not */
  int32_t rank, world_size;
  int32_t ahead;                         /* batches made in advance, at least 1 */
  int32_t to_seq, drop_last, fills;      /* fills: 1: a last batch that is not full gets rows of weight 0 */
  int32_t weights;                       /* 1: batches have weights */
  int32_t pad, by;                       /* as in ps_rows_batch */
} ps_batches_config;
typedef struct ps_batch {                /* the arrays: [rows, length] each, as in ps_rows_batch, lent until the next
                                          * call of ps_batches_next or ps_batches_seek */
  int64_t epoch, first;                  /* first: this rank's first row */
  int64_t next;                          /* first row of all ranks' next batch, or the number of rows */
  int64_t rows, length;
  const int32_t *ids, *labels, *mask, *positions;    /* positions: NULL without packing */
  const float *weights;                  /* NULL if there are none */
} ps_batch;
/* first: the rows of rows_config's epoch, where batches begin. PS_EINVAL: a setting. */
int ps_batches_new(ps_examples *e, const ps_rows_config *rows_config, const ps_batches_config *config, ps_rows *first,
                   ps_batches **out);
/* 1: a batch; 0: the end of an epoch, after which the next one begins. Starts the thread. Errors: of ps_rows_new for an
 * epoch, of ps_rows_fill; PS_EIO: the file of examples was truncated. The next call tries again. */
int ps_batches_next(ps_batches *b, ps_batch *out);
/* The rows of an epoch, which the caller frees. If the thread does not have them, this call makes them. Errors and info
 * as of ps_rows_new. */
int ps_batches_rows(ps_batches *b, int64_t epoch, ps_rows_info *info, ps_rows **out);
/* The next batch begins with this row of all ranks; rows: of the epoch. PS_ERANGE: there is no such row. */
int ps_batches_seek(ps_batches *b, int64_t epoch, ps_rows *rows, int64_t row);
void ps_batches_free(ps_batches *b);     /* ends the thread */

/* -- steps of training (base/step.h) ------------------------------------------------------------------------------
 * A step is a table of actions. C returns the action that is due (next), and the caller reports its end (done, or
 * abandon). */
/* A BACKWARD may be divided (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): INPUT computes the gradients of a
 * virtual stage's inputs and puts off those of its parameters; WEIGHT computes these. */
enum { PS_ACT_NONE, PS_ACT_FORWARD, PS_ACT_BACKWARD, PS_ACT_INPUT, PS_ACT_WEIGHT, PS_ACT_REDUCE, PS_ACT_NORM,
       PS_ACT_UPDATE, PS_ACT_COUNT };
/* vstage: a part of the model; micro: a micro-batch, less than the number of actions; both from 0. A reduction ends the
 * sums over ranks of its virtual stage's backwards before it; without one they end with the backward. */
typedef struct ps_action { int32_t kind, vstage, micro; } ps_action;
/* The fields of a step that scripts may read at any time. */
typedef struct ps_step_state {
  ps_action now, due;          /* the action under way, and the next action of the table; kind PS_ACT_NONE: there is
                                * none */
  int32_t open;                /* 1: a step has begun and not ended */
  int32_t micro, n_micro;      /* number of actions BACKWARD and WEIGHT that are done, and of all of them in the
                                * table */
  int32_t updating;            /* 1: an action that updates parameters has begun: the step can no longer be abandoned */
  double weight;               /* sum of the weights of the micro-batches whose backward has run */
} ps_step_state;
typedef struct ps_step ps_step;
int ps_step_new(ps_ctx *ctx, ps_step **out);   /* PS_ENOMEM */
void ps_step_free(ps_step *step);            /* an engine that was opened with it keeps it until the engine is closed */
const ps_step_state *ps_step_look(const ps_step *step);     /* lent until the step is freed */
enum { PS_TRACE_UNKNOWN = -1, PS_TRACE_NONE = -2 };
typedef struct ps_step_config {
  const ps_action *actions;    /* copied */
  int32_t n_actions;
  int32_t dry;                 /* 1: ops do not compute */
  int32_t trace;               /* the trace that the step is expected to repeat. _UNKNOWN: there is none; _NONE:
                                * there is none, and its uses are not noted */
  int32_t pad;
} ps_step_config;
/* Begins a step. PS_ESTATE: one is under way, or a dry one finds gradients; PS_EINVAL: a table without a backward, with
 * a norm before one, with an INPUT without a later WEIGHT, or with WEIGHTs of a virtual stage in another order than its
 * INPUTs, which would change sums; PS_ERANGE: there is no such trace any more; PS_ENOMEM: a tier has too little room
 * for it. */
int ps_step_begin(ps_step *step, const ps_step_config *config);
enum { PS_MAX_STATES = 6, PS_UPDATE_ATTRS = 20 };
/* Settings of a group of parameters. */
typedef struct ps_update_group {
  double attrs[PS_UPDATE_ATTRS];   /* the attributes of the group's op, struct ps_attrs_<op>, except those of
                                    * ps_update_attrs */
  double scale;                /* a factor on the gradients of this group, in addition to the action's */
  int32_t op;                  /* PS_OP_*: an update, whose inputs are groups of param, master, grad and states */
  int32_t n_states;            /* state tensors in each group of the op's inputs */
  int32_t n_needed;            /* the first of them that a parameter must have; the master stands in for the others */
  int32_t pad;
} ps_update_group;
/* Sets the attributes of an update's op that differ between updates: the number of the update of these parameters, from
 * 1, or what follows from it, and the factor on gradients. PS_EINVAL: the op is not an update. */
int ps_update_attrs(int op, void *attrs, int64_t t, double grad_scale);
/* Settings of an action; fields that an action does not need are 0. */
typedef struct ps_action_how {
  double weight;               /* for a backward or INPUT: the weight of its micro-batch, which counts once, whatever
                                * the number of virtual stages */
  double scale;                /* for an update, and for a backward that updates: a factor for gradients */
  int32_t slot;                /* for a last backward: final gradients replace parameters of half types in their
                                * places */
  int32_t overlap;             /* for a last backward: a unit is updated as soon as its gradients are final */
  const ps_update_group *groups; /* [n_groups] settings of the optimizer, copied; NULL: those of the previous action */
  int32_t n_groups;
  int32_t numbered;            /* for a forward: 1: its dropouts count from first_op, its rows from sample, so that
                                * masks are those of one process that runs all virtual stages in order */
  uint64_t sample;
  uint32_t first_op, pad;
} ps_action_how;
/* Begins the action that is due; it must be of this kind. A forward may be repeated until its backward begins. A
 * backward may have no forward. A norm may precede the update of a step whose table has none. how: NULL: all 0.
 * PS_ESTATE: another action is due or under way, or no step is. PS_EINVAL: an update in a backward that is not the
 * last, or whose step has a norm or several virtual stages; a slot in one that is not the last of its virtual stage. */
int ps_step_next(ps_step *step, int kind, const ps_action_how *how);
/* Ends the action under way. The rest of a backward's work is done now: gradients become final, ranks' sums arrive,
 * units are updated. After an error the action is still under way. PS_ESTATE: no action is under way. Else errors of
 * ps_apply. */
int ps_step_done(ps_step *step);
/* Pauses the script at a prompt, possibly in the middle of a step. Computations until ps_resume do not belong to that
 * step: they are not recorded for backward, their uses of chunks are not noted, the step's random numbers do not
 * advance, and they have memory in addition to the budgets. Refused until then, with PS_ESTATE: actions of a step,
 * backward, setting gradients, and writes to parameters; between two steps an engine allows the last three. *scope:
 * ends with ps_resume. 1: not now, since a dry run is under way. PS_ESTATE: it is already paused, or there are several
 * ranks. PS_ENOMEM. */
int ps_suspend(ps_ctx *ctx, int64_t *scope);
/* Resumes the script. `keep` survives, as in ps_scope_end. PS_ESTATE: nothing is paused. Else errors of moving chunks
 * back within the budgets; the script is resumed even then. */
int ps_resume(ps_ctx *ctx, int n_keep, ps_tensor *const *keep);
int ps_is_suspended(const ps_ctx *ctx);
/* The action under way, if any, failed and counts as not begun. A forward returns its random numbers. */
void ps_step_abandon(ps_step *step);
/* 1: the caller should collect Lua's garbage before the next BACKWARD, INPUT or WEIGHT: less than 1/8 of the first tier
 * is free, or less than half and the last collection was PS_UNCOLLECTED micro-batches ago. 0: not now. The call
 * never fails. */
enum { PS_UNCOLLECTED = 16 };
int ps_step_collects(ps_step *step);
/* Ends the step. *trace: the trace of this step; if it went as expected, that is the expected trace; -1: none.
 * PS_ESTATE: actions are still due. trace NULL: abandons the step: its gradients are dropped (if that fails, a later
 * call drops the rest), and the next step uses the same dropout numbers. */
int ps_step_end(ps_step *step, int32_t *trace);

/* -- pipelines: the tables of a step whose model is cut into stages (src/pipe, docs/pipeline.md) -------------------
 * `stages` ranks share a model that is cut into virtual stages, which count from 0 in the order of the model. A table
 * has a row of actions for each rank, in which ps_action.vstage counts through the whole model. The kinds below occur
 * only in tables. SEND_F, RECV_F: sends this virtual stage's outputs to the next one's forward; receives those of the
 * previous one. SEND_B, RECV_B: the same for gradients, in the opposite direction. YIELD: the script's loop gets the
 * loss of the micro-batch; vstage is 0. SEGMENT is not in tables; it is an event of the executor (ps_pipe_event). */
enum { PS_ACT_SEND_F = 16, PS_ACT_RECV_F, PS_ACT_SEND_B, PS_ACT_RECV_B, PS_ACT_YIELD, PS_ACT_SEGMENT };
enum { PS_PIPE_GPIPE, PS_PIPE_1F1B, PS_PIPE_INTERLEAVED, PS_PIPE_LOOPED_BFS, PS_PIPE_ZB_H1, PS_PIPE_ZB_V,
  PS_PIPE_SCHEDULES, PS_PIPE_CUSTOM = PS_PIPE_SCHEDULES };
typedef struct ps_pipe_spec {
  int32_t schedule, stages;
  int32_t virtual_stages;      /* per rank */
  int32_t micro_batches;
  int32_t forward_only;        /* 1: an evaluation, without backward */
  int32_t vstages;             /* from ps_pipe_table_spec: virtual stages of the model */
} ps_pipe_spec;
typedef struct ps_pipe_table ps_pipe_table;
const char *ps_pipe_schedule_name(int schedule);            /* "gpipe" ... "zb_v", "custom"; NULL: there is none */
int ps_pipe_schedule_find(const char *name, int *out);      /* PS_EINVAL: names the schedules */
/* The table of a schedule: only forwards and backwards. Every table can be performed. PS_EINVAL: the schedule has no
 * table of these sizes; the message has the numbers. */
int ps_pipe_table_new(const ps_pipe_spec *spec, ps_pipe_table **out);
/* Reads a table from text in PyTorch's CSV form (docs/pipeline.md). name: of the file, for messages. PS_EFORMAT: the
 * text is not such a table; the message has line and cell. PS_EINVAL: it cannot be performed, or its order of sums is
 * not unique. */
int ps_pipe_table_read(const char *text, int64_t nbytes, const char *name, ps_pipe_table **out);
/* The text of a table. Returns its bytes, with a final 0; the text is truncated if `room` is less. plain 1: without
 * transfers and yields, for ps_pipe_table_read. */
int64_t ps_pipe_table_write(const ps_pipe_table *t, int plain, char *out, int64_t room);
void ps_pipe_table_free(ps_pipe_table *t);
/* Its sizes. For a table that was read, virtual_stages is the maximum over ranks. */
const ps_pipe_spec *ps_pipe_table_spec(const ps_pipe_table *t);
/* The row of a rank, lent as long as the table is not lowered; PS_ERANGE: there is no such rank. */
int ps_pipe_table_row(const ps_pipe_table *t, int rank, const ps_action **row, int32_t *n);
/* The rank that runs a virtual stage, and its number among those of that rank. PS_ERANGE: there is none. */
int ps_pipe_table_place(const ps_pipe_table *t, int vstage, int32_t *rank, int32_t *local);
/* Inserts transfers, yields and reductions between the actions of all rows. PS_ESTATE: it already has them. */
int ps_pipe_table_lower(ps_pipe_table *t);
/* The peak that a row holds, whatever its actions cost. */
typedef struct ps_pipe_held {
  int32_t in_flight;           /* (virtual stage, micro-batch) pairs between forward and INPUT or BACKWARD */
  int32_t waiting;             /* pairs between INPUT and WEIGHT */
} ps_pipe_held;
int ps_pipe_table_held(const ps_pipe_table *t, int rank, ps_pipe_held *out);     /* PS_ERANGE: there is no such rank */
/* The cost of a virtual stage for one micro-batch, in any unit of time. A backward costs input + weight. */
typedef struct ps_pipe_cost {
  double forward, input, weight;
  double reduce;               /* of its reduction, once per step, in a lowered table */
  int64_t nbytes;              /* of its output, which is sent to the next one; its gradient is sent back */
  int64_t held, waiting;       /* bytes kept from forward to backward, and from INPUT to WEIGHT */
} ps_pipe_cost;
/* Links between ranks. Each pair of ranks has, in each direction, one link for forwards and one for gradients. */
typedef struct ps_pipe_link {
  double latency;              /* from the last byte's departure to its arrival */
  double rate;                 /* bytes per unit of time; 0: transfers take no time */
  int32_t depth, pad;          /* messages that a link can queue for a receiver that is not ready; the sender then
                                * waits. 0: any number */
} ps_pipe_link;
typedef struct ps_pipe_span { double begin, end; } ps_pipe_span;
typedef struct ps_pipe_times {
  double makespan;             /* from 0 to the end of the last action of all ranks */
  double bubble;               /* the fraction of stages x makespan in which ranks are idle */
} ps_pipe_times;
typedef struct ps_pipe_rank_times {
  double first, last;          /* begin of its first action, and end of its last one */
  double busy;                 /* sum of its actions */
  int64_t peak;                /* bytes by ps_pipe_cost.held and .waiting */
} ps_pipe_rank_times;
/* Simulates a table from costs, one for each virtual stage; NULL: forward, input and weight take 1. link NULL:
 * transfers take no time. ranks: [stages] or NULL. spans: [stages], each [n] like its row, or NULL. PS_EINVAL: a cost
 * is negative or not a number, or ranks wait for each other in a cycle, which only links of limited depth can cause;
 * the message names the cycle. */
int ps_pipe_simulate(const ps_pipe_table *t, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                     ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
/* A cut of a model: the number of its parts, in order, in each virtual stage. */
typedef struct ps_pipe_cut_times {
  double makespan;             /* of the cut that was found */
  double equal;                /* of a cut into equal numbers of parts, or with one more in the first virtual stages */
  double bound;                /* no cut of the model into these stages can be faster; */
  int32_t bound_part;          /* the part that sets the bound (its rank does little else); -1: all of them */
  int32_t tried;               /* cuts that were simulated */
} ps_pipe_cut_times;
/* Searches for the cut with the least makespan (ps_pipe_simulate), from the costs of the parts [n]: those of a virtual
 * stage are summed, and its output is that of its last part. counts: [vstages], each at least 1. The search moves
 * single parts from one virtual stage to another, and may miss the best cut of large models. PS_EINVAL: fewer parts
 * than virtual stages. Else errors of ps_pipe_simulate. */
int ps_pipe_cut(const ps_pipe_table *t, const ps_pipe_cost *parts, int32_t n, const ps_pipe_link *link, int32_t *counts,
                ps_pipe_cut_times *out);
/* Reads a cut in Megatron's notation: "Et*3|(tt|)*29,m|L" has a letter for each part and a bar between virtual stages;
 * a letter or a group in brackets is repeated by *n; commas and blanks are ignored. kinds: a letter for each part of
 * the model. PS_EINVAL: it is not a layout, or does not cut these parts into this number of virtual stages; the message
 * has the position. */
int ps_pipe_layout(const char *layout, const char *kinds, int32_t vstages, int32_t *counts);

/* -- chunks: parameters, gradients and optimizer state in chunks on several tiers (docs/memory.md) ---------------- */
/* Kinds of chunks. From PS_KIND_STATE on: the states of optimizers, which ps_kind_state numbers by name. */
enum { PS_KIND_PARAM, PS_KIND_PARAM_FP32, PS_KIND_GRAD, PS_KIND_STATE, PS_KIND_COUNT = 64 };
const char *ps_kind_name(int kind);      /* of chunks: "param", ...; NULL: there is no such kind */
/* The kind of chunks with this state of an optimizer. Numbers hold for this process; an unknown name gets the next one.
 * PS_EINVAL: a name of no characters or of more than 31, or there are PS_KIND_COUNT kinds already. */
int ps_kind_state(const char *name);
/* An update reads and writes one place in chunks of all kinds at once. If these places had equal distances from page
 * boundaries, a processor would mistake a write of one for a read of another and slow down. So tensors begin at
 * different multiples of PS_KIND_SHIFT bytes into chunks of different kinds, if these are large enough for that. */
enum { PS_KIND_SHIFT = 4864 };
typedef struct ps_chunk_config {
  int32_t device, host;        /* numbers of the device that computes and of host memory; equal: no device tier */
  int32_t policy;              /* ps_policy_find */
  int32_t prefetch;            /* 1: copies run ahead of uses */
  int32_t stress;              /* tests: 1: chunks move at every pin, and their old memory is overwritten */
  int32_t disk_threads;        /* 0: io_uring; else the number of plain threads */
  int32_t disk_checksums;      /* 1: bytes that are read from the disk are compared with those written */
  int32_t pad;
  int64_t budget[3];           /* bytes of device, host, disk; 0: device, host: no limit; disk: no disk tier */
  int64_t ahead[3];            /* bytes that fetches may take before their use, per tier; 0: chosen */
} ps_chunk_config;
typedef struct ps_chunk_info {
  int32_t kind, group, index, dtype;
  int32_t state, pins, n_tensors;
  int32_t valid;               /* tiers (numbers of ps_tier_info) with a valid copy, as a bit set */
  int64_t nbytes, used_nbytes;
  int64_t last_use, next_use;  /* trace indices of this step; -1: none, or unknown */
} ps_chunk_info;
typedef struct ps_tier_info {
  char name[16];               /* "device", "host", "disk": its key in the configuration and its name in messages */
  int32_t device, pad;         /* number of the device whose memory it is; -1: a file, which no op can read */
  int64_t budget, chunks, other, free, peak;   /* bytes; budget 0: no limit; peak: of chunks and other tensors
                                                * together */
  int64_t bytes_up, bytes_down;                /* total bytes copied up from here, and down to here */
} ps_tier_info;
typedef struct ps_step_forecast {
  int32_t n_moments, n_uses;
  int64_t peak[3];             /* bytes on each tier: chunks and other tensors */
  int64_t other[3];            /* bytes of other tensors */
  int64_t fetched[2], evicted[2];   /* bytes copied up to tier i and down from it, per step */
  int64_t first_fetched[2], first_evicted[2];   /* the same for the next step, from where chunks are now */
  /* The first op that has room only because other tensors take less at its trace index: bytes of chunks that it needs
   * at once on short_tier, and bytes left for them there. wanted 0: there is no such op. */
  int64_t wanted, left, short_tier;
  int64_t resident;            /* bytes of chunks that live only on tier 0, since the last tier has no room for them */
  int64_t gathers, gathered;   /* stripes that a step gathers from other ranks, and their bytes */
} ps_step_forecast;

/* -- the engine: trains parameters that live in chunks. One a context. --------------------------------------------
 * PS_ESTATE, for every function below: no engine is open. */
/* step: for this engine only. PS_ESTATE: an engine is open, or the step belongs to another. PS_EINVAL: impossible
 * budgets or devices. PS_EIO, PS_ENOSPC: the disk's file cannot be made, or there is too little space for it.
 * PS_EUNSUP: a device that cannot copy chunks. */
int ps_engine_open(ps_ctx *ctx, ps_step *step, const ps_chunk_config *config, const char *disk_folder);
void ps_engine_close(ps_ctx *ctx);       /* tensors in chunks lose their bytes */
int ps_engine_is_open(ps_ctx *ctx);
/* Eviction policies count from 0: the rows of src/chunk/policy.c. */
int ps_policy_find(const char *name, int *out);      /* PS_EINVAL: unknown; the message has all names */
const char *ps_policy_name(int policy);  /* NULL: there are no more */
/* Chunks count from 0. PS_EINVAL: no such kind, or nbytes is not a multiple of 4096. */
int ps_engine_chunk_new(ps_ctx *ctx, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *chunk);
/* Moves a contiguous tensor's storage, which the tensor must cover, to `offset` (bytes, a multiple of 256) of a chunk.
 * PS_EINVAL: the tensor or the place does not fit. PS_ESTALE: the tensor's bytes are gone. PS_ENOMEM, PS_EIO,
 * PS_ENOSPC: there is no room for the chunk, or the disk failed; the tensor stays where it was. */
int ps_engine_adopt(ps_ctx *ctx, ps_tensor *t, int32_t chunk, int64_t offset, const char *name);
/* A tensor of `like`'s shape in a chunk, all zeros; its header is of device `device`. PS_EINVAL: a device that is not
 * the engine's, or a place that does not fit or is taken. */
int ps_engine_tensor_new(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t chunk, int64_t offset,
                         const char *name, ps_tensor **out);
/* The same for a shape [ndim]. Errors of ps_engine_tensor_new. */
int ps_engine_tensor_shaped(ps_ctx *ctx, int ndim, const int64_t *shape, int dtype, int device, int32_t chunk,
                            int64_t offset, const char *name, ps_tensor **out);
/* The same bytes for use on another device of the engine. PS_EINVAL: no such device, or the tensor is in no chunk. */
int ps_engine_tensor_at(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out);
/* -- sharding (ZeRO): the ranks of a group share the chunks. Called before the first chunk; stage 0: every rank has
 * everything, and gradients are summed; 1: optimizer state has one owner; 2: also gradients; 3: also parameters. once:
 * stages 2 and 3 reduce the gradients of several micro-batches once per step, and every rank keeps its sums until then;
 * 0: in each backward. The engine holds the group open. All ranks make the same calls. PS_ESTATE: there are chunks
 * already. PS_EINVAL: no such stage. */
typedef struct ps_group ps_group;
int ps_engine_shard(ps_ctx *ctx, ps_group *group, int stage, int once);
/* A part is the bytes of one chunk, on all ranks. A stripe has at most one part per rank. Both count from 0. */
typedef struct ps_part_config {
  int32_t owner, dtype;        /* rank; the type in which its bytes are reduced */
  int32_t chunk;               /* on this rank; -1: none, the bytes are temporarily on `device` */
  int32_t device, stripe;
  int32_t reads;               /* 1: values, which are the owner's on every rank; 0: gradients */
  int32_t keeps;               /* 1: once read, they stay until the end of the step */
  int64_t nbytes;
} ps_part_config;
/* PS_EINVAL: a rank, stripe, chunk or size that does not fit. PS_ESTATE: the chunks are not shared. */
int ps_engine_part(ps_ctx *ctx, const ps_part_config *config, int32_t *part);
/* Drops a part without tensors; a part with tensors is dropped with the last of them. PS_EINVAL: no such part. */
int ps_engine_part_drop(ps_ctx *ctx, int32_t part);
/* Like ps_engine_adopt and ps_engine_tensor_new, but in a part, with the errors of these functions. All ranks call
 * adopt if the tensor is in a part already. */
int ps_engine_part_adopt(ps_ctx *ctx, ps_tensor *t, int32_t part, int64_t offset, const char *name);
int ps_engine_part_tensor(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t part, int64_t offset,
                          const char *name, ps_tensor **out);
/* A tensor over this rank's own bytes of t, which other ranks never use. *out NULL: another rank owns them. PS_EINVAL:
 * t is in no chunk and in no part. */
int ps_engine_own(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out);
/* A hash of the gathers that the step expects; 0: none are known. Ranks whose hashes differ must not run ahead: they
 * drop the expectation. */
double ps_engine_gathers(ps_ctx *ctx);
void ps_engine_gathers_drop(ps_ctx *ctx);
/* Values were written without using the parts: the next read of a part gathers it again. All ranks call it. Errors of
 * ps_apply, for exchanges under way. */
int ps_engine_forget(ps_ctx *ctx);
/* The stages of a pipeline: the ranks of `stages` run the other virtual stages of this model, which has n_numbers
 * parameters (ps_param.number is below it). The norm includes all of them, with the bits of one process that has them
 * all. copies: the ranks with the copies of PS_TIE_COPY, including this one, or NULL. Called before ps_engine_params by
 * all ranks. The engine holds the groups open. PS_ESTATE: there are parameters, or it was called before. PS_EINVAL: a
 * model without parameters. PS_ENOMEM. */
int ps_engine_stages(ps_ctx *ctx, ps_group *stages, ps_group *copies, int32_t n_numbers);
/* Tensor parallelism: the ranks of `tp` share the same layers. Gradients of PS_TP_PARTIAL are summed over them, in fp32
 * and in the order of ranks, after the last backward of a step: all in one exchange. The norm counts each parameter
 * once, in the order of ranks. All ranks of tp have the same parameters, in their own shapes, with the same owners, and
 * call this before ps_engine_params. The engine holds the group open. PS_ESTATE: there are parameters, or it was called
 * before. PS_ENOMEM. */
int ps_engine_tensor_parallel(ps_ctx *ctx, ps_group *tp);
/* Uses the collectives of `group` that the dry run of a trace noted as the plan of the step that begins. *hash: 0: it
 * noted none, there is no such trace, or no memory for a plan. PS_ESTATE: no engine is open. */
int ps_engine_plan_calls(ps_ctx *ctx, int32_t trace, ps_group *group, uint64_t *hash);
/* The numbers of the ops that computed in the forward of the dry run of a trace, in order, views excluded. *n 0: there
 * is no such trace, or it was not made by a dry run. *ops is valid until the next dry run. PS_ESTATE: no engine is
 * open. */
int ps_engine_forward_ops(ps_ctx *ctx, int32_t trace, const uint16_t **ops, int32_t *n);
/* The stripe of a unit, and the parts of its values and gradients; grad_part -1: gradients are in the place of the
 * values. PS_ERANGE: no such unit. PS_EINVAL: the stripe has units of another virtual stage. */
int ps_engine_unit_parts(ps_ctx *ctx, int unit, int32_t stripe, int32_t param_part, int32_t grad_part);
typedef struct ps_param {
  ps_tensor *param, *master;           /* master: `param` itself, or fp32; NULL if another rank owns it */
  ps_tensor *state[PS_MAX_STATES];     /* the first n_states: the optimizer's. All are on the compute device */
  ps_tensor *host[2 + PS_MAX_STATES];  /* param, master, states for the host; NULL if that is the compute device */
  ps_tensor *grad;                     /* a separate place for the gradient, or NULL */
  int32_t group, unit;                 /* optimizer group; unit: parameters whose state is in the same chunks */
  int32_t vstage, number;              /* virtual stage whose backwards add to the gradient; its number in the model */
  int32_t tie, tp;                     /* PS_TIE_*, PS_TP_* */
  int32_t n_states, pad;               /* 0 if another rank owns the states */
} ps_param;
/* A parameter of several virtual stages has a sum of gradients for each use. These sums are added when all backwards
 * are over, in the order of the virtual stages, so that no table changes their bits. USE: another use, on this rank, of
 * the parameter with the same number before it: `param` is the same tensor, `grad` the place of its sum, which is the
 * tensor's gradient while backwards of `vstage` run; it has no master, states or unit of its own, and comes after all
 * parameters. COPY: other ranks have the same parameter; their sums are added in the order of the ranks of
 * ps_engine_stages' `copies`, and the copies stay equal. */
enum { PS_TIE_NONE, PS_TIE_USE, PS_TIE_COPY };
/* The result that a backward of one tensor-parallel rank has for a parameter. WHOLE: every rank has the whole parameter
 * and its whole gradient, with the same bits. SPLIT: every rank has a piece of the parameter, and that piece's whole
 * gradient. PARTIAL: every rank has the whole parameter, and an addend of its gradient. A PS_TIE_USE is like its first
 * use. */
enum { PS_TP_WHOLE, PS_TP_SPLIT, PS_TP_PARTIAL };
/* All trained parameters, in ascending order of (vstage, number), then their other uses in the same order. Norms are
 * summed by number. Parameters of a unit are in one virtual stage. Retains the tensors. PS_EINVAL: another order, a
 * unit in two virtual stages, a tie without its first use, its ranks or a place for its gradient, a part of tensor
 * parallelism without its ranks, or a tensor that is missing or does not fit. */
int ps_engine_params(ps_ctx *ctx, int n, const ps_param *params, int n_units, int n_groups);
/* From now on ops see a parameter and its gradient on this device: the compute device, or the host. PS_EINVAL: another
 * device, or the tensor is in no chunk. PS_ESTATE: it has a gradient or a history. */
int ps_engine_set_device(ps_ctx *ctx, ps_tensor *t, int device);
/* Where a unit is updated; 0 (default): on the host. PS_ERANGE: no such unit. */
int ps_engine_set_on_device(ps_ctx *ctx, int unit, int on_device);
/* Within the step's norm (else PS_ESTATE): the sum of squares of all gradients; infinite or NaN if a gradient is.
 * Errors of ps_apply, and of ranks. */
int ps_engine_sq_norm(ps_ctx *ctx, double *out);
/* After that norm, in the same step: the same for the n parameters of the model from number `first` on, on any rank
 * (ps_param.number). PS_ERANGE: the model has no such numbers. */
int ps_engine_sq_norm_of(ps_ctx *ctx, int32_t first, int32_t n, double *out);
/* Within the step's update (else PS_ESTATE): updates all parameters that this step has not updated yet, with gradients
 * times the action's scale, which are then dropped. Errors of ps_apply; a second call then updates the rest. */
int ps_engine_update(ps_ctx *ctx);
/* Drops all gradients. A parameter whose place a gradient had taken is restored from the master. Errors of ps_apply. */
int ps_engine_drop_grads(ps_ctx *ctx);
/* For a parameter: the number of its updates, and whether this step has already updated it; scale: a factor on its
 * gradient in this step's update, in addition to the group's. PS_ERANGE: no such parameter. PS_EINVAL: steps below
 * 0. */
int64_t ps_engine_param_steps(ps_ctx *ctx, int param);
int ps_engine_set_param_steps(ps_ctx *ctx, int param, int64_t steps);
int ps_engine_param_updated(ps_ctx *ctx, int param);
int ps_engine_param_scale(ps_ctx *ctx, int param, double scale);
/* Bytes of other tensors that are on a tier now and were not when trace `id` was made: garbage, or tensors that stay. 0
 * if the plan's slack covers them. adopt: the next plan includes them. PS_ERANGE: there is no such trace any more. */
int ps_engine_leftover(ps_ctx *ctx, int32_t id, int adopt, int64_t *nbytes);
/* The plan of a step like trace `id`. PS_ERANGE: there is no such trace any more. PS_ENOMEM: such a step does not fit;
 * ps_error_get_detail has tier and bytes. */
int ps_engine_forecast(ps_ctx *ctx, int32_t id, ps_step_forecast *out);
/* One use of a chunk by a step: at trace index `moment` its bytes must be on `tier` (0 or 1). Trace indices number the
 * ops of a step that use chunks, from 0. Uses are sorted by trace index; those of one index are needed at once, and a
 * chunk occurs at most once in it. write: it is changed there; ends: its contents end with this use, so that the next
 * one allocates space and moves nothing. action: PS_ACT_ kind of the step's action that makes the use. */
typedef struct ps_use {
  int32_t moment, chunk;
  int8_t tier, write, ends, action;
} ps_use;
/* A trace: its length, and the peak of other tensors' bytes on each tier. */
typedef struct ps_trace_info {
  int32_t n_uses, n_moments;
  int64_t other[3];
} ps_trace_info;
/* Trace `id` and, in their order, its first `room` uses (room 0: none, `uses` may be NULL). PS_ERANGE: there is no such
 * trace any more. */
int ps_engine_trace_get(ps_ctx *ctx, int32_t id, ps_trace_info *out, int32_t room, ps_use *uses);
int ps_engine_settle(ps_ctx *ctx);       /* waits for copies under way. PS_EIO, PS_EBACKEND: a copy failed */
typedef struct ps_engine_stats {
  double wait_s;               /* seconds for which ops waited for a copy, since the engine was opened */
  int64_t waits;
  int64_t unplanned;           /* chunks that a pin fetched itself, because no plan had done so */
  double ranks_wait_s;         /* seconds for which steps waited for other ranks */
} ps_engine_stats;
int ps_engine_stats_get(ps_ctx *ctx, ps_engine_stats *out);
/* The rates that plans use, measured now with up to `nbytes` of memory on each side, which is freed afterwards. Not
 * while a dry run or a step is under way. PS_EINVAL: not an accelerator and host memory. Errors of ps_apply. */
typedef struct ps_rates {
  double host_adam, device_adam;   /* parameters per second, bf16 with fp32 state; on the host while copies run */
  double up, down;             /* bytes per second to the device and from it, both directions at once */
  double at_once;              /* the fraction of the device's time in Adam in which the host is free */
  double seconds;              /* the time that the measurement took */
  int64_t numel;               /* parameters of a trial */
} ps_rates;
int ps_rates_measure(ps_ctx *ctx, int device, int host, int64_t nbytes, ps_rates *out);
/* The disk tier's own sequential rates, measured now with `nbytes` in each direction. PS_ESTATE: there is no disk tier,
 * or copies are under way. PS_EIO, PS_ENOSPC: the disk failed, or has too little free space. */
int ps_engine_disk_probe(ps_ctx *ctx, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s);
/* Chunks and tiers, for display. PS_ERANGE: no such chunk or tier. */
int ps_engine_chunk_count(ps_ctx *ctx);
int ps_engine_chunk_get(ps_ctx *ctx, int chunk, ps_chunk_info *out);
const char *ps_engine_chunk_tensor(ps_ctx *ctx, int chunk, int i);
int ps_engine_tensor_chunk(ps_ctx *ctx, const ps_tensor *t);     /* its chunk on this rank, or -1 */
int ps_engine_holds(ps_ctx *ctx, const ps_tensor *t);            /* 1: it is in a chunk, of this rank or another */
int ps_engine_tier_count(ps_ctx *ctx);
int ps_engine_tier_get(ps_ctx *ctx, int tier, ps_tier_info *out);

/* -- files --------------------------------------------------------------------------------------------------------- */
/* PS_EIO: the system refused; the message has its reason and, for a full disk, the bytes wanted and free. */
int ps_file_write_atomic(const char *path, const void *data, int64_t nbytes);
int ps_file_fsync_dir(const char *path);
/* Renames the folder `from` to `path`, atomically and durably. 1: there was a folder `path`, which is `from` now; else
 * 0. PS_EIO as above. */
int ps_file_swap_folder(const char *from, const char *path);
/* From now on, files that this process writes through the functions of this header are stored in `folder`, and are read
 * from there under the same paths. Folders of these paths need not exist, and cannot be renamed. Zeros take no space in
 * such a file. NULL: stops this. PS_EINVAL: "" or too long. PS_ENOMEM. */
int ps_file_divert(const char *folder);
/* 1: the file is written (writes 1), or was written and is read (0), at another path, which is stored in out [room]. 0:
 * at its own path. PS_EINVAL: NULL. PS_ERANGE: room. */
int ps_file_diverted(const char *path, int writes, char *out, int64_t room);

/* -- the process ----------------------------------------------------------------------------------------------------
 */
double ps_now(void);                     /* seconds of a monotonic clock */
int64_t ps_rss_peak(void);               /* bytes */
/* Performs each matrix product that the processor was asked for with the present number of threads, including those of
 * dry runs, once, with zeros, in the order of their first use. The process then holds the memory that oneDNN keeps for
 * them (code, buffers in the heap, pages of libraries). *operations: of all of them. If they are more than `most`, if
 * one of them writes more than 128 MiB, or if there were too many kinds to note, none is performed and 0 is returned,
 * else 1. Or PS_ENOMEM: no room for the operands; PS_EBACKEND. */
int ps_products_rehearse(double most, double *operations);
/* From now on the first Ctrl-C, SIGTERM or SIGHUP is counted; the next Ctrl-C or SIGTERM ends the process. PS_EINVAL:
 * the system refused. */
int ps_interrupts_install(void);
void ps_interrupts_remove(void);
int ps_interrupts(void);                 /* the number of counted signals */
int ps_is_terminal(int fd);
int ps_terminal_columns(int fd);         /* 80 when unknown */
void ps_set_threads(int n);              /* compute threads, */
int ps_threads_most(void);               /* the maximum number of them */
int ps_threads(void);
/* -- torch .pt --------------------------------------------------------------------------------------------------- */
/* The values of a file are a tree (shared ones are reached by several paths); each has a number. PS_EIO: the file
 * cannot be read, or was truncated. PS_EFORMAT: it is not a file of torch.save, uses a name that is not allowed, or is
 * damaged. PS_ERANGE: no such value or item. PS_EINVAL: the value is of another kind. */
enum { PS_PT_NONE, PS_PT_BOOL, PS_PT_INT, PS_PT_FLOAT, PS_PT_STRING, PS_PT_BYTES, PS_PT_NAME, PS_PT_LIST, PS_PT_TUPLE,
       PS_PT_SET, PS_PT_DICT, PS_PT_TENSOR };
typedef struct ps_pt_value {
  int32_t kind, count;         /* PS_PT_*; items of a container (of a dict: keys and values in turn) */
  int64_t integer;             /* BOOL, INT; of a text: bytes */
  double number;               /* FLOAT */
  const char *text;            /* STRING, BYTES, NAME ("torch.float32"): lent, without a final 0 */
} ps_pt_value;
typedef struct ps_pt_tensor {
  int32_t dtype, ndim;         /* dtype -1: a type we lack, which `type` names */
  int64_t shape[8], stride[8], offset;               /* strides and offset in elements */
  int64_t numel, nbytes, storage_nbytes;             /* nbytes: numel times element size */
  int32_t storage, pad;        /* tensors with the same number share their bytes */
  const char *type;            /* "torch.float32" */
  const void *data;            /* of the storage, lent until close; call ps_pt_ready before reading it */
} ps_pt_tensor;
typedef struct ps_pt ps_pt;
int ps_pt_open(const char *path, ps_pt **out);       /* maps the file, checks everything except tensors' bytes; runs
                                                      * nothing */
void ps_pt_close(ps_pt *pt);
int ps_pt_root(const ps_pt *pt);                     /* the value that was saved */
int ps_pt_get(const ps_pt *pt, int value, ps_pt_value *out);
int ps_pt_item(const ps_pt *pt, int value, int i);   /* the number of item i of a container */
int ps_pt_tensor_get(const ps_pt *pt, int value, ps_pt_tensor *out);
int ps_pt_ready(const ps_pt *pt);                    /* PS_EIO: the file was truncated while it was open */
int ps_pt_verify(ps_pt *pt, int value);              /* a tensor's storage against its checksum, once; PS_EFORMAT */
/* Elements first .. first + numel - 1, row-major, of a tensor from ps_pt_tensor_get, possibly with smaller sizes.
 * PS_ERANGE: elements beyond it. PS_EIO: the file was truncated. */
int ps_pt_copy(const ps_pt *pt, const ps_pt_tensor *tensor, int64_t first, void *dst, int64_t numel);
/* The text of ps_ptw_note: its number of bytes, and the text, lent until close, without a final 0. 0: there is none.
 * PS_EFORMAT: it is damaged. */
int64_t ps_pt_note(ps_pt *pt, const char **text);
void ps_pt_drop(const ps_pt *pt, int value);         /* its bytes are not needed soon: frees their pages */
/* A writer: declare all, begin, write each storage, commit. PS_ESTATE: a call out of this order. PS_EINVAL: a value or
 * size that does not match the declaration. PS_EIO: the file cannot be written. */
typedef struct ps_ptw ps_ptw;
int ps_ptw_new(const char *path, ps_ptw **out);
int ps_ptw_storage(ps_ptw *w, int dtype, int64_t numel);      /* its number */
int ps_ptw_put(ps_ptw *w, const ps_pt_value *value);          /* the next value; after a container, its items.
                                                               * Returns the number of a container, 0 for others */
int ps_ptw_again(ps_ptw *w, int container);                   /* the next value: a complete container once more */
int ps_ptw_tensor(ps_ptw *w, const ps_pt_tensor *tensor);     /* the same; reads ndim, shape, stride, offset, storage */
int ps_ptw_note(ps_ptw *w, const char *text);        /* adds a text that PyTorch does not read */
int ps_ptw_begin(ps_ptw *w);                         /* reserves the whole size, so that a full disk is found here */
int ps_ptw_write(ps_ptw *w, int storage, const void *data, int64_t nbytes);   /* the next bytes of a storage */
int ps_ptw_commit(ps_ptw *w);
void ps_ptw_free(ps_ptw *w);                         /* without commit: removes the temporary file */
/* -- groups of ranks: processes that train together (docs/distributed.md) ------------------------------------------ */
int ps_group_self(ps_ctx *ctx, ps_group **out);             /* a world of one. PS_ENOMEM */
/* Rank `rank` of `size`, with simulated other ranks, for dry runs (ps_machine_pretend): each has the same values.
 * PS_EINVAL: no rank of such a world. */
int ps_group_pretend(ps_ctx *ctx, int rank, int size, ps_group **out);
/* The ranks that make a group, and their meeting place. All ranks pass the same values, except `rank`. */
typedef struct ps_meeting {
  /* "tcp://host:port": rank 0 listens there, only at that address, while the group is made. "file:///path": rank 0
   * listens on a free port, and writes its address to the file. */
  const char *rendezvous;
  const char *run;             /* distinguishes this run from others, at most 128 bytes; NULL or "": it has no name */
  /* The secret that only the ranks know. It is proved and never sent. NULL or "": none, and a process that knows the
   * run's name is accepted as a rank. If ranks meet by a file, rank 0 then makes a secret and writes it to the file,
   * which only this user can read. */
  const char *secret;
  int32_t rank, size;
  int32_t machines, pad;       /* 1: all ranks are on this machine; 2: on several; 0: unknown */
  double timeout_s;            /* the longest time that making the group, and every call below, may wait */
  double heartbeat_s;          /* a rank that is silent for this long, or dies, is named to all, whose calls then
                                * fail */
} ps_meeting;
/* PS_EUNSUP: a build without Gloo. PS_ETIME: not all ranks connected in time. PS_EIO: an address cannot be used, or a
 * connection broke. PS_EFORMAT: another program answers. PS_ESTATE: another run, another secret, or a rank that is
 * taken. */
int ps_group_gloo(ps_ctx *ctx, const ps_meeting *meeting, ps_group **out);
int ps_host_is_loopback(const char *host);                  /* 1: no other machine can reach this one by it */
void ps_group_close(ps_group *group);
/* This process is about to end: notifies the other ranks of all its groups. why: its error message; the others get its
 * first line, and their calls fail. NULL: a normal end, which is a fault only for ranks that wait for this one. */
void ps_groups_end(const char *why);
/* Collectives on memory of devices return before their bytes have arrived; later work on the memory is ordered after
 * them. This call waits for those of all groups. Returns the error of one that failed meanwhile, unless a call has
 * already returned it. */
int ps_groups_settle(void);
int ps_group_rank(const ps_group *group);
int ps_group_size(const ps_group *group);
int ps_group_number(const ps_group *group);                 /* attribute `group` of ops; -1: there are too many */
int64_t ps_group_bytes_sent(const ps_group *group);         /* total bytes of tensors sent to other ranks; also for
                                                             * ps_group_pretend */
int64_t ps_group_bytes_in_pieces(const ps_group *group);    /* those among them that were sent during products */
/* Agreement by plan, for the calls of ps_engine_plan_calls. All ranks begin together, with `agreed` 1 if all have the
 * same hash, not 0. Ranks then compare only the number of a planned call; other calls are compared as usual. */
int32_t ps_group_plan_calls(const ps_group *group);
/* Call i, from 0, "all_reduce (call 3, fp32, 64 bytes)". PS_ERANGE: there is none. */
int ps_group_plan_call(const ps_group *group, int32_t i, char *text, int64_t room);
void ps_group_plan_begin(ps_group *group, int agreed);
int64_t ps_group_planned(const ps_group *group);          /* number of calls that all ranks made as planned, in total */
/* A group of some of `parent`'s ranks, over the same connections and under the same watch: a rank that fails in one of
 * them fails in all. All ranks of the parent call it at the same time, each with the list of its own group, like any
 * collective. ranks: [n], numbers in the parent, in the order of the new group. axis: its name in errors, 1 to 15
 * letters, digits and "_". Groups that no other call orders may be used at the same time. Either group may be closed
 * first. PS_EINVAL: the lists of two ranks do not match (an error on all), or there are 32 groups of these connections.
 * PS_ENOMEM; else the errors of the calls below. */
int ps_group_split(ps_group *parent, int n, const int32_t *ranks, const char *axis, ps_group **out);
const char *ps_group_axis(const ps_group *group);           /* "": of all ranks */
int ps_group_world_rank(const ps_group *group, int rank);   /* the number among all ranks; PS_EINVAL */
/* How memory of devices is sent to other ranks. never: through host memory. must: from device to device, and anything
 * missing for that is an error, even in a world of one. Neither: from device to device if all ranks can. Called before
 * the first connection, with equal values on all ranks. */
void ps_group_devices(ps_group *group, int never, int must);
/* Connects the ranks' devices, so that the calls below accept tensors there. All ranks call it; the first of the calls
 * below does so itself. PS_EUNSUP: a rank cannot, the message says why, and the group continues with host memory.
 * PS_ESTATE: another device is connected. Else the errors of the calls below. */
int ps_group_connect(ps_group *group, ps_ctx *ctx, int device);
const char *ps_group_carrier(const ps_group *group);        /* the carrier of device memory, "nccl"; "": none */
enum { PS_REDUCE_SUM, PS_REDUCE_MAX, PS_REDUCE_MIN };
/* On contiguous tensors of one device. Each call blocks until this rank's part is done. All ranks make the same calls
 * in the same order. They compare call, type, size and root before bytes move. Sums of floating-point types are
 * computed in fp32 (fp64 for fp64) in the order of ranks and rounded once; those of int32 and int64 wrap around. max
 * and min: a NaN on any rank makes the result NaN; only in host memory, like sums of integers. PS_EINVAL: the ranks'
 * calls differ (an error on all), or a tensor is not contiguous. PS_EUNSUP: sums of another type or place, or a device
 * without bytes. PS_ESTALE: a tensor's bytes are gone. PS_ETIME: a rank did not arrive in time. PS_EIO: a rank died,
 * failed, or its connection broke; the message names it. PS_ESTATE: the group failed before, or the device is not
 * connected. */
int ps_group_all_reduce(ps_group *group, ps_tensor *t, int reduce);     /* PS_REDUCE_*, in place */
int ps_group_reduce_scatter(ps_group *group, ps_tensor *out, ps_tensor *in);     /* out: part `rank` of the sum */
int ps_group_all_gather(ps_group *group, ps_tensor *out, ps_tensor *in);         /* out: the ranks' `in`, in order */
int ps_group_broadcast(ps_group *group, ps_tensor *t, int root);
int ps_group_barrier(ps_group *group);
int ps_group_send(ps_group *group, ps_tensor *t, int peer);     /* the peer calls recv at the same time */
int ps_group_recv(ps_group *group, ps_tensor *t, int peer);

/* -- pipelines: the executor performs one rank's row of a lowered table (src/pipe/exec.c) -------------------------
 * It sends, receives and keeps the tensors between virtual stages, runs backwards, computes weight gradients that were
 * put off, and reduces gradients. Work that needs the model's code or the script becomes an event for the caller:
 *     ps_pipe_expect for each virtual stage and micro-batch whose tensors have changed
 *     ps_step_begin, unless there is no step; ps_pipe_begin
 *     ps_pipe_next -> an event; its work; ps_pipe_done      until the event is the end (PS_ACT_NONE)
 * The work of a FORWARD begins with ps_step_next and ends with ps_step_done, in a step. That of a YIELD is the body of
 * the script's loop, in which ps_pipe_mark is called. That of a SEGMENT is the reason for which the walk of a BACKWARD,
 * INPUT or WEIGHT stopped: a recompute segment to run again, a function's backward, or hooks (ps_backward_begin_n).
 * Other actions of the step become events before they are performed in two cases: Lua's garbage should be collected
 * (ps_step_collects), or there is a listener (`tells` of ps_pipe_begin). An error ends the step: ps_pipe_abort notifies
 * the others, whose calls fail with the text. Transfers run during the work: a message is sent when its action is done,
 * and the messages that the next action needs arrive meanwhile. */
typedef struct ps_pipe ps_pipe;
enum { PS_PIPE_CARRY = 16 };   /* the most tensors that a virtual stage passes to the next one */
typedef struct ps_pipe_tensor {
  int32_t dtype, device, ndim;
  int32_t grad;                /* 1: a gradient is sent back for it */
  int64_t shape[8];
} ps_pipe_tensor;
typedef struct ps_pipe_event {
  int32_t kind;                /* FORWARD, YIELD, SEGMENT. NONE: the row is done. BACKWARD, INPUT, WEIGHT, REDUCE: in
                                * a step the executor performs it next; without a step the caller does */
  int32_t vstage, local;       /* number in the model, and among those of this rank */
  int32_t micro;
  int32_t again;               /* 1: for a FORWARD in a dry row: ps_pipe_done performs it, too (ps_pipe_repeat) */
  int32_t n, n_before;
  int32_t collect, pad;        /* collect: 1: Lua's garbage should be collected now */
  ps_tensor *const *in;        /* [n] for a FORWARD: outputs of the previous virtual stage; lent until ps_pipe_done */
  const ps_action *before;     /* [n_before] the row's actions between the previous event and this one, which the
                                * executor performed; lent as long as the table */
  int64_t segment;             /* for a SEGMENT: the number of the reason for which the walk stopped */
  double seconds;              /* time of backwards, weight gradients and reductions since the previous event */
  double loss;                 /* for a YIELD */
  double weight;               /* for a YIELD: that of ps_pipe_weigh; -1: the last virtual stage set none */
  double hits, targets;        /* for a YIELD: those of ps_pipe_score; both 0: the last virtual stage set none */
} ps_pipe_event;
/* Opens the executor of this rank, whose number in the group is that of its row. All ranks of the group call it, with
 * tables of one kind. Table, group and context may be closed before it. PS_ESTATE: the table is not lowered. PS_EINVAL:
 * the group has another size. Else the errors of ps_group_split. */
int ps_pipe_open(ps_ctx *ctx, const ps_pipe_table *table, ps_group *group, ps_pipe **out);
void ps_pipe_close(ps_pipe *x);
/* The tensors that a virtual stage will pass to the next one in a micro-batch, equal on both ranks. n: 0 to
 * PS_PIPE_CARRY; with 0 a message without a tensor is sent. PS_ESTATE: a step is under way. PS_ERANGE: no such virtual
 * stage or micro-batch. */
int ps_pipe_expect(ps_pipe *x, int vstage, int micro, int n, const ps_pipe_tensor *carry);
/* A virtual clock: an action takes the time of its cost [vstages], a message that of the link, whatever their real
 * time. costs NULL: no clock (the initial state). PS_EINVAL: as in ps_pipe_simulate. PS_ESTATE: a step is under way. */
int ps_pipe_clock(ps_pipe *x, const ps_pipe_cost *costs, const ps_pipe_link *link);
/* The last step by the virtual clock; spans: lent, one for each action of the row. PS_ESTATE: there is no clock. */
int ps_pipe_measured(const ps_pipe *x, ps_pipe_rank_times *out, const ps_pipe_span **spans);
/* Begins a step. step: the one under way, whose table has the row's forwards, backwards and reductions in their order,
 * with virtual stages by their numbers on this rank; lent until the end. NULL: there is none, as for a table of only
 * forwards; the caller then performs all actions. dry: no message is sent or waited for; tensors have no contents,
 * losses are 0. tells: 1: every action of the step is an event before it is performed. PS_ESTATE: one is under way. */
int ps_pipe_begin(ps_pipe *x, ps_step *step, int dry, int tells);
/* The number of micro-batches at the beginning of a dry row that are performed: the first one makes gradients, those
 * after it must have equal effects. The last one is also performed, since it ends the sums of gradients. */
enum { PS_PIPE_PERFORMED = 3 };
/* In dry rows from now on the micro-batches [first, end) repeat the effects of first - 1: on memory, on chunks and on
 * other ranks. The step's actions are performed, but only forwards become events, with `again` set, so that the caller
 * can collect before them. Inputs have the shapes of the PS_PIPE_PERFORMED - 1 micro-batches before them, which must
 * have equal effects: else the row fails with PS_ESTATE, and ps_pipe_differed returns 1. first == end: none (the
 * initial state). PS_ESTATE: a step is under way. PS_EINVAL: the first PS_PIPE_PERFORMED micro-batches, or the last,
 * are among them. */
int ps_pipe_repeat(ps_pipe *x, int first, int end);
int ps_pipe_differed(const ps_pipe *x);  /* 1: the last dry row failed since micro-batches had different effects */
/* The caller's collector has run in a dry row: bytes that waited for it are freed. */
void ps_pipe_collected(ps_pipe *x);
/* Settings for the last BACKWARD or WEIGHT of each virtual stage (ps_step_next), copied; called before the first of
 * these. The weight is that of ps_pipe_mark. Without this call they are NULL. PS_ESTATE: no step is under way.
 * PS_ENOMEM. */
int ps_pipe_settings(ps_pipe *x, const ps_action_how *how);
/* For a micro-batch whose YIELD was returned: its weight in the step (ps_action_how). root: the tensor that the script
 * made of the loss, from which the walk begins, on the rank of the last virtual stage; held until then; NULL: the loss
 * itself. Without this call the weight is 0. PS_ESTATE: no step is under way. PS_ERANGE: no such micro-batch.
 * PS_EINVAL: a root elsewhere. PS_ESTALE: its bytes are gone. */
int ps_pipe_mark(ps_pipe *x, int micro, ps_tensor *root, double weight);
/* The weight of the loss that the FORWARD under way made, before its ps_pipe_done. The ranks of the other stages get it
 * with the loss. PS_ESTATE, PS_ERANGE: as of ps_pipe_mark. */
int ps_pipe_weigh(ps_pipe *x, int micro, double weight);
/* Like ps_pipe_weigh: how many of the FORWARD's targets its largest logits hit, and the number of targets. Errors of
 * ps_pipe_weigh. */
int ps_pipe_score(ps_pipe *x, int micro, double hits, double targets);
/* Returns the event that is due. It may wait for messages: PS_EINVAL: a message differs from the table. PS_ETIME,
 * PS_EIO: as for groups; the message names rank and action. PS_ESTATE: no step is under way, the previous event is not
 * done, or the step's table is not that of the row. Else errors of a walk (ps_backward_begin_n), of weight gradients
 * (ps_backward_weights) and of ps_step_done, which leave the step's action under way. PS_EINVAL: a tensor that was
 * expected to have a gradient has none. */
int ps_pipe_next(ps_pipe *x, ps_pipe_event *out);
/* Reports that the event's work is done. For a FORWARD: out [n] has the tensors for the next virtual stage, as in
 * ps_pipe_expect; for the last virtual stage the loss, a single number, and other tensors that the caller wants to keep
 * with it. For others n is 0. PS_EINVAL: other tensors. Else errors of ps_pipe_next. */
int ps_pipe_done(ps_pipe *x, int n, ps_tensor *const *out);
/* This rank failed, or abandons the step. Nothing of the step is kept. why: text for the other ranks, whose calls then
 * fail; NULL: they are not notified (they failed, or there are none). */
void ps_pipe_abort(ps_pipe *x, const char *why);
/* @endcdef */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
