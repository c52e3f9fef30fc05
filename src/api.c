/* SPDX-License-Identifier: BSD-3-Clause
 * The functions of ps.h that no other file implements. They list devices, report memory use, and compute hashes,
 * statistics and the indices of nonzero elements. */
#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "tensor/tensor.h"

int ps_tensor_hash(ps_tensor *t, uint64_t *out)
{
    void *p = NULL;
    PS_TRY(ps_tensor_check_alive(t));
    const ps_backend *be = t->ctx->closed ? NULL : t->ctx->devices[t->device_];
    if (!be || !be->is_host || !ps_tensor_has_data(t) || !ps_tensor_is_contiguous(t))
        return ps_fail(PS_EUNSUP, "only a contiguous tensor in host memory can be hashed; call t:to(\"cpu\") and "
                       "t:contiguous() first");
    ps_storage *s = t->storage;
    if (t->numel_ > 0) PS_TRY(ps_storage_pin(s, t->device_, PS_READ, &p));
    *out = ps_xxh3((char *)p + t->offset * ps_dtype_bytes(t->dtype_), ps_tensor_nbytes(t));
    if (t->numel_ > 0) ps_storage_unpin(s, t->device_);
    return 0;
}

/* Adds the statistics of one block to `all`, the statistics of all earlier blocks (Chan, Golub, LeVeque 1979). */
static void join_stats(ps_stats *all, const ps_stats *block)
{
    double n = (double)all->numel, m = (double)block->numel, delta = block->mean - all->mean;
    if (all->numel == 0) {
        *all = *block;
        return;
    }
    all->numel += block->numel;
    all->mean += delta * (m / (n + m));
    all->squares += block->squares + delta * delta * (n * m / (n + m));
    if (!(block->min >= all->min)) all->min = block->min;
    if (!(block->max <= all->max)) all->max = block->max;
}

static ps_stats block_stats(const double *x, int64_t n)
{
    ps_stats s = { .numel = n, .min = x[0], .max = x[0] };
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    s.mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) {
        s.squares += (x[i] - s.mean) * (x[i] - s.mean);
        if (x[i] < s.min) s.min = x[i];
        if (x[i] > s.max) s.max = x[i];
    }
    if (isnan(sum)) for (int64_t i = 0; i < n; i++) if (isnan(x[i])) s.min = s.max = x[i];
    return s;
}

int ps_tensor_stats(const ps_tensor *t, ps_stats *out)
{
    enum { BLOCK = 4096 };
    double values[BLOCK];
    ps_stats all = { .mean = NAN, .min = NAN, .max = NAN };
    PS_TRY(ps_tensor_check_alive(t));
    for (int64_t at = 0; at < t->numel_; at += BLOCK) {
        int64_t n = t->numel_ - at < BLOCK ? t->numel_ - at : BLOCK;
        PS_TRY(ps_tensor_read_f64(t, at, n, values));
        ps_stats block = block_stats(values, n);
        join_stats(&all, &block);
    }
    *out = all;
    return 0;
}

int ps_device_count(ps_ctx *ctx) { return ctx->n_devices; }

static bool device_ok(const ps_ctx *ctx, int device) { return device >= 0 && device < ctx->n_devices && !ctx->closed; }

const char *ps_device_name(ps_ctx *ctx, int device)
{
    return device_ok(ctx, device) ? ctx->devices[device]->name : "?";
}
const char *ps_device_describe(ps_ctx *ctx, int device)
{
    return device_ok(ctx, device) ? ctx->devices[device]->describe : "?";
}

int ps_device_info_get(ps_ctx *ctx, int device, ps_device_info *out)
{
    if (!device_ok(ctx, device)) return ps_fail(PS_EINVAL, "there is no device %d", device);
    const ps_backend *be = ctx->devices[device];
    *out = (ps_device_info){ .is_host = be->is_host, .has_data = !be->no_data, .fast_bf16 = be->fast_bf16,
                             .fuses = be->fuses };
    return 0;
}

static bool pretended;

int ps_machine_pretend(const ps_machine *machine)
{
    if (!machine || machine->host_nbytes < 0 || machine->device_nbytes < 0 || machine->device_total < 0 ||
        machine->device_sms < 0 || machine->device_sms > INT32_MAX)
        return ps_fail(PS_EINVAL, "a simulated machine has a negative size: its bytes of host memory, bytes of GPU "
                       "memory and number of multiprocessors must be 0 or more");
    ps_backends_pretend(machine);
    pretended = true;
    return 0;
}

int ps_machine_pretended(void) { return pretended; }

void ps_local_rank_set(int local_rank) { ps_backends_local_rank(local_rank); }

int ps_device_find(ps_ctx *ctx, const char *name, int *out)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    for (int i = 0; i < ctx->n_devices; i++)
        if (!strcmp(ctx->devices[i]->name, name)) {
            *out = i;
            return 0;
        }
    ps_backend *be;
    PS_TRY(ps_backend_open_named(name, &be));
    PS_TRY(ps_ctx_add_device(ctx, be));
    *out = ctx->n_devices - 1;
    return 0;
}

int ps_memory_get(ps_ctx *ctx, int device, ps_memory_info *out)
{
    if (!device_ok(ctx, device)) return ps_fail(PS_EINVAL, "there is no device %d", device);
    return ctx->mem.now->table->info(ctx->mem.now, device, out);
}

int ps_memory_set_limit(ps_ctx *ctx, int device, int64_t nbytes)
{
    if (!device_ok(ctx, device)) return ps_fail(PS_EINVAL, "there is no device %d", device);
    if (nbytes < 0) return ps_fail(PS_EINVAL, "a limit of %lld bytes; it must not be negative", (long long)nbytes);
    return ctx->mem.now->table->set_limit(ctx->mem.now, device, nbytes);
}

int ps_memory_holders(ps_ctx *ctx, int device, int when, ps_holder *out, int64_t *used)
{
    if (ctx->closed) return ps_fail(PS_ESTATE, "the context is closed");
    return ctx->mem.plain->table->holders(ctx->mem.plain, device, when, out, used);
}

void ps_tensor_note_line(ps_tensor *t, int32_t line)
{
    ps_storage *s = t->storage;
    if (s->keeper->table->note_line) s->keeper->table->note_line(s, line);
}

void ps_memory_reset_peak(ps_ctx *ctx, int device)
{
    if (device_ok(ctx, device)) ctx->mem.now->table->reset_peak(ctx->mem.now, device);
}

int64_t ps_memory_available(ps_ctx *ctx, int device)
{
    return device_ok(ctx, device) ? ctx->devices[device]->bytes_available(ctx->devices[device]) : -1;
}

int64_t ps_memory_held(ps_ctx *ctx, int device)
{
    ps_memory_info info;
    if (!device_ok(ctx, device) || ps_memory_get(ctx, device, &info) < 0) return -1;
    ps_backend *be = ctx->devices[device];
    return be->bytes_held ? be->bytes_held(be, info.reserved) : info.reserved;
}

ps_rng *ps_rng_get(ps_ctx *ctx) { return &ctx->rng; }

/* Writes the indices of the nonzero elements of a block to `rows`, and returns their number. `rows` must have space
 * for n indices. The index of block[0] is `first`. The code has no branches that depend on the values, because the
 * processor would often mispredict such branches. */
static int64_t note_nonzero(const double *block, int64_t first, int64_t n, int64_t *rows)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        rows[count] = first + i;
        count += block[i] != 0;
    }
    return count;
}

/* Makes a tensor of shape [count, ndim] whose rows are the coordinates of `count` elements of t. `rows` contains the
 * flat indices of these elements. */
static int write_coordinates(const ps_tensor *t, int64_t *rows, int64_t count, ps_tensor **out)
{
    ps_tensor *result;
    int64_t *all = rows, ndim = t->ndim;
    if (ndim != 1) {
        all = ps_alloc(sizeof *all * (size_t)(count * ndim + 1));
        if (!all) return ps_fail_nomem(sizeof *all * (size_t)(count * ndim + 1));
        for (int64_t r = 0; r < count; r++)
            for (int64_t d = ndim - 1, rest = rows[r]; d >= 0; rest /= t->shape_[d], d--)
                all[r * ndim + d] = rest % t->shape_[d];
    }
    int rc = ps_tensor_new(t->ctx, PS_I64, t->device_, 2, (int64_t[]){ count, ndim }, &result);
    if (rc == 0) {
        rc = count * ndim > 0 ? ps_tensor_write(result, all, count * ndim * (int64_t)sizeof *all) : 0;
        if (rc < 0) ps_tensor_release(result);
        else *out = result;
    }
    if (all != rows) ps_free(all);
    return rc;
}

int ps_tensor_nonzero(ps_tensor *t, ps_tensor **out)
{
    enum { BLOCK = 1024 };
    double block[BLOCK];
    int64_t count = 0, capacity = 0, *rows = NULL;
    int rc = 0;
    for (int64_t first = 0; rc == 0 && first < t->numel_; first += BLOCK) {
        int64_t n = t->numel_ - first < BLOCK ? t->numel_ - first : BLOCK;
        rc = ps_tensor_read_f64(t, first, n, block);
        if (rc == 0) rc = ps_grow(rows, capacity, count + n);
        if (rc == 0) count += note_nonzero(block, first, n, rows + count);
    }
    if (rc == 0) rc = write_coordinates(t, rows, count, out);
    ps_free(rows);
    return rc;
}
