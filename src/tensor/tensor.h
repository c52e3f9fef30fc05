/* SPDX-License-Identifier: BSD-3-Clause
 * Tensors, contexts, scopes and the op path, as the layers above mem/ see them. A context owns its devices, its memory
 * manager, the scope stack and the tape's walk. A closed context is freed when its last tensor header and its last node
 * have been freed. */
#ifndef PS_TENSOR_H
#define PS_TENSOR_H
#include "base/rank_call.h"
#include "base/step.h"
#include "offload/offload.h"
#include "mem/mem.h"
#include "tensor/optable.h"

/* A scope. When a scope ends, the storages that were made in it lose their bytes, unless they are kept. The root scope
 * never ends. */
struct ps_scope {
    ps_scope *parent;
    int64_t id;
    int modules;                  /* depth of modules when the scope began; when the scope ends, modules that were
                                   * entered in it are left */
    ps_storage *first;
};

typedef struct ps_walk ps_walk;   /* grad/walk.c */

/* The hooks of the engine. They are the only way in which lower layers call an open engine. */
typedef struct ps_hooks {
    void (*close)(ps_ctx *ctx);            /* called when the context is closed: the engine ends and removes its
                                            * hooks */
    /* op_begins is called before an op pins its operands. op_failed is called if that op fails. The op may then be
     * repeated. */
    void (*op_begins)(ps_ctx *ctx);
    void (*op_failed)(ps_ctx *ctx);
    /* Called when a walk begins that can reach leaves with `managed` set. */
    int (*walk_begin)(ps_ctx *ctx);
    /* Called when a managed leaf gets its first gradient. Sets *out to the tensor (lent) that will contain the
     * gradient, or to NULL if the op must make this tensor. */
    int (*grad_place)(ps_ctx *ctx, ps_tensor *leaf, ps_tensor **out);
    /* Called when no remaining node or segment of the tape reads the leaf or adds to its gradient. grad_ can be
     * NULL. */
    int (*grad_final)(ps_ctx *ctx, ps_tensor *leaf);
} ps_hooks;

typedef struct ps_engine ps_engine;   /* engine/engine.c */

/* The watched storages that a recompute segment's function has read so far in its first run. */
typedef struct ps_reads {
    ps_storage **list;
    int32_t n, capacity;
    bool on, failed;
} ps_reads;

enum { PS_MAX_GROUPS = 64 };

/* Work that runs at the same time as ops and can still write to tensors. When the context ends, close() ends this work
 * before the bytes of the context are freed. */
typedef struct ps_guest {
    struct ps_guest *next, **link;          /* link is NULL if the guest is not in the list of a context */
    void (*close)(struct ps_guest *g);
} ps_guest;

/* A context. The state of each layer is in the struct that has the layer's name. Only this layer writes to the struct
 * (spec/source/layers_spec.lua). Other layers only read the struct, and call the owner's functions to change it. */
struct ps_ctx {
    int64_t refs;                 /* 1 while the context is open, plus 1 for each tensor header and each tape node */
    int closed;
    int n_devices;
    ps_backend *devices[8];
    ps_rng rng;                   /* also accessible to scripts (ps_rng_get) */
    const ps_step *step;          /* the engine's step, or the idle step */
    ps_guest *guests;
    struct {
        ps_mem *now;              /* manager for new memory: `plain`, the manager of the engine's chunks, or
                                   * `dry.mem` */
        ps_mem *plain;            /* the manager of mem/plain.c for all devices, set once */
    } mem;                        /* tensor/tensor.c */
    struct {
        ps_mem *mem;              /* manager of dry runs, whose memory has addresses but no bytes; NULL before the first
                                   * dry run */
        ps_mem *real;             /* during a dry run: the value that mem.now had before; otherwise NULL */
        ps_rank_calls calls;      /* calls between ranks in the current or last dry run */
        /* [n_ops]: forward ops with gradients enabled, in the current or last dry run; n_ops is -1 if an allocation
         * failed */
        uint16_t *ops;
        int32_t n_ops, ops_capacity;
        struct ps_replay *replay;               /* set during a dry run of a pipeline (tensor/replay.h), otherwise
                                                 * NULL */
        struct ps_replay *replay_kept;          /* the object for `replay`, which is kept between dry runs */
    } dry;                        /* tensor/tensor.c, tensor/replay.c */
    struct {
        ps_scope root, *now;      /* now: the innermost scope */
        int64_t next_id;
        int64_t nbytes;           /* number of bytes outside chunks that have contents; they are in use, or wait for
                                   * Lua's collector */
        int64_t left;             /* nbytes after the last collection */
        int64_t used;             /* the largest `left` of recent collections; falls slowly */
        int64_t collect_at;       /* a collection is due when nbytes reaches this value */
    } scope;                      /* tensor/scope.c */
    struct {
        bool on;                  /* whether tensors that the tape saves are moved to the host */
        ps_away *away;            /* NULL if offloading was never on */
    } offload;                    /* tensor/tensor.c */
    struct { int32_t run; int64_t used[8]; } recorded;       /* bytes of each device in the last event of the record */
    struct {
        bool on, busy;            /* busy: anomaly mode is reading values, and the ops that it runs are not checked */
        bool scaled, overflowed;  /* scaled: the step's loss is scaled. overflowed: the scale has caused infinities in
                                   * backward */
        bool pardons;             /* the next op scales the loss */
        bool had_nan, had_inf;    /* outputs of the running op had NaNs or infinities before the op ran */
        /* The gradient of the op `of` is being computed. This op was called at `of_place`. */
        bool in_backward;
        int32_t of, of_module;
        int64_t of_place, place;  /* of_place: place of the call of `of`. place: place of the call of the next op. A
                                   * place is a number that the caller has chosen */
        ps_anomaly_info found;
    } anomaly;                    /* tensor/anomaly.c */
    struct {
        bool grad_enabled;
        bool keep_cheap;          /* whether outputs of CHEAP ops are kept for backward instead of being recomputed */
        int64_t next_seq;         /* seq of the next node */
        ps_walk *walk;
        ps_reads reads;
        struct {
            int64_t *ids;         /* [n] ids of recompute segments whose nodes were freed */
            int32_t n, live, capacity;            /* live: number of segments that have nodes */
        } reaped;
    } tape;                       /* grad/ */
    struct {
        struct ps_group *groups[PS_MAX_GROUPS];   /* groups by index, or NULL (collectives/context.c) */
        /* Performs an op of several ranks. NULL until a group is made. For a dry call, it only allocates memory and, in
         * a dry run, records the call. */
        int (*perform)(ps_ctx *ctx, int device, ps_call *call);
    } ranks;                      /* collectives/, groups.c */
    struct {
        ps_engine *open;          /* NULL if no engine is open */
        const ps_hooks *hooks;    /* NULL if no engine is open */
        struct {
            bool on;              /* the script is paused (ps_suspend); ps_resume restores the fields below */
            bool grad, offload, reads;
            ps_rng rng;
            int64_t scope;        /* scope of ops during the pause; outer scopes cannot end during the pause */
        } suspended;
    } engine;                     /* engine/ */
};

enum { PS_SCOPE_MIN_NBYTES = 64 << 10 };       /* smaller tensors (losses, means, indices) outlive their scopes */

/* -- tensor.c --------------------------------------------------------------------------------------------------- */
void ps_ctx_release(ps_ctx *ctx);
/* Sets the error PS_ESTATE: `what` is impossible until the paused script resumes. Returns PS_ESTATE. */
int ps_fail_suspended(const char *what);
void ps_guest_come(ps_ctx *ctx, ps_guest *g);                                /* adds a guest; its `close` must be set */
void ps_guest_leave(ps_guest *g);                                            /* removes a guest; can be called again */
/* Adds a device. The context owns `be` from then on. On failure, `be` is closed. */
int ps_ctx_add_device(ps_ctx *ctx, ps_backend *be);
int ps_tensor_new_meta(ps_ctx *ctx, int device, const ps_meta *meta, ps_tensor **out);   /* makes a contiguous tensor
                                                                                          * that has its own storage */
int ps_tensor_view(ps_tensor *base, const ps_meta *meta, ps_tensor **out);   /* makes a view of base's storage,
                                                                              * without history */
int ps_tensor_check_alive(const ps_tensor *t);                               /* returns 0 or PS_ESTALE */
void ps_storage_release(ps_storage *s);                                      /* releases a reference that a header or an
                                                                              * entry of ps_reads had */
void ps_storage_hold(ps_storage *s);
void ps_storage_unhold(ps_storage *s);
void ps_storage_drop(ps_storage *s);                                         /* drops the storage at the end of its
                                                                              * scope */
/* Called when s will not be read until backward. If activations are offloaded, moves s to the host. */
void ps_storage_leave(ps_ctx *ctx, ps_storage *s);
/* Keeps a tensor for the tape: holds its storage and adds a reference to its header. */
ps_tensor *ps_tensor_hold(ps_tensor *t);
void ps_tensor_unhold(ps_tensor *t);
/* Returns true if the caller may overwrite the tensor's bytes or pass them on. This requires that t is contiguous, that
 * it is not kept, that it is the only header of its storage, and that there is only one reference to it. */
bool ps_tensor_exclusive(const ps_tensor *t);
bool ps_meta_contiguous(const ps_meta *m);
bool ps_tensor_has_data(const ps_tensor *t);  /* returns false on meta and for the tensors of a dry run */
/* Makes a contiguous tensor for a storage that already has its bytes. The caller's reference to the storage then
 * belongs to the tensor. */
int ps_tensor_over(ps_ctx *ctx, ps_storage *s, const ps_meta *meta, int device, ps_tensor **out);
/* Begin and end a dry run's use of memory. Between these calls, ops infer shapes, allocate, pin and record, but compute
 * nothing (step->dry). New storages have an address, but no contents. */
int ps_dry_begin(ps_ctx *ctx);
void ps_dry_end(ps_ctx *ctx);
/* Appends calls to the list of calls of the current dry run. */
int ps_dry_note_calls(ps_ctx *ctx, const ps_rank_call *list, int32_t n);
/* Appends an op to the list of forward ops of the current dry run, if gradients are enabled. */
void ps_dry_note_op(ps_ctx *ctx, int op);
void ps_ctx_set_mem(ps_ctx *ctx, ps_mem *mem);    /* sets the manager for new memory; NULL means plain memory */

/* -- scope.c ----------------------------------------------------------------------------------------------------- */
void ps_scope_add(ps_ctx *ctx, ps_storage *s); /* adds a new storage to the innermost scope */
void ps_scope_unlink(ps_storage *s);
/* Called when the storage no longer waits for Lua's collector, because its bytes were freed or moved to a chunk. */
void ps_scope_uncount(ps_storage *s);
void ps_scope_adopt(ps_ctx *ctx, ps_storage *s);                             /* moves s to the root scope, so that no
                                                                              * scope drops it */

/* -- anomaly.c --------------------------------------------------------------------------------------------------- */
/* Called before and after an op's kernel. given: bit set of the outputs that existed before the op. ps_anomaly_after
 * returns PS_ERANGE if the op made a NaN or an infinity. */
int ps_anomaly_before(ps_ctx *ctx, const ps_opinfo *row, int n_in, ps_tensor *const *in, uint32_t given,
                      ps_tensor *const *out);
int ps_anomaly_after(ps_ctx *ctx, const ps_opinfo *row, int op, int n_in, ps_tensor *const *in, const void *attrs,
                     ps_tensor *const *out);
/* Sets the op whose gradient is computed next, and the place and the module in which the op was called. A negative op
 * means that no gradient is computed. */
void ps_anomaly_in_backward(ps_ctx *ctx, int32_t op, int64_t place, int32_t module);

/* -- dispatch.c -------------------------------------------------------------------------------------------------- */
/* Like ps_apply, but also returns the outputs that are marked `~`. */
int ps_apply_all(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, ps_tensor **out);
/* Runs a kernel of the device of `whole` on slices of the operands of `whole`. Ops of several ranks use this function.
 * A dry call only allocates and frees workspace. Returns PS_ENOMEM, PS_EUNSUP, or an error of the kernel. */
int ps_call_part(ps_call *whole, ps_call *part);

/* -- grad/tape.c: functions that dispatch.c uses ------------------------------------------------------------------- */
/* Returns the bit set of the inputs that need a gradient, or 0 while gradients are off. Input 31 and all later inputs
 * share bit 31. */
uint32_t ps_tape_needs(const ps_ctx *ctx, int n_in, ps_tensor *const *in);
bool ps_tape_wants(const ps_tensor *t);
/* Makes the node of an op whose outputs exist but have no values yet. This function allocates all memory that the tape
 * needs for the op. So an op that has run need not be repeated for lack of memory for the tape. Returns PS_ENOMEM. */
int ps_tape_prepare(ps_ctx *ctx, int op, int n_in, const void *attrs, int n_out, ps_tensor **out, ps_node **node);
/* Connects a prepared node with the op's inputs and outputs after the op has run. The caller's reference to the node
 * then belongs to the tape. */
void ps_tape_record(ps_node *node, ps_tensor *const *in, ps_tensor **out);
void ps_node_release(ps_node *node);
void ps_hook_release(ps_node *node);   /* called when a leaf with hooks is freed; `node` is the node of its hooks */
void ps_reads_add(ps_ctx *ctx, ps_storage *s);
bool ps_reads_set(ps_ctx *ctx, bool on);   /* switches the recording of reads on or off; returns the previous state */
void ps_tape_free(ps_ctx *ctx);            /* frees the tape's lists when the context ends */
void ps_walk_reset(ps_ctx *ctx);   /* abandons the current walk and the deferred weight gradients */
void ps_walk_end(ps_ctx *ctx);
#endif
