/* SPDX-License-Identifier: BSD-3-Clause
 * This file connects the devices of the ranks, with one collective call per group. If one rank cannot connect its
 * device, no device is connected, and the group continues to send only host memory. If the device's library fails while
 * it connects the devices, the connections of the group are closed. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "collectives/collectives.h"
#include "tensor/tensor.h"

/* Returns 0 if this rank can connect the device. Otherwise returns the error that prevents it. */
static int could(const ps_group *g, ps_backend *be)
{
    if (g->by_host) return ps_fail(PS_EUNSUP, "the group was made with backend = \"gloo\", which sends host memory "
                                              "only");
    if (be->host_carries) return 0;
    if (!be->wire)
        return ps_fail(PS_EUNSUP, "this build cannot connect device %s to other ranks; t:to(\"cpu\") sends its tensors "
                                  "through the host", be->name);
    if (g->comm->size > be->wire->most_ranks)
        return ps_fail(PS_EUNSUP, "cannot connect %d ranks on device %s: at most %d are supported", g->comm->size,
                       be->name, be->wire->most_ranks);
    int rc = be->wire->load(be);
    return rc == PS_EUNSUP && g->comm->size == 1 && !g->by_device ? 0 : rc;     /* a single rank needs no library */
}

/* Checks that each rank has a device of its own. All ranks get the same result. */
static int check_apart(ps_group *g, ps_backend *be)
{
    int size = g->comm->size;
    char mine[PS_WIRE_NAME_NBYTES] = { 0 }, *all = ps_alloc0((size_t)size * sizeof mine);
    int rc = all ? be->wire->device_name(be, mine) : ps_fail_nomem((size_t)size * sizeof mine);
    rc = group_all_gather(g, ON_HOST, PS_U8, mine, sizeof mine, all, rc);
    for (int a = 0; rc == 0 && a < size; a++)
        for (int b = a + 1; rc == 0 && b < size; b++)
            if (!memcmp(all + (size_t)a * sizeof mine, all + (size_t)b * sizeof mine, sizeof mine))
                rc = ps_fail(PS_EUNSUP, "ranks %d and %d have the same device, %.*s, which %s cannot connect; give "
                                        "each rank a device of its own (is it in CUDA_VISIBLE_DEVICES?)",
                                        group_world(g, a),
                             group_world(g, b), (int)sizeof mine - 1,
                             all + (size_t)a * sizeof mine, be->wire->name);
    ps_free(all);
    return rc;
}

static int connect_wire(ps_group *g, ps_backend *be)
{
    char id[PS_WIRE_ID_NBYTES] = { 0 };
    bool alone = g->comm->size == 1 && be->wire->load(be) < 0;
    if (!alone) PS_TRY(check_apart(g, be));
    int rc = alone || g->comm->rank != 0 ? 0 : be->wire->new_id(be, id);
    PS_TRY(group_broadcast(g, ON_HOST, PS_U8, id, sizeof id, 0, rc));
    rc = ps_comm_wire(be, alone ? NULL : id, g->comm, &g->at[ON_DEVICE].comm);
    if (rc < 0) ps_error_prefix("connecting the devices of %d ranks: ", g->comm->size);
    if (rc < 0) g->comm->table->hang_up(g->comm);      /* wakes ranks that wait in the library for this rank */
    return rc;
}

int ps_group_connect(ps_group *g, ps_ctx *ctx, int device)
{
    if (device < 0 || device >= ctx->n_devices) return ps_fail(PS_EINVAL, "there is no device %d", device);
    ps_backend *be = ctx->devices[device];
    if (be->is_host || g->device == device) return 0;
    if (be->no_data) return ps_fail(PS_EUNSUP, "the tensors of device %s have no bytes that could be sent to other "
                                               "ranks", be->name);
    int rc = g->device >= 0 ? ps_fail(PS_ESTATE, "this group already sends memory of device %s; a group can connect "
                                      "only one device", ctx->devices[g->device]->name) : could(g, be);
    PS_TRY(group_agree_bytes(g, OP_CONNECT, ON_DEVICE, 0, 0, be->host_carries, rc));
    if (be->host_carries) g->at[ON_DEVICE].comm = g->comm;
    else PS_TRY(connect_wire(g, be));
    g->device = device;
    g->carrier = be->host_carries ? g->comm->table->name : be->wire->name;
    return 0;
}

int group_place(ps_group *g, ps_ctx *ctx, int device, place *out)
{
    *out = ctx->devices[device]->is_host ? ON_HOST : ON_DEVICE;
    if (*out == ON_HOST || g->device == device) return 0;
    int rc = ps_group_connect(g, ctx, device);
    if (rc < 0) ps_error_prefix("a tensor is on device %s: ", ctx->devices[device]->name);
    return rc;
}

void ps_group_devices(ps_group *g, int never, int must)
{
    g->by_host = never != 0;
    g->by_device = must != 0;
}

const char *ps_group_carrier(const ps_group *g) { return g->carrier ? g->carrier : ""; }
