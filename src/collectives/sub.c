/* SPDX-License-Identifier: BSD-3-Clause
 * This file divides a group along an axis of the mesh (ps.h). The new groups share the connections and the watch of the
 * old group. Each message contains the id of its group. The id of a new group is higher than the ids of all earlier
 * groups of its ranks. Therefore two groups that have two ranks in common never have the same id. */
#include <stdatomic.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "collectives/collectives.h"
#include "tensor/tensor.h"

/* next_id: next id that this process has not used; the group of all ranks has id 0 */
static atomic_int next_id = 1;

/* A request of one rank of the parent for a new group. */
typedef struct wish {
    /* id: first id that this rank has not used
     * n: number of ranks in the requested group */
    int32_t id, n;
    char axis[PS_AXIS_NBYTES];
    int32_t ranks[];                       /* [size of the parent]; the first n entries are used */
} wish;

static size_t wish_nbytes(const ps_group *parent)
{
    return sizeof(wish) + (size_t)parent->comm->size * sizeof(int32_t);
}

static const wish *wish_of(const ps_group *parent, const char *all, int r)
{
    return (const wish *)(const void *)(all + (size_t)r * wish_nbytes(parent));
}

static int check(const ps_group *parent, int n, const int32_t *ranks, const char *axis)
{
    int size = parent->comm->size;
    size_t length = strlen(axis);
    bool mine = false;
    if (length < 1 || length >= PS_AXIS_NBYTES ||
        strspn(axis, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != length)
        return ps_fail(PS_EINVAL, "'%.40s' cannot be the name of an axis; a name has 1 to %d letters, digits and '_'",
                       axis,
                       PS_AXIS_NBYTES - 1);
    if (n < 1 || n > size) return ps_fail(PS_EINVAL, "group %s: %d ranks were requested of %d", axis, n, size);
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= size)
            return ps_fail(PS_EINVAL, "group %s: there is no rank %d in a group of %d ranks", axis, ranks[i], size);
        for (int j = 0; j < i; j++)
            if (ranks[j] == ranks[i]) return ps_fail(PS_EINVAL, "group %s: rank %d is in the list twice",
                                                     axis, ranks[i]);
        mine = mine || ranks[i] == parent->comm->rank;
    }
    if (mine) return 0;
    return ps_fail(PS_EINVAL, "group %s: rank %d passed a list without itself", axis, parent->comm->rank);
}

/* Checks that all ranks of a new group request the same group. If requests differ, each rank finds the same first
 * difference. */
static int compare(const ps_group *parent, const char *all)
{
    for (int r = 0; r < parent->comm->size; r++) {
        const wish *a = wish_of(parent, all, r);
        for (int i = 0; i < a->n; i++) {
            const wish *b = wish_of(parent, all, a->ranks[i]);
            bool same = a->n == b->n && !strcmp(a->axis, b->axis) &&
                        !memcmp(a->ranks, b->ranks, (size_t)a->n * sizeof *a->ranks);
            if (!same)
                return ps_fail(PS_EINVAL, "rank %d makes a group %s of %d ranks, rank %d among them, which makes a "
                               "group %s of %d ranks, or with other ranks or in another order; all ranks of a group "
                               "must pass the same list",
                               group_world(parent, r), a->axis, a->n, group_world(parent, a->ranks[i]), b->axis, b->n);
        }
    }
    return 0;
}

/* Exchanges the requests of all ranks of the parent.
 * all: [size of the parent] receives the requests, of wish_nbytes bytes each
 * rc: result of this rank's checks */
static int tell(ps_group *parent, const wish *mine, char *all, int rc)
{
    int64_t nbytes = (int64_t)wish_nbytes(parent);
    PS_TRY(group_agree_bytes(parent, OP_SPLIT, ON_HOST, PS_U8, nbytes, 0, rc));
    group_split(parent, all, nbytes * parent->comm->size, nbytes, parent->parts);
    memcpy(parent->parts[parent->comm->rank].address, mine, (size_t)nbytes);
    return group_moved(parent, OP_SPLIT, ON_HOST, group_gather(parent, ON_HOST, parent->parts));
}

/* Returns an id for the new groups. The id is higher than the ids of all existing groups of the parent's ranks. */
static int agree_id(const ps_group *parent, const char *all)
{
    int id = 0;
    for (int r = 0; r < parent->comm->size; r++) {
        int theirs = wish_of(parent, all, r)->id;
        if (theirs > id) id = theirs;
    }
    int seen = atomic_load(&next_id);
    while (seen <= id && !atomic_compare_exchange_weak(&next_id, &seen, id + 1)) { }
    return id;
}

int ps_group_split(ps_group *parent, int n, const int32_t *ranks, const char *axis, ps_group **out)
{
    size_t nbytes = wish_nbytes(parent);
    ps_comm *comm = NULL;
    ps_group *g = NULL;
    char *all = ps_alloc0(nbytes * ((size_t)parent->comm->size + 1));
    wish *mine = all ? (wish *)(void *)(all + nbytes * (size_t)parent->comm->size) : NULL;
    int rc = all ? check(parent, n, ranks, axis) : ps_fail_nomem(nbytes * ((size_t)parent->comm->size + 1));
    if (rc == 0 && !parent->ctx)
        rc = ps_fail(PS_EINVAL, "a process cannot have more than %d groups over the same connections; close one",
                     PS_MAX_GROUPS);
    if (rc == 0) {
        mine->id = atomic_load(&next_id);
        mine->n = n;
        memcpy(mine->axis, axis, strlen(axis));
        memcpy(mine->ranks, ranks, (size_t)n * sizeof *ranks);
    }
    rc = tell(parent, mine, all, rc);
    if (rc == 0 && !parent->comm->pretends) rc = compare(parent, all);   /* simulated ranks send no requests */
    if (rc < 0) {                          /* this error is the same on all ranks */
        ps_free(all);
        return rc;
    }
    int id = agree_id(parent, all);
    ps_free(all);
    rc = parent->comm->table->cut(parent->comm, n, ranks, axis, id, &comm);
    if (rc == 0) rc = group_new(parent->ctx, comm, &g);
    /* The ranks tell each other whether they could make their new groups. */
    rc = group_agree_bytes(parent, OP_SPLIT, ON_HOST, 0, 0, 0, rc);
    if (rc < 0) {
        ps_group_close(g);
        return rc;
    }
    ps_group_devices(g, parent->by_host, parent->by_device);
    *out = g;
    return 0;
}
