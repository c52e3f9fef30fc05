/* SPDX-License-Identifier: BSD-3-Clause
 * The public C API of psluajit. The Lua half declares the text between the two cdef marks through the FFI, word for
 * word. Between the marks this file therefore contains only enums, opaque and plain structs, and prototypes. It
 * contains no preprocessor lines, no inline functions and no structs passed by value. For the same reason the API is
 * one file, although this file is longer than the limit for source files.
 *
 * Conventions. The caller must release a reference that it receives from a function whose name ends in `_new`, or
 * through a parameter called `out`. The caller does not release the result of a function whose name ends in `_get`:
 * that result is lent. `numel` counts elements and `nbytes` counts bytes. Dimensions, tensors and ids count from 0.
 * Ranges are half-open. A context and its tensors belong to one thread. Any thread may use a loader or a file, but
 * only one thread at a time.
 *
 * Errors. A function that can fail returns 0 or another nonnegative number on success, and a negative PS_E* code on
 * failure. A failure also sets a message (ps_error_message) and does not change the outputs. The comment of a
 * function, or of its group of functions, names the codes and their causes. Three codes have the same causes
 * everywhere, and comments do not repeat them:
 *   PS_EINVAL: an argument has a wrong size, shape or type, is missing, or contradicts another argument.
 *   PS_ENOMEM: there is no memory for records, for a result or for workspace.
 *   PS_ESTATE: the context is closed.
 * A function that runs ops can also return the errors of ps_apply.
 *
 * Handles, such as ps_ctx * and ps_tensor *, must be valid and not NULL unless a comment allows NULL. Arrays must have
 * the sizes that the other arguments name. Only some functions detect a NULL. The Lua half passes only valid
 * arguments. */
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
       PS_MAX_PIECES = 8 /* maximum number of pieces into which an op divides its rows. The op exchanges one piece
                          * while it multiplies another piece. */,
       PS_MAX_COLUMNS = 3 /* maximum number of matrix products that share one gather of their rows */ };
enum { PS_F32, PS_BF16, PS_F16, PS_F64, PS_I32, PS_I64, PS_U8, PS_BOOL, PS_DTYPE_COUNT };

typedef struct ps_ctx ps_ctx;
typedef struct ps_storage ps_storage;
typedef struct ps_node ps_node;

/* A tensor: a strided view of a storage. Scripts may read the fields from dtype_ to stride_. Strides and the offset
 * count elements. */
typedef struct ps_tensor {
  int32_t dtype_, ndim, device_, flags;   /* The names dtype_ and device_ end in `_` because scripts call methods
                                           * named dtype and device. */
  int64_t numel_, offset;
  int64_t shape_[8];
  int64_t stride_[8];
  /* private */
  int32_t refs, node_out;
  ps_ctx *ctx;
  ps_storage *storage;
  ps_node *node;               /* node of the op that computed the tensor; NULL if backward cannot pass that op */
  struct ps_tensor *grad_;     /* gradient, for leaves only */
  void *managed;               /* for leaves only: an engine's record of this parameter, or NULL */
  ps_node *hook;               /* for leaves with hooks: the node that sums the leaf's gradients before the leaf's
                                * hooks run. NULL for other tensors. */
} ps_tensor;
/* GRAD_F32: the gradients of this leaf are summed in fp32.
 * SLOT: this tensor is a gradient that is stored in the memory of its parameter.
 * LATER: this tensor is a gradient that will be read when deferred weight gradients are computed. */
enum { PS_T_REQUIRES_GRAD = 1, PS_T_GRAD_F32 = 2, PS_T_SLOT = 4, PS_T_LATER = 8 };

/* -- errors: the last error of this thread ----------------------------------------------------------------------- */
const char *ps_error_message(void);
const char *ps_error_where(void);        /* file:line in the engine's source where the error was raised */
const char *ps_error_op(void);           /* name of the op that was running, or NULL */
const char *ps_error_name(int code);     /* name without prefix, such as "EINVAL" */
const char *ps_error_sub_name(int sub);  /* name such as "OP_CHUNKS", or NULL for PS_SUB_NONE */
/* Details of an error as numbers, so that a program need not parse the message. A field is -1 if it does not apply to
 * the error. */
typedef struct ps_error_detail {
  int32_t sub;                 /* PS_SUB_*: distinguishes errors that have the same code */
  int32_t tier;                /* index of the tier that has too little space (see ps_engine_tier_get). It is also -1
                                * if the memory belongs to no tier. */
  int32_t rank, stripe;        /* rank that caused the error, and that rank's stripe of chunks */
  int32_t other_rank, other_stripe;       /* if two ranks do not match: the other rank, and that rank's stripe */
  int64_t wanted, left;        /* wanted: number of bytes that are needed at the same time. left: number of bytes that
                                * are free for this need; negative if the tier's other contents alone exceed the
                                * tier's size. If `wanted` is -1, both numbers are unknown. */
  int32_t final;               /* 1 if the error has ended the group of ranks, so that repeating the call cannot
                                * succeed; otherwise 0 */
} ps_error_detail;
/* Returns the details of the last error. The details are valid until the next error of this thread. */
const ps_error_detail *ps_error_get_detail(void);
const char *ps_version(void);
const char *ps_abi_hash(void);           /* hash of the text of these declarations; the Lua half compares this hash
                                          * with the hash of its own declarations */

/* -- context ----------------------------------------------------------------------------------------------------- */
int ps_ctx_new(ps_ctx **out);           /* Can return PS_ENOMEM. */
/* Frees the context. Tensors that the caller still holds keep valid headers, but have no bytes. */
void ps_ctx_free(ps_ctx *ctx);
/* A simulated machine.
 *   host_nbytes: free memory of the machine; 0 means the memory of the real machine.
 *   device_nbytes: free memory of the machine's GPU (the device cuda); 0 means that there is no GPU.
 *   device_total: the whole memory of the GPU, including the bytes that the engine cannot use.
 *   device_sms: number of multiprocessors of the GPU.
 * device_total and device_sms determine the workspace of kernels. If both are 0, kernels have the same workspace as
 * on the processor. */
typedef struct ps_machine { int64_t host_nbytes, device_nbytes, device_total, device_sms; } ps_machine;
/* Makes all contexts that are made after this call simulate the devices of `machine`. Ops then make tensors but do
 * not compute. The tensors occupy no real memory, and the disk tier has no file. The only values that exist are the
 * values that a script writes. Returns PS_EINVAL if `machine` is NULL or has a negative size. */
int ps_machine_pretend(const ps_machine *machine);
int ps_machine_pretended(void);          /* returns 1 after ps_machine_pretend, otherwise 0 */
int ps_device_count(ps_ctx *ctx);
const char *ps_device_name(ps_ctx *ctx, int device);                 /* "cpu", "ref", "meta" ... */
/* Returns a text that names the instruction set, the number of threads and the libraries that the device uses. */
const char *ps_device_describe(ps_ctx *ctx, int device);
/* Finds a device by name. The first call with the name "cuda" opens the GPU. Returns PS_EUNSUP if there is no such
 * device, or if the device cannot be opened. */
int ps_device_find(ps_ctx *ctx, const char *name, int *out);
/* The abilities of a device.
 *   is_host: the processor can read the device's memory.
 *   has_data: tensors on the device have contents. Tensors on the device meta have no contents.
 *   fast_bf16: the device multiplies bf16 values faster than fp32 values.
 *   fuses: on this device one op that combines several ops is faster than the separate ops. */
typedef struct ps_device_info { uint8_t is_host, has_data, fast_bf16, fuses; } ps_device_info;
int ps_device_info_get(ps_ctx *ctx, int device, ps_device_info *out);   /* Returns PS_EINVAL if there is no such
                                                                         * device. */
/* Sets the index of this process on its machine. If the machine has several cards, the index selects the card that is
 * opened as "cuda". If `local_rank` is -1, the index is read from a launcher's environment variables. */
void ps_local_rank_set(int local_rank);
/* The memory of a device, in bytes.
 *   used: memory of tensors.
 *   peak: the maximum of `used`.
 *   reserved: memory that was allocated from the system. On the host this is address space, and pages without tensors
 *     use no physical memory.
 *   limit: maximum number of bytes that may be used, 0 if there is no limit. */
typedef struct ps_memory_info { int64_t used, peak, reserved, limit; } ps_memory_info;
int ps_memory_get(ps_ctx *ctx, int device, ps_memory_info *out);     /* Returns PS_EINVAL if there is no such device. */
int ps_memory_set_limit(ps_ctx *ctx, int device, int64_t nbytes);    /* Returns PS_EINVAL if there is no such device,
                                                                      * or if nbytes is negative. */
void ps_memory_reset_peak(ps_ctx *ctx, int device);
/* Lists the largest tensors in a device's memory, in descending order of size. Tensors in chunks are not listed.
 * `when` selects the time:
 *   PS_HOLD_NOW: tensors that exist now.
 *   PS_HOLD_PEAK: tensors that existed when the use of memory was at its peak, or within 1/256 of the peak.
 *   PS_HOLD_FAILED: tensors that existed when an allocation last failed. With this value of `when`, device -1 means
 *   the device that refused the allocation.
 * Returns the number of tensors, which is at most PS_HOLDERS. Sets *used to the number of bytes in use at that time.
 * Returns PS_EINVAL if there is no such device or no such `when`. */
enum { PS_HOLDERS = 16 };
enum { PS_HOLD_NOW, PS_HOLD_PEAK, PS_HOLD_FAILED };
typedef struct ps_holder {
  int64_t nbytes;
  const char *op;              /* op that made the tensor; NULL if no op made the tensor, for example in ps.zeros */
  int32_t module;              /* module that was running (ps_module_enter), 0 if none. For an op of backward, this is
                                * the module of its forward op. */
  int32_t line;                /* line from ps_tensor_note_line, 0 if none */
  uint8_t backward, scratch;   /* backward: a gradient rule made the tensor. scratch: the tensor is a kernel's
                                * workspace. */
  uint8_t pad[6];
} ps_holder;
int ps_memory_holders(ps_ctx *ctx, int device, int when, ps_holder *out, int64_t *used);
int64_t ps_memory_available(ps_ctx *ctx, int device);     /* returns the number of bytes that can still be allocated,
                                                           * or -1 if there is no such device */
/* Returns the number of bytes that this process has taken from what ps_memory_available counts: the regions of tensors
 * and chunks on the device. A region of host memory counts only the bytes that were written at least once, because the
 * system provides memory when a byte is written. Returns -1 if there is no such device. */
int64_t ps_memory_held(ps_ctx *ctx, int device);
/* Returns whether Lua should collect garbage. If a script no longer refers to a tensor, and no scope drops the
 * tensor, only Lua's collector frees the tensor's bytes. A collection is due when the total size of tensors outside
 * chunks has grown by a quarter since the last collection. After this function has returned true, it returns false
 * until ps_collected is called. */
int ps_collect_due(ps_ctx *ctx);
/* Returns the total size, in bytes, of the tensors that were made since the last collection, minus the total size of
 * the tensors that were freed since then. The result can be negative. */
int64_t ps_collect_waiting(const ps_ctx *ctx);
/* Must be called after a collection. The next collection is due when the total size of tensors has grown by a quarter
 * of the bytes that are in use now, and by at least `least` bytes. */
void ps_collected(ps_ctx *ctx, int64_t least);

/* -- tensors ----------------------------------------------------------------------------------------------------- */
int64_t ps_dtype_size(int dtype);        /* bytes per element */
const char *ps_dtype_name(int dtype);    /* "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "bool" */
/* Makes a tensor with undefined contents. Returns PS_EINVAL if there is no such type or device, or if the shape is
 * out of range. Returns PS_ENOMEM if the memory is too small; the message then contains the device, the bytes wanted
 * and the bytes free. */
int ps_tensor_new(ps_ctx *ctx, int dtype, int device, int ndim, const int64_t *shape, ps_tensor **out);
void ps_tensor_retain(ps_tensor *t);
void ps_tensor_release(ps_tensor *t);
/* Records the script line that made the tensor. `line` is any number that the caller chooses to identify the line. */
void ps_tensor_note_line(ps_tensor *t, int32_t line);
void ps_tensor_drop(ps_tensor *t);       /* frees the tensor's bytes unless other tensors share them, and keeps the
                                          * tensor's header */
/* Keeps the tensor's bytes until the tensor is released, even if all scopes end before. Returns PS_ESTALE if the
 * tensor's bytes are gone. */
int ps_tensor_keep(ps_tensor *t);
int ps_tensor_alive(const ps_tensor *t); /* returns 0 if a scope has dropped the tensor's bytes, otherwise 1 */
/* Replaces the bytes, device and strides of t by the bytes, device and strides of `from`. Everything that refers to t
 * sees the new values. Frees the old bytes of t. The function is used to set the values of a leaf that was made
 * without data, on the device meta. Returns PS_EINVAL if the types or shapes differ. Returns PS_ESTALE if the bytes
 * of `from` are gone. Returns PS_ESTATE if an op computed t, if t has a gradient, or if the bytes of t are in use. */
int ps_tensor_set_data(ps_tensor *t, ps_tensor *from);
int64_t ps_tensor_nbytes(const ps_tensor *t);        /* numel times element size */
int ps_tensor_is_contiguous(const ps_tensor *t);
uint32_t ps_tensor_version(const ps_tensor *t);      /* returns a number that increases with every write to the
                                                      * tensor's bytes */
/* ps_tensor_write copies host memory to a contiguous tensor. ps_tensor_read (declared below) copies a contiguous
 * tensor to host memory. Both functions copy the whole contents in row-major order. They return PS_EINVAL if nbytes
 * is not exactly the tensor's size, and PS_ESTALE if the tensor's bytes are gone. They return PS_EUNSUP if the tensor
 * is not contiguous or is on a device without contents. ps_tensor_read returns PS_EDRY in a dry run. */
int ps_tensor_write(ps_tensor *t, const void *src, int64_t nbytes);
/* Reads nbytes bytes of a source into dst, starting at offset `at` of the source. Several threads can call this
 * function at the same time. Returns 0 or an error code. */
typedef int (*ps_reader)(const void *from, int64_t at, void *dst, int64_t nbytes);
/* Like ps_tensor_write, but the function `read` supplies the bytes. All compute threads call this reader. The reader
 * fills a tensor in host memory without an extra copy. Also returns errors of the reader. After an error of the
 * reader, the tensor contains a mixture of old and new contents. */
int ps_tensor_load(ps_tensor *t, ps_reader read, const void *from, int64_t at, int64_t nbytes);
/* Bytes that a lender lends to a tensor. The tensor may use the bytes like bytes of its own, and may write to them. */
typedef struct ps_loan {
    void *bytes;
    int (*check)(void *lender);          /* called before each use: returns 0 if the bytes are unchanged, otherwise an
                                          * error code */
    void (*end)(void *lender);           /* called when the tensor no longer uses the bytes */
    void *lender;
    /* Returns a file descriptor whose reads bypass the page cache. Sets *at to the offset of the bytes in the file.
     * The lender closes the descriptor. Returns -1 if there is no such descriptor. The function may be NULL. */
    int (*direct)(void *lender, int64_t *at);
} ps_loan;
/* Lends nbytes bytes of a source, starting at offset `at` of the source. Returns 0 or an error code. */
typedef int (*ps_lender)(void *from, int64_t at, int64_t nbytes, ps_loan *out);
/* Like ps_tensor_load, but from now on the tensor uses the lender's bytes instead of a copy. Frees the tensor's
 * previous bytes. The loan ends when the tensor is freed, or when its bytes move into a chunk. Returns PS_EUNSUP,
 * without changing anything, if the tensor is a view of part of a storage, if the tensor is not in host memory
 * outside chunks, or if the tensor's elements would not be aligned to their size. Returns PS_ESTATE if the tensor is
 * in use. Also returns errors of the lender. */
int ps_tensor_borrow(ps_tensor *t, ps_lender lend, void *from, int64_t at, int64_t nbytes);
/* A range of a lender's bytes, starting at offset `at`. Each block of a tensor uses `width` bytes of the range. */
typedef struct ps_lent_range { void *from; int64_t at, width; } ps_lent_range;
enum { PS_BLOCK_WIDTH = 1 << 16 };
/* Like ps_tensor_borrow, for a uint8 tensor that consists of blocks. Each block has a first part of ranges[0].width
 * bytes and a second part of ranges[1].width bytes. The first parts of all blocks follow each other in the lender's
 * bytes, starting at offset ranges[0].at. In the same way, the second parts follow each other, starting at offset
 * ranges[1].at. Both widths are at most PS_BLOCK_WIDTH. If the tensor moves into a chunk that reads the tensor's
 * bytes from the file, both ranges are read. If the tensor is first used in any other way, its bytes are copied to
 * memory. Returns PS_EINVAL if a width is not allowed, or if the blocks do not fill the tensor. Also returns errors
 * of ps_tensor_borrow. */
int ps_tensor_borrow_blocks(ps_tensor *t, ps_lender lend, const ps_lent_range *ranges);
int ps_tensor_is_lent(const ps_tensor *t);    /* returns 1 if the tensor's bytes belong to a lender */
int ps_tensor_read(const ps_tensor *t, void *dst, int64_t nbytes);
/* Like ps_tensor_read, for contents that will be written to a file. After ps_machine_pretend, a tensor without values
 * is read as zeros. Returns errors of ps_tensor_read. */
int ps_tensor_save(const ps_tensor *t, void *dst, int64_t nbytes);
/* Computes the XXH3 hash of the bytes of a contiguous tensor in host memory. The tensor may be inside or outside
 * chunks. Returns PS_EUNSUP if the tensor is not contiguous or not in host memory, or PS_ESTALE if its bytes are
 * gone. */
int ps_tensor_hash(ps_tensor *t, uint64_t *out);
/* Statistics of a host tensor, computed in fp64. The tensor may have any strides. ps_tensor_stats returns PS_ESTALE
 * if the tensor's bytes are gone, PS_EUNSUP if the processor cannot read the device's memory, or PS_EDRY if the
 * tensor was made in a dry run. */
typedef struct ps_stats {
  int64_t numel;
  double mean;                 /* NaN if there are no elements */
  double squares;              /* sum of (x - mean)^2; PyTorch's variance is this sum divided by numel - 1 */
  double min, max;             /* NaN if there are no elements or if any element is NaN */
} ps_stats;
int ps_tensor_stats(const ps_tensor *t, ps_stats *out);
/* Returns the address of a contiguous tensor's bytes in host memory outside chunks. The address is valid as long as
 * the tensor has these bytes. Returns PS_EUNSUP for any other tensor, or PS_EDRY if the tensor was made in a dry
 * run. */
int ps_tensor_address(ps_tensor *t, void **out);
/* These functions read or write elements of a host tensor as doubles, for printing and for item(). The tensor may
 * have any strides. `first` is the flat (row-major) position of the first element. Both functions return PS_ERANGE if
 * the tensor has no such positions, PS_ESTALE if the tensor's bytes are gone, PS_EUNSUP if the processor cannot read
 * the device's memory, or PS_EDRY if the tensor was made in a dry run. */
int ps_tensor_read_f64(const ps_tensor *t, int64_t first, int64_t numel, double *dst);
int ps_tensor_write_f64(ps_tensor *t, int64_t first, int64_t numel, const double *src);
/* Returns a copy of t on a device. If t is already on that device, returns t itself with an additional reference.
 * Returns errors of ps_apply. */
int ps_tensor_to_device(ps_tensor *t, int device, ps_tensor **out);
/* Returns the indices of the nonzero elements of a tensor on a host device. The result is int64 [count, ndim].
 * Returns PS_EUNSUP on any other device, PS_EDRY in a dry run, or PS_ESTALE if the tensor's bytes are gone. */
int ps_tensor_nonzero(ps_tensor *t, ps_tensor **out);

/* -- ops --------------------------------------------------------------------------------------------------------- */
/* Runs op `op` (PS_OP_*) on n_in inputs. An absent optional input is NULL. attrs is the op's struct ps_attrs_<op>.
 * `out` has PS_MAX_OUT entries. If an entry is not NULL when the function is called, the op writes into that tensor.
 * An op supports this only if its declaration says so. Errors:
 *   PS_EINVAL: the inputs or attributes do not fit the op. The message contains all shapes and types.
 *   PS_ESTALE: the bytes of an input are gone, or an input was made in a dry run.
 *   PS_ERANGE: an index or a target is out of range.
 *   PS_EUNSUP: there is no kernel for the device and types.
 *   PS_ENOMEM: there is not enough memory. The message contains the device or tier, the bytes wanted and the bytes
 *   free.
 *   PS_EBACKEND: the device failed.
 *   PS_EIO, PS_ENOSPC: a chunk could not be moved to or from the disk.
 *   PS_ETIME, PS_EIO: errors of ranks (see the functions of groups). */
int ps_apply(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int64_t attrs_nbytes,
             ps_tensor **out);
/* Computes attention for T new positions. The caches contain the keys and values of the `at` earlier positions. The
 * function appends the T new keys and values to the caches and returns a result of shape [B, T, H * D]. Each new
 * position sees itself and all earlier positions. The function runs the ops copy_, rope and attention on views. It
 * computes no gradients.
 *   Separate inputs: q is [B, T, H * D]; k and v are [B, T, G * D]. The three tensors may also have the shapes [B, T,
 *   H, D] and [B, T, G, D]. The caches `keys` and `values` are [B, G, S, D]. cos and sin are the tables of the op
 *   rope, or both are NULL.
 *   Fused input: q is [B, T, (H + 2 * G) * D] and contains queries, then keys, then values. The cache `keys` contains
 *   keys, then values, and is [B, 2 * G, S, D]. k, v, values, cos and sin are NULL.
 * The caches have the type of q. If q is not fp64, the caches may also be bf16, fp16 or uint8. A uint8 cache is [B,
 * G, S, D / 32 * 34], and its rows consist of blocks of Q8_0. mask is bool [B, at + T], or NULL. Returns PS_EINVAL
 * also if a gradient would be needed. Also returns errors of ps_apply. */
typedef struct ps_cached_attention {
  int64_t heads, groups, at;   /* number of query heads (H), of key heads (G) and of cached positions */
  int32_t window, pad;         /* window: as in the op attention */
  double scale;                /* factor on scores; 0 means 1 / sqrt(D) */
} ps_cached_attention;
int ps_attention_cached(ps_ctx *ctx, const ps_cached_attention *how, ps_tensor *q, ps_tensor *k, ps_tensor *v,
                        ps_tensor *keys, ps_tensor *values, ps_tensor *cos, ps_tensor *sin, ps_tensor *mask,
                        ps_tensor **out);
/* The cost of an op.
 *   flops: number of multiplications and additions in matrix products and in attention. For attention, only pairs of
 *   a query and a key that the query sees are counted. For other ops the number is 0.
 *   bytes: number of bytes that the op reads or writes. Each byte is counted once. */
typedef struct ps_op_cost_info { int64_t flops, bytes; } ps_op_cost_info;
/* Computes the cost of an op with these operands. Only the types and shapes of the operands are read. attrs is as in
 * ps_apply. `out` has n_out entries, and an absent output is NULL. Returns PS_EINVAL if there is no such op, or if
 * the op does not support these operands. */
int ps_op_cost(int op, int n_in, ps_tensor *const *in, const void *attrs, int n_out, ps_tensor *const *out,
               ps_op_cost_info *cost);
/* Turns anomaly mode on or off. In this mode an op that makes a NaN or an infinity fails with PS_ERANGE and
 * PS_SUB_ANOMALY. The rules are in tensor/anomaly.c. The mode reads the outputs of each op, so training is several
 * times slower. Returns the previous setting and never fails. */
int ps_detect_anomaly(ps_ctx *ctx, int on);
/* Records the place in the script that calls the ops after this call. `place` is any number that the caller chooses. */
void ps_anomaly_at(ps_ctx *ctx, int64_t place);
/* A call with `on` 1 announces that the next op scales the loss, so that gradients can overflow. Infinities in
 * backward are then ignored until a call with `on` 0. The caller makes that call after the step. */
void ps_anomaly_scaled(ps_ctx *ctx, int on);
typedef struct ps_anomaly_info {
  int64_t place;               /* place that called the op; for an op of backward, the place that called its forward
                                * op; -1 if unknown */
  int32_t op;                  /* PS_OP_* of the op that made the NaN or infinity */
  int32_t of;                  /* in backward, PS_OP_* of the op whose gradient was computed; otherwise -1 */
  int32_t nan;                 /* 1 for a NaN, 0 for an infinity */
  int32_t module;              /* module that called the op (ps_module_enter), 0 if none */
} ps_anomaly_info;
void ps_anomaly_get(ps_ctx *ctx, ps_anomaly_info *out);     /* describes the last error of anomaly mode */
/* Returns the device whose kernel runs op `op` for tensors on `device`, or -1 if there is no kernel. */
int ps_op_kernel_device(ps_ctx *ctx, int device, int op);

/* -- the record of events (docs/profiling.md) -----------------------------------------------------------------------
 * The record is one ring buffer per process. Times are in nanoseconds of the clock of ps_now. The meaning of the
 * fields of ps_record_event depends on the kind of the event:
 *   OP: `name` is the op. `from` is the op's device. `to` is the type of the op's first input. `on` is 1 if the
 *   device's own clock measured the op.
 *   PART: one of the matrix products within an op that runs on several ranks. The fields are as for OP. In addition,
 *   `id` is the number of rows of the product.
 *   MODULE: the time in which a module ran.
 *   STEP: `name` is 1 if the step was the first step or had no plan.
 *   ACTION: `name` is PS_ACT_*. `id` is the micro-batch. `to` is the virtual stage.
 *   COPY: `name` is 0 for a copy to the tier above and 1 for a copy to the tier below. `id` is the chunk. `from` and
 *   `to` are the tiers.
 *   DISK: `name` is 0 for a read and 1 for a write.
 *   COLLECTIVE: `name` is the call, as an index for ps_record_call_name. `id` is the group. `on` is the group's
 *   number of ranks.
 *   WAIT: `name` is PS_WAIT_*. `id` is the chunk, or -1.
 *   CHUNK: `name` is PS_CHUNK_*. `id` is the chunk. `of` is the chunk's kind (PS_KIND_*). `to` is the tier that
 *   changed. `on` is a bit set of the tiers on which the chunk has memory.
 *   TIER: `to` is the tier. `bytes` is the number of bytes of chunks in the tier.
 *   DEVICE: `to` is a device without chunks. */
enum { PS_REC_OP = 1, PS_REC_MODULE, PS_REC_STEP, PS_REC_ACTION, PS_REC_COPY, PS_REC_DISK, PS_REC_COLLECTIVE,
       PS_REC_WAIT, PS_REC_CHUNK, PS_REC_TIER, PS_REC_DEVICE, PS_REC_PART };
enum { PS_WAIT_COPY, PS_WAIT_COLLECTIVE, PS_WAIT_MESSAGE };
/* PS_CHUNK_THERE: the chunk existed when the record began. */
enum { PS_CHUNK_ALLOCATE, PS_CHUNK_MOVE, PS_CHUNK_RELEASE, PS_CHUNK_THERE };
enum { PS_RECORD_MOST = 1 << 26 };       /* maximum number of events in a record; each event has 64 bytes */
typedef struct ps_record_event {
  int64_t begin_ns, end_ns;
  int64_t number;              /* sequence number of the event. Events are numbered from 1, in the order in which they
                                * end. */
  int64_t bytes;
  int64_t flops;               /* for an OP, number of FLOPs; for a TIER or DEVICE, number of bytes of tensors outside
                                * chunks */
  int32_t step, module;        /* 0 means none */
  int32_t id, of;
  uint16_t name, on;
  uint8_t kind, action, from, to;
} ps_record_event;
typedef struct ps_record_total { int64_t calls, ns, bytes, flops; } ps_record_total;
/* Begins a record that keeps the last `events` events. Drops the previous record. Returns PS_EINVAL if `events` is
 * too large. Can also return PS_ENOMEM. */
int ps_record_start(int64_t events);
void ps_record_stop(void);
int ps_record_is_on(void);
void ps_record_settle(ps_ctx *ctx);      /* waits for devices whose latest work is not yet in the record */
/* Returns the number of events in the record. Sets *dropped to the number of events that were overwritten. */
int64_t ps_record_count(int64_t *dropped);
/* Reads event i. Event 0 is the oldest event. Returns 1 if the event is being overwritten at this moment, or
 * PS_ERANGE if there is no event i. */
int ps_record_get(int64_t i, ps_record_event *out);
/* Returns the totals of all calls of an op, including calls whose events were overwritten. Returns PS_EINVAL if there
 * is no such op. */
int ps_record_op_total(int op, ps_record_total *out);
/* Returns the name of a call between ranks. `name` is the field `name` of a COLLECTIVE event. Returns NULL if there
 * is no such call. */
const char *ps_record_call_name(int name);
int64_t ps_record_clock(void);           /* returns the current time in nanoseconds, by the clock of events */
/* Counts the operations (ps_op_cost) of all ops that run while counting is on. Ops of dry runs are not counted.
 * Counting works without a record. `on` 1 begins a count and `on` 0 ends it. Counts can be nested. */
void ps_flops_count(int on);
int64_t ps_flops_counted(void);
/* Begins or ends the counting of calls between ranks. In a record, these calls are COLLECTIVE events. There is one
 * sum for each combination of call, group and size. Counting works without a record, and excludes the calls that a
 * record would exclude. `names` is a bit set of the calls to count, by index of ps_record_call_name. If `names` is 0,
 * counting stops. When counting begins, earlier sums are dropped. If `verbose` is 1, each counted call is printed
 * when it ends. */
void ps_calls_count(uint32_t names, int verbose);
typedef struct ps_calls_total {
  int32_t name, group, ranks, pad;     /* group: index of the group, or -1 */
  int64_t nbytes;                      /* size of the whole tensor in bytes */
  int64_t calls, ns;
  char axis[16];                       /* name of the group, such as "tp"; "" for all ranks */
} ps_calls_total;
/* Reads sum i. The sums are numbered from 0, in the order of their first calls. The function never fails. It returns
 * 1 if there is no sum i. */
int ps_calls_total_get(int64_t i, ps_calls_total *out);
/* Returns the number of bytes that a call sends over each rank's link, divided by the size of the whole tensor. The
 * product of this number and the tensor's bytes per second is the "bus bandwidth" of NCCL's tests. With n ranks the
 * number is 2 * (n - 1) / n for a sum that all ranks receive. It is (n - 1) / n for a gather, and for a sum of which
 * each rank receives a shard. It is 1 for other calls. */
double ps_calls_bus(int name, int ranks);
/* ps_module_enter and ps_module_leave enter and leave a module. The id of a module is positive. ps_module_enter returns
 * the depth, which the caller passes to ps_module_leave. It never fails. Memory errors name the running module,
 * even without a record. When a scope ends, the modules that were entered in the scope are left. */
int ps_module_enter(int id);
void ps_module_leave(int depth);
int ps_module_now(void);                 /* returns the id of the running module, or 0 if there is none */

/* -- scopes: the end of a scope drops the bytes of tensors that were made in the scope and not kept -------------- */
int ps_scope_begin(ps_ctx *ctx, int64_t *id);               /* Can return PS_ENOMEM. */
/* Ends the scope and all scopes within it. The tensors `keep` survive in the outer scope. Returns PS_ESTATE if the
 * scope is not open. */
int ps_scope_end(ps_ctx *ctx, int64_t id, int n_keep, ps_tensor *const *keep);
int64_t ps_scope_depth(ps_ctx *ctx);

/* -- gradients --------------------------------------------------------------------------------------------------- */
int ps_grad_enabled(ps_ctx *ctx);
/* Turns offloading of activations on or off. While offloading is on, tensors that backward will read are moved from a
 * device to host memory. Two groups of tensors are moved: the inputs of recompute segments, and the tensors that only
 * the tape still holds at the end of a scope. Returns the previous setting, or PS_EUNSUP if there is no host device. */
int ps_set_offload(ps_ctx *ctx, int on);
int ps_set_grad_enabled(ps_ctx *ctx, int enabled);          /* returns the previous setting and never fails */
/* Turns the keeping of cheap outputs on or off. If `on` is 1, the outputs of CHEAP ops (norms, GELU, SwiGLU) are kept
 * for backward. If `on` is 0, these outputs are recomputed. Keeping the outputs costs memory and saves 1 to 2 % of
 * the time on a GPU. The results have the same bits in both cases. Returns the previous setting and never fails. */
int ps_set_keep_cheap(ps_ctx *ctx, int on);
/* Sets whether the tensor requires a gradient. Returns PS_EINVAL if the tensor is not a leaf, or if its type is not a
 * float type. */
int ps_tensor_require_grad(ps_tensor *t, int on);
ps_tensor *ps_tensor_get_grad(ps_tensor *t);                /* returns the gradient, lent, or NULL if there is none */
/* Sets the gradient of t, and retains `grad`. NULL clears the gradient. Returns PS_EINVAL if `grad` is not a float
 * tensor of t's shape on t's device, or PS_ESTALE if the bytes of `grad` are gone. */
int ps_tensor_set_grad(ps_tensor *t, ps_tensor *grad);
/* Makes backward copy the gradient of t to the gradient of `holder`. An op must have computed t. `holder` is a tensor
 * without history that has t's shape, such as a result of ps_tensor_detach. Returns PS_EINVAL if no op computed t, if
 * gradients were off, or if shape, type or device differ. Can also return PS_ENOMEM. */
int ps_tensor_keep_grad(ps_tensor *t, ps_tensor *holder);
/* Makes a tensor with the same bytes as t and without history. Can return PS_ENOMEM. */
int ps_tensor_detach(ps_tensor *t, ps_tensor **out);
/* Returns 1 if t is one of the n tensors `from`, or if recorded ops made t from one of these tensors. Otherwise
 * returns 0. Can return PS_ENOMEM. */
int ps_tensor_made_from(const ps_tensor *t, int n, ps_tensor *const *from);
/* Returns the sequence number of the op that made t. Each recorded op has a higher number than the previous recorded
 * op. Returns -1 if no recorded op made t. The number stays valid after t is freed. */
int64_t ps_tensor_op_number(const ps_tensor *t);
/* Sets found[i] to 1 if the op with sequence number ops[i] made t, or if recorded ops made t from the result of that
 * op. Otherwise sets found[i] to 0. When the search finds an op, it does not search the ops from which that op's
 * inputs were made. Can return PS_ENOMEM. */
int ps_tensor_made_by(const ps_tensor *t, int n, const int64_t *ops, int8_t *found);
/* Walks the tape backward from n roots in one pass. The entry of `gradients` for a root is a tensor of the root's
 * shape, or NULL if the root is a single value. If `gradients` itself is NULL, all entries are NULL. The walk uses
 * up the nodes that lead to the roots, so a second walk through these nodes fails with PS_ESTATE.
 *   ps_backward_begin_n prepares the walk. If `segment` is not NULL, it also starts walking and returns the result of
 *   ps_backward_next.
 *   ps_backward_next returns 0 if the walk has ended and 1 if the walk has stopped. In the second case *segment is
 *   the id of the segment, the function or the hooks at which the walk has stopped. The caller does the following
 *   work and then calls ps_backward_next again:
 *     a recompute segment (ps_segment_new): the caller runs the segment again, then calls ps_backward_splice.
 *     a function of the script (ps_call_new): the caller computes the function's backward, then calls ps_call_done.
 *     hooks (ps_tensor_hook): the caller runs the hooks, then calls ps_hooks_done.
 *   ps_backward_end abandons the walk, if a walk is in progress.
 * An error ends the walk. Returns PS_EINVAL if no tensor on which a root depends requires a gradient, or if a
 * gradient has another shape than its root. Returns PS_ESTATE if a walk is already in progress; ps_backward_next
 * returns PS_ESTATE if no walk is in progress. Returns PS_ESTALE if a tensor that a gradient rule reads was changed
 * in place, or if the tensor's bytes are gone. Gradient rules run ops, so errors of ps_apply are possible too. */
enum { PS_MAX_ROOTS = 64 };
int ps_backward_begin_n(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int64_t *segment);
int ps_backward_next(ps_ctx *ctx, int64_t *segment);
/* Like ps_backward_begin_n, with two additions. If keep is 1, the walk does not use up the nodes, and another walk
 * can pass them. If n_to > 0, the walk passes only nodes that lead to the tensors `to`, and no leaf gets a gradient.
 * After the walk, ps_backward_taken returns the gradients of the tensors `to`. The caller must release each gradient.
 * A gradient is NULL if the walk computed no gradient for the tensor. Returns PS_EINVAL if a tensor of `to` requires
 * no gradient or occurs twice; ps_backward_taken returns PS_EINVAL if n differs from n_to. Returns PS_ESTATE if a
 * walk is in progress. Can also return PS_ENOMEM. */
int ps_backward_for(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int keep, int n_to,
                    ps_tensor *const *to, int64_t *segment);
int ps_backward_taken(ps_ctx *ctx, int n, ps_tensor **gradients);
/* Returns the gradient, lent, of output `out` of the node at which the walk has stopped. The node must not be a
 * segment. *gradient is NULL if no gradient has arrived. Returns PS_ESTATE if the walk has not stopped, or PS_ERANGE
 * if there is no such output. */
int ps_stop_gradient(ps_ctx *ctx, int out, ps_tensor **gradient);
/* Records a function whose backward the caller computes. The tensors `out` were computed with gradients off, and
 * become functions of the tensors `in`. An entry of `in` is NULL if that input is not a tensor. An entry of `out` is
 * NULL if that output gets no gradient. The tensors `saved` (NULL if there are none) are kept for backward. Like
 * other saved tensors, they are checked against changes in place. Call ps_segment_begin before the function runs.
 * Call ps_segment_cancel if the function fails or needs no node. Sets *id to the id that ps_backward_next returns
 * when the walk stops at the function. Returns 1 if the function read parameters of an engine, as ps_segment_new
 * does. Returns PS_EINVAL if there is no input or no output, or if an output has a history, is not a float tensor or
 * occurs twice. Returns PS_ESTALE if the bytes of a saved tensor are gone. Can also return PS_ENOMEM. */
int ps_call_new(ps_ctx *ctx, const char *name, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out,
                int n_saved, ps_tensor *const *saved, int64_t *id);
/* Returns saved tensor i, lent, of the function at which the walk has stopped. Returns PS_ESTATE if the walk has not
 * stopped at a function, PS_ESTALE if the tensor was changed in place, or PS_ERANGE if there is no saved tensor i. */
int ps_call_saved(ps_ctx *ctx, int i, ps_tensor **out);
/* Passes on the gradients of all inputs of the function. An entry is NULL for an input without a gradient. Gradients
 * of inputs that require no gradient are ignored. `devices` contains the devices of the inputs. Returns PS_EINVAL if
 * n is not the number of inputs that was passed to ps_call_new, or if a gradient has another shape, type or device
 * than its input. The gradient of a bf16 or fp16 input may be fp32. Returns PS_ESTALE if the bytes of a gradient are
 * gone. Also returns errors of ps_apply. */
int ps_call_done(ps_ctx *ctx, int n, ps_tensor *const *gradients, const int32_t *devices);
/* Makes the walk stop when the gradient of t is complete. If an op computed t, the walk stops before it passes that
 * op. If t is a leaf, the walk stops before it adds to t's gradient. Sets *id to the id that ps_backward_next returns
 * when the walk stops. Sets *out to the index of t among the op's outputs; ps_stop_gradient and ps_hook_replace need
 * this index. The id is valid as long as the op's node or the leaf exists. When the node or the leaf has been freed,
 * ps_segment_reap returns the id. Returns PS_EINVAL if t requires no gradient, or PS_ESTATE if a walk has already
 * passed the op. Can also return PS_ENOMEM. */
int ps_tensor_hook(ps_tensor *t, int64_t *id, int *out);
/* Replaces the gradient of output `out`. Returns PS_ESTATE if the walk has not stopped at hooks. Returns PS_EINVAL if
 * the new gradient has another shape, type or device. Returns PS_ESTALE if the bytes of the new gradient are gone, or
 * PS_ERANGE if there is no such output. */
int ps_hook_replace(ps_ctx *ctx, int out, ps_tensor *gradient);
int ps_hooks_done(ps_ctx *ctx);          /* ends the stop at hooks. Returns PS_ESTATE if there is no such stop. */
/* Cuts the tape at the input of a pipeline stage. Sets `out` to n new headers of the tensors `in`, which the stage
 * received. The tape starts at these headers. A walk that reaches the headers sums their gradients and keeps the
 * sums, as it does for tensors that ops of this process made. After the walk, ps_boundary_take returns the sums. The
 * caller must release each sum. A second call returns no sums. An entry is NULL if no gradient arrived; an integer
 * tensor has no gradient. If gradients are off, nothing is recorded. If no parameter of the earlier stages is
 * trained, the inputs of a stage need no gradient, and the stage needs no boundary.
 *   To get the same bits as the undivided model, the received gradients must have no other owner while the walk runs.
 *   To ensure this, call ps_backward_begin_n with segment NULL, release the gradients, then call ps_backward_next.
 * Returns PS_EINVAL if the number of tensors is 0 or more than PS_MAX_ROOTS, or if a tensor has a history;
 * ps_boundary_take returns PS_EINVAL if a tensor belongs to no boundary. Returns PS_ESTATE if a walk is in progress,
 * or PS_ESTALE if the bytes of a tensor are gone. Can also return PS_ENOMEM. */
int ps_boundary(ps_ctx *ctx, int n, ps_tensor *const *in, ps_tensor **out);
int ps_boundary_take(ps_ctx *ctx, int n, ps_tensor *const *out, ps_tensor **gradients);
/* Computes the weight gradients that were deferred. The walk of the same micro-batch and virtual stage deferred these
 * gradients during its action INPUT. This function must be called within an action WEIGHT. Returns 1 if it stopped at
 * hooks; the caller then continues with ps_backward_next. Every parameter gets the same additions in the same order
 * as in an undivided backward. The end of the step drops gradients that are still deferred. Returns PS_ESTATE if no
 * action WEIGHT is in progress, if no gradients were deferred, or if a walk is in progress. Returns PS_ESTALE if a
 * tensor was changed in place after it was deferred. Also returns errors of ps_apply. */
int ps_backward_weights(ps_ctx *ctx, int64_t *stopped);
/* Replaces the outputs of the segment at which the walk has stopped. `out` contains the outputs of the segment's
 * second run. The gradients of the replaced outputs are passed to `out`. Returns PS_EINVAL if n or a shape differs
 * from the first run, or PS_ESTATE if the walk has not stopped at a segment. */
int ps_backward_splice(ps_ctx *ctx, int n, ps_tensor *const *out);
void ps_backward_end(ps_ctx *ctx);
/* Records a recompute segment (Chen et al. 2016). The outputs `out` were computed without gradients. They become
 * functions of the tensors `in`, and backward computes them again. Sets *segment to the id that ps_backward_next
 * returns when the walk stops at the segment. The inputs are kept alive until the walk has passed the segment.
 * Returns 1 if the function read parameters of an engine; the function then cannot run again after the engine is
 * closed. Returns PS_EINVAL if there is no output, or if an output already has a history.
 *   ps_segment_begin is called before the function first runs. It starts recording the parameters that the function
 *   reads.
 *   ps_segment_cancel is called instead of ps_segment_new if the function failed. */
void ps_segment_begin(ps_ctx *ctx);
int ps_segment_new(ps_ctx *ctx, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out, int64_t *segment);
void ps_segment_cancel(ps_ctx *ctx);
/* Returns the id of a segment that is no longer needed, or -1 if there is none. The caller can drop the function of
 * this segment. */
int64_t ps_segment_reap(ps_ctx *ctx);

/* -- random numbers: Philox (Salmon et al. 2011), with the seed as key ------------------------------------------- */
/* State of the random number generators. seed, step, op and sample select the random numbers of dropout.
 *   step: the optimizer's step.
 *   op: number of dropouts that have run in this forward.
 *   sample: index of the batch's first sample.
 *   offset: number of random numbers that ps.randn and similar functions have drawn. */
typedef struct ps_rng { uint64_t seed, offset, step, sample; uint32_t op, pad; } ps_rng;
ps_rng *ps_rng_get(ps_ctx *ctx);         /* returns the state itself, lent; the caller may read it and write to it */

/* -- safetensors -------------------------------------------------------------------------------------------------- */
typedef struct ps_st ps_st;
typedef struct ps_st_entry {
    int32_t dtype, ndim;
    int64_t shape[8];
    int64_t at, nbytes;          /* position of the tensor's bytes (for ps_st_read), and their number */
} ps_st_entry; /* dtype is -1 for a type that this library does not support */
/* Maps the file and checks its whole header. If the header has a checksum, the checksum is checked too. Returns
 * PS_EIO if the file cannot be read, or PS_EFORMAT if the file is not a safetensors file or is damaged. */
int ps_st_open(const char *path, ps_st **out);
void ps_st_close(ps_st *st);
int ps_st_count(const ps_st *st);
const char *ps_st_name(const ps_st *st, int i);
int ps_st_find(const ps_st *st, const char *name);          /* returns the index of the tensor, or -1 */
int ps_st_get(const ps_st *st, int i, ps_st_entry *out);    /* Returns PS_ERANGE if there is no tensor i. */
const char *ps_st_dtype_text(const ps_st *st, int i);       /* returns the type's name in the file, such as "F32" */
int ps_st_meta_count(const ps_st *st);
const char *ps_st_meta_key(const ps_st *st, int i);
const char *ps_st_meta_value(const ps_st *st, int i);
/* Returns the tensor's bytes, which are lent until the file is closed. The number of bytes is nbytes of the tensor's
 * entry. */
const void *ps_st_data(const ps_st *st, int i);
/* A ps_reader of the data of an open file. `from` is the ps_st. The function uses read calls, so the file occupies no
 * memory, and a truncation of the open file is an error. Returns PS_ERANGE if some of the bytes are outside the data,
 * or PS_EIO if they cannot be read. */
int ps_st_read(const void *st, int64_t at, void *dst, int64_t nbytes);
/* Copies part of a rectangle of tensor i. `offset` and `shape` are the rectangle's start and size in each dimension
 * of the tensor. The elements of the rectangle are numbered in row-major order. The function copies the elements from
 * first to first + numel - 1. Returns PS_ERANGE if there is no tensor i or if part of the range is outside it.
 * Returns PS_EUNSUP if the tensor's type is not supported, or PS_EIO if the file was truncated. */
int ps_st_copy(const ps_st *st, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
               int64_t numel);
/* A ps_lender of the data of an open file. `from` is the ps_st. Writes to the lent bytes change neither the file nor
 * another loan of the same bytes. The file stays open until the last loan ends, even after ps_st_close. If the file
 * was written to, this call and each later use of the bytes return PS_EIO. Returns PS_ERANGE if the bytes are outside
 * the data. */
int ps_st_lend(void *st, int64_t at, int64_t nbytes, ps_loan *out);
void ps_st_drop(const ps_st *st, int i);                    /* frees the memory pages that contain tensor i's bytes;
                                                             * called after the bytes have been read */
/* Compares a tensor's bytes with their checksum. Returns 1 if they match and 0 if the file has no checksums. Returns
 * PS_EFORMAT if the bytes are damaged, PS_EIO if the file was truncated, or PS_ERANGE if there is no tensor i. */
int ps_st_verify(const ps_st *st, int i);
uint64_t ps_xxh3(const void *data, int64_t nbytes);         /* returns the 64-bit XXH3, which serves as checksum */
/* A writer of safetensors files. The order of calls is: declare all tensors, begin, write each tensor, commit. The
 * functions return PS_ESTATE for a call out of this order. They return PS_EINVAL if a name is a duplicate or not
 * UTF-8, if a size does not match the declaration, or if the header is too large. They return PS_EIO if the file
 * cannot be written; the message then contains the bytes wanted and the bytes free. */
typedef struct ps_stw ps_stw;
int ps_stw_new(const char *path, ps_stw **out);
int ps_stw_checksums(ps_stw *w);                    /* adds checksums, which are computed while writing; called before
                                                     * ps_stw_begin */
int ps_stw_meta(ps_stw *w, const char *key, const char *value);
int ps_stw_add(ps_stw *w, const char *name, int dtype, int ndim, const int64_t *shape);
int ps_stw_begin(ps_stw *w);                        /* reserves space for the whole file, so that a full disk fails
                                                     * here */
int ps_stw_write(ps_stw *w, const char *name, const void *data, int64_t nbytes);
int ps_stw_append(ps_stw *w, const char *name, const void *data, int64_t nbytes);   /* writes a tensor's next bytes */
int64_t ps_stw_nbytes(const ps_stw *w);             /* returns the number of bytes of all tensors, or -1 before
                                                     * ps_stw_begin */
int ps_stw_place(ps_stw *w, const char *name, int64_t *out);    /* returns the position of a tensor in the data */
/* Writes all tensors in one call. `data` contains each tensor at the position that ps_stw_place returns. Returns the
 * errors of a writer (PS_ESTATE, PS_EINVAL, PS_EIO). */
int ps_stw_write_all(ps_stw *w, const void *data, int64_t nbytes);
/* Flushes the file to the disk with fsync, renames the file to `path`, and flushes the folder. Returns the errors of
 * a writer (PS_ESTATE, PS_EINVAL, PS_EIO). */
int ps_stw_commit(ps_stw *w);
void ps_stw_free(ps_stw *w);             /* frees the writer, and removes the temporary file if there was no commit */

/* -- GGUF, the files of llama.cpp ---------------------------------------------------------------------------------- */
typedef struct ps_gguf ps_gguf;
typedef struct ps_gguf_entry {
  int32_t type;                /* id that the type has in files (ps_gguf_type_name) */
  int32_t dtype, ndim;         /* dtype: type of the values that are read; fp32 for blocks, -1 for a type that is not
                                * supported */
  int64_t shape[8];            /* sizes of the dimensions as set by ps_gguf_layout, outermost dimension first */
  int64_t at, nbytes;          /* position of the tensor's bytes (for ps_gguf_read), and their number */
  int32_t as_it_is;            /* 1 if the file contains the values themselves: they are not packed, and
                                * ps_gguf_layout does not reorder or transpose them */
} ps_gguf_entry;
typedef struct ps_gguf_value { /* an entry of the metadata, or one value of an array */
  int32_t type, of;            /* type: id that the type has in files. The ids 0 to 12 are: uint8 int8 uint16 int16
                                * uint32 int32 float32 bool string array uint64 int64 float64. `of` is the type of an
                                * array's values; if the entry is not an array, `of` is equal to `type`. */
  int64_t n;                   /* number of values of an array, otherwise 1 */
  int64_t whole;               /* value of an integer (a uint64 has the same bits) or a truth value; for a string, its
                                * length in bytes */
  double number;               /* the value of any number, as a double */
  const char *text;            /* a string without a final 0, lent until the file is closed */
} ps_gguf_value;
/* Maps the file and checks its whole header. The function supports versions 2 and 3. Returns PS_EIO if the file
 * cannot be read, or PS_EFORMAT if the file is not a GGUF file or is damaged. */
int ps_gguf_open(const char *path, ps_gguf **out);
void ps_gguf_close(ps_gguf *g);
int ps_gguf_count(const ps_gguf *g);
const char *ps_gguf_name(const ps_gguf *g, int i);
int ps_gguf_find(const ps_gguf *g, const char *name);       /* returns the index of the tensor, or -1 */
int ps_gguf_get(const ps_gguf *g, int i, ps_gguf_entry *out);   /* Returns PS_ERANGE if there is no tensor i. */
const char *ps_gguf_type_name(int type);        /* returns a name such as "Q4_0", or NULL if there is no such type */
int ps_gguf_meta_count(const ps_gguf *g);
const char *ps_gguf_meta_key(const ps_gguf *g, int i);
int ps_gguf_meta_find(const ps_gguf *g, const char *key);   /* returns the index of the entry, or -1 */
/* Reads value k of entry i. Values are numbered from 0, and an entry that is not an array has only value 0. If k is
 * -1, the function reads only the types and n. Returns PS_ERANGE if there is no such value, or PS_EIO if the file was
 * truncated. */
int ps_gguf_meta_get(const ps_gguf *g, int i, int64_t k, ps_gguf_value *out);
/* Sets how tensor i is read. If `transposed` is 1, the two dimensions of a matrix are swapped. If `heads` is not 0,
 * the rows of each head are reordered, and `heads` is the number of heads. The rows of a vector are its elements. For
 * its rotary embedding, llama.cpp stores the two rows of a pair next to each other. After the reordering the two rows
 * are half a head apart, as in Hugging Face's files. Returns PS_EFORMAT if the tensor's shape does not fit, or
 * PS_ERANGE if there is no tensor i. */
int ps_gguf_layout(ps_gguf *g, int i, int64_t heads, int transposed);
/* Copies part of a rectangle of tensor i, as values of the dtype in its entry. `offset` and `shape` are the
 * rectangle's start and size in each dimension. The elements of the rectangle are numbered in row-major order. The
 * function copies the elements from first to first + numel - 1. Returns PS_ERANGE if there is no tensor i or if part
 * of the range is outside it. Returns PS_EUNSUP if the tensor's type is not supported, or PS_EIO if the file was
 * truncated. */
int ps_gguf_copy(const ps_gguf *g, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
                 int64_t numel);
/* ps_gguf_copy_packed copies the bytes from first to first + nbytes - 1 of the packed rows of matrix i. The rows have
 * the order that ps_gguf_layout set, but they are not transposed. ps_gguf_rows returns the number of these rows, or 0
 * if tensor i is not a matrix. ps_gguf_copy_packed returns errors of ps_gguf_copy. */
int ps_gguf_copy_packed(const ps_gguf *g, int i, int64_t first, void *dst, int64_t nbytes);
int64_t ps_gguf_rows(const ps_gguf *g, int i);
int ps_gguf_read(const void *g, int64_t at, void *dst, int64_t nbytes);     /* a ps_reader like ps_st_read */
int ps_gguf_lend(void *g, int64_t at, int64_t nbytes, ps_loan *out);        /* a ps_lender like ps_st_lend */
void ps_gguf_drop(const ps_gguf *g, int i);                 /* like ps_st_drop */

/* Packs values into blocks of a type. `type` is 256 for NF4. Otherwise `type` is the id that Q4_0, Q4_1, Q5_0, Q5_1,
 * Q8_0, Q4_K or Q6_K has in GGUF files. The bytes of all blocks are written to `out`. Returns PS_EUNSUP for another
 * type. Returns PS_EINVAL if numel is not a multiple of the type's block size. Returns PS_ERANGE if a value is not
 * finite, or if its magnitude is above 65504. */
int ps_pack(int type, const float *values, int64_t numel, void *out);

/* A writer of GGUF files of version 3. The order of calls is: declare all tensors in the order of the file, begin,
 * append values to each tensor, commit. The functions return PS_ESTATE for a call out of this order, or if not all
 * values of a tensor have been appended. They return PS_EINVAL if a name is a duplicate, if a shape is not a multiple
 * of the type's block size, or if there are too many values. They return PS_EUNSUP if the type cannot be written or
 * the values are not floats, PS_ERANGE if the type cannot hold a value, or PS_EIO if the file cannot be written. */
typedef struct ps_ggufw ps_ggufw;
int ps_ggufw_new(const char *path, ps_ggufw **out);
/* Declares a tensor. `type` is a name such as "F32" or "Q4_0". The shape begins with the outermost dimension. heads
 * and transposed are as in ps_gguf_layout, and the values are appended in the order of Hugging Face's files. Returns
 * errors of ps_ggufw_new. */
int ps_ggufw_add(ps_ggufw *w, const char *name, const char *type, int ndim, const int64_t *shape, int64_t heads,
                 int transposed);
/* Writes the header. `meta` contains all metadata entries in the binary format of GGUF files. `entries` is the number
 * of entries. Returns errors of ps_ggufw_new. */
int ps_ggufw_begin(ps_ggufw *w, const void *meta, int64_t nbytes, int64_t entries);
/* Appends the next values of a tensor. Threads convert and write the values. An error of a value or of the disk may
 * therefore be returned by a later append or by the commit. If several values have errors, the error of the earliest
 * value is returned. Returns errors of ps_ggufw_new. */
int ps_ggufw_append(ps_ggufw *w, const char *name, int dtype, const void *data, int64_t numel);
/* Flushes the file to the disk with fsync, renames the file to the path, and flushes the folder. Returns errors of
 * ps_ggufw_new. */
int ps_ggufw_commit(ps_ggufw *w);
void ps_ggufw_free(ps_ggufw *w);         /* frees the writer, and removes the temporary file if there was no commit */

/* A thread that writes a file while the script continues. It writes one file at a time. The functions return
 * PS_ESTATE if the thread is busy, or PS_ENOMEM if no thread can be started. */
typedef struct ps_saver ps_saver;
int ps_saver_new(ps_saver **out);
/* Writes `data` in the background with `writer`, and commits. ps_stw_begin must have been called on the writer. The
 * saver owns the writer from now on, even if the call fails. The nbytes bytes of data must not change until
 * ps_saver_wait returns. If `data` is a multiple of 4096, the saver avoids a copy. Returns PS_ESTATE if the saver is
 * busy, or PS_ENOMEM if no thread can be started. */
int ps_saver_start(ps_saver *s, ps_stw *writer, const void *data, int64_t nbytes);
int ps_saver_busy(ps_saver *s);                             /* returns 1 while the thread writes, otherwise 0 */
/* Waits until the file is written. Returns errors of ps_stw_write or ps_stw_commit for this file. Only the first wait
 * returns an error of the file; later waits do not. *seconds is set to the time in which the last file was written.
 * `seconds` may be NULL. */
int ps_saver_wait(ps_saver *s, double *seconds);
void ps_saver_free(ps_saver *s);                            /* waits until the file is written, then frees the saver */

/* Computes a hash of a file's bytes from the XXH3 hashes of its blocks. Returns PS_EIO if the file cannot be read. */
int ps_file_hash(const char *path, uint64_t *out);

/* -- text files by line -------------------------------------------------------------------------------------------- */
/* The rows of a text file. A row is a line that is not empty. A byte order mark at the start of the file and a
 * carriage return at the end of a line are not part of a row. Only one thread at a time may use a ps_lines. */
typedef struct ps_lines ps_lines;
/* Opens a file. `index` is the path of a file that ps_lines_save wrote, or "" if there is no index. If the index does
 * not match the file's size and time, the file is read once. Returns PS_EIO if the file cannot be read or changes
 * during the call. */
int ps_lines_open(const char *path, const char *index, ps_lines **out);
int ps_lines_scanned(const ps_lines *l);     /* returns 1 if the file was read because the index did not match */
int64_t ps_lines_count(const ps_lines *l);   /* returns the number of rows */
/* Like ps_file_hash, for the opened file. The function hashes the opened file even if its path now names another
 * file. Returns PS_EIO if the file was changed or truncated after it was opened. */
int ps_lines_hash(const ps_lines *l, uint64_t *out);
/* Writes an index atomically. The index contains the position of every 64th row, and the file's size and time.
 * Returns PS_EIO if the index cannot be written. */
int ps_lines_save(const ps_lines *l, const char *index);
/* Reads row i. Rows count from 0. Sets *text and *nbytes to the row's bytes, which are lent until the next call. Sets
 * *number to the row's line number. Lines count from 1. Returns PS_ERANGE if there is no row i, or PS_EIO if the file
 * was changed or truncated after it was opened. */
int ps_lines_read(ps_lines *l, int64_t i, const char **text, int64_t *nbytes, int64_t *number);
void ps_lines_close(ps_lines *l);

/* -- token shards and the loader ----------------------------------------------------------------------------------- */
typedef struct ps_tokens ps_tokens;
/* Maps a shard of tokens. The file is a .bin file of llm.c, which has a header, or it consists of raw tokens of
 * `width` bytes each. `width` is 2 or 4 for raw tokens, or 1 to read a text file as bytes. If `width` is 0, the file
 * must have a header, which contains the width. Returns PS_EIO if the file cannot be read. Returns PS_EFORMAT if
 * there is no header, if the header has another version, or if the size is not a whole number of tokens. */
int ps_tokens_open(const char *path, int width, ps_tokens **out);
void ps_tokens_close(ps_tokens *s);      /* releases the caller's reference; loaders hold references of their own */
int64_t ps_tokens_count(const ps_tokens *s);
/* Reads n tokens into dst, starting at token `first`. Returns PS_ERANGE if the file has no such tokens or if a token
 * does not fit into int32. Returns PS_EIO if the file was truncated. */
int ps_tokens_read(const ps_tokens *s, int64_t first, int64_t n, int32_t *dst);
/* Writes a shard in llm.c's format through a temporary file. `width` is 2 or 4. The functions return PS_EIO if the
 * file cannot be written, or PS_ERANGE if a token does not fit into the width. They return PS_ESTATE if they are
 * called after the commit or after a failed write. */
typedef struct ps_tokw ps_tokw;
int ps_tokw_new(const char *path, int width, ps_tokw **out);
int ps_tokw_append(ps_tokw *w, const int32_t *ids, int64_t n);
int ps_tokw_append_bytes(ps_tokw *w, const void *bytes, int64_t n);   /* writes each byte as a token */
int ps_tokw_commit(ps_tokw *w);
void ps_tokw_free(ps_tokw *w);

typedef struct ps_loader ps_loader;
typedef struct ps_loader_config {
  int64_t batch, seq;        /* A batch of this rank has `batch` rows of `seq` tokens. Each target is the token after
                              * its input. */
  int64_t vocab;             /* A token >= vocab is an error. The error's message contains the file and the position.
                              * If vocab is 0, tokens are not checked. */
  int64_t first, last;       /* half-open range of tokens that the loader uses; the tokens of all shards are numbered
                              * together. If last is 0, the range ends with the last token. */
  uint64_t seed;
  int32_t shuffle;           /* 1: each epoch visits every window once, in a random order and from a random offset */
  int32_t ahead;             /* number of batches that the background thread prepares in advance, >= 1 */
  int32_t rank, world_size;  /* A global batch has world_size * batch rows. This rank reads the rows of the global
                              * batch from rank * batch to (rank + 1) * batch - 1. A world_size of 0 means 1. */
} ps_loader_config;
/* Position of the next batch. All ranks have the same position. */
typedef struct ps_loader_position { int64_t epoch, batch; } ps_loader_position;
/* Makes a loader. Returns PS_EINVAL if settings are out of range, or if there are too few tokens for one batch.
 * Returns PS_ERANGE if the range is outside the files. Returns PS_ENOMEM if there is no memory for batches, or if no
 * thread can be started. */
int ps_loader_new(int n, ps_tokens *const *shards, const ps_loader_config *config, ps_loader **out);
void ps_loader_free(ps_loader *l);
int64_t ps_loader_batches(const ps_loader *l);              /* returns the number of full batches per epoch */
/* Returns 1 if there is a batch, or 0 if the epoch has ended. After 0, the next call starts another epoch. Returns
 * PS_ERANGE for a token >= vocab, or PS_EIO if a file was truncated. */
int ps_loader_next(ps_loader *l, int32_t *x, int32_t *y);
int ps_loader_get_position(ps_loader *l, ps_loader_position *out);      /* Returns PS_EINVAL if `out` is NULL. */
/* Sets the next batch. Returns PS_ERANGE if there is no such batch. */
int ps_loader_set_position(ps_loader *l, const ps_loader_position *position);

/* -- tokenizers: texts to token ids and back (lua/ps/tokenizer/init.lua) --------------------------------------------
 * The functions return PS_ESTATE if a file or setting is added after ps_tok_ready, or if a text is passed before
 * ps_tok_ready. */
typedef struct ps_tok ps_tok;            /* a tokenizer; only one thread at a time may use it */
typedef struct ps_tok_ids {              /* ids of a text, lent until the next call on the tokenizer */
  const int32_t *ids;
  const int32_t *offsets;                /* [n][2] half-open byte ranges of the tokens in the text; NULL if not
                                          * requested */
  int64_t n;
} ps_tok_ids;
int ps_tok_new(const char *model, ps_tok **out);             /* `model` is "bpe" or "wordpiece" */
void ps_tok_free(ps_tok *t);
/* Reads a file of a tokenizer. The order of calls is: read files, change settings that the files do not define,
 * ps_tok_ready, encode or decode texts. Formats:
 *   "vocab.json": {"token": id}.
 *   "vocab.txt": one token per line; ids count from 0.
 *   "merges.txt": merges. The vocabulary must be read before this file.
 *   "tiktoken": each line contains a token in base64 and the token's rank. Tokens are then spelled in GPT-2's
 *   letters.
 *   "tokenizer.json": the vocabulary and merges of its model are read. ps_tok_rest lends the rest of its text.
 * Returns PS_EIO if the file cannot be read, PS_EFORMAT if it does not have this format, PS_EINVAL for an unknown
 * format, setting or value, or PS_EUNSUP if a setting or pattern is not supported. */
int ps_tok_read(ps_tok *t, const char *format, const char *path);
int ps_tok_rest(const ps_tok *t, const char **text, int64_t *nbytes);
/* These functions make a vocabulary without a file. Add the tokens first. Then add either merges of two tokens each,
 * in order, or one score per token. SentencePiece's BPE merges by score, highest score first. It never makes a token
 * whose score is NaN. The functions return PS_EFORMAT if a token is not UTF-8, if a token or id already exists, or if
 * a merge names a token that does not exist. */
int ps_tok_token(ps_tok *t, const char *token, int64_t nbytes, int64_t id);
int ps_tok_merge(ps_tok *t, const char *left, int64_t n_left, const char *right, int64_t n_right);
int ps_tok_scores(ps_tok *t, const float *scores, int64_t n);
/* Changes a setting in the list of src/data/tokenizer.c. Returns PS_EINVAL for an unknown setting or value, or
 * PS_ESTATE after ps_tok_ready. */
int ps_tok_set(ps_tok *t, const char *name, int64_t value);
/* Adds a regular expression of PCRE2 that splits texts into words. Each match is a word, and so is the text between
 * two matches. If there are several expressions, each expression splits the words that the previous expression has
 * made. Returns PS_EFORMAT if the pattern is wrong, or PS_EUNSUP if there are too many patterns. */
int ps_tok_split(ps_tok *t, const char *pattern, int64_t nbytes);
/* Adds the step `what`, which changes the text of a BPE tokenizer. The step runs after the text is split at added
 * tokens and before it is split into words. "nfc" normalizes the text. "prepend" puts `to` before a text that is not
 * empty. "replace" replaces each `from` by `to`. An argument that a step does not use is "". Returns PS_EUNSUP if
 * there are already 8 steps, PS_EINVAL for an unknown step or an empty text, PS_EFORMAT if a text is not UTF-8, or
 * PS_ESTATE if the tokenizer is ready. */
int ps_tok_normalize(ps_tok *t, const char *what, const char *from, const char *to);
enum { PS_TOK_SPECIAL = 1, PS_TOK_LSTRIP = 2, PS_TOK_RSTRIP = 4, PS_TOK_NORMALIZED = 8 };
/* Adds a token that is matched literally in texts. If the vocabulary does not have the token, the token is added to
 * the vocabulary too. Returns PS_EFORMAT if another token has the id, or if the vocabulary has the token with another
 * id. */
int ps_tok_add(ps_tok *t, const char *token, int64_t nbytes, int64_t id, int flags);
/* Completes the tokenizer. Returns PS_EFORMAT if files or settings are missing. */
int ps_tok_ready(ps_tok *t);
int64_t ps_tok_count(const ps_tok *t);   /* returns the largest id plus 1 */
/* Returns the id of a token, or -1 if there is no such token. `token` is spelled as in files. */
int32_t ps_tok_find(const ps_tok *t, const char *token, int64_t nbytes);
/* Returns the text of a token. Returns PS_ERANGE if there is no such id. */
int ps_tok_name(const ps_tok *t, int64_t id, const char **token, int64_t *nbytes);
/* Encodes a text. Malformed UTF-8 becomes U+FFFD. The flag PLAIN treats special tokens in the text as plain text. The
 * flag OFFSETS requests offsets. Returns PS_EINVAL if the text is too long, or PS_ERANGE if a pattern needs too many
 * steps. */
enum { PS_TOK_OFFSETS = 1, PS_TOK_PLAIN = 2 };
int ps_tok_encode(ps_tok *t, const char *text, int64_t nbytes, int flags, ps_tok_ids *out);
/* Characters that a vocabulary cannot spell, because the vocabulary has neither tokens for these characters nor an
 * unknown token. The characters are missing from the ids. */
typedef struct ps_tok_lost {
  int64_t characters;
  int64_t places;                        /* number of runs of such characters within a word */
  int64_t line;                          /* line of the first such character in JSON lines, from 1; 0 in other texts */
  int64_t example;                       /* for an encoder: number of the example of the first such character */
  uint32_t first;                        /* code point of the first such character */
} ps_tok_lost;
/* Sets *out to the characters that ps_tok_encode and ps_tok_encode_block have left out since the last call of
 * ps_tok_take_lost. Returns PS_EINVAL if `out` is NULL. */
int ps_tok_take_lost(ps_tok *t, ps_tok_lost *out);
/* Returns the text of ids, lent like ids. The flag SKIP omits special tokens. With the flag BYTES the bytes of the
 * text are unchanged; without it, invalid UTF-8 becomes U+FFFD. Returns PS_ERANGE if an id is not a token. */
enum { PS_TOK_SKIP = 1, PS_TOK_BYTES = 2 };
int ps_tok_decode(ps_tok *t, const int32_t *ids, int64_t n, int flags, const char **text, int64_t *nbytes);
/* Returns a text of the ids as decimal numbers, lent like ids. Returns PS_ESTATE if the tokenizer is not ready. */
int ps_tok_print(ps_tok *t, const int32_t *ids, int64_t n, const char **text, int64_t *nbytes);
typedef struct ps_tok_block {            /* progress in a file that is encoded in blocks */
  const char *path;                      /* path for messages */
  const char *field;                     /* in JSON lines, key of the string that contains the document; NULL for
                                          * plain text */
  int64_t line;                          /* number of lines before this block; the call adds the number of lines of
                                          * this block */
  int64_t used;                          /* set by the call: number of bytes that were used. The next block must begin
                                          * with the remaining bytes. */
  int32_t mark;                          /* id that is put before the document of each line, or -1 for none */
  int32_t threads, last, flags;          /* last: 1 for the last block. flags: as in ps_tok_encode. */
} ps_tok_block;
/* Encodes a block. Returns PS_EFORMAT if a line is not a JSON object with the string `field`; the message then
 * contains the file and the line. Also returns errors of ps_tok_encode. */
int ps_tok_encode_block(ps_tok *t, ps_tok_block *block, const char *text, int64_t nbytes, ps_tok_ids *out);

/* -- examples: tokenized rows of a table (lua/ps/data/examples.lua) -------------------------------------------------
 * Only one thread at a time may use an object, unless a comment says otherwise. Examples and tokens count from 0. */
typedef struct ps_examples ps_examples;
/* Begins a list of examples. `path` is the file that contains the examples after ps_examples_finish. After that,
 * memory contains only the positions at which examples start. If `path` is "", all examples stay in memory. `key` [2]
 * identifies the data from which the examples are made. `wide` is 1 if examples have labels or weights of their own.
 * Wide examples need 12 bytes per token, other examples 4. Returns PS_EIO if the file cannot be created. */
int ps_examples_new(const char *path, const uint64_t *key, int wide, ps_examples **out);
/* Appends an example. `labels` [n] contains -100 for a token that is not trained. If `labels` is NULL, the labels are
 * equal to the ids. `weights` [n] contains one weight per token, or `weights` is NULL. Returns PS_ENOSPC or PS_EIO if
 * the file cannot be written, or PS_ERANGE if an id is negative. */
int ps_examples_add(ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t n,
                    double weight);
/* Ends the list. Writes the file and maps it. Returns errors of ps_examples_add. */
int ps_examples_finish(ps_examples *e);
/* Begins a list of `count` scattered examples. Scattered examples are put by number, in any order, and stay in
 * memory. Before all examples have been put, rows that grow (ps_rows_begin) can read the examples that exist. Returns
 * PS_EUNSUP if there are too many examples. */
int ps_examples_scattered(int64_t count, int wide, ps_examples **out);
/* Puts example i into a list of scattered examples. In any other list, i must be the next number, and the example is
 * appended. Also returns errors of ps_examples_add. Returns PS_EINVAL if there is no such example, or if it was put
 * before. */
int ps_examples_put(ps_examples *e, int64_t i, const int32_t *ids, const int32_t *labels, const float *weights,
                    int64_t n, double weight);
/* Appends all scattered examples to e, in the order of their numbers. The result is the same as if ps_examples_add
 * had appended them. Returns PS_ESTATE if an example has not been put. Returns PS_EINVAL if e is finished, or if only
 * one of the two lists is wide. Also returns errors of ps_examples_add. */
int ps_examples_gather(ps_examples *e, const ps_examples *scattered);
/* Maps a file that ps_examples_finish wrote. Returns PS_EIO if there is no such file, PS_EFORMAT if it is incomplete,
 * or PS_ESTATE if it has another key. */
int ps_examples_open(const char *path, const uint64_t *key, ps_examples **out);
int64_t ps_examples_count(const ps_examples *e);
int64_t ps_examples_tokens(const ps_examples *e);
uint64_t ps_examples_hash(const ps_examples *e);             /* returns a hash of all ids, labels and weights */
/* Copies at most `room` ids and labels of example i. Sets *n to the number of the example's tokens. Returns PS_ERANGE
 * if there is no such example. */
int ps_examples_read(const ps_examples *e, int64_t i, int32_t *ids, int32_t *labels, int64_t room, int64_t *n);
void ps_examples_free(ps_examples *e);

/* An encoder encodes texts to examples on several threads. The examples have the order of the texts. Until
 * ps_encoder_free, the encoder owns the tokenizer and the examples jointly with the caller. While the encoder runs,
 * other code may encode and decode with the tokenizer, and may read stored examples. */
typedef struct ps_encoder ps_encoder;
typedef struct ps_encoder_config {
  const int32_t *special;                /* [n_special] ids in ascending order. Text of a message is never encoded to
                                          * one of these ids. */
  const int32_t *prefix, *suffix;        /* ids that are put before and after a whole text */
  int64_t n_special, n_prefix, n_suffix;
  int32_t threads, flags;                /* flags: flags of ps_tok_encode, for whole texts */
  int32_t queue;                         /* maximum number of texts in the queue; 0 means 32 per thread */
} ps_encoder_config;
typedef struct ps_encoder_text {
  const char *text;                      /* the text; ps_encoder_put copies it */
  int64_t nbytes;
  /* [n][2] half-open byte ranges of the text. Each list is in ascending order.
   * message: text from messages, tools, documents and unknown roles.
   * role: text from roles that templates expect. This text may be within a special token.
   * trained: text that is trained. */
  const int64_t *message, *role, *trained;
  int64_t n_message, n_role, n_trained;
  int32_t whole;                         /* 1 if all tokens of the text are trained, and the text is put between
                                          * prefix and suffix */
  int32_t need;                          /* 1: at least one token must be trained. 2: in addition, at least one token
                                          * must not be trained. */
  double weight;
  int64_t number;                        /* number of the example (ps_examples_put) */
} ps_encoder_text;
/* Makes an encoder. Returns PS_EINVAL if the number of threads is out of range, PS_ESTATE if the tokenizer is not
 * ready, or PS_ENOMEM if no thread can be started. */
int ps_encoder_new(ps_tok *tok, ps_examples *examples, const ps_encoder_config *config, ps_encoder **out);
/* Adds a text to the queue. If the queue is full, waits until an earlier text is encoded. Returns PS_EINVAL if an
 * earlier text has no tokens or violates `need`. Also returns errors of ps_tok_encode and ps_examples_add. After an
 * error, all later calls return the same error of the same text. */
int ps_encoder_put(ps_encoder *c, const ps_encoder_text *text);
/* Stores the examples that are encoded, in order, without waiting. Returns the number of texts that are still in the
 * queue, or errors of ps_encoder_put. */
int64_t ps_encoder_drain(ps_encoder *c);
int ps_encoder_finish(ps_encoder *c);    /* waits for all texts; returns errors of ps_encoder_put */
int64_t ps_encoder_failed(const ps_encoder *c);              /* returns the number of the example that failed, or -1 */
/* Returns the characters that are missing from the stored examples. Returns PS_EINVAL if `out` is NULL. */
int ps_encoder_lost(const ps_encoder *c, ps_tok_lost *out);
void ps_encoder_free(ps_encoder *c);

/* The rows of an epoch. They depend only on the examples and the settings. They do not depend on batches or ranks. */
typedef struct ps_rows ps_rows;
/* Rule for an example that is too long.
 *   RIGHT: its right end is cut off.
 *   LEFT: its left end is cut off.
 *   DROP: the example is dropped.
 *   ERROR: the function returns an error. */
enum { PS_LONG_RIGHT, PS_LONG_LEFT, PS_LONG_DROP, PS_LONG_ERROR };
/* Rule for a source that is exhausted.
 *   LEAVE: the epoch continues without the source.
 *   REPEAT: the source begins again.
 *   STOP: the epoch ends. */
enum { PS_MIX_LEAVE, PS_MIX_REPEAT, PS_MIX_STOP };
/* Meaning of an example's weight.
 *   TOKEN: the weight of the example is the weight of each target.
 *   EXAMPLE: the weight of the example is divided among the targets. */
enum { PS_WEIGHTS_TOKEN, PS_WEIGHTS_EXAMPLE };
typedef struct ps_rows_config {
  int64_t seq;                           /* maximum number of tokens in a row */
  int64_t window;                        /* number of successive examples that are packed or sorted together */
  int64_t epoch;
  uint64_t seed;
  const int64_t *counts;                 /* [n_sources] number of examples per source. The examples of a source follow
                                          * the examples of the previous source. */
  const double *weights;                 /* [n_sources] positive weights of the sources */
  int32_t n_sources, exhausted;
  int32_t shuffle, packing, grouping, rule;
} ps_rows_config;
typedef struct ps_rows_info {
  int64_t rows, windows, examples, tokens;     /* examples: number of examples that rows contain */
  int64_t cut, dropped;                  /* cut: number of examples that lost tokens. dropped: number of examples that
                                          * were left out. */
  int64_t failed;                        /* with PS_LONG_ERROR: number of the example that is too long; otherwise -1 */
  int64_t taken, places;                 /* taken: number of places in the order whose examples have been read.
                                          * places: number of all places in the order. */
} ps_rows_info;
/* Makes the rows of an epoch. `info` is filled even if the call fails. Returns PS_ERANGE if an example is too long
 * (PS_LONG_ERROR), or PS_EINVAL if a setting is wrong. */
int ps_rows_new(ps_examples *e, const ps_rows_config *config, ps_rows_info *info, ps_rows **out);
/* Begins rows of scattered examples. The rows grow in place while examples are put. In the end they are equal to the
 * rows that ps_rows_new makes of the same examples. Batches can read the rows that exist so far (ps_batches_next).
 * Also returns errors of ps_rows_new. */
int ps_rows_begin(ps_examples *scattered, const ps_rows_config *config, ps_rows **out);
/* Returns the number of the example at place `place` in the order of these rows, or a PS_E* code. */
int32_t ps_rows_order(const ps_rows *r, int64_t place);
/* Adds rows of the next examples in the order, up to the first example that has not been put. With packing or
 * grouping, only whole windows are added. Returns errors of ps_rows_new. */
int ps_rows_grow(ps_rows *r, ps_rows_info *info);
/* Returns the window of a row, and the row's index within the window. `row` may also be the number of rows. Returns
 * PS_ERANGE if there is no such row. */
int ps_rows_window(const ps_rows *r, int64_t row, int64_t *window, int64_t *within);
int64_t ps_rows_first(const ps_rows *r, int64_t window);     /* returns the first row of a window */
/* Returns the length of the longest of `n` rows, starting at row `first`. Rows that do not exist are skipped. */
int64_t ps_rows_longest(const ps_rows *r, int64_t first, int64_t n);
/* Lists the examples of a row. Writes at most `room` of them to `out`, and returns their number. */
int64_t ps_rows_examples(const ps_rows *r, int64_t row, int64_t *out, int64_t room);
typedef struct ps_rows_batch {
  int32_t *ids, *labels;                 /* [rows, length] each */
  int32_t *mask;                         /* 1 for tokens and 0 for padding; with packing, segment numbers from 1 */
  int32_t *positions;                    /* may be NULL */
  float *weights;                        /* weights of labels; may be NULL */
  int64_t rows, length;
  int64_t real;                          /* number of rows to read. The other rows, and rows after the last row of the
                                          * epoch, are copies of row `filler` with weight 0. */
  int64_t filler;
  int32_t pad, by;                       /* pad: id of padding. by: PS_WEIGHTS_*. */
} ps_rows_batch;
/* Fills the arrays of a batch, starting with row `first`. Returns PS_ERANGE if there is no row `first` or no row
 * `filler`, or PS_EINVAL if a row is longer than the rows of the batch. */
int ps_rows_fill(const ps_rows *r, int64_t first, const ps_rows_batch *batch);
void ps_rows_free(ps_rows *r);

/* Batches of rows, epoch after epoch. A thread makes the batches in advance. The examples and rows that the thread
 * uses stay alive as long as the batches. */
typedef struct ps_batches ps_batches;
typedef struct ps_batches_config {
  int64_t batch;                         /* number of rows per rank */
  int64_t accumulate;                    /* number of batches in a step; they are padded to the same length */
  int64_t multiple;                      /* row lengths are multiples of this number; the length seq is also allowed */
  int32_t rank, world_size;
  int32_t ahead;                         /* number of batches made in advance, at least 1 */
  int32_t to_seq, drop_last, fills;      /* fills: 1 adds rows of weight 0 to a last batch that is not full */
  int32_t weights;                       /* 1 if batches have weights */
  int32_t pad, by;                       /* as in ps_rows_batch */
} ps_batches_config;
/* A batch. The arrays are [rows, length], as in ps_rows_batch. The arrays are lent until the next call of
 * ps_batches_next or ps_batches_seek. */
typedef struct ps_batch {
  int64_t epoch, first;                  /* first: first row of this rank */
  int64_t next;                          /* first row of the next batch of all ranks; at the end, the number of rows */
  int64_t rows, length;
  const int32_t *ids, *labels, *mask, *positions;    /* positions is NULL without packing */
  const float *weights;                  /* NULL if batches have no weights */
} ps_batch;
/* Makes batches. `first` contains the rows of the epoch in rows_config. Batches begin with that epoch. Returns
 * PS_EINVAL if a setting is wrong. */
int ps_batches_new(ps_examples *e, const ps_rows_config *rows_config, const ps_batches_config *config, ps_rows *first,
                   ps_batches **out);
enum { PS_BATCHES_MORE = 2 };            /* a result of ps_batches_next, in addition to 0 and 1 */
/* Returns 1 with a batch, or 0 at the end of an epoch. After the end, the next epoch begins. The first call starts
 * the thread. Returns PS_BATCHES_MORE if the batch needs rows that do not exist yet. If the rows can still grow, the
 * caller then calls ps_rows_grow. If the rows are complete, the caller passes the gathered examples to
 * ps_batches_examples. In both cases it then calls this function again. Returns PS_EIO if the file of examples was
 * truncated. Also returns errors of ps_rows_new for an epoch, and errors of ps_rows_fill. After such an error the
 * next call tries again. */
int ps_batches_next(ps_batches *b, ps_batch *out);
/* Returns the rows of an epoch. The caller must free the rows. If the thread does not have these rows, this call
 * makes them. `info` is as in ps_rows_new. Returns errors of ps_rows_new. */
int ps_batches_rows(ps_batches *b, int64_t epoch, ps_rows_info *info, ps_rows **out);
/* Sets the row at which the next batch begins. `row` counts the rows of all ranks. `rows` contains the rows of the
 * epoch. Returns PS_ERANGE if there is no such row. */
int ps_batches_seek(ps_batches *b, int64_t epoch, ps_rows *rows, int64_t row);
/* Sets the examples of the next epochs, if epoch 0 began with scattered examples. Returns PS_ESTATE if the examples
 * are not finished. */
int ps_batches_examples(ps_batches *b, ps_examples *e);
void ps_batches_free(ps_batches *b);     /* ends the thread */

/* -- steps of training (base/step.h) ------------------------------------------------------------------------------
 * A step is a table of actions. ps_step_next begins the next action of the table. The caller ends the action with
 * ps_step_done or ps_step_abandon. */
/* A BACKWARD can be divided into two actions (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). INPUT computes the
 * gradients of a virtual stage's inputs, and defers the gradients of its parameters. WEIGHT computes the deferred
 * gradients. */
enum { PS_ACT_NONE, PS_ACT_FORWARD, PS_ACT_BACKWARD, PS_ACT_INPUT, PS_ACT_WEIGHT, PS_ACT_REDUCE, PS_ACT_NORM,
       PS_ACT_UPDATE, PS_ACT_COUNT };
/* vstage is the index of a virtual stage. micro is the index of a micro-batch; it is less than the number of actions.
 * A REDUCE completes the sums over ranks for all earlier backwards of its virtual stage. If there is no REDUCE, each
 * backward completes its own sums. */
typedef struct ps_action { int32_t kind, vstage, micro; } ps_action;
/* Fields of a step that scripts can read at any time. */
typedef struct ps_step_state {
  ps_action now, due;          /* now: the action in progress. due: the next action of the table. kind is PS_ACT_NONE
                                * if there is no such action. */
  int32_t open;                /* 1 between the begin and the end of a step */
  int32_t micro, n_micro;      /* micro: number of finished actions BACKWARD and WEIGHT. n_micro: number of these
                                * actions in the table. */
  int32_t updating;            /* 1 if an action that updates parameters has begun; the step can then no longer be
                                * abandoned */
  double weight;               /* sum of the weights of all micro-batches whose backward has run */
} ps_step_state;
typedef struct ps_step ps_step;
int ps_step_new(ps_ctx *ctx, ps_step **out);   /* Can return PS_ENOMEM. */
/* Frees the step. If an engine was opened with the step, the engine keeps the step alive until the engine is closed. */
void ps_step_free(ps_step *step);
const ps_step_state *ps_step_look(const ps_step *step);     /* returns the fields, lent until the step is freed */
enum { PS_TRACE_UNKNOWN = -1, PS_TRACE_NONE = -2 };
typedef struct ps_step_config {
  const ps_action *actions;    /* table of actions, which ps_step_begin copies */
  int32_t n_actions;
  int32_t dry;                 /* 1 for a dry run, in which ops do not compute */
  int32_t trace;               /* trace that the step is expected to repeat. PS_TRACE_UNKNOWN: there is no such trace.
                                * PS_TRACE_NONE: there is no such trace, and the step's uses of chunks are not
                                * recorded. */
  int32_t pad;
} ps_step_config;
/* Begins a step. Returns PS_ESTATE if another step is in progress, or if a dry run finds gradients. Returns PS_EINVAL
 * if the table has no backward, if the table has a norm before a backward, or if the table has an INPUT without a
 * later WEIGHT. Also returns PS_EINVAL if the WEIGHTs of a virtual stage have another order than its INPUTs, because
 * the order of the sums would change. Returns PS_ERANGE if the trace no longer exists, or PS_ENOMEM if a tier is too
 * small for the step. */
int ps_step_begin(ps_step *step, const ps_step_config *config);
enum { PS_MAX_STATES = 6, PS_UPDATE_ATTRS = 20 };
/* Optimizer settings of a group of parameters. */
typedef struct ps_update_group {
  double attrs[PS_UPDATE_ATTRS];   /* attributes of the group's op (struct ps_attrs_<op>), except the attributes that
                                    * ps_update_attrs sets */
  double scale;                /* factor on the gradients of this group, in addition to the action's factor */
  int32_t op;                  /* PS_OP_* of an update. The op's inputs are param, master, grad and states, repeated
                                * for each parameter. */
  int32_t n_states;            /* number of state tensors per parameter in the op's inputs */
  int32_t n_needed;            /* number of leading state tensors that a parameter must have. For each other state
                                * tensor that is missing, the master is passed instead. */
  int32_t pad;
} ps_update_group;
/* Sets the attributes of an update's op that differ between updates. These attributes are the factor on gradients
 * (grad_scale), and t or values that are computed from t. t counts the updates of the parameters from 1. Returns
 * PS_EINVAL if the op is not an update. */
int ps_update_attrs(int op, void *attrs, int64_t t, double grad_scale);
/* Settings of an action. Fields that the action does not use are 0. */
typedef struct ps_action_how {
  double weight;               /* for BACKWARD or INPUT: weight of the micro-batch. The weight is counted once per
                                * micro-batch, not once per virtual stage. */
  double scale;                /* for an update, or for a backward that updates: factor on gradients */
  int32_t slot;                /* for a last backward: 1 stores the final gradients of bf16 and fp16 parameters in the
                                * place of these parameters */
  int32_t overlap;             /* for a last backward: 1 updates each unit as soon as its gradients are final */
  const ps_update_group *groups; /* [n_groups] optimizer settings, which are copied. NULL means the settings of the
                                  * previous action. */
  int32_t n_groups;
  int32_t numbered;            /* for a forward: 1 if its dropouts count from first_op and its rows count from sample.
                                * The dropout masks are then the same as in a single process that runs all virtual
                                * stages in order. */
  uint64_t sample;
  uint32_t first_op, pad;
} ps_action_how;
/* Begins the next action of the table. `kind` must be its kind. A forward may be repeated until its backward begins.
 * A backward may have no forward. If the step's table has no norm, the caller may begin a norm before the update. If
 * `how` is NULL, all settings are 0. Returns PS_ESTATE if another action is due or in progress, or if no step is in
 * progress. Returns PS_EINVAL for an update during a backward that is not the last backward, for an update during a
 * backward in a step that has a norm or several virtual stages, or for `slot` in a backward that is not the last
 * backward of its virtual stage. */
int ps_step_next(ps_step *step, int kind, const ps_action_how *how);
/* Ends the action in progress. For a backward, the call completes the work of the backward: the gradients become
 * final, sums over ranks arrive, and units are updated. After an error the action is still in progress. Returns
 * PS_ESTATE if no action is in progress. Also returns errors of ps_apply. */
int ps_step_done(ps_step *step);
/* Pauses the script at a prompt. A step may be in progress. Computations until ps_resume do not belong to the step.
 * They are not recorded for backward, and their uses of chunks are not recorded. They do not advance the step's
 * random numbers, and their memory is not counted in the budgets. Until ps_resume, the following calls fail with
 * PS_ESTATE: actions of a step, backward, setting gradients, and writes to parameters. If the pause is between two
 * steps, an engine allows backward, setting gradients and writes to parameters. *scope is a scope that ps_resume
 * ends. Returns 1 if the script cannot be paused now because a dry run is in progress. Returns PS_ESTATE if the
 * script is already paused or if there are several ranks. Can also return PS_ENOMEM. */
int ps_suspend(ps_ctx *ctx, int64_t *scope);
/* Resumes the script. The tensors `keep` survive, as in ps_scope_end. Chunks are moved until they fit the budgets
 * again. Returns PS_ESTATE if the script is not paused. Also returns errors of the moves of chunks; the script is
 * resumed even then. */
int ps_resume(ps_ctx *ctx, int n_keep, ps_tensor *const *keep);
int ps_is_suspended(const ps_ctx *ctx);
/* Ends the action in progress, if there is one, as failed. The step then continues as if the action had not begun. An
 * abandoned forward uses up no random numbers. */
void ps_step_abandon(ps_step *step);
/* Returns 1 if the caller should collect Lua's garbage before the next BACKWARD, INPUT or WEIGHT, otherwise 0. A
 * collection is needed if less than 1/8 of the first tier is free. It is also needed if less than half of the first
 * tier is free and the last collection was PS_UNCOLLECTED micro-batches ago. The call never fails. */
enum { PS_UNCOLLECTED = 16 };
int ps_step_collects(ps_step *step);
/* Ends the step. *trace is set to the trace of this step, or to -1 if the step has no trace. If the step repeated the
 * expected trace, *trace is that trace. If `trace` is NULL, the call abandons the step: it drops the step's
 * gradients, and the next step uses the same dropout numbers. If the call fails to drop some gradients, a later call
 * drops them. Returns PS_ESTATE if actions of the table have not run. */
int ps_step_end(ps_step *step, int32_t *trace);

/* -- pipelines: the tables of a step whose model is split into stages (src/pipe, docs/pipeline.md) -----------------
 * `stages` ranks share a model. The model is split into virtual stages, which are numbered from 0 in the order of the
 * model. A table has one row of actions for each rank. In a table, ps_action.vstage is an index in the whole model.
 * The following kinds of actions occur only in tables:
 *   SEND_F: sends the outputs of this virtual stage to the forward of the next virtual stage.
 *   RECV_F: receives the outputs of the previous virtual stage.
 *   SEND_B: sends gradients to the backward of the previous virtual stage.
 *   RECV_B: receives gradients from the next virtual stage.
 *   YIELD: passes the loss of the micro-batch to the script's loop. vstage is 0.
 * SEGMENT does not occur in tables. It is an event of the executor (ps_pipe_event). */
enum { PS_ACT_SEND_F = 16, PS_ACT_RECV_F, PS_ACT_SEND_B, PS_ACT_RECV_B, PS_ACT_YIELD, PS_ACT_SEGMENT };
enum { PS_PIPE_GPIPE, PS_PIPE_1F1B, PS_PIPE_INTERLEAVED, PS_PIPE_LOOPED_BFS, PS_PIPE_ZB_H1, PS_PIPE_ZB_V,
  PS_PIPE_SCHEDULES, PS_PIPE_CUSTOM = PS_PIPE_SCHEDULES };
typedef struct ps_pipe_spec {
  int32_t schedule, stages;
  int32_t virtual_stages;      /* number of virtual stages per rank */
  int32_t micro_batches;
  int32_t forward_only;        /* 1 for an evaluation without backward */
  int32_t vstages;             /* number of virtual stages of the whole model, set by ps_pipe_table_spec */
} ps_pipe_spec;
typedef struct ps_pipe_table ps_pipe_table;
/* Returns a name from "gpipe" to "zb_v", or "custom", or NULL if there is no such schedule. */
const char *ps_pipe_schedule_name(int schedule);
/* Finds a schedule by name. Returns PS_EINVAL if there is no such schedule; the message then contains all names. */
int ps_pipe_schedule_find(const char *name, int *out);
/* Makes the table of a schedule for the sizes in `spec`. The table has only forwards and backwards, and a pipeline can
 * perform it without a deadlock. Returns PS_EINVAL if the schedule is not defined for these sizes; the message then
 * contains the sizes. */
int ps_pipe_table_new(const ps_pipe_spec *spec, ps_pipe_table **out);
/* Reads a table in PyTorch's CSV form (docs/pipeline.md). `name` is the file's name for messages. Returns PS_EFORMAT
 * if the text is not a table in this form; the message then contains line and cell. Returns PS_EINVAL if the table
 * cannot be performed, or if the order of its sums is not unique. */
int ps_pipe_table_read(const char *text, int64_t nbytes, const char *name, ps_pipe_table **out);
/* Writes the text of a table. Returns the size of the whole text in bytes, including a final 0. If `room` is less
 * than this size, the text is truncated. If `plain` is 1, transfers and yields are omitted, so that
 * ps_pipe_table_read can read the text. */
int64_t ps_pipe_table_write(const ps_pipe_table *t, int plain, char *out, int64_t room);
void ps_pipe_table_free(ps_pipe_table *t);
/* Returns the table's sizes. If the table was read from a text, virtual_stages is the maximum over ranks. */
const ps_pipe_spec *ps_pipe_table_spec(const ps_pipe_table *t);
/* Returns the row of a rank, lent until ps_pipe_table_lower. Returns PS_ERANGE if there is no such rank. */
int ps_pipe_table_row(const ps_pipe_table *t, int rank, const ps_action **row, int32_t *n);
/* Returns the rank that runs a virtual stage, and the stage's index on that rank. Returns PS_ERANGE if there is no
 * such virtual stage. */
int ps_pipe_table_place(const ps_pipe_table *t, int vstage, int32_t *rank, int32_t *local);
/* Inserts transfers, yields and reductions into all rows. Returns PS_ESTATE if the table already has them. */
int ps_pipe_table_lower(ps_pipe_table *t);
/* The peak counts of a row. They do not depend on the costs of the row's actions. Each field counts pairs of a
 * virtual stage and a micro-batch. */
typedef struct ps_pipe_held {
  int32_t in_flight;           /* number of pairs whose forward has run and whose INPUT or BACKWARD has not run yet */
  int32_t waiting;             /* number of pairs whose INPUT has run and whose WEIGHT has not run yet */
} ps_pipe_held;
/* Returns the peak counts of a rank. Returns PS_ERANGE if there is no such rank. */
int ps_pipe_table_held(const ps_pipe_table *t, int rank, ps_pipe_held *out);
/* The cost of a virtual stage for one micro-batch. The unit of time is arbitrary. A BACKWARD costs input + weight. */
typedef struct ps_pipe_cost {
  double forward, input, weight;
  double reduce;               /* cost of the reduction of the virtual stage, once per step, in a lowered table */
  int64_t nbytes;              /* size in bytes of the output that is sent to the next virtual stage. The output's
                                * gradient, which is sent in the opposite direction, has the same size. */
  int64_t held, waiting;       /* held: bytes kept from forward to backward. waiting: bytes kept from INPUT to
                                * WEIGHT. */
} ps_pipe_cost;
/* Links between ranks. A pair of ranks has four links: one for forwards and one for gradients in each direction. */
typedef struct ps_pipe_link {
  double latency;              /* time from the departure of a message's last byte to the arrival of that byte */
  double rate;                 /* bytes per unit of time; if it is 0, transfers take no time */
  int32_t depth, pad;          /* depth: number of messages that a link can queue while the receiver is not ready, 0
                                * for any number. If the queue is full, the sender waits. */
} ps_pipe_link;
typedef struct ps_pipe_span { double begin, end; } ps_pipe_span;
typedef struct ps_pipe_times {
  double makespan;             /* time from 0 to the end of the last action on any rank */
  double bubble;               /* the fraction of the time stages * makespan in which ranks are idle */
} ps_pipe_times;
typedef struct ps_pipe_rank_times {
  double first, last;          /* begin of the rank's first action, and end of its last action */
  double busy;                 /* sum of the times of the rank's actions */
  int64_t peak;                /* maximum number of bytes kept, as counted by ps_pipe_cost.held and .waiting */
} ps_pipe_rank_times;
/* Simulates a table with a cost for each virtual stage. If `costs` is NULL, the costs forward, input and weight are
 * 1. If `link` is NULL, transfers take no time. `ranks` is [stages] or NULL. `spans` is [stages]. Each entry of
 * `spans` is NULL or an array with one span for each action of the rank's row. Returns PS_EINVAL if a cost is
 * negative or not a number, or if ranks wait for each other in a cycle. A cycle is possible only with links of
 * limited depth. The message shows the cycle. */
int ps_pipe_simulate(const ps_pipe_table *t, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                     ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
/* Simulated times of a split of a model. A model consists of parts (embedding, layers, head). A split is the number
 * of consecutive parts in each virtual stage. */
typedef struct ps_pipe_cut_times {
  double makespan;             /* makespan of the split that was found */
  double equal;                /* makespan if all virtual stages have the same number of parts. If that is impossible,
                                * the first virtual stages have one part more. */
  double bound;                /* lower bound of the makespan of every split into these virtual stages */
  int32_t bound_part;          /* part that determines the bound, because its rank does little else; -1 if all parts
                                * determine it */
  int32_t tried;               /* number of splits that were simulated */
} ps_pipe_cut_times;
/* Searches for the split with the least makespan (ps_pipe_simulate). `parts` [n] contains the costs of the parts. The
 * cost of a virtual stage is the sum of the costs of its parts, and its output is the output of its last part.
 * `counts` [vstages] is the split; each number is at least 1. The search moves single parts between virtual stages.
 * It can miss the best split of a large model. Returns PS_EINVAL if there are fewer parts than virtual stages. Also
 * returns errors of ps_pipe_simulate. */
int ps_pipe_cut(const ps_pipe_table *t, const ps_pipe_cost *parts, int32_t n, const ps_pipe_link *link, int32_t *counts,
                ps_pipe_cut_times *out);
/* Reads a split in Megatron's notation, such as "Et*3|(tt|)*29,m|L". The notation has a letter for each part and a
 * bar between two virtual stages. *n repeats a letter or a group in brackets. Commas and blanks are ignored. `kinds`
 * contains a letter for each part of the model. Returns PS_EINVAL if the text is not in this notation, or if it does
 * not split these parts into this number of virtual stages; the message then contains the position. */
int ps_pipe_layout(const char *layout, const char *kinds, int32_t vstages, int32_t *counts);

/* -- chunks: parameters, gradients and optimizer state in chunks on several tiers (docs/memory.md) ---------------- */
/* Kinds of chunks. PS_KIND_STATE and all higher kinds are optimizer states. ps_kind_state assigns these kinds to
 * names. */
enum { PS_KIND_PARAM, PS_KIND_PARAM_FP32, PS_KIND_GRAD, PS_KIND_STATE, PS_KIND_COUNT = 64 };
const char *ps_kind_name(int kind);      /* returns a name such as "param", or NULL if there is no such kind */
/* Returns the kind of chunks for the optimizer state with this name. If the name is new, the function assigns the
 * next kind to it. That kind is valid in this process only. Returns PS_EINVAL if the name is empty or longer than 31
 * characters, or if there are already PS_KIND_COUNT kinds. */
int ps_kind_state(const char *name);
/* Spacing that avoids false dependences in the processor. An update reads and writes the same position in chunks of
 * all kinds at the same time. If all these addresses had equal offsets within their pages, a processor would mistake
 * a write to one address for a write to another address that it reads. This mistake would slow the processor down.
 * The tensors therefore begin at a multiple of PS_KIND_SHIFT bytes that differs between kinds of chunks, provided the
 * chunks are large enough. */
enum { PS_KIND_SHIFT = 4864 };
typedef struct ps_chunk_config {
  int32_t device, host;        /* ids of the compute device and of host memory; equal if there is no device tier */
  int32_t policy;              /* policy from ps_policy_find */
  int32_t prefetch;            /* 1 if copies are started before their chunks are used */
  int32_t stress;              /* for tests: 1 if chunks move at every pin and the memory that they leave is
                                * overwritten */
  int32_t disk_threads;        /* 0 for io_uring, otherwise the number of plain threads */
  int32_t disk_checksums;      /* 1 if bytes read from the disk are compared with the bytes that were written */
  int32_t pad;
  int64_t budget[3];           /* budgets of device, host and disk in bytes. 0 means no limit for device and host; for
                                * disk it means that there is no disk tier. */
  int64_t ahead[3];            /* for each tier, the maximum number of bytes of chunks that were fetched before their
                                * use; 0 means that the engine chooses the number */
} ps_chunk_config;
typedef struct ps_chunk_info {
  int32_t kind, group, index, dtype;
  int32_t state, pins, n_tensors;
  int32_t valid;               /* bit set of the tiers (indices of ps_tier_info) that have a valid copy of the chunk */
  int64_t nbytes, used_nbytes;
  int64_t last_use, next_use;  /* moments of this step; -1 if there is no use or the moment is unknown */
} ps_chunk_info;
typedef struct ps_tier_info {
  char name[16];               /* "device", "host" or "disk": key in the configuration, and name in messages */
  int32_t device, pad;         /* device: id of the device that has the memory; -1 for a file, which no op can read */
  int64_t budget, chunks, other, free, peak;   /* All fields are in bytes. budget is 0 if there is no limit. peak is
                                                * the maximum of the sum of chunks and other tensors. */
  int64_t bytes_up, bytes_down;                /* total bytes that were copied from this tier to the tier above, and
                                                * from the tier above to this tier */
} ps_tier_info;
typedef struct ps_step_forecast {
  int32_t n_moments, n_uses;
  int64_t peak[3];             /* peak bytes per tier, of chunks and other tensors together */
  int64_t other[3];            /* bytes of other tensors per tier */
  int64_t fetched[2], evicted[2];   /* bytes per step that are fetched to tier i from the tier below, and evicted from
                                     * tier i to the tier below */
  int64_t first_fetched[2], first_evicted[2];   /* the same numbers for the next step. That step begins with the
                                                 * chunks in their current places. */
  /* The first op that fits only because other tensors use less memory during this op than at their peak.
   *   short_tier: tier on which the op needs its chunks.
   *   wanted: total size of these chunks in bytes; 0 if there is no such op.
   *   left: number of bytes that are left for these chunks on the tier. */
  int64_t wanted, left, short_tier;
  int64_t resident;            /* bytes of chunks that are always on tier 0, because the last tier has no space for
                                * them */
  int64_t gathers, gathered;   /* number of stripes that a step gathers from other ranks, and their bytes */
} ps_step_forecast;

/* -- the engine: trains parameters that are in chunks. A context has at most one engine. ---------------------------
 * Every function below returns PS_ESTATE if no engine is open. */
/* Opens the context's engine. Only this engine may use `step`. Returns PS_ESTATE if an engine is already open, or if
 * another engine uses the step. Returns PS_EINVAL if budgets or devices are impossible. Returns PS_EIO or PS_ENOSPC
 * if the file of the disk tier cannot be made or has too little space. Returns PS_EUNSUP if a device cannot copy
 * chunks. */
int ps_engine_open(ps_ctx *ctx, ps_step *step, const ps_chunk_config *config, const char *disk_folder);
void ps_engine_close(ps_ctx *ctx);       /* Closes the engine. Tensors in chunks lose their bytes. */
int ps_engine_is_open(ps_ctx *ctx);
/* Finds an eviction policy by name. Policies are numbered from 0, by their rows in src/chunk/policy.c. Returns
 * PS_EINVAL if there is no such policy; the message then contains all names. */
int ps_policy_find(const char *name, int *out);
const char *ps_policy_name(int policy);  /* returns NULL if there is no such policy */
/* Makes a chunk. Chunks are numbered from 0. Returns PS_EINVAL if there is no such kind, or if nbytes is not a
 * multiple of 4096. */
int ps_engine_chunk_new(ps_ctx *ctx, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *chunk);
/* Moves a contiguous tensor's storage to a position in a chunk. The tensor must cover its storage. `offset` is the
 * position in bytes, a multiple of 256. Returns PS_EINVAL if the tensor or the position does not fit, or PS_ESTALE if
 * the tensor's bytes are gone. Returns PS_ENOMEM, PS_EIO or PS_ENOSPC if there is no space for the chunk or the disk
 * failed; the tensor then stays in its old place. */
int ps_engine_adopt(ps_ctx *ctx, ps_tensor *t, int32_t chunk, int64_t offset, const char *name);
/* Makes a tensor of `like`'s shape in a chunk, filled with zeros. The tensor's header is on device `device`. Returns
 * PS_EINVAL if the device is not one of the engine's devices, or if the position does not fit or is occupied. */
int ps_engine_tensor_new(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t chunk, int64_t offset,
                         const char *name, ps_tensor **out);
/* Like ps_engine_tensor_new, for a shape [ndim]. Returns errors of ps_engine_tensor_new. */
int ps_engine_tensor_shaped(ps_ctx *ctx, int ndim, const int64_t *shape, int dtype, int device, int32_t chunk,
                            int64_t offset, const char *name, ps_tensor **out);
/* Returns a tensor with the same bytes, for use on another device of the engine. Returns PS_EINVAL if there is no
 * such device, or if the tensor is in no chunk. */
int ps_engine_tensor_at(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out);
/* -- sharding (ZeRO): the ranks of a group share the chunks -------------------------------------------------------
 *
 * ps_engine_shard divides the chunks between the ranks of a group. The function must be called before the first chunk
 * is made. `stage` is the ZeRO stage:
 *   0: every rank has everything, and gradients are summed over ranks.
 *   1: each optimizer state has one owner.
 *   2: in addition, each gradient has one owner.
 *   3: in addition, each parameter has one owner.
 * `once` has an effect in stages 2 and 3 if a step has several micro-batches. If it is 1, the gradients are reduced
 * once per step, and until then every rank keeps sums of its own. If it is 0, the gradients are reduced in each
 * backward. The engine holds a reference to the group. All ranks make the same calls. Returns PS_ESTATE if there are
 * already chunks, or PS_EINVAL if there is no such stage. */
typedef struct ps_group ps_group;
int ps_engine_shard(ps_ctx *ctx, ps_group *group, int stage, int once);
/* A part is the contents of one chunk, as seen by all ranks. A stripe is a set that contains at most one part per
 * rank. Parts and stripes are numbered from 0. */
typedef struct ps_part_config {
  int32_t owner, dtype;        /* owner: rank that owns the part. dtype: type in which the part's bytes are reduced. */
  int32_t chunk;               /* the part's chunk on this rank; -1 if there is none and the bytes are temporarily on
                                * `device` */
  int32_t device, stripe;
  int32_t reads;               /* 1 for values: every rank uses the owner's values. 0 for gradients. */
  int32_t keeps;               /* 1 if the bytes, once they have been read, stay until the end of the step */
  int64_t nbytes;
} ps_part_config;
/* Makes a part. Returns PS_EINVAL if a rank, stripe, chunk or size does not fit, or PS_ESTATE if the chunks are not
 * sharded. */
int ps_engine_part(ps_ctx *ctx, const ps_part_config *config, int32_t *part);
/* Drops a part that has no tensors. A part with tensors is dropped with its last tensor. Returns PS_EINVAL if there
 * is no such part. */
int ps_engine_part_drop(ps_ctx *ctx, int32_t part);
/* Like ps_engine_adopt and ps_engine_tensor_new, with a part instead of a chunk. They return the errors of
 * ps_engine_adopt and ps_engine_tensor_new. If the tensor is already in a part, all ranks must call
 * ps_engine_part_adopt. */
int ps_engine_part_adopt(ps_ctx *ctx, ps_tensor *t, int32_t part, int64_t offset, const char *name);
int ps_engine_part_tensor(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t part, int64_t offset,
                          const char *name, ps_tensor **out);
/* Returns a tensor that covers the bytes of t that only this rank uses. *out is NULL if another rank owns these
 * bytes. Returns PS_EINVAL if t is in no chunk and in no part. */
int ps_engine_own(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out);
/* Returns a hash of the gathers that the step expects, or 0 if no gathers are known. If the hashes of ranks differ,
 * no rank may gather in advance, and all ranks must drop the expected gathers with ps_engine_gathers_drop. */
double ps_engine_gathers(ps_ctx *ctx);
void ps_engine_gathers_drop(ps_ctx *ctx);
/* All ranks must call this function after values were written without using the parts. The next read of each part
 * then gathers it again. Returns errors of ps_apply. These are errors of exchanges in progress. */
int ps_engine_forget(ps_ctx *ctx);
/* Sets the stages of a pipeline. The ranks of the group `stages` run the other virtual stages of this model. The
 * whole model has n_numbers parameters, and each ps_param.number is less than n_numbers. From now on the norm
 * includes the parameters of all stages. The norm has the same bits as in a single process that has all parameters.
 * `copies` is NULL or the group of ranks that have copies of PS_TIE_COPY parameters, including this rank. All ranks
 * call the function before ps_engine_params. The engine holds references to the groups. Returns PS_ESTATE if there
 * are already parameters or if the function was called before, or PS_EINVAL if the model has no parameters. Can also
 * return PS_ENOMEM. */
int ps_engine_stages(ps_ctx *ctx, ps_group *stages, ps_group *copies, int32_t n_numbers);
/* Sets the tensor-parallel group. Its ranks share the same layers. After the last backward of a step, one exchange
 * sums all gradients of PS_TP_PARTIAL over the ranks, in fp32 and in the order of ranks. The norm counts each
 * parameter once, in the order of ranks. All ranks of `tp` have the same parameters with the same owners. The shapes
 * are the rank's own. All ranks call this function before ps_engine_params. The engine holds a reference to the
 * group. Returns PS_ESTATE if there are already parameters, or if the function was called before. Can also return
 * PS_ENOMEM. */
int ps_engine_tensor_parallel(ps_ctx *ctx, ps_group *tp);
/* Plans the collectives of the step that begins. The plan contains the collectives of `group` that the dry run of
 * trace `trace` recorded. *hash is a hash of the plan. It is 0 if the dry run recorded no collectives, if there is no
 * such trace, or if there is no memory for a plan. Returns PS_ESTATE if no engine is open. */
int ps_engine_plan_calls(ps_ctx *ctx, int32_t trace, ps_group *group, uint64_t *hash);
/* Returns the ops (PS_OP_*) that ran in the forward of a trace's dry run, in order and without views. *n is 0 if
 * there is no such trace, or if the trace was not made by a dry run. *ops is valid until the next dry run. Returns
 * PS_ESTATE if no engine is open. */
int ps_engine_forward_ops(ps_ctx *ctx, int32_t trace, const uint16_t **ops, int32_t *n);
/* Sets the stripe of a unit, and the parts that contain its values and gradients. If grad_part is -1, gradients are
 * stored in the place of the values. Returns PS_ERANGE if there is no such unit, or PS_EINVAL if the stripe has units
 * of another virtual stage. */
int ps_engine_unit_parts(ps_ctx *ctx, int unit, int32_t stripe, int32_t param_part, int32_t grad_part);
typedef struct ps_param {
  ps_tensor *param, *master;           /* master: `param` itself or an fp32 tensor; NULL if another rank owns the
                                        * master */
  ps_tensor *state[PS_MAX_STATES];     /* the first n_states entries are the optimizer states. All tensors are on the
                                        * compute device. */
  ps_tensor *host[2 + PS_MAX_STATES];  /* param, master and states for the host; NULL if the host is the compute
                                        * device */
  ps_tensor *grad;                     /* tensor for the gradient if it has a place of its own, otherwise NULL */
  int32_t group, unit;                 /* group: group of the optimizer. unit: index of the unit. Parameters of the
                                        * same unit have their states in the same chunks. */
  int32_t vstage, number;              /* vstage: virtual stage whose backwards add to the gradient. number: index of
                                        * the parameter in the model. */
  int32_t tie, tp;                     /* PS_TIE_*, PS_TP_* */
  int32_t n_states, pad;               /* n_states: number of states; 0 if another rank owns them */
} ps_param;
/* Uses of one parameter by several virtual stages. Each use has its own sum of gradients. When all backwards have
 * run, these sums are added in the order of the virtual stages, so that bits do not depend on the table.
 *   USE: another use, on this rank, of the parameter with the same number. `param` is the same tensor. `grad`
 *   contains the sum of this use, and it is the tensor's gradient while backwards of `vstage` run. A use has no
 *   master, no states and no unit. In the list of parameters, uses follow all parameters.
 *   COPY: other ranks have a copy of the parameter. The sums of all copies are added in the order of the ranks of the
 *   group `copies` in ps_engine_stages. The copies stay equal. */
enum { PS_TIE_NONE, PS_TIE_USE, PS_TIE_COPY };
/* The gradient that a backward computes for a parameter on one rank of tensor parallelism.
 *   WHOLE: every rank has the whole parameter and computes its whole gradient. All ranks get the same bits.
 *   SPLIT: every rank has a shard of the parameter and computes the whole gradient of that shard.
 *   PARTIAL: every rank has the whole parameter and computes one addend of its gradient.
 * A PS_TIE_USE has the same value as the first use of its parameter. */
enum { PS_TP_WHOLE, PS_TP_SPLIT, PS_TP_PARTIAL };
/* Sets all trained parameters, in ascending order of (vstage, number). The other uses (PS_TIE_USE) follow in the same
 * order. Norms are summed in the order of numbers. All parameters of a unit must be in one virtual stage. The call
 * retains the tensors. Returns PS_EINVAL in these cases: the order is wrong; a unit is in two virtual stages; a tie
 * lacks its first use, its ranks or a tensor for its gradient; a shard lacks its tensor-parallel group; a tensor is
 * missing or does not fit. */
int ps_engine_params(ps_ctx *ctx, int n, const ps_param *params, int n_units, int n_groups);
/* Sets the device on which ops see a parameter and its gradient. `device` is the compute device or the host. Returns
 * PS_EINVAL for another device, or if the tensor is in no chunk. Returns PS_ESTATE if the tensor has a gradient or a
 * history. */
int ps_engine_set_device(ps_ctx *ctx, ps_tensor *t, int device);
/* Sets where a unit is updated. If `on_device` is 1, the unit is updated on the device. If `on_device` is 0, which is
 * the default, the unit is updated on the host. Returns PS_ERANGE if there is no such unit. */
int ps_engine_set_on_device(ps_ctx *ctx, int unit, int on_device);
/* Computes the sum of squares of all gradients. The sum is infinite or NaN if a gradient is infinite or NaN. The call
 * must be made within the step's norm. Returns PS_ESTATE if the step's norm is not in progress. Also returns errors
 * of ps_apply and of ranks. */
int ps_engine_sq_norm(ps_ctx *ctx, double *out);
/* Returns the sum of squares of the gradients of n consecutive parameters of the model. `first` is the number
 * (ps_param.number) of the first parameter. The parameters may be on any rank. The call must follow the norm in the
 * same step. Returns PS_ERANGE if the model has no such numbers. */
int ps_engine_sq_norm_of(ps_ctx *ctx, int32_t first, int32_t n, double *out);
/* Updates all parameters that this step has not updated yet. The call must be made within the step's update.
 * Gradients are multiplied by the action's scale and then dropped. Returns PS_ESTATE if the step's update is not in
 * progress. Also returns errors of ps_apply. After such an error, a second call updates the parameters that have not
 * been updated yet. */
int ps_engine_update(ps_ctx *ctx);
/* Drops all gradients. If a gradient was stored in the place of its parameter, the parameter is restored from its
 * master. Returns errors of ps_apply. */
int ps_engine_drop_grads(ps_ctx *ctx);
/* These functions read or set numbers of one parameter: the number of its updates (ps_engine_param_steps,
 * ps_engine_set_param_steps), whether this step has already updated it (ps_engine_param_updated), and a factor on its
 * gradient in this step's update (ps_engine_param_scale). The factor is applied in addition to the group's factor.
 * The functions return PS_ERANGE if there is no such parameter, or PS_EINVAL if `steps` is negative. */
int64_t ps_engine_param_steps(ps_ctx *ctx, int param);
int ps_engine_set_param_steps(ps_ctx *ctx, int param, int64_t steps);
int ps_engine_param_updated(ps_ctx *ctx, int param);
int ps_engine_param_scale(ps_ctx *ctx, int param, double scale);
/* Computes the bytes of other tensors that are on a tier now, but were not there when trace `id` was made. These
 * tensors are either garbage or tensors that stay. *nbytes is 0 if the plan's slack is at least as large as these
 * bytes. If `adopt` is 1, the next plan includes the bytes. Returns PS_ERANGE if the trace no longer exists. */
int ps_engine_leftover(ps_ctx *ctx, int32_t id, int adopt, int64_t *nbytes);
/* Forecasts a step that repeats trace `id`. To do this, it makes the plan of that step. Returns PS_ERANGE if the
 * trace no longer exists. Returns PS_ENOMEM if the step does not fit; ps_error_get_detail then returns the tier and
 * the bytes. */
int ps_engine_forecast(ps_ctx *ctx, int32_t id, ps_step_forecast *out);
/* One use of a chunk by a step.
 *   moment: the moment at which the chunk's bytes must be on the tier. Moments number the ops of a step that use
 *   chunks, from 0. Uses are sorted by moment. Uses with the same moment are needed at the same time, and a
 *   chunk occurs at most once among them.
 *   tier: index of the tier, 0 or 1.
 *   write: 1 if the op changes the chunk.
 *   ends: 1 if the chunk's contents are no longer needed after this use. The chunk's next use then allocates memory
 *   and moves nothing.
 *   action: PS_ACT_* of the step's action that uses the chunk. */
typedef struct ps_use {
  int32_t moment, chunk;
  int8_t tier, write, ends, action;
} ps_use;
/* The length of a trace, and the peak bytes of other tensors on each tier. */
typedef struct ps_trace_info {
  int32_t n_uses, n_moments;
  int64_t other[3];
} ps_trace_info;
/* Returns trace `id` and its first `room` uses, in order. If `room` is 0, no uses are returned, and `uses` may be
 * NULL. Returns PS_ERANGE if the trace no longer exists. */
int ps_engine_trace_get(ps_ctx *ctx, int32_t id, ps_trace_info *out, int32_t room, ps_use *uses);
/* Waits for copies in progress. Returns PS_EIO or PS_EBACKEND if a copy failed. */
int ps_engine_settle(ps_ctx *ctx);
typedef struct ps_engine_stats {
  double wait_s;               /* seconds that ops have waited for copies since the engine was opened */
  int64_t waits;               /* number of these waits */
  int64_t unplanned;           /* number of chunks that a pin had to fetch, because no plan had fetched them */
  double ranks_wait_s;         /* seconds that steps have waited for other ranks */
} ps_engine_stats;
int ps_engine_stats_get(ps_ctx *ctx, ps_engine_stats *out);
/* Rates for plans. ps_rates_measure measures the rates. It allocates up to `nbytes` bytes of memory on the device and
 * up to `nbytes` bytes on the host, and frees this memory afterwards. It must not be called during a dry run or a
 * step. Returns PS_EINVAL if the devices are not an accelerator and host memory. Also returns errors of ps_apply. */
typedef struct ps_rates {
  double host_adam, device_adam;   /* number of parameters per second (bf16 with fp32 state) that Adam updates on the
                                    * host while copies run, and on the device */
  double up, down;             /* bytes per second to the device and from it, while both directions are in use */
  double at_once;              /* the fraction of the device's time in Adam during which the host is free */
  double seconds;              /* duration of the measurement in seconds */
  int64_t numel;               /* number of parameters in a trial */
} ps_rates;
int ps_rates_measure(ps_ctx *ctx, int device, int host, int64_t nbytes, ps_rates *out);
/* Measures the sequential rates of the disk tier with `nbytes` bytes in each direction. Returns PS_ESTATE if there is
 * no disk tier, if the run is a dry run, or if copies are in progress. Returns PS_EIO or PS_ENOSPC if the disk failed
 * or has too little free space. */
int ps_engine_disk_probe(ps_ctx *ctx, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s);
/* These functions describe chunks and tiers, for display. They return PS_ERANGE if there is no such chunk or tier. */
int ps_engine_chunk_count(ps_ctx *ctx);
int ps_engine_chunk_get(ps_ctx *ctx, int chunk, ps_chunk_info *out);
const char *ps_engine_chunk_tensor(ps_ctx *ctx, int chunk, int i);
int ps_engine_tensor_chunk(ps_ctx *ctx, const ps_tensor *t);     /* returns the tensor's chunk on this rank, or -1 */
int ps_engine_holds(ps_ctx *ctx, const ps_tensor *t);            /* returns 1 if the tensor is in a chunk of any rank */
int ps_engine_tier_count(ps_ctx *ctx);
int ps_engine_tier_get(ps_ctx *ctx, int tier, ps_tier_info *out);

/* -- files --------------------------------------------------------------------------------------------------------- */
/* Writes a file atomically. Returns PS_EIO if the system call failed. The message contains the system's reason and,
 * if the disk is full, the bytes wanted and the bytes free. */
int ps_file_write_atomic(const char *path, const void *data, int64_t nbytes);
int ps_file_fsync_dir(const char *path);
/* Finds the file that ps_file_write_atomic replaces or makes for a path, and writes the file's path to out [room].
 * The search follows links, even to a file that does not exist, so that links are not replaced. Returns PS_EIO if
 * there are more than 40 links, or if the path and its final 0 do not fit. Other faults are reported when the path is
 * opened. */
int ps_file_target(const char *path, char *out, int64_t room);
/* Renames the folder `from` to `path`, atomically and durably. Returns 1 if a folder `path` existed; that folder then
 * has the name `from`. Otherwise returns 0. Returns PS_EIO as ps_file_write_atomic does. */
int ps_file_swap_folder(const char *from, const char *path);
/* Diverts files. From now on, the files that this process writes through the functions of this header are stored in
 * `folder`. The process still reads them under their own paths. The folders of these paths need not exist, and cannot
 * be renamed. Zeros occupy no disk space in a diverted file. If `folder` is NULL, the diversion ends. Returns
 * PS_EINVAL if `folder` is "" or too long. Can also return PS_ENOMEM. */
int ps_file_divert(const char *folder);
/* Returns 1 if a path is diverted to another path, and stores the other path in out [room]. If `writes` is 1, a path
 * is diverted if the file would be written at the other path. If `writes` is 0, a path is diverted if the file was
 * written at the other path and would be read from it. Returns 0 if the path itself is used. Returns PS_EINVAL if an
 * argument is NULL, or PS_ERANGE if `room` is too small. */
int ps_file_diverted(const char *path, int writes, char *out, int64_t room);

/* -- the process ----------------------------------------------------------------------------------------------------
 */
double ps_now(void);                     /* returns the seconds of a monotonic clock */
int64_t ps_rss_peak(void);               /* returns the peak of the process's resident memory in bytes */
/* Performs once, with zeros as operands, each matrix product that the processor has computed with the current number
 * of threads. Products of dry runs are included. The products are performed in the order of their first use.
 * Afterwards the process holds the memory that oneDNN keeps for these products (code, heap buffers, pages of
 * libraries). *operations is the number of operations of all products. Returns 1 if the products were performed.
 * Returns 0 and performs no product if the number of operations is more than `most`, if a product writes more than
 * 128 MiB, or if there were too many kinds of products to record. Returns PS_ENOMEM if there is no memory for the
 * operands. Can also return PS_EBACKEND. */
int ps_products_rehearse(double most, double *operations);
/* From now on, the first Ctrl-C, SIGTERM or SIGHUP is counted and does not end the process. After the first signal,
 * the next Ctrl-C or SIGTERM ends the process. Returns PS_EINVAL if the system refused to install the handlers. */
int ps_interrupts_install(void);
void ps_interrupts_remove(void);
int ps_interrupts(void);                 /* returns the number of counted signals */
int ps_is_terminal(int fd);
int ps_terminal_columns(int fd);         /* returns 80 if the width is unknown */
void ps_set_threads(int n);              /* sets the number of compute threads */
int ps_threads_most(void);               /* returns the largest allowed number of compute threads */
int ps_threads(void);
/* -- torch .pt --------------------------------------------------------------------------------------------------- */
/* A file of torch.save. Its values form a tree. A value that is shared is reached by several paths of the tree. Each
 * value has an id. The functions return PS_EIO if the file cannot be read or was truncated. They return PS_EFORMAT if
 * the file is not a file of torch.save, if it uses a name that is not allowed, or if it is damaged. They return
 * PS_ERANGE if there is no such value or item, or PS_EINVAL if the value is of another kind. */
enum { PS_PT_NONE, PS_PT_BOOL, PS_PT_INT, PS_PT_FLOAT, PS_PT_STRING, PS_PT_BYTES, PS_PT_NAME, PS_PT_LIST, PS_PT_TUPLE,
       PS_PT_SET, PS_PT_DICT, PS_PT_TENSOR };
typedef struct ps_pt_value {
  int32_t kind, count;         /* kind: PS_PT_*. count: number of items of a container. The items of a dict are its
                                * keys and values, alternately. */
  int64_t integer;             /* value of a BOOL or INT; for a text, its number of bytes */
  double number;               /* value of a FLOAT */
  const char *text;            /* text of a STRING, BYTES or NAME (such as "torch.float32"), lent, without a final 0 */
} ps_pt_value;
typedef struct ps_pt_tensor {
  int32_t dtype, ndim;         /* dtype: -1 for an unsupported type. The type's name is in `type`. */
  int64_t shape[8], stride[8], offset;               /* strides and offset count elements */
  int64_t numel, nbytes, storage_nbytes;             /* nbytes is numel times the element size */
  int32_t storage, pad;        /* storage: id of the storage. Tensors with equal ids share their bytes. */
  const char *type;            /* name of the type, such as "torch.float32" */
  const void *data;            /* the storage's bytes, lent until the file is closed; call ps_pt_ready before reading
                                * them */
} ps_pt_tensor;
typedef struct ps_pt ps_pt;
int ps_pt_open(const char *path, ps_pt **out);       /* maps the file and checks everything except the bytes of
                                                      * tensors; executes no code of the file */
void ps_pt_close(ps_pt *pt);
int ps_pt_root(const ps_pt *pt);                     /* returns the id of the value that was saved */
int ps_pt_get(const ps_pt *pt, int value, ps_pt_value *out);
int ps_pt_item(const ps_pt *pt, int value, int i);   /* returns the id of item i of a container */
int ps_pt_tensor_get(const ps_pt *pt, int value, ps_pt_tensor *out);
int ps_pt_ready(const ps_pt *pt);                    /* Returns PS_EIO if the file was truncated after it was opened. */
/* Compares a tensor's storage with its checksum, unless it was compared before. Returns PS_EFORMAT if the storage is
 * damaged. */
int ps_pt_verify(ps_pt *pt, int value);
/* Copies part of a tensor from ps_pt_tensor_get. The caller may have reduced the sizes in `tensor`. The elements are
 * numbered in row-major order. The function copies the elements from first to first + numel - 1. Returns PS_ERANGE if
 * the tensor has no such elements, or PS_EIO if the file was truncated. */
int ps_pt_copy(const ps_pt *pt, const ps_pt_tensor *tensor, int64_t first, void *dst, int64_t numel);
/* Returns the text that ps_ptw_note added, and the text's number of bytes. The text has no final 0, and is lent until
 * the file is closed. Returns 0 if there is no text, or PS_EFORMAT if the text is damaged. */
int64_t ps_pt_note(ps_pt *pt, const char **text);
/* Frees the memory pages of a tensor whose bytes are not needed soon. */
void ps_pt_drop(const ps_pt *pt, int value);
/* A writer of files that torch.load reads. The order of calls is: declare all values, begin, write each storage,
 * commit. The functions return PS_ESTATE for a call out of this order, PS_EINVAL if a value or size does not match
 * the declaration, or PS_EIO if the file cannot be written. */
typedef struct ps_ptw ps_ptw;
int ps_ptw_new(const char *path, ps_ptw **out);
int ps_ptw_storage(ps_ptw *w, int dtype, int64_t numel);      /* declares a storage and returns its number */
int ps_ptw_put(ps_ptw *w, const ps_pt_value *value);          /* Declares the next value. The items of a container
                                                               * follow it. Returns the id of a container, or 0 for
                                                               * any other value. */
int ps_ptw_again(ps_ptw *w, int container);                   /* declares the next value as a container whose
                                                               * declaration is already complete */
int ps_ptw_tensor(ps_ptw *w, const ps_pt_tensor *tensor);     /* declares a tensor, from the fields ndim, shape,
                                                               * stride, offset and storage */
int ps_ptw_note(ps_ptw *w, const char *text);        /* adds a text that PyTorch does not read */
int ps_ptw_begin(ps_ptw *w);                         /* reserves space for the whole file, so that a full disk fails
                                                      * here */
int ps_ptw_write(ps_ptw *w, int storage, const void *data, int64_t nbytes);   /* writes the next bytes of a storage */
int ps_ptw_commit(ps_ptw *w);
void ps_ptw_free(ps_ptw *w);                         /* frees the writer, and removes the temporary file if there was
                                                      * no commit */
/* -- groups of ranks: processes that train together (docs/distributed.md) ------------------------------------------ */
int ps_group_self(ps_ctx *ctx, ps_group **out);             /* makes a group of one rank. Can return PS_ENOMEM. */
/* Makes a group of `size` ranks for dry runs (ps_machine_pretend). This process is rank `rank`. The other ranks are
 * simulated, with the same values as this rank. Returns PS_EINVAL if there is no such rank in a world of this size. */
int ps_group_pretend(ps_ctx *ctx, int rank, int size, ps_group **out);
/* Settings by which the ranks of a group find each other. All ranks pass the same values, except for `rank`. */
typedef struct ps_meeting {
  /* "tcp://host:port": rank 0 listens at this address while the group is made.
   * "file:///path": rank 0 listens on a free port and writes its address to the file. */
  const char *rendezvous;
  const char *run;             /* name that distinguishes this run from other runs, at most 128 bytes; NULL or "" for
                                * no name */
  /* Secret that only the ranks know. The ranks prove that they know the secret, and never send the secret. If
   * `secret` is NULL or "", there is no secret, and any process that knows the run's name is accepted as a rank. If
   * there is no secret and the ranks meet by a file, rank 0 makes a secret and writes it to the file. Only this user
   * can read the file. */
  const char *secret;
  int32_t rank, size;
  int32_t machines, pad;       /* machines: 1 if all ranks are on this machine, 2 if they are on several machines, 0
                                * if this is unknown */
  double timeout_s;            /* maximum time in seconds for which making the group, and every call below, can wait */
  double heartbeat_s;          /* A rank that dies, or is silent for this number of seconds, is reported to all ranks
                                * by name. The calls of these ranks then fail. */
} ps_meeting;
/* Makes a group of processes with Gloo. Returns PS_EUNSUP if this build has no Gloo. Returns PS_ETIME if not all
 * ranks connected in time. Returns PS_EIO if an address cannot be used or a connection broke. Returns PS_EFORMAT if
 * another program answers. Returns PS_ESTATE if the process that answers belongs to another run or has another
 * secret, or if the rank is taken. */
int ps_group_gloo(ps_ctx *ctx, const ps_meeting *meeting, ps_group **out);
/* Returns 1 if other machines cannot reach this machine by this address. */
int ps_host_is_loopback(const char *host);
void ps_group_close(ps_group *group);
/* Notifies the other ranks of all groups that this process is about to end. `why` is the error message of this
 * process. The other ranks receive the first line of the message, and their calls then fail. If `why` is NULL, the
 * process ends normally. A normal end is a fault only for ranks that wait for this rank. */
void ps_groups_end(const char *why);
/* Waits for the bytes of all collectives of all groups. A collective on device memory returns before its bytes have
 * arrived. Later work on this memory is ordered after the arrival. If a collective has failed in the meantime, and no
 * other call has returned its error, this call returns the error of that collective. */
int ps_groups_settle(void);
int ps_group_rank(const ps_group *group);
int ps_group_size(const ps_group *group);
/* Returns the value of the attribute `group` of ops, or -1 if there are too many groups. */
int ps_group_number(const ps_group *group);
/* Returns the total number of bytes of tensors that were sent to other ranks. Bytes are also counted for
 * ps_group_pretend. */
int64_t ps_group_bytes_sent(const ps_group *group);
/* Returns the number of bytes, of the bytes that ps_group_bytes_sent counts, that were sent while matrix products
 * ran. */
int64_t ps_group_bytes_in_pieces(const ps_group *group);
/* The next functions let ranks agree on calls by a plan (ps_engine_plan_calls). All ranks call ps_group_plan_begin at
 * the same time, and pass `agreed` 1 if all ranks have the same nonzero hash. The ranks then compare only the index
 * of each planned call. Other calls are compared as usual. ps_group_plan_calls returns the number of planned calls. */
int32_t ps_group_plan_calls(const ps_group *group);
/* Writes planned call i, from 0, as a text such as "all_reduce (call 3, fp32, 64 bytes)". Returns PS_ERANGE if there
 * is no such call. */
int ps_group_plan_call(const ps_group *group, int32_t i, char *text, int64_t room);
void ps_group_plan_begin(ps_group *group, int agreed);
/* Returns the total number of calls that all ranks made as planned. */
int64_t ps_group_planned(const ps_group *group);
/* Makes a group of some of the ranks of `parent`. The new group uses the same connections and the same watch, so a
 * rank that fails in one of the two groups fails in both. As with a collective, all ranks of the parent call this
 * function at the same time. Each rank passes the list of the ranks of its own new group. `ranks` [n] contains ranks
 * of the parent, in the order of the new group. `axis` is the group's name in errors. The name has 1 to 15 letters,
 * digits and "_". If no other call orders the calls of the two groups, both groups may be used at the same time.
 * Either group may be closed first. Returns PS_EINVAL if the lists of two ranks do not match (an error on all ranks),
 * or if there are already 32 groups over these connections. Can also return PS_ENOMEM. Also returns errors of the
 * calls below. */
int ps_group_split(ps_group *parent, int n, const int32_t *ranks, const char *axis, ps_group **out);
const char *ps_group_axis(const ps_group *group);           /* returns the group's name, or "" if it has all ranks */
/* Returns the rank's index among all ranks, or PS_EINVAL if there is no such rank. */
int ps_group_world_rank(const ps_group *group, int rank);
/* Sets how device memory is sent to other ranks. If `never` is 1, device memory is sent through host memory. If
 * `must` is 1, device memory is sent from device to device. It is then an error if this is impossible for any reason,
 * even in a world of one rank. If both are 0, device memory is sent from device to device if all ranks can do so. The
 * function must be called before the first connection, with equal values on all ranks. */
void ps_group_devices(ps_group *group, int never, int must);
/* Connects the devices of the ranks, so that the calls below accept tensors on these devices. Either all ranks call
 * this function, or the first collective calls it. Returns PS_EUNSUP if a rank cannot connect its device. The message
 * then contains the reason, and the group continues with host memory. Returns PS_ESTATE if another device is already
 * connected. Also returns errors of the collectives below. */
int ps_group_connect(ps_group *group, ps_ctx *ctx, int device);
/* Returns the name of the library that sends device memory, such as "nccl", or "" if there is none. */
const char *ps_group_carrier(const ps_group *group);
enum { PS_REDUCE_SUM, PS_REDUCE_MAX, PS_REDUCE_MIN };
/* Collectives on contiguous tensors of one device. Each call blocks until the work of this rank is finished. All
 * ranks make the same calls in the same order. Before bytes move, the ranks compare call, type, size and root.
 *   Sums of floating-point values are computed in the order of ranks and rounded once. These sums are computed in
 *   fp64 for fp64 tensors and in fp32 for other types. Sums of int32 and int64 values wrap around. Maximum and
 *   minimum return NaN if any rank has a NaN. Maximum, minimum and sums of integers work only in host memory.
 * Returns PS_EINVAL if the ranks' calls differ (an error on all ranks), or if a tensor is not contiguous. Returns
 * PS_EUNSUP for a sum of another type or in other memory, or on a device without contents. Returns PS_ESTALE if a
 * tensor's bytes are gone. Returns PS_ETIME if a rank did not arrive in time. Returns PS_EIO if a rank died or
 * failed, or if its connection broke; the message names the rank. Returns PS_ESTATE if the group failed before, or if
 * the device is not connected. */
int ps_group_all_reduce(ps_group *group, ps_tensor *t, int reduce);     /* reduce: PS_REDUCE_*. Works in place. */
int ps_group_reduce_scatter(ps_group *group, ps_tensor *out, ps_tensor *in);     /* out: shard `rank` of the sum */
int ps_group_all_gather(ps_group *group, ps_tensor *out, ps_tensor *in);         /* out: `in` of all ranks, in
                                                                                  * order */
int ps_group_broadcast(ps_group *group, ps_tensor *t, int root);
int ps_group_barrier(ps_group *group);
int ps_group_send(ps_group *group, ps_tensor *t, int peer);     /* the peer must call ps_group_recv at the same time */
int ps_group_recv(ps_group *group, ps_tensor *t, int peer);

/* -- pipelines: the executor performs one rank's row of a lowered table (src/pipe/exec.c) -------------------------
 * The executor sends, receives and keeps the tensors between virtual stages. It also runs backwards, computes
 * deferred weight gradients and reduces gradients. Work that needs the model's code or the script becomes an event
 * for the caller. The order of calls is:
 *     ps_pipe_expect for each virtual stage and micro-batch whose tensors have changed
 *     ps_step_begin, unless there is no step; then ps_pipe_begin
 *     repeatedly: ps_pipe_next, which returns an event; the event's work; ps_pipe_done
 * The last event has the kind PS_ACT_NONE. The other events are:
 *   FORWARD: in a step, its work begins with ps_step_next and ends with ps_step_done.
 *   YIELD: its work is the body of the script's loop, which calls ps_pipe_mark.
 *   SEGMENT: the walk of a BACKWARD, INPUT or WEIGHT has stopped at a recompute segment, at a function's backward or
 *   at hooks (ps_backward_begin_n). The work is to run the segment, the function's backward or the hooks.
 * Other actions of the step become events, before they are performed, in two cases: Lua's garbage should be collected
 * (ps_step_collects), or there is a listener (`tells` of ps_pipe_begin). An error ends the step. ps_pipe_abort then
 * notifies the other ranks, whose calls fail with the text of ps_pipe_abort. Transfers overlap the work. A message is
 * sent when its action ends. The messages for the next action are received while the current action runs. */
typedef struct ps_pipe ps_pipe;
enum { PS_PIPE_CARRY = 16 };   /* maximum number of tensors that a virtual stage passes to the next virtual stage */
typedef struct ps_pipe_tensor {
  int32_t dtype, device, ndim;
  int32_t grad;                /* 1 if a gradient of the tensor is sent back */
  int64_t shape[8];
} ps_pipe_tensor;
typedef struct ps_pipe_event {
  int32_t kind;                /* FORWARD, YIELD or SEGMENT, or NONE at the end of the row. `kind` can also be
                                * BACKWARD, INPUT, WEIGHT or REDUCE. If there is a step, the executor then performs
                                * the action next; otherwise the caller performs it. */
  int32_t vstage, local;       /* vstage: index of the virtual stage in the model. local: its index on this rank. */
  int32_t micro;
  int32_t again;               /* for a FORWARD of a dry row: 1 if ps_pipe_done also performs it (ps_pipe_repeat) */
  int32_t n, n_before;
  int32_t collect, pad;        /* collect: 1 if Lua's garbage should be collected now */
  ps_tensor *const *in;        /* for a FORWARD: [n] outputs of the previous virtual stage, lent until ps_pipe_done */
  const ps_action *before;     /* [n_before] actions of the row that the executor performed after the previous event,
                                * lent as long as the table exists */
  int64_t segment;             /* for a SEGMENT: id of the segment, function or hooks at which the walk has stopped */
  double seconds;              /* seconds that backwards, weight gradients and reductions took after the previous
                                * event */
  double loss;                 /* for a YIELD: loss of the micro-batch */
  double weight;               /* for a YIELD: weight from ps_pipe_weigh; -1 if the last virtual stage did not set it */
  double hits, targets;        /* for a YIELD: numbers from ps_pipe_score; both are 0 if the last virtual stage did
                                * not set them */
} ps_pipe_event;
/* Opens the executor of this rank's row. The index of the row is the rank in the group. All ranks of the group call
 * this function with equal tables. The table, the group and the context may be closed before the executor. Returns
 * PS_ESTATE if the table is not lowered, or PS_EINVAL if the group has another size. Also returns errors of
 * ps_group_split. */
int ps_pipe_open(ps_ctx *ctx, const ps_pipe_table *table, ps_group *group, ps_pipe **out);
void ps_pipe_close(ps_pipe *x);
/* Sets the tensors that a virtual stage will pass to the next virtual stage in a micro-batch. The ranks of both
 * virtual stages must set the same tensors. `n` is 0 to PS_PIPE_CARRY. If `n` is 0, a message without a tensor is
 * sent. Returns PS_ESTATE if a step is in progress, or PS_ERANGE if there is no such virtual stage or micro-batch. */
int ps_pipe_expect(ps_pipe *x, int vstage, int micro, int n, const ps_pipe_tensor *carry);
/* Sets a virtual clock. By this clock an action takes the time of its cost [vstages], and a message takes the time of
 * its link. The real times of actions and messages do not matter. If `costs` is NULL, there is no clock, which is the
 * initial state. Returns PS_EINVAL as in ps_pipe_simulate, or PS_ESTATE if a step is in progress. */
int ps_pipe_clock(ps_pipe *x, const ps_pipe_cost *costs, const ps_pipe_link *link);
/* Returns the times of the last step by the virtual clock. `spans`, which is lent, contains a span for each action of
 * the row. Returns PS_ESTATE if there is no clock. */
int ps_pipe_measured(const ps_pipe *x, ps_pipe_rank_times *out, const ps_pipe_span **spans);
/* Begins a step. `step` is the step in progress, lent until its end. The step's table contains the row's forwards,
 * backwards and reductions in the same order. Its virtual stages are the indices on this rank. If `step` is NULL,
 * there is no step, and the caller performs all actions; an example is a table that has only forwards. If `dry` is 1,
 * messages are neither sent nor awaited, tensors have no contents, and losses are 0. If `tells` is 1, every action of
 * the step becomes an event before it is performed. Returns PS_ESTATE if a step is already in progress. */
int ps_pipe_begin(ps_pipe *x, ps_step *step, int dry, int tells);
/* Number of micro-batches at the beginning of a dry row that are performed. The first micro-batch makes gradients.
 * The micro-batches after the first must have equal effects. The last micro-batch of the row is also performed,
 * because it completes the sums of gradients. */
enum { PS_PIPE_PERFORMED = 3 };
/* Lets micro-batches of later dry rows repeat the effects of an earlier micro-batch instead of being performed in
 * full. The micro-batches [first, end) repeat the effects of micro-batch first - 1 on memory, chunks and other ranks.
 * The step's actions are performed, but only forwards become events. These events have `again` set, so that the
 * caller can collect garbage before them. The inputs have the same shapes as in the PS_PIPE_PERFORMED - 1
 * micro-batches before `first`. These micro-batches must have equal effects. Otherwise the row fails with PS_ESTATE,
 * and ps_pipe_differed returns 1. If first == end, no micro-batch repeats another, which is the initial state.
 * Returns PS_ESTATE if a step is in progress. Returns PS_EINVAL if the range contains one of the first
 * PS_PIPE_PERFORMED micro-batches or the last micro-batch. */
int ps_pipe_repeat(ps_pipe *x, int first, int end);
/* Returns 1 if the last dry row failed because micro-batches had different effects. The call never fails. */
int ps_pipe_differed(const ps_pipe *x);
/* Reports that the caller's collector has run in a dry row. The executor then frees the bytes that it could free only
 * after a collection. */
void ps_pipe_collected(ps_pipe *x);
/* Sets the settings (ps_step_next) of the last BACKWARD or WEIGHT of each virtual stage, and copies them. The call
 * must be made before the first of these actions. The weight in the settings is ignored, because ps_pipe_mark sets
 * the weight. Without this call the settings are NULL. Returns PS_ESTATE if no step is in progress. Can also return
 * PS_ENOMEM. */
int ps_pipe_settings(ps_pipe *x, const ps_action_how *how);
/* Sets the weight in the step (ps_action_how) of a micro-batch whose YIELD was returned. Without this call the weight
 * is 0. On the rank of the last virtual stage, `root` is the tensor that the script made of the loss. The walk begins
 * at this tensor, and the executor holds the tensor until then. If `root` is NULL, the walk begins at the loss
 * itself. Returns PS_ESTATE if no step is in progress, PS_ERANGE if there is no such micro-batch, PS_EINVAL if
 * another rank passes a root, or PS_ESTALE if the root's bytes are gone. */
int ps_pipe_mark(ps_pipe *x, int micro, ps_tensor *root, double weight);
/* Sets the weight of the loss that the current FORWARD made. The call must be made before the ps_pipe_done of that
 * FORWARD. The ranks of other stages receive the weight with the loss. Returns PS_ESTATE or PS_ERANGE in the same
 * cases as ps_pipe_mark. */
int ps_pipe_weigh(ps_pipe *x, int micro, double weight);
/* Like ps_pipe_weigh, sets two numbers of the current FORWARD. `targets` is its number of targets. `hits` is the
 * number of targets that have the largest logit. Returns errors of ps_pipe_weigh. */
int ps_pipe_score(ps_pipe *x, int micro, double hits, double targets);
/* Returns the event that is due. The call may wait for messages. Returns PS_EINVAL if a message differs from the
 * table, or if a tensor that should have a gradient has none. Returns PS_ETIME or PS_EIO in the same cases as groups;
 * the message names rank and action. Returns PS_ESTATE if no step is in progress, if the previous event has not
 * ended, or if the step's table is not the table of the row. Also returns errors of a walk (ps_backward_begin_n), of
 * weight gradients (ps_backward_weights) and of ps_step_done. After these errors the step's action is still in
 * progress. */
int ps_pipe_next(ps_pipe *x, ps_pipe_event *out);
/* Ends an event. For a FORWARD, out [n] contains the tensors for the next virtual stage, as set by ps_pipe_expect.
 * For the last virtual stage, `out` contains the loss, which is a single number, and other tensors that the caller
 * wants to keep with the loss. For other events n is 0. Returns PS_EINVAL if the tensors are not the expected ones.
 * Also returns errors of ps_pipe_next. */
int ps_pipe_done(ps_pipe *x, int n, ps_tensor *const *out);
/* Ends the step after this rank has failed, or abandons the step. The executor keeps nothing of the step. `why` is a
 * text for the other ranks, whose calls then fail. If `why` is NULL, the other ranks are not notified, because they
 * failed themselves or because there are no other ranks. */
void ps_pipe_abort(ps_pipe *x, const char *why);
/* @endcdef */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
