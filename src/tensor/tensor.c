/* SPDX-License-Identifier: BSD-3-Clause
 * Contexts, storages and tensor headers. `refs` of a header counts the header's owners. `refs` of a storage counts the
 * storage's headers. The bytes of a storage are freed when its last header is released. They are freed earlier if a
 * scope has dropped the storage and nothing holds it (`holds`). */
#include "tensor/tensor.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/half.h"
#include "tensor/replay.h"

/* -- context ------------------------------------------------------------------------------------------------------- */
int ps_ctx_new(ps_ctx **out)
{
    ps_ctx *ctx = ps_alloc0(sizeof *ctx);
    if (!ctx) return ps_fail_nomem(sizeof *ctx);
    ctx->refs = 1;
    ps_set_grad_enabled(ctx, 1);
    ctx->scope.now = &ctx->scope.root;
    ctx->step = &ps_step_idle;
    ctx->scope.next_id = 1;
    ctx->scope.collect_at = 32 << 20;
    ctx->rng.seed = 0;
    int n = ps_backends_open(ctx->devices, 8);
    int rc = n < 0 ? n : ps_mem_plain_new(n, ctx->devices, &ctx->mem.plain);
    if (rc < 0) {
        if (n > 0) ps_backends_close(ctx->devices, n);
        ps_free(ctx);
        return rc;
    }
    ctx->mem.now = ctx->mem.plain;
    ctx->n_devices = n;
    *out = ctx;
    return 0;
}

/* Adds a device to both memory managers. If only the first manager accepts the device, the device is closed, but its
 * arena in the first manager remains. The arena is empty, so freeing it later does not call the closed device. */
int ps_ctx_add_device(ps_ctx *ctx, ps_backend *be)
{
    enum { MOST = sizeof ctx->devices / sizeof *ctx->devices };
    ps_backend *meta = NULL;
    int rc = 0;
    for (int i = 0; i < ctx->n_devices; i++) if (ctx->devices[i]->no_data) meta = ctx->devices[i];
    if (ctx->n_devices == MOST) rc = ps_fail(PS_EINVAL, "a context can have at most %d devices", MOST);
    if (rc == 0) rc = ps_mem_plain_add(ctx->mem.plain, be);
    if (rc == 0 && ctx->dry.mem && (rc = ps_mem_plain_add(ctx->dry.mem, meta)) < 0) ps_mem_plain_undo(ctx->mem.plain);
    if (rc < 0) {
        if (be->close) be->close(be);
        return rc;
    }
    ctx->devices[ctx->n_devices++] = be;
    return 0;
}

void ps_ctx_release(ps_ctx *ctx)
{
    if (--ctx->refs > 0) return;
    ps_tape_free(ctx);
    ps_free(ctx->dry.calls.list);
    ps_free(ctx->dry.ops);
    ps_replay_free(ctx->dry.replay_kept);
    ps_free(ctx);
}

void ps_guest_come(ps_ctx *ctx, ps_guest *g)
{
    g->next = ctx->guests;
    g->link = &ctx->guests;
    if (g->next) g->next->link = &g->next;
    ctx->guests = g;
}

void ps_guest_leave(ps_guest *g)
{
    if (!g->link) return;
    *g->link = g->next;
    if (g->next) g->next->link = g->link;
    g->link = NULL;
}

void ps_ctx_free(ps_ctx *ctx)
{
    if (!ctx || ctx->closed) return;
    while (ctx->guests) {
        ps_guest *g = ctx->guests;
        ps_guest_leave(g);
        g->close(g);
    }
    ps_walk_end(ctx);
    ps_dry_end(ctx);
    if (ctx->engine.hooks) ctx->engine.hooks->close(ctx);
    ctx->closed = 1;
    while (ctx->scope.now) {                                 /* all bytes are freed now, even if headers remain */
        while (ctx->scope.now->first) {
            ps_storage *s = ctx->scope.now->first;
            ps_scope_unlink(s);
            s->bytes.dropped = true;
            ps_storage_free(s);
        }
        ps_scope *parent = ctx->scope.now->parent;
        if (ctx->scope.now != &ctx->scope.root) ps_free(ctx->scope.now);
        ctx->scope.now = parent;
    }
    if (ctx->offload.away) ps_away_delete(ctx->offload.away);
    ctx->offload.away = NULL;
    ctx->offload.on = false;
    if (ctx->dry.mem) ctx->dry.mem->table->close(ctx->dry.mem);
    ctx->mem.plain->table->close(ctx->mem.plain);
    ctx->mem.now = ctx->mem.plain = ctx->dry.mem = NULL;
    ps_backends_close(ctx->devices, ctx->n_devices);
    ctx->n_devices = 0;
    ps_ctx_release(ctx);
}

/* -- dry runs ------------------------------------------------------------------------------------------------------ */
int ps_dry_begin(ps_ctx *ctx)
{
    if (ctx->dry.real) return ps_fail(PS_ESTATE, "a dry run is already under way");
    if (!ctx->dry.mem) {
        ps_backend *metas[8], *meta = NULL;
        for (int i = 0; i < ctx->n_devices; i++) if (ctx->devices[i]->no_data) meta = ctx->devices[i];
        if (!meta) return ps_fail(PS_EUNSUP, "a dry run needs the backend meta, which this build lacks");
        for (int i = 0; i < ctx->n_devices; i++) metas[i] = meta;
        PS_TRY(ps_mem_plain_new(ctx->n_devices, metas, &ctx->dry.mem));
    }
    ctx->dry.real = ctx->mem.now;
    ctx->mem.now = ctx->dry.mem;
    ctx->dry.calls.n = ctx->dry.n_ops = 0;
    return 0;
}

void ps_dry_end(ps_ctx *ctx)
{
    ps_replay_end(ctx);
    if (!ctx->dry.real) return;
    ctx->mem.now = ctx->dry.real;
    ctx->dry.real = NULL;
}

int ps_dry_note_calls(ps_ctx *ctx, const ps_rank_call *list, int32_t n)
{
    ps_rank_calls *calls = &ctx->dry.calls;
    if (n == 0) return 0;
    PS_TRY(ps_grow(calls->list, calls->capacity, calls->n + n));
    memcpy(&calls->list[calls->n], list, (size_t)n * sizeof *list);
    calls->n += n;
    return 0;
}

void ps_dry_note_op(ps_ctx *ctx, int op)
{
    int32_t n = ctx->dry.n_ops;
    if (!ctx->tape.grad_enabled || n < 0) return;
    ctx->dry.n_ops = -1;
    if (!ps_try_grow(ctx->dry.ops, ctx->dry.ops_capacity, n + 1)) return;
    ctx->dry.ops[n] = (uint16_t)op;
    ctx->dry.n_ops = n + 1;
}

void ps_ctx_set_mem(ps_ctx *ctx, ps_mem *mem) { ctx->mem.now = mem ? mem : ctx->mem.plain; }

/* -- storage ------------------------------------------------------------------------------------------------------- */
void ps_storage_hold(ps_storage *s) { s->holds++; }
static void bytes_go(ps_storage *s)
{
    if (ps_replay_has(s) && s->block) ps_replay_gone(s, false);
    ps_storage_free(s);
    ps_scope_uncount(s);
}
void ps_storage_unhold(ps_storage *s)
{
    if (--s->holds == 0 && s->bytes.dropped) bytes_go(s);
}
void ps_storage_drop(ps_storage *s)
{
    s->bytes.dropped = true;
    if (s->holds == 0) bytes_go(s);
}

void ps_storage_leave(ps_ctx *ctx, ps_storage *s)
{
    bool fits = s->holds > 0 && !s->bytes.kept && s->nbytes >= PS_SCOPE_MIN_NBYTES;
    bool of_dry = ps_storage_is_of(s, ctx->dry.mem);
    if (!ctx->offload.on || !fits || of_dry != (ctx->step->dry != NULL)) return;
    if (ctx->dry.replay) ps_replay_spoil(ctx);                  /* a replay cannot repeat fetches, because they depend
                                                                 * on the storages that are offloaded */
    ps_away_leave(ctx->offload.away, s);
}

int ps_set_offload(ps_ctx *ctx, int on)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    if (on && !ctx->offload.away)
        PS_TRY(ps_away_new(ctx->n_devices, ctx->devices, &ctx->mem.now, &ctx->step, &ctx->offload.away));
    int was = ctx->offload.on;
    ctx->offload.on = on != 0;
    return was;
}

void ps_storage_release(ps_storage *s)
{
    if (--s->refs > 0) return;
    ps_scope_unlink(s);
    if (ps_replay_has(s) && s->block && ps_replay_gone(s, true)) s->block = NULL;
    ps_storage_free(s);
    ps_free(s);
}

/* -- headers ------------------------------------------------------------------------------------------------------- */
bool ps_meta_contiguous(const ps_meta *m)
{
    int64_t want = 1;
    for (int i = m->ndim - 1; i >= 0; i--) {
        if (m->shape[i] == 0) return true;
        if (m->shape[i] != 1 && m->stride[i] != want) return false;
        want *= m->shape[i];
    }
    return true;
}

void ps_meta_set_contiguous(ps_meta *m)
{
    int64_t stride = 1;
    for (int i = m->ndim - 1; i >= 0; i--) {
        m->stride[i] = stride;
        stride *= m->shape[i] > 0 ? m->shape[i] : 1;
    }
    m->offset = 0;
}

const char *ps_shape_text(int ndim, const int64_t *shape, char *buf, size_t size)
{
    size_t n = (size_t)snprintf(buf, size, "[");
    for (int i = 0; i < ndim && n < size; i++)
        n += (size_t)snprintf(buf + n, size - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (n < size) snprintf(buf + n, size - n, "]");
    return buf;
}

ps_meta ps_tensor_meta(const ps_tensor *t)
{
    ps_meta m = { .dtype = t->dtype_, .ndim = t->ndim, .offset = t->offset };
    memcpy(m.shape, t->shape_, sizeof m.shape);
    memcpy(m.stride, t->stride_, sizeof m.stride);
    return m;
}

/* Computes the number of elements and the size in bytes of a tensor with the shape of m. Returns PS_EINVAL if a size is
 * negative, or if the shape overflows the address range. */
static int shape_numel(const ps_meta *m, int64_t *numel, int64_t *nbytes)
{
    int64_t n = 1;
    bool empty = false;
    char text[160];
    for (int i = 0; i < m->ndim; i++) {
        if (m->shape[i] < 0)
            return ps_fail(PS_EINVAL, "a shape has a negative size: %s",
                           ps_shape_text(m->ndim, m->shape, text, sizeof text));
        if (m->shape[i] == 0) empty = true;
        else if (__builtin_mul_overflow(n, m->shape[i], &n))
            return ps_fail(PS_EINVAL, "shape %s has too many elements",
                           ps_shape_text(m->ndim, m->shape, text, sizeof text));
    }
    if (empty) n = 0;
    if (__builtin_mul_overflow(n, ps_dtype_bytes(m->dtype), nbytes) || *nbytes > (int64_t)1 << 56)
        return ps_fail(PS_EINVAL, "shape %s is more than can be addressed",
                       ps_shape_text(m->ndim, m->shape, text, sizeof text));
    *numel = n;
    return 0;
}

static ps_tensor *header_new(ps_ctx *ctx, const ps_meta *meta, int device, int64_t numel)
{
    ps_tensor *t = ps_alloc(sizeof *t);
    if (!t) return NULL;
    *t = (ps_tensor){ .dtype_ = meta->dtype,
                      .ndim = meta->ndim,
                      .device_ = device,
                      .numel_ = numel,
                      .offset = meta->offset,
                      .refs = 1,
                      .ctx = ctx };
    for (int i = 0; i < meta->ndim; i++) {
        t->shape_[i] = meta->shape[i];
        t->stride_[i] = meta->stride[i];
    }
    ctx->refs++;
    return t;
}

int ps_tensor_new_meta(ps_ctx *ctx, int device, const ps_meta *meta, ps_tensor **out)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    ps_meta m = *meta;
    int64_t numel, nbytes;
    PS_TRY(shape_numel(&m, &numel, &nbytes));
    if (!m.permuted) ps_meta_set_contiguous(&m);
    ps_storage *s = ps_alloc(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    *s = (ps_storage){ .keeper = &ctx->mem.now->keeper, .nbytes = nbytes, .device = device, .refs = 1 };
    int rc = nbytes > 0 ? ctx->mem.now->table->alloc(ctx->mem.now, s) : 0;
    ps_tensor *t = rc == 0 ? header_new(ctx, &m, device, numel) : NULL;
    if (!t) {
        ps_storage_free(s);
        ps_free(s);
        return rc < 0 ? rc : ps_fail_nomem(sizeof *t);
    }
    t->storage = s;
    if (ctx->dry.replay) ps_replay_made(ctx, s);
    ps_scope_add(ctx, s);
    *out = t;
    return 0;
}

int ps_tensor_new(ps_ctx *ctx, int dtype, int device, int ndim, const int64_t *shape, ps_tensor **out)
{
    if (dtype < 0 || dtype >= PS_DTYPE_COUNT) return ps_fail(PS_EINVAL, "there is no type %d", dtype);
    if (device < 0 || device >= ctx->n_devices) return ps_fail(PS_EINVAL, "there is no device %d", device);
    if (ndim < 0 || ndim > PS_MAX_DIMS)
        return ps_fail(PS_EINVAL, "a tensor cannot have %d dimensions; at most %d are supported", ndim, PS_MAX_DIMS);
    ps_meta m = { .dtype = dtype, .ndim = ndim };
    for (int i = 0; i < ndim; i++) m.shape[i] = shape[i];
    PS_TRY(ps_tensor_new_meta(ctx, device, &m, out));
    ps_replay_scripted((*out)->storage, ctx->dry.replay != NULL);
    return 0;
}

int ps_tensor_over(ps_ctx *ctx, ps_storage *s, const ps_meta *meta, int device, ps_tensor **out)
{
    int64_t numel, nbytes;
    ps_meta m = *meta;
    PS_TRY(shape_numel(&m, &numel, &nbytes));
    ps_meta_set_contiguous(&m);
    ps_tensor *t = header_new(ctx, &m, device, numel);
    if (!t) return ps_fail_nomem(sizeof *t);
    t->storage = s;
    *out = t;
    return 0;
}

int ps_tensor_view(ps_tensor *base, const ps_meta *meta, ps_tensor **out)
{
    int64_t numel, nbytes;
    PS_TRY(shape_numel(meta, &numel, &nbytes));
    ps_tensor *t = header_new(base->ctx, meta, base->device_, numel);
    if (!t) return ps_fail_nomem(sizeof *t);
    t->storage = base->storage;
    t->storage->refs++;
    *out = t;
    return 0;
}

int ps_tensor_detach(ps_tensor *t, ps_tensor **out)
{
    ps_meta m = ps_tensor_meta(t);
    return ps_tensor_view(t, &m, out);
}

void ps_tensor_retain(ps_tensor *t) { t->refs++; }

void ps_tensor_drop(ps_tensor *t)
{
    if (t->ctx->closed || t->refs > 1 || t->storage->refs > 1 || t->storage->bytes.dropped) return;
    ps_scope_unlink(t->storage);
    ps_storage_drop(t->storage);
}

void ps_tensor_release(ps_tensor *t)
{
    while (t && --t->refs == 0) {
        ps_tensor *grad = t->grad_;                       /* a gradient has no gradient of its own, so the recursion
                                                           * ends */
        if (t->node) ps_node_release(t->node);
        if (t->hook) ps_hook_release(t->hook);
        ps_storage_release(t->storage);
        ps_ctx *ctx = t->ctx;
        ps_free(t);
        ps_ctx_release(ctx);
        t = grad;
    }
}

ps_tensor *ps_tensor_hold(ps_tensor *t)
{
    t->refs++;
    ps_storage_hold(t->storage);
    return t;
}

void ps_tensor_unhold(ps_tensor *t)
{
    if (!t) return;
    ps_storage_unhold(t->storage);
    ps_tensor_release(t);
}

bool ps_tensor_exclusive(const ps_tensor *t)
{
    return t->refs == 1 && t->storage->refs == 1 && !t->storage->bytes.kept && ps_tensor_is_contiguous(t);
}

int ps_tensor_keep(ps_tensor *t)
{
    PS_TRY(ps_tensor_check_alive(t));
    t->storage->bytes.kept = true;
    ps_scope_adopt(t->ctx, t->storage);
    return 0;
}

int ps_tensor_set_data(ps_tensor *t, ps_tensor *from)
{
    if (!t || !from) return ps_fail(PS_EINVAL, "ps_tensor_set_data: an argument is missing (NULL)");
    PS_TRY(ps_tensor_check_alive(from));
    ps_storage *old = t->storage, *new = from->storage;
    bool same = t->ndim == from->ndim && !memcmp(t->shape_, from->shape_, sizeof(int64_t) * (size_t)t->ndim);
    if (!same || t->dtype_ != from->dtype_) {
        char x[160], y[160];
        return ps_fail(PS_EINVAL, "a %s tensor of shape %s cannot use the bytes of a %s tensor of shape %s",
                       ps_dtype_name(t->dtype_), ps_shape_text(t->ndim, t->shape_, x, sizeof x),
                       ps_dtype_name(from->dtype_), ps_shape_text(from->ndim, from->shape_, y, sizeof y));
    }
    if (t->node || t->grad_ || t->managed || old->pins || old->holds || old->engine.taken)
        return ps_fail(PS_ESTATE, "only a leaf without a gradient, whose bytes are not in use, can use the bytes "
                                  "of another tensor");
    new->refs++;
    ps_storage_follow(new, old);
    if (old->bytes.kept) {
        new->bytes.kept = true;
        ps_scope_adopt(t->ctx, new);
    }
    t->storage = new;
    t->device_ = from->device_;
    t->offset = from->offset;
    memcpy(t->stride_, from->stride_, sizeof t->stride_);
    ps_storage_release(old);
    return 0;
}

bool ps_tensor_has_data(const ps_tensor *t)
{
    const ps_ctx *ctx = t->ctx;
    if (ps_storage_is_of(t->storage, ctx->dry.mem)) return false;
    const ps_backend *be = ctx->devices[t->device_];
    if (be->pretends) return t->storage->bytes.written;
    return !be->no_data && !(ctx->offload.away && ps_away_is_dry(ctx->offload.away, t->storage));
}

static int check_has_data(const ps_tensor *t)
{
    if (ps_tensor_has_data(t)) return 0;
    if (t->ctx->devices[t->device_]->no_data) return ps_fail(PS_EUNSUP, "tensors of device meta have no data");
    if (t->ctx->devices[t->device_]->pretends && !t->ctx->step->dry)
        return ps_fail(PS_EDRY, "a value was read before the end of the first optimizer:step(), but a dry run of "
                       "a script has none before; read it after that step");
    return ps_fail(PS_EDRY, "a value was read in a dry run of the step, which computes none");
}

int ps_tensor_alive(const ps_tensor *t) { return t->storage->block != NULL || (t->numel_ == 0 && !t->ctx->closed); }

int ps_tensor_check_alive(const ps_tensor *t)
{
    if (ps_tensor_alive(t)) return 0;
    char text[160];
    return ps_fail(PS_ESTALE, "a %s tensor of shape %s was used after the scope that made it had ended (a module call, "
                   "an iteration of a loader or optimizer:step() ends one), or after release(); call :keep() on it, or "
                   "return it from ps.scope", ps_dtype_name(t->dtype_),
                   ps_shape_text(t->ndim, t->shape_, text, sizeof text));
}

int64_t ps_tensor_nbytes(const ps_tensor *t) { return t->numel_ * ps_dtype_bytes(t->dtype_); }

int ps_tensor_is_contiguous(const ps_tensor *t)
{
    ps_meta m = ps_tensor_meta(t);
    return ps_meta_contiguous(&m);
}

/* -- contents ------------------------------------------------------------------------------------------------------ */
static int check_whole(const ps_tensor *t, int64_t nbytes, const char *what)
{
    PS_TRY(ps_tensor_check_alive(t));
    if (!ps_tensor_is_contiguous(t))
        return ps_fail(PS_EINVAL, "%s needs a contiguous tensor; call t:contiguous() first", what);
    if (nbytes != ps_tensor_nbytes(t))
        return ps_fail(PS_EINVAL, "%s: %lld bytes were passed, but the tensor has %lld", what, (long long)nbytes,
                       (long long)ps_tensor_nbytes(t));
    if (t->ctx->devices[t->device_]->no_data)
        return ps_fail(PS_EUNSUP, "%s: tensors of device meta have no data", what);
    return 0;
}

static int copy_whole(const ps_tensor *t, void *host, int64_t nbytes, unsigned access)
{
    if (nbytes == 0) return 0;
    ps_backend *be = t->ctx->devices[t->device_];
    void *p;
    PS_TRY(ps_storage_pin(t->storage, t->device_, access, &p));
    char *bytes = (char *)p + t->offset * ps_dtype_bytes(t->dtype_);
    int rc = 0;
    if (access == PS_WRITE) {
        if (be->copy_in) rc = be->copy_in(be, bytes, host, (size_t)nbytes);
        else memmove(bytes, host, (size_t)nbytes);       /* the bytes may belong to a lender */
    } else {
        if (be->copy_out) rc = be->copy_out(be, host, bytes, (size_t)nbytes);
        else memmove(host, bytes, (size_t)nbytes);
    }
    ps_storage_unpin(t->storage, t->device_);
    return rc;
}

/* Returns true if bytes that a script writes to t are stored. On a simulated device, only bytes in host memory outside
 * chunks are stored. */
static bool takes_bytes(const ps_tensor *t)
{
    const ps_backend *be = t->ctx->devices[t->device_];
    return !be->pretends || (be->is_host && ps_storage_is_plain(t->storage));
}

uint32_t ps_tensor_version(const ps_tensor *t) { return t->storage->version; }

/* Prepares to write the whole tensor. Returns false if its values are not stored. */
static bool begin_write(ps_tensor *t)
{
    t->storage->version++;
    if ((t->ctx->step->dry && !ps_tensor_has_data(t)) || !takes_bytes(t)) return false;
    t->storage->bytes.written = true;
    return true;
}

int ps_tensor_write(ps_tensor *t, const void *src, int64_t nbytes)
{
    PS_TRY(check_whole(t, nbytes, "writing"));
    if (!begin_write(t)) return 0;
    return copy_whole(t, (void *)(uintptr_t)src, nbytes, PS_WRITE);
}

enum { LOADED_NBYTES = 8 << 20 };

/* Loads bytes from a reader into a device's memory. Bytes for host memory are loaded directly. Bytes for other memory
 * are loaded into a buffer and then copied. */
static int load(ps_backend *be, char *to, ps_reader read, const void *from, int64_t at, int64_t nbytes)
{
    if (be->load) return be->load(be, to, read, from, at, (size_t)nbytes);
    if (!be->copy_in) return read(from, at, to, nbytes);
    int64_t room = nbytes < LOADED_NBYTES ? nbytes : LOADED_NBYTES;
    char *buffer = ps_alloc((size_t)room);
    if (!buffer) return ps_fail_nomem((size_t)room);
    int rc = 0;
    for (int64_t done = 0, n; rc == 0 && done < nbytes; done += n) {
        n = nbytes - done < room ? nbytes - done : room;
        rc = read(from, at + done, buffer, n);
        if (rc == 0) rc = be->copy_in(be, to + done, buffer, (size_t)n);
    }
    ps_free(buffer);
    return rc;
}

int ps_tensor_load(ps_tensor *t, ps_reader read, const void *from, int64_t at, int64_t nbytes)
{
    void *p;
    if (!read) return ps_fail(PS_EINVAL, "ps_tensor_load: the reader is missing (NULL)");
    PS_TRY(check_whole(t, nbytes, "loading"));
    if (!begin_write(t) || nbytes == 0) return 0;
    PS_TRY(ps_storage_pin(t->storage, t->device_, PS_WRITE, &p));
    int rc = load(t->ctx->devices[t->device_], (char *)p + t->offset * ps_dtype_bytes(t->dtype_), read, from, at,
                  nbytes);
    ps_storage_unpin(t->storage, t->device_);
    return rc;
}

/* Checks that t can borrow nbytes bytes. */
static int check_borrower(const ps_tensor *t, int64_t nbytes)
{
    PS_TRY(check_whole(t, nbytes, "borrowing"));
    const ps_storage *s = t->storage;
    const ps_backend *be = t->ctx->devices[t->device_];
    bool here = be->is_host && (ps_storage_is_plain(s) || ps_storage_is_lent(s));
    if (!here || ps_storage_is_of(s, t->ctx->dry.mem))
        return ps_fail(PS_EUNSUP, "only a tensor in plain host memory can use borrowed bytes");
    if (s->nbytes != nbytes) return ps_fail(PS_EUNSUP, "a part of another tensor cannot use borrowed bytes");
    if (s->pins > 0) return ps_fail(PS_ESTATE, "a tensor that is in use cannot change its bytes");
    return 0;
}

/* Makes t use the bytes of loans. Ends the loans on failure. */
static int borrow(ps_tensor *t, const ps_loans *loans)
{
    int rc = ps_storage_lend(t->storage, loans);
    if (rc < 0) ps_loans_end(loans);
    else begin_write(t);
    return rc;
}

int ps_tensor_borrow(ps_tensor *t, ps_lender lend, void *from, int64_t at, int64_t nbytes)
{
    ps_loans loans = { .width = { nbytes }, .n = 1 };
    if (!lend) return ps_fail(PS_EINVAL, "ps_tensor_borrow: the lender is missing (NULL)");
    PS_TRY(check_borrower(t, nbytes));
    if (nbytes == 0) return 0;
    PS_TRY(lend(from, at, nbytes, &loans.loan[0]));
    if ((uintptr_t)loans.loan[0].bytes % (uintptr_t)ps_dtype_bytes(t->dtype_) != 0) {
        ps_loans_end(&loans);
        return ps_fail(PS_EUNSUP, "the address of the borrowed bytes is not a multiple of the element size");
    }
    return borrow(t, &loans);
}

int ps_tensor_borrow_blocks(ps_tensor *t, ps_lender lend, const ps_lent_range *ranges)
{
    if (!t || !lend || !ranges) return ps_fail(PS_EINVAL, "ps_tensor_borrow_blocks: an argument is missing (NULL)");
    int64_t width[2] = { ranges[0].width, ranges[1].width };
    if (width[0] < 1 || width[1] < 1 || width[0] > PS_BLOCK_WIDTH || width[1] > PS_BLOCK_WIDTH)
        return ps_fail(PS_EINVAL, "blocks of %lld and %lld borrowed bytes; each may have 1 to %d", (long long)width[0],
                       (long long)width[1], PS_BLOCK_WIDTH);
    int64_t nbytes = ps_tensor_nbytes(t), block = width[0] + width[1];
    PS_TRY(check_borrower(t, nbytes));
    if (t->dtype_ != PS_U8 || nbytes % block != 0)
        return ps_fail(PS_EINVAL, "blocks of %lld bytes do not fill a tensor of %lld bytes of type %s",
                       (long long)block, (long long)nbytes, ps_dtype_name(t->dtype_));
    if (nbytes == 0) return 0;
    ps_loans loans = { .width = { width[0], width[1] } };
    for (int i = 0; i < 2; i++) {
        int rc = lend(ranges[i].from, ranges[i].at, nbytes / block * width[i], &loans.loan[i]);
        if (rc < 0) {
            ps_loans_end(&loans);
            return rc;
        }
        loans.n++;
    }
    return borrow(t, &loans);
}

int ps_tensor_is_lent(const ps_tensor *t) { return t && t->storage && ps_storage_is_lent(t->storage); }

int ps_tensor_read(const ps_tensor *t, void *dst, int64_t nbytes)
{
    PS_TRY(check_whole(t, nbytes, "reading"));
    PS_TRY(check_has_data(t));
    return copy_whole(t, dst, nbytes, PS_READ);
}

int ps_tensor_save(const ps_tensor *t, void *dst, int64_t nbytes)
{
    if (ps_tensor_has_data(t) || !t->ctx->devices[t->device_]->pretends) return ps_tensor_read(t, dst, nbytes);
    PS_TRY(check_whole(t, nbytes, "saving"));
    if (nbytes > 0) memset(dst, 0, (size_t)nbytes);
    return 0;
}

int ps_tensor_address(ps_tensor *t, void **out)
{
    void *p = NULL;
    if (!t || !out) return ps_fail(PS_EINVAL, "ps_tensor_address: an argument is missing (NULL)");
    PS_TRY(check_has_data(t));
    ps_storage *s = t->storage;
    const ps_backend *be = t->ctx->devices[t->device_];
    bool plain = be->is_host && !be->no_data && !be->pretends && (ps_storage_is_plain(s) || ps_storage_is_lent(s));
    if (!plain || !ps_tensor_is_contiguous(t) || !t->numel_)
        return ps_fail(PS_EUNSUP, "only contiguous bytes in plain host memory have a fixed address");
    PS_TRY(ps_storage_pin(s, t->device_, PS_READ, &p));
    ps_storage_unpin(s, t->device_);
    *out = (char *)p + t->offset * ps_dtype_bytes(t->dtype_);
    return 0;
}

static double element_get(const char *p, int dtype)
{
    uint16_t h;
    int32_t i32;
    int64_t i64;
    float f;
    double d;
    switch (dtype) {
    case PS_F32: memcpy(&f, p, 4); return f;
    case PS_BF16: memcpy(&h, p, 2); return ps_bf16_to_f32(h);
    case PS_F16: memcpy(&h, p, 2); return ps_f16_to_f32(h);
    case PS_F64: memcpy(&d, p, 8); return d;
    case PS_I32: memcpy(&i32, p, 4); return i32;
    case PS_I64: memcpy(&i64, p, 8); return (double)i64;
    default: return *(const uint8_t *)p;
    }
}

/* Converts v to an integer from `low` to `high`. Rounds towards 0, as casts do. A value outside the range becomes the
 * nearest bound. NaN becomes 0. */
static int64_t whole_within(double v, int64_t low, int64_t high)
{
    if (v != v) return 0;
    if (v <= (double)low) return low;
    return v >= (double)high ? high : (int64_t)v;            /* (double)INT64_MAX is 2^63 */
}

static void element_set(char *p, int dtype, double v)
{
    uint16_t h;
    int32_t i32;
    int64_t i64;
    float f;
    switch (dtype) {
    case PS_F32: f = (float)v; memcpy(p, &f, 4); break;
    case PS_BF16: h = ps_f32_to_bf16((float)v); memcpy(p, &h, 2); break;
    case PS_F16: h = ps_f32_to_f16((float)v); memcpy(p, &h, 2); break;
    case PS_F64: memcpy(p, &v, 8); break;
    case PS_I32: i32 = (int32_t)whole_within(v, INT32_MIN, INT32_MAX); memcpy(p, &i32, 4); break;
    case PS_I64: i64 = whole_within(v, INT64_MIN, INT64_MAX); memcpy(p, &i64, 8); break;
    case PS_BOOL: *(uint8_t *)p = v != 0; break;
    default: *(uint8_t *)p = (uint8_t)whole_within(v, 0, 255); break;
    }
}

/* Copies numel elements of a host tensor, starting at element `first` in row-major order. If `dst` is not NULL, copies
 * from the tensor to `dst`. Otherwise copies from `src` to the tensor. */
static int walk_f64(const ps_tensor *t, int64_t first, int64_t numel, double *dst, const double *src)
{
    PS_TRY(ps_tensor_check_alive(t));
    ps_backend *be = t->ctx->devices[t->device_];
    bool no_place = (t->ctx->step->dry && !ps_tensor_has_data(t)) || (be->is_host && !takes_bytes(t));
    if (!dst && no_place) return 0;
    if (!dst) t->storage->bytes.written = true;
    PS_TRY(check_has_data(t));
    if (!be->is_host) return ps_fail(PS_EUNSUP, "move the tensor to the cpu first: it is on %s", be->name);
    if (first < 0 || numel < 0 || first > t->numel_ || numel > t->numel_ - first)
        return ps_fail(PS_ERANGE, "%lld elements from element %lld on do not exist in a tensor of %lld elements",
                       (long long)numel, (long long)first, (long long)t->numel_);
    if (numel == 0) return 0;
    void *p;
    PS_TRY(ps_storage_pin(t->storage, t->device_, dst ? PS_READ : PS_READ | PS_WRITE, &p));
    int64_t index[PS_MAX_DIMS] = { 0 }, rest = first, at = t->offset, size = ps_dtype_bytes(t->dtype_);
    for (int d = t->ndim - 1; d >= 0; d--) {
        index[d] = rest % t->shape_[d];
        rest /= t->shape_[d];
        at += index[d] * t->stride_[d];
    }
    for (int64_t i = 0; i < numel; i++) {
        if (dst) dst[i] = ps_lua_number(element_get((char *)p + at * size, t->dtype_));
        else element_set((char *)p + at * size, t->dtype_, src[i]);
        for (int d = t->ndim - 1; d >= 0; d--) {
            at += t->stride_[d];
            if (++index[d] < t->shape_[d]) break;
            at -= t->stride_[d] * t->shape_[d];
            index[d] = 0;
        }
    }
    ps_storage_unpin(t->storage, t->device_);
    return 0;
}

int ps_tensor_read_f64(const ps_tensor *t, int64_t first, int64_t numel, double *dst)
{
    return walk_f64(t, first, numel, dst, NULL);
}

int ps_tensor_write_f64(ps_tensor *t, int64_t first, int64_t numel, const double *src)
{
    PS_TRY(walk_f64(t, first, numel, NULL, src));
    t->storage->version++;
    return 0;
}

int ps_tensor_read_scalar(const ps_tensor *t, double *out)
{
    if (t->numel_ != 1) return ps_fail(PS_EINVAL, "a single value was requested, but the tensor has %lld elements",
                                       (long long)t->numel_);
    ps_backend *be = t->ctx->devices[t->device_];
    if (!ps_tensor_has_data(t)) {               /* a dry run has no values, so the result is always 1 */
        *out = 1;
        return 0;
    }
    if (be->is_host) return walk_f64(t, 0, 1, out, NULL);
    PS_TRY(ps_tensor_check_alive(t));
    char bytes[8];
    PS_TRY(copy_whole(t, bytes, ps_dtype_bytes(t->dtype_), PS_READ));
    *out = ps_lua_number(element_get(bytes, t->dtype_));
    return 0;
}

/* -- devices ------------------------------------------------------------------------------------------------------- */
int ps_tensor_to_device(ps_tensor *t, int device, ps_tensor **out)
{
    ps_ctx *ctx = t->ctx;
    if (ctx->closed || device < 0 || device >= ctx->n_devices)
        return ps_fail(PS_EINVAL, "there is no device %d", device);
    if (device == t->device_) {
        ps_tensor_retain(t);
        *out = t;
        return 0;
    }
    ps_attrs_to_device attrs = { .device = device };
    ps_tensor *all[PS_MAX_OUT] = { NULL }, *between = NULL;
    const ps_backend *from = ctx->devices[t->device_], *to = ctx->devices[device];
    int host = 0;
    if (!from->is_host && !to->is_host && !from->no_data && !to->no_data) {         /* the copy goes through host
                                                                                     * memory */
        while (host < ctx->n_devices && !ctx->devices[host]->is_host) host++;
        PS_TRY(ps_tensor_to_device(t, host, &between));
    }
    int rc = ps_apply_all(ctx, PS_OP_to_device, 1, between ? &between : &t, &attrs, all);
    if (between) ps_tensor_release(between);
    if (rc == 0) *out = all[0];
    return rc;
}
