/* SPDX-License-Identifier: BSD-3-Clause
 * Parts of chunks that two ranks (threads) share. A part that holds gradients takes no part in a gather of its stripe.
 * Then a rank that does not own it has its values nowhere. Also, a part that is freed while its bytes must be sent. */
#include "ranks_check.h"
#include "chunk/policy.h"
#include "zero/shard.h"

#ifndef PS_HAVE_GLOO
int main(void) { return 0; }
#else
enum { NBYTES = 4096 };

static int gathered_beside_gradients(struct member *m, ps_ctx *ctx, ps_group *g)
{
    static const ps_step under_way = { .pass = 3 };
    ps_gather later = { .stripe = 0, .pass = 5, .uses = 1 };
    const ps_gathers expected = { .list = &later, .n = 1 };
    ps_chunk_config config = { .policy = 0, .prefetch = 1 };
    ps_chunks *cs = NULL;
    ps_shard *sh = NULL;
    ps_storage *s[2];
    int32_t part[2];
    char *p;
    if (!expect(m, ps_chunks_new(&under_way, ctx->n_devices, ctx->devices, ctx->mem.plain, &config, NULL, &cs) == 0 &&
                   ps_shard_new(cs, &under_way, ctx->devices, 0, 0, g, &sh) == 0, "opened")) return 0;
    for (int i = 0; i < 2; i++) {                            /* rank i owns part i */
        ps_part_config c = { .owner = i, .dtype = PS_F32, .chunk = -1, .reads = 1, .nbytes = NBYTES };
        if (i == m->rank) expect(m, ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, NBYTES, &c.chunk) == 0, "a chunk");
        expect(m, ps_shard_part(sh, &c, &part[i]) == 0, "a part");
        expect(m, ps_shard_storage_new(sh, part[i], 0, NBYTES, NULL, &s[i]) == 0, "a storage");
    }
    ps_shard_step_begin(sh, &expected);
    expect(m, ps_shard_grads(sh, part[0]) == 0, "gradients take the place of part 0");
    ps_shard_tick(sh);
    expect(m, ps_storage_pin(s[1], 0, PS_READ, (void **)&p) == 0, "part 1 is read");
    ps_storage_unpin(s[1], 0);
    ps_shard_tick(sh);
    int rc = ps_storage_pin(s[0], 0, PS_READ, (void **)&p);
    if (rc == 0) ps_storage_unpin(s[0], 0);
    expect(m, m->rank == 0 ? rc == 0 : rc == PS_ESTATE, "the owner of part 0 can read it, the other rank cannot");
    ps_shard_step_end(sh);
    for (int i = 0; i < 2; i++) ps_shard_storage_undo(sh, s[i]);
    ps_shard_close(sh);
    ps_chunks_close(cs);
    return 0;
}

/* Rank 1 drops its part of a stripe whose gather began early, and which rank 0 joins late. */
static int dropped_on_its_way(struct member *m, ps_ctx *ctx, ps_group *g)
{
    static const ps_step under_way = { .pass = 3 };
    ps_gather list[2] = { { .stripe = 0, .pass = 3, .uses = 5 }, { .stripe = 1, .pass = 3, .uses = 5 } };
    const ps_gathers ahead = { .list = list, .n = 2 };
    ps_chunk_config config = { .policy = 0, .prefetch = 1, .stress = true };  /* memory that is freed is overwritten */
    ps_chunks *cs = NULL;
    ps_shard *sh = NULL;
    ps_storage *s[2][2];                   /* indexed by stripe and rank */
    int32_t part;
    char *p;
    if (!expect(m, ps_chunks_new(&under_way, ctx->n_devices, ctx->devices, ctx->mem.plain, &config, NULL, &cs) == 0 &&
                   ps_shard_new(cs, &under_way, ctx->devices, 0, 0, g, &sh) == 0, "opened")) return 0;
    for (int k = 0; k < 4; k++) {
        int stripe = k / 2, owner = k % 2;
        ps_part_config c = { .owner = owner, .dtype = PS_F32, .chunk = -1, .stripe = stripe, .reads = 1,
                             .nbytes = NBYTES };
        if (owner == m->rank) expect(m, ps_chunk_new(cs, PS_KIND_PARAM, 0, k, PS_F32, NBYTES, &c.chunk) == 0, "chunk");
        expect(m, ps_shard_part(sh, &c, &part) == 0, "a part");
        expect(m, ps_shard_storage_new(sh, part, 0, NBYTES, NULL, &s[stripe][owner]) == 0, "a storage");
    }
    ps_storage *own = ps_shard_own(sh, s[1][m->rank]);
    expect(m, ps_storage_pin(own, 0, PS_WRITE, (void **)&p) == 0, "its own bytes");
    memset(p, 7 + m->rank, NBYTES);
    ps_storage_unpin(own, 0);
    ps_shard_step_begin(sh, m->rank == 1 ? &ahead : NULL);
    expect(m, ps_storage_pin(s[0][0], 0, PS_READ, (void **)&p) == 0, "stripe 0");
    ps_storage_unpin(s[0][0], 0);
    if (m->rank == 0) {
        usleep(200000);
        expect(m, ps_storage_pin(s[1][1], 0, PS_READ, (void **)&p) == 0 && p[0] == 8 && p[NBYTES - 1] == 8, "stripe 1");
        ps_storage_unpin(s[1][1], 0);
    }
    ps_shard_storage_undo(sh, s[1][1]);
    ps_shard_storage_undo(sh, s[1][0]);
    ps_shard_step_end(sh);
    for (int r = 0; r < 2; r++) ps_shard_storage_undo(sh, s[0][r]);
    ps_shard_close(sh);
    ps_chunks_close(cs);
    return 0;
}

int main(void)
{
    with_group_of(2, gathered_beside_gradients);
    with_group_of(2, dropped_on_its_way);
    return end_checks();
}
#endif
