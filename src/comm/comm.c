/* SPDX-License-Identifier: BSD-3-Clause
 * Groups of ranks and their collectives (ps.h). Every call has three parts: it prepares all that may fail on this rank
 * alone (checks, pins, memory), then the ranks compare what they are about to do, then bytes move. A rank that failed
 * in the first part says so in the second, so that none waits for it. Sums are taken here, in fp32 (fp64 of fp64) and
 * in the order of ranks, so that they do not depend on the library or the place of an element. */
#include "comm/comm.h"
#include "base/alloc.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/half.h"
#include "tensor/tensor.h"
#include <stdio.h>
#include <string.h>

enum { OP_ALL_REDUCE, OP_REDUCE_SCATTER, OP_ALL_GATHER, OP_BROADCAST, OP_BARRIER, OP_SEND, OP_RECV, OP_COUNT };
static const char *const op_names[OP_COUNT] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "send", "recv"
};

enum { STAGE_NBYTES = 8 << 20, SUM_BLOCK = 1024, SPREAD_NBYTES = 1 << 20 };

/* What ranks compare: 40 bytes on the wire. */
typedef struct header {
    uint64_t seq;                          /* calls of this group before (send, recv: between these two ranks) */
    int32_t op, dtype;
    int64_t nbytes;
    int32_t root, failed;                  /* failed: PS_E* of the first part, or 0 */
    uint64_t pad;
} header;
_Static_assert(sizeof(header) == 40, "what goes over the wire has no holes");

struct ps_group {
    ps_comm *comm;
    uint64_t seq, *pair_seq;               /* pair_seq: [size] */
    int64_t bytes_sent;
    header *heard;                         /* [size] */
    ps_comm_part *send, *recv;             /* [size] */
    char **addends;                        /* [size] */
    char *stage;                           /* what others send to be summed; made when first needed */
    int64_t stage_nbytes;
};

/* -- groups -------------------------------------------------------------------------------------------------------- */

static int group_new(ps_comm *comm, ps_group **out)
{
    size_t n = (size_t)comm->size;
    ps_group *g = ps_alloc0(sizeof *g);
    if (g) {
        g->comm = comm;
        g->pair_seq = ps_alloc0(sizeof *g->pair_seq * n);
        g->heard = ps_alloc0(sizeof *g->heard * n);
        g->send = ps_alloc0(sizeof *g->send * n);
        g->recv = ps_alloc0(sizeof *g->recv * n);
        g->addends = ps_alloc0(sizeof *g->addends * n);
    }
    if (g && g->pair_seq && g->heard && g->send && g->recv && g->addends) {
        *out = g;
        return 0;
    }
    if (g) ps_group_close(g);
    else comm->table->close(comm);
    return ps_fail_nomem(sizeof *g + n * (sizeof *g->heard + 2 * sizeof *g->send));
}

int ps_group_self(ps_ctx *ctx, ps_group **out)
{
    ps_comm *comm;
    PS_TRY(ps_comm_self(&comm));
    return group_new(comm, out);
}

int ps_group_gloo(ps_ctx *ctx, const char *rendezvous, int rank, int size, double timeout_s, ps_group **out)
{
    if (size < 1 || rank < 0 || rank >= size)
        return ps_fail(PS_EINVAL, "rank %d of a world of %d: ranks count from 0", rank, size);
    if (!(timeout_s >= 0.01 && timeout_s <= 1e6))
        return ps_fail(PS_EINVAL, "a time-out of %g s; it may be 0.01 to 1e6", timeout_s);
    ps_comm *comm;
    PS_TRY(ps_comm_gloo(rendezvous, rank, size, timeout_s, &comm));
    return group_new(comm, out);
}

void ps_group_close(ps_group *g)
{
    if (!g) return;
    g->comm->table->close(g->comm);
    ps_free(g->pair_seq);
    ps_free(g->heard);
    ps_free(g->send);
    ps_free(g->recv);
    ps_free(g->addends);
    ps_free(g->stage);
    ps_free(g);
}

int ps_group_rank(const ps_group *g) { return g->comm->rank; }
int ps_group_size(const ps_group *g) { return g->comm->size; }
int64_t ps_group_bytes_sent(const ps_group *g) { return g->bytes_sent; }

/* -- bytes of tensors ---------------------------------------------------------------------------------------------- */

typedef struct use {
    ps_tensor *t;
    char *bytes;
    bool pinned;
} use;

static int use_begin(use *u, ps_tensor *t, unsigned access)
{
    *u = (use){ .t = t };
    const ps_backend *be = t->ctx->closed ? NULL : t->ctx->devices[t->device_];
    PS_TRY(ps_tensor_check_alive(t));
    if (!be || !be->is_host || be->no_data)
        return ps_fail(PS_EUNSUP, "a tensor on device %s; collectives take host memory: t:to(\"cpu\")",
                       be ? be->name : "?");
    if (!ps_tensor_is_contiguous(t))
        return ps_fail(PS_EINVAL, "a tensor that is not contiguous; pass t:contiguous()");
    if (t->numel_ == 0) return 0;
    ps_mem *mem = t->storage->mem;
    void *p;
    PS_TRY(mem->table->pin(mem, t->storage, t->device_, access, NULL, &p));
    u->pinned = true;
    u->bytes = (char *)p + t->offset * ps_dtype_bytes(t->dtype_);
    if (access & PS_WRITE) t->storage->version++;
    return 0;
}

static void use_end(use *u)
{
    if (u->pinned) u->t->storage->mem->table->unpin(u->t->storage->mem, u->t->storage, u->t->device_, NULL);
    u->pinned = false;
}

static bool dry(const ps_tensor *t) { return t->ctx->dry && !ps_tensor_has_data(t); }

/* -- agreeing ------------------------------------------------------------------------------------------------------ */

static void describe(const header *h, char *text, size_t room)
{
    bool known = h->op >= 0 && h->op < OP_COUNT;
    int n = snprintf(text, room, "%s (call %llu", known ? op_names[h->op] : "an unknown call",
                     (unsigned long long)h->seq);
    if (known && h->op != OP_BARRIER)
        n += snprintf(text + n, room - (size_t)n, ", %s, %lld bytes", ps_dtype_name(h->dtype), (long long)h->nbytes);
    if (known && h->op == OP_BROADCAST) n += snprintf(text + n, room - (size_t)n, ", root %d", h->root);
    snprintf(text + n, room - (size_t)n, ")");
}

static const char *difference(const header *a, const header *b)
{
    return a->op != b->op ? "another call" : a->seq != b->seq ? "another number of calls"
           : a->dtype != b->dtype ? "another type" : a->nbytes != b->nbytes ? "another size"
           : a->root != b->root ? "another root" : NULL;
}

/* The headers of two ranks do not fit. */
static int differ(int rank_a, const header *a, int rank_b, const header *b, const char *what)
{
    char one[160], other[160];
    describe(a, one, sizeof one);
    describe(b, other, sizeof other);
    return ps_fail(PS_EINVAL, "the ranks disagree: rank %d is in %s, rank %d in %s: %s; all must make the same calls "
                   "with the same shapes in the same order", rank_a, one, rank_b, other, what);
}

static int exchange_headers(ps_group *g)
{
    PS_TRY(g->comm->table->begin(g->comm, PS_COMM_HEADER, g->send, g->recv));
    return g->comm->table->finish(g->comm, PS_COMM_HEADER);
}

/* Sends a header to all and hears theirs; every rank finds the same first failure or difference. */
static int agree(ps_group *g, header *mine)
{
    ps_comm *comm = g->comm;
    for (int r = 0; r < comm->size; r++) {
        g->send[r] = (ps_comm_part){ mine, sizeof *mine };
        g->recv[r] = (ps_comm_part){ &g->heard[r], sizeof *mine };
    }
    g->heard[comm->rank] = *mine;
    int rc = exchange_headers(g);
    if (rc < 0) {
        ps_error_prefix("%s, call %llu of rank %d: ", op_names[mine->op], (unsigned long long)mine->seq, comm->rank);
        return rc;
    }
    for (int r = 0; r < comm->size; r++)
        if (g->heard[r].op == OP_SEND || g->heard[r].op == OP_RECV || g->heard[r].seq != mine->seq) {
            comm->table->hang_up(comm);    /* the others are not in this exchange, so no later one would fit */
            return differ(comm->rank, mine, r, &g->heard[r], "the group is closed");
        }
    for (int r = 0; r < comm->size; r++)
        if (g->heard[r].failed)
            return ps_fail(g->heard[r].failed, "%s, call %llu: rank %d could not take part (%s); its own message says "
                           "why", op_names[mine->op], (unsigned long long)mine->seq, r,
                           ps_error_name(g->heard[r].failed));
    for (int r = 1; r < comm->size; r++) {
        const char *what = difference(&g->heard[0], &g->heard[r]);
        if (what) return differ(0, &g->heard[0], r, &g->heard[r], what);
    }
    return 0;
}

/* Part two of a collective. rc: how part one went; a failure there is told, and stays this rank's error. */
static int agree_all(ps_group *g, int op, const ps_tensor *t, int root, int rc)
{
    header mine = { .seq = g->seq++, .op = op, .root = root, .failed = rc };
    char why[900];
    if (t) {
        mine.dtype = t->dtype_;
        mine.nbytes = ps_tensor_nbytes(t);
    }
    if (rc == 0) return agree(g, &mine);
    snprintf(why, sizeof why, "%s", ps_error_message());
    agree(g, &mine);
    return ps_fail(rc, "%s, call %llu of rank %d: %s", op_names[op], (unsigned long long)mine.seq, g->comm->rank, why);
}

/* Begins to move the bytes of g->send and g->recv. */
static int move_begin(ps_group *g, int lane)
{
    for (int r = 0; r < g->comm->size; r++)
        if (r != g->comm->rank) g->bytes_sent += g->send[r].nbytes;
    return g->comm->table->begin(g->comm, lane, g->send, g->recv);
}

static int move_end(ps_group *g, int lane) { return g->comm->table->finish(g->comm, lane); }

/* Says of a failure in part three where it was. */
static int moved(const ps_group *g, int op, int rc)
{
    if (rc < 0)
        ps_error_prefix("%s, call %llu of rank %d, moving its bytes: ", op_names[op], (unsigned long long)g->seq - 1,
                        g->comm->rank);
    return rc;
}

static void clear_parts(ps_group *g)
{
    memset(g->send, 0, sizeof *g->send * (size_t)g->comm->size);
    memset(g->recv, 0, sizeof *g->recv * (size_t)g->comm->size);
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */

static void widen(int dtype, const char *from, float *to, int64_t n)
{
    const uint16_t *half = (const uint16_t *)from;
    if (dtype == PS_F32) {
        memcpy(to, from, (size_t)n * sizeof *to);
    } else if (dtype == PS_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = ps_bf16_to_f32(half[i]);
    } else {
        for (int64_t i = 0; i < n; i++) to[i] = ps_f16_to_f32(half[i]);
    }
}

static void narrow(int dtype, const float *from, char *to, int64_t n)
{
    uint16_t *half = (uint16_t *)to;
    if (dtype == PS_F32) {
        memcpy(to, from, (size_t)n * sizeof *from);
    } else if (dtype == PS_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) half[i] = ps_f32_to_bf16(from[i]);
    } else {
        for (int64_t i = 0; i < n; i++) half[i] = ps_f32_to_f16(from[i]);
    }
}

/* Elements first .. first + n - 1 of the sum of all ranks' bytes at[0 .. size-1]; n <= SUM_BLOCK. `to` may be one. */
static void sum_block(int dtype, int size, char *const *at, int64_t first, int64_t n, char *to)
{
    float sum[SUM_BLOCK], next[SUM_BLOCK];
    int64_t offset = first * ps_dtype_bytes(dtype);
    if (dtype == PS_F64) {
        for (int64_t i = first; i < first + n; i++) {
            double s = ((const double *)at[0])[i];
            for (int r = 1; r < size; r++) s += ((const double *)at[r])[i];
            ((double *)to)[i] = s;
        }
        return;
    }
    widen(dtype, at[0] + offset, sum, n);
    for (int r = 1; r < size; r++) {
        const float *add = next;
        if (dtype == PS_F32) add = (const float *)(at[r] + offset);
        else widen(dtype, at[r] + offset, next, n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) sum[i] += add[i];
    }
    narrow(dtype, sum, to + offset, n);
}

static void sum_ranks(int dtype, int size, char *const *at, int64_t n, char *to)
{
    int64_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
    for (int64_t b = 0; b < blocks; b++)
        sum_block(dtype, size, at, b * SUM_BLOCK, n - b * SUM_BLOCK < SUM_BLOCK ? n - b * SUM_BLOCK : SUM_BLOCK, to);
}

/* Memory for two pieces of this rank's part from every other: one arrives while the other is added. */
static int prepare_stage(ps_group *g, int dtype, int64_t part_nbytes, int64_t *piece_nbytes)
{
    int others = g->comm->size - 1;
    *piece_nbytes = part_nbytes;
    if (!ps_dtype_is_float(dtype))
        return ps_fail(PS_EUNSUP, "sums of %s; floating-point types only", ps_dtype_name(dtype));
    if (others == 0) return 0;
    int64_t most = STAGE_NBYTES / (2 * others) & ~(int64_t)4095;
    if (most < 4096) most = 4096;
    if (*piece_nbytes > most) *piece_nbytes = most;
    int64_t want = 2 * *piece_nbytes * others;
    if (want <= g->stage_nbytes) return 0;
    ps_free(g->stage);
    g->stage_nbytes = 0;
    g->stage = ps_alloc((size_t)want);
    if (!g->stage) return ps_fail_nomem(want);
    g->stage_nbytes = want;
    return 0;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where rank r's part of `nbytes` lies, cut to the piece that begins `from` bytes into it. Parts of `part` bytes; the
 * last ones may be short or empty. */
static ps_comm_part piece_of(char *base, int64_t nbytes, int64_t part, int r, int64_t from, int64_t piece)
{
    int64_t begin = least(r * part + from, nbytes), end = least(least(begin + piece, (r + 1) * part), nbytes);
    return (ps_comm_part){ base + begin, end > begin ? end - begin : 0 };
}

/* A sum under way: parts of `in` go to their ranks in pieces. */
typedef struct reduction {
    int dtype;
    char *in, *out;                        /* out: this rank's part; it may be that of `in` */
    int64_t nbytes, part, piece;           /* bytes of `in`, of a rank's part, of a piece of that */
} reduction;

static int lane_of(int64_t k) { return k & 1 ? PS_COMM_DATA_2 : PS_COMM_DATA; }

/* Where rank r's addend of piece k lies on this rank. */
static char *addend(const ps_group *g, const reduction *d, int64_t k, int r)
{
    int rank = g->comm->rank, others = g->comm->size - 1;
    if (r == rank) return piece_of(d->in, d->nbytes, d->part, rank, k * d->piece, d->piece).address;
    return g->stage + ((k & 1) * others + r - (r > rank)) * d->piece;
}

static int reduce_begin(ps_group *g, const reduction *d, int64_t k)
{
    int rank = g->comm->rank;
    int64_t nbytes = piece_of(d->in, d->nbytes, d->part, rank, k * d->piece, d->piece).nbytes;
    clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (r == rank) continue;
        g->send[r] = piece_of(d->in, d->nbytes, d->part, r, k * d->piece, d->piece);
        g->recv[r] = (ps_comm_part){ addend(g, d, k, r), nbytes };
    }
    return move_begin(g, lane_of(k));
}

/* This rank's part of the sum of all ranks' `in`: while a piece is added, the next one arrives. */
static int reduce_parts(ps_group *g, const reduction *d)
{
    int rank = g->comm->rank, size = g->comm->size;
    int64_t n = (d->part + d->piece - 1) / d->piece;
    PS_TRY(reduce_begin(g, d, 0));
    for (int64_t k = 0; k < n; k++) {
        if (k + 1 < n) PS_TRY(reduce_begin(g, d, k + 1));
        PS_TRY(move_end(g, lane_of(k)));
        for (int r = 0; r < size; r++) g->addends[r] = addend(g, d, k, r);
        int64_t nbytes = piece_of(d->in, d->nbytes, d->part, rank, k * d->piece, d->piece).nbytes;
        sum_ranks(d->dtype, size, g->addends, nbytes / ps_dtype_bytes(d->dtype), d->out + k * d->piece);
    }
    return 0;
}

/* Every rank's part goes to all others. `own` need not lie in its place; it is copied there. */
static int gather_parts(ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part own)
{
    int rank = g->comm->rank;
    char *place = piece_of(base, nbytes, part, rank, 0, part).address;
    if (place != own.address) memmove(place, own.address, (size_t)own.nbytes);
    own.address = place;                   /* what was just written is read faster than what was not */
    clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (r == rank) continue;
        g->send[r] = own;
        g->recv[r] = piece_of(base, nbytes, part, r, 0, part);
    }
    PS_TRY(move_begin(g, PS_COMM_DATA));
    return move_end(g, PS_COMM_DATA);
}

/* -- collectives --------------------------------------------------------------------------------------------------- */

static int64_t part_of(const ps_group *g, const ps_tensor *t)
{
    return (t->numel_ + g->comm->size - 1) / g->comm->size * ps_dtype_bytes(t->dtype_);
}

int ps_group_all_reduce(ps_group *g, ps_tensor *t)
{
    if (dry(t)) return 0;
    use u;
    int64_t part = part_of(g, t), nbytes = ps_tensor_nbytes(t), piece = 0;
    int rc = use_begin(&u, t, PS_READ | PS_WRITE);
    if (rc == 0) rc = prepare_stage(g, t->dtype_, part, &piece);
    rc = agree_all(g, OP_ALL_REDUCE, t, 0, rc);
    if (rc == 0 && nbytes > 0 && g->comm->size > 1) {
        ps_comm_part own = piece_of(u.bytes, nbytes, part, g->comm->rank, 0, part);
        reduction d = { t->dtype_, u.bytes, own.address, nbytes, part, piece };
        rc = reduce_parts(g, &d);
        if (rc == 0) rc = gather_parts(g, u.bytes, nbytes, part, own);
        rc = moved(g, OP_ALL_REDUCE, rc);
    }
    use_end(&u);
    return rc;
}

/* `whole` has to be `part` once for each rank. */
static int check_parts(const ps_group *g, const ps_tensor *part, const ps_tensor *whole, const char *names)
{
    if (part->dtype_ != whole->dtype_)
        return ps_fail(PS_EINVAL, "%s are %s and %s; they must have one type", names, ps_dtype_name(part->dtype_),
                       ps_dtype_name(whole->dtype_));
    if (part->numel_ * g->comm->size != whole->numel_)
        return ps_fail(PS_EINVAL, "%s have %lld and %lld elements; with %d ranks the larger must have %lld", names,
                       (long long)part->numel_, (long long)whole->numel_, g->comm->size,
                       (long long)part->numel_ * g->comm->size);
    return 0;
}

int ps_group_reduce_scatter(ps_group *g, ps_tensor *out, ps_tensor *in)
{
    if (dry(out) || dry(in)) return 0;
    use from = { .t = in }, to;
    int64_t part = ps_tensor_nbytes(out), piece = 0;
    int rc = use_begin(&to, out, PS_WRITE);
    if (rc == 0) rc = use_begin(&from, in, PS_READ);
    if (rc == 0) rc = check_parts(g, out, in, "out and in of reduce_scatter");
    if (rc == 0 && g->comm->size > 1 && in->storage == out->storage)
        rc = ps_fail(PS_EINVAL, "out and in of reduce_scatter share their bytes");
    if (rc == 0) rc = prepare_stage(g, in->dtype_, part, &piece);
    rc = agree_all(g, OP_REDUCE_SCATTER, in, 0, rc);
    if (rc == 0 && part > 0) {
        reduction d = { in->dtype_, from.bytes, to.bytes, ps_tensor_nbytes(in), part, piece };
        rc = moved(g, OP_REDUCE_SCATTER, reduce_parts(g, &d));
    }
    use_end(&from);
    use_end(&to);
    return rc;
}

int ps_group_all_gather(ps_group *g, ps_tensor *out, ps_tensor *in)
{
    if (dry(out) || dry(in)) return 0;
    use from = { .t = in }, to;
    int64_t part = ps_tensor_nbytes(in);
    int rc = use_begin(&to, out, PS_WRITE);
    if (rc == 0) rc = use_begin(&from, in, PS_READ);
    if (rc == 0) rc = check_parts(g, in, out, "in and out of all_gather");
    rc = agree_all(g, OP_ALL_GATHER, in, 0, rc);
    if (rc == 0 && part > 0) {
        ps_comm_part own = { from.bytes, part };
        rc = moved(g, OP_ALL_GATHER, gather_parts(g, to.bytes, part * g->comm->size, part, own));
    }
    use_end(&from);
    use_end(&to);
    return rc;
}

int ps_group_broadcast(ps_group *g, ps_tensor *t, int root)
{
    if (dry(t)) return 0;
    use u;
    int rank = g->comm->rank, size = g->comm->size;
    int64_t nbytes = ps_tensor_nbytes(t), part = (nbytes + size - 1) / size;
    int rc = use_begin(&u, t, PS_READ | (rank == root ? 0 : PS_WRITE));
    if (rc == 0 && (root < 0 || root >= size))
        rc = ps_fail(PS_EINVAL, "root %d of a group of %d ranks", root, size);
    rc = agree_all(g, OP_BROADCAST, t, root, rc);
    if (rc == 0 && nbytes > 0 && size > 1) {
        /* Much: the root sends each rank a part, which that passes on, so none sends more than twice the size. */
        bool spread = size > 2 && nbytes >= SPREAD_NBYTES;
        clear_parts(g);
        for (int r = 0; rank == root && r < size; r++)
            g->send[r] = spread ? piece_of(u.bytes, nbytes, part, r, 0, part) : (ps_comm_part){ u.bytes, nbytes };
        if (rank != root)
            g->recv[root] = spread ? piece_of(u.bytes, nbytes, part, rank, 0, part) : (ps_comm_part){ u.bytes, nbytes };
        rc = move_begin(g, PS_COMM_DATA);
        if (rc == 0) rc = move_end(g, PS_COMM_DATA);
        if (rc == 0 && spread)
            rc = gather_parts(g, u.bytes, nbytes, part, piece_of(u.bytes, nbytes, part, rank, 0, part));
        rc = moved(g, OP_BROADCAST, rc);
    }
    use_end(&u);
    return rc;
}

int ps_group_barrier(ps_group *g) { return agree_all(g, OP_BARRIER, NULL, 0, 0); }

/* -- between two ranks --------------------------------------------------------------------------------------------- */

/* The same comparison between two ranks: one sends, the other receives as much. */
static int agree_pair(ps_group *g, int op, const ps_tensor *t, int peer, int failed)
{
    ps_comm *comm = g->comm;
    header mine = { .seq = g->pair_seq[peer]++, .op = op, .dtype = t->dtype_, .nbytes = ps_tensor_nbytes(t),
                    .failed = failed };
    header *theirs = &g->heard[peer];
    clear_parts(g);
    g->send[peer] = (ps_comm_part){ &mine, sizeof mine };
    g->recv[peer] = (ps_comm_part){ theirs, sizeof mine };
    int rc = exchange_headers(g);
    if (rc < 0) {
        ps_error_prefix("%s, rank %d with rank %d: ", op_names[op], comm->rank, peer);
        return rc;
    }
    if (theirs->op != (op == OP_SEND ? OP_RECV : OP_SEND) || theirs->seq != mine.seq) {
        comm->table->hang_up(comm);
        return differ(comm->rank, &mine, peer, theirs, "each send wants a recv on the other rank");
    }
    if (theirs->failed)
        return ps_fail(theirs->failed, "%s: rank %d could not take part (%s); its own message says why", op_names[op],
                       peer, ps_error_name(theirs->failed));
    if (theirs->dtype != mine.dtype || theirs->nbytes != mine.nbytes)
        return differ(comm->rank, &mine, peer, theirs, "type and size must be the same");
    return 0;
}

static int between(ps_group *g, int op, ps_tensor *t, int peer)
{
    if (dry(t)) return 0;
    if (peer < 0 || peer >= g->comm->size || peer == g->comm->rank)
        return ps_fail(PS_EINVAL, "%s: peer %d of rank %d in a group of %d", op_names[op], peer, g->comm->rank,
                       g->comm->size);
    use u;
    char why[900];
    int failed = use_begin(&u, t, op == OP_SEND ? PS_READ : PS_WRITE);
    snprintf(why, sizeof why, "%s", failed < 0 ? ps_error_message() : "");
    int rc = agree_pair(g, op, t, peer, failed);
    if (failed < 0) rc = ps_fail(failed, "%s: %s", op_names[op], why);
    if (rc == 0 && u.pinned) {
        clear_parts(g);
        *(op == OP_SEND ? &g->send[peer] : &g->recv[peer]) = (ps_comm_part){ u.bytes, ps_tensor_nbytes(t) };
        rc = move_begin(g, PS_COMM_DATA);
        if (rc == 0) rc = move_end(g, PS_COMM_DATA);
        if (rc < 0) ps_error_prefix("%s, rank %d with rank %d: ", op_names[op], g->comm->rank, peer);
    }
    use_end(&u);
    return rc;
}

int ps_group_send(ps_group *g, ps_tensor *t, int peer) { return between(g, OP_SEND, t, peer); }
int ps_group_recv(ps_group *g, ps_tensor *t, int peer) { return between(g, OP_RECV, t, peer); }

/* -- for benches --------------------------------------------------------------------------------------------------- */
int ps_group_raw(ps_group *g, int all_reduce, ps_tensor *out, ps_tensor *in)
{
    use from = { .t = in }, to;
    ps_comm *comm = g->comm;
    int (*call)(ps_comm *, float *, float *, int64_t) =
        all_reduce ? comm->table->raw_all_reduce : comm->table->raw_all_gather;
    if (!call) return ps_fail(PS_EUNSUP, "a group of %s has no collectives of its own", comm->table->name);
    if (in->dtype_ != PS_F32 || out->dtype_ != PS_F32 || out->numel_ != in->numel_ * (all_reduce ? 1 : comm->size))
        return ps_fail(PS_EINVAL, "the library's own collectives take fp32 of fitting sizes here");
    int rc = use_begin(&to, out, PS_WRITE);
    if (rc == 0) rc = use_begin(&from, in, PS_READ);
    if (rc == 0) rc = call(comm, (float *)(void *)to.bytes, (float *)(void *)from.bytes, in->numel_);
    use_end(&from);
    use_end(&to);
    return rc;
}
