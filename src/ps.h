/* SPDX-License-Identifier: BSD-3-Clause
 * The public C API of psluajit. The text between the two cdef marks is, word for word, what Lua declares through the
 * FFI, so it holds only enums, opaque and plain structs and prototypes: no preprocessor, no inline, no struct by value.
 *
 * Conventions. A function that can fail returns 0 or a negative PS_E* code and leaves a message (ps_error_message);
 * outputs are untouched on failure. `_new` and `out` parameters give the caller a reference to release; `_get` lends.
 * Sizes: `numel` counts elements, `nbytes` counts bytes. Dimensions, tensors and ids count from 0; ranges are
 * half-open. A context and its tensors belong to one thread; loaders and files may be used from any one thread at a
 * time. */
#ifndef PS_H
#define PS_H
#include <stddef.h>
#include <stdint.h>
#include "ps_gen.h" /* printed from ops.def and errors.def: enum of errors, enum of ops, struct ps_attrs_<op> */

#ifdef __cplusplus
extern "C" {
#endif

/* @cdef */
enum { PS_MAX_DIMS = 8, PS_MAX_IN = 64, PS_MAX_OUT = 4, PS_MAX_ATTRS = 256 };
enum { PS_F32, PS_BF16, PS_F16, PS_F64, PS_I32, PS_I64, PS_U8, PS_BOOL, PS_DTYPE_COUNT };

typedef struct ps_ctx ps_ctx;
typedef struct ps_storage ps_storage;
typedef struct ps_node ps_node;

/* A tensor: a strided view of a storage. Scripts may read dtype_ .. stride_ (strides and offset in elements). */
typedef struct ps_tensor {
  int32_t dtype_, ndim, device_, flags;   /* `_`: scripts have a method of that name */
  int64_t numel_, offset;
  int64_t shape_[8];
  int64_t stride_[8];
  /* private */
  int32_t refs, node_out;
  ps_ctx *ctx;
  ps_storage *storage;
  ps_node *node;               /* what computed it, when a gradient may be asked for */
  struct ps_tensor *grad_;     /* of a leaf */
  int32_t uses, pad;           /* of a leaf: edges of tape nodes that backward has not passed */
  void *managed;               /* of a leaf: what an engine knows of this parameter, or NULL */
} ps_tensor;
enum { PS_T_REQUIRES_GRAD = 1, PS_T_GRAD_F32 = 2 };  /* GRAD_F32: gradients of this leaf are summed in fp32 */

/* -- errors: the last one of this thread ------------------------------------------------------------------------- */
const char *ps_error_message(void);
const char *ps_error_where(void);        /* file:line in the engine */
const char *ps_error_op(void);           /* the op that was running, or NULL */
const char *ps_error_name(int code);     /* "EINVAL" ... */
const char *ps_version(void);
const char *ps_abi_hash(void);           /* of this declaration text; the Lua half compares it */
/* Tests: `count` requests for memory fail, from number `nth` (from 0) on; nth -1 switches off. */
void ps_test_fail_alloc(int64_t nth, int64_t count);
int64_t ps_test_fail_alloc_left(void);   /* requests before the first failure; negative once one has failed */
/* Tests: entry i of a table of sizes ("ps_tensor") and offsets ("ps_tensor.grad_") as C has them; -1 past its end. */
int64_t ps_abi_size(int i, const char **name);

/* -- context ----------------------------------------------------------------------------------------------------- */
int ps_ctx_new(ps_ctx **out);
void ps_ctx_free(ps_ctx *ctx);           /* tensors still held stay valid headers without bytes */
int ps_device_count(ps_ctx *ctx);
const char *ps_device_name(ps_ctx *ctx, int device);                 /* "cpu", "ref", "meta" */
const char *ps_device_describe(ps_ctx *ctx, int device);             /* instruction set, threads, libraries in use */
int ps_device_find(ps_ctx *ctx, const char *name, int *out);
/* Bytes of a device's memory: in use by tensors, the most ever in use, held from the system, and the limit (0: none).
 */
typedef struct ps_memory_info { int64_t used, peak, reserved, limit; } ps_memory_info;
int ps_memory_get(ps_ctx *ctx, int device, ps_memory_info *out);
int ps_memory_set_limit(ps_ctx *ctx, int device, int64_t nbytes);
void ps_memory_reset_peak(ps_ctx *ctx, int device);
/* True once, when so many bytes were allocated outside any scope since the last call that a collection is due. */
int ps_collect_due(ps_ctx *ctx);

/* -- tensors ----------------------------------------------------------------------------------------------------- */
int64_t ps_dtype_size(int dtype);        /* bytes an element */
const char *ps_dtype_name(int dtype);    /* "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "bool" */
int ps_tensor_new(ps_ctx *ctx, int dtype, int device, int ndim, const int64_t *shape,
                  ps_tensor **out); /* not cleared */
void ps_tensor_retain(ps_tensor *t);
void ps_tensor_release(ps_tensor *t);
int ps_tensor_keep(ps_tensor *t);        /* outlives every scope, until released */
int ps_tensor_alive(const ps_tensor *t); /* 0 once a scope dropped its bytes */
int64_t ps_tensor_nbytes(const ps_tensor *t);        /* numel times element size */
int ps_tensor_is_contiguous(const ps_tensor *t);
/* Copies whole row-major contents between host memory and a contiguous tensor; nbytes must match exactly. */
int ps_tensor_write(ps_tensor *t, const void *src, int64_t nbytes);
int ps_tensor_read(const ps_tensor *t, void *dst, int64_t nbytes);
/* The same, element by element as doubles from flat (row-major) position `first`; for printing and item(). */
int ps_tensor_read_f64(const ps_tensor *t, int64_t first, int64_t numel, double *dst);
int ps_tensor_write_f64(ps_tensor *t, int64_t first, int64_t numel, const double *src);
int ps_tensor_to_device(ps_tensor *t, int device, ps_tensor **out); /* a copy, or t retained when it is there already */
/* Indices of elements that are not zero: int64 [count, ndim]; host devices only. */
int ps_tensor_nonzero(ps_tensor *t, ps_tensor **out);

/* -- ops --------------------------------------------------------------------------------------------------------- */
/* Runs op `op` (PS_OP_*) on n_in inputs (NULL for an absent optional one). attrs is the op's struct ps_attrs_<op>.
 * outputs has PS_MAX_OUT places; on entry one that is not NULL asks the op to write into that tensor (ops that say so).
 */
int ps_apply(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int64_t attrs_nbytes,
             ps_tensor **out);
/* Counts calls and kernel seconds of each op while on; switching on clears. */
int ps_profile(ps_ctx *ctx, int on);
int ps_profile_get(ps_ctx *ctx, int op, int64_t *calls, double *seconds);
int ps_op_kernel_device(ps_ctx *ctx, int device, int op);  /* the device whose kernel runs it there, or -1 */

/* -- scopes: the bytes of what was made inside and not kept are dropped at the end -------------------------------- */
int ps_scope_begin(ps_ctx *ctx, int64_t *id);
int ps_scope_end(ps_ctx *ctx, int64_t id, int n_keep, ps_tensor *const *keep);  /* ends inner ones left open, too */
int64_t ps_scope_depth(ps_ctx *ctx);

/* -- gradients --------------------------------------------------------------------------------------------------- */
int ps_grad_enabled(ps_ctx *ctx);
int ps_set_grad_enabled(ps_ctx *ctx, int enabled);          /* returns what it was */
int ps_tensor_require_grad(ps_tensor *t, int on);           /* leaves only */
ps_tensor *ps_tensor_get_grad(ps_tensor *t);                /* lent, or NULL */
int ps_tensor_set_grad(ps_tensor *t, ps_tensor *grad);      /* retains; NULL clears */
int ps_tensor_detach(ps_tensor *t, ps_tensor **out);        /* same bytes, no history */
/* A backward walk: begin, then next until it returns 0. 1: stopped at a recompute segment (see ps_segment_new); the
 * caller re-runs it and calls ps_backward_splice. A failed or abandoned walk is ended by ps_backward_end (always call
 * it). */
int ps_backward_begin(ps_ctx *ctx, ps_tensor *loss, ps_tensor *gradient);
int ps_backward_next(ps_ctx *ctx, int64_t *segment);
/* Hands the gradients of the stopped segment's outputs to the re-run's outputs; n must be the segment's. */
int ps_backward_splice(ps_ctx *ctx, int n, ps_tensor *const *out);
void ps_backward_end(ps_ctx *ctx);
/* A recompute segment: outputs computed without gradients become functions of `in` whose backward is a re-run.
 * `segment` is the caller's number for it; the inputs are kept alive until the walk has passed. */
void ps_segment_begin(ps_ctx *ctx);      /* before its function runs first: notes which parameters it reads */
int ps_segment_new(ps_ctx *ctx, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out, int64_t *segment);
void ps_segment_cancel(ps_ctx *ctx);     /* instead of ps_segment_new, when the function failed */
/* Number of a segment that will not be needed any more, or -1: lets the caller forget its function. */
int64_t ps_segment_reap(ps_ctx *ctx);

/* -- random numbers: Philox, keyed by seed ------------------------------------------------------------------------ */
/* seed; step (of the optimizer), op (counts dropouts in a forward) and sample (index of the batch's first sample)
 * address dropout; offset counts numbers drawn by ps.randn and friends. */
typedef struct ps_rng { uint64_t seed, offset, step, sample; uint32_t op, pad; } ps_rng;
ps_rng *ps_rng_get(ps_ctx *ctx);         /* lent; may be read and written */

/* -- safetensors -------------------------------------------------------------------------------------------------- */
typedef struct ps_st ps_st;
typedef struct ps_st_entry {
    int32_t dtype, ndim;
    int64_t shape[8];
    int64_t nbytes;
} ps_st_entry; /* dtype -1: a type we lack */
int ps_st_open(const char *path, ps_st **out);              /* maps the file and checks all of its header */
void ps_st_close(ps_st *st);
int ps_st_count(const ps_st *st);
const char *ps_st_name(const ps_st *st, int i);
int ps_st_find(const ps_st *st, const char *name);          /* index or -1 */
int ps_st_get(const ps_st *st, int i, ps_st_entry *out);
const char *ps_st_dtype_text(const ps_st *st, int i);       /* as the file spells it: "F32" ... */
int ps_st_meta_count(const ps_st *st);
const char *ps_st_meta_key(const ps_st *st, int i);
const char *ps_st_meta_value(const ps_st *st, int i);
const void *ps_st_data(const ps_st *st, int i);             /* lent until close; entry's nbytes of it */
typedef struct ps_stw ps_stw;                               /* a writer: declare all, begin, write each, commit */
int ps_stw_new(const char *path, ps_stw **out);
int ps_stw_meta(ps_stw *w, const char *key, const char *value);
int ps_stw_add(ps_stw *w, const char *name, int dtype, int ndim, const int64_t *shape);
int ps_stw_begin(ps_stw *w);                                /* reserves the whole size: a full disk is known here */
int ps_stw_write(ps_stw *w, const char *name, const void *data, int64_t nbytes);
int ps_stw_commit(ps_stw *w);                               /* fsync, rename over path, fsync the folder */
void ps_stw_free(ps_stw *w);                                /* without commit: removes the temporary file */

/* -- token shards and the loader ----------------------------------------------------------------------------------- */
typedef struct ps_tokens ps_tokens;
/* Maps a shard: llm.c's .bin (header), or raw tokens of `width` bytes (2 or 4; 1: a text file read as bytes).
 * width 0: by the header, which must then be there. */
int ps_tokens_open(const char *path, int width, ps_tokens **out);
void ps_tokens_close(ps_tokens *s);      /* loaders hold their own reference */
int64_t ps_tokens_count(const ps_tokens *s);
int ps_tokens_read(const ps_tokens *s, int64_t first, int64_t n, int32_t *dst);
typedef struct ps_tokw ps_tokw;          /* writes an llm.c shard, width 2 or 4, through a temporary file */
int ps_tokw_new(const char *path, int width, ps_tokw **out);
int ps_tokw_append(ps_tokw *w, const int32_t *ids, int64_t n);
int ps_tokw_append_bytes(ps_tokw *w, const void *bytes, int64_t n);   /* each byte is a token */
int ps_tokw_commit(ps_tokw *w);
void ps_tokw_free(ps_tokw *w);

typedef struct ps_loader ps_loader;
typedef struct ps_loader_config {
  int64_t batch, seq;        /* rows of seq tokens; targets are the next token of each */
  int64_t vocab;             /* a token >= vocab is an error that names file and place; 0: unchecked */
  int64_t first, last;       /* range of the concatenated tokens to use, half-open; last 0: to the end */
  uint64_t seed;
  int32_t shuffle;           /* 1: each epoch visits every window once, in a random order from a random start */
  int32_t ahead;             /* batches prepared ahead by the background thread, >= 1 */
} ps_loader_config;
typedef struct ps_loader_position { int64_t epoch, batch; } ps_loader_position;   /* the next batch to be given */
int ps_loader_new(int n, ps_tokens *const *shards, const ps_loader_config *config, ps_loader **out);
void ps_loader_free(ps_loader *l);
int64_t ps_loader_batches(const ps_loader *l);              /* full batches an epoch */
int ps_loader_next(ps_loader *l, int32_t *x,
                   int32_t *y); /* 1: given; 0: the epoch ended (the next call starts another) */
int ps_loader_get_position(ps_loader *l, ps_loader_position *out);
int ps_loader_set_position(ps_loader *l, const ps_loader_position *position);

/* -- files --------------------------------------------------------------------------------------------------------- */
int ps_file_write_atomic(const char *path, const void *data, int64_t nbytes);
int ps_file_fsync_dir(const char *path);
/* -- the process ----------------------------------------------------------------------------------------------------
 */
double ps_now(void);                     /* seconds of a monotonic clock */
int64_t ps_rss_peak(void);               /* bytes */
int ps_interrupts_install(void); /* from now on the first Ctrl-C or SIGTERM is counted, the next one ends the process */
void ps_interrupts_remove(void);
int ps_interrupts(void);                 /* how many were counted */
int ps_is_terminal(int fd);
int ps_terminal_columns(int fd);         /* 80 when unknown */
void ps_set_threads(int n);              /* compute threads */
int ps_threads(void);
/* @endcdef */

#ifdef __cplusplus
}
#endif
#endif
