/* SPDX-License-Identifier: BSD-3-Clause
 * Tensors, contexts, scopes and the op path, as the layers above mem/ see them. A context owns its devices, its memory
 * manager, the scope stack and the tape's walk. It is freed when it has been closed and no tensor header or node is
 * left. */
#ifndef PS_TENSOR_H
#define PS_TENSOR_H
#include "base/rank_call.h"
#include "base/step.h"
#include "offload/offload.h"
#include "mem/mem.h"
#include "tensor/optable.h"

/* At the end of a scope, storages that were made in it and not kept lose their bytes. The root scope never ends. */
struct ps_scope {
    ps_scope *parent;
    int64_t id;
    int modules;                  /* depth of modules when it began; its end also leaves the modules that were entered
                                   * since */
    ps_storage *first;
};

typedef struct ps_walk ps_walk;   /* grad/walk.c */

/* The hooks of an engine in its context: lower layers call an open engine only through these functions. */
typedef struct ps_hooks {
    void (*close)(ps_ctx *ctx);            /* the context is being closed: the engine ends and removes its hooks */
    /* op_begins: an op is about to pin its operands. op_failed: that op failed; it may be tried again. */
    void (*op_begins)(ps_ctx *ctx);
    void (*op_failed)(ps_ctx *ctx);
    /* A walk that reaches leaves with `managed` set begins. */
    int (*walk_begin)(ps_ctx *ctx);
    /* A managed leaf gets its first gradient. *out: the tensor to which the gradient must be written (lent), or NULL:
     * the op makes a tensor. */
    int (*grad_place)(ps_ctx *ctx, ps_tensor *leaf, ps_tensor **out);
    /* No node or segment of the tape will read or add to the leaf any more; grad_ may be NULL. */
    int (*grad_final)(ps_ctx *ctx, ps_tensor *leaf);
} ps_hooks;

typedef struct ps_engine ps_engine;   /* engine/engine.c */

/* The watched storages that a recompute segment has read. The segment is running for the first time. */
typedef struct ps_reads {
    ps_storage **list;
    int32_t n, capacity;
    bool on, failed;
} ps_reads;

enum { PS_MAX_GROUPS = 64 };

/* Work that runs concurrently with ops and may still write to tensors. close() is called when the context ends, before
 * its bytes are freed, and ends the work. */
typedef struct ps_guest {
    struct ps_guest *next, **link;          /* link NULL: not in the list of a context */
    void (*close)(struct ps_guest *g);
} ps_guest;

/* The state of a layer is in the struct named after it, and only that layer writes it (spec/source/layers_spec.lua).
 * Other layers read it, and change it by functions of its owner. */
struct ps_ctx {
    int64_t refs;                 /* 1 while the context is open, plus 1 for each tensor header and each tape node */
    int closed;
    int n_devices;
    ps_backend *devices[8];
    ps_rng rng;                   /* scripts have the same state (ps_rng_get) */
    const ps_step *step;          /* the step of the engine, or the idle step */
    ps_guest *guests;
    struct {
        ps_mem *now;              /* the memory that allocates now: `plain`, the engine's chunks, or that of a dry
                                   * run */
        ps_mem *plain;            /* mem/plain.c on every device; set once */
    } mem;                        /* tensor/tensor.c */
    struct {
        ps_mem *mem;              /* memory of dry runs, which only has addresses; NULL before the first dry run */
        ps_mem *real;             /* during a dry run: the value of mem.now before it; else NULL */
        ps_rank_calls calls;      /* calls between ranks in the dry run that is under way, or in the last one */
        /* [n_ops] the ops that have computed with gradients enabled, so those of the forward, in the dry run that is
         * under way, or in the last one. n_ops -1: there was no memory for the list */
        uint16_t *ops;
        int32_t n_ops, ops_capacity;
        struct ps_replay *replay;               /* set during a dry run of a pipeline (tensor/replay.h); else NULL */
        struct ps_replay *replay_kept;          /* the same object, which also exists between dry runs */
    } dry;                        /* tensor/tensor.c, tensor/replay.c */
    struct {
        ps_scope root, *now;      /* now: the innermost scope */
        int64_t next_id;
        int64_t nbytes;           /* of storages with contents outside chunks: in use, or waiting for Lua's collector */
        int64_t left;             /* nbytes after the last collection */
        int64_t used;             /* the largest `left` of the last collections */
        int64_t collect_at;       /* a collection is due when nbytes reaches this value */
    } scope;                      /* tensor/scope.c */
    struct {
        bool on;                  /* tensors that the tape saves are moved to the host */
        ps_away *away;            /* NULL: offloading was never on */
    } offload;                    /* tensor/tensor.c */
    struct { int32_t run; int64_t used[8]; } recorded;       /* bytes of each device in the last event of the record */
    struct {
        bool on, busy;            /* busy: anomaly mode itself reads values, and its own ops are not checked */
        bool scaled, overflowed;  /* the loss of this step was scaled; the scaled loss has caused infinities in
                                   * backward */
        bool pardons;             /* the next op is the one that scales the loss */
        bool had_nan, had_inf;    /* NaNs and infinities in the tensors that the op under way writes, before it ran */
        bool in_backward;         /* the gradient of a node is being computed: the gradient of op `of`, which was called
                                   * at `of_place` */
        int32_t of, of_module;
        int64_t of_place, place;  /* numbers that only the caller interprets; place: that of the next op */
        ps_anomaly_info found;
    } anomaly;                    /* tensor/anomaly.c */
    struct {
        bool grad_enabled;
        bool keep_cheap;          /* backward reads outputs of CHEAP ops as they were in forward */
        int64_t next_seq;         /* seq of the next node */
        ps_walk *walk;
        ps_reads reads;
        struct {
            int64_t *ids;         /* [n] recompute segments whose nodes were freed */
            int32_t n, live, capacity;            /* live: number of segments with nodes */
        } reaped;
    } tape;                       /* grad/ */
    struct {
        struct ps_group *groups[PS_MAX_GROUPS];   /* by number, or NULL (collectives/context.c) */
        /* Performs an op of several ranks; NULL until a group is made. A dry call only allocates memory; in a dry run
         * it is also recorded. */
        int (*perform)(ps_ctx *ctx, int device, ps_call *call);
    } ranks;                      /* collectives/, groups.c */
    struct {
        ps_engine *open;          /* or NULL */
        const ps_hooks *hooks;    /* NULL while there is no engine */
        struct {
            bool on;              /* the script is paused (ps_suspend); the other fields are what ps_resume restores */
            bool grad, offload, reads;
            ps_rng rng;
            int64_t scope;        /* the scope of ops during the pause: older scopes cannot end then */
        } suspended;
    } engine;                     /* engine/ */
};

enum { PS_SCOPE_MIN_NBYTES = 64 << 10 };       /* tensors below this size survive scopes: losses, means, indices */

/* -- tensor.c --------------------------------------------------------------------------------------------------- */
void ps_ctx_release(ps_ctx *ctx);
/* Raises PS_ESTATE: the action `what` is not possible until the paused script resumes. */
int ps_fail_suspended(const char *what);
void ps_guest_come(ps_ctx *ctx, ps_guest *g);                                /* g->close is set */
void ps_guest_leave(ps_guest *g);                                            /* may be called again */
int ps_ctx_add_device(ps_ctx *ctx, ps_backend *be);                          /* owns `be` afterwards; on failure closes
                                                                              * it */
int ps_tensor_new_meta(ps_ctx *ctx, int device, const ps_meta *meta, ps_tensor **out);   /* makes a contiguous tensor
                                                                                          * with a storage of its own */
int ps_tensor_view(ps_tensor *base, const ps_meta *meta, ps_tensor **out);   /* a view of base's storage, without
                                                                              * history */
int ps_tensor_check_alive(const ps_tensor *t);                               /* returns 0 or PS_ESTALE */
void ps_storage_release(ps_storage *s);                                      /* drops the reference of a header, or
                                                                              * of an entry of ps_reads */
void ps_storage_hold(ps_storage *s);
void ps_storage_unhold(ps_storage *s);
void ps_storage_drop(ps_storage *s);                                         /* a scope ends */
/* Called when the storage will not be read before backward. While activations are offloaded, moves it to the host. */
void ps_storage_leave(ps_ctx *ctx, ps_storage *s);
/* A hold together with a reference to the header: this is how the tape keeps a tensor. */
ps_tensor *ps_tensor_hold(ps_tensor *t);
void ps_tensor_unhold(ps_tensor *t);
/* True if the caller may overwrite the bytes or pass them on. This requires that the tensor is contiguous and not kept,
 * that the caller has the only reference to its header, and that the storage has no other header. */
bool ps_tensor_exclusive(const ps_tensor *t);
bool ps_meta_contiguous(const ps_meta *m);
bool ps_tensor_has_data(const ps_tensor *t);  /* false on meta and for tensors of a dry run */
/* Makes a contiguous tensor over a storage that already has its bytes. Takes over the caller's reference to the
 * storage. */
int ps_tensor_over(ps_ctx *ctx, ps_storage *s, const ps_meta *meta, int device, ps_tensor **out);
/* Begins and ends memory for a dry run, in which ops infer shapes, allocate, pin and record, but compute nothing
 * (step->dry). A storage made between begin and end has an address and no contents. */
int ps_dry_begin(ps_ctx *ctx);
void ps_dry_end(ps_ctx *ctx);
/* Adds calls to those of the dry run under way. */
int ps_dry_note_calls(ps_ctx *ctx, const ps_rank_call *list, int32_t n);
/* Adds an op to those of the forward of the dry run under way, if gradients are enabled. */
void ps_dry_note_op(ps_ctx *ctx, int op);
void ps_ctx_set_mem(ps_ctx *ctx, ps_mem *mem);    /* the memory that allocates from now on; NULL: plain memory */

/* -- scope.c ----------------------------------------------------------------------------------------------------- */
void ps_scope_add(ps_ctx *ctx, ps_storage *s); /* a new storage joins the innermost scope */
void ps_scope_unlink(ps_storage *s);
/* The storage no longer waits for Lua's collector: its bytes are gone, or they are in a chunk from now on. */
void ps_scope_uncount(ps_storage *s);
void ps_scope_adopt(ps_ctx *ctx, ps_storage *s);                             /* moves it to the root: no scope will drop
                                                                              * s */

/* -- anomaly.c --------------------------------------------------------------------------------------------------- */
/* Called before and after an op's kernel. given: the outputs that existed before the call, as a bit set. PS_ERANGE: the
 * op made a NaN or an infinity. */
int ps_anomaly_before(ps_ctx *ctx, const ps_opinfo *row, int n_in, ps_tensor *const *in, uint32_t given,
                      ps_tensor *const *out);
int ps_anomaly_after(ps_ctx *ctx, const ps_opinfo *row, int op, int n_in, ps_tensor *const *in, const void *attrs,
                     ps_tensor *const *out);
/* From now on, ops compute the gradient of an op that was called at a place in a module. op < 0: they do not. */
void ps_anomaly_in_backward(ps_ctx *ctx, int32_t op, int64_t place, int32_t module);

/* -- dispatch.c -------------------------------------------------------------------------------------------------- */
/* Does the same as ps_apply, but also returns outputs marked `~`. */
int ps_apply_all(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, ps_tensor **out);
/* For an op of several ranks: runs a kernel of the call's device on parts of the call's operands. A dry part only
 * allocates and frees the kernel's scratch memory. PS_ENOMEM, PS_EUNSUP, the kernel's errors. */
int ps_call_part(ps_call *whole, ps_call *part);

/* -- grad/tape.c: called by dispatch ------------------------------------------------------------------------------- */
/* Returns the inputs that take part in the gradient, as a bit set; 0 while gradients are off. Inputs above 31 share bit
 * 31. */
uint32_t ps_tape_needs(const ps_ctx *ctx, int n_in, ps_tensor *const *in);
bool ps_tape_wants(const ps_tensor *t);
/* Makes the op's node and attaches the outputs to it. */
int ps_tape_record(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int n_out, ps_tensor **out);
void ps_node_release(ps_node *node);
void ps_hook_release(ps_node *node);   /* called when the leaf to which the node's hooks belong is freed */
void ps_reads_add(ps_ctx *ctx, ps_storage *s);
bool ps_reads_set(ps_ctx *ctx, bool on);   /* sets whether reads are recorded from now on; returns the setting before */
void ps_tape_free(ps_ctx *ctx);            /* frees the lists of the tape at the end of the context */
void ps_walk_reset(ps_ctx *ctx);   /* abandons the walk under way and the weight gradients that were put off */
void ps_walk_end(ps_ctx *ctx);
#endif
