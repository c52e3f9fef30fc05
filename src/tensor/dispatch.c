/* SPDX-License-Identifier: BSD-3-Clause
 * The op path: the sequence of steps that performs an op. Only this file combines ops, memory, devices and gradients.
 *   row -> check inputs -> common type, contiguity -> infer shapes -> outputs -> pin -> kernel -> unpin -> tape */
#include "tensor/tensor.h"
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"
#include "tensor/replay.h"

typedef struct ps_scratch_list ps_scratch_list;

/* The call of an op. owned: bit set of inputs that the call made itself (casts, copies) and that it must release. */
typedef struct apply {
    ps_ctx *ctx;
    const ps_opinfo *row;
    int op, n_in, device;
    ps_tensor *in[PS_MAX_IN];
    uint64_t owned;
    union { char bytes[PS_MAX_ATTRS]; double align; } attrs;
    ps_meta meta[PS_MAX_OUT];
    ps_tensor *out[PS_MAX_OUT];
    uint32_t given;                       /* bit set of the outputs that the caller passed */
    ps_scratch_list *scratch;
    bool ticked;                          /* whether the engine was notified that this op begins (op_begins) */
    bool known;                           /* in a script's dry run: whether the op is computed, because its inputs are
                                           * known (is_known) */
    ps_node *node;                        /* the op's node until the tape records it; NULL if no gradient is needed */
} apply;

struct ps_scratch_list { ps_scratch_list *next; void *handle; };

/* -- inputs -------------------------------------------------------------------------------------------------------- */
static const char *input_name(const ps_opinfo *row, int i, char *buf, size_t size)
{
    if (row->n_in < 0 || i >= 8) snprintf(buf, size, "%d", i);
    else snprintf(buf, size, "%.*s", (int)strcspn(row->in_name[i], " ?*"), row->in_name[i]);
    return buf;
}

static int check_inputs(apply *a, const ps_tensor *const *out)
{
    const ps_opinfo *row = a->row;
    char name[32];
    if (row->n_in >= 0 && a->n_in != row->n_in)
        return ps_fail(PS_EINVAL, "%s takes %d inputs (%s), but got %d", row->name, row->n_in, row->ins, a->n_in);
    if (a->n_in < 1 || a->n_in > PS_MAX_IN)
        return ps_fail(PS_EINVAL, "%s takes 1 to %d inputs, but got %d", row->name, PS_MAX_IN, a->n_in);
    a->device = -1;
    for (int i = 0; i < a->n_in; i++) {
        ps_tensor *t = a->in[i];
        if (!t) {
            if (row->optional_in >> i & 1) continue;
            return ps_fail(PS_EINVAL, "%s: input %s is missing", row->name, input_name(row, i, name, sizeof name));
        }
        if (t->ctx != a->ctx) return ps_fail(PS_EINVAL, "%s: input %s belongs to another context", row->name,
                                             input_name(row, i, name, sizeof name));
        PS_TRY(ps_tensor_check_alive(t));
        if (t->storage->engine.taken && !(t->flags & PS_T_SLOT))
            return ps_fail(PS_ESTATE, "%s: a parameter was used between backward and optimizer:step(), while its "
                           "gradient is stored in its place; call optimizer:step() or optimizer:zero_grad() first",
                           row->name);
        if (a->ctx->tape.reads.on && t->storage->engine.watched) ps_reads_add(a->ctx, t->storage);
        if (a->device < 0) a->device = t->device_;
        else if (a->device != t->device_)
            return ps_fail(PS_EINVAL,
                           "%s: inputs are on different devices: %s and %s (input %s); move one with :to(device)",
                           row->name, a->ctx->devices[a->device]->name, a->ctx->devices[t->device_]->name,
                           input_name(row, i, name, sizeof name));
    }
    for (int i = 0; i < row->n_out; i++)
        if (out[i]) {
            PS_TRY(ps_tensor_check_alive(out[i]));
            if (out[i]->device_ != a->device || !ps_tensor_is_contiguous(out[i]))
                return ps_fail(PS_EINVAL, "%s: the given output must be contiguous and on the inputs' device",
                               row->name);
            a->given |= 1u << i;
            a->out[i] = (ps_tensor *)(uintptr_t)out[i];
        }
    return 0;
}

/* PyTorch's type promotion. The result has the highest category of the operands' types (bool < integer < float). Within
 * a category, the types of tensors with dimensions have priority over the types of tensors without dimensions. */
static int category(int dtype) { return ps_dtype_is_float(dtype) ? 2 : dtype == PS_BOOL ? 0 : 1; }

static int wider(int a, int b)
{
    static const int8_t int_rank[PS_DTYPE_COUNT] = { [PS_BOOL] = 0, [PS_U8] = 1, [PS_I32] = 2, [PS_I64] = 3 };
    if (a == b) return a;
    if (category(a) != category(b)) return category(a) > category(b) ? a : b;
    if (category(a) == 2) {
        if (a == PS_F64 || b == PS_F64) return PS_F64;
        return PS_F32;                                       /* two different types among fp32, bf16 and fp16 */
    }
    return int_rank[a] > int_rank[b] ? a : b;
}

static int common_dtype(const apply *a, int first)
{
    int with_dims = -1, scalar = -1;
    for (int i = first; i < a->n_in; i++) {
        int *slot = a->in[i]->ndim > 0 ? &with_dims : &scalar;
        *slot = *slot < 0 ? a->in[i]->dtype_ : wider(*slot, a->in[i]->dtype_);
    }
    if (with_dims < 0) return scalar;
    if (scalar < 0 || category(scalar) <= category(with_dims)) return with_dims;
    return scalar;
}

static int replace_input(apply *a, int i, int op, const void *attrs)
{
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_apply_all(a->ctx, op, 1, &a->in[i], attrs, out));
    if (a->owned >> i & 1) ps_tensor_release(a->in[i]);
    a->in[i] = out[0];
    a->owned |= 1ull << i;
    return 0;
}

/* Rejects a write to parameters while the script is paused within a step. Otherwise the step would use both old and new
 * values. Between steps, scripts may write to parameters. */
static int check_suspended(const apply *a)
{
    const ps_ctx *ctx = a->ctx;
    if (ctx->engine.open && !ctx->step->is.open) return 0;
    int n = !(a->row->flags & PS_OPF_INPLACE) ? 0 : a->row->n_in < 0 ? a->n_in : 1;
    for (int i = 0; i < n; i++)
        if (a->in[i] && a->in[i]->storage->tape.trained) return ps_fail_suspended("to write into a parameter");
    for (int i = 0; i < a->row->n_out; i++)
        if (a->given >> i & 1 && a->out[i]->storage->tape.trained)
            return ps_fail_suspended("to write into a parameter");
    return 0;
}

/* Returns true if two tensors may overlap in memory. Compares only the tensors' ranges of addresses, from the first to
 * the last element. */
static bool may_overlap(const ps_tensor *a, const ps_tensor *b)
{
    if (a->storage != b->storage || a->numel_ == 0 || b->numel_ == 0) return false;
    const ps_tensor *t[2] = { a, b };
    int64_t last[2] = { a->offset, b->offset };              /* strides are never negative, so the sum below is the
                                                              * position of the last element */
    for (int k = 0; k < 2; k++)
        for (int d = 0; d < t[k]->ndim; d++) last[k] += (t[k]->shape_[d] - 1) * t[k]->stride_[d];
    return a->offset <= last[1] && b->offset <= last[0];
}

/* Returns true if every element of a is stored at the same address as the corresponding element of b. */
static bool same_elements(const ps_tensor *a, const ps_tensor *b)
{
    bool same = a->offset == b->offset && a->dtype_ == b->dtype_ && ps_same_shape(a, b);
    for (int d = 0; same && d < a->ndim; d++) same = a->shape_[d] == 1 || a->stride_[d] == b->stride_[d];
    return same;
}

/* Prepares an op that writes in place. If an input overlaps the destination, the input is copied, so that the op never
 * reads its own results. No two elements of the destination may share memory, except for fill_, which writes the same
 * value to all elements. */
static int prepare_in_place(apply *a)
{
    const ps_tensor *dst = a->in[0];
    ps_attrs_contiguous none = { 0 };
    for (int d = 0; d < dst->ndim && a->op != PS_OP_fill_; d++)
        if (dst->stride_[d] == 0 && dst->shape_[d] > 1 && dst->numel_ > 0)
            return ps_fail(PS_EINVAL, "%s: the tensor to write into is expanded: several of its elements share "
                           "their bytes; write into the original tensor, or into a :clone()", a->row->name);
    for (int i = 1; i < a->n_in; i++)
        if (a->in[i] && may_overlap(dst, a->in[i]) && !same_elements(dst, a->in[i]))
            PS_TRY(replace_input(a, i, PS_OP_contiguous, &none));
    return 0;
}

static int prepare_inputs(apply *a)
{
    unsigned flags = a->row->flags;
    if (flags & PS_OPF_INPLACE && a->row->n_in >= 0) PS_TRY(prepare_in_place(a));
    if (flags & PS_OPF_PROMOTE) {
        int first = a->op == PS_OP_where ? 1 : 0;
        ps_attrs_cast cast = { .dtype = common_dtype(a, first) };
        for (int i = first; i < a->n_in; i++)
            if (a->in[i]->dtype_ != cast.dtype) PS_TRY(replace_input(a, i, PS_OP_cast, &cast));
    }
    if (flags & (PS_OPF_STRIDED | PS_OPF_VIEW)) return 0;
    ps_attrs_contiguous none = { 0 };
    for (int i = 0; i < a->n_in; i++) {
        ps_tensor *t = a->in[i];
        if (!t) continue;
        bool fine = flags & PS_OPF_ROWS ? t->ndim == 0 || t->shape_[t->ndim - 1] == 1 || t->stride_[t->ndim - 1] == 1
                                        : ps_tensor_is_contiguous(t);
        if (fine) continue;
        if ((flags & PS_OPF_INPLACE) && i == 0)
            return ps_fail(PS_EINVAL, "%s needs a contiguous tensor to write into", a->row->name);
        PS_TRY(replace_input(a, i, PS_OP_contiguous, &none));
    }
    return 0;
}

/* -- outputs ------------------------------------------------------------------------------------------------------- */
static int check_given(const apply *a, int i)
{
    const ps_tensor *t = a->out[i];
    const ps_meta *m = &a->meta[i];
    bool same = t->ndim == m->ndim && !memcmp(t->shape_, m->shape, sizeof(int64_t) * (size_t)m->ndim);
    if (same && ps_dtype_is_float(t->dtype_) == ps_dtype_is_float(m->dtype)) return 0;
    char x[160], y[160];
    return ps_fail(PS_EINVAL, "%s: the given output has shape %s (%s); it must have shape %s (%s)", a->row->name,
                   ps_shape_text(t->ndim, t->shape_, x, sizeof x), ps_dtype_name(t->dtype_),
                   ps_shape_text(m->ndim, m->shape, y, sizeof y), ps_dtype_name(m->dtype));
}

static int make_outputs(apply *a)
{
    if (a->row->flags & PS_OPF_INPLACE) {
        a->out[0] = a->in[0];
        ps_tensor_retain(a->out[0]);
        return 0;
    }
    int device = a->device;
    if (a->row->flags & PS_OPF_MOVE) {
        device = ((const ps_attrs_to_device *)a->attrs.bytes)->device;
        if (device < 0 || device >= a->ctx->n_devices) return ps_fail(PS_EINVAL, "there is no device %d", device);
    }
    for (int i = 0; i < a->row->n_out; i++) {
        if (a->meta[i].ndim < 0) continue;
        if (a->given >> i & 1) {
            PS_TRY(check_given(a, i));
            continue;
        }
        if (a->row->flags & PS_OPF_VIEW) PS_TRY(ps_tensor_view(a->in[0], &a->meta[i], &a->out[i]));
        else PS_TRY(ps_tensor_new_meta(a->ctx, device, &a->meta[i], &a->out[i]));
    }
    return 0;
}

/* -- kernel -------------------------------------------------------------------------------------------------------- */
/* Adds the number of bytes in use on the op's device to the event record, if the number has changed. The chunk manager
 * does the same for the tiers. */
static void record_memory(const apply *a, int64_t now)
{
    ps_memory_info info;
    ps_ctx *ctx = a->ctx;
    if (ctx->devices[a->device]->no_data || ctx->engine.hooks) return;
    if (ctx->mem.now->table->info(ctx->mem.now, a->device, &info) < 0) return;
    if (ctx->recorded.run == ps_record_run && ctx->recorded.used[a->device] == info.used) return;
    ctx->recorded.run = ps_record_run;
    ctx->recorded.used[a->device] = info.used;
    ps_record_put((ps_record_event){ .kind = PS_REC_DEVICE, .to = (uint8_t)a->device, .flops = info.used,
                                     .begin_ns = now, .end_ns = now });
}

static void *scratch(ps_call *call, size_t nbytes)
{
    apply *a = call->owner;
    ps_mem *mem = a->ctx->mem.now;
    ps_scratch_list *entry = ps_alloc(sizeof *entry);
    void *p = NULL;
    if (!entry || mem->table->scratch(mem, a->device, (int64_t)nbytes, &entry->handle, &p) < 0) {
        if (!entry) ps_fail_nomem(sizeof *entry);
        ps_free(entry);
        return NULL;
    }
    entry->next = a->scratch;
    a->scratch = entry;
    if (a->ctx->dry.replay) ps_replay_take(a->ctx, a->device, (int64_t)nbytes);
    if (ps_record_on()) record_memory(a, ps_record_clock());
    return p;
}

static void scratch_free(apply *a)
{
    while (a->scratch) {
        ps_scratch_list *entry = a->scratch;
        a->scratch = entry->next;
        a->ctx->mem.now->table->scratch_free(a->ctx->mem.now, a->device, entry->handle);
        if (a->ctx->dry.replay) ps_replay_give(a->ctx, a->device);
        ps_free(entry);
    }
}

static int pin_view(apply *a, ps_tensor *t, unsigned access, ps_view *v)
{
    if (!t) {
        *v = (ps_view){ .ndim = -1 };
        return 0;
    }
    void *p = NULL;
    if (ps_storage_is_of(t->storage, a->ctx->dry.mem) && !a->ctx->step->dry)
        return ps_fail(PS_ESTALE, "%s: an input was made in a dry run and has no contents; make it again in each step",
                       a->row->name);
    PS_TRY(ps_storage_pin(t->storage, t->device_, access, &p));
    if (a->ctx->dry.replay) ps_replay_pin(a->ctx, t->storage, t->device_, access);
    v->data = p ? (char *)p + t->offset * ps_dtype_bytes(t->dtype_) : NULL;
    v->dtype = t->dtype_;
    v->ndim = t->ndim;
    v->numel = t->numel_;
    memcpy(v->shape, t->shape_, sizeof v->shape);
    memcpy(v->stride, t->stride_, sizeof v->stride);
    return 0;
}

static void unpin(ps_tensor *t)
{
    if (!t) return;
    ps_storage_unpin(t->storage, t->device_);
    if (t->ctx->dry.replay) ps_replay_unpin(t->ctx, t->storage, t->device_);
}

/* Allocates and frees the workspace that the kernel of a call would allocate. The kernel does not run. */
static int try_scratch(apply *a, ps_backend *be, const ps_call *call)
{
    int64_t nbytes = be->scratch_nbytes ? be->scratch_nbytes(be, call) : 0;
    void *handle, *p;
    if (nbytes <= 0) return 0;
    PS_TRY(a->ctx->mem.now->table->scratch(a->ctx->mem.now, a->device, nbytes, &handle, &p));
    a->ctx->mem.now->table->scratch_free(a->ctx->mem.now, a->device, handle);
    if (a->ctx->dry.replay) ps_replay_take(a->ctx, a->device, nbytes), ps_replay_give(a->ctx, a->device);
    return 0;
}

static int of_ranks(apply *a, ps_call *call);

/* Allocates and frees the op's workspace, so that the peak of a dry run includes the workspace. If the op is one of
 * several ranks, also records its calls. */
static int dry_scratch(apply *a, ps_backend *be, ps_view *in, ps_view *out)
{
    ps_call call = { .op = a->op, .n_in = a->n_in, .n_out = a->row->n_out, .in = in, .out = out,
                     .attrs = a->attrs.bytes, .scratch = scratch, .owner = a, .dry = true };
    if (!(a->row->flags & PS_OPF_RANKS)) return try_scratch(a, be, &call);
    int rc = of_ranks(a, &call);
    scratch_free(a);
    return rc;
}

/* Performs an op with the flag MOVE, which copies contents from one device to another. */
static int move_bytes(apply *a, const ps_view *in, const ps_view *out)
{
    ps_backend *from = a->ctx->devices[a->device], *to = a->ctx->devices[a->out[0]->device_];
    size_t nbytes = (size_t)(in->numel * ps_dtype_bytes(in->dtype));
    if (nbytes == 0 || to->no_data) return 0;
    if (from->no_data) return ps_fail(PS_EUNSUP, "tensors of device %s have no data to copy", from->name);
    if (!from->is_host && !to->is_host)
        return ps_fail(PS_EUNSUP, "%s: a tensor cannot be copied directly from %s to %s; copy it to the host first",
                       a->row->name, from->name,
                       to->name);
    if (from->copy_out && !from->is_host) return from->copy_out(from, out->data, in->data, nbytes);
    if (to->copy_in && !to->is_host) return to->copy_in(to, out->data, in->data, nbytes);
    memcpy(out->data, in->data, nbytes);
    return 0;
}

/* Performs an op with the flag RANKS, which communicates with other ranks. */
static int of_ranks(apply *a, ps_call *call)
{
    if (a->ctx->devices[a->device]->no_data || (call->dry && !a->ctx->ranks.perform)) return 0;
    if (!a->ctx->ranks.perform)
        return ps_fail(PS_ESTATE, "there is no group of ranks; make it with ps.init_distributed");
    return a->ctx->ranks.perform(a->ctx, a->device, call);
}

/* Runs the kernel of the device. If it does not support the call, runs the kernel of the first fallback that supports
 * the call. */
static int run_chain(apply *a, ps_backend *be, ps_call *call)
{
    int rc = PS_EUNSUP;
    for (; be && rc == PS_EUNSUP; be = be->fallback) {
        if (be->kernel[call->op]) rc = be->kernel[call->op](call);
        scratch_free(a);
    }
    return rc;
}

/* Adds the finished ops of a device to the event record, except ops whose times the device does not know. If `wait` is
 * set, waits for all ops first. */
static void take_times(ps_ctx *ctx, int device, bool wait)
{
    ps_record_event e;
    ps_backend *be = ctx->devices[device];
    for (int rc; be->time_read && (rc = be->time_read(be, wait, &e)) != 0; )
        if (rc > 0) ps_record_put_late(e);
}

void ps_record_settle(ps_ctx *ctx)
{
    for (int i = 0; i < ctx->n_devices; i++) take_times(ctx, i, true);
}

/* Returns true if the device will report the times of the work that is queued next. */
static bool time_begins(ps_backend *be) { return be->time_begin && be->time_begin(be, ps_record_run) == 0; }

/* Adds an op, or a slice of an op, to the event record. If `timed` is set, the device measures the time of the op, and
 * the op is added after it has ended. */
static void record_work(const apply *a, ps_record_event *e, bool timed)
{
    ps_backend *be = a->ctx->devices[a->device];
    e->from = (uint8_t)a->device;
    if (timed) {
        ps_record_note(e);
        e->on = 1;
        timed = be->time_end(be, e) == 0;
        take_times(a->ctx, a->device, false);
    }
    if (timed) return;
    e->on = 0;
    ps_record_put(*e);
}

static void record_op(const apply *a, int64_t began, bool timed)
{
    ps_record_event e = { .kind = PS_REC_OP, .name = (uint16_t)a->op, .begin_ns = began, .end_ns = ps_record_clock(),
                          .to = (uint8_t)(a->n_in > 0 && a->in[0] ? a->in[0]->dtype_ : PS_F32) };
    ps_op_cost_info cost = { 0, 0 };
    ps_op_cost(a->op, a->n_in, a->in, a->attrs.bytes, a->row->n_out, a->out, &cost);
    e.flops = cost.flops, e.bytes = cost.bytes;
    record_work(a, &e, timed);
    record_memory(a, e.end_ns);
}

int ps_call_part(ps_call *whole, ps_call *part)
{
    apply *a = whole->owner;
    ps_backend *be = a->ctx->devices[a->device];
    ps_scratch_list *kept = a->scratch;
    part->scratch = scratch;
    part->owner = a;
    if (part->dry) return try_scratch(a, be, part);
    int64_t began = ps_record_begin();
    bool timed = began && time_begins(be);
    a->scratch = NULL;                                       /* hides the workspace of the whole call, which must not be
                                                              * freed with the workspace of the part */
    int rc = run_chain(a, be, part);
    a->scratch = kept;
    if (began) {
        ps_record_event e = { .kind = PS_REC_PART, .name = (uint16_t)part->op, .begin_ns = began,
                              .end_ns = ps_record_clock(), .id = (int32_t)part->in[0].shape[0],
                              .to = (uint8_t)part->in[0].dtype };
        record_work(a, &e, timed);
    }
    if (rc == PS_EUNSUP) return ps_fail(rc, "there is no kernel of %s on device %s for these types",
                                        ps_op(part->op)->name, be->name);
    return rc;
}

static void count_flops(const apply *a)
{
    ps_op_cost_info cost = { 0, 0 };
    ps_op_cost(a->op, a->n_in, a->in, a->attrs.bytes, a->row->n_out, a->out, &cost);
    ps_flops_sum += cost.flops;
}

enum { KNOWN_NBYTES = 64 << 20 };

/* Returns true if the op's inputs are known in a script's dry run. A tensor in host memory is known if the script wrote
 * its values, or if they were computed from such values. An op with known inputs is computed unless its outputs are
 * large. */
static bool is_known(const apply *a, const ps_backend *be)
{
    if (!be->is_host || a->row->flags & (PS_OPF_MOVE | PS_OPF_RANKS)) return false;
    bool number = a->op == PS_OP_fill_ && a->in[0]->numel_ == 1 &&
                  a->in[0]->storage->nbytes == ps_tensor_nbytes(a->in[0]);
    for (int i = 0; i < a->n_in; i++)
        if (a->in[i] && !((number || a->in[i]->storage->bytes.written) && ps_storage_is_plain(a->in[i]->storage)))
            return false;
    int64_t nbytes = 0;
    for (int i = 0; i < a->row->n_out; i++) {
        if (a->out[i] && !ps_storage_is_plain(a->out[i]->storage)) return false;
        if (a->given >> i & 1 && !a->out[i]->storage->bytes.written) return false;
        nbytes += a->out[i] ? ps_tensor_nbytes(a->out[i]) : 0;
    }
    return nbytes <= KNOWN_NBYTES;
}

static int call_kernel(apply *a, ps_backend *be, ps_view *in, ps_view *out)
{
    ps_call call = { .op = a->op, .n_in = a->n_in, .n_out = a->row->n_out, .in = in, .out = out,
                     .attrs = a->attrs.bytes, .scratch = scratch, .owner = a };
    int rc = PS_EUNSUP;
    int64_t began = ps_record_begin();
    bool timed = began && !(a->row->flags & (PS_OPF_MOVE | PS_OPF_RANKS)) && time_begins(be);
    a->known = be->pretends && is_known(a, be);
    if (be->pretends && !a->known) rc = dry_scratch(a, be, in, out);
    else if (a->row->flags & PS_OPF_MOVE) rc = move_bytes(a, in, out);
    else if (a->row->flags & PS_OPF_RANKS) rc = of_ranks(a, &call);
    else rc = run_chain(a, be, &call);
    scratch_free(a);
    if (began) record_op(a, began, timed);
    if (__builtin_expect(atomic_load_explicit(&ps_flops_flag, memory_order_relaxed), 0)) count_flops(a);
    if (rc < 0 && rc != PS_EUNSUP) ps_error_prefix("%s: ", a->row->name);
    if (rc == PS_EUNSUP && !(a->row->flags & (PS_OPF_MOVE | PS_OPF_RANKS)))
        rc = ps_fail(PS_EUNSUP, "%s: there is no kernel on device %s for these types", a->row->name,
                     a->ctx->devices[a->device]->name);
    return rc;
}

static int run_kernel(apply *a)
{
    ps_backend *be = a->ctx->devices[a->device];
    bool writes_all = (a->row->flags & PS_OPF_INPLACE) && a->row->n_in < 0;
    ps_view in[PS_MAX_IN], out[PS_MAX_OUT];
    int n_in = 0, n_out = 0, rc = 0;
    if (a->ctx->engine.hooks) a->ctx->engine.hooks->op_begins(a->ctx);
    if (a->ctx->dry.replay) ps_replay_op(a->ctx);
    if (a->ctx->step->dry) ps_dry_note_op(a->ctx, a->op);
    a->ticked = true;
    for (; rc == 0 && n_in < a->n_in; n_in += rc == 0) {
        bool write = writes_all || (n_in == 0 && (a->row->flags & PS_OPF_INPLACE));
        rc = pin_view(a, a->in[n_in], write ? PS_READ | PS_WRITE : PS_READ, &in[n_in]);
    }
    for (; rc == 0 && n_out < a->row->n_out; n_out += rc == 0)
        rc = pin_view(a, a->out[n_out], a->given >> n_out & 1 ? PS_READ | PS_WRITE : PS_WRITE, &out[n_out]);
    if (rc == 0) rc = a->ctx->step->dry ? dry_scratch(a, be, in, out) : call_kernel(a, be, in, out);
    while (n_out-- > 0) unpin(a->out[n_out]);
    while (n_in-- > 0) unpin(a->in[n_in]);
    return rc;
}

/* -- all steps ----------------------------------------------------------------------------------------------------- */
static int check_in_place(apply *a, uint32_t needs)
{
    if (!(a->row->flags & PS_OPF_INPLACE) || !needs || a->row->n_in < 0) return 0;
    return ps_fail(PS_EINVAL,
                   "%s writes in place, but %s a gradient; call it inside ps.no_grad(), or use the op that makes a "
                   "new tensor",
                   a->row->name, needs & 1 ? "its tensor needs" : "its source needs");
}

/* Increments the version of a storage. In a dry run, only tensors that the dry run has made change. All other tensors
 * keep their values and versions. */
static void bump_version(const apply *a, ps_storage *s)
{
    s->bytes.written = a->known;
    if (!a->ctx->step->dry || ps_storage_is_of(s, a->ctx->dry.mem)) s->version++;
}

static void bump_versions(apply *a)
{
    for (int i = 0; i < a->row->n_out; i++) {
        if (a->given >> i & 1) bump_version(a, a->out[i]->storage);
        else if (a->known && a->out[i]) a->out[i]->storage->bytes.written = true;
    }
    if (!(a->row->flags & PS_OPF_INPLACE)) return;
    int n = a->row->n_in < 0 ? a->n_in : 1;                  /* optimizers write to most of their inputs */
    for (int i = 0; i < n; i++) bump_version(a, a->in[i]->storage);
}

static int apply_steps(apply *a)
{
    PS_TRY(prepare_inputs(a));
    ps_error_set_op(a->row->name);                           /* set again, because casts and copies of inputs are ops
                                                              * that have set it, too */
    uint32_t needs = a->row->grad || (a->row->flags & PS_OPF_INPLACE) ? ps_tape_needs(a->ctx, a->n_in, a->in) : 0;
    PS_TRY(check_in_place(a, needs));
    ps_infer f = { .op = a->op, .n_in = a->n_in, .in = (const ps_tensor *const *)a->in, .attrs = a->attrs.bytes,
                   .needs = needs, .given = a->given, .copied = a->owned, .ahead = ps_step_runs_ahead(a->ctx->step),
                   .out = a->meta };
    PS_TRY(a->row->infer(&f));
    PS_TRY(make_outputs(a));
    if (needs && a->row->grad)
        PS_TRY(ps_tape_prepare(a->ctx, a->op, a->n_in, a->attrs.bytes, a->row->n_out, a->out, &a->node));
    if (a->ctx->anomaly.on) PS_TRY(ps_anomaly_before(a->ctx, a->row, a->n_in, a->in, a->given, a->out));
    if (!(a->row->flags & PS_OPF_VIEW)) PS_TRY(run_kernel(a));
    bump_versions(a);
    if (a->ctx->anomaly.on && !(a->row->flags & PS_OPF_VIEW))
        PS_TRY(ps_anomaly_after(a->ctx, a->row, a->op, a->n_in, a->in, a->attrs.bytes, a->out));
    if (a->node) ps_tape_record(a->node, a->in, a->out);
    a->node = NULL;
    return 0;
}

int ps_apply_all(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, ps_tensor **out)
{
    apply a;
    a.ctx = ctx;
    a.row = ps_op(op);
    a.op = op;
    a.n_in = n_in;
    a.owned = 0;
    a.given = 0;
    a.scratch = NULL;
    a.node = NULL;
    a.ticked = a.known = false;
    memset(a.meta, 0, sizeof a.meta);
    for (int i = 0; i < n_in; i++) a.in[i] = in[i];
    for (int i = 0; i < PS_MAX_OUT; i++) a.out[i] = NULL;
    memcpy(a.attrs.bytes, attrs, (size_t)a.row->attrs_nbytes);
    int32_t calls = ctx->dry.calls.n, ops = ctx->dry.n_ops;
    ps_error_set_op(a.row->name);
    int rc = check_inputs(&a, (const ps_tensor *const *)out);
    if (rc == 0 && __builtin_expect(ctx->engine.suspended.on, 0)) rc = check_suspended(&a);
    if (rc == 0) rc = apply_steps(&a);
    if (a.node) ps_node_release(a.node);
    if (rc < 0 && a.ticked && ctx->engine.hooks) ctx->engine.hooks->op_failed(ctx);
    if (rc < 0) ctx->dry.calls.n = calls, ctx->dry.n_ops = ops;      /* the op may be repeated, so its entries are
                                                                      * removed */
    for (int i = 0; i < n_in; i++)
        if (a.owned >> i & 1) ps_tensor_release(a.in[i]);
    for (int i = 0; i < a.row->n_out; i++) {
        if (rc == 0) out[i] = a.out[i];
        else if (a.out[i] && !(a.given >> i & 1)) ps_tensor_release(a.out[i]);
    }
    ps_error_set_op(NULL);
    return rc;
}

int ps_apply(ps_ctx *ctx, int op, int n_in, ps_tensor *const *in, const void *attrs, int64_t attrs_nbytes,
             ps_tensor **out)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    if (op < 0 || op >= PS_OP_COUNT) return ps_fail(PS_EINVAL, "there is no op %d", op);
    const ps_opinfo *row = ps_op(op);
    if (n_in < 0 || n_in > PS_MAX_IN)
        return ps_fail(PS_EINVAL, "%s takes at most %d inputs, but got %d", row->name, PS_MAX_IN, n_in);
    if (attrs_nbytes != row->attrs_nbytes)
        return ps_fail(PS_EINVAL, "%s: attributes of %lld bytes, its struct has %d", row->name, (long long)attrs_nbytes,
                       row->attrs_nbytes);
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    for (int i = 0; i < row->n_out; i++) all[i] = out[i];
    PS_TRY(ps_apply_all(ctx, op, n_in, in, attrs, all));
    for (int i = 0, n = 0; i < row->n_out; i++) {
        if (!(row->hidden_out >> i & 1)) out[n++] = all[i];
        else if (all[i]) ps_tensor_release(all[i]);
        if (ctx->dry.replay && all[i] && !(row->hidden_out >> i & 1)) ps_replay_scripted(all[i]->storage, true);
    }
    return 0;
}

int ps_op_kernel_device(ps_ctx *ctx, int device, int op)
{
    if (device < 0 || device >= ctx->n_devices || op < 0 || op >= PS_OP_COUNT) return -1;
    for (ps_backend *be = ctx->devices[device]; be; be = be->fallback)
        if (be->kernel[op])
            for (int i = 0; i < ctx->n_devices; i++)
                if (ctx->devices[i] == be) return i;
    return -1;
}
