/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the collectives on tensors (ps.h). They run on the calling thread, after the jobs of the group
 * have run. Therefore all ranks make their calls in the same order. */
#include <stdio.h>
#include <string.h>
#include "base/dtype.h"
#include "base/error.h"
#include "collectives/collectives.h"
#include "ps_test.h"
#include "tensor/tensor.h"

enum { SPREAD_NBYTES = 1 << 20 };

/* -- bytes of tensors ---------------------------------------------------------------------------------------------- */

typedef struct use {
    ps_tensor *t;
    char *bytes;
    bool pinned;
} use;

static int use_begin(ps_group *g, use *u, ps_tensor *t, unsigned access)
{
    *u = (use){ .t = t };
    PS_TRY(ps_tensor_check_alive(t));
    const ps_backend *be = t->ctx->devices[t->device_];
    if (be->no_data) return ps_fail(PS_EUNSUP, "cannot send a tensor on device %s: tensors of this device have no "
                                    "bytes", be->name);
    if (!be->is_host && g->device != t->device_)
        return ps_fail(PS_ESTATE, "a tensor is on device %s, which is not connected: call group:connect on all ranks "
                                  "first",
                       be->name);
    if (!be->is_host) PS_TRY(group_after_now(g, ON_DEVICE));
    if (!ps_tensor_is_contiguous(t))
        return ps_fail(PS_EINVAL, "a tensor is not contiguous; pass t:contiguous()");
    if (t->numel_ == 0) return 0;
    void *p;
    PS_TRY(ps_storage_pin(t->storage, t->device_, access, &p));
    u->pinned = true;
    u->bytes = (char *)p + t->offset * ps_dtype_bytes(t->dtype_);
    if (access & PS_WRITE) t->storage->version++;
    if (access & PS_WRITE && be->pretends) t->storage->bytes.written = true;
    return 0;
}

static void use_end(use *u)
{
    if (u->pinned) ps_storage_unpin(u->t->storage, u->t->device_);
    u->pinned = false;
}

/* Returns true if the bytes of the tensor are never read. In a dry run, the tensor has no bytes. On a simulated
 * machine, the other ranks have the same bytes as this rank. */
static bool dry(const ps_tensor *t)
{
    return !ps_tensor_has_data(t) && (t->ctx->step->dry || t->ctx->devices[t->device_]->pretends);
}

/* Returns true if a broadcast is sent in shards. The root then sends one shard to each rank, and each rank sends its
 * shard to the other ranks. Therefore no rank sends more than 2 * nbytes bytes. */
static bool spreads(const ps_group *g, int64_t nbytes) { return g->comm->size > 2 && nbytes >= SPREAD_NBYTES; }

void group_count(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root)
{
    int size = g->comm->size, width = ps_dtype_bytes(dtype);
    bool sums = op == OP_ALL_REDUCE, small = sums && group_is_small(g, at, nbytes);
    if (op == OP_ALL_GATHER || small) {
        g->bytes_sent += nbytes * (size - 1);
        return;
    }
    if (op == OP_BROADCAST && !spreads(g, nbytes)) {
        if (g->comm->rank == root) g->bytes_sent += nbytes * (size - 1);
        return;
    }
    int64_t part = sums ? (nbytes / width + size - 1) / size * width : (nbytes + size - 1) / size;
    group_split(g, NULL, nbytes, part, g->parts);
    group_count_parts(g, g->parts, op != OP_BROADCAST || g->comm->rank == root, op != OP_REDUCE_SCATTER);
}

static int without_bytes(ps_group *g, int op, const ps_tensor *t, int root)
{
    place at = t->ctx->devices[t->device_]->is_host ? ON_HOST : ON_DEVICE;
    return group_without_bytes(g, op, at, t->dtype_, ps_tensor_nbytes(t), root);
}

/* Sets *out to the kind of memory in which the tensor is stored (ON_HOST or ON_DEVICE). Connects the tensor's device if
 * necessary. */
static int place_of(ps_group *g, ps_tensor *t, place *out)
{
    *out = ON_HOST;
    PS_TRY(ps_tensor_check_alive(t));
    return group_place(g, t->ctx, t->device_, out);
}

/* Waits for earlier jobs, so that the calls of the group and of the device stay in order (see comm/group.h, section
 * job.c). */
static void drain_before(ps_group *g, place at)
{
    group_drain(g);
    for (int i = 0; at == ON_DEVICE && g->ctx && i < PS_MAX_GROUPS; i++)
        if (g->ctx->ranks.groups[i]) group_drain_device(g->ctx->ranks.groups[i]);
}

int group_agree_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root, int rc)
{
    header mine = { .op = op, .dtype = dtype, .nbytes = nbytes, .root = root, .failed = rc, .place = at,
                    .small = group_goes_small(g, op, at, nbytes) };
    char why[900], call[GROUP_CALL_NBYTES];
    snprintf(why, sizeof why, "%s", rc < 0 ? ps_error_message() : "");
    drain_before(g, at);
    mine.seq = g->seq++;
    g->recorded = (group_call){ op, group_call_begin(),
                                 op == OP_ALL_GATHER || op == OP_COLUMN ? nbytes * g->comm->size : nbytes };
    if (rc == 0) return group_told(g, group_agree(g, &mine));
    group_agree(g, &mine);
    ps_fail(rc, "%s, call %llu of rank %d: %s", group_call_name(g, op, call), (unsigned long long)mine.seq,
            group_world(g, g->comm->rank), why);
    return group_told(g, rc);
}

int group_moved(ps_group *g, int op, place at, int rc)
{
    char call[GROUP_CALL_NBYTES];
    int point = rc == 0 ? group_hand_over(g, at, op, g->seq - 1) : rc;
    rc = point < 0 ? point : group_catch_up(g, at, point);
    if (rc == 0 && group_call_is_timed(op)) rc = group_settle(g, at);
    group_done(g);
    group_call_end(g, &g->recorded);
    if (rc < 0)
        ps_error_prefix("%s, call %llu of rank %d, moving its bytes: ", group_call_name(g, op, call),
                        (unsigned long long)g->seq - 1, group_world(g, g->comm->rank));
    return group_told(g, rc);
}

/* Multiplies the values by `size`, in place. The result is the sum over `size` ranks that all have these values. */
static void sum_of_equals(int dtype, char *bytes, int64_t nbytes, int size)
{
    int64_t n = nbytes / ps_dtype_bytes(dtype);
    for (int64_t i = 0; i < n; i++) {
        if (dtype == PS_F64) ((double *)bytes)[i] *= size;
        else if (dtype == PS_F32) ((float *)bytes)[i] *= (float)size;
        else if (dtype == PS_I64) ((int64_t *)bytes)[i] *= size;
        else if (dtype == PS_I32) ((int32_t *)bytes)[i] *= size;
    }
}

/* -- on bytes, for tensors and for ops ----------------------------------------------------------------------------- */

int group_all_reduce(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int rc)
{
    return group_all_reduce_by(g, at, PS_REDUCE_SUM, dtype, bytes, nbytes, rc);
}

int group_all_reduce_by(ps_group *g, place at, int reduce, int dtype, char *bytes, int64_t nbytes, int rc)
{
    int size = g->comm->size, width = ps_dtype_bytes(dtype);
    int64_t part = (nbytes / width + size - 1) / size * width, piece = 0;
    group_drain(g);                        /* jobs use the same memory for addends */
    if (rc == 0) rc = group_prepare_sum(g, at, reduce, dtype, part, &piece);
    bool small = group_is_small(g, at, nbytes);
    if (small && rc == 0) memcpy(group_small(g, g->comm->rank), bytes, (size_t)nbytes);
    PS_TRY(group_agree_bytes(g, OP_ALL_REDUCE, at, dtype, nbytes, reduce, rc));
    if (small) {
        group_sum_small(g, reduce, dtype, nbytes, bytes);
        g->bytes_sent += nbytes * (size - 1);
        return group_moved(g, OP_ALL_REDUCE, at, 0);
    }
    if (g->comm->pretends) group_count(g, OP_ALL_REDUCE, at, dtype, nbytes, 0);
    if (g->comm->pretends && reduce == PS_REDUCE_SUM) sum_of_equals(dtype, bytes, nbytes, size);
    if (nbytes == 0 || size == 1 || g->comm->pretends) return group_moved(g, OP_ALL_REDUCE, at, 0);
    group_split(g, bytes, nbytes, part, g->parts);
    rc = group_reduce(g, at, reduce, dtype, g->parts, piece, NULL);
    if (rc == 0) rc = group_gather(g, at, g->parts);
    return group_moved(g, OP_ALL_REDUCE, at, rc);
}

int group_reduce_scatter(ps_group *g, place at, int dtype, char *in, int64_t nbytes, char *out, int rc)
{
    int64_t part = nbytes / g->comm->size, piece = 0;
    group_drain(g);
    if (rc == 0) rc = group_prepare_sum(g, at, PS_REDUCE_SUM, dtype, part, &piece);
    PS_TRY(group_agree_bytes(g, OP_REDUCE_SCATTER, at, dtype, nbytes, 0, rc));
    if (part == 0) return 0;
    group_split(g, in, nbytes, part, g->parts);
    if (g->comm->pretends) {
        group_count(g, OP_REDUCE_SCATTER, at, dtype, nbytes, 0);
        memmove(out, g->parts[g->comm->rank].address, (size_t)part);
        sum_of_equals(dtype, out, part, g->comm->size);
        return group_moved(g, OP_REDUCE_SCATTER, at, 0);
    }
    return group_moved(g, OP_REDUCE_SCATTER, at, group_reduce(g, at, PS_REDUCE_SUM, dtype, g->parts, piece, out));
}

int group_all_gather(ps_group *g, place at, int dtype, const char *in, int64_t nbytes, char *out, int rc)
{
    bool small = group_is_small(g, at, nbytes);
    if (small && rc == 0) {
        group_drain(g);                    /* jobs use the same memory */
        memcpy(group_small(g, g->comm->rank), in, (size_t)nbytes);
    }
    PS_TRY(group_agree_bytes(g, OP_ALL_GATHER, at, dtype, nbytes, 0, rc));
    if (nbytes == 0) return 0;
    for (int r = 0; small && r < g->comm->size; r++) memcpy(out + r * nbytes, group_small(g, r), (size_t)nbytes);
    if (small) {
        g->bytes_sent += nbytes * (g->comm->size - 1);
        return group_moved(g, OP_ALL_GATHER, at, 0);
    }
    group_split(g, out, nbytes * g->comm->size, nbytes, g->parts);
    for (int r = 0; g->comm->pretends && r < g->comm->size; r++) memmove(g->parts[r].address, in, (size_t)nbytes);
    if (g->comm->pretends) group_count(g, OP_ALL_GATHER, at, dtype, nbytes, 0);
    if (g->comm->pretends) return group_moved(g, OP_ALL_GATHER, at, 0);
    /* This rank's shard is copied before it is sent, so that the sends read it from the cache. */
    rc = group_copy(g, at, g->parts[g->comm->rank].address, in, nbytes);
    return group_moved(g, OP_ALL_GATHER, at, rc < 0 ? rc : group_gather(g, at, g->parts));
}

int group_broadcast(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int root, int rc)
{
    int rank = g->comm->rank, size = g->comm->size;
    int64_t part = (nbytes + size - 1) / size;
    if (rc == 0 && (root < 0 || root >= size))
        rc = ps_fail(PS_EINVAL, "root %d is not a rank of this group of %d ranks", root, size);
    PS_TRY(group_agree_bytes(g, OP_BROADCAST, at, dtype, nbytes, root, rc));
    if (g->comm->pretends) group_count(g, OP_BROADCAST, at, dtype, nbytes, root);
    if (nbytes == 0 || size == 1 || g->comm->pretends) return group_moved(g, OP_BROADCAST, at, 0);
    bool spread = spreads(g, nbytes);
    group_split(g, bytes, nbytes, spread ? part : nbytes, g->parts);
    group_clear_parts(g);
    for (int r = 0; rank == root && r < size; r++) g->send[r] = g->parts[spread ? r : 0];
    if (rank != root) g->recv[root] = g->parts[spread ? rank : 0];
    rc = group_exchange(g, at);
    if (rc == 0 && spread) rc = group_gather(g, at, g->parts);
    return group_moved(g, OP_BROADCAST, at, rc);
}

/* -- on tensors ---------------------------------------------------------------------------------------------------- */

int group_all_reduce_tensor(ps_group *g, ps_tensor *t, int reduce, int rc)
{
    if (dry(t)) return rc < 0 ? rc : without_bytes(g, OP_ALL_REDUCE, t, reduce);
    use u = { .t = t };
    place at;
    PS_TRY(place_of(g, t, &at));
    if (rc == 0) rc = use_begin(g, &u, t, PS_READ | PS_WRITE);
    rc = group_all_reduce_by(g, at, reduce, t->dtype_, u.bytes, ps_tensor_nbytes(t), rc);
    use_end(&u);
    return rc;
}

int ps_group_all_reduce(ps_group *g, ps_tensor *t, int reduce) { return group_all_reduce_tensor(g, t, reduce, 0); }

/* Checks that `whole` has as many elements as the parts of all ranks have together. `part` is the part of this rank.
 * `names` names both tensors in errors. */
static int check_parts(const ps_group *g, const ps_tensor *part, const ps_tensor *whole, const char *names)
{
    if (part->dtype_ != whole->dtype_)
        return ps_fail(PS_EINVAL, "%s are %s and %s; they must have one type", names, ps_dtype_name(part->dtype_),
                       ps_dtype_name(whole->dtype_));
    if (part->device_ != whole->device_)
        return ps_fail(PS_EINVAL, "%s are on two devices", names);
    if (part->numel_ * g->comm->size != whole->numel_)
        return ps_fail(PS_EINVAL, "%s have %lld and %lld elements; with %d ranks the larger must have %lld elements",
                       names, (long long)part->numel_, (long long)whole->numel_, g->comm->size,
                       (long long)part->numel_ * g->comm->size);
    return 0;
}

int ps_group_reduce_scatter(ps_group *g, ps_tensor *out, ps_tensor *in)
{
    if (dry(in) || (dry(out) && out->ctx->step->dry)) return without_bytes(g, OP_REDUCE_SCATTER, in, 0);
    use from = { .t = in }, to;
    place at;
    PS_TRY(place_of(g, in, &at));
    int rc = use_begin(g, &to, out, PS_WRITE);
    if (rc == 0) rc = use_begin(g, &from, in, PS_READ);
    if (rc == 0) rc = check_parts(g, out, in, "`out` and `in` of reduce_scatter");
    if (rc == 0 && g->comm->size > 1 && in->storage == out->storage)
        rc = ps_fail(PS_EINVAL, "`out` and `in` of reduce_scatter must not share their bytes");
    rc = group_reduce_scatter(g, at, in->dtype_, from.bytes, ps_tensor_nbytes(in), to.bytes, rc);
    use_end(&from);
    use_end(&to);
    return rc;
}

int ps_group_all_gather(ps_group *g, ps_tensor *out, ps_tensor *in)
{
    if (dry(in) || (dry(out) && out->ctx->step->dry)) return without_bytes(g, OP_ALL_GATHER, in, 0);
    use from = { .t = in }, to;
    place at;
    PS_TRY(place_of(g, in, &at));
    int rc = use_begin(g, &to, out, PS_WRITE);
    if (rc == 0) rc = use_begin(g, &from, in, PS_READ);
    if (rc == 0) rc = check_parts(g, in, out, "`in` and `out` of all_gather");
    rc = group_all_gather(g, at, in->dtype_, from.bytes, ps_tensor_nbytes(in), to.bytes, rc);
    use_end(&from);
    use_end(&to);
    return rc;
}

int ps_group_broadcast(ps_group *g, ps_tensor *t, int root)
{
    if (dry(t)) return without_bytes(g, OP_BROADCAST, t, root);
    use u;
    place at;
    PS_TRY(place_of(g, t, &at));
    int rc = use_begin(g, &u, t, PS_READ | (g->comm->rank == root ? 0 : PS_WRITE));
    rc = group_broadcast(g, at, t->dtype_, u.bytes, ps_tensor_nbytes(t), root, rc);
    use_end(&u);
    return rc;
}

int ps_group_barrier(ps_group *g)
{
    int rc = group_settle(g, ON_DEVICE);
    PS_TRY(group_agree_bytes(g, OP_BARRIER, ON_HOST, 0, 0, 0, rc));
    group_call_end(g, &g->recorded);
    return 0;
}


/* -- between two ranks --------------------------------------------------------------------------------------------- */

static int between(ps_group *g, int op, ps_tensor *t, int peer)
{
    if (dry(t)) return 0;
    if (peer < 0 || peer >= g->comm->size || peer == g->comm->rank)
        return ps_fail(PS_EINVAL, "%s: there is no peer %d for rank %d in a group of %d",
                       group_op_name(op), peer, g->comm->rank,
                       g->comm->size);
    use u;
    char why[900];
    place at = t->ctx->devices[t->device_]->is_host ? ON_HOST : ON_DEVICE;
    int failed = use_begin(g, &u, t, op == OP_SEND ? PS_READ : PS_WRITE);
    snprintf(why, sizeof why, "%s", failed < 0 ? ps_error_message() : "");
    drain_before(g, at);
    header mine = { .seq = g->pair_seq[peer]++, .op = op, .dtype = t->dtype_, .nbytes = ps_tensor_nbytes(t),
                    .failed = failed, .place = at };
    group_call call = { op, group_call_begin(), mine.nbytes };
    int rc = group_agree_pair(g, &mine, peer);
    if (failed < 0) rc = ps_fail(failed, "%s: %s", group_op_name(op), why);
    if (rc == 0 && u.pinned) {
        group_clear_parts(g);
        *(op == OP_SEND ? &g->send[peer] : &g->recv[peer]) = (ps_comm_part){ u.bytes, ps_tensor_nbytes(t) };
        rc = group_exchange(g, at);
        if (rc == 0) rc = group_settle(g, at);
        if (rc < 0) ps_error_prefix("%s, rank %d with rank %d: ", group_op_name(op), g->comm->rank, peer);
    }
    group_done(g);
    group_call_end(g, &call);
    use_end(&u);
    return group_told(g, rc);
}

int ps_group_send(ps_group *g, ps_tensor *t, int peer) { return between(g, OP_SEND, t, peer); }
int ps_group_recv(ps_group *g, ps_tensor *t, int peer) { return between(g, OP_RECV, t, peer); }

/* -- for benchmarks ------------------------------------------------------------------------------------------------ */
int ps_group_raw(ps_group *g, int all_reduce, ps_tensor *out, ps_tensor *in)
{
    use from = { .t = in }, to;
    place at;
    PS_TRY(place_of(g, in, &at));
    ps_comm *comm = g->at[at].comm;
    int (*call)(ps_comm *, float *, float *, int64_t) =
        all_reduce ? comm->table->raw_all_reduce : comm->table->raw_all_gather;
    if (!call) return ps_fail(PS_EUNSUP, "the library of a group of %s has no collectives of its own",
                              comm->table->name);
    if (in->dtype_ != PS_F32 || out->dtype_ != PS_F32 || out->numel_ != in->numel_ * (all_reduce ? 1 : comm->size))
        return ps_fail(PS_EINVAL, "the library's own collectives support only fp32 tensors of matching sizes here");
    int rc = use_begin(g, &to, out, PS_WRITE);
    if (rc == 0) rc = use_begin(g, &from, in, PS_READ);
    if (rc == 0) rc = call(comm, (float *)(void *)to.bytes, (float *)(void *)from.bytes, in->numel_);
    use_end(&from);
    use_end(&to);
    return rc;
}
