/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements groups of ranks and their collectives (ps.h, group.h). A call has three sections:
 *   1. This rank does everything that may fail on this rank alone: it checks the call, pins tensors and allocates
 *      memory.
 *   2. The ranks compare their calls. If a rank failed in section 1, it sends its error, so that no other rank waits
 *      for it.
 *   3. The ranks send the bytes.
 * If a call has at most GROUP_SMALL_NBYTES bytes, its bytes are already sent in section 2. They are used only after the
 * calls have been compared.
 *
 * Sums of host memory are computed in this file, in rank order. fp64 values are summed in fp64, other floating-point
 * values in fp32, and integers exactly. The sums do not depend on the transport library or on the position of an
 * element in its tensor. */
#include "comm/inner.h"
#include "base/alloc.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/half.h"
#include "rendezvous/watch.h"
#include <stdio.h>
#include <string.h>

static const char *const op_names[OP_COUNT] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "connection of devices", "split",
    "send", "recv", "gather in a column layer", "reduction in a row layer", "backward of a column layer",
    "gather of chunks", "reduction of chunks", "all-reduction of chunks"
};

enum { SUM_BLOCK = 1024, SMALL_OTHERS = 16 };
/* Size in bytes of the memory for addends, by kind of memory. Device memory has a larger size, because the host has to
 * begin the exchange of each piece. */
static const int64_t stage_nbytes[PLACES] = { 8 << 20, 64 << 20 };

const char *group_op_name(int op) { return op_names[op]; }
const char *ps_record_call_name(int name) { return name >= 0 && name < OP_COUNT ? op_names[name] : NULL; }

const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES])
{
    const char *axis = g->comm->axis;
    snprintf(text, GROUP_CALL_NBYTES, "%s%s%s", op_names[op], axis[0] ? " of " : "", axis);
    return text;
}

/* -- groups -------------------------------------------------------------------------------------------------------- */

/* Returns true if each rank may send all bytes of a small call to every other rank. If there are many ranks, it is
 * cheaper to send shards. */
static bool has_small(const ps_comm *comm)
{
    return comm->size > 1 && comm->size <= 1 + SMALL_OTHERS;
}

/* Returns true if device memory has its own communicator. */
static bool has_wire(const ps_group *g) { return g->at[ON_DEVICE].comm && g->at[ON_DEVICE].comm != g->comm; }

static void stage_free(transport *t)
{
    if (t->staging && t->comm->table->memory_free) t->comm->table->memory_free(t->comm, t->staging);
    else ps_free(t->staging);
    t->staging = NULL;
    t->stage_nbytes = 0;
}

void group_stop(ps_group *g)
{
    group_jobs_close(g);
    if (has_wire(g)) g->at[ON_DEVICE].comm->table->leave(g->at[ON_DEVICE].comm);
}

void group_free(ps_group *g)
{
    bool two = has_wire(g);
    for (int at = 0; at < PLACES; at++) stage_free(&g->at[at]);
    /* The communicator of host memory is closed first, because its close notifies the other ranks that this rank has
     * left. */
    g->comm->table->close(g->comm);
    if (two) g->at[ON_DEVICE].comm->table->close(g->at[ON_DEVICE].comm);
    ps_free(g->pair_seq);
    ps_free(g->heard);
    ps_free(g->send);
    ps_free(g->recv);
    ps_free(g->parts);
    ps_free(g->addends);
    ps_free(g->said);
    group_plan_free(g);
    ps_free(g);
}

int group_make(ps_comm *comm, ps_group **out)
{
    size_t n = (size_t)comm->size;
    ps_group *g = ps_alloc0(sizeof *g);
    if (g) {
        g->comm = g->at[ON_HOST].comm = comm;
        g->device = -1;
        g->refs = 1;
        g->number = -1;
        g->pair_seq = ps_alloc0(sizeof *g->pair_seq * n);
        g->heard = ps_alloc0(sizeof *g->heard * n);
        g->send = ps_alloc0(sizeof *g->send * n);
        g->recv = ps_alloc0(sizeof *g->recv * n);
        g->parts = ps_alloc0(sizeof *g->parts * n);
        g->addends = ps_alloc0(sizeof *g->addends * n);
        g->has_small = has_small(comm);
        g->said_nbytes = (int64_t)sizeof(header) + (g->has_small ? GROUP_SMALL_NBYTES : 0);
        g->said = ps_alloc0(n * (size_t)g->said_nbytes);
    }
    if (g && g->pair_seq && g->heard && g->send && g->recv && g->parts && g->addends && g->said) {
        *out = g;
        return 0;
    }
    if (g) group_free(g);
    else comm->table->close(comm);
    return ps_fail_nomem(sizeof *g + n * (sizeof *g->heard + 3 * sizeof *g->send));
}

int ps_group_rank(const ps_group *g) { return g->comm->rank; }
int ps_group_size(const ps_group *g) { return g->comm->size; }
const char *ps_group_axis(const ps_group *g) { return g->comm->axis; }

int ps_group_world_rank(const ps_group *g, int rank)
{
    if (rank < 0 || rank >= g->comm->size)
        return ps_fail(PS_EINVAL, "there is no rank %d in a group of %d ranks", rank, g->comm->size);
    return group_world(g, rank);
}

int ps_group_number(const ps_group *g) { return g->number; }
int64_t ps_group_bytes_sent(const ps_group *g) { return g->bytes_sent; }
int64_t ps_group_bytes_in_pieces(const ps_group *g) { return g->bytes_in_pieces; }

/* -- comparing calls ----------------------------------------------------------------------------------------------- */

static bool in_pieces(int op) { return op == OP_COLUMN || op == OP_ROW || op == OP_COLUMN_GRAD; }

void group_describe(const header *h, char *text, size_t room)
{
    bool known = h->op >= 0 && h->op < OP_COUNT;
    int n = snprintf(text, room, "%s (call %llu", known ? op_names[h->op] : "an unknown call",
                     (unsigned long long)h->seq);
    if (known && h->op != OP_BARRIER && h->op != OP_CONNECT)
        n += snprintf(text + n, room - (size_t)n, ", %s, %lld bytes", ps_dtype_name(h->dtype), (long long)h->nbytes);
    if (known && h->op >= OP_CHUNK_GATHER) n += snprintf(text + n, room - (size_t)n, ", stripe %d", h->root);
    if (known && h->place == ON_DEVICE && h->op != OP_CONNECT) n += snprintf(text + n, room - (size_t)n, ", on device");
    if (known && in_pieces(h->op)) n += snprintf(text + n, room - (size_t)n, ", %d pieces", h->root);
    if (known && h->op == OP_BROADCAST) n += snprintf(text + n, room - (size_t)n, ", root %d", h->root);
    snprintf(text + n, room - (size_t)n, ")");
}

static const char *other_root(const header *a)
{
    return a->op >= OP_CHUNK_GATHER ? "another stripe of chunks" : a->op == OP_CONNECT ? "another kind of device"
           : a->op == OP_ALL_REDUCE ? "another of sum, max and min" : in_pieces(a->op) ? "another number of pieces"
           : "another root";
}

static const char *difference(const header *a, const header *b)
{
    return a->op != b->op ? "another call" : a->seq != b->seq ? "another number of calls"
           : a->place != b->place ? "other memory" : a->dtype != b->dtype ? "another type"
           : a->nbytes != b->nbytes ? "another size"
           : a->root != b->root ? other_root(a)
           : a->check != b->check ? "gradients of other parameters" : NULL;
}

/* Raises an error that names two ranks and describes their headers, which differ. */
static int differ(const ps_group *g, int r_a, const header *a, int r_b, const header *b, const char *what)
{
    int rank_a = group_world(g, r_a), rank_b = group_world(g, r_b);
    const char *axis = g->comm->axis;
    char one[160], other[160];
    group_describe(a, one, sizeof one);
    group_describe(b, other, sizeof other);
    int rc = ps_fail(PS_EINVAL, "the ranks%s%s disagree: rank %d is in %s, rank %d in %s: %s; all must make the same "
                     "calls with the same shapes in the same order", axis[0] ? " of " : "", axis, rank_a, one, rank_b,
                     other, what);
    if (a->op == b->op && a->op >= OP_CHUNK_GATHER && a->seq == b->seq && a->place == b->place)
        return ps_error_set_stripes(rank_a, a->root, rank_b, b->root);
    return rc;
}

static int exchange_headers(ps_group *g)
{
    PS_TRY(g->comm->table->begin(g->comm, PS_COMM_HEADER, g->send, g->recv));
    return g->comm->table->finish(g->comm, PS_COMM_HEADER);
}

/* Prepares an exchange of headers. If peer >= 0, the exchange is only with rank `peer`. Otherwise it is with all
 * ranks. */
static void parts_of_headers(ps_group *g, header *mine, int peer)
{
    group_clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (peer >= 0 && r != peer) continue;
        g->send[r] = (ps_comm_part){ mine, sizeof *mine };
        g->recv[r] = (ps_comm_part){ &g->heard[r], sizeof *mine };
    }
}

/* Waits until all ranks have compared their headers, then returns rc with its error. All ranks find the same error in
 * these headers. If the script of this rank ended before the other ranks had compared them, the watch would notify
 * these ranks of the end, and some would raise this notice instead of the error. If the wait fails, rc is returned as
 * well. */
static int leave_together(ps_group *g, header *mine, int peer, int rc)
{
    ps_error_kept error;
    ps_error_keep(&error);
    parts_of_headers(g, mine, peer);
    exchange_headers(g);
    return rc < 0 ? ps_error_again(&error) : 0;
}

bool group_is_small(const ps_group *g, place at, int64_t nbytes)
{
    return g->has_small && at == ON_HOST && nbytes > 0 && nbytes <= GROUP_SMALL_NBYTES;
}

bool group_goes_small(const ps_group *g, int op, place at, int64_t nbytes)
{
    return (op == OP_ALL_REDUCE || op == OP_ALL_GATHER) && group_is_small(g, at, nbytes);
}

/* Begins to exchange small bytes. If `all` is set, this rank exchanges them with all ranks. Otherwise it exchanges them
 * only with ranks whose headers announce small bytes. */
static int small_begin(ps_group *g, bool all)
{
    int rank = g->comm->rank;
    group_clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (r == rank || !(all || g->heard[r].small)) continue;
        g->send[r] = (ps_comm_part){ group_small(g, rank), GROUP_SMALL_NBYTES };
        g->recv[r] = (ps_comm_part){ group_small(g, r), GROUP_SMALL_NBYTES };
    }
    return g->comm->table->begin(g->comm, PS_COMM_DATA, g->send, g->recv);
}

/* Ends the exchange of small bytes. The calls of the ranks can differ, and the group remains usable after calls that
 * differ. So no small bytes may be left unread: this rank's next call would receive them. If this rank's call has no
 * small bytes, the function still exchanges GROUP_SMALL_NBYTES bytes with each rank whose call has small bytes. */
static int small_end(ps_group *g, const header *mine)
{
    bool any = mine->small;
    for (int r = 0; r < g->comm->size; r++) any = any || g->heard[r].small;
    if (!any) return 0;
    if (!mine->small) PS_TRY(small_begin(g, false));
    return g->comm->table->finish(g->comm, PS_COMM_DATA);
}

/* Adds the name of the call and the rank to the front of an error that section 2 of the call has raised. */
static int not_agreed(const ps_group *g, const header *mine, const char *where, int rc)
{
    char call[GROUP_CALL_NBYTES];
    ps_error_prefix("%s, call %llu of rank %d%s: ", group_call_name(g, mine->op, call), (unsigned long long)mine->seq,
                    group_world(g, g->comm->rank), where);
    return rc;
}

/* Closes the connections if later messages of the ranks cannot match. Messages cannot match if another rank is in a
 * send or recv, or if it has made a different number of calls. */
static int check_together(ps_group *g, const header *mine)
{
    for (int r = 0; r < g->comm->size; r++) {
        if (g->heard[r].op != OP_SEND && g->heard[r].op != OP_RECV && g->heard[r].seq == mine->seq) continue;
        int rc = differ(g, g->comm->rank, mine, r, &g->heard[r], "the group is closed");
        g->comm->table->hang_up(g->comm);
        return rc;
    }
    return 0;
}

static int check_failures(const ps_group *g, const header *mine)
{
    char call[GROUP_CALL_NBYTES];
    for (int r = 0; r < g->comm->size; r++)
        if (g->heard[r].failed)
            return ps_fail_rank(g->heard[r].failed, group_world(g, r), "%s, call %llu: rank %d could not take part "
                                "(%s); its own message says why", group_call_name(g, mine->op, call),
                                (unsigned long long)mine->seq, group_world(g, r), ps_error_name(g->heard[r].failed));
    return 0;
}

static int check_same(const ps_group *g)
{
    for (int r = 1; r < g->comm->size; r++) {
        const char *what = difference(&g->heard[0], &g->heard[r]);
        if (what) return differ(g, 0, &g->heard[0], r, &g->heard[r], what);
    }
    return 0;
}

/* Performs section 2 of a call while a plan is open. Sets *over to true if section 2 is complete. It is complete if at
 * least one rank makes the planned call, or if an error is returned. */
static int agree_planned(ps_group *g, header *mine, bool *over)
{
    int planned = 0, rc = group_plan_exchange(g, mine, -1, &planned);
    *over = rc < 0 || planned > 0;
    if (rc < 0) return not_agreed(g, mine, "", rc);
    if (!*over) return 0;
    PS_TRY(check_together(g, mine));
    rc = check_failures(g, mine);
    if (rc == 0 && planned < g->comm->size) rc = check_same(g);
    return rc < 0 ? leave_together(g, mine, -1, rc) : 0;
}

static int agree(ps_group *g, header *mine)
{
    ps_comm *comm = g->comm;
    bool over = false;
    if (group_plan_is_open(g)) PS_TRY(agree_planned(g, mine, &over));
    if (over) return 0;
    parts_of_headers(g, mine, -1);
    g->heard[comm->rank] = *mine;
    int rc = comm->table->begin(comm, PS_COMM_HEADER, g->send, g->recv);
    if (rc == 0 && mine->small) rc = small_begin(g, true);
    if (rc == 0) rc = comm->table->finish(comm, PS_COMM_HEADER);
    if (rc < 0) return not_agreed(g, mine, "", rc);
    PS_TRY(check_together(g, mine));
    rc = small_end(g, mine);
    if (rc < 0) return not_agreed(g, mine, ", moving its bytes", rc);
    rc = check_failures(g, mine);
    if (rc == 0) rc = check_same(g);
    return rc < 0 ? leave_together(g, mine, -1, rc) : 0;
}

int group_agree(ps_group *g, header *mine)
{
    ps_watch_enter(g->comm->watch, g->comm->place, op_names[mine->op], mine->seq, -1,
                   mine->op < OP_CHUNK_GATHER);
    int rc = agree(g, mine);
    if (rc < 0 || mine->nbytes == 0) group_done(g);
    return rc;
}

int group_told(ps_group *g, int rc)
{
    const ps_comm *device = g->at[ON_DEVICE].comm;
    if (rc < 0 && device && device->table->told) device->table->told(g->at[ON_DEVICE].comm);
    return rc;
}

void group_done(ps_group *g) { ps_watch_leave(g->comm->watch, g->comm->place); }

static int check_pair(const ps_group *g, const header *mine, int peer)
{
    char call[GROUP_CALL_NBYTES];
    const header *theirs = &g->heard[peer];
    if (theirs->failed)
        return ps_fail_rank(theirs->failed, group_world(g, peer), "%s: rank %d could not take part (%s); its own "
                            "message says why", group_call_name(g, mine->op, call), group_world(g, peer),
                            ps_error_name(theirs->failed));
    if (theirs->dtype != mine->dtype || theirs->nbytes != mine->nbytes || theirs->place != mine->place)
        return differ(g, g->comm->rank, mine, peer, theirs, "type, size and kind of memory must be the same");
    return 0;
}

static int agree_pair(ps_group *g, header *mine, int peer)
{
    char call[GROUP_CALL_NBYTES];
    ps_comm *comm = g->comm;
    header *theirs = &g->heard[peer];
    int planned = 0, rc = group_plan_is_open(g) ? group_plan_exchange(g, mine, peer, &planned) : 0;
    parts_of_headers(g, mine, peer);
    if (rc == 0 && planned == 0) rc = exchange_headers(g);
    if (rc < 0) {
        ps_error_prefix("%s, rank %d with rank %d: ", group_call_name(g, mine->op, call), group_world(g, comm->rank),
                        group_world(g, peer));
        return rc;
    }
    if (theirs->op != (mine->op == OP_SEND ? OP_RECV : OP_SEND) || theirs->seq != mine->seq) {
        rc = differ(g, comm->rank, mine, peer, theirs, "each send wants a recv on the other rank");
        comm->table->hang_up(comm);
        return rc;
    }
    rc = check_pair(g, mine, peer);
    return rc < 0 || mine->failed ? leave_together(g, mine, peer, rc) : 0;
}

int group_agree_pair(ps_group *g, header *mine, int peer)
{
    ps_watch_enter(g->comm->watch, g->comm->place, op_names[mine->op], mine->seq, group_world(g, peer),
                   true);
    int rc = agree_pair(g, mine, peer);
    if (rc < 0 || mine->nbytes == 0) group_done(g);
    return rc;
}

int group_move_begin(ps_group *g, place at, int lane)
{
    ps_comm *comm = g->at[at].comm;
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank) g->bytes_sent += g->send[r].nbytes;
    return comm->table->begin(comm, lane, g->send, g->recv);
}

/* Ends an exchange, so that later operations of the group find the received bytes. On a device, no thread waits here,
 * because the device performs its work in order. */
int group_move_end(ps_group *g, place at, int lane)
{
    ps_comm *comm = g->at[at].comm;
    return comm->table->follow ? comm->table->follow(comm, lane) : comm->table->finish(comm, lane);
}

int group_settle(ps_group *g, place at)
{
    ps_comm *comm = g->at[at].comm;
    return comm && comm->table->settle ? comm->table->settle(comm) : 0;
}

int group_hand_over(ps_group *g, place at, int op, uint64_t call)
{
    ps_comm *comm = g->at[at].comm;
    return comm->table->hand_over ? comm->table->hand_over(comm, op_names[op], call) : 0;
}

int group_catch_up(ps_group *g, place at, int point)
{
    ps_comm *comm = g->at[at].comm;
    return comm->table->catch_up ? comm->table->catch_up(comm, point) : 0;
}

int group_mark(ps_group *g, place at)
{
    ps_comm *comm = g->at[at].comm;
    return comm->table->mark ? comm->table->mark(comm) : 0;
}

int group_after(ps_group *g, place at, int mark)
{
    ps_comm *comm = g->at[at].comm;
    return comm->table->after ? comm->table->after(comm, mark) : 0;
}

int group_after_now(ps_group *g, place at)
{
    int mark = group_mark(g, at);
    return mark < 0 ? mark : group_after(g, at, mark);
}

int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes)
{
    ps_comm *comm = g->at[at].comm;
    if (nbytes == 0 || to == from) return 0;
    if (comm->table->copy) return comm->table->copy(comm, to, from, nbytes);
    memmove(to, from, (size_t)nbytes);
    return 0;
}

void group_clear_parts(ps_group *g)
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

/* Sums integers. They wrap around if they overflow. */
static void sum_integers(int dtype, int size, char *const *at, int64_t first, int64_t n, char *to)
{
    for (int64_t i = first; i < first + n; i++) {
        uint64_t s = 0;
        for (int r = 0; r < size; r++)
            s += dtype == PS_I64 ? ((const uint64_t *)at[r])[i] : ((const uint32_t *)at[r])[i];
        if (dtype == PS_I64) ((uint64_t *)to)[i] = s;
        else ((uint32_t *)to)[i] = (uint32_t)s;
    }
}

/* Is true if the maximum or minimum of `a` and `b` is `a`. `b` is from a later rank than `a`. If there are several
 * NaNs, the first NaN is kept. */
#define STAYS(a, b, max) ((a) != (a) || ((max) ? (a) >= (b) : (a) <= (b)))
#define EXTREME(type, read) \
    for (int64_t i = first; i < first + n; i++) { \
        type best = ((const type *)at[0])[i]; \
        for (int r = 1; r < size; r++) { \
            type next = ((const type *)at[r])[i]; \
            if (!STAYS(read(best), read(next), max)) best = next; \
        } \
        ((type *)to)[i] = best; \
    }
#define ITSELF(x) (x)

/* Computes the maximum or minimum over all ranks. Each element of the result is exactly the value of one rank. */
static void extreme(bool max, int dtype, int size, char *const *at, int64_t first, int64_t n, char *to)
{
    switch (dtype) {
    case PS_F32: EXTREME(float, ITSELF) break;
    case PS_F64: EXTREME(double, ITSELF) break;
    case PS_BF16: EXTREME(uint16_t, ps_bf16_to_f32) break;
    case PS_F16: EXTREME(uint16_t, ps_f16_to_f32) break;
    case PS_I32: EXTREME(int32_t, ITSELF) break;
    case PS_I64: EXTREME(int64_t, ITSELF) break;
    default: EXTREME(uint8_t, ITSELF) break;
    }
}

/* Sums elements first .. first + n - 1 of the addends at[0 .. size - 1], where n <= SUM_BLOCK. There is one addend per
 * rank. `to` may be one of the addends. */
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

static void sum_ranks(int reduce, int dtype, int size, char *const *at, int64_t n, char *to)
{
    if (reduce != PS_REDUCE_SUM) return extreme(reduce == PS_REDUCE_MAX, dtype, size, at, 0, n, to);
    if (!ps_dtype_is_float(dtype)) return sum_integers(dtype, size, at, 0, n, to);
    int64_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
    for (int64_t b = 0; b < blocks; b++)
        sum_block(dtype, size, at, b * SUM_BLOCK, n - b * SUM_BLOCK < SUM_BLOCK ? n - b * SUM_BLOCK : SUM_BLOCK, to);
}

void group_sum_small(ps_group *g, int reduce, int dtype, int64_t nbytes, char *out)
{
    for (int r = 0; r < g->comm->size; r++) g->addends[r] = group_small(g, r);
    sum_ranks(reduce, dtype, g->comm->size, g->addends, nbytes / ps_dtype_bytes(dtype), out);
}

/* Allocates memory for two pieces from every other rank. One piece is received while the other piece is added. */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes)
{
    static const char *const names[] = { "sums", "max", "min" };
    transport *t = &g->at[at];
    int others = g->comm->size - 1;
    *piece_nbytes = part_nbytes;
    if (reduce < PS_REDUCE_SUM || reduce > PS_REDUCE_MIN)
        return ps_fail(PS_EINVAL, "there is no reduction %d", reduce);
    bool adds = ps_dtype_is_float(dtype) || dtype == PS_I32 || dtype == PS_I64;
    if (reduce == PS_REDUCE_SUM && !adds)
        return ps_fail(PS_EUNSUP, "cannot sum %s; only floating-point types, int32 and int64 can be summed",
                       ps_dtype_name(dtype));
    if (t->comm->table->sum && (reduce != PS_REDUCE_SUM || !ps_dtype_is_float(dtype)))
        return ps_fail(PS_EUNSUP, "cannot compute %s of %s in a device's memory; call t:to(\"cpu\") first",
                       names[reduce], ps_dtype_name(dtype));
    if (others == 0) return 0;
    int64_t most = stage_nbytes[at] / (2 * others) & ~(int64_t)4095;
    if (most < 4096) most = 4096;
    if (*piece_nbytes > most) *piece_nbytes = most;
    int64_t want = 2 * *piece_nbytes * others;
    if (want <= t->stage_nbytes) return 0;
    if (t->staging) PS_TRY(group_settle(g, at));             /* sums in progress may use the old memory */
    stage_free(t);
    if (t->comm->table->memory) {
        void *memory = NULL;
        PS_TRY(t->comm->table->memory(t->comm, want, &memory));
        t->staging = memory;
    } else if (!(t->staging = ps_alloc((size_t)want))) {
        return ps_fail_nomem((size_t)want);
    }
    t->stage_nbytes = want;
    return 0;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void group_split(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts)
{
    for (int r = 0; r < g->comm->size; r++) {
        int64_t begin = least(r * part, nbytes);
        parts[r] = (ps_comm_part){ base + begin, least(begin + part, nbytes) - begin };
    }
}

void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers)
{
    for (int r = 0; r < g->comm->size; r++) {
        if (r == g->comm->rank) continue;
        g->bytes_sent += (reduces ? parts[r].nbytes : 0) + (gathers ? parts[g->comm->rank].nbytes : 0);
    }
}

/* A reduction in progress. Each shard is sent in pieces to the rank that reduces it. */
typedef struct reduction {
    place at;
    const ps_comm_part *parts;
    int64_t piece;
} reduction;

static ps_comm_part piece_of(const reduction *d, int r, int64_t k)
{
    int64_t from = least(k * d->piece, d->parts[r].nbytes);
    return (ps_comm_part){ (char *)d->parts[r].address + from, least(d->parts[r].nbytes - from, d->piece) };
}

static int lane_of(int64_t k) { return k & 1 ? PS_COMM_DATA_2 : PS_COMM_DATA; }

/* Returns the address of the addend that rank r contributes to piece k of this rank's shard. */
static char *addend(const ps_group *g, const reduction *d, int64_t k, int r)
{
    int rank = g->comm->rank, others = g->comm->size - 1;
    if (r == rank) return piece_of(d, rank, k).address;
    return g->at[d->at].staging + ((k & 1) * others + r - (r > rank)) * d->piece;
}

static int reduce_begin(ps_group *g, const reduction *d, int64_t k)
{
    int rank = g->comm->rank;
    int64_t nbytes = piece_of(d, rank, k).nbytes;
    group_clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (r == rank) continue;
        g->send[r] = piece_of(d, r, k);
        g->recv[r] = (ps_comm_part){ addend(g, d, k, r), nbytes };
    }
    return group_move_begin(g, d->at, lane_of(k));
}

int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to)
{
    ps_comm *comm = g->at[at].comm;
    if (comm->table->sum) return comm->table->sum(comm, dtype, comm->size, g->addends, n, to);
    sum_ranks(reduce, dtype, comm->size, g->addends, n, to);
    return 0;
}

int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out)
{
    int rank = g->comm->rank, size = g->comm->size;
    reduction d = { at, parts, piece_nbytes };
    int64_t n = 0;
    /* All ranks use the number of pieces of the largest shard, so some pieces of smaller shards are empty. */
    for (int r = 0; r < size; r++) {
        int64_t pieces = parts[r].nbytes == 0 ? 0 : (parts[r].nbytes + piece_nbytes - 1) / piece_nbytes;
        if (pieces > n) n = pieces;
    }
    if (n == 0) return 0;
    if (!out) out = parts[rank].address;
    PS_TRY(reduce_begin(g, &d, 0));
    for (int64_t k = 0; k < n; k++) {
        if (k + 1 < n) PS_TRY(reduce_begin(g, &d, k + 1));
        PS_TRY(group_move_end(g, at, lane_of(k)));
        int64_t nbytes = piece_of(&d, rank, k).nbytes;
        if (nbytes == 0) continue;
        for (int r = 0; r < size; r++) g->addends[r] = addend(g, &d, k, r);
        PS_TRY(group_add_up(g, at, reduce, dtype, nbytes / ps_dtype_bytes(dtype), out + k * piece_nbytes));
    }
    return 0;
}

int group_exchange(ps_group *g, place at)
{
    PS_TRY(group_move_begin(g, at, PS_COMM_DATA));
    return group_move_end(g, at, PS_COMM_DATA);
}

int group_gather(ps_group *g, place at, const ps_comm_part *parts)
{
    int rank = g->comm->rank;
    group_clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (r == rank) continue;
        g->send[r] = parts[rank];
        g->recv[r] = parts[r];
    }
    return group_exchange(g, at);
}
